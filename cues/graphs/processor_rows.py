"""The row of a processor: its owner and epoch, and the positions of its tailers."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import xxhash

from cues.base import clock, names
from cues.base.data import dataclass
from cues.base.names import ProcessorId, ProcessorKey
from cues.base.texts import quoted
from cues.queues.log import Log
from cues.queues.readers import Kind, Reader, register
from cues.records import sealed
from cues.records.positions import POSITION, Position
from cues.storage.transaction import StoreTransaction, named_rows

_HEAD: Final = struct.Struct(">8sQQQ8sBB")
_UNDER_WAY_AT: Final = struct.calcsize(">8sQQQ8s")


class ProcessorRow(NamedTuple):
    """The durable state of a processor besides its keyed state."""

    owner: bytes
    epoch: int
    generation: int
    pid: int
    boot: bytes
    under_way: bool
    """A snapshot was committed before its function ran: the messages after the positions must be kept."""
    positions: tuple[Position, ...]
    source: bytes = b""
    """msgpack of ``[position, count of bare messages]`` of a source; empty before its first step."""

    def pack(self) -> bytes:
        """Return the body of the row."""
        owner, epoch, generation, pid, boot, under_way, positions, _ = self
        head = _HEAD.pack(owner, epoch, generation, pid, boot, under_way, len(positions))
        return head + b"".join([POSITION.pack(*position) for position in self.positions]) + self.source

    @staticmethod
    def unpack(key: bytes, raw: bytes, processor: str = "(unnamed)") -> ProcessorRow:
        """Decode the row. Raises :class:`StoreDamaged`, which names the processor."""
        what = f"row of the processor {processor}"
        body = sealed.unseal(key, raw, what)
        if len(body) < _HEAD.size or len(body) < _HEAD.size + body[_HEAD.size - 1] * POSITION.size:
            raise sealed.damaged(what, f"it has {len(body)} bytes")
        owner, epoch, generation, pid, boot, under_way, count = _HEAD.unpack_from(body)
        end = _HEAD.size + count * POSITION.size
        positions = tuple(map(Position._make, POSITION.iter_unpack(body[_HEAD.size : end])))
        return ProcessorRow(owner, epoch, generation, pid, boot, bool(under_way), positions, body[end:])


def moved(seed: int, raw: bytes, under_way: bool, positions: Iterable[tuple[int, bytes, int, bytes]]) -> bytes:
    """Return a row with other positions: each a place in the row, and the fields of :class:`Position`.

    ``seed`` is that of its key (:func:`sealed.seed_of`). Each step moves a row; to make the whole of it anew takes as
    long as an append.
    """
    body = bytearray(raw[: -sealed.CHECKSUM_BYTES])
    body[_UNDER_WAY_AT] = under_way
    for place, identity, next, seal in positions:
        POSITION.pack_into(body, _HEAD.size + place * POSITION.size, identity, next, seal)
    return sealed.seal_by(seed, bytes(body))


def with_source(seed: int, raw: bytes, source: bytes) -> bytes:
    """Return a row with another position of a source; ``seed`` is that of its key."""
    return sealed.seal_by(seed, raw[: _end(raw)] + source)


def source_of(raw: bytes) -> bytes:
    """Return the position of a source in a packed row."""
    return raw[_end(raw) : -sealed.CHECKSUM_BYTES]


def has_state(source: bytes) -> bool:
    """Return whether the position of a source belongs to rows of its state: it is nothing without them."""
    return bool(source) and len(unpacked_source(source)) == 3


def unpacked_source(source: bytes) -> list[Any]:
    """Return the position of a source, a count of bare messages, and True if it has rows of state."""
    found: list[Any] = sealed.value_of(source, "position of the source", ([object, int], [object, int, bool]))
    return found


def _end(raw: bytes) -> int:
    """Return the place after the positions of a packed row."""
    return _HEAD.size + raw[_HEAD.size - 1] * POSITION.size


def position_at(raw: bytes, place: int) -> Position:
    """Return one position of a packed row."""
    return Position._make(POSITION.unpack_from(raw, _HEAD.size + place * POSITION.size))


_TOPOLOGY: Final[dict[str, Any]] = {
    "kind": str, "tailers": [str, ...], "queues": [str, ...], "stores?": [bytes, ...], "key?": (str, None),
}  # fmt: skip


@dataclass(frozen=True)
class ProcessorInputs:
    """The kind of a processor, and its tailers with their queues and stores."""

    kind: str
    tailers: tuple[str, ...]
    """Tailer ids, sorted: the order in which they were declared must not matter."""
    queues: tuple[str, ...]
    """Queue ids, in the same order."""
    stores: tuple[bytes, ...]
    """Ids of the stores that the queues are in, in the same order; empty for the home store."""
    key: ProcessorKey | None = None
    """The id of its first start, under which its try log, state and fork queues are; None if that is its id now."""

    def pack(self) -> bytes:
        """Return the body of the record's row."""
        record: dict[str, Any] = {"kind": self.kind, "tailers": list(self.tailers), "queues": list(self.queues)}
        if any(self.stores):
            record["stores"] = list(self.stores)
        if self.key:
            record["key"] = self.key
        return sealed.pack_map(record)

    @staticmethod
    def unpack(key: bytes, raw: bytes, processor: str = "(unnamed)") -> ProcessorInputs:
        """Decode the record. Raises :class:`StoreDamaged`, which names the processor."""
        what = f"topology of the processor {processor}"
        record = sealed.unseal_map(key, raw, what)
        sealed.formed(record, what, _TOPOLOGY)
        queues = tuple(record["queues"])
        stores = tuple(record.get("stores", [b""] * len(queues)))
        return ProcessorInputs(record["kind"], tuple(record["tailers"]), queues, stores, record.get("key"))

    def key_of(self, processor: ProcessorId) -> ProcessorKey:
        """Return the key of the processor, whose id is not in the record."""
        return self.key or ProcessorKey(processor)

    @property
    def places(self) -> dict[str, bytes]:
        """The store of each tailer's queue, by tailer id."""
        return dict(zip(self.tailers, self.stores))


def boot() -> bytes:
    """Return eight bytes that identify this boot."""
    return xxhash.xxh3_64_digest(clock.boot_id().encode())


def read_row(txn: StoreTransaction, processor: ProcessorId) -> ProcessorRow | None:
    raw = txn.get(key := names.processor_key(processor))
    return None if raw is None else ProcessorRow.unpack(key, raw, processor)


def read_topology(txn: StoreTransaction, processor: ProcessorId) -> ProcessorInputs | None:
    raw = txn.get(key := names.topology_key(processor))
    return None if raw is None else ProcessorInputs.unpack(key, raw, processor)


def key_of(txn: StoreTransaction, processor: ProcessorId) -> ProcessorKey:
    """Return the id of the try log, the state and the fork queues of a processor, which it keeps when it is renamed."""
    topology = read_topology(txn, processor)
    return ProcessorKey(processor) if topology is None else topology.key_of(processor)


def all_ids(txn: StoreTransaction) -> list[ProcessorId]:
    """Return the ids of all processors of the store, and of their units."""
    return [ProcessorId(id) for id, *_ in named_rows(txn, names.PROCESSORS)]


def topologies(txn: StoreTransaction) -> Iterator[tuple[ProcessorId, ProcessorInputs]]:
    """Iterate over the topology records of the store, by the ids of their processors."""
    for id, key, raw in named_rows(txn, names.TOPOLOGIES):
        yield ProcessorId(id), ProcessorInputs.unpack(key, raw, id)


def all_keys(txn: StoreTransaction) -> dict[ProcessorId, ProcessorKey]:
    """Return the keys (:func:`key_of`) of all processors of the store, by id."""
    return {id: topology.key_of(id) for id, topology in topologies(txn)}


def forget(txn: StoreTransaction, processor: ProcessorId) -> None:
    """Delete the row of a processor, its topology, and the notes for which retention waits."""
    topology = read_topology(txn, processor)
    txn.delete(names.processor_key(processor))
    txn.delete(names.topology_key(processor))
    for queue, store in zip(topology.queues, topology.stores) if topology else ():
        if not store:
            txn.delete(names.subscription_key(queue, processor))


def _of_log(txn: StoreTransaction, log: Log) -> Iterator[Reader]:
    for name, *_ in named_rows(txn, names.subscriptions_prefix(log.id)):
        processor = ProcessorId(name)
        row = read_row(txn, processor)
        topology = read_topology(txn, processor)
        if row is not None and topology is not None:
            for queue, at in zip(topology.queues, row.positions):
                if queue == log.id:
                    yield Reader(PROCESSORS, log.store.id, processor, at.identity, at.next, row.under_way)


def _hint(reader: Reader, log: str, store: str) -> str:
    return f"cues seek {quoted(store)}#{quoted(reader.name)} --to end"


PROCESSORS: Final = Kind("processor", _of_log, _hint)
"""The processors of graphs whose positions are in the store of the log."""
register(PROCESSORS)
