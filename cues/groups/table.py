"""The table of a group: its members, its plan, and the owners of the partitions. Every method is one transaction.

    \\0group\\0<group>              generation, planned, changes, checksum
    \\0member\\0<group>\\0<name>     msgpack of the member's row, checksum
    \\0claim\\0<log>\\0<group>       one for each partition (claims.py)

There is no coordinator. The transaction that adds or removes a member raises the **generation**. The next member that
sees a plan of an older generation computes a new plan (sticky.py), outside any transaction, and writes the assignees
into the claims, if the generation is still the one that it planned for. Every member would write the same plan. Then
each member acts alone, in two phases: it releases the partitions that are assigned to another member, and it claims
those that are assigned to it and that no member holds. ``changes`` grows with every such write, so one row tells a
member whether there is anything to do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

from cues import faults
from cues.base import clock, names
from cues.base.checks import is_count
from cues.errors import AlreadyRunning, InvalidArgument
from cues.groups import claims, group_rows, places
from cues.groups.claims import NOBODY, Claim
from cues.groups.group_rows import GroupRow, MemberRow
from cues.groups.places import Place, Start
from cues.groups.sticky import Partition, Together, plan, siblings
from cues.queues.base import partitions_of
from cues.queues.committed import Isolation, log_at
from cues.queues.log import Log, read_row
from cues.queues.store import Store
from cues.records import sealed
from cues.storage import leases, wakeup
from cues.storage.transaction import StoreTransaction

R = TypeVar("R")

MEMBERS_MAX: Final = 256
"""The most members of a group: as many as the partitions of a queue. Each looks at all others ten times a second, with
two system calls for each."""


class GroupView(NamedTuple):
    """The state of a group at one moment."""

    row: GroupRow
    members: dict[str, MemberRow]
    claims: dict[Partition, Claim]
    """The claims on all partitions of the queues that were asked for."""
    counts: dict[str, int]
    """The number of partitions of each of these queues; 0 for a missing queue."""


class Begin(NamedTuple):
    """The first position on queues on which a group has none."""

    start: Start
    logs: Mapping[Partition, Log]
    """The partitions of such queues; without them they begin at their first message."""
    named: Collection[str]
    """The queues that the member names itself, not by a pattern."""


class Move(NamedTuple):
    """A change of a position."""

    log: Log
    was: Claim
    """The claim under which the messages were read."""
    next: int
    checkpoint: bytes | None = None
    """The value to keep beside the position; None keeps the present one."""


class GroupTable:
    """The rows of one group in one store."""

    def __init__(self, store: Store, group: str, isolation: Isolation = "uncommitted") -> None:
        self.store = store
        self.isolation = isolation
        self.group = group
        self.mask = wakeup.mask_of(f"\0group\0{group}")
        """The doorbells that ring after a change."""

    # --- reading ---

    def row(self, txn: StoreTransaction) -> GroupRow:
        return group_rows.read(txn, self.group)

    def members(self, txn: StoreTransaction) -> dict[str, MemberRow]:
        """Return the members by name, also closed ones whose place is kept."""
        return group_rows.members(txn, self.group)

    def member(self, txn: StoreTransaction, name: str) -> MemberRow | None:
        raw = txn.get(key := names.member_key(self.group, name))
        return None if raw is None else MemberRow.unpack(key, raw, name)

    def look(self, queues: Iterable[str] | None = None) -> GroupView:
        """Read the group and its claims on ``queues``; None: on all queues that a member subscribes to."""
        with self.store.core.view() as txn:
            members = self.members(txn)
            if queues is None:
                queues = {queue for member in members.values() for queue in member.queues}
            counts = {queue: partitions_of(txn, queue) for queue in sorted(queues)}
            held: dict[Partition, Claim] = {}
            for queue, count in counts.items():
                for number in range(count):
                    claim = claims.read(txn, names.log_id(queue, number), self.group)
                    if claim is not None:
                        held[queue, number] = claim
            return GroupView(self.row(txn), members, held, counts)

    def counts(self, queues: Iterable[str]) -> dict[str, int]:
        """Return the number of partitions of each queue; 0 for a missing queue."""
        with self.store.core.view() as txn:
            return {queue: partitions_of(txn, queue) for queue in sorted(queues)}

    def lag(self, queues: Iterable[str]) -> dict[Partition, int]:
        """Count the messages after the group's positions, by partition.

        A partition that was never planned counts from its first message. Acknowledgements after the last message do
        not count; those between messages do.
        """
        wanted = sorted(queues)
        logs: dict[Partition, Log] = {}
        identities: dict[Partition, bytes] = {}
        while True:
            lags: dict[Partition, int] = {}
            with self.store.core.view() as txn:
                for queue in wanted:
                    for number in range(partitions_of(txn, queue)):
                        claim = claims.read(txn, names.log_id(queue, number), self.group)
                        row = read_row(txn, queue, number)
                        log = logs.get((queue, number))
                        if log is not None:
                            row = log.row(txn)
                        elif claim is not None and claim.identity != row.identity:
                            row = row._replace(next=max(row.next, claim.next + 1))  # look again, at its places
                        at = row.first if claim is None else max(row.first, claim.next)
                        end = row.next if log is None else log.end_of_messages(txn, row, at)
                        identities[queue, number] = row.identity if claim is None else claim.identity
                        lags[queue, number] = max(0, end - at)
            # A log is opened outside of a transaction, and only where there may be a lag.
            missing = [partition for partition, count in lags.items() if count and partition not in logs]
            if not missing:
                return lags
            logs |= {p: log_at(Log(self.store, *p), identities[p]) for p in missing}

    # --- living members ---

    def lock_of(self, name: str) -> int:
        """Return the byte of the lock file that a member keeps locked while it lives."""
        return group_rows.lock_of(self.group, name)

    def alive(self, name: str, row: MemberRow) -> bool:
        """Return whether a member lives: it holds its lock, and its lease has not expired."""
        return group_rows.alive(self.store, self.group, name, row)

    def left_s(self, row: MemberRow) -> float:
        """Return the seconds for which a member that does not answer keeps its place; 0 or less after that."""
        return group_rows.left_s(self.store, row)

    def gone(self, name: str, row: MemberRow) -> bool:
        """Return whether a member has lost its place: it has no name and is dead, or its lease has expired."""
        return self.left_s(row) <= 0 if row.static else not self.alive(name, row)

    # --- joining and leaving ---

    def join(self, name: str, row: MemberRow, begin: Begin, expire_s: float = 0.0) -> bytes | None:
        """Add a member, or replace the member of the same name; returns the id of the replaced one.

        A member that returns within its lease, with the same queues, keeps its partitions. ``expire_s`` is kept for the
        group. Raises :class:`InvalidArgument` if the group is full, or the member does not agree with the others.
        """

        def join(txn: StoreTransaction) -> bytes | None:
            before = self._enter(txn, name, row, begin)
            self._put(txn, self.row(txn)._replace(expire_s=expire_s))
            faults.point("group.inside")
            return before.id if before is not None else None

        return self._commit(join, pages=sum(self.counts(row.queues).values()))

    def subscribe(self, name: str, row: MemberRow, begin: Begin) -> bool:
        """Change the queues of a member; False if it is not in the table. Raises the errors of :meth:`join`."""

        def subscribe(txn: StoreTransaction) -> bool:
            before = self.member(txn, name)
            if before is None or before.id != row.id:
                return False
            self._enter(txn, name, row, begin)
            faults.point("group.inside")
            return True

        return self._commit(subscribe, pages=sum(self.counts(row.queues).values()))

    def _enter(self, txn: StoreTransaction, name: str, row: MemberRow, begin: Begin) -> MemberRow | None:
        """Write the row of a member, and the positions of queues on which the group has none; returns the row before.

        1. Such a queue begins at ``begin.start``, if ``begin.logs`` has its partitions. Partitions that are not among
           them were added meanwhile, or are added later, and begin at their first message. So does a queue that was
           found by a pattern, unless the group is new: it may have been made while no member looked.
        2. Partitions of queues that the member leaves are assigned to nobody, until a plan assigns them.
        """
        is_new = not self.row(txn).generation
        members = self.members(txn)
        self._check_isolation(txn, {queue for other in (row, *members.values()) for queue in other.queues})
        for queue in row.queues:
            partitions = [(queue, number) for number in range(partitions_of(txn, queue))]
            if any(claims.read(txn, names.log_id(*partition), self.group) is not None for partition in partitions):
                continue
            at_start = is_new or queue in begin.named
            new: dict[str, Claim] = {}
            for partition in partitions:
                log = begin.logs.get(partition) if at_start else None
                id = names.log_id(*partition)
                new[id] = (
                    claims.first(txn, id, "", self.isolation)
                    if log is None
                    else places.first(txn, self.group, partition, log, begin.start)
                )
            claims.begin(txn, self.group, new)
        before = members.get(name)
        if before is None and len(members) >= MEMBERS_MAX:
            raise InvalidArgument(
                f"The group {self.group} has {len(members)} members, and at most {MEMBERS_MAX} are allowed.",
                "use fewer members: more than its queues have partitions get nothing to read.",
            )
        self._check_together(members, name, row)
        for queue in set(before.queues) - set(row.queues) if before is not None else ():
            for number in range(partitions_of(txn, queue)):
                log_id = names.log_id(queue, number)
                claim = claims.read(txn, log_id, self.group)
                if claim is not None and claim.assignee == name:
                    claims.put(txn, log_id, self.group, claim._replace(assignee=""))
        sealed.put(txn, names.member_key(self.group, name), row.pack())
        changed = before is None or (before.queues, before.together) != (row.queues, row.together)
        self._touch(txn, replan=changed)
        return before

    def _check_isolation(self, txn: StoreTransaction, queues: Iterable[str]) -> None:
        """Raise :class:`InvalidArgument` if the group reads any of the queues with the other isolation."""
        for queue in sorted(queues):
            for number in range(partitions_of(txn, queue)):
                log = names.log_id(queue, number)
                claim = claims.read(txn, log, self.group)
                if claim is not None:
                    claims.check_isolation(txn, log, self.group, claim, self.isolation)

    def _check_together(self, members: Mapping[str, MemberRow], name: str, row: MemberRow) -> None:
        """Raise :class:`InvalidArgument` if another member reads the same queues, but not in the same sets."""
        for other, before in members.items():
            for queue in sorted({*row.queues} & {*before.queues}) if other != name else ():
                if row.set_of(queue) != before.set_of(queue):
                    raise InvalidArgument(
                        f"The member {other} of {self.group} reads {queue!r} together with"
                        f" {_others(before, queue)}, this one together with {_others(row, queue)}.",
                        "give all members of a group the same together=…, or use another group.",
                    )

    def keep(self, name: str, row: MemberRow) -> None:
        """Mark a member as closed. Its place is kept for the length of its lease."""
        kept = replace(row, kept_ns=clock.monotonic_ns() + int(row.lease_s * 1e9))

        def keep(txn: StoreTransaction) -> None:
            before = self.member(txn, name)
            if before is not None and before.id == row.id:
                sealed.put(txn, names.member_key(self.group, name), kept.pack())
                self._touch(txn)

        self._commit(keep)

    def remove(self, gone: Mapping[str, bytes]) -> None:
        """Remove members, given by name and id. A member that joined again meanwhile has another id and stays."""

        def remove(txn: StoreTransaction) -> None:
            rows = {name: self.member(txn, name) for name in gone}
            removed = [name for name, row in rows.items() if row is not None and row.id == gone[name]]
            for name in removed:
                txn.delete(names.member_key(self.group, name))
            if removed:
                self._touch(txn, replan=True)
            faults.point("group.inside")

        self._commit(remove)
        for id in gone.values():
            leases.forget(self.store, id)

    # --- the plan ---

    def settle(self) -> bool:
        """Write a new plan, if members or queues have changed since the last one. The first member that writes decides.

        Returns True if there was nothing to do. After False call it again: the new plan may be out of date already.
        """
        seen = self.look()
        partitions = [(queue, number) for queue, count in seen.counts.items() for number in range(count)]
        planned = all(partition in seen.claims and seen.claims[partition].assignee for partition in partitions)
        if planned and seen.row.planned == seen.row.generation:
            return True
        previous: dict[str, set[Partition]] = {}
        for partition, claim in seen.claims.items():
            previous.setdefault(claim.assignee, set()).add(partition)
        together = {queues for row in seen.members.values() for queues in row.together}
        wanted = plan({name: row.queues for name, row in seen.members.items()}, seen.counts, previous, sorted(together))
        assignees = {partition: name for name, given in wanted.items() for partition in given}

        def write(txn: StoreTransaction) -> None:
            row = self.row(txn)
            if row.generation != seen.row.generation or row.planned != seen.row.planned:
                return  # another member was faster, or this plan is out of date
            new: dict[str, Claim] = {}
            for (queue, number), name in sorted(assignees.items()):
                log = names.log_id(queue, number)
                claim = claims.read(txn, log, self.group)
                if claim is None:
                    new[log] = claims.first(txn, log, name, self.isolation)
                elif claim.assignee != name:
                    claims.put(txn, log, self.group, claim._replace(assignee=name))
            claims.begin(txn, self.group, new)
            self._put(txn, row._replace(planned=row.generation, changes=row.changes + 1))
            faults.point("group.inside")

        self._commit(write, pages=len(assignees))
        return False

    # --- claims and releases ---

    def claim(
        self, name: str, id: bytes, wanted: Mapping[Partition, Log], together: Together = ()
    ) -> dict[Partition, Claim]:
        """Claim those of the partitions that are assigned to a member and that no member holds; returns the claims.

        Partitions of queues that belong together are claimed only if no other member holds any of their unit. An owner
        that is dead, or no longer in the table, holds nothing: the new epoch fences it. Raises
        :class:`Diverged` if a log is not the one that the group has read.
        """

        def claim(txn: StoreTransaction) -> dict[Partition, Claim]:
            members = self.members(txn)
            if name not in members or members[name].id != id:
                return {}
            others = {member.id for other, member in members.items() if other != name and self.alive(other, member)}
            taken: dict[Partition, Claim] = {}
            for partition, log in wanted.items():
                before = claims.read(txn, names.log_id(*partition), self.group)
                unit = [claims.read(txn, names.log_id(*other), self.group) for other in siblings(partition, together)]
                if before is None or before.assignee != name:
                    continue
                if any(claim is not None and claim.owner in others for claim in (before, *unit)):
                    continue
                standing = claims.standing(txn, log, self.group, before)
                taken[partition] = standing._replace(owner=id, epoch=before.epoch + 1)
                claims.put(txn, names.log_id(*partition), self.group, taken[partition])
            if taken:
                self._touch(txn)
            faults.point("group.inside")
            return taken

        return self._commit(claim, pages=len(wanted))

    def release(self, id: bytes, given: Collection[Partition]) -> None:
        """Release those of the partitions that the member ``id`` still owns."""

        def release(txn: StoreTransaction) -> None:
            for partition in given:
                log = names.log_id(*partition)
                claim = claims.read(txn, log, self.group)
                if claim is not None and claim.owner == id:  # at any epoch: a seek raises it and keeps the owner
                    claims.put(txn, log, self.group, claim._replace(owner=NOBODY, epoch=claim.epoch + 1))
            self._touch(txn)
            faults.point("group.inside")

        self._commit(release, pages=len(given))

    # --- positions ---

    def move(self, moves: Mapping[Partition, Move]) -> dict[Partition, Claim]:
        """Move the positions of partitions that are still held; returns the new claims, without the refused ones."""
        moved: dict[Partition, Claim] = self.store.core.commit(self._move, moves, pages=2 * len(moves))
        faults.point("group.after")
        return moved

    def _move(self, txn: StoreTransaction, moves: Mapping[Partition, Move]) -> dict[Partition, Claim]:
        moved = {partition: self.moved(txn, partition, move) for partition, move in moves.items()}
        faults.point("group.inside")
        return {partition: claim for partition, claim in moved.items() if claim is not None}

    def moved(self, txn: StoreTransaction, partition: Partition, move: Move) -> Claim | None:
        """Move one position inside a transaction. Returns None and writes nothing if the claim has changed.

        This is the fence. It compares three values, because each of them alone would let a wrong commit pass. The owner
        alone passes an older step of the same member after a seek. The epoch alone passes a commit that is repeated.
        The index alone passes a step from before a seek that went back to the same messages.
        """
        log = names.log_id(*partition)
        before = claims.read(txn, log, self.group)
        was = move.was
        if before is None or (before.owner, before.epoch, before.next) != (was.owner, was.epoch, was.next):
            return None
        seal = move.log.seal_before(txn, move.log.row(txn), move.next) if move.next != before.next else before.seal
        checkpoint = before.checkpoint if move.checkpoint is None else move.checkpoint
        claim = before._replace(next=move.next, seal=seal, checkpoint=checkpoint)
        claims.put(txn, log, self.group, claim)
        return claim

    # --- changes by any member ---

    def named(self, queues: Collection[str], partitions: Iterable[Partition | str], reader: str) -> list[Partition]:
        """Return the partitions that a caller names, by queue or one by one; refuse those that are not of ``queues``.

        ``reader`` begins the sentence of the error.
        """
        named: list[Partition] = []
        for partition in partitions:
            queue, number = (partition, None) if isinstance(partition, str) else partition
            if queue not in queues:
                raise InvalidArgument(f"{reader} does not read {queue!r}.", f"name one of {', '.join(queues)}.")
            count = self.counts((queue,))[queue]
            if number is not None and not is_count(number, 0, count - 1):
                raise InvalidArgument(
                    f"{queue!r} has no partition {number!r}; it has {count}.", f"use 0 to {count - 1}."
                )
            named += [(queue, n) for n in range(count)] if number is None else [(queue, number)]
        return named

    def pause(self, partitions: Collection[Partition], paused: bool) -> None:
        """Pause or resume partitions, also those that other members hold."""
        self._change(partitions, lambda txn, partition, claim: claim._replace(paused=paused))

    def seek(self, logs: Mapping[Partition, Log], to: Place) -> dict[Partition, int]:
        """Move positions and raise their epochs, which fences steps that are under way; returns the new indices."""
        indices: dict[Partition, int] = {}

        def moved(txn: StoreTransaction, partition: Partition, claim: Claim) -> Claim:
            identity, position, seal = places.target(txn, self.group, partition, logs[partition], to)
            indices[partition] = logs[partition].index_of(txn, position)
            return claim._replace(identity=identity, next=position, seal=seal, epoch=claim.epoch + 1)

        self._change(logs, moved)
        return indices

    def _change(
        self, partitions: Collection[Partition], changed: Callable[[StoreTransaction, Partition, Claim], Claim]
    ) -> None:
        def change(txn: StoreTransaction) -> None:
            for partition in partitions:
                log = names.log_id(*partition)
                claim = claims.read(txn, log, self.group) or claims.first(txn, log, "", self.isolation)
                claims.put(txn, log, self.group, changed(txn, partition, claim))
            self._touch(txn)
            faults.point("group.inside")

        self._commit(change, pages=len(partitions))

    # --- the end of a group ---

    def delete(self) -> None:
        """Delete the group's rows. Raises :class:`AlreadyRunning` while a member of it lives."""

        def delete(txn: StoreTransaction) -> None:
            for name, row in self.members(txn).items():
                if self.alive(name, row):
                    raise AlreadyRunning(
                        f"The group {self.group} has a living member {name}, in process {row.pid}.",
                        "close its members first (cues status lists them).",
                        pid=row.pid,
                    )
            if not group_rows.delete(txn, self.group):
                raise InvalidArgument(f"The store has no group {self.group!r}.", "name a group that cues status lists.")
            faults.point("group.inside")

        self._commit(delete)

    # --- inside ---

    def _touch(self, txn: StoreTransaction, replan: bool = False) -> None:
        row = self.row(txn)
        generation = row.generation + 1 if replan else row.generation
        self._put(txn, row._replace(generation=generation, changes=row.changes + 1, used_ns=clock.now_ns()))

    def _put(self, txn: StoreTransaction, row: GroupRow) -> None:
        sealed.put(txn, names.group_key(self.group), row.pack())

    def _commit(self, work: Callable[[StoreTransaction], R], pages: int = 0) -> R:
        result = self.store.core.commit(work, pages=pages)
        self.store.core.ring(self.mask)
        faults.point("group.after")
        return result


def _others(row: MemberRow, queue: str) -> str:
    return ", ".join(repr(other) for other in row.set_of(queue) if other != queue) or "no other queue"


def new_id() -> bytes:
    """Draw a random id of 8 bytes."""
    return os.urandom(8)
