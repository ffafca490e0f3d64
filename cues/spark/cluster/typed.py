"""Typed columns of a queue: fields of its messages beside the packed message.

With them a reader of the table can leave out columns, files and row groups.

The table has its typed columns in its log (directory.py); ``schema=`` of the queue adds to them. A new data file has
all of them. A file from before a column was added does not have it; a merge gives it the column.

Rows that are written as tables give the table their columns too, if the queue has no ``schema=``. Their typed columns
are made of the columns of the rows, without a message. A file that says so has the whole of each message in its typed
columns, and a function of tables is given these (:data:`ROWS`). If the table says so too, such a row has no packed
message: its column ``value`` is NULL, and the message is packed when it is read (:func:`with_values`). The metadata of
the table says so before the first such file is written, in a way that an earlier version refuses (directory.py).

A packed message is the truth. A value that does not fit its column is NULL there, as by the option ``fields`` of the
format ``cues`` (:mod:`cues.spark.columns`), and the message is not changed, delayed or refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cues import codec
from cues.base.data import dataclass
from cues.errors import QueueOptionsError
from cues.overrides import override
from cues.records import columns
from cues.records.packed import packed_arrays, unpacked
from cues.records.schema import of_table, parse, shown

OWN: Final = frozenset(
    {"partition", "first", "index", "offset", "time", "hash", "value", "provenance", "meta"},
)
"""Columns of every queue. The column of a field of such a name has an underscore after it."""
FIELD: Final = "cues.field"
"""Metadata of a typed column in the log: the name of its field."""
ROWS: Final = b"cues.rows"
"""Metadata of a data file whose typed columns have the whole of each message: the names of the fields, in JSON."""
FIELDS: Final = b"cues.fields"
"""Metadata of a data file some of whose messages are only in its typed columns: the same names, of these messages."""
_EXACT: Final = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "float", "double", "string", "binary", "date32[day]"}
    | {"timestamp[us, tz=UTC]"}
)
"""Types whose values are those of the typed column."""
_PLAIN: Final = {
    "large_string": pa.string(), "string_view": pa.string(), "large_binary": pa.binary(), "binary_view": pa.binary()
}  # fmt: skip


@dataclass(frozen=True)
class TypedColumns:
    """The typed columns of one queue. It travels to executors."""

    fields: tuple[tuple[str, str], ...] = ()
    """Names and types of the fields (:mod:`cues.records.schema`), in the order of the columns."""
    bare: bool = False
    """True if a row that has its whole message in these columns is stored without the packed message."""

    def __bool__(self) -> bool:
        return bool(self.fields)

    @staticmethod
    def of_log(fields: Sequence[Mapping[str, Any]], bare: bool = False) -> TypedColumns:
        """The typed columns among the fields of a table's schema."""
        named = [(field.get("metadata", {}).get(FIELD), field["type"]) for field in fields]
        return TypedColumns(tuple((name, shown(kind)) for name, kind in named if name is not None), bare)

    def to_log(self) -> list[dict[str, Any]]:
        """The columns as fields of a table's schema."""
        return [
            {"name": column_of(name), "type": parse(kind), "nullable": True, "metadata": {FIELD: name}}
            for name, kind in self.fields
        ]

    def plus(self, schema: Sequence[tuple[str, str]], queue: str, url: str) -> TypedColumns:
        """These columns, and those of a schema. Raises :class:`QueueOptionsError` if a field has another type now."""
        known = {column_of(name).lower(): (name, kind) for name, kind in self.fields}
        for name, kind in schema:
            other, before = known.setdefault(column_of(name).lower(), (name, kind))
            what, hint = "", ""
            if other != name:
                what = f"of the field {other!r}; schema= has a field {name!r}"
                hint = "leave the field out of schema=; it stays in the message."
            elif before != kind:
                what = f"{before}, and schema= says {kind}"
                hint = f"give the field the type {before} in schema=, or leave it out; or start over with --fresh."
            if what:
                message = (
                    f"The table of the queue {queue!r} in {url} has a column {column_of(other)!r}, which is {what}."
                )
                raise QueueOptionsError(message, hint, queue=queue, option="schema")
        return TypedColumns(tuple(known.values()), self.bare)

    def column(self, field: str) -> str | None:
        """The column of a field; None if it has none."""
        return next((column_of(name) for name, _ in self.fields if name == field), None)

    def unknown(self, schema: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """The fields of a schema whose column this table does not have; of several with one column the first."""
        new: dict[str, tuple[str, str]] = {}
        for name, kind in schema:
            new.setdefault(column_of(name).lower(), (name, kind))
        known = {column_of(name).lower() for name, _ in self.fields}
        return [each for column, each in new.items() if column not in known]

    @property
    def scalars(self) -> list[str]:
        """The columns with statistics in the files."""
        return [column_of(name) for name, kind in self.fields if "<" not in kind]

    @property
    def texts(self) -> list[str]:
        """The columns that are written as dictionaries: a number is as fast without."""
        return [column_of(name) for name, kind in self.fields if kind in ("string", "binary")]

    @functools.cached_property
    def schema(self) -> pa.Schema:
        return pa.schema([(column_of(column.name), column.type) for column in self.columns])

    @functools.cached_property
    def columns(self) -> list[Any]:
        from pyspark.sql import types as T

        from cues.spark.columns import Column

        types = [{"name": n, "type": parse(kind), "nullable": True, "metadata": {}} for n, kind in self.fields]
        return [Column(T.StructField.fromJson(field), strict=False) for field in types]

    def arrays(self, values: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
        """The columns of packed messages."""
        if not self.fields:
            return []
        messages = unpacked(values, codec.unpack_known)
        return [column.array(messages, lambda offset: offset) for column in self.columns]

    def arrays_of(self, rows: pa.Table) -> list[pa.Array] | None:
        """The columns of a table of messages; None if a value has to be converted on its own."""
        arrays = []
        types = dict(fields_of(rows.schema))
        for (name, kind), column in zip(self.fields, self.schema):
            if name not in rows.column_names or _plain(rows.schema.field(name).type) == pa.null():
                arrays.append(pa.nulls(rows.num_rows, column.type))
            elif types.get(name) == kind:
                arrays.append(_cast(rows.column(name), column.type))
            else:
                return None
        return arrays

    def whole(self, schema: pa.Schema) -> list[str] | None:
        """The names of the fields of a table, if these columns have all of them; else None."""
        types = dict(fields_of(schema))
        known = dict(self.fields)
        names = {column_of(name).lower() for name in schema.names}
        if len(names) < len(schema.names) or any(name.startswith("q/") for name in names):
            return None
        whole = all(_plain(f.type) == pa.null() or types.get(f.name, "") == known.get(f.name) for f in schema)
        return list(schema.names) if whole and schema.names else None

    @override
    def __getstate__(self) -> Any:
        return {"fields": self.fields, "bare": self.bare}


NONE: Final = TypedColumns()


def fields_of(schema: pa.Schema) -> tuple[tuple[str, str], ...]:
    """The fields of a table that have a typed column with the same values."""
    exact = [field.with_type(_plain(field.type)) for field in schema if _is_exact(_plain(field.type))]
    return of_table(pa.schema([field for field in exact if not field.name.startswith("q/")]))


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type without dictionaries, views and large offsets, which have the same values."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    return _PLAIN.get(str(kind), kind)


def _is_exact(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _is_exact(kind.value_type)
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_is_exact(field.type) for field in kind)
    return str(kind) in _EXACT or pa.types.is_decimal128(kind)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = pa.chunked_array(list(map(columns.decoded, column.chunks)))
    whole = column.cast(kind)
    if whole.num_chunks == 1:
        return whole.chunk(0)  # combine_chunks copies it
    whole = whole.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def rows_of(stored: pa.Table) -> pa.Table | None:
    """The rows of a data file, which was read with its metadata, as a table; None if it has only packed messages."""
    names = (stored.schema.metadata or {}).get(ROWS)
    if names is None:
        return None
    have = set(stored.column_names)
    found = {n: stored.column(column_of(n)) if column_of(n) in have else None for n in json.loads(names)}
    return pa.table({n: pa.nulls(stored.num_rows) if column is None else column for n, column in found.items()})


def with_values(stored: pa.Table) -> pa.Table:
    """The rows of a data file, which were read with its metadata and all columns, each with its packed message."""
    value = stored.column("value")
    if not value.null_count:
        return stored
    metadata = stored.schema.metadata or {}
    rows = rows_of(stored.replace_schema_metadata({ROWS: metadata.get(FIELDS, metadata.get(ROWS))}))
    assert rows is not None
    at = stored.schema.get_field_index("value")
    return stored.set_column(at, "value", pa.chunked_array(values_of(value, rows), pa.binary()))


def values_of(value: pa.ChunkedArray, rows: pa.Table) -> list[pa.Array]:
    """The packed messages of a column; where it has none, those of the rows of a table."""
    if value.null_count == len(value):
        return packed_arrays(rows)
    packed = pa.chunked_array(packed_arrays(rows.filter(value.is_null())), pa.binary()).combine_chunks()
    return [pc.replace_with_mask(value.combine_chunks(), value.is_null().combine_chunks(), packed)]


def column_of(field: str) -> str:
    """The name of a field's column."""
    return f"{field}_" if field.lower() in OWN else field
