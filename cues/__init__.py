"""Cues: queues on local append logs, and processors that move messages between them exactly once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cues import codec as codec
    from cues import errors as errors
    from cues import testing as testing
    from cues.errors import *  # noqa: F403
    from cues.graph import Graph as Graph
    from cues.options import QueueOptions as QueueOptions
    from cues.options import Retention as Retention
    from cues.queue import Appender as Appender
    from cues.queue import Queue as Queue
    from cues.store import Store as Store
    from cues.store import Store as open
    from cues.tailer import Envelope as Envelope
    from cues.tailer import Tailer as Tailer
    from cues.tailer import alts as alts
_HOMES = {
    "AnyOf": "processor",
    "Appender": "queue",
    "Envelope": "tailer",
    "Graph": "graph",
    "Queue": "queue",
    "QueueOptions": "options",
    "Retention": "options",
    "Store": "store",
    "Retry": "processor",
    "Sink": "processor",
    "Source": "processor",
    "Stream": "processor",
    "Tailer": "tailer",
    "error_context": "runner",
    "alts": "tailer",
}


def __getattr__(name: str) -> Any:
    if name == "open":
        return importlib.import_module("cues.store").Store
    home = _HOMES.get(name)
    if home:
        return getattr(importlib.import_module(f"cues.{home}"), name)
    if name in ("codec", "errors", "testing"):
        return importlib.import_module(f"cues.{name}")
    errors = importlib.import_module("cues.errors")
    if name in errors.__dict__:
        return getattr(errors, name)
    raise AttributeError(f"module 'cues' has no attribute {name!r}")
