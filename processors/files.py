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
import functools
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import cues
from cues import jsontext
from cues.arguments import check_number, text_of, texts_of
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

ASCII_BYTES: Final = frozenset(("utf-8", "ascii", "iso8859-1", "iso8859-15", "cp1252"))
"""Encodings in which a byte of ASCII is that character wherever it is. A block is the same text as its lines."""

_RAW_CHARACTERS_MAX: Final = 1_000
"""Bytes of a record that is too long, in ``raw``."""


class Malformed(ValueError):
    """Raised by :func:`check` for a line that could not be read; its text is the problem."""


class FileChanged(cues.CuesError):
    """Raised when a file does not fit the place up to which it was read, by an earlier run or by this one.

    ``path`` is the file, ``position`` the place. Nothing was read after it.
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
    header: Sequence[str] | None = None
    """The names of the columns of CSV without a header."""
    quote: str | None = '"'
    escape: str | None = None
    begins: str | None = None
    """A regular expression for the beginning of the first line of a record of text; None: each line is a record."""

    def __post_init__(self) -> None:
        delimiter = self.delimiter
        if not (isinstance(delimiter, str) and len(delimiter) == 1 and delimiter not in f"{self.quote or ''}\r\n"):
            raise InvalidArgument(
                f"The delimiter is {delimiter!r}.", "give one character, neither a quote nor a line end."
            )
        for name, sign in (("quote", self.quote), ("escape", self.escape)):
            if sign is not None and not (isinstance(sign, str) and len(sign) == 1 and "!" <= sign <= "~"):
                raise InvalidArgument(f"{name}={sign!r:.60}.", "give one sign of ASCII, or None.")
        if self.escape is not None and self.escape in (delimiter, self.quote):
            raise InvalidArgument(
                f"escape={self.escape!r} is the delimiter or the quote, too.", "leave escape= out: a quote is doubled."
            )
        if self.begins is not None:
            try:
                re.compile(text_of("begins", self.begins))
            except re.error as error:
                raise InvalidArgument(
                    f"begins={self.begins!r:.60} is not a regular expression: {error}.", "give one, such as r'\\d{4}-'."
                ) from None
        if self.header is not None:
            names = texts_of("header", self.header)
            if not names or isinstance(self.header, str) or len(set(names)) < len(names):
                raise InvalidArgument(f"header={self.header!r:.60}.", "give a list of different names of columns.")
        for name in ("record_lines_max", "line_bytes_max"):
            check_number(name, getattr(self, name), 1, 1 << 40, whole=True)
        if not _writes_plain_line_ends(text_of("encoding", self.encoding)):
            raise InvalidArgument(
                f"The encoding {self.encoding!r} does not write line ends as the byte 0x0A, by which lines are found.",
                "convert the files to UTF-8.",
            )
        if self.escape is not None and codecs.lookup(self.encoding).name not in ASCII_BYTES:
            raise InvalidArgument(
                f"escape= cannot be used with the encoding {self.encoding!r}: other characters may have its byte.",
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

    @functools.cached_property
    def dialect(self) -> dict[str, Any]:
        """The arguments of csv.reader."""
        quoting = csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE
        signs = {"delimiter": self.delimiter, "quotechar": self.quote, "escapechar": self.escape}
        return {**signs, "quoting": quoting, "strict": True}

    @functools.cached_property
    def signs(self) -> tuple[bytes, ...]:
        """The bytes without which a record is one line, with its fields between the delimiters."""
        return tuple(sign.encode() for sign in (self.quote, self.escape) if sign)

    def has_signs(self, data: bytes) -> bool:
        """Return whether there may be quotes or escapes."""
        return any(sign in data for sign in self.signs)

    def fields(self, line: str) -> list[str]:
        """Return the fields of one record. Raises ValueError with the problem."""
        if (self.quote is None or self.quote not in line) and (self.escape is None or self.escape not in line):
            return line.rstrip("\r\n").split(self.delimiter)
        try:
            return next(csv.reader([line.rstrip("\r\n")], **self.dialect))
        except csv.Error as error:
            if str(error) != "unexpected end of data":
                raise ValueError(str(error)) from None
            is_escape = self.escape is not None and line.endswith(self.escape)
            raise ValueError("an escape ends the record" if is_escape else "a quote is not closed") from None

    @functools.cached_property
    def _escaped(self) -> re.Pattern[bytes] | None:
        return None if self.escape is None else re.compile(re.escape(self.escape.encode()) + b"[\\0-\\xff]")

    def ends_inside(self, line: bytes, inside: bool) -> bool:
        """Return whether a quoted field is open at the end of a line; ``inside``: one is open at its start.

        A quote opens a field only as its first character: in ``5'11"`` it is a character like others.
        """
        if self.quote is None:
            return False
        if self._escaped is not None:
            line = self._escaped.sub(b"xx", line)
        quote, delimiter = self.quote.encode(), self.delimiter.encode(self.encoding)
        at = line.find(quote)
        while at >= 0:
            if not inside:
                inside = at == 0 or line.endswith(delimiter, 0, at)
            elif line.startswith(quote, at + 1):
                at += 1  # a quote inside of the field
            else:
                inside = False
            at = line.find(quote, at + 1)
        return inside


def check(row: Row) -> Row:
    """Return ``row``, or raise :class:`Malformed` if it is a malformed line."""
    if row.get("q/type") == MALFORMED:
        raise Malformed(row["problem"])
    return row


def read_csv(
    *paths: str | os.PathLike[str],
    position: Position | None = None,
    delimiter: str = ",",
    header: Sequence[str] | None = None,
    quote: str | None = '"',
    escape: str | None = None,
    encoding: str = "utf-8",
    record_lines_max: int = RECORD_LINES_MAX,
    line_bytes_max: int = LINE_BYTES_MAX,
    at: str | None = None,
    reserved: Sequence[str] = (),
) -> Iterator[tuple[Position, Row]]:
    """Yield ``(position, row)`` for every row of the files; a row is a dict of strings by column.

    ``paths`` are plain, or compressed by the ending of their names (``.gz``, ``.bz2``, ``.xz``, ``.zst``; ``.zip`` with
    one file in it); each begins with a header, or has the columns that ``header`` names.
    ``position`` is the position of the last committed row, None for the start.
    ``quote`` begins and ends a field that may have delimiters and line ends, and is doubled in it; None: no field has.
    ``escape``, such as a backslash, makes the next character a part of the field; it does not escape a line end.
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

    shape = Shape(delimiter, encoding, record_lines_max, line_bytes_max, header, quote, escape)
    return _read(paths, position, csv_parser(shape, foreign.allowed(reserved)), header is None, shape, at)


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
    encoding, has_header = shape.encoding, shape.header is None

    def of_file(path: str, header: bytes) -> Parser:
        columns = csv_names(shape, may, path, header)

        def read(line: bytes) -> Row:
            fields = shape.fields(line.decode(encoding))
            if len(fields) != len(columns):
                raise ValueError(f"{len(fields)} fields, expected {len(columns)}")
            if has_header and fields == columns:
                raise ValueError("the header again")
            row = dict(zip(columns, fields, strict=True))
            foreign.check(row, may)
            return row

        return read

    return of_file


def csv_names(shape: Shape, may: frozenset[str], path: str, header: bytes) -> list[str]:
    """Return the names of the columns: those in a header, or those given. Raises ValueError, which names the file."""
    if len(header) >= shape.line_bytes_max and not header.endswith(b"\n"):
        raise ValueError(f"{path}: its header is longer than line_bytes_max={shape.line_bytes_max:,} bytes")
    if b"\r" in header.rstrip(b"\r\n") and not shape.has_signs(header):
        raise ValueError(f"{path}: its lines end with CR (byte 0x0D), expected LF or CR LF")
    try:
        names = list(shape.header or shape.fields(_without_mark(header, shape.encoding).decode(shape.encoding)))
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
        if jsontext.is_deeper(line, row, DEPTH_MAX):
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
    ahead: deque[bytes] = deque()
    """Lines that were read to find the end of a quote, and are records of their own."""
    while record := ahead.popleft() if ahead else file.readline(limit + 1):
        lines = 1
        if lines_max > 1 and shape.has_signs(record) and shape.ends_inside(record, False):
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
                inside = shape.ends_inside(more, True)
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
            row, problem = parsed(parse, record, encoding)
        raw = record.decode(encoding, "backslashreplace") if problem else ""
        yield Record(offset, line, line - lines + 1, row, problem, raw)


def begun(
    file: IO[bytes], offset: int, line: int, parse: Parser, shape: Shape, may_end: Callable[[], bool]
) -> Iterator[Record]:
    """Yield the records of text of which each begins with a line that matches ``begins=``.

    ``may_end``: whether the last record is whole, because the file does not grow. Otherwise the file is put back before
    it. So is a last line without a line end, which may be a part of it or begin another. Lines before the first
    beginning are a record, and one of empty lines is left out. CR LF in a record becomes LF.
    """
    encoding, limit = shape.encoding, shape.line_bytes_max
    begins = re.compile(shape.begins or "").match
    held, size, lines = b"", 0, 0

    def record() -> Iterator[Record]:
        nonlocal offset, line, held, size, lines
        offset, line, text = offset + size, line + lines, held.rstrip(b"\r\n").replace(b"\r\n", b"\n")
        row: Row | None = None
        problem = f"{size:,} bytes long, at most line_bytes_max={limit:,} are read" if size > limit else ""
        if problem:
            text = text[:_RAW_CHARACTERS_MAX]
        elif text:
            row, problem = parsed(parse, text, encoding)
        if text:
            raw = text.decode(encoding, "backslashreplace") if problem else ""
            yield Record(offset, line, line - lines + 1, row, problem, raw)
        held, size, lines = b"", 0, 0

    while part := file.readline(limit + 1):
        length, ended = len(part), part.endswith(b"\n")
        if not ended and length > limit:
            rest, ended = _skip_line(file)
            length += rest
        if not ended and not may_end():
            break
        if not offset and not size:
            part = _without_mark(part, encoding)
        if lines and begins(part.rstrip(b"\r\n").decode(encoding, "replace")):
            yield from record()
        held += part if size <= limit else b""
        size, lines = size + length, lines + 1
    if lines and may_end():
        yield from record()
    else:
        file.seek(offset)


def parsed(parse: Parser, record: bytes, encoding: str) -> tuple[Row | None, str]:
    """Return the row of a record, or None and the problem."""
    try:
        return parse(record), ""
    except UnicodeDecodeError as error:
        return None, f"not {encoding}: byte 0x{record[error.start]:02x} at {error.start}"
    except InvalidArgument as error:
        return None, error.message
    except (ValueError, RecursionError) as error:
        return None, str(error)


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


def _writes_plain_line_ends(encoding: str) -> bool:
    try:
        return "a\n".encode(encoding)[-2:] == b"a\n" and "\n\n".encode(encoding).endswith(b"\n\n")
    except LookupError:
        raise InvalidArgument(f"The encoding {encoding!r} is unknown.", "use one that Python knows.") from None


def _json_type(value: object) -> str:
    return {"list": "array", "str": "string", "NoneType": "null", "bool": "boolean"}.get(type(value).__name__, "number")
