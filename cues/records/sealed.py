"""Rows with a checksum: all data of a store except messages.

    row      body, checksum of the body (8 bytes, xxh3-64)
    map      0xc1, msgpack of a map, and the same checksum. No msgpack begins with that byte: a row without it was
             written by a version without seals, and is sealed at its next write

:func:`seal` makes a row. :func:`unseal` reads it, and raises :class:`StoreDamaged` if the checksum is wrong.
:func:`intact` tests the checksum. A row with a wrong checksum is never used: one wrong bit in a position would lose
messages or repeat them.
"""

from __future__ import annotations

from typing import Any, Final

from cues import codec
from cues.base.texts import quoted
from cues.errors import StoreDamaged
from cues.records import batch

CHECKSUM_BYTES: Final = 8
_MAP: Final = b"\xc1"


def seal(body: bytes) -> bytes:
    """Return a row with this body."""
    return body + batch.checksum(body)


def intact(row: bytes) -> bool:
    """Return whether a row has the checksum that it was written with."""
    return len(row) > CHECKSUM_BYTES and batch.checksum(row[:-CHECKSUM_BYTES]) == row[-CHECKSUM_BYTES:]


def unseal(row: bytes, what: str) -> bytes:
    """Return the body of a row. If its checksum is wrong, raise :class:`StoreDamaged`; ``what`` names the row."""
    if not intact(row):
        raise damaged(what, "its checksum fails")
    return row[:-CHECKSUM_BYTES]


def seal_map(record: dict[str, Any]) -> bytes:
    """Return a row with this map."""
    return seal(_MAP + codec.pack(record))


def unseal_map(row: bytes, what: str) -> dict[str, Any]:
    """Return the map of a row, also of one without a seal. Raises :class:`StoreDamaged`; ``what`` names the row."""
    body = unseal(row, what)[1:] if row[:1] == _MAP else row
    try:
        record = codec.unpack(body)
    except Exception as error:
        raise damaged(what, f"{type(error).__name__}: {error}") from None
    if not isinstance(record, dict):
        raise damaged(what, f"it is a {type(record).__name__}")
    return record


def damaged(what: str, why: str) -> StoreDamaged:
    """Return the error for a row that cannot be used. The transaction that reads it adds the store (:func:`placed`)."""
    return StoreDamaged(
        f"The {what} cannot be used: {why}.", "run cues check on the store, then restore a backup.", path=""
    )


def placed(error: StoreDamaged, path: str) -> StoreDamaged:
    """Return the same error, with the store that the row is in."""
    return StoreDamaged(
        f"The store {path} is damaged: the{error.message.removeprefix('The')}",
        f"run cues check {quoted(path)}, which names everything that is damaged; then restore a backup of the store.",
        path=path,
    )
