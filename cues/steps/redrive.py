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

A :class:`Redriver` is a stepper beside that of the unit (beside.py), under the id ``graph.processor.redrive``. It
shares the function too.

Not guaranteed: order. A redriven message comes after messages that were behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from cues import faults
from cues.base import events, names
from cues.base.names import ProcessorKey
from cues.errors import CuesError
from cues.graphs.processor import Node, RedriveNode
from cues.overrides import override
from cues.queues.log import Log
from cues.queues.options import QueueOptions
from cues.queues.processor_rows import ProcessorRow, read_topology
from cues.queues.queue import create_queue
from cues.records import batch as batches
from cues.steps.beside import Beside, claim_beside, make_queues
from cues.steps.error_records import SETTLED, Counts, ErrorRecord, ErrorRows, redriven_key, whoami
from cues.steps.lanes import SideLane
from cues.steps.ownership import fenced
from cues.steps.parts import Part
from cues.steps.stepper import Outcome, Stepper
from cues.storage import wakeup

if TYPE_CHECKING:
    from cues.queues.store import Store
    from cues.records.batch import Page
    from cues.steps.taking import Taken
    from cues.storage.base_store import BaseStore
    from cues.storage.transaction import StoreTransaction

ASKED_AT_ONCE: Final = 100
"""Redrives that one commit asks for. Other writers wait for it."""
TRY_LOG: Final = QueueOptions(metadata=False)

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
    if record.of_timer and nodes is not None:
        node = nodes.get(unit.partition("/")[0])
        return f"{unit} has no timer= any more" if node is None or node.options.timer is None else unable(node)
    if record.of_timer:
        return ""
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
        already += [record for record in some if record not in new]
    return Asked(tuple(asked), tuple(already))


def _queues_of(record: ErrorRecord) -> dict[str, str]:
    """The queue of redriven messages for each binding of a record."""
    if record.of_timer:
        return {binding: names.timer_queue(record.unit_key) for binding in record.inputs}
    inputs = record.config["inputs"]
    return {binding: names.redrive_queue(record.unit_key, inputs[binding]) for binding in record.inputs}


def _make_queues(home: Store, records: Iterable[ErrorRecord]) -> None:
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
    came = batch.provenance(record.queue, frozenset(), at, at + 1)

    def build(messages: list[dict[str, Any]]) -> list[Page]:
        if came and not record.of_timer:
            try:
                spread = came.spread(len(messages))
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
    """Write the requests that nobody made before; return the doorbells to ring, and the records."""
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
                    txn.put(redriven_key(queue, start + offset), record.key, db=rows.database)
        rows.put(txn, record.key, "requested", by, left=record.count, error=[record.queue, record.index])
        counts_key = names.redrives_key(names.timer_id(record.unit_key) if record.of_timer else record.unit_key)
        counts = Counts.unpack(txn.get(counts_key))
        txn.put(counts_key, counts._replace(asked=counts.asked + 1).pack())
        topology = read_topology(txn, record.processor)
        if topology is not None:  # its owner sleeps on its inputs
            mask |= wakeup.union(wakeup.mask_of(*names.log_parts(queue)) for queue in topology.queues)
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
    return Asked(tuple(done), tuple(record for record in records if record not in done))


# --- taking -------------------------------------------------------------------------------------


class Settling(Beside):
    """A stepper whose messages may be redriven ones: its commits settle the error messages that they came from."""

    def __init__(self, lane: CountedLane, node: Node, row: ProcessorRow, own_calls: bool = False) -> None:
        self.lane = lane
        self.rows = ErrorRows(lane.unit.store)
        super().__init__(lane.unit, node, row, own_calls)

    @override
    def _redriven(self, taken: Taken, start: int, stop: int) -> dict[str, Any]:
        """Name the error messages that these messages came from."""
        with self.store.core.view() as txn:
            origins: dict[bytes, list[Any]] = {}
            for piece in taken.slices:
                for at in range(piece.start + start, piece.start + stop):
                    key = txn.get(redriven_key(piece.tailer, at), db=self.rows.database)
                    fields = None if key is None else self.rows.get(txn, key)
                    if fields is not None:
                        origins[key] = fields["error"]
        places = [{"queue": queue, "index": index} for queue, index in origins.values()]
        return {names.ERR_REDRIVEN: places} if places else {}

    @override
    def _write_step(self, txn: StoreTransaction, parts: list[Part], row: bytes) -> None:
        super()._write_step(txn, parts, row)
        counts = Counts.unpack(txn.get(self.lane.key))
        if counts.waiting:  # else none of these messages is redriven
            done = self._settle_parts(txn, parts)
            self.lane.counts = counts._replace(done=counts.done + done).pack()
            txn.put(self.lane.key, self.lane.counts)

    def _settle_parts(self, txn: StoreTransaction, parts: list[Part]) -> int:
        """Note that redriven messages are done; return the number of error messages of which none is left."""
        done = 0
        for part in parts:
            new = []
            if part.failure is not None and self.errors is not None and self.errors.store.id == self.store.id:
                new = [part.indices[self.errors.core.log.id]]
            for tailer, start, end in zip(part.taking.tailers, part.taking.starts, part.taking.ends):
                for at in range(start, end):
                    done += self._settle(txn, redriven_key(tailer, at), part, new)
        return done

    def _settle(self, txn: StoreTransaction, origin: bytes, part: Part, new: list[int]) -> int:
        """Note that one redriven message is done; return 1 if it was the last one of its error message."""
        key = txn.get(origin, db=self.rows.database)
        fields = None if key is None else self.rows.get(txn, key)
        if fields is None:
            return 0
        txn.delete(origin, db=self.rows.database)
        again = sorted({*fields.get("again", ()), *new})
        failed = bool(fields.get("failed")) or part.failure is not None
        left = fields["left"] - 1
        state: Literal["requested", "failed again", "resolved"] = "requested"
        if not left:
            state = "failed again" if failed else "resolved"
        more = {"left": left, "failed": failed, "again": again, "hash": part.digest.hex(), "error": fields["error"]}
        self.rows.put(txn, key, state, fields["by"], **more)
        return int(not left)


class Redriver(Settling):
    """Takes the redriven messages of one unit."""

    @override
    def _key_of_row(self) -> bytes:
        return names.redriver_key(self.main.node.key)

    @override
    def _write_step(self, txn: StoreTransaction, parts: list[Part], row: bytes) -> None:
        super()._write_step(txn, parts, row)
        faults.point("redrive.inside")


class CountedLane(SideLane):
    """A lane for which redrives are asked, and counted in a row of the unit."""

    def __init__(self, unit: Stepper, key: ProcessorKey, queues: str) -> None:
        """``queues``: what the names of its queues begin with."""
        super().__init__(unit)
        self.key = names.redrives_key(key)
        self.queues = queues
        self.counts: bytes | None = None
        """The counts of redrives, as the last transaction that compared the fence saw them."""

    @override
    def notice(self, txn: StoreTransaction) -> None:
        self.counts = txn.get(self.key)

    @override
    def asked(self) -> bool:
        counts = self.counts
        return counts is not None and counts[:8] != counts[8:16]

    def refuse(self, rows: ErrorRows, why: str, unless: Callable[[StoreTransaction], bool] = lambda txn: False) -> None:
        """Write that the redrives that wait cannot be made, and remove their messages, in one commit.

        ``unless``: in the transaction, whether they can be made after all.
        """
        main: Stepper = self.unit
        prefix = self.queues
        store, unit = main.store, main.node.id
        logs = [Log(store, id) for id in store.queues(all=True) if id.startswith(prefix)]

        def write(txn: StoreTransaction) -> int:
            stored = txn.get(main._row_key)
            if stored != main._expected:
                raise fenced(unit, main._expected, stored)
            if unless(txn):
                return 0
            refused = 0
            cursor = txn.cursor(rows.database)
            alive = cursor.set_range(b"r" + prefix.encode())
            origins: dict[bytes, bytes] = {}
            while alive and cursor.key().startswith(b"r" + prefix.encode()):
                origins[cursor.key()] = cursor.value()
                alive = cursor.next()
            for origin in origins:
                txn.delete(origin, db=rows.database)
            for key in set(origins.values()):
                fields = rows.get(txn, key)
                if fields is not None:
                    rows.put(txn, key, "refused", fields["by"], reason=why)
                    refused += 1
            for log in logs:
                row = log.row(txn)
                log.move_front(txn, row, row.next)
            counts = Counts.unpack(txn.get(self.key))
            self.counts = counts._replace(done=counts.asked).pack()
            txn.put(self.key, self.counts)
            return refused

        refused = store.core.commit(write)
        store.core.note_purge()
        if refused:
            text = f"{refused:,} redrive{'s' if refused > 1 else ''} refused: {why}. The messages stay unresolved"
            main._emit(events.Event(unit, text, logging.WARNING))


class RedriveLane(CountedLane):
    """The redriven messages of a unit, also while it is paused: a redrive is how a pause is tried out."""

    while_paused = True

    @staticmethod
    def of(unit: Stepper) -> RedriveLane:
        return RedriveLane(unit, unit.node.key, names.redrive_queue(unit.node.key, ""))

    @override
    def armed(self) -> bool:
        return self.counts is not None

    @override
    def waits(self) -> bool:
        return self.asked()

    @override
    def step(self) -> bool:
        redriver, self.stepper = self.stepper, None  # after an error it is recovered, as after a start
        outcome: Outcome = "committed"
        if redriver is None:
            redriver = self.claim()
        elif (outcome := redriver.step()) == "idle":
            self.refuse(redriver.rows, "the messages do not fit the inputs that the processor has now")
            for input in redriver.inputs:
                input.go(input.queue.core.row().next)
        self.stepper = redriver
        return outcome != "blocked"

    @override
    def claim(self) -> Redriver | None:
        """Own the redriver. None if the unit takes no redriven messages; then those that wait are refused."""
        main: Stepper = self.unit
        store, key = main.store, main.node.key
        why = unable(main.node)
        if why:
            self.refuse(ErrorRows(store), why)
            return None
        node = RedriveNode.of(main.node)
        make_queues(store, {port.queue: QueueOptions() for port in node.inputs} | {node.id: TRY_LOG})
        logs = {port.queue: Log(store, port.queue) for port in node.inputs}
        redriver = Redriver(self, node, claim_beside(main, node, key, logs))
        faults.point("redrive.claimed")
        redriver.recover()
        redriver.watch_with(main, 1)
        return redriver

    @override
    def restart(self) -> None:
        """Do nothing: it went on during the pause."""
