"""A backfill: everything that lies on the queues goes through the graph's functions, in long stretches.

    graph.start(engine="spark", backfill=True)

A processor at a time, each behind those that it gets messages from; again from the first, until nobody has
anything left (error queues and cycles bring messages back). Sources do not run. Then it ends.

    driver                                        executors
    takes a range: some seconds' work
    cuts it into stretches, one a task      ──▶   call the function chunk by chunk, stage pages (stretch.py)
    puts their runs together into steps     ◀──   where the pages are, and what failed
    appends the pages, step by step, each one commit with outputs, try log and positions (delivery.py)

The driver sees neither the messages nor what they become, so its memory does not grow with the queue. A
step is what it is on any engine, only longer: owner, fence, snapshot, attempt, hash, positions. So a
backfill that is killed has done whole steps, the next start (of whatever engine) goes on behind them, and
what was staged and not committed is swept.

What the driver has to do (state, sinks, side effects, at-most-once, frames, outputs in other stores) it
does here in the steps that it does everywhere; and so the rest of a range in which too much fails.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cues import faults
from cues.engine.engine import Host
from cues.engine.threads import Worker
from cues.errors import GraphError
from cues.graphs.graph import Graph
from cues.graphs.processor import Node
from cues.queues.queue import Queue
from cues.records.batch import Page
from cues.spark import staging
from cues.spark.chunk import NO_HASH, ChunkTask, CommitRun
from cues.spark.driver import SparkEngine
from cues.spark.remote import SparkRunner
from cues.spark.staging import Staged, StagingArea
from cues.steps.failure import Failure, stopped_at
from cues.steps.feed import SourceStepper
from cues.steps.parts import Part
from cues.steps.stepper import Outcome, Stepper
from cues.steps.taking import Input, Slice, Taken

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RANGE_MESSAGES: Final = 1_000_000
"""Most messages of one job. A job costs some 0.1 s, whatever it does, which so many do not notice."""
FIRST_MESSAGES: Final = 20_000
"""Messages of the first job; nobody knows yet how long the function takes."""
JOB_S: Final = 10.0
"""Longest time of a job, about. After a driver dies before the commit, the job's calls are repeated."""
STRETCH_MESSAGES: Final = 100_000
"""Most messages of one task: enough to forget what a task costs, few enough that no core waits long for the last."""
COMMIT_VALUES_MAX: Final = 32_768
"""LMDB values (of a page each, 128 MB) of one commit: it holds the store's writer lock for some tenths of a second,
and LMDB keeps its pages in memory."""
LOOK_S: Final = 0.2
"""Longest wait of a thread for its turn before it checks that the graph is not halted."""
BATCHES_MAX: Final = 1_000
"""Calls of a batch function in one job: each is a step with its record in the try log."""


class Span(Slice):
    """A range of an input that the driver does not look into."""

    __slots__ = ("_seal",)

    def __init__(self, one: Input, start: int, stop: int) -> None:
        super().__init__(one, start, [], [])
        self.stop = stop
        with one.log.store.view() as txn:
            self._seal = one.log.seal_before(txn, one.log.row(txn), stop)

    def seal(self) -> bytes:
        return self._seal


class Staging:
    """The pages that a part appends under its hash, read from the staging files some at a time."""

    def __init__(self, digest: bytes, staged: list[tuple[Queue, Staged]]) -> None:
        self.digest = digest
        # Views are opened here: inside the transaction a log that is not open waits for its end.
        self.staged = [(queue.views, one) for queue, one in staged]

    def __iter__(self) -> Iterator[tuple[Queue, list[Page]]]:
        for views, one in self.staged:
            for partition, pages in one.pages():
                for page in pages:
                    page.tail = self.digest + page.tail[len(NO_HASH) :]
                yield views[partition], pages


@dataclass(slots=True)
class StagedPart(Part):
    """A part whose pages are not in memory."""

    staged: int
    """LMDB values."""

    def values(self) -> int:
        return self.staged + self.staged // 64  # and the branches above them


class BackfillStepper(Stepper):
    """One processor, whose function executors call over long ranges."""

    _most = FIRST_MESSAGES
    """Messages of the next job; it follows the time that jobs take."""

    def step(self) -> Outcome:
        """One turn: a long range as several steps; or one of the usual steps, where it has to be that."""
        runner = self.runner
        assert isinstance(runner, SparkRunner)
        if not runner.on_executors or self.forks or self._pending is not None or self._stop is not None:
            return super().step()
        taken = self._range()
        if taken is None:
            return super().step()  # which says "idle"
        stage = StagingArea(self.store.directory, os.getpid())
        try:
            if faults.active:
                faults.point("take.after")
            began = time.monotonic()
            edges = _edges(taken.count, self._size, runner.parallelism)
            found = runner.gather(ChunkTask(runner.packed_job(), stage), runner.cut(taken, edges))
            self._pace(time.monotonic() - began)
            if found is None or not self._commit_runs(taken, [run for made in found for run in made.runs]):
                self._step_dropped()
                return super().step()
        except BaseException:
            self._step_dropped()
            raise
        finally:
            stage.clear()
        return "committed"

    def left(self, one: Input, end: int | None) -> int:
        """The number of messages before ``end`` that an input has not taken yet."""
        row = one.queue.row()
        return (row.next if end is None else min(end, row.next)) - max(one.index, row.first)

    def _range(self) -> Taken | None:
        """The ranges of the next job on the inputs. Nothing is read."""
        size = self._size
        most = min(self._most, RANGE_MESSAGES)
        if self.node.options.batch:
            most = size * min(BATCHES_MAX, max(1, most // size))  # whole batches
        chosen = self.inputs
        if self.node.mode == "alts":
            turns = [(self._served + turn) % len(self.inputs) for turn in range(len(self.inputs))]
            place = next((turn for turn in turns if self.left(self.inputs[turn], None) > 0), 0)
            self._served, chosen = place + 1, [self.inputs[place]]
        count = min(most, *(self.left(one, None) for one in chosen))
        if count <= 0:
            return None
        starts = [max(one.index, one.queue.row().first) for one in chosen]
        return Taken([Span(one, start, start + count) for one, start in zip(chosen, starts)], count)

    @property
    def _size(self) -> int:
        """Messages of one call."""
        return self.node.options.batch_size if self.node.options.batch else 1

    def _pace(self, took_s: float) -> None:
        """Have the next job take a time that may be lost."""
        if took_s < JOB_S / 4:
            self._most = min(self._most * 4, RANGE_MESSAGES)
        elif took_s > JOB_S:
            self._most = max(1, int(self._most * JOB_S / 2 / took_s))

    def _commit_runs(self, taken: Taken, runs: list[CommitRun]) -> bool:
        """Commit what the stretches made; False where a failed message was purged, so nobody can tell of it."""
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
        row = self._moved([Span(s.one, s.start + begin, s.start + end) for s in taken.slices])
        self._commit_parts(parts, row)
        self.counters.taken += (end - begin) * len(taken.slices)
        for piece in taken.slices:
            piece.one.go(piece.start + end)
        for run in runs:
            for staged in run.outputs.values():
                staged.drop()
        return True

    def _staged_part(self, taken: Taken, runs: list[CommitRun]) -> Part:
        """Runs that commit as one step."""
        start, stop = runs[0].start, runs[-1].stop
        digest = self._digest(taken, start, stop)
        # Queue by queue, so that each gets its messages in order whatever the bindings are.
        staged = [
            (queue, run.outputs[binding])
            for binding, queue in self.outputs.items()
            for run in runs
            if binding in run.outputs
        ]
        written = sum(one.count for _, one in staged)
        values = sum(one.values for _, one in staged)
        taking = self._taking(taken, start, stop)
        return StagedPart(start, stop, digest, taking, None, Staging(digest, staged), written, values)

    def _told_part(self, taken: Taken, run: CommitRun, failure: Failure) -> Part | None:
        """The failed run with its messages, which are read again; None where they are purged."""
        slices = []
        for piece in taken.slices:
            one = Input(piece.binding, piece.tailer, piece.one.queue)
            one.identity = piece.one.identity
            start, count = piece.start + run.start, run.stop - run.start
            one.go(start)
            while one.ahead < count:
                before = one.ahead
                one.fill(count)
                if one.index != start or one.ahead == before:
                    return None
            slices.append(one.take(count))
        return self._failed_part(Taken(slices, run.stop - run.start), 0, run.stop - run.start, failure)


def _edges(count: int, size: int, cores: int) -> list[int]:
    """The offsets at which stretches meet. Every core has one, and no batch of ``size`` is cut."""
    stretch = min(STRETCH_MESSAGES, -(-count // cores))
    stretch = -(-stretch // size) * size
    return [*range(0, count, stretch), count]


def _commits(runs: list[CommitRun]) -> Iterator[list[CommitRun]]:
    """The runs of each commit: as many as it may hold, or one that is larger."""
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
    """Runs that are one step: those between failures; of a batch function each."""
    for failed, group in itertools.groupby(runs, lambda run: run.failure is not None):
        some = list(group)
        if failed or batch:
            yield from ([run] for run in some)
        else:
            yield some


# --- one after another --------------------------------------------------------------------------


class Rounds:
    """Turns of the processors, one after another, until a whole round finds nothing to do."""

    def __init__(self, order: list[str]) -> None:
        self._order = order
        self._changed = threading.Condition()
        self._idle: set[str] = set()
        """The units that found nothing to do since the last unit that did something."""

    def take_turn(self, who: str, work: Callable[[], bool]) -> None:
        """Do ``work``, which says whether there was any, if it becomes the turn of ``who`` soon."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.over or self._order[0] == who, LOOK_S) or self.over:
                return
        did = work()
        with self._changed:
            self._idle = set() if did else self._idle
            self._idle.add(who)
            self._order.append(self._order.pop(0))
            self._changed.notify_all()

    def leave(self, who: str) -> None:
        """There will be no more turns of ``who``."""
        with self._changed:
            self._order = [one for one in self._order if one != who]
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """True after a whole round found nothing to do."""
        return set(self._order) <= self._idle


class Turns(Worker):
    """One unit of a processor, which works when it is its turn."""

    def __init__(self, engine: BackfillEngine, stepper: Stepper) -> None:
        super().__init__(engine.host, stepper)
        self.engine = engine

    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        self.engine.rounds.leave(self.id)

    @property
    def _exhausted(self) -> bool:
        return isinstance(self.delivery, SourceStepper) or self.engine.rounds.over

    def _turn(self) -> bool:
        self.engine.rounds.take_turn(self.id, self._work)
        return True  # the thread has waited for the turn, and must not sleep besides

    def _work(self) -> bool:
        """Step until nothing is left; returns whether there was anything."""
        steps = self.delivery.counters.steps
        self.engine.settle()
        while not self.running.halted and self._any_left():
            super()._turn()
        self.busy = False
        return self.delivery.counters.steps != steps

    def _any_left(self) -> bool:
        delivery = self.delivery
        assert isinstance(delivery, BackfillStepper)
        if delivery._pending is not None:
            return True
        some = any if delivery.node.mode == "alts" else all
        return some(delivery.left(read, self.engine.ends.get(read.log.id)) > 0 for read in delivery.inputs)

    def _pull(self) -> None:
        """Sources do not run."""


class BackfillEngine(SparkEngine):
    """Processes the messages that are on the queues, and ends. No source runs."""

    pulls = False

    def __init__(self, graph: Graph, spark: SparkSession | None, master: str | None, **options: Any) -> None:
        super().__init__(graph, spark, master, delivery=BackfillStepper, **options)

    def start(self, host: Host) -> None:
        super().start(host)
        staging.sweep(self.store.directory)

    def _start_threads(self) -> None:
        units: dict[str, list[str]] = {}
        for delivery in self._assembly.steppers:
            units.setdefault(self.plan.node(delivery.node.processor).name, []).append(delivery.node.id)
        order = [name for name in self.plan.topology().order() if name in units and self.plan.node(name).inputs]
        self.rounds = Rounds([unit for name in order for unit in units[name]])
        super()._start_threads()

    def _worker(self, stepper: Stepper) -> Worker:
        return Turns(self, stepper)

    def _take_in(self, units: Sequence[Node]) -> None:
        """Refuse: its rounds are made at the start."""
        raise GraphError(
            f"The queues that {units[0].processor} reads have got partitions while a backfill was running, which reads"
            " those that were there at its start.",
            "start the backfill again; it goes on where it is now.",
            processor=units[0].name,
        )

    @functools.cached_property
    def ends(self) -> dict[str, int]:
        """The ends, at the start, of the logs that only others write to. Later messages are left to the next run."""
        nodes = [node for node in self.plan.running if node.inputs]
        written = {port.queue for node in nodes for port in node.writes} | {node.errors for node in nodes}
        return {
            view.log.id: view.row().next
            for name, queue in self.queues.items()
            if name not in written
            for view in queue.views
        }

    def settle(self) -> None:
        """Wait until the messages for other stores are there, or are not forwarded any more."""
        while self.forwarder_threads and not self.host.halted:
            with self.store.view() as txn:
                ends = [thread.forwarder.ends(txn) for thread in self.forwarder_threads]
            forwarded = all(thread.idle(end) for thread, end in zip(self.forwarder_threads, ends))
            if forwarded or self.host.pause(LOOK_S):
                return

    def resting(self) -> bool:
        return False  # it ends by itself, and not after a quiet time

    def done(self) -> bool:
        return bool(self.stopped) or (all(worker.finished for worker in self.workers) and self.idle())
