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

from typing import Any

from cues.errors import BatchDamaged, InvalidArgument
from cues.native import mypyc_attr
from cues.overrides import override
from cues.queues.base import BaseQueue, check_index, view_of
from cues.queues.base_tailer import Place
from cues.queues.log import Log
from cues.queues.tailer import Direction, Tailer
from cues.records.batch import Batch
from cues.records.log_row import LogRow
from cues.storage import wakeup
from cues.storage.transaction import StoreTransaction

Mark = tuple[int, tuple[Batch, int] | None]
"""The index of a partition's tailer, and the message that it read last."""


@mypyc_attr(allow_interpreted_subclasses=True)
class MergedTailer(Tailer):
    """A :class:`cues.Tailer` of all partitions; :meth:`Queue.tailer` makes it.

    It has one position for each partition: :attr:`positions` is a dict, and :meth:`to_index` takes such a dict.
    :attr:`index` raises.
    """

    def __init__(self, queue: BaseQueue, name: str | None = None, meta: bool = False) -> None:
        super().__init__(queue, name, meta)
        self._parts: list[Tailer] = []
        self._current: Tailer | None = None
        """The tailer whose batch is being returned."""
        self._have_all()

    @override
    @property
    def index(self) -> int:
        """Raise :class:`InvalidArgument`; use :attr:`positions`."""
        raise InvalidArgument(
            f"The tailer reads {len(self._parts)} partitions of {self.queue.id!r}, each with indices of its own.",
            "use tailer.positions, or queue.partition(i).tailer().",
        )

    @override
    @property
    def positions(self) -> dict[int, int]:
        """The index that is read next, by partition."""
        return {part._log.partition: part._record_index() for part in self._parts}

    @override
    def _turn(self, direction: Direction) -> None:
        self._direction = direction
        self._current = None
        for part in self._parts:
            part._direction = direction

    @override
    def to_index(self, index: int | dict[int, int]) -> None:
        """Move to these indices, a dict such as :attr:`positions`; partitions that are not in it stay."""
        if not isinstance(index, dict):
            raise InvalidArgument(
                f"to_index({index!r}): each of the {len(self._parts)} partitions of {self.queue.id!r} has indices"
                " of its own.",
                "call to_index({partition: index}), or to_time(…).",
            )
        unknown = set(index) - set(self.positions)
        if unknown:
            raise InvalidArgument(
                f"to_index({index!r}): {self.queue.id!r} has no partition {', '.join(map(repr, unknown))}.",
                f"name partitions from 0 to {len(self._parts) - 1}.",
            )
        goals, positions = dict(index), self.positions

        def place(txn: StoreTransaction, log: Log, row: LogRow) -> int:
            if log.partition not in goals:
                return positions[log.partition]
            return max(row.first, check_index(goals[log.partition], row.next, f"to_index({index!r})"))

        self._seek(place)

    @override
    def _seek(self, place: Place) -> None:
        with self._use():
            self._have_all()
            with self._store.core.view() as txn:
                goals = [part._place(txn, place) for part in self._parts]
            if self.name is not None and not self._deferred:
                stored = self._store.core.commit(self._write_positions, goals)
                for part, row in zip(self._parts, stored):
                    part._stored = row
            for part, goal in zip(self._parts, goals):
                part._index = goal
            self._current = None

    @override
    def _peek(self) -> dict[str, Any] | None:
        part = self._pick()
        return part._peek() if part is not None else None

    @override
    @property
    def interest(self) -> tuple[wakeup.Doorbells | None, int]:
        """Doorbells and mask of all partitions, with which :func:`cues.storage.wakeup.wait` wakes this tailer."""
        return self._store.core.doorbells, wakeup.union(part._log.mask for part in self._parts)

    @override
    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<cues.MergedTailer{name} of {self.queue.id} at {self.positions}>"

    def _have_all(self) -> None:
        """Make a tailer for every partition that was added."""
        for number in range(len(self._parts), self.queue.core.options.partitions):
            part = Tailer(view_of(self.queue, number), self.name, self._meta)
            part._direction = self._direction
            self._parts.append(part)
            self._current = None

    @override
    def _next(self, n: int) -> list[dict[str, Any]]:
        """Take the next ``n`` messages and move; on an error, move nothing."""
        if n == 1 and self.name is None:
            return self._take_ahead(1)  # one that raises has moved nothing
        while True:
            marks: list[Mark] = [(part._index, part._last) for part in self._parts]
            read = self._read
            try:
                taken = self._take_ahead(n)
                if self.name is None or not taken or self._commit_positions():
                    return taken
            except BaseException:
                self._return(marks, read)
                raise
            # Another tailer of the same name was faster: continue at its positions.
            self._return(marks, read)
            with self._store.core.view() as txn:
                for part in self._parts:
                    part._stored = txn.get(part._row_key)
                    if part._stored is not None:
                        part._index = part._position(part._stored)

    def _return(self, marks: list[Mark], read: Tailer | None) -> None:
        # Partitions that were added since have no mark; they were read from their start.
        for part, mark in zip(self._parts, marks):
            part._go_back(*mark)
        del self._parts[len(marks) :]
        self._current, self._read = None, read

    @override
    def _take_ahead(self, n: int) -> list[dict[str, Any]]:
        taken: list[dict[str, Any]] = []
        try:
            while len(taken) < n and (part := self._pick(n - len(taken))) is not None:
                taken += part._take(n - len(taken))
                self._read = part
        except BatchDamaged:
            if not taken:
                raise
        return taken

    def _pick(self, n: int = 1) -> Tailer | None:
        """Return the tailer whose message is next, with its batch loaded; None at the end."""
        part = self._current
        if part is not None and part._batch is not None and part._first <= part._cursor() < part._batch.next:
            batch = part._batch
            if part._ready(n) and part._batch is batch:  # it is another if the rest of this one was purged
                return part
        backward = self._direction == "backward"
        while True:
            self._have_all()
            ready = [(part, part._ready(n)) for part in self._parts]
            ended = [part for part, more in ready if not more]
            # Backward, a partition without more messages gets no more: appends are at the other end.
            if backward or not ended or self._have_nothing(ended):
                break
        heads = [part for part, more in ready if more]
        self._current = (max if backward else min)(heads, key=_when, default=None)
        return self._current

    def _have_nothing(self, ended: list[Tailer]) -> bool:
        """Return whether all ``ended`` partitions still have nothing, at one moment after the others were read.

        Without this check: partition 0 is read and has nothing. Then a message is appended to 0, and after it one
        to 1. Partition 1 is read, and its message is handed out before the earlier message of 0.
        """
        with self._store.core.view() as txn:
            return all(part._index >= part._log.row(txn).next for part in ended)

    def _commit_positions(self) -> bool:
        """Move the stored positions to this tailer's, unless another tailer of its name moved one."""
        if self._deferred:
            return True
        stored = self._store.core.commit(self._compare_and_set_all, [part._index for part in self._parts])
        for part, row in zip(self._parts, stored or ()):
            part._stored = row
        return stored is not None

    def _compare_and_set_all(self, txn: StoreTransaction, indices: list[int]) -> list[bytes] | None:
        if any(txn.get(part._row_key) != part._stored for part in self._parts):
            return None
        return self._write_positions(txn, indices)

    def _write_positions(self, txn: StoreTransaction, indices: list[int]) -> list[bytes]:
        """Write the positions that moved; the first time all, so that retention knows a reader of every partition."""
        return [
            part._stored
            if part._stored is not None and part._position(part._stored) == index
            else part._write_position(txn, index)
            for part, index in zip(self._parts, indices)
        ]


def _when(part: Tailer) -> tuple[int, int]:
    assert part._batch is not None
    return part._batch.shown_ns, part._log.partition
