"""State by columns: the cost of a row in windows and aggregates: ``python benchmarks/state.py [ROWS] [ROUNDS]``.

The rows are in a queue as tables: a key of 1,000, a time (1 ms apart, 1 in 100 up to 5 seconds late), and an integer.
Prints CPU microseconds a row of this process, the median of the rounds, in which all are run one after another:

    tables     the processor over the tables, with the commits of the store
    rows       the same processor, whose call with columns is taken away: one call a message
    polars     group_by over the same batches of 50,000 rows in memory, and the sums of their results: no store, no
               watermark, no late messages

The results of the three are compared. Of ``rows`` a fifth of the rows is measured.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import polars
import pyarrow as pa

import cues
from cues import testing
from cues.processors import aggregates, windows
from cues.processors.reducers import count, sum

ROWS = 1_000_000
KEYS = 1_000
BATCH = 50_000
START = datetime(2026, 1, 31, tzinfo=UTC)
END = windows.watermark(START + timedelta(days=30))


def by_minute() -> cues.Stream:
    reduce = {"n": count(), "total": sum("v")}
    return windows.tumbling("m", "out", "1m", time="t", key="k", delay="10s", late="late", reduce=reduce)


def by_key() -> cues.Stream:
    return aggregates.aggregate("m", "out", by="k", every="1h", time="t", reduce={"n": count()})


def each() -> cues.Stream:
    return aggregates.aggregate("m", "out", by="k", reduce={"n": count()})


def polars_by_minute(frames: list[polars.DataFrame]) -> polars.DataFrame:
    minute = polars.col("t").dt.truncate("1m")
    some = [f.group_by("k", minute).agg(n=polars.len(), total=polars.col("v").sum()) for f in frames]
    return polars.concat(some).group_by("k", "t").agg(polars.col("n").sum(), polars.col("total").sum())


def polars_by_key(frames: list[polars.DataFrame]) -> polars.DataFrame:
    some = [f.group_by("k").agg(n=polars.len()) for f in frames]
    return polars.concat(some).group_by("k").agg(polars.col("n").sum())


def polars_each(frames: list[polars.DataFrame]) -> polars.DataFrame:
    return polars.concat(frames).select("k", n=polars.int_range(polars.len()).over("k") + 1)


def hash_of(rows: Any) -> int:
    """The rows in any order."""
    return hash(tuple(sorted(rows)))


def found_by_minute(out: list[Any]) -> Any:
    return ((m["k"], m["start"], m["n"], m["total"]) for m in out)


def found_by_key(out: list[Any]) -> Any:
    return {m["k"]: m["n"] for m in out}.items()


def found_each(out: list[Any]) -> Any:
    return ((m["k"], m["n"]) for m in out)


CASES: dict[str, tuple[Callable[[], cues.Stream], Callable[[Any], polars.DataFrame], Callable[[Any], Any]]] = {
    "windows of a minute: count, sum": (by_minute, polars_by_minute, found_by_minute),
    "count by key, every hour": (by_key, polars_by_key, found_by_key),
    "count by key, each row": (each, polars_each, found_each),
}


def tables(rows: int) -> list[pa.Table]:
    dice = random.Random(1)
    keys = [f"key {n}" for n in range(KEYS)]
    late = [dice.random() * 5 if dice.random() < 0.01 else 0 for _ in range(rows)]
    whole = pa.table(
        {
            "t": pa.array([START + timedelta(milliseconds=n) - timedelta(seconds=s) for n, s in enumerate(late)]),
            "k": pa.array(dice.choices(keys, k=rows)),
            "v": pa.array([dice.randrange(1_000_000) for _ in range(rows)]),
        }
    )
    return [whole.slice(at, BATCH) for at in range(0, rows, BATCH)]


def run(make: Callable[[], cues.Stream], given: list[pa.Table], by_columns: bool) -> tuple[float, list[Any]]:
    """The CPU seconds of a run, and its results."""
    stream = make()
    if not by_columns:
        inner: Any = stream.fn
        stream = cues.Stream(
            lambda message, process: inner(message, process), stream.inputs, stream.outputs, id=stream.id
        )
    graph = cues.Graph("g")
    graph.source("m")
    graph.add(stream)
    with testing.temporary_store(map_size=8 << 30) as store:
        for table in given:
            store.queue("m").appender().write_table(table)
        store.queue("m").appender().write(END)
        start = time.process_time()
        testing.run_until_idle(graph, store)
        spent = time.process_time() - start
        return spent, testing.messages(store, "out")


def sides(name: str, given: list[pa.Table]) -> Iterator[tuple[str, float]]:
    make, of_polars, of_messages = CASES[name]
    spent, out = run(make, given, True)
    yield "tables", spent
    frames: Any = [polars.from_arrow(table) for table in given]
    start = time.process_time()
    wanted = of_polars(frames)
    yield "polars", time.process_time() - start
    assert hash_of(of_messages(out)) == hash_of(wanted.iter_rows())
    few = given[: max(1, len(given) // 5)]
    spent, out_rows = run(make, few, False)
    yield "rows", spent * len(given) / len(few)
    assert out_rows == run(make, few, True)[1]


def main(rows: int, rounds: int) -> None:
    given = tables(rows)
    print("| | rows | tables | polars | tables / rows | tables / polars |\n|---|---|---|---|---|---|")
    for name in CASES:
        costs: dict[str, list[float]] = {}
        for _ in range(rounds):
            for side, spent in sides(name, given):
                costs.setdefault(side, []).append(spent * 1e6 / rows)
        one, columns, other = (statistics.median(costs[side]) for side in ("rows", "tables", "polars"))
        ratios = f"{columns / one:.3f} | {columns / other:.1f}"
        print(f"| {name} | {one:.1f} | {columns:.2f} | {other:.2f} | {ratios} |", flush=True)


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    main(*(given + [ROWS, 3][len(given) :]))
