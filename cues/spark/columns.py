"""Messages as columns, and columns as messages.

    Spark                      takes, of a message                          else
    STRING, VARCHAR, CHAR      str; UUID as its text                        NULL
    BYTE … LONG                int in range                                 NULL (also for 1.0 and True)
    FLOAT, DOUBLE              float, int                                   NULL
    DECIMAL(p, s)              Decimal, int, where no digit is lost         NULL
    BOOLEAN                    bool                                         NULL
    BINARY                     bytes                                        NULL
    DATE                       date                                         NULL (also for a datetime)
    TIMESTAMP                  aware datetime                               NULL (a naive one names no instant)
    TIMESTAMP_NTZ              naive datetime                               NULL
    TIME                       time without a zone                          NULL
    INTERVAL DAY TO SECOND     timedelta                                    NULL
    ARRAY                      list, tuple, set, frozenset, numpy array     NULL
    MAP, STRUCT                dict; a struct's fields by name              NULL

numpy scalars count as what they hold. Inside arrays, maps and structs it is the innermost value that
becomes NULL (a map whose key does not fit is NULL as a whole). In strict mode the first value that does
not fit is an error that names the message's index and the field; a missing field is NULL in both.

A column goes to Arrow whole where all its values are of the expected types, which one look at the set of
their types tells; only else is each value looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NoReturn
from uuid import UUID

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from cues.errors import CodecError, InvalidArgument, Unsupported


class Misfit(Exception):
    """A value that its column has no place for: where in the field, and what it is."""

    def __init__(self, path: str, value: Any, expected: str) -> None:
        super().__init__(path, value, expected)
        self.path, self.value, self.expected = path, value, expected


Convert = Callable[[Any], Any]
"""A message's value as Arrow takes it; raises :class:`Misfit`."""

_NONE: Final = type(None)
_RANGES: Final[dict[type[T.DataType], int]] = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}
# What Arrow converts without loss or guess, so that a column of nothing else needs no look at each value.
_PLAIN: Final[dict[type[T.DataType], set[type]]] = {
    T.StringType: {str, _NONE},
    T.LongType: {int, _NONE},
    T.IntegerType: {int, _NONE},
    T.ShortType: {int, _NONE},
    T.ByteType: {int, _NONE},
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
        self.type = to_arrow_type(field.dataType, timezone="UTC")
        self._convert = converter(field.dataType, strict)
        self._strict = strict
        self._plain = _PLAIN.get(type(field.dataType), set())

    def array(self, messages: Sequence[dict[str, Any]], index_of: Callable[[int], int]) -> pa.Array:
        """The column of ``messages``; ``index_of`` tells the index of each, for errors."""
        name = self.name
        values = [message.get(name) for message in messages]
        if self._plain.issuperset(map(type, values)):
            try:
                found = pa.array(values, self.type)
            except (pa.ArrowException, OverflowError):
                found = None  # an integer beyond its column's range: each has to be looked at
        else:
            found = None
        if found is None:
            found = pa.array(self._each(values, index_of), self.type)
        if not self.nullable and found.null_count:
            at = next(i for i, valid in enumerate(found.is_valid().to_pylist()) if not valid)
            self._fail(index_of(at), name, "nothing that fits", "a value, since it is declared NOT NULL")
        return found

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

    def _fail(self, index: int, path: str, found: str, expected: str) -> NoReturn:
        raise CodecError(
            f"Message {index}, field {path}: found {found}, expected {expected}.",
            "declare another type in the schema, or read with mode=permissive, which gives NULL.",
            path=path,
            type_name=found,
        )


def converter(kind: T.DataType, strict: bool) -> Convert:
    """The conversion of values to a Spark type. :class:`Unsupported` for types that no message has."""
    if isinstance(kind, (T.StringType, T.CharType, T.VarcharType)):
        return _string
    if type(kind) in _RANGES:
        return _integer(_RANGES[type(kind)], kind.simpleString())
    if isinstance(kind, (T.FloatType, T.DoubleType)):
        return _float
    if isinstance(kind, T.DecimalType):
        return _decimal(kind.precision, kind.scale)
    if isinstance(kind, T.BooleanType):
        return _exactly(bool, "a bool")
    if isinstance(kind, T.BinaryType):
        return _exactly(bytes, "bytes")
    if isinstance(kind, T.DateType):
        return _exactly(date, "a date")
    if isinstance(kind, T.DayTimeIntervalType):
        return _exactly(timedelta, "a timedelta")
    if isinstance(kind, T.TimeType):
        return _clock
    if isinstance(kind, T.TimestampType):
        return _aware
    if isinstance(kind, T.TimestampNTZType):
        return _naive
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
    """For values inside others: NULL is NULL, and in permissive mode what does not fit is too."""

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
    """numpy's scalars as Python's; a message can only hold one where numpy is loaded."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


def _string(value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, UUID):
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


def _array(element: Convert) -> Convert:
    def convert(value: Any) -> list[Any]:
        if type(value).__name__ == "ndarray" and value.ndim > 0:
            value = value.tolist()
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise Misfit("", value, "a list")
        out: list[Any] = []
        for place, one in enumerate(value):
            try:
                out.append(element(one))
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
        found: list[dict[str, Any]] = rows.to_pylist()
        for name, restore in self._changed.items():
            for message in found:
                value = message[name]
                if value is not None:
                    message[name] = restore(value)
        return found


def _restorer(kind: T.DataType) -> Convert | None:
    """The conversion of a value that Arrow gives; None where it needs none."""
    if isinstance(kind, T.TimestampType):
        return lambda value: value.astimezone(UTC)
    if isinstance(kind, T.ArrayType):
        element = _restorer(kind.elementType)
        if element is None:
            return None
        inner = element
        return lambda value: [None if one is None else inner(one) for one in value]
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
