"""From a plan to owned, recovered processors on a store: what every engine does before it runs.

1. open the home store, and those of queues that have a path; make what is missing of queues;
   divide every processor into units, one for each partition of what it reads; make what is missing of
   their try logs and fork queues
2. take the locks of all units, or none
3. claim: raise every epoch, in one transaction
4. recover each unit by the start table
5. compare the fork queues with what the other stores got of them

A unit is to everything below it a processor of its own: owner row, epoch, positions, try log and state are
its own, under its own id, ``flights.enrich/3``. The first has the processor's id, so what was written when
its queue had one partition is its.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cues import abroad, events, names, pending
from cues.delivery import Delivery
from cues.engine.stores import Stores, open_stores, prepare, prepare_units
from cues.errors import CuesError, GraphError, StoreError
from cues.feed import SourceDelivery
from cues.forwarder import Forwarder, Marked
from cues.graph import Graph
from cues.ownership import Claimant, Ownership, ProcessorRow, Topology, read_topology
from cues.pending import PendingDelivery
from cues.plan import Plan, partitions_of
from cues.processor import FRAME, Node
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
    units: Collection[str] | None = None,
    accept_topology: bool = False,
    take_over: bool = False,
    pause: Pause = lambda seconds: False,
    stopping: Callable[[], bool] = lambda: False,
    emit: Callable[[events.Event], None] = lambda event: None,
    runner: Callable[..., Runner] = Runner,
    delivery: type[Delivery] = Delivery,
) -> Assembly:
    """Do the five moves. Raises before anything of the graph ran, and leaves nothing locked then.

    ``units`` are the ids of those that this process is to own (:func:`divide`); None: all. What the others write
    for other stores is forwarded by the processes that own them.
    """
    plan = graph.plan()
    if runner is Runner:
        refuse_frames(plan)
    stores = open_stores(graph, plan, store, accept_topology, emit)
    ownership = None
    try:
        queues = prepare(stores, plan, graph, emit)
        every = divide(plan, queues)
        nodes = [node for node in every if units is None or node.id in units]
        prepare_units(stores, nodes)
        claimants = []
        for node in nodes:
            logs = {node.tailer(port.queue): queues[port.queue].view(node.partition).log for port in node.reads}
            claimants.append(Claimant(node.id, node.kind, logs))
        ownership = Ownership(stores.home, claimants, take_over)
        _tell_of_growth(stores.home, nodes, emit)
        rows = _claim(stores, nodes, queues, ownership, accept_topology)
        if accept_topology:
            _give_up(stores, every)
        there = {name: queue for name, queue in queues.items() if queue.store is not stores.home}
        marks = _marks(stores.home, nodes, rows, there)
        deliveries: list[Delivery] = []
        for node in nodes:
            kind = SourceDelivery if node.kind == "source" else delivery
            more: dict[str, Any] = {}
            if node.pending:
                kind, more = PendingDelivery, {"give_up": accept_topology}
            else:
                _finish_pending(stores.home, node, rows[node.id], list(there.values()), accept_topology, emit)
            made = kind(
                stores.home,
                node,
                rows[node.id],
                queues=queues,
                marks={tailer: marked.mark for tailer, marked in marks[node.id].items()},
                system=plan.system,
                pause=pause,
                stopping=stopping,
                emit=emit,
                runner=runner,
                **more,
            )
            made.recover()
            deliveries.append(made)
        elsewhere = {node.id for node in every} - {node.id for node in nodes}
        forwarders = [
            _forwarder(stores, other, deliveries, elsewhere, marks, there) for other in stores.others.values()
        ]
    except BaseException:
        if ownership is not None:
            ownership.release()
        stores.close()
        raise
    return Assembly(plan, stores, ownership, deliveries, forwarders, queues)


def divide(plan: Plan, queues: Mapping[str, Queue]) -> list[Node]:
    """The units of a graph: each processor once for each partition that its inputs have now.

    Raises :class:`GraphError` where the inputs of a processor do not fit together.
    """
    options = {name: queue.options for name, queue in queues.items()}
    found: list[Node] = []
    for node in plan.running:
        partitions = partitions_of(node, options)
        if node.options.instances > 1 and partitions == 1:
            raise GraphError(
                f"{node.id} has instances={node.options.instances}, and what it reads has one partition, so the others"
                " would have nothing to do.",
                "queues={…: cues.QueueOptions(partitions=…, key=…)}; or concurrency=…, for calls at once in one order.",
                processor=node.name,
            )
        found += [node.unit(partition) for partition in range(partitions)]
    return found


def _tell_of_growth(home: Store, nodes: Sequence[Node], emit: Callable[[events.Event], None]) -> None:
    """Say which processors have new units beside old ones: what they knew of a key is where the key was before."""
    grown: dict[str, int] = {}
    with home.view() as txn:
        for node in nodes:
            if read_topology(txn, node.id) is None and read_topology(txn, node.processor) is not None:
                grown[node.processor] = grown.get(node.processor, 0) + 1
    for processor, count in grown.items():
        emit(
            events.Event(
                processor,
                f"reads {count} more partition{'s' if count > 1 else ''} than before, from the beginning; state stays"
                " with the partition that it was kept for, so a key that moved begins anew",
                logging.WARNING,
            )
        )


def _give_up(stores: Stores, units: Sequence[Node]) -> None:
    """Forget the units of processors that read fewer partitions than before: retention would wait for them for ever."""
    home = stores.home
    known, processors = {unit.id for unit in units}, {unit.processor for unit in units}
    prefix = names.processor_key("")
    with home.view() as txn:
        ids = [key[len(prefix) :].decode() for key, _ in home.rows(txn, prefix)]
        gone = {id: read_topology(txn, id) for id in ids if id not in known and id.partition("/")[0] in processors}

    def forget(txn: Any) -> None:
        for id, topology in gone.items():
            txn.delete(names.processor_key(id))
            txn.delete(names.topology_key(id))
            for queue, store in zip(topology.queues, topology.stores) if topology else ():
                if not store:
                    txn.delete(names.subscription_key(queue, id))

    if gone:
        home.commit(forget)
    for id, topology in gone.items():
        for queue, store in zip(topology.queues, topology.stores) if topology else ():
            if store in stores.others:
                abroad.drop_mark(stores.others[store], queue, abroad.Reader(home.id, id, 0))


def _claim(
    stores: Stores, nodes: Sequence[Node], queues: dict[str, Queue], ownership: Ownership, accept_topology: bool
) -> dict[str, ProcessorRow]:
    """Claim the processors, with marks in other stores before there are positions that need them."""
    before = _topologies(stores.home, ownership.claimants)
    begun, epoch = _begin_marks(stores.home, nodes, queues)
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
    elsewhere: set[str],
    marks: dict[str, dict[str, Marked]],
    queues: dict[str, Queue],
) -> Forwarder:
    """The forwarder to one other store, compared with what that one got; not for processors that run ``elsewhere``."""
    forked = {delivery.node.id for delivery in deliveries if other.id in delivery.forks}
    here = [marked for of_node in marks.values() for marked in of_node.values() if marked.mark.queue.store is other]
    there = {name: queue for name, queue in queues.items() if queue.store is other}
    processors = sorted(forked | (stores.left_over.get(other.id, set()) - elsewhere))
    forwarder = Forwarder(stores.home, other, processors, here, there)
    forwarder.compare()
    return forwarder


def _finish_pending(
    home: Store,
    node: Node,
    row: ProcessorRow,
    there: Sequence[Queue],
    give_up: bool,
    emit: Callable[[events.Event], None],
) -> None:
    """Finish what a processor wrote by pending messages when it was declared so, which it is not any more."""
    for what in pending.finish(home, node.id, row, there, give_up).values():
        emit(events.Event(node.id, f"given up: {what}", logging.WARNING))


def refuse_frames(plan: Plan) -> None:
    """Refuse what only Spark can run."""
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
    home: Store, nodes: Sequence[Node], rows: dict[str, ProcessorRow], queues: dict[str, Queue]
) -> dict[str, dict[str, Marked]]:
    """The low-water marks in other stores, by processor and tailer id."""
    found: dict[str, dict[str, Marked]] = {}
    for node in nodes:
        found[node.id] = {}
        reader = abroad.Reader(home.id, node.id, rows[node.id].epoch)
        by_tailer = {node.tailer(port.queue): port.queue for port in node.reads}
        for place, tailer in enumerate(sorted(by_tailer)):
            if by_tailer[tailer] in queues:
                log = queues[by_tailer[tailer]].view(node.partition)
                mark = abroad.LowWater(log, reader, holding=rows[node.id].pending)
                found[node.id][tailer] = Marked(mark, place)
    return found


def _begin_marks(
    home: Store, nodes: Sequence[Node], queues: dict[str, Queue]
) -> tuple[list[tuple[Queue, abroad.Reader]], int]:
    """Make the marks that are missing, before there are positions that need them.

    Returns those made, and the highest epoch of those that were there: a home store that was put back
    has a lower one, and its owner could not write its marks.
    """
    begun: list[tuple[Queue, abroad.Reader]] = []
    highest = 0
    for node in nodes:
        reader = abroad.Reader(home.id, node.id, 0)
        for port in node.reads:
            queue = queues[port.queue].view(node.partition)
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
