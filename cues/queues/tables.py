"""Messages as a table, and back: for readers of tables, and for ``batch="arrow"``, ``"pandas"`` and ``"polars"``.

    [{"id": 1, "tags": ["a"]}, {"id": 2}]        id: int64    tags: list<string>
                                          ◄──►   1            ["a"]
                                                 2            null

Each field is a column, in the order in which fields appear; lists and dicts are lists and structs of Arrow. A field
that is missing and one that is None are both null, and a null is None in a message that is made of a row. Without a
schema the types are those of the messages of the step, so they may differ from step to step: a field that is null in
all of them has the type null. With one, columns and types are always the same, and other fields are left out. Keys that
begin with ``q/`` are no columns. A value that its column would change is refused: a time with an offset, a set, a
datetime among dates.

pandas gets its types with nulls (``Int64``, ``Float64``, ``boolean``), because those without would make floats of
integers with a null. Other columns have Arrow types (``pandas.ArrowDtype``), for which pandas 2 has fewer operations:
no ``%``, for example.
"""

from __future__ import annotations

import bisect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cues.errors import InvalidArgument, NotInstalled, SchemaError
from cues.records import columns
from cues.records import schema as declared
from cues.records.columns import integers

if TYPE_CHECKING:
    from cues.queues.cursor import Piece

_PACKAGES = {"arrow": ("pyarrow",), "pandas": ("pyarrow", "pandas"), "polars": ("pyarrow", "polars")}
"""The packages of each value of ``batch``."""


def table_of(
    kind: str,
    messages: Sequence[dict[str, Any]],
    schema: Any = None,
    facts: dict[str, list[Any]] | None = None,
) -> Any:
    """Return a table of messages; ``schema`` is a pyarrow schema. Raises :class:`SchemaError`, which names a column.

    ``facts``: columns before those of the messages.
    """
    return converted(_arrow_of(kind, messages, schema, facts), kind)


def _arrow_of(
    kind: str, messages: Sequence[dict[str, Any]], schema: Any, facts: dict[str, list[Any]] | None = None
) -> Any:
    pa = _module("pyarrow", kind)
    names = schema.names if schema is not None else _names(messages)
    if messages and not names and facts is None:
        text = f"{len(messages)} messages have no field, and a table without columns has no rows."
        raise SchemaError(text, "give schema=, or drop them with where=bool.", path="$", expected="a field")
    if messages and not names:
        return pa.table({name: pa.array(values) for name, values in facts.items()})  # type: ignore[union-attr]
    arrays = []
    for name in names:
        values = [message.get(name) for message in messages]
        try:
            array = pa.array(values, None if schema is None else schema.field(name).type)
            if kind == "pandas" and "null" in str(array.type) and array.type != pa.null():
                array = pa.array(values, _without_null(pa, array.type))
            if _changes(pa, array.type, values, schema is not None):
                raise _changed(pa, name, values, array.type, schema is not None)
            arrays.append(array)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise _misfit(pa, name, values, schema, error) from None
    table = pa.Table.from_arrays(arrays, schema=schema) if schema is not None else pa.table(arrays, names)
    for place, (name, values) in enumerate((facts or {}).items()):
        table = table.add_column(place, name, pa.array(values))
    return table


def converted(table: Any, kind: str) -> Any:
    """Return a table of Arrow as one of this kind."""
    if kind == "pandas":
        return table.to_pandas(types_mapper=_pandas_type)
    return _module("polars", kind).from_arrow(table) if kind == "polars" else table


_OFFSET: Final = "q/offset"


class Selection(NamedTuple):
    """The rows and columns that a reader of tables wants."""

    schema: Any = None
    """A pyarrow schema: its columns alone, with its types."""
    columns: Sequence[str] | None = None
    """The columns to return, of those that the messages have."""
    where: Any = None
    """A pyarrow expression: the rows for which it is true."""
    facts: bool = False
    """True: the first columns are partition, index and time."""


ALL: Final = Selection()


def joined(pieces: Sequence[Piece], kind: str = "arrow", wanted: Selection = ALL) -> Any:
    """Return a table of the messages of pieces of records; records of columns stay columns.

    Raises :class:`SchemaError` for values of a field that do not fit one type.
    """
    pa = _module("pyarrow", kind)
    parts = list(_parts(pa, pieces, kind, wanted))
    if not parts:
        return converted(_empty(pa, pa.schema([]) if wanted.schema is None else wanted.schema, wanted), kind)
    try:
        table = pa.concat_tables(parts, promote_options="permissive")
    except pa.ArrowException as error:
        raise _apart(error) from None
    return converted(table, kind)


def _apart(error: Exception) -> SchemaError:
    return SchemaError(
        f"The messages do not fit one table: {error}", "give schema=.", path="$", expected="one type for a field"
    )


def _parts(pa: Any, pieces: Iterable[Piece], kind: str, wanted: Selection) -> Iterator[Any]:
    """The tables of runs of pieces: of each record of columns, and of the messages between two of them."""
    for is_table, some in itertools.groupby(pieces, lambda piece: bool(piece.batch.schema)):
        for group in ([piece] for piece in some) if is_table else (list(some),):
            if is_table:
                rows = group[0].batch.table().slice(group[0].low, group[0].high - group[0].low)
                table = _with_schema(pa, pa.Table.from_batches([rows]), wanted.schema)
            else:
                messages = [message for each in group for message in each.batch.messages()[each.low : each.high]]
                if wanted.facts and not any(messages):
                    table = pa.Table.from_batches([columns.empty_rows(len(messages))])
                else:
                    table = _arrow_of(kind, messages, wanted.schema)
            if wanted.facts:
                table = _with_facts(pa, table, group)
            yield _chosen(pa, table, wanted)


def _chosen(pa: Any, table: Any, wanted: Selection) -> Any:
    """The rows and columns of a table that are asked for. A column that no message here has is null."""
    if wanted.where is not None:
        try:
            table = _filtered(pa, table, wanted.where)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"where= does not fit the messages: {error}",
                "pass a pyarrow expression over their fields, such as pyarrow.compute.field('n') > 3.",
            ) from None
    if wanted.columns is None:
        return table
    return pa.table({name: _column_of(pa, table, name) for name in wanted.columns})


def _filtered(pa: Any, table: Any, where: Any) -> Any:
    """The rows for which an expression is true. A field that no message here has is null."""
    try:
        return table.filter(where)
    except pa.ArrowInvalid as error:
        missing = re.search(r"No match for FieldRef.Name\((.+?)\)", str(error))
        if missing is None or missing[1] in table.column_names:
            raise
        return _filtered(pa, table.append_column(missing[1], pa.nulls(table.num_rows)), where).drop_columns(missing[1])


class Chosen(NamedTuple):
    """The rows that a filter left: what a function of tables is given in place of :class:`Rows`."""

    rows: Any

    def messages(self) -> list[dict[str, Any]]:
        """Return the rows as messages."""
        return [row for some in self.rows.to_batches() for row in columns.rows(some)]

    def table(self, kind: str, schema: Any) -> Any:
        """Return the rows as a table that a function takes."""
        return converted(_with_schema(_module("pyarrow", kind), self.rows, schema), kind)


def chosen(messages: Rows | Sequence[dict[str, Any]], where: Any) -> tuple[list[int], Chosen]:
    """Return the offsets of the messages for which an expression over their fields is true, and these rows.

    Raises :class:`InvalidArgument` if the expression does not fit the fields.
    """
    table = joined(messages.pieces) if isinstance(messages, Rows) else _arrow_of("arrow", messages, None)
    offsets, rows = _rows_where(table, where)
    return offsets, Chosen(rows)


def _rows_where(table: Any, where: Any) -> tuple[list[int], Any]:
    """Return the offsets of the rows for which an expression is true, and these rows."""
    table = table.append_column(_OFFSET, integers(range(table.num_rows)))
    rows = _chosen(_module("pyarrow", "arrow"), table, Selection(where=where))
    return rows.column(_OFFSET).to_pylist(), rows.drop_columns(_OFFSET)


def _column_of(pa: Any, table: Any, name: str) -> Any:
    return table.column(name) if name in table.column_names else pa.nulls(table.num_rows)


def source(pieces: Callable[[], Iterable[Piece]], wanted: Selection) -> Any:
    """Return a ``pyarrow.RecordBatchReader`` of the messages, one record after another; or a ``pyarrow.Table``.

    ``pieces`` is called once to find the columns, and once for the messages. Messages that were not written as tables
    have no types before they are read: with one of them, and without a schema, all are in memory.
    """
    pa = _module("pyarrow", "arrow")
    schemas: dict[bytes, Any] = {}
    for piece in pieces():
        stored = piece.batch.schema
        if stored is None and wanted.schema is None:
            return joined(list(pieces()), wanted=wanted)
        if stored is not None:
            schemas.setdefault(stored.hash, _empty(pa, stored.arrow, wanted).schema)
    try:
        schema = pa.unify_schemas(schemas.values(), promote_options="permissive") if schemas else None
    except pa.ArrowException as error:
        raise _apart(error) from None
    if wanted.schema is not None or schema is None:
        schema = _empty(pa, wanted.schema or pa.schema([]), wanted).schema

    def batches() -> Iterator[Any]:
        for table in _parts(pa, pieces(), "arrow", wanted):
            yield from _with_schema(pa, table, schema).to_batches()

    return pa.RecordBatchReader.from_batches(schema, batches())


def _empty(pa: Any, schema: Any, wanted: Selection) -> Any:
    """The table of no messages: with the columns of a schema that are asked for."""
    table = (schema if wanted.schema is None else wanted.schema).empty_table()
    return _chosen(pa, _with_facts(pa, table, []) if wanted.facts else table, wanted)


def _with_schema(pa: Any, table: Any, schema: Any) -> Any:
    """Return the columns of a schema: those of the table, and null where it has none."""
    if schema is None:
        return table
    arrays = []
    for field in schema:
        if field.name not in table.column_names:
            arrays.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            arrays.append(table.column(field.name).cast(field.type))
        except pa.ArrowException as error:
            raise SchemaError(
                f"$.{field.name}: expected {field.type}, found {table.column(field.name).type}: {error}",
                "correct the type of the column in schema=.",
                path=f"$.{field.name}",
                expected=str(field.type),
            ) from None
    return pa.Table.from_arrays(arrays, schema=schema)


def _with_facts(pa: Any, table: Any, pieces: Sequence[Piece]) -> Any:
    """Add the columns ``q/partition``, ``q/index`` and ``q/time``."""
    columns: tuple[list[Any], list[Any], list[Any]] = [], [], []
    for piece in pieces:
        count = piece.high - piece.low
        columns[0].append(pa.repeat(integers([piece.log.partition])[0], count))
        first = piece.batch.index(piece.low)
        columns[1].append(integers(range(first, first + count)))
        time = integers([piece.batch.head.time_ns // 1000], pa.timestamp("us", "UTC"))[0]
        columns[2].append(pa.repeat(time, count))
    for place, ((name, kind), arrays) in enumerate(zip(_fact_types(pa).items(), columns)):
        table = table.add_column(place, name, pa.chunked_array(arrays, kind))
    return table


def _fact_types(pa: Any) -> dict[str, Any]:
    return {"q/partition": pa.int64(), "q/index": pa.int64(), "q/time": pa.timestamp("us", "UTC")}


class Columns:
    """The messages of a step, all of them rows of columns, as a function that has ``by_columns`` gets them.

    A function may have ``by_columns(columns, process)``, besides the call with one message. The engine calls it with
    messages that were written as tables of one schema, if nothing of the processor needs messages one by one (a filter
    that is a function, a key, several calls at once). It must do exactly what the calls of these messages would do, one
    after another: to the state, and to the outputs. It returns a pair: the messages to write, or a table of them; and
    for each of them the offset of the message whose call would have written it. Offsets never decrease. For several
    outputs it returns a dict of such pairs by binding.

    If it returns None or raises, nothing of it stays, and the messages are called one by one. So ``by_columns`` may
    refuse any messages, and all errors of messages are those of the calls.
    """

    __slots__ = ("_messages", "table")

    def __init__(self, table: Any) -> None:
        self.table = table
        """A ``pyarrow.Table``."""
        self._messages: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return self.table.num_rows  # type: ignore[no-any-return]

    def column(self, name: str) -> Any:
        """Return a column as a ``pyarrow.Array``; None if the messages have no such field."""
        if name not in self.table.column_names:
            return None
        column = self.table.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def values(self, name: str) -> list[Any]:
        """Return the values of a field as the messages have them; None where they have none."""
        column = self.column(name)
        return [None] * len(self) if column is None else columns.values(column, name)

    def where(self, expression: Any) -> tuple[list[int], Columns]:
        """Return the offsets of the rows for which an expression is true, and these rows.

        Raises :class:`InvalidArgument` if the expression does not fit the columns.
        """
        offsets, table = _rows_where(self.table, expression)
        return offsets, Columns(table)

    def rows(self, offsets: list[int]) -> Any:
        """Return the rows at these offsets as a ``pyarrow.Table``."""
        return columns.taken(self.table, offsets)

    def messages(self, offsets: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return the messages at these offsets as dicts; without offsets all of them, the same dicts each time."""
        if offsets is not None:
            return _dicts(columns.taken(self.table, list(offsets)))
        if self._messages is None:
            self._messages = _dicts(self.table)
        return self._messages


class Rows:
    """The messages of a step whose function takes tables. Dicts are made only for those who ask for one."""

    __slots__ = ("_messages", "pieces")

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self._messages: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return sum(piece.high - piece.low for piece in self.pieces)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._decoded())

    def __getitem__(self, place: Any) -> Any:
        """Return one message; for a slice from the beginning the rows of these messages."""
        if not isinstance(place, slice):
            return self._decoded()[place]
        left, pieces = len(range(*place.indices(len(self)))), []
        for piece in self.pieces:
            size = min(left, piece.high - piece.low)
            if size:
                pieces.append(piece._replace(high=piece.low + size))
            left -= size
        return Rows(pieces)

    def __setitem__(self, place: int, message: dict[str, Any]) -> None:
        self._decoded()[place] = message

    def _decoded(self) -> list[dict[str, Any]]:
        if self._messages is None:
            self._messages = [message for piece in self.pieces for message in _messages_of(piece)]
        return self._messages

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages as dicts, which belong to the caller."""
        messages, self._messages = self._decoded(), None
        return messages

    def columns(self) -> Columns | None:
        """Return the columns of the messages, if all of them are columns of one schema."""
        schema = self.pieces[0].batch.schema if self.pieces else None
        if schema is None or any(p.batch.schema is not schema or p.batch.head.acknowledges for p in self.pieces):
            return None
        return Columns(joined(self.pieces))

    def forget(self) -> None:
        """Drop the dicts, which a function may have changed."""
        self._messages = None

    def runs(self) -> Iterator[Any]:
        """Yield the messages in their order, as they lie on the queue: tables of Arrow, and lists of dicts."""
        for is_table, some in itertools.groupby(self.pieces, lambda piece: bool(piece.batch.schema)):
            if is_table:
                pa = _module("pyarrow", "arrow")
                for piece in some:
                    rows = piece.batch.table().slice(piece.low, piece.high - piece.low)
                    yield pa.Table.from_batches([rows])
            else:
                yield [message for piece in some for message in piece.batch.messages()[piece.low : piece.high]]

    def table(self, kind: str, schema: Any) -> Any:
        """Return the messages as a table that a function takes."""
        return joined(self.pieces, kind, Selection(schema))


def _dicts(table: Any) -> list[dict[str, Any]]:
    return [row for some in table.to_batches() for row in columns.rows(some)]


def _messages_of(piece: Piece) -> list[dict[str, Any]]:
    if piece.batch.schema is None or piece.batch.head.acknowledges:
        return piece.batch.messages()[piece.low : piece.high]
    return columns.rows(piece.batch.table().slice(piece.low, piece.high - piece.low))


class Returned(NamedTuple):
    """The result of a function of tables: a table, or a dict of tables by output."""

    value: Any


def is_table(value: Any) -> bool:
    """Return whether a value is a table of pyarrow, polars or pandas."""
    module = type(value).__module__.partition(".")[0]
    return (module == "pyarrow" and hasattr(value, "column_names")) or (
        module in ("polars", "pandas") and hasattr(value, "columns") and hasattr(value, "__arrow_c_stream__")
    )


def returned(result: Any) -> Any:
    """Return the result of a function of tables as :class:`Returned`, if all of it is tables; else as messages."""
    found = result.values() if isinstance(result, dict) else (result,)
    if all(each is None or is_table(each) for each in found) and any(each is not None for each in found):
        return Returned(result)
    return messages_of(result)


def messages_of(result: Any) -> Any:
    """Return the messages of a table that a function returned; of a dict of tables, those of each. Others stay."""
    if isinstance(result, dict):
        return {name: _rows(value) for name, value in result.items()}
    return _rows(result)


def arrow_schema(schema: declared.Schema | None, kind: str) -> Any:
    """Return the pyarrow schema for names and types of columns. Raises :class:`NotInstalled` without the packages."""
    for package in _PACKAGES[kind]:
        _module(package, kind)
    if schema is None:
        return None
    pa = _module("pyarrow", kind)
    return pa.schema([(name, _type(pa, declared.parse(text))) for name, text in schema])


def _names(messages: Sequence[dict[str, Any]]) -> list[str]:
    names: dict[str, None] = {}
    for message in messages:
        names.update(dict.fromkeys(message))
    return [name for name in names if not str(name).startswith("q/")]


def _rows(value: Any) -> Any:
    module = type(value).__module__.partition(".")[0]
    if module == "polars":
        return value.to_dicts() if hasattr(value, "to_dicts") else value
    if module == "pandas" and hasattr(value, "columns"):
        value = sys.modules["pyarrow"].Table.from_pandas(value, preserve_index=False)
        module = "pyarrow"
    return value.to_pylist() if module == "pyarrow" and hasattr(value, "column_names") else value


def _misfit(pa: Any, name: str, values: Sequence[Any], schema: Any, error: Exception) -> SchemaError:
    """The error for a column, with the place of the first value that does not fit."""
    expected = "values of one type" if schema is None else str(schema.field(name).type)
    kind = None if schema is None else schema.field(name).type

    def fit(count: int) -> bool:
        """Return whether the first ``count`` values fit one type."""
        try:
            pa.array(values[:count], kind)
        except Exception:
            return False
        return True

    place = bisect.bisect_left(range(len(values)), True, key=lambda count: not fit(count + 1))
    if place == len(values):
        return SchemaError(
            f"$.{name}: {error}", "name the column's type with schema=.", path=f"$.{name}", expected=expected
        )
    path = f"$[{place}].{name}"
    found = f"{path}: expected {expected}, found {values[place]!r:.60}."
    hint = "correct the writer of the message" + ("" if schema is not None else ", or name the column's type")
    return SchemaError(found, f"{hint}, with schema=.", path=path, expected=expected)


def _changes(pa: Any, kind: Any, values: Iterable[Any], is_declared: bool) -> bool:
    """Return whether Arrow puts other values than these into an array of a type, without an error.

    It cuts datetimes to dates, drops the offsets of times and the second of two equal times, mixes times with and
    without a zone, and makes lists of sets and bytes of text. A declared type with a zone takes times without as UTC.
    """
    types = pa.types
    if types.is_dictionary(kind) or not (types.is_nested(kind) or types.is_temporal(kind) or types.is_binary(kind)):
        return False
    there = [value for value in values if value is not None]
    if types.is_struct(kind):
        rows = [value for value in there if isinstance(value, dict)]
        return any(_changes(pa, each.type, [row.get(each.name) for row in rows], is_declared) for each in kind)
    if types.is_map(kind):
        items = [item for value in there for item in (value.items() if isinstance(value, dict) else value)]
        return any(
            _changes(pa, part, [item[at] for item in items], is_declared)
            for at, part in enumerate((kind.key_type, kind.item_type))
        )
    if types.is_nested(kind):
        if any(isinstance(value, (set, frozenset)) for value in there):
            return True
        return _changes(pa, kind.value_type, itertools.chain.from_iterable(there), is_declared)
    if types.is_binary(kind):
        return any(isinstance(value, str) for value in there)
    if types.is_date(kind):
        return any(isinstance(value, datetime) for value in there)
    if types.is_time(kind):
        return any(isinstance(value, time) and (value.tzinfo is not None or value.fold) for value in there)
    if not types.is_timestamp(kind):
        return False
    times = [value for value in there if isinstance(value, datetime)]
    if kind.tz is None:
        return any(value.tzinfo is not None or value.fold for value in times)
    return not is_declared and any(value.tzinfo is None for value in times)


def _changed(pa: Any, name: str, values: Sequence[Any], kind: Any, is_declared: bool) -> SchemaError:
    """The error for a column of which Arrow would change values, with the place of the first one."""
    place = next(at for at, value in enumerate(values) if _changes(pa, kind, [value], is_declared))
    path = f"$[{place}].{name}"
    return SchemaError(
        f"{path}: the column is {kind}, and does not hold {values[place]!r:.60} as it is.",
        "send values of one type, times without an offset, and lists in the place of sets.",
        path=path,
        expected=str(kind),
    )


def _pandas_type(kind: Any) -> Any:
    """The type of a column of pandas: its own with nulls for numbers and booleans."""
    pd = sys.modules["pandas"]
    text = str(kind)
    if text == "bool":
        return pd.BooleanDtype()
    if text.startswith(("int", "uint")):
        return pd.api.types.pandas_dtype(text.title().replace("Ui", "UI"))
    return {"float": pd.Float32Dtype, "double": pd.Float64Dtype}.get(text, lambda: pd.ArrowDtype(kind))()


def _without_null(pa: Any, kind: Any) -> Any:
    """The type with texts for the type null inside of lists: pandas 2.3 makes damaged arrays of these."""
    if pa.types.is_list(kind):
        return pa.list_(_without_null(pa, kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _without_null(pa, field.type)) for field in kind])
    return pa.string() if kind == pa.null() else kind


def _type(pa: Any, kind: Any) -> Any:
    """The Arrow type of a type in JSON (:func:`cues.records.schema.parse`)."""
    if isinstance(kind, str):
        if kind.startswith("decimal"):
            return pa.decimal128(*map(int, kind[8:-1].split(",")))
        return {
            "boolean": pa.bool_(), "byte": pa.int8(), "short": pa.int16(), "integer": pa.int32(), "long": pa.int64(),
            "float": pa.float32(), "double": pa.float64(), "string": pa.string(), "binary": pa.binary(),
            "date": pa.date32(), "timestamp": pa.timestamp("us", tz="UTC"),
        }[kind]  # fmt: skip
    if kind["type"] == "array":
        return pa.list_(_type(pa, kind["elementType"]))
    if kind["type"] == "map":
        return pa.map_(_type(pa, kind["keyType"]), _type(pa, kind["valueType"]))
    return pa.struct([(field["name"], _type(pa, field["type"])) for field in kind["fields"]])


def _module(name: str, kind: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise NotInstalled(
            f"Tables of {kind} need the package {name}, which is not installed.",
            f"pip install {' '.join(_PACKAGES[kind])}.",
        ) from None
