"""Members of consumer groups: readers outside graphs that share the partitions of queues.

    with Member(store, "orders", "billing") as member:       any number of members, in any process
        for message in member.follow():
            bill(message)
            member.commit()

One member of a group at a time reads a partition, and the position belongs to the group. The group plans again whenever
a member joins, leaves or dies (see table.py). Only partitions that move to another member wait:

1. Every call that reads also follows the group: it renews the lease, removes dead members, and plans if necessary.
2. A partition that the plan assigns to another member is not read any further. After all messages that were handed out
   of it are committed, ``on_revoked`` is called and the partition is released.
3. A partition that the plan assigns to this member is claimed as soon as no member holds it. Then ``on_assigned`` is
   called.
4. A commit compares, inside its transaction, owner, epoch and index of each position with those under which its
   messages were read. It refuses partitions that were taken over meanwhile with :class:`~cues.errors.Fenced`.

**The death of a process** is seen at once: the system releases its lock. A process that is stopped, or whose function
hangs, keeps its lock; it loses its place if it makes no call for ``lease_s``. Only its calls renew the lease. A thread
of ours would also renew it for a function that hangs. A step that takes longer calls :meth:`Member.keepalive`.

**An exception** may come out of a call at any point, a Ctrl-C for example, and the program may continue with the same
member: the next call first mends it (:meth:`Member._mend`). A message counts as handed out only if the call that read
it returned.

Not guaranteed: that a message is read only once. It is read again if its member dies or loses the partition before the
commit. A :class:`~cues.groups.session.Session` makes reading, writing and the position one commit.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar

from cues.base import names
from cues.base.checks import is_count
from cues.errors import BatchDamaged, Closed, ConcurrentUse, Fenced, InvalidArgument, QueueNotFound, StoreReadOnly
from cues.graphs.processor_rows import boot
from cues.groups import claims
from cues.groups.group_rows import MemberRow
from cues.groups.held import HeldPartition
from cues.groups.holdings import Holdings
from cues.groups.places import Place, Start
from cues.groups.session import Session
from cues.groups.settings import MAX_POLL_INTERVAL_S, MemberSettings, OnChange
from cues.groups.sticky import Partition, Together
from cues.groups.table import GroupTable, new_id
from cues.overrides import override
from cues.queues.base import view_of
from cues.queues.committed import Isolation
from cues.queues.partitioners import name_of
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.queues.tailer import Envelope, Reader
from cues.steps.ownership import LEASE_S
from cues.storage import wakeup

P = ParamSpec("P")
R = TypeVar("R")

_WILDCARDS: Final = frozenset("*?[")

Message = dict[str, Any]
Taken = list[tuple[HeldPartition, list[Message]]]
"""Messages, by partition."""


_PLACING: Final[dict[str, Callable[[Queue], object]]] = {
    "partitions": lambda queue: queue.partitions,
    "partitioner": lambda queue: name_of(queue.options.partitioner) or ("murmur2" if queue.options.key else "sticky"),
}
"""The options that must be equal if the messages of a key are to have one partition number in several queues."""


def _one_call(method: Callable[Concatenate[Member, P], R]) -> Callable[Concatenate[Member, P], R]:
    """Make a method of a member one call: in one thread at a time, and without effect after an exception.

    After the method has returned no function is called, so that no exception can come after it.
    """

    @functools.wraps(method)
    def call(self: Member, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check()
        if not self._busy.acquire(blocking=False):
            if self._closing:
                raise self._gone()
            raise ConcurrentUse(
                f"The member {self.name} is in use by another thread.", "make a member for each thread."
            )
        try:
            self._depth += 1
            if self._torn:
                self._mend()
            if self._depth > 1:  # a call by a callback, or by a signal handler
                return method(self, *args, **kwargs)
            if self._session is not None and self._session.ended:
                self._drop_session(self._session)
            self._undo = {}
            result = method(self, *args, **kwargs)
            self._undo = {}
            return result
        except BaseException:
            self._torn = True
            raise
        finally:
            self._depth -= 1
            self._busy.release()

    return call


class Member(Reader):
    """A member of a consumer group.

    ``queues``                a queue or its name, or several; they must exist. A name with a wildcard (``"orders-*"``)
                              is a pattern: the member also reads the queues of such names that are made later
    ``group``                 the name of the group. Its members share the partitions; its positions are in the store
    ``together``              lists of these queues that belong together, for a join: ``[["orders", "payments"]]``. The
                              member gets the same partition numbers of each, and claims them together. They must have
                              the same number of partitions and the same partitioner, and all members of the group the
                              same lists
    ``name``                  makes the member *static*: its place is kept for its lease after it closes or dies. If it
                              returns under this name in time, it keeps its partitions, and the others notice nothing.
                              Without a name its partitions move to other members at once
    ``lease_s``               seconds without a call after which the member counts as dead
    ``max_poll_interval_s``   seconds after the last call that reads for which :meth:`keepalive` renews the lease
    ``start``                 the first position on a queue on which the group has none: ``"earliest"``, the first
                              message; ``"latest"``, after the last message at the time when the first member joins; an
                              index; an aware datetime, the first message at or after it; :class:`Relative`, counted
                              from the first message, or from the end if it is negative. A partition that the queue
                              gets later is read from its first message
    ``expire_s``              seconds without a member after which the group may be forgotten: an append to a queue
                              whose retention ``"read"`` waits for it deletes it then. None: never. The value of the
                              member that joined last counts
    ``isolation``             ``"committed"``: messages of transactions are read after they are committed, see
                              :mod:`cues.queues.committed`. It is the same for all members of the group
    ``on_assigned``           called after partitions were claimed
    ``on_revoked``            called before partitions are released; it can still commit them
    ``on_lost``               called after partitions were taken away; they cannot be committed any more

    The callbacks get a list of (queue, partition). They run inside a call that reads or closes, in its thread. They may
    commit, seek, pause and close.

    One thread at a time uses a member; a second one gets :class:`ConcurrentUse`. Any thread may call :meth:`keepalive`
    and :meth:`close`. Raises :class:`QueueNotFound`, :class:`AlreadyRunning` (a member of that name lives),
    :class:`StoreReadOnly` and :class:`InvalidName`.
    """

    def __init__(
        self,
        store: Store,
        queues: str | Queue | Iterable[str | Queue],
        group: str,
        *,
        together: Iterable[Iterable[str | Queue]] = (),
        name: str | None = None,
        lease_s: float = LEASE_S,
        max_poll_interval_s: float = MAX_POLL_INTERVAL_S,
        start: Start = "earliest",
        expire_s: float | None = None,
        isolation: Isolation = "uncommitted",
        on_assigned: OnChange | None = None,
        on_revoked: OnChange | None = None,
        on_lost: OnChange | None = None,
    ) -> None:
        settings = MemberSettings(
            lease_s=lease_s,
            max_poll_interval_s=max_poll_interval_s,
            start=start,
            expire_s=expire_s,
            isolation=isolation,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            on_lost=on_lost,
        )
        if store.readonly:
            raise StoreReadOnly(
                f"The store {store.path} is open read-only, so a member cannot keep its positions there.",
                "open it writable, or read with queue.tailer().",
                path=store.path,
            )
        self.group = names.check("group", group)
        self.static = name is not None
        self.name = names.check("member", f"m-{new_id().hex()}" if name is None else name)
        self.lease_s = float(lease_s)
        self.store = store
        self.isolation: Isolation = isolation
        self.table = GroupTable(store, self.group, isolation)
        self._last: HeldPartition | None = None
        self._read: list[tuple[Partition, list[tuple[int, int]]]] = []
        """The runs of indices that the last call has read, see :attr:`HeldPartition.runs`."""
        self._turn = 0
        self._ready: list[HeldPartition] = []
        """Partitions with messages to read, in reverse order: the last one is read next."""
        self._busy = threading.RLock()
        self._depth = 0
        """The number of calls that run: the user's, and those of its callbacks."""
        self._undo: dict[HeldPartition, int] = {}
        """The partitions that the call under way has read, each with the position before the call."""
        self._torn = False
        """True if an exception ended a call, so that memory may differ from the store."""
        self._closing = self._closed = False
        self._session: Session | None = None
        row, named = self._subscription(queues, together)
        self.holdings = Holdings(self.table, self.name, settings, row, named)

    @property
    def _queues(self) -> list[str]:
        """The queues that it subscribes to, and those of which it still holds partitions."""
        return sorted({*self.holdings.row.queues, *[queue for queue, _ in self.holdings.held]})

    def _subscription(
        self, queues: str | Queue | Iterable[str | Queue], together: Iterable[Iterable[str | Queue]]
    ) -> tuple[MemberRow, list[str]]:
        """Return the row of a subscription, and the queues that it names itself.

        A name with a wildcard is a pattern, unless a queue has this name.
        """
        if isinstance(queues, (str, Queue)):
            queues = (queues,)
        if not isinstance(queues, Iterable):
            raise InvalidArgument(f"The queues are {queues!r}.", "pass a name, a queue, or a list of them.")
        wanted = sorted({queue.id if isinstance(queue, Queue) else names.check("queue", queue) for queue in queues})
        if not wanted:
            raise InvalidArgument("The member subscribes to no queue.", "name one: Member(store, 'orders', 'billing').")
        known = set(self.store.queues())
        patterns = tuple(queue for queue in wanted if queue not in known and not _WILDCARDS.isdisjoint(queue))
        named = [queue for queue in wanted if queue not in patterns]
        self._check_queues(named)
        subscribed = {*named, *[queue for pattern in patterns for queue in self.store.matching(pattern)]}
        sets = self._sets(together, subscribed)
        row = MemberRow(
            b"", os.getpid(), boot(), self.lease_s, self.static, 0, tuple(sorted(subscribed)), sets, patterns
        )
        return row, named

    def _check_queues(self, queues: Iterable[str]) -> None:
        for queue, count in self.table.counts(queues).items():
            if not count:
                raise QueueNotFound(
                    f"The store {self.store.path} has no queue {queue!r}; it has"
                    f" {', '.join(self.store.queues()) or 'none'}.",
                    f"call store.queue({queue!r}, partitions=…, key=…) first.",
                    queue=queue,
                )

    def _sets(self, together: Iterable[Iterable[str | Queue]], known: Collection[str]) -> Together:
        """Return the sets of queues that belong together, after a check that a join over them can be right."""
        sets: list[tuple[str, ...]] = []
        if not isinstance(together, Iterable):
            raise InvalidArgument(f"together is {together!r}.", "pass lists: [['orders', 'payments']].")
        for queues in together:
            if isinstance(queues, (str, Queue)) or not isinstance(queues, Iterable):
                raise InvalidArgument(
                    f"together has {queues!r}, which is not a list of queues.", "pass lists: [['orders', 'payments']]."
                )
            ids = sorted({queue.id if isinstance(queue, Queue) else queue for queue in queues})
            unknown = [queue for queue in ids if queue not in known]
            twice = [queue for queue in ids if any(queue in others for others in sets)]
            for wrong, what in ((unknown, "is not a queue of this member"), (twice, "is in two lists")):
                if wrong:
                    raise InvalidArgument(f"together has {wrong[0]!r}, which {what}.", "name each queue once.")
            if len(ids) < 2:
                raise InvalidArgument(f"together has a list of {len(ids)} queues.", "name two or more in each list.")
            sets.append(tuple(ids))
            first, *others = (self.store.queue(queue) for queue in ids)
            for other in others:
                for option, of in _PLACING.items():
                    if of(first) != of(other):
                        raise InvalidArgument(
                            f"{first.id!r} and {other.id!r} cannot be read together: {option} is {of(first)!r} and"
                            f" {of(other)!r}, so the messages of a key have other partition numbers.",
                            "make them alike; cues grow changes the number of partitions.",
                        )
        return tuple(sorted(sets))

    @_one_call
    def subscribe(
        self, queues: str | Queue | Iterable[str | Queue], together: Iterable[Iterable[str | Queue]] = ()
    ) -> None:
        """Read other queues from now on; the arguments are those of the member itself.

        Partitions of queues that it leaves are released as in a rebalance: when all messages that were handed out are
        committed. The group keeps its positions on them. Partitions of queues that stay do not move for it. ``start``
        decides about queues on which the group has no position. Nothing changes if an error is raised.
        """
        self._no_session("subscribe")
        if self.holdings.calling:
            raise InvalidArgument("A callback cannot subscribe.", "call subscribe() after the call that reads.")
        row, named = self._subscription(queues, together)
        self._keep_up()
        while not self.holdings.subscribe(row, named):
            self.holdings.stale()
            self._keep_up()  # it lost its place, and joins again
        self.holdings.stale()
        self._keep_up()
        self._ready.clear()

    # --- reading ---

    @override
    @_one_call
    def read(self, block: bool = False, timeout: float | None = None) -> Message | None:
        """Return the next message of any partition that this member holds; None if there is none.

        With ``block`` it waits for one, at most ``timeout`` seconds. :attr:`partition` and :attr:`envelope` describe
        the message. Partitions take turns; the order is kept within each. Raises :class:`Closed`,
        :class:`Fenced` (another process has this member's name), :class:`BatchDamaged` and :class:`Diverged`.
        """
        self._no_session("read")
        taken = self.take(1, timeout if block else 0.0)
        return taken[0][1][0] if taken else None

    @_one_call
    def read_many(self, n: int) -> list[Message]:
        """Return the next messages, at most ``n``, without waiting. :meth:`poll` returns them by partition."""
        return [message for messages in self.poll(n=n).values() for message in messages]

    @_one_call
    def poll(self, timeout: float | None = 0.0, n: int = 500) -> dict[Partition, list[Message]]:
        """Return the next messages, at most ``n``, by partition.

        Waits for the first message for ``timeout`` seconds (None: without end). Empty if there was none.
        """
        self._no_session("read")
        polled: dict[Partition, list[Message]] = {}
        for held, messages in self.take(n, timeout):
            polled.setdefault(held.partition, []).extend(messages)
        return polled

    @property
    def partition(self) -> Partition | None:
        """Queue and partition of the message that was read last; None before the first."""
        return self._last.partition if self._last else None

    @property
    def envelope(self) -> Envelope | None:
        """Index, time, hash and metadata of the message that was read last; None before the first."""
        return self._last.envelope if self._last else None

    @property
    def indices(self) -> dict[Partition, list[int]]:
        """The indices of the messages that the last call of this member or its session returned, by partition.

        They are in the order of the messages, and have gaps where the partition has acknowledgements. With
        ``isolation="committed"`` they do not always grow, because messages are in the order of the commits.
        """
        indices: dict[Partition, list[int]] = {}
        for partition, runs in self._read:
            for run in runs:
                indices.setdefault(partition, []).extend(range(*run))
        return indices

    # --- assignment ---

    @property
    def assigned(self) -> list[Partition]:
        """The partitions that this member held at the end of its last call that reads, sorted."""
        return sorted(self.holdings.held)

    @_one_call
    def follow_group(self) -> list[Partition]:
        """Do what a call that reads does for the group, without reading; return the partitions that this member holds.

        Renews the lease, claims and releases partitions, and calls the callbacks.
        """
        self._keep_up()
        return self.assigned

    def changes(self) -> int:
        """The number of changes of the group so far: another one says that :meth:`follow_group` has work to do."""
        with self.store.core.view() as txn:
            return self.table.row(txn).changes

    def keepalive(self) -> None:
        """Renew the lease during work that takes longer than the lease. May be called from any thread.

        It has no effect later than ``max_poll_interval_s`` after the last call that reads. So a thread that only calls
        this cannot keep the partitions of a step that never ends.
        """
        self.holdings.beat()

    # --- positions ---

    @_one_call
    def commit(
        self,
        checkpoint: bytes | Mapping[Partition, bytes] | None = None,
        upto: Mapping[Partition, int] | None = None,
    ) -> None:
        """Commit the positions after all messages that were handed out, in one transaction, as durable as the store.

        ``upto`` commits a part of them: it has the index of the last message that is done (see :attr:`indices`), by
        partition. Partitions that it does not name are not committed. An index before the position changes nothing;
        one that was not handed out is refused with :class:`InvalidArgument`. After a death, the messages after
        it are read again; this member continues where it is. With ``isolation="committed"``, ``upto`` is refused with
        :class:`InvalidArgument`, because messages are not in the order of their indices.

        ``checkpoint`` (at most 3,000 bytes) is stored with every position that moves; a mapping stores one for each
        partition that it names. If partitions were taken over or moved by a seek meanwhile, the other partitions are
        committed, and :class:`Fenced` names the refused ones in ``partitions``. Their messages are read again, by this
        member or another.
        """
        self._no_session("commit")
        held = self.holdings.held
        checkpoints = self._checkpoints(checkpoint)
        ends = self._ends(upto)
        also = checkpoints if isinstance(checkpoint, Mapping) else {}
        moves = {}
        for partition in {*ends, *also}:
            of = held[partition]
            end = max(ends.get(partition, 0), of.claim.next - 1)
            if end >= of.claim.next or partition in also:
                moves[partition] = of.move(checkpoints.get(partition), end)
        written = self.table.move(moves) if moves else {}
        for partition, claim in written.items():
            held[partition].claim = claim
        lost = set(upto or ()) - set(ends)
        refused = sorted(lost | (set(moves) - set(written)))
        if refused:
            raise self._refused(refused)

    def _ends(self, upto: Mapping[Partition, int] | None) -> dict[Partition, int]:
        """Return the index of the last message to commit, by partition that is held: what ``upto`` names, or all."""
        held = self.holdings.held
        if upto is None:
            return {partition: of.next - 1 for partition, of in held.items()}
        if self.isolation == "committed":
            raise InvalidArgument(
                f"commit(upto=…) by the member {self.name}, which reads with isolation='committed': messages are in the"
                " order of the commits, so no index separates those that are done.",
                "read fewer messages in a call, poll(n=…), and commit() after each.",
            )
        if not isinstance(upto, Mapping) or any(isinstance(partition, str) for partition in upto):
            raise InvalidArgument(f"upto is {upto!r:.60}.", "pass the indices by partition: {('orders', 0): 7}.")
        self.table.named(self._queues, upto, f"The member {self.name}")
        for partition, index in upto.items():
            end = held[partition].next - 1 if partition in held else index
            if not is_count(index) or index > end:
                raise InvalidArgument(
                    f"upto has {index!r} for {_listed([partition])}, of which messages up to {end} were handed out.",
                    "pass the index of a message that was read: member.indices has those of the last call.",
                )
        return {
            partition: max(index, held[partition].claim.next - 1)
            for partition, index in upto.items()
            if partition in held
        }

    def _refused(self, partitions: list[Partition]) -> Fenced:
        """Read the positions of refused partitions from the store, and return the error of the commit."""
        seen = self.table.look({queue for queue, _ in partitions}).claims
        is_owner = all(p in seen and seen[p].owner == self.holdings.id for p in partitions)
        for partition in partitions:
            if partition in self.holdings.held:
                self.doubt(self.holdings.held[partition])
        return Fenced(
            f"The member {self.name} of {self.group} did not commit {_listed(partitions)}:"
            f" {'a seek moved the position' if is_owner else 'another member took over'} after the messages were read.",
            "continue to read: the messages are read again, by the member that holds the partition.",
            processor=self.group,
            reason="seek" if is_owner else "takeover",
            partitions=partitions,
        )

    def _checkpoints(self, checkpoint: bytes | Mapping[Partition, bytes] | None) -> dict[Partition, bytes]:
        if checkpoint is None:
            return {}
        if not isinstance(checkpoint, Mapping):
            return dict.fromkeys(self.holdings.held, claims.check_checkpoint(checkpoint))
        unknown = sorted(set(checkpoint) - set(self.holdings.held))
        if unknown:
            raise InvalidArgument(
                f"Checkpoints are given for {_listed(unknown)}, which this member does not hold.",
                f"name partitions that it holds: {_listed(self.assigned) or 'none at the moment'}.",
            )
        return {partition: claims.check_checkpoint(value) for partition, value in checkpoint.items()}

    def checkpoints(self) -> dict[Partition, bytes]:
        """The checkpoints that are stored with the positions of the partitions that this member holds."""
        return {partition: held.claim.checkpoint for partition, held in sorted(self.holdings.held.items())}

    def positions(self) -> dict[Partition, int]:
        """The group's committed position (the next index to read) on every partition of this member's queues."""
        seen = self.table.look(self._queues).claims
        logs = {(queue, number): view_of(self.holdings.queues[queue], number).core.log for queue, number in seen}
        with self.store.core.view() as txn:
            return {partition: logs[partition].index_of(txn, claim.next) for partition, claim in seen.items()}

    def lag(self) -> dict[Partition, int]:
        """The number of messages that the group has not committed, for every partition of this member's queues.

        Partitions of other members count too. One transaction reads all figures, so they are of one moment.
        """
        return self.table.lag(self._queues)

    @_one_call
    def seek(self, to: Place, *partitions: Partition | str) -> None:
        """Move to ``"start"``, ``"end"``, an index, a time (the first message at or after it) or :class:`Relative`.

        ``partitions`` are (queue, number), or a queue for all of its partitions, also those that other members hold.
        Without any, the seek moves all partitions that this member holds. An index that was purged becomes the first
        index that is left; an index after the end is refused; a relative place stops at either end. The seek is one
        transaction and raises the epochs: steps under way in any member are fenced, and their messages do not count as
        read.
        """
        self._no_session("seek")
        wanted = self._chosen(partitions)
        self.table.seek({(queue, n): view_of(self.holdings.queues[queue], n).core.log for queue, n in wanted}, to)
        self.holdings.stale()
        self._keep_up()

    def pause(self, *partitions: Partition | str) -> None:
        """Stop reading ``partitions`` until :meth:`resume`; without any, all that this member holds.

        The pause belongs to the partition: it is kept in the store, and stays when the partition moves.
        """
        self._pause(partitions, True)

    def resume(self, *partitions: Partition | str) -> None:
        """End a :meth:`pause`."""
        self._pause(partitions, False)

    def paused(self) -> list[Partition]:
        """The partitions of this member's queues that are paused."""
        return sorted(partition for partition, claim in self.table.look(self._queues).claims.items() if claim.paused)

    @_one_call
    def _pause(self, partitions: Iterable[Partition | str], paused: bool) -> None:
        self.table.pause(self._chosen(partitions), paused)
        self.holdings.stale()
        self._keep_up()

    def _chosen(self, partitions: Iterable[Partition | str]) -> list[Partition]:
        """Return the partitions that a caller names; those that this member holds if it names none."""
        wanted = self.table.named(self._queues, partitions, f"The member {self.name}")
        if not wanted:  # only then: a seek must also work on a partition that cannot be claimed
            self._keep_up()
            wanted = self.assigned
        if not wanted:
            raise InvalidArgument("This member holds no partition yet.", "name a queue or a partition in the call.")
        return wanted

    # --- inside ---

    def take(
        self,
        n: int,
        timeout: float | None,
        only: HeldPartition | None = None,
        single: bool = False,
        over: Callable[[], bool] = lambda: False,
    ) -> Taken:
        """Take up to ``n`` messages, by partition; from the partition ``only``, or from a ``single`` one.

        Waits for the first message. Takes nothing, and does not wait, if ``over`` returns True.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InvalidArgument(f"{n!r} is not a number of messages.", "pass an integer, 1 or more.")
        while True:
            taken = self._take(n, only, single, over)
            if taken or timeout == 0 or over():
                return taken
            mask = self.table.mask | wakeup.union(held.log.mask for held in self.holdings.held.values())
            holds = set(self.holdings.held)

            def ready() -> Taken | bool:
                # True: the held partitions have changed, so the wait must begin again with their doorbells.
                taken = self._take(n, only, single, over)
                return taken or set(self.holdings.held) != holds or over()

            started = time.monotonic()
            result = wakeup.wait([(self.store.core.doorbells, mask)], ready, timeout)
            if isinstance(result, list):
                return result
            if not result:
                return []
            if timeout is not None:
                timeout = max(0.0, timeout - (time.monotonic() - started))

    def _take(self, n: int, only: HeldPartition | None, single: bool, over: Callable[[], bool]) -> Taken:
        if self.holdings.calling:
            raise InvalidArgument(
                "on_assigned, on_revoked and on_lost cannot read: they are called in the middle of a read.",
                "call only commit(), seek(), pause() or close() there.",
            )
        self._keep_up()
        if self._closing:  # by another thread, or a callback
            raise self._gone()
        self._undo = {}  # the last look found nothing, so there is nothing to undo; a seek may have come since
        taken: Taken = []
        read = self._read = []
        left = 0 if over() else n
        while left:
            held = self._next(only)
            if held is None:
                break
            self._undo.setdefault(held, held.next)
            try:
                messages = held.read(left)
            except BatchDamaged:
                self._serve(held)  # the others come first the next time
                if taken:  # these must be returned; the next call raises the error
                    break
                raise
            if len(messages) < left:
                self._ready = [other for other in self._ready if other is not held]
            if messages:
                self._last = held
                self._serve(held)
                taken.append((held, messages))
                read.append((held.partition, held.runs))
                left -= len(messages)
            if (single and taken) or (only is not None and not messages):
                break
        return taken

    def _next(self, only: HeldPartition | None) -> HeldPartition | None:
        """Return the partition to read next: of those with messages, the one that was served longest ago."""
        if only is not None:
            return only
        self._ready = [held for held in self._ready if held.readable]
        if not self._ready:
            with self.store.core.view() as txn:
                waiting = [held for held in self.holdings.held.values() if held.readable and held.waiting(txn)]
            self._ready = sorted(waiting, key=lambda held: held.served, reverse=True)
        return self._ready.pop() if self._ready else None

    def _serve(self, held: HeldPartition) -> None:
        self._turn += 1
        held.served = self._turn

    def _holds(self, held: HeldPartition) -> bool:
        return self.holdings.held.get(held.partition) is held

    @_one_call
    def within(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a part of a session as one call of the member."""
        return work(*args, **kwargs)

    def _mend(self) -> None:
        """Make memory agree with the store, after an exception ended a call. An exception may end this too.

        1. Restore the positions from before the call, so that its messages are read again. Not if that call is still
           under way: then the exception ended a call of its callback.
        2. Read the claims from the store. They tell which transactions of the call were committed.
        """
        self._ready.clear()
        if self._depth == 1:
            for held, next in self._undo.items():
                held.next = next
            self._undo = {}
        self.holdings.agree()
        self._torn = False

    def _keep_up(self) -> None:
        if not self.holdings.calling and self.holdings.keep_up():
            self._ready.clear()

    def _check(self) -> None:
        self.store.core.check_open()
        if self._closed:
            raise self._gone()

    def _gone(self) -> Closed:
        return Closed(f"The member {self.name} of {self.group} is closed.", "make a new Member(...).")

    # --- sessions ---

    @_one_call
    def session(self, partitions: Literal["one", "all"] = "one") -> Session:
        """Begin a step that reads, writes to queues of this store, and commits both together.

        It reads from one partition, or, with ``"all"``, from every partition that this member holds, of all its queues;
        then one commit moves all of their positions. See :class:`cues.groups.Session`.

        A session that is still open is aborted: after an exception out of this call the program may not have that
        session.
        """
        if partitions not in ("one", "all"):
            raise InvalidArgument(f"session(partitions={partitions!r}).", "pass 'one' or 'all'.")
        if self._session is not None:
            self._session.abandon()
            self._drop_session(self._session)
        self._keep_up()
        under_way = [partition for partition, held in sorted(self.holdings.held.items()) if held.dirty]
        if under_way:
            raise InvalidArgument(
                f"Messages of {_listed(under_way)} were handed out and are not committed; the commit of a session would"
                " commit them too.",
                "call member.commit() first, or member.seek(Relative(0)) to read them again.",
            )
        self._session = Session(self, partitions == "one")
        return self._session

    def _drop_session(self, session: Session) -> None:
        """End a session that was not committed, or may not have been: continue from the position in the store."""
        for held in session.parts:
            self.doubt(held)
        self.session_committed()

    def session_committed(self) -> None:
        """End a session that was committed."""
        self.holdings.stepping = ()
        self._session = None

    def doubt(self, held: HeldPartition) -> None:
        """Drop the messages that were read of a partition, and continue from the position in the store."""
        self._ready.clear()
        self.holdings.stale()
        if self._holds(held) and not self.store.closed:
            with self.store.core.view() as txn:
                claim = claims.read(txn, names.log_id(*held.partition), self.group)
            if claim is not None and claim.owner == held.claim.owner:
                held.claim = claim
                held.rewind()

    def _no_session(self, what: str) -> None:
        if self._session is not None:
            raise InvalidArgument(
                f"A session of the member {self.name} is open, so the member itself cannot {what}.",
                "call session.end(...) first, or member.session() to abort it and begin a new one.",
            )

    # --- end ---

    @override
    def close(self) -> None:
        """Release all partitions (``on_revoked`` is called first) and close. Waits for a call of another thread.

        Messages that were handed out and not committed are read again. A member without a name leaves the group; the
        place of a static member is kept for its lease, see :meth:`leave`.
        """
        self._end(leave=not self.static)

    def leave(self) -> None:
        """Close, and leave the group at once, also as a static member: its partitions move to other members."""
        self._end(leave=True)

    def _end(self, leave: bool) -> None:
        self._closing = True
        self.store.core.ring_own()
        with self._busy:
            if not self._closed:
                try:
                    if self._session is not None:
                        self._session.abandon()
                    self.holdings.end(leave)
                finally:
                    self._closed = self.holdings.over

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.holdings.held)} partitions"
        return f"<cues.groups.Member {self.name} of {self.group}: {state}>"


def _listed(partitions: Iterable[Partition]) -> str:
    return ", ".join(f"{queue}/{number}" for queue, number in partitions)
