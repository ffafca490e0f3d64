"""A source with a server: requests of others become messages, and are answered when the messages are durable.

A :class:`SourceServer` belongs to one start of a :class:`ServedSource`, and runs in a thread of its own. A subclass
answers requests: it numbers what it takes, puts it into ``events`` for the source, which yields it, and waits for the
commit with :meth:`SourceServer.wait`. The source tells each commit with :meth:`SourceServer.committed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Final

import cues
from cues.arguments import check_number, text_of
from cues.overrides import override
from cues.processors import checks, http, waits
from cues.processors import serving as guards

_CLOSE_S: Final = 5.0
"""Seconds that the end of a source waits for commits and answers."""


class ServedSource(checks.Owned):
    """The base of a source that has a server while it runs."""

    __name__: str
    """The name in errors: ``"webhook"``."""
    host: str
    port: int
    path: str
    methods: tuple[str, ...] = ("POST",)
    body_s: float
    answer_s: float
    tls: dict[str, Any] | None = None
    """Options of uvicorn for HTTPS."""
    _serving: Any = None
    """The :class:`SourceServer` of the last start in this process."""

    def _check_server(self) -> None:
        text_of("host", self.host)
        check_number("port", self.port, 0, 65_535, whole=True)
        check_number("body_s", self.body_s, 0.001)
        check_number("answer_s", self.answer_s, 0.001)
        http.package("starlette", "uvicorn")

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_serving": None, "_owner": ""}

    @property
    def url(self) -> str | None:
        """The URL at which it serves in this process, or None."""
        serving = self._serving
        if serving is None or serving.ending or not serving.open:
            return None
        return f"{'https' if self.tls else 'http'}://{self.host}:{serving.port}{self.path}"

    def _begin(self, process: Any) -> None:
        self.own(process)
        if self._serving is not None:  # the engine calls a source anew, for example after a seek
            self._serving.close()

    def committed(self, position: list[Any]) -> None:
        """Answer the requests whose messages are committed; the engine calls it after each commit."""
        if self._serving is not None:
            self._serving.committed(position[1])


class SourceServer(ABC):
    """The server of one start of a source. Methods with ``async`` run in its thread, the others in any."""

    def __init__(self, source: ServedSource, number: int, connections_max: int) -> None:
        """Begin to serve. ``number`` is that of the last committed event.

        More than ``connections_max`` connections are answered 503 by the server itself.
        """
        self._source, self._kind = source, source.__name__
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.yielded = number
        """The number of the last event that the source has yielded."""
        self.ending = False
        self.open = True
        self.number = self.committed_number = number
        """The numbers of the last event, and of the last committed one. Only the thread of the server changes them."""
        self._waiting: list[tuple[int, asyncio.Future[bool]]] = []
        self._reading: set[asyncio.Future[bytes]] = set()
        self._failure: BaseException | None = None
        self._listener = self._bound()
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._server = self._made(connections_max)
        # Not a daemon: the last answers leave before the process ends. The server ends with the main thread.
        self._thread = threading.Thread(target=self._run, name=f"cues {self._kind}", daemon=False)
        self._thread.start()

    @abstractmethod
    async def answer(self, request: Any) -> Any:
        """Answer a request of starlette."""

    def _bound(self) -> socket.socket:
        host, port = self._source.host, self._source.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # The protocol is named, because asyncio turns Nagle's algorithm off only then; with it an answer takes 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise cues.CuesError(
                f"The {self._kind} cannot listen on {host}:{port}: {error.strerror or error}.",
                "end the program that uses the port, or give another port= or host=.",
            ) from error
        return listener

    def _made(self, connections_max: int) -> Any:
        import uvicorn
        from starlette.routing import Route, Router

        route = Route(self._source.path, self.answer, methods=list(self._source.methods))
        config = uvicorn.Config(
            guards.guarded(Router([route], redirect_slashes=False), guards.HEADERS),
            http=guards.protocol(self._source.body_s),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=connections_max,
            timeout_graceful_shutdown=int(_CLOSE_S),
            **(self._source.tls or {}),
        )
        try:
            config.load()  # here, so that a certificate that cannot be read is an error of the start
        except OSError as error:  # SSLError is one
            self._listener.close()
            raise cues.CuesError(
                f"The {self._kind} cannot use its certificates: {error}.", "correct cert=, key= and client_ca=."
            ) from error
        return uvicorn.Server(config)

    # --- the thread of the server ---

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self.open = False
            self._listener.close()
            self._loop.close()

    async def _serve(self) -> None:
        task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not (await asyncio.wait({task}, timeout=waits.LOOK_S))[0]:
            if not threading.main_thread().is_alive():
                self.end()
                self._server.should_exit = True
        task.result()

    async def body(self, request: Any, bytes_max: int, within_s: float) -> bytes:
        """Return the body of a request, as :func:`guards.body` does; it is refused too when the source ends."""
        reading = asyncio.ensure_future(guards.body(request, bytes_max, within_s))
        self._reading.add(reading)
        try:
            return await reading
        except asyncio.CancelledError:
            if self.ending:
                raise guards.Refused(503, f"the {self._kind} ends") from None
            raise
        finally:
            self._reading.discard(reading)

    def _break_off(self) -> None:
        for reading in self._reading:
            reading.cancel()

    async def wait(self, number: int) -> bool:
        """Wait for the commit of an event, ``answer_s`` at most; return whether it is committed."""
        if number <= self.committed_number:
            return True
        future = self._loop.create_future()
        waiting = (number, future)
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._source.answer_s):
                return bool(await future)
        except TimeoutError:
            return False
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(waiting)

    def _settle(self, committed: int, refuse_after: int | None = None) -> None:
        """Answer the requests up to ``committed``, and refuse those after ``refuse_after``."""
        self.committed_number = max(self.committed_number, committed)
        for number, future in self._waiting:
            if future.done():
                continue
            if number <= self.committed_number:
                future.set_result(True)
            elif refuse_after is not None and number > refuse_after:
                future.set_result(False)

    # --- other threads ---

    def requests(self, process: Any) -> Iterator[Any]:
        """Yield what was put into ``events``, until the graph drains or the server ends."""
        while True:
            event = None
            with contextlib.suppress(queue.Empty):
                event = self.events.get(timeout=waits.LOOK_S)
            if self.ending or waits.stops(process):
                return  # a message that is yielded now may come too late to be committed
            if event is not None:
                yield event
                continue
            waits.answered(process)
            self.check()

    def call(self, call: Callable[[], None]) -> None:
        """Call a function in the thread of the server, if that has not ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def committed(self, number: int) -> None:
        """Answer the requests of the events up to ``number``."""
        self.call(lambda: self._settle(number))

    def check(self) -> None:
        """Raise the error that ended the server."""
        if self._failure is not None:
            raise self._failure
        if not self.open and not self.ending:
            raise cues.CuesError(f"The server of the {self._kind} ended.", "start the graph again.")

    def has_ended(self) -> bool:
        """Return whether it takes no more events, after a wait in which that may have changed."""
        return self.ending

    def end(self) -> None:
        """Take no more events, and refuse those that were not yielded, and requests that have not arrived whole."""
        self.ending = True
        self.call(lambda: self._settle(self.committed_number, self.yielded))
        self.call(self._break_off)

    def close(self) -> None:
        """End: answer the events that are committed within some seconds, and refuse the others. Return soon after."""
        if self.ending and not self._thread.is_alive():
            return
        self.end()
        if threading.current_thread() is self._thread:
            return  # collected here; the thread ends with the main thread
        limit = time.monotonic() + _CLOSE_S
        while self.committed_number < self.yielded and self._thread.is_alive() and time.monotonic() < limit:
            time.sleep(0.005)
        self.call(lambda: self._settle(self.committed_number, self.committed_number))
        self._server.should_exit = True
        self._thread.join(_CLOSE_S)
