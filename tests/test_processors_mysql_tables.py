"""MySQL and MariaDB as tables: values, keys that a collation holds equal, engines, outages; each row once.

The server is MariaDB: tests/mariadb_server.py. Without it these tests are skipped.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pytest
import seeds
from children import Child
from mariadb_server import MariaDB
from sets import bounded
from small import until
from test_processors_sql import Presented

import cues
from cues import testing
from cues.checkpoints import SQLCheckpoint
from cues.errors import CheckpointError, InvalidArgument
from cues.processors.sql_sink import Table
from cues.processors.sql_source import Rows

sa = pytest.importorskip("sqlalchemy")
pytest.importorskip("pymysql")


class Database:
    """A database of a server, with a connection that commits each statement."""

    def __init__(self, server: MariaDB, options: str = "character set utf8mb4") -> None:
        self.server, self.url = server, server.database(options)
        self.name = self.url.rpartition("/")[2]
        self.session = self.connect()

    def connect(self) -> Any:
        return self.server.connect(self.name, init_command="set time_zone = '+00:00'")

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.session.cursor().execute(statement)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self.session.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())


@pytest.fixture
def db(mariadb: MariaDB) -> Iterator[Database]:
    found = Database(mariadb)
    yield found
    found.session.close()


def write(table: Table, *messages: dict[str, Any], step: int = 1) -> None:
    """Write messages in one step of their own."""
    presented = cast(cues.Process, Presented({"g.save.q": (step, step + len(messages))}))
    with table.transaction(presented) as opened:
        opened.connection.write(list(messages))


def read(db: Database, table: str = "t", cursor: str = "id", **options: Any) -> list[Any]:
    return [message for _, message in Rows(db.url, table, cursor, **options)(None)]


VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "tinyint(1)": ([0, 1, True, None], [2.5, 128, "1"]),
    "bigint": ([-(1 << 63), (1 << 63) - 1], [1 << 63, "1"]),
    "bigint unsigned": ([0, (1 << 64) - 1], [-1, 1 << 64]),
    "smallint unsigned": ([65_535], [65_536]),
    "float": ([0.5, 1e30], [float("nan"), float("inf"), 1e39, "1"]),
    "double": ([0.1, -1e300], [float("nan"), float("-inf")]),
    "double(7,2)": ([], [0.5]),
    "decimal(10,2)": ([Decimal("1.50"), -7, 0.25], [Decimal("1.505"), 1e9, Decimal("NaN")]),
    "decimal(10,2) unsigned": ([Decimal("1.50")], [Decimal("-1.5")]),
    "varchar(7)": (["é%s?\\'\"", "ab ", "😀", ""], ["abcdefgh", "abcdefg ", 5]),
    "char(5)": (["ab", "😀"], ["ab ", "abcdef"]),
    "varchar(5) character set latin1": (["é"], ["😀"]),
    "tinytext": (["x" * 255], ["x" * 256, "x" * 255 + " ", "é" * 128]),
    "longtext": (["x\0\n\r\x1ay"], [b"x"]),
    "varbinary(3)": ([b"\0\xff\\", b""], [b"1234", "x"]),
    "binary(3)": ([b"\0\xff'"], [b"12", b"1234"]),
    "blob": ([b"\0" * 9], [b"\0" * 65_536]),
    "date": ([date(1, 1, 1), date(9999, 12, 31)], [datetime(2026, 1, 1), "2026-01-01"]),
    "datetime(6)": ([datetime(1, 1, 1), datetime(2026, 2, 28, 1, 2, 3, 4)], [datetime(2026, 1, 1, tzinfo=UTC)]),
    "datetime": ([datetime(2026, 2, 28, 1, 2, 3)], [datetime(2026, 2, 28, 1, 2, 3, 500_000)]),
    "timestamp(3) null": (
        [datetime(2026, 3, 29, 1, 30, 0, 4_000, tzinfo=UTC), None],
        [datetime(2026, 1, 1), datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC), datetime(2150, 1, 1, tzinfo=UTC)],
    ),
    "timestamp not null": ([datetime(2026, 10, 25, 1, 30, tzinfo=UTC)], [None]),
    "time(6)": ([clock(1, 2, 3, 4), timedelta(hours=-1, minutes=-30), timedelta(hours=838)], [timedelta(days=60)]),
    "time": ([clock(1, 2, 3), timedelta(minutes=-30)], [clock(1, 2, 3, 4), timedelta(microseconds=1)]),
    "year": ([2026, 0], [26, "2026", 1900]),
    "enum('a','B')": (["a", "B"], ["x", 1, "", "1", "A", "a "]),
    "enum('2','it''s','c\\\\d')": (["2", "it's", "c\\d"], ["1", "3"]),
    "set('a','b')": (["a,b", "", "b"], ["x", "3", "b,a", "a,a", "A", "a,", 1]),
    "varchar(9) character set utf8mb4": (["", " "], [b""]),
    "bit(9)": ([b"\1\xff", 5, True], [512, b"\2\0", "5"]),
    "json": ([{"a": [1, None]}], ["x"]),
    "uuid": (["00000000-0000-0000-0000-00000000000a"], ["x"]),
    "inet6": (["::1"], ["x"]),
    "point": ([], [b"x", "x"]),
    "int not null": ([0], [None]),
}
"""Values that a column takes, and those that it does not, by its type."""

READ: dict[str, Any] = {
    "tinyint(1)": int, "decimal(10,2)": lambda value: Decimal(value).quantize(Decimal("0.01")),
    "json": str, "bit(9)": lambda value: (
        value if isinstance(value, bytes) else int(value).to_bytes(2)
    ),
    "time(6)": lambda value: value if isinstance(value, timedelta) else as_delta(value),
    "time": lambda value: value if isinstance(value, timedelta) else as_delta(value),
    "double(7,2)": float,
}  # fmt: skip


def as_delta(value: clock) -> timedelta:
    return timedelta(hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    ["", "STRICT_TRANS_TABLES", "ANSI_QUOTES,NO_BACKSLASH_ESCAPES", "EMPTY_STRING_IS_NULL,PAD_CHAR_TO_FULL_LENGTH"],
)
def test_values_are_written_as_they_are_or_refused(db: Database, mode: str) -> None:
    """Whatever the sql_mode and the time zone of the server are."""
    db.run(f"set global sql_mode = '{mode}'", "set global time_zone = '-03:00'")
    target = SQLCheckpoint(db.url)
    try:
        for number, (type, (good, bad)) in enumerate(VALUES.items()):
            db.run(f"create table t{number} (id int primary key, x {type})")
            table = Table(target, f"t{number}", ["id", "x"])
            for at, value in enumerate(good):
                write(table, {"id": at, "x": value}, step=at + 1)
            for value in bad:
                with pytest.raises((ValueError, sa.exc.DBAPIError)) as error:
                    write(table, {"id": 99, "x": value}, step=100)
                assert not isinstance(error.value, CheckpointError), (type, value)
            found = [row["x"] for row in read(db, f"t{number}")]
            if type == "json":
                assert found == ['{"a": [1, null]}']
                continue
            plain = READ.get(type, lambda value: value)
            wanted = [None if value is None else plain(value) for value in good]
            assert found == wanted and list(map(str, found)) == list(map(str, wanted)), type
    finally:
        target.close()
        db.run("set global sql_mode = default", "set global time_zone = 'SYSTEM'")


def test_a_table_of_all_families_is_created_and_read(db: Database) -> None:
    """Also in a database of latin1, with a text as the key and in each mode."""
    old = Database(db.server, "character set latin1")
    columns = {
        "k": "text", "i": "integer", "f": "float", "d": "decimal", "b": "boolean", "y": "bytes", "ts": "timestamp",
        "day": "date", "t": "time", "u": "uuid", "j": "json",
    }  # fmt: skip
    row = {
        "k": "ключ 😀", "i": 1 << 60, "f": 0.1, "d": Decimal("1.5"), "b": True, "y": b"\0",
        "ts": datetime(2026, 1, 1, 0, 0, 0, 5, tzinfo=UTC), "day": date(2026, 1, 1), "t": clock(1, 2, 3, 4),
        "u": "00000000-0000-0000-0000-00000000000a", "j": {"a": 1},
    }  # fmt: skip
    table = Table(old.url, "t", columns, mode="upsert", key="k", delete="gone")
    write(
        table, row | {"gone": False}, {"k": "x", "gone": True}, *[row | {"k": str(n), "gone": False} for n in range(50)]
    )
    found = {found["k"]: found for found in read(old, cursor="k")}
    assert len(found) == 51
    assert found["ключ 😀"] == row | {
        "b": 1,
        "t": timedelta(hours=1, minutes=2, seconds=3, microseconds=4),
        "j": '{"a": 1}',
    }
    write(Table(old.url, "t", columns, mode="delete", key="k"), *[{"k": str(n)} for n in range(50)], step=100)
    assert [found["k"] for found in read(old, cursor="k")] == ["ключ 😀"]
    none = dict.fromkeys(columns) | {"k": "null", "gone": False}
    write(table, none, step=200)
    assert read(old, cursor="k")[0] == dict.fromkeys(columns) | {"k": "null"}


@pytest.mark.parametrize("seed", seeds.among(range(8), fast=1))
@pytest.mark.parametrize("second_key", [False, True])
def test_keys_that_the_collation_holds_equal_are_one_row(db: Database, seed: int, second_key: bool) -> None:
    """Random upserts and deletes in one step; the last message of a key, as the database compares, wins."""
    chance = random.Random(seed)
    more = ", unique (n)" if second_key else ""
    db.run(f"create table t (k varchar(9) collate utf8mb4_general_ci primary key, n int{more})")
    table = Table(db.url, "t", ["k", "n"], mode="upsert", key="k", delete="gone")
    model: dict[str, int] = {}
    step = 1
    for _ in range(5):
        messages = []
        for _ in range(chance.randrange(1, 30)):
            key, step = chance.choice(["a", "A", "á", "b", "B ", "b "]), step + 1
            same = key.strip().lower().replace("á", "a")
            gone = chance.random() < 0.4
            messages.append({"k": key, "gone": True} if gone else {"k": key, "n": step, "gone": False})
            model.pop(same, None)
            if not gone:
                model[same] = step
        write(table, *messages, step=step)
        found = {k.strip().lower().replace("á", "a"): n for k, n in db.rows("select k, n from t")}
        assert found == model, messages


def test_an_upsert_does_not_update_the_row_of_another_unique_key(db: Database, store: cues.Store) -> None:
    db.run("create table t (id int primary key, code varchar(9) unique, x int)", "insert into t values (1, 'a', 1)")
    graph = cues.Graph("g", errors="errors")
    graph.source("q")
    graph.add(Table(db.url, "t", ["id", "code", "x"], mode="upsert", key="id").sink("q"))
    with graph.start(store=store) as running:
        for row in ({"id": 2, "code": "a", "x": 5}, {"id": 1, "code": "b", "x": 6}, {"id": 2, "code": "a", "x": 7}):
            running.send("q", row)
            running.wait_idle()
    assert sorted(db.rows("select * from t")) == [(1, "b", 6), (2, "a", 7)]
    (failed,) = testing.messages(store, "errors")
    assert "Duplicate entry" in failed["err/cause"][-1]["message"]


def test_rows_that_the_database_refuses_fail_alone(db: Database, store: cues.Store) -> None:
    """A check, a trigger, a foreign key, a value that is too large, a missing default."""
    db.run(
        "create table p (id int primary key)", "insert into p values (1)",
        "create table t (id int primary key, x int check (x < 100), y int references p (id), z int not null)",
        "create trigger tr before insert on t for each row begin if new.x = 13 then signal sqlstate '45000'"
        " set message_text = 'unlucky'; end if; end",
    )  # fmt: skip
    graph = cues.Graph("g", errors="errors")
    graph.source("q")
    graph.add(Table(db.url, "t", ["id", "x", "y", "z"]).sink("q"))
    bad = [{"x": 100}, {"x": 13}, {"y": 2}, {"x": 1 << 40}, {"z": None}, {"id": 1}]
    with graph.start(store=store) as running:
        for n in range(20):
            row = {"id": n, "x": n % 10, "y": 1, "z": 0}
            running.send("q", row if n % 3 or n == 18 else row | bad[n // 3])
        running.wait_idle()
    assert [n for (n,) in db.rows("select id from t order by id")] == [n for n in range(20) if n % 3 or n == 18]
    assert len(testing.messages(store, "errors")) == 6


def test_what_does_not_fit_is_refused_before_the_first_message(db: Database) -> None:
    db.run("create table m (id int primary key) engine = MyISAM", "create view v as select * from m")
    for name, engine in (("m", "MyISAM"), ("v", "VIEW")):
        with pytest.raises(
            CheckpointError, match=rf"of the engine {engine}.*\n?.*Try: alter table {name} engine = InnoDB"
        ):
            Table(db.url, name, ["id"]).__cues_prepare__()
    db.run("create table t (k text, n int, e enum('b', 'a') not null, unique (k(5)))")
    with pytest.raises(CheckpointError, match="no unique key of the columns k"):
        Table(db.url, "t", ["k", "n"], mode="upsert", key="k").__cues_prepare__()
    with pytest.raises(InvalidArgument, match="could not be found again"):
        read(db, cursor="e")
    engine = sa.create_engine(db.url, isolation_level="AUTOCOMMIT")
    with pytest.raises(InvalidArgument, match="commits each statement by itself"):
        SQLCheckpoint(engine).set_up(lambda connection: None)
    engine.dispose()


@pytest.mark.parametrize("code", ["commit", "truncate table u", "create table if not exists u (id int)", "rollback"])
@pytest.mark.parametrize("fails", [False, True])
def test_code_that_ends_its_transaction_is_an_error(db: Database, store: cues.Store, code: str, fails: bool) -> None:
    """A statement that changes tables commits the position before the rows are written. It is no outage either."""
    db.run("create table t (id int)", "create table u (id int)")
    graph = cues.Graph("g")
    graph.source("q")

    @graph.sink("q", checkpoint=SQLCheckpoint(db.url))
    def save(message: Any, process: cues.Process) -> None:
        process.connection.execute(sa.text(code))
        if fails:
            raise ConnectionError("a service is away")
        process.connection.execute(sa.text("insert into t values (:id)"), dict(message))

    if fails and code == "rollback":
        return  # nothing is committed, so the step is repeated
    with (
        pytest.raises(cues.errors.ProcessorStopped, match="save ended its transaction itself"),
        graph.start(store=store) as running,
    ):
        running.send("q", {"id": 1})
        running.wait_idle()


def test_limits_and_character_sets_of_the_session_do_not_change_what_is_read_and_written(db: Database) -> None:
    db.run("create table t (id int primary key, x text)", "insert into t select seq, '' from seq_1_to_200")
    db.run("set global sql_select_limit = 50")
    try:
        assert len(read(db)) == 200
    finally:
        db.run("set global sql_select_limit = default")
    with pytest.raises(InvalidArgument, match="has a charset other than utf8mb4"):
        list(Rows(f"{db.url}?charset=latin1", "t", "id")(None))
    with pytest.raises(InvalidArgument, match="has a charset other than utf8mb4"):
        Table(f"{db.url}?charset=utf8mb3", "t", ["id"]).__cues_prepare__()


def test_keys_with_blanks_at_the_end_are_keys_of_their_own_in_tables_of_ours(db: Database) -> None:
    table = Table(db.url, "t", {"k": "text", "n": "integer"}, mode="upsert", key="k")
    write(table, {"k": "a", "n": 1}, {"k": "a ", "n": 2}, {"k": "a", "n": 3})
    assert sorted(db.rows("select * from t")) == [("a", 3), ("a ", 2)]
    for name in ("bank", "bank "):
        SQLCheckpoint(db.url, name).restore()
    assert sorted(db.rows("select name, fence from cues_checkpoints")) == [("bank", 1), ("bank ", 1)]


@pytest.mark.parametrize("more", ["", ", unique (n)"])
def test_an_upsert_writes_the_key_of_the_message_where_the_collation_holds_another_equal(
    db: Database, more: str
) -> None:
    db.run(f"create table t (k varchar(9) collate utf8mb4_general_ci primary key, n int{more})")
    table = Table(db.url, "t", ["k", "n"], mode="upsert", key="k")
    write(table, {"k": "a", "n": 1}, {"k": "A", "n": 2})
    assert db.rows("select * from t") == [("A", 2)]


def test_a_generated_column_fails_the_message(db: Database, store: cues.Store) -> None:
    db.run("create table t (id int primary key, g int as (id + 1) stored)")
    graph = cues.Graph("g", errors="errors")
    graph.source("q")
    graph.add(Table(db.url, "t", ["id", "g"]).sink("q"))
    with graph.start(store=store) as running:
        running.send("q", {"id": 1, "g": 5})
        running.wait_idle()
    assert "generated column" in testing.messages(store, "errors")[0]["err/cause"][-1]["message"]


def test_dates_with_zeros_are_errors_of_their_rows(db: Database) -> None:
    db.run(
        "set session sql_mode = ''", "create table t (id int primary key, d date, t datetime, s timestamp null)",
        "insert into t values (1, '0000-00-00', '2026-01-01', null), (2, '2026-01-00', '2026-01-01', null),"
        " (3, '2026-01-01', '0000-00-00 00:00:00', null), (4, '2026-01-01', null, '0000-00-00'),"
        " (5, '2026-01-01', '2026-01-01', '2026-01-01')",
        "set session sql_mode = default",
    )  # fmt: skip
    *bad, good = read(db)
    assert [str(error).partition("value in ")[2].split(" ")[0] for error in bad] == ["d", "d", "t", "s"]
    assert good["s"] == datetime(2026, 1, 1, tzinfo=UTC) and good["t"] == datetime(2026, 1, 1)


def test_a_cursor_by_the_time_of_the_change(db: Database) -> None:
    """Also under a collation without case, and pages of two rows."""
    db.run(
        "create table t (id varchar(9) primary key, changed timestamp(6) not null, x int)",
        "insert into t values ('a', '2026-01-01', 1), ('B', '2026-01-01', 2), ('c', '2026-01-02 00:00:00.5', 3)",
    )
    source = Rows(db.url, "t", ["changed", "id"], page_rows=2)
    items = list(source(None))
    assert [message["id"] for _, message in items] == ["a", "B", "c"]
    assert [message["id"] for _, message in source(items[0][0])] == ["B", "c"]
    db.run("update t set x = 9, changed = '2026-01-03' where id = 'a'")
    assert [message["x"] for _, message in source(items[-1][0])] == [9]
    db.run("drop table t", "create table t (id varchar(9), x int)", "insert into t values ('a', 1), ('A', 2)")
    with pytest.raises(InvalidArgument, match="as the database compares"):
        read(db)


@pytest.mark.slow
def test_large_messages_and_max_allowed_packet(db: Database, store: cues.Store) -> None:
    """Rows are sent in statements of that size; a row that is larger fails, and is no outage."""
    graph = cues.Graph("g", errors="errors")
    graph.source("q")
    graph.add(Table(db.url, "t", {"id": "integer", "x": "text"}, mode="upsert", key="id").sink("q"))
    db.run("set global max_allowed_packet = 1048576")
    try:
        with graph.start(store=store) as running:
            for n in range(12):
                running.send("q", {"id": n, "x": "'" * 300_000 if n != 5 else "'" * 530_000})
            running.wait_idle()
    finally:
        db.run("set global max_allowed_packet = default")
    assert [n for (n,) in db.rows("select id from t order by id")] == [n for n in range(12) if n != 5]
    (failed,) = testing.messages(store, "errors")
    assert "max_allowed_packet" in failed["err/cause"][-1]["message"]


# --- outages ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lock_waits_and_deadlocks_are_waited_out(db: Database, store: cues.Store) -> None:
    db.run("create table t (id int primary key, x int)", "insert into t values (1, 0), (2, 0)")
    target = SQLCheckpoint(db.url, timeout_s=1)
    graph = cues.Graph("g")
    graph.source("q")
    graph.add(Table(target, "t", ["id", "x"], mode="upsert", key="id").sink("q", errors=None))
    other = db.connect()
    cursor = other.cursor()
    with graph.start(store=store) as running:
        cursor.execute("begin")
        cursor.execute("update t set x = 5 where id = 2")
        running.send("q", {"id": 2, "x": 1})
        time.sleep(2.5)  # the wait of the sink ends at least twice
        other.commit()
        running.wait_idle(timeout=60)
        assert sorted(db.rows("select * from t")) == [(1, 0), (2, 1)]
        ends = time.monotonic() + 3
        while time.monotonic() < ends:  # deadlocks: rows in the other order
            running.send("q", {"id": 1, "x": 2})
            running.send("q", {"id": 2, "x": 2})
            try:
                cursor.execute("begin")
                cursor.execute("update t set x = 3 where id = 2")
                cursor.execute("update t set x = 3 where id = 1")
                other.commit()
            except Exception:
                other.rollback()
        running.send("q", {"id": 1, "x": 7})
        running.send("q", {"id": 2, "x": 7})
        running.wait_idle(timeout=60)
    assert sorted(db.rows("select * from t")) == [(1, 7), (2, 7)]
    other.close()


CHILD = """
import sys, cues
from cues.processors.sql_sink import Table
from cues.processors.sql_source import Rows

url, path, mode = sys.argv[1:]
graph = cues.Graph("g")
key = {} if mode == "append" else {"key": "id", "delete": "gone"}
rows = Rows(url, "data", "id", columns=["id", "k", "n", "gone"], follow=True, poll_s=0.01, page_rows=50)
graph.add(cues.Source("q", rows))

@graph.stream("q", "rows")
def as_row(row):
    kept = {"id": row["id"], "n": row["n"]}
    return kept if mode == "append" else {"id": row["k"], "n": row["n"], "gone": bool(row["gone"])}

graph.add(Table(url, "copy", {"id": "integer", "n": "integer"}, mode=mode, **key).sink("rows", batch_size=40))
with graph.start(store=path) as running:
    print("started", flush=True)
    running.wait_done()
"""


@bounded("rounds", 5, 25)
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_random_kills_of_the_process_and_of_the_server(mode: str, rounds: int, tmp_path: Path) -> None:
    """From one table into another, while a writer adds rows; some of the kills are of the server itself."""
    import mariadb_server

    if mariadb_server.MARIADB is None:
        pytest.skip(mariadb_server.MISSING)
    chance = random.Random(seeds.new())
    with mariadb_server.running() as server:
        db = Database(server)
        db.run("create table data (id int primary key auto_increment, k int, n int, gone int)")
        model: dict[int, int] = {}
        count = 0

        def add() -> None:
            nonlocal count
            rows = []
            for _ in range(200):
                count, k, gone = count + 1, chance.randrange(50), chance.random() < 0.3
                rows.append(f"({count}, {k}, {count}, {int(gone)})")
                model.pop(k, None)
                if not gone:
                    model[k] = count
            db.run(f"insert into data values {', '.join(rows)}")

        for number in range(rounds):
            child = Child(CHILD, db.url, tmp_path / "store", mode)
            assert child.line() == "started"
            add()
            time.sleep(chance.random() * 0.4)
            if number % 6 == 3:
                server.end(chance.choice([9, 15]))
                time.sleep(chance.random() * 0.5)
                server.start()
                db.session = db.connect()
                add()
                time.sleep(chance.random())
            child.kill()
        child = Child(CHILD, db.url, tmp_path / "store", mode)
        until(lambda: db.rows("show tables like 'copy'"), 60)
        if mode == "append":
            until(lambda: len(db.rows("select 1 from copy")) >= count, 60)
            assert db.rows("select id, n from copy order by n") == [(n, n) for n in range(1, count + 1)]
        else:
            until(lambda: dict(db.rows("select id, n from copy")) == model, 60)
        child.kill()


@pytest.mark.slow
def test_a_changed_password_stops_the_sink_and_a_restart_does_not(tmp_path: Path) -> None:
    import mariadb_server

    if mariadb_server.MARIADB is None:
        pytest.skip(mariadb_server.MISSING)
    with mariadb_server.running() as server, cues.open(tmp_path / "store", durability="process") as store:
        db = Database(server)
        graph = cues.Graph("g")
        graph.source("q")
        graph.add(Table(db.url, "t", {"id": "integer"}).sink("q"))
        with pytest.raises(cues.ProcessorStopped, match="Access denied"), graph.start(store=store) as running:
            running.send("q", {"id": 1})
            running.wait_idle(timeout=30)
            server.end()
            running.send("q", {"id": 2})
            time.sleep(1)
            server.start()
            running.wait_idle(timeout=60)
            db.session = db.connect()
            assert db.rows("select id from t order by id") == [(1,), (2,)]
            db.run("alter user cues@localhost identified by 'other'")
            server.end()
            server.start()
            running.send("q", {"id": 3})
            running.wait_idle(timeout=60)
