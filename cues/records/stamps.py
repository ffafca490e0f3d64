"""The identities of a run of messages: one set of flags, and a clock for each; usually one producer.

    6       producer of the first message
    8       the smallest clock
    2       flags of their UUIDs
    1       width w of the differences: 1, 2, 4 or 8      when the clocks are not one tick apart (CLOCKS)
    n · w   the difference of each clock from the smallest
    1       number k of further producers                 when there are several (MIXED, and then also CLOCKS)
    6 · k   further producers
    n       the producer of each message: 0 for the first of the list

The clocks of a publisher's messages are one tick apart, so sixteen bytes name all messages of a record batch.
Messages that were stamped elsewhere may have any clocks. Only messages outside of transactions that the log does not
have may be MIXED: then readers of committed messages need to know nothing about them.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from typing import Final

from cues.errors import InvalidArgument
from cues.overrides import override
from cues.records.identity import PRODUCER_BYTES, TICK, Flags, assemble, split

HEAD: Final = struct.Struct(">6sQH")
_CLOCK: Final = struct.Struct(">Q")
_WIDTHS: Final = ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))
_LETTERS: Final = dict(_WIDTHS)
CLOCKS: Final = 0x10
"""Flag of a record: the distances of the clocks are not one tick, so each clock is stored."""
MIXED: Final = 0x20
"""Flag of a record, only with CLOCKS: its messages have several producers."""
_PRODUCERS_MAX: Final = 256
_OUTSIDE: Final = int(Flags.OUTSIDE_TXN)
_NONE: Final[tuple[int, int, int | None]] = (0, 0, None)

Identity = tuple[int, int, int]
"""Producer, clock and flags of a message."""
_ACK: Final = int(Flags.ACK_TXN)
_CONTINUE: Final = int(Flags.CONTINUE_TXN)
_VERSION: Final = 1
_VARIANT: Final = 0b10


class Stamps:
    """Producer, flags and clocks of a run of messages. It never changes."""

    __slots__ = ("clocks", "flags", "producer", "producers")

    def __init__(
        self, producer: int, flags: int, clocks: Sequence[int], producers: Sequence[int] | None = None
    ) -> None:
        """``clocks`` are in rising order, those of each producer; they are a range if they are one tick apart.

        ``producers`` are those of each message if there are several; ``producer`` is then the first.
        """
        self.producer = producer
        self.flags = flags
        self.clocks = clocks
        self.producers = producers

    @property
    def form(self) -> int:
        """The flags of a record that say how these stamps are stored."""
        if self.producers is not None:
            return CLOCKS | MIXED
        return 0 if isinstance(self.clocks, range) else CLOCKS

    def producer_of(self, offset: int) -> int:
        return self.producer if self.producers is None else self.producers[offset]

    def by_producer(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Iterate over the producers, each with the clocks of its messages."""
        if self.producers is None:
            yield self.producer, self.clocks
            return
        clocks: dict[int, list[int]] = {}
        for producer, clock in zip(self.producers, self.clocks):
            clocks.setdefault(producer, []).append(clock)
        yield from clocks.items()

    def slice(self, start: int, stop: int) -> Stamps:
        """Return the stamps of the messages ``start`` to ``stop`` (exclusive)."""
        if start == 0 and stop == len(self.clocks):
            return self
        producers = None if self.producers is None else self.producers[start:stop]
        return _stamps(self.flags, self.clocks[start:stop], producers, self.producer)

    def uuid(self, offset: int) -> uuid.UUID:
        return assemble(self.producer_of(offset), self.clocks[offset], self.flags)

    def encode(self) -> bytes:
        form = self.form
        least = min(self.clocks) if form & MIXED else self.clocks[0]
        head = HEAD.pack(self.producer.to_bytes(PRODUCER_BYTES, "big"), least, self.flags)
        if not form:
            return head
        above = [clock - least for clock in self.clocks]
        most = max(above)
        width, letter = next(pair for pair in _WIDTHS if most < 1 << (8 * pair[0]))
        head += bytes((width,)) + struct.pack(f">{len(above)}{letter}", *above)
        if self.producers is None:
            return head
        numbers = {producer: number for number, producer in enumerate(dict.fromkeys(self.producers))}
        further = b"".join([producer.to_bytes(PRODUCER_BYTES, "big") for producer in numbers][1:])
        return head + bytes((len(numbers) - 1,)) + further + bytes([numbers[producer] for producer in self.producers])

    @override
    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other) if isinstance(other, Stamps) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @override
    def __repr__(self) -> str:
        producers = "/".join([f"{producer:012x}" for producer in self.producers or (self.producer,)])
        return f"Stamps({producers}, {self.flags}, {list(self.clocks)})"


def decode(value: bytes, at: int, count: int, form: int) -> Stamps:
    """Decode the stamps of ``count`` messages, from ``at`` on; ``form`` may have further flags of the record."""
    first, least, flags = HEAD.unpack_from(value, at)
    producer = int.from_bytes(first, "big")
    if not form & CLOCKS:
        return Stamps(producer, flags, ticks(least, count))
    at += HEAD.size
    width = value[at]
    clocks = [least + above for above in struct.unpack_from(f">{count}{_LETTERS[width]}", value, at + 1)]
    if not form & MIXED:
        return Stamps(producer, flags, clocks)
    at += 1 + count * width
    named = at + 1 + PRODUCER_BYTES * value[at]
    known = [producer]
    for start in range(at + 1, named, PRODUCER_BYTES):
        known.append(int.from_bytes(value[start : start + PRODUCER_BYTES], "big"))
    return Stamps(producer, flags, clocks, [known[number] for number in value[named : named + count]])


def size(value: bytes, at: int, count: int, form: int) -> int:
    """The number of bytes that :func:`decode` reads."""
    if not form & CLOCKS:
        return HEAD.size
    own = HEAD.size + 1 + count * value[at + HEAD.size]
    return own + 1 + PRODUCER_BYTES * value[at + own] + count if form & MIXED else own


def acknowledges(value: bytes, at: int) -> bool:
    """Return whether the messages of these stamps are acknowledgements."""
    return int.from_bytes(value[at + 14 : at + 16], "big") == _ACK


def pending(value: bytes, at: int) -> bool:
    """Return whether the messages of these stamps are pending until they are acknowledged."""
    return int.from_bytes(value[at + 14 : at + 16], "big") == _CONTINUE


def restamped(tail: bytes, clock: int) -> bytes:
    """Return ``tail``, which begins with regular stamps, with ``clock`` added to all clocks."""
    (first,) = _CLOCK.unpack_from(tail, PRODUCER_BYTES)
    return tail[:PRODUCER_BYTES] + _CLOCK.pack(first + clock) + tail[PRODUCER_BYTES + _CLOCK.size :]


def ticks(first: int, count: int) -> range:
    """Return ``count`` clocks that are one tick apart."""
    return range(first, first + count * TICK, TICK)


def checked(uuid: uuid.UUID | None) -> Identity | None:
    """Return the identity in a UUID, None for none and for the zero UUID.

    Raises :class:`InvalidArgument` if the UUID has another layout.
    """
    if uuid is None or not uuid.int:
        return None
    identity = split(uuid)
    if not identity[1] or uuid.int >> 76 & 0xF != _VERSION or uuid.int >> 62 & 0x3 != _VARIANT:
        raise InvalidArgument(
            f"The UUID {uuid} does not consist of producer, clock and flags (version 1, with a clock above 0).",
            "make it with cues.txn.build_uuid(...), or leave q/uuid out.",
        )
    return identity


def runs(identities: Sequence[Identity | None], mixes: bool = False) -> Iterator[tuple[int, int, Stamps | None]]:
    """Cut messages with these identities into runs that share stamps: start, stop, stamps (None for those without).

    ``mixes``: the log has none of the messages, so those outside of transactions may share stamps although their
    producers differ.
    """
    start = 0
    clocks: list[int] = []
    producers: list[int] = []
    highest: dict[int, int] = {}
    """The last clock of each producer of the run."""
    before: int | None = None
    for offset, identity in enumerate(identities):
        producer, clock, flags = identity or _NONE
        if offset > start:
            # A record has one acknowledgement: readers skip it.
            fits = flags == before and flags != _ACK
            if fits and flags is not None:
                last = highest.get(producer)
                if last is not None:
                    fits = clock > last
                else:
                    fits = mixes and flags == _OUTSIDE and len(highest) < _PRODUCERS_MAX
            if not fits:
                yield start, offset, None if before is None else _stamps(before, clocks, producers)
                start, clocks, producers, highest = offset, [], [], {}
        before = flags
        if flags is not None:
            clocks.append(clock)
            producers.append(producer)
            highest[producer] = clock
    if len(identities) > start:
        yield start, len(identities), None if before is None else _stamps(before, clocks, producers)


def _stamps(flags: int, clocks: Sequence[int], producers: Sequence[int] | None, producer: int = 0) -> Stamps:
    """Return stamps in their shortest form; ``producer`` is that of all messages if ``producers`` is None."""
    if producers is not None:
        producer = producers[0]
        if producers.count(producer) < len(producers):
            return Stamps(producer, flags, clocks, producers)
    regular = ticks(clocks[0], len(clocks))
    return Stamps(producer, flags, regular if clocks == regular or list(clocks) == list(regular) else clocks)
