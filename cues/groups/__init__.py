"""Consumer groups: readers outside graphs that share the partitions of queues, in any process.

    Member                        reads its share of the partitions, and commits positions
    Session                       a step of a member: read, transform and write, in one commit
    TRY_COMMIT, TRY_ABORT         the two ways to end a session
    Relative                      a place to seek to, counted from the position
    plan                          the assignment of partitions to members
    forget                        delete a group that is no longer used
    murmur2, partition_for        the partition of a key, as Kafka's default partitioner chooses it

Each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cues.groups.membership import Member
    from cues.groups.places import Relative
    from cues.groups.session import TRY_ABORT, TRY_COMMIT, Ended, Reason, Session, Try
    from cues.groups.sticky import plan
    from cues.groups.table import forget
    from cues.queues.partitioners import murmur2, partition_for

__all__ = [
    "TRY_ABORT",
    "TRY_COMMIT",
    "Ended",
    "Member",
    "Reason",
    "Relative",
    "Session",
    "Try",
    "forget",
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
    "Relative": "cues.groups.places",
    "Session": "cues.groups.session",
    "Try": "cues.groups.session",
    "forget": "cues.groups.table",
    "murmur2": "cues.queues.partitioners",
    "partition_for": "cues.queues.partitioners",
    "plan": "cues.groups.sticky",
}


def _load(name: str) -> Any:
    """Load a name on its first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cues.groups' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


if not TYPE_CHECKING:  # for a type checker it would define every name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted(__all__)
