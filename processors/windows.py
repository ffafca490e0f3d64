"""Windows of event time: each closes once, and late messages are written to a queue of their own.

    from cues.processors import windows
    from cues.processors.reducers import count, mean, quantiles

    graph.add(
        windows.tumbling(
            "requests", "per-minute", "1m", time="time", key="path", delay="10s", late="late",
            reduce={"n": count(), "ms": mean("ms"), "p": quantiles("ms", at=(0.5, 0.99))},
        )
    )

writes messages such as ``{"path": "/", "start": 12:00, "end": 12:01, "n": 7, "ms": 3.5, "p": [2.0, 40.0]}``:

    tumbling   windows of one size, one after another
    hopping    windows of one size that begin every ``every``; a message is in several of them
    sessions   windows of one key that end when the key is silent for ``gap``
    counted    windows of one key and a number of messages, which may overlap

A window has the messages with start <= time < end. It closes when the watermark reaches its end
(:mod:`cues.processors.event_time`): the greatest time of all messages so far, less ``delay``. Its message is written by
the step that closes it, once. A message whose window has closed is written to ``late``, with its number among the late
messages; it changes no window.

State: a row for each open window, so at most (number of keys that were active within size + delay) x
(size + delay) / every rows, each with the states of its reducers. Rows of closed windows are deleted. Nothing is
kept for a key without an open window. The windows that close at once are in memory together.

Not guaranteed: that a window closes while no message arrives, because event time then stands still, except with
``idle``. Windows are those of a unit: in a queue with partitions, each partition has its own watermark, and the key
must be the key of the queue.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Mapping
from typing import Any

import cues
from cues.errors import GraphError
from cues.overrides import override
from cues.processors import STREAM, takes, vectors
from cues.processors.event_time import (
    END_US,
    Call,
    Duration,
    Early,
    EventTime,
    Field,
    Key,
    Late,
    at,
    digest,
    duration,
    moment,
    no_time,
    stream,
    time_of,
)
from cues.processors.event_time import watermark as watermark
from cues.processors.reducers import Reducer, Reduction

Inputs = str | cues.AnyOf


class _Windows(EventTime):
    def __init__(
        self,
        inputs: Inputs,
        time: Any,
        delay: Any,
        idle: Duration | None,
        key: Key,
        reduce: Mapping[str, Reducer],
        early: Early,
        *,
        merges: bool = False,
        numbers: bool = False,
    ) -> None:
        """``merges``: a message can make one window of two; ``numbers``: with ``early`` windows have a number."""
        if not isinstance(inputs, (str, cues.AnyOf)):
            raise GraphError(f"The inputs of a window are {inputs!r}.", "give a queue, or cues.AnyOf('a', 'b').")
        super().__init__([inputs] if isinstance(inputs, str) else list(inputs.bindings), time, delay, idle, key, early)
        self._mark_names = (*["number"] * numbers, "final", *["withdrawn"] * merges) if self.marked else ()
        """The fields by which a result replaces another; none without ``early``."""
        self._reduction = Reduction(reduce, [*self._key.names, "start", "end", *self._mark_names, "errors"], merges)
        self.hides_state = self._reduction.hides_state

    def close(
        self,
        call: Call,
        key: Any,
        start: int | None,
        end: int | None,
        states: dict[str, Any] | None,
        number: int | None = None,
    ) -> None:
        """Write the message of a window; without states that the early results of this start are withdrawn."""
        window = key, start, end, states, number
        call.results.append(window if call.raw else self._message(*window))

    def tell(
        self,
        call: Call,
        key: Any,
        start: int | None,
        end: int | None,
        states: dict[str, Any],
        number: int | None = None,
    ) -> None:
        """Write the early result of a window."""
        call.results.append(self._message(key, start, end, states, number, False))

    def _message(
        self, key: Any, start: int | None, end: int | None, states: Any, number: int | None, final: bool = True
    ) -> dict[str, Any]:
        times = {} if start is None else {"start": moment(start)}
        if end is not None:
            times["end"] = moment(end)
        if states is None:
            return self._key.fields(key) | times | {"final": False, "withdrawn": True}
        marks = {name: {"number": number, "final": final, "withdrawn": False}[name] for name in self._mark_names}
        return self._key.fields(key) | times | marks | self._reduction.results(states)

    @override
    def made(self, results: list[Any], tables: bool = True) -> Any:
        if tables and len(results) >= vectors.RESULTS_FEW:
            keys, starts, ends, states, numbers = map(list, zip(*results))
            with contextlib.suppress(Exception):  # of a result; the messages have its reason
                times = {} if starts[0] is None else {"start": starts, "end": ends}
                marks: dict[str, list[Any]] = {"number": numbers, "final": [True], "withdrawn": [False]}
                some = {name: marks[name] * (len(results) if name != "number" else 1) for name in self._mark_names}
                return vectors.table_of(self._key.columns(keys), times, some | self._reduction.columns(states))
        return [self._message(*window) for window in results]

    def _add_pending(self, columns: Any, pending: list[tuple[dict[str, Any], list[int]]]) -> None:
        """Add rows of columns to the states of windows: to each in the order of the rows."""
        codes = vectors.repeated([len(rows) for _, rows in pending])
        if len(codes):
            rows = vectors.joined([rows for _, rows in pending])
            self._reduction.add_rows([states for states, _ in pending], columns, rows, codes)


class _Fixed(_Windows):
    """Rows: ``w``, end, digest of the key: [key, states]."""

    def __init__(self, *given: Any, size: int, every: int, offset: int) -> None:
        super().__init__(*given)
        self._size, self._every, self._offset = size, every, offset

    @override
    def accept(self, call: Call, message: dict[str, Any], time_us: int) -> None:
        key = self._key(message)
        tail = digest(key)
        start = time_us - (time_us - self._offset) % self._every
        missed = []
        changed: list[bytes] | None = [] if self.marked else None
        while start > time_us - self._size:
            end = start + self._size
            if call.passed(end):
                missed.append([moment(start), moment(end)])
            else:
                row = b"w" + at(end) + tail
                window = call.state.get(row)
                if window is None:
                    window = [key, {}]
                    call.open(row, window)
                self._reduction.add(window[1], message)
                if changed is not None:
                    changed.append(row)
            start -= self._every
        if changed:
            for row in reversed(changed):
                self.change(call, row)
        if missed:
            call.tell_late(message, time_us, windows=missed[::-1])

    @property
    @override
    def has_columns(self) -> bool:  # type: ignore[override]
        return max(self._size, self._offset) < vectors.BEYOND

    @override
    def accept_columns(self, call: Call, columns: Any, times: Any, marks: Any) -> list[int]:
        codes, keys = self._key.groups(columns)
        ends, rows, missed = vectors.windows(times, marks[:-1], self._size, self._every, self._offset)
        late = list(dict.fromkeys(missed[0].tolist()))
        self._tell_late(call, columns.messages(late), late, times, marks, missed)
        if not len(ends):
            return late
        first = int(ends.min())
        places = (ends - first) // self._every
        codes = codes if rows is None else codes[rows]
        codes, found = vectors.compact(places * len(keys) + codes, (int(places.max()) + 1) * len(keys))
        tails = [digest(key) for key in keys]
        heads = [b"w" + at(first + place * self._every) for place in range(int(places.max()) + 1)]
        numbers = (found % len(keys)).tolist()
        fields = [heads[place] + tails[n] for place, n in zip((found // len(keys)).tolist(), numbers)]
        windows = call.state.get_many(fields)
        opened = {}
        for place, window in enumerate(windows):
            if window is None:
                windows[place] = opened[fields[place]] = [keys[numbers[place]], {}]
        call.open_many(opened)
        self._reduction.add_rows([window[1] for window in windows], columns, rows, codes)
        self.change_many(call, fields)
        return late

    def _tell_late(self, call: Call, late: list[Any], offsets: list[int], times: Any, marks: Any, missed: Any) -> None:
        """``missed``: the offsets of late rows, and the ends of the windows that each missed, in their order."""
        ends: dict[int, list[int]] = {}
        for offset, end in zip(missed[0].tolist(), missed[1].tolist()):
            ends.setdefault(offset, []).append(end)
        for offset, message in zip(offsets, late):
            windows = [[moment(end - self._size), moment(end)] for end in ends[offset]]
            call.tell_late(message, int(times[offset]), int(marks[offset]), windows=windows)

    @override
    def complete(self, call: Call, row: bytes, value: Any) -> None:
        end = time_of(row[1:9])
        self.settle(call, row)
        self.close(call, value[0], end - self._size, end, value[1])

    @override
    def write_early(self, call: Call, row: bytes) -> None:
        if (window := call.state.get(b"w" + row[1:])) is not None:
            end = time_of(row[1:9])
            self.tell(call, window[0], end - self._size, end, window[1])


class _Sessions(_Windows):
    """Rows: ``s``, digest of the key: [key, due, sessions of [start, end, states]]; ``w``, due, digest: True.

    With ``early``, a session has two more: the start with which an early result was written, or None, and whether it
    has changed since. If a message moves the start, or makes one session of two, that result is withdrawn.

    Only the first end of a key has a row ``w``. A message that makes a session longer does not move it: when the
    watermark reaches it, it is put to the new end.
    """

    EARLY_BYTES = 17

    def __init__(self, *given: Any, gap: int) -> None:
        super().__init__(*given, merges=True)
        self._gap = gap

    @override
    def accept(self, call: Call, message: dict[str, Any], time_us: int) -> None:
        key = self._key(message)
        row = b"s" + digest(key)
        _, due, sessions = call.state.get(row) or (key, None, [])
        start, end = time_us, time_us + self._gap
        states: dict[str, Any] = {}
        apart, joined = [], []
        for session in sessions:
            if session[0] < end and start < session[1]:
                joined.append(session)
                states = self._reduction.merge(session[2], states)
                start, end = min(start, session[0]), max(end, session[1])
            else:
                apart.append(session)
        if call.passed(end):
            call.tell_late(message, time_us, windows=[[moment(start), moment(end)]])
            return
        self._reduction.add(states, message)
        session = [start, end, states]
        apart.append(session)
        apart.sort(key=lambda session: session[0])
        if self.marked:
            for told in self._retell(session, _told(joined)):
                self.close(call, key, told, None, None)
        self._put(call, row, key, due, apart)
        if self.marked:
            self.change(call, row)

    def _retell(self, session: list[Any], told: list[int]) -> list[int]:
        """Note that a session has changed; return the starts of early results that it does not replace."""
        start = session[0]
        session[3:] = [start if start in told else None, True]
        return [each for each in told if each != start]

    @override
    def complete(self, call: Call, row: bytes, value: Any) -> None:
        row = b"s" + row[9:]
        key, _, sessions = call.state[row]
        for session in sessions:
            if call.passed(session[1]):
                self.close(call, key, *session[:3])
        open = [session for session in sessions if not call.passed(session[1])]
        if not any(map(_has_changed, open)):
            self.settle(call, row)
        if open:
            self._put(call, row, key, None, open)
        else:
            del call.state[row]

    def _put(self, call: Call, row: bytes, key: Any, due: int | None, sessions: list[Any]) -> None:
        first = min(session[1] for session in sessions)
        if due is None or first < due:
            if due is not None:
                del call.state[b"w" + at(due) + row[1:]]
            due = first
            call.open(b"w" + at(due) + row[1:], True)
        call.state[row] = [key, due, sessions]

    @override
    def write_early(self, call: Call, row: bytes) -> None:
        row = b"s" + row[1:]
        entry: Any = call.state.get(row) or (None, None, [])
        key, _, sessions = entry
        for session in filter(_has_changed, sessions):
            session[3:] = [session[0], False]
            self.tell(call, key, *session[:3])
            call.state[row] = entry

    has_columns = True

    @override
    def accept_columns(self, call: Call, columns: Any, times: Any, marks: Any) -> list[int]:
        """The sessions of each row are found one after another, without its message; reducers get all rows at once."""
        if self._gap > vectors.BEYOND:
            raise vectors.RowByRow
        codes, keys = self._key.groups(columns)
        rows = [b"s" + digest(key) for key in keys]
        open = _OpenSessions(call, rows, int(marks[-1]))
        pending: dict[int, tuple[dict[str, Any], list[int]]] = {}
        late: dict[int, tuple[int, int, int]] = {}
        withdrawn: list[tuple[int, int, int]] = []
        gap, entries, before, marked = self._gap, open.entries, marks.tolist(), self.marked
        for offset, (start, code, mark) in enumerate(zip(times.tolist(), codes.tolist(), before)):
            time_us, end, row = start, start + gap, rows[code]
            entry = entries[row]
            sessions = entry[2] if entry is not None else []
            joined = [session for session in sessions if session[0] < end and start < session[1]]
            for session in joined:
                start, end = min(start, session[0]), max(end, session[1])
            if end <= mark:
                late[offset] = time_us, start, end
            else:
                told = _told(joined) if marked else []
                if len(joined) == 1:
                    session = joined[0]
                    session[0], session[1] = start, end
                    open.changed.add(row)
                else:
                    states: dict[str, Any] = {}
                    for session in joined:
                        self._add_pending(columns, [pending.pop(id(session[2]), (session[2], []))])
                        states = self._reduction.merge(session[2], states)
                    session = [start, end, states]
                    apart = [session, *(each for each in sessions if each not in joined)]
                    open.put(row, keys[code], entry and entry[1], sorted(apart, key=lambda each: each[0]))
                pending.setdefault(id(session[2]), (session[2], []))[1].append(offset)
                if marked:
                    withdrawn += [(offset, code, each) for each in self._retell(session, told)]
            if before[offset + 1] > mark:
                self._close_passed(call, open, before[offset + 1])
        self._add_pending(columns, list(pending.values()))
        open.finish()
        call.results[:0] = [(keys[code], start, None, None, None) for _, code, start in withdrawn]
        call.at_rows += [offset for offset, _, _ in withdrawn]
        self._note_early(call, open, len(late) < len(before) - 1)
        for (offset, (time_us, *bounds)), message in zip(late.items(), columns.messages(list(late))):
            call.tell_late(message, time_us, before[offset], windows=[list(map(moment, bounds))])
        return list(late)

    def _note_early(self, call: Call, open: _OpenSessions, changes: bool) -> None:
        for row in open.changed if self.marked else ():
            entry = open.entries[row]
            if entry is not None and any(map(_has_changed, entry[2])):
                self.change_many(call, [row])
            else:
                self.settle(call, row)
        call.changed = self.marked and changes

    def _close_passed(self, call: Call, open: _OpenSessions, mark: int) -> None:
        """Close the sessions that the watermark has reached, in the order of :meth:`complete`."""
        while reached := open.reached(mark):
            for due, row in reached:
                key, _, sessions = open.entries[row]
                ended = [session for session in sessions if session[1] <= mark]
                for session in ended:
                    self.close(call, key, *session[:3])
                    call.completed.append(due)
                open.put(row, key, None, [session for session in sessions if session[1] > mark])


def _told(sessions: list[Any]) -> list[int]:
    """The starts with which early results of sessions were written."""
    return [session[3] for session in sessions if len(session) > 3 and session[3] is not None]


def _has_changed(session: list[Any]) -> bool:
    return len(session) > 3 and session[4]


class _OpenSessions:
    """The rows of sessions in a call with columns. They are set in the state at its end."""

    def __init__(self, call: Call, rows: list[bytes], mark: int) -> None:
        """``rows``: those of the keys of the call; those of others that ``mark`` reaches are read too."""
        self._call = call
        self.entries: dict[bytes, Any] = dict(zip(rows, call.state.get_many(rows)))
        """By row: [key, due, sessions]; None without sessions."""
        self.changed: set[bytes] = set()
        self._dues: dict[bytes, int | None] = {}
        """By row, if it was changed: the due time that the state has; None: none."""
        low, high = (b"w" + at(end) + bytes(16) for end in (-(1 << 63), mark + 1))
        due = [(time_of(row[1:9]), b"s" + row[9:]) for row, _ in call.state.range(low, high)]
        others = [row for _, row in due if row not in self.entries]
        self.entries.update(zip(others, call.state.get_many(others)))
        self._heap = due
        """The due times of entries, in order; some have moved since."""

    def put(self, row: bytes, key: Any, due: int | None, sessions: list[Any]) -> None:
        """Set the sessions of a key. ``due`` stays if none ends before it; None: the first end."""
        entry = self.entries[row]
        self.changed.add(row)
        self._dues.setdefault(row, None if entry is None else entry[1])
        if not sessions:
            self.entries[row] = None
            return
        first = min(session[1] for session in sessions)
        if due is None or first < due:
            due = first
            heapq.heappush(self._heap, (due, row))
        self.entries[row] = [key, due, sessions]

    def reached(self, mark: int) -> list[tuple[int, bytes]]:
        """Return the rows whose due time the watermark has reached, in order, with that time."""
        reached: list[tuple[int, bytes]] = []
        while self._heap and self._heap[0][0] <= mark:
            due, row = heapq.heappop(self._heap)
            if (entry := self.entries[row]) is not None and entry[1] == due and (due, row) not in reached[-1:]:
                reached.append((due, row))
        return reached

    def finish(self) -> None:
        """Set the rows in the state."""
        call, state = self._call, self._call.state
        for row, before in self._dues.items():
            entry = self.entries[row]
            now = None if entry is None else entry[1]
            if before is not None and before != now:
                del state[b"w" + at(before) + row[1:]]
            if now is not None and before != now:
                state[b"w" + at(now) + row[1:]] = True
        for row in self.changed:
            if self.entries[row] is not None:
                state[row] = self.entries[row]
            elif row in state:
                del state[row]
        following = state.range(b"w" + at(-(1 << 63)) + bytes(16), b"w" + at(END_US + 1) + bytes(16), 1)
        call.due = time_of(following[0][0][1:9]) if following else None


class _Counted(_Windows):
    """Rows: ``c``, digest of the key: [key, count, first time, last time, due, states]; ``w``, due, digest: True.

    With ``early``, a window has one more: its number.
    """

    EARLY_BYTES = 17

    def __init__(self, *given: Any, count: int, within: int | None, timed: bool) -> None:
        super().__init__(*given, numbers=True)
        self._count, self._within, self._timed = count, within, timed

    @override
    def accept(self, call: Call, message: dict[str, Any], time_us: int) -> None:
        key = self._key(message)
        row = b"c" + digest(key)
        window = call.state.get(row)
        if window is None:
            window = [key, 0, time_us, time_us, None, {}]
            if self._within is not None:
                # A message that is older than the watermark does not wait in vain.
                due = max(time_us, call.watermark if call.watermark is not None else time_us) + self._within
                window[4] = min(due, END_US)
                call.open(b"w" + at(window[4]) + row[1:], True)
        self._number(call, window)
        window[1] += 1
        window[2], window[3] = min(window[2], time_us), max(window[3], time_us)
        self._reduction.add(window[5], message)
        over = window[4] is not None and call.passed(min(window[4], END_US))  # no time comes after the end
        if window[1] < self._count and not over:
            call.state[row] = window
            if self.marked:
                self.change(call, row)
            return
        self.settle(call, row)
        if row in call.state:
            del call.state[row]
        if window[4] is not None:
            del call.state[b"w" + at(window[4]) + row[1:]]
            if call.due == window[4]:
                call.due = self.due_after(call, window[4] - 1)
        self._finish(call, window)

    @override
    def complete(self, call: Call, row: bytes, value: Any) -> None:
        row = b"c" + row[9:]
        window = call.state[row]
        del call.state[row]
        self.settle(call, row)
        self._finish(call, window)

    def _finish(self, call: Call, window: list[Any]) -> None:
        self._number(call, window)
        self.close(call, *self._of(window))

    def _of(self, window: list[Any]) -> tuple[Any, int | None, int | None, dict[str, Any], int | None]:
        """The key, the times, the states and the number of a window."""
        key, _, first, last, _, states = window[:6]
        return (key, *((first, last) if self._timed else (None, None)), states, window[6] if self.marked else None)

    def _number(self, call: Call, window: list[Any]) -> None:
        """Give a window that has begun the next number, if results have one."""
        if self.marked and len(window) == 6:
            call.number += 1
            window.append(call.number)

    @override
    def write_early(self, call: Call, row: bytes) -> None:
        if (window := call.state.get(b"c" + row[1:])) is not None:
            self.tell(call, *self._of(window))

    @property
    @override
    def has_columns(self) -> bool:  # type: ignore[override]
        return self._within is None or self._within < vectors.BEYOND

    @override
    def accept_columns(self, call: Call, columns: Any, times: Any, marks: Any) -> list[int]:
        """Counts and watermarks tell the window of each row; reducers get all rows at once."""
        mark = int(marks[-1])
        if self._within is not None and mark >= END_US // 2:
            raise vectors.RowByRow
        codes, keys = self._key.groups(columns)
        tails = [digest(key) for key in keys]
        before = call.state.get_many([b"c" + tail for tail in tails])
        over = self._over_before(call, marks, vectors.first_rows(codes, len(keys)), tails, before)
        dues, until = vectors.ends(times, marks, self._within)
        rooms = [self._count if window is None else max(1, self._count - window[1]) for window in before]
        firsts = [-1 if window is None else vectors.reached(marks, window[4]) for window in before]
        codes, found = vectors.numbered(codes, rooms, self._count, until, firsts)
        lows, highs = vectors.bounds(times, codes, len(found))
        sizes = vectors.counts(codes, len(found))
        windows, counted, full, begun = list(before), [], [], []
        for (number, first, last, is_full), size, low, high in zip(found, sizes, lows, highs):
            window = windows[number]
            if window is None:
                window = windows[number] = [keys[number], 0, low, high, dues and dues[first], {}]
            window[1] += size
            window[2], window[3] = min(window[2], low), max(window[3], high)
            counted.append(window)
            begun.append((first, window))
            call.changed = call.changed or (self.marked and (size > 1 or not is_full))
            if is_full:
                full.append((last, window))
                windows[number] = None
            elif window[4] is not None and window[4] <= mark:
                over.append((window[4], tails[number], window))
                windows[number] = None
        self._reduction.add_rows([window[5] for window in counted], columns, None, codes)
        for _, window in sorted(begun, key=lambda each: each[0]) if self.marked else ():
            self._number(call, window)
        for row, window in sorted(full):
            self._finish(call, window)
            call.at_rows.append(row)
        for due, _, window in sorted(over):
            self._finish(call, window)
            call.completed.append(due)
        self._put(call, tails, before, windows)
        if self.marked:
            for tail, window in zip(tails, windows):
                (self.settle if window is None else self.change)(call, b"c" + tail)
        if self._within is not None or call.due is not None:
            call.due = self.due_after(call, mark)
        return []

    def _over_before(
        self, call: Call, marks: Any, firsts: list[int], tails: list[bytes], windows: list[Any]
    ) -> list[tuple[int, bytes, list[Any]]]:
        """Take the windows whose time is over before a row of their key comes, which is in ``firsts``.

        They are None in ``windows`` afterwards.
        """
        over = []
        numbers = {tail: number for number, tail in enumerate(tails)}
        low, high = (b"w" + at(end) + bytes(16) for end in (call.due or 0, int(marks[-1]) + 1))
        for row, _ in call.state.range(low, high) if call.due is not None and low < high else ():
            due, tail = time_of(row[1:9]), row[9:]
            number = numbers.get(tail)
            if number is None or vectors.reached(marks, due) < firsts[number]:
                over.append((due, tail, call.state[b"c" + tail]))
                self.settle(call, b"c" + tail)
                del call.state[row], call.state[b"c" + tail]
                if number is not None:
                    windows[number] = None
        return over

    def _put(self, call: Call, tails: list[bytes], before: list[Any], windows: list[Any]) -> None:
        """Set the rows of windows in the state; None: there is none, or no more."""
        rows: dict[bytes, Any] = {}
        for tail, old, new in zip(tails, before, windows):
            due, following = (each and each[4] for each in (old, new))
            if due is not None and due != following:
                del call.state[b"w" + at(due) + tail]
            if following is not None and due != following:
                rows[b"w" + at(following) + tail] = True
            if new is not None:
                rows[b"c" + tail] = new
            elif old is not None:
                del call.state[b"c" + tail]
        call.state.set_many(rows)


class _Overlapping(_Windows):
    """Counted windows that overlap. Rows: ``o``, digest of the key: [key, count since the last one began, due,
    windows of [due, count, first time, last time, states, number]]; ``w``, due, digest: True, for the first due time.
    """

    EARLY_BYTES = 17

    def __init__(self, *given: Any, count: int, within: int | None, timed: bool, every: int) -> None:
        super().__init__(*given, numbers=True)
        self._count, self._within, self._timed, self._every = count, within, timed, every

    @override
    def accept(self, call: Call, message: dict[str, Any], time_us: int) -> None:
        key = self._key(message)
        row = b"o" + digest(key)
        entry = call.state.get(row) or [key, 0, None, []]
        for window in self._add(call, entry, time_us):
            self._reduction.add(window[4], message)
        self._end_full(call, row, entry)

    def _add(self, call: Call, entry: list[Any], time_us: int) -> list[list[Any]]:
        """Count a message of a key in its windows, which are returned."""
        _, since, _, windows = entry
        if not windows or since >= self._every:
            since, due = 0, None
            if self._within is not None:
                due = max(time_us, call.watermark if call.watermark is not None else time_us) + self._within
                due = min(due, END_US)
            call.number += self.marked
            windows.append([due, 0, time_us, time_us, {}, call.number])
        entry[1] = since + 1
        for window in windows:
            window[1] += 1
            window[2], window[3] = min(window[2], time_us), max(window[3], time_us)
        return list(windows)

    def _end_full(self, call: Call, row: bytes, entry: list[Any]) -> None:
        full = [w for w in entry[3] if w[1] >= self._count or (w[0] is not None and call.passed(w[0]))]
        self._end_windows(call, row, entry, full)
        if self.marked and entry[3]:
            self.change(call, row)

    def _end_windows(self, call: Call, row: bytes, entry: list[Any], ended: list[list[Any]]) -> None:
        """Write windows of a key, and set its rows."""
        for window in ended:
            self.close(call, *self._of(entry[0], window))
        over = set(map(id, ended))
        windows = entry[3] = [window for window in entry[3] if id(window) not in over]
        before, due = entry[2], min((window[0] for window in windows if window[0] is not None), default=None)
        entry[2] = due
        if before is not None and before != due:
            del call.state[b"w" + at(before) + row[1:]]
            if call.due == before:
                call.due = self.due_after(call, before - 1)
        if due is not None and due != before:
            call.open(b"w" + at(due) + row[1:], True)
        if windows:
            call.state[row] = entry
        else:
            call.state.pop(row, None)
            self.settle(call, row)

    def _of(self, key: Any, window: list[Any]) -> tuple[Any, int | None, int | None, dict[str, Any], int | None]:
        _, _, first, last, states, number = window
        return (key, *((first, last) if self._timed else (None, None)), states, number or None)

    @override
    def complete(self, call: Call, row: bytes, value: Any) -> None:
        due, row = time_of(row[1:9]), b"o" + row[9:]
        entry = call.state[row]
        entry[2] = None  # its row was removed
        self._end_windows(call, row, entry, [window for window in entry[3] if window[0] == due])

    @override
    def write_early(self, call: Call, row: bytes) -> None:
        key, _, _, windows = call.state.get(b"o" + row[1:]) or (None, 0, None, [])
        for window in windows:
            self.tell(call, *self._of(key, window))

    has_columns = True

    @override
    def accept_columns(self, call: Call, columns: Any, times: Any, marks: Any) -> list[int]:
        """The windows of each row are found one after another, without its message; reducers get all rows at once."""
        if self._within is not None and (self._within > vectors.BEYOND or int(marks[-1]) >= END_US // 2):
            raise vectors.RowByRow
        codes, keys = self._key.groups(columns)
        rows = [b"o" + digest(key) for key in keys]
        call.state.get_many(rows)  # reads them at once
        pending: dict[int, tuple[dict[str, Any], list[int]]] = {}
        before = marks.tolist()
        for offset, (time_us, code) in enumerate(zip(times.tolist(), codes.tolist())):
            row = rows[code]
            entry = call.state.get(row) or [keys[code], 0, None, []]
            for window in self._add(call, entry, time_us):
                pending.setdefault(id(window[4]), (window[4], []))[1].append(offset)
            self._end_full(call, row, entry)
            if before[offset + 1] > before[offset]:
                self.reach(call, before[offset + 1])
            call.at_rows += [offset] * (len(call.results) - len(call.at_rows))
            call.completed.clear()
        self._add_pending(columns, list(pending.values()))
        return []


@takes(STREAM)
def tumbling(
    inputs: Inputs,
    output: str,
    size: Duration,
    *,
    time: Field | Mapping[str, Field],
    reduce: Mapping[str, Reducer],
    late: Late,
    key: Key = None,
    delay: Duration | Mapping[str, Duration] = 0,
    idle: Duration | None = None,
    early: Early = None,
    offset: Duration = 0,
    id: str | None = None,
    **options: Any,
) -> cues.Stream:
    """Return a stream that reduces the messages of each key in windows of one size, one after another.

    inputs   a queue, or ``cues.AnyOf(…)``; the watermark is the smallest of the inputs
    output   the queue of the results: key, ``start``, ``end`` (datetimes in UTC), and the results of ``reduce``
    size     ``"1m"``, ``"1.5h"``, seconds, or a timedelta; windows begin at multiples of it since 1970, plus ``offset``
    time     the event time: a field or a function of a message; unix seconds, datetime or ISO text (without a zone:
             UTC). A time that cannot be read sends the message to the error queue. A dict by input, if they differ
    reduce   the results by name (:mod:`cues.processors.reducers`)
    late     the queue of late messages: ``message``, ``time``, ``watermark``, ``windows`` that it missed, and its
             ``number``; with several inputs ``input``. Or a function of such a message, which returns a message or a
             list of them for ``output``, or None; if it raises, the late message is written to the error queue
    key      a field, a function, or a list of fields; None: one window for all messages
    delay    how late messages may be: a window closes when a message of this much after its end has arrived
    idle     an input that is silent for so long does not hold the watermark back; if all are, event time follows the
             clock; None: it holds it, and windows stay open while no message comes
    early    results of windows that are still open: ``"10s"``, seconds or a timedelta: by the clock, at most so often,
             of each window that has changed; ``"update"``: at each message of a window. Results then have ``final``:
             False in early ones, True in the last one of a window, which replaces them; None: none
    id       the name of the processor; None: the name of ``output``
    options  those of :class:`cues.Stream`: ``errors``, ``where``, ``types``, …; and ``at_end="keep"``: windows stay
             open for the next run when all sources have ended; else they are closed

    Raises :class:`cues.errors.GraphError` for arguments that do not fit.

    Kind: stream
    Needs: nothing; extra `windows` for `quantiles` and `distinct`
    Guarantee: exactly once: each window closes once, each message is in its window or on the late queue
    Mechanism: a row of state for each open window, ordered by its end, committed with the results
    """
    size_us, offset_us = duration(size, "size"), duration(offset, "offset", 0)
    function = _Fixed(inputs, time, delay, idle, key, reduce, early, size=size_us, every=size_us, offset=offset_us)
    return stream(function, inputs, {"windows": output, "late": late}, id, options)


@takes(STREAM)
def hopping(
    inputs: Inputs,
    output: str,
    size: Duration,
    every: Duration,
    *,
    time: Field | Mapping[str, Field],
    reduce: Mapping[str, Reducer],
    late: Late,
    key: Key = None,
    delay: Duration | Mapping[str, Duration] = 0,
    idle: Duration | None = None,
    early: Early = None,
    offset: Duration = 0,
    id: str | None = None,
    **options: Any,
) -> cues.Stream:
    """Return a stream that reduces the messages of each key in windows that begin every ``every``, and overlap.

    A message is in about size / every windows, and costs as much as so many messages. If some of its windows have
    closed, it is counted in the others, and is also written to ``late``. The other arguments are those of
    :func:`tumbling`.

    Kind: stream
    Needs: nothing; extra `windows` for `quantiles` and `distinct`
    Guarantee: exactly once: each window closes once, each message is in its windows or on the late queue
    Mechanism: a row of state for each open window, ordered by its end, committed with the results
    """
    size_us, every_us = duration(size, "size"), duration(every, "every")
    if every_us > size_us:
        raise GraphError(
            f"every={every!r} is more than size={size!r}: messages between two windows would be in none.",
            "give every= at most the size.",
        )
    offset_us = duration(offset, "offset", 0)
    function = _Fixed(inputs, time, delay, idle, key, reduce, early, size=size_us, every=every_us, offset=offset_us)
    return stream(function, inputs, {"windows": output, "late": late}, id, options)


@takes(STREAM)
def sessions(
    inputs: Inputs,
    output: str,
    gap: Duration,
    *,
    time: Field | Mapping[str, Field],
    reduce: Mapping[str, Reducer],
    late: Late,
    key: Key = None,
    delay: Duration | Mapping[str, Duration] = 0,
    idle: Duration | None = None,
    early: Early = None,
    id: str | None = None,
    **options: Any,
) -> cues.Stream:
    """Return a stream that reduces the messages of each key in sessions.

    Two messages of a key whose times differ by less than ``gap`` are in one session. It ends ``gap`` after its last
    message, which is ``end`` of the result. A message joins two sessions that are open; one that could only join closed
    ones is late. All open sessions of a key are one row. The other arguments are those of :func:`tumbling`.

    With ``early``, key and ``start`` name a session. A message that moves the start of a session, or makes one of two,
    withdraws the early results of the other starts: it writes a message with the key, that ``start``, and ``withdrawn``
    True, which is False in all others.

    Kind: stream
    Needs: nothing; extra `windows` for `quantiles` and `distinct`
    Guarantee: exactly once: each session closes once, each message is in a session or on the late queue
    Mechanism: a row of state for each key with open sessions, and one for its first end, committed with the results
    """
    function = _Sessions(inputs, time, delay, idle, key, reduce, early, gap=duration(gap, "gap"))
    return stream(function, inputs, {"windows": output, "late": late}, id, options)


@takes(STREAM)
def counted(
    inputs: Inputs,
    output: str,
    count: int,
    *,
    reduce: Mapping[str, Reducer],
    time: Field | Mapping[str, Field] | None = None,
    every: int | None = None,
    within: Duration | None = None,
    key: Key = None,
    delay: Duration | Mapping[str, Duration] = 0,
    idle: Duration | None = None,
    early: Early = None,
    id: str | None = None,
    **options: Any,
) -> cues.Stream:
    """Return a stream that reduces every ``count`` messages of a key, in the order of their arrival.

    With ``every=n``, a window begins with the first message of a key, and with each nth message after it, so that
    windows overlap and a message is in about count / n of them. A message that would be in no window, because the last
    one has ended by time, begins one.

    With ``time``, ``start`` and ``end`` of the result are the smallest and the greatest event time. With ``within``, a
    window closes with fewer messages when the watermark has passed its first message by so much, and at once when all
    inputs have ended. No message is late. With ``early``, results also have ``number``: windows are numbered as they
    begin, in each partition from 1. The other arguments are those of :func:`tumbling`.

    State: a row for each key whose windows are not full. Without ``within`` such a row stays, so the bound is the
    number of keys.

    Kind: stream
    Needs: nothing; extra `windows` for `quantiles` and `distinct`
    Guarantee: exactly once: each message is in one window, or with `every` in its windows
    Mechanism: a row of state for each key, committed with the results
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise GraphError(f"count={count!r} is not a number of messages.", "give a count from 1.")
    if every is not None and not (type(every) is int and 1 <= every <= count):
        raise GraphError(
            f"every={every!r} is not a number of messages from 1 to count={count}.",
            "give the number of messages after which the next window begins.",
        )
    if within is not None and time is None:
        raise GraphError("within= needs event time.", "give time= the field of the event time.")
    timeout = None if within is None else duration(within, "within")
    event_time = no_time if time is None else time
    sizes: dict[str, Any] = {"count": count, "within": timeout, "timed": time is not None}
    given = inputs, event_time, delay, idle, key, reduce, early
    function = _Counted(*given, **sizes) if every is None else _Overlapping(*given, **sizes, every=every)
    return stream(function, inputs, {"windows": output}, id, options)
