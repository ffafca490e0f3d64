"""The embedded engine: threads for each processor of a graph, in this process.

A processor over partitioned queues is a unit for each partition, and ``instances=n`` says over how many
threads its units are divided; each thread steps its units in turn. A thread does steps while there is
something to take and sleeps on a doorbell when there is not.
Threads, and not one loop, because user functions block: a sink that waits for its server must not
hold up the rest. With large batches the interpreter lock costs little; with small ones the store's
writer is the limit anyway.

Whether a graph is idle or done is read from the store, in one transaction: positions move together
with outputs, so a moment in which nobody has anything to take is a moment in which nothing is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from cues import events, faults, wakeup
from cues.delivery import Delivery
from cues.engine.assembly import Assembly, assemble
from cues.errors import Closed, CuesError, Fenced, InvalidArgument, ProcessorStopped, QueueNotFound
from cues.failure import words
from cues.feed import SourceDelivery
from cues.forwarder import Forwarder
from cues.log import Log, Row
from cues.ownership import LEASE_BEAT_S, ProcessorRow, read_row
from cues.runner import Interrupted

if TYPE_CHECKING:
    from cues.graph import Graph
    from cues.plan import Plan
    from cues.store import Store

QUIET_S: Final = 0.1
"""A generator that yielded nothing for so long counts as idle."""
_LOOK_S: Final = 0.05


class Worker:
    """One unit of a processor: what its thread does for it, and how it is."""

    def __init__(self, running: Running, delivery: Delivery) -> None:
        self.running = running
        self.delivery = delivery
        self.id = delivery.node.id
        self.busy = False
        """In a step: between looking for messages and finding none."""
        self.stopped: BaseException | None = None
        self.finished = False
        self.crew: Crew

    @property
    def thread(self) -> threading.Thread:
        """The thread that steps it."""
        return self.crew.thread

    def begin(self) -> None:
        """Before the first turn."""
        if isinstance(self.delivery, SourceDelivery):
            self._pull()

    def turn(self) -> bool:
        """One step, if it can; False when there was nothing to take. What stops it leaves the others going."""
        try:
            if not (self.running.halted or self._exhausted):
                return self._turn()
            self.finish()
        except BaseException as error:
            self.finish(error)
        return False

    def finish(self, error: BaseException | None = None) -> None:
        """It has had its last turn, because of ``error`` if there is one."""
        interrupted = isinstance(error, Interrupted) or (isinstance(error, Closed) and self.running.halted)
        if error is not None and not interrupted:
            self._stop(error)
        self.busy = False
        self.finished = True
        self.running.changed()

    @property
    def _exhausted(self) -> bool:
        """A source whose generator ended has nothing to wait for."""
        return isinstance(self.delivery, SourceDelivery) and self.delivery.ended

    def _turn(self) -> bool:
        delivery = self.delivery
        self.busy = True
        try:
            outcome = delivery.step()
        except Fenced as fence:
            if fence.reason != "seek":
                raise
            self._adopt()
            return True
        except ProcessorStopped:
            if isinstance(delivery, SourceDelivery):
                wait_s = delivery.again()
                if wait_s is not None:
                    if self.running.pause(wait_s):
                        raise Interrupted from None
                    self._pull()
                    return True
            raise
        if outcome == "idle":
            self.busy = False
            self.running.changed()
        return outcome != "idle"

    def _pull(self) -> None:
        delivery = self.delivery
        assert isinstance(delivery, SourceDelivery)
        if self.running.draining:
            delivery.feed.close()
        threading.Thread(target=delivery.feed.run, name=f"cues {self.id} generator", daemon=True).start()

    def _adopt(self) -> None:
        """The positions were moved by a seek: take the row as it is, and start again from it."""
        while True:
            with self.delivery.store.view() as txn:
                row = read_row(txn, self.id)
            assert row is not None
            self.delivery.adopt(row)
            try:
                self.delivery.recover()
                break
            except Fenced as fence:  # moved once more meanwhile
                if fence.reason != "seek":
                    raise
        if isinstance(self.delivery, SourceDelivery):
            self._pull()

    def _stop(self, error: BaseException) -> None:
        if not isinstance(error, (ProcessorStopped, Fenced)):
            wrapped = ProcessorStopped(
                f"{self.id} stopped: {type(error).__name__}: {words(error)}",
                "start again when the cause is gone; it goes on where it stands.",
                processor=self.id,
            )
            wrapped.__cause__ = error
            error = wrapped
        self.stopped = error
        text = getattr(error, "message", str(error)).removeprefix(f"{self.id} ")
        self.running.emit(events.Stopped(self.id, text, logging.ERROR, error=error))

    def idle(self, row: ProcessorRow | None, log_row: Callable[[Log], Row]) -> bool:
        """Whether there is nothing to take, by its row and those of the logs."""
        delivery = self.delivery
        if self.finished:
            return True
        if self.busy:  # at-most-once, positions move before the function runs
            return False
        if isinstance(delivery, SourceDelivery):
            feed = delivery.feed
            if not feed.empty or feed.error is not None:
                return False
            return feed.ended or feed.closed or time.monotonic() - feed.pulled_at > QUIET_S
        if row is None:
            return True
        if not delivery.owns(row):
            return False  # taken over: it stops as soon as it looks
        left = []
        for one in delivery.inputs:
            position = delivery.position_in(row, one.tailer)
            log = log_row(one.log)
            left.append(log.next - max(position.next, log.first))  # what was purged is nobody's to take
        return not (any if delivery.node.mode == "alts" else all)(n > 0 for n in left)


class Crew:
    """A thread, and the units of one processor that it steps in turn."""

    def __init__(self, running: Running, workers: Sequence[Worker]) -> None:
        self.running = running
        self.workers = list(workers)
        for worker in workers:
            worker.crew = self
        self.thread = threading.Thread(target=self._run, name=f"cues {workers[0].id}", daemon=True)

    def _run(self) -> None:
        going = self.workers
        try:
            for worker in going:
                worker.begin()
            while going:
                moved = False
                for worker in going:  # a step each: one that has much to do does not keep the others waiting
                    moved |= worker.turn()
                going = [worker for worker in going if not worker.finished]
                if going and not moved:
                    self._sleep([worker.delivery for worker in going])
        except BaseException as error:  # of sleeping: the store was closed, say
            for worker in going:
                worker.finish(error)

    def _sleep(self, deliveries: Sequence[Delivery]) -> None:
        first = deliveries[0]
        if isinstance(first, SourceDelivery):  # which is alone
            if first.feed.closed:  # draining: the generator may still be in the middle of something
                self.running.pause(wakeup.SAFETY_S)
            else:
                first.feed.wait(wakeup.SAFETY_S)
            return
        wakeup.wait(
            [(one.log.store.doorbells, one.log.mask) for delivery in deliveries for one in delivery.inputs],
            lambda: self.running.halted or any(map(_ready, deliveries)),
            None,
        )


def _ready(delivery: Delivery) -> bool:
    """Whether a turn of the unit would do anything; one that cannot tell has its turn, which says why."""
    try:
        return delivery.ready()
    except CuesError:
        return True


class Courier:
    """The thread of one forwarder."""

    def __init__(self, running: Running, forwarder: Forwarder) -> None:
        self.running = running
        self.forwarder = forwarder
        self.stopped: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"cues {forwarder!r}", daemon=True)

    def _run(self) -> None:
        forwarder = self.forwarder
        try:
            while not self.running.halted:
                # The safety timeout of a sleep is also what writes low-water marks when nothing comes.
                wakeup.wait(
                    [(forwarder.home.doorbells, forwarder.mask)],
                    lambda: self.running.halted or forwarder.step(),
                    None,
                )
                self.running.changed()
        except BaseException as error:
            if not (isinstance(error, Closed) and self.running.halted):
                self._stop(error)
        finally:
            self.running.changed()

    def _stop(self, error: BaseException) -> None:
        graph, other = self.running.plan.id, self.forwarder.other.path
        stopped = ProcessorStopped(
            f"What {graph} writes for the store {other} is not forwarded any more:"
            f" {type(error).__name__}: {getattr(error, 'message', words(error))}",
            getattr(error, "hint", "") or "start again when the cause is gone; nothing is lost.",
            processor=graph,
        )
        stopped.__cause__ = error
        self.stopped = stopped
        self.running.emit(events.Stopped(graph, stopped.message, logging.ERROR, error=stopped))

    def idle(self, ends: list[int]) -> bool:
        """Whether everything before ``ends`` of the fork queues is in the other store; or never will be."""
        return self.stopped is not None or self.forwarder.done(ends)


class Running:
    """A started graph. A context manager: leaving it drains, stops, and raises what stopped a processor."""

    def __init__(self, graph: Graph, **options: Any) -> None:
        self.graph = graph
        self.bus = events.Bus()
        self.emit = self.bus.emit
        self._draining = threading.Event()
        self._halt = threading.Event()
        self._condition = threading.Condition()
        self._closed = False
        self._quiet_mark: tuple[int, float] | None = None
        listeners = options.pop("listeners", ())
        self.bus.listeners += listeners
        self._assembly: Assembly = assemble(
            graph, pause=self.pause, stopping=self._draining.is_set, emit=self.emit, **options
        )
        self.started_at = time.monotonic()
        self.workers = [Worker(self, delivery) for delivery in self._assembly.deliveries]
        self.couriers = [Courier(self, forwarder) for forwarder in self._assembly.forwarders]
        self._threads: list[Crew | Courier] = [*_crews(self), *self.couriers]
        for one in self._threads:
            one.thread.start()
        self._keeper = threading.Thread(target=self._keep, name="cues lease", daemon=True)
        self._keeper.start()

    @property
    def store(self) -> Store:
        return self._assembly.store

    @property
    def plan(self) -> Plan:
        return self._assembly.plan

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
                raise InvalidArgument("The graph has no single source to send to.", "send('queue', message).")
        else:
            raise InvalidArgument(
                f"send() takes a queue and a message, found {len(arguments)} arguments.", "send('queue', message)."
            )
        index: int = self._queue(queue).appender().write(message)
        return index

    def messages(self, queue: str) -> list[dict[str, Any]]:
        """All messages that are on a queue now."""
        self._check()
        return list(self._queue(queue).tailer())

    def _queue(self, name: str) -> Any:
        queue, slash, partition = name.partition("/")
        if queue in self._assembly.queues and (not slash or partition.isdecimal()):
            found = self._assembly.queues[queue]
            return found.partition(int(partition)) if slash else found
        if "." in name:
            return self.store.queue(name)  # a try log, or a fork queue
        raise QueueNotFound(
            f"The graph {self.plan.id!r} has no queue {name!r}; it has {', '.join(self._assembly.queues)}.",
            "one of those.",
            queue=name,
        )

    def counters(self) -> dict[str, events.Counters]:
        """By processor id, since the start; of a processor over partitions, all units together."""
        found: dict[str, events.Counters] = {}
        for worker in self.workers:
            counters, id = worker.delivery.counters, worker.delivery.node.processor
            found[id] = counters if id not in found else found[id].with_those_of(counters)
        return found

    def idle(self) -> bool:
        """Whether nobody has anything to do, at one moment.

        One transaction of the home store sees all positions and what there is to take and to forward
        there; what is in other stores is looked at after it. Where a reader stands at the end of such a
        queue by then, it stood there at that moment already.
        """
        marks = [(w.busy, w.delivery.counters.steps) for w in self.workers]
        rows: dict[str, ProcessorRow | None] = {}
        known: dict[Log, Row] = {}
        logs = {one.log for worker in self.workers for one in worker.delivery.inputs}
        with self.store.view() as txn:
            for worker in self.workers:
                rows[worker.id] = read_row(txn, worker.id)
            known |= {log: log.row(txn) for log in logs if log.store.id == self.store.id}
            ends = [courier.forwarder.ends(txn) for courier in self.couriers]
        forwarded = all(courier.idle(end) for courier, end in zip(self.couriers, ends))
        for log in logs - known.keys():
            with log.store.view() as txn:
                known[log] = log.row(txn)
        quiet = forwarded and all(worker.idle(rows[worker.id], known.__getitem__) for worker in self.workers)
        return quiet and marks == [(w.busy, w.delivery.counters.steps) for w in self.workers]

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; True then, False at the timeout.

        Raises :class:`ProcessorStopped`, with the user's exception as its cause, when a processor
        stopped.
        """
        return self._wait(self.idle, timeout)

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
            if isinstance(worker.delivery, SourceDelivery)
        )
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

    def changed(self) -> None:
        """A worker went idle or ended."""
        with self._condition:
            self._condition.notify_all()

    @property
    def stopped(self) -> list[BaseException]:
        """What stopped processors, if anything did."""
        threads: list[Worker | Courier] = [*self.workers, *self.couriers]
        return [one.stopped for one in threads if one.stopped is not None]

    def _raise(self) -> None:
        for error in self.stopped:
            raise error

    # --- ending ---

    def drain(self, timeout: float | None = None) -> bool:
        """Stop the sources, let the rest finish what is there, and stop; False when ``timeout`` came first.

        Processors that stopped at an error leave what they did not take, forwarders what they did not forward.
        """
        self._draining.set()
        for worker in self.workers:
            if isinstance(worker.delivery, SourceDelivery):
                worker.delivery.feed.close()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.halted and not self.idle():
            if deadline is not None and time.monotonic() > deadline:
                return False
            with self._condition:
                self._condition.wait(_LOOK_S)
        self.halt()
        return True

    def halt(self) -> None:
        """Stop every processor behind its current step. What is on the queues stays there."""
        self._halt.set()
        self._draining.set()
        for worker in self.workers:
            if isinstance(worker.delivery, SourceDelivery):
                worker.delivery.feed.close()
        stores = self._assembly.stores
        for store in (stores.home, *stores.others.values()):
            doorbells = None if store.closed else store.doorbells
            if doorbells is not None:
                doorbells.ring_own()
        self.changed()

    def close(self, timeout: float = 30.0) -> None:
        """Halt, wait for the steps under way, and give everything back. Closing again does nothing."""
        if self._closed:
            return
        self.halt()
        deadline = time.monotonic() + timeout
        for one in self._threads:
            one.thread.join(max(0.0, deadline - time.monotonic()))
        self._closed = True
        faults.point("close.before")
        self._assembly.close()

    def pause(self, seconds: float) -> bool:
        """Sleep; True when halted meanwhile."""
        return self._halt.wait(seconds)

    def _keep(self) -> None:
        while not self._halt.wait(LEASE_BEAT_S):
            with contextlib.suppress(OSError):
                self._assembly.ownership.beat()

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"The graph {self.graph.id!r} is closed.", "graph.start() again.")

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


def _crews(running: Running) -> list[Crew]:
    """The threads: for each processor as many as it has instances, its units dealt out among them."""
    by_processor: dict[str, list[Worker]] = {}
    for worker in running.workers:
        by_processor.setdefault(worker.delivery.node.processor, []).append(worker)
    found: list[Crew] = []
    for workers in by_processor.values():
        count = min(workers[0].delivery.node.options.instances, len(workers))
        found += [Crew(running, workers[number::count]) for number in range(count)]
    return found


def start(
    graph: Graph,
    *,
    store: str | os.PathLike[str] | Store | None = None,
    accept_topology: bool = False,
    take_over: bool = False,
    listeners: tuple[events.Listener, ...] = (),
) -> Running:
    """What :meth:`Graph.start` does."""
    return Running(graph, store=store, accept_topology=accept_topology, take_over=take_over, listeners=listeners)
