"""Sessions: read, transform, write and move the position, in one commit.

    with member.session() as session:
        for message in session.read_many(500, timeout=1):
            session.write("invoices", invoice(message))
        committed, reason = session.end(TRY_COMMIT)

A session is one step over one partition, so that a partition that moves to another member takes one step with it and
leaves those of the others alone.

1. The first read chooses the partition: of those that have something, the one served longest ago. All reads of the
   session are from there.
2. What is written is checked and encoded at once, and kept in memory. Nobody sees it before the commit.
3. :meth:`Session.end` with ``TRY_COMMIT`` compares, inside one transaction, owner, epoch and index of the position
   with those that the messages were read under, appends, and moves the position. All of it happens, or nothing.
4. Every doubt becomes an abort: the partition was taken over, or sought; a write failed; a queue was changed. After
   an abort everything that was read ahead of that partition is dropped, and the same messages come again.

**An unknown outcome is no success.** Where an exception comes out of the commit itself (a full disk, a Ctrl-C while
it waited for the disk), nobody can say from outside whether it was made. The exception is raised, the member reads
from the store where it stands, and goes on from there: behind these messages if the commit was made, with them if not.
Ending the same session once more is answered with ``(False, "unknown")``, never with True.

Not guaranteed: anything about what the transformation does outside of the store. A step that is aborted has run.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cues import batch, claims, faults, names
from cues.batch import Page
from cues.errors import InvalidArgument
from cues.groups.held import Held
from cues.groups.sticky import Partition
from cues.queue import Queue

if TYPE_CHECKING:
    from cues.groups.membership import Member
    from cues.tailer import Envelope

Message = dict[str, Any]
Built = list[tuple[Queue, list[Page]]]
"""What is appended to each partition of a queue."""


class Try(enum.Enum):
    """How a session is to end; whether it does is in the answer."""

    COMMIT = "commit"
    ABORT = "abort"


TRY_COMMIT: Final = Try.COMMIT
TRY_ABORT: Final = Try.ABORT


class Reason(enum.StrEnum):
    """Why a session was not committed. All but ``APPEND`` are answered by reading again."""

    ASKED = "asked"
    """By ``TRY_ABORT``, or by leaving the session without an end."""
    MOVED = "moved"
    """The partition is another member's by now, or was taken away meanwhile."""
    SOUGHT = "sought"
    """The position was moved by a seek."""
    APPEND = "append"
    """A write failed; its exception was raised then."""
    CHANGED = "changed"
    """A queue that was written to has other partitions, or takes smaller messages, by now."""
    UNKNOWN = "unknown"
    """An exception came out of the commit; whether it was made is for the next read to see."""


class Ended(NamedTuple):
    """How a session ended."""

    committed: bool
    reason: Reason | None
    """Why not; None when it was committed."""


class Session:
    """One step of a member; :meth:`Member.session` begins it. Used by the member's thread."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._holdings = member.holdings
        self._held: Held | None = None
        self._outputs: dict[str, _Output] = {}
        self._doomed: Reason | None = None
        self._over: Ended | None = None

    # --- reading ---

    def read(self, block: bool = False, timeout: float | None = None) -> Message | None:
        """The next message of the session's partition; None when there is none, or the partition is no longer held."""
        found = self._read(1, timeout if block else 0.0)
        return found[0] if found else None

    def read_many(self, n: int, timeout: float | None = 0.0) -> list[Message]:
        """The next messages of the session's partition, at most ``n``; waits for the first for ``timeout`` seconds."""
        return self._read(n, timeout)

    def __iter__(self) -> Iterator[Message]:
        """The messages until the end of the partition."""
        while (message := self.read()) is not None:
            yield message

    @property
    def partition(self) -> Partition | None:
        """What the session reads from; None before its first message."""
        return self._held.partition if self._held else None

    @property
    def envelope(self) -> Envelope | None:
        """Index, time, hash and metadata of the message read last; None before the first."""
        return self._held.tailer.envelope if self._held else None

    @property
    def checkpoint(self) -> bytes:
        """What was committed beside the partition's position; empty before the first message."""
        return self._held.claim.checkpoint if self._held else b""

    def _read(self, n: int, timeout: float | None) -> list[Message]:
        self._check()
        with self._member._use():
            found = self._member.take(n, timeout, only=self._held, single=True)
        if not found:
            return []
        held, messages = found[0]
        if self._held is None:
            self._held = held
            self._start = held.claim
            self._holdings.stuck.add(held.partition)
        elif self._changed() is not None:
            return []  # what was read so far is void: these come again, in a session of their own
        return messages

    # --- writing ---

    def write(self, queue: str | Queue, message: Message) -> None:
        """Write a message to a queue of the store, when the session is committed.

        ``queue`` is a name, or a handle where its key or partitioner is a function. The message is checked and
        encoded now. Raises :class:`QueueNotFound`, :class:`CodecError`, :class:`MessageTooLarge`,
        :class:`ReservedKey` and :class:`InvalidArgument`; after any of them the session can only be aborted.
        """
        self.write_many(queue, (message,))

    def write_many(self, queue: str | Queue, messages: Iterable[Message]) -> None:
        """:meth:`write` for several."""
        self._check()
        try:
            self._output(queue).add(messages)
        except BaseException:
            self._doomed = self._doomed or Reason.APPEND
            raise

    def _output(self, queue: str | Queue) -> _Output:
        name = queue.id if isinstance(queue, Queue) else queue
        found = self._outputs.get(name)
        if found is None:
            found = self._outputs[name] = _Output(self._member.output(queue))
        return found

    # --- the end ---

    def end(self, how: Try, checkpoint: bytes | None = None) -> Ended:
        """End the session; returns whether it was committed, and if not, why.

        ``checkpoint`` (at most 3,000 bytes) is kept beside the position. An empty session is committed without a
        transaction. Errors of the store, :class:`StoreFull` say, are raised: then the outcome is unknown, and the next
        read goes on from what the store says.
        """
        if how not in (TRY_COMMIT, TRY_ABORT):
            raise InvalidArgument(f"end({how!r}).", "TRY_COMMIT or TRY_ABORT.")
        if self._over is not None:
            if self._over.reason is Reason.UNKNOWN:
                return self._over
            raise self._ended()
        if checkpoint is not None:
            claims.check_checkpoint(checkpoint)
        with self._member._use():
            reason = Reason.ASKED if how is TRY_ABORT else self._doomed or self._changed()
            if reason is None and (self._held is not None or self._outputs):
                self._over = Ended(False, Reason.UNKNOWN)  # until it is known otherwise
                try:
                    reason = self._commit(checkpoint)
                except BaseException:
                    self._close(rewind=True)
                    raise
            self._close(rewind=reason is not None)
            self._over = Ended(reason is None, reason)
            return self._over

    def abandon(self) -> None:
        """Abort, if it has not ended; what leaving the ``with`` block does."""
        if self._over is None:
            self._over = Ended(False, Reason.ASKED)
            self._close(rewind=True)

    def _changed(self) -> Reason | None:
        """What happened to the partition since its first message was read, as far as the member knows."""
        if self._held is None:
            return None
        if self._holdings.held.get(self._held.partition) is not self._held:
            return Reason.MOVED
        return Reason.SOUGHT if self._held.claim.epoch != self._start.epoch else None

    def _commit(self, checkpoint: bytes | None) -> Reason | None:
        built = {name: output.build() for name, output in self._outputs.items()}
        pages = sum(1 + len(page.pieces) for parts in built.values() for _, some in parts for page in some)
        member = self._member
        faults.point("session.before")
        try:
            claim = member.store.commit(self._write, built, checkpoint, pages=pages + pages // 64)
        except _Refused as refused:
            return refused.reason
        faults.point("session.after")
        if self._held is not None:
            self._held.claim = claim
        for parts in built.values():
            for view, _ in parts:
                member.store.ring(view.log.mask)
        return None

    def _write(self, txn: Any, built: dict[str, Built], checkpoint: bytes | None) -> Any:
        claim = None
        if self._held is not None:
            claim = self._member.table.moved(txn, self._held.partition, self._held.move(checkpoint))
            if claim is None:
                raise _Refused(self._why(txn, self._held))
        else:
            row = self._member.table.member(txn, self._member.name)
            if row is None or row.id != self._holdings.id:
                raise _Refused(Reason.MOVED)
        for name, parts in built.items():
            for view, pages in parts:
                view.append_pages(txn, pages)
            output = self._outputs[name]
            if output.queue._version != output.version:
                raise _Refused(Reason.CHANGED)
        faults.point("session.inside")
        return claim

    def _why(self, txn: Any, held: Held) -> Reason:
        """Why the position is not what it was."""
        found = claims.read(txn, names.log_id(*held.partition), self._member.group)
        return Reason.SOUGHT if found is not None and found.owner == held.claim.owner else Reason.MOVED

    def _close(self, rewind: bool) -> None:
        """Let the member go on: from behind this step, or from where the store says that it stands."""
        self._outputs.clear()
        self._member.session_ended()
        held = self._held
        if held is not None:
            self._holdings.stuck.discard(held.partition)
            if rewind:
                self._member.doubt(held)

    def _check(self) -> None:
        if self._over is not None:
            raise self._ended()

    def _ended(self) -> InvalidArgument:
        assert self._over is not None
        how = "committed" if self._over.committed else f"aborted: {self._over.reason}"
        return InvalidArgument(f"The session has ended ({how}).", "member.session() for the next step.")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def __repr__(self) -> str:
        state = "open"
        if self._over is not None:
            state = "committed" if self._over.committed else f"aborted: {self._over.reason}"
        return f"<cues.groups.Session of {self._member.name} on {self.partition}: {state}>"


class _Refused(Exception):
    """Raised inside the commit's transaction, which takes everything back."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class _Output:
    """What a session writes to one queue: messages as bytes, by partition."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.options = queue.options
        self.version = queue._version
        self._parts: dict[int, list[bytes | Message]] = {}

    def add(self, messages: Iterable[Message]) -> None:
        found = list(messages)
        limit, strips = self.options.max_message_bytes, self.options.strips
        packed = [batch.pack_one(message, limit, strips) for message in found]
        if not self.queue.spread:
            self._parts.setdefault(0, []).extend(packed)
            return
        for share in self.queue.shares(found):
            self._parts.setdefault(share.partition, []).extend(packed[offset] for offset in share.offsets)

    def build(self) -> Built:
        """Record batches by partition, in the order in which they were written.

        Partitions are opened here: a database cannot be opened inside a transaction.
        """
        limit, strips = self.options.max_message_bytes, self.options.strips
        built: Built = []
        for number, packed in sorted(self._parts.items()):
            pages: list[Page] = []
            for _, run in itertools.groupby(packed, key=type):
                some = list(run)
                encoded = [one for one in some if isinstance(one, bytes)]
                if encoded:
                    pages += batch.build([], limit, encoded=encoded)
                else:  # with metadata of their own
                    pages += batch.build([one for one in some if isinstance(one, dict)], limit, strips=strips)
            built.append((self.queue.view(number), pages))
        return built
