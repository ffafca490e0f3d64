"""What one watches: growth and time until full, latency, ``status --watch``, warnings that repeat, lost processes."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from terminal import Command
from terminal import cues as command

import cues
from cues import testing
from cues.base import events
from cues.base.histogram import Histogram
from cues.cli import progress
from cues.queues.options import QueueOptions
from cues.storage import leases
from cues.tools import metrics
from cues.tools.measurement import QueueMetrics
from cues.tools.metrics import until_full

# --- histograms -----------------------------------------------------------------------------------


def test_a_quantile_is_right_to_an_eighth() -> None:
    rng = random.Random(7)
    for high in (3, 40, 10_000, 10**9):
        values = sorted(rng.randrange(high) for _ in range(2_000))
        counted = Histogram()
        for value in values:
            counted.add(value)
        for share in (0.5, 0.9, 0.99):
            exact = values[int(share * len(values)) - 1]
            found = counted.quantile(share)
            assert found is not None
            assert abs(found - exact) <= max(1, exact / 4)
        assert counted.count == len(values)
        assert counted.total == pytest.approx(sum(values), rel=0.05)
        for power, below in zip(range(31), counted.below(range(31))):
            assert below == sum(value < 1 << power for value in values)


def test_histograms_are_added_and_subtracted() -> None:
    one, other = Histogram(), Histogram()
    one.add(5, 3)
    other.add(5, 1)
    other.add(900, 2)
    total = one.with_those_of(other)
    assert total.count == 6
    assert total.since(one) == other
    assert one.since(total) == one  # it began anew
    assert Histogram().quantile(0.5) is None
    counters = events.Counters(taken=4, latency=total)
    again = events.Counters.from_dict(json.loads(json.dumps(counters.to_dict())))
    assert (again, again.latency, again.sizes) == (counters, total, Histogram())


# --- latency --------------------------------------------------------------------------------------


def test_latency_is_from_the_append_to_the_commit_that_took_the_message(tmp_path: Path) -> None:
    with testing.Clock(datetime(2026, 1, 31, tzinfo=UTC)) as clock, cues.open(tmp_path / "s") as store:
        appender = store.queue("in").appender()
        appender.write_many([{}] * 98)
        clock.advance(9)
        appender.write_many([{}] * 2)
        clock.advance(1)
        graph = cues.Graph("g", [cues.Stream(lambda message: message, "in", "out", id="p")])
        report = testing.run_until_idle(graph, store)
        counters = report.counters["p"]
        assert counters.latency.count == 100
        assert counters.latency.quantile(0.99) == pytest.approx(10e6, rel=0.25)
        assert counters.latency.quantile(0.01) == pytest.approx(1e6, rel=0.25)
        assert counters.latency.below(range(20, 25)) == [2, 2, 2, 2, 100]  # 1 s is below 2**20 us, 10 s below 2**24
        assert counters.sizes.count == counters.steps
        assert counters.sizes.total == pytest.approx(100, rel=0.1)


# --- growth and room ------------------------------------------------------------------------------


def test_growth_is_that_of_the_last_hour(tmp_path: Path) -> None:
    with testing.Clock(datetime(2026, 1, 31, tzinfo=UTC)) as clock, cues.open(tmp_path / "s") as store:
        appender = store.queue("q").appender()
        appender.write_many([{"text": "x" * 100}] * 10)
        assert metrics.of_queue(store, "q").growth == 600  # in the first minute: as if it was one
        clock.advance(1800)
        appender.write_many([{"text": "x" * 100}] * 10)
        assert metrics.of_queue(store, "q").growth == pytest.approx(40, rel=0.01)
        clock.advance(3000)
        found = metrics.of_queue(store, "q")
        assert found.growth == 10  # the first ten are older than an hour
        assert found.growth_bytes == pytest.approx(found.bytes / 2)
        clock.advance(3600)
        assert metrics.of_queue(store, "q").growth == 0


def queue(size_bytes: int, growth_bytes: float, retention: Any = None) -> QueueMetrics:
    """A queue of messages of one byte."""
    options = QueueOptions(retention=retention)
    return QueueMetrics("q", 1, size_bytes, size_bytes, 0.0, None, options, growth=growth_bytes)


@pytest.mark.parametrize(
    ("queues", "room", "hours"),
    [
        ([], 1000, None),
        ([queue(100, 0)], 1000, None),
        ([queue(100, 10)], 1000, 100),
        ([queue(100, 10), queue(100, 90)], 1000, 10),
        ([queue(100, 10, "read")], 1000, None),
        ([queue(100, 10, 600)], 1000, None),  # stops at 600 messages
        ([queue(100, 10, 600)], 300, 30),
        ([queue(100, 10, "600B"), queue(5, 5)], 1000, 100),  # 500 and 500: the first stops after 50 h
        ([queue(100, 10, "100h")], 800, 80),  # it will hold 1000
        ([queue(100, 10, "100h")], 1000, None),
        ([queue(100, 10, cues.Retention(count=600, age="1h"))], 1000, None),  # either deletes
        ([queue(100, 10)], 0, 0),
    ],
)
def test_the_time_until_there_is_no_room(queues: list[QueueMetrics], room: int, hours: float | None) -> None:
    full_s = until_full(queues, room)
    assert full_s == (None if hours is None else pytest.approx(hours * 3600))


def test_status_shows_size_growth_retention_and_room_of_each_queue(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", max_map_size=1 << 26) as store:
        store.queue("kept", retention="10d").appender().write_many([{"n": n} for n in range(1000)])
        store.queue("all").appender().write({})
    table = command("status", tmp_path / "s", "--table").out
    assert "those of the last 10 d" in table
    assert "all messages" in table
    assert "+60,000, " in table
    assert "Room for " in table and "full in " in table
    (row,) = map(json.loads, command("status", tmp_path / "s", "--json").out.splitlines())
    assert row["by_queue"]["kept"]["retention"] == {"age": 864000.0}
    assert row["by_queue"]["kept"]["growth"] == pytest.approx(60_000)
    assert 0 < row["room_bytes"] < 1 << 26
    assert row["full_s"] > 0


# --- a process that was killed ----------------------------------------------------------------------


@pytest.mark.slow
def test_status_says_that_the_last_process_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "graph.py"
    path.write_text("import cues\ngraph = cues.Graph('g', durability='process')\ngraph.source('q')\n"
                    "@graph.sink('q')\ndef save(message): ...\n")  # fmt: skip
    run = Command("run", path, "--json")
    with run:
        run.until('"type": "progress"')
        run.signal(signal.SIGKILL)
        run.process.wait()
    assert (
        "Not running: its last process was killed, or its machine stopped, " in command("status", path, "--table").out
    )
    assert command("run", path, "--idle-exit", 0).code == 0
    lines = command("status", path, "--table").out.splitlines()
    assert "Not running" in lines


# --- status --watch ---------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with cues.open(tmp_path / "s") as opened:
        opened.queue("orders").appender().write({})
    return tmp_path / "s"


@pytest.mark.parametrize("arguments", [("--watch", "STORE"), ("STORE", "--watch", "0.1")])
def test_on_a_terminal_status_goes_on_in_place_until_ctrl_c(store: Path, arguments: tuple[str, ...]) -> None:
    given = [str(store) if argument == "STORE" else argument for argument in arguments]
    with Command("status", *given, terminal=True) as watch:
        watch.until(r"Ctrl-C ends[\s\S]*orders +1 ")
        with cues.open(store) as opened:
            opened.queue("orders").appender().write_many([{}] * 41)
        watch.until(r"orders +42 ")
        watch.type("\x03")
        assert watch.wait() == 130
    assert "Traceback" not in watch.text
    assert watch.screen.count("orders") == 1  # in place, and the last state stays
    assert "Ctrl-C ends" not in watch.screen
    assert "42" in watch.screen


def test_in_a_pipe_status_prints_a_block_every_time(store: Path) -> None:
    with Command("status", store, "--watch", "0.1", "--table") as watch:
        text = watch.until(r"(?s)durability disk.*durability disk.*durability disk")
        watch.signal(signal.SIGINT)
        assert watch.wait() == 130
    first = text.split("\n\n")[0].splitlines()
    assert datetime.strptime(first[0], "%Y-%m-%d %H:%M:%S")
    with Command("status", store, "--watch", "0.1") as watch:
        watch.until(r"(?s)by_queue.*by_queue")
        watch.signal(signal.SIGINT)
        assert watch.wait() == 130
    assert all(json.loads(line)["queues"] == 1 for line in watch.text.splitlines())


def test_a_watch_survives_a_store_that_is_replaced(store: Path) -> None:
    with Command("status", store, "--watch", "0.1", terminal=True) as watch:
        watch.until("orders")
        store.rename(store.with_name("away"))
        watch.until("There is no store at")
        store.with_name("away").rename(store)
        watch.text = ""
        watch.until("orders")
        watch.type("\x03")
        assert watch.wait() == 130


def test_a_wrong_time_is_refused(store: Path) -> None:
    refused = command("status", store, "--watch", "0")
    assert refused.code == 2
    assert "0" in refused.err
    missing = command("status", store.with_name("nowhere"), "--watch")
    assert missing.code == 1
    assert "There is no store at" in missing.err


# --- warnings ---------------------------------------------------------------------------------------


def test_warnings_of_several_workers_and_units_collapse(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Progress("g") as quiet:
        for unit in range(37):
            quiet.log("warning", f"worker-{unit % 4}: the server is away")
            quiet.event(events.Event(f"g.save/{unit}", "is slow", logging.WARNING))
            quiet.event(events.Event("", f"worker-{unit} (process {unit}) was killed", logging.WARNING))
    assert capsys.readouterr().err.splitlines() == [
        "warning: worker-0: the server is away",
        "g.save/0: is slow",
        "worker-0 (process 0) was killed",
        "warning: worker-0: the server is away (×37 in this run)",
        "g.save/0: is slow (×37 in this run)",
        "worker-0 (process 0) was killed (×37 in this run)",
    ]


def test_repetitions_are_counted_from_time_to_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.Lines("g") as lines:
        for _ in range(3):
            lines.log("warning", "away")
        lines.print_repeats()
        lines.log("warning", "away")
        lines.print_repeats()
        lines.print_repeats()  # it did not come again meanwhile, so
        lines.log("warning", "away")  # this one is printed at once
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["text"], line.get("repeated"), line.get("total")) for line in told] == [
        ("away", None, None),
        ("away", 2, None),
        ("away", 1, None),
        ("away", None, None),
        ("away", None, 5),
    ]
    with progress.Progress("g") as quiet:
        for number in range(3 * progress.MESSAGES_MAX):
            quiet.log("warning", f"{number} is new")
        assert len(quiet.repeats) <= progress.MESSAGES_MAX


# --- figures of processes -----------------------------------------------------------------------------


def test_counters_and_use_of_a_running_graph_are_seen_from_outside(tmp_path: Path) -> None:
    graph = cues.Graph("g", store=tmp_path / "s", durability="process")
    graph.source("orders")

    @graph.stream("orders", "priced")
    def price(order: dict[str, int]) -> dict[str, int]:
        return order

    with graph.start() as running:
        running.store.queue("orders").appender().write_many([{"n": n} for n in range(50)])
        assert running.wait_idle(timeout=30)
        deadline = time.monotonic() + 30
        while True:  # until a beat that has all of it
            with cues.open(tmp_path / "s", readonly=True) as store:
                seen = metrics.of_store(store)
            (processor,) = seen.processors
            if processor.counters is not None and processor.counters.taken == 50:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (processor.counters.taken, processor.counters.written) == (50, 50)
        assert processor.counters.latency.count == 50
        (process,) = seen.processes
        assert (process.pid, process.units, process.worker) == (os.getpid(), ("g.price",), "")
        assert process.cpu_s > 0
        assert process.memory_bytes > 1 << 20
    with cues.open(tmp_path / "s", readonly=True) as store:
        assert metrics.of_store(store).processes == ()
        assert metrics.of_processors(store)[0].counters is None


def test_figures_of_an_older_version_are_read(tmp_path: Path) -> None:
    """It noted calls only."""
    old = {"calls": 7, "in_flight": 1, "call_s": 0.5}
    counters = events.Counters.from_dict(old)
    assert (counters.calls, counters.in_flight, counters.taken, counters.latency) == (7, 1, 0, {})
    assert leases.of_process()["memory_bytes"] > 1 << 20
