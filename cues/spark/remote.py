"""A processor's function on Spark: executors call it over stretches of its queues (stretches.py, chunk.py).

This module has the parts of both sides: the ranges that executors read from the store, the runner that the driver has
instead of the usual one, and the rules of what is called where.

Not guaranteed: that a function is called once. Therefore functions with side effects, and functions that need the
processor's state, are called in the driver. So is a frame; executors carry out the plan that it makes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cues import faults
from cues.base.events import Counters
from cues.errors import Diverged, Unsupported
from cues.graphs.processor import Node
from cues.overrides import override
from cues.queues.options import QueueOptions
from cues.queues.store import Store
from cues.spark.executor import (
    Job,
    JobGroup,
    NeedsState,
    is_of_spark,
    runner_of,
)
from cues.spark.place import Site
from cues.spark.session import in_short
from cues.steps.process import Process, ProcessCore
from cues.steps.runner import Runner, StepAborted
from cues.steps.state import Layer, StateTable
from cues.steps.taking import Input, Slice, Taken


class InputRange(NamedTuple):
    """The messages of a stretch on one input, beginning at ``start``."""

    binding: str
    tailer: str
    site: Site
    queue: str
    identity: bytes
    start: int


class Stretch(NamedTuple):
    """A part of a job's range, for one task."""

    offset: int
    """Offset of its first message in the job."""
    messages: int
    pieces: tuple[InputRange, ...]


@dataclass(frozen=True)
class StepJob(Job):
    """The job of a processor over a store."""

    generation: int
    options: dict[str, QueueOptions]
    """By output binding."""


# --- in an executor -----------------------------------------------------------------------------


class _RemoteCore(ProcessCore):
    @override
    def states(self) -> Layer:
        raise NeedsState


class _RemoteProcess(Process):
    """``process`` without state."""

    core_type = _RemoteCore


_stores: dict[tuple[int, Site, tuple[int, int]], Store] = {}
"""By process (workers are forked), place, and device and inode."""


def remote_runner(job: StepJob, part: Stretch, counters: Counters) -> Runner:
    """The runner that calls the job's function without state."""
    state = StateTable(_store(part.pieces[0].site), job.node.key)  # never read
    return runner_of(job, job.generation, state, job.options.__getitem__, counters, process_type=_RemoteProcess)


def inputs_of(part: Stretch) -> list[Input]:
    """The inputs of a part, at its first message. Raises :class:`Diverged` and :class:`Unsupported`."""
    inputs = []
    for piece in part.pieces:
        input = Input(piece.binding, piece.tailer, _store(piece.site).queue(piece.queue))
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
    """The driver's runner, with the jobs of its processor. It calls a frame."""

    def __init__(self, session: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._session = session
        self.context = session.sparkContext
        self.jobs = JobGroup(self.context, self._node.id, f"cues {self._node.id} {id(self)}")

    @override
    def close(self) -> None:
        """Give up a step under way."""
        self.jobs.cancelled = True
        super().close()
        self.jobs.cancel()

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
                raise StepAborted(self.jobs.failed(error, f"of {taken.count} messages")) from None
            raise
        faults.point("function.after")
        return messages


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
