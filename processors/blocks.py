"""Text files by blocks: the same rows and the same errors as row by row, at a fraction of the cost. CSV as columns.

JSON lines as columns are in json_columns.py.

    block            about 4 MiB that end with a record; Arrow reads it at once, as text or as the types of ``schema=``
    a block that Arrow must not read alone    quotes: the csv module of Python checks first that each record is one
    a block that cannot be read so            halves, down to the record at fault, which is an error of its own

Arrow and Python agree about records without quotes, and about records whose quotes the strict csv module accepts. For
all else Python decides: a lone CR, the header again, a record that is too long. So which way a block is read changes
nothing but the time.

JSON lines without types, and text, are lists of messages. A block that has a sign of anything unusual is read line by
line.

Texts in a typed column are those of Arrow's CSV reader: numbers, true and false, dates and times in ISO 8601. An empty
cell is null, also in quotes; in a column of text it is the empty text.
"""

from __future__ import annotations

import codecs
import csv
import functools
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Final, NamedTuple

from cues.errors import InvalidArgument
from cues.overrides import override
from cues.processors import columns, files, places

BLOCK_BYTES: Final = 4 << 20
"""Bytes that are read at once. A block is a record of columns on the queue, or a few."""
ROWS_MIN: Final = 500
"""A smaller block of CSV is read row by row, if its cells are text: columns would cost more."""
LINES: Final = 500
"""The most messages of JSON lines or text under one position."""
SAMPLE_BYTES: Final = 1 << 20
"""Bytes of the sample in which types are found."""
INFER: Final = "infer"
"""The types of the columns are found in the first block."""


_OF_COLUMN: Final = re.compile(r"In CSV column #(\d+): (?:Row #\d+: )?CSV conversion error to ")
_NEWLINE: Final = 0x0A
_RETURN: Final = 0x0D


class Block(NamedTuple):
    """Rows of a file as columns, or as a list of messages."""

    rows: Any
    offset: int
    """The bytes of the file up to their end; for a table its rows."""
    line: int
    first_line: int
    """The line of the first row, if each row is one line; 0 if not."""
    records: Callable[[], Iterator[files.Record]]
    """Reads the same rows one by one."""

    def with_place(self, column: str, file: str) -> Any:
        """Return the rows with a column for the place of each: ``file:line``."""
        texts = [f"{file}:{line}" for line in range(self.first_line, self.first_line + len(self.rows))]
        if isinstance(self.rows, list):
            return [row | {column: text} for row, text in zip(self.rows, texts)]
        lines = places.arrow().array(texts)
        table = self.rows
        if column in table.column_names:
            return table.set_column(table.column_names.index(column), column, lines)
        return table.append_column(column, lines)


class Odd(ValueError):
    """Records that Arrow and Python may read differently."""


class Typed:
    """Reads blocks of a file of records as tables; a subclass knows its format."""

    typed: bool
    """True if rows differ from those that ``parse`` makes: other types, or fewer columns."""

    def __init__(self, shape: files.Shape, parse: files.Parser, lines_max: int, chosen: Sequence[str]) -> None:
        """``parse`` reads one row; a record has at most ``lines_max`` lines; a table has the columns ``chosen``."""
        self.pa = places.arrow()
        self.shape, self._parse, self._lines_max = shape, parse, lines_max
        self._is_plain = may_be_columns(chosen)
        self._is_utf8 = codecs.lookup(shape.encoding).name == "utf-8"

    def table(self, data: bytes) -> tuple[Any, int]:
        """Return the records of whole lines, and their number of lines.

        Raises ValueError for what must be read in smaller parts.
        """
        raise NotImplementedError

    def one(self, raw: bytes, row: files.Row) -> Any:
        """Return a record, which ``parse`` has read as ``row``, as a table. Raises ValueError if it does not fit."""
        raise NotImplementedError

    def ends(self, data: bytes, complete: bool) -> list[int]:
        """Return the ends of the records. ``complete``: also of the last one, if it has no line end."""
        raise NotImplementedError

    def complete(self, data: bytes) -> int:
        """Return the length of the records of which ``data`` has all; more bytes follow it."""
        raise NotImplementedError

    def _check_lengths(self, data: bytes) -> None:
        """Raise for a line that is too long."""
        limit, at = self.shape.line_bytes_max, 0
        while len(data) - at > limit:
            at = data.rfind(b"\n", at, at + limit) + 1
            if not at:
                raise Odd("a line that is too long")

    def pieces(self, data: bytes, offset: int, line: int) -> Iterator[Block | files.Record]:
        """Yield the records of whole lines, which begin at ``offset`` after ``line`` lines, as blocks if possible."""
        block = self.block(data, offset, line)
        if block is not None:
            yield from self.worth(block)
        else:
            ends = self.ends(data, True) if self.typed and self._is_plain else []
            if len(ends) > 1:
                middle = ends[len(ends) // 2 - 1]
                yield from self.pieces(data[:middle], offset, line)
                yield from self.pieces(data[middle:], offset + middle, line + data.count(b"\n", 0, middle))
            else:
                yield from self.records(data, offset, line)

    def worth(self, block: Block) -> Iterator[Block | files.Record]:
        """Yield a block, or its records if it is too small."""
        if len(block.rows) < ROWS_MIN and not self.typed:
            yield from block.records()
        elif len(block.rows):
            yield block

    def block(self, data: bytes, offset: int, line: int) -> Block | None:
        """Return the records of whole lines as one block; None if they must be read in smaller parts.

        A reserved column is read row by row, because ``parse`` looks at its values.
        """
        if not self._is_plain or (not offset and data.startswith(codecs.BOM_UTF8)):
            return None
        try:
            table, lines = self.table(data)
        except ValueError:
            return None
        first = line + 1 if lines == table.num_rows else 0
        return Block(table, offset + len(data), line + lines, first, lambda: self.records(data, offset, line))

    def rows(self, file: IO[bytes], offset: int, line: int, complete: bool) -> Iterator[files.Record]:
        """Yield the records from the present place of a file as ``parse`` makes them."""
        return files.records(file, offset, line, self._parse, self.shape, self._lines_max, complete)

    def records(self, data: bytes, offset: int, line: int) -> Iterator[files.Record]:
        """Yield the records of whole lines one by one."""
        before = offset
        for record in self.rows(io.BytesIO(data), offset, line, True):
            if self.typed and record.row is not None:
                raw = data[before - offset : record.offset - offset]
                try:
                    (row,) = columns.rows_of(self.one(raw, record.row).to_batches()[0], "the file")
                    if isinstance(row, ValueError):
                        raise row
                    record = record._replace(row=row)
                except ValueError as error:
                    text = raw.strip(b"\r\n").decode(self.shape.encoding, "backslashreplace")
                    record = record._replace(row=None, problem=str(error), raw=text)
            before = record.offset
            yield record


class Columns(Typed):
    """Reads blocks of one CSV file."""

    def __init__(
        self,
        shape: files.Shape,
        names: Sequence[str],
        parse: files.Parser,
        schema: Any = None,
        keep: Sequence[str] | None = None,
    ) -> None:
        """``parse`` reads one row; ``schema`` has the types of columns that are not text; ``keep``: no others."""
        from pyarrow import csv as arrow_csv

        self._csv: Any = arrow_csv
        self._names = list(names)
        self._chosen = [name for name in self._names if keep is None or name in keep]
        super().__init__(shape, parse, shape.record_lines_max, self._chosen)
        self._delimiter = shape.delimiter.encode(shape.encoding)
        self._quote = (shape.quote or "").encode()
        self._has_header = shape.header is None
        self.typed = schema is not None or keep is not None
        text = self.pa.string()
        types = {} if schema is None else {field.name: field.type for field in schema}
        self._types = {name: types.get(name, text) for name in self._names}
        self._header = shape.delimiter.join(self._names).encode(shape.encoding)

    @override
    def table(self, data: bytes) -> tuple[Any, int]:
        lines, count, has_signs = self._checked(data)
        if not self._is_utf8:
            data = data.decode(self.shape.encoding).encode()
        shape = self.shape
        found = self._read(data, shape.delimiter, *((shape.quote, shape.escape) if has_signs else (None, None)))
        if found.num_rows != (count or lines - _empty_lines(data)):
            raise Odd("another number of records")
        return found, lines

    @override
    def one(self, raw: bytes, row: files.Row) -> Any:
        # The fields that Python has found, in quotes, as Arrow reads them whatever the signs of the file are.
        cells = ('"' + row[name].replace('"', '""') + '"' for name in self._names)
        return self._read((",".join(cells) + "\n").encode(), ",", '"', None)

    def _read(self, data: bytes, delimiter: str, quote: str | None, escape: str | None) -> Any:
        """Return whole records in UTF-8 as a table. Raises ValueError."""
        csv = self._csv
        try:
            return csv.read_csv(
                self.pa.BufferReader(data),
                read_options=csv.ReadOptions(
                    column_names=self._names, block_size=max(len(data) + 1, 1024), use_threads=False
                ),
                parse_options=csv.ParseOptions(
                    delimiter=delimiter,
                    quote_char=quote or False,
                    escape_char=escape or False,
                    newlines_in_values=bool(quote or escape),
                ),
                convert_options=csv.ConvertOptions(
                    column_types=self._types,
                    include_columns=self._chosen,
                    null_values=[""],
                    strings_can_be_null=False,
                    quoted_strings_can_be_null=True,
                ),
            )
        except self.pa.ArrowException as error:
            raise ValueError(self._said(str(error))) from None

    def _said(self, error: str) -> str:
        """The text of an error of Arrow, with the name of the column in place of its number."""
        return _OF_COLUMN.sub(lambda found: f"the column {self._chosen[int(found[1])]!r} is ", error)

    def _checked(self, data: bytes) -> tuple[int, int, bool]:
        """Return the number of lines, that of records or 0 if each line is one, and whether some have quotes.

        Raises for what only Python may read.
        """
        if b"\r" in data and data.count(b"\r") != data.count(b"\r\n"):
            raise Odd("a lone CR")
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        if self.shape.has_signs(data):
            return lines, self._checked_quotes(data), True
        self._check_lengths(data)
        if (
            self._has_header
            and self._header in data
            and any(line.rstrip(b"\r") == self._header for line in data.split(b"\n"))
        ):
            raise Odd("the header again")
        return lines, 0, False

    def _checked_quotes(self, data: bytes) -> int:
        escape = (self.shape.escape or "").encode()
        if escape and escape in data:
            if escape + b"\n" in data or escape + b"\r" in data:
                raise Odd("an escape at the end of a line")
        elif (simple := self._count_simple(data)) is not None:
            return simple
        count = 0
        try:
            text = io.StringIO(data.decode(self.shape.encoding), newline="")
            for row in csv.reader(text, **self.shape.dialect):
                if row:
                    count += 1
                    if len(row) != len(self._names) or (self._has_header and row == self._names):
                        raise Odd("another number of fields, or the header again")
        except csv.Error as error:
            raise Odd(str(error)) from None
        begun = records = 0
        for end in self.ends(data, True):
            if end - begun > self.shape.line_bytes_max:
                raise Odd("a record that is too long")
            records += data[begun:end] not in (b"\n", b"\r\n")
            begun = end
        if records != count:
            raise Odd("a record of too many lines")
        return count

    def _count_simple(self, data: bytes) -> int | None:
        """Return the number of records if each quote begins or ends a field, as programs write them; None if not."""
        if not places.has("numpy"):
            return None
        import numpy

        first = self._names[0].encode(self.shape.encoding)
        quote = self._quote
        if len(self._delimiter) > 1 or (self._has_header and data.startswith((first, quote + first))):
            return None  # the header again?
        signs = numpy.frombuffer(b"\n" + data + b"\n", numpy.uint8)
        quotes = numpy.flatnonzero(signs == quote[0])
        before, after = signs[quotes[0::2] - 1], signs[quotes[1::2] + 1]
        delimiter = self._delimiter[0]
        opens = (before == delimiter) | (before == _NEWLINE)
        closes = (after == delimiter) | (after == _NEWLINE) | (after == _RETURN)
        if len(quotes) % 2 or not (opens.all() and closes.all()):
            return None
        ends = numpy.flatnonzero(signs[1:-1] == _NEWLINE) + 1
        # A search for the header is slow, so first the bytes at the beginnings of lines are looked at.
        heads = signs[ends + 1 + (signs[ends + 1] == quote[0])]
        if self._has_header and (
            not first or ((heads == first[0]).any() and (b"\n" + first in data or b"\n" + quote + first in data))
        ):
            return None
        if (numpy.searchsorted(quotes, ends) % 2).any():
            return None  # a line end in quotes
        last = 0 if not len(ends) else int(ends[-1])
        gaps = numpy.diff(ends, prepend=0)
        if (
            (gaps <= 2).any()
            or (gaps > self.shape.line_bytes_max).any()
            or len(data) - last > self.shape.line_bytes_max
        ):
            return None  # empty lines, or a record that is too long
        return len(ends) + (last < len(data))

    @override
    def ends(self, data: bytes, complete: bool) -> list[int]:
        """Return the ends of the records. A quote that is open for too long ends with its line.

        ``complete``: so does one that is open at the end of ``data``. Otherwise its record is left out, and so is a
        last line without a line end.
        """
        ends: list[int] = []
        shape, size = self.shape, len(data)
        has_quotes = bool(self._quote) and self._quote in data
        begun = 0
        while begun < size:
            first = end = data.find(b"\n", begun) + 1 or size
            inside = has_quotes and shape.ends_inside(data[begun:end], False)
            lines = 1
            while inside and end < size and lines < shape.record_lines_max and end - begun <= shape.line_bytes_max:
                at, end = end, data.find(b"\n", end) + 1 or size
                inside = shape.ends_inside(data[at:end], True)
                lines += 1
            if not complete and end == size and (inside or not data.endswith(b"\n")):
                break
            begun = first if inside else end
            ends.append(begun)
        return ends

    @override
    def complete(self, data: bytes) -> int:
        if not self._quote or self._quote not in data:
            return data.rfind(b"\n") + 1
        return max(self.ends(data, False), default=0)

    def infer(self, data: bytes) -> Any:
        """Return the schema that fits the records of a sample: whole numbers, floats, booleans, dates, times, text.

        A column is typed only if its texts come back equal: whole numbers with zeros before them are text.
        """
        pa = self.pa
        texts = Columns(self.shape, self._names, self._parse)
        try:
            found, _ = texts.table(data)
        except ValueError:  # those that can be read
            rows = [record.row for record in texts.records(data, len(data), 1) if record.row is not None]
            found = pa.table({name: pa.array([row[name] for row in rows], pa.string()) for name in self._names})
        types = {}
        for name, column in zip(found.column_names, found.columns):
            types[name] = self._type_of(pa, column)
        return pa.schema(types)

    def _type_of(self, pa: Any, column: Any) -> Any:
        from pyarrow import compute

        texts = column.filter(compute.binary_length(column).cast(pa.bool_()))  # pa.scalar("") would import pandas
        if not len(texts):
            return pa.string()
        for kind in (pa.int64(), pa.float64(), pa.bool_(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")):
            try:
                self._converted(pa, texts[:100], kind)
                values = self._converted(pa, texts, kind)
            except pa.ArrowException:
                continue
            if pa.types.is_integer(kind) and not values.cast(pa.string()).equals(texts):
                return pa.string()
            if pa.types.is_floating(kind) and compute.any(compute.match_substring_regex(texts, r"^-?0\d")).as_py():
                return pa.string()
            return kind
        return pa.string()

    def _converted(self, pa: Any, texts: Any, kind: Any) -> Any:
        """The texts of a column as the CSV reader converts them."""
        data = "".join(f'"{text}"\n' for text in texts.to_pylist() if '"' not in text)
        read = self._csv.ReadOptions(column_names=["c"], block_size=len(data) + 1024)
        convert = self._csv.ConvertOptions(column_types={"c": kind}, null_values=[])
        return self._csv.read_csv(io.BytesIO(data.encode()), read_options=read, convert_options=convert)["c"]


def _empty_lines(data: bytes) -> int:
    if not (b"\n\n" in data or b"\n\r\n" in data or data.startswith((b"\n", b"\r\n"))):
        return 0
    return sum(not line.rstrip(b"\r") for line in data.split(b"\n")) - data.endswith(b"\n")


class Lines:
    """Reads blocks of JSON lines or of text."""

    def __init__(self, shape: files.Shape, is_json: bool, parse: files.Parser) -> None:
        self.shape, self._is_json, self._parse = shape, is_json, parse
        decoder: Any = json.JSONDecoder(parse_constant=_not_json)
        self._scan = decoder.scan_once

    def block(self, data: bytes, offset: int, line: int) -> Block | None:
        return None

    def worth(self, block: Block) -> Iterator[Block | files.Record]:
        yield block

    def complete(self, data: bytes) -> int:
        return data.rfind(b"\n") + 1

    def rows(self, file: IO[bytes], offset: int, line: int, complete: bool) -> Iterator[files.Record]:
        """Yield the records from the present place of a file as ``parse`` makes them."""
        return files.records(file, offset, line, self._parse, self.shape, 1, complete)

    def pieces(self, data: bytes, offset: int, line: int) -> Iterator[Block | files.Record]:
        """Yield the records of whole lines, which begin at ``offset`` after ``line`` lines, in lists."""
        lines = data.split(b"\n")
        last = lines.pop()
        if last:  # without a line end
            lines.append(last)
        for at in range(0, len(lines), LINES):
            some = lines[at : at + LINES]
            text = b"\n".join(some)
            if not last or at + LINES < len(lines):
                text += b"\n"
            read = functools.partial(self.rows, io.BytesIO(text), offset, line, True)
            rows = self._messages(some) if offset else None  # the first line may begin with a mark
            if rows is None:
                yield from read()
            elif rows:
                first = line + 1 if len(rows) == len(some) else 0
                yield Block(rows, offset + len(text), line + len(some), first, read)
            offset += len(text)
            line += len(some)

    def _messages(self, lines: list[bytes]) -> list[files.Row] | None:
        """Return the messages of some lines; None if one of them needs a look of its own."""
        longest = max(map(len, lines))
        if longest >= self.shape.line_bytes_max:
            return None
        data = b"\n".join(lines)
        try:
            texts = data.decode(self.shape.encoding).split("\n")
        except UnicodeDecodeError:
            return None
        if b"\r" in data:
            texts = [text.rstrip("\r") for text in texts]
        if not self._is_json:
            return [{"line": text} for text in texts if text]
        if any(sign in data for sign in _UNUSUAL) or has_large(data, True):
            return None
        if longest > files.DEPTH_MAX and any(line.count(b"[") + line.count(b"{") > files.DEPTH_MAX for line in lines):
            return None
        rows = []
        for text in texts:
            if text:
                try:
                    row, end = self._scan(text, 0)
                except (ValueError, StopIteration, RecursionError):
                    return None
                if end != len(text) or type(row) is not dict:
                    return None
                rows.append(row)
        return rows


def _not_json(name: str) -> None:
    raise ValueError(name)


_UNUSUAL: Final = (b"\\u", b'"q/', b'"q\\/')
"""Escapes that may be half of a character, and keys that are reserved."""
_AS_ZERO: Final = bytes.maketrans(b"123456789E", b"000000000e")


def has_large(data: bytes, exponents: bool) -> bool:
    """Return whether there may be a number that no float holds: one of 300 digits, or with an exponent of three.

    A search for digits in the translated bytes takes a tenth of the time of a regular expression.
    """
    zeros = data.translate(_AS_ZERO)
    return b"0" * 300 in zeros or (exponents and (b"e000" in zeros or b"e+000" in zeros))


def of_file(
    file: IO[bytes], offset: int, line: int, reader: Typed | Lines, complete: bool
) -> Iterator[Block | files.Record]:
    """Yield the records of a file from its present place, which is at ``offset`` and after ``line`` lines.

    ``complete``: the file does not grow. Otherwise its last record waits, unless it has a line end.
    """
    data = b""
    while True:
        piece = file.read(BLOCK_BYTES)
        data += piece
        end = data.rfind(b"\n") + 1
        if piece and end and (block := reader.block(data[:end], offset, line)) is not None:
            yield from reader.worth(block)  # all that was read up to the line end are whole records
            data, offset, line = data[end:], block.offset, block.line
            continue
        size = len(data) if complete and not piece else reader.complete(data)
        if size:
            whole, data = data[:size], data[size:]
            yield from reader.pieces(whole, offset, line)
            offset += size
            line += whole.count(b"\n") + (not whole.endswith(b"\n"))
        elif len(data) > max(BLOCK_BYTES, reader.shape.line_bytes_max):  # one line, which is too long
            file.seek(offset)
            for record in reader.rows(file, offset, line, complete):
                yield record
                offset, line = record.offset, record.line
                break
            file.seek(offset)
            data = b""
        if not piece:
            return


def checked_schema(given: Any) -> Any:
    """Return ``schema=`` as a pyarrow.Schema, as :data:`INFER`, or None. Raises :class:`InvalidArgument`."""
    if given is None or given == INFER:
        return given
    pa = places.arrow()
    try:
        return given if isinstance(given, pa.Schema) else pa.schema(given)
    except (TypeError, ValueError, KeyError, pa.ArrowException) as error:
        raise InvalidArgument(
            f"schema={given!r:.60}: {error}",
            "give types by column, as {'n': 'int64', 'at': 'timestamp[us]'}; a pyarrow.Schema; or 'infer'.",
        ) from None


def may_be_columns(names: Sequence[str]) -> bool:
    """Return whether rows with these columns need no look at each: none of their names is reserved."""
    return not any(name.startswith("q/") for name in names) and len(set(names)) == len(names)


def check_names(names: Sequence[str], keep: Sequence[str] | None, schema: Any, file: str) -> None:
    """Raise ValueError if a file has not the columns that ``columns=`` or ``schema=`` names."""
    for option, wanted in (("columns", keep or ()), ("schema", () if schema is None else schema.names)):
        missing = [name for name in wanted if name not in names]
        if missing:
            has = ", ".join(map(repr, names))
            raise ValueError(f"{file} has no column {missing[0]!r}, which {option}= names; it has {has}")
