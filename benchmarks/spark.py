"""Spark compared with the embedded engine: reading a queue, mapping and writing it, streams, and the start.

    python benchmarks/spark.py [--count 1000000] [--rounds 3] [--cores 2] [--only read,map] [--json]
    python benchmarks/spark.py --quick

    read      a whole queue into Spark: the row's index and value, all its columns, three fields decoded;
              compared with single LMDB entries (spark_peers.py), rows that are ready, and a tailer
    map       queue → function → queue: a backfill of a graph, the graph's usual steps, the format cues;
              compared with single entries, the function over rows that are ready, and the embedded engine
    engines   a graph's usual steps on Spark, and --workers with as many processes, on one graph: a function without
              work, and one of 0.2 ms; from a queue without partitions, and from one with a partition for each core
    stream    the same as a stream of micro-batches of 5,000, 50,000 and 200,000 messages; compared
              with the embedded engine over as many
    start     a process with a session: time to the session, to its first job, to its first Python task

Contenders take turns within a round, in one session, and every result is verified. A figure is the median
over the rounds, and a ratio that of the ratios within a round. The first round of a session is slower
(Java compiles, Python workers start), so one round before is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cues
import cues.spark
from cues import codec
from cues.graphs.graphfile import load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CARRIERS = ("AA", "B6", "DL", "UA")
GRAPH = """
import os, time
import cues

COUNT = {loops}

def work(flight):
    total = 0
    for n in range(COUNT):
        total += n * n
    return {{"id": flight["id"], "carrier": flight["carrier"], "late": flight["delay"] >= 15, "note": flight["note"]}}

queues = {{"q": cues.QueueOptions(partitions={partitions}), "out": cues.QueueOptions(partitions={partitions})}}
graph = cues.Graph("g", [cues.Stream(work, "q", "out")], durability="process", queues=queues)
"""
LOOPS = 5_000
"""Steps of a loop that take about 0.2 ms."""
MICRO_BATCHES = (5_000, 50_000, 200_000)
MICRO_BATCHES_EACH = 5
Work = Callable[[Path], int]
"""Does the work in a folder of its own; returns a sum to be verified."""


def message(n: int) -> dict[str, Any]:
    """About 80 bytes of msgpack."""
    return {"id": n, "carrier": CARRIERS[n % 4], "origin": "JFK", "delay": n % 100 / 2, "note": "x" * 30}


def priced(flight: dict[str, Any]) -> dict[str, Any]:
    return {"id": flight["id"], "carrier": flight["carrier"], "late": flight["delay"] >= 15, "note": flight["note"]}


def mapped(batches: Iterable[Any]) -> Iterator[Any]:
    """Call :func:`priced` over values, as a user's function of mapInArrow does."""
    import pyarrow as pa

    for rows in batches:
        values = [codec.pack(priced(codec.unpack(value))) for value in rows.column("value").to_pylist()]
        yield pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], ["value"])


def graph() -> cues.Graph:
    return cues.Graph("g", [cues.Stream(priced, "q", "out")], durability="process")


@dataclass
class Race:
    """Contenders over the same messages; figures are ratios to the first."""

    name: str
    count: int
    contenders: dict[str, Work]
    expected: int
    partitions: int = 1


# --- the contenders -------------------------------------------------------------------------------


class Bench:
    """The queue, the session, and the contenders."""

    def __init__(self, folder: Path, spark: SparkSession, count: int, cores: int) -> None:
        import spark_peers

        self.folder, self.spark, self.count, self.cores = folder, spark, count, cores
        self.store, self.queue = folder / "s", f"{folder / 's'}#q"
        self.entries = folder / "entries"
        spark.dataSource.register(spark_peers.Entries)
        fill(self.store, count)
        spark_peers.fill(self.entries, (codec.pack(message(n)) for n in range(count)))

    def races(self) -> list[Race]:
        sum_of_ids = self.count * (self.count - 1) // 2
        read = {
            "index and value": lambda room: self._total(self._read(schema="index bigint, value binary"), TWO),
            "single entries": lambda room: self._total(self._read_entries(), TWO),
            "Spark alone": lambda room: self._total(self._read_entries(ready=True), TWO),
            "all columns": lambda room: self._total(self._read(), ALL),
            "three fields": lambda room: self._total(self._read(schema=THREE), "id"),
            "embedded tailer": self._tailed,
        }
        maps: dict[str, Work] = {
            "backfill": lambda room: self._graph(room, engine="spark", spark=self.spark, backfill=True),
            "format cues": self._map_cues,
            "single entries": self._map_entries,
            "Spark and function": self._map_nothing,
            "usual steps": lambda room: self._graph(room, engine="spark", spark=self.spark),
            "embedded engine": self._graph,
        }
        races = [Race("read", self.count, read, sum_of_ids), Race("map", self.count, maps, self.count)]
        for partitions in (1, self.cores):
            for loops in (0, LOOPS):
                some = self.count if not loops else max(1, self.count // 20)
                engines: dict[str, Work] = {
                    "usual steps": lambda room, loops=loops, partitions=partitions: self._file(  # type: ignore[misc]
                        room, loops, partitions, engine="spark", spark=self.spark
                    ),
                    "workers": lambda room, loops=loops, partitions=partitions: self._file(  # type: ignore[misc]
                        room, loops, partitions, workers=self.cores
                    ),
                }
                kind = "0.2 ms" if loops else "no work"
                races.append(Race(f"engines {kind}, {partitions} partitions", some, engines, some, partitions))
        for size in MICRO_BATCHES:
            size = min(size, max(1, self.count // MICRO_BATCHES_EACH))
            some = size * MICRO_BATCHES_EACH
            streams: dict[str, Work] = {
                "micro-batches": lambda room, size=size, some=some: self._stream(room, size, some),  # type: ignore[misc]
                "embedded engine": lambda room, some=some: self._graph(room, some),  # type: ignore[misc]
            }
            races.append(Race(f"stream {size:,}", some, streams, some))
        return races

    def _read(self, **options: Any) -> DataFrame:
        reader = self.spark.read.format("cues").option("partitions", self.cores)
        if "schema" in options:
            reader = reader.schema(options["schema"])
        return reader.load(self.queue)

    def _read_entries(self, **options: Any) -> DataFrame:
        options["partitions"] = self.cores
        return self.spark.read.format("entries").options(**options).load(str(self.entries))

    def _total(self, table: DataFrame, what: str) -> int:
        return int(table.selectExpr(f"sum({what})").collect()[0][0])

    def _tailed(self, room: Path) -> int:
        with cues.open(self.store, readonly=True) as opened:
            tailer = opened.queue("q").tailer()
            total = 0
            while messages := tailer.read_many(10_000):
                total += sum(message["id"] for message in messages)
        return total

    def _map_cues(self, room: Path) -> int:
        out = self._read(schema="index bigint, value binary").mapInArrow(mapped, "value binary")
        out.write.format("cues").mode("append").save(f"{room / 'o'}#out")
        return length(room / "o")

    def _map_entries(self, room: Path) -> int:
        import spark_peers

        out = self._read_entries().mapInArrow(mapped, "value binary")
        out.write.format("entries").mode("append").save(str(room / "e"))
        return spark_peers.count(str(room / "e"))

    def _map_nothing(self, room: Path) -> int:
        """Read nothing and write nothing: the time of Spark and of the function."""
        out = self._read_entries(ready=True).mapInArrow(mapped, "value binary")
        return int(out.selectExpr("count(value)").collect()[0][0])

    def _graph(self, room: Path, count: int | None = None, **options: Any) -> int:
        with graph().start(store=room / "s", **options) as running:
            running.wait_idle()
        return length(room / "s")

    def _file(self, room: Path, loops: int, partitions: int, **options: Any) -> int:
        """Run a graph from a file, as workers need it."""
        path = room / f"race_{loops}_{partitions}.py"  # a module is loaded once in a process
        path.write_text(GRAPH.format(loops=loops, partitions=partitions))
        with load(str(path)).graph.start(store=room / "s", **options) as running:
            running.wait_idle()
        return length(room / "s")

    def _stream(self, room: Path, size: int, count: int) -> int:
        source = self.spark.readStream.format("cues").option("maxMessagesPerTrigger", size)
        out = source.load(f"{room / 's'}#q").mapInArrow(mapped, "value binary")
        sink = out.writeStream.format("cues").option("id", "copy").option("checkpointLocation", str(room / "c"))
        sink.trigger(availableNow=True).start(f"{room / 'o'}#out").awaitTermination()
        return length(room / "o")


THREE = "id bigint, carrier string, delay double"
TWO = "index - 1 + length(value) - length(value)"
ALL = TWO + " + coalesce(length(hash), 0) + hour(time) - hour(time)"


def fill(store: Path, count: int, partitions: int = 1) -> None:
    with cues.open(store, durability="process") as opened:
        appender = opened.queue("q", partitions=partitions).appender()
        for start in range(0, count, 10_000):
            appender.write_many([message(n) for n in range(start, min(count, start + 10_000))])


def length(store: Path) -> int:
    with cues.open(store, readonly=True) as opened:
        return len(opened.queue("out"))


def prepare(race: Race, room: Path) -> None:
    """Make new stores for one contender, to read and to write. They do not wait for the disk."""
    room.mkdir()
    if race.name != "read":
        fill(room / "s", race.count, race.partitions)
        cues.open(room / "o", durability="process").close()


# --- racing ---------------------------------------------------------------------------------------


def run(race: Race, folder: Path, rounds: int) -> dict[str, list[float]]:
    """The seconds of each contender, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in race.contenders}
    names = list(race.contenders)
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            room = folder / "room"
            prepare(race, room)
            began = time.perf_counter()
            result = race.contenders[name](room)
            took = time.perf_counter() - began
            assert result == race.expected, (race.name, name, result)
            shutil.rmtree(room)
            if number > 0:
                seconds[name].append(took)
    return seconds


def lines_of(race: Race, seconds: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    first = next(iter(seconds.values()))
    for name, own in seconds.items():
        yield {
            "row": race.name,
            "contender": name,
            "messages": race.count,
            "messages_per_s": statistics.median(race.count / took for took in own),
            "first_is_faster_by": statistics.median(peer / mine for mine, peer in zip(first, own)),
        }


START = """
import sys, time
began = time.perf_counter()
import cues.spark
with cues.spark.session(sys.argv[1]) as spark:
    session = time.perf_counter()
    spark.range(10).count()
    job = time.perf_counter()
    spark.sparkContext.parallelize([1, 2], 2).map(lambda n: n).collect()
    print(session - began, job - session, time.perf_counter() - job)
"""


def starts(cores: int, rounds: int) -> dict[str, float]:
    """Seconds of a process of its own: session, first job, first Python task."""
    samples = []
    for _ in range(rounds):
        command = [sys.executable, "-c", START, f"local[{cores}]"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        samples.append([float(figure) for figure in done.stdout.split()])
    names = ("session", "first job", "first Python task")
    return {name: statistics.median(column) for name, column in zip(names, zip(*samples))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--only", default="read,map,engines,stream,start", help="rows, with commas")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="whether it works, not how fast it is")
    chosen = parser.parse_args()
    count, rounds = (5_000, 1) if chosen.quick else (chosen.count, chosen.rounds)
    rows = chosen.only.split(",")
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))  # of Python workers
    if "start" in rows:
        for name, figure in starts(chosen.cores, rounds).items():
            say({"row": "start", "contender": name, "seconds": figure}, chosen.json)
    with tempfile.TemporaryDirectory(prefix="cues-spark-") as made:
        folder = Path(made)
        with cues.spark.session(f"local[{chosen.cores}]") as spark:
            for race in Bench(folder, spark, count, chosen.cores).races():
                if race.name.split()[0] in rows:
                    for line in lines_of(race, run(race, folder, rounds)):
                        say(line, chosen.json)


def say(line: dict[str, Any], as_json: bool) -> None:
    if as_json:
        text = json.dumps(line)
    elif "seconds" in line:
        text = f"{line['row']:30} {line['contender']:18} {line['seconds']:10.2f} s"
    else:
        text = f"{line['row']:30} {line['contender']:18} {line['messages_per_s']:10,.0f} messages/s"
        text += f"   the first of the row is x{line['first_is_faster_by']:.2f} as fast"
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
