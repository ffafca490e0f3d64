"""Server-Sent Events: each event once by its id, whatever ends the connection or kills the run; what is no stream."""

from __future__ import annotations

import contextlib
import http.server
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
from small import halted_at_end, until

import cues
from cues import testing
from cues.errors import CuesError, InvalidArgument
from cues.processors import http as requests
from cues.processors.event_stream import EventStream

pytest.importorskip("httpx_sse")


class Server:
    """Keeps events, and sends those after ``Last-Event-ID``; ``cut`` ends a connection after so many of them."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.asked: list[str | None] = []
        self.status, self.kind, self.cut, self.ends = 200, "text/event-stream", 0, False
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                last = self.headers.get("Last-Event-ID")
                server.asked.append(last)
                self.send_response(server.status)
                self.send_header("Content-Type", server.kind)
                self.end_headers()
                at, sent = int(last or 0), 0
                with contextlib.suppress(OSError):
                    while server.status == 200 and not (server.cut and sent >= server.cut):
                        for event in server.events[at : at + (server.cut - sent if server.cut else 1 << 30)]:
                            self.wfile.write(event)
                            at, sent = at + 1, sent + 1
                        if server.ends:
                            return
                        self.wfile.write(b": still here\n")
                        time.sleep(0.005)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/events?key=secret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, count: int) -> None:
        for n in range(len(self.events) + 1, len(self.events) + count + 1):
            self.events.append(b"id: %d\nevent: edit\ndata: %s\n\n" % (n, json.dumps({"n": n}).encode()))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.ends = True
    server.server.shutdown()
    server.server.server_close()


def source(server: Server, **options: Any) -> EventStream:
    return EventStream(server.url, **{"data": "json", "shape": "value", "retry_s": 0.01, **options})


@contextlib.contextmanager
def reading(path: Path, stream: EventStream) -> Iterator[cues.Running]:
    graph = cues.Graph("g", [cues.Source("edits", stream)], errors="errors", durability="process")
    with graph.start(store=path) as running:
        yield running


def test_events_go_on_where_a_connection_ended(server: Server, tmp_path: Path) -> None:
    server.add(20)
    server.cut = 7
    with reading(tmp_path / "store", source(server)) as running:
        until(lambda: len(running.messages("edits")) == 20 or running.stopped)
        server.add(5)
        until(lambda: len(running.messages("edits")) == 25 or running.stopped)
    assert server.asked[:4] == [None, "7", "14", "21"]
    with reading(tmp_path / "store", source(server)) as running:
        server.add(1)
        until(lambda: len(running.messages("edits")) == 26)
        assert [message["n"] for message in running.messages("edits")] == list(range(1, 27))
    assert server.asked[-1] == "25"


def test_an_event_has_its_name_its_id_and_its_data(server: Server, tmp_path: Path) -> None:
    server.events = [
        b"id: 1\nevent: edit\ndata: one\ndata: two\n\n",
        b": a comment\n\nid: 2\ndata: plain\n\n",
        b"retry: 10\n\n",
        b"id: 3\nevent: other\ndata: no\n\n",
        b"id: 4\nevent: edit\ndata: \xc3\xa9\n\n",
    ]
    with reading(tmp_path / "store", EventStream(server.url, events=["edit", "message"])) as running:
        until(lambda: len(running.messages("edits")) == 3)
        assert running.messages("edits") == [
            {"event": "edit", "id": "1", "data": "one\ntwo"},
            {"event": "message", "id": "2", "data": "plain"},
            {"event": "edit", "id": "4", "data": "é"},
        ]


def test_data_that_is_no_object_fails_alone(server: Server, tmp_path: Path) -> None:
    server.add(1)
    server.events += [b"id: 2\ndata: {\n\n", b"id: 3\ndata: [1]\n\n", b'id: 4\ndata: {"q/uuid": "x"}\n\n']
    server.add(1)
    with reading(tmp_path / "store", source(server)) as running:
        until(lambda: len(running.messages("edits")) == 2)
        assert running.messages("edits") == [{"n": 1}, {"n": 5}]
        assert len(running.messages("errors")) == 3


def test_204_ends_the_source_and_others_stop_it_without_the_secret(server: Server, tmp_path: Path) -> None:
    server.status = 204
    testing.run_until_idle(cues.Graph("g", [cues.Source("edits", source(server))]), tmp_path / "a")
    for status, kind in ((404, "text/html"), (200, "application/json"), (401, "text/event-stream")):
        server.status, server.kind, server.ends = status, kind, True
        with pytest.raises(CuesError) as caught:
            testing.run_until_idle(cues.Graph("g", [cues.Source("edits", source(server))]), tmp_path / "b")
        assert f"answered {status}" in str(caught.value) and "secret" not in str(caught.value)


def test_a_server_that_is_away_or_silent_is_waited_for(server: Server, tmp_path: Path) -> None:
    server.status = 503
    server.add(3)
    graph = cues.Graph("g", [cues.Source("edits", source(server, idle_s=0.3))], durability="process")
    with halted_at_end(graph.start(store=tmp_path / "store")) as running:
        until(lambda: running.counters()["g.edits"].away)
        server.status = 200
        until(lambda: len(running.messages("edits")) == 3 or running.stopped)
        assert not running.stopped
    with pytest.raises(requests.TryLater):
        next(iter(EventStream("http://127.0.0.1:9/")(None)))


@pytest.mark.slow
def test_an_event_without_an_end_is_bounded(server: Server, tmp_path: Path) -> None:
    server.add(1)
    server.events.append(b"id: 2\n" + b"data: " + b"x" * 50_000 + b"\n\n")
    with pytest.raises(requests.RequestFailed, match="more than 10000 characters"):
        for _ in source(server, event_bytes_max=10_000)(None):
            pass


def test_options_that_do_not_fit_are_refused() -> None:
    for options in ({"data": "xml"}, {"shape": "value"}, {"retry_s": -1}, {"idle_s": 0}, {"event_bytes_max": 0}):
        with pytest.raises(InvalidArgument):
            EventStream("http://x/", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        EventStream("x")
    with pytest.raises(cues.errors.Diverged):
        next(iter(EventStream("http://x/")([2, "x"])))


READ = """
import sys
import cues
from cues.processors.event_stream import EventStream
stream = EventStream(sys.argv[2], data="json", shape="value", retry_s=0.01)
graph = cues.Graph("g", [cues.Source("edits", stream)], durability="process")
with graph.start(store=sys.argv[1]) as running:
    print("started", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_killed_at_any_time_each_event_is_there_once(server: Server, tmp_path: Path, kills: int) -> None:
    chance = random.Random(seeds.new())
    server.cut = 400
    for _ in range(kills):
        with Child(READ, tmp_path / "store", server.url) as child:
            for _ in range(chance.randrange(2, 8)):
                server.add(chance.randrange(300))
                time.sleep(chance.uniform(0, 0.05))
            child.kill()
    with Child(READ, tmp_path / "store", server.url) as child:
        assert child.line() == "started"

        def all_are_there() -> bool:
            with cues.open(tmp_path / "store", readonly=True) as store:
                return store.queue("edits").last_index >= len(server.events)

        until(all_are_there)
        child.say()
        child.end()
    with cues.open(tmp_path / "store", readonly=True) as store:
        assert [message["n"] for message in store.queue("edits").tailer()] == list(range(1, len(server.events) + 1))
