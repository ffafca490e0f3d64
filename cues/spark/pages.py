"""A stretch of queues of a store, on an executor: messages are read from the store, and results are staged as pages.

    chunk     the next messages of the inputs, up to a limit   (of a batch function: one call)
    run       consecutive messages of a chunk without a failure, or one that failed (a batch: all of it)
    staged    a run's outputs, or its error message, as pages of record batches in a file in the store's folder
              (staging.py)

An executor does the work of a step, except for two things that only the driver knows:
which runs commit together, and the hash of their step. Pages are built with a hash of zeros, which the
driver overwrites when it appends them.

A function of tables is given the records of columns as they are, and the table that it returns becomes records of
columns: no task makes a dict of a row, except for the error message of rows that failed.

A task holds one chunk in memory at a time, even if its stretch is long.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Final, NamedTuple

from cues import codec
from cues.base.data import dataclass
from cues.errors import Diverged, Unsupported
from cues.overrides import override
from cues.queues.base import Placer
from cues.queues.options import QueueOptions
from cues.queues.store import Store
from cues.records import batch as batches
from cues.records import columns
from cues.records.provenance import Provenance
from cues.spark import staging
from cues.spark.executor import GivenUp, Job, Stretch, StretchResult, unpack_job
from cues.spark.place import Site
from cues.spark.staging import PlacedPage, Staged, StagingArea
from cues.spark.work import StretchWork, travelling
from cues.steps import outgoing
from cues.steps.failure import Failure
from cues.steps.process import Process, ProcessCore
from cues.steps.results import Cut, Results, TableOutput
from cues.steps.state import Layer, StateTable
from cues.steps.taking import Input, Taken

CHUNK_MESSAGES: Final = 10_000
"""Most messages of a chunk of a message function. A task has them in memory, and stages their pages together."""
FIRST_CHUNK_MESSAGES: Final = 1_000
"""Messages of a task's first chunk, when the size of the results is not known."""
CHUNK_VALUES: Final = 2_048
"""Most pages that the results of a chunk should have: 8 MB. A function with larger results gets smaller chunks."""
FAILURES_MAX: Final = 1_000
"""Most messages that may fail in a stretch, because each failure is a run, with pages of its own. A stretch with more
failures is done in the driver's steps, which are shorter."""
TIMES: Final = 16
"""Most record batches of a chunk whose times are reported."""
NO_HASH: Final = bytes(16)
"""Takes the place of a step's hash until that is known."""
ERRORS: Final = "\0"
"""Takes the place of a binding for the error queue. No binding has this name."""


class InputRange(NamedTuple):
    """The messages of a stretch on one input, beginning at ``start``."""

    binding: str
    tailer: str
    site: Site
    queue: str
    identity: bytes
    start: int


@dataclass(frozen=True)
class StepJob(Job):
    """The job of a processor over a store."""

    generation: int
    options: dict[str, QueueOptions]
    """By output binding."""


@dataclass
class CommitRun:
    """Consecutive messages that one step may commit; offsets are those of the whole job."""

    start: int
    stop: int
    outputs: dict[str, Staged] = field(default_factory=dict)
    """By binding, or :data:`ERRORS`. Bindings without messages are left out."""
    failure: Failure | None = None


@dataclass(kw_only=True)
class PagesResult(StretchResult):
    """The result of a stretch: its runs, in order and without gaps, up to its end or to the stop."""

    runs: list[CommitRun] = field(default_factory=list)
    shown: list[tuple[int, int]] = field(default_factory=list)
    """The time of append of some messages, in nanoseconds, each with the number of messages that it is for."""


class _RemoteCore(ProcessCore):
    @override
    def states(self) -> Layer:
        raise GivenUp("state")


class _RemoteProcess(Process):
    """``process`` without state."""

    core_type = _RemoteCore


def run_stretch(packed: bytes, stage: StagingArea, size: int, stretch: Stretch) -> PagesResult:
    """Process a stretch, in a task. ``size``: the most messages of a call of a batch function."""
    work = _PagesWork(unpack_job(packed), stage, size, stretch)
    work.run()
    return work.result


class _PagesWork(StretchWork):
    """The calls for a stretch of queues of a store."""

    job: StepJob
    result: PagesResult

    def __init__(self, job: StepJob, stage: StagingArea, size: int, stretch: Stretch) -> None:
        super().__init__(job, PagesResult(number=stretch.number))
        self._stage = stage
        self._stretch = stretch
        self._batch = bool(job.node.options.batch)
        self.size = size if self._batch else FIRST_CHUNK_MESSAGES
        self._room = staging.INLINE_BYTES_MAX
        self._failed = 0

    @override
    def begin(self) -> int:
        self._inputs = inputs_of(self._stretch.inputs)
        for input in self._inputs:
            input.as_tables = self.job.node.takes_columns
        state = StateTable(open_store(self._stretch.inputs[0].site), self.job.node.key)  # never read
        targets = {binding: outgoing.FixedOptions(options) for binding, options in self.job.options.items()}
        self.calls(self.job.generation, state, targets, process_type=_RemoteProcess)
        return self._stretch.messages

    @override
    def offset(self, place: int, taken: Taken, at: int) -> int:
        return self._stretch.offset + place + at

    @override
    def take(self, place: int, count: int, halved: bool) -> Taken:
        pairs = list(zip(self._inputs, self._stretch.inputs))
        for input, piece in pairs:
            if input.index > piece.start + place:  # they were taken before, with others
                input.go(piece.start + place)
        count = min(count, *(input.fill(count) for input in self._inputs))
        if not count or any(input.index != piece.start + place for input, piece in pairs):
            raise GivenUp("purged")
        if any(input.delays for input in self._inputs):
            raise GivenUp("delays")
        return Taken([input.take(count) for input in self._inputs], count, halved=halved)

    @override
    def stage(self, place: int, taken: Taken, results: Results, count: int) -> None:
        self.result.shown += _shown(taken)
        node, offset, values = self.job.node, self._stretch.offset + place, 0
        for cut in results.cuts(node, count):
            failure = None if cut.failure is None else travelling(cut.failure)
            run = CommitRun(offset + cut.start, offset + cut.stop, failure=failure)
            self.result.runs.append(run)
            for binding, pages in self._pages(taken, results, cut):
                run.outputs[binding] = staged = self._stage.collect(pages, True, self._room)
                self._room = max(0, self._room - staged.inline_bytes)
                values += staged.values
            if failure is not None:
                if node.options.max_errors is None:  # else the last one is the cause of a pause
                    failure.told = {}  # the error message has it
                self._failed += cut.stop - cut.start
                if self._failed > max(FAILURES_MAX, self.size if self._batch else 0):
                    raise GivenUp("failures")
        if not self._batch:
            self.size = min(2 * self.size, CHUNK_MESSAGES) if values <= CHUNK_VALUES else max(1, self.size // 2)

    def _pages(self, taken: Taken, results: Results, cut: Cut) -> Iterator[tuple[str, Sequence[PlacedPage]]]:
        """The outputs of a run as pages, with their provenance; or its error message."""
        if cut.failure is not None:
            record, own = self.error_of(taken, cut)
            yield ERRORS, [(0, page) for page in outgoing.build_error(record, NO_HASH, own)]
            return
        traced = taken.traced
        for binding, whole in results.outputs.items():
            options = self.job.options[binding]
            provenance: Provenance | None = None
            if isinstance(whole, TableOutput):
                if not whole.table.num_rows:
                    continue
                if traced and not options.strips:
                    provenance = taken.provenance().spread(whole.table.num_rows)
                yield binding, list(_placed_rows(whole, provenance, options))
                continue
            output = whole if cut.stop - cut.start == taken.count else whole.between(cut.start, cut.stop)
            if not output.items:
                continue
            if traced and not options.strips:
                provenance = taken.provenance()
                if self._batch:
                    provenance = provenance.spread(len(output.items))
                elif output.origins is None:
                    provenance = provenance.slice(cut.start, cut.stop)
                else:
                    provenance = provenance.select(output.origins)
            yield binding, list(_placed(output.items, provenance, options))


_stores: dict[tuple[int, Site, tuple[int, int]], Store] = {}
"""By process (workers are forked), place, and device and inode."""


def open_store(site: Site) -> Store:
    """The store, opened once in each process. Raises :class:`Unsupported` if this process cannot read it."""
    key = os.getpid(), site, site.inode()
    if key not in _stores:
        _stores[key] = site.open()
    return _stores[key]


def inputs_of(ranges: Sequence[InputRange]) -> list[Input]:
    """The inputs of a stretch, at its first message. Raises :class:`Diverged` and :class:`Unsupported`."""
    inputs = []
    for piece in ranges:
        input = Input(piece.binding, piece.tailer, open_store(piece.site).queue(piece.queue))
        input.identity = piece.identity
        if input.queue.core.row().identity != piece.identity:
            raise Diverged(
                f"The queue {piece.queue!r} of {piece.site.path} is another one here than in the driver.",
                "use a store that driver and executors share.",
                processor=piece.tailer.rpartition(".")[0],
            )
        input.go(piece.start)
        inputs.append(input)
    return inputs


def look(sites: Sequence[Site]) -> Unsupported | None:
    """The reason why this process cannot read the stores; None if it can."""
    try:
        for site in sites:
            open_store(site)
    except Unsupported as error:
        return error
    return None


def _shown(taken: Taken) -> Iterator[tuple[int, int]]:
    """Times of append of a chunk, of at most :data:`TIMES` record batches of each input, for its latency."""
    for piece in taken.slices:
        chosen = piece.batches[:: -(-len(piece.batches) // TIMES)]
        for number, batch in enumerate(chosen):
            yield batch.shown_ns, taken.count * (number + 1) // len(chosen) - taken.count * number // len(chosen)


def _placed(items: list[bytes], provenance: Provenance | None, options: QueueOptions) -> Iterator[PlacedPage]:
    """The pages of an output, each with its partition."""
    if options.partitions == 1:
        yield from ((0, page) for page in outgoing.build(items, options.strips, NO_HASH, provenance))
        return
    shares = outgoing.placed(items)
    if shares is None:
        shares = dict(_placer(options).shares(options, [codec.unpack_known(item) for item in items]))
    for partition, offsets in shares.items():
        chosen = [items[offset] for offset in offsets]
        selected = None if provenance is None else provenance.select(offsets)
        yield from ((partition, page) for page in outgoing.build(chosen, options.strips, NO_HASH, selected))


def _placed_rows(output: TableOutput, provenance: Provenance | None, options: QueueOptions) -> Iterator[PlacedPage]:
    """The records of columns of a table, each with its partition."""
    limit_bytes = batches.OWN_BYTES_MAX  # rows were measured when the call returned
    shares = output.shares
    if shares is None:
        if options.partitions == 1:
            pages = batches.build_table(
                output.table, limit_bytes, NO_HASH, provenance, options.strips, options.compression
            )
            yield from ((0, page) for page in pages)
            return
        shares = _placer(options).table_shares(options, output.table)
    for partition, offsets in shares:
        rows = columns.taken(output.table, offsets)
        selected = None if provenance is None else provenance.select(offsets)
        pages = batches.build_table(rows, limit_bytes, NO_HASH, selected, options.strips, options.compression)
        yield from ((partition, page) for page in pages)


def _placer(options: QueueOptions) -> Placer:
    """The placer of a chunk. Each begins its turns at another partition, so that small chunks do not all begin at the
    same one."""
    return Placer(options, secrets.randbelow(options.partitions))
