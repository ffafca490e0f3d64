"""From a plan to owned, recovered processors on a store: what every engine does before it runs.

1. open the home store, and those of queues that have a path; make what is missing of queues,
   try logs and fork queues
2. take the locks of all processors, or none
3. claim: raise every epoch, in one transaction
4. recover each processor by the start table
5. compare the fork queues with what the other stores got of them
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cues import abroad, events, names
from cues.delivery import Delivery
from cues.engine.stores import Stores, open_stores, prepare
from cues.errors import CuesError, GraphError, StoreError
from cues.feed import SourceDelivery
from cues.forwarder import Forwarder, Marked
from cues.graph import Graph
from cues.ownership import Claimant, Ownership, ProcessorRow, Topology, read_topology
from cues.plan import Plan
from cues.processor import FRAME
from cues.queue import Queue
from cues.runner import Pause, Runner
from cues.store import Store


@dataclass
class Assembly:
    """A graph's processors, owned by this process and recovered, not running yet."""

    plan: Plan
    stores: Stores
    ownership: Ownership
    deliveries: list[Delivery]
    forwarders: list[Forwarder]
    queues: dict[str, Queue]

    @property
    def store(self) -> Store:
        """The home store."""
        return self.stores.home

    def close(self) -> None:
        """Give the processors up, and the stores that were opened here."""
        for delivery in self.deliveries:
            delivery.close()
        try:
            for forwarder in self.forwarders:
                with contextlib.suppress(CuesError):  # what is not tidied now is at the next close
                    forwarder.tidy()
        finally:
            self.ownership.release()
            self.stores.close()


def assemble(
    graph: Graph,
    store: str | os.PathLike[str] | Store | None = None,
    *,
    accept_topology: bool = False,
    take_over: bool = False,
    pause: Pause = lambda seconds: False,
    stopping: Callable[[], bool] = lambda: False,
    emit: Callable[[events.Event], None] = lambda event: None,
    runner: Callable[..., Runner] = Runner,
    delivery: type[Delivery] = Delivery,
) -> Assembly:
    """Do the five moves. Raises before anything of the graph ran, and leaves nothing locked then."""
    plan = graph.plan()
    if runner is Runner:
        _refuse_frames(plan)
    stores = open_stores(graph, plan, store, accept_topology, emit)
    ownership = None
    try:
        queues = prepare(stores, plan, graph, emit)
        claimants = []
        for node in plan.running:
            logs = {names.tailer_id(node.id, port.queue): queues[port.queue].log for port in node.reads}
            claimants.append(Claimant(node.id, node.kind, logs))
        ownership = Ownership(stores.home, claimants, take_over)
        rows = _claim(stores, plan, queues, ownership, accept_topology)
        there = {name: queue for name, queue in queues.items() if queue.store is not stores.home}
        marks = _marks(stores.home, plan, rows, there)
        deliveries: list[Delivery] = []
        for node in plan.running:
            kind = SourceDelivery if node.kind == "source" else delivery
            made = kind(
                stores.home,
                node,
                rows[node.id],
                queues=there,
                marks={tailer: marked.mark for tailer, marked in marks[node.id].items()},
                system=plan.system,
                pause=pause,
                stopping=stopping,
                emit=emit,
                runner=runner,
            )
            made.recover()
            deliveries.append(made)
        forwarders = [_forwarder(stores, other, deliveries, marks, there) for other in stores.others.values()]
    except BaseException:
        if ownership is not None:
            ownership.release()
        stores.close()
        raise
    return Assembly(plan, stores, ownership, deliveries, forwarders, queues)


def _claim(
    stores: Stores, plan: Plan, queues: dict[str, Queue], ownership: Ownership, accept_topology: bool
) -> dict[str, ProcessorRow]:
    """Claim the processors, with marks in other stores before there are positions that need them."""
    before = _topologies(stores.home, ownership.claimants)
    begun, epoch = _begin_marks(stores.home, plan, queues)
    try:
        rows = ownership.claim(accept_topology, above=epoch)
    except BaseException:
        for queue, reader in begun:
            abroad.drop_mark(queue.store, queue.log.id, reader)
        raise
    _drop_marks(stores, ownership.claimants, before)
    return rows


def _forwarder(
    stores: Stores,
    other: Store,
    deliveries: list[Delivery],
    marks: dict[str, dict[str, Marked]],
    queues: dict[str, Queue],
) -> Forwarder:
    """The forwarder to one other store, compared with what that one got."""
    forked = {delivery.node.id for delivery in deliveries if other.id in delivery.forks}
    here = [marked for of_node in marks.values() for marked in of_node.values() if marked.mark.queue.store is other]
    there = {name: queue for name, queue in queues.items() if queue.store is other}
    processors = sorted(forked | stores.left_over.get(other.id, set()))
    forwarder = Forwarder(stores.home, other, processors, here, there)
    forwarder.compare()
    return forwarder


def _refuse_frames(plan: Plan) -> None:
    for node in plan.running:
        if node.options.batch == FRAME:
            raise GraphError(
                f"{node.id} is written for Spark, from DataFrame to DataFrame (graph.frame), and this is the embedded"
                " engine.",
                "cues run --engine spark; or a stream for both engines.",
                processor=node.name,
            )


# --- low-water marks ----------------------------------------------------------------------------


def _marks(
    home: Store, plan: Plan, rows: dict[str, ProcessorRow], queues: dict[str, Queue]
) -> dict[str, dict[str, Marked]]:
    """The low-water marks in other stores, by processor and tailer id."""
    found: dict[str, dict[str, Marked]] = {}
    for node in plan.running:
        found[node.id] = {}
        reader = abroad.Reader(home.id, node.id, rows[node.id].epoch)
        by_tailer = {names.tailer_id(node.id, port.queue): port.queue for port in node.reads}
        for place, tailer in enumerate(sorted(by_tailer)):
            if by_tailer[tailer] in queues:
                mark = abroad.LowWater(queues[by_tailer[tailer]], reader, holding=rows[node.id].pending)
                found[node.id][tailer] = Marked(mark, place)
    return found


def _begin_marks(home: Store, plan: Plan, queues: dict[str, Queue]) -> tuple[list[tuple[Queue, abroad.Reader]], int]:
    """Make the marks that are missing, before there are positions that need them.

    Returns those made, and the highest epoch of those that were there: a home store that was put back
    has a lower one, and its owner could not write its marks.
    """
    begun: list[tuple[Queue, abroad.Reader]] = []
    highest = 0
    for node in plan.running:
        reader = abroad.Reader(home.id, node.id, 0)
        for port in node.reads:
            queue = queues[port.queue]
            if queue.store is home:
                continue
            mark = abroad.LowWater(queue, reader)
            if mark.epoch is None:
                mark.begin(queue.first_index)
                begun.append((queue, reader))
            highest = max(highest, mark.epoch or 0)
    return begun, highest


def _topologies(home: Store, claimants: Sequence[Claimant]) -> dict[str, Topology | None]:
    with home.view() as txn:
        return {claimant.processor: read_topology(txn, claimant.processor) for claimant in claimants}


def _drop_marks(stores: Stores, claimants: Sequence[Claimant], before: dict[str, Topology | None]) -> None:
    """Take away the marks of inputs that are read no more, also in stores that the graph names no more."""
    for claimant in claimants:
        old, now = before[claimant.processor], claimant.topology(stores.home)
        for tailer, queue, id in zip(old.tailers, old.queues, old.stores) if old else ():
            if not id or now.places.get(tailer) == id:
                continue
            reader = abroad.Reader(stores.home.id, claimant.processor, 0)
            if id in stores.others:
                abroad.drop_mark(stores.others[id], queue, reader)
            else:
                with contextlib.suppress(StoreError), abroad.opened(stores.home, id, readonly=False) as other:
                    abroad.drop_mark(other, queue, reader)
