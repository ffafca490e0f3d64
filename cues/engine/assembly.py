"""From a plan to owned, recovered processors on a store: the steps of every start.

1. open the home store, and the stores of queues that have a path; make the queues that are missing;
   divide every processor into units, one for each partition that it reads; make the try logs and fork
   queues that are missing
2. take the locks of all units, or none
3. claim: raise every epoch, in one transaction; ``before_claim`` may change the rows of the store first
4. recover each unit by the start table
5. compare the fork queues with the messages that the other stores got from them

For all code below this module a unit is a processor of its own. It has its own owner row, epoch, positions, try log
and state, under its own id, ``flights.enrich/3``. The first unit has the id of the processor. So it owns what was
written when its queue had one partition.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from cues.base import events, lazy
from cues.base.data import dataclass
from cues.base.names import ProcessorId, ProcessorKey
from cues.engine import identities
from cues.engine.growth import Emit, Growth, divide, tell_of_growth
from cues.engine.identities import keyed
from cues.engine.status import processor_of
from cues.engine.stores import Stores, open_stores, prepare, prepare_units
from cues.engine.threads import recover
from cues.errors import CuesError, GraphError, StoreError
from cues.forwarding import marks, other_stores
from cues.graphs import processor_rows
from cues.graphs.graph import Graph
from cues.graphs.plan import Plan, unwritten
from cues.graphs.processor import REQUIRES, Node
from cues.graphs.processor_rows import ProcessorInputs, ProcessorRow, read_topology
from cues.queues.base import read_as, view_of
from cues.queues.log import Log
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.steps import pending
from cues.steps.calls import Sleep
from cues.steps.closing import ClosingLane
from cues.steps.due_lane import DueLane
from cues.steps.expiry import ExpiryLane
from cues.steps.feed import SourceStepper
from cues.steps.ownership import Claimant, Ownership
from cues.steps.redrive import RedriveLane
from cues.steps.runner import Runner
from cues.steps.stepper import Setting, Stepper
from cues.storage.transaction import StoreTransaction

if TYPE_CHECKING:
    from cues.forwarding import low_water
    from cues.forwarding.forwarder import Forwarder, Marked
else:
    low_water = lazy.module("cues.forwarding.low_water")

LANES: Final = (RedriveLane, ClosingLane.of, DueLane.of_timers, DueLane.of_messages, ExpiryLane.of)
"""The makers of the lanes of a stream or sink, in the order of their turns."""


@dataclass
class Assembly:
    """The processors of a graph, owned by this process and recovered. They do not run yet."""

    plan: Plan
    stores: Stores
    ownership: Ownership
    steppers: list[Stepper]
    forwarders: list[Forwarder]
    queues: dict[str, Queue]
    recovered: Callable[[Sequence[Node], dict[str, ProcessorRow]], tuple[list[Stepper], list[Forwarder]]]
    """Make the steppers and the forwarders of claimed units."""
    growth: Growth | None = None
    """None if another process divides the graph."""

    @property
    def store(self) -> Store:
        """The home store."""
        return self.stores.home

    def take_in(self, nodes: Sequence[Node]) -> tuple[list[Stepper], list[Forwarder]]:
        """Own and recover more units, by the steps of a start. Return their steppers and forwarders.

        If it raises, this process owns none of them, and everything else is as before.
        """
        nodes = prepare_units(self.stores, nodes)
        claimants = claimants_of(self.queues, nodes)
        self.ownership.add(claimants)
        try:
            rows = _claim(self.stores, nodes, self.queues, self.ownership, claimants, False)
            steppers, forwarders = self.recovered(nodes, rows)
        except BaseException:
            self.ownership.drop(claimants)
            raise
        self.steppers += steppers
        self.forwarders += forwarders
        return steppers, forwarders

    def close(self) -> None:
        """Give the processors up, and the stores that were opened here."""
        for stepper in self.steppers:
            stepper.close()
        try:
            for forwarder in self.forwarders:
                with contextlib.suppress(CuesError):  # the next close does the rest
                    forwarder.tidy()
        finally:
            self.ownership.release()
            self.stores.close()


def assemble(
    graph: Graph,
    store: str | os.PathLike[str] | Store | None = None,
    *,
    units: Collection[str] | None = None,
    accept_topology: bool = False,
    take_over: bool = False,
    sleep: Sleep = lambda seconds: False,
    stopping: Callable[[], bool] = lambda: False,
    may_linger: Callable[[], bool] = lambda: False,
    emit: Emit = lambda event: None,
    runner: Callable[..., Runner] = Runner,
    stepper_type: type[Stepper] = Stepper,
    before_claim: Callable[[Store, dict[str, Queue]], None] | None = None,
) -> Assembly:
    """Do the five steps. An error is raised before a function of the graph ran, and leaves nothing locked.

    ``units`` are the ids of the units that this process is to own (:func:`divide`); None: all. Their owners forward
    the messages of the other units.
    """
    plan = graph.plan()
    if runner is Runner:
        refuse_frames(plan)
    stores = open_stores(graph, plan, store, accept_topology, emit)
    ownership = None
    try:
        queues = prepare(stores, plan, graph, emit, by_supervisor=units is not None)
        if units is None:
            tell_of_misspelt(plan, queues, emit)
        every = divide(plan, queues)
        nodes = [node for node in every if units is None or node.id in units]
        if units is None:
            identities.rename(stores.home, plan, nodes, partial(claimants_of, queues), accept_topology, take_over, emit)
            tell_of_growth(stores.home, nodes, emit)
        nodes = prepare_units(stores, nodes)
        claimants = claimants_of(queues, nodes)
        ownership = Ownership(stores.home, claimants, take_over)
        if before_claim is not None:
            before_claim(stores.home, queues)
        rows = _claim(stores, nodes, queues, ownership, claimants, accept_topology)
        if accept_topology:
            _give_up(stores, every)
        abroad = {name: queue for name, queue in queues.items() if queue.store is not stores.home}

        setting = Setting(queues, plan.system, sleep, stopping, may_linger, emit, runner)

        def recovered(
            nodes: Sequence[Node], rows: dict[str, ProcessorRow], left_over: Mapping[bytes, set[ProcessorKey]] = {}
        ) -> tuple[list[Stepper], list[Forwarder]]:
            marks = _marks(stores.home, nodes, rows, abroad)
            steppers: list[Stepper] = []
            for node in nodes:
                kind = SourceStepper if node.kind == "source" else stepper_type
                if not node.pending:
                    # It may have been declared with across="pending" before.
                    left = pending.finish(
                        stores.home, node.id, node.key, rows[node.id], list(abroad.values()), accept_topology
                    )
                    for what in left.values():
                        emit(events.Event(node.id, f"given up: {what}", logging.WARNING))
                stepper = kind(
                    stores.home,
                    node,
                    rows[node.id],
                    setting,
                    marks={tailer: marked.mark for tailer, marked in marks[node.id].items()},
                    lanes=() if node.kind == "source" else LANES,
                    give_up=accept_topology,
                )
                recover(stepper)
                steppers.append(stepper)
            forwarders = [
                _forwarder(stores.home, other, steppers, left_over.get(other.id, set()), marks, abroad)
                for other in stores.others.values()
            ]
            return steppers, forwarders

        elsewhere = {node.key for node in keyed(stores.home, every)} - {node.key for node in nodes}
        left_over = {other: processors - elsewhere for other, processors in stores.left_over.items()}
        steppers, forwarders = recovered(nodes, rows, left_over)
        growth = Growth(plan, queues, every, emit) if units is None else None
        return Assembly(plan, stores, ownership, steppers, forwarders, queues, recovered, growth)
    except BaseException:
        if ownership is not None:
            ownership.release()
        stores.close()
        raise


def claimants_of(queues: Mapping[str, Queue], nodes: Sequence[Node]) -> list[Claimant]:
    """The units, with the logs that they read."""

    def logs(node: Node) -> dict[str, Log]:
        views = {node.tailer(port.queue): view_of(queues[port.queue], node.partition) for port in node.reads}
        return {tailer: read_as(view, node.options.isolation).core.log for tailer, view in views.items()}

    def claimant(node: Node) -> Claimant:
        requires = getattr(node.fn, REQUIRES, ())
        return Claimant(node.id, node.stored_kind, logs(node), node.first_id, requires)

    return [claimant(node) for node in nodes]


def tell_of_misspelt(plan: Plan, queues: Mapping[str, Queue], emit: Emit) -> None:
    """Warn of queues that are empty and that no processor writes, if their name is nearly that of a written one."""
    for queue, near in plan.misspelt.items():
        if all(row.next == 1 for row in queues[queue].core.rows()):
            readers = ", ".join(node.id for node in plan.running if queue in {port.queue for port in node.reads})
            emit(events.Event(readers, f"reads {unwritten(queue, near)}", logging.WARNING))


def _give_up(stores: Stores, units: Sequence[Node]) -> None:
    """Forget the units of processors that read fewer partitions than before. Retention would always wait for them."""
    home = stores.home
    known, processors = {unit.id for unit in units}, {unit.processor for unit in units}
    with home.core.view() as txn:
        gone = {
            id: read_topology(txn, id)
            for id in processor_rows.all_ids(txn)
            if id not in known and processor_of(id) in processors
        }

    def forget(txn: StoreTransaction) -> None:
        for id in gone:
            processor_rows.forget(txn, id)

    if gone:
        home.core.commit(forget)
    for id, topology in gone.items():
        for queue, store in zip(topology.queues, topology.stores) if topology else ():
            if topology and store in stores.others:
                low_water.drop_mark(stores.others[store], queue, marks.ForeignReader(home.id, topology.key_of(id), 0))


def _claim(
    stores: Stores,
    nodes: Sequence[Node],
    queues: dict[str, Queue],
    ownership: Ownership,
    claimants: Sequence[Claimant],
    accept_topology: bool,
) -> dict[str, ProcessorRow]:
    """Claim the processors. The marks in other stores are made first, before there are positions that need them."""
    with stores.home.core.view() as txn:
        before = {claimant.processor: read_topology(txn, claimant.processor) for claimant in claimants}
    begun, epoch = _begin_marks(stores.home, nodes, queues)
    try:
        rows = ownership.claim(accept_topology, above=epoch, only=claimants)
    except BaseException:
        for queue, reader in begun:
            low_water.drop_mark(queue.store, queue.core.log.id, reader)
        raise
    _drop_marks(stores, claimants, before)
    return rows


def _forwarder(
    home: Store,
    other: Store,
    steppers: list[Stepper],
    left_over: set[ProcessorKey],
    marks: dict[str, dict[str, Marked]],
    queues: dict[str, Queue],
) -> Forwarder:
    """The forwarder to one other store, compared with the messages that are there.

    ``left_over`` are the keys of processors with a fork queue from earlier starts.
    """
    forked = {stepper.node.key for stepper in steppers if other.id in stepper.forks}
    read = [marked for of_node in marks.values() for marked in of_node.values() if marked.mark.queue.store is other]
    written = {name: queue for name, queue in queues.items() if queue.store is other}
    from cues.forwarding.forwarder import Forwarder

    forwarder = Forwarder(home, other, sorted(forked | left_over), read, written)
    forwarder.compare()
    return forwarder


def refuse_frames(plan: Plan) -> None:
    """Refuse processors that only Spark can run."""
    for node in plan.running:
        if node.kind == "frame":
            raise GraphError(
                f"{node.id} is written for Spark, from DataFrame to DataFrame (graph.frame), and this is the embedded"
                " engine.",
                "run cues run --engine spark, or write a stream, which both engines can run.",
                processor=node.name,
            )


# --- low-water marks ----------------------------------------------------------------------------


def _marks(
    home: Store, nodes: Sequence[Node], rows: dict[str, ProcessorRow], queues: dict[str, Queue]
) -> dict[str, dict[str, Marked]]:
    """The low-water marks in other stores, by processor and tailer id."""
    marked: dict[str, dict[str, Marked]] = {}
    for node in nodes:
        marked[node.id] = {}
        reader = marks.ForeignReader(home.id, node.key, rows[node.id].epoch)
        by_tailer = {node.tailer(port.queue): port.queue for port in node.reads}
        for place, tailer in enumerate(sorted(by_tailer)):
            if by_tailer[tailer] in queues:
                from cues.forwarding.forwarder import Marked

                log = read_as(view_of(queues[by_tailer[tailer]], node.partition), node.options.isolation)
                mark = low_water.LowWater(log, reader, holding=rows[node.id].under_way)
                marked[node.id][tailer] = Marked(mark, node.id, place)
    return marked


def _begin_marks(
    home: Store, nodes: Sequence[Node], queues: dict[str, Queue]
) -> tuple[list[tuple[Queue, marks.ForeignReader]], int]:
    """Make the marks that are missing, before there are positions that need them.

    Return the new marks, and the highest epoch of the marks that existed. The claim needs a higher epoch. A home store
    that was restored from a copy has a lower one, with which its owner could not write its marks.
    """
    begun: list[tuple[Queue, marks.ForeignReader]] = []
    highest = 0
    for node in nodes:
        reader = marks.ForeignReader(home.id, node.key, 0)
        for port in node.reads:
            queue = view_of(queues[port.queue], node.partition)
            if queue.store is home:
                continue
            mark = low_water.LowWater(queue, reader)
            if mark.epoch is None:
                mark.begin(queue.first_index)
                begun.append((queue, reader))
            highest = max(highest, mark.epoch or 0)
    return begun, highest


def _drop_marks(
    stores: Stores, claimants: Sequence[Claimant], before: Mapping[ProcessorId, ProcessorInputs | None]
) -> None:
    """Remove the marks of inputs that are not read any more, also in stores that the graph does not name any more."""
    for claimant in claimants:
        old, now = before[claimant.processor], claimant.topology(stores.home)
        for tailer, queue, id in zip(old.tailers, old.queues, old.stores) if old else ():
            if not id or now.places.get(tailer) == id:
                continue
            reader = marks.ForeignReader(stores.home.id, now.key_of(claimant.processor), 0)
            if id in stores.others:
                low_water.drop_mark(stores.others[id], queue, reader)
            else:
                with contextlib.suppress(StoreError), other_stores.opened(stores.home, id, readonly=False) as other:
                    low_water.drop_mark(other, queue, reader)
