"""A stage from DataFrame to DataFrame over files: the driver makes its plan, and executors carry it out."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa

from cues import codec
from cues.base import clock
from cues.base.data import dataclass
from cues.errors import TopologyChanged
from cues.overrides import override
from cues.queues.options import QueueOptions, changed
from cues.records.packed import packed_rows
from cues.records.provenance import Provenance
from cues.spark.cluster.data import Piece, QueueWriter, Writer, hash_runs, read, read_rows
from cues.spark.cluster.directory import DataFile
from cues.spark.cluster.files import Files
from cues.spark.cluster.ledger import LedgerRecord, StepRange
from cues.spark.cluster.rows import RowSlice
from cues.spark.cluster.step import Stage
from cues.spark.cluster.tasks import TaskOutput
from cues.spark.cluster.typed import TypedColumns
from cues.spark.columns import Column, Encoder, frame_encoder
from cues.spark.executor import is_of_spark
from cues.spark.plans import ROWS, call, fields_of, process_of
from cues.steps.calls import Interrupted
from cues.steps.failure import Failure, error_message, retry_event
from cues.steps.outgoing import FixedOptions, Packer
from cues.steps.taking import Input, Slice, Taken


class _Range(Slice):
    """The range of a frame. The driver has its indices, but not its messages."""

    def __init__(self, entrance: Any, start: int, stop: int) -> None:
        super().__init__(cast(Input, entrance), start, stop, [], [])


def rows_of(files: Files, pieces: Sequence[Piece], given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The messages of pieces, in ``mapInArrow`` over a column of their numbers."""
    for numbers in given:
        for number in numbers.column(0).to_pylist():
            piece = pieces[number]
            rows = read(files, piece, ("time", "hash", "value"))
            indices = pa.array(range(piece.begin, piece.begin + rows.num_rows), pa.int64())
            yield from rows.add_column(0, "index", indices).to_batches()


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


@dataclass(frozen=True)
class Encoding:
    """Writes the rows of a DataFrame as messages, in tasks."""

    files: Files
    queue: str
    columns: TypedColumns
    options: QueueOptions
    processor: str
    record: int
    time_us: int
    hash: str
    provenance: Provenance | None
    schema: Any = None
    """The schema of the rows; None if the column ``value`` is the packed message."""

    def write(self, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write a partition of the frame into data files, in ``mapInArrow``; the result is the files, pickled."""
        from pyspark import TaskContext

        context = TaskContext.get()
        number = context.partitionId() if context is not None else 0
        encoder = None if self.schema is None else Encoder(self.schema)
        packer = Packer(FixedOptions(changed(self.options, {"metadata": False}))).renew()
        where = self.files, self.queue, self.options, self.processor, self.record, self.time_us
        writer = QueueWriter(*where, self.columns, turn=self.record + number)
        provenance = None if self.options.strips else self.provenance
        for rows in given:
            packed = self._packed(rows, encoder, packer)
            if packed:
                hashes = hash_runs([self.hash], [len(packed)])
                writer.add(packed, hashes, provenance and provenance.spread(len(packed)))
        files = writer.close()
        if files:
            written = pickle.dumps((number, files))
            yield pa.RecordBatch.from_pydict({"files": pa.array([written], pa.binary())})

    @staticmethod
    def _packed(rows: pa.RecordBatch, encoder: Encoder | None, packer: Packer) -> list[bytes]:
        table = None if encoder is None or packer.places else encoder.table(rows)
        if table is not None:
            packed = packed_rows(table)
            if max(map(len, packed), default=0) <= packer.limit_bytes:  # else the packer says which is too long
                return packed
        messages = encoder.messages(rows) if encoder else map(codec.unpack, rows.column("value").to_pylist())
        return [packer.pack(message) for message in messages]

    def files_of(self, frame: Any) -> list[DataFile]:
        """Write the rows of a DataFrame. Return the files, in the order of its partitions."""
        written = frame.mapInArrow(self.write, "files BINARY").collect()
        return [file for _, files in sorted(pickle.loads(row.files) for row in written) for file in files]


class FrameStage(Stage):
    """A stage whose function makes a plan."""

    @override
    def _positions(self, accept_topology: bool, last: LedgerRecord | None) -> dict[str, tuple[str, int]]:
        if last is not None and last.batch is not None:
            raise TopologyChanged(
                f"{self.node.id} has run as a query, whose state is in Spark's checkpoint, and its plan runs in steps"
                " now.",
                "give the frame another id; or start over with --fresh or another --queues DIR.",
                processor=self.node.id,
            )
        return super()._positions(accept_topology, last)

    @override
    def run(self, taking: StepRange) -> list[TaskOutput]:
        """Call the function with the messages of the step, and let executors carry out the plan that it returns."""
        node, driver = self.node, self.driver
        ((tailer, (low, high)),) = taking.ranges.items()
        (entrance,) = self.entrances()
        taken = Taken([_Range(entrance, low, high)], high - low)
        digest = self._hasher.digest(taken.ranges(0, high - low))
        taken.hash = digest
        process = process_of(node, driver.system, self.ledger.now.epoch, driver.store_id)
        (last,) = self.pieces(tailer, high - 1, high)
        provenance = RowSlice(entrance, read_rows(driver.files, [last])).provenance().delivered()
        directory = self.targets[0]
        record, now_us = self.ledger.now.number + 1, clock.now_ns() // 1000
        encoding = Encoding(
            driver.files,
            directory.queue,
            directory.columns,
            directory.options,
            node.id,
            record,
            now_us,
            digest.hex(),
            provenance,
        )
        retry = node.options.retry
        for attempt in range(1, retry.attempts + 1):
            try:
                process.core.begin(taken)
                given = self._given(tailer, low, high)
                result = call(node, {node.inputs[0].binding: given}, process)
                frame_encoder(node.id, result)  # rows that cannot be messages are refused here, not in a task
                files = replace(encoding, schema=result.schema).files_of(result)
                output = TaskOutput(count=high - low, retries=attempt - 1, files=[(0, file) for file in files])
                output.written = sum(file.count for file in files)
                return [output]
            except Exception as error:
                if driver.closed:
                    raise Interrupted from error
                if is_of_spark(error):
                    raise  # no message failed
                if attempt == retry.attempts or not isinstance(error, retry.on):
                    return self._failed(taking, Failure(error, attempt), encoding)
                wait_s = retry.wait_s(attempt)
                driver.emit(retry_event(node.id, attempt, retry.attempts, error, wait_s))
                if driver.sleep(wait_s):
                    raise Interrupted from error
            finally:
                process.core.end()
        raise AssertionError

    def _given(self, tailer: str, low: int, high: int) -> Any:
        """The DataFrame for the call of a frame: index, time, hash, value, and the declared fields."""
        from pyspark.sql import types as T

        pieces = self.pieces(tailer, low, high)
        files = self.driver.files
        numbers = self.driver.session.range(0, len(pieces), 1, len(pieces))
        rows = numbers.mapInArrow(lambda given: rows_of(files, pieces, given), ROWS)
        declared = fields_of(self.node, self.node.inputs[0].binding)
        if not declared:
            return rows
        fields: Any = T.StructType.fromDDL(declared)
        schema = T.StructType([*rows.schema.fields, *fields.fields])
        return rows.mapInArrow(lambda given: _decode(fields.fields, given), schema)

    def _failed(self, taking: StepRange, failure: Failure, encoding: Encoding) -> list[TaskOutput]:
        """The whole step as one error message. Without an error queue the processor stops."""
        node, files = self.node, self.driver.files
        ((tailer, (low, high)),) = taking.ranges.items()
        output = TaskOutput(count=high - low)
        if not node.errors:
            output.stop = 0, failure
            return [output]
        rows = read_rows(files, self.pieces(tailer, low, high))
        messages = {node.inputs[0].binding: [codec.unpack(value) for value in rows.values]}
        target = next(number for number, directory in enumerate(self.targets) if directory.queue == node.errors)
        errors = self.targets[target]
        where = files, errors.folder, node.id, encoding.record, encoding.time_us
        writer = Writer(*where, errors.columns, node.partition % len(errors.logs))
        writer.add([codec.pack(error_message(node, messages, failure))], [encoding.hash], encoding.provenance)
        file = writer.close()
        assert file is not None
        output.files.append((target, file))
        output.written, output.failed, output.first = 1, high - low, failure
        return [output]
