"""Messages of data files as a step takes them, in an executor.

:class:`RowSlice` has the methods of :class:`cues.steps.taking.Slice`, over rows instead of the record batches of a
store. The messages of a task need not be consecutive, because a key may decide the task of each message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import pyarrow as pa

from cues.overrides import override
from cues.queues import tables
from cues.queues.cursor import Piece
from cues.queues.log import Log
from cues.records.batch import Batch
from cues.records.provenance import Provenance
from cues.spark.cluster.data import Rows, with_place
from cues.steps.hashes import Range
from cues.steps.taking import Slice


class Entrance(NamedTuple):
    """An input of a processor, as executors know it."""

    binding: str
    tailer: str
    queue: str
    identity: bytes
    kept: frozenset[str]
    """The fields that the queue adds to the metadata of its messages."""

    def identity_at(self, index: int) -> bytes:
        """The identity of the queue. It is the same for every index: a directory has one timeline."""
        return self.identity


class _Head(NamedTuple):
    acknowledges: bool = False


class _FileRows:
    """The messages of a piece of a file, with the attributes of a record batch that a function of tables uses."""

    head = _Head()

    def __init__(self, rows: Rows, columns: pa.Table | None) -> None:
        self._rows = rows
        self.schema = None if columns is None else columns.schema
        self._columns = columns

    def table(self) -> pa.RecordBatch:
        assert self._columns is not None
        return self._columns.combine_chunks().to_batches()[0]

    def messages(self) -> list[dict[str, Any]]:
        return self._rows.messages()


def _tables(rows: Rows, stored: Sequence[tuple[int, pa.Table | None]]) -> tables.Rows:
    """The messages for a function of tables: no dict is made of a row with columns."""
    pieces, at = [], 0
    for count, columns in stored:
        some = _FileRows(rows if len(stored) == 1 else rows.slice(at, at + count), columns)
        pieces.append(Piece(cast(Log, None), cast(Batch, some), 0, count))
        at += count
    return tables.Rows(pieces)


class RowSlice(Slice):
    """The messages that a task takes from one input. An offset counts from the first of them."""

    __slots__ = ("_provenance", "entrance", "rows")

    def __init__(self, entrance: Entrance, rows: Rows, messages: Any = None) -> None:
        if messages is None and rows.pieces is not None:
            messages = _tables(rows, rows.pieces)
        elif messages is None:
            messages = rows.messages()
        start = rows.indices[0]
        super().__init__(entrance, start, start + len(messages), messages, cast(list[Batch], []))
        self.entrance = entrance
        self.rows = rows
        self._provenance: Provenance | None = None

    @override
    def range(self, start: int, stop: int) -> Range:
        """The range from the first message to the end of the last one."""
        entrance = self.entrance
        return entrance.tailer, entrance.identity, self.rows.indices[start], self.rows.indices[stop - 1] + 1

    @override
    def seal_before(self, index: int) -> str | None:
        """An empty seal, because a directory has none."""
        return ""

    @override
    def pristine_between(self, start: int, stop: int) -> list[dict[str, Any]]:
        return self.rows.slice(start, stop).messages()

    @property
    def traced(self) -> bool:
        return bool(self.entrance.kept) or bool(self.rows.provenance)

    @override
    def provenance(self) -> Provenance:
        if self._provenance is None:
            self._provenance = with_place(self.rows.provenance, self.entrance.queue, self.entrance.kept, self.rows)
        return self._provenance

    @override
    def before(self, offset: int) -> Slice:
        return RowSlice(self.entrance, self.rows.slice(0, offset), self.messages[:offset])
