"""Work that is due at a time, on Spark: what the embedded engine leaves, whatever is killed.

The driver has the queues in its store, and does what is due in the lanes of the embedded engine (cues/steps/lanes.py).
The clock is moved by hand from round to round, so that both engines see the same time.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cues
from cues import Graph, faults, testing
from cues.engine.assembly import assemble
from cues.errors import ProcessorStopped
from cues.steps.beside import make_queues
from cues.steps.due_lane import DueLane

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import test_spark_queues as directories
from spark_graphs import DUE_GRAPHS, PLAY, START
from test_spark_engine import IGNORED, left, without_times

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
        for place, (ours, theirs) in enumerate(itertools.zip_longest(without_times(found["queues"][queue]), messages)):
            assert ours == theirs, (queue, place)
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
