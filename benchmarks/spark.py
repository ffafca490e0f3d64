"""Reading a queue with Spark: the format's value rows, declared columns, and a reader that takes message by message.

    python benchmarks/spark.py [--count 1000000] [--rounds 5] [--partitions 2] [--json]
    python benchmarks/spark.py --quick

Contenders take turns within a round, in one session, and each result is verified; a figure is the median
over the rounds. The first round of a session is slower (Java compiles, Python workers start), so one
round before is not counted.

    value rows       what the format does: record batches of the log become record batches of Arrow,
                     cut without being decoded
    naive            the same rows by the obvious reader: a tailer, and a tuple for each message
    columns          three columns declared, so each message is decoded
    embedded         no Spark: the same queue, decoded in this process
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cues
import cues.spark
from cues import codec

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader, SparkSession

CARRIERS = ("AA", "B6", "DL", "UA")


def message(n: int) -> dict[str, Any]:
    """About 80 bytes of msgpack."""
    return {"id": n, "carrier": CARRIERS[n % 4], "origin": "JFK", "delay": n % 100 / 2, "note": "x" * 30}


def contenders(spark: SparkSession, path: str, count: int, partitions: int) -> dict[str, Callable[[], int]]:
    """Each reads everything and returns the sum of what it saw, to be verified."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    store, _, queue = path.rpartition("#")

    class NaiveReader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            edges = [1 + count * piece // partitions for piece in range(partitions + 1)]
            return [InputPartition(edges[n : n + 2]) for n in range(partitions)]

        def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
            start, stop = partition.value
            with cues.open(store, readonly=True) as opened, opened.queue(queue).tailer() as tailer:
                tailer.to_index(start)
                for _ in range(start, stop):
                    found = tailer.read()
                    envelope = tailer.envelope
                    assert envelope is not None
                    yield envelope.index, envelope.time, envelope.hash, codec.pack(found)

    class Naive(DataSource):
        @classmethod
        def name(cls) -> str:
            return "naive"

        def schema(self) -> str:
            return "index bigint, time timestamp, hash string, value binary"

        def reader(self, schema: Any) -> DataSourceReader:
            return NaiveReader()

    spark.dataSource.register(Naive)

    def read() -> DataFrameReader:
        return spark.read.format("cues").option("partitions", partitions)

    def embedded() -> int:
        with cues.open(store, readonly=True) as opened:
            tailer = opened.queue(queue).tailer()
            total = 0
            while found := tailer.read_many(10_000):
                total += sum(one["id"] for one in found)
        return total

    def total(table: Any, what: str) -> int:
        return int(table.selectExpr(f"sum({what})").collect()[0][0])

    whole = "index - 1 + length(value) - length(value) + coalesce(length(hash), 0) + hour(time) - hour(time)"
    return {
        "value rows": lambda: total(read().load(path), whole),
        "naive": lambda: total(spark.read.format("naive").load(), whole),
        "columns": lambda: total(read().schema("id bigint, carrier string, delay double").load(path), "id"),
        "embedded": embedded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="whether it works, not how fast it is")
    chosen = parser.parse_args()
    count, rounds = (20_000, 1) if chosen.quick else (chosen.count, chosen.rounds)
    with tempfile.TemporaryDirectory(prefix="cues-spark-") as folder:
        with cues.open(Path(folder) / "s", durability="process") as store:
            appender = store.queue("q").appender()
            for start in range(0, count, 10_000):
                appender.write_many([message(n) for n in range(start, min(count, start + 10_000))])
        seconds: dict[str, list[float]] = {}
        with cues.spark.session(f"local[{chosen.partitions}]") as spark:
            racing = contenders(spark, f"{folder}/s#q", count, chosen.partitions)
            for number in range(rounds + 1):
                names = list(racing)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    began = time.perf_counter()
                    found = racing[name]()
                    took = time.perf_counter() - began
                    assert found == count * (count - 1) // 2, (name, found)
                    if number > 0:
                        seconds.setdefault(name, []).append(took)
    for name in contenders_of(seconds):
        rate = statistics.median(count / one for one in seconds[name])
        ratio = statistics.median(mine / peer for mine, peer in zip(seconds["value rows"], seconds[name]))
        if chosen.json:
            print(json.dumps({"row": name, "messages": count, "messages_per_s": rate, "value_rows_to_it": ratio}))
        else:
            print(f"{name:12} {rate:12,.0f} messages/s   value rows take x{ratio:.2f} of it")


def contenders_of(seconds: dict[str, list[float]]) -> list[str]:
    """Their names, the fastest first."""
    return sorted(seconds, key=lambda name: statistics.median(seconds[name]))


if __name__ == "__main__":
    sys.exit(main())
