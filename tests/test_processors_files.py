"""Sources over files: every row once, whatever the line looks like and wherever the run stopped."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

import cues
from cues import codec, testing
from cues.errors import InvalidArgument
from cues.processors import files

Rows = list[dict[str, Any]]


def plain(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def gzipped(path: Path, data: bytes) -> Path:
    return plain(path.with_name(path.name + ".gz"), gzip.compress(data))


def zipped(path: Path, data: bytes) -> Path:
    path = path.with_name(path.name + ".zip")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inside", data)
    return path


def rows_of(pairs: Iterator[tuple[files.Position, files.Row]]) -> Rows:
    return [row for _, row in pairs]


@pytest.fixture
def csv_of(tmp_path: Path) -> Callable[..., Rows]:
    """Read bytes as one CSV file."""

    def read(data: bytes, **options: Any) -> Rows:
        return rows_of(files.read_csv(plain(tmp_path / "a.csv", data), **options))

    return read


@pytest.fixture
def jsonl_of(tmp_path: Path) -> Callable[..., Rows]:
    def read(data: bytes, **options: Any) -> Rows:
        return rows_of(files.read_jsonl(plain(tmp_path / "a.jsonl", data), **options))

    return read


# --- positions ----------------------------------------------------------------------------------

CSV = [b"a,b\n1,x\n2,\xff\n\n3,z\r\n4", b"", b"a,b\n", b"b,a\n5,y\n6,7,8\n"]
JSONL = [b'{"n": 1}\n\n{"n": 2}\nno\n{"n": 3}', b"", b'{"n": 4}\n[]\n']


@pytest.mark.parametrize("store", [plain, gzipped, zipped])
@pytest.mark.parametrize(("read", "parts"), [(files.read_csv, CSV), (files.read_jsonl, JSONL)])
def test_from_every_position_the_rest_follows(
    store: Callable[[Path, bytes], Path], read: Any, parts: list[bytes], tmp_path: Path
) -> None:
    """Stop after any row, malformed or not, in any file: the rest is the same as without the stop."""
    paths = [store(tmp_path / f"{n}.txt", part) for n, part in enumerate(parts)]
    whole = list(read(*paths))
    assert len(whole) == 6
    for stop, (position, _) in enumerate(whole):
        assert list(read(*paths, position=position)) == whole[stop + 1 :]
        assert codec.unpack(codec.pack({"p": position})) == {"p": position}


def test_positions_are_read_from_the_file_they_belong_to(tmp_path: Path) -> None:
    """A file that grew after the position gives its new rows."""
    path = plain(tmp_path / "a.csv", b"a\n1\n")
    [(position, _)] = files.read_csv(path)
    plain(path, b"a\n1\n2\n")
    assert rows_of(files.read_csv(path, position=position)) == [{"a": "2"}]


@pytest.mark.parametrize(
    ("now", "says"),
    [(b"a\n1\n", "shorter"), (b"a\n1\n22222\n3\n", "does not end at byte"), (b"abcdefghijklm\n1\n", "does not end")],
)
def test_a_file_that_does_not_fit_its_position_is_refused(now: bytes, says: str, tmp_path: Path) -> None:
    path = plain(tmp_path / "a.csv", b"a\n1\n222\n3\n")
    position = list(files.read_csv(path))[1][0]
    plain(path, now)
    with pytest.raises(files.FileChanged, match=says) as error:
        next(files.read_csv(path, position=position))
    assert error.value.position == position and "Try:" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "gzipped"])
def test_a_source_that_dies_anywhere_continues_with_the_next_row(how: str, tmp_path: Path) -> None:
    """Every crash point × every hit: the queue holds every line once, in order, the malformed ones too."""
    lines = [b"a,b", *(b"%d,x" % n if n % 5 else b"%d" % n for n in range(30))]
    path = (plain if how == "plain" else gzipped)(tmp_path / "a.csv", b"\n".join(lines))
    graph = cues.Graph("reader")

    @graph.source("rows", batch_size=7)
    def rows(position: Any) -> Iterator[Any]:
        yield from files.read_csv(path, position=position)

    whole = rows_of(files.read_csv(path))
    with testing.temporary_store() as store:
        sites = testing.crash_sites(lambda: testing.run_until_idle(graph, store))
    assert len(sites) > 10
    for point, hit in sites:
        with testing.temporary_store() as store:
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph, store)
            testing.run_until_idle(graph, store)
            assert testing.messages(store, "rows") == whole, (point, hit)


# --- lines --------------------------------------------------------------------------------------


def test_what_csv_writes_is_read_back(csv_of: Callable[..., Rows]) -> None:
    got = csv_of(b'a,b\n"x, y","say ""hi"""\n,""\n')
    assert got == [{"a": "x, y", "b": 'say "hi"'}, {"a": "", "b": ""}]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=8), min_size=2, max_size=2)
    )
)
def test_any_table_is_read_back(tmp_path_factory: pytest.TempPathFactory, table: list[list[str]]) -> None:
    """Any text in any field, written by the csv module."""
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([["left", "right"], *table])
    path = plain(tmp_path_factory.mktemp("any") / "a.csv", text.getvalue().encode())
    wanted = [dict(zip(("left", "right"), row, strict=True)) for row in table if row != ["left", "right"]]
    assert [row for row in rows_of(files.read_csv(path)) if "q/type" not in row] == wanted


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"1", "1 fields, expected 2"),
        (b"1,2,3", "3 fields, expected 2"),
        (b"a,b", "the header again"),
        (b'1,"2', "a quote is not closed"),
        (b'"1"x,2', "expected after"),
        (b"1,\xff", "not utf-8: byte 0xff at 2"),
    ],
)
def test_a_malformed_csv_line_passes_on_and_spoils_no_other(
    line: bytes, problem: str, csv_of: Callable[..., Rows]
) -> None:
    first, bad, last = csv_of(b"a,b\n1,x\n" + line + b"\n2,y\n", at="at")
    assert (first, last) == ({"a": "1", "b": "x", "at": "a.csv:2"}, {"a": "2", "b": "y", "at": "a.csv:4"})
    assert bad["q/type"] == files.MALFORMED and problem in bad["problem"]
    assert (bad["file"], bad["line"], bad["at"]) == ("a.csv", 3, "a.csv:3")
    assert bad["raw"] == line.decode("utf-8", "backslashreplace")
    assert files.check(first) is first
    with pytest.raises(files.Malformed):
        files.check(bad)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "Expecting property name"),
        (b"[1]", "a JSON array, expected an object"),
        (b"null", "a JSON null"),
        (b"7", "a JSON number"),
        (b'{"a": "\xff"}', "not utf-8"),
        (b'{"a": "\\ud800"}', "surrogates not allowed"),
        (b'{"q/meta": {}}', "reserved key, 'q/meta'"),
        (b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}", "nested more than 256 deep"),
        (b"[" * 50_000, ""),
    ],
)
def test_a_malformed_json_line_passes_on_and_spoils_no_other(
    line: bytes, problem: str, jsonl_of: Callable[..., Rows]
) -> None:
    """Among them what is JSON but could be no message: it must not stop the source either."""
    first, bad, last = jsonl_of(b'{"n": 1, "q/type": "t"}\n' + line + b'\n{"n": {"deep": [2]}}\n')
    assert (first, last) == ({"n": 1, "q/type": "t"}, {"n": {"deep": [2]}})
    assert bad["line"] == 2 and problem in bad["problem"]
    codec.pack(bad)


def test_a_line_without_end_is_malformed_and_never_in_memory(csv_of: Callable[..., Rows]) -> None:
    for size in (files.LINE_BYTES_MAX, files.LINE_BYTES_MAX * 3):
        bad, good = csv_of(b"a\n" + b"x" * size + b"\n1\n")
        assert good == {"a": "1"}
        assert f"{size + 1:,} bytes long" in bad["problem"] and len(bad["raw"]) == 1_000
    [longest] = csv_of(b"a\n" + b"x" * (files.LINE_BYTES_MAX - 1) + b"\n")
    assert len(longest["a"]) == files.LINE_BYTES_MAX - 1


@pytest.mark.parametrize("most", [3, 100])
def test_a_quoted_field_may_run_over_lines_and_an_open_quote_costs_its_own_line(
    most: int, csv_of: Callable[..., Rows]
) -> None:
    data = b'a,b\n1,"x\ny"\n2,"open\n3,z\n4,w\n5,v\n'
    got = csv_of(data, record_lines_max=most, at="at")
    assert got[0] == {"a": "1", "b": "x\ny", "at": "a.csv:2"}
    assert got[1]["problem"] == "a quote is not closed" and got[1]["line"] == 4
    assert got[2:] == [
        {"a": a, "b": b, "at": f"a.csv:{n}"} for a, b, n in (("3", "z", 5), ("4", "w", 6), ("5", "v", 7))
    ]
    assert [row.get("problem") for row in csv_of(data, record_lines_max=1)].count(None) == 3


def test_csv_with_quotes_equals_pythons_reader(csv_of: Callable[..., Rows]) -> None:
    """Cells with line ends, delimiters and quotes at random, quoted as RFC 4180 says, or with quotes inside of them."""
    chance = random.Random(seeds.new())
    for _ in range(30):
        cells = [["".join(chance.choices('xy",\n\r', k=chance.randint(1, 6))) for _ in "ab"] for _ in range(20)]
        cells = [row if chance.random() < 0.7 else ["5'11\"", 'x"y"'] for row in cells]
        out = io.StringIO(newline="")
        csv.writer(out, lineterminator="\n").writerow(["a", "b"])
        for row in cells:
            if row == ["5'11\"", 'x"y"']:
                out.write(",".join(row) + "\n")
            else:
                csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL).writerow(row)
        wanted = list(csv.reader(io.StringIO(out.getvalue(), newline=""), strict=True))[1:]
        assert wanted == cells
        assert [[row.get("a"), row.get("b")] for row in csv_of(out.getvalue().encode())] == cells


def test_the_longest_line_is_an_option(csv_of: Callable[..., Rows]) -> None:
    data = b'a\n"' + b"x" * 200_000 + b'"\n'
    assert "line_bytes_max=131,072" in csv_of(data)[0]["problem"]
    assert csv_of(data, line_bytes_max=300_000) == [{"a": "x" * 200_000}]


@pytest.mark.parametrize(
    "options", [{"delimiter": "||"}, {"delimiter": '"'}, {"record_lines_max": 0}, {"line_bytes_max": 1.5}]
)
def test_a_shape_that_no_file_has_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options)).replace("_", ".")):
        files.read_csv(tmp_path / "a.csv", **options)


def test_other_delimiters_and_encodings(csv_of: Callable[..., Rows]) -> None:
    assert csv_of("a;b\né;ü\n".encode("latin-1"), delimiter=";", encoding="latin-1") == [{"a": "é", "b": "ü"}]
    assert csv_of(b"\xef\xbb\xbfa,b\r\n1,2\r\n") == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"a,a", "names a column twice"),
        (b"q/meta,b", "reserved key"),
        (b'"a,b', "quote"),
        (b"\xff,b", "cannot be read"),
    ],
)
def test_a_header_that_cannot_be_read_stops_the_source(header: bytes, says: str, csv_of: Callable[..., Rows]) -> None:
    with pytest.raises(ValueError, match=says):
        csv_of(header + b"\n1,2\n")


def test_a_missing_file_and_an_archive_of_several_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        next(files.read_csv(tmp_path / "none.csv"))
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a", "a\n")
        archive.writestr("b", "b\n")
    with pytest.raises(ValueError, match="2 files, expected one"):
        next(files.read_csv(tmp_path / "two.zip"))


def test_jsonl_reads_what_json_writes(jsonl_of: Callable[..., Rows]) -> None:
    rows = [{"a": None, "b": [1, 2.5, True], "é": "\U0001f6eb", "big": 2**80}]
    assert jsonl_of("".join(json.dumps(row) + "\n" for row in rows).encode()) == rows
