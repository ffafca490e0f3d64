"""Partitions for readers and writers outside graphs.

    murmur2, partition_for        where Kafka's default partitioner places a key

Each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cues.partitioners import murmur2, partition_for

__all__ = ["murmur2", "partition_for"]

_HOMES = {
    "murmur2": "cues.partitioners",
    "partition_for": "cues.partitioners",
}


def __getattr__(name: str) -> Any:
    """Load a name on its first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cues.groups' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
