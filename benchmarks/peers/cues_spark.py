"""Cues on its Spark engine: the pipeline with its function on Spark's executors.

The start of the session (seconds) is not in the figure. CPU time is without Spark's Python workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core import KEEPS, cues_pipeline
from harness import Room, Work
from work import batches, messages, must_be, total

import cues
import cues.spark
from cues import Graph, Source, Stream


@contextmanager
def pipeline(room: Room) -> Iterator[Work]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    here = str(Path(__file__).parent.parent)  # the workers import the function
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    with cues.open(room.path / "store", durability=room.durability) as store:
        orders = store.queue("orders", metadata={"t", "time"}).appender()
        for batch in batches(messages(room.count)):
            orders.write_many(batch)
    parts = [Source("orders"), Stream(total, "orders", "totals")]
    graph = Graph("bench", parts, store=room.path / "store", durability=room.durability, queues={"*": KEEPS})
    with cues.spark.session("local[2]") as spark:
        room.keep["servers"] = [spark.sparkContext._gateway.proc.pid]
        spark.range(10).mapInPandas(lambda frames: frames, "id bigint").count()

        def work() -> None:
            with graph.start(engine="spark", spark=spark) as running:
                running.wait_idle()

        yield work
        with cues.open(room.path / "store", readonly=True) as store:
            must_be(store.queue("totals").tailer(), map(total, messages(room.count)))


CONTENDERS = {"spark": {"Cues, on Spark": pipeline, "Cues, embedded": cues_pipeline}}
