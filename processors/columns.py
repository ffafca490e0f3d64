"""Columns of tables in files: one Arrow type for each, found from its values, and widened by later ones.

    type_of    the type of one value: None, bool, int, float, text, bytes, dates and times, Decimal, UUID, lists, dicts
    widened    the type that holds two: null → any, int → float, decimals grow, lists and dicts by their parts
    fitted     a value as a column of a type takes it: the same value, or an error that names the column

So what a value becomes does not depend on the other rows of a step, and nothing is rounded, cut or cast without a word.
A UUID becomes text. Aware datetimes keep their instant: with their offset if all of a column have one, else in UTC.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from cues.buffers import array_of, numbers_of
from cues.processors import places

_log = logging.getLogger("cues.processors")

EXACT_MAX: Final = 1 << 53
"""The largest integer up to which a float has every one."""
ANY_WIDE: Final = "*"
"""In place of the columns with integers beyond :data:`EXACT_MAX`: they are not known."""


def texts(given: Iterable[str]) -> Any:
    """Return texts as an Arrow array."""
    return array_of([text.encode() for text in given], places.arrow().string())


@functools.cache
def text(given: str) -> Any:
    """Return a text as a scalar of Arrow, for pyarrow.compute."""
    return texts((given,))[0]


def _misfit(path: str, text: str) -> ValueError:
    return ValueError(f"the column {path!r} {text}")


def plain(value: Any) -> Any:
    """Return a scalar or an array of numpy as a value of Python; another value as it is."""
    if type(value).__module__ != "numpy":
        return value
    if value.dtype.kind in "mM" and value.dtype.str[3:] not in ("[D]", "[h]", "[m]", "[s]", "[ms]", "[us]"):
        raise ValueError(f"a numpy {value.dtype} has parts that datetime does not have; convert it to [us]")
    return value.tolist()


def type_of(value: Any, path: str, wide: set[str]) -> Any:
    """Return the Arrow type of one value, and note in ``wide`` where integers are larger than a float holds."""
    pa, value = places.arrow(), plain(value)
    match value:
        case None:
            return pa.null()
        case bool():
            return pa.bool_()
        case int():
            if not -(1 << 63) <= value < 1 << 63:
                hint = "send it as a Decimal or as text, or give schema= with uint64 or a decimal"
                raise _misfit(path, f"has the integer {value}, which has more than 63 bits: {hint}")
            if abs(value) > EXACT_MAX:
                wide.add(path)
            return pa.int64()
        case float():
            return pa.float64()
        case str() | UUID():
            return pa.string()
        case bytes() | bytearray():
            return pa.binary()
        case datetime():
            return pa.timestamp("us", _zone(value))
        case date():
            return pa.date32()
        case time():
            return pa.time64("us")
        case timedelta():
            return pa.duration("us")
        case Decimal():
            return _decimal(value, path)
        case list() | tuple():
            inner = pa.null()
            for item in value:
                inner = widened(inner, type_of(item, f"{path}[]", wide), f"{path}[]", wide)
            return pa.list_(inner)
        case dict():
            if not value:
                raise _misfit(path, "is an empty dict, and a table has no column for it")
            return pa.struct({_name(key, path): type_of(item, f"{path}.{key}", wide) for key, item in value.items()})
    raise _misfit(path, f"has a {type(value).__name__}, for which a table has no type")


def _zone(value: datetime) -> str | None:
    """The zone of a column for an instant: its offset, if that has whole minutes."""
    offset = value.utcoffset()
    if offset is None:
        return None
    minutes, rest = divmod(offset, timedelta(minutes=1))
    return (
        "UTC" if rest or not minutes else f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"
    )


def _name(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise _misfit(path, f"is a dict with the key {key!r}, and the fields of a table are named by text")
    return key


def _decimal(value: Decimal, path: str) -> Any:
    pa, exponent = places.arrow(), value.as_tuple().exponent
    if not isinstance(exponent, int):
        raise _misfit(path, f"has the decimal {value}, which is not a number")
    scale = max(0, -exponent)
    return _decimal_of(max(1, value.adjusted() + 1 + scale, scale), scale, path, pa)


def _decimal_of(digits: int, scale: int, path: str, pa: Any) -> Any:
    if digits > 76:
        raise _misfit(path, f"needs {digits} digits; a decimal of a table has at most 76")
    return pa.decimal128(digits, scale) if digits <= 38 else pa.decimal256(digits, scale)


def widened(old: Any, new: Any, path: str, wide: set[str]) -> Any:
    """Return the narrowest type that holds the values of both, exactly. Raises ValueError if there is none."""
    pa = places.arrow()
    kinds = pa.types
    if old.equals(new) or kinds.is_null(new):
        return old
    if kinds.is_null(old):
        return new
    if {old, new} == {pa.int64(), pa.float64()} and not {path, ANY_WIDE} & wide:
        return pa.float64()
    if (common := _common(old, new)) is not None:
        return common
    numbers = [_as_decimal(each, pa) for each in (old, new)]
    if all(numbers):
        (whole, scale), (others, other) = numbers
        most = max(scale, other)
        return _decimal_of(max(whole - scale, others - other) + most, most, path, pa)
    if kinds.is_timestamp(old) and kinds.is_timestamp(new) and old.tz and new.tz:
        return pa.timestamp("us", "UTC")  # the same instants, of several offsets
    if kinds.is_list(old) and kinds.is_list(new):
        return pa.list_(widened(old.value_type, new.value_type, f"{path}[]", wide))
    if kinds.is_struct(old) and kinds.is_struct(new):
        fields = {field.name: field.type for field in old}
        for field in new:
            before = fields.get(field.name, pa.null())
            fields[field.name] = widened(before, field.type, f"{path}.{field.name}", wide)
        return pa.struct(fields)
    raise _misfit(path, f"is {new}, and it is {old} in other rows: give schema=, or send one type")


_KINDS: Final = ("integer", "floating", "date", "time", "duration")


def _common(old: Any, new: Any) -> Any:
    """The type of tables that holds the values of two of one kind, such as int32 and int64; None if there is none."""
    pa = places.arrow()
    kinds = pa.types
    same_zone = kinds.is_timestamp(old) and kinds.is_timestamp(new) and old.tz == new.tz
    if not same_zone and not any(
        getattr(kinds, f"is_{name}")(old) and getattr(kinds, f"is_{name}")(new) for name in _KINDS
    ):
        return None
    try:
        schemas = [pa.schema([("c", each)]) for each in (old, new)]
        return pa.unify_schemas(schemas, promote_options="permissive").field("c").type
    except pa.ArrowException:
        return None


def in_files(table: Any) -> Any:
    """Return a table with types that files have: without dictionaries, views and run-end encoding."""
    pa = places.arrow()
    for at, field in enumerate(table.schema):
        kind = stored(field.type)
        if not kind.equals(field.type):
            table = table.set_column(at, pa.field(field.name, kind), table.column(at).cast(kind))
    return table.replace_schema_metadata(None)


def stored(kind: Any) -> Any:
    """Return a type without dictionaries, views, extensions and run-end encoding."""
    pa = places.arrow()
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return stored(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return stored(kind.storage_type)
    if kind in (pa.string_view(), pa.large_string()):
        return pa.string()
    if kind in (pa.binary_view(), pa.large_binary()):
        return pa.binary()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(stored(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(stored(field.type)) for field in kind])
    return kind


def note_wide(column: Any, path: str, wide: set[str]) -> None:
    """Note in ``wide`` that a column has integers which are larger than a float holds."""
    pa = places.arrow()
    if pa.types.is_integer(column.type) and column.type.bit_width == 64 and path not in wide:
        from pyarrow import compute

        found = compute.min_max(column).as_py()
        if found["min"] is not None and (found["min"] < -EXACT_MAX or found["max"] > EXACT_MAX):
            wide.add(path)


def _as_decimal(kind: Any, pa: Any) -> Any:
    if pa.types.is_decimal(kind):
        return kind.precision, kind.scale
    return (19 + (kind == pa.uint64()), 0) if pa.types.is_integer(kind) else None


# --- values in columns --------------------------------------------------------------------------


def fitting(field: Any, path: str) -> Callable[[Any], Any]:
    """Return the function that returns a value as ``pyarrow.array`` takes it for a field.

    It raises ValueError if the field cannot hold the value exactly.
    """
    kind, is_nullable = field.type, field.nullable
    fit = _fits(kind)

    def fitted(value: Any) -> Any:
        value = plain(value)
        if value is None:
            if not is_nullable:
                raise _misfit(path, "is None or missing, and the schema says that it is never null")
            return None
        kept = fit(value, kind, path)
        if kept is WRONG:
            raise _misfit(path, f"is {kind}, and the row has {type(value).__name__} {value!r:.60}")
        return kept

    return fitted


WRONG: Final = object()
"""In place of a value that a column does not hold exactly."""


def _fits(kind: Any) -> Callable[[Any, Any, str], Any]:
    kinds = places.arrow().types
    for test, fit in _TABLE:
        if any(getattr(kinds, f"is_{name}")(kind) for name in test.split()):
            return fit
    return _by_round_trip


def whole(value: Any, low: int, high: int) -> Any:
    """Return a whole number from ``low`` to below ``high``; :data:`WRONG` for others."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and low <= value < high else WRONG


def floating(value: Any, bits: int) -> Any:
    """Return a float; :data:`WRONG` for what a float does not hold. A shorter one takes the nearest number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return WRONG
    try:
        found = float(value)
    except OverflowError:
        return WRONG
    if found != value and value == value:
        return WRONG
    largest = {16: 65_504.0, 32: 3.4028235677973366e38}.get(bits, math.inf)
    return found if abs(found) <= largest or not math.isfinite(found) else WRONG


def number(value: Any) -> Any:
    """Return a Decimal, also for an int, and for a float its shortest digits; :data:`WRONG` for others."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return WRONG
    found = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    return found if found.is_finite() else WRONG


def instant(value: Any, has_zone: bool, microseconds: int) -> Any:
    """Return a datetime, one with a zone in UTC; :data:`WRONG` for parts that a column would cut."""
    if not isinstance(value, datetime) or (value.tzinfo is not None) != has_zone or value.microsecond % microseconds:
        return WRONG
    try:
        return WRONG if value.fold and not has_zone else value.astimezone(UTC) if has_zone else value
    except OverflowError:  # of the first or the last day of all
        return WRONG


def day(value: Any) -> Any:
    """Return a date; :data:`WRONG` for others, such as a datetime."""
    return value if isinstance(value, date) and not isinstance(value, datetime) else WRONG


def clock(value: Any, has_zone: bool, microseconds: int) -> Any:
    """Return a time; :data:`WRONG` for parts that a column would cut."""
    if not isinstance(value, time) or value.fold or value.microsecond % microseconds:
        return WRONG
    return value if (value.utcoffset() is not None) == has_zone == (value.tzinfo is not None) else WRONG


def _span(value: Any, kind: Any, path: str) -> Any:
    return value if isinstance(value, timedelta) and not value.microseconds % _unit(kind) else WRONG


def _unit(kind: Any) -> int:
    """The unit of a type of times, in microseconds."""
    return {"s": 1_000_000, "ms": 1_000}.get(kind.unit, 1)


def _bounds(kind: Any) -> tuple[int, int]:
    bits = kind.bit_width
    return (-(1 << bits - 1), 1 << bits - 1) if str(kind)[0] == "i" else (0, 1 << bits)


def _decimals(value: Any, kind: Any, path: str) -> Any:
    found = number(value)
    return found if found is not WRONG and _exact(found, kind) else WRONG


def _text(value: Any, kind: Any, path: str) -> Any:
    return str(value) if isinstance(value, (str, UUID)) else WRONG


def _items(value: Any, kind: Any, path: str) -> Any:
    if not isinstance(value, (list, tuple)):
        return WRONG
    return [*map(fitting(kind.value_field, f"{path}[]"), value)]


def _fields(value: Any, kind: Any, path: str) -> Any:
    if not isinstance(value, dict):
        return WRONG
    unknown = [key for key in value if not isinstance(key, str) or kind.get_field_index(key) < 0]
    if unknown:
        raise _misfit(path, f"is {kind}, which has no field {unknown[0]!r}")
    return {field.name: fitting(field, f"{path}.{field.name}")(value.get(field.name)) for field in kind}


def _only(*types: type) -> Callable[[Any, Any, str], Any]:
    return lambda value, kind, path: value if type(value) in types else WRONG


def _exact(value: Any, kind: Any) -> bool:
    pa = places.arrow()
    try:
        return bool(pa.scalar(value, kind).as_py() == value)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return False


def _by_round_trip(value: Any, kind: Any, path: str) -> Any:
    return value if _exact(value, kind) else WRONG


_TABLE: Final[tuple[tuple[str, Callable[[Any, Any, str], Any]], ...]] = (
    ("null", lambda value, kind, path: WRONG),
    ("boolean", _only(bool)),
    ("integer", lambda value, kind, path: whole(value, *_bounds(kind))),
    ("floating", lambda value, kind, path: floating(value, kind.bit_width)),
    ("string large_string", _text),
    ("binary large_binary fixed_size_binary", _only(bytes, bytearray)),
    ("timestamp", lambda value, kind, path: instant(value, kind.tz is not None, _unit(kind))),
    ("date", lambda value, kind, path: day(value)),
    ("time", lambda value, kind, path: clock(value, False, _unit(kind))),
    ("duration", _span),
    ("decimal", _decimals),
    ("list large_list fixed_size_list", _items),
    ("struct", _fields),
)
"""The kinds of Arrow types, as ``pyarrow.types`` tests them, and what each takes. Others: what comes back equal."""


# --- rows of columns ------------------------------------------------------------------------------


def rows_of(batch: Any, name: str) -> list[dict[str, Any] | ValueError]:
    """Return the rows of a record batch as dicts; a ValueError for a row with a value that Python does not hold.

    Python's years end with 9999, and its times have microseconds: nanoseconds are cut, and the log says so once a
    column. Raises ValueError for two columns of one name.
    """
    names = batch.schema.names
    twice = [each for at, each in enumerate(names) if each in names[:at]]
    if twice:
        raise ValueError(f"{name} has two columns {twice[0]!r}; a message has one field of a name")
    values = [_values(name, each, batch.column(at)) for at, each in enumerate(names)]
    rows: list[dict[str, Any] | ValueError] = []
    for row in zip(*values, strict=True):
        wrong = next((value for value in row if isinstance(value, ValueError)), None)
        rows.append(dict(zip(names, row)) if wrong is None else wrong)
    return rows


def dicts(table: Any, name: str) -> list[dict[str, Any]]:
    """Return the rows of a table as dicts. Raises ValueError for a value that Python does not hold."""
    rows: list[dict[str, Any]] = []
    for batch in table.to_batches():
        for row in rows_of(batch, name):
            if isinstance(row, ValueError):
                raise row
            rows.append(row)
    return rows


def values_of(column: Any, name: str, path: str) -> list[Any]:
    """Return the values of a column as :func:`dicts` has them. Raises ValueError for one that Python does not hold."""
    values = [value for chunk in column.chunks for value in _values(name, path, chunk)]
    if ValueError in set(map(type, values)):
        raise next(value for value in values if isinstance(value, ValueError))
    return values


@functools.lru_cache(1_000)
def _say_cut(file: str, name: str, kind: str) -> None:
    _log.warning("%s: the column %r is %s; its nanoseconds are cut to microseconds", file, name, kind)


def _values(file: str, name: str, column: Any) -> list[Any]:
    if (numbers := numbers_of(column)) is not None:
        return numbers
    pa, kind = places.arrow(), _in_microseconds(column.type)
    try:
        if kind.equals(column.type):
            return list(column.to_pylist())
        cut = column.cast(kind, safe=False)
        if not cut.cast(column.type, safe=False).equals(column):
            _say_cut(file, name, str(column.type))
        return list(cut.to_pylist())
    except (pa.ArrowException, ValueError, OverflowError) as error:
        if len(column) == 1:
            return [ValueError(f"the column {name!r} is {column.type}, and Python has no such value: {error}")]
    return [value for at in range(len(column)) for value in _values(file, name, column.slice(at, 1))]


def _in_microseconds(kind: Any) -> Any:
    """Return a type with microseconds in the place of nanoseconds, also inside of lists and structs."""
    pa = places.arrow()
    kinds = pa.types
    if kinds.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if kinds.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if kinds.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if kinds.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    if kinds.is_struct(kind):
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    return kind


def runs_of(messages: Any, joined: bool) -> Iterator[Any]:
    """Yield what a sink is given as lists of dicts, and tables of Arrow; ``joined``: all messages in one."""
    runs: list[Any]
    if isinstance(messages, dict):
        runs = [[messages]]
    elif hasattr(messages, "__arrow_c_stream__"):
        runs = [places.arrow().table(messages)]
    else:
        runs = list(messages.runs()) if hasattr(messages, "runs") else [list(messages)]
    schemas = [None if isinstance(run, list) else run.schema for run in runs]
    if joined and len(runs) > 1 and (None in schemas or any(schema != schemas[0] for schema in schemas)):
        runs = [[row for run in runs for row in (run if isinstance(run, list) else dicts(run, "a message"))]]
    elif len(runs) > 1 and None not in schemas and all(schema == schemas[0] for schema in schemas):
        runs = [places.arrow().concat_tables(runs)]
    yield from runs
