"""What part of its source a write is about, and whether the store has it already.

    part (start, end]       position kept in the store      then
    any                     none                            append (a stream: only its first batch)
                            end or later                    replayed: skip
                            start                           append, and move the position to the end
                            anything else                   a gap or an overlap: refuse, never guess

Three kinds of source, by what their offsets mean:

    Range          a batch write's own numbers
    Queues         queues of Cues: (identity, index of each partition), which mean the same without any
                   checkpoint; so a deleted or an old checkpoint does no harm
    Checkpoint     anything else Spark reads (files, rate, Kafka, …): offsets that mean something only
                   beside the checkpoint that they are written in; so a batch counts as replayed only if it
                   is the very offset record that was committed last, and another checkpoint is refused

A queue with several partitions stands at several indices at once. Partitions that it grows by are read from
their start, so that a place written down before stands at 1 on them.

Pure: decides, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from cues.forwarding.external_writers import Position

Verdict = Literal["append", "replayed", "refuse"]

Indices = tuple[int, ...]
"""A place on a queue: the index that is read next on each of its partitions."""

_FIRST: Final = 1
"""The position at the start of a partition that did not exist yet."""


def read_place(written: int | Sequence[int]) -> Indices:
    """A place as it is written down: an index where the queue has one partition, a list where it has several."""
    return (written,) if isinstance(written, int) else tuple(written)


def write_place(place: Indices) -> int | list[int]:
    """The form in which a place is stored."""
    return place[0] if len(place) == 1 else list(place)


def widened(place: Indices, partitions: int) -> Indices:
    """The place on a queue that has grown to so many ``partitions``."""
    return place + (_FIRST,) * (partitions - len(place))


class SourcePart(Protocol):
    """A part of a source, that one commit is about."""

    def decide(self, kept: Position | None) -> Verdict:
        """What to do with it, given the position in the store."""
        ...

    def position(self) -> Position:
        """The position behind it."""
        ...


@dataclass(frozen=True)
class Range:
    """Of a source whose user counts himself: from ``start`` to ``end``, exclusive."""

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
    """Of one queue: from ``start`` to ``end``, exclusive, on each of its partitions."""

    identity: bytes
    start: Indices
    end: Indices


@dataclass(frozen=True)
class Queues:
    """Of a stream that reads queues of Cues only; one span for each, in the query's order."""

    spans: tuple[QueueSpan, ...]
    record: bytes
    """Checksum of Spark's offset record: tells batches without new messages apart, which may still have
    rows (windows that a watermark closed)."""
    first: bool
    """True for the first batch of its checkpoint."""

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
        if starts == ends == places:  # it stays
            return "replayed" if kept[2] == self.record else "append"
        if all(end <= place for end, place in zip(ends, places)):
            return "replayed"
        return "append" if starts == places else "refuse"

    def position(self) -> Position:
        return ["queues", [[span.identity, write_place(span.end)] for span in self.spans], self.record]


@dataclass(frozen=True)
class Checkpoint:
    """Of a stream that reads anything else, as its checkpoint writes it down."""

    id: str
    """Of the checkpoint: drawn by Spark when it makes one."""
    batch: int
    record: bytes
    start: tuple[str, ...] | None
    """Offsets of the batch before, one a source; None for the first batch."""
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
