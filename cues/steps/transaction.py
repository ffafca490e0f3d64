"""Transactions of a store, for programs without a graph.

    with store.transaction() as t:
        for order in t.tailer("orders", "billing"):
            t.write("invoices", invoice(order))
            t.write("audit", {"billed": order["id"]})

At the end of the block one commit appends the messages and moves the tailers. It is a step whose function is the block:

1. Tailers read in short transactions of their own. Their positions do not move in the store.
2. Messages that are written are checked, placed and encoded at once, and kept in memory. No reader sees them.
3. The commit compares the position of each tailer with the one at which the transaction began. If another reader of
   that name has moved it, the commit raises :class:`TailerMoved` and writes nothing. Otherwise it appends the messages
   and moves the tailers.

An exception inside the block drops everything, and the next transaction reads the same messages.

**Hash.** The messages of a transaction that moves tailers have a delivery hash, made as that of a step
(:mod:`cues.steps.hashes`): the processor is ``""``, the generation 0, a tailer id ``<name>.<log>``, and a range has the
positions before and after. So a repetition over the same messages has the same hash. Without moved tailers there is no
hash.

**Provenance.** A message has the provenance of the messages that the tailers had returned last when it was written. If
several have a place on one queue, that of the tailer that was opened first is used.

Not guaranteed: anything about effects outside of the store. The block runs again if the program repeats it. If another
exception than TailerMoved comes out of the commit itself (a Ctrl-C during the wait for the disk), the outcome is
unknown until the program looks at a position or at a queue.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

from cues import faults
from cues.base.names import ProcessorKey
from cues.errors import Closed, ConcurrentUse, InvalidArgument, TailerMoved
from cues.overrides import override
from cues.queues.base import OptionsChanged, read_as
from cues.queues.committed import Isolation
from cues.queues.cursor import Cursor, write_positions
from cues.queues.queue import Queue
from cues.queues.store import Transaction
from cues.queues.tailer import MergedTailer, Tailer
from cues.records.provenance import Provenance, concat
from cues.steps.collected import BuiltWrites, CollectedWrites, own_queue
from cues.steps.hashes import Hasher, Range
from cues.steps.taking import Slice, Taken
from cues.storage import timeline

if TYPE_CHECKING:
    from cues.queues.store import Store
    from cues.storage.transaction import StoreTransaction

_HINT = "use a cues.txn.Publisher and a checkpoint (docs/transactions.md), or a graph, which forwards messages."
_of_thread = threading.local()
"""``open``: weak references to the transactions that were begun in this thread and have not ended."""


class BlockTransaction(Transaction):
    """The transaction of one ``with`` block."""

    def __init__(self, store: Store) -> None:
        store.core.check_open()
        self._store = store
        self._writes = CollectedWrites(store, "the transaction", _HINT)
        self._tailers: dict[tuple[str, str], Tailer] = {}
        self._origins: list[Provenance] = []
        self._last: list[tuple[Any, int]] | None = None
        """The messages that the tailers had returned last when :attr:`_origins` got its last entry."""
        self._heavy: Provenance | None = None
        self._thread = 0
        self._place: tuple[FrameType, int] | None = None
        """The function of the block, and the ``with`` statement in it."""
        self._state = "not begun"
        self.hash: str | None = None
        self.indices: dict[str, range] = {}

    # --- in the block ---

    @override
    def tailer(
        self, queue: str | Queue, name: str, *, meta: bool = False, isolation: Isolation = "uncommitted"
    ) -> Tailer:
        self.check_open()
        if not isinstance(name, str):
            raise InvalidArgument(
                f"tailer(…, {name!r}): a tailer of a transaction has a name, under which its position is stored.",
                "pass a name, or use queue.tailer(), whose position is not stored.",
            )
        source = read_as(own_queue(self._store, queue, "the transaction", _HINT), isolation)
        source.core.check_open()
        key = source.id, name
        tailer = self._tailers.get(key)
        if tailer is None:
            kind = MergedTailer if source.partitions > 1 else Tailer
            tailer = kind(source, name, meta, self.check_open)
            taken = {cursor.row_key for other in self._tailers.values() for cursor in other.cursors}
            if taken & {cursor.row_key for cursor in tailer.cursors}:
                raise InvalidArgument(
                    f"The transaction has a tailer {name!r} of {source.name!r} already, which has the position on"
                    f" {source.id!r}.",
                    "read each partition through one tailer.",
                )
            self._tailers[key] = tailer
        elif tailer.queue.core.is_committed != source.core.is_committed:
            raise InvalidArgument(
                f"The transaction has a tailer {name!r} of {source.id!r} with another isolation than {isolation!r}.",
                "pass the same isolation in both calls.",
            )
        return tailer

    @override
    def write_many(self, queue: str | Queue, messages: Iterable[dict[str, Any]]) -> None:
        self.check_open()
        messages = list(messages)  # first: a generator may read from the tailers
        self._writes.add(queue, messages, self._origin(), self._heavy)

    @override
    def abort(self) -> None:
        self.check_open()
        self._end("aborted")

    # --- the block ---

    @override
    def __enter__(self) -> BlockTransaction:
        if self._state != "not begun":
            raise self._ended()
        self._store.core.check_open()
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") == "contextlib" and frame.f_back is not None:
            frame = frame.f_back  # an ExitStack
        self._refuse_nesting(frame)
        self._thread = threading.get_ident()
        self._place = frame, frame.f_lasti
        self._state = "open"
        _of_thread.open = [*map(weakref.ref, _open_here()), weakref.ref(self)]
        return self

    def _refuse_nesting(self, frame: FrameType) -> None:
        """Raise if this ``with`` statement is inside the block of another transaction of the store.

        A Ctrl-C before the first or after the last line of a block leaves a transaction that never ends. It must not
        forbid the next one. So a transaction counts only while the function of its block runs. And a second run of the
        same ``with`` statement shows that its first block was left.
        """
        running = []
        caller: FrameType | None = frame
        while caller is not None:
            running.append(caller)
            caller = caller.f_back
        for other in _open_here():
            if other._place is None or not other._store.core.same_as(self._store.core):
                continue
            block, instruction = other._place
            if block in running and (block, instruction) != (frame, frame.f_lasti):
                raise InvalidArgument(
                    f"A transaction of the store {self._store.path} is open already here; transactions do not nest.",
                    "use the open one, or leave its block first (or abort() it).",
                )

    @override
    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._state != "open":
            return
        if kind is not None:
            self._end("rolled back")
            return
        ended = "rolled back"
        try:
            self.check_open()
            ended = "not known to be committed"
            self._commit()
            ended = "committed"
        except TailerMoved:
            ended = "rolled back"
            raise
        finally:
            self._end(ended)

    # --- the commit ---

    def _commit(self) -> None:
        moved = [tailer for tailer in self._tailers.values() if _moves(tailer)]
        if not moved and not self._writes:
            return
        digest = Hasher(ProcessorKey(""), 0).digest(self._ranges()) if moved else None
        provenance = concat(self._origins) if any(self._origins) else None
        self._writes.await_room({tailer.name for tailer in self._tailers.values() if tailer.name})
        faults.point("transaction.before")
        while True:
            built = self._writes.build(digest, provenance)
            pages = built.pages + len(self._tailers)
            try:
                self.indices = self._store.core.commit(self._write, built, moved, pages=pages)
                break
            except OptionsChanged:  # a queue has grown, for example: nothing was written
                self._writes.renew()
        self.hash = digest.hex() if digest else None
        faults.point("transaction.after")
        self._store.core.ring(built.mask)

    def _write(self, txn: StoreTransaction, built: BuiltWrites, moved: list[Tailer]) -> dict[str, range]:
        for tailer in self._tailers.values():
            for cursor in tailer.cursors:
                stored = txn.get(cursor.row_key)
                if stored != cursor.stored:
                    raise _moved(cursor, stored)
        for tailer in moved:
            write_positions(txn, tailer.cursors, [cursor.index for cursor in tailer.cursors])
        indices = built.append(txn)
        faults.point("transaction.inside")
        return indices

    def _ranges(self) -> list[Range]:
        """The ranges over which the tailers moved, for the hash."""
        ranges = []
        for tailer in self._tailers.values():
            for cursor in _moves(tailer):
                start, log = cursor.start, cursor.log
                with self._store.core.view() as txn:
                    line = timeline.read(txn, log.id)
                    last = log.index_of(txn, max(start, cursor.index) - 1)
                identity = timeline.identity(line, cursor.identity, last)
                ranges.append((f"{tailer.name}.{log.id}", identity, start, cursor.index))
        return ranges

    def _origin(self) -> int:
        """Return the number of the provenance of a message that is written now."""
        reads = [tailer.last_cursor for tailer in self._tailers.values() if tailer.last_cursor.last is not None]
        last = [cursor.last for cursor in reads if cursor.last is not None]
        if last == self._last:
            return len(self._origins) - 1
        slices = []
        for cursor, (batch, offset) in zip(reads, last):
            at = batch.first + offset
            slices.append(Slice(cursor, at, at + 1, [{}], [batch]))
        taken = Taken(slices, 1)
        self._heavy = taken.heavy_provenance() if slices else None
        self._origins.append(taken.provenance() if slices else Provenance(1, {}))
        self._last = last
        return len(self._origins) - 1

    # --- state ---

    def check_open(self) -> None:
        if self._state != "open":
            raise self._ended()
        if threading.get_ident() != self._thread:
            raise ConcurrentUse(
                f"The transaction of the store {self._store.path} was begun by another thread.",
                "use it in the thread of its with block, or begin a transaction in each thread.",
            )
        self._store.core.check_open()

    def _ended(self) -> Closed:
        if self._state == "not begun":
            return Closed(
                f"The transaction of the store {self._store.path} has not begun.",
                "use it in a block: with store.transaction() as t: …",
            )
        return Closed(
            f"The transaction of the store {self._store.path} is {self._state}.", "call store.transaction() again."
        )

    def _end(self, state: str) -> None:
        self._state = state
        self._writes.clear()
        self._origins.clear()
        self._place = None

    @override
    def __repr__(self) -> str:
        return f"<cues.Transaction of {self._store.path}: {self._state}>"


def _open_here() -> list[BlockTransaction]:
    """Return the transactions that were begun in this thread and have not ended."""
    known: list[weakref.ref[BlockTransaction]] = getattr(_of_thread, "open", [])
    return [other for ref in known if (other := ref()) is not None and other._state == "open"]


def _moves(tailer: Tailer) -> list[Cursor]:
    """Return the partitions on which a tailer moved in the block."""
    return [cursor for cursor in tailer.cursors if cursor.index != cursor.start]


def _moved(cursor: Cursor, stored: bytes | None) -> TailerMoved:
    expected, found = (None if row is None else cursor.position_of(row) for row in (cursor.stored, stored))
    places = ["no position" if index is None else str(index) for index in (expected, found)]
    return TailerMoved(
        f"Another reader named {cursor.name!r} moved its position on {cursor.log.id!r} from {places[0]} to {places[1]}"
        " while the transaction was open. Nothing was written.",
        "run the transaction again, which reads from the new position; give each independent reader its own name.",
        queue=cursor.log.id,
        tailer=cursor.name,
        expected=expected,
        found=found,
    )
