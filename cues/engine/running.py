"""A running graph, as the user has it: send and read messages, wait, drain, close.

    Graph.start ──▶ GraphRun ──▶ Engine      engine.py names the four engines

:class:`GraphRun` has what is the same for every engine: the events, the two flags (draining, halted), and the loops
that wait. Only the engine knows where the processors run.

Whether a graph is idle or done is read from the store, in one transaction. A commit moves positions
together with outputs. Therefore, at a moment at which no processor has anything to take, nothing is left.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from cues.base import events
from cues.base.shown import Progress
from cues.engine.disk_guard import DiskGuard
from cues.engine.sampler import Sampler
from cues.errors import Closed, InvalidArgument, QueueNotFound
from cues.graphs.running import RedriveResult, Running, Shared, UnitStatus
from cues.overrides import override
from cues.steps.tries import open_named

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from cues.engine.ending import Ending
    from cues.engine.engine import Engine
    from cues.graphs.graph import Graph
    from cues.graphs.pause import ProcessorPause
    from cues.graphs.plan import Plan
    from cues.queues.options import At, Delay
    from cues.queues.queue import Queue
    from cues.queues.store import Store

HURRY_S: Final = 0.5
"""For this time after a call that asks whether the graph is idle, steps do not wait for more messages."""
_LOOK_S: Final = 0.05
"""Longest time between two looks of a caller that waits."""


class GraphRun(Running):
    """A running graph over its engine."""

    def __init__(
        self, graph: Graph, engine: Engine, listeners: tuple[events.Listener, ...] = (), disk_low: bool = False
    ) -> None:
        """``disk_low``: a disk of the run is low already."""
        self.graph = graph
        self.engine = engine
        self.bus = events.Bus(list(listeners))
        self.emit = self.bus.emit
        self.changes = threading.Condition()
        """Notified by :meth:`changed`."""
        self._draining = threading.Event()
        self._halt = threading.Event()
        self._closed = False
        """The graph must not be used any more."""
        self._given_back = False
        """Locks and stores are given back. It is set after ``_closed``."""
        self._quiet_mark: tuple[int, float] | None = None
        self.hurried_at = -HURRY_S
        self._low: list[BaseException] = []
        """The error of the disk guard, if it stopped the run."""
        self._disk_low = disk_low
        """True while a disk of the run is low."""
        self._guard: DiskGuard | None = None
        self._sampler: Sampler | None = None
        self._progress = Progress(self)
        engine.start(self)

    @override
    def guard(self, min_free: int | None) -> None:
        stores = [self.store, *(queue.store for queue in self.queues.values())]
        self._guard = DiskGuard(self, stores, min_free, self._low.append, self.set_disk_low)
        self._guard.start()
        self._sampler = Sampler(self)
        self._sampler.start()

    @property
    @override
    def store(self) -> Store:
        return self.engine.store

    @property
    @override
    def plan(self) -> Plan:
        return self.engine.plan

    @property
    @override
    def queues(self) -> dict[str, Queue]:
        return self.engine.queues

    @property
    @override
    def shared(self) -> Shared | None:
        return self.engine.shared

    @property
    @override
    def pulls(self) -> bool:
        return self.engine.pulls

    @property
    @override
    def pids(self) -> dict[str, int]:
        return self.engine.pids

    @property
    @override
    def halted(self) -> bool:
        return self._halt.is_set()

    @property
    @override
    def closed(self) -> bool:
        return self._closed

    @property
    @override
    def draining(self) -> bool:
        return self._draining.is_set()

    # --- using ---

    @override
    def send(self, *arguments: Any, deliver_at: At = None, delay: Delay = None) -> int:
        self._check()
        if len(arguments) == 2:
            queue, message = arguments
            if self.shared is not None:
                self.shared.check_send(queue)
        elif len(arguments) == 1:
            queue, message = self.plan.source, arguments[0]
            if queue is None:
                raise InvalidArgument(
                    "The graph has no single source to send to.", "name the queue: send('queue', message)."
                )
        else:
            raise InvalidArgument(
                f"send() takes a queue and a message, found {len(arguments)} arguments.",
                "name the queue: send('queue', message).",
            )
        schema = self.plan.schema_of(queue)
        appender = self._queue(queue).appender(schema=schema)
        index: int = appender.write(message, deliver_at=deliver_at, delay=delay)
        return index

    @override
    def messages(self, queue: str) -> list[dict[str, Any]]:
        self._check()
        elsewhere = None if self.shared is None else self.shared.messages(queue)
        return list(self._queue(queue).tailer()) if elsewhere is None else elsewhere

    @override
    def redrive(
        self,
        *,
        queue: str = "",
        processor: str | None = None,
        index: Collection[int] = (),
        where: Callable[[dict[str, Any]], bool] | None = None,
        all: bool = False,
        timeout: float | None = None,
    ) -> RedriveResult:
        self._check()
        if self.shared is not None:
            raise InvalidArgument(
                f"redrive() is for stores, and the queues of {self.graph.id!r} are in {self.shared.place}.",
                "send the messages again.",
            )
        from cues.engine import redriving  # rarely used, and it loads the steps of a start
        from cues.steps.error_records import ErrorLogs

        redriving.check_choice(processor, index, where, all)
        graph, home = self.graph, self.store
        with ErrorLogs(home, redriving.error_queues(graph), queue) as logs:
            chosen = redriving.select(logs, processor, index, where)
            planned = redriving.plan(home, chosen, redriving.nodes_of(graph))
        return redriving.run(home, planned, None, timeout, halted=lambda: self.halted)

    @override
    def resume(self, processor: str | None = None) -> list[ProcessorPause]:
        self._check()
        if self.shared is not None:
            raise InvalidArgument(
                f"resume() is for stores, and the queues of {self.graph.id!r} are in {self.shared.place}.",
                "start the graph again: its processors are never paused.",
            )
        from cues.engine import pausing

        return pausing.resume_units(self.store, self.graph.id, processor)

    @override
    def pauses(self) -> list[ProcessorPause]:
        self._check()
        from cues.engine import pausing

        return pausing.list_pauses(self.store, self.graph.id)

    def _queue(self, name: str) -> Any:
        queue, slash, partition = name.partition("/")
        if queue in self.engine.queues and (not slash or partition.isdecimal()):
            opened = self.engine.queues[queue]
            return opened.partition(int(partition)) if slash else opened
        if "." in name:
            return open_named(self.store, name)  # a try log, or a fork queue
        raise QueueNotFound(
            f"The graph {self.plan.id!r} has no queue {name!r}; it has {', '.join(self.engine.queues)}.",
            "name one of those queues.",
            queue=name,
        )

    @override
    def counters(self) -> dict[str, events.Counters]:
        total: dict[str, events.Counters] = {}
        for unit in self.standings():
            known = total.get(unit.processor)
            total[unit.processor] = unit.counters if known is None else known.with_those_of(unit.counters)
        return total

    @override
    def standings(self) -> list[UnitStatus]:
        return self.engine.standings()

    @property
    @override
    def stuck(self) -> bool:
        return self.engine.stuck

    @property
    @override
    def stopped(self) -> list[BaseException]:
        return [*self.engine.stopped, *self._low]

    # --- waiting ---

    @override
    def idle(self) -> bool:
        return self.engine.idle()

    @override
    def wait_idle(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check()
            self.hurry()
            idle = self.idle()
            self._raise()
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            over = idle or self.halted or left <= 0
            self._progress.look(over)
            if over:
                return idle
            with self.changes:
                self.changes.wait(left)

    @override
    def wait_done(self, idle_exit_s: float | None = None) -> bool:
        ending: Ending | None = None
        while not self.halted:
            self._check()
            done = self.engine.done()  # asked once: a unit that only looks for messages makes it False for a moment
            over = done or (idle_exit_s is not None and self._quiet_for(idle_exit_s))
            self._progress.look(over)
            if over:
                self._raise()
                if done:
                    ending = ending or self._ending(kept=False)
                    if ending.go_on():
                        self._await_change()
                        continue
                return True
            self._await_change()
        for error in self._low:
            raise error
        return False

    @override
    def close_open(self) -> bool:
        if self.shared is not None:
            raise InvalidArgument(
                f"close_open() is for stores, and the queues of {self.graph.id!r} are in {self.shared.place}.",
                "send watermark(None) to the inputs of its windows.",
            )
        ending = self._ending(kept=True)
        while self.wait_idle():
            if not ending.go_on():
                return not ending.open
            self._await_change()
        return False

    def _ending(self, kept: bool) -> Ending:
        from cues.engine import ending  # it loads what most runs do not need

        units, only_targets = lambda: self.engine.units, self.shared is not None
        return ending.Ending(self.plan, self.store, units, self.emit, kept=kept, only_targets=only_targets)

    def _await_change(self) -> None:
        with self.changes:
            self.changes.wait(_LOOK_S)

    def _quiet_for(self, seconds: float) -> bool:
        """Return whether the graph is idle, and made no step for this time."""
        steps = sum(unit.counters.steps for unit in self.standings())
        now = time.monotonic()
        if self._quiet_mark is None or self._quiet_mark[0] != steps or not self.engine.resting():
            self._quiet_mark = (steps, now)
        if now - self._quiet_mark[1] < seconds:
            return False
        if self.idle():
            return True
        self._quiet_mark = (steps, now)
        return False

    def hurry(self) -> None:
        """Let steps not wait for more messages (``linger_s``) for a short time, because a caller waits for idleness."""
        self.hurried_at = time.monotonic()

    def may_linger(self) -> bool:
        """Return whether steps may wait for more messages now."""
        return not (self.draining or self.halted) and time.monotonic() - self.hurried_at >= HURRY_S

    def changed(self) -> None:
        """Wake the callers that wait, because a worker is idle now or has ended."""
        with self.changes:
            self.changes.notify_all()

    def _raise(self) -> None:
        for error in self.stopped:
            raise error

    # --- ending ---

    @override
    def drain(self, timeout: float | None = None) -> bool:
        self.end_sources()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (self.halted or self.engine.over or self.idle()):
            if deadline is not None and time.monotonic() > deadline:
                return False
            with self.changes:
                self.changes.wait(_LOOK_S)
        self.halt()
        return not self.engine.left

    @override
    def end_sources(self) -> None:
        self._draining.set()
        self.engine.end_sources()

    @override
    def halt(self) -> None:
        self._halt.set()
        self._draining.set()
        self.engine.halt()
        self.changed()

    @override
    def close(self, timeout: float = 30.0) -> None:
        if self._given_back:
            return
        if not self._closed:
            self.halt()
            self.engine.join(timeout)
            if self._guard is not None:
                self._guard.join()
            if self._sampler is not None:
                self._sampler.end()
            self._closed = True
        self.engine.close()
        self._given_back = True

    def sleep(self, seconds: float) -> bool:
        """Sleep. Return True if the graph was halted meanwhile."""
        return self._halt.wait(seconds)

    def set_disk_low(self, low: bool) -> None:
        """Let no step begin while a disk is low."""
        self._disk_low = low
        self.engine.set_disk_low(low)

    def wait_for_disk(self) -> bool:
        """Wait while a disk of the run is low. Return True if the run ends meanwhile."""
        while self._disk_low:
            if self.draining or self.sleep(_LOOK_S):
                return True
        return False

    def keep_stop(self, event: events.Stopped) -> None:
        """Record the reason of a stop in the store's directory, where ``cues status`` reads it even after the end."""
        self.engine.keep_stop(event)

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"The graph {self.graph.id!r} is closed.", "start it again with graph.start().")

    @override
    def __enter__(self) -> GraphRun:
        return self

    @override
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            try:
                self.drain()
            finally:
                self.close()
            for error in (*self.stopped, *self.engine.left):
                raise error
        else:
            self.close()

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else "draining" if self.draining else "running"
        return f"<cues.Running {self.graph.id} {state}>"
