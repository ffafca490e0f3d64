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

import csv
import gzip
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final, cast

import cues

Row = dict[str, Any]
Position = list[int]

MALFORMED: Final = "malformed"
"""The ``q/type`` of a line that could not be read."""

LINE_BYTES_MAX: Final = 131_072
"""Longest record, in bytes: the csv module's own limit for a field. A longer one is malformed, and not read whole."""

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
    record_lines_max: int = 1,
    at: str | None = None,
) -> Iterator[tuple[Position, Row]]:
    """Yield ``(position, row)`` for every row of the files; a row is a dict of strings by column.

    ``paths`` are plain, ``.gz``, or ``.zip`` with one file in it; each begins with a header.
    ``position`` is the position of the last committed row, None for the start.
    ``encoding`` must write line ends as the byte 0x0A, as UTF-8 and the Latin encodings do.
    ``record_lines_max`` is the largest number of lines of a row with quoted fields. It is 1, so that a
    quote by mistake affects only its own line.
    ``at`` names a column that is added to each row, with its place in the file (``"b.csv:7"``).

    Empty lines are skipped. Raises :class:`FileChanged`, OSError when a file cannot be read, and
    ValueError when a header cannot be read. These errors concern the file, so they stop the source.
    """

    def reader(path: Path, header: bytes) -> Callable[[bytes], Row]:
        try:
            columns = _fields(header.decode("utf-8-sig" if encoding == "utf-8" else encoding), delimiter)
        except ValueError as error:
            raise ValueError(f"{path}: the header cannot be read: {error}") from None
        if len(set(columns)) < len(columns):
            raise ValueError(f"{path}: the header names a column twice: {', '.join(columns)}")
        try:
            _check_keys(columns)
        except ValueError as error:
            raise ValueError(f"{path}: the header names a {error}") from None

        def read(line: bytes) -> Row:
            fields = _fields(line.decode(encoding), delimiter)
            if len(fields) != len(columns):
                raise ValueError(f"{len(fields)} fields, expected {len(columns)}")
            if fields == columns:
                raise ValueError("the header again")
            return dict(zip(columns, fields, strict=True))

        return read

    return _read(paths, position, reader, True, encoding, record_lines_max, at)


def read_jsonl(
    *paths: str | os.PathLike[str], position: Position | None = None, encoding: str = "utf-8", at: str | None = None
) -> Iterator[tuple[Position, Row]]:
    """Yield ``(position, row)`` for every line of the files; each line is one JSON object.

    The arguments and the errors are those of :func:`read_csv`.
    """

    def reader(path: Path, header: bytes) -> Callable[[bytes], Row]:
        def read(line: bytes) -> Row:
            row = json.loads(line.decode(encoding))
            if not isinstance(row, dict):
                raise ValueError(f"a JSON {_json_type(row)}, expected an object")
            _check_keys(row)
            if b"\\ud" in line.lower():  # half of a surrogate pair is JSON, but not text
                json.dumps(row, ensure_ascii=False).encode()
            if line.count(b"[") + line.count(b"{") > DEPTH_MAX and _depth(row) > DEPTH_MAX:
                raise ValueError(f"nested more than {DEPTH_MAX} deep")
            return row

        return read

    return _read(paths, position, reader, False, encoding, 1, at)


def _read(
    paths: tuple[str | os.PathLike[str], ...],
    position: Position | None,
    reader: Callable[[Path, bytes], Callable[[bytes], Row]],
    has_header: bool,
    encoding: str,
    lines_max: int,
    at: str | None,
) -> Iterator[tuple[Position, Row]]:
    """The common part of the formats: the order of files, resuming, and malformed lines."""
    first, start, start_line = position or (0, 0, 0)
    for number, path in list(enumerate(map(Path, paths)))[first:]:
        with ExitStack() as stack:
            file = _open(path, stack)
            header = file.readline(LINE_BYTES_MAX) if has_header else b""
            read = reader(path, header) if header or not has_header else None
            if read is None:
                continue  # not even a header: an empty file
            offset, line = len(header), int(has_header)
            if number == first and position:
                _resume(file, path, [first, start, start_line])
                offset, line = start, start_line

            while record := file.readline(LINE_BYTES_MAX + 1):
                lines = 1
                # A record continues while a quote is open, up to its largest number of lines.
                while lines < lines_max and record.count(b'"') % 2 and len(record) <= LINE_BYTES_MAX:
                    more = file.readline(LINE_BYTES_MAX + 1 - len(record))
                    if not more:
                        break
                    record += more
                    lines += 1
                line += lines
                offset += len(record)
                problem = ""
                if len(record) > LINE_BYTES_MAX:
                    rest = _skip_line(file) if not record.endswith(b"\n") else 0
                    offset += rest
                    problem = f"{len(record) + rest:,} bytes long, at most {LINE_BYTES_MAX:,} are read"
                    record = record[:_RAW_CHARACTERS_MAX]
                record = record.rstrip(b"\r\n")
                if not record:
                    continue
                row: Row = {}
                if not problem:
                    try:
                        row = read(record)
                    except UnicodeDecodeError as error:
                        problem = f"not {encoding}: byte 0x{record[error.start]:02x} at {error.start}"
                    except (ValueError, RecursionError) as error:
                        problem = str(error)
                where = line - lines + 1
                if problem:
                    row = {
                        "q/type": MALFORMED,
                        "file": path.name,
                        "line": where,
                        "problem": problem,
                        "raw": record.decode(encoding, "backslashreplace"),
                    }
                if at is not None:
                    row[at] = f"{path.name}:{where}"
                yield [number, offset, line], row


def _open(path: Path, stack: ExitStack) -> IO[bytes]:
    """The file's bytes, uncompressed."""
    if path.suffix == ".gz":
        return cast(IO[bytes], stack.enter_context(gzip.open(path, "rb")))
    if path.suffix == ".zip":
        archive = stack.enter_context(zipfile.ZipFile(path))
        names = archive.namelist()
        if len(names) != 1:
            raise ValueError(f"{path}: an archive of {len(names)} files, expected one")
        return stack.enter_context(archive.open(names[0]))
    return stack.enter_context(open(path, "rb"))


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


def _skip_line(file: IO[bytes]) -> int:
    """Read to the end of the line without keeping it; returns the bytes skipped."""
    skipped = 0
    while piece := file.readline(LINE_BYTES_MAX):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _fields(line: str, delimiter: str) -> list[str]:
    """The fields of one record. Without quotes they are the parts between the delimiters."""
    if '"' not in line:
        return line.rstrip("\r\n").split(delimiter)
    try:
        return next(csv.reader([line.rstrip("\r\n")], delimiter=delimiter, strict=True))
    except csv.Error as error:
        open_quote = str(error) == "unexpected end of data"
        raise ValueError("a quote is not closed" if open_quote else str(error)) from None


def _check_keys(keys: Iterable[str]) -> None:
    """Refuse ``q/`` keys, except the type and the topics of a message."""
    for key in keys:
        if key.startswith("q/") and key not in ("q/type", "q/topics"):
            raise ValueError(f"reserved key, {key!r}")


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
