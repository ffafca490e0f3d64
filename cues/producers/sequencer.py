"""The sequencer: it reads logs with pending messages and returns the committed ones.

It takes every message of its logs, in the order of each log. It returns a message outside of transactions at once,
pending messages when their acknowledgement comes, and then the acknowledgement itself. Producers do not wait for each
other. For each producer in each log it keeps

    min     clocks up to this one are done: acknowledged, or handed out
    max     the largest clock seen
    begin   index of the first pending message of the open span; -1 when there is none

and the newest pending messages of all producers in one ring. Messages that the ring no longer holds are read again,
from ``begin``: a replay. The ring avoids replays; it does not change the messages that are delivered.

    1. queue(envelope)          decide the kind of the message (an Outcome), then apply it
    2. start_replay(iterator)   after the outcome AckCommitReplay, with the messages of replay_range()
    3. step()                   until it returns None; only then queue the next message
    4. checkpoint()             at any time, also between two steps of 3

A checkpoint holds the offsets at which reading continues. For each producer it holds ``min`` and ``begin``, which tell
the messages to read again when an open span is acknowledged. An offset moves past a commit only when all its messages
were handed out.

Outcomes and state are those of Gazette (``message/sequencer.go``). As there, exactly once is not guaranteed in two
cases. A message with a zero UUID is delivered each time it is read. An acknowledgement below the last one means that
its producer returned to an older state: the sequencer does the same and may deliver messages again, because it could
lose messages otherwise.
"""

from __future__ import annotations

import enum
import uuid as uuids
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cues.base import logs
from cues.errors import InvalidArgument, SequenceError
from cues.overrides import override
from cues.records.identity import CLOCK_MAX, PRODUCER_BYTES, Flags, ProducerID, assemble, split

RING: Final = 8192
"""The number of pending messages in memory, for all producers together."""

_log = logs.logger("cues.txn")

_CONTINUE: Final = int(Flags.CONTINUE_TXN)
_ACK: Final = int(Flags.ACK_TXN)


class Envelope:
    """A message and its place: log, index, index after it, UUID.

    ``begin`` and ``end`` are indices on a queue (``end`` is ``begin`` + 1) or byte offsets in a file; gaps
    between envelopes are allowed.
    """

    __slots__ = ("_uuid", "begin", "clock", "end", "flags", "journal", "message", "producer")

    def __init__(self, journal: str, begin: int, end: int, uuid: uuids.UUID, message: Any) -> None:
        self.journal = journal
        self.begin = begin
        self.end = end
        self.message = message
        self._uuid: uuids.UUID | None = uuid
        self.producer, self.clock, self.flags = split(uuid)

    @classmethod
    def of(cls, journal: str, index: int, producer: int, clock: int, flags: int, message: Any) -> Envelope:
        """Return an envelope of a queue, whose UUID is made at its first use."""
        envelope = cls.__new__(cls)
        envelope.journal = journal
        envelope.begin = index
        envelope.end = index + 1
        envelope.message = message
        envelope._uuid = None
        envelope.producer, envelope.clock, envelope.flags = producer, clock, flags
        return envelope

    @property
    def uuid(self) -> uuids.UUID:
        """The UUID with which the message was written; the zero UUID if it has none."""
        if self._uuid is None:
            stamped = self.producer or self.clock or self.flags
            self._uuid = assemble(self.producer, self.clock, self.flags) if stamped else uuids.UUID(int=0)
        return self._uuid

    @property
    def acknowledgement(self) -> bool:
        """True for an acknowledgement: it commits the messages before it; its own message is empty."""
        return self.flags == _ACK

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Envelope):
            return NotImplemented
        return self._all() == other._all()

    @override
    def __hash__(self) -> int:
        return hash((self.journal, self.begin, self.clock))

    def _all(self) -> tuple[Any, ...]:
        return self.journal, self.begin, self.end, self.uuid, self.message

    @override
    def __repr__(self) -> str:
        return f"Envelope(journal={self.journal!r}, begin={self.begin}, end={self.end}, uuid={self.uuid})"


class Outcome(enum.Enum):
    """The kind of a queued message: the first that fits. ``emits`` says whether it hands out messages."""

    emits: bool

    OutsideAlreadyAcked = "a message outside of transactions that was delivered before"
    OutsideCommit = "a message outside of transactions"
    ContinueAlreadyAcked = "a pending message that was acknowledged before"
    ContinueTxnClockLarger = "a pending message that was read before"
    ContinueBeginSpan = "the first pending message of its producer"
    ContinueExtendSpan = "a further pending message"
    AckRollback = "an acknowledgement of nothing new: pending messages are dropped"
    AckEmpty = "an acknowledgement with nothing pending"
    AckCommitRing = "an acknowledgement of pending messages that are all in the ring"
    AckCommitReplay = "an acknowledgement of pending messages that must be read again"


_EMITS: Final = (Outcome.OutsideCommit, Outcome.AckEmpty, Outcome.AckCommitRing, Outcome.AckCommitReplay)
for _outcome in Outcome:
    _outcome.emits = _outcome in _EMITS


@dataclass(frozen=True, slots=True)
class ProducerState:
    """The part of a checkpoint about one producer in one log."""

    journal: str
    producer: ProducerID
    last_ack: int
    """Clock of its last message that is done: acknowledged, or handed out."""
    begin: int = -1
    """The index of the first message of its open span; -1 when there is none."""


@dataclass(frozen=True, slots=True)
class AckIntent:
    """An acknowledgement that is to be appended after its transaction is durable."""

    journal: str
    intent: bytes
    """The arguments with which :meth:`Publisher.append_ack_intents` appends it, also in another process."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The position of a reader of logs; made durable together with the reader's results."""

    offsets: dict[str, int] = field(default_factory=dict)
    """For each log, the index at which reading continues."""
    producers: tuple[ProducerState, ...] = ()
    ack_intents: tuple[AckIntent, ...] = ()
    """Acknowledgements of the messages that were published in the same transaction."""


class _Partial:
    """The state of one producer in one log."""

    __slots__ = ("begin", "journal", "max", "min", "producer", "span")

    def __init__(self, journal: str, producer: int, last: int, begin: int = -1) -> None:
        self.journal = journal
        self.producer = producer
        self.min = self.max = last
        self.begin = begin
        self.span: deque[tuple[int, Envelope]] = deque()
        """The messages of the open span that the ring still holds, with their numbers there."""


class Sequencer:
    """Reads one or many logs. Use it in one thread at a time.

    ``states`` and ``offsets`` are those of a checkpoint, ``ring`` bounds the pending messages in memory.
    """

    def __init__(
        self, states: Iterable[ProducerState] = (), ring: int = RING, offsets: Mapping[str, int] | None = None
    ) -> None:
        if not isinstance(ring, int) or ring < 1:
            raise InvalidArgument(f"ring={ring!r}: the message that commits must fit.", "pass ring=1 or more.")
        self.offsets: dict[str, int] = dict(offsets or {})
        self._capacity = ring
        self._kept = 0
        """The number of messages that the ring ever took, which is the number of the next one."""
        self._ring: deque[tuple[int, _Partial]] = deque()
        self._partials: dict[tuple[str, int], _Partial] = {}
        self._pending: set[_Partial] = set()
        """Producers whose span began since the last checkpoint."""
        self._emit: _Partial | None = None
        """Producer whose committed messages are being returned."""
        self._single: Envelope | None = None
        """A message without a UUID, in the place of a producer: it has no state."""
        self._out: Envelope | None = None
        """The message that was handed out last. It counts as processed when the next step begins."""
        self._out_clock = 0
        self._wants_replay = False
        self._replay: Iterator[Envelope] | None = None
        if isinstance(states, Checkpoint):
            raise InvalidArgument(
                "Sequencer() takes the states of a checkpoint, found a checkpoint.",
                "call Sequencer(checkpoint.producers, offsets=checkpoint.offsets).",
            )
        for state in states:
            _check_state(state)
            producer = int.from_bytes(state.producer, "big")
            key = state.journal, producer
            if key in self._partials:
                raise InvalidArgument(
                    f"{state!r} is the second state of its producer.", "pass the states of one checkpoint."
                )
            self._partials[key] = _Partial(state.journal, producer, state.last_ack, state.begin)

    # --- 1. queue -----------------------------------------------------------------------------

    def queue(self, envelope: Envelope) -> Outcome:
        """Take the next message of its log.

        Raises :class:`SequenceError` while :meth:`step` has committed messages to hand out.
        """
        if self._emit is not None or self._single is not None:
            raise SequenceError("Committed messages remain to be handed out.", "call step() until it returns None.")
        if envelope.clock == 0 and envelope.flags == 0:
            self._single = envelope
            return Outcome.OutsideCommit
        oldest = self._kept + 1 - self._capacity  # room for this message, whether it will be kept or not
        if self._ring and self._ring[0][0] < oldest:
            self._evict(oldest)
        journal, clock = envelope.journal, envelope.clock
        partial: _Partial | None
        if clock == 0:
            # Not added to the producers: the next message without a clock must not be taken for a repetition.
            partial = _Partial(journal, envelope.producer, 0)
            outcome = Outcome.OutsideCommit
            clock = 1
        else:
            key = journal, envelope.producer
            partial = self._partials.get(key)
            if partial is None:
                partial = self._partials[key] = _Partial(journal, envelope.producer, clock - 1)
            outcome = _decide(partial, clock, envelope.flags)
        self._apply(outcome, partial, clock, envelope)
        return outcome

    def _apply(self, outcome: Outcome, partial: _Partial, clock: int, envelope: Envelope) -> None:
        """Begin to hand out messages, or move the offset; never both."""
        if outcome in (Outcome.ContinueExtendSpan, Outcome.ContinueBeginSpan):
            if outcome is Outcome.ContinueBeginSpan:
                partial.begin = envelope.begin
                self._pending.add(partial)
            self._keep(partial, envelope)
            partial.max = clock
        elif outcome.emits:
            if outcome is Outcome.OutsideCommit:
                self._drop(partial, envelope)
            self._keep(partial, envelope)
            partial.max = clock
            if outcome is Outcome.AckEmpty:  # not earlier: a repeated queue() would take it for the end of a span
                partial.begin = envelope.begin
            self._emit, self._out = partial, None
            self._wants_replay = outcome is Outcome.AckCommitReplay
            return
        elif outcome is Outcome.AckRollback:
            if clock < partial.min:
                _log.error(
                    "%s: producer %012x went back from clock %#x to %#x; its later messages may be delivered again",
                    partial.journal, partial.producer, partial.min, clock,
                    queue=partial.journal, index=envelope.begin, producer=f"{partial.producer:012x}",
                )  # fmt: skip
            partial.min = partial.max = clock
            partial.begin = -1
            partial.span.clear()
            self._pending.discard(partial)
        self.offsets[partial.journal] = envelope.end

    def _drop(self, partial: _Partial, envelope: Envelope) -> None:
        """Begin the span again with a message outside of transactions; pending messages are lost."""
        if envelope.flags not in (0, _ACK, _CONTINUE):
            _log.error(
                "%s: unknown flags %#x at %d",
                partial.journal,
                envelope.flags,
                envelope.begin,
                queue=partial.journal,
                index=envelope.begin,
            )
        if partial.begin not in (-1, envelope.begin):
            _log.error(
                "%s: a message outside of transactions, at %d, drops the pending messages of %012x from %d on",
                partial.journal, envelope.begin, partial.producer, partial.begin,
                queue=partial.journal, index=envelope.begin, producer=f"{partial.producer:012x}",
            )  # fmt: skip
        partial.span.clear()
        partial.begin = envelope.begin

    def _keep(self, partial: _Partial, envelope: Envelope) -> None:
        partial.span.append((self._kept, envelope))
        self._ring.append((self._kept, partial))
        self._kept += 1

    def _evict(self, oldest: int) -> None:
        """Remove the messages from the ring that have a number below ``oldest``."""
        ring = self._ring
        while ring and ring[0][0] < oldest:
            number, partial = ring.popleft()
            if partial.span and partial.span[0][0] == number:
                partial.span.popleft()

    # --- 2. replay ----------------------------------------------------------------------------

    def replay_range(self) -> tuple[str, int, int]:
        """Return log, begin and end of the messages to read again.

        Raises :class:`SequenceError` if no messages are being handed out.
        """
        partial = self._committing("replay_range()")
        return partial.journal, partial.begin, partial.span[0][1].begin

    def start_replay(self, replay: Iterable[Envelope]) -> None:
        """Read ``replay`` before the ring. It must give all messages of :meth:`replay_range`, of every producer."""
        self._committing("start_replay()")
        self._replay = iter(replay)
        self._wants_replay = True

    def _committing(self, call: str) -> _Partial:
        if self._emit is None or not self._emit.span:
            raise SequenceError(f"{call}: nothing is being handed out.", "call it after AckCommitReplay.")
        return self._emit

    # --- 3. step ------------------------------------------------------------------------------

    def step(self) -> Envelope | None:
        """Return the next committed message, at the end the acknowledgement; None when all were handed out.

        The message of the previous call now counts as processed. Raises :class:`SequenceError` when a replay is
        due and was not started, when it gives a message outside its range, or when it fails (its error is the
        cause). Then nothing was changed, and another replay may be started.
        """
        partial = self._emit
        if partial is None:
            return self._step_of_single()
        low = partial.min if self._out is None else self._out_clock
        if self._wants_replay:
            envelope = self._from_replay(partial, low)
            if envelope is not None:
                partial.min = low
                partial.begin = envelope.begin
                self._out, self._out_clock = envelope, envelope.clock
                return envelope
            self._wants_replay = False
            self._replay = None
        span, high = partial.span, partial.max
        while span:
            envelope = span[0][1]
            clock = envelope.clock
            if (clock > low or clock == 0) and clock <= high:
                # No function is called here: a Ctrl-C inside it would lose the message. The clock is noted, because
                # the application may write into the message that it is given.
                partial.min = low
                partial.begin = envelope.begin
                self._out, self._out_clock = envelope, clock
                span.popleft()
                return envelope
            span.popleft()
        last = self._out
        assert last is not None  # at least the message that commits, whose clock is above min
        self.offsets[partial.journal] = last.end
        partial.min = partial.max = low
        partial.begin = -1
        self._pending.discard(partial)
        self._emit = self._out = None
        return None

    def _step_of_single(self) -> Envelope | None:
        single = self._single
        if single is not None and self._out is single:
            self.offsets[single.journal] = single.end
            self._single = self._out = None
            return None
        self._out = single
        return single

    def _from_replay(self, partial: _Partial, low: int) -> Envelope | None:
        """The next message of the span in the replay; None at the end of the replay."""
        journal, begin, end = self.replay_range()
        if self._replay is None:
            raise SequenceError(
                f"The messages of {journal} from {begin} to {end} must be read again.", "call start_replay() first."
            )
        try:
            for envelope in self._replay:
                if envelope.journal != journal:
                    raise SequenceError(
                        f"Replay of wrong journal ({envelope.journal}; expected {journal}).",
                        "replay the log of replay_range().",
                    )
                if envelope.begin < begin or envelope.end > end:
                    wrong = f"begin ({envelope.begin}; expected >= {begin}"
                    if envelope.begin >= begin:
                        wrong = f"end ({envelope.end}; expected <= {end}"
                    raise SequenceError(f"Replay has wrong {wrong}).", "replay the range of replay_range().")
                clock = envelope.clock
                if envelope.producer == partial.producer and (clock > low or clock == 0) and clock <= partial.max:
                    return envelope
        except SequenceError:
            self._replay = None
            raise
        except Exception as error:
            self._replay = None  # a generator that raised would now pretend to be at its end
            raise SequenceError(f"The replay failed: {error}", "start another replay of replay_range().") from error
        return None

    # --- 4. checkpoint ------------------------------------------------------------------------

    def has_pending(self) -> bool:
        """Return whether a span that began since the last checkpoint is still open."""
        return bool(self._pending)

    def checkpoint(self, horizon_ns: int = 0, keep_open: bool = False) -> Checkpoint:
        """Return the position at which reading continues, and the state of every producer.

        With a horizon, a producer is forgotten if its last clock is older than the newest committed clock of the
        same log by more than the horizon. Its pending messages are lost if they are acknowledged later;
        ``keep_open`` keeps every producer with an open span.
        """
        if horizon_ns > 0:
            self._prune(horizon_ns, keep_open)
        self._pending.clear()
        return Checkpoint(
            dict(self.offsets),
            tuple(
                ProducerState(part.journal, ProducerID(part.producer.to_bytes(6, "big")), part.min, part.begin)
                for part in self._partials.values()
            ),
        )

    def _prune(self, horizon_ns: int, keep_open: bool) -> None:
        newest: dict[str, int] = {}
        for part in self._partials.values():
            newest[part.journal] = max(newest.get(part.journal, 0), part.min)
        horizon = horizon_ns // 100 << 4
        for key, part in list(self._partials.items()):
            if part is self._emit or (keep_open and part.begin >= 0):
                continue
            if part.max < newest[part.journal] - horizon:
                del self._partials[key]
                self._pending.discard(part)


def _check_state(state: ProducerState) -> None:
    """Raise unless ``state`` can be from a checkpoint."""
    if not (
        isinstance(state, ProducerState)
        and isinstance(state.producer, bytes)
        and len(state.producer) == PRODUCER_BYTES
        and isinstance(state.last_ack, int)
        and 0 <= state.last_ack <= CLOCK_MAX
        and isinstance(state.begin, int)
        and state.begin >= -1
    ):
        raise InvalidArgument(f"{state!r} is not a state of a producer.", "pass the states of one checkpoint.")


def _decide(partial: _Partial, clock: int, flags: int) -> Outcome:
    """Return the kind of a message; change nothing."""
    if flags == _CONTINUE:
        if clock <= partial.min:
            return Outcome.ContinueAlreadyAcked
        if clock <= partial.max:
            return Outcome.ContinueTxnClockLarger
        return Outcome.ContinueBeginSpan if partial.begin < 0 else Outcome.ContinueExtendSpan
    if flags == _ACK:
        if clock <= partial.min:
            return Outcome.AckRollback
        if partial.begin < 0:
            return Outcome.AckEmpty
        if not partial.span or partial.span[0][1].begin != partial.begin:
            return Outcome.AckCommitReplay
        return Outcome.AckCommitRing
    return Outcome.OutsideAlreadyAcked if clock <= partial.min else Outcome.OutsideCommit
