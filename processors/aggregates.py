"""Aggregates: totals of all messages of a key so far, without windows.

    from cues.processors import aggregates
    from cues.processors.reducers import count, sum

    graph.add(aggregates.aggregate("sales", "totals", by="shop", reduce={"n": count(), "total": sum("price")}))

writes messages such as ``{"shop": "Oslo", "n": 7, "total": 120}``: after each message the aggregate of its key. With
``every="1m"`` and ``time=`` it writes, whenever event time has passed a minute, the aggregates of the keys that have
changed since the minute before:

    messages   00:05 a   00:40 b   00:59 a   01:02 a                    02:10 b
    results                                  a: 2, b: 1 (end 01:00)     a: 3 (end 02:00)

Each message counts, whatever its time: a result has all messages that came before it, so none is late.

State: a row for each key, with the states of its reducers, which stays; with ``every`` one more for each key that has
changed since its last result.

Not guaranteed: that the last results are written while no message arrives, because event time then stands still,
except with ``idle``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping
from typing import Any, Final

import cues
from cues.errors import GraphError
from cues.overrides import override
from cues.processors import STREAM, takes, vectors
from cues.processors.event_time import (
    END_US,
    WATERMARK,
    ByMessages,
    Call,
    Duration,
    Early,
    EventTime,
    Field,
    Key,
    KeyOf,
    at,
    digest,
    duration,
    moment,
    one_by_one,
    stream,
    time_of,
)
from cues.processors.event_time import watermark as watermark
from cues.processors.reducers import Reducer, Reduction

Inputs = str | cues.AnyOf
_SINGLE: Final = frozenset((int, float, str, bool, type(None)))


class _Each:
    """Rows: ``a``, digest of the key: [key, states]."""

    takes = STREAM
    never_filtered = (WATERMARK,)

    def __init__(self, by: Key, reduce: Mapping[str, Reducer]) -> None:
        self._key = KeyOf(by)
        self._reduction = Reduction(reduce, [*self._key.names, "errors"])
        self.state_key: Any = by

    def __call__(self, message: dict[str, Any], process: cues.Process) -> dict[str, Any] | None:
        """Return the aggregate of the key of the message."""
        if message.get("q/type") == WATERMARK:
            return None
        key = self._key(message)
        entry = _entry(process.state, digest(key), key)
        self._reduction.add(entry[1], message)
        return {"totals": [self._key.fields(key) | self._reduction.results(entry[1])]}

    @property
    def by_messages(self) -> ByMessages | None:
        """Takes many messages; None if a function of the user sees the rows."""
        return functools.partial(one_by_one, self) if self._reduction.hides_state else None

    @property
    def by_columns(self) -> Any:
        """Takes messages that are rows of columns; None without names of fields."""
        return self._take_columns if self._key.plain else None

    def _take_columns(self, columns: Any, process: cues.Process) -> dict[str, tuple[Any, list[int]]]:
        vectors.refuse(columns, WATERMARK)
        codes, keys = self._key.groups(columns)
        states = _entries(process.state, keys, [digest(key) for key in keys])
        results = self._reduction.each_row(states, columns, codes)
        return {"totals": (vectors.table(columns, self._key.names, results), list(range(len(columns))))}


def _entry(state: Any, tail: bytes, key: Any) -> Any:
    """Return the row of a key, which the caller may change."""
    row = b"a" + tail
    entry = state.get(row)
    if entry is None:
        entry = state[row] = [key, {}]
    return entry


def _entries(state: Any, keys: list[Any], tails: list[bytes]) -> list[dict[str, Any]]:
    """Return the states of keys, which the caller may change."""
    fields = [b"a" + tail for tail in tails]
    entries, added = state.get_many(fields), {}
    for place, entry in enumerate(entries):
        if entry is None:
            entries[place] = added[fields[place]] = [keys[place], {}]
    state.set_many(added)
    return [entry[1] for entry in entries]


class _Every(EventTime):
    """Rows: ``a``, digest of the key: [key, states]; ``w``, time of the next result, digest: True."""

    RESULTS = "totals"
    MOVES_FIRST = True

    def __init__(self, *given: Any, reduce: Mapping[str, Reducer], every: int) -> None:
        super().__init__(*given)
        self._mark_names = ("final",) * self.marked
        self._reduction = Reduction(reduce, [*self._key.names, "end", *self._mark_names, "errors"])
        self.hides_state = self._reduction.hides_state
        self._every = every

    @override
    def accept(self, call: Call, message: dict[str, Any], time_us: int) -> None:
        key = self._key(message)
        tail = digest(key)
        self._reduction.add(_entry(call.state, tail, key)[1], message)
        # While an input that has sent nothing holds the watermark back, the results follow the times of the others.
        now = time_us if call.watermark is None else call.watermark
        due = now - now % self._every + self._every
        if now < END_US:
            self._tell_later(call, due, tail)
        else:  # all inputs have ended, and no later time comes
            self.complete(call, b"w" + at(due) + tail, True)

    def _tell_later(self, call: Call, due: int, tail: bytes) -> None:
        row = b"w" + at(due) + tail
        if row not in call.state:
            call.open(row, True)
        if self.marked:
            self.change(call, row)

    @override
    def write_early(self, call: Call, row: bytes) -> None:
        if (entry := call.state.get(b"a" + row[9:])) is not None:
            results = self._reduction.results(entry[1])
            call.results.append(self._message(entry[0], time_of(row[1:9]), results, False))

    @override
    def complete(self, call: Call, row: bytes, value: Any) -> None:
        self.settle(call, row)
        key, states = call.state[b"a" + row[9:]]
        results = self._reduction.results(states)
        if call.raw:  # a reducer of a user may return its state, which changes before the results are written
            results = {name: each if type(each) in _SINGLE else copy.deepcopy(each) for name, each in results.items()}
        result = key, time_of(row[1:9]), results
        call.results.append(result if call.raw else self._message(*result))

    def _message(self, key: Any, end: int, results: dict[str, Any], final: bool = True) -> dict[str, Any]:
        return self._key.fields(key) | {"end": moment(end)} | dict.fromkeys(self._mark_names, final) | results

    @override
    def made(self, results: list[Any], tables: bool = True) -> Any:
        if len(results) >= vectors.RESULTS_FEW and not any("errors" in each[2] for each in results):
            keys, ends, found = map(list, zip(*results))
            with contextlib.suppress(Exception):  # of types that a table does not hold exactly
                values = {name: [True] * len(results) for name in self._mark_names}
                values |= {name: [each[name] for each in found] for name in found[0]}
                return vectors.table_of(self._key.columns(keys), {"end": ends}, values)
        return [self._message(*each) for each in results]

    @property
    @override
    def has_columns(self) -> bool:  # type: ignore[override]
        return self._every < vectors.BEYOND

    @override
    def accept_columns(self, call: Call, columns: Any, times: Any, marks: Any) -> list[int]:
        if int(marks[-1]) >= END_US:
            raise vectors.RowByRow
        codes, keys = self._key.groups(columns)
        tails = [digest(key) for key in keys]
        dues = vectors.following(times, marks[1:], self._every)
        for low, high in vectors.runs(dues):  # between two results, the watermark moves nothing
            self.reach(call, int(marks[low + 1]))
            some, found = vectors.compact(codes[low:high], len(keys))
            numbers = found.tolist()
            changed = [tails[number] for number in numbers]
            states = _entries(call.state, [keys[number] for number in numbers], changed)
            self._reduction.add_rows(states, columns, None if high - low == len(codes) else range(low, high), some)
            later = [b"w" + at(int(dues[low])) + tail for tail in changed]
            known = call.state.get_many(later)
            call.open_many({row: True for row, there in zip(later, known) if there is None})
            self.change_many(call, later)
        return []


@takes(STREAM)
def aggregate(
    inputs: Inputs,
    output: str,
    *,
    by: Key,
    reduce: Mapping[str, Reducer],
    every: Duration | None = None,
    time: Field | Mapping[str, Field] | None = None,
    delay: Duration | Mapping[str, Duration] = 0,
    idle: Duration | None = None,
    early: Early = None,
    id: str | None = None,
    **options: Any,
) -> cues.Stream:
    """Return a stream that reduces all messages of each key, and writes the aggregates as they change.

    inputs   a queue, or ``cues.AnyOf(…)``
    output   the queue of the results: the key, and the results of ``reduce``; with ``every`` also ``end``
    by       a field, a function, or a list of fields; None: one aggregate of all messages
    reduce   the results by name (:mod:`cues.processors.reducers`)
    every    ``"1m"``, seconds, or a timedelta: the keys that changed since the last results are written when event time
             passes a multiple of it (``end``), in the order of their digests; None: each message writes the aggregate
             of its key
    time     the event time, for ``every``: as for :func:`cues.processors.windows.tumbling`
    delay    how far the results are after the greatest event time
    idle     an input that is silent for so long does not hold event time back; None: it does
    early    for ``every``, results before ``end``: ``"10s"``, at most so often by the clock, or ``"update"``, at each
             message. Results then have ``final``: as for :func:`cues.processors.windows.tumbling`
    id       the name of the processor; None: the name of ``output``
    options  those of :class:`cues.Stream`: ``errors``, ``where``, ``types``, …

    Engines of streams write what has changed once a batch, or once a second of the clock (RisingWave, Flink's
    mini-batches). Such results depend on how messages were cut into batches, so a retry or another machine gives
    others. Here they depend on the messages and their order alone: one for each message, or at times of the messages.

    Raises :class:`cues.errors.GraphError` for arguments that do not fit.

    Kind: stream
    Needs: nothing; extra `windows` for `quantiles` and `distinct`
    Guarantee: exactly once: each message is in the aggregate of its key once, each result is written once
    Mechanism: a row of state for each key, committed with the results
    """
    if not isinstance(inputs, (str, cues.AnyOf)):
        raise GraphError(f"The inputs of an aggregate are {inputs!r}.", "give a queue, or cues.AnyOf('a', 'b').")
    if every is None:
        if time is not None or idle is not None or delay != 0 or early is not None:
            raise GraphError("time=, delay=, idle= and early= are for every=.", "give every='1m', or leave them out.")
        return stream(_Each(by, reduce), inputs, {"totals": output}, id, options)
    if time is None:
        raise GraphError("every= needs event time.", "give time= the field of the event time.")
    bindings = [inputs] if isinstance(inputs, str) else list(inputs.bindings)
    function = _Every(bindings, time, delay, idle, by, early, reduce=reduce, every=duration(every, "every"))
    return stream(function, inputs, {"totals": output}, id, options)
