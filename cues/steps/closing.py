"""Closing: a unit closes what it keeps open, such as windows, because its inputs have ended for this time.

    1. ask       one commit of the home store: append a message to the queue of the unit's requests, and add one to the
                 count of those that were asked for
    2. notice    the owner of the unit sees the count in its next commit, or when it has nothing to do
    3. close     a stepper beside that of the unit takes the message by the protocol of every step (beside.py), and
                 calls :data:`cues.graphs.processor.CLOSE` of the function
    4. commit    in the commit of the step, with outputs and state: the request is done

So a kill at any moment leaves the unit as it was, or closed, and what it closes is written once. A request that nobody
took waits for the next start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cues import faults
from cues.base import clock, names
from cues.base.names import ProcessorKey
from cues.graphs.processor import CLOSE, ClosingNode, Node
from cues.graphs.processor_rows import read_topology
from cues.overrides import override
from cues.queues.log import Log
from cues.records import batch as batches
from cues.records import sealed
from cues.steps.beside import claim_beside, make_queues
from cues.steps.copies import TRY_LOG, Copies, Requests
from cues.steps.error_records import Counts
from cues.steps.lanes import RequestLane
from cues.steps.state import StateTable
from cues.storage import wakeup
from cues.storage.transaction import named_rows

if TYPE_CHECKING:
    from cues.queues.store import Store
    from cues.steps.part import Part
    from cues.steps.ports import Ports
    from cues.steps.stepper import Stepper
    from cues.storage.transaction import StoreTransaction


def can_close(node: Node) -> bool:
    """Return whether a processor may have something to close."""
    return hasattr(node.fn, CLOSE)


def at_end(node: Node) -> str:
    """Return what a processor does at the end of a run: ``"close"`` or ``"keep"``."""
    fn: Any = node.fn
    return str(fn.at_end)


def is_open(home: Store, node: Node) -> bool:
    """Return whether a unit keeps something open, as its state in the store says."""
    fn: Any = node.fn
    table = StateTable(home, node.key)
    return table.exists() and bool(fn.__cues_open__(table.view(None)))


def ask(home: Store, nodes: Iterable[Node]) -> None:
    """Ask units to close what they keep open, in one commit. The owners of the units are woken."""
    nodes = list(nodes)
    for node in nodes:
        make_queues(home, dict.fromkeys((names.closer_id(node.key), names.closing_queue(node.key)), TRY_LOG))
    logs = {node: Log(home, names.closing_queue(node.key)) for node in nodes}

    def write(txn: StoreTransaction) -> int:
        mask = 0
        for node, log in logs.items():
            message = {"key": None, "asked": clock.to_datetime(clock.now_ns())}
            log.append(txn, batches.build([message], batches.OWN_BYTES_MAX, None, reserved=True))
            row = names.redrives_key(names.closer_id(node.key))
            counts = Counts.read(txn, row)
            sealed.put(txn, row, counts._replace(asked=counts.asked + 1).pack())
            topology = read_topology(txn, node.id)
            if topology is not None:  # its owner sleeps on its inputs
                mask |= wakeup.union(wakeup.mask_of(*names.split_log(queue)) for queue in topology.queues)
        faults.point("closing.asking")
        return mask

    mask = home.core.commit(write, pages=4 * len(nodes))
    faults.point("closing.asked")
    home.core.ring(mask)


def waits(txn: StoreTransaction, unit: Node) -> bool:
    """Return whether a unit was asked, and has not closed."""
    return Counts.read(txn, names.redrives_key(names.closer_id(unit.key))).waiting > 0


def closed_before(home: Store) -> bool:
    """Return whether some unit of a store has closed what it kept open."""
    suffix = names.closer_id(ProcessorKey(""))
    with home.core.view() as txn:
        known = [row for unit, *row in named_rows(txn, names.REDRIVES) if unit.endswith(suffix)]
        return any(Counts.unpack(*row).done for row in known)


def is_paused(txn: StoreTransaction, unit: Node) -> bool:
    """Return whether a unit is paused: it closes nothing, since messages of its inputs may wait."""
    return txn.get(names.pause_key(unit.key)) is not None


class ClosingCopies(Copies):
    """The requests of one unit: the commit of a step that takes them notes that they are done."""

    options = TRY_LOG
    own_calls = True
    counted = False

    def __init__(self, unit: Any, requests: Requests) -> None:
        super().__init__("closing", unit, ClosingNode.of(unit.node), names.closer_id(unit.node.key))
        self._requests = requests

    @override
    def _settle(self, txn: StoreTransaction, parts: list[Part], ports: Ports) -> None:
        counts = Counts.read(txn, self._requests.key)
        taken = sum(end - start for part in parts for start, end in zip(part.taking.starts, part.taking.ends))
        self._requests.write_done(txn, counts, counts.done + taken)


class ClosingLane(RequestLane):
    """The requests to close of one unit whose function can close."""

    def __init__(self, unit: Any) -> None:
        super().__init__(unit)
        key = unit.node.key
        self.requests = Requests(unit, self, names.closer_id(key), names.closing_queue(key))

    @staticmethod
    def of(unit: Stepper) -> ClosingLane | None:
        return ClosingLane(unit) if can_close(unit.node) else None

    @override
    def claim(self) -> Stepper:
        return claim_beside(ClosingCopies(self.unit, self.requests))
