"""The segments of the key of a row of the state: a key or a field, as bytes.

A segment is its length and its msgpack; or, of more than 200 bytes, 0xff and its 128-bit hash.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import xxhash

from cues import codec

SEGMENT_BYTES_MAX: Final = 200
HASHED: Final = 0xFF
WRITTEN: Final = b"\xfb"
BY_WRITE: Final = b"\xfc"
TIMER: Final = b"\xfd"
ORDER: Final = b"\xfe"
OWN: Final = (WRITTEN, BY_WRITE, TIMER, ORDER)
"""First bytes of rows that are not values (state.py)."""
TIME_BYTES: Final = 8
_KEY_AT: Final = {WRITTEN[0]: 1, BY_WRITE[0]: 1 + TIME_BYTES, TIMER[0]: 1, ORDER[0]: 1 + TIME_BYTES}


class _Absent:
    """The value of a missing field."""


ABSENT: Final = _Absent()


def key_of_row(row: bytes) -> bytes:
    """The segment of the key of a row, also of one that is not a value."""
    at = _KEY_AT.get(row[0], 0)
    return row[at : at + (17 if row[at] == HASHED else 1 + row[at])]


def unpacked_segment(row: bytes) -> tuple[Any, bytes]:
    """The first segment of a row, and the rest; the hash of a long one."""
    if row[0] == HASHED:
        return row[1:17], row[17:]
    end = 1 + row[0]
    return codec.unpack(row[1:end]), row[end:]


def key_segment(value: Any) -> bytes:
    """The segment of a row's key that encodes a key or a field. Raises :class:`CodecError`."""
    kind = type(value)
    if kind is int or ((kind is str or kind is bytes) and len(value) <= SEGMENT_BYTES_MAX):
        return _known_segment(value)
    return segment_of_packed(codec.pack_key(value))


@functools.lru_cache(10_000, typed=True)
def _known_segment(value: str | bytes | int) -> bytes:
    """Cached :func:`key_segment`: fields, and often keys, recur with every message."""
    return segment_of_packed(codec.pack(value))


def segment_of_packed(packed: bytes) -> bytes:
    if len(packed) <= SEGMENT_BYTES_MAX:
        return bytes((len(packed),)) + packed
    return bytes((HASHED,)) + xxhash.xxh3_128_digest(packed)
