"""The driver of a graph on Spark: the embedded engine, whose functions executors call.

The driver does what a process of the embedded engine does: it owns the processors, takes, commits and recovers,
in the stores of the graph. So the engines can take turns on one store. Executors read the
queues from these stores, and must see them under the same paths.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cues.base import events
from cues.engine.engine import Host
from cues.engine.local import EmbeddedEngine
from cues.graphs.graph import Graph
from cues.graphs.processor import Node
from cues.overrides import override
from cues.spark import staging
from cues.spark.plans import queries_of, require_steps
from cues.spark.remote import SparkRunner, require_sight, why_local
from cues.spark.session import is_local
from cues.spark.shipping import open_session
from cues.spark.stretches import StretchStepper

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkEngine(EmbeddedEngine):
    """Threads of this process, whose functions executors call. An :class:`Engine`."""

    def __init__(
        self,
        graph: Graph,
        spark: SparkSession | None,
        master: str | None,
        conf: Mapping[str, str],
        **options: Any,
    ) -> None:
        super().__init__(graph, stepper_type=StretchStepper, **options)
        self._given, self._master, self._conf = spark, master, conf
        self._session = contextlib.ExitStack()

    @override
    def start(self, host: Host) -> None:
        graph = self.graph
        plan = graph.plan()
        try:
            remote = [node for node in plan.running if why_local(node) is None]
            given = self._given, self._master, remote, host.emit, self._conf
            self.spark = open_session(self._session, graph, plan, *given)
            require_steps(queries_of(self.spark, plan))
            self._options["runner"] = functools.partial(SparkRunner, self.spark)
            super().start(host)
            staging.sweep(self.store.directory)
            self._require_sight()
        except BaseException:
            self._session.close()
            raise
        address = self.spark.sparkContext.uiWebUrl
        text = f"{graph.id} runs on Spark {self.spark.version}" + (f": {address}" if address else "")
        host.emit(events.Placed("", text, url=address))

    def _require_sight(self) -> None:
        """On a cluster: close everything if an executor cannot read the stores."""
        context = self.spark.sparkContext
        if is_local(context.master or ""):
            return
        stores = self.assembly.stores
        try:
            require_sight(context, (stores.home, *stores.others.values()))
        except BaseException:
            self.host.halt()
            self.join(30.0)
            self.close()
            raise

    @override
    def join(self, timeout: float) -> None:
        try:
            super().join(timeout)
        except BaseException:
            self._session.close()
            raise

    @override
    def close(self) -> None:
        """Give everything back. A session of the user continues."""
        try:
            super().close()
        finally:
            self._session.close()


def place(node: Node) -> str:
    """The place where a processor's function runs, for ``cues show --engine spark``."""
    why = why_local(node)
    if why is not None:
        return f"in the driver: {why}"
    return "on all executors, a batch each" if node.options.batch else "on all executors"
