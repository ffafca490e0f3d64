"""Consumer groups: readers outside graphs that share the partitions of queues, in any process.

    Member                        reads its share of the partitions, and commits positions
    Session                       a step of a member: read, transform and write, in one commit
    TRY_COMMIT, TRY_ABORT         how a session is to end
    Relative                      a place to seek to, seen from the position
    plan                          who of a group reads what
    murmur2, partition_for        where Kafka's default partitioner places a key

Each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cues.groups.membership import Member, Relative
    from cues.groups.session import TRY_ABORT, TRY_COMMIT, Ended, Reason, Session, Try
    from cues.groups.sticky import plan
    from cues.partitioners import murmur2, partition_for

__all__ = [
    "TRY_ABORT",
    "TRY_COMMIT",
    "Ended",
    "Member",
    "Reason",
    "Relative",
    "Session",
    "Try",
    "murmur2",
    "partition_for",
    "plan",
]

_HOMES = {
    "TRY_ABORT": "cues.groups.session",
    "TRY_COMMIT": "cues.groups.session",
    "Ended": "cues.groups.session",
    "Member": "cues.groups.membership",
    "Reason": "cues.groups.session",
    "Relative": "cues.groups.membership",
    "Session": "cues.groups.session",
    "Try": "cues.groups.session",
    "murmur2": "cues.partitioners",
    "partition_for": "cues.partitioners",
    "plan": "cues.groups.sticky",
}


def __getattr__(name: str) -> Any:
    """Load a name on its first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cues.groups' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
