"""A checkpoint in a Cues store, together with the state and the messages of the user.

    \\0checkpoint\\0<name>        the fence, 8 bytes, big-endian
    state of checkpoint:<name>   the checkpoint, and the user's state

The writer lock of a store excludes others for one transaction only. So there is a fence here, as in every other
checkpoint, and each commit compares it in its own transaction.

    1. work      collect the user's writes; no user code runs inside the transaction
    2. commit    one transaction: the fence is that of this object, otherwise Fenced; messages, state, checkpoint
    3. sync      if other stores will acknowledge the checkpoint, and commits are not durable by themselves:
                 a power cut must not undo a checkpoint that they know
    4. ring      wake the readers of the queues that were written

Not guaranteed: more than the store guarantees. A ``durability="process"`` store may lose commits in a power cut.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from cues import faults
from cues.base import names
from cues.base.names import ProcessorKey
from cues.checkpoints import packing
from cues.checkpoints.fence import OpenCommit, OwnsFence, RestoredFence, own_fence, restored_since
from cues.checkpoints.leasefile import LeaseFile
from cues.errors import CuesError, QueueNotFound
from cues.overrides import override
from cues.producers.sequencer import Checkpoint
from cues.queues.backpressure import await_room
from cues.queues.queue import Queue
from cues.queues.stamped import check_one_log
from cues.queues.store import Store
from cues.records import batch, sealed
from cues.steps.state import StateTable, piece_intact
from cues.steps.state_view import State
from cues.storage import wakeup
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction, refuse_lost

_FENCE: Final = struct.Struct(">Q")
_CHECKPOINT: Final = "checkpoint"
_STATE: Final = "state"


class Writes:
    """The argument of a commit's ``work``: its writes are made with the commit, or not at all.

    ``state`` is a mutable mapping, kept from commit to commit, as ``process.state`` is in a graph.
    """

    def __init__(self, store: Store, table: StateTable) -> None:
        self._store = store
        self._table = table
        self.state: State = table.view(_STATE)
        self.appends: list[tuple[Queue, list[batch.Page]]] = []

    def append(self, queue: Queue, messages: Iterable[dict[str, Any]]) -> None:
        """Append messages to a queue of the same store. Raises the errors of :meth:`cues.Appender.write_many`."""
        check_one_log(queue)
        if queue.store.id != self._store.id:
            raise CuesError(
                f"The queue {queue.id!r} is in {queue.store.path}, the checkpoint in {self._store.path}.",
                "use publish_uncommitted() of the consumer's publisher.",
            )
        options = queue.options
        appended = list(messages)
        if appended:
            self.appends.append((queue, batch.build(appended, options.max_message_bytes, strips=options.strips)))


Work = Callable[[Writes], Any]


class LMDBCheckpoint(OwnsFence):
    """A checkpoint under ``name`` in an open store. The caller closes the store."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = names.check("checkpoint", name)
        self._key = names.checkpoint_key(name)
        self._table = _table(store, name)
        self._database = names.state_database(_table_key(name))
        self._guard = threading.Lock()
        """Held while the table is used: a consumer commits in a thread of its own."""
        self._lease = LeaseFile(Path(store.directory, f"lease-checkpoint-{name}"))

    @property
    def place(self) -> str:
        """The place of the checkpoint: equal for all objects under this name in this store."""
        return f"{self.store.id.hex()}#{self.name}"

    def sync_before(self, other: BaseStore) -> None:
        """Make the last commit durable, before its position is written to ``other``."""
        if self.store.durability != "disk" and not self.store.core.same_as(other.core):
            self.store.sync()

    def restore(self, fence: int | None = None, lease: str = "") -> Checkpoint | None:
        """Raise the fence and return the last checkpoint; None when there is none yet.

        With ``fence``, raises :class:`cues.Fenced` and changes nothing if the fence is not that of an earlier
        :meth:`lease` any more. ``lease`` is written with it.
        """
        with self._guard:
            self._table.forget()
            self._refuse_lost_table()
            self._table.ensure()
            self._held = RestoredFence.now(self.store.core.commit(self._raise_fence, fence, lease))
            faults.point("checkpoint.restored")
            last = _last(self._table)
            if last is None:
                self._refuse_lost_row()
            return last

    def _refuse_lost_table(self) -> None:
        """Raise :class:`StoreDamaged` if there is a fence without the rows that were made before it."""
        self.store.core.search()
        with self.store.core.view() as txn:
            fence = self._fence_in(txn)
        try:
            self.store.core.database(self._database)
        except QueueNotFound:
            if fence:
                raise sealed.placed(
                    sealed.damaged(f"state of the checkpoint {self.name!r}", "it is missing"), self.store.path
                ) from None

    def _refuse_lost_row(self) -> None:
        """Raise :class:`StoreDamaged` if a row of the checkpoint is not under its key: it may be the last one."""
        rows = self.store.core.database(self._database)
        with self.store.core.view() as txn:
            for key, piece in txn.cursor(rows):
                if not piece_intact(key, piece):
                    raise sealed.damaged(f"row {key!r} of the checkpoint {self.name!r}", "its checksum fails")

    def read(self) -> Checkpoint | None:
        """Return the last checkpoint, and leave the fence as it is."""
        # A table of its own: that of this object keeps rows in memory, and another object may have written since.
        return _last(_table(self.store, self.name))

    def lease(self) -> tuple[int, str]:
        """Return the fence, and the lease of the consumer that runs (:mod:`cues.txn.turns`); empty if none does."""
        with self.store.core.view() as txn:
            return self._fence_in(txn), self._lease.read()

    def set_lease(self, text: str) -> None:
        """Write the lease. Raises :class:`cues.Fenced` after another object restored."""
        self._check_fence()
        self._lease.write(text)

    def _own_fence(self) -> int:
        return own_fence(self._held, repr(self.name), "open a store and a checkpoint in the child.")

    def _check_fence(self) -> None:
        fence, _ = self.lease()
        if fence != (own := self._own_fence()):
            raise restored_since(self.name, f"{self.name!r} in {self.store.path}", own, fence)

    def commit(self, checkpoint: Checkpoint, work: Work | None = None) -> None:
        """Write ``checkpoint`` and the writes of ``work(writes)`` (see :class:`Writes`), in one transaction.

        Raises :class:`cues.Fenced` after another object restored, and the exceptions of ``work``. Then nothing was
        written.
        """
        self._commit(Writes(self.store, self._table), checkpoint, work)

    def begin(self) -> OpenCommit[Writes]:
        """Begin the next commit, for a consumer that reads the state before it decides.

        Its ``argument`` is a :class:`Writes`; no transaction of the store is open before ``commit(checkpoint, work)``.
        Raises :class:`cues.Fenced` after another object restored.
        """
        self._check_fence()
        writes = Writes(self.store, self._table)
        return OpenCommit(writes, functools.partial(self._commit, writes), self._table.forget)

    def _commit(self, writes: Writes, checkpoint: Checkpoint, work: Work | None) -> None:
        fence = self._own_fence()
        with self._guard:
            try:
                # 1. Work.
                if work is not None:
                    work(writes)
                self._table.view(_CHECKPOINT)["text"] = packing.pack(checkpoint)
                self._table.call.settle()
                await_room([queue for queue, _ in writes.appends])
                # 2. Commit.
                pages = self._table.pages() + sum(1 + len(p.pieces) for _, some in writes.appends for p in some)
                self.store.core.commit(self._write, fence, writes, pages=pages)
            except BaseException:
                self._table.forget()
                raise
            self._table.committed()
        # 3. Sync.
        if checkpoint.ack_intents:
            self.store.sync()
        faults.point("checkpoint.after")
        # 4. Ring.
        self.store.core.ring(wakeup.union(queue.core.log.mask for queue, _ in writes.appends))

    def _raise_fence(self, txn: StoreTransaction, expected: int | None, lease: str) -> int:
        stored = self._fence_in(txn)
        if expected is not None and stored != expected:
            raise restored_since(self.name, f"{self.name!r} in {self.store.path}", expected, stored)
        if lease:  # before the commit: an instance that waits must not see the new fence without it
            self._lease.write(lease)
        sealed.put(txn, self._key, _FENCE.pack(stored + 1))
        return stored + 1

    def _fence_in(self, txn: StoreTransaction) -> int:
        raw = txn.get(self._key)
        if raw is None:
            refuse_lost(txn)
            return 0
        return unpack_fence(self._key, raw, self.name)

    def _write(self, txn: StoreTransaction, fence: int, writes: Writes) -> None:
        stored = self._fence_in(txn)
        if stored != fence:
            raise restored_since(self.name, f"{self.name!r} in {self.store.path}", fence, stored)
        for queue, pages in writes.appends:
            queue.core.append_pages(txn, pages)
        self._table.write(txn)
        faults.point("checkpoint.inside")

    @property
    def state(self) -> dict[Any, Any]:
        """A copy of the user's state after the last commit."""
        return dict(_table(self.store, self.name).view(_STATE))

    def close(self) -> None:
        """Do nothing: the caller closes the store."""

    @override
    def __repr__(self) -> str:
        return f"<cues.LMDBCheckpoint {self.name} in {self.store.path}>"


def unpack_fence(key: bytes, raw: bytes, name: str) -> int:
    """Decode the fence of a checkpoint; one of an earlier version has no seal. Raises :class:`StoreDamaged`."""
    if len(raw) == _FENCE.size:
        return int(_FENCE.unpack(raw)[0])
    return int(sealed.unseal_fields(key, raw, f"fence of the checkpoint {name!r}", _FENCE)[0])


def _last(table: StateTable) -> Checkpoint | None:
    text = table.view(_CHECKPOINT).get("text")
    table.call.discard()
    return None if text is None else packing.unpack(text)


def _table(store: Store, name: str) -> StateTable:
    return StateTable(store, _table_key(name))


def _table_key(name: str) -> ProcessorKey:
    """The key of the rows of a checkpoint. No processor has it: the ids of processors have a dot."""
    return ProcessorKey(f"checkpoint:{name}")
