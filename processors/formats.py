"""Formats of files that sinks write: text lines, JSON lines, CSV, Parquet, Arrow IPC.

A file grows while it is open, and a crash may leave more bytes than were committed. So each format has a form that can
be appended to, and cut at the end of any commit; when the file is finished it gets the form that readers see:

    format              while it is open              finished
    text, jsonl, csv    the same lines                the lines, compressed if ``compression=`` says so
    arrow               a stream of record batches    an Arrow IPC file
    parquet             a stream of record batches    a Parquet file

A *layout* is what all rows of one file have in common: the columns of CSV, the schema of a table. It is JSON, and is
kept with the open file and for the next one. A row with new columns begins a new file of CSV. In a table columns are
widened (columns.py): the open file has a stream of batches for each of its schemas, and the finished one the widest.
"""

from __future__ import annotations

import base64
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, time
from decimal import Decimal
from typing import IO, Any, Final, NamedTuple, Protocol
from uuid import UUID

from cues import jsontext
from cues.arguments import text_of, texts_of
from cues.errors import InvalidArgument
from cues.overrides import override
from cues.processors import column_texts, columns, places

Row = dict[str, Any]

FORMATS: Final = ("text", "jsonl", "csv", "parquet", "arrow")


class Added(NamedTuple):
    """The bytes that rows add to the files: ``data`` are bytes for the open file, or with ``new`` for another one."""

    new: bool
    layout: Any
    data: bytes


class Format(Protocol):
    """One format. ``ending`` is that of finished files."""

    ending: str
    is_plain: bool
    """True if a finished file has the bytes of the open one."""

    def add(self, begun: bool, layout: Any, rows: Sequence[Row]) -> Added:
        """Return what a file gets for the rows. Raises ValueError or TypeError for a row that the format cannot hold.

        ``begun``: there is an open file, with this layout. Without one, the layout is that of the last file, or None.
        """

    def add_table(self, begun: bool, layout: Any, table: Any) -> Added:
        """Return what a file gets for the rows of a ``pyarrow.Table``: the same as for its rows as dicts."""

    def finish(self, source: IO[bytes], target: IO[bytes], layout: Any) -> None:
        """Write the finished form of an open file, whose layout is the one of its last rows."""


def make(name: str, compression: str | None, columns: Sequence[str] | None, schema: Any, delimiter: str) -> Format:
    """Return a format by its name. Raises :class:`cues.errors.InvalidArgument` for options that it does not have."""
    if name not in FORMATS:
        raise InvalidArgument(f"The format {name!r} is unknown.", f"use one of {', '.join(FORMATS)}.")
    table = name in ("parquet", "arrow")
    if compression is not None and (compression not in list(places.COMPRESSIONS) or table):
        raise InvalidArgument(
            f"compression={compression!r} cannot be used with the format {name!r}.",
            "leave it out: Parquet files are compressed by themselves." if table else "use gzip, bz2, xz or zstd.",
        )
    for option, value, of in (("columns", columns, name == "csv"), ("schema", schema, table)):
        if value is not None and not of:
            raise InvalidArgument(f"The format {name!r} has no {option}=.", f"leave {option}= out.")
    if table:
        return _Table(name, schema)
    columns = None if columns is None else texts_of("columns", columns)
    if len(text_of("delimiter", delimiter)) != 1 or delimiter in '"\n\r':
        raise InvalidArgument(f"delimiter={delimiter!r:.60}.", "give one sign, neither a quote nor a line end.")
    if compression == "zstd":
        places.arrow()
    return _CSV(compression, columns, delimiter) if name == "csv" else _Lines(name, compression)


class _Plain(ABC):
    """Formats of lines."""

    def __init__(self, name: str, compression: str | None) -> None:
        self.ending = f".{'txt' if name == 'text' else name}{places.COMPRESSIONS[compression] if compression else ''}"
        self.is_plain = compression is None
        self._name, self._compression = name, compression

    @abstractmethod
    def add(self, begun: bool, layout: Any, rows: Sequence[Row]) -> Added:
        """See :class:`Format`."""

    def add_table(self, begun: bool, layout: Any, table: Any) -> Added:
        return self.add(begun, layout, columns.dicts(table, "a message"))

    def finish(self, source: IO[bytes], target: IO[bytes], layout: Any) -> None:
        with places.compressing(target, self._compression) as out:
            while piece := source.read(1 << 20):
                out.write(piece)


class _Lines(_Plain):
    """Text and JSON lines."""

    @override
    def add(self, begun: bool, layout: Any, rows: Sequence[Row]) -> Added:
        lines = "".join(map(self._text if self._name == "text" else _json, rows))
        return Added(not begun, None, lines.encode())

    @override
    def add_table(self, begun: bool, layout: Any, table: Any) -> Added:
        pa = places.arrow()
        if table.num_columns and self._name == "jsonl":
            try:
                batches = table.combine_chunks().to_batches()
                return Added(not begun, None, b"".join(column_texts.joined(self._objects(batch)) for batch in batches))
            except (pa.ArrowException, ValueError, TypeError):  # of a value: the rows say which
                pass
        return super().add_table(begun, layout, table)

    def _objects(self, batch: Any) -> Any:
        """The lines of a batch of rows. Raises ValueError, TypeError or an error of Arrow."""
        parts, before = [], "{"
        for name, values in zip(batch.schema.names, batch.columns):
            texts, quote = _json_texts(name, values)
            parts += [columns.text(f"{before}{jsontext.encode(name)}: {quote}"), texts]
            before = quote + ", "
        parts += [columns.text(before[:-2] + "}\n"), columns.text("")]
        return column_texts.compute().binary_join_element_wise(*parts)

    @staticmethod
    def _text(row: Row) -> str:
        line = row.get("line")
        if not isinstance(line, str) or "\n" in line or "\r" in line:
            raise ValueError(f"a row of text is {{'line': text}} without line ends, not {str(row)[:80]}")
        return line + "\n"


_ESCAPED: Final = b'"\\' + bytes(range(32))
"""The signs of a text that JSON does not have as they are."""
_ESCAPED_PATTERN: Final = r'["\\\x00-\x1f]'


def _json_texts(name: str, values: Any) -> tuple[Any, str]:
    """The values of an array in JSON, and the sign that the caller writes before and after each: a quote, or none."""
    pa = places.arrow()
    kind, compute, quote = values.type, column_texts.compute(), ""
    texts = values.cast(pa.string()) if pa.types.is_boolean(kind) else column_texts.of(values)
    if texts is None:
        return columns.texts(map(jsontext.encode, columns.values_of(pa.chunked_array([values]), "a message", name))), ""
    if pa.types.is_floating(kind):
        if not compute.all(compute.is_finite(values)).as_py():
            raise ValueError("JSON has no such number")
    elif not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        quote = '"'
        if column_texts.has_any(texts, _ESCAPED):
            special = compute.match_substring_regex(texts, _ESCAPED_PATTERN)
            made = columns.texts(map(jsontext.encode, texts.filter(special).to_pylist()))
            texts, quote = compute.replace_with_mask(_between('"', texts), special, made), ""
    if texts.null_count:
        texts, quote = compute.coalesce(_between(quote, texts), columns.text("null")), ""
    return texts, quote


def _between(sign: str, texts: Any) -> Any:
    mark = columns.text(sign)
    return column_texts.compute().binary_join_element_wise(mark, texts, mark, columns.text(""))


class _CSV(_Plain):
    def __init__(self, compression: str | None, columns: Sequence[str] | None, delimiter: str) -> None:
        super().__init__("csv", compression)
        self._columns, self._delimiter = list(columns) if columns is not None else None, delimiter
        self._special = frozenset(f'{delimiter}"\n\r')

    @override
    def add(self, begun: bool, layout: Any, rows: Sequence[Row]) -> Added:
        new = dict.fromkeys(key for row in rows for key in row)
        begins, names = self._names(begun, layout, new)
        lines = [self._line([_cell(name, row.get(name)) for name in names]) for row in rows]
        return Added(begins, names, b"".join([self._line(names)] * begins + lines))

    @override
    def add_table(self, begun: bool, layout: Any, table: Any) -> Added:
        begins, names = self._names(begun, layout, table.column_names)
        try:
            lines = [self._lines(names, batch) for batch in table.combine_chunks().to_batches()]
        except (places.arrow().ArrowException, ValueError, TypeError):  # of a value: the rows say which
            return super().add_table(begun, layout, table)
        return Added(begins, names, b"".join([self._line(names)] * begins + lines))

    def _lines(self, names: list[str], batch: Any) -> bytes:
        """The lines of a batch of rows. Raises ValueError, TypeError or an error of Arrow."""
        compute = column_texts.compute()
        cells = [
            self._texts(name, batch.column(name)) if name in batch.schema.names else columns.text("") for name in names
        ]
        if len(names) == 1:  # an empty line is not a row
            is_empty = compute.equal(cells[0], columns.text(""))
            cells = [compute.if_else(is_empty, columns.text('""'), cells[0])]
        lines = compute.binary_join_element_wise(*cells, columns.text(self._delimiter))
        ended = compute.binary_join_element_wise(lines, columns.text("\n"), columns.text(""))
        return column_texts.joined(ended)

    def _texts(self, name: str, column: Any) -> Any:
        """The cells of a column, as :func:`_cell` and :meth:`_quoted` make them."""
        pa, compute = places.arrow(), column_texts.compute()
        texts = column_texts.of(column)
        if texts is None:
            values = columns.values_of(pa.chunked_array([column]), "a message", name)
            return columns.texts("" if value is None else self._quoted(str(_cell(name, value))) for value in values)
        signs = "".join(sorted(self._special))
        if column_texts.has_any(texts, signs.encode()):
            special = compute.match_substring_regex(texts, f"[{re.escape(signs)}]")
            quoted = _between('"', compute.replace_substring(texts, '"', '""'))
            texts = compute.if_else(special, quoted, texts)
        return compute.coalesce(texts, columns.text(""))

    def _names(self, begun: bool, layout: Any, found: Iterable[str]) -> tuple[bool, list[str]]:
        """Return whether rows with these columns begin a file, and the columns of the file."""
        known = self._columns or layout or []
        new = [key for key in found if key not in known]
        if self._columns is not None and new:
            raise ValueError(f"the row has {sorted(map(str, new))}, which are not among columns={known}")
        # A file more for each new column, with all that were there before: not one for each row of another kind.
        begins = not begun or bool(new)
        names = [*known, *new]
        if not names:
            raise ValueError("the row has no column, so there is no line for it")
        for name in new:
            if not isinstance(name, str) or "\n" in name or "\r" in name:
                raise ValueError(f"the column {name!r} has no name of one line")
        return begins, names

    def _line(self, cells: Sequence[Any]) -> bytes:
        texts = ["" if cell is None else str(cell) for cell in cells]
        if texts == [""]:
            return b'""\n'  # an empty line is not a row
        return (self._delimiter.join(map(self._quoted, texts)) + "\n").encode()

    def _quoted(self, text: str) -> str:
        if self._special.isdisjoint(text):
            return text
        return '"' + text.replace('"', '""') + '"'


class _Table:
    """Parquet and Arrow."""

    is_plain = False

    def __init__(self, name: str, schema: Any) -> None:
        self.ending = f".{name}"
        self._pa: Any = places.arrow()
        self._name, self._schema = name, schema
        if schema is not None and not isinstance(schema, self._pa.Schema):
            raise InvalidArgument(f"schema={schema!r:.60}.", "give a pyarrow.Schema.")
        if schema is not None:
            try:
                self._check(schema)
            except ValueError as error:
                raise InvalidArgument(f"schema=: {error}.", "use other types.") from None

    def add(self, begun: bool, layout: Any, rows: Sequence[Row]) -> Added:
        begun, before, wide = self._begun(begun, layout)
        schema = self._schema if self._schema is not None else widened(before, wide, rows)
        return self._added(begun, before, wide, schema, arrays_of(schema, rows))

    def add_table(self, begun: bool, layout: Any, table: Any) -> Added:
        pa = self._pa
        begun, before, wide = self._begun(begun, layout)
        try:
            found = columns.in_files(table)
            schema = self._schema if self._schema is not None else widened_by(before, wide, found)
            arrays = arrays_of(schema, found)
        except pa.ArrowException:  # a value that does not fit: the rows say which
            return self.add(begun, layout, columns.dicts(table, "a message"))
        return self._added(begun, before, wide, schema, arrays)

    def _begun(self, begun: bool, layout: Any) -> tuple[bool, Any, set[str]]:
        """Return whether a file is open, its schema, and the columns with large integers."""
        before, wide = self._parsed(layout)
        if isinstance(layout, dict) and layout["given"] != (self._schema is not None):
            return False, None, set()  # schema= came or went: rows of both fit in no file
        return begun, before, wide

    def _added(self, begun: bool, before: Any, wide: set[str], schema: Any, arrays: list[Any]) -> Added:
        given = self._schema is not None
        changed = before is None or not schema.equals(before)
        if changed:
            self._check(schema)
        batch = self._pa.RecordBatch.from_arrays(arrays, schema=schema)
        head = schema.serialize().to_pybytes() if changed or not begun else b""
        begins = not begun or (given and changed)
        if not begins and changed:
            head = _END_OF_STREAM + head
        kept = base64.b64encode(schema.serialize().to_pybytes()).decode()
        return Added(
            begins, {"schema": kept, "wide": sorted(wide), "given": given}, head + batch.serialize().to_pybytes()
        )

    def _check(self, schema: Any) -> None:
        """Raise ValueError for a schema that a finished file cannot have."""
        for field in schema:
            if self._pa.types.is_dictionary(field.type):
                raise ValueError(f"the column {field.name!r} is {field.type}; use the type of its values")
        try:
            self._writer(io.BytesIO(), schema).close()
        except self._pa.ArrowException as error:
            raise ValueError(f"a file of the format {self._name!r} cannot have these columns: {error}") from None

    def _writer(self, target: IO[bytes], schema: Any) -> Any:
        if self._name == "arrow":
            return self._pa.ipc.new_file(target, schema)
        import pyarrow.parquet as pq

        return pq.ParquetWriter(target, schema)

    def finish(self, source: IO[bytes], target: IO[bytes], layout: Any) -> None:
        schema, _ = self._parsed(layout)
        with self._writer(target, schema) as writer:
            batches = (self._as(schema, batch) for batch in self._batches(source))
            if self._name == "arrow":
                for batch in batches:
                    writer.write_batch(batch)
                return
            # Row groups of a useful size, whatever the size of the commits.
            for group in _grouped(batches):
                writer.write_table(self._pa.Table.from_batches(group, schema))

    def _batches(self, source: IO[bytes]) -> Iterator[Any]:
        """Yield the batches of an open file: a stream for each widening of its columns."""
        while head := source.read(1):
            source.seek(-len(head), io.SEEK_CUR)
            with self._pa.ipc.open_stream(source) as reader:
                yield from reader

    def _as(self, schema: Any, batch: Any) -> Any:
        """Return a batch with the columns of a wider schema."""
        if batch.schema.equals(schema):
            return batch
        values = [batch.column(field.name) if field.name in batch.schema.names else None for field in schema]
        arrays = [
            self._pa.nulls(batch.num_rows, field.type)
            if column is None
            else column
            if column.type.equals(field.type)
            else exactly(column, field.type)
            if _is_number(column.type) and _is_number(field.type)
            else self._pa.array([*map(columns.fitting(field, field.name), column.to_pylist())], field.type)
            for field, column in zip(schema, values, strict=True)
        ]
        return self._pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _parsed(self, layout: Any) -> tuple[Any, set[str]]:
        """The schema and the columns with large integers; an earlier version noted the schema alone."""
        if layout is None:
            return None, set()
        text, wide = (layout["schema"], layout["wide"]) if isinstance(layout, dict) else (layout, [columns.ANY_WIDE])
        return self._pa.ipc.read_schema(self._pa.py_buffer(base64.b64decode(text))), set(wide)


def arrays_of(schema: Any, rows: Any) -> list[Any]:
    """Return the columns of rows, or of a table without types that files lack, exactly as the fields of a schema.

    Raises ValueError, or for a table an error of Arrow, if a value does not fit, or the rows have another column.
    """
    names = rows.column_names if hasattr(rows, "column_names") else (key for row in rows for key in row)
    unknown = next((name for name in names if schema.get_field_index(name) < 0), None)
    if unknown is not None:
        raise ValueError(f"the row has {unknown!r}, which is not in schema=: {', '.join(schema.names)}")
    return [(_column if hasattr(rows, "column_names") else _array)(field, rows) for field in schema]


def _column(field: Any, table: Any) -> Any:
    """The values of a column, exactly as the type of a field. Raises an error of Arrow or ValueError."""
    if field.name not in table.column_names:
        values = places.arrow().nulls(table.num_rows, field.type)
    else:
        values = table.column(field.name).combine_chunks()
        values = values if values.type.equals(field.type) else exactly(values, field.type)
    if not field.nullable and values.null_count:
        raise ValueError(f"the column {field.name!r} is None or missing, and the schema says that it is never null")
    return values


def _array(field: Any, rows: Sequence[Row]) -> Any:
    name, fitted = field.name, columns.fitting(field, field.name)
    values = [fitted(row.get(name)) for row in rows]
    pa = places.arrow()
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the column {field.name!r} is {field.type}, and does not take the row: {error}") from None


def widened(before: Any, wide: set[str], rows: Sequence[Row]) -> Any:
    """Return the schema for the rows before and these; see :func:`cues.processors.columns.widened`."""
    pa = places.arrow()
    types = {} if before is None else {field.name: field.type for field in before}
    for row in rows:
        if not row:
            raise ValueError("the row has no column, and a table has no row without one")
        for name, value in row.items():
            if not isinstance(name, str):
                raise ValueError(f"the row has the key {name!r}, and the columns of a table are named by text")
            known = types.get(name, pa.null())
            types[name] = columns.widened(known, columns.type_of(value, name, wide), name, wide)
    return pa.schema(types)


def widened_by(before: Any, wide: set[str], table: Any) -> Any:
    """Return the schema for the rows before and those of a table."""
    pa = places.arrow()
    types = {} if before is None else {field.name: field.type for field in before}
    if not table.num_columns:
        raise ValueError("the row has no column, and a table has no row without one")
    for name, column in zip(table.column_names, table.columns):
        columns.note_wide(column, name, wide)
        types[name] = columns.widened(types.get(name, pa.null()), column.type, name, wide)
    return pa.schema(types)


_END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"

_GROUP_ROWS: Final = 1_000_000
_GROUP_BYTES: Final = 64 << 20
"""A row group of a Parquet file has at least so many rows or bytes. They are in memory when the file is finished.

Each group has dictionaries of its own: with 100,000 rows a file was a fourth larger, and took a third more CPU.
"""


def _grouped(batches: Iterable[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    rows = size = 0
    for batch in batches:
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def exactly(column: Any, kind: Any) -> Any:
    """Return an array as another type with the same values. Raises an error of Arrow for one that does not fit.

    Also for a type of another kind, such as texts for integers: what rows do with such a value is up to
    :func:`cues.processors.columns.fitted`.
    """
    pa = places.arrow()
    if not _is_of_kind(column.type, kind):
        raise pa.ArrowInvalid(f"{column.type} is not of the kind of {kind}")
    cast = column.cast(kind)
    if pa.types.is_floating(column.type) and not cast.cast(column.type).equals(column):
        raise pa.ArrowInvalid(f"a value is not exact as {kind}")
    return cast


_KINDS: Final = (
    "boolean", "integer floating", "decimal", "string large_string", "binary large_binary fixed_size_binary",
    "timestamp", "date", "time", "duration", "list large_list fixed_size_list", "struct",
)  # fmt: skip
"""Types of Arrow, as ``pyarrow.types`` tests them: a cast within one of these lines makes no other value."""


def _is_of_kind(old: Any, new: Any) -> bool:
    types = places.arrow().types
    if old.equals(new) or types.is_null(old) or (types.is_decimal(new) and _is_number(old)):
        return True
    kinds = [[line for line in _KINDS if any(getattr(types, f"is_{name}")(kind) for name in line.split())]
             for kind in (old, new)]  # fmt: skip
    if not kinds[0] or kinds[0] != kinds[1]:
        return False
    if types.is_timestamp(old):
        return (old.tz is None) == (new.tz is None)
    if types.is_struct(old):
        places_of = [new.get_field_index(field.name) for field in old]
        return -1 not in places_of and all(_is_of_kind(f.type, new.field(at).type) for f, at in zip(old, places_of))
    return "list" not in kinds[0][0] or _is_of_kind(old.value_type, new.value_type)


def _is_number(kind: Any) -> bool:
    types = places.arrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _json(row: Row) -> str:
    try:
        return jsontext.encode(row) + "\n"
    except (ValueError, TypeError) as error:
        for name, value in row.items():  # the error of one column has its name
            try:
                jsontext.encode(value)
            except (ValueError, TypeError) as own:
                raise type(own)(f"the column {name!r}: {own}") from None
        raise error from None


def _cell(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, bool, Decimal)):
        return value
    if isinstance(value, (date, time, UUID)):
        try:
            return jsontext.text_of(value)
        except ValueError as error:
            raise ValueError(f"the column {name!r}: {error}") from None
    raise ValueError(f"the column {name!r} has a {type(value).__name__}, expected text, a number, a date or None")
