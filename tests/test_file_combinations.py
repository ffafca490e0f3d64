"""Every option of a file source with every format, here and in an object store: refused, or the same records."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cues.errors import CuesError
from cues.processors.file_source import FORMATS, Files
from cues.processors.opened_file import PACKED

fsspec = pytest.importorskip("fsspec")
pa = pytest.importorskip("pyarrow")

ROWS = [{"k": n, "s": f"text {n}"} for n in range(12)]
PARTS = (ROWS[:5], ROWS[5:], [])


def csv_of(rows: list[Any]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["k", "s"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def parquet_of(rows: list[Any]) -> bytes:
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, pa.schema({"k": pa.int64(), "s": pa.string()})), out)
    return out.getvalue()


def arrow_of(rows: list[Any]) -> bytes:
    table = pa.Table.from_pylist(rows, pa.schema({"k": pa.int64(), "s": pa.string()}))
    out = io.BytesIO()
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def avro_of(rows: list[Any]) -> bytes:
    fastavro = pytest.importorskip("fastavro")
    out = io.BytesIO()
    fields = [{"name": "k", "type": "long"}, {"name": "s", "type": "string"}]
    fastavro.writer(out, {"type": "record", "name": "r", "fields": fields}, rows)
    return out.getvalue()


def xlsx_of(rows: list[Any]) -> bytes:
    openpyxl = pytest.importorskip("openpyxl")
    book, out = openpyxl.Workbook(), io.BytesIO()
    for row in [["k", "s"], *([row["k"], row["s"]] for row in rows)]:
        book.active.append(row)
    book.save(out)
    return out.getvalue()


WRITERS: dict[str, Callable[[list[Any]], bytes]] = {
    "text": lambda rows: "".join(f"{row['k']} {row['s']}\n" for row in rows).encode(),
    "jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode(),
    "csv": csv_of,
    "parquet": parquet_of,
    "arrow": arrow_of,
    "json": lambda rows: json.dumps(rows).encode(),
    "avro": avro_of,
    "xlsx": xlsx_of,
}
TYPES = {"k": "int64", "s": "string"}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "order": ("name", "modified"),
    "settle_s": (0.001,),
    "after": ("delete", "move:done"),
    "watch": (True,),
    "follow": (True, "each"),
    "bad": ("row",),
    "encoding": ("latin-1",),
    "schema": (TYPES, "infer"),
    "columns": (["k", "s"],),
    "header": (["k", "s"],),
    "quote": ("'", None),
    "escape": ("\\",),
    "begins": (r"\d",),
    "sheet": ("Sheet",),
    "record_lines_max": (7,),
    "line_bytes_max": (1 << 20,),
    "at": ("at",),
    "reserved": (["q/type"],),
    "grace_s": (0.0,),
    "delimiter": (",",),
    "rotated": ("{name}.*",),
}
"""Options with values that change no record, but for types. A file has a header unless ``header=`` is given."""


def test_every_option_of_the_source_is_here() -> None:
    import inspect

    given = set(inspect.signature(Files.__init__).parameters) - {"self", "pattern", "format", "poll_s", "idle_exit_s"}
    assert given == set(OPTIONS) and set(FORMATS) == set(WRITERS)


def texts(items: list[Any]) -> list[Any]:
    """Rows with texts for their values, and without places."""
    rows = []
    for item in items:
        found = item.to_pylist() if hasattr(item, "to_pylist") else item if isinstance(item, list) else [item]
        rows += [{key: str(value) for key, value in row.items() if key != "at"} if isinstance(row, dict) else row
                 for row in found]  # fmt: skip
    if any(row == {"k": "k", "s": "s"} for row in rows):  # a header in a row of Excel, which has another one
        rows = [row for row in rows if row != {"k": "k", "s": "s"}]
    return rows


def read(source: Files, by_columns: bool, stop: int | None) -> list[Any]:
    """The records of a run, or of two of which the first is killed after some items."""
    process = SimpleNamespace(state={}, stopping=False, check=lambda rows: rows, id="g.rows")
    found, position = [], None
    for count in (stop, None):
        items = (source.in_columns if by_columns else source)(position, process)
        with contextlib.closing(items):  # type: ignore[type-var]
            for position, item in itertools.islice(items, count):
                found += [item] if item is not None else []
                if source.consumed.is_on:
                    source.committed(position)
    return texts(found)


@pytest.mark.parametrize("is_pair", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", ["local", "gzip", "memory"])
@pytest.mark.parametrize("format", FORMATS)
def test_an_option_is_refused_or_the_records_are_the_same(
    format: str, place: str, is_pair: bool, tmp_path: Path
) -> None:
    if place == "gzip" and format in PACKED:
        pytest.skip("compressed by itself")
    taken: list[str] = []
    choices = [{name: value} for name, values in OPTIONS.items() for value in values]
    pairs = [a | b for a, b in itertools.combinations(choices, 2) if not a.keys() & b.keys()]
    data = [gzip.compress(part) if place == "gzip" else part for part in map(WRITERS[format], PARTS)]
    bare = [gzip.compress(csv_of(rows).partition(b"\n")[2]) if place == "gzip" else csv_of(rows).partition(b"\n")[2]
            for rows in PARTS]  # fmt: skip
    for number, options in enumerate(pairs if is_pair else [{}, *choices]):
        folder = tmp_path / str(number)
        ending = f"{format}.gz" if place == "gzip" else format
        pattern = str(folder / f"*.{ending}")
        if place == "memory":
            pattern = f"memory:/{pattern}"
        if str(options.get("after", "")).startswith("move:"):
            options |= {"after": f"move:{folder}/done"}
        fast = {"poll_s": 0, "idle_exit_s": 0, "grace_s": 0}
        try:
            source = Files(pattern, format, **(fast | options))
        except CuesError as error:
            text = str(error)
            assert " Try: " in text and any(name in text for name in options), (options, text)
            continue
        taken.append(str(options))
        expected = texts([{"line": f"{row['k']} {row['s']}"} for row in ROWS] if format == "text" else ROWS)
        for by_columns, stop in ((False, None), (True, 2), (False, 3)):
            for part, content in enumerate(bare if format == "csv" and "header" in options else data):
                if place == "memory":
                    fsspec.filesystem("memory").pipe_file(f"{folder}/{part}.{ending}", content)
                else:
                    folder.mkdir(exist_ok=True)
                    (folder / f"{part}.{ending}").write_bytes(content)
            found = read(source, by_columns and not source.follow, stop)
            wanted = expected if not (source.each and place == "gzip") else []
            if "settle_s" in options:  # the second file may have settled when the first one has not
                found, wanted = sorted(found, key=str), sorted(wanted, key=str)
            assert found == wanted, (options, by_columns, stop)
    assert len(taken) > 8
