"""Cursors: a position on the log of one partition, with the records that were read ahead from there.

    Tailer         one cursor
    MergedTailer   a cursor for each partition; it picks the one whose message is next

A cursor copies record batches out in short transactions, opens them one by one and returns their messages. That of a
named tailer has a row in the store: the row that was read last (``stored``) is compared before it is replaced.

Not guaranteed: that a cursor works in two threads at once, or that its queue is open. Its tailer sees to both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, final

from cues.base import names
from cues.errors import BatchDamaged, InvalidArgument
from cues.queues import rollback
from cues.queues.base import BaseQueue
from cues.queues.committed import differ
from cues.queues.log import Log, Raw
from cues.records import sealed
from cues.records.batch import Batch, is_pending, stamps_of
from cues.records.log_row import LogRow
from cues.records.positions import NO_SEAL, POSITION, Position, unpack_reader
from cues.storage import wakeup
from cues.storage.transaction import StoreTransaction

AHEAD_BYTES_MAX: Final = 256 << 10
"""The most bytes that a read copies out of one transaction."""

IndexOf = Callable[[StoreTransaction, Log, LogRow], int]
"""Returns the index to go to on a log."""
Mark = tuple[int, tuple[Batch, int] | None]
"""An index, and the message that was read last: :meth:`Cursor.go_back`."""


class Piece(NamedTuple):
    """Messages of one record, none of which is decoded yet."""

    log: Log
    batch: Batch
    low: int
    high: int
    """The offsets of the first message in the record, and after the last one."""


@final
class Cursor:
    """A position on the log of one partition."""

    def __init__(self, queue: BaseQueue, name: str | None, meta: bool) -> None:
        self.queue = queue
        self.name = name
        self.log: Log = queue.core.log
        self.meta = meta
        """True if each message holds its metadata."""
        self.backward = False
        """True if the message before the index is read next."""
        self.on_pending: Callable[[str], None] | None = None
        """Called once, with the id of a publisher whose pending messages are read as if they were committed."""
        self.runs: list[tuple[int, int]] | None = None
        """If it is a list, the indices of messages that are taken are noted here: acknowledgements make gaps."""
        self.batch: Batch | None = None
        """The batch that has the next message, after :meth:`ready`."""
        self.last: tuple[Batch, int] | None = None
        """The batch and the offset of the message that was read last."""
        self._core = queue.store.core
        self._messages: list[dict[str, Any]] = []
        self._kept_from = self._kept_to = 0
        """Offsets of the messages that were not returned yet; a caller may have changed the dicts of the others."""
        self._ahead: list[Raw] = []
        """Records copied out in the same transaction, the next one last."""
        self._low = self._end = 0
        """The messages of the batch that still exist: a purge may have ended inside the batch."""
        self._purges = -1
        self.row_key = names.reader_key(queue.name, self.log.partition, name) if name is not None else b""
        self._seed = sealed.seed_of(self.row_key)
        self.stored: bytes | None = None
        """The row of the position, as this cursor read or wrote it last; None if there was none."""
        with self._core.view() as txn:
            row = self.log.row(txn)
            self.kept = queue.core.follow_options(txn, row).kept
            """The fields of the metadata that the queue keeps."""
            if name is not None:
                self.stored = txn.get(self.row_key)
                if self.stored is not None:
                    self._compare(txn, row, self._unpacked(self.stored))
        if self.stored is None and (name is not None or queue.core.is_committed):
            self._core.search()  # without the row of a transaction, a reader of committed messages would read others
        self.identity = row.identity
        self.index = row.first if self.stored is None else self.position_of(self.stored)
        """The position on the log; of committed messages it is a place."""
        self.start = self.index
        """The index at which this cursor began."""

    @property
    def _what(self) -> str:
        return f"position of the named tailer {self.name!r} of queue {self.log.id}"

    def _compare(self, txn: StoreTransaction, row: LogRow, stored: Position) -> None:
        """Compare a stored position with the log.

        Raises :class:`StoreDamaged`, because messages would be lost from such a position, and :class:`InvalidArgument`
        if it is of the other isolation.
        """
        if stored.identity == row.identity:
            what = self._what
            if not 1 <= stored.next <= row.next:
                raise sealed.damaged(what, f"it is {stored.next}, and the queue ends before {row.next}")
            if self.log.seal_before(txn, row, stored.next) not in (NO_SEAL, stored.seal) and stored.seal != NO_SEAL:
                raise sealed.damaged(what, f"the messages before {stored.next} are not those that it was written after")
        elif differ(stored.identity, row.identity):
            was, now = ("uncommitted", "committed") if self.queue.core.is_committed else ("committed", "uncommitted")
            raise InvalidArgument(
                f"The tailer {self.name!r} of queue {self.queue.id!r} reads with isolation={was!r}, and was opened with"
                f" {now!r}: messages would be lost or repeated.",
                f"pass isolation={was!r}, or use another name.",
            )

    # --- reading ---

    def read(self, n: int, take: Take) -> list[Any]:
        """Take the next ``n`` messages by :meth:`take` or another way; fewer only at the end, or before damage."""
        taken: list[Any] = []
        left = n
        try:
            while left and self.ready(left):
                before = self.index
                taken += take(self, left)
                left -= abs(self.index - before)
        except BatchDamaged:
            if not taken:
                raise
        return taken

    def peek(self) -> dict[str, Any]:
        """Return the next message, and do not move; only after :meth:`ready`."""
        batch = self.batch
        assert batch is not None
        offset = (self.index - 1 if self.backward else self.index) - batch.first
        message = batch.messages()[offset]
        return self._with_meta(message, batch, offset) if self.meta else message

    def take(self, n: int) -> list[dict[str, Any]]:
        """Take up to ``n`` messages of the batch that has the next one; only after :meth:`ready`."""
        batch = self.batch
        assert batch is not None
        first = batch.first
        if self.backward:
            start = self.index - 1 - first
            stop = start + 1
        else:
            start = self.index - first
            stop = min(start + n, batch.head.count)
        if start < self._kept_from or stop > self._kept_to:
            self._decode(batch)
        taken = self._messages[start:stop]
        if self.meta:
            taken = [self._with_meta(message, batch, offset) for offset, message in enumerate(taken, start)]
        self.last = (batch, stop - 1)
        if self.backward:
            self._kept_to = start
            self.index = first + start
        else:
            self._kept_from = stop
            self.index = first + stop
        if self.runs is not None:
            index = batch.index(stop - 1) + 1  # not the position: with isolation="committed" that is a place
            self.runs.append((index - len(taken), index))
        return taken

    def take_piece(self, n: int) -> list[Piece]:
        """As :meth:`take`, but return the part of the batch that has these messages, and decode nothing."""
        batch = self.batch
        assert batch is not None
        low = self.index - batch.first
        high = min(low + n, batch.head.count)
        self.last = (batch, high - 1)
        self.index = batch.first + high
        return [Piece(self.log, batch, low, high)]

    def pieces(self, end: int, until_ns: int | None = None) -> Iterator[Piece]:
        """Take the messages with indices below ``end``, of records that were appended before ``until_ns``."""
        while self.ready(end):
            (piece,) = self.take_piece(end)
            first = piece.batch.index(piece.low)
            if first >= end or (until_ns is not None and piece.batch.head.time_ns >= until_ns):
                return
            yield piece._replace(high=min(piece.high, piece.low + end - first))

    def go_back(self, mark: Mark) -> None:
        """Move back to a mark, and drop what was read ahead."""
        self.index, self.last = mark
        self.batch = None
        self._ahead.clear()

    def is_inside(self) -> bool:
        """Return whether the next message is in the batch that was loaded last."""
        batch = self.batch
        return batch is not None and batch.first <= (self.index - 1 if self.backward else self.index) < batch.next

    def ready(self, n: int = 1) -> bool:
        """Decode the batch that holds the next message, and read ahead for ``n`` messages; False at the end."""
        purges = self._core.word(wakeup.PURGES)
        fresh = self.batch is not None and purges == self._purges and purges >= 0
        if fresh and self._low <= (self.index - 1 if self.backward else self.index) < self._end:
            return True
        while self._load(n, purges, fresh):
            batch = self.batch
            assert batch is not None
            if not batch.head.acknowledges:
                return True
            # An acknowledgement is not a message.
            self.index = batch.first if self.backward else batch.next
        return False

    def _load(self, n: int, purges: int, fresh: bool) -> bool:
        """Open the next batch; with ``fresh``, the records that were read ahead are still valid."""
        if fresh and self._ahead and self._ahead[-1][0] == self.index and not self.backward:
            self._open(self._ahead.pop())
            return True
        self._ahead.clear()
        with self._core.view() as txn:
            row = self.log.row(txn)
            if self.backward:
                self.index = min(self.index, row.next)
                raws = self.log.read_before(txn, row, self.index)
            else:
                self.index = max(self.index, row.first)
                raws = self.log.read(txn, row, self.index, n, AHEAD_BYTES_MAX)
            self.kept = self.queue.core.follow_options(txn, row).kept
        if not raws:
            if self.queue.core.is_committed and not self.backward:
                rollback.look(self.queue)
            return False
        batch = self.batch
        if batch is None or batch.seal != raws[0][1][:8] or batch.first != raws[0][0]:
            batch = self._open(raws[0])
        self._ahead = raws[:0:-1]
        self._low = max(batch.first, row.first)
        self._purges = purges
        return True

    def _open(self, raw: Raw) -> Batch:
        batch = self.log.batches([raw])[0]
        if self.on_pending is not None and batch.head.stamps_at and is_pending(batch.value):
            tell, self.on_pending = self.on_pending, None
            tell(producer_of(batch))
        self._messages, self._kept_from, self._kept_to = [], 0, 0
        self.batch = batch
        self._low, self._end = batch.first, batch.first if batch.head.acknowledges else batch.next
        return batch

    def _decode(self, batch: Batch) -> None:
        self._messages = batch.messages()
        self._kept_from, self._kept_to = 0, len(self._messages)

    def _with_meta(self, message: dict[str, Any], batch: Batch, offset: int) -> dict[str, Any]:
        return {**message, names.META: metadata(batch, offset, self.log.id, self.kept)}

    # --- positions ---

    def position_for(self, txn: StoreTransaction, index_of: IndexOf) -> int:
        """Return the position of this cursor before the record at an index."""
        return self.log.place_of(txn, index_of(txn, self.log.records, self.log.records_row(txn)))

    def record_index(self) -> int:
        """Return the index up to which the log was read."""
        if not self.queue.core.is_committed:
            return self.index
        with self._core.view() as txn:
            return self.log.index_of(txn, self.index)

    def follow(self, txn: StoreTransaction) -> None:
        """Continue at the stored position, which another tailer of this name has moved."""
        self.stored = txn.get(self.row_key)
        if self.stored is not None:
            self.index = self.position_of(self.stored)

    def position_of(self, stored: bytes) -> int:
        """Return the position in a stored row."""
        return self._unpacked(stored).next

    def _unpacked(self, stored: bytes) -> Position:
        assert self.name is not None
        return unpack_reader(self.row_key, stored, self.log.id, self.name)

    def compare_and_set(self, txn: StoreTransaction, index: int) -> bytes | None:
        """Write a position and return its row; None, and nothing written, if another tailer has moved it."""
        return self.write_position(txn, index) if txn.get(self.row_key) == self.stored else None

    def write_position(self, txn: StoreTransaction, index: int) -> bytes:
        """Write a position into the row; return the row."""
        batch = self.batch
        if batch is not None and batch.first < index <= batch.next:
            seal = batch.seal
        else:
            seal = self.log.seal_before(txn, self.log.row(txn), index)
        stored = sealed.seal_by(self._seed, POSITION.pack(self.identity, index, seal))
        txn.put(self.row_key, stored)
        return stored


Take = Callable[[Cursor, int], list[Any]]
"""A way to take messages: :meth:`Cursor.take` or :meth:`Cursor.take_piece`."""


def compare_and_set(txn: StoreTransaction, cursors: Sequence[Cursor], indices: Sequence[int]) -> list[bytes] | None:
    """Write the positions of a tailer with several cursors, as :meth:`Cursor.compare_and_set` does."""
    if any(txn.get(cursor.row_key) != cursor.stored for cursor in cursors):
        return None
    return write_positions(txn, cursors, indices)


def write_positions(txn: StoreTransaction, cursors: Sequence[Cursor], indices: Sequence[int]) -> list[bytes]:
    """Write the positions that moved; the first time all, so that retention knows a reader of every partition."""
    return [
        cursor.stored
        if len(cursors) > 1 and cursor.stored is not None and cursor.position_of(cursor.stored) == index
        else cursor.write_position(txn, index)
        for cursor, index in zip(cursors, indices)
    ]


def producer_of(batch: Batch) -> str:
    """Return the id of the producer of a record that has one, as 12 hex digits."""
    return f"{stamps_of(batch.value).producer:012x}"


def metadata(batch: Batch, offset: int, queue: str, kept: frozenset[str]) -> dict[str, Any]:
    """Return the metadata map of one message, hash included."""
    fields: dict[str, Any] = {}
    if batch.head.hash:
        fields[names.HASH] = batch.head.hash.hex()
    if kept or batch.head.provenance:
        fields |= batch.provenance(queue, kept).at(offset)
    return fields
