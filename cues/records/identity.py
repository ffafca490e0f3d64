"""Identity of a message: its producer, its clock, its flags, and the UUID that holds the three.

    bytes of the UUID    (RFC 4122, version 1, big-endian)
    0–3     bits 0–31 of the timestamp
    4–5     bits 32–47
    6–7     0x1000 (the version), bits 48–59
    8–9     0x8000 (the variant), 4 bits of a counter, 10 bits of flags
    10–15   producer

A clock is 64 bits: 60 bits of timestamp (100 ns since 1582-10-15) and the counter. It grows with every message of its
producer, so that whoever reads a message at or below one that it has read of that producer knows it for a repetition.
There is no set of seen ids anywhere. Clocks compare as integers; the bytes of UUIDs do not.

The layout is Gazette's, bit for bit (gazette/core, ``message/uuid.go``).

Not guaranteed: that a clock is the time. It never goes back, and a producer that ticks more than once a
microsecond runs ahead of it.
"""

from __future__ import annotations

import enum
import os
import threading
import uuid
from typing import Any, Final

from cues.errors import InvalidArgument

PRODUCER_BYTES: Final = 6
PRODUCER_MASK: Final = (1 << 48) - 1
CLOCK_MAX: Final = (1 << 64) - 1
FLAGS_MAX: Final = 0x3FF
TICK: Final = 160
"""Step of a tick: 10 units of 100 ns, so one microsecond, with the counter at 0."""

_EPOCH_SHIFT: Final = 122_192_928_000_000_000
"""Units of 100 ns from the beginning of UUID time (1582) to that of Unix time."""

ZERO_UUID: Final = uuid.UUID(int=0)
"""The UUID of a message that has none: it is delivered at least once, and never known for a repetition."""


class ProducerID(bytes):
    """Six bytes that name one publisher: drawn at random, or those that are given.

    Drawn ids have the multicast bit, so they are not a network address, and 47 random bits. Every reader
    keeps a few words for every producer it met: a producer should live as long as a process, not a request.
    """

    def __new__(cls, raw: bytes | None = None) -> ProducerID:
        if raw is None:
            drawn = bytearray(os.urandom(PRODUCER_BYTES))
            drawn[0] |= 0x01
            raw = bytes(drawn)
        if not isinstance(raw, (bytes, bytearray, memoryview)) or len(raw) != PRODUCER_BYTES:
            raise InvalidArgument(
                f"A producer id has {PRODUCER_BYTES} bytes, found {raw!r}.", "call ProducerID(), which draws a new one."
            )
        return super().__new__(cls, raw)

    def __repr__(self) -> str:
        return f"ProducerID({self.hex()})"


class Flags(enum.IntFlag):
    """The role of a message in its producer's transaction; ten bits, of which unknown ones are kept."""

    OUTSIDE_TXN = 0
    """Committed at once, without an acknowledgement."""
    CONTINUE_TXN = 1
    """Pending until an acknowledgement with a clock that is not smaller."""
    ACK_TXN = 2
    """Commits what is pending up to its clock, and drops what is pending beyond."""


class Clock:
    """A clock that only moves forward; safe to share by threads and by publishers."""

    __slots__ = ("_lock", "_value")

    def __init__(self, value: int = 0) -> None:
        self._value = _clock_bits(value)
        self._lock = threading.Lock()

    def __int__(self) -> int:
        return self._value

    def update(self, time_ns: int) -> None:
        """Move to a Unix time in nanoseconds, with the counter at 0. A time that is not later changes nothing."""
        if not isinstance(time_ns, int):
            raise InvalidArgument(f"A time is in whole nanoseconds, found {time_ns!r}.", "pass time.time_ns().")
        value = clock_at(time_ns)
        with self._lock:
            if value > self._value:
                self._value = _clock_bits(value)

    def tick(self) -> int:
        """Move on by a microsecond; returns the new value. No two ticks return the same."""
        return self.advance(1)

    def advance(self, ticks: int) -> int:
        """:meth:`tick` so many times at once; returns the value after the first, the others follow at steps of 160."""
        with self._lock:
            first = self._value + TICK
            self._value = _clock_bits(self._value + ticks * TICK)
        return first

    def __repr__(self) -> str:
        return f"Clock({self._value:#x})"


def clock_at(time_ns: int) -> int:
    """The clock of a Unix time in nanoseconds."""
    return (time_ns // 100 + _EPOCH_SHIFT) << 4


def build_uuid(producer: bytes, clock: int | Clock, flags: int) -> uuid.UUID:
    """The UUID of a message. Raises :class:`InvalidArgument` for what does not fit its field."""
    clock = _clock_bits(int(clock) if isinstance(clock, Clock) else clock)
    if not isinstance(producer, (bytes, bytearray, memoryview)) or len(producer) != PRODUCER_BYTES:
        raise InvalidArgument(f"A producer id has {PRODUCER_BYTES} bytes, found {producer!r}.", "pass a ProducerID.")
    if not isinstance(flags, int):
        raise InvalidArgument(f"Flags are an integer, found {flags!r}.", "pass Flags, such as Flags.OUTSIDE_TXN.")
    if not 0 <= flags <= FLAGS_MAX:
        raise InvalidArgument(f"Flags have ten bits, found {int(flags):#x}.", f"0 to {FLAGS_MAX:#x}.")
    return assemble(int.from_bytes(producer, "big"), clock, flags)


def assemble(producer: int, clock: int, flags: int) -> uuid.UUID:
    """:func:`build_uuid` of what is known to fit; the producer as an integer."""
    value = (
        (clock >> 4 & 0xFFFF_FFFF) << 96
        | (clock >> 36 & 0xFFFF) << 80
        | (0x1000 | clock >> 52) << 64
        | (0x8000 | (clock & 0xF) << 10 | flags) << 48
        | producer
    )
    # The constructor checks arguments that are known to fit, which takes three times as long as the rest.
    made = object.__new__(uuid.UUID)
    object.__setattr__(made, "int", value)
    object.__setattr__(made, "is_safe", uuid.SafeUUID.unknown)
    return made


def parse_uuid(value: uuid.UUID) -> tuple[ProducerID, int, Flags]:
    """Producer, clock and flags of a message. Version and variant are not looked at.

    Raises :class:`InvalidArgument` for a value that is not a ``uuid.UUID``.
    """
    producer, clock, flags = split(value)
    return ProducerID(producer.to_bytes(PRODUCER_BYTES, "big")), clock, Flags(flags)


def split(value: uuid.UUID) -> tuple[int, int, int]:
    """:func:`parse_uuid` as integers, for those who do it for every message."""
    try:
        bits = value.int
    except AttributeError:
        raise InvalidArgument(
            f"A UUID is a uuid.UUID, found {value!r}.", "pass uuid.UUID(text), or ZERO_UUID."
        ) from None
    timestamp = bits >> 96 | (bits >> 80 & 0xFFFF) << 32 | (bits >> 64 & 0xFFF) << 48
    rest = bits >> 48 & 0xFFFF
    return bits & PRODUCER_MASK, timestamp << 4 | rest >> 10 & 0xF, rest & FLAGS_MAX


def as_uuid(value: Any) -> uuid.UUID:
    """Return the UUID that a message carries as a UUID or as its text. None is the zero UUID."""
    if value is None:
        return ZERO_UUID
    if isinstance(value, uuid.UUID):
        return value
    if isinstance(value, str):
        try:
            return uuid.UUID(value)
        except ValueError:
            raise InvalidArgument(
                f"Invalid UUID {value[:60]!r} (length {len(value)}).", "pass the 36 characters of a UUID."
            ) from None
    raise InvalidArgument(f"A message's UUID is a {type(value).__name__}.", "pass a uuid.UUID, or its text.")


def _clock_bits(value: int) -> int:
    if not isinstance(value, int):
        raise InvalidArgument(f"A clock is an integer, found {value!r}.", "pass int(clock).")
    if not 0 <= value <= CLOCK_MAX:
        raise InvalidArgument(f"A clock has 64 bits, found {value:#x}.", "Clock(), then update(time.time_ns()).")
    return value
