"""The threads of a running graph.

    WorkerThread ──▶ Worker ──▶ Stepper       units of one processor, a step of each in turn
    ForwarderThread ──▶ Forwarder             outputs of the graph that belong to another store

A thread makes steps while there is something to take, and sleeps on a doorbell while there is nothing.
A thread knows of its graph only what :class:`Host` names. A unit that an error stops does not stop the
other units of its thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, Literal, Protocol

from cues.base import events
from cues.engine.status import UnitStatus
from cues.errors import Closed, CuesError, Fenced, ProcessorStopped, WriterStuck
from cues.forwarding.forwarder import Forwarder
from cues.graphs.plan import Plan
from cues.queues.log import Log
from cues.queues.processor_rows import ProcessorRow, read_row
from cues.records.log_row import LogRow
from cues.steps.failure import passes, stop_event, stopped_by, words
from cues.steps.feed import SourceStepper
from cues.steps.runner import Interrupted
from cues.steps.stepper import Stepper
from cues.storage import wakeup

QUIET_S: Final = 0.1
"""A generator that has yielded nothing for this time counts as idle."""
BACKOFF_S: Final = 0.1
"""Time before a step that the store refused is tried again. It is doubled after each refusal."""
BACKOFF_S_MAX: Final = 30.0
SLOW_S: Final = 60.0
"""A step that takes longer is reported by a warning."""


class Host(Protocol):
    """The running graph, as its threads see it."""

    patient: ClassVar[bool]
    """Whether a unit waits for a condition of the store that may pass, instead of stopping."""

    @property
    def plan(self) -> Plan: ...

    @property
    def halted(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def emit(self) -> Callable[[events.Event], None]: ...

    def pause(self, seconds: float) -> bool:
        """Sleep. Return True if the graph was halted meanwhile."""

    def changed(self) -> None:
        """Wake the callers that wait for a change of the graph's state."""

    def keep_stop(self, event: events.Stopped) -> None:
        """Record the reason of a stop in the store's directory."""


class Worker:
    """One unit of a processor: what its thread does for it, and how it is."""

    def __init__(self, running: Host, delivery: Stepper) -> None:
        self.running = running
        self.delivery = delivery
        self.id = delivery.node.id
        self.busy = False
        """In a step: between looking for messages and finding none."""
        self.stopped: BaseException | None = None
        self.finished = False
        self._refused = 0
        """Steps in a row that the store refused."""
        self._stepping_since: float | None = None
        self._slow_at = SLOW_S
        """Seconds of one step after which it is told of, and next of twice as many."""
        self.worker_thread: WorkerThread

    @property
    def thread(self) -> threading.Thread:
        """The thread that steps it."""
        return self.worker_thread.thread

    def begin(self) -> None:
        """Before the first turn."""
        if isinstance(self.delivery, SourceStepper):
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
        self._mark(False)
        self.finished = True
        self.running.changed()

    @property
    def _exhausted(self) -> bool:
        """A source whose generator ended has nothing to wait for."""
        return isinstance(self.delivery, SourceStepper) and self.delivery.ended

    def _turn(self) -> bool:
        delivery = self.delivery
        self._mark(True)
        self._stepping_since, self._slow_at = time.monotonic(), SLOW_S
        try:
            outcome = delivery.step()
        except Fenced as fence:
            if fence.reason != "seek":
                raise
            self._adopt()
            return True
        except (CuesError, OSError) as error:
            if self.running.patient and passes(error):
                self._wait_out(error)
                return True
            if isinstance(error, ProcessorStopped) and isinstance(delivery, SourceStepper):
                wait_s = delivery.again()
                if wait_s is not None:
                    if self.running.pause(wait_s):
                        raise Interrupted from None
                    self._pull()
                    return True
            raise
        finally:
            self._stepping_since = None
        self._refused = 0
        if outcome == "idle":
            self._mark(False)
            self.running.changed()
        return outcome != "idle"

    def _wait_out(self, error: CuesError | OSError) -> None:
        """The store could not take the step, which may pass: wait, and begin again from the row."""
        while True:
            wait_s = min(BACKOFF_S_MAX, BACKOFF_S * 2.0 ** min(self._refused, 30))
            self._refused += 1
            text = f"{getattr(error, 'message', error)} It is tried again in {wait_s:g} s"
            self.running.emit(events.Event(self.id, text, logging.WARNING))
            if self.running.pause(wait_s):
                raise Interrupted from error
            try:
                self._adopt()
                return
            except (CuesError, OSError) as again:
                if not passes(again):
                    raise
                error = again

    def tell_if_slow(self) -> None:
        """Say that a step is under way for long: nobody else would hear of a function that hangs."""
        since = self._stepping_since
        if since is None or time.monotonic() - since < self._slow_at:
            return
        text = (
            f"one step is under way for {time.monotonic() - since:.0f} s: its function may hang, or is slow; with"
            " timeout_s= a call that takes too long fails"
        )
        self._slow_at *= 2
        self.running.emit(events.Event(self.id, text, logging.WARNING))

    def _mark(self, busy: bool) -> None:
        self.busy = busy

    def _pull(self) -> None:
        delivery = self.delivery
        assert isinstance(delivery, SourceStepper)
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
        if isinstance(self.delivery, SourceStepper):
            self._pull()

    def _stop(self, error: BaseException) -> None:
        self.stopped = stopped_by(self.id, error)
        event = stop_event(self.id, self.stopped)
        self.running.keep_stop(event)
        self.running.emit(event)

    @property
    def standing(self) -> UnitStatus:
        ended = isinstance(self.delivery, SourceStepper) and (self.finished or self.delivery.ended)
        state: Literal["running", "ended", "stopped"] = "ended" if ended else "running"
        state = "stopped" if self.stopped is not None else state
        return UnitStatus(self.id, self.delivery.node.processor, self.delivery.counters, state)

    def idle(self, row: ProcessorRow | None, log_row: Callable[[Log], LogRow]) -> bool:
        """Whether there is nothing to take, by its row and those of the logs."""
        delivery = self.delivery
        if self.finished:
            return True
        if self.busy:  # at-most-once, positions move before the function runs
            return False
        if isinstance(delivery, SourceStepper):
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


class WorkerThread:
    """A thread, and the units of one processor that it steps in turn."""

    def __init__(self, running: Host, worker: Worker) -> None:
        self.running = running
        self.processor = worker.delivery.node.processor
        self.count = 0
        """Units that it was given."""
        self.ended = False
        """Has no unit left, and takes none any more."""
        self._joining: list[Worker] = []
        self._guard = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"cues {worker.id}", daemon=True)
        self.add(worker)

    def add(self, worker: Worker) -> bool:
        """Step one more unit; False where the thread has ended."""
        with self._guard:
            if self.ended:
                return False
            worker.worker_thread = self
            self._joining.append(worker)
            self.count += 1
        return True

    def _run(self) -> None:
        going: list[Worker] = []
        try:
            while going := self._with_joined(going):
                moved = False
                for worker in going:  # a step each: one that has much to do does not keep the others waiting
                    moved |= worker.turn()
                going = [worker for worker in going if not worker.finished]
                if going and not moved:
                    self._sleep([worker.delivery for worker in going])
        except BaseException as error:  # of sleeping: the store was closed, say
            with self._guard:
                self.ended = True
            for worker in (*going, *self._joining):
                worker.finish(error)

    def _with_joined(self, going: list[Worker]) -> list[Worker]:
        """Those that go on, and those that join them."""
        with self._guard:
            joined, self._joining = self._joining, []
            self.ended = not (going or joined)
        for worker in joined:
            worker.begin()
        return going + joined

    def _sleep(self, steppers: Sequence[Stepper]) -> None:
        first = steppers[0]
        if isinstance(first, SourceStepper):  # which is alone
            if first.feed.closed:  # draining: the generator may still be in the middle of something
                self.running.pause(wakeup.SAFETY_S)
            else:
                first.feed.wait(wakeup.SAFETY_S)
            return
        lingers = [delivery.lingers_s for delivery in steppers]
        wakeup.wait(
            [(input.log.store.doorbells, input.log.mask) for delivery in steppers for input in delivery.inputs],
            lambda: self.running.halted or bool(self._joining) or any(map(_ready, steppers)),
            min((left for left in lingers if left is not None), default=None),
        )


def _ready(delivery: Stepper) -> bool:
    """Whether a turn of the unit would do anything; one that cannot tell has its turn, which says why."""
    try:
        return delivery.ready()
    except CuesError:
        return True


class ForwarderThread:
    """The thread of one forwarder."""

    def __init__(self, running: Host, forwarder: Forwarder) -> None:
        self.running = running
        self.forwarder = forwarder
        self.stopped: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"cues {forwarder!r}", daemon=True)

    def _run(self) -> None:
        forwarder = self.forwarder
        try:
            while not self.running.halted:
                # The safety timeout of a sleep is also what writes low-water marks when nothing comes.
                with self._patience():
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

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """Wait for a process that holds a writer lock and does not move: nothing was written, and it is tried again."""
        try:
            yield
        except WriterStuck as stuck:
            text = f"waits to forward: {stuck.message}"
            self.running.emit(events.Waiting(self.running.plan.id, text, logging.WARNING, stuck))

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
        event = events.Stopped(graph, stopped.message, logging.ERROR, error=stopped)
        self.running.keep_stop(event)
        self.running.emit(event)

    def idle(self, ends: list[int]) -> bool:
        """Whether everything before ``ends`` of the fork queues is in the other store; or never will be."""
        return self.stopped is not None or self.forwarder.done(ends)
