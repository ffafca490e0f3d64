"""Members of consumer groups: readers outside graphs that share the partitions of queues.

    with Member(store, "orders", "billing") as member:       any number of members, in any process
        for message in member.follow():
            bill(message)
            member.commit()

One member of a group at a time reads a partition, and the position belongs to the group. The group plans again whenever
a member joins, leaves or dies (see table.py). Only partitions that move to another member pause:

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
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, get_args

from cues.base import names
from cues.base.closing import Closing
from cues.errors import BatchDamaged, Closed, ConcurrentUse, Fenced, InvalidArgument, QueueNotFound, StoreReadOnly
from cues.groups.held import HeldPartition
from cues.groups.holdings import Holdings, OnChange
from cues.groups.places import Place, target
from cues.groups.session import Session
from cues.groups.sticky import Partition
from cues.groups.table import GroupTable, Start, new_id
from cues.queues import claims
from cues.queues.base_tailer import Reader
from cues.queues.committed import Isolation, check_isolation
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.queues.tailer import Envelope
from cues.steps.ownership import LEASE_S
from cues.storage import wakeup

P = ParamSpec("P")
R = TypeVar("R")

MAX_POLL_INTERVAL_S: Final = 300.0
"""As Kafka's ``max.poll.interval.ms``."""

Message = dict[str, Any]
Taken = list[tuple[HeldPartition, list[Message]]]
"""Messages, by partition."""


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


class Member(Reader, Closing):
    """A member of a consumer group.

    ``queues``                a queue or its name, or several; they must exist
    ``group``                 the name of the group. Its members share the partitions; its positions are in the store
    ``name``                  makes the member *static*: its place is kept for its lease after it closes or dies. If it
                              returns under this name in time, it keeps its partitions, and the others notice nothing.
                              Without a name its partitions move to other members at once
    ``lease_s``               seconds without a call after which the member counts as dead
    ``max_poll_interval_s``   seconds after the last call that reads for which :meth:`keepalive` renews the lease
    ``start``                 the first position on a queue that the group has never read: ``"earliest"``, the first
                              message; ``"latest"``, after the last message at the time when the first member joins
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
        name: str | None = None,
        lease_s: float = LEASE_S,
        max_poll_interval_s: float = MAX_POLL_INTERVAL_S,
        start: Start = "earliest",
        isolation: Isolation = "uncommitted",
        on_assigned: OnChange | None = None,
        on_revoked: OnChange | None = None,
        on_lost: OnChange | None = None,
    ) -> None:
        for option, hook in (("on_assigned", on_assigned), ("on_revoked", on_revoked), ("on_lost", on_lost)):
            if not (hook is None or callable(hook)):
                raise InvalidArgument(f"{option}={hook!r} cannot be called.", "pass a function that takes a list.")
        if store.readonly:
            raise StoreReadOnly(
                f"The store {store.path} is open read-only, so a member cannot keep its positions there.",
                "open it writable, or read with queue.tailer().",
                path=store.path,
            )
        if not isinstance(lease_s, (int, float)) or not 0 < lease_s < float("inf"):
            raise InvalidArgument(
                f"lease_s is {lease_s!r}.", "pass seconds, more than the longest time between two calls."
            )
        if not isinstance(max_poll_interval_s, (int, float)) or not max_poll_interval_s > 0:
            raise InvalidArgument(
                f"max_poll_interval_s is {max_poll_interval_s!r}.",
                "pass seconds, more than the longest step; float('inf') for no bound.",
            )
        if start not in get_args(Start):
            raise InvalidArgument(f"start is {start!r}.", "pass 'earliest' or 'latest', or call seek().")
        self.group = names.check("group", group)
        self.static = name is not None
        self.name = names.check("member", f"m-{new_id().hex()}" if name is None else name)
        self.lease_s = float(lease_s)
        self.store = store
        check_isolation(isolation)
        self.isolation = isolation
        self.table = GroupTable(store, self.group, isolation)
        self._queues = self._opened((queues,) if isinstance(queues, (str, Queue)) else queues)
        self._outputs: dict[str, Queue] = {}
        self._last: HeldPartition | None = None
        self._turn = 0
        self._ready: list[HeldPartition] = []
        """Partitions with messages to read, in reverse order: the last one is read next."""
        self._busy = threading.RLock()
        self._depth = 0
        """The number of calls that run: the user's, and those of its callbacks."""
        self._undo: dict[HeldPartition, int] = {}
        """The partitions that the call under way has read, each with the position before the call."""
        self._torn = False
        """True if an exception came out of a call, so that memory may differ from the store."""
        self._closing = self._closed = False
        self._session: Session | None = None
        self.holdings = Holdings(
            self.table,
            self.name,
            self.static,
            self.lease_s,
            float(max_poll_interval_s),
            start,
            self._queues,
            on_assigned,
            on_revoked,
            on_lost,
        )

    def _opened(self, queues: Iterable[str | Queue]) -> dict[str, Queue]:
        if not isinstance(queues, Iterable):
            raise InvalidArgument(f"The queues are {queues!r}.", "pass a name, a queue, or a list of them.")
        wanted = sorted({queue.id if isinstance(queue, Queue) else queue for queue in queues})
        if not wanted:
            raise InvalidArgument("The member subscribes to no queue.", "name one: Member(store, 'orders', 'billing').")
        for queue, count in self.table.counts(names.check("queue", queue) for queue in wanted).items():
            if not count:
                raise QueueNotFound(
                    f"The store {self.store.path} has no queue {queue!r}; it has"
                    f" {', '.join(self.store.queues()) or 'none'}.",
                    f"call store.queue({queue!r}, partitions=…, key=…) first.",
                    queue=queue,
                )
        return {queue: self.store.queue(queue)._read_as(self.isolation) for queue in wanted}

    # --- reading ---

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

    # --- assignment ---

    @property
    def assigned(self) -> list[Partition]:
        """The partitions that this member held at the end of its last call that reads, sorted."""
        return sorted(self.holdings.held)

    def keepalive(self) -> None:
        """Renew the lease during work that takes longer than the lease. May be called from any thread.

        It has no effect later than ``max_poll_interval_s`` after the last call that reads. So a thread that only calls
        this cannot keep the partitions of a step that never ends.
        """
        self.holdings.beat()

    # --- positions ---

    @_one_call
    def commit(self, checkpoint: bytes | Mapping[Partition, bytes] | None = None) -> None:
        """Commit the positions after all messages that were handed out, in one transaction, as durable as the store.

        ``checkpoint`` (at most 3,000 bytes) is stored with every position that moves; a mapping stores one for each
        partition that it names. If partitions were taken over or moved by a seek meanwhile, the other partitions are
        committed, and :class:`Fenced` names the refused ones in ``partitions``. Their messages are read again, by this
        member or another.
        """
        self._no_session("commit")
        held = self.holdings.held
        checkpoints = self._checkpoints(checkpoint)
        also = checkpoints if isinstance(checkpoint, Mapping) else {}
        moves = {p: held[p].move(checkpoints.get(p)) for p in held if held[p].dirty or p in also}
        if not moves:
            return
        written = self.table.move(moves)
        for partition, claim in written.items():
            held[partition].claim = claim
        refused = sorted(set(moves) - set(written))
        if refused:
            raise self._refused(refused)

    def _refused(self, partitions: list[Partition]) -> Fenced:
        """Read the positions of refused partitions from the store, and return the error of the commit."""
        seen = self.table.look({queue for queue, _ in partitions}).claims
        is_owner = all(seen[partition].owner == self.holdings.id for partition in partitions)
        for partition in partitions:
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
        with self.store._view() as txn:
            return {p: self._queues[p[0]]._view(p[1])._log.index_of(txn, claim.next) for p, claim in seen.items()}

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
        logs = {(queue, number): self._queues[queue]._view(number)._log for queue, number in wanted}
        with self.store._view() as txn:
            targets = {partition: target(txn, self.group, partition, log, to) for partition, log in logs.items()}
        self.table.seek(targets)
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
        wanted = self._named(partitions)
        if not wanted:  # only then: a seek must also work on a partition that cannot be claimed
            self._keep_up()
            wanted = self.assigned
        if not wanted:
            raise InvalidArgument("This member holds no partition yet.", "name a queue or a partition in the call.")
        return wanted

    def _named(self, partitions: Iterable[Partition | str]) -> list[Partition]:
        """Return the partitions that a caller names; refuse those of other queues."""
        named: list[Partition] = []
        for partition in partitions:
            queue, number = (partition, None) if isinstance(partition, str) else partition
            if queue not in self._queues:
                raise InvalidArgument(
                    f"This member does not read {queue!r}.", f"name one of {', '.join(self._queues)}."
                )
            count = self.table.counts((queue,))[queue]
            if number is not None and not (isinstance(number, int) and 0 <= number < count):
                raise InvalidArgument(
                    f"{queue!r} has no partition {number!r}; it has {count}.", f"use 0 to {count - 1}."
                )
            named += [(queue, n) for n in range(count)] if number is None else [(queue, number)]
        return named

    # --- inside ---

    def take(self, n: int, timeout: float | None, only: HeldPartition | None = None, single: bool = False) -> Taken:
        """Take up to ``n`` messages, by partition; from the partition ``only``, or from a ``single`` one.

        Waits for the first message. Returns no messages when ``only`` is no longer held.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InvalidArgument(f"{n!r} is not a number of messages.", "pass an integer, 1 or more.")
        while True:
            taken = self._take(n, only, single)
            if taken or timeout == 0:
                return taken
            if only is not None and not (self._holds(only) and only.readable):
                return taken  # no further message of it will be read
            mask = self.table.mask | wakeup.union(held.log.mask for held in self.holdings.held.values())
            holds = set(self.holdings.held)

            def ready() -> Taken | bool:
                # True: the held partitions have changed, so the wait must begin again with their doorbells.
                taken = self._take(n, only, single)
                return taken or set(self.holdings.held) != holds or (only is not None and not only.readable)

            started = time.monotonic()
            result = wakeup.wait([(self.store._doorbells, mask)], ready, timeout)
            if isinstance(result, list):
                return result
            if not result:
                return []
            if timeout is not None:
                timeout = max(0.0, timeout - (time.monotonic() - started))

    def _take(self, n: int, only: HeldPartition | None, single: bool) -> Taken:
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
        left = n
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
                left -= len(messages)
            if (single and taken) or (only is not None and not messages):
                break
        return taken

    def _next(self, only: HeldPartition | None) -> HeldPartition | None:
        """Return the partition to read next: of those with messages, the one that was served longest ago."""
        if only is not None:
            return only if self._holds(only) and only.readable else None
        self._ready = [held for held in self._ready if held.readable]
        if not self._ready:
            with self.store._view() as txn:
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
        """Make memory agree with the store, after an exception came out of a call. An exception may end this too.

        1. Restore the positions from before the call, so that its messages are read again. Not if that call is still
           under way: then the exception came out of a call of its callback.
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
        self.store._check()
        if self._closed:
            raise self._gone()

    def _gone(self) -> Closed:
        return Closed(f"The member {self.name} of {self.group} is closed.", "make a new Member(...).")

    # --- sessions ---

    @_one_call
    def session(self) -> Session:
        """Begin a step that reads from one partition, writes to queues of this store, and commits both together.

        See :class:`cues.groups.Session`. A session that is still open is aborted: after an exception out of this call
        the program may not have that session.
        """
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
        self._session = Session(self)
        return self._session

    def _drop_session(self, session: Session) -> None:
        """End a session that was not committed, or may not have been: continue from the position in the store."""
        if session.held is not None:
            self.doubt(session.held)
        self.session_committed()

    def session_committed(self) -> None:
        """End a session that was committed."""
        self.holdings.stepping = None
        self._session = None

    def output(self, queue: str | Queue) -> Queue:
        """Return the queue of this store that a session writes to."""
        if isinstance(queue, Queue):
            if not queue.store._same_as(self.store):
                raise InvalidArgument(
                    f"The queue {queue.id!r} is in the store {queue.store.path}, the member's is {self.store.path}:"
                    " one commit is in one store.",
                    "use a graph: it forwards messages to other stores.",
                )
            return queue
        output = self._outputs.get(queue)
        if output is None:
            self._opened((queue,))
            output = self._outputs[queue] = self.store.queue(queue)
        return output

    def doubt(self, held: HeldPartition) -> None:
        """Drop the messages that were read of a partition, and continue from the position in the store."""
        self._ready.clear()
        self.holdings.stale()
        if self._holds(held) and not self.store.closed:
            with self.store._view() as txn:
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
        self.store._ring_own()
        with self._busy:
            if not self._closed:
                try:
                    if self._session is not None:
                        self._session.abandon()
                    self.holdings.end(leave)
                finally:
                    self._closed = self.holdings.over

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.holdings.held)} partitions"
        return f"<cues.groups.Member {self.name} of {self.group}: {state}>"


def _listed(partitions: Iterable[Partition]) -> str:
    return ", ".join(f"{queue}/{number}" for queue, number in partitions)
