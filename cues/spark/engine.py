"""A graph on Spark: the embedded engine, whose functions executors call.

    graph.start(engine="spark")                     a session of its own
    graph.start(engine="spark", spark=session)      the user's, never stopped
    graph.start(engine="spark", queues=DIR)         queues on a shared filesystem (cluster/)

The driver is what a process of the embedded engine is: it owns the processors, takes, commits, recovers,
and the stores are those of the graph; so the engines can take turns on one store. Executors read the
queues from these stores, and must see them under the same paths.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from cues import events
from cues.delivery import Delivery
from cues.engine.local import Running, Worker
from cues.errors import GraphError, InvalidArgument
from cues.graph import Graph
from cues.plan import Plan
from cues.processor import FRAME, Node
from cues.spark import staging
from cues.spark.backfill import LOOK_S, BackfillDelivery, Rounds, Turns
from cues.spark.remote import SparkRunner, require_sight, require_travel, why_local
from cues.spark.session import is_local
from cues.spark.session import session as session_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cues.store import Store

EXECUTORS_LATE_S: Final = 20.0
"""When the wait for executors is worth a word; Spark itself waits for ever, and logs it where nobody looks."""


class SparkRunning(Running):
    """A graph that was started on Spark; used as any other."""

    def __init__(self, graph: Graph, spark: SparkSession | None, master: str | None, **options: Any) -> None:
        plan = graph.plan()
        check(plan)
        self._session = contextlib.ExitStack()
        try:
            self.spark = self._session.enter_context(session_of(master, f"cues {graph.id}", spark=spark))
            ship(self.spark, graph, plan)
            for node in plan.running:
                if why_local(node) is None and node.options.batch != FRAME:
                    require_travel(node, plan.system)
            super().__init__(graph, runner=functools.partial(SparkRunner, self.spark, plan.system), **options)
            self._look_around()
        except BaseException:
            self._session.close()
            raise
        address = self.spark.sparkContext.uiWebUrl
        text = f"{graph.id} runs on Spark {self.spark.version}" + (f": {address}" if address else "")
        self.emit(events.Placed("", text, url=address))

    def _look_around(self) -> None:
        """On a cluster: wait for executors, and close everything where one cannot read the stores."""
        context = self.spark.sparkContext
        master = context.master or ""
        if is_local(master):
            return
        late = threading.Timer(
            EXECUTORS_LATE_S,
            self.emit,
            [
                events.Event(
                    "",
                    f"{master} gives no executors yet: no free core (spark.cores.max), or no worker with"
                    " enough memory (spark.executor.memory, SPARK_EXECUTOR_MEMORY)",
                    logging.WARNING,
                )
            ],
        )
        late.daemon = True
        late.start()
        stores = self._assembly.stores
        try:
            require_sight(context, (stores.home, *stores.others.values()))
        except BaseException:
            super().close()
            raise
        finally:
            late.cancel()

    def close(self, timeout: float = 30.0) -> None:
        """Halt, wait for the steps under way, and give everything back; a session of the user's goes on."""
        try:
            super().close(timeout)
        finally:
            self._session.close()


class Backfill(SparkRunning):
    """A graph that works off what lies on its queues, and ends; used as any other, but that no source runs."""

    pulls: ClassVar[bool] = False

    def __init__(self, graph: Graph, spark: SparkSession | None, master: str | None, **options: Any) -> None:
        super().__init__(graph, spark, master, delivery=BackfillDelivery, **options)
        staging.sweep(self.store.path)

    def _start_threads(self) -> None:
        units: dict[str, list[str]] = {}
        for delivery in self._assembly.deliveries:
            units.setdefault(self.plan.node(delivery.node.processor).name, []).append(delivery.node.id)
        order = [name for name in self.plan.topology().order() if name in units and self.plan.node(name).inputs]
        self.rounds = Rounds([unit for name in order for unit in units[name]])
        super()._start_threads()

    def _worker(self, delivery: Delivery) -> Worker:
        return Turns(self, delivery)

    @functools.cached_property
    def ends(self) -> dict[str, int]:
        """Where the logs ended at the start that only others write to: what comes later is not waited for."""
        nodes = [node for node in self.plan.running if node.inputs]
        written = {port.queue for node in nodes for port in node.writes} | {node.errors for node in nodes}
        return {
            view.log.id: view.row().next
            for name, queue in self._assembly.queues.items()
            if name not in written
            for view in queue.views
        }

    def settle(self) -> None:
        """Wait until what was written for other stores lies there, or is not forwarded any more."""
        while self.couriers and not self.halted:
            with self.store.view() as txn:
                ends = [courier.forwarder.ends(txn) for courier in self.couriers]
            if all(courier.idle(end) for courier, end in zip(self.couriers, ends)) or self.pause(LOOK_S):
                return

    def wait_done(self, idle_exit_s: float | None = None) -> bool:
        """Wait until everything is worked off; False when it was halted before. It ends by itself."""
        return self._wait(lambda: all(worker.finished for worker in self.workers) and self.idle(), None)


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
    """What :meth:`Graph.start` does with ``engine="spark"``.

    With ``queues`` all queues but those of sources lie there (:mod:`cues.spark.cluster`); ``backfill``: see
    :mod:`cues.spark.backfill`.
    """
    if queues is not None:
        from cues.spark.cluster.engine import ClusterRunning

        check(graph.plan())
        if backfill:
            raise InvalidArgument(
                "backfill=True works off the queues of a store, and queues= are not in one.", "one of the two."
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


# --- what runs where ----------------------------------------------------------------------------


def check(plan: Plan) -> None:
    """Refuse by name what cannot run on Spark, before anything is started."""
    for node in plan.running:
        if node.pending:
            raise GraphError(
                f"{node.id} has across='pending', which only the embedded engine does.",
                "the embedded engine, or across='forwarded'.",
                processor=node.name,
            )
        if node.imperative:
            raise GraphError(
                f"{node.id} is imperative (tailers=, appenders=), which cannot run on Spark: its function would"
                " read and write the driver's store from an executor.",
                "the embedded engine, or inputs and outputs.",
                processor=node.name,
            )


def place(node: Node) -> str:
    """Where a processor's function runs, for ``cues show --engine spark``."""
    why = why_local(node)
    if why is not None:
        return f"in the driver: {why}"
    return "on an executor, a batch at a time" if node.options.batch else "on all executors"


def ship(session: SparkSession, graph: Graph, plan: Plan) -> None:
    """Let executors have the user's functions.

    What lies in the graph's folder travels by value, as ``__main__`` does; the folder is put on the path of
    Python workers, for what these functions import. Everything else must be installed there, or shipped
    with ``--py-files``.
    """
    context = session.sparkContext
    folders = _folders(graph)
    path = [
        *map(str, folders),
        *context.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")).split(os.pathsep),
    ]
    context.environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(one for one in path if one))
    from pyspark import cloudpickle

    for module in _modules_of(plan, folders):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _folders(graph: Graph) -> list[Path]:
    """Where the user's own modules lie: beside the graph file, else beside the program and in the current folder."""
    if graph.directory is not None:
        return [graph.directory.resolve()]
    program = getattr(sys.modules["__main__"], "__file__", None) or ""
    beside = [Path(program).resolve().parent] if program.endswith(".py") else []
    return [*beside, Path.cwd()]


def _modules_of(plan: Plan, folders: list[Path]) -> Iterable[ModuleType]:
    """The modules in these folders, not installed ones, that the graph's functions are from."""
    found: dict[str, ModuleType] = {}
    for node in plan.running:
        for fn in (node.fn, node.options.key, node.options.where):
            name = getattr(fn, "__module__", None) or ""
            file = getattr(sys.modules.get(name), "__file__", None)
            if not file or name == "__main__" or name.partition(".")[0] == "cues":
                continue
            place = Path(file).resolve()
            if "site-packages" not in place.parts and any(folder in place.parents for folder in folders):
                found[name] = sys.modules[name]
    return found.values()
