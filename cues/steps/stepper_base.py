"""The attributes of a stepper, and the row in the store that names its owner and its positions.

    StepperBase     this module: attributes, the row of the processor, the fence
    PartBuilder     parts.py:    cut a step at its failures, build the outputs of each part
    Committer       commit.py:   steps 2, 4 and 5 of the protocol
    Recovery        recovery.py: the decision of a start
    Stepper         stepper.py:  steps 1 and 3, and the turn that runs all of them

The classes form one object, divided by the protocol of docs/guarantees.md: each module has one part of it. Each
class derives from the one above it, and does not use those below.

The row is the fence: each commit compares it, byte by byte, with the row that this owner wrote last. Another
process that takes over or seeks changes the row, and then nothing is written.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cues.base import events, names
from cues.errors import WriterStuck
from cues.forwarding.low_water import LowWater
from cues.graphs.error_rate import ErrorRate
from cues.graphs.processor import Node
from cues.native import mypyc_attr
from cues.queues.backpressure import ENDLESS, Gate
from cues.queues.base import read_as, view_of
from cues.queues.options import seconds_of
from cues.queues.processor_rows import Position, ProcessorRow
from cues.queues.queue import Queue
from cues.queues.tailer import pending_read
from cues.steps import tracing, tries
from cues.steps.bucket import Bucket
from cues.steps.failure import Failure, Verdict, failed_event, line
from cues.steps.halving import Halving
from cues.steps.hashes import Hasher
from cues.steps.held import Held
from cues.steps.imperative import Imperative, ProcessAppender, ProcessTailer
from cues.steps.lanes import Lane
from cues.steps.meter import Meter
from cues.steps.ownership import fenced
from cues.steps.pauses import ErrorWindow
from cues.steps.process import Process
from cues.steps.runner import Calls, Interrupted, Pause, Runner
from cues.steps.state import StateTable
from cues.steps.taking import Input
from cues.storage.store_core import LastLook

if TYPE_CHECKING:
    from cues.queues.store import Store
    from cues.storage.transaction import StoreTransaction


R = TypeVar("R")


def _table(store: Store, node: Node) -> StateTable:
    ttl_s = seconds_of(node.options.ttl)
    return StateTable(store, node.key, None if ttl_s is None else round(ttl_s * 1e9))


@mypyc_attr(allow_interpreted_subclasses=True)
class StepperBase:
    """The attributes of a stepper and its row. Used by one thread at a time."""

    def __init__(
        self,
        store: Store,
        node: Node,
        row: ProcessorRow,
        *,
        queues: Mapping[str, Queue] | None = None,
        marks: Mapping[str, LowWater] | None = None,
        system: Any = None,
        pause: Pause = lambda seconds: False,
        stopping: Callable[[], bool] = lambda: False,
        may_linger: Callable[[], bool] = lambda: False,
        emit: Callable[[events.Event], None] = lambda event: None,
        runner: Callable[..., Calls] = Runner,
        shares: StepperBase | None = None,
        lanes: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        """``queues``: handles by name, needed for queues of other stores. ``marks``: the low-water marks there, by
        tailer id. ``may_linger``: whether a step may wait for more messages, as ``linger_s`` asks. ``runner``: makes
        the runner from the arguments of :class:`Runner`. ``shares``: the stepper of the same thread whose state,
        counters, appenders and fork queues this one uses too. ``lanes``: make its lanes
        (lanes.py), each from the stepper; None from one that has nothing to do here."""
        self.store = store
        self.given: dict[str, Any] = {"queues": queues, "system": system, "pause": pause, "stopping": stopping}
        """Arguments with which another stepper of the same processor is made."""
        given = queues or {}

        def queue_of(id: str) -> Queue:
            return given[id] if id in given else store.queue(id)

        def log_of(id: str) -> Queue:
            return read_as(view_of(queue_of(id), node.input_partition), node.options.isolation)

        self.node = node
        self.counters: events.Counters = events.Counters() if shares is None else shares.counters
        self.meter = Meter(self.counters)
        self.tracer = tracing.tracer() if runner is Runner else None  # not of steps whose calls are on executors
        self.span: tracing.StepSpan | None = None
        """The span of the step under way, if steps are traced."""
        self.state: StateTable = _table(store, node) if shares is None else shares.state
        self._emit = emit
        self._pause = pause
        self._expected = row.pack()
        """The row as it was committed last."""
        self._unpacked: tuple[bytes, ProcessorRow] = (self._expected, row)
        """A row that was unpacked, and its bytes. Another thread may unpack one while a step commits the next."""
        self._row_key = self._key_of_row()
        self.whole: StepperBase = self if shares is None else shares
        """The stepper of the unit, which is another one for redriven messages and for timers."""
        self._pause_key: bytes = names.pause_key(node.key) if shares is None else shares._pause_key
        self._pause_row: bytes | None = None
        """The pause of the unit (pauses.py), as the last transaction that compared the fence saw it."""
        self._window: ErrorWindow | None = None
        """Of :attr:`whole`: the error messages of the present window, if the processor has ``max_errors=``."""
        limit = node.options.max_errors
        self._error_rate = ErrorRate.parse(limit) if limit is not None and node.kind != "source" else None
        self._counted: ErrorWindow | None = None
        """The window after the commit of the step."""
        self._beside: dict[bytes, bytes] = {}
        """Rows about the failures of the step, which its commit writes too."""
        self._lanes_of = lanes
        self.lanes: list[Lane] = []
        """Its work beside its inputs, in the order of their turns."""
        self.held: Held | None = None
        """The delayed messages of the unit; None without their lane: then they are taken as all others."""
        self.try_log = store.queue(node.key)
        inputs = {node.tailer(port.queue): port for port in node.inputs}
        self.inputs = [Input(port.binding, tailer, log_of(port.queue)) for tailer, port in inputs.items()]
        self.imperative: Imperative = (
            Imperative(
                node.id,
                {p.binding: ProcessTailer(log_of(p.queue), node.tailer(p.queue)) for p in node.tailers},
                {p.binding: ProcessAppender(queue_of(p.queue)) for p in node.appenders},
            )
            if shares is None
            else shares.imperative
        )
        self.marks = marks or {}
        self._readers: list[Input | ProcessTailer] = [*self.inputs, *self.imperative.tailers.values()]
        """The tailers that have a position in the row."""
        if node.options.isolation == "uncommitted":
            for reader in self._readers:
                reader.on_pending = functools.partial(self._tell_of_pending, reader.queue.id)
        self._last_look = LastLook(store.core)
        """The last comparison of the fence while there was nothing to do."""
        self._home_inputs = [
            input for input in self.inputs if input.queue.store.core.environment is store.core.environment
        ]
        self._order = sorted(reader.tailer for reader in self._readers)
        self._place = {tailer: place for place, tailer in enumerate(self._order)}
        """The place of a tailer's position in the row."""
        self.outputs = {port.binding: queue_of(port.queue) for port in node.outputs}
        self._targets = [(binding, queue, False) for binding, queue in self.outputs.items()]
        self._targets += [(binding, reader.queue, True) for binding, reader in self.imperative.appenders.items()]
        """The queues that a step appends to, in this order, and whether through an appender of the function."""
        self.errors = self._error_log(queue_of(node.errors)) if node.errors else None
        written = [*(queue for _, queue, _ in self._targets), *([self.errors] if self.errors else [])]
        others = {queue.store.id for queue in written} - {store.id}
        self.forks: dict[bytes, Queue] = {}
        if shares is not None:
            self.forks = shares.forks
        elif not node.pending:
            self.forks = {other: store.queue(names.fork_id(node.key, other)) for other in others}
        """The fork queues, by the id of their other store; empty if steps write to other stores directly."""
        self._tries = tries.TryRecords(node.id)
        self._tries_from = self.try_log.first_index
        self._served = 0
        self._room = ENDLESS
        """The messages for which the outputs have room at this step."""
        self._together = [(0, self.inputs)] if node.mode != "alts" else None
        self._may_linger = may_linger
        self._linger_ns = round(node.options.linger_s * 1e9)
        self._lingering: dict[str, int] = {}
        """The ends of the waits for more messages (``linger_s``), by the first tailer of the choice."""
        self.bucket: Bucket | None = None if shares is None else shares.bucket
        """The calls that ``rate=`` allows, also for redriven messages and timers."""
        if shares is None and node.options.calls_per_s is not None:
            self.bucket = Bucket(node.options.calls_per_s, self._units, self.try_log.core.row().time_ns)
        self._pending: tuple[tries.Snapshot, dict[str, int]] | None = None
        self._stop: Failure | None = None
        self.watch: Callable[[int, int, int], None] | None = None
        """Called before the function of each step with input, index and count, and after it with (0, 0, 0)."""
        self._careful: dict[int, int] = {}
        """For each input: before this index a step takes one message at a time."""
        self._verdict: Verdict | None = None
        self._halving = [Halving() for _ in self.inputs]
        """For each input: the parts of a batch that failed."""
        self.hasher = Hasher(node.key, row.generation)
        state = None if node.kind == "source" else self.state.call  # that of a source is made with its generator
        self.process = Process(node, system, self.hasher, row.epoch, store.id.hex(), state, stopping, self.imperative)
        self.process._inputs = self.whole.inputs
        self.runner = (
            runner(
                node,
                self.process,
                self.state,
                pause,
                emit,
                self.counters,
                lambda b: self.outputs[b].core.options,
                self.imperative,
            )
            if node.kind != "source"
            else None
        )
        self.gate = Gate(
            node.id,
            written,
            store.id.hex(),
            {node.id, node.key},  # other stores know it by its key
            dict.fromkeys([store.directory, *(reader.queue.store.directory for reader in self._readers)]),
        )
        """The waits for the readers of the queues that it writes to."""
        self.gate.take_over()
        self.rings = self._written = 0
        for queue in (*written, *self.forks.values(), self.try_log):
            if queue.store.id == store.id:
                self.rings |= queue.core.log.mask
        for reader in self._readers:
            if reader.queue.core.bounded and reader.queue.store.id == store.id:
                self.rings |= reader.queue.core.log.mask  # its writers may wait for this reader
        self._made()

    def _made(self) -> None:
        """Add what a kind of stepper has besides; it is called at the end of the constructor."""

    def _units(self) -> int:
        """Return the number of units of the processor now."""
        queue = self.inputs[0].queue
        return (queue if queue.core.whole is None else queue.core.whole).options.partitions

    def _key_of_row(self) -> bytes:
        return names.processor_key(self.node.id)

    def _tell_of_pending(self, queue: str, producer: str) -> None:
        self._emit(events.Event(self.node.id, pending_read(self.node.id, queue, producer), logging.WARNING))

    def _error_log(self, queue: Queue) -> Queue:
        """Return the log for error messages. They have no key, so all those of a unit are on one partition."""
        return view_of(queue, self.node.partition % queue.options.partitions)

    # --- the row ---

    def adopt(self, row: ProcessorRow) -> None:
        """Take over the stored row after a seek, which moved the positions under the same owner id.

        Raises :class:`Fenced` (takeover) if another owner has the row now.
        """
        if row.owner != self._row.owner:
            raise fenced(self.node.id, self._expected, row.pack())
        self._owned(row.pack())
        self.hasher = Hasher(self.node.key, row.generation)
        self.process._renew(self.hasher, row.epoch)
        for mark in self.marks.values():
            mark.renew(row.epoch)

    def owns(self, row: ProcessorRow) -> bool:
        """Return whether a row belongs to this owner, at any positions."""
        return row.owner == self._row.owner

    def check_fence(self) -> None:
        """Raise :class:`Fenced`, as the next commit does, if a seek or a takeover wrote the row since the last one."""
        with self.store.core.view() as txn:
            self._fence(txn)

    def _fence(self, txn: StoreTransaction) -> None:
        """Raise :class:`Fenced` unless owner, epoch and all positions are those that the step started from."""
        stored = txn.get(self._row_key)
        if stored != self._expected:
            raise fenced(self.node.id, self._expected, stored)
        self._look(txn)

    def _look(self, txn: StoreTransaction) -> None:
        """Read what others ask of this unit: a pause or its end, and what its lanes know."""
        self._pause_row = txn.get(self._pause_key)
        for lane in self.lanes:
            lane.notice(txn)

    @property
    def _row(self) -> ProcessorRow:
        """The row as it was committed last, unpacked."""
        expected = self._expected
        raw, row = self._unpacked
        if raw is not expected:
            row = ProcessorRow.unpack(expected, self.node.id)
            self._unpacked = expected, row
        return row

    def position_in(self, row: ProcessorRow, tailer: str) -> Position:
        """Return the position of a tailer in ``row``."""
        return row.positions[self._place[tailer]]

    def _owned(self, row: bytes) -> None:
        """Keep the committed row: the next commit compares with it."""
        self._expected = row
        if self.node.imperative:
            for tailer in self.imperative.tailers.values():
                tailer.committed(self.position_in(self._row, tailer.tailer))

    # --- events ---

    def _patiently(self, write: Callable[..., R], *arguments: Any, **keywords: Any) -> R:
        """Call ``write``; repeat it while a process that does not respond holds the store's writer lock.

        A call that fails in this way writes nothing, and the fence is inside the transaction. So the results of the
        function are kept until the commit is made or refused.
        """
        while True:
            try:
                return write(*arguments, **keywords)
            except WriterStuck as stuck:
                self._emit(events.Waiting(self.node.id, f"waits to commit: {stuck.message}", logging.WARNING, stuck))
                if self._pause(0):
                    raise Interrupted from stuck

    def _tell(self, count: int, first: Failure) -> None:
        """Emit one event for all messages that failed in a commit."""
        assert self.errors is not None
        cause = f"{type(first.error).__name__}: {line(first.error)}"
        self._emit(failed_event(self.node.id, self.errors.id, count, first.attempts, cause))
