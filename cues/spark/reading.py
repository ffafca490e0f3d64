"""Queues as tables: the messages of a store, or of a shared directory, become record batches of Arrow.

    driver      finds the first and the next index of every partition, and cuts the range into slices, one for
                each task
    executor    of a store: opens it read-only, copies record batches out in short transactions, cuts the
                array of messages into values without decoding it, and gives Arrow the bytes without a change
                of a directory: reads pieces of files, which the driver has planned (cluster/shared.py)

Readers do not implement ``pushFilters``. Spark 4.3 keeps the plan of the last query with a filter on a loaded table,
and reads other queries on that table by the same plan. So a reader that leaves out messages because of a filter changes
the results of queries without this filter.

Not guaranteed: that retention waits for a query. Messages that were purged before they were read are an error, or
with ``failOnDataLoss=false`` are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from cues.base import clock
from cues.base.data import dataclass
from cues.errors import InvalidArgument, MessagesPurged
from cues.overrides import override
from cues.queues.committed import Isolation
from cues.spark.columns import Column
from cues.spark.installed import times_in_utc
from cues.spark.options import Position, QueueAddress, ReadOptions
from cues.spark.place import MessageRows, ReadableQueue, message_first, pin
from cues.spark.position import Indices, widened

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
_MESSAGES_A_TASK: Final = 20_000
"""A task with fewer messages costs more than it reads."""


def row_of(spread: bool) -> T.StructType:
    """The row of a queue. It has one more column if the queue is ``spread`` over several partitions."""
    return T.StructType([ROW["index"], _PARTITION, *ROW.fields[1:]]) if spread else ROW


class Columns:
    """The columns of a query, made from record batches."""

    def __init__(self, schema: T.StructType, options: ReadOptions, spread: bool = False) -> None:
        self.schema = to_arrow_schema(schema, **times_in_utc())
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

    def arrow(self, rows: MessageRows) -> pa.RecordBatch:
        """The messages of ``rows``."""
        arrays: list[Any] = []
        messages: list[dict[str, Any]] | None = None
        indices = rows.indices
        for name in self.schema.names:
            if name in self._fields:
                field = self._fields[name]
                stored = rows.typed(name, field.type)
                if stored is None or not field.fits(stored):
                    if messages is None:
                        messages = rows.messages()
                    stored = field.array(messages, lambda offset: int(indices[offset]))
                arrays.append(stored)
            else:
                arrays.append(pa.array(indices) if name == "index" else rows.column(name))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


@dataclass
class ReadSlice(InputPartition):
    """The range that one task reads: from ``start`` to ``stop``, exclusive, on each partition."""

    start: Indices
    stop: Indices
    plan: Any = None
    """The part of the plan that only the queue understands."""


def find(place: QueueAddress, isolation: Isolation = "uncommitted") -> tuple[ReadableQueue, Indices]:
    """Find a queue, on the driver. Also return the next index of each partition, at one moment."""
    if place.shared:
        from cues.spark.cluster.shared import SharedQueue

        queue = SharedQueue(place)
        return queue, queue.ends()[1]
    return pin(place, isolation)


class Reading:
    """The common part of batch and stream readers. It is sent to the executors."""

    def __init__(self, schema: T.StructType, options: ReadOptions, parallelism: int) -> None:
        self.options = options
        self.pinned, self._next = find(options.place, options.isolation)
        self._parallelism = parallelism
        self._schema = schema
        Columns(schema, options, self.pinned.spread)  # columns that cannot be read are refused here, not in a task

    def split(self, start: Indices, stop: Indices) -> list[InputPartition]:
        """Cut the range into slices of about the same size, in order."""
        count = sum(stop) - sum(start)
        wanted = self.options.partitions or min(self._parallelism, -(-count // _MESSAGES_A_TASK))
        slices = max(1, min(wanted, count))
        edges = [start, stop] if slices == 1 else self.pinned.edges(start, stop, slices)
        return [ReadSlice(low, high, self.pinned.plan(low, high, self.lost)) for low, high in pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """On the executor: read the slice of one task."""
        assert isinstance(partition, ReadSlice)
        columns = Columns(self._schema, self.options, self.pinned.spread)
        start, stop, plan = partition.start, partition.stop, partition.plan
        with message_first():
            for rows in self.pinned.rows(start, stop, plan, self.lost):
                yield columns.arrow(rows)

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
        if isinstance(position, datetime):
            return self.pinned.index_at(clock.to_ns(position))
        firsts, nexts = self.pinned.ends()
        if position == "earliest":
            return firsts
        if position == "latest":
            return nexts
        if len(nexts) > 1:
            place = self.options.place
            raise InvalidArgument(
                f"{name}={position}: each of the {len(nexts)} partitions of {place.queue!r} has indices of its own.",
                f"use earliest, latest or a time (a stream that has a checkpoint needs none); or read one partition"
                f" on its own, '{place.store}#{place.queue}/0' to '…/{len(nexts) - 1}'.",
            )
        (first,), (next,) = firsts, nexts
        if position > next:
            raise InvalidArgument(
                f"{name}={position}: the queue {self.options.place.queue!r} ends before {next}.",
                f"use an index up to {next} (the next to be written).",
            )
        return (max(position, self.lost(position, first, 0)) if position < first else position,)


class QueueReader(Reading, DataSourceReader):
    """A batch read of the messages at the time of its plan, from the starting to the ending position (exclusive)."""

    def __init__(self, schema: T.StructType, options: ReadOptions, parallelism: int) -> None:
        super().__init__(schema, options, parallelism)
        self.start = self.place_of(options.start, "startingPosition")
        self.end = self._next if options.end == "latest" else self.place_of(options.end, "endingPosition")

    @override
    @message_first()
    def partitions(self) -> list[InputPartition]:
        count = max(len(self.start), len(self.end))  # it may have grown between the two
        start, end = widened(self.start, count), widened(self.end, count)
        return self.split(start, tuple(map(max, start, end)))
