"""Copies the messages in fork queues of one store to the queues of another store.

A step commits its messages for another store in a fork queue of its own store. A forwarder copies them from there.

The numbers are those of docs/guarantees.md, "Outputs in another store".

    1. read      the producer row, in the other store: it names the last step that was forwarded, and
                 the fork queue must still hold the same step
    2. read      the complete steps after that step, from the fork queue
    3. sync      the home store, unless its commits are durable by themselves
    4. commit    in the other store: compare the row (if it changed, start again at 1), append, write the row
    5. ring      wake the readers of the other store
    6. trim      from time to time, after a sync there: the fork queue up to the step that the row names

The position of a forwarder is the row in the other store. One commit changes the row and appends the messages. The
forwarder keeps no position at home and calls no user code. So two forwarders of one fork queue do no harm, nor does
one that was stopped and continues: the second of them finds that the row has changed.

Without 3, a power cut could undo a step whose messages are already in the other store, and the step could then run
with other messages. Without 6, a power cut could undo messages whose step is no longer in the fork queue.

Not guaranteed: an order between messages of several home stores.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cues import faults
from cues.base import names
from cues.base.data import dataclass
from cues.base.names import ProcessorId, ProcessorKey
from cues.errors import Diverged
from cues.forwarding import fork
from cues.forwarding.fork import Step
from cues.forwarding.low_water import LowWater
from cues.forwarding.other_stores import ProducerRow
from cues.graphs.processor_rows import read_row
from cues.overrides import override
from cues.queues.log import Log
from cues.queues.queue import Queue, open_queue
from cues.records import sealed
from cues.storage import wakeup
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction, refuse_lost

BYTES_MAX: Final = 4 << 20
"""The approximate size of one commit in the other store. A step is never divided, so one step may be larger."""
TRIM_MESSAGES: Final = 4096
"""Unneeded messages before a fork queue is trimmed. Each trim costs a sync."""
MARK_S: Final = 1.0
"""The interval between writes of low-water marks. Each write costs a sync and a commit."""


@dataclass(frozen=True)
class Marked:
    """A low-water mark, the processor whose progress it is, and the place of its position in the processor's row."""

    mark: LowWater
    processor: ProcessorId
    place: int


class ForkQueue:
    """The fork queue of one processor for the other store."""

    def __init__(self, home: BaseStore, other: BaseStore, processor: ProcessorKey) -> None:
        self.processor = processor
        self.log = Log(home, names.fork_id(processor, other.id))
        self.key = names.producer_key(home.id, processor)
        self.known: tuple[bytes | None, int] | None = None
        """The producer row that was compared last, and the index of the step after the one that it names."""
        with home.core.view() as txn:
            self.first = self.log.row(txn).first


class Forwarder:
    """Copies messages from one home store to one other store.

    One thread at a time forwards. Other threads may call :meth:`done` and :meth:`waiting`.
    """

    def __init__(
        self,
        home: BaseStore,
        other: BaseStore,
        processors: Iterable[ProcessorKey],
        marks: Sequence[Marked] = (),
        queues: Mapping[str, Queue] | None = None,
    ) -> None:
        """``processors`` are the keys of those that have a fork queue for the other store. ``queues`` are handles on
        queues there, which follow changed options when they are appended to."""
        self.home = home
        self.other = other
        self.forwarded = 0
        """Messages that were forwarded since the start."""
        self.forks = [ForkQueue(home, other, processor) for processor in processors]
        self._marks = marks
        self._marked_at = time.monotonic()
        bounded = any(marked.mark.queue.core.bounded for marked in marks)  # writers there wait for these readers
        self._mark_s = wakeup.SAFETY_S if bounded else MARK_S
        self._queues: dict[str, Queue] = dict(queues or {})
        self.mask = wakeup.union(fork_queue.log.mask for fork_queue in self.forks)
        """The wake-up mask of the fork queues: a thread sleeps on it until there are messages to forward."""

    def compare(self) -> None:
        """Compare each fork queue with its producer row (last row of the start table). Raises :class:`Diverged`."""
        for fork_queue in self.forks:
            self._after(fork_queue, self._row(fork_queue))

    def _row(self, fork_queue: ForkQueue) -> bytes | None:
        with self.other.core.view() as txn:
            return txn.get(fork_queue.key)  # type: ignore[no-any-return]

    def _after(self, fork_queue: ForkQueue, raw: bytes | None) -> int:
        """Return the index after the step that a producer row names. Both stores must have the same step there."""
        while True:
            known = fork_queue.known
            if known is not None and known[0] == raw:
                return known[1]
            after = self._compared(fork_queue, raw)
            if isinstance(after, int):
                fork_queue.known = (raw, after)
                return after
            # Another forwarder may have forwarded and trimmed between the two reads.
            before, raw = raw, self._row(fork_queue)
            if raw == before:
                raise after

    def _compared(self, fork_queue: ForkQueue, raw: bytes | None) -> int | Diverged:
        """Do the work of :meth:`_after` for a row that was not compared before."""
        row = None if raw is None else ProducerRow.unpack(fork_queue.key, raw)
        with self.home.core.view() as txn:
            log_row = fork_queue.log.row(txn)
            raws = fork_queue.log.read(txn, log_row, row.at, 1) if row and log_row.first <= row.at else []
        if row is None:
            with self.other.core.view() as txn:
                refuse_lost(txn)
            if log_row.first == 1:
                return 1
            wrong = f"has no step, but steps before {log_row.first} were trimmed"
        elif row.at >= log_row.next:
            wrong = f"has the step at {row.at}, but the fork queue ends before {log_row.next}"
        elif row.at < log_row.first:
            wrong = f"has steps up to {row.at}, but steps before {log_row.first} were trimmed"
        else:
            (head,) = fork_queue.log.batches(raws)
            if (head.first, head.head.hash, head.seal) == (row.at, row.hash, row.seal):
                return head.first + fork.step_length(fork_queue.log, head)
            wrong = f"has the step {row.hash.hex()} at {row.at}, but another one is here"
        return Diverged(
            f"The store {self.other.path} {wrong} in {self.home.path}: the two stores have different histories of"
            f" {fork_queue.processor}.",
            "use copies of both stores from the same moment; or use --fresh, which writes to the other store again.",
            processor=fork_queue.processor,
        )

    def step(self) -> bool:
        """Forward the messages that wait; False when there were none. Raises :class:`Diverged`, :class:`StoreError`."""
        moved = False
        for fork_queue in self.forks:
            moved |= self.forward(fork_queue)
        if time.monotonic() - self._marked_at >= self._mark_s:
            self.publish()
        return moved

    def forward(self, fork_queue: ForkQueue) -> bool:
        # 1. Read the producer row.
        raw = self._row(fork_queue)
        # 2. Read the steps.
        steps = fork.read(fork_queue.log, self._after(fork_queue, raw), BYTES_MAX)
        if not steps:
            return False
        faults.point("forward.read")
        self.other.core.check_file()
        # 3. Sync.
        self.settle()
        faults.point("forward.synced")
        # 4. Commit.
        queues = {queue: self._queue(queue) for step in steps for queue, _ in step.appends}
        pages = sum(1 + len(page.pieces) for step in steps for _, pages in step.appends for page in pages)
        row = self.other.core.commit(self.append_steps, fork_queue, raw, steps, queues, pages=pages)
        if row is None:
            return True  # another forwarder was faster: read the row again
        faults.point("forward.after")
        fork_queue.known = (row, steps[-1].next)
        self.forwarded += sum(step.next - step.index - 1 for step in steps)
        # 5. Ring.
        self.other.core.ring(wakeup.union(queue.core.log.mask for queue in queues.values()))
        # 6. Trim.
        if steps[-1].index - fork_queue.first > TRIM_MESSAGES:
            self.trim(fork_queue, steps[-1].index)
        return True

    def append_steps(
        self,
        txn: StoreTransaction,
        fork_queue: ForkQueue,
        expected: bytes | None,
        steps: list[Step],
        queues: dict[str, Queue],
    ) -> bytes | None:
        if txn.get(fork_queue.key) != expected:
            return None
        ends = {} if expected is None else dict(ProducerRow.unpack(fork_queue.key, expected).ends)
        for step in steps:
            for queue, pages in step.appends:
                start = queues[queue].core.append_pages(txn, pages)
                ends[queue] = start + sum(page.count for page in pages) - 1
        faults.point("forward.inside")
        last = steps[-1]
        return sealed.put(txn, fork_queue.key, ProducerRow(last.index, last.hash, last.seal, ends).pack())

    def settle(self) -> None:
        """Make the steps that were read durable in the home store."""
        self.home.sync()

    def _queue(self, id: str) -> Queue:
        """Return a queue of the other store; create it again if it was removed."""
        if id not in self._queues:
            self._queues[id] = open_queue(self.other, id)
        return self._queues[id]

    def trim(self, fork_queue: ForkQueue, index: int) -> None:
        self.other.sync()
        faults.point("trim.synced")
        while True:
            more, fork_queue.first = self.home.core.commit(self._drop, fork_queue, index)
            if not more:
                return

    def _drop(self, txn: StoreTransaction, fork_queue: ForkQueue, index: int) -> tuple[bool, int]:
        row = fork_queue.log.row(txn)
        more, front = fork_queue.log.delete_before(txn, row, index)
        fork_queue.log.move_front(txn, row, max(front, row.first))
        faults.point("trim.inside")
        return more, front

    def publish(self, at_rest: bool = False) -> bool:
        """Write the low-water marks that are lower than their positions; False if there were none.

        ``at_rest``: no step is running.
        """
        self._marked_at = time.monotonic()
        late: list[tuple[LowWater, int]] = []
        with self.home.core.view() as txn:
            for marked in self._marks:
                mark = marked.mark
                row = read_row(txn, marked.processor)
                if row is None or row.epoch != mark.reader.epoch:
                    continue  # another owner has the row; or a seek moved it and wrote the mark itself
                if at_rest and not row.under_way:
                    mark.release()
                index = row.positions[marked.place].next
                if mark.outdated(index):
                    late.append((mark, index))
        if late:
            self.settle()
            for mark, index in late:
                mark.publish(index)
        return bool(late)

    def ends(self, txn: StoreTransaction) -> list[int]:
        """Return the ends of the fork queues, in a transaction of the home store; for :meth:`done`."""
        return [fork_queue.log.row(txn).next for fork_queue in self.forks]

    def done(self, ends: Sequence[int]) -> bool:
        """Return whether all messages before ``ends`` are in the other store. Any thread may call it."""
        return all(self._after(fork_queue, self._row(fork_queue)) >= end for fork_queue, end in zip(self.forks, ends))

    def waiting(self) -> int:
        """Return the number of messages that wait to be forwarded. It reads them all."""
        count = 0
        for fork_queue in self.forks:
            at = self._after(fork_queue, self._row(fork_queue))
            while steps := fork.read(fork_queue.log, at, BYTES_MAX):
                count += sum(step.next - step.index - 1 for step in steps)
                at = steps[-1].next
        return count

    def tidy(self) -> None:
        """Write the marks and trim the forwarded messages. Call it before the stores are closed."""
        self.publish(at_rest=True)
        for fork_queue in self.forks:
            raw = self._row(fork_queue)
            if raw is not None and (at := ProducerRow.unpack(fork_queue.key, raw).at) > fork_queue.first:
                self.trim(fork_queue, at)

    @override
    def __repr__(self) -> str:
        return f"<cues.Forwarder {self.home.path} → {self.other.path}>"
