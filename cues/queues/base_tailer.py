"""The part that every tailer has in common: iterating, seeking, closing.

BaseTailer
└── Tailer             one partition, with a direction and a position that may have a name
    └── MergedTailer   all partitions of a queue, merged by append time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from cues.base import clock
from cues.base.closing import Closing
from cues.errors import Closed
from cues.native import mypyc_attr
from cues.overrides import override
from cues.queues.base import BaseQueue, check_index
from cues.queues.log import Log
from cues.records.log_row import LogRow
from cues.storage import wakeup
from cues.storage.transaction import StoreTransaction

Place = Callable[[StoreTransaction, Log, LogRow], int]
"""Returns the index to go to on a log."""


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
class BaseTailer(Reader):
    """A reader of a queue that keeps a position."""

    def __init__(self, queue: BaseQueue) -> None:
        self.queue = queue
        self.served = 0
        self._store = queue.store
        self._closed = False

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

    def _seek(self, place: Place) -> None:
        """Move to the index that ``place`` returns."""
        raise NotImplementedError

    @override
    def close(self) -> None:
        """Close the tailer; a read that waits in another thread ends with :class:`Closed`."""
        self._closed = True
        self._store.core.ring_own()

    def check_open(self) -> None:
        """Raise :class:`Closed` if the tailer, its queue or its store is closed."""
        if self._closed or self.queue.core.lifetime.closed or self._store.closed:
            if self._closed:
                raise Closed(f"The tailer of {self.queue.id!r} is closed.", "open another one with queue.tailer(...).")
            self.queue.core.check_open()
