"""The entry for ``engine="spark"``.

graph.start(engine="spark")                     a session of its own (driver.py)
graph.start(engine="spark", spark=session)      a session of the user, never stopped
graph.start(engine="spark", backfill=True)      all messages of the queues, in long steps (backfill.py)
graph.start(engine="spark", queues=DIR)         queues on a shared filesystem (cluster/engine.py)
graph.start(engine="spark", conf={...})         with settings of Spark (conf.py)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cues.base import events
from cues.engine.engine import Engine
from cues.engine.running import GraphRun
from cues.errors import InvalidArgument
from cues.graphs.graph import Graph
from cues.spark.backfill import BackfillEngine
from cues.spark.conf import checked
from cues.spark.driver import SparkEngine
from cues.spark.installed import require_packages

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
    conf: Mapping[str, str] | None = None,
) -> GraphRun:
    """Start a graph on Spark, for :meth:`Graph.start` with ``engine="spark"``.

    With ``queues`` all queues except those of sources are in that directory (:mod:`cues.spark.cluster`).
    """
    settings = checked(conf)
    options: dict[str, Any] = {"store": store, "accept_topology": accept_topology, "take_over": take_over}
    engine: Engine
    if queues is not None:
        require_packages("queues=", "deltalake")
        from cues.spark.cluster.engine import ClusterEngine

        if backfill:
            raise InvalidArgument(
                "backfill=True processes queues of a store, and the queues of queues= are not in a store.",
                "pass backfill=True or queues=, but not both.",
            )
        engine = ClusterEngine(graph, queues, spark, master, settings, **options)
    elif backfill:
        engine = BackfillEngine(graph, spark, master, settings, **options)
    else:
        engine = SparkEngine(graph, spark, master, settings, **options)
    return GraphRun(graph, engine, listeners)
