"""A stretch of a shared directory, on an executor: messages are read from data files, and staged in data files.

    driver                              executors
    Task, stretches of files       ──▶  run_task        read, call, write
    TaskOutput                     ◀──                  new files, changed state, counts

A batch function is called for one batch after another. Of a function with state one call of the runner has all
messages of the stretch: those of some keys if the state has keys. Of others it has some thousand, one after another.

A message goes to the task of its key in two ways. A step with few messages is one task. For a larger one the
messages are moved between two halves of the job (:func:`scatter`, :func:`run_keys`); the state is not moved.

An output message has the delivery hash of its source messages: those of its batch, or of its call between two
failures, or, if a key decides the task, its own source message only.
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from datetime import datetime
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cues import codec
from cues.base import clock, names
from cues.base.data import dataclass
from cues.errors import Diverged
from cues.graphs.processor import Node, TimerNode
from cues.overrides import override
from cues.queues.options import QueueOptions
from cues.records import batch as batches
from cues.records.columns import integers
from cues.records.packed import unpacked
from cues.records.provenance import Provenance, concat
from cues.records.schema import Schema
from cues.spark.cluster import delays, state_files
from cues.spark.cluster.data import QueueWriter, Rows, hash_runs, read, read_rows
from cues.spark.cluster.delays import HeldRun
from cues.spark.cluster.directory import DataFile
from cues.spark.cluster.files import Files
from cues.spark.cluster.rows import Entrance, RowSlice
from cues.spark.cluster.state_files import StateRun
from cues.spark.cluster.typed import TypedColumns, fields_of
from cues.spark.executor import GivenUp, Job, Stretch, StretchResult, unpack_job
from cues.spark.work import ExecutorRunner, StretchWork, travelling
from cues.steps.failure import Failure
from cues.steps.hashes import Hasher
from cues.steps.outgoing import Packed, Packer
from cues.steps.process import Process, key_of
from cues.steps.results import Cut, Results, TableOutput
from cues.steps.state import Changes, StateTable
from cues.steps.state_keys import ORDER, WRITTEN, key_of_row, key_segment
from cues.steps.taking import Slice, Taken
from cues.steps.timers import TimerHasher

CALL_MESSAGES: Final = 4_096
"""Most messages of a call of the runner, if no state has to be loaded: so few stay in the processor's cache."""
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
    unit: str
    """The id of the processor's unit, also where ``node`` is the one of its delayed messages or of its timers."""
    timers: str
    """The id of the queue of its due timers."""
    without_delays: frozenset[str]
    """The queues whose messages may have no time of delivery."""


class Task(NamedTuple):
    """The common facts of the stretches of a step."""

    packed: bytes
    low: int
    """The index of the step's first message, on its first input."""
    size: int
    """Most messages of a call: the size of a batch when the step was taken."""
    record: int
    """The number of the record that will name the new files."""
    time_us: int
    sees: Sees
    runs: tuple[StateRun, ...]
    """The state."""
    once: bool
    """True if Spark must not repeat a task."""
    columns: tuple[TypedColumns, ...]
    """The typed columns of each target."""
    firsts: tuple[tuple[int, ...], ...]
    """By target and partition: the index of the next message, which the first stretch probably writes."""
    now_ns: int
    """Messages with a later time of delivery are held."""
    state_ns: int
    """The time by which values of the state expire."""
    unread: frozenset[str]
    """The bindings of the inputs with messages that the step does not take."""


@dataclass(kw_only=True)
class TaskOutput(StretchResult):
    """All that a task has done."""

    count: int = 0
    """Number of messages of the stretch."""
    written: int = 0
    """Number of output messages, errors included."""
    failed: int = 0
    first: Failure | None = None
    """The first failure."""
    closed: int | None = None
    """The offset at which the step ends: after a failure that is committed before a later message is called."""
    files: list[tuple[int, DataFile]] = field(default_factory=list)
    """The new data files, each with the number of its target."""
    state: StateRun | None = None
    """The rows of the state that changed."""
    spent_s: float = 0.0
    read_bytes: int = 0
    """The bytes of the messages of the stretch."""
    fields: dict[int, Schema] = field(default_factory=dict)
    """By target: the fields of tables, if some of them have no typed column yet, or rows have packed messages."""
    held: HeldRun | None = None
    """The messages that are not due."""
    timers: HeldRun | None = None
    """The timers that were set."""
    fired_ns: dict[int, int] = field(default_factory=dict)
    """Of a step of due timers: the time of each, by its index."""
    until_ns: dict[int, int] = field(default_factory=dict)
    """By target: the last time of delivery of its new messages."""


class CarriedState(StateTable):
    """The state that a task has read, with the changes of its calls."""

    def __init__(self, node: Node, sees: Sees, runs: Sequence[StateRun], now_ns: int) -> None:
        super().__init__(None, node.key, node.options.ttl_ns)
        self._missing = True  # no store is below these rows
        self._timed = self.ttl_ns is not None or any(run.written_ns for run in runs)
        self._now_ns = now_ns
        self._sees = sees
        self.carried: dict[bytes, bytes] = {}
        self._carried_order: list[bytes] | None = None
        self.keys: set[bytes] = set()
        self.changes: Changes = {}
        self.timers: Changes = {}
        """The changes of the timers in the order of time. They are in files of their own (delays.py)."""

    @override
    def now(self) -> int:
        return self._now_ns

    @override
    def _times_of(self, changes: Changes) -> Changes:
        """The times of writes by value. Runs of the state keep no values in the order of their writes."""
        return {row: packed for row, packed in super()._times_of(changes).items() if row[:1] == WRITTEN}

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
        rows |= {row: packed is not None for row, packed in self._step.items() if row.startswith(prefix)}
        return {row: there and not self._is_expired(row) for row, there in rows.items()}

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
            (self.timers if row[:1] == ORDER else self.changes)[row] = packed
            if packed is None:
                self.carried.pop(row, None)
            else:
                self.carried[row] = packed
        self._drop_step()

    def _check(self, row: bytes) -> None:
        if self._sees == "nothing" or (self._sees == "keys" and key_of_row(row) not in self.keys):
            raise GivenUp("state")


class _TaskProcess(Process):
    """``process`` over rows."""

    def __init__(self, task: Task, *facts: Any) -> None:
        super().__init__(*facts)
        self._step_ns = task.state_ns
        self._unread = task.unread

    @override
    @property
    def now(self) -> datetime:
        # The driver chose what is due by its own clock. The clock of this machine may be behind it.
        self.core.now_ns = self.core.now_ns or max(clock.now_ns(), self._step_ns)
        return super().now

    @override
    def unread(self, binding: str | None = None) -> bool:
        return bool(self._unread) if binding is None else binding in self._unread

    @override
    @property
    def index(self) -> Any:
        def of(piece: Slice) -> int:
            assert isinstance(piece, RowSlice)
            return piece.rows.indices[self.core.offset]

        return self._by_binding(of)

    @override
    @property
    def indices(self) -> Any:
        def of(piece: Slice) -> list[int]:
            assert isinstance(piece, RowSlice)
            indices, chosen = piece.rows.indices, self.core.chosen
            return list(indices) if chosen is None else [indices[offset] for offset in chosen]

        return self._by_binding(of)

    @override
    @property
    def metadata(self) -> dict[str, Any]:
        taken = self.core.step()
        slices: list[RowSlice] = taken.slices  # type: ignore[assignment]
        offset = len(slices[0].rows) - 1 if self.core.node.options.batch else self.core.offset
        metadata = taken.provenance().at(offset)
        rows = slices[0].rows
        if rows.times_ns is not None and names.DELIVER_AT in (own := rows.slice(offset, offset + 1).provenance.at(0)):
            metadata[names.DELIVER_AT] = own[names.DELIVER_AT]
        hash = rows.hashes[offset]
        return metadata if hash is None else {**metadata, names.HASH: hash}


class _Target(NamedTuple):
    """The options of a queue that stay as they are, and whether its messages may have a time of delivery."""

    options: QueueOptions
    delays: bool


class _RowPacker(Packer):
    """Packs messages for rows, which cannot hold identities, and can hold provenance of any size."""

    @override
    def pack(self, message: Any, provenance: Provenance | None = None) -> bytes:
        packed = super().pack(message)
        if type(packed) is Packed and packed.marked:
            batches.split_meta(message, _NOWHERE, delays=isinstance(self.queue, _Target) and self.queue.delays)
        return packed


_NOWHERE: Final = Provenance(1, {})


class _RowRunner(ExecutorRunner):
    packer = _RowPacker


def run_task(task: Task, stretch: Stretch) -> TaskOutput:
    """Do the work of a task: each of ``inputs`` of the stretch is the number of an input, and pieces of its files."""
    work = _FilesWork(task, stretch.number)
    as_tables = work.job.node.takes_columns
    return work.output(
        lambda: [(number, read_rows(work.files, pieces, as_tables)) for number, pieces in stretch.inputs]
    )


def scatter(packed: bytes, tasks: int, stretch: Stretch) -> Iterator[tuple[int, bytes]]:
    """The messages of a stretch, with their indices, by the number of the task that has their keys."""
    job: TaskJob = unpack_job(packed)
    ((number, pieces),) = stretch.inputs
    for piece in pieces:
        table = read(job.files, piece)
        table = table.append_column("index", integers(range(piece.begin, piece.begin + table.num_rows)))
        keys = (_key_of(job.node, message) for message in unpacked(table.column("value")))
        places = integers(state_files.task_of(key, tasks) for key in keys)
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
    yield _FilesWork(task, number).output(lambda: [(input, Rows(table.column("index").to_pylist(), table))])


def _key_of(node: Node, message: dict[str, Any]) -> bytes:
    """The packed key of a message. The rows of its state begin with it. Empty if the message has no key."""
    try:
        return key_segment(key_of(node, message))
    except Exception:
        return b""  # the call reports the error


class _Chunk(NamedTuple):
    """Output messages for one target."""

    origins: Sequence[int]
    values: list[bytes]
    provenance: Provenance | None


class _FilesWork(StretchWork):
    """The calls for a stretch of a shared directory: its state, and its writers."""

    job: TaskJob
    result: TaskOutput

    def __init__(self, task: Task, number: int) -> None:
        super().__init__(unpack_job(task.packed), TaskOutput(number=number))
        # The state is loaded once for all messages of a task.
        calls = task.sees != "nothing" or self.job.node.options.batch
        self.size = task.size if calls else min(task.size, CALL_MESSAGES)
        self.task = task
        self.files = self.job.files
        timers = isinstance(self.job.node, TimerNode)
        self._hasher = (TimerHasher if timers else Hasher)(self.job.node.key, 0)
        self._state = CarriedState(self.job.node, task.sees, task.runs, task.state_ns)
        self._folder = state_files.folder_of_state(self.job.unit)
        self._writers: dict[int, QueueWriter] = {}
        self._loaded = False
        self._later: tuple[list[tuple[Entrance, Rows]], list[int]] | None = None
        """The messages that are not due, and their times."""

    def output(self, read: Callable[[], list[tuple[int, Rows]]]) -> TaskOutput:
        """Call the function for the messages of each input, and write its messages and its state."""
        began = time.monotonic()
        self._read = read
        self.run()
        result = self.result
        for target, writer in self._writers.items():
            result.files += [(target, file) for file in writer.close()]
        if self._state.changes:
            result.state = state_files.write(self.files, self._folder, self.task.record, self._state.changes)
        if not result.declined and result.fatal is None:
            if self._later is not None:
                result.held = self._hold(*self._later)
            timers = self._state.timers
            folder, tailer = delays.folder_of_delayed(self.job.unit), self.job.timers
            result.timers = delays.hold_timers(self.files, folder, self.task.record, self.task.time_us, tailer, timers)
        result.spent_s = time.monotonic() - began
        return result

    @override
    def begin(self) -> int:
        if self.task.once and _is_repeated():
            raise GivenUp("again")
        self._inputs = [(self.job.entrances[number], rows) for number, rows in self._read()]
        counts = {len(rows) for _, rows in self._inputs}
        if len(counts) > 1:
            raise Diverged(
                f"The inputs of a step of {self.job.node.id} do not have the same number of messages: {counts}.",
                "restore the directory from a copy.",
                processor=self.job.node.id,
            )
        (count,) = counts
        self.result.count = count
        self.result.read_bytes = sum(rows.nbytes for _, rows in self._inputs)
        targets = {
            binding: _Target(self.job.targets[target][1], self.job.targets[target][0] not in self.job.without_delays)
            for binding, target in self.job.outputs.items()
        }
        if isinstance(self._hasher, TimerHasher):
            ((_, timers),) = self._inputs
            at = [clock.to_ns(timer["at"]) for timer in timers.messages()]
            self._hasher.times = self.result.fired_ns = dict(zip(timers.indices, at))
        process = functools.partial(_TaskProcess, self.task)
        self.calls(0, self._state, targets, self._state.call, process, _RowRunner, self._hasher)
        return self._due(count)

    def _due(self, count: int) -> int:
        """Leave out the messages that are not due. Return the number of those that are."""
        found = [rows.times_ns for _, rows in self._inputs]
        if not any(found):
            return count
        times = list(map(max, zip(*[some or [0] * count for some in found])))
        later = [offset for offset, time in enumerate(times) if time > self.task.now_ns]
        if not later:
            return count
        due = [offset for offset, time in enumerate(times) if time <= self.task.now_ns]
        chosen = [(entrance, rows.chosen(later)) for entrance, rows in self._inputs]
        self._later = chosen, [times[offset] for offset in later]
        self._inputs = [(entrance, rows.chosen(due)) for entrance, rows in self._inputs]
        return len(due)

    def _hold(self, inputs: list[tuple[Entrance, Rows]], times: list[int]) -> HeldRun | None:
        """Write the messages that are not due, up to the end of the step. An at-most-once step takes all its range."""
        result, low = self.result, self.task.low
        end = result.closed if result.stop is None else result.stop[0]
        if end is not None and not self.task.once:
            kept = [offset for offset, index in enumerate(inputs[0][1].indices) if index - low < end]
            inputs = [(entrance, rows.chosen(kept)) for entrance, rows in inputs]
            times = [times[offset] for offset in kept]
        folder = delays.folder_of_delayed(self.job.unit)
        return delays.hold(self.files, folder, self.task.record, inputs, times) if times else None

    @override
    def offset(self, place: int, taken: Taken, at: int) -> int:
        rows = taken.slices[0]
        assert isinstance(rows, RowSlice)
        return rows.rows.indices[at] - self.task.low

    @override
    def take(self, place: int, count: int, halved: bool) -> Taken:
        slices: list[Slice] = [RowSlice(entrance, rows.slice(place, place + count)) for entrance, rows in self._inputs]
        if self.task.sees == "keys":
            self._state.keys = {_key_of(self.job.node, message) for message in slices[0].messages} - {b""}
            self._state.carried = state_files.load(self.files, self._folder, self.task.runs, self._state.keys)
        elif self.task.sees == "all" and not self._loaded:
            self._state.carried = state_files.load(self.files, self._folder, self.task.runs, None)
        self._loaded = True
        return Taken(slices, count, halved=halved)

    @override
    def stage(self, place: int, taken: Taken, results: Results, count: int) -> None:
        """Write the messages and the failures, and keep the changes of the state."""
        node, result = self.job.node, self.result
        if results.failures and node.options.checkpoint is not None and not self.ended:
            # The target keeps the index of its last message, and would count a failed message before it as done.
            count = count if results.closed is None else results.closed
            result.closed = self.offset(place, taken, count - 1) + 1
            self.ended = True
        chunks = self._outputs(taken, results, count)
        cuts = list(results.cuts(node, count))
        for cut in cuts:
            if cut.failure is None:
                continue
            assert self.job.errors is not None
            message, own = self.error_of(taken, cut)
            record = Packed(codec.pack(message))
            record.place = node.partition % self.job.targets[self.job.errors][1].partitions
            chunks.setdefault(self.job.errors, []).append(_Chunk([cut.start], [record], own))
            result.failed += cut.stop - cut.start
            result.first = result.first or travelling(cut.failure)
        if self.task.sees == "keys" and not node.options.batch:  # the messages are not consecutive
            cuts = [Cut(offset, offset + 1, None) for offset in range(count)]
        runs = [self._hasher.digest(taken.ranges(cut.start, cut.stop)).hex() for cut in cuts]
        counts = [cut.stop - cut.start for cut in cuts]
        for target, some in chunks.items():
            origins, values, provenance = _in_order(some)
            result.written += len(values)
            if origins == range(count) and provenance is None:
                self._writer(target).add_plain(values, runs, counts)
            else:
                own = hash_runs(runs, counts).take(integers(origins))
                self._writer(target).add(values, own, provenance)
        for binding, output in results.outputs.items():
            if isinstance(output, TableOutput) and output.table.num_rows:
                self._write_table(self.job.outputs[binding], output, taken, runs[-1])
        self._state.committed()

    def _write_table(self, target: int, output: TableOutput, taken: Taken, hash: str) -> None:
        """Write the table that a batch function returned."""
        rows = output.table
        provenance: Provenance | None = None
        if not self.job.targets[target][1].strips and taken.traced:
            provenance = taken.provenance().spread(rows.num_rows)
        self._writer(target).add_table(rows, output.shares, hash, provenance)
        self.result.written += rows.num_rows
        columns, fields = self.task.columns[target], fields_of(rows.schema)
        if columns.unknown(fields) or not columns.bare:
            known = dict(self.result.fields.get(target, ()))
            self.result.fields[target] = tuple((dict(fields) | known).items())

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
            marked = Packed in set(map(type, values)) and any(type(p) is Packed and p.marked for p in values)
            provenance: Provenance | None = None
            if not self.job.targets[target][1].strips and (marked or taken.traced):
                provenance = taken.provenance()
                if batch:
                    provenance = provenance.spread(len(values))
                elif output.origins is not None or provenance.count != len(values):
                    provenance = provenance.select(origins)
            if marked:
                values, provenance = _split(values, provenance)
                until_ns = max(provenance.times()) if provenance else 0
                self.result.until_ns[target] = max(until_ns, self.result.until_ns.get(target, 0))
            chunks.setdefault(target, []).append(_Chunk(origins, values, provenance))
        return chunks

    def _writer(self, target: int) -> QueueWriter:
        if target not in self._writers:
            (queue, options), task = self.job.targets[target], self.task
            where = self.files, queue, options, self.job.unit, task.record, task.time_us
            turn = task.record + self.result.number
            firsts = () if self.result.number else task.firsts[target]
            self._writers[target] = QueueWriter(*where, task.columns[target], turn, firsts)
        return self._writers[target]


def _split(values: list[bytes], provenance: Provenance | None) -> tuple[list[bytes], Provenance | None]:
    """The messages without the metadata that the function has put into them, and all metadata."""
    plain: list[bytes] = []
    every: list[Provenance] = []
    for offset, packed in enumerate(values):
        own = _NOWHERE if provenance is None else provenance.slice(offset, offset + 1)
        if type(packed) is Packed and packed.marked:
            message, own = batches.split_meta(codec.unpack_known(packed), own, delays=True)
            place, packed = packed.place, Packed(codec.pack(message))
            packed.place = place
        plain.append(packed)
        every.append(own)
    return plain, None if provenance is None else concat(every)


def _in_order(chunks: list[_Chunk]) -> tuple[Sequence[int], list[bytes], Provenance | None]:
    """The messages of several outputs of one target, in the order of their source messages."""
    if len(chunks) == 1:
        return chunks[0]
    origins = [origin for chunk in chunks for origin in chunk.origins]
    values = [value for chunk in chunks for value in chunk.values]
    order = sorted(range(len(origins)), key=origins.__getitem__)  # stable
    provenance: Provenance | None = None
    if any(chunk.provenance for chunk in chunks):
        provenance = concat([chunk.provenance or Provenance(len(chunk.values), {}) for chunk in chunks]).select(order)
    return [origins[at] for at in order], [values[at] for at in order], provenance


def _is_repeated() -> bool:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0
