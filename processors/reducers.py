"""Reducers: what a window computes of its messages.

    reduce={"n": count(), "delay": mean("delay"), "worst": top("carrier", 3)}

A reducer keeps a state of a message's types, which is a part of the window's row. Its size is bounded:

    count, sum, mean, min, max     one or two numbers
    quantiles                      8 bytes for each value up to ``exact`` (256); then a t-digest of about 5 KiB
    distinct                       8 bytes for each value up to ``exact`` (1,000); then a sketch of 4 KiB
    top                            ``capacity`` values (100)
    stddev                         three numbers
    first, last                    a value
    earliest, latest               a value and its place in the order
    collect                        ``most`` values (1,000)
    a plain function               all messages of the window
    reducer(...)                   what your function keeps

A field is a name or a function of the message. A message without the field, or with None in it, does not count, as in
SQL; :func:`count` without a field counts every message. A value that does not fit raises, and the message is written to
the error queue. A result that does not exist, such as the sum of infinities of both signs, is None with a reason.

Quantiles and distinct values above ``exact`` need the extra ``windows`` (Apache DataSketches). Their results depend
only on the messages and their order, so a retry and another engine give the same ones.

Not guaranteed: that sums of floats are those of another order. They are added in the order of arrival.
"""

from __future__ import annotations

import builtins
import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Final

import xxhash

from cues import codec
from cues.errors import GraphError
from cues.overrides import override
from cues.processors import vectors
from cues.processors.event_time import Field, getter

_DIGEST_K: Final = 300
"""The compression of a t-digest: about 5 KiB. With 100, which fits one page of the store, ranks were wrong by 2.5 %."""
_LOG2_REGISTERS: Final = 12
"""4,096 registers of a HyperLogLog sketch: 4 KiB, and a standard error of 1.6 %."""


class Reducer:
    """Computes one field of a window's result. Its state has types that messages may have.

    Subclasses: every call of a window gets its own state, and a state is not shared. ``mergeable`` is False if two
    states cannot be merged; session windows refuse such a reducer.
    """

    mergeable = True
    hides_state = False
    """True if no function of a user is given a state, and so none keeps or changes it."""

    def start(self) -> Any:
        """Return the state of a window without messages."""
        raise NotImplementedError

    def add(self, state: Any, message: Any) -> Any:
        """Return the state after a message."""
        raise NotImplementedError

    def merge(self, state: Any, other: Any) -> Any:
        """Return the state of a window that has the messages of both."""
        raise NotImplementedError

    def result(self, state: Any) -> Any:
        """Return the value of the result."""
        return state

    def add_rows(self, states: list[Any], columns: Any, rows: Any, codes: Any) -> list[Any]:
        """Return the states of groups after rows of columns: those of :meth:`add`, one message after another.

        ``rows``: a numpy array of the offsets of rows, those of each group in their order, or a range; None: all rows.
        ``codes``: the number of the group of each of them.
        """
        return _one_by_one(self.add, states, columns.messages(), rows, codes)

    def each_row(self, states: list[Any], columns: Any, codes: Any) -> list[Any]:
        """Return the result of its group after each row of columns; ``states`` are then those after the last row."""
        return _each_one(self.add, self.result, states, columns.messages(), codes)


def _each_one(put: Any, result: Any, states: list[Any], values: Any, codes: Any) -> list[Any]:
    results = []
    for value, code in zip(values, codes.tolist()):
        states[code] = state = put(states[code], value)
        results.append(result(state))
    return results


def _one_by_one(add: Any, states: list[Any], values: Any, rows: Any, codes: Any) -> list[Any]:
    states = list(states)
    chosen = values if rows is None else map(values.__getitem__, rows if type(rows) is range else rows.tolist())
    for value, code in zip(chosen, codes.tolist()):
        states[code] = add(states[code], value)
    return states


class _Given(Reducer):
    def __init__(self, start: Callable[[], Any], add: Any, merge: Any, result: Any) -> None:
        self.start = start  # type: ignore[method-assign]
        self.add = add  # type: ignore[method-assign]
        self.mergeable = merge is not None
        if merge is not None:
            self.merge = merge  # type: ignore[method-assign]
        if result is not None:
            self.result = result  # type: ignore[method-assign]


def reducer(
    start: Callable[[], Any],
    add: Callable[[Any, Any], Any],
    *,
    merge: Callable[[Any, Any], Any] | None = None,
    result: Callable[[Any], Any] | None = None,
) -> Reducer:
    """Return a reducer of your own functions.

    ``start()`` returns the first state, ``add(state, message)`` the next one, ``merge(state, other)`` that of both
    (session windows need it), ``result(state)`` the value of the result. The state has types that messages may have,
    and its size is yours to bound. If ``result`` raises, the value is None, and the result has the reason in its field
    ``errors``.
    """
    for name, function in (("start", start), ("add", add), ("merge", merge), ("result", result)):
        if not callable(function) and (function is not None or name in ("start", "add")):
            raise GraphError(f"{name}={function!r} of a reducer cannot be called.", "give a function.")
    return _Given(start, add, merge, result)


class _OfField(Reducer):
    """A reducer over the values of a field that are not None."""

    hides_state = True

    def __init__(self, field: Field) -> None:
        self._value = getter(field, "field")
        self._name = field if isinstance(field, str) else None

    @override
    def start(self) -> Any:
        return None

    @override
    def add_rows(self, states: list[Any], columns: Any, rows: Any, codes: Any) -> list[Any]:
        if self._name is None:
            return super().add_rows(states, columns, rows, codes)
        return _one_by_one(self._put_some, states, columns.values(self._name), rows, codes)

    @override
    def each_row(self, states: list[Any], columns: Any, codes: Any) -> list[Any]:
        if self._name is None:
            return super().each_row(states, columns, codes)
        return _each_one(self._put_some, self.result, states, columns.values(self._name), codes)

    def _put_some(self, state: Any, value: Any) -> Any:
        return state if value is None else self.put(state, value)

    @override
    def add(self, state: Any, message: Any) -> Any:
        value = self._value(message)
        return state if value is None else self.put(state, value)

    def put(self, state: Any, value: Any) -> Any:
        raise NotImplementedError


class _OfNumbers(_OfField):
    """One that adds the numbers of a column at once; it puts decimals, large integers, texts and times one by one."""

    @override
    def add_rows(self, states: list[Any], columns: Any, rows: Any, codes: Any) -> list[Any]:
        try:
            if self._name is None:
                raise vectors.RowByRow
            values, groups = vectors.chosen(*vectors.numbers(columns, self._name), rows, codes, len(columns))
            return self._add_numbers(states, values, groups, vectors.counts(groups, len(states)))
        except vectors.RowByRow:
            return super().add_rows(states, columns, rows, codes)

    def _add_numbers(self, states: list[Any], values: Any, groups: Any, counts: list[int]) -> list[Any]:
        """Return the states after numbers. ``groups``: the group of each; ``counts``: how many each group has."""
        raise NotImplementedError


def _number(value: Any) -> Any:
    """Return a value with which numbers can be computed. NaN is refused: it would be the result of the window."""
    if isinstance(value, (str, bytes, bool, list, tuple, dict)) or value != value:
        raise TypeError(f"{value!r} is not a number")
    return value


def _defined(value: Any) -> Any:
    """Return a result, unless it is NaN, as the sum of infinities of both signs is. No message alone is the cause."""
    if value != value:
        raise ValueError("infinities of both signs have no such result")
    return value


class _Count(Reducer):
    hides_state = True

    @override
    def add_rows(self, states: list[Any], columns: Any, rows: Any, codes: Any) -> list[Any]:
        return [state + more for state, more in zip(states, vectors.counts(codes, len(states)))]

    @override
    def each_row(self, states: list[Any], columns: Any, codes: Any) -> list[Any]:
        results = []
        for code in codes.tolist():
            states[code] = state = states[code] + 1
            results.append(state)
        return results

    @override
    def start(self) -> int:
        return 0

    @override
    def add(self, state: int, message: Any) -> int:
        return state + 1

    @override
    def merge(self, state: int, other: int) -> int:
        return state + other


class _CountField(_OfField):
    @override
    def add_rows(self, states: list[Any], columns: Any, rows: Any, codes: Any) -> list[Any]:
        if self._name is None:
            return super().add_rows(states, columns, rows, codes)
        _, codes = vectors.chosen(None, vectors.present(columns, self._name), rows, codes, len(columns))
        return [state + more for state, more in zip(states, vectors.counts(codes, len(states)))]

    @override
    def start(self) -> int:
        return 0

    @override
    def put(self, state: int, value: Any) -> int:
        return state + 1

    @override
    def merge(self, state: int, other: int) -> int:
        return state + other


def count(field: Field | None = None) -> Reducer:
    """Return the number of messages; with ``field``, of those in which it is not None."""
    return _Count() if field is None else _CountField(field)


class _Sum(_OfNumbers):
    @override
    def _add_numbers(self, states: list[Any], values: Any, groups: Any, counts: list[int]) -> list[Any]:
        zero = -0.0 if values.dtype.kind == "f" else 0  # -0.0 + value is this value, also if it is -0.0
        starts = [zero if state is None or not count else state for state, count in zip(states, counts)]
        sums = vectors.add_to(starts, values, groups)
        return [total if count else state for state, total, count in zip(states, sums, counts)]

    @override
    def put(self, state: Any, value: Any) -> Any:
        return _number(value) if state is None else state + _number(value)

    @override
    def merge(self, state: Any, other: Any) -> Any:
        return state if other is None else other if state is None else state + other

    @override
    def result(self, state: Any) -> Any:
        return _defined(state)


def sum(field: Field) -> Reducer:
    """Return the sum of a field; None without values. Integers and decimals are exact."""
    return _Sum(field)


class _Mean(_OfNumbers):
    @override
    def start(self) -> Any:
        return [0, 0]

    @override
    def _add_numbers(self, states: list[Any], values: Any, groups: Any, counts: list[int]) -> list[Any]:
        sums = vectors.add_to([state[1] if count else 0 for state, count in zip(states, counts)], values, groups)
        return [[state[0] + count, total] if count else state for state, total, count in zip(states, sums, counts)]

    @override
    def put(self, state: Any, value: Any) -> Any:
        return [state[0] + 1, state[1] + _number(value)]

    @override
    def merge(self, state: Any, other: Any) -> Any:
        return [state[0] + other[0], state[1] + other[1]]

    @override
    def result(self, state: Any) -> Any:
        return _defined(state[1] / state[0]) if state[0] else None


def mean(field: Field) -> Reducer:
    """Return the arithmetic mean of a field; None without values."""
    return _Mean(field)


class _Extreme(_OfNumbers):
    def __init__(self, field: Field, choose: Any) -> None:
        super().__init__(field)
        self._choose = choose

    @override
    def _add_numbers(self, states: list[Any], values: Any, groups: Any, counts: list[int]) -> list[Any]:
        found = vectors.least(values, groups, len(states), self._choose is builtins.max)
        return [
            state if not count else value if state is None else self._choose(state, value)
            for state, value, count in zip(states, found, counts)
        ]

    @override
    def put(self, state: Any, value: Any) -> Any:
        if value != value:
            raise TypeError(f"{value!r} has no order")
        return value if state is None else self._choose(state, value)

    @override
    def merge(self, state: Any, other: Any) -> Any:
        return state if other is None else other if state is None else self._choose(state, other)


def min(field: Field) -> Reducer:
    """Return the smallest value of a field (numbers, texts, times); None without values."""
    return _Extreme(field, builtins.min)


def max(field: Field) -> Reducer:
    """Return the greatest value of a field (numbers, texts, times); None without values."""
    return _Extreme(field, builtins.max)


class _Spread(_OfField):
    """The state is [count, mean, sum of squared distances from it] (Welford)."""

    def __init__(self, field: Field, ddof: int) -> None:
        super().__init__(field)
        self._ddof = ddof

    @override
    def start(self) -> Any:
        return [0, 0.0, 0.0]

    @override
    def put(self, state: Any, value: Any) -> Any:
        count, mean, squares = state
        distance = float(_number(value)) - mean
        mean += distance / (count + 1)
        return [count + 1, mean, squares + distance * (float(value) - mean)]

    @override
    def merge(self, state: Any, other: Any) -> Any:
        (n, mean, squares), (m, other_mean, other_squares) = state, other
        if not (n and m):
            return other if m else state
        distance = other_mean - mean
        return [n + m, mean + distance * m / (n + m), squares + other_squares + distance**2 * n * m / (n + m)]

    @override
    def result(self, state: Any) -> Any:
        degrees = state[0] - self._ddof
        return _defined(math.sqrt(state[2] / degrees)) if degrees > 0 else None


def stddev(field: Field, ddof: int = 1) -> Reducer:
    """Return the standard deviation of a field, a float; None for fewer than ``ddof`` + 1 values.

    ``ddof=1``: of a sample, divided by n - 1; 0: of all values, divided by n.
    """
    if ddof not in (0, 1):
        raise GraphError(f"ddof={ddof!r} is neither 0 nor 1.", "give 1 for a sample, 0 for all values.")
    return _Spread(field, ddof)


class _Arrived(_OfField):
    """The state is the value; None without one."""

    mergeable = False

    def __init__(self, field: Field, is_last: bool) -> None:
        super().__init__(field)
        self._is_last = is_last

    @override
    def put(self, state: Any, value: Any) -> Any:
        return value if self._is_last or state is None else state


def first(field: Field) -> Reducer:
    """Return the value of the message that arrived first. Session windows refuse it: see :func:`earliest`."""
    return _Arrived(field, False)


def last(field: Field) -> Reducer:
    """Return the value of the message that arrived last. Session windows refuse it: see :func:`latest`."""
    return _Arrived(field, True)


class _Placed(Reducer):
    """The state is [place, value] of the chosen message, or None."""

    hides_state = True

    def __init__(self, field: Field, by: Field, is_last: bool) -> None:
        self._value, self._by = getter(field, "field"), getter(by, "by")
        self._names = (field, by) if isinstance(field, str) and isinstance(by, str) else None
        self._is_last = is_last

    @override
    def add_rows(self, states: list[Any], columns: Any, rows: Any, codes: Any) -> list[Any]:
        if self._names is None:
            return super().add_rows(states, columns, rows, codes)
        pairs = list(zip(*(columns.values(name) for name in self._names)))
        return _one_by_one(self._put, states, pairs, rows, codes)

    @override
    def start(self) -> Any:
        return None

    @override
    def add(self, state: Any, message: Any) -> Any:
        return self._put(state, (self._value(message), self._by(message)))

    def _put(self, state: Any, pair: tuple[Any, Any]) -> Any:
        value, place = pair
        if value is None or place is None:
            return state
        if place != place:
            raise TypeError(f"{place!r} has no order")
        if state is None or (place >= state[0] if self._is_last else place < state[0]):
            return [place, value]
        return state

    @override
    def merge(self, state: Any, other: Any) -> Any:
        if state is None or other is None:
            return other if state is None else state
        return other if (other[0] > state[0] if self._is_last else other[0] < state[0]) else state

    @override
    def result(self, state: Any) -> Any:
        return None if state is None else state[1]


def earliest(field: Field, by: Field) -> Reducer:
    """Return the value of the message with the smallest ``by``, such as its time; of equal ones the first to arrive."""
    return _Placed(field, by, False)


def latest(field: Field, by: Field) -> Reducer:
    """Return the value of the message with the greatest ``by``, such as its time; of equal ones the last to arrive."""
    return _Placed(field, by, True)


class _Collect(_OfField):
    def __init__(self, field: Field, most: int | None) -> None:
        super().__init__(field)
        self._most = most

    @override
    def start(self) -> Any:
        return []

    @override
    def add_rows(self, states: list[Any], columns: Any, rows: Any, codes: Any) -> list[Any]:
        values = map(self._value, columns.messages()) if self._name is None else columns.values(self._name)
        new: list[list[Any]] = _one_by_one(_append, [[] for _ in states], list(values), rows, codes)
        return [[*state, *some][: self._most] if some else state for state, some in zip(states, new)]

    @override
    def put(self, state: Any, value: Any) -> Any:
        return [*state, value] if self._most is None else [*state, value][: self._most]

    @override
    def merge(self, state: Any, other: Any) -> Any:
        return [*state, *other][: self._most]


def collect(field: Field, most: int = 1_000) -> Reducer:
    """Return the values of a field as a list, in the order of arrival: the first ``most``; others are left out.

    Of two sessions that become one, the values of the earlier one are first.
    """
    if type(most) is not int or most < 1:
        raise GraphError(f"most={most!r} is not a number of values.", "give a count from 1.")
    return _Collect(field, most)


def _append(values: list[Any], value: Any) -> list[Any]:
    if value is not None:
        values.append(value)
    return values


def _whole(message: Any) -> Any:
    return message


class _OfAll(_Collect):
    """A function of all messages of the window."""

    hides_state = False

    def __init__(self, fn: Callable[[list[Any]], Any]) -> None:
        super().__init__(_whole, None)
        self._fn = fn

    @override
    def result(self, state: Any) -> Any:
        return self._fn(state)


def _sketches() -> Any:
    try:
        import datasketches
    except ImportError:
        raise GraphError(
            "Quantiles and distinct values above exact= need the package datasketches.",
            "pip install 'cues-streams[windows]'; or give exact=None, which keeps every value.",
        ) from None
    return datasketches


class _Quantiles(_OfField):
    """State: the number of values; and the values as doubles, or the t-digest."""

    def __init__(self, field: Field, at: Sequence[float], exact: int | None) -> None:
        super().__init__(field)
        self._at = list(at)
        self._exact = exact
        if exact is not None:
            _sketches()

    @override
    def start(self) -> Any:
        return [0, b""]

    @override
    def put(self, state: Any, value: Any) -> Any:
        number = array("d", (float(_number(value)),))
        count, kept = state
        if self._exact is None or count < self._exact:
            return [count + 1, kept + number.tobytes()]
        digest = self._digest(state)
        digest.update(number[0])
        return [count + 1, digest.serialize()]

    @override
    def merge(self, state: Any, other: Any) -> Any:
        count = state[0] + other[0]
        if self._exact is None or count <= self._exact:
            return [count, state[1] + other[1]]
        digest = self._digest(state)
        digest.merge(self._digest(other))
        return [count, digest.serialize()]

    def _digest(self, state: Any) -> Any:
        sketches = _sketches()
        if state[0] > self._exact:
            return sketches.tdigest_double.deserialize(state[1])
        digest = sketches.tdigest_double(_DIGEST_K)
        for value in array("d", state[1]):
            digest.update(value)
        return digest

    @override
    def result(self, state: Any) -> list[float] | None:
        count, kept = state
        if not count:
            return None
        if self._exact is not None and count > self._exact:
            digest = self._digest(state)
            return [_defined(digest.get_quantile(q)) for q in self._at]
        values = sorted(array("d", kept))
        return [_between(values, q * (count - 1)) for q in self._at]


def _between(values: list[float], place: float) -> float:
    low = int(place)
    rest = place - low
    if not rest:
        return values[low]
    one, next = values[low], values[low + 1]
    if math.isinf(one) or math.isinf(next):
        return one if one == next else _defined(one + next)
    return one + (next - one) * rest


def quantiles(field: Field, at: Sequence[float] = (0.5, 0.9, 0.99), *, exact: int | None = 256) -> Reducer:
    """Return a list with the quantiles of a field at each of ``at`` (0 to 1); None without values.

    Up to ``exact`` values they are exact, with linear interpolation (``quantile_cont`` of SQL). Above, they come from a
    t-digest, whose error has no proven bound: the rank of a result is usually within 1 % of the one asked for, and
    closer near 0 and 1. ``exact=None`` keeps every value, 8 bytes each, without a bound.
    """
    if isinstance(at, (int, float)):
        at = (at,)
    if not isinstance(at, (list, tuple)) or not at or not all(type(q) in (int, float) and 0 <= q <= 1 for q in at):
        raise GraphError(f"at={at!r} are not quantiles.", "give numbers from 0 to 1: at=(0.5, 0.99).")
    _check_exact(exact)
    return _Quantiles(field, at, exact)


class _Distinct(_OfField):
    """State: whether it is a sketch; and the hashes of the values in order, or the sketch."""

    def __init__(self, field: Field, exact: int | None) -> None:
        super().__init__(field)
        self._exact = exact
        if exact is not None:
            _sketches()

    @override
    def start(self) -> Any:
        return [False, b""]

    @override
    def put(self, state: Any, value: Any) -> Any:
        return self._put(state, [xxhash.xxh3_64_intdigest(codec.pack_key(value))])

    @override
    def merge(self, state: Any, other: Any) -> Any:
        if other[0] and not state[0]:
            state, other = other, state
        if not other[0]:
            return self._put(state, array("Q", other[1]))
        sketches = _sketches()
        union = sketches.hll_union(_LOG2_REGISTERS)
        union.update(_sketch(state[1]))
        union.update(_sketch(other[1]))
        return [True, union.get_result(sketches.tgt_hll_type.HLL_8).serialize_compact()]

    def _put(self, state: Any, hashes: Any) -> Any:
        is_sketch, kept = state
        values = array("Q")
        if not is_sketch:
            values.frombytes(kept)
            for each in hashes:
                place = bisect_left(values, each)
                if place == len(values) or values[place] != each:
                    values.insert(place, each)
            if self._exact is None or len(values) <= self._exact:
                return [False, values.tobytes()]
            sketches = _sketches()
            sketch = sketches.hll_sketch(_LOG2_REGISTERS, sketches.tgt_hll_type.HLL_8)
        else:
            sketch, values = _sketch(kept), hashes
        for each in values:
            sketch.update(each - (1 << 63))
        return [True, sketch.serialize_compact()]

    @override
    def result(self, state: Any) -> int:
        is_sketch, kept = state
        return round(_sketch(kept).get_estimate()) if is_sketch else len(kept) // 8


def _sketch(packed: bytes) -> Any:
    return _sketches().hll_sketch.deserialize(packed)


def distinct(field: Field, *, exact: int | None = 1_000) -> Reducer:
    """Return the number of different values of a field.

    Exact up to ``exact`` values, except that two values with the same 64-bit hash count as one. Above, it comes from a
    HyperLogLog sketch with 4,096 registers: a standard error of 1.6 %. ``exact=None`` keeps the hash of every value,
    without a bound.
    """
    _check_exact(exact)
    return _Distinct(field, exact)


def _check_exact(exact: Any) -> None:
    if exact is not None and (isinstance(exact, bool) or not isinstance(exact, int) or exact < 0):
        raise GraphError(f"exact={exact!r} is not a number of values.", "give a count from 0, or None for no limit.")


class _Top(_OfField):
    """State: rows of [value, count, largest error of the count], as Metwally's Space-Saving keeps them."""

    def __init__(self, field: Field, k: int, capacity: int) -> None:
        super().__init__(field)
        self._k = k
        self._capacity = capacity

    @override
    def start(self) -> Any:
        return []

    @override
    def put(self, state: Any, value: Any) -> Any:
        for row in state:
            if row[0] == value and type(row[0]) is type(value):
                row[1] += 1
                return state
        if len(state) < self._capacity:
            state.append([value, 1, 0])
            return state
        place = builtins.min(range(len(state)), key=lambda place: state[place][1])
        least = state.pop(place)[1]
        state.append([value, least + 1, least])
        return state

    @override
    def merge(self, state: Any, other: Any) -> Any:
        # A value that only one of them has may have been dropped by the other, at most as often as its smallest count.
        floors = [builtins.min(row[1] for row in each) if len(each) >= self._capacity else 0 for each in (state, other)]
        merged = [[value, count + floors[1], error + floors[1]] for value, count, error in state]
        for value, count, error in other:
            for row in merged:
                if row[0] == value and type(row[0]) is type(value):
                    row[1] += count - floors[1]
                    row[2] += error - floors[1]
                    break
            else:
                merged.append([value, count + floors[0], error + floors[0]])
        merged.sort(key=lambda row: -row[1])
        return merged[: self._capacity]

    @override
    def result(self, state: Any) -> list[list[Any]]:
        rows = sorted(state, key=lambda row: (-row[1], type(row[0]).__name__, row[0]))
        return [[value, count] for value, count, _ in rows[: self._k]]


def top(field: Field, k: int = 10, *, capacity: int | None = None) -> Reducer:
    """Return the ``k`` most frequent values of a field, as a list of [value, count]; the most frequent first.

    Equal counts are in the order of the values. Exact up to ``capacity`` (100, or 10 ``k``) different values in a
    window. Above, it is the Space-Saving summary: a count is at most n / capacity too high for n messages, and each
    value that occurs more often than that is kept. Values are compared one by one, so a large ``capacity`` is slow.
    """
    if type(k) is not int or k < 1:
        raise GraphError(f"k={k!r} is not a number of values.", "give a count from 1.")
    capacity = builtins.max(100, 10 * k) if capacity is None else capacity
    if type(capacity) is not int or capacity < k:
        raise GraphError(f"capacity={capacity!r} is less than k={k}.", "give a count of at least k.")
    return _Top(field, k, capacity)


class Reduction:
    """The reducers of a window by name; their states are one dict."""

    def __init__(self, reduce: Any, taken: Sequence[str], sessions: bool = False) -> None:
        """``taken``: names that the result has already. Raises :class:`cues.errors.GraphError`."""
        known = isinstance(reduce, dict) and reduce
        if not known or not all(isinstance(each, Reducer) or callable(each) for each in reduce.values()):
            raise GraphError(f"reduce={reduce!r} is not a dict of reducers.", "give reduce={'n': count()}.")
        for name, each in reduce.items():
            if getattr(each, "__module__", "") == __name__ and not isinstance(each, Reducer):
                raise GraphError(f"The reducer {name!r} was not called.", f"give {each.__name__}(…).")
        reduce = {name: each if isinstance(each, Reducer) else _OfAll(each) for name, each in reduce.items()}
        for name, each in reduce.items():
            if not isinstance(name, str) or name.startswith("q/"):
                raise GraphError(f"reduce= has a result {name!r}.", "give it a name that does not begin with 'q/'.")
            if name in taken:
                raise GraphError(
                    f"reduce= has a result {name!r}, and the message of a window has a field of that name.",
                    "give the result another name.",
                )
            if sessions and not each.mergeable:
                raise GraphError(
                    f"The reducer {name!r} has no merge=, and a message can make one session of two.",
                    "give reducer(start, add, merge=…).",
                )
        self._reducers: dict[str, Reducer] = dict(reduce)
        self.hides_state = all(each.hides_state for each in self._reducers.values())

    def add(self, states: dict[str, Any], message: Any) -> None:
        """Add a message; a reducer that was added to the graph since begins here."""
        for name, each in self._reducers.items():
            states[name] = each.add(states[name] if name in states else each.start(), message)

    def add_rows(self, groups: list[dict[str, Any]], columns: Any, rows: Any, codes: Any) -> None:
        """Add rows of columns to the states of groups, as :meth:`add` does the messages one after another.

        ``rows``: the offsets of rows, ascending; None: all. ``codes``: the number of the group of each of them.
        """
        for name, each in self._reducers.items():
            before = [states[name] if name in states else each.start() for states in groups]
            for states, after in zip(groups, each.add_rows(before, columns, rows, codes)):
                states[name] = after

    def each_row(self, groups: list[dict[str, Any]], columns: Any, codes: Any) -> dict[str, list[Any]]:
        """Add rows of columns, and return the results after each row, by name. Raises what a result raises."""
        results = {}
        for name, each in self._reducers.items():
            states = [states[name] if name in states else each.start() for states in groups]
            results[name] = each.each_row(states, columns, codes)
            for group, after in zip(groups, states):
                group[name] = after
        return results

    def merge(self, states: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
        """Return the states of the messages of both."""
        common = states.keys() & others.keys()
        both = {name: each.merge(states[name], others[name]) for name, each in self._reducers.items() if name in common}
        return {**states, **others, **both}

    def columns(self, groups: list[dict[str, Any]]) -> dict[str, list[Any]]:
        """Return the results of groups by name. Raises what a result raises."""
        return {
            name: [each.result(states[name] if name in states else each.start()) for states in groups]
            for name, each in self._reducers.items()
        }

    def results(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return the results by name; None for a reducer that raises.

        Its reason is in ``errors``, because the window closes all the same.
        """
        results: dict[str, Any] = {}
        errors: dict[str, str] = {}
        for name, each in self._reducers.items():
            try:
                results[name] = each.result(states[name] if name in states else each.start())
                codec.pack(results[name])
            except Exception as error:
                results[name] = None
                errors[name] = f"{type(error).__name__}: {error}"
        return results | ({"errors": errors} if errors else {})
