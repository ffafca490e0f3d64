"""Queues in a shared directory (``--queues DIR``): large steps, small steps, keyed state, history.

    python benchmarks/spark_queues.py [--count 1000000] [--cores 2] [--json] [--only PART,…]
    python benchmarks/spark_queues.py --all    # each part, and before them spark.py: every rate of the pages of Spark

    steps      a light function over a queue that is there: messages a second of the largest steps, and of the whole
               run; then ten messages at a time: seconds from ``send`` to the output
    state      the same with a state for every message's key, a million keys in the end; then ten messages at a time
    history    ten messages at a time, with a thousand, 100,000 and a million files in the log of the output
    frame      ten messages at a time through a frame that keeps windows: seconds until idle
    tables     functions of tables over rows that came as a table, with queues in a store and in a directory, and with
               a plain mapInArrow from and into Parquet files: CPU of all processes, Java too, for a row, and for each
               further row, from a quarter of the rows to all
    rows       a light function over messages: CPU of all processes for a message, in turns with a plain mapInArrow,
               with one whose function returns its rows, and with Structured Streaming, all three over the same values
               in Parquet files and into Parquet files; and with the parts of this work in one process, without Spark.
               At the end the medians, and how often they contain the floors
    floors     CPU time in one process, without Spark: decode, call and encode a message; pack a message; write and read
               a row of four columns with pyarrow. And a job with one task that does nothing: seconds
    slots      growth with executors, on simulated work: a function that sleeps, with 1 to 16 slots, workers that are
               warm and a session for each number of slots. Efficiency: the rate by slots × the rate of one

Each part also tells the most memory of the driver, of Java, and of a Python worker.

Every output is counted, and the last value of a state is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import cues
import cues.spark
from cues import codec
from cues.spark.cluster import maintenance
from cues.spark.cluster.directory import DataFile, QueueDirectory, _add
from cues.spark.cluster.files import open_files
from cues.spark.cluster.step import Stage

SMALL = 10
SMALL_STEPS = 25
FRAME_BATCHES = 20
WARM_BATCHES = 3
SLOTS = (1, 2, 4, 8, 16)
SLEEP_S = 0.02
"""A call of the simulated work."""
SLOT_S = 15.0
"""Work for each slot. A step takes about 5 s."""
FILE_ROWS = 50_000
"""Messages of a file that Spark's own contenders read, as in a file of the feeder."""
HISTORY = (1_000, 100_000, 1_000_000)


def priced(message: dict[str, Any]) -> dict[str, Any]:
    return {"id": message["id"], "late": message["delay"] >= 15, "note": message["note"]}


def counted(message: dict[str, Any], process: Any) -> dict[str, Any]:
    process.state["count"] = process.state.get("count", 0) + 1
    return {"id": message["id"], "count": process.state["count"]}


def messages(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"id": n, "key": n % 1_000_000, "delay": n % 100 / 2, "note": "x" * 30} for n in range(start, stop)]


class Timed:
    """The steps of one run: messages and seconds."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []
        self._real = Stage._run_and_commit

    def __enter__(self) -> Timed:
        def timed(stage: Stage, taking: Any) -> None:
            began = time.monotonic()
            self._real(stage, taking)
            count = next(high - low for low, high in taking.ranges.values())
            self.steps.append((count, time.monotonic() - began))

        Stage._run_and_commit = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Stage._run_and_commit = self._real  # type: ignore[method-assign]


def run(spark: Any, place: Path, stream: cues.Stream, count: int) -> Iterator[dict[str, Any]]:
    with cues.open(place / "store", durability="process") as store:
        appender = store.queue("in").appender()
        for low in range(0, count, 50_000):
            appender.write_many(messages(low, min(count, low + 50_000)))
    graph = cues.Graph("g", [stream], durability="process")
    began = time.monotonic()
    with (
        Timed() as timed,
        Usage() as usage,
        graph.start(engine="spark", spark=spark, store=place / "store", queues=place / "queues") as running,
    ):
        assert running.wait_idle(600)
        took = time.monotonic() - began
        if count:
            most = max(step[0] for step in timed.steps)
            large = [step for step in timed.steps if step[0] * 2 >= most]
            rate = sum(step[0] for step in large) / sum(step[1] for step in large)
            yield {"what": f"steps of up to {most:,} messages", "messages/s": round(rate)}
            yield {"what": "whole run, feeding and small first steps included", "messages/s": round(count / took)}
        out = running.engine.driver.queues["out"]  # type: ignore[attr-defined]
        latencies = []
        start = out.log(0).next
        for turn in range(SMALL_STEPS):
            began = time.monotonic()
            for message in messages(SMALL * turn, SMALL * (turn + 1)):
                running.send("in", message)
            while out.log(0).next < start + SMALL * (turn + 1):
                time.sleep(0.001)
            latencies.append(time.monotonic() - began)
        assert running.wait_idle(60)
        steps = [seconds for messages, seconds in timed.steps[-SMALL_STEPS:] if messages <= SMALL]
        yield {"what": f"{SMALL} messages, from send to the output", "s": round(statistics.median(latencies), 3)}
        yield {"what": f"the step of {SMALL} messages", "s": round(statistics.median(steps), 3)}
        assert out.log(0).next == start + SMALL * SMALL_STEPS
        yield usage.memory()
        if stream.fn is counted:
            assert running.messages("out")[-1]["count"] == count // 1_000_000 + 1


def windows(rows: Any) -> Any:
    """Messages of each key in each minute."""
    from pyspark.sql import functions as F

    late = rows.withWatermark("at", "1 minute")
    counts = late.groupBy(F.window("at", "1 minute"), "key").count()
    return counts.select(F.col("window.start").alias("start"), "key", "count")


def frame(spark: Any, place: Path) -> Iterator[dict[str, Any]]:
    """The first batches are not counted: Spark plans the query, Java compiles, and Python workers start."""
    graph = cues.Graph("g", [cues.Source("in")], durability="process")
    graph.frame("in", "out", fields="key long, at timestamp", output_mode="update", id="windows")(windows)
    began_at = datetime(2026, 1, 1, tzinfo=UTC)
    how: dict[str, Any] = {"store": place / "store", "queues": place / "queues"}
    with Usage() as usage, graph.start(engine="spark", spark=spark, **how) as running:
        out = running.engine.driver.queues["out"]  # type: ignore[attr-defined]
        latencies = []
        for turn in range(WARM_BATCHES + FRAME_BATCHES):
            start, began = out.log(0).next, time.monotonic()
            for n in range(SMALL * turn, SMALL * (turn + 1)):
                running.send("in", {"key": n % SMALL, "at": began_at + timedelta(seconds=n)})
            assert running.wait_idle(120)
            assert out.log(0).next > start
            latencies.append(time.monotonic() - began)
        counts = {(row["start"], row["key"]): row["count"] for row in running.messages("out")}
        assert sum(counts.values()) == SMALL * (WARM_BATCHES + FRAME_BATCHES)
    counted = sorted(latencies[WARM_BATCHES:])
    what = f"{SMALL} messages through a frame with windows, until idle"
    yield {"what": what, "s": round(statistics.median(counted), 2), "most": round(counted[-1], 2)}
    yield usage.memory()


def flagged(table: Any) -> Any:
    import pyarrow.compute as pc

    return table.append_column("late", pc.greater_equal(table["delay"], 15.0))


class Usage:
    """Samples CPU time and memory of this process and of all that it started: Java, and Python workers.

    The time of the samples themselves is not counted. A worker that ends between two samples lacks its last moments.
    Memory is that of a process's own, without files that it maps: the most of the largest process of a kind.
    """

    def __init__(self) -> None:
        self.peak_mb = {"Python, the driver": 0.0, "Java": 0.0, "Python, a worker": 0.0}
        self.seconds_of = dict.fromkeys(self.peak_mb, 0.0)
        self._kinds: dict[tuple[int, str], str] = {}
        self._sampling_s = 0.0
        self._spent: dict[tuple[int, str], float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_often, daemon=True)

    def __enter__(self) -> Usage:
        self._sample()
        self._before = dict(self._spent)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()
        for process, spent in self._spent.items():
            self.seconds_of[self._kinds[process]] += spent - self._before.get(process, 0.0)
        self.seconds_of["Python, the driver"] -= self._sampling_s
        self.seconds = sum(self.seconds_of.values())

    def by_kind(self, count: int) -> dict[str, float]:
        """CPU µs a message: all, and the share of each kind of process."""
        kinds = {kind: spent * 1e6 / count for kind, spent in self.seconds_of.items()}
        return {"CPU µs": round(sum(kinds.values()), 2)} | {kind: round(spent, 2) for kind, spent in kinds.items()}

    def _sample_often(self) -> None:
        while not self._ended.wait(0.05):
            self._sample()
        self._sampling_s = time.thread_time()

    def _sample(self) -> None:
        spent: dict[int, tuple[str, float]] = {}
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                parents[int(stat.parent.name)] = int(fields[1])
                spent[int(stat.parent.name)] = fields[19], sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
        family, new = {os.getpid()}, {os.getpid()}
        while new := {pid for pid, parent in parents.items() if parent in new} - family:
            family |= new
        self._spent |= {(pid, spent[pid][0]): spent[pid][1] for pid in family & spent.keys()}
        for pid in family & spent.keys():
            self._kinds.setdefault((pid, spent[pid][0]), "Python, a worker")
            with contextlib.suppress(OSError, KeyError):
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                kind = "Java" if status["Name"].strip() == "java" else "Python, a worker"
                kind = "Python, the driver" if pid == os.getpid() else kind
                self._kinds[pid, spent[pid][0]] = kind
                self.peak_mb[kind] = max(self.peak_mb[kind], int(status["RssAnon"].split()[0]) / 1024)

    def memory(self) -> dict[str, Any]:
        return {"what": "most memory, MB", **{kind: round(mb) for kind, mb in self.peak_mb.items()}}


def tables(spark: Any, place: Path, count: int) -> Iterator[dict[str, Any]]:
    """The first round of each is not counted: Java compiles, and Python workers start."""
    import pyarrow as pa

    streams = [cues.Stream(flagged, "in", "middle", id="a", batch="arrow")]
    streams.append(cues.Stream(flagged_again, "middle", "out", id="b", batch="arrow"))

    def queues(own: Path, kind: str, count: int) -> Usage:
        with cues.open(own / "store", durability="process") as store:
            appender = store.queue("in").appender()
            for low in range(0, count, FILE_ROWS):
                appender.write_table(pa.Table.from_pylist(messages(low, min(count, low + FILE_ROWS))))
        options = {} if kind == "store" else {"queues": own / "queues"}
        graph = cues.Graph("g", streams, durability="process")
        with Usage() as usage, graph.start(engine="spark", spark=spark, store=own / "store", **options) as running:
            assert running.wait_idle(600)
            engine: Any = running.engine  # type: ignore[attr-defined]
            out = engine.queues["out"].last_index + 1 if kind == "store" else engine.driver.queues["out"].log(0).next
            assert out == count + 1
        return usage

    contenders: dict[str, Callable[[Path, int], Usage]] = {
        "queues in a store": lambda own, count: queues(own, "store", count),
        "queues in a directory": lambda own, count: queues(own, "directory", count),
        "mapInArrow, Parquet": lambda own, count: plain_tables(spark, own, count),
    }
    sizes = count // 4, count
    for turn in range(2):
        for name, contender in contenders.items():
            used = [contender(place / f"{name.replace(' ', '-')}-{turn}-{size}", size) for size in sizes[: turn + 1]]
            if turn:
                few, all = used
                each = {
                    kind: (all.seconds_of[kind] - few.seconds_of[kind]) * 1e6 / (count - sizes[0])
                    for kind in all.seconds_of
                }
                yield {"what": f"two functions of tables, {name}", **all.by_kind(count)}
                shown = {"CPU µs": sum(each.values()), **each}
                yield {"what": f"  each further row, {name}", **{kind: round(us, 2) for kind, us in shown.items()}}
                yield all.memory()


def plain_tables(spark: Any, place: Path, count: int) -> Usage:
    """The floor: the same rows and functions with what Spark itself has, and without queues."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def called(function: Any) -> Any:
        def call(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                yield from function(pa.Table.from_batches([batch])).to_batches()

        return call

    (place / "in").mkdir(parents=True)
    for low in range(0, count, FILE_ROWS):
        rows = pa.Table.from_pylist(messages(low, min(count, low + FILE_ROWS)))
        pq.write_table(rows, place / "in" / f"{low:012}.parquet")
    with Usage() as usage:
        fields = "id long, key long, delay double"
        table = spark.read.parquet(str(place / "in")).mapInArrow(
            called(flagged), f"{fields}, note string, late boolean"
        )
        table.write.parquet(str(place / "middle"))
        table = spark.read.parquet(str(place / "middle")).mapInArrow(called(flagged_again), f"{fields}, late boolean")
        table.write.parquet(str(place / "out"))
    assert spark.read.parquet(str(place / "out")).count() == count
    return usage


def mapped(batches: Iterator[Any], call: Callable[[dict[str, Any]], dict[str, Any]] = priced) -> Iterator[Any]:
    """Call :func:`priced` over packed messages, as a user's function of mapInArrow does."""
    import pyarrow as pa

    for rows in batches:
        values = [codec.pack(call(codec.unpack(value))) for value in rows.column("value").to_pylist()]
        yield pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], ["value"])


def unchanged(batches: Iterator[Any]) -> Iterator[Any]:
    """Make a dict of each row and return it: the least that a function of messages costs with Spark."""
    return mapped(batches, lambda message: message)


def parts(values: Path, out: Path, count: int) -> dict[str, float]:
    """CPU µs a message of each part of the work of :func:`mapped`, file by file in this process, without Spark."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    spent: dict[str, float] = {}

    def timed(part: str, call: Callable[[], Any]) -> Any:
        began = time.process_time()
        found = call()
        spent[part] = spent.get(part, 0.0) + (time.process_time() - began) * 1e6 / count
        return found

    def write(packed: list[bytes], file: Path) -> None:
        pq.write_table(pa.table({"value": pa.array(packed, pa.binary())}), file)

    out.mkdir()
    for file in sorted(values.iterdir()):
        given = timed("read", lambda: pq.read_table(file)["value"].to_pylist())
        given = timed("decode", lambda: [codec.unpack(value) for value in given])
        found = timed("call", lambda: [priced(message) for message in given])
        packed = timed("encode", lambda: [codec.pack(message) for message in found])
        timed("write", lambda: write(packed, out / file.name))
    return {"CPU µs": sum(spent.values())} | spent


def rows(spark: Any, place: Path, count: int, turns: int) -> Iterator[dict[str, Any]]:
    """The first turn is not counted: Java compiles, and Python workers start."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (place / "values").mkdir(parents=True)
    for low in range(0, count, FILE_ROWS):
        values = [codec.pack(message) for message in messages(low, min(count, low + FILE_ROWS))]
        pq.write_table(pa.table({"value": pa.array(values, pa.binary())}), place / "values" / f"{low:012}.parquet")

    def queues(own: Path) -> Usage:
        with cues.open(own / "store", durability="process") as store:
            appender = store.queue("in").appender()
            for low in range(0, count, 50_000):
                appender.write_many(messages(low, min(count, low + 50_000)))
        graph = cues.Graph("g", [cues.Stream(priced, "in", "out")], durability="process")
        how: dict[str, Any] = {"store": own / "store", "queues": own / "queues"}
        with Usage() as usage, graph.start(engine="spark", spark=spark, **how) as running:
            assert running.wait_idle(600)
            engine: Any = running.engine  # type: ignore[attr-defined]
            assert engine.driver.queues["out"].log(0).next == count + 1
        return usage

    def plain(own: Path, function: Any = mapped) -> Usage:
        with Usage() as usage:
            table = spark.read.parquet(str(place / "values")).mapInArrow(function, "value binary")
            table.write.parquet(str(own / "out"))
        assert spark.read.parquet(str(own / "out")).count() == count
        return usage

    def streaming(own: Path) -> Usage:
        with Usage() as usage:
            source = spark.readStream.schema("value binary").option("maxFilesPerTrigger", 4)
            table = source.parquet(str(place / "values")).mapInArrow(mapped, "value binary")
            sink = table.writeStream.format("parquet").option("checkpointLocation", str(own / "checkpoint"))
            sink.trigger(availableNow=True).start(str(own / "out")).awaitTermination()
        assert spark.read.parquet(str(own / "out")).count() == count
        return usage

    alone, nothing = "the parts, without Spark", "mapInArrow, rows returned"
    contenders: dict[str, Callable[[Path], dict[str, float]]] = {
        "--queues": lambda own: queues(own).by_kind(count),
        "mapInArrow": lambda own: plain(own).by_kind(count),
        nothing: lambda own: plain(own, unchanged).by_kind(count),
        "Structured Streaming, Parquet": lambda own: streaming(own).by_kind(count),
        alone: lambda own: parts(place / "values", own, count),
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for number, (name, contender) in enumerate(contenders.items()):
            line = contender(place / f"{number}-{turn}")
            if turn:
                found[name].append(line["CPU µs"])
                yield {"what": f"{name}, turn {turn}", **{part: round(us, 2) for part, us in line.items()}}
    medians = {name: statistics.median(each) for name, each in found.items()}
    for name, us in medians.items():
        floors = {f"× {floor}": round(us / medians[floor], 2) for floor in ("mapInArrow", nothing, alone)}
        yield {"what": f"{name}, median", "CPU µs": round(us, 2), **floors}


def floors(spark: Any, place: Path, count: int) -> Iterator[dict[str, Any]]:
    """The least that each part of a step costs. The best of three turns counts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    given = messages(0, count)
    packed = [codec.pack(message) for message in given]
    table = pa.Table.from_pylist(given)
    file = place.with_suffix(".parquet")

    def least(call: Callable[[], object], timer: Callable[[], float] = time.process_time) -> float:
        found = []
        for _ in range(3):
            began = timer()
            call()
            found.append(timer() - began)
        return min(found)

    parts: dict[str, Callable[[], object]] = {
        "decode, call and encode a message": lambda: [codec.pack(priced(codec.unpack(one))) for one in packed],
        "pack a message": lambda: [codec.pack(message) for message in given],
        "write a row, Parquet": lambda: pq.write_table(table, file, compression="zstd"),
        "read a row, Parquet": lambda: pq.read_table(file),
    }
    for what, call in parts.items():
        yield {"what": what, "CPU µs": round(least(call) * 1e6 / count, 2)}
    context = spark.sparkContext
    jobs = [least(lambda: context.parallelize([0], 1).map(str).collect(), time.monotonic) for _ in range(10)]
    yield {"what": "a job with one task", "s": round(statistics.median(jobs), 3)}


def slept(message: dict[str, Any]) -> dict[str, Any]:
    time.sleep(SLEEP_S)
    return message


def growth(place: Path) -> Iterator[dict[str, Any]]:
    """The first messages are not counted: they start the workers."""
    one = 0.0
    for slots in SLOTS:
        own, count = place / str(slots), round(SLOT_S / SLEEP_S) * slots
        graph = cues.Graph("g", [cues.Stream(slept, "in", "out")], durability="process")
        with (
            cues.spark.session(f"local[{slots}]") as spark,
            graph.start(engine="spark", spark=spark, store=own / "store", queues=own / "queues") as running,
        ):
            out = running.engine.driver.queues["out"]  # type: ignore[attr-defined]
            for messages in (slots * 20, slots * 60, count):
                end = out.log(0).next + messages
                began = time.monotonic()
                with Timed() as timed:
                    for n in range(messages):
                        running.send("in", {"n": n})
                    assert running.wait_idle(600)
                took = time.monotonic() - began
                assert out.log(0).next == end
        rate = count / took
        one = one or rate
        yield {
            "what": f"a function that sleeps {SLEEP_S * 1000:.0f} ms, {slots} slots",
            "messages/s": round(rate, 1),
            "efficiency": round(rate / one / slots, 3),
            "of calls that take no other time": round(rate * SLEEP_S / slots, 3),
            "steps": [step[0] for step in timed.steps],
        }


def flagged_again(table: Any) -> Any:
    return table.drop_columns("note")


def history(spark: Any, place: Path, files: int) -> Iterator[dict[str, Any]]:
    """The log names files that do not exist, which no step reads."""
    out = QueueDirectory(open_files(str(place / "queues")), "out", cues.QueueOptions())
    out.own("g")
    for low in range(0, files, 1000):
        numbers = range(low, low + 1000)
        new = [DataFile(f"g.priced-{low:012d}-{n:012x}.parquet", 1 + SMALL * n, SMALL, 1000, 0) for n in numbers]
        out._commit([_add(file) for file in new], new)
    out.checkpoint()
    spark.conf.set("spark.cues.mergeFiles", "0")
    real, maintenance._require_all = maintenance._require_all, lambda *_: set()
    try:
        for line in run(spark, place, cues.Stream(priced, "in", "out"), 0):
            yield {"files": files, **line}
    finally:
        maintenance._require_all = real
        spark.conf.unset("spark.cues.mergeFiles")


PARTS = ("steps", "state", "history", "frame", "rows", "tables", "floors", "slots")


def sections(chosen: argparse.Namespace, room: Path) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    parts = list(PARTS) if chosen.all else chosen.only.split(",")
    if "slots" in parts:  # it makes sessions of its own
        yield "slots", growth(room / "slots")
    if parts == ["slots"]:
        return
    with cues.spark.session(f"local[{chosen.cores}]") as spark:
        if "steps" in parts:
            yield "steps", run(spark, room / "steps", cues.Stream(priced, "in", "out"), chosen.count)
        if "state" in parts:
            yield "state", run(spark, room / "state", cues.Stream(counted, "in", "out", key="key"), chosen.count)
        if "history" in parts:
            for files in HISTORY:
                yield f"history {files}", history(spark, room / f"history-{files}", files)
        if "frame" in parts:
            yield "frame", frame(spark, room / "frame")
        if "rows" in parts:
            yield "rows", rows(spark, room / "rows", chosen.count, chosen.turns)
        if "tables" in parts:
            yield "tables", tables(spark, room / "tables", chosen.count)
        if "floors" in parts:
            yield "floors", floors(spark, room / "floors", chosen.count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--only", default="steps,state,history", help=f"of {', '.join(PARTS)}, with commas")
    parser.add_argument("--all", action="store_true", help="each part, and spark.py before them")
    parser.add_argument("--turns", type=int, default=3, help="of the part rows")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if unknown := set(chosen.only.split(",")) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is not a part: {', '.join(PARTS)}")
    if chosen.all:
        options = ["--count", str(chosen.count), "--cores", str(chosen.cores), *["--json"][: chosen.json]]
        subprocess.run([sys.executable, str(Path(__file__).with_name("spark.py")), *options], check=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as room:
        for name, lines in sections(chosen, Path(room)):
            for line in lines:
                if chosen.json:
                    print(json.dumps({"row": name.partition(" ")[0], **line}), flush=True)
                else:
                    print(f"{name:17} {line.pop('what'):52} {line}", flush=True)


if __name__ == "__main__":
    main()
