"""Messages for several queues of one store, collected for one commit.

    1. add      check, place and pack messages; user code (a function as key or partitioner) runs here
    2. build    put them into record batches, by partition
    3. append   append them inside the transaction of the caller

Sessions, transactions of a store and checkpoints in a store use it. Each of them commits its own rows in the same
transaction. The packing is that of a step's appenders (:mod:`cues.steps.imperative`).

If the options of a queue change between 1 and 3, 3 raises :class:`OptionsChanged` and undoes the transaction. Call
:meth:`CollectedWrites.renew` to pack the messages under the new options, and continue at 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cues import codec
from cues.base import names
from cues.errors import InvalidArgument, QueueNotFound
from cues.queues import backpressure
from cues.queues.base import OptionsChanged
from cues.queues.queue import Queue, open_queue
from cues.records.batch import Page
from cues.records.provenance import Provenance
from cues.steps import outgoing
from cues.steps.imperative import ProcessAppender
from cues.steps.part import divided
from cues.steps.results import Output
from cues.storage import wakeup

if TYPE_CHECKING:
    from cues.storage.base_store import BaseStore
    from cues.storage.transaction import StoreTransaction


@dataclass(slots=True)
class BuiltWrites:
    """Record batches, ready to be appended in one transaction."""

    appends: list[tuple[Queue, list[Page]]]
    versions: list[tuple[Queue, int]]
    """The version of the options of each queue under which they were built."""
    pages: int
    """The number of LMDB pages for which the disk must have room."""

    @property
    def mask(self) -> int:
        """The mask of the logs, to wake their readers after the commit."""
        return wakeup.union(queue.core.log.mask for queue, _ in self.appends)

    def append(self, txn: StoreTransaction) -> dict[str, range]:
        """Append inside a transaction; return the indices on each log, by its id. Raises :class:`OptionsChanged`."""
        indices: dict[str, range] = {}
        for queue, pages in self.appends:
            start = queue.core.append_pages(txn, pages)
            stop = start + sum(page.count for page in pages)
            # A queue and one of its partitions may both have been named: their messages are in a row.
            before = indices.get(queue.core.log.id)
            indices[queue.core.log.id] = range(before.start if before else start, stop)
        if any(queue.core.version != version for queue, version in self.versions):
            raise OptionsChanged
        return indices


class CollectedWrites:
    """The messages of one commit. ``owner`` ("the transaction") and ``hint`` are for errors."""

    def __init__(self, store: BaseStore, owner: str, hint: str) -> None:
        self._store = store
        self._owner = owner
        self._hint = hint
        self._appenders: dict[str, tuple[ProcessAppender, int]] = {}
        """By queue: the appender, and the version of the queue's options under which it packs."""

    def __bool__(self) -> bool:
        return bool(self._appenders)

    def clear(self) -> None:
        """Drop all messages."""
        self._appenders.clear()

    def queue(self, queue: str | Queue) -> Queue:
        """Return the queue of the store.

        Raises :class:`QueueNotFound` for a missing name, and :class:`InvalidArgument` for a queue of another store
        and for a try log.
        """
        queue = own_queue(self._store, queue, self._owner, self._hint)
        queue.core.check_open()
        queue.core.refuse_try_log("writes")
        return queue

    def add(
        self,
        queue: str | Queue,
        messages: Iterable[dict[str, Any]],
        origin: int = 0,
        provenance: Provenance | None = None,
    ) -> None:
        """Add messages for a queue of the store: all of them, or none if one is refused.

        ``origin`` is the number of their provenance at :meth:`build`; ``provenance`` is given if it may be too large
        for a page. Raises the errors of :meth:`queue` and of :meth:`cues.Appender.write`.
        """
        name = queue.id if isinstance(queue, Queue) else queue
        appender, version = self._appenders.get(name) or self._appender(self.queue(queue))
        try:
            appender.write_many(messages)
            if provenance is not None:
                appender.check(provenance)
        except BaseException:
            appender.discard()
            raise
        appender.settle(origin)
        self._appenders[name] = appender, version

    @staticmethod
    def _appender(queue: Queue) -> tuple[ProcessAppender, int]:
        queue.options  # noqa: B018  (loads the options in force)
        return ProcessAppender(queue), queue.core.version

    def await_room(self, own: Iterable[str]) -> None:
        """Wait until the queues have room (``max_lag``, ``max_bytes``); ``own``: the readers that the commit moves."""
        backpressure.await_room([appender.queue for appender, _ in self._appenders.values()], own)

    def build(self, digest: bytes | None = None, provenance: Provenance | None = None) -> BuiltWrites:
        """Build the record batches, with a delivery hash, and with a provenance that has an entry for each origin.

        The partitions are opened here, because a database cannot be opened inside a transaction.
        """
        appends: list[tuple[Queue, list[Page]]] = []
        pages = 0
        for appender, _ in self._appenders.values():
            queue = appender.queue
            strips = queue.core.options.strips
            for log, items, origins in divided(queue, Output(*appender.written()), 0):
                assert origins is not None
                origin = provenance.select(origins) if provenance and not strips else None
                built = outgoing.build(items, strips, digest, origin)
                pages += sum(1 + len(page.pieces) for page in built)
                appends.append((log, built))
        versions = [(appender.queue, version) for appender, version in self._appenders.values()]
        return BuiltWrites(appends, versions, pages + pages // 64)

    def renew(self) -> None:
        """Pack all messages again, under the options in force. Raises the errors of :meth:`add`."""
        for name, (old, _) in self._appenders.items():
            appender, version = self._appender(old.queue)
            items, origins = old.written()
            for item, origin in zip(items, origins):
                appender.write(codec.unpack_known(item))
                appender.settle(origin)
            self._appenders[name] = appender, version


def own_queue(store: BaseStore, queue: str | Queue, owner: str, hint: str) -> Queue:
    """Return a queue of this store, given as a name or a handle; refuse, by name, one of another store."""
    if isinstance(queue, Queue):
        if not queue.store.core.same_as(store.core):
            raise InvalidArgument(
                f"The queue {queue.id!r} is in the store {queue.store.path}, and {owner} is of {store.path}:"
                " one commit is in one store.",
                hint,
            )
        return queue
    if not isinstance(queue, str):
        raise InvalidArgument(f"A queue was expected, found {queue!r:.60}.", "pass a name, or store.queue('orders').")
    with store.core.view() as txn:
        exists = txn.get(names.queue_key(queue.partition("/")[0])) is not None
    if not exists:
        raise QueueNotFound(
            f"The store {store.path} has no queue {queue!r}; it has {', '.join(store.queues()) or 'none'}.",
            f"make it with store.queue({queue!r}) first, outside of {owner}.",
            queue=queue,
        )
    return open_queue(store, queue)
