"""Event time: watermarks, late messages, and the base of windows and joins.

A message happened at its *event time*, which is a field of the message. Messages may arrive in another order. The
*watermark* of a unit says that earlier times are complete, as far as this unit knows:

    top of an input        the greatest event time that came from it
    watermark              the smallest of (top - delay), over all inputs; it never goes back
    late                   a message that belongs to a time that the watermark has passed

An input that has sent nothing yet holds the watermark back, because its first message may be old. With ``idle``, an
input that has sent nothing for so long (of real time, while this process runs) does not hold it back. An input on which
messages wait is not silent, whatever the clock says: after a pause they are taken first. Time in which this process did
not run, seen by a timer that fires more than ``idle`` after its time, is not silence either. If all inputs are silent,
event time follows the clock: the watermark is the greatest (top - delay), plus the silence since the last message. A
timer moves it. When an input speaks again, its messages before the watermark are late. A message of :func:`watermark`
moves the watermark of its input without being counted; with ``watermark(None)`` it has ended. An input that has ended
is neither silent nor awaited; when all have ended, the watermark is at the end of time.

The watermark moves inside the call of the message that moves it, and all that becomes complete is written by this
call. So without ``idle`` the results depend only on the messages and their order, not on steps, retries or restarts.

Everything is in the state of the processor (one row for each item, ordered by time), and commits with the step:

    0                                    watermark, next due time, counts, time of the timer, tops
    kind (1 byte), time (8 bytes), …     open windows or kept messages, ordered by the time at which they end
    1; e, …                              with early="10s": the time of its timer; open results that have changed

Not guaranteed: that a wrong time in the future does no harm. It moves the watermark, and all messages before it are
late. So check times where messages come in, if their writers' clocks may be wrong.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import xxhash

import cues
from cues import codec
from cues.errors import GraphError, InvalidArgument
from cues.processors import STREAM, vectors

Field = str | Callable[[Any], Any]
"""The name of a field, or a function of a message."""
Key = Field | Sequence[str] | None
"""A field, a function, several fields, or None: one group for all messages."""
Late = str | Callable[[dict[str, Any]], Any]
"""The queue of late messages, or a function of a late message."""
Duration = str | float | timedelta
"""``"90s"``, ``"1m"``, ``"1.5h"``, ``"250ms"``, ``"2d"``; a number of seconds; or a timedelta."""

WATERMARK: Final = "q.type.time/watermark"
"""The type of the messages of :func:`watermark`."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_US: Final = 10**6
_FIRST_US: Final = -62_135_596_800 * _SECOND_US
_LAST_US: Final = 253_402_300_799 * _SECOND_US
"""The years 1 and 9999, between which a datetime can be."""
END_US: Final = 1 << 62
"""After every time: the watermark when all inputs have ended. The top of an ended input is its last top after this."""
HEAD: Final = 0
"""The field of the processor's own row."""
TIMER: Final = 1
"""The field with the time of the timer of early results, in microseconds."""
UPDATE: Final = "update"
"""The value of ``early=`` for a result at each update."""
_EARLY_MOST: Final = 10_000
"""The most rows whose early results one call of the timer writes, because the results of a call are in memory."""

Early = Duration | None
"""``"10s"``: at most so often; ``"update"``: at each update; None: no early results."""


# --- times ----------------------------------------------------------------------------------------


def microseconds(value: Any) -> int:
    """Return a time as microseconds since 1970: of unix seconds, a datetime, or a text in ISO 8601.

    A time without a zone is taken as UTC. Raises :class:`cues.errors.InvalidArgument` for anything else, and for times
    outside of the years 1 to 9999.
    """
    kind = type(value)
    if kind is int or kind is float:
        if not _FIRST_US <= value * _SECOND_US <= _LAST_US:
            raise InvalidArgument(
                f"The time {value!r} is not a number of seconds since 1970 before the year 10000.",
                "give seconds; divide milliseconds by 1000: time=lambda message: message['ts'] / 1000.",
            )
        rounded: int = round(value * _SECOND_US)
        return rounded
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise InvalidArgument(
                f"The time {value[:100]!r} is not a text in ISO 8601.",
                "write it as '2026-01-31T12:00:00Z'; or give time= a function that reads it.",
            ) from None
    if isinstance(value, datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return int((aware - _EPOCH) // timedelta(microseconds=1))
    raise InvalidArgument(
        f"The time of the message is {value!r}, a {kind.__name__}.",
        "give unix seconds, a datetime, or a text in ISO 8601.",
    )


def moment(microseconds: int) -> datetime:
    """Return the time as an aware datetime in UTC, at the first or the last one that there is if it is outside."""
    return _EPOCH + timedelta(microseconds=min(max(microseconds, _FIRST_US), _LAST_US))


def duration(value: Duration, name: str, least: int = 1) -> int:
    """Return a duration as microseconds. Raises :class:`cues.errors.GraphError` if it is wrong or too short."""
    try:
        result = round(cues.duration_of(value, f"{name}=", zero=least == 0) * _SECOND_US)
    except InvalidArgument as error:
        raise GraphError(error.message, error.hint) from None
    if result < least:
        raise GraphError(f"{name}= is {value!r}, less than a microsecond.", "give a longer duration.")
    return result


def watermark(until: Any) -> dict[str, Any]:
    """Return a message that says: its input has no more messages with times before ``until``; None: it has ended.

    ``running.send("clicks", watermark(None))`` closes all open windows. Messages that follow are late. The message is
    for one input. In a queue with partitions it is written to each partition, and no filter takes it away.
    """
    if until is not None:
        microseconds(until)
    return {"q/type": WATERMARK, "watermark": until}


# --- fields and keys ------------------------------------------------------------------------------


def getter(field: Field, name: str) -> Callable[[Any], Any]:
    """Return a function that reads a field; a missing one is None. Raises :class:`cues.errors.GraphError`."""
    if isinstance(field, str):
        return functools.partial(_field, field)
    if callable(field):
        return field
    raise GraphError(f"{name}={field!r} names no field.", "give the name of a field, or a function of a message.")


def _field(name: str, message: Mapping[str, Any]) -> Any:
    return message.get(name)


def check_message(message: Any) -> None:
    """Raise an error if a message could not be written."""
    if not isinstance(message, dict):
        raise TypeError(f"it returned {type(message).__name__}, and a message is a dict")
    reserved = [name for name in message if str(name).startswith("q/") and name not in ("q/type", "q/topics")]
    if reserved:
        raise ValueError(f"the field {reserved[0]!r} is reserved")
    codec.pack(message)


class KeyOf:
    """The key of messages: its value, its digest for rows, and its fields in results."""

    def __init__(self, key: Key, *, joins: bool = False) -> None:
        """``joins``: a function must not return None, because messages without a key would belong together."""
        self._joins = joins
        plain = key is None or isinstance(key, str) or callable(key)
        if not plain and not (isinstance(key, (list, tuple)) and all(isinstance(name, str) for name in key)):
            raise GraphError(f"key={key!r} is not a list of names of fields.", "give key=['carrier', 'origin'].")
        self._several = None if plain else tuple(key)  # type: ignore[arg-type]
        self._key: Any = key
        self.plain = not callable(key)
        """True if the key is fields of the message."""
        self.names = self._several or ((key if isinstance(key, str) else "key",) if key is not None else ())
        """The fields of a result that hold the key."""

    def __call__(self, message: Mapping[str, Any]) -> Any:
        """Return the key. Raises :class:`cues.errors.InvalidArgument` if a field is missing or None."""
        key = self._key
        if key is None:
            return None
        if self._several is not None:
            return [self._required(name, message) for name in self._several]
        if isinstance(key, str):
            return self._required(key, message)
        value = key(message)
        if value is None and self._joins:
            raise InvalidArgument(
                "The function of key= returned None, and a message without a key has no partner.",
                "return a value for every message; or leave such messages out with where=.",
            )
        return value

    def _required(self, name: str, message: Mapping[str, Any]) -> Any:
        value = message.get(name)
        if value is None:
            there = "it is None" if name in message else f"it has {', '.join(map(repr, message)) or 'nothing'}"
            raise InvalidArgument(
                f"The message has no {name!r}, which is its key; {there}.",
                f"add {name!r} to every message, or give key= a function of a message.",
            )
        return value

    def groups(self, columns: Any) -> tuple[Any, list[Any]]:
        """Return the number of each row's key (a numpy array), and the keys by their numbers."""
        codes, keys = vectors.groups(columns, self.names)
        if self._several is not None:
            return codes, [list(each) for each in keys]
        return codes, [each[0] if each else None for each in keys]

    def fields(self, key: Any) -> dict[str, Any]:
        """Return the fields of a result that hold the key."""
        if self._several is not None:
            return dict(zip(self.names, key))
        return dict.fromkeys(self.names, key)

    def columns(self, keys: list[Any]) -> dict[str, list[Any]]:
        """Return the fields of results that hold the keys, as columns."""
        if self._several is not None:
            return dict(zip(self.names, map(list, zip(*keys))))
        return dict.fromkeys(self.names, keys)


def digest(key: Any) -> bytes:
    """Return 16 bytes that identify a key in the fields of rows."""
    return _text_digest(key) if type(key) is str else xxhash.xxh3_128_digest(codec.pack_key(key))


@functools.lru_cache(10_000)
def _text_digest(key: str) -> bytes:
    return xxhash.xxh3_128_digest(codec.pack_key(key))


def at(time_us: int) -> bytes:
    """Return a time as 8 bytes, in the order of times."""
    return (time_us + (1 << 63)).to_bytes(8, "big")


def time_of(part: bytes) -> int:
    """Return the time that :func:`at` has packed."""
    return int.from_bytes(part, "big") - (1 << 63)


def no_time(message: Any) -> int:
    """The event time of messages that have none."""
    return 0


ByMessages = Callable[[list[Any], cues.Process], Iterator[Any]]
"""The function of a processor for many messages: it yields the result of each, and the next one may change it.

The state is encoded after the last one. An exception undoes all, and they are taken singly. So it is for functions of
our own: one of a user would be called twice, and could keep and change what an encoded state would not share.
"""


def one_by_one(self: Any, messages: list[Any], process: cues.Process) -> Iterator[Any]:
    """The method ``by_messages`` of a processor whose messages have only rows in common."""
    return (self(message, process) for message in messages)


# --- the function of a stream ---------------------------------------------------------------------


class Call:
    """One call of the function: the row of the processor, and the messages that the call writes."""

    __slots__ = (
        "at_rows", "binding", "changed", "completed", "due", "late", "lates", "number", "raw", "results", "state",
        "tops", "wake", "watermark",
    )  # fmt: skip

    def __init__(self, state: Any, binding: str | None) -> None:
        """``binding``: the input of the message; None if there is only one."""
        self.state = state
        self.binding: Any = binding
        self.results: list[Any] = []
        self.raw = False
        """True: the results are not messages yet (:meth:`EventTime.made`)."""
        self.late: list[dict[str, Any]] = []
        self.changed = False
        """True: an early result waits for its timer."""
        self.completed: list[int] = []
        """For each result that became complete: the watermark that completed it."""
        self.at_rows: list[int] = []
        """For each result before those, in a call with columns: the offset of the row that made it."""
        self.tops: dict[str | None, int]
        """By input: its greatest event time."""
        self.watermark: int | None
        """None until every input has sent a message."""
        self.due: int | None
        """Nothing becomes complete before this watermark; None if nothing is open."""
        self.number: int
        """The number of messages that a join has kept, or of counted windows that have begun."""
        self.lates: int
        """The number of late messages."""
        self.wake: int | None
        """When the timer of ``idle`` fires; None if it is not set."""
        head: Any = state.get(HEAD) or (None, None, 0, 0, None)
        if type(head) is list:  # of a store that an older version has written
            by_name, *head = head
            head += [each for name, top in by_name.items() for each in (name or None, top)]
        self.watermark, self.due, self.number, self.lates, self.wake, *tops = head
        self.tops = dict(zip(tops[::2], tops[1::2]))

    def end(self) -> None:
        """Write the row of the processor: a tuple of plain values, which is packed once for a step."""
        head: list[Any] = [self.watermark, self.due, self.number, self.lates, self.wake]
        for top in self.tops.items():
            head += top
        self.state[HEAD] = tuple(head)

    def ended(self, name: str | None) -> bool:
        """Return whether an input has ended."""
        return self.tops.get(name, _FIRST_US) >= END_US // 2

    def passed(self, time_us: int) -> bool:
        """Return whether the watermark has reached a time."""
        return self.watermark is not None and time_us <= self.watermark

    def open(self, row: bytes, value: Any) -> None:
        """Add a row that is complete when the watermark reaches the time after its first byte."""
        due = time_of(row[1:9])
        self.state[row] = value
        if self.due is None or due < self.due:
            self.due = due

    def open_many(self, rows: dict[bytes, Any]) -> None:
        """Add rows as :meth:`open` does one, in the order of their times."""
        if rows:
            self.state.set_many(rows)
            due = time_of(next(iter(rows))[1:9])
            self.due = due if self.due is None else min(due, self.due)

    def tell_late(self, message: dict[str, Any], time_us: int, mark: int | None = None, **facts: Any) -> None:
        """Write a message to the queue of late messages. ``mark``: the watermark at that time, if it is another now."""
        mark = self.watermark if mark is None else mark
        assert mark is not None
        self.lates += 1
        late = {"message": message, "time": moment(time_us), "watermark": moment(mark), "number": self.lates}
        self.late.append(late | ({"input": self.binding} if self.binding else {}) | facts)


class EventTime:
    """The function of a stream that follows event time; the base of windows and joins.

    A subclass says what a message does (:meth:`accept`), and what happens to a row that the watermark has reached
    (:meth:`complete`). Its rows begin with :attr:`KIND` and the time, and have :attr:`ROW_BYTES` bytes.
    """

    KIND: bytes = b"w"
    ROW_BYTES: int = 25
    takes: Mapping[str, Any] = STREAM
    never_filtered = (WATERMARK,)
    RESULTS: str = "windows"
    """The output binding of the results."""
    MOVES_FIRST: bool = False
    """True: a message moves the watermark before it is accepted, and is not in what it completes."""
    on_late: Callable[[dict[str, Any]], Any] | None = None
    """The function that makes results of late messages; None: they are written to their own queue."""
    at_end: str = "close"
    """The end of open windows when all sources have ended: ``"close"`` or ``"keep"``."""

    def __init__(
        self,
        bindings: Sequence[str],
        event_time: Any,
        delay: Any,
        idle: Duration | None,
        key: Key,
        early: Early = None,
    ) -> None:
        self._several = len(bindings) > 1
        self._idle_us = None if idle is None else duration(idle, "idle")
        self.updates = early == UPDATE
        """True if each update writes an early result."""
        self._early_us = None if early is None or self.updates else duration(early, "early")
        self.marked = early is not None
        """True if results say if they are final."""
        if idle is not None or self._early_us is not None:
            self.takes = {**self.takes, "timer": self.tick}
        if idle is not None:
            self.__cues_not_shared__ = ("idle=", "tasks do not know when the last message of an input came")
        self._heard: dict[int, dict[str | None, int]] = {}
        """By partition and input: when its last message came. In memory, because after a start all may have waited."""
        self._key = KeyOf(key)
        self.state_key: Any = key
        """The key under which the state is: a start tells that it was changed."""
        names = bindings if self._several else [None]
        times = dict(zip(names, _by_input(bindings, event_time, "time")))
        self._inputs = {
            name: (getter(each, "time"), duration(late, "delay", 0))
            for (name, each), late in zip(times.items(), _by_input(bindings, delay, "delay"))
        }
        """By input: the function that reads the time, and its delay."""
        named = all(isinstance(each, str) or each is no_time for each in times.values())
        self._time_names = times if named else None

    def __call__(self, message: dict[str, Any], process: cues.Process) -> dict[str, Any] | None:
        """Return the late message and the results that became complete, by binding."""
        call = Call(process.state, process.binding if self._several else None)
        silent: Sequence[str | None] = ()
        if self._idle_us is not None:
            now = microseconds(process.now)
            silent = self._silent(call, process, now, call.binding)
            # A timer that failed for good is gone, and one of a clock that was ahead is too late.
            if call.wake is None or abs(call.wake - now) > self._idle_us:
                self._wake(call, process, now + self._idle_us)
        self._take(call, message, silent)
        if call.changed:
            self._await_early(call, process)
        return self._end(call)

    @property
    def by_messages(self) -> ByMessages | None:
        """Takes many messages of an input, and yields the result of each; None if the clock or the user sees the rows.

        The rows that the messages share are decoded and encoded once.
        """
        return self._take_messages if self._idle_us is None and self.hides_state else None

    hides_state: bool = True
    """True if no function of a user is given the value of a row, and so none changes it; ``combine=`` gets copies."""

    def _take_messages(self, messages: list[Any], process: cues.Process) -> Iterator[Any]:
        call = Call(process.state, process.binding if self._several else None)
        for message in messages:
            self._take(call, message, ())
            yield self._written(call) if call.results or call.late else None
            call.results, call.late, call.completed = [], [], []
        if call.changed:
            self._await_early(call, process)
        call.end()

    def _take(self, call: Call, message: dict[str, Any], silent: Sequence[str | None]) -> None:
        """Take a message: move its window or join, and then the watermark."""
        time_of_message, delay = self._inputs[call.binding]
        if message.get("q/type") == WATERMARK:
            until = message.get("watermark")
            top = self._end_of(call) if until is None else microseconds(until) + delay
        else:
            top = microseconds(time_of_message(message))
            if self.MOVES_FIRST:
                self._follow(call, top, silent)
            self.accept(call, message, top)
        self._follow(call, top, silent)

    def _follow(self, call: Call, top: int, silent: Sequence[str | None]) -> None:
        """Move the watermark, if this time or a silent input moves it."""
        before = call.tops.get(call.binding)
        if before is None or top > before:
            call.tops[call.binding] = top
            if self._several or top >= END_US // 2:
                self._move(call, silent)
            else:
                self._advance(call, top - self._inputs[None][1])
        elif silent:
            self._move(call, silent)

    # --- messages in columns ---

    @property
    def by_columns(self) -> Callable[[Any, cues.Process], Any] | None:
        """Takes messages that are rows of columns (:class:`cues.queues.tables.Columns`); None without names of fields.

        The watermark after a row is the greatest one so far, so it is computed for all rows at once. What becomes
        complete in the rows is complete in the order of its times, as it would be row by row. A silent input is known
        by the clock, and text by its reader: these are called with messages, and so are updates with a result each.
        """
        plain = self._idle_us is None and not self.updates and self._time_names is not None and self._key.plain
        return self._take_columns if plain and self.has_columns else None

    has_columns: bool = False
    """True if it has :meth:`accept_columns`."""

    def _take_columns(self, columns: Any, process: cues.Process) -> dict[str, tuple[list[Any], list[int]]]:
        assert self._time_names is not None
        call = Call(process.state, process.binding if self._several else None)
        vectors.refuse(columns, WATERMARK)
        call.raw = True
        name = self._time_names[call.binding]
        times = vectors.zeros(columns) if name is no_time else vectors.times(columns, name)
        marks = self._marks(call, times)
        late = self.accept_columns(call, columns, times, marks)
        call.tops[call.binding] = max(int(times.max()), call.tops.get(call.binding, _FIRST_US))
        self.reach(call, int(marks[-1]))
        if call.changed:
            self._await_early(call, process)
        call.end()
        results = call.results
        offsets = call.at_rows + vectors.first_at(marks[1:], call.completed)
        if call.at_rows and call.completed:  # of one row, first what it made itself
            order = sorted(range(len(offsets)), key=offsets.__getitem__)
            results, offsets = [results[place] for place in order], [offsets[place] for place in order]
        if call.late and self.on_late is not None:
            return {self.RESULTS: self._with_late(call, late, self.made(results, tables=False), offsets)}
        return {self.RESULTS: (self.made(results), offsets)} | ({"late": (call.late, late)} if call.late else {})

    def made(self, results: list[Any], tables: bool = True) -> Any:
        """Return raw results as messages; or, with ``tables``, as a table that has the same."""
        return results

    def reach(self, call: Call, mark: int) -> None:
        """Move the watermark to that of a row of columns, and complete what it has reached."""
        if mark > vectors.NEVER:
            self._advance(call, mark)

    def _marks(self, call: Call, times: Any) -> Any:
        """The watermark before each row, and after the last one."""
        top = call.tops.get(call.binding)
        mark: int | None = END_US
        for name, (_, delay) in self._inputs.items():
            if name != call.binding and mark is not None:
                other = call.tops.get(name)
                mark = None if other is None else mark if call.ended(name) else min(mark, other - delay)
        return vectors.marks(times, top, self._inputs[call.binding][1], mark, call.watermark)

    def accept_columns(self, call: Call, columns: Any, times: Any, marks: Any) -> list[int]:
        """Take rows, with their times, the watermark before each and after the last; return the offsets of late ones.

        What the watermark has reached after the last row is completed then, in its order. A subclass whose rows change
        what an earlier row completes calls :meth:`reach` between them.
        """
        raise NotImplementedError

    # --- results before the end ---

    EARLY_BYTES: int = 25
    """The length of the rows ``e``, and of those that they name: the row of a result, with another first byte."""

    def change(self, call: Call, row: bytes) -> None:
        """An open result has changed, which a row names: write it now, at the next timer, or not before its end."""
        if self.updates:
            self.write_early(call, row)
        elif self._early_us is not None:
            named = b"e" + row[1:]
            if call.state.get(named) is None:
                call.state[named] = True
            call.changed = True

    def change_many(self, call: Call, rows: Sequence[bytes]) -> None:
        """Note that open results have changed, in a call with columns."""
        if self._early_us is not None:
            named = [b"e" + row[1:] for row in rows]
            known = call.state.get_many(named)
            call.state.set_many({row: True for row, there in zip(named, known) if there is None})
            call.changed = True

    def settle(self, call: Call, row: bytes) -> None:
        """A result that a row names is final: it has no early result any more."""
        if self._early_us is not None:
            call.state.pop(b"e" + row[1:], None)

    def write_early(self, call: Call, row: bytes) -> None:
        """Write the present result of a row. It may have ended since the row was noted."""
        raise NotImplementedError

    def _await_early(self, call: Call, process: cues.Process) -> None:
        """Set the timer of early results. One may be missing after a failure, and one of a wrong clock too late."""
        assert self._early_us is not None
        at, now = call.state.get(TIMER), microseconds(process.now)
        if at is None or abs(at - now) > self._early_us:
            self._set_early(call, process, now + self._early_us)

    def _set_early(self, call: Call, process: cues.Process, time_us: int) -> None:
        call.state[TIMER] = time_us
        process.timer("early", moment(time_us))

    def _tick_early(self, process: cues.Process) -> dict[str, Any] | None:
        call = Call(process.state, None)
        rest = self.EARLY_BYTES - 1
        changed = call.state.range(b"e" + bytes(rest), b"f" + bytes(rest), _EARLY_MOST)
        for row, _ in changed:
            del call.state[row]
            self.write_early(call, row)
        if len(changed) < _EARLY_MOST:
            call.state.pop(TIMER, None)
        else:
            self._set_early(call, process, microseconds(process.now))
        return self._end(call)

    def tick(self, timer: dict[str, Any], process: cues.Process) -> dict[str, Any] | None:
        """The function of timers: write early results; or do without the inputs that are silent, and set the next."""
        if timer["key"] == "early":
            return self._tick_early(process) if self._early_us is not None else None
        if self._idle_us is None:
            return None
        call = Call(process.state, None)
        now = microseconds(process.now)
        silent = self._silent(call, process, now)
        call.wake = None
        heard = self._heard[process.partition]
        awaited = [name for name in heard if not call.ended(name)]
        speaking = [heard[name] + self._idle_us for name in awaited if name not in silent]
        if speaking:
            self._move(call, silent)
            self._wake(call, process, min(speaking))
        elif awaited and call.tops:
            mark = max(top - self._inputs[name][1] - END_US * call.ended(name) for name, top in call.tops.items())
            mark += now - max(heard.values())
            self._advance(call, mark)
            if call.due is not None:
                self._wake(call, process, now + call.due - mark)
        return self._end(call)

    # --- the end of all sources ---

    def __cues_open__(self, state: Any) -> bool:
        """Return whether a result waits for the watermark, as the state of a unit says."""
        call = Call(state, None)
        return call.due is not None and (self.awaits_all or self._last_awaited(call) is not None)

    def __cues_close__(self, message: dict[str, Any], process: cues.Process) -> dict[str, Any] | None:
        """Move the watermark to the time at which the last result that waits is complete, and no further."""
        call = Call(process.state, None)
        while (last := self._last_awaited(call)) is not None:  # a row may open others
            self._advance(call, last)
        if self._early_us is not None and call.state.pop(TIMER, None) is not None:
            process.timer("early", None)
        return self._end(call)

    def _last_awaited(self, call: Call) -> int | None:
        if call.due is None:
            return None
        rest = bytes(self.ROW_BYTES - 9)
        open_rows = call.state.range(self.KIND + at(call.due) + rest, self.KIND + at(END_US + 1) + rest)
        return next((time_of(row[1:9]) for row, _ in reversed(open_rows) if self.awaits(call, row)), None)

    awaits_all: bool = True
    """True if each row is a result that waits; else :meth:`awaits` tells."""

    def awaits(self, call: Call, row: bytes) -> bool:
        """Return whether a result may be written when the watermark reaches the time of this row."""
        return self.awaits_all

    def _end(self, call: Call) -> dict[str, Any] | None:
        call.end()
        return self._written(call)

    def _written(self, call: Call) -> dict[str, Any] | None:
        """Return what a call writes, by binding."""
        if self.on_late is not None and call.late:
            made = [self._of_late(late) for late in call.late]
            call.results, call.late = [*itertools.chain.from_iterable(made), *call.results], []
        if not (call.results or call.late):
            return None
        return {self.RESULTS: call.results} | ({"late": call.late} if call.late else {})

    def _with_late(self, call: Call, late: list[int], results: list[Any], offsets: list[int]) -> Any:
        """Return results and their offsets, with what the function of ``late=`` makes: of a row, that is first."""
        some = [(offset, made) for offset, each in zip(late, call.late) for made in self._of_late(each)]
        some = sorted([*some, *zip(offsets, results)], key=lambda pair: pair[0])
        return [made for _, made in some], [offset for offset, _ in some]

    def _of_late(self, late: dict[str, Any]) -> list[Any]:
        assert self.on_late is not None
        found = self.on_late(late)
        found = [] if found is None else found if isinstance(found, list) else [found]
        if not all(isinstance(each, dict) for each in found):
            raise InvalidArgument(
                f"The function of late= returned {found!r:.80}.", "return a message, a list of messages, or None."
            )
        return found

    def _silent(self, call: Call, process: cues.Process, now: int, *speaking: str | None) -> list[str | None]:
        """Return the inputs that have been silent for ``idle``, and have not ended; ``speaking`` has just sent."""
        assert self._idle_us is not None
        heard = self._heard.setdefault(process.partition, dict.fromkeys(self._inputs, now))
        late = 0 if call.wake is None else now - call.wake
        stopped = late if late > self._idle_us else 0  # nobody could speak while this process did not run
        silent = []
        for name, last in heard.items():
            last = min(last + stopped, now)  # the clock may have been ahead
            if name in speaking or (now - last >= self._idle_us and process.unread(name)):
                last = now
            heard[name] = last
            if now - last >= self._idle_us and not call.ended(name):
                silent.append(name)
        return silent

    def _end_of(self, call: Call) -> int:
        top = call.tops.get(call.binding)
        return top if top is not None and call.ended(call.binding) else END_US + (_FIRST_US if top is None else top)

    def _wake(self, call: Call, process: cues.Process, time_us: int) -> None:
        call.wake = time_us
        process.timer("idle", moment(time_us))

    def accept(self, call: Call, message: dict[str, Any], time_us: int) -> None:
        """Take a message, or tell that it is late. An exception sends it to the error queue and changes nothing."""
        raise NotImplementedError

    def complete(self, call: Call, row: bytes, value: Any) -> None:
        """The watermark has reached the time of this row, which was removed from the state."""
        raise NotImplementedError

    def _move(self, call: Call, silent: Sequence[str | None]) -> None:
        """Compute the watermark again; ``silent`` are the inputs that do not hold it back."""
        mark = END_US
        for name, (_, delay) in self._inputs.items():
            if name not in silent:
                top = call.tops.get(name)
                if top is None:
                    return
                mark = mark if call.ended(name) else min(mark, top - delay)
        if mark < END_US or not silent:  # else only the clock can move it
            self._advance(call, mark)

    def _advance(self, call: Call, mark: int) -> None:
        """Move the watermark, and complete all rows that it has reached, in the order of their times."""
        if call.watermark is not None and mark <= call.watermark:
            return
        call.watermark = mark
        if call.due is None or call.due > mark:
            return
        self.expand(call, mark)
        rest = bytes(self.ROW_BYTES - 9)
        reached = self.KIND + at(mark + 1) + rest
        due: int | None = call.due
        while due is not None and due <= mark:
            call.due = None
            # From the first open row: those before it are in the table until the step is committed.
            for row, value in call.state.range(self.KIND + at(due) + rest, reached):
                del call.state[row]
                self.complete(call, row, value)
                made = len(call.results) - len(call.at_rows) - len(call.completed)
                call.completed += [time_of(row[1:9])] * made
            due = call.due  # a row may open others that the watermark has reached too
        call.due = self.due_after(call, mark)

    def expand(self, call: Call, until: int) -> None:
        """Make rows of state of what a call with columns has kept in another form, up to a watermark."""

    def due_after(self, call: Call, mark: int) -> int | None:
        """Return the first watermark after ``mark`` at which something is complete; None if nothing is open."""
        rest = bytes(self.ROW_BYTES - 9)
        following = call.state.range(self.KIND + at(mark + 1) + rest, self.KIND + at(END_US + 1) + rest, 1)
        return time_of(following[0][0][1:9]) if following else None


def _by_input(bindings: Sequence[str], value: Any, name: str) -> list[Any]:
    """Return the value of an option for each input: one for all, or a dict by binding."""
    if not isinstance(value, Mapping):
        return [value] * len(bindings)
    if set(value) != set(bindings):
        raise GraphError(
            f"{name}= has values for {', '.join(map(repr, value))}; the inputs are {', '.join(map(repr, bindings))}.",
            "give one value for each input, or one for all.",
        )
    return [value[binding] for binding in bindings]


def stream(
    function: Any, inputs: Any, outputs: Mapping[str, Any], id: str | None, options: Mapping[str, Any]
) -> cues.Stream:
    """Return the stream of a function of this module; its id is the name of its first output if None is given."""
    if not isinstance(late := outputs.get("late"), str) and callable(late):
        if inspect.iscoroutinefunction(late):
            raise GraphError("The function of late= is `async def`, and is called without await.", "use def.")
        function.on_late = late
        outputs = {name: queue for name, queue in outputs.items() if name != "late"}
    if isinstance(outputs.get("late"), str) and len(set(map(str, outputs.values()))) < len(outputs):
        raise GraphError(
            f"Results and late messages would both be on the queue {outputs['late']!r}.",
            "give late= the name of a queue of its own.",
        )
    given = {"id": id or next(iter(outputs.values())), **options}
    function.at_end = given.pop("at_end", "close")
    if function.at_end not in ("close", "keep"):
        raise GraphError(f"at_end={function.at_end!r} is unknown.", "use 'close' or 'keep'.")
    if "timer" in function.takes:
        given.setdefault("timer", function.tick)
    return cues.Stream(function, inputs, dict(outputs), **given)
