"""The filters of a query, as ranges of index, partition and time that leave fewer messages to read.

Spark offers the filters of a batch read that are comparisons of a column with a constant, connected by AND. Those on
an index or a partition are applied here, and Spark does not repeat them. A list of values becomes the range from the
least to the greatest, and Spark applies the list itself. So it does with filters on the time, because a shared
directory skips only row groups whose times are all outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from cues.base import clock

Range = tuple[int, int]
"""The least and the greatest value."""
Bounds = dict[str, Range]
"""The range of each column that has no NULL: index, partition, and time in microseconds."""
ANY: Final[Range] = (-(1 << 63), 1 << 63)


def narrow(bounds: Bounds, filters: Iterable[Filter]) -> Iterator[Filter]:
    """Narrow ``bounds``, and return the filters that Spark must still apply."""
    for one in filters:
        (name, *inside) = getattr(one, "attribute", ("",))
        found = _range(name, one) if name in bounds and not inside else None
        if found is None:
            yield one
            continue
        low, high = bounds[name]
        bounds[name] = max(low, found[0]), min(high, found[1])
        if name == "time" or isinstance(one, In):
            yield one


def _range(name: str, one: Filter) -> Range | None:
    """The values that a filter leaves; None if it is no comparison with values of the column's type."""
    if isinstance(one, IsNotNull):
        return ANY
    given = one.value if isinstance(one, In) else [getattr(one, "value", None)]
    values = [value for value in map(_micros if name == "time" else _integer, given) if value is not None]
    if len(values) < len(given) or not values:
        return None
    least, most = min(values), max(values)
    match one:
        case EqualTo() | EqualNullSafe() | In():
            return least, most
        case GreaterThan():
            return least + 1, ANY[1]
        case GreaterThanOrEqual():
            return least, ANY[1]
        case LessThan():
            return ANY[0], most - 1
        case LessThanOrEqual():
            return ANY[0], most
    return None


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None


def _micros(value: Any) -> int | None:
    aware = isinstance(value, datetime) and value.tzinfo is not None
    return clock.to_ns(value) // 1000 if aware else None
