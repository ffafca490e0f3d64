"""Cues: queues on local append logs, and processors that move messages between them exactly once.

    with cues.open("data") as store:                         a store holds queues
        store.queue("orders").appender().write({"x": 1})     messages are dicts

    graph = cues.Graph("example")                            processors move them
    @graph.stream("orders", "priced")
    def price(order): ...

Importing this package loads neither lmdb nor click: each name is loaded when it is first used. All errors are in
:mod:`cues.errors`; those that programs catch most often are here as well.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cues import checkpoints, codec, errors, faults, groups, processors, schemas, testing, txn
    from cues.engine.pausing import pause, resume
    from cues.engine.redriving import discard, list_errors, redrive
    from cues.errors import (
        AlreadyRunning,
        CuesError,
        Fenced,
        GraphError,
        MessagesPurged,
        ProcessorStopped,
        QueueNotFound,
        StoreError,
        WaitTimeout,
    )
    from cues.graphs.compose import broadcast
    from cues.graphs.declaration import AllOf, AnyOf, Frame, Sink, Source, Stream
    from cues.graphs.graph import Graph, merge
    from cues.graphs.outage import Outage
    from cues.graphs.retry import Retry
    from cues.graphs.running import Running
    from cues.graphs.schedules import cron, every
    from cues.queues.appender import Appender
    from cues.queues.options import QueueOptions, Retention, delayed, duration_of
    from cues.queues.queue import Queue
    from cues.queues.store import Store, Transaction
    from cues.queues.store import Store as open
    from cues.queues.tailer import Envelope, Tailer, alts
    from cues.steps.failure import error_context
    from cues.steps.process import Delivery, Process
    from cues.tools.replay import replay

    __version__: str

# fmt: off
__all__ = [
    "AllOf", "AlreadyRunning", "AnyOf", "Appender", "CuesError", "Delivery", "Envelope", "Fenced", "Frame", "Graph",
    "GraphError", "MessagesPurged", "Outage", "Process", "ProcessorStopped", "Queue", "QueueNotFound",
    "QueueOptions", "Retention", "Retry", "Running", "Sink", "Source", "Store", "StoreError", "Stream", "Tailer",
    "Transaction", "WaitTimeout", "alts", "broadcast", "checkpoints", "codec", "cron", "delayed", "discard",
    "duration_of", "error_context", "errors", "every", "faults", "groups", "list_errors", "merge", "open", "pause",
    "processors", "redrive", "replay", "resume", "schemas", "testing", "txn",
]
# fmt: on

_MODULES = {
    "engine.pausing": "pause resume",
    "engine.redriving": "discard list_errors redrive",
    "errors": "AlreadyRunning CuesError Fenced GraphError MessagesPurged ProcessorStopped QueueNotFound StoreError"
    " WaitTimeout",
    "graphs.compose": "broadcast",
    "graphs.graph": "Graph merge",
    "graphs.outage": "Outage",
    "graphs.retry": "Retry",
    "graphs.running": "Running",
    "graphs.schedules": "cron every",
    "graphs.declaration": "AllOf AnyOf Frame Sink Source Stream",
    "queues.appender": "Appender",
    "queues.options": "QueueOptions Retention delayed duration_of",
    "queues.queue": "Queue",
    "queues.store": "Store Transaction",
    "queues.tailer": "Envelope Tailer alts",
    "steps.failure": "error_context",
    "steps.process": "Delivery Process",
    "tools.replay": "replay",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def _load(name: str) -> Any:
    """Load a name on its first use (PEP 562)."""
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("cues-streams")
    elif name == "open":
        value = import_module("cues.queues.store").Store
    elif name in _MODULE_OF:
        value = getattr(import_module(f"cues.{_MODULE_OF[name]}"), name)
    elif name in __all__:
        value = import_module(f"cues.{name}")
    else:
        return _former(name)
    globals()[name] = value
    return value


def _former(name: str) -> Any:
    """Return an error class that was here until version 0.1, with a warning."""
    value = getattr(import_module("cues.errors"), name, None)
    if not (isinstance(value, type) and issubclass(value, Exception)):
        raise AttributeError(f"module 'cues' has no attribute {name!r}")
    warnings.warn(f"cues.{name} is deprecated: use cues.errors.{name}.", DeprecationWarning, stacklevel=3)
    return value


if not TYPE_CHECKING:  # for a type checker it would define every name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
