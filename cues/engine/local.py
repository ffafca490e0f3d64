"""The embedded engine: threads for each processor of a graph, in this process.

    EmbeddedEngine ──▶ WorkerThread ──▶ Worker      threads.py
                   ──▶ ForwarderThread
                   ──▶ keeper                       a thread that renews leases and takes new partitions in
                   ──▶ Assembly                     assembly.py: stores, locks and steppers, given back by close()

A processor over partitioned queues has a unit for each partition. ``instances=n`` sets the number of
threads that its units are divided among; each thread steps its units in turn.

Threads and not one event loop, because user functions block: a sink that waits for its server must not
delay the other processors. With large batches the interpreter lock costs little; with small ones the
writer of the store is the limit anyway.

The other engines are made of this one. A worker process runs it over some of the units (workers.py). On Spark it
calls functions elsewhere (cues/spark/driver.py), or runs only the sources (cues/spark/cluster/engine.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from cues import faults
from cues.base import events
from cues.base.histogram import Recent
from cues.engine import identities, record
from cues.engine.assembly import Assembly, assemble
from cues.engine.engine import Host
from cues.engine.running import GraphRun
from cues.engine.status import sources_ended
from cues.engine.threads import ForwarderThread, Worker, WorkerThread, report_stop
from cues.errors import Closed, StoreError
from cues.graphs.processor_rows import read_row
from cues.graphs.running import Shared, UnitStatus
from cues.steps.error_records import waiting
from cues.steps.failure import passes, stopped_by
from cues.steps.feed import SourceStepper
from cues.steps.ownership import LEASE_BEAT_S
from cues.steps.stepper import Stepper
from cues.storage import leases

if TYPE_CHECKING:
    from cues.forwarding.forwarder import Forwarder
    from cues.graphs.graph import Graph
    from cues.graphs.plan import Plan
    from cues.graphs.processor import Node
    from cues.queues.queue import Queue
    from cues.queues.store import Store

_KEEP_S: Final = 0.5
"""Longest time until the new partitions of a queue are taken in."""

_BEAT_S: Final = LEASE_BEAT_S / 2
"""Time between two beats of the lease, with which other processes see the counters."""


class EmbeddedEngine:
    """Threads of this process. An :class:`Engine`."""

    pulls: bool = True
    shared: Shared | None = None
    plan: Plan
    store: Store
    queues: dict[str, Queue]
    over = False
    """A processor that stopped does not keep the others from finishing the messages on the queues."""

    def __init__(self, graph: Graph, **options: Any) -> None:
        """``options`` are arguments of :func:`assemble`."""
        self.graph = graph
        self.pids: dict[str, int] = {}
        self._began_at = time.monotonic()
        self._recent: dict[str, Recent] = {}
        """By unit, for :meth:`_figures`."""
        self._options = options
        self.workers: list[Worker] = []
        self.forwarder_threads: list[ForwarderThread] = []
        self._worker_threads: list[WorkerThread] = []
        self._failures: list[BaseException] = []
        """Errors that keep the graph from continuing, and belong to no processor."""
        self._look = threading.Event()
        """When it is set, the keeper looks at once."""
        self._recording = threading.Lock()

    # --- starting ---

    def start(self, host: Host) -> None:
        """Own the processors, and start their threads."""
        self.host = host
        self._keeper = threading.Thread(target=self._keep, name="cues keeper", daemon=True)
        self.assembly: Assembly = assemble(
            self.graph,
            sleep=host.sleep,
            stopping=lambda: host.draining,
            may_linger=host.may_linger,
            emit=host.emit,
            **self._options,
        )
        try:
            self.plan, self.store, self.queues = self.assembly.plan, self.assembly.store, self.assembly.queues
            self._begin_record()
            if self.assembly.growth is not None and "before_claim" not in self._options:  # it runs all processors
                identities.note(self.store, self.plan, host.emit)
            self._start_threads()
        except BaseException:  # the caller has nothing to close yet
            host.halt()
            join(self._threads)
            self.assembly.close()
            raise

    def _start_threads(self) -> None:
        self._run(self.assembly.steppers, self.assembly.forwarders)
        self._keeper.start()

    def _run(self, steppers: Sequence[Stepper], forwarders: Sequence[Forwarder]) -> None:
        """Let threads step these, besides those that run already."""
        workers = [self._worker(stepper) for stepper in steppers]
        forwarder_threads = [ForwarderThread(self.host, forwarder) for forwarder in forwarders]
        worker_threads = self._deal(workers)
        self._worker_threads += worker_threads
        self.workers = [*self.workers, *workers]
        self.forwarder_threads = [*self.forwarder_threads, *forwarder_threads]
        for thread in [loop.thread for loop in worker_threads] + [loop.thread for loop in forwarder_threads]:
            thread.start()

    def _deal(self, workers: Sequence[Worker]) -> list[WorkerThread]:
        """Share units out among the threads of their processors, as many as it has instances; returns the new ones."""
        new: list[WorkerThread] = []
        for worker in workers:
            node = worker.stepper.node
            mine = [
                thread
                for thread in (*self._worker_threads, *new)
                if thread.processor == node.processor and not thread.ended
            ]
            mine.sort(key=lambda thread: thread.count)
            full = len(mine) >= node.options.instances
            if not (full and any(thread.add(worker) for thread in mine)):
                new.append(WorkerThread(self.host, worker))
        return new

    def _worker(self, stepper: Stepper) -> Worker:
        return Worker(self.host, stepper)

    # --- the work that is left ---

    @property
    def units(self) -> Sequence[Node]:
        return [worker.stepper.node for worker in self.workers]

    def standings(self) -> list[UnitStatus]:
        return [worker.standing for worker in self.workers]

    @property
    def stopped(self) -> list[BaseException]:
        threads: list[Worker | ForwarderThread] = [*self.workers, *self.forwarder_threads]
        return [*(thread.stopped for thread in threads if thread.stopped is not None), *self._failures]

    @property
    def left(self) -> list[BaseException]:
        return [stopped_by(worker.id, worker.left) for worker in self.workers if worker.left is not None]

    def idle(self) -> bool:
        before = self._progress()
        workers = list(self.workers)  # the growth of a queue adds some; then the progress differs
        logs = {read.log for worker in workers for read in worker.stepper.inputs}
        with self.store.core.view() as txn:
            rows = {worker.id: read_row(txn, worker.id) for worker in workers}
            paused = {worker.id for worker in workers if txn.get(worker.stepper.pause.key) is not None}
            redrives = any(waiting(txn, worker.id) for worker in workers if not worker.finished)
            known = {log: log.row(txn) for log in logs if log.store.id == self.store.id}
            ends = [(thread, thread.forwarder.ends(txn)) for thread in self.forwarder_threads]
        forwarded = all(thread.idle(end) for thread, end in ends)
        for log in logs - known.keys():
            with log.store.core.view() as txn:
                known[log] = log.row(txn)
        quiet = forwarded and all(
            worker.idle(rows[worker.id], known.__getitem__, worker.id in paused) for worker in workers
        )
        if redrives or not quiet or before != self._progress():
            return False
        return not self._grown()  # last: a partition that is not there now was not there at that moment either

    def _progress(self) -> list[tuple[bool, int]]:
        """Values that change with each step that begins or ends."""
        return [(worker.busy, worker.stepper.counters.steps) for worker in self.workers]

    def resting(self) -> bool:
        return self.idle()

    def done(self) -> bool:
        if self.stopped:
            return True
        if any(worker.busy for worker in self.workers):  # asked at each change; a worker tells when it has paused
            return False
        if not sources_ended(self.plan, self.standings()):
            return False
        self.host.hurry()
        return self.idle()

    # --- ending ---

    def end_sources(self) -> None:
        for worker in self.workers:
            if isinstance(worker.stepper, SourceStepper):
                worker.stepper.feed.close()

    def set_disk_low(self, low: bool) -> None:
        """Do nothing: all steps are made in this process."""

    def halt(self) -> None:
        self._look.set()
        self.end_sources()
        stores = self.assembly.stores
        for store in (stores.home, *stores.others.values()):
            doorbells = None if store.closed else store.core.doorbells
            if doorbells is not None:
                doorbells.ring_own()

    def join(self, timeout: float) -> None:
        join([self._keeper, *self._threads], timeout)

    @property
    def _threads(self) -> list[threading.Thread]:
        return [loop.thread for loop in self._worker_threads] + [loop.thread for loop in self.forwarder_threads]

    @property
    def stuck(self) -> bool:
        return any(worker.thread.is_alive() for worker in self.workers)

    def close(self) -> None:
        faults.point("close.before")
        self.assembly.close()

    # --- keeping ---

    def _keep(self) -> None:
        """Renew the lease of this process, and take new partitions in."""
        beat_at = time.monotonic() + _BEAT_S
        while not self.host.halted:
            self._look.wait(_KEEP_S)
            self._look.clear()
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + _BEAT_S
                with contextlib.suppress(StoreError):  # a full disk: the lock of this process is still held
                    self.assembly.ownership.beat(self._figures())
            if not self.host.halted:
                self._look_for_growth()
            for worker in self.workers:
                worker.tell_if_slow()

    def _grown(self) -> bool:
        """Return whether there are partitions that no unit reads yet. The keeper takes them in then."""
        growth = self.assembly.growth
        if growth is None or not any(growth.look()):
            return False
        self._look.set()
        return True

    def _look_for_growth(self) -> None:
        growth = self.assembly.growth
        if growth is None:
            return
        try:
            if growth.take_in(self._take_in):
                self.host.changed()
        except BaseException as error:
            # An error that may pass is left to the next look.
            if not (passes(error) or (self.host.halted and isinstance(error, Closed))):
                self.fail(error)

    def _take_in(self, units: Sequence[Node]) -> None:
        """Own and run units of partitions that came while the graph ran."""
        self._run(*self.assembly.take_in(units))

    def fail(self, error: BaseException) -> None:
        """Stop with an error that belongs to no processor, and wake the callers that wait. The first one counts."""
        if not self._failures:
            self._failures.append(stopped_by(self.plan.id, error))
            report_stop(self.host, self.plan.id, self._failures[0])
            self.host.changed()

    def _figures(self) -> dict[str, leases.Figures]:
        """The counters of the processors, and the use of this process, for programs that look from outside.

        ``recent`` are the latencies of the last minute (:class:`Recent`).
        """
        figures, now = {}, time.monotonic()
        for worker in self.workers:
            counters = worker.stepper.counters
            recent = self._recent.setdefault(worker.id, Recent(self._began_at)).of(counters.latency, now)
            figures[worker.id] = counters.to_dict() | {"call_s": counters.call_s or 0.0, "recent": recent}
        return figures | {leases.PROCESS: leases.of_process()}

    def keep_stop(self, event: events.Stopped) -> None:
        with self._recording, contextlib.suppress(OSError):  # a full disk
            record.keep_stop(self.store.path, self.graph.id, event.processor, event.text)

    def _begin_record(self) -> None:
        """Note that processors which stopped in an earlier run run again."""
        with self._recording, contextlib.suppress(OSError):
            record.begin_run(self.store.path, self.graph.id, {node.id for node in self.plan.running})


def join(threads: Iterable[threading.Thread], timeout: float | None = None) -> None:
    """Wait until the threads that were started have ended, for ``timeout`` seconds at most in all."""
    deadline = None if timeout is None else time.monotonic() + timeout
    for thread in threads:
        if thread.ident is not None:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def start(
    graph: Graph,
    *,
    store: str | os.PathLike[str] | Store | None = None,
    accept_topology: bool = False,
    take_over: bool = False,
    listeners: tuple[events.Listener, ...] = (),
    sources: bool = True,
) -> GraphRun:
    """Start ``graph`` in threads of this process; see :meth:`Graph.start`."""
    engine = EmbeddedEngine(graph, store=store, accept_topology=accept_topology, take_over=take_over)
    engine.pulls = sources
    return GraphRun(graph, engine, listeners)
