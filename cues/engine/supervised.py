"""A graph whose processors run in workers: what :meth:`Graph.start` gives with ``workers=``.

It is used as any running graph. The stores are open in this process as well, for ``send`` and
``messages``; it owns no processor and calls no function of the user's.

Whether the graph is idle is asked twice: when every worker says at two moments that it has nothing to
do, and none has done a step in between, then there was a moment, the end of the first round, at which
none had. (One round would not do: a message may go from a worker that is asked later to one that
was asked before.)
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from cues.base import events
from cues.engine import wire
from cues.engine.assembly import refuse_frames, tell_of_misspelt
from cues.engine.assignment import assign, check_number
from cues.engine.growth import Growth, divide, taken_in, tell_of_growth
from cues.engine.origin import digests, origin_of
from cues.engine.record import WorkersRecord
from cues.engine.running import Running
from cues.engine.status import UnitStatus
from cues.engine.stores import open_stores, prepare, prepare_units
from cues.engine.supervisor import Supervisor
from cues.errors import AlreadyRunning, CuesError
from cues.steps.failure import passes
from cues.steps.ownership import supervisor_lock
from cues.storage import locks

if TYPE_CHECKING:
    from cues.graphs.graph import Graph
    from cues.graphs.plan import Plan
    from cues.graphs.processor import Node
    from cues.queues.queue import Queue
    from cues.queues.store import Store

ANSWER_S: Final = 1.0
"""How long an answer of a worker is waited for before the graph counts as busy."""
ORPHANS_S: Final = 5.0
"""How long a start waits for workers whose supervisor was killed: the kernel is ending them."""
_LOOK_S: Final = 0.05
_KILL_S: Final = 10.0


class Supervised(Running):
    """A graph that runs in worker processes, and their supervisor."""

    def _begin(self, **options: Any) -> None:
        self._plan = self.graph.plan()
        refuse_frames(self._plan)
        workers = options.pop("workers")
        check_number(workers)
        origin = origin_of(self.graph, options.pop("target"))
        take_over = options["take_over"]
        self._numbers = itertools.count(1)
        self._stores = open_stores(self.graph, self._plan, options["store"], options["accept_topology"], self.emit)
        home = self._stores.home
        self._lock = supervisor_lock(self.graph.id)
        try:
            if not home.locks.try_lock(self._lock) and not take_over:
                raise self._already_running(home.locks.holder(self._lock) or os.getpid())
            self._await_orphans()
            self._queues = prepare(self._stores, self._plan, self.graph, self.emit)
            tell_of_misspelt(self._plan, self._queues, self.emit)
            self._units = divide(self._plan, self._queues)
            self._growth = Growth(self._plan, self._queues, self._units)
            tell_of_growth(home, self._units, self.emit)
            prepare_units(self._stores, self._units)
            load = wire.LoadGraph("", origin, digests(self._plan), sys.argv)
            carry = wire.AssignUnits(
                (),
                os.path.abspath(home.path),
                None if self.graph.directory is None else str(self.graph.directory.resolve()),
                self.graph.durability,
                options["accept_topology"],
                take_over,
            )
            self._record = WorkersRecord(self.graph.id, os.getpid())
            self._supervisor = Supervisor(
                home,
                assign(self._plan.topology(), self._units, workers),
                lambda name: dataclasses.replace(load, worker=name),
                lambda units, first, over: dataclasses.replace(
                    carry,
                    units=units,
                    accept_topology=first and carry.accept_topology,
                    take_over=over or (first and carry.take_over),
                ),
                self._record,
                self.emit,
                self.changed,
                self._new_units,
            )
            self._supervisor.thread.start()
            try:
                self._supervisor.begun.wait()
                if self._supervisor.failed is not None:
                    raise self._supervisor.failed
            except BaseException:
                self._end_workers(0)
                raise
        except BaseException:
            self._give_back()
            raise

    def _already_running(self, pid: int) -> AlreadyRunning:
        here = pid == os.getpid()
        where = "in workers of this process" if here else f"by process {pid} and its workers"
        return AlreadyRunning(
            f"The graph {self.graph.id} is already run {where}, on the store {self._stores.home.path}.",
            "stop that one first" + ("." if here else f" (kill {pid})."),
            pid=pid,
        )

    def _await_orphans(self) -> None:
        """Let the workers of a supervisor that was killed come to their end, which the kernel has begun."""
        home = self._stores.home
        record = WorkersRecord.of(home.path, self.graph.id)
        deadline = time.monotonic() + ORPHANS_S
        for worker in record.workers.values() if record is not None else ():
            for unit in worker.units:
                while home.locks.holder(locks.offset_of(unit)) == worker.pid and time.monotonic() < deadline:
                    time.sleep(0.005)

    @property
    def store(self) -> Store:
        return self._stores.home

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def queues(self) -> dict[str, Queue]:
        return self._queues

    @property
    def pids(self) -> dict[str, int]:
        """The processes of the workers that are alive, by name."""
        return {post.name: post.child.pid for post in self._supervisor.posts if post.child is not None}

    # --- how it goes ---

    def standings(self) -> list[UnitStatus]:
        found = self._supervisor.standings()
        return [found[unit.id] for unit in self._units if unit.id in found]

    @property
    def stuck(self) -> bool:
        return False  # who did not come to an end was killed

    @property
    def stopped(self) -> list[BaseException]:
        failed = self._supervisor.failed
        return [*self._supervisor.stopped.values(), *([] if failed is None else [failed])]

    def idle(self) -> bool:
        first = self._answers()
        if first is None or not all(one.idle for one in first):
            return False
        second = self._answers()
        if second is None or not all(one.idle for one in second) or _steps(first) != _steps(second):
            return False
        return not self._grown()  # last: what was not there by now was not there at that moment either

    def _grown(self) -> bool:
        if not any(self._growth.look()):
            return False
        self._supervisor.take_in()
        return True

    def _new_units(self) -> Sequence[Node]:
        """The units of partitions that came, which the supervisor gives to workers."""
        try:
            missing, misfits = self._growth.look()
            prepare_units(self._stores, missing)
        except (CuesError, OSError) as error:
            if passes(error):  # for the next look
                return []
            raise
        self._misfits.bear(misfits)
        if missing:
            self._growth.took(missing)
            self._units = [*self._units, *missing]
            for event in taken_in(missing):
                self.emit(event)
        return missing

    def _resting(self) -> bool:
        """Whether every worker runs, and none was in a step when it spoke last. Asks nobody."""
        children = [post.child for post in tuple(self._supervisor.posts)]
        return all(child is not None and child.stand is not None and not child.stand.busy for child in children)

    def _answers(self) -> list[wire.StatusReply] | None:
        """What every worker says when it is asked now; None where one is not there, or does not answer."""
        posts = tuple(self._supervisor.posts)
        children = [post.child for post in posts if post.child is not None and post.child.status == "running"]
        if len(children) < len(posts):
            return None
        number = next(self._numbers)
        self._supervisor.look(number)
        deadline = time.monotonic() + ANSWER_S
        with self._condition:
            while True:
                found = [child.answer for child in children]
                stands = [one for one in found if one is not None and one.number >= number]
                if len(stands) == len(children):
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._condition.wait(left)
        return stands if children == [post.child for post in tuple(self._supervisor.posts)] else None

    def wait_done(self, idle_exit_s: float | None = None) -> bool:
        """As of any running graph; but a processor that stopped is told of at the end, since the others go on."""
        live = bool(self.plan.fed)
        while not self.halted:
            self._check()
            nothing_runs = not self._supervisor.posts
            if (
                nothing_runs
                or (not live and self._done())
                or (idle_exit_s is not None and self._quiet_for(idle_exit_s))
            ):
                self._raise()
                return True
            if self._supervisor.failed is not None:
                raise self._supervisor.failed
            with self._condition:
                self._condition.wait(_LOOK_S)
        return False

    def _done(self) -> bool:
        kinds = {node.id: node.kind for node in self.plan.running}
        sources = [one for one in self.standings() if kinds[one.processor] == "source"]
        return all(one.state != "running" for one in sources) and self.idle()

    def _quiet_for(self, seconds: float) -> bool:
        steps = sum(one.counters.steps for one in self.standings())
        now = time.monotonic()
        if self._quiet_mark is None or self._quiet_mark[0] != steps or not self._resting():
            self._quiet_mark = (steps, now)
        if now - self._quiet_mark[1] < seconds:
            return False
        if self.idle():
            return True
        self._quiet_mark = (steps, now)
        return False

    # --- ending ---

    def end_sources(self) -> None:
        self._draining.set()
        self._supervisor.drain()

    def drain(self, timeout: float | None = None) -> bool:
        self.end_sources()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.halted and self._supervisor.posts and self._supervisor.failed is None and not self.idle():
            if deadline is not None and time.monotonic() > deadline:
                return False
            with self._condition:
                self._condition.wait(_LOOK_S)
        self.halt()
        return True

    def halt(self) -> None:
        self._halt.set()
        self._draining.set()
        self._supervisor.halt()
        self.changed()

    def close(self, timeout: float = 30.0) -> None:
        """Halt, wait for the steps under way, and give everything back; workers that still run then are killed."""
        if self._given_back:
            return
        self._closed = True
        self._end_workers(timeout)
        self._give_back()
        self._given_back = True

    def _end_workers(self, timeout: float) -> None:
        self.halt()
        self._supervisor.thread.join(timeout)
        if self._supervisor.thread.is_alive():
            self._supervisor.kill()
            self._supervisor.thread.join(_KILL_S)

    def _give_back(self) -> None:
        if not self._stores.home.closed:
            self._stores.home.locks.unlock(self._lock)
        self._stores.close()


def _steps(stands: list[wire.StatusReply]) -> list[tuple[str, int]]:
    return sorted((one.id, one.counters.steps) for stand in stands for one in stand.standings)


def start(
    graph: Graph,
    *,
    workers: int | Literal["auto"],
    target: str | None = None,
    store: str | os.PathLike[str] | Store | None = None,
    accept_topology: bool = False,
    take_over: bool = False,
    listeners: tuple[events.Listener, ...] = (),
) -> Supervised:
    """What :meth:`Graph.start` does with ``workers=``."""
    return Supervised(
        graph,
        workers=workers,
        target=target,
        store=store,
        accept_topology=accept_topology,
        take_over=take_over,
        listeners=listeners,
    )
