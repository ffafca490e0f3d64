"""A stage from DataFrame to DataFrame over files: the driver makes its plan, and executors carry it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

import pyarrow as pa

from cues import codec
from cues.errors import ReturnError
from cues.graphs.processor import wants_process
from cues.queues.options import QueueOptions
from cues.records import batch as batches
from cues.spark.cluster.ledger import StepRange
from cues.spark.cluster.rows import RowSlice, TakenRow
from cues.spark.cluster.tasks import MESSAGE, OUT, OUT_ARROW, StepResult, TaskResult
from cues.spark.columns import Column, Encoder
from cues.spark.executor import is_of_spark
from cues.steps.failure import Failure, error_message, retry_event
from cues.steps.hashes import Hasher
from cues.steps.imperative import Imperative
from cues.steps.process import Process
from cues.steps.runner import Interrupted
from cues.steps.taking import Input, Slice, Taken

if TYPE_CHECKING:
    from cues.graphs.processor import Node
    from cues.spark.cluster.directory import QueueDirectory
    from cues.spark.cluster.driver import Driver
    from cues.spark.cluster.ledger import Ledger


class FrameStage(Protocol):
    """The attributes of a stage (:class:`cues.spark.cluster.step.Stage`) that a frame uses."""

    node: Node
    driver: Driver
    ledger: Ledger
    inputs: dict[str, QueueDirectory]
    targets: list[QueueDirectory]

    def entrances(self) -> Any: ...

    def read(self, directory: QueueDirectory, low: int, high: int) -> Any: ...


class _Range(Slice):
    """The range of a frame. The driver has its indices, but not its messages."""

    def __init__(self, entrance: Any, start: int, stop: int) -> None:
        super().__init__(cast(Input, entrance), start, [], [])
        self.stop = stop


class _Decode:
    """The function of ``mapInArrow`` that adds the declared fields to the rows."""

    def __init__(self, fields: Any) -> None:
        self.fields = fields

    def __call__(self, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        columns = [Column(field, strict=False) for field in self.fields]
        for rows in given:
            messages = [codec.unpack(value) for value in rows.column("value").to_pylist()]
            indices = rows.column("index")
            arrays = [column.array(messages, lambda offset: int(indices[offset].as_py())) for column in columns]
            yield pa.RecordBatch.from_arrays(
                [*rows.columns, *arrays], names=[*rows.schema.names, *(column.name for column in columns)]
            )


class Encode:
    """The function of ``mapInArrow`` that turns rows of a DataFrame into messages, in the order of its partitions."""

    def __init__(
        self, schema: Any, options: QueueOptions, offset: int, hash: str, meta: bytes | None, raw: bool = False
    ) -> None:
        """``raw``: the column ``value`` is the packed message."""
        self.raw = raw
        self.schema = schema
        self.options = options
        self.offset = offset
        self.hash = hash
        self.meta = meta

    def __call__(self, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        encoder = None if self.raw else Encoder(self.schema)
        context = TaskContext.get()
        ordinal = (context.partitionId() if context is not None else 0) << 40
        for rows in given:
            messages = encoder.messages(rows) if encoder else map(codec.unpack, rows.column("value").to_pylist())
            packed = [batches.pack_one(message, self.options.max_message_bytes, True) for message in messages]
            count = len(packed)
            columns: list[list[Any]] = [
                [MESSAGE] * count,
                [0] * count,
                [self.offset] * count,
                list(range(ordinal, ordinal + count)),
                [self.hash] * count,
                packed,
                [self.meta] * count,
            ]
            ordinal += count
            arrays = [pa.array(column, kind.type) for column, kind in zip(columns, OUT_ARROW)]
            yield pa.RecordBatch.from_arrays(arrays, schema=OUT_ARROW)


def run_frame(stage: FrameStage, taking: StepRange) -> StepResult:
    """Call the function with the messages of the step, and let executors carry out the plan that it returns."""
    node, driver = stage.node, stage.driver
    ((tailer, (low, high)),) = taking.ranges.items()
    (entrance,) = stage.entrances()
    hasher = Hasher(node.id, 0)
    taken = Taken([_Range(entrance, low, high)], high - low)
    digest = hasher.digest(taken.ranges(0, high - low))
    taken.hash = digest
    epoch = stage.ledger.last.epoch if stage.ledger.last else 0
    process = Process(
        node, driver.system, hasher, epoch, driver.store_id, None, lambda: False, Imperative(node.id, {}, {})
    )
    assert node.fn is not None
    last = _row(stage, tailer, high - 1)
    came = RowSlice(entrance, [last], []).provenance_of(0)
    options = stage.targets[0].options
    meta = came.encode() if came and not options._strips else None
    retry = node.options.retry
    for attempt in range(1, retry.attempts + 1):
        ran = StepResult(driver.scratch())
        place = driver.files.url_of(ran.folder)
        try:
            process._begin(taken)
            given = _given(stage, tailer, low, high)
            result = node.fn(given, process=process) if wants_process(node.fn) else node.fn(given)
            if not hasattr(result, "mapInArrow"):
                raise ReturnError(
                    f"{node.id} returned {type(result).__name__}; a frame returns a DataFrame.", "return the DataFrame."
                )
            encode = Encode(result.schema, options, high - low - 1, digest.hex(), meta)
            Encoder(result.schema)  # rows that cannot be messages are refused here, not in a task
            result.mapInArrow(lambda rows: encode(rows), OUT).write.parquet(place)
            written = driver.session.read.schema(OUT).parquet(place).count()
            ran.answers = [TaskResult(0, high - low, {0: written} if written else {}, retries=attempt - 1)]
            return ran
        except Exception as error:
            if driver.closed:
                raise Interrupted from error
            driver.files.delete(ran.folder)
            if is_of_spark(error):
                raise  # no message failed
            if attempt < retry.attempts and isinstance(error, retry.on):
                wait_s = retry.wait_s(attempt)
                driver.emit(retry_event(node.id, attempt, retry.attempts, error, wait_s))
                if driver.pause(wait_s):
                    raise Interrupted from error
                continue
            return _failed(stage, taking, Failure(error, attempt), digest.hex(), came.encode() if came else None)
        finally:
            process._end()
    raise AssertionError


def _given(stage: FrameStage, tailer: str, low: int, high: int) -> Any:
    """The DataFrame for the call of a frame: index, time, hash, value, and the declared fields."""
    from pyspark.sql import types as T

    rows = stage.read(stage.inputs[tailer], low, high).select("index", "time", "hash", "value")
    if not stage.node.options.fields:
        return rows
    fields: Any = T.StructType.fromDDL(stage.node.options.fields)
    decode = _Decode(fields.fields)
    return rows.mapInArrow(lambda given: decode(given), T.StructType([*rows.schema.fields, *fields.fields]))


def _row(stage: FrameStage, tailer: str, index: int) -> TakenRow:
    rows = stage.read(stage.inputs[tailer], index, index + 1)
    (row,) = rows.selectExpr("index", "unix_micros(time) AS time", "hash", "value", "meta").collect()
    return TakenRow(0, row["index"], row["time"], row["hash"], bytes(row["value"]), row["meta"] and bytes(row["meta"]))


def _failed(stage: FrameStage, taking: StepRange, failure: Failure, hash: str, meta: bytes | None) -> StepResult:
    """The whole step as one error message. Without an error queue the processor stops."""
    node, driver = stage.node, stage.driver
    ((tailer, (low, high)),) = taking.ranges.items()
    ran = StepResult(driver.scratch())
    answer = TaskResult(0, high - low)
    ran.answers = [answer]
    if not node.errors:
        answer.stop = 0, failure
        return ran
    values = stage.read(stage.inputs[tailer], low, high).orderBy("index").select("value").collect()
    messages = {node.inputs[0].binding: [codec.unpack(bytes(row.value)) for row in values]}
    target = next(number for number, directory in enumerate(stage.targets) if directory.queue == node.errors)
    value = codec.pack(error_message(node, messages, failure))
    columns = [[MESSAGE], [target], [0], [0], [hash], [value], [meta]]
    rows = pa.Table.from_arrays([pa.array(c, kind.type) for c, kind in zip(columns, OUT_ARROW)], schema=OUT_ARROW)
    driver.session.createDataFrame(rows).coalesce(1).write.parquet(driver.files.url_of(ran.folder))
    answer.written, answer.failed, answer.first = {target: 1}, high - low, failure
    return ran
