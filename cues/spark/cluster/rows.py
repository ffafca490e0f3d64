"""Messages of data files as a step takes them, in an executor.

:class:`RowSlice` has the methods of :class:`cues.steps.taking.Slice`, over rows instead of the record batches of a
store. The messages of a task need not be consecutive, because a key may decide the task of each message.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from cues import codec
from cues.overrides import override
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


class RowSlice(Slice):
    """The messages that a task takes from one input. An offset counts from the first of them."""

    __slots__ = ("_provenance", "entrance", "rows")

    def __init__(self, entrance: Entrance, rows: Rows, messages: list[dict[str, Any]] | None = None) -> None:
        if messages is None:
            messages = [codec.unpack(value) for value in rows.values]
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
        return [codec.unpack(value) for value in self.rows.values[start:stop]]

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
