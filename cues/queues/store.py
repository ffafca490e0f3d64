"""The store: a directory that holds the queues of one graph or program.

    with cues.open("data") as store:
        store.queue("orders").appender().write({"x": 1})

The environment below it (:mod:`cues.storage.store_core`) knows transactions and rows; this class adds queues.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Unpack

from cues.base.option_texts import describes
from cues.errors import DurabilityMismatch
from cues.native import mypyc_attr
from cues.overrides import override
from cues.queues.options import QUEUE_TEXTS, QueueKeywords
from cues.queues.queue import Matching, Queue, open_queue
from cues.queues.readers import register_later
from cues.storage.base_store import BaseStore

if TYPE_CHECKING:
    from cues.base.seek_plan import SeekPlan
    from cues.queues.committed import Isolation
    from cues.queues.tailer import Tailer
    from cues.storage.backup_manifest import Backup


class Transaction(ABC):
    """Appends and moves of named tailers, in one commit; :meth:`Store.transaction` makes it, for one ``with`` block.

    The thread that began the block uses it. A second transaction of the same store inside the block is refused.
    """

    hash: str | None
    """Delivery hash of the messages, 32 hex digits, after the commit; None if no tailer was moved."""
    indices: dict[str, range]
    """The indices of the messages after the commit, by queue or partition (``orders/3``)."""

    @abstractmethod
    def tailer(
        self, queue: str | Queue, name: str, *, meta: bool = False, isolation: Isolation = "uncommitted"
    ) -> Tailer:
        """Return the tailer ``name`` of a queue of this store, at its stored position; a new name begins at the start.

        It is a :class:`cues.Tailer`, of several partitions a :class:`cues.queues.tailer.MergedTailer`, and may be
        moved (``to_end()``). ``isolation`` is as for :meth:`Queue.tailer`. The second call for a queue and name returns
        the same tailer. Raises :class:`InvalidArgument` for a queue of another store, for a position that another
        tailer of this transaction has already, and for another isolation than that of the stored position.
        """

    def write(self, queue: str | Queue, message: dict[str, Any]) -> None:
        """Append a message to a queue of this store, with the commit.

        ``queue`` is a name, or a handle if its key or partitioner is a function. Raises :class:`QueueNotFound`,
        :class:`InvalidArgument` (a queue of another store, not a dict), :class:`CodecError`,
        :class:`MessageTooLarge` and :class:`ReservedKey`; then this message is not part of the transaction.
        """
        self.write_many(queue, (message,))

    @abstractmethod
    def write_many(self, queue: str | Queue, messages: Iterable[dict[str, Any]]) -> None:
        """Append messages with the commit: all of them, or none if one is refused; see :meth:`write`."""

    @abstractmethod
    def abort(self) -> None:
        """End the transaction without a commit. The end of the block then does nothing."""

    @abstractmethod
    def __enter__(self) -> Transaction: ...

    @abstractmethod
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Store(BaseStore):
    """A handle on a store.

    ``path`` is a directory, made when it is missing. ``durability`` is fixed when the store is made; None
    takes the store as it is. With ``"disk"``, the default of a new store, an acknowledged commit survives
    power loss. With ``"process"`` it survives ``kill -9``, and a small commit is about 50 times faster; after
    power loss the whole store may be damaged. ``map_size`` is the address space of the store in bytes (default 64 GiB,
    sparse on disk). A map that is full grows by itself, up to ``max_map_size`` (None: as long as the disk has room).
    An append raises :class:`DiskLow` if the disk has less than ``min_free`` bytes free (None: 1 % of the disk, from 64
    MiB to 1 GiB; 0: never). With ``readonly`` nothing is ever written.

    Raises a :class:`StoreError` for a path that is a file or holds something else, a newer format, a
    truncated file, another durability, a missing permission, or a writer that is stuck.
    """

    @describes(QUEUE_TEXTS, QueueKeywords.__annotations__)
    def queue(self, id: str, **options: Unpack[QueueKeywords]) -> Queue:
        """Return the queue of that name; make it if it is missing.

        An option for an existing queue changes that queue (retention, metadata, max_message_bytes). An option that
        cannot change raises :class:`QueueOptionsError`. ``"orders/3"`` is a partition of ``"orders"``
        (:meth:`Queue.partition`). On a read-only store a missing queue raises :class:`QueueNotFound`.
        """
        self.core.check_open()
        return open_queue(self, id, options)

    def matching(self, pattern: str) -> Matching:
        """Return the names of the queues that match a shell pattern such as ``"page*"``.

        A pattern with a slash matches partitions: ``"pageviews/*"`` returns ``pageviews/0``, ``pageviews/1``, … in
        their order. Each is a name for :meth:`queue`. A queue with one log has only partition 0. No wildcard matches
        the slash. A call of the list returns the queues that match at that time, as :mod:`cues.txn.mapping` needs.
        """
        return Matching(self, pattern)

    def transaction(self) -> Transaction:
        """Return a transaction: appends to queues of this store, and moves of named tailers, in one commit.

        Use it in a ``with`` block, which commits at its end; an exception rolls everything back. See
        :class:`cues.Transaction`.
        """
        if self.readonly:
            self.core.refuse_write()
        # It uses the mechanism of steps, a layer above this one, so it is loaded by name.
        transaction: Transaction = importlib.import_module("cues.steps.transaction").BlockTransaction(self)
        return transaction

    def seek(
        self,
        processor: str,
        to: str | int | datetime,
        *,
        tailer: str | None = None,
        again: bool = False,
        reset_state: bool | None = None,
        plan: bool = False,
    ) -> list[SeekPlan]:
        """Move the position of a processor (``"graph.processor"``), and return the effects, by unit.

        ``to`` is ``"start"``, ``"end"``, an index or a time; ``tailer`` names one of its inputs. ``reset_state=True``
        deletes its state in the same commit. If it has state and messages are delivered again, ``reset_state`` must be
        given: with False they count twice. ``again``: transactional sinks accept the messages again. With ``plan``
        nothing is moved. Raises :class:`InvalidArgument`.
        """
        operate = importlib.import_module("cues.operate.processors")
        plans: list[SeekPlan] = operate.plan_seek(self, processor, to, tailer=tailer, again=again)
        if not plan:
            operate.seek(self, plans, again=again, reset_state=reset_state)
        return plans

    def backup(self, dest: str | os.PathLike[str], since: int | str | None = None) -> Backup:
        """Copy the store, and all others that it uses, as they are at one moment, into a directory of backups.

        ``since`` is the number of a backup there, or ``"auto"`` for the last one: only later changes are copied. After
        an error there is no new backup, and earlier ones are as they were. See :func:`cues.tools.backup.backup`.
        """
        made: Backup = importlib.import_module("cues.tools.backup").backup(self, dest, since)
        return made

    @override
    def check(self) -> list[str]:
        """Check the whole store; return the problems, one sentence each (see ``cues check``)."""
        # The check imports all layers above this one, so it is loaded by name.
        problems: list[str] = importlib.import_module("cues.tools.check").check(self)
        return problems


READER_KINDS: Final = ("cues.graphs.processor_rows", "cues.forwarding.marks", "cues.groups.claims")
"""The modules that register kinds of readers (readers.py). They are layers above this one, so they are loaded by name.
Here, because no program can append, and so delete messages, without this class."""

register_later(lambda: [importlib.import_module(module) for module in READER_KINDS])


def open_or_make(path: str | os.PathLike[str], durability: str | None) -> Store:
    """Open the store as it is, or make it with that durability.

    It is not asked first whether the store exists: another process may be making it at this moment, and the file is
    there before the record with the durability.
    """
    try:
        return Store(path, durability=durability)
    except DurabilityMismatch:
        return Store(path)
