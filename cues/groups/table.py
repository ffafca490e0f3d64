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
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeVar

from cues import codec, faults
from cues.base import clock, names
from cues.errors import AlreadyRunning, InvalidArgument
from cues.groups.sticky import Partition, plan
from cues.queues import claims
from cues.queues.claims import NOBODY, Claim
from cues.queues.committed import Isolation, log_at
from cues.queues.log import Log, read_row
from cues.queues.processor_rows import boot
from cues.queues.store import Store
from cues.records import sealed
from cues.storage import leases, locks, transaction, wakeup
from cues.storage.transaction import StoreTransaction

R = TypeVar("R")

Start = Literal["earliest", "latest"]
"""The first position of a group on a queue that it has never read: the first message, or after the last one."""

_GROUP: Final = struct.Struct(">QQQ")


class GroupRow(NamedTuple):
    """The row of a group."""

    generation: int = 0
    """Grows when a member joins or leaves."""
    planned: int = 0
    """The generation for which the assignees in the claims were planned."""
    changes: int = 0
    """Grows with every change that members must react to."""

    def pack(self) -> bytes:
        return sealed.seal(_GROUP.pack(*self))


@dataclass(frozen=True, slots=True)
class MemberRow:
    """The row of a member."""

    id: bytes
    """8 random bytes, drawn at each join. They are the owner in its claims."""
    pid: int
    boot: bytes
    lease_s: float
    static: bool
    """True if it was given a name. Its place is then kept for the length of its lease after it closes or dies."""
    kept_ns: int
    """The time of the monotonic clock until which the place of a closed member is kept; 0 while it runs."""
    queues: tuple[str, ...]
    """The names of the queues that it subscribes to, sorted."""

    def pack(self) -> bytes:
        return sealed.seal(
            codec.pack([self.id, self.pid, self.boot, self.lease_s, self.static, self.kept_ns, list(self.queues)])
        )

    @staticmethod
    def unpack(raw: bytes, name: str) -> MemberRow:
        """Read a row. Raises :class:`StoreDamaged`, which names the member."""
        body = sealed.unseal(raw, f"row of the group member {name!r}")
        id, pid, boot, lease_s, static, kept_ns, queues = codec.unpack(body)
        return MemberRow(id, pid, boot, lease_s, static, kept_ns, tuple(queues))


class GroupView(NamedTuple):
    """The state of a group at one moment."""

    row: GroupRow
    members: dict[str, MemberRow]
    claims: dict[Partition, Claim]
    """The claims on all partitions of the queues that were asked for."""
    counts: dict[str, int]
    """The number of partitions of each of these queues; 0 for a missing queue."""


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
        raw = txn.get(names.group_key(self.group))
        if raw is None:
            return GroupRow()
        return GroupRow._make(_GROUP.unpack(sealed.unseal(raw, f"row of the group {self.group!r}")))

    def members(self, txn: StoreTransaction) -> dict[str, MemberRow]:
        """Return the members by name, also closed ones whose place is kept."""
        rows = transaction.named_rows(txn, names.member_key(self.group, ""))
        return {name: MemberRow.unpack(raw, name) for name, raw in rows}

    def member(self, txn: StoreTransaction, name: str) -> MemberRow | None:
        raw = txn.get(names.member_key(self.group, name))
        return None if raw is None else MemberRow.unpack(raw, name)

    def look(self, queues: Iterable[str] | None = None) -> GroupView:
        """Read the group and its claims on ``queues``; None: on all queues that a member subscribes to."""
        with self.store._view() as txn:
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
        with self.store._view() as txn:
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
            with self.store._view() as txn:
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
        return locks.offset_of(f"\0member\0{self.group}\0{name}")

    def alive(self, name: str, row: MemberRow) -> bool:
        """Return whether a member lives: it holds its lock, and its lease has not expired."""
        if row.kept_ns or row.boot != boot():
            return False
        offset = self.lock_of(name)
        held = self.store._locks.mine(offset) or self.store._locks.holder(offset) is not None
        return held and self.left_s(row) > 0

    def left_s(self, row: MemberRow) -> float:
        """Return the seconds for which a member that does not answer keeps its place; 0 or less after that."""
        if row.boot != boot():
            return 0.0
        if row.kept_ns:
            return (row.kept_ns - clock.monotonic_ns()) / 1e9
        return leases.left_s(self.store, row.id, row.lease_s)

    def gone(self, name: str, row: MemberRow) -> bool:
        """Return whether a member has lost its place: it has no name and is dead, or its lease has expired."""
        return self.left_s(row) <= 0 if row.static else not self.alive(name, row)

    # --- joining and leaving ---

    def join(self, name: str, row: MemberRow, start: Start) -> bytes | None:
        """Add a member, or replace the member of the same name; returns the id of the replaced one.

        A member that returns within its lease, with the same queues, keeps its partitions. On a queue that the group
        has never read the positions are set to ``start``; partitions that such a queue gets later begin at their first
        message.
        """

        def join(txn: StoreTransaction) -> bytes | None:
            for queue in row.queues:
                logs = [names.log_id(queue, number) for number in range(partitions_of(txn, queue))]
                known = {log: claims.read(txn, log, self.group) for log in logs}
                for log, claim in known.items():
                    if claim is not None:
                        claims.check_isolation(txn, log, self.group, claim, self.isolation)
                    elif not any(known.values()):
                        first = claims.first(txn, log, "", self.isolation, latest=start == "latest")
                        claims.put(txn, log, self.group, first)
            before = self.member(txn, name)
            txn.put(names.member_key(self.group, name), row.pack())
            self._touch(txn, replan=before is None or before.queues != row.queues)
            faults.point("group.inside")
            return before.id if before is not None else None

        return self._commit(join, pages=sum(self.counts(row.queues).values()))

    def keep(self, name: str, row: MemberRow) -> None:
        """Mark a member as closed. Its place is kept for the length of its lease."""
        kept = replace(row, kept_ns=clock.monotonic_ns() + int(row.lease_s * 1e9))

        def keep(txn: StoreTransaction) -> None:
            before = self.member(txn, name)
            if before is not None and before.id == row.id:
                txn.put(names.member_key(self.group, name), kept.pack())
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
        wanted = plan({name: row.queues for name, row in seen.members.items()}, seen.counts, previous)
        assignees = {partition: name for name, given in wanted.items() for partition in given}

        def write(txn: StoreTransaction) -> None:
            row = self.row(txn)
            if row.generation != seen.row.generation or row.planned != seen.row.planned:
                return  # another member was faster, or this plan is out of date
            for (queue, number), name in sorted(assignees.items()):
                log = names.log_id(queue, number)
                claim = claims.read(txn, log, self.group)
                if claim is None:
                    claims.put(txn, log, self.group, claims.first(txn, log, name, self.isolation))
                elif claim.assignee != name:
                    claims.put(txn, log, self.group, claim._replace(assignee=name))
            self._put(txn, row._replace(planned=row.generation, changes=row.changes + 1))
            faults.point("group.inside")

        self._commit(write, pages=len(assignees))
        return False

    # --- claims and releases ---

    def claim(self, name: str, id: bytes, wanted: Mapping[Partition, Log]) -> dict[Partition, Claim]:
        """Claim those of the partitions that are assigned to a member and that no member holds; returns the claims.

        An owner that is dead, or no longer in the table, holds nothing: the new epoch fences it. Raises
        :class:`Diverged` if a log is not the one that the group has read.
        """

        def claim(txn: StoreTransaction) -> dict[Partition, Claim]:
            members = self.members(txn)
            if name not in members or members[name].id != id:
                return {}
            living = {member.id for other, member in members.items() if self.alive(other, member)}
            taken: dict[Partition, Claim] = {}
            for partition, log in wanted.items():
                before = claims.read(txn, names.log_id(*partition), self.group)
                if before is None or before.assignee != name or before.owner in living:
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
        moved: dict[Partition, Claim] = self.store._commit(self._move, moves, pages=2 * len(moves))
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

    def pause(self, partitions: Collection[Partition], paused: bool) -> None:
        """Pause or resume partitions, also those that other members hold."""
        self._change(partitions, lambda partition, claim: claim._replace(paused=paused))

    def seek(self, targets: Mapping[Partition, tuple[bytes, int, bytes]]) -> None:
        """Move positions (identity, index, seal) and raise their epochs, which fences steps that are under way."""

        def moved(partition: Partition, claim: Claim) -> Claim:
            identity, index, seal = targets[partition]
            return claim._replace(identity=identity, next=index, seal=seal, epoch=claim.epoch + 1)

        self._change(targets, moved)

    def _change(self, partitions: Collection[Partition], changed: Callable[[Partition, Claim], Claim]) -> None:
        def change(txn: StoreTransaction) -> None:
            for partition in partitions:
                log = names.log_id(*partition)
                claim = claims.read(txn, log, self.group) or claims.first(txn, log, "", self.isolation)
                claims.put(txn, log, self.group, changed(partition, claim))
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
            suffix = b"\0" + self.group.encode()
            rows = [key for key, _ in transaction.rows(txn, names.CLAIMS) if key.endswith(suffix)]
            rows += [key for key, _ in transaction.rows(txn, names.member_key(self.group, ""))]
            rows += [key for key in (names.group_key(self.group),) if txn.get(key) is not None]
            if not rows:
                raise InvalidArgument(f"The store has no group {self.group!r}.", "name a group that cues status lists.")
            for key in rows:
                txn.delete(key)
            faults.point("group.inside")

        self._commit(delete)

    # --- inside ---

    def _touch(self, txn: StoreTransaction, replan: bool = False) -> None:
        row = self.row(txn)
        generation = row.generation + 1 if replan else row.generation
        self._put(txn, GroupRow(generation, row.planned, row.changes + 1))

    def _put(self, txn: StoreTransaction, row: GroupRow) -> None:
        txn.put(names.group_key(self.group), row.pack())

    def _commit(self, work: Callable[[StoreTransaction], R], pages: int = 0) -> R:
        result = self.store._commit(work, pages=pages)
        self.store._ring(self.mask)
        faults.point("group.after")
        return result


def forget(store: Store, group: str) -> None:
    """Delete a consumer group: its positions and checkpoints. Retention ``"read"`` no longer waits for it.

    A member that joins later begins a new group. Raises :class:`AlreadyRunning` while a member of the group lives, and
    :class:`InvalidArgument` if the store has no such group.
    """
    GroupTable(store, names.check("group", group)).delete()


def partitions_of(txn: StoreTransaction, queue: str) -> int:
    """Return the number of partitions of a queue; 0 for a missing queue."""
    raw = txn.get(names.queue_key(queue))
    return 0 if raw is None else int(codec.unpack(raw)["partitions"])


def new_id() -> bytes:
    """Draw a random id of 8 bytes."""
    return os.urandom(8)
