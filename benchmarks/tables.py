"""Tables from a file into a file, beside plain scripts: ``python benchmarks/tables.py [ROWS] [ROUNDS]``.

    CSV, JSON lines or Parquet → queue → a filter and a new column → queue → Parquet
    Parquet → queue → a filter and a new column → queue → CSV or JSON lines

beside the same in a plain polars and a plain pyarrow script, and from CSV to Parquet beside bytewax and dlt, if the
Python that ``PEERS_PYTHON`` names has them (``pip install bytewax 'dlt[filesystem,parquet]' pyarrow``). Each contestant
is a process of its own, which has only these rows to work on; the numbers are seconds of CPU of the process with its
children, the median of the rounds, which take turns. The outputs are compared. ``killed`` is the same graph, killed
with SIGKILL in the middle and run again: it has the same output. ``hop`` is a queue of tables read, checked, written
and committed by a function that returns its argument.
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = 2_000_000
ROUNDS = 3

GRAPH = """
import os
import pyarrow.compute as pc
import cues
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files

graph = cues.Graph("t")
source = os.environ["SOURCE"]
types = {"id": "int64", "at": "timestamp[us]", "city": "string", "price": "float64", "count": "int64"}
schema = {"csv": "infer", "jsonl": types}.get(source.rpartition(".")[2])
graph.add(cues.Source("rows", Files(source, schema=schema)))


@graph.stream("rows", "priced", batch="arrow")
def price(rows):
    rows = rows.filter(pc.greater(rows["price"], 50))
    return rows.append_column("total", pc.multiply(rows["price"], rows["count"]))


graph.add(FileSink(os.environ["OUT"], os.environ["FORMAT"], roll_bytes=1 << 40).sink("priced"))
"""
HOP = """
import os
import cues

graph = cues.Graph("hop")
graph.source("in")


@graph.stream("in", "out", batch="arrow")
def same(rows):
    return rows
"""
POLARS = """
import sys
import polars as pl

source, out = sys.argv[1:]
if source.endswith("csv"):
    rows = pl.scan_csv(source, try_parse_dates=True)
elif source.endswith("jsonl"):
    rows = pl.scan_ndjson(source).with_columns(pl.col("at").str.to_datetime())
else:
    rows = pl.scan_parquet(source)
price, count = pl.col("price"), pl.col("count")
rows = rows.filter(price > 50).with_columns(total=price * count)
{"csv": rows.sink_csv, "jsonl": rows.sink_ndjson, "parquet": rows.sink_parquet}[out.rpartition(".")[2]](out)
"""
PYARROW = """
import json
import sys
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq


class Lines:  # pyarrow has no writer of JSON
    def __init__(self, path, schema):
        self.file = open(path, "w")

    def write_table(self, rows):
        for row in rows.to_pylist():
            row["at"] = row["at"].isoformat()
            self.file.write(json.dumps(row) + "\\n")

    def close(self):
        self.file.close()


source, out = sys.argv[1:]
types = {"id": "int64", "at": pa.timestamp("us"), "city": "string", "price": "float64", "count": "int64"}
if source.endswith("csv"):
    batches = pa.csv.open_csv(source, read_options=pa.csv.ReadOptions(block_size=4 << 20))
elif source.endswith("jsonl"):
    parse = pa.json.ParseOptions(explicit_schema=pa.schema(types))
    batches = pa.json.read_json(source, parse_options=parse).to_batches()
else:
    batches = pq.ParquetFile(source).iter_batches(batch_size=50_000)
writer_of = {"csv": pa.csv.CSVWriter, "jsonl": Lines, "parquet": pq.ParquetWriter}[out.rpartition(".")[2]]
writer = None
for batch in batches:
    rows = pa.Table.from_batches([batch])
    rows = rows.filter(pc.greater(rows["price"], 50))
    rows = rows.append_column("total", pc.multiply(rows["price"], rows["count"]))
    writer = writer or writer_of(out, rows.schema)
    writer.write_table(rows)
writer.close()
"""
BYTEWAX = """
import sys
import pyarrow as pa
import pyarrow.parquet as pq
import bytewax.operators as op
from bytewax.connectors.files import CSVSource
from bytewax.dataflow import Dataflow
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.testing import run_main

source, out = sys.argv[1:]


class Part(StatelessSinkPartition):
    rows, writer = [], None

    def write_batch(self, items):
        self.rows += items
        if len(self.rows) >= 50_000:
            self.flush()

    def flush(self):
        table = pa.Table.from_pylist(self.rows)
        self.writer = self.writer or pq.ParquetWriter(out, table.schema)
        self.writer.write_table(table)
        self.rows = []

    def close(self):
        self.flush()
        self.writer.close()


class Parquet(DynamicSink):
    def build(self, step_id, worker_index, worker_count):
        return Part()


def price(row):
    price, count = float(row["price"]), int(row["count"])
    if price > 50:
        return {
            "id": int(row["id"]), "at": row["at"], "city": row["city"], "price": price, "count": count,
            "total": price * count,
        }


flow = Dataflow("t")
rows = op.input("rows", flow, CSVSource(source, batch_size=1_000))
op.output("out", op.filter_map("price", rows, price), Parquet())
run_main(flow)
"""
DLT = """
import os
import shutil
import sys
os.environ["RUNTIME__DLTHUB_TELEMETRY"] = "false"
import dlt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

source, out = sys.argv[1:]
shutil.rmtree("dlt", ignore_errors=True)


@dlt.resource(name="rows")
def rows():
    for batch in pa.csv.open_csv(source, read_options=pa.csv.ReadOptions(block_size=4 << 20)):
        some = pa.Table.from_batches([batch])
        some = some.filter(pc.greater(some["price"], 50))
        yield some.append_column("total", pc.multiply(some["price"], some["count"]))


target = dlt.destinations.filesystem(bucket_url="file://" + os.path.abspath("dlt/out"))
pipeline = dlt.pipeline("t", destination=target, dataset_name="d", pipelines_dir=os.path.abspath("dlt/state"))
pipeline.run(rows(), loader_file_format="parquet")
folder = "dlt/out/d/rows"
(found,) = [name for name in os.listdir(folder) if name.endswith(".parquet")]
os.replace(os.path.join(folder, found), out)
"""
PATHS = [
    ("csv", "parquet"), ("jsonl", "parquet"), ("parquet", "parquet"), ("parquet", "csv"), ("parquet", "jsonl"),
]  # fmt: skip


def make(folder: Path, rows: int) -> None:
    """Write the rows: a number, a time, a city of 1,000, a price and a count."""
    import numpy
    import polars
    import pyarrow as pa
    import pyarrow.csv as arrow_csv
    import pyarrow.parquet as pq

    dice = numpy.random.default_rng(1)
    times = pa.array(1_700_000_000_000_000 + numpy.arange(rows) * 1_000_000, pa.timestamp("us"))
    table = pa.table(
        {
            "id": numpy.arange(rows),
            "at": times,
            "city": [f"city-{number}" for number in dice.integers(0, 1_000, rows)],
            "price": numpy.round(dice.random(rows) * 100, 2),
            "count": dice.integers(0, 50, rows),
        }
    )
    arrow_csv.write_csv(table, folder / "rows.csv")
    pq.write_table(table, folder / "rows.parquet")
    polars.from_arrow(table).with_columns(polars.col("at").dt.to_string("iso:strict")).write_ndjson(
        folder / "rows.jsonl"
    )
    scripts = {"graph": GRAPH, "hop": HOP, "polars": POLARS, "pyarrow": PYARROW, "bytewax": BYTEWAX, "dlt": DLT}
    for name, text in scripts.items():
        (folder / f"with_{name}.py").write_text(text)


def peers() -> dict[str, str]:
    """Return the Python of each other product that is installed. Say which are not."""
    python = os.environ.get("PEERS_PYTHON", sys.executable)
    found = {}
    for name in ("bytewax", "dlt"):
        look = subprocess.run([python, "-c", f"import {name}, pyarrow"], capture_output=True, text=True)
        if look.returncode:
            print(f"{name} is left out: {look.stderr.strip().splitlines()[-1]}")
        else:
            found[name] = python
    return found


def cpu_of(run: Callable[[], Any]) -> float:
    """Return the seconds of CPU of the processes that ``run`` starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Bench:
    """The contestants over one folder, from one format into one."""

    def __init__(self, folder: Path, source: str, target: str) -> None:
        self.folder, self.source, self.target = folder, str(folder / f"rows.{source}"), target
        self._cues = str(Path(sys.executable).with_name("cues"))

    def script(self, name: str, python: str = sys.executable) -> Path:
        out = self.folder / f"{name}.out.{self.target}"
        quiet: Any = {} if python == sys.executable else {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([python, f"with_{name}.py", self.source, out.name], cwd=self.folder, check=True, **quiet)
        return out

    def start(self, kill_after: float | None = None) -> Path:
        """Run the graph, from nothing or killed after some seconds and again; return the file that it wrote."""
        store, out = self.folder / "store", self.folder / "out"
        for path in (store, out):
            shutil.rmtree(path, ignore_errors=True)
        environment = {**os.environ, "SOURCE": self.source, "OUT": str(out), "FORMAT": self.target}
        command = [self._cues, "run", "with_graph.py", "--store", "store"]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if kill_after is not None:
            process = subprocess.Popen(command, cwd=self.folder, env=environment, **quiet)
            time.sleep(kill_after)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert not list(out.glob(f"*.{self.target}")), "it was killed too late"
        subprocess.run(command, cwd=self.folder, env=environment, check=True, **quiet)
        (found,) = out.glob(f"*.{self.target}")
        return found


def same(first: Path, second: Path) -> None:
    import polars

    read: Any = {".csv": polars.read_csv, ".jsonl": polars.read_ndjson, ".parquet": polars.read_parquet}[first.suffix]
    one, two = (read(path).sort("id") for path in (first, second))
    times = [rows["at"] if rows["at"].dtype != polars.String else rows["at"].str.to_datetime() for rows in (one, two)]
    assert one.columns == two.columns and times[0].equals(times[1].cast(times[0].dtype))
    assert one.drop("at").equals(two.drop("at"))


def hop(folder: Path, rows: int) -> float:
    """Return microseconds of CPU a row of a hop, without the start of the process."""
    import pyarrow.parquet as pq

    import cues

    store = folder / "hop_store"
    shutil.rmtree(store, ignore_errors=True)
    table = pq.read_table(folder / "rows.parquet")
    sys.path.insert(0, str(folder))
    import with_hop as module  # type: ignore[import-not-found]

    with cues.Store(store) as opened:
        appender = opened.queue("in").appender()
        for at in range(0, rows, 50_000):
            appender.write_table(table.slice(at, 50_000))
        began = time.process_time()
        with module.graph.start(store=opened) as running:
            running.wait_idle()
        spent = time.process_time() - began
        assert opened.queue("out").to_arrow(columns=["id"])["id"].to_pylist() == list(range(rows))
    return spent * 1e6 / rows


def main(rows: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        make(folder, rows)
        print(f"{rows:,} rows of five columns; seconds of CPU, median of {rounds}\n")
        others = peers()
        print("| from | into | cues | polars | pyarrow | cues / polars | cues / pyarrow | others |")
        print("|---|---|---|---|---|---|---|---|")
        for source, target in PATHS:
            bench = Bench(folder, source, target)
            scripts = {"polars": sys.executable, "pyarrow": sys.executable}
            if (source, target) == PATHS[0]:
                scripts |= others
            spent: dict[str, list[float]] = {name: [] for name in ("cues", *scripts)}
            for _ in range(rounds):
                spent["cues"].append(cpu_of(bench.start))
                for name, python in scripts.items():
                    spent[name].append(cpu_of(functools.partial(bench.script, name, python)))
            (found,) = (folder / "out").glob(f"*.{target}")
            for name in scripts:
                same(found, folder / f"{name}.out.{target}")
            median = {name: statistics.median(each) for name, each in spent.items()}
            cues_s, polars_s, pyarrow_s = (median.pop(name) for name in ("cues", "polars", "pyarrow"))
            more = ", ".join(f"{name} {seconds:.2f}" for name, seconds in median.items())
            print(
                f"| {source} | {target} | {cues_s:.2f} | {polars_s:.2f} | {pyarrow_s:.2f} | {cues_s / polars_s:.1f} |"
                f" {cues_s / pyarrow_s:.1f} | {more} |",
                flush=True,
            )
            if target == "parquet":
                same(bench.start(kill_after=1.0), folder / "polars.out.parquet")
        print(f"\nKilled in the middle: the same output. Hop: {hop(folder, rows):.2f} µs a row.")


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    main(*(given + [ROWS, ROUNDS][len(given) :]))
