"""Records of columns: messages that came as a table, and stay one.

    body of a record flagged COLUMNS        up to 65,535 rows; row i is the message with the record's index + i

    offset  bytes
    0       8       hash of the schema: xxh3-64 of its bytes, which the log keeps once (log.py)
    8       4       length of the provenance, p; 0 without the flag PROVENANCE
    12      p       provenance, in the same form as in a header; it does not fit there for 65,535 rows
    12 + p  rest    Arrow IPC without its schema: the record batch, before it the dictionaries of columns that have some

The body is cut into pieces as that of a long message is. Buffers are compressed as the queue's option says.

A reader of messages gets dicts (:func:`rows`), a reader of tables gets the record batch without making any
(:func:`opened`). So a table may have only what a message may have: :func:`checked` refuses a column that no message
can have as a field, and a value that Python does not have, before anything is written. pyarrow is imported at the first
record of columns.
"""

from __future__ import annotations

import importlib.util
import struct
from array import array
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

import xxhash

from cues.base import logs, names
from cues.buffers import numbers_of
from cues.errors import InvalidArgument, MessageTooLarge, NotInstalled, ReservedKey

ROWS_MAX: Final = 0xFFFF
BYTES_AIM: Final = 4 << 20
"""The bytes of columns that a record has at most, if it has several rows: a reader of one row decodes all of them."""
_DICTIONARY_BYTES_MAX: Final = 64 << 10
"""The largest dictionary of a column that its records repeat; a column with a larger one is stored as its values."""
_UNCOMPRESSED: Final = 2_048
"""Smaller records are not compressed: each buffer would grow by a length, and still take one page."""
COMPRESSIONS: Final = ("lz4", "zstd")

_HEAD: Final = struct.Struct(">8sI")
_END_BYTES: Final = 8
"""The end of a stream of Arrow, which a record does not keep."""
_log = logs.logger("cues.records")


def arrow() -> Any:
    """Return pyarrow. Raises :class:`NotInstalled`."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
    except ImportError:
        raise NotInstalled(
            "Tables need the package pyarrow, which is not installed.", "pip install 'cues-streams[files]'."
        ) from None
    return pyarrow


class StoredSchema:
    """A schema as a log keeps it: its bytes, and their hash, with which a record names it."""

    __slots__ = ("arrow", "hash", "packed", "plain")

    def __init__(self, packed: bytes) -> None:
        """``packed``: the IPC message of the schema."""
        pa = arrow()
        self.packed = packed
        self.hash: bytes = xxhash.xxh3_64_digest(packed)
        self.arrow = pa.ipc.read_schema(pa.py_buffer(packed))
        self.plain = not any(map(_has_dictionary, (field.type for field in self.arrow)))
        """True if the IPC of a record has one message. Columns with dictionaries have more."""


@lru_cache(256)
def stored_schema(packed: bytes) -> StoredSchema:
    return StoredSchema(packed)


def _has_dictionary(kind: Any) -> bool:
    if arrow().types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(at).type) for at in range(kind.num_fields))


# --- writing --------------------------------------------------------------------------------------


def table_of(value: Any) -> Any:
    """Return a ``pyarrow.Table`` made from an object with the Arrow C stream interface (pyarrow, polars, pandas, …).

    The index of a pandas frame is not a column. Raises :class:`InvalidArgument`.
    """
    pa = arrow()
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    if type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns"):
        return pa.Table.from_pandas(value, preserve_index=False)
    if hasattr(value, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(value).read_all()
    raise InvalidArgument(
        f"A table is needed, found {type(value).__name__}.",
        "pass a table of pyarrow, polars or pandas, or another object with __arrow_c_stream__.",
    )


def checked(table: Any) -> Any:
    """Return the table if each row of it can be read as a message; else raise.

    Raises :class:`InvalidArgument` (a type or a value that no message has, two columns of one name) or
    :class:`ReservedKey`; the attribute ``offset`` is the row, where there is one.
    """
    for at, name in enumerate(table.schema.names):
        if name in table.schema.names[:at]:
            raise InvalidArgument(
                f"The table has two columns {name!r}; a message has one field of a name.", "rename one of them."
            )
        if name.startswith("q/") and name not in names.USER_KEYS:
            raise ReservedKey(
                f"The column {name!r} is reserved: of the names that begin with 'q/', users may write only q/type and"
                " q/topics.",
                f"use another name, such as {name[2:]!r}.",
                key=name,
            )
        check_type(table.schema.field(at).type, name)
        _check_values(table.column(at), name)
    return table


def check_type(kind: Any, path: str) -> None:
    """Raise :class:`InvalidArgument` if no message has values of an Arrow type."""
    pa = arrow()
    test = next((each for each in _TYPES if getattr(pa.types, f"is_{each}", _never)(kind)), None)
    if isinstance(kind, pa.BaseExtensionType):
        test = None if str(kind.extension_name) not in _EXTENSIONS else "extension"
    if test is None:
        raise InvalidArgument(
            f"The column {path!r} is {kind}, and a message has no such values.", "cast the column to another type."
        )
    seen: set[str] = set()
    for at in range(kind.num_fields):
        field = kind.field(at)
        if test == "struct" and field.name in seen:
            raise InvalidArgument(
                f"The column {path!r} has two fields {field.name!r}; a dict has one of a name.", "rename one of them."
            )
        seen.add(field.name)
        check_type(field.type, f"{path}.{field.name}" if test == "struct" else f"{path}[]")
    if test == "dictionary":
        check_type(kind.value_type, path)


def _never(kind: Any) -> bool:
    return False


_TYPES: Final = (
    "null", "boolean", "integer", "floating", "decimal", "string", "large_string", "string_view", "binary",
    "large_binary", "binary_view", "fixed_size_binary", "date", "time", "timestamp", "duration", "list", "large_list",
    "fixed_size_list", "list_view", "large_list_view", "struct", "map", "dictionary", "run_end_encoded",
)  # fmt: skip
"""The kinds of Arrow types whose values a message may have, as ``pyarrow.types`` tests them."""
_EXTENSIONS: Final = ("arrow.uuid", "arrow.json", "arrow.bool8")
"""The extension types of Arrow whose values a message may have."""

_DAY_US: Final = 86_400_000_000
_FIRST_US: Final = -62_135_596_800_000_000
_LAST_US: Final = 253_402_300_799_999_999
_SPAN_DAYS: Final = 999_999_999
_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _check_values(column: Any, path: str) -> None:
    """Refuse dates and times beyond the years 1 to 9999 of Python, also inside of lists and structs."""
    pa = arrow()
    kind = column.type
    for chunk in column.chunks if hasattr(column, "chunks") else (column,):
        if kind.num_fields or pa.types.is_dictionary(kind):
            for inner in _children(pa, chunk):
                _check_values(inner, path)
            continue
        limits = _limits(pa, kind)
        if limits is None or len(chunk) == chunk.null_count:
            continue
        bits = pa.int32() if kind.bit_width == 32 else pa.int64()
        numbers = chunk.view(bits)
        found = pa.compute.min_max(numbers).as_py()
        low, high, step = limits
        if found["min"] < low or found["max"] > high or not _has_local(pa, kind, found):
            raise InvalidArgument(
                f"The column {path!r} is {kind} and has a value that Python does not have: its dates and times are of"
                " the years 1 to 9999.",
                "replace such values by null, or cast the column to int64.",
            )
        if step > 1:
            zero, days = integers((0, step), bits)
            rests = pa.compute.subtract(numbers, pa.compute.multiply(pa.compute.divide(numbers, days), days))
            if pa.compute.any(pa.compute.not_equal(rests, zero)).as_py():
                raise InvalidArgument(
                    f"The column {path!r} is {kind} and has a value that is not a whole day.",
                    "cast the column to timestamp('ms').",
                )


def _children(pa: Any, array: Any) -> Iterator[Any]:
    """The arrays inside of a nested one: only the values that it uses, except for run-end encoding."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        yield decoded(array)
    elif pa.types.is_struct(kind):
        yield from array.flatten()
    elif pa.types.is_map(kind):
        entries = array.offsets
        low, high = entries[0].as_py(), entries[len(entries) - 1].as_py()
        yield array.keys.slice(low, high - low)
        yield array.items.slice(low, high - low)
    elif pa.types.is_run_end_encoded(kind):
        yield array.values
    else:
        yield array.flatten()


def _limits(pa: Any, kind: Any) -> tuple[int, int, int] | None:
    """The smallest and the largest number that Python's dates, times and spans have, and the step between two."""
    if pa.types.is_date32(kind):
        return _FIRST_US // _DAY_US, _LAST_US // _DAY_US, 1
    if pa.types.is_date64(kind):
        return _FIRST_US // 1000, _LAST_US // 1000, 86_400_000
    if pa.types.is_timestamp(kind):
        scale = _PER_SECOND[kind.unit]
        return _FIRST_US // 10**6 * scale, (_LAST_US // 10**6 + 1) * scale - 1, 1
    if pa.types.is_duration(kind):
        scale = _PER_SECOND[kind.unit]
        return max(-(1 << 63), -_SPAN_DAYS * 86_400 * scale), min((1 << 63) - 1, _SPAN_DAYS * 86_400 * scale), 1
    return None


def _has_local(pa: Any, kind: Any, ends: dict[str, int]) -> bool:
    """Return whether the smallest and the largest number, which are in the limits, have a local time of Python too."""
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        return True
    low, high, _ = _limits(pa, kind) or (0, 0, 1)
    day = 86_400 * _PER_SECOND[kind.unit]
    if low + day <= ends["min"] and ends["max"] <= high - day:
        return True
    try:
        integers(ends.values()).view(kind).to_pylist()
    except (OverflowError, ValueError):
        return False
    return True


def cut(table: Any, limit_bytes: int) -> Iterator[Any]:
    """Yield the record batches of the records of a table. Raises :class:`MessageTooLarge`, with the row as ``offset``.

    ``limit_bytes`` is the limit of a message (``max_message_bytes``): here of the columns of one row.
    """
    start, count = 0, table.num_rows
    while start < count:
        size = min(ROWS_MAX, count - start)
        piece = table.slice(start, size)
        while size > 1 and piece.nbytes > BYTES_AIM:
            size = max(1, min(size // 2, size * BYTES_AIM // piece.nbytes))
            piece = piece.slice(0, size)
        if piece.nbytes > limit_bytes:
            _check_rows(piece, start, limit_bytes)
        yield _one_batch(piece)
        start += size


def taken(table: Any, offsets: list[int]) -> Any:
    """Return the rows at these offsets. pyarrow's ``take`` does not know all types (views of texts, as polars has)."""
    pa = arrow()
    indices, columns = integers(offsets), []
    for column in table.columns:
        try:
            kind = _without_views(column.type)
            columns.append(column.cast(kind).take(indices).cast(column.type))
        except pa.ArrowNotImplementedError:
            whole = column.combine_chunks()
            whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
            columns.append(pa.concat_arrays([whole.slice(offset, 1) for offset in offsets]))
    return pa.Table.from_arrays(columns, schema=table.schema)


def decoded(array: Any) -> Any:
    """Return the values of an array with a dictionary. pyarrow does not decode views of texts (Categorical of polars).

    Such values are returned as large texts.
    """
    pa = arrow()
    kind = array.type.value_type
    if _without_views(kind) != kind:
        words = array.dictionary.cast(_without_views(kind))
        array = pa.DictionaryArray.from_arrays(array.indices, words)
    return array.dictionary_decode()


def _without_views(kind: Any) -> Any:
    pa = arrow()
    return {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(kind, kind)


def with_small_dictionaries(table: Any) -> Any:
    """Return the table with columns of values in place of columns with a large dictionary.

    A slice of a column has its whole dictionary, so each record would have it.
    """
    types = arrow().types
    for at, field in enumerate(table.schema):
        column = table.column(at)
        if types.is_dictionary(field.type) and any(
            chunk.dictionary.nbytes > _DICTIONARY_BYTES_MAX for chunk in column.chunks
        ):
            table = table.set_column(at, field.name, arrow().chunked_array(map(decoded, column.chunks)))
    return table


def _check_rows(piece: Any, start: int, limit_bytes: int) -> None:
    """Refuse a row beyond the limit: by halves, so that few slices are measured."""
    if piece.nbytes <= limit_bytes:
        return
    if piece.num_rows == 1:
        error = MessageTooLarge(
            f"A row has {piece.nbytes:,} bytes; the queue takes messages of up to {limit_bytes:,}.",
            "raise max_message_bytes of the queue, or store a reference instead of the content.",
            size=piece.nbytes,
            limit=limit_bytes,
        )
        error.__dict__["offset"] = start
        raise error
    half = piece.num_rows // 2
    _check_rows(piece.slice(0, half), start, limit_bytes)
    _check_rows(piece.slice(half), start + half, limit_bytes)


def _one_batch(piece: Any) -> Any:
    """The rows of a table as one record batch."""
    pa = arrow()
    if not piece.num_columns:
        return empty_rows(piece.num_rows)
    batches = piece.combine_chunks().to_batches()
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def empty_rows(count: int) -> Any:
    """Return a record batch with this number of rows and no column."""
    pa = arrow()
    return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))


def packed_schema(schema: Any) -> StoredSchema:
    """Return a schema as a log keeps it."""
    return stored_schema(schema.serialize().to_pybytes())


def body_of(rows: Any, schema: StoredSchema, provenance: bytes, compression: str | None) -> bytes:
    """Return the body of a record: of a record batch of this schema, and packed provenance."""
    pa = arrow()
    head = _HEAD.pack(schema.hash, len(provenance)) + provenance
    if compression is None or rows.nbytes < _UNCOMPRESSED:
        if schema.plain:
            return head + rows.serialize().to_pybytes()  # type: ignore[no-any-return]
        compression = None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema.arrow, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(rows)
    return head + memoryview(sink.getvalue())[len(schema.packed) : -_END_BYTES]


# --- reading --------------------------------------------------------------------------------------


def schema_hash(body: bytes) -> bytes:
    """Return the hash of the schema of a record, of the beginning of its body."""
    return body[:8]


def provenance_of(body: bytes) -> bytes:
    """Return the packed provenance in the body of a record; empty without one."""
    _, size = _HEAD.unpack_from(body)
    return body[_HEAD.size : _HEAD.size + size]


def opened(body: bytes, schema: StoredSchema) -> Any:
    """Return the record batch of an intact body: a view of these bytes where they are not compressed."""
    pa = arrow()
    _, size = _HEAD.unpack_from(body)
    # Copied, because buffers of Arrow begin at multiples of eight bytes.
    ipc = pa.py_buffer(bytes(memoryview(body)[_HEAD.size + size :]))
    try:
        if schema.plain:
            found = pa.ipc.read_record_batch(ipc, schema.arrow)
        else:
            with pa.ipc.open_stream(pa.py_buffer(schema.packed + ipc)) as reader:
                found = reader.read_next_batch()
    except (OSError, EOFError, StopIteration) as error:  # no file was read: it is about these bytes
        raise ValueError(str(error) or "it has no record batch") from None
    found.validate()  # that buffers are long enough; rows() looks at all values
    return found


def rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a record batch as new dicts, whose keys are the columns in their order."""
    if not batch.num_columns:
        return [{} for _ in range(batch.num_rows)]
    columns = [values(column, name) for name, column in zip(batch.schema.names, batch.columns)]
    return [dict(zip(batch.schema.names, row)) for row in zip(*columns)]


def values(column: Any, name: str) -> list[Any]:
    """Return the values of an Arrow array as a message has them: those of ``to_pylist``.

    Python's times have microseconds: nanoseconds are cut, and the log says so once a column.
    """
    if (numbers := numbers_of(column)) is not None:
        return numbers
    kind, types = column.type, arrow().types
    if _has_nanoseconds(kind):
        return _cut(column, name) if not kind.num_fields else _nested(column, name)
    if not column.null_count and types.is_timestamp(kind) and kind.unit == "us" and kind.tz is None and has_numpy():
        return column.to_numpy(zero_copy_only=False).tolist()  # type: ignore[no-any-return]
    return column.to_pylist()  # type: ignore[no-any-return]


def integers(given: Iterable[int], kind: Any = None) -> Any:
    """Return whole numbers as an Arrow array of int64, or of another type with 64 or 32 bits.

    ``pa.array`` and ``pa.scalar`` convert values of Python, and import pandas for that if it is installed.
    """
    pa = arrow()
    kind = kind or pa.int64()
    data = array("q" if kind.bit_width == 64 else "i", given)
    return pa.Array.from_buffers(kind, len(data), [None, pa.py_buffer(data)])


@lru_cache(1)
def has_numpy() -> bool:
    """Return whether numpy is installed. pyarrow does not need it, but reads values faster with it."""
    return importlib.util.find_spec("numpy") is not None


def _has_nanoseconds(kind: Any) -> bool:
    if arrow().types.is_dictionary(kind):
        return _has_nanoseconds(kind.value_type)
    if not kind.num_fields:
        return str(getattr(kind, "unit", "")) == "ns"
    return any(_has_nanoseconds(kind.field(at).type) for at in range(kind.num_fields))


def _cut(column: Any, name: str) -> list[Any]:
    """The values of an array of nanoseconds, or of a dictionary of some."""
    pa = arrow()
    kind = column.type
    if pa.types.is_dictionary(kind):
        known = values(column.dictionary, name)
        return [None if at is None else known[at] for at in column.indices.to_pylist()]
    short = pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else pa.duration("us")
    shorter = column.cast(pa.time64("us") if pa.types.is_time(kind) else short, safe=False)
    if not shorter.cast(kind, safe=False).equals(column):
        _say_cut(name, str(kind))
    return values(shorter, name)


@lru_cache(1_000)  # once a column
def _say_cut(name: str, kind: str) -> None:
    _log.warning("the column %r is %s; its nanoseconds are cut to microseconds in messages", name, kind)


def _nested(column: Any, name: str) -> list[Any]:
    """The values of lists, maps and structs with nanoseconds inside."""
    pa = arrow()
    kind, valid = column.type, column.is_valid().to_pylist()
    if pa.types.is_run_end_encoded(kind):
        return values(pa.compute.run_end_decode(column), name)
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        fields = zip(*(values(field, name) for field in column.flatten()))
        return [dict(zip(names, row)) if there else None for row, there in zip(fields, valid)]
    if pa.types.is_map(kind):
        edges = column.offsets.to_pylist()
        items = list(zip(values(column.keys, name), values(column.items, name)))
        return [items[low:high] if there else None for low, high, there in zip(edges, edges[1:], valid)]
    inner, at = values(column.flatten(), name), 0  # without those of lists that are null
    lists: list[Any] = []
    for there, size in zip(valid, pa.compute.list_value_length(column).to_pylist()):
        lists.append(inner[at : at + size] if there else None)
        at += size if there else 0
    return lists
