"""A tailer of committed messages: ``queue.tailer(isolation="committed")``.

It returns messages in the order of their commits, so their indices may decrease. It returns neither acknowledgements
nor pending or dropped messages. It works like :class:`cues.Tailer`, except that it only reads forward and keeps no
position in the store. A :class:`cues.txn.Consumer` keeps a position, together with its results.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

from cues.base import names
from cues.errors import Gap
from cues.queues.base import BaseQueue
from cues.queues.base_tailer import BaseTailer, Place
from cues.queues.reader import ReadCommitted
from cues.queues.tailer import Envelope, envelope_of, metadata
from cues.records.batch import Batch, count_of
from cues.records.identity import Flags
from cues.storage import wakeup

_ACK: Final = int(Flags.ACK_TXN)


class CommittedTailer(BaseTailer):
    """Reads the committed messages of a queue, one thread at a time; :meth:`Queue.tailer` makes it.

    After a seek, a transaction that began before the new position is read in part: only its messages after that
    position. So :meth:`to_end` skips messages that are pending now, even if they are committed later.
    """

    def __init__(self, queue: BaseQueue, meta: bool = False) -> None:
        super().__init__(queue)
        self._meta = meta
        self._reader = self._read_from(None)
        self._peeked: list[tuple[int, dict[str, Any]]] = []
        self._last: int | None = None
        self._batch: Batch | None = None

    def _read_from(self, index: int | None) -> ReadCommitted:
        return ReadCommitted(self.queue, begin=index, message_type=None)

    def read(self, block: bool = False, timeout: float | None = None) -> dict[str, Any] | None:
        """Return the next committed message, or None; with ``block``, wait for one, as :meth:`Tailer.read`.

        Raises :class:`Gap` and :class:`BatchDamaged`. An error does not move the tailer.
        """
        message = self._next()
        if message is None and block:
            message = wakeup.wait([self.interest], self._next, timeout)
        return message

    def read_many(self, n: int) -> list[dict[str, Any]]:
        """Return the next ``n`` committed messages; fewer only if there are no more. Never waits."""
        return list(itertools.islice(self, n))

    def peek(self) -> dict[str, Any] | None:
        """Return the message that :meth:`read` would return, and do not move."""
        if not self._peeked:
            item = self._committed()
            if item is None:
                return None
            self._peeked.append(item)
        index, message = self._peeked[0]
        return self._with_meta(index, message) if self._meta else message

    @property
    def index(self) -> int:
        """The index up to which the queue was read; pending messages before it may still be committed."""
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
        return envelope_of(batch, self._last - batch.first, self._metadata(self._last), self.queue._log.partition)

    def _seek(self, place: Place) -> None:
        self._check()
        with self._store._view() as txn:
            index = place(txn, self.queue._log, self.queue._log.row(txn))
        self._reader = self._read_from(index)
        self._peeked.clear()

    def __repr__(self) -> str:
        return f"<cues.txn.CommittedTailer of {self.queue.id} at {self.index}>"

    def _next(self) -> dict[str, Any] | None:
        self._check()
        item = self._peeked.pop() if self._peeked else self._committed()
        if item is None:
            return None
        self._last, message = item
        return self._with_meta(self._last, message) if self._meta else message

    def _committed(self) -> tuple[int, dict[str, Any]] | None:
        self._check()
        for envelope in self._reader:
            if envelope.flags != _ACK:  # not the property: a Ctrl-C inside it would lose the message
                return envelope.begin, envelope.message
        return None

    def _with_meta(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        return {**message, names.META: self._metadata(index)}

    def _metadata(self, index: int) -> dict[str, Any]:
        batch = self._batch_of(index)
        return metadata(batch, index - batch.first, self.queue.id, self.queue.options._kept)

    def _batch_of(self, index: int) -> Batch:
        """Return the record batch of a message that was read; mostly the same batch as at the last call."""
        known = self._batch
        if known is None or not known.first <= index < known.next:
            with self.queue.store._view() as txn:
                raws = self.queue._log.read(txn, self.queue._log.row(txn), index, 1)
            if not raws or index >= raws[0][0] + count_of(raws[0][1]) or index < raws[0][0]:
                raise Gap(
                    f"The message {index} of queue {self.queue.id!r} was purged after it was read.",
                    "read the metadata of a message before it is purged.",
                    queue=self.queue.id,
                    first=index,
                    last=index,
                )
            known = self._batch = self.queue._log.batches(raws)[0]
        return known
