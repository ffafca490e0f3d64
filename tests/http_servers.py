"""Real servers on loopback that the tests start: they count effects by key, fail as told, and misbehave on the wire."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Seen(NamedTuple):
    """A request as the server saw it. The names of ``headers`` are in small letters."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Reply(NamedTuple):
    """The answer to a request. ``announced`` is another length than that of the body; ``reset`` breaks the connection.

    With ``drip_s`` the server sends one byte in so many seconds, until the client or the test ends.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = {}
    announced: int | None = None
    reset: bool = False
    drip_s: float = 0.0


class Server:
    """``answer`` is called for each request, under a lock: so a test may keep plain lists and dicts."""

    def __init__(self, answer: Callable[[Seen], Reply]) -> None:
        self.seen: list[Seen] = []
        self.errors: list[Exception] = []
        self.guard = threading.Lock()
        self.closing = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer waits 40 ms for the client's acknowledgement

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def reply(self) -> None:
                size = int(self.headers.get("content-length", 0))
                body = self.rfile.read(size)
                if len(body) < size:  # the client was killed in the middle of its request
                    self.close_connection = True
                    return
                request = Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                with server.guard:
                    server.seen.append(request)
                    try:
                        told = answer(request)
                    except Exception as error:  # of the test, which raises it at its end
                        server.errors.append(error)
                        told = Reply(418)
                if told.reset and not told.body:
                    self.reset()
                    return
                self.send_response(told.status)
                for name, value in told.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(told.body) if told.announced is None else told.announced))
                self.end_headers()
                for byte in told.body if told.drip_s else b"":
                    if server.closing.wait(told.drip_s):
                        return
                    self.wfile.write(bytes([byte]))
                if not told.drip_s and self.command != "HEAD":
                    self.wfile.write(told.body)
                if told.reset:
                    self.reset()

            def reset(self) -> None:
                """Send RST in place of FIN: what is sent and not read is lost."""
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.shutdown(socket.SHUT_RD)
                self.close_connection = True

            do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = reply

            def log_message(self, *_: Any) -> None:
                pass

        class Threads(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that was killed

        self._server = Threads(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)


@contextmanager
def serving(answer: Callable[[Seen], Reply]) -> Iterator[Server]:
    server = Server(answer)
    try:
        yield server
    finally:
        server.close()
    for error in server.errors:
        raise error


class Ledger:
    """A server that takes each key once, or, as a control, each request. ``wrong`` answers in its place, by turns."""

    def __init__(self, honours: bool = True, wrong: Callable[[int, Seen], Reply | None] = lambda turn, seen: None):
        self.honours, self.wrong = honours, wrong
        self.effects: list[bytes] = []
        self.turns: Counter[str] = Counter()
        self.kept: dict[str, bytes] = {}

    def __call__(self, request: Seen) -> Reply:
        key = request.headers.get("idempotency-key", "")
        self.turns[key] += 1
        told = self.wrong(self.turns[key], request)
        if told is not None and not told.reset:
            return told
        if not self.honours or self.kept.setdefault(key, request.body) is request.body:
            self.effects.append(request.body)
        assert not self.honours or self.kept[key] == request.body, "another body under a known key"
        return told or Reply(201, b'{"taken": true}')
