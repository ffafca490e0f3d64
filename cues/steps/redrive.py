"""Redriving: the inputs of an error message go once more through the processor that failed, and through no other.

    1. ask       one commit of the home store: copy the inputs to queues of the failed unit, write that the message
                 is requested, and add one to the unit's count of redrives that were asked for
    2. notice    the owner of the unit sees the count in its next commit, or when it has nothing to do
    3. take      the redriver of the unit takes the copies, by the protocol of every step (stepper.py)
    4. commit    in the commit of the step, with outputs and state: the error message is resolved, or failed again,
                 and one is added to the count of redrives that are done

So a redrive needs no process but the owner of the unit, and takes place whether the graph runs now or later. A
message can be requested once at a time, and 1 and 4 are one commit each. Therefore a death at any moment leaves the
request as it was or done, and two processes that ask at the same time ask once.

The redriver is a stepper beside that of the unit (beside.py), under the id ``graph.processor.redrive``. It shares the
function too.

Not guaranteed: order. A redriven message comes after messages that were after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from cues import faults
from cues.base import names
from cues.base.data import dataclass
from cues.errors import CuesError
from cues.graphs.processor import Node, RedriveNode
from cues.graphs.processor_rows import read_topology
from cues.overrides import override
from cues.queues.log import Log
from cues.queues.options import QueueOptions
from cues.queues.queue import create_queue
from cues.records import batch as batches
from cues.records import sealed
from cues.steps.beside import claim_beside
from cues.steps.copies import TRY_LOG, RedrivenCopies, Requests
from cues.steps.error_records import SETTLED, Counts, ErrorRecord, ErrorRows, redriven_key, whoami
from cues.steps.lanes import Outcome, RequestLane
from cues.storage import wakeup

if TYPE_CHECKING:
    from cues.queues.store import Store
    from cues.records.batch import Page
    from cues.steps.stepper import Stepper
    from cues.storage.base_store import BaseStore
    from cues.storage.transaction import StoreTransaction

ASKED_AT_ONCE: Final = 100
"""Redrives that one commit asks for. Other writers wait for it."""

# --- asking -------------------------------------------------------------------------------------


def refusal(home: BaseStore, record: ErrorRecord, nodes: Mapping[str, Node] | None = None) -> str:
    """Return why an error message cannot be redriven, as a sentence; "" if it can.

    ``nodes``: the processors of the graph as it is now, by id; None if only the store is known.
    """
    if not record.inputs or not any(record.inputs.values()):
        return "it holds no messages of a processor"
    if record.message.get(names.ERR_ABRIDGED):
        return "its input was nested too deeply for an error message, which has only the beginning of its text"
    unit = record.processor
    with home.core.view() as txn:
        topology = read_topology(txn, unit)
    if topology is None:
        return f"the store {home.path} has no processor {unit}"
    if record.of_timer:
        if nodes is None:
            return ""
        node = nodes.get(unit.partition("/")[0])
        return f"{unit} has no timer= any more" if node is None or node.options.timer is None else unable(node)
    if record.config.get("tailers"):
        return f"{unit} reads other queues by itself (tailers=), and its position there is not that of the failure"
    read = {queue.partition("/")[0] for queue in topology.queues}
    inputs = record.config.get("inputs") or {}
    gone = sorted({str(inputs.get(binding, binding)) for binding in record.inputs} - read)
    if gone:
        return f"{unit} does not read {', '.join(gone)} any more"
    if nodes is None:
        return "" if record.config.get("strategy") != "at-most-once" else _AT_MOST_ONCE.format(unit)
    node = nodes.get(unit.partition("/")[0])
    if node is None:
        return f"the graph has no processor {unit} any more"
    bound = {port.binding: port.queue for port in node.inputs}
    wrong = sorted(binding for binding in record.inputs if bound.get(binding) != inputs.get(binding))
    if wrong:
        return f"the input {', '.join(wrong)} of {unit} is another queue now"
    if node.mode == "join" and set(bound) != set(record.inputs):
        return f"{unit} joins {', '.join(sorted(bound))} now, and the message has {', '.join(sorted(record.inputs))}"
    return unable(node)


_AT_MOST_ONCE: Final = "{} is at-most-once, so no message is given to it a second time"


def unable(node: Node) -> str:
    """Return why a processor takes no redriven messages, as a sentence; "" if it does."""
    if node.at_most_once:
        return _AT_MOST_ONCE.format(node.id)
    if node.tailers:
        return f"{node.id} reads other queues by itself (tailers=), and its position there is not that of the failure"
    if node.pending:
        return f"{node.id} writes to other stores by pending messages (across='pending')"
    if node.kind == "frame":
        return f"{node.id} is a frame, which runs on Spark alone"
    if node.errors is None:
        return f"{node.id} has no error queue any more, so a message that fails again would stop it"
    return ""


@dataclass(frozen=True)
class Asked:
    """The error messages that a call asked to redrive."""

    records: tuple[ErrorRecord, ...]
    """Those that this call asked for."""
    already: tuple[ErrorRecord, ...] = ()
    """Those that were requested or settled meanwhile."""


def ask(home: Store, records: Sequence[ErrorRecord]) -> Asked:
    """Ask for the redrive of error messages, each once. Those with a :func:`refusal` must have been left out.

    Each hundred is one commit. The owners of the units are woken.
    """
    rows = ErrorRows(home)
    rows.ensure()
    by = whoami()
    asked: list[ErrorRecord] = []
    already: list[ErrorRecord] = []
    for start in range(0, len(records), ASKED_AT_ONCE):
        some = records[start : start + ASKED_AT_ONCE]
        _make_queues(home, some)
        logs = {id: Log(home, id) for record in some for id in _queues_of(record).values()}
        built = [(record, _pages(record)) for record in some]
        pages = sum(page.count + len(page.pieces) for _, copies in built for c in copies.values() for page in c)
        mask, new = home.core.commit(_write_requests, rows, built, logs, by, pages=pages + 3 * len(some))
        faults.point("redrive.asked")
        home.core.ring(mask)
        asked += new
        asked_now = {record.key for record in new}
        already += [record for record in some if record.key not in asked_now]
    return Asked(tuple(asked), tuple(already))


def _queues_of(record: ErrorRecord) -> dict[str, str]:
    """The queue of redriven messages for each binding of a record."""
    if record.of_timer:
        return {binding: names.timer_queue(record.unit_key) for binding in record.inputs}
    inputs = record.config["inputs"]
    return {binding: names.redrive_queue(record.unit_key, inputs[binding]) for binding in record.inputs}


def _make_queues(home: Store, records: Iterable[ErrorRecord]) -> None:
    """Make the queues that are missing for the copies of these records, and for the try logs of their redrivers."""
    wanted: dict[str, QueueOptions] = {}
    for record in records:
        id = names.timer_id(record.unit_key) if record.of_timer else names.redriver_id(record.unit_key)
        options = TRY_LOG if record.of_timer else QueueOptions()
        wanted |= {id: TRY_LOG} | dict.fromkeys(_queues_of(record).values(), options)
    with home.core.view() as txn:
        missing = [id for id in wanted if txn.get(names.queue_key(id)) is None]

    def create(txn: StoreTransaction) -> None:
        for id in missing:
            create_queue(txn, home, id, wanted[id])

    if missing:
        home.core.commit(create)


def _pages(record: ErrorRecord) -> dict[str, list[Page]]:
    """The copies of a record's inputs, by queue, with the provenance that they had."""
    batch = record.batch
    assert batch is not None
    at = record.index - batch.first
    provenance = batch.provenance(record.queue, frozenset(), at, at + 1)

    def build(messages: list[dict[str, Any]]) -> list[Page]:
        if provenance and not record.of_timer:
            try:
                spread = provenance.spread(len(messages))
                return batches.build(messages, batches.OWN_BYTES_MAX, None, spread, reserved=True)
            except CuesError:  # q/meta that fits no page; the error message was written without it too
                pass
        return batches.build(messages, batches.OWN_BYTES_MAX, None, reserved=True)

    return {queue: build(record.inputs[binding]) for binding, queue in _queues_of(record).items()}


def _write_requests(
    txn: StoreTransaction,
    rows: ErrorRows,
    built: Sequence[tuple[ErrorRecord, dict[str, list[Page]]]],
    logs: Mapping[str, Log],
    by: str,
) -> tuple[int, list[ErrorRecord]]:
    """Write the requests that nobody made before, inside a commit of the home store.

    Return the mask of the doorbells to ring after the commit, and the records that are requested now.
    """
    mask = 0
    new: list[ErrorRecord] = []
    for record, copies in built:
        known = rows.get(txn, record.key)
        if known is not None and (known["state"] in SETTLED or known["state"] == "requested"):
            continue
        for number, (queue, pages) in enumerate(copies.items()):
            start, _ = logs[queue].append(txn, pages)
            if not number:  # a join takes them together
                for offset in range(record.count):
                    sealed.put(txn, redriven_key(queue, start + offset), record.key, rows.database)
        rows.put(txn, record.key, "requested", by, left=record.count, error=[record.queue, record.index])
        counts_key = names.redrives_key(names.timer_id(record.unit_key) if record.of_timer else record.unit_key)
        counts = Counts.read(txn, counts_key)
        sealed.put(txn, counts_key, counts._replace(asked=counts.asked + 1).pack())
        topology = read_topology(txn, record.processor)
        if topology is not None:  # its owner sleeps on its inputs
            mask |= wakeup.union(wakeup.mask_of(*names.split_log(queue)) for queue in topology.queues)
        new.append(record)
    faults.point("redrive.asking")
    return mask, new


def discard(home: Store, records: Sequence[ErrorRecord], reason: str) -> Asked:
    """Write that nothing is to be done about error messages, by whom, when and why. Each hundred is one commit.

    Those that are settled, or whose redrive was asked for, stay as they are.
    """
    rows = ErrorRows(home)
    rows.ensure()
    by = whoami()

    def write(txn: StoreTransaction, some: Sequence[ErrorRecord]) -> list[ErrorRecord]:
        new = []
        for record in some:
            known = rows.get(txn, record.key)
            if known is None or not (known["state"] in SETTLED or known["state"] == "requested"):
                rows.put(txn, record.key, "discarded", by, reason=reason)
                new.append(record)
        return new

    done: list[ErrorRecord] = []
    for start in range(0, len(records), ASKED_AT_ONCE):
        some = records[start : start + ASKED_AT_ONCE]
        done += home.core.commit(write, some, pages=len(some))
    settled = {record.key for record in done}
    return Asked(tuple(done), tuple(record for record in records if record.key not in settled))


# --- taking -------------------------------------------------------------------------------------


class RedriveLane(RequestLane):
    """The redriven messages of a unit, also while it is paused: a redrive is how a pause is tried out."""

    while_paused = True

    def __init__(self, unit: Stepper) -> None:
        super().__init__(unit)
        key = unit.node.key
        self.requests = Requests(unit, self, key, names.redrive_queue(key, ""))

    @override
    def step(self) -> bool:
        redriver, self.stepper = self.stepper, None  # after an error it is recovered, as after a start
        outcome: Outcome = "committed"
        if redriver is None:
            redriver = self.claim()
        elif (outcome := redriver.step()) == "idle":
            why = "the messages do not fit the inputs that the processor has now"
            self.requests.refuse(ErrorRows(self.unit.store), why)
            for input in redriver.inputs:
                input.go(input.queue.core.row().next)
        self.stepper = redriver
        return outcome != "blocked"

    @override
    def claim(self) -> Stepper | None:
        """Own the redriver. None if the unit takes no redriven messages; then those that wait are refused."""
        unit: Stepper = self.unit
        rows = ErrorRows(unit.store)
        why = unable(unit.node)
        if why:
            self.requests.refuse(rows, why)
            return None
        node = RedriveNode.of(unit.node)
        redriver = claim_beside(RedrivenCopies("redrive", unit, node, unit.node.key, rows, self.requests))
        redriver.watch_with(unit, 1)
        return redriver

    @override
    def restart(self) -> None:
        """Do nothing: it went on during the pause."""
