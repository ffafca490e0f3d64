"""Tailers: readers of a queue that keep a position; and waiting for the first of several.

    t = q.tailer()              from the start; only the object has the position
    t = q.tailer("reader-1")    the position is in the store, under that name

The position is a :class:`~cues.queues.cursor.Cursor`, which reads the messages. A named tailer moves its position in
the store before a read returns, by compare and set. So readers of one name, in any process, share the queue: each
message is read by one of them.

Not guaranteed: that a message is processed. The position moves when it is read. For exactly-once processing use a
graph, whose positions move with the outputs.

A tailer does not return messages that were read ahead and then purged. It is used by one thread at a time: a second
thread gets :class:`~cues.errors.ConcurrentUse`.

    Reader
    └── Tailer             one partition, with a direction and a position that may have a name
        └── MergedTailer   all partitions of a queue, merged by append time

A merged tailer

1. reads the next record batch of every partition; if some partitions have none, it checks in one transaction that they
   still have none;
2. returns the batch with the earliest append time; of several, the batch of the lowest partition. The whole batch is
   returned, because its messages were appended at one time.

So the messages of one partition are always in their order. Messages of several partitions are in the order of their
appends, unless the clock of the machine was set back between two appends. Backward, the order is the reverse. A
partition that is added later is read from its start, at the next read. A name has one position on each partition:
``q.partition(3).tailer("reader-1")`` uses the same one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from cues.base import clock, names
from cues.base.checks import is_count
from cues.base.closing import Closing
from cues.errors import BatchDamaged, Closed, ConcurrentUse, InvalidArgument
from cues.native import mypyc_attr
from cues.overrides import override
from cues.queues import tables
from cues.queues.base import BaseQueue, check_index, view_of
from cues.queues.cursor import Cursor, IndexOf, Mark, Take, compare_and_set, metadata, write_positions
from cues.queues.log import Log
from cues.records.batch import Batch
from cues.records.log_row import LogRow
from cues.storage import wakeup
from cues.storage.transaction import StoreTransaction

Direction = Literal["forward", "backward"]

_served = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Envelope:
    """Index, time, identity and metadata of a message."""

    index: int
    time: datetime
    """Append time, aware, in UTC."""
    hash: str | None
    """Delivery hash of the step that wrote it, 32 hex digits; None for a plain append."""
    producer: str | None
    """Id of the publisher that wrote it, 12 hex digits; None if it has no identity."""
    metadata: dict[str, Any]
    """``{"q/hash", "q/queue": {queue: {"q/t", "q/time"}}, "tx/t"}``, as far as its queues keep it."""
    partition: int = 0
    """Partition of the message, on which its index counts."""
    uuid: UUID | None = None
    """Producer, clock and flags (:func:`cues.txn.parse_uuid`); None if it has no identity."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Reader(Closing):
    """Messages that are read one after another."""

    def read(self, block: bool = False, timeout: float | None = None) -> dict[str, Any] | None:
        """Return the next message, or None if there is none; with ``block``, wait for one."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the messages that are there."""
        while (message := self.read()) is not None:
            yield message

    def follow(self) -> Iterator[dict[str, Any]]:
        """Iterate over the messages and wait for more, until the reader or its store is closed (:class:`Closed`)."""
        while True:
            message = self.read(block=True)
            if message is not None:
                yield message


@mypyc_attr(allow_interpreted_subclasses=True)
class Tailer(Reader):
    """Reads a queue from a position on; :meth:`Queue.tailer` makes it."""

    def __init__(
        self,
        queue: BaseQueue,
        name: str | None = None,
        meta: bool = False,
        check: Callable[[], None] | None = None,
    ) -> None:
        """``check``: another commit than that of each read moves the position, and this is called before each use."""
        if name is not None:
            names.check("tailer", name)
        self.queue = queue
        self.name = name
        self.served = 0
        self._store = queue.store
        self._check = check
        self._closed = False
        self._looks = check is not None
        """True if :meth:`check_open` has more to do than to ask the queue and the store."""
        self._commits = name is not None and check is None
        self._meta = meta
        self._busy = threading.Lock()
        self.cursors: list[Cursor] = [Cursor(queue, name, meta)]
        """The position on each partition that this tailer reads."""
        self.last_cursor: Cursor = self.cursors[0]
        """The cursor that returned the message read last, if there is one."""
        self._current: Cursor | None = None
        """Of several partitions, the cursor whose batch is being returned; None if the next one must be picked."""

    @override
    def read(self, block: bool = False, timeout: float | None = None) -> dict[str, Any] | None:
        """Return the next message, or None at the end of the queue.

        With ``block``, wait for a message of any thread or process, at most ``timeout`` seconds (then
        None). Closing the tailer, its queue or its store ends the wait with :class:`Closed`. A damaged
        batch raises :class:`BatchDamaged`. An error does not move the tailer.
        """
        with self._use():
            messages = self._next(1)
            if not messages and block:
                messages = wakeup.wait([self.interest], self._next_if_open, timeout)
        return messages[0] if messages else None

    def read_many(self, n: int) -> list[dict[str, Any]]:
        """Return the next ``n`` messages; fewer only at the end of the queue or before a damaged batch.

        Never waits. A damaged batch raises :class:`BatchDamaged` when it is the first to be read.
        """
        if not isinstance(n, int) or n < 0:
            raise InvalidArgument(f"read_many({n!r}).", "pass a count of messages.")
        with self._use():
            return self._next(n)  # type: ignore[no-any-return]

    def read_table(self, n: int) -> Any:
        """Return the next ``n`` messages as a ``pyarrow.Table``, each field a column; fewer as :meth:`read_many` does.

        Rows that were written as a table stay columns: no dict is made. Messages that were not become columns as
        :meth:`cues.Queue.to_arrow` does it. Raises :class:`SchemaError` if the values of a field do not fit one type;
        then the tailer has not moved.
        """
        if not is_count(n, 0):
            raise InvalidArgument(f"read_table({n!r}).", "pass a count of messages.")
        if self._meta or self.direction == "backward":
            what = "adds metadata to messages" if self._meta else "reads backward"
            raise InvalidArgument(f"read_table() of a tailer that {what}.", "open another one with queue.tailer().")
        with self._use():
            return self._next(n, Cursor.take_piece, tables.joined)

    def peek(self) -> dict[str, Any] | None:
        """Return the message that :meth:`read` would return, and do not move."""
        with self._use():
            cursor = self._pick()
            return None if cursor is None else cursor.peek()

    @property
    def on_pending(self) -> Callable[[str], None] | None:
        """Called once, with the id of a publisher whose pending messages are read as if they were committed."""
        return self.cursors[0].on_pending

    @on_pending.setter
    def on_pending(self, tell: Callable[[str], None] | None) -> None:
        self.cursors[0].on_pending = tell

    @property
    def index(self) -> int:
        """The index that is read next; backward, the message before this index is read next.

        With ``isolation="committed"``, the index up to which the log was read. Inside a transaction it is that of the
        acknowledgement; pending messages before it are returned if they are committed later.
        """
        return self.cursors[0].record_index()

    @property
    def positions(self) -> dict[int, int]:
        """The index that is read next, of each partition that this tailer reads."""
        return {cursor.log.partition: cursor.record_index() for cursor in self.cursors}

    @property
    def last_read_index(self) -> int | None:
        """The index of the message read last, on its partition; None before the first."""
        last = self.last_cursor.last
        return last[0].index(last[1]) if last else None

    @property
    def envelope(self) -> Envelope | None:
        """Partition, index, time, hash and metadata of the message read last; None before the first."""
        cursor = self.last_cursor
        if cursor.last is None:
            return None
        batch, offset = cursor.last
        return envelope_of(batch, offset, metadata(batch, offset, cursor.log.id, cursor.kept), cursor.log.partition)

    @property
    def direction(self) -> Direction:
        """``"forward"`` (default) or ``"backward"``: read the message before the index, and move to it."""
        return "backward" if self.cursors[0].backward else "forward"

    @direction.setter
    def direction(self, value: Direction) -> None:
        if value not in ("forward", "backward"):
            raise InvalidArgument(f"direction is {value!r}.", "pass 'forward' or 'backward'.")
        for cursor in self.cursors:
            cursor.backward = value == "backward"
        self._current = None

    @property
    def interest(self) -> tuple[wakeup.Doorbells | None, int]:
        """The doorbells and the mask of logs with which :func:`cues.storage.wakeup.wait` wakes this tailer."""
        return self._store.core.doorbells, self.queue.core.log.mask

    def to_start(self) -> None:
        """Move to the first message that is left, on every partition that this tailer reads."""
        self._seek(lambda txn, log, row: row.first)

    def to_end(self) -> None:
        """Move after the last message, on every partition that this tailer reads."""
        self._seek(lambda txn, log, row: row.next)

    def to_index(self, index: int) -> None:
        """Move to ``index``, from 1 to the next one to be written; from a purged one, to the first that is left."""
        self._seek(lambda txn, log, row: max(row.first, check_index(index, row.next, f"to_index({index!r})")))

    def to_time(self, when: datetime) -> None:
        """Move to the first message appended at or after ``when`` (aware), or after the last message."""
        ns = clock.to_ns(when)
        self._seek(lambda txn, log, row: log.index_at(txn, row, ns))

    def _seek(self, index_of: IndexOf) -> None:
        """Move to the index that ``index_of`` returns, on each partition."""
        with self._use():
            self._have_all()
            with self._store.core.view() as txn:
                goals = [cursor.position_for(txn, index_of) for cursor in self.cursors]
            if self._commits:
                stored = self._store.core.commit(write_positions, self.cursors, goals)
                for cursor, row in zip(self.cursors, stored):
                    cursor.stored = row
            for cursor, goal in zip(self.cursors, goals):
                cursor.index = goal
            self._current = None

    @override
    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<cues.Tailer{name} of {self.queue.id} at {self.cursors[0].index}>"

    @override
    def close(self) -> None:
        """Close the tailer; a read that waits in another thread ends with :class:`Closed`."""
        self._closed = self._looks = True
        self._store.core.ring_own()

    def check_open(self) -> None:
        """Raise :class:`Closed` if the tailer, its queue or its store is closed."""
        if self._looks or self.queue.core.lifetime.closed or self._store.closed:
            if self._check is not None:
                self._check()
            if self._closed:
                raise Closed(f"The tailer of {self.queue.id!r} is closed.", "open another one with queue.tailer(...).")
            if self.queue.core.lifetime.closed or self._store.closed:
                self.queue.core.check_open()

    def _use(self) -> AbstractContextManager[Any]:
        """The lock for one call, for use in a ``with``: no signal handler runs between taking it and the block."""
        self.check_open()
        if self._busy.locked():
            raise ConcurrentUse(
                f"The tailer of {self.queue.id!r} is used by another thread right now.",
                "open a tailer for each thread.",
            )
        return self._busy  # if another thread takes it before the caller's ``with``, the caller waits

    def go_to(self, position: int) -> None:
        """Move to a position of the log that it reads, which is not always an index."""
        self.cursors[0].index = position

    @property
    def position(self) -> int:
        """The position on the log that it reads."""
        return self.cursors[0].index

    def _next_if_open(self) -> list[dict[str, Any]]:
        self.check_open()
        return self._next(1)  # type: ignore[no-any-return]

    def _next(self, n: int, take: Take = Cursor.take, made: Callable[[list[Any]], Any] | None = None) -> Any:
        """Take the next ``n`` messages and move; on an error, move nothing. ``made``: what to return of them."""
        cursor = self.cursors[0]
        while True:
            mark = cursor.index, cursor.last
            try:
                taken = cursor.read(n, take)
                result = taken if made is None else made(taken)
                if not self._commits or not taken or self._commit_positions():
                    return result
            except BaseException:
                cursor.go_back(mark)
                raise
            cursor.go_back(mark)
            self._follow()

    def _pick(self, n: int = 1) -> Cursor | None:
        """Return the cursor whose message is next, with its batch loaded; None at the end."""
        return self.cursors[0] if self.cursors[0].ready(n) else None

    def _have_all(self) -> None:
        """Make a cursor for every partition that was added."""

    def _commit_positions(self) -> bool:
        """Move the stored positions to those of this tailer, unless another tailer of its name moved one."""
        cursor = self.cursors[0]
        stored = self._store.core.commit(cursor.compare_and_set, cursor.index)
        cursor.stored = stored or cursor.stored
        return stored is not None

    def _follow(self) -> None:
        """Continue at the stored positions: another tailer of the same name was faster."""
        with self._store.core.view() as txn:
            for cursor in self.cursors:
                cursor.follow(txn)


def pending_read(reader: str, queue: str, producer: str) -> str:
    """Return the warning for a reader that reads pending messages as if they were committed."""
    return (
        f"{reader} reads {queue} without isolation='committed', and publisher {producer} writes messages there that are"
        " pending: it also gets those of transactions that never commit."
    )


def envelope_of(batch: Batch, offset: int, metadata: dict[str, Any], partition: int) -> Envelope:
    """Return the envelope of one message of a batch."""
    head, stamps = batch.head, batch.stamps
    return Envelope(
        batch.index(offset),
        clock.to_datetime(head.time_ns),
        head.hash.hex() if head.hash else None,
        f"{stamps.producer_of(offset):012x}" if stamps else None,
        metadata,
        partition,
        stamps.uuid(offset) if stamps else None,
    )


def alts(tailers: Sequence[Tailer], timeout: float | None = None) -> tuple[Tailer, dict[str, Any]] | None:
    """Wait for the first message that any of ``tailers`` has; return it with its tailer.

    Fair: if several tailers have a message, the one that was served longest ago is read. Returns None
    after ``timeout`` seconds without a message. The tailers may belong to several stores.
    """
    if not tailers:
        raise InvalidArgument("alts() needs at least one tailer.", "call cues.alts([t1, t2]).")

    def first() -> tuple[Tailer, dict[str, Any]] | None:
        for tailer in sorted(tailers, key=lambda tailer: tailer.served):
            message = tailer.read()
            if message is not None:
                tailer.served = next(_served)
                return tailer, message
        return None

    result = first()
    if result is None and (timeout is None or timeout > 0):
        result = wakeup.wait([tailer.interest for tailer in tailers], first, timeout)
    return result


@mypyc_attr(allow_interpreted_subclasses=True)
class MergedTailer(Tailer):
    """A :class:`cues.Tailer` of all partitions; :meth:`Queue.tailer` makes it.

    It has one position for each partition: :attr:`positions` is a dict, and :meth:`to_index` takes such a dict.
    :attr:`index` raises.
    """

    def __init__(
        self,
        queue: BaseQueue,
        name: str | None = None,
        meta: bool = False,
        check: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(queue, name, meta, check)
        self._have_all()

    @override
    @property
    def index(self) -> int:
        """Raise :class:`InvalidArgument`; use :attr:`positions`."""
        raise InvalidArgument(
            f"The tailer reads {len(self.cursors)} partitions of {self.queue.id!r}, each with indices of its own.",
            "use tailer.positions, or queue.partition(i).tailer().",
        )

    @override
    def to_index(self, index: int | dict[int, int]) -> None:
        """Move to these indices, a dict such as :attr:`positions`; partitions that are not in it stay."""
        if not isinstance(index, dict):
            raise InvalidArgument(
                f"to_index({index!r}): each of the {len(self.cursors)} partitions of {self.queue.id!r} has indices"
                " of its own.",
                "call to_index({partition: index}), or to_time(…).",
            )
        unknown = set(index) - set(self.positions)
        if unknown:
            raise InvalidArgument(
                f"to_index({index!r}): {self.queue.id!r} has no partition {', '.join(map(repr, unknown))}.",
                f"name partitions from 0 to {len(self.cursors) - 1}.",
            )
        goals, positions = dict(index), self.positions

        def place(txn: StoreTransaction, log: Log, row: LogRow) -> int:
            if log.partition not in goals:
                return positions[log.partition]
            return max(row.first, check_index(goals[log.partition], row.next, f"to_index({index!r})"))

        self._seek(place)

    @override
    @property
    def interest(self) -> tuple[wakeup.Doorbells | None, int]:
        """Doorbells and mask of all partitions, with which :func:`cues.storage.wakeup.wait` wakes this tailer."""
        return self._store.core.doorbells, wakeup.union(cursor.log.mask for cursor in self.cursors)

    @override
    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<cues.MergedTailer{name} of {self.queue.id} at {self.positions}>"

    @override
    def _have_all(self) -> None:
        for number in range(len(self.cursors), self.queue.core.options.partitions):
            cursor = Cursor(view_of(self.queue, number), self.name, self._meta)
            cursor.backward = self.cursors[0].backward
            self.cursors.append(cursor)
            self._current = None

    @override
    def _next(self, n: int, take: Take = Cursor.take, made: Callable[[list[Any]], Any] | None = None) -> Any:
        if n == 1 and self.name is None and made is None:
            return self._take_ahead(1, take)  # one that raises has moved nothing
        while True:
            marks: list[Mark] = [(cursor.index, cursor.last) for cursor in self.cursors]
            last = self.last_cursor
            try:
                taken = self._take_ahead(n, take)
                result = taken if made is None else made(taken)
                if not self._commits or not taken or self._commit_positions():
                    return result
            except BaseException:
                self._return(marks, last)
                raise
            self._return(marks, last)
            self._follow()

    def _return(self, marks: list[Mark], last: Cursor) -> None:
        # Partitions that were added since have no mark; they were read from their start.
        for cursor, mark in zip(self.cursors, marks):
            cursor.go_back(mark)
        del self.cursors[len(marks) :]
        self._current, self.last_cursor = None, last

    def _take_ahead(self, n: int, take: Take) -> list[Any]:
        taken: list[Any] = []
        left = n
        try:
            while left and (cursor := self._pick(left)) is not None:
                before = cursor.index
                taken += take(cursor, left)
                left -= abs(cursor.index - before)
                self.last_cursor = cursor
        except BatchDamaged:
            if not taken:
                raise
        return taken

    @override
    def _pick(self, n: int = 1) -> Cursor | None:
        cursor = self._current
        if cursor is not None and cursor.is_inside():
            batch = cursor.batch
            if cursor.ready(n) and cursor.batch is batch:  # it is another if the rest of this one was purged
                return cursor
        backward = self.cursors[0].backward
        while True:
            self._have_all()
            ready = [(cursor, cursor.ready(n)) for cursor in self.cursors]
            ended = [cursor for cursor, more in ready if not more]
            # Backward, a partition without more messages gets no more: appends are at the other end.
            if backward or not ended or self._have_nothing(ended):
                break
        heads = [cursor for cursor, more in ready if more]
        self._current = (max if backward else min)(heads, key=_when, default=None)
        return self._current

    @override
    def _commit_positions(self) -> bool:
        stored = self._store.core.commit(compare_and_set, self.cursors, [cursor.index for cursor in self.cursors])
        for cursor, row in zip(self.cursors, stored or ()):  # no function of Cues: one may be interrupted at once
            cursor.stored = row
        return stored is not None

    def _have_nothing(self, ended: list[Cursor]) -> bool:
        """Return whether all ``ended`` partitions still have nothing, at one moment after the others were read.

        Without this check: partition 0 is read and has nothing. Then a message is appended to 0, and after it one
        to 1. Partition 1 is read, and its message is handed out before the earlier message of 0.
        """
        with self._store.core.view() as txn:
            return all(cursor.index >= cursor.log.row(txn).next for cursor in ended)


def _when(cursor: Cursor) -> tuple[int, int]:
    assert cursor.batch is not None
    return cursor.batch.shown_ns, cursor.log.partition
