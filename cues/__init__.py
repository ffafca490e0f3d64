"""Cues: queues on local append logs, and processors that move messages between them exactly once.

    with cues.open("data") as store:                         a store holds queues
        store.queue("orders").appender().write({"x": 1})     messages are dicts

    graph = cues.Graph("example")                            processors move them
    @graph.stream("orders", "priced")
    def price(order): ...

Importing this package loads neither lmdb nor click: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cues import codec, errors, faults, groups, testing
    from cues.compose import broadcast
    from cues.errors import (
        AlreadyRunning,
        BatchDamaged,
        CheckpointError,
        Closed,
        CodecError,
        ConcurrentUse,
        CuesError,
        Desynchronised,
        Diverged,
        DurabilityMismatch,
        Fenced,
        Forked,
        FramingError,
        Gap,
        GraphError,
        InvalidArgument,
        InvalidName,
        JavaNotFound,
        MessagesPurged,
        MessageTooLarge,
        NoPartitions,
        NotInstalled,
        PositionMismatch,
        PositionRequired,
        ProcessorStopped,
        QueueInUse,
        QueueNotFound,
        QueueOptionsError,
        ReservedKey,
        ReturnError,
        SequenceError,
        StoreDamaged,
        StoreError,
        StoreForeign,
        StoreFull,
        StoreNotFound,
        StoreReadOnly,
        StoreVersion,
        TopologyChanged,
        UnexpectedEOF,
        Unsupported,
        WaitTimeout,
        WorkerDied,
        WriterStuck,
    )
    from cues.failure import error_context
    from cues.graph import Graph, merge
    from cues.options import QueueOptions, Retention
    from cues.process import Delivery, Process
    from cues.processor import AllOf, AnyOf, Retry, Sink, Source, Stream
    from cues.queue import Appender, Queue
    from cues.store import Store
    from cues.store import Store as open
    from cues.tailer import Envelope, Tailer, alts

    __version__: str

__all__ = [
    "AllOf",
    "AlreadyRunning",
    "AnyOf",
    "Appender",
    "BatchDamaged",
    "CheckpointError",
    "Closed",
    "CodecError",
    "ConcurrentUse",
    "CuesError",
    "Delivery",
    "Desynchronised",
    "Diverged",
    "DurabilityMismatch",
    "Envelope",
    "Fenced",
    "Forked",
    "FramingError",
    "Gap",
    "Graph",
    "GraphError",
    "InvalidArgument",
    "InvalidName",
    "JavaNotFound",
    "MessageTooLarge",
    "MessagesPurged",
    "NoPartitions",
    "NotInstalled",
    "PositionMismatch",
    "PositionRequired",
    "Process",
    "ProcessorStopped",
    "Queue",
    "QueueInUse",
    "QueueNotFound",
    "QueueOptions",
    "QueueOptionsError",
    "ReservedKey",
    "Retention",
    "Retry",
    "ReturnError",
    "SequenceError",
    "Sink",
    "Source",
    "Store",
    "StoreDamaged",
    "StoreError",
    "StoreForeign",
    "StoreFull",
    "StoreNotFound",
    "StoreReadOnly",
    "StoreVersion",
    "Stream",
    "Tailer",
    "TopologyChanged",
    "UnexpectedEOF",
    "Unsupported",
    "WaitTimeout",
    "WorkerDied",
    "WriterStuck",
    "alts",
    "broadcast",
    "codec",
    "error_context",
    "errors",
    "faults",
    "groups",
    "merge",
    "open",
    "testing",
]

_MODULES = {"codec", "errors", "faults", "groups", "testing"}
_HOMES = {
    "broadcast": "compose",
    "Graph": "graph",
    "merge": "graph",
    "QueueOptions": "options",
    "Retention": "options",
    "AllOf": "processor",
    "AnyOf": "processor",
    "Retry": "processor",
    "Sink": "processor",
    "Source": "processor",
    "Stream": "processor",
    "Appender": "queue",
    "Queue": "queue",
    "Delivery": "process",
    "Process": "process",
    "error_context": "failure",
    "Store": "store",
    "Envelope": "tailer",
    "Tailer": "tailer",
    "alts": "tailer",
}


def __getattr__(name: str) -> Any:
    """Load a name on its first use (PEP 562)."""
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("cues-streams")
    elif name == "open":
        value = importlib.import_module("cues.store").Store
    elif name in _MODULES:
        value = importlib.import_module(f"cues.{name}")
    elif name in _HOMES:
        value = getattr(importlib.import_module(f"cues.{_HOMES[name]}"), name)
    elif name in __all__:
        value = getattr(importlib.import_module("cues.errors"), name)
    else:
        raise AttributeError(f"module 'cues' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
