"""A backfill: the graph's functions process all messages that are on the queues, and then the graph ends.

    graph.start(engine="spark", backfill=True)

Its steps are those of every graph on Spark (stretches.py). Sources do not run, and messages that other programs send
after the start wait for the next run. It ends when no processor has messages left: error queues and cycles bring
messages back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cues.engine.threads import Worker
from cues.errors import GraphError
from cues.graphs.processor import Node
from cues.graphs.processor_rows import ProcessorRow
from cues.overrides import override
from cues.queues.base import views_of
from cues.queues.log import Log
from cues.records.log_row import LogRow
from cues.spark.driver import SparkEngine
from cues.spark.stretches import StretchStepper
from cues.steps.feed import SourceStepper
from cues.steps.stepper import Stepper


class BackfillWorker(Worker):
    """One unit, which takes the messages before the ends of the backfill."""

    def __init__(self, engine: BackfillEngine, stepper: Stepper) -> None:
        super().__init__(engine.host, stepper)
        self._ends = engine.ends

    @override
    @property
    def _exhausted(self) -> bool:
        return isinstance(self.stepper, SourceStepper)

    @override
    def _turn(self) -> bool:
        """Make a step, unless it would take only messages that were sent after the start."""
        stepper = self.stepper
        assert isinstance(stepper, StretchStepper)
        some = any if stepper.node.mode == "alts" else all
        now = some(stepper.ranges.left(read, self._ends.get(read.log.id)) > 0 for read in stepper.inputs)
        later = some(stepper.ranges.left(read, None) > 0 for read in stepper.inputs)
        if later and not (now or stepper.taker.repeats is not None or stepper.lanes_wait()):
            self._mark(False)
            self.running.changed()
            return False
        return super()._turn()

    @override
    def pull(self) -> None:
        """Do nothing: sources do not run."""

    @override
    def idle(self, row: ProcessorRow | None, log_row: Callable[[Log], LogRow], paused: bool = False) -> bool:
        def before_end(log: Log) -> LogRow:
            found = log_row(log)
            return found._replace(next=min(found.next, self._ends.get(log.id, found.next)))

        return super().idle(row, before_end, paused)


class BackfillEngine(SparkEngine):
    """Processes the messages that are on the queues, and ends. No source runs."""

    pulls = False

    @override
    def _start_threads(self) -> None:
        nodes = [node for node in self.plan.running if node.inputs]
        written = {port.queue for node in nodes for port in node.writes} | {node.errors for node in nodes}
        self.ends = {
            view.core.log.id: view.core.row().next
            for name, queue in self.queues.items()
            if name not in written
            for view in views_of(queue)
        }
        """The ends, at the start, of the logs that only others write to. The next run takes later messages."""
        super()._start_threads()

    @override
    def _worker(self, stepper: Stepper) -> Worker:
        return BackfillWorker(self, stepper)

    @override
    def _take_in(self, units: Sequence[Node]) -> None:
        """Refuse new partitions: their ends at the start are not known."""
        raise GraphError(
            f"The queues that {units[0].processor} reads have got partitions during a backfill, which reads only"
            " the partitions of its start.",
            "start the backfill again; it continues where it is now.",
            processor=units[0].name,
        )

    @override
    def resting(self) -> bool:
        return False  # a backfill ends by itself, and not after a quiet time

    @override
    def done(self) -> bool:
        """Return True if nothing is left before the ends. Queues that are fed from outside do not keep it from that."""
        self.host.hurry()
        return bool(self.stopped) or self.idle()
