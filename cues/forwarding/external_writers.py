"""Source positions of external writers, in the store that they write to.

    \\0source\\0<id>    queue, index after the last appended message, position

An external writer (a Spark query, a load job) reads a source and appends messages to a queue. After it was killed, it
does not know whether its last append was committed. So the transaction of an append also writes the position of the
source after it: the position moves if and only if the messages are there.

The writer defines its positions; here a position is any value that msgpack can encode. A commit reads the row
first, in the same transaction. Then it skips a repeated append, refuses one that does not follow the row, or appends
and moves the position (``spark/position.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cues import codec
from cues.base import names
from cues.records import sealed
from cues.storage import transaction
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction

Position = Sequence[Any]
"""Its first item names its kind."""


class SourceRow(NamedTuple):
    """The row of one external writer."""

    queue: str
    """The queue that it writes to. A writer id belongs to one queue for ever."""
    next: int | list[int]
    """The index after the last message that it appended; a list of them for a queue with several partitions."""
    position: Position
    """The position of its source after the appended messages."""

    def pack(self) -> bytes:
        return codec.pack({"queue": self.queue, "next": self.next, "position": list(self.position)})

    @staticmethod
    def unpack(key: bytes, raw: bytes, writer: str = "(unnamed)") -> SourceRow:
        """Decode a row. Raises :class:`StoreDamaged`, which names the writer."""
        form = {"queue": str, "next": (int, [int, ...]), "position": list}
        fields = sealed.unseal_value(key, raw, f"position of the external writer {writer!r}", form)
        return SourceRow(fields["queue"], fields["next"], fields["position"])


def read(txn: StoreTransaction, writer: str) -> SourceRow | None:
    """Return the row of a writer; None before its first commit."""
    raw = txn.get(key := names.source_key(writer))
    if raw is None:
        transaction.refuse_lost(txn)
        return None
    return SourceRow.unpack(key, raw, writer)


def put(txn: StoreTransaction, writer: str, row: SourceRow) -> None:
    """Move the position of a writer. Call it in the transaction that appends."""
    sealed.put(txn, names.source_key(writer), row.pack())


def rows(store: BaseStore) -> dict[str, SourceRow]:
    """Return the rows of all external writers of the store, by writer id."""
    with store.core.view() as txn:
        found = transaction.named_rows(txn, names.SOURCES)
        return {writer: SourceRow.unpack(key, raw, writer) for writer, key, raw in found}
