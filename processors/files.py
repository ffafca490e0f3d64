"""Read files as sources: CSV and JSON lines, plain or compressed, from the position where a run stopped.

    @graph.source("rows")
    def rows(position):
        yield from files.read_csv("a.csv.gz", "b.csv", position=position)

Each row is yielded with the position after it. The engine commits that position together with the rows,
so a restart continues at the first row that is not on the queue: no row is lost or read twice. Several
files are read one after the other, as one source.

    position = [file, byte, line]      number of the file, from 0; its (uncompressed) bytes and lines that were read

A line that cannot be read does not stop the source, and is not dropped. It is yielded as

    {"q/type": files.MALFORMED, "file": "b.csv", "line": 7, "problem": "...", "raw": "..."}

and the next stream decides: :func:`check` raises for such a row, so it is written to the error queue
with its reason; with a ``types=`` filter another processor can take it. ``raw`` is always text: bytes
that are not in the encoding are shown as ``\\xff``.

Not guaranteed: that a changed file is noticed. A file must not change before the position. A truncated
file, or one whose lines have moved, is noticed (:class:`FileChanged`); a file that was rewritten with
lines of equal length is not. Compressed files have no index, so a restart reads and drops the bytes
before the position. A file is read once to its end; the next run reads lines that are appended later.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import cues
from cues import jsontext
from cues.arguments import check_number, text_of
from cues.errors import InvalidArgument
from cues.processors import foreign, places

Row = dict[str, Any]
Position = list[int]

MALFORMED: Final = foreign.MALFORMED
"""The ``q/type`` of a line that could not be read."""

LINE_BYTES_MAX: Final = 131_072
"""Longest record, in bytes, unless ``line_bytes_max=`` says otherwise: the csv module's own limit for a field."""

RECORD_LINES_MAX: Final = 100
"""Most lines of a CSV row with line ends inside of quoted fields, unless ``record_lines_max=`` says otherwise."""

DEPTH_MAX: Final = 256
"""Deepest nesting of a JSON row: half of the limit for messages."""

_RAW_CHARACTERS_MAX: Final = 1_000
"""Bytes of a record that is too long, in ``raw``."""


class Malformed(ValueError):
    """Raised by :func:`check` for a line that could not be read; its text is the problem."""


class FileChanged(cues.CuesError):
    """Raised at the start of a source when a file does not fit the position that was committed for it.

    ``path`` is the file, ``position`` the position. Nothing was read.
    """

    path: str
    position: Position


class BadFile(ValueError):
    """Stands for a file that cannot be read, or not to its end; its text has the name, the place and the problem."""


@dataclass(frozen=True)
class Shape:
    """The records of text files: what separates them, and how large they may be.

    Raises :class:`cues.errors.InvalidArgument` for what no file can have.
    """

    delimiter: str = ","
    encoding: str = "utf-8"
    record_lines_max: int = RECORD_LINES_MAX
    line_bytes_max: int = LINE_BYTES_MAX

    def __post_init__(self) -> None:
        if not (isinstance(self.delimiter, str) and len(self.delimiter) == 1 and self.delimiter not in '"\r\n'):
            raise InvalidArgument(
                f"The delimiter is {self.delimiter!r}.", "give one character, neither a quote nor a line end."
            )
        for name in ("record_lines_max", "line_bytes_max"):
            check_number(name, getattr(self, name), 1, 1 << 40, whole=True)
        if not _writes_plain_line_ends(text_of("encoding", self.encoding)):
            raise InvalidArgument(
                f"The encoding {self.encoding!r} does not write line ends as the byte 0x0A, by which lines are found.",
                "convert the files to UTF-8.",
            )
        try:
            self.delimiter.encode(self.encoding)
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"The delimiter {self.delimiter!r} cannot be written in {self.encoding}.", "give another delimiter."
            ) from None
        # The limit is one of the process. Raised, it changes nothing for others but what they refuse.
        csv.field_size_limit(max(csv.field_size_limit(), self.line_bytes_max))


def check(row: Row) -> Row:
    """Return ``row``, or raise :class:`Malformed` if it is a malformed line."""
    if row.get("q/type") == MALFORMED:
        raise Malformed(row["problem"])
    return row


def read_csv(
    *paths: str | os.PathLike[str],
    position: Position | None = None,
    delimiter: str = ",",
    encoding: str = "utf-8",
    record_lines_max: int = RECORD_LINES_MAX,
    line_bytes_max: int = LINE_BYTES_MAX,
    at: str | None = None,
    reserved: Sequence[str] = (),
) -> Iterator[tuple[Position, Row]]:
    """Yield ``(position, row)`` for every row of the files; a row is a dict of strings by column.

    ``paths`` are plain, or compressed by the ending of their names (``.gz``, ``.bz2``, ``.xz``, ``.zst``; ``.zip`` with
    one file in it); each begins with a header.
    ``position`` is the position of the last committed row, None for the start.
    ``encoding`` must write line ends as the byte 0x0A, as UTF-8 and the Latin encodings do.
    ``record_lines_max`` is the largest number of lines of a row, whose quoted fields may have line ends. A quote that
    is not closed within them is an error of its own line, and the next line is a row again.
    ``line_bytes_max`` is the largest size of a row in bytes. A larger one is malformed, and not read whole.
    ``at`` names a column that is added to each row, with its place in the file (``"b.csv:7"``).
    ``reserved`` are keys that rows may set: ``"q/type"``, ``"q/topics"`` (:mod:`cues.processors.foreign`).

    Kind: source
    Needs: nothing (zstd: extra `files`)
    Guarantee: exactly once: each row of each file is on the queue once, also after kill -9
    Mechanism: position of file number, byte and line, committed with the messages

    Empty lines are skipped. Raises :class:`FileChanged`, OSError when a file cannot be read, and
    ValueError when a header cannot be read. These errors concern the file, so they stop the source.
    """

    shape = Shape(delimiter, encoding, record_lines_max, line_bytes_max)
    return _read(paths, position, csv_parser(shape, foreign.allowed(reserved)), True, shape, at)


def read_jsonl(
    *paths: str | os.PathLike[str],
    position: Position | None = None,
    encoding: str = "utf-8",
    line_bytes_max: int = LINE_BYTES_MAX,
    at: str | None = None,
    reserved: Sequence[str] = (),
) -> Iterator[tuple[Position, Row]]:
    """Yield ``(position, row)`` for every line of the files; each line is one JSON object.

    The arguments and the errors are those of :func:`read_csv`.

    Kind: source
    Needs: nothing (zstd: extra `files`)
    Guarantee: exactly once: each line of each file is on the queue once, also after kill -9
    Mechanism: position of file number, byte and line, committed with the messages
    """

    shape = Shape(encoding=encoding, record_lines_max=1, line_bytes_max=line_bytes_max)
    return _read(paths, position, jsonl_parser(shape, foreign.allowed(reserved)), False, shape, at)


Parser = Callable[[bytes], Row]
"""Reads one record without its line end. Raises ValueError with the problem."""


def csv_parser(shape: Shape, may: frozenset[str] = frozenset()) -> Callable[[str, bytes], Parser]:
    """Return a function that takes the path and the header line of a file, and returns the parser of its rows."""
    delimiter, encoding = shape.delimiter, shape.encoding

    def of_file(path: str, header: bytes) -> Parser:
        columns = csv_names(shape, may, path, header)

        def read(line: bytes) -> Row:
            fields = _fields(line.decode(encoding), delimiter)
            if len(fields) != len(columns):
                raise ValueError(f"{len(fields)} fields, expected {len(columns)}")
            if fields == columns:
                raise ValueError("the header again")
            row = dict(zip(columns, fields, strict=True))
            foreign.check(row, may)
            return row

        return read

    return of_file


def csv_names(shape: Shape, may: frozenset[str], path: str, header: bytes) -> list[str]:
    """Return the names of the columns in a header. Raises ValueError, which names the file."""
    if b"\r" in header.rstrip(b"\r\n") and b'"' not in header:
        raise ValueError(f"{path}: its lines end with CR (byte 0x0D), expected LF or CR LF")
    try:
        names = _fields(_without_mark(header, shape.encoding).decode(shape.encoding), shape.delimiter)
    except ValueError as error:
        raise ValueError(f"{path}: the header cannot be read: {error}") from None
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: the header names a column twice: {', '.join(names)}")
    try:
        foreign.check_keys(names, may)
    except InvalidArgument as error:
        raise ValueError(f"{path}: the header names a {error.message}") from None
    return names


def jsonl_parser(shape: Shape, may: frozenset[str] = frozenset()) -> Callable[[str, bytes], Parser]:
    """Return a function that returns the parser of JSON lines, for any path and no header."""
    encoding = shape.encoding

    def read(line: bytes) -> Row:
        row = jsontext.decode(line.decode(encoding))
        if not isinstance(row, dict):
            raise ValueError(f"a JSON {_json_type(row)}, expected an object")
        foreign.check(row, may)
        if b"\\ud" in line.lower():  # half of a surrogate pair is JSON, but not text
            json.dumps(row, ensure_ascii=False).encode()
        if line.count(b"[") + line.count(b"{") > DEPTH_MAX and _depth(row) > DEPTH_MAX:
            raise ValueError(f"nested more than {DEPTH_MAX} deep")
        return row

    return lambda path, header: read


def text_parser(shape: Shape, may: frozenset[str] = frozenset()) -> Callable[[str, bytes], Parser]:
    """Return a function that returns the parser of text: a row is ``{"line": text}``."""
    encoding = shape.encoding
    return lambda path, header: lambda line: {"line": line.decode(encoding)}


class Record(NamedTuple):
    """One record of a file. ``row`` is None if it could not be read; ``problem`` then says why."""

    offset: int
    """The bytes of the file up to the end of the record."""
    line: int
    """The lines of the file up to the end of the record."""
    first_line: int
    row: Row | None
    problem: str
    raw: str


def records(
    file: IO[bytes], offset: int, line: int, parse: Parser, shape: Shape, lines_max: int = 1, complete: bool = True
) -> Iterator[Record]:
    """Yield the records of a file from its present place, which is at ``offset`` and after ``line`` lines.

    ``lines_max``: lines of a record, whose quotes count then. ``complete``: the file does not grow, so a last line
    without a line end is a record. Otherwise that line waits: it is not read, and the file is put back before it.
    Empty lines are skipped.
    """
    encoding, limit = shape.encoding, shape.line_bytes_max
    delimiter = shape.delimiter.encode(encoding)
    ahead: deque[bytes] = deque()
    """Lines that were read to find the end of a quote, and are records of their own."""
    while record := ahead.popleft() if ahead else file.readline(limit + 1):
        lines = 1
        if lines_max > 1 and b'"' in record and ends_inside(record, False, delimiter):
            parts, size, inside = [record], len(record), True
            while inside and len(parts) < lines_max and size <= limit and parts[-1].endswith(b"\n"):
                more = ahead.popleft() if ahead else file.readline(limit + 1)
                if not more:
                    if not complete:
                        file.seek(offset)
                        return
                    break
                parts.append(more)
                size += len(more)
                inside = ends_inside(more, True, delimiter)
            if inside:
                ahead.extendleft(reversed(parts[1:]))
            else:
                record, lines = b"".join(parts), len(parts)
        problem, size, ended = "", len(record), record.endswith(b"\n")
        if len(record) > limit:
            if not ended:
                rest, ended = _skip_line(file)
                size += rest
            problem = f"{size:,} bytes long, at most line_bytes_max={limit:,} are read"
            record = record[:_RAW_CHARACTERS_MAX]
        if not ended and not complete:
            file.seek(offset)
            return
        if not offset:
            record = _without_mark(record, encoding)
        line += lines
        offset += size
        record = record.rstrip(b"\r\n")
        if not record:
            continue
        row: Row | None = None
        if not problem:
            try:
                row = parse(record)
            except UnicodeDecodeError as error:
                problem = f"not {encoding}: byte 0x{record[error.start]:02x} at {error.start}"
            except InvalidArgument as error:
                problem = error.message
            except (ValueError, RecursionError) as error:
                problem = str(error)
        raw = record.decode(encoding, "backslashreplace") if problem else ""
        yield Record(offset, line, line - lines + 1, row, problem, raw)


def malformed(file: str, record: Record) -> Row:
    """Return the row that stands for a record that could not be read."""
    return {"q/type": MALFORMED, "file": file, "line": record.first_line, "problem": record.problem, "raw": record.raw}


def _read(
    paths: tuple[str | os.PathLike[str], ...],
    position: Position | None,
    reader: Callable[[str, bytes], Parser],
    has_header: bool,
    shape: Shape,
    at: str | None,
) -> Iterator[tuple[Position, Row]]:
    """The common part of the formats: the order of files, resuming, and malformed lines."""
    first, start, start_line = position or (0, 0, 0)
    for number, path in list(enumerate(map(Path, paths)))[first:]:
        with ExitStack() as stack:
            file = _open(path, stack)
            header = file.readline(shape.line_bytes_max) if has_header else b""
            if has_header and not header:
                continue  # not even a header: an empty file
            parse = reader(str(path), header)
            offset, line = len(header), int(has_header)
            if number == first and position:
                _resume(file, path, [first, start, start_line])
                offset, line = start, start_line
            for record in records(file, offset, line, parse, shape, shape.record_lines_max):
                row = malformed(path.name, record) if record.row is None else record.row
                if at is not None:
                    row[at] = f"{path.name}:{record.first_line}"
                yield [number, record.offset, record.line], row


def _open(path: Path, stack: ExitStack) -> IO[bytes]:
    """The file's bytes, uncompressed."""
    return places.open_plain(stack.enter_context(open(path, "rb")), str(path), stack)


def _resume(file: IO[bytes], path: Path, position: Position) -> None:
    """Move to the position. The byte before it must be the end of a line, as when it was read."""
    file.seek(position[1] - 1)
    before = file.read(1)
    if before == b"\n" or (before and not file.read(1)):
        return  # the second case: the file ends here, and its last line has no line end
    raise FileChanged(
        f"{path} has changed: its line {position[2]} does not end at byte {position[1]:,},"
        f" where the last run stopped reading{'' if before else '; it is shorter now'}.",
        "restore the file, or read the new one as another source.",
        path=str(path),
        position=position,
    )


def _without_mark(first: bytes, encoding: str) -> bytes:
    """The first line of a file without the byte order mark that some programs write before UTF-8."""
    return first.removeprefix(codecs.BOM_UTF8) if codecs.lookup(encoding).name == "utf-8" else first


def _skip_line(file: IO[bytes]) -> tuple[int, bool]:
    """Read to the end of the line without keeping it; returns the bytes skipped, and whether the line has an end."""
    skipped = 0
    while piece := file.readline(LINE_BYTES_MAX):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            return skipped, True
    return skipped, False


def ends_inside(line: bytes, inside: bool, delimiter: bytes) -> bool:
    """Return whether a quoted field is open at the end of a line; ``inside``: one is open at its start.

    A quote opens a field only as its first character: in ``5'11"`` it is a character like others.
    """
    at = line.find(b'"')
    while at >= 0:
        if not inside:
            inside = at == 0 or line.endswith(delimiter, 0, at)
        elif line.startswith(b'"', at + 1):
            at += 1  # a quote inside of the field
        else:
            inside = False
        at = line.find(b'"', at + 1)
    return inside


def _writes_plain_line_ends(encoding: str) -> bool:
    try:
        return "a\n".encode(encoding)[-2:] == b"a\n" and "\n\n".encode(encoding).endswith(b"\n\n")
    except LookupError:
        raise InvalidArgument(f"The encoding {encoding!r} is unknown.", "use one that Python knows.") from None


def _fields(line: str, delimiter: str) -> list[str]:
    """The fields of one record. Without quotes they are the parts between the delimiters."""
    if '"' not in line:
        return line.rstrip("\r\n").split(delimiter)
    try:
        return next(csv.reader([line.rstrip("\r\n")], delimiter=delimiter, strict=True))
    except csv.Error as error:
        open_quote = str(error) == "unexpected end of data"
        raise ValueError("a quote is not closed" if open_quote else str(error)) from None


def _depth(value: object) -> int:
    depth = 0
    level = [value]
    while level := [
        inner
        for outer in level
        if isinstance(outer, (dict, list))
        for inner in (outer.values() if isinstance(outer, dict) else outer)
    ]:
        depth += 1
    return depth


def _json_type(value: object) -> str:
    return {"list": "array", "str": "string", "NoneType": "null", "bool": "boolean"}.get(type(value).__name__, "number")
