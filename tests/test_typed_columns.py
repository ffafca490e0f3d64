"""Typed columns of queues in a shared directory: fields of messages that other readers see. No Spark, no Java.

The packed message is the truth in every test: columns never change, delay or refuse a message.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from directory_steps import DriverRun, FaultyFiles, Message, data_file, messages_of
from pyspark.sql import types as T

from cues import Graph, QueueOptions, Stream
from cues.errors import CodecError, QueueOptionsError
from cues.spark.cluster import data, typed
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.maintenance import merged
from cues.spark.cluster.parquet import StoredFile
from cues.spark.cluster.typed import TypedColumns
from cues.spark.options import READ, ReadOptions
from cues.spark.reading import ROW, QueueReader

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@dataclass
class Order:
    id: int
    price: float
    when: datetime
    tags: list[str]
    time: str


def orders(low: int, high: int) -> list[Message]:
    return [{"id": n, "price": n / 4, "when": WHEN, "tags": ["a"] * (n % 3), "time": f"t{n}"} for n in range(low, high)]


def same(message: Message) -> Message:
    return message


def graph_of(schema: Any, out: Any = None) -> Graph:
    queues = {"in": QueueOptions(schema=schema), "out": QueueOptions(schema=schema if out is None else out)}
    return Graph("g", [Stream(same, "in", "out", id="p")], queues=queues)


@pytest.fixture
def files(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(str(tmp_path / "queues"))


def ran(files: FaultyFiles, graph: Graph, given: Sequence[Message], cores: int = 2) -> DriverRun:
    """A new driver that copies these messages into ``in``, with columns, and processes all."""
    run = DriverRun(files, graph, cores)
    feed(run, given)
    return run.claim().run()


def feed(run: DriverRun, given: Sequence[Message]) -> None:
    queue = run.queues["in"]
    number = queue.published("g.in.feed") + 1
    file = data_file(queue, "g.in.feed", number, given)
    queue.publish("g.in.feed", number, queue.numbered([file]))


def table(files: FaultyFiles, queue: str = "out") -> pa.Table:
    return pa.table(DeltaTable(files.table(queue)).to_pyarrow_table()).sort_by([("first", "ascending")])


def column(files: FaultyFiles, name: str, queue: str = "out") -> list[Any]:
    frame = polars.from_arrow(table(files, queue))
    assert isinstance(frame, polars.DataFrame)
    return frame.sort(polars.col("first") + polars.col("offset"))[name].to_list()


def names(files: FaultyFiles, queue: str = "out") -> list[str]:
    return [field.name for field in DeltaTable(files.table(queue)).schema().fields][8:]


# --- what readers see -----------------------------------------------------------------------------


def test_other_readers_see_the_fields_as_columns(files: FaultyFiles) -> None:
    """Of several tasks, over the copied queue too. A field named as a column of the engine gets an underscore."""
    given = orders(0, 10)
    run = ran(files, graph_of(Order), given)
    assert run.messages("out") == given
    for queue in ("in", "out"):
        assert names(files, queue) == ["id", "price", "when", "tags", "time_"]
        for name in ("id", "price", "when", "tags"):
            assert column(files, name, queue) == [message[name] for message in given]
        assert column(files, "time_", queue) == [message["time"] for message in given]
    live = [files.path(f"out/{file.name}") for file in run.queues["out"].live]
    assert len(live) == 2
    sums = duckdb.sql(f"select sum(id), max(time_) from read_parquet({live!r}) where price > 1")
    assert sums.fetchall() == [(5 + 6 + 7 + 8 + 9, "t9")]
    scan = duckdb.from_arrow(DeltaTable(files.table("out")).to_pyarrow_dataset()).filter("id >= 8").project('"when"')
    assert len(scan.fetchall()) == 2
    assert polars.scan_delta(files.table("out")).filter(polars.col("id") == 7).select("price").collect().item() == 7 / 4


def test_a_value_that_does_not_fit_is_null_and_the_message_is_whole(files: FaultyFiles) -> None:
    given: list[Message] = [
        {"id": "7", "price": 1, "when": WHEN.replace(tzinfo=None), "tags": "a"},
        {"id": 1 << 70, "price": None, "tags": [1, "b"]},
        {},
        {"id": 3, "price": 0.5, "when": WHEN, "tags": [], "more": {"x": [1]}},
    ]
    run = ran(files, graph_of(Order), given, cores=1)
    assert run.messages("out") == given
    assert column(files, "id") == [None, None, None, 3]
    assert column(files, "price") == [1.0, None, None, 0.5]
    assert column(files, "when") == [None, None, None, WHEN]
    assert column(files, "tags") == [None, [None, "b"], None, []]


def test_row_groups_have_statistics(files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader skips row groups by them; a merge keeps them."""
    monkeypatch.setattr(data, "GROUP_ROWS", 10)
    run = DriverRun(files, graph_of(Order))
    feed(run, orders(0, 25))
    feed(run, orders(25, 45))
    live = run.queues["in"].live
    one = merged(files, "in", "g", live, run.queues["in"].columns)
    for name, expected in [(live[0].name, [(0, 9), (10, 19), (20, 24)]), (one.name, [(0, 9), (10, 19), (20, 29)])]:
        metadata = pq.read_metadata(files.path(f"in/{name}"))
        at = metadata.schema.names.index("id")
        seen = [metadata.row_group(n).column(at).statistics for n in range(metadata.num_row_groups)]
        assert [(s.min, s.max) for s in seen][:3] == expected


# --- changes of the schema ------------------------------------------------------------------------


def test_columns_are_added_to_a_table_that_was_written_without(files: FaultyFiles) -> None:
    """Old rows are NULL there until a merge makes their columns. A field that is left out later goes on."""
    ran(files, graph_of(None, "infer"), orders(0, 4))
    assert names(files, "in") == []
    ran(files, graph_of({"id": int}), orders(4, 6))
    run = ran(files, graph_of({"price": float}), orders(6, 8))
    assert names(files, "in") == ["id", "price"]
    assert column(files, "id", "in") == [None] * 4 + [4, 5, 6, 7]
    assert column(files, "price", "in") == [None] * 6 + [6 / 4, 7 / 4]
    feed(run, orders(8, 9))
    assert column(files, "id", "in")[-1] == 8
    run.maintenance.merge_files = 2
    run.maintenance.merge(run.queues["in"].log(0))
    assert len(run.queues["in"].live) == 2
    assert column(files, "id", "in") == list(range(9))
    assert column(files, "price", "in") == [n / 4 for n in range(9)]
    assert messages_of(run.queues["in"]) == orders(0, 9)


def test_another_type_is_refused_and_nothing_changes(files: FaultyFiles) -> None:
    ran(files, graph_of({"id": int, "time": str}), orders(0, 4))
    before = files.names("in/_delta_log")
    with pytest.raises(QueueOptionsError, match=r"'in' .* a column 'id', which is long, and schema= says string"):
        DriverRun(files, graph_of({"new": int, "id": str}))
    with pytest.raises(QueueOptionsError, match=r"'out' .* column 'id', which is long"):
        DriverRun(files, graph_of({"new": int}, {"id": str}))
    with pytest.raises(QueueOptionsError, match=r"column 'time_', which is of the field 'time'; .*'time_'"):
        DriverRun(files, graph_of({"time_": str}))
    with pytest.raises(QueueOptionsError, match=r"column 'id'.*field 'ID'"):
        DriverRun(files, graph_of({"ID": int}))
    assert files.names("in/_delta_log") == before and names(files, "in") == ["id", "time_"]


def test_two_drivers_that_add_columns_at_once_add_them_all_once(files: FaultyFiles) -> None:
    first = QueueDirectory(files, "q", QueueOptions())
    first.own("g")
    second = QueueDirectory(files, "q", QueueOptions())
    first.add_columns((("a", "long"), ("b", "string")))
    second.add_columns((("b", "string"), ("c", "double")))
    first.add_columns((("c", "double"),))
    assert first.columns == second.columns == QueueDirectory(files, "q", QueueOptions()).columns
    assert second.columns.fields == (("a", "long"), ("b", "string"), ("c", "double"))
    assert len(files.names("q/_delta_log")) == 3
    second_type = QueueDirectory(files, "q", QueueOptions())
    first.add_columns((("d", "long"),))
    with pytest.raises(QueueOptionsError, match="'d', which is long"):
        second_type.add_columns((("d", "string"),))


class Died(BaseException):
    pass


@pytest.mark.parametrize("access", ["put", "was put"])
def test_a_death_at_the_entry_that_adds_columns(files: FaultyFiles, access: str) -> None:
    """The next start adds them, or finds them."""
    ran(files, graph_of(None, "infer"), orders(0, 3))

    def interrupt(kind: str, name: str) -> None:
        if kind == access and name.startswith("in/_delta_log"):
            raise Died

    files.interrupt = interrupt
    with pytest.raises(Died):
        DriverRun(files, graph_of(Order))
    files.interrupt = lambda kind, name: None
    run = ran(files, graph_of(Order), orders(3, 5))
    assert run.messages("out") == orders(0, 5) and names(files, "in") == ["id", "price", "when", "tags", "time_"]
    entries = [Path(files.path(f"in/_delta_log/{name}")).read_text() for name in files.names("in/_delta_log")]
    assert sum('"metaData"' in entry for entry in entries) == 2


def test_columns_are_inferred_from_the_first_messages(files: FaultyFiles) -> None:
    given = [{"n": 1, "text": "a", "mixed": 1}, {"n": 2.5, "text": None, "mixed": "x", "inner": {"a": 1}}]
    run = ran(files, graph_of("infer"), given)
    for directory in run.queues.values():
        assert directory.infers
    run.maintenance.step()
    feed(run, [{"n": 3, "text": "c", "late": True}])
    run.run()
    assert names(files, "in") == names(files) == ["n", "text"]
    assert column(files, "n") == [None, None, 3.0]
    assert "columns of the queue in by schema='infer': n double, text string" in [event.text for event in run.events]
    again = ran(files, graph_of("infer"), [{"late": True}])
    again.maintenance.step()
    assert names(files) == ["n", "text"]


def test_a_checkpoint_of_the_log_keeps_the_columns(files: FaultyFiles) -> None:
    run = ran(files, graph_of(Order), orders(0, 3))
    run.queues["out"].checkpoint()
    for name in files.names("out/_delta_log"):
        if name.endswith(".json"):
            os.unlink(files.path(f"out/_delta_log/{name}"))
    assert QueueDirectory(files, "out", QueueOptions()).columns == run.queues["out"].columns
    assert run.queues["out"].columns.fields[-1] == ("time", "string")


# --- format cues ----------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The columns that are read from files."""
    seen: list[str] = []
    real = StoredFile.read

    def remember(self: StoredFile, groups: Any, columns: Any = None) -> Any:
        seen.extend(columns)
        return real(self, groups, columns)

    monkeypatch.setattr(StoredFile, "read", remember)
    return seen


def rows(files: FaultyFiles, schema: T.StructType, queue: str = "in", **said: str) -> list[Message]:
    options = ReadOptions.of({"path": f"{files.url}#{queue}", **said}, READ)
    reader = QueueReader(schema, options, 1)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def struct(*fields: tuple[str, T.DataType]) -> T.StructType:
    return T.StructType([T.StructField(name, kind) for name, kind in fields])


def test_a_query_reads_only_its_columns(files: FaultyFiles, read: list[str]) -> None:
    """And no packed message, if its fields are columns of the types that it declares."""
    given = orders(0, 20)
    ran(files, graph_of(Order), given)
    read.clear()
    schema = struct(("index", T.LongType()), ("price", T.DoubleType()), ("id", T.LongType()))
    expected = [{"index": n + 1, "price": n / 4, "id": n} for n in range(20)]
    assert rows(files, schema) == expected and sorted(set(read)) == ["id", "price"]
    read.clear()
    assert rows(files, schema, mode="strict") == expected and sorted(set(read)) == ["id", "price"]
    read.clear()
    other = struct(("id", T.IntegerType()), ("more", T.StringType()))
    assert rows(files, other) == [{"id": n, "more": None} for n in range(20)] and set(read) == {"value"}
    read.clear()
    own = struct(("time", T.StringType()))
    assert rows(files, own, rowColumns="false") == [{"time": f"t{n}"} for n in range(20)] and set(read) == {"time_"}


def test_a_query_over_files_with_and_without_columns(files: FaultyFiles, read: list[str]) -> None:
    """Also if values do not fit: as if every message was decoded."""
    given: list[Message] = [*orders(0, 3), {"id": "x"}, {"id": None}]
    ran(files, graph_of(None, "infer"), given)
    ran(files, graph_of({"id": int}), [*orders(5, 7), {"id": 1.5}])
    schema = struct(("id", T.LongType()))
    read.clear()
    assert [row["id"] for row in rows(files, schema)] == [0, 1, 2, None, None, 5, 6, None]
    assert set(read) == {"value", "id"}
    with pytest.raises(CodecError, match=r"Message 8, field id: found float \(1.5\)"):
        rows(files, schema, mode="strict", startingPosition="6")
    required = T.StructType([T.StructField("id", T.LongType(), nullable=False)])
    with pytest.raises(CodecError, match="Message 4, field id"):
        rows(files, required)
    assert [row["index"] for row in rows(files, ROW)] == list(range(1, 9))


def test_columns_are_what_decoding_gives(files: FaultyFiles) -> None:
    """For every type, and values that fit, that fit after a conversion, and that do not fit."""
    values: list[Any] = [None, True, 0, 1 << 40, 1 << 80, 0.1, "a", b"a", WHEN, WHEN.date(), [1], ["a", None], {"a": 1}]
    kinds = ["boolean", "byte", "integer", "long", "float", "double", "string", "binary", "date", "timestamp"]
    kinds += ["decimal(10,2)", "array<long>", "map<string,long>", "struct<a:long,b:string>"]
    schema = {f"f{number}": kind for number, kind in enumerate(kinds)}
    given = [dict.fromkeys(schema, value) for value in values]
    run = DriverRun(files, graph_of(schema))
    feed(run, given)
    fields = TypedColumns(QueueOptions(schema=schema).schema).columns  # type: ignore[arg-type]
    stored = table(files, "in")
    for name, field in zip(schema, fields):
        assert stored[name].to_pylist() == field.array(given, lambda offset: offset).to_pylist()
    assert typed.TypedColumns.of_log(json.loads(DeltaTable(files.table("in")).schema().to_json())["fields"]).fields == (
        tuple(schema.items())
    )
