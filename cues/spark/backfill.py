"""A backfill: the graph's functions process all messages that are on the queues, and then the graph ends.

    graph.start(engine="spark", backfill=True)

One processor works at a time, each after those that it gets messages from. Then the first works again, until no
processor has messages left (error queues and cycles bring messages back). Sources do not run. Its steps are those of
every graph on Spark (stretches.py).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from cues.engine.threads import Worker
from cues.errors import GraphError
from cues.graphs.processor import Node
from cues.overrides import override
from cues.spark.driver import SparkEngine
from cues.spark.stretches import StretchStepper
from cues.steps.feed import SourceStepper
from cues.steps.stepper import Stepper

LOOK_S: Final = 0.2
"""Longest wait of a thread for its turn before it checks that the graph is not halted."""


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
            self.running.hurry()  # ``linger_s`` does not wait here
            moves = super()._turn()
        self.busy = False
        return Turn(self.delivery.counters.steps != steps, waits=not moves)

    def _any_left(self) -> bool:
        delivery = self.delivery
        assert isinstance(delivery, StretchStepper)
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
