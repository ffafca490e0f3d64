"""A graph that runs on Spark: its session, its functions on executors, and the checks before the start."""

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
from typing import TYPE_CHECKING, Any, Final

from cues.base import events
from cues.engine.running import Running
from cues.errors import GraphError
from cues.graphs.graph import Graph
from cues.graphs.plan import Plan
from cues.graphs.processor import FRAME, Node
from cues.spark.executor import require_travel
from cues.spark.remote import SparkRunner, require_sight, why_local
from cues.spark.session import is_local
from cues.spark.session import session as session_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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


# --- what runs where ----------------------------------------------------------------------------


def check(plan: Plan) -> None:
    """Refuse by name what cannot run on Spark, before anything is started."""
    for node in plan.running:
        if node.pending:
            raise GraphError(
                f"{node.id} has across='pending', which only the embedded engine does.",
                "use the embedded engine, or across='forwarded'.",
                processor=node.name,
            )
        if node.imperative:
            raise GraphError(
                f"{node.id} is imperative (tailers=, appenders=), which cannot run on Spark: its function would"
                " read and write the driver's store from an executor.",
                "use the embedded engine, or declare inputs and outputs.",
                processor=node.name,
            )


def place(node: Node) -> str:
    """The place where a processor's function runs, for ``cues show --engine spark``."""
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
    """The folders of the user's modules: that of the graph file, else that of the program and the current folder."""
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
