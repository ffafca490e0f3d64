"""A running graph, as the user has it: send and read messages, wait, drain, close.

    Running ──▶ WorkerThread ──▶ Worker      threads.py
            ──▶ ForwarderThread
            ──▶ keeper                       a thread that renews leases and takes new partitions in
            ──▶ Assembly                     assembly.py: stores, locks and steppers, given back by close()

Whether a graph is idle or done is read from the store, in one transaction. A commit moves positions
together with outputs. Therefore, at a moment at which no processor has anything to take, nothing is left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from cues import faults
from cues.base import events
from cues.engine import record
from cues.engine.assembly import Assembly, assemble
from cues.engine.growth import MisfitLimit, taken_in
from cues.engine.status import Shared, UnitStatus
from cues.engine.threads import ForwarderThread, Worker, WorkerThread
from cues.errors import Closed, InvalidArgument, QueueNotFound
from cues.forwarding.forwarder import Forwarder
from cues.queues.log import Log
from cues.queues.processor_rows import ProcessorRow, read_row
from cues.records.log_row import LogRow
from cues.steps.failure import passes, stop_event, stopped_by
from cues.steps.feed import SourceStepper
from cues.steps.ownership import LEASE_BEAT_S
from cues.steps.stepper import Stepper
from cues.storage import leases

if TYPE_CHECKING:
    from cues.graphs.graph import Graph
    from cues.graphs.plan import Plan
    from cues.graphs.processor import Node
    from cues.queues.queue import Queue
    from cues.queues.store import Store

HURRY_S: Final = 0.5
"""For this time after a call that asks whether the graph is idle, steps do not wait for more messages."""
_LOOK_S: Final = 0.05
_KEEP_S: Final = 0.5
"""Longest time until the new partitions of a queue are taken in."""


class Running:
    """A started graph. A context manager: leaving it drains, stops, and raises what stopped a processor."""

    patient: ClassVar[bool] = False
    """Whether a unit waits for a condition of the store that may pass, instead of stopping."""
    pulls: ClassVar[bool] = True
    """Whether sources run."""
    shared: Shared | None = None
    """Queues that are not in :attr:`store`."""

    def __init__(self, graph: Graph, **options: Any) -> None:
        self.graph = graph
        self.bus = events.Bus()
        self.emit = self.bus.emit
        self._draining = threading.Event()
        self._halt = threading.Event()
        self._condition = threading.Condition()
        self._closed = False
        """Used no more."""
        self._given_back = False
        """Locks and stores; after ``_closed``."""
        self._quiet_mark: tuple[int, float] | None = None
        self._hurried_at = -HURRY_S
        self.bus.listeners += options.pop("listeners", ())
        self.workers: list[Worker] = []
        self.forwarder_threads: list[ForwarderThread] = []
        self._threads: list[WorkerThread | ForwarderThread] = []
        self._failures: list[BaseException] = []
        """What keeps the graph from going on, and is no processor's."""
        self._look = threading.Event()
        """Set: the keeper looks at once."""
        self._misfits = MisfitLimit(graph.id, self.emit)
        self._recording = threading.Lock()
        self._begin(**options)
        self.started_at = time.monotonic()

    def _begin(self, **options: Any) -> None:
        """Own the processors, and start their threads."""
        self._assembly: Assembly = assemble(
            self.graph,
            pause=self.pause,
            stopping=self._draining.is_set,
            may_linger=self.may_linger,
            emit=self.emit,
            **options,
        )
        try:
            self._start_threads()
            self._forget_stops()
        except BaseException:  # whoever is interrupted here has nothing to close
            self.halt()
            for one in self._threads:
                if one.thread.ident is not None:
                    one.thread.join()
            self._assembly.close()
            raise

    def _start_threads(self) -> None:
        self._run(self._assembly.steppers, self._assembly.forwarders)
        self._keeper = threading.Thread(target=self._keep, name="cues keeper", daemon=True)
        self._keeper.start()

    def _run(self, steppers: Sequence[Stepper], forwarders: Sequence[Forwarder]) -> None:
        """Have threads step these, besides what runs already."""
        workers = [self._worker(delivery) for delivery in steppers]
        forwarder_threads = [ForwarderThread(self, forwarder) for forwarder in forwarders]
        started: list[WorkerThread | ForwarderThread] = [*self._deal(workers), *forwarder_threads]
        self._threads += started
        self.workers = [*self.workers, *workers]
        self.forwarder_threads = [*self.forwarder_threads, *forwarder_threads]
        for one in started:
            one.thread.start()

    def _deal(self, workers: Sequence[Worker]) -> list[WorkerThread]:
        """Share units out among the threads of their processors, as many as it has instances; returns the new ones."""
        worker_threads = [one for one in self._threads if isinstance(one, WorkerThread)]
        new: list[WorkerThread] = []
        for worker in workers:
            mine = [
                worker_thread
                for worker_thread in (*worker_threads, *new)
                if worker_thread.processor == worker.delivery.node.processor
            ]
            mine = sorted(
                (worker_thread for worker_thread in mine if not worker_thread.ended),
                key=lambda worker_thread: worker_thread.count,
            )
            full = len(mine) >= worker.delivery.node.options.instances
            if not (full and any(worker_thread.add(worker) for worker_thread in mine)):
                new.append(WorkerThread(self, worker))
        return new

    def _worker(self, delivery: Stepper) -> Worker:
        return Worker(self, delivery)

    @property
    def store(self) -> Store:
        return self._assembly.store

    @property
    def plan(self) -> Plan:
        return self._assembly.plan

    @property
    def queues(self) -> dict[str, Queue]:
        """Every queue that the graph names, opened."""
        return self._assembly.queues

    @property
    def halted(self) -> bool:
        return self._halt.is_set()

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    # --- using ---

    def send(self, *arguments: Any) -> int:
        """``send(queue, message)``, or ``send(message)`` to the graph's source; returns the index.

        One commit each. Raises as :meth:`Appender.write` does.
        """
        self._check()
        if len(arguments) == 2:
            queue, message = arguments
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
        index: int = self._queue(queue).appender().write(message)
        return index

    def messages(self, queue: str) -> list[dict[str, Any]]:
        """All messages that are on a queue now."""
        self._check()
        return list(self._queue(queue).tailer())

    def _queue(self, name: str) -> Any:
        queue, slash, partition = name.partition("/")
        if queue in self.queues and (not slash or partition.isdecimal()):
            found = self.queues[queue]
            return found.partition(int(partition)) if slash else found
        if "." in name:
            return self.store.queue(name)  # a try log, or a fork queue
        raise QueueNotFound(
            f"The graph {self.plan.id!r} has no queue {name!r}; it has {', '.join(self.queues)}.",
            "name one of those queues.",
            queue=name,
        )

    def counters(self) -> dict[str, events.Counters]:
        """By processor id, since the start; of a processor over partitions, all units together."""
        found: dict[str, events.Counters] = {}
        for standing in self.standings():
            counters, id = standing.counters, standing.processor
            found[id] = counters if id not in found else found[id].with_those_of(counters)
        return found

    def standings(self) -> list[UnitStatus]:
        """The status of each unit, in the order of the plan."""
        return [worker.standing for worker in self.workers]

    @property
    def stuck(self) -> bool:
        """Whether, after :meth:`close`, a call of a user's function has not returned."""
        return any(worker.thread.is_alive() for worker in self.workers)

    def idle(self) -> bool:
        """Whether no processor has anything to do, at one moment.

        One transaction of the home store sees all positions and what there is to take and to forward
        there. Other stores are read after it. A reader that is at the end of such a queue by then was at its end
        at that moment already.
        """
        marks = [(w.busy, w.delivery.counters.steps) for w in self.workers]
        rows: dict[str, ProcessorRow | None] = {}
        known: dict[Log, LogRow] = {}
        logs = {one.log for worker in self.workers for one in worker.delivery.inputs}
        with self.store.view() as txn:
            for worker in self.workers:
                rows[worker.id] = read_row(txn, worker.id)
            known |= {log: log.row(txn) for log in logs if log.store.id == self.store.id}
            ends = [forwarder_thread.forwarder.ends(txn) for forwarder_thread in self.forwarder_threads]
        forwarded = all(forwarder_thread.idle(end) for forwarder_thread, end in zip(self.forwarder_threads, ends))
        for log in logs - known.keys():
            with log.store.view() as txn:
                known[log] = log.row(txn)
        quiet = forwarded and all(worker.idle(rows[worker.id], known.__getitem__) for worker in self.workers)
        if not quiet or marks != [(w.busy, w.delivery.counters.steps) for w in self.workers]:
            return False
        return not self._grown()  # last: what was not there by now was not there at that moment either

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; True then, False at the timeout.

        Raises :class:`ProcessorStopped`, with the user's exception as its cause, when a processor
        stopped.
        """

        def idle() -> bool:
            self.hurry()
            return self.idle()

        return self._wait(idle, timeout)

    def wait_done(self, idle_exit_s: float | None = None) -> bool:
        """Wait until every source has ended and every queue is drained.

        A graph that is fed by ``send`` is never done, unless ``idle_exit_s`` says after how many
        seconds without anything to do it is. Returns False when it was halted before.
        """
        live = bool(self.plan.fed)
        while not self.halted:
            if self._wait(lambda: not live and self._done(), _LOOK_S):
                return True
            if idle_exit_s is not None and self._quiet_for(idle_exit_s):
                return True
        return False

    def _done(self) -> bool:
        ended = all(
            worker.finished or worker.delivery.ended
            for worker in self.workers
            if isinstance(worker.delivery, SourceStepper)
        )
        if ended:
            self.hurry()
        return ended and self.idle()

    def _quiet_for(self, seconds: float) -> bool:
        """Idle, and no step for so long."""
        steps = sum(worker.delivery.counters.steps for worker in self.workers)
        now = time.monotonic()
        if self._quiet_mark is None or self._quiet_mark[0] != steps or not self.idle():
            self._quiet_mark = (steps, now)
        return now - self._quiet_mark[1] >= seconds

    def _wait(self, reached: Callable[[], bool], timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check()
            if reached():
                self._raise()
                return True
            self._raise()
            if self.halted:
                return False
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            if left <= 0:
                return False
            with self._condition:
                self._condition.wait(left)

    def hurry(self) -> None:
        """Somebody waits until the graph is idle: steps do not wait for more messages (``linger_s``) meanwhile."""
        self._hurried_at = time.monotonic()

    def may_linger(self) -> bool:
        """Whether steps may wait for more messages now."""
        return not (self.draining or self.halted) and time.monotonic() - self._hurried_at >= HURRY_S

    def changed(self) -> None:
        """A worker went idle or ended."""
        with self._condition:
            self._condition.notify_all()

    @property
    def stopped(self) -> list[BaseException]:
        """The errors that stopped processors."""
        threads: list[Worker | ForwarderThread] = [*self.workers, *self.forwarder_threads]
        return [*(one.stopped for one in threads if one.stopped is not None), *self._failures]

    def _raise(self) -> None:
        for error in self.stopped:
            raise error

    # --- ending ---

    def drain(self, timeout: float | None = None) -> bool:
        """Stop the sources, let the rest finish what is there, and stop; False when ``timeout`` came first.

        Processors that stopped at an error leave what they did not take, forwarders what they did not forward.
        """
        self.end_sources()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.halted and not self.idle():
            if deadline is not None and time.monotonic() > deadline:
                return False
            with self._condition:
                self._condition.wait(_LOOK_S)
        self.halt()
        return True

    def end_sources(self) -> None:
        """Pull nothing more; what is on the queues is still processed."""
        self._draining.set()
        for worker in self.workers:
            if isinstance(worker.delivery, SourceStepper):
                worker.delivery.feed.close()

    def halt(self) -> None:
        """Stop every processor after its current step. Messages on the queues stay there."""
        self._halt.set()
        self._look.set()
        self.end_sources()
        stores = self._assembly.stores
        for store in (stores.home, *stores.others.values()):
            doorbells = None if store.closed else store.doorbells
            if doorbells is not None:
                doorbells.ring_own()
        self.changed()

    def close(self, timeout: float = 30.0) -> None:
        """Halt, wait for the steps under way, and give everything back.

        Closing again does nothing, or what an exception (a Ctrl-C) kept the last close from doing.
        """
        if self._given_back:
            return
        if not self._closed:
            self.halt()
            deadline = time.monotonic() + timeout
            for thread in (self._keeper, *(one.thread for one in self._threads)):
                thread.join(max(0.0, deadline - time.monotonic()))
            self._closed = True
        faults.point("close.before")
        self._assembly.close()
        self._given_back = True

    def pause(self, seconds: float) -> bool:
        """Sleep; True when halted meanwhile."""
        return self._halt.wait(seconds)

    # --- keeping ---

    def _keep(self) -> None:
        """Say that the process answers, and take new partitions in."""
        beat_at = time.monotonic() + LEASE_BEAT_S
        while not self.halted:
            self._look.wait(_KEEP_S)
            self._look.clear()
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + LEASE_BEAT_S
                with contextlib.suppress(OSError):
                    self._assembly.ownership.beat(self._figures())
            if not self.halted:
                self._look_for_growth()
            for worker in self.workers:
                worker.tell_if_slow()

    def _grown(self) -> bool:
        """Whether there are partitions that no unit reads yet, which the keeper takes in then."""
        growth = self._assembly.growth
        if growth is None or not any(growth.look()):
            return False
        self._look.set()
        return True

    def _look_for_growth(self) -> None:
        growth = self._assembly.growth
        if growth is None:
            return
        try:
            missing, misfits = growth.look()
            self._misfits.bear(misfits)
            if missing:
                self._take_in(missing)
                growth.took(missing)
                for event in taken_in(missing):
                    self.emit(event)
                self.changed()
        except BaseException as error:
            if not (passes(error) or (self.halted and isinstance(error, Closed))):  # what passes is for the next look
                self._fail(error)

    def _take_in(self, units: Sequence[Node]) -> None:
        """Own and run units of partitions that came while the graph ran."""
        self._run(*self._assembly.take_in(units))

    def _fail(self, error: BaseException) -> None:
        """Tell whoever waits; the keeper ends."""
        stopped = stopped_by(self.plan.id, error)
        if not self._failures:
            self._failures.append(stopped)
            event = stop_event(self.plan.id, stopped)
            self.keep_stop(event)
            self.emit(event)
            self.changed()

    def _figures(self) -> dict[str, leases.Figures]:
        """What the functions of the processors are doing, for ``cues status`` of other processes."""
        counted = {worker.id: worker.delivery.counters for worker in self.workers}
        return {
            id: {"calls": one.calls, "in_flight": one.in_flight, "call_s": one.call_s or 0.0}
            for id, one in counted.items()
        }

    def keep_stop(self, event: events.Stopped) -> None:
        """Leave in the store's directory why something stopped, for ``cues status``, also when nothing runs."""
        with self._recording, contextlib.suppress(OSError):  # a full disk
            record.keep_stop(self.store.path, self.graph.id, event.processor, event.text)

    def _forget_stops(self) -> None:
        """What stopped the last run is over: it runs again."""
        with contextlib.suppress(OSError):
            record.forget_stops(self.store.path, self.graph.id)

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"The graph {self.graph.id!r} is closed.", "start it again with graph.start().")

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            try:
                self.drain()
            finally:
                self.close()
            self._raise()
        else:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "draining" if self.draining else "running"
        return f"<cues.Running {self.graph.id} {state}>"
