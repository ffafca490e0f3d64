"""A tailer of what is committed: ``queue.tailer(isolation="committed")``.

It gives messages in the order of their commits, so their indices may go back; acknowledgements are no
messages, and what is pending or was dropped is never seen. Everything else is as with a
:class:`cues.Tailer`, except that it only reads forward and keeps no position in the store: a
:class:`cues.txn.Consumer` does, with what it made of the messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from cues import clock, names, wakeup
from cues.batch import count_of
from cues.errors import Closed, Gap
from cues.queue import check_index
from cues.tailer import Envelope, envelope_of, metadata
from cues.txn.reader import OnGap, ReadCommitted

if TYPE_CHECKING:
    from cues.batch import Batch
    from cues.log import Row
    from cues.queue import Queue


class CommittedTailer:
    """Reads the committed messages of a queue, one thread at a time; :meth:`Queue.tailer` makes it."""

    def __init__(self, queue: Queue, meta: bool = False, on_gap: OnGap = "raise") -> None:
        self.queue = queue
        self.served = 0
        self._meta = meta
        self._on_gap: OnGap = on_gap
        self._closed = False
        self._reader = self._read_from(None)
        self._peeked: list[tuple[int, dict[str, Any]]] = []
        self._last: int | None = None
        self._batch: Batch | None = None

    def _read_from(self, index: int | None) -> ReadCommitted:
        return ReadCommitted(self.queue, begin=index, on_gap=self._on_gap, message_type=None)

    def read(self, block: bool = False, timeout: float | None = None) -> dict[str, Any] | None:
        """The next committed message, or None where there is none; with ``block`` it waits, as :meth:`Tailer.read`.

        Raises :class:`Gap` and :class:`BatchDamaged`; as any error, that moves nothing.
        """
        found = self._next()
        if found is None and block:
            found = wakeup.wait([self.interest], self._next, timeout)
        return found

    def read_many(self, n: int) -> list[dict[str, Any]]:
        """The next ``n`` committed messages; fewer only where there are no more. Never waits."""
        return list(itertools.islice(self, n))

    def peek(self) -> dict[str, Any] | None:
        """The message that :meth:`read` would give, without moving."""
        if not self._peeked:
            found = self._committed()
            if found is None:
                return None
            self._peeked.append(found)
        index, message = self._peeked[0]
        return self._with_meta(index, message) if self._meta else message

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The committed messages that are there."""
        while (message := self.read()) is not None:
            yield message

    def follow(self) -> Iterator[dict[str, Any]]:
        """The committed messages, and then those that come, until something is closed (:class:`Closed`)."""
        while True:
            message = self.read(block=True)
            if message is not None:
                yield message

    @property
    def index(self) -> int:
        """The index up to which the queue was read; what is pending before it may still be committed."""
        return self._reader.source.index

    @property
    def last_read_index(self) -> int | None:
        """The index of the message read last; None before the first."""
        return self._last

    @property
    def envelope(self) -> Envelope | None:
        """Index, time, identity and metadata of the message read last; None before the first."""
        if self._last is None:
            return None
        batch = self._batch_of(self._last)
        return envelope_of(batch, self._last - batch.first, self._metadata(self._last), self.queue.log.partition)

    def to_start(self) -> None:
        """Go to the first message that is there."""
        self._seek(lambda txn, row: row.first)

    def to_end(self) -> None:
        """Go behind the last message. What is pending there and committed later is not seen."""
        self._seek(lambda txn, row: row.next)

    def to_index(self, index: int) -> None:
        """Go to ``index``. Of transactions that began before it only what follows is seen."""
        self._seek(lambda txn, row: max(row.first, check_index(index, row.next, f"to_index({index!r})")))

    def to_time(self, when: datetime) -> None:
        """Go to the first message appended at or after ``when`` (aware); as :meth:`to_index`."""
        ns = clock.to_ns(when)
        self._seek(lambda txn, row: self.queue.log.index_at(txn, row, ns))

    def _seek(self, place: Callable[[Any, Row], int]) -> None:
        self._check()
        with self.queue.store.view() as txn:
            index = place(txn, self.queue.log.row(txn))
        self._reader = self._read_from(index)
        self._peeked.clear()

    @property
    def interest(self) -> tuple[wakeup.Doorbells | None, int]:
        """What :func:`cues.alts` needs to wake this tailer."""
        return self._reader.source.interest

    def close(self) -> None:
        """Close the tailer; a read that waits in another thread ends with :class:`Closed`."""
        self._closed = True
        doorbells = self.queue.store.doorbells
        if doorbells is not None and not self.queue.store.closed:
            doorbells.ring_own()

    def __enter__(self) -> CommittedTailer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<cues.txn.CommittedTailer of {self.queue.id} at {self.index}>"

    # --- inside ---

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"The tailer of {self.queue.id!r} is closed.", "queue.tailer(...) again.")
        self.queue.check()

    def _next(self) -> dict[str, Any] | None:
        self._check()
        found = self._peeked.pop() if self._peeked else self._committed()
        if found is None:
            return None
        self._last, message = found
        return self._with_meta(self._last, message) if self._meta else message

    def _committed(self) -> tuple[int, dict[str, Any]] | None:
        self._check()
        for envelope in self._reader:
            if not envelope.acknowledgement:
                return envelope.begin, envelope.message
        return None

    def _with_meta(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        return {**message, names.META: self._metadata(index)}

    def _metadata(self, index: int) -> dict[str, Any]:
        batch = self._batch_of(index)
        return metadata(batch, index - batch.first, self.queue.id, self.queue.options.kept)

    def _batch_of(self, index: int) -> Batch:
        """The record batch of a message that was read; the one of the last time, mostly."""
        known = self._batch
        if known is None or not known.first <= index < known.next:
            with self.queue.store.view() as txn:
                raws = self.queue.log.read(txn, self.queue.log.row(txn), index, 1)
            if not raws or index >= raws[0][0] + count_of(raws[0][1]) or index < raws[0][0]:
                raise Gap(
                    f"The message {index} of queue {self.queue.id!r} was purged after it was read.",
                    "its metadata before that.",
                    queue=self.queue.id,
                    first=index,
                    last=index,
                )
            known = self._batch = self.queue.log.batches(raws)[0]
        return known
