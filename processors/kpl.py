"""Aggregated records of Kinesis: the format in which the Kinesis Producer Library packs several records into one.

    magic (4 bytes)  |  AggregatedRecord, a message of protobuf  |  MD5 of that message (16 bytes)

    AggregatedRecord   1: partition keys (text, repeated)   2: hash keys (repeated)   3: Record (repeated)
    Record             1: index of its partition key        2: index of its hash key  3: data

Source: "KPL Aggregated Record Format", in the documentation of the library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

MAGIC: Final = b"\xf3\x89\x9a\xc2"
_DIGEST_BYTES: Final = 16
_VARINT, _BYTES = 0, 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
"""Sizes of the fields of fixed length, by their wire type."""


def parts_of(data: bytes) -> list[tuple[str, bytes]] | None:
    """Return partition key and data of each record in an aggregated one; None if ``data`` is not one."""
    body, digest = data[len(MAGIC) : -_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not data.startswith(MAGIC) or hashlib.md5(body, usedforsecurity=False).digest() != digest:
        return None
    keys: list[str] = []
    records: list[dict[int, int | bytes]] = []
    try:
        for field, value in _fields(body):
            if field == 1 and isinstance(value, bytes):
                keys.append(value.decode())
            elif field == 3 and isinstance(value, bytes):
                records.append(dict(_fields(value)))
        found = [(keys[int(record.get(1, 0))], record.get(3, b"")) for record in records]
    except (IndexError, ValueError):
        return None
    return [(key, part) for key, part in found if isinstance(part, bytes)]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message of protobuf. Raises IndexError or ValueError for others."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        size = _FIXED_BYTES.get(kind, 0)
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif not size:
            raise ValueError(f"wire type {kind}")
        at += size
        if at > len(message):
            raise ValueError("it ends inside a field")
        yield tag >> 3, message[at - size : at]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
