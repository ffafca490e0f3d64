"""The stores of a graph: its own, and those of queues that have a path.

    open_stores   open them; raises :class:`Diverged` if a store was replaced by another one, or is a copy
    prepare       open every queue, and make those that are missing
    prepare_units make the try logs and fork queues of the units that this process runs

The home store remembers the id and the path of each store that the graph has used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from cues.base import events, names
from cues.base.data import dataclass
from cues.base.names import ProcessorKey
from cues.engine import replays
from cues.engine.growth import Emit
from cues.engine.identities import keyed
from cues.errors import Diverged
from cues.forwarding import other_stores
from cues.graphs.graph import Graph
from cues.graphs.plan import Plan
from cues.graphs.processor import Node
from cues.queues.options import QueueOptions, changed, kept_in_store, to_open
from cues.queues.queue import Queue, create_queue
from cues.queues.store import Store, open_or_make
from cues.storage.transaction import StoreTransaction

TRY_LOG: Final = QueueOptions(metadata=False)


@dataclass
class Stores:
    """The home store of a graph, and the stores of queues that have a path."""

    home: Store
    opened: list[Store]
    """The stores that this start opened, and that it closes."""
    others: dict[bytes, Store] = field(default_factory=dict)
    """By id."""
    of_queue: dict[str, Store] = field(default_factory=dict)
    """The stores of the queues that are not in the home store."""
    left_over: dict[bytes, set[ProcessorKey]] = field(default_factory=dict)
    """Processors with a fork queue from earlier starts, by the id of the store that it is for."""

    guarded: list[Store] = field(default_factory=list)
    """The stores whose disk the run guards, so that its steps may use the reserve (disk_guard.py)."""

    def guard(self) -> None:
        for store in (self.home, *self.others.values()):
            if not store.readonly:
                store.core.environment.allocation.guarded += 1
                self.guarded.append(store)

    def store_of(self, queue: str) -> Store:
        return self.of_queue.get(queue, self.home)

    def close(self) -> None:
        while self.guarded:
            self.guarded.pop().core.environment.allocation.guarded -= 1
        for store in reversed(self.opened):
            store.close()


def open_stores(
    graph: Graph, plan: Plan, store: str | os.PathLike[str] | Store | None, accept_topology: bool, emit: Emit
) -> Stores:
    """Open the home store and the others. If it raises, no store is left open."""
    home, owned = _open_home(graph, store)
    stores = Stores(home, [home] if owned else [])
    try:
        replays.refuse(home)
        _open_others(stores, plan, graph, accept_topology)
        _find_left_over(stores, plan, accept_topology, emit)
        _say_durability(stores, plan, emit)
        stores.guard()
    except BaseException:
        stores.close()
        raise
    return stores


def _open_home(graph: Graph, store: str | os.PathLike[str] | Store | None) -> tuple[Store, bool]:
    """The graph's store, and whether it was opened here."""
    given: Any = store if store is not None else graph.store
    if isinstance(given, Store):
        return given, False
    return Store(given if given is not None else graph.store_path(), durability=graph.durability), True


def _open_others(stores: Stores, plan: Plan, graph: Graph, accept_topology: bool) -> None:
    """Open the stores of queues that have a ``path``. Raises :class:`Diverged` if one was replaced by another."""
    home = stores.home
    known: dict[str, set[bytes]] = {}
    for id, places in other_stores.places(home).items():
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
                raise _exchanged(path, f"which has queue {name!r}", "is gone")
            other = open_or_make(path, graph.durability)
            stores.opened.append(other)
            if other.core.same_as(home.core):
                other = home
            else:
                twin = home if other.id == home.id else stores.others.get(other.id)
                if twin is not None and not other.core.same_as(twin.core):
                    raise _copied(path, name, twin)
                other = stores.others.setdefault(other.id, other)
            if expected and other.id not in expected and not accept_topology:
                raise _exchanged(
                    path, f"which has queue {name!r}", "is another one than the one that this graph has used"
                )
            by_path[real] = other
            other.core.search()
        if by_path[real] is not home:
            stores.of_queue[name] = by_path[real]


def _copied(path: Path, queue: str, twin: Store) -> Diverged:
    return Diverged(
        f"The store {path}, which has queue {queue!r}, is a copy of {twin.path}: both have the id {twin.id.hex()},"
        " and one id is one store.",
        f"set the path of the queue to {twin.path}, or to another store.",
        processor="",
    )


def _exchanged(path: Path, use: str, what: str) -> Diverged:
    return Diverged(
        f"The store {path}, {use}, {what}.",
        "put back the store that was there; or start with --accept-topology to continue without it and to give up the"
        " messages that had not been forwarded to it.",
        processor="",
    )


def _find_left_over(stores: Stores, plan: Plan, accept_topology: bool, emit: Emit) -> None:
    """Open the stores of fork queues from earlier starts.

    The graph may not write there any more. The messages that it wrote before are still forwarded.
    """
    home = stores.home
    places = other_stores.places(home)
    for queue in home.queues(all=True):
        parts = names.split_fork(queue)
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
                        f"the store {where} is gone: of the last {len(opened):,} messages for it, those that had not"
                        " been forwarded are given up",
                        logging.WARNING,
                    )
                )
                _drop_all(opened)
        if id in stores.others:
            stores.left_over.setdefault(id, set()).add(processor)


def _drop_all(queue: Queue) -> None:
    def drop(txn: StoreTransaction) -> bool:
        row = queue.core.log.row(txn)
        queue.core.log.move_front(txn, row, row.next)
        more, _ = queue.core.log.delete_before(txn, row, row.next)
        return more

    while queue.store.core.commit(drop):
        pass


def _say_durability(stores: Stores, plan: Plan, emit: Emit) -> None:
    weak = [store for store in (stores.home, *stores.others.values()) if store.durability == "process"]
    if weak and len(weak) <= len(stores.others):
        emit(
            events.Event(
                plan.id,
                "its stores differ in durability, and the weakest one counts: after a power cut "
                + ", ".join(store.path for store in weak)
                + " ('process') may be damaged, and the next start reports the messages that do not fit together",
                logging.WARNING,
            )
        )


def prepare(stores: Stores, plan: Plan, graph: Graph, emit: Emit, by_supervisor: bool = False) -> dict[str, Queue]:
    """Open every queue with the options that the graph gives. Make those that are missing.

    ``by_supervisor``: a supervisor has made them. They may have got more partitions since then, which is not an error.
    """
    home = stores.home
    wanted: dict[Store, dict[str, QueueOptions]] = {store: {} for store in (home, *stores.others.values())}
    for name in plan.queues:
        wanted[stores.store_of(name)][name] = kept_in_store(plan.new_options(name))
    for store, queues in wanted.items():
        _have(store, queues)
    for other in stores.others.values():
        other_stores.remember(home, other)
    opened: dict[str, Queue] = {}
    for name in plan.queues:
        # Options of the graph apply from now on. Without options the queue stays as it is.
        given = graph.queues.get(name) or graph.queues.get("*")
        if given and by_supervisor:
            given = changed(given, {"partitions": 1})
        store = stores.store_of(name)
        if store is home:
            opened[name] = home.queue(name, **(to_open(kept_in_store(given)) if given else {}))
        else:
            opened[name] = _shared_queue(store, name, kept_in_store(given) if given else QueueOptions(), emit)
    return opened


def _have(store: Store, queues: Mapping[str, QueueOptions]) -> None:
    """Make the queues that are missing, in one transaction."""

    def create(txn: StoreTransaction, missing: list[str]) -> None:
        for name in missing:
            create_queue(txn, store, name, queues[name])

    with store.core.view() as txn:
        missing = [name for name in queues if txn.get(names.queue_key(name)) is None]
    if missing:
        store.core.commit(create, missing)


def prepare_units(stores: Stores, units: Sequence[Node]) -> list[Node]:
    """Make the try log of each unit, and a fork queue for each other store that it writes to.

    Returns the units with the keys under which the store keeps them.
    """
    home = stores.home
    units = keyed(home, units)
    wanted: dict[str, QueueOptions] = {}
    for node in units:
        wanted[node.key] = TRY_LOG
        if node.pending:
            continue
        targets = {stores.store_of(queue) for queue in (*(port.queue for port in node.writes), node.errors) if queue}
        for other in targets - {home}:
            from cues.forwarding import fork

            wanted[names.fork_id(node.key, other.id)] = fork.OPTIONS
    _have(home, wanted)
    return units


def _shared_queue(store: Store, name: str, given: QueueOptions, emit: Emit) -> Queue:
    """Open a queue of another store. Other graphs may use it, so options that this graph does not give stay."""
    queue = store.queue(name)
    before = queue.options
    options = {option: getattr(given, option) for option in given.to_dict()}
    queue.core.give(given)
    known = before.to_dict()
    changed = [option for option, value in given.to_dict().items() if known.get(option) != value]
    if changed:
        queue = store.queue(name, **options)
        now = queue.options.to_dict()
        what = ", ".join(f"{option} from {known.get(option, 'the default')} to {now[option]}" for option in changed)
        text = f"queue {name} of {store.path} is changed for all graphs that use it: {what}"
        emit(events.Event("", text, logging.WARNING))
    return queue
