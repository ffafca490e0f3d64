"""Databases by columns: the same rows, values and errors as row by row; and each row once, whenever a process dies."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from datetime import time as clock
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pytest
import seeds
from children import Child
from contracts_sinks import POSTGRES, database
from postgres import Postgres
from sets import slow_except
from test_processors_sql import Presented
from test_processors_tables import change

import cues
from cues import codec, testing
from cues.errors import CheckpointError, InvalidArgument
from cues.processors import columns, databases, sql_sink
from cues.processors.sql_sink import Table
from cues.processors.sql_source import Rows

pa = pytest.importorskip("pyarrow")
pytest.importorskip("sqlalchemy")

NEVER = 1 << 30
"""In place of ``MANY_ROWS``: all is written by statements with parameters."""


@pytest.fixture(params=slow_except(["db", "duckdb"], ["db", "duckdb", "postgres"]))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "duckdb":
        pytest.importorskip("duckdb")
        pytest.importorskip("pytz")
    if request.param == "postgres":
        POSTGRES[:] = [request.getfixturevalue("postgres")]
    return database(tmp_path, request.param)


def kind_of(target: str) -> str:
    return "postgres" if "://" in target else target.rpartition(".")[2]


# --- sinks ------------------------------------------------------------------------------------------

NOON = datetime(2024, 2, 29, 12, 0, 0, 5)
VALUES: dict[str, tuple[Any, list[Any]]] = {
    "int64": (pa.int64(), [0, -5, 7, 300, 1 << 60, -(1 << 63)]),
    "int16": (pa.int16(), [0, -5, 300]),
    "uint8": (pa.uint8(), [0, 200]),
    "uint64": (pa.uint64(), [0, 1 << 63]),
    "float64": (pa.float64(), [0.5, -0.0, 3.0, 0.1, 1e300, float("nan"), float("inf"), 1.0000000596046448]),
    "float32": (pa.float32(), [0.5, 0.10000000149011612, 3.0]),
    "bool": (pa.bool_(), [True, False]),
    "string": (
        pa.string(),
        ["", "a", 'say "hi"', "two\nlines", "\\.", "a\n\\.\nb", "\\N", "é%?", "007", "7", "\t|,", "null", " x "],
    ),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), ["", "a", "long enough"]),
    "large_string": (pa.large_string(), ["", "a"]),
    "uuid as text": (pa.string(), ["00000000-0000-0000-0000-000000000007"]),
    "binary": (pa.binary(), [b"", b"\0\xff", b"\\x41", b'"']),
    "date": (pa.date32(), [date(1, 1, 1), date(2024, 2, 29), date(9999, 12, 31)]),
    "us": (pa.timestamp("us"), [NOON, datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)]),
    "ms": (pa.timestamp("ms"), [NOON.replace(microsecond=0)]),
    "ns": (pa.timestamp("ns"), [NOON]),
    "utc": (pa.timestamp("us", "UTC"), [NOON.replace(tzinfo=UTC), datetime(1, 1, 2, tzinfo=UTC)]),
    "berlin": (pa.timestamp("us", "Europe/Berlin"), [NOON.replace(tzinfo=UTC)]),
    "time": (pa.time64("us"), [clock(1, 2, 3, 4), clock(0)]),
    "decimal(10, 2)": (pa.decimal128(10, 2), [Decimal("1.50"), Decimal("-0.01"), Decimal("12345678.90")]),
    "decimal(20, 8)": (pa.decimal128(20, 8), [Decimal("0.00000001"), Decimal("1.50000000")]),
    "list": (pa.list_(pa.int64()), [[], [1, None]]),
    "null": (pa.null(), []),
}
DDL = {
    "db": [
        "bigint", "double precision", "numeric", "boolean", "text", "varchar(5)", "blob", "date", "timestamp", "string",
        "character int", "",
    ],
    "duckdb": [
        "bigint", "tinyint", "utinyint", "hugeint", "ubigint", "double", "real", "decimal(38, 9)", "decimal(12, 4)",
        "boolean", "varchar", "blob", "date", "timestamp", "timestamptz", "timestamp_s", "time", "uuid", "json",
        "bigint[]",
    ],
    "postgres": [
        "bigint", "smallint", "double precision", "real", "numeric", "numeric(12, 4)", "numeric(5, -2)", "boolean",
        "text", "varchar", "varchar(5)", "char(5)", "bytea", "date", "timestamp", "timestamptz", "timestamp(0)", "time",
        "uuid", "jsonb", "bigint[]", "inet",
    ],
}  # fmt: skip


class Undo(Exception):
    pass


class Runs:
    """The messages of a step, of which some lie on the queue as columns."""

    def __init__(self, *runs: Any) -> None:
        self._runs = runs

    def runs(self) -> Iterator[Any]:
        yield from self._runs


def written(table: Table, messages: Any, many: int = 2, order: str = "id", before: Any = None) -> Any:
    """The rows of the table after a write, which is undone; or the error of the write."""
    found: Any = None
    presented = cast(cues.Process, Presented({"g.save.q": (1, 2)}))
    try:
        with pytest.MonkeyPatch.context() as patch, table.transaction(presented) as opened:
            if before is not None:
                opened.connection.write(before)
            patch.setattr(sql_sink, "MANY_ROWS", many)
            opened.connection.write(messages)
            # By the dialect's text of all values, since the driver cannot read some.
            found = [repr(row) for row in opened.connection.rows(f"select * from {table.table} order by {order}")]
            raise Undo
    except Undo:
        return found
    except Exception as error:
        return error


def three_ways(table: Table, rows: pa.Table, **options: Any) -> Any:
    """Write rows by statements, many at once, and as columns; the result, after it was compared."""
    dicts = columns.dicts(rows, "t")
    found = written(table, dicts, NEVER, **options)
    for messages in (dicts, rows, Runs(rows)):
        other = written(table, messages, **options)
        assert isinstance(other, Exception) == isinstance(found, Exception), (rows, other, found)
        assert isinstance(found, Exception) or other == found, rows
    return found


@pytest.mark.parametrize("seed", seeds.among(range(8), fast=0))
def test_columns_of_all_types_are_written_as_their_values_one_by_one(target: str, seed: int) -> None:
    """Where a row fails alone, its error is the same; the other rows are written together."""
    dice = random.Random(seed)
    kinds = DDL[kind_of(target)]
    change(target, *(f"create table t{at} (id bigint, v {ddl}, w {ddl})" for at, ddl in enumerate(kinds)))
    direct: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(databases, "as_csv", _noted(direct, databases.as_csv))
        patch.setattr(databases.Connection, "lent", _noted(direct, databases.Connection.lent))
        for at, ddl in enumerate(kinds):
            table = Table(target, f"t{at}", ["id", "v", "w"])
            for name in dice.sample(sorted(VALUES), 5):
                type, values = VALUES[name]
                taken = [None if dice.random() < 0.2 else dice.choice(values or [None]) for _ in range(12)]
                rows = pa.table({"w": pa.nulls(12, type), "id": range(12), "v": pa.array(taken, type)})
                if isinstance(three_ways(table, rows), Exception):
                    alone = [written(table, columns.dicts(rows.slice(n, 1), "t"), NEVER) for n in range(12)]
                    for n, error in enumerate(alone):
                        again = written(table, rows.slice(n, 1), many=10)
                        assert str(again) == str(error), (ddl, name, n)
                    good = rows.filter([not isinstance(error, Exception) for error in alone])
                    assert not isinstance(three_ways(table, good), Exception), (ddl, name, good)
            table.close()
    assert bool(direct) == (kind_of(target) != "db")


def _noted(noted: set[str], fn: Any) -> Any:
    def note(*arguments: Any) -> Any:
        noted.add(str(arguments[-1].schema))
        return fn(*arguments)

    return note


KEYS = {
    "bigint": "int64", "text": "string", "date": "date", "timestamp": "us", "boolean": "bool", "numeric(20, 8)":
    "decimal(10, 2)", "double precision": "float64", "bytea": "binary", "timestamptz": "utc",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds.among(range(6), fast=1))
@pytest.mark.parametrize("mode", ["upsert", "delete"])
def test_keys_of_all_types_are_found_and_the_last_of_a_step_wins(target: str, mode: str, seed: int) -> None:
    dice = random.Random(seed)
    ddl = {"bytea": "blob"} if kind_of(target) != "postgres" else {}
    for at, (type, name) in enumerate(KEYS.items()):
        kind, values = VALUES[name]
        values = [value for value in values if value == value]
        type = ddl.get(type, type)
        change(target, f"create table t{at} (k {type}, l bigint, n bigint, s text, primary key (k, l))")

        def some(count: int, kind: Any = kind, values: Any = values) -> Any:
            drawn = {"k": pa.array([dice.choice(values) for _ in range(count)], kind)}
            drawn["l"] = pa.array([dice.randrange(2) for _ in range(count)], pa.int64())
            texts = pa.array([dice.choice(["", "é", None]) for _ in range(count)])
            return pa.table({**drawn, "n": range(count), "s": texts})

        before, table = some(5), Table(target, f"t{at}", ["k", "l", "n", "s"], mode="upsert", key=["k", "l"])
        if mode == "upsert":
            found = three_ways(table, some(20), order="k, l", before=before)
            parts = [some(9), columns.dicts(some(9), "t"), some(9)]
            together = [row for part in parts for row in (part if isinstance(part, list) else columns.dicts(part, "t"))]
            many = written(table, Runs(*parts), order="k, l", before=before)
            one = written(table, together, NEVER, order="k, l", before=before)
            assert many == one or (isinstance(many, Exception) and isinstance(one, Exception)), (many, one)
            assert kind_of(target) == "db" or not isinstance(found, Exception) or type == "numeric(20, 8)", found
        else:
            presented = cast(cues.Process, Presented({"g.save.q": (1, 2)}, id="g.fill"))
            with contextlib.suppress(ValueError), table.transaction(presented) as opened:
                opened.connection.write(before)
            gone = Table(target, f"t{at}", ["k", "l", "n", "s"], mode="delete", key=["k", "l"])
            three_ways(gone, some(4).select(["n", "l", "k"]), order="k, l")
            gone.close()
        table.close()


def poured(table: Table, store: cues.Store, *tables: Any, **options: Any) -> list[Any]:
    """Write tables from a queue; return the error messages."""
    for rows in tables:
        store.queue("q").appender().write_table(rows)
    graph = cues.Graph("g", [cues.Source("q", None), table.sink("q", **options)], errors="errors")
    testing.run_until_idle(graph, store)
    table.close()
    return testing.messages(store, "errors")


def test_rows_that_the_database_refuses_fail_alone(target: str, store: cues.Store) -> None:
    change(target, "create table t (id bigint primary key, n integer not null check (n < 900), s text)")
    change(target, "insert into t values (17, 0, null)")
    rows = {"id": list(range(200)), "n": list(range(200)), "s": ["x"] * 200}
    rows["n"][30], rows["n"][150], rows["id"][190] = None, 901, 189
    errors = poured(Table(target, "t", ["id", "n", "s"]), store, pa.table(rows))
    assert [message["id"] for error in errors for message in error["err.proc/messages"]["q"]] == [17, 30, 150, 189]
    good = [n for n in range(200) if n not in (30, 150, 190)]
    assert [id for (id,) in change(target, "select id from t order by id")] == good


def test_columns_that_do_not_fit_fail_with_each_message(target: str, store: cues.Store) -> None:
    table = Table(target, "t", {"id": "integer", "s": "text"}, mode="upsert", key="id")
    given = [
        pa.table({"id": [1] * 20, "s": ["a"] * 20, "x": [1] * 20}), pa.table({"id": [2] * 20}),
        pa.table({"id": pa.array([None, 3]), "s": ["a", "b"]}), pa.table({"s": ["d", "e"] * 20, "id": [4, 5] * 20}),
    ]  # fmt: skip
    errors = poured(table, store, *given)
    assert len(errors) == 41
    assert change(target, "select id, s from t order by id") == [(3, "b"), (4, "d"), (5, "e")]


def test_no_row_becomes_a_dict(target: str, store: cues.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"id": "integer", "half": "float", "s": "text", "at": "timestamp", "raw": "bytes", "price": "decimal"}
    rows = pa.table(
        {
            "id": range(3_000), "half": [n / 2 for n in range(3_000)], "s": [f"x{n}" for n in range(3_000)],
            "at": pa.array([NOON.replace(tzinfo=UTC)] * 3_000), "raw": [b"\0"] * 3_000,
            "price": pa.array([Decimal("1.5")] * 3_000, pa.decimal128(9, 2)),
        }
    )  # fmt: skip
    for place in ("cues.records.columns.rows", "cues.processors.columns.dicts"):
        monkeypatch.setattr(place, lambda *_: pytest.fail("a dict"))
    assert poured(Table(target, "t", types), store, rows) == []
    assert change(target, "select count(*), sum(id), min(half), max(s) from t") == [(3_000, 4_498_500, 0, "x999")]


@pytest.mark.slow
def test_copy_is_not_used_where_an_insert_does_something_else(postgres: Postgres, store: cues.Store) -> None:
    """Into a view, a table with a rule, and one whose identity is always generated."""
    url = postgres.database()
    change(
        url,
        "create table base (id bigint, n bigint)",
        "create view v as select id, n from base",
        "create table r (id bigint, n bigint)",
        "create rule twice as on insert to r do also insert into base values (new.id, -new.n)",
        "create table i (id bigint generated always as identity, n bigint)",
        "create table plain (id bigint, n bigint)",
    )
    graph = cues.Graph("g", [cues.Source("q", None)], errors="errors")
    for name, copies in (("v", False), ("r", False), ("i", False), ("plain", True)):
        table = Table(url, name, ["id", "n"])
        table.__cues_prepare__()
        assert table.copies is copies
        graph.add(table.sink("q", id=name))
    store.queue("q").appender().write_table(pa.table({"id": range(20), "n": range(20)}))
    testing.run_until_idle(graph, store)
    assert [error["err.proc/config"]["id"] for error in testing.messages(store, "errors")] == ["g.i"] * 20
    assert change(url, "select count(*), sum(n) from base") == [(40, 0)]
    assert change(url, "select count(*) from plain") == [(20,)]


@pytest.mark.slow
@pytest.mark.parametrize("as_dicts", [False, True])
def test_failures_of_the_database_in_a_copy_stop_the_sink(postgres: Postgres, as_dicts: bool) -> None:
    """A lost connection, and a transaction that another one disturbed, which is worth a repetition."""
    import sqlalchemy as sa

    from cues.checkpoints import SQLCheckpoint

    url = postgres.database()
    engine = sa.create_engine(url, isolation_level="REPEATABLE READ")
    change(url, "create table t (id bigint primary key, n bigint)", "insert into t values (5, 0)")
    rows: Any = pa.table({"id": range(20), "n": range(20)})
    rows = rows.to_pylist() if as_dicts else rows
    presented = cast(cues.Process, Presented({"g.save.q": (1, 2)}))
    table = Table(SQLCheckpoint(engine), "t", ["id", "n"])
    with pytest.raises(CheckpointError, match="failed") as lost, table.transaction(presented) as opened:
        ((pid,),) = opened.connection.rows("select pg_backend_pid()")
        change(url, f"select pg_terminate_backend({pid})")
        time.sleep(0.2)
        opened.connection.write(rows)
    assert not lost.value.again
    upserts = Table(SQLCheckpoint(engine), "t", ["id", "n"], mode="upsert", key="id")
    with pytest.raises(CheckpointError, match="failed") as disturbed, upserts.transaction(presented) as opened:
        change(url, "update t set n = 1")
        opened.connection.write(rows)
    assert disturbed.value.again
    with upserts.transaction(presented) as opened:
        opened.connection.write(rows)
    assert change(url, "select count(*), sum(n) from t") == [(20, 190)]
    engine.dispose()


def test_two_writes_of_one_transaction_are_both_there(target: str) -> None:
    table = Table(target, "t", {"id": "integer", "n": "integer"}, mode="upsert", key="id")
    with table.transaction(cast(cues.Process, Presented({"g.save.q": (1, 2)}))) as opened:
        opened.connection.write(pa.table({"id": range(30), "n": range(30)}))
        opened.connection.write(pa.table({"id": range(20, 50), "n": [0] * 30}))
        opened.connection.write({"id": 0, "n": 7})
    table.close()
    assert change(target, "select count(*), sum(n) from t") == [(50, 190 + 7)]


ROWS = 3_000


def run_child(path: str, url: str, mode: str) -> None:
    """Run a pipeline of columns to its end in this process; a test kills it on the way."""
    with cues.open(Path(path, "store"), durability="process") as store:
        if "q" not in store.queues():
            for start in range(0, ROWS, 100):
                ids = pa.array(range(start, start + 100))
                store.queue("q").appender().write_table(pa.table({"id": ids, "s": [f"x{n}" for n in range(100)]}))
        testing.run_until_idle(pipeline(url, mode, noted=True), store)


def pipeline(url: str, mode: str, noted: bool = False) -> cues.Graph:
    graph = cues.Graph("g")
    graph.source("q")

    def twice(rows: Any) -> Any:
        if noted:
            print("step", flush=True)
        return rows.append_column("n", pa.compute.multiply(rows["id"], 2))

    graph.add(cues.Stream(twice, "q", "r", batch="arrow", batch_size=300))
    table = Table(
        url, "t", {"id": "integer", "s": "text", "n": "integer"}, mode=mode, key="id" if mode != "append" else ()
    )
    graph.add(table.sink("r", batch_size=200))
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_random_kills_leave_each_row_of_columns_once(target: str, mode: str, tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    code = "import sys; from test_sql_columns import run_child; run_child(*sys.argv[1:])"
    for _ in range(5):
        with Child(code, tmp_path, target, mode) as child, contextlib.suppress(AssertionError):
            for _ in range(chance.randint(1, 3)):
                child.line()
            time.sleep(chance.uniform(0, 0.03))
            child.kill()
    with Child(code, tmp_path, target, mode) as child:
        child.end()
    assert change(target, "select count(*), count(distinct id), sum(n), count(distinct s) from t") == [
        (ROWS, ROWS, ROWS * (ROWS - 1), 100)
    ]


# --- sources ----------------------------------------------------------------------------------------

READ = {
    "db": {
        "bigint": ["0", "-5", "9223372036854775807", "'x'", "1.5"], "double precision": ["0.5", "3", "'x'"],
        "text": ["''", "'é\n'", "7", "cast(x'ff' as text)"], "boolean": ["0", "1"], "numeric": ["1.5", "2", "'1'"],
        "blob": ["x''", "x'00ff'", "'x'"], "date": ["'2024-01-01'"], "": ["1", "'a'"],
    },
    "duckdb": {
        "bigint": ["0", "-5", "9223372036854775807"], "utinyint": ["200"], "hugeint": ["1"],
        "double": ["0.5", "'nan'", "'-inf'"], "real": ["0.1"],
        "varchar": ["''", "'é\n'", "'\"'", "'NULL'"], "boolean": ["true"],
        "blob": ["'\\x00\\xFF'::blob"], "date": ["'2024-02-29'", "'0001-01-01'", "'infinity'", "'12000-01-01'"],
        "timestamp": ["'2024-02-29 12:00:00.000005'", "'-infinity'"], "timestamptz": ["'2024-02-29 12:00:00+02'"],
        "timestamp_ns": ["'2024-02-29 12:00:00.000005'"], "decimal(12, 4)": ["1.5", "-0.0001"], "time": [
            "'01:02:03.000004'", "'24:00:00'"], "uuid": ["uuid()"], "bigint[]": ["[1, null]"],
    },
    "postgres": {
        "bigint": ["0", "-5", "9223372036854775807"], "smallint": ["7"], "double precision": [
            "0.5", "'nan'", "'-infinity'", "0.1", "1e-320"], "real": ["0.1"],
        "text": ["''", "'é\n'", "'\"'", "'NULL'", "'\\N'", "'\\.'", "E'a\n\\\\.\nb'", "' x '", "'t'"],
        "varchar(5)": ["''", "'é'"], "char(5)": ["'a'"], "boolean": ["true", "false"],
        "bytea": ["'\\x'", "'\\x00ff'"], "date": ["'2024-02-29'", "'0001-01-01'", "'infinity'", "'0044-03-15 BC'"],
        "timestamp": ["'2024-02-29 12:00:00.000005'", "'2024-02-29 12:00:00.1'", "'-infinity'", "'12000-01-01'"],
        "timestamptz": ["'2024-02-29 12:00:00+02'", "'0001-01-02 00:00:00+00'", "'infinity'"],
        "timestamp(0)": ["'2024-02-29 12:00:00'"], "numeric": ["1.5", "'nan'"], "numeric(12, 4)": ["1.5", "'nan'"],
        "numeric(5, -2)": ["1500"], "time": ["'01:02:03.000004'", "'24:00'"], "uuid": [f"'{'0' * 31}7'"],
        "jsonb": ["'{\"a\": null}'", "'null'"], "bigint[]": ["'{1,null}'"], "interval": ["'1 day'", "'1 month'"],
    },
}  # fmt: skip
"""The types of columns, and values of them as SQL."""


def expanded(items: Iterator[Any]) -> tuple[list[Any], list[Any], int]:
    """Rows as they are after a queue, the positions after tables (the row's place and the position), their number."""
    rows: list[Any] = []
    positions = []
    tables = 0
    for position, item in items:
        if isinstance(item, pa.Table):
            rows += map(repr, columns.dicts(item, "t"))
            tables += 1
        else:
            rows.append(repr(item))
        positions.append((len(rows), codec.pack(position)))
    return rows, positions, tables


def same_rows(source: Rows) -> tuple[int, int]:
    """Compare both ways, also after each position of a table, each way; return the number of rows and of tables."""
    by_rows, after_rows, _ = expanded(source(None))
    by_columns, after_tables, tables = expanded(source.in_columns(None))
    assert by_columns == by_rows
    assert set(after_tables) <= set(after_rows)
    for place, position in after_tables[:3]:
        for way in (source, source.in_columns):
            assert expanded(way(codec.unpack(position)))[0] == by_rows[place:]
    return len(by_rows), tables


@pytest.mark.parametrize("seed", seeds.among(range(8), fast=0))
def test_rows_by_columns_are_rows_one_by_one(target: str, seed: int) -> None:
    dice = random.Random(seed)
    found = set()
    for at, (type, values) in enumerate(READ[kind_of(target)].items()):
        rare = dice.random() < 0.5
        rows = []
        for n in range(30):
            value = dice.choice(values[:2] if rare and n != 17 else values)
            rows.append(f"({n // 4}, {n}, {'null' if dice.random() < 0.1 else value})")
        change(
            target,
            f"create table t{at} (a integer not null, b bigint not null, v {type})",
            f"insert into t{at} values {', '.join(dice.sample(rows, len(rows)))}".replace("%", "%%"),
        )
        count, tables = same_rows(Rows(target, f"t{at}", ["a", "b"], page_rows=dice.choice([5, 7, 100])))
        assert count == 30
        if tables:
            found.add(type)
    assert len(found) >= 2  # a page with a value that needs a look is read row by row


KEY_VALUES = {
    "bigint": "{n}", "text": "'é{n}'", "date": "'2024-01-{n:02}'", "timestamp": "'2024-01-{n:02} 00:00:00.1'",
    "double precision": "{n}.5", "numeric(12, 4)": "{n}.5",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("type", slow_except(["text"], [*KEY_VALUES, "timestamptz", "bytea"]))
def test_a_position_of_either_way_continues_in_the_other(target: str, type: str) -> None:
    text = {"timestamptz": "'2024-01-{n:02} 00:00:00.1+02'", "bytea": "'{n:02}'"}.get(type) or KEY_VALUES[type]
    if kind_of(target) != "postgres":
        type = {"bytea": "blob"}.get(type, type)
    rows = ", ".join(f"({text.format(n=n)}, {n})" for n in range(1, 29))
    change(target, f"create table t (k {type} not null, n bigint)", f"insert into t values {rows}")
    for names in (None, ["n"]):
        count, tables = same_rows(Rows(target, "t", "k", page_rows=5, columns=names))
        assert count == 28 and (tables or type == "bytea")


@pytest.mark.parametrize("type", ["bigint", "text", "double precision"])
def test_ties_are_refused_in_the_middle_of_a_page_and_between_two(target: str, type: str) -> None:
    change(target, f"create table t (k {type} not null, n bigint)")
    change(target, f"insert into t values {', '.join(f'({n}, {n})' for n in range(10))}, (4, 11)")
    for size in (3, 4, 5, 100):
        with pytest.raises(InvalidArgument, match="Two rows of 't'"):
            list(Rows(target, "t", "k", page_rows=size).in_columns(None))


def test_a_graph_reads_columns_and_rows_that_the_queue_refuses_fail_alone(target: str, store: cues.Store) -> None:
    change(target, "create table t (id integer not null, s text)")
    values = ", ".join(f"({n}, '{'x' * (40_000 if n == 70 else 5)}')" for n in range(200))
    change(target, f"insert into t values {values}")
    graph = cues.Graph("g", errors="errors")
    graph.add(cues.Source("q", Rows(target, "t", "id", page_rows=50)))
    store.queue("q", max_message_bytes=20_000)
    testing.run_until_idle(graph, store)
    assert [row["id"] for row in testing.messages(store, "q")] == [n for n in range(200) if n != 70]
    assert len(testing.messages(store, "errors")) == 1


def read_child(path: str, target: str) -> None:
    """Copy a table by columns into another one in this process; a test kills it on the way."""
    with cues.open(Path(path, "store"), durability="process") as store:
        graph = cues.Graph("g")
        graph.add(cues.Source("q", Rows(target, "t", "id", page_rows=100), batch_size=100))

        def noted(rows: Any) -> Any:
            print("step", flush=True)
            return rows

        graph.add(cues.Stream(noted, "q", "r", batch="arrow", batch_size=150))
        graph.add(Table(target, "u", {"id": "integer", "s": "text"}).sink("r", batch_size=200))
        testing.run_until_idle(graph, store)


@pytest.mark.slow
def test_random_kills_while_columns_are_read_leave_each_row_once(target: str, tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    values = ", ".join(f"({n}, 'x{n}')" for n in range(ROWS))
    change(target, "create table t (id integer primary key, s text)", f"insert into t values {values}")
    code = "import sys; from test_sql_columns import read_child; read_child(*sys.argv[1:])"
    for _ in range(5):
        with Child(code, tmp_path, target) as child, contextlib.suppress(AssertionError):
            for _ in range(chance.randint(1, 3)):
                child.line()
            time.sleep(chance.uniform(0, 0.03))
            child.kill()
    with Child(code, tmp_path, target) as child:
        child.end()
    assert change(target, "select count(*), count(distinct id), sum(id), count(distinct s) from u") == [
        (ROWS, ROWS, ROWS * (ROWS - 1) // 2, ROWS)
    ]
