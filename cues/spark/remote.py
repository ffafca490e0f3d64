"""The driver's side of a processor's function on Spark: its runner, and the rules of what is called where.

Executors call a function over stretches of its queues (stretches.py, pages.py).

Not guaranteed: that a function is called once. Therefore functions with side effects, and functions that need the
processor's state, are called in the driver. So is a frame; executors carry out the plan that it makes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from cues import faults
from cues.errors import Unsupported
from cues.graphs.options import why_in_driver
from cues.graphs.processor import Node
from cues.overrides import override
from cues.queues.store import Store
from cues.spark.executor import JobGroup, is_of_spark
from cues.spark.failures import in_short
from cues.spark.pages import look
from cues.spark.place import Site
from cues.steps.process import Process
from cues.steps.runner import Runner, StepAborted
from cues.steps.taking import Taken


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
            self.jobs.describe(ranges_of(taken))
            result = self._invoke(taken, [given], self._process)
            encoder = frame_encoder(self._node.id, result)
            messages = [message for rows in result.toArrow().to_batches() for message in encoder.messages(rows)]
        except Exception as error:
            if is_of_spark(error):  # no message failed
                raise StepAborted(self.jobs.failed(error, ranges_of(taken))) from None
            raise
        faults.point("function.after")
        return messages


def ranges_of(taken: Taken) -> dict[str, tuple[int, int]]:
    """The range of a step on each input, by tailer id."""
    return {piece.input.tailer: (piece.start, piece.stop) for piece in taken.slices}


def require_sight(context: Any, stores: Iterable[Store]) -> None:
    """Raise :class:`Unsupported` if an executor cannot read the stores. One task for each core tries to."""
    sites = [Site.of(store) for store in stores]
    cores = int(context.defaultParallelism)
    try:
        errors: list[Unsupported | None] = context.parallelize([sites] * cores, cores).map(look).collect()
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
    if node.kind == "frame":
        return "it makes a plan, which executors carry out"
    return why_in_driver(node.options)
