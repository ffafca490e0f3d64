"""Queues as tables and streams: record batches of the log become record batches of Arrow.

    driver      which indices: first and next of the queue, as one read transaction has them; split
                into ranges, one a task
    executor    opens the store read-only, copies record batches out in short transactions, cuts the
                array of messages into values without decoding it, and hands Arrow the bytes as they lie

A stream's offsets are parts of the queue (:class:`cues.spark.checkpoint.Offset`). Admission control is
``maxMessagesPerTrigger``; with ``resumeFrom`` the stream starts where that writer's position is in its
store, and a batch never straddles it, so that after a deleted or an old checkpoint what was written is
skipped whole.

Not guaranteed: that retention waits for a query. What was purged before it was read is an error, or with
``failOnDataLoss=false`` skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy
import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from cues import clock, codec, outside
from cues.batch import Batch
from cues.errors import Diverged, InvalidArgument, MessagesPurged
from cues.spark.checkpoint import Offset
from cues.spark.columns import Column
from cues.spark.options import Position, ReadOptions
from cues.spark.place import pin
from cues.store import Store

if TYPE_CHECKING:
    from cues.queue import Queue

ROW: Final = T.StructType(
    [
        T.StructField("index", T.LongType()),
        T.StructField("time", T.TimestampType()),
        T.StructField("hash", T.StringType()),
        T.StructField("value", T.BinaryType()),
    ]
)
"""A message as a row: index on its queue, append time, delivery hash of the step that wrote it (32 hex
digits, NULL where no step did), and its msgpack, untouched."""
_READ_BYTES: Final = 1 << 20
"""Of record batches that become one Arrow batch: some ten thousand small messages."""
_MESSAGES_A_TASK: Final = 20_000
"""Below this a task costs more than it reads."""


class Columns:
    """Which columns a query wants, and how record batches become them."""

    def __init__(self, schema: T.StructType, options: ReadOptions) -> None:
        self.schema = to_arrow_schema(schema, timezone="UTC")
        own = {field.name: field.dataType for field in ROW.fields} if options.row_columns else {}
        self._fields: dict[str, Column] = {}
        for field in schema.fields:
            if field.name not in own:
                self._fields[field.name] = Column(field, options.mode == "strict")
            elif field.dataType != own[field.name]:
                raise InvalidArgument(
                    f"The column {field.name!r} is declared {field.dataType.simpleString()}; in a row of the format"
                    f" cues it is {own[field.name].simpleString()}.",
                    f"option('rowColumns', 'false') if the message's own field {field.name!r} is meant.",
                )
        self._own = set(own)

    def arrow(self, batches: Sequence[Batch], start: int, stop: int) -> pa.RecordBatch:
        """The messages from ``start`` to ``stop`` (exclusive), as far as they lie in ``batches``."""
        parts = [
            (b, max(start, b.first) - b.first, min(stop, b.next) - b.first) for b in batches if not b.head.acknowledges
        ]
        if not parts:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        arrays: list[Any] = []
        messages: list[dict[str, Any]] | None = None
        indices = _joined([numpy.arange(b.first + low, b.first + high) for b, low, high in parts])
        for name in self.schema.names:
            if name in self._fields:
                if messages is None:
                    messages = list(chain.from_iterable(codec.unpack_known(b.body())[lo:hi] for b, lo, hi in parts))
                arrays.append(self._fields[name].array(messages, lambda offset: int(indices[offset])))
            else:
                arrays.append(_OWN[name](parts, indices))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


_Parts = list[tuple[Batch, int, int]]


def _joined(arrays: list[Any]) -> Any:
    return numpy.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _values(parts: _Parts, indices: Any) -> pa.Array:
    """Each message's bytes: the arrays' bodies side by side, and where each message begins."""
    bodies: list[memoryview] = []
    offsets: list[Any] = []
    at = 0
    for batch, low, high in parts:
        cuts = numpy.array(batch.cuts(), dtype=numpy.int32)
        body = batch.body()[cuts[low] : cuts[high]]
        offsets.append(cuts[low:high] + numpy.int32(at - cuts[low]))
        bodies.append(body)
        at += len(body)
    offsets.append(numpy.array([at], dtype=numpy.int32))
    data = pa.py_buffer(b"".join(bodies))
    return pa.Array.from_buffers(pa.binary(), len(indices), [None, pa.py_buffer(_joined(offsets)), data])


def _times(parts: _Parts, indices: Any) -> pa.Array:
    micros = [b.head.time_ns // 1000 for b, _, _ in parts]
    counts = [high - low for _, low, high in parts]
    return pa.array(numpy.repeat(numpy.array(micros, dtype=numpy.int64), counts)).cast(pa.timestamp("us", tz="UTC"))


def _hashes(parts: _Parts, indices: Any) -> pa.Array:
    found: list[str | None] = []
    for batch, low, high in parts:
        hash = batch.head.hash
        found += [None if hash is None else hash.hex()] * (high - low)
    return pa.array(found, pa.string())


_OWN: Final = {"index": lambda parts, indices: pa.array(indices), "time": _times, "hash": _hashes, "value": _values}


@dataclass
class IndexRange(InputPartition):
    """What one task reads: from ``start`` to ``stop``, exclusive."""

    start: int
    stop: int


class _Reading:
    """What batch and stream readers share; travels to the executors."""

    def __init__(self, schema: T.StructType, options: ReadOptions, parallelism: int) -> None:
        self.options = options
        self.pinned, first, next = pin(options.place)
        self._first, self._next = first, next
        self._parallelism = parallelism
        self._schema = schema
        Columns(schema, options)  # what cannot be read is refused here, not in a task

    def split(self, start: int, stop: int) -> list[InputPartition]:
        """Ranges of about the same size, in order."""
        count = stop - start
        wanted = self.options.partitions or min(self._parallelism, -(-count // _MESSAGES_A_TASK))
        pieces = max(1, min(wanted, count))
        edges = [start + count * piece // pieces for piece in range(pieces + 1)]
        return [IndexRange(low, high) for low, high in pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """On the executor: the range of one task."""
        assert isinstance(partition, IndexRange)
        columns = Columns(self._schema, self.options)
        with self.pinned.opened() as queue:
            for at, batches in self._batches(queue, partition.start, partition.stop):
                yield columns.arrow(batches, at, partition.stop)

    def _batches(self, queue: Queue, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
        """Record batches, and the index of the first message in them that is asked for and not purged."""
        at = start
        while at < stop:
            with queue.store.view() as txn:
                row = queue.log.row(txn)
                raws = queue.log.read(txn, row, at, stop - at, _READ_BYTES)
            if row.first > at:
                at = self.lost(at, min(row.first, stop))
            if not raws:
                if row.next < stop and at < stop:
                    raise Diverged(
                        f"The queue {queue.id} ends before {row.next}, and messages up to {stop - 1} were planned.",
                        f"cues check {self.options.place.store}: an older copy of it may have been put back.",
                        processor="",
                    )
                return
            batches = queue.log.batches(raws)
            yield at, batches
            at = batches[-1].next

    def lost(self, start: int, first: int) -> int:
        """The messages from ``start`` to ``first`` (exclusive) are gone; returns where to go on."""
        if self.options.fail_on_data_loss:
            place = self.options.place
            raise MessagesPurged(
                f"The messages {start} to {first - 1} of {place.store}#{place.queue} were purged before they were"
                " read.",
                "a longer retention, or option('failOnDataLoss', 'false') to go on with what is left.",
                queue=place.queue,
                first=start,
                last=first - 1,
            )
        return first

    def index_of(self, position: Position, name: str) -> int:
        """The index that a position means, now."""
        with self.pinned.opened() as queue, queue.store.view() as txn:
            row = queue.log.row(txn)
            if position == "earliest":
                return row.first
            if position == "latest":
                return row.next
            if isinstance(position, datetime):
                return queue.log.index_at(txn, row, clock.to_ns(position))
        if position > row.next:
            raise InvalidArgument(
                f"{name}={position}: the queue {self.options.place.queue!r} ends before {row.next}.",
                f"an index up to {row.next} (the next to be written).",
            )
        return max(position, self.lost(position, row.first)) if position < row.first else position


class QueueReader(_Reading, DataSourceReader):
    """A batch read: what was there when it was planned, from the starting to the ending position (exclusive)."""

    def __init__(self, schema: T.StructType, options: ReadOptions, parallelism: int) -> None:
        super().__init__(schema, options, parallelism)
        self.start = self.index_of(options.start, "startingPosition")
        self.end = self._next if options.end == "latest" else self.index_of(options.end, "endingPosition")

    def partitions(self) -> list[InputPartition]:
        return self.split(self.start, max(self.start, self.end))


class QueueStream(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream: batch after batch of what was appended."""

    def __init__(self, schema: T.StructType, options: ReadOptions, parallelism: int) -> None:
        super().__init__(schema, options, parallelism)
        self._target: int | None = None

    def initialOffset(self) -> dict[str, Any]:
        index = self._committed() or self.index_of(self.options.start, "startingPosition")
        return Offset(self.pinned.identity, index, index).to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self.options.messages_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._last()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        at = self._mine(start).end
        end = self._last() if self._target is None else self._target
        if isinstance(limit, ReadMaxRows):
            end = min(end, at + limit.max_rows)
        committed = self._committed()
        if committed is not None and at < committed:
            end = min(end, committed)  # what is written already is a batch of its own, to be skipped
        return start if end <= at else Offset(self.pinned.identity, at, end).to_dict()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        last = self._last()
        return Offset(self.pinned.identity, last, last).to_dict()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        before, asked = self._mine(start), self._mine(end)
        if before.end < asked.start and before.start != before.end:
            raise Diverged(
                f"Spark asks for the messages behind {before.end - 1} up to {asked.end - 1}, but that offset begins at"
                f" {asked.start}.",
                "a new checkpoint.",
                processor="",
            )
        # The range as it was frozen: what initialOffset says may have moved since.
        return self.split(asked.start, asked.end) if asked.end > asked.start else []

    def commit(self, end: dict[str, Any]) -> None:
        pass

    def stop(self) -> None:
        pass

    def _last(self) -> int:
        with self.pinned.opened() as queue:
            return queue.row().next

    def _mine(self, offset: dict[str, Any]) -> Offset:
        found = Offset.of(offset)
        if found is None or found.identity != self.pinned.identity:
            raise Diverged(
                f"The checkpoint stands on another source ({offset}) than the queue {self.options.place.queue!r} of"
                f" {self.options.place.store}, whose identity is {self.pinned.identity.hex()}.",
                "a new checkpoint, if this queue is meant.",
                processor="",
            )
        return found

    def _committed(self) -> int | None:
        """How far the writer of ``resumeFrom`` has brought this queue; None before its first commit."""
        if self.options.resume_from is None:
            return None
        path, writer = self.options.resume_from
        if not os.path.exists(os.path.join(path, "data.mdb")):
            return None  # its first commit makes the store
        with Store(path, readonly=True) as store, store.view() as txn:
            row = outside.read(txn, writer)
        if row is None or row.position[0] != "queues":
            return None
        return next((index for identity, index in row.position[1] if identity == self.pinned.identity), None)
