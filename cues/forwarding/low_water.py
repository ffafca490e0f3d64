"""The low-water mark of a processor on a queue of another store.

The position of the processor is in its home store, which the retention of the queue does not read. So the mark is in
the store of the queue, and retention deletes no message from the mark on.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from cues import faults
from cues.base import names
from cues.forwarding import marks
from cues.forwarding.marks import ForeignReader, Mark
from cues.queues.queue import Queue
from cues.records import sealed
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction


class LowWater:
    """The low-water mark of one processor on one queue of another store.

    The thread of the processor calls :meth:`hold` and :meth:`release`; the forwarder thread calls the other methods.
    """

    def __init__(self, queue: Queue, reader: ForeignReader, holding: bool = False) -> None:
        self.queue = queue
        self.reader = reader
        self._key = names.low_water_key(queue.core.log.id, reader.home, reader.name)
        self._holding = holding
        self._guard = threading.Lock()
        self._written = self._read()

    def _read(self) -> Mark | None:
        with self.queue.store.core.view() as txn:
            raw = txn.get(self._key)
        return None if raw is None else Mark.unpack(self._key, raw)

    def renew(self, epoch: int) -> None:
        """Follow a seek: the epoch of the reader was raised, and the seek wrote a mark of its own."""
        with self._guard:
            self.reader = replace(self.reader, epoch=epoch)
            self._holding = False
            self._written = self._read()

    @property
    def epoch(self) -> int | None:
        """The epoch of the stored mark; None without a mark."""
        return None if self._written is None else self._written.epoch

    def begin(self, index: int) -> None:
        """Write the mark, if there is none, before the first step of the reader."""
        if self._written is None:
            self._write(Mark(self.reader.epoch, index, self._holding))

    def hold(self, start: int) -> None:
        """Keep the messages from ``start`` on. Call it before the commit, at home, of a snapshot that names them.

        It costs a commit in the other store if they were not held before, and nothing if the queue has no
        retention policy.
        """
        with self._guard:
            self._holding = True
            start = self._needed_from(start)
            written = self._written
            held = written is not None and written.under_way and written.next <= start
            if self.queue.options.retention is not None and not held:
                self._write(Mark(self.reader.epoch, min(start, written.next) if written else start, True))

    def release(self) -> None:
        """Note that no step is running. The next write of the mark records it."""
        self._holding = False

    def publish(self, index: int) -> None:
        """Write that all messages before ``index`` were read. The position must be durable at home."""
        with self._guard:
            if self.outdated(index):
                self._write(Mark(self.reader.epoch, self._needed_from(index), self._holding))

    def outdated(self, index: int) -> bool:
        """Return whether :meth:`publish` would write a mark."""
        return Mark(self.reader.epoch, self._needed_from(index), self._holding) != self._written

    def _needed_from(self, position: int) -> int:
        """Return the first index that a reader at this position still needs."""
        if not self.queue.core.is_committed:
            return position
        with self.queue.store.core.view() as txn:
            return self.queue.core.log.needed_from(txn, position)

    def _write(self, mark: Mark) -> None:
        def put(txn: StoreTransaction) -> None:
            marks.put(txn, self.queue.core.log.id, self.reader, mark)
            faults.point("mark.inside")

        self.queue.store.core.commit(put)
        self._written = mark


def lower_mark(store: BaseStore, log_id: str, reader: ForeignReader, index: int) -> None:
    """Lower the mark of a reader that seeks back to ``index`` under a new epoch, so that its messages are kept.

    A mark that is lower already does not move: it follows the position that is durable at home.
    """
    key = names.low_water_key(log_id, reader.home, reader.name)

    def put(txn: StoreTransaction) -> None:
        raw = txn.get(key)
        before = Mark(0, index, False) if raw is None else Mark.unpack(key, raw)
        sealed.put(txn, key, Mark(reader.epoch, min(index, before.next), before.under_way).pack())

    store.core.commit(put)


def drop_mark(store: BaseStore, log_id: str, reader: ForeignReader) -> None:
    """Delete the mark of a reader that has stopped for ever."""
    store.core.commit(lambda txn: txn.delete(names.low_water_key(log_id, reader.home, reader.name)))
