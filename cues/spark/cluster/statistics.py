"""Statistics of a data file, as the log of a Delta table has them: a reader with a filter skips files by them.

    numRecords              rows (directory.py)
    nullCount               by column: rows that are NULL
    minValues, maxValues    by column: its bounds, in the types of JSON

Each bound is right for every reader, or it is left out:

1. A time has milliseconds, as the protocol says; the lower bound is rounded down and the upper one up.
2. A text of more than 32 characters has no bound, because a cut text is not an upper one.
3. A column with NaN or an infinite number has no bounds: JSON does not have these values, and readers order NaN
   differently. Booleans, bytes and decimals have none either, nor times outside of the years 1 to 9999.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

TEXT_LENGTH: Final = 32
"""Characters of the longest text that is a bound. The length is that of Spark's own writer; a delivery hash has it."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Statistics:
    """The statistics of the rows of one file, which come in several tables."""

    def __init__(self) -> None:
        self._nulls: dict[str, int] = {}
        self._ends: dict[str, tuple[Any, Any]] = {}
        """By column: its smallest and its largest value; of times, as numbers."""
        self._types: dict[str, pa.DataType] = {}
        self._without: set[str] = set()
        """The columns that have no bounds."""

    def add(self, table: pa.Table) -> None:
        """Count the rows of a table in. Every table of a file has the same columns."""
        for field, column in zip(table.schema, table.columns):
            name = field.name
            self._types[name] = field.type
            self._nulls[name] = self._nulls.get(name, 0) + column.null_count
            if name in self._without or column.null_count == len(column):
                continue
            if not _has_bounds(column):
                self._without.add(name)
                continue
            ends = pc.min_max(_as_numbers(column)).as_py()
            low, high = self._ends.get(name, (ends["min"], ends["max"]))
            self._ends[name] = min(low, ends["min"]), max(high, ends["max"])

    def bounds(self) -> dict[str, dict[str, Any]]:
        """The statistics of all rows, as in the log."""
        lows: dict[str, Any] = {}
        highs: dict[str, Any] = {}
        for name, (low, high) in self._ends.items():
            if name not in self._without:
                ends = _shown(low, self._types[name], False), _shown(high, self._types[name], True)
                if None not in ends:
                    lows[name], highs[name] = ends
        return {"minValues": lows, "maxValues": highs, "nullCount": self._nulls}


def _has_bounds(column: pa.ChunkedArray) -> bool:
    kind = column.type
    if pa.types.is_floating(kind):
        return bool(pc.all(pc.is_finite(column)).as_py())
    tests = pa.types.is_integer, pa.types.is_string, pa.types.is_timestamp, pa.types.is_date32
    return any(is_one(kind) for is_one in tests)


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
    if isinstance(end, float) and end == 0:
        return 0.0 if is_upper else -0.0  # some readers take -0.0 for the smaller one
    return None if isinstance(end, str) and len(end) > TEXT_LENGTH else end
