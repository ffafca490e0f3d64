"""The parts of the key of a row of the state: a key or a field, as bytes.

A part is its length and its msgpack; or, of more than 200 bytes, 0xff and its 128-bit hash.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import xxhash

from cues import codec

PART_BYTES_MAX: Final = 200
HASHED: Final = 0xFF


class _Absent:
    """The value of a missing field."""


ABSENT: Final = _Absent()


def unpacked_part(row: bytes) -> tuple[Any, bytes]:
    """The first part of a row, and the rest; the hash of a long one."""
    if row[0] == HASHED:
        return row[1:17], row[17:]
    end = 1 + row[0]
    return codec.unpack(row[1:end]), row[end:]


def key_part(value: Any) -> bytes:
    """The part of a row's key that encodes a key or a field. Raises :class:`CodecError`."""
    kind = type(value)
    if kind is int or ((kind is str or kind is bytes) and len(value) <= PART_BYTES_MAX):
        return _part_of(value)
    return part_of_packed(codec.pack_key(value))


@functools.lru_cache(10_000, typed=True)
def _part_of(value: str | bytes | int) -> bytes:
    """Cached :func:`key_part`: fields, and often keys, recur with every message."""
    return part_of_packed(codec.pack(value))


def part_of_packed(packed: bytes) -> bytes:
    if len(packed) <= PART_BYTES_MAX:
        return bytes((len(packed),)) + packed
    return bytes((HASHED,)) + xxhash.xxh3_128_digest(packed)
