"""Columns as numpy arrays, with the values that the messages of the rows have; or :class:`RowByRow`.

    groups       the rows of each key
    times        event times in microseconds
    marks        the watermark after each row
    numbers      the numbers of a field, and which rows have one
    add_to       ordered sums: those of the same additions one after another, bit by bit

A function that gets columns (``by_columns``) may refuse them, and then gets messages. So each of these refuses what it
does not hold exactly: a null in a key or a time, types of columns that it does not know, NaN, integers whose sums might
pass 64 bits. pyarrow and numpy are imported at the first columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

NEVER: Final = -(1 << 63)
"""The watermark before there is one."""
BEYOND: Final = 1 << 60
"""Longer durations, in microseconds, are not computed with."""
ROWS_FEW = 24
"""Fewer rows are called one by one: a call with columns costs about as much as so many calls."""
RESULTS_FEW = 64
"""Fewer results of a step are written as messages: a record of columns takes a page at least."""
_SECOND_US: Final = 10**6
_FIRST_S: Final = -62_135_596_800
_LAST_S: Final = 253_402_300_799
_GROUPS_MORE: Final = 4
"""Groups are numbered by a table of all pairs, if it is at most so many times as long as the rows."""


class RowByRow(Exception):
    """Raised for columns whose messages must be called one by one. It is never seen by a user."""


def refuse(columns: Any, kind: str) -> None:
    """Refuse columns of few rows, and columns with messages of this type."""
    if len(columns) < ROWS_FEW:
        raise RowByRow
    types = columns.column("q/type")
    if types is not None:
        import pyarrow.compute as pc

        if pc.any(pc.equal(types, kind)).as_py():
            raise RowByRow


def groups(columns: Any, names: Sequence[str]) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return the number of each row's group, as int64, and the values of each group by its number."""
    import numpy as np

    codes = np.zeros(len(columns), np.int64)
    keys: list[tuple[Any, ...]] = [()]
    for name in names:
        own, values = _groups_of(columns, name)
        if len(keys) == 1:
            codes, keys = own, [(*keys[0], value) for value in values]
            continue
        codes, pairs = compact(codes * len(values) + own, len(keys) * len(values))
        keys = [(*keys[pair // len(values)], values[pair % len(values)]) for pair in pairs.tolist()]
    return codes, keys


def _groups_of(columns: Any, name: str) -> tuple[Any, list[Any]]:
    import numpy as np
    import pyarrow as pa

    column = columns.column(name)
    types = pa.types
    if column is None:
        raise RowByRow
    kind = column.type
    if types.is_dictionary(kind) and types.is_string(kind.value_type):
        column = column.cast(kind.value_type)
    elif types.is_string_view(kind):
        column = column.cast(pa.large_string())
    elif not (types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind) or types.is_boolean(kind)):
        raise RowByRow
    if column.null_count:
        raise RowByRow
    encoded = column.dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def compact(codes: Any, count: int) -> tuple[Any, Any]:
    """Return codes below ``count`` numbered anew without gaps, and the former code of each number, in order."""
    import numpy as np

    if count > _GROUPS_MORE * len(codes) + 1_000:
        found, numbers = np.unique(codes, return_inverse=True)
        return numbers, found
    there = np.zeros(count, bool)
    there[codes] = True
    found = np.flatnonzero(there)
    numbers = np.empty(count, np.int64)
    numbers[found] = np.arange(len(found))
    return numbers[codes], found


def times(columns: Any, name: str) -> Any:
    """Return the event times of the rows in microseconds, as int64."""
    import numpy as np
    import pyarrow as pa

    column = columns.column(name)
    if column is None or column.null_count or not len(column):
        raise RowByRow
    kind, types = column.type, pa.types
    if types.is_timestamp(kind) and kind.tz in (None, "UTC", "+00:00"):
        # As the messages have them: nanoseconds are cut.
        return column.cast(pa.timestamp("us", kind.tz), safe=False).view(pa.int64()).to_numpy(zero_copy_only=False)
    if not (types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)):
        raise RowByRow
    seconds = column.to_numpy(zero_copy_only=False)
    if seconds.dtype.kind == "f":
        seconds = seconds.astype(np.float64)
        if not (seconds.min() * _SECOND_US >= _FIRST_S * _SECOND_US and seconds.max() <= _LAST_S):
            raise RowByRow
        return np.rint(seconds * _SECOND_US).astype(np.int64)
    if not _FIRST_S <= int(seconds.min()) <= int(seconds.max()) <= _LAST_S:
        raise RowByRow
    return seconds.astype(np.int64) * _SECOND_US


def marks(times: Any, top: int | None, delay: int, others: int | None, mark: int | None) -> Any:
    """Return the watermark before each row, and after the last one.

    ``top``: the greatest time of the input before; ``others``: the watermark of the other inputs, None if one has sent
    nothing; ``mark``: the watermark before. None is :data:`NEVER`.
    """
    import numpy as np

    if delay > BEYOND:
        raise RowByRow
    found = np.full(len(times) + 1, NEVER if mark is None else mark, np.int64)
    if others is None:
        return found
    tops = np.maximum.accumulate(times if top is None else np.concatenate(([top], times)))
    # Only a new top moves the watermark.
    moves = tops[1:] > tops[:-1] if top is not None else np.concatenate(([True], tops[1:] > tops[:-1]))
    own = np.minimum(tops[-len(times) :] - delay, others)
    found[1:] = np.where(moves, own, NEVER)
    if mark is not None:
        np.maximum(found, mark, out=found)
    return np.maximum.accumulate(found)


def first_at(marks: Any, reached: list[int]) -> list[int]:
    """Return the offset of the first row whose watermark reaches each of these."""
    import numpy as np

    return np.searchsorted(marks, np.array(reached, np.int64)).tolist()  # type: ignore[no-any-return]


def numbers(columns: Any, name: str) -> tuple[Any, Any]:
    """Return the values of a field as int64 or float64, and the offsets of the rows that have one (None: all have)."""
    import numpy as np
    import pyarrow as pa

    column = columns.column(name)
    if column is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    kind, types = column.type, pa.types
    there = None
    if column.null_count:
        there = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        column = column.drop_null()
    if types.is_null(kind):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if types.is_integer(kind) and not types.is_uint64(kind):
        return column.to_numpy(zero_copy_only=False).astype(np.int64), there
    if types.is_float32(kind) or types.is_float64(kind):
        values = column.to_numpy(zero_copy_only=False).astype(np.float64)
        if np.isnan(values).any():
            raise RowByRow
        return values, there
    raise RowByRow


def add_to(starts: list[Any], values: Any, codes: Any) -> list[Any]:
    """Return the sums of each group: ``starts`` of it, and then its values one after another.

    Sums of floats are those of this order. Integers are exact.
    """
    import numpy as np

    if values.dtype.kind == "f":
        if any(type(start) not in (int, float) for start in starts):
            raise RowByRow
        sums = np.array([float(start) for start in starts], np.float64)
        with np.errstate(all="ignore"):
            np.add.at(sums, codes, values)
        return sums.tolist()  # type: ignore[no-any-return]
    if any(type(start) is not int for start in starts):
        raise RowByRow
    if len(values) and max(-int(values.min()), int(values.max())) * len(values) >= 1 << 63:
        raise RowByRow
    sums = np.zeros(len(starts), np.int64)
    np.add.at(sums, codes, values)
    return [start + added for start, added in zip(starts, sums.tolist())]


def least(values: Any, codes: Any, count: int, greatest: bool = False) -> list[Any]:
    """Return the smallest value of each of ``count`` groups, or the greatest. A group needs a value."""
    import numpy as np

    if values.dtype.kind == "f":
        if (np.signbit(values) & (values == 0)).any():  # -0.0 and 0.0 are equal, and the first one is the result
            raise RowByRow
        limit: Any = -np.inf if greatest else np.inf
    else:
        limits = np.iinfo(np.int64)
        limit = limits.min if greatest else limits.max
    found = np.full(count, limit, values.dtype)
    (np.maximum if greatest else np.minimum).at(found, codes, values)
    return found.tolist()  # type: ignore[no-any-return]


def counts(codes: Any, count: int) -> list[int]:
    """Return the number of rows of each of ``count`` groups."""
    import numpy as np

    return np.bincount(codes, minlength=count).tolist()  # type: ignore[no-any-return]


def present(columns: Any, name: str) -> Any:
    """Return the offsets of the rows that have a value of a field; None: all have."""
    import numpy as np
    import pyarrow as pa

    column = columns.column(name)
    if column is None:
        return np.zeros(0, np.int64)
    if column.type.num_fields or pa.types.is_dictionary(column.type):  # its values may have nulls too
        return np.array([at for at, value in enumerate(columns.values(name)) if value is not None], np.int64)
    return np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)) if column.null_count else None


def chosen(values: Any, there: Any, rows: Any, codes: Any, count: int) -> tuple[Any, Any]:
    """Return the values and the groups of those of ``rows`` that have a value.

    ``values``: of the rows ``there`` (None: of all ``count`` rows); None: only the groups are asked for. ``codes``: the
    groups of ``rows`` (None: of all).
    """
    import numpy as np

    if type(rows) is range:
        rows = np.arange(rows.start, rows.stop)
    if there is None:
        return values if rows is None or values is None else values[rows], codes
    if rows is None:
        return values, codes[there]
    places = np.full(count, -1, np.int64)
    places[there] = np.arange(len(there))
    places = places[rows]
    has = places >= 0
    return None if values is None else values[places[has]], codes[has]


def windows(times: Any, marks: Any, size: int, every: int, offset: int) -> tuple[Any, Any, tuple[Any, Any]]:
    """Return the windows of rows: their ends, the offset of the row of each, and what rows missed.

    The offsets ascend; they are None if each row is in one window, which is at the place of the row. ``marks``: the
    watermark before each row. Rows that missed windows: their offsets, and the end of each window that was missed.
    """
    import numpy as np

    last = times - (times - offset) % every + size
    if size == every:
        missed = last <= marks
        late = np.flatnonzero(missed)
        if not len(late):
            return last, None, (late, late)
        rows = np.flatnonzero(~missed)
        return last[rows], rows, (late, last[late])
    steps = np.arange(-(-size // every) - 1, -1, -1) * every
    ends = (last[:, None] - steps).ravel()  # of a row, the earliest first
    rows = np.repeat(np.arange(len(times)), len(steps))
    within = ends > times[rows]
    ends, rows = ends[within], rows[within]
    missed = ends <= marks[rows]
    return ends[~missed], rows[~missed], (rows[missed], ends[missed])


def following(times: Any, marks: Any, every: int) -> Any:
    """Return the first multiple of ``every`` after the watermark of each row; without one, after its time."""
    import numpy as np

    now = np.where(marks == NEVER, times, marks)
    return now - now % every + every


def runs(values: Any) -> list[tuple[int, int]]:
    """Return the bounds of the runs of equal values."""
    import numpy as np

    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return list(itertools.pairwise(edges))


def table(columns: Any, names: Sequence[str], results: dict[str, list[Any]]) -> Any:
    """Return a ``pyarrow.Table`` with columns of the rows, and results for each row, if it holds them exactly."""
    import pyarrow as pa

    if any(list in set(map(type, some)) for some in results.values()):  # it may be a state, which has changed since
        raise RowByRow
    return pa.table({name: columns.table.column(name) for name in names} | _arrays(results))


def table_of(keys: dict[str, list[Any]], moments: dict[str, list[int]], results: dict[str, list[Any]]) -> Any:
    """Return a ``pyarrow.Table`` of keys, times in microseconds, and results, if it holds them exactly."""
    import pyarrow as pa

    if any(min(some) < _FIRST_S * _SECOND_US or max(some) > _LAST_S * _SECOND_US for some in moments.values()):
        raise RowByRow
    kind = pa.timestamp("us", "UTC")
    times = {name: pa.array(some, pa.int64()).view(kind) for name, some in moments.items()}
    return pa.table(_arrays(keys) | times | _arrays(results))


def _arrays(values: dict[str, list[Any]]) -> dict[str, Any]:
    import pyarrow as pa

    for some in values.values():
        kinds = set(map(type, some)) - {type(None)}
        if kinds == {list} and None not in some:
            kinds = set(map(type, itertools.chain.from_iterable(some))) or kinds
        if len(kinds) > 1 or not kinds <= {int, float, str, bool}:
            raise RowByRow
    return {name: pa.array(some) for name, some in values.items()}


def last_rows(codes: Any, count: int) -> list[int]:
    """Return the offset of the last row of each of ``count`` groups."""
    import numpy as np

    last = np.zeros(count, np.int64)
    np.maximum.at(last, codes, np.arange(len(codes)))
    return last.tolist()


def zeros(columns: Any) -> Any:
    """Return a time of 0 for each row."""
    import numpy as np

    return np.zeros(len(columns), np.int64)


def first_rows(codes: Any, count: int) -> list[int]:
    """Return the offset of the first row of each of ``count`` groups."""
    import numpy as np

    first = np.full(count, len(codes), np.int64)
    np.minimum.at(first, codes, np.arange(len(codes)))
    return first.tolist()


def ends(times: Any, marks: Any, within: int | None) -> tuple[list[int] | None, Any]:
    """Return when a window that begins at each row ends, and the offset of the row whose watermark reaches that.

    It is the number of rows if none does. ``within``: None if windows do not end by time.
    """
    import numpy as np

    if within is None:
        return None, np.full(len(times), len(times), np.int64)
    dues = np.maximum(times, marks[:-1]) + within
    return dues.tolist(), np.searchsorted(marks[1:], dues)


def reached(marks: Any, due: int | None) -> int:
    """Return the offset of the first row whose watermark reaches a time, which may be None; the number if none does."""
    return len(marks) - 1 if due is None else int(marks[1:].searchsorted(due))


def numbered(
    codes: Any, rooms: list[int], size: int, until: Any, firsts: list[int]
) -> tuple[Any, list[tuple[int, int, int, bool]]]:
    """Number windows of up to ``size`` rows of a group, each of which may end earlier: after the row ``until``.

    ``until``: for a window that begins at a row, at least this row. The first window of a group has room for ``rooms``
    of it; if it has begun earlier, it ends after the row in ``firsts``, which is at least the first one of the group;
    else there is -1. Return the window of each row; and of each window, by group, the group, the first row, the last
    one, and whether it is full.
    """
    import numpy as np

    count = len(codes)
    order = np.argsort(codes, kind="stable")
    groups, begun = codes[order], np.array(firsts, np.int64)
    heads = np.searchsorted(groups, np.arange(len(rooms)))
    room = np.full(count, size, np.int64)
    room[heads] = rooms
    last = until[order]
    last[heads] = np.where(begun < 0, last[heads], begun)
    # The place after the last row of a window that begins at each place: full, of its group, and until its row.
    after = np.searchsorted(groups * (count + 1) + order, groups * (count + 1) + last, side="right")
    after = np.minimum(after, np.arange(count) + room)
    starts, following, place = [], after.tolist(), 0
    while place < count:
        starts.append(place)
        place = following[place]
    begins, after = np.array(starts), after[starts]
    windows = np.empty(count, np.int64)
    windows[order] = np.repeat(np.arange(len(starts)), after - begins)
    full = after - begins == room[begins]
    found = zip(groups[begins].tolist(), order[begins].tolist(), order[after - 1].tolist(), full.tolist())
    return windows, list(found)


def bounds(values: Any, codes: Any, count: int) -> tuple[list[int], list[int]]:
    """Return the smallest and the greatest of the integers of each of ``count`` groups."""
    return least(values, codes, count), least(values, codes, count, greatest=True)


def repeated(sizes: list[int]) -> Any:
    """Return each place of a list as often as its size says."""
    import numpy as np

    return np.repeat(np.arange(len(sizes)), np.array(sizes, np.int64))


def joined(rows: list[list[int]]) -> Any:
    """Return the offsets of several lists as one array."""
    import numpy as np

    return np.array(list(itertools.chain.from_iterable(rows)), np.int64)


def seconds(columns: Any, name: str) -> list[float]:
    """Return times in seconds: of numbers, and of timestamps with the zone UTC, as ``datetime.timestamp`` has them."""
    import numpy as np
    import pyarrow as pa

    column = columns.column(name)
    if column is None or column.null_count:
        raise RowByRow
    kind, types = column.type, pa.types
    if types.is_timestamp(kind) and kind.tz in ("UTC", "+00:00"):
        micros = times(columns, name)
        if len(micros) and np.abs(micros).max() >= 1 << 53:
            raise RowByRow
        return (micros / _SECOND_US).tolist()  # type: ignore[no-any-return]
    if not (types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)):
        raise RowByRow
    found = column.to_numpy(zero_copy_only=False).astype(np.float64)
    if np.isnan(found).any():
        raise RowByRow
    return found.tolist()  # type: ignore[no-any-return]


def split(chosen: Any) -> tuple[list[int], Any]:
    """Return the offsets of the rows that are chosen, and those of the others as an array."""
    import numpy as np

    return np.flatnonzero(chosen).tolist(), np.flatnonzero(~chosen)


def in_order(values: Any) -> Any:
    """Return the places of the values in their order; equal ones stay as they are."""
    import numpy as np

    return np.argsort(values, kind="stable")


def integers(values: list[int]) -> Any:
    """Return integers as an array."""
    import numpy as np

    return np.array(values, np.int64)


def where(chosen: Any, values: Any, others: Any) -> Any:
    """Return a value of ``values`` where it is chosen, and one of ``others`` elsewhere."""
    import numpy as np

    return np.where(chosen, values, others)


def hits(places: Any, sizes: list[int]) -> list[Any]:
    """Return which of the places of several lists, one after another, there are: an array of booleans for each."""
    import numpy as np

    found = np.zeros(sum(sizes), bool)
    found[places] = True
    return np.split(found, np.cumsum(sizes)[:-1])


def concatenated(arrays: list[Any]) -> Any:
    """Return arrays as one."""
    import numpy as np

    return np.concatenate(arrays)


def table_from(arrays: list[Any], names: Sequence[str]) -> Any:
    """Return a ``pyarrow.Table`` of arrays."""
    import pyarrow as pa

    return pa.Table.from_arrays(arrays, names=names)
