"""What an executor does with its share of a step: rows in, rows out.

    in      part, input, offset, index, time, hash, value, meta     sorted by part, input, offset
    out     kind, target, offset, ordinal, hash, value, meta

A part is what the function is called over at once: of a batch function a batch; of one whose state has keys,
the messages of some keys; else as many messages as there are in a share. The function is called by the same
:class:`Runner` as everywhere. Three kinds of rows come out:

    MESSAGE     for the queue number ``target``: what came of the message at ``offset``, in the order ``ordinal``
    ANSWER      one a part: what the driver has to know of it (:class:`Answer`)
    STATE       a row of the state that changed

An output message carries the delivery hash of what it came from: of the run of messages in its part that no
failure cuts, or, where a key chose the part, of its own message.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import xxhash

from cues import batch as batches
from cues import codec, events, names
from cues.errors import CuesError, Diverged, Fenced, Unsupported
from cues.failure import Failure, error_message, words
from cues.hashes import Hasher
from cues.imperative import Imperative
from cues.options import QueueOptions
from cues.process import Process
from cues.processor import Node
from cues.provenance import Provenance, merge
from cues.results import Output, Results
from cues.runner import Runner
from cues.spark.cluster.rows import Entrance, Row, RowSlice
from cues.spark.remote import travelling
from cues.state import Changes, Table, key_part
from cues.taking import Slice, Taken

if TYPE_CHECKING:
    from cues.store import Store

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
"""The input of rows that are the state's: ``meta`` is the row, ``value`` its packed value."""
_ROWS_OUT: Final = 10_000
_BYTES_OUT: Final = 16 << 20
JOBS_MAX: Final = 64
"""Processors whose functions a worker process keeps unpickled."""
Sees = str
"""What of the state a task may look at: "nothing", "keys" (those of its messages) or "all"."""


@dataclass(frozen=True)
class Target:
    """A queue that a step may write to."""

    queue: str
    options: QueueOptions


@dataclass(frozen=True)
class Job:
    """What does not change from step to step."""

    node: Node
    system: Any
    epoch: int
    store_id: str
    entrances: tuple[Entrance, ...]
    targets: tuple[Target, ...]
    outputs: dict[str, int]
    """The number of the target, by output binding."""
    errors: int | None
    """The target for messages that failed for good."""


@dataclass
class Answer:
    """What came of a part; offsets are the step's."""

    part: int
    count: int
    """Messages that the part had."""
    written: dict[int, int] = field(default_factory=dict)
    """Messages by target."""
    failed: int = 0
    first: Failure | None = None
    """The first of them."""
    stop: tuple[int, Failure] | None = None
    """Where the processor stops: a message failed for good, and there is no error queue."""
    retries: int = 0
    changed: int = 0
    """Rows of the state."""
    declined: str = ""
    """ "state": the function asked for state that the task does not have; "again": a task that must not be
    repeated was. Nothing else counts then."""
    fatal: BaseException | None = None


@dataclass
class Ran:
    """What came of a step's function."""

    folder: str
    answers: list[Answer] = field(default_factory=list)

    @property
    def stop(self) -> tuple[int, Failure] | None:
        """Where the processor stops, and why."""
        return min((one.stop for one in self.answers if one.stop is not None), default=None, key=lambda stop: stop[0])

    @property
    def changed(self) -> bool:
        """Whether the state changed."""
        return any(one.changed for one in self.answers)


class _NeedsState(BaseException):
    """No ``Exception``: the user's own handlers, and retries, are not to take it for a failure."""


class CarriedState(Table):
    """The state that a task was given, and what its calls change."""

    def __init__(self, processor: str, rows: dict[bytes, bytes], sees: Sees, keys: set[bytes]) -> None:
        super().__init__(_NO_STORE, processor)
        self._missing = True  # there is nothing to look into behind these rows
        self._rows = rows
        self._sees = sees
        self._keys = keys
        self.changes: Changes = {}

    def packed(self, row: bytes) -> bytes | None:
        self._check(row)
        return self._step[row] if row in self._step else self._rows.get(row)

    def rows(self, prefix: bytes) -> dict[bytes, bool]:
        self._check(prefix)
        found = {row: True for row in self._rows if row.startswith(prefix)}
        found |= {row: packed is not None for row, packed in self._step.items() if row.startswith(prefix)}
        return found

    def forget(self) -> None:
        self.call.discard()
        self._step.clear()

    def committed(self) -> None:
        """The part is done: the next one sees what it changed."""
        for row, packed in self._step.items():
            self.changes[row] = packed
            if packed is None:
                self._rows.pop(row, None)
            else:
                self._rows[row] = packed
        self._step.clear()

    def _check(self, row: bytes) -> None:
        if self._sees == "nothing" or (self._sees == "keys" and row[: key_bytes(row)] not in self._keys):
            raise _NeedsState


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
        found = merge([one.provenance_of(offset) for one in slices]).at(0)
        hash = slices[0].rows[offset].hash
        if hash is not None:
            found[names.HASH] = hash
        return found


class Task:
    """The function of ``mapInArrow``: calls the user's function over the parts that it is given."""

    def __init__(self, packed: bytes, sees: Sees, once: bool) -> None:
        """``packed`` is the job; ``once``: a task that Spark repeats is declined."""
        self.packed = packed
        self.sees = sees
        self.once = once

    def __call__(self, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        out = _Rows()
        work: _Work | None = None
        for part, rows in _parts(given):
            if self.once and _is_repeated():
                out.answer(Answer(part, 0, declined="again"))
                continue
            if work is None:
                work = _Work(_job(self.packed), self.sees)
            work.part(part, rows, out)
            yield from out.full()
        if work is not None:
            work.close(out)
        yield from out.rest()


class _Work:
    """One task: its runner, its state, and part after part."""

    def __init__(self, job: Job, sees: Sees) -> None:
        self.job = job
        self.sees = sees
        self.hasher = Hasher(job.node.id, 0)
        self.counters = events.Counters()
        self.state: CarriedState | None = None
        self.runner: Runner | None = None
        self.ended = False

    def part(self, number: int, rows: dict[int, list[Any]], out: _Rows) -> None:
        """Call the function over a part; rows and an answer come of it."""
        if self.ended:
            return  # the processor stops in front of a message of a part before this one
        answer = Answer(number, 0)
        try:
            if self.state is None:
                self._begin(rows)
            rows.pop(STATE_INPUT, None)
            if rows:
                self._run(answer, rows, out)
        except _NeedsState:
            answer.declined, self.ended = "state", True
        except (Fenced, Diverged, Unsupported) as error:
            answer.fatal, self.ended = error, True
        out.answer(answer)

    def _begin(self, rows: dict[int, list[Any]]) -> None:
        job = self.job
        carried = {meta: value for *_, value, meta in rows.get(STATE_INPUT, ())}
        self.state = CarriedState(job.node.id, carried, self.sees, set())
        imperative = Imperative(job.node.id, {}, {})
        self.process = _TaskProcess(
            job.node, job.system, self.hasher, job.epoch, job.store_id, self.state.call, lambda: False, imperative
        )
        self.runner = Runner(
            job.node,
            self.process,
            self.state,
            _pause,
            lambda event: None,
            self.counters,
            lambda binding: job.targets[job.outputs[binding]].options,
            imperative,
        )

    def _run(self, answer: Answer, rows: dict[int, list[Any]], out: _Rows) -> None:
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
        if made.dropped:
            self.state.forget()
        self.state.committed()
        self.ended = answer.stop is not None

    def _taken(self, rows: dict[int, list[Any]]) -> Taken:
        slices = []
        for number, found in sorted(rows.items()):
            one = RowSlice(self.job.entrances[number], [Row(*row) for row in found])
            slices.append(one)
            if self.sees != "keys" and one.rows[-1].index - one.start + 1 != len(found):
                raise Diverged(
                    f"The messages {one.start} to {one.rows[-1].index} of {one.entrance.queue!r} were taken, and"
                    f" {len(found)} of them are there.",
                    "a copy of the directory.",
                    processor=self.job.node.id,
                )
        counts = {len(one.rows) for one in slices}
        if len(counts) > 1:
            raise Diverged(
                f"A step of {self.job.node.id} found {counts} messages of its inputs.",
                "a copy of the directory.",
                processor=self.job.node.id,
            )
        return Taken(list(slices), counts.pop())

    def _key_of(self, message: dict[str, Any]) -> bytes:
        try:
            return key_of(self.job.node, message)
        except Exception:
            return b""  # the call will fail of it

    def close(self, out: _Rows) -> None:
        if self.runner is not None:
            self.runner.close()
        if self.state is not None and self.state.changes:
            for row, packed in self.state.changes.items():
                out.add(STATE, 0, 0, key_bytes(row), None, packed, row)
            out.answer(Answer(-1, 0, changed=len(self.state.changes)))


class _Made:
    """What came of a part, on its way into rows."""

    def __init__(self, job: Job, hasher: Hasher, taken: Taken, results: Results, apart: bool) -> None:
        self.job = job
        self.hasher = hasher
        self.taken = taken
        self.results = results
        self.apart = apart
        """The messages do not follow one another."""
        self.slices: list[RowSlice] = taken.slices  # type: ignore[assignment]
        self.dropped = False
        """A batch function returned what cannot be written: what it did to the state does not count."""
        self._digests: dict[int, str] = {}

    def put(self, answer: Answer, out: _Rows) -> None:
        """Rows of the messages, and of the failures; what the answer says of them."""
        batch = bool(self.job.node.options.batch)
        while True:
            failures = self.results.failures
            stop = min(failures) if failures and self.job.errors is None else None
            if batch and failures:
                self.results.outputs = {}
            elif stop is not None:
                self.results = self.results.before(stop)
            try:
                rows = [row for binding, output in self.results.outputs.items() for row in self._rows(binding, output)]
                break
            except _Unwritable as found:
                self.dropped = batch
                failures[found.offset] = Failure(found.error, 1)
                self.results.fail(found.offset, failures[found.offset])
                self.results.failures = failures
        if stop is not None:
            answer.stop = self.slices[0].rows[stop].offset, travelling(failures[stop])
        else:
            for offset in sorted(failures):
                rows.append(self._error(offset, failures[offset], batch))
                answer.failed += self.taken.count if batch else 1
                answer.first = answer.first or travelling(failures[offset])
        self._hash(rows, failures, stop, batch)
        for ordinal, (target, offset, value, meta, hash) in enumerate(rows):
            answer.written[target] = answer.written.get(target, 0) + 1
            out.add(MESSAGE, target, self.slices[0].rows[offset].offset, ordinal, hash, value, meta)

    def _rows(self, binding: str, output: Output) -> Iterator[list[Any]]:
        target = self.job.outputs[binding]
        options = self.job.targets[target].options
        traced = not options.strips and any(one.traced for one in self.slices)
        origins = range(len(output.items)) if output.origins is None else output.origins
        last_offset, came = -1, _NOWHERE
        for offset, item in zip(origins, output.items):
            try:
                packed = (
                    item
                    if isinstance(item, bytes)
                    else batches.pack_one(item, options.max_message_bytes, options.strips)
                )
                if traced and offset != last_offset:
                    last_offset, came = offset, merge([one.provenance_of(offset) for one in self.slices])
                meta = came
                if not isinstance(packed, bytes):
                    message, meta = batches.split_meta(packed, came)
                    packed = codec.pack(message)
                yield [target, offset, packed, meta.encode() if meta and not options.strips else None, None]
            except CuesError as error:
                raise _Unwritable(offset, error) from error

    def _error(self, offset: int, failure: Failure, batch: bool) -> list[Any]:
        assert self.job.errors is not None
        span = range(self.taken.count) if batch else (offset,)
        messages = {one.binding: [one.pristine(at) for at in span] for one in self.slices}
        record = error_message(self.job.node, messages, failure)
        came = merge([one.provenance_of(span[-1]) for one in self.slices])
        return [self.job.errors, offset, codec.pack(record), came.encode() if came else None, None]

    def _hash(self, rows: list[list[Any]], failures: Iterable[int], stop: int | None, batch: bool) -> None:
        """Give each row the hash of what it came from."""
        count = self.taken.count
        if batch:
            edges = [0, count]
        elif self.apart:
            edges = list(range(count + 1))
        else:
            cuts = {0, stop if stop is not None else count}
            for offset in failures:
                cuts |= {offset, offset + 1}
            edges = sorted(cuts)
        places = {}
        for low, high in itertools.pairwise(edges):
            for offset in range(low, high):
                places[offset] = low, high
        for row in rows:
            low, high = places[row[1]]
            if low not in self._digests:
                self._digests[low] = self.hasher.digest(self.taken.ranges(low, high)).hex()
            row[4] = self._digests[low]


_NOWHERE: Final = Provenance(1, {})


class _Unwritable(Exception):
    def __init__(self, offset: int, error: Exception) -> None:
        super().__init__(words(error))
        self.offset = offset
        self.error = error


class _Rows:
    """Rows out, some thousand at a time."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._bytes = 0

    def add(self, *row: Any) -> None:
        self._rows.append(row)
        self._bytes += len(row[5] or b"")

    def answer(self, answer: Answer) -> None:
        self.add(ANSWER, 0, answer.part, 0, None, pickle.dumps(answer), None)

    def full(self) -> Iterator[pa.RecordBatch]:
        if len(self._rows) >= _ROWS_OUT or self._bytes >= _BYTES_OUT:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """What is there, in pieces of bounded size."""
        rows, self._rows, self._bytes = self._rows, [], 0
        start = size = 0
        for at, row in enumerate(rows):
            size += len(row[5] or b"")
            if at + 1 - start >= _ROWS_OUT or size >= _BYTES_OUT or at + 1 == len(rows):
                columns = [pa.array(column, kind.type) for column, kind in zip(zip(*rows[start : at + 1]), OUT_ARROW)]
                yield pa.RecordBatch.from_arrays(columns, schema=OUT_ARROW)
                start, size = at + 1, 0


def _parts(given: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, dict[int, list[Any]]]]:
    """The rows of each part by input, as they come: sorted by part."""
    now: int | None = None
    rows: dict[int, list[Any]] = {}
    for found in given:
        columns = [found.column(n).to_pylist() for n in range(8)]
        for part, number, *row in zip(*columns):
            if part != now:
                if now is not None:
                    yield now, rows
                now, rows = part, {}
            rows.setdefault(number, []).append(row)
    if now is not None:
        yield now, rows


class KeyTask:
    """The function of ``mapInArrow`` that says in which part a message is, by its key."""

    def __init__(self, packed: bytes, parts: int) -> None:
        self.packed = packed
        self.parts = parts

    def __call__(self, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for found in given:
            node = _job(self.packed).node
            keys = []
            for value in found.column("value").to_pylist():
                try:
                    keys.append(key_of(node, codec.unpack(value)))
                except Exception:
                    keys.append(b"")  # the call will fail of it
            parts = pa.array([xxhash.xxh3_64_intdigest(key) % self.parts for key in keys], pa.int32())
            at = found.schema.get_field_index
            found = found.set_column(at("part"), "part", parts)
            yield found.set_column(at("key"), "key", pa.array(keys, pa.binary()))


def key_of(node: Node, message: dict[str, Any]) -> bytes:
    """The packed key of a message, as the rows of its state begin."""
    key: str | Callable[[dict[str, Any]], Any] | None = node.options.key
    if key is None:
        return key_part(None)
    return key_part(message.get(key) if isinstance(key, str) else key(message))


def key_bytes(row: bytes) -> int:
    """How many bytes of a state's row are its key."""
    return 17 if row[0] == 0xFF else 1 + row[0]


_jobs: dict[bytes, Job] = {}


def _job(packed: bytes) -> Job:
    key = xxhash.xxh3_128_digest(packed)
    if key not in _jobs:
        if len(_jobs) >= JOBS_MAX:
            _jobs.clear()
        _jobs[key] = pickle.loads(packed)
    return _jobs[key]


def _is_repeated() -> bool:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def _pause(seconds: float) -> bool:
    import time

    time.sleep(seconds)
    return False
