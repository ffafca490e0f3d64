"""A source that is a server: requests of others become messages, and are answered when the messages are durable.

    hooks = Webhook(port=8080, path="/github", id="X-GitHub-Delivery", verify=http.Signature(secret, "github"))
    graph.add(cues.Source("events", hooks))

The source runs its own server, in a thread, while the graph runs: ``cues run graph.py``. A request goes this way:

    1. refuse    403 a page in a browser, without ``verify=``: any site could send events to this machine;
                 404 another path, 405 another method, 503 busy or ending, 413 a large body, 408 a slow one
    2. verify    a reply of one's own (``reply=``); 401 a wrong signature; 400 a body that is not what it should be, or
                 that the queue cannot take
    3. yield     the message, with a position that has its number and the ids of the last events
    4. commit    by the engine: message and position at once
    5. answer    200, after the commit

A sender that gets no 2xx sends the event again. So no event is lost, wherever this process is killed: either it was
answered after its commit, or it is sent again. With the durability ``"disk"`` of a store an answered event survives a
loss of power; with ``"process"`` it survives the process.

**Once.** An event whose id is among those of the last ``remember`` events is answered 200, after their commit, and is
no message again. The position has 8 bytes of a hash for each id, and each commit writes it, so ``remember`` is small by
default. For repetitions that come hours later, add a stream that drops them by a field of the message:
``graph.stream("events", "unique")(shape.dedupe("id", within="3d"))``. Without ``id=`` each request is a message.

**Busy.** At most ``pending_max`` events wait for their commit; the next is answered 503 with ``Retry-After``. So a
queue with ``max_lag=`` makes senders wait. An event that is not committed within ``answer_s`` is answered 503 too,
although it may be committed later; its repetition is then recognised by its id.

**Ending.** When the graph drains, new requests get 503, those that are messages are committed and answered, and the
server ends. One server has one address: a second one is refused.

Not guaranteed: the order of events that arrive at once; anything about TLS and floods of connections (put a proxy in
front of it, as before every server that strangers reach). It serves until the graph drains, so
``testing.run_until_idle`` does not end with it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from cues import jsontext
from cues.arguments import check_number
from cues.errors import CuesError, InvalidArgument
from cues.overrides import override
from cues.processors import SOURCE, checks, foreign, http, takes
from cues.processors import serving as guards
from cues.processors.source_server import ServedSource, SourceServer

REMEMBER: Final = 200
"""Ids of events in the position by default: the position then has less than 2,000 bytes."""

REMEMBER_MAX: Final = 20_000
"""Each commit writes the position three times, which is then half a megabyte."""

_VERSION: Final = 1
_CONNECTIONS_PER_EVENT: Final = 2
"""Connections for each event of ``pending_max``; more are answered 503 by the server itself. So at most three times
``pending_max`` bodies are in memory."""

_log = logging.getLogger("cues.processors")

Position = list[Any]
Message = dict[str, Any]


class Hook(NamedTuple):
    """A request. The names of ``headers`` are in small letters; ``id`` is that of the event, or None."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    id: str | None = None

    def json(self) -> Any:
        """The body as JSON. Raises ValueError if it is none."""
        return jsontext.decode(self.body)

    def form(self) -> dict[str, str]:
        """The fields of a body that is a form (``application/x-www-form-urlencoded``); of equal names the last one."""
        text = self.body.decode()
        return dict(parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=10_000))


def _are_signatures(given: Sequence[Any]) -> bool:
    return len(given) > 0 and all(isinstance(each, http.Signature) for each in given)


class _Event(NamedTuple):
    number: int
    identity: bytes
    message: Any
    """A message; or several, as ``process.check`` returned them."""


def _object(hook: Hook) -> Message:
    message = hook.json()
    if not isinstance(message, dict):
        raise ValueError(f"a JSON object was expected, and it is {type(message).__name__}")
    return message


@takes(SOURCE)
class Webhook(ServedSource):
    """A source that is a server; see the module. Give it to ``cues.Source(id, Webhook(...))``.

    ``port``         0: any free one; :attr:`url` has it
    ``host``         the address to listen on; other machines reach ``"0.0.0.0"``
    ``path``         the only path that is served
    ``id``           a header, or a function of the :class:`Hook`: the identity of the event, which its repetitions have
                     too. A request without the header is refused with 400
    ``message``      a function of the :class:`Hook` that returns the message, a list of messages, which are written
                     together, or None for a request that is none; by default the body, which is a JSON object. A
                     ValueError, KeyError or TypeError refuses the request with 400, and so does a message that the
                     queue cannot take (its schema, key or size)
    ``reply``        a function of the :class:`Hook`, called before ``verify``: text, bytes or a dict (as JSON) is
                     answered at once with 200, and the request is not an event; None: it is one. For the challenges with
                     which a sender asks for the address
    ``reserved``     ``"q/type"`` or ``"q/topics"``, which messages may set then (:mod:`cues.processors.foreign`)
    ``verify``       a :class:`cues.processors.http.Signature`, or several of which one must be right; or a function of
                     the :class:`Hook` that returns whether to accept it. Without it, requests of pages in a browser
                     (``Origin``, ``Sec-Fetch-Site``) are refused with 403
    ``methods``      the methods that are served
    ``remember``     ids of events in the position, 8 bytes each
    ``pending_max``  events that wait for their commit
    ``body_bytes_max``   a larger body is refused with 413
    ``body_s``       seconds in which a request must arrive whole
    ``answer_s``     seconds in which its commit must follow

    Kind: source
    Needs: extra `http`
    Guarantee: at least once for events that are answered 2xx; exactly once for events with an id, within the last `remember` ones
    Mechanism: answer after the commit; position with the last ids, committed with the messages
    """  # noqa: E501

    def __init__(
        self,
        port: int = 8080,
        path: str = "/",
        *,
        host: str = "127.0.0.1",
        id: str | Callable[[Hook], str] | None = None,
        message: Callable[[Hook], Message | list[Message] | None] = _object,
        reply: Callable[[Hook], str | bytes | Message | None] | None = None,
        verify: http.Signature | Sequence[http.Signature] | Callable[[Hook], bool] | None = None,
        methods: Sequence[str] = ("POST",),
        remember: int = REMEMBER,
        pending_max: int = 100,
        body_bytes_max: int = 1 << 20,
        body_s: float = 10.0,
        answer_s: float = 20.0,
        reserved: Sequence[str] = (),
    ) -> None:
        self.may = foreign.allowed(reserved)
        self.port, self.path, self.host = port, path, host
        self.methods = tuple(methods) if isinstance(methods, Sequence) else ()
        self.id, self.message, self.reply, self.verify = id, message, reply, verify
        self.remember, self.pending_max, self.body_bytes_max = remember, pending_max, body_bytes_max
        self.body_s, self.answer_s = body_s, answer_s
        self.__name__ = "webhook"
        named = self.methods and all(isinstance(method, str) for method in self.methods)
        if not isinstance(path, str) or not path.startswith("/") or not named:
            raise InvalidArgument(f"path={path!r}, methods={methods!r}.", "give a path such as '/hooks', and methods.")
        if not (id is None or callable(id) or (isinstance(id, str) and id)):
            raise InvalidArgument(f"id={id!r:.60}.", "give the name of a header, or a function of the Hook.")
        for name, function in {"message": message, "reply": reply or _object}.items():
            if not callable(function):
                raise InvalidArgument(f"{name}={function!r:.60}.", "give a function of the Hook.")
        signatures = verify if isinstance(verify, (list, tuple)) else [verify]
        if verify is not None and not callable(verify) and not _are_signatures(signatures):
            hint = "give an http.Signature, a list of them, or a function of the Hook."
            raise InvalidArgument(f"verify= is {type(verify).__name__}.", hint)  # its value may be a secret
        check_number("remember", remember, 0, REMEMBER_MAX, whole=True)
        check_number("pending_max", pending_max, 1, whole=True)
        check_number("body_bytes_max", body_bytes_max, 1, whole=True)
        self._check_server()

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` for each event, until the graph drains."""
        checks.position_of(position, "cues.processors.webhook", 3)
        self._begin(process)
        _, number, ids = position or (_VERSION, 0, b"")
        self._serving = serving = Serving(self, number, ids, getattr(process, "check", None))
        try:
            for event in serving.requests(process):
                if event.identity and self.remember:
                    ids = (ids + event.identity)[-8 * self.remember :]
                serving.yielded = event.number
                yield [_VERSION, event.number, ids], event.message
        finally:
            serving.close()


class Serving(SourceServer):
    """The server of one start of a webhook."""

    def __init__(self, hook: Webhook, number: int, ids: bytes, check: Callable[[Any], Any] | None = None) -> None:
        self._hook, self._check = hook, check
        self._known = {ids[at : at + 8]: number for at in range(0, len(ids), 8)}
        """The number of each event by its id, oldest first."""
        super().__init__(hook, number, hook.pending_max * _CONNECTIONS_PER_EVENT)

    @override
    async def answer(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, PlainTextResponse

        def answered(status: int, **facts: Any) -> Any:
            headers = {"Retry-After": "1"} if status == 503 else {}
            if status in (408, 413) or self.ending:
                headers["Connection"] = "close"
            return guards.said(status, headers, facts)

        if self._hook.verify is None and guards.from_browser(request.headers):
            return answered(403, error="a page in a browser sent this request, and the webhook has no verify=")
        if self.ending or self._busy:
            return answered(503, error="ending" if self.ending else "busy")
        try:
            body = await self.body(request, self._hook.body_bytes_max, self._hook.body_s)
        except guards.Refused as refused:
            return answered(refused.status, error=str(refused))
        headers = {name.lower(): value for name, value in request.headers.items()}
        hook = Hook(request.method, request.url.path, dict(request.query_params), headers, body)
        try:
            plain = hook._replace(body=guards.decoded(body, headers, self._hook.body_bytes_max))
            reply = None if self._hook.reply is None else self._hook.reply(plain)
            if reply is not None:
                return PlainTextResponse(reply) if isinstance(reply, (str, bytes)) else JSONResponse(reply)
            problem = self._unverified(hook)
            if problem:
                return answered(401, error=problem)
            identity = self._identity(plain)
            message = self._message(plain._replace(id=identity))
        except guards.Refused as refused:
            return answered(refused.status, error=str(refused))
        except CuesError as error:
            return answered(400, error=error.message[:500])
        except (ValueError, KeyError, TypeError) as error:
            return answered(400, error=f"{type(error).__name__}: {error}"[:500])
        if message is None:
            return answered(200, event=identity)
        number = self._take(identity, message)
        if number is None:
            return answered(503, error="busy")
        if await self.wait(number):
            return answered(200, event=identity)
        return answered(503, error="the event is not committed yet")

    def _unverified(self, hook: Hook) -> str | None:
        verify = self._hook.verify
        if verify is None:
            return None
        if callable(verify):
            return None if verify(hook) else "the request was not accepted"
        signatures = [verify] if isinstance(verify, http.Signature) else verify
        problems = [signature.problem(hook.headers, hook.body) for signature in signatures]
        return None if None in problems else problems[-1]

    def _identity(self, hook: Hook) -> str | None:
        of = self._hook.id
        if of is None:
            return None
        value = str(of(hook)) if callable(of) else hook.headers.get(of.lower(), "")
        if not value:
            raise ValueError(f"the header {of} is missing" if isinstance(of, str) else "the event has no id")
        return value

    def _message(self, hook: Hook) -> Any:
        """Return the message of a request, several, or None if it has none.

        Raises the error for which it cannot be a message, before the request is answered 200.
        """
        given = self._hook.message(hook)
        if given is None or given == []:
            return None
        for message in given if isinstance(given, list) else [given]:
            foreign.check(message, self._hook.may)
        return given if self._check is None else self._check(given)

    @property
    def _busy(self) -> bool:
        return self.number - self.committed_number >= self._hook.pending_max

    def _take(self, identity: str | None, message: Any) -> int | None:
        """Return the number of the event; a new one unless its id is known, None if there is no room."""
        key = b""
        if identity is not None and self._hook.remember:
            key = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            if key in self._known:
                return self._known[key]
        if self.ending or self._busy:
            return None
        self.number += 1
        if key:
            self._known[key] = self.number
            if len(self._known) > self._hook.remember:
                del self._known[next(iter(self._known))]
        self.events.put(_Event(self.number, key, message))
        return self.number
