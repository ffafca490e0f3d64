"""DataFrames into queues, exactly once where the source's position is known.

    executor    rows → messages → pages (staging.py); no transaction is open
    driver      1. which part of its source is this (position.py, checkpoint.py)
                2. in one transaction of the store: read the writer's position; replayed: skip; not what
                   follows: refuse; else append all pages and move the position
                3. ring; delete what was staged

Position and messages change together, so whoever was killed between 2 and Spark's own commit log finds
the position moved and skips. The batch number is not part of it: that number begins again at 0 when a
checkpoint is lost, and a marker under it would swallow new data, or write everything twice.

Without an id nothing of this is kept: a batch write is one transaction (all of it or nothing) that a
second run repeats; a stream is at-least-once.

Not guaranteed: the order of rows. They are appended in the order of Spark's partitions, which is that of
the source as long as nothing shuffles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NoReturn

import msgpack
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from cues import batch, faults, outside
from cues.batch import Page
from cues.errors import CodecError, CuesError, InvalidArgument, PositionMismatch
from cues.outside import SourceRow
from cues.queue import Queue
from cues.spark import staging
from cues.spark.checkpoint import part_of
from cues.spark.columns import Encoder
from cues.spark.options import WriteOptions
from cues.spark.place import one_log
from cues.spark.position import Part, Range
from cues.spark.reading import ROW
from cues.spark.staging import Stage, Staged
from cues.store import Store

_RESERVED: Final = b"q/"


class _Writing:
    """What batch and stream writers share; travels to the executors."""

    def __init__(self, schema: T.StructType, options: WriteOptions, overwrite: bool) -> None:
        if overwrite:
            raise InvalidArgument("A queue is never overwritten.", "mode('append'), or a purge first.")
        self.options = options
        self._as_values = _as_values(schema, options)
        self._value_at = schema.fieldNames().index("value") if self._as_values else -1
        self._schema = schema
        if not self._as_values:
            Encoder(schema)  # what cannot be written is refused here, not in a task
        with Store(options.place.store) as store:
            queue = one_log(store, options.place)
            if "." in queue.id:
                queue.appender()  # refuses try logs
            kept = queue.options
        self._limit_bytes, self._strips = kept.max_message_bytes, kept.strips
        staging.sweep(options.place.store)
        self._stage = Stage(options.place.store)
        self._boot = staging.this_boot()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """On the executor: everything that does not need the store."""
        context = TaskContext.get()
        task = context.partitionId() if context is not None else 0
        return self._stage.collect(self._pages(iterator), self._boot == staging.this_boot(), task)

    def _pages(self, rows: Iterable[pa.RecordBatch]) -> Iterator[Page]:
        encoder = None if self._as_values else Encoder(self._schema)
        for some in rows:
            if encoder is None:
                yield from self._of_values(some.column(self._value_at).to_pylist())
            else:
                yield from batch.build(encoder.messages(some), self._limit_bytes, strips=self._strips)

    def _of_values(self, values: list[bytes | None]) -> Iterator[Page]:
        """Pages of messages that are encoded already; each is looked at, for a broken one would spoil its page."""
        messages = [_message(value) for value in values]
        if any(_RESERVED in value for value in values if value is not None):
            yield from batch.build(messages, self._limit_bytes, strips=self._strips)
        else:
            yield from batch.build((), self._limit_bytes, encoded=[value for value in values if value is not None])

    def append(self, staged: list[Staged], part: Part | None) -> None:
        """On the driver: the one commit. Raises :class:`PositionMismatch`; then nothing was written."""
        place = self.options.place
        with Store(place.store) as store:
            queue = one_log(store, place)
            values = sum(one.values for one in staged)
            faults.point("append.before")
            written = store.commit(self._append, queue, staged, part, pages=values + values // 64)
            faults.point("append.after")
            if written:
                store.ring(queue.log.mask)
        _drop(staged)

    def _append(self, txn: Any, queue: Queue, staged: list[Staged], part: Part | None) -> bool:
        id = self.options.id
        if id is not None and part is not None:
            row = outside.read(txn, id)
            kept = None if row is None else row.position
            verdict = part.decide(kept)
            if row is not None and row.queue != queue.log.id:
                verdict = "refuse"
            if verdict == "replayed":
                return False
            if verdict == "refuse" and not (kept is None and self.options.adopt):
                self._refuse(id, row, part)
        for one in staged:
            for pages in one.pages():
                queue.append_pages(txn, pages)
        if id is not None and part is not None:
            outside.put(txn, id, SourceRow(queue.log.id, queue.log.row(txn).next, part.position()))
        faults.point("append.inside")
        return True

    def _refuse(self, id: str, row: SourceRow | None, part: Part) -> NoReturn:
        where = f"{self.options.place.store}#{id}"
        if row is None:
            message = (
                f"The query is past its first batch, and {self.options.place.store} knows of no writer {id!r}: the"
                " store is another one, or the writer is new to this query."
            )
            hint = "a new checkpoint; or option('adopt', 'true') to begin with this batch."
        elif row.queue != self.options.place.queue:
            message = f"The writer {id!r} writes to the queue {row.queue!r}, not to {self.options.place.queue!r}."
            hint = "another id."
        else:
            message = (
                f"What was to be written does not follow what the writer {id!r} has written: found {part}, expected"
                f" what follows {row.position}. Nothing was written."
            )
            hint = (
                f"option('resumeFrom', {where!r}) on the readStream and a new checkpoint, or another id if this is"
                " another source."
            )
        raise PositionMismatch(message, hint, source=id, kept=None if row is None else row.position, found=str(part))


class BatchWriter(_Writing, DataSourceArrowWriter):
    """A batch write: one transaction, whatever its size."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        span = self.options.range
        self.append(_whole(messages), None if span is None else Range(*span))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _drop(messages)


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """A stream's batches, one transaction each."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        checkpoint = self.options.checkpoint
        known = self.options.id is not None and checkpoint is not None
        self.append(_whole(messages), part_of(checkpoint, batchId) if known and checkpoint else None)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _drop(messages)


def _whole(messages: list[WriterCommitMessage | None]) -> list[Staged]:
    """What every task made; one that is missing must not be passed over."""
    found = [message for message in messages if isinstance(message, Staged)]
    if len(found) != len(messages):
        raise CuesError(
            f"{len(messages) - len(found)} of {len(messages)} tasks sent no result; nothing was written.", "again."
        )
    return found


def _drop(messages: Iterable[WriterCommitMessage | None]) -> None:
    for message in messages:
        if isinstance(message, Staged):
            message.drop()


def _as_values(schema: T.StructType, options: WriteOptions) -> bool:
    """Whether the rows are messages in msgpack, rather than columns to be encoded."""
    kinds = {field.name: field.dataType for field in schema.fields}
    binary = kinds.get("value") == T.BinaryType()
    if options.encode == "columns" or (options.encode == "auto" and not binary):
        return False
    if not binary:
        raise InvalidArgument(
            f"encode=value needs a column 'value' of type binary; found {schema.simpleString()}.", "encode=columns."
        )
    others = sorted(set(kinds) - set(ROW.fieldNames()))
    if others and options.encode == "auto":
        raise InvalidArgument(
            f"The rows have a column 'value' of type binary, which is a message, and {', '.join(others)} beside it.",
            "select('value'); or option('encode', 'columns'), a message of all columns, or 'value', of that one.",
        )
    return True


def _message(value: bytes | None) -> dict[str, Any]:
    if value is None:
        raise InvalidArgument("A row's value is NULL.", "where('value is not null').")
    try:
        found = msgpack.unpackb(value, strict_map_key=False)
    except Exception as error:  # msgpack raises many kinds
        raise CodecError(
            f"A row's value ({len(value)} bytes) is not the msgpack of a message: {error}.",
            "the value that a cues source gave, or encode=columns.",
            path="",
            type_name="binary",
        ) from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"A row's value is the msgpack of a {type(found).__name__}, not of a dict.", "a dict.")
    return found
