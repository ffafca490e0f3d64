"""Three graphs at once in one shared directory, and kills of everything that runs them.

    mixed     a fork, an error queue, keyed state, a sink that keeps positions
    tabled    functions of tables
    after     its source is a queue of the first graph

The slow set runs them in one session, kills workers and halts drivers. The long set gives each graph a driver of its
own on a cluster, and kills drivers, executors, workers of the cluster, and processes that call functions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cues
import cues.spark
from cues import Graph, Source, Stream
from cues.errors import ProcessorStopped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import seeds
import spark_graphs
import terminal
import test_spark_queues
from children import Child
from spark_cluster import Cluster, ancestors, command_of, until
from test_spark_queues import python_workers
from test_spark_queues_cluster import messages


def paced(place: Path) -> Callable[..., Any]:
    """A source of the numbers below the one in ``limit``, which grows; it ends when there is a file ``ended``."""

    def numbers(position: int | None, process: Any) -> Any:
        low = position or 0
        while True:
            ended = (place / "ended").exists()
            high = int((place / "limit").read_text())
            yield from ((n + 1, {"n": n}) for n in range(low, high))
            if ended:
                return
            low = high
            process.wait(0.05)

    return numbers


def mixed(place: Path) -> Graph:
    return test_spark_queues.mixed(Source("in", paced(place), batch_size=20))


def tabled(place: Path) -> Graph:
    widened = Stream(spark_graphs.widened, "rows", "wide", batch="arrow", batch_size=60)
    odd = Stream(spark_graphs.odd_rows, "wide", "odds", batch="arrow", batch_size=60)
    return Graph("tabled", [Source("rows", paced(place), batch_size=20), widened, odd], durability="process")


def after(place: Path) -> Graph:
    """Its source is a queue of the first graph."""
    even = cues.spark.Source("cues", {"path": f"{place / 'queues'}#even"})
    summed = Stream(spark_graphs.counted, "taken", "sums", key=spark_graphs.by_ten)
    queues = {"sums": cues.QueueOptions(partitions=2, key=spark_graphs.by_ten)}
    return Graph("after", [Source("taken", even), summed], durability="process", queues=queues)


THREE: dict[str, Callable[[Path], Graph]] = {"mixed": mixed, "tabled": tabled, "after": after}

# Runs one of the graphs until it is told to end. If Spark gives a task up, it starts the graph anew.
DRIVER = """
import sys, threading
from pathlib import Path
import cues.spark, test_spark_three_graphs
from cues.errors import ProcessorStopped

def read():
    sys.stdin.readline()
    told.set()

master, name, place = sys.argv[1], sys.argv[2], Path(sys.argv[3])
told, over = threading.Event(), False
threading.Thread(target=read, daemon=True).start()
conf = {"spark.cores.max": "1", "spark.executorEnv.CUES_TEST_NOTES": str(place / "notes.db")}
with cues.spark.session(master, conf=conf) as spark:
    while not over:
        made = test_spark_three_graphs.THREE[name](place)
        try:
            with made.start(engine="spark", spark=spark, store=place / name, queues=place / "queues") as running:
                while not told.wait(0.1):
                    running.wait_idle(0.1)
                over = running.wait_idle(300) if name == "after" else running.wait_done()
        except ProcessorStopped as error:
            print(error, file=sys.stderr)
"""


class Three:
    """The drivers of the graphs, and what else there is to kill on the cluster."""

    def __init__(self, cluster: Cluster, place: Path) -> None:
        self._cluster, self._place = cluster, place
        self._drivers: dict[str, Child] = {}
        self.kinds: dict[str, Callable[[random.Random], bool]] = {
            "drivers": self._driver,
            "executors": lambda chance: killed_one(chance, cluster.alive("CoarseGrainedExecutorBackend")),
            "workers with their executors": self._worker,
            "processes that call functions": lambda chance: killed_one(chance, self._forked()),
        }
        """Functions that kill one process of a kind. They return False if there is none, or it has already ended."""

    def __enter__(self) -> Three:
        """Start them, and wait until all have begun. The third one needs a queue of the first."""
        for name, queue in (("mixed", "even"), ("tabled", "odds"), ("after", "sums")):
            self._begin(name)
            until((self._place / "queues" / queue).exists, timeout_s=300)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._drivers.values():
            child.__exit__()

    def end(self, name: str) -> None:
        self._drivers[name].say()
        self._drivers[name].end(300)

    def _begin(self, name: str) -> None:
        environment = self._cluster.environment
        self._drivers[name] = Child(DRIVER, self._cluster.master, name, self._place, **environment)

    def _driver(self, chance: random.Random) -> bool:
        name = chance.choice([*THREE])
        self._drivers[name].__exit__()  # kill -9
        self._begin(name)
        return True

    def _worker(self, chance: random.Random) -> bool:
        chosen = chance.choice(self._cluster.alive("deploy.worker.Worker"))
        executors = [pid for pid in self._cluster.alive("CoarseGrainedExecutorBackend") if chosen in above(pid)]
        killed = [killed_one(chance, [pid]) for pid in (chosen, *executors)]
        self._cluster.fill()
        return killed[0]

    def _forked(self) -> list[int]:
        """The Python workers. The daemons that fork them have the same command line."""
        found = self._cluster.alive("pyspark.daemon")
        return [pid for pid in found if any("pyspark.daemon" in command_of(one) for one in above(pid)[1:])]


def killed_one(chance: random.Random, pids: list[int]) -> bool:
    """``kill -9`` of one of them; False if there is none, or it has ended meanwhile."""
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(chance.choice(pids), signal.SIGKILL)
        return True
    return False


def above(pid: int) -> list[int]:
    """The process, its parent, and so on; none if it has ended."""
    with contextlib.suppress(OSError):
        return list(ancestors(pid))
    return []


class Limit:
    """The number of messages that the sources give, in the file that they read."""

    def __init__(self, place: Path) -> None:
        self.count, self._place = 0, place

    def raised(self, by: int) -> None:
        self.count += by
        (self._place / "draft").write_text(str(self.count))
        (self._place / "draft").replace(self._place / "limit")

    def ended(self) -> None:
        """Give some more, and then no others."""
        self.raised(100)
        (self._place / "ended").touch()

    def taken(self) -> bool:
        """True if the third graph has read all that the first one writes. It does not know that nothing comes."""
        return len(messages(self._place, "taken")) == len(range(0, self.count, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_graphs_in_one_session_lose_and_double_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are killed at random moments, and at each of them one of the drivers is halted in a step."""
    monkeypatch.setitem(spark.sparkContext.environment, "CUES_TEST_NOTES", str(tmp_path / "notes.db"))
    chance, limit, kills = random.Random(seeds.new()), Limit(tmp_path), 0
    running: dict[str, Any] = {}

    def begin() -> None:
        for name, made in THREE.items():
            if name in running and running[name].stopped:  # a task that lost its worker is not repeated in local mode
                close(name)
            if name not in running:
                options: dict[str, Any] = {"store": tmp_path / name, "queues": tmp_path / "queues"}
                running[name] = made(tmp_path).start(engine="spark", spark=spark, **options)

    def close(name: str) -> None:
        with contextlib.suppress(ProcessorStopped):
            running.pop(name).close()

    def finished(name: str) -> bool:
        """Also where Spark itself stopped a graph once more: on a busy machine a worker may not start in time."""
        begin()
        with contextlib.suppress(ProcessorStopped):
            return bool(limit.taken() and running[name].wait_idle(1) if name == "after" else running[name].wait_done())
        return False

    limit.raised(100)
    try:
        while kills < 2:
            begin()
            limit.raised(chance.randrange(20, 200))
            time.sleep(chance.uniform(0, 0.5))
            if killed_one(chance, python_workers(spark)):
                kills += 1
                halted = chance.choice([*running])
                running[halted].halt()
                close(halted)
        limit.ended()
        for name in THREE:
            until(functools.partial(finished, name), timeout_s=240)
    finally:
        for name in [*running]:
            close(name)
    expect_exact(tmp_path, limit.count)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_three_graphs_on_a_cluster_lose_and_double_nothing(tmp_path: Path) -> None:
    """Kills of all kinds come at random moments, while messages come: 40 in sum."""
    chance, limit, kills = random.Random(seeds.new()), Limit(tmp_path), Counter[str]()
    limit.raised(100)
    with Cluster(workers=len(THREE)) as cluster, Three(cluster, tmp_path) as three:
        while kills.total() < 40:
            limit.raised(chance.randrange(20, 200))
            time.sleep(chance.uniform(0, 3))
            kind = chance.choice([*three.kinds])
            kills[kind] += three.kinds[kind](chance)
        limit.ended()
        three.end("mixed")
        three.end("tabled")
        until(limit.taken, timeout_s=300)
        three.end("after")
    print(f"{limit.count} messages; killed: {dict(kills)}")
    expect_exact(tmp_path, limit.count)


def expect_exact(place: Path, count: int) -> None:
    """Compare with the results of one call after another, computed here."""
    test_spark_queues.expect_exact(place, count)
    assert [m["n"] for m in messages(place, "rows")] == list(range(count))
    assert [(m["n"], m["index"]) for m in messages(place, "wide")] == [(n, n + 1) for n in range(count)]
    assert [(m["n"], m["at"]) for m in messages(place, "odds")] == [(n, n + 1) for n in range(1, count, 2)]
    assert [m["n"] for m in messages(place, "taken")] == list(range(0, count, 2))
    sums = [m for held in test_spark_queues.by_partition(place, "sums").values() for m in held]
    for key in range(0, 10, 2):
        of_key = [(m["n"], m["count"]) for m in sums if m["n"] % 10 == key]
        assert of_key == [(n, at + 1) for at, n in enumerate(range(key, count, 10))]
    assert len(sums) == len(range(0, count, 2))
    checked = terminal.cues("check", place / "queues")
    assert json.loads(checked.out)["problems"] == 0, checked
