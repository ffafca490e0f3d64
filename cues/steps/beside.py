"""Steppers beside that of a unit: for redriven messages, due timers and delayed messages (lanes.py).

Such a stepper takes copies of messages by the protocol of every step (stepper.py), from queues of its own. It has its
own row, epoch, positions and try log, under an id of its own, and its own delivery hashes and position in a target,
because its messages have no place in the order of the unit's queues. It shares the state and the fork queues of the
unit's stepper, and runs in its thread. Its commits compare the row of the unit too, so a process that lost the unit
commits nothing for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cues import faults
from cues.base import events, names
from cues.graphs.processor import Node
from cues.graphs.processor_rows import ProcessorInputs, ProcessorRow, boot
from cues.overrides import override
from cues.queues.log import Log
from cues.queues.options import QueueOptions
from cues.queues.queue import create_queue
from cues.records import sealed
from cues.records.positions import NO_SEAL, Position
from cues.steps.calls import Calls
from cues.steps.copies import TRY_LOG, Copies
from cues.steps.runner import Runner
from cues.steps.stepper import Stepper
from cues.storage.transaction import refuse_lost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cues.queues.store import Store
    from cues.steps.process import Process
    from cues.steps.results import Results
    from cues.steps.taking import Taken
    from cues.storage.transaction import StoreTransaction


class SharedCalls(Calls):
    """The calls of the unit, with the process argument of another stepper: one event loop, one set of threads."""

    def __init__(self, runner: Runner, unit: Node, node: Node, process: Process) -> None:
        self._runner = runner
        self._unit = unit
        self._node = node
        self._process = process
        self.pace = runner.pace
        self.errors_left = None

    @override
    def run(self, taken: Taken, bounded: bool = False) -> Results:
        runner = self._runner
        own, runner._process = runner._process, self._process
        runner.errors_left, runner.judged_as = self.errors_left, self._node
        try:
            return runner.run(taken, bounded)
        finally:
            runner._process, runner.judged_as = own, self._unit

    @override
    def close(self) -> None:
        """Do nothing: the stepper of the unit closes its runner."""


def claim_beside(copies: Copies) -> Stepper:
    """Claim a row for the steps of a unit that take copies of messages; return their stepper, recovered.

    Its queues are made if they are missing. Raises :class:`Fenced` if this process lost the unit.
    """
    unit, node = copies.unit, copies.node
    make_queues(unit.store, dict.fromkeys([port.queue for port in node.inputs], copies.options) | {node.id: TRY_LOG})
    row = _claim(copies)
    runner = unit.runner
    assert isinstance(runner, Runner)

    def emit(event: events.Event) -> None:
        if not isinstance(event, events.Recovered):
            unit.emit(replace(event, processor=unit.node.id))

    def shared(own: Node, process: Process, *_: Any) -> Calls:
        return SharedCalls(runner, unit.node, own, process)

    setting = replace(unit.setting, emit=emit, runner=Runner if copies.own_calls else shared, may_linger=lambda: False)
    stepper = Stepper(unit.store, node, row, setting, copies=copies)
    faults.point(f"{copies.kind}.claimed")
    stepper.recover()
    return stepper


def make_queues(store: Store, wanted: Mapping[str, QueueOptions]) -> None:
    """Make the queues that are missing, in one commit."""

    def create(txn: StoreTransaction) -> None:
        for id, options in wanted.items():
            create_queue(txn, store, id, options)

    store.core.commit(create)


def _claim(copies: Copies) -> ProcessorRow:
    """Claim a second row of a unit that this process owns."""
    unit, node, own = copies.unit, copies.node, copies.own
    store: Store = unit.store
    logs = {port.queue: Log(store, port.queue) for port in node.inputs}

    def claim(txn: StoreTransaction) -> ProcessorRow:
        unit.fence.compare(txn)
        key, inputs_key = names.redriver_key(own), names.redriver_inputs_key(own)
        raw, raw_inputs = txn.get(key), txn.get(inputs_key)
        if raw is None:
            refuse_lost(txn)
        old = None if raw is None else ProcessorRow.unpack(key, raw, node.id)
        before = () if raw_inputs is None else ProcessorInputs.unpack(inputs_key, raw_inputs, node.id).tailers
        known = dict(zip(before, old.positions)) if old is not None else {}
        positions = []
        for tailer in sorted(logs):
            log_row = logs[tailer].row(txn)
            first = Position(log_row.identity, log_row.first, NO_SEAL)
            position = known.get(tailer, first)
            positions.append(first if position.next < first.next else position)  # redrives were refused
        row = ProcessorRow(
            unit.fence.row.owner,
            (old.epoch if old is not None else 0) + 1,
            old.generation if old is not None else 0,
            unit.fence.row.pid,
            boot(),
            old.under_way if old is not None else False,
            tuple(positions),
        )
        inputs = ProcessorInputs(node.kind, tuple(sorted(logs)), tuple(sorted(logs)), (b"",) * len(logs))
        sealed.put(txn, key, row.pack())
        sealed.put(txn, inputs_key, inputs.pack())
        return row

    return store.core.commit(claim)
