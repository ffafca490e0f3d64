"""Frames that keep state, on Spark itself: their rows are those of a batch computation, whatever is lost meanwhile."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

import cues
from cues import Graph, faults
from cues.errors import GraphError, MessagesPurged, ProcessorStopped, Unsupported
from cues.storage.locks import process_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import spark_graphs
from children import Child
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQueryListener
from spark_cluster import until

from cues.spark.cluster.files import open_files

BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
Message = dict[str, Any]


def flight(n: int) -> Message:
    """A flight. Some are up to 30 s late, which the watermark allows."""
    return {"n": n, "origin": "ABC"[n % 3], "at": BEGIN + timedelta(seconds=10 * n - n % 4 * 10)}


def windows(rows: Any) -> Any:
    """The flights of each origin in each ten minutes."""
    late = rows.withWatermark("at", "1 minute")
    counts = late.groupBy(F.window("at", "10 minutes"), "origin").count()
    return counts.select(F.col("window.start").alias("start"), "origin", "count")


def totals(rows: Any) -> Any:
    return rows.groupBy("origin").count()


def graph() -> Graph:
    made = Graph("g", errors="errors", durability="process")
    made.source("in")
    made.frame("in", "counts", fields="origin string, at timestamp", id="windows", batch_size=100)(windows)
    return made


def naive(count: int) -> dict[tuple[datetime, str], int]:
    """The windows that are closed after this number of flights."""
    flights = [flight(n) for n in range(count)]
    of = Counter((f["at"].replace(minute=f["at"].minute // 10 * 10, second=0), f["origin"]) for f in flights)
    watermark = max(f["at"] for f in flights) - timedelta(minutes=1)
    return {window: n for window, n in of.items() if window[0] + timedelta(minutes=10) <= watermark}


def play(spark: SparkSession, place: Path, made: Graph, sent: range = range(0), **options: Any) -> list[Message]:
    """Send flights, let the graph finish them, and return all rows of its output."""
    with made.start(engine="spark", spark=spark, store=place / "store", queues=place / "queues", **options) as running:
        for n in sent:
            running.send("in", flight(n))
        assert running.wait_idle(300)
        return running.messages("counts")


def expect_windows(rows: list[Message], count: int) -> None:
    found = {(row["start"], row["origin"]): row["count"] for row in rows}
    assert len(found) == len(rows), "a window twice"
    assert found == naive(count)


def checkpoint(place: Path) -> Path:
    return place / "queues" / "_cues" / "checkpoints" / "g.windows"


class Listener(StreamingQueryListener):
    def __init__(self) -> None:
        self.names: list[str | None] = []

    def onQueryStarted(self, event: Any) -> None:
        self.names.append(event.name)

    def onQueryProgress(self, event: Any) -> None: ...

    def onQueryTerminated(self, event: Any) -> None: ...


@pytest.mark.timeout(900)
def test_closed_windows_are_those_of_a_batch_computation_whatever_happens_to_the_checkpoint(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Between two runs it is kept, deleted, and replaced by an older copy; the directory may also be moved."""
    listener = Listener()
    spark.streams.addListener(listener)
    expect_windows(play(spark, tmp_path, graph(), range(250)), 250)
    shutil.copytree(checkpoint(tmp_path), tmp_path / "older")
    expect_windows(play(spark, tmp_path, graph(), range(250, 400)), 400)
    shutil.rmtree(checkpoint(tmp_path))
    expect_windows(play(spark, tmp_path, graph(), range(400, 550)), 550)
    shutil.rmtree(checkpoint(tmp_path))
    shutil.copytree(tmp_path / "older", checkpoint(tmp_path))
    expect_windows(play(spark, tmp_path, graph(), range(550, 700)), 700)
    expect_windows(play(spark, tmp_path, graph()), 700)
    until(lambda: listener.names == ["cues g.windows"] * 5)
    spark.streams.removeListener(listener)


@pytest.mark.timeout(600)
def test_a_state_whose_messages_were_purged_is_not_counted_anew(spark: SparkSession, tmp_path: Path) -> None:
    made = graph()
    made.queues["in"] = cues.QueueOptions(retention="read")
    play(spark, tmp_path, made, range(150))
    rows = play(spark, tmp_path, made, range(150, 250))
    with made.start(engine="spark", spark=spark, store=tmp_path / "store", queues=tmp_path / "queues") as running:
        shared: Any = running
        until(lambda: shared.engine.driver.queues["in"].log(0).first > 1, timeout_s=120)
    kept = tmp_path / "kept"
    shutil.move(checkpoint(tmp_path), kept)
    with pytest.raises(MessagesPurged, match=r"g\.windows cannot make its state again: the checkpoint .* is missing"):
        play(spark, tmp_path, made)
    shutil.move(kept, checkpoint(tmp_path))
    assert play(spark, tmp_path, made) == rows
    expect_windows(play(spark, tmp_path, made, range(250, 350)), 350)


@pytest.mark.timeout(600)
def test_changed_rows_or_the_whole_result_after_each_batch(spark: SparkSession, tmp_path: Path) -> None:
    """Output modes update and complete, without a watermark."""
    made = Graph("g", durability="process")
    made.source("in")
    for mode in ("update", "complete"):
        options: Any = {"output_mode": mode, "id": mode, "batch_size": 60, "trigger": "1 second"}
        made.frame("in", mode, fields="origin string", **options)(totals)
    with made.start(engine="spark", spark=spark, store=tmp_path / "store", queues=tmp_path / "queues") as running:
        for n in range(200):
            running.send("in", flight(n))
        assert running.wait_idle(300)
        changed, whole = running.messages("update"), running.messages("complete")
    expected = {"A": 67, "B": 67, "C": 66}
    assert {row["origin"]: row["count"] for row in changed} == expected
    assert {row["origin"]: row["count"] for row in whole[-3:]} == expected
    assert len(changed) == len(whole) == len({(row["origin"], row["count"]) for row in changed})


@pytest.mark.timeout(600)
def test_a_join_of_two_streams_gives_each_pair_once(spark: SparkSession, tmp_path: Path) -> None:
    """Its checkpoint is deleted between two runs. Each side waits in the state for the other one."""

    def pairs(flights: Any, landings: Any) -> Any:
        left = flights.withWatermark("at", "1 minute").select("n", "at")
        right = landings.withWatermark("at", "1 minute").select(F.col("n").alias("m"), F.col("at").alias("landed"))
        near = "m = n and landed between at and at + interval 1 hour"
        return left.join(right, F.expr(near)).select("n", "landed")

    def joining() -> Graph:
        made = Graph("g", durability="process")
        made.source("in")
        made.source("landings")
        made.frame({"flights": "in", "landings": "landings"}, "pairs", fields="n long, at timestamp", id="join")(pairs)
        return made

    for first, last in ((0, 100), (100, 200)):
        place: Any = {"store": tmp_path / "store", "queues": tmp_path / "queues"}
        with joining().start(engine="spark", spark=spark, **place) as running:
            for n in range(first, last):
                running.send("in", flight(n))
            for n in range(max(0, first - 20), last - 20):  # the last twenty have not landed
                running.send("landings", {"n": n, "at": flight(n)["at"] + timedelta(minutes=5)})
            assert running.wait_idle(300)
            found = running.messages("pairs")
        assert sorted(row["n"] for row in found) == list(range(last - 20))
        shutil.rmtree(tmp_path / "queues" / "_cues" / "checkpoints", ignore_errors=True)


def with_job(rows: Any) -> Any:
    return rows.groupBy("origin").count() if rows.count() == 0 else rows


def of_groups(rows: Any) -> Any:
    return rows.groupBy("origin").applyInPandas(lambda table: table[["origin"]], "origin string")


REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "append without a watermark": (totals, {}, "cannot run as a query in the output mode 'append'"),
    "complete without aggregates": (
        lambda rows: rows.select("n"),
        {"output_mode": "complete"},
        "output mode .complete.",
    ),
    "sorted": (lambda rows: rows.orderBy("n"), {}, "Sorting is not supported"),
    "the time": (
        lambda rows: rows.dropDuplicates(["n"]).withColumn("now", F.current_timestamp()),
        {},
        r"asks for the time \(CurrentTimestamp\)",
    ),
    "random": (lambda rows: rows.dropDuplicates(["n"]).withColumn("x", F.rand()), {}, "has a random expression"),
    "groups": (of_groups, {}, "has the operator FlatMapGroupsInPandas, which Spark applies to each batch"),
    "a job and a state": (with_job, {}, "cannot be called with a stream"),
    "a delivery and a state": (
        lambda rows, process: totals(rows).withColumn("hash", F.lit(process.delivery_hash)),
        {},
        "cannot be called with a stream",
    ),
    "retries": (lambda rows: rows.dropDuplicates(["n"]), {"retries": 2}, "runs as a query, and has retries="),
    "no interval": (lambda rows: rows.dropDuplicates(["n"]), {"trigger": "soon"}, "trigger='soon', which is not an"),
    "a trigger of steps": (lambda rows: rows.select("n"), {"trigger": "1 second"}, "has trigger=, and runs in steps"),
    "no column": (lambda rows: rows.dropDuplicates(["n"]).select("x.y"), {"output_mode": "append"}, "cannot be called"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_plan_that_cannot_be_exact_is_refused_before_anything_is_written(
    why: str, spark: SparkSession, tmp_path: Path
) -> None:
    function, options, told = REFUSED[why]
    made = Graph("g", durability="process")
    made.source("in")
    made.frame("in", "out", fields="n long, origin string", id="f", **options)(function)
    with pytest.raises(GraphError, match=told) as refused:
        made.start(engine="spark", spark=spark, store=tmp_path / "store", queues=tmp_path / "queues")
    assert "g.f" in str(refused.value) and refused.value.hint
    assert not (tmp_path / "queues").exists() and not (tmp_path / "store").exists()


def test_without_a_directory_a_frame_with_state_is_refused_by_name(spark: SparkSession, tmp_path: Path) -> None:
    """In steps it would give partial counts. With output_mode='step' they are asked for."""
    with pytest.raises(GraphError, match=r"The plan of g\.windows keeps state .* needs queues in a shared directory"):
        graph().start(engine="spark", spark=spark, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()
    made = Graph("g", durability="process")
    made.source("in")
    made.frame("in", "counts", fields="origin string", id="parts", output_mode="step")(totals)
    with made.start(engine="spark", spark=spark, store=tmp_path / "store") as running:
        running.send("in", flight(0))
        assert running.wait_idle(300)
        assert running.messages("counts") == [{"origin": "A", "count": 1}]


# --- kills ----------------------------------------------------------------------------------------

POINTS = [*faults.FRAME_POINTS, "spark.written", "spark.recorded", "spark.forwarded"]


class Death(BaseException):
    """The death of a driver at this point."""


@pytest.mark.timeout(900)
def test_a_driver_that_dies_in_a_batch_has_lost_and_doubled_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """At every crash point, one after the other, in one directory; each start finishes what the last one left."""
    sent = 0
    for point in POINTS:
        dead: list[str] = []

        def die(name: str, dead: list[str] = dead) -> None:
            dead.append(name)
            raise Death(name)

        faults.arm(point, 2 if point in faults.FRAME_POINTS else 1, die)
        with contextlib.suppress(Death, ProcessorStopped):
            play(spark, tmp_path, graph(), range(sent, sent + 150))
        faults.disarm()
        assert dead == [point]
        with cues.open(tmp_path / "store") as store:
            sent = len(store.queue("in"))
    expect_windows(play(spark, tmp_path, graph(), range(sent, sent + 50)), sent + 50)


# Runs the graph, and says how it ended.
DRIVER = """
import sys
from pathlib import Path
import cues
import cues.spark
from test_spark_frames import graph, play

with cues.spark.session("local[1]") as spark:
    try:
        play(spark, Path(sys.argv[1]), graph())
        print("idle", flush=True)
    except cues.CuesError as error:
        print(type(error).__name__, getattr(error, "reason", ""), flush=True)
print("over", flush=True)
"""


def send(place: Path, count: int) -> None:
    """Before any driver is there."""
    with cues.open(place / "store", durability="process") as store:
        store.queue("in").appender().write_many([flight(n) for n in range(count)])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", POINTS)
def test_a_driver_that_is_killed_in_a_batch_has_lost_and_doubled_nothing(
    point: str, spark: SparkSession, tmp_path: Path
) -> None:
    """As above, by ``kill -9`` of a process of its own; its Spark dies with it."""
    send(tmp_path, 250)
    with Child(DRIVER, tmp_path, CUES_FAULT=f"{point}:2") as child:
        assert child.returncode(600) == -signal.SIGKILL
    expect_windows(until(lambda: again(spark, tmp_path, range(250, 300)), timeout_s=120), 300)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_driver_that_was_stopped_in_a_batch_and_continues_commits_nothing_more(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Two that really overlap, with one checkpoint: one is held before its record, and another takes over."""
    send(tmp_path, 250)
    with Child(DRIVER, tmp_path, CUES_FAULT="spark.written:3:stop") as held:
        until(lambda: process_state(held.pid) in ("stopped", "zombie", "gone"), timeout_s=300)
        assert process_state(held.pid) == "stopped", held.errors()
        expect_windows(until(lambda: again(spark, tmp_path, take_over=True), timeout_s=300), 250)
        held.signal(signal.SIGCONT)
        told = [held.line()]
        while told[-1] != "over":
            told.append(held.line())
    assert "Fenced takeover" in told, told
    expect_windows(play(spark, tmp_path, graph(), range(250, 300)), 300)


def again(spark: SparkSession, place: Path, sent: range = range(0), **options: Any) -> list[Message] | None:
    """The rows after another run; None while the lease of the dead driver has not run out."""
    try:
        return play(spark, place, graph(), sent, **options)
    except cues.AlreadyRunning:
        return None


def test_lag_and_rate_are_metrics_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    """Also of a second run in the same session, which has other values under the same names."""

    def gauges() -> dict[str, int]:
        with urlopen(f"{spark.sparkContext.uiWebUrl}/metrics/json/", timeout=60) as answer:
            found = json.load(answer)["gauges"]
        return {name.partition("AccumulatorSource.")[2]: gauge["value"] for name, gauge in found.items()}

    for count in (3, 5):
        made = Graph("metrics", durability="process")
        made.source("in")
        made.stream("in", "out", id="copy")(spark_graphs.mended)
        place = {"store": tmp_path / f"store-{count}", "queues": tmp_path / f"queues-{count}"}
        with made.start(engine="spark", spark=spark, **place) as running:
            for n in range(count):
                running.send("in", {"n": n})
            assert running.wait_idle(300)
            expected = {"metrics.copy.written": count, "metrics.copy.lag": 0, "metrics.copy.failed": 0}
            expected["metrics.out.messages"] = count
            until(lambda expected=expected: expected.items() <= gauges().items(), timeout_s=120)  # set one by one
            until(lambda: gauges().get("metrics.out.bytes", 0) > 0 and "metrics.copy.rate" in gauges(), timeout_s=120)


def test_a_directory_to_which_spark_cannot_write_its_checkpoint_is_refused(
    spark: SparkSession, tmp_path: Path, object_store: str
) -> None:
    """An object store without Hadoop's connector. Frames without state need none."""
    with pytest.raises(Unsupported, match=r"Spark cannot keep the checkpoint of g\.windows in s3a://"):
        graph().start(engine="spark", spark=spark, store=tmp_path / "store", queues=object_store)
    assert not (tmp_path / "store").exists()
    assert open_files(object_store).names("") == []


@pytest.fixture
def late_workers(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """Workers that plan batches start after 15 s, as long as the file has lines: each of them takes one."""
    lines, program = tmp_path / "late", tmp_path / "python"
    late = f"test -s {lines} && sed -i 1d {lines} && sleep 15"
    program.write_text(f'#!/bin/sh\ncase "$*" in *_source_runner*) {late};; esac\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(spark.sparkContext, "pythonExec", str(program))
        yield lines
    cues.spark.register(spark)  # a data source keeps the Python that it was registered with


@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.long)])
def test_a_query_whose_worker_does_not_start_in_time_is_started_again_some_times(
    times: int, late_workers: Path, spark: SparkSession, tmp_path: Path
) -> None:
    """Spark waits ten seconds for it, and then ends the query. Nothing was called, so nothing is lost or doubled."""
    expect_windows(play(spark, tmp_path, graph(), range(100)), 100)
    late_workers.write_text("late\n" * times)
    told: list[Any] = []
    if times == 1:
        expect_windows(play(spark, tmp_path, graph(), range(100, 250), listeners=(told.append,)), 250)
    else:
        with pytest.raises(ProcessorStopped, match=r"Python worker failed to connect back"):
            play(spark, tmp_path, graph(), range(100, 250), listeners=(told.append,))
    assert late_workers.read_text() == "" and told_again(told) == min(times, 5)


@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.long)])
def test_a_spark_stream_whose_worker_does_not_start_in_time_is_started_again_some_times(
    times: int, late_workers: Path, spark: SparkSession, tmp_path: Path
) -> None:
    """The stream reads a queue of another store, and a worker of Python plans its batches."""
    stream = cues.spark.Source("cues", {"path": f"{tmp_path / 'first'}#in"}, available_now=True)
    told: list[Any] = []

    def taken(sent: range) -> list[int]:
        with cues.open(tmp_path / "first", durability="process") as store:
            store.queue("in").appender().write_many([{"n": n} for n in sent])
        made = Graph("g", [cues.Source("taken", stream)])
        place = {"store": tmp_path / "store", "queues": tmp_path / "queues"}
        with made.start(engine="spark", spark=spark, listeners=(told.append,), **place) as running:
            running.wait_done()
            return [message["n"] for message in running.messages("taken")]

    assert taken(range(40)) == [*range(40)] and not told_again(told)
    late_workers.write_text("late\n" * times)
    if times == 1:
        assert taken(range(40, 90)) == [*range(90)]
    else:
        with pytest.raises(ProcessorStopped, match=r"Python worker failed to connect back"):
            taken(range(40, 90))
    assert late_workers.read_text() == "" and told_again(told) == min(times, 5)


def told_again(told: list[Any]) -> int:
    return sum("the query starts again" in event.text for event in told)
