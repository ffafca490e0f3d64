"""Tailers: readers of a queue that keep a position; and waiting for the first of several.

    t = q.tailer()              from the start; only the object has the position
    t = q.tailer("reader-1")    the position is in the store, under that name

A tailer copies record batches out in short transactions and hands out their messages one by one.
A named tailer moves its position in the store before a read returns, by compare and set. So readers of
one name, in any process, share the queue: each message is read by one of them.

Not guaranteed: that a message is processed. The position moves when it is read. For exactly-once processing use a
graph, whose positions move with the outputs.

A tailer does not return messages that were read ahead and then purged. It is used by one thread at a time: a second
thread gets :class:`~cues.errors.ConcurrentUse`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Final, Literal
from uuid import UUID

from cues.base import clock, names
from cues.errors import BatchDamaged, ConcurrentUse, InvalidArgument
from cues.native import mypyc_attr
from cues.overrides import override
from cues.queues import rollback
from cues.queues.base import BaseQueue
from cues.queues.base_tailer import BaseTailer, Place
from cues.queues.committed import identity_of
from cues.queues.log import Raw
from cues.queues.processor_rows import NO_SEAL, Position, pack_reader, unpack_reader
from cues.records import sealed
from cues.records.batch import Batch, is_pending, stamps_of
from cues.records.log_row import LogRow
from cues.storage import wakeup
from cues.storage.transaction import StoreTransaction

AHEAD_BYTES_MAX: Final = 256 << 10
"""The most bytes that read_many copies out of one transaction."""

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
class Tailer(BaseTailer):
    """Reads a queue from a position on; :meth:`Queue.tailer` makes it."""

    _deferred: ClassVar[bool] = False
    """True if the position of a named tailer is not committed by each read, but by another commit."""

    def __init__(self, queue: BaseQueue, name: str | None = None, meta: bool = False) -> None:
        if name is not None:
            names.check("tailer", name)
        super().__init__(queue)
        self.name = name
        self.on_pending: Callable[[str], None] | None = None
        """Called once, with the id of a publisher whose pending messages are read as if they were committed."""
        self._log = queue.core.log
        self._meta = meta
        self._direction: Direction = "forward"
        self._busy = threading.Lock()
        self._batch: Batch | None = None
        self._messages: list[dict[str, Any]] = []
        self._kept_from = self._kept_to = 0
        """Offsets of the messages that were not returned yet; a caller may have changed the dicts of the others."""
        self._ahead: list[Raw] = []
        """Records copied out in the same transaction, the next one last."""
        self._first = 0
        self._low = 0
        """The first message of the batch that still exists: a purge may have ended inside the batch."""
        self._purges = -1
        self._last: tuple[Batch, int] | None = None
        self._read: Tailer | None = None
        """With several partitions, the tailer of the message read last."""
        self._row_key = names.reader_key(queue.name, queue.core.log.partition, name) if name is not None else b""
        with self._store.core.view() as txn:
            row = self._log.row(txn)
            self._kept = queue.core.follow_options(txn, row).kept
            self._stored = txn.get(self._row_key) if name is not None else None
            records = self._log.records_row(txn).identity
            self._compare(txn, row)
        self._identity = row.identity
        self._index = self._position(self._stored) if self._stored is not None else row.first
        self._check_isolation(records)

    def _compare(self, txn: StoreTransaction, row: LogRow) -> None:
        """Compare a stored position with the log. Raises :class:`StoreDamaged`: from such a one messages are lost."""
        stored = None if self._stored is None else self._unpacked(self._stored)
        if stored is None or stored.identity != row.identity:
            return
        what = f"position of the named tailer {self.name!r} of queue {self._log.id}"
        if not 1 <= stored.next <= row.next:
            raise sealed.damaged(what, f"it is {stored.next}, and the queue ends before {row.next}")
        if self._log.seal_before(txn, row, stored.next) not in (NO_SEAL, stored.seal) and stored.seal != NO_SEAL:
            raise sealed.damaged(what, f"the messages before {stored.next} are not those that it was written after")

    def _check_isolation(self, records: bytes) -> None:
        """Refuse a stored position of the other isolation; ``records`` is the identity of the queue's records."""
        if self._stored is None:
            return
        identity = self._unpacked(self._stored).identity
        other = identity_of(records) if self._identity == records else records
        if identity == other:
            was, now = ("committed", "uncommitted") if self._identity == records else ("uncommitted", "committed")
            raise InvalidArgument(
                f"The tailer {self.name!r} of queue {self.queue.id!r} reads with isolation={was!r}, and was opened with"
                f" {now!r}: messages would be lost or repeated.",
                f"pass isolation={was!r}, or use another name.",
            )

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
            return self._next(n)

    def peek(self) -> dict[str, Any] | None:
        """Return the message that :meth:`read` would return, and do not move."""
        with self._use():
            return self._peek()

    def _peek(self) -> dict[str, Any] | None:
        if not self._ready():
            return None
        assert self._batch is not None
        offset = self._cursor() - self._first
        message = self._batch.messages()[offset]
        return self._with_meta(message, self._batch, offset) if self._meta else message

    @property
    def index(self) -> int:
        """The index that is read next; backward, the message before this index is read next.

        With ``isolation="committed"``, the index up to which the log was read. Inside a transaction it is that of the
        acknowledgement; pending messages before it are returned if they are committed later.
        """
        return self._record_index()

    def _record_index(self) -> int:
        if not self.queue.core.is_committed:
            return self._index
        with self._store.core.view() as txn:
            return self._log.index_of(txn, self._index)

    @property
    def positions(self) -> dict[int, int]:
        """The index that is read next, as a dict with the one partition that this tailer reads."""
        return {self._log.partition: self._record_index()}

    @property
    def last_read_index(self) -> int | None:
        """The index of the message read last, on its partition; None before the first."""
        last = (self._read or self)._last
        return last[0].index(last[1]) if last else None

    @property
    def envelope(self) -> Envelope | None:
        """Partition, index, time, hash and metadata of the message read last; None before the first."""
        part = self._read or self
        if part._last is None:
            return None
        batch, offset = part._last
        return envelope_of(batch, offset, metadata(batch, offset, part._log.id, part._kept), part._log.partition)

    @property
    def direction(self) -> Direction:
        """``"forward"`` (default) or ``"backward"``: read the message before the index, and move to it."""
        return self._direction

    @direction.setter
    def direction(self, value: Direction) -> None:
        if value not in ("forward", "backward"):
            raise InvalidArgument(f"direction is {value!r}.", "pass 'forward' or 'backward'.")
        self._turn(value)

    def _turn(self, direction: Direction) -> None:
        self._direction = direction

    @override
    def _seek(self, place: Place) -> None:
        with self._use():
            with self._store.core.view() as txn:
                index = self._place(txn, place)
            if self.name is not None and not self._deferred:
                self._stored = self._store.core.commit(self._write_position, index)
            self._index = index

    def _place(self, txn: StoreTransaction, place: Place) -> int:
        """Return the position of this tailer at a place of the log's records."""
        return self._log.place_of(txn, place(txn, self._log.records, self._log.records_row(txn)))

    @override
    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<cues.Tailer{name} of {self.queue.id} at {self._index}>"

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
        self._index = position

    @property
    def position(self) -> int:
        """The position on the log that it reads."""
        return self._index

    def _next_if_open(self) -> list[dict[str, Any]]:
        self.check_open()
        return self._next(1)

    def _next(self, n: int) -> list[dict[str, Any]]:
        """Take the next ``n`` messages and move; on an error, move nothing."""
        while True:
            index, last = self._index, self._last
            try:
                taken = self._take_ahead(n)
                if self.name is None or not taken or self._commit_position():
                    return taken
            except BaseException:
                self._go_back(index, last)
                raise
            # Another tailer of the same name was faster: continue at its position.
            self._go_back(index, last)
            with self._store.core.view() as txn:
                self._stored = txn.get(self._row_key)
            if self._stored is not None:
                self._index = self._position(self._stored)

    def _take_ahead(self, n: int) -> list[dict[str, Any]]:
        taken: list[dict[str, Any]] = []
        try:
            while len(taken) < n and self._ready(n - len(taken)):
                taken += self._take(n - len(taken))
        except BatchDamaged:
            if not taken:
                raise
        return taken

    def _go_back(self, index: int, last: tuple[Batch, int] | None) -> None:
        self._index, self._last = index, last
        self._batch = None
        self._ahead.clear()

    def _take(self, n: int) -> list[dict[str, Any]]:
        """Return up to ``n`` messages of the current batch."""
        batch = self._batch
        assert batch is not None
        if self._direction == "backward":
            n = 1
        start = self._cursor() - self._first
        stop = min(start + n, len(self._messages))
        if start < self._kept_from or stop > self._kept_to:
            self._decode(batch)
        taken = self._messages[start:stop]
        self._last = (batch, stop - 1)
        if self._direction == "backward":
            self._kept_to = start
            self._index = self._first + start
        else:
            self._kept_from = stop
            self._index = self._first + stop
        if self._meta:
            return [self._with_meta(message, batch, offset) for offset, message in enumerate(taken, start)]
        return taken

    def _decode(self, batch: Batch) -> None:
        self._messages = [] if batch.head.acknowledges else batch.messages()
        self._kept_from, self._kept_to = 0, len(self._messages)

    def _cursor(self) -> int:
        """The index of the message that is handed out next."""
        return self._index - 1 if self._direction == "backward" else self._index

    def _ready(self, n: int = 1) -> bool:
        """Decode the batch that holds the next message, and read ahead for ``n`` messages; False at the end."""
        purges = self._store.core.purges()
        fresh = self._batch is not None and purges == self._purges and purges >= 0
        if fresh and self._low <= self._cursor() < self._first + len(self._messages):
            return True
        while self._load(n, purges, fresh):
            batch = self._batch
            assert batch is not None
            if self._messages or not batch.head.acknowledges:
                return True
            # An acknowledgement is not a message.
            self._index = batch.first if self._direction == "backward" else batch.next
        return False

    def _load(self, n: int, purges: int, fresh: bool) -> bool:
        """Open the next batch; with ``fresh``, the records that were read ahead are still valid."""
        if fresh and self._ahead and self._ahead[-1][0] == self._index and self._direction == "forward":
            self._open(self._ahead.pop())
            return True
        self._ahead.clear()
        with self._store.core.view() as txn:
            row = self._log.row(txn)
            if self._direction == "backward":
                self._index = min(self._index, row.next)
                raws = self._log.read_before(txn, row, self._index)
            else:
                self._index = max(self._index, row.first)
                raws = self._log.read(txn, row, self._index, n, AHEAD_BYTES_MAX)
            self._kept = self.queue.core.follow_options(txn, row).kept
        if not raws:
            if self.queue.core.is_committed and self._direction == "forward":
                rollback.look(self.queue)
            return False
        batch = self._batch
        if batch is None or batch.seal != raws[0][1][:8] or batch.first != raws[0][0]:
            batch = self._open(raws[0])
        self._ahead = raws[:0:-1]
        self._low = max(batch.first, row.first)
        self._purges = purges
        return True

    def _open(self, raw: Raw) -> Batch:
        batch = self._log.batches([raw])[0]
        if self.on_pending is not None and batch.head.stamps_at and is_pending(batch.value):
            tell, self.on_pending = self.on_pending, None
            tell(producer_of(batch))
        self._decode(batch)
        self._batch = batch
        self._first = self._low = batch.first
        return batch

    def _with_meta(self, message: dict[str, Any], batch: Batch, offset: int) -> dict[str, Any]:
        return {**message, names.META: metadata(batch, offset, self._log.id, self._kept)}

    def _position(self, raw: bytes) -> int:
        return self._unpacked(raw).next

    def _unpacked(self, raw: bytes) -> Position:
        assert self.name is not None
        return unpack_reader(raw, self._log.id, self.name)

    def _commit_position(self) -> bool:
        """Move the stored position to this tailer's, unless another tailer of its name moved it."""
        if self._deferred:
            return True
        stored = self._store.core.commit(self._compare_and_set, self._index)
        self._stored = stored or self._stored
        return stored is not None

    def _compare_and_set(self, txn: StoreTransaction, index: int) -> bytes | None:
        return self._write_position(txn, index) if txn.get(self._row_key) == self._stored else None

    def _write_position(self, txn: StoreTransaction, index: int) -> bytes:
        batch = self._batch
        if batch is not None and batch.first < index <= batch.next:
            seal = batch.seal
        else:
            seal = self._log.seal_before(txn, self._log.row(txn), index)
        stored = pack_reader(self._identity, index, seal)
        txn.put(self._row_key, stored)
        return stored


def producer_of(batch: Batch) -> str:
    """Return the id of the producer of a record that has one, as 12 hex digits."""
    return f"{stamps_of(batch.value).producer:012x}"


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


def metadata(batch: Batch, offset: int, queue: str, kept: frozenset[str]) -> dict[str, Any]:
    """Return the metadata map of one message, hash included."""
    fields: dict[str, Any] = {}
    if batch.head.hash:
        fields[names.HASH] = batch.head.hash.hex()
    if kept or batch.head.provenance:
        fields |= batch.provenance(queue, kept).at(offset)
    return fields


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
