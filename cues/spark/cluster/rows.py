"""Messages as rows, in an executor: the messages that a part of a step takes from one input.

A row is a message of a queue as in its data file, with its input and its offset in the step. :class:`RowSlice` has the
methods of :class:`cues.steps.taking.Slice`, over rows instead of the record batches of a store. The messages
of a part need not be consecutive, because a key may decide the part of each message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from cues import codec
from cues.base import names
from cues.records import provenance
from cues.records.batch import Batch
from cues.records.provenance import Provenance
from cues.steps.hashes import Range
from cues.steps.taking import Input, Slice


class Entrance(NamedTuple):
    """An input of a processor, as executors know it."""

    binding: str
    tailer: str
    queue: str
    identity: bytes
    kept: frozenset[str]
    """The fields that the queue adds to the metadata of its messages."""

    def identity_at(self, index: int) -> bytes:
        """The identity of the queue. It is the same for every index: a directory of Parquet files has one timeline."""
        return self.identity


@dataclass(slots=True)
class TakenRow:
    """A message that a step takes."""

    offset: int
    """In the step."""
    index: int
    """On its queue."""
    time_us: int
    hash: str | None
    value: bytes
    meta: bytes | None


class RowSlice(Slice):
    """The messages that a part takes from one input. An offset counts from the start of the part."""

    __slots__ = ("entrance", "rows")

    def __init__(self, entrance: Entrance, rows: list[TakenRow], messages: list[dict[str, Any]] | None = None) -> None:
        if messages is None:
            messages = [codec.unpack(row.value) for row in rows]
        # A Slice uses only the ids of its Input.
        super().__init__(cast(Input, entrance), rows[0].index, messages, cast(list[Batch], []))
        self.entrance = entrance
        self.rows = rows

    def range(self, start: int, stop: int) -> Range:
        """The range from the first message to the end of the last one."""
        entrance = self.entrance
        return entrance.tailer, entrance.identity, self.rows[start].index, self.rows[stop - 1].index + 1

    def seal_before(self, index: int) -> str | None:
        """An empty seal, because a directory of Parquet files has none."""
        return ""

    def pristine(self, offset: int) -> dict[str, Any]:
        return codec.unpack(self.rows[offset].value)  # type: ignore[no-any-return]

    @property
    def traced(self) -> bool:
        return bool(self.entrance.kept) or any(row.meta is not None for row in self.rows)

    def provenance(self) -> Provenance:
        return provenance.concat([self.provenance_of(offset) for offset in range(len(self.rows))])

    def provenance_of(self, offset: int) -> Provenance:
        """The provenance of one message, with this queue; as :meth:`cues.records.batch.Batch.provenance` of a batch."""
        row, queue, kept = self.rows[offset], self.entrance.queue, self.entrance.kept
        came = provenance.decode(row.meta, 1) if row.meta is not None else None
        columns: dict[str, tuple[Any, Any]] = dict(came.columns) if came else {}
        if "t" in kept or "time" in kept:
            columns[queue] = (row.index if "t" in kept else None, row.time_us * 1000 if "time" in kept else None)
        if "tx" in kept and names.TX not in columns:
            columns[names.TX] = (row.index, None)
        return Provenance(1, columns, came.extra if came else None)

    def before(self, offset: int) -> Slice:
        return RowSlice(self.entrance, self.rows[:offset], self.messages[:offset])
