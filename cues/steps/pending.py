"""Streams that write to other stores by pending messages: ``across="pending"``.

The numbers are those of docs/transactions.md, "A stream that writes to several stores".

    start
    1. settle        append (again) the acknowledgements of the last home commit in the other stores, and drop the
                     pending messages of a step that did not commit
    2. name          commit a producer id of this owner in the home store, before it writes any message

    a step, instead of step 4 of stepper.py
    3. write         write its messages, pending, into the other stores: one transaction each, synced
    4. commit        commit the step in the home store, and in the same transaction the due acknowledgement for
                     each queue of 3
    5. sync          sync the home store, unless its commits are durable by themselves
    6. acknowledge   append the acknowledgements of 4; now readers of committed messages see the step

Why each step is seen once:

    a. Only 4 decides whether the step took place. Nothing is acknowledged before it (6), and all messages that it
       counts are durable before it (3).
    b. A death before 4 leaves pending messages that no acknowledgement covers. 1 drops them, and the repeated step
       writes with later clocks, or with another producer.
    c. After a death between 4 and 6, 1 of the next owner finishes the step. A repeated acknowledgement is harmless.
    d. An acknowledgement names a producer and a clock, so messages of a later step must not be before it in the
       queue: 6 is done before 3 of the next step; if it was not, 1 is done first.
    e. An owner that is stopped, replaced and continued has its own producer (2). So no acknowledgement of its
       successor commits its messages, and its own acknowledgement is never appended, because its 4 is refused. It
       acknowledges only rows that it read under its own epoch, so it never drops the pending messages of a successor.
    f. A power cut removes nothing in another store that the home store counts (3), and nothing in the home store that
       another store has acknowledged (5). If it removes a part of 6, 1 repeats it: the home store keeps the last
       acknowledgement for each queue, and earlier ones were synced with the messages after them.

Not guaranteed: that all stores show a step at one moment; that readers of all messages (plain tailers, graphs) wait;
that the messages of a replaced owner are dropped if it is killed before it notices: they stay pending. If a home
store was put back to an old copy, this is noticed (:class:`Diverged`) only if no other owner has written since.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from cues import codec, faults
from cues.base import clock, events, names
from cues.base.names import ProcessorId, ProcessorKey
from cues.errors import CuesError, Diverged, Fenced, StoreNotFound
from cues.forwarding import other_stores
from cues.overrides import override
from cues.producers import clocks
from cues.queues import rollback, stamped
from cues.queues.base import view_of, views_of
from cues.queues.queue import open_queue
from cues.records import sealed
from cues.records import stamps as stamping
from cues.records.batch import Page
from cues.records.identity import PRODUCER_BYTES, Clock, Flags, ProducerID, assemble
from cues.records.stamps import Stamps
from cues.steps.abroad import Abroad
from cues.steps.ownership import fenced
from cues.storage.base_store import BaseStore
from cues.storage.transaction import refuse_lost

if TYPE_CHECKING:
    from cues.graphs.processor import Node
    from cues.graphs.processor_rows import ProcessorRow
    from cues.queues.queue import Queue
    from cues.queues.store import Store
    from cues.steps.fence import Fence, Patience
    from cues.steps.part import Part
    from cues.storage.transaction import StoreTransaction

_CONTINUE: Final = int(Flags.CONTINUE_TXN)
_ACK: Final = int(Flags.ACK_TXN)
_HASH_BYTES: Final = 16
_MULTICAST: Final = 1
"""The bit of the first byte that producer ids have."""

Target = tuple[bytes, str]
"""A log of another store: the store's id, and the log's."""


# --- the row in the home store ------------------------------------------------------------------


class Due(NamedTuple):
    """The last acknowledgement that is due, or was appended, in one log of another store."""

    producer: int
    last: int
    """The clock of the last message that it acknowledges."""
    ack: int
    """The clock of the acknowledgement itself."""


class PendingRow(NamedTuple):
    """The row of the last commit about a processor's messages in other stores."""

    producer: int
    """The producer id of its owner."""
    due: dict[Target, Due]

    def pack(self) -> bytes:
        due = [[store, log, *ack] for (store, log), ack in self.due.items()]
        return codec.pack([self.producer, due])

    @staticmethod
    def unpack(key: bytes, raw: bytes, processor: str = "(unnamed)") -> PendingRow:
        """Decode the row. Raises :class:`StoreDamaged`, which names the processor."""
        what = f"row of the pending messages of {processor} in other stores"
        producer, due = sealed.unseal_value(key, raw, what, [int, [[bytes, str, int, int, int], ...]])
        return PendingRow(producer, {(store, log): Due(*ack) for store, log, *ack in due})


def read_row(txn: StoreTransaction, processor: ProcessorKey) -> PendingRow | None:
    """Read the row in a transaction of the home store; None if the processor never wrote pending messages."""
    raw = txn.get(key := names.pending_key(processor))
    return None if raw is None else PendingRow.unpack(key, raw, processor)


# --- settling -----------------------------------------------------------------------------------


class Settling:
    """Settles the messages of one processor in other stores, by its last home commit.

    ``queues`` are handles on queues that it may have written to; the stores of other queues are opened at their
    known paths.
    """

    def __init__(self, home: Store, processor: ProcessorKey, queues: Iterable[Queue]) -> None:
        self.home = home
        self.processor = processor
        self._queues = tuple(queues)

    def settle(self, row: PendingRow, give_up: bool = False) -> dict[Target, str]:
        """Append the due acknowledgements, and drop all other pending messages. May be repeated.

        Raises :class:`Diverged` if a log contradicts the row, and :class:`StoreNotFound`; with ``give_up`` it
        returns such logs with the reasons.
        """
        given_up: dict[Target, str] = {}
        with contextlib.ExitStack() as opened:
            for target, due in row.due.items():
                try:
                    log = self._log(target, opened)
                    self._compare(log, due)
                except (Diverged, StoreNotFound) as error:
                    if not give_up:
                        raise
                    given_up[target] = error.message
                else:
                    self.acknowledge([(log, due)])
            for log in self._logs().values():
                self.roll_back(log, row.producer)
        return given_up

    def acknowledge(self, pairs: Sequence[tuple[Queue, Due]]) -> None:
        """Append acknowledgements, those for one store in one transaction. May be repeated."""
        stores = {log.store.id: log.store for log, _ in pairs}
        for id, store in stores.items():
            bound: list[tuple[Queue, list[stamped.Pair]]] = [
                (_one(log), [(assemble(due.producer, due.ack, _ACK), {})]) for log, due in pairs if log.store.id == id
            ]
            stamped.append_all(store, bound)

    def roll_back(self, log: Queue, producer: int) -> None:
        """Drop the pending messages of a producer in a log, if there are any."""
        with log.store.core.view() as txn:
            written = clocks.read(txn, log.core.log.id, producer)
        if written is not None and written.begin:
            log.store.core.commit(rollback.roll_back, log, producer)
            log.store.core.ring(log.core.log.mask)
            if log.store.durability != "disk":
                log.store.sync()  # no later call may sync it

    def _logs(self) -> dict[Target, Queue]:
        """All present logs: a queue may get more partitions."""
        return {(view.store.id, view.core.log.id): view for queue in self._queues for view in views_of(queue)}

    def _log(self, target: Target, opened: contextlib.ExitStack) -> Queue:
        store, id = target
        known = self._logs().get(target)
        if known is None:
            other = opened.enter_context(other_stores.opened(self.home, store, readonly=False))
            queue, partition = names.split_log(id)
            if queue not in other.queues():
                raise self._diverged(f"queue {queue!r} of {other.path} is missing")
            return view_of(open_queue(other, queue), partition)
        return known

    def _compare(self, log: Queue, due: Due) -> None:
        with log.store.core.view() as txn:
            written = clocks.read(txn, log.core.log.id, due.producer)
        where = f"queue {log.id!r} of {log.store.path}"
        if written is None or written.last < due.last:
            raise self._diverged(f"{where} lacks committed messages")
        if written.acked > due.ack:
            raise self._diverged(f"{where} has steps that {self.home.path} does not have")

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            f"{self.processor} writes there by pending messages, and {what}: the stores are not of the same moment.",
            "put back copies of both stores of the same moment; or use --accept-topology to continue.",
            processor=self.processor,
        )


def _one(log: Queue) -> Queue:
    """The handle on one log, also of a queue that had one partition and got more since."""
    return view_of(log, log.core.log.partition)


def finish(
    home: Store,
    processor: ProcessorId,
    key: ProcessorKey,
    owner: ProcessorRow,
    queues: Sequence[Queue],
    give_up: bool = False,
) -> dict[Target, str]:
    """Settle the pending messages of a processor that is now declared without ``across="pending"``; delete the row.

    ``owner`` is the caller's row of the processor, ``key`` its id at its first start. Raises :class:`Fenced` if another
    owner has the row now, and the errors of :meth:`Settling.settle`, whose result it returns.
    """
    place = names.processor_key(processor)
    expected = sealed.seal(place, owner.pack())

    def fence(txn: StoreTransaction) -> None:
        stored = txn.get(place)
        # A seek since the claim moves positions only, on which nothing here depends.
        if stored != expected and (refused := fenced(processor, place, expected, stored)).reason != "seek":
            raise refused

    with home.core.view() as txn:
        fence(txn)
        row = read_row(txn, key)
    if row is None:
        return {}
    if home.durability != "disk":
        home.sync()
    settling = Settling(home, key, queues)
    given_up = settling.settle(row, give_up)

    def forget(txn: StoreTransaction) -> None:
        fence(txn)
        txn.delete(names.pending_key(key))

    # The acknowledgements must be durable before the row that repeats them is deleted.
    for store in {queue.store.id: queue.store for queue in queues}.values():
        if store.durability != "disk":
            store.sync()
    home.core.commit(forget)
    return given_up


# --- the steps ----------------------------------------------------------------------------------


class PendingMessages(Abroad):
    """The way of a stream with ``across="pending"``."""

    def __init__(
        self,
        store: Store,
        node: Node,
        away: Sequence[Queue],
        fence: Fence,
        patience: Patience,
        emit: Callable[[events.Event], None],
        give_up: bool = False,
    ) -> None:
        """``away``: the queues in other stores that it writes to. ``give_up``: continue if the other stores contradict
        the home store (``--accept-topology``)."""
        super().__init__()
        self.store = store
        self.node = node
        self._fence = fence
        self._patience = patience
        self._emit = emit
        self._settling = Settling(store, node.key, away)
        self._clock = Clock()
        self._producer = _producer(fence.row.owner, node.key)
        self._due: dict[Target, Due] = {}
        """The row as committed in the home store."""
        self._next = self._due
        """The row that the step under way commits."""
        self._give_up = give_up
        self._settled = False
        """True if no message of an earlier step is pending in another store, and no acknowledgement is due."""

    # --- start --------------------------------------------------------------------------------

    @override
    def settle(self) -> None:
        """Do 1 and 2. Raises :class:`Diverged`."""
        # 1. Settle. The row is read under this owner's epoch, so it was written by this owner or an earlier one.
        with self.store.core.view() as txn:
            self._fence.check(txn)
            row = read_row(txn, self.node.key)
            if row is None:
                refuse_lost(txn)
        self.sync(self.store)
        give_up, self._give_up = self._give_up, False  # the permission holds for one start
        given_up = {} if row is None else self._patience.call(self._settling.settle, row, give_up)
        for what in given_up.values():
            self._emit(events.Event(self.node.id, f"given up: {what}", logging.WARNING))
        if faults.active:
            faults.point("pending.settled")
        # 2. Name.
        due = {} if row is None else row.due
        self._due = {target: ack for target, ack in due.items() if target not in given_up}
        if row is None or row.producer != self._producer or given_up:
            self._patience.call(self.store.core.commit, self._name)
            self.sync(self.store)
            if faults.active:
                faults.point("pending.named")
        self._settled = True

    def _name(self, txn: StoreTransaction) -> None:
        self._fence.check(txn)
        self._put(txn, self._due)

    def _put(self, txn: StoreTransaction, due: dict[Target, Due]) -> None:
        sealed.put(txn, names.pending_key(self.node.key), PendingRow(self._producer, due).pack())

    # --- a step -------------------------------------------------------------------------------

    @override
    def stamps(self, queue: Queue, count: int) -> Stamps | None:
        """Return identities for messages to another store; their clocks are taken when they are appended."""
        if queue.store.id == self.store.id:
            return None
        return Stamps(self._producer, _CONTINUE, stamping.ticks(0, count))

    @override
    def commit(self, parts: list[Part], write: Callable[[], None]) -> None:
        away = self._take_away(parts)
        if not away:
            write()
            return
        if not self._settled:
            self.settle()
        self._settled = False
        # 3. Write.
        written: list[tuple[Queue, Due]] = []
        for id, store in {log.store.id: log.store for _, log, _ in away}.items():
            written += self.write_away(store, [entry for entry in away if entry[1].store.id == id])
        self._next = self._due | {(log.store.id, log.core.log.id): due for log, due in written}
        try:
            # 4. Commit.
            write()
        except Fenced:
            with contextlib.suppress(CuesError):  # the caller raises Fenced, and no reader sees messages that stay
                for log, _ in written:
                    self._settling.roll_back(log, self._producer)
            raise
        self._due = self._next
        # 5. Sync.
        self.sync(self.store)
        if faults.active:
            faults.point("pending.committed")
        # 6. Acknowledge.
        self._patience.call(self._settling.acknowledge, written)
        self._settled = True

    def _take_away(self, parts: list[Part]) -> list[tuple[Part, Queue, list[Page]]]:
        """Remove from the parts the messages for other stores, and return them."""
        away: list[tuple[Part, Queue, list[Page]]] = []
        for part in parts:
            appends = list(part.appends)
            away += [(part, log, pages) for log, pages in appends if log.store.id != self.store.id]
            part.appends = [(log, pages) for log, pages in appends if log.store.id == self.store.id]
        return away

    def write_away(self, store: BaseStore, away: list[tuple[Part, Queue, list[Page]]]) -> list[tuple[Queue, Due]]:
        """Append pending messages to one other store, durably; return their acknowledgements."""
        store.core.check_file()
        size = sum(1 + len(page.pieces) for _, _, pages in away for page in pages)
        last: dict[str, int] = self._patience.call(store.core.commit, self._write_pending, away, pages=size + len(away))
        self.sync(store)
        rings = 0
        for _, log, _ in away:
            rings |= log.core.log.mask
        store.core.ring(rings)
        if faults.active:
            faults.point("pending.written")
        logs = {log.core.log.id: log for _, log, _ in away}
        return [(logs[id], Due(self._producer, clock, self._clock.tick())) for id, clock in last.items()]

    def _write_pending(self, txn: StoreTransaction, away: list[tuple[Part, Queue, list[Page]]]) -> dict[str, int]:
        """Append messages with clocks from now on; return the last clock by log."""
        last: dict[str, int] = {}
        self._clock.update(clock.now_ns())
        for part, log, pages in away:
            count = sum(page.count for page in pages)
            first = self._clock.advance(count)
            index = log.core.append_pages(txn, [_clocked(page, first) for page in pages])
            part.pending.setdefault(f"{log.store.id.hex()}/{log.core.log.id}", index)
            last[log.core.log.id] = stamping.ticks(first, count)[-1]
        if faults.active:
            faults.point("pending.inside")
        return last

    @override
    def write(self, txn: StoreTransaction, parts: list[Part]) -> None:
        if any(part.pending for part in parts):
            self._put(txn, self._next)

    def sync(self, store: BaseStore) -> None:
        if store.durability != "disk":
            store.sync()


def _producer(owner: bytes, processor: ProcessorKey) -> int:
    """The producer id of one owner's unit. No other owner and no other unit has it."""
    drawn = bytearray(xxhash.xxh3_64_digest(owner + processor.encode())[:PRODUCER_BYTES])
    drawn[0] |= _MULTICAST
    return int.from_bytes(ProducerID(bytes(drawn)), "big")


def _clocked(page: Page, first: int) -> Page:
    """A copy of a page whose clocks begin at 0, with clocks from ``first`` on. Clocks are stored after the hash."""
    tail = page.tail[:_HASH_BYTES] + stamping.restamped(page.tail[_HASH_BYTES:], first)
    return page.with_tail(tail)
