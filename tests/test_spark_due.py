"""Work that is due at a time, on Spark: what the embedded engine leaves, whatever is killed.

The driver has the queues in its store, and does what is due in the lanes of the embedded engine (cues/steps/lanes.py).
The clock is moved by hand from round to round, so that both engines see the same time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cues
from cues import Graph, Source, Stream, codec, faults, testing
from cues.base import clock
from cues.engine.assembly import assemble
from cues.errors import ProcessorStopped
from cues.steps.beside import make_queues
from cues.steps.due_lane import DueLane

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import seeds
import spark_graphs
import test_spark_queues as directories
from spark_cluster import until
from spark_graphs import DUE_GRAPHS, PLAY, START
from test_spark_engine import IGNORED, left, without_times
from test_spark_queues import place as place
from test_spark_three_graphs import killed_one

TESTS = Path(__file__).parent


def play(made: Graph, store: Path, number: int, send: bool = True, **options: Any) -> None:
    """Run one round of the play. ``send=False``: after a crash in it, when its messages are on the queue."""
    seconds, messages = PLAY[number]
    with testing.Clock(START + timedelta(seconds=seconds)):
        with cues.open(store, durability="process") as opened:
            if send and messages:
                opened.queue("in").appender().write_many(messages)
        with made.start(store=store, **options) as running:
            assert running.wait_idle(timeout=120)


def expected_of(made: Callable[[], Graph], tmp_path: Path) -> dict[str, Any]:
    """Everything that the embedded engine leaves. ``store`` is an empty copy, with the same identities of queues."""
    with cues.open(tmp_path / "template", durability="process", map_size=64 << 20) as store:
        assembly = assemble(made(), store)
        for stepper in assembly.steppers:
            for lane in stepper.lanes:
                if isinstance(lane, DueLane):  # else its first use would make the queues, with new identities
                    copies = lane.copies()
                    make_queues(store, {port.queue: copies.options for port in copies.node.inputs})
        assembly.close()
    for name in ("embedded", "store"):
        shutil.copytree(tmp_path / "template", tmp_path / name, ignore=IGNORED)
    for number in range(len(PLAY)):
        play(made(), tmp_path / "embedded", number)
    return left(tmp_path / "embedded")


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for queue, messages in without_times(expected["queues"]).items():
        for at, (ours, theirs) in enumerate(itertools.zip_longest(without_times(found["queues"][queue]), messages)):
            assert ours == theirs, (queue, at)
    assert any(messages for queue, messages in expected["queues"].items() if queue not in ("in", "quiet"))
    for what in ("hashes", "state", "positions"):
        assert found[what] == expected[what], what


@pytest.mark.parametrize(
    "name", [name for name in DUE_GRAPHS if name not in ("after a death", "timers by their messages")]
)
def test_what_is_due_is_done_as_on_the_embedded_engine(name: str, spark: SparkSession, tmp_path: Path) -> None:
    expected = expected_of(DUE_GRAPHS[name], tmp_path)
    for number in range(len(PLAY)):
        play(DUE_GRAPHS[name](), tmp_path / "store", number, engine="spark", spark=spark)
    compare(left(tmp_path / "store"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "delayed messages with state",
        "timers by their messages",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("delayed messages", "time to live", "time to live without a key")
        ),
    ],
)
def test_in_a_directory_what_is_due_comes_as_on_the_embedded_engine(
    name: str, spark: SparkSession, tmp_path: Path
) -> None:
    made = DUE_GRAPHS[name]
    for number in range(len(PLAY)):
        play(made(), tmp_path / "embedded", number)
        play(made(), tmp_path / "store", number, engine="spark", spark=spark, queues=tmp_path / "queues")
    expected = directories.left_embedded(tmp_path / "embedded", made())
    found = directories.left(tmp_path, made())
    for messages in (*expected.values(), *found.values()):
        for message in messages:
            message.pop("hash", None)
            message.pop("index", None)
        messages.sort(key=str)  # those of different keys are in no order
    assert found == expected and len(found["in"]) == 220


def soon(message: dict[str, Any]) -> Any:
    """Two of three are due later, at the time that the message has."""
    at = clock.to_datetime(message["due_ns"])
    return cues.delayed(message, deliver_at=at) if message["n"] % 3 else message


def seen(message: dict[str, Any]) -> dict[str, Any]:
    return {"n": message["n"], "early": message["n"] % 3 > 0 and clock.now_ns() < message["due_ns"]}


def soon_graph() -> Graph:
    streams = [
        Stream(soon, "in", "later"),
        Stream(seen, "later", "out"),
        Stream(spark_graphs.counted, "later", "sums", key=spark_graphs.by_ten),
    ]
    return Graph("g", [Source("in"), *streams], errors="errors", durability="process")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("place", "kills"),
    [
        ("an object store", 2),
        ("a mount", 25),
        ("an object store", 25),
    ],
    indirect=["place"],
)
def test_kills_lose_and_double_no_delayed_message(place: Path, kills: int, spark: SparkSession) -> None:
    """Workers are killed at random moments, while messages wait for their times; each time the driver is halted too.

    Before each kill a driver has delivered some messages, so each kill is of one that works.
    """
    chance, count, done, began = random.Random(seeds.new()), 0, 0, time.monotonic()
    options: dict[str, Any] = {"store": place / "store", "queues": directories.queues_at(place)}

    def numbers(queue: str) -> list[int]:
        return sorted(codec.unpack(row["value"])["n"] for row in directories.rows(place, queue))

    def some(running: Any, more: int) -> None:
        nonlocal count
        for n in range(count, count + more):
            running.send("in", {"n": n, "due_ns": clock.now_ns() + n % 7 * 300_000_000})
        count += more

    def ends(running: Any) -> dict[str, int]:
        """As its driver knows them. To read the queues at each look would keep the object store busy."""
        return {queue: running.engine.driver.queues[queue].log(0).next - 1 for queue in ("out", "sums")}

    def life(over: Callable[[Any], bool]) -> bool:
        """Run a driver until it is ``over``; False if Spark stopped it."""
        with contextlib.suppress(ProcessorStopped):
            with soon_graph().start(engine="spark", spark=spark, **options) as running:
                until(lambda: bool(running.stopped) or over(running), timeout_s=240)
                if running.stopped:
                    return False
                running.halt()
            return True
        return False

    def killed(running: Any) -> bool:
        nonlocal done
        before = ends(running)["out"]
        some(running, chance.randrange(5, 30))
        until(lambda: bool(running.stopped) or ends(running)["out"] > before, timeout_s=240)
        ended = not running.stopped and killed_one(chance, directories.python_workers(spark))
        done += ended
        return ended

    while done < kills:
        life(killed)
        print(f"{done} kills, {count} messages, {len(numbers('out'))} delivered, {time.monotonic() - began:.0f} s")
    until(lambda: life(lambda running: min(ends(running).values()) >= count), timeout_s=600)
    assert numbers("out") == numbers("sums") == [*range(count)]
    print(f"{count} messages, {kills} kills")
    found = directories.left(place, soon_graph())
    assert not any(message["early"] for message in found["out"]) and found["errors"] == []
    for key in range(10):
        counts = [message["count"] for message in found["sums"] if message["n"] % 10 == key]
        assert counts == list(range(1, len(counts) + 1))


DRIVER = """
import sys
from pathlib import Path
import cues.spark
import spark_graphs
import test_spark_due
from cues import faults
name, store, number, point = sys.argv[1:]
with cues.spark.session("local[1]", conf={"spark.driver.memory": "512m"}) as spark:
    at, _, hit = point.partition(":")
    faults.arm(at, int(hit or 1))
    test_spark_due.play(spark_graphs.DUE_GRAPHS[name](), Path(store), int(number), engine="spark", spark=spark)
"""
"""The crash point is armed when Spark has started: nothing else would count as a hit."""

CASES = [
    ("timers", 1, "timer.moved"),
    ("time to live", 3, "state.expiring"),
    ("delayed messages", 0, "delay.holding"),
    ("debounce", 1, "timer.inside"),
]
MORE_CASES = [
    *(("timers", 1, point) for point in faults.TIMER_POINTS),
    *(("idle window", 1, point) for point in faults.TIMER_POINTS),
    *(("timers", number, f"commit.{at}:{hit}") for number in (0, 1) for at in ("inside", "after") for hit in (1, 2)),
    *(("time to live", 3, point) for point in faults.EXPIRY_POINTS),
    *(("time to live", 4, f"commit.{at}") for at in ("before", "inside", "after")),
    *(("delayed messages", 0 if "holding" in point else 1, point) for point in faults.DELAY_POINTS),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "point"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_CASES if case not in CASES)],
)
def test_a_driver_killed_in_it_has_lost_and_doubled_nothing(
    name: str, number: int, point: str, spark: SparkSession, tmp_path: Path
) -> None:
    expected = expected_of(DUE_GRAPHS[name], tmp_path)
    store = tmp_path / "store"
    for earlier in range(number):
        play(DUE_GRAPHS[name](), store, earlier)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, name, str(store), str(number), point],
        cwd=TESTS,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    play(DUE_GRAPHS[name](), store, number, send=False, engine="spark", spark=spark)
    for later in range(number + 1, len(PLAY)):
        play(DUE_GRAPHS[name](), store, later, engine="spark", spark=spark)
    compare(left(store), expected)


def test_a_worker_killed_before_a_timer_is_set_loses_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function before the timers is called by executors. At its first call of one message its worker is killed."""
    monkeypatch.setitem(spark.sparkContext.environment, "CUES_TEST_FLAG", str(tmp_path / "flag"))
    monkeypatch.setenv("CUES_TEST_FLAG", str(tmp_path))  # of the embedded engine, which is not to be killed
    made = DUE_GRAPHS["after a death"]
    expected = expected_of(made, tmp_path)
    store, on_spark = tmp_path / "store", {"engine": "spark", "spark": spark}
    with pytest.raises(ProcessorStopped, match="Python worker exited unexpectedly"):
        play(made(), store, 0, **on_spark)
    assert (tmp_path / "flag").exists()
    for number in range(len(PLAY)):
        play(made(), store, number, send=number > 0, **on_spark)
    compare(left(store), expected)
