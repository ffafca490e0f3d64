"""Functions of tables over a shared directory: tasks read typed columns, and leave what the embedded engine leaves.

No Spark, no Java.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import seeds
import spark_graphs
from deltalake import DeltaTable
from directory_steps import DriverRun, FaultyFiles, HostRun, Message, RandomDeaths, messages_of, metadata_of
from test_spark_engine import IGNORED, template, without_times
from test_spark_queues import copy_of

import cues
from cues import Graph, QueueOptions, Stream, testing
from cues.errors import InvalidArgument
from cues.processors.file_sink import FileSink
from cues.records.packed import packed_rows
from cues.spark.cluster.data import Rows, Writer, hash_runs, pieces_of, read_groups, read_rows
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.maintenance import merged
from cues.spark.cluster.typed import NONE, TypedColumns, fields_of

KINDS = ("arrow", "polars", "pandas")
COUNT = 400


def table_of(low: int, high: int) -> pa.Table:
    """Columns with nulls, a nested one, a dictionary, and one without a value."""
    return spark_graphs.widened(pa.table({"n": range(low, high)}), SimpleNamespace(indices=range(low, high)))


def graph_of(*streams: Stream, **queues: QueueOptions) -> Graph:
    options = {"in": QueueOptions(metadata=True)} | queues
    return Graph("g", [cues.Source("none", lambda position: iter(())), *streams], errors="errors", queues=options)


def told(kind: Any, **options: Any) -> Stream:
    options = {"batch_size": 60, "step_s": None, "retries": cues.Retry(2, 0.0)} | options
    return Stream(spark_graphs.told_rows, "in", "out", id="p", batch=kind, **options)


def fill(store: cues.Store, *edges: int) -> None:
    appender = store.queue("in").appender()
    for low, high in pairwise(edges):
        appender.write_table(table_of(low, high))


def both(made: Graph, tmp_path: Path, size: int = 120) -> tuple[dict[str, list[Message]], HostRun]:
    """The messages that the embedded engine leaves, and the run over a directory."""
    template(tmp_path / "template", made)
    with cues.open(tmp_path / "template") as store:
        fill(store, 0, 150, COUNT)
    shutil.copytree(tmp_path / "template", tmp_path / "embedded", ignore=IGNORED)
    copy_of(tmp_path / "template", tmp_path)
    expected = {}
    with cues.open(tmp_path / "embedded") as store:
        testing.run_until_idle(made, store)
        for queue in made.plan().queues:
            tailer = store.queue(queue).tailer(meta=True)
            expected[queue] = without_times(list(tailer))
    files = FaultyFiles(str(tmp_path / "queues"))
    return expected, HostRun(files, made, tmp_path / "store", 2, lambda: size).claim()  # type: ignore[return-value]


def left(run: HostRun) -> dict[str, list[Message]]:
    found = {}
    for queue, directory in run.queues.items():
        messages = messages_of(directory)
        if messages:
            messages = [m | {"q/meta": meta} for m, meta in zip(messages, metadata_of(directory))]
        found[queue] = without_times(messages)
    return found


def plain(found: dict[str, list[Message]]) -> dict[str, list[Message]]:
    """Messages with their provenance, and errors without the lines of a traceback."""
    for message in found["errors"]:
        message["err/cause"] = [{**cause, "trace": cause["trace"].splitlines()[-1]} for cause in message["err/cause"]]
    return {
        queue: [
            {**m, "q/meta": {k: v for k, v in m["q/meta"].get("q/queue", {}).items() if k != queue}} for m in messages
        ]
        for queue, messages in found.items()
    }


def is_whole(run: DriverRun, queue: str) -> list[bool]:
    """Of each file of a queue: whether its typed columns have the whole of each message."""
    directory = run.queues[queue]
    (log,) = directory.logs
    pieces = pieces_of(directory.folder, log.live, log.first, log.next)
    stored = read_rows(directory.files, pieces, as_tables=True).pieces
    assert stored is not None
    return [rows is not None for _, rows in stored]


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_read_columns_with_the_rows_and_hashes_of_the_embedded_engine(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = graph_of(told(kind), out=QueueOptions(metadata=True))
    expected, run = both(made, tmp_path)
    monkeypatch.setattr(Rows, "messages", None)  # no message is decoded for a task
    run.run()
    monkeypatch.undo()
    assert plain(left(run)) == plain(expected)
    assert len(expected["out"]) == COUNT and len({m["hash"] for m in expected["out"]}) == 7
    assert all(is_whole(run, "in"))
    # The columns of the first step become known when it commits.
    assert is_whole(run, "out") == [False, False, *[True] * (len(run.queues["out"].live) - 2)]
    run.close()


def test_a_row_that_fails_alone_has_the_error_of_the_embedded_engine(tmp_path: Path) -> None:
    expected, run = both(graph_of(told("arrow", opts="poison")), tmp_path)
    run.run()
    found = left(run)
    assert plain(found) == plain(expected)
    ((failed,),) = [error["err.proc/messages"]["in"] for error in found["errors"]]
    assert failed["n"] == 207 and len(found["out"]) == COUNT - 1
    run.close()


@pytest.mark.parametrize("where", [pc.field("n") > 300, spark_graphs.few_rows])
def test_filters_forks_and_partitions(where: Any, tmp_path: Path) -> None:
    outputs = {each: each for each in ("odd", "even", "none", "no")}
    stream = Stream(spark_graphs.parity_of_rows, "in", outputs, id="p", batch="arrow", batch_size=60, where=where)
    made = graph_of(stream, odd=QueueOptions(partitions=3, key="n"))
    template(tmp_path / "template", made)
    with cues.open(tmp_path / "template") as store:
        fill(store, 0, 7, COUNT)
    shutil.copytree(tmp_path / "template", tmp_path / "embedded", ignore=IGNORED)
    copy_of(tmp_path / "template", tmp_path)
    run = HostRun(FaultyFiles(str(tmp_path / "queues")), made, tmp_path / "store", 2, lambda: 120).claim().run()
    with cues.open(tmp_path / "embedded") as store:
        testing.run_until_idle(made, store)
        for queue in outputs:
            views = [store.queue(queue).partition(n) for n in range(3)] if queue == "odd" else [store.queue(queue)]
            assert messages_of(run.queues[queue]) == [m for view in views for m in view.tailer()]
    assert bool(messages_of(run.queues["even"])) == (where is not spark_graphs.few_rows)
    run.close()  # type: ignore[attr-defined]


def seen(tmp_path: Path, queue: str) -> list[dict[str, Any]]:
    """A queue as a reader of Delta tables sees it."""
    rows = pa.table(DeltaTable(str(tmp_path / "queues" / queue)).scan().read_all()).to_pylist()
    return sorted(rows, key=lambda row: row["first"] + row["offset"])


def test_other_readers_see_the_columns_without_a_schema(tmp_path: Path) -> None:
    _, run = both(graph_of(told("arrow")), tmp_path)
    run.run()
    found = seen(tmp_path, "in")
    expected = table_of(0, COUNT).to_pylist()
    assert [{name: row["index_" if name == "index" else name] for name in expected[0]} for row in found] == expected
    known = [row["half"] == message["half"] for row, message in zip(seen(tmp_path, "out"), expected)]
    assert known == [n % 2 == 1 or n >= 120 for n in range(COUNT)]  # the first step has messages only
    run.close()


def test_a_schema_that_the_user_names_stays_as_it_is(tmp_path: Path) -> None:
    named = QueueOptions(schema={"n": int})
    _, run = both(graph_of(told("arrow"), **{"in": named, "out": named}), tmp_path)
    run.run()
    assert [run.queues[queue].columns.fields for queue in ("in", "out")] == [(("n", "long"),)] * 2
    assert not any(is_whole(run, "in"))
    assert [m["n"] for m in messages_of(run.queues["out"])] == list(range(COUNT))
    run.close()


def test_columns_whose_type_changes_and_names_of_the_engine(tmp_path: Path) -> None:
    """The first type is that of the column. A value of another type is NULL there, and the message is read."""
    tables = [
        pa.table({"n": [1, 2], "time": ["a", None], "Value": [None, b"x"]}),
        pa.table({"n": [0.5, 2.0], "time": ["b", "c"]}),
        pa.table({"n": pa.array([3], pa.int8()), "N": [1]}),
        pa.table({"n": [4], "when": pa.array([5], pa.time64("us"))}),
        pa.table({"time": pa.nulls(1, pa.string()), "n": [5], "more": [[{"a": 1.5}]]}),
    ]
    made = graph_of(Stream(spark_graphs.columns, "in", "out", id="p", batch="arrow", batch_size=1))
    template(tmp_path / "template", made)
    with cues.open(tmp_path / "template") as store:
        for table in tables:
            store.queue("in").appender().write_table(table)
    copy_of(tmp_path / "template", tmp_path)
    files = FaultyFiles(str(tmp_path / "queues"))
    given = [row for table in tables for row in table.to_pylist()]
    for number in range(len(given)):
        run = HostRun(files, made, tmp_path / "store", 1, lambda: 1).claim()
        run.feeder.step()  # type: ignore[attr-defined]
        run.stage.step()
        run.close()  # type: ignore[attr-defined]
        assert len(messages_of(run.queues["out"])) == number + 1
    for queue in ("in", "out"):
        found = [{k: v for k, v in m.items() if v is not None} for m in messages_of(run.queues[queue])]
        assert found == [{k: v for k, v in row.items() if v is not None} for row in given]
    table = seen(tmp_path, "in")
    assert [row["n"] for row in table] == [1, 2, None, None, 3, 4, 5]
    assert [row["time_"] for row in table] == ["a", None, "b", "c", None, None, None]
    assert [row["Value_"] for row in table] == [None, b"x", *[None] * 5]


def test_files_of_an_earlier_version_merged_and_cut_files(tmp_path: Path) -> None:
    """Files of messages and files of tables in one step; a merge of files of tables is one."""
    made = graph_of(told("arrow", batch_size=300))
    files = FaultyFiles(str(tmp_path / "queues"))
    with cues.open(tmp_path / "store", durability="process") as store:
        queue = store.queue("in", metadata=True)
        queue.appender().write_many(table_of(0, 30).to_pylist())
        fill(store, 30, 60)
    run = HostRun(files, made, tmp_path / "store", 1, lambda: 300).claim()
    while run.feeder.step():  # type: ignore[attr-defined]
        pass
    run.close()  # type: ignore[attr-defined]
    for low in range(60, 120, 10):
        with cues.open(tmp_path / "store", durability="process") as store:
            fill(store, low, low + 10)
        run = HostRun(files, made, tmp_path / "store", 1, lambda: 300).claim()
        while run.feeder.step():  # type: ignore[attr-defined]
            pass
        run.close()  # type: ignore[attr-defined]
    assert is_whole(run, "in") == [False, *[True] * 6]
    run = HostRun(files, made, tmp_path / "store", 1, lambda: 300).claim()
    directory = run.queues["in"]
    small = directory.live[1:5]
    one = merged(files, directory.folder, "g", small, directory.columns)
    directory.exchange(small, [replace(one, first=small[0].first)])
    assert is_whole(run, "in") == [False, True, True, True]
    run.run()
    assert [m["n"] for m in messages_of(run.queues["out"])] == list(range(120))
    assert len({m["hash"] for m in messages_of(run.queues["out"])}) == 1
    run.close()  # type: ignore[attr-defined]


def random_table(dice: random.Random) -> pa.Table:
    kinds: dict[pa.DataType, Any] = {
        pa.bool_(): lambda: dice.random() < 0.5,
        pa.int8(): lambda: dice.randint(-128, 127),
        pa.int64(): lambda: dice.randint(-(2**63), 2**63 - 1),
        pa.uint8(): lambda: dice.randint(0, 255),
        pa.float32(): lambda: float(dice.randint(0, 1 << 20)) / 8,
        pa.float64(): lambda: dice.choice([0.1, float("inf"), -2.5]),
        pa.decimal128(9, 2): lambda: "1.25",
        pa.string(): lambda: dice.choice(["", "x", "ü"]),
        pa.large_string(): lambda: "y",
        pa.binary(): lambda: b"\0",
        pa.date32(): lambda: dice.randint(-1000, 1000),
        pa.timestamp("us", "UTC"): lambda: dice.randint(0, 1 << 50),
        pa.timestamp("ns", "UTC"): lambda: dice.randint(0, 1 << 50) * 1000,
        pa.timestamp("us"): lambda: dice.randint(0, 1 << 50),
        pa.list_(pa.int32()): lambda: [1, None] * dice.randint(0, 2),
        pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]): lambda: {
            "a": None,
            "b": dice.choice([None, [], ["z"]]),
        },
        pa.map_(pa.string(), pa.int64()): lambda: [("k", 1)],
    }
    columns = {}
    for number, kind in enumerate(dice.sample(list(kinds), 6)):
        values = [None if dice.random() < 0.3 else kinds[kind]() for _ in range(20)]
        if pa.types.is_decimal(kind):
            array = pa.array(values, pa.string()).cast(kind)
        else:
            array = pa.array(values, kind)
        columns[f"c{number}"] = array.dictionary_encode() if pa.types.is_string(kind) else array
    return pa.table(columns)


@pytest.mark.parametrize("seed", seeds.among(range(60), fast=15))
def test_columns_of_a_table_are_those_of_its_messages(seed: int) -> None:
    table = random_table(random.Random(seed))
    typed = TypedColumns(fields_of(table.schema))
    arrays = typed.arrays_of(table)
    assert arrays == typed.arrays(pa.array(packed_rows(table), pa.binary()))
    assert packed_rows(table) == [cues.codec.pack(row) for row in spark_rows(table)]
    whole = typed.whole(table.schema)
    inexact = any(
        pa.types.is_map(c.type) or c.type in (pa.uint8(), pa.timestamp("us"), pa.timestamp("ns", "UTC"))
        for c in table.columns
    )
    assert (whole is None) == inexact


@pytest.mark.parametrize("seed", seeds.among(range(60), fast=10))
def test_messages_that_are_only_columns_have_the_bytes_that_were_written(seed: int, tmp_path: Path) -> None:
    """Tables of one schema and of others and packed messages in files, in merged files, and read in every way."""
    dice = random.Random(seed)
    files = FaultyFiles(str(tmp_path))
    tables = [random_table(dice) for _ in range(2)]
    columns = NONE.plus(fields_of(tables[0].schema), "q", "")
    columns = replace(columns.plus(columns.unknown(fields_of(tables[1].schema)), "q", ""), bare=True)
    expected, stored, first = [], [], 1
    for number in range(3):
        writer = Writer(files, "q", "g.p", number, 5, columns, 0, first)
        for _ in range(dice.randint(1, 3)):
            table = dice.choice(tables).slice(dice.randint(0, 5), dice.randint(1, 20))
            packed = packed_rows(table)
            given = dice.choice([table, table, packed])
            writer.add(given, hash_runs([dice.choice(["a" * 32, None])], [len(packed)]), None)
            expected += packed
        file = writer.close()
        assert file is not None
        stored.append(replace(file, first=first))
        first = stored[-1].next
    one = replace(merged(files, "q", "g", stored, columns), first=1)
    for some in (stored, [one]):
        low = dice.randint(1, first - 1)
        pieces = pieces_of("q", some, low, first)
        assert read_rows(files, pieces).values == read_rows(files, pieces, True).values == expected[low - 1 :]
        assert [row for p in pieces for _, t in read_groups(files, p, ["value"]) for row in t["value"].to_pylist()] == (
            expected[low - 1 :]
        )
        offsets = sorted(dice.sample(range(first - low), dice.randint(0, first - low)))
        chosen = read_rows(files, pieces, True).chosen(offsets)
        assert chosen.values == [expected[low - 1 + at] for at in offsets]
        assert chosen.messages() == [cues.codec.unpack(value) for value in chosen.values]


def test_rows_without_packed_messages_are_announced_before_the_first_one(tmp_path: Path) -> None:
    """An earlier version has no such option, so it refuses to open the queue. It never sees a row without a message."""
    _, run = both(graph_of(told("arrow")), tmp_path)
    run.run()
    for queue in ("in", "out"):
        log = sorted((tmp_path / "queues" / queue / "_delta_log").glob("*.json"))
        actions = [json.loads(line) for entry in log for line in entry.read_text().splitlines()]
        told_at = next(at for at, each in enumerate(actions) if "without packed" in str(each.get("metaData")))
        (placing,) = actions[told_at]["metaData"]["configuration"].values()
        with pytest.raises(InvalidArgument, match="A queue has no option 'rows without packed messages'"):
            QueueOptions.from_dict(json.loads(placing))
        for at, action in enumerate(actions):
            if "add" in action:
                rows = pq.read_table(tmp_path / "queues" / queue / unquote(action["add"]["path"]), partitioning=None)
                assert rows["value"].null_count == (rows.num_rows if at > told_at else 0)
    run.close()


def spark_rows(table: pa.Table) -> list[Message]:
    from cues.records import columns

    return [row for batch in table.to_batches() for row in columns.rows(batch)]


class DeadlyTables(RandomDeaths):
    """Two functions of tables, the second of which fails at some rows."""

    COUNT = 120

    def graph(self) -> Graph:
        streams = [
            Stream(spark_graphs.widened, "src", "wide", id="wide", batch="arrow", batch_size=7),
            Stream(spark_graphs.poisoned_rows, "wide", "out", id="out", batch="arrow", batch_size=20),
        ]
        return Graph("g", streams, errors="errors")

    def given(self) -> list[Message]:
        return [{"n": n} for n in range(self.COUNT)]

    def compare(self, driver: DriverRun) -> None:
        wide = table_of(1, self.COUNT + 1).set_column(0, "n", pa.array(range(self.COUNT)))
        found = driver.messages("wide")
        assert [(m["n"], m["index"]) for m in found] == [(n, n + 1) for n in range(self.COUNT)]
        assert found[0].keys() == set(wide.column_names)
        failed = [m["n"] for error in driver.messages("errors") for m in error["err.proc/messages"]["wide"]]
        assert failed == [7, 57, 107]
        out = driver.messages("out")
        assert out == [{**m, "at": m["index"]} for m in found if m["n"] not in failed]


@pytest.mark.parametrize("seed", [*seeds.among(range(12), fast=3)])
def test_drivers_of_tables_that_die_or_sleep_at_any_access(seed: int, tmp_path: Path) -> None:
    DeadlyTables(seed, FaultyFiles(str(tmp_path / "queues"))).finish()


def test_a_file_says_which_fields_its_columns_have(tmp_path: Path) -> None:
    _, run = both(graph_of(told("arrow")), tmp_path)
    run.run()
    directory: QueueDirectory = run.queues["in"]
    (first, *_) = directory.live
    metadata = pq.read_metadata(tmp_path / "queues" / directory.folder / first.name).metadata
    assert metadata[b"cues.rows"] == b'["n", "kind", "half", "nested", "none", "index"]'
    run.close()


def test_a_file_sink_gets_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = FileSink(tmp_path / "files", "parquet")
    made = Graph("g", [cues.Source("none", lambda position: iter(())), out.sink("in", id="p")])
    template(tmp_path / "store", made)
    with cues.open(tmp_path / "store") as store:
        fill(store, 0, 150, COUNT)
    run = HostRun(FaultyFiles(str(tmp_path / "queues")), made, tmp_path / "store", 2, lambda: 120).claim()
    monkeypatch.setattr(Rows, "messages", None)  # no message is decoded for a task
    run.run()
    run.close()  # type: ignore[attr-defined]
    out.finish()
    found = [row for path in out.finished() for row in pq.read_table(path).to_pylist()]
    assert found == table_of(0, COUNT).to_pylist()
