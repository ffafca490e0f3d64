"""WebSockets: each message once by its id, whatever ends the connection or kills the run; what is no WebSocket."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seeds
from children import Child
from sets import bounded
from small import halted_at_end, until

import cues
from cues import testing
from cues.base.away import is_away
from cues.errors import Diverged, InvalidArgument
from cues.processors import http as requests
from cues.processors.websocket import WebSocket

websockets = pytest.importorskip("websockets.sync.server")


class Server:
    """Keeps messages, and sends those after the number that it is asked for; ``cut`` ends a connection in the middle.

    ``inclusive``: it begins at that number. Without a number it sends what comes after the connection.
    """

    def __init__(self, port: int = 0) -> None:
        self.messages: list[Any] = []
        self.asked: list[Any] = []
        self.cut, self.ends, self.inclusive, self.status = 0, False, False, 0
        self.headers: list[dict[str, str]] = []
        self._closing = threading.Event()
        self.server = websockets.serve(self._serve, "127.0.0.1", port, process_request=self._check)
        self.port: int = self.server.socket.getsockname()[1]
        self.url = f"ws://127.0.0.1:{self.port}/stream?key=secret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _check(self, connection: Any, request: Any) -> Any:
        self.headers.append({name.lower(): value for name, value in request.headers.raw_items()})
        return connection.respond(self.status, "no") if self.status else None

    def _serve(self, socket: Any) -> None:
        asked = json.loads(socket.recv())
        after = asked["after"]
        at = len(self.messages) if after == "now" else max(0, (after or 0) - self.inclusive)
        self.asked.append(asked)
        sent = 0
        while not self._closing.is_set():
            for message in self.messages[at:]:
                socket.send(message if isinstance(message, (str, bytes)) else json.dumps(message))
                at, sent = at + 1, sent + 1
                if sent == self.cut:
                    socket.socket.shutdown(2)  # close() would wait for the thread that reads
                    return
            if self.ends:
                return
            time.sleep(0.005)

    def add(self, count: int) -> None:
        self.messages += [{"n": n} for n in range(len(self.messages) + 1, len(self.messages) + count + 1)]

    def close(self) -> None:
        self._closing.set()
        self.server.shutdown()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def source(server: Any, **options: Any) -> WebSocket:
    url = server if isinstance(server, str) else server.url
    return WebSocket(
        url, **{"id": "n", "first": lambda last: [{"after": last}], "retry_s": 0.01, "ends": True, **options}
    )


def read(source: WebSocket, position: Any = None) -> list[Any]:
    return [message.get("n", message) for _, message in source(position)]


@pytest.mark.parametrize("inclusive", [False, True])
def test_each_message_is_there_once_whatever_ends_the_connection(
    server: Server, store: cues.Store, inclusive: bool
) -> None:
    server.inclusive, server.cut, server.ends = inclusive, 7, True
    server.add(40)
    graph = cues.Graph("g", [cues.Source("q", source(server))])
    testing.run_until_idle(graph, store)
    server.add(5)
    testing.run_until_idle(graph, store)
    assert [message["n"] for message in testing.messages(store, "q")] == list(range(1, 46))
    assert server.asked[0] == {"after": None} and server.asked[-1]["after"] >= 40 and len(server.asked) >= 6


def test_without_ids_it_takes_what_comes(server: Server, store: cues.Store) -> None:
    server.add(3)
    graph = cues.Graph("g", [cues.Source("q", source(server, id=None, first=['{"after": "now"}']))], store=store.path)
    store.close()
    with graph.start() as running:
        until(lambda: server.asked)
        server.add(2)
        until(lambda: len(running.messages("q")) == 2)
        assert [message["n"] for message in running.messages("q")] == [4, 5]


def test_messages_that_cannot_be_read_fail_alone(server: Server, store: cues.Store) -> None:
    server.ends = True
    server.messages = [{"n": 1}, "[1]", b"\xff", {"n": 2, "q/meta": 1}, "{", {"n": {"x": 1}}, {"m": 3}, {"n": 4}]
    graph = cues.Graph("g", [cues.Source("q", source(server))], errors="errors")
    testing.run_until_idle(graph, store)
    found = [{k: v for k, v in message.items() if k != "q/meta"} for message in testing.messages(store, "q")]
    assert found == [{"n": 1}, {"m": 3}, {"n": 4}]
    assert len(testing.messages(store, "errors")) == 5
    record = WebSocket(server.url, first=[{"after": None}], data="bytes", shape="record", ends=True)
    assert [message for _, message in record(None)][2] == {"data": b"\xff"}
    assert all("secret" not in str(error) for error in testing.messages(store, "errors"))


def test_the_handshake_has_headers_and_a_new_token_after_401(server: Server) -> None:
    server.add(1)
    server.ends = True

    class Tokens:
        count = 0

        def __call__(self) -> dict[str, str]:
            return {"Authorization": f"t{self.count}"}

        def renew(self, refused: Any) -> bool:
            self.count += 1
            server.status = 0
            return True

    server.status = 401
    tokens = Tokens()
    asking = source(server, headers=tokens, protocols=["v1"])
    with pytest.raises(requests.TryLater):
        read(asking)
    server.status = 0
    assert read(source(server, headers=tokens)) == [1]
    assert [seen["authorization"] for seen in server.headers] == ["t0", "t1"]
    assert server.headers[0]["sec-websocket-protocol"] == "v1"


def test_what_is_away_and_what_is_a_fault(server: Server) -> None:
    for status, away in ((503, True), (429, True), (404, False), (401, False)):
        server.status = status
        with pytest.raises(requests.RequestFailed, match=str(status)) as error:
            read(source(server))
        assert is_away(error.value) is away and "secret" not in str(error.value)
    with pytest.raises(requests.TryLater) as error:
        read(source("ws://127.0.0.1:9/"))
    assert is_away(error.value)
    server.status = 0
    server.messages = ["x" * 5_000]
    with pytest.raises(requests.RequestFailed, match="more than 1000 bytes"):
        read(source(server, message_bytes_max=1_000))


def test_a_server_that_is_away_is_waited_for(tmp_path: Path) -> None:
    server = Server()
    server.add(10)
    graph = cues.Graph("g", [cues.Source("q", source(server, ends=False))], store=tmp_path / "store")
    with halted_at_end(graph.start()) as running:
        until(lambda: len(running.messages("q")) == 10)
        server.close()
        time.sleep(0.3)
        again = Server(server.port)
        again.add(25)
        until(lambda: len(running.messages("q")) == 25, 30)
        assert [message["n"] for message in running.messages("q")] == list(range(1, 26))
        again.close()


def test_a_drain_ends_a_silent_connection(server: Server, tmp_path: Path) -> None:
    graph = cues.Graph("g", [cues.Source("q", source(server, ends=False))], store=tmp_path / "store")
    running = graph.start()
    until(lambda: server.asked)
    begun = time.monotonic()
    running.close(60)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    "options",
    [
        {"url": "http://x"}, {"url": "ws://"}, {"data": "x"}, {"shape": "x"}, {"data": "text"}, {"ends": 1},
        {"data": "text", "shape": "record", "id": "n"}, {"id": 5}, {"ping_s": 0}, {"message_bytes_max": 0},
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="Try:"):
        WebSocket(**{"url": "ws://x", **options})


def test_positions_of_others_are_refused() -> None:
    for position in ([2, 1, 1], [1, 1], "x"):
        with pytest.raises(Diverged, match="Try:"):
            next(WebSocket("ws://x")(position))  # type: ignore[arg-type]


CODE = """
import sys
import cues
from cues.processors.websocket import WebSocket

first = lambda last: [{"after": last}]
graph = cues.Graph("g", [cues.Source("q", WebSocket(sys.argv[2], id="n", first=first, retry_s=0.01), batch_size=5)])
with graph.start(store=sys.argv[1]) as running:
    print("started", flush=True)
    running.wait()
"""


@bounded("rounds", 5, 25)
def test_kills_leave_each_message_once(rounds: int, server: Server, tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    server.cut = 50
    for _ in range(rounds):
        server.add(40)
        with Child(CODE, tmp_path / "store", server.url) as child, contextlib.suppress(AssertionError):
            child.line()
            time.sleep(chance.uniform(0, 0.3))
            child.kill()
    server.cut, server.ends = 0, True
    with cues.open(tmp_path / "store") as store:
        testing.run_until_idle(cues.Graph("g", [cues.Source("q", source(server))]), store)
        assert [message["n"] for message in testing.messages(store, "q")] == list(range(1, 40 * rounds + 1))
