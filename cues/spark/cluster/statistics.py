"""Statistics of a data file, as the log of a Delta table has them: a reader with a filter skips files by them.

    numRecords              rows (directory.py)
    nullCount               by column: rows that are NULL
    minValues, maxValues    by column: its bounds, in the types of JSON

A file has bounds for each column that is not only NULL, or for none. The datasets of delta-rs for pyarrow take a
missing bound for one that no row meets, and leave the rows of the file out of a filter on the column.

1. A time has milliseconds, as the protocol says; the lower bound is rounded down and the upper one up.
2. A text of more than 32 characters is cut. The upper bound then ends with the last character of Unicode.
3. A decimal becomes a whole number of at most 53 bits, which every reader of JSON keeps; rounded as a time is.
4. A file has no bounds if a column has structs, NaN, an infinite number, a decimal that is too large, or a time outside
   of the years 1 to 9999. JSON does not have these numbers, and readers order NaN differently.

Bytes, lists and maps need no bounds, because no reader of this kind asks for them.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

TEXT_LENGTH: Final = 32
"""Characters of a text that a bound keeps. The length is that of Spark's own writer; a delivery hash has it."""
_LAST: Final = "\U0010ffff"
_EXACT: Final = 1 << 53
"""Whole numbers up to this one are the same as floating-point numbers."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Statistics:
    """The statistics of the rows of one file, which come in several tables."""

    def __init__(self) -> None:
        self._nulls: dict[str, int] = {}
        self._ends: dict[str, tuple[Any, Any]] = {}
        """By column: its smallest and its largest value; of times, as numbers."""
        self._types: dict[str, pa.DataType] = {}
        self._bounded = True

    def add(self, table: pa.Table) -> None:
        """Count the rows of a table in. Every table of a file has the same columns."""
        for field, column in zip(table.schema, table.columns):
            name = field.name
            if pa.types.is_nested(field.type):
                self._bounded &= not pa.types.is_struct(field.type)
                continue
            self._types[name] = kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
            self._nulls[name] = self._nulls.get(name, 0) + column.null_count
            if kind != field.type and column.null_count < len(column):
                used = [chunk.dictionary.take(chunk.indices.unique()) for chunk in column.chunks]
                column = pa.chunked_array(used, kind)
            if pa.types.is_binary(field.type) or column.null_count == len(column):
                continue
            self._bounded = self._bounded and _has_bounds(column)
            if self._bounded:
                ends = pc.min_max(_as_numbers(column)).as_py()
                low, high = self._ends.get(name, (ends["min"], ends["max"]))
                self._ends[name] = min(low, ends["min"]), max(high, ends["max"])

    def bounds(self) -> dict[str, dict[str, Any]]:
        """The statistics of all rows, as in the log."""
        nulls = {"nullCount": self._nulls}
        lows = {name: _shown(low, self._types[name], False) for name, (low, _) in self._ends.items()}
        highs = {name: _shown(high, self._types[name], True) for name, (_, high) in self._ends.items()}
        if not self._bounded or None in (*lows.values(), *highs.values()):
            return nulls
        return {"minValues": lows, "maxValues": highs, **nulls}


def _has_bounds(column: pa.ChunkedArray) -> bool:
    return not pa.types.is_floating(column.type) or bool(pc.all(pc.is_finite(column)).as_py())


def _as_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column; of times and dates their numbers, because Python's types do not have all of them."""
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
    return column.cast(pa.int32()) if pa.types.is_date32(column.type) else column


def _shown(end: Any, kind: pa.DataType, is_upper: bool) -> Any:
    """A bound as JSON has it; None if it cannot be one."""
    try:
        if pa.types.is_timestamp(kind):
            time = _EPOCH + timedelta(milliseconds=-(-end // 1000) if is_upper else end // 1000)
            return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if pa.types.is_date32(kind):
            return (_EPOCH + timedelta(days=end)).date().isoformat()
    except OverflowError:
        return None
    if isinstance(end, Decimal):
        whole = math.ceil(end) if is_upper else math.floor(end)
        return whole if abs(whole) < min(_EXACT, 10 ** (kind.precision - kind.scale)) else None
    if isinstance(end, float) and end == 0:
        return 0.0 if is_upper else -0.0  # some readers take -0.0 for the smaller one
    return _cut(end, is_upper) if isinstance(end, str) else end


def _cut(text: str, is_upper: bool) -> str:
    """A short text that is not after a text, or not before it."""
    length = TEXT_LENGTH
    while is_upper and text[length : length + 1] == _LAST:
        length += 1
    return text if len(text) <= length else text[:length] + (_LAST if is_upper else "")
