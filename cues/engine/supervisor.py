"""The supervisor of workers: a thread that sleeps until a worker reports, dies, or is to be started.

    start     spawn all workers; when all have loaded the graph, let each own its units; then let all run
    death     start the worker again, with its units, after a wait that doubles while no unit makes progress
    a unit that kills its worker
              1. count the deaths in a row in which the unit was in the same step (its positions did not move)
              2. up to the end of that step the unit takes one message at a time (of a step of several thousand rows
                 first a thousandth of them): the messages before the one that kills are committed, and the next
                 deaths show which message it is
              3. after DEATHS_MAX deaths in the call of one message, that message has failed: it is sent to the
                 error queue, or the unit stops
              4. if several units of the worker were in a step, first give each a worker of its own; a unit that
                 kills its worker outside of any call is stopped alone, and the others continue
    a worker that is stopped (SIGSTOP) for longer than its lease
              start another in its place, which takes its units over; the old one is fenced when it continues
    end       halt all workers, and wait; a worker that does not end is killed, which loses nothing

Exactness does not depend on the supervisor: the owner and the positions of a unit are in the store. So two
supervisors, or one that is killed at any moment, can do no harm.

Not guaranteed: that a worker which hangs in a function is noticed. A function may take any time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import field
from typing import Any, Final

from cues.base import events, logs
from cues.base.data import dataclass
from cues.base.names import ProcessorId
from cues.engine import wire
from cues.engine.assignment import Assignment
from cues.engine.child import Child
from cues.engine.engine import Host
from cues.engine.record import RecordedFailure, WorkerRecord, WorkersRecord
from cues.engine.status import processor_of
from cues.errors import AlreadyRunning, ProcessorStopped, WorkerDied
from cues.graphs.processor import Node
from cues.graphs.processor_rows import read_row
from cues.graphs.running import UnitStatus
from cues.queues.store import Store
from cues.steps.failure import Verdict, passes
from cues.steps.ownership import LEASE_BEAT_S, LEASE_S
from cues.storage import locks

BACKOFF_S: Final = 0.1
"""Wait before the second start in a row of a worker whose units made no progress. It is doubled each time."""
BACKOFF_S_MAX: Final = 30.0
DEATHS_MAX: Final = 5
"""After so many deaths in a row in the same step, the step is the cause."""
NARROWING: Final = 1_000
"""After a death in a step, a step takes so many times fewer messages; at least one."""
LOOK_S: Final = 0.5
"""Time between two looks for facts that no worker reports: workers that are stopped, and new partitions."""
STOPPED_S: Final = LEASE_S + LEASE_BEAT_S
"""Time that a worker may be stopped before another takes its units. Its lease has run out by then."""

_Place = tuple[Any, bytes] | None
"""The positions of a unit, and the own position of a source; None before its first start."""


@dataclass
class WorkerSlot:
    """The units of one worker, the process that runs them now, and the deaths of the processes before it."""

    name: str
    units: list[str]
    child: Child | None = None
    due: float | None = None
    """The time at which the next process is to be spawned."""
    take_over: bool = False
    deaths: int = 0
    """Deaths in a row, between which no unit made progress."""
    strikes: dict[str, int] = field(default_factory=dict)
    """By unit: deaths in a row in the same step."""
    places: dict[str, _Place] = field(default_factory=dict)
    """The places of the units at the last death."""
    called: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By unit: input and index of the call in which the last process died."""
    careful: dict[str, dict[int, list[tuple[int, int]]]] = field(default_factory=dict)
    """By unit and input: steps in which a worker died, the innermost last: their end, and the most to take."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """By unit: the message that kills its worker."""


class Supervisor:
    """The thread and its state. Other threads read its attributes, and call the methods of the first section."""

    def __init__(
        self,
        store: Store,
        assignment: Assignment,
        load: wire.LoadGraph,
        carry: wire.AssignUnits,
        record: WorkersRecord,
        host: Host,
        grown: Callable[[], Sequence[Node]],
    ) -> None:
        """``load`` and ``carry`` are the messages to a worker at the start, without its name and its units. ``grown``
        returns the units of partitions that came since its last call."""
        self.failed: BaseException | None = None
        """The error of the start, or of the supervisor itself."""
        self.begun = threading.Event()
        """Set when all workers run, or when the start failed."""
        self.stopped: dict[str, BaseException] = {}
        """By unit: the error that stopped it. No worker runs it any more."""
        self.slots = [WorkerSlot(name, list(units)) for name, units in assignment.items()]
        self._store = store
        self._load = load
        self._carry = carry
        self._record = record
        self._emit = host.emit
        self._changed = host.changed
        self._grown = grown
        self._lost: list[Child] = []
        """Stopped workers that were given up. Others have their units."""
        self._counted: dict[str, events.Counters] = {}
        """The counters of workers that are dead, by unit."""
        self._spawned = len(self.slots)
        self._draining = self._halting = self._disk_low = False
        self._look_at = 0.0
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._waking = threading.Lock()
        self._ended = False
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        self._poll = select.poll()
        self._poll.register(self._wakes, select.POLLIN)
        self._polled: dict[int, Child] = {}
        self.thread = threading.Thread(target=self._run, name="cues supervisor", daemon=True)

    # --- for other threads ---

    def call(self, work: Callable[[], None]) -> None:
        """Call ``work`` soon, in the supervisor's thread."""
        with self._waking:
            if not self._ended:
                self._calls.append(work)
                os.write(self._wake, b"\0")

    def drain(self) -> None:
        """End the sources of all workers, also of those that are started later."""

        def end() -> None:
            self._draining = True
            self._tell_all(wire.Drain())

        self.call(end)

    def set_disk_low(self, low: bool) -> None:
        """Let no worker begin a step while a disk is low, also of those that are started later."""

        def note() -> None:
            self._disk_low = low
            self._tell_all(wire.DiskLow(low))

        self.call(note)

    def halt(self) -> None:
        """Stop all workers after their current steps. The thread ends after the last of them."""

        def end() -> None:
            self._halting = True
            for slot in self.slots:
                slot.due = None
            self._tell_all(wire.Halt())
            for child in self._lost:
                child.kill()

        self.call(end)

    def kill(self) -> None:
        """End all workers at once."""

        def end() -> None:
            for child in (*self._children, *self._lost):
                child.kill()

        self.call(end)

    def look(self, number: int) -> None:
        """Ask every worker whether it is idle. The answers, with the same ``number``, are in :attr:`slots`."""
        self.call(lambda: self._tell_all(wire.StatusRequest(number)))

    def standings(self) -> dict[str, UnitStatus]:
        """The status of each unit. The counters include those of workers that died, except for their last moments."""
        status: dict[str, UnitStatus] = {}
        for slot in tuple(self.slots):
            reply = slot.child.status_reply if slot.child is not None else None
            known = {unit.id: unit for unit in reply.standings} if reply is not None else {}
            status |= {id: self._whole(known.get(ProcessorId(id)) or _no_status(id)) for id in slot.units}
        for id in tuple(self.stopped):
            known_status = status.get(id) or self._whole(_no_status(id))
            status[id] = dataclasses.replace(known_status, state="stopped")
        return status

    def _whole(self, unit: UnitStatus) -> UnitStatus:
        """The status with the counters of workers that are dead added."""
        before = self._counted.get(unit.id)
        return unit if before is None else dataclasses.replace(unit, counters=unit.counters.with_those_of(before))

    # --- the thread ---

    def _run(self) -> None:
        try:
            for slot in self.slots:
                self._spawn(slot, first=True)
            while not (self._halting and not self._children and not self._lost):
                self._turn()
        except BaseException as error:
            self.failed = error
            for child in (*self._children, *self._lost):
                child.kill()
        finally:
            self.begun.set()
            self._changed()
            for child in (*self._children, *self._lost):
                child.process.wait()
                child.close()
            with self._waking:
                self._ended = True
                os.close(self._wake)
                os.close(self._wakes)

    @property
    def _children(self) -> list[Child]:
        return [slot.child for slot in self.slots if slot.child is not None]

    def _turn(self) -> None:
        for fd, _ in self._poll.poll(self._timeout_ms()):
            if fd == self._wakes:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakes, 4096)
                while self._calls:
                    self._calls.popleft()()
            elif fd in self._polled:
                child = self._polled[fd]
                for report in child.read(fd):
                    self._handle(child, report)
                self._watch(child)
        for child in (*self._children, *self._lost):
            if child.dead():
                self._died(child)
        now = time.monotonic()
        for slot in tuple(self.slots):
            if slot.due is not None and slot.due <= now:
                self._spawn(slot, first=False)
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look_for_stopped()
            self._take_in()

    def _timeout_ms(self) -> float:
        due = [slot.due for slot in self.slots if slot.due is not None]
        return max(0.0, min([self._look_at, *due]) - time.monotonic()) * 1000 + 1

    def _watch(self, child: Child) -> None:
        """Poll the descriptors of a worker that are open, and no others of it."""
        self._unwatch(child, except_for=set(child.descriptors))
        for fd in set(child.descriptors) - self._polled.keys():
            self._poll.register(fd, select.POLLIN)
            self._polled[fd] = child

    def _unwatch(self, child: Child, except_for: Set[int] = frozenset()) -> None:
        for fd in [fd for fd, owner in self._polled.items() if owner is child and fd not in except_for]:
            self._poll.unregister(fd)
            del self._polled[fd]

    def _tell_all(self, message: Any) -> None:
        for child in self._children:
            child.send(message)

    # --- starting ---

    def _spawn(self, slot: WorkerSlot, first: bool) -> None:
        slot.due = None
        slot.child = child = Child(slot.name, slot.units)
        child.send(dataclasses.replace(self._load, worker=slot.name))
        if not first:
            carry = dataclasses.replace(self._carry, units=child.units, accept_topology=False, take_over=slot.take_over)
            child.send(dataclasses.replace(carry, careful=slot.careful, verdicts=slot.verdicts))
            child.send(wire.Begin(self._draining))
            child.send(wire.DiskLow(self._disk_low))
        self._watch(child)
        known = self._record.workers.get(slot.name)
        if known is None:
            known = self._record.workers[slot.name] = WorkerRecord(child.pid, slot.units)
        known.pid, known.units, known.restarts = child.pid, list(slot.units), known.restarts + (not first)
        self._save()

    def _loaded(self, child: Child) -> None:
        child.status = "assembling"
        if not self.begun.is_set() and all(other.status == "assembling" for other in self._children):
            for other in self._children:
                other.send(dataclasses.replace(self._carry, units=other.units))

    def _ready(self, child: Child) -> None:
        child.status = "running"
        if not self.begun.is_set() and all(other.status == "running" for other in self._children):
            self._tell_all(wire.Begin(self._draining))
            self.begun.set()

    def _refused(self, child: Child, error: BaseException) -> None:
        """Handle the report of a worker that could not begin."""
        child.status = "left"
        slot = self._slot_of(child)
        if slot is None:
            return
        if not self.begun.is_set():
            self.failed = error
            self.begun.set()
        elif passes(error) or (slot.take_over and isinstance(error, AlreadyRunning)):
            child.status = "waiting"
            self._warn(f"{child.name} cannot begin now: {getattr(error, 'message', error)}")
        else:
            for unit in tuple(slot.units):
                self._stop(unit, _stopped(unit, f"cannot begin: {getattr(error, 'message', error)}", error))

    # --- reports ---

    def _handle(self, child: Child, report: Any) -> None:
        if isinstance(report, tuple):
            _print(child.name, *report)
        elif isinstance(report, wire.StatusReply):
            child.status_reply = report
            self._forgive(child, report)
            if report.number:
                child.answer = report
            self._changed()
        elif isinstance(report, wire.EventReport):
            self._pass_on(child, report.rebuilt())
        elif isinstance(report, wire.Logged):
            about = {**report.facts, "worker": child.name}
            logs.logger(report.logger).log(report.level, "%s: %s", child.name, report.text, **about)
        elif isinstance(report, wire.Loaded):
            self._loaded(child)
        elif isinstance(report, wire.Ready):
            self._ready(child)
        elif isinstance(report, wire.StartRefused):
            self._refused(child, report.failure.rebuilt())
        elif isinstance(report, wire.Departure):
            child.status = "left"

    def _forgive(self, child: Child, report: wire.StatusReply) -> None:
        """Forget the deaths in a message before which a unit paused: after a resume it is tried anew."""
        slot = self._slot_of(child)
        for unit in report.standings if slot is not None else ():
            if slot is not None and unit.state == "paused":
                slot.verdicts.pop(unit.id, None)
                slot.strikes.pop(unit.id, None)

    def _pass_on(self, child: Child, event: events.Event) -> None:
        if child in self._lost:
            return  # it reports that it was fenced, which is expected
        if isinstance(event, events.Stopped) and event.error is not None:
            self._stop(event.processor, event.error, event)
        elif isinstance(event, events.Waiting) and event.error is not None:
            self._emit(dataclasses.replace(event, text=self._named(event.text, event.error.pid)))
        else:
            self._emit(event)

    def _named(self, text: str, pid: int) -> str:
        """Return the text, with the name of the worker if the process ``pid`` in it is a worker."""
        for child in (*self._children, *self._lost):
            if child.pid == pid:
                return text.replace(f"process {pid} ", f"{child.name}, process {pid} ")
        return text

    def _stop(self, unit: str, error: BaseException, event: events.Stopped | None = None) -> None:
        """Run a unit no more, or record that the forwarding of a worker has stopped. The other units continue."""
        self.stopped[unit] = error
        text = event.text if event is not None else getattr(error, "message", str(error)).removeprefix(f"{unit} ")
        self._record.stopped[unit] = RecordedFailure.now(text.removeprefix("stopped").lstrip(": "))
        self._save()
        self._emit(events.Stopped(unit, f"{text}; the others continue", logging.ERROR, error=error, alone=True))
        self._changed()

    # --- deaths ---

    def _died(self, child: Child) -> None:
        for report in child.read_all():
            self._handle(child, report)
        slot = self._slot_of(child)
        in_step, calls = child.in_step, child.calls
        self._unwatch(child)
        child.close()
        if slot is None:
            self._lost.remove(child)
            return
        slot.child = None
        self._count(child)
        self._changed()
        if self._halting:
            return
        if not self.begun.is_set():
            self.failed = _died_first(child)
            self.begun.set()
            return
        if child.status != "left":
            self._judge(slot, child, in_step, calls)
        slot.units = [unit for unit in slot.units if unit not in self.stopped]
        if not slot.units:
            self.slots.remove(slot)

    def _judge(self, slot: WorkerSlot, child: Child, in_step: set[str], calls: dict[str, tuple[int, int, int]]) -> None:
        """Find the unit that killed its worker, if one did. Set the time of the next start of the worker."""
        places = self._places(slot.units)
        called = {unit: call[:2] for unit, call in calls.items()}

        def has_moved(unit: str) -> bool:
            if unit in called and unit in slot.called:  # redriven messages and timers do not move the positions
                return called[unit] != slot.called[unit]
            return places[unit] != slot.places.get(unit)

        moved = [unit for unit in slot.units if has_moved(unit)]
        slot.called = called
        suspects = in_step
        if child.status in ("loading", "assembling") and child.process.returncode != -signal.SIGKILL:
            suspects = set(slot.units)  # it died of the import of the graph, or of the recovery of a unit
        for unit in slot.units:
            known = 0 if unit in moved else slot.strikes.get(unit, 0)
            slot.strikes[unit] = known + 1 if unit in suspects else 0
        slot.places = places
        slot.deaths = 1 if moved else slot.deaths + 1
        wait_s = min(BACKOFF_S_MAX, BACKOFF_S * 2 ** (slot.deaths - 1))
        slot.due = time.monotonic() + wait_s
        what = f"{child.name} (process {child.pid}) {child.death()}"
        at = f" in a step of {', '.join(sorted(suspects))}" if suspects else ""
        self._record.workers[slot.name].last_failure = RecordedFailure.now(what + at)
        self._save()
        for unit, (chosen, start, count) in calls.items():
            of_unit = slot.careful.setdefault(unit, {})
            died = of_unit[chosen] = [step for step in of_unit.get(chosen, ()) if step[0] > start]
            if count > 1 and (step := (start + count, max(1, count // NARROWING))) not in died:
                died.append(step)
        guilty = [unit for unit in slot.units if slot.strikes[unit] >= DEATHS_MAX]
        alone = len(guilty) == 1 and (len(slot.units) == 1 or suspects == set(guilty))
        if alone and guilty[0] in calls:
            verdict = Verdict(*calls[guilty[0]], slot.strikes[guilty[0]], child.death())
            before = slot.verdicts.get(guilty[0])
            if before is None or (before.chosen, before.start) != (verdict.chosen, verdict.start):
                slot.verdicts[guilty[0]] = verdict
                guilty = []
        if guilty and len(slot.units) == 1:
            text = f"its worker died {slot.strikes[guilty[0]]} times in a row in the same step: it {child.death()}"
            self._stop(guilty[0], _stopped(guilty[0], f"stopped: {text}", None))
            return
        self._warn(f"{what}{at}; it is started again in {wait_s:g} s")
        if guilty:
            self._separate(slot, guilty)

    def _separate(self, slot: WorkerSlot, guilty: list[str]) -> None:
        """Give each unit that may have killed the worker a worker of its own. The next death shows which unit it is."""
        for unit in guilty:
            own = self._own_slot([unit], slot.due or 0.0)
            own.deaths = slot.deaths
            own.strikes[unit], own.places[unit] = slot.strikes.pop(unit), slot.places.pop(unit)
            if unit in slot.called:
                own.called[unit] = slot.called.pop(unit)
            own.careful[unit] = slot.careful.pop(unit, {})
            slot.units.remove(unit)
        self._warn(f"{', '.join(guilty)}: in a worker of its own from now on, to see what {slot.name} dies of")

    def _places(self, units: list[str]) -> dict[str, _Place]:

        with self._store.core.view() as txn:
            rows = {unit: read_row(txn, ProcessorId(unit)) for unit in units}
        return {unit: None if row is None else (row.positions, row.source) for unit, row in rows.items()}

    def _count(self, child: Child) -> None:
        for unit in child.status_reply.standings if child.status_reply is not None else ():
            self._counted[unit.id] = self._whole(unit).counters

    # --- new partitions ---

    def take_in(self) -> None:
        """Look for new partitions at once. For other threads."""
        self.call(self._take_in)

    def _take_in(self) -> None:
        """Give new units to the workers that run their processors: each to the worker that has the fewest of them."""
        if not self.begun.is_set() or self._halting:
            return
        given: dict[str, list[str]] = {}
        for node in self._grown():
            count = {slot.name: sum(processor_of(unit) == node.processor for unit in slot.units) for slot in self.slots}
            carriers = [slot for slot in self.slots if count[slot.name]]
            # Without carriers, all units of the processor have been stopped.
            slot = min(carriers, key=lambda slot: count[slot.name]) if carriers else self._own_slot([])
            slot.units.append(node.id)
            given.setdefault(slot.name, []).append(node.id)
        for slot in self.slots:
            if slot.name not in given:
                continue
            if slot.child is not None:
                slot.child.give(given[slot.name])
            known = self._record.workers.get(slot.name)
            if known is not None:
                known.units = list(slot.units)
        if given:
            self._save()
            self._changed()

    def _own_slot(self, units: list[str], due: float = 0.0) -> WorkerSlot:
        """Add a worker, which is started when it is ``due``."""
        self._spawned += 1
        own = WorkerSlot(f"worker-{self._spawned}", units, due=due)
        self.slots.append(own)
        return own

    # --- workers that are stopped ---

    def _look_for_stopped(self) -> None:
        for slot in self.slots:
            child = slot.child
            if child is None or child.status != "running" or self._halting:
                continue
            if locks.process_state(child.pid) != "stopped":
                child.stopped_since = None
            elif child.stopped_since is None:
                child.stopped_since = time.monotonic()
                self._warn(f"{child.name} (process {child.pid}) is stopped")
            elif time.monotonic() - child.stopped_since > STOPPED_S:
                self._replace(slot, child)

    def _replace(self, slot: WorkerSlot, child: Child) -> None:
        text = f"{child.name} (process {child.pid}) is stopped, and does not answer for {STOPPED_S:g} s"
        self._record.workers[slot.name].last_failure = RecordedFailure.now(text)
        self._warn(f"{text}; another takes its place")
        self._lost.append(child)
        self._count(child)
        slot.child, slot.take_over = None, True
        slot.units = [unit for unit in slot.units if unit not in self.stopped]
        self._spawn(slot, first=False)

    # --- helpers ---

    def _warn(self, text: str) -> None:
        self._emit(events.Event("", text, logging.WARNING))

    def _slot_of(self, child: Child) -> WorkerSlot | None:
        return next((slot for slot in self.slots if slot.child is child), None)

    def _save(self) -> None:
        self._record.save(self._store.directory)


def _died_first(child: Child) -> WorkerDied:
    return WorkerDied(
        f"{child.name}, which was to run {', '.join(child.units)}, {child.death()} before it was ready; nothing ran.",
        "read what the worker printed above, or start the graph without workers.",
        worker=child.name,
        pid=child.pid,
        returncode=child.process.returncode,
    )


def _stopped(unit: str, why: str, cause: BaseException | None) -> ProcessorStopped:
    error = ProcessorStopped(
        f"{unit} {why}", "start again when the cause is gone; it continues after its last commit.", processor=unit
    )
    error.__cause__ = cause
    return error


def _print(worker: str, is_error: bool, line: str) -> None:
    """Print a line of a worker. On stderr, where many write, its name comes first."""
    with contextlib.suppress(OSError, ValueError):  # the reader has closed the stream
        if is_error:
            print(f"{worker}: {line}", file=sys.stderr, flush=True)
        else:
            print(line, flush=True)


def _no_status(unit: str) -> UnitStatus:
    """The status of a unit that no worker has reported yet."""
    return UnitStatus(ProcessorId(unit), processor_of(unit), events.Counters(), "running")
