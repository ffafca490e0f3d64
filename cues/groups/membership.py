"""Members of consumer groups: readers outside graphs that share the partitions of queues.

    with Member(store, "orders", "billing") as member:       as often as you like, in any process
        for message in member.follow():
            bill(message)
            member.commit()

Each partition is read by one member of a group at a time, and its position belongs to the group. Who reads what is
planned anew whenever a member comes, goes or dies (table.py tells how), and only partitions that move pause:

1. Every call that reads also keeps up with the group: it renews the lease, buries the dead, plans if need be.
2. A partition that the plan gives to another is not read any further. Once everything handed out of it is committed,
   :meth:`Member.on_revoked` is called and it is given up.
3. What the plan gives to this member is claimed as soon as nobody holds it, and :meth:`Member.on_assigned` is called.
4. A commit compares, inside its transaction, owner, epoch and index of each position with those that its messages were
   read under. What was taken over meanwhile is refused, and :class:`~cues.errors.Fenced` says so.

**Death** is seen at once, by a lock that goes with the process. A process that is stopped, or whose function hangs,
keeps its locks; it loses its place when it has called nothing for ``lease_s``. Its calls renew the lease and no thread
of ours does, since a side thread would answer for a function that hangs. What takes longer calls
:meth:`Member.keepalive`.

Not guaranteed: that a message comes once. It comes again if the member that got it dies or loses the partition
before its commit. A :class:`~cues.groups.session.Session` makes reading, writing and the position one commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from cues import claims, clock, names, wakeup
from cues.errors import BatchDamaged, Closed, ConcurrentUse, Fenced, InvalidArgument, QueueNotFound, StoreReadOnly
from cues.groups.held import Held
from cues.groups.holdings import Holdings, OnChange
from cues.groups.sticky import Partition
from cues.groups.table import Table, new_id, partitions_of
from cues.log import Log
from cues.ownership import LEASE_S
from cues.queue import Queue, check_index
from cues.tailer import Envelope

if TYPE_CHECKING:
    from cues.groups.session import Session
    from cues.store import Store

Message = dict[str, Any]
Taken = list[tuple[Held, list[Message]]]
"""Messages, and the partitions that they are of."""


@dataclass(frozen=True, slots=True)
class Relative:
    """A place for :meth:`Member.seek`: so many messages on (or, below zero, back) from the position."""

    by: int


Place = Literal["start", "end"] | int | datetime | Relative
"""Where a seek may go."""


class Member:
    """A member of a consumer group.

    ``queues`` is a queue or its name, or several; they must be there. ``group`` names the group: its members share the
    partitions, its positions are kept in the store. With a ``name`` the member is *static*: its place is kept for its
    lease when it closes or dies, and one that comes back under that name in time finds its partitions as they were,
    unnoticed by the others. Without a name its partitions go to others at once. ``lease_s`` is how long it may call
    nothing before it is taken for dead. ``on_assigned``, ``on_revoked`` and ``on_lost`` are called with lists of
    (queue, partition), inside a call that reads, or closes, in its thread: after partitions came; before they are given
    up, when they can still be committed; and after they were taken away, when they cannot. They may commit, seek, pause
    and close.

    One thread at a time uses a member (another gets :class:`ConcurrentUse`); :meth:`keepalive` and :meth:`close` may
    come from any. Raises :class:`QueueNotFound`, :class:`AlreadyRunning` (a member of that name lives),
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
        on_assigned: OnChange | None = None,
        on_revoked: OnChange | None = None,
        on_lost: OnChange | None = None,
    ) -> None:
        for option, hook in (("on_assigned", on_assigned), ("on_revoked", on_revoked), ("on_lost", on_lost)):
            if not (hook is None or callable(hook)):
                raise InvalidArgument(f"{option}={hook!r} cannot be called.", "a function of a list of partitions.")
        if store.readonly:
            raise StoreReadOnly(
                f"The store {store.path} is open read-only, where no position can be kept.",
                "open it writable, or queue.tailer() to look.",
                path=store.path,
            )
        if not isinstance(lease_s, (int, float)) or not 0 < lease_s < float("inf"):
            raise InvalidArgument(
                f"lease_s is {lease_s!r}.", "seconds, longer than the longest time between two calls."
            )
        self.group = names.check("group", group)
        self.static = name is not None
        self.name = names.check("member", f"m-{new_id().hex()}" if name is None else name)
        self.lease_s = float(lease_s)
        self.store = store
        self.table = Table(store, self.group)
        self._queues = self._opened((queues,) if isinstance(queues, (str, Queue)) else queues)
        self._outputs: dict[str, Queue] = {}
        self._last: Held | None = None
        self._turn = 0
        self._ready: list[Held] = []
        """Partitions that have something to be read, the next to be served last."""
        self._busy = threading.RLock()
        self._closing = self._closed = False
        self._session: Session | None = None
        self.holdings = Holdings(
            self.table, self.name, self.static, self.lease_s, self._queues, on_assigned, on_revoked, on_lost
        )
        store.on_close(self.holdings.let_go)

    def _opened(self, queues: Iterable[str | Queue]) -> dict[str, Queue]:
        if not isinstance(queues, Iterable):
            raise InvalidArgument(f"The queues are {queues!r}.", "a name, a queue, or a list of them.")
        found = sorted({queue.id if isinstance(queue, Queue) else queue for queue in queues})
        if not found:
            raise InvalidArgument("A member subscribes to one queue at least.", "Member(store, 'orders', 'billing').")
        for queue in found:
            names.check("queue", queue)
            with self.store.view() as txn:
                there = partitions_of(txn, queue)
            if not there:
                raise QueueNotFound(
                    f"The store {self.store.path} has no queue {queue!r}; it has"
                    f" {', '.join(self.store.queues()) or 'none'}.",
                    f"store.queue({queue!r}, partitions=…, key=…) first.",
                    queue=queue,
                )
        return {queue: self.store.queue(queue) for queue in found}

    # --- reading ---

    def read(self, block: bool = False, timeout: float | None = None) -> Message | None:
        """The next message of any partition that is this member's; None when there is none.

        With ``block`` it waits for one, at most ``timeout`` seconds. :attr:`partition` and :attr:`envelope` say
        where it came from. Partitions take turns; the order is kept within each. Raises :class:`Closed`,
        :class:`Fenced` (another process has this member's name), :class:`BatchDamaged` and :class:`Diverged`.
        """
        with self._use():
            self._no_session("read beside it")
            found = self.take(1, timeout if block else 0.0)
        return found[0][1][0] if found else None

    def read_many(self, n: int) -> list[Message]:
        """The next messages of any partitions, at most ``n``, without waiting; :meth:`poll` says where they are of."""
        return [message for messages in self.poll(n=n).values() for message in messages]

    def poll(self, timeout: float | None = 0.0, n: int = 500) -> dict[Partition, list[Message]]:
        """The next messages, at most ``n``, by partition.

        Waits for the first for ``timeout`` seconds (None: as long as it takes); empty when there was none.
        """
        found: dict[Partition, list[Message]] = {}
        with self._use():
            self._no_session("read beside it")
            for held, messages in self.take(n, timeout):
                found.setdefault(held.partition, []).extend(messages)
        return found

    def __iter__(self) -> Iterator[Message]:
        """The messages until there is none at the moment."""
        while (message := self.read()) is not None:
            yield message

    def follow(self) -> Iterator[Message]:
        """The messages, and then those that come, until something is closed (:class:`Closed`)."""
        while True:
            message = self.read(block=True)
            if message is not None:
                yield message

    @property
    def partition(self) -> Partition | None:
        """Queue and partition of the message read last; None before the first."""
        return self._last.partition if self._last else None

    @property
    def envelope(self) -> Envelope | None:
        """Index, time, hash and metadata of the message read last; None before the first."""
        return self._last.tailer.envelope if self._last else None

    # --- what it holds ---

    @property
    def assigned(self) -> list[Partition]:
        """The partitions that this member holds, sorted; as of its last call that reads."""
        return sorted(self.holdings.held)

    def keepalive(self) -> None:
        """Say that the member lives, in the middle of work that takes longer than its lease. From any thread."""
        self.holdings.beat()

    # --- positions ---

    def commit(self, checkpoint: bytes | Mapping[Partition, bytes] | None = None) -> None:
        """Be done with everything that was handed out: one transaction, durable as the store is.

        ``checkpoint`` (at most 3,000 bytes) is kept beside every position that moves, or, as a mapping, beside those
        of the partitions named. Where partitions were taken over or sought meanwhile, the others are committed and
        :class:`Fenced` names them in ``partitions``: their messages come again, here or elsewhere.
        """
        with self._use():
            self._no_session("commit")
            held = self.holdings.held
            checkpoints = self._checkpoints(checkpoint)
            also = checkpoints if isinstance(checkpoint, Mapping) else {}
            moves = {p: one.move(checkpoints.get(p)) for p, one in held.items() if one.dirty or p in also}
            if not moves:
                return
            written = self.table.move(moves)
            for partition, claim in written.items():
                held[partition].claim = claim
            refused = sorted(set(moves) - set(written))
            if refused:
                raise self._refused(refused)

    def _refused(self, partitions: list[Partition]) -> Fenced:
        """What a commit says of partitions that are not as they were, once they are as the store has them."""
        seen = self.table.look({queue for queue, _ in partitions}).claims
        mine = all(seen[partition].owner == self.holdings.id for partition in partitions)
        for partition in partitions:
            self.doubt(self.holdings.held[partition])
        return Fenced(
            f"The member {self.name} of {self.group} no longer holds {_listed(partitions)} as it did when it read from"
            " there; nothing of that was committed.",
            "nothing: what was read from there comes again, to whoever holds it now.",
            processor=self.group,
            reason="seek" if mine else "takeover",
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
                f"Checkpoints for {_listed(unknown)}, which this member does not hold.",
                f"those of {_listed(self.assigned) or 'nothing, at the moment'}.",
            )
        return {partition: claims.check_checkpoint(value) for partition, value in checkpoint.items()}

    def checkpoints(self) -> dict[Partition, bytes]:
        """What was committed beside the positions of the partitions that this member holds."""
        return {partition: held.claim.checkpoint for partition, held in sorted(self.holdings.held.items())}

    def positions(self) -> dict[Partition, int]:
        """The group's committed position (the index that is read next) on every partition of this member's queues."""
        return {partition: claim.next for partition, claim in self.table.look(self._queues).claims.items()}

    def lag(self) -> dict[Partition, int]:
        """Messages that are there and that the group is not done with, of every partition of this member's queues.

        Whoever holds them. Read in one transaction, so the figures are of one moment.
        """
        return self.table.lag(self._queues)

    def seek(self, to: Place, *partitions: Partition | str) -> None:
        """Go to ``"start"``, ``"end"``, an index, a time (the first message at or after it) or :class:`Relative`.

        ``partitions`` are (queue, number), or a queue for all of its partitions, also of those that another member
        holds; without any, all that this member holds. An index that was purged goes to the first that is left, one
        beyond the end is refused; a relative place ends at either end. The move is one transaction and raises the
        epochs: a step that is under way anywhere is fenced, and its messages do not count as read.
        """
        with self._use():
            self._no_session("seek")
            wanted = self._chosen(partitions)
            logs = {partition: self._log(partition) for partition in wanted}
            with self.store.view() as txn:
                targets = {partition: self._target(txn, partition, log, to) for partition, log in logs.items()}
            self.table.seek(targets)
            self.holdings.stale()
            self._keep_up()

    def pause(self, *partitions: Partition | str) -> None:
        """Hand out no more messages of ``partitions`` (all that this member holds, without any), until :meth:`resume`.

        The pause belongs to the partition: it is kept in the store and lasts when another member comes to hold it.
        """
        self._pause(partitions, True)

    def resume(self, *partitions: Partition | str) -> None:
        """End a :meth:`pause`."""
        self._pause(partitions, False)

    def paused(self) -> list[Partition]:
        """The partitions of this member's queues that are paused."""
        return sorted(partition for partition, claim in self.table.look(self._queues).claims.items() if claim.paused)

    def _pause(self, partitions: Iterable[Partition | str], paused: bool) -> None:
        with self._use():
            self.table.pause(self._chosen(partitions), paused)
            self.holdings.stale()
            self._keep_up()

    def _chosen(self, partitions: Iterable[Partition | str]) -> list[Partition]:
        """The partitions that a caller means; those that this member holds, where none are named."""
        wanted = self._named(partitions)
        if not wanted:  # otherwise not yet: what cannot be claimed may be sought
            self._keep_up()
            wanted = self.assigned
        if not wanted:
            raise InvalidArgument("This member holds no partition yet.", "the same with the name of a queue.")
        return wanted

    def _named(self, partitions: Iterable[Partition | str]) -> list[Partition]:
        """The partitions that a caller means; refuses those of other queues."""
        found: list[Partition] = []
        for one in partitions:
            queue, number = (one, None) if isinstance(one, str) else one
            if queue not in self._queues:
                raise InvalidArgument(f"This member does not read {queue!r}.", f"one of {', '.join(self._queues)}.")
            with self.store.view() as txn:
                count = partitions_of(txn, queue)
            if number is not None and not (isinstance(number, int) and 0 <= number < count):
                raise InvalidArgument(f"{queue!r} has no partition {number!r}; it has {count}.", f"0 to {count - 1}.")
            found += [(queue, n) for n in range(count)] if number is None else [(queue, number)]
        return found

    def _target(self, txn: Any, partition: Partition, log: Log, to: Place) -> tuple[bytes, int, bytes]:
        row = log.row(txn)
        if to == "start":
            index = row.first
        elif to == "end":
            index = row.next
        elif isinstance(to, datetime):
            index = log.index_at(txn, row, clock.to_ns(to))
        elif isinstance(to, Relative):
            claim = claims.read(txn, names.log_id(*partition), self.group)
            index = min(max((claim.next if claim else row.first) + to.by, row.first), row.next)
        elif not isinstance(to, int):
            raise InvalidArgument(f"seek({to!r}).", "'start', 'end', an index, an aware datetime or Relative(-100).")
        else:
            index = max(row.first, check_index(to, row.next, f"seek({to!r}) on {names.log_id(*partition)}"))
        return row.identity, index, log.seal_before(txn, row, index)

    def _log(self, partition: Partition) -> Log:
        return self._queues[partition[0]].view(partition[1]).log

    # --- inside ---

    def take(self, n: int, timeout: float | None, only: Held | None = None, single: bool = False) -> Taken:
        """Up to ``n`` messages, by partition; of ``only`` one, or of a ``single`` one. Waits for the first.

        Ends without any when ``only`` is no longer held.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InvalidArgument(f"{n!r} messages.", "a count, 1 or more.")
        while True:
            found = self._take(n, only, single)
            if found or timeout == 0:
                return found
            if only is not None and not (self._holds(only) and only.readable):
                return found  # nothing comes of it any more
            mask = self.table.mask
            for held in self.holdings.held.values():
                mask |= held.log.mask
            holds = set(self.holdings.held)

            def ready() -> Taken | bool:
                # True: it holds other partitions now, must listen for those, and perhaps not wait at all.
                found = self._take(n, only, single)
                return found or set(self.holdings.held) != holds or (only is not None and not only.readable)

            started = time.monotonic()
            result = wakeup.wait([(self.store.doorbells, mask)], ready, timeout)
            if isinstance(result, list):
                return result
            if not result:
                return []
            if timeout is not None:
                timeout = max(0.0, timeout - (time.monotonic() - started))

    def _take(self, n: int, only: Held | None, single: bool) -> Taken:
        if self.holdings.calling:
            raise InvalidArgument(
                "on_assigned, on_revoked and on_lost cannot read: they are called in the middle of a read.",
                "commit(), seek(), pause() or close() there.",
            )
        self._keep_up()
        if self._closing:  # by another thread, or a callback
            raise self._gone()
        found: Taken = []
        left = n
        while left:
            held = self._next(only)
            if held is None:
                break
            try:
                messages = held.read(left)
            except BatchDamaged:
                self._serve(held)  # the others come first the next time
                if found:  # those are handed out, so they must arrive; the next call comes upon this again
                    break
                raise
            if len(messages) < left:
                self._ready = [other for other in self._ready if other is not held]
            if messages:
                self._last = held
                self._serve(held)
                found.append((held, messages))
                left -= len(messages)
            if single and found:
                break
            if only is not None and not messages:
                break
        return found

    def _next(self, only: Held | None) -> Held | None:
        """The partition that is read next: of those with something to read, the one served longest ago."""
        if only is not None:
            return only if self._holds(only) and only.readable else None
        self._ready = [held for held in self._ready if held.readable]
        if not self._ready:
            with self.store.view() as txn:
                found = [held for held in self.holdings.held.values() if held.readable and held.waiting(txn)]
            self._ready = sorted(found, key=lambda held: held.served, reverse=True)
        return self._ready.pop() if self._ready else None

    def _serve(self, held: Held) -> None:
        self._turn += 1
        held.served = self._turn

    def _holds(self, held: Held) -> bool:
        return self.holdings.held.get(held.partition) is held

    def _use(self) -> _Use:
        self._check()
        if not self._busy.acquire(blocking=False):
            if self._closing:
                raise self._gone()
            raise ConcurrentUse(
                f"The member {self.name} is used by another thread right now.", "a member for each thread."
            )
        return _Use(self._busy)

    def _keep_up(self) -> None:
        if not self.holdings.calling and self.holdings.keep_up():
            self._ready.clear()

    def _check(self) -> None:
        self.store._check()
        if self._closed:
            raise self._gone()

    def _gone(self) -> Closed:
        return Closed(f"The member {self.name} of {self.group} is closed.", "Member(...) again.")

    # --- sessions ---

    def session(self) -> Session:
        """A step that reads from one partition, writes to queues of this store, and commits both together.

        See :class:`cues.groups.Session`. One at a time.
        """
        from cues.groups.session import Session

        with self._use():
            self._no_session("begin another session")
            self._keep_up()
            under_way = [partition for partition, held in sorted(self.holdings.held.items()) if held.dirty]
            if under_way:
                raise InvalidArgument(
                    f"Messages of {_listed(under_way)} were handed out and are not committed; a session's commit would"
                    " be theirs too.",
                    "member.commit() first, or member.seek(Relative(0)) to read them again.",
                )
            self._session = Session(self)
            return self._session

    def session_ended(self) -> None:
        """What a session says when it is over."""
        self._session = None

    def output(self, queue: str | Queue) -> Queue:
        """The queue of this store that a session writes to."""
        if isinstance(queue, Queue):
            if not queue.store.same_as(self.store):
                raise InvalidArgument(
                    f"The queue {queue.id!r} is in the store {queue.store.path}, the member's is {self.store.path}:"
                    " one commit is in one store.",
                    "a graph, which forwards what is bound for another store.",
                )
            return queue
        found = self._outputs.get(queue)
        if found is None:
            found = self._outputs[queue] = self._opened((queue,))[queue]
        return found

    def doubt(self, held: Held) -> None:
        """Forget what was read of a partition, and go on from where the store says that the group stands."""
        self._ready.clear()
        self.holdings.stale()
        if self._holds(held) and not self.store.closed:
            with self.store.view() as txn:
                claim = claims.read(txn, names.log_id(*held.partition), self.group)
            if claim is not None and claim.owner == held.claim.owner:
                held.claim = claim
                held.rewind()

    def _no_session(self, what: str) -> None:
        if self._session is not None:
            raise InvalidArgument(
                f"A session of the member {self.name} is open, so it cannot {what}.", "session.end(...) first."
            )

    # --- end ---

    def close(self) -> None:
        """Give up what it holds (:meth:`on_revoked` is called first) and close. Waits for a call of another thread.

        What was handed out and not committed comes again. A member without a name leaves the group; the place of a
        static one is kept for its lease, see :meth:`leave`.
        """
        self._end(leave=not self.static)

    def leave(self) -> None:
        """:meth:`close`, and leave the group at once, with a name as well: its partitions go to others."""
        self._end(leave=True)

    def _end(self, leave: bool) -> None:
        self._closing = True
        if self.store.doorbells is not None and not self.store.closed:
            self.store.doorbells.ring_own()
        with self._busy:
            if not self._closed:
                try:
                    if self._session is not None:
                        self._session.abandon()
                    self.holdings.end(leave)
                finally:
                    self._closed = True

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.holdings.held)} partitions"
        return f"<cues.groups.Member {self.name} of {self.group}: {state}>"


class _Use:
    """Holds a member for one call; its lock lets calls from its own callbacks in."""

    __slots__ = ("_lock",)

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _listed(partitions: Iterable[Partition]) -> str:
    return ", ".join(f"{queue}/{number}" for queue, number in partitions)
