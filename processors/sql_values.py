"""Values in columns of databases: the same value, a plainer form of it, or an error that names the column.

    column      takes
    integer     int; a float without a fraction
    float       float; an int that a float holds. A column of four bytes takes the nearest number
    decimal     Decimal, int, and a float by its shortest digits, if the column has the digits
    boolean     bool
    text        text; a UUID, Decimal, date or time as text; a list or a dict as JSON
    bytes       bytes
    timestamp   a datetime: with a zone if the column has one (the same instant), without one if it has none
    date, time  a date; a time, with an offset if the column has one
    uuid        UUID, or its text
    json        each value that JSON has, text too: ``"5"`` is text, and ``5`` a number
    a list      a list of values that its items take; in DuckDB a struct or a map likewise
    others      text, lists and dicts as JSON, and a timedelta for an interval, as the database reads them

None is NULL everywhere. A database casts, rounds and cuts without a word, and takes a datetime without a zone for one
of its own zone; so each value is checked here before the database sees it. The rules of single values are those of
columns in files (:mod:`cues.processors.columns`).

In MySQL and MariaDB a TIMESTAMP has a zone, a DATETIME has none. A time may also be a timedelta, a bit field an int or
bytes. NaN and infinity, blanks at the end of a CHAR, and NULL in a column that is NOT NULL are refused.

No text of PostgreSQL has the sign NUL.

SQLite has no type for decimals, times, UUIDs and JSON: they are text there. It makes a number of text that looks like
one in a column of numbers: a decimal of at most 15 digits is written so, and other text is refused. With columns= as a
list of names, a column of SQLite takes each value as the type of the value.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

from cues import jsontext
from cues.processors import column_texts, columns, databases, places
from cues.processors.columns import WRONG

_SQLITE_DIGITS_MAX: Final = 15
"""Digits up to which SQLite keeps a decimal that it makes a number of."""


class Kind(NamedTuple):
    """The type of a column: its family (or the database's own name), the dialect, and the exact type."""

    family: str
    dialect: str
    type: str

    @property
    def item(self) -> Kind | None:
        """The kind of the items, if this is a list."""
        inner = re.sub(r"\[\d*\]$", "", self.type)
        return None if inner == self.type else kind_of("", inner, self.dialect)

    @property
    def has_zone(self) -> bool:
        if self.dialect == "mysql":
            return self.type.startswith("timestamp")
        return "with time zone" in self.type or self.type.startswith(("timestamptz", "timetz"))

    @property
    def microseconds(self) -> int:
        """The unit of times, in microseconds."""
        if digits := re.search(r"\((\d)\)", self.type):
            return int(10 ** (6 - int(digits[1])))
        return {"s": 1_000_000, "ms": 1_000}.get(self.type.rpartition("_")[2], 1)


@functools.lru_cache
def kind_of(declared: str, type: str, dialect: str) -> Kind:
    """Return the kind of a column that was declared as a family, or as none (``""``), and that has a type."""
    own = "" if dialect == "sqlite" else type if type.endswith("]") else databases.family_of(type)
    return Kind(declared or own, dialect, type)


def kept(value: Any, kind: Kind) -> Any:
    """Return a value as the driver takes it. Raises ValueError for one that the column would change or refuse."""
    sent = value = columns.plain(value)
    if value is not None:
        value = _fitted(value, kind)
    if value is not None and value is not WRONG and kind.dialect == "sqlite" and _converts(value, kind.type, sent):
        value = WRONG
    if value is WRONG or _has_nul(value, kind):
        raise ValueError(f"is {kind.type}, and does not hold {type(sent).__name__} {sent!r:.60} as it is")
    return value


def kept_all(values: Sequence[Any], kind: Kind) -> Sequence[Any]:
    """Return the values of a column as :func:`kept` returns each. They stay as they are where no value can change."""
    plain, stays = _STAYS.get(kind.family, (type(None), _all))
    if set(map(type, values)) <= {plain, type(None)}:
        there = [value for value in values if value is not None]
        if not there or (stays(there, kind) and (kind.dialect != "sqlite" or not _converts_any(plain, kind.type))):
            return values
    return [kept(value, kind) for value in values]


def _all(values: list[Any], kind: Kind) -> bool:
    return True


def _fitted(value: Any, kind: Kind) -> Any:
    sqlite = kind.dialect == "sqlite"
    family = kind.family or _natural(value) if sqlite else kind.family
    if fit := _FITS_OF.get(kind.dialect, _FITS).get(family):
        return fit(value, kind)
    if kind.dialect == "mysql" and (fit := _MYSQL_FITS.get(re.split(r"\W", family)[0])):
        return fit(value, kind)
    if item := kind.item:
        return [kept(each, item) for each in value] if isinstance(value, (list, tuple)) else WRONG
    if kind.dialect == "duckdb" and family.startswith(("struct(", "map(")):
        return _members(value, kind) if isinstance(value, dict) else WRONG
    if isinstance(value, (dict, list, tuple)):
        return jsontext.encode(value)
    return value if isinstance(value, timedelta if family.startswith("interval") else str) else WRONG


def _members(value: dict[Any, Any], kind: Kind) -> Any:
    """A struct or a map of DuckDB, by its members."""
    found = databases.duckdb_module().sqltype(kind.type).children
    members = {name: kind_of("", str(part).lower(), kind.dialect) for name, part in found}
    if kind.type.startswith("map("):
        return {
            "key": [kept(key, members["key"]) for key in value],
            "value": [kept(item, members["value"]) for item in value.values()],
        }
    if not all(isinstance(name, str) and name.lower() in members for name in value):
        return WRONG
    return {name: kept(item, members[name.lower()]) for name, item in value.items()}


def _integer(value: Any, kind: Kind) -> Any:
    bits = 128 if "huge" in kind.type and kind.dialect == "duckdb" else 64
    signed = kind.type[0] != "u" if kind.dialect == "duckdb" else "unsigned" not in kind.type
    return columns.whole(value, -(1 << bits - 1) if signed else 0, 1 << bits - signed)


def _float(value: Any, kind: Kind) -> Any:
    return columns.floating(value, 32 if _is_short(kind) else 64)


def _is_short(kind: Kind) -> bool:
    return bool(re.match(r"(real|float4|float)( unsigned)?$", kind.type))


def _decimal(value: Any, kind: Kind) -> Any:
    number, digits = columns.number(value), databases.digits_of(kind.type)
    return number if digits is None or number is WRONG or databases.holds_digits(number, *digits) else WRONG


def _text(value: Any, kind: Kind) -> Any:
    if isinstance(value, (dict, list, tuple)):
        return jsontext.encode(value)
    text = value if isinstance(value, str) else _plain_text(value)
    length = _length(kind)
    return WRONG if length and text is not WRONG and len(text) > length else text


def _has_nul(value: Any, kind: Kind) -> bool:
    """Return whether a text has the sign that no text of PostgreSQL has."""
    return kind.dialect == "postgresql" and isinstance(value, str) and "\0" in value


def _json(value: Any, kind: Kind) -> Any:
    text = jsontext.encode(value)
    return WRONG if kind.dialect == "postgresql" and re.search(r"(?<!\\)(\\\\)*\\u0000", text) else text


def _length(kind: Kind) -> int:
    """The most characters of a column of PostgreSQL, which cuts blanks beyond them; 0: there is no limit."""
    found = re.search(r"char(?:acter varying|acter)?\((\d+)\)", kind.type) if kind.dialect == "postgresql" else None
    return int(found[1]) if found else 0


def _plain_text(value: Any) -> Any:
    return jsontext.text_of(value) if isinstance(value, (date, time, Decimal, UUID)) else WRONG


def _uuid(value: Any, kind: Kind) -> Any:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", value):
        value = UUID(value)
    return value if isinstance(value, UUID) else WRONG


def _only(*types: type) -> Callable[[Any, Kind], Any]:
    return lambda value, kind: value if isinstance(value, types) else WRONG


Fit = Callable[[Any, Kind], Any]
_FITS: Final[dict[str, Fit]] = {
    "integer": _integer,
    "float": _float,
    "decimal": _decimal,
    "boolean": _only(bool),
    "text": _text,
    "bytes": _only(bytes, bytearray),
    "timestamp": lambda value, kind: columns.instant(value, kind.has_zone, kind.microseconds),
    "date": lambda value, kind: columns.day(value),
    "time": lambda value, kind: columns.clock(value, kind.has_zone, kind.microseconds),
    "uuid": _uuid,
    "json": _json,
}

_STAYS: Final[dict[str, tuple[type, Callable[[list[Any], Kind], bool]]]] = {
    "integer": (int, lambda values, kind: WRONG not in (_integer(min(values), kind), _integer(max(values), kind))),
    "float": (
        float,
        lambda values, kind: (
            not any(map(math.isnan, values))
            if kind.dialect == "sqlite"
            else kind.dialect != "mysql" and not _is_short(kind)
        ),
    ),
    "boolean": (bool, _all),
    "text": (
        str,
        lambda values, kind: (
            not _length(kind) and kind.dialect != "mysql" and not any(_has_nul(text, kind) for text in values)
        ),
    ),
    "bytes": (bytes, lambda values, kind: kind.dialect != "mysql"),
    "date": (date, lambda values, kind: kind.dialect != "sqlite"),
    "timestamp": (
        datetime,
        lambda values, kind: (
            kind.dialect != "sqlite"
            and not kind.has_zone
            and kind.microseconds == 1
            and all(v.tzinfo is None and not v.fold for v in values)
        ),
    ),
}
"""The type of Python whose values a family takes as they are, and whether it takes all of some."""


# --- columns of Arrow -----------------------------------------------------------------------------


def as_column(column: Any, kind: Kind) -> Any:
    """Return a column of Arrow in the type whose values are one to one those of a column of PostgreSQL or DuckDB.

    None: the values need a look, each by :func:`kept`.
    """
    pa = places.arrow()
    types, found, wanted = pa.types, column.type, arrow_type(kind)
    if types.is_dictionary(found):
        column, found = column.cast(found.value_type), found.value_type
    if kind.family == "decimal" and types.is_decimal128(found) and found.scale >= 0:
        digits, scale = databases.digits_of(kind.type) or (found.precision, found.scale)
        fits = found.scale <= scale and found.precision - found.scale <= digits - scale
        return column.cast(pa.decimal128(digits, scale)) if fits and digits <= 38 else None
    if wanted is None:
        return None
    same = (
        found.equals(wanted)
        or (types.is_int64(wanted) and types.is_integer(found) and not types.is_uint64(found))
        or (types.is_float64(wanted) and types.is_float32(found))
        or (types.is_string(wanted) and found in (pa.large_string(), pa.string_view()))
        or (types.is_binary(wanted) and found in (pa.large_binary(), pa.binary_view()))
        or (types.is_timestamp(wanted) and _is_same_time(column, wanted))
    )
    if same and kind.dialect == "postgresql" and types.is_string(wanted):
        same = not any(b"\0" in column_texts.joined(chunk.cast(wanted)) for chunk in column.chunks)
    return column.cast(wanted) if same else None


def arrow_type(kind: Kind) -> Any:
    """Return the type of Arrow that has all values of a column of PostgreSQL or DuckDB, and no others; None without."""
    pa = places.arrow()
    if kind.family == "decimal":
        digits, scale = databases.digits_of(kind.type) or (0, 0)
        return pa.decimal128(digits, scale) if 0 < digits <= 38 and 0 <= scale <= digits else None
    name = next((name for name, pattern in _ARROW.items() if re.fullmatch(pattern, kind.type)), None)
    if name is None or databases.family_of(kind.type) != kind.family:
        return None
    return pa.timestamp("us", "UTC") if name == "instant" else pa.type_for_alias(name)


_ARROW: Final = {
    "int64": "u?(tinyint|smallint|integer)|bigint",
    "float64": "double( precision)?",
    "bool": "boolean",
    "string": "text|varchar|character varying",
    "binary": "bytea|blob",
    "date32": "date",
    "time64[us]": "time( without time zone)?",
    "timestamp[us]": "timestamp( without time zone)?",
    "instant": "timestamp with time zone",
}
"""Types of Arrow, and the types of PostgreSQL and DuckDB that have the same values."""

_READ: Final = r"^(character varying|character|timestamp|time)\(\d+\)"


def read_type(type: str, dialect: str) -> Any:
    """Return the type of Arrow with the values of a column that is read, as the driver has them; None if it has none.

    A column of SQLite has values of any type: what is returned is that of a column that is NULL everywhere.
    """
    if dialect != "sqlite":
        limited = re.sub(_READ, lambda found: "text" if found[1][0] == "c" else found[1], type)
        return arrow_type(kind_of("", limited, dialect))
    kinds = {"integer": "int64", "float": "float64", "text": "string", "bytes": "binary"}
    return places.arrow().type_for_alias(kinds.get(databases.family_of(type), "string"))


_DAY_US: Final = 86_400_000_000
_FIRST_US: Final = -62_135_596_800_000_000
_LAST_US: Final = 253_402_300_799_999_999


def _is_same_time(column: Any, wanted: Any) -> bool:
    """Return whether a column of times has those of another type: zones have no times of the first and last day."""
    pa = places.arrow()
    found = column.type
    if not pa.types.is_timestamp(found) or found.unit == "ns" or (found.tz is None) != (wanted.tz is None):
        return False
    if found.tz in (None, "UTC"):
        return True
    from pyarrow import compute

    ends = compute.min_max(column.cast(pa.timestamp("us", found.tz)).cast(pa.int64())).as_py()
    return ends["min"] is None or (ends["min"] >= _FIRST_US + _DAY_US and ends["max"] <= _LAST_US - _DAY_US)


# --- SQLite -------------------------------------------------------------------------------------


def _as_text(fit: Fit) -> Fit:
    def text(value: Any, kind: Kind) -> Any:
        found = fit(value, kind)
        # As SQLite's own functions write a datetime: with a blank in the place of the T.
        return found if found is WRONG else _plain_text(found).replace("T", " ")

    return text


_SQLITE_FITS: Final[dict[str, Fit]] = {
    **_FITS,
    "float": lambda value, kind: WRONG if value != value else columns.floating(value, 64),  # NaN would be NULL
    "decimal": _as_text(_decimal),
    "timestamp": _as_text(_only(datetime)),
    "date": _as_text(lambda value, kind: columns.day(value)),
    "time": _as_text(_only(time)),
    "uuid": _as_text(_uuid),
}


# --- MySQL --------------------------------------------------------------------------------------


def _mysql_float(value: Any, kind: Kind) -> Any:
    # A column such as float(7,2) rounds.
    found: Any = WRONG if "," in kind.type else _float(value, kind)
    return found if found is not WRONG and math.isfinite(found) else WRONG


def _mysql_text(value: Any, kind: Kind) -> Any:
    """Text as it is: beyond the end MySQL cuts blanks also in strict mode, and a CHAR has none at its end."""
    text = _text(value, kind)
    if text is WRONG:
        return WRONG
    if size := _MYSQL_BYTES_MAX.get(kind.type):
        return text if len(text) * 4 <= size or len(text.encode()) <= size else WRONG
    length = re.match(r"(var)?char\((\d+)\)", kind.type)
    is_cut = length is not None and (len(text) > int(length[2]) or (not length[1] and text.endswith(" ")))
    return WRONG if is_cut else text


def _mysql_bytes(value: Any, kind: Kind) -> Any:
    """Bytes as they are: a BINARY adds zeros."""
    length = re.match(r"binary\((\d+)\)", kind.type)
    fits = isinstance(value, (bytes, bytearray)) and (length is None or len(value) == int(length[1]))
    return value if fits else WRONG


def _mysql_time(value: Any, kind: Kind) -> Any:
    """A time, or a timedelta as text, which the driver writes wrongly if it is negative."""
    if not isinstance(value, timedelta):
        return columns.clock(value, False, kind.microseconds)
    whole = abs(value) // timedelta(microseconds=1)
    if whole % kind.microseconds or whole >= 839 * 3_600_000_000:
        return WRONG
    minutes, rest = divmod(whole, 60_000_000)
    sign = "-" if value < timedelta() else ""
    return f"{sign}{minutes // 60:02}:{minutes % 60:02}:{rest // 1_000_000:02}.{rest % 1_000_000:06}"


def _mysql_bit(value: Any, kind: Kind) -> Any:
    if isinstance(value, (bytes, bytearray)):
        value = int.from_bytes(value)
    size = int(re.sub(r"\D", "", kind.type) or 1)
    return int(value) if isinstance(value, int) and 0 <= value < 1 << size else WRONG


def _mysql_year(value: Any, kind: Kind) -> Any:
    return value if value == 0 else columns.whole(value, 1901, 2156)  # it takes 26 for 2026


def _members_of(type: str) -> list[str]:
    """Return the members of an ENUM or a SET, which the server shows as literals."""
    return [
        re.sub(r"\\(.)|''", lambda found: _ESCAPES.get(found[1], found[1]) if found[1] else "'", member)
        for member in re.findall(r"'((?:''|\\.|[^'\\])*)'", type)
    ]


def _mysql_enum(value: Any, kind: Kind) -> Any:
    """Exactly a member: MySQL takes the number of one also as a text, and another case or blanks at the end."""
    return value if isinstance(value, str) and value in _members_of(kind.type) else WRONG


def _mysql_set(value: Any, kind: Kind) -> Any:
    """Members in their order, none twice, with commas."""
    if not isinstance(value, str):
        return WRONG
    named = value.split(",") if value else []
    return value if named == [member for member in _members_of(kind.type) if member in named] else WRONG


_ESCAPES: Final = {"n": "\n", "r": "\r", "0": "\0", "t": "\t", "Z": "\x1a"}
_MYSQL_BYTES_MAX: Final = {"tinytext": 255, "text": 65_535, "mediumtext": 16_777_215}
_MYSQL_FITS: Final[dict[str, Fit]] = {
    **_FITS,
    "integer": lambda value, kind: (
        int(value) if isinstance(value, bool) and kind.type.startswith("tinyint(1)") else _integer(value, kind)
    ),
    "float": _mysql_float,
    "text": _mysql_text,
    "bytes": _mysql_bytes,
    "time": _mysql_time,
    "uuid": lambda value, kind: _plain_text(_uuid(value, kind)),
    "bit": _mysql_bit,
    "enum": _mysql_enum,
    "set": _mysql_set,
    "year": _mysql_year,
}
_FITS_OF: Final = {"sqlite": _SQLITE_FITS, "mysql": _MYSQL_FITS}
_NATURAL: Final[tuple[tuple[Any, str], ...]] = (
    (bool, "boolean"), (int, "integer"), (float, "float"), ((bytes, bytearray), "bytes"), (Decimal, "decimal"),
    (datetime, "timestamp"), (date, "date"), (time, "time"), (UUID, "uuid"), ((str, dict, list, tuple), "text"),
)  # fmt: skip
"""The family of a value in a column without a declared one."""


def _natural(value: Any) -> str:
    return next((family for types, family in _NATURAL if isinstance(value, types)), "")


_NUMBER: Final = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.I)


def _converts(value: Any, type: str, sent: Any) -> bool:
    """Return whether SQLite changes a value for the sake of the column's type (its affinity)."""
    if "int" in type or not type or type == "null" or "blob" in type:
        is_text, is_free = False, "int" not in type
    else:
        is_text, is_free = any(part in type for part in ("char", "clob", "text")), False
    if isinstance(value, (int, float)):
        whole = isinstance(value, int) and any(part in type for part in ("real", "floa", "doub")) and "int" not in type
        return is_text or (whole and abs(value) > columns.EXACT_MAX)
    if is_text or is_free or not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return False
    return not isinstance(sent, (Decimal, int, float)) or len(Decimal(value).as_tuple().digits) > _SQLITE_DIGITS_MAX


_PROBES: Final[dict[type, Any]] = {int: 1 << 60, float: 0.5, bool: True, str: "0", bytes: b""}


def _converts_any(plain: type, type: str) -> bool:
    """Return whether SQLite changes some value of a type of Python for the sake of the column's type."""
    return plain not in _PROBES or _converts(_PROBES[plain], type, _PROBES[plain])
