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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import xxhash

from cues import codec
from cues.base import names
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
from cues.steps.process import Process, key_of
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
class TaskJob(Job):
    """The job of a processor over files."""

    entrances: tuple[Entrance, ...]
    targets: tuple[QueueOptions, ...]
    """The options of the queues that a step may write to."""
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
        """True if the state changed."""
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


def run_parts(packed: bytes, sees: Sees, once: bool, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Call the user's function for each part, in ``mapInArrow``.

    ``packed`` is the job. ``once``: a task that Spark repeats is declined.
    """
    out = _Rows()
    work: _Work | None = None
    for part, rows in _parts(given):
        if once and _is_repeated():
            out.answer(TaskResult(part, 0, declined="again"))
            continue
        if work is None:
            work = _Work(unpack_job(packed), sees, rows)
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

    def __init__(self, job: TaskJob, sees: Sees, rows: dict[int, list[Any]]) -> None:
        """``rows`` are those of the first part, which has the state."""
        self.job = job
        self.sees = sees
        self.hasher = Hasher(job.node.id, 0)
        carried = {meta: value for *_, value, meta in rows.pop(STATE_INPUT, ())}
        self.state = CarriedState(job.node.id, carried, sees, set())
        self.runner = runner_of(
            job,
            0,
            self.state,
            lambda binding: job.targets[job.outputs[binding]],
            self.state.call,
            _TaskProcess,
            _RowRunner,
        )
        self.ended = False

    def part(self, number: int, rows: dict[int, list[Any]], out: _Rows) -> None:
        """Call the function for a part, and add its rows and its answer."""
        if self.ended:
            return  # the processor stops before a message of an earlier part
        answer = TaskResult(number, 0)
        with reporting(answer):
            if rows:
                self._run(answer, rows, out)
        self.ended = bool(answer.stop or answer.declined or answer.fatal)
        out.answer(answer)

    def _run(self, answer: TaskResult, rows: dict[int, list[Any]], out: _Rows) -> None:
        pieces = self._pieces(rows)
        taken = Taken(list(pieces), len(pieces[0].rows))
        answer.count = taken.count
        counters = self.runner._counters
        retries = counters.retries
        if self.sees == "keys":
            self.state._keys |= {_key_of(self.job.node, message) for message in pieces[0].messages} - {b""}
        results = self.runner.run(taken)
        answer.retries = counters.retries - retries
        self._put(pieces, taken, results, answer, out)
        self.state.committed()

    def _pieces(self, rows: dict[int, list[Any]]) -> list[RowSlice]:
        """The messages of a part, by input. Raises :class:`Diverged` if some are missing."""
        pieces = []
        for number, columns in sorted(rows.items()):
            piece = RowSlice(self.job.entrances[number], [TakenRow(*row) for row in columns])
            pieces.append(piece)
            last = piece.rows[-1].index
            if self.sees != "keys" and last - piece.start + 1 != len(columns):
                raise self._diverged(
                    f"The messages {piece.start} to {last} of {piece.entrance.queue!r} were taken, but"
                    f" the files have only {len(columns)} of them."
                )
        counts = {len(piece.rows) for piece in pieces}
        if len(counts) > 1:
            raise self._diverged(
                f"The inputs of a step of {self.job.node.id} do not have the same number of messages: {counts}."
            )
        return pieces

    def _diverged(self, text: str) -> Diverged:
        return Diverged(text, "restore the directory from a copy.", processor=self.job.node.id)

    def _put(self, pieces: list[RowSlice], taken: Taken, results: Results, answer: TaskResult, out: _Rows) -> None:
        """Add the rows of the messages and of the failures, and complete the answer."""
        node, batch, count = self.job.node, bool(self.job.node.options.batch), taken.count
        stop = results.stop(node)
        if stop is not None:
            answer.stop = pieces[0].rows[stop].offset, travelling(results.failures[stop])
            results, count = results.before(stop), stop
        rows = [row for binding, output in results.outputs.items() for row in self._rows(binding, output, pieces)]
        for offset, failure in sorted(results.failures.items()):
            assert self.job.errors is not None
            span = range(count) if batch else (offset,)
            messages = {piece.binding: [piece.pristine(at) for at in span] for piece in pieces}
            record = codec.pack(error_message(node, messages, failure))
            came = merge([piece.provenance_of(span[-1]) for piece in pieces])
            rows.append((self.job.errors, offset, record, came.encode() if came else None))
            answer.failed += len(span)
            answer.first = answer.first or travelling(failure)
        if self.sees == "keys" and not batch:  # the messages are not consecutive
            cuts: Iterable[Cut] = (Cut(offset, offset + 1, None) for offset in range(count))
        else:
            cuts = results.cuts(node, count)
        hashes: list[str] = []
        for cut in cuts:
            hashes += [self.hasher.digest(taken.ranges(cut.start, cut.stop)).hex()] * (cut.stop - cut.start)
        for ordinal, (target, offset, value, meta) in enumerate(rows):
            answer.written[target] = answer.written.get(target, 0) + 1
            out.add(MESSAGE, target, pieces[0].rows[offset].offset, ordinal, hashes[offset], value, meta)

    def _rows(
        self, binding: str, output: Output, pieces: list[RowSlice]
    ) -> Iterator[tuple[int, int, bytes, bytes | None]]:
        """The messages of an output: target, offset, value, meta."""
        target = self.job.outputs[binding]
        strips = self.job.targets[target]._strips
        traced = not strips and any(piece.traced for piece in pieces)
        origins = range(len(output.items)) if output.origins is None else output.origins
        last_offset, came = -1, _NOWHERE
        for offset, packed in zip(origins, output.items):
            if traced and offset != last_offset:
                last_offset, came = offset, merge([piece.provenance_of(offset) for piece in pieces])
            meta = came
            if type(packed) is Packed and packed.marked:
                message, meta = batches.split_meta(codec.unpack_known(packed), came)
                packed = codec.pack(message)
            yield target, offset, packed, meta.encode() if meta and not strips else None

    def close(self, out: _Rows) -> None:
        self.runner.close()
        if self.state.changes:
            for row, packed in self.state.changes.items():
                out.add(STATE, 0, 0, key_bytes(row), None, packed, row)
            out.answer(TaskResult(-1, 0, changed=len(self.state.changes)))


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


def add_keys(packed: bytes, parts: int, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Compute the part of each message, one of ``parts``, from its key, in ``mapInArrow``."""
    node = unpack_job(packed).node
    for rows in given:
        keys = [_key_of(node, codec.unpack(value)) for value in rows.column("value").to_pylist()]
        numbers = pa.array([xxhash.xxh3_64_intdigest(key) % parts for key in keys], pa.int32())
        at = rows.schema.get_field_index
        rows = rows.set_column(at("part"), "part", numbers)
        yield rows.set_column(at("key"), "key", pa.array(keys, pa.binary()))


def _key_of(node: Node, message: dict[str, Any]) -> bytes:
    """The packed key of a message. The rows of its state begin with it. Empty if the message has no key."""
    try:
        return key_part(key_of(node, message))
    except Exception:
        return b""  # the call reports the error


def key_bytes(row: bytes) -> int:
    """The number of bytes of the key at the beginning of a row of the state."""
    return 17 if row[0] == 0xFF else 1 + row[0]


def _is_repeated() -> bool:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0
