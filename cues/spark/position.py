"""The range of its source that a write covers, and the decision whether the store has it already.

    range (start, end]      position kept in the store      then
    any                     none                            append (a stream: only its first batch)
                            end or later                    replayed: skip
                            start                           append, and move the position to the end
                            anything else                   a gap or an overlap: refuse, never guess

Three kinds of source, by what their offsets mean:

    Range          the own numbers of a batch write
    Queues         queues of Cues: (identity, index of each partition), which have the same meaning without
                   a checkpoint; so a deleted or an old checkpoint does no harm
    Checkpoint     any other source of Spark (files, rate, Kafka, …): offsets that have a meaning only
                   with their checkpoint; so a batch counts as replayed only if it has the offset record
                   that was committed last, and another checkpoint is refused

The place on a queue with several partitions is one index for each. New partitions of the queue are read from
their start, so an older place is at 1 on them.

This module decides, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol

from cues.base.data import dataclass
from cues.forwarding.external_writers import Position

Verdict = Literal["append", "replayed", "refuse"]

Indices = tuple[int, ...]
"""A place on a queue: the index that is read next on each of its partitions."""

_FIRST: Final = 1
"""The position at the start of a partition that did not exist yet."""


def read_place(written: int | Sequence[int]) -> Indices:
    """A place as it is stored: an index if the queue has one partition, a list if it has several."""
    return (written,) if isinstance(written, int) else tuple(written)


def write_place(place: Indices) -> int | list[int]:
    """The form in which a place is stored."""
    return place[0] if len(place) == 1 else list(place)


def widened(place: Indices, partitions: int) -> Indices:
    """The place on a queue that has grown to this number of ``partitions``."""
    return place + (_FIRST,) * (partitions - len(place))


class SourceRange(Protocol):
    """The range of a source that one commit covers."""

    def decide(self, kept: Position | None) -> Verdict:
        """Decide what to do with it, by the position in the store."""
        ...

    def position(self) -> Position:
        """The position after it."""
        ...


@dataclass(frozen=True)
class Range:
    """A range in the user's own numbers: from ``start`` to ``end``, exclusive."""

    start: int
    end: int

    def decide(self, kept: Position | None) -> Verdict:
        if kept is None:
            return "append"
        if kept[0] != "range":
            return "refuse"
        at: int = kept[1]
        return "replayed" if self.end <= at else "append" if self.start == at else "refuse"

    def position(self) -> Position:
        return ["range", self.end]


@dataclass(frozen=True)
class QueueSpan:
    """A range of one queue: from ``start`` to ``end``, exclusive, on each of its partitions."""

    identity: bytes
    start: Indices
    end: Indices


@dataclass(frozen=True)
class Queues:
    """A range of a stream that reads only queues of Cues: one span for each, in the order of the query."""

    spans: tuple[QueueSpan, ...]
    record: bytes
    """The checksum of Spark's offset record. It distinguishes batches without new messages, which may still have
    rows (windows that a watermark closed)."""
    first: bool
    """True if it is the first batch of its checkpoint."""

    def decide(self, kept: Position | None) -> Verdict:
        if kept is None:
            return "append" if self.first else "refuse"
        if kept[0] != "queues" or [span.identity for span in self.spans] != [identity for identity, _ in kept[1]]:
            return "refuse"
        starts: list[int] = []
        ends: list[int] = []
        places: list[int] = []
        for span, (_, place) in zip(self.spans, kept[1]):
            at = read_place(place)
            partitions = max(len(at), len(span.end))
            starts += widened(span.start, partitions)
            ends += widened(span.end, partitions)
            places += widened(at, partitions)
        if starts == ends == places:  # the batch has no messages
            return "replayed" if kept[2] == self.record else "append"
        if all(end <= place for end, place in zip(ends, places)):
            return "replayed"
        return "append" if starts == places else "refuse"

    def position(self) -> Position:
        return ["queues", [[span.identity, write_place(span.end)] for span in self.spans], self.record]


@dataclass(frozen=True)
class CheckpointRange:
    """A range of a stream that reads another source, by the records of its checkpoint."""

    id: str
    """The id of the checkpoint: a random one, which Spark makes with it."""
    batch: int
    record: bytes
    start: tuple[str, ...] | None
    """The offsets of the batch before, one for each source; None for the first batch."""
    end: tuple[str, ...]

    def decide(self, kept: Position | None) -> Verdict:
        if kept is None:
            return "append" if self.start is None else "refuse"
        if kept[0] != "checkpoint" or kept[1] != self.id:
            return "refuse"
        _, _, batch, record, offsets = kept
        if batch == self.batch and record == self.record:
            return "replayed"
        follows = self.start is not None and batch == self.batch - 1 and tuple(offsets) == self.start
        return "append" if follows else "refuse"

    def position(self) -> Position:
        return ["checkpoint", self.id, self.batch, self.record, list(self.end)]
