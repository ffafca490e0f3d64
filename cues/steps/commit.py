"""Steps 2, 4 and 5 of the protocol: the two commits of a step, and the wake-up after them.

    2. snapshot   if the function has side effects: write the ranges that were taken
    4. commit     one write transaction: the fence, outputs, state, attempt, positions
    5. ring       wake the readers of the queues that were written

Each commit compares the row of the processor first (fence.py) and writes nothing if another process changed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cues import faults
from cues.base import events
from cues.errors import WriterStuck
from cues.steps import tries
from cues.steps.failure import Failure, failed_event, named, stopped_at
from cues.steps.meter import Meter
from cues.steps.results import pauses

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cues.forwarding.low_water import LowWater
    from cues.queues.queue import Queue
    from cues.records.batch import Page
    from cues.steps.abroad import Abroad
    from cues.steps.copies import Copies
    from cues.steps.delays import Held
    from cues.steps.fence import Fence, Patience
    from cues.steps.part import Part
    from cues.steps.parts import PartBuilder
    from cues.steps.pauses import FailureRows
    from cues.steps.ports import Ports
    from cues.steps.results import Results
    from cues.steps.state import StateTable
    from cues.steps.taking import Taken
    from cues.steps.tracing import StepSpan
    from cues.storage.transaction import StoreTransaction


class Committer:
    """Writes the steps of one processor to its home store."""

    def __init__(
        self,
        ports: Ports,
        fence: Fence,
        builder: PartBuilder,
        failures: FailureRows,
        state: StateTable,
        patience: Patience,
        counters: events.Counters,
        marks: Mapping[str, LowWater],
    ) -> None:
        """``marks``: the low-water marks in other stores, by tailer id."""
        self.store = store = ports.store
        self.node = ports.node
        self.fence = fence
        self.failures = failures
        self.state = state
        self.patience = patience
        self.counters = counters
        self.meter = Meter(counters)
        self.marks = marks
        self.held: Held | None = None
        """The delayed messages of the unit; None without their lane."""
        self.stop: Failure | None = None
        """The failure after which the processor makes no step."""
        self.span: StepSpan | None = None
        """The span of the step under way, if steps are traced."""
        self._ports = ports
        self._builder = builder
        self._abroad: Abroad | None = builder.abroad
        self._copies: Copies | None = builder.copies
        self.try_log: Queue = store.queue(self.node.key)
        self._tries = tries.TryRecords(self.node.id)
        self._tries_from = self.try_log.first_index
        forks = [] if self._abroad is None else self._abroad.forks.values()
        self._rings = self._written = ports.mask(*forks, self.try_log)

    # 2. Snapshot.

    def commit_snapshot(self, taken: Taken) -> None:
        """Commit the ranges that a step took, before its function runs."""
        digest, taking = self._builder.identify(taken, 0, taken.count)
        pages = self._tries.snapshot(taking, digest)
        row = self.fence.moved(taken.slices) if self.node.at_most_once else self.fence.standing(taken)
        for piece in taken.slices:
            if piece.tailer in self.marks and not self.node.at_most_once:
                self.patience.call(self.marks[piece.tailer].hold, piece.start)
        self.patience.call(self.store.core.commit, self.write_snapshot, pages, row)
        self.fence.committed(row)
        if faults.active:
            faults.point("snapshot.after")

    def write_snapshot(self, txn: StoreTransaction, pages: list[Page], row: bytes) -> None:
        self.fence.check_step(txn)
        self.write_tries(txn, pages)
        txn.put(self.fence.key, row)
        if faults.active:
            faults.point("snapshot.inside")

    # 4. Commit.

    def commit_results(self, taken: Taken, results: Results) -> None:
        """Commit the results of a step. Raises :class:`ProcessorStopped` after a failure that stops the processor."""
        taken, parts, stop = self._builder.parts(taken, results)
        failures = self.failures
        if stop is not None or failures.limits or failures.rows:  # else there is nothing to note
            failures.note(taken, parts, stop)
        if parts:
            # Under at-most-once the inputs have moved already; the function's own tailers move now.
            row = self.fence.moved([] if self.node.at_most_once and taken.times is None else taken.slices)
            self.commit_parts(parts, row)
            if self._copies is None or self._copies.counted:
                self.counters.taken += taken.count * len(taken.slices)
            meter = self.meter
            meter.messages += taken.count
            meter.left -= 1
            if not meter.left:
                meter.measure(taken)
            for piece in taken.slices:
                if piece.input.index != piece.stop:  # the step was closed: the next one takes the rest
                    piece.input.go(piece.stop)
        elif failures.rows:
            self.patience.call(self.store.core.commit, self.write_pause)
        if failures.rows:
            failures.committed()
        if not parts:
            self.drop()
        if stop is not None and not pauses(self.node, stop):
            self.stop = stop
            raise stopped_at(self.node, stop)

    def drop(self) -> None:
        """Drop a step that does not commit: return to the positions of the last commit."""
        self.failures.rows = {}
        self.state.forget()
        if self.held is not None:
            self.held.forget()
        self._ports.imperative.forget()
        for reader in self._ports.readers:
            reader.stand(self.fence.position_in(self.fence.row, reader.tailer))

    def write_pause(self, txn: StoreTransaction) -> None:
        self.fence.check(txn)
        self.failures.write(txn)

    def commit_parts(self, parts: list[Part], row: bytes) -> None:
        """Commit the parts of a step with the row that has its positions: here, and on the way to other stores."""
        if self._abroad is None:
            self._commit_at_home(parts, row)
        else:
            self._abroad.commit(parts, lambda: self._commit_at_home(parts, row))

    def _commit_at_home(self, parts: list[Part], row: bytes) -> None:
        """Commit in the home store, in one transaction."""
        if faults.active:
            faults.point("commit.before")
        pages = 0
        for part in parts:
            pages += 2 + part.values
        if self.state.ttl_ns is not None:
            self.state.expire()
        state = self.state if self.state.changed else None
        held = self.held if self.held is not None and self.held.keeps else None
        if state is not None:
            self.patience.call(state.ensure)
            pages += 2 * state.pages()
        if held is not None:
            self.patience.call(held.table.ensure)
            pages += 2 * held.table.pages()
        core = self.store.core
        while True:
            try:
                core.commit(self.write_step, parts, row, state, held, pages=pages)
                break
            except WriterStuck as stuck:
                self.patience.wait(stuck)
        self.fence.committed(row)
        self.state.committed()
        if held is not None:
            held.committed()
        if faults.active:
            faults.point("commit.after")
        # 5. Ring.
        core.ring(self._written)
        if faults.active:
            faults.point("ring.after")
        counters = self.counters
        failed = 0
        for part in parts:
            counters.steps += 1
            if part.failure is not None:
                failed += part.stop - part.start
                continue
            counters.written += part.written
        if self.span is not None:
            written = sum(part.written for part in parts if part.failure is None)
            self.span.committed([part.digest.hex() for part in parts], written, failed)
        if failed:
            counters.failed += failed
            self._tell(failed, next(part.failure for part in parts if part.failure is not None))

    def write_step(
        self, txn: StoreTransaction, parts: list[Part], row: bytes, state: StateTable | None, held: Held | None
    ) -> None:
        """Write the parts of a step; ``state``, ``held``: the tables that it changed."""
        self.fence.check_step(txn)
        records: list[Page] = []
        rings = self._rings
        for part in parts:
            indices: dict[str, int] = {}
            for queue, pages in part.appends:
                index = queue.core.append_pages(txn, pages)
                rings |= queue.core.log.mask  # also of partitions that were added since the start
                if queue.core.log.id not in indices:  # else two bindings have one queue
                    indices[queue.core.log.id] = index
            part.indices = indices
            records += self._tries.step(part.taking, part.digest, indices, part.failure is not None, part.pending)
        self._written = rings
        if faults.active:
            faults.point("commit.outputs")
        if state is not None:
            state.write(txn)
        if held is not None:
            held.table.write(txn)
            faults.point("delay.holding")
        self.write_tries(txn, records)
        txn.put(self.fence.key, row)
        if self.failures.rows:
            self.failures.write(txn)
        if faults.active:
            faults.point("commit.inside")
        if self._abroad is not None:
            self._abroad.write(txn, parts)
        if self._copies is not None:
            self._copies.write(txn, parts, self._ports)

    def write_tries(self, txn: StoreTransaction, pages: list[Page]) -> None:
        log = self.try_log.core.log
        start, _ = log.append(txn, pages)
        if start - self._tries_from > tries.KEEP_MESSAGES + tries.TRIM_MESSAGES:
            row = log.row(txn)
            _, front = log.delete_before(txn, row, row.next - tries.KEEP_MESSAGES)
            log.move_front(txn, row, front)
            self._tries_from = front

    def _tell(self, count: int, first: Failure) -> None:
        """Emit one event for all messages that failed in a commit."""
        errors = self._ports.errors
        assert errors is not None
        cause = named(first.error)
        self.patience.emit(failed_event(self.node.id, errors.id, count, first.attempts, cause))
