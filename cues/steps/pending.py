"""Streams that write to other stores by pending messages: ``across="pending"``.

The numbers are those of docs/transactions.md, "A stream that writes to several stores".

    start
    1. settle        what the last home commit says was written there: its acknowledgements are appended (again), and
                     what a step that did not commit left pending is dropped
    2. name          a producer id of this owner's own is committed at home, before it writes anything

    a step, in the place of step 4 of stepper.py
    3. write         its messages, pending, into the other stores: one transaction each, synced
    4. commit        at home, what a step always commits; and in the same transaction for each queue of 3 the
                     acknowledgement that is due
    5. sync          the home store, unless its commits are durable by themselves
    6. acknowledge   append what 4 holds; now readers of what is committed see the step

Why each step is seen once:

    a. Whether it took place is decided by 4 alone. Nothing is acknowledged before it (6), and nothing that it counts
       can be missing behind it (3).
    b. Who dies before 4 leaves pending messages that no acknowledgement reaches: 1 drops them, and the step that
       is run again writes under a clock behind that, or under another producer.
    c. Who dies between 4 and 6 is finished by 1 of whoever comes next. To append an acknowledgement again does no harm.
    d. An acknowledgement names a producer and a clock, so it must not find messages of a later step in front of it:
       6 is done before 3 of the next step, and where it was not, 1 is done first.
    e. An owner that is stopped, taken over and continued has a producer of its own (2), so no acknowledgement of its
       successor's commits what it wrote; and its own is never appended, since its 4 is refused. It acknowledges
       nothing but what it read under its own epoch, and so nothing of a successor's, which would drop what
       that one has pending.
    f. A power cut takes nothing back in another store that home counts (3), nor at home what another store has
       acknowledged (5). What it takes back of 6 is done by 1: home keeps for each queue the last acknowledgement, and
       those before it were synced with the messages behind them.

Not guaranteed: that all stores show a step at one moment; that readers of everything (plain tailers, graphs) wait;
that what an owner wrote after it was taken over is dropped, if it is killed before it hears of that: it stays
pending. A home store that was put back to an old copy is found out (:class:`Diverged`) only where no other owner
has written since.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash

from cues import codec, faults
from cues.base import clock, events, names
from cues.errors import CuesError, Diverged, Fenced, StoreNotFound
from cues.forwarding import other_stores
from cues.queues import producers, stamped
from cues.queues.queue import open_queue
from cues.records import sealed
from cues.records import stamps as stamping
from cues.records.batch import Page
from cues.records.identity import PRODUCER_BYTES, Clock, Flags, ProducerID, assemble
from cues.records.stamps import Stamps
from cues.steps.ownership import fenced
from cues.steps.parts import Part
from cues.steps.recovery import Decision
from cues.steps.stepper import Stepper
from cues.storage.base_store import BaseStore

if TYPE_CHECKING:
    from cues.graphs.processor import Node
    from cues.queues.processor_rows import ProcessorRow
    from cues.queues.queue import Queue
    from cues.queues.store import Store
    from cues.storage.transaction import StoreTransaction

_CONTINUE: Final = int(Flags.CONTINUE_TXN)
_ACK: Final = int(Flags.ACK_TXN)
_HASH_BYTES: Final = 16
_MULTICAST: Final = 1
"""The bit of the first byte that producer ids have."""

Target = tuple[bytes, str]
"""A log of another store: the store's id, and the log's."""


# --- the row at home ----------------------------------------------------------------------------


class Due(NamedTuple):
    """The last acknowledgement that is due, or was appended, in one log of another store."""

    producer: int
    last: int
    """Clock of the last message that it acknowledges."""
    ack: int
    """Its own clock."""


class PendingRow(NamedTuple):
    """What a processor's last commit says of its messages in other stores."""

    producer: int
    """Under which its owner writes."""
    due: dict[Target, Due]

    def pack(self) -> bytes:
        due = [[store, log, *one] for (store, log), one in self.due.items()]
        return sealed.seal(codec.pack([self.producer, due]))

    @staticmethod
    def unpack(raw: bytes, processor: str = "(unnamed)") -> PendingRow:
        """Raises :class:`StoreDamaged`, which names the processor."""
        producer, due = codec.unpack(sealed.unseal(raw, f"row of what {processor} has pending in other stores"))
        return PendingRow(producer, {(store, log): Due(*one) for store, log, *one in due})


def read_row(txn: StoreTransaction, processor: str) -> PendingRow | None:
    """What a processor's last commit says, in a transaction of the home store; None where it never wrote so."""
    raw = txn.get(names.pending_key(processor))
    return None if raw is None else PendingRow.unpack(raw, processor)


# --- settling -----------------------------------------------------------------------------------


class Settling:
    """Brings what one processor wrote in other stores to what its last home commit says.

    ``queues`` are handles on those that it may have written to; the stores of others are opened where they were.
    """

    def __init__(self, home: Store, processor: str, queues: Iterable[Queue]) -> None:
        self.home = home
        self.processor = processor
        self._queues = tuple(queues)

    def settle(self, row: PendingRow, give_up: bool = False) -> dict[Target, str]:
        """Append what is due, and drop what is pending besides. May be repeated.

        Raises :class:`Diverged` where a log does not have what the row says, and :class:`StoreNotFound`; with
        ``give_up`` it returns such logs, and why.
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
        """Drop what a producer has pending in a log, if anything."""
        with log.store.view() as txn:
            written = producers.read(txn, log.log.id, producer)
        if written is not None and written.begin:
            stamped.append_all(log.store, [(_one(log), [(assemble(producer, written.acked, _ACK), {})])])
            if log.store.durability != "disk":
                log.store.sync()  # nobody may come back to it

    def _logs(self) -> dict[Target, Queue]:
        """All logs that there are now: a queue may get more partitions."""
        return {(view.store.id, view.log.id): view for queue in self._queues for view in queue.views}

    def _log(self, target: Target, opened: contextlib.ExitStack) -> Queue:
        store, id = target
        found = self._logs().get(target)
        if found is None:
            other = opened.enter_context(other_stores.opened(self.home, store, readonly=False))
            queue, partition = names.log_parts(id)
            if queue not in other.queues():
                raise self._diverged(f"queue {queue!r} of {other.path} is gone")
            return open_queue(other, queue).view(partition)
        return found

    def _compare(self, log: Queue, due: Due) -> None:
        with log.store.view() as txn:
            written = producers.read(txn, log.log.id, due.producer)
        where = f"queue {log.id!r} of {log.store.path}"
        if written is None or written.last < due.last:
            raise self._diverged(f"{where} does not have all that was committed")
        if written.acked > due.ack:
            raise self._diverged(f"{where} has steps that {self.home.path} knows nothing of")

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            f"{self.processor} writes there by pending messages, and {what}: the stores are not of the same moment.",
            "copies of both stores of the same moment; or --accept-topology to go on with what is there.",
            processor=self.processor,
        )


def _one(log: Queue) -> Queue:
    """The handle on one log, also of a queue that had one and got more since."""
    return log.view(log.log.partition)


def finish(
    home: Store, processor: str, owner: ProcessorRow, queues: Sequence[Queue], give_up: bool = False
) -> dict[Target, str]:
    """Settle what a processor wrote by pending messages before it was declared otherwise, and forget that it did.

    ``owner`` is the caller's row of the processor: raises :class:`Fenced` where it is not that any more, and
    otherwise as :meth:`Settling.settle`, whose result it returns.
    """
    expected = owner.pack()

    def fence(txn: StoreTransaction) -> None:
        found = txn.get(names.processor_key(processor))
        if found != expected:
            raise fenced(processor, expected, found)

    with home.view() as txn:
        fence(txn)
        row = read_row(txn, processor)
    if row is None:
        return {}
    if home.durability != "disk":
        home.sync()
    settling = Settling(home, processor, queues)
    given_up = settling.settle(row, give_up)

    def forget(txn: StoreTransaction) -> None:
        fence(txn)
        txn.delete(names.pending_key(processor))

    # What was appended must outlive the row that would append it again.
    for store in {queue.store.id: queue.store for queue in queues}.values():
        if store.durability != "disk":
            store.sync()
    home.commit(forget)
    return given_up


# --- the stepper --------------------------------------------------------------------------------


class PendingStepper(Stepper):
    """The stepper of a stream with ``across="pending"``."""

    def __init__(self, store: Store, node: Node, row: ProcessorRow, *, give_up: bool = False, **keywords: Any) -> None:
        """``give_up``: go on where the other stores do not have what home says (``--accept-topology``)."""
        super().__init__(store, node, row, **keywords)
        written = [queue for _, queue, _ in self._targets] + ([self.errors] if self.errors else [])
        away = [queue for queue in written if queue.store.id != store.id]
        self._settling = Settling(store, node.id, away)
        self._clock = Clock()
        self._producer = _producer(row.owner, node.id)
        self._due: dict[Target, Due] = {}
        """As committed at home."""
        self._next = self._due
        """As the step under way commits it."""
        self._give_up = give_up
        self._settled = False
        """Whether nothing of a step before is pending, or due, in another store."""

    # --- start --------------------------------------------------------------------------------

    def recover(self) -> Decision:
        """Settle, then recover as every stepper. Raises :class:`Diverged`."""
        self._settle()
        return super().recover()

    def _settle(self) -> None:
        # 1. Settle. The row is read under this owner's epoch: what it names is of this owner or of one before.
        with self.store.view() as txn:
            self._fence(txn)
            row = read_row(txn, self.node.id)
        self._sync(self.store)
        give_up, self._give_up = self._give_up, False  # a start's permission
        given_up = {} if row is None else self._patiently(self._settling.settle, row, give_up)
        for what in given_up.values():
            self._emit(events.Event(self.node.id, f"given up: {what}", logging.WARNING))
        if faults.active:
            faults.point("pending.settled")
        # 2. Name.
        due = {} if row is None else row.due
        self._due = {target: one for target, one in due.items() if target not in given_up}
        if row is None or row.producer != self._producer or given_up:
            self._patiently(self.store.commit, self._name)
            self._sync(self.store)
            if faults.active:
                faults.point("pending.named")
        self._settled = True

    def _name(self, txn: StoreTransaction) -> None:
        self._fence(txn)
        self._put(txn, self._due)

    def _put(self, txn: StoreTransaction, due: dict[Target, Due]) -> None:
        txn.put(names.pending_key(self.node.id), PendingRow(self._producer, due).pack())

    # --- a step -------------------------------------------------------------------------------

    def _stamps(self, queue: Queue, count: int) -> Stamps | None:
        """Messages for another store have identities; their clocks are taken when they are appended."""
        if queue.store.id == self.store.id:
            return None
        return Stamps(self._producer, _CONTINUE, stamping.ticks(0, count))

    def _commit_parts(self, parts: list[Part], row: ProcessorRow) -> None:
        away = self._take_away(parts)
        if not away:
            super()._commit_parts(parts, row)
            return
        if not self._settled:
            self._settle()
        self._settled = False
        # 3. Write.
        found: list[tuple[Queue, Due]] = []
        for id, store in {log.store.id: log.store for _, log, _ in away}.items():
            found += self._write(store, [one for one in away if one[1].store.id == id])
        self._next = self._due | {(log.store.id, log.log.id): due for log, due in found}
        try:
            # 4. Commit.
            super()._commit_parts(parts, row)
        except Fenced:
            with contextlib.suppress(CuesError):  # who is fenced hears of that, and nobody sees what stays
                for log, _ in found:
                    self._settling.roll_back(log, self._producer)
            raise
        self._due = self._next
        # 5. Sync.
        self._sync(self.store)
        if faults.active:
            faults.point("pending.committed")
        # 6. Acknowledge.
        self._patiently(self._settling.acknowledge, found)
        self._settled = True

    def _take_away(self, parts: list[Part]) -> list[tuple[Part, Queue, list[Page]]]:
        """What the parts append in other stores, which is not theirs to append any more."""
        found: list[tuple[Part, Queue, list[Page]]] = []
        for part in parts:
            appends = list(part.appends)
            found += [(part, log, pages) for log, pages in appends if log.store.id != self.store.id]
            part.appends = [(log, pages) for log, pages in appends if log.store.id == self.store.id]
        return found

    def _write(self, store: BaseStore, away: list[tuple[Part, Queue, list[Page]]]) -> list[tuple[Queue, Due]]:
        """Append pending messages to one other store, durably; what will acknowledge them."""
        store.check_file()
        size = sum(1 + len(page.pieces) for _, _, pages in away for page in pages)
        last: dict[str, int] = self._patiently(store.commit, self._write_pending, away, pages=size + len(away))
        self._sync(store)
        rings = 0
        for _, log, _ in away:
            rings |= log.log.mask
        store.ring(rings)
        if faults.active:
            faults.point("pending.written")
        logs = {log.log.id: log for _, log, _ in away}
        return [(logs[id], Due(self._producer, clock, self._clock.tick())) for id, clock in last.items()]

    def _write_pending(self, txn: StoreTransaction, away: list[tuple[Part, Queue, list[Page]]]) -> dict[str, int]:
        """Append, with clocks from now on; the last clock by log."""
        last: dict[str, int] = {}
        self._clock.update(clock.now_ns())
        for part, log, pages in away:
            count = sum(page.count for page in pages)
            first = self._clock.advance(count)
            index = log.append_pages(txn, [_clocked(page, first) for page in pages])
            part.pending.setdefault(f"{log.store.id.hex()}/{log.log.id}", index)
            last[log.log.id] = stamping.ticks(first, count)[-1]
        if faults.active:
            faults.point("pending.inside")
        return last

    def _write_step(self, txn: StoreTransaction, parts: list[Part], row: bytes) -> None:
        super()._write_step(txn, parts, row)
        if any(part.pending for part in parts):
            self._put(txn, self._next)

    def _sync(self, store: BaseStore) -> None:
        if store.durability != "disk":
            store.sync()


def _producer(owner: bytes, processor: str) -> int:
    """The id under which one owner's unit writes: no other owner's, and no other unit's."""
    drawn = bytearray(xxhash.xxh3_64_digest(owner + processor.encode())[:PRODUCER_BYTES])
    drawn[0] |= _MULTICAST
    return int.from_bytes(ProducerID(bytes(drawn)), "big")


def _clocked(page: Page, first: int) -> Page:
    """A page whose clocks count from 0, with clocks that begin at ``first``; behind the hash."""
    tail = page.tail[:_HASH_BYTES] + stamping.restamped(page.tail[_HASH_BYTES:], first)
    return Page(page.flags, page.count, tail, page.pieces)
