"""A step's function on Spark: executors call it over parts of the step's range, the driver commits.

    driver                                  executors
    takes a range (steps/taking.py)
    cuts it into parts, one a core    ──▶   read their part from the store, call the function, encode
    joins their results               ◀──   outputs with the offsets of their messages, failures
    commits (steps/commit.py)

Everything durable happens in the driver, by the same code as in the embedded engine. A step has the same hash. The
work of an executor that dies does not count, and Spark runs its part again. Within a part the function is called for
one message after another, by the same :class:`Runner`.

Not guaranteed: that a function is called once. Therefore functions with side effects, and functions that need the
processor's state, are called in the driver.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from cues import faults
from cues.base import clock, events
from cues.errors import Diverged, Unsupported
from cues.graphs.processor import BATCH_SIZE, Node
from cues.overrides import override
from cues.queues.options import QueueOptions
from cues.queues.store import Store
from cues.spark.executor import (
    Job,
    JobGroup,
    NeedsState,
    PartReport,
    is_of_spark,
    pack_job,
    reporting,
    runner_of,
    travelling,
    unpack_job,
)
from cues.spark.place import Site
from cues.spark.session import in_short
from cues.steps.failure import Failure
from cues.steps.halving import halves
from cues.steps.pace import Pace
from cues.steps.process import Process
from cues.steps.results import Output, Results
from cues.steps.runner import Runner, StepAborted
from cues.steps.state import Layer, StateTable
from cues.steps.taking import Input, Slice, Taken
from cues.storage.base_store import BaseStore

STEP_MESSAGES: Final = 50_000
"""Most messages of a step of a message function. Every job costs about 50 ms, even without messages."""
STEP_S: Final = 5.0
"""Least time of such a step if calls are slow: many times the fixed cost of a job."""


class InputRange(NamedTuple):
    """The messages of a part on one input, beginning at ``start``."""

    binding: str
    tailer: str
    site: Site
    queue: str
    identity: bytes
    start: int


class StepPart(NamedTuple):
    """A part of a step's range."""

    offset: int
    """Offset of its first message in the step."""
    messages: int
    pieces: tuple[InputRange, ...]
    hash: bytes | None
    """The hash of the step, if the part is the whole step (batch functions)."""
    halved: bool = False
    """True if its messages failed together with others (halving.py)."""

    def halves(self) -> Iterator[StepPart]:
        """The two parts that a batch is divided into after it failed."""
        for low, high in ((0, self.messages // 2), (self.messages // 2, self.messages)):
            pieces = tuple(piece._replace(start=piece.start + low) for piece in self.pieces)
            yield StepPart(self.offset + low, high - low, pieces, None, True)


@dataclass(frozen=True)
class StepJob(Job):
    """The job of a processor over a store."""

    generation: int
    options: dict[str, QueueOptions]
    """By output binding."""


Answering = TypeVar("Answering", bound=PartReport)


@dataclass
class PartResult(PartReport):
    """The results of a part. Offsets count from the start of the part."""

    outputs: dict[str, Output] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    ran: int = 0
    halves: tuple[PartResult, ...] = ()
    """The results of its halves, if it is a batch that failed and is divided."""
    messages: int = 0

    def flat(self, start: int) -> Iterator[tuple[int, PartResult]]:
        """The results of all parts that it was divided into, each with the index of its first message."""
        for half in self.halves:
            yield start, half
            yield from half.flat(start)
            start += half.messages


# --- in an executor -----------------------------------------------------------------------------


class _RemoteProcess(Process):
    """``process`` without state."""

    @override
    def _states(self) -> Layer:
        raise NeedsState


_stores: dict[tuple[int, Site, tuple[int, int]], Store] = {}
"""By process (workers are forked), place, and device and inode."""


def run_part(packed: bytes, part: StepPart) -> PartResult:
    """Call the function over a part."""
    answer = PartResult()
    with reporting(answer):
        job: StepJob = unpack_job(packed)
        runner = remote_runner(job, part)
        with contextlib.closing(runner):
            answer = _run_part(job, runner, part)
        answer.retries = runner._counters.retries
    return answer


def _run_part(job: StepJob, runner: Runner, part: StepPart) -> PartResult:
    taken = _take(part)
    if taken is None:
        return PartResult(declined="purged")
    results = runner.run(taken)
    failures = {offset: travelling(failure) for offset, failure in results.failures.items()}
    answer = PartResult(outputs=results.outputs, failures=failures, ran=results.ran, messages=taken.count)
    if halves(job.node, taken.count, results):  # the driver asks for these parts next: here they cost no job
        divided = tuple(_run_part(job, runner, half) for half in part.halves())
        if not any(half.declined for half in divided):
            answer.halves = divided
    return answer


def remote_runner(job: StepJob, part: StepPart) -> Runner:
    """The runner that calls the job's function without state."""
    state = StateTable(_store(part.pieces[0].site), job.node.key)  # never read
    return runner_of(job, job.generation, state, job.options.__getitem__, process_type=_RemoteProcess)


def inputs_of(part: StepPart) -> list[Input]:
    """The inputs of a part, at its first message. Raises :class:`Diverged` and :class:`Unsupported`."""
    inputs = []
    for piece in part.pieces:
        input = Input(piece.binding, piece.tailer, _store(piece.site).queue(piece.queue))
        input.identity = piece.identity
        if input.queue._row().identity != piece.identity:
            raise Diverged(
                f"The queue {piece.queue!r} of {piece.site.path} is another one here than in the driver.",
                "use a store that driver and executors share.",
                processor=piece.tailer.rpartition(".")[0],
            )
        input.go(piece.start)
        inputs.append(input)
    return inputs


def _take(part: StepPart) -> Taken | None:
    """The messages of a part; None if some were purged since the driver took them."""
    slices = []
    for piece, input in zip(part.pieces, inputs_of(part)):
        whole = take_whole(input, piece.start, part.messages)
        if whole is None:
            return None
        slices.append(whole)
    return Taken(slices, part.messages, part.hash, part=part.halved)


def take_whole(input: Input, start: int, count: int) -> Slice | None:
    """Take ``count`` messages of an input that is at ``start``; None if some of them are purged."""
    while input.ahead < count:
        before = input.ahead
        input.fill(count)
        if input.ahead == before or input.index != start:
            return None
    return input.take(count)


def _store(site: Site) -> Store:
    key = os.getpid(), site, site.inode()
    if key not in _stores:
        _stores[key] = site.open()
    return _stores[key]


def _look(sites: Sequence[Site]) -> Unsupported | None:
    """The reason why this process cannot read the stores; None if it can."""
    try:
        for site in sites:
            _store(site)
    except Unsupported as error:
        return error
    return None


# --- in the driver ------------------------------------------------------------------------------


class SparkRunner(Runner):
    """Calls a function on the executors of a SparkSession, if this changes only the place of the calls."""

    def __init__(self, session: Any, system: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._session = session
        self._context = session.sparkContext
        self._system = system
        self._jobs = JobGroup(self._context, self._node.id, f"cues {self._node.id} {id(self)}")
        self._local = why_local(self._node) is not None
        self._sites: dict[BaseStore, Site] = {}
        if not self._local and not self._node.options.batch:
            most = max(self._node.options.batch_size, STEP_MESSAGES)
            step_s = self._node.options.step_s
            bound_s = None if step_s is None else max(step_s, STEP_S)
            self.pace = Pace(most, bound_s, small=True, least=BATCH_SIZE, fixed=True)
        self._divided: dict[tuple[str, int, int], PartResult] = {}
        """The results of the parts of a batch that failed, by tailer, index and count."""
        self._job: tuple[tuple[int, int], bytes] | None = None
        """Generation and epoch, and the packed job that has them."""

    @override
    def run(self, taken: Taken, bounded: bool = False) -> Results:
        if self._local:
            return super().run(taken, bounded)
        began = clock.monotonic_ns()
        try:
            results = self._on_executors(taken)
        except BaseException:
            self.forget()
            raise
        if results is None:
            return super().run(taken, bounded)
        self.pace.ran(taken.count, clock.monotonic_ns() - began)
        return results

    @override
    def close(self) -> None:
        """Give up a step under way."""
        self._jobs.cancelled = True
        super().close()
        if not self._local:
            self._jobs.cancel()

    @override
    def _call_batch(self, taken: Taken, process: Process) -> Any:
        """Call a frame with a DataFrame of the step's range. The rows of the DataFrame that it returns are messages."""
        if self._node.kind != "frame":
            return super()._call_batch(taken, process)
        from cues.spark.columns import frame_encoder
        from cues.spark.plans import fields_of

        (piece,) = taken.slices
        queue = piece.input.queue
        reader = self._session.read.format("cues")
        reader = reader.option("startingPosition", piece.start).option("endingPosition", piece.stop)
        fields = fields_of(self._node, self._node.inputs[0].binding)
        if fields:
            reader = reader.option("fields", fields)
        given = reader.load(f"{os.path.abspath(queue.store.path)}#{queue.id}")
        faults.point("function.before")
        try:
            result = self._invoke(taken, [given], self._process)
            encoder = frame_encoder(self._node.id, result)
            messages = [message for rows in result.toArrow().to_batches() for message in encoder.messages(rows)]
        except Exception as error:
            if is_of_spark(error):  # no message failed
                raise StepAborted(self._jobs.failed(error, f"of {taken.count} messages")) from None
            raise
        faults.point("function.after")
        return messages

    def _on_executors(self, taken: Taken) -> Results | None:
        """The results of the step; None if the driver has to run it."""
        count = 1 if self._node.options.batch else min(taken.count, self.parallelism)
        parts = self.cut(taken, [taken.count * number // count for number in range(count + 1)])
        first = taken.slices[0]
        known = self._divided.pop((first.tailer, first.start, taken.count), None) if taken.part else None
        if known is not None:
            return together(self._bindings, parts, [known])
        answers = self.gather(functools.partial(run_part, self.packed_job()), parts)
        if answers is None:
            return None
        if self._node.options.batch:
            pieces = answers[0].flat(first.start)
            self._divided = {(first.tailer, start, some.messages): some for start, some in pieces}
        return together(self._bindings, parts, answers)

    @property
    def on_executors(self) -> bool:
        """True if executors call the function, each over a part of the messages."""
        return not self._local and self._node.kind != "frame"

    @property
    def parallelism(self) -> int:
        """Number of tasks that run at once."""
        return int(self._context.defaultParallelism)

    def gather(self, call: Callable[[StepPart], Answering], parts: list[StepPart]) -> list[Answering] | None:
        """The executors' answers for the parts; None if one declined, and the driver has to run the step.

        Raises the fatal error of an answer, :class:`ProcessorStopped` if Spark could not run the jobs, and
        :class:`Interrupted` if this runner was closed meanwhile.
        """
        count = sum(part.messages for part in parts)
        with self._jobs.step(f"{self._node.id}: {count} messages", f"of {count} messages"):
            answers: list[Answering] = self._context.parallelize(parts, len(parts)).map(call).collect()
        for answer in answers:
            self._counters.retries += answer.retries
            if answer.fatal is not None:
                raise answer.fatal
            if answer.declined == "state":
                self._local = True
                self.pace = self._pace()
                text = "uses the processor's state, which is the driver's: it runs there, one call after another"
                self._emit(events.Event(self._node.id, text))
                return None
        return None if any(answer.declined for answer in answers) else answers

    def cut(self, taken: Taken, edges: list[int]) -> list[StepPart]:
        """The parts of ``taken`` between these offsets."""
        return [
            StepPart(
                low,
                high - low,
                tuple(
                    InputRange(
                        piece.binding,
                        piece.tailer,
                        self._site(piece.input.queue.store),
                        piece.input.queue.id,
                        piece.input.identity,
                        piece.start + low,
                    )
                    for piece in taken.slices
                ),
                taken.hash if len(edges) == 2 else None,
                taken.part,
            )
            for low, high in itertools.pairwise(edges)
        ]

    def _site(self, store: BaseStore) -> Site:
        if store not in self._sites:
            self._sites[store] = Site.of(store)
        return self._sites[store]

    def packed_job(self) -> bytes:
        process = self._process
        under = (process._hasher.generation, process._epoch)
        if self._job is None or self._job[0] != under:
            generation, epoch = under
            options = {binding: self._options_of(binding) for binding in self._bindings}
            job = StepJob(self._node, self._system, epoch, process._store_id, generation, options)
            self._job = under, pack_job(job)
        return self._job[1]


def require_sight(context: Any, stores: Iterable[Store]) -> None:
    """Raise :class:`Unsupported` if an executor cannot read the stores. One task for each core tries to."""
    sites = [Site.of(store) for store in stores]
    cores = int(context.defaultParallelism)
    try:
        errors: list[Unsupported | None] = context.parallelize([sites] * cores, cores).map(_look).collect()
    except Exception as error:
        raise Unsupported(
            f"The executors of {context.master} cannot run the tasks of Cues: {in_short(error)}.",
            "install the driver's Python and packages, cues among them, on every machine.",
        ) from None
    for unseen in filter(None, errors):
        raise unseen


def why_local(node: Node) -> str | None:
    """The reason why a processor's function runs in the driver; None if executors call it."""
    if node.kind == "source":
        return "a source has one generator"
    if node.kind == "sink" or node.side_effects:
        return "its effects outside happen in order"
    if node.at_most_once:
        return "executors repeat tasks that fail"
    if node.options.key is not None:
        return "its state is in the driver's store"
    if node.kind == "frame":
        return "it makes a plan, which executors carry out"
    return None


def together(bindings: Iterable[str], parts: Sequence[StepPart], answers: Sequence[PartResult]) -> Results:
    """The results of the parts as those of one step, in the order of its messages."""
    failures = {
        part.offset + offset: failure
        for part, answer in zip(parts, answers)
        for offset, failure in answer.failures.items()
    }
    outputs: dict[str, Output] = {}
    for binding in bindings:
        items: list[bytes] = []
        origins: list[int] | None = []
        if not failures and all(answer.outputs[binding].origins is None for answer in answers):
            origins = None
        for part, answer in zip(parts, answers):
            output = answer.outputs[binding]
            items += output.items
            if origins is not None:
                offsets = range(len(output.items)) if output.origins is None else output.origins
                origins += [part.offset + offset for offset in offsets]
        outputs[binding] = Output(items, origins)
    return Results(outputs, failures, ran=sum(answer.ran for answer in answers))
