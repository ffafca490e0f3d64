"""A graph on Spark leaves what it leaves on the embedded engine: messages, hashes, metadata, state, positions."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

import cues
import cues.spark
from cues import Graph, Source, Stream, testing
from cues.base import events
from cues.engine.assembly import assemble
from cues.errors import GraphError, InvalidArgument, ProcessorStopped, Unsupported
from cues.queues.base import views_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import msgspec
import spark_graphs
import test_flights
from small import has_ended
from spark_cluster import until
from spark_graphs import GRAPHS, STORE_GRAPHS

from cues.spark.cluster.step import Stage
from cues.spark.place import Site
from cues.spark.remote import require_sight
from cues.spark.shipping import ship
from cues.spark.stretches import StretchStepper

TESTS = Path(__file__).parent
IGNORED = shutil.ignore_patterns("bells", "lock.mdb", "wake", "open", "lease-*")


def template(path: Path, made: Graph) -> None:
    """A store with the graph's queues and nothing on them, to be copied: copies have the same identities, so hashes."""
    with cues.open(path, durability="process", map_size=64 << 20) as store:
        assemble(made, store).close()


def run(made: Graph, path: Path, **options: Any) -> None:
    running = made.start(store=path, **options)
    try:
        running.wait_done()
    except ProcessorStopped:
        # The source may be slower than the processor that stops: both engines are to leave all of its messages.
        if not options.get("backfill"):  # in which no source runs
            sources = {node.id for node in running.engine.units if not node.inputs}
            until(lambda: all(unit.state == "ended" for unit in running.engine.standings() if unit.id in sources))
        running.drain(60)
    finally:
        running.close()


def left(path: Path) -> dict[str, Any]:
    """Everything durable, with the hash that each message carries; tracebacks name lines that differ."""
    with cues.open(path) as store:
        found = testing.contents(store)
        hashes: dict[str, list[Any]] = {}
        for queue, view in [
            (view.core.log.id, view) for name in store.queues() for view in views_of(store.queue(name))
        ]:
            tailer = view.tailer()
            hashes[queue] = []
            for message in tailer:
                envelope = tailer.envelope
                assert envelope is not None
                hashes[queue].append((envelope.index, envelope.metadata.get("q/queue", {}).keys()))
                for cause in message.get("err/cause", ()):
                    cause["trace"] = cause["trace"].splitlines()[-1]
        for message in found["queues"].get("errors", ()):
            for cause in message["err/cause"]:
                cause["trace"] = cause["trace"].splitlines()[-1]
        assert store.check() == []
        assert testing.check_attempts(store) == []
    return {**found, "hashes": hashes}


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key != "q/time"}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def assert_same(name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare what two engines left of one of ``GRAPHS``, in all that does not depend on the place of its calls."""
    if name == "alts":  # which input is served first is free; what comes from each is not
        for one in (expected, found):
            one["queues"]["tagged"].sort(key=lambda m: (m["from"], m["n"]))
    if name.startswith("batch function"):  # a step takes what is there when it begins
        for one in (expected, found):
            took = [m["count"] for m in one["queues"].pop("out")]
            failed = [m["err.proc/messages"]["in"] for m in one["queues"].pop("errors", ())]
            assert sum(took) + sum(map(len, failed)) == spark_graphs.COUNT
            assert [m["n"] for some in failed for m in some] in ([], list(range(spark_graphs.COUNT)))
            one["hashes"] = {queue: one["hashes"][queue] for queue in one["queues"]}
    assert without_times(found["queues"]) == without_times(expected["queues"])
    assert found["hashes"] == expected["hashes"] or name == "alts"
    for what in ("state", "positions", "sources"):
        assert found[what] == expected[what]


IN_STORE = {**GRAPHS, **STORE_GRAPHS}


@pytest.mark.parametrize("shared", [False, True], ids=["store", "directory"])
def test_many_batches_and_the_parts_of_those_that_fail_are_one_job(
    shared: bool, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor that calls the batches calls their parts too, because each job costs more than most calls."""
    jobs: list[int] = []

    def counting(owner: Any, name: str, count: Callable[[Any], int]) -> None:
        real = getattr(owner, name)

        def call(self: Any, taking: Any) -> Any:
            jobs.append(count(taking))
            return real(self, taking)

        monkeypatch.setattr(owner, name, call)

    counting(StretchStepper, "cut", lambda taken: taken.count)
    counting(Stage, "run", lambda taking: sum(high - low for low, high in taking.ranges.values()))
    batches = Stream(spark_graphs.poisoned, "in", "out", batch=True, batch_size=10, step_s=None)
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(100)])
    made = Graph("g", [batches], errors="errors", durability="process")
    where = {"queues": tmp_path / "queues"} if shared else {}
    with made.start(store=tmp_path / "store", engine="spark", spark=spark, **where) as running:
        assert running.wait_idle(timeout=240)
        assert [m["n"] for m in running.messages("out")] == [n for n in range(100) if n % 50 != 7]
        assert [m["err.proc/messages"]["in"] for m in running.messages("errors")] == [[{"n": 7}], [{"n": 57}]]
    assert jobs == [100]


def sums(frame: Any, process: Any) -> Any:
    from pyspark.sql import functions as F

    found = frame.groupBy((frame.n % 3).alias("rest")).agg(F.sum("n").alias("total"), F.max("index").alias("last"))
    return found.withColumn("hash", F.lit(process.delivery_hash)).orderBy("rest")


@pytest.mark.compiled
def test_a_stage_from_dataframe_to_dataframe(spark: SparkSession, tmp_path: Path) -> None:
    """Its rows are messages of the step, under the step's hash; it fails as a whole, and is refused elsewhere."""
    made = Graph("g", [Source("in", spark_graphs.numbers, batch_size=500)], errors="errors", durability="process")
    made.frame("in", "out", fields="n long", id="sums", output_mode="step")(sums)
    made.frame("out", "failed", id="fails")(lambda frame: frame.select("no_such_column"))
    run(made, tmp_path / "store", engine="spark", spark=spark)
    with cues.open(tmp_path / "store") as store:
        found = testing.messages(store, "out")
        everything = sum(message["total"] for message in found)
        assert everything == sum(range(spark_graphs.COUNT))
        assert max(message["last"] for message in found) == spark_graphs.COUNT
        tailer = store.queue("out").tailer()
        for message in tailer:
            assert tailer.envelope is not None and tailer.envelope.hash == message["hash"]
        errors = testing.messages(store, "errors")
        assert sum(len(m["err.proc/messages"]["out"]) for m in errors) == len(found)
        assert "no_such_column" in errors[0]["err/cause"][0]["message"]
        assert testing.check_attempts(store) == []
    with pytest.raises(GraphError, match=r"g\.sums is written for Spark"):
        made.start(store=tmp_path / "store")


def test_an_invalid_frame_is_refused_at_its_declaration() -> None:
    made = Graph("g")
    for options in ({"key": "n"}, {"where": len}, {"side_effects": True}, {"strategy": "at-most-once"}):
        with pytest.raises(GraphError, match="The frame 'f'"):
            made.frame("a", "b", id="f", **options)(lambda frame: frame)
    with pytest.raises(GraphError, match="one queue as input"):
        made.frame(cues.AnyOf("a", "c"), "b", id="f")(lambda a: a)  # type: ignore[arg-type]


def test_the_engines_take_turns_on_one_store(spark: SparkSession, tmp_path: Path) -> None:
    made = Graph("g", [Stream(spark_graphs.counted, "in", "out", key="n")], durability="process")
    for round in range(4):
        options: dict[str, Any] = {"engine": "spark", "spark": spark} if round % 2 else {}
        with made.start(store=tmp_path / "store", **options) as running:
            for n in range(10):
                running.send("in", {"n": n})
            running.wait_idle(timeout=60)
    with cues.open(tmp_path / "store") as store:
        assert testing.messages(store, "out") == [{"n": n, "count": r} for r in range(1, 5) for n in range(10)]


def test_each_processor_has_a_pool_of_the_fair_scheduler(spark: SparkSession, tmp_path: Path) -> None:
    """Jobs of one processor do not hold up those of another, if both have tasks that wait."""
    run(GRAPHS["fork"](), tmp_path / "store", engine="spark", spark=spark)
    context: Any = spark.sparkContext._jsc
    pools = context.sc().getAllPools()
    names = {pools.apply(number).name() for number in range(pools.size())}
    assert {f"g.{spark_graphs.parity.__name__}"} <= names, names


def test_a_session_of_the_users_continues(spark: SparkSession, tmp_path: Path) -> None:
    run(GRAPHS["plain"](), tmp_path / "store", engine="spark", spark=spark)
    assert spark.range(3).count() == 3


def test_sparks_own_page_is_on_the_loopback_interface_and_its_address_is_printed_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    told: list[events.Event] = []
    run(GRAPHS["plain"](), tmp_path / "store", engine="spark", spark=spark, listeners=(told.append,))
    (placed,) = [event for event in told if isinstance(event, events.Placed)]
    assert placed.url is not None and placed.url.startswith("http://127.0.0.1:") and placed.url in placed.text
    with urlopen(f"{placed.url}/jobs/", timeout=30) as page:
        assert b"plain" in page.read()


DYING = {
    "messages": Stream(spark_graphs.dies_once, "in", "out"),
    "tables": Stream(spark_graphs.dies_once_in_a_table, "in", "out", batch="arrow", batch_size=60),
}


@pytest.mark.parametrize("kind", DYING)
def test_a_worker_that_is_killed_stops_the_processor_and_the_next_start_is_exact(
    kind: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``local[n]`` makes one attempt at a task; on a cluster Spark makes several, and nothing stops."""
    monkeypatch.setitem(spark.sparkContext.environment, "CUES_TEST_FLAG", str(tmp_path / "flag"))
    made = spark_graphs.graph(DYING[kind])()
    with (
        pytest.raises(ProcessorStopped, match=r"Python worker exited unexpectedly \(crashed\)\. Try: "),
        made.start(store=tmp_path / "store", engine="spark", spark=spark) as running,
    ):
        running.wait_done()
    assert (tmp_path / "flag").exists()
    run(made, tmp_path / "store", engine="spark", spark=spark)
    with cues.open(tmp_path / "store") as store:
        assert [m["n"] for m in testing.messages(store, "out")] == list(range(spark_graphs.COUNT))


def leaves(message: dict[str, Any]) -> None:
    raise SystemExit("enough\nof this")


def test_a_job_that_fails_is_reported_in_a_line_of_python(spark: SparkSession, tmp_path: Path) -> None:
    made = spark_graphs.graph(Stream(leaves, "in", "out"))()
    with pytest.raises(ProcessorStopped) as caught, made.start(engine="spark", spark=spark, store=tmp_path) as running:
        running.wait_done()
    told = r"g\.leaves stopped: Spark could not do its step over g\.leaves\.\w+ \[\d+, \d+\): SystemExit: enough\."
    assert re.fullmatch(told, caught.value.message)


def test_a_step_that_does_not_end_is_given_up_when_the_graph_is_closed(spark: SparkSession, tmp_path: Path) -> None:
    made = spark_graphs.graph(Stream(spark_graphs.held, "in", "out", opts=str(tmp_path)))()
    running = made.start(engine="spark", spark=spark, store=tmp_path / "store")
    until(lambda: (tmp_path / "held").exists())
    running.close(timeout=0.1)
    for worker in running.engine.workers:
        worker.thread.join(30)
        assert not worker.thread.is_alive() and worker.stopped is None
    pid = int((tmp_path / "held").read_text())
    until(lambda: has_ended(pid))


def test_a_store_that_executors_cannot_see_is_refused_with_host_and_path(spark: SparkSession, tmp_path: Path) -> None:
    context, path = spark.sparkContext, tmp_path / "store"
    with cues.open(path) as store:
        require_sight(context, [store])
        host = re.escape(Site.of(store).host)
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(Unsupported, match=f"read the driver's store {path} on {host}: No such file or directory"):
            require_sight(context, [store])
        cues.open(path).close()
        with pytest.raises(Unsupported, match=f"driver's store {path} on {host}: under this path it finds another"):
            require_sight(context, [store])
        moved = dataclasses.replace(Site.of(store), machine="another")
        with pytest.raises(Unsupported, match="it is on another machine"):
            moved.open()


def test_a_container_with_process_ids_of_its_own_is_another_machine(tmp_path: Path) -> None:
    """LMDB knows its readers by process ids: two that have the same one would give each other's pages away."""
    apart = ["unshare", "-rpf"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("this user may not unshare")
    with cues.open(tmp_path) as store:
        site = pickle.dumps(Site.of(store)).hex()
        code = f"import pickle; pickle.loads(bytes.fromhex({site!r})).open()"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
        found = subprocess.run([*apart, sys.executable, "-c", code], capture_output=True, text=True)
    assert "or in a container with process ids of its own" in found.stderr


def test_an_engine_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    made = Graph("g", [Stream(lambda m: m, "in", "out", id="same")])
    with pytest.raises(InvalidArgument, match="no engine 'flink'"):
        made.start(store=tmp_path / "store", engine="flink")


def test_what_cannot_travel_to_an_executor_is_named(spark: SparkSession, tmp_path: Path) -> None:
    lock = threading.Lock()
    made = Graph("g", [Source("in"), Stream(lambda m: {"n": lock.locked()}, "in", "out", id="reads")])
    with pytest.raises(GraphError, match=r"The function of g\.reads cannot be sent"):
        made.start(store=tmp_path / "store", engine="spark", spark=spark)
    assert not (tmp_path / "store").exists()
    with pytest.raises(GraphError, match=r"The function of g\.reads cannot be sent"):
        made.start(store=tmp_path / "store", engine="spark", spark=spark, queues=tmp_path / "queues")
    assert not (tmp_path / "store").exists()
    assert not (tmp_path / "queues").exists()


class Message(msgspec.Struct):
    n: Number


Number = int


def typed(message: Message) -> Message:
    return message


def test_a_schema_that_an_executor_cannot_resolve_is_refused_by_name(spark: SparkSession, tmp_path: Path) -> None:
    """msgspec resolves annotations that are text by the module of the class, and no executor has this module."""
    made = Graph("g", [Source("in"), Stream(typed, "in", "out", id="reads")])
    for options in ({}, {"backfill": True}, {"queues": tmp_path / "queues"}):
        with pytest.raises(GraphError, match=r"schema of g\.reads cannot be loaded .* 'Number' is not defined\. T"):
            made.start(store=tmp_path / "store", engine="spark", spark=spark, **options)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def unasked(spark: SparkSession, tmp_path: Path) -> Iterator[SparkSession]:
    """The session with the workers of another Python, which nobody has asked yet."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\ncd /\nexec {sys.executable} -S "$@"\n')  # -S: without installed packages
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.modules["cues.spark.session"], "_asked", weakref.WeakSet())
        patched.setattr(spark.sparkContext, "environment", {})
        patched.setattr(spark.sparkContext, "pythonExec", str(program))
        yield spark
    cues.spark.register(spark)  # a data source keeps the Python that it was registered with


def test_workers_without_cues_are_refused_by_name(unasked: SparkSession, tmp_path: Path) -> None:
    graph = GRAPHS["plain"]()
    for call in (
        lambda: cues.spark.register(unasked),
        lambda: graph.start(store=tmp_path / "store", engine="spark", spark=unasked),
        lambda: graph.start(store=tmp_path / "store", engine="spark", spark=unasked, queues=tmp_path / "queues"),
    ):
        with pytest.raises(
            Unsupported, match=r"Python of the workers of .* cannot import Cues: .* Try: set PYSPARK_PYTHON="
        ):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


def test_workers_of_another_version_of_python_are_refused_by_name(unasked: SparkSession) -> None:
    """The changes end before the fixture of the session ends, which registers the data source again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unasked.sparkContext, "pythonExec", sys.executable)
        patch.setattr(unasked.sparkContext, "pythonVer", "3.9")
        with pytest.raises(Unsupported, match=r"different version.* Try: set PYSPARK_PYTHON="):
            cues.spark.register(unasked)
        patch.setattr(unasked.sparkContext, "pythonVer", ".".join(map(str, sys.version_info[:2])))
        cues.spark.register(unasked)


def test_the_environment_of_the_workers_is_replaced_and_not_changed(spark: SparkSession) -> None:
    """Another thread, which starts a graph on the same session, may be reading it."""
    made = GRAPHS["plain"]()
    before = spark.sparkContext.environment
    before.pop("PYTHONPATH", None)
    given = dict(before)
    ship(spark, made, made.plan())
    assert before == given
    assert str(Path.cwd()) in spark.sparkContext.environment["PYTHONPATH"].split(os.pathsep)


def test_january_on_spark_equals_an_independent_computation(spark: SparkSession, tmp_path: Path) -> None:
    with test_flights.example(tmp_path) as flights:
        run(flights.graph, tmp_path / "store", engine="spark", spark=spark)
    results = test_flights.results_of(tmp_path, testing.Report())
    test_flights.expect(results, test_flights.expected_flights(test_flights.DATA))


DRIVER = """
import sys
import spark_graphs
made = spark_graphs.GRAPHS[sys.argv[2]]()
with made.start(store=sys.argv[1], engine="spark", master="local[2]") as running:
    running.wait_done()
"""


FAULTS = [
    ("tables that are halved", "commit.inside:3"),
    ("several", "commit.before:2"),
    ("error queue", "commit.inside:3"),
    ("all filtered out", "commit.after:3"),
]
"""Functions of tables, one that emits many, fails on some, filters all out: before, in and after the commit."""
MORE_FAULTS = [
    (name, point)
    for name in ("several", "error queue", "all filtered out", "join", "fork")
    for point in ("commit.before:2", "commit.inside:3", "commit.after:3")
    if (name, point) not in FAULTS
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "point"), [*FAULTS, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE_FAULTS)]
)
def test_a_killed_driver_has_lost_and_doubled_nothing(name: str, point: str, tmp_path: Path) -> None:
    made = GRAPHS[name]
    template(tmp_path / "store", made())
    shutil.copytree(tmp_path / "store", tmp_path / "expected", ignore=IGNORED)
    run(made(), tmp_path / "expected")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "store"), name],
        cwd=TESTS,
        env={**os.environ, "CUES_FAULT": point},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    run(made(), tmp_path / "store")
    expected, found = left(tmp_path / "expected"), left(tmp_path / "store")
    assert without_times(found["queues"]) == without_times(expected["queues"])
    assert found["positions"] == expected["positions"]
