"""The sources of a consumer: the queues that it reads, in turn, each from its offset."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from cues.errors import Diverged
from cues.queues.base import journal_of
from cues.queues.queue import Queue
from cues.queues.reader import OnGap, ReadUncommitted
from cues.queues.sequencer import Envelope

_LOOK_S: Final = 0.01
"""Seconds for which an empty source is not read while others have messages."""


class ConsumerSource:
    """A queue that is read, and the position in it."""

    def __init__(self, queue: Queue, begin: int | None, on_gap: OnGap) -> None:
        self.queue = queue
        self.journal = journal_of(queue)
        row = queue._row()
        if begin is not None and begin > row.next:
            raise Diverged(
                f"The checkpoint is at {begin} of queue {queue.id!r}, but the queue ends at {row.next}:"
                " messages that were processed are missing.",
                "put back a newer copy of the store.",
            )
        self.at = row.first if begin is None else begin
        self._reader = ReadUncommitted(queue, begin=self.at, on_gap=on_gap)

    def next(self) -> Envelope | None:
        envelope = next(self._reader, None)
        self.at = self._reader.index
        return envelope


class Sources:
    """All queues that are read, one message from each in turn.

    An empty queue is read again when all queues are empty, or after a moment, but not for every message of another
    queue. One read transaction serves all queues of a store.
    """

    def __init__(self, sources: list[ConsumerSource]) -> None:
        self.by_journal = {source.journal: source for source in sources}
        self.interests = [(source.queue.store._doorbells, source.queue._log.mask) for source in sources]
        self._ready: deque[ConsumerSource] = deque()
        self._empty = sources
        self._looked = 0.0

    def next(self) -> Envelope | None:
        """Return the next message of any queue; None if all are at their ends."""
        if self._empty and time.monotonic() - self._looked > _LOOK_S:
            self._look()
        ready = self._ready
        while ready or self._look():
            envelope = ready[0].next()
            if envelope is not None:
                ready.rotate(-1)
                return envelope
            self._empty.append(ready.popleft())
        return None

    def ready(self) -> bool:
        """Return whether :meth:`next` may return a message."""
        return bool(self._ready) or self._look()

    def _look(self) -> bool:
        """Find the empty queues that have messages now; False if no queue has any."""
        self._looked = time.monotonic()
        waiting: dict[int, list[ConsumerSource]] = {}
        for source in self._empty:
            source.queue._check()
            waiting.setdefault(id(source.queue.store), []).append(source)
        self._empty = []
        for sources in waiting.values():
            with sources[0].queue.store._view() as txn:
                for source in sources:
                    has_messages = source.queue._log.row(txn).next > source.at
                    (self._ready if has_messages else self._empty).append(source)
        return bool(self._ready)
