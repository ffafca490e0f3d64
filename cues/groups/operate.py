"""Look at consumer groups, move them and delete them, without being a member.

    list_groups(store)                        every group: members, partitions, positions, lag
    describe(store, "billing")                one of them
    seek(store, "billing", "start")           move its positions
    forget(store, "billing")                  delete it

The first two only read: no epoch is raised, no member is fenced, and a store that is open read-only will do. A group
that was made by a mistake (a name with a typing error) has members no more, and retention ``"read"`` waits for it
until somebody calls :func:`forget`, or until its ``expire_s`` is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from cues.base import clock, names
from cues.base.checks import nearest
from cues.base.data import dataclass
from cues.errors import InvalidArgument
from cues.groups import claims, group_rows
from cues.groups.claims import Claim
from cues.groups.group_rows import MemberRow
from cues.groups.places import Place
from cues.groups.sticky import Partition
from cues.groups.table import GroupTable
from cues.queues.base import read_as, view_of
from cues.queues.committed import Isolation, log_at
from cues.queues.log import Log
from cues.queues.store import Store
from cues.storage import locks, transaction


@dataclass(frozen=True)
class GroupMemberMetrics:
    member: str
    pid: int
    state: str
    """The state of its process; "closed" or "dead" for a member whose place is kept until the end of its lease."""
    lease_s: float
    """Seconds until others get its partitions, if it makes no call."""
    queues: tuple[str, ...]


@dataclass(frozen=True)
class GroupPartitionMetrics:
    """The position of a group on one partition."""

    log: str
    member: str | None
    """The member that reads it; None if there is none."""
    assignee: str
    """The member that the plan gives it to; it differs from the owner while the partition moves."""
    position: int
    lag: int
    paused: bool


@dataclass(frozen=True)
class GroupMetrics:
    group: str
    generation: int
    members: tuple[GroupMemberMetrics, ...]
    partitions: tuple[GroupPartitionMetrics, ...]
    idle: bool
    """True if it has no member, and none whose place is kept."""
    idle_since: datetime | None
    """The time since which it is idle; None if it is not, or if the time is not known."""
    expire_s: float | None
    """Seconds without a member after which retention "read" forgets it; None: never."""

    @property
    def lag(self) -> int:
        return sum(partition.lag for partition in self.partitions)


def list_groups(store: Store) -> list[GroupMetrics]:
    """Return every consumer group of a store, by name."""
    return [_described(GroupTable(store, group), queues) for group, queues in _queues(store).items()]


def describe(store: Store, group: str) -> GroupMetrics:
    """Return one group. Raises :class:`InvalidArgument` if the store has no such group."""
    return _described(GroupTable(store, group), _queues_of(store, group))


def seek(store: Store, group: str, to: Place, *partitions: Partition | str) -> dict[Partition, int]:
    """Move positions of a group, whether it has members or not; returns the new ones.

    ``to`` is ``"start"``, ``"end"``, an index, a time (the first message at or after it) or :class:`Relative`.
    ``partitions`` are (queue, number), or a queue for all of its partitions; without any, all partitions of the group
    are moved. It is one transaction. It raises the epochs, so steps that are under way are fenced, and members continue
    at the new place. Raises :class:`InvalidArgument` if the store has no such group, the group no position on
    that queue, or the queue no such place; then nothing is moved.
    """
    known = _queues_of(store, group)
    isolation = _isolation(store, group, known)
    table = GroupTable(store, group, isolation)
    named = table.named(known, partitions or known, f"The group {group}")
    handles = {queue: read_as(store.queue(queue), isolation) for queue, _ in named}
    return table.seek({(queue, number): view_of(handles[queue], number).core.log for queue, number in named}, to)


def forget(store: Store, group: str) -> None:
    """Delete a consumer group: its positions and checkpoints. Retention ``"read"`` no longer waits for it.

    A member that joins later begins a new group. Raises :class:`AlreadyRunning` while a member of the group lives, and
    :class:`InvalidArgument` if the store has no such group.
    """
    _queues_of(store, group)
    GroupTable(store, group).delete()


def _queues(store: Store) -> dict[str, list[str]]:
    """Return the queues on which each group has a position, by group."""
    with store.core.view() as txn:
        queues: dict[str, set[str]] = {group: set() for group, *_ in transaction.named_rows(txn, names.group_key(""))}
    for log, group, _ in claims.all_rows(store):
        queues.setdefault(group, set()).add(names.split_log(log)[0])
    return {group: sorted(queues[group]) for group in sorted(queues)}


def _queues_of(store: Store, group: str) -> list[str]:
    known = _queues(store)
    if names.check("group", group) not in known:
        raise InvalidArgument(
            f"The store has no group {group!r}; it has {', '.join(known) or 'none'}.",
            nearest(group, known, "did you mean {!r}?", "name a group that cues status lists."),
        )
    return known[group]


def _described(table: GroupTable, queues: Iterable[str]) -> GroupMetrics:
    seen = table.look(queues)
    owners = {row.id: name for name, row in seen.members.items()}
    lag = table.lag(queues)
    with table.store.core.view() as txn:
        since_ns = group_rows.idle_since_ns(txn, table.store, table.group)
    return GroupMetrics(
        table.group,
        seen.row.generation,
        tuple(_member(table, name, row) for name, row in seen.members.items()),
        tuple(
            GroupPartitionMetrics(
                names.log_id(*partition),
                owners.get(claim.owner),
                claim.assignee,
                _index(table.store, partition, claim),
                lag[partition],
                claim.paused,
            )
            for partition, claim in seen.claims.items()
        ),
        since_ns is not None,
        clock.to_datetime(since_ns) if since_ns else None,
        seen.row.expire_s or None,
    )


def _index(store: Store, partition: Partition, claim: Claim) -> int:
    """Return the index of a group's position."""
    log = log_at(Log(store, *partition), claim.identity)
    with store.core.view() as txn:
        return log.index_of(txn, claim.next)


def _isolation(store: Store, group: str, queues: Iterable[str]) -> Isolation:
    """Return the isolation with which a group reads; it is the same on all of its queues."""
    for partition, claim in GroupTable(store, group).look(queues).claims.items():
        log = Log(store, *partition)
        if log_at(log, claim.identity) is not log:
            return "committed"
    return "uncommitted"


def _member(table: GroupTable, name: str, row: MemberRow) -> GroupMemberMetrics:
    state = "closed"
    if not row.kept_ns:
        state = locks.process_state(row.pid) if table.alive(name, row) else "dead"
    return GroupMemberMetrics(name, row.pid, state, max(0.0, table.left_s(row)), row.queues)
