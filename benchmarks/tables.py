"""Tables from a file into a file, beside plain scripts: ``python benchmarks/tables.py [ROWS] [ROUNDS]``.

    CSV or Parquet → queue → a filter and a new column → queue → Parquet

beside the same in a plain polars and a plain pyarrow script. Each contestant is a process of its own, which has only
these rows to work on; the numbers are seconds of CPU of the process with its children, the median of the rounds, which
take turns. The outputs are compared. ``killed`` is the same graph, killed with SIGKILL in the middle and run again: it
has the same output. ``hop`` is a queue of tables read, checked, written and committed by a function that returns its
argument.
"""

from __future__ import annotations

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
graph.add(cues.Source("rows", Files(source, schema="infer" if source.endswith("csv") else None)))


@graph.stream("rows", "priced", batch="arrow")
def price(rows):
    rows = rows.filter(pc.greater(rows["price"], 50))
    return rows.append_column("total", pc.multiply(rows["price"], rows["count"]))


graph.add(FileSink(os.environ["OUT"], "parquet", roll_bytes=1 << 40).sink("priced"))
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
rows = pl.scan_csv(source, try_parse_dates=True) if source.endswith("csv") else pl.scan_parquet(source)
price, count = pl.col("price"), pl.col("count")
rows.filter(price > 50).with_columns(total=price * count).sink_parquet(out)
"""
PYARROW = """
import sys
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

source, out = sys.argv[1:]
if source.endswith("csv"):
    batches = pa.csv.open_csv(source, read_options=pa.csv.ReadOptions(block_size=4 << 20))
else:
    batches = pq.ParquetFile(source).iter_batches(batch_size=50_000)
writer = None
for batch in batches:
    rows = pa.Table.from_batches([batch])
    rows = rows.filter(pc.greater(rows["price"], 50))
    rows = rows.append_column("total", pc.multiply(rows["price"], rows["count"]))
    writer = writer or pq.ParquetWriter(out, rows.schema)
    writer.write_table(rows)
writer.close()
"""


def make(folder: Path, rows: int) -> None:
    """Write the rows: a number, a time, a city of 1,000, a price and a count."""
    import numpy
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
    for name, text in (("graph", GRAPH), ("hop", HOP), ("with_polars", POLARS), ("with_pyarrow", PYARROW)):
        (folder / f"{name}.py").write_text(text)


def cpu_of(run: Callable[[], Any]) -> float:
    """Return the seconds of CPU of the processes that ``run`` starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Bench:
    """The contestants over one folder."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder, self.source = folder, str(folder / source)
        self._cues = str(Path(sys.executable).with_name("cues"))

    def script(self, name: str) -> Path:
        out = self.folder / f"{name}.out.parquet"
        subprocess.run([sys.executable, f"{name}.py", self.source, out.name], cwd=self.folder, check=True)
        return out

    def start(self, kill_after: float | None = None) -> Path:
        """Run the graph, from nothing or killed after some seconds and again; return the file that it wrote."""
        store, out = self.folder / "store", self.folder / "out"
        for path in (store, out):
            shutil.rmtree(path, ignore_errors=True)
        environment = {**os.environ, "SOURCE": self.source, "OUT": str(out)}
        command = [self._cues, "run", "graph.py", "--store", "store"]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if kill_after is not None:
            process = subprocess.Popen(command, cwd=self.folder, env=environment, **quiet)
            time.sleep(kill_after)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert not list(out.glob("*.parquet")), "it was killed too late"
        subprocess.run(command, cwd=self.folder, env=environment, check=True, **quiet)
        (found,) = out.glob("*.parquet")
        return found


def same(first: Path, second: Path) -> None:
    import pyarrow.parquet as pq

    one, two = (pq.read_table(path) for path in (first, second))
    assert one.num_rows == two.num_rows and one.column_names == two.column_names
    for name in one.column_names:
        assert one[name].cast(two[name].type).equals(two[name]), name


def hop(folder: Path, rows: int) -> float:
    """Return microseconds of CPU a row of a hop, without the start of the process."""
    import pyarrow.parquet as pq

    import cues

    store = folder / "hop_store"
    shutil.rmtree(store, ignore_errors=True)
    table = pq.read_table(folder / "rows.parquet")
    sys.path.insert(0, str(folder))
    import hop as module  # type: ignore[import-not-found]

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
        print("| from | cues | polars | pyarrow | cues / polars | cues / pyarrow |\n|---|---|---|---|---|---|")
        for source in ("rows.csv", "rows.parquet"):
            bench = Bench(folder, source)
            spent: dict[str, list[float]] = {"cues": [], "polars": [], "pyarrow": []}
            for _ in range(rounds):
                spent["cues"].append(cpu_of(lambda bench=bench: bench.start()))  # type: ignore[misc]
                for name in ("polars", "pyarrow"):
                    script = f"with_{name}"
                    spent[name].append(cpu_of(lambda bench=bench, script=script: bench.script(script)))  # type: ignore[misc]
            (found,) = (folder / "out").glob("*.parquet")
            for name in ("polars", "pyarrow"):
                same(found, folder / f"with_{name}.out.parquet")
            cues_s, polars_s, pyarrow_s = (statistics.median(each) for each in spent.values())
            print(
                f"| {source[5:]} | {cues_s:.2f} | {polars_s:.2f} | {pyarrow_s:.2f} | {cues_s / polars_s:.1f} |"
                f" {cues_s / pyarrow_s:.1f} |",
                flush=True,
            )
            same(bench.start(kill_after=1.0), folder / "with_polars.out.parquet")
        print(f"\nKilled in the middle: the same output. Hop: {hop(folder, rows):.2f} µs a row.")


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    main(*(given + [ROWS, ROUNDS][len(given) :]))
