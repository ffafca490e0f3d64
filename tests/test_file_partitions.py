"""Files in the directories of values: readers find the rows that were written, whatever the values are."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import seeds
from small import until
from syncs import noted
from test_processors_sql import Presented

import cues
from cues import Graph, Sink, Source, testing
from cues.errors import InvalidArgument
from cues.processors import columns, hive
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files

Rows = list[dict[str, Any]]

TEXTS = [
    "a", "", "..", ".", "a b", "x/y", "../../up", "/", "k=v", "100%", "%2F", "é", "日本", "+", "~", "'q'", '"d"', "[x]",
    "*?", "a:b", "\x01\n", "a\\b", "#", "&", "null", "NULL", "001", "true", " lead", "trail ", "C:\\x", "_x", "a" * 200,
]  # fmt: skip
VALUES: dict[str, Callable[[random.Random], Any]] = {
    "string": lambda dice: dice.choice(TEXTS),
    "int64": lambda dice: dice.choice([0, -5, 7, 1 << 40]),
    "bool": lambda dice: dice.random() < 0.5,
    "date32": lambda dice: date(2026, 1, dice.randrange(1, 9)),
    "timestamp[us]": lambda dice: datetime(2026, 1, 1, 2, 3, dice.randrange(4)),
}


def deliver(out: FileSink, written: Any, start: int, count: int) -> None:
    """Write rows or a table in one transaction."""
    process = cast(cues.Process, Presented({"g.save.q": (start, start + count)}))
    with out.transaction(process) as transaction:
        transaction.connection.write(written)


def open_files(out: FileSink) -> list[str]:
    """The directories with an open file, as the row names them."""
    (row,) = Path(out.path, "_cues").rglob("*.json")
    return [each["at"] for each in json.loads(row.read_text())["open"]]


def test_a_directory_of_another_process_is_durable_before_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its maker, as the sink of another partition, died before it synced the name. It is synced once."""
    for made in ("out/day=1/at=2", "out/_cues/g.save"):
        (tmp_path / made).mkdir(parents=True)
    calls = noted(monkeypatch, tmp_path)
    out = FileSink(tmp_path / "out", partition_by=["day", "at"], roll_bytes=0)
    for number in (1, 2):
        calls.clear()
        deliver(out, [{"day": 1, "at": 2, "n": number}], number, 1)
        row = calls.index(("replace", "out/_cues/g.save/0.json"))
        file = calls.index(("rename", f"out/day=1/at=2/g.save-0-{number:08}.jsonl"))
        before_row, before_file = calls[:row], calls[:file]
        assert (("fsync", ".") in before_row and ("fsync", "out/_cues") in before_row) == (number == 1)
        assert (("fsync", "out") in before_file and ("fsync", "out/day=1") in before_file) == (number == 1)


def table_of(rows: Rows, types: dict[str, Any]) -> pa.Table:
    return pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in types.items()})


def readers(path: str, schema: pa.Schema) -> dict[str, Rows]:
    """The rows of a directory as others read them, with the types of the partitions told."""
    found = ds.dataset(path, partitioning=ds.partitioning(schema, flavor="hive")).to_table().to_pylist()
    types = {name: {"string": "varchar", "int64": "bigint", "bool": "boolean", "date32[day]": "date"}.get(
        str(kind), "timestamp") for name, kind in zip(schema.names, schema.types)}  # fmt: skip
    given = ", ".join(f"'{name}': '{kind}'" for name, kind in types.items())
    connection = duckdb.connect()
    connection.execute(
        f"select * from read_parquet('{path}/**/*.parquet', hive_partitioning=true, hive_types={{{given}}})"
    )
    names = [each[0] for each in connection.description or ()]
    by_duckdb = [dict(zip(names, row)) for row in connection.fetchall()]
    hive_schema: Any = pl.from_arrow(schema.empty_table()).schema  # type: ignore[union-attr]
    by_polars = (
        pl.scan_parquet(f"{path}/**/*.parquet", hive_partitioning=True, hive_schema=hive_schema).collect().to_dicts()
    )
    return {"pyarrow": found, "duckdb": by_duckdb, "polars": by_polars}


@pytest.mark.parametrize("seed", seeds.among(range(60), fast=8))
def test_others_read_what_was_written_from_rows_and_from_tables(seed: int, tmp_path: Path) -> None:
    """In several steps, with few open files: the same files from both, and every reader finds each row once."""
    dice = random.Random(seed)
    kinds = {name: pa.type_for_alias(dice.choice([*VALUES])) for name in dice.choice([["p"], ["p", "day"]])}
    of = {name: VALUES[str(kind).replace("date32[day]", "date32")] for name, kind in kinds.items()}
    types = {"n": pa.int64(), **kinds, "x": pa.float64()}
    options = {"partition_by": [*kinds], "open_files_max": dice.choice([1, 3, 100]), "durability": "process"}
    outs = {way: FileSink(tmp_path / way, "parquet", **options) for way in ("rows", "tables")}
    written: Rows = []
    for _ in range(dice.randrange(1, 5)):
        some = [
            {"n": len(written) + at, "x": at / 2}
            | {name: None if dice.random() < 0.1 else make(dice) for name, make in of.items()}
            for at in range(dice.choice([1, 5, 30]))
        ]
        written += some
        for way, out in outs.items():
            deliver(out, some if way == "rows" else table_of(some, types), len(written) - len(some), len(some))
            assert len(open_files(out)) <= options["open_files_max"]
    for out in outs.values():
        out.finish()
    relative = [[os.path.relpath(name, out.path) for name in out.finished()] for out in outs.values()]
    assert relative[0] == relative[1]
    for way, out in outs.items():
        for reader, found in readers(out.path, pa.schema(kinds.items())).items():
            assert sorted(found, key=lambda row: row["n"]) == written, (reader, way)
    for name in relative[0]:
        # The order in a file is that of the rows.
        (one, other) = (pa.parquet.read_table(f"{out.path}/{name}", partitioning=None) for out in outs.values())
        assert one.equals(other) and one["n"].to_pylist() == sorted(one["n"].to_pylist())


LINES = ("text", "jsonl", "csv")
"""Formats whose files are compressed as a whole; a table is by itself."""
CASES = [
    (format, options)
    for format in (*LINES, "parquet", "arrow")
    for options in ({}, {"roll_bytes": 0}, {"compression": "gzip"}, {"at_end": "keep"})
    if format in LINES or "compression" not in options
]


@pytest.mark.parametrize(("format", "options"), CASES)
def test_every_format_and_option_writes_directories(
    format: str, options: dict[str, Any], tmp_path: Path, store: cues.Store
) -> None:
    out = FileSink(tmp_path / "out", format, partition_by="day", durability="process", **options)
    graph = Graph("g", [Source("q", lambda position: (), resume=None), out.sink("q", batch_size=3)])
    store.queue("q").appender().write_many([{"line": f"x{n}", "day": date(2026, 1, 1 + n % 2)} for n in range(8)])
    with graph.start(store=store) as running:
        assert running.wait_done(30)
    assert ("at_end" in options) == (not out.finished())
    names = out.finish()
    found = [[row for _, row in Files(name)(None) if row is not None] for name in names]
    assert {os.path.relpath(Path(name).parent, out.path) for name in names} == {"day=2026-01-01", "day=2026-01-02"}
    assert [[*row] for rows in found for row in rows] == [["line"]] * 8
    assert sorted(row["line"] for rows in found for row in rows) == [f"x{n}" for n in range(8)]


@pytest.mark.parametrize("text", [*TEXTS, "a" * 300, "é" * 128, hive.NULL])
def test_no_value_leaves_its_directory(text: str, tmp_path: Path) -> None:
    """A value that no name can hold fails its message, and the sink continues."""
    out = FileSink(tmp_path / "deep" / "out", partition_by=["a", "b"], roll_bytes=0, durability="process")
    graph = Graph("g", [Source("q", None), out.sink("q", batch_size=10)], errors="errors")
    with testing.temporary_store() as store:
        store.queue("q").appender().write_many([{"a": text, "b": text, "n": 1}, {"a": "x", "b": None, "n": 2}])
        testing.run_until_idle(graph, store)
        failed = testing.messages(store, "errors")
    assert len(failed) == (text in ("a" * 300, "é" * 128, hive.NULL)), failed
    names = [os.path.relpath(name, out.path) for name in out.finished()]
    assert len(names) == 2 - len(failed) and all(name.count("/") == 2 for name in names)
    assert f"a=x/b={hive.NULL}/g.save-0-00000001.jsonl" in names or not failed
    everything = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl")}
    assert everything == {f"deep/out/{name}" for name in names}
    assert [*tmp_path.iterdir()] == [tmp_path / "deep"]


@pytest.mark.parametrize(
    "value", [1.5, [1], {"a": 1}, b"x", datetime(2026, 1, 1, fold=1), 10**30], ids=lambda value: type(value).__name__
)
def test_a_value_without_a_name_fails_from_rows_as_from_tables(value: Any, tmp_path: Path) -> None:
    out = FileSink(tmp_path / "out", partition_by="v", durability="process")
    tables = [] if isinstance(value, int) else [pa.table({"v": [value], "n": [1]})]
    if getattr(value, "fold", 0):
        tables = []
    elif value == 10**30:
        deliver(out, {"v": value, "n": 1}, 1, 1)  # a number of any size has a name
        return
    for written in [[{"v": value, "n": 1}], *tables]:
        with pytest.raises(ValueError, match=r"'v' of partition_by|second of two"):
            deliver(out, written, 1, 1)
    assert out.finish() == []


def test_values_of_every_type_have_a_name() -> None:
    zone = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    row = {"i": -7, "ok": True, "d": date(2026, 1, 2), "at": zone, "x": Decimal("1.50"), "u": UUID(int=7), "none": None}
    assert hive.directory_of(row).split("/") == [
        "i=-7", "ok=true", "d=2026-01-02", "at=2026-01-02T03%3A04%3A05.000006+00%3A00", "x=1.50",
        "u=00000000-0000-0000-0000-000000000007", f"none={hive.NULL}",
    ]  # fmt: skip


def test_the_directory_that_was_written_least_recently_is_finished_first(tmp_path: Path) -> None:
    out = FileSink(tmp_path / "out", partition_by="k", open_files_max=2, durability="process")
    for number, k in enumerate("abac"):
        deliver(out, {"k": k, "n": number}, number + 1, 1)
    assert open_files(out) == ["k=a", "k=c"]
    assert [os.path.relpath(name, out.path) for name in out.finished()] == ["k=b/g.save-0-00000002.jsonl"]
    # Of one step with more directories than may be open, each row is in one file; those of before are continued.
    deliver(out, [{"k": k, "n": number} for number, k in enumerate("defa", 4)], 5, 4)
    assert len(open_files(out)) == 2
    out.finish()
    found = {os.path.basename(os.path.dirname(name)): Path(name).read_text() for name in out.finished()}
    assert len(found) == len(out.finished()) == 6
    assert found["k=a"] == '{"n": 0}\n{"n": 2}\n{"n": 7}\n'


def test_a_directory_is_finished_by_its_own_time(tmp_path: Path) -> None:
    out = FileSink(tmp_path / "out", partition_by="k", roll_s=0.3, durability="process")
    deliver(out, {"k": "a", "n": 1}, 1, 1)
    time.sleep(0.05)
    deliver(out, {"k": "b", "n": 2}, 2, 1)
    until(out.finished)
    assert "k=a" in out.finished()[0]
    until(lambda: len(out.finished()) == 2)  # without a message
    assert open_files(out) == []
    out.close()


def test_a_change_of_the_option_leaves_no_column_of_a_directory_in_the_files(tmp_path: Path) -> None:
    """Neither a file that is open, nor the columns that are known, are taken over."""
    rows = [{"k": "a", "n": 1}, {"k": "b", "n": 2}]
    for number, by in enumerate([None, "k", lambda row: {"even": row["n"] % 2 == 0}, ["k"], None]):
        out = FileSink(tmp_path / "out", "csv", partition_by=by, durability="process")
        deliver(out, rows, 1 + 2 * number, 2)
    files = FileSink(tmp_path / "out", "csv", partition_by="k").finish()
    found = sorted((os.path.relpath(Path(name).parent, out.path), Path(name).read_text()) for name in files)
    assert found == [
        (".", "k,n\na,1\nb,2\na,1\nb,2\n"),
        ("even=false", "k,n\na,1\n"),
        ("even=true", "k,n\nb,2\n"),
        ("k=a", "n\n1\n1\n"),
        ("k=b", "n\n2\n2\n"),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"partition_by": []}, {"partition_by": 7}, {"partition_by": ["a", "a"]}, {"partition_by": "_a"},
        {"partition_by": ".a"}, {"partition_by": "a/b"}, {"partition_by": "a=b"}, {"partition_by": ""},
        {"partition_by": "a", "format": "csv", "columns": ["a", "b"]}, {"partition_by": ["a", 7]},
        {"partition_by": "a", "format": "parquet", "schema": pa.schema([("a", pa.int64())])},
        {"open_files_max": 0}, {"open_files_max": 1.5},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="Try:"):
        FileSink(tmp_path, **options)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "expected a dict"),
        ({}, "expected a dict"),
        ({"n": 1}, "column of the row"),
        ({"a/b": 1}, "readers do not take"),
    ],
)
def test_what_a_function_may_return(returned: Any, said: str, tmp_path: Path) -> None:
    out = FileSink(tmp_path, partition_by=lambda row: returned)
    with pytest.raises(ValueError, match=said):
        deliver(out, {"n": 1}, 1, 1)


def test_a_table_is_grouped_without_a_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the values of the directories become values of Python, each once."""
    table = pa.table({"k": [f"k{n % 3}" for n in range(3_000)], "j": [n % 2 for n in range(3_000)], "n": range(3_000)})
    counted = []
    dicts = columns.dicts
    monkeypatch.setattr(columns, "dicts", lambda rows, name: counted.append(rows.num_rows) or dicts(rows, name))
    out = FileSink(tmp_path / "out", "parquet", partition_by=["k", "j"], durability="process")
    deliver(out, table, 1, 3_000)
    assert counted == [6]
    deliver(out, table.slice(7, 9), 3_001, 9)  # of a part of a table
    assert len(out.finish()) == 6
    assert sum(pa.parquet.read_metadata(name).num_rows for name in out.finished()) == 3_009


def test_a_row_of_many_open_files_has_each_layout_once(tmp_path: Path) -> None:
    """So a commit stays cheap: about 100 bytes for a directory."""
    out = FileSink(tmp_path / "out", "parquet", partition_by="k", open_files_max=200, durability="process")
    rows = [{"k": n, **{f"column {at}": n for at in range(30)}} for n in range(200)]
    deliver(out, rows, 1, 200)
    (row,) = Path(out.path, "_cues").rglob("*.json")
    assert len(json.loads(row.read_text())["layouts"]) == 1
    assert row.stat().st_size < 200 * 120 + 6_000


def test_a_function_of_yours_writes_to_directories(tmp_path: Path, store: cues.Store) -> None:
    out = FileSink(tmp_path / "out", "csv", partition_by="k", roll_bytes=0, durability="process")

    def save(rows: pa.Table, process: Any) -> None:
        process.connection.write(rows)
        process.connection.write({"n": -1, "k": "b"})

    graph = Graph("g", [Source("in", None), Sink(save, "in", batch="arrow", checkpoint=out)])
    store.queue("in").appender().write_table(pa.table({"n": [1, 2, 3], "k": ["b", "a", "b"]}))
    testing.run_until_idle(graph, store)
    assert [Path(path).read_text() for path in out.finished()] == ["n\n2\n", "n\n1\n3\n-1\n"]
