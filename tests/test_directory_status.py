"""``cues status`` of a shared directory, and of a graph that last ran with one. No Spark, no Java."""

from __future__ import annotations

import json
import os
import re
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

import terminal
from directory_steps import DriverRun, FaultyFiles, Message

import cues
from cues import Graph, Stream, testing
from cues.engine import record
from cues.spark.cluster import cleaning, inspection, lease, operations
from cues.spark.cluster.delays import folder_of_delayed
from cues.spark.cluster.files import sealed_json
from cues.spark.cluster.lease import DriverLease, holders
from cues.spark.cluster.ledger import Ledger

GRAPH = """
import cues
graph = cues.Graph("g", durability="process")
graph.source("in")
@graph.stream("in", "out")
def p(message):
    return message
"""


def even(message: Message) -> Message:
    if message["n"] % 2:
        raise ValueError(f"odd: {message['n']}")
    return message


def numbers(count: int) -> list[Message]:
    return [{"n": n} for n in range(1, count + 1)]


def status(target: object) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """The queues and the processors by name, and the drivers."""
    result = terminal.cues("status", target)
    assert result.code == 0, result
    rows = [json.loads(line) for line in result.out.splitlines()]
    processors = {row["processor"]: row for row in rows if "processor" in row}
    queues = {row["queue"]: row for row in rows if "files" in row}
    return queues, processors, [row for row in rows if "host" in row]


@pytest.fixture
def files(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(str(tmp_path / "queues"))


def graph() -> Graph:
    streams = [Stream(even, "in", "out", id="p"), Stream(even, "in", "other", id="q", errors="errors2")]
    return Graph("g", streams, errors="errors")


def test_failed_messages_rates_and_the_last_error(files: FaultyFiles) -> None:
    DriverRun(files, graph()).claim().feed("in", numbers(21)).run()
    queues, processors, drivers = status(files.url)
    assert drivers == [] and {name: row["messages"] for name, row in queues.items()} == {
        "in": 21,
        "out": 10,
        "other": 10,
        "errors": 11,
        "errors2": 11,
    }
    assert all(row["bytes"] > 0 for row in queues.values())
    for name, queue in [("g.p", "errors"), ("g.q", "errors2")]:
        row = processors[name]
        assert row["errors"] == 11 and row["lag"] == 0
        assert (row["last_error"]["queue"], row["last_error"]["index"]) == (queue, 11)
        assert row["last_error"]["text"] == "odd: 21"
        assert row["rate"] in (2.1, 0.0)  # 21 messages in ten seconds, or the machine was paused
    table = terminal.cues("status", files.url, "--table").out
    assert "FAILED" in table and "PER SECOND" in table and "Not running" in table
    told = rf"Last error of g\.p, .*: ValueError: odd: 21\n  cues errors {re.escape(files.url)}#errors --index 11\n"
    assert re.search(told, table)


def test_a_rate_is_that_of_the_last_ten_seconds(files: FaultyFiles) -> None:
    """By the times of the records; long idle processors have none."""
    DriverRun(files, graph()).claim().feed("in", numbers(21)).run()
    (last,) = (one for one in inspection.processors_of(files.url) if one.processor == "g.p")
    folder = "_cues/steps/g.p"
    for age_s, expected in [(0, 2.1), (9, 2.1), (60, 0.0)]:
        for name in files.names(folder):
            fields = json.loads(files.read(f"{folder}/{name}") or b"")
            fields["time"] = datetime.fromtimestamp(datetime.now().timestamp() - age_s).astimezone().isoformat()
            del fields["seal"]
            files.write(f"{folder}/{name}", sealed_json(fields))
        (last,) = inspection.records_of(files.url, "g.p", 1)
        rate = inspection.rate_of(files.url, last)
        assert rate == expected or (age_s == 9 and rate == 0.0)


@pytest.mark.slow
def test_one_queue_with_its_processors(files: FaultyFiles) -> None:
    DriverRun(files, graph()).claim().feed("in", numbers(4)).run()
    for name, expected in [("in", {"g.p", "g.q", "g.sources.feed"}), ("other", {"g.q"}), ("errors", {"g.p"})]:
        queues, processors, _ = status(f"{files.url}#{name}")
        assert (set(queues), set(processors)) == ({name}, expected)
    refused = terminal.cues("status", f"{files.url}#othr")
    assert refused.code == 1 and f"cues status {files.url}#other" in refused.err


@pytest.mark.slow
def test_the_driver_that_runs_and_since_when(files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    DriverRun(files, graph()).claim()
    held = DriverLease(files, "g", "somebody")
    held.acquire(take_over=False)
    (driver,) = status(files.url)[2]
    assert (driver["graph"], driver["host"], driver["pid"]) == ("g", socket.gethostname(), os.getpid())
    since = driver["since"]
    held.beat()
    (driver,) = status(files.url)[2]
    assert driver["since"] == since <= driver["beat"]
    (seen,) = holders(files)
    assert seen.state in ("runs", "does not answer")  # the machine may pause for longer than a lease
    line = terminal.cues("status", files.url, "--table").out.splitlines()[1]
    assert line.startswith(f"g: the driver {os.getpid()} on {socket.gethostname()}") and "since" in line
    monkeypatch.setattr(lease, "LEASE_S", -1.0)
    assert [one.state for one in holders(files)] == ["does not answer"]
    held.release()
    assert status(files.url)[2] == []
    DriverLease(files, "g", "dead").beat()
    assert [one.state for one in holders(files)] == ["has ended"]


def test_messages_of_a_source_that_are_not_copied(files: FaultyFiles, tmp_path: Path) -> None:
    """By the store, if this machine has it, and it is the one."""
    store = tmp_path / "store"
    with cues.open(store, durability="process") as opened:
        queue = opened.queue("in")
        queue.appender().write_many(numbers(10))
        identity = queue.core.row().identity.hex()
    run = DriverRun(files, graph()).claim()
    ledger = Ledger(files, "g.sources.feed", "driver")
    assert ledger.claim(None, {"in": (identity, 4)})
    assert run.queues
    lags = []
    for place, host in [(store, socket.gethostname()), (store, "elsewhere"), (tmp_path / "none", socket.gethostname())]:
        files.write("_cues/g.store.json", json.dumps({"store": str(place), "host": host}).encode())
        lags.append(status(files.url)[1]["g.sources.feed"]["lag"])
    assert lags == [7, None, None]


def test_a_run_without_the_directory_is_told_that_it_does_not_continue(tmp_path: Path) -> None:
    """Once; and cues status of the graph names the directory until then."""
    file, store = tmp_path / "graph.py", tmp_path / "data" / "g"
    file.write_text(GRAPH)
    assert terminal.cues("send", f"{file}#in", "n=1").code == 0
    record.note_queues(str(store), "g", "s3://bucket/flights")
    assert record.queues_of(store, "other") is None
    (row, *_) = map(json.loads, terminal.cues("status", file).out.splitlines())
    assert row["directory"] == "s3://bucket/flights"
    table = terminal.cues("status", file, "--table").out
    assert re.search(r"g last ran with its queues in s3://bucket/flights, .*: cues status s3://bucket/flights\n", table)
    first, second = (terminal.cues("run", file, "--idle-exit", 0, "--json") for _ in range(2))
    assert first.code == second.code == 0, first
    warning = next(json.loads(line) for line in first.err.splitlines() if "last run had" in line)
    assert warning["level"] == "warning" and "--engine spark --queues s3://bucket/flights" in warning["text"]
    assert "last run had" not in second.err
    record.note_queues(str(store), "g", "s3://bucket/flights")
    fresh = terminal.cues("run", file, "--idle-exit", 0, "--fresh", "--yes")
    assert fresh.code == 0 and "last run had" not in fresh.err and record.queues_of(store, "g") is None


def test_the_page_shows_queues_messages_steps_and_errors_of_a_directory(files: FaultyFiles) -> None:
    """And it refuses by name what a directory does not have."""
    from cues.errors import Unsupported
    from cues.ui.look import look_of, settings_of

    DriverRun(files, graph()).claim().feed("in", numbers(21)).run()
    look = look_of(settings_of(files.url, None, "queues"))
    seen = look.overview()
    assert {row["name"]: row["messages"] for row in seen["queues"]}["in"] == 21
    assert {row["id"]: (row["lag"], row["errors"]) for row in seen["processors"]}["g.p"] == (0, 11)
    assert {(edge["from"], edge["to"]) for edge in look.graph()["edges"]} >= {("q:in", "p:g.p"), ("p:g.p", "q:out")}
    newest = look.messages("in", older=True, count=5)
    assert [json.loads(row["text"])["n"] for row in newest["messages"]] == [17, 18, 19, 20, 21]
    older = look.messages("in", newest["before"], older=True, count=5)
    assert [json.loads(row["text"])["n"] for row in older["messages"]] == [12, 13, 14, 15, 16]
    assert [json.loads(row["text"])["n"] for row in look.messages("in", where="n > 19")["messages"]] == [20, 21]
    assert json.loads(look.message("in", 3)["text"]) == {"n": 3}
    assert look.steps("g.p")["steps"]
    assert {row["processor"] for row in look.errors()["errors"]} == {"g.p", "g.q"}
    for refused in (lambda: look.state("g.p"), lambda: look.became("in", 1)):
        with pytest.raises(Unsupported):
            refused()


# --- messages and timers that wait --------------------------------------------------------------

START = datetime(2026, 1, 31, tzinfo=UTC)
SET = [(1, 10), (2, 30), (1, 50), (3, 20), (3, None), (4, 40)]
"""Numbers, and the seconds after which their timers are due; the timer of 1 is replaced, that of 3 is cancelled."""
FAILING: set[int] = set()


def at(seconds: int) -> datetime:
    return START + timedelta(seconds=seconds)


def sets(message: Message, process: Any) -> Any:
    """Set or cancel the timer of a number, and give the message to the next processor at the same time."""
    due = None if message["due"] is None else at(message["due"])
    process.timer(message["n"], due)
    return message if due is None else cues.delayed(message, deliver_at=due)


def rings(timer: Message, process: Any) -> Message:
    if timer["key"] in FAILING:
        raise ValueError("not yet")
    return {"n": timer["key"], "timer": True}


def waits(files: FaultyFiles, size: int = 1) -> DriverRun:
    options: dict[str, Any] = {"key": "n", "timer": rings, "ttl": "9d"}
    streams = [Stream(sets, "in", "out", id="p", **options), Stream(dict, "out", "last", id="q")]
    return DriverRun(files, Graph("g", streams), 1, lambda: size).claim()


def test_messages_and_timers_that_wait_are_shown_in_the_words_for_a_store(files: FaultyFiles) -> None:
    """The next timer is one that is set: not one that was replaced or cancelled, also while its file is due."""

    def shown() -> tuple[Any, Any]:
        rows = status(files.url)[1]
        return rows["g.p"]["timer"], rows["g.q"]["delayed"]

    with testing.Clock(START) as hands:
        waits(files).feed("in", [{"n": n, "due": due} for n, due in SET]).run()
        assert shown() == ("2026-01-31T00:00:30Z", {"messages": 5, "next": "2026-01-31T00:00:10Z"})
        table = terminal.cues("status", files.url, "--table").out
        assert "\ng.q holds 5 delayed messages, the next one until 2026-01-31T00:00:10Z\n" in table
        assert "\nThe next timer of g.p is due at 2026-01-31T00:00:30Z\n" in table
        FAILING.add(4)
        try:
            hands.advance(45)
            with pytest.raises(cues.ProcessorStopped):
                waits(files).run()
        finally:
            FAILING.clear()
        assert inspection.records_of(files.url, "g.p", 1)[0].record.due
        assert shown()[0] == "2026-01-31T00:00:40Z"  # moved, and not fired
        waits(files).run()
        assert shown() == ("2026-01-31T00:00:50Z", {"messages": 1, "next": "2026-01-31T00:00:50Z"})
        folder = folder_of_delayed("g.p")
        kept = {name: files.read(f"{folder}/{name}") for name in files.names(folder)}
        for name in kept:
            files.delete(f"{folder}/{name}")
        assert shown()[0] == "2026-01-31T00:00:50Z"  # damage is for cues check
        for name, data in kept.items():
            files.write(f"{folder}/{name}", data or b"")
        hands.advance(10)
        waits(files).run()
        assert shown() == (None, None)


def test_more_timers_that_were_replaced_than_are_compared_at_once(
    files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cues.spark.cluster.delays._COMPARED", 2)
    with testing.Clock(START):
        given = [{"n": n, "due": due} for due in range(10, 17) for n in range(3)]
        waits(files, size=5).feed("in", given).run()
        (last,) = inspection.records_of(files.url, "g.p", 1)
        assert inspection.next_timer(files.url, last) == at(16)


@pytest.mark.slow
def test_what_waits_comes_after_its_queues_are_optimized_purged_and_vacuumed(
    files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files are old enough to be deleted. Nothing is damaged after each command."""
    monkeypatch.setattr("cues.spark.cluster.directory.KEEP_FILES_H", 0)
    with testing.Clock(START) as hands:
        run = waits(files).feed("in", [{"n": n, "due": 200_000 + n} for n in range(30)], lambda: 1).run()
        for queue in ("in", "out"):
            assert cleaning.merge(files, cleaning.plan_merge(files, queue)).files > 0
            assert inspection.problems_of(files.url) == []
        run = waits(files).run()
        with operations.running_none(files, "g") as driver:
            for queue in ("in", "out"):
                assert operations.purge(driver, queue, 30).count == 29
        for queue in ("in", "out"):
            assert cleaning.vacuum(files, cleaning.plan_vacuum(files, queue)).files
            assert inspection.problems_of(files.url) == []
        hands.advance(200_100)
        run = waits(files).run()
    assert sorted(m["n"] for m in run.messages("out") if "timer" in m) == [*range(30)]
    assert sorted(m["n"] for m in run.messages("last") if "timer" not in m) == [*range(30)]
    assert inspection.problems_of(files.url) == []


def test_a_replay_says_that_the_outputs_in_a_directory_are_not_compared(tmp_path: Path) -> None:
    file = tmp_path / "graph.py"
    file.write_text(GRAPH)
    assert terminal.cues("send", f"{file}#in", "n=1").code == 0
    assert "not compared" not in terminal.cues("replay", file, "--into", tmp_path / "again").err
    record.note_queues(str(tmp_path / "data" / "g"), "g", "s3://bucket/flights")
    replayed = terminal.cues("replay", file, "--into", tmp_path / "once more")
    assert replayed.code == 0 and "The outputs in s3://bucket/flights are not compared" in replayed.err
