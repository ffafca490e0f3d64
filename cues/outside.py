"""How far writers from outside are: the position of a source, kept in the store that it is written to.

    \\0source\\0<id>    queue, next index behind what was appended, position

A writer that is no processor (a Spark query, a load job) reads some source and appends what it makes of
it to a queue. Where it was killed, it does not know whether its last append was committed. So the store
keeps for each such writer the position that its source had at the end of the last append, changed in
the transaction of the append itself: the position is moved if and only if the messages are there.

What a position is belongs to the writer; here it is any value that msgpack takes. Whoever commits reads
the row first, in the same transaction, and decides: replayed, so skip; not what follows, so refuse; or
append and move (``spark/position.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cues import batch, codec, names

if TYPE_CHECKING:
    from cues.store import Store

_CHECKSUM_BYTES: Final = 8

Position = Sequence[Any]
"""Its first item names its kind."""


class SourceRow(NamedTuple):
    """What a store keeps of one writer from outside."""

    queue: str
    """Where it writes; an id means one queue for good."""
    next: int | list[int]
    """The index behind the last message that it appended; of a queue with several partitions, of each."""
    position: Position
    """Of its source, behind what was appended."""

    def pack(self) -> bytes:
        raw = codec.pack({"queue": self.queue, "next": self.next, "position": list(self.position)})
        return raw + batch.checksum(raw)

    @staticmethod
    def unpack(raw: bytes) -> SourceRow:
        found = codec.unpack(raw[:-_CHECKSUM_BYTES])
        return SourceRow(found["queue"], found["next"], found["position"])


def intact(raw: bytes) -> bool:
    """Whether a row has the checksum that it was written with."""
    return len(raw) > _CHECKSUM_BYTES and batch.checksum(raw[:-_CHECKSUM_BYTES]) == raw[-_CHECKSUM_BYTES:]


def read(txn: Any, writer: str) -> SourceRow | None:
    """The row of a writer; None before its first commit."""
    raw = txn.get(names.source_key(writer))
    return None if raw is None else SourceRow.unpack(raw)


def put(txn: Any, writer: str, row: SourceRow) -> None:
    """Move a writer's position; in the transaction that appends."""
    txn.put(names.source_key(writer), row.pack())


def rows(store: Store) -> dict[str, SourceRow]:
    """Every writer from outside that the store knows."""
    with store.view() as txn:
        found = list(store.rows(txn, names.SOURCES))
    return {key[len(names.SOURCES) :].decode(): SourceRow.unpack(raw) for key, raw in found}
