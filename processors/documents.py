"""Files whose records have numbers and no lines: JSON documents, Avro, and sheets of Excel.

    records_of("json", file, 2, parse, shape)      the records of an open file after its first two

A JSON file is one object, or one array of objects. It is read as text in parts, and Python's JSON scanner finds the end
of each record, so the values and the errors are those of JSON lines. In memory is one record, of at most
:data:`RECORD_BYTES_MAX` bytes, whatever the size of the array.

An Avro file is read by fastavro, block by block. Values of logical types are dates, times, decimals and UUIDs.

A sheet of Excel is read by openpyxl, row by row. Its first row has the names of the columns, unless ``header=`` has
them; an empty row is not a record. Texts, numbers, dates, times and true and false are values, and an empty cell is
None. A formula has the value that the program which wrote the file has found; without one it is None. A record's number
is that of its row.

A restart reads the records before its position again, without a look at them; of Avro it skips whole blocks.
"""

from __future__ import annotations

import codecs
import errno
import json
import re
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final

from cues.errors import InvalidArgument, NotInstalled
from cues.imported import package
from cues.processors import files, foreign

RECORD_BYTES_MAX: Final = 16 << 20
"""Longest record of a JSON document, unless ``line_bytes_max=`` is larger."""

_PART_BYTES: Final = 1 << 16
_ENDS: Final = frozenset(" \t\r\n,]")
"""The characters that may follow a record; after others a number may go on."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")


def records_of(
    format: str,
    file: IO[bytes],
    skip: int,
    parse: files.Parser,
    shape: files.Shape,
    may: frozenset[str],
    sheet: str | None = None,
) -> Iterator[files.Record]:
    """Yield the records after the first ``skip``. Raises ValueError where the rest of the file cannot be read."""
    if format == "json":
        yield from _Json(file, parse, shape).records(skip)
    elif format == "avro":
        yield from _avro(file, skip, may)
    else:
        yield from _excel(file, skip, may, shape.header, sheet)


class _Json:
    """The place in a JSON file, and the text around it that is in memory."""

    def __init__(self, file: IO[bytes], parse: files.Parser, shape: files.Shape) -> None:
        self._file, self._parse, self._encoding = file, parse, shape.encoding
        self._decoder = codecs.getincrementaldecoder(shape.encoding)("surrogateescape")
        self._limit = max(RECORD_BYTES_MAX, shape.line_bytes_max)
        decoder: Any = json.JSONDecoder()
        self._scan = decoder.scan_once
        self._text, self._at, self._ended = "", 0, False
        while not self._text and not self._ended:
            self._more()
        self._text = self._text.removeprefix("\ufeff")

    def records(self, skip: int) -> Iterator[files.Record]:
        first = self._next()
        if not first:
            raise ValueError("it has no JSON document")
        if first != "[":
            yield from self._record(1, skip)
            if self._next():
                raise ValueError("there is more after the JSON document; lines of JSON are format='jsonl'")
            return
        self._at += 1
        number = 0
        following = self._next()
        while following != "]" or number:
            number += 1
            yield from self._record(number, skip)
            following = self._next()
            if following not in (",", "]"):
                said = f"{following!r} follows it" if following else "the file ends"
                raise ValueError(f"expected ',' or ']' after a record of the array, and {said}")
            if following == "]":
                break
            self._at += 1
        self._at += 1
        if self._next():
            raise ValueError("there is more after the array")

    def _record(self, number: int, skip: int) -> Iterator[files.Record]:
        end = self._end()
        text, self._at = self._text[self._at : end], end
        if number > skip:
            data = text.encode(
                self._encoding, "surrogateescape"
            )  # bytes that are no text are a problem of their record
            row, problem = files.parsed(self._parse, data, self._encoding)
            raw = data[:1_000].decode(self._encoding, "backslashreplace") if problem else ""
            yield files.Record(number, number, number, row, problem, raw)

    def _end(self) -> int:
        """Return the end of the value that begins here."""
        self._next()
        while True:
            problem = "the file ends inside of a value"
            try:
                end: int = self._scan(self._text, self._at)[1]
            except StopIteration:
                problem = "a value is missing"
            except RecursionError:
                raise ValueError("a record is nested too deep") from None
            except ValueError as error:
                problem = str(error)
            else:
                if self._ended or (end < len(self._text) and self._text[end] in _ENDS):
                    return end
            if self._ended:
                raise ValueError(problem)
            if len(self._text) - self._at > self._limit:
                raise ValueError(f"a record has more than {self._limit:,} characters, or is no JSON: {problem}")
            self._more()

    def _next(self) -> str:
        """Return the next character that is not a space, and move to it; "" at the end."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more()

    def _more(self) -> None:
        """Read a part, as long as the text that is there: so a long record is scanned a few times only."""
        data = self._file.read(max(_PART_BYTES, len(self._text) - self._at))
        self._ended = not data
        self._text = self._text[self._at :] + self._decoder.decode(data, final=not data)
        self._at = 0


def avro() -> Any:
    """Return the module fastavro. Raises :class:`cues.errors.NotInstalled`."""
    return package("Avro files need fastavro", "files", "fastavro")


def _avro(file: IO[bytes], skip: int, may: frozenset[str]) -> Iterator[files.Record]:
    fastavro, number = avro(), 0
    try:
        blocks = iter(fastavro.block_reader(file))
    except Exception as error:
        raise _damage(error) from error
    while True:
        try:
            block = next(blocks, None)
            if block is None:
                return
            if number + block.num_records <= skip:
                number += block.num_records
                continue
            rows = list(block)
        except Exception as error:
            raise _damage(error) from error
        for row in rows:
            number += 1
            if number > skip:
                problem = "" if isinstance(row, dict) else f"a {type(row).__name__}, expected a record"
                yield _checked(number, row, problem, may)


def _checked(number: int, row: Any, problem: str, may: frozenset[str]) -> files.Record:
    """Return the record of a row, in which a problem was found or will be."""
    try:
        if not problem:
            foreign.check(row, may)
    except InvalidArgument as error:
        problem = error.message
    except ValueError as error:
        problem = str(error)
    return files.Record(number, number, number, None if problem else row, problem, repr(row)[:1_000] if problem else "")


def excel() -> Any:
    """Return the module openpyxl. Raises :class:`cues.errors.NotInstalled`."""
    return package("Excel files need openpyxl", "files", "openpyxl")


def _excel(
    file: IO[bytes], skip: int, may: frozenset[str], header: Sequence[str] | None, sheet: str | None
) -> Iterator[files.Record]:
    openpyxl, names = excel(), None if header is None else list(header)
    try:
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        sheets = {each.title: each for each in book.worksheets}
        chosen = sheets.get(next(iter(sheets), "") if sheet is None else sheet)
        if chosen is not None:
            chosen.reset_dimensions()  # some programs write wrong ones
            rows = enumerate(chosen.iter_rows(), 1)
    except Exception as error:
        raise _damage(error, "Excel") from error
    if chosen is None:
        raise ValueError(f"it has no sheet {sheet or ''!r}; it has {', '.join(map(repr, sheets)) or 'none'}")
    while True:
        try:
            number, cells = next(rows, (0, ()))
            values = [cell.value for cell in cells]
        except Exception as error:
            raise _damage(error, "Excel") from error
        if not number:
            return
        while values and values[-1] is None:
            values.pop()
        if not values:
            continue
        if names is None:
            names = values
            if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
                raise ValueError(f"row {number} does not name the columns by different texts: {names!r:.200}")
        elif number > skip:
            wrong = next((cell for cell in cells if cell.data_type == "e"), None)
            problem = "" if wrong is None else f"the cell {wrong.coordinate} has the error {wrong.value}"
            if len(values) > len(names):
                problem = f"{len(values)} cells, expected {len(names)}"
            row = dict(zip(names, values + [None] * (len(names) - len(values))))
            yield _checked(number, row, problem, may)


def _damage(error: Exception, kind: str = "Avro") -> Exception:
    """The error for one of a library, which raises many kinds for damaged bytes; errors of the system stay."""
    is_seek = isinstance(error, OSError) and error.errno == errno.EINVAL  # to a place that damaged bytes name
    if isinstance(error, (OSError, NotInstalled)) and not is_seek:
        return error
    return ValueError(
        f"it is no {kind} file, or is damaged: {type(error).__name__}{f': {error}' if str(error) else ''}"
    )
