"""Steps whose function executors call: long ranges of the inputs, cut into stretches.

    driver                                        executors
    takes a range: the work of some seconds
    cuts it into stretches, one a task      ──▶   call the function chunk by chunk, stage pages (pages.py)
    joins their runs into steps             ◀──   the places of the pages
    appends the pages, step by step; each step is one commit of outputs, try log and positions (steps/commit.py)

The driver does not read the messages or the results, so its memory does not grow with the queue. A step is the same
as on every engine, only longer: owner, fence, snapshot, attempt, hash, positions. So a start of any engine continues
after the last commit. Pages that were staged and not committed are swept.

Some work must be done in the driver: state, sinks, side effects, at-most-once and frames. It is done in the usual
steps. So is a range that executors give up: too many messages fail, some are delayed, or some were purged.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cues.base import clock, events
from cues.graphs.options import BATCH_SIZE, TABLE_SIZE
from cues.graphs.processor import Node
from cues.overrides import override
from cues.queues.base import views_of
from cues.queues.queue import Queue
from cues.records.batch import Page
from cues.spark.executor import Stretch, edges_of, pack_job, up_to_stop
from cues.spark.pages import ERRORS, NO_HASH, CommitRun, InputRange, PagesResult, StepJob, run_stretch
from cues.spark.place import Site
from cues.spark.remote import SparkRunner, ranges_of, why_local
from cues.spark.staging import Staged, StagingArea
from cues.steps.failure import stopped_at
from cues.steps.part import Part
from cues.steps.results import pauses
from cues.steps.stepper import Stepper
from cues.steps.taker import Taker
from cues.steps.taking import Input, Slice, Taken
from cues.storage.base_store import BaseStore

RANGE_MESSAGES: Final = 1_000_000
"""Most messages of one job. Every job costs about 0.1 s, which is little for so many messages."""
FIRST_MESSAGES: Final = 20_000
"""Messages of the first job, when the time of a call is not known."""
JOB_S: Final = 10.0
"""Longest time of a job, approximately. If the driver dies before the commit, the calls of the job are repeated."""
STRETCH_MESSAGES: Final = 100_000
"""Most messages of one task. With many messages the cost of a task is small; with too many, cores wait for the last
task."""
COMMIT_VALUES_MAX: Final = 32_768
"""Most LMDB values of one commit, of one page each: 128 MB. The commit holds the store's writer lock for some tenths
of a second, and LMDB keeps its pages in memory."""
FORKED_MESSAGES: Final = 50_000
"""Most messages of one job if messages are for other stores: the driver has these in memory."""
BATCHES_MAX: Final = 1_000
"""Calls of a batch function in one job: each is a step with its record in the try log."""


class Span(Slice):
    """A range of an input whose messages the driver does not read."""

    __slots__ = ("_seal",)

    def __init__(self, input: Input, start: int, stop: int) -> None:
        super().__init__(input, start, stop, [], [])
        with input.log.store.core.view() as txn:
            self._seal = input.log.seal_before(txn, input.log.row(txn), stop)

    @override
    def seal(self) -> bytes:
        return self._seal


class Staging:
    """The pages that a part appends with its hash. Some at a time are read from the staging files."""

    def __init__(self, digest: bytes, staged: list[tuple[Queue, Staged]]) -> None:
        self.digest = digest
        # Views are opened here. Opened inside the transaction, a log would wait for the end of that transaction.
        self.staged = [(views_of(queue), output) for queue, output in staged]

    def __iter__(self) -> Iterator[tuple[Queue, list[Page]]]:
        for views, output in self.staged:
            for partition, pages in output.pages():
                for page in pages:
                    page.tail = self.digest + page.tail[len(NO_HASH) :]
                yield views[partition], pages


class StretchTaker(Taker):
    """Takes long ranges for executors, and the messages of usual steps."""

    def __init__(self, node: Node, *more: Any) -> None:
        super().__init__(node, *more)
        self.most = FIRST_MESSAGES
        """Messages of the next job, adapted to the time of the last one."""
        self.on_executors = why_local(node) is None
        """True if executors call the function. A function that asks for the state of the processor changes it."""
        self.tasks = 1
        """The number of tasks that run at the same time."""
        self.forks = False
        """True if messages go into fork queues."""
        self.given_up: dict[str, int] = {}
        """By tailer: the end of the last range that executors gave up. The driver calls the function up to there."""

    @override
    def take(self, room: int) -> Taken | None:
        """A long range that executors process; or the messages of a usual step, if they are the driver's.

        A range is looked for once. A second look would find messages that came meanwhile, and give them to the driver.
        """
        self._room = room
        given_up = any(input.index < self.given_up.get(input.tailer, 0) for input in self.inputs)
        if not self.on_executors or self.repeats is not None or given_up:
            return self.take_usual()
        return self._range(room)

    def take_usual(self) -> Taken | None:
        """The messages of a usual step."""
        return super().take(self._room)

    def left(self, input: Input, end: int | None) -> int:
        """The number of messages before ``end`` that an input has not taken yet."""
        row = input.queue.core.row()
        return (row.next if end is None else min(end, row.next)) - max(input.index, row.first)

    def _range(self, room: int) -> Taken | None:
        """The ranges of the next job on the inputs. No message is read."""
        size = self.size
        most = min(self.most, FORKED_MESSAGES if self.forks else RANGE_MESSAGES, room)
        if self._node.options.batch:
            most = min(room, size * min(BATCHES_MAX, max(1, most // size)))  # whole batches
        chosen = self.inputs
        if self._node.mode == "alts":
            turns = [(self.served + turn) % len(self.inputs) for turn in range(len(self.inputs))]
            place = next((turn for turn in turns if self.left(self.inputs[turn], None) > 0), 0)
            self.served, chosen = place + 1, [self.inputs[place]]
        count = min(most, *(self.left(input, None) for input in chosen))
        if count <= 0:
            return None
        if self._linger_ns:
            wanted = min(size, most)
            ready = min(input.fill(wanted) for input in chosen)
            if not ready or (ready < wanted and not self._lingered(chosen[0], ready)):
                return None
        self._lingering.pop(chosen[0].tailer, None)
        starts = [max(input.index, input.queue.core.row().first) for input in chosen]
        return Taken([Span(input, start, start + count) for input, start in zip(chosen, starts)], count)

    @property
    def size(self) -> int:
        """Number of messages of one call. Tables have as many rows as the time of a job allows, if no size is set."""
        options = self._node.options
        if self._node.takes_columns and options.batch_size == BATCH_SIZE:
            return max(BATCH_SIZE, min(TABLE_SIZE, self.most // self.tasks))
        return options.batch_size if options.batch else 1

    def pace(self, took_s: float) -> None:
        """Set the size of the next job, so that its time is not too long to be repeated."""
        if took_s < JOB_S / 4:
            self.most = min(self.most * 4, RANGE_MESSAGES)
        elif took_s > JOB_S:
            self.most = max(1, int(self.most * JOB_S / 2 / took_s))


class StretchStepper(Stepper):
    """One processor, whose function executors call over long ranges."""

    takes = StretchTaker

    @override
    def _equip(self) -> None:
        assert isinstance(self.taker, StretchTaker)
        self.ranges = self.taker
        self.ranges.forks = bool(self.forks)
        runner = self.runner
        assert isinstance(runner, SparkRunner)
        self._jobs, self._context = runner.jobs, runner.context
        self.ranges.tasks = int(self._context.defaultParallelism)
        if self.ranges.on_executors:
            self._home_inputs = []  # an idle unit reads no message: executors read them
        self._sites: dict[BaseStore, Site] = {}
        self._staged_for = self.outputs | ({} if self.errors is None else {ERRORS: self.errors})
        self._job: tuple[tuple[int, int], bytes] | None = None
        """Generation and epoch, and the packed job that has them."""

    @override
    def _make(self, taken: Taken) -> None:
        if not isinstance(taken.slices[0], Span):
            super()._make(taken)
            return
        done = False
        try:
            done = self._make_range(taken)
        finally:
            if not done:
                self.committer.drop()
        if not done:
            self.ranges.given_up = {piece.tailer: piece.stop for piece in taken.slices}
            usual = self.ranges.take_usual()
            if usual is not None:
                super()._make(usual)

    def _make_range(self, taken: Taken) -> bool:
        """Let executors process a range, and commit it as several steps. Return False if the driver has to do it."""
        stage = StagingArea(self.store.directory, os.getpid())
        try:
            began = time.monotonic()
            results = self._run_stretches(self.cut(taken), stage, ranges_of(taken))
            self.ranges.pace(time.monotonic() - began)
            if results is None:
                return False
            self._commit_runs(taken, results)
            now_ns = clock.now_ns()
            for shown_ns, count in itertools.chain.from_iterable(result.shown for result in results):
                self.counters.latency.add(max(0, now_ns - shown_ns) // 1000, count)
            return True
        finally:
            stage.clear()

    def _run_stretches(
        self, stretches: list[Stretch], stage: StagingArea, ranges: Mapping[str, tuple[int, int]]
    ) -> list[PagesResult] | None:
        """The results of executors; None if one gave its stretch up.

        Raises the fatal error of a result, :class:`ProcessorStopped` if Spark could not run the job, and
        :class:`Interrupted` if the runner was closed meanwhile.
        """
        call = functools.partial(run_stretch, self._packed_job(), stage, self.ranges.size)
        with self._jobs.step(ranges):
            results: list[PagesResult] = self._context.parallelize(stretches, len(stretches)).map(call).collect()
        for result in results:
            self.counters.retries += result.retries
            if result.fatal is not None:
                raise result.fatal
        declined = {result.declined for result in results}
        if "state" in declined:
            self.ranges.on_executors = False
            text = "uses the processor's state, which is the driver's: it runs there, one call after another"
            self.emit(events.Event(self.node.id, text))
        return None if any(declined) else results

    def cut(self, taken: Taken) -> list[Stretch]:
        """The stretches of a range."""
        reads = []
        for piece in taken.slices:
            queue = piece.input.queue
            if queue.store not in self._sites:
                self._sites[queue.store] = Site.of(queue.store)
            site = self._sites[queue.store]
            reads.append(InputRange(piece.binding, piece.tailer, site, queue.id, piece.input.identity, piece.start))
        edges = edges_of(taken.count, self.ranges.size, self.ranges.tasks, STRETCH_MESSAGES)
        return [
            Stretch(number, low, high - low, tuple(read._replace(start=read.start + low) for read in reads))
            for number, (low, high) in enumerate(itertools.pairwise(edges))
        ]

    def _packed_job(self) -> bytes:
        under = self.builder.hasher.generation, self.fence.row.epoch
        if self._job is None or self._job[0] != under:
            options = {binding: queue.core.options for binding, queue in self.outputs.items()}
            job = StepJob(self.node, self.setting.system, under[1], self.store.id.hex(), under[0], options)
            self._job = under, pack_job(job)
        return self._job[1]

    def _commit_runs(self, taken: Taken, results: list[PagesResult]) -> None:
        """Commit the results of the stretches. Raises :class:`ProcessorStopped` after a failure that no queue takes."""
        results, stop = up_to_stop(results)
        runs = [run for result in results for run in result.runs]
        failed = [place for place, run in enumerate(runs) if run.failure is not None]
        left = self.failures.errors_left()
        if left is not None and len(failed) >= left:  # it pauses after that error message
            runs, stop = runs[: failed[left - 1] + 1], None
        for some in _commits(runs):
            self._commit_some(taken, some)
        if stop is None:
            return
        offset, failure = stop
        if pauses(self.node, failure):  # the driver calls this message, and pauses before it
            self.ranges.given_up = {piece.tailer: piece.start + offset + 1 for piece in taken.slices}
            return
        self.committer.stop = failure
        raise stopped_at(self.node, failure)

    def _commit_some(self, taken: Taken, runs: list[CommitRun]) -> None:
        """One commit, of one or several steps."""
        begin, end = runs[0].start, runs[-1].stop
        parts = [self._staged_part(taken, some) for some in _steps(runs, bool(self.node.options.batch))]
        spans: list[Slice] = [Span(s.input, s.start + begin, s.start + end) for s in taken.slices]
        if self.failures.limits:
            self.failures.note(Taken(spans, end - begin), parts, None)
        self.committer.commit_parts(parts, self.fence.moved(spans))
        if self.failures.rows:
            self.failures.committed()
        self.counters.taken += (end - begin) * len(taken.slices)
        for part in parts:
            self.counters.sizes.add(part.stop - part.start, 1)
        for piece in taken.slices:
            piece.input.go(piece.start + end)
        for run in runs:
            for staged in run.outputs.values():
                staged.drop()

    def _staged_part(self, taken: Taken, runs: list[CommitRun]) -> Part:
        """Runs that commit as one step: between two failures, or one that failed."""
        start, stop = runs[0].start, runs[-1].stop
        digest, taking = self.builder.identify(taken, start, stop)
        # One queue after another: each gets its messages in order, whatever the bindings are.
        staged = [
            (queue, run.outputs[binding])
            for binding, queue in self._staged_for.items()
            for run in runs
            if binding in run.outputs
        ]
        written = sum(output.count for _, output in staged)
        values = sum(output.values for _, output in staged)
        here = Staging(digest, staged)
        # A record of the fork queue has all messages of a step for another store.
        appends = self.builder.at_home(list(here), digest) if self.forks else here
        values += values // 64  # with the branch pages above them
        return Part(start, stop, digest, taking, runs[0].failure, appends, written, values)


def _commits(runs: list[CommitRun]) -> Iterator[list[CommitRun]]:
    """The runs of each commit: as many as fit into one, or a single run that is larger."""
    some: list[CommitRun] = []
    values = 0
    for run in runs:
        size = sum(staged.values for staged in run.outputs.values())
        if some and values + size > COMMIT_VALUES_MAX:
            yield some
            some, values = [], 0
        some.append(run)
        values += size
    if some:
        yield some


def _steps(runs: list[CommitRun], batch: bool) -> Iterator[list[CommitRun]]:
    """The runs of each step: those between two failures. Of a batch function every run is a step."""
    for failed, group in itertools.groupby(runs, lambda run: run.failure is not None):
        some = list(group)
        if failed or batch:
            yield from ([run] for run in some)
        else:
            yield some
