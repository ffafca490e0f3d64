"""The session of a graph, and the way of the user's functions to its executors.

Functions of the graph file and of its folder travel by value, as those of ``__main__`` do. The folder is also put on
the path of the Python workers, for the modules that these functions import. Everything else must be installed on the
executors, or be sent with ``--py-files``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from cues.base import events
from cues.graphs.processor import Node
from cues.spark.conf import CONNECT, no_driver
from cues.spark.executor import require_arrival, require_travel
from cues.spark.session import opened_session, require_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cues.graphs.graph import Graph
    from cues.graphs.plan import Plan


_shipping: Final = threading.Lock()
"""Held while the environment of a session's workers is changed: two graphs may start on one session."""


def open_session(
    opened: contextlib.ExitStack,
    graph: Graph,
    plan: Plan,
    spark: SparkSession | None,
    master: str | None,
    remote: Iterable[Node],
    emit: Callable[[events.Event], None],
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Open the session of a graph, whose executors call the functions of the ``remote`` processors.

    ``opened`` ends the session, if it was made here. Raises :class:`GraphError` if a function cannot be sent, or cannot
    be loaded by an executor, and :class:`Unsupported` if the session's workers have another Python or no Cues.
    """
    if (master or "").startswith(CONNECT) or (spark is not None and not hasattr(spark, "sparkContext")):
        raise no_driver()
    session = opened.enter_context(opened_session(master, f"cues {graph.id}", spark, conf))
    ship(session, graph, plan)
    require_workers(session, lambda text: emit(events.Event("", text, logging.WARNING)))
    called = [node for node in remote if node.kind != "frame"]
    require_arrival(session.sparkContext, [packed for node in called for packed in require_travel(node, plan.system)])
    return session


def ship(session: SparkSession, graph: Graph, plan: Plan) -> None:
    """Make the user's functions loadable on executors."""
    context = session.sparkContext
    folders = _folders(graph)
    with _shipping:
        before = context.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        path = [*map(str, folders), *before.split(os.pathsep)]
        # Another dict, because pyspark reads the old one in other threads, for their jobs.
        context.environment = {
            **context.environment,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path))),
        }
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
    """The modules of the graph's functions that are in these folders, and are not installed."""
    modules: dict[str, ModuleType] = {}
    for node in plan.running:
        for fn in (node.fn, node.options.key, node.options.where):
            name = getattr(fn, "__module__", None) or ""
            file = getattr(sys.modules.get(name), "__file__", None)
            if not file or name == "__main__" or name.partition(".")[0] == "cues":
                continue
            place = Path(file).resolve()
            if "site-packages" not in place.parts and any(folder in place.parents for folder in folders):
                modules[name] = sys.modules[name]
    return modules.values()
