"""Spark Structured Streaming in one process: JSON lines in, a function over Arrow, JSON lines out, with a checkpoint.

The start of the session (seconds) is not in the figure. CPU time is that of the JVM, without Spark's Python workers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness import Room, Work
from pyspark.sql import SparkSession
from work import messages, must_be, total

SCHEMA = "id bigint, symbol string, side string, size bigint, price double"


@contextmanager
def pipeline(room: Room) -> Iterator[Work]:
    source = room.path / "in"
    source.mkdir()
    (source / "orders.json").write_text("".join(json.dumps(message) + "\n" for message in messages(room.count)))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder: Any = SparkSession.builder
    spark = builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    room.keep["servers"] = [spark.sparkContext._gateway.proc.pid]
    spark.range(10).mapInPandas(lambda frames: frames, "id bigint").count()

    def totals(frames: Any) -> Any:
        for frame in frames:
            frame["total"] = frame["size"] * frame["price"]
            yield frame

    def work() -> None:
        orders = spark.readStream.schema(SCHEMA).json(str(source))
        writer = orders.mapInPandas(totals, SCHEMA + ", total double").writeStream.format("json")
        query = writer.option("checkpointLocation", str(room.path / "kept")).trigger(availableNow=True)
        query.start(str(room.path / "out")).awaitTermination()

    yield work
    lines = [json.loads(line) for file in sorted((room.path / "out").glob("*.json")) for line in file.open()]
    must_be(sorted(lines, key=lambda m: m["id"]), map(total, messages(room.count)))
    spark.stop()


CONTENDERS = {"pipeline": {"Spark local[2], a batch": pipeline}, "spark": {"PySpark structured streaming": pipeline}}
