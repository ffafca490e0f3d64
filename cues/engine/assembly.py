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
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cues import abroad, events, fork, names
from cues.delivery import Delivery
from cues.errors import CuesError, Diverged, GraphError, StoreError
from cues.feed import SourceDelivery
from cues.forwarder import Forwarder, Marked
from cues.graph import Graph
from cues.options import QueueOptions
from cues.ownership import Claimant, Ownership, ProcessorRow, Topology, read_topology
from cues.plan import Plan
from cues.processor import FRAME
from cues.queue import Queue, create_queue
from cues.runner import Pause, Runner
from cues.store import Store

TRY_LOG = QueueOptions(metadata=False)


@dataclass
class Stores:
    """The home store of a graph, and those of queues that lie elsewhere."""

    home: Store
    opened: list[Store]
    """Those that were opened here, to be closed here."""
    others: dict[bytes, Store] = field(default_factory=dict)
    """By id."""
    of_queue: dict[str, Store] = field(default_factory=dict)
    """Of the queues that are not at home."""

    def store_of(self, queue: str) -> Store:
        return self.of_queue.get(queue, self.home)

    def close(self) -> None:
        for store in reversed(self.opened):
            store.close()


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


def open_store(graph: Graph, store: str | os.PathLike[str] | Store | None) -> tuple[Store, bool]:
    """The graph's store, and whether it was opened here."""
    found: Any = store if store is not None else graph.store
    if isinstance(found, Store):
        return found, False
    return Store(found if found is not None else graph.store_path(), durability=graph.durability), True


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
) -> Assembly:
    """Do the five moves. Raises before anything of the graph ran, and leaves nothing locked then."""
    plan = graph.plan()
    if runner is Runner:
        _refuse_frames(plan)
    opened, owned = open_store(graph, store)
    stores = Stores(opened, [opened] if owned else [])
    ownership = None
    try:
        _open_others(stores, plan, graph, accept_topology)
        left_over = _left_over(stores, plan, accept_topology, emit)
        _say_durability(stores, plan, emit)
        queues = _prepare(stores, plan, graph, emit)
        claimants = []
        for node in plan.running:
            logs = {names.tailer_id(node.id, port.queue): queues[port.queue].log for port in node.reads}
            claimants.append(Claimant(node.id, node.kind, logs))
        ownership = Ownership(opened, claimants, take_over)
        before = _topologies(opened, claimants)
        begun, epoch = _begin_marks(opened, plan, queues)
        try:
            rows: dict[str, ProcessorRow] = ownership.claim(accept_topology, above=epoch)
        except BaseException:
            for queue, reader in begun:
                abroad.drop_mark(queue.store, queue.log.id, reader)
            raise
        _drop_marks(stores, claimants, before)
        deliveries: list[Delivery] = []
        marked: dict[bytes, list[Marked]] = {id: [] for id in stores.others}
        abroad_queues = {name: queue for name, queue in queues.items() if queue.store.id != opened.id}
        for node in plan.running:
            row = rows[node.id]
            reader = abroad.Reader(opened.id, node.id, row.epoch)
            marks: dict[str, abroad.LowWater] = {}
            for place, tailer in enumerate(sorted(names.tailer_id(node.id, port.queue) for port in node.reads)):
                queue = queues[tailer.removeprefix(node.id + ".")]
                if queue.store.id != opened.id:
                    marks[tailer] = abroad.LowWater(queue, reader, holding=row.pending)
                    marked[queue.store.id].append(Marked(marks[tailer], place))
            kind = SourceDelivery if node.kind == "source" else Delivery
            delivery = kind(
                opened,
                node,
                row,
                queues=abroad_queues,
                marks=marks,
                system=plan.system,
                pause=pause,
                stopping=stopping,
                emit=emit,
                runner=runner,
            )
            delivery.recover()
            deliveries.append(delivery)
        forwarders = []
        for id, other in stores.others.items():
            forked = {delivery.node.id for delivery in deliveries if id in delivery.forks}
            there = {name: queue for name, queue in abroad_queues.items() if queue.store is other}
            forwarder = Forwarder(opened, other, sorted(forked | left_over.get(id, set())), marked[id], there)
            forwarder.compare()
            forwarders.append(forwarder)
    except BaseException:
        if ownership is not None:
            ownership.release()
        stores.close()
        raise
    return Assembly(plan, stores, ownership, deliveries, forwarders, queues)


def _refuse_frames(plan: Plan) -> None:
    for node in plan.running:
        if node.options.batch == FRAME:
            raise GraphError(
                f"{node.id} is written for Spark, from DataFrame to DataFrame (graph.frame), and this is the embedded"
                " engine.",
                "cues run --engine spark; or a stream for both engines.",
                processor=node.name,
            )


# --- stores and queues --------------------------------------------------------------------------


def _open_others(stores: Stores, plan: Plan, graph: Graph, accept_topology: bool) -> None:
    """Open the stores of queues that have a ``path``; one that was exchanged for another is :class:`Diverged`."""
    home = stores.home
    known: dict[str, set[bytes]] = {}
    for id, places in abroad.places(home).items():
        for place in places:
            known.setdefault(os.path.realpath(place), set()).add(id)
    by_path: dict[str, Store] = {os.path.realpath(home.path): home}
    for name, options in plan.queues.items():
        if options.path is None:
            continue
        path = graph.place(options.path)
        real = os.path.realpath(path)
        expected = known.get(real)
        if real not in by_path:
            new = not (path / "data.mdb").exists()
            if new and expected and not accept_topology:
                raise _exchanged(path, f"in which queue {name!r} lies", "is gone")
            other = Store(path, durability=graph.durability if new else None)
            stores.opened.append(other)
            if other.same_as(home):
                other = home
            else:
                twin = home if other.id == home.id else stores.others.get(other.id)
                if twin is not None and not other.same_as(twin):
                    raise _copied(path, name, twin)
                other = stores.others.setdefault(other.id, other)
            if expected and other.id not in expected and not accept_topology:
                raise _exchanged(
                    path, f"in which queue {name!r} lies", "is another one than the one that this graph has used"
                )
            by_path[real] = other
        if by_path[real] is not home:
            stores.of_queue[name] = by_path[real]


def _copied(path: Path, queue: str, twin: Store) -> Diverged:
    return Diverged(
        f"The store {path}, in which queue {queue!r} lies, is a copy of {twin.path}: both have the id {twin.id.hex()},"
        " and one id is one store.",
        f"the path {twin.path}, or a store of its own.",
        processor="",
    )


def _exchanged(path: Path, use: str, what: str) -> Diverged:
    return Diverged(
        f"The store {path}, {use}, {what}.",
        "the store that was there; or --accept-topology to go on without it: what had not been forwarded to it"
        " is given up.",
        processor="",
    )


def _left_over(
    stores: Stores, plan: Plan, accept_topology: bool, emit: Callable[[events.Event], None]
) -> dict[bytes, set[str]]:
    """Processors with a fork queue from earlier starts, by the id of the store that it is for, which is opened.

    A graph may have stopped writing there; what it wrote before is forwarded all the same.
    """
    found: dict[bytes, set[str]] = {}
    home = stores.home
    places = abroad.places(home)
    for queue in home.queues(all=True):
        parts = names.fork_parts(queue)
        if parts is None or not parts[0].startswith(f"{plan.id}."):
            continue
        processor, id = parts
        opened = home.queue(queue)
        if id not in stores.others and len(opened):
            for place in places.get(id, []):
                if (place / "data.mdb").exists():
                    other = Store(place)
                    stores.opened.append(other)
                    if other.id == id:
                        stores.others[id] = other
                        break
            else:
                where = str(places[id][0]) if id in places else id.hex()
                if not accept_topology:
                    raise _exchanged(Path(where), f"for which {processor} has written messages", "is gone")
                emit(
                    events.Event(
                        processor,
                        f"what had not been forwarded to the store {where} is given up, as far as it is among the last"
                        f" {len(opened):,} messages: the store is gone",
                        logging.WARNING,
                    )
                )
                _drop_all(opened)
        if id in stores.others:
            found.setdefault(id, set()).add(processor)
    return found


def _drop_all(queue: Queue) -> None:
    def drop(txn: Any) -> bool:
        row = queue.log.row(txn)
        queue.log.move_front(txn, row, row.next)
        deleted, _ = queue.log.delete_before(txn, row, row.next)
        return deleted > 0

    while queue.store.commit(drop):
        pass


def _say_durability(stores: Stores, plan: Plan, emit: Callable[[events.Event], None]) -> None:
    weak = [one for one in (stores.home, *stores.others.values()) if one.durability == "process"]
    if weak and len(weak) <= len(stores.others):
        emit(
            events.Event(
                plan.id,
                "its stores differ in durability; after a power cut the weaker one holds: "
                + ", ".join(one.path for one in weak)
                + " may be damaged then ('process'), and the start says what does not fit together",
                logging.WARNING,
            )
        )


def _prepare(stores: Stores, plan: Plan, graph: Graph, emit: Callable[[events.Event], None]) -> dict[str, Queue]:
    """Have every queue, try log and fork queue, with the options that the graph gives."""
    home = stores.home
    wanted: dict[Store, dict[str, QueueOptions]] = {one: {} for one in (home, *stores.others.values())}
    for name, options in plan.queues.items():
        wanted[stores.store_of(name)][name] = options.inside
    for node in plan.running:
        wanted[home][node.id] = TRY_LOG
        targets = {stores.store_of(queue) for queue in (*(port.queue for port in node.writes), node.errors) if queue}
        for other in targets - {home}:
            wanted[home][names.fork_id(node.id, other.id)] = fork.OPTIONS

    def create(txn: Any, store: Store, missing: dict[str, QueueOptions]) -> None:
        for name, options in missing.items():
            create_queue(txn, store, name, options)

    for store, queues in wanted.items():
        with store.view() as txn:
            missing = {name: found for name, found in queues.items() if txn.get(names.queue_key(name)) is None}
        if missing:
            store.commit(create, store, missing)
    for other in stores.others.values():
        home.commit(abroad.remember, home, other)
    opened: dict[str, Queue] = {}
    for name in plan.queues:
        # Options that the graph gives hold from now on; without any the queue stays as it is.
        given = graph.queues.get(name) or graph.queues.get("*")
        store = stores.store_of(name)
        if store is home:
            opened[name] = home.queue(name, **(vars(given.inside) if given else {}))
        else:
            opened[name] = _shared_queue(store, name, given.inside if given else QueueOptions(), emit)
    return opened


def _shared_queue(store: Store, name: str, given: QueueOptions, emit: Callable[[events.Event], None]) -> Queue:
    """A queue of another store, which other graphs may use as well: what this one leaves unsaid stays as it is."""
    queue = store.queue(name)
    before = queue.options
    said = {option: getattr(given, option) for option in given.to_dict()}
    changed = [option for option, value in said.items() if getattr(before, option) != value]
    if changed:
        queue = store.queue(name, **said)
        was, now = before.to_dict(), queue.options.to_dict()
        what = ", ".join(f"{option} from {was.get(option, 'the default')} to {now[option]}" for option in changed)
        emit(events.Event("", f"queue {name} of {store.path} is changed for all who use it: {what}", logging.WARNING))
    return queue


# --- low-water marks ----------------------------------------------------------------------------


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


def _topologies(home: Store, claimants: list[Claimant]) -> dict[str, Topology | None]:
    with home.view() as txn:
        return {claimant.processor: read_topology(txn, claimant.processor) for claimant in claimants}


def _drop_marks(stores: Stores, claimants: list[Claimant], before: dict[str, Topology | None]) -> None:
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
