"""Files by blocks of columns: the same rows, places and errors as row by row; sinks write the same files from both."""

from __future__ import annotations

import io
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
import seeds
from test_record_columns import random_type, value

import cues
from cues import Graph, Sink, Source, Stream, testing
from cues.errors import InvalidArgument
from cues.processors import blocks, columns, formats, opened_file
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files

CELLS = ["", "a", "1", "-7", "3.5", "é", "5'11\"", "x y", "true", "2024-01-02", "k", "0"]
QUOTED = ['""', '"a,b"', '"two\nlines"', '"crlf\r\nin"', '"say ""hi"""', '"x"']
WRONG = ['"abc"def', '"open', 'a"b', '"a"b,c"', "\rlone", ""]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    monkeypatch.setattr(blocks, "ROWS_MIN", 1)
    monkeypatch.setattr(opened_file, "_BLOCK_ROWS", 7)


def expanded(items: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield position and row of each record; of a table, the position for its last row, None for the others."""
    for position, item in items:
        if isinstance(item, list):
            yield from ((None, row) for row in item[:-1])
            yield position, item[-1]
        elif isinstance(item, pa.Table):
            rows = [row for batch in item.to_batches() for row in columns.rows_of(batch, "it")]
            yield from ((None, row) for row in rows[:-1])
            yield position, rows[-1]
        else:
            yield position, repr(item) if isinstance(item, Exception) else item


def same(files: Files) -> tuple[int, int]:
    """Compare both ways, also after each position; return the number of rows and of tables."""
    rows = [*expanded(files(None))]
    tables = [*files.in_columns(None)]
    by_columns = [*expanded(iter(tables))]
    assert [row for _, row in by_columns] == [row for _, row in rows]
    for (position, _), (known, row) in zip(by_columns, rows, strict=True):
        assert position is None or position[3:] >= known[3:], row  # or after empty lines
    state: dict[int, Any] = {}
    process = type("Process", (), {"state": state, "stopping": False, "check": lambda self, rows: rows})()
    assert len([*files.in_columns(None, process)]) == len(tables)
    types = {-1: state[-1]} if -1 in state else {}  # those that were inferred
    for place, (position, _) in enumerate(by_columns):
        if position is not None and position[2]:
            state.clear()
            state.update(types)
            rest = [row for _, row in expanded(files.in_columns(position, process))]
            assert rest == [row for _, row in rows[place + 1 :]], position
    return len(rows), sum(isinstance(item, (pa.Table, list)) for _, item in tables)


def line(dice: random.Random, names: list[str], wrong: float) -> str:
    if dice.random() < wrong:
        return dice.choice(["", "a", ",".join(["x"] * (len(names) + 1)), ",".join(names), dice.choice(WRONG), "\udcff"])
    return ",".join(dice.choice(QUOTED if dice.random() < wrong else CELLS) for _ in names)


@pytest.mark.parametrize("seed", seeds.among(range(200), fast=10))
def test_csv_by_blocks_is_csv_by_rows(seed: int, tmp_path: Path, small_blocks: None) -> None:
    dice = random.Random(seed)
    names = dice.choice([["a"], ["id", "name"], ["a", "b", "c", "d"]])
    wrong = dice.choice([0, 0, 0.02, 0.2])
    end = dice.choice(["\n", "\r\n"])
    lines = [",".join(names), *(line(dice, names, wrong) for _ in range(dice.choice([0, 3, 40])))]
    text = end.join(lines) + dice.choice(["", end])
    (tmp_path / "t.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    options: dict[str, Any] = {"record_lines_max": dice.choice([2, 100]), "line_bytes_max": dice.choice([20, 131_072])}
    if dice.random() < 0.3:
        options["at"] = "place"
    if dice.random() < 0.3:
        options |= {"encoding": "latin-1"}
    if dice.random() < 0.3:
        options |= {"bad": "row"}
    _, tables = same(Files(tmp_path / "t.csv", **options))
    typed = {"schema": {names[0]: dice.choice(["int64", "float64", "bool", "date32"])}}
    same(Files(tmp_path / "t.csv", **options, **typed))
    same(Files(tmp_path / "t.csv", **options, columns=names[-1:]))
    if not wrong and len(lines) > 20 and len(names) > 1 and options["line_bytes_max"] > 20:
        assert tables


JSON = [
    '{"n": 1}', '{"n": -7.5, "list": [1, {"x": null}]}', ' {"n": 1}', '{"text": "é"}', "", '{"e": "1e5", "x": 1e5}',
    "{}", '{"half": 1e-300}', '{"long": "' + "x" * 300 + '"}',
]  # fmt: skip
WRONG_JSON = [
    '{"n": 1e400}', '{"n": 1E999}', '{"n": NaN}', "[1]", "7", '{"n": 1}}', '{"n": 1},{"n": 2}', '{"n": [1', "2]}", "{",
    "\udcff", '{"t": "\\ud800"}', '{"t": "\\ud83d\\ude00"}', '{"q/uuid": 1}', '{"q\\/uuid": 1}', '{"q/type": "mine"}',
    '{"n": ' + "9" * 310 + ".0}", '{"n": ' + "[" * 300 + "]" * 300 + "}", '{"n": 123456789012345678901234567890}',
    "\r", "nul", "\t",
]  # fmt: skip


@pytest.mark.parametrize("format", ["jsonl", "text"])
@pytest.mark.parametrize("seed", seeds.among(range(200), fast=30))
def test_lines_by_blocks_are_lines_by_rows(seed: int, format: str, tmp_path: Path, monkeypatch: Any) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", dice.choice([50, 1_000]))
    monkeypatch.setattr(blocks, "LINES", dice.choice([1, 3, 500]))
    wrong = dice.choice([0, 0.02, 0.2])
    lines = [dice.choice(WRONG_JSON if dice.random() < wrong else JSON) for _ in range(dice.choice([0, 1, 40]))]
    end = dice.choice(["\n", "\r\n"])
    text = dice.choice(["", "", "\ufeff"]) + end.join(lines) + dice.choice(["", end])
    (tmp_path / f"t.{format}").write_bytes(text.encode("utf-8", "surrogateescape"))
    options: dict[str, Any] = {"line_bytes_max": dice.choice([20, 131_072])}
    if dice.random() < 0.3:
        options["at"] = "place"
    if dice.random() < 0.3:
        options["bad"] = "row"
    if dice.random() < 0.3:
        options["reserved"] = ["q/type"]
    same(Files(tmp_path / f"t.{format}", format, **options))


BYTES = [
    b"{", b"}", b"[", b'"', b",", b":", b"\\", b" ", b"\n", b"\r", b"\0", b"0", b"1e9", b"NaN", b"-Infinity", b"\xff",
    b"\xc3", b'"q/type":1,', b'"\\u0071/type":"x",', b"}\n{", b"} {", b"{}", b"\xef\xbb\xbf", b"\\ud800", b"// x", b"",
]  # fmt: skip
ODD = [
    b'{"n":1}{"n":2}', b'{"n":\n1}', b'{"n":NaN}', b'{"n":1,"x":[-Infinity]}', b'{"q/type":"x","n":1}',
    b'{"n":1} ', b' {"n":2}',
    b'{"\\u0071/x":1}', b'{"q\\u002fx":1}', b'{"text":"\xff"}', b'{"\xff":1}',
    b'{"n":1,"n":2}', b'{"n":3,"x":' + b"[" * 300 + b"]" * 300 + b"}",
    *(text.encode("utf-8", "surrogateescape") for text in WRONG_JSON),
]  # fmt: skip
TYPED: list[Any] = [
    "infer", {"n": "int64"}, {"n": "float64", "text": "string"}, {"at": "timestamp[us]", "day": "date32"},
    {"ok": "bool", "missing": "string", "n": "int8"}, pa.schema({"text": pa.string(), "n": pa.decimal128(21, 2)}),
    pa.schema({"list": pa.list_(pa.int64()), "in": pa.struct({"at": pa.timestamp("us", "UTC"), "x": pa.float64()})}),
]  # fmt: skip


def json_line(dice: random.Random) -> bytes:
    """Return a line of a record with some of its fields, written by Python as several programs write it."""
    fields = {
        "n": dice.choice([0, -1, 127, 128, 1 << 62, 1.5, 2.0, None]) if dice.random() < 0.1 else dice.randrange(100),
        "text": dice.choice(["", "é", "a\\b\n", "\U0001f600", "Inf, NaN", "q/x", ', "q/x": 1', "{}"]),
        "at": dice.choice(["2024-01-02T03:04:05", "2024-01-02 03:04:05.123456", "2024-01-02"]),
        "day": "2024-01-02",
        "ok": dice.choice([True, False, None]),
        "list": dice.choice([[], [1], [1, None, 3], None]),
        "in": {"at": "2024-01-02T03:04:05Z", "x": dice.random(), "y": {"deep": [{}]}},
    }
    if dice.random() < 0.2:
        del fields[dice.choice([*fields])]
    separators = dice.choice([(",", ":"), (", ", ": ")])
    return json.dumps(fields, ensure_ascii=dice.random() < 0.5, separators=separators).encode()


@pytest.mark.parametrize("seed", seeds.among(range(400), fast=12))
def test_typed_json_lines_by_blocks_are_those_by_rows(seed: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Also of random bytes between records that are whole; and each value is the one that Python reads."""
    dice = random.Random(seed)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", dice.choice([300, 2_000, 100_000]))
    end, wrong = dice.choice([b"\n", b"\r\n"]), dice.choice([0, 0, 0.05, 0.5])
    lines = [json_line(dice) for _ in range(dice.choice([1, 40]))]
    for number, text in enumerate(lines):
        if dice.random() < wrong:
            lines[number] = dice.choice(ODD)
        elif dice.random() < wrong:
            at = dice.randrange(len(text) + 1)
            lines[number] = text[:at] + dice.choice(BYTES) + text[at + dice.choice([0, 0, 1, 5]) :]
    data = dice.choice([b"", b"", b"\xef\xbb\xbf"]) + end.join(lines) + dice.choice([b"", end])
    (tmp_path / "t.jsonl").write_bytes(data)
    options: dict[str, Any] = {"schema": dice.choice(TYPED), "line_bytes_max": dice.choice([200, 131_072])}
    if dice.random() < 0.2:
        options["encoding"] = "latin-1"
    if dice.random() < 0.3:
        options["at"] = "place"
    if dice.random() < 0.3:
        options["bad"] = "row"
    if dice.random() < 0.3:
        options["reserved"] = ["q/type"]
    source = Files(tmp_path / "t.jsonl", **options)
    _, tables = same(source)
    if (
        not wrong
        and options["schema"] == TYPED[2]
        and options["line_bytes_max"] > 200
        and data.startswith(b"{")
        and lines[1:]
    ):
        assert tables and not any(isinstance(item, Exception) for _, item in source.in_columns(None))

    options["at"] = "line"
    plain = Files(tmp_path / "t.jsonl", **(options | {"schema": None}))
    known = {row["line"]: row for _, row in plain(None) if isinstance(row, dict)}
    for _, row in Files(tmp_path / "t.jsonl", **options)(None):
        if isinstance(row, dict) and "q/type" not in row:
            of_python = known[row["line"]]
            for name, value in row.items():
                if name in ("n", "text", "ok", "list") and value is not None:
                    assert value == (float(of_python[name]) if type(value) is float else of_python[name]), name


def test_a_record_of_json_that_does_not_fit_fails_alone(tmp_path: Path, store: cues.Store) -> None:
    """With the file and the line; so does one with a field that the first records have not. The types are kept."""
    rows = [f'{{"n": {n}, "name": "x{n}"}}' for n in range(5_000)]
    rows[3_000] = '{"n": "three thousand", "name": "x"}'
    (tmp_path / "1.jsonl").write_text("\n".join(rows) + "\n")
    items = [item for _, item in Files(tmp_path / "1.jsonl", schema={"n": "int64"}).in_columns(None)]
    tables = [item for item in items if isinstance(item, pa.Table)]
    assert {tuple(table.column_names) for table in tables} == {("n",)}
    assert [n for table in tables for n in table["n"].to_pylist()] == [n for n in range(5_000) if n != 3_000]
    (error,) = [item for item in items if isinstance(item, Exception)]
    assert "1.jsonl, line 3001" in str(error) and "'n' is number, and the record has string" in str(error)
    assert len(tables) < 30  # by halves, not by rows

    (tmp_path / "1.jsonl").write_text("\n".join(rows[:600]))
    graph = Graph("g", errors="errors")
    graph.add(Source("rows", Files(f"{tmp_path}/*.jsonl", schema="infer")))
    testing.run_until_idle(graph, store)
    (tmp_path / "2.jsonl").write_text('{"n": 7}\n{"n": 8, "new": 1}\n')
    testing.run_until_idle(graph, store)
    assert [*store.queue("rows").tailer()][599:] == [{"n": 599, "name": "x599"}, {"n": 7, "name": None}]
    (message,) = store.queue("errors").tailer()
    problem = message["err/cause"][0]["message"]
    assert "'new' is not one of those of the first records" in problem and "2.jsonl, line 2" in problem
    assert all(piece.batch.schema for piece in store.queue("rows").pieces(None, None))


def test_json_lines_without_a_field_have_no_types(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("{}\n{}\n")
    assert [row for _, row in Files(tmp_path / "t.jsonl", schema="infer")(None) if row is not None] == [{}, {}]


def test_a_type_that_json_has_not_is_said(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n')
    (item,) = [item for _, item in Files(tmp_path / "t.jsonl", schema={"a": "duration[us]"})(None)]
    assert "it cannot be read: JSON conversion to duration[us] is not supported" in str(item)


def test_a_typed_record_that_is_longer_than_a_block(tmp_path: Path, small_blocks: None) -> None:
    """It was read without its types."""
    text = "x" * 500
    (tmp_path / "t.csv").write_text(f"n,text\n1,{text}\n2,y\n")
    (tmp_path / "t.jsonl").write_text(f'{{"n": 1, "text": "{text}"}}\n{{"n": 2, "text": "y"}}\n')
    for name in ("t.csv", "t.jsonl"):
        files = Files(tmp_path / name, schema={"n": "int64", "text": "string"})
        assert same(files)[0] == 2
        assert [row["n"] for _, row in files(None)] == [1, 2]


def test_a_row_that_cannot_be_written_fails_alone(tmp_path: Path, store: cues.Store) -> None:
    rows = [f'{{"n": {n}}}' for n in range(2_000)]
    rows[900] = '{"n": "' + "x" * 5_000 + '"}'
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    graph = Graph("g", errors="errors", queues={"rows": cues.QueueOptions(max_message_bytes=4_000)})
    graph.add(Source("rows", Files(tmp_path / "t.jsonl")))
    testing.run_until_idle(graph, store)
    found = [message["n"] for message in store.queue("rows").tailer()]
    assert found == [n for n in range(2_000) if n != 900]
    (error,) = store.queue("errors").tailer()
    assert "xxx" in str(error)


def test_a_row_that_does_not_fit_its_type_fails_alone(tmp_path: Path) -> None:
    rows = [f"{n},x{n}" for n in range(5_000)]
    rows[3_000] = "three thousand,x"
    (tmp_path / "t.csv").write_text("\n".join(["n,name", *rows]) + "\n")
    items = [item for _, item in Files(tmp_path / "t.csv", schema={"n": "int64"}).in_columns(None)]
    tables = [item for item in items if isinstance(item, pa.Table)]
    assert [n for table in tables for n in table["n"].to_pylist()] == [n for n in range(5_000) if n != 3_000]
    (error,) = [item for item in items if isinstance(item, Exception)]
    assert "t.csv, line 3002" in str(error) and "'n' is int64" in str(error) and "three thousand" in str(error)
    assert len(tables) < 30  # by halves, not by rows


def test_types_are_inferred_once_and_kept(tmp_path: Path, store: cues.Store) -> None:
    head = "n,zip,half,ok,day,at,text,nothing"
    row = "{},01234,{}.5,true,2024-01-02,2024-01-02 03:04:05,t{},"
    (tmp_path / "1.csv").write_text("\n".join([head, *(row.format(n, n, n) for n in range(600))]))
    graph = Graph("g", errors="errors")
    graph.add(Source("rows", Files(f"{tmp_path}/*.csv", schema="infer")))
    testing.run_until_idle(graph, store)
    (tmp_path / "2.csv").write_text("n,half,new\nseven,1,x\n8,1,07\n")
    testing.run_until_idle(graph, store)
    messages = list(store.queue("rows").tailer())
    day = datetime(2024, 1, 2)
    assert messages[1] == {
        "n": 1, "zip": "01234", "half": 1.5, "ok": True, "day": day.date(),
        "at": day.replace(hour=3, minute=4, second=5), "text": "t1", "nothing": "",
    }  # fmt: skip
    assert messages[600:] == [{"n": 8, "half": 1.0, "new": "07"}]
    (error,) = store.queue("errors").tailer()
    assert "seven" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"schema": {"n": "int64"}}, {"schema": "infer"}, {"columns": ["q/type", "n"]}])
def test_a_file_does_not_make_messages_of_a_kind_of_cues(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("n,q/type\n" + "1,mine\n" * 600 + "2,q.type.error\n" + "3,mine\n")
    for way in (Files(tmp_path / "t.csv", **options), Files(tmp_path / "t.csv", **options).in_columns):
        items = [item for _, item in expanded(way(None)) if item is not None]
        assert len(items) == 602
        (refused,) = [item for item in items if isinstance(item, str)]
        assert "line 602" in refused and "q.type.error" in refused


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_options_that_the_format_of_a_name_has_not(name: str, tmp_path: Path) -> None:
    """They were ignored, where the same options were refused with ``format=``."""
    options: dict[str, Any] = {"columns": ["n"]} if name == "t.jsonl" else {"schema": {"n": "int8"}}
    (tmp_path / name).write_text("")
    with pytest.raises(InvalidArgument, match="format"):
        list(Files(tmp_path / name, **options)(None))


def test_columns_and_types_that_a_file_has_not(tmp_path: Path, store: cues.Store) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    for options in ({"columns": ["c"]}, {"schema": {"c": "int64"}}):
        (item,) = [item for _, item in Files(tmp_path / "t.csv", **options)(None) if item is not None]
        assert "no column 'c'" in str(item) and "'a', 'b'" in str(item)
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "t.parquet")
    assert [row for _, row in Files(tmp_path / "t.parquet", columns=["b"])(None)] == [{"b": 2}]


@pytest.mark.parametrize(
    "options",
    [
        {"schema": {"n": "no type"}}, {"schema": 7}, {"schema": "infer", "follow": True}, {"columns": []},
{"columns": ["a"], "format": "jsonl"}, {"schema": {"a": "int64"}, "format": "parquet"},
    ],
)  # fmt: skip
def test_options_that_do_not_fit(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Files("x.csv", **options)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_tables_by_blocks_are_tables_by_rows(kind: str, tmp_path: Path, small_blocks: None) -> None:
    table = pa.table(
        {
            "n": range(40),
            "at": pa.array([10**18 + n for n in range(40)], pa.timestamp("ns")),
            "list": [[n, None] if n % 3 else None for n in range(40)],
            "deep": [{"x": n, "y": [str(n)]} for n in range(40)],
            "word": pa.array([f"w{n % 3}" for n in range(40)]).dictionary_encode(),
            "price": pa.array([Decimal(n) / 4 for n in range(40)], pa.decimal128(10, 2)),
        }
    )
    if kind == "parquet":
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=13)
    else:
        make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with make(tmp_path / "t.arrow", table.schema) as writer:
            for at in range(0, 40, 9):
                writer.write_table(table.slice(at, 9))
    rows, tables = same(Files(str(tmp_path), at="place"))
    assert rows == 40 and tables > 2


def test_reserved_columns_and_years_that_python_has_not_are_rows(tmp_path: Path, small_blocks: None) -> None:
    pq.write_table(pa.table({"n": [1, 2], "q/type": ["mine", "q.type.error"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"at": pa.array([1, 10**18], pa.timestamp("us"))}), tmp_path / "2.parquet")
    graph = Graph("g", errors="errors")
    graph.add(Source("rows", Files(str(tmp_path))))
    with cues.Store(tmp_path / "store") as store:
        testing.run_until_idle(graph, store)
        assert list(store.queue("rows").tailer()) == [
            {"n": 1, "q/type": "mine"},
            {"at": datetime(1970, 1, 1, 0, 0, 0, 1)},
        ]
        assert len(list(store.queue("errors").tailer())) == 2


# --- sinks ----------------------------------------------------------------------------------------

VALUES: dict[str, Callable[[random.Random], Any]] = {
    "int64": lambda dice: dice.choice([0, -5, 1 << 60]),
    "int32": lambda dice: dice.randrange(-9, 9),
    "float64": lambda dice: dice.choice([0.5, -1e300, 1e16, 3.0, float("inf")]),
    "bool": lambda dice: dice.random() < 0.5,
    "string": lambda dice: dice.choice(["", "a", 'say "hi"', "a,b", "two\nlines", "é", "cr\r"]),
    "date32": lambda dice: datetime(2024, 1, dice.randrange(1, 20)).date(),
    "timestamp[us]": lambda dice: datetime(2024, 1, 1, 2, 3, 4, dice.choice([0, 5])),
}


def table_of(dice: random.Random, names: list[str], types: dict[str, str]) -> pa.Table:
    count = dice.choice([1, 2, 9])
    arrays = {}
    for name in names:
        values = [None if dice.random() < 0.2 else VALUES[types[name]](dice) for _ in range(count)]
        arrays[name] = pa.array(values, pa.type_for_alias(types[name]))
    return pa.table(arrays)


@pytest.mark.parametrize("format", ["csv", "parquet", "arrow", "jsonl"])
@pytest.mark.parametrize("seed", seeds.among(range(60), fast=10))
def test_a_sink_writes_the_same_rows_from_tables_and_from_dicts(seed: int, format: str) -> None:
    dice = random.Random(seed)
    types = {name: dice.choice([kind for kind in VALUES if kind != "float64" or format != "jsonl"]) for name in "abc"}
    encoding = formats.make(format, None, None, None, ",")
    written: dict[str, list[tuple[bytes, Any]]] = {"tables": [], "rows": [], "mixed": []}
    layouts: dict[str, Any] = dict.fromkeys(written)
    steps = [table_of(dice, dice.sample("abc", dice.randrange(1, 4)), types) for _ in range(dice.randrange(1, 6))]
    for table in steps:
        for way in written:
            columns_ = way == "tables" or (way == "mixed" and dice.random() < 0.5)
            begun, layout = bool(written[way]), layouts[way]
            added = (
                encoding.add_table(begun, layout, table)
                if columns_
                else encoding.add(begun, layout, [dict(row) for row in table.to_pylist()])
            )
            layouts[way] = added.layout
            if added.new:
                written[way].append((added.data, added.layout))
            else:
                data, _ = written[way].pop()
                written[way].append((data + added.data, added.layout))
    finished = {way: [done(encoding, data, layout) for data, layout in files] for way, files in written.items()}
    if format in ("csv", "jsonl"):
        assert finished["tables"] == finished["rows"] == finished["mixed"]
    else:
        found = {way: [row for data in files for row in read(format, data)] for way, files in finished.items()}
        assert found["tables"] == found["rows"] == found["mixed"]


def lines_of(format: str, table: pa.Table, **options: Any) -> bytes | str:
    """The lines of a table, which are those of its rows as dicts; or the error, which is the same too."""
    encoding = formats.make(format, None, None, None, options.get("delimiter", ","))
    found: list[bytes | str] = []
    for add, rows in ((encoding.add, columns.dicts(table, "a message")), (encoding.add_table, table)):
        try:
            found.append(add(False, None, rows).data)
        except (ValueError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("format", ["csv", "jsonl"])
@pytest.mark.parametrize("seed", seeds.among(range(40), fast=3))
def test_lines_of_any_type_are_those_of_rows(seed: int, format: str) -> None:
    dice, written = random.Random(seed), 0
    for _ in range(60):
        kinds = [random_type(dice) for _ in range(dice.choice([1, 1, 2, 4]))]
        count = dice.choice([1, 2, 30])
        arrays = [pa.array([value(dice, kind) for _ in range(count)], kind) for kind in kinds]
        table = pa.table(dict(zip(["a", 'b "', "c\\\t", "d,é"], arrays)))
        try:
            columns.dicts(table, "a message")
        except ValueError:  # a time that Python does not have
            continue
        table = pa.concat_tables([table, table.slice(dice.randrange(count))])
        written += isinstance(lines_of(format, table.slice(dice.randrange(2))), bytes)
    assert written > 5


@pytest.mark.slow
def test_lines_of_floats_are_those_of_python() -> None:
    dice = random.Random(seeds.new())
    edges = [0.0, 1e-7, 1e-5, 1e-4, 1.0, 1e9, 1e10, 1e15, 1e16, 1e17, 1e22, 2.0**53, 5e-324, 1.7976931348623157e308]
    near = [number for edge in edges for number in (edge, math.nextafter(edge, 0), math.nextafter(edge, math.inf))]
    any_bits = [struct.unpack("d", dice.randbytes(8))[0] for _ in range(20_000)]
    powers = [float(f"{dice.random() * 10:.{dice.randrange(17)}f}e{dice.randrange(-12, 20)}") for _ in range(20_000)]
    for kind in (pa.float64(), pa.float32(), pa.float16()):
        most = {"halffloat": 65_504.0, "float": 3.4e38}.get(str(kind), math.inf)
        for some in (near, any_bits, powers, [round(number, 2) for number in powers], [1.5, 2.25], [4.0], [None, 0.5]):
            numbers = [n if n is None or n != n or abs(n) <= most else 0.0 for n in some]
            table = pa.table({"x": pa.array(numbers, pa.float64()).cast(kind)})
            lines_of("csv", pa.table({"x": pa.concat_arrays([*table["x"].chunks, pa.nulls(2, kind)])}))
            lines_of("jsonl", table)
            finite = table.filter(pc.is_finite(table["x"]))
            assert json.loads(b"[" + lines_of("jsonl", finite).replace(b"\n", b",")[:-1] + b"]") == finite.to_pylist()


def test_lines_of_texts_are_those_of_python() -> None:
    signs = [*map(chr, range(128)), "\x80", "\u2028", "é", "中", "😀"]
    texts = [*signs, *(f"a{sign}b" for sign in signs), "", None, 'x","y', "plain"]
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        for some in (texts, ["plain", None], ["plain"], [None]):
            table = pa.table({"x": pa.array(some, kind), "y": pa.array(some, kind)})
            assert b"plain" in lines_of("jsonl", table) or some == [None]
            for delimiter in (",", ";", "\t", "-", "§"):
                lines_of("csv", table, delimiter=delimiter)
                lines_of("csv", table.select(["x"]), delimiter=delimiter)
    numbers = pa.table({"n": [-1, 10, None], "x": [1.5, -2.0, None], "at": [datetime(2024, 1, 1, 2, 3), None, None]})
    for delimiter in "-1.:T0":
        lines_of("csv", numbers, delimiter=delimiter)
    broken = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xc3\xa9"))
    for format in ("csv", "jsonl"):
        with pytest.raises(ValueError, match="decode"):
            formats.make(format, None, None, None, ",").add_table(False, None, pa.table({"x": broken}))


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Zurich"])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_lines_of_times_are_those_of_python(unit: str, zone: str | None) -> None:
    """From the first microsecond that Python has to the last one."""
    dice = random.Random(seeds.new())
    each = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[unit]
    first, last = (0, 4_000_000_000) if unit == "ns" or zone == "Europe/Zurich" else (-62_135_596_800, 253_402_300_799)
    whole = [None, 0, each, each * first, each * last, *(each * dice.randrange(first, last) for _ in range(200))]
    parts = [each * dice.randrange(first, last) + dice.randrange(each) // 1_000 * 1_000 for _ in range(200)]
    for values in (whole, whole + parts):
        table = pa.table({"at": pa.array(values, pa.timestamp(unit, zone)), "n": range(len(values))})
        lines_of("csv", table)
        lines_of("jsonl", table)
    days = [None, date.min, date.max, *(date.fromordinal(dice.randrange(1, 3_000_000)) for _ in range(200))]
    for format in ("csv", "jsonl"):
        lines_of(format, pa.table({"day": pa.array(days, pa.date32()), "long": pa.array(days, pa.date64())}))


def done(encoding: formats.Format, data: bytes, layout: Any) -> bytes:
    target = io.BytesIO()
    target.close = lambda: None  # type: ignore[method-assign]
    encoding.finish(io.BytesIO(data), target, layout)
    return target.getvalue()


def read(format: str, data: bytes) -> list[dict[str, Any]]:
    source = io.BytesIO(data)
    table = pq.read_table(source) if format == "parquet" else pa.ipc.open_file(source).read_all()
    return table.to_pylist()  # type: ignore[no-any-return]


def test_from_a_file_to_a_file_nothing_becomes_a_dict(tmp_path: Path, store: cues.Store, monkeypatch: Any) -> None:
    table = pa.table(
        {"n": range(3_000), "half": [n / 2 for n in range(3_000)], "name": [f"x{n}" for n in range(3_000)]}
    )
    arrow_csv.write_csv(table, tmp_path / "t.csv")

    def keep(rows: pa.Table) -> pa.Table:
        return rows.filter(pa.compute.greater(rows["n"], 9))

    out = FileSink(tmp_path / "out", "parquet", roll_bytes=0)
    graph = Graph("g", errors="errors")
    graph.add(Source("rows", Files(tmp_path / "t.csv", schema="infer")))
    graph.add(Stream(keep, "rows", "kept", batch="arrow"))
    graph.add(out.sink("kept"))
    with monkeypatch.context() as patched:
        patched.setattr("cues.records.columns.rows", lambda batch: pytest.fail("a dict"))
        testing.run_until_idle(graph, store)
    found = pa.concat_tables([pq.read_table(path) for path in out.finished()])
    assert found.to_pylist() == table.slice(10).to_pylist()
    assert found.schema.types == table.schema.types


def test_a_message_that_a_table_cannot_hold_fails_alone(tmp_path: Path, store: cues.Store) -> None:
    out = FileSink(tmp_path / "out", "parquet", schema=pa.schema([("n", pa.int8())]), roll_bytes=0)
    graph = Graph("g", errors="errors")
    graph.source("in")
    graph.add(out.sink("in"))
    store.queue("in").appender().write_table(pa.table({"n": [*range(100), 1_000, *range(20)]}))
    store.queue("in").appender().write({"n": 7})
    testing.run_until_idle(graph, store)
    found = [row["n"] for path in out.finished() for row in pq.read_table(path).to_pylist()]
    assert found == [*range(100), *range(20), 7]
    assert len(list(store.queue("errors").tailer())) == 1


def test_a_function_writes_a_table_to_files(tmp_path: Path, store: cues.Store) -> None:
    out = FileSink(tmp_path / "out", "csv")

    def save(rows: pa.Table, process: Any) -> None:
        process.connection.write(rows)
        process.connection.write({"n": -1})

    graph = Graph("g")
    graph.source("in")
    graph.add(Sink(save, "in", batch="arrow", checkpoint=out))
    store.queue("in").appender().write_table(pa.table({"n": [1, 2]}))
    testing.run_until_idle(graph, store)
    (path,) = out.finish()
    assert Path(path).read_text() == "n\n1\n2\n-1\n"


def test_the_end_of_all_sources_finishes_the_files(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(100)))
    kept, out = FileSink(tmp_path / "kept", "csv", at_end="keep"), FileSink(tmp_path / "out", "parquet")
    said: list[str] = []
    graph = Graph("g")
    graph.add(Source("rows", Files(f"{tmp_path}/*.csv", schema={"n": "int64"})))
    graph.add(out.sink("rows"))
    graph.add(kept.sink("rows", id="keep"))
    for number in (1, 2):
        with graph.start(store=tmp_path / "store", listeners=[lambda event: said.append(event.text)]) as running:
            running.wait_done()
        assert len(out.finished()) == number and not kept.finished()
        (tmp_path / "2.csv").write_text("n\n100\n")
    assert [row["n"] for path in out.finished() for row in pq.read_table(path).to_pylist()] == [*range(101)]
    assert [text for text in said if text.startswith("finished")] == [f"finished {path}" for path in out.finished()]
    (path,) = kept.finish()
    assert Path(path).read_text().split() == ["n", *map(str, range(101))]


def test_a_file_stays_open_while_a_source_has_not_ended(tmp_path: Path, store: cues.Store) -> None:
    out = FileSink(tmp_path / "out", "csv")
    graph = Graph("g")
    graph.source("in")
    graph.add(out.sink("in"))
    with graph.start(store=store) as running:
        running.send("in", {"n": 1})
        running.wait_idle()
        assert running.wait_done(idle_exit_s=0.1)
    assert not out.finished()
