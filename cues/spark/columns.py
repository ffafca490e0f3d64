"""Messages as columns, and columns as messages.

    Spark                      accepts, of a message                        else
    STRING, VARCHAR, CHAR      str; UUID as its text                        NULL
    BYTE … LONG                int in range                                 NULL (also for 1.0 and True)
    FLOAT, DOUBLE              float, int                                   NULL
    DECIMAL(p, s)              Decimal, int, if no digit is lost            NULL
    BOOLEAN                    bool                                         NULL
    BINARY                     bytes                                        NULL
    DATE                       date                                         NULL (also for a datetime)
    TIMESTAMP                  aware datetime                               NULL (a naive one names no instant)
    TIMESTAMP_NTZ              naive datetime                               NULL
    TIME                       time without a zone                          NULL
    INTERVAL DAY TO SECOND     timedelta                                    NULL
    ARRAY                      list, tuple, set, frozenset, numpy array     NULL
    MAP, STRUCT                dict; a struct's fields by name              NULL

A numpy scalar counts as the Python value that it holds. Inside arrays, maps and structs only the innermost value
becomes NULL (a map with a key that does not fit is NULL as a whole). In strict mode the first value that does
not fit is an error, with the index of the message and the field. A missing field is NULL in both modes.

The set of the types of all values of a column is computed first. If all are expected types, the whole column is given
to Arrow. Only otherwise each value is converted on its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NoReturn
from uuid import UUID

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from cues.errors import CodecError, InvalidArgument, ReturnError, Unsupported
from cues.spark.installed import times_in_utc


class Misfit(Exception):
    """A value that does not fit its column, with its path inside the field."""

    def __init__(self, path: str, value: Any, expected: str) -> None:
        super().__init__(path, value, expected)
        self.path, self.value, self.expected = path, value, expected


Convert = Callable[[Any], Any]
"""A message's value as Arrow takes it; raises :class:`Misfit`."""

_NONE: Final = type(None)
_RANGES: Final[dict[type[T.DataType], int]] = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}
# Types that Arrow converts without loss or guess. A column with only these types is converted as a whole.
_PLAIN: Final[dict[type[T.DataType], set[type]]] = {
    **{kind: {int, _NONE} for kind in _RANGES},
    T.StringType: {str, _NONE},
    T.DoubleType: {float, _NONE},
    T.BooleanType: {bool, _NONE},
    T.BinaryType: {bytes, _NONE},
    T.DateType: {date, _NONE},
    T.DayTimeIntervalType: {timedelta, _NONE},
}


class Column:
    """One declared column: values of messages in, an Arrow array out."""

    def __init__(self, field: T.StructField, strict: bool) -> None:
        self.name = field.name
        self.nullable = field.nullable
        self.type = to_arrow_type(field.dataType, **times_in_utc())
        self._convert = converter(field.dataType, strict)
        self._strict = strict
        self._plain = _PLAIN.get(type(field.dataType), set())

    def fits(self, stored: pa.Array) -> bool:
        """Return True if a stored column of this type is what :meth:`array` makes of the messages, errors included."""
        return not stored.null_count or (self.nullable and not self._strict)

    def array(self, messages: Sequence[dict[str, Any]], index_of: Callable[[int], int]) -> pa.Array:
        """The column of ``messages``. ``index_of`` returns the index of each, for errors."""
        name = self.name
        values = [message.get(name) for message in messages]
        column = None
        if self._plain.issuperset(map(type, values)):
            with contextlib.suppress(pa.ArrowException, OverflowError):  # an integer beyond the range of the column
                column = pa.array(values, self.type)
        if column is None:
            column = pa.array(self._each(values, index_of), self.type)
        if not self.nullable and column.null_count:
            at = next(i for i, valid in enumerate(column.is_valid().to_pylist()) if not valid)
            self._fail(index_of(at), name, "nothing that fits", "a value, since it is declared NOT NULL")
        return column

    def _each(self, values: list[Any], index_of: Callable[[int], int]) -> list[Any]:
        out: list[Any] = []
        for offset, value in enumerate(values):
            if value is None:
                out.append(None)
                continue
            try:
                out.append(self._convert(value))
            except Misfit as misfit:
                if self._strict:
                    shown = f"{type(misfit.value).__name__} ({misfit.value!r:.60})"
                    self._fail(index_of(offset), self.name + misfit.path, shown, misfit.expected)
                out.append(None)
        return out

    def _fail(self, index: int, path: str, shown: str, expected: str) -> NoReturn:
        raise CodecError(
            f"Message {index}, field {path}: found {shown}, expected {expected}.",
            "declare another type in the schema, or read with mode=permissive, which gives NULL.",
            path=path,
            type_name=shown,
        )


def converter(kind: T.DataType, strict: bool) -> Convert:
    """The conversion of values to a Spark type. Raises :class:`Unsupported` for types that no message can have."""
    for types, convert in _SCALARS:
        if isinstance(kind, types):
            return convert
    if type(kind) in _RANGES:
        return _integer(_RANGES[type(kind)], kind.simpleString())
    if isinstance(kind, T.DecimalType):
        return _decimal(kind.precision, kind.scale)
    if isinstance(kind, T.ArrayType):
        return _array(_inside(converter(kind.elementType, strict), strict))
    if isinstance(kind, T.MapType):
        return _map(converter(kind.keyType, strict), _inside(converter(kind.valueType, strict), strict))
    if isinstance(kind, T.StructType):
        return _struct({f.name: _inside(converter(f.dataType, strict), strict) for f in kind.fields})
    raise Unsupported(
        f"No part of a message can be read as {kind.simpleString()}.",
        "read the column value, which is the whole message.",
    )


def _inside(convert: Convert, strict: bool) -> Convert:
    """The conversion of inner values: NULL stays NULL. In permissive mode a value that does not fit becomes NULL."""

    def converted(value: Any) -> Any:
        if value is None:
            return None
        try:
            return convert(value)
        except Misfit:
            if strict:
                raise
            return None

    return converted


def _bare(value: Any) -> Any:
    """The Python value of a numpy scalar; other values as they are."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


def _string(value: Any) -> str:
    if isinstance(value, (str, UUID)):
        return str(value)
    raise Misfit("", value, "a str")


def _integer(bits: int, name: str) -> Convert:
    limit = 1 << (bits - 1)

    def convert(value: Any) -> int:
        value = _bare(value)
        if type(value) is int and -limit <= value < limit:
            return value
        raise Misfit("", value, f"an int that fits {name}")

    return convert


def _float(value: Any) -> float:
    value = _bare(value)
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            pass
    raise Misfit("", value, "a number")


def _decimal(precision: int, scale: int) -> Convert:
    expected = f"a Decimal that fits decimal({precision},{scale})"

    def convert(value: Any) -> Decimal:
        value = _bare(value)
        if type(value) is int:
            value = Decimal(value)
        if type(value) is Decimal and value.is_finite():
            _, digits, exponent = value.normalize().as_tuple() if value else (0, (0,), 0)
            assert isinstance(exponent, int)
            if -exponent <= scale and len(digits) + exponent <= precision - scale:
                return value
        raise Misfit("", value, expected)

    return convert


def _exactly(kind: type, expected: str) -> Convert:
    def convert(value: Any) -> Any:
        value = _bare(value)
        if type(value) is kind:
            return value
        raise Misfit("", value, expected)

    return convert


def _clock(value: Any) -> time:
    if type(value) is time and value.tzinfo is None:
        return value
    raise Misfit("", value, "a time without a zone")


def _aware(value: Any) -> datetime:
    if isinstance(value, datetime) and value.utcoffset() is not None:
        return value.astimezone(UTC)
    raise Misfit("", value, "an aware datetime")


def _naive(value: Any) -> datetime:
    if isinstance(value, datetime) and value.tzinfo is None:
        return value
    raise Misfit("", value, "a naive datetime")


_SCALARS: Final[tuple[tuple[Any, Convert], ...]] = (
    ((T.StringType, T.CharType, T.VarcharType), _string),
    ((T.FloatType, T.DoubleType), _float),
    (T.BooleanType, _exactly(bool, "a bool")),
    (T.BinaryType, _exactly(bytes, "bytes")),
    (T.DateType, _exactly(date, "a date")),
    (T.DayTimeIntervalType, _exactly(timedelta, "a timedelta")),
    (getattr(T, "TimeType", ()), _clock),  # new in Spark 4.1
    (T.TimestampType, _aware),
    (T.TimestampNTZType, _naive),
)


def _array(element: Convert) -> Convert:
    def convert(value: Any) -> list[Any]:
        if type(value).__name__ == "ndarray" and value.ndim > 0:
            value = value.tolist()
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise Misfit("", value, "a list")
        out: list[Any] = []
        for place, inner in enumerate(value):
            try:
                out.append(element(inner))
            except Misfit as misfit:
                raise Misfit(f"[{place}]{misfit.path}", misfit.value, misfit.expected) from None
        return out

    return convert


def _map(key: Convert, item: Convert) -> Convert:
    def convert(value: Any) -> list[tuple[Any, Any]]:
        if not isinstance(value, dict):
            raise Misfit("", value, "a dict")
        out: list[tuple[Any, Any]] = []
        for k, v in value.items():
            try:
                out.append((key(k), item(v)))
            except Misfit as misfit:
                raise Misfit(f"[{k!r}]{misfit.path}", misfit.value, misfit.expected) from None
        return out

    return convert


def _struct(fields: dict[str, Convert]) -> Convert:
    def convert(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Misfit("", value, "a dict")
        out: dict[str, Any] = {}
        for name, field in fields.items():
            try:
                out[name] = field(value.get(name))
            except Misfit as misfit:
                raise Misfit(f".{name}{misfit.path}", misfit.value, misfit.expected) from None
        return out

    return convert


# --- columns to messages ------------------------------------------------------------------------


class Encoder:
    """Rows of a DataFrame as messages: a dict of the columns, of the types that :mod:`cues.codec` has.

    NULL stays as None; a timestamp is an aware datetime in UTC, TIMESTAMP_NTZ a naive one, a struct and a
    map are dicts. Raises :class:`Unsupported` for types that have no counterpart.
    """

    def __init__(self, schema: T.StructType) -> None:
        names = schema.fieldNames()
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidArgument(
                f"Two columns are called {twice!r}; a message has one field of a name.",
                "give one of the columns an alias.",
            )
        self._changed = {
            field.name: restore for field in schema.fields if (restore := _restorer(field.dataType)) is not None
        }

    def messages(self, rows: pa.RecordBatch) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = rows.to_pylist()
        for name, restore in self._changed.items():
            for message in messages:
                value = message[name]
                if value is not None:
                    message[name] = restore(value)
        return messages

    def table(self, rows: pa.RecordBatch) -> pa.Table | None:
        """Return the rows as a table whose rows are :meth:`messages`; None if only dicts have their values."""
        arrays = []
        for field, column in zip(rows.schema, rows.columns):
            kind = field.type
            if kind.num_fields or pa.types.is_dictionary(kind) or field.name.startswith("q/"):
                return None
            if pa.types.is_timestamp(kind) and kind.tz is not None:
                column = column.cast(pa.timestamp(kind.unit, "+00:00"))  # as datetime.UTC, a zone without a name
            arrays.append(column)
        return pa.table(arrays, names=rows.schema.names)


def frame_encoder(processor: str, result: Any) -> Encoder:
    """The encoder for the result of a frame. Raises :class:`ReturnError` if this is not a DataFrame."""
    if not hasattr(result, "mapInArrow"):
        raise ReturnError(
            f"{processor} returned {type(result).__name__}; a frame returns a DataFrame.", "return the DataFrame."
        )
    return Encoder(result.schema)


def _restorer(kind: T.DataType) -> Convert | None:
    """The conversion of a value of Arrow to that of a message; None if it needs no conversion."""
    if isinstance(kind, T.TimestampType):
        return lambda value: value.astimezone(UTC)
    if isinstance(kind, T.ArrayType):
        element = _restorer(kind.elementType)
        if element is None:
            return None
        return lambda value: [None if inner is None else element(inner) for inner in value]
    if isinstance(kind, T.MapType):
        key, item = _restorer(kind.keyType) or _same, _restorer(kind.valueType) or _same
        return lambda value: {key(k): None if v is None else item(v) for k, v in value}
    if isinstance(kind, T.StructType):
        fields = {f.name: restore for f in kind.fields if (restore := _restorer(f.dataType)) is not None}
        if not fields:
            return None

        def restored(value: dict[str, Any]) -> dict[str, Any]:
            return {k: fields[k](v) if v is not None and k in fields else v for k, v in value.items()}

        return restored
    plain = (T.AtomicType, T.NullType) if hasattr(T, "AtomicType") else T.DataType
    if not isinstance(kind, plain) or isinstance(kind, (T.VariantType, T.YearMonthIntervalType)):
        raise Unsupported(
            f"A column of type {kind.simpleString()} has no counterpart in a message.",
            "cast the column to another type.",
        )
    return None


def _same(value: Any) -> Any:
    return value
