"""CSV without a header, with other quotes and with escapes: by blocks as by rows, and as Python's csv writes it."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import seeds
from test_file_columns import same, small_blocks  # noqa: F401  (a fixture)
from test_processors_file_source import followed

import cues
from cues import Graph, Source, testing
from cues.errors import InvalidArgument
from cues.processors import files
from cues.processors.file_source import Files

DIALECTS: list[dict[str, Any]] = [
    {"header": ["a", "b"]},
    {"quote": "'"},
    {"quote": None},
    {"escape": "\\"},
    {"quote": "'", "escape": "^", "delimiter": ";"},
    {"quote": None, "escape": "\\", "delimiter": "\t"},
    {"header": ["a", "b"], "quote": "'", "escape": "\\", "delimiter": "|"},
]
PARTS = ["a", "1", "é", " ", "", '"', "'", "\\", "^", ",", ";", "\t", "|", "\n", "\r\n", "x" * 30, "a,b", "n"]


def signs(options: dict[str, Any]) -> dict[str, Any]:
    """The options of csv.writer for those of a source."""
    quote = options.get("quote", '"')
    return {
        "delimiter": options.get("delimiter", ","),
        "quotechar": quote,
        "quoting": csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
        "escapechar": options.get("escape"),
        "doublequote": not options.get("escape"),
        "lineterminator": "\n",
    }


def whole(dice: random.Random, options: dict[str, Any]) -> tuple[str, list[dict[str, str]]]:
    """A file that Python's csv module has written, and its rows."""
    text, rows = io.StringIO(), []
    writer = csv.writer(text, **signs(options))
    if "header" not in options:
        writer.writerow(["a", "b"])
    may = [part for part in PARTS if options.get("quote", '"') or not set(part) & set("\r\n")]
    if not options.get("quote", '"') and not options.get("escape"):
        may = [part for part in may if "," not in part]
    for _ in range(dice.choice([1, 5, 25])):
        row = ["".join(dice.choices(may, k=dice.randrange(4))) for _ in "ab"]
        if options.get("escape") and any(cell.endswith(("\n", "\r")) for cell in row):
            continue
        if row[0].strip("\r\n") or row[1].strip("\r\n"):
            writer.writerow(row)
            rows.append(dict(zip("ab", row)))
    return text.getvalue(), rows


@pytest.mark.parametrize("options", DIALECTS, ids=repr)
@pytest.mark.parametrize("seed", seeds.among(range(60), fast=1))
def test_what_the_csv_module_writes_is_read(
    seed: int,
    options: dict[str, Any],
    tmp_path: Path,
    small_blocks: None,  # noqa: F811
) -> None:
    dice = random.Random(seed)
    text, rows = whole(dice, options)
    (tmp_path / "t.csv").write_text(text, newline="")
    given = {**options, "record_lines_max": 1_000}
    found = [row for _, row in Files(tmp_path / "t.csv", **given)(None) if row is not None]
    assert found == rows
    assert [row for _, row in files.read_csv(tmp_path / "t.csv", **given)] == rows
    same(Files(tmp_path / "t.csv", **given))
    same(Files(tmp_path / "t.csv", **given, schema={"a": dice.choice(["int64", "string", "float64"])}))
    same(Files(tmp_path / "t.csv", **given, columns=["b"]))


@pytest.mark.parametrize("options", DIALECTS, ids=repr)
@pytest.mark.parametrize("seed", seeds.among(range(80), fast=1))
def test_any_text_is_read_by_blocks_as_by_rows(
    seed: int,
    options: dict[str, Any],
    tmp_path: Path,
    small_blocks: None,  # noqa: F811
) -> None:
    """Also quotes that are not closed, escapes before line ends, and a byte order mark."""
    dice = random.Random(seed)
    marks = [mark for mark in (options.get("quote", '"'), options.get("escape"), options.get("delimiter", ",")) if mark]
    text = "" if "header" in options else marks[-1].join("ab") + "\n"
    text = dice.choice(["", "", "\ufeff"]) + text
    for _ in range(dice.choice([2, 10, 30])):
        count = dice.choice([2, 2, 2, 2, 1, 3])
        cells = ["".join(dice.choices([*PARTS, *marks * 2, "7"], k=dice.randrange(3))) for _ in range(count)]
        if dice.random() < 0.6:
            cells = [dice.choice(["7", "x", "7 7", ""]) for _ in range(2)]
        text += marks[-1].join(cells) + dice.choice(["\n", "\n", "\r\n"])
    (tmp_path / "t.csv").write_text(text[: -1 if dice.random() < 0.3 else None], newline="")
    given = {**options, "record_lines_max": dice.choice([1, 2, 100]), "line_bytes_max": dice.choice([20, 131_072])}
    same(Files(tmp_path / "t.csv", **given))
    same(Files(tmp_path / "t.csv", **given, schema={"a": "int64"}, at="line", bad="row"))


def test_a_file_without_a_header_is_read_from_every_position(tmp_path: Path) -> None:
    for number in range(3):
        data = "".join(f"{number},{n}\n" for n in range(5)).encode()
        (tmp_path / f"{number}.csv.gz").write_bytes(gzip.compress(data))
    rows = [{"x": str(number), "y": str(n)} for number in range(3) for n in range(5)]

    def make() -> Files:
        return Files(tmp_path / "*.gz", header=["x", "y"], at="at")

    found = [row for _, row in make()(None) if row is not None]
    assert found[0]["at"] == "0.csv.gz:1" and [{"x": row["x"], "y": row["y"]} for row in found] == rows
    for stop in range(1, len(rows) + 1):
        process: Any = SimpleNamespace(state={}, stopping=False)
        pairs = list(itertools.islice(make()(None, process), stop))
        assert [row for _, row in pairs] + [row for _, row in make()(pairs[-1][0], process) if row] == found


def test_types_of_a_file_without_a_header(tmp_path: Path, store: cues.Store) -> None:
    """Large enough for blocks: types are found in the first record on, and the last rows are whole."""
    (tmp_path / "t.csv").write_text("".join(f"{n},'it''s {n}'\n" for n in range(2_000)))
    graph = Graph("g", [Source("rows", Files(tmp_path / "t.csv", header=["n", "s"], quote="'", schema="infer"))])
    testing.run_until_idle(graph, store)
    assert testing.messages(store, "rows") == [{"n": n, "s": f"it's {n}"} for n in range(2_000)]
    assert all(piece.batch.schema for piece in store.queue("rows").pieces(None, None))


def test_escapes_are_read_in_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("n,s\n" + "".join(f'{n},"say \\"{n}\\", \\\\ then"\n' for n in range(1_000)))
    (_, table), *_ = list(Files(tmp_path / "t.csv", escape="\\").in_columns(None))
    assert table.num_rows > 900 and table["s"][5].as_py() == 'say "5", \\ then'


def test_a_record_that_ends_with_an_escape_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,x\\\n2,y\n")
    for schema in (None, {"a": "int64"}):
        items = [item for _, item in Files(tmp_path / "t.csv", escape="\\", schema=schema).in_columns(None)]
        assert any(isinstance(item, Exception) and "an escape ends the record" in str(item) for item in items)
        assert (
            sum(isinstance(item, dict) for item in items)
            + sum(len(item) for item in items if not isinstance(item, (dict, Exception, type(None))))
            == 1
        )


def test_a_log_without_a_header_is_followed(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("1,'a\nb'\n2,'half")
    source = followed(log, header=["n", "s"], quote="'")
    assert [row for _, row in source(None) if row is not None] == [{"n": "1", "s": "a\nb"}]
    log.rename(tmp_path / "log.csv.1")
    log.write_text("3,c\n")
    process: Any = type("Process", (), {"state": {}, "stopping": False})()
    assert [row for _, row in source(None, process) if row is not None] == [{"n": "3", "s": "c"}]


def test_a_row_that_is_equal_to_given_names_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(codecs.BOM_UTF8 + b"a,b\na,b\n")
    assert [row for _, row in Files(tmp_path / "t.csv", header=["a", "b"])(None) if row] == [{"a": "a", "b": "b"}] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"header": []}, {"header": "ab"}, {"header": ["a", "a"]}, {"header": [1]}, {"quote": ""}, {"quote": "ab"},
        {"quote": "é"}, {"quote": ","}, {"quote": "\n"}, {"escape": ","}, {"escape": '"'}, {"escape": "\n"},
        {"escape": 7},
        {"escape": "\\", "encoding": "shift_jis"}, {"header": ["a"], "format": "jsonl"},
        {"quote": None, "format": "text"},
        {"escape": "\\", "format": "parquet"}, {"quote": " "}, {"delimiter": "'", "quote": "'"},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="Try:"):
        Files("t.csv", **options)


def test_a_name_that_is_reserved_is_no_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("1,2\n")
    (error,) = [item for _, item in Files(tmp_path / "t.csv", header=["a", "q/uuid"])(None) if item is not None]
    assert "q/uuid" in str(error)


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_lines_that_were_read_ahead_are_read_once_from_a_compressed_file(ending: str, tmp_path: Path) -> None:
    """Also while the fingerprint of the file grows, for which its beginning is read again."""
    data = b"a,b\n" + b"".join(b'%d,"open\n' % n if n % 3 == 0 else b"%d,x\n" % n for n in range(400))
    packed = gzip.compress(data) if ending == "gz" else pa.compress(data, "zstd", asbytes=True)
    (tmp_path / f"t.csv.{ending}").write_bytes(packed)
    (tmp_path / "t.csv").write_bytes(data)
    found = [
        [row["a"] for _, row in Files(tmp_path / name, record_lines_max=3)(None) if isinstance(row, dict)]
        for name in (f"t.csv.{ending}", "t.csv")
    ]
    assert found[0] == found[1] == [str(n) for n in range(400) if n % 3]
