"""A source of the messages that a server sends over a WebSocket.

    def subscribe(last):
        return [{"op": "subscribe", "channel": "trades", "after": last}]

    graph.add(cues.Source("trades", WebSocket("wss://stream.example.com", id="seq", first=subscribe)))

The position is the id of the last message (``id=``). The engine commits it with the messages, and ``first`` gets it for
the next connection, so that it can ask for what follows. So if the server keeps messages, and sends those after the id,
each message is on the queue once, wherever the run is killed. A message whose id is that of the last one is dropped, so
it does not matter whether the server begins at the id or after it.

Without ids the source takes what comes while it is connected: what is sent while it is away is lost, and so is what a
process that is killed had received and not committed.

A connection that is lost or closed is followed by the next one: after ``retry_s``, and as ``outage=`` says while the
server is away. The library answers pings, and pings itself, so a dead connection is noticed. A refused handshake
(other than with a status of ``retry_on``) stops the source (:class:`cues.processors.http.RequestFailed`).

Not guaranteed: messages that the server does not keep; that it sends the same again in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from cues import jsontext
from cues.arguments import check_number, text_of, texts_of
from cues.errors import InvalidArgument
from cues.imported import package
from cues.processors import SOURCE, checks, foreign, http, takes, waits

_VERSION: Final = 1
_ID_CHARACTERS_MAX: Final = 1_000
_DECODERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "json": jsontext.decode,
    "text": lambda data: data if isinstance(data, str) else data.decode(),
    "bytes": lambda data: data.encode() if isinstance(data, str) else data,
}

Position = list[Any]


def library() -> Any:
    """Return the package websockets, with its client for threads."""
    return package("WebSockets need websockets", "http", "websockets", "websockets.sync.client")


@takes(SOURCE)
class WebSocket:
    """A source of the messages of a WebSocket; see the module. Give it to ``cues.Source(id, WebSocket(...))``.

    ``url``         ``"wss://host/path"`` or ``"ws://…"``
    ``first``       what is sent after each connection: texts, bytes, or values that are sent as JSON; or a function of
                    the id of the last message, which is None at the beginning
    ``id``          the id of a message: a field of its JSON, or a function of what ``data`` makes of it; a text or a
                    number, or None for a message that has none. None: messages have no ids
    ``data``        ``"json"``, ``"text"`` or ``"bytes"``: what a message of the socket is
    ``shape``       ``"value"``: the message is the data, a JSON object; ``"record"``: ``{"data": …}``
    ``ends``        True: a connection that the server closes in order (1000) ends the source
    ``headers``     of the handshake; a function is called for each. :class:`cues.processors.http.OAuth` is one
    ``protocols``   subprotocols that are offered
    ``retry_s``     seconds before the next connection
    ``ping_s``      seconds between pings, and for an answer to one
    ``timeout_s``   seconds for a connection
    ``message_bytes_max``   a larger message stops the source
    ``retry_on``, ``retry_after_s_max``   as :class:`cues.processors.http_sink.Requests` has them
    ``reserved``    ``"q/type"`` or ``"q/topics"``, which data may set then (:mod:`cues.processors.foreign`)

    Kind: source
    Needs: extra `http`
    Guarantee: exactly once, if messages have ids and the server sends those that follow; else what comes while it is connected
    Mechanism: position of the id, committed with the messages
    """  # noqa: E501

    def __init__(
        self,
        url: str,
        *,
        first: Iterable[Any] | Callable[[Any], Iterable[Any]] = (),
        id: str | Callable[[Any], Any] | None = None,
        data: str = "json",
        shape: str = "value",
        ends: bool = False,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        protocols: Sequence[str] = (),
        retry_s: float = 3.0,
        ping_s: float = 20.0,
        timeout_s: float = 30.0,
        message_bytes_max: int = 1 << 20,
        retry_on: Sequence[int] = http.RETRY_ON,
        retry_after_s_max: float = http.RETRY_AFTER_S_MAX,
        reserved: Sequence[str] = (),
    ) -> None:
        self.may = foreign.allowed(reserved)
        self.url, self.data, self.shape, self.ends = text_of("url", url), data, shape, ends
        if not callable(first) and (isinstance(first, (str, bytes, Mapping)) or not isinstance(first, Iterable)):
            raise InvalidArgument(f"first={first!r:.60}.", "give a list, or a function of the id of the last message.")
        self._first = first if callable(first) else list(first)
        self._id, self._protocols = id, texts_of("protocols", protocols)
        self._headers = http.check_headers(headers)
        self._retry_s, self._ping_s, self._timeout_s, self._bytes_max = retry_s, ping_s, timeout_s, message_bytes_max
        self._retry_on = http.check_statuses("retry_on", retry_on)
        self._retry_after_s_max = retry_after_s_max
        self.__name__ = "websocket"
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise InvalidArgument(f"{http.shown_url(url)!r} is not the URL of a WebSocket.", "give wss://host/path.")
        checks.one_of("data", data, tuple(_DECODERS))
        checks.one_of("shape", shape, ("value", "record"))
        checks.decoded(shape, "data", data)
        if isinstance(id, str) and data != "json":
            raise InvalidArgument(f"id={id!r:.60} with data={data!r}.", "give a function of the data.")
        if type(ends) is not bool or not (id is None or isinstance(id, str) or callable(id)):
            raise InvalidArgument(f"ends={ends!r:.60}, id={id!r:.60}.", "give ends=True or False, and id= a field.")
        check_number("retry_s", retry_s, 0)
        check_number("ping_s", ping_s, 0.001)
        check_number("timeout_s", timeout_s, 0.001)
        check_number("message_bytes_max", message_bytes_max, 1, whole=True)
        check_number("retry_after_s_max", retry_after_s_max, 0)
        library()

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` for each message after ``position``, until the graph drains."""
        hint = "give the source another id, which begins with the next messages."
        checks.position_of(position, "cues.processors.websocket", 3, hint)
        _, number, last = position or (_VERSION, 0, None)
        closed = library().exceptions.ConnectionClosed
        while not waits.stops(process):
            with self._connected() as socket:
                try:
                    for given in self._first(last) if callable(self._first) else self._first:
                        socket.send(given if isinstance(given, (str, bytes)) else jsontext.encode(given, compact=True))
                    while not waits.stops(process):
                        try:
                            found = socket.recv(timeout=waits.LOOK_S)
                        except TimeoutError:
                            waits.answered(process)
                            continue
                        id, message = self._message(found)
                        if id is not None and id == last:
                            continue
                        number, last = number + 1, last if id is None else id
                        yield [_VERSION, number, last], message
                except closed as error:
                    self._check_size(error)
                    if self.ends and error.rcvd is not None and error.rcvd.code == 1000:
                        return
            if not waits.wait(process, self._retry_s):
                return

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        """Open a connection, which ends with the block."""
        websockets, shown = library(), http.shown_url(self.url)
        headers = dict((self._headers() if callable(self._headers) else self._headers) or {})
        try:
            socket = websockets.sync.client.connect(
                self.url, additional_headers=headers, subprotocols=self._protocols or None, max_size=self._bytes_max,
                open_timeout=self._timeout_s, close_timeout=1.0, ping_interval=self._ping_s, ping_timeout=self._ping_s,
            )  # fmt: skip
        except websockets.exceptions.InvalidStatus as error:
            raise self._refused(error.response, headers) from None
        except (OSError, TimeoutError, EOFError, websockets.exceptions.InvalidMessage) as error:
            raise http.unanswered("GET", shown, error) from error
        except websockets.exceptions.InvalidHandshake as error:
            text = f"{shown} is no WebSocket: {error}"
            raise http.failed(http.RequestFailed, text, "correct url= and headers=.", None) from None
        with socket:
            yield socket

    def _refused(self, response: Any, sent: Mapping[str, str]) -> Exception:
        status, text = response.status_code, f"{http.shown_url(self.url)} answered {response.status_code}."
        if status in self._retry_on or http.renewed(self._headers, status, sent):
            headers = {name.lower(): value for name, value in response.headers.raw_items()}
            wait_s = min(http.retry_after_s(headers), self._retry_after_s_max)
            return http.failed(
                http.TryLater, text, "it is asked again later.", None, status=status, retry_after_s=wait_s
            )
        return http.failed(http.RequestFailed, text, "correct url= and headers=.", None, status=status)

    def _check_size(self, error: Any) -> None:
        if error.sent is not None and error.sent.code == 1009:
            text = f"{http.shown_url(self.url)} sent a message of more than {self._bytes_max} bytes."
            raise http.failed(http.RequestFailed, text, "raise message_bytes_max=.", None) from None

    def _message(self, found: Any) -> tuple[Any, Any]:
        """Return the id and the message of what was received; an error in place of a message."""
        id = None
        try:
            value = _DECODERS[self.data](found)
            if callable(self._id):
                id = self._id(value)
            elif self._id is not None and isinstance(value, dict):
                id = value.get(self._id)
            if id is not None and (not isinstance(id, (str, int)) or len(str(id)) > _ID_CHARACTERS_MAX):
                raise ValueError(f"its id is {id!r:.60}, and not a text or a number of {_ID_CHARACTERS_MAX} characters")
            return id, foreign.shaped(self, "websocket", {}, "data", value)
        except Exception as error:
            return None, InvalidArgument(
                f"A message of {http.shown_url(self.url)} cannot be read as data={self.data!r}, shape={self.shape!r}:"
                f" {type(error).__name__}: {error}.",
                "correct the server; or read it with data='text', shape='record', and decode it in a stream.",
            )
