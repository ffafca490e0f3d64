"""The history of a graph: a bounded file that a kill, a restart and a wrong clock leave readable."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import cues
from cues.cli.app import run
from cues.cli.output import sparkline
from cues.engine import history, sampler
from cues.engine.history import RINGS, History, Sample
from cues.operate.fresh import delete_store

T = 1_800_000_000
"""A time at which a period of each ring begins."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return history.path_of(tmp_path, "g")


def add(path: Path, when: float, sample: Sample, processor: str = "g.a") -> None:
    with History(path, write=True) as file:
        file.add(processor, when, sample)


def points(path: Path, span: str, now: float, processor: str = "g.a") -> list[tuple[int, int]]:
    """Start of each period, after T, and messages taken."""
    with History(path) as file:
        return [(each.start - T, each.sample.taken) for each in file.points(processor, span, now)]


# --- the file -------------------------------------------------------------------------------------


def test_a_sample_is_in_the_period_of_each_ring(path: Path) -> None:
    sample = Sample(10, 9, 1, 5, 0.25, 0.5, 2.0)
    add(path, T + 12, sample)
    with History(path) as file:
        for span, ring in RINGS.items():
            (point,) = file.points("g.a", span, T + 12)
            assert (point.start, point.seconds) == (T + 12 - (T + 12) % ring.seconds, ring.seconds)
            assert point.sample == sample
        assert file.points("g.b", "hour", T + 12) == []


def test_samples_of_one_period_are_added(path: Path) -> None:
    """Two runs in one period: sums, the last lag, the mean of medians by messages, the largest 99th percentile."""
    add(path, T, Sample(30, 1, 2, 7, 1.0, 4.0, 1.0))
    add(path, T + 9, Sample(10, 3, 4, 5, 2.0, 3.0, 0.5))
    add(path, T + 9.5, Sample(lag=6))
    with History(path) as file:
        (point,) = file.points("g.a", "hour", T + 9)
        assert point.sample == Sample(40, 4, 6, 6, 1.25, 4.0, 1.5)


def test_the_rings_are_bounded_and_forget_the_oldest(path: Path) -> None:
    for number in range(800):
        add(path, T + 10 * number, Sample(number + 1))
    size = path.stat().st_size
    now = T + 7999
    assert points(path, "hour", now) == [(10 * n, n + 1) for n in range(440, 800)]
    assert [start for start, _ in points(path, "day", now)] == list(range(0, 8000, 300))
    assert sum(taken for _, taken in points(path, "day", now)) == sum(range(1, 801))
    for week in range(12):
        add(path, T + week * 7 * 86400, Sample(1))
    assert path.stat().st_size == size == 4096 + 98_304
    kept = [start // (7 * 86400) for start, _ in points(path, "weeks", T + 11 * 7 * 86400)]
    assert kept == [7, 8, 9, 10, 11], "five weeks"


def test_a_clock_that_was_set_back_breaks_nothing(path: Path) -> None:
    """Samples of the future are not shown, and the periods that come again are added to or replaced."""
    for number in range(100):
        add(path, T + 10 * number, Sample(1))
    back = T + 500
    add(path, back, Sample(5))
    assert points(path, "hour", back)[-2:] == [(490, 1), (500, 6)], "the later ones are not there yet"
    add(path, T + 10 * 86400, Sample(99))  # far ahead, for one sample
    for number in range(51, 80):
        add(path, T + 10 * number, Sample(1))
    seen = points(path, "hour", T + 799)
    assert [start for start, _ in seen] == sorted(start for start, _ in seen)
    assert 99 not in [taken for _, taken in seen]


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, bytes(range(64))], ids=["torn", "ones", "other"])
def test_a_damaged_slot_is_left_out(path: Path, damage: bytes) -> None:
    """A slot that was torn by a power cut counts as empty, and the next sample of its period is written over it."""
    add(path, T, Sample(1))
    add(path, T + 10, Sample(2))
    ring = RINGS["hour"]
    at = 4096 + ring.offset + T // 10 % ring.slots * 64
    with path.open("r+b") as file:
        file.seek(at + (20 if not damage else 0))
        file.write(damage or b"\x07\x07\x07")
    assert points(path, "hour", T + 19) == [(10, 2)]
    add(path, T, Sample(3))
    assert points(path, "hour", T + 19) == [(0, 3), (10, 2)]


def test_every_length_of_an_unfinished_file_can_be_read_and_continued(path: Path) -> None:
    """A process is killed while it makes the file or a block: the next one goes on."""
    add(path, T, Sample(1))
    whole = path.read_bytes()
    for length in [*range(40), 4096, 4100, 4096 + 10, 4096 + 3071, 4096 + 3072, len(whole) - 1, len(whole)]:
        path.write_bytes(whole[:length])
        with History(path) as file:
            file.points("g.a", "weeks", T)
        add(path, T + 10, Sample(2), "g.b")
        assert points(path, "hour", T + 10, "g.b") == [(10, 2)], length
        assert (path.stat().st_size - 4096) % 98_304 == 0


def test_a_file_of_another_format_is_replaced(path: Path) -> None:
    path.write_text("something else" * 1000)
    assert points(path, "hour", T) == []
    add(path, T, Sample(4))
    assert points(path, "hour", T) == [(0, 4)]


def test_the_number_of_blocks_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BLOCKS_MAX", 3)
    for name in "abcde":
        add(path, T, Sample(1), f"g.{name}")
    with History(path) as file:
        assert sorted(file.processors) == ["g.a", "g.b", "g.c"]


def test_two_writers_get_a_block_each(path: Path) -> None:
    with History(path, write=True) as one, History(path, write=True) as other:
        one.add("g.a", T, Sample(1))
        other.add("g.b", T, Sample(2))
        one.add("g.b", T, Sample(3))
        other.add("g.a", T, Sample(4))
    assert points(path, "hour", T) == [(0, 5)]
    assert points(path, "hour", T, "g.b") == [(0, 5)]


KILLED = """
import sys
from cues.engine.history import History, Sample, path_of
with History(path_of(sys.argv[1], "g"), write=True) as file:
    print("begun", flush=True)
    for n in range(10**9):
        for name in ("g.a", "g.b"):
            file.add(name, 1_800_000_000 + n % 3000, Sample(n + 1, n + 1, n + 1, n + 1))
"""


def test_a_writer_is_killed_at_any_moment(tmp_path: Path, path: Path) -> None:
    """kill -9 in the middle of writes: each slot that is read is one that was written."""
    for number in range(5):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        time.sleep(0.01 + 0.02 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with History(path) as file:
            for name, span in itertools.product(file.processors, RINGS):
                for point in file.points(name, span, T + 3000):
                    sample = point.sample
                    assert sample.taken == sample.written == sample.failed >= sample.lag > 0
    add(path, T + 4000, Sample(1))
    assert points(path, "hour", T + 4000)[-1] == (4000, 1)


def test_periods_are_evened_out_for_a_chart(path: Path) -> None:
    for number in (0, 1, 2, 11):
        add(path, T + 10 * number, Sample(1))
    with History(path) as file:
        samples = history.evened(file.points("g.a", "hour", T + 130), 60, 4, T + 130)
    assert [sample and sample.taken for sample in samples] == [None, 3, 1, None]


# --- cues history ---------------------------------------------------------------------------------


def test_the_command_has_a_table_and_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, now = tmp_path / "store", time.time()
    cues.open(store, durability="process").close()
    assert run(["history", str(store), "--table"]) == 0
    assert "has no history of this time" in capsys.readouterr().out
    for back, sample in ((1200, Sample(100, 50, 3, 7, 0.25, 0.5, 2.0)), (600, Sample(300, 300, 0, 9, 0.25, 0.75))):
        add(history.path_of(store, "g"), now - back, sample)
        add(history.path_of(store, "g"), now - back, Sample(8), "g.b")
    assert run(["history", str(store), "--processor", "a", "--table"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["PROCESSOR", "IN", "IN/S", "OUT/S", "LAG", "P50", "P99", "FAILED", "OUTAGES"]
    assert row.split()[0] == "g.a" and "█" in row
    assert row.split()[-8:] == ["20", "18", "9", "250ms", "750ms", "3", "2.0", "s"]
    assert run(["history", str(store), "--span", "day", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["processor"], line["seconds"]) for line in lines] == [("g.a", 300)] * 2 + [("g.b", 300)] * 2
    assert lines[0] | {"start": ""} == {
        "processor": "g.a", "start": "", "seconds": 300, "in": 0.333333, "out": 0.166667, "lag": 7, "p50": 0.25,
        "p99": 0.5, "failed": 3, "away": 2,
    }  # fmt: skip
    assert now - 1500 < datetime.fromisoformat(lines[0]["start"]).timestamp() <= now - 1200
    assert run(["history", str(store), "--span", "year"]) == 2


def test_a_sparkline_has_a_sign_for_each_value() -> None:
    assert sparkline([0, 1, 4, 8]) == " ▂▅█" and sparkline([0, 0]) == "  " and sparkline([]) == ""
    assert sparkline([0, 1, 4, 8], signs=False) == " 258"


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a tenth of a second, also of short runs."""
    monkeypatch.setattr(sampler, "EVERY_S", 0.1)
    monkeypatch.setattr(sampler, "_SHORT_S", 0.0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def graph(fail_at: int = 0) -> cues.Graph:
    made = cues.Graph("g", errors="errors")
    made.source("a")

    @made.stream("a", "b")
    def double(message: dict[str, int]) -> dict[str, int]:
        if message["n"] == fail_at:
            raise ValueError("no")
        return {"n": 2 * message["n"]}

    return made


def total(directory: Path, processor: str = "g.double") -> Sample:
    found = history.read(directory, "weeks", time.time()).get(processor, [])
    samples = [point.sample for point in found]
    result = Sample()
    for sample in samples:
        result = result.and_then(sample)
    return result


@pytest.mark.usefixtures("quick")
def test_a_run_leaves_its_counts_and_latencies(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with graph(fail_at=7).start(store=store) as running:
        for n in range(20):
            running.send("a", {"n": n})
        running.wait_idle()
    seen = total(store)
    assert (seen.taken, seen.written, seen.failed, seen.lag) == (20, 19, 1, 0)
    assert seen.p50 is not None and seen.p99 is not None and 0 < seen.p50 <= seen.p99 < 30
    with graph().start(store=store) as running:  # a second run goes on
        running.send("a", {"n": 1})
        running.wait_idle()
    assert total(store).taken == 21
    assert cues.Store(store, readonly=True).check() == []


@pytest.mark.usefixtures("quick")
def test_an_idle_graph_writes_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with graph().start(store=store) as running:
        running.send("a", {"n": 1})
        running.wait_idle()
        path = history.path_of(store, "g")
        until(lambda: (total(store).taken, total(store).written) == (1, 1))
        before, commit = path.stat().st_mtime_ns, running.store.core.live_bytes()
        thread = next(each for each in threading.enumerate() if each.name == "cues sampler")
        time.sleep(0.5)  # five samples
        assert thread.is_alive()
        assert path.stat().st_mtime_ns == before and running.store.core.live_bytes() == commit
        running.send("a", {"n": 2})
        until(lambda: total(store).taken == 2)


@pytest.mark.usefixtures("quick")
def test_messages_that_wait_are_noted(tmp_path: Path) -> None:
    """A processor that is paused takes nothing, and its lag is in the history."""
    store = tmp_path / "store"
    made = cues.Graph("g")
    made.source("a")
    gate = threading.Event()

    @made.sink("a")
    def save(message: dict[str, int]) -> None:
        gate.wait(30)

    with made.start(store=store) as running:
        for n in range(50):
            running.send("a", {"n": n})
        until(lambda: total(store, "g.save").lag >= 40)
        gate.set()
        running.wait_idle()
    assert total(store, "g.save").taken == 50 and total(store, "g.save").lag == 0


def test_a_short_run_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of a run that is over soon has the files that it had in earlier versions, also if a period ended."""
    monkeypatch.setattr(sampler, "EVERY_S", 0.01)
    monkeypatch.setattr(sampler, "_SHORT_S", 3600.0)
    with graph().start(store=tmp_path / "store") as running:
        running.send("a", {"n": 1})
        running.wait_idle()
        time.sleep(0.2)  # the ends of ten periods
    assert not list((tmp_path / "store").glob(history.PATTERN))


@pytest.mark.usefixtures("quick")
def test_a_history_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    cues.open(store, durability="process").close()
    history.path_of(store, "g").mkdir()
    with graph().start(store=store) as running:
        running.send("a", {"n": 1})
        assert running.wait_idle()
        time.sleep(0.3)
        running.send("a", {"n": 1})
        assert running.wait_idle()
    assert history.read(store, "hour", time.time()) == {}


@pytest.mark.usefixtures("quick")
def test_workers_have_one_history(tmp_path: Path) -> None:
    """The process that started the workers samples, with the counts of all of them."""
    (tmp_path / "worked.py").write_text(
        "import cues\n"
        "graph = cues.Graph('g', queues={'a': cues.QueueOptions(partitions=4, key='n')})\n"
        "graph.source('a')\n"
        "@graph.stream('a', 'b')\n"
        "def double(message):\n"
        "    return {'n': 2 * message['n']}\n"
    )
    from cues.graphs.graphfile import load

    made = load(str(tmp_path / "worked.py")).graph
    store = tmp_path / "store"
    with made.start(store=store, workers=2) as running:
        for n in range(100):
            running.send("a", {"n": n})
        assert running.wait_idle(60)
        until(lambda: total(store).taken == 100)
    assert total(store).written == 100
    assert [path.name for path in store.glob(history.PATTERN)] == ["history-g"]


def test_a_fresh_store_has_no_history_of_the_one_before(path: Path) -> None:
    cues.open(path.parent / "store", durability="process").close()
    add(path.parent / "store" / path.name, T, Sample(1))
    delete_store(path.parent / "store")
    assert not list((path.parent / "store").glob(history.PATTERN))


LIVES = """
import os, signal, sys
import cues
from cues.engine import sampler

sampler.EVERY_S = 0.1
graph = cues.Graph("g", durability="process")
graph.source("a")

@graph.stream("a", "b")
def double(message):
    return message

with graph.start(store=sys.argv[1]) as running:
    for n in range(10**6):
        running.send("a", {"n": n})
        if n == int(sys.argv[2]):
            print("enough", flush=True)
"""


def test_runs_that_are_killed_continue_one_history(tmp_path: Path) -> None:
    """kill -9 of a run loses the samples since the last one; the next run adds to what is there."""
    store, seen = tmp_path / "store", 0
    for _ in range(3):
        life = subprocess.Popen([sys.executable, "-c", LIVES, str(store), "50"], stdout=subprocess.PIPE)
        assert life.stdout is not None and life.stdout.readline() == b"enough\n"
        until(lambda: total(store).taken > seen)
        life.kill()
        life.wait()
        life.stdout.close()
        now = total(store).taken
        assert now > seen
        seen = now
    with cues.open(store) as opened:
        assert seen <= opened.queue("a").last_index, "nothing is counted twice"
        assert opened.check() == []


@pytest.mark.usefixtures("quick")
def test_a_history_stays_when_its_store_is_compacted(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with graph().start(store=store) as running:
        running.send("a", {"n": 1})
        running.wait_idle()
    assert run(["compact", str(store), "--yes"]) == 0
    assert total(store).taken == 1
    assert run(["check", str(store)]) == 0


def test_a_history_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no room for this number")

    monkeypatch.setattr(history.History, "add", fails)
    graph = cues.Graph("g", [cues.Source("in")], store=tmp_path / "s", durability="process")
    with graph.start() as running:
        running.send("in", {"n": 1})
        time.sleep(1.1)  # a shorter run has no history
    assert running.stopped == []
