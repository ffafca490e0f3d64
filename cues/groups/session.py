"""Sessions: reading, transforming, writing and moving the position, in one commit.

    with member.session() as session:
        for message in session.read_many(500, timeout=1):
            session.write("invoices", invoice(message))
        committed, reason = session.end(TRY_COMMIT)

A session is one step over one partition. When a partition moves to another member, at most the step over that partition
is aborted.

1. The first read chooses the partition: of those that have messages, the one that was served longest ago. All reads of
   the session are from this partition.
2. Messages that are written are checked and encoded at once, and kept in memory. No reader sees them before the commit.
3. :meth:`Session.end` with ``TRY_COMMIT`` runs one transaction. It compares owner, epoch and index of the position with
   those under which the messages were read, appends, and moves the position. All of this happens, or nothing.
4. The session is aborted if the partition was taken over, the position was moved by a seek, a write failed, or a queue
   was changed. An abort drops all messages that were read ahead of that partition, and they are read again.

**An unknown outcome is never reported as a success.** If an exception comes out of the commit itself (a full disk, a
Ctrl-C during the wait for the disk), the caller cannot know whether the commit was made. The exception is raised, and
the member reads its position from the store: it continues after these messages if the commit was made, otherwise with
them. A second ``end`` of the same session returns ``(False, "unknown")``, never True.

Not guaranteed: the effects of the transformation outside of the store. A step that is aborted has run.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from cues import faults
from cues.base import names
from cues.errors import InvalidArgument
from cues.groups.held import HeldPartition
from cues.groups.holdings import Holdings
from cues.groups.sticky import Partition
from cues.groups.table import GroupTable
from cues.queues import claims
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
    """Another member holds the partition, or held it meanwhile."""
    SOUGHT = "sought"
    """A seek moved the position."""
    APPEND = "append"
    """A write failed and raised its exception."""
    CHANGED = "changed"
    """The partitions or the largest message of a queue that was written to have changed."""
    UNKNOWN = "unknown"
    """An exception came out of the commit. The next read looks whether it was made."""


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
        self, n: int, timeout: float | None, only: HeldPartition | None = None, single: bool = False
    ) -> list[tuple[HeldPartition, list[dict[str, Any]]]]: ...

    def session_committed(self) -> None: ...


class Session:
    """One step of a member. :meth:`Member.session` begins it, and the member's thread uses it."""

    def __init__(self, member: SessionMember) -> None:
        self._member = member
        self._holdings = member.holdings
        self.held: HeldPartition | None = None
        """The partition that it reads; None before its first message."""
        self._writes = CollectedWrites(member.store, "the member", "use a graph: it forwards messages to other stores.")
        self._doomed: Reason | None = None
        self._over: Ended | None = None

    def read(self, block: bool = False, timeout: float | None = None) -> Message | None:
        """Return the next message of the session's partition; None if there is none, or the partition is lost."""
        messages = self.read_many(1, timeout if block else 0.0)
        return messages[0] if messages else None

    def read_many(self, n: int, timeout: float | None = 0.0) -> list[Message]:
        """Return the next messages of the partition, at most ``n``; wait for the first for ``timeout`` seconds."""
        self._check()
        return self._member.within(self._take, n, timeout)

    def __iter__(self) -> Iterator[Message]:
        """Read the messages up to the end of the partition."""
        while (message := self.read()) is not None:
            yield message

    @property
    def partition(self) -> Partition | None:
        """Queue and number of the partition that the session reads; None before its first message."""
        return self.held.partition if self.held else None

    @property
    def envelope(self) -> Envelope | None:
        """Index, time, hash and metadata of the message that was read last; None before the first."""
        return self.held.envelope if self.held else None

    @property
    def checkpoint(self) -> bytes:
        """The checkpoint that is stored with the partition's position; empty before the first message."""
        return self.held.claim.checkpoint if self.held else b""

    def _take(self, n: int, timeout: float | None) -> list[Message]:
        taken = self._member.take(n, timeout, only=self.held, single=True)
        if not taken:
            return []
        held, messages = taken[0]
        if self.held is None:
            self._start = held.claim
            self.held = self._holdings.stepping = held
        elif self._changed() is not None:
            return []  # this session can only be aborted; the messages are read again in the next one
        return messages

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

    def end(self, how: Try, checkpoint: bytes | None = None) -> Ended:
        """End the session; return whether it was committed, and the reason if not.

        ``checkpoint`` (at most 3,000 bytes) is stored with the position. An empty session is committed without a
        transaction. Errors of the store, for example :class:`StoreFull`, are raised: the outcome is then unknown, and
        the next read continues from the position in the store.
        """
        if how not in (TRY_COMMIT, TRY_ABORT):
            raise InvalidArgument(f"end({how!r}) is not a way to end a session.", "pass TRY_COMMIT or TRY_ABORT.")
        if self._over is not None:
            if self._over.reason is Reason.UNKNOWN:
                return self._over
            raise self._ended()
        if checkpoint is not None:
            claims.check_checkpoint(checkpoint)
        return self._member.within(self._end, how, checkpoint)

    def _end(self, how: Try, checkpoint: bytes | None) -> Ended:
        reason = Reason.ASKED if how is TRY_ABORT else self._doomed or self._changed()
        if reason is None:
            self._over = Ended(False, Reason.UNKNOWN)  # until it is known otherwise
            reason = self._commit(checkpoint) if self.held is not None or self._writes else None
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
        """Return the change of the partition since its first message was read, as far as the member knows."""
        if self.held is None:
            return None
        if self._holdings.held.get(self.held.partition) is not self.held:
            return Reason.MOVED
        return Reason.SOUGHT if self.held.claim.epoch != self._start.epoch else None

    def _commit(self, checkpoint: bytes | None) -> Reason | None:
        built = self._writes.build()
        member = self._member
        faults.point("session.before")
        try:
            claim = member.store._commit(self._write, built, checkpoint, pages=built.pages)
        except OptionsChanged:
            return Reason.CHANGED
        except _Refused as refused:
            return refused.reason
        faults.point("session.after")
        if self.held is not None:
            self.held.claim = claim
        member.store._ring(built.mask)
        return None

    def _write(self, txn: StoreTransaction, built: BuiltWrites, checkpoint: bytes | None) -> Any:
        claim = None
        if self.held is not None:
            claim = self._member.table.moved(txn, self.held.partition, self.held.move(checkpoint))
            if claim is None:
                raise _Refused(self._why(txn, self.held))
        else:
            row = self._member.table.member(txn, self._member.name)
            if row is None or row.id != self._holdings.id:
                raise _Refused(Reason.MOVED)
        built.append(txn)
        faults.point("session.inside")
        return claim

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

    def __repr__(self) -> str:
        return f"<cues.groups.Session of {self._member.name} on {self.partition}: {self._state()}>"


class _Refused(Exception):
    """Raised inside the commit's transaction, to undo it."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason
