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
from typing import TYPE_CHECKING, Any, NamedTuple

from cues import faults
from cues.base.names import ProcessorKey
from cues.errors import Closed, ConcurrentUse, InvalidArgument, TailerMoved
from cues.overrides import override
from cues.queues.base import OptionsChanged, read_as
from cues.queues.committed import Isolation
from cues.queues.merged import MergedTailer
from cues.queues.queue import Queue
from cues.queues.tailer import Tailer
from cues.queues.transaction import Transaction
from cues.records.provenance import Provenance, concat
from cues.steps.collected import BuiltWrites, CollectedWrites, own_queue
from cues.steps.hashes import Hasher, Range
from cues.steps.taking import Slice, Taken
from cues.storage import timeline

if TYPE_CHECKING:
    from cues.queues.log import Log
    from cues.queues.store import Store
    from cues.storage.transaction import StoreTransaction

_HINT = "use a cues.txn.Publisher and a checkpoint (docs/transactions.md), or a graph, which forwards messages."
_of_thread = threading.local()
"""``open``: weak references to the transactions that were begun in this thread and have not ended."""


class _Lent:
    """A named tailer of a transaction: its position is committed with the transaction, and it ends with it."""

    _deferred = True

    def __init__(self, transaction: BlockTransaction, queue: Queue, name: str, meta: bool) -> None:
        self._transaction = transaction
        super().__init__(queue, name, meta)  # type: ignore[call-arg]
        self._starts = {part._log.partition: part._index for part in parts_of(self)}  # type: ignore[arg-type]
        """The index at which each partition is read first, if it has no position in the store."""

    def moved(self) -> list[tuple[Tailer, int]]:
        """Return the partitions on which it moved, with the index at which it began."""
        moved = []
        for part in parts_of(self):  # type: ignore[arg-type]
            stored = part._stored
            # A partition that was added in the block begins at 1.
            start = self._starts.get(part._log.partition, 1) if stored is None else part._position(stored)
            if part._index != start:
                moved.append((part, start))
        return moved

    def check_open(self) -> None:
        self._transaction.check_open()
        super().check_open()  # type: ignore[misc]


class TransactionTailer(_Lent, Tailer):
    """A :class:`cues.Tailer` of a transaction; :meth:`Transaction.tailer` makes it."""


class MergedTransactionTailer(_Lent, MergedTailer):
    """A :class:`cues.queues.merged.MergedTailer` of a transaction; :meth:`Transaction.tailer` makes it."""


class _Origin(NamedTuple):
    """The queue of a message that a tailer returned, as :class:`cues.steps.taking.Slice` uses it."""

    log: Log
    kept: frozenset[str]


class BlockTransaction(Transaction):
    """The transaction of one ``with`` block."""

    def __init__(self, store: Store) -> None:
        store.core.check_open()
        self._store = store
        self._writes = CollectedWrites(store, "the transaction", _HINT)
        self._tailers: dict[tuple[str, str], TransactionTailer | MergedTransactionTailer] = {}
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
            kind = MergedTransactionTailer if source.partitions > 1 else TransactionTailer
            tailer = kind(self, source, name, meta)
            taken = {part._row_key for other in self._tailers.values() for part in parts_of(other)}
            if taken & {part._row_key for part in parts_of(tailer)}:
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
        moved = [tailer for tailer in self._tailers.values() if tailer.moved()]
        if not moved and not self._writes:
            return
        digest = Hasher(ProcessorKey(""), 0).digest(self._ranges()) if moved else None
        came = concat(self._origins) if any(self._origins) else None
        self._writes.await_room({tailer.name for tailer in self._tailers.values() if tailer.name})
        faults.point("transaction.before")
        while True:
            built = self._writes.build(digest, came)
            pages = built.pages + len(self._tailers)
            try:
                self.indices = self._store.core.commit(self._write, built, moved, pages=pages)
                break
            except OptionsChanged:  # a queue has grown, for example: nothing was written
                self._writes.renew()
        self.hash = digest.hex() if digest else None
        faults.point("transaction.after")
        self._store.core.ring(built.mask)

    def _write(
        self, txn: StoreTransaction, built: BuiltWrites, moved: list[TransactionTailer | MergedTransactionTailer]
    ) -> dict[str, range]:
        for tailer in self._tailers.values():
            for part in parts_of(tailer):
                stored = txn.get(part._row_key)
                if stored != part._stored:
                    raise _moved(part, stored)
        for tailer in moved:
            if isinstance(tailer, MergedTailer):
                tailer._write_positions(txn, [part._index for part in tailer._parts])
            else:
                tailer._write_position(txn, tailer._index)
        indices = built.append(txn)
        faults.point("transaction.inside")
        return indices

    def _ranges(self) -> list[Range]:
        """The ranges over which the tailers moved, for the hash."""
        ranges = []
        for tailer in self._tailers.values():
            for part, start in tailer.moved():
                with self._store.core.view() as txn:
                    line = timeline.read(txn, part._log.id)
                    last = part._log.index_of(txn, max(start, part._index) - 1)
                identity = timeline.identity(line, part._identity, last)
                ranges.append((f"{tailer.name}.{part._log.id}", identity, start, part._index))
        return ranges

    def _origin(self) -> int:
        """Return the number of the provenance of a message that is written now."""
        reads = [part for tailer in self._tailers.values() if (part := tailer._read or tailer)._last is not None]
        last = [part._last for part in reads if part._last is not None]
        if last == self._last:
            return len(self._origins) - 1
        slices = [
            Slice(_Origin(part._log, part._kept), batch.first + offset, [{}], [batch])
            for part, (batch, offset) in zip(reads, last)
        ]
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


def parts_of(tailer: Tailer) -> list[Tailer]:
    """Return the tailer of each partition that a tailer reads."""
    return tailer._parts if isinstance(tailer, MergedTailer) else [tailer]


def _moved(part: Tailer, stored: bytes | None) -> TailerMoved:
    expected = None if part._stored is None else part._position(part._stored)
    found = None if stored is None else part._position(stored)
    places = ["no position" if index is None else str(index) for index in (expected, found)]
    return TailerMoved(
        f"Another reader named {part.name!r} moved its position on {part._log.id!r} from {places[0]} to {places[1]}"
        " while the transaction was open. Nothing was written.",
        "run the transaction again, which reads from the new position; give each independent reader its own name.",
        queue=part._log.id,
        tailer=part.name,
        expected=expected,
        found=found,
    )
