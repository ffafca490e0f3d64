"""Streams of the format ``cues``: batch after batch of what a queue gets is read, or appended to a queue.

A stream's offsets are parts of the queue (:class:`cues.spark.checkpoint.Offset`). Admission control is
``maxMessagesPerTrigger``. Of several partitions it takes the oldest messages first. Otherwise the messages of one
partition could move the watermark past messages of the others, and Spark would drop those. With ``resumeFrom`` the
stream starts at the position of that writer in its store. With an old checkpoint it starts before that position, and
one batch ends exactly there. So batches that were written are skipped as a whole. New partitions of a queue are read
from their start.

This module needs Spark 4.2: an older one asks a source in Python for no limit of a batch.
"""

from __future__ import annotations

import os
from typing import Any

from pyspark.sql import types as T
from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from cues.base.texts import quoted
from cues.errors import Diverged
from cues.forwarding import external_writers
from cues.overrides import override
from cues.queues.store import Store
from cues.spark.checkpoint import Offset, range_of
from cues.spark.options import ReadOptions
from cues.spark.place import message_first
from cues.spark.position import Indices, read_place, widened
from cues.spark.reading import Reading
from cues.spark.writing import Writing, whole


class QueueStream(Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream: batch after batch of the messages that are appended."""

    def __init__(self, schema: T.StructType, options: ReadOptions, parallelism: int) -> None:
        super().__init__(schema, options, parallelism)
        self._target: Indices | None = None

    @override
    @message_first()
    def initialOffset(self) -> dict[str, Any]:
        place = self._committed() or self.place_of(self.options.start, "startingPosition")
        return Offset(self.pinned.identity, place, place).to_dict()

    @override
    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self.options.messages_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    @override
    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._last()

    @override
    @message_first()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        at = self._mine(start).end
        end = self._last() if self._target is None else self._target
        if len(at) > len(end):
            place = self.options.place
            raise Diverged(
                f"The checkpoint has offsets of {len(at)} partitions of {place.queue!r}, which has {len(end)}.",
                f"read the whole queue, if this is one of its partitions; or run cues check {quoted(place.store)}:"
                " an older copy of it may have been put back.",
            )
        at = widened(at, len(end))
        committed = self._committed()
        if committed is not None and any(map(int.__lt__, at, committed)):
            # Messages that were written already get batches of their own, and these batches are skipped.
            committed = widened(committed, len(end))
            end = tuple(map(min, end, committed))
        end = tuple(map(max, at, end))
        if isinstance(limit, ReadMaxRows) and sum(end) - sum(at) > limit.max_rows:
            end = self.pinned.cut(at, end, limit.max_rows)
        return start if end == at else Offset(self.pinned.identity, at, end).to_dict()

    @override
    def reportLatestOffset(self) -> dict[str, Any] | None:
        last = self._last()
        return Offset(self.pinned.identity, last, last).to_dict()

    @override
    @message_first()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        before, asked = self._mine(start), self._mine(end)
        if any(map(int.__lt__, before.end, asked.start)) and before.start != before.end:
            raise Diverged(
                f"Spark asks for the messages after {before}, but the offset that it asks for begins later: {asked}.",
                "use a new checkpoint.",
            )
        # The recorded start counts: initialOffset may return another one now.
        return self.split(asked.start, asked.end) if asked.end != asked.start else []

    def _last(self) -> Indices:
        return self.pinned.ends()[1]

    def _mine(self, offset: dict[str, Any]) -> Offset:
        ours = Offset.of(offset)
        if ours is None or ours.identity != self.pinned.identity:
            raise Diverged(
                f"The checkpoint belongs to another source ({offset}) than the queue {self.options.place.queue!r} of"
                f" {self.options.place.store}, whose identity is {self.pinned.identity.hex()}.",
                "use a new checkpoint to read this queue.",
            )
        return ours

    def _committed(self) -> Indices | None:
        """The position on this queue of the writer of ``resumeFrom``; None before its first commit."""
        if self.options.resume_from is None:
            return None
        path, writer = self.options.resume_from
        if not os.path.exists(os.path.join(path, "data.mdb")):
            return None  # its first commit makes the store
        with Store(path, readonly=True) as store, store.core.view() as txn:
            row = external_writers.read(txn, writer)
        if row is None or row.position[0] != "queues":
            return None
        places = (read_place(place) for identity, place in row.position[1] if identity == self.pinned.identity)
        return next(places, None)


class StreamWriter(Writing, DataSourceStreamArrowWriter):
    """A stream's batches, one transaction each."""

    @override
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        id, checkpoint = self.options.id, self.options.checkpoint
        self.append(whole(messages), range_of(checkpoint, batchId) if id is not None and checkpoint else None)
