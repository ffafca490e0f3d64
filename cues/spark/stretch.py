"""A long stretch of a queue on an executor: the function over chunk after chunk, what it returns staged as pages.

    chunk     what lies ahead on the inputs, up to so many messages   (of a batch function: one call)
    run       consecutive messages of a chunk without a failure, or one that failed (a batch: all of it)
    staged    a run's outputs, as pages of record batches in a file beside the store (staging.py)

An executor does here what a step does in the driver, but for the two things that only the driver knows:
which runs commit together, and so under which hash. Pages are built with a hash of zeros, which the
driver overwrites when it appends them.

A task holds one chunk at a time, however long its stretch is.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark import TaskContext

from cues import batch as batches
from cues.errors import CuesError, Diverged, Fenced, Unsupported
from cues.failure import Failure, words
from cues.options import QueueOptions
from cues.provenance import Provenance
from cues.results import Results
from cues.runner import Runner
from cues.spark import staging
from cues.spark.remote import Job, NeedsState, Part, Told, inputs_of, job_of, runner_of, travelling
from cues.spark.staging import PlacedPage, Stage, Staged
from cues.spread import Spread
from cues.taking import Input, Taken

CHUNK_MESSAGES: Final = 10_000
"""Most messages of a message function that a task has in memory; a chunk's pages are staged together."""
FIRST_CHUNK_MESSAGES: Final = 1_000
"""Messages of a task's first chunk; nobody knows yet how much the function makes of one."""
CHUNK_VALUES: Final = 2_048
"""Pages that a chunk should become at most, 8 MB: whoever makes much of a message gets fewer at a time."""
FAILURES_MAX: Final = 1_000
"""Messages that may fail in a stretch: their accounts travel to the driver's memory. What has more is done in the
driver's steps, which are shorter."""
NO_HASH: Final = bytes(16)
"""In the place of a step's hash, until it is known."""


@dataclass
class Run:
    """Consecutive messages that one step may commit; offsets are those of the whole job."""

    start: int
    stop: int
    outputs: dict[str, Staged] = field(default_factory=dict)
    """By binding; bindings without messages are not there."""
    failure: Failure | None = None


@dataclass
class Made(Told):
    """What came of a stretch: its runs, in order and without gaps; or why it was given up."""

    runs: list[Run] = field(default_factory=list)


class Work:
    """What a task does with its stretch, as Spark pickles it."""

    def __init__(self, packed: bytes, stage: Stage) -> None:
        self.packed = packed
        self.stage = stage

    def __call__(self, part: Part) -> Made:
        job = job_of(self.packed)
        try:
            inputs = inputs_of(part)
        except (Diverged, Unsupported) as error:
            return Made(fatal=error)
        runner, counters = runner_of(job, part)
        try:
            made = self._through(job, part, inputs, runner)
        except NeedsState:
            made = Made(declined="state")
        except (Fenced, Diverged) as error:
            made = Made(fatal=error)
        finally:
            runner.close()
        made.retries = counters.retries
        return made

    def _through(self, job: Job, part: Part, inputs: list[Input], runner: Runner) -> Made:
        """Chunk after chunk, until the end or a failure that stops the processor."""
        made = Made()
        batch = bool(job.node.options.batch)
        size = job.node.options.batch_size if batch else FIRST_CHUNK_MESSAGES
        context = TaskContext.get()
        task = context.partitionId() if context is not None else 0
        room = staging.INLINE_BYTES_MAX
        failed = done = values = 0
        while done < part.messages:
            wanted = min(size, part.messages - done)
            count = min(wanted, *(one.fill(wanted) for one in inputs))
            if not count or any(one.index != piece.start + done for one, piece in zip(inputs, part.pieces)):
                return Made(declined="purged")
            taken = Taken([one.take(count) for one in inputs], count)
            results = runner.run(taken)
            for start, stop, pages, failure in _cut(results, taken, job.options, batch):
                run = Run(part.offset + done + start, part.offset + done + stop, failure=failure)
                made.runs.append(run)
                for binding, some in pages.items():
                    run.outputs[binding] = staged = self.stage.collect(some, True, task, room)
                    room = max(0, room - staged.inline_bytes)
                    values += staged.values
                if failure is None:
                    continue
                failed += stop - start
                if job.node.errors is None:
                    return made
                if failed > max(FAILURES_MAX, size if batch else 0):
                    return Made(declined="failures")
            done += count
            if not batch:
                size = min(2 * size, CHUNK_MESSAGES) if values <= CHUNK_VALUES else max(1, size // 2)
            values = 0
        return made


_Cut = tuple[int, int, dict[str, list[PlacedPage]], Failure | None]


def _cut(results: Results, taken: Taken, options: dict[str, QueueOptions], batch: bool) -> Iterator[_Cut]:
    """The runs of a chunk: from, to (exclusive), pages by binding, failure."""
    while True:
        try:
            cuts = list(_runs(results, taken, options, batch))
        except _Unwritable as found:
            results.fail(found.offset, Failure(found.error, 1))
            continue
        yield from cuts
        return


def _runs(results: Results, taken: Taken, options: dict[str, QueueOptions], batch: bool) -> Iterator[_Cut]:
    if batch and results.failures:
        yield 0, taken.count, {}, travelling(next(iter(results.failures.values())))
        return
    start = 0
    for offset in sorted(results.failures):
        if offset > start:
            yield start, offset, _pages(results, taken, start, offset, options, batch), None
        yield offset, offset + 1, {}, travelling(results.failures[offset])
        start = offset + 1
    if start < taken.count:
        yield start, taken.count, _pages(results, taken, start, taken.count, options, batch), None


class _Unwritable(Exception):
    """An output that cannot be written, and the offset of the message that it came from."""

    def __init__(self, offset: int, error: Exception) -> None:
        super().__init__(words(error))
        self.offset = offset
        self.error = error


def _pages(
    results: Results, taken: Taken, start: int, stop: int, options: dict[str, QueueOptions], batch: bool
) -> dict[str, list[PlacedPage]]:
    """The outputs of the messages ``start`` to ``stop`` as pages, with where they came from."""
    found: dict[str, list[PlacedPage]] = {}
    traced = any(piece.traced for piece in taken.slices)
    for binding, whole in results.outputs.items():
        output = whole if stop - start == taken.count else whole.between(start, stop)
        if not output.items:
            continue
        strips = options[binding].strips
        came = None
        if traced and not strips:
            came = taken.provenance()
            if batch:
                came = came.spread(len(output.items))
            else:
                came = came.slice(start, stop) if output.origins is None else came.select(output.origins)
        try:
            found[binding] = list(_placed(output.items, came, options[binding]))
        except Exception as error:  # keys and partitioners are the user's too
            at = getattr(error, "offset", 0)
            raise _Unwritable(start + at if output.origins is None else output.origins[at], error) from error
    return found


def _placed(items: list[Any], came: Provenance | None, options: QueueOptions) -> Iterator[PlacedPage]:
    """The pages of an output, each with its partition. An error has the ``offset`` of the item at fault."""
    if options.partitions == 1:
        for page in batches.build(items, options.max_message_bytes, NO_HASH, came, strips=options.strips):
            yield 0, page
        return
    # Where turns begin does not matter, if it is not where those of every other chunk do.
    for partition, offsets in Spread(options, secrets.randbelow(options.partitions)).shares(options, items):
        chosen = [items[offset] for offset in offsets]
        selected = None if came is None else came.select(offsets)
        try:
            pages = batches.build(chosen, options.max_message_bytes, NO_HASH, selected, strips=options.strips)
        except CuesError as error:
            error.__dict__["offset"] = offsets[getattr(error, "offset", 0)]
            raise
        yield from ((partition, page) for page in pages)
