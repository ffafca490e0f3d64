"""Readers of logs: of every message, or of the committed ones.

    for envelope in ReadUncommitted(queue): …    every message in the order of the log, also pending ones
    for envelope in ReadCommitted(queue): …      in the order of the commits, with acknowledgements
    queue.tailer(isolation="committed")          the same without acknowledgements, and without envelopes

An iteration ends at the end of the queue (or waits there, with ``block``); the next call continues there. A message's
envelope names its log, index and UUID. Several logs are read through one sequencer, as :class:`cues.txn.Consumer` does.

If a transaction is larger than the sequencer's ring, its messages are read twice. The second time they are read by
index, in short read transactions, which needs no memory and pins no pages.

Not guaranteed: that a purge is noticed for messages that were read ahead. Messages that were purged before they were
read raise :class:`Gap`. ``on_gap="skip"`` continues after the gap, and may deliver only the rest of a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal

from cues.base import logs, names
from cues.errors import CuesError, Gap, InvalidArgument, SequenceError
from cues.overrides import override
from cues.producers.sequencer import RING, Checkpoint, Envelope, Outcome, Sequencer
from cues.queues.base import BaseQueue, check_index, journal_of
from cues.queues.stamped import check_one_log
from cues.records.batch import Batch
from cues.storage import wakeup
from cues.txn.messages import DICT, MessageType

AHEAD_MESSAGES: Final = 4096
AHEAD_BYTES_MAX: Final = 256 << 10
"""The most bytes that are copied out of one read transaction."""

OnGap = Literal["raise", "skip"]

_log = logs.logger("cues.txn")


class ReadUncommitted:
    """Every message of a queue as an :class:`Envelope`, from index ``begin`` to ``end`` (exclusive).

    Without ``begin`` it starts at the first message. Without ``end`` it stops at the end of the queue, or waits there
    with ``block``. ``message_type`` says where a message has its UUID (by default under ``q/uuid``); with None,
    messages are as stored. The message of an acknowledgement is empty. Raises :class:`Gap` and :class:`BatchDamaged`;
    the next call tries again. ``reader`` names the reader in a :class:`Gap`. ``on_skip`` is called with the number of
    messages that ``on_gap="skip"`` skips.
    """

    def __init__(
        self,
        queue: BaseQueue,
        begin: int | None = None,
        end: int | None = None,
        block: bool = False,
        *,
        on_gap: OnGap = "raise",
        message_type: MessageType | None = DICT,
        reader: str = "",
        on_skip: Callable[[int], object] = lambda count: None,
    ) -> None:
        if on_gap not in ("raise", "skip"):
            raise InvalidArgument(f"on_gap={on_gap!r}.", "pass 'raise' or 'skip'.")
        if not (end is None or isinstance(end, int)):
            raise InvalidArgument(
                f"end={end!r}: an index is an integer, found {type(end).__name__}.",
                "pass None, or an integer such as 7.",
            )
        check_one_log(queue)
        self.queue = queue
        self.journal = journal_of(queue)
        row = queue.core.row()
        self.index = row.first if begin is None else check_index(begin, row.next, f"begin={begin!r}")
        """The index that is read next."""
        self._end = end
        self._block = block
        self._skips = on_gap == "skip"
        self._reader = reader
        self._on_skip = on_skip
        self._type = message_type
        self._ahead: Iterator[Envelope] = iter(())

    def __iter__(self) -> Iterator[Envelope]:
        return self

    def __next__(self) -> Envelope:
        while True:
            for envelope in self._ahead:
                self.index = envelope.end
                return envelope
            if not (self._fill() or (self._block and self.wait(None))):
                raise StopIteration

    def wait(self, timeout: float | None) -> bool:
        """Wait until there is another message; False after ``timeout`` seconds, and at ``end``."""
        if self._end is not None and self.index >= self._end:
            return False
        return bool(wakeup.wait([self.interest], self._fill, timeout))

    @property
    def interest(self) -> tuple[wakeup.Doorbells | None, int]:
        """The doorbells and the mask of logs with which :func:`cues.storage.wakeup.wait` wakes this reader."""
        return self.queue.store.core.doorbells, self.queue.core.log.mask

    def _fill(self) -> bool:
        """Read ahead; False if there is nothing."""
        self.queue.core.check_open()
        log, start = self.queue.core.log, self.index
        count = AHEAD_MESSAGES if self._end is None else min(AHEAD_MESSAGES, self._end - start)
        if count <= 0:
            return False
        with self.queue.store.core.view() as txn:
            row = log.row(txn)
            raws = [] if start < row.first else log.read(txn, row, start, count, AHEAD_BYTES_MAX)
        if start < row.first:
            self._gap(start, row.first)
            return self._fill()
        if not raws:
            return False
        self._ahead = self._envelopes(log.batches(raws), start)
        return True

    def _gap(self, start: int, first: int) -> None:
        count = (first if self._end is None else min(first, self._end)) - start
        if not self._skips:
            by = f" by {self._reader}" if self._reader else ""
            raise Gap(
                f"The messages {start} to {start + count - 1} of queue {self.queue.id!r} were purged before they were"
                f" read{by} ({count} in all).",
                "set a longer retention. To continue with the messages that are left, pass on_gap='skip' to"
                " ReadCommitted, ReadUncommitted or Consumer, or call to_start() of a tailer.",
                queue=self.queue.id,
                first=start,
                last=start + count - 1,
                reader=self._reader,
            )
        _log.warning(
            "%s: the messages %d to %d were purged and are skipped",
            self.journal,
            start,
            start + count - 1,
            queue=self.journal,
            index=start,
        )
        self._on_skip(count)
        self.index = start + count

    def _envelopes(self, batches: list[Batch], start: int) -> Iterator[Envelope]:
        end = self._end
        for batch in batches:
            stamps, index = batch.stamps, batch.first
            messages = [{}] if batch.head.acknowledges else batch.messages()
            for offset in range(max(0, start - index), len(messages)):
                if index + offset == end:
                    return
                stamp = (stamps.producer_of(offset), stamps.clocks[offset], stamps.flags) if stamps else (0, 0, 0)
                yield self._given(Envelope.of(self.journal, index + offset, *stamp, messages[offset]))

    def _given(self, envelope: Envelope) -> Envelope:
        """Return the envelope with its message in the form of ``message_type``."""
        kind = self._type
        if kind is None:
            return envelope
        if envelope.acknowledgement:
            envelope.message = kind.new_acknowledgement(self.journal)
        elif kind is not DICT:
            envelope.message = kind.new(envelope.message)
            kind.set_uuid(envelope.message, envelope.uuid)
        elif envelope.clock:
            envelope.message[names.UUID] = envelope.uuid
        return envelope

    @override
    def __repr__(self) -> str:
        return f"<cues.txn.ReadUncommitted {self.queue.id} at {self.index}>"


class ReadCommitted:
    """The committed messages of a queue as :class:`Envelope`; after those of a transaction, its acknowledgement.

    ``ring`` bounds the pending messages that are kept in memory. ``checkpoint`` is a result of :meth:`checkpoint`:
    reading continues there. The other arguments are those of :class:`ReadUncommitted`. Raises :class:`Gap`,
    also for messages that a transaction must read again, and :class:`BatchDamaged`; the next call tries again.
    """

    def __init__(
        self,
        queue: BaseQueue,
        ring: int = RING,
        begin: int | None = None,
        end: int | None = None,
        block: bool = False,
        *,
        checkpoint: Checkpoint | None = None,
        on_gap: OnGap = "raise",
        message_type: MessageType | None = DICT,
    ) -> None:
        self.queue = queue
        self._on_gap: OnGap = on_gap
        self._type = message_type
        journal = journal_of(queue)
        states = [] if checkpoint is None else [state for state in checkpoint.producers if state.journal == journal]
        if checkpoint is not None and begin is None:
            begin = checkpoint.offsets.get(journal)
        self.source = ReadUncommitted(queue, begin, end, block, on_gap=on_gap, message_type=message_type)
        self.sequencer = Sequencer(states, ring, {journal: self.source.index})
        self._replaying = False
        self._taken: Envelope | None = None
        """An envelope of the source that the sequencer may not have taken, because its ``queue()`` raised."""

    def __iter__(self) -> Iterator[Envelope]:
        return self

    def __next__(self) -> Envelope:
        sequencer, source = self.sequencer, self.source
        while True:
            if self._replaying:
                self._replay()
            try:
                committed = sequencer.step()
            except SequenceError as error:
                if isinstance(error.__cause__, CuesError):
                    self._replaying = True  # a gap, or a damaged batch: next time it is read again
                    raise error.__cause__ from None
                raise
            self._replaying = False
            if committed is not None:
                return committed
            while True:
                envelope = self._taken
                if envelope is None:
                    envelope = self._taken = next(source)
                outcome = sequencer.queue(envelope)
                self._taken = None
                if outcome.emits:
                    self._replaying = outcome is Outcome.AckCommitReplay
                    break

    def _replay(self) -> None:
        _, begin, end = self.sequencer.replay_range()
        again = ReadUncommitted(self.queue, begin, end, on_gap=self._on_gap, message_type=self._type)
        self.sequencer.start_replay(again)

    def wait(self, timeout: float | None) -> bool:
        """Wait until the queue has another message, committed or not; False after ``timeout`` seconds."""
        return self.source.wait(timeout)

    def checkpoint(self, horizon_ns: int = 0, keep_open: bool = False) -> Checkpoint:
        """Return the position to continue at: :meth:`Sequencer.checkpoint`. The last envelope is not processed yet."""
        return self.sequencer.checkpoint(horizon_ns, keep_open)

    @override
    def __repr__(self) -> str:
        return f"<cues.txn.ReadCommitted {self.queue.id} at {self.source.index}>"
