"""A graph on Spark: the embedded engine, whose functions executors call.

    graph.start(engine="spark")                     a session of its own
    graph.start(engine="spark", spark=session)      the user's, never stopped
    graph.start(engine="spark", queues=DIR)         queues on a shared filesystem (cluster/)

The driver is what a process of the embedded engine is: it owns the processors, takes, commits, recovers,
and the stores are those of the graph; so the engines can take turns on one store. Executors read the
queues from these stores, and must see them under the same paths.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cues.base import events
from cues.engine.running import Running
from cues.errors import InvalidArgument
from cues.graphs.graph import Graph
from cues.spark.backfill import Backfill
from cues.spark.running import SparkRunning, check, ship

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cues.queues.store import Store


def start(
    graph: Graph,
    *,
    spark: SparkSession | None = None,
    master: str | None = None,
    queues: str | os.PathLike[str] | None = None,
    store: str | os.PathLike[str] | Store | None = None,
    accept_topology: bool = False,
    take_over: bool = False,
    listeners: tuple[events.Listener, ...] = (),
    backfill: bool = False,
) -> Running:
    """Start a graph on Spark, for :meth:`Graph.start` with ``engine="spark"``.

    With ``queues`` all queues but those of sources lie there (:mod:`cues.spark.cluster`); ``backfill``: see
    :mod:`cues.spark.backfill`.
    """
    if queues is not None:
        from cues.spark.cluster.engine import ClusterRunning

        check(graph.plan())
        if backfill:
            raise InvalidArgument(
                "backfill=True works off the queues of a store, and queues= are not in one.", "pass one of the two."
            )
        return ClusterRunning(
            graph,
            queues,
            spark,
            master,
            ship=ship,
            store=store,
            accept_topology=accept_topology,
            take_over=take_over,
            listeners=listeners,
        )
    return (Backfill if backfill else SparkRunning)(
        graph,
        spark,
        master,
        store=store,
        accept_topology=accept_topology,
        take_over=take_over,
        listeners=listeners,
    )
