"""Joins of queues by key: against a table, of what is newest, by an interval of time, and as of a time.

    from cues.processors import joins

    graph.add(
        joins.interval(
            {"order": "orders", "payment": "payments"}, "paid", key="id", time="at", after="10m",
            how="left", delay="1m", late="late",
        )
    )

writes messages such as ``{"order": {…}, "payment": {…}}``; ``combine=`` makes others of the two:

    lookup     each message with the row that a table has for its key when the message arrives
    latest     the newest message of each of two or more inputs, at each change, or once when all are there
    as_of      each message with the last row of a table at its event time
    interval   all pairs of messages of a key whose event times are close

The first input is the left one. A result does not depend on the order in which the two queues are read, except with
``lookup`` and ``latest``, which have no event time.

Late messages (:mod:`cues.processors.event_time`) are those with a time before the watermark. They are written to
``late`` and are in no result. So a result is the join of all messages that were not late, each pair once.

State, for ``delay`` and inputs whose watermarks differ by at most d:

    lookup     a row for each key of the table; ``delete`` removes it
    latest     a row for each key and input; ``delete``, or a whole result with ``emit="complete"``, removes it
    as_of      the messages of delay + d, and a row for each key of the table; with ``tolerance``, those of that time
    interval   two rows for each message of before + after + delay + d

Messages that were written as tables are joined by column. Those that wait are blocks of rows (a row of state for up to
4,096 messages) in place of rows of their own, and the results are the same.

Not guaranteed: that an outer result is written while no message arrives, because event time then stands still, except
with ``idle``.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, Literal
from uuid import UUID

import cues
from cues.errors import GraphError
from cues.overrides import override
from cues.processors import STREAM, kept, takes, vectors
from cues.processors.event_time import (
    END_US,
    WATERMARK,
    Call,
    Duration,
    EventTime,
    Field,
    Key,
    KeyOf,
    Late,
    at,
    check_message,
    digest,
    duration,
    one_by_one,
    stream,
    time_of,
)
from cues.processors.event_time import watermark as watermark

Combine = Callable[[Any, Any], Any]
"""Makes a message of copies of a left and a right one, each None in an outer result that lacks it; None: no message."""
_FIXED: Final = frozenset((int, float, str, bytes, bool, type(None), datetime, date, time, timedelta, Decimal, UUID))
"""Types of values that no function changes in place."""


def _copied(message: dict[str, Any] | None) -> dict[str, Any] | None:
    """A copy for a function of a user, which may change it: the message itself is a row of state."""
    if message is None:
        return None
    return {name: each if type(each) in _FIXED else copy.deepcopy(each) for name, each in message.items()}


class _Pairs:
    """The result of a left and a right message."""

    def __init__(self, left: str, right: str, combine: Combine | None) -> None:
        if combine is not None and not callable(combine):
            raise GraphError(f"combine={combine!r} cannot be called.", "give a function of a left and a right message.")
        self.left, self.right = left, right
        self._combine = combine
        self.plain = combine is None
        """True if a result is both messages."""

    def __call__(self, left: Any, right: Any) -> list[dict[str, Any]]:
        if self._combine is None:
            return [{self.left: left, self.right: right}]
        made = self._combine(_copied(left), _copied(right))
        return [] if made is None else [made]

    def final(self, left: Any, right: Any) -> list[dict[str, Any]]:
        """Return the result of messages that the watermark has passed.

        If ``combine`` fails, the result is both messages with the reason in ``errors``. As a failure of the call, which
        is another message's, it would fail again with each message that follows.
        """
        try:
            made = self(left, right)
            for result in made:
                check_message(result)
            return made
        except Exception as error:
            return [{self.left: left, self.right: right, "errors": {"combine": f"{type(error).__name__}: {error}"}}]


def _two(inputs: Mapping[str, str]) -> tuple[str, str]:
    """Return the bindings of the left and the right input."""
    if not isinstance(inputs, Mapping) or len(inputs) != 2:
        raise GraphError(
            f"A join has two inputs, and was given {inputs!r}.", "give {'order': 'orders', 'payment': 'payments'}."
        )
    left, right = inputs
    return left, right


def _how(how: str, allowed: tuple[str, ...]) -> str:
    if how not in allowed:
        raise GraphError(f"how={how!r} is not a form of this join.", f"give {' or '.join(map(repr, allowed))}.")
    return how


class _Lookup:
    """Rows: ``t``, digest of the key: the message of the table."""

    takes = STREAM
    never_filtered = (WATERMARK,)

    def __init__(self, pairs: _Pairs, key: Any, how: str, delete: Callable[[Any], Any] | None) -> None:
        self._pairs, self._outer, self._delete = pairs, how == "left", delete
        self._keys = _keys(key, (pairs.left, pairs.right))
        self.state_key = key

    by_messages = one_by_one

    def __call__(self, message: dict[str, Any], process: cues.Process) -> dict[str, Any] | None:
        """Change the table, or return the message with its row."""
        if message.get("q/type") == WATERMARK:
            return None
        binding = process.binding
        row = b"t" + digest(self._keys[binding](message))
        state = process.state
        if binding == self._pairs.left:
            known = state.get(row)
            return {"joined": self._pairs(message, known)} if self._outer or known is not None else None
        if self._delete is None or not self._delete(message):
            state[row] = message
        elif row in state:
            del state[row]
        return None

    @property
    def by_columns(self) -> Any:
        """Takes messages that are rows of columns; None without names of fields, or with a function of messages."""
        plain = self._delete is None and self._pairs.plain and all(key.plain for key in self._keys.values())
        return self._take_columns if plain else None

    def _take_columns(self, columns: Any, process: cues.Process) -> dict[str, tuple[list[Any], list[int]]]:
        vectors.refuse(columns, WATERMARK)
        codes, keys = self._keys[process.binding].groups(columns)
        fields = [b"t" + digest(key) for key in keys]
        if process.binding != self._pairs.left:  # the last change of a key is its row
            last = vectors.last_rows(codes, len(keys))
            process.state.get_many(fields)
            process.state.set_many(dict(zip(fields, columns.messages(last))))
            return {}
        rows = process.state.get_many(fields)
        found = [rows[code] for code in codes.tolist()]
        offsets = [offset for offset, row in enumerate(found) if self._outer or row is not None]
        messages = columns.messages(None if len(offsets) == len(found) else offsets)
        joined = [pair for offset, message in zip(offsets, messages) for pair in self._pairs(message, found[offset])]
        return {"joined": (joined, offsets)}


class _Latest:
    """Rows: ``n``, number of the input, digest of the key: the newest message."""

    takes = STREAM
    never_filtered = (WATERMARK,)

    def __init__(
        self, inputs: list[str], key: Any, emit: str, how: str, combine: Any, delete: Callable[[Any], Any] | None
    ) -> None:
        self._inputs, self._once, self._outer = inputs, emit == "complete", how == "full"
        self._combine, self._delete = combine, delete
        self._keys = _keys(key, inputs)
        self.state_key = key

    by_messages = one_by_one

    def __call__(self, message: dict[str, Any], process: cues.Process) -> dict[str, Any] | None:
        """Keep the message as the newest of its input, and return the result of its key, if there is one."""
        if message.get("q/type") == WATERMARK:
            return None
        state, tail = process.state, digest(self._keys[process.binding](message))
        rows = [b"n" + bytes((number,)) + tail for number in range(len(self._inputs))]
        own = rows[self._inputs.index(process.binding)]
        if self._delete is None or not self._delete(message):
            state[own] = message
        elif state.pop(own, None) is None:
            return None
        newest = [state.get(row) for row in rows]
        whole = None not in newest
        if not (whole or (self._outer and not self._once)):
            return None
        if self._once:
            for row in rows:
                del state[row]
        if self._combine is None:
            return {"joined": dict(zip(self._inputs, newest))}
        made = self._combine(*map(_copied, newest))
        return None if made is None else {"joined": made}


def _keys(key: Any, bindings: Sequence[str]) -> dict[str, KeyOf]:
    """Return the keys by input: one for both, or a dict by binding."""
    if key is None:
        raise GraphError("A join has key=None.", "give the field that both messages have, or a dict by input.")
    if not isinstance(key, Mapping):
        return dict.fromkeys(bindings, KeyOf(key, joins=True))
    if set(key) != set(bindings):
        raise GraphError(
            f"key= has values for {', '.join(map(repr, key))}; the inputs are {', '.join(map(repr, bindings))}.",
            "give one value for each input, or one for both.",
        )
    return {binding: KeyOf(each, joins=True) for binding, each in key.items()}


class _Join(EventTime):
    """A message that waits is in rows of state of a subclass, or a row of a block (:mod:`cues.processors.kept`).

    Rows: ``b``, the watermark that completes its first row, input, wait, first number: a block;
    ``b``, if there are blocks: the first of these watermarks, and the longest wait.
    """

    RESULTS = "joined"
    awaits_all = False
    __cues_requires__ = ("blocks",)

    def __init__(self, pairs: _Pairs, time: Any, delay: Any, idle: Duration | None, key: Any) -> None:
        super().__init__([pairs.left, pairs.right], time, delay, idle, None)
        self._pairs = pairs
        self._keys = _keys(key, (pairs.left, pairs.right))
        self.state_key = key

    @override
    def accept(self, call: Call, message: dict[str, Any], time_us: int) -> None:
        tail = digest(self._keys[call.binding](message))
        if call.watermark is not None and time_us < call.watermark:
            call.tell_late(message, time_us)
            return
        call.number += 1
        self.keep(call, message, time_us, tail)

    def keep(self, call: Call, message: dict[str, Any], time_us: int, tail: bytes) -> None:
        """Take a message that is not late; ``tail`` is the digest of its key, ``call.number`` is its number."""
        raise NotImplementedError

    def hold(self, call: Call, fact: kept.Fact, message: Any) -> None:
        """Add the rows of state of a message that waits."""
        raise NotImplementedError

    def wait_us(self, left: bool) -> int:
        """Return how long after its time a message waits: it is complete a microsecond later."""
        raise NotImplementedError

    # --- messages in columns ---

    @property
    @override
    def has_columns(self) -> bool:  # type: ignore[override]
        short = max(self.wait_us(True), self.wait_us(False)) < vectors.BEYOND
        return short and self._pairs.plain and all(key.plain for key in self._keys.values())

    @override
    def accept_columns(self, call: Call, columns: Any, times: Any, marks: Any) -> list[int]:
        table = kept.plain(columns)
        codes, keys = self._keys[call.binding].groups(columns)
        late, offsets = vectors.split(times < marks[:-1])
        for offset, message in zip(late, columns.messages(late)):
            call.tell_late(message, int(times[offset]), int(marks[offset]))
        if len(offsets):
            first = call.number + 1
            call.number += len(offsets)
            order = vectors.in_order(times[offsets])
            offsets = offsets[order]
            rows = kept.Rows(
                call.binding == self._pairs.left,
                self.wait_us(call.binding == self._pairs.left),
                table.take(offsets),
                times[offsets],
                first + order,
                codes[offsets],
                [digest(key) for key in keys],
                vectors.zeros(offsets) != 0,
            )
            mark = int(marks[-1])
            self.take(call, rows, offsets, marks)
            call.watermark = None if mark == vectors.NEVER else mark
            call.due = self.due_after(call, mark)
        return late

    def take(self, call: Call, own: kept.Rows, offsets: Any, marks: Any) -> None:
        """Keep rows that are not late, and complete what the watermark reaches.

        ``offsets``: of the rows in the call; ``marks``: the watermark before each row of the call, and the last one.
        """
        raise NotImplementedError

    @override
    def made(self, results: list[Any], tables: bool = True) -> Any:
        """``results``: the pool, and the numbers of the left and the right message."""
        if not results:
            return []
        pool, names = results[0][0], (self._pairs.left, self._pairs.right)
        sides = [vectors.integers([pair[side] for pair in results]) for side in (1, 2)]
        if tables and len(results) >= vectors.RESULTS_FEW:
            with contextlib.suppress(Exception):  # of messages that have not the same columns
                return vectors.table_from([pool.structs(numbers) for numbers in sides], names)
        return [dict(zip(names, pair)) for pair in zip(*(pool.messages(numbers) for numbers in sides))]

    def put(self, call: Call, rows: kept.Rows) -> None:
        """Keep rows that wait."""
        if rows.size < kept.FEW:
            for fact, message in zip(rows.facts(), rows.messages()):
                self.hold(call, fact, message)
            return
        for low in range(0, rows.size, kept.BLOCK_ROWS):
            some = rows.between(low, min(low + kept.BLOCK_ROWS, rows.size))
            due = int(some.times[0]) + rows.wait_us + 1
            name = at(due) + bytes((rows.left,)) + at(rows.wait_us) + int(some.numbers[0]).to_bytes(8, "big")
            call.open(b"b" + name, some.packed())
            first, wait_us = call.state.get(b"b") or (due, 0)
            call.state[b"b"] = min(first, due), max(wait_us, rows.wait_us)

    def singles(self, call: Call, mark: int) -> list[tuple[bytes, Any]]:
        """Take the rows of state that the watermark reaches, as :meth:`complete` gets them."""
        if call.due is None or call.due > mark:
            return []
        rest = bytes(self.ROW_BYTES - 9)
        found: list[tuple[bytes, Any]] = call.state.range(
            self.KIND + at(call.due) + rest, self.KIND + at(mark + 1) + rest
        )
        for row, _ in found:
            del call.state[row]
        return found

    def blocks(self, call: Call, until: int) -> Iterator[tuple[bytes, kept.Rows]]:
        """Yield the blocks with a row that is complete at a watermark of ``until``, with their rows of state."""
        low, high = (b"b" + at(time_us) + bytes(17) for time_us in ((call.state.get(b"b") or (until,))[0], until + 1))
        while found := call.state.range(low, high, 1):
            ((row, block),) = found
            yield row, kept.unpacked(block, bool(row[9]), time_of(row[10:18]))
            low = (int.from_bytes(row, "big") + 1).to_bytes(len(row), "big")

    def few_blocks(self, call: Call, until: int) -> list[tuple[bytes, kept.Rows]]:
        """Return these blocks; refuse many."""
        found = list(itertools.islice(self.blocks(call, until), kept.BLOCKS_MAX + 1))
        if len(found) > kept.BLOCKS_MAX:
            raise vectors.RowByRow
        return found

    def forget(self, call: Call, gone: list[bytes]) -> None:
        """Delete blocks."""
        for row in gone:
            del call.state[row]
        if gone:
            following = next(self.blocks(call, END_US), None)
            if following is None:
                del call.state[b"b"]
            else:
                call.state[b"b"] = time_of(following[0][1:9]), call.state[b"b"][1]

    @override
    def expand(self, call: Call, until: int) -> None:
        if (call.state.get(b"b") or (END_US,))[0] > until:
            return
        blocks = list(self.blocks(call, until))
        self.forget(call, [row for row, _ in blocks])
        for _, rows in blocks:
            for fact, message in zip(rows.facts(), rows.messages()):
                self.hold(call, fact, message)

    @override
    def due_after(self, call: Call, mark: int) -> int | None:
        dues = [super().due_after(call, mark), *(call.state.get(b"b") or (None,))[:1]]
        return min((due for due in dues if due is not None), default=None)

    @override
    def __cues_open__(self, state: Any) -> bool:
        blocks = self.blocks(Call(state, None), END_US)
        return any(self.block_awaits(rows) for _, rows in blocks) or super().__cues_open__(state)

    @override
    def __cues_close__(self, message: dict[str, Any], process: cues.Process) -> dict[str, Any] | None:
        self.expand(Call(process.state, None), END_US)
        return super().__cues_close__(message, process)

    def block_awaits(self, rows: kept.Rows) -> bool:
        """Return whether a result may be written when the watermark completes some of these rows."""
        raise NotImplementedError


class _AsOf(_Join):
    """Messages wait until the watermark has passed their time, and are then taken in the order of time.

    Rows: ``w``, time + 1, 0 (table) or 1 (left), number, digest of the key: the message;
    ``t``, digest: [time, the message of the table];
    with a tolerance ``w``, time + tolerance + 1, 2, number, digest: True.
    """

    ROW_BYTES = 34

    def __init__(self, *given: Any, how: str, tolerance: int | None) -> None:
        super().__init__(*given)
        self._outer, self._tolerance = how == "left", tolerance

    @override
    def keep(self, call: Call, message: dict[str, Any], time_us: int, tail: bytes) -> None:
        self.hold(call, (call.binding == self._pairs.left, time_us, time_us + 1, call.number, tail, False), message)

    @override
    def hold(self, call: Call, fact: kept.Fact, message: Any) -> None:
        left, _, due, number, tail, _ = fact
        call.open(b"w" + at(due) + bytes((left,)) + number.to_bytes(8, "big") + tail, message)

    @override
    def wait_us(self, left: bool) -> int:
        return 0

    @override
    def complete(self, call: Call, row: bytes, value: Any) -> None:
        time_us, side, entry = time_of(row[1:9]) - 1, row[9], b"t" + row[18:]
        known = call.state.get(entry)
        if side == 0:
            call.state[entry] = [time_us, value]
            if self._tolerance is not None:
                call.open(b"w" + at(time_us + self._tolerance + 1) + b"\2" + row[10:], True)
        elif side == 1:
            if known is not None and self._tolerance is not None and time_us - known[0] > self._tolerance:
                known = None
            if known is not None or self._outer:
                call.results += self._pairs.final(value, None if known is None else known[1])
        elif known is not None and known[0] + (self._tolerance or 0) <= time_us:  # messages of later times may follow
            del call.state[entry]

    @override
    def awaits(self, call: Call, row: bytes) -> bool:
        return row[9] < 2

    @override
    def block_awaits(self, rows: kept.Rows) -> bool:
        return True

    @property
    @override
    def has_columns(self) -> bool:  # type: ignore[override]
        return super().has_columns and (self._tolerance or 0) < vectors.BEYOND

    @override
    def take(self, call: Call, own: kept.Rows, offsets: Any, marks: Any) -> None:
        """Of the messages of the table that are complete, the last one of each key is written to its row."""
        mark = int(marks[-1])
        some = kept.Gathered()
        expired = self._reach_singles(call, some, mark)
        blocks = self.few_blocks(call, mark)
        self.forget(call, [row for row, _ in blocks])
        for rows in (*(rows for _, rows in blocks), own):
            done = rows.done(mark)
            some.add(rows.between(0, done))
            self.put(call, rows.between(done, rows.size))
        left, times, numbers, keys, places = some.arrays()
        tails = list(some.tails)
        entries = [b"t" + tail for tail in tails]
        known = call.state.get_many(entries)
        lefts, tables, last = kept.last_before(left, times, numbers, keys, len(tails))
        there = some.pool.add([entry and entry[1] for entry in known])
        before = vectors.integers([-1 if entry is None else there + key for key, entry in enumerate(known)])
        then = vectors.integers([0 if entry is None else entry[0] for entry in known])
        of, own_keys = tables[lefts], keys[lefts]
        partners = vectors.where(of < 0, before[own_keys], places[of])
        if self._tolerance is not None:
            ages = times[lefts] - vectors.where(of < 0, then[own_keys], times[of])
            partners[ages > self._tolerance] = -1
        if not self._outer:
            lefts, partners = lefts[partners >= 0], partners[partners >= 0]
        call.results += [(some.pool, *pair) for pair in zip(places[lefts].tolist(), partners.tolist())]
        call.completed += (times[lefts] + 1).tolist()
        changed = [key for key, row in enumerate(last.tolist()) if row >= 0]
        messages = some.pool.messages(places[last[changed]])
        for key, time_us, number, message in zip(
            changed, times[last[changed]].tolist(), numbers[last[changed]].tolist(), messages
        ):
            due = None if self._tolerance is None else time_us + self._tolerance + 1
            if due is None or due > mark:
                call.state[entries[key]] = [time_us, message]
                if due is not None:
                    call.open(b"w" + at(due) + b"\2" + number.to_bytes(8, "big") + tails[key], True)
            elif known[key] is not None:
                del call.state[entries[key]]
        for tail, due in expired.items():
            entry = known[some.key(tail)]
            if last[some.key(tail)] < 0 and entry is not None and entry[0] + (self._tolerance or 0) < due:
                del call.state[b"t" + tail]

    def _reach_singles(self, call: Call, some: kept.Gathered, mark: int) -> dict[bytes, int]:
        """Add the messages that are rows of state and complete; return the last time at which a key expires."""
        messages: list[tuple[bool, int, int, bytes, Any]] = []
        expired: dict[bytes, int] = {}
        for row, value in self.singles(call, mark):
            due, side, number, tail = time_of(row[1:9]), row[9], int.from_bytes(row[10:18], "big"), row[18:]
            if side < 2:
                messages.append((side == 1, due - 1, number, tail, value))
            elif self._tolerance is None:
                raise vectors.RowByRow
            else:
                expired[tail] = due
                some.key(tail)
        some.add_messages(messages)
        return expired


class _Interval(_Join):
    """Each message is kept until the watermark has passed all times at which it may have a partner.

    Rows: ``l`` or ``r``, digest of the key, time, number: [message, whether it is in a pair];
    ``w``, the last time of a partner + 1, then the former row: True.
    """

    ROW_BYTES = 42

    def __init__(self, *given: Any, before: int, after: int, how: str) -> None:
        super().__init__(*given)
        self._reach = {b"l": (before, after), b"r": (after, before)}
        """By side: how far before and after a message its partner may be."""
        self._outer = {"inner": b"", "left": b"l", "right": b"r", "full": b"lr"}[how]

    @override
    def keep(self, call: Call, message: dict[str, Any], time_us: int, tail: bytes) -> None:
        side, other = _sides(call.binding == self._pairs.left)
        back, ahead = self._reach[side]
        if (blocks := call.state.get(b"b")) is not None:
            self.expand(call, time_us + ahead + blocks[1] + 1)
        low, high = (other + tail + at(time) + bytes(8) for time in (time_us - back, time_us + ahead + 1))
        matched = False
        for _, partner in call.state.range(low, high):
            matched = partner[1] = True
            pair = (message, partner[0]) if side == b"l" else (partner[0], message)
            call.results += self._pairs(*pair)
        self.hold(call, (side == b"l", time_us, time_us + ahead + 1, call.number, tail, matched), message)

    @override
    def hold(self, call: Call, fact: kept.Fact, message: Any) -> None:
        left, time_us, due, number, tail, paired = fact
        row = _sides(left)[0] + tail + at(time_us) + number.to_bytes(8, "big")
        call.state[row] = [message, paired]
        call.open(b"w" + at(due) + row, True)

    @override
    def wait_us(self, left: bool) -> int:
        return self._reach[_sides(left)[0]][1]

    @override
    def complete(self, call: Call, row: bytes, value: Any) -> None:
        row = row[9:]
        message, matched = call.state[row]
        del call.state[row]
        if not matched and row[:1] in self._outer:
            pair = (message, None) if row[:1] == b"l" else (None, message)
            call.results += self._pairs.final(*pair)

    @override
    def awaits(self, call: Call, row: bytes) -> bool:
        return row[9:10] in self._outer and not call.state[row[9:]][1]

    @override
    def block_awaits(self, rows: kept.Rows) -> bool:
        return _sides(rows.left)[0] in self._outer and not rows.paired.all()

    @override
    def take(self, call: Call, own: kept.Rows, offsets: Any, marks: Any) -> None:
        """All partners were kept by other calls, and the watermark has not completed them before the message.

        It may have if the join had a shorter reach when they came.
        """
        mark = int(marks[-1])
        reached = {row[9:]: time_of(row[1:9]) for row, _ in self.singles(call, mark)}
        side, other = _sides(own.left)
        back, ahead = self._reach[side]
        _, wait_us = call.state.get(b"b") or (0, 0)
        blocks = self.few_blocks(call, max(mark, int(own.times[-1]) + ahead + wait_us + 1))
        some = kept.Gathered()
        for tail in own.tails:
            some.key(tail)
        others = [rows for _, rows in blocks if rows.left != own.left]
        for rows in others:
            some.add(rows)
        low, high = int(own.times[0]) - back, int(own.times[-1]) + ahead + 1
        singles = self._partners(call, other, own.tails, low, high)
        some.add_messages([(not own.left, *_facts(row), entry[0]) for row, entry in singles])
        _, times, numbers, keys, places = some.arrays()
        mine, partners = kept.pairs(own.keys, own.times - back, own.times + ahead, (keys, times, numbers))
        dues = [rows.times + rows.wait_us + 1 for rows in others]
        dues.append(vectors.integers([reached.get(row, mark + 1) for row, _ in singles]))
        waits = vectors.concatenated(dues)[partners] > marks[offsets[mine]]
        mine, partners = mine[waits], partners[waits]
        order = vectors.in_order(offsets[mine])
        mine, partners = mine[order], partners[order]
        mine_first = some.pool.add(own.table)
        pairs = zip(*((mine_first + mine).tolist(), places[partners].tolist())[:: 1 if own.left else -1])
        call.results += [(some.pool, *pair) for pair in pairs]
        call.at_rows += offsets[mine].tolist()
        own.paired[mine] = True
        changed = self._note_pairs(call, partners, others, singles)
        self._finish(call, some.pool, reached, [*blocks, (None, own)], changed, mark)

    def _partners(self, call: Call, other: bytes, tails: list[bytes], low: int, high: int) -> list[tuple[bytes, Any]]:
        """Return the rows of state of messages of the other input with these keys, from one time to before another."""
        if not call.state.range(other + bytes(32), other + b"\xff" * 32, 1):
            return []
        bounds = [(other + tail + at(low) + bytes(8), other + tail + at(high) + bytes(8)) for tail in tails]
        return [found for first, last in bounds for found in call.state.range(first, last)]

    def _note_pairs(
        self, call: Call, partners: Any, blocks: list[kept.Rows], singles: list[tuple[bytes, Any]]
    ) -> set[int]:
        """Note which messages have a partner now; return the blocks that this changes, by ``id``."""
        sizes = [rows.size for rows in blocks]
        *hits, single = vectors.hits(partners, [*sizes, len(singles)])
        changed = set()
        for rows, hit in zip(blocks, hits):
            if (hit & ~rows.paired).any():
                rows.paired[hit] = True
                changed.add(id(rows))
        for (row, entry), paired in zip(singles, single.tolist()):
            if paired:
                call.state[row] = [entry[0], True]
        return changed

    def _finish(
        self,
        call: Call,
        pool: kept.Pool,
        reached: dict[bytes, int],
        blocks: list[tuple[Any, kept.Rows]],
        changed: set[int],
        mark: int,
    ) -> None:
        """Complete what the watermark reaches, keep the rest, and write the messages without a partner."""
        ended = [(row, due, call.state[row]) for row, due in reached.items()]
        for row, _, _ in ended:
            del call.state[row]
        alone = [(row, due, message) for row, due, (message, paired) in ended if not paired and row[:1] in self._outer]
        first = pool.add([message for _, _, message in alone])
        lone = [(due, row, first + place) for place, (row, due, _) in enumerate(alone)]
        parts = [(name, rows, rows.done(mark)) for name, rows in blocks]
        parts = [(name, rows, done) for name, rows, done in parts if name is None or done or id(rows) in changed]
        self.forget(call, [name for name, _, _ in parts if name is not None])
        for _, rows, done in parts:
            self.put(call, rows.between(done, rows.size))
            if _sides(rows.left)[0] in self._outer:
                unpaired = rows.between(0, done).unpaired()
                first = pool.add(unpaired.table)
                for place, (left, time_us, due, number, tail, _) in enumerate(unpaired.facts(), first):
                    row = _sides(left)[0] + tail + at(time_us) + number.to_bytes(8, "big")
                    lone.append((due, row, place))
        for due, row, place in sorted(lone):
            call.results.append((pool, place, -1) if row[:1] == b"l" else (pool, -1, place))
            call.completed.append(due)


def _facts(row: bytes) -> tuple[int, int, bytes]:
    """The time, the number and the digest of the key of a row of state."""
    return time_of(row[17:25]), int.from_bytes(row[25:], "big"), row[1:17]


def _sides(left: bool) -> tuple[bytes, bytes]:
    """The first bytes of the rows of an input, and of the other one."""
    return (b"l", b"r") if left else (b"r", b"l")


@takes(STREAM)
def lookup(
    inputs: Mapping[str, str],
    output: str,
    *,
    key: Key | Mapping[str, Key],
    how: Literal["inner", "left"] = "inner",
    combine: Combine | None = None,
    delete: Callable[[Any], Any] | None = None,
    id: str | None = None,
    **options: Any,
) -> cues.Stream:
    """Return a stream that joins each message with the row of a table, which is built from the second queue.

    inputs   ``{"order": "orders", "customer": "customers"}``: the messages, and the changes of the table
    output   the queue of the results
    key      the field or function by which they belong together; a dict by input, if they differ
    how      ``"inner"``: a message without a row is dropped; ``"left"``: its row is None
    combine  ``combine(message, row)`` returns the result, or None; default: both, in a dict by input. If it raises for
             messages that had to wait, the result is that dict, with the reason in ``errors``
    delete   a function of a change; if it returns true, the row of its key is removed
    id       the name of the processor; None: the name of ``output``
    options  those of :class:`cues.Stream`

    The last change of a key is its row. A message is joined with the row at the moment when it is taken, so the result
    depends on the order in which the two queues are read. For one that does not, use :func:`as_of`.

    Kind: stream
    Needs: nothing
    Guarantee: exactly once: each message is joined once, with the row of that moment
    Mechanism: a row of state for each key of the table, committed with the results
    """
    left, right = _two(inputs)
    function = _Lookup(_Pairs(left, right, combine), key, _how(how, ("inner", "left")), delete)
    return stream(function, cues.AnyOf(**inputs), {"joined": output}, id, options)


@takes(STREAM)
def latest(
    inputs: Mapping[str, str],
    output: str,
    *,
    key: Key | Mapping[str, Key],
    emit: Literal["change", "complete"] = "change",
    how: Literal["inner", "full"] = "inner",
    combine: Callable[..., Any] | None = None,
    delete: Callable[[Any], Any] | None = None,
    id: str | None = None,
    **options: Any,
) -> cues.Stream:
    """Return a stream that joins the newest message of each input, by key.

    inputs   two or more: ``{"order": "orders", "payment": "payments", "parcel": "parcels"}``
    emit     ``"change"``: a result at each message; ``"complete"``: one when each input has a message of the key, after
             which the key begins anew
    how      with ``"change"``: ``"inner"``: no result before each input has a message; ``"full"``: None for those that
             have none
    combine  ``combine(order, payment, parcel)`` returns the result, or None; default: a dict by input
    delete   a function of a message; if it returns true, its input has no message of the key any more. With ``"full"``
             that is a result, too

    The other arguments are those of :func:`lookup`. ``ttl=`` forgets messages that are older. The result depends on the
    order in which the queues are read; for one that does not, use :func:`as_of` or :func:`interval`.

    Kind: stream
    Needs: nothing
    Guarantee: exactly once: each message is the newest of its input once, and makes at most one result
    Mechanism: a row of state for each key and input, committed with the results
    """
    if not isinstance(inputs, Mapping) or not 2 <= len(inputs) <= _INPUTS_MAX:
        raise GraphError(
            f"This join has two to {_INPUTS_MAX} inputs, and was given {inputs!r}.",
            "give {'order': 'orders', 'payment': 'payments'}.",
        )
    _how(how, ("inner", "full"))
    if emit not in ("change", "complete") or (emit == "complete" and how == "full"):
        raise GraphError(
            f"emit={emit!r} with how={how!r} is not a form of this join.",
            "give emit='change' or 'complete', and how='full' with 'change' only.",
        )
    for name, given in (("combine", combine), ("delete", delete)):
        if given is not None and not callable(given):
            raise GraphError(f"{name}={given!r:.60} cannot be called.", "give a function of messages.")
    function = _Latest(list(inputs), key, emit, how, combine, delete)
    return stream(function, cues.AnyOf(**inputs), {"joined": output}, id, options)


_INPUTS_MAX = 255


@takes(STREAM)
def as_of(
    inputs: Mapping[str, str],
    output: str,
    *,
    key: Key | Mapping[str, Key],
    time: Field | Mapping[str, Field],
    late: Late,
    how: Literal["inner", "left"] = "inner",
    tolerance: Duration | None = None,
    combine: Combine | None = None,
    delay: Duration | Mapping[str, Duration] = 0,
    idle: Duration | None = None,
    id: str | None = None,
    **options: Any,
) -> cues.Stream:
    """Return a stream that joins each message with the row that a table had at the event time of the message.

    The row is the change with the greatest time that is not after the time of the message; of changes of one time, the
    one that arrived last. ``tolerance``: it must not be older than that. A message waits until the watermark has passed
    its time, and results are in the order of event time.

    time     the event time: a field or a function; unix seconds, datetime or ISO text. A dict by input, if they differ
    late     the queue of late messages: ``message``, ``input``, ``time``, ``watermark`` and its ``number``; or a
             function of such a message, which returns a message or a list of them for ``output``, or None
    delay    how late messages of an input may be; one value, or a dict by input
    idle     an input that is silent for so long does not hold the watermark back; None: it does
    options  those of :class:`cues.Stream`, and ``at_end="keep"``: messages that wait do so for the next run when all
             sources have ended; else their results are written

    The other arguments are those of :func:`lookup`.

    Kind: stream
    Needs: nothing
    Guarantee: exactly once: each message is joined once with the row of its time, or is on the late queue
    Mechanism: waiting messages in rows of state, ordered by time; a row for each key; committed with the results
    """
    left, right = _two(inputs)
    limit = None if tolerance is None else duration(tolerance, "tolerance", 0)
    pairs = _Pairs(left, right, combine)
    function = _AsOf(pairs, time, delay, idle, key, how=_how(how, ("inner", "left")), tolerance=limit)
    return stream(function, cues.AnyOf(**inputs), {"joined": output, "late": late}, id, options)


@takes(STREAM)
def interval(
    inputs: Mapping[str, str],
    output: str,
    *,
    key: Key | Mapping[str, Key],
    time: Field | Mapping[str, Field],
    late: Late,
    before: Duration = 0,
    after: Duration = 0,
    how: Literal["inner", "left", "right", "full"] = "inner",
    combine: Combine | None = None,
    delay: Duration | Mapping[str, Duration] = 0,
    idle: Duration | None = None,
    id: str | None = None,
    **options: Any,
) -> cues.Stream:
    """Return a stream that joins all pairs of messages of a key whose event times are close.

    The time of the right message is at most ``before`` before and at most ``after`` after that of the left one. A pair
    is written when its second message arrives. A message without a partner is written with None when no partner can
    come any more, if ``how`` is ``"left"``, ``"right"`` or ``"full"``.

    The other arguments are those of :func:`as_of`.

    Kind: stream
    Needs: nothing
    Guarantee: exactly once: each pair is written once, each message is joined or on the late queue
    Mechanism: two rows of state for each message, ordered by key and by time, committed with the results
    """
    left, right = _two(inputs)
    reach = {"before": duration(before, "before", 0), "after": duration(after, "after", 0)}
    pairs = _Pairs(left, right, combine)
    function = _Interval(pairs, time, delay, idle, key, how=_how(how, ("inner", "left", "right", "full")), **reach)
    return stream(function, cues.AnyOf(**inputs), {"joined": output, "late": late}, id, options)
