"""Low-water marks: the progress of readers whose positions are in another store, or in a checkpoint (cues/txn).

A queue may get partitions while a reader of the whole queue does not run. It has no mark on them, and would lose their
messages. So its mark on partition 0 says that it reads the whole queue, and counts as one on the first message of each
partition where it has none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from cues.base import names
from cues.base.data import dataclass
from cues.base.names import ProcessorKey
from cues.base.texts import quoted
from cues.queues.log import Log
from cues.queues.readers import Kind, Reader, register
from cues.records import sealed
from cues.storage.transaction import StoreTransaction, named_rows

_LOW: Final = struct.Struct(">QQB")
_UNDER_WAY: Final = 1
_ALL_PARTITIONS: Final = 2
CONSUMER: Final = "consumer "
"""The beginning of the name of a reader that is a consumer. Its store is then the id of the consumer."""


class Mark(NamedTuple):
    """A low-water mark."""

    epoch: int
    """Epoch of the reader's owner: after a takeover, the former owner cannot overwrite the mark."""
    next: int
    """All messages before this index were read, and the reader's commit is durable."""
    under_way: bool
    """A step took messages from ``next`` on and may be repeated: no policy deletes them."""
    all_partitions: bool = False
    """On partition 0: the reader reads all partitions of the queue, also those that are added."""

    def pack(self) -> bytes:
        flags = _UNDER_WAY * self.under_way + _ALL_PARTITIONS * self.all_partitions
        return _LOW.pack(self.epoch, self.next, flags)

    @staticmethod
    def unpack(key: bytes, raw: bytes) -> Mark:
        """Decode the row. Raises :class:`StoreDamaged`."""
        epoch, next, flags = sealed.unseal_fields(key, raw, "low-water mark of a reader in another store", _LOW)
        return Mark(epoch, next, bool(flags & _UNDER_WAY), bool(flags & _ALL_PARTITIONS))


@dataclass(frozen=True)
class ForeignReader:
    """A processor whose position is in another store."""

    home: bytes
    """Id of the store that holds its position."""
    name: ProcessorKey
    """The key of the processor; of a consumer :data:`CONSUMER` and its name."""
    epoch: int


def of_log(txn: StoreTransaction, log: Log) -> list[tuple[ForeignReader, Mark]]:
    """Return the marks on a log, each with its reader."""
    marks = _rows(txn, log.id)
    if log.partition:
        for name, mark in _rows(txn, names.log_id(log.queue, 0)).items():
            if mark.all_partitions:
                marks.setdefault(name, Mark(mark.epoch, 1, False))
    return [(_reader(name, mark), mark) for name, mark in marks.items()]


def put(txn: StoreTransaction, log_id: str, reader: ForeignReader, mark: Mark) -> None:
    """Write a mark, unless a later owner of the reader has written one."""
    key = names.low_water_key(log_id, reader.home, reader.name)
    raw = txn.get(key)
    if raw is None or Mark.unpack(key, raw).epoch <= mark.epoch:
        sealed.put(txn, key, mark.pack())


def _rows(txn: StoreTransaction, log_id: str) -> dict[str, Mark]:
    return {name: Mark.unpack(key, raw) for name, key, raw in named_rows(txn, names.low_water_prefix(log_id))}


def _reader(name: str, mark: Mark) -> ForeignReader:
    home, _, key = name.partition("/")
    return ForeignReader(bytes.fromhex(home), ProcessorKey(key), mark.epoch)


def _readers(txn: StoreTransaction, log: Log) -> Iterator[Reader]:
    for who, mark in of_log(txn, log):
        yield Reader(FOREIGN, who.home, who.name, b"", mark.next, mark.under_way)


def _hint(reader: Reader, log: str, store: str) -> str:
    return f"cues compact {quoted(store)} --forget {quoted(f'{reader.home.hex()}/{reader.name}')}"


FOREIGN: Final = Kind("other", _readers, _hint)
"""Readers whose positions are in another store, or in a checkpoint."""
register(FOREIGN)
