"""Low-water marks: the progress of readers whose positions are in another store."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from cues.base import names
from cues.queues.log import Log
from cues.records import sealed
from cues.storage.transaction import StoreTransaction, named_rows

_LOW: Final = struct.Struct(">QQB")


class Mark(NamedTuple):
    """A low-water mark."""

    epoch: int
    """Epoch of the reader's owner: after a takeover, the former owner cannot overwrite the mark."""
    next: int
    """All messages before this index were read, and the reader's commit is durable."""
    pending: bool
    """A step took messages from ``next`` on and may be repeated: no policy deletes them."""

    def pack(self) -> bytes:
        return sealed.seal(_LOW.pack(*self))

    @staticmethod
    def unpack(raw: bytes) -> Mark:
        """Decode the row. Raises :class:`StoreDamaged`."""
        epoch, next, pending = _LOW.unpack(sealed.unseal(raw, "low-water mark of a reader in another store"))
        return Mark(epoch, next, bool(pending))


@dataclass(frozen=True)
class ForeignReader:
    """A processor whose position is in another store."""

    home: bytes
    """Id of the store that holds its position."""
    processor: str
    epoch: int


def of_log(txn: StoreTransaction, log: Log) -> list[tuple[ForeignReader, Mark]]:
    """Return the marks on a log, each with its reader."""
    marks = []
    for name, value in named_rows(txn, names.low_water_prefix(log.id)):
        home, _, processor = name.partition("/")
        mark = Mark.unpack(value)
        marks.append((ForeignReader(bytes.fromhex(home), processor, mark.epoch), mark))
    return marks
