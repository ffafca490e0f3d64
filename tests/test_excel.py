"""Sheets of Excel as a source: the values of cells, each row once after any stop, and damaged files."""

from __future__ import annotations

import io
import itertools
import random
import zipfile
from datetime import date, datetime, time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seeds
from test_documents import items
from test_file_columns import same

import cues
from cues import Graph, Source, testing
from cues.errors import InvalidArgument
from cues.processors.file_source import Files

openpyxl = pytest.importorskip("openpyxl")

NAMES = ["n", "text", "price", "ok", "at", "day", "clock", "nothing"]
ROWS = [
    [n, f"é {n}", n + 0.5, n % 2 == 0, datetime(2026, 1, 2, 3, 4, n), datetime(2026, 1, 2), time(1, 2, n), None]
    for n in range(30)
]


def book(path: Path, rows: list[list[Any]], **sheets: list[list[Any]]) -> Path:
    made = openpyxl.Workbook()
    for number, (name, some) in enumerate({"Sheet": rows, **sheets}.items()):
        sheet = made.active if not number else made.create_sheet(name)
        for row in some:
            sheet.append(row)
    made.save(path)
    return path


def messages(rows: list[list[Any]], names: list[str] = NAMES) -> list[dict[str, Any]]:
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_cells_have_their_values_on_the_queue(tmp_path: Path, store: cues.Store) -> None:
    path = book(tmp_path / "a.xlsx", [NAMES, *ROWS])
    graph = Graph("g", [Source("rows", Files(f"{tmp_path}/*.xlsx"))], errors="errors")
    testing.run_until_idle(graph, store)
    assert testing.messages(store, "rows") == messages(ROWS) and not testing.messages(store, "errors")
    assert same(Files(path, at="place")) == (30, 1)
    assert items(path, at="place")[0]["place"] == "a.xlsx:2"  # the number of the row in the sheet


def test_a_sheet_by_its_name_with_given_columns_and_empty_rows(tmp_path: Path) -> None:
    path = book(tmp_path / "a.xlsx", [["x"], [1]], Orders=[[1, "a"], [], [None, None], [2], [None, "b", None]])
    assert items(path) == [{"x": 1}]
    found = items(path, sheet="Orders", header=["n", "s"])
    assert found == [{"n": 1, "s": "a"}, {"n": 2, "s": None}, {"n": None, "s": "b"}]
    (error,) = items(path, sheet="Other")
    assert "it has no sheet 'Other'; it has 'Sheet', 'Orders'" in error
    assert items(book(tmp_path / "b.xlsx", [])) == [] == items(book(tmp_path / "c.xlsx", [["x"]]))


def test_rows_continue_after_each_of_them(tmp_path: Path) -> None:
    book(tmp_path / "a.xlsx", [NAMES, *ROWS[:4], [], *ROWS[4:10]])
    book(tmp_path / "b.xlsx", [NAMES, *ROWS[:3]])
    for stop in range(1, 14):
        process = SimpleNamespace(state={}, stopping=False)
        before = list(itertools.islice(Files(str(tmp_path))(None, process), stop))
        after = [row for _, row in Files(str(tmp_path))(before[-1][0], process) if row is not None]
        assert [row for _, row in before] + after == messages([*ROWS[:10], *ROWS[:3]])


def test_rows_that_do_not_fit_fail_alone(tmp_path: Path) -> None:
    made = openpyxl.Workbook()
    for row in (["a", "b"], [1, 2], [1, 2, 3], ["#N/A", 1], [3, 4]):
        made.active.append(row)
    made.active["A4"].data_type = "e"
    made.save(tmp_path / "a.xlsx")
    found = items(tmp_path / "a.xlsx")
    assert [found[0], found[3]] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}] and len(found) == 4
    assert "record 3: 3 cells, expected 2" in found[1] and "record 4: the cell A4 has the error #N/A" in found[2]
    (error,) = items(book(tmp_path / "b.xlsx", [["q/uuid"], [1]]))
    assert "q/uuid" in error


@pytest.mark.parametrize("names", [["a", "a"], ["a", 1], ["a", None, "b"], [date(2026, 1, 1)]])
def test_a_first_row_that_names_no_columns_is_said(names: list[Any], tmp_path: Path) -> None:
    (error,) = items(book(tmp_path / "a.xlsx", [names, [1, 2, 3]]))
    assert "row 1 does not name the columns by different texts" in error


@pytest.mark.parametrize("seed", seeds.among(range(100), fast=15))
def test_a_damaged_file_is_one_error_and_others_are_read(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    data = bytearray(book(tmp_path / "a.xlsx", [NAMES, *ROWS[:5]]).read_bytes())
    kind = dice.choice(["cut", "flip", "xml"])
    if kind == "cut":
        del data[dice.randrange(len(data)) :]
    elif kind == "flip":
        for _ in range(dice.choice([1, 5, 40])):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    else:
        target = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(bytes(data))) as old, zipfile.ZipFile(target, "w") as new:
            for name in old.namelist():
                text = bytearray(old.read(name))
                if "sheet1" in name or dice.random() < 0.3:
                    text[dice.randrange(len(text)) :] = dice.choice([b"", b"<x>", b"\xff"])
                new.writestr(name, bytes(text))
        data = bytearray(target.getvalue())
    (tmp_path / "a.xlsx").write_bytes(data)
    book(tmp_path / "b.xlsx", [NAMES, *ROWS[:2]])
    found = items(tmp_path / "*.xlsx")
    assert found[-2:] == messages(ROWS[:2])
    assert kind == "flip" or any(isinstance(item, str) and "it cannot be read" in item for item in found)


def test_a_file_is_deleted_after_its_rows_are_committed(tmp_path: Path, store: cues.Store) -> None:
    book(tmp_path / "a.xlsx", [NAMES, *ROWS])
    testing.run_until_idle(Graph("g", [Source("rows", Files(f"{tmp_path}/*.xlsx", after="delete"))]), store)
    assert not [*tmp_path.glob("*.xlsx")] and testing.messages(store, "rows") == messages(ROWS)


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("csv", {"sheet": "a"}), ("xlsx", {"sheet": 1}), ("xlsx", {"follow": True}), ("xlsx", {"schema": "infer"}),
        ("xlsx", {"columns": ["a"]}), ("xlsx", {"quote": None}), ("xlsx", {"header": []}), ("xlsx", {"begins": "a"}),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(format: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="Try:"):
        Files("a", format, **options)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openpyxl", None)
    with pytest.raises(cues.errors.NotInstalled, match=r"cues-streams\[files\]"):
        Files("a", "xlsx")
