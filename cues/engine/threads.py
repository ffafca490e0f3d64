"""The threads of a running graph.

    WorkerThread ──▶ Worker ──▶ Stepper       units of one processor, a step of each in turn
    ForwarderThread ──▶ Forwarder             outputs of the graph that belong to another store

A thread makes steps while there is something to take, and sleeps on a doorbell while there is nothing.
A thread knows of its graph only what :class:`cues.engine.engine.Host` names. A unit that an error stops, or that waits
for something that is away, does not hold up the other units of its thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from cues.base import events
from cues.engine.engine import Host
from cues.errors import Closed, Fenced, ProcessorStopped, StoreError, WriterStuck
from cues.graphs.processor_rows import ProcessorRow, read_row
from cues.graphs.running import UnitStatus
from cues.overrides import override
from cues.queues.log import Log
from cues.records.log_row import LogRow
from cues.steps.calls import Interrupted
from cues.steps.failure import passes, stop_event, stopped_by, words
from cues.steps.feed import SourceStepper
from cues.steps.stepper import Outcome, Stepper
from cues.storage import wakeup

if TYPE_CHECKING:
    from cues.engine.outages import OutageWait
    from cues.forwarding.forwarder import Forwarder

QUIET_S: Final = 0.1
"""A generator that has yielded no message for this time counts as idle."""
SLOW_S: Final = 60.0
"""A step that takes longer is reported by a warning."""


class Worker:
    """One unit of a processor, with its state. A :class:`WorkerThread` steps it."""

    def __init__(self, running: Host, stepper: Stepper) -> None:
        self.running = running
        self.stepper = stepper
        self.id = stepper.node.id
        self.busy = False
        """True from the start of a search for messages until a search finds none."""
        self.stopped: BaseException | None = None
        self.finished = False
        self._outage: OutageWait | None = None
        """The outage that is under way."""
        self._away: BaseException | None = None
        """The error of the last step, while the unit waits before the next one."""
        self._rule = stepper.node.outages
        self._position: Any = None
        """The position of a source at the begin of the outage."""
        self._was_paused = False
        """True if the unit was paused at the begin of the outage, which is one of a redrive then."""
        self._stepping_since: float | None = None
        self._slow_at = SLOW_S
        """Seconds of one step before the next warning. Each warning doubles them."""
        self.worker_thread: WorkerThread

    @property
    def thread(self) -> threading.Thread:
        """The thread that steps it."""
        return self.worker_thread.thread

    def turn(self) -> bool:
        """Make one step, if there is something to take; else return False. An error stops this unit alone."""
        if self.finished:  # its thread looks once more before it leaves it
            return False
        try:
            if self._away is not None:
                return self._wait_on()
            if not (self.running.halted or self._exhausted):
                return self._turn()
            self.finish()
        except BaseException as error:
            self.finish(error)
        return False

    def finish(self, error: BaseException | None = None) -> None:
        """End the unit after its last turn, because of ``error`` if there is one."""
        interrupted = isinstance(error, Interrupted) or (isinstance(error, Closed) and self.running.halted)
        if error is not None and not interrupted:
            self.stopped = stopped_by(self.id, error)
            report_stop(self.running, self.id, self.stopped)
            self._outage = None
        elif self._outage is not None and self._exhausted:
            self._end_outage(True)
        elif self._outage is not None:
            self._outage.leave()
        self._mark(False)
        self.finished = True
        self.running.changed()

    @property
    def _exhausted(self) -> bool:
        """True for a source whose generator has ended."""
        return isinstance(self.stepper, SourceStepper) and self.stepper.ended

    def _turn(self) -> bool:
        stepper = self.stepper
        self._mark(True)
        if self.running.wait_for_disk():
            raise Interrupted
        self._stepping_since, self._slow_at = time.monotonic(), SLOW_S
        taken = stepper.counters.taken
        try:
            outcome = stepper.step()
        except Fenced as fence:
            if fence.reason != "seek":
                raise
            self._adopt()
            return True
        except Exception as error:
            if self._is_away(error):
                self._stepping_since = None
                self._wait_out(error)
                return True
            if isinstance(error, ProcessorStopped) and isinstance(stepper, SourceStepper):
                wait_s = stepper.again()
                if wait_s is not None:
                    if self.running.sleep(wait_s):
                        raise Interrupted from None
                    self.pull()
                    return True
            raise
        finally:
            self._stepping_since = None
        if self._outage is not None:
            self._look_for_end(outcome, taken)
        if outcome != "committed":
            self._mark(False)
            self.running.changed()
        return outcome == "committed"

    def _is_away(self, error: BaseException) -> bool:
        """Return whether the unit waits after an error, instead of stopping."""
        if isinstance(error, ProcessorStopped):
            return error.away
        return passes(error) or self._rule.concerns(error)

    def _wait_out(self, error: BaseException) -> None:
        """Begin to wait for what is away. The other units of the thread have their turns meanwhile."""
        from cues.engine.outages import OutageWait  # rarely used

        stepper = self.stepper
        if self._outage is None:
            self._outage = OutageWait(self.running, self.id, self._rule.outage, stepper.counters, stepper.node)
            self._position = stepper.position if isinstance(stepper, SourceStepper) else None
            self._was_paused = stepper.pause.row is not None
        self._outage.begin_wait(error)
        self._away = error

    def _wait_on(self) -> bool:
        """Return False while the wait lasts. After it, continue from the row of the processor."""
        assert self._outage is not None
        if self._outage.waits and not self._is_called_away():
            return False
        self._away = None
        try:
            self._adopt(tell=False)
            self.stepper.probe()
        except Exception as again:
            if not self._is_away(again):
                raise
            self._wait_out(again)
        return True

    @property
    def outage_s(self) -> float | None:
        """Seconds until it asks again whether the wait for what is away is over; None if it does not wait."""
        return self._outage.sleep_s if self._away is not None and self._outage is not None else None

    @property
    def sleep_s(self) -> float | None:
        """Seconds until it must have its turn without a ring; None if no time is known."""
        return self.stepper.lingers_s if (sleep_s := self.outage_s) is None else sleep_s

    def _look_for_end(self, outcome: Outcome, taken: int) -> None:
        """End the outage after a step that shows that it is over; a new pause ends it unseen.

        ``taken``: the number of messages taken before the step. A step may also have waited for more messages, for
        ``rate=``, or for room, or have been of a lane beside the one that waits: then nothing is known.
        """
        assert self._outage is not None
        stepper = self.stepper
        if isinstance(stepper, SourceStepper):
            is_over = stepper.goes_on_after(self._position)
        elif outcome == "idle":
            is_over = not (stepper.taker.waits() or stepper.lanes_wait()) and stepper.lingers_s is None
        else:
            is_over = outcome == "committed" and stepper.counters.taken > taken
        is_paused = outcome == "paused" and not (self._was_paused and stepper.lanes_wait())  # redrives are made
        if is_over or is_paused:
            self._end_outage(is_over)

    def _end_outage(self, tell: bool) -> None:
        assert self._outage is not None
        self._outage.end(tell)
        self._outage = None

    @property
    def left(self) -> BaseException | None:
        """The error of what was away at the end of the run, because of which messages stay on queues; or None.

        A try that had not ended counts as one that failed. What a source has not read is on no queue: a drain ends it.
        """
        outage = self._outage  # the thread of the unit may end it now
        return None if outage is None or isinstance(self.stepper, SourceStepper) else outage.error

    def _is_called_away(self) -> bool:
        """Return whether somebody has paused the unit, moved its position, or taken it over."""
        try:
            self.stepper.check_fence()
        except Fenced:
            return True
        except StoreError:
            return False
        return self.stepper.pause.row is not None and not self._was_paused

    def tell_if_slow(self) -> None:
        """Warn of a step that has run for a long time. Nothing else shows a function that hangs."""
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

    def pull(self) -> None:
        """Start the generator of a source."""
        stepper = self.stepper
        if not isinstance(stepper, SourceStepper):
            return
        if not self.running.pulls:
            stepper.feed.close()
            stepper.feed.ended = True
            return
        if self.running.draining:
            stepper.feed.close()
        thread = threading.Thread(target=stepper.feed.run, name=f"cues {self.id} generator", daemon=True)
        stepper.feed.thread = thread
        thread.start()

    def _adopt(self, tell: bool = True) -> None:
        adopt(self.stepper, tell)
        self.pull()

    @property
    def standing(self) -> UnitStatus:
        ended = isinstance(self.stepper, SourceStepper) and (self.finished or self.stepper.ended)
        state: Literal["running", "paused", "ended", "stopped"] = "ended" if ended else "running"
        state = "paused" if self.stepper.paused else state
        state = "stopped" if self.stopped is not None else state
        return UnitStatus(self.id, self.stepper.node.processor, self.stepper.counters, state)

    def idle(self, row: ProcessorRow | None, log_row: Callable[[Log], LogRow], paused: bool = False) -> bool:
        """Return whether there is nothing to take, by its row and the rows of the logs.

        ``paused``: the store has a pause of it. If it has noticed that too, it takes nothing.
        """
        stepper = self.stepper
        if self.finished:
            return True
        if paused and stepper.paused and not self.busy:
            return True
        if stepper.lanes_wait():
            return False
        if self.busy:  # at most once: positions move before the function runs
            return False
        if isinstance(stepper, SourceStepper):
            feed = stepper.feed
            if not feed.empty or feed.error is not None:
                return False
            return feed.ended or feed.closed or (feed.answered and time.monotonic() - feed.pulled_at > QUIET_S)
        if row is None:
            return True
        if not stepper.owns(row):
            return False  # another owner took it over, and it stops at its next step
        left = []
        for read in stepper.inputs:
            position = stepper.fence.position_in(row, read.tailer)
            log = log_row(read.log)
            left.append(log.next - max(position.next, log.first))  # messages that were purged cannot be taken
        return not (any if stepper.node.mode == "alts" else all)(n > 0 for n in left)


def recover(stepper: Stepper) -> None:
    """Recover a unit at its start. A seek may have moved its positions since it was claimed."""
    try:
        stepper.recover()
    except Fenced as fence:
        if fence.reason != "seek":
            raise
        adopt(stepper)


def adopt(stepper: Stepper, tell: bool = True) -> None:
    """Let a unit continue from the row of its processor, after a seek or an outage. ``tell``: with an event."""
    while True:
        with stepper.store.core.view() as txn:
            row = read_row(txn, stepper.node.id)
        assert row is not None
        stepper.adopt(row)
        try:
            stepper.recover(tell)
            return
        except Fenced as fence:  # a seek has moved the positions once more
            if fence.reason != "seek":
                raise


class WorkerThread:
    """A thread, and the units of one processor that it steps in turn."""

    def __init__(self, running: Host, worker: Worker) -> None:
        self.running = running
        self.processor = worker.stepper.node.processor
        self.count = 0
        """Number of units that it was given."""
        self.ended = False
        """It has no unit left, and takes no more."""
        self._joining: list[Worker] = []
        self._guard = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"cues {worker.id}", daemon=True)
        self.add(worker)

    def add(self, worker: Worker) -> bool:
        """Step one more unit. Return False if the thread has ended."""
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
                moved = self._turns(going)
                going = [worker for worker in going if not worker.finished]
                if going and not moved:
                    self._sleep(going)
        except BaseException as error:  # an error of the sleep: for example, the store was closed
            with self._guard:
                self.ended = True
            for worker in (*going, *self._joining):
                worker.finish(error)

    def _with_joined(self, going: list[Worker]) -> list[Worker]:
        """The units that continue, and those that were added."""
        with self._guard:
            joined, self._joining = self._joining, []
            self.ended = not (going or joined)
        for worker in joined:
            worker.pull()
        return going + joined

    def _turns(self, going: Sequence[Worker]) -> bool:
        """Make one step of each unit, so that one with many messages does not delay the others."""
        moved = False
        for worker in going:
            moved |= worker.turn()
        return moved

    def _sleep(self, going: Sequence[Worker]) -> None:
        """Take turns, and sleep between them, until a step was made or something has changed for this thread."""
        steppers = [worker.stepper for worker in going]
        first = steppers[0]
        if isinstance(first, SourceStepper) and not first.gate.late:  # a source has its thread for itself
            if (sleep_s := going[0].outage_s) is not None:
                self.running.sleep(sleep_s)
            elif first.feed.closed:  # the graph drains, and the generator may still work on its last message
                self.running.sleep(wakeup.SAFETY_S)
            else:
                first.feed.wait(wakeup.SAFETY_S)
            return
        blocked = [bool(stepper.gate.late) for stepper in steppers]

        def over() -> bool:
            if self.running.halted or self._joining or self._turns(going) or any(worker.finished for worker in going):
                return True
            return blocked != [bool(stepper.gate.late) for stepper in steppers]  # other doorbells are of interest

        wakeup.wait(
            [(input.log.store.core.doorbells, input.log.mask) for stepper in steppers for input in stepper.inputs]
            + [bell for stepper in steppers if stepper.gate.late for bell in stepper.gate.interests],
            over,
            None,
            lambda: min((left for worker in going if (left := worker.sleep_s) is not None), default=None),
        )


class WorkLoop:
    """A thread that takes turns until the graph halts or an error stops it. :meth:`turn` is one turn."""

    def __init__(self, running: Host, id: str) -> None:
        self.running = running
        self.id = id
        self.finished = False
        self.stopped: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"cues {id}", daemon=True)

    def turn(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        try:
            while not self.running.halted:
                if self.running.wait_for_disk():
                    break
                self.turn()
        except Interrupted:
            pass
        except BaseException as error:
            if not (isinstance(error, Closed) and self.running.halted):
                self.stop(error)
        finally:
            self.finished = True
            self.running.changed()

    def stop(self, error: BaseException) -> None:
        """Report the error that ended the loop."""
        self.stopped = stopped_by(self.id, error)
        self.running.emit(stop_event(self.id, self.stopped))


class ForwarderThread(WorkLoop):
    def __init__(self, running: Host, forwarder: Forwarder) -> None:
        super().__init__(running, repr(forwarder))
        self.forwarder = forwarder

    @override
    def turn(self) -> None:
        """Sleep until there is something to forward, and forward it.

        The sleep has a timeout. So low-water marks are written also when no messages come.
        """
        forwarder = self.forwarder
        try:
            wakeup.wait(
                [(forwarder.home.core.doorbells, forwarder.mask)],
                lambda: self.running.halted or forwarder.step(),
                None,
            )
        except WriterStuck as stuck:  # nothing was written, and the next turn tries again
            text = f"waits to forward: {stuck.message}"
            self.running.emit(events.Waiting(self.running.plan.id, text, logging.WARNING, stuck))
        self.running.changed()

    @override
    def stop(self, error: BaseException) -> None:
        graph, other = self.running.plan.id, self.forwarder.other.path
        self.stopped = ProcessorStopped(
            f"The messages of {graph} for the store {other} are not forwarded any more:"
            f" {type(error).__name__}: {getattr(error, 'message', words(error))}",
            getattr(error, "hint", "") or "start again when the cause is gone; nothing is lost.",
            processor=graph,
        )
        self.stopped.__cause__ = error
        report_stop(self.running, graph, self.stopped)

    def idle(self, ends: list[int]) -> bool:
        """Return whether all messages before ``ends`` of the fork queues were forwarded, or never will be."""
        return self.finished or self.forwarder.done(ends)


def report_stop(running: Host, id: str, stopped: BaseException) -> None:
    """Record the error that stopped ``id``, and tell the listeners."""
    event = stop_event(id, stopped)
    running.keep_stop(event)
    running.emit(event)
