"""Queues on a shared filesystem, on a real standalone cluster: executors that are processes of their own read and
write them; a driver, a worker and its executor are killed with ``kill -9`` while they do."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cues import testing

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import spark_graphs
import test_flights
from children import Child
from spark_cluster import Cluster, until
from test_spark_cluster import worker_daemon_with_its_executor

from cues.spark.cluster import inspection


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as found:
        yield found
    assert found.processes() == []


# Runs the flights of January, then a graph that is held in the middle of a part, in each folder that it is told.
DRIVER = """
import sys
from pathlib import Path
import cues.spark, spark_graphs, test_flights
from cues import Sink, Stream

master, place = sys.argv[1], Path(sys.argv[2])
with cues.spark.session(master) as spark:
    with test_flights.example(place) as flights:
        flights.graph.directory = test_flights.EXAMPLES
        flights.graph.run(engine="spark", spark=spark, store=place / "store", queues=place / "queues")
    print("flights", flush=True)
    for line in sys.stdin:
        folder = Path(line.strip())
        if folder.name == "paid":
            last = Sink(spark_graphs.pays, "in", opts=str(folder), strategy="at-most-once", batch_size=100)
        else:
            last = Stream(spark_graphs.held, "in", "out", opts=str(folder))
        made = spark_graphs.graph(last)()
        made.run(engine="spark", spark=spark, store=folder / "store", queues=folder / "queues")
        print("done", flush=True)
"""


def messages(place: Path, queue: str) -> list[dict[str, object]]:
    """The messages of a queue, by its log."""
    reader = inspection.QueueReader(place / "queues", queue)
    found = list(reader.read(reader.last(None)))
    assert [one.index for one in found] == list(range(1, len(found) + 1))
    return [one.message for one in found]


@pytest.mark.timeout(600)
def test_january_and_kills_on_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """The driver dies after a commit that is in no log yet; the next one finishes; then the process of a part dies."""
    environment = cluster.environment
    with Child(DRIVER, cluster.master, tmp_path, CUES_FAULT="spark.recorded:6", **environment) as child:
        child.process.wait(timeout=240)
        assert child.returncode(240) == -signal.SIGKILL
    with Child(DRIVER, cluster.master, tmp_path, **environment) as child:
        assert child.line() == "flights"
        expect_january(tmp_path)
        folder = tmp_path / "held"
        folder.mkdir()
        child.say(str(folder))
        until((folder / "held").exists, timeout_s=120)
        for pid in worker_daemon_with_its_executor(int((folder / "held").read_text())):
            with contextlib.suppress(ProcessLookupError):  # an executor ends itself when its worker daemon is gone
                os.kill(pid, signal.SIGKILL)
        assert child.line() == "done"
        assert [m["n"] for m in messages(folder, "out")] == list(range(spark_graphs.COUNT))
        calls = Counter(map(int, (folder / "calls").read_text().split()))
        assert calls[250] > 1 and len(calls) == spark_graphs.COUNT
        folder = tmp_path / "paid"  # at-most-once with state, and the executor dies in the third step
        folder.mkdir()
        child.say(str(folder))
        assert child.line() == "done"
        paid = list(map(int, (folder / "calls").read_text().split()))
        assert (folder / "killed").exists() and paid == sorted(set(paid)) and paid[-1] == spark_graphs.COUNT - 1
        child.end()


def expect_january(place: Path) -> None:
    with test_flights.example(place) as flights:
        queues = {queue: messages(place, queue) for queue in flights.graph.plan().queues}
    page = next(place.glob("report*.html")).read_text()
    with contextlib.closing(sqlite3.connect(next(place.glob("*.db")))) as db:
        inserted = db.execute("select * from flights").fetchall()
        rejected = db.execute("select at, problem from rejected").fetchall()
    results = test_flights.Results(queues, inserted, rejected, page, testing.Report())
    test_flights.expect(results, test_flights.expected_flights(test_flights.DATA))
