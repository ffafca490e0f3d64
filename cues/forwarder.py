"""Forwarding: what processors wrote for another store, from their fork queues to the queues there.

The numbers are those of docs/guarantees.md, "Outputs in another store".

    1. read      how far it was forwarded: the producer row, in the other store; it must name a step
                 that the fork queue still holds, the same one
    2. read      the steps behind it, whole ones, from the fork queue
    3. sync      the home store, unless its commits are durable by themselves
    4. commit    in the other store: the row is still what it was, or read again; messages; the row
    5. ring      wake who waits there
    6. trim      now and then, after a sync there: the fork queue up to the step that the row names

The position of a forwarder is the row in the other store, changed with the messages that it counts.
It keeps none at home and calls no user code, so two of them, or one that was stopped and goes on,
do no harm: the one that comes second finds another row.

3 is why a power cut cannot undo a step whose messages are there already, and let it be taken anew
with other messages. 6 is why one cannot undo messages whose step is gone.

Not guaranteed: that messages of several home stores come in any order between them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cues import faults, fork, names
from cues.abroad import LowWater, ProducerRow
from cues.errors import Diverged
from cues.log import Log
from cues.ownership import read_row

if TYPE_CHECKING:
    from cues.fork import Step
    from cues.queue import Queue
    from cues.store import Store

BYTES_MAX: Final = 4 << 20
"""About how much one commit in the other store takes; a step is never cut."""
TRIM_MESSAGES: Final = 4096
"""A fork queue is trimmed when so many messages are not needed any more: each time costs a sync."""
MARK_S: Final = 1.0
"""Low-water marks are written this far apart: each time costs a sync and a commit."""


@dataclass(frozen=True)
class Marked:
    """A low-water mark, and where in its processor's row the position is that it follows."""

    mark: LowWater
    place: int


class _Fork:
    """One processor's fork queue for the other store."""

    def __init__(self, home: Store, other: Store, processor: str) -> None:
        self.processor = processor
        self.log = Log(home, names.fork_id(processor, other.id))
        self.key = names.producer_key(home.id, processor)
        self.known: tuple[bytes | None, int] | None = None
        """A producer row that was compared, and the index of the step behind the one that it names."""
        with home.view() as txn:
            self.first = self.log.row(txn).first


class Forwarder:
    """Everything that goes from one home store to one other store.

    One thread at a time forwards; others may ask (:meth:`done`, :meth:`waiting`).
    """

    def __init__(
        self,
        home: Store,
        other: Store,
        processors: Iterable[str],
        marks: Sequence[Marked] = (),
        queues: Mapping[str, Queue] | None = None,
    ) -> None:
        """``processors`` are those that have a fork queue for the other store. ``queues`` are handles on queues
        there, which follow changed options when they are appended to."""
        self.home = home
        self.other = other
        self.forwarded = 0
        """Messages since the start."""
        self._forks = [_Fork(home, other, processor) for processor in processors]
        self._marks = marks
        self._marked_at = time.monotonic()
        self._queues: dict[str, Queue] = dict(queues or {})
        self.mask = 0
        """The fork queues, for whoever sleeps until there is something to forward."""
        for one in self._forks:
            self.mask |= one.log.mask

    # --- start --------------------------------------------------------------------------------

    def compare(self) -> None:
        """The last row of the start table, for each fork queue. Raises :class:`Diverged`; changes nothing."""
        for one in self._forks:
            self._behind(one, self._row(one))

    def _row(self, one: _Fork) -> bytes | None:
        with self.other.view() as txn:
            return txn.get(one.key)  # type: ignore[no-any-return]

    def _behind(self, one: _Fork, raw: bytes | None) -> int:
        """The index behind the step that a producer row names, which must be the same step on both sides."""
        while True:
            known = one.known
            if known is not None and known[0] == raw:
                return known[1]
            behind = self._compared(one, raw)
            if isinstance(behind, int):
                one.known = (raw, behind)
                return behind
            # Between the look there and the look here somebody may have forwarded and trimmed.
            before, raw = raw, self._row(one)
            if raw == before:
                raise behind

    def _compared(self, one: _Fork, raw: bytes | None) -> int | Diverged:
        """What :meth:`_behind` says of a row that is looked at for the first time."""
        row = None if raw is None else ProducerRow.unpack(raw)
        with self.home.view() as txn:
            log_row = one.log.row(txn)
            found = one.log.read(txn, log_row, row.at, 1) if row and log_row.first <= row.at else []
        if row is None:
            if log_row.first > 1:
                return self._diverged(one, f"knows of no step, but those before {log_row.first} were trimmed")
            return 1
        if row.at >= log_row.next:
            return self._diverged(one, f"got the step at {row.at}, but the fork queue ends before {log_row.next}")
        if row.at < log_row.first:
            return self._diverged(one, f"got steps up to {row.at}, but those before {log_row.first} were trimmed")
        (head,) = one.log.batches(found)
        if (head.first, head.head.hash, head.seal) != (row.at, row.hash, row.seal):
            return self._diverged(one, f"got a step {row.hash.hex()} at {row.at}, which is another one here")
        return head.first + fork.step_length(one.log, head)

    def _diverged(self, one: _Fork, what: str) -> Diverged:
        return Diverged(
            f"The store {self.other.path} {what}: {self.home.path} and it hold different histories of {one.processor}.",
            "copies of both stores of the same moment. (--fresh starts over, and writes to the other store once more.)",
            processor=one.processor,
        )

    # --- forwarding ---------------------------------------------------------------------------

    def step(self) -> bool:
        """Forward what is there; False when there was nothing. Raises :class:`Diverged` and :class:`StoreError`."""
        moved = False
        for one in self._forks:
            moved |= self._forward(one)
        if time.monotonic() - self._marked_at >= MARK_S:
            self._publish()
        return moved

    def _forward(self, one: _Fork) -> bool:
        # 1. Read how far.
        raw = self._row(one)
        # 2. Read the steps.
        steps = fork.read(one.log, self._behind(one, raw), BYTES_MAX)
        if not steps:
            return False
        if faults.active:
            faults.point("forward.read")
        self.other.check_file()
        # 3. Sync.
        self._settle()
        if faults.active:
            faults.point("forward.synced")
        # 4. Commit.
        queues = {queue: self._queue(queue) for step in steps for queue, _ in step.appends}
        pages = sum(1 + len(page.pieces) for step in steps for _, pages in step.appends for page in pages)
        row = self.other.commit(self._append, one, raw, steps, queues, pages=pages)
        if row is None:
            return True  # another forwarder was faster: look again
        if faults.active:
            faults.point("forward.after")
        one.known = (row, steps[-1].next)
        self.forwarded += sum(step.next - step.index - 1 for step in steps)
        # 5. Ring.
        mask = 0
        for queue in queues.values():
            mask |= queue.log.mask
        self.other.ring(mask)
        # 6. Trim.
        if steps[-1].index - one.first > TRIM_MESSAGES:
            self._trim(one, steps[-1].index)
        return True

    def _append(
        self, txn: Any, one: _Fork, expected: bytes | None, steps: list[Step], queues: dict[str, Queue]
    ) -> bytes | None:
        if txn.get(one.key) != expected:
            return None
        ends = {} if expected is None else dict(ProducerRow.unpack(expected).ends)
        for step in steps:
            for queue, pages in step.appends:
                start = queues[queue].append_pages(txn, pages)
                ends[queue] = start + sum(page.count for page in pages) - 1
        if faults.active:
            faults.point("forward.inside")
        last = steps[-1]
        row = ProducerRow(last.index, last.hash, last.seal, ends).pack()
        txn.put(one.key, row)
        return row

    def _settle(self) -> None:
        """Make what was read at home durable."""
        if self.home.durability != "disk":
            self.home.sync()

    def _queue(self, id: str) -> Queue:
        """A queue of the other store; made again where somebody removed it since."""
        if id not in self._queues:
            self._queues[id] = self.other.queue(id)
        return self._queues[id]

    def _trim(self, one: _Fork, index: int) -> None:
        if self.other.durability != "disk":
            self.other.sync()
        if faults.active:
            faults.point("trim.synced")
        while True:
            deleted, one.first = self.home.commit(self._drop, one, index)
            if not deleted or one.first >= index:
                return

    def _drop(self, txn: Any, one: _Fork, index: int) -> tuple[int, int]:
        row = one.log.row(txn)
        deleted, front = one.log.delete_before(txn, row, index)
        one.log.move_front(txn, row, max(front, row.first))
        if faults.active:
            faults.point("trim.inside")
        return deleted, front

    # --- marks --------------------------------------------------------------------------------

    def _publish(self, at_rest: bool = False) -> None:
        """Write the low-water marks that are behind their positions; ``at_rest``: no step is under way any more."""
        self._marked_at = time.monotonic()
        behind: list[tuple[LowWater, int]] = []
        with self.home.view() as txn:
            for marked in self._marks:
                mark = marked.mark
                row = read_row(txn, mark.reader.processor)
                if row is None or row.epoch != mark.reader.epoch:
                    continue  # another owner's, or moved by a seek, which has written a mark itself
                if at_rest and not row.pending:
                    mark.release()
                if mark.outdated(row.positions[marked.place].next):
                    behind.append((mark, row.positions[marked.place].next))
        if behind:
            self._settle()
            for mark, index in behind:
                mark.publish(index)

    # --- looking, and the end -----------------------------------------------------------------

    def ends(self, txn: Any) -> list[int]:
        """Where the fork queues end, in a transaction of the home store; for :meth:`done`."""
        return [one.log.row(txn).next for one in self._forks]

    def done(self, ends: Sequence[int]) -> bool:
        """Whether everything before ``ends`` is in the other store. May be asked from another thread."""
        return all(self._behind(one, self._row(one)) >= end for one, end in zip(self._forks, ends))

    def waiting(self) -> int:
        """How many messages wait to be forwarded. Reads them."""
        found = 0
        for one in self._forks:
            at = self._behind(one, self._row(one))
            while steps := fork.read(one.log, at, BYTES_MAX):
                found += sum(step.next - step.index - 1 for step in steps)
                at = steps[-1].next
        return found

    def tidy(self) -> None:
        """Before the stores are closed: write the marks, and trim what has been forwarded."""
        self._publish(at_rest=True)
        for one in self._forks:
            raw = self._row(one)
            if raw is not None and ProducerRow.unpack(raw).at > one.first:
                self._trim(one, ProducerRow.unpack(raw).at)

    def __repr__(self) -> str:
        return f"<cues.Forwarder {self.home.path} → {self.other.path}>"
