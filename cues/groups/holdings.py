"""What a member holds, kept in step with its group.

One call, :meth:`Holdings.keep_up`, does everything that being a member takes, in the thread of the member's user:

    beat ─▸ bury the dead ─▸ anything changed? ─▸ am I in the table? ──no──▸ all is lost: join anew
                                    │                    │ yes
                                    no                   ╰─▸ is the plan of this generation? ──no──▸ plan
                                    ▼                                   │ yes
                                   done          lost, sought, to give up, to claim, one after the other

A partition that is on its way to another member is **leaving**: nothing more is read from it, and it is given up as
soon as all that was handed out of it is committed, or after the lease at the latest. Partitions that stay notice
nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from cues import leases, locks
from cues.errors import AlreadyRunning, Closed, Fenced
from cues.groups.held import Held
from cues.groups.sticky import Partition
from cues.groups.table import MemberRow, Table, View, new_id
from cues.leases import Lease
from cues.ownership import boot

if TYPE_CHECKING:
    from cues.claims import Claim
    from cues.queue import Queue

LOOK_NS: Final = 100_000_000
"""How often a member looks whether others are dead: two system calls for each of them."""
CHECK_NS: Final = 2_000_000
"""How often a busy member looks whether its group changed: one row."""

OnChange = Callable[[list[Partition]], object]


class Holdings:
    """The partitions of one member. Used by one thread at a time, but for :meth:`beat` and :meth:`let_go`."""

    def __init__(
        self,
        table: Table,
        name: str,
        static: bool,
        lease_s: float,
        queues: Mapping[str, Queue],
        on_assigned: OnChange | None,
        on_revoked: OnChange | None,
        on_lost: OnChange | None,
    ) -> None:
        """Join the group. Raises :class:`AlreadyRunning` where a member of that name lives."""
        self.table = table
        self.store = table.store
        self.name = name
        self.static = static
        self.lease_s = lease_s
        self.queues = queues
        self.held: dict[Partition, Held] = {}
        self.stuck: set[Partition] = set()
        """Partitions with a step under way, which are not given up before it has ended."""
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._locks = self.store.locks
        self._waits = False
        """Whether something that is to come is still held by another, who may die without a word."""
        self._seen = -1
        """The group's count of changes that this member has followed."""
        self._check_at = self._look_at = 0
        self._counts: dict[str, int] = {}
        """How many partitions its queues had when it looked last."""
        self._id = b""
        self._lease: Lease | None = None
        self._fenced: Fenced | None = None
        self._giving: set[Partition] = set()
        """What is being given up: its callback may close the member, which gives up the rest."""
        self._ended = False
        self.calling = False
        """Whether a callback is running."""
        self._locked = self._take_name()
        try:
            self._join()
        except BaseException:
            self.let_go()
            raise

    # --- being there ---

    def _take_name(self) -> bool:
        """Take the lock of the name; False where one that does not answer holds it, whose place is taken over."""
        offset = self.table.lock_of(self.name)
        if self._locks.try_lock(offset):
            return True
        here = self._locks.mine(offset)
        pid = os.getpid() if here else self._locks.holder(offset) or 0
        with self.store.view() as txn:
            row = self.table.member(txn, self.name)
        left = 0.0 if row is None or row.kept_ns else self.table.left_s(row)
        if left > 0 or (row is None and locks.process_state(pid) != "stopped"):
            where = "in this process" if here else f"by process {pid} ({locks.process_state(pid)})"
            raise AlreadyRunning(
                f"The member {self.name} of {self.table.group} is run {where} already.",
                f"another name, or again in {left:.0f} s if that one does not answer." if left > 0 else "another name.",
                pid=pid,
            )
        return False

    def _join(self) -> None:
        self._id = new_id()
        if self._lease is not None:
            self._lease.close()
        self._lease = Lease(self.store, self._id)
        before = self.table.join(self.name, self._row())
        if before is not None:
            leases.forget(self.store, before)
        self._seen = -1

    def _row(self) -> MemberRow:
        return MemberRow(self._id, os.getpid(), boot(), self.lease_s, self.static, 0, tuple(sorted(self.queues)))

    @property
    def id(self) -> bytes:
        """Of this incarnation: the owner in its claims."""
        return self._id

    def beat(self) -> None:
        """Renew the lease. From any thread."""
        lease = self._lease
        if lease is not None:
            lease.beat()

    def let_go(self) -> None:
        """Give lock and lease back. From any thread, and when the store is closed already."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
        if self._locked:
            self._locked = False
            self._locks.unlock(self.table.lock_of(self.name))

    # --- keeping up ---

    def stale(self) -> None:
        """Look at everything anew the next time: something was not as this member knew it."""
        self._seen = -1
        self._check_at = 0

    def keep_up(self) -> bool:
        """Do what the group asks of this member; returns whether what it holds has changed.

        Raises :class:`Fenced` where another process has its name: the member is at its end then. What a callback
        raises is raised.
        """
        if self._fenced is not None:
            raise self._fenced
        now = time.monotonic_ns()
        if now < self._check_at:
            return False
        self._check_at = now + CHECK_NS
        self.beat()
        looking = now >= self._look_at
        if looking:
            self._look_at = now + LOOK_NS
            self._bury()
            if not self._locked:
                self._locked = self._locks.try_lock(self.table.lock_of(self.name))
        with self.store.view() as txn:
            changes = self.table.row(txn).changes
        if changes == self._seen and not (looking and (self._waits or self._leaving())):
            return False
        before = list(self.held.values())
        while not self._ended and not self._follow():
            pass
        return before != list(self.held.values())

    def _bury(self) -> None:
        """Take out of the table who is gone; and plan for a queue that has grown."""
        seen = self.table.look(())
        gone = {name: row.id for name, row in seen.members.items() if name != self.name and self.table.gone(name, row)}
        if gone:
            self.table.remove(gone)
        counts = self.table.counts(self.queues)
        if counts != self._counts:
            while not self.table.settle():
                pass
            self._counts = counts

    def _follow(self) -> bool:
        """One look at the table; False if another is needed at once."""
        seen = self.table.look(self.queues)
        me = seen.members.get(self.name)
        if me is None or me.id != self._id:
            self._lose(list(self.held))
            if self._ended:
                return True
            if me is not None:
                self._fenced = _taken(self.table.group, self.name, me)
                self.let_go()
                raise self._fenced
            self._join()
            return False
        if seen.row.planned != seen.row.generation:
            self.table.settle()
            return False
        self._seen = seen.row.changes
        lost = [partition for partition in self.held if not self._mine(seen.claims.get(partition))]
        if lost:
            self._lose(lost)
            return False  # its callback may have done anything
        for partition, held in self.held.items():
            held.follow(seen.claims[partition], self.name)
        leaving = [held for held in self._leaving() if self._may_leave(held)]
        if leaving:
            self.give_up(leaving)
            return False
        return self._claim(seen)

    def _mine(self, claim: Claim | None) -> bool:
        return claim is not None and claim.owner == self._id

    def _leaving(self) -> list[Held]:
        return [held for held in self.held.values() if not held.heir]

    def _may_leave(self, held: Held) -> bool:
        """Whether a partition can be given up: nothing is under way, or has been for too long."""
        if time.monotonic_ns() - held.leaving_ns > self.lease_s * 1e9:
            return True
        return not held.dirty and held.partition not in self.stuck

    def _lose(self, partitions: Iterable[Partition]) -> None:
        lost = sorted(partitions)
        for partition in lost:
            del self.held[partition]
        self._tell(self._on_lost, lost)

    def give_up(self, leaving: Iterable[Held]) -> None:
        """Let others have these, after a last chance to commit."""
        partitions = sorted(held.partition for held in leaving if held.partition not in self._giving)
        if not partitions:
            return
        self._giving.update(partitions)
        try:
            self._tell(self._on_revoked, partitions)
        finally:
            self._giving.difference_update(partitions)
        # Not before: what the callback committed is in the claims by now. Nor what it lost, or closed.
        given = {partition: self.held.pop(partition).claim for partition in partitions if partition in self.held}
        if given:
            self.table.release(given)

    def _claim(self, seen: View) -> bool:
        wanted = [p for p, claim in seen.claims.items() if claim.heir == self.name and p not in self.held]
        self._waits = bool(wanted)
        living = {row.id for name, row in seen.members.items() if self.table.alive(name, row)}
        free = [partition for partition in wanted if seen.claims[partition].owner not in living]
        if not free:
            return True
        views = {partition: self.queues[partition[0]].view(partition[1]) for partition in free}
        taken = self.table.claim(self.name, self._id, {partition: view.log for partition, view in views.items()})
        for partition, claim in sorted(taken.items()):
            self.held[partition] = Held(partition, views[partition], claim)
        self._tell(self._on_assigned, sorted(taken))
        return not taken

    def _tell(self, callback: OnChange | None, partitions: list[Partition]) -> None:
        if callback is None or not partitions:
            return
        before, self.calling = self.calling, True
        try:
            callback(partitions)
        finally:
            self.calling = before

    # --- the end ---

    def end(self, leave: bool) -> None:
        """Give everything up, and the place as well, or keep that for the lease."""
        if self._ended:
            return
        self._ended = True
        try:
            if self._fenced is None:
                self.give_up(list(self.held.values()))
                if leave:
                    self.table.remove({self.name: self._id})
                else:
                    self.table.keep(self.name, self._row())
        except Closed:
            pass  # the store was closed first: what is held is anybody's now
        finally:
            self.held.clear()
            self.let_go()


def _taken(group: str, name: str, row: MemberRow) -> Fenced:
    return Fenced(
        f"Another process ({row.pid}) has become the member {name} of {group}, since this one was not heard of for its"
        " lease; this one has nothing any more.",
        "nothing here; a longer lease_s, or keepalive() in long work, if it was not stopped.",
        processor=group,
        reason="takeover",
    )
