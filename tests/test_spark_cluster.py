"""A graph on a real standalone cluster: a master, two workers, executors that are processes of their own.

What local mode cannot show: functions travel, tasks are repeated elsewhere, and drivers meet at one store.
Drivers are processes of their own too, since a process has one SparkContext.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cues
from cues import testing

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import spark_graphs
from children import Child
from spark_cluster import Cluster
from test_spark_engine import IGNORED, left, run, template, without_times

if TYPE_CHECKING:
    pass

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
RUN_TIMEOUT_S = 180
"""A driver on a machine that is busy with other things."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as found:
        yield found
    assert found.processes() == []


# Runs graphs over the stores that it is told, on a session that it keeps.
DRIVER = """
import json, sys
import cues.spark, spark_graphs
from cues import Stream

conf = {"spark.cores.max": sys.argv[2]}
with cues.spark.session(sys.argv[1], conf=conf) as spark:
    print("ready")
    for line in sys.stdin:
        told = json.loads(line)
        made = spark_graphs.graph(Stream(spark_graphs.held, "in", "out", opts=told["folder"]))()
        try:
            made.run(engine="spark", spark=spark, store=told["folder"] + "/store", take_over=told["take_over"])
            print("done")
        except cues.errors.CuesError as error:
            print(type(error).__name__, error)
"""


class Driver:
    """A process with a session on the cluster."""

    def __init__(self, cluster: Cluster, cores: int) -> None:
        self.child = Child(DRIVER, cluster.master, cores, **cluster.environment)
        assert self.child.line() == "ready"

    def begin(self, folder: Path, take_over: bool = False) -> None:
        """Run the graph of :func:`spark_graphs.held` over ``folder/store``."""
        self.child.say(json.dumps({"folder": str(folder), "take_over": take_over}))

    def run(self, folder: Path, take_over: bool = False) -> str:
        """Run it to its end; returns how it ended."""
        self.begin(folder, take_over)
        return self.child.line()


@contextlib.contextmanager
def driver_on(cluster: Cluster, cores: int) -> Iterator[Driver]:
    driver = Driver(cluster, cores)
    with driver.child:
        yield driver
        driver.child.end()


def expect_exact(folder: Path) -> None:
    """Every message once and in order, and the store intact."""
    with cues.open(folder / "store") as store:
        assert [m["n"] for m in testing.messages(store, "out")] == list(range(spark_graphs.COUNT))
        assert store.check() == []
        assert testing.check_attempts(store) == []


def repeated(folder: Path) -> list[int]:
    """What the function was called for more than once; all must have been called."""
    calls = Counter(map(int, (folder / "calls").read_text().split()))
    assert sorted(calls) == list(range(spark_graphs.COUNT))
    return sorted(n for n, count in calls.items() if count > 1)


# --- the same, on a cluster -----------------------------------------------------------------------

TWICE = """
import os, sys
import spark_graphs
from cues import testing

master, clean, killed = sys.argv[1:]
made = spark_graphs.GRAPHS["several"]()
with made.start(engine="spark", master=master, store=clean) as running:
    running.wait_done()
with testing.crash("commit.inside", 4), made.start(engine="spark", master=master, store=killed) as running:
    running.wait_done()
"""
AGAIN = """
import sys
import spark_graphs

spark_graphs.GRAPHS["several"]().run(engine="spark", master=sys.argv[1], store=sys.argv[2])
"""


def test_a_cluster_leaves_what_the_embedded_engine_leaves_and_so_does_a_killed_driver(
    cluster: Cluster, tmp_path: Path
) -> None:
    made = spark_graphs.GRAPHS["several"]
    template(tmp_path / "template", made())
    for name in ("embedded", "clean", "killed"):
        shutil.copytree(tmp_path / "template", tmp_path / name, ignore=IGNORED)
    run(made(), tmp_path / "embedded")
    with Child(TWICE, cluster.master, tmp_path / "clean", tmp_path / "killed", **cluster.environment) as child:
        assert child.returncode() == -signal.SIGKILL, child.errors()
    expected = left(tmp_path / "embedded")
    found = left(tmp_path / "clean")
    assert without_times(found.pop("queues")) == without_times(expected["queues"])
    assert found == {key: value for key, value in expected.items() if key != "queues"}
    with cues.open(tmp_path / "killed") as store:
        assert len(testing.messages(store, "out")) < len(expected["queues"]["out"])
    with Child(AGAIN, cluster.master, tmp_path / "killed", **cluster.environment) as child:
        child.end()
    assert without_times(left(tmp_path / "killed")["queues"]) == without_times(expected["queues"])
