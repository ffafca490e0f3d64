"""A backfill leaves what the embedded engine leaves, whatever the function does and whatever is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cues
from cues import Graph, Source, Stream, testing
from cues.errors import ProcessorStopped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import spark_graphs
import terminal
from spark_cluster import until
from spark_graphs import GRAPHS
from test_spark_engine import IGNORED, IN_STORE, assert_same, left, run, template, without_times

from cues.spark import stretches
from cues.spark.executor import edges_of


@pytest.fixture(autouse=True)
def many_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges, stretches and commits so small that the graphs' 400 messages need several of each."""
    monkeypatch.setattr(stretches, "RANGE_MESSAGES", 150)
    monkeypatch.setattr(stretches, "STRETCH_MESSAGES", 40)
    monkeypatch.setattr(stretches, "COMMIT_VALUES_MAX", 3)


def fill(store: Path) -> None:
    """The messages of the graphs' source, and nothing else."""
    run(spark_graphs.graph()(), store)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if n % 3 else []) for n, name in enumerate(IN_STORE)]
)
def test_a_backfill_leaves_what_the_embedded_engine_leaves(name: str, spark: SparkSession, tmp_path: Path) -> None:
    template(tmp_path / "template", IN_STORE[name]())
    for engine in ("embedded", "backfill"):
        shutil.copytree(tmp_path / "template", tmp_path / engine, ignore=IGNORED)
    run(IN_STORE[name](), tmp_path / "embedded")
    fill(tmp_path / "backfill")
    run(IN_STORE[name](), tmp_path / "backfill", engine="spark", spark=spark, backfill=True)
    expected, found = left(tmp_path / "embedded"), left(tmp_path / "backfill")
    assert_same(name, found, expected)
    assert not list((tmp_path / "backfill" / "staged").glob("*"))


def test_what_goes_to_a_queue_with_partitions_is_placed_as_the_embedded_engine_places_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """By another key than that of the input; poison that has none goes to the error queue."""
    queues = {queue: cues.QueueOptions(partitions=3, key=key) for queue, key in (("in", "user"), ("out", "n"))}
    found = {}
    for engine in ("embedded", "spark"):
        with cues.open(tmp_path / engine, durability="process") as store:
            appender = store.queue("in", partitions=3, key="user").appender()
            appender.write_many([{"user": f"u{n % 7}", "n": n if n % 50 else None} for n in range(300)])
        stream = Stream(lambda m: {**m, "seen": True}, "in", "out", id="mark")
        graph = Graph("g", [stream], queues=queues, errors="errors", store=tmp_path / engine, durability="process")
        backfill: dict[str, Any] = {"engine": "spark", "spark": spark, "backfill": True}
        with graph.start(**(backfill if engine == "spark" else {})) as running:
            assert running.wait_done() if engine == "spark" else running.wait_idle(timeout=60)
            found[engine] = [sorted(m["n"] for m in running.messages(f"out/{number}")) for number in range(3)]
            assert len(running.messages("errors")) == 6
    assert found["spark"] == found["embedded"]
    assert all(found["spark"])


def test_two_processors_with_a_bounded_queue_between_them_take_turns_to_the_end(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The first finds it full again and again."""
    streams = [
        Stream(lambda m: m, "in", "middle", id="first"),
        Stream(lambda m: {"n": 2 * m["n"]}, "middle", "out", id="second"),
    ]
    made = Graph("g", streams, queues={"middle": cues.QueueOptions(max_lag=10)}, durability="process")
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(45)])
    with made.start(store=tmp_path / "store", engine="spark", spark=spark, backfill=True) as running:
        assert running.wait_done()
        assert [m["n"] for m in running.messages("out")] == [2 * n for n in range(45)]


def test_a_processor_that_waits_for_another_program_neither_ends_nor_spins(spark: SparkSession, tmp_path: Path) -> None:
    """It makes steps again as soon as the reader, which is no processor of the graph, goes on."""
    made = Graph("g", [Stream(lambda m: m, "in", "out", id="same")], queues={"out": cues.QueueOptions(max_lag=10)})
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(45)])
        reader = store.queue("out", max_lag=10).tailer("reader")
        reader.to_start()
        with made.start(store=store, engine="spark", spark=spark, backfill=True) as running:
            (worker,) = running.engine.workers
            until(lambda: bool(worker.stepper.gate.late))
            assert not running.engine.done()
            found: list[int] = []
            while len(found) < 45:
                found += [m["n"] for m in reader]
            assert running.wait_done()
    assert found == list(range(45))


def test_no_source_is_called(spark: SparkSession, tmp_path: Path) -> None:
    called = []

    def numbers(position: int | None) -> Iterator[Any]:
        called.append(position)
        yield from ((n + 1, {"n": n}) for n in range(position or 0, 20))

    made = Graph("g", [Source("in", numbers), Stream(lambda m: m, "in", "out", id="same")], durability="process")
    for before in ([], [None]):  # on an empty store, and after a run
        with made.start(store=tmp_path / "store", engine="spark", spark=spark, backfill=True) as running:
            assert running.wait_done()
        assert called == before
        run(made, tmp_path / "store")


def exact(store: Path, expected: list[int]) -> None:
    with cues.open(store) as opened:
        assert [m["n"] for m in testing.messages(opened, "out")] == expected
        assert opened.check() == []
        assert testing.check_attempts(opened) == []


DOUBLED = [2 * n for n in range(spark_graphs.COUNT)]


def test_engines_take_turns_with_backfills_on_one_store(spark: SparkSession, tmp_path: Path) -> None:
    """Also with state, which is the driver's: nothing is refused, and the results do not show the engine."""
    made = Graph("g", [Stream(spark_graphs.counted, "in", "out", key="n")], durability="process")
    for round in range(4):
        with cues.open(tmp_path / "store", durability="process") as store:
            store.queue("in").appender().write_many([{"n": n} for n in range(10)])
        options: dict[str, Any] = {"engine": "spark", "spark": spark, "backfill": True} if round % 2 else {}
        with made.start(store=tmp_path / "store", **options) as running:
            running.wait_idle(timeout=60)
    with cues.open(tmp_path / "store") as store:
        assert testing.messages(store, "out") == [{"n": n, "count": r} for r in range(1, 5) for n in range(10)]


def test_what_an_error_queue_brings_back_is_worked_off_too(spark: SparkSession, tmp_path: Path) -> None:
    """No processor follows the reader of the error queue; the backfill continues until it has nothing left either."""
    made = Graph(
        "g",
        [
            Stream(spark_graphs.first_of_error, "errors", "again", errors=None),
            Stream(spark_graphs.picky, "in", "out"),
            Stream(spark_graphs.mended, "again", "out"),
        ],
        errors="errors",
        durability="process",
    )
    fill(tmp_path / "store")
    run(made, tmp_path / "store", engine="spark", spark=spark, backfill=True)
    with cues.open(tmp_path / "store") as store:
        assert sorted(m["n"] for m in testing.messages(store, "out")) == list(range(spark_graphs.COUNT))
        assert len(testing.messages(store, "errors")) == 10


def test_messages_through_another_store_are_waited_for(spark: SparkSession, tmp_path: Path) -> None:
    """A forwarder brings it there; its reader, whose turn is next, must not find nothing and end."""
    queues = {"half": cues.QueueOptions(path=str(tmp_path / "other"))}
    made = spark_graphs.graph(
        Stream(spark_graphs.mended, "in", "half"), Stream(spark_graphs.plain, "half", "out"), queues=queues
    )()
    fill(tmp_path / "store")
    run(made, tmp_path / "store", engine="spark", spark=spark, backfill=True)
    exact(tmp_path / "store", DOUBLED)


def test_where_too_much_fails_the_usual_steps_do_it(spark: SparkSession, tmp_path: Path) -> None:
    """More failures than a task may report: the same error messages, whoever made them."""
    count = 2500
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(count)])
    made = Graph("g", [Stream(spark_graphs.refuses, "in", "out")], errors="errors", durability="process")
    run(made, tmp_path / "store", engine="spark", spark=spark, backfill=True)
    with cues.open(tmp_path / "store") as store:
        errors = testing.messages(store, "errors")
        assert [m["err.proc/messages"]["in"] for m in errors] == [[{"n": n}] for n in range(count)]
        assert store.check() == []


def test_a_failure_that_stops_a_processor_stops_it_here_too(spark: SparkSession, tmp_path: Path) -> None:
    """It has an error queue, and messages before the one that failed are committed, by whichever engine."""
    made = spark_graphs.graph(Stream(spark_graphs.lacks_a_package, "in", "out"), errors="errors")
    for engine, options in {"embedded": {}, "backfill": {"engine": "spark", "spark": spark, "backfill": True}}.items():
        fill(tmp_path / engine)
        with (
            pytest.raises(ProcessorStopped, match="stopped after 1 attempt: Unsupported: there is no package for this"),
            made().start(store=tmp_path / engine, **options) as running,
        ):
            running.wait_done()
        with cues.open(tmp_path / engine) as store:
            assert [m["n"] for m in testing.messages(store, "out")] == list(range(100))
            assert len(store.queue("errors")) == 0


def test_it_ends_although_another_program_continues_to_send(spark: SparkSession, tmp_path: Path) -> None:
    """The end does not wait for messages that are sent after the start."""
    made = Graph("g", [Stream(spark_graphs.sends_more, "in", "out", side_effects=True)], durability="process")
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("in").appender().write_many([{"n": n, "store": str(tmp_path / "store")} for n in range(5)])
    run(made, tmp_path / "store", engine="spark", spark=spark, backfill=True)
    with cues.open(tmp_path / "store") as store:
        assert [m["n"] for m in testing.messages(store, "out")][:5] == list(range(5))
        assert store.queue("in").last_index > 5


def test_every_core_has_a_stretch_and_batches_are_not_cut() -> None:
    assert edges_of(30, 1, 4, 40) == [0, 8, 16, 24, 30]
    assert edges_of(30, 7, 2, 40) == [0, 21, 30]
    assert edges_of(3, 7, 2, 40) == [0, 3]
    assert len(edges_of(1000, 1, 2, 40)) == 26, "not more than 40 in one"


def test_a_slow_function_gets_short_jobs_and_a_quick_one_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever kills the driver, or stops the graph, loses a job at most."""
    delivery = object.__new__(stretches.StretchTaker)
    delivery.most = stretches.FIRST_MESSAGES
    monkeypatch.setattr(stretches, "RANGE_MESSAGES", 1_000_000)
    for _ in range(10):
        delivery.pace(0.1)
    assert delivery.most == 1_000_000
    delivery.pace(1000.0)
    assert delivery.most == 5_000
    delivery.pace(5.0)
    assert delivery.most == 5_000
    for _ in range(10):
        delivery.pace(1000.0)
    assert delivery.most == 1


@pytest.mark.long
def test_the_drivers_memory_does_not_grow_with_the_queue(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600,000 messages of 1,000 bytes, on a "disk" store, which keeps what it commits in memory until it is written."""
    limits = {"RANGE_MESSAGES": 300_000, "FIRST_MESSAGES": 300_000, "STRETCH_MESSAGES": 100_000}
    for name, value in (limits | {"COMMIT_VALUES_MAX": 8_192}).items():
        monkeypatch.setattr(stretches, name, value)
    made = Graph("g", [Stream(spark_graphs.mended, "in", "out")])
    with cues.open(tmp_path / "store", durability="disk") as store:
        for start in range(0, 600_000, 5_000):
            store.queue("in").appender().write_many([{"n": n, "text": "x" * 1000} for n in range(start, start + 5_000)])
    before = own_memory()
    with made.start(store=tmp_path / "store", engine="spark", spark=spark, backfill=True) as running:
        most = 0
        while not running.engine.done():
            most = max(most, own_memory())
            running.engine.workers[0].thread.join(0.05)
        running.wait_done()
    assert most - before < 200 << 20
    with cues.open(tmp_path / "store", readonly=True) as store:
        assert len(store.queue("out")) == 600_000


def own_memory() -> int:
    """Bytes of memory without a file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Anonymous:", "Swap:")))


# --- killed ---------------------------------------------------------------------------------------

DRIVER = """
import sys
import spark_graphs
from cues.spark import stretches

stretches.RANGE_MESSAGES, stretches.STRETCH_MESSAGES, stretches.COMMIT_VALUES_MAX = 150, 40, 3
made = spark_graphs.GRAPHS[sys.argv[2]]()
with made.start(store=sys.argv[1], engine="spark", master="local[2]", backfill=True) as running:
    running.wait_done()
"""


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("several", "commit.before:2"),
        ("error queue", "commit.inside:3"),
        pytest.param("all filtered out", "commit.after:2", marks=pytest.mark.long),
        pytest.param("several", "commit.after:3", marks=pytest.mark.long),
        pytest.param("join", "commit.inside:6", marks=pytest.mark.long),
        pytest.param("batch function that fails", "commit.inside:2", marks=pytest.mark.long),
    ],
)
def test_a_killed_backfill_is_finished_by_the_next_start(
    name: str, point: str, spark: SparkSession, tmp_path: Path
) -> None:
    template(tmp_path / "store", GRAPHS[name]())
    shutil.copytree(tmp_path / "store", tmp_path / "expected", ignore=IGNORED)
    run(GRAPHS[name](), tmp_path / "expected")
    fill(tmp_path / "store")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "store"), name],
        cwd=Path(__file__).parent,
        env={**os.environ, "CUES_FAULT": point},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    run(GRAPHS[name](), tmp_path / "store", engine="spark", spark=spark, backfill=True)
    assert not list((tmp_path / "store" / "staged").glob("*")), "what the killed one staged is swept"
    expected, found = left(tmp_path / "expected"), left(tmp_path / "store")
    if name.startswith("batch"):
        for one in (expected, found):
            failed = [m["err.proc/messages"]["in"] for m in one["queues"]["errors"]]
            one["queues"]["errors"] = [m for some in failed for m in some]
    assert without_times(found["queues"]) == without_times(expected["queues"])


def test_a_worker_that_is_killed_stops_the_backfill_and_the_next_is_exact(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(spark.sparkContext.environment, "CUES_TEST_FLAG", str(tmp_path / "flag"))
    made = spark_graphs.graph(Stream(spark_graphs.dies_once, "in", "out"))()
    fill(tmp_path / "store")
    with pytest.raises(ProcessorStopped, match=r"Python worker exited unexpectedly"):
        made.run(store=tmp_path / "store", engine="spark", spark=spark, backfill=True)
    made.run(store=tmp_path / "store", engine="spark", spark=spark, backfill=True)
    exact(tmp_path / "store", list(range(spark_graphs.COUNT)))


# --- the command line -----------------------------------------------------------------------------

FILE = """
import cues
graph = cues.Graph("g", durability="process")
graph.source("in")

@graph.stream("in", "out")
def double(message):
    return {"n": message["n"] * 2}
"""


def test_cues_run_works_off_a_fed_graph_and_ends(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(FILE)
    store = tmp_path / "data" / "g"
    with cues.open(store, durability="process") as opened:
        opened.queue("in").appender().write_many([{"n": n} for n in range(spark_graphs.COUNT)])
    command = [*terminal.CUES, "run", "graph.py", "--engine", "spark", "--master", "local[2]", "--backfill", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=terminal.environment(), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["outcome"], told["processors"]["g.double"]["taken"]) == ("done", spark_graphs.COUNT)
    assert "400 in processed in" in done.stderr
    assert done.stderr.count("runs on Spark") == done.stderr.count("http://127.0.0.1:") == 1
    exact(store, DOUBLED)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backfill"], "--backfill is an option of Spark"),
        (["--backfill", "--engine", "spark", "--fresh"], "--fresh leaves no messages"),
        (["--backfill", "--engine", "spark", "--idle-exit", "3"], "it ends by itself, without --idle-exit"),
    ],
)
def test_what_makes_no_sense_with_a_backfill_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "graph.py").write_text(FILE)
    found = terminal.cues("run", tmp_path / "graph.py", *arguments)
    assert found.code == 2 and said in found.err
    assert not (tmp_path / "data").exists()
