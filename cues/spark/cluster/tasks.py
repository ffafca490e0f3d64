"""The executor's side of a step over files: rows in, rows out.

    in      part, input, offset, index, time, hash, value, meta     sorted by part, input, offset
    out     kind, target, offset, ordinal, hash, value, meta

The function is called for one part after another. A part is one batch for a batch function. For a function whose
state has keys it is the messages of some keys. For other functions it is an equal share of the messages. The
:class:`Runner` that calls the function is the same as in the embedded engine. Three kinds of rows come out:

    MESSAGE     a message for the queue number ``target``, from the message at ``offset``, in the order ``ordinal``
    ANSWER      one for each part: the facts that the driver needs (:class:`TaskResult`)
    STATE       a row of the state that changed

An output message has the delivery hash of its source messages: those of its part between two failures, or,
if a key decides the part, its own source message only.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import xxhash

from cues import codec
from cues.base import events, names
from cues.errors import Diverged
from cues.graphs.processor import Node
from cues.queues.options import QueueOptions
from cues.records import batch as batches
from cues.records.provenance import Provenance, merge
from cues.spark.cluster.rows import Entrance, RowSlice, TakenRow
from cues.spark.executor import Job, NeedsState, PartReport, reporting, runner_of, travelling, unpack_job
from cues.steps.failure import Failure, error_message
from cues.steps.hashes import Hasher
from cues.steps.outgoing import Packed, Packer
from cues.steps.process import Process
from cues.steps.process import key_of as message_key
from cues.steps.results import Cut, Output, Results
from cues.steps.runner import Runner
from cues.steps.state import Changes, StateTable, key_part
from cues.steps.taking import Slice, Taken

if TYPE_CHECKING:
    from cues.queues.store import Store

IN: Final = (
    "part INT, input INT, offset BIGINT, index BIGINT, time BIGINT, hash STRING, value BINARY, meta BINARY, key BINARY"
)
OUT: Final = "kind INT, target INT, offset BIGINT, ordinal BIGINT, hash STRING, value BINARY, meta BINARY"
OUT_ARROW: Final = pa.schema(
    [
        ("kind", pa.int32()),
        ("target", pa.int32()),
        ("offset", pa.int64()),
        ("ordinal", pa.int64()),
        ("hash", pa.string()),
        ("value", pa.binary()),
        ("meta", pa.binary()),
    ]
)
MESSAGE: Final = 0
ANSWER: Final = 1
STATE: Final = 2
STATE_INPUT: Final = -1
"""The input of rows of the state: ``meta`` is the row, ``value`` its packed value."""
_ROWS_OUT: Final = 10_000
"""Most rows that a task collects before it hands them to Spark, and the most bytes of values."""
_BYTES_OUT: Final = 16 << 20
Sees = str
"""The part of the state that a task may read: "nothing", "keys" (those of its messages) or "all"."""


@dataclass(frozen=True)
class OutputQueue:
    """A queue that a step may write to."""

    queue: str
    options: QueueOptions


@dataclass(frozen=True)
class TaskJob(Job):
    """The job of a processor over files."""

    entrances: tuple[Entrance, ...]
    targets: tuple[OutputQueue, ...]
    outputs: dict[str, int]
    """The number of the target, by output binding."""
    errors: int | None
    """The target for messages that failed for good."""


@dataclass
class TaskResult(PartReport):
    """The result of a part. Offsets count from the start of the step."""

    part: int
    count: int
    """Number of messages of the part."""
    written: dict[int, int] = field(default_factory=dict)
    """Number of output messages by target."""
    failed: int = 0
    first: Failure | None = None
    """The first failure."""
    stop: tuple[int, Failure] | None = None
    """The offset at which the processor stops: a message failed for good, and there is no error queue."""
    changed: int = 0
    """Number of rows of the state that changed."""


@dataclass
class StepResult:
    """The results of a step's function."""

    folder: str
    answers: list[TaskResult] = field(default_factory=list)

    @property
    def stop(self) -> tuple[int, Failure] | None:
        """The offset at which the processor stops, and the failure."""
        stops = (answer.stop for answer in self.answers if answer.stop is not None)
        return min(stops, default=None, key=lambda stop: stop[0])

    @property
    def changed(self) -> bool:
        """Whether the state changed."""
        return any(answer.changed for answer in self.answers)


class CarriedState(StateTable):
    """The state that a task was given, with the changes of its calls."""

    def __init__(self, processor: str, rows: dict[bytes, bytes], sees: Sees, keys: set[bytes]) -> None:
        super().__init__(_NO_STORE, processor)
        self._missing = True  # no store is below these rows
        self._rows = rows
        self._sees = sees
        self._keys = keys
        self.changes: Changes = {}

    def packed(self, row: bytes) -> bytes | None:
        self._check(row)
        return self._step[row] if row in self._step else self._rows.get(row)

    def rows(self, prefix: bytes) -> dict[bytes, bool]:
        self._check(prefix)
        rows = {row: True for row in self._rows if row.startswith(prefix)}
        return rows | {row: packed is not None for row, packed in self._step.items() if row.startswith(prefix)}

    def forget(self) -> None:
        self.call.discard()
        self._step.clear()

    def committed(self) -> None:
        """End a part. The next part sees its changes."""
        for row, packed in self._step.items():
            self.changes[row] = packed
            if packed is None:
                self._rows.pop(row, None)
            else:
                self._rows[row] = packed
        self._step.clear()

    def _check(self, row: bytes) -> None:
        if self._sees == "nothing" or (self._sees == "keys" and row[: key_bytes(row)] not in self._keys):
            raise NeedsState


_NO_STORE: Final[Store] = None  # type: ignore[assignment]


class _TaskProcess(Process):
    """``process`` over rows."""

    @property
    def index(self) -> Any:
        def of(piece: Slice) -> int:
            assert isinstance(piece, RowSlice)
            return piece.rows[self._offset].index

        return self._by_binding(of)

    @property
    def metadata(self) -> dict[str, Any]:
        slices: list[RowSlice] = self._now().slices  # type: ignore[assignment]
        offset = len(slices[0].rows) - 1 if self._node.options.batch else self._offset
        metadata = merge([piece.provenance_of(offset) for piece in slices]).at(0)
        hash = slices[0].rows[offset].hash
        return metadata if hash is None else {**metadata, names.HASH: hash}


class Task:
    """The function of ``mapInArrow``, which calls the user's function for each part."""

    def __init__(self, packed: bytes, sees: Sees, once: bool) -> None:
        """``packed`` is the job. ``once``: a task that Spark repeats is declined."""
        self.packed = packed
        self.sees = sees
        self.once = once

    def __call__(self, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        out = _Rows()
        work: _Work | None = None
        for part, rows in _parts(given):
            if self.once and _is_repeated():
                out.answer(TaskResult(part, 0, declined="again"))
                continue
            if work is None:
                work = _Work(unpack_job(self.packed), self.sees)
            work.part(part, rows, out)
            yield from out.full()
        if work is not None:
            work.close(out)
        yield from out.rest()


class _RowPacker(Packer):
    """Packs messages for rows, which cannot hold identities, and can hold provenance of any size."""

    def pack(self, message: Any, came: Provenance | None = None) -> bytes:
        packed = super().pack(message)
        if type(packed) is Packed and packed.marked:
            batches.split_meta(message, _NOWHERE)
        return packed


class _RowRunner(Runner):
    packer = _RowPacker


class _Work:
    """One task: its runner, its state, and part after part."""

    def __init__(self, job: TaskJob, sees: Sees) -> None:
        self.job = job
        self.sees = sees
        self.hasher = Hasher(job.node.id, 0)
        self.counters = events.Counters()
        self.state: CarriedState | None = None
        self.runner: Runner | None = None
        self.ended = False

    def part(self, number: int, rows: dict[int, list[Any]], out: _Rows) -> None:
        """Call the function for a part, and add its rows and its answer."""
        if self.ended:
            return  # the processor stops before a message of an earlier part
        answer = TaskResult(number, 0)
        with reporting(answer):
            if self.state is None:
                self._begin(rows)
            rows.pop(STATE_INPUT, None)
            if rows:
                self._run(answer, rows, out)
        self.ended = self.ended or answer.declined != "" or answer.fatal is not None
        out.answer(answer)

    def _begin(self, rows: dict[int, list[Any]]) -> None:
        job = self.job
        carried = {meta: value for *_, value, meta in rows.get(STATE_INPUT, ())}
        self.state = CarriedState(job.node.id, carried, self.sees, set())
        self.runner, self.counters = runner_of(
            job,
            0,
            self.state,
            lambda binding: job.targets[job.outputs[binding]].options,
            self.state.call,
            _TaskProcess,
            _RowRunner,
        )

    def _run(self, answer: TaskResult, rows: dict[int, list[Any]], out: _Rows) -> None:
        assert self.runner is not None and self.state is not None
        taken = self._taken(rows)
        answer.count = taken.count
        retries = self.counters.retries
        if self.sees == "keys":
            self.state._keys |= {self._key_of(message) for message in taken.slices[0].messages} - {b""}
        results = self.runner.run(taken)
        answer.retries = self.counters.retries - retries
        made = _Made(self.job, self.hasher, taken, results, self.sees == "keys")
        made.put(answer, out)
        self.state.committed()
        self.ended = answer.stop is not None

    def _taken(self, rows: dict[int, list[Any]]) -> Taken:
        slices = []
        for number, columns in sorted(rows.items()):
            piece = RowSlice(self.job.entrances[number], [TakenRow(*row) for row in columns])
            slices.append(piece)
            last = piece.rows[-1].index
            if self.sees != "keys" and last - piece.start + 1 != len(columns):
                raise Diverged(
                    f"The messages {piece.start} to {last} of {piece.entrance.queue!r} were taken, and"
                    f" {len(columns)} of them are there.",
                    "restore the directory from a copy.",
                    processor=self.job.node.id,
                )
        counts = {len(piece.rows) for piece in slices}
        if len(counts) > 1:
            raise Diverged(
                f"A step of {self.job.node.id} found different numbers of messages of its inputs: {counts}.",
                "restore the directory from a copy.",
                processor=self.job.node.id,
            )
        return Taken(list(slices), counts.pop())

    def _key_of(self, message: dict[str, Any]) -> bytes:
        try:
            return key_of(self.job.node, message)
        except Exception:
            return b""  # the call reports the error

    def close(self, out: _Rows) -> None:
        if self.runner is not None:
            self.runner.close()
        if self.state is not None and self.state.changes:
            for row, packed in self.state.changes.items():
                out.add(STATE, 0, 0, key_bytes(row), None, packed, row)
            out.answer(TaskResult(-1, 0, changed=len(self.state.changes)))


class _Made:
    """The results of a part, to be written as rows."""

    def __init__(self, job: TaskJob, hasher: Hasher, taken: Taken, results: Results, apart: bool) -> None:
        self.job = job
        self.hasher = hasher
        self.taken = taken
        self.results = results
        self.apart = apart
        """The messages of the part are not consecutive."""
        self.slices: list[RowSlice] = taken.slices  # type: ignore[assignment]

    def put(self, answer: TaskResult, out: _Rows) -> None:
        """Add the rows of the messages and of the failures, and complete the answer."""
        node, batch = self.job.node, bool(self.job.node.options.batch)
        failures = self.results.failures
        stop = self.results.stop(node)
        if stop is not None:
            self.results = self.results.before(stop)
        rows = [row for binding, output in self.results.outputs.items() for row in self._rows(binding, output)]
        if stop is not None:
            answer.stop = self.slices[0].rows[stop].offset, travelling(failures[stop])
        for offset, failure in sorted(self.results.failures.items()):
            rows.append(self._error(offset, failure, batch))
            answer.failed += self.taken.count if batch else 1
            answer.first = answer.first or travelling(failure)
        self._hash(rows, stop)
        for ordinal, (target, offset, value, meta, hash) in enumerate(rows):
            answer.written[target] = answer.written.get(target, 0) + 1
            out.add(MESSAGE, target, self.slices[0].rows[offset].offset, ordinal, hash, value, meta)

    def _rows(self, binding: str, output: Output) -> Iterator[list[Any]]:
        target = self.job.outputs[binding]
        options = self.job.targets[target].options
        traced = not options._strips and any(piece.traced for piece in self.slices)
        origins = range(len(output.items)) if output.origins is None else output.origins
        last_offset, came = -1, _NOWHERE
        for offset, packed in zip(origins, output.items):
            if traced and offset != last_offset:
                last_offset, came = offset, merge([piece.provenance_of(offset) for piece in self.slices])
            meta = came
            if type(packed) is Packed and packed.marked:
                message, meta = batches.split_meta(codec.unpack_known(packed), came)
                packed = codec.pack(message)
            yield [target, offset, packed, meta.encode() if meta and not options._strips else None, None]

    def _error(self, offset: int, failure: Failure, batch: bool) -> list[Any]:
        assert self.job.errors is not None
        span = range(self.taken.count) if batch else (offset,)
        messages = {piece.binding: [piece.pristine(at) for at in span] for piece in self.slices}
        record = error_message(self.job.node, messages, failure)
        came = merge([piece.provenance_of(span[-1]) for piece in self.slices])
        return [self.job.errors, offset, codec.pack(record), came.encode() if came else None, None]

    def _hash(self, rows: list[list[Any]], stop: int | None) -> None:
        """Give each row the delivery hash of its source messages."""
        count = self.taken.count if stop is None else stop
        if self.apart and not self.job.node.options.batch:
            cuts = [Cut(offset, offset + 1, None) for offset in range(count)]
        else:
            cuts = list(self.results.cuts(self.job.node, count))
        digests = [
            digest
            for cut in cuts
            for digest in [self.hasher.digest(self.taken.ranges(cut.start, cut.stop)).hex()] * (cut.stop - cut.start)
        ]
        for row in rows:
            row[4] = digests[row[1]]


_NOWHERE: Final = Provenance(1, {})


class _Rows:
    """The rows that a task gives to Spark, some thousand at a time."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._bytes = 0

    def add(self, *row: Any) -> None:
        self._rows.append(row)
        self._bytes += len(row[5] or b"")

    def answer(self, answer: TaskResult) -> None:
        self.add(ANSWER, 0, answer.part, 0, None, pickle.dumps(answer), None)

    def full(self) -> Iterator[pa.RecordBatch]:
        if len(self._rows) >= _ROWS_OUT or self._bytes >= _BYTES_OUT:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """The remaining rows, in record batches of limited size."""
        rows, self._rows, self._bytes = self._rows, [], 0
        start = size = 0
        for at, row in enumerate(rows):
            size += len(row[5] or b"")
            if at + 1 - start >= _ROWS_OUT or size >= _BYTES_OUT or at + 1 == len(rows):
                columns = [pa.array(column, kind.type) for column, kind in zip(zip(*rows[start : at + 1]), OUT_ARROW)]
                yield pa.RecordBatch.from_arrays(columns, schema=OUT_ARROW)
                start, size = at + 1, 0


def _parts(given: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, dict[int, list[Any]]]]:
    """The rows of each part, by input. The input is sorted by part."""
    every = (row for batch in given for row in zip(*(batch.column(n).to_pylist() for n in range(8))))
    for part, group in itertools.groupby(every, lambda row: row[0]):
        rows: dict[int, list[Any]] = {}
        for _, number, *row in group:
            rows.setdefault(number, []).append(row)
        yield part, rows


class KeyTask:
    """The function of ``mapInArrow`` that computes the part of each message from its key."""

    def __init__(self, packed: bytes, parts: int) -> None:
        self.packed = packed
        self.parts = parts

    def __call__(self, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in given:
            node = unpack_job(self.packed).node
            keys = []
            for value in rows.column("value").to_pylist():
                try:
                    keys.append(key_of(node, codec.unpack(value)))
                except Exception:
                    keys.append(b"")  # the call reports the error
            parts = pa.array([xxhash.xxh3_64_intdigest(key) % self.parts for key in keys], pa.int32())
            at = rows.schema.get_field_index
            rows = rows.set_column(at("part"), "part", parts)
            yield rows.set_column(at("key"), "key", pa.array(keys, pa.binary()))


def key_of(node: Node, message: dict[str, Any]) -> bytes:
    """The packed key of a message. The rows of its state begin with it."""
    return key_part(message_key(node, message))


def key_bytes(row: bytes) -> int:
    """The number of bytes of the key at the beginning of a row of the state."""
    return 17 if row[0] == 0xFF else 1 + row[0]


def _is_repeated() -> bool:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0
