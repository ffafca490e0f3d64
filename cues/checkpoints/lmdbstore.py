"""A checkpoint in a Cues store, beside state and messages that it stands for.

    \\0checkpoint\\0<name>        the fence, 8 bytes, big-endian
    state of checkpoint:<name>   the checkpoint, and the user's state

The writer lock of a store is exclusion for one transaction and no ownership, so there is a fence here as in
any other checkpoint: a commit compares it in its own transaction.

    1. work      the user's writes are collected; no user code runs inside the transaction
    2. commit    one transaction: the fence is mine, or Fenced; messages, state, checkpoint
    3. sync      where the checkpoint is about to be acknowledged in other stores, and commits are not durable
                 by themselves: a power cut must not take it back when they have heard of it
    4. ring      wake who waits for the queues that were written

Not guaranteed: more than the store does. What else a ``durability="process"`` store lost in a power cut is lost.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from cues import batch, faults, names
from cues.checkpoints import packing
from cues.errors import CuesError, Fenced, Forked, InvalidArgument
from cues.queue import Queue
from cues.state import State, Table
from cues.txn.stamped import check_one_log

if TYPE_CHECKING:
    from cues.store import Store
    from cues.txn.sequencer import Checkpoint

_FENCE: Final = struct.Struct(">Q")
_CHECKPOINT: Final = "checkpoint"
_STATE: Final = "state"


class Writes:
    """What a commit's ``work`` is given: its writes take place with the commit, or not at all.

    ``state`` is a mutable mapping, kept from commit to commit, as ``process.state`` is in a graph.
    """

    def __init__(self, store: Store, table: Table) -> None:
        self._store = store
        self._table = table
        self.state: State = table.view(_STATE)
        self.appends: list[tuple[Queue, list[batch.Page]]] = []

    def append(self, queue: Queue, messages: Iterable[dict[str, Any]]) -> None:
        """Append messages to a queue of the same store. Errors as of :meth:`cues.Appender.write_many`."""
        if not isinstance(queue, Queue):
            raise InvalidArgument(f"A queue was expected, found {queue!r:.60}.", "store.queue('orders').")
        if queue.store.id != self._store.id:
            raise CuesError(
                f"The queue {queue.id!r} lies in {queue.store.path}, the checkpoint in {self._store.path}.",
                "publish_uncommitted() of the consumer's publisher.",
            )
        check_one_log(queue)
        options = queue.options
        found = list(messages)
        if found:
            self.appends.append((queue, batch.build(found, options.max_message_bytes, strips=options.strips)))


Work = Callable[[Writes], Any]


class LMDBCheckpoint:
    """A checkpoint under ``name`` in an open store, which stays the caller's to close."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = names.check("checkpoint", name)
        self._key = names.checkpoint_key(name)
        self._table = Table(store, f"checkpoint:{name}")  # no processor's: their ids have a dot
        self._guard = threading.Lock()
        """Held by who uses the table: a consumer commits in a thread of its own."""
        self._fence: tuple[int, int] | None = None
        """The fence that this object restored, and the process that did."""

    def restore(self) -> Checkpoint | None:
        """Raise the fence and return the last checkpoint; None when there is none yet."""
        with self._guard:
            self._table.forget()
            self._table.ensure()
            self._fence = self.store.commit(self._raise_fence), os.getpid()
            if faults.active:
                faults.point("checkpoint.restored")
            text = self._table.view(_CHECKPOINT).get("text")
            self._table.call.discard()
        return None if text is None else packing.unpack(text)

    def commit(self, checkpoint: Checkpoint, work: Work | None = None) -> None:
        """Write ``checkpoint`` and what ``work(writes)`` writes (see :class:`Writes`), in one transaction.

        Raises :class:`cues.Fenced` when somebody restored since, and what ``work`` raises; then nothing was
        written.
        """
        fence = self._mine()
        with self._guard:
            try:
                # 1. Work.
                writes = Writes(self.store, self._table)
                if work is not None:
                    work(writes)
                self._table.view(_CHECKPOINT)["text"] = packing.pack(checkpoint)
                self._table.call.settle()
                # 2. Commit.
                pages = self._table.pages() + sum(1 + len(p.pieces) for _, found in writes.appends for p in found)
                self.store.commit(self._write, fence, writes, pages=pages)
            except BaseException:
                self._table.forget()
                raise
            self._table.committed()
        # 3. Sync.
        if checkpoint.ack_intents and self.store.durability != "disk":
            self.store.sync()
        if faults.active:
            faults.point("checkpoint.after")
        # 4. Ring.
        mask = 0
        for queue, _ in writes.appends:
            mask |= queue.log.mask
        self.store.ring(mask)

    def _raise_fence(self, txn: Any) -> int:
        fence = _fence_of(txn.get(self._key)) + 1
        txn.put(self._key, _FENCE.pack(fence))
        return fence

    def _write(self, txn: Any, fence: int, writes: Writes) -> None:
        found = _fence_of(txn.get(self._key))
        if found != fence:
            raise Fenced(
                f"The checkpoint {self.name!r} in {self.store.path} was restored by somebody else since: it has fence"
                f" {found}, this one {fence}; nothing was written.",
                "nothing here: another owner has taken over.",
                processor=self.name,
                reason="takeover",
            )
        for queue, pages in writes.appends:
            queue.append_pages(txn, pages)
        self._table.write(txn)
        if faults.active:
            faults.point("checkpoint.inside")

    def _mine(self) -> int:
        if self._fence is None:
            raise CuesError(f"The checkpoint {self.name!r} is committed before it was restored.", "restore() first.")
        fence, pid = self._fence
        if pid != os.getpid():
            raise Forked(
                f"The checkpoint {self.name!r} was restored in process {pid}; this is a child, {os.getpid()}.",
                "a store and a checkpoint of its own.",
                pid=pid,
            )
        return fence

    @property
    def state(self) -> dict[Any, Any]:
        """A copy of the user's state as the last commit left it."""
        with self._guard:
            found = dict(self._table.view(_STATE))
            self._table.call.discard()
        return found

    def close(self) -> None:
        """The store is its owner's to close."""

    def __repr__(self) -> str:
        return f"<cues.LMDBCheckpoint {self.name} in {self.store.path}>"


def _fence_of(raw: bytes | None) -> int:
    return 0 if raw is None else int(_FENCE.unpack(raw)[0])
