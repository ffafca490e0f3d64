"""Consumer groups: readers outside graphs that share the partitions of queues, in any process.

    Member                        reads its share of the partitions, and commits positions
    SharedConsumer                consumers (cues.txn) that share the partitions
    Session                       a step of a member: read, transform and write, in one commit
    TRY_COMMIT, TRY_ABORT         the two ways to end a session
    Relative                      a place to seek to, counted from the position
    plan                          the assignment of partitions to members
    list_groups, describe         the groups of a store, for a program that is not a member
    seek, forget                  move the positions of a group, or delete it, without being a member
    murmur2, partition_for        the partition of a key, as Kafka's default partitioner chooses it

Each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cues.base.lazy import loader

if TYPE_CHECKING:
    from cues.groups.membership import Member
    from cues.groups.operate import GroupMetrics, describe, forget, list_groups, seek
    from cues.groups.places import Relative
    from cues.groups.session import TRY_ABORT, TRY_COMMIT, Ended, Reason, Session, Try
    from cues.groups.shared_consumer import SharedConsumer
    from cues.groups.sticky import plan
    from cues.queues.partitioners import murmur2, partition_for

# fmt: off
__all__ = [
    "TRY_ABORT", "TRY_COMMIT", "Ended", "GroupMetrics", "Member", "Reason", "Relative", "Session", "SharedConsumer",
    "Try", "describe", "forget", "list_groups", "murmur2", "partition_for", "plan", "seek",
]
# fmt: on

if not TYPE_CHECKING:  # for a type checker it would define every name
    __getattr__, __dir__ = loader(
        __name__,
        {
            "groups.membership": "Member",
            "groups.operate": "GroupMetrics describe forget list_groups seek",
            "groups.places": "Relative",
            "groups.session": "TRY_ABORT TRY_COMMIT Ended Reason Session Try",
            "groups.shared_consumer": "SharedConsumer",
            "groups.sticky": "plan",
            "queues.partitioners": "murmur2 partition_for",
        },
    )
