"""Reading a queue with several partitions as one: merged by the time of appends.

    t = q.tailer()              from the start of every partition
    t = q.tailer("reader-1")    a position for each partition in the store, moved together

1. Read the next record batch of every partition. If some partitions have none, check in one transaction that they
   still have none.
2. Return the batch with the earliest append time; of several, the batch of the lowest partition. The whole batch is
   returned, because its messages were appended at one time.

So the messages of one partition are always in their order. Messages of several partitions are in the order of their
appends, unless the clock of the machine was set back between two appends. Backward, the order is the reverse. A
partition that is added later is read from its start, at the next read.

A name has one position on each partition: ``q.partition(3).tailer("reader-1")`` uses the same one. Readers of one
name share the queue: each message is read by one of them, and there is no order between the readers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cues.errors import BatchDamaged, InvalidArgument
from cues.native import mypyc_attr
from cues.overrides import override
from cues.queues.base import BaseQueue, check_index, view_of
from cues.queues.cursor import Cursor, Mark, Take, compare_and_set
from cues.queues.log import Log
from cues.queues.tailer import Tailer
from cues.records.log_row import LogRow
from cues.storage import wakeup
from cues.storage.transaction import StoreTransaction


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
