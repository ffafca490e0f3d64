"""The executor's side of a step: read a range of data files, call the function, write data files.

    driver                              executors
    Task: parts, pieces of files   ──▶  run_task        read, call, write
    TaskOutput                     ◀──                  new files, changed state, an answer for each part

The function is called for one part after another. A part is one batch for a batch function. For a function whose
state has keys it is the messages of some keys. For other functions it is an equal share of the messages. The
:class:`Runner` that calls the function is the same as in the embedded engine.

A message goes to the task of its key in two ways. A step with few messages is one task. For a larger one the
messages are moved between two halves of the job (:func:`scatter`, :func:`run_keys`); the state is not moved.

An output message has the delivery hash of its source messages: those of its part between two failures, or,
if a key decides the part, its own source message only.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cues import codec
from cues.base import events, names
from cues.base.names import ProcessorKey
from cues.errors import Diverged
from cues.graphs.processor import Node
from cues.overrides import override
from cues.queues.options import QueueOptions
from cues.records import batch as batches
from cues.records.provenance import Provenance, concat
from cues.spark.cluster import state_files
from cues.spark.cluster.data import Piece, QueueWriter, Rows, read, read_rows
from cues.spark.cluster.directory import DataFile
from cues.spark.cluster.files import Files
from cues.spark.cluster.rows import Entrance, RowSlice
from cues.spark.cluster.state_files import StateRun, key_bytes
from cues.spark.cluster.typed import TypedColumns
from cues.spark.executor import (
    ExecutorRunner,
    Job,
    NeedsState,
    PartReport,
    reporting,
    runner_of,
    travelling,
    unpack_job,
)
from cues.steps.failure import Failure, error_message
from cues.steps.halving import Halving, halves
from cues.steps.hashes import Hasher
from cues.steps.outgoing import Packed, Packer
from cues.steps.process import Process, key_of
from cues.steps.results import Cut, Results
from cues.steps.state import Changes, StateTable
from cues.steps.state_parts import key_part
from cues.steps.taking import Slice, Taken

if TYPE_CHECKING:
    pass

Sees = str
"""The part of the state that a task may read: "nothing", "keys" (those of its messages) or "all"."""


@dataclass(frozen=True)
class TaskJob(Job):
    """The job of a processor over files."""

    files: Files
    entrances: tuple[Entrance, ...]
    targets: tuple[tuple[str, QueueOptions], ...]
    """The queues that a step may write to, with their options."""
    outputs: dict[str, int]
    """The number of the target, by output binding."""
    errors: int | None
    """The target for messages that failed for good."""


class TaskPart(NamedTuple):
    """A part of a step: the messages of one call of a batch function, or a share of the messages."""

    number: int
    inputs: tuple[tuple[int, tuple[Piece, ...]], ...]
    """By number of the input: where its messages are."""


class Task(NamedTuple):
    """The work of one task. A step is one Spark job of such tasks."""

    packed: bytes
    parts: tuple[TaskPart, ...]
    low: int
    """The index of the step's first message, on its first input."""
    record: int
    """The number of the record that will name the new files."""
    time_us: int
    sees: Sees
    runs: tuple[StateRun, ...]
    """The state."""
    once: bool
    """True if Spark must not repeat the task."""
    columns: tuple[TypedColumns, ...]
    """The typed columns of each target."""


@dataclass
class TaskResult(PartReport):
    """The result of a part. Offsets count from the start of the step."""

    part: int
    count: int
    """Number of messages of the part."""
    written: int = 0
    """Number of output messages, errors included."""
    failed: int = 0
    first: Failure | None = None
    """The first failure."""
    stop: tuple[int, Failure] | None = None
    """The offset at which the processor stops: a message failed for good, and there is no error queue."""
    closed: int | None = None
    """The offset at which the step ends: after a failure that is committed before a later message is called."""


@dataclass
class TaskOutput:
    """All that a task has done."""

    answers: list[TaskResult] = field(default_factory=list)
    files: list[tuple[int, DataFile]] = field(default_factory=list)
    """The new data files, each with the number of its target."""
    state: StateRun | None = None
    """The rows of the state that changed."""
    spent_s: float = 0.0
    read_bytes: int = 0
    """The bytes of the messages that it has taken."""

    @property
    def first_part(self) -> int:
        return self.answers[0].part if self.answers else 0


class CarriedState(StateTable):
    """The state that a task has read, with the changes of its calls."""

    def __init__(self, processor: ProcessorKey, sees: Sees) -> None:
        super().__init__(None, processor)
        self._missing = True  # no store is below these rows
        self._sees = sees
        self.carried: dict[bytes, bytes] = {}
        self._carried_order: list[bytes] | None = None
        self.keys: set[bytes] = set()
        self.changes: Changes = {}

    @override
    def packed(self, row: bytes) -> bytes | None:
        self._check(row)
        return self._step[row] if row in self._step else self.carried.get(row)

    @override
    def load(self, rows: list[bytes]) -> None:
        """They are in memory."""

    @override
    def rows(self, prefix: bytes) -> dict[bytes, bool]:
        self._check(prefix)
        rows = {row: True for row in self.carried if row.startswith(prefix)}
        return rows | {row: packed is not None for row, packed in self._step.items() if row.startswith(prefix)}

    @override
    def range(self, low: bytes, high: bytes) -> Iterator[bytes]:
        self._check(low)
        return super().range(low, high)

    @override
    def _stored(self, low: bytes, high: bytes) -> Iterator[bytes]:
        if self._carried_order is None:
            self._carried_order = sorted(self.carried)
        order = self._carried_order
        return iter(order[bisect_left(order, low) : bisect_left(order, high)])

    @override
    def committed(self) -> None:
        """End a part. The next part sees its changes."""
        self._carried_order = None
        for row, packed in self._step.items():
            self.changes[row] = packed
            if packed is None:
                self.carried.pop(row, None)
            else:
                self.carried[row] = packed
        self._drop_step()

    def _check(self, row: bytes) -> None:
        if self._sees == "nothing" or (self._sees == "keys" and row[: key_bytes(row)] not in self.keys):
            raise NeedsState


class _TaskProcess(Process):
    """``process`` over rows."""

    @override
    @property
    def index(self) -> Any:
        def of(piece: Slice) -> int:
            assert isinstance(piece, RowSlice)
            return piece.rows.indices[self.core.offset]

        return self._by_binding(of)

    @override
    @property
    def metadata(self) -> dict[str, Any]:
        taken = self.core.step()
        slices: list[RowSlice] = taken.slices  # type: ignore[assignment]
        offset = len(slices[0].rows) - 1 if self.core.node.options.batch else self.core.offset
        metadata = taken.provenance().at(offset)
        hash = slices[0].rows.hashes[offset]
        return metadata if hash is None else {**metadata, names.HASH: hash}


class _RowPacker(Packer):
    """Packs messages for rows, which cannot hold identities, and can hold provenance of any size."""

    @override
    def pack(self, message: Any, came: Provenance | None = None) -> bytes:
        packed = super().pack(message)
        if type(packed) is Packed and packed.marked:
            batches.split_meta(message, _NOWHERE)
        return packed


_NOWHERE: Final = Provenance(1, {})


class _RowRunner(ExecutorRunner):
    packer = _RowPacker


def run_task(task: Task) -> TaskOutput:
    """Do the work of a task."""
    work = _Work(task)
    with work:
        for part in task.parts:
            work.part(part.number, lambda: [(number, read_rows(work.files, pieces)) for number, pieces in part.inputs])
    return work.output


def scatter(tasks: int, given: Task) -> Iterator[tuple[int, bytes]]:
    """The messages of a part, with their indices, by the number of the task that has their keys."""
    job: TaskJob = unpack_job(given.packed)
    for part in given.parts:
        ((number, pieces),) = part.inputs
        for piece in pieces:
            table = read(job.files, piece)
            table = table.append_column("index", pa.array(range(piece.begin, piece.begin + table.num_rows), pa.int64()))
            keys = (_key_of(job.node, codec.unpack(value)) for value in table.column("value").to_pylist())
            places = pa.array([state_files.task_of(key, tasks) for key in keys], pa.int32())
            for place in pc.unique(places).to_pylist():
                sink = pa.BufferOutputStream()
                chosen = table.filter(pc.equal(places, place))
                with pa.ipc.new_stream(sink, table.schema.with_metadata({"input": str(number)})) as stream:
                    stream.write_table(chosen)
                yield place, sink.getvalue().to_pybytes()


def run_keys(task: Task, number: int, scattered: Iterable[tuple[int, bytes]]) -> Iterator[TaskOutput]:
    """The work of task ``number`` over the messages that were scattered to it."""
    streams = [pa.ipc.open_stream(blob) for _, blob in scattered]
    if not streams:
        return
    input = int(streams[0].schema.metadata[b"input"])
    table = pa.concat_tables([stream.read_all().replace_schema_metadata() for stream in streams]).sort_by("index")
    work = _Work(task)
    with work:
        work.part(number, lambda: [(input, Rows(table.column("index").to_pylist(), table))])
    yield work.output


def _key_of(node: Node, message: dict[str, Any]) -> bytes:
    """The packed key of a message. The rows of its state begin with it. Empty if the message has no key."""
    try:
        return key_part(key_of(node, message))
    except Exception:
        return b""  # the call reports the error


class _Chunk(NamedTuple):
    """Output messages for one target."""

    origins: Sequence[int]
    values: list[bytes]
    came: Provenance | None


class _Work:
    """One task: its runner, its state, its writers, and part after part."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.job: TaskJob = unpack_job(task.packed)
        self.files = self.job.files
        self.output = TaskOutput()
        self.hasher = Hasher(self.job.node.id, 0)
        self.state = CarriedState(self.job.node.id, task.sees)
        self.counters = events.Counters()
        self.runner = runner_of(
            self.job,
            0,
            self.state,
            lambda binding: self.job.targets[self.job.outputs[binding]][1],
            self.counters,
            self.state.call,
            _TaskProcess,
            _RowRunner,
        )
        self._folder = state_files.folder_of_state(self.job.node.id)
        self._writers: dict[int, QueueWriter] = {}
        self._loaded = False
        self._ended = False

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, kind: Any, *_: object) -> None:
        """Write the rest, if there was no error."""
        if kind is not None:
            return
        for target, writer in self._writers.items():
            self.output.files += [(target, file) for file in writer.close()]
        if self.state.changes:
            self.output.state = state_files.write(self.files, self._folder, self.task.record, self.state.changes)
        self.output.spent_s = time.monotonic() - self._began

    def part(self, number: int, read: Callable[[], list[tuple[int, Rows]]]) -> None:
        """Call the function for a part, and write its messages."""
        if self._ended:
            return  # the processor stops before a message of an earlier part
        answer = TaskResult(number, 0)
        self.output.answers.append(answer)
        if self.task.once and _is_repeated():
            answer.declined = "again"
            return
        with reporting(answer):
            self._run(answer, [RowSlice(self.job.entrances[input], rows) for input, rows in read()])
        self._ended = bool(answer.stop or answer.declined or answer.fatal or answer.closed)

    def _run(self, answer: TaskResult, pieces: list[RowSlice]) -> None:
        count = answer.count = len(pieces[0].rows)
        self.output.read_bytes += sum(len(value) for piece in pieces for value in piece.rows.values)
        counts = {len(piece.rows) for piece in pieces}
        if len(counts) > 1:
            raise Diverged(
                f"The inputs of a step of {self.job.node.id} do not have the same number of messages: {counts}.",
                "restore the directory from a copy.",
                processor=self.job.node.id,
            )
        self._load(pieces)
        retries = self.counters.retries
        # The step is one commit after its calls, so only a function without effects outside is called in parts.
        divides = not self.job.node.side_effects
        halving, whole, done = Halving(), pieces, 0
        while done < count:
            stop = done + halving.bound(done, count - done)
            part = halving.at(done)
            if part:  # decoded again, because the call that failed may have changed its messages
                pieces = [RowSlice(piece.entrance, piece.rows.slice(done, stop)) for piece in whole]
            taken = Taken(list(pieces), stop - done, part=part)
            results = self.runner.run(taken)
            if divides and halves(self.job.node, taken.count, results):
                halving.divide(done, stop)
                continue
            self._put(pieces, taken, results, answer)
            self.state.committed()
            done = stop
        answer.retries = self.counters.retries - retries

    def _load(self, pieces: list[RowSlice]) -> None:
        """Read the state that the calls of a part may see."""
        if self.task.sees == "keys":
            self.state.keys = {_key_of(self.job.node, message) for message in pieces[0].messages} - {b""}
            self.state.carried = state_files.load(self.files, self._folder, self.task.runs, self.state.keys)
        elif self.task.sees == "all" and not self._loaded:
            self.state.carried = state_files.load(self.files, self._folder, self.task.runs, None)
        self._loaded = True

    def _put(self, pieces: list[RowSlice], taken: Taken, results: Results, answer: TaskResult) -> None:
        """Write the messages and the failures, and complete the answer."""
        node, batch, count = self.job.node, bool(self.job.node.options.batch), taken.count
        stop = results.stop(node)
        if stop is not None:
            answer.stop = pieces[0].rows.indices[stop] - self.task.low, travelling(results.failures[stop])
            results, count = results.before(stop), stop
        elif results.failures and node.options.checkpoint is not None:
            # The target keeps the index of its last message, and would count a failed message before it as done.
            count = count if results.closed is None else results.closed
            answer.closed = pieces[0].rows.indices[count - 1] + 1 - self.task.low
        chunks = self._outputs(taken, results, count)
        for offset, failure in sorted(results.failures.items()):
            assert self.job.errors is not None
            span = range(count) if batch else (offset,)
            messages = {piece.binding: [piece.pristine(at) for at in span] for piece in pieces}
            record = Packed(codec.pack(error_message(node, messages, failure)))
            record.place = node.partition % self.job.targets[self.job.errors][1].partitions
            own = taken.provenance().slice(span[-1], span[-1] + 1)
            chunks.setdefault(self.job.errors, []).append(_Chunk([offset], [record], own))
            answer.failed += len(span)
            answer.first = answer.first or travelling(failure)
        if self.task.sees == "keys" and not batch:  # the messages are not consecutive
            cuts: Iterable[Cut] = (Cut(offset, offset + 1, None) for offset in range(count))
        else:
            cuts = results.cuts(node, count)
        hashes: list[str] = []
        for cut in cuts:
            hashes += [self.hasher.digest(taken.ranges(cut.start, cut.stop)).hex()] * (cut.stop - cut.start)
        for target, some in chunks.items():
            origins, values, came = _in_order(some)
            answer.written += len(values)
            self._writer(target).add(values, [hashes[origin] for origin in origins], came)

    def _outputs(self, taken: Taken, results: Results, count: int) -> dict[int, list[_Chunk]]:
        """The output messages by target, each with the provenance of its source message."""
        chunks: dict[int, list[_Chunk]] = {}
        for binding, output in results.outputs.items():
            values = output.items
            if not values:
                continue
            target = self.job.outputs[binding]
            batch = bool(self.job.node.options.batch)
            origins: Sequence[int] = range(count) if output.origins is None else output.origins
            if batch:
                origins = [count - 1] * len(values)
            marked = any(type(packed) is Packed and packed.marked for packed in values)
            came: Provenance | None = None
            if not self.job.targets[target][1].strips and (marked or taken.traced):
                came = taken.provenance()
                if batch:
                    came = came.spread(len(values))
                elif output.origins is not None or came.count != len(values):
                    came = came.select(origins)
            if marked:
                values, came = _split(values, came)
            chunks.setdefault(target, []).append(_Chunk(origins, values, came))
        return chunks

    def _writer(self, target: int) -> QueueWriter:
        if target not in self._writers:
            (queue, options), task = self.job.targets[target], self.task
            where = self.files, queue, options, self.job.node.id, task.record, task.time_us
            turn = task.record + self.output.first_part
            self._writers[target] = QueueWriter(*where, task.columns[target], turn)
        return self._writers[target]


def _split(values: list[bytes], came: Provenance | None) -> tuple[list[bytes], Provenance | None]:
    """The messages without the metadata that the function has put into them, and all metadata."""
    plain: list[bytes] = []
    every: list[Provenance] = []
    for offset, packed in enumerate(values):
        own = _NOWHERE if came is None else came.slice(offset, offset + 1)
        if type(packed) is Packed and packed.marked:
            message, own = batches.split_meta(codec.unpack_known(packed), own)
            place, packed = packed.place, Packed(codec.pack(message))
            packed.place = place
        plain.append(packed)
        every.append(own)
    return plain, None if came is None else concat(every)


def _in_order(chunks: list[_Chunk]) -> tuple[Sequence[int], list[bytes], Provenance | None]:
    """The messages of several outputs of one target, in the order of their source messages."""
    if len(chunks) == 1:
        return chunks[0]
    origins = [origin for chunk in chunks for origin in chunk.origins]
    values = [value for chunk in chunks for value in chunk.values]
    order = sorted(range(len(origins)), key=origins.__getitem__)  # stable
    came: Provenance | None = None
    if any(chunk.came for chunk in chunks):
        came = concat([chunk.came or Provenance(len(chunk.values), {}) for chunk in chunks]).select(order)
    return [origins[at] for at in order], [values[at] for at in order], came


def _is_repeated() -> bool:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0
