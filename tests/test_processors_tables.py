"""Rows of tables as messages, and messages as rows: keys, ties, late commits, types, modes, and what is refused."""

from __future__ import annotations

import random
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import seeds
from contracts_sinks import POSTGRES, database
from postgres import Postgres
from sets import slow_except
from test_processors_sql import Presented

import cues
from cues import codec, testing
from cues.errors import CheckpointError, Diverged, InvalidArgument
from cues.processors import waits
from cues.processors.databases import Connection, DuckDB, Reader
from cues.processors.sql_sink import Table
from cues.processors.sql_source import Rows

pytest.importorskip("sqlalchemy")


@pytest.fixture(params=slow_except(["db"], ["db", "duckdb", "postgres"]))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "duckdb":
        pytest.importorskip("duckdb")
    if request.param == "postgres":
        POSTGRES[:] = [request.getfixturevalue("postgres")]
    return database(tmp_path, request.param)


def change(target: str, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements as another program does, and commit; the rows of the last one if it is a query."""
    if target.endswith(".duckdb"):
        import duckdb

        with duckdb.connect(target) as raw:
            for statement in statements:
                raw.execute(statement)
            return cast(list[tuple[Any, ...]], raw.fetchall())
    import sqlalchemy as sa

    engine = sa.create_engine(target if "://" in target else f"sqlite:///{target}")
    with engine.begin() as connection:
        for statement in statements:
            done = connection.exec_driver_sql(statement)
        rows = [tuple(row) for row in done] if done.returns_rows else []
    engine.dispose()
    return rows


def messages_of(source: Rows, position: Any = None) -> list[Any]:
    return [message for _, message in source(position)]


def pour(
    table: Table, store: cues.Store, messages: list[dict[str, Any]], errors: str | None = "errors", batch_size: int = 4
) -> None:
    store.queue("q").appender().write_many(messages)
    graph = cues.Graph("g", [cues.Source("q", None), table.sink("q", batch_size=batch_size)], errors=errors)
    testing.run_until_idle(graph, store)
    table.close()


# --- the source ---------------------------------------------------------------------------------


def test_a_changed_row_is_a_message_again_and_ties_are_whole(target: str) -> None:
    change(
        target,
        "create table t (seen integer not null, id integer not null)",
        "insert into t values (1, 1), (1, 2), (1, 3), (2, 4)",
    )
    source = Rows(target, "t", ["seen", "id"], page_rows=2)
    *_, (position, _) = source(None)
    change(target, "update t set seen = 3 where id = 2", "insert into t values (2, 5)")
    assert messages_of(source, position) == [{"seen": 2, "id": 5}, {"seen": 3, "id": 2}]


def test_a_cursor_that_is_not_unique_or_null_is_refused(target: str) -> None:
    change(target, "create table t (seen integer, id integer)", "insert into t values (1, 1), (2, 2), (2, 3)")
    with pytest.raises(InvalidArgument, match=r"Two rows of 't' have \{'seen': 2\}"):
        messages_of(Rows(target, "t", "seen", page_rows=2))
    change(target, "insert into t values (null, 4)")
    with pytest.raises(InvalidArgument, match="'seen' of 't' is NULL"):
        messages_of(Rows(target, "t", ["seen", "id"]))
    with pytest.raises(InvalidArgument, match="no column 'no'; it has seen, id"):
        messages_of(Rows(target, "t", "no"))
    with pytest.raises(InvalidArgument, match="does not exist"):
        messages_of(Rows(target, "u", "id"))


@pytest.mark.parametrize("lag_s", [0.0, 0.01])
def test_a_row_that_commits_after_a_higher_key_is_seen_within_the_lag(
    target: str, lag_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 2 commits during the wait. Without a lag it would commit after the read; that control misses it."""
    change(target, "create table t (id integer primary key)", "insert into t values (1), (3)")
    late = iter([f"insert into t values ({n})" for n in (2,)])

    def wait(process: Any, seconds: float, **_: Any) -> bool:
        if seconds == lag_s and lag_s:
            for statement in late:
                change(target, statement)
        return True

    monkeypatch.setattr(waits, "wait", wait)
    source = Rows(target, "t", "id", lag_s=lag_s)
    *_, (position, _) = read = list(source(None))
    for statement in late:
        change(target, statement)
    seen = [message["id"] for _, message in read] + [m["id"] for m in messages_of(source, position)]
    assert seen == ([1, 2, 3] if lag_s else [1, 3])


def test_a_following_source_sees_new_rows_until_the_graph_drains(target: str) -> None:
    change(target, "create table t (id integer primary key)", "insert into t values (1)")
    process = SimpleNamespace(stopping=False)
    seen = []
    for _, message in Rows(target, "t", "id", follow=True, poll_s=0.001)(None, process):
        seen.append(message["id"])
        change(target, f"insert into t values ({len(seen) + 1})")
        process.stopping = len(seen) == 3
    assert seen == [1, 2, 3]


def test_changed_columns_are_refused_or_accepted(target: str) -> None:
    change(target, "create table t (id integer primary key)", "insert into t values (1)")
    *_, (position, _) = Rows(target, "t", "id")(None)
    change(target, "alter table t add column s text", "insert into t values (2, 'x')")
    with pytest.raises(Diverged, match=r"expected no others; found s (text|varchar).*Try:"):
        messages_of(Rows(target, "t", "id"), position)
    assert messages_of(Rows(target, "t", "id", columns=["id"]), position) == [{"id": 2}]
    assert messages_of(Rows(target, "t", "id", changes="accept"), position) == [{"id": 2, "s": "x"}]


def test_keys_that_are_equal_for_the_database_are_refused_also_between_two_pages(tmp_path: Path) -> None:
    path = str(tmp_path / "t.db")
    change(path, "create table t (k text not null collate nocase)", "insert into t values ('a'), ('zz'), ('ZZ'), ('b')")
    read = []
    with pytest.raises(InvalidArgument, match="as the database compares: the cursor is not unique"):
        for _, message in Rows(path, "t", "k", page_rows=3)(None):
            read.append(message["k"])
    assert read == []


@pytest.mark.parametrize("type", ["timestamp_ns", "timestamptz_ns", "time_ns", "interval", "real", "float"])
def test_a_cursor_that_the_driver_makes_coarser_is_refused_by_name(type: str, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    path = str(tmp_path / "t.duckdb")
    change(path, f"create table t (c {type} not null)")
    with pytest.raises(InvalidArgument, match=r"The column 'c' of 't' is .*coarser.*Try: use another column"):
        messages_of(Rows(path, "t", "c"))


def refused_rows(target: str, values: dict[int, str], type: str) -> list[int]:
    """Read 20 rows of which some have these values; return the keys of those that were refused by row and column."""
    inserts = [f"insert into t values ({n}, {values.get(n, 'null')}, {n})" for n in range(20)]
    change(target, f"create table t (id integer primary key, due {type}, n integer)", *inserts)
    read = messages_of(Rows(target, "t", "id", page_rows=16))
    assert [m["id"] for m in read if isinstance(m, dict)] == [n for n in range(20) if n not in values]
    return [n for n in values if any(f"The row {{'id': {n}}} of 't' has a value in due" in str(m) for m in read)]


@pytest.mark.parametrize(
    ("type", "values"),
    [
        ("timestamp", ["'infinity'", "'-infinity'", "'0044-03-15 (BC) 00:00:00'", "'12000-01-01'"]),
        ("timestamptz", ["'infinity'", "'12000-01-01'"]),
        ("date", ["'infinity'", "'0044-03-15 (BC)'"]),
        ("time", ["'24:00:00'"]),
        ("timestamp_ns", ["'2026-01-31 00:00:00.123456789'"]),
        ("interval", ["'1 month'", "'1 year'"]),
        ("date[]", ["['infinity']", "['2026-01-31', '0044-03-15 (BC)']"]),
        ("date[2]", ["['2026-01-31', 'infinity']"]),
        ('struct("a b" integer, c timestamp[][])', ["{'a b': 1, 'c': [[], ['2026-01-31', '-infinity']]}"]),
        ("map(varchar, timestamptz)", ["map {'x': 'infinity'}"]),
        ("map(date, struct(s interval)[])", ["map {'infinity': []}", "map {'2026-01-31': [{'s': '1 month'}]}"]),
        ("timestamp_ns[]", ["['2026-01-31 00:00:00.123456789']"]),
    ],
)
def test_values_that_duckdb_would_change_are_refused_by_row_and_column(
    type: str, values: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("duckdb")
    bad = dict(enumerate(values, 7))
    assert refused_rows(str(tmp_path / "t.duckdb"), bad, type) == list(bad)


@pytest.mark.slow
def test_values_that_postgresql_has_and_python_has_not_are_refused_by_row_and_column(postgres: Postgres) -> None:
    cases = {
        "timestamptz": ["'infinity'", "'0044-03-15 BC'"],
        "date[]": ["'{infinity}'"],
        "time": ["'24:00'"],
        "interval": ["'1 month'"],
    }
    for type, values in cases.items():
        bad = dict(enumerate(values, 7))
        assert refused_rows(postgres.database(), bad, type) == list(bad)


def test_lists_and_structs_of_duckdb_whose_values_python_has_are_read(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    path = str(tmp_path / "t.duckdb")
    change(
        path,
        "create table t (id integer primary key, v struct(days date[], seen timestamp, n map(varchar, integer)))",
        "insert into t values (1, {'days': ['2026-01-31', null], 'seen': '2026-01-31 12:00', 'n': map {'a': 1}})",
        "insert into t values (2, null), (3, {'days': null, 'seen': null, 'n': null})",
    )
    full = {"days": [date(2026, 1, 31), None], "seen": datetime(2026, 1, 31, 12), "n": {"a": 1}}
    assert [m["v"] for m in messages_of(Rows(path, "t", "id"))] == [full, None, dict.fromkeys(full)]


def test_text_of_sqlite_that_is_not_utf_8_is_refused_by_row_and_column(tmp_path: Path) -> None:
    assert refused_rows(str(tmp_path / "t.db"), {3: "cast(x'ff' as text)", 15: "cast(x'fe' as text)"}, "text") == [
        3,
        15,
    ]


def test_a_duckdb_file_that_others_read_or_this_process_writes_is_read(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    path = str(tmp_path / "t.duckdb")
    change(path, "create table t (id integer primary key)", "insert into t values (1)")
    for read_only in (True, False):
        with duckdb.connect(path, read_only=read_only):
            assert messages_of(Rows(path, "t", "id")) == [{"id": 1}]


def test_a_source_of_sqlite_waits_as_long_as_a_sink(tmp_path: Path) -> None:
    """The wait is that of the target: the default of sinks, or of the SQLCheckpoint that is given."""
    from cues.checkpoints import SQLCheckpoint

    path = tmp_path / "t.db"
    change(str(path), "create table t (id integer primary key)")
    for target, milliseconds in ((str(path), 30_000), (SQLCheckpoint(path, timeout_s=7), 7_000)):
        reader = Reader(target)  # type: ignore[arg-type]
        with reader.begin() as connection:
            assert connection.rows("pragma busy_timeout") == [(milliseconds,)]
        reader.close()


def test_positions_of_others_are_refused(tmp_path: Path) -> None:
    for position in ([9, [], []], [1, [], [1, 2]], "x"):
        with pytest.raises(Diverged, match="Try:"):
            next(Rows(tmp_path / "x.db", "t", "id")(position))
    with pytest.raises(InvalidArgument, match="There is no database"):
        next(Rows(tmp_path / "x.db", "t", "id")(None))


# --- both ---------------------------------------------------------------------------------------

TYPES = {
    "id": "integer", "f": "float", "d": "decimal", "b": "boolean", "s": "text", "raw": "bytes", "at": "timestamp",
    "day": "date", "u": "uuid", "j": "json",
}  # fmt: skip
VALUES = {
    "id": 1, "f": 0.5, "d": Decimal("12.5"), "b": True, "s": "é%?", "raw": b"\0\xff", "day": date(2026, 2, 3),
    "at": datetime(2026, 1, 2, 3, 4, 5, 6, UTC), "u": uuid.UUID(int=7), "j": {"a": [1, None]},
}  # fmt: skip


def test_every_type_there_and_back(target: str, store: cues.Store) -> None:
    if target.endswith(".duckdb"):
        pytest.importorskip("pytz")
    pour(Table(target, "t", TYPES), store, [VALUES, {**dict.fromkeys(TYPES), "id": 2}], errors=None)
    first, second = messages_of(Rows(target, "t", "id"))
    assert codec.unpack(codec.pack(first)) == first and second == {**dict.fromkeys(TYPES), "id": 2}
    if target.endswith(".db"):
        texts = {"d": "12.5", "at": "2026-01-02 03:04:05.000006+00:00", "day": "2026-02-03", "u": str(VALUES["u"])}
        assert first == {**VALUES, **texts, "j": '{"a": [1, null]}', "b": 1}
    else:
        json = '{"a": [1, null]}' if target.endswith(".duckdb") else VALUES["j"]
        assert first == {**VALUES, "j": json}


# --- the sink -----------------------------------------------------------------------------------


def test_upsert_and_delete(target: str, store: cues.Store) -> None:
    columns = {"a": "integer", "b": "text", "n": "integer"}
    keys = [(1, "x"), (2, "x"), (1, "y"), (1, "x"), (1, "x")]
    table = Table(target, "t", columns, mode="upsert", key=["a", "b"])
    pour(table, store, [{"a": a, "b": b, "n": n} for n, (a, b) in enumerate(keys)])
    assert sorted(change(target, "select * from t")) == [(1, "x", 4), (1, "y", 2), (2, "x", 1)]
    with testing.temporary_store() as other:
        table = Table(target, "t", columns, mode="delete", key=["a", "b"])
        graph = cues.Graph("g2", [cues.Source("q", None), table.sink("q")], errors="errors")
        other.queue("q").appender().write_many([{"a": 1, "b": "x"}, {"a": 9, "b": "z"}, {"a": 1, "b": "y", "c": 1}])
        testing.run_until_idle(graph, other)
        table.close()
        assert testing.messages(other, "errors") == []
    assert change(target, "select * from t") == [(2, "x", 1)]


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_upserts_and_deletes_in_one_sink_are_in_their_order(batch_size: int, target: str, store: cues.Store) -> None:
    """Also for a key that is written, deleted and written again within a step; deletes need only the key."""
    chance, expected, given = random.Random(seeds.new()), dict[int, str](), list[dict[str, Any]]()
    for n in range(300):
        key, gone = chance.randint(1, 20), chance.random() < 0.4
        given.append({"k": key, "gone": True} if gone else {"k": key, "x": str(n), "gone": False})
        if gone:
            expected.pop(key, None)
        else:
            expected[key] = str(n)
    table = Table(target, "t", {"k": "integer", "x": "text"}, mode="upsert", key="k", delete="gone")
    bad = [
        {"k": 1, "x": "a"},
        {"k": 1, "gone": None},
        {"gone": True},
        {"k": None, "gone": True},
        {"k": 1, "gone": False},
    ]
    pour(table, store, [*given, *bad], batch_size=batch_size)
    assert change(target, "select * from t order by k") == sorted(expected.items())
    errors = testing.messages(store, "errors")
    assert len(errors) == len(bad)
    assert "has None in the field 'gone' of delete=" in errors[0]["err/cause"][0]["message"]


@pytest.mark.parametrize("later", [{"k": 1, "gone": True}, {"k": 1, "x": "b", "gone": False}])
def test_a_misfit_fails_also_if_a_later_message_of_the_step_has_its_key(
    later: dict[str, Any], tmp_path: Path, store: cues.Store
) -> None:
    """So the errors are the same for each size of steps."""
    table = Table(tmp_path / "t.db", "t", {"k": "integer", "x": "text"}, mode="upsert", key="k", delete="gone")
    pour(table, store, [{"k": 1, "x": "a", "other": 1, "gone": False}, later], batch_size=2)
    assert len(testing.messages(store, "errors")) == 1


def test_the_field_of_deletes_belongs_to_upserts(tmp_path: Path) -> None:
    for options in ({"mode": "append"}, {"mode": "delete", "key": "k"}, {"mode": "upsert", "key": "k", "delete": "k"}):
        with pytest.raises(InvalidArgument, match=r"delete='.*' does not fit mode="):
            Table(tmp_path / "t.db", "t", {"k": "integer"}, **{"delete": "gone", **options})


def test_messages_that_do_not_fit_go_to_the_error_queue(target: str, store: cues.Store) -> None:
    """A field too few, one too many, a type that the column refuses, a constraint; the good ones are written."""
    change(target, "create table t (id integer primary key, n integer not null)")
    bad = [{"id": 2}, {"id": 3, "n": 3, "x": 1}, {"id": 4, "n": None}, {"id": 1, "n": 5}]
    good = [{"id": 1, "n": 1}], [{"id": 6, "n": 6}]
    pour(Table(target, "t", {"id": "integer", "n": "integer"}), store, [*good[0], *bad, *good[1]], batch_size=1)
    assert change(target, "select * from t order by id") == [(1, 1), (6, 6)]
    texts = [each["err/cause"][0]["message"] for each in testing.messages(store, "errors")]
    assert len(texts) == 4 and not any("[]" in text for text in texts)  # only the parts that are wrong are named
    assert "does not fit the table 't': missing ['n']. Try: " in texts[0]
    assert "does not fit the table 't': without a column ['x']. Try: " in texts[1]


def test_a_decimal_that_the_column_would_round_fails(store: cues.Store, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    path, given = str(tmp_path / "t.duckdb"), ["0.123456789012", "1E-10", "1E+29", "1.5", "-0.123456789"]
    table = Table(path, "t", {"id": "integer", "price": "decimal"})
    pour(table, store, [{"id": n, "price": Decimal(text)} for n, text in enumerate(given)])
    assert change(path, "select * from t order by id") == [(3, Decimal("1.5")), (4, Decimal("-0.123456789"))]
    assert len(testing.messages(store, "errors")) == 3


def test_two_sinks_make_their_tables_in_one_new_duckdb_file(tmp_path: Path) -> None:
    """They take turns, also if each is an object of its own; DuckDB refuses two that change its catalogue at once."""
    pytest.importorskip("duckdb")
    for round in range(5):
        graph = cues.Graph("g", [cues.Source("a"), cues.Source("b")], store=tmp_path / f"s{round}", errors="errors")
        path = str(tmp_path / f"{round}.duckdb")
        for name in ("a", "b"):
            graph.add(Table(path, f"t{name}", {"n": "integer"}).sink(name, id=f"save-{name}"))
        with graph.start() as running:
            for n in range(3):
                for name in ("a", "b"):
                    running.send(name, {"n": n})
            assert running.wait_idle(timeout=60) and not running.messages("errors")
        assert change(path, "select n from ta") == change(path, "select n from tb") == [(0,), (1,), (2,)]


def test_the_name_of_a_column_may_have_dots(target: str, store: cues.Store) -> None:
    table = Table(target, "t", {"user.id": "integer", "1.00": "text"}, mode="upsert", key="user.id")
    pour(table, store, [{"user.id": 1, "1.00": "a"}, {"user.id": 1, "1.00": "b"}], errors=None)
    assert messages_of(Rows(target, "t", "user.id")) == [{"user.id": 1, "1.00": "b"}]


def test_rows_of_one_statement_are_in_the_order_of_the_key(tmp_path: Path, store: cues.Store) -> None:
    """So two transactions lock the rows in one order, and cannot wait for each other."""
    path = str(tmp_path / "t.db")
    pour(
        Table(path, "t", {"id": "text", "n": "integer"}, mode="upsert", key="id"),
        store,
        [{"id": id, "n": 0} for id in "cab"],
    )
    assert change(path, "select id from t order by rowid") == [("a",), ("b",), ("c",)]


def test_a_table_that_does_not_fit_stops_the_sink_and_changes_nothing(target: str, store: cues.Store) -> None:
    change(target, "create table t (id integer, s text)")
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ({"id": "integer", "s": "integer"}, {}, r"s integer expected, (text|varchar) found"),
        ({"id": "integer", "no": "text"}, {}, "no text expected, no such column found"),
        ({"id": "integer"}, {"mode": "upsert", "key": "id"}, "no unique key of the columns id"),
    ]
    for columns, options, message in refused:
        table = Table(target, "t", columns, **options)
        presented = cast(cues.Process, Presented({"g.save.q": (1, 3)}))
        with pytest.raises(CheckpointError, match=message), table.transaction(presented):
            raise AssertionError("the block must not run")
        assert table.holds(["g.save"]) == []
        table.close()
    table = Table(target, "missing", ["id"])
    with pytest.raises(CheckpointError, match="is not in"), table.transaction(presented):
        pass
    table.close()
    assert change(target, "select * from t") == []


def test_a_function_that_commits_itself_is_noticed(target: str) -> None:
    table = Table(target, "t", {"id": "integer"})
    presented = cast(cues.Process, Presented({"g.save.q": (1, 3)}))
    with pytest.raises(cues.CuesError, match="ended its transaction"), table.transaction(presented) as opened:
        opened.connection.run("rollback")
    table.close()


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    for call in (
        lambda: Table(path, "t", {"id": "number"}),
        lambda: Table(path, "t", {"id": "integer"}, mode="merge"),
        lambda: Table(path, "t", {"id": "integer"}, mode="upsert"),
        lambda: Table(path, "t", {"id": "integer"}, key="id"),
        lambda: Table(path, "t", {}, mode="append"),
        lambda: Table(path, 'a"b', {"id": "integer"}),
        lambda: Table("duckdb:///:memory:", "t", {"id": "integer"}),
        lambda: Table(7, "t", {"id": "integer"}),
        lambda: Rows(path, "t", []),
        lambda: Rows(path, "t", "id", page_rows=0),
        lambda: Rows(path, "t", "id", changes="some"),
    ):
        with pytest.raises(InvalidArgument, match="Try:"):
            call()


def test_connections_are_of_their_kind(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    change(str(tmp_path / "t.duckdb"), "create table t (id integer unique)")
    with Reader(str(tmp_path / "t.duckdb")).begin() as connection:
        assert isinstance(connection, Connection) and connection.unique_keys("t") == [{"id"}]
    assert DuckDB(tmp_path / "t.duckdb").holds(["g.save"]) == []
