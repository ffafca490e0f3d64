"""Steppers beside that of a unit: for redriven messages, due timers and delayed messages (lanes.py).

Such a stepper takes copies of messages by the protocol of every step (stepper.py), from queues of its own. It has its
own row, epoch, positions and try log, under an id of its own, and its own delivery hashes and position in a target,
because its messages have no place in the order of the unit's queues. It shares the state and the fork queues of the
unit's stepper, and runs in its thread. Its commits compare the row of the unit too, so a process that lost the unit
commits nothing for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cues.base import events, names
from cues.base.names import ProcessorKey
from cues.graphs.processor import Node
from cues.overrides import override
from cues.queues.log import Log
from cues.queues.options import QueueOptions
from cues.queues.processor_rows import NO_SEAL, Position, ProcessorInputs, ProcessorRow, boot
from cues.queues.queue import create_queue
from cues.steps.ownership import fenced
from cues.steps.parts import Part
from cues.steps.runner import Calls, Runner
from cues.steps.stepper import Stepper

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cues.queues.store import Store
    from cues.steps.results import Results
    from cues.steps.taking import Taken
    from cues.storage.transaction import StoreTransaction


class SharedCalls(Calls):
    """The runner of the unit, run with the process argument of another stepper: one event loop, one set of threads."""

    def __init__(self, runner: Runner, stepper: Beside) -> None:
        self._runner = runner
        self._stepper = stepper
        self.pace = runner.pace
        self.errors_left = None

    @override
    def run(self, taken: Taken, bounded: bool = False) -> Results:
        runner = self._runner
        own, runner._process = runner._process, self._stepper.process
        runner.errors_left, runner.judged_as = self.errors_left, self._stepper.node
        try:
            return runner.run(taken, bounded)
        finally:
            runner._process, runner.judged_as = own, self._stepper.main.node

    @override
    def close(self) -> None:
        """Do nothing: the stepper of the unit closes its runner."""


class Beside(Stepper):
    """Another stepper of a unit: its inputs hold copies of messages. Used by the thread of the unit's stepper."""

    def __init__(self, main: Stepper, node: Node, row: ProcessorRow, own_calls: bool = False) -> None:
        """``own_calls``: it calls another function than the unit does."""
        self.main = main
        unit = main.runner
        assert isinstance(unit, Runner)
        calls = Runner if own_calls else lambda *arguments: SharedCalls(unit, self)
        given = main.given
        super().__init__(
            main.store,
            node,
            row,
            queues=given["queues"],
            system=given["system"],
            pause=given["pause"],
            stopping=given["stopping"],
            emit=self._emit_for_main,
            runner=calls,
            shares=main,
        )

    def _emit_for_main(self, event: events.Event) -> None:
        if not isinstance(event, events.Recovered):
            self.main._emit(replace(event, processor=self.main.node.id))

    @override
    def _fence(self, txn: StoreTransaction) -> None:
        """Raise :class:`Fenced` also if another process, or a seek, wrote the row of the unit: it shares its state."""
        super()._fence(txn)
        stored = txn.get(self.main._row_key)
        if stored != self.main._expected:
            raise fenced(self.main.node.id, self.main._expected, stored)

    @override
    def _write_step(self, txn: StoreTransaction, parts: list[Part], row: bytes) -> None:
        super()._write_step(txn, parts, row)
        self._drop_taken(txn, parts)

    def _drop_taken(self, txn: StoreTransaction, parts: list[Part]) -> None:
        """Remove the messages that the step took: they are copies, and of no use after the commit."""
        for input in self.inputs:
            log_row = input.log.row(txn)
            index = next((end for part in reversed(parts) if (end := _end(part, input.tailer))), log_row.first)
            if index > log_row.first:
                _, front = input.log.delete_before(txn, log_row, index)
                input.log.move_front(txn, log_row, front)


def make_queues(store: Store, wanted: Mapping[str, QueueOptions]) -> None:
    """Make the queues that are missing, in one commit."""

    def create(txn: StoreTransaction) -> None:
        for id, options in wanted.items():
            create_queue(txn, store, id, options)

    store.core.commit(create)


def _end(part: Part, tailer: str) -> int:
    taking = part.taking
    return taking.ends[taking.tailers.index(tailer)] if tailer in taking.tailers else 0


def claim_beside(main: Stepper, node: Node, id: ProcessorKey, logs: dict[str, Log]) -> ProcessorRow:
    """Claim a second row of a unit that ``main`` owns, for other steps of it, under ``id``.

    ``logs``: the logs that it reads, by tailer id. Raises :class:`Fenced` if this process lost the unit.
    """

    def claim(txn: StoreTransaction) -> ProcessorRow:
        stored = txn.get(main._row_key)
        if stored != main._expected:
            raise fenced(main.node.id, main._expected, stored)
        raw, raw_inputs = txn.get(names.redriver_key(id)), txn.get(names.redriver_inputs_key(id))
        old = None if raw is None else ProcessorRow.unpack(raw, node.id)
        before = () if raw_inputs is None else ProcessorInputs.unpack(raw_inputs, node.id).tailers
        known = dict(zip(before, old.positions)) if old is not None else {}
        positions = []
        for tailer in sorted(logs):
            log_row = logs[tailer].row(txn)
            first = Position(log_row.identity, log_row.first, NO_SEAL)
            position = known.get(tailer, first)
            positions.append(first if position.next < first.next else position)  # redrives were refused
        row = ProcessorRow(
            main._row.owner,
            (old.epoch if old is not None else 0) + 1,
            old.generation if old is not None else 0,
            main._row.pid,
            boot(),
            old.pending if old is not None else False,
            tuple(positions),
        )
        inputs = ProcessorInputs(node.kind, tuple(sorted(logs)), tuple(sorted(logs)), (b"",) * len(logs))
        txn.put(names.redriver_key(id), row.pack())
        txn.put(names.redriver_inputs_key(id), inputs.pack())
        return row

    return main.store.core.commit(claim)
