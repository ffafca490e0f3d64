"""Delays by airline, in columns from a CSV file into Parquet: ``python examples/delays.py``.

It does what ten lines of polars do, and it survives ``kill -9`` at any moment: the next run continues.
"""

from pathlib import Path

import polars as pl

import cues
from cues.processors import aggregates
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files
from cues.processors.reducers import count, mean

COLUMNS = ["time_hour", "carrier", "origin", "dest", "dep_delay", "arr_delay"]
ROWS = Files(Path(__file__).parent / "data" / "flights.csv.gz", schema="infer", columns=COLUMNS)
out = FileSink("out", "parquet")
graph = cues.Graph("delays", [cues.Source("rows", ROWS)], store="data", errors="errors")


@graph.stream("rows", "flights", batch="polars")
def arrived(rows):
    """Keep the flights that arrived, with their delays as numbers, and the minutes gained in the air."""
    rows = rows.filter(pl.col("arr_delay") != "NA").with_columns(pl.col("dep_delay", "arr_delay").cast(pl.Int64))
    return rows.with_columns(gained=pl.col("dep_delay") - pl.col("arr_delay"))


reduce = {"flights": count(), "late": mean("arr_delay"), "gained": mean("gained")}
graph.add(aggregates.aggregate("flights", "totals", by="carrier", reduce=reduce))
graph.add(out.sink("flights"))

if __name__ == "__main__":
    with graph.start() as running:
        running.wait_done()
        totals = pl.from_arrow(running.store.queue("totals").to_arrow()).unique("carrier", keep="last")
    print(*out.finished(), totals.sort("carrier").write_csv(float_precision=1), sep="\n")
