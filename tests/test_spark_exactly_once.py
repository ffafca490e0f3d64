"""Exactly once from queue to queue through Spark: kill -9 of everything at exact points, and lost checkpoints.

The driver is a process of its own. Its writer arms a crash point for one batch; when the commit comes to
it, everything up to the driver is killed at once, as when the machine's process group goes. What is left
is then run to its end in the session of the tests. A writer that keeps no position must fail the same
test, or the test would see nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from children import Child, run

import cues
from cues.forwarding import external_writers

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DRIVER_TIMEOUT_S = 180
"""A session that starts on a machine that is busy with other things."""

DRIVER = """
import contextlib, os, signal, sys
from pathlib import Path
import cues.spark
import test_spark_exactly_once
from cues import faults
from cues.spark.datasource import CuesSource
from cues.spark.options import WriteOptions
from cues.spark.streams import StreamWriter

root, point, batch, delivery, size, function = sys.argv[1:]
driver = os.getpid()


def stop(name):
    with open(f"{root}/stopped", "w") as test:  # a FIFO
        test.write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_all(name):
    # From the driver down, so that no process is left that could clean up.
    family, pid = [], os.getpid()
    while pid != driver:
        family.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (driver, *reversed(family)):
        with contextlib.suppress(ProcessLookupError):  # without its driver, an executor ends itself
            os.kill(pid, signal.SIGKILL)


class Dying(StreamWriter):
    def commit(self, messages, batchId):
        if batchId == int(batch):
            faults.arm(point, 1, stop if os.path.exists(f"{root}/stopped") else kill_all)
        super().commit(messages, batchId)


class Source(CuesSource):
    def streamWriter(self, schema, overwrite):
        return Dying(schema, WriteOptions.of_stream(self.options), overwrite)


with cues.spark.session("local[2]", conf={"spark.driver.memory": "512m"}) as spark:
    spark.dataSource.register(Source)
    source = spark.readStream.format("cues").option("maxMessagesPerTrigger", size).load(f"{root}/s#in")
    source = test_spark_exactly_once.FUNCTIONS[function](source)
    sink = source.writeStream.format("cues").option("id", "copy").option("delivery", delivery)
    sink = sink.option("checkpointLocation", f"{root}/checkpoint").trigger(availableNow=True)
    print("query")
    sink.start(f"{root}/o#out").awaitTermination()
"""


def fill(root: Path, count: int) -> None:
    with cues.open(root / "s", durability="process") as store:
        queue = store.queue("in")
        start = queue.last_index
        queue.appender().write_many([{"n": n, "text": "x" * 50} for n in range(start, start + count)])


def result(root: Path) -> list[int]:
    """The messages on the output, after the store was checked."""
    with cues.open(root / "o") as store:
        assert store.check() == []
        return [message["n"] for message in store.queue("out").tailer()]


def thrice(table: Any) -> Any:
    """A function that emits many: nothing for some messages, three for others."""
    return table.where("index % 2 = 0").selectExpr("value", "explode(sequence(1, 3)) as again").select("value")


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "copy": lambda table: table,
    "thrice": thrice,
    "nothing": lambda table: table.where("index < 0"),
}
EXPECTED: dict[str, Callable[[int], list[int]]] = {
    "copy": lambda count: list(range(count)),
    "thrice": lambda count: [n for n in range(count) if n % 2 for _ in range(3)],  # the message n has the index n + 1
    "nothing": lambda count: [],
}


def die(
    root: Path, point: str, batch: int, delivery: str = "exactly-once", size: int = 1000, function: str = "copy"
) -> None:
    """Run a driver that is killed when the commit of a batch comes to a point."""
    with Child(DRIVER, root, point, batch, delivery, size, function) as child:
        assert child.line() == "query"
        assert child.returncode(DRIVER_TIMEOUT_S) == -signal.SIGKILL


def commits(root: Path) -> set[str]:
    """The batches that Spark's own log says are done."""
    return {file.name for file in (root / "checkpoint" / "commits").glob("[0-9]*")}


def go_on(
    spark: SparkSession,
    root: Path,
    size: int = 1000,
    delivery: str = "exactly-once",
    checkpoint: str = "checkpoint",
    function: str = "copy",
    **reader: Any,
) -> None:
    source = spark.readStream.format("cues").options(maxMessagesPerTrigger=size, **reader).load(f"{root / 's'}#in")
    source = FUNCTIONS[function](source)
    settings = {"id": "copy", "delivery": delivery, "checkpointLocation": str(root / checkpoint)}
    sink = source.writeStream.format("cues").options(**settings).trigger(availableNow=True)
    query = sink.start(f"{root / 'o'}#out")
    assert query.awaitTermination(300)


def test_a_driver_killed_before_and_after_the_stores_commit_and_its_checkpoint_deleted_and_put_back(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Whole queues are compared after every step; batch sizes change, so that boundaries do not fit by chance."""
    fill(tmp_path, 5000)
    resume = {"resumeFrom": f"{tmp_path / 'o'}#copy"}

    die(tmp_path, "append.inside", 1)  # written, not committed
    assert result(tmp_path) == list(range(1000))
    assert commits(tmp_path) == {"0"}
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "stale")

    die(tmp_path, "append.after", 2, size=700)  # committed, and Spark does not know; batch 1 is as it was frozen
    assert result(tmp_path) == list(range(2700))
    assert commits(tmp_path) == {"0", "1"}

    go_on(spark, tmp_path, size=900)
    assert result(tmp_path) == list(range(5000))

    fill(tmp_path, 1500)
    shutil.rmtree(tmp_path / "checkpoint")
    go_on(spark, tmp_path, size=800, **resume)
    assert result(tmp_path) == list(range(6500))

    fill(tmp_path, 1500)
    shutil.rmtree(tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "stale", tmp_path / "checkpoint")
    go_on(spark, tmp_path, size=1300, **resume)  # from 1000 on all is planned anew, up to the position and after it
    assert result(tmp_path) == list(range(8000))

    fill(tmp_path, 10)
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(PySparkException, match=r"does not follow what the writer 'copy' has written.*resumeFrom"):
        go_on(spark, tmp_path, size=3000)  # no start is given: two batches are skipped, the third straddles
    assert result(tmp_path) == list(range(8000))


def test_a_driver_killed_in_its_first_batch_begins_where_it_began(spark: SparkSession, tmp_path: Path) -> None:
    """Spark asks for the start of the first batch again; "latest" has moved by then, and the batch has not."""
    fill(tmp_path, 1000)
    die(tmp_path, "append.before", 0)
    assert commits(tmp_path) == set()
    fill(tmp_path, 500)
    go_on(spark, tmp_path, startingPosition="latest")
    assert result(tmp_path) == list(range(1500))


def test_a_driver_that_is_continued_after_others_went_on_writes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """A zombie: stopped before its commit. Meanwhile another driver continues from a copy of its checkpoint."""
    fill(tmp_path, 3000)
    os.mkfifo(tmp_path / "stopped")
    with Child(DRIVER, tmp_path, "append.before", 1, "exactly-once", 1000, "copy") as child:
        assert child.line() == "query"
        worker = int((tmp_path / "stopped").read_text())
        shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
        go_on(spark, tmp_path, checkpoint="copy")
        assert result(tmp_path) == list(range(3000))
        fill(tmp_path, 500)
        go_on(spark, tmp_path, checkpoint="copy")
        os.kill(worker, signal.SIGCONT)
        assert child.returncode(DRIVER_TIMEOUT_S) == 0  # what it has is skipped: batch 1, and batch 2 of the same range
    assert result(tmp_path) == list(range(3500))


@pytest.mark.long
def test_control_a_writer_without_a_position_writes_twice(spark: SparkSession, tmp_path: Path) -> None:
    fill(tmp_path, 3000)
    die(tmp_path, "append.after", 1, delivery="at-least-once")
    go_on(spark, tmp_path, delivery="at-least-once")
    assert result(tmp_path) == [*range(2000), *range(1000, 3000)]
    with cues.open(tmp_path / "o", readonly=True) as store:
        assert external_writers.rows(store) == {}


def test_control_a_writer_without_a_position_writes_twice_what_an_old_checkpoint_or_none_has(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The story of the first test, and of the zombie, without an id: each of them doubles messages."""
    fill(tmp_path, 3000)
    go_on(spark, tmp_path, delivery="at-least-once")
    assert result(tmp_path) == list(range(3000))
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "stale")
    fill(tmp_path, 500)
    go_on(spark, tmp_path, delivery="at-least-once")
    go_on(spark, tmp_path, delivery="at-least-once", checkpoint="stale")  # restored, or of a second driver
    assert result(tmp_path) == [*range(3500), *range(3000, 3500)]
    shutil.rmtree(tmp_path / "checkpoint")
    go_on(spark, tmp_path, delivery="at-least-once")
    assert result(tmp_path) == [*range(3500), *range(3000, 3500), *range(3500)]


@pytest.mark.long
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("point", ["append.before", "append.inside", "append.after"])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_driver_killed_at_every_point_of_every_batch(
    spark: SparkSession, tmp_path: Path, point: str, batch: int, function: str
) -> None:
    """Also where a batch has no rows: its position moves with nothing."""
    fill(tmp_path, 3000)
    die(tmp_path, point, batch, function=function)
    go_on(spark, tmp_path, function=function)
    assert result(tmp_path) == EXPECTED[function](3000)
    with cues.open(tmp_path / "o", readonly=True) as store:
        kept = external_writers.rows(store)["copy"].position
        assert kept[1][0][1] == 3001, kept


@pytest.mark.long
def test_executors_of_their_own_on_the_drivers_machine_read_and_write(tmp_path: Path) -> None:
    """A standalone cluster: what a local session hides (whether everything reaches the executors) shows here."""
    fill(tmp_path, 30_000)
    from pyspark.find_spark_home import _find_spark_home

    from cues.spark import java

    spark_class = f"{_find_spark_home()}/bin/spark-class"
    environment = {**os.environ, "JAVA_HOME": str(java.find().home), "SPARK_LOCAL_IP": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    package = "org.apache.spark.deploy"
    roles = {
        "master": [f"{package}.master.Master", "--port", str(port), "--webui-port", "0"],
        "worker": [f"{package}.worker.Worker", "--cores", "2", "--memory", "1g", "--webui-port", "0"],
    }
    roles["worker"] += ["--work-dir", str(tmp_path / "work"), f"spark://127.0.0.1:{port}"]
    code = (
        "import sys, cues.spark\n"
        "root, master = sys.argv[1:]\n"
        "conf = {f'spark.driver.{name}': '127.0.0.1' for name in ('bindAddress', 'host')}\n"
        "conf |= {'spark.executor.memory': '512m', 'spark.ui.enabled': 'false'}\n"
        "with cues.spark.session(master, conf=conf) as spark:\n"
        "    table = spark.read.format('cues').option('partitions', 3).load(f'{root}/s#in')\n"
        "    table.write.format('cues').mode('append').save(f'{root}/o#out')\n"
        "    print(spark.sparkContext.master)"
    )
    with contextlib.ExitStack() as running:
        for role, arguments in roles.items():
            command = [spark_class, arguments[0], "--host", "127.0.0.1", *arguments[1:]]
            with (tmp_path / role).open("w") as log:
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            running.callback(process.wait)
            running.callback(process.kill)
        assert run(code, tmp_path, f"spark://127.0.0.1:{port}").endswith(f":{port}")
    assert result(tmp_path) == list(range(30_000))
    assert list((tmp_path / "o" / "staged").iterdir()) == []
