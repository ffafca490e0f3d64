"""The engine with workers: a supervisor in this process, and worker processes that run the processors.

    SupervisedEngine ──▶ Supervisor ──▶ Child ──▶ a worker process      supervisor.py, child.py, workers.py

The stores are open in this process as well, for ``send`` and ``messages``. This process owns no processor and
calls no function of the user.

Whether the graph is idle is asked twice. If every worker answers in both rounds that it has nothing to do, and none
made a step in between, then at the end of the first round no worker had anything to do. (One round is not enough: a
worker that is asked later may send a message to a worker that was asked before.)
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from cues.base import collector, events
from cues.engine import identities, wire
from cues.engine.assembly import claimants_of, refuse_frames, tell_of_misspelt
from cues.engine.assignment import assign, check_number
from cues.engine.engine import Host
from cues.engine.growth import Growth, divide, tell_of_growth
from cues.engine.origin import Origin, digests, origin_of
from cues.engine.record import WorkersRecord
from cues.engine.running import GraphRun
from cues.engine.status import sources_ended
from cues.engine.stores import open_stores, prepare, prepare_units
from cues.engine.supervisor import Supervisor
from cues.errors import AlreadyRunning, CuesError
from cues.graphs.running import Shared, UnitStatus
from cues.steps.failure import passes
from cues.steps.ownership import supervisor_lock
from cues.storage.locks import offset_of

if TYPE_CHECKING:
    from cues.graphs.graph import Graph
    from cues.graphs.plan import Plan
    from cues.graphs.processor import Node
    from cues.queues.queue import Queue
    from cues.queues.store import Store

ANSWER_S: Final = 1.0
"""Longest wait for the answer of a worker. Without an answer the graph counts as busy."""
ORPHANS_S: Final = 5.0
"""Longest wait of a start for workers whose supervisor was killed. The kernel ends them at that moment."""
_KILL_S: Final = 10.0
"""Longest wait for the end of workers that were killed."""


class SupervisedEngine:
    """Worker processes, and their supervisor. An :class:`Engine`."""

    pulls: bool = True
    shared: Shared | None = None
    stuck = False
    """A worker that does not end is killed, and the call of a function with it."""

    def __init__(
        self,
        graph: Graph,
        workers: int | Literal["auto"],
        target: str | None,
        store: str | os.PathLike[str] | Store | None,
        accept_topology: bool,
        take_over: bool,
    ) -> None:
        self._graph = graph
        self._workers = workers
        self._target = target
        self._store = store
        self._accept_topology = accept_topology
        self._take_over = take_over
        self._numbers = itertools.count(1)

    def start(self, host: Host) -> None:
        """Start the workers, and wait until they own their units and run."""
        self._host = host
        self.plan: Plan = self._graph.plan()
        refuse_frames(self.plan)
        check_number(self._workers)
        origin = origin_of(self._graph, self._target)
        self._stores = open_stores(self._graph, self.plan, self._store, self._accept_topology, host.emit)
        self.store: Store = self._stores.home
        self._lock = supervisor_lock(self._graph.id)
        try:
            self._claim()
            self.queues: dict[str, Queue] = prepare(self._stores, self.plan, self._graph, host.emit)
            tell_of_misspelt(self.plan, self.queues, host.emit)
            self._units = divide(self.plan, self.queues)
            self._growth = Growth(self.plan, self.queues, self._units, host.emit)
            claimants = functools.partial(claimants_of, self.queues)
            accept, take_over = self._accept_topology, self._take_over
            identities.rename(self.store, self.plan, self._units, claimants, accept, take_over, host.emit)
            tell_of_growth(self.store, self._units, host.emit)
            self._units = prepare_units(self._stores, self._units)
            self._supervisor = self._supervise(origin)
            self._supervisor.thread.start()
            try:
                self._supervisor.begun.wait()
                if self._supervisor.failed is not None:
                    raise self._supervisor.failed
                identities.note(self.store, self.plan, host.emit)
            except BaseException:
                host.halt()
                self.join(0)
                raise
        except BaseException:
            self.close()
            raise

    def _claim(self) -> None:
        """Take the lock of the supervisor. Raises :class:`AlreadyRunning`, unless this start takes over."""
        locks, graph = self.store.core.locks, self._graph.id
        if not locks.try_lock(self._lock) and not self._take_over:
            pid = locks.holder(self._lock) or os.getpid()
            here = pid == os.getpid()
            where = "in workers of this process" if here else f"by process {pid} and its workers"
            raise AlreadyRunning(
                f"The graph {graph} is already run {where}, on the store {self.store.path}.",
                "wait until it ends, or stop it" + ("." if here else f" (kill {pid})."),
                pid=pid,
            )
        self._await_orphans()

    def _await_orphans(self) -> None:
        """Wait for the end of the workers of a supervisor that was killed. The kernel has begun to end them."""
        record = WorkersRecord.of(self.store.path, self._graph.id)
        deadline = time.monotonic() + ORPHANS_S
        for worker in record.workers.values() if record is not None else ():
            for unit in worker.units:
                while self.store.core.locks.holder(offset_of(unit)) == worker.pid and time.monotonic() < deadline:
                    time.sleep(0.005)

    def _supervise(self, origin: Origin) -> Supervisor:
        graph, store = self._graph, self.store
        return Supervisor(
            store,
            assign(self.plan.topology(), self._units, self._workers),
            wire.LoadGraph("", origin, digests(self.plan), sys.argv, collector.chosen),
            wire.AssignUnits(
                (),
                os.path.abspath(store.path),
                None if graph.directory is None else str(graph.directory.resolve()),
                graph.durability,
                self._accept_topology,
                self._take_over,
            ),
            WorkersRecord.begin(store.directory, graph.id, {node.id for node in self.plan.running}),
            self._host,
            self._new_units,
        )

    @property
    def pids(self) -> dict[str, int]:
        return {slot.name: slot.child.pid for slot in self._supervisor.slots if slot.child is not None}

    # --- the work that is left ---

    @property
    def units(self) -> Sequence[Node]:
        return self._units

    def standings(self) -> list[UnitStatus]:
        status = self._supervisor.standings()
        return [status[unit.id] for unit in self._units if unit.id in status]

    @property
    def stopped(self) -> list[BaseException]:
        failed = self._supervisor.failed
        return [*([] if failed is None else [failed]), *self._supervisor.stopped.values()]

    @property
    def left(self) -> list[BaseException]:
        """Empty: workers tell of their outages by events only."""
        return []

    def idle(self) -> bool:
        first = self._answers()
        if first is None or not all(answer.idle for answer in first):
            return False
        second = self._answers()
        if second is None or not all(answer.idle for answer in second) or _steps(first) != _steps(second):
            return False
        return not self._grown()  # last: a partition that is not there now was not there at that moment either

    def _grown(self) -> bool:
        if not any(self._growth.look()):
            return False
        self._supervisor.take_in()
        return True

    def _new_units(self) -> Sequence[Node]:
        """Return the units of partitions that came while the graph runs. The supervisor gives them to workers."""
        try:
            missing = self._growth.take_in(lambda units: prepare_units(self._stores, units))
        except (CuesError, OSError) as error:
            if passes(error):  # the next look finds them
                return []
            raise
        self._units = [*self._units, *missing]
        return missing

    def resting(self) -> bool:
        """Return whether every worker runs, and none was in a step at its last report. No worker is asked."""
        children = [slot.child for slot in tuple(self._supervisor.slots)]
        replies = [None if child is None else child.status_reply for child in children]
        return all(reply is not None and not reply.busy for reply in replies)

    def _answers(self) -> list[wire.StatusReply] | None:
        """The answers of all workers to a question that is asked now; None if one is not there, or does not answer."""
        slots = tuple(self._supervisor.slots)
        children = [slot.child for slot in slots if slot.child is not None and slot.child.status == "running"]
        if len(children) < len(slots):
            return None
        number = next(self._numbers)
        self._supervisor.look(number)
        deadline = time.monotonic() + ANSWER_S
        with self._host.changes:
            while True:
                answers = [child.answer for child in children]
                now = [answer for answer in answers if answer is not None and answer.number >= number]
                if len(now) == len(children):
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._host.changes.wait(left)
        return now if children == [slot.child for slot in tuple(self._supervisor.slots)] else None

    def done(self) -> bool:
        return self.over or bool(self.stopped) or (sources_ended(self.plan, self.standings()) and self.idle())

    @property
    def over(self) -> bool:
        return not self._supervisor.slots or self._supervisor.failed is not None

    # --- ending ---

    def end_sources(self) -> None:
        self._supervisor.drain()

    def set_disk_low(self, low: bool) -> None:
        self._supervisor.set_disk_low(low)

    def halt(self) -> None:
        self._supervisor.halt()

    def join(self, timeout: float) -> None:
        """Wait for the steps under way. A worker that still runs after ``timeout`` seconds is killed."""
        self._supervisor.thread.join(timeout)
        if self._supervisor.thread.is_alive():
            self._supervisor.kill()
            self._supervisor.thread.join(_KILL_S)

    def close(self) -> None:
        if not self.store.closed:
            self.store.core.locks.unlock(self._lock)
        self._stores.close()

    def keep_stop(self, event: events.Stopped) -> None:
        """Do nothing: the supervisor does it."""


def _steps(answers: list[wire.StatusReply]) -> list[tuple[str, int]]:
    return sorted((unit.id, unit.counters.steps) for answer in answers for unit in answer.standings)


def start(
    graph: Graph,
    *,
    workers: int | Literal["auto"],
    target: str | None = None,
    store: str | os.PathLike[str] | Store | None = None,
    accept_topology: bool = False,
    take_over: bool = False,
    listeners: tuple[events.Listener, ...] = (),
) -> GraphRun:
    """Start ``graph`` in worker processes, for :meth:`Graph.start` with ``workers=``."""
    return GraphRun(graph, SupervisedEngine(graph, workers, target, store, accept_topology, take_over), listeners)
