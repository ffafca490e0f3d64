"""Tailers: readers of a queue that keep a position; and waiting for the first of several.

    t = q.tailer()              from the start, the position ends with the object
    t = q.tailer("reader-1")    the position is in the store, under that name

A tailer copies record batches out in short transactions and hands out their messages one by one.
A named tailer moves its position in the store before a read returns, by compare and set: readers of
one name, in any process, share the queue, each message to one of them. Reading moves on; what makes
*processing* exact is a graph (its positions move with the outputs), not a named tailer.

Not guaranteed: that a tailer sees messages which a purge dropped while they were read ahead (it
does not). One thread at a time: a second one gets :class:`~cues.errors.ConcurrentUse`.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import UUID

from cues import clock, names, wakeup
from cues.batch import Batch
from cues.errors import BatchDamaged, Closed, ConcurrentUse, InvalidArgument
from cues.queue import check_index

if TYPE_CHECKING:
    from cues.log import Raw
    from cues.queue import Queue

POSITION: Final = struct.Struct(">8sQ8s")
"""Queue identity, index to be read next, seal (checksum of the batch that holds the message before)."""

AHEAD_BYTES_MAX: Final = 256 << 10
"""What read_many copies out of one transaction at most."""

Direction = Literal["forward", "backward"]

_served = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is known of a message besides its body."""

    index: int
    time: datetime
    """When it was appended, aware, in UTC."""
    hash: str | None
    """Delivery hash of the step that wrote it, 32 hex digits; None for a plain append."""
    producer: str | None
    """Id of the publisher that wrote it, 12 hex digits; None where it has no identity."""
    metadata: dict[str, Any]
    """``{"q/hash", "q/queue": {queue: {"q/t", "q/time"}}, "tx/t"}``, as far as its queues keep it."""
    partition: int = 0
    """On which its index counts."""
    uuid: UUID | None = None
    """Producer, clock and flags (:func:`cues.txn.parse_uuid`); None where it has no identity."""


class Tailer:
    """Reads a queue from a position on; :meth:`Queue.tailer` makes it."""

    def __init__(self, queue: Queue, name: str | None = None, meta: bool = False) -> None:
        if name is not None:
            names.check("tailer", name)
        self.queue = queue
        self.name = name
        self._store = queue.store
        self._log = queue.log
        self._meta = meta
        self._direction: Direction = "forward"
        self._closed = False
        self._busy = threading.Lock()
        self._batch: Batch | None = None
        self._messages: list[dict[str, Any]] = []
        self._kept_from = self._kept_to = 0
        """Offsets of the messages that nobody was given yet; the dicts of others the reader may have changed."""
        self._ahead: list[Raw] = []
        """Records copied out in the same transaction, the next one last."""
        self._first = 0
        self._low = 0
        """The first message of the batch that is there: a purge may have ended inside it."""
        self._purges = -1
        self._last: tuple[Batch, int] | None = None
        self.served = 0
        self._row_key = names.reader_key(queue.name, queue.log.partition, name) if name is not None else b""
        with self._store.view() as txn:
            row = self._log.row(txn)
            self._kept = queue.follow_options(txn, row).kept
            self._stored = txn.get(self._row_key) if name is not None else None
        self._identity = row.identity
        self._index = self._position(self._stored) if self._stored is not None else row.first

    # --- reading ---

    def read(self, block: bool = False, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message, or None at the end of the queue.

        With ``block`` it waits for one, at most ``timeout`` seconds (then None), whichever thread or
        process writes it. Closing the tailer, its queue or its store ends the wait with
        :class:`Closed`. A damaged batch raises :class:`BatchDamaged`; as any error, it moves nothing.
        """
        with self._use():
            found = self._next(1)
            if not found and block:
                found = wakeup.wait([self.interest], self._next_if_open, timeout)
        return found[0] if found else None

    def read_many(self, n: int) -> list[dict[str, Any]]:
        """The next ``n`` messages; fewer only at the end of the queue or in front of a damaged batch.

        Never waits. A damaged batch raises :class:`BatchDamaged` when it is the first to be read.
        """
        if not isinstance(n, int) or n < 0:
            raise InvalidArgument(f"read_many({n!r}).", "a count of messages.")
        with self._use():
            return self._next(n)

    def peek(self) -> dict[str, Any] | None:
        """The message that :meth:`read` would give, without moving."""
        with self._use():
            if not self._ready():
                return None
            assert self._batch is not None
            offset = self._cursor() - self._first
            message = self._batch.messages()[offset]
            return self._with_meta(message, self._batch, offset) if self._meta else message

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The messages until the end of the queue."""
        while (message := self.read()) is not None:
            yield message

    def follow(self) -> Iterator[dict[str, Any]]:
        """The messages, and then those that come, until something is closed (:class:`Closed`)."""
        while True:
            message = self.read(block=True)
            if message is not None:
                yield message

    # --- the position ---

    @property
    def index(self) -> int:
        """The index that is read next (backward: the message below it is)."""
        return self._index

    @property
    def positions(self) -> dict[int, int]:
        """The index that is read next, by partition: the one that this tailer reads."""
        return {self._log.partition: self._index}

    @property
    def last_read_index(self) -> int | None:
        """The index of the message read last; None before the first."""
        return self._last[0].first + self._last[1] if self._last else None

    @property
    def envelope(self) -> Envelope | None:
        """Index, time, hash and metadata of the message read last; None before the first."""
        if self._last is None:
            return None
        batch, offset = self._last
        return envelope_of(batch, offset, self._metadata(batch, offset), self._log.partition)

    @property
    def direction(self) -> Direction:
        """``"forward"`` (default) or ``"backward"``: the message below the index, which it then becomes."""
        return self._direction

    @direction.setter
    def direction(self, value: Direction) -> None:
        if value not in ("forward", "backward"):
            raise InvalidArgument(f"direction is {value!r}.", "'forward' or 'backward'.")
        self._direction = value

    def to_start(self) -> None:
        """Go to the first message that is there."""
        self._seek(lambda txn, row: row.first)

    def to_end(self) -> None:
        """Go behind the last message."""
        self._seek(lambda txn, row: row.next)

    def to_index(self, index: int) -> None:
        """Go to ``index``, from 1 to the next that will be written; a purged one goes to the first that is left."""
        self._seek(lambda txn, row: max(row.first, check_index(index, row.next, f"to_index({index!r})")))

    def to_time(self, when: datetime) -> None:
        """Go to the first message appended at or after ``when`` (aware); behind the last if none was."""
        ns = clock.to_ns(when)
        self._seek(lambda txn, row: self._log.index_at(txn, row, ns))

    def _seek(self, place: Any) -> None:
        with self._use():
            with self._store.view() as txn:
                index = place(txn, self._log.row(txn))
            if self.name is not None:
                self._stored = self._store.commit(self._write_position, index)
            self._index = index

    # --- end ---

    def close(self) -> None:
        """Close the tailer; a read that waits in another thread ends with :class:`Closed`."""
        self._closed = True
        doorbells = self._store.doorbells
        if doorbells is not None and not self._store.closed:
            doorbells.ring_own()

    def __enter__(self) -> Tailer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<cues.Tailer{name} of {self.queue.id} at {self._index}>"

    # --- inside ---

    @property
    def interest(self) -> tuple[wakeup.Doorbells | None, int]:
        """What :func:`cues.wakeup.wait` needs to wake this tailer."""
        return self._store.doorbells, self._log.mask

    def _use(self) -> _Use:
        self._check()
        return _Use(self._busy, self.queue.id)

    def _check(self) -> None:
        if self._closed or self.queue._closed or self._store.closed:
            if self._closed:
                raise Closed(f"The tailer of {self.queue.id!r} is closed.", "queue.tailer(...) again.")
            self.queue.check()

    def _next_if_open(self) -> list[dict[str, Any]]:
        self._check()
        return self._next(1)

    def _next(self, n: int) -> list[dict[str, Any]]:
        """Take the next ``n`` messages and move, all or, with an error, nothing."""
        while True:
            index, last = self._index, self._last
            try:
                found = self._take_ahead(n)
                if self.name is None or not found or self._commit_position():
                    return found
            except BaseException:
                self._go_back(index, last)
                raise
            # Somebody of the same name was faster: go on from where they are.
            self._go_back(index, last)
            with self._store.view() as txn:
                self._stored = txn.get(self._row_key)
            if self._stored is not None:
                self._index = self._position(self._stored)

    def _take_ahead(self, n: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        try:
            while len(found) < n and self._ready(n - len(found)):
                found += self._take(n - len(found))
        except BatchDamaged:
            if not found:
                raise
        return found

    def _go_back(self, index: int, last: tuple[Batch, int] | None) -> None:
        self._index, self._last = index, last
        self._batch = None
        self._ahead.clear()

    def _take(self, n: int) -> list[dict[str, Any]]:
        """Hand out up to ``n`` messages of the batch that the tailer stands in."""
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
            return [self._with_meta(m, batch, start + i) for i, m in enumerate(taken)]
        return taken

    def _decode(self, batch: Batch) -> None:
        self._messages = batch.messages()
        self._kept_from, self._kept_to = 0, len(self._messages)

    def _cursor(self) -> int:
        """The index of the message that is handed out next."""
        return self._index - 1 if self._direction == "backward" else self._index

    def _ready(self, n: int = 1) -> bool:
        """Have the batch decoded that holds the next message, and those of ``n`` at hand; False at the end."""
        purges = self._store.purges()
        fresh = self._batch is not None and purges == self._purges and purges >= 0
        if fresh and self._low <= self._cursor() < self._first + len(self._messages):
            return True
        while self._load(n, purges, fresh):
            batch = self._batch
            assert batch is not None
            if self._messages or not batch.head.acknowledges:
                return True
            self._index = batch.first if self._direction == "backward" else batch.next  # it is no message
        return False

    def _load(self, n: int, purges: int, fresh: bool) -> bool:
        """Open the next batch; ``fresh`` says that what was read ahead is as it was."""
        if fresh and self._ahead and self._ahead[-1][0] == self._index and self._direction == "forward":
            self._open(self._ahead.pop())
            return True
        self._ahead.clear()
        with self._store.view() as txn:
            row = self._log.row(txn)
            if self._direction == "backward":
                self._index = min(self._index, row.next)
                raws = self._log.read_before(txn, row, self._index)
            else:
                self._index = max(self._index, row.first)
                raws = self._log.read(txn, row, self._index, n, AHEAD_BYTES_MAX)
            self._kept = self.queue.follow_options(txn, row).kept
        if not raws:
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
        if batch.head.acknowledges:
            self._messages = []
            self._kept_from = self._kept_to = 0
        else:
            self._decode(batch)
        self._batch = batch
        self._first = self._low = batch.first
        return batch

    def _with_meta(self, message: dict[str, Any], batch: Batch, offset: int) -> dict[str, Any]:
        return {**message, names.META: self._metadata(batch, offset)}

    def _metadata(self, batch: Batch, offset: int) -> dict[str, Any]:
        return metadata(batch, offset, self._log.id, self._kept)

    # --- the stored position of a named tailer ---

    def _position(self, raw: bytes) -> int:
        return int(POSITION.unpack(raw)[1])

    def _commit_position(self) -> bool:
        """Move the stored position to where this tailer stands, unless another of its name moved it."""
        stored = self._store.commit(self._compare_and_set, self._index)
        if stored is None:
            return False
        self._stored = stored
        return True

    def _compare_and_set(self, txn: Any, index: int) -> bytes | None:
        return self._write_position(txn, index) if txn.get(self._row_key) == self._stored else None

    def _write_position(self, txn: Any, index: int) -> bytes:
        batch = self._batch
        if batch is not None and batch.first < index <= batch.next:
            seal = batch.seal
        else:
            seal = self._log.seal_before(txn, self._log.row(txn), index)
        stored = POSITION.pack(self._identity, index, seal)
        txn.put(self._row_key, stored)
        return stored


class _Use:
    """Holds a tailer for one call."""

    __slots__ = ("_lock",)

    def __init__(self, lock: threading.Lock, queue: str) -> None:
        if not lock.acquire(blocking=False):
            raise ConcurrentUse(
                f"The tailer of {queue!r} is used by another thread right now.", "a tailer for each thread."
            )
        self._lock = lock

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def envelope_of(batch: Batch, offset: int, metadata: dict[str, Any], partition: int = 0) -> Envelope:
    """What is known of one message of a batch."""
    head, stamps = batch.head, batch.stamps
    return Envelope(
        batch.first + offset,
        clock.to_datetime(head.time_ns),
        head.hash.hex() if head.hash else None,
        f"{stamps.producer:012x}" if stamps else None,
        metadata,
        partition,
        stamps.uuid(offset) if stamps else None,
    )


def metadata(batch: Batch, offset: int, queue: str, kept: frozenset[str]) -> dict[str, Any]:
    """The metadata map of one message, hash included."""
    found: dict[str, Any] = {}
    if batch.head.hash:
        found[names.HASH] = batch.head.hash.hex()
    if kept or batch.head.provenance:
        found |= batch.provenance(queue, kept).at(offset)
    return found


def alts(tailers: Sequence[Tailer], timeout: float | None = None) -> tuple[Tailer, dict[str, Any]] | None:
    """The first message that any of ``tailers`` has, with its tailer; waits for one.

    Fair: among several with a message, the one served longest ago. None when ``timeout`` seconds
    passed without one. The tailers may belong to several stores.
    """
    if not tailers:
        raise InvalidArgument("alts() needs at least one tailer.", "cues.alts([t1, t2]).")

    def first() -> tuple[Tailer, dict[str, Any]] | None:
        for tailer in sorted(tailers, key=lambda t: t.served):
            message = tailer.read()
            if message is not None:
                tailer.served = next(_served)
                return tailer, message
        return None

    found = first()
    if found is None and (timeout is None or timeout > 0):
        found = wakeup.wait([tailer.interest for tailer in tailers], first, timeout)
    return found
