"""A graph whose queues are on a shared filesystem leaves what it leaves on the embedded engine, whoever dies when."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cues
from cues import Graph, testing
from cues.errors import ProcessorStopped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import spark_graphs
from spark_graphs import GRAPHS
from test_spark_engine import IGNORED, template, without_times

from cues import codec
from cues.spark.cluster.files import folder_of


def copy_of(template_path: Path, place: Path) -> None:
    """A store and a directory whose queues have the identities of the template's, so that hashes can be compared."""
    shutil.copytree(template_path, place / "store", ignore=IGNORED)
    with cues.open(template_path, readonly=True) as store:
        for queue in store.queues():
            if "." not in queue:
                folder = place / "queues" / folder_of(queue) / "_cues"
                folder.mkdir(parents=True)
                identity = store.queue(queue).row().identity.hex()
                (folder / "queue.json").write_text(json.dumps({"identity": identity, "queue": queue}))


def run(made: Graph, place: Path, spark: SparkSession, **options: Any) -> None:
    running = made.start(engine="spark", spark=spark, store=place / "store", queues=place / "queues", **options)
    try:
        running.wait_done()
    except ProcessorStopped:
        running.drain(60)
    finally:
        running.close()


def run_embedded(made: Graph, path: Path) -> None:
    running = made.start(store=path)
    try:
        running.wait_done()
    except ProcessorStopped:
        running.drain(60)
    finally:
        running.close()


def rows(place: Path, queue: str, spark: SparkSession) -> list[Any]:
    """A queue as any Spark user reads it."""
    folder = place / "queues" / folder_of(queue)
    if not (folder / "_spark_metadata").exists():
        return []
    return spark.read.parquet(str(folder)).orderBy("index").collect()


def left(place: Path, made: Graph, spark: SparkSession) -> dict[str, list[Any]]:
    """The messages by queue; indices are dense, and tracebacks, which name lines that differ, are cut."""
    found: dict[str, list[Any]] = {}
    for queue in made.plan().queues:
        there = rows(place, queue, spark)
        assert [row["index"] for row in there] == list(range(1, len(there) + 1)), queue
        found[queue] = [codec.unpack(bytes(row["value"])) for row in there]
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


@pytest.mark.parametrize("name", GRAPHS)
def test_files_hold_what_the_embedded_engine_leaves(name: str, spark: SparkSession, tmp_path: Path) -> None:
    made = GRAPHS[name]
    template(tmp_path / "template", made())
    shutil.copytree(tmp_path / "template", tmp_path / "embedded", ignore=IGNORED)
    copy_of(tmp_path / "template", tmp_path / "spark")
    run_embedded(made(), tmp_path / "embedded")
    run(made(), tmp_path / "spark", spark)
    expected = left_embedded(tmp_path / "embedded", made())
    found = left(tmp_path / "spark", made(), spark)
    if name == "alts":  # which input is served first is free; what comes from each is not
        for one in (expected, found):
            one["tagged"].sort(key=lambda m: (m["from"], m["n"]))
    if name == "batch function":  # a step takes what is there when it begins
        for one in (expected, found):
            assert sum(m["count"] for m in one.pop("out")) == spark_graphs.COUNT
    assert without_times(found) == without_times(expected)
