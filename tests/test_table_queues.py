"""Tables in queues: written and read as tables or as messages, in any order, the queue is that of the messages."""

from __future__ import annotations

import itertools
import os
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import seeds

import cues
from cues import errors
from cues.base import names
from cues.cli.app import run as cli
from cues.queues.appender import Appender
from cues.queues.log import DELETE_ENTRIES_MAX, Log
from cues.records import columns
from cues.storage import datafile
from cues.storage.format_record import record_of

ROWS = [{"n": n, "key": f"k{n % 7}", "at": datetime(2026, 1, 1 + n % 28), "part": n % 3 or None} for n in range(400)]


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def test_a_table_is_written_as_columns_and_read_as_messages(store: cues.Store) -> None:
    queue = store.queue("q", metadata={"t", "time"})
    assert queue.appender().write({"first": True}) == 1
    assert queue.appender().write_table(table(ROWS)) == range(2, 402)
    tailer = queue.tailer()
    assert tailer.read() == {"first": True}
    assert tailer.read_many(1_000) == ROWS
    assert tailer.envelope is not None and tailer.envelope.index == 401
    tailer.to_index(300)
    tailer.direction = "backward"
    assert tailer.read() == ROWS[297]
    assert queue.tailer(meta=True).read_many(3)[2]["q/meta"]["q/queue"]["q"]["q/t"] == 3


def test_a_write_of_no_rows_or_of_a_bad_table_writes_nothing(store: cues.Store) -> None:
    queue, parts = store.queue("q"), store.queue("p", partitions=3)
    assert queue.appender().write_table(table([])) == range(1, 1)
    assert parts.appender().write_table(table([])) == {}
    for bad in (pa.table([[1], [2]], ["a", "a"]), pa.table({"q/meta": [1]}), [{"n": 1}]):
        with pytest.raises(errors.CuesError):
            queue.appender().write_table(bad)
    assert len(queue) == 0
    with pytest.raises(errors.MessageTooLarge, match="row 1: "):
        store.queue("small", max_message_bytes=100).appender().write_table(pa.table({"text": ["a", "b" * 200]}))


def test_an_appender_with_a_schema_checks_each_row_of_a_table(store: cues.Store) -> None:
    """The error names the row and the field, and nothing of the table is written."""
    queue = store.queue("q")
    appender = queue.appender(schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    assert appender.write_table(pa.table({"n": [1, 2]})) == range(1, 3)
    with pytest.raises(errors.SchemaError, match="row 1: ") as caught:
        appender.write_table(pa.table({"n": [3, None]}))
    assert "n" in str(caught.value) and queue.tailer().read_many(9) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    "options",
    [
        {"key": "key"},
        {"key": "n", "partitioner": "rendezvous"},
        {"key": "part", "partitioner": "murmur2-sticky"},
        {"key": "at", "partitioner": "fnv1a-modulo"},
        {"key": lambda message: message["n"] // 5},
        {"partitioner": lambda message, n: message["n"] % n},
        {"partitioner": "round-robin"},
        {"partitioner": "sticky"},
    ],
    ids=lambda options: "-".join(str(value)[:12].strip("<") for value in options.values()),
)
def test_rows_are_on_the_partitions_of_their_messages(store: cues.Store, options: dict[str, Any]) -> None:
    by_table, by_row = (store.queue(name, partitions=4, **options) for name in ("by_table", "by_row"))
    for start in range(0, len(ROWS), 100):
        placed = by_table.appender().write_table(table(ROWS[start : start + 100]))
        places = by_row.appender().write_many(ROWS[start : start + 100])
        expected: dict[int, list[int]] = {}
        for place in places:
            expected.setdefault(place.partition, []).append(int(place))  # type: ignore[union-attr]
        assert {partition: list(found) for partition, found in placed.items()} == expected  # type: ignore[union-attr]
    for partition in range(4):
        assert list(by_table.partition(partition).tailer()) == list(by_row.partition(partition).tailer())


def test_a_row_without_a_key_is_named(store: cues.Store) -> None:
    queue = store.queue("q", partitions=2, key="key")
    with pytest.raises(errors.InvalidArgument, match="row 2: The message has no 'key'"):
        queue.appender().write_table(pa.table({"key": ["a", "b", None, "a"]}))
    with pytest.raises(errors.InvalidArgument, match="row 0: The message has no 'key'"):
        queue.appender().write_table(pa.table({"other": [1, 2]}))
    assert len(queue) == 0


def test_a_watermark_in_a_table_is_on_each_partition(store: cues.Store) -> None:
    queue = store.queue("q", partitions=3, key="key")
    mark = {"q/type": names.WATERMARK, "key": None, "time": datetime(2026, 1, 1, tzinfo=UTC)}
    queue.appender().write_table(table([{"q/type": "order", "key": "a", "time": None}, mark]))
    found = [list(queue.partition(partition).tailer()) for partition in range(3)]
    assert all(messages[-1]["q/type"] == names.WATERMARK for messages in found)
    assert sum(map(len, found)) == 4


class Pair:
    """A queue with tables, and one with the same messages that were written as dicts; both read by a named tailer."""

    def __init__(self, store: cues.Store, dice: random.Random) -> None:
        self.dice = dice
        self.store = store
        partitions = dice.choice([1, 1, 3])
        self.queues = [store.queue(name, partitions=partitions) for name in ("tables", "rows")]
        self.appenders: list[Appender] = [queue.appender() for queue in self.queues]
        self.tailers = [queue.tailer("reader") for queue in self.queues]
        self.count = 0

    def write(self) -> None:
        count = self.dice.choice([1, 3, 50, 200])
        rows = [{"n": n, "text": f"text {n}", "odd": n % 2 == 1} for n in range(self.count, self.count + count)]
        self.count += count
        if self.dice.random() < 0.7:
            self.appenders[0].write_table(table(rows))
        else:
            self.appenders[0].write_many(rows)
        self.appenders[1].write_many(rows)

    def read(self) -> None:
        way, n = self.dice.choice(["read_many", "read_table", "read", "peek"]), self.dice.choice([1, 7, 120])
        by_table, by_row = self.tailers
        if way == "read_table":
            assert by_table.read_table(n).to_pylist() == by_row.read_many(n)
        elif way == "read_many":
            assert by_table.read_many(n) == by_row.read_many(n)
        else:
            assert getattr(by_table, way)() == getattr(by_row, way)()
        assert self.positions(0) == self.positions(1)

    def positions(self, which: int) -> list[int]:
        """The next index of each partition; a purge is seen when its next record is loaded."""
        rows = self.queues[which].core.rows()
        return [max(self.tailers[which].positions[part], row.first) for part, row in enumerate(rows)]

    def seek(self) -> None:
        for tailer, queue in zip(self.tailers, self.queues):
            positions = {part: 1 + (row.next - 1) // 2 for part, row in enumerate(queue.core.rows())}
            tailer.to_index(positions if len(positions) > 1 else positions[0])  # type: ignore[arg-type]

    def turn(self) -> None:
        for tailer in self.tailers:
            tailer.direction = "backward"
        assert self.tailers[0].read_many(5) == self.tailers[1].read_many(5)
        for tailer in self.tailers:
            tailer.direction = "forward"

    def purge(self) -> None:
        for queue in self.queues:
            for partition in range(queue.partitions):
                view = queue if queue.partitions == 1 else queue.partition(partition)
                row = view.core.row()
                view.purge(row.first + (row.next - row.first) // 3)

    def reopen(self) -> None:
        self.tailers = [queue.tailer("reader") for queue in self.queues]

    def whole(self) -> None:
        if self.queues[0].core.row().first == self.queues[1].core.row().first:
            assert self.queues[0].to_arrow().to_pylist() == list(self.queues[0].tailer())


@pytest.mark.parametrize("seed", seeds.among(range(40), fast=4))
def test_any_use_of_a_queue_of_tables_is_that_of_a_queue_of_messages(store: cues.Store, seed: int) -> None:
    dice = random.Random(seed)
    pair = Pair(store, dice)
    ways = ["write", "write", "write", "read", "read", "read", "seek", "turn", "purge", "reopen", "whole"]
    for _ in range(60):
        getattr(pair, dice.choice(ways))()


def test_retention_ends_in_the_middle_of_nothing_that_a_reader_needs(store: cues.Store) -> None:
    """Whole records are deleted, and the messages that are left keep their indices."""
    queue = store.queue("q", retention=1_000)
    tailer = queue.tailer("slow")
    for start in range(0, 6_000, 300):
        queue.appender().write_table(pa.table({"n": range(start, start + 300)}))
    assert 1_000 <= len(queue) <= 1_600
    first = queue.core.row().first
    assert [m["n"] for m in queue.tailer()] == list(range(first - 1, 6_000))
    assert tailer.read_table(10).to_pylist() == [{"n": n} for n in range(first - 1, first + 9)]
    queue.purge(first + 100)  # inside of a record
    assert queue.to_arrow()["n"].to_pylist() == list(range(first + 99, 6_000))
    assert store.check() == []


def test_a_store_requires_columns_from_its_first_table_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def required() -> list[str]:
        with cues.open(tmp_path / "s") as store, store.core.view() as txn:
            return list(record_of(txn)["requires"])

    with cues.open(tmp_path / "s") as store:
        store.queue("q").appender().write({"n": 1})
    assert required() == ["keys", "seals"]
    with cues.open(tmp_path / "s") as store, pytest.raises(errors.InvalidArgument):
        store.queue("q").appender().write_table(pa.table({"n": pa.array([1 << 62], pa.timestamp("s"))}))
    assert required() == ["keys", "seals"]
    with cues.open(tmp_path / "s") as store:
        store.queue("q").appender().write_table(pa.table({"n": [2]}))
    assert required() == ["columns", "keys", "seals"]
    assert required() == ["columns", "keys", "seals"]  # a later opening keeps it
    monkeypatch.setattr(datafile, "FEATURES", datafile.ALWAYS)  # a version before tables
    with pytest.raises(errors.StoreVersion, match="requires columns"):
        cues.open(tmp_path / "s")


@pytest.mark.damages_stores
def test_damage_is_found_and_named(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s") as store:
        queue = store.queue("q", compression=None)
        for start in (0, 2_000):
            queue.appender().write_table(pa.table({"n": range(start, start + 2_000)}))
        log = queue.core.log
        with store.core.view() as txn:
            ((_, _, pieces),) = log.read(txn, log.row(txn), 1, 1)
            ((schema, row),) = [(key, value) for key, value in txn.cursor() if key.startswith(names.SCHEMAS)]

        def damage(key: bytes, value: bytes, database: Any = None) -> None:
            wrong = value[:20] + bytes([value[20] ^ 1]) + value[21:]
            more = () if database is None else (True, True, False, database)
            store.core.commit(lambda txn: txn.put(key, wrong, *more))

        damage((2_001).to_bytes(8, "big") + (1).to_bytes(4, "big"), pieces[0], log.database)
        assert queue.tailer().read_table(5_000).num_rows == 2_000
        with pytest.raises(errors.BatchDamaged, match="2001 to 4000"):
            queue.to_arrow()
        assert "The record batch at 2001 of queue q is damaged" in "\n".join(store.check())
        damage(schema, row)
    with cues.open(tmp_path / "s") as store:
        with pytest.raises(errors.StoreDamaged, match=r"schema [0-9a-f]{16} of the records of columns of queue q"):
            store.queue("q").tailer().read()
        assert any("The schema" in problem and "queue q is damaged" in problem for problem in store.check())


def test_without_pyarrow_a_table_is_refused_and_a_check_reads_the_rest(
    store: cues.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = store.queue("q")
    queue.appender().write_table(pa.table({"n": [1]}))

    def missing() -> Any:
        raise errors.NotInstalled("Tables need the package pyarrow.", "pip install 'cues-streams[files]'.")

    monkeypatch.setattr(columns, "arrow", missing)
    columns.stored_schema.cache_clear()
    with pytest.raises(errors.NotInstalled):
        queue.appender().write_table(table([{"n": 1}]))
    with pytest.raises(errors.NotInstalled):
        queue.tailer().read()
    assert store.check() == []


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_whole_queue_as_a_table(store: cues.Store, partitions: int) -> None:
    """Rows and messages, of several partitions, by time and index; with the metadata of each."""
    queue = store.queue("q", partitions=partitions)
    for start in range(0, 300, 50):
        rows = [{"n": n, "half": n / 2} for n in range(start, start + 50)]
        queue.appender().write_table(table(rows)) if start % 100 else queue.appender().write_many(rows)
    found = queue.to_arrow(metadata=True)
    tailer, expected = queue.tailer(), []
    for message in tailer:
        assert tailer.envelope is not None
        where = {"q/partition": tailer.envelope.partition, "q/index": tailer.envelope.index}
        expected.append(where | {"q/time": tailer.envelope.time} | message)
    assert found.to_pylist() == expected
    half = expected[100]["q/time"]
    assert queue.to_arrow(half).num_rows + queue.to_arrow(stop=half).num_rows == 300
    assert queue.to_arrow(half)["n"].to_pylist() == list(range(expected[100]["n"], 300))
    schema = pa.schema([("n", pa.int16()), ("gone", pa.string())])
    assert queue.to_arrow(schema=schema).equals(
        pa.table({"n": pa.array([row["n"] for row in expected], pa.int16()), "gone": pa.nulls(300, pa.string())})
    )
    if partitions == 1:
        assert queue.to_arrow(30, 260)["n"].to_pylist() == list(range(29, 259))
    assert queue.to_pandas()["n"].tolist() == [row["n"] for row in expected]


def test_tables_with_other_columns_are_joined_or_refused(store: cues.Store) -> None:
    queue = store.queue("q")
    queue.appender().write_table(pa.table({"a": [1], "b": ["x"]}))
    queue.appender().write_table(pa.table({"a": [2.5], "c": [True]}))
    assert queue.to_arrow().to_pylist() == [{"a": 1.0, "b": "x", "c": None}, {"a": 2.5, "b": None, "c": True}]
    queue.appender().write_table(pa.table({"a": ["text"]}))
    tailer = queue.tailer("reader")
    with pytest.raises(errors.SchemaError, match="do not fit one table"):
        tailer.read_table(3)
    assert tailer.index == queue.tailer("reader").index == 1
    assert tailer.read_table(2).num_rows == 2
    with pytest.raises(errors.InvalidArgument, match="adds metadata"):
        queue.tailer(meta=True).read_table(1)


@pytest.mark.slow
def test_other_readers_take_tables_as_messages(store: cues.Store, tmp_path: Path) -> None:
    """A graph, a backup and its restore, a transaction of another program."""
    queue = store.queue("q")
    queue.appender().write_table(table(ROWS))
    graph = cues.Graph("g", [cues.Stream(lambda m: {"n": m["n"]}, "q", "out", id="p")])
    cues.testing.run_until_idle(graph, store)
    assert [m["n"] for m in store.queue("out").tailer()] == [row["n"] for row in ROWS]
    with store.transaction() as t:
        for message in t.tailer("q", "billing"):
            t.write("out", message)
    assert len(store.queue("out")) == 2 * len(ROWS)
    store.backup(tmp_path / "backups")
    assert cli(["restore", str(tmp_path / "backups"), str(tmp_path / "copy")]) == 0
    with cues.open(tmp_path / "copy") as copy:
        assert list(copy.queue("q").tailer()) == ROWS
        assert copy.queue("q").to_arrow().equals(queue.to_arrow())


def test_a_queue_is_a_source_for_programs_that_read_arrow(store: cues.Store) -> None:
    """By name in DuckDB, twice in one query, and with rows that came as messages."""
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    trips = store.queue("trips", partitions=2, key="city")
    trips.appender().write_table(pa.table({"city": ["a", "b", "a"], "n": [1, 2, 3]}))
    trips.appender().write_table(pa.table({"city": ["c"], "n": [4], "more": [1.5]}))
    connection = duckdb.connect()
    assert connection.sql("select city, sum(n) from trips group by 1 order by 1").fetchall() == [
        ("a", 4), ("b", 2), ("c", 4)
    ]  # fmt: skip
    assert connection.sql("select count(*) from trips one join trips two using (city)").fetchall() == [(6,)]
    assert polars.DataFrame(trips).equals(polars.from_arrow(trips.to_arrow()))
    for kept in ({"columns": ["n", "none"]}, {"where": pc.field("n") > 2}, {"metadata": True}, {}):
        assert trips.scan(**kept).read_all().equals(trips.to_arrow(**kept).combine_chunks())  # type: ignore[arg-type]
    few = trips.to_arrow(columns=["n", "none"], where=pc.field("n") > 2)
    assert few.to_pylist() == [{"n": 3, "none": None}, {"n": 4, "none": None}]
    scan = trips.scan()
    trips.appender().write({"city": "late", "n": 5})
    assert scan.read_all().num_rows == 4  # what was there at the call
    assert trips.scan().read_all().num_rows == 5
    schema = pa.schema([("n", pa.int32())])
    assert trips.scan(schema=schema).read_all().schema == schema
    assert trips.to_arrow(where=pc.field("gone") > 2).num_rows == 0  # null, as a field that a message does not have
    assert trips.to_arrow(where=pc.field("more") > 1)["more"].to_pylist() == [1.5]
    with pytest.raises(errors.InvalidArgument, match="where= does not fit"):
        trips.to_arrow(where=pc.field("city") > 2)
    empty = store.queue("empty")
    assert pa.table(empty).shape == (0, 0)
    for kept in ({"columns": ["n"]}, {"metadata": True}, {"schema": schema, "metadata": True}):
        assert empty.to_arrow(**kept).equals(empty.scan(**kept).read_all())  # type: ignore[arg-type]
    assert empty.to_arrow(metadata=True).column_names == ["q/partition", "q/index", "q/time"]
    empty.appender().write_many([{}, {}])
    assert empty.to_arrow(metadata=True)["q/index"].to_pylist() == [1, 2]


def test_a_large_dictionary_is_not_in_each_record(store: cues.Store) -> None:
    names = [f"a name that is long and only once {n}" for n in range(200_000)]
    queue = store.queue("q")
    queue.appender().write_table(pa.table({"name": pa.array(names).dictionary_encode()}))
    assert queue.to_arrow()["name"].to_pylist() == names
    assert [message["name"] for message in queue.tailer().read_many(3)] == names[:3]
    with store.core.view() as txn:
        assert txn.stat(queue.core.log.database)["entries"] < 3_000
    cities = pa.array(["Bern", "Zug"] * 50).dictionary_encode()
    few = store.queue("few", max_message_bytes=1_000)
    few.appender().write_table(pa.table({"city": cities}))
    assert few.to_arrow()["city"].type == cities.type


def test_the_first_value_that_does_not_fit_is_found_in_a_long_queue(store: cues.Store) -> None:
    queue = store.queue("q")
    queue.appender().write_many([{"n": n} for n in range(50_000)])
    queue.appender().write_many([{"n": "text"}, {"n": 1}])
    with pytest.raises(errors.SchemaError, match=r"\$\[50000\]\.n: expected values of one type, found 'text'"):
        queue.to_arrow()


def entries_of(queue: cues.Queue) -> int:
    """Records and their pieces that are on disk."""
    with queue.store.core.view() as txn:
        return int(txn.stat(queue.core.log.database)["entries"])


def noise(rows: int) -> pa.Table:
    """Numbers that compression does not make smaller."""
    return pa.table({"n": pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(os.urandom(8 * rows))])})


@pytest.mark.interpreted  # it replaces a method of the core
def test_a_purge_of_tables_deletes_few_entries_a_commit(store: cues.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of columns has about a thousand pieces. All writers wait for each commit."""
    queue = store.queue("q")
    for _ in range(2):
        queue.appender().write_table(noise(1_000_000))
    whole, real, left = entries_of(queue), Log.delete_before, [entries_of(queue)]
    record = max(columns.BYTES_AIM // 4_072 + 2, DELETE_ENTRIES_MAX)

    def delete(self: Log, txn: Any, *rest: Any) -> Any:
        found = real(self, txn, *rest)
        left.append(txn.stat(self.database)["entries"])
        return found

    monkeypatch.setattr(Log, "delete_before", delete)
    assert whole > 3 * record and queue.delete() == 2_000_000
    assert left[-1] == 0 and max(before - after for before, after in itertools.pairwise(left)) <= record


def test_retention_keeps_up_with_large_tables(store: cues.Store) -> None:
    """Each append has more entries than a commit deletes otherwise."""
    queue = store.queue("q", retention=cues.Retention(count=1_000_000))
    for _ in range(5):
        queue.appender().write_table(noise(1_000_000))
    assert len(queue) < 1_200_000 and entries_of(queue) < 3_000
