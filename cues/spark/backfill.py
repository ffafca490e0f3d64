"""A backfill: the graph's functions process all messages that are on the queues, in long steps.

    graph.start(engine="spark", backfill=True)

One processor works at a time, each after those that it gets messages from. Then the first works again, until no
processor has messages left (error queues and cycles bring messages back). Sources do not run. Then the graph ends.

    driver                                        executors
    takes a range: the work of some seconds
    cuts it into stretches, one a task      ──▶   call the function chunk by chunk, stage pages (chunk.py)
    joins their runs into steps             ◀──   the places of the pages, and the failures
    appends the pages, step by step; each step is one commit of outputs, try log and positions (steps/commit.py)

The driver does not read the messages or the results, so its memory does not grow with the queue. A step is the same
as on every engine, only longer: owner, fence, snapshot, attempt, hash, positions. So a backfill that is killed has
done whole steps. The next start, of any engine, continues after them. Pages that were staged and not committed are
swept.

Some work must be done in the driver: state, sinks, side effects, at-most-once, frames, and outputs in other stores. It
is done in the usual steps. So is the rest of a range in which too many messages fail.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cues import faults
from cues.engine.engine import Host
from cues.engine.threads import Worker
from cues.errors import GraphError
from cues.graphs.graph import Graph
from cues.graphs.processor import Node
from cues.overrides import override
from cues.queues.queue import Queue
from cues.records.batch import Page
from cues.spark import staging
from cues.spark.chunk import NO_HASH, CommitRun, run_stretch
from cues.spark.driver import SparkEngine
from cues.spark.remote import SparkRunner, take_whole
from cues.spark.staging import Staged, StagingArea
from cues.steps.failure import Failure, stopped_at
from cues.steps.feed import SourceStepper
from cues.steps.parts import Part
from cues.steps.stepper import Outcome, Stepper
from cues.steps.taking import Input, Slice, Taken

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
LOOK_S: Final = 0.2
"""Longest wait of a thread for its turn before it checks that the graph is not halted."""
BATCHES_MAX: Final = 1_000
"""Calls of a batch function in one job: each is a step with its record in the try log."""


class Span(Slice):
    """A range of an input whose messages the driver does not read."""

    __slots__ = ("_seal",)

    def __init__(self, input: Input, start: int, stop: int) -> None:
        super().__init__(input, start, [], [])
        self.stop = stop
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
        self.staged = [(queue._views, output) for queue, output in staged]

    def __iter__(self) -> Iterator[tuple[Queue, list[Page]]]:
        for views, output in self.staged:
            for partition, pages in output.pages():
                for page in pages:
                    page.tail = self.digest + page.tail[len(NO_HASH) :]
                yield views[partition], pages


class StagedPart(Part):
    """A part whose pages are not in memory."""

    staged = 0
    """Number of LMDB values."""

    @override
    def values(self) -> int:
        return self.staged + self.staged // 64  # with the branch pages above them


class BackfillStepper(Stepper):
    """One processor, whose function executors call over long ranges."""

    _most = FIRST_MESSAGES
    """Messages of the next job, adapted to the time of the last one."""

    @override
    def step(self) -> Outcome:
        """Process a long range, as several steps; or make one usual step, if executors cannot do it."""
        runner = self.runner
        assert isinstance(runner, SparkRunner)
        # A bounded output: usual steps, because a long range would exceed the bound by far.
        if (
            self.gate.bounded
            or not runner.on_executors
            or self.forks
            or self._pending is not None
            or self._stop is not None
        ):
            return super().step()
        taken = self._range()
        if taken is None:
            return super().step()  # which returns "idle"
        stage = StagingArea(self.store.directory, os.getpid())
        try:
            if faults.active:
                faults.point("take.after")
            began = time.monotonic()
            edges = _edges(taken.count, self._size, runner.parallelism)
            call = functools.partial(run_stretch, runner.packed_job(), stage)
            results = runner.gather(call, runner.cut(taken, edges))
            self._pace(time.monotonic() - began)
            if results is None or not self._commit_runs(taken, [run for result in results for run in result.runs]):
                self._step_dropped()
                return super().step()
        except BaseException:
            self._step_dropped()
            raise
        finally:
            stage.clear()
        return "committed"

    def left(self, input: Input, end: int | None) -> int:
        """The number of messages before ``end`` that an input has not taken yet."""
        row = input.queue._row()
        return (row.next if end is None else min(end, row.next)) - max(input.index, row.first)

    def _range(self) -> Taken | None:
        """The ranges of the next job on the inputs. No message is read."""
        size = self._size
        most = min(self._most, RANGE_MESSAGES)
        if self.node.options.batch:
            most = size * min(BATCHES_MAX, max(1, most // size))  # whole batches
        chosen = self.inputs
        if self.node.mode == "alts":
            turns = [(self._served + turn) % len(self.inputs) for turn in range(len(self.inputs))]
            place = next((turn for turn in turns if self.left(self.inputs[turn], None) > 0), 0)
            self._served, chosen = place + 1, [self.inputs[place]]
        count = min(most, *(self.left(input, None) for input in chosen))
        if count <= 0:
            return None
        starts = [max(input.index, input.queue._row().first) for input in chosen]
        return Taken([Span(input, start, start + count) for input, start in zip(chosen, starts)], count)

    @property
    def _size(self) -> int:
        """Number of messages of one call."""
        return self.node.options.batch_size if self.node.options.batch else 1

    def _pace(self, took_s: float) -> None:
        """Set the size of the next job, so that its time is not too long to be repeated."""
        if took_s < JOB_S / 4:
            self._most = min(self._most * 4, RANGE_MESSAGES)
        elif took_s > JOB_S:
            self._most = max(1, int(self._most * JOB_S / 2 / took_s))

    def _commit_runs(self, taken: Taken, runs: list[CommitRun]) -> bool:
        """Commit the results of the stretches. Return False if a failed message was purged, and cannot be reported."""
        stop = None
        if self.errors is None:
            ran = list(itertools.takewhile(lambda run: run.failure is None, runs))
            stop = runs[len(ran)].failure if len(ran) < len(runs) else None
            runs = ran
        for some in _commits(runs):
            if not self._commit_some(taken, some):
                return False
        if stop is not None:
            self._stop = stop
            raise stopped_at(self.node, stop)
        return True

    def _commit_some(self, taken: Taken, runs: list[CommitRun]) -> bool:
        """One commit, of one or several steps."""
        begin, end = runs[0].start, runs[-1].stop
        parts = []
        for some in _steps(runs, bool(self.node.options.batch)):
            failure = some[0].failure
            part = self._staged_part(taken, some) if failure is None else self._told_part(taken, some[0], failure)
            if part is None:
                return False
            parts.append(part)
        row = self._moved([Span(s.input, s.start + begin, s.start + end) for s in taken.slices])
        self._commit_parts(parts, row)
        self.counters.taken += (end - begin) * len(taken.slices)
        for piece in taken.slices:
            piece.input.go(piece.start + end)
        for run in runs:
            for staged in run.outputs.values():
                staged.drop()
        return True

    def _staged_part(self, taken: Taken, runs: list[CommitRun]) -> Part:
        """Runs that commit as one step."""
        start, stop = runs[0].start, runs[-1].stop
        digest = self._digest(taken, start, stop)
        # One queue after another: each gets its messages in order, whatever the bindings are.
        staged = [
            (queue, run.outputs[binding])
            for binding, queue in self.outputs.items()
            for run in runs
            if binding in run.outputs
        ]
        written = sum(output.count for _, output in staged)
        values = sum(output.values for _, output in staged)
        taking = self._taking(taken, start, stop)
        part = StagedPart(start, stop, digest, taking, None, Staging(digest, staged), written)
        part.staged = values
        return part

    def _told_part(self, taken: Taken, run: CommitRun, failure: Failure) -> Part | None:
        """The failed run with its messages, which are read again; None if they are purged."""
        count = run.stop - run.start
        slices = []
        for piece in taken.slices:
            input = Input(piece.binding, piece.tailer, piece.input.queue)
            input.identity = piece.input.identity
            input.go(piece.start + run.start)
            whole = take_whole(input, piece.start + run.start, count)
            if whole is None:
                return None
            slices.append(whole)
        return self._failed_part(Taken(slices, count), 0, count, failure)


def _edges(count: int, size: int, cores: int) -> list[int]:
    """The offsets of the edges of stretches. There is one for every core, and no batch of ``size`` is cut."""
    stretch = min(STRETCH_MESSAGES, -(-count // cores))
    stretch = -(-stretch // size) * size
    return [*range(0, count, stretch), count]


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


# --- one after another --------------------------------------------------------------------------


class Turn(NamedTuple):
    """The result of the turn of a unit."""

    worked: bool
    """True if it made a step."""
    waits: bool
    """True if it has messages left, and cannot make a step with them now: a queue has its bound, or it is paused."""


class Rounds:
    """Turns of the processors, one after another, until a whole round finds nothing to do."""

    def __init__(self, order: list[str]) -> None:
        self._order = order
        self._changed = threading.Condition()
        self._idle: set[str] = set()
        """The units that found nothing to do since the last unit that did something."""

    def take_turn(self, who: str, work: Callable[[], Turn]) -> Turn | None:
        """Call ``work`` if it soon becomes the turn of ``who``, and return its result; else None."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.over or self._order[0] == who, LOOK_S) or self.over:
                return None
        turn = work()
        with self._changed:
            self._idle = set() if turn.worked else self._idle - {who}
            if not turn.waits:
                self._idle.add(who)
            self._order.append(self._order.pop(0))
            self._changed.notify_all()
        return turn

    def leave(self, who: str) -> None:
        with self._changed:
            self._order = [unit for unit in self._order if unit != who]
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """True if a whole round found nothing to do."""
        return set(self._order) <= self._idle


class Turns(Worker):
    """One unit of a processor, which works when it is its turn."""

    def __init__(self, engine: BackfillEngine, stepper: Stepper) -> None:
        super().__init__(engine.host, stepper)
        self.engine = engine

    @override
    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        self.engine.rounds.leave(self.id)

    @override
    @property
    def _exhausted(self) -> bool:
        return isinstance(self.delivery, SourceStepper) or self.engine.rounds.over

    @override
    def _turn(self) -> bool:
        turn = self.engine.rounds.take_turn(self.id, self._work)
        if turn is not None and turn.waits and not turn.worked:
            self.running.pause(LOOK_S)  # after its turn, so that the processor that it waits for can work
        return True  # the thread has waited for the turn, and must not sleep besides

    def _work(self) -> Turn:
        """Step until nothing is left, or until a step is not possible."""
        steps = self.delivery.counters.steps
        self.engine.settle()
        moves = True
        while moves and not self.running.halted and self._any_left():
            moves = super()._turn()
        self.busy = False
        return Turn(self.delivery.counters.steps != steps, waits=not moves)

    def _any_left(self) -> bool:
        delivery = self.delivery
        assert isinstance(delivery, BackfillStepper)
        if delivery._pending is not None:
            return True
        some = any if delivery.node.mode == "alts" else all
        return some(delivery.left(read, self.engine.ends.get(read.log.id)) > 0 for read in delivery.inputs)

    @override
    def pull(self) -> None:
        """Do nothing: sources do not run."""


class BackfillEngine(SparkEngine):
    """Processes the messages that are on the queues, and ends. No source runs."""

    pulls = False

    def __init__(self, graph: Graph, spark: SparkSession | None, master: str | None, **options: Any) -> None:
        super().__init__(graph, spark, master, delivery=BackfillStepper, **options)

    @override
    def start(self, host: Host) -> None:
        super().start(host)
        staging.sweep(self.store.directory)

    @override
    def _start_threads(self) -> None:
        units: dict[str, list[str]] = {}
        for delivery in self._assembly.steppers:
            units.setdefault(self.plan.node(delivery.node.processor).name, []).append(delivery.node.id)
        order = [name for name in self.plan.topology().order() if name in units and self.plan.node(name).inputs]
        self.rounds = Rounds([unit for name in order for unit in units[name]])
        super()._start_threads()

    @override
    def _worker(self, stepper: Stepper) -> Worker:
        return Turns(self, stepper)

    @override
    def _take_in(self, units: Sequence[Node]) -> None:
        """Refuse new partitions, because the rounds are made at the start."""
        raise GraphError(
            f"The queues that {units[0].processor} reads have got partitions during a backfill, which reads only"
            " the partitions of its start.",
            "start the backfill again; it continues where it is now.",
            processor=units[0].name,
        )

    @functools.cached_property
    def ends(self) -> dict[str, int]:
        """The ends, at the start, of the logs that only others write to. The next run takes later messages."""
        nodes = [node for node in self.plan.running if node.inputs]
        written = {port.queue for node in nodes for port in node.writes} | {node.errors for node in nodes}
        return {
            view._log.id: view._row().next
            for name, queue in self.queues.items()
            if name not in written
            for view in queue._views
        }

    def settle(self) -> None:
        """Wait until the messages for other stores are there, or are not forwarded any more."""
        while self.forwarder_threads and not self.host.halted:
            with self.store.core.view() as txn:
                ends = [thread.forwarder.ends(txn) for thread in self.forwarder_threads]
            forwarded = all(thread.idle(end) for thread, end in zip(self.forwarder_threads, ends))
            if forwarded or self.host.pause(LOOK_S):
                return

    @override
    def resting(self) -> bool:
        return False  # a backfill ends by itself, and not after a quiet time

    @override
    def done(self) -> bool:
        return bool(self.stopped) or (all(worker.finished for worker in self.workers) and self.idle())
