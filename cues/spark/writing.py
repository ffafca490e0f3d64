"""DataFrames into queues, exactly once if the position of the source is known.

    executor    rows → messages → partitions → pages (staging.py); no transaction is open
    driver      1. find the range of its source that the write covers (position.py, checkpoint.py)
                2. in one transaction of the store: read the writer's position; skip a range that was written;
                   refuse a range that does not follow; else append all pages, to all partitions, and move the
                   position
                3. ring; delete the staged pages

Position and messages change together. So a writer that was killed between 2 and Spark's own commit log finds
the position moved, and skips the range. The batch number is not used: it begins again at 0 when a
checkpoint is lost. A marker with the batch number would lose new data, or write all data twice.

Without an id no position is kept. A batch write is one transaction (all or nothing) that a
second run repeats. A stream is at-least-once.

Not guaranteed: the order of rows. They are appended in the order of Spark's tasks, on each partition of the queue. It
is the order of the source if nothing shuffles the rows.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final, NoReturn

import msgpack
import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from cues import codec, faults
from cues.errors import CodecError, CuesError, InvalidArgument, PositionMismatch, QueueOptionsError, Unsupported
from cues.forwarding import external_writers
from cues.forwarding.external_writers import SourceRow
from cues.overrides import override
from cues.queues import backpressure
from cues.queues.base import Placer, views_of
from cues.queues.options import FUNCTIONS, QueueOptions
from cues.queues.partitioners import PARTITIONS_MAX, Missing
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.records import batch
from cues.records.packed import packed_rows
from cues.spark import staging
from cues.spark.columns import Encoder
from cues.spark.options import WriteOptions
from cues.spark.position import Range, SourceRange, write_place
from cues.spark.reading import ROW
from cues.spark.staging import PlacedPage, Staged, StagingArea
from cues.storage.transaction import StoreTransaction

_RESERVED: Final = b"q/"
_ARRAY: Final = struct.Struct(">BI")
"""The head of a msgpack array of up to 2³² items."""


class Writing:
    """The common part of batch and stream writers. It is sent to the executors."""

    def __init__(self, schema: T.StructType, options: WriteOptions, overwrite: bool) -> None:
        if overwrite:
            raise InvalidArgument("A queue is never overwritten.", "use mode('append'), or purge the queue first.")
        self.options = options
        self._as_values = _as_values(schema, options)
        self._value_at = schema.fieldNames().index("value") if self._as_values else -1
        self._schema = schema
        if not self._as_values:
            Encoder(schema)  # columns that cannot be written are refused here, not in a task
        with Store(options.place.store) as store:
            queue = store.queue(options.place.queue)
            if "." in queue.id:
                queue.appender()  # refuses try logs
            self._queue_options, self._spread = queue.options, queue.is_partitioned
        if self._spread:
            _check_placing(options.place.queue, self._queue_options)
        staging.sweep(options.place.store)
        # Spark started this process on the driver's machine. The owner of the area is the parent process.
        self._stage = StagingArea(options.place.store, os.getppid())
        self._boot = staging.this_boot()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """On the executor: do all work that does not need the store."""
        return self._stage.collect(self._pages(iterator), self._boot == staging.this_boot())

    def _pages(self, rows: Iterable[pa.RecordBatch]) -> Iterator[PlacedPage]:
        encoder = None if self._as_values else Encoder(self._schema)
        # Turns begin at a random partition. Otherwise every small batch would begin at the same one.
        spread = Placer(self._queue_options, secrets.randbelow(PARTITIONS_MAX)) if self._spread else None
        for some in rows:
            if encoder is None:
                messages, encoded = self._of_values(some.column(self._value_at).to_pylist())
            else:
                table = encoder.table(some) if spread is None else None
                encoded = None if table is None else packed_rows(table)
                messages = encoder.messages(some) if encoded is None else []  # only the bytes are written
            if spread is None:
                yield from ((0, page) for page in self._built(messages, encoded))
                continue
            if encoded is not None:
                messages = [codec.unpack_known(value) for value in encoded]  # keys of all types
            for partition, offsets in spread.shares(self._queue_options, messages):
                bodies = None if encoded is None else [encoded[offset] for offset in offsets]
                chosen = [messages[offset] for offset in offsets]
                yield from ((partition, page) for page in self._built(chosen, bodies))

    def _built(self, messages: list[dict[str, Any]], encoded: list[bytes] | None) -> list[batch.Page]:
        options = self._queue_options
        return batch.build(messages, options.max_message_bytes, encoded=encoded, strips=options.strips)

    def _of_values(self, values: list[bytes | None]) -> tuple[list[dict[str, Any]], list[bytes] | None]:
        """Messages that are encoded already, and their bytes. None instead of the bytes if a message has reserved keys.

        Each message is checked, because a broken one would damage its page.
        """
        encoded = [value for value in values if value is not None]
        body = _ARRAY.pack(0xDD, len(encoded)) + b"".join(encoded)
        messages = together(body, encoded) if len(encoded) == len(values) else None
        if messages is None:
            messages = [_message(value) for value in values]  # the broken one raises
        return messages, None if _RESERVED in body else encoded

    def abort(self, messages: list[WriterCommitMessage | None], *batch: int) -> None:
        _drop(messages)

    def append(self, staged: list[Staged], covered: SourceRange | None) -> None:
        """On the driver: make the one commit. Raises :class:`PositionMismatch`; then nothing was written."""
        place = self.options.place
        with Store(place.store) as store:
            queue = store.queue(place.queue)
            views = views_of(queue)  # opened inside the transaction, a log would wait for its end
            values = sum(output.values for output in staged)
            backpressure.await_room([queue])
            faults.point("append.before")
            written = store.core.commit(self._append, queue, views, staged, covered, pages=values + values // 64)
            faults.point("append.after")
            if written:
                mask = 0
                for view in views:
                    mask |= view.core.log.mask
                store.core.ring(mask)
        _drop(staged)

    def _append(
        self, txn: StoreTransaction, queue: Queue, views: list[Queue], staged: list[Staged], covered: SourceRange | None
    ) -> bool:
        id = self.options.id
        self._require_partitions(txn, queue)
        if id is not None and covered is not None:
            row = external_writers.read(txn, id)
            kept = None if row is None else row.position
            verdict = covered.decide(kept)
            if row is not None and row.queue != queue.core.log.id:
                verdict = "refuse"
            if verdict == "replayed":
                return False
            if verdict == "refuse" and not (kept is None and self.options.adopt):
                self._refuse(id, row, covered, queue)
        for output in staged:
            for partition, pages in output.pages():
                views[partition].core.append_pages(txn, pages)
        if id is not None and covered is not None:
            next = write_place(tuple(view.core.log.row(txn).next for view in views))
            external_writers.put(txn, id, SourceRow(queue.core.log.id, next, covered.position()))
        faults.point("append.inside")
        return True

    def _require_partitions(self, txn: StoreTransaction, queue: Queue) -> None:
        """Refuse rows that were placed on fewer partitions than there are now: a key would be on two partitions."""
        now, placed = queue.core.follow_options(txn, queue.core.log.row(txn)).partitions, self._queue_options.partitions
        if queue.is_partitioned and now != placed:
            raise QueueOptionsError(
                f"The queue {queue.id!r} has {now} partitions by now, and the rows were placed on {placed}; nothing"
                " was written.",
                "write again, or start the query again: rows are placed on the partitions that exist then.",
                queue=queue.id,
                option="partitions",
            )

    def _refuse(self, id: str, row: SourceRow | None, covered: SourceRange, queue: Queue) -> NoReturn:
        where = f"{self.options.place.store}#{id}"
        if row is None:
            message = (
                f"The query is past its first batch, and {self.options.place.store} knows of no writer {id!r}: the"
                " store is another one, or the writer is new to this query."
            )
            hint = "use a new checkpoint, or option('adopt', 'true') to begin with this batch."
        elif row.queue != queue.core.log.id:
            message = f"The writer {id!r} writes to the queue {row.queue!r}, not to {queue.core.log.id!r}."
            hint = "use another id."
        else:
            message = (
                f"The batch does not follow what the writer {id!r} has written: found {covered}, expected"
                f" messages after {row.position}. Nothing was written."
            )
            hint = (
                f"set option('resumeFrom', {where!r}) on the readStream and use a new checkpoint, or use another id if"
                " this is another source."
            )
        raise PositionMismatch(message, hint, source=id, kept=None if row is None else row.position, found=str(covered))


class BatchWriter(Writing, DataSourceArrowWriter):
    """A batch write: one transaction of any size."""

    @override
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        span = self.options.range
        self.append(whole(messages), None if span is None else Range(*span))


def _check_placing(queue: str, options: QueueOptions) -> None:
    for name, way in zip(FUNCTIONS, (options.key, options.partitioner)):
        if isinstance(way, Missing):
            raise Unsupported(
                f"The queue {queue!r} places its messages by {name}={way.name}, a function: its code is neither in"
                " the store nor with Spark's executors.",
                f"give the queue a {name} by name, or write to each partition ({queue}/0, …) on its own.",
            )


def whole(messages: list[WriterCommitMessage | None]) -> list[Staged]:
    """The results of all tasks. Raises :class:`CuesError` if one is missing."""
    staged = [message for message in messages if isinstance(message, Staged)]
    if len(staged) != len(messages):
        raise CuesError(
            f"{len(messages) - len(staged)} of {len(messages)} tasks sent no result; nothing was written.",
            "write again.",
        )
    return staged


def _drop(messages: Iterable[WriterCommitMessage | None]) -> None:
    for message in messages:
        if isinstance(message, Staged):
            message.drop()


def _as_values(schema: T.StructType, options: WriteOptions) -> bool:
    """Return True if the rows are messages in msgpack, and False if they are columns to encode."""
    kinds = {field.name: field.dataType for field in schema.fields}
    binary = kinds.get("value") == T.BinaryType()
    if options.encode == "columns" or (options.encode == "auto" and not binary):
        return False
    if not binary:
        raise InvalidArgument(
            f"encode=value needs a column 'value' of type binary; found {schema.simpleString()}.",
            "write with encode=columns.",
        )
    others = sorted(set(kinds) - set(ROW.fieldNames()))
    if others and options.encode == "auto":
        raise InvalidArgument(
            f"The rows have a column 'value' of type binary, which is a message, and also {', '.join(others)}.",
            "call select('value'); or set option('encode', ...) to 'columns', a message of all columns, or to 'value'.",
        )
    return True


def together(body: bytes, values: list[bytes]) -> list[dict[str, Any]] | None:
    """The messages of ``values``, which are one array in ``body``; None if one of them is not a message.

    Decoding them together is twice as fast. Two broken values may be whole ones together, so the end of each
    value is checked too.
    """
    walker = msgpack.Unpacker(max_buffer_size=0)
    walker.feed(body)
    try:
        messages: list[Any] = msgpack.unpackb(body, strict_map_key=False)
        walker.read_array_header()
        at = _ARRAY.size
        for value in values:
            walker.skip()
            at += len(value)
            if walker.tell() != at:
                return None
    except Exception:  # msgpack raises many kinds
        return None
    return messages if set(map(type, messages)) <= {dict} else None


def _message(value: bytes | None) -> dict[str, Any]:
    if value is None:
        raise InvalidArgument("A row's value is NULL.", "filter the rows with where('value is not null').")
    try:
        message = msgpack.unpackb(value, strict_map_key=False)
    except Exception as error:  # msgpack raises many kinds
        raise CodecError(
            f"A row's value ({len(value)} bytes) is not the msgpack of a message: {error}.",
            "write the value that a cues source gave, or write with encode=columns.",
            path="",
            type_name="binary",
        ) from None
    if not isinstance(message, dict):
        raise InvalidArgument(
            f"A row's value is the msgpack of a {type(message).__name__}, not of a dict.", "make each message a dict."
        )
    return message
