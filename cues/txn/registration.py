"""The notes of a consumer in the stores that it reads and writes, for retention, for its successor and for status.

The checkpoint of a consumer may be anywhere. The stores must know it nevertheless:

    low-water marks    retention deletes no message that the checkpoint needs (:mod:`cues.forwarding.marks`)
    consumer row       shows the consumer, and names the other stores in which its messages may be pending
    publisher rows     name the consumer to which pending messages belong, and the fence of the instance

Rules, each of which a test breaks:

    1. A mark is written after its checkpoint is durable. So it is never higher than the position of a successor.
    2. A store is named in the consumer rows, durably, before the first message is pending in it.
    3. The row of a publisher is written in the transaction of its first pending message.
    4. A start drops what earlier instances left pending, in all of these stores and on all queues: after it has
       restored, so that they cannot commit any more, and after it has repeated the acknowledgements of the last
       checkpoint. Messages of an instance with the same or a higher fence are not dropped: it may be alive, or decided.
    5. The stores stay named until a start has dropped the messages there, or a consumer has closed without any.

Not guaranteed: anything for a checkpoint without a name and a place (one of your own, perhaps), and in stores that are
open read-only. A consumer that gets another checkpoint, or one that is put back to an older copy, with a lower fence,
does not drop the messages of its earlier instances. Marks are about a second old (:data:`NOTE_S`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import xxhash

from cues import faults
from cues.base import clock, logs, names
from cues.base.names import ProcessorKey
from cues.errors import CuesError, StoreNotFound, StoreReadOnly
from cues.forwarding import marks, other_stores
from cues.forwarding.marks import CONSUMER, ForeignReader, Mark
from cues.producers.sequencer import Checkpoint
from cues.queues import rollback
from cues.queues.base import view_of
from cues.queues.queue import Queue, open_queue
from cues.records import sealed
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction
from cues.txn import consumer_rows
from cues.txn.consumer_rows import ConsumerRow, PublisherRow
from cues.txn.sources import ConsumerSource, ReadFrom

NOTE_S: Final = 1.0
"""Seconds between two notes of the positions: each is a commit in the store that is read."""
_NAME_MAX: Final = 64
"""The longest name of a consumer in keys, whose length LMDB bounds."""

_log = logs.logger("cues.txn")


class _Place(NamedTuple):
    """The position of the consumer on one log."""

    log: str
    next: int
    needed: int
    """The first index that it may read again: the begin of a transaction that is open there."""
    all_partitions: bool


def needed_from(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the index of each journal before which a successor reads no message again."""
    needed = dict(checkpoint.offsets)
    for state in checkpoint.producers:
        if state.begin >= 0:
            needed[state.journal] = min(state.begin, needed.get(state.journal, state.begin))
    return needed


class Registration:
    """The notes of one consumer. The thread of the consumer calls it, and a thread that publishes."""

    def __init__(self, checkpoint: Any, sources: Sequence[ReadFrom]) -> None:
        self._checkpoint = checkpoint
        self._place = str(checkpoint.place)
        self.id = xxhash.xxh3_64_digest(self._place.encode())
        self.name = "".join(c for c in str(checkpoint.name) if c.isprintable())[:_NAME_MAX] or self.id.hex()
        self._fence = 0
        stores = {id(source.queue.store.core.environment): source.queue.store for source in sources}
        self._homes = [store for store in stores.values() if not store.readonly]
        self._reads_all = {queue.store.id.hex() + "/" + queue.core.log.id for queue in _reading_all(sources)}
        self._outputs: set[bytes] = set()
        self._written: dict[int, list[_Place]] = {}
        """The places as last written, by index of the store."""
        self._locked: list[int] = []
        self._due = 0.0
        self._guard = threading.Lock()
        self._warned = False

    @staticmethod
    def of(checkpoint: Any, sources: Sequence[ReadFrom]) -> Registration | None:
        """Return the notes of a consumer, None if its checkpoint has no name and place."""
        known = all(hasattr(checkpoint, name) for name in ("name", "place", "fence"))
        return Registration(checkpoint, sources) if known else None

    # --- start --------------------------------------------------------------------------------

    def roll_back(self) -> int:
        """Drop what earlier instances left pending, wherever they published; return the number of transactions.

        Call it after the restore and the repeated acknowledgements. A store that cannot be opened stays named.
        """
        self._fence = int(self._checkpoint.fence)
        for home in self._homes:
            home.core.search()
            with home.core.view() as txn:
                row = consumer_rows.read(txn, self.id)
            self._outputs |= set(row.outputs) if row is not None else set()
        dropped = sum([self._drop(home) for home in self._homes])
        for output in sorted(self._outputs):
            with contextlib.ExitStack() as opened:
                try:
                    store = self._opened(output, opened)
                except StoreNotFound as error:
                    _log.warning(
                        "%s%s: messages that its last instance left pending in another store stay there until a later"
                        " start: %s",
                        CONSUMER, self.name, error,
                    )  # fmt: skip
                    continue
                dropped += self._drop(store)
                if store.durability != "disk":
                    store.sync()
            self._outputs.discard(output)
        return dropped

    def _opened(self, output: bytes, opened: contextlib.ExitStack) -> BaseStore:
        error = StoreNotFound("", "")
        for home in self._homes:
            try:
                return opened.enter_context(other_stores.opened(home, output, readonly=False))
            except StoreNotFound as missing:
                error = missing
        raise error

    def _drop(self, store: BaseStore) -> int:
        return drop_pending(store, self.id, below=self._fence)

    def begin(self, sources: Iterable[ConsumerSource], checkpoint: Checkpoint) -> None:
        """Write the notes of this instance, before its first message."""
        self._lock()
        self._due = 0.0
        self.note(sources, checkpoint)

    # --- while it runs --------------------------------------------------------------------------

    def row(self) -> PublisherRow:
        """Return the row of a publisher of this instance."""
        return PublisherRow(self.id, int(self._checkpoint.fence), CONSUMER + self.name)

    def before_pending(self, store: BaseStore) -> None:
        """Name a store in which messages will be pending, durably. Called before the first one."""
        with self._guard:
            for home in self._homes:
                if home.core.same_as(store.core):
                    continue
                other_stores.remember(home, store)
                self._outputs.add(store.id)
                self._write(home, self._written.get(id(home.core.environment), []))
                if home.durability != "disk":
                    home.sync()

    @property
    def due_s(self) -> float:
        """The seconds until the next note may be written; 0 or less if it may now."""
        return self._due - time.monotonic()

    def note(self, sources: Iterable[ConsumerSource], checkpoint: Checkpoint) -> None:
        """Write the positions of a checkpoint that was committed, where they have changed.

        A store that cannot be written only keeps its messages for longer, so its error is logged once and not raised.
        """
        if not self._homes:
            return
        with self._guard:
            self._due = time.monotonic() + NOTE_S
            needed = needed_from(checkpoint)
            for home in self._homes:
                places = [
                    self._place_of(source, checkpoint.offsets, needed) for source in sources if _is_in(source, home)
                ]
                if places == self._written.get(id(home.core.environment)):
                    continue
                try:
                    if hasattr(self._checkpoint, "sync_before"):
                        self._checkpoint.sync_before(home)
                    self._write(home, places)
                except CuesError as error:
                    if not self._warned:
                        self._warned = True
                        _log.warning(
                            "%s: the position of %s%s cannot be noted: %s", home.path, CONSUMER, self.name, error
                        )

    def _place_of(self, source: ConsumerSource, offsets: Mapping[str, int], needed: Mapping[str, int]) -> _Place:
        begin, journal = source.begin, source.journal
        all_partitions = journal in self._reads_all
        return _Place(source.queue.core.log.id, offsets.get(journal, begin), needed.get(journal, begin), all_partitions)

    def _write(self, home: BaseStore, places: list[_Place]) -> None:
        """Write the marks and the row, unless a later instance has written its own."""

        def put(txn: StoreTransaction) -> None:
            row = consumer_rows.read(txn, self.id)
            if row is not None and row.fence > self._fence:
                return
            reader = ForeignReader(self.id, ProcessorKey(CONSUMER + self.name), self._fence)
            for place in places:
                marks.put(txn, place.log, reader, Mark(self._fence, place.needed, False, place.all_partitions))
            positions = {place.log: place.next for place in places}
            for log in set(row.positions if row is not None else ()) - set(positions):
                if places:  # it is not a source any more
                    txn.delete(names.low_water_key(log, self.id, reader.name))
            own = ConsumerRow(
                self.name, self._place, self._fence, positions, tuple(sorted(self._outputs)), clock.now_ns()
            )
            sealed.put(txn, names.consumer_key(self.id.hex()), own.pack())
            faults.point("consumer.noted")

        home.core.commit(put)
        self._written[id(home.core.environment)] = places

    # --- end ------------------------------------------------------------------------------------

    def end(self, nothing_pending: bool) -> None:
        """Release the lock. With ``nothing_pending`` no store has messages that a successor must drop."""
        with self._guard:
            for home in self._homes:
                if home.closed:
                    continue
                if nothing_pending and self._outputs and self._written:
                    outputs, self._outputs = self._outputs, set()
                    with contextlib.suppress(CuesError):
                        self._write(home, self._written.get(id(home.core.environment), []))
                    self._outputs = outputs
                with contextlib.suppress(StoreReadOnly):
                    if id(home.core.environment) in self._locked:
                        home.core.locks.unlock(consumer_rows.consumer_lock(self.id))
            self._locked = []
            if nothing_pending:
                self._outputs = set()

    def _lock(self) -> None:
        """Take the lock that shows that the consumer runs. An instance that is stopped may have it."""
        for home in self._homes:
            with contextlib.suppress(StoreReadOnly):
                if home.core.locks.try_lock(consumer_rows.consumer_lock(self.id)):
                    self._locked.append(id(home.core.environment))


def drop_pending(store: BaseStore, consumer: bytes, below: int | None = None) -> int:
    """Drop all messages of a consumer that are pending in a store; return the number of transactions.

    ``below``: only those of instances with a lower fence.
    """
    with store.core.view() as txn:
        own = {
            producer
            for producer, row in consumer_rows.publishers(txn).items()
            if row.consumer == consumer and (below is None or row.fence < below)
        }
        due = [(log, producer) for log, producer, _ in consumer_rows.pending(txn) if producer in own]
    dropped = 0
    for log, producer in due:
        queue, partition = names.split_log(log)
        view = view_of(open_queue(store, queue), partition)
        alive = consumer_rows.holder(store, consumer_rows.publisher_lock(producer)) is not None
        dropped += bool(store.core.commit(rollback.roll_back, view, producer, alive))
        store.core.ring(view.core.log.mask)
    if own:
        store.core.commit(consumer_rows.sweep, store)
    return dropped


def _reading_all(sources: Iterable[ReadFrom]) -> list[Queue]:
    return [source.queue for source in sources if source.queue.core.parent is None]


def _is_in(source: ConsumerSource, store: BaseStore) -> bool:
    return source.queue.store.core.same_as(store.core)
