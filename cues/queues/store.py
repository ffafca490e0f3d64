"""The store: a directory that holds the queues of one graph or program.

    with cues.open("data") as store:
        store.queue("orders").appender().write({"x": 1})

The environment below it (:mod:`cues.storage.base_store`) knows transactions and rows; this class adds queues.
"""

from __future__ import annotations

import importlib
from typing import Unpack

from cues.base.option_texts import describes
from cues.queues.options import QUEUE_TEXTS, QueueKeywords
from cues.queues.queue import Matching, Queue, open_queue
from cues.storage.base_store import BaseStore


class Store(BaseStore):
    """A handle on a store.

    ``path`` is a directory, made when it is missing. ``durability`` is ``"disk"`` (an acknowledged
    commit survives power loss; the default for a new store) or ``"process"`` (survives ``kill -9``,
    about 50 times faster per small commit; after power loss the whole store may be damaged), is
    fixed when the store is made, and None takes it as it is. ``map_size`` bounds the store in bytes
    (default 64 GiB of address space, sparse on disk). With ``readonly`` nothing is ever written.

    Raises :class:`StoreError` in its kinds: a path that is a file or holds something else, a newer
    format, a truncated file, another durability, no permission, a writer that is stuck.
    """

    @describes(QUEUE_TEXTS, QueueKeywords.__annotations__)
    def queue(self, id: str, **options: Unpack[QueueKeywords]) -> Queue:
        """The queue of that name, made when it is missing.

        An option that is given for an existing queue is changed where it can be (retention, metadata,
        max_message_bytes) and refused by name where it cannot. ``"orders/3"`` is a partition of ``"orders"``
        (:meth:`Queue.partition`). On a read-only store a missing queue is :class:`QueueNotFound`.
        """
        self._check()
        return open_queue(self, id, options)

    def matching(self, pattern: str) -> Matching:
        """The names of queues that a shell pattern matches: ``"page*"``; with a slash, of their partitions.

        ``"pageviews/*"`` gives ``pageviews/0``, ``pageviews/1``, … in their order, and each is a name for
        :meth:`queue`; the only log of a queue that is not partitioned is ``/0``. No pattern matches the slash.
        The list is callable and then gives the queues that match by then, as :mod:`cues.txn.mapping` takes them.
        """
        return Matching(self, pattern)

    def check(self) -> list[str]:
        """Walk the whole store; returns what does not hold, one sentence each (see ``cues check``)."""
        # The check knows every row of every layer, and a store is below them: it is loaded by name.
        found: list[str] = importlib.import_module("cues.tools.check").check(self)
        return found
