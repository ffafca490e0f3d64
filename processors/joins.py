"""Joins of two queues by key: against a table, by an interval of time, and as of a time.

    from cues.processors import joins

    graph.add(
        joins.interval(
            {"order": "orders", "payment": "payments"}, "paid", key="id", time="at", after="10m",
            how="left", delay="1m", late="late",
        )
    )

writes messages such as ``{"order": {…}, "payment": {…}}``; ``combine=`` makes others of the two:

    lookup     each message with the row that a table has for its key when the message arrives
    as_of      each message with the last row of a table at its event time
    interval   all pairs of messages of a key whose event times are close

The first input is the left one. A result does not depend on the order in which the two queues are read, except with
``lookup``, which has no event time.

Late messages (:mod:`cues.processors.event_time`) are those with a time before the watermark. They are written to
``late`` and are in no result. So a result is the join of all messages that were not late, each pair once.

State, for ``delay`` and inputs whose watermarks differ by at most d:

    lookup     a row for each key of the table; ``delete`` removes it
    as_of      the messages of delay + d, and a row for each key of the table; with ``tolerance``, those of that time
    interval   two rows for each message of before + after + delay + d

Not guaranteed: that an outer result is written while no message arrives, because event time then stands still, except
with ``idle``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import cues
from cues.errors import GraphError
from cues.overrides import override
from cues.processors import STREAM, takes, vectors
from cues.processors.event_time import (
    WATERMARK,
    Call,
    Duration,
    EventTime,
    Field,
    Key,
    KeyOf,
    at,
    check_message,
    digest,
    duration,
    stream,
    time_of,
)
from cues.processors.event_time import watermark as watermark

Combine = Callable[[Any, Any], Any]
"""Makes a message of a left and a right one, each None in an outer result that lacks it; None: no message."""


class _Pairs:
    """The result of a left and a right message."""

    def __init__(self, left: str, right: str, combine: Combine | None) -> None:
        if combine is not None and not callable(combine):
            raise GraphError(f"combine={combine!r} cannot be called.", "give a function of a left and a right message.")
        self.left, self.right = left, right
        self._combine = combine
        self.plain = combine is None
        """Whether a result is both messages."""

    def __call__(self, left: Any, right: Any) -> list[dict[str, Any]]:
        if self._combine is None:
            return [{self.left: left, self.right: right}]
        made = self._combine(left, right)
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


def _keys(key: Any, bindings: tuple[str, str]) -> dict[str, KeyOf]:
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
    RESULTS = "joined"

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


class _AsOf(_Join):
    """Messages wait until the watermark has passed their time, and are then taken in the order of time.

    Rows: ``w``, time + 1, 0 (table) or 1 (left), number, digest of the key: the message;
    ``t``, digest: [time, the message of the table];
    with a tolerance ``w``, time + tolerance + 1, 2, number, digest: True.
    """

    ROW_BYTES = 34
    awaits_all = False

    def __init__(self, *given: Any, how: str, tolerance: int | None) -> None:
        super().__init__(*given)
        self._outer, self._tolerance = how == "left", tolerance

    @override
    def keep(self, call: Call, message: dict[str, Any], time_us: int, tail: bytes) -> None:
        side = b"\1" if call.binding == self._pairs.left else b"\0"
        call.open(b"w" + at(time_us + 1) + side + call.number.to_bytes(8, "big") + tail, message)

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


class _Interval(_Join):
    """Each message is kept until the watermark has passed all times at which it may have a partner.

    Rows: ``l`` or ``r``, digest of the key, time, number: [message, whether it is in a pair];
    ``w``, the last time of a partner + 1, then the former row: True.
    """

    ROW_BYTES = 42
    awaits_all = False

    def __init__(self, *given: Any, before: int, after: int, how: str) -> None:
        super().__init__(*given)
        self._reach = {b"l": (before, after), b"r": (after, before)}
        """By side: how far before and after a message its partner may be."""
        self._outer = {"inner": b"", "left": b"l", "right": b"r", "full": b"lr"}[how]

    @override
    def keep(self, call: Call, message: dict[str, Any], time_us: int, tail: bytes) -> None:
        side, other = (b"l", b"r") if call.binding == self._pairs.left else (b"r", b"l")
        back, ahead = self._reach[side]
        low, high = (other + tail + at(time) + bytes(8) for time in (time_us - back, time_us + ahead + 1))
        matched = False
        for _, partner in call.state.range(low, high):
            matched = partner[1] = True
            pair = (message, partner[0]) if side == b"l" else (partner[0], message)
            call.results += self._pairs(*pair)
        row = side + tail + at(time_us) + call.number.to_bytes(8, "big")
        call.state[row] = [message, matched]
        call.open(b"w" + at(time_us + ahead + 1) + row, True)

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
def as_of(
    inputs: Mapping[str, str],
    output: str,
    *,
    key: Key | Mapping[str, Key],
    time: Field | Mapping[str, Field],
    late: str,
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
    late     the queue of late messages: ``message``, ``input``, ``time``, ``watermark`` and its ``number``
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
    late: str,
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
