"""The identities of a run of messages: one producer, one set of flags, and a clock for each.

    6       producer
    8       clock of the first message
    2       flags of their UUIDs
    1       width w of the differences: 1, 2, 4 or 8      when the clocks are not one tick apart (batch.CLOCKS)
    n · w   the difference of each clock from the first

The clocks of a publisher's messages are one tick apart, so sixteen bytes name all messages of a record batch.
Messages that were stamped elsewhere may have any clocks.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from typing import Final

from cues.errors import InvalidArgument
from cues.records.identity import PRODUCER_BYTES, TICK, Flags, assemble, split

HEAD: Final = struct.Struct(">6sQH")
_CLOCK: Final = struct.Struct(">Q")
_WIDTHS: Final = ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))
_LETTERS: Final = dict(_WIDTHS)
_ACK: Final = int(Flags.ACK_TXN)
_CONTINUE: Final = int(Flags.CONTINUE_TXN)
_VERSION: Final = 1
_VARIANT: Final = 0b10


class Stamps:
    """Producer, flags and clocks of a run of messages. It never changes."""

    __slots__ = ("clocks", "flags", "producer")

    def __init__(self, producer: int, flags: int, clocks: Sequence[int]) -> None:
        """``clocks`` are in rising order; they are a range if they are one tick apart."""
        self.producer = producer
        self.flags = flags
        self.clocks = clocks

    @property
    def regular(self) -> bool:
        """True if the clocks are one tick apart."""
        return isinstance(self.clocks, range)

    def slice(self, start: int, stop: int) -> Stamps:
        """Return the stamps of the messages ``start`` to ``stop`` (exclusive)."""
        if start == 0 and stop == len(self.clocks):
            return self
        return Stamps(self.producer, self.flags, self.clocks[start:stop])

    def uuid(self, offset: int) -> uuid.UUID:
        return assemble(self.producer, self.clocks[offset], self.flags)

    def encode(self) -> bytes:
        first = self.clocks[0]
        head = HEAD.pack(self.producer.to_bytes(PRODUCER_BYTES, "big"), first, self.flags)
        if self.regular:
            return head
        last = self.clocks[-1] - first
        width, letter = next(pair for pair in _WIDTHS if last < 1 << (8 * pair[0]))
        return head + bytes((width,)) + struct.pack(f">{len(self.clocks)}{letter}", *[c - first for c in self.clocks])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stamps):
            return NotImplemented
        return (self.producer, self.flags, list(self.clocks)) == (other.producer, other.flags, list(other.clocks))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Stamps({self.producer:012x}, {self.flags}, {list(self.clocks)})"


def decode(value: bytes, at: int, count: int, irregular: bool) -> Stamps:
    """Decode the stamps of ``count`` messages that :meth:`Stamps.encode` wrote at ``at``."""
    producer, first, flags = HEAD.unpack_from(value, at)
    clocks: Sequence[int]
    if irregular:
        at += HEAD.size
        clocks = [first + above for above in struct.unpack_from(f">{count}{_LETTERS[value[at]]}", value, at + 1)]
    else:
        clocks = ticks(first, count)
    return Stamps(int.from_bytes(producer, "big"), flags, clocks)


def size(value: bytes, at: int, count: int, irregular: bool) -> int:
    """The number of bytes that :func:`decode` reads."""
    return HEAD.size + (1 + count * value[at + HEAD.size] if irregular else 0)


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


def checked(identity: uuid.UUID) -> tuple[int, int, int]:
    """Return producer, clock and flags of a UUID; raises :class:`InvalidArgument` if it has another layout."""
    producer, clock, flags = split(identity)
    if not clock or identity.int >> 76 & 0xF != _VERSION or identity.int >> 62 & 0x3 != _VARIANT:
        raise InvalidArgument(
            f"The UUID {identity} does not consist of producer, clock and flags (version 1, with a clock above 0).",
            "make it with cues.txn.build_uuid(...), or leave q/uuid out.",
        )
    return producer, clock, flags


def runs(uuids: Sequence[uuid.UUID | None]) -> Iterator[tuple[int, int, Stamps | None]]:
    """Cut messages with these UUIDs into runs that share stamps: start, stop, stamps (None for those without).

    The zero UUID counts as none. Raises :class:`InvalidArgument` for a UUID of another layout; its ``offset`` is
    the place of the message.
    """
    start = 0
    clocks: list[int] = []
    before: tuple[int, int] | None = None
    for offset, identity in enumerate(uuids):
        key = None
        if identity is not None and identity.int:
            try:
                producer, clock, flags = checked(identity)
            except InvalidArgument as error:
                error.__dict__["offset"] = offset
                raise
            key = producer, flags
        # An acknowledgement is a record of its own, so that readers of messages can skip it.
        alone = key is not None and key[1] == _ACK
        if offset > start and (key != before or alone or (clocks and clock <= clocks[-1])):
            yield start, offset, _stamps(before, clocks)
            start, clocks = offset, []
        before = key
        if key is not None:
            clocks.append(clock)
    if len(uuids) > start:
        yield start, len(uuids), _stamps(before, clocks)


def _stamps(key: tuple[int, int] | None, clocks: list[int]) -> Stamps | None:
    if key is None:
        return None
    regular = ticks(clocks[0], len(clocks))
    return Stamps(*key, regular if clocks == list(regular) else clocks)
