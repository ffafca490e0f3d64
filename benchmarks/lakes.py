"""Rows into Delta and Iceberg tables, beside their libraries alone: ``python benchmarks/lakes.py [ROWS] [ROUNDS]``.

    a queue of tables or of dicts  →  DeltaTarget, IcebergTarget
    the same tables or dicts       →  write_deltalake(…, mode="append"), pyiceberg's Table.append

Prints CPU microseconds a row of this process, and the ratio to the library in the same round: medians of the rounds,
in which all ways take turns. Their tables are compared. Dicts become a table by ``pyarrow.Table.from_pylist`` where the
library is alone, with a commit for each 100,000 rows. Cues reads the rows from its queue, and commits the position with
them; its steps have 100,000 rows at most.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa

import cues
from cues import testing
from cues.processors.delta import DeltaTarget
from cues.processors.iceberg import IcebergTarget

ROWS = 1_000_000
ROUNDS = 5
STEP_ROWS = 100_000
"""Rows of a commit: as many as the page of each sink advises."""
SCHEMA = pa.schema(
    {"id": pa.int64(), "at": pa.timestamp("us"), "city": pa.string(), "price": pa.float64(), "count": pa.int64()}
)


Found = tuple[int, pa.Table]
"""The number of commits of a table, and its rows."""


def spent(work: Callable[[], Any]) -> float:
    """Return the seconds of CPU of a call, in all threads of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rows_of(count: int) -> pa.Table:
    begin, cities = datetime(2026, 1, 1), ("Rome", "Oslo", "Lima", "Kyoto", "Accra")
    return pa.table(
        {
            "id": pa.array(range(count), pa.int64()),
            "at": pa.array([begin + timedelta(seconds=n) for n in range(count)], pa.timestamp("us")),
            "city": pa.array([cities[n % 5] for n in range(count)]),
            "price": pa.array([n % 1_000 / 4 for n in range(count)]),
            "count": pa.array([n % 17 for n in range(count)], pa.int64()),
        },
        SCHEMA,
    )


def catalog(path: Path) -> dict[str, str]:
    path.mkdir(parents=True, exist_ok=True)
    return {"type": "sql", "uri": f"sqlite:///{path}/catalog.db", "warehouse": f"file://{path}"}


def target_of(kind: str, path: Path) -> Any:
    """Return the sink's target of a new table, which is made."""
    path.mkdir(parents=True)
    delta, iceberg = DeltaTarget(path / "t", schema=SCHEMA), IcebergTarget
    target = delta if kind == "Delta" else iceberg("lake.t", catalog=catalog(path), schema=SCHEMA)
    target.__cues_prepare__()
    return target


def ours(kind: str, path: Path, parts: list[Any]) -> tuple[float, Found]:
    """Return the seconds in which the sink writes a queue, and what the table has then."""
    target = target_of(kind, path)
    with testing.temporary_store(map_size=4 << 30) as store:
        appender = store.queue("q").appender()
        for part in parts:
            (appender.write_table if isinstance(part, pa.Table) else appender.write_many)(part)
        graph = cues.Graph("g", [cues.Source("q"), target.sink("q", batch_size=STEP_ROWS, step_s=None)])
        seconds = spent(lambda: testing.run_until_idle(graph, store))
    return seconds, found(kind, target)


def alone(kind: str, path: Path, parts: list[Any]) -> tuple[float, Found]:
    """Return the seconds in which the library appends the parts, and what the table has then."""
    target = target_of(kind, path)

    def tables() -> Iterator[pa.Table]:
        for part in parts:
            yield part if isinstance(part, pa.Table) else pa.Table.from_pylist(part, SCHEMA)

    def write() -> None:
        table = target.open()
        for rows in tables():
            if kind == "Delta":
                deltalake.write_deltalake(table, rows, mode="append")
            else:
                table.append(rows)

    return spent(write), found(kind, target)


def found(kind: str, target: Any) -> Found:
    table = target.open()
    commits = table.version() if kind == "Delta" else len(table.snapshots())
    rows = table.to_pyarrow_table() if kind == "Delta" else table.scan().to_arrow()
    return commits, rows.sort_by("id").cast(SCHEMA)


def main(count: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    rows = rows_of(count)
    tables = [rows.slice(start, STEP_ROWS) for start in range(0, count, STEP_ROWS)]
    given = {"tables": tables, "dicts": [part.to_pylist() for part in tables]}
    times: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    steps: dict[tuple[str, str], str] = {}
    for turn in range(rounds):
        for kind in ("Delta", "Iceberg"):
            for shape, parts in given.items():
                with tempfile.TemporaryDirectory() as folder:
                    ways = [(ours, "ours"), (alone, "alone")][:: 1 if turn % 2 else -1]
                    done = {name: way(kind, Path(folder, name), parts) for way, name in ways}
                (mine, (commits, written)), (theirs, (others, wanted)) = done["ours"], done["alone"]
                assert written == wanted, (kind, shape)
                times[kind, shape].append((mine, theirs))
                steps[kind, shape] = f"{commits}, {others}"
    print("| format | rows | Cues, µs | library alone, µs | ratio | rounds | commits |\n|---|---|---|---|---|---|---|")
    for (kind, shape), pairs in times.items():
        mine, theirs = (statistics.median(each) / count * 1e6 for each in zip(*pairs))
        ratios = sorted(one / other for one, other in pairs)
        print(
            f"| {kind} | {shape} | {mine:.2f} | {theirs:.2f} | **{statistics.median(ratios):.2f}** |"
            f" {ratios[0]:.2f}–{ratios[-1]:.2f} | {steps[kind, shape]} |"
        )


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:]), *(ROWS, ROUNDS)[len(sys.argv) - 1 :])
