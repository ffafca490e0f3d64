"""Identity of a message: its producer, its clock, its flags, and the UUID that holds the three.

    bytes of the UUID    (RFC 4122, version 1, big-endian)
    0–3     bits 0–31 of the timestamp
    4–5     bits 32–47
    6–7     0x1000 (the version), bits 48–59
    8–9     0x8000 (the variant), 4 bits of a counter, 10 bits of flags
    10–15   producer

A clock is 64 bits: 60 bits of timestamp (100 ns since 1582-10-15) and the counter. It increases
with every message of its producer. So a message whose clock is not above the last one that was read of
the producer is a repetition, and readers need no set of ids. Clocks are compared as integers; the bytes
of UUIDs have another order.

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
from cues.overrides import override

PRODUCER_BYTES: Final = 6
PRODUCER_MASK: Final = (1 << 48) - 1
CLOCK_MAX: Final = (1 << 64) - 1
FLAGS_MAX: Final = 0x3FF
TICK: Final = 160
"""Step of a tick: 10 units of 100 ns, so one microsecond, with the counter at 0."""

_EPOCH_SHIFT: Final = 122_192_928_000_000_000
"""Units of 100 ns from the beginning of UUID time (1582) to the beginning of Unix time."""

ZERO_UUID: Final = uuid.UUID(int=0)
"""The UUID of a message without identity: it is delivered at least once, and never recognised as a repetition."""


class ProducerID(bytes):
    """Six bytes that name one publisher: drawn at random, or given.

    Drawn ids have the multicast bit, so they are not network addresses, and 47 random bits. Readers keep
    a few words for each producer, so use one producer for each process, not for each request.
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

    @override
    def __repr__(self) -> str:
        return f"ProducerID({self.hex()})"


class Flags(enum.IntFlag):
    """The role of a message in its producer's transaction: ten bits; unknown bits are kept."""

    OUTSIDE_TXN = 0
    """Committed at once, without an acknowledgement."""
    CONTINUE_TXN = 1
    """Pending until an acknowledgement with an equal or larger clock."""
    ACK_TXN = 2
    """Commits the pending messages up to its clock, and drops those after it."""


class Clock:
    """A clock that only moves forward; threads and publishers may share it."""

    __slots__ = ("_lock", "_value")

    def __init__(self, value: int = 0) -> None:
        self._value = _clock_bits(value)
        self._lock = threading.RLock()

    def __int__(self) -> int:
        return self._value

    def update(self, time_ns: int) -> None:
        """Move to a Unix time in nanoseconds, with the counter at 0. A time that is not later changes nothing."""
        if not isinstance(time_ns, int):
            raise InvalidArgument(f"A time must be in whole nanoseconds, found {time_ns!r}.", "pass time.time_ns().")
        value = (time_ns // 100 + _EPOCH_SHIFT) << 4
        with self._lock:
            if value > self._value:
                self._value = _clock_bits(value)

    def tick(self) -> int:
        """Move forward by a microsecond; returns the new value. No two ticks return the same."""
        return self.advance(1)

    def advance(self, ticks: int) -> int:
        """Make several ticks at once; returns the value after the first. The others follow at steps of 160."""
        with self._lock:
            while True:
                before = self._value
                after = _clock_bits(before + ticks * TICK)
                if self._value == before:  # else a signal handler of this thread has made ticks meanwhile
                    self._value = after
                    return before + TICK

    @override
    def __repr__(self) -> str:
        return f"Clock({self._value:#x})"


def build_uuid(producer: bytes, clock: int | Clock, flags: int) -> uuid.UUID:
    """Return the UUID of a message. Raises :class:`InvalidArgument` for a value that does not fit its field."""
    clock = _clock_bits(int(clock) if isinstance(clock, Clock) else clock)
    if not isinstance(producer, (bytes, bytearray, memoryview)) or len(producer) != PRODUCER_BYTES:
        raise InvalidArgument(f"A producer id has {PRODUCER_BYTES} bytes, found {producer!r}.", "pass a ProducerID.")
    if not isinstance(flags, int):
        raise InvalidArgument(f"Flags are an integer, found {flags!r}.", "pass Flags, such as Flags.OUTSIDE_TXN.")
    if not 0 <= flags <= FLAGS_MAX:
        raise InvalidArgument(f"Flags have ten bits, found {int(flags):#x}.", f"pass 0 to {FLAGS_MAX:#x}.")
    return assemble(int.from_bytes(producer, "big"), clock, flags)


def assemble(producer: int, clock: int, flags: int) -> uuid.UUID:
    """:func:`build_uuid` for values that are known to fit; the producer is an integer."""
    value = (
        (clock >> 4 & 0xFFFF_FFFF) << 96
        | (clock >> 36 & 0xFFFF) << 80
        | (0x1000 | clock >> 52) << 64
        | (0x8000 | (clock & 0xF) << 10 | flags) << 48
        | producer
    )
    # The constructor checks arguments that are known to fit, which takes three times as long as the rest.
    identity = object.__new__(uuid.UUID)
    object.__setattr__(identity, "int", value)
    object.__setattr__(identity, "is_safe", uuid.SafeUUID.unknown)
    return identity


def parse_uuid(value: uuid.UUID) -> tuple[ProducerID, int, Flags]:
    """Return producer, clock and flags of a message. Version and variant are not checked.

    Raises :class:`InvalidArgument` for a value that is not a ``uuid.UUID``.
    """
    producer, clock, flags = split(value)
    return ProducerID(producer.to_bytes(PRODUCER_BYTES, "big")), clock, Flags(flags)


def split(value: uuid.UUID) -> tuple[int, int, int]:
    """:func:`parse_uuid` with integers as results: faster, for code that calls it for each message."""
    try:
        bits = value.int
    except AttributeError:
        raise InvalidArgument(
            f"Expected a uuid.UUID, found {value!r}.", "pass uuid.UUID(text), or ZERO_UUID."
        ) from None
    timestamp = bits >> 96 | (bits >> 80 & 0xFFFF) << 32 | (bits >> 64 & 0xFFF) << 48
    rest = bits >> 48 & 0xFFFF
    return bits & PRODUCER_MASK, timestamp << 4 | rest >> 10 & 0xF, rest & FLAGS_MAX


def as_uuid(value: Any) -> uuid.UUID:
    """Return the UUID of a message, given as a UUID or as its text. None gives the zero UUID."""
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
    raise InvalidArgument(f"The UUID of a message is of type {type(value).__name__}.", "pass a uuid.UUID, or its text.")


def _clock_bits(value: int) -> int:
    if not isinstance(value, int):
        raise InvalidArgument(f"A clock is an integer, found {value!r}.", "pass int(clock).")
    if not 0 <= value <= CLOCK_MAX:
        raise InvalidArgument(f"A clock has 64 bits, found {value:#x}.", "use a Clock() and its update(time_ns).")
    return value
