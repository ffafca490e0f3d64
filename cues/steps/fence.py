"""The row of a processor, which names its owner and its positions, and is the fence of all its commits.

Each commit compares the row, byte by byte, with the one that this owner wrote last. Another process that takes over or
seeks changes the row, and then nothing is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from cues.base import events, names
from cues.base.names import ProcessorId
from cues.errors import Fenced, WriterStuck
from cues.graphs.processor_rows import ProcessorRow, moved, position_at
from cues.records import sealed
from cues.records.positions import NO_SEAL, Position
from cues.steps.calls import Interrupted, Sleep
from cues.steps.ownership import fenced

if TYPE_CHECKING:
    from cues.graphs.processor import Node
    from cues.steps.copies import Requests
    from cues.steps.pauses import UnitPause
    from cues.steps.ports import Ports
    from cues.steps.taking import Slice, Taken
    from cues.storage.transaction import StoreTransaction

R = TypeVar("R")


class Fence:
    """The row of one processor that this process owns. Used by one thread at a time."""

    def __init__(
        self,
        node: Node,
        row: ProcessorRow,
        ports: Ports,
        pause: UnitPause,
        key: bytes | None = None,
        unit: Fence | None = None,
    ) -> None:
        """``key``: of the row in the store, if it is not that of the processor. ``unit``: the fence of the unit for
        which it commits too (beside.py)."""
        self.processor = node.id
        self.key: bytes = names.processor_key(node.id) if key is None else key
        self.seed = sealed.seed_of(self.key)
        self.expected: bytes = sealed.seal_by(self.seed, row.pack())
        """The row as it was committed last."""
        self._unpacked: tuple[bytes, ProcessorRow] = (self.expected, row)
        """A row that was unpacked, and its bytes. Another thread may unpack the row while a step commits a new one."""
        self.unit: Fence | None = unit
        self.pause: UnitPause = pause
        self.requests: list[Requests] = []
        """The counts of redrives that others write."""
        self._own = ports.imperative if node.imperative else None
        self.order = sorted(reader.tailer for reader in ports.readers)
        self.place = {tailer: place for place, tailer in enumerate(self.order)}
        """The place of a tailer's position in the row."""
        self._apart = ports.store.core.environment.durability != "disk"
        """True if each commit is a transaction of its own: on a "disk" store several share one (group_commit.py)."""
        self._begun = self._last = 0
        """Numbers of the transaction that compares the row for a step, and of that of the last step; 0: unknown."""

    def check_step(self, txn: StoreTransaction) -> None:
        """Compare as :meth:`check` does, inside the commit of a step.

        LMDB numbers its commits. If the last one is that of the last step of this owner, the rows are as that step left
        them, and none is read.
        """
        number = txn.id()
        last, self._last = self._last, 0
        if number != last + 1:
            self.check(txn)
        self._begun = number

    def check(self, txn: StoreTransaction) -> None:
        """Raise :class:`Fenced` unless owner, epoch and all positions are those that the step started from.

        Then read what others ask of the unit: a pause or its end, and redrives.
        """
        self.compare(txn)
        if self.unit is not None:
            self.unit.compare(txn)
        pause = self.pause
        pause.row = txn.get(pause.key)
        for request in self.requests:
            counts = txn.get(request.key)
            if counts != request.counts:
                request.note(counts)

    def compare(self, txn: StoreTransaction) -> None:
        """Raise :class:`Fenced` if another process, or a seek, wrote the row."""
        stored = txn.get(self.key)
        if stored != self.expected:
            raise fenced(self.processor, self.key, self.expected, stored)

    @property
    def row(self) -> ProcessorRow:
        """The row as it was committed last, unpacked."""
        expected = self.expected
        raw, row = self._unpacked
        if raw is not expected:
            row = ProcessorRow.unpack(self.key, expected, self.processor)
            self._unpacked = expected, row
        return row

    def committed(self, row: bytes) -> None:
        """Keep the committed row: the next commit compares with it."""
        self.expected = row
        if self._apart:
            self._last, self._begun = self._begun, 0
        if self._own is not None:
            for tailer in self._own.tailers.values():
                tailer.committed(self.position_in(self.row, tailer.tailer))

    def adopt(self, row: ProcessorRow) -> None:
        """Keep a row that another process wrote for this owner."""
        self._begun = 0
        self.committed(sealed.seal_by(self.seed, row.pack()))

    def refused(self, row: ProcessorRow) -> Fenced:
        """Return the error of an owner that finds this row."""
        return fenced(self.processor, self.key, self.expected, sealed.seal(self.key, row.pack()))

    def position_in(self, row: ProcessorRow, tailer: str) -> Position:
        """Return the position of a tailer in ``row``."""
        return row.positions[self.place[tailer]]

    def moved(self, slices: list[Slice]) -> bytes:
        """Return the row with the positions after the taken messages and after the function's own reads."""
        places = self.place
        positions = [(places[s.input.tailer], s.input.identity, s.stop, s.seal()) for s in slices]
        if self._own is not None:
            positions += [(places[tailer], *position) for tailer, position in self._own.moved().items()]
        return moved(self.seed, self.expected, False, positions)

    def standing(self, taken: Taken) -> bytes:
        """Return the row with the positions where the step begins: later than stored, if messages were purged."""
        positions = []
        for piece in taken.slices:
            place = self.place[piece.tailer]
            before = position_at(self.expected, place)
            if before.next != piece.start:
                positions.append((place, before.identity, piece.start, NO_SEAL))
        return moved(self.seed, self.expected, True, positions)


class Patience:
    """The patience of one processor: its writes wait while a process that does not respond holds the writer lock."""

    def __init__(self, processor: ProcessorId, sleep: Sleep, emit: Callable[[events.Event], None]) -> None:
        self._processor = processor
        self._sleep = sleep
        self.emit = emit

    def call(self, write: Callable[..., R], *arguments: Any, **keywords: Any) -> R:
        """Call ``write``; repeat it while a process that does not respond holds the store's writer lock.

        A call that fails in this way writes nothing, and the fence is inside the transaction. So the results of the
        function are kept until the commit is made or refused.
        """
        while True:
            try:
                return write(*arguments, **keywords)
            except WriterStuck as stuck:
                self.wait(stuck)

    def wait(self, stuck: WriterStuck) -> None:
        """Tell of a write that is to be repeated. Raises :class:`Interrupted` if the graph was aborted."""
        text = f"waits to commit: {stuck.message}"
        self.emit(events.Waiting(self._processor, text, logging.WARNING, stuck))
        if self._sleep(0):
            raise Interrupted from stuck
