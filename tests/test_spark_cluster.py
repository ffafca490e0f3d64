"""A graph on a real standalone cluster: a master, two workers, executors that are processes of their own.

What local mode cannot show: functions travel, tasks are repeated elsewhere, and drivers meet at one store.
Drivers are processes of their own too, since a process has one SparkContext.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cues
from cues import testing

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import pyspark
import spark_graphs
from children import Child
from spark_cluster import Cluster, ancestors, command_of, until
from test_spark_engine import IGNORED, left, run, template, without_times

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
        self._ready = False

    def begin(self, folder: Path, take_over: bool = False) -> None:
        """Run the graph of :func:`spark_graphs.held` over ``folder/store``."""
        if not self._ready:
            assert self.child.line() == "ready"
            self._ready = True
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
    """The messages for which the function was called more than once. It must be called for every message."""
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
        assert child.returncode(240) == -signal.SIGKILL, child.errors()
    expected = left(tmp_path / "embedded")
    found = left(tmp_path / "clean")
    assert without_times(found.pop("queues")) == without_times(expected["queues"])
    assert found == {key: value for key, value in expected.items() if key != "queues"}
    with cues.open(tmp_path / "killed") as store:
        assert len(testing.messages(store, "out")) < len(expected["queues"]["out"])
    with Child(AGAIN, cluster.master, tmp_path / "killed", **cluster.environment) as child:
        child.end(240)
    assert without_times(left(tmp_path / "killed")["queues"]) == without_times(expected["queues"])


# --- how a user starts it -------------------------------------------------------------------------

HELPER = """
def doubled(n):
    return n * 2
"""
GRAPH_FILE = """
from cues import Graph, Source, Stream
from {module} import doubled

def numbers(position):
    for n in range(position or 0, 100):
        yield n + 1, {{"n": n}}

def double(message):
    return {{"n": doubled(message["n"])}}

graph = Graph("g", [Source("in", numbers), Stream(double, "in", "out")], store="store", durability="process")

if __name__ == "__main__":
    graph.run(engine="spark")
"""


def user_folder(folder: Path, helper: Path) -> None:
    """A graph file, and the module that its functions import."""
    folder.mkdir()
    (folder / "graph.py").write_text(GRAPH_FILE.format(module=helper.stem))
    helper.parent.mkdir(exist_ok=True)
    helper.write_text(HELPER)


def started(cluster: Cluster, command: list[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **cluster.environment, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def expect_doubled(path: Path) -> None:
    with cues.open(path, readonly=True) as store:
        assert [m["n"] for m in testing.messages(store, "out")] == [n * 2 for n in range(100)]


def test_cues_run_finds_a_module_beside_the_graph_file(cluster: Cluster, tmp_path: Path) -> None:
    user_folder(tmp_path / "project", tmp_path / "project" / "helper_beside.py")
    file = tmp_path / "project" / "graph.py"
    command = [BIN / "cues", "run", file, "--engine", "spark", "--master", cluster.master, "--json"]
    done = started(cluster, command, tmp_path)
    assert json.loads(done.stdout)["outcome"] == "done"
    assert "runs on Spark" in done.stderr and "ERROR" not in done.stderr
    expect_doubled(tmp_path / "store")


def test_spark_submit_runs_a_graph_file_with_a_module_that_it_ships(cluster: Cluster, tmp_path: Path) -> None:
    user_folder(tmp_path / "project", tmp_path / "shared" / "helper_shipped.py")
    command = [
        Path(pyspark.__file__).parent / "bin" / "spark-submit",
        "--master",
        cluster.master,
        "--py-files",
        tmp_path / "shared" / "helper_shipped.py",
    ]
    started(cluster, [*command, tmp_path / "project" / "graph.py"], tmp_path)
    expect_doubled(tmp_path / "store")


# --- two drivers ----------------------------------------------------------------------------------


def test_a_second_driver_is_refused_and_a_first_that_was_taken_over_is_fenced(cluster: Cluster, tmp_path: Path) -> None:
    """The first is stopped in a step, taken over, and continued; by then its executors have done the step."""
    with driver_on(cluster, 1) as first, driver_on(cluster, 1) as second:
        first.begin(tmp_path)
        until(lambda: (tmp_path / "held").exists())
        assert second.run(tmp_path).startswith("AlreadyRunning g.")
        first.child.signal(signal.SIGSTOP)
        for lease in (tmp_path / "store").glob("lease-*"):
            lease.write_bytes(bytes(8))  # it has run out
        assert second.run(tmp_path, take_over=True) == "done"
        expect_exact(tmp_path)
        (tmp_path / "go").touch()
        first.child.signal(signal.SIGCONT)
        assert first.child.line().startswith("Fenced g.")
    expect_exact(tmp_path)
    assert 250 in repeated(tmp_path)


# --- what is said ---------------------------------------------------------------------------------

STARTS = """
import sys
import cues.spark, spark_graphs

sys.modules["cues.spark.session"].EXECUTORS_LATE_S = 0.5
try:
    spark_graphs.GRAPHS["plain"]().start(
        engine="spark", master=sys.argv[1], store=sys.argv[2], listeners=[lambda event: print(event.text)]
    )
except cues.errors.Unsupported as error:
    print(error)
"""


@pytest.mark.long
def test_executors_that_do_not_see_the_store_are_refused_at_the_start(cluster: Cluster, tmp_path: Path) -> None:
    """The driver sees a disk under this path that no other process sees, as in a container."""
    hide = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', tmp_path]
    if subprocess.run([*hide, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    done = subprocess.run(
        [*hide, sys.executable, "-c", STARTS, cluster.master, tmp_path / "store"],
        cwd=Path(__file__).parent,
        env={**os.environ, **cluster.environment},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert f"cannot read the driver's store {tmp_path}/store on " in done.stdout.splitlines()[-1], done.stderr
    assert "No such file or directory" in done.stdout


@pytest.mark.long
def test_a_wait_for_executors_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    environment = {**cluster.environment, "SPARK_EXECUTOR_MEMORY": "2g"}
    with Child(STARTS, cluster.master, tmp_path / "store", **environment) as child:
        until(lambda: "gives no executors yet" in child.line())


@pytest.mark.long
def test_a_master_that_does_not_answer_is_reported_in_a_sentence(tmp_path: Path) -> None:
    with Child(STARTS, "spark://127.0.0.1:1", tmp_path / "store") as child:
        assert child.line() == (
            "No master of Spark answers at spark://127.0.0.1:1 ([Errno 111] Connection refused). Try: check that it"
            " runs, the address (its log and its web page show it), and the port, mostly 7077."
        )


# --- kill -9 --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(cluster: Cluster) -> Iterator[Driver]:
    """One for the tests from here on: it keeps both workers' cores, so that no other driver gets executors."""
    with driver_on(cluster, 2) as found:
        yield found


def parent_of(worker: int, command: str) -> int:
    """The process above a Python worker whose command line has ``command``."""
    return next(pid for pid in ancestors(worker) if command in command_of(pid))


def python_worker(worker: int) -> list[int]:
    return [worker]


def executor(worker: int) -> list[int]:
    return [parent_of(worker, "CoarseGrainedExecutorBackend")]


def worker_daemon_with_its_executor(worker: int) -> list[int]:
    return [parent_of(worker, "deploy.worker.Worker"), *executor(worker)]


@pytest.mark.parametrize("victims", [python_worker, executor, worker_daemon_with_its_executor])
def test_spark_repeats_what_a_killed_process_was_doing(
    victims: Callable[[int], list[int]], cluster: Cluster, driver: Driver, tmp_path: Path
) -> None:
    """In the middle of a part: some of it has been called, none of it is there; the run ends by itself."""
    driver.begin(tmp_path)
    until(lambda: (tmp_path / "held").exists())
    for pid in victims(int((tmp_path / "held").read_text())):
        with contextlib.suppress(ProcessLookupError):  # an executor ends itself when its worker daemon is gone
            os.kill(pid, signal.SIGKILL)
    assert driver.child.line() == "done"
    expect_exact(tmp_path)
    assert 250 in repeated(tmp_path)
    cluster.fill()
