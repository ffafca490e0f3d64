"""The position of a reader on a queue, as rows keep it."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from cues.records import sealed

POSITION: Final = struct.Struct(">8sQ8s")
"""The fields of a :class:`Position`."""
NO_SEAL: Final = bytes(8)


class Position(NamedTuple):
    """The position of a reader on a queue."""

    identity: bytes
    next: int
    seal: bytes
    """Checksum of the batch that holds the message before ``next``; zeros when there was none."""


def unpack_reader(key: bytes, raw: bytes, queue: str, name: str) -> Position:
    """Decode the row of a named tailer; one of an earlier version has no seal. Raises :class:`StoreDamaged`."""
    if len(raw) == POSITION.size:
        return Position._make(POSITION.unpack(raw))
    what = f"position of the named tailer {name!r} of queue {queue}"
    return Position._make(sealed.unseal_fields(key, raw, what, POSITION))
