"""State by columns: the cost of a row in windows, aggregates and joins: ``python benchmarks/state.py [ROWS] [ROUNDS]``.

The rows are in a queue as tables: a key of 1,000, a time (1 ms apart, 1 in 100 up to 5 seconds late), and an integer.
Prints CPU microseconds a row of this process, the median of the rounds, in which all are run one after another:

    tables     the processor over the tables, with the commits of the store
    rows       the same processor, whose call with columns is taken away: one call a message
    polars     group_by over the same batches of 50,000 rows in memory, and the sums of their results: no store, no
               watermark, no late messages; for as of, join_asof of all rows; for counted windows and interval, nothing

The results of the three are compared. Of ``rows`` a fifth of the rows is measured. A join has every
second row in another queue.

The second table is of a state of many keys: all are counted, then 10 rows of 10 of them are. The cost of the second
step, with its commit, does not depend on the number of keys. (A start checks up to 50,000 rows of state besides.)
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
from cues.processors import aggregates, joins, windows
from cues.processors.reducers import count, sum

ROWS = 1_000_000
KEYS = 1_000
BATCH = 50_000
START = datetime(2026, 1, 31, tzinfo=UTC)
END = windows.watermark(START + timedelta(days=30))


def by_minute() -> cues.Stream:
    reduce = {"n": count(), "total": sum("v")}
    return windows.tumbling("m", "out", "1m", time="t", key="k", delay="10s", late="late", reduce=reduce)


def counted() -> cues.Stream:
    reduce = {"n": count(), "total": sum("v")}
    return windows.counted("m", "out", 20, time="t", key="k", within="10s", delay="10s", reduce=reduce)


def by_key() -> cues.Stream:
    return aggregates.aggregate("m", "out", by="k", every="1h", time="t", reduce={"n": count()})


def each() -> cues.Stream:
    return aggregates.aggregate("m", "out", by="k", reduce={"n": count()})


TWO = {"left": "m", "right": "other"}
JOINED: dict[str, Any] = {"time": "t", "key": "k", "delay": "10s", "late": "late", "how": "left"}


def as_of() -> cues.Stream:
    return joins.as_of(TWO, "out", **JOINED)


def interval() -> cues.Stream:
    return joins.interval(TWO, "out", after="1s", **JOINED)


def polars_as_of(frames: list[polars.DataFrame]) -> polars.DataFrame:
    left, right = (polars.concat(frames).gather_every(2, place).sort("t", maintain_order=True) for place in (0, 1))
    return left.join_asof(right, on="t", by="k", check_sortedness=False).select("k", "v", "v_right")


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


def found_joined(out: list[Any]) -> Any:
    rows = ((m["left"], m["right"]) for m in out)
    return ((left["k"], left["v"], -1 if right is None else right["v"]) for left, right in rows)


CASES: dict[str, tuple[Callable[[], cues.Stream], Callable[[Any], polars.DataFrame] | None, Callable[[Any], Any]]] = {
    "windows of a minute: count, sum": (by_minute, polars_by_minute, found_by_minute),
    "counted windows of 20, or 10 seconds": (counted, None, found_by_minute),
    "count by key, every hour": (by_key, polars_by_key, found_by_key),
    "count by key, each row": (each, polars_each, found_each),
    "as of": (as_of, polars_as_of, found_joined),
    "interval of a second": (interval, None, found_joined),
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
    queues = ["m"] if isinstance(stream.inputs, str) else list(TWO.values())
    for name in queues:
        graph.source(name)
    graph.add(stream)
    with testing.temporary_store(map_size=8 << 30) as store:
        for table in given:
            for number, name in enumerate(queues):
                rows = pa.array(range(number, table.num_rows, len(queues)))
                store.queue(name).appender().write_table(table.take(rows))
        for name in queues:
            store.queue(name).appender().write(END)
        start = time.process_time()
        testing.run_until_idle(graph, store)
        spent = time.process_time() - start
        return spent, testing.messages(store, "out")


def sides(name: str, given: list[pa.Table]) -> Iterator[tuple[str, float]]:
    make, of_polars, of_messages = CASES[name]
    spent, out = run(make, given, True)
    yield "tables", spent
    if of_polars is not None:
        frames: Any = [polars.from_arrow(table) for table in given]
        start = time.process_time()
        wanted = of_polars(frames)
        yield "polars", time.process_time() - start
        assert hash_of(of_messages(out)) == hash_of(wanted.fill_null(-1).iter_rows())
    few = given[: max(1, len(given) // 5)]
    spent, out_rows = run(make, few, False)
    yield "rows", spent * len(given) / len(few)
    assert hash_of(of_messages(out_rows)) == hash_of(of_messages(run(make, few, True)[1]))


def few_of(keys: int, rounds: int) -> tuple[float, float]:
    """Count rows of so many keys, then 10 rows; return CPU microseconds a key, and CPU milliseconds of the second."""
    graph = cues.Graph("g", [cues.Source("m", None), each()])
    names = [f"key {n}" for n in range(keys)]
    with testing.temporary_store(map_size=8 << 30) as store:
        queue = store.queue("m")
        for at in range(0, keys, BATCH):
            queue.appender().write_table(pa.table({"k": names[at : at + BATCH]}))
        start = time.process_time()
        few = []
        with graph.start(store=store) as running:
            running.wait_idle()
            all_s = time.process_time() - start
            for number in range(rounds):
                start = time.process_time()
                queue.appender().write_table(pa.table({"k": names[number :: keys // 10][:10]}))
                running.wait_idle()
                few.append(time.process_time() - start)
        counts = store.queue("out").to_arrow(columns=["n"])["n"].to_pylist()
        assert counts == [1] * keys + [2] * 10 * rounds
    return all_s * 1e6 / keys, statistics.median(few) * 1e3


def main(rows: int, rounds: int) -> None:
    given = tables(rows)
    print("| | rows | tables | polars | tables / rows | tables / polars |\n|---|---|---|---|---|---|")
    for name in CASES:
        costs: dict[str, list[float]] = {}
        for _ in range(rounds):
            for side, spent in sides(name, given):
                costs.setdefault(side, []).append(spent * 1e6 / rows)
        one, columns, other = (statistics.median(costs.get(side, [0])) for side in ("rows", "tables", "polars"))
        ratios = f"{columns / one:.3f} | {columns / other:.1f}" if other else f"{columns / one:.3f} |"
        print(f"| {name} | {one:.1f} | {columns:.2f} | {f'{other:.2f}' if other else ''} | {ratios} |", flush=True)
    print("\n| keys | all are counted, µs a key | then 10 of them, ms |\n|---|---|---|")
    for keys in (rows // 100, rows):
        all_us, few_ms = few_of(keys, 2 * rounds + 1)
        print(f"| {keys:,} | {all_us:.1f} | {few_ms:.1f} |", flush=True)


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    main(*(given + [ROWS, 3][len(given) :]))
