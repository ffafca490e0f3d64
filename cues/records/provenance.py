"""The provenance of a run of messages: for each queue that they were on, a column of indices and times.

The metadata of a message is a map, but to write one for each message costs three times as much as the
message. The messages of one batch are made from consecutive messages of the input.
So a run of n messages is stored as columns:

    t       range            message j was made from index t[j]; stored as one integer
            list             the same when functions drop or multiply messages; stored as small deltas
            int              all from one index (the outputs of a batch function)
            None             the queue does not keep "t"
    time    int | list | None     nanoseconds; one append has one time, so mostly one integer

A 0 in a list means that this message was not on that queue: a batch may have messages of several
processors.

``tx`` is one more column of indices, under the key ``tx/t``, which cannot be the name of a queue. ``extra``
is the ``q/meta`` that users wrote: None, one map for all, or one for each message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from cues import codec
from cues.base import clock, names

Indices = range | list[int] | int | None
Times = list[int] | int | None
Extra = list[dict[str, Any] | None] | dict[str, Any] | None

_WIDTHS: Final = ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))


class Provenance:
    """Columns for ``count`` messages. It never changes; every operation returns a new object."""

    __slots__ = ("columns", "count", "extra")

    def __init__(self, count: int, columns: dict[str, tuple[Indices, Times]], extra: Extra = None) -> None:
        self.count = count
        self.columns = columns
        self.extra = extra

    def __bool__(self) -> bool:
        return bool(self.columns) or self.extra is not None

    def slice(self, start: int, stop: int) -> Provenance:
        """Return the columns of the messages ``start`` to ``stop`` (exclusive)."""
        if start == 0 and stop == self.count:
            return self
        columns: dict[str, tuple[Indices, Times]] = {
            queue: (
                t[start:stop] if type(t) is range else _slice(t, start, stop),
                time if type(time) is int else _slice(time, start, stop),
            )
            for queue, (t, time) in self.columns.items()
        }
        return Provenance(stop - start, columns, _slice(self.extra, start, stop))

    def select(self, offsets: Sequence[int]) -> Provenance:
        """Return the columns of chosen messages: message j of the result is message ``offsets[j]`` of this object."""
        columns = {queue: (_select(t, offsets), _select(time, offsets)) for queue, (t, time) in self.columns.items()}
        return Provenance(len(offsets), columns, _select(self.extra, offsets))

    def spread(self, count: int) -> Provenance:
        """Return the columns of ``count`` messages that all have the provenance of the last one here."""
        last = self.count - 1
        columns: dict[str, tuple[Indices, Times]] = {
            queue: (_one(t, last), _one(time, last)) for queue, (t, time) in self.columns.items()
        }
        return Provenance(count, columns, _at(self.extra, last))

    def with_context(self, context: dict[str, str]) -> Provenance:
        """Return the columns with this trace context in the metadata of each message, instead of those before."""
        entries = self.extra if isinstance(self.extra, list) else [self.extra]
        own = [{k: v for k, v in (entry or {}).items() if k not in names.TRACE_CONTEXT} for entry in entries]
        if not isinstance(self.extra, list) or not any(own):
            return Provenance(self.count, self.columns, own[0] | context if own else context)
        return Provenance(self.count, self.columns, [entry | context for entry in own])

    def at(self, offset: int) -> dict[str, Any]:
        """Return the metadata map of one message: ``{"q/queue": {queue: {"q/t", "q/time"}}, "tx/t"}`` and extras."""
        result: dict[str, Any] = {}
        queues: dict[str, dict[str, Any]] = {}
        for queue, (t, time) in self.columns.items():
            index, when = _one(t, offset), _one(time, offset)
            if queue == names.TX:
                if index is not None:
                    result[names.TX] = index
                continue
            entry: dict[str, Any] = {}
            if index is not None:
                entry[names.T] = index
            if when is not None:
                entry[names.TIME] = clock.to_datetime(when)
            if entry:
                queues[queue] = entry
        if queues:
            result[names.QUEUE] = queues
        extra = _at(self.extra, offset)
        if extra:
            result = _merged(result, extra)
            if type(extra.get(names.DELIVER_AT)) is int:
                result[names.DELIVER_AT] = clock.to_datetime(extra[names.DELIVER_AT])
        return result

    def times(self) -> list[int]:
        """Return the time before which each message is not delivered, in nanoseconds; 0 without one."""
        entries = self.extra if isinstance(self.extra, list) else [self.extra] * self.count
        times = [(entry or {}).get(names.DELIVER_AT) for entry in entries]
        return [time if type(time) is int else 0 for time in times]

    def delivered(self) -> Provenance:
        """Return the columns without the times of delivery, which a message does not pass on to others."""
        if self.extra is None:
            return self
        entries = self.extra if isinstance(self.extra, list) else [self.extra]
        if not any(entry and names.DELIVER_AT in entry for entry in entries):
            return self
        own = [{k: v for k, v in (entry or {}).items() if k != names.DELIVER_AT} or None for entry in entries]
        extra: Extra = (own if any(own) else None) if isinstance(self.extra, list) else own[0]
        return Provenance(self.count, self.columns, extra)

    def encode(self) -> bytes:
        columns: dict[str, list[Any]] = {}
        for queue, (t, time) in self.columns.items():
            indices = [t.start] if type(t) is range else _pack_ints(t)
            columns[queue] = [indices, time if type(time) is int else _pack_ints(time)]
        return codec.pack([columns, self.extra] if self.extra is not None else [columns])


def decode(data: bytes | memoryview, count: int) -> Provenance:
    """Decode what :meth:`Provenance.encode` returned. Raises ValueError, TypeError and other errors for other bytes."""
    packed, *extra = codec.unpack(data)
    columns = {queue: (_unpack_t(t, count), _unpack_ints(time, count)) for queue, (t, time) in packed.items()}
    of_messages: Extra = extra[0] if extra else None
    if extra and of_messages is not None:
        entries = of_messages if type(of_messages) is list else [of_messages]
        if len(entries) not in (1, count) or not {*map(type, entries)} <= {dict, type(None)}:
            raise TypeError(f"the metadata of {count} messages is {of_messages!r:.80}")
    return Provenance(count, columns, of_messages)


def concat(parts: Sequence[Provenance]) -> Provenance:
    """Return the columns of several runs, one after the other."""
    if len(parts) == 1:
        return parts[0]
    count = sum(part.count for part in parts)
    queues = dict.fromkeys(queue for part in parts for queue in part.columns)
    columns: dict[str, tuple[Indices, Times]] = {}
    for queue in queues:
        pairs = [(part.count, *part.columns.get(queue, (None, None))) for part in parts]
        columns[queue] = (_join([(n, t) for n, t, _ in pairs]), _join([(n, time) for n, _, time in pairs]))
    extra: Extra = None
    if any(part.extra is not None for part in parts):
        extra = []
        for part in parts:
            extra += part.extra if isinstance(part.extra, list) else [part.extra] * part.count
    return Provenance(count, columns, extra)


def merge(parts: Sequence[Provenance]) -> Provenance:
    """Return the columns of a join: message j has the metadata of message j of every part.

    If two parts have the same queue for a message, the first part is used.
    """
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, tuple[Indices, Times]] = {}
    extras: list[Any] | None = None
    for part in parts:
        for queue, column in part.columns.items():
            before = columns.get(queue)
            columns[queue] = column if before is None else _filled(part.count, before, column)
        if part.extra is not None:
            of_part = list(part.extra) if isinstance(part.extra, list) else [part.extra] * part.count
            extras = of_part if extras is None else [_merged(b or {}, a or {}) for a, b in zip(extras, of_part)]
    return Provenance(parts[0].count, columns, extras)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the entries of ``over``; maps inside maps are merged too."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _slice(column: Any, start: int, stop: int) -> Any:
    return column[start:stop] if isinstance(column, (range, list)) else column


def _select(column: Any, offsets: Sequence[int]) -> Any:
    return [column[o] for o in offsets] if isinstance(column, (range, list)) else column


def _at(column: Any, offset: int) -> Any:
    return column[offset] if isinstance(column, (range, list)) else column


def _filled(count: int, first: tuple[Indices, Times], second: tuple[Indices, Times]) -> tuple[Indices, Times]:
    """Return the first column, with the entries of the second for messages that the first does not have."""
    if not any(isinstance(column, list) and 0 in column for column in first):
        return first
    known = [any(_one(column, j) is not None for column in first) for j in range(count)]
    if all(known):
        return first
    chosen = [first if has_first else second for has_first in known]
    times = [_one(time, j) or 0 for j, (_, time) in enumerate(chosen)]
    return [_one(t, j) or 0 for j, (t, _) in enumerate(chosen)], times


def _one(column: Indices | Times, offset: int) -> int | None:
    """Return the index or time of one message; None if it was not on that queue."""
    if isinstance(column, list):
        return column[offset] or None
    return column[offset] if isinstance(column, range) else column


def _join(parts: list[tuple[int, Any]]) -> Any:
    """Join the columns of consecutive runs to one column, in the most compact form."""
    first = parts[0][1]
    if all((type(column) is int or column is None) and column == first for _, column in parts):
        return first
    if all(type(column) is range for _, column in parts):
        stop = first.start
        for _, column in parts:
            if column.start != stop:
                break
            stop = column.stop
        else:
            return range(first.start, stop)
    joined: list[int] = []
    for count, column in parts:
        joined += [0 if column is None else column] * count if not isinstance(column, (range, list)) else column
    return joined


def _unpack_t(packed: Any, count: int) -> Indices:
    if type(packed) is list and len(packed) == 1:
        return range(packed[0], packed[0] + count)
    return _unpack_ints(packed, count)


def _pack_ints(values: list[int] | int | None) -> Any:
    """Encode a column: None, one integer for all, or [smallest, width, bytes] with an offset of that width for each."""
    if not isinstance(values, list):
        return values
    low, high = min(values), max(values)
    if low == high:
        return low or None
    for width, letter in _WIDTHS:
        if high - low < 1 << (8 * width):
            return [low, width, struct.pack(f">{len(values)}{letter}", *[v - low for v in values])]
    raise AssertionError("a column with a value beyond 64 bits")


def _unpack_ints(packed: Any, count: int) -> list[int] | int | None:
    if packed is None or type(packed) is int:
        constant: int | None = packed
        return constant
    low, width, raw = packed
    letter = dict(_WIDTHS)[width]
    return [low + v for v in struct.unpack(f">{count}{letter}", raw)]
