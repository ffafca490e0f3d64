"""Steps 2, 4 and 5 of the protocol: the two commits of a step, and the wake-up after them.

    2. snapshot   if the function has side effects: write the ranges that were taken
    4. commit     one write transaction: the fence, outputs, state, attempt, positions
    5. ring       wake the readers of the queues that were written

Each commit compares the row of the processor first (the fence) and writes nothing if another process changed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cues import faults
from cues.base import clock, names
from cues.native import mypyc_attr
from cues.queues.processor_rows import NO_SEAL, POSITION, moved, position_at
from cues.records.batch import Page
from cues.steps import tries
from cues.steps.failure import Failure, stopped_at
from cues.steps.parts import Part, PartBuilder
from cues.steps.pauses import of_failure
from cues.steps.results import Results
from cues.steps.results import pauses as pauses_at
from cues.steps.taking import Slice, Taken

if TYPE_CHECKING:
    from cues.storage.transaction import StoreTransaction


@mypyc_attr(allow_interpreted_subclasses=True)
class Committer(PartBuilder):
    """Write a step to the store."""

    # 2. Snapshot.

    def _commit_snapshot(self, taken: Taken) -> None:
        digest = self._digest(taken, 0, taken.count)
        pages = self._tries.snapshot(self._taking(taken, 0, taken.count), digest)
        row = self._moved(taken.slices) if self.node.at_most_once else self._standing(taken)
        for piece in taken.slices:
            if piece.tailer in self.marks and not self.node.at_most_once:
                self._patiently(self.marks[piece.tailer].hold, piece.start)
        self._patiently(self.store.core.commit, self._write_snapshot, pages, row)
        self._owned(row)
        if faults.active:
            faults.point("snapshot.after")

    def _write_snapshot(self, txn: StoreTransaction, pages: list[Page], row: bytes) -> None:
        self._fence(txn)
        self._write_tries(txn, pages)
        txn.put(self._row_key, row)
        if faults.active:
            faults.point("snapshot.inside")

    # 4. Commit.

    def _commit(self, taken: Taken, results: Results) -> None:
        taken, parts, stop = self._parts(taken, results)
        if stop is not None or self._error_rate is not None or self._beside:  # else there is nothing to note
            self._note_failures(taken, parts, stop)
        if parts:
            # Under at-most-once the inputs have moved already; the function's own tailers move now.
            row = self._moved([] if self.node.at_most_once and taken.times is None else taken.slices)
            self._commit_parts(parts, row)
            self.counters.taken += taken.count * len(taken.slices)
            meter = self.meter
            meter.messages += taken.count
            meter.left -= 1
            if not meter.left:
                meter.measure(taken)
            for piece in taken.slices:
                if piece.input.index != piece.stop:  # the step was closed: the next one takes the rest
                    piece.input.go(piece.stop)
        elif self._beside:
            self._patiently(self.store.core.commit, self._write_pause)
        if self._beside:
            if faults.active:
                faults.point("pause.after")
            self.whole._pause_row = self._beside.get(self._pause_key)
            self.whole._window = self._counted
            self._beside = {}
        if not parts:
            self._step_dropped()
        if stop is not None and not pauses_at(self.node, stop):
            self._stop = stop
            raise stopped_at(self.node, stop)

    def _step_dropped(self) -> None:
        raise NotImplementedError

    def _note_failures(self, taken: Taken, parts: list[Part], stop: Failure | None) -> None:
        """Make the rows that this commit writes because of failures: a pause, and the count of error messages."""
        self._beside, self._counted = {}, self.whole._window
        unit, slices = self.whole.node.id, taken.slices
        if stop is not None:
            if pauses_at(self.node, stop):
                # The messages before the failed one are the parts. Without parts, it is the first one.
                next = [(self._name_of(s), s.stop if parts else s.start) for s in slices]
                count = taken.count if self.node.options.batch else 1
                self._beside[self._pause_key] = of_failure(unit, stop, filter(all, next), count).pack()
            return
        failures = [part.failure for part in parts if part.failure is not None]
        window = self.whole._window
        if window is None or self._error_rate is None or not failures:
            return
        window = window.at(clock.now_ns()).plus(len(failures))
        self._counted = window
        self._beside[names.failures_key(self.whole.node.key)] = window.pack()
        if window.left <= 0:
            limit = str(self.node.options.max_errors)
            next = [(self._name_of(s), s.stop) for s in slices]
            self._beside[self._pause_key] = of_failure(unit, failures[-1], filter(all, next), limit=limit).pack()

    def _name_of(self, piece: Slice) -> str:
        """Return the queue of a slice as users know it; "" for the queue of due timers."""
        return piece.input.queue.id if self.whole is self else ""

    def _write_pause(self, txn: StoreTransaction) -> None:
        self._fence(txn)
        self._write_beside(txn)

    def _write_beside(self, txn: StoreTransaction) -> None:
        for key, raw in self._beside.items():
            txn.put(key, raw)
        if faults.active and self._beside:
            faults.point("pause.inside")

    def _commit_parts(self, parts: list[Part], row: bytes) -> None:
        if faults.active:
            faults.point("commit.before")
        pages = 2 * len(parts)
        for part in parts:
            pages += part.values()
        if self.state.ttl_ns is not None:
            self.state.expire()
        held = self.held if self.held is not None and self.held.table.changed else None
        if self.state.changed:
            self._patiently(self.state.ensure)
            pages += 2 * self.state.pages()
        if held is not None:
            self._patiently(held.table.ensure)
            pages += 2 * held.table.pages()
        self._patiently(self.store.core.commit, self._write_step, parts, row, pages=pages)
        self._owned(row)
        self.state.committed()
        if held is not None:
            held.committed()
        if faults.active:
            faults.point("commit.after")
        # 5. Ring.
        self.store.core.ring(self._written)
        if faults.active:
            faults.point("ring.after")
        counters = self.counters
        counters.steps += len(parts)
        failed = 0
        for part in parts:
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

    def _write_step(self, txn: StoreTransaction, parts: list[Part], row: bytes) -> None:
        self._fence(txn)
        records: list[Page] = []
        rings = self.rings
        for part in parts:
            indices = part.indices
            indices.clear()  # of a try that did not commit
            for queue, pages in part.appends:
                index = queue.core.append_pages(txn, pages)
                rings |= queue.core.log.mask  # also of partitions that were added since the start
                indices.setdefault(queue.core.log.id, index)  # the index of the first, if two bindings have one queue
            records += self._tries.step(part.taking, part.digest, indices, part.failure is not None, part.pending)
        self._written = rings
        if faults.active:
            faults.point("commit.outputs")
        if self.state.changed:
            self.state.write(txn)
        if self.held is not None and self.held.table.changed:
            self.held.table.write(txn)
            faults.point("delay.holding")
        self._write_tries(txn, records)
        txn.put(self._row_key, row)
        if self._beside:
            self._write_beside(txn)
        if faults.active:
            faults.point("commit.inside")

    def _write_tries(self, txn: StoreTransaction, pages: list[Page]) -> None:
        log = self.try_log.core.log
        start, _ = log.append(txn, pages)
        if start - self._tries_from > tries.KEEP_MESSAGES + tries.TRIM_MESSAGES:
            row = log.row(txn)
            _, front = log.delete_before(txn, row, row.next - tries.KEEP_MESSAGES)
            log.move_front(txn, row, front)
            self._tries_from = front

    # --- positions ---

    def _moved(self, slices: list[Slice]) -> bytes:
        """Return the row with the positions after the taken messages and after the function's own reads."""
        places = self._place
        positions = [(places[s.input.tailer], POSITION.pack(s.input.identity, s.stop, s.seal())) for s in slices]
        if self.node.imperative:
            for tailer, position in self.imperative.moved().items():
                positions.append((places[tailer], POSITION.pack(*position)))
        return moved(self._expected, False, positions)

    def _standing(self, taken: Taken) -> bytes:
        """Return the row with the positions where the step begins: later than stored, if messages were purged."""
        positions = []
        for piece in taken.slices:
            place = self._place[piece.tailer]
            before = position_at(self._expected, place)
            if before.next != piece.start:
                positions.append((place, POSITION.pack(before.identity, piece.start, NO_SEAL)))
        return moved(self._expected, True, positions)
