"""Steps whose calls are on executors, over a stand-in for Spark: they leave what the embedded engine leaves.

The same graphs run on Spark itself in test_spark_engine.py and test_spark_backfill.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from sets import slow_except

import cues
from cues import Graph, Stream, testing
from cues.base import events
from cues.errors import ProcessorStopped

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import directory_steps
import spark_graphs
from spark_cluster import until
from spark_graphs import GRAPHS
from test_spark_engine import IGNORED, assert_same, left, template, without_times

from cues.records import columns
from cues.spark import driver, stretches


class Context(directory_steps.Context):
    uiWebUrl = None
    master = "local[3]"


class Session(directory_steps.Session):
    """A SparkSession whose tasks are calls in the driver."""

    version = "0"

    def __init__(self) -> None:
        super().__init__(3)
        self.sparkContext = Context(3)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several jobs, stretches and commits also for few messages; no Java."""
    monkeypatch.setattr(stretches, "RANGE_MESSAGES", 150)
    monkeypatch.setattr(stretches, "STRETCH_MESSAGES", 40)
    monkeypatch.setattr(stretches, "COMMIT_VALUES_MAX", 3)
    monkeypatch.setattr(driver, "open_session", lambda *_: Session())


def started(made: Graph, path: Path, **options: Any) -> Any:
    return made.start(engine="spark", store=path, **options)


def run(running: Any, pulls: bool = True) -> None:
    try:
        running.wait_done()
    except ProcessorStopped:
        if pulls:
            until(lambda: all(worker.stepper.ended for worker in running.engine.workers if not worker.stepper.inputs))
        running.drain(60)
    finally:
        running.close()


BACKFILLED = (
    "several",
    "partitions",
    "error queue",
    "join",
    "alts",
    "batch function that fails",
    "keyed state",
    "chain",
    "tables",
    "tables that are halved",
    "tables in a fork",
)


STEPS = [*((name, False) for name in GRAPHS), *((name, True) for name in BACKFILLED)]


@pytest.mark.parametrize(("name", "backfill"), slow_except(STEPS[::5], STEPS, names=2))
def test_steps_on_executors_leave_what_the_embedded_engine_leaves(name: str, backfill: bool, tmp_path: Path) -> None:
    template(tmp_path / "template", GRAPHS[name]())
    for engine in ("embedded", "executors"):
        shutil.copytree(tmp_path / "template", tmp_path / engine, ignore=IGNORED)
    run(GRAPHS[name]().start(store=tmp_path / "embedded"))
    if backfill:
        run(spark_graphs.graph()().start(store=tmp_path / "executors"))
    run(started(GRAPHS[name](), tmp_path / "executors", backfill=backfill), pulls=not backfill)
    expected, found = left(tmp_path / "embedded"), left(tmp_path / "executors")
    assert_same(name, found, expected)
    if "tables" in name:  # they do not fail on both engines
        assert {queue for queue, messages in found["queues"].items() if not messages} <= {"none", "no"}
    assert not list((tmp_path / "executors" / "staged").glob("*"))


def filled(path: Path, count: int, **options: Any) -> None:
    with cues.open(path, durability="process") as store:
        store.queue("in", **options).appender().write_many([{"n": n} for n in range(count)])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["arrow", "polars", "pandas"])
def test_tables_are_columns_in_tasks_with_the_hashes_of_the_embedded_engine(
    kind: Any, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps that are cut at the same rows. No task makes a dict of a row, unless the row fails."""
    made = Graph(
        "g",
        [
            Stream(
                spark_graphs.told_rows,
                "in",
                "out",
                batch=kind,
                batch_size=60,
                step_s=None,
                retries=cues.Retry(2, 0.0),
                opts="poison" if fails else None,
            )
        ],
        errors="errors",
        queues={"in": cues.QueueOptions(metadata=True), "out": cues.QueueOptions(metadata=True)},
        durability="process",
    )
    template(tmp_path / "template", made)
    with cues.open(tmp_path / "template") as store:
        rows = spark_graphs.widened(pa.table({"n": range(400)}), SimpleNamespace(indices=range(400)))
        appender = store.queue("in").appender()
        for low, high in ((0, 1), (1, 150), (150, 400)):
            appender.write_table(rows.slice(low, high - low))
    for engine in ("embedded", "executors"):
        shutil.copytree(tmp_path / "template", tmp_path / engine, ignore=IGNORED)
    with made.start(store=tmp_path / "embedded") as running:
        assert running.wait_idle(timeout=60)
    if not fails:
        monkeypatch.setattr(columns, "rows", None)
    with started(made, tmp_path / "executors") as running:
        assert running.wait_idle(timeout=60)
        (worker,) = running.engine.workers
        assert worker.stepper.ranges.on_executors and not worker.stepper.ranges.given_up
    monkeypatch.undo()
    expected, found = left(tmp_path / "embedded"), left(tmp_path / "executors")
    assert without_times(found) == without_times(expected)
    assert len(found["queues"]["out"]) == 400 - fails and len(found["queues"]["errors"]) == fails
    records = []
    for engine in ("embedded", "executors"):
        with cues.open(tmp_path / engine) as store:
            records.append(
                [
                    (piece.batch.first, piece.batch.head.hash, piece.batch.table().to_pylist())
                    for piece in store.queue("out").pieces(None, None)
                ]
            )
    assert records[0] == records[1]


def test_a_step_of_tables_grows_with_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the embedded engine, if no size is set: each record of the try log and of the output is larger."""
    monkeypatch.setattr(stretches, "RANGE_MESSAGES", 1_000_000)
    monkeypatch.setattr(stretches, "STRETCH_MESSAGES", 100_000)
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("in").appender().write_table(pa.table({"n": range(200_000)}))
    made = Graph("g", [Stream(spark_graphs.columns, "in", "out", batch="arrow")], durability="process")
    with started(made, tmp_path / "store") as running:
        assert running.wait_idle(timeout=60)
    with cues.open(tmp_path / "store") as store:
        sizes = [piece.high - piece.low for piece in store.queue("out").pieces(None, None)]
    # 20,000 rows are for three tasks; four times as many are the next job.
    assert sizes[:4] == [6_666, 6_666, 6_666, 26_666] and sum(sizes) == 200_000


def test_messages_for_another_store_are_one_record_of_the_fork_queue_and_arrive(tmp_path: Path) -> None:
    """Their function is called on executors too. Failures may be for another store as well."""
    queues = {
        name: cues.QueueOptions(path=str(tmp_path / "other"), partitions=2, key="n") for name in ("even", "errors")
    }
    queues["errors"] = cues.QueueOptions(path=str(tmp_path / "other"))
    made = Graph("g", [Stream(parity, "in", {"even": "even", "odd": "odd"})], errors="errors", queues=queues)
    filled(tmp_path / "store", 300)
    with started(made, tmp_path / "store") as running:
        assert running.wait_idle(timeout=60)
        (worker,) = running.engine.workers
        assert worker.stepper.ranges.on_executors and worker.stepper.forks
        assert [m["n"] for m in running.messages("odd")] == list(range(1, 300, 2))
    with cues.open(tmp_path / "other") as store:
        even = [n for n in range(0, 300, 2) if n % 50]
        assert sorted(m["n"] for m in testing.messages(store, "even")) == even
        assert [m["err.proc/messages"]["in"][0]["n"] for m in testing.messages(store, "errors")] == list(
            range(0, 300, 50)
        )
        assert store.check() == []


def parity(message: Any) -> Any:
    if message["n"] % 50 == 0:
        raise ValueError("not wanted")
    return spark_graphs.parity(message)


def test_a_range_is_not_longer_than_the_room_of_a_bounded_output(tmp_path: Path) -> None:
    streams = [
        Stream(spark_graphs.mended, "in", "middle", id="first"),
        Stream(spark_graphs.plain, "middle", "out", id="second"),
    ]
    made = Graph("g", streams, queues={"middle": cues.QueueOptions(max_lag=10)}, durability="process")
    filled(tmp_path / "store", 145)
    with started(made, tmp_path / "store") as running:
        assert running.wait_idle(timeout=60)
        assert [m["n"] for m in running.messages("out")] == [2 * n for n in range(145)]
        counters = {worker.id: worker.stepper.counters for worker in running.engine.workers}
        assert counters["g.first"].steps >= 15


def test_the_driver_does_a_range_that_executors_give_up_and_the_next_is_theirs(tmp_path: Path) -> None:
    """A message in it is delayed. The driver keeps that one until it is due."""
    made = Graph("g", [Stream(spark_graphs.mended, "in", "out")], durability="process")
    with cues.open(tmp_path / "store", durability="process") as store:
        appender = store.queue("in").appender()
        appender.write_many([{"n": n} for n in range(5)])
        appender.write(cues.delayed({"n": 5}, delay=timedelta(seconds=1)))
        appender.write_many([{"n": n} for n in range(6, 10)])
    with started(made, tmp_path / "store") as running:
        until(lambda: len(running.messages("out")) == 10)
        assert [m["n"] for m in running.messages("out")] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 5]
        (worker,) = running.engine.workers
        assert worker.stepper.ranges.on_executors and worker.stepper.ranges.given_up == {"g.mended.in": 11}
        running.engine.queues["in"].appender().write({"n": 10})
        until(lambda: len(running.messages("out")) == 11)
        assert worker.stepper.inputs[0].index == 12


def test_messages_between_two_looks_are_for_executors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver looked twice: first for a range, then for a usual step, which took what had come between them."""
    sent: list[int] = []
    real = stretches.StretchTaker.left

    def left(self: stretches.StretchTaker, input: Any, end: int | None) -> int:
        found = real(self, input, end)
        if found == 0 and len(sent) < 5:
            sent.append(len(sent))
            input.queue.appender().write({"n": sent[-1]})
        return found

    monkeypatch.setattr(stretches.StretchTaker, "left", left)
    monkeypatch.setattr(stretches.StretchTaker, "take_usual", lambda self: pytest.fail("the driver takes messages"))
    made = Graph("g", [Stream(spark_graphs.mended, "in", "out")], durability="process")
    filled(tmp_path / "store", 3)
    with started(made, tmp_path / "store") as running:
        until(lambda: len(running.messages("out")) == 8)


def test_a_paused_processor_takes_no_range(tmp_path: Path) -> None:
    """A range was taken although the processor was paused."""
    made = Graph("g", [Stream(spark_graphs.mended, "in", "out")], durability="process")
    filled(tmp_path / "store", 10)
    with started(made, tmp_path / "store") as running:
        assert running.wait_idle(timeout=60)
        (worker,) = running.engine.workers
        cues.pause(running.engine.store, processor="g.mended")
        until(lambda: worker.stepper.paused)
        running.engine.queues["in"].appender().write({"n": 10})
        assert running.wait_idle(timeout=60)
        assert len(running.messages("out")) == 10
        cues.resume(running.engine.store, processor="g.mended")
        until(lambda: len(running.messages("out")) == 11)


def test_latency_and_size_of_steps_are_counted(tmp_path: Path) -> None:
    """The driver reads no message of a range, so executors report times of append."""
    told: list[events.Event] = []
    made = Graph("g", [Stream(spark_graphs.mended, "in", "out")], durability="process")
    filled(tmp_path / "store", 300)
    with started(made, tmp_path / "store", listeners=(told.append,)) as running:
        assert running.wait_idle(timeout=60)
        (counters,) = [worker.stepper.counters for worker in running.engine.workers]
        assert sum(counters.latency.values()) == 300
        assert sum(counters.sizes.values()) == counters.steps > 1


def test_a_backfill_ends_although_another_program_continues_to_send(tmp_path: Path) -> None:
    """Messages that are sent after the start are not waited for. The thread does not spin for them either."""
    made = Graph("g", [Stream(spark_graphs.sends_more, "in", "out", side_effects=True)], durability="process")
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("in").appender().write_many([{"n": n, "store": str(tmp_path / "store")} for n in range(5)])
    run(started(made, tmp_path / "store", backfill=True), pulls=False)
    with cues.open(tmp_path / "store") as store:
        assert [m["n"] for m in testing.messages(store, "out")][:5] == list(range(5))
        assert store.queue("in").last_index > 5


def test_a_backfill_waits_for_another_store_and_for_readers_of_a_bounded_queue(tmp_path: Path) -> None:
    """A forwarder brings messages there, and another program reads them; neither is a processor of the graph."""
    queues = {"half": cues.QueueOptions(path=str(tmp_path / "other")), "out": cues.QueueOptions(max_lag=10)}
    streams = [Stream(spark_graphs.mended, "in", "half", id="first"), Stream(spark_graphs.plain, "half", "out")]
    made = Graph("g", streams, queues=queues, durability="process")
    filled(tmp_path / "store", 45)
    with cues.open(tmp_path / "store") as store:
        reader = store.queue("out", max_lag=10).tailer("reader")
        reader.to_start()
        with started(made, store, backfill=True) as running:  # type: ignore[arg-type]
            last = running.engine.workers[-1].stepper
            until(lambda: bool(last.gate.late))
            assert not running.engine.done()
            found: list[int] = []
            while len(found) < 45:
                found += [m["n"] for m in reader]
            assert running.wait_done()
    assert found == [2 * n for n in range(45)]


DRIVER = """
import sys
import spark_graphs
import test_stretches
from cues.spark import driver, stretches

stretches.RANGE_MESSAGES, stretches.STRETCH_MESSAGES, stretches.COMMIT_VALUES_MAX = 150, 40, 3
driver.open_session = lambda *_: test_stretches.Session()
made = spark_graphs.GRAPHS[sys.argv[2]]()
with made.start(store=sys.argv[1], engine="spark", backfill=sys.argv[3] == "True") as running:
    running.wait_done()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "point", "backfill"),
    [
        ("several", "commit.before:2", True),
        pytest.param("error queue", "commit.inside:3", True, marks=pytest.mark.slow),
        pytest.param("error queue", "commit.inside:7", False, marks=pytest.mark.slow),
        pytest.param("join", "commit.after:6", False, marks=pytest.mark.slow),
        pytest.param("batches that are halved", "commit.inside:9", False, marks=pytest.mark.slow),
        ("tables that are halved", "commit.inside:9", False),
        pytest.param("tables in a fork", "commit.before:7", True, marks=pytest.mark.slow),
    ],
)
def test_a_killed_driver_is_continued_by_the_next_start(name: str, point: str, backfill: bool, tmp_path: Path) -> None:
    """It has done whole steps. What it staged and did not commit is swept."""
    template(tmp_path / "store", GRAPHS[name]())
    shutil.copytree(tmp_path / "store", tmp_path / "expected", ignore=IGNORED)
    run(GRAPHS[name]().start(store=tmp_path / "expected"))
    if backfill:
        run(spark_graphs.graph()().start(store=tmp_path / "store"))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "store"), name, str(backfill)],
        cwd=Path(__file__).parent,
        env={**os.environ, "CUES_FAULT": point},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    staged = tmp_path / "store" / "staged"
    (staged / "0-1-x").mkdir(parents=True, exist_ok=True)
    (staged / "0-1-x" / "pages").write_bytes(b"of another boot")
    run(started(GRAPHS[name](), tmp_path / "store", backfill=backfill), pulls=not backfill)
    assert not list(staged.glob("*"))
    expected, found = left(tmp_path / "expected"), left(tmp_path / "store")
    assert without_times(found["queues"]) == without_times(expected["queues"])
    assert found["positions"] == expected["positions"]
