"""A graph whose queues are on a shared filesystem leaves what it leaves on the embedded engine, whoever dies when."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from small import queue_of

import cues
import cues.spark
from cues import Graph, Sink, Source, Stream, faults, testing
from cues.cli.run import run as run_command
from cues.cli.show import show
from cues.engine import record
from cues.errors import (
    AlreadyRunning,
    Diverged,
    Fenced,
    GraphError,
    InvalidArgument,
    PositionMismatch,
    ProcessorStopped,
    QueueOptionsError,
    TopologyChanged,
    Unsupported,
)
from cues.operate.refused import Refused
from cues.queues.base import views_of
from cues.storage.locks import process_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import duckdb
import polars
import pyarrow as pa
import seeds
import spark_graphs
import terminal
import test_flights
from children import Child
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError
from spark_cluster import command_of, until
from spark_graphs import GRAPHS
from test_spark_engine import IGNORED, sums, template, without_times

from cues import codec
from cues.base import clock
from cues.queues.options import Retention
from cues.spark.cluster import inspection, operations
from cues.spark.cluster.data import Writer, pieces_of
from cues.spark.cluster.data import messages as messages_of
from cues.spark.cluster.directory import QueueDirectory, file_name
from cues.spark.cluster.driver import Driver
from cues.spark.cluster.files import folder_of, name_of, open_files
from cues.spark.cluster.ledger import Ledger, LedgerRecord
from cues.spark.cluster.maintenance import Maintenance, sweep
from cues.spark.cluster.step import Stage
from cues.spark.shipping import ship


def copy_of(template_path: Path, place: Path) -> None:
    """A store and a directory whose queues have the identities of the template's, so that hashes can be compared."""
    shutil.copytree(template_path, place / "store", ignore=IGNORED)
    with cues.open(template_path, readonly=True) as store:
        for queue in store.queues():
            if "." not in queue:
                folder = place / "queues" / folder_of(queue) / "_cues"
                folder.mkdir(parents=True)
                identity = store.queue(queue).core.row().identity.hex()
                (folder / "queue.json").write_text(json.dumps({"identity": identity, "queue": queue}))


def queues_at(place: Path) -> str:
    """The directory of the queues: in an object store, if the test has named one."""
    url = place / "queues.url"
    return url.read_text() if url.exists() else str(place / "queues")


@pytest.fixture(params=["a mount", "an object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder for a store, with its queues beside it or in an object store."""
    if request.param != "a mount":
        (tmp_path / "queues.url").write_text(request.getfixturevalue("object_store"))
    return tmp_path


def to_the_end(running: Any) -> None:
    """Until nothing is left, also where a processor stops; then the source first gives all that it has."""
    try:
        running.wait_done()
    except ProcessorStopped:
        sources = {node.id for node in running.plan.running if node.kind == "source"}
        until(lambda: all(unit.state != "running" for unit in running.standings() if unit.processor in sources))
        running.drain(240)
    finally:
        running.close()


def run(made: Graph, place: Path, spark: SparkSession, **options: Any) -> None:
    running = made.start(engine="spark", spark=spark, store=place / "store", queues=queues_at(place), **options)
    to_the_end(running)


def run_embedded(made: Graph, path: Path) -> None:
    running = made.start(store=path)
    to_the_end(running)


def rows(place: Path, queue: str) -> list[Any]:
    """A queue as any reader of Delta tables sees it: index, hash and value."""
    with contextlib.suppress(TableNotFoundError):
        return read(f"{queues_at(place)}/{folder_of(queue)}")
    return []


def read(folder: Path | str) -> list[Any]:
    table = QueryBuilder().register("queue", DeltaTable(str(folder)))
    sql = 'select first + "offset" as index, hash, value from queue order by 1'
    found: list[Any] = pa.table(table.execute(sql).read_all()).to_pylist()
    if any(row["value"] is None for row in found):  # rows of tables, whose messages are only typed columns
        place, _, name = str(folder).rpartition("/")
        files = open_files(place)
        log = QueueDirectory(files, name_of(name), cues.QueueOptions(), make=False).log(0)
        told = messages_of(files, pieces_of(log.folder, log.live, log.first, log.next))
        packed = {index: codec.pack(message) for index, *_, message in told}
        found = [row | {"value": packed[row["index"]]} for row in found]
    return found


def left(place: Path, made: Graph) -> dict[str, list[Any]]:
    """The messages by queue; indices are dense, and tracebacks, which name lines that differ, are cut."""
    found: dict[str, list[Any]] = {}
    for queue in made.plan().queues:
        there = rows(place, queue)
        assert [row["index"] for row in there] == list(range(1, len(there) + 1)), queue
        found[queue] = [codec.unpack(row["value"]) for row in there]
        for message in found[queue]:
            _cut_traces(message)
    return found


def left_embedded(path: Path, made: Graph) -> dict[str, list[Any]]:
    with cues.open(path) as store:
        found = {queue: testing.messages(store, queue) for queue in made.plan().queues}
    for messages in found.values():
        for message in messages:
            _cut_traces(message)
    return found


def _cut_traces(message: dict[str, Any]) -> None:
    for cause in message.get("err/cause", ()):
        cause["trace"] = cause["trace"].splitlines()[-1]


def all_shapes() -> Graph:
    """The graphs that both engines run, as one: a session does several steps at once faster than one after another."""
    parts = []
    for name, made in GRAPHS.items():
        part = made()
        queues = {queue: f"{name} {queue}" for queue in part.plan().queues if queue != "in"}
        streams = {id: f"{name} {id}" for id, one in part.processors.items() if one.kind != "source"}
        parts.append(part.rebind(queues, processors=streams))
    return cues.merge("g", *[_without_source(part) for part in parts[1:]], parts[0], queues={"in": {"metadata": True}})


def _without_source(part: Graph) -> Graph:
    """Its queue is another part's source."""
    return Graph(
        part.id,
        [one for one in part.processors.values() if one.kind != "source"],
        errors=part.errors,
        system=part.system,
        durability=part.durability,
    )


@pytest.mark.slow
@pytest.mark.fast
def test_files_hold_what_the_embedded_engine_leaves(spark: SparkSession, tmp_path: Path) -> None:
    """Every shape: messages, their order, hashes that functions saw, metadata, errors with attempts."""
    template(tmp_path / "template", all_shapes())
    shutil.copytree(tmp_path / "template", tmp_path / "embedded", ignore=IGNORED)
    copy_of(tmp_path / "template", tmp_path / "spark")
    run_embedded(all_shapes(), tmp_path / "embedded")
    run(all_shapes(), tmp_path / "spark", spark)
    expected = left_embedded(tmp_path / "embedded", all_shapes())
    found = left(tmp_path / "spark", all_shapes())
    for one in (expected, found):
        one["alts tagged"].sort(key=lambda m: (m["from"], m["n"]))  # which input is served first is free
        for queue in ("partitions counts", "keyed state out"):
            one[queue].sort(key=lambda m: m["n"])  # the key: its messages are in order, others as their tasks end
        # A step takes what is there when it begins.
        assert sum(m["count"] for m in one.pop("batch function out")) == spark_graphs.COUNT
        failed = one.pop("batch function that fails errors")
        assert sum(len(m["err.proc/messages"]["in"]) for m in failed) == spark_graphs.COUNT
    assert found.keys() == expected.keys()
    for queue in expected:
        assert without_times(found[queue]) == without_times(expected[queue]), queue


def test_a_worker_that_is_killed_in_a_table_loses_and_repeats_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(spark.sparkContext.environment, "CUES_TEST_FLAG", str(tmp_path / "flag"))
    dying = Stream(spark_graphs.dies_once_in_a_table, "wide", "out", batch="arrow", batch_size=60)
    made = spark_graphs.with_tables(dying)
    with pytest.raises(ProcessorStopped, match="Python worker exited unexpectedly"):
        running = made().start(engine="spark", spark=spark, store=tmp_path / "store", queues=tmp_path / "queues")
        with running:
            running.wait_done()
    assert (tmp_path / "flag").exists()
    run(made(), tmp_path, spark)
    found = left(tmp_path, made())
    assert [m["n"] for m in found["out"]] == list(range(spark_graphs.COUNT))
    assert found["out"] == found["wide"]


def by_partition(place: Path, queue: str) -> dict[int, list[Any]]:
    """The messages of each partition, as any reader of Delta tables sees them. Their indices have no gap."""
    table = QueryBuilder().register("queue", DeltaTable(str(place / "queues" / folder_of(queue))))
    sql = 'select partition, first + "offset" as index, value from queue order by 1, 2'
    logs: dict[int, list[Any]] = {}
    for row in pa.table(table.execute(sql).read_all()).to_pylist():
        log = logs.setdefault(row["partition"], [])
        log.append(codec.unpack(row["value"]))
        assert row["index"] == len(log)
    return logs


def each_key(messages: Sequence[dict[str, Any]]) -> dict[Any, list[Any]]:
    keys: dict[Any, list[Any]] = {}
    for message in messages:
        keys.setdefault(message["n"], []).append(message)
    return keys


def test_partitions_hold_what_the_embedded_engine_leaves_and_grow_while_the_graph_runs(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = spark_graphs.GRAPHS["partitions"]
    template(tmp_path / "template", made())
    shutil.copytree(tmp_path / "template", tmp_path / "embedded", ignore=IGNORED)
    copy_of(tmp_path / "template", tmp_path / "spark")
    run_embedded(made(), tmp_path / "embedded")
    run(made(), tmp_path / "spark", spark)
    with cues.open(tmp_path / "embedded") as store:
        for queue in ("in", "out", "counts"):
            expected = {view.core.log.partition: list(view.tailer(meta=False)) for view in views_of(store.queue(queue))}
            held = by_partition(tmp_path / "spark", queue)
            assert held.keys() == {p for p, messages in expected.items() if messages}
            for partition, messages in held.items():
                assert each_key(messages) == each_key(expected[partition]), (queue, partition)
    units = {last.processor for last in inspection.processors_of(tmp_path / "spark" / "queues")}
    assert {"g.counted", "g.counted/1", "g.counted/2", "g.sources.feed"} <= units

    places: dict[str, Any] = {"store": tmp_path / "spark" / "store", "queues": tmp_path / "spark" / "queues"}
    with made().start(engine="spark", spark=spark, **places) as running:
        queue_of(running, "in").grow(5)
        operations.growing(open_files(str(places["queues"])), "out").grow(4)
        until(lambda: {"g.counted/3", "g.several/4"} <= {unit.id for unit in running.standings()})
        more = [{"n": n} for n in range(1000, 1200)]
        queue_of(running, "in").appender().write_many(more)
        assert running.wait_idle(120)
    held_in, held_out = by_partition(tmp_path / "spark", "in"), by_partition(tmp_path / "spark", "out")
    assert held_in.keys() == set(range(5)) and held_out.keys() == set(range(4))
    taken = [message for log in held_in.values() for message in log]
    assert sorted(message["n"] for message in taken if message["n"] >= 1000) == list(range(1000, 1200))
    counts = [message for log in by_partition(tmp_path / "spark", "counts").values() for message in log]
    assert len(counts) == sum(map(len, held_out.values()))
    assert inspection.problems_of(places["queues"]) == []


def test_january_on_files_equals_an_independent_computation(spark: SparkSession, tmp_path: Path) -> None:
    """Sinks run on executors: a database with positions of its own, and a page drawn from the processor's state."""
    with test_flights.example(tmp_path) as flights:
        flights.graph.directory = test_flights.EXAMPLES  # as the command line says: modules beside it travel
        run(flights.graph, tmp_path, spark)
        queues = left(tmp_path, flights.graph)
    page = next(tmp_path.glob("report*.html")).read_text()
    with contextlib.closing(sqlite3.connect(next(tmp_path.glob("*.db")))) as db:
        inserted = db.execute("select * from flights").fetchall()
        rejected = db.execute("select at, problem from rejected").fetchall()
    results = test_flights.Results(queues, inserted, rejected, page, testing.Report())
    test_flights.expect(results, test_flights.expected_flights(test_flights.DATA))


# --- who dies when --------------------------------------------------------------------------------


class Death(BaseException):
    """The death of a thread of a driver; the other threads stop at once."""


def mixed(source: Source | None = None) -> Graph:
    """A fork, an error queue with another writer on one of its queues, keyed state, and a sink that keeps positions."""
    return Graph(
        "g",
        [
            source or Source("in"),
            Stream(spark_graphs.parity, "in", {"even": "even", "odd": "odd"}),
            Stream(spark_graphs.counted, "even", "counted", key=spark_graphs.by_ten),
            Stream(spark_graphs.picky, "in", "odd", retries=cues.Retry(2, 0.0)),
            Sink(spark_graphs.noted, "counted", errors=None),
        ],
        errors="errors",
        durability="process",
    )


def finish(place: Path, spark: SparkSession, count: int = 0, start: int = 0) -> None:
    """Send some more, and run until nothing is left to do."""
    with mixed().start(engine="spark", spark=spark, store=place / "store", queues=queues_at(place)) as running:
        for n in range(start, start + count):
            running.send("in", {"n": n})
        running.wait_idle(timeout=240)


def expect_exact(place: Path, count: int) -> None:
    """Compare with the results of one call after another, computed here."""
    found = left(place, mixed())
    assert [m["n"] for m in found["in"]] == list(range(count))
    assert [m["n"] for m in found["even"]] == list(range(0, count, 2))
    wrong = [n for n in range(count) if n % 50 == 7 or n in (100, 200)]
    picked = [n for n in range(count) if n not in wrong]
    assert sorted(m["n"] for m in found["odd"]) == sorted([*range(1, count, 2), *picked])
    assert [m["err.proc/messages"]["in"][0]["n"] for m in found["errors"]] == wrong
    assert {m["err.proc/config"]["attempt"] for m in found["errors"]} <= {1, 2}
    expected: dict[int, int] = {}
    for message in found["counted"]:
        key = message["n"] % 10
        expected[key] = expected.get(key, 0) + 1
        assert message["count"] == expected[key]
    assert sorted(m["n"] for m in found["counted"]) == list(range(0, count, 2))
    for key in expected:
        of_key = [m["n"] for m in found["counted"] if m["n"] % 10 == key]
        assert of_key == sorted(of_key)
    with contextlib.closing(sqlite3.connect(place / "notes.db")) as db:
        assert db.execute("select n from notes order by n").fetchall() == [(n,) for n in range(0, count, 2)]
        assert db.execute("select count(distinct hash) from notes").fetchone() == (len(range(0, count, 2)),)


@pytest.mark.slow
def test_a_driver_that_dies_anywhere_has_lost_and_doubled_nothing(
    spark: SparkSession, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every crash point, one after the other, in one directory; each start finishes what the last one left."""
    monkeypatch.setitem(spark.sparkContext.environment, "CUES_TEST_NOTES", str(place / "notes.db"))
    sent = 0
    for number, point in enumerate(faults.SPARK_POINTS):
        dead: list[str] = []
        running: list[Any] = []

        def die(name: str, dead: list[str] = dead, running: list[Any] = running) -> None:
            dead.append(name)
            for one in running:
                one.halt()
            raise Death(name)

        faults.arm(point, 1 + number % 2 if point != "spark.claimed" else 1, die)
        with contextlib.suppress(Death, ProcessorStopped):
            running.append(mixed().start(engine="spark", spark=spark, store=place / "store", queues=queues_at(place)))
            try:
                for n in range(sent, sent + 30):
                    running[0].send("in", {"n": n})
                until(lambda running=running: running[0].stopped, timeout_s=200)
            finally:
                sent = len(running[0].store.queue("in"))
                running[0].close()
        faults.disarm()
        assert dead[:1] == [point]
    finish(place, spark, 30, sent)
    expect_exact(place, sent + 30)


# Runs the graph of :func:`mixed`, and says how it ended.
DRIVER = """
import sys
import cues
from collections.abc import Sequence
from pathlib import Path
from test_spark_queues import mixed, queues_at

place = Path(sys.argv[1])
running = mixed().start(engine="spark", master="local[1]", store=place / "store", queues=queues_at(place))
try:
    running.wait_idle(timeout=240)
except cues.CuesError as error:
    print("stopped")
finally:
    running.close()
for error in running.stopped:
    print(type(error).__name__, getattr(error, "reason", ""), flush=True)
print("over", flush=True)
"""


def send(place: Path, count: int) -> None:
    """Before any driver is there."""
    with cues.open(place / "store", durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(count)])


@pytest.mark.slow
def test_a_driver_that_was_stopped_and_continues_commits_nothing_more(
    spark: SparkSession, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that really overlap: one is held with its files written and its record not, another takes everything over."""
    notes = str(place / "notes.db")
    monkeypatch.setitem(spark.sparkContext.environment, "CUES_TEST_NOTES", notes)
    send(place, 120)
    with Child(DRIVER, place, CUES_FAULT="spark.written:3:stop", CUES_TEST_NOTES=notes) as held:
        until(lambda: process_state(held.pid) in ("stopped", "zombie", "gone"), timeout_s=150)
        assert process_state(held.pid) == "stopped", held.errors()

        def taken_over() -> bool:
            try:
                with mixed().start(
                    engine="spark", spark=spark, store=place / "store", queues=queues_at(place), take_over=True
                ) as running:
                    running.wait_idle(timeout=240)
                    return True
            except AlreadyRunning:  # the store's own lease has to run out
                return False

        until(taken_over, timeout_s=300)
        expect_exact(place, 120)
        held.signal(signal.SIGCONT)
        told = []
        while told[-1:] != ["over"]:
            told.append(held.line())
    assert "Fenced takeover" in told, told
    finish(place, spark, 30, 120)
    expect_exact(place, 150)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("point", faults.SPARK_POINTS)
def test_a_driver_that_is_killed_anywhere_has_lost_and_doubled_nothing(
    point: str, hit: int, spark: SparkSession, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, by ``kill -9`` of a process of its own."""
    notes = str(place / "notes.db")
    monkeypatch.setitem(spark.sparkContext.environment, "CUES_TEST_NOTES", notes)
    send(place, 120)
    hit = 1 if point == "spark.claimed" else hit
    with Child(DRIVER, place, CUES_FAULT=f"{point}:{hit}", CUES_TEST_NOTES=notes) as child:
        child.process.wait(timeout=300)
        # The number of steps depends on the speed of the machine: the third time need not come.
        ends = {-signal.SIGKILL, 0} if (point, hit) == ("spark.taking", 3) else {-signal.SIGKILL}
        assert child.returncode(240) in ends, child.errors()
    finish(place, spark, 30, 120)
    expect_exact(place, 150)


# Runs the graph of :func:`poured` with a store, until it is killed.
HOST = """
import sys
from test_spark_queues import poured, queues_at
from pathlib import Path

place = Path(sys.argv[1])
poured(120).run(engine="spark", master="local[1]", store=place / "a", queues=queues_at(place))
"""


def poured(count: int) -> Graph:
    def pour(position: int | None) -> Any:
        yield from ((n + 1, {"n": n}) for n in range(position or 0, count))

    return mixed(Source("in", pour, batch_size=20))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "fault", ["spark.recorded:1", *(pytest.param(f"spark.{at}", marks=pytest.mark.long) for at in ("ran:3", "claimed"))]
)
def test_a_driver_on_another_host_continues_and_the_first_store_is_refused(
    fault: str, spark: SparkSession, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host A is killed. Host B has an empty store: sources, state and sinks continue. Then A comes back."""
    notes = str(place / "notes.db")
    monkeypatch.setitem(spark.sparkContext.environment, "CUES_TEST_NOTES", notes)
    with Child(HOST, place, CUES_FAULT=fault, CUES_TEST_NOTES=notes) as child:
        child.process.wait(timeout=300)
        assert child.returncode(240) == -signal.SIGKILL, child.errors()

    def run(store: str, count: int) -> None:
        poured(count).run(engine="spark", spark=spark, store=place / store, queues=queues_at(place))

    run("b", 150)
    expect_exact(place, 150)
    with pytest.raises(Diverged, match="does not continue the one in"):
        run("a", 150)
    shutil.rmtree(place / "a")
    run("a", 170)
    expect_exact(place, 170)
    with pytest.raises(Diverged, match="does not continue the one in"):
        run("b", 170)


def python_workers(spark: SparkSession) -> list[int]:
    """The processes of this session that call functions. A daemon forks them."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(folder.name))
    java = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    daemons = [pid for pid in parents.get(java, []) if ".daemon pyspark.worker" in command_of(pid)]
    return [worker for daemon in daemons for worker in parents.get(daemon, [])]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.long)])
def test_workers_that_are_killed_and_drivers_that_give_up_lose_and_double_nothing(
    kills: int, spark: SparkSession, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random moments: ``kill -9`` of a process that calls functions; now and then the driver is halted in a step."""
    monkeypatch.setitem(spark.sparkContext.environment, "CUES_TEST_NOTES", str(place / "notes.db"))
    chance = random.Random(seeds.new())
    sent = done = 0
    while done < kills:
        with (
            contextlib.suppress(ProcessorStopped),  # Spark gives a task up after four deaths; the next start goes on
            mixed().start(engine="spark", spark=spark, store=place / "store", queues=queues_at(place)) as running,
        ):
            try:
                for _ in range(chance.randrange(1, 8)):
                    for n in range(sent, sent + 25):
                        running.send("in", {"n": n})
                        sent = n + 1
                    time.sleep(chance.uniform(0, 0.4))
                    for pid in chance.sample(workers := python_workers(spark), min(1, len(workers))):
                        with contextlib.suppress(
                            ProcessLookupError
                        ):  # Spark itself ends workers that are idle or failed
                            os.kill(pid, signal.SIGKILL)
                            done += 1
            finally:
                if chance.random() < 0.5:
                    running.halt()
    finish(place, spark, 30, sent)
    expect_exact(place, sent + 30)


# --- the protocol by itself, and controls that fail ------------------------------------------------


def filled(place: Path, count: int) -> None:
    """A queue ``in`` as a feeder leaves it."""
    files = open_files(str(place))
    directory = QueueDirectory(files, "in", cues.QueueOptions())
    directory.own("g")
    writer = Writer(files, "in", "g.in.feed", 1, 0)
    writer.add([codec.pack({"n": n}) for n in range(count)], [None] * count, None)
    file = writer.close()
    assert file is not None
    directory.publish("g.in.feed", 1, directory.numbered([file]))


def owner(place: Path, spark: SparkSession, **options: Any) -> Stage:
    """A driver that owns ``plain``, which reads ``in`` and writes to ``out``."""
    stage = opened(place, spark, **options)
    stage.claim()
    return stage


def opened(place: Path, spark: SparkSession, **options: Any) -> Stage:
    """A driver that has read the logs of its queues, and owns nothing yet."""
    graph = Graph("g", [Stream(spark_graphs.plain, "in", "out", **options)])
    plan = graph.plan()
    ship(spark, graph, plan)
    driver = Driver(spark, open_files(str(place)), "g", None, lambda event: None, lambda seconds: False)
    driver.queues = {queue: QueueDirectory(driver.files, queue, o) for queue, o in plan.queues.items()}
    for directory in driver.queues.values():
        directory.own("g")
    (node,) = plan.running
    return Stage(driver, node)


def numbers(place: Path) -> list[int]:
    found = read(place / "out")
    assert [row["index"] for row in found] == list(range(1, len(found) + 1))
    return [codec.unpack(row["value"])["n"] for row in found]


def both_step(place: Path, spark: SparkSession) -> tuple[str, Stage]:
    """Two owners at once: the first is overtaken during its step, and continues. Return its outcome."""
    filled(place, 20)
    first = owner(place, spark)

    def overtaken(point: str) -> None:
        faults.disarm()
        second = owner(place, spark)
        while second.step():
            pass

    faults.arm("spark.written", 1, overtaken)
    try:
        while first.step():
            pass
    except (Fenced, Diverged) as error:
        return type(error).__name__, first
    return "nothing", first


def test_an_overtaken_driver_is_fenced_at_its_commit(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, first = both_step(tmp_path, spark)
    assert told == "Fenced"
    assert first.ledger.record_at(1).kind == "claim"  # of the second, where the first would have put its step
    assert numbers(tmp_path) == [2 * n for n in range(20)]
    owner(tmp_path, spark).driver.queues["out"].vacuum()
    assert len(list((tmp_path / "out").rglob("*.parquet"))) == 4  # its two are in no log, and may be of a step
    monkeypatch.setattr("cues.spark.cluster.directory.KEEP_FILES_H", 0)
    owner(tmp_path, spark).driver.queues["out"].vacuum()
    assert len(list((tmp_path / "out").rglob("*.parquet"))) == 2
    assert numbers(tmp_path) == [2 * n for n in range(20)]


def test_a_driver_takes_over_from_one_that_went_on_while_it_read_the_logs(spark: SparkSession, tmp_path: Path) -> None:
    """What it has read is older than the records; that is not a damaged directory."""
    filled(tmp_path, 20)
    first = owner(tmp_path, spark, batch_size=4, side_effects=True)
    second = opened(tmp_path, spark, batch_size=4, side_effects=True)
    for _ in range(3):
        assert first.step()
    second.claim()
    with pytest.raises(Fenced):
        first.step()
    while second.step():
        pass
    assert numbers(tmp_path) == [2 * n for n in range(20)]


def test_control_without_put_if_absent_an_overtaken_driver_commits(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are written whatever is there: the claim that overtook the first one is gone."""

    def put(ledger: Ledger, record: LedgerRecord) -> bool:
        ledger.files.write(ledger.name_of(record.number), record.to_json())
        ledger.last = record
        return True

    monkeypatch.setattr(Ledger, "_put", put)
    _, first = both_step(tmp_path, spark)
    record = first.ledger.record_at(1)
    assert record.owner == first.driver.owner and not named(record) & live(tmp_path)  # committed, and on no queue


def named(record: LedgerRecord) -> set[str]:
    return {file.name for files in record.files.values() for file in files}


def live(place: Path) -> set[str]:
    return {file.name for log in inspection.logs_of(place, "out") for file in log.live}


def test_records_that_are_gone_or_old_are_refused_and_control_without_the_check_loses(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that do not belong to the queues, like a lost or a stale checkpoint of other systems."""
    filled(tmp_path, 20)
    before = tmp_path / "_cues" / "before"
    stage = owner(tmp_path, spark)
    steps = tmp_path / "_cues" / "steps"
    shutil.copytree(steps, before)
    assert stage.step() and not stage.step()
    for copy in (before, None):
        shutil.rmtree(steps)
        if copy is not None:
            shutil.copytree(copy, steps)
        with pytest.raises(Diverged, match=r"holds messages of record 1 of g\.plain"):
            owner(tmp_path, spark)
    monkeypatch.setattr(Driver, "_compare", lambda driver, processor, last: None)
    lost = owner(tmp_path, spark)
    assert lost.step() and named(lost.ledger.now) and not named(lost.ledger.now) & live(tmp_path)


def test_readers_see_what_the_log_says_and_nothing_of_orphans(spark: SparkSession, tmp_path: Path) -> None:
    """Torn files, and a whole copy of another. Four readers agree, also where the directory was moved."""
    filled(tmp_path / "here", 20)
    stage = owner(tmp_path / "here", spark, batch_size=5, side_effects=True)  # several steps, several files
    while stage.step():
        pass
    queue = tmp_path / "here" / "out"
    one, *others = queue.rglob("*.parquet")
    assert len(others) == 3
    shutil.copy(one, queue / file_name("g.plain", 99))
    (queue / file_name("g.plain", 99)).write_bytes(b"")
    (queue / "somebody-elses.parquet").write_bytes(b"PAR1")
    shutil.move(tmp_path / "here", tmp_path / "moved")
    place = tmp_path / "moved"
    assert numbers(place) == [2 * n for n in range(20)]
    reader = inspection.QueueReader(place, "out")
    kept = [one.message["n"] for one in reader.read(reader.last(None))]
    assert kept == [2 * n for n in range(20)]
    table = DeltaTable(str(place / "out"))
    query = duckdb.from_arrow(pa.table(table.scan().read_all())).order('first + "offset"').project("value")
    assert [codec.unpack(value)["n"] for (value,) in query.fetchall()] == kept
    frame = polars.DataFrame(pa.table(table.scan().read_all())).sort(polars.col("first") + polars.col("offset"))
    assert [codec.unpack(value)["n"] for value in frame["value"]] == kept
    again = owner(place, spark)
    assert not again.step()


def test_a_driver_on_the_same_store_that_answers_is_not_replaced_and_keeps_its_lease(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process is told to stop it. The refusal comes before Spark starts."""
    made = GRAPHS["plain"]()
    places: dict[str, Any] = {"store": tmp_path / "store", "queues": tmp_path / "queues"}
    lease = tmp_path / "queues" / "_cues" / "g.driver.json"
    with made.start(engine="spark", spark=spark, **places) as running:
        owner = json.loads(lease.read_text())["owner"]
        monkeypatch.setattr("cues.spark.cluster.engine.open_session", lambda *given: pytest.fail("Spark was started"))
        with pytest.raises(AlreadyRunning, match=r"g\.in is already run in this process"):
            made.start(engine="spark", take_over=True, **places)
        command = ["run", "--engine", "spark", "--store", places["store"], "--queues", places["queues"], "--take-over"]
        (tmp_path / "graph.py").write_text("import spark_graphs\ngraph = spark_graphs.GRAPHS['plain']()\n")
        told = terminal.cues(*command, tmp_path / "graph.py", PYTHONPATH=str(Path(__file__).parent))
        assert json.loads(lease.read_text())["owner"] == owner
        assert running.wait_done()
    assert f"wait until it ends, or stop it (kill {os.getpid()}): it answers" in told.err


@pytest.fixture
def vacuums(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The queues that were vacuumed."""
    found: list[str] = []
    monkeypatch.setattr(QueueDirectory, "vacuum", lambda directory, under_way: found.append(directory.queue))
    return found


def test_a_vacuum_is_due_by_its_note_in_the_directory_and_not_by_the_age_of_the_process(
    spark: SparkSession, tmp_path: Path, vacuums: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, 4)
    stage, began = owner(tmp_path, spark), clock.now_ns()

    def vacuums_after(hours: float) -> list[str]:
        """In a process that has just begun, at a time by the clock."""
        monkeypatch.setattr(clock, "now_ns", lambda: began + int(hours * 3600e9))
        vacuums.clear()
        Maintenance(stage.driver, [stage]).vacuum_if_due()
        return sorted(vacuums)

    hours = {
        0.0: False,
        0.9: False,
        1.1: True,
        1.2: False,
        2.2: True,
        2.1: True,
        3.0: False,
    }  # once the clock goes back
    assert {hour: vacuums_after(hour) for hour in hours} == {
        hour: ["in", "out"] if due else [] for hour, due in hours.items()
    }


def test_a_run_ends_with_the_vacuum_that_is_due_also_if_a_merge_failed(
    spark: SparkSession, tmp_path: Path, vacuums: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(GRAPHS["plain"](), tmp_path, spark)
    assert vacuums == []
    note = tmp_path / "queues" / "_cues" / "g.vacuum.json"
    noted = json.loads(note.read_text())
    note.write_text(json.dumps({"time": "2026-11-01T12:00:00+00:00"}))
    monkeypatch.setattr(Maintenance, "merge", lambda keeper, log: Path("/nowhere").read_text())
    run(GRAPHS["plain"](), tmp_path, spark)
    assert sorted(vacuums) == ["in", "out"]
    assert json.loads(note.read_text())["time"] > noted["time"]


def test_small_files_become_one_and_old_ones_go_also_when_that_dies(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, 60)
    stage = owner(tmp_path, spark, batch_size=4, side_effects=True)
    while stage.step():
        pass
    keeper = Maintenance(stage.driver, [stage])
    keeper.merge_files = 6
    out = stage.driver.queues["out"]
    assert len(out.live) == 15

    def die(point: str) -> None:
        raise Death(point)

    faults.arm("spark.replaced", 1, die)
    with pytest.raises(Death):
        keeper.merge(out.log(0))
    faults.disarm()
    assert len(out.live) < 6 and len(list((tmp_path / "out").rglob("*.parquet"))) == 16
    assert numbers(tmp_path) == [2 * n for n in range(60)]
    again = owner(tmp_path, spark)
    assert not again.ready()
    sweep(again.driver, [again])
    out = again.driver.queues["out"]
    assert numbers(tmp_path) == [2 * n for n in range(60)]
    # Retention: whole files below the bound, from the log at once and from the disk later; the last one stays.
    keeper = Maintenance(again.driver, [again])
    keeper.retain(out.log(0), Retention(count=4))
    assert (out.log(0).first, out.log(0).next, len(out.live)) == (57, 61, 1)
    keeper.vacuum()
    assert len(list((tmp_path / "out").rglob("*.parquet"))) == 16
    monkeypatch.setattr("cues.spark.cluster.directory.KEEP_FILES_H", 0)
    keeper.vacuum()
    assert len(list((tmp_path / "out").rglob("*.parquet"))) == 1
    assert QueueDirectory(out.files, "out", cues.QueueOptions()).log(0).next == 61
    keeper.retain(again.driver.queues["in"].log(0), Retention(read=True))
    assert again.driver.queues["in"].log(0).next == 61


# --- other ways in, other places ------------------------------------------------------------------


def arrivals(folder: Path, queue: str = "in") -> cues.Source:
    options = {"path": str(folder), "maxFilesPerTrigger": "1"}
    return cues.Source(queue, cues.spark.Source("json", options, schema="n bigint", available_now=True))


def arrive(folder: Path, *numbers: range) -> None:
    folder.mkdir(exist_ok=True)
    for some in numbers:
        (folder / f"{some.start:06d}.json").write_text("".join(f'{{"n": {n}}}\n' for n in some))


def test_a_spark_stream_is_a_source_and_another_checkpoint_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Without anything in the driver's store; a death after the commit of a batch, which Spark repeats."""
    arrive(tmp_path / "files", range(10), range(10, 25), range(25, 40))

    def made() -> Graph:
        return Graph("g", [arrivals(tmp_path / "files"), Stream(spark_graphs.plain, "in", "out")])

    def die(point: str) -> None:
        raise RuntimeError(point)  # Java waits for ever for a callback that ends with anything else

    faults.arm("spark.recorded", 2, die)
    with pytest.raises(ProcessorStopped, match=r"spark\.recorded"):
        made().run(engine="spark", spark=spark, store=tmp_path / "store", queues=tmp_path / "queues")
    faults.disarm()
    run(made(), tmp_path, spark)
    arrive(tmp_path / "files", range(40, 45))
    run(made(), tmp_path, spark)
    found = left(tmp_path, made())
    assert sorted(m["n"] for m in found["in"]) == list(range(45))
    assert [m["n"] for m in found["out"]] == [2 * m["n"] for m in found["in"]]
    shutil.rmtree(tmp_path / "queues" / "_cues" / "checkpoints")
    with (
        pytest.raises(ProcessorStopped, match=r"Batch 0 of g\.in does not follow") as refused,
        made().start(engine="spark", spark=spark, store=tmp_path / "store", queues=tmp_path / "queues") as running,
    ):
        assert set(running.counters()) == {"g.in", "g.plain"}
        running.wait_done()
    assert isinstance(refused.value.__cause__, PositionMismatch)
    assert left(tmp_path, made()) == found


def test_an_object_store_will_do_and_frames_run_there(spark: SparkSession, tmp_path: Path, object_store: str) -> None:
    made = Graph("g", [Source("in", spark_graphs.numbers, batch_size=500)], errors="errors", durability="process")
    made.frame("in", "out", fields="n long", id="sums", output_mode="step")(sums)
    made.frame("out", "failed", id="fails")(lambda frame: frame.select("no_such_column"))
    with made.start(engine="spark", spark=spark, store=tmp_path / "store", queues=object_store) as running:
        running.wait_done()
        found = running.messages("out")
        assert sum(message["total"] for message in found) == sum(range(spark_graphs.COUNT))
        assert max(message["last"] for message in found) == spark_graphs.COUNT
        errors = running.messages("errors")
        assert sum(len(m["err.proc/messages"]["out"]) for m in errors) == len(found)
        assert "no_such_column" in errors[0]["err/cause"][0]["message"]
        seen = read(f"{object_store}/out")
        assert [row["hash"] for row in seen] == [message["hash"] for message in found]
        with pytest.raises(InvalidArgument, match="messages can be sent only to queues in the store of this machine"):
            running.send("out", {"n": 1})


def test_typed_columns_from_every_writer(spark: SparkSession, tmp_path: Path) -> None:
    """A feeder, tasks by key and without one, a frame and a Spark stream; then a second run adds a column."""
    arrive(tmp_path / "files", range(10))

    def made(schema: Any) -> Graph:
        numbers = Source("in", spark_graphs.numbers, batch_size=500)
        streams = [Stream(spark_graphs.plain, "in", "out"), Stream(spark_graphs.plain, "in", "keyed", id="k", key="n")]
        graph = Graph("g", [numbers, *streams, arrivals(tmp_path / "files", "came")])
        graph.frame("in", "sums", fields="n long", id="sums", output_mode="step")(sums)
        graph.queues["*"] = cues.QueueOptions(schema=schema)
        return graph

    def run_with(schema: Any) -> None:
        made(schema).run(engine="spark", spark=spark, store=tmp_path / "store", queues=tmp_path / "queues")

    def rows_of(queue: str) -> list[dict[str, Any]]:
        table = QueryBuilder().register("queue", DeltaTable(str(tmp_path / "queues" / queue)))
        found = pa.table(table.execute('select *, first + "offset" as i from queue order by i').read_all())
        return found.to_pylist()

    run_with({"n": int, "total": "double"})
    for queue, name in [("in", "n"), ("out", "n"), ("keyed", "n"), ("came", "n"), ("sums", "total")]:
        rows = rows_of(queue)
        messages = [codec.unpack(row["value"])[name] for row in rows]
        assert [row[name] for row in rows] == messages and messages
    with pytest.raises(QueueOptionsError, match="a column 'total', which is double, and schema= says long"):
        run_with({"total": int})
    arrive(tmp_path / "files", range(10, 12))
    run_with({"more": str})
    last = rows_of("came")[-1]
    assert last["n"] == 11 and last["more"] is None
    noted = record.queues_of(tmp_path / "store", "g")
    assert noted is not None and noted.directory == str(tmp_path / "queues")
    rows = map(json.loads, terminal.cues("status", tmp_path / "queues").out.splitlines())
    assert {row["processor"]: row["lag"] for row in rows if row.get("processor") == "g.sources.feed"} == {
        "g.sources.feed": 0
    }
    table = spark.read.format("cues").schema("index bigint, n bigint").load(f"{tmp_path}/queues#keyed")
    assert sorted(n for _, n in table.collect()) == [2 * n for n in range(spark_graphs.COUNT)]


def test_what_has_no_form_there_is_refused_by_name(spark: SparkSession, tmp_path: Path) -> None:
    places: dict[str, Any] = {"engine": "spark", "spark": spark, "store": tmp_path / "s", "queues": tmp_path / "q"}
    back = Graph("g", [Source("in"), Stream(spark_graphs.plain, "in", "out"), Stream(spark_graphs.picky, "out", "in")])
    with pytest.raises(GraphError, match=r"The queue 'in' belongs to a source.*g\.picky writes to it too"):
        back.start(**places)
    elsewhere = {"out": cues.QueueOptions(path=str(tmp_path / "other"))}
    other = Graph("g", [Stream(spark_graphs.plain, "in", "out")], queues=elsewhere)
    with pytest.raises(GraphError, match="The queue 'out' has path="):
        other.start(**places)
    assert not (tmp_path / "q").exists()
    look = Graph("g", [Stream(lambda m, process: None, "in", None, id="look", appenders=["log"])])
    with pytest.raises(GraphError, match=r"g\.look is imperative"):
        look.start(**places)
    streamed = Graph("g", [arrivals(tmp_path), Stream(spark_graphs.plain, "in", "out")], store=tmp_path / "embedded")
    with pytest.raises(ProcessorStopped, match="is a source on a shared filesystem only"):
        streamed.run()
    with Graph("g", [Stream(spark_graphs.plain, "in", "out")]).start(**places) as running:
        running.send("in", {"n": 1})
        with pytest.raises(AlreadyRunning):
            Graph("g", [Stream(spark_graphs.plain, "in", "out")]).start(**{**places, "store": tmp_path / "s2"})
    more = Graph(
        "g",
        [
            Source("in"),
            Source("other"),
            Stream(spark_graphs.pairs, {"left": "in", "right": "other"}, "out", id="plain"),
        ],
    )
    with pytest.raises(TopologyChanged, match=r"new: g\.plain\.other"):
        more.start(**places)
    with cues.open(tmp_path / "s3") as store:
        store.queue("in").appender().write({"n": 9})
    with pytest.raises(Diverged, match="it is another queue"):
        Graph("g", [Stream(spark_graphs.plain, "in", "out")]).start(**{**places, "store": tmp_path / "s3"})


def test_a_graph_with_a_stopped_feeder_is_not_done(spark: SparkSession, tmp_path: Path) -> None:
    """The queue's folder is lost while the graph runs; what is not copied is not processed, and that is said."""
    places: dict[str, Any] = {"engine": "spark", "spark": spark, "store": tmp_path / "s", "queues": tmp_path / "q"}
    with contextlib.ExitStack() as ended:
        running = ended.enter_context(
            contextlib.closing(Graph("g", [Stream(spark_graphs.plain, "in", "out")]).start(**places))
        )
        shutil.rmtree(tmp_path / "q" / "in")
        (tmp_path / "q" / "in").write_text("no folder")
        running.send("in", {"n": 1})
        with pytest.raises(ProcessorStopped, match=r"g\.sources\.feed stopped"):
            running.wait_idle(timeout=120)
        assert [error.processor for error in running.stopped if isinstance(error, ProcessorStopped)] == [
            "g.sources.feed"
        ]


GRAPH_FILE = """
from cues import Graph, Sink, Source, Stream
from spark_graphs import counted, numbers, outside, plain

graph = Graph("g", [Source("in", numbers), Stream(plain, "in", "out"), Stream(counted, "out", "counted", key="n")])
graph.add(Sink(outside, "counted"))
"""


@pytest.mark.slow
def test_the_command_line_says_what_becomes_of_each_processor(tmp_path: Path) -> None:
    file = tmp_path / "graph_of_files.py"
    file.write_text(GRAPH_FILE)
    runner = CliRunner()
    shown = runner.invoke(show, [str(file), "--engine", "spark", "--queues", str(tmp_path / "q")])
    assert shown.exit_code == 0, shown.output
    for processor, place in (
        ("in", "a feeder copies the queue into the directory"),
        ("plain", "on all executors"),
        ("counted", "by key; the state is in the directory"),
        ("outside", "one task a step"),
    ):
        (line,) = [line for line in shown.output.splitlines() if line.startswith(f"  {processor}: ")]
        assert place in line
    for command in (run_command, show):
        refused = runner.invoke(command, [str(file), "--queues", str(tmp_path / "q")]).exception
        assert isinstance(refused, Refused) and str(tmp_path / "q") in str(refused) and not (tmp_path / "q").exists()


@pytest.mark.parametrize("cluster", [False, True])
def test_a_frame_whose_worker_is_killed_stops_and_no_message_fails(
    cluster: bool, spark: SparkSession, tmp_path: Path
) -> None:
    """Spark failed, and not the plan: an error queue is for messages."""
    flag = str(tmp_path / "flag")

    def killed_once(frames: Any) -> Any:
        for frame in frames:
            if not os.path.exists(flag):
                open(flag, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            yield frame[["k"]]

    made = Graph("g", errors="errors", store=tmp_path / "store", durability="process")
    made.source("in")
    made.frame("in", "out", id="plan", fields="k bigint")(lambda rows: rows.mapInPandas(killed_once, "k bigint"))
    place: dict[str, Any] = {"queues": tmp_path / "queues"} if cluster else {}
    with pytest.raises(ProcessorStopped, match="Spark could not do"):  # noqa: SIM117
        with made.start(engine="spark", spark=spark, **place) as running:
            for n in range(10):
                running.send("in", {"k": n})
            running.wait_idle(120)
    with made.start(engine="spark", spark=spark, **place) as running:
        assert running.wait_idle(120)
        assert [message["k"] for message in running.messages("out")] == list(range(10))
        assert running.messages("errors") == []


def test_two_graphs_cannot_write_one_queue_of_a_directory(spark: SparkSession, tmp_path: Path) -> None:
    """The second is refused at its start, before it has written anything; the first continues."""
    made = {}
    for id in ("first", "second"):
        made[id] = Graph(id, store=tmp_path / id, durability="process")
        made[id].source(f"in-{id}")
        made[id].stream(f"in-{id}", "shared", id="copy")(spark_graphs.mended)
    with made["first"].start(engine="spark", spark=spark, queues=tmp_path / "queues") as running:
        running.send("in-first", {"n": 1})
        assert running.wait_idle(120)
        with pytest.raises(GraphError, match=r"'shared' in .* is written by the graph 'first', and 'second' writes"):
            made["second"].start(engine="spark", spark=spark, queues=tmp_path / "queues")
        running.send("in-first", {"n": 2})
        assert running.wait_idle(120)
        assert [message["n"] for message in running.messages("shared")] == [1, 2]


DAMAGES = {
    "log deleted": "out/_delta_log",
    "log put back": "out/_delta_log",
    "entry deleted": "out/_delta_log/*1.json",
    "file deleted": "out/**/*.parquet",
    "state deleted": "_cues/state/g.count/*.parquet",
    "records deleted": "_cues/steps/g.count",
    "input's log deleted": "in/_delta_log",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_is_refused_and_no_committed_file_is_swept(
    damage: str, spark: SparkSession, tmp_path: Path
) -> None:
    """A part that is gone or old, as after a careless copy. When it is back, the graph continues."""
    made = Graph("g", store=tmp_path / "store", durability="process")
    made.source("in")
    made.stream("in", "out", id="count", key="k")(spark_graphs.counted_by_key)
    queues = tmp_path / "queues"
    old = tmp_path / "old"

    def run(first: int, stop: int) -> list[Any]:
        with made.start(engine="spark", spark=spark, queues=queues) as running:
            for n in range(first, stop):
                running.send("in", {"n": n, "k": n % 3})
            assert running.wait_idle(120)
            return running.messages("out")

    run(0, 5)
    assert terminal.cues("check", queues).code == 0
    shutil.copytree(queues, old)
    run(5, 10)
    run(10, 15)
    whole = tmp_path / "whole"
    shutil.copytree(queues, whole)
    target = min(queues.glob(DAMAGES[damage]))
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    if damage == "log put back":
        shutil.copytree(old / "out" / "_delta_log", target)
    files = set(queues.rglob("*.parquet"))
    assert terminal.cues("check", queues).code == 1
    with pytest.raises(Diverged):
        run(15, 20)
    assert files - set(queues.rglob("*.parquet")) == set()
    shutil.rmtree(queues)
    shutil.copytree(whole, queues)
    assert sorted(run(15, 20), key=lambda m: m["n"]) == [{"n": n, "count": n // 3 + 1} for n in range(20)]


def test_status_of_a_directory_without_spark(spark: SparkSession, tmp_path: Path) -> None:
    made = Graph("g", store=tmp_path / "store", durability="process")
    made.source("in")
    made.stream("in", "out", id="count", key="k")(spark_graphs.counted_by_key)
    with made.start(engine="spark", spark=spark, queues=tmp_path / "queues") as running:
        for n in range(7):
            running.send("in", {"n": n, "k": n % 3})
        assert running.wait_idle(120)
    table = terminal.cues("status", tmp_path / "queues", "--table").out
    assert "2 queues in files, 14 messages" in table, table
    lines = terminal.cues("status", tmp_path / "queues").out.splitlines()
    rows = {row.get("processor", row["queue"]): row for row in map(json.loads, lines)}
    assert (rows["out"]["messages"], rows["out"]["last"]) == (7, 7)
    assert (rows["g.count"]["queue"], rows["g.count"]["position"], rows["g.count"]["lag"]) == ("in", 8, 0)
    assert rows["g.sources.feed"]["position"] == 8


def test_failures_of_an_embedded_run_are_not_copied_into_a_directory(spark: SparkSession, tmp_path: Path) -> None:
    """The streams begin again in the directory, so their messages fail there again; those of the source do not."""

    def numbers(position: int | None) -> Any:
        for n in range(position or 0, 10):
            yield n + 1, {"n": n} if n % 5 else {"n": object()}

    made = Graph("g", errors="errors", store=tmp_path / "store", durability="process")
    made.source("in")(numbers)
    made.stream("in", "out", id="refuses")(spark_graphs.refuses)
    with made.start() as running:
        running.wait_done()
        assert len(running.messages("errors")) == 10
    with made.start(engine="spark", spark=spark, queues=tmp_path / "queues") as running:
        running.wait_done()
        kinds = [record["err.proc/config"]["kind"] for record in running.messages("errors")]
    assert sorted(kinds) == ["source"] * 2 + ["stream"] * 8


def test_a_start_refuses_a_delayed_message_for_a_frame(spark: SparkSession, tmp_path: Path) -> None:
    """A stream of the same graph would hold it, and a frame cannot. Nothing is copied."""
    graph = Graph("g", errors="errors", durability="process")
    graph.source("in")
    graph.stream("in", "copy", id="copy")(lambda message: message)
    graph.frame("in", "rows", id="frame")(lambda rows: rows.select("value"))
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("in").appender().write({"n": 1})
        store.queue("in").appender().write({"n": 2}, delay="1h")
    with pytest.raises(Unsupported, match=r"Message 2 of the queue 'in' is not to be delivered before.*a frame reads"):
        graph.start(engine="spark", spark=spark, store=tmp_path / "store", queues=tmp_path / "queues")
    assert rows(tmp_path, "in") == []
