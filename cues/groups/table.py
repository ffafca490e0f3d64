"""The table of a group: its members, its plan, and who holds what. Every method is one transaction.

    \\0group\\0<group>              generation, planned, changes, checksum
    \\0member\\0<group>\\0<name>     msgpack of the member's row, checksum
    \\0claim\\0<log>\\0<group>       one a partition (claims.py)

There is no coordinator. Members come, go and are found dead, and whoever writes that down raises the
**generation**. Whoever sees next that the plan is of an older one computes a new one (sticky.py), outside any
transaction, and writes it into the claims as heirs, if the generation is still the one that it planned for; all would
have written the same. From then on each member looks after itself, in two phases: what it holds and is heir to no
longer it gives up, and what it is heir to and nobody holds it claims. ``changes`` grows with all of that, so that one
look at one row tells whether there is anything to do.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from cues import batch, claims, clock, codec, faults, leases, locks, names, wakeup
from cues.claims import NOBODY, Claim
from cues.groups.sticky import Partition, plan
from cues.log import Log, read_row
from cues.ownership import boot

if TYPE_CHECKING:
    from cues.store import Store

R = TypeVar("R")

_GROUP: Final = struct.Struct(">QQQ")
_CHECKSUM_BYTES: Final = 8


class GroupRow(NamedTuple):
    """What a group says of itself."""

    generation: int = 0
    """Grows when a member comes or goes."""
    planned: int = 0
    """The generation that the heirs in the claims are of."""
    changes: int = 0
    """Grows with everything that members must look at."""

    def pack(self) -> bytes:
        raw = _GROUP.pack(*self)
        return raw + batch.checksum(raw)


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One member."""

    id: bytes
    """8 random bytes, drawn each time that it joins: the owner in its claims."""
    pid: int
    boot: bytes
    lease_s: float
    static: bool
    """It was given a name, so its place is kept for its lease when it is gone."""
    kept_ns: int
    """Closed, and its place kept until this time of the monotonic clock; 0 while it runs."""
    queues: tuple[str, ...]
    """What it subscribes to, sorted."""

    def pack(self) -> bytes:
        raw = codec.pack(
            [self.id, self.pid, self.boot, self.lease_s, self.static, self.kept_ns, list(self.queues)],
        )
        return raw + batch.checksum(raw)

    @staticmethod
    def unpack(raw: bytes) -> MemberRow:
        id, pid, boot, lease_s, static, kept_ns, queues = codec.unpack(raw[:-_CHECKSUM_BYTES])
        return MemberRow(id, pid, boot, lease_s, static, kept_ns, tuple(queues))


def intact(raw: bytes) -> bool:
    """Whether a row of a group or of a member has the checksum that it was written with."""
    return len(raw) > _CHECKSUM_BYTES and batch.checksum(raw[:-_CHECKSUM_BYTES]) == raw[-_CHECKSUM_BYTES:]


class View(NamedTuple):
    """A group at one moment."""

    row: GroupRow
    members: dict[str, MemberRow]
    claims: dict[Partition, Claim]
    """Of all partitions of the queues asked for."""
    counts: dict[str, int]
    """How many partitions each of these queues has; 0 where there is no such queue."""


class Move(NamedTuple):
    """A position that is to move."""

    log: Log
    was: Claim
    """The claim under which its messages were taken."""
    next: int
    checkpoint: bytes | None = None
    """To be kept beside the position; None for what is there."""


class Table:
    """The rows of one group in one store."""

    def __init__(self, store: Store, group: str) -> None:
        self.store = store
        self.group = group
        self.mask = wakeup.mask_of(f"\0group\0{group}")
        """What is rung when something changed."""

    # --- reading ---

    def row(self, txn: Any) -> GroupRow:
        raw = txn.get(names.group_key(self.group))
        return GroupRow() if raw is None else GroupRow._make(_GROUP.unpack_from(raw))

    def members(self, txn: Any) -> dict[str, MemberRow]:
        """The members by name, those included whose place is kept."""
        prefix = names.member_key(self.group, "")
        found = self.store.rows(txn, prefix)
        return {key[len(prefix) :].decode(): MemberRow.unpack(raw) for key, raw in found}

    def member(self, txn: Any, name: str) -> MemberRow | None:
        raw = txn.get(names.member_key(self.group, name))
        return None if raw is None else MemberRow.unpack(raw)

    def look(self, queues: Iterable[str] | None = None) -> View:
        """The group and its claims on ``queues``; None for those that any member subscribes to."""
        with self.store.view() as txn:
            members = self.members(txn)
            if queues is None:
                queues = {queue for member in members.values() for queue in member.queues}
            counts = {queue: partitions_of(txn, queue) for queue in sorted(queues)}
            found: dict[Partition, Claim] = {}
            for queue, count in counts.items():
                for number in range(count):
                    claim = claims.read(txn, names.log_id(queue, number), self.group)
                    if claim is not None:
                        found[queue, number] = claim
            return View(self.row(txn), members, found, counts)

    def counts(self, queues: Iterable[str]) -> dict[str, int]:
        """How many partitions each queue has; 0 where there is no such queue."""
        with self.store.view() as txn:
            return {queue: partitions_of(txn, queue) for queue in sorted(queues)}

    def lag(self, queues: Iterable[str]) -> dict[Partition, int]:
        """Messages behind the group's positions, by partition; a partition that was never planned counts whole."""
        found: dict[Partition, int] = {}
        with self.store.view() as txn:
            for queue in sorted(queues):
                for number in range(partitions_of(txn, queue)):
                    claim = claims.read(txn, names.log_id(queue, number), self.group)
                    row = read_row(txn, queue, number)
                    at = row.first if claim is None else max(row.first, claim.next)
                    found[queue, number] = max(0, row.next - at)
        return found

    # --- who is there ---

    def lock_of(self, name: str) -> int:
        """The byte of the lock file that a member holds while it lives."""
        return locks.offset_of(f"\0member\0{self.group}\0{name}")

    def alive(self, name: str, row: MemberRow) -> bool:
        """Whether a member answers: it holds its lock, and its lease is not over."""
        if row.kept_ns or row.boot != boot():
            return False
        offset = self.lock_of(name)
        held = self.store.locks.mine(offset) or self.store.locks.holder(offset) is not None
        return held and self.left_s(row) > 0

    def left_s(self, row: MemberRow) -> float:
        """Seconds for which a member keeps its place although it does not answer; 0 or less when it is over."""
        if row.boot != boot():
            return 0.0
        if row.kept_ns:
            return (row.kept_ns - clock.monotonic_ns()) / 1e9
        return leases.left_s(self.store, row.id, row.lease_s)

    def gone(self, name: str, row: MemberRow) -> bool:
        """Whether a member has lost its place: dead without a name, or not heard of for its lease."""
        return self.left_s(row) <= 0 if row.static else not self.alive(name, row)

    # --- coming and going ---

    def join(self, name: str, row: MemberRow) -> bytes | None:
        """Put a member into the table, in the place of one of its name; returns the id of that one.

        One that comes back within its lease with the same queues finds its partitions as they were.
        """
        return self._commit(self._join, name, row)

    def _join(self, txn: Any, name: str, row: MemberRow) -> bytes | None:
        before = self.member(txn, name)
        txn.put(names.member_key(self.group, name), row.pack())
        self._touch(txn, anew=before is None or before.queues != row.queues)
        faults.point("group.inside")
        return before.id if before is not None else None

    def keep(self, name: str, row: MemberRow) -> None:
        """Say that a member has closed and that its place is kept for its lease."""
        until = clock.monotonic_ns() + int(row.lease_s * 1e9)
        kept = MemberRow(row.id, row.pid, row.boot, row.lease_s, row.static, until, row.queues)
        self._commit(self._replace, name, row.id, kept)

    def _replace(self, txn: Any, name: str, id: bytes, row: MemberRow) -> None:
        before = self.member(txn, name)
        if before is not None and before.id == id:
            txn.put(names.member_key(self.group, name), row.pack())
            self._touch(txn)

    def remove(self, gone: Mapping[str, bytes]) -> None:
        """Take members, by name and id, out of the table; those that came back meanwhile stay."""
        self._commit(self._remove, gone)
        for id in gone.values():
            leases.forget(self.store, id)

    def _remove(self, txn: Any, gone: Mapping[str, bytes]) -> None:
        removed = False
        for name, id in gone.items():
            row = self.member(txn, name)
            if row is not None and row.id == id:
                txn.delete(names.member_key(self.group, name))
                removed = True
        if removed:
            self._touch(txn, anew=True)
        faults.point("group.inside")

    # --- the plan ---

    def settle(self) -> bool:
        """Plan, where members or queues have changed since the last plan; the first that plans decides.

        Returns whether there was nothing to do; if not, look again: what was planned may be of yesterday by now.
        """
        seen = self.look()
        partitions = [(queue, number) for queue, count in seen.counts.items() for number in range(count)]
        planned = all(partition in seen.claims and seen.claims[partition].heir for partition in partitions)
        if planned and seen.row.planned == seen.row.generation:
            return True
        previous: dict[str, set[Partition]] = {}
        for partition, claim in seen.claims.items():
            previous.setdefault(claim.heir, set()).add(partition)
        wanted = plan({name: row.queues for name, row in seen.members.items()}, seen.counts, previous)
        heirs = {partition: name for name, given in wanted.items() for partition in given}
        self._commit(self._write_plan, seen.row, heirs, pages=len(heirs))
        return False

    def _write_plan(self, txn: Any, seen: GroupRow, heirs: Mapping[Partition, str]) -> None:
        row = self.row(txn)
        if row.generation != seen.generation or row.planned != seen.planned:
            return  # somebody was faster, or it is of yesterday
        for (queue, number), name in sorted(heirs.items()):
            log = names.log_id(queue, number)
            claim = claims.read(txn, log, self.group)
            if claim is None:
                claims.put(txn, log, self.group, claims.first(txn, log, name))
            elif claim.heir != name:
                claims.put(txn, log, self.group, claim._replace(heir=name))
        self._put(txn, row._replace(planned=row.generation, changes=row.changes + 1))
        faults.point("group.inside")

    # --- the hand-over ---

    def claim(self, name: str, id: bytes, wanted: Mapping[Partition, Log]) -> dict[Partition, Claim]:
        """Take what the plan gives to a member and nobody holds; returns the claims as they are then.

        An owner that is dead, or not in the table any more, holds nothing: the new epoch fences it. Raises
        :class:`Diverged` where a log is not the one that the group has read.
        """
        return self._commit(self._claim, name, id, wanted, pages=len(wanted))

    def _claim(self, txn: Any, name: str, id: bytes, wanted: Mapping[Partition, Log]) -> dict[Partition, Claim]:
        members = self.members(txn)
        if name not in members or members[name].id != id:
            return {}
        living = {member.id for other, member in members.items() if self.alive(other, member)}
        taken: dict[Partition, Claim] = {}
        for partition, log in wanted.items():
            found = claims.read(txn, names.log_id(*partition), self.group)
            if found is None or found.heir != name or found.owner in living:
                continue
            mine = claims.standing(txn, log, self.group, found)._replace(owner=id, epoch=found.epoch + 1)
            claims.put(txn, names.log_id(*partition), self.group, mine)
            taken[partition] = mine
        if taken:
            self._touch(txn)
        faults.point("group.inside")
        return taken

    def release(self, given: Mapping[Partition, Claim]) -> None:
        """Give partitions up, each as far as it is still held under that claim's epoch."""
        self._commit(self._release, given, pages=len(given))

    def _release(self, txn: Any, given: Mapping[Partition, Claim]) -> None:
        for partition, claim in given.items():
            log = names.log_id(*partition)
            found = claims.read(txn, log, self.group)
            if found is not None and (found.owner, found.epoch) == (claim.owner, claim.epoch):
                claims.put(txn, log, self.group, found._replace(owner=NOBODY, epoch=found.epoch + 1))
        self._touch(txn)
        faults.point("group.inside")

    # --- positions ---

    def move(self, moves: Mapping[Partition, Move]) -> dict[Partition, Claim]:
        """Move the positions of what is still held; returns the new claims, without those that were refused."""
        found: dict[Partition, Claim] = self.store.commit(self._move, moves, pages=2 * len(moves))
        faults.point("group.after")
        return found

    def _move(self, txn: Any, moves: Mapping[Partition, Move]) -> dict[Partition, Claim]:
        found = {partition: self.moved(txn, partition, move) for partition, move in moves.items()}
        faults.point("group.inside")
        return {partition: claim for partition, claim in found.items() if claim is not None}

    def moved(self, txn: Any, partition: Partition, move: Move) -> Claim | None:
        """Move one position inside a transaction; None, and nothing written, where the claim is another by now.

        This is the fence. The owner alone would let an older step of the same member pass after a seek, the
        epoch alone one whose commit was repeated, and the index alone whoever computed something from the same
        messages before a seek came back to them.
        """
        log = names.log_id(*partition)
        found = claims.read(txn, log, self.group)
        if found is None or (found.owner, found.epoch, found.next) != (move.was.owner, move.was.epoch, move.was.next):
            return None
        seal = move.log.seal_before(txn, move.log.row(txn), move.next) if move.next != found.next else found.seal
        checkpoint = found.checkpoint if move.checkpoint is None else move.checkpoint
        claim = found._replace(next=move.next, seal=seal, checkpoint=checkpoint)
        claims.put(txn, log, self.group, claim)
        return claim

    # --- what anybody may change ---

    def pause(self, partitions: Collection[Partition], paused: bool) -> None:
        """Stop, or let go on, the reading of partitions, whoever reads them."""
        self._commit(self._pause, list(partitions), paused, pages=len(partitions))

    def _pause(self, txn: Any, partitions: Iterable[Partition], paused: bool) -> None:
        for partition in partitions:
            log = names.log_id(*partition)
            found = claims.read(txn, log, self.group) or claims.first(txn, log, "")
            claims.put(txn, log, self.group, found._replace(paused=paused))
        self._touch(txn)

    def seek(self, targets: Mapping[Partition, tuple[bytes, int, bytes]]) -> dict[Partition, Claim]:
        """Move positions (identity, index, seal), and raise the epochs: steps under way are fenced."""
        return self._commit(self._seek, targets, pages=len(targets))

    def _seek(self, txn: Any, targets: Mapping[Partition, tuple[bytes, int, bytes]]) -> dict[Partition, Claim]:
        moved: dict[Partition, Claim] = {}
        for partition, (identity, index, seal) in targets.items():
            log = names.log_id(*partition)
            found = claims.read(txn, log, self.group) or claims.first(txn, log, "")
            moved[partition] = found._replace(identity=identity, next=index, seal=seal, epoch=found.epoch + 1)
            claims.put(txn, log, self.group, moved[partition])
        self._touch(txn)
        faults.point("group.inside")
        return moved

    # --- inside ---

    def _touch(self, txn: Any, anew: bool = False) -> None:
        row = self.row(txn)
        generation = row.generation + 1 if anew else row.generation
        self._put(txn, GroupRow(generation, row.planned, row.changes + 1))

    def _put(self, txn: Any, row: GroupRow) -> None:
        txn.put(names.group_key(self.group), row.pack())

    def _commit(self, work: Callable[..., R], *args: Any, pages: int = 0) -> R:
        found = self.store.commit(work, *args, pages=pages)
        self.store.ring(self.mask)
        faults.point("group.after")
        return found


def partitions_of(txn: Any, queue: str) -> int:
    """How many partitions a queue has; 0 where there is none of that name."""
    raw = txn.get(names.queue_key(queue))
    return 0 if raw is None else int(codec.unpack(raw)["partitions"])


def new_id() -> bytes:
    return os.urandom(8)
