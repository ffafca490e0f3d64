"""JSON documents and Avro files: the values of JSON lines, one record in memory, each record once after any stop."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import random
import tracemalloc
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest
import seeds
from test_file_columns import ODD, json_line, same

import cues
from cues import Graph, Source, testing
from cues.errors import InvalidArgument
from cues.processors import documents
from cues.processors.file_source import Files

WHOLE: list[Any] = [{"n": 1, "s": "é"}, {"n": 1.5, "deep": [{"x": [None, True]}]}, {}, {"big": 12345678901234567890123}]


def items(path: Path, **options: Any) -> list[Any]:
    """The messages; errors as text."""
    found = [item for _, item in Files(path, **options)(None) if item is not None]
    return [str(item) if isinstance(item, Exception) else item for item in found]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records begin and end anywhere in the parts that are read."""
    monkeypatch.setattr(documents, "_PART_BYTES", 7)


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("part", [1, 2, 3, 5, 1 << 16])
def test_an_array_is_its_objects_and_an_object_is_itself(
    part: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_PART_BYTES", part)
    for name, document, expected in (("a", WHOLE, WHOLE), ("b", WHOLE[1], WHOLE[1:2]), ("c", [], []), ("d", {}, [{}])):
        text = dice_space(json.dumps(document, indent=indent, ensure_ascii=name == "a"))
        for write in (text.encode(), b"\xef\xbb\xbf" + text.encode()):
            (tmp_path / name).write_bytes(write)
            assert items(tmp_path / name, format="json") == expected
            same(Files(tmp_path / name, format="json"))


def dice_space(text: str) -> str:
    return f" \r\n\t{text}\n\n"


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_a_compressed_document_in_another_encoding(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    ending = "gz" if pack is gzip.compress else "bz2"
    (tmp_path / f"a.json.{ending}").write_bytes(pack(json.dumps(WHOLE, ensure_ascii=False).encode("latin-1")))
    assert items(tmp_path / f"a.json.{ending}", format="json", encoding="latin-1") == WHOLE


@pytest.mark.parametrize("seed", seeds.among(range(200), fast=20))
def test_values_and_errors_are_those_of_json_lines(seed: int, tmp_path: Path, small_parts: None) -> None:
    """Also of records that Python's scanner takes and JSON lines refuse: NaN, reserved keys, half characters."""
    dice = random.Random(seed)
    lines = [json_line(dice) for _ in range(dice.choice([1, 20]))]
    for number in range(len(lines)):
        if dice.random() < 0.3:
            odd = dice.choice([*ODD, b"[1]", b"7", b"-0.5e3", b"null", b'"text"'])
            try:
                json.loads(odd.strip().decode("utf-8", "surrogateescape"))
            except (ValueError, RecursionError):
                continue
            if b"\n" not in odd.strip():
                lines[number] = odd.strip()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "a.json").write_bytes(b"[" + b" ,\n".join(lines) + b"]")
    options: dict[str, Any] = {"bad": "row", "reserved": dice.choice([[], ["q/type"]])}
    found = [
        [{**row, "file": ""} if row.get("q/type") == "malformed" else row for row in rows]
        for rows in (
            items(tmp_path / "a.json", format="json", **options),
            items(tmp_path / "a.jsonl", line_bytes_max=1 << 20, **options),
        )
    ]
    assert found[0] == found[1]
    same(Files(tmp_path / "a.json", format="json", at="at"))


@pytest.mark.parametrize(
    ("text", "before", "says"),
    [
        ("", 0, "no JSON document"), ("  ", 0, "no JSON document"), ('{"a": 1', 0, "Expecting"),
        ('[{"a": 1}', 1, "the file ends"), ('[{"a": 1},', 1, "a value is missing"), ('[{"a": 1},]', 1, "missing"),
        ('[{"a": 1} {"a": 2}]', 1, "follows it"), ('[{"a": 1}] x', 1, "more after the array"),
        ('{"a": 1}\n{"a": 2}\n', 1, "format='jsonl'"), ('[{"a": 1}, {"a": 01}]', 1, "Expecting ',' delimiter"),
        ("[,]", 0, "a value is missing"), ("[" * 100_000, 0, "nested too deep"), ('[{"a": "\x01"}]', 0, "control"),
        ('[{"a": 1}, \udcff]', 1, "a value is missing"), ("nul", 0, "a value is missing"),
    ],
)  # fmt: skip
def test_a_document_that_is_damaged_is_one_error_after_the_records_before_it(
    text: str, before: int, says: str, tmp_path: Path, small_parts: None
) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    for found in (items(tmp_path / "a.json", format="json"), by_columns(tmp_path / "a.json", format="json")):
        assert found[:-1] == [{"a": 1}] * before and "a.json: it cannot be read" in found[-1] and says in found[-1]
        assert not before or "after record 1" in found[-1]


def by_columns(path: Path, **options: Any) -> list[Any]:
    found: list[Any] = []
    for _, item in Files(path, **options).in_columns(None):
        found += item if isinstance(item, list) else [str(item) if isinstance(item, Exception) else item]
    return [item for item in found if item is not None]


def test_an_element_that_is_no_object_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(
        '[{"n": 1}, [2], 3, {"n": NaN}, {"s": "\udcff"}, {"n": 4}]'.encode("utf-8", "surrogateescape")
    )
    found = items(tmp_path / "a.json", format="json")
    assert [found[0], found[-1]] == [{"n": 1}, {"n": 4}]
    assert "record 2: a JSON array, expected an object; expected a record of json" in found[1]
    assert "record 3: a JSON number" in found[2] and "record 4" in found[3] and "byte 0xff" in found[4]


def test_memory_holds_one_record_of_a_large_array(tmp_path: Path) -> None:
    with open(tmp_path / "a.json", "w") as file:
        file.write("[" + ",\n".join(json.dumps({"n": n, "text": "x" * 1_000}) for n in range(3_000)) + "]")
    source = Files(tmp_path / "a.json", format="json")
    tracemalloc.start()
    assert sum(1 for _, item in source(None) if item) == 3_000
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_a_record_that_is_too_long_ends_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "RECORD_BYTES_MAX", 200_000)
    (tmp_path / "a.json").write_text(json.dumps([{"n": 1}, {"long": "x" * 1_000_000}, {"n": 2}]))
    found = items(tmp_path / "a.json", format="json")
    assert found[0] == {"n": 1} and "more than 200,000 characters" in found[1] and len(found) == 2
    assert len(items(tmp_path / "a.json", format="json", line_bytes_max=2_000_000)) == 3


# --- Avro -----------------------------------------------------------------------------------------

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "r",
    "fields": [
        {"name": "n", "type": "long"},
        {"name": "text", "type": ["null", "string"]},
        {"name": "raw", "type": "bytes"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "clock", "type": {"type": "long", "logicalType": "time-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "kind", "type": {"type": "enum", "name": "k", "symbols": ["A", "B"]}},
        {"name": "list", "type": {"type": "array", "items": "int"}},
        {"name": "map", "type": {"type": "map", "values": "double"}},
    ],
}
ROWS = [
    {
        "n": n, "text": None if n % 3 else f"é{n}", "raw": bytes([n]), "at": datetime(2026, 1, 2, 3, 4, 5, n, UTC),
        "local": datetime(2026, 1, 2, 3, 4, 5, n), "day": date(2026, 1, 2), "clock": time(1, 2, 3, n),
        "price": Decimal(n) / 100, "id": UUID(int=n), "kind": "AB"[n % 2], "list": [n, n], "map": {"x": n / 2},
    }
    for n in range(40)
]  # fmt: skip


def avro(rows: Any = ROWS, schema: Any = SCHEMA, **options: Any) -> bytes:
    data = io.BytesIO()
    fastavro.writer(data, fastavro.parse_schema(schema), rows, **{"sync_interval": 300, **options})
    return data.getvalue()


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz"])
def test_avro_is_on_the_queue_with_its_values(codec: str, tmp_path: Path, store: cues.Store) -> None:
    (tmp_path / "a.avro").write_bytes(avro(codec=codec))
    graph = Graph("g", [Source("rows", Files(f"{tmp_path}/*.avro"))], errors="errors")
    testing.run_until_idle(graph, store)
    assert testing.messages(store, "rows") == ROWS and not testing.messages(store, "errors")
    assert same(Files(tmp_path / "a.avro", at="place")) == (40, 1)


def test_records_continue_after_each_of_them(tmp_path: Path) -> None:
    (tmp_path / "a.avro").write_bytes(avro())
    (tmp_path / "b.avro.gz").write_bytes(gzip.compress(avro(ROWS[:3])))
    (tmp_path / "c.avro.zst").write_bytes(pa.compress(avro(ROWS[:1]), "zstd", asbytes=True))
    for stop in range(1, 44):
        process = SimpleNamespace(state={}, stopping=False)
        before = list(itertools.islice(Files(f"{tmp_path}/*")(None, process), stop))
        after = [row for _, row in Files(f"{tmp_path}/*")(before[-1][0], process) if row is not None]
        assert [row for _, row in before] + after == [*ROWS, *ROWS[:3], *ROWS[:1]]


@pytest.mark.parametrize("seed", seeds.among(range(300), fast=10))
def test_avro_that_is_damaged_is_one_error(seed: int, tmp_path: Path) -> None:
    """Whatever the library raises for it; the source ends, and another file would be read."""
    dice = random.Random(seed)
    data = bytearray(avro(ROWS[:10]))
    if dice.random() < 0.5:
        del data[dice.randrange(len(data)) :]
    else:
        for _ in range(dice.choice([1, 9])):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    (tmp_path / "a.avro").write_bytes(data)
    (tmp_path / "b.avro").write_bytes(avro(ROWS[:2]))
    found = items(tmp_path / "*.avro")
    assert found[-2:] == ROWS[:2] and sum(isinstance(item, str) for item in found) <= 11


def test_avro_that_is_cut_off_is_said(tmp_path: Path) -> None:
    data = avro()
    for cut in (0, 3, 200, len(data) - 1, len(data) - 20):
        (tmp_path / "a.avro").write_bytes(data[:cut])
        found = items(tmp_path / "a.avro")
        assert "it cannot be read" in found[-1] and "damaged" in found[-1] and found[:-1] == ROWS[: len(found) - 1]


def test_a_value_that_is_no_record_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "a.avro").write_bytes(avro(["x", {"n": 1}], ["string", {"type": "map", "values": "long"}]))
    found = items(tmp_path / "a.avro")
    assert "record 1: a str, expected a record" in found[0] and found[1] == {"n": 1}
    (tmp_path / "a.avro").write_bytes(avro([{"q/uuid": 1}], {"type": "map", "values": "long"}))
    (error,) = items(tmp_path / "a.avro")
    assert "q/uuid" in error


@pytest.mark.parametrize("format", ["json", "avro"])
@pytest.mark.parametrize(
    "options", [{"schema": "infer"}, {"columns": ["a"]}, {"follow": True}, {"header": ["a"]}, {"escape": "\\"}]
)
def test_options_that_do_not_fit(format: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="Try:"):
        Files("a", format, **options)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fastavro", None)
    with pytest.raises(cues.errors.NotInstalled, match=r"cues-streams\[files\]"):
        Files("a", "avro")
