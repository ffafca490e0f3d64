"""Changes of PostgreSQL tables: a snapshot, then every change, exactly once; crashes, outages, slots that are lost.

Almost every test replays the messages, and compares the result with the table. The replay refuses an insert of a row
that is there, and an update or delete of a row that is not: it finds each message that is doubled, lost or too early.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pickle
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import changed_tables
import mirrors
import postgres as servers
import pytest
from changed_tables import MIRROR, Rows, a_process, example, interrupted, on_queue, read, timed_100_000
from children import Child
from postgres import Postgres
from sets import slow_except
from small import halted_at_end, until

import cues
from cues import testing
from cues.errors import Away, CuesError, Diverged, InvalidArgument
from cues.processors import postgres_changes, postgres_wire
from cues.processors.pgoutput import lsn_of
from cues.processors.postgres_changes import Changes

psycopg = pytest.importorskip("psycopg")


class Database:
    """A schema of a server, with a slot of its own."""

    def __init__(self, server: Postgres) -> None:
        self.url = server.database()
        self.schema = self.url.rpartition("%3D")[2]
        self.server, self.slot = server, f"slot_{self.schema}"
        self.sql = self.connect()

    def connect(self) -> Any:
        """A new connection, which commits each statement."""
        return psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True)

    def run(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        for statement in statements:
            self.sql.execute(statement)

    def one(self, query: str) -> Any:
        """The first row of a query."""
        return self.sql.execute(query).fetchone()

    def source(self, *tables: str, **options: Any) -> Changes:
        """A source of tables; by default of ``t``."""
        return Changes(self.url, tables or ("t",), **{"slot": self.slot, **options})

    def rows(self, *tables: str) -> Rows:
        """The tables as the replay of messages makes them: rows by key."""
        found: Rows = {}
        for table in tables or ("t",):
            name = f"{self.schema}.{table}"
            key = [
                column
                for (column,) in self.sql.execute(
                    "select a.attname from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum ="
                    f" any(i.indkey) where i.indrelid = '{name}'::regclass and i.indisprimary"
                )
            ]
            cursor = self.sql.execute(f"select * from {name}")
            names = [column.name for column in cursor.description]
            rows = [dict(zip(names, row)) for row in cursor]
            found[name] = {tuple(str(row[column]) for column in sorted(key)): row for row in rows}
        return found

    def close(self) -> None:
        """Drop the slot, so that the server keeps no log for it."""
        with contextlib.suppress(psycopg.Error), self.connect() as sql:
            sql.execute(
                "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s and active",
                [self.slot],
            )
            until(lambda: sql.execute("select count(*) from pg_replication_slots where active").fetchone() == (0,))
            sql.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s", [self.slot]
            )
            sql.execute(f"drop publication if exists {self.slot}")
        self.sql.close()


@pytest.fixture(autouse=True)
def _soon_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most sources here are read without the engine, so nothing is committed before their end."""
    monkeypatch.setattr(postgres_wire, "CLOSE_S", 0.2)


@pytest.fixture
def db(postgres: Postgres) -> Iterator[Database]:
    found = Database(postgres)
    yield found
    found.close()


def replayed(messages: list[dict[str, Any]], rows: Rows | None = None) -> Rows:
    return changed_tables.replayed(messages, rows, lambda key: tuple(str(key[column]) for column in sorted(key)))


def drained(db: Database, store: cues.Store, *tables: str, **options: Any) -> list[Any]:
    """All messages on the queue after one more run."""
    return changed_tables.drained(db.source(*tables, **options), store)


# --- messages -----------------------------------------------------------------------------------


def test_a_snapshot_then_each_operation(db: Database, store: cues.Store) -> None:
    db.run("create table t (id int primary key, x text)", "insert into t values (1, 'a'), (2, null)")
    first, second = drained(db, store)
    assert first.pop("time") <= datetime.now(UTC) and first.pop("lsn") == second["lsn"]
    assert first == {
        "operation": "snapshot", "table": f"{db.schema}.t", "key": {"id": 1}, "row": {"id": 1, "x": "a"},
        "before": None, "unchanged": [], "number": None, "transaction": None,
    }  # fmt: skip
    with db.sql.transaction():
        db.run("insert into t values (3, 'c')", "update t set x = 'z' where id = 1", "delete from t where id = 2")
        (transaction,) = db.one("select pg_current_xact_id()::text::bigint")
    db.run("truncate t")
    *changes, last = drained(db, store)[2:]
    assert [(m["operation"], m["key"], m["row"]) for m in changes] == [
        ("insert", {"id": 3}, {"id": 3, "x": "c"}),
        ("update", {"id": 1}, {"id": 1, "x": "z"}),
        ("delete", {"id": 2}, None),
    ]
    assert [m["number"] for m in changes] == [1, 2, 3] and {m["transaction"] for m in changes} == {transaction}
    assert len({(m["lsn"], m["time"]) for m in changes}) == 1 and changes[0]["time"].tzinfo is not None
    assert (last["operation"], last["key"], last["row"], last["number"]) == ("truncate", {}, None, 1)
    assert len(drained(db, store)) == 6


VALUES: dict[str, tuple[str, Any]] = {
    "boolean": ("true", True),
    "smallint": ("-3", -3),
    "bigint": ("9007199254740993", 9007199254740993),
    "real": ("0.1", 0.1),
    "double precision": ("'NaN'", "nan"),
    "numeric": ("12345678901234567890.10", Decimal("12345678901234567890.10")),
    "text": ("'é\\\\ \"'", 'é\\\\ "'),
    "varchar(9)": ("'ab '", "ab "),
    "char(4)": ("'ab'", "ab  "),
    "bytea": ("'\\x00ff'", b"\x00\xff"),
    "date": ("'2026-02-28'", date(2026, 2, 28)),
    "time": ("'12:30:00.5'", clock_time(12, 30, 0, 500_000)),
    "timestamp": ("'2026-02-28 12:00'", datetime(2026, 2, 28, 12)),
    "timestamptz": ("'2026-02-28 12:00+03'", datetime(2026, 2, 28, 9, tzinfo=UTC)),
    "interval": ("'1 day 02:00'", timedelta(days=1, hours=2)),
    "uuid": ("'00000000-0000-0000-0000-00000000000a'", UUID(int=10)),
    "json": ("'{\"a\": [1, null]}'", {"a": [1, None]}),
    "jsonb": ("'[1.5]'", [1.5]),
    "int[]": ("'{{1,2},{3,null}}'", [[1, 2], [3, None]]),
    "timestamptz[]": ("'{2026-02-28 12:00+03}'", [datetime(2026, 2, 28, 9, tzinfo=UTC)]),
    "oid": ("42", 42),
    # values that Python does not have, and other types, are text
    "date ": ("'infinity'", "infinity"),
    "time ": ("'24:00'", "24:00:00"),
    "timestamp ": ("'20260-01-01'", "20260-01-01 00:00:00"),
    "interval ": ("'1 mon'", "1 mon"),
    "int[] ": ("'[2:3]={1,2}'", "[2:3]={1,2}"),
    "inet": ("'10.0.0.1/8'", "10.0.0.1/8"),
    "int4range": ("'[1,5)'", "[1,5)"),
    "inet[]": ("'{10.0.0.1}'", "{10.0.0.1}"),
    "point": ("'(1,2)'", "(1,2)"),
    "json ": (r"""'"\ud800"'""", r'"\ud800"'),  # no UTF-8
    "json   ": ("'" + "[" * 3000 + "]" * 3000 + "'", "[" * 3000 + "]" * 3000),
    "ints": ("'{1,null}'", [1, None]),
    "mood": ("'glad'", "glad"),
    "count": ("7", 7),
    "xml": ("'<a/>'", "<a/>"),
    "bit(3)": ("b'101'", "101"),
}


def test_values_of_all_types_are_the_same_in_snapshot_and_changes(db: Database, store: cues.Store) -> None:
    """Also under settings of the database that change the texts."""
    types = {name: value for name, value in VALUES.items() if name != "xml" or has_xml(db)}
    db.run("create type mood as enum ('glad', 'sad')", "create domain count as int check (value > 0)")
    db.run("create domain ints as int[]")
    columns = ", ".join(f"c{n} {type}" for n, type in enumerate(types))
    db.run(f"create table t (id int primary key, {columns})")
    values = ", ".join(text for text, _ in types.values())
    nulls = ", ".join("null" for _ in types)
    try:
        db.run("alter role postgres set datestyle = 'German'", "alter role postgres set timezone = 'Asia/Tokyo'")
        db.run("alter role postgres set intervalstyle = 'iso_8601'", "alter role postgres set bytea_output = 'escape'")
        db.run(f"insert into t values (1, {values})")
        drained(db, store)
        db.run(f"insert into t values (2, {values})", f"insert into t values (3, {nulls})")
        snapshot, insert, empty = drained(db, store)
    finally:
        db.run("alter role postgres reset all")
    for n, (type, (_, expected)) in enumerate(types.items()):
        for message in (snapshot, insert):
            found = message["row"][f"c{n}"]
            assert (
                str(found) == "nan"
                if expected == "nan"
                else (found, str(found)) == (expected, str(expected))
                or (isinstance(expected, (datetime, list)) and found == expected)
            ), (type, found)
        assert empty["row"][f"c{n}"] is None


def has_xml(db: Database) -> bool:
    try:
        db.run("select '<a/>'::xml")
    except psycopg.Error:
        return False
    return True


def test_a_key_that_changes_is_a_delete_and_an_insert(db: Database, store: cues.Store) -> None:
    db.run("create table t (a int, b text, x text, primary key (b, a))", "insert into t values (1, 'k', 'x')")
    drained(db, store)
    db.run("update t set a = 2 where a = 1", "update t set b = 'l', x = 'y'")
    _, *changes = drained(db, store)
    assert [(m["operation"], m["key"], m["row"], m["number"]) for m in changes] == [
        ("delete", {"b": "k", "a": 1}, None, 1),
        ("insert", {"b": "k", "a": 2}, {"a": 2, "b": "k", "x": "x"}, 2),
        ("delete", {"b": "k", "a": 2}, None, 1),
        ("insert", {"b": "l", "a": 2}, {"a": 2, "b": "l", "x": "y"}, 2),
    ]


def test_a_large_value_that_did_not_change_is_named_and_not_invented(db: Database, store: cues.Store) -> None:
    large = "select string_agg(md5(i::text), '') from generate_series(1, 400) i"
    db.run("create table t (id int primary key, n int, x text)", f"insert into t select 1, 0, ({large})")
    drained(db, store)
    db.run("update t set n = 1", "alter table t replica identity full", "update t set n = 2")
    snapshot, first, second = drained(db, store)
    assert (first["row"], first["unchanged"], first["before"]) == ({"id": 1, "n": 1}, ["x"], None)
    assert second["unchanged"] == [] and second["row"] == {"id": 1, "n": 2, "x": snapshot["row"]["x"]}
    assert second["before"] == {"id": 1, "n": 1, "x": snapshot["row"]["x"]} and second["key"] == {"id": 1}


def test_replica_identities(db: Database, store: cues.Store) -> None:
    """An index in the place of the primary key; a table without a key, whose rows are named by all their columns."""
    db.run(
        "create table t (id int primary key, code text unique not null)", "create table u (x int)",
        "alter table t replica identity using index t_code_key", "alter table u replica identity full",
        "insert into t values (1, 'a')",
    )  # fmt: skip
    with pytest.raises(CuesError, match=r"The table .*u has no primary key.*Try: add one; or give snapshot=False"):
        read(db.source("t", "u"))
    drained(db, store, "t", "u", snapshot=False)
    db.run(
        "insert into t values (2, 'b')", "update t set id = 3 where id = 2", "delete from t", "insert into u values (5)"
    )
    db.run("update u set x = 6", "delete from u")
    found = drained(db, store, "t", "u", snapshot=False)
    assert [(m["operation"], m["key"], m["row"], m["before"]) for m in found] == [
        ("insert", {"code": "b"}, {"id": 2, "code": "b"}, None),
        ("update", {"code": "b"}, {"id": 3, "code": "b"}, None),
        ("delete", {"code": "a"}, None, None),
        ("delete", {"code": "b"}, None, None),
        ("insert", {}, {"x": 5}, None),
        ("update", {}, {"x": 6}, {"x": 5}),
        ("delete", {}, None, {"x": 6}),
    ]


def test_a_table_that_changes_its_columns_in_the_middle(db: Database, store: cues.Store) -> None:
    """A new column, a removed one, a new type, a new name: each message has the columns of its time."""
    db.run("create table t (id int primary key, x text, y text)", "insert into t values (1, 'a', 'b')")
    drained(db, store)
    db.run(
        "insert into t values (2, '7', 'c')",
        "alter table t add n int default 5",
        "insert into t values (3, '8', 'd', 6)",
        "alter table t drop column y",
        "alter table t alter column x type int using 9",
        "insert into t values (4, 9, 1)",
        "alter table t rename to s",
        "alter table s rename column x to z",
        "insert into s values (5, 9, 1)",
    )
    with pytest.raises(CuesError, match="'t' does not exist; expected a table"):
        read(db.source("t"))
    db.run("alter table s rename to t")
    assert [m["row"] for m in drained(db, store)[1:]] == [
        {"id": 2, "x": "7", "y": "c"},
        {"id": 3, "x": "8", "y": "d", "n": 6},
        {"id": 4, "x": 9, "n": 1},
        {"id": 5, "z": 9, "n": 1},
    ]


def test_a_partitioned_table_and_a_publication_with_columns_and_rows(db: Database, store: cues.Store) -> None:
    db.run(
        "create table t (id int primary key, secret text, x int) partition by range (id)",
        "create table t1 partition of t for values from (0) to (10)",
        "create table t2 partition of t for values from (10) to (20)",
        f"create publication {db.slot} for table t (id, x) where (id < 15) with (publish_via_partition_root = true)",
        "insert into t values (1, 's', 1), (12, 's', 2), (17, 's', 3)",
    )
    drained(db, store)
    db.run("insert into t values (2, 's', 4), (13, 's', 5), (18, 's', 6)", "delete from t where id in (12, 17)")
    found = drained(db, store)
    assert {m["table"] for m in found} == {f"{db.schema}.t"}
    assert sorted(row["x"] for row in replayed(found)[f"{db.schema}.t"].values()) == [1, 4, 5]
    assert all(m["row"] is None or set(m["row"]) == {"id", "x"} for m in found)


# --- exactly once -------------------------------------------------------------------------------


KEYS = {
    "int": ["-5", "0", "9", "10", "200"],
    "text": ["'a'", "'B'", "'ä'", "'a b'", "'z''\\'", "''"],
    "char(3)": ["'a'", "'b '", "'ab'", "''"],
    "boolean": ["true", "false"],
    "numeric": ["-1.5", "0", "2", "10", "'Infinity'"],
    "timestamptz": ["'2026-01-01'", "'9999-12-31'", "'1999-01-01'", "'0044-03-15'"],
    "uuid": ["'ffffffff-0000-0000-0000-000000000000'", "'0a000000-0000-0000-0000-000000000000'"],
    "mood": ["'sad'", "'glad'"],
    "bytea": ["'\\x00'", "'\\xff00'", "'a'"],
    "integral": ["2", "10", "9", "100"],
    "interval": ["'1 day'", "'02:00'", "'9 days'"],
}


@pytest.mark.slow
@pytest.mark.parametrize("type", slow_except(list(KEYS)[:1], KEYS))
def test_a_snapshot_that_stops_after_any_row_is_continued(type: str, db: Database) -> None:
    """Between the parts a row before and a row after the place are changed, deleted, added and moved over it."""
    db.run("create type mood as enum ('sad', 'glad')", "create domain integral as int")
    keys = [(key, n) for key in KEYS[type] for n in (1, 2)]
    for stop in range(1, len(keys)):
        db.run("drop table if exists t", f"create table t (k {type}, n int, x int default 0, primary key (k, n))")
        db.run(*(f"insert into t values ({key}, {n})" for key, n in keys))
        process = a_process()
        items = db.source()(None, process)
        first = list(itertools.islice(items, stop))
        items.close()  # type: ignore[attr-defined]
        db.run(*changed_tables.between(keys, "insert into t"))
        rest = read(db.source(), first[-1][0], process)
        assert replayed([message for _, message in first] + rest)[f"{db.schema}.t"] == db.rows()[f"{db.schema}.t"]
        db.close()
        db.sql = db.connect()


class Undone(Exception):
    """A transaction that is rolled back."""


UNDONE = (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation, Undone)


class Writers(changed_tables.Writers):
    def transaction(self, session: Any, chance: random.Random, statements: int) -> None:
        with contextlib.suppress(*UNDONE), session.transaction():
            for _ in range(statements):
                self._change(session, chance)
            if chance.random() < 0.1:
                raise Undone

    def _change(self, sql: Any, chance: random.Random) -> None:
        table, id, other = self.place(chance)
        statement = chance.choice([
            f"insert into {table} values ({id}, 'new') on conflict do nothing",
            f"insert into {table} values ({id}, 'new') on conflict do nothing",
            f"update {table} set x = x || 'u' where id between {id} and {id + 3}",
            f"delete from {table} where id = {id}",
            f"update {table} set id = {other} where id = {id} and not exists (select from {table} where id = {other})",
            f"delete from {table} where id = {other}",
        ])  # fmt: skip
        with contextlib.suppress(Undone), sql.transaction():  # a savepoint
            sql.execute(statement)
            if chance.random() < 0.1:
                raise Undone


def two_tables(db: Database) -> None:
    for table in "tu":
        db.run(f"create table {table} (id int primary key, x text)")
        db.run(f"insert into {table} select 2 * i, 'old' from generate_series(1, 150) i")


@pytest.mark.slow
def test_a_source_that_is_interrupted_anywhere_while_others_write(db: Database) -> None:
    two_tables(db)
    found = interrupted(lambda **options: db.source("t", "u", **options), Writers(db))
    assert replayed(found) == db.rows("t", "u")


def test_a_start_that_ends_before_its_first_commit_begins_again(db: Database) -> None:
    """The slot is there, and no position: it is taken, and the snapshot is read anew."""
    two_tables(db)
    items = db.source("t", "u")(None, a_process())
    next(items)
    items.close()  # type: ignore[attr-defined]
    with Writers(db):
        process = a_process()
        part = list(itertools.islice(db.source("t", "u", follow=True)(None, process), 500))
    found = [message for _, message in part if message is not None] + read(db.source("t", "u"), part[-1][0], process)
    assert replayed(found) == db.rows("t", "u")


def test_the_control_without_the_snapshots_in_the_state_doubles(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    from cues.processors.postgres_tables import View

    db.run("create table t (id int primary key)", "insert into t values (1), (2)")
    monkeypatch.setattr(View, "sees", lambda *_: False)
    process = a_process()
    items = db.source()(None, process)
    position, first = next(items)
    items.close()  # type: ignore[attr-defined]
    db.run("insert into t values (3)")
    with pytest.raises(AssertionError):
        replayed([first, *read(db.source(), position, process)])


def test_a_truncate_while_a_snapshot_was_interrupted_stops_the_source(db: Database) -> None:
    db.run(
        "create table t (id int primary key)", "insert into t values (1), (2)", "create table u (id int primary key)"
    )
    process = a_process()
    items = db.source("t", "u")(None, process)
    position, _ = next(items)
    items.close()  # type: ignore[attr-defined]
    db.run("insert into u values (1)", "truncate u", "insert into u values (2)")  # it was not read at all
    again = a_process()
    again.state.update(process.state)
    assert [(m["table"][-1], m["key"]) for m in read(db.source("t", "u"), position, again)] == [
        ("t", {"id": 2}),
        ("u", {"id": 2}),
    ]
    db.run("truncate t")
    with pytest.raises(Diverged, match=r"truncated .*t while its snapshot was interrupted.*Try: begin anew"):
        read(db.source("t", "u"), position, process)


def test_a_snapshot_that_has_begun_is_read_to_its_end_also_with_snapshot_false(db: Database) -> None:
    db.run("create table t (id int primary key)", "insert into t values (1), (2)")
    process = a_process()
    items = db.source("t")(None, process)
    position, _ = next(items)
    items.close()  # type: ignore[attr-defined]
    db.run("insert into t values (3)")
    found = [message["key"]["id"] for message in read(db.source("t", snapshot=False), position, process)]
    assert sorted(found) == [2, 3]


@pytest.mark.slow
def test_positions_and_states_of_earlier_releases_are_continued(db: Database) -> None:
    """Stores keep both. These are the literal forms of version 1, in a snapshot, after it, and in a transaction."""
    db.run("create table t (id int, k text, primary key (id, k))", "insert into t values (1, 'a'), (2, 'é')")
    process = a_process()
    items = db.source()(None, process)
    position, _ = next(items)
    items.close()  # type: ignore[attr-defined]
    system, timeline = process.state["server"]
    until, start = (process.state["snapshot"][name] for name in ("until", "from"))
    view = process.state["snapshot"]["segments"][0][2]
    assert re.fullmatch(r"\d+:\d+:[\d,]*", view) and (type(until), type(start)) == (int, int)
    table = f"{db.schema}.t"
    only = f'{{"server": ["{system}", {timeline}], "tables": [["{table}", ["id integer", "k text"]]]}}'
    whole = only[:-1] + f', "snapshot": {{"segments": [[1, null, "{view}"]], "until": {until}, "from": {start}}}}}'
    assert (json.dumps(position), json.dumps(process.state)) == ('[1, 0, ["1", "a"]]', whole)

    def kept(position: str, state: str, then: str) -> list[tuple[Any, Any]]:
        again = a_process()
        again.state.update(json.loads(state))
        found = list(db.source()(json.loads(position), again))
        assert json.dumps(again.state).startswith(then)
        return [item for item in found if item[1] is not None or item[0][1] == start]

    continued = only[:-1] + f', "snapshot": {{"segments": [[0, ["1", "a"], "{view}"], [1, null, "'
    db.run("insert into t values (0, 'z'), (3, 'z')")
    (_, second), (_, third), (moved, _), (last, change) = kept('[1, 0, ["1", "a"]]', whole, continued)
    assert [m["key"] for m in (second, third, change)] == [
        {"id": 2, "k": "é"},
        {"id": 3, "k": "z"},
        {"id": 0, "k": "z"},
    ]
    assert json.dumps(moved) == f"[1, {start}, 0]"
    (middle, one), (end, two) = kept(f"[1, {start}, 0]", only, only)
    assert json.dumps(middle) == f"[1, {lsn_of(one['lsn'])}, 1]" and json.dumps(end) == f"[1, {last[1]}, 0]"
    assert (one["key"]["id"], two["key"]["id"]) == (0, 3)
    assert kept(json.dumps(middle), only, only) == [(end, two)] and kept(json.dumps(end), only, only) == []


# --- kill -9 ------------------------------------------------------------------------------------


CODE = MIRROR.format(module="postgres_changes")


def killed(db: Database, path: Path, rounds: int) -> None:
    two_tables(db)
    with Writers(db, count=2, pause_s=0.01):
        mirrors.kill(CODE, path, db.url, "t u", f"slot={db.slot}", rounds=rounds, lines=4, pause_s=0.02)
    with Child(CODE, path, db.url, "t u", f"slot={db.slot}") as child:
        child.end()
    found = on_queue(path)
    assert replayed(found) == db.rows("t", "u")
    print(len(found), "messages,", len({m["lsn"] for m in found if m["operation"] == "snapshot"}), "snapshots")


@pytest.mark.slow
def test_a_source_that_is_killed_has_each_message_once(db: Database, tmp_path: Path) -> None:
    killed(db, tmp_path, rounds=3)


@pytest.mark.long
def test_a_source_that_is_killed_25_times_has_each_message_once(db: Database, tmp_path: Path) -> None:
    killed(db, tmp_path, rounds=25)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["take.after", "commit.before", "commit.inside", "commit.after"])
def test_a_kill_in_the_middle_of_a_transaction_loses_and_doubles_nothing(
    point: str, db: Database, tmp_path: Path
) -> None:
    db.run("create table t (id int primary key, x text)", "insert into t values (0, 'old')")
    with Child(CODE, tmp_path, db.url, "t", f"slot={db.slot}") as child:
        child.end()
    db.run("insert into t select i, 'new' from generate_series(1, 3000) i")
    mirrors.killed_at(point, CODE, tmp_path, db.url, "t", f"slot={db.slot}", hits=(1, 5, 20))
    found = on_queue(tmp_path)
    assert replayed(found) == db.rows() and [m["number"] for m in found] == [None, *range(1, 3001)]


# --- outages and slots --------------------------------------------------------------------------


@pytest.fixture
def own() -> Iterator[Callable[..., Postgres]]:
    """Starts servers of this test, with settings of its own."""
    if servers.programs() is None:
        pytest.skip("no PostgreSQL that may be run here")
    with contextlib.ExitStack() as stack:
        yield lambda *settings: stack.enter_context(servers.running(*settings))


@pytest.mark.slow
def test_a_server_that_ends_in_the_middle_is_waited_for(own: Any, tmp_path: Path) -> None:
    """It is stopped, and killed, while the source follows; a stop does not hang on the connection of the source."""
    server = own("wal_level=logical")
    db = Database(server)
    db.run("create table t (id int primary key)", "insert into t values (0)")
    graph = cues.Graph("g", [cues.Source("q", db.source(follow=True))])
    with graph.start(store=tmp_path / "store") as running:
        for number in range(4):
            db.run(f"insert into t values ({2 * number + 1})")
            until(lambda: len(running.messages("q")) >= 2 * number + 2)
            db.run(f"insert into t values ({2 * number + 2})")
            began = time.monotonic()
            server.stop() if number % 2 else server.kill()
            assert time.monotonic() - began < 20
            assert until(lambda: running.counters()["g.q"].away)
            server.start()
            db.sql = db.connect()
        db.run("insert into t values (9)")
        until(lambda: len(running.messages("q")) >= 10)
        assert replayed(running.messages("q")) == db.rows()
    db.sql.close()


@pytest.mark.slow
def test_a_slot_that_the_server_gave_up_is_a_clear_error(own: Any, store: cues.Store) -> None:
    db = Database(own("wal_level=logical", "max_slot_wal_keep_size=1MB", "max_wal_size=32MB", "min_wal_size=32MB"))
    db.run("create table t (id int primary key)", "create table other (x text)")
    drained(db, store)
    for _ in range(8):
        db.run("insert into other select repeat('x', 1000) from generate_series(1, 10000)", "select pg_switch_wal()")
    db.run("checkpoint")
    assert db.one("select wal_status from pg_replication_slots") == ("lost",)
    report = testing.run_until_idle(cues.Graph("g", [cues.Source("q", db.source())]), store, stopped="return")
    error = report.stopped["q"].__cause__
    assert isinstance(error, Diverged) and "max_slot_wal_keep_size, now 1MB" in str(error)
    assert "pg_drop_replication_slot" in str(error)
    db.sql.close()


def test_a_server_without_logical_replication_is_a_clear_error(own: Any) -> None:
    db = Database(own())
    db.run("create table t (id int primary key)")
    with pytest.raises(
        CuesError, match=r"has wal_level=replica; expected logical.*Try: run `alter system set wal_level"
    ):
        read(db.source())
    db.sql.close()


def test_a_slot_that_is_gone_or_was_moved_is_refused(db: Database, store: cues.Store) -> None:
    db.run("create table t (id int primary key)", "insert into t values (1)")
    process, items = a_process(), list[Any]()
    items += db.source()(None, process)
    position = items[-1][0]
    until(lambda: db.one(f"select active from pg_replication_slots where slot_name = '{db.slot}'") == (False,))
    db.run("insert into t values (2)", f"select pg_replication_slot_advance('{db.slot}', pg_current_wal_lsn())")
    with pytest.raises(Diverged, match="another reader moved it"):
        read(db.source(), position, process)
    db.run(f"select pg_drop_replication_slot('{db.slot}')")
    with pytest.raises(Diverged, match=r"has no slot .*it was dropped, or a standby was promoted without it"):
        read(db.source(), position, process)
    db.run(f"select pg_create_logical_replication_slot('{db.slot}', 'pgoutput')")
    with pytest.raises(Diverged, match=r"ends at .*, before the position"):
        read(db.source(), [1, 1 << 60, 0], process)
    process.state["server"] = ["7", 1]
    with pytest.raises(Diverged, match=r"is of the system .*; the position is of the system 7"):
        read(db.source(), position, process)
    with pytest.raises(Diverged, match=r"is not one of cues.processors.postgres_changes, version 1"):
        read(db.source(), [2, 0, 0], process)


def test_a_slot_that_moved_while_a_snapshot_was_interrupted_is_refused(db: Database) -> None:
    """So it is if the store is a copy of that time: the changes of the rows that were read are gone."""
    db.run("create table t (id int primary key, x int)", "insert into t values (1, 0), (2, 0)")
    process = a_process()
    items = db.source()(None, process)
    position, _ = next(items)
    items.close()  # type: ignore[attr-defined]
    db.run("update t set x = 1", f"select pg_replication_slot_advance('{db.slot}', pg_current_wal_lsn())")
    with pytest.raises(Diverged, match="another reader moved it, or the store is an older copy"):
        read(db.source(), position, process)


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_publication_that_is_younger_than_the_slot_is_refused(snapshot: bool, db: Database) -> None:
    """PostgreSQL 18 leaves out what is between the two; older ones end with an error."""
    db.run("create table t (id int primary key)", "insert into t values (1)")
    source, process = db.source(snapshot=snapshot), a_process()
    position = list(source(None, process))[-1][0]
    db.run(f"drop publication {db.slot}", "insert into t values (2)")
    with pytest.raises(Diverged, match=r"has the slot .* but no publication .*: it was dropped, or never made"):
        read(source, position, process)
    with pytest.raises(Diverged, match="but no publication"):
        read(source)


def test_a_slot_that_another_reader_uses_is_waited_for(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_wire, "BUSY_S", 0.2)
    db.run("create table t (id int primary key)")
    items = db.source(follow=True)(None, a_process())
    next(items)
    db.run("insert into t values (1)")
    assert next(items)[1]["key"] == {"id": 1}
    with pytest.raises(Away, match=r"The slot .* is in use .*active for PID"):
        read(db.source(snapshot=False))
    items.close()  # type: ignore[attr-defined]


def test_a_slot_moves_while_only_other_tables_change(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cues.processors.postgres_changes.TELL_S", 0.1)
    monkeypatch.setattr(postgres_wire, "TELL_S", 0.1)
    db.run("create table t (id int primary key)", "create table other (x text)")
    graph = cues.Graph("g", [cues.Source("q", db.source(follow=True))])
    with graph.start(store=tmp_path / "store") as running:
        for _ in range(2):
            db.run("insert into other select 'x' from generate_series(1, 1000)")
            (end,) = db.one("select pg_current_wal_insert_lsn()")
            until(lambda: db.one(f"select confirmed_flush_lsn >= '{end}' from pg_replication_slots"
                                 f" where slot_name = '{db.slot}'") == (True,))  # fmt: skip
        db.run("insert into t values (1)")
        until(lambda: running.messages("q"))
        assert running.wait_idle(60)


def test_a_slot_never_moves_before_the_commit(db: Database) -> None:
    """Nothing is committed here: a second source gets it all again."""
    db.run("create table t (id int primary key)")
    process = a_process()
    items = db.source(snapshot=False, follow=True)(None, process)
    start, _ = next(items)
    db.run(*(f"insert into t values ({n})" for n in range(50)))
    assert [next(items)[1]["key"]["id"] for _ in range(50)] == list(range(50))
    items.close()  # type: ignore[attr-defined]
    assert [m["key"]["id"] for m in read(db.source(snapshot=False), start, process)] == list(range(50))


def test_much_log_that_is_kept_is_a_warning(db: Database, caplog: Any) -> None:
    db.run("create table t (id int primary key)")
    with caplog.at_level(logging.WARNING, "cues.processors"):
        read(db.source())
        assert "of its log for the slot" not in caplog.text
        db.run("insert into t select * from generate_series(1, 1000)")
        read(Changes(db.url, "t", slot=db.slot, warn_bytes=1000))
    assert "MiB of its log for the slot (wal_status=reserved" in caplog.text


# --- set-up -------------------------------------------------------------------------------------


def test_mistakes_of_the_set_up_are_named(db: Database) -> None:
    db.run("create table t (id int primary key)", "create table nokey (x int)", "create view v as select 1")
    with pytest.raises(CuesError, match=r"'v' is not a table; expected a table"):
        read(db.source("v"))
    with pytest.raises(CuesError, match="'Missing' does not exist"):
        read(db.source("Missing"))
    with pytest.raises(CuesError, match=r"nokey has no replica identity.*Try: add a primary key; or run `alter table"):
        read(db.source("nokey"))
    db.run(f"drop publication {db.slot}", f"create publication {db.slot} for table nokey")
    with pytest.raises(CuesError, match=r"does not have the table .*\.t; it has .*nokey.*Try: run `alter publication"):
        read(db.source("t"))
    db.run(f"select pg_create_logical_replication_slot('{db.slot}_2', 'pgoutput')", f"drop publication {db.slot}")
    db.run(f"select pg_drop_replication_slot('{db.slot}_2')")
    for url in (db.url.replace("//postgres@", "//nobody_here@"),):
        with pytest.raises(psycopg.OperationalError, match='role "nobody_here" does not exist'):
            read(Changes(url, "t"))


def test_a_user_without_the_rights_is_told_which(db: Database) -> None:
    db.run("create table t (id int primary key)", f"create role {db.schema}_r login")
    db.run(f"grant usage, create on schema {db.schema} to {db.schema}_r", f"grant select on t to {db.schema}_r")
    url = db.url.replace("//postgres@", f"//{db.schema}_r@")
    try:
        with pytest.raises(CuesError, match=r"PostgreSQL refused .*Try: give the user LOGIN, REPLICATION and SELECT"):
            read(Changes(url, "t", slot=db.slot))
        db.run(f"create publication {db.slot} for table t")
        with pytest.raises((CuesError, psycopg.OperationalError), match="ermission denied"):
            read(Changes(url, "t", slot=db.slot))
        db.run(f"alter role {db.schema}_r replication")
        assert read(Changes(url, "t", slot=db.slot)) == []
    finally:
        db.run(f"drop owned by {db.schema}_r", f"drop role {db.schema}_r")


def test_a_table_with_two_names_is_one_table(db: Database, store: cues.Store) -> None:
    db.run("create table t (id int primary key)", "insert into t values (1)")
    assert len(drained(db, store, "t", f"{db.schema}.t")) == 1


def test_rows_that_a_policy_hides_stop_the_snapshot(db: Database) -> None:
    """The changes are those of all rows, so a snapshot without some would lose them silently."""
    role = f"{db.schema}_r"
    db.run("create table t (id int primary key)", "insert into t values (1), (2)", f"create role {role} login")
    db.run(f"alter role {role} replication", f"grant usage on schema {db.schema} to {role}")
    db.run(f"grant select on t to {role}", f"create publication {db.slot} for table t")
    db.run("alter table t enable row level security", "create policy p on t for select using (id = 1)")
    source = Changes(db.url.replace("//postgres@", f"//{role}@"), "t", slot=db.slot)
    try:
        with pytest.raises(CuesError, match=r"row-level security policy for table .t.*Try: .*BYPASSRLS"):
            read(source)
        db.run(f"alter role {role} bypassrls")
        assert len(read(source)) == 2
    finally:
        db.run(f"drop owned by {role}", f"drop role {role}")


def test_a_deferrable_key_is_no_replica_identity(db: Database) -> None:
    """PostgreSQL would refuse each update of the table once it is in the publication."""
    db.run("create table t (id int primary key deferrable, x int)", "insert into t values (1, 1)")
    with pytest.raises(CuesError, match="t has no replica identity"):
        read(db.source())
    db.run("alter table t replica identity full", f"drop publication {db.slot}")
    assert [m["key"] for m in read(db.source())] == [{"id": 1}]


def test_an_index_of_the_identity_that_was_dropped_is_named(db: Database) -> None:
    db.run("create table t (id int primary key, k int not null)", "create unique index i on t (k)")
    db.run("alter table t replica identity using index i", "drop index i")
    with pytest.raises(CuesError, match=r"t has no replica identity"):
        read(db.source(snapshot=False))


def test_a_publication_without_a_column_of_the_key_is_named(db: Database) -> None:
    db.run("create table t (id int primary key, x int)", "insert into t values (1, 1)")
    db.run(f"create publication {db.slot} for table t (x) with (publish = 'insert')")
    with pytest.raises(CuesError, match=r"does not have the columns id of the key of .*\.t, .*Try: .*snapshot=False"):
        read(db.source())


def test_generated_columns_that_a_publication_names_are_in_the_snapshot(db: Database, store: cues.Store) -> None:
    db.run("create table t (id int primary key, x int, y int generated always as (x * 2) stored)")
    db.run("insert into t values (1, 1)")
    try:
        db.run(f"create publication {db.slot} for table t (id, y)")
    except psycopg.errors.InvalidColumnReference:
        pytest.skip("publications have generated columns since PostgreSQL 18")
    drained(db, store)
    db.run("insert into t values (2, 2)")
    assert [m["row"] for m in drained(db, store)] == [{"id": 1, "y": 2}, {"id": 2, "y": 4}]


def test_a_key_may_change_once_its_snapshot_is_read(db: Database, store: cues.Store) -> None:
    """Also if no change has come since: only the parts of an interrupted snapshot are compared by the key."""
    db.run("create table t (id int primary key, x text)", "insert into t values (1, 'a')")
    drained(db, store)
    db.run("insert into t values (2, 'b')", "alter table t drop constraint t_pkey, add primary key (x)")
    db.run("alter table t rename id to n", "insert into t values (3, 'c')")
    assert [m["key"] for m in drained(db, store)] == [{"id": 1}, {"id": 2}, {"x": "c"}]


def test_the_detail_of_a_refusal_is_in_the_error(db: Database) -> None:
    db.run("create unlogged table t (id int primary key)")
    with pytest.raises(CuesError, match=r"cannot add relation .*unlogged tables\. Try"):
        read(db.source())


def test_a_table_that_is_added_later_needs_a_source_of_its_own(db: Database) -> None:
    db.run("create table t (id int primary key)", "create table u (id int primary key)")
    process = a_process()
    items = list(db.source()(None, process))
    db.run(f"alter publication {db.slot} add table u")
    with pytest.raises(Diverged, match=r"tables= has .*\.u, which the snapshot of this source did not have"):
        read(db.source("t", "u"), items[-1][0], process)


def test_options() -> None:
    source = Changes("postgresql://me:secret@h/shop", "t")
    assert pickle.loads(pickle.dumps(source)).where == source.where == "shop at h, slot cues"
    for options, text in (
        ({"url": "mysql://h/d"}, "url= is not a URL of PostgreSQL"),
        ({"url": "postgresql://h/d?secret=%"}, "url= cannot be read by libpq"),
        ({"tables": []}, "tables= is empty"),
        ({"tables": ["a.b.c"]}, "is not a name of a table"),
        ({"slot": "Shop"}, "is not a name of a slot"),
        ({"publication": 'a"b'}, "is not a name"),
        ({"snapshot": "no"}, "snapshot='no' is not a flag"),
        ({"follow": 1}, "follow=1 is not a flag"),
        ({"warn_bytes": 0}, "warn_bytes"),
        ({"timeout_s": 0}, "timeout_s"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            Changes(**{"url": "postgresql://h/d", "tables": "t", **options})
    with pytest.raises(InvalidArgument, match="without process="):
        next(source([1, 0, 0]))


def test_a_drain_ends_a_start_that_waits_for_transactions(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The making of a slot waits for the transactions that run: the source says so before."""
    monkeypatch.setattr(postgres_changes, "TELL_S", 0.1)
    db.run("create table t (id int primary key)")
    with db.connect() as other, other.transaction():
        other.execute("insert into t values (1)")
        with cues.Graph("g", [cues.Source("q", db.source())]).start(store=tmp_path / "store") as running:
            until(lambda: "the start waits for the end of transaction" in caplog.text)
            began = time.monotonic()
            running.drain()
        assert time.monotonic() - began < 20


@pytest.mark.slow
def test_a_connection_that_is_ended_again_and_again_loses_nothing(db: Database, tmp_path: Path) -> None:
    two_tables(db)
    graph = cues.Graph("g", [cues.Source("q", db.source("t", "u", follow=True), batch_size=7)])
    with graph.start(store=tmp_path / "store") as running:
        with Writers(db, pause_s=0.05):
            for number in range(10):
                where = f"from pg_replication_slots where slot_name = '{db.slot}' and active"
                until(lambda: db.one(f"select pg_terminate_backend(active_pid) {where}"))
                before = len(running.messages("q"))
                until(lambda: len(running.messages("q")) > before, f"nothing came after the end {number}")
        db.run("insert into t values (1000, 'last')")
        until(lambda: running.messages("q")[-1]["key"] == {"id": 1000})
        assert replayed(running.messages("q")) == db.rows("t", "u")


@pytest.mark.slow
def test_a_server_that_is_silent_is_away(own: Any, tmp_path: Path) -> None:
    """The process of the server for the source is stopped, as a host that vanishes is."""
    db = Database(own("wal_level=logical"))
    db.run("create table t (id int primary key)")
    graph = cues.Graph("g", [cues.Source("q", db.source(follow=True, timeout_s=1))])
    with halted_at_end(graph.start(store=tmp_path / "store")) as running:
        (pid,) = until(lambda: db.one("select pid from pg_stat_replication where state = 'streaming'"))
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: running.counters()["g.q"].away)
        finally:
            os.kill(pid, signal.SIGCONT)
        db.run("insert into t values (1)")
        until(lambda: running.messages("q"))
    db.sql.close()


@pytest.mark.slow
def test_a_new_timeline_is_followed_unless_it_lacks_what_was_read(own: Any) -> None:
    server = own("wal_level=logical", "restore_command=false")
    db = Database(server)
    db.run("create table t (id int primary key)", "insert into t values (1)")
    process = a_process()
    items = list(db.source()(None, process))
    server.stop()
    (server.directory / "data" / "recovery.signal").touch()
    server.start()
    db.sql = db.connect()
    until(lambda: db.one("select pg_is_in_recovery()") == (False,))
    db.run("insert into t values (2)")
    assert process.state["server"][1] == 1
    old = dict(process.state)
    ((position, message),) = [item for item in db.source()(items[-1][0], process) if item[1] is not None]
    assert message["key"] == {"id": 2} and process.state["server"][1] == 2
    lost = SimpleNamespace(state=old, stopping=False)
    with pytest.raises(Diverged, match=r"was promoted at .*, before the position .*: it lacks changes that were read"):
        read(db.source(), position, lost)
    db.sql.close()


@pytest.mark.slow
def test_100_000_messages(db: Database, store: cues.Store) -> None:
    db.run(
        "create table t (id int primary key, x text)", "insert into t select i, 'x' from generate_series(1, 50000) i"
    )
    found = timed_100_000(lambda: drained(db, store), lambda: db.run("update t set x = 'y'"))
    assert replayed(found) == db.rows()


def test_the_example_of_the_page(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    db.run("create table orders (id bigint primary key, item text, total numeric(12, 2))")
    db.run("insert into orders select i, 'tea', i / 2.0 from generate_series(1, 20) i")
    replaced = {"postgresql://cues@localhost/shop": db.url, '"replica"': f'"{db.slot}"'}
    query = "select * from orders order by id"
    with example("postgres-changes.md", lambda: db.sql.execute(query).fetchall(), db.run, **replaced) as run:
        db.run("truncate orders")
        report = run()
        assert "missing ['id']" in str(report.stopped["save"].__cause__)
