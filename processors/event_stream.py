"""A source of the events that a server sends over one long answer (Server-Sent Events).

    graph.add(cues.Source("edits", EventStream("https://stream.example.com/edits", data="json", shape="value")))

The position is the id of the last event. The engine commits it with the messages, and the next connection asks for the
events after it (``Last-Event-ID``). So if each event has an id of its own, and the server keeps events and honours the
header, each event is on the queue once, wherever the run is killed. An event that the server does not keep
while no client reads is lost, and events without an id of their own may come again.

A connection that ends, an answer of ``retry_on``, and a time of ``idle_s`` without a byte are followed by the next
connection: after the time that the server asked for (``retry:``), and as ``outage=`` says while the server is away. 204
ends the source; every other status stops it (:class:`cues.processors.http.RequestFailed`).

Not guaranteed: events that the server did not keep; the order of what it sends again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from cues import jsontext
from cues.arguments import check_number, texts_of
from cues.errors import Away, InvalidArgument
from cues.processors import SOURCE, checks, foreign, http, takes, waits

_VERSION: Final = 1
_AHEAD: Final = 1_000
"""Events that are read ahead of the graph. Then the connection waits, and so does the server."""
_ID_BYTES_MAX: Final = 1_000
_DECODERS: Final[Mapping[str, Callable[[str], Any]]] = {"text": str, "json": jsontext.decode}

Position = list[Any]


@takes(SOURCE)
class EventStream:
    """A source of Server-Sent Events; see the module. Give it to ``cues.Source(id, EventStream(...))``.

    ``url``         of the stream
    ``data``        ``"text"``, or ``"json"``: the data of each event is JSON
    ``shape``       ``"record"``: ``{"event", "id", "data"}``; ``"value"``: the data, a JSON object, with the rest as
                    ``process.metadata["sse"]``
    ``events``      the names of the events that are wanted; None: all
    ``headers``     of each request; a function is called for each
    ``retry_s``     seconds before the next connection, unless the server says another time
    ``idle_s``      seconds without a byte, also of a comment, after which the connection is given up; also for the
                    beginning of an answer
    ``timeout_s``   seconds for a connection
    ``event_bytes_max``   an event of more characters stops the source
    ``retry_on``, ``retry_after_s_max``   as :class:`cues.processors.http_sink.Requests` has them
    ``client``      a function that makes an ``httpx.Client``, for one connection, with time-outs of its own
    ``reserved``    ``"q/type"`` or ``"q/topics"``, which data may set then (:mod:`cues.processors.foreign`)

    Kind: source
    Needs: extra `http`
    Guarantee: exactly once, if events have ids and the server sends those after `Last-Event-ID`; else what it sends
    Mechanism: position of the event id, committed with the messages
    """

    def __init__(
        self,
        url: str,
        *,
        data: str = "text",
        shape: str = "record",
        events: Sequence[str] | None = None,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        retry_s: float = 3.0,
        idle_s: float = 120.0,
        timeout_s: float = 30.0,
        event_bytes_max: int = 1 << 20,
        retry_on: Sequence[int] = http.RETRY_ON,
        retry_after_s_max: float = http.RETRY_AFTER_S_MAX,
        client: Callable[[], Any] | None = None,
        reserved: Sequence[str] = (),
    ) -> None:
        self.may = foreign.allowed(reserved)
        self.url, self.data, self.shape = url, data, shape
        self.events = None if events is None else frozenset(texts_of("events", events))
        self._headers, self._make_client = http.check_headers(headers), client
        self.retry_s, self.idle_s, self.timeout_s, self.event_bytes_max = retry_s, idle_s, timeout_s, event_bytes_max
        self._retry_on = http.check_statuses("retry_on", retry_on)
        self._retry_after_s_max = retry_after_s_max
        self.__name__ = "event_stream"
        http.check_url(url)
        checks.one_of("data", data, tuple(_DECODERS))
        checks.one_of("shape", shape, ("record", "value"))
        checks.decoded(shape, "data", data)
        check_number("retry_s", retry_s, 0)
        check_number("idle_s", idle_s, 0.001)
        check_number("timeout_s", timeout_s, 0.001)
        check_number("event_bytes_max", event_bytes_max, 1, whole=True)
        check_number("retry_after_s_max", retry_after_s_max, 0)
        http.package("httpx", "httpx_sse")

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` for each event after ``position``, until the graph drains."""
        hint = "give the source another id, which begins with the next events."
        checks.position_of(position, "cues.processors.event_stream", 2, hint)
        last, retry_s = position[1] if position else "", self.retry_s
        while not waits.stops(process):
            connection = Connection(self, last)
            try:
                for event in connection.events(process):
                    if event.retry is not None:
                        retry_s = event.retry / 1000
                    last = event.id
                    if event.data or event.event != "message":
                        wanted = self.events is None or event.event in self.events
                        yield [_VERSION, last], self.message_of(event) if wanted else None
            finally:
                connection.close()
            if connection.is_over or not waits.wait(process, retry_s):
                return

    def message_of(self, event: Any) -> Any:
        """Return the message of an event, or the error for which it has none."""
        try:
            value = _DECODERS[self.data](event.data)
            return foreign.shaped(self, "sse", {"event": event.event, "id": event.id}, "data", value)
        except (ValueError, RecursionError) as error:
            return InvalidArgument(
                f"The event {event.id!r:.80} of {http.shown_url(self.url)} cannot be read as data={self.data!r},"
                f" shape={self.shape!r}: {error}.",
                "correct the server; or read it with data='text', and decode it in a stream.",
            )

    def open(self, last: str) -> tuple[Any, dict[str, str]]:
        """Return a client and the headers of a request for the events after ``last``."""
        httpx = http.package("httpx")
        headers = dict((self._headers() if callable(self._headers) else self._headers) or {})
        if last:
            headers["Last-Event-ID"] = last
        timeout = httpx.Timeout(self.timeout_s, read=self.idle_s)
        return (self._make_client or (lambda: httpx.Client(timeout=timeout)))(), headers

    def refused(self, response: Any, sent: Mapping[str, str]) -> Exception:
        """Return the error for an answer that is not a stream."""
        url = http.shown_url(self.url)
        if response.status_code in self._retry_on or http.renewed(self._headers, response.status_code, sent):
            wait_s = min(http.retry_after_s(response.headers), self._retry_after_s_max)
            text = f"{url} answered {response.status_code}."
            return http.failed(http.TryLater, text, "it is asked again later.", None, retry_after_s=wait_s)
        kind = response.headers.get("content-type", "no content type")
        text = f"{url} answered {response.status_code} with {kind}, and not a stream of events."
        return http.failed(http.RequestFailed, text, "correct url= and headers=.", None)


class _Bounded:
    """An answer as httpx-sse reads it, with a bound for each event."""

    def __init__(self, response: Any, source: EventStream) -> None:
        self.headers, self._response, self._source = response.headers, response, source
        response.encoding = "utf-8"  # a stream of events has no other one, whatever its content type says
        self.bytes = 0

    def iter_text(self) -> Iterator[str]:
        for text in self._response.iter_text():
            self.bytes += len(text)
            yield text
            if self.bytes > self._source.event_bytes_max:
                url, most = http.shown_url(self._source.url), self._source.event_bytes_max
                text = f"{url} sent an event of more than {most} characters."
                raise http.failed(http.RequestFailed, text, "raise event_bytes_max=.", None)


class Connection:
    """One connection, read by a thread of its own, so that a drain does not wait for the next event."""

    def __init__(self, source: EventStream, last: str) -> None:
        self._source, self._last = source, last
        self._events: queue.Queue[Any] = queue.Queue(_AHEAD)
        self._closed = threading.Event()
        self._response: Any = None
        self.is_over = False
        """The server has said that there is nothing more (204)."""
        threading.Thread(target=self._read, name="cues event stream", daemon=True).start()

    def events(self, process: Any) -> Iterator[Any]:
        """Yield events until the connection ends or the graph drains. Raises the error of the connection."""
        while not waits.stops(process):
            try:
                found = self._events.get(timeout=waits.LOOK_S)
            except queue.Empty:
                waits.answered(process)
                continue
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield found

    def close(self) -> None:
        """Give the connection up. Its thread ends with its next read."""
        self._closed.set()
        if self._response is not None:
            with contextlib.suppress(Exception):
                self._response.close()

    def _read(self) -> None:
        source, httpx, sse = self._source, http.package("httpx"), http.package("httpx_sse")
        end: Any = None
        try:
            client, headers = source.open(self._last)
            with client, sse.connect_sse(client, "GET", source.url, headers=headers) as stream:
                self._response = response = stream.response
                if response.status_code == 204:
                    self.is_over = True
                elif response.status_code != 200 or "text/event-stream" not in response.headers.get("content-type", ""):
                    raise source.refused(response, headers)
                else:
                    bounded = _Bounded(response, source)
                    for event in sse.EventSource(bounded).iter_sse():
                        bounded.bytes = 0
                        if len(event.id.encode()) > _ID_BYTES_MAX:
                            raise http.failed(
                                http.RequestFailed,
                                f"An event has an id of more than {_ID_BYTES_MAX:,} bytes.",
                                "shorten it.",
                                None,
                            )
                        self._put(event)
        except (httpx.ReadTimeout, httpx.RemoteProtocolError):
            end = None  # silent for too long, or broken off: the next connection goes on
            if self._response is None:
                end = Away(f"{http.shown_url(source.url)} did not answer.", what=http.shown_url(source.url))
        except httpx.DecodingError as error:
            text = f"{http.shown_url(source.url)} sent a damaged content encoding: {error}."
            end = http.failed(http.RequestFailed, text, "correct the server.", None)
        except httpx.TransportError as error:
            end = http.unanswered("GET", source.url, error)
        except BaseException as error:
            end = error
        self._put(end)

    def _put(self, event: Any) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                return self._events.put(event, timeout=waits.LOOK_S)
