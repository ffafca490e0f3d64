"""The partitions that a member holds, and how they follow the plan of its group.

One call, :meth:`Holdings.keep_up`, does all the work of a member, in the thread of the member's user:

    renew the lease ─▸ remove dead members ─▸ anything changed? ─▸ am I in the table? ──no──▸ all is lost: join again
                                                    │                    │ yes
                                                    no                   ╰─▸ is the plan of this generation? ─no─▸ plan
                                                    ▼                                   │ yes
                                                   done              drop what was lost, follow seeks, release, claim

A partition that the plan assigns to another member is **leaving**: nothing more is read from it. It is released as soon
as all messages that were handed out of it are committed, at the latest after the lease. Reading from the other
partitions continues.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeGuard

from cues.base import clock, names
from cues.base.events import log
from cues.errors import AlreadyRunning, Closed, Fenced
from cues.graphs.processor_rows import boot
from cues.groups import claims
from cues.groups.claims import Claim
from cues.groups.group_rows import MemberRow
from cues.groups.held import HeldPartition
from cues.groups.settings import MemberSettings, OnChange
from cues.groups.sticky import Partition, siblings
from cues.groups.table import Begin, GroupTable, GroupView, new_id
from cues.queues.base import read_as, view_of
from cues.queues.queue import Queue
from cues.queues.tailer import pending_read
from cues.storage import leases, locks
from cues.storage.leases import Lease

LOOK_NS: Final = 100_000_000
"""The interval at which a member looks for dead members: two system calls for each member."""
CHECK_NS: Final = 2_000_000
"""The interval at which a busy member looks for changes of its group: one row."""


class Holdings:
    """The partitions of one member. Used by one thread at a time, except :meth:`beat` and :meth:`let_go`."""

    def __init__(
        self,
        table: GroupTable,
        name: str,
        settings: MemberSettings,
        row: MemberRow,
        named: Collection[str],
    ) -> None:
        """Join the group. Raises :class:`AlreadyRunning` if a member of that name lives."""
        self.table = table
        self.store = table.store
        self.name = name
        self.static = row.static
        self.lease_s = row.lease_s
        self._settings = settings
        self.row = row
        """The row of this member, with the queues that it subscribes to, without the id of the join (:attr:`id`)."""
        self.queues: dict[str, Queue] = {}
        """The handles of its queues, also of those to which it no longer subscribes: it may still hold partitions."""
        self._named = named
        self._called_ns = clock.monotonic_ns()
        """The time of the last :meth:`keep_up`."""
        self._late = False
        """True if the log has the warning that the last :meth:`keep_up` is too long ago."""
        self.held: dict[Partition, HeldPartition] = {}
        self.stepping: Collection[HeldPartition] = ()
        """The partitions of the step under way, which are not released before the step has ended."""
        self._locks = self.store.core.locks
        self._waits = False
        """True if another member still holds a partition that is assigned to this one. It may die at any time."""
        self._seen = -1
        """The group's count of changes up to which this member has followed."""
        self._check_at = self._look_at = 0
        self._told: set[str] = set()
        """The queues about whose pending messages the log has a warning."""
        self._counts: dict[str, int] = {}
        """The number of partitions of each of its queues, at the last look."""
        self.id = b""
        """The id of the last join, which is the owner in the claims."""
        self._lease: Lease | None = None
        self._fenced: Fenced | None = None
        self._revoking: set[Partition] = set()
        """The partitions for which ``on_revoked`` is running: it may close the member, which releases the rest."""
        self._lost: list[Partition] = []
        """The lost partitions, until ``on_lost`` has returned."""
        self._ended = False
        self.over = False
        """True after the lock and the lease were released."""
        self.calling = False
        """True while a callback is running."""
        self._locked = False
        try:
            self._locked = self._take_name()
            self._join()
            self.store.core.on_close.append(self.let_go)
        except BaseException:
            self.let_go()
            raise

    def _take_name(self) -> bool:
        """Take the lock of the name. Return False if a process that does not answer holds it, and loses its place."""
        offset = self.table.lock_of(self.name)
        if self._locks.try_lock(offset):
            return True
        is_own = self._locks.mine(offset)
        pid = os.getpid() if is_own else self._locks.holder(offset) or 0
        with self.store.core.view() as txn:
            row = self.table.member(txn, self.name)
        left = 0.0 if row is None or row.kept_ns else self.table.left_s(row)
        if left > 0 or (row is None and locks.process_state(pid) != "stopped"):
            where = "in this process" if is_own else f"in process {pid} ({locks.process_state(pid)})"
            raise AlreadyRunning(
                f"The member {self.name} of {self.table.group} already runs {where}.",
                "use another name."
                + (f" If that member does not answer, try again in {left:.0f} s." if left > 0 else ""),
                pid=pid,
            )
        return False

    def _join(self) -> None:
        self.id = new_id()
        if self._lease is not None:
            self._lease.close()
        self._lease = Lease(self.store, self.id)
        self._bury()
        self._open(self.row)
        row = replace(self.row, id=self.id, pid=os.getpid(), boot=boot())
        before = self.table.join(self.name, row, self._begin(row, self._named), float(self._settings.expire_s or 0))
        if before is not None:
            leases.forget(self.store, before)
        self._seen = -1

    def subscribe(self, row: MemberRow, named: Collection[str]) -> bool:
        """Write another subscription into the member's row; memory follows the row (:meth:`_follow`).

        Returns False if the member is not in the table any more, and must join first.
        """
        self._open(row)
        begin = self._begin(row, named)
        return self.table.subscribe(self.name, replace(row, id=self.id), begin)

    def _open(self, row: MemberRow) -> None:
        isolation = self.table.isolation
        self.queues |= {q: read_as(self.store.queue(q), isolation) for q in row.queues if q not in self.queues}

    def _begin(self, row: MemberRow, named: Collection[str]) -> Begin:
        """Return where queues begin on which the group has no position. Not in a transaction: it opens partitions."""
        known = {queue for queue, _ in self.table.look(row.queues).claims}
        logs = {
            (queue, number): view_of(self.queues[queue], number).core.log
            for queue in row.queues
            if queue not in known and self._settings.start != "earliest"
            for number in range(self.queues[queue].partitions)
        }
        return Begin(self._settings.start, logs, named)

    def beat(self) -> None:
        """Renew the lease, unless the last :meth:`keep_up` is too long ago. May be called from any thread."""
        lease = self._lease
        if lease is None:
            return
        if clock.monotonic_ns() - self._called_ns <= self._settings.max_poll_interval_s * 1e9:
            lease.beat()
        elif not self._late:
            self._late = True
            log.warning(
                "The member %s of %s has not polled for %g s (max_poll_interval_s): keepalive() no longer renews its"
                " lease, and other members take its partitions in at most %g s.",
                self.name,
                self.table.group,
                self._settings.max_poll_interval_s,
                self.lease_s,
                group=self.table.group,
                member=self.name,
            )

    def let_go(self) -> None:
        """Release the lock and the lease. May be called from any thread, and after the store was closed."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
        if self._locked:
            self._locks.unlock(self.table.lock_of(self.name))
            self._locked = False
        self.over = True

    def stale(self) -> None:
        """Make the next :meth:`keep_up` read everything again: this member's knowledge may be out of date."""
        self._seen = -1
        self._check_at = 0

    def agree(self) -> None:
        """Read the claims of the held partitions from the store, after an exception ended a call.

        The claims tell which transactions of that call were committed. The next :meth:`keep_up` handles partitions that
        this member owns and does not hold, or holds and no longer owns.
        """
        self.stale()
        with self.store.core.view() as txn:
            for partition, held in self.held.items():
                claim = claims.read(txn, names.log_id(*partition), self.table.group)
                if self._mine(claim):
                    held.follow(claim, self.name)
                held.reopen()

    def keep_up(self) -> bool:
        """Do this member's part of the group's work; returns whether the held partitions have changed.

        Raises :class:`Fenced` if another process has taken its name: the member can then do nothing more. An exception
        of a callback is raised, and the next call calls the callback again.
        """
        if self._fenced is not None:
            raise self._fenced
        self._called_ns, self._late = clock.monotonic_ns(), False
        now = time.monotonic_ns()
        if now < self._check_at:
            return False
        self._check_at = now + CHECK_NS
        self.beat()
        looking = now >= self._look_at
        if looking:
            self._look_at = now + LOOK_NS
            self._remove_dead()
            if not self._locked:
                self._locked = self._locks.try_lock(self.table.lock_of(self.name))
        with self.store.core.view() as txn:
            changes = self.table.row(txn).changes
        leaving = any(not held.assignee for held in self.held.values())
        if changes == self._seen and not (looking and (self._waits or leaving)):
            return False
        before = list(self.held.values())
        self._seen = -1  # until the end: if an exception comes out of this, the next call looks again
        while not self._ended and not self._follow():
            pass
        return before != list(self.held.values())

    def _remove_dead(self) -> None:
        """Remove dead members from the table, subscribe to new queues, and plan again if a queue has grown."""
        self._bury()
        if self.row.patterns:
            new = {queue for pattern in self.row.patterns for queue in self.store.matching(pattern)}
            if not new <= set(self.row.queues):
                self.subscribe(replace(self.row, queues=tuple(sorted(new | set(self.row.queues)))), ())
        counts = self.table.counts(self.queues)
        if counts != self._counts:
            while not self.table.settle():
                pass
            self._counts = counts

    def _bury(self) -> None:
        seen = self.table.look(())
        gone = {name: row.id for name, row in seen.members.items() if name != self.name and self.table.gone(name, row)}
        if gone:
            self.table.remove(gone)

    def _follow(self) -> bool:
        """Follow one look at the table; False if another look is needed at once."""
        seen = self.table.look(self.queues)
        me = seen.members.get(self.name)
        if me is None or me.id != self.id:
            self._lose(list(self.held))
            if self._ended:
                return True
            if me is not None:
                self._fenced = _taken(self.table.group, self.name, me)
                self.let_go()
                raise self._fenced
            self._join()
            return False
        if replace(me, id=b"") != replace(self.row, id=b""):
            self._open(me)
            self.row = me
            return False  # with the claims on its new queues
        if seen.row.planned != seen.row.generation:
            self.table.settle()
            return False
        lost = [partition for partition in self.held if not self._mine(seen.claims.get(partition))]
        if lost or self._lost:
            self._lose(lost)
            return False  # the callback may have changed anything
        for partition, held in self.held.items():
            held.follow(seen.claims[partition], self.name)
        # Owned and not held: the claim was committed, and then an exception ended the call.
        owned = {p: claim for p, claim in seen.claims.items() if self._mine(claim) and p not in self.held}
        if owned:
            self._hold(owned)
        if not all(held.assigned for held in self.held.values()):
            self._tell_assigned()
            return False
        leaving = [held for held in self.held.values() if held.revoked or (not held.assignee and self._may_leave(held))]
        if leaving:
            self.give_up(leaving)
            return False
        if not self._claim(seen):
            return False
        self._seen = seen.row.changes
        return True

    def _mine(self, claim: Claim | None) -> TypeGuard[Claim]:
        return claim is not None and claim.owner == self.id

    def _may_leave(self, held: HeldPartition) -> bool:
        """Return whether a partition can be released: no message is uncommitted, or it has been leaving for a lease."""
        if clock.monotonic_ns() - held.leaving_ns > self.lease_s * 1e9:
            return True
        return not held.dirty and held not in self.stepping

    def _lose(self, partitions: Iterable[Partition]) -> None:
        """Drop partitions that were taken away, and call ``on_lost`` for those that were not revoked before."""
        gone = list(partitions)
        self._lost = sorted({*self._lost, *[partition for partition in gone if not self.held[partition].revoked]})
        for partition in gone:
            del self.held[partition]
        self._tell(self._settings.on_lost, self._lost)
        self._lost = []

    def give_up(self, leaving: Iterable[HeldPartition]) -> None:
        """Call ``on_revoked``, which may still commit, and release the partitions.

        Memory follows the store: a partition is held until its release is committed. After an exception out of the
        release, :class:`WriterStuck` for example, the next call releases it.
        """
        told = sorted(held.partition for held in leaving if not held.revoked and held.partition not in self._revoking)
        self._revoking.update(told)
        try:
            self._tell(self._settings.on_revoked, told)
        finally:
            self._revoking.difference_update(told)
        # Only now: the callback may have committed, and the claims have changed. It may also have lost or closed some.
        for partition in told:
            if partition in self.held:
                self.held[partition].revoked = True
        given = [partition for partition, held in self.held.items() if held.revoked]
        if given:
            self.table.release(self.id, given)
            for partition in given:
                self.held.pop(partition, None)

    def _claim(self, seen: GroupView) -> bool:
        """Claim the partitions that the plan assigns to this member and no other holds; False if any was claimed."""
        wanted = [p for p, claim in seen.claims.items() if claim.assignee == self.name and p not in self.held]
        self._waits = bool(wanted)
        living = {row.id for name, row in seen.members.items() if self.table.alive(name, row)}
        others = {partition for partition, claim in seen.claims.items() if claim.owner in living - {self.id}}
        free = [p for p in wanted if others.isdisjoint((p, *siblings(p, self.row.together)))]
        if not free:
            return True
        logs = {partition: view_of(self.queues[partition[0]], partition[1]).core.log for partition in free}
        taken = self.table.claim(self.name, self.id, logs, self.row.together)
        self._hold(taken)
        return not taken

    def _hold(self, taken: Mapping[Partition, Claim]) -> None:
        """Hold partitions that this member owns in the store. The next look at the table calls ``on_assigned``."""
        self.held |= {p: self._held(p, taken[p]) for p in sorted(taken)}

    def _held(self, partition: Partition, claim: Claim) -> HeldPartition:
        queue, number = partition
        held = HeldPartition(partition, view_of(self.queues[queue], number), claim)
        if self.table.isolation == "uncommitted":
            held.on_pending = functools.partial(self._tell_of_pending, queue)
        return held

    def _tell_of_pending(self, queue: str, producer: str) -> None:
        if queue not in self._told:
            self._told.add(queue)
            log.warning(
                "%s",
                pending_read(f"The group {self.table.group}", queue, producer),
                group=self.table.group,
                queue=queue,
                producer=producer,
            )

    def _tell_assigned(self) -> None:
        new = sorted(partition for partition, held in self.held.items() if not held.assigned)
        self._tell(self._settings.on_assigned, new)
        for partition in new:
            if partition in self.held:
                self.held[partition].assigned = True

    def _tell(self, callback: OnChange | None, partitions: list[Partition]) -> None:
        if callback is None or not partitions:
            return
        before, self.calling = self.calling, True
        try:
            callback(partitions)
        finally:
            self.calling = before

    def end(self, leave: bool) -> None:
        """Release everything, and leave the group or keep the place for the lease. May be repeated until it returns."""
        if self.over:
            return
        self._ended = True
        try:
            if self._fenced is None:
                self.give_up(list(self.held.values()))
                if leave:
                    self.table.remove({self.name: self.id})
                else:
                    self.table.keep(self.name, replace(self.row, id=self.id))
        except Closed:
            pass  # the store was closed first: other members may claim the partitions
        finally:
            self.held.clear()
            self.let_go()


def _taken(group: str, name: str, row: MemberRow) -> Fenced:
    return Fenced(
        f"Process {row.pid} has become the member {name} of {group}, because the lease of this member expired. This"
        " member holds no partition any more.",
        "close this member. If its process was not stopped, use a longer lease_s, or call keepalive() in long work.",
        processor=group,
        reason="takeover",
    )
