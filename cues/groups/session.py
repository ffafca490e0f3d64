"""Sessions: reading, transforming, writing and moving the position, in one commit.

    with member.session() as session:
        for message in session.read_many(500, timeout=1):
            session.write("invoices", invoice(message))
        committed, reason = session.end(TRY_COMMIT)

A session is one step over one partition. When a partition moves to another member, at most the step over that partition
is aborted. ``member.session(partitions="all")`` is one step over every partition that the member holds, of all its
queues: for joins, and for fewer commits. It is aborted if one of the partitions that it has read is lost.

1. The first read chooses the partition: of those that have messages, the one that was served longest ago. All reads of
   the session are from this partition. With ``"all"``, reads take turns over the partitions. If one that was
   read is to move to another member, nothing more is read, so that the step can end.
2. Messages that are written are checked and encoded at once, and kept in memory. No reader sees them before the commit.
3. :meth:`Session.end` with ``TRY_COMMIT`` runs one transaction. It compares owner, epoch and index of each position
   with those under which the messages were read, appends, and moves the positions. All of this happens, or nothing.
4. The session is aborted if a partition was taken over, a position was moved by a seek, a write failed, or a queue
   was changed. An abort drops all messages that were read ahead of its partitions, and they are read again.

**An unknown outcome is never reported as a success.** If an exception comes out of the commit itself (a full disk, a
Ctrl-C during the wait for the disk), the caller cannot know whether the commit was made. The exception is raised, and
the member reads its position from the store: it continues after these messages if the commit was made, otherwise with
them. A second ``end`` of the same session returns ``(False, "unknown")``, never True.

Not guaranteed: the effects of the transformation outside of the store. A step that is aborted has run.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from cues import faults
from cues.base import names
from cues.errors import InvalidArgument
from cues.groups import claims
from cues.groups.claims import Claim
from cues.groups.held import HeldPartition
from cues.groups.holdings import Holdings
from cues.groups.sticky import Partition
from cues.groups.table import GroupTable
from cues.overrides import override
from cues.queues.base import OptionsChanged
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.queues.tailer import Envelope
from cues.steps.collected import BuiltWrites, CollectedWrites
from cues.storage.transaction import StoreTransaction

Message = dict[str, Any]


class Try(enum.Enum):
    """The two ways to end a session. :class:`Ended` tells the result."""

    COMMIT = "commit"
    ABORT = "abort"


TRY_COMMIT: Final = Try.COMMIT
TRY_ABORT: Final = Try.ABORT


class Reason(enum.StrEnum):
    """Why a session was not committed. For all but ``APPEND``, read again in a new session."""

    ASKED = "asked"
    """It was ended with ``TRY_ABORT``, or left without a call of ``end``."""
    MOVED = "moved"
    """Another member holds a partition of the session, or held it meanwhile."""
    SOUGHT = "sought"
    """A seek moved a position."""
    APPEND = "append"
    """A write failed and raised its exception."""
    CHANGED = "changed"
    """The partitions or the largest message of a queue that was written to have changed."""
    UNKNOWN = "unknown"
    """An exception ended the commit. The next read finds out whether the commit was made."""


class Ended(NamedTuple):
    """The result of a session."""

    committed: bool
    reason: Reason | None
    """The reason for an abort; None after a commit."""


P = ParamSpec("P")
R = TypeVar("R")


class SessionMember(Protocol):
    """The methods of a :class:`cues.groups.Member` that its session uses."""

    group: str
    name: str
    store: Store
    table: GroupTable
    holdings: Holdings

    def within(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def take(
        self,
        n: int,
        timeout: float | None,
        only: HeldPartition | None = None,
        single: bool = False,
        over: Callable[[], bool] = ...,
    ) -> list[tuple[HeldPartition, list[dict[str, Any]]]]: ...

    def session_committed(self) -> None: ...


class Session:
    """One step of a member. :meth:`Member.session` begins it, and the member's thread uses it."""

    def __init__(self, member: SessionMember, single: bool) -> None:
        """With ``single`` it reads from one partition."""
        self._member = member
        self._holdings = member.holdings
        self._single = single
        self.parts: dict[HeldPartition, int] = {}
        """The partitions that it has read, each with the epoch under which it was read."""
        self._last: HeldPartition | None = None
        self._writes = CollectedWrites(member.store, "the member", "use a graph: it forwards messages to other stores.")
        self._doomed: Reason | None = None
        self._over: Ended | None = None

    def read(self, block: bool = False, timeout: float | None = None) -> Message | None:
        """Return the next message; None if there is none, or a partition of the session is lost."""
        messages = self.read_many(1, timeout if block else 0.0)
        return messages[0] if messages else None

    def read_many(self, n: int, timeout: float | None = 0.0) -> list[Message]:
        """Return the next messages, at most ``n``; wait for the first for ``timeout`` seconds."""
        self._check()
        return self._member.within(self._take_flat, n, timeout)

    def poll(self, timeout: float | None = 0.0, n: int = 500) -> dict[Partition, list[Message]]:
        """Return the next messages, at most ``n``, by partition; wait for the first for ``timeout`` seconds."""
        self._check()
        return self._member.within(self._take, n, timeout)

    def __iter__(self) -> Iterator[Message]:
        """Read the messages that are there."""
        while (message := self.read()) is not None:
            yield message

    @property
    def partition(self) -> Partition | None:
        """Queue and number of the partition that was read last; None before the first message."""
        return self._last.partition if self._last else None

    @property
    def partitions(self) -> list[Partition]:
        """The partitions that the session has read, sorted."""
        return sorted(held.partition for held in self.parts)

    @property
    def envelope(self) -> Envelope | None:
        """Index, time, hash and metadata of the message that was read last; None before the first."""
        return self._last.envelope if self._last else None

    @property
    def checkpoint(self) -> bytes:
        """The checkpoint that is stored with the position of :attr:`partition`; empty before the first message."""
        return self._last.claim.checkpoint if self._last else b""

    def _take(self, n: int, timeout: float | None) -> dict[Partition, list[Message]]:
        only = self._last if self._single else None
        polled: dict[Partition, list[Message]] = {}
        for held, messages in self._member.take(n, timeout, only=only, single=self._single, over=self._stuck):
            self.parts.setdefault(held, held.claim.epoch)
            self._last = held
            polled.setdefault(held.partition, []).extend(messages)
        self._holdings.stepping = self.parts.keys()
        return polled

    def _take_flat(self, n: int, timeout: float | None) -> list[Message]:
        # Inside of the member's call: after it the messages count as handed out, so no function may follow it.
        return [message for messages in self._take(n, timeout).values() for message in messages]

    def _stuck(self) -> bool:
        """Return whether nothing more can be read: a partition of the session is lost, is to move, or is paused."""
        return self._changed() is not None or not all(held.readable for held in self.parts)

    def write(self, queue: str | Queue, message: Message) -> None:
        """Add a message to the commit, for a queue of the store.

        ``queue`` is a name, or a handle if its key or partitioner is a function. The message is checked and
        encoded now. Raises :class:`QueueNotFound`, :class:`CodecError`, :class:`MessageTooLarge`,
        :class:`ReservedKey` and :class:`InvalidArgument`; after any of them the session can only be aborted.
        """
        self.write_many(queue, (message,))

    def write_many(self, queue: str | Queue, messages: Iterable[Message]) -> None:
        """Add several messages to the commit; see :meth:`write`."""
        self._check()
        try:
            self._writes.add(queue, messages)
        except BaseException:
            self._doomed = self._doomed or Reason.APPEND
            raise

    def end(self, how: Try, checkpoint: bytes | Mapping[Partition, bytes] | None = None) -> Ended:
        """End the session; return whether it was committed, and the reason if not.

        ``checkpoint`` (at most 3,000 bytes) is stored with each position that the session moves; a mapping has one for
        each partition that it names, which the session must have read. An empty session is committed without a
        transaction. Errors of the store, for example :class:`StoreFull`, are raised: the outcome is then unknown, and
        the next read continues from the position in the store.
        """
        if how not in (TRY_COMMIT, TRY_ABORT):
            raise InvalidArgument(f"end({how!r}) is not a way to end a session.", "pass TRY_COMMIT or TRY_ABORT.")
        if self._over is not None:
            if self._over.reason is Reason.UNKNOWN:
                return self._over
            raise self._ended()
        return self._member.within(self._end, how, self._checkpoints(checkpoint))

    def _checkpoints(self, checkpoint: bytes | Mapping[Partition, bytes] | None) -> dict[Partition, bytes]:
        if not isinstance(checkpoint, Mapping):
            checkpoint = (
                {} if checkpoint is None else dict.fromkeys(self.partitions, claims.check_checkpoint(checkpoint))
            )
        for partition, value in checkpoint.items():
            claims.check_checkpoint(value)
            if partition not in self.partitions:
                raise InvalidArgument(
                    f"A checkpoint is given for {partition!r}, which this session has not read.",
                    f"name partitions that it has read: {self.partitions or 'none yet'}.",
                )
        return dict(checkpoint)

    def _end(self, how: Try, checkpoints: dict[Partition, bytes]) -> Ended:
        reason = Reason.ASKED if how is TRY_ABORT else self._doomed or self._changed()
        if reason is None:
            self._over = Ended(False, Reason.UNKNOWN)  # until it is known otherwise
            reason = self._commit(checkpoints) if self.parts or self._writes else None
        if reason is None:
            self._member.session_committed()
        self._over = Ended(reason is None, reason)
        self._writes.clear()
        return self._over

    def abandon(self) -> None:
        """Abort, if the session has not ended. Leaving the ``with`` block does this."""
        if self._over is None:
            self._over = Ended(False, Reason.ASKED)
            self._writes.clear()

    @property
    def ended(self) -> bool:
        """True after the session has ended."""
        return self._over is not None

    def _changed(self) -> Reason | None:
        """Return the change of a partition since its first message was read, as far as the member knows."""
        for held, epoch in self.parts.items():
            if self._holdings.held.get(held.partition) is not held:
                return Reason.MOVED
            if held.claim.epoch != epoch:
                return Reason.SOUGHT
        return None

    def _commit(self, checkpoints: dict[Partition, bytes]) -> Reason | None:
        self._writes.await_room([f"group {self._member.group}"])
        built = self._writes.build()
        member = self._member
        faults.point("session.before")
        try:
            moved = member.store.core.commit(self._write, built, checkpoints, pages=built.pages + len(self.parts))
        except OptionsChanged:
            return Reason.CHANGED
        except _Refused as refused:
            return refused.reason
        faults.point("session.after")
        for held, claim in moved.items():
            held.claim = claim
        member.store.core.ring(built.mask)
        return None

    def _write(
        self, txn: StoreTransaction, built: BuiltWrites, checkpoints: dict[Partition, bytes]
    ) -> dict[HeldPartition, Claim]:
        table = self._member.table
        moved: dict[HeldPartition, Claim] = {}
        for held in self.parts:
            claim = table.moved(txn, held.partition, held.move(checkpoints.get(held.partition)))
            if claim is None:
                raise _Refused(self._why(txn, held))
            moved[held] = claim
        if not moved:
            row = table.member(txn, self._member.name)
            if row is None or row.id != self._holdings.id:
                raise _Refused(Reason.MOVED)
        built.append(txn)
        faults.point("session.inside")
        return moved

    def _why(self, txn: StoreTransaction, held: HeldPartition) -> Reason:
        """Return the reason why the position has changed."""
        claim = claims.read(txn, names.log_id(*held.partition), self._member.group)
        return Reason.SOUGHT if claim is not None and claim.owner == held.claim.owner else Reason.MOVED

    def _check(self) -> None:
        if self._over is not None:
            raise self._ended()

    def _ended(self) -> InvalidArgument:
        return InvalidArgument(f"The session has ended ({self._state()}).", "call member.session() for the next step.")

    def _state(self) -> str:
        if self._over is None:
            return "open"
        return "committed" if self._over.committed else f"aborted: {self._over.reason}"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    @override
    def __repr__(self) -> str:
        return f"<cues.groups.Session of {self._member.name} on {self.partitions}: {self._state()}>"


class _Refused(Exception):
    """Raised inside the commit's transaction, to undo it."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason
