"""Queues as tables and streams: record batches of the log become record batches of Arrow.

    driver      reads the first and the next index of every partition in one transaction, and cuts the
                range into slices, one for each task (slices.py)
    executor    opens the store read-only, copies record batches out in short transactions, cuts the
                array of messages into values without decoding it, and gives Arrow the bytes without a change

A stream's offsets are parts of the queue (:class:`cues.spark.checkpoint.Offset`). Admission control is
``maxMessagesPerTrigger``. Of several partitions it takes the oldest messages first. Otherwise the messages of one
partition could move the watermark past messages of the others, and Spark would drop those. With ``resumeFrom`` the
stream starts at the position of that writer in its store. With an old checkpoint it starts before that position, and
one batch ends exactly there. So batches that were written are skipped as a whole. New partitions of a queue are read
from their start.

Not guaranteed: that retention waits for a query. Messages that were purged before they were read are an error, or
with ``failOnDataLoss=false`` are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

from cues import codec
from cues.base import clock
from cues.errors import Diverged, InvalidArgument, MessagesPurged
from cues.forwarding import external_writers
from cues.queues.store import Store
from cues.spark.checkpoint import Offset
from cues.spark.columns import Column
from cues.spark.options import Position, ReadOptions
from cues.spark.place import pin
from cues.spark.position import Indices, read_place, widened
from cues.spark.slices import BatchSlice, cut, edges, merged

if TYPE_CHECKING:
    from cues.queues.log import Log
    from cues.storage.transaction import StoreTransaction

ROW: Final = T.StructType(
    [
        T.StructField("index", T.LongType()),
        T.StructField("time", T.TimestampType()),
        T.StructField("hash", T.StringType()),
        T.StructField("value", T.BinaryType()),
    ]
)
"""A message as a row: index on its queue, append time, delivery hash of the step that wrote it (32 hex
digits, NULL if no step wrote it), and its msgpack, unchanged."""
_PARTITION: Final = T.StructField("partition", T.IntegerType())
"""The column after the index if the queue has several partitions. An index belongs to one of them."""
_READ_BYTES: Final = 1 << 20
"""Bytes of record batches that become one Arrow batch: some ten thousand small messages."""
_READ_BYTES_MIN: Final = 1 << 16
"""Least bytes of each of many partitions, whose record batches are in memory at the same time."""
_MESSAGES_A_TASK: Final = 20_000
"""A task with fewer messages costs more than it reads."""


def row_of(spread: bool) -> T.StructType:
    """The row of a queue. It has one more column if the queue is ``spread`` over several partitions."""
    return T.StructType([ROW["index"], _PARTITION, *ROW.fields[1:]]) if spread else ROW


class Columns:
    """The columns of a query, made from record batches."""

    def __init__(self, schema: T.StructType, options: ReadOptions, spread: bool = False) -> None:
        self.schema = to_arrow_schema(schema, timezone="UTC")
        own = {field.name: field.dataType for field in row_of(spread).fields} if options.row_columns else {}
        self._fields: dict[str, Column] = {}
        for field in schema.fields:
            if field.name not in own:
                self._fields[field.name] = Column(field, options.mode == "strict")
            elif field.dataType != own[field.name]:
                raise InvalidArgument(
                    f"The column {field.name!r} is declared {field.dataType.simpleString()}; in a row of the format"
                    f" cues it is {own[field.name].simpleString()}.",
                    f"set option('rowColumns', 'false') if the message's own field {field.name!r} is meant.",
                )
        self._own = set(own)

    def arrow(self, pieces: Sequence[BatchSlice]) -> pa.RecordBatch:
        """The messages of ``pieces``. There is at least one piece."""
        arrays: list[Any] = []
        messages: list[dict[str, Any]] | None = None
        indices = _joined([numpy.arange(b.first + low, b.first + high) for _, b, low, high in pieces])
        for name in self.schema.names:
            if name in self._fields:
                if messages is None:
                    some = (codec.unpack_known(b.body())[low:high] for _, b, low, high in pieces)
                    messages = list(chain.from_iterable(some))
                arrays.append(self._fields[name].array(messages, lambda offset: int(indices[offset])))
            else:
                arrays.append(_OWN[name](pieces, indices))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _joined(arrays: list[Any]) -> Any:
    return numpy.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _partitions(pieces: Sequence[BatchSlice], indices: Any) -> pa.Array:
    numbers = numpy.array([piece.partition for piece in pieces], dtype=numpy.int32)
    return pa.array(numpy.repeat(numbers, [piece.high - piece.low for piece in pieces]))


def _values(pieces: Sequence[BatchSlice], indices: Any) -> pa.Array:
    """The bytes of each message: the bodies of all arrays in one buffer, and the offset of each message."""
    bodies: list[memoryview] = []
    offsets: list[Any] = []
    at = 0
    for _, batch, low, high in pieces:
        cuts = numpy.array(batch.cuts(), dtype=numpy.int32)
        body = batch.body()[cuts[low] : cuts[high]]
        offsets.append(cuts[low:high] + numpy.int32(at - cuts[low]))
        bodies.append(body)
        at += len(body)
    offsets.append(numpy.array([at], dtype=numpy.int32))
    data = pa.py_buffer(b"".join(bodies))
    return pa.Array.from_buffers(pa.binary(), len(indices), [None, pa.py_buffer(_joined(offsets)), data])


def _times(pieces: Sequence[BatchSlice], indices: Any) -> pa.Array:
    micros = [piece.batch.head.time_ns // 1000 for piece in pieces]
    counts = [piece.high - piece.low for piece in pieces]
    return pa.array(numpy.repeat(numpy.array(micros, dtype=numpy.int64), counts)).cast(pa.timestamp("us", tz="UTC"))


def _hashes(pieces: Sequence[BatchSlice], indices: Any) -> pa.Array:
    hashes: list[str | None] = []
    for _, batch, low, high in pieces:
        hash = batch.head.hash
        hashes += [None if hash is None else hash.hex()] * (high - low)
    return pa.array(hashes, pa.string())


_OWN: Final = {
    "index": lambda pieces, indices: pa.array(indices),
    "partition": _partitions,
    "time": _times,
    "hash": _hashes,
    "value": _values,
}


@dataclass
class ReadSlice(InputPartition):
    """The range that one task reads: from ``start`` to ``stop``, exclusive, on each partition."""

    start: Indices
    stop: Indices


class _Reading:
    """The common part of batch and stream readers. It is sent to the executors."""

    def __init__(self, schema: T.StructType, options: ReadOptions, parallelism: int) -> None:
        self.options = options
        self.pinned, self._next = pin(options.place)
        self._parallelism = parallelism
        self._schema = schema
        Columns(schema, options, self.pinned.spread)  # columns that cannot be read are refused here, not in a task

    def split(self, start: Indices, stop: Indices) -> list[InputPartition]:
        """Cut the range into slices of about the same size, in order."""
        count = sum(stop) - sum(start)
        wanted = self.options.partitions or min(self._parallelism, -(-count // _MESSAGES_A_TASK))
        slices = max(1, min(wanted, count))
        if slices == 1:
            return [ReadSlice(start, stop)]
        with self._logs() as (logs, txn):
            return [ReadSlice(low, high) for low, high in pairwise(edges(txn, logs, start, stop, slices))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """On the executor: read the slice of one task."""
        assert isinstance(partition, ReadSlice)
        columns = Columns(self._schema, self.options, self.pinned.spread)
        with self.pinned.opened() as queue:
            logs = [view._log for view in queue._views]
            count = len(partition.stop)
            if len(logs) < count:
                raise self._behind(f"The queue {queue.id} has {len(logs)} partitions, and {count} were planned.")
            logs = logs[:count]
            size = max(_READ_BYTES // len(logs), _READ_BYTES_MIN)
            ranges = zip(logs, partition.start, partition.stop)
            for pieces in _some(merged([self._pieces(log, start, stop, size) for log, start, stop in ranges])):
                yield columns.arrow(pieces)

    @contextmanager
    def _logs(self) -> Iterator[tuple[list[Log], StoreTransaction]]:
        """The logs of the partitions, in a read transaction."""
        with self.pinned.opened() as queue:
            logs = [view._log for view in queue._views]
            with queue.store._view() as txn:
                yield logs, txn

    def _pieces(self, log: Log, start: int, stop: int, size: int) -> Iterator[BatchSlice]:
        """The messages of the range on one partition, in order, read ``size`` bytes at a time."""
        at = start
        while at < stop:
            with log.store._view() as txn:
                row = log.row(txn)
                raws = log.read(txn, row, at, stop - at, size)
            if row.first > at:
                at = self.lost(at, min(row.first, stop), log.partition)
            if not raws:
                if row.next < stop and at < stop:
                    raise self._behind(
                        f"The queue {log.id} ends before {row.next}, and messages up to {stop - 1} were planned."
                    )
                return
            for batch in log.batches(raws):
                if not batch.head.acknowledges:
                    yield BatchSlice(
                        log.partition, batch, max(at, batch.first) - batch.first, min(stop, batch.next) - batch.first
                    )
                at = batch.next

    def _behind(self, text: str) -> Diverged:
        return Diverged(text, f"run cues check {self.options.place.store}: an older copy of it may have been put back.")

    def lost(self, start: int, first: int, partition: int) -> int:
        """Handle that the messages from ``start`` to ``first`` (exclusive) are purged. Return the next index."""
        if self.options.fail_on_data_loss:
            place = self.options.place
            of = f", partition {partition}," if self.pinned.spread else ""
            raise MessagesPurged(
                f"The messages {start} to {first - 1} of {place.store}#{place.queue}{of} were purged before they were"
                " read.",
                "set a longer retention, or option('failOnDataLoss', 'false') to continue with the messages that are"
                " left.",
                queue=place.queue,
                first=start,
                last=first - 1,
            )
        return first

    def place_of(self, position: Position, name: str) -> Indices:
        """The place that a position means at this moment."""
        with self._logs() as (logs, txn):
            rows = [log.row(txn) for log in logs]
            if position == "earliest":
                return tuple(row.first for row in rows)
            if position == "latest":
                return tuple(row.next for row in rows)
            if isinstance(position, datetime):
                when = clock.to_ns(position)
                return tuple(log.index_at(txn, row, when) for log, row in zip(logs, rows))
        if len(rows) > 1:
            place = self.options.place
            raise InvalidArgument(
                f"{name}={position}: each of the {len(rows)} partitions of {place.queue!r} has indices of its own.",
                f"use earliest, latest or a time (a stream that has a checkpoint needs none); or read one partition"
                f" on its own, '{place.store}#{place.queue}/0' to '…/{len(rows) - 1}'.",
            )
        (row,) = rows
        if position > row.next:
            raise InvalidArgument(
                f"{name}={position}: the queue {self.options.place.queue!r} ends before {row.next}.",
                f"use an index up to {row.next} (the next to be written).",
            )
        return (max(position, self.lost(position, row.first, 0)) if position < row.first else position,)


def _some(pieces: Iterator[BatchSlice]) -> Iterator[list[BatchSlice]]:
    """The pieces, in groups that become one Arrow batch."""
    some: list[BatchSlice] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += len(piece.batch.body())
        if size >= _READ_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


class QueueReader(_Reading, DataSourceReader):
    """A batch read of the messages at the time of its plan, from the starting to the ending position (exclusive)."""

    def __init__(self, schema: T.StructType, options: ReadOptions, parallelism: int) -> None:
        super().__init__(schema, options, parallelism)
        self.start = self.place_of(options.start, "startingPosition")
        self.end = self._next if options.end == "latest" else self.place_of(options.end, "endingPosition")

    def partitions(self) -> list[InputPartition]:
        count = max(len(self.start), len(self.end))  # it may have grown between the two
        start, end = widened(self.start, count), widened(self.end, count)
        return self.split(start, tuple(map(max, start, end)))


class QueueStream(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream: batch after batch of the messages that are appended."""

    def __init__(self, schema: T.StructType, options: ReadOptions, parallelism: int) -> None:
        super().__init__(schema, options, parallelism)
        self._target: Indices | None = None

    def initialOffset(self) -> dict[str, Any]:
        place = self._committed() or self.place_of(self.options.start, "startingPosition")
        return Offset(self.pinned.identity, place, place).to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self.options.messages_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._last()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        at = self._mine(start).end
        end = self._last() if self._target is None else self._target
        if len(at) > len(end):
            place = self.options.place
            raise Diverged(
                f"The checkpoint has offsets of {len(at)} partitions of {place.queue!r}, which has {len(end)}.",
                f"read the whole queue, if this is one of its partitions; or run cues check {place.store}: an older"
                " copy of it may have been put back.",
            )
        at = widened(at, len(end))
        committed = self._committed()
        if committed is not None and any(map(int.__lt__, at, committed)):
            # Messages that were written already get batches of their own, and these batches are skipped.
            committed = widened(committed, len(end))
            end = tuple(map(min, end, committed))
        end = tuple(map(max, at, end))
        if isinstance(limit, ReadMaxRows) and sum(end) - sum(at) > limit.max_rows:
            with self._logs() as (logs, txn):
                end = cut(txn, logs, at, end, limit.max_rows)
        return start if end == at else Offset(self.pinned.identity, at, end).to_dict()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        last = self._last()
        return Offset(self.pinned.identity, last, last).to_dict()

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
        with self.pinned.opened() as queue:
            return tuple(row.next for row in queue._rows())

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
        with Store(path, readonly=True) as store, store._view() as txn:
            row = external_writers.read(txn, writer)
        if row is None or row.position[0] != "queues":
            return None
        places = (read_place(place) for identity, place in row.position[1] if identity == self.pinned.identity)
        return next(places, None)
