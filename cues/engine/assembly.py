"""From a plan to owned, recovered processors on a store: what every engine does before it runs.

1. open the store, make the queues and try logs that are missing
2. take the locks of all processors, or none
3. claim: raise every epoch, in one transaction
4. recover each processor by the start table
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cues import events, names
from cues.delivery import Delivery
from cues.feed import SourceDelivery
from cues.graph import Graph
from cues.log import Log
from cues.options import QueueOptions
from cues.ownership import Claimant, Ownership, ProcessorRow
from cues.plan import Plan
from cues.queue import Queue, create_queue
from cues.runner import Pause
from cues.store import Store

TRY_LOG = QueueOptions(metadata=False)


@dataclass
class Assembly:
    """A graph's processors, owned by this process and recovered, not running yet."""

    plan: Plan
    store: Store
    owns_store: bool
    ownership: Ownership
    deliveries: list[Delivery]
    queues: dict[str, Queue]

    def close(self) -> None:
        """Give the processors up, and the store where it was opened here."""
        for delivery in self.deliveries:
            delivery.close()
        self.ownership.release()
        if self.owns_store:
            self.store.close()


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
) -> Assembly:
    """Do the four moves. Raises before anything of the graph ran, and leaves nothing locked then."""
    plan = graph.plan()
    opened, owned = open_store(graph, store)
    ownership = None
    try:
        queues = _prepare(plan, graph, opened)
        claimants = [
            Claimant(
                node.id,
                node.kind,
                {names.tailer_id(node.id, port.queue): Log(opened, port.queue) for port in node.reads},
            )
            for node in plan.running
        ]
        ownership = Ownership(opened, claimants, take_over)
        rows: dict[str, ProcessorRow] = ownership.claim(accept_topology)
        deliveries: list[Delivery] = []
        for node in plan.running:
            kind = SourceDelivery if node.kind == "source" else Delivery
            delivery = kind(opened, node, rows[node.id], system=plan.system, pause=pause, stopping=stopping, emit=emit)
            delivery.recover()
            deliveries.append(delivery)
    except BaseException:
        if ownership is not None:
            ownership.release()
        if owned:
            opened.close()
        raise
    return Assembly(plan, opened, owned, ownership, deliveries, queues)


def _prepare(plan: Plan, graph: Graph, store: Store) -> dict[str, Queue]:
    """Have every queue and try log, with the options that the graph gives."""

    def create(txn: Any) -> None:
        for name, options in plan.queues.items():
            create_queue(txn, store, name, options)
        for node in plan.running:
            create_queue(txn, store, node.id, TRY_LOG)

    with store.view() as txn:
        missing = [
            name
            for name in (*plan.queues, *(node.id for node in plan.running))
            if txn.get(names.queue_key(name)) is None
        ]
    if missing:
        store.commit(create)
    queues: dict[str, Queue] = {}
    for name in plan.queues:
        # Options that the graph gives hold from now on; without any the queue stays as it is.
        given = graph.queues.get(name) or graph.queues.get("*")
        queues[name] = store.queue(name, **(vars(given) if given else {}))
    return queues
