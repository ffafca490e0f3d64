"""A long stretch of a queue on an executor: calls of the function for chunk after chunk, with results staged as pages.

    chunk     the next messages of the inputs, up to a limit   (of a batch function: one call)
    run       consecutive messages of a chunk without a failure, or one that failed (a batch: all of it)
    staged    a run's outputs, as pages of record batches in a file in the store's folder (staging.py)

An executor does the work of a step, except for two things that only the driver knows:
which runs commit together, and the hash of their step. Pages are built with a hash of zeros, which the
driver overwrites when it appends them.

A task holds one chunk in memory at a time, even if its stretch is long.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cues import codec
from cues.base.events import Counters
from cues.queues.base import Placer
from cues.queues.options import QueueOptions
from cues.records.provenance import Provenance
from cues.spark import staging
from cues.spark.executor import PartReport, reporting, travelling, unpack_job
from cues.spark.remote import StepJob, Stretch, inputs_of, remote_runner
from cues.spark.staging import PlacedPage, Staged, StagingArea
from cues.steps import outgoing
from cues.steps.failure import Failure
from cues.steps.halving import Halving, halves
from cues.steps.results import Cut, Results
from cues.steps.runner import Runner
from cues.steps.taking import Input, Taken

CHUNK_MESSAGES: Final = 10_000
"""Most messages of a chunk of a message function. A task has them in memory, and stages their pages together."""
FIRST_CHUNK_MESSAGES: Final = 1_000
"""Messages of a task's first chunk, when the size of the results is not known."""
CHUNK_VALUES: Final = 2_048
"""Most pages that the results of a chunk should have: 8 MB. A function with larger results gets smaller chunks."""
FAILURES_MAX: Final = 1_000
"""Most messages that may fail in a stretch, because the driver's memory holds their accounts. A stretch with more
failures is done in the driver's steps, which are shorter."""
TIMES: Final = 16
"""Most record batches of a chunk whose times are reported."""
NO_HASH: Final = bytes(16)
"""Takes the place of a step's hash until that is known."""


@dataclass
class CommitRun:
    """Consecutive messages that one step may commit; offsets are those of the whole job."""

    start: int
    stop: int
    outputs: dict[str, Staged] = field(default_factory=dict)
    """By binding. Bindings without messages are left out."""
    failure: Failure | None = None


@dataclass
class ChunkResult(PartReport):
    """The result of a stretch: its runs, in order and without gaps, or the reason why it was given up."""

    runs: list[CommitRun] = field(default_factory=list)
    shown: list[tuple[int, int]] = field(default_factory=list)
    """The time of append of some messages, in nanoseconds, each with the number of messages that it is for."""


def run_stretch(packed: bytes, stage: StagingArea, part: Stretch) -> ChunkResult:
    """Process a stretch, in a task."""
    job: StepJob = unpack_job(packed)
    report = result = ChunkResult()
    with reporting(report):
        inputs = inputs_of(part)
        counters = Counters()
        runner = remote_runner(job, part, counters)
        with contextlib.closing(runner), reporting(report):
            result = _through(stage, job, part, inputs, runner)
        result.retries = counters.retries
    return result


def _through(stage: StagingArea, job: StepJob, part: Stretch, inputs: list[Input], runner: Runner) -> ChunkResult:
    """Process chunk after chunk, up to the end or to a failure that stops the processor."""
    answer = ChunkResult()
    batch = bool(job.node.options.batch)
    size = job.node.options.batch_size if batch else FIRST_CHUNK_MESSAGES
    room = staging.INLINE_BYTES_MAX
    failed = done = values = 0
    halving = Halving()
    while done < part.messages:
        wanted = halving.bound(done, min(size, part.messages - done))
        count = min(wanted, *(input.fill(wanted) for input in inputs))
        if not count or any(input.index != piece.start + done for input, piece in zip(inputs, part.pieces)):
            return ChunkResult(declined="purged")
        if any(input.delays for input in inputs):
            return ChunkResult(declined="delays")
        taken = Taken([input.take(count) for input in inputs], count, part=halving.at(done))
        results = runner.run(taken)
        if halves(job.node, count, results):
            halving.divide(done, done + count)
            for input, piece in zip(inputs, part.pieces):
                input.go(piece.start + done)
            continue
        answer.shown += _shown(taken)
        for cut in results.cuts(job.node, count):
            failure = None if cut.failure is None else travelling(cut.failure)
            run = CommitRun(part.offset + done + cut.start, part.offset + done + cut.stop, failure=failure)
            answer.runs.append(run)
            pages = _pages(results, taken, cut, job.options, batch) if failure is None else {}
            for binding, some in pages.items():
                run.outputs[binding] = staged = stage.collect(some, True, room)
                room = max(0, room - staged.inline_bytes)
                values += staged.values
            if failure is None:
                continue
            failed += cut.stop - cut.start
            if job.node.errors is None:
                return answer
            if failed > max(FAILURES_MAX, size if batch else 0):
                return ChunkResult(declined="failures")
        done += count
        if not batch:
            size = min(2 * size, CHUNK_MESSAGES) if values <= CHUNK_VALUES else max(1, size // 2)
        values = 0
    return answer


def _shown(taken: Taken) -> Iterator[tuple[int, int]]:
    """Times of append of a chunk, of at most :data:`TIMES` record batches of each input, for its latency."""
    for piece in taken.slices:
        chosen = piece.batches[:: -(-len(piece.batches) // TIMES)]
        for number, batch in enumerate(chosen):
            yield batch.shown_ns, taken.count * (number + 1) // len(chosen) - taken.count * number // len(chosen)


def _pages(
    results: Results, taken: Taken, cut: Cut, options: dict[str, QueueOptions], batch: bool
) -> dict[str, list[PlacedPage]]:
    """The outputs of a run as pages, with their provenance."""
    by_binding: dict[str, list[PlacedPage]] = {}
    traced = taken.traced
    for binding, whole in results.outputs.items():
        output = whole if cut.stop - cut.start == taken.count else whole.between(cut.start, cut.stop)
        if not output.items:
            continue
        strips = options[binding].strips
        came = None
        if traced and not strips:
            came = taken.provenance()
            if batch:
                came = came.spread(len(output.items))
            else:
                came = came.slice(cut.start, cut.stop) if output.origins is None else came.select(output.origins)
        by_binding[binding] = list(_placed(output.items, came, options[binding]))
    return by_binding


def _placed(items: list[bytes], came: Provenance | None, options: QueueOptions) -> Iterator[PlacedPage]:
    """The pages of an output, each with its partition."""
    if options.partitions == 1:
        yield from ((0, page) for page in outgoing.build(items, options.strips, NO_HASH, came))
        return
    shares = outgoing.placed(items)
    if shares is None:
        # Each chunk begins its turns at another partition, so that small chunks do not all begin at the same one.
        start = secrets.randbelow(options.partitions)
        shares = dict(Placer(options, start).shares(options, [codec.unpack_known(item) for item in items]))
    for partition, offsets in shares.items():
        chosen = [items[offset] for offset in offsets]
        selected = None if came is None else came.select(offsets)
        yield from ((partition, page) for page in outgoing.build(chosen, options.strips, NO_HASH, selected))
