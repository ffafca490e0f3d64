"""Changes of MySQL and MariaDB tables: a snapshot, then every change, exactly once; crashes, outages, lost logs.

Almost every test replays the messages, and compares the result with the table. The replay refuses an insert of a row
that is there, and an update or delete of a row that is not: it finds each message that is doubled, lost or too early.
The server is MariaDB: tests/mariadb_server.py. Without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import signal
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import changed_tables
import mirrors
import pytest
import seeds
from changed_tables import MIRROR, Rows, a_process, example, interrupted, on_queue, read, replayed, timed_100_000
from children import Child
from mariadb_server import BINLOG, MariaDB, running
from sets import bounded, slow_except
from test_processors_mysql_tables import Database

import cues
from cues import testing
from cues.errors import CuesError, Diverged, InvalidArgument
from cues.processors import mysql_binlog
from cues.processors.mysql_changes import Changes

pymysql = pytest.importorskip("pymysql")
pytest.importorskip("sqlalchemy")


@pytest.fixture
def db(mariadb: MariaDB) -> Iterator[Database]:
    found = Database(mariadb)
    yield found
    found.session.close()


def rows_of(db: Database, *tables: str) -> Rows:
    found: Rows = {}
    for table in tables or ("t",):
        with db.session.cursor(pymysql.cursors.DictCursor) as cursor:
            cursor.execute(f"select * from {table}")
            found[f"{db.name}.{table}"] = {(row["id"],): row for row in cursor.fetchall()}
    return found


def drained(db: Database, store: cues.Store, *tables: str, **options: Any) -> list[Any]:
    """All messages on the queue after one more run."""
    return changed_tables.drained(Changes(db.url, tables or "t", **options), store)


# --- messages -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_snapshot_then_each_operation(db: Database, store: cues.Store) -> None:
    db.run("create table t (id int primary key, x text)", "insert into t values (1, 'a'), (2, null)")
    first, second = drained(db, store)
    assert first.pop("time").tzinfo is not None and first.pop("log") == second["log"]
    assert first == {
        "operation": "snapshot", "table": f"{db.name}.t", "key": {"id": 1}, "row": {"id": 1, "x": "a"},
        "before": None, "number": None, "gtid": None,
    }  # fmt: skip
    db.run(
        "begin", "insert into t values (3, 'c')", "update t set x = 'z' where id = 1", "delete from t where id = 2",
        "update t set id = 4 where id = 3", "commit", "truncate table t", "/* now */ TRUNCATE  `t`",
    )  # fmt: skip
    *changes, last, again = drained(db, store)[2:]
    assert [(m["operation"], m["key"], m["row"], m["before"]) for m in changes] == [
        ("insert", {"id": 3}, {"id": 3, "x": "c"}, None),
        ("update", {"id": 1}, {"id": 1, "x": "z"}, {"id": 1, "x": "a"}),
        ("delete", {"id": 2}, None, {"id": 2, "x": None}),
        ("delete", {"id": 3}, None, {"id": 3, "x": "c"}),
        ("insert", {"id": 4}, {"id": 4, "x": "c"}, None),
    ]
    numbers = [m["number"] for m in changes]
    assert numbers == sorted(set(numbers)) and len({(m["log"], m["gtid"]) for m in changes}) == 1
    assert (last["operation"], last["key"], last["row"]) == (again["operation"], again["key"], again["row"])
    assert (last["operation"], last["key"], last["row"]) == ("truncate", {}, None)
    assert len(drained(db, store)) == 9


VALUES: dict[str, list[str]] = {
    "tinyint": ["-5", "127"], "tinyint unsigned": ["255"], "tinyint(1)": ["1"], "smallint": ["-3"],
    "smallint unsigned": ["65535"], "mediumint": ["-8388608"], "mediumint unsigned": ["16777215"],
    "int unsigned": ["4294967295"], "int zerofill": ["7"], "bigint": ["-9223372036854775808"],
    "float": ["0.1", "1.17549e-38", "16777216", "-3.40282e38", "3.4028234e38"], "float unsigned": ["0.1"],
    "double": ["0.1", "-1e300"], "double unsigned": ["1.5"], "decimal(20,5)": ["-123456789012345.12345", "-0.00001"],
    "decimal(65,30)": ["-1.000000000000000000000000000001"], "decimal(5,0)": ["-99999"],
    "decimal(9,9)": ["0.123456789"], "decimal(10,2) unsigned": ["1.5"],
    "year": ["2026", "0", "1901"], "bigint unsigned": ["18446744073709551615"],
    "date": ["'2026-02-28'", "'0000-00-00'", "'2026-00-00'", "'9999-12-31'"],
    "datetime": ["'2026-02-28 01:02:03'", "'0000-00-00'"], "datetime(1)": ["'2026-02-28 01:02:03.4'"],
    "datetime(3)": ["'2026-02-28 01:02:03.456'", "'0000-00-00'"],
    "datetime(6)": ["'2026-02-28 01:02:03.000004'", "'0001-01-01'", "'2026-00-00 01:00:00.5'"],
    "timestamp null": ["'2026-02-28 01:02:03'", "'0000-00-00'"], "timestamp(4) null": ["'2026-02-28 01:02:03.4567'"],
    "timestamp(6) null": ["'2038-01-19 03:14:07.999999'", "'0000-00-00'"],
    "time": ["'-838:59:59'", "'01:02:03'", "'-00:00:01'"], "time(2)": ["'-00:00:00.01'", "'-01:02:03.99'"],
    "time(4)": ["'-00:00:00.0001'", "'12:00:00.5'"],
    "time(6)": ["'-838:59:58.000001'", "'-00:00:00.000001'", "'838:59:59.999999'"],
    "char(5)": ["'ab'", "''"], "char(5) character set latin1": ["'é€'"], "char(200)": ["'😀'"],
    "varchar(9)": ["'ab '", "'ключ'"], "varchar(9) character set latin1": ["'é€'", "x'818d8f909d'"],
    "varchar(9) character set ucs2": ["'ключ'"], "varchar(9) character set utf16": ["'😀'"],
    "varchar(9) character set utf32": ["'😀'"], "varchar(9) character set utf8mb3": ["'ключ'"],
    "varchar(300)": ["'x'"], "varchar(9) character set ascii": ["'x'"], "text": ["'x😀'"],
    "longtext character set latin1": ["'é'"], "tinytext": ["''"], "binary(4)": ["x'0100'", "''"],
    "varbinary(4)": ["x'0100'"], "binary(255)": ["x'00ff'"], "blob": ["x'00ff'"], "longblob": ["x'00'"],
    "enum('a','é','c d')": ["'é'", "'c d'", "''"], "enum('a','é') character set latin1": ["'é'"],
    "enum('a') character set binary": ["'a'", "''"], "set('a','c') character set binary": ["'a,c'", "''"],
    "set('a','é','c')": ["'a,c'", "''", "'é'"], "bit(1)": ["b'1'"], "bit(9)": ["b'100000001'"], "bit(64)": ["b'1'"],
    "json": ["'{\"a\": [1, null]}'"], "point": ["point(1,2)"],
    "geometry": ["st_geomfromtext('linestring(0 0,1 1)')"],
}  # fmt: skip


def test_values_of_all_types_are_the_same_in_snapshot_and_changes(db: Database) -> None:
    db.run("set sql_mode = ''")
    db.run(f"create table t (id int primary key, {', '.join(f'c{n} {type}' for n, type in enumerate(VALUES))})")
    for number in range(max(map(len, VALUES.values()))):
        listed = ", ".join(texts[number] if number < len(texts) else "null" for texts in VALUES.values())
        db.run(f"insert into t values ({number}, {listed})")
    process = a_process()
    items = list(Changes(db.url, "t")(None, process))
    snapshot = [message["row"] for _, message in items if message is not None]
    db.run("update t set id = id + 100")
    changes = read(Changes(db.url, "t"), items[-1][0], process)
    for row in snapshot:
        deleted, inserted = (
            next(m for m in changes if m["operation"] == operation and m["key"]["id"] % 100 == row["id"])
            for operation in ("delete", "insert")
        )
        for n, type in enumerate(VALUES):
            found = [each[f"c{n}"] for each in (row, deleted["before"], inserted["row"])]
            assert len({(value.__class__, str(value), value) for value in found}) == 1, (type, found)


IN_FRONT = [
    "year", "bit(3)", "bit(9)", "date", "time(3)", "datetime(2)", "timestamp null", "geometry", "point", "json",
    "tinyblob", "longblob", "text character set utf16", "enum('q') character set ucs2",
    "set('q') character set latin1", "set('q') character set binary", "enum('q') character set binary",
    "char(3) character set latin1", "char(3) character set binary", "binary(3)", "varbinary(3)", "decimal(3,1)",
    "decimal(3,1) unsigned", "float unsigned", "double", "tinyint unsigned", "bool", "bigint unsigned",
    "int as (1) virtual", "year as (2000) stored", "varchar(9) as ('é') stored", "varchar(0)", "serial", "text unique",
    "varchar(9) collate utf8mb4_uca1400_ai_ci", "enum('compressed')",
]  # fmt: skip
"""Types that the log counts, or does not count, among those with a sign or with a character set."""


@pytest.mark.slow
def test_the_type_of_a_column_does_not_change_the_values_of_the_next_ones(db: Database) -> None:
    """Signs and character sets are told by the number of the column among those that have them."""
    for n, type in enumerate(IN_FRONT):
        unique = " unique" if type == "serial" else ""
        db.run(
            f"create table t{n} (x {type}{unique}, id int primary key, a int, b int unsigned, a2 int,"
            " b2 bigint unsigned, c varchar(9) character set latin1, d varchar(9),"
            " e enum('é', 'ü') character set latin1, f enum('é', 'ю'), g set('ю', 'ц') character set utf8mb3,"
            " h text character set utf16)",
            f"insert into t{n} (id, a, b, a2, b2, c, d, e, f, g, h) values (1, -1, 4294967295, -2,"
            " 18446744073709551615, 'é€', 'é€😀', 'ü', 'ю', 'ю,ц', 'é😀')",
        )
    process = a_process()
    items = list(Changes(db.url, "t*")(None, process))
    db.run(*(f"update t{n} set a = -5" for n in range(len(IN_FRONT))))
    changes = {message["table"]: message for message in read(Changes(db.url, "t*"), items[-1][0], process)}
    rows = {message["table"]: message["row"] for _, message in items if message is not None}
    for n, type in enumerate(IN_FRONT):
        row, found = rows[f"{db.name}.t{n}"], changes[f"{db.name}.t{n}"]
        assert found["before"] == row and found["row"] == row | {"a": -5} and found["key"] == {"id": 1}, type


@pytest.mark.slow
def test_a_text_that_is_not_of_its_character_set_is_an_error_with_its_column(db: Database) -> None:
    db.run("create table t (id int primary key, x varchar(9) character set utf8mb3)")
    process = a_process()
    *_, (position, _) = Changes(db.url, "t")(None, process)
    db.run("insert into t values (2, _utf8mb3 x'EDA080')")
    with pytest.raises(CuesError, match=f"The column x of {db.name}.t has a text that Python cannot decode"):
        read(Changes(db.url, "t"), position, process)
    with pytest.raises(CuesError, match=r"of the snapshot .* has a text that Python cannot decode"):
        read(Changes(db.url, "t"))


@pytest.mark.slow
@pytest.mark.parametrize("type", ["uuid", "inet6", "year(2)", "varchar(9) character set sjis", "text compressed"])
def test_a_type_that_the_log_does_not_tell_surely_is_refused_by_name(type: str, db: Database) -> None:
    """Before the first message; and when a column is added in the middle."""
    db.run("create table t (id int primary key, x int)", "insert into t values (1, 1)")
    process = a_process()
    *_, (position, _) = Changes(db.url, "t")(None, process)
    db.run(f"alter table t add y {type}", "insert into t (id) values (2)")
    with pytest.raises(CuesError, match=rf"y (of {db.name}.t is|has the)"):
        read(Changes(db.url, "t"), position, process)
    if "sjis" not in type:
        with pytest.raises(CuesError, match=rf"The column y of {db.name}.t is .*\n?.*Try: leave the table out"):
            read(Changes(db.url, "t"))


@pytest.mark.slow
def test_a_table_that_changes_its_columns_in_the_middle(db: Database, store: cues.Store) -> None:
    """A new column, a removed one, a new type, a new name: each message has the columns of its time."""
    db.run("create table t (id int primary key, x text, y text)", "insert into t values (1, '1', 'b')")
    drained(db, store)
    db.run(
        "insert into t values (2, '7', 'c')",
        "alter table t add n int default 5 after id",
        "insert into t values (3, 6, '8', 'd')",
        "alter table t drop column y",
        "alter table t modify x int",
        "insert into t values (4, 1, 9)",
        "alter table t rename column x to z",
        "insert into t values (5, 1, 9)",
        "alter table t drop primary key, add primary key (id, n)",
        "insert into t values (5, 2, 9)",
    )
    found = drained(db, store)[1:]
    assert [m["row"] for m in found] == [
        {"id": 2, "x": "7", "y": "c"},
        {"id": 3, "n": 6, "x": "8", "y": "d"},
        {"id": 4, "n": 1, "x": 9},
        {"id": 5, "n": 1, "z": 9},
        {"id": 5, "n": 2, "z": 9},
    ]
    assert [m["key"] for m in found][-2:] == [{"id": 5}, {"id": 5, "n": 2}]


@pytest.mark.slow
def test_several_tables_by_a_pattern(db: Database, store: cues.Store) -> None:
    """Also one that is made later."""
    for table in ("a_1", "a_2", "b_1"):
        db.run(f"create table {table} (id int primary key)", f"insert into {table} values (1)")
    assert len(drained(db, store, "a_*")) == 2
    db.run("create table a_3 (id int primary key)", *(f"insert into {t} values (2)" for t in ("a_1", "a_3", "b_1")))
    assert replayed(drained(db, store, "a_*")) == rows_of(db, "a_1", "a_2", "a_3")
    with pytest.raises(cues.ProcessorStopped, match="which this source did not have all the time"):
        drained(db, store, "a_*", "b_1")


# --- exactly once -------------------------------------------------------------------------------

KEYS = {
    "int": ["-5", "0", "9", "10", "200"],
    "bigint unsigned": ["0", "9", "18446744073709551615"],
    "varchar(9) collate utf8mb4_general_ci": ["'a'", "'B'", "'ä b'", "'zz'", "''"],
    "char(3)": ["'a'", "'ab'", "'😀'"],
    "varchar(9) character set latin1": ["'a'", "'é'", "'€'"],
    "binary(2)": ["x'00'", "x'00ff'", "x'ff'"],
    "varbinary(9)": ["x'00'", "x'ff00'", "'a'"],
}


@pytest.mark.slow
@pytest.mark.parametrize("type", slow_except(list(KEYS)[:1], KEYS))
def test_a_snapshot_that_stops_after_any_row_is_continued(type: str, db: Database) -> None:
    """Between the parts a row before and a row after the place are changed, deleted, added and moved over it."""
    keys = [(key, n) for key in KEYS[type] for n in (1, 2)]
    for stop in range(1, len(keys), 3):
        db.run("drop table if exists t", f"create table t (k {type}, n int, x int default 0, primary key (k, n))")
        db.run(*(f"insert into t values ({key}, {n}, 0)" for key, n in keys))
        process = a_process()
        items = Changes(db.url, "t")(None, process)
        first = list(itertools.islice(items, stop))
        items.close()  # type: ignore[attr-defined]
        db.run(*changed_tables.between(keys, "insert into t (k, n, x)"))
        rest = read(Changes(db.url, "t"), first[-1][0], process)
        found = replayed([message for _, message in first] + rest)[f"{db.name}.t"]
        assert sorted(map(str, found)) == sorted(map(str, db.rows("select k, n from t")))
        assert [row["x"] for _, row in sorted(found.items())] == [
            x for _, x in sorted(((k, n), x) for k, n, x in db.rows("select k, n, x from t"))
        ]


class Writers(changed_tables.Writers):
    def transaction(self, session: Any, chance: random.Random, statements: int) -> None:
        with session.cursor() as cursor, contextlib.suppress(pymysql.err.IntegrityError, pymysql.err.OperationalError):
            cursor.execute("begin")
            for _ in range(statements):
                self._change(cursor, chance)
            cursor.execute("rollback" if chance.random() < 0.1 else "commit")

    def _change(self, cursor: Any, chance: random.Random) -> None:
        table, id, other = self.place(chance)
        is_undone = chance.random() < 0.1
        if is_undone:
            cursor.execute("savepoint s")
        cursor.execute(
            chance.choice(
                [
                    f"insert ignore into {table} values ({id}, 'new')",
                    f"insert into {table} values ({id}, 'new') on duplicate key update x = concat('d', x)",
                    f"update {table} set x = left(concat('u', x), 50) where id between {id} and {id + 3}",
                    f"delete from {table} where id = {id}",
                    f"update ignore {table} set id = {other} where id = {id}",
                    f"replace into {table} values ({id}, 'replaced')",
                    f"delete from {table} where id = {other}",
                ]
            )
        )
        if is_undone:
            cursor.execute("rollback to s")


def two_tables(db: Database) -> None:
    for table in "tu":
        db.run(f"create table {table} (id int primary key, x varchar(99))")
        db.run(f"insert into {table} select 2 * seq, 'old' from seq_1_to_150")


@pytest.mark.slow
def test_a_source_that_is_interrupted_anywhere_while_others_write(db: Database) -> None:
    two_tables(db)
    found = interrupted(lambda **options: Changes(db.url, ["t", "u"], **options), Writers(db, pause_s=0.002))
    assert replayed(found) == rows_of(db, "t", "u")


@pytest.mark.slow
def test_the_control_without_the_places_in_the_state_doubles(db: Database) -> None:
    db.run("create table t (id int primary key)", "insert into t values (1), (2)")
    process = a_process()
    items = Changes(db.url, "t")(None, process)
    position, first = next(items)
    items.close()  # type: ignore[attr-defined]
    db.run("insert into t values (3)")
    kept = process.state["snapshot"]
    rest = read(Changes(db.url, "t"), position, process)
    assert len(replayed([first, *rest])[f"{db.name}.t"]) == 3
    kept["segments"] = [[1, None, kept["from"][:2]]]
    file, place, gtids = kept["from"]
    process.state["snapshot"] = kept
    with pytest.raises(AssertionError):
        replayed([first, *rest, *read(Changes(db.url, "t"), [1, file, place, 0, gtids], process)])


@pytest.mark.slow
def test_positions_and_states_of_earlier_releases_are_continued(db: Database) -> None:
    """Stores keep both. These are the literal forms of version 1, in a snapshot, after it, and in a transaction."""
    db.run("create table t (id int, k varchar(9), primary key (id, k))", "insert into t values (1, 'a'), (2, 'é')")
    process = a_process()
    items = Changes(db.url, "t")(None, process)
    position, first = next(items)
    items.close()  # type: ignore[attr-defined]
    log, _, place = first["log"].partition(":")
    gtids, table = process.state["snapshot"]["from"][2], f"{db.name}.t"
    at = f'["{log}", {place}]'
    only = f'{{"server": "", "patterns": ["{table}"], "tables": [["{table}", [["id", "int"], ["k", "varchar"]]]]}}'
    whole = f'{only[:-1]}, "snapshot": {{"from": ["{log}", {place}, "{gtids}"], "segments": [[1, null, {at}]]}}}}'
    assert (json.dumps(position), json.dumps(process.state)) == ('[1, 0, [1, "61"], 0, ""]', whole)

    def kept(position: str, state: str) -> list[tuple[Any, Any]]:
        again = a_process()
        again.state.update(json.loads(state))
        found = list(Changes(db.url, "t")(json.loads(position), again))
        assert json.dumps(again.state) == only
        return found

    db.run("insert into t values (0, 'z'), (3, 'z')")
    (_, second), (_, third), (moved, _), (last, change) = kept('[1, 0, [1, "61"], 0, ""]', whole)
    assert [m["key"] for m in (second, third, change)] == [
        {"id": 2, "k": "é"},
        {"id": 3, "k": "z"},
        {"id": 0, "k": "z"},
    ]
    assert json.dumps(moved) == f'[1, "{log}", {place}, 0, "{gtids}"]'
    both = kept(f'[1, "{log}", {place}, 0, "{gtids}"]', only)
    (middle, one), (end, two) = both
    gtid = one["gtid"]
    assert json.dumps(middle) == f'[1, "{log}", {one["log"].partition(":")[2]}, 2, "{gtids}", "{gtid}"]'
    assert (one["key"]["id"], two["key"]["id"], end) == (0, 3, last)
    assert kept(json.dumps(middle), only) == [(end, two)] and kept(json.dumps(end), only) == []


CHILD = MIRROR.format(module="mysql_changes")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, pytest.param(25, marks=pytest.mark.long)])
def test_random_kills_while_others_write(rounds: int, db: Database, tmp_path: Path) -> None:
    two_tables(db)
    with Writers(db, pause_s=0.02):
        mirrors.kill(CHILD, tmp_path / "store", db.url, "t u", rounds=rounds, lines=12, pause_s=0.05)
    Child(CHILD, tmp_path / "store", db.url, "t u").end()
    assert replayed(on_queue(tmp_path / "store")) == rows_of(db, "t", "u")


@pytest.mark.slow
def test_a_kill_in_a_transaction_of_100_000_rows(db: Database, tmp_path: Path) -> None:
    db.run("create table t (id int primary key, x int)", "create table u (id int primary key)")
    Child(CHILD, tmp_path / "store", db.url, "t").end()
    db.run("begin", "insert into t select seq, 1 from seq_1_to_50000", "insert into u select seq from seq_1_to_100")
    db.run("update t set x = 2", "delete from t where id % 2", "commit")
    chance = random.Random(seeds.new())
    for _ in range(5):
        child = Child(CHILD, tmp_path / "store", db.url, "t")
        for _ in range(chance.randint(1, 300)):
            child.line()
        child.kill()
    Child(CHILD, tmp_path / "store", db.url, "t").end()
    with cues.open(tmp_path / "store") as store:
        found = testing.messages(store, "q")
        assert len(found) == 125_000 and replayed(found) == rows_of(db)


@bounded("rows", 300_000, 1_000_000)
def test_many_rows_in_one_transaction_need_no_memory(rows: int, db: Database) -> None:
    import resource

    db.run("create table t (id int primary key, x char(20))")
    process = a_process()
    *_, (position, _) = Changes(db.url, "t")(None, process)
    db.run(f"insert into t select seq, 'x' from seq_1_to_{rows}")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    count = sum(message is not None for _, message in Changes(db.url, "t")(position, process))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{time.monotonic() - began:.1f} s, {grown:.1f} MiB more")
    assert count == rows and grown < 50


# --- servers ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_restarted_server_a_purged_log_a_replica_and_a_rebuilt_server(tmp_path: Path) -> None:
    import mariadb_server

    if mariadb_server.MARIADB is None:
        pytest.skip(mariadb_server.MISSING)
    with (
        mariadb_server.running(*mariadb_server.BINLOG) as server,
        cues.open(tmp_path / "s", durability="process") as store,
    ):
        db = Database(server)
        db.run("create table t (id int primary key)", "insert into t values (1)")
        graph = cues.Graph("g", [cues.Source("q", Changes(db.url, "t", follow=True, timeout_s=5))])
        with graph.start(store=store):
            for n in range(2, 5):
                db.run(f"insert into t values ({n})")
                server.end(9 if n % 2 else 15)
                time.sleep(0.5)
                server.start()
                db.session = db.connect()
            db.run("insert into t values (9)")
            ends = time.monotonic() + 60
            while len(testing.messages(store, "q")) < 5 and time.monotonic() < ends:
                time.sleep(0.1)
        assert replayed(testing.messages(store, "q")) == rows_of(db)
        process = a_process()
        *_, (position, _) = Changes(db.url, "t")(None, process)
        with mariadb_server.running(*mariadb_server.BINLOG[:-1], "server-id=2", "log-slave-updates") as other:
            db.run("grant replication slave on *.* to cues@localhost", "insert into t values (10)")
            with other.connect() as session, session.cursor() as cursor:
                cursor.execute("reset master")
                cursor.execute(
                    f"change master to master_host='127.0.0.1', master_port={server.port}, master_user='cues',"
                    " master_use_gtid=slave_pos"
                )
                cursor.execute("drop user cues@localhost")
                cursor.execute("reset master")
                cursor.execute("start slave")
                cursor.execute("select master_gtid_wait(%s, 60)", [db.rows("select @@gtid_binlog_pos")[0][0]])
                assert cursor.fetchone() == (0,)
                cursor.execute("stop slave")
                cursor.execute(f"insert into {db.name}.t values (11)")
            state = SimpleNamespace(state=dict(process.state), stopping=False)
            url = f"mysql+pymysql://cues@127.0.0.1:{other.port}/{db.name}"
            found = read(Changes(url, "t"), position, state)
            assert [message["key"]["id"] for message in found] == [10, 11]
        with mariadb_server.running(*mariadb_server.BINLOG) as rebuilt:
            fresh = Database(rebuilt)
            fresh.run("create table t (id int primary key)", "insert into t values (7)")
            with pytest.raises(Diverged):
                read(Changes(fresh.url, "t"), position, SimpleNamespace(state=dict(process.state), stopping=False))
        db.run("flush logs", "insert into t values (12)", "flush logs")
        db.run(f"purge binary logs to '{db.rows('show master status')[0][0]}'")
        old = [1, "binlog.000001", 4, 0, "0-1-2"]
        with pytest.raises(
            Diverged, match=r"does not have the log from the position on.*purged[\s\S]*Try: give the source"
        ):
            read(Changes(db.url, "t"), old, process)


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("binlog_format", "MIXED", "binlog_format=MIXED; expected ROW"),
        ("binlog_row_image", "MINIMAL", "binlog_row_image=MINIMAL; expected FULL"),
        ("binlog_row_metadata", "NO_LOG", "binlog_row_metadata=NO_LOG; expected FULL"),
    ],
)
def test_settings_of_the_server_are_checked_at_the_start(setting: str, value: str, words: str, db: Database) -> None:
    old = db.rows(f"select @@global.{setting}")[0][0]
    db.run("create table t (id int primary key)", f"set global {setting} = '{value}'")
    try:
        with pytest.raises(CuesError, match=rf"{words}[\s\S]*Try: run `set global {setting}"):
            read(Changes(db.url, "t"))
    finally:
        db.run(f"set global {setting} = '{old}'")


@pytest.mark.slow
def test_changes_that_cannot_be_read_surely_stop_the_source(db: Database) -> None:
    """A session with another image, without names, or with statements in the place of rows."""
    for setting, words in (
        ("binlog_row_image = MINIMAL", "does not have all columns"),
        ("binlog_format = STATEMENT", "has a statement in the place of rows"),
    ):
        db.run(
            "drop table if exists t",
            "create table t (id int primary key, x int, y int)",
            "insert into t values (1, 1, 1)",
        )
        process = a_process()
        *_, (position, _) = Changes(db.url, "t")(None, process)
        with db.connect() as other, other.cursor() as cursor:
            cursor.execute(f"set session {setting}")
            cursor.execute("update t set x = 2")
        with pytest.raises(CuesError, match=words):
            read(Changes(db.url, "t"), position, process)
    process = a_process()
    *_, (position, _) = Changes(db.url, "t")(None, process)
    db.run("set global binlog_row_metadata = NO_LOG", "update t set x = 3", "set global binlog_row_metadata = FULL")
    with pytest.raises(CuesError, match="the log does not have the names of its columns"):
        read(Changes(db.url, "t"), position, process)


def after_snapshot(db: Database, *tables: str, **options: Any) -> tuple[Any, Any]:
    """The process and the position of a source that has read the snapshot."""
    process = a_process()
    *_, (position, _) = Changes(db.url, tables or "t", **options)(None, process)
    return process, position


@pytest.mark.slow
@pytest.mark.parametrize("held_bytes", [mysql_binlog.HELD_BYTES, 0])
def test_what_was_rolled_back_is_no_message(held_bytes: int, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction is logged with its ROLLBACK if it made a temporary table; held, and read ahead."""
    monkeypatch.setattr(mysql_binlog, "HELD_BYTES", held_bytes)
    db.run("create table t (id int primary key)", "create table m (id int primary key) engine = MyISAM")
    process, position = after_snapshot(db)
    temporary = (f"create temporary table x{n} (a int)" for n in itertools.count())
    insert = "insert into t values ({})".format
    db.run("begin", insert(1), next(temporary), "rollback")
    db.run("begin", insert(2), "insert into m values (1)", "rollback")
    db.run("begin", insert(3), "savepoint `A b`", insert(4), next(temporary), "savepoint c", insert(5))
    db.run("rollback to c", insert(6), "rollback to `a B`", insert(7), "savepoint d", insert(8), "commit")
    db.run("begin", "savepoint s", insert(9), next(temporary), "rollback to s", "release savepoint s", insert(10))
    db.run("commit", "begin", insert(11), "savepoint s", insert(12), next(temporary), "savepoint s", insert(13))
    db.run("rollback to s", "commit", "insert into t values (14)")
    items = list(Changes(db.url, "t")(position, process))
    found = [message["key"]["id"] for _, message in items if message is not None]
    assert found == [3, 7, 8, 10, 11, 12, 14] == [id for (id,) in db.rows("select id from t order by id")]
    for place, message in items:
        if message is not None and place[3]:
            rest = [each["key"]["id"] for each in read(Changes(db.url, "t"), place, process)]
            assert rest == found[found.index(message["key"]["id"]) + 1 :]


def test_statements_that_change_no_row_of_a_table_are_passed_over(db: Database) -> None:
    db.run("create table t (id int primary key)", "create table m (id int primary key) engine = MyISAM")
    db.run("create sequence s")
    process, position = after_snapshot(db, "t", "m", snapshot=False)
    db.run(
        "flush tables", "analyze table t", "optimize table m", "create user u1@localhost", "drop user u1@localhost",
        "create procedure p() begin create table pp (a int); insert into t values (1); drop table pp; end", "call p()",
        "set @d = 3", "create event ev on schedule at now() + interval @d day do select 1", "drop event ev",
        "create or replace table c as select 2 as a", "create view v as select * from t", "select nextval(s)",
        "create trigger g after insert on t for each row insert into m values (new.id)", "insert into t values (3)",
        "create temporary table y select * from t", "truncate table y",
        "create table k (`select` int) comment 'select'",
    )  # fmt: skip
    with pytest.raises(pymysql.err.IntegrityError):
        db.run("insert into m values (5), (6), (5), (7)")
    assert [m["key"]["id"] for m in read(Changes(db.url, ["t", "m"], snapshot=False), position, process)] == [
        1,
        3,
        3,
        5,
        6,
    ]


STATEMENTS = [
    "update {}.t set x = 2",
    "set statement max_statement_time = 9 for update {}.t set x = 2",
    "load data local infile '{1}' into table {0}.t",
    "create table {0}.t2 select * from {0}.t",
    "/*! create or replace table {0}.t2 */ as (select * from {0}.t)",
    "select {}.f()",
]


@pytest.mark.parametrize("statement", slow_except(STATEMENTS[:2], STATEMENTS))
def test_a_statement_in_the_place_of_rows_stops_the_source(statement: str, db: Database, tmp_path: Path) -> None:
    """Also one of a session that uses another database."""
    other = Database(db.server)
    (tmp_path / "l.csv").write_text("5\t5\n")
    db.run("create table t (id int primary key, x int)", "insert into t values (1, 1)")
    db.run("create function f() returns int deterministic modifies sql data begin update t set x = 7; return 1; end")
    process, position = after_snapshot(db, "t*")
    with db.server.connect(other.name, local_infile=True) as session, session.cursor() as cursor:
        cursor.execute("set session binlog_format = STATEMENT")
        cursor.execute(statement.format(db.name, tmp_path / "l.csv"))
    other.session.close()
    with pytest.raises(CuesError, match=r"in the place of rows[\s\S]*binlog_format = ROW"):
        read(Changes(db.url, "t*"), position, process)


def test_each_form_of_truncate_is_a_message(db: Database) -> None:
    db.run('create table `t``"é` (id int primary key)', "set sql_mode = 'ANSI_QUOTES'")
    process, position = after_snapshot(db, "t*")
    forms = (
        "set statement lock_wait_timeout = 9 for truncate table `t``\"é`", 'truncate table "t`""é"',
        "/*!40000 truncate table `t``\"é` */", "truncate `t``\"é` wait 5", "-- a\ntruncate /* b */ table `t``\"é`",
        f"truncate {db.name} . `t``\"é`",
    )  # fmt: skip
    db.run(*forms)
    found = [(m["operation"], m["table"]) for m in read(Changes(db.url, "t*"), position, process)]
    assert found == [("truncate", f'{db.name}.t`"é')] * len(forms)


def test_the_position_moves_while_the_tables_are_quiet(db: Database, store: cues.Store) -> None:
    """Else the log of its place would be removed."""
    db.run("create table t (id int primary key)", "insert into t values (1)", "create table u (id int primary key)")
    for n in range(2):
        drained(db, store)
        db.run("flush logs", f"insert into u values ({n})")
    drained(db, store)
    db.run(f"purge binary logs to '{db.rows('show master status')[0][0]}'", "insert into t values (2)")
    assert replayed(drained(db, store)) == rows_of(db)


@pytest.mark.slow
def test_a_position_in_another_transaction_is_refused(db: Database) -> None:
    db.run("create table t (id int primary key)")
    process, position = after_snapshot(db)
    db.run("insert into t values (1), (2)")
    (inside, first), _ = Changes(db.url, "t")(position, process)
    assert [m["key"]["id"] for m in read(Changes(db.url, "t"), inside, process)] == [2]
    with pytest.raises(Diverged, match=rf"goes on with the transaction {first['gtid']}, not in the middle of 0-1-999"):
        read(Changes(db.url, "t"), [*inside[:-1], "0-1-999"], process)


@pytest.mark.slow
def test_two_readers_with_one_number(db: Database) -> None:
    db.run("create table t (id int primary key)", "insert into t values (1)")
    source = Changes(db.url, "t", follow=True, server_id=4711, timeout_s=10)
    one, other = source(None, a_process()), Changes(db.url, "t", server_id=4711)
    for _ in range(2):
        next(one)
    found: list[Any] = []

    def go_on() -> None:
        try:
            found.append(next(one))
        except CuesError as error:
            found.append(str(error))

    thread = threading.Thread(target=go_on)
    thread.start()
    time.sleep(0.5)
    list(other(None, a_process()))
    thread.join(20)
    assert "Another reader of the log came" in str(found) and "server_id=4711" in str(found)


@pytest.mark.slow
def test_a_frozen_server_counts_as_away_after_timeout_s(db: Database) -> None:
    db.run("create table t (id int primary key)", "insert into t select seq from seq_1_to_50000")
    id = int((db.server.directory / "pid").read_text())
    process = a_process()
    for stop in (1, 50_001):
        items = Changes(db.url, "t", timeout_s=1, follow=True)(None, process)
        list(itertools.islice(items, stop))
        os.kill(id, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(pymysql.err.OperationalError, match="timed out"):
                list(items)
            assert time.monotonic() - began < 60
        finally:
            os.kill(id, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["closed", "lost"])
def test_a_snapshot_that_ends_in_the_middle_leaves_nothing_that_reads_the_rest(
    way: str, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in a finalizer is printed in the middle of other work, and can break it."""
    db.run("create table t (id int primary key, x varchar(2000))")
    db.run("insert into t select seq, repeat('x', 2000) from seq_1_to_20000")
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    items = Changes(db.url, "t")(None, a_process())
    next(items)
    if way == "closed":
        monkeypatch.setattr(pymysql.connections.Connection, "_read_packet", printed.append)
        items.close()
    else:
        [[reader]] = db.rows("select id from information_schema.processlist where state = 'Writing to net'")
        db.run(f"kill {reader}")
        with pytest.raises(pymysql.err.OperationalError):
            list(items)
    del items
    gc.collect()
    assert not printed


def incident(end: int) -> bytes:
    """The event by which a server says that it lost changes, at a place of its log."""
    body = struct.pack("<HB", 1, 4) + b"lost"
    size = 19 + len(body) + 4
    data = struct.pack("<IBIIIH", int(time.time()), 26, 1, size, end + size, 0) + body
    return data + struct.pack("<I", zlib.crc32(data))


@pytest.mark.slow
@pytest.mark.parametrize("held_bytes", [mysql_binlog.HELD_BYTES, 0])
def test_a_server_that_is_killed_in_a_commit(held_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log ends in the transaction, at and in each of its events; the next transactions are in the next file."""
    import mariadb_server

    if mariadb_server.MARIADB is None:
        pytest.skip(mariadb_server.MISSING)
    monkeypatch.setattr(mysql_binlog, "HELD_BYTES", held_bytes)
    chance = random.Random(seeds.new())
    with mariadb_server.running(*mariadb_server.BINLOG) as server:
        db = Database(server)
        db.run("create table t (id int primary key)", "create table u (id int primary key)")
        process, position = after_snapshot(db)
        for n in range(8):
            db.run(f"insert into t values ({n}), ({n + 100})", "begin", f"insert into u values ({n})")
            db.run(f"insert into t values ({n + 200}), ({n + 300})", f"insert into t values ({n + 400})", "commit")
            file = db.rows("show master status")[0][0]
            *_, gtid = (n for n, row in enumerate(db.rows(f"show binlog events in '{file}'")) if row[2] == "Gtid")
            events = db.rows(f"show binlog events in '{file}'")[gtid:-1]
            server.end(signal.SIGKILL)
            cut = chance.choice(events)[4]
            os.truncate(server.directory / "data" / file, cut + chance.choice([0, 0, 10]))
            server.start()
            db.session = db.connect()
            db.run(f"insert into t values ({n + 500}), ({n + 600})", f"insert into t values ({n + 700})")
            found = []
            for stop in (chance.randint(1, 5), None):
                for place, message in itertools.islice(Changes(db.url, "t")(position, process), stop):
                    position = place
                    found += [] if message is None else [message["key"]["id"] - n]
            assert found == [0, 100, 500, 600, 700]
        server.end()
        file = max((server.directory / "data").glob("binlog.0*"))
        with file.open("ab") as log:
            log.write(incident(file.stat().st_size))
        server.start()
        with pytest.raises(CuesError, match="has an incident: the server lost changes"):
            read(Changes(db.url, "t"), position, process)


@pytest.mark.slow
def test_transactions_that_are_only_prepared_are_refused_if_they_have_rows_of_the_source(db: Database) -> None:
    db.run("create table t (id int primary key)", "create table u (id int primary key)")
    process = a_process()
    *_, (position, _) = Changes(db.url, "t")(None, process)
    db.run("xa start 'x'", "insert into u values (1)", "xa end 'x'", "xa prepare 'x'", "xa commit 'x'")
    db.run("insert into t values (1), (2)", "flush logs", "insert into t values (3)")
    *_, (after, _) = items = list(Changes(db.url, "t")(position, process))
    assert [message["key"]["id"] for _, message in items if message is not None] == [1, 2, 3]
    assert [message["key"]["id"] for message in read(Changes(db.url, "t"), items[0][0], process)] == [2, 3]
    assert len({message["log"] for _, message in items if message is not None}) == 2
    db.run("xa start 'y'", "insert into t values (4)", "xa end 'y'", "xa prepare 'y'", "xa rollback 'y'")
    with pytest.raises(CuesError, match="is one of XA, which may be undone"):
        read(Changes(db.url, "t"), after, process)


def test_tables_without_transactions_and_those_of_other_databases(db: Database, store: cues.Store) -> None:
    db.run("create table t (id int primary key, x int) engine = MyISAM", "insert into t values (1, 1)")
    with pytest.raises(CuesError, match=rf"{db.name}.t is of the engine MyISAM[\s\S]*Try: .*snapshot=False"):
        read(Changes(db.url, "*t"))
    drained(db, store, snapshot=False)
    db.run("insert into t values (2, 1), (3, 1)", "update t set x = id", "delete from t where id = 2")
    found = replayed(drained(db, store, snapshot=False), {f"{db.name}.t": {(1,): {"id": 1, "x": 1}}})
    assert found == rows_of(db)


@pytest.mark.slow
def test_tables_whose_rows_or_changes_would_be_missing_are_refused(db: Database) -> None:
    """Also if they match a pattern: rows with a history, sequences, changes by a foreign key, no right to read."""
    db.run(
        "create table p (id int primary key)", "create view v as select * from p",
        "create or replace user reader@localhost",
        "grant replication slave, binlog monitor on *.* to reader@localhost",
        f"grant select on {db.name}.p to reader@localhost",
    )  # fmt: skip
    reader = db.url.replace("cues@", "reader@")
    *_, (position, _) = Changes(reader, "*")(None, process := a_process())
    for made, grant, words in (
        ("table t (id int primary key) with system versioning", "", r"t is not a plain table \(system versioned\)"),
        ("sequence t", "", r"t is not a plain table \(sequence\)"),
        ("table t (id int primary key, p int, foreign key (p) references p (id) on delete cascade)", "",
         r"t is changed without an event in the log by its foreign key \(.* ON DELETE CASCADE\)"),
        ("table t (id int primary key, p int, foreign key (p) references p (id) on update set null)", "",
         r"t is changed without an event in the log by its foreign key \(.* ON UPDATE SET NULL\)"),
        ("table t (id int primary key, x int)", "(id)", "command denied to user 'reader'.*t`"),
    ):  # fmt: skip
        db.run(f"create {made}", f"grant select {grant} on {db.name}.t to reader@localhost")
        for tables in ("t", "*"):
            with pytest.raises(CuesError, match=words):
                read(Changes(reader, tables))
        db.run(f"drop {made.split()[0]} t", f"revoke select {grant} on {db.name}.t from reader@localhost")
    db.run("create table t (id int primary key)", "insert into t values (1)")
    with pytest.raises(CuesError, match=rf"command denied to user 'reader'.*`{db.name}`.`t`"):
        read(Changes(reader, "*"), position, process)
    with pytest.raises(CuesError, match="or the user may not read it"):
        read(Changes(reader, "t"))


@pytest.mark.slow
def test_a_column_that_may_have_been_a_uuid_is_refused(db: Database) -> None:
    """The log has it as BINARY, and the table has it no more, or it was no UUID at the start."""
    for first, change, later in (
        ("y varchar(36)", "modify y uuid", "modify y varchar(36)"),
        ("x int", "add y inet6", "drop y"),
        ("x int", "add y inet4", "rename column y to z, modify x int"),
        ("y varchar(36)", "modify y uuid", ""),
    ):
        db.run("drop table if exists t", f"create table t (id int primary key, {first})")
        *_, (position, _) = Changes(db.url, "t")(None, process := a_process())
        value = "'::1'" if "inet6" in change else "'1.2.3.4'" if "inet4" in change else "uuid()"
        db.run(f"alter table t {change}", f"insert into t (id, y) values (1, {value})")
        if later:
            db.run(f"alter table t {later}")
        with pytest.raises(CuesError, match=rf"The column [yz] of {db.name}.t is .*(uuid|UUID|inet)"):
            read(Changes(db.url, "t"), position, process)
    db.run("drop table t", "create table t (id binary(16) primary key)")
    *_, (position, _) = Changes(db.url, "t")(None, process := a_process())
    db.run("insert into t values (x'01')", "alter table t add y int", "insert into t values (x'02', 5)")
    assert [m["row"].get("y") for m in read(Changes(db.url, "t"), position, process)] == [None, 5]


@pytest.mark.slow
def test_a_table_that_is_made_while_the_snapshot_begins_has_all_its_rows(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the transaction of the snapshot, and after it began."""
    db.run("create table t_1 (id int primary key)", "insert into t_1 values (1)")
    made: list[str] = []
    connect = pymysql.cursors.Cursor.execute

    def execute(cursor: Any, query: str, *more: Any) -> Any:
        moments = {"show status like 'binlog_snapshot": "t_2", "set session transaction isolation": "t_3"}
        for words, name in moments.items():
            if query.startswith(words) and name not in made:
                made.append(name)
                db.run(f"create table {name} (id int primary key)", f"insert into {name} values (7)")
        return connect(cursor, query, *more)

    monkeypatch.setattr(pymysql.cursors.Cursor, "execute", execute)
    *items, (position, _) = Changes(db.url, "t_*")(None, process := a_process())
    found = [m for _, m in items if m is not None]
    assert sorted(made) == ["t_2", "t_3"]
    found += read(Changes(db.url, "t_*"), position, process)
    assert replayed(found) == rows_of(db, "t_1", "t_2", "t_3")


def test_a_session_outlives_a_quiet_day_and_has_no_limit_of_rows(db: Database) -> None:
    """It is asked again only when the log has a new table."""
    db.run("set global wait_timeout = 5", "set global sql_select_limit = 5")
    try:
        with Changes(db.url, "t").connect() as session, session.cursor() as cursor:
            cursor.execute("select @@wait_timeout, @@sql_select_limit, @@sql_mode")
            assert cursor.fetchone() == (31_536_000, (1 << 64) - 1, "")
    finally:
        db.run("set global wait_timeout = default", "set global sql_select_limit = default")


@pytest.mark.slow
def test_a_pattern_that_is_removed_cannot_come_back(db: Database, store: cues.Store) -> None:
    db.run("create table t (id int primary key)", "create table u (id int primary key)")
    drained(db, store, "t", "u")
    db.run("insert into u values (5)", "insert into t values (1)")
    drained(db, store, "t")
    with pytest.raises(Exception, match=rf"tables= has {db.name}.u, which this source did not have all the time"):
        drained(db, store, "t", "u")


@pytest.mark.slow
def test_another_key_after_an_interrupted_snapshot_stops_the_source(db: Database) -> None:
    for key in ("drop primary key, add primary key (n)", "modify id varchar(9)"):
        db.run(
            "drop table if exists t, u", "create table t (id int primary key, n int not null)",
            "create table u (id int primary key)", "insert into t values (1, 1), (2, 2), (3, 3)",
            "insert into u values (1), (2)",
        )  # fmt: skip
        source, process = Changes(db.url, ["t", "u"]), a_process()
        opened = source(None, process)
        position, _ = next(opened)
        opened.close()
        opened = source(position, process)
        for _ in range(3):
            position, _ = next(opened)
        opened.close()
        db.run(f"alter table t {key}", "insert into t values (9, 9)")
        with pytest.raises(Diverged, match=rf"has another key of {db.name}.t since the snapshot began"):
            read(source, position, process)


@pytest.mark.slow
def test_servers_that_leave_tables_out_of_their_log_are_refused(tmp_path: Path) -> None:
    with running(*BINLOG) as first:
        db = Database(first)
        db.run("create table t (id int primary key)")
        for option in (f"binlog-ignore-db={db.name}", "binlog-do-db=other"):
            first.end()
            first.start(option)
            with pytest.raises(CuesError, match=r"leaves databases out of its log[\s\S]*Try: start the server without"):
                read(Changes(db.url, "t"))
        first.end()
        first.start()
        read(Changes(db.url, "t"))
        db.session = db.connect()
        db.run(
            "change master to master_host='127.0.0.1', master_port=1, master_user='x', master_connect_retry=1",
            "create or replace user plain@localhost", f"grant select on {db.name}.* to plain@localhost",
            "grant replication slave, binlog monitor on *.* to plain@localhost", "start slave",
        )  # fmt: skip
        with pytest.raises(CuesError, match=r"is a replica whose log does not have what it receives: log_slave_upd"):
            read(Changes(db.url, "t"))


@pytest.mark.slow
def test_what_is_wrong_is_said_before_the_first_message(db: Database) -> None:
    db.run("create table t (x int)", "create table u (d date primary key)", "create view v as select * from t")
    with pytest.raises(CuesError, match="has no primary key, by which a snapshot is read"):
        read(Changes(db.url, "t"))
    with pytest.raises(CuesError, match="has a date in its primary key"):
        read(Changes(db.url, "u"))
    for name in ("v", "missing"):
        with pytest.raises(CuesError, match=f"{name}' does not exist, or is not a table"):
            read(Changes(db.url, name))
    process = a_process()
    *_, (position, _) = Changes(db.url, "t", snapshot=False)(None, process)
    db.run("insert into t values (5)")
    assert [(m["key"], m["row"]) for m in read(Changes(db.url, "t"), position, process)] == [({}, {"x": 5})]
    with pytest.raises(CuesError, match="REPLICATION SLAVE"):
        read(Changes(db.url.replace("cues@", "nobody:x@"), "t"))
    for options, words in (
        ({"url": "postgresql://h/d"}, "not a URL of MySQL"),
        ({"url": "mysql://h/d?x=1"}, "has the option 'x'"),
        ({"url": "mysql://h"}, "without a database"),
        ({"tables": []}, "tables= is empty"),
        ({"follow": 1}, "is not a flag"),
        ({"server_id": 0}, "server_id"),
        ({"server_id": 1 << 32}, "from 1 to 4,294,967,295"),
        ({"url": "mysql://h/d?charset=latin1"}, "has a charset other than utf8mb4"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            Changes(**{"url": db.url, "tables": "t", **options})
    with pytest.raises(Diverged, match=r"is not one of cues\.processors\.mysql_changes"):
        read(Changes(db.url, "t"), [9], a_process())


@pytest.mark.slow
def test_100_000_messages(db: Database, store: cues.Store) -> None:
    db.run("create table t (id int primary key, x varchar(9))", "insert into t select seq, 'x' from seq_1_to_50000")
    found = timed_100_000(lambda: drained(db, store), lambda: db.run("update t set x = 'y'"))
    assert replayed(found) == rows_of(db)


@pytest.mark.slow
def test_the_example_of_the_page(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    db.run("create table orders (id bigint primary key, item text, total decimal(12, 2))")
    db.run("insert into orders select seq, 'tea', seq / 2.0 from seq_1_to_20")
    url = {"mysql+pymysql://cues@localhost/shop": db.url}
    with example("mysql-changes.md", lambda: db.rows("select * from orders order by id"), db.run, **url):
        pass
