"""Streams that change the shape of a flow: functions that take one line to use.

    graph.stream("clicks", "unique")(shape.dedupe("id", within="1d"))
    graph.add(shape.debounce("edits", "settled", key="document", quiet="5s"))
    graph.stream("orders", "lines")(shape.flat_map("lines"))
    graph.stream("orders", {"big": "big", "rest": "small"})(shape.split(big=lambda o: o["total"] > 99, other="rest"))
    graph.stream("clicks", "some")(shape.sample(0.01, by="user"))
    graph.stream(cues.AnyOf(a="app", b="db"), "log")(shape.merge("at", "a", "b"))
    graph.stream("visits", "placed", concurrency=8)(shape.enrich("ip", "place", ask_where, ttl="1h"))

Each call returns a function for ``graph.stream`` or ``cues.Stream``, of the name of the call: give ``id=`` if a graph
has two of one. :func:`debounce` returns a ``cues.Stream``, because it has a function for messages and one for timers.
State of :func:`dedupe` and :func:`merge` is that of the processor: it commits with the step, is bounded as each says,
and needs ``concurrency=1``. Over an input with several partitions each partition is on its own, so the
queue needs ``key=`` of the same field.

Nothing is dropped in silence but duplicates, superseded messages and what :func:`sample` leaves out: a message that
comes too late (:class:`LateMessage`), or that no branch takes, fails, and is written to the error queue.

Not guaranteed: that a message leaves :func:`merge` while another input is silent and the buffer is not full.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from time import monotonic
from typing import Any, Final

import xxhash

import cues
from cues import codec
from cues.arguments import check_number, text_of
from cues.errors import InvalidArgument
from cues.overrides import override
from cues.processors import FREE, STREAM, takes, vectors

Message = dict[str, Any]
Stream = Callable[..., Any]

MERGE_MESSAGES_MAX: Final = 10_000
"""Messages that :func:`merge` holds by default: at 1 KB each they are 10 MB of state."""

_SWEPT: Final = 2
"""Expired entries that each message removes: more than the one that it adds, so the state shrinks to its bound."""


class LateMessage(cues.CuesError):
    """Raised for a message whose time is before what the state still knows. ``time`` is in seconds."""

    time: float


@takes(STREAM)
def dedupe(key: str | Callable[[Message], Any], within: float | str | timedelta, time: str | None = None) -> Stream:
    """Return a function that passes the first message of each key, and drops its repetitions within a horizon.

    ``key``     a field, or a function of the message
    ``within``  seconds, ``"90s"``, ``"15m"``, ``"12h"``, ``"1d"``, ``"2w"`` or a timedelta
    ``time``    a field with the time of the message: seconds, or an aware datetime. None: the clock of this machine

    A message is dropped if a message of its key was passed less than ``within`` before it or after it. With ``time``, a
    message that is ``within`` or more older than the newest one fails as :class:`LateMessage`. The state has the keys
    that were passed within the last 2 × ``within``, and at most one more for each that waits to be removed: every
    message removes two expired ones.

    Kind: stream
    Needs: nothing
    Guarantee: exactly once: a passed message is passed once, also after kill -9
    Mechanism: state of the processor, committed with the step
    """
    within_s = cues.duration_of(within, "within")
    of = _of("dedupe(key", key)
    _check_field("dedupe(time", time)

    @takes(STREAM)
    def dedupe(message: Message, process: cues.Process) -> Message | None:
        known, order, row = process.state_of("keys"), process.state_of("order"), process.state_of("row")
        newest, head, tail = row.get("row", (None, 0, 0))
        value = of(message)
        if time is None:
            at = newest = process.now.timestamp()  # a clock that was ahead is not believed any longer
        else:
            at = _time_of(message, time)
            if newest is not None and at <= newest - within_s:
                raise LateMessage(
                    f"The time {at:.3f} is {newest - at:.3f} s before the newest one, and within= is {within_s:g} s.",
                    "set a larger within=, or take the message from the error queue.",
                    time=at,
                )
        newest = at if newest is None else max(at, newest)
        for _ in range(_SWEPT):
            if head == tail or abs(newest - order[head][1]) < 2 * within_s:
                break
            old, passed_at = order.pop(head)
            left = [other for other in known.get(old, ()) if other != passed_at]
            if left:
                known[old] = left
            elif old in known:
                del known[old]
            head += 1
        times = known.get(value, [])
        passes = all(abs(at - other) >= within_s for other in times)
        if passes:
            known[value] = [*times, at]
            order[tail] = [value, at]
            tail += 1
        row["row"] = [newest, head, tail]
        return message if passes else None

    def by_columns(columns: Any, process: cues.Process) -> tuple[Any, list[int]]:
        """Do the same for rows of columns, with what they need of the state read and set at once."""
        assert isinstance(key, str)
        if len(columns) < vectors.ROWS_FEW:
            raise vectors.RowByRow
        codes, keys = vectors.groups(columns, [key])
        now = process.now.timestamp() if time is None else None
        times = None if time is None else vectors.seconds(columns, time)
        row = process.state_of("row")
        newest, head, tail = row.get("row", (None, 0, 0))
        known = _Held(process.state_of("keys"), [value for (value,) in keys])
        order = _Held(process.state_of("order"), list(range(tail, tail + len(keys))))
        passed = []
        for offset, code in enumerate(codes.tolist()):
            at = now if times is None else times[offset]
            if now is not None:
                newest = now
            elif newest is not None and at <= newest - within_s:
                raise vectors.RowByRow
            newest = at if newest is None else max(at, newest)
            for _ in range(_SWEPT):
                if head == tail or abs(newest - order[head][1]) < 2 * within_s:
                    break
                old, passed_at = order[head]
                order[head] = None
                if (before := known[old]) is not None:
                    known[old] = [other for other in before if other != passed_at] or None
                head += 1
            (value,) = keys[code]
            others = known[value] or []
            if all(abs(at - other) >= within_s for other in others):
                known[value] = [*others, at]
                order[tail] = [value, at]
                tail += 1
                passed.append(offset)
        known.finish()
        order.finish()
        row["row"] = [newest, head, tail]
        return (columns.rows if len(passed) >= vectors.RESULTS_FEW else columns.messages)(passed), passed

    dedupe.state_key = key  # type: ignore[attr-defined]
    if isinstance(key, str):
        dedupe.by_columns = by_columns  # type: ignore[attr-defined]
    return dedupe


class _Held:
    """Fields of the state in a call with columns: read at once, and set at its end. None: the field is missing."""

    def __init__(self, state: Any, fields: list[Any]) -> None:
        self._state = state
        # By type too: the state has different rows for 1 and True.
        self._values = {(type(field), field): value for field, value in zip(fields, state.get_many(fields))}
        self._changed: dict[tuple[type, Any], bool] = {}
        """True if the state has each field that was set."""

    def __getitem__(self, field: Any) -> Any:
        place = type(field), field
        if place not in self._values:
            self._values[place] = self._state.get(field)
        return self._values[place]

    def __setitem__(self, field: Any, value: Any) -> None:
        place = type(field), field
        if place not in self._changed:
            self._changed[place] = self[field] is not None
        self._values[place] = value

    def finish(self) -> None:
        """Set the fields that have changed."""
        self._state.set_many(
            {f: self._values[kind, f] for kind, f in self._changed if self._values[kind, f] is not None}
        )
        for (kind, field), was_there in self._changed.items():
            if was_there and self._values[kind, field] is None:
                del self._state[field]


@takes(STREAM)
def debounce(
    input: str,
    output: str,
    *,
    key: str | Callable[[Message], Any],
    quiet: float | str | timedelta,
    longest: float | str | timedelta | None = None,
    count: str | None = None,
    id: str | None = None,
    **options: Any,
) -> cues.Stream:
    """Return a stream that passes the last message of a key after the key was quiet for a time.

    ``input``    a queue; with several partitions it needs ``key=`` of the same field
    ``output``   the queue of the messages that pass
    ``key``      a field, or a function of the message
    ``quiet``    seconds, ``"5s"``, ``"15m"`` or a timedelta: a message passes when none of its key came for so long
    ``longest``  a key that is never quiet passes its last message so long after the first one that is held
    ``count``    a field of the output: the number of messages for which it stands, itself and those that it superseded
    ``id``       the name of the processor; None: the name of ``output``
    ``options``  those of :class:`cues.Stream`

    ``graph.add(shape.debounce("edits", "settled", key="document", quiet="5s"))``. Time is the clock of this machine
    when a message is taken. The state has one message for each key that is not quiet. A message that is superseded
    changes this state and nothing else. If a key has messages on the queue when its time is over, for example after a
    long stop, its last known message may pass before they are taken.

    Kind: stream
    Needs: nothing
    Guarantee: exactly once: of each quiet time one message, the last one, also after kill -9
    Mechanism: state and a durable timer of the key, committed with the step
    """
    _check_field("debounce(count", count)
    quiet_s = cues.duration_of(quiet, "quiet")
    longest_s = None if longest is None else cues.duration_of(longest, "longest")

    def passed(timer: Message, process: cues.Process) -> Message:
        message, held, _ = process.state.pop("held")
        return message if count is None else {**message, count: held}

    @takes({**STREAM, "key": key, "timer": passed})
    def debounce(message: Message, process: cues.Process) -> None:
        state, now = process.state, process.now.timestamp()
        _, held, first = state.get("held", (None, 0, now))
        first = min(first, now)  # a clock that was ahead is not believed any longer
        state["held"] = [message, held + 1, first]
        at = now + quiet_s if longest_s is None else min(now + quiet_s, first + longest_s)
        process.timer(key(message) if callable(key) else message[key], at)

    return cues.Stream(debounce, input, output, **{"id": id or output, "key": key, "timer": passed, **options})


@takes(FREE)
def flat_map(of: str | Callable[[Message], Iterable[Message] | None]) -> Stream:
    """Return a function that makes several messages of one.

    ``of``  a function of the message that returns messages; or a field with a list. Of a field, each item that is a
            dict becomes a message with the other fields of the message and its own, which replace those of the same
            name; any other item is under the name of the field. A message without the field, or with None, has none.

    Kind: stream
    Needs: nothing
    Guarantee: exactly once
    Mechanism: a function without state
    """
    if not callable(of):
        _of("flat_map(of", of)

    @takes(FREE)
    def flat_map(message: Message) -> list[Message]:
        if callable(of):
            return list(of(message) or ())
        items = message.get(of)
        if not isinstance(items, (list, tuple, type(None))):
            raise TypeError(f"$.{of}: expected array, found {items!r:.60}")
        rest = {name: value for name, value in message.items() if name != of}
        return [{**rest, **(item if isinstance(item, dict) else {of: item})} for item in items or ()]

    return flat_map


@takes(FREE)
def split(
    branches: Mapping[str, Callable[[Message], Any]] | None = None,
    *,
    other: str | None = None,
    **named: Callable[[Message], Any],
) -> Stream:
    """Return a function that gives each message to the first branch whose predicate is true.

    ``branches``  predicates by output binding, also as keyword arguments, in the order in which they are asked
    ``other``     the output of messages that no branch takes; None: such a message fails

    Kind: stream
    Needs: nothing
    Guarantee: exactly once
    Mechanism: a function without state
    """
    if not isinstance(branches, (Mapping, type(None))):
        raise InvalidArgument(f"split({branches!r:.60}).", "pass a dict: the predicate by output binding.")
    asked = {**(branches or {}), **named}
    for binding, passes in asked.items():
        if not callable(passes):
            raise InvalidArgument(f"split({binding}={passes!r:.60}).", "pass a function of a message.")
    if not isinstance(other, (str, type(None))):
        raise InvalidArgument(f"split(other={other!r:.60}).", "pass the binding of an output, or None.")
    if not asked:
        raise InvalidArgument("split() has no branch.", "pass split(big=lambda m: m['total'] > 99, other='rest').")

    @takes(FREE)
    def split(message: Message) -> dict[str, Message]:
        for binding, passes in asked.items():
            if passes(message):
                return {binding: message}
        if other is None:
            raise LookupError(f"no branch of {', '.join(map(repr, asked))} takes the message, and other= is None")
        return {other: message}

    return split


@takes(FREE)
def sample(share: float, by: str | Callable[[Message], Any] | None = None) -> Stream:
    """Return a function that passes a share of the messages, chosen by a hash.

    ``share``  0 to 1
    ``by``     a field, or a function of the message: all messages of a key are passed, or none. None: each message is
               chosen on its own, by its index. The choice is the same when a step is repeated

    Kind: stream
    Needs: nothing
    Guarantee: exactly once
    Mechanism: a function without state
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise InvalidArgument(f"sample({share!r}).", "pass a share from 0 to 1, such as 0.01.")
    of = None if by is None else _of("sample(by", by)
    limit = int(share * 2**64)

    @takes(FREE)
    def sample(message: Message, process: cues.Process) -> Message | None:
        value = [process.id, process.index] if of is None else of(message)
        return message if xxhash.xxh3_64_intdigest(codec.pack([value])) < limit else None

    return sample


class Cache:
    """Answers by key, each for a time, in the memory of one process. Those that were asked for first go first."""

    def __init__(self, ttl_s: float, capacity: int) -> None:
        self._ttl_s, self._capacity = ttl_s, capacity
        self.__setstate__(None)

    @override
    def __reduce__(self) -> Any:
        return Cache, (self._ttl_s, self._capacity)

    def __setstate__(self, state: Any) -> None:
        self._guard = threading.Lock()
        self._known: dict[Any, tuple[float, Any]] = {}

    def get(self, key: Any) -> tuple[float, Any] | None:
        """Return the end and the value of an answer that has not expired."""
        with self._guard:
            found = self._known.get(key)
        return found if found is not None and monotonic() < found[0] else None

    def set(self, key: Any, value: Any) -> None:
        """Keep an answer, and forget the oldest one beyond the capacity."""
        with self._guard:
            self._known.pop(key, None)
            self._known[key] = monotonic() + self._ttl_s, value
            if len(self._known) > self._capacity:
                del self._known[next(iter(self._known))]


@takes(FREE)
def enrich(
    key: str | Callable[[Message], Any],
    into: str,
    fetch: Callable[[Any], Any],
    *,
    ttl: float | str | timedelta,
    capacity: int = 10_000,
) -> Stream:
    """Return a function that adds to each message what an API or a database knows of its key, and remembers it.

    ``key``       a field, or a function of the message; what it returns is hashable
    ``into``      the field that the message gets
    ``fetch``     ``fetch(key)`` returns the value; it may be async, and then runs ``concurrency=`` times at once
    ``ttl``       so long an answer is used: seconds, ``"15m"`` or a timedelta
    ``capacity``  answers that are kept in memory

    An answer is as old as ``ttl`` at most, and lost with the process. If ``fetch`` fails, its message does; what it
    raises for a system that is away is waited out (``outage=``). For a table that Cues keeps, see
    :func:`cues.processors.joins.lookup`.

    Kind: stream
    Needs: nothing
    Guarantee: exactly once, with what `fetch` knew within `ttl`
    Mechanism: a function without state; answers in memory
    """
    of, cache = _of("enrich(key", key), Cache(cues.duration_of(ttl, "ttl"), capacity)
    text_of("into", into)
    check_number("capacity", capacity, 1, whole=True)
    if not callable(fetch):
        raise InvalidArgument(f"enrich(fetch={fetch!r:.60}) cannot be called.", "give a function of a key.")
    running: dict[tuple[Any, Any, Any], Any] = {}
    """The calls of ``fetch`` that have not returned, by event loop, type of the key, and key."""

    def enrich(message: Message) -> Message:
        value = of(message)
        place = type(value), value  # 1, 1.0 and True are equal, and three keys
        if (known := cache.get(place)) is not None:
            return {**message, into: known[1]}
        found = fetch(value)
        if inspect.isawaitable(found):
            raise InvalidArgument(f"enrich(fetch) returned an awaitable for {value!r:.60}.", "give an async def.")
        cache.set(place, found)
        return {**message, into: found}

    async def enrich_async(message: Message) -> Message:
        import asyncio

        value, loop = of(message), asyncio.get_running_loop()
        if (known := cache.get((type(value), value))) is not None:
            return {**message, into: known[1]}
        place = loop, type(value), value
        if place not in running:  # calls of one key at one time ask once, also if the first one is cancelled
            running[place] = loop.create_task(fetch(value))
            running[place].add_done_callback(lambda task: keep(place, task))
        return {**message, into: await asyncio.shield(running[place])}

    def keep(place: tuple[Any, Any, Any], task: Any) -> None:
        del running[place]
        if not task.cancelled() and task.exception() is None:
            cache.set(place[1:], task.result())

    chosen: Any = enrich
    if inspect.iscoroutinefunction(fetch) or inspect.iscoroutinefunction(getattr(fetch, "__call__", None)):  # noqa: B004
        chosen = enrich_async
        chosen.__name__ = "enrich"
    return takes(FREE)(chosen)  # type: ignore[no-any-return]


@takes(STREAM)
def merge(time: str, *inputs: str, most: int = MERGE_MESSAGES_MAX) -> Stream:
    """Return a function that merges inputs, each ordered by time, into one flow that is ordered by time.

    ``time``    the field with the time of a message: seconds, or an aware datetime
    ``inputs``  the bindings of the inputs: ``graph.stream(cues.AnyOf(a="app", b="db"), "log")(merge("at", "a", "b"))``
    ``most``    the most messages that are held, which is the bound of the state

    A message is held until each other input has one, since an earlier one could still come. With ``most`` held, the
    earliest is released although another input has none. Messages of one time are in the order of ``inputs``. A message
    whose time is before the one before it in its input, or before the last one released, fails as
    :class:`LateMessage`.

    Kind: stream
    Needs: nothing
    Guarantee: exactly once, in the order of time
    Mechanism: state of the processor, committed with the step
    """
    _check_field("merge(time", time)
    if len(inputs) < 2 or not all(isinstance(name, str) for name in inputs) or len(set(inputs)) < len(inputs):
        raise InvalidArgument(f"merge() of the inputs {inputs!r}.", "pass the bindings of two inputs or more.")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise InvalidArgument(f"merge(most={most!r}).", "pass a number of messages, 1 or more.")

    @takes(STREAM)
    def merge(message: Message, process: cues.Process) -> list[Message]:
        if process.binding not in inputs:
            raise InvalidArgument(
                f"merge() does not know the input {process.binding!r}; it has {', '.join(map(repr, inputs))}.",
                "name each binding of cues.AnyOf(…) in merge(…).",
            )
        row = process.state_of("row")
        # By input: the number of its first held message, of the next one, and the times of the first and the last.
        ends: dict[str, list[Any]] = row.get("ends") or {name: [0, 0, None, None] for name in inputs}
        released_at = row.get("released")
        at = _time_of(message, time)
        mine = ends[process.binding]
        latest = max((known for known in (mine[3], released_at) if known is not None), default=None)
        if latest is not None and at < latest:
            raise LateMessage(
                f"The time {at:.3f} is before {latest:.3f}, that of a message before it.",
                "order each input by time, or hold more messages with most=.",
                time=at,
            )
        process.state_of(process.binding)[mine[1]] = message
        mine[1] += 1
        mine[3] = at
        if mine[2] is None:
            mine[2] = at
        released: list[Message] = []
        while True:
            held = [name for name in inputs if ends[name][2] is not None]
            count = sum(ends[name][1] - ends[name][0] for name in held)
            if not held or (len(held) < len(inputs) and count <= most):
                break
            first = min(held, key=lambda name: ends[name][2])
            end, queue = ends[first], process.state_of(first)
            released.append(queue.pop(end[0]))
            released_at = end[2]
            end[0] += 1
            end[2] = _time_of(queue[end[0]], time) if end[0] < end[1] else None
        row["ends"], row["released"] = ends, released_at
        return released

    return merge


def _of(argument: str, field: Any) -> Callable[[Message], Any]:
    """Return the function that reads a field, or the function given. Raises :class:`InvalidArgument`."""
    if isinstance(field, str):
        return _field(field)
    if callable(field):
        return field  # type: ignore[no-any-return]
    raise InvalidArgument(f"{argument}={field!r:.60}).", "pass the name of a field, or a function of a message.")


def _check_field(argument: str, field: Any) -> None:
    if not isinstance(field, (str, type(None))):
        raise InvalidArgument(f"{argument}={field!r:.60}).", "pass the name of a field.")


def _field(name: str) -> Callable[[Message], Any]:
    def field(message: Message) -> Any:
        if message.get(name) is None:
            raise KeyError(f"$.{name}: expected a value, found {'null' if name in message else 'nothing'}")
        return message[name]

    return field


def _time_of(message: Message, field: str) -> float:
    value = message.get(field)
    if isinstance(value, datetime) and value.utcoffset() is not None:
        return value.timestamp()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
        return float(value)
    raise TypeError(f"$.{field}: expected seconds or an aware datetime, found {value!r:.60}")
