"""A user reads names of processors and ranges on Spark's page and in errors, which have one line and a hint."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

import cues
from cues import Graph
from cues.errors import ProcessorStopped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

from cues.spark.failures import advice, in_short

Message = dict[str, Any]
CRASH = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 3.0 failed 4 times, most recent \
failure: Lost task 1.3 in stage 3.0 (TID 17) (10.0.0.7 executor 2): {}
\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.read(PythonRunner.scala:1)
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        (
            "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider setting 'a' or 'b'",
            "Python worker exited unexpectedly (crashed)",
            "batch_size=",
        ),
        (
            "ExecutorLostFailure (executor 2 exited caused by one of the running tasks) Reason: Command exited with"
            " code 137",
            "ExecutorLostFailure (executor 2 exited caused by one of the running tasks) Reason: Command exited with"
            " code 137",
            "spark.executor.memory",
        ),
        ("java.lang.OutOfMemoryError: Java heap space", "Java heap space", "spark.driver.memory"),
        (
            "org.apache.hadoop.fs.s3a.AWSBadRequestException: x: Access Denied (Service: S3, Status Code: 403)",
            "x: Access Denied (Service: S3, Status Code: 403)",
            "credentials of the object store",
        ),
        ("java.io.IOException: No space left on device", "No space left on device", "spark.local.dir"),
        (
            "org.apache.spark.SparkException: \nError from python worker:\n  /bin/python: Error while finding module"
            " specification for 'a.b' (ModuleNotFoundError: No module named 'a')\nPYTHONPATH was:\n  /lib",
            "/bin/python: Error while finding module specification for 'a.b' (ModuleNotFoundError: No module named"
            " 'a')",
            "install what is missing",
        ),
        (
            "org.apache.spark.SparkException: Python worker failed to connect back.",
            "Python worker failed to connect back",
            "fewer cores",
        ),
        ("ExecutorLostFailure (heartbeat)", "ExecutorLostFailure (heartbeat)", "look at the log of the executor"),
        ("java.lang.IllegalStateException: something new", "something new", "start again"),
    ],
)
def test_an_error_of_java_is_one_line_with_what_to_try(
    text: str, line: str, hint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole is in the log at debug."""
    error = RuntimeError(CRASH.format(text))
    with caplog.at_level(logging.DEBUG, "cues.spark"):
        assert in_short(error) == line
    assert hint in advice(error, "start again.")
    assert "PythonRunner.scala:1" in caplog.text


def numbers(position: int | None) -> Any:
    for n in range(position or 0, 40):
        yield n + 1, {"n": n}


def plain(message: Message) -> Message:
    return {"n": message["n"]}


def dies(message: Message) -> Message:
    if message["n"] == 7:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where memory ends
    return message


def imports(message: Message) -> Message:
    import a_package_that_is_not_there

    return {"n": a_package_that_is_not_there.of(message)}


def selected(rows: Any) -> Any:
    return rows.select("n")


def wrong_column(rows: Any) -> Any:
    return rows.select("no_such_column")


def totals(rows: Any) -> Any:
    return rows.groupBy("n").count()


def graph_of(fn: Any, frame: bool = False, id: str = "g", **options: Any) -> Graph:
    made = Graph(id, durability="process")
    made.source("in")(numbers)
    if frame:
        made.frame("in", "out", fields="n long", id="f", **options)(fn)
    else:
        made.stream("in", "out", id="f", **options)(fn)
    return made


def started(made: Graph, spark: SparkSession, place: Path, queues: bool) -> Any:
    return made.start(
        engine="spark", spark=spark, store=place / "store", **({"queues": place / "queues"} if queues else {})
    )


def jobs(spark: SparkSession) -> set[str]:
    """The names on Spark's page."""
    context = spark.sparkContext
    with urlopen(f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/jobs") as page:
        return {job.get("description") or job["name"] for job in json.load(page)}


@pytest.mark.timeout(600)
def test_jobs_have_the_name_of_the_processor_and_the_range(spark: SparkSession, tmp_path: Path) -> None:
    """In every mode: over a store and in a directory, functions, frames in steps and as a query, and a backfill."""
    for id, fn, queues, options in (
        ("store", plain, False, {}),
        ("rows", selected, False, {"frame": True}),
        ("files", plain, True, {}),
        ("table", selected, True, {"frame": True}),
        ("query", totals, True, {"frame": True, "output_mode": "update"}),
        ("backfill", plain, False, {"backfill": True}),
    ):
        backfill = options.pop("backfill", False)
        made = graph_of(fn, id=id, **options)
        if backfill:
            sources = Graph(id, durability="process")
            sources.source("in")(numbers)
            sources.run(store=tmp_path / id / "store")
            with made.start(engine="spark", spark=spark, store=tmp_path / id / "store", backfill=True) as running:
                running.wait_done()
        else:
            with started(made, spark, tmp_path / id, queues) as running:
                running.wait_done()
        names = jobs(spark)
        assert any(re.fullmatch(rf"{id}\.f: {id}\.f\.in \[\d+, \d+\)", name) for name in names), (id, names)
        assert not any("{" in name for name in names)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("queues", [False, True], ids=["store", "directory"])
def test_a_killed_worker_is_told_in_a_line_with_a_hint(queues: bool, spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ProcessorStopped) as caught, started(graph_of(dies), spark, tmp_path, queues) as running:
        running.wait_done()
    assert re.match(r"g\.f stopped: Spark could not do its step over g\.f\.in \[1, \d+\): ", caught.value.message)
    assert "\n" not in caught.value.message and "at org." not in str(caught.value)
    assert "batch_size=" in caught.value.hint and len(str(caught.value).splitlines()) <= 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("queues", [False, True], ids=["store", "directory"])
def test_a_package_that_an_executor_lacks_is_an_error_of_the_function(
    queues: bool, spark: SparkSession, tmp_path: Path
) -> None:
    """As on the embedded engine: it stops the processor, or its messages go to the error queue."""
    told = []
    for engine in ("embedded", "spark"):
        made, place = graph_of(imports), tmp_path / engine
        running = made.start(store=place / "store") if engine == "embedded" else started(made, spark, place, queues)
        with pytest.raises(ProcessorStopped) as caught, running:
            running.wait_done()
        told.append((caught.value.message, caught.value.hint))
    assert told[0] == told[1] and "a_package_that_is_not_there" in told[0][0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("queues", [False, True], ids=["store", "directory"])
def test_a_wrong_column_of_a_frame_is_told_without_java(queues: bool, spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(cues.CuesError) as caught, started(graph_of(wrong_column, True), spark, tmp_path, queues) as run:
        run.wait_done()
    text = str(caught.value)
    assert "g.f" in text and "no_such_column" in text and "at org." not in text and len(text.splitlines()) < 6, text
    assert caught.value.hint
