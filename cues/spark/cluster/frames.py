"""A stage from DataFrame to DataFrame over files: the driver makes its plan, and executors carry it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pyarrow as pa

from cues import codec
from cues.graphs.processor import wants_process
from cues.queues.options import QueueOptions
from cues.records import batch as batches
from cues.spark.cluster.ledger import StepRange
from cues.spark.cluster.rows import RowSlice, TakenRow
from cues.spark.cluster.step import Stage
from cues.spark.cluster.tasks import MESSAGE, OUT, OUT_ARROW, StepResult, TaskResult
from cues.spark.columns import Column, Encoder, frame_encoder
from cues.spark.executor import is_of_spark
from cues.steps.failure import Failure, error_message, retry_event
from cues.steps.imperative import Imperative
from cues.steps.process import Process
from cues.steps.runner import Interrupted
from cues.steps.taking import Input, Slice, Taken


class _Range(Slice):
    """The range of a frame. The driver has its indices, but not its messages."""

    def __init__(self, entrance: Any, start: int, stop: int) -> None:
        super().__init__(cast(Input, entrance), start, [], [])
        self.stop = stop


def _decode(fields: Any, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add the declared fields to the rows, in ``mapInArrow``."""
    columns = [Column(field, strict=False) for field in fields]
    for rows in given:
        messages = [codec.unpack(value) for value in rows.column("value").to_pylist()]
        indices = rows.column("index")
        arrays = [column.array(messages, lambda offset: int(indices[offset].as_py())) for column in columns]
        yield pa.RecordBatch.from_arrays(
            [*rows.columns, *arrays], names=[*rows.schema.names, *(column.name for column in columns)]
        )


def encode(
    schema: Any,
    options: QueueOptions,
    offset: int,
    hash: str,
    meta: bytes | None,
    raw: bool,
    given: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Turn rows of a DataFrame into messages, in the order of its partitions, in ``mapInArrow``.

    ``raw``: the column ``value`` is the packed message.
    """
    from pyspark import TaskContext

    encoder = None if raw else Encoder(schema)
    context = TaskContext.get()
    ordinal = (context.partitionId() if context is not None else 0) << 40
    for rows in given:
        messages = encoder.messages(rows) if encoder else map(codec.unpack, rows.column("value").to_pylist())
        packed = [batches.pack_one(message, options.max_message_bytes, True) for message in messages]
        count = len(packed)
        columns: list[list[Any]] = [
            [MESSAGE] * count,
            [0] * count,
            [offset] * count,
            list(range(ordinal, ordinal + count)),
            [hash] * count,
            packed,
            [meta] * count,
        ]
        ordinal += count
        arrays = [pa.array(column, kind.type) for column, kind in zip(columns, OUT_ARROW)]
        yield pa.RecordBatch.from_arrays(arrays, schema=OUT_ARROW)


class FrameStage(Stage):
    """A stage whose function makes a plan."""

    def _run(self, taking: StepRange) -> StepResult:
        """Call the function with the messages of the step, and let executors carry out the plan that it returns."""
        node, driver = self.node, self.driver
        ((tailer, (low, high)),) = taking.ranges.items()
        (entrance,) = self.entrances()
        taken = Taken([_Range(entrance, low, high)], high - low)
        digest = self._hasher.digest(taken.ranges(0, high - low))
        taken.hash = digest
        imperative = Imperative(node.id, {}, {})
        process = Process(
            node, driver.system, self._hasher, self.ledger.now.epoch, driver.store_id, None, lambda: False, imperative
        )
        assert node.fn is not None
        came = RowSlice(entrance, [self._row(tailer, high - 1)], []).provenance_of(0)
        options = self.targets[0].options
        meta = came.encode() if came and not options._strips else None
        retry = node.options.retry
        for attempt in range(1, retry.attempts + 1):
            ran = StepResult(driver.scratch())
            place = driver.files.url_of(ran.folder)
            try:
                process._begin(taken)
                given = self._given(tailer, low, high)
                result = node.fn(given, process=process) if wants_process(node.fn) else node.fn(given)
                frame_encoder(node.id, result)  # rows that cannot be messages are refused here, not in a task
                encoding = result.schema, options, high - low - 1, digest.hex(), meta, False
                result.mapInArrow(lambda rows: encode(*encoding, rows), OUT).write.parquet(place)
                written = driver.session.read.schema(OUT).parquet(place).count()
                ran.answers = [TaskResult(0, high - low, {0: written} if written else {}, retries=attempt - 1)]
                return ran
            except Exception as error:
                if driver.closed:
                    raise Interrupted from error
                driver.files.delete(ran.folder)
                if is_of_spark(error):
                    raise  # no message failed
                if attempt == retry.attempts or not isinstance(error, retry.on):
                    return self._failed(taking, Failure(error, attempt), digest.hex(), came.encode() if came else None)
                wait_s = retry.wait_s(attempt)
                driver.emit(retry_event(node.id, attempt, retry.attempts, error, wait_s))
                if driver.pause(wait_s):
                    raise Interrupted from error
            finally:
                process._end()
        raise AssertionError

    def _given(self, tailer: str, low: int, high: int) -> Any:
        """The DataFrame for the call of a frame: index, time, hash, value, and the declared fields."""
        from pyspark.sql import types as T

        rows = self.read(self.inputs[tailer], low, high).select("index", "time", "hash", "value")
        if not self.node.options.fields:
            return rows
        fields: Any = T.StructType.fromDDL(self.node.options.fields)
        schema = T.StructType([*rows.schema.fields, *fields.fields])
        return rows.mapInArrow(lambda given: _decode(fields.fields, given), schema)

    def _row(self, tailer: str, index: int) -> TakenRow:
        rows = self.read(self.inputs[tailer], index, index + 1)
        (row,) = rows.selectExpr("index", "unix_micros(time) AS time", "hash", "value", "meta").collect()
        return TakenRow(
            0, row["index"], row["time"], row["hash"], bytes(row["value"]), row["meta"] and bytes(row["meta"])
        )

    def _failed(self, taking: StepRange, failure: Failure, hash: str, meta: bytes | None) -> StepResult:
        """The whole step as one error message. Without an error queue the processor stops."""
        node, driver = self.node, self.driver
        ((tailer, (low, high)),) = taking.ranges.items()
        ran = StepResult(driver.scratch())
        answer = TaskResult(0, high - low)
        ran.answers = [answer]
        if not node.errors:
            answer.stop = 0, failure
            return ran
        values = self.read(self.inputs[tailer], low, high).orderBy("index").select("value").collect()
        messages = {node.inputs[0].binding: [codec.unpack(bytes(row.value)) for row in values]}
        target = next(number for number, directory in enumerate(self.targets) if directory.queue == node.errors)
        value = codec.pack(error_message(node, messages, failure))
        columns = [[MESSAGE], [target], [0], [0], [hash], [value], [meta]]
        rows = pa.Table.from_arrays([pa.array(c, kind.type) for c, kind in zip(columns, OUT_ARROW)], schema=OUT_ARROW)
        driver.session.createDataFrame(rows).coalesce(1).write.parquet(driver.files.url_of(ran.folder))
        answer.written, answer.failed, answer.first = {target: 1}, high - low, failure
        return ran
