"""The embedded engine: threads for each processor of a graph, in this process.

A processor over partitioned queues has a unit for each partition. ``instances=n`` sets the number of
threads that its units are divided among; each thread steps its units in turn (threads.py). The started
graph is a :class:`Running` (running.py).

Threads and not one event loop, because user functions block: a sink that waits for its server must not
hold up the other processors. With large batches the interpreter lock costs little; with small ones the
writer of the store is the limit anyway.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cues.base import events
from cues.engine.running import Running

if TYPE_CHECKING:
    from cues.graphs.graph import Graph
    from cues.queues.store import Store


def start(
    graph: Graph,
    *,
    store: str | os.PathLike[str] | Store | None = None,
    accept_topology: bool = False,
    take_over: bool = False,
    listeners: tuple[events.Listener, ...] = (),
) -> Running:
    """Start ``graph`` in threads of this process; see :meth:`Graph.start`."""
    return Running(graph, store=store, accept_topology=accept_topology, take_over=take_over, listeners=listeners)
