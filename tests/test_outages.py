"""Something outside is away: the processor waits and goes on, the others work, and nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import postgres
import pytest
from small import numbers, until

import cues
from cues import testing
from cues.base import events
from cues.base.away import is_away
from cues.cli.app import run as cli
from cues.errors import Away, CheckpointError, GraphError, InvalidArgument, ProcessorStopped, WaitTimeout
from cues.processors.delta import DeltaTarget
from cues.processors.http_sink import Requests
from cues.processors.http_source import Poll
from cues.processors.iceberg import IcebergTarget
from cues.processors.sql_source import Rows

COUNT = 200


class Outside:
    """Something outside: it is away after some calls, until it is back."""

    def __init__(self, after: int, error: Callable[[], Exception] = lambda: ConnectionRefusedError(111, "refused")):
        self.left, self.error = after, error
        self.back, self.tried = threading.Event(), threading.Event()
        self.calls: list[int] = []

    def __call__(self, n: int) -> None:
        if not self.back.is_set():
            if self.left == 0:
                self.tried.set()
                raise self.error()
            self.left -= 1
        self.calls.append(n)


class Heard:
    """The outages that a graph tells of."""

    def __init__(self) -> None:
        self.all: list[events.Event] = []

    def __call__(self, event: events.Event) -> None:
        self.all.append(event)

    @property
    def outages(self) -> list[tuple[str, bool]]:
        return [(event.processor, event.over) for event in self.all if isinstance(event, events.Away)]


def counted(graph: cues.Graph) -> None:
    @graph.source("in")
    def count(position: int | None) -> Iterator[tuple[int, dict[str, int]]]:
        for n in range(position or 0, COUNT):
            yield n + 1, {"n": n}


def wrapped(error: Exception) -> CheckpointError:
    """A failure as targets raise it."""
    try:
        raise CheckpointError("The database failed.", "start again.", where="db:5432") from error
    except CheckpointError as raised:
        return raised


def of_driver(package: str, name: str, text: str = "", base: type[Exception] = Exception, **facts: Any) -> Exception:
    """An exception of a driver, which is known by its name."""
    error: Exception = type(name, (base,), {"__module__": package, **facts})(text)
    return error


def busy() -> sqlite3.OperationalError:
    """The error of a SQLite file that another connection has locked."""
    with sqlite3.connect(":memory:") as one:
        one.execute("create table t (x)")
    first = sqlite3.connect("file:outages?mode=memory&cache=shared", uri=True, isolation_level=None)
    second = sqlite3.connect("file:outages?mode=memory&cache=shared", uri=True, isolation_level=None, timeout=0)
    try:
        first.execute("create table t (x)")
        first.execute("begin exclusive")
        second.execute("insert into t values (1)")
    except sqlite3.OperationalError as error:
        return error
    finally:
        first.close()
        second.close()
    raise AssertionError


REFUSED = 'connection failed: connection to server at "::1", port 5432 failed: '
LOST = "consuming input failed: "


ERRORS: list[tuple[Exception, bool]] = [
    (ConnectionRefusedError(), True),
    (BrokenPipeError(), True),
    (TimeoutError(), True),
    (socket.gaierror(socket.EAI_NONAME, "unknown"), True),
    (OSError("Generic S3 error: Error performing GET http://a\n - HTTP error: error sending request"), True),
    (OSError("Generic S3 error: Error performing GET http://a: status 403 Forbidden: no"), False),
    (OSError("Invalid data stream"), False),
    (OSError(errno.ENOSPC, "full"), True),
    (OSError(errno.EHOSTUNREACH, "no route"), True),
    (urllib.error.URLError(ConnectionResetError()), True),
    (Away("the scale is off"), True),
    (wrapped(ConnectionResetError()), True),
    (wrapped(busy()), True),
    (CheckpointError("x", where="x", again=True), True),
    (CheckpointError("x", where="x", away=True), True),
    (of_driver("psycopg", "OperationalError", REFUSED + "Connection refused"), True),
    (of_driver("psycopg", "OperationalError", REFUSED + "FATAL:  the database system is starting up"), True),
    (of_driver("psycopg.errors", "AdminShutdown", sqlstate="57P01"), True),
    (of_driver("psycopg.errors", "DiskFull", sqlstate="53100"), True),
    (of_driver("psycopg.errors", "DeadlockDetected", sqlstate="40P01"), True),
    (of_driver("sqlalchemy.exc", "OperationalError", orig=ConnectionResetError()), True),
    (of_driver("pymysql.err", "OperationalError"), False),
    (type("OperationalError", (Exception,), {"__module__": "pymysql.err"})(2003, "no"), True),
    (of_driver("requests.exceptions", "ConnectionError"), True),
    (of_driver("httpx", "TimeoutException"), True),
    (of_driver("duckdb", "IOException", "Could not set lock on file"), True),
    (of_driver("pika.exceptions", "AMQPConnectionError"), True),
    (of_driver("pika.exceptions", "ProbableAuthenticationError"), False),
    # Faults that no wait mends.
    (of_driver("psycopg", "OperationalError", REFUSED + 'FATAL:  password authentication failed for "x"'), False),
    (of_driver("psycopg", "OperationalError", REFUSED + 'FATAL:  Datenbank »x« existiert nicht'), False),
    (of_driver("psycopg.errors", "UniqueViolation", sqlstate="23505"), False),
    (of_driver("psycopg.errors", "ProtocolViolation", sqlstate="08P01"), False),
    (of_driver("psycopg", "OperationalError", "the connection is closed"), False),
    (of_driver("psycopg", "OperationalError", "server closed the connection unexpectedly"), True),
    (of_driver("psycopg", "OperationalError", LOST + "SSL connection has been closed unexpectedly"), True),
    (of_driver("psycopg", "OperationalError", LOST + "SSL SYSCALL error: EOF detected"), True),
    (of_driver("psycopg", "OperationalError", REFUSED + "SSL error: certificate verify failed"), False),
    (of_driver("duckdb", "IOException", "Cannot open file"), False),
    (CheckpointError("x", where="x", away=False), False),
    (wrapped(ValueError()), False),
    (FileNotFoundError(errno.ENOENT, "x"), False),
    (PermissionError(errno.EACCES, "x"), False),
    (WaitTimeout("a wait for a queue"), False),
    (ValueError(), False),
]  # fmt: skip
"""Errors, and whether they say that something is away."""


@pytest.mark.parametrize(
    ("error", "away"),
    ERRORS,
    ids=lambda value: f"{type(value).__name__} {value}"[:60] if isinstance(value, Exception) else "",
)
def test_what_counts_as_away(error: Exception, away: bool) -> None:
    assert is_away(error) is away


def test_a_service_that_botocore_cannot_reach_is_away() -> None:
    errors = pytest.importorskip("botocore.exceptions")
    assert is_away(errors.EndpointConnectionError(endpoint_url="http://a"))
    assert not is_away(errors.SSLError(endpoint_url="http://a", error="certificate"))


WAYS: dict[str, dict[str, Any]] = {
    "messages": {},
    "batch": {"batch": True, "batch_size": 30},
    "concurrency": {"concurrency": 4},
    "side effects": {"side_effects": True, "batch_size": 50},
    "timeout_s": {"timeout_s": 60.0},
    "key": {"key": "n", "concurrency": 3},
    "retries": {"retries": 2},
}


@pytest.mark.parametrize("way", [*WAYS, "async"])
def test_a_function_is_called_again_when_the_outage_is_over(way: str, tmp_path: Path, checked: Any) -> None:
    graph = cues.Graph("g", store=tmp_path / "s", errors="errors", durability="process")
    counted(graph)
    outside, heard = Outside(after=70), Heard()

    def call(message: Any) -> Any:
        for each in message if isinstance(message, list) else [message]:
            outside(each["n"])
        return message

    async def called(message: Any) -> Any:
        outside(message["n"])
        return message

    graph.stream("in", "out", id="call", **WAYS.get(way, {"concurrency": 4}))(called if way == "async" else call)
    graph.stream("in", "beside", id="other")(lambda message: message)
    with graph.start(listeners=(heard,)) as running:
        assert outside.tried.wait(60)
        until(lambda: len(running.messages("beside")) == COUNT)  # the others go on
        waiting = until(lambda: running.counters()["g.call"].away)
        assert "what it needs since " in waiting and "refused" in waiting
        assert not running.idle()
        outside.back.set()
        assert running.wait_done()
        assert running.counters()["g.call"].away == "" and running.counters()["g.call"].away_s > 0
        assert [message["n"] for message in running.messages("out")] == list(range(COUNT))
        assert not running.messages("errors")
    assert heard.outages == [("g.call", False), ("g.call", True)]
    if way in ("messages", "side effects", "retries"):
        assert outside.calls == list(range(COUNT))  # no call that succeeded was made again
    checked(tmp_path / "s")


def test_a_source_begins_again_at_its_position(tmp_path: Path) -> None:
    graph, outside, heard = cues.Graph("g", store=tmp_path / "s"), Outside(after=50), Heard()
    starts: list[int] = []

    @graph.source("in")
    def read(position: int | None) -> Iterator[tuple[int, dict[str, int]]]:
        starts.append(position or 0)
        for n in range(position or 0, COUNT):
            outside(n)
            yield n + 1, {"n": n}

    with graph.start(listeners=(heard,)) as running:
        until(lambda: len(starts) > 2)
        outside.back.set()
        assert running.wait_done()
        assert [message["n"] for message in running.messages("in")] == list(range(COUNT))
    assert set(starts[1:]) == {50} and heard.outages == [("g.in", False), ("g.in", True)]


def waiting_graph(tmp_path: Path, error: Callable[[], Exception], **options: Any) -> tuple[cues.Graph, Outside]:
    graph = cues.Graph("g", store=tmp_path / "s", errors="errors", durability="process")
    outside = Outside(5, error)

    @graph.stream("in", "out", **options)
    def call(message: Any) -> Any:
        outside(message["n"])
        return message

    graph.add(cues.Source("in", None))
    return graph, outside


def refused() -> Exception:
    return ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize("outage", ["stop", 0.3, "300ms", cues.Outage("300ms")], ids=str)
def test_a_processor_stops_after_the_longest_wait(outage: Any, tmp_path: Path) -> None:
    graph, outside = waiting_graph(tmp_path, refused, outage=outage)
    heard = Heard()
    began = time.monotonic()
    running = graph.start(listeners=(heard,))
    with pytest.raises(ProcessorStopped, match="Connection refused") as stopped, running:
        for n in range(10):
            running.send({"n": n})
        running.wait_idle(60)
    assert stopped.value.away and isinstance(stopped.value.__cause__, ConnectionRefusedError)
    assert outage == "stop" or time.monotonic() - began >= 0.3
    assert heard.outages == ([] if outage == "stop" else [("g.call", False)])
    outside.back.set()
    with graph.start() as running:
        assert running.wait_idle(60)
        assert [message["n"] for message in running.messages("out")] == list(range(10))


class ApiDown(Exception):
    retry_after_s = 0.2


@pytest.mark.parametrize(
    ("error", "options", "attempts"),
    [
        (refused, {"outage": "fail"}, 1),
        (refused, {"outage": "fail", "retries": cues.Retry(3, backoff_s=0)}, 3),
        (refused, {"retries": cues.Retry(3, backoff_s=0, on=ConnectionError)}, 3),
        (refused, {"strategy": "at-most-once"}, 1),
        (ApiDown, {}, 1),
        (ValueError, {"retries": cues.Retry(2, backoff_s=0)}, 2),
    ],
    ids=range(6),
)
def test_a_failure_is_no_outage(
    error: Callable[[], Exception], options: dict[str, Any], attempts: int, tmp_path: Path
) -> None:
    """Also one of an exception that ``retries=`` names."""
    graph, _ = waiting_graph(tmp_path, error, **options)
    with graph.start() as running:
        for n in range(7):
            running.send({"n": n})
        assert running.wait_idle(60)
        failed = running.messages("errors")
        assert [record["err.proc/messages"]["in"][0]["n"] for record in failed] == [5, 6]
        assert all(record["err.proc/config"]["attempt"] == attempts for record in failed)


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (ApiDown, cues.Outage(on=ApiDown)),
        (lambda: Away("the scale is off", what="scale 3", retry_after_s=0.2), "wait"),
    ],
    ids=["named", "raised"],
)
def test_a_user_says_what_is_away_and_how_long_to_wait(error: Any, outage: Any, tmp_path: Path) -> None:
    graph, outside = waiting_graph(tmp_path, error, outage=outage)
    with graph.start() as running:
        for n in range(7):
            running.send({"n": n})
        text = until(lambda: running.counters()["g.call"].away)
        assert text.startswith("what it needs since" if error is ApiDown else "scale 3 since")
        outside.tried.clear()
        began = time.monotonic()
        assert outside.tried.wait(60) and outside.tried.clear() is None and outside.tried.wait(60)
        assert time.monotonic() - began >= 0.15
        outside.back.set()
        assert running.wait_idle(60) and not running.messages("errors")


@pytest.mark.parametrize("wrong", ["soon", -1, 0, True, None, "30 parsecs"])
def test_a_wrong_outage_is_refused(wrong: Any) -> None:
    with pytest.raises(GraphError, match="has outage="):
        cues.Stream(lambda message: message, "in", "out", id="x", outage=wrong)
    with pytest.raises(InvalidArgument, match="outage is"):
        cues.Outage(wrong)
    with pytest.raises(InvalidArgument, match="class of exceptions"):
        cues.Outage(on="ConnectionError")  # type: ignore[arg-type]


def test_a_drain_ends_the_wait_at_once_and_the_next_start_goes_on(tmp_path: Path) -> None:
    graph, outside = waiting_graph(tmp_path, lambda: Away("off", retry_after_s=1000))
    heard = Heard()
    with pytest.raises(ProcessorStopped, match="Away: off"), graph.start(listeners=(heard,)) as running:
        for n in range(10):
            running.send({"n": n})
        until(lambda: running.counters()["g.call"].away)
        began = time.monotonic()
    assert time.monotonic() - began < 30
    assert [event.text for event in heard.all if "ends while what it needs is away" in event.text]
    outside.back.set()
    with graph.start() as running:
        assert running.wait_idle(60)
        assert [message["n"] for message in running.messages("out")] == list(range(10))


def test_a_drain_during_a_try_of_a_source_ends_as_one_during_a_wait(tmp_path: Path) -> None:
    graph = cues.Graph("g", store=tmp_path / "s")
    calls, ending = [], threading.Event()

    @graph.source("in")
    def read(position: int | None) -> Iterator[tuple[int, dict[str, int]]]:
        calls.append(position)
        if len(calls) > 1:
            assert ending.wait(60)
        raise Away("off")
        yield

    heard = Heard()
    with graph.start(listeners=(heard,)) as running:
        until(lambda: len(calls) > 1)
        assert running.drain(60)
        ending.set()
    assert running.counters()["g.in"].away.endswith("off")  # the summary of the run says it
    assert [event.text for event in heard.all if "ends while what it needs is away" in event.text]


def test_a_source_that_ends_at_its_first_try_has_no_outage_left(tmp_path: Path) -> None:
    graph = cues.Graph("g", store=tmp_path / "s")
    calls = []

    @graph.source("in")
    def read(position: int | None) -> Iterator[tuple[int, dict[str, int]]]:
        calls.append(position)
        if len(calls) == 1:
            raise Away("off")
        yield from ()

    heard = Heard()
    with graph.start(listeners=(heard,)) as running:
        running.wait_done(60)
    assert [event.text for event in heard.all if "there again" in event.text]
    assert not running.counters()["g.in"].away


def test_a_pause_ends_the_wait_and_so_does_a_resume(tmp_path: Path) -> None:
    graph, outside = waiting_graph(
        tmp_path, lambda: Away("off", retry_after_s=1000 if not outside.back.is_set() else 0)
    )
    heard = Heard()
    with graph.start(listeners=(heard,)) as running:
        for n in range(10):
            running.send({"n": n})
        until(lambda: running.counters()["g.call"].away)
        cues.pause(running.store, processor="call")
        until(lambda: "paused" in [unit.state for unit in running.standings()])
        assert running.counters()["g.call"].away == "" and heard.outages == [("g.call", False)]
        outside.back.set()
        cues.resume(running.store)
        assert running.wait_idle(60)
        assert [message["n"] for message in running.messages("out")] == list(range(10))


@pytest.mark.parametrize(
    "options",
    [{"rate": "20/s"}, {"batch": True, "linger_s": 0.05}, {"concurrency": 2}],
    ids=["rate", "linger", "concurrency"],
)
def test_only_a_step_that_calls_the_function_ends_an_outage(options: dict[str, Any], tmp_path: Path) -> None:
    """A step that waits for ``rate=`` or for more messages says nothing: the limit and the growing waits hold."""
    graph = cues.Graph("g", store=tmp_path / "s", durability="process")
    heard, calls = Heard(), [0]

    @graph.stream("in", "out", outage=0.8, **options)
    def call(message: Any) -> Any:
        calls[0] += 1
        raise ConnectionResetError

    graph.add(cues.Source("in", None))
    with pytest.raises(ProcessorStopped, match="ConnectionResetError"), graph.start(listeners=(heard,)) as running:
        running.send({"n": 0})
        running.wait_idle(60)
    assert heard.outages == [("g.call", False)] and 2 <= calls[0] < 12


def test_a_source_without_positions_does_not_repeat_its_messages_at_each_try(tmp_path: Path) -> None:
    for resume in ("again", "skip"):
        graph = cues.Graph(f"g-{resume}", store=tmp_path / resume, durability="process")
        calls: list[int] = []

        def read(calls: list[int]) -> Iterator[dict[str, int]]:
            calls.append(1)
            for n in range(50):
                yield {"n": n}
            raise ConnectionResetError

        graph.source("in", resume=resume, outage=0.5)(lambda: read(calls))
        running = graph.start()
        with pytest.raises(ProcessorStopped):
            running.wait_done()
        assert len(running.messages("in")) == 50 and len(calls) < 10 and (resume == "skip" or len(calls) == 1)
        running.close()


@pytest.mark.slow
def test_while_something_is_away_no_other_message_is_tried(tmp_path: Path) -> None:
    graph, back = cues.Graph("g", store=tmp_path / "s", durability="process", errors="errors"), threading.Event()
    calls: dict[int, int] = {}

    @graph.sink("in", concurrency=8)
    def call(message: Any) -> None:
        calls[message["n"]] = calls.get(message["n"], 0) + 1
        if message["n"] == 0 and not back.is_set():
            raise TimeoutError

    graph.add(cues.Source("in", None))
    with graph.start() as running:
        running.queues["in"].appender().write_many([{"n": n} for n in range(8)])
        until(lambda: calls.get(0, 0) >= 5)
        back.set()
        assert running.wait_idle(60) and not running.messages("errors")
    assert all(calls[n] <= 2 for n in range(1, 8)), calls


def test_other_units_of_the_same_thread_go_on(tmp_path: Path) -> None:
    """One thread steps the units of all four partitions, and what one of them needs is away."""
    options = cues.QueueOptions(partitions=4, key="n")
    graph = cues.Graph("g", store=tmp_path / "s", durability="process", queues={"in": options})
    back, done = threading.Event(), []

    @graph.sink("in")
    def call(message: Any) -> None:
        if message["n"] == 0 and not back.is_set():
            raise Away("one is off", retry_after_s=1000)
        done.append((message["n"], message["part"]))

    graph.add(cues.Source("in", None))
    with pytest.raises(ProcessorStopped, match="one is off"), graph.start() as running:
        for part in range(5):  # the others have messages again and again while it waits
            for n in range(40):
                running.send({"n": n, "part": part})
            until(lambda: len([n for n, p in done if p == part]) >= 30)
        standing = [status.counters.away for status in running.standings()]
        assert len([text for text in standing if text]) == 1
        waits = set(range(40)) - {n for n, _ in done}
        assert 0 in waits and len(waits) < 20
        assert not running.wait_idle(0.5)
    back.set()
    with graph.start() as running:
        assert running.wait_idle(60)
    assert sorted(done) == [(n, part) for n in range(40) for part in range(5)]
    assert [[p for m, p in done if m == n] for n in range(40)] == [list(range(5))] * 40, "in their order"


@pytest.mark.slow
def test_a_redrive_of_a_paused_processor_waits_too(tmp_path: Path) -> None:
    graph = cues.Graph("g", store=tmp_path / "s", durability="process", errors="errors")
    away, calls = threading.Event(), [0]

    @graph.stream("in", "out")
    def call(message: Any) -> Any:
        calls[0] += 1
        if away.is_set():
            raise ConnectionResetError
        raise ValueError

    graph.add(cues.Source("in", None))
    running = graph.start()
    running.send({"n": 0})
    assert running.wait_idle(60)
    cues.pause(running.store, processor="call")
    until(lambda: "paused" in [unit.state for unit in running.standings()])
    away.set()
    calls[0] = 0
    with contextlib.suppress(WaitTimeout, ProcessorStopped):
        running.redrive(all=True, timeout=1.5)
    assert 1 <= calls[0] < 12
    running.close()


@pytest.mark.slow
def test_an_outage_is_shown_by_every_display(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, outside = waiting_graph(tmp_path, lambda: Away("off", what="scale 3"))
    with graph.start() as running:
        for n in range(10):
            running.send({"n": n})
        until(lambda: running.counters()["g.call"].away)
        until(
            lambda: cli(["status", str(tmp_path / "s"), "--table"]) or "g.call waits for scale 3 since" in read(capsys)
        )
        cli(["status", str(tmp_path / "s"), "--json"])
        assert '"away": "scale 3 since' in read(capsys)
        assert cli(["metrics", str(tmp_path / "s")]) == 0
        assert 'cues_processor_away{graph="g",processor="call"} 1' in read(capsys)
        outside.back.set()
        assert running.wait_idle(60)


def read(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


# --- targets --------------------------------------------------------------------------------------


class Target:
    """A target in memory that is away: its transaction does not begin, or its commit may have happened."""

    where = "memory"

    def __init__(self, outside: Outside, at: str) -> None:
        self.outside, self.at = outside, at
        self.rows: list[int] = []
        self.end = 0

    def __cues_prepare__(self) -> None:
        if self.at == "prepare":
            self._try()

    def _try(self) -> None:
        try:
            self.outside(0)
        except ConnectionError as error:
            raise wrapped(error) from error.__cause__ or error

    @contextmanager
    def transaction(self, process: cues.Process) -> Iterator[Any]:
        if self.at == "begin":
            self._try()
        (start,) = process.delivery.start.values()
        rows: list[int] = []
        yield SimpleNamespace(connection=rows, known=max(0, self.end - start))
        if self.at == "commit":
            self._try()
        self.rows += rows
        self.end = start + len(rows)


@pytest.mark.parametrize("at", ["prepare", "begin", "commit"])
def test_a_target_is_waited_for(at: str, tmp_path: Path) -> None:
    graph = cues.Graph("g", store=tmp_path / "s", errors="errors")
    counted(graph)
    outside, heard = Outside(0 if at == "prepare" else 2), Heard()
    target = Target(outside, at)

    @graph.sink("in", batch=True, batch_size=20, checkpoint=target)
    def save(messages: Any, process: cues.Process) -> None:
        process.connection.extend(message["n"] for message in messages)

    with graph.start(listeners=(heard,)) as running:
        text = until(lambda: running.counters()["g.save"].away)
        assert text.startswith("db:5432 since")
        outside.back.set()
        assert running.wait_done()
        assert not running.messages("errors")
    assert target.rows == list(range(COUNT)) and heard.outages == [("g.save", False), ("g.save", True)]


PIPELINE = """
import os, sys
import cues
from cues.processors.sql_sink import Table

graph = cues.Graph("g", errors="errors", durability="process")

@graph.source("in")
def count(position):
    import time
    for n in range(position or 0, 3000):
        if n % 100 == 0:
            time.sleep(0.02)
        while n >= 1000 and not os.path.exists("more"):
            time.sleep(0.02)
        yield n + 1, {"n": n}

graph.add(Table(os.environ["DATABASE"], "numbers", columns={"n": "integer"}).sink("in", id="save", batch_size=50))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("workers", "away_s"),
    [
        pytest.param([], 1, id="threads"),
        pytest.param(["--workers", "2"], 5, id="workers"),
        pytest.param([], 60, id="a minute", marks=pytest.mark.long),
    ],
)
def test_a_database_is_restarted_under_load(workers: list[str], away_s: float, tmp_path: Path) -> None:
    """It is down at the start, and twice in the middle; once the run is killed while it waits."""
    psycopg = pytest.importorskip("psycopg")
    if postgres.programs() is None:
        pytest.skip("no PostgreSQL")
    (tmp_path / "graph.py").write_text(PIPELINE)
    with postgres.running() as server:
        url = server.database()
        server.stop()
        command = [str(Path(sys.executable).with_name("cues")), "run", "graph.py", "--store", "s", *workers]
        environment = {**os.environ, "DATABASE": url}

        told = tmp_path / "told"

        def started() -> subprocess.Popen[str]:
            with open(told, "a") as file:
                return subprocess.Popen(
                    command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=file, text=True
                )

        def until_waits(times: int) -> None:
            until(lambda: told.exists() and told.read_text().count("waiting for postgresql") >= times)

        def count() -> int:
            name = url.rpartition("%3D")[2]
            with psycopg.connect(f"host={server.directory} user=postgres dbname=postgres") as connection:
                there = connection.execute(f"select to_regclass('{name}.numbers')").fetchone()[0]
                return int(connection.execute(f"select count(*) from {name}.numbers").fetchone()[0]) if there else 0

        run = started()
        until_waits(1)
        server.start()
        until(lambda: count() > 100)
        server.stop()
        (tmp_path / "more").touch()  # however fast the run was, there is something to write
        until_waits(2)
        time.sleep(away_s)
        assert run.poll() is None
        run.send_signal(signal.SIGKILL)
        run.wait()
        run = started()
        until_waits(3)
        server.start()
        before = count()
        until(lambda: count() > before)
        if run.poll() is None:
            server.stop()
            time.sleep(away_s)
            server.start()
        assert run.wait(120) == 0, told.read_text()
        assert "is there again" in told.read_text()
        name = url.rpartition("%3D")[2]
        with psycopg.connect(f"host={server.directory} user=postgres dbname=postgres") as connection:
            rows = [row[0] for row in connection.execute(f"select n from {name}.numbers order by n").fetchall()]
        assert rows == list(range(3000))


# --- servers --------------------------------------------------------------------------------------


class Server:
    """An HTTP server on a fixed port that can be down, silent, or busy."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.mode = "ok"
        self.keys: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            text = b""
            while b"\r\n\r\n" not in text:
                more = connection.recv(65536)
                if not more:
                    return
                text += more
            if self.mode == "reset":
                return
            if self.mode == "silent":
                time.sleep(5)
                return
            lines = text.decode().lower().split("\r\n")
            status = "503 busy\r\nRetry-After: 0" if self.mode == "busy" else "200 OK"
            if self.mode == "ok":
                self.keys += [line.partition(": ")[2] for line in lines if line.startswith("idempotency-key")]
            body = b'[{"id": 1}]' if lines[0].startswith("get") else b""
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode() + body)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.mark.parametrize("mode", ["reset", "silent", "busy"])
def test_requests_wait_for_their_server(mode: str, server: Server, tmp_path: Path) -> None:
    graph, heard = cues.Graph("g", store=tmp_path / "s", errors="errors"), Heard()
    graph.add(cues.Source("in", None))
    timeout_s = 1.0 if mode == "silent" else 30.0
    graph.add(Requests(f"http://127.0.0.1:{server.port}/x", timeout_s=timeout_s).sink("in", concurrency=3))
    with graph.start(listeners=(heard,)) as running:
        for n in range(10):
            running.send({"n": n})
        until(lambda: len(set(server.keys)) == 10)
        server.mode = mode
        for n in range(10):
            running.send({"n": n})
        assert until(lambda: running.counters()["g.send"].away).startswith(f"http://127.0.0.1:{server.port}/x since")
        server.mode = "ok"
        assert running.wait_idle(60) and not running.messages("errors")
    assert len(set(server.keys)) == 20
    outages = len(heard.outages) // 2 or 1 if mode == "silent" else 1  # a busy machine may be silent, too
    assert heard.outages == [("g.send", False), ("g.send", True)] * outages


def test_requests_to_many_servers_do_not_wait_for_one(server: Server, tmp_path: Path) -> None:
    """The URL is a function of the message: one that is away must not hold the others."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()[1]
    graph = cues.Graph("g", store=tmp_path / "s", errors="errors")
    graph.add(cues.Source("in", None))
    requests = Requests(lambda message: f"http://127.0.0.1:{message['port']}/x", attempts=2)
    assert isinstance(Requests(lambda message: "x").retries, cues.Retry) and Requests("http://x/").retries == 0
    graph.add(requests.sink("in"))
    with graph.start() as running:
        for port in (server.port, gone, server.port):
            running.send({"port": port})
        assert running.wait_idle(60)
        assert len(running.messages("errors")) == 1
    assert len(server.keys) == 2


def test_a_poll_waits_for_its_server(server: Server, tmp_path: Path) -> None:
    graph, heard = cues.Graph("g", store=tmp_path / "s"), Heard()
    server.mode = "busy"
    graph.add(cues.Source("in", Poll(f"http://127.0.0.1:{server.port}/x", id="id", interval_s=None)))
    with graph.start(listeners=(heard,)) as running:
        until(lambda: running.counters()["g.in"].away)
        server.mode = "ok"
        assert running.wait_done()
        assert running.messages("in") == [{"id": 1}]
    assert heard.outages == [("g.in", False), ("g.in", True)]


def test_the_deterministic_runner_stops_at_an_outage(tmp_path: Path) -> None:
    """A test of a graph must not wait for ever."""
    graph, outside = waiting_graph(tmp_path, refused)
    with cues.open(tmp_path / "s") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(7)])
        with pytest.raises(ProcessorStopped, match="start again when it can be reached"):
            testing.run_until_idle(graph, store)
        assert numbers(store, "out") == list(range(5))
        outside.error = lambda: outside.back.set() or ConnectionResetError()
        report = testing.run_until_idle(graph, store)
        assert numbers(store, "out") == list(range(7)) and len(report.waits_s) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_wait_for_a_full_disk(kind: str, tmp_path: Path) -> None:
    """Another program fills the disk of the output, and frees it again."""
    from test_incidents_storage import small_disk

    from cues.processors.file_sink import FileSink

    with small_disk(tmp_path / "disk", "16m") as disk:
        graph, heard = cues.Graph("g", store=tmp_path / "s", durability="process"), Heard()
        other = disk / "other"
        with open(other, "wb") as file:
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            os.posix_fallocate(file.fileno(), 0, free - 200_000)

        @graph.source("in")
        def count(position: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
            for n in range(position or 0, 3000):
                yield n + 1, {"n": n, "x": f"{n:x}" * 200}

        graph.add(FileSink(disk / "out", kind, roll_bytes=300_000).sink("in", id="save", batch_size=100))
        with graph.start(listeners=(heard,)) as running:
            assert "No space left" in until(lambda: running.counters()["g.save"].away)
            other.unlink()
            assert running.wait_done()
        found: list[int] = []
        for path in sorted((disk / "out").glob(f"*.{kind}*")):
            if kind == "parquet":
                import pyarrow.parquet as pq

                found += pq.read_table(path)["n"].to_pylist()
            else:
                import json

                found += [json.loads(line)["n"] for line in path.read_text().splitlines()]
        assert found == list(range(3000)) and heard.outages[-1] == ("g.save", True)


@pytest.mark.slow
def test_a_locked_file_of_sqlite_is_waited_for(tmp_path: Path) -> None:
    from cues.processors.sql import SQLite

    path = tmp_path / "x.db"
    graph, heard = cues.Graph("g", store=tmp_path / "s", durability="process"), Heard()
    graph.add(cues.Source("in", None))

    @graph.sink("in", checkpoint=SQLite(path, timeout_s=0.2), batch=True)
    def save(messages: Any, process: cues.Process) -> None:
        process.connection.execute("create table if not exists t (n integer)")
        process.connection.executemany("insert into t values (?)", [(m["n"],) for m in messages])

    with graph.start(listeners=(heard,)) as running:
        running.send({"n": 0})
        assert running.wait_idle(60)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("begin exclusive")
        for n in range(1, 50):
            running.send({"n": n})
        assert "locked" in until(lambda: running.counters()["g.save"].away)
        other.execute("rollback")
        assert running.wait_idle(60)
        assert [row[0] for row in other.execute("select n from t order by n")] == list(range(50))
        other.close()
    assert heard.outages == [("g.save", False), ("g.save", True)]


@pytest.mark.slow
def test_a_table_is_read_on_after_its_database_was_restarted(tmp_path: Path) -> None:
    from cues.processors.sql_source import Rows

    psycopg = pytest.importorskip("psycopg")
    if postgres.programs() is None:
        pytest.skip("no PostgreSQL")
    with postgres.running() as server:
        url = server.database()
        name = url.rpartition("%3D")[2]
        with psycopg.connect(f"host={server.directory} user=postgres dbname=postgres") as connection:
            connection.execute(f"create table {name}.t (n integer primary key)")
            connection.execute(f"insert into {name}.t select generate_series(0, 4999)")
        graph, heard = cues.Graph("g", store=tmp_path / "s", durability="process"), Heard()
        graph.add(cues.Source("in", Rows(url, "t", "n", follow=True, poll_s=0.05)))
        server.stop()
        with graph.start(listeners=(heard,)) as running:
            until(lambda: running.counters()["g.in"].away)
            server.start()
            until(lambda: len(running.queues["in"]) == 5000)
            server.stop()
            until(lambda: running.counters()["g.in"].away)
            server.start()
            with psycopg.connect(f"host={server.directory} user=postgres dbname=postgres") as connection:
                connection.execute(f"insert into {name}.t select generate_series(5000, 5999)")
            until(lambda: len(running.queues["in"]) == 6000)
            assert [message["n"] for message in running.messages("in")] == list(range(6000))
        assert [over for _, over in heard.outages] == [False, True, False, True]


def write(running: cues.Running, start: int, end: int) -> None:
    """Send numbers."""
    for n in range(start, end):
        running.send("in", {"n": n})


@pytest.mark.slow
def test_a_password_that_was_changed_stops_the_run_and_says_so(tmp_path: Path) -> None:
    """It is no outage: no wait mends it. With the right one the run goes on, and nothing is lost or doubled."""
    from cues.processors.sql_sink import Table

    psycopg = pytest.importorskip("psycopg")
    if postgres.programs() is None:
        pytest.skip("no PostgreSQL")
    with postgres.running() as server:
        admin = f"host={server.directory} user=postgres dbname=postgres"
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute("create role app login password 'first'; create schema app authorization app")
        rules = server.directory / "data" / "pg_hba.conf"
        rules.write_text("local all postgres trust\nlocal all app scram-sha-256\n")
        server.stop()
        server.start()

        def graph(password: str) -> cues.Graph:
            url = f"postgresql+psycopg://app:{password}@/postgres?host={server.directory}"
            made = cues.Graph("g", store=tmp_path / "s", durability="process", errors="errors")
            made.add(cues.Source("in"))
            made.add(Table(url, "app.t", {"n": "integer"}).sink("in"))
            return made

        stopped = pytest.raises(cues.errors.ProcessorStopped, match="password authentication failed")
        with stopped as told, graph("first").start() as running:
            write(running, 0, 100)
            running.wait_idle(timeout=60)
            with psycopg.connect(admin, autocommit=True) as connection:
                connection.execute("alter role app password 'second'")
                connection.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'")
            write(running, 100, 200)
            running.wait_idle(timeout=60)
        assert "second" not in str(told.value) and "first" not in str(told.value)
        with graph("second").start() as running:
            running.wait_idle(timeout=60)
            assert running.messages("errors") == []
        with psycopg.connect(admin) as connection:
            rows = connection.execute("select n from app.t order by n").fetchall()
        assert rows == [(n,) for n in range(200)]


@pytest.mark.slow
def test_a_sink_goes_on_at_the_standby_that_was_promoted(tmp_path: Path) -> None:
    """The URL names both servers. The standby is synchronous, so what was committed is there."""
    from cues.processors.sql_sink import Table

    psycopg = pytest.importorskip("psycopg")
    if postgres.programs() is None:
        pytest.skip("no PostgreSQL")
    settings = "wal_level=replica", "synchronous_standby_names=*", "synchronous_commit=local"
    with postgres.running(*settings) as first, first.standby() as second:
        hosts = "&".join(f"host={server.directory}" for server in (first, second))
        url = f"postgresql+psycopg://postgres@/postgres?{hosts}&target_session_attrs=read-write"
        graph, heard = cues.Graph("g", store=tmp_path / "s", durability="process"), Heard()
        graph.add(cues.Source("in"))
        remote = f"{url}&options=-csynchronous_commit%3Don"
        graph.add(Table(remote, "t", {"n": "integer"}).sink("in", batch_size=20))
        with graph.start(listeners=(heard,)) as running:
            write(running, 0, 300)
            running.wait_idle(timeout=60)
            write(running, 300, 3000)
            first.kill()
            until(lambda: running.counters()["g.save"].away)
            second.promote()
            running.wait_idle(timeout=120)
        assert [over for _, over in heard.outages] == [False, True]
        with psycopg.connect(f"host={second.directory} user=postgres dbname=postgres") as connection:
            rows = connection.execute("select n from t order by n").fetchall()
        assert rows == [(n,) for n in range(3000)]
        first.start()  # it is ended with the test


def lake(kind: str, path: Path) -> Any:
    """A table of one column."""
    pa = pytest.importorskip("pyarrow")
    schema = pa.schema({"n": pa.int64()})
    if kind == "delta":
        pytest.importorskip("deltalake")
        return DeltaTarget(path / "t", schema=schema)
    pytest.importorskip("pyiceberg")
    place = {"type": "sql", "uri": f"sqlite:///{path}/catalog.db?timeout=0.1", "warehouse": f"file://{path}"}
    return IcebergTarget("lake.t", catalog=place, schema=schema)


def lake_numbers(target: Any) -> list[int]:
    table = target.open()
    found = table.to_pyarrow_table() if isinstance(target, DeltaTarget) else table.scan().to_arrow()
    return sorted(found.column("n").to_pylist())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_full_disk_under_a_table_is_waited_for(kind: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path / "disk")]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a file system here")
    try:
        target, filling = lake(kind, tmp_path / "disk"), tmp_path / "disk" / "other"
        graph = cues.Graph("g", [cues.Source("q"), target.sink("q", batch_size=10)])
        with cues.open(tmp_path / "s") as store, graph.start(store=store) as running:
            store.queue("q").appender().write_many([{"n": n} for n in range(30)])
            running.wait_idle()
            with contextlib.suppress(OSError), open(filling, "wb", 0) as file:
                while file.write(b"x" * 4096):
                    pass
            store.queue("q").appender().write_many([{"n": n} for n in range(30, 60)])
            until(lambda: running.counters()["g.save"].away)
            filling.unlink()
            running.wait_idle()
            assert not running.counters()["g.save"].away
        assert lake_numbers(target) == list(range(60))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=True)


def test_a_locked_catalog_of_iceberg_is_waited_for(tmp_path: Path) -> None:
    target = lake("iceberg", tmp_path)
    target.__cues_prepare__()
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(CheckpointError, match="locked") as error:
            lake("iceberg", tmp_path).open()
        assert is_away(error.value)
    assert lake_numbers(target) == []


@pytest.mark.slow
def test_a_port_that_accepts_and_never_answers_is_away(tmp_path: Path) -> None:
    """As behind a firewall. The connection is given up after the time that the URL says."""
    from cues.processors.sql_sink import Table

    pytest.importorskip("psycopg")
    graph, heard = cues.Graph("g", store=tmp_path / "s", durability="process"), Heard()
    graph.add(cues.Source("in"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres?connect_timeout=2"
        graph.add(Table(url, "t", {"n": "integer"}).sink("in"))
        with pytest.raises(ProcessorStopped, match="timeout expired"), graph.start(listeners=(heard,)) as running:
            running.send("in", {"n": 1})
            until(lambda: running.counters()["g.save"].away)
    assert [over for _, over in heard.outages][:1] == [False]


class Nameless:
    """A source, or a target, whose driver says nothing but the class of its error."""

    where = "plant.readings at tcp:7"

    def __call__(self, position: int | None) -> Iterator[Any]:
        raise ConnectionResetError
        yield

    @contextmanager
    def transaction(self, process: cues.Process) -> Iterator[Any]:
        raise ConnectionResetError
        yield


@pytest.mark.parametrize("part", ["source", "target"])
def test_a_wait_names_the_place_although_the_driver_does_not(part: str, tmp_path: Path) -> None:
    graph = cues.Graph("g", [cues.Source("in", Nameless() if part == "source" else None)], store=tmp_path / "s")
    if part == "target":
        graph.sink("in", id="save", batch=True, checkpoint=Nameless())(lambda messages, process: None)
    waits = "g.in" if part == "source" else "g.save"
    stopped = pytest.raises(ProcessorStopped) if part == "target" else contextlib.nullcontext()
    with stopped, graph.start() as running:
        if part == "target":
            running.send("in", {"n": 1})
        text = until(lambda: running.counters()[waits].away)
    where, _, why = text.partition(" since ")
    assert where == "plant.readings at tcp:7"
    assert re.fullmatch(r"\d\d:\d\d:\d\d: (CheckpointError: .*begin a transaction: )?ConnectionResetError", why)


def test_a_table_of_a_database_that_is_away_is_named(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    rows = Rows("postgresql+psycopg://ada@127.0.0.1:9/shop", "orders", "id", follow=True)
    with cues.Graph("g", [cues.Source("in", rows)], store=tmp_path / "s").start() as run:
        text = until(lambda: run.counters()["g.in"].away)
    assert text.startswith("orders at postgresql+psycopg://ada@127.0.0.1:9/shop since ")


def test_a_server_that_is_silent_is_named_with_the_time(tmp_path: Path) -> None:
    """The error of the time-out has no text, and the advice of an error is not for somebody who reads of a wait."""
    pytest.importorskip("httpx")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        graph = cues.Graph("g", [Requests(url, timeout_s=0.1).sink("in", id="send")], store=tmp_path / "s")
        graph.source("in")
        with pytest.raises(ProcessorStopped), graph.start() as running:
            running.send("in", {"n": 1})
            text = until(lambda: running.counters()["g.send"].away)
    assert text.endswith(f": TryLater: POST {url} had no whole answer (TimeoutError: 0.1 s).")
