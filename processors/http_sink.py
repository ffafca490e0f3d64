"""A request for each message: as a sink (a webhook outbox, an API), or as a stream whose answers are messages.

    orders = Requests("https://api.example.com/orders", headers={"Authorization": token})
    graph.add(orders.sink("orders", concurrency=8))

    pages = Requests(lambda message: message["url"], method="GET", rate="2/s")
    graph.add(pages.stream("urls", "pages"))

**Once.** The engine commits a message after its request has succeeded. A process that is killed between the two sends
the request again: it is on the wire at least once. Each repetition has the same ``Idempotency-Key``, which no other
message has: the delivery hash of the message. So a server that honours the key takes each message once. A server that
ignores it may take one several times. Keys must be kept by the server for as long as this graph may be down.

A redriven message (``cues redrive``) is a new delivery with a new key, because servers keep the refusal of a key too.
If a message may be redriven after its request had an effect unseen (every answer was lost), give ``key=``, an identity
of your own.

**Failures.** After a status of ``retry_on``, a broken connection and a timeout the server is away: the processor waits
for it, as ``outage=`` says, by default for ever, and at least for its ``Retry-After`` (at most ``retry_after_s_max``).
No other message is tried meanwhile. If ``url`` is a function, each message may have another server, and one that is
away must not hold the others: then a message has ``attempts=8``, and fails after the last. With ``attempts=`` that is
so for a fixed URL too. Every other status than 2xx fails the message at once, and so does a message of which no request
can be made. A failed message is on the error queue, with ``status``, ``url`` and the beginning of the ``body`` in its
context. Redirects are failures unless ``redirects=`` allows them.

Not guaranteed: the order of requests with ``concurrency=`` above 1, or after failed messages. A server that answers 2xx
before it has taken the message may lose it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import cues
from cues import jsontext
from cues.arguments import check_number
from cues.errors import CheckpointError, InvalidArgument
from cues.overrides import override
from cues.processors import FREE, checks, http, takes

if TYPE_CHECKING:
    import httpx

Message = dict[str, Any]

ATTEMPTS: Final = 8
"""Requests for a message if ``url`` is a function: with the waits between them about one minute."""

_DRAINED_BYTES_MAX: Final = 1 << 16
"""Bytes of an answer that a sink reads, so that the connection can be used again. A longer one costs a connection."""


@takes(FREE)
class Requests(checks.Unshared):
    """A request for each message; see the module. :meth:`sink` and :meth:`stream` declare it.

    ``url``          a URL, or a function of the message
    ``method``       a method, or a function of the message
    ``headers``      a dict, or a function of the message, such as :class:`cues.processors.http.OAuth`
    ``json``         a function of the message, whose result is the body as JSON; None: the message itself
    ``body``         a function of the message that returns the body, bytes or text, in place of ``json``. A GET or a
                     HEAD has a body only with ``json`` or ``body``
    ``key``          a field, or a function of the message: the idempotency key; None: the delivery hash
    ``key_header``   the name of its header, which GET and HEAD do not have
    ``sign``         a :class:`cues.processors.http.Signature` with which the body is signed
    ``accept``       statuses besides 2xx that are a success, such as ``(409,)`` of an API that knows the message
    ``retry_on``     statuses that are tried again; connection errors and timeouts always are
    ``attempts``     requests for a message, all counted; the waits are 0.5 s, 1 s, 2 s, … up to 60 s, less jitter.
                     None: the processor waits until the server is there again; 8 if ``url`` is a function
    ``retry_after_s_max``   the longest wait that a server can ask for
    ``timeout_s``    seconds for a request and its whole answer
    ``rate``         requests a second, or ``"10/s"``, ``"90/m"``, ``"500/h"``: at equal distances, with repetitions, in
                     this process
    ``redirects``    redirects that a GET or HEAD follows; ``Authorization`` is not sent to another host, other headers
                     are
    ``answer``       of a stream: a function of message and :class:`cues.processors.http.Answer` that returns what a
                     stream returns; None: the message with ``status``, ``url``, ``headers`` and ``body`` (bytes)
    ``body_bytes_max``      of a stream: a longer answer fails the message
    ``client``       a function that makes an ``httpx.AsyncClient``, for proxies, certificates and the like

    Kind: sink or stream
    Needs: extra `http`
    Guarantee: a request at least once, always with one key: exactly once if the server honours `Idempotency-Key`; answers of a stream are on the queue once
    Mechanism: delivery hash as the key; the message is committed after the answer
    """  # noqa: E501

    def __init__(
        self,
        url: str | Callable[[Message], str],
        method: str | Callable[[Message], str] = "POST",
        *,
        headers: Mapping[str, str] | Callable[[Message], Mapping[str, str]] | None = None,
        json: Callable[[Message], Any] | None = None,
        body: Callable[[Message], bytes | str] | None = None,
        key: str | Callable[[Message], str] | None = None,
        key_header: str = "Idempotency-Key",
        sign: http.Signature | None = None,
        accept: Sequence[int] = (),
        retry_on: Sequence[int] = http.RETRY_ON,
        attempts: int | None = None,
        retry_after_s_max: float = http.RETRY_AFTER_S_MAX,
        timeout_s: float = 30.0,
        rate: float | str | None = None,
        redirects: int = 0,
        answer: Callable[[Message, http.Answer], Any] | None = None,
        body_bytes_max: int = http.BODY_BYTES_MAX,
        client: Callable[[], httpx.AsyncClient] | None = None,
    ) -> None:
        self._url, self._method, self._headers = url, method, http.check_headers(headers)
        self._json, self._body, self._key, self._key_header, self._sign = json, body, key, key_header, sign
        self._terms = http.Terms(
            timeout_s,
            redirects,
            body_bytes_max,
            http.check_statuses("accept", accept),
            http.check_statuses("retry_on", retry_on),
            retry_after_s_max,
        ).check()
        self._attempts = ATTEMPTS if attempts is None and callable(url) else attempts
        self._answer = answer
        self._rate = None if rate is None else http.Rate(rate)
        self._make_client = client
        self._reset()
        if json is not None and body is not None:
            raise InvalidArgument("json= and body= are both given.", "give one of them.")
        if attempts is not None:
            check_number("attempts", attempts, 1, whole=True)
        if client is None and not callable(url):
            http.check_url(url)

    @override
    def _reset(self) -> None:
        self._clients: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()

    @property
    def retries(self) -> cues.Retry | int:
        """The repetitions of a request; :meth:`sink` and :meth:`stream` give them to the engine, which waits."""
        if self._attempts is None:
            return 0
        return cues.Retry(self._attempts, backoff_s=0.5, max_s=60.0, on=http.TryLater, jitter=0.5)

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that sends the messages of ``inputs``; ``options`` are those of ``cues.Sink``."""
        http.package("httpx")
        return cues.Sink(self.send, inputs, **{"id": "send", "retries": self.retries, **options})

    def stream(self, inputs: Any, outputs: Any, **options: Any) -> cues.Stream:
        """Return a stream that writes the answers to ``outputs``; ``options`` are those of ``cues.Stream``."""
        http.package("httpx")
        return cues.Stream(
            self.fetch, inputs, outputs, **{"id": "fetch", "retries": self.retries, "side_effects": True, **options}
        )

    @takes(FREE)
    async def send(self, message: Message, process: cues.Process) -> None:
        """Send the request of a message: the function of :meth:`sink`.

        Raises :class:`cues.processors.http.TryLater` and :class:`cues.processors.http.RequestFailed`.
        """
        await self._exchange(message, process, self._terms._replace(body_bytes_max=_DRAINED_BYTES_MAX), whole=False)

    @takes(FREE)
    async def fetch(self, message: Message, process: cues.Process) -> Any:
        """Send the request of a message, and return its answer: the function of :meth:`stream`. Raises as ``send``."""
        answer = await self._exchange(message, process, self._terms, whole=True)
        if self._answer is not None:
            return self._answer(message, answer)
        return {**message, **answer._asdict()}

    async def _exchange(self, message: Message, process: cues.Process, terms: http.Terms, whole: bool) -> http.Answer:
        client = await self._client()
        for last in (False, True):
            request = self._request(client, message, process)
            if self._rate is not None:
                await asyncio.sleep(self._rate.wait_s())
            try:
                return await http.exchange(client, request, terms, whole=whole)
            except http.RequestFailed as error:
                if last or not http.renewed(self._headers, error.status, request.headers):
                    raise
        raise AssertionError

    def _request(self, client: Any, message: Message, process: cues.Process) -> httpx.Request:
        method = (self._method(message) if callable(self._method) else self._method).upper()
        url = self._url(message) if callable(self._url) else self._url
        headers = dict((self._headers(message) if callable(self._headers) else self._headers) or {})
        content: bytes | str | None = None
        if self._body is not None:
            content = self._body(message)
        elif self._json is not None or method not in http.SAFE:
            content = as_json(message if self._json is None else self._json(message))
            headers = {"Content-Type": "application/json", **headers}
        key = process.delivery_hash
        if self._key is not None:
            key = str(self._key(message) if callable(self._key) else message[self._key])
        if method not in http.SAFE:
            headers[self._key_header] = key
        if self._sign is not None:
            content = content.encode() if isinstance(content, str) else content or b""
            headers.update(self._sign.headers(content, key))
        request: httpx.Request = client.build_request(method, url, headers=headers, content=content)
        return request

    async def _client(self) -> Any:
        """Return the client of this event loop; it is closed with the loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # A loop that ends closes its asynchronous generators: so the connections are closed on their loop.
            held = self._held()
            self._clients[loop] = await anext(held), held
        return self._clients[loop][0]

    def __cues_prepare__(self) -> None:
        http.package("httpx")

    async def _held(self) -> AsyncGenerator[httpx.AsyncClient, None]:
        try:
            client = (self._make_client or self._terms.client)()
        except Exception as error:
            raise CheckpointError(
                f"The HTTP client cannot be made: {type(error).__name__}: {error}", "correct client=.", where="client="
            ) from error
        try:
            yield client
        finally:
            self._clients.pop(asyncio.get_running_loop(), None)
            await client.aclose()


def as_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8; times are in ISO 8601, decimals and UUIDs are text.

    The same value gives the same bytes: servers compare a repeated body with the first one. Raises TypeError for bytes
    and other types, and ValueError for NaN and infinity.
    """
    return jsontext.encode(value, compact=True).encode()
