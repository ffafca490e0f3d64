"""Keeping workers alive: one thread that sleeps until a worker speaks, dies, or is due.

    start     spawn all; when all have the graph, let each own its units; when all do, let all run
    death     start it again, with the units that it had, after a wait that doubles while nothing moves
    a unit that its worker dies of
              1. count: the worker died, the unit was in a step, and it stands where it stood at the death before
              2. up to the end of that step it takes one message at a time: what is before the one that kills is
                 committed, and a death says which message it was
              3. after DEATHS_MAX deaths in the call of one message that message has failed: it goes to the error
                 queue, or the unit stops
              4. where several units of the worker were in a step, first give each a worker of its own; and a unit
                 that its worker dies of outside of any call is stopped alone; the others go on
    a worker that is stopped (SIGSTOP) past its lease
              start another in its place, which takes its units over; the old one is fenced when it goes on
    end       halt all, and wait; who does not come to an end is killed, which loses nothing

Nothing here is needed for exactness: who owns a unit, and where it stands, is in the store. So two
supervisors, or one that is killed at any instant, can do no harm.

Not guaranteed: that a worker which hangs in a function is noticed. A function may take as long as it likes.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cues.base import events
from cues.engine import wire
from cues.engine.assignment import Assignment
from cues.engine.child import Child
from cues.engine.record import RecordedFailure, WorkerRecord, WorkersRecord
from cues.engine.status import UnitStatus
from cues.errors import AlreadyRunning, ProcessorStopped, WorkerDied
from cues.graphs.processor import Node
from cues.queues.processor_rows import ProcessorRow, read_row
from cues.queues.store import Store
from cues.steps.failure import Verdict, passes
from cues.steps.ownership import LEASE_BEAT_S, LEASE_S
from cues.storage import locks

BACKOFF_S: Final = 0.1
"""Before the second start in a row of a worker whose units have not moved; doubled each time."""
BACKOFF_S_MAX: Final = 30.0
DEATHS_MAX: Final = 5
"""Deaths in a row in the same step: by then it is no accident."""
LOOK_S: Final = 0.5
"""How often it looks for what no worker tells: workers that are stopped, partitions that came."""
STOPPED_S: Final = LEASE_S + LEASE_BEAT_S
"""How long a worker may be stopped before another takes its units: its lease has run out by then."""

_Place = tuple[Any, bytes] | None


@dataclass
class WorkerSlot:
    """What one worker is for: units, and what became of those who carried them."""

    name: str
    units: list[str]
    child: Child | None = None
    due: float | None = None
    """When the next one is to be spawned."""
    take_over: bool = False
    deaths: int = 0
    """In a row, in which no unit moved."""
    strikes: dict[str, int] = field(default_factory=dict)
    """By unit: deaths in a row in the same step."""
    places: dict[str, _Place] = field(default_factory=dict)
    """Where the units stood at the last death."""
    careful: dict[str, dict[int, int]] = field(default_factory=dict)
    """By unit and input: where the step ended in which a worker died."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """By unit: the message that its worker dies of."""


class Supervisor:
    """The thread, and what it knows. Others read its attributes, and call the methods that say so."""

    def __init__(
        self,
        store: Store,
        assignment: Assignment,
        load: Callable[[str], wire.LoadGraph],
        carry: Callable[[tuple[str, ...], bool, bool], wire.AssignUnits],
        record: WorkersRecord,
        emit: Callable[[events.Event], None],
        changed: Callable[[], None],
        grown: Callable[[], Sequence[Node]],
    ) -> None:
        """``load(name)`` and ``carry(units, first, take_over)`` make the messages to a worker; ``changed`` is
        called when something is new that others may wait for; ``grown`` gives units of partitions that came since
        it was called last."""
        self.failed: BaseException | None = None
        """Why the start failed, or the supervisor itself."""
        self.begun = threading.Event()
        """All run, or the start failed."""
        self.stopped: dict[str, BaseException] = {}
        """By unit, what stopped it; it is not run any more."""
        self.posts = [WorkerSlot(name, list(units)) for name, units in assignment.items()]
        self._store = store
        self._load = load
        self._carry = carry
        self._record = record
        self._emit = emit
        self._changed = changed
        self._grown = grown
        self._lost: list[Child] = []
        """Workers that were given up, stopped; another has their units."""
        self._counted: dict[str, events.Counters] = {}
        """What workers that are dead have counted."""
        self._spawned = len(self.posts)
        self._draining = self._halting = False
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
        """Let the supervisor's thread do something soon."""
        with self._waking:
            if not self._ended:
                self._calls.append(work)
                os.write(self._wake, b"\0")

    def drain(self) -> None:
        """End the sources of all workers, also of those that are started again."""

        def end() -> None:
            self._draining = True
            self._tell_all(wire.Drain())

        self.call(end)

    def halt(self) -> None:
        """Stop all workers behind their steps under way; the thread ends when they have."""

        def end() -> None:
            self._halting = True
            for post in self.posts:
                post.due = None
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
        """Ask every worker whether it is idle; ``posts`` have the answers by that number."""
        self.call(lambda: self._tell_all(wire.StatusRequest(number)))

    def standings(self) -> dict[str, UnitStatus]:
        """How each unit does, with what workers counted that died since (but for their last moments)."""
        found: dict[str, UnitStatus] = {}
        for post in tuple(self.posts):
            stand = post.child.stand if post.child is not None else None
            now = {one.id: one for one in stand.standings} if stand is not None else {}
            for unit in post.units:
                one = now.get(unit, UnitStatus(unit, processor_of(unit), events.Counters(), "running"))
                found[unit] = self._whole(one)
        for unit in tuple(self.stopped):
            one = found.get(unit) or self._whole(UnitStatus(unit, processor_of(unit), events.Counters(), "stopped"))
            found[unit] = dataclasses.replace(one, state="stopped")
        return found

    def _whole(self, one: UnitStatus) -> UnitStatus:
        """With what was counted by workers that are dead."""
        before = self._counted.get(one.id)
        return one if before is None else dataclasses.replace(one, counters=one.counters.with_those_of(before))

    # --- the thread ---

    def _run(self) -> None:
        try:
            for post in self.posts:
                self._spawn(post, first=True)
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
        return [post.child for post in self.posts if post.child is not None]

    def _turn(self) -> None:
        for fd, _ in self._poll.poll(self._timeout_ms()):
            if fd == self._wakes:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakes, 4096)
                while self._calls:
                    self._calls.popleft()()
            elif fd in self._polled:
                child = self._polled[fd]
                for news in child.hear(fd):
                    self._heard(child, news)
                self._watch(child)
        for child in (*self._children, *self._lost):
            if child.dead():
                self._died(child)
        now = time.monotonic()
        for post in tuple(self.posts):
            if post.due is not None and post.due <= now:
                self._spawn(post, first=False)
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look_for_stopped()
            self._take_in()

    def _timeout_ms(self) -> float:
        due = [post.due for post in self.posts if post.due is not None]
        return max(0.0, min([self._look_at, *due]) - time.monotonic()) * 1000 + 1

    def _watch(self, child: Child) -> None:
        """Poll what is open of it, and nothing else."""
        wanted = set(child.descriptors)
        for fd in [fd for fd, whose in self._polled.items() if whose is child and fd not in wanted]:
            self._poll.unregister(fd)
            del self._polled[fd]
        for fd in wanted - self._polled.keys():
            self._poll.register(fd, select.POLLIN)
            self._polled[fd] = child

    def _forget(self, child: Child) -> None:
        for fd in [fd for fd, whose in self._polled.items() if whose is child]:
            self._poll.unregister(fd)
            del self._polled[fd]
        child.close()

    def _tell_all(self, message: Any) -> None:
        for child in self._children:
            child.send(message)

    # --- starting ---

    def _spawn(self, post: WorkerSlot, first: bool) -> None:
        post.due = None
        post.child = child = Child(post.name, post.units)
        child.send(self._load(post.name))
        if not first:
            carry = self._carry(child.units, False, post.take_over)
            child.send(dataclasses.replace(carry, careful=post.careful, verdicts=post.verdicts))
            child.send(wire.Begin(self._draining))
        self._watch(child)
        known = self._record.workers.get(post.name)
        if known is None:
            known = self._record.workers[post.name] = WorkerRecord(child.pid, post.units)
        known.pid, known.units, known.restarts = child.pid, list(post.units), known.restarts + (not first)
        self._save()

    def _loaded(self, child: Child) -> None:
        child.status = "assembling"
        if not self.begun.is_set() and all(one.status == "assembling" for one in self._children):
            for one in self._children:
                one.send(self._carry(one.units, True, False))

    def _ready(self, child: Child) -> None:
        child.status = "running"
        if not self.begun.is_set() and all(one.status == "running" for one in self._children):
            self._tell_all(wire.Begin(self._draining))
            self.begun.set()

    def _refused(self, child: Child, error: BaseException) -> None:
        """A worker could not begin."""
        child.status = "left"
        post = self._post_of(child)
        if post is None:
            return
        if not self.begun.is_set():
            self.failed = error
            self.begun.set()
        elif passes(error) or (post.take_over and isinstance(error, AlreadyRunning)):
            child.status = "waiting"
            text = f"{child.name} cannot begin now: {getattr(error, 'message', error)}"
            self._emit(events.Event("", text, logging.WARNING))
        else:
            for unit in tuple(post.units):
                self._stop(unit, _stopped(unit, f"cannot begin: {getattr(error, 'message', error)}", error))

    # --- hearing ---

    def _heard(self, child: Child, news: Any) -> None:
        if isinstance(news, tuple):
            _print(child.name, *news)
        elif isinstance(news, wire.StatusReply):
            child.stand = news
            if news.number:
                child.answer = news
            self._changed()
        elif isinstance(news, wire.EventReport):
            self._told(child, news.whole())
        elif isinstance(news, wire.Logged):
            logging.getLogger(news.logger).log(news.level, "%s: %s", child.name, news.text)
        elif isinstance(news, wire.Loaded):
            self._loaded(child)
        elif isinstance(news, wire.Ready):
            self._ready(child)
        elif isinstance(news, wire.Refused):
            self._refused(child, news.failure.whole())
        elif isinstance(news, wire.Departure):
            child.status = "left"

    def _told(self, child: Child, event: events.Event) -> None:
        if child in self._lost:
            return  # fenced, as it must be
        if isinstance(event, events.Stopped) and event.error is not None:
            self._stop(event.processor, event.error, event)
        elif isinstance(event, events.Waiting) and event.error is not None:
            self._emit(dataclasses.replace(event, text=self._named(event.text, event.error.pid)))
        else:
            self._emit(event)

    def _named(self, text: str, pid: int) -> str:
        """With the name of the worker where a text tells of a process that is one."""
        for child in (*self._children, *self._lost):
            if child.pid == pid:
                return text.replace(f"process {pid} ", f"{child.name}, process {pid} ")
        return text

    def _stop(self, unit: str, error: BaseException, event: events.Stopped | None = None) -> None:
        """A unit is not run any more, the others are; or the forwarding of a worker has stopped."""
        self.stopped[unit] = error
        text = event.text if event is not None else getattr(error, "message", str(error)).removeprefix(f"{unit} ")
        self._record.stopped[unit] = RecordedFailure.now(text.removeprefix("stopped").lstrip(": "))
        self._save()
        self._emit(events.Stopped(unit, f"{text}; the others go on", logging.ERROR, error=error, alone=True))
        self._changed()

    # --- dying ---

    def _died(self, child: Child) -> None:
        for news in child.hear_all():
            self._heard(child, news)
        post = self._post_of(child)
        in_step, calls = child.in_step, child.calls
        self._forget(child)
        if post is None:
            self._lost.remove(child)
            return
        post.child = None
        self._count(child)
        self._changed()
        if self._halting:
            return
        if not self.begun.is_set():
            self.failed = _died_first(child)
            self.begun.set()
            return
        if child.status != "left":
            self._judge(post, child, in_step, calls)
        post.units = [unit for unit in post.units if unit not in self.stopped]
        if not post.units:
            self.posts.remove(post)

    def _judge(self, post: WorkerSlot, child: Child, in_step: set[str], calls: dict[str, tuple[int, int, int]]) -> None:
        """A worker died that should not: was it one of its units, and when is it started again?"""
        places = self._places(post.units)
        moved = [unit for unit in post.units if places[unit] != post.places.get(unit)]
        suspects = in_step
        if child.status in ("loading", "assembling") and child.process.returncode != -signal.SIGKILL:
            suspects = set(post.units)  # of being imported, or recovered
        for unit in post.units:
            known = 0 if unit in moved else post.strikes.get(unit, 0)
            post.strikes[unit] = known + 1 if unit in suspects else 0
        post.places = places
        post.deaths = 1 if moved else post.deaths + 1
        wait_s = min(BACKOFF_S_MAX, BACKOFF_S * 2 ** (post.deaths - 1))
        post.due = time.monotonic() + wait_s
        what = f"{child.name} (process {child.pid}) {child.death()}"
        at = f" in a step of {', '.join(sorted(suspects))}" if suspects else ""
        self._record.workers[post.name].last_failure = RecordedFailure.now(what + at)
        self._save()
        for unit, (chosen, start, count) in calls.items():
            until = post.careful.setdefault(unit, {})
            until[chosen] = max(start + count, until.get(chosen, 0))
        guilty = [unit for unit in post.units if post.strikes[unit] >= DEATHS_MAX]
        alone = len(guilty) == 1 and (len(post.units) == 1 or suspects == set(guilty))
        if alone and guilty[0] in calls:
            verdict = Verdict(*calls[guilty[0]], post.strikes[guilty[0]], child.death())
            before = post.verdicts.get(guilty[0])
            if before is None or (before.chosen, before.start) != (verdict.chosen, verdict.start):
                post.verdicts[guilty[0]] = verdict
                guilty = []
        if guilty and len(post.units) == 1:
            text = f"its worker died {post.strikes[guilty[0]]} times in a row in the same step: it {child.death()}"
            self._stop(guilty[0], _stopped(guilty[0], f"stopped: {text}", None))
            return
        self._emit(events.Event("", f"{what}{at}; it is started again in {wait_s:g} s", logging.WARNING))
        if guilty:
            self._separate(post, guilty)

    def _separate(self, post: WorkerSlot, guilty: list[str]) -> None:
        """Give each unit that a worker may have died of a worker of its own: the next death shows which it was."""
        for unit in guilty:
            own = self._post_of_its_own([unit], post.due or 0.0)
            own.deaths = post.deaths
            own.strikes[unit], own.places[unit] = post.strikes.pop(unit), post.places.pop(unit)
            own.careful[unit] = post.careful.pop(unit, {})
            post.units.remove(unit)
        names = ", ".join(guilty)
        self._emit(
            events.Event(
                "", f"{names}: in a worker of its own from now on, to see what {post.name} dies of", logging.WARNING
            )
        )

    def _places(self, units: list[str]) -> dict[str, _Place]:
        """Where each unit stands: its positions, and a source's own."""

        def place(row: ProcessorRow | None) -> _Place:
            return None if row is None else (row.positions, row.source)

        with self._store.view() as txn:
            return {unit: place(read_row(txn, unit)) for unit in units}

    def _count(self, child: Child) -> None:
        for one in child.stand.standings if child.stand is not None else ():
            self._counted[one.id] = self._whole(one).counters

    # --- partitions that came ---

    def take_in(self) -> None:
        """Look for new partitions at once. For other threads."""
        self.call(self._take_in)

    def _take_in(self) -> None:
        """Give new units to the workers that carry their processors, the one with the fewest of them first."""
        if not self.begun.is_set() or self._halting:
            return
        found: dict[str, list[str]] = {}
        for node in self._grown():
            count = {post.name: sum(processor_of(unit) == node.processor for unit in post.units) for post in self.posts}
            carriers = [post for post in self.posts if count[post.name]]
            if carriers:
                post = min(carriers, key=lambda post: count[post.name])
            else:  # all of its units are stopped
                post = self._post_of_its_own([])
            post.units.append(node.id)
            found.setdefault(post.name, []).append(node.id)
        for post in self.posts:
            if post.name not in found:
                continue
            if post.child is not None:
                post.child.give(found[post.name])
            known = self._record.workers.get(post.name)
            if known is not None:
                known.units = list(post.units)
        if found:
            self._save()
            self._changed()

    def _post_of_its_own(self, units: list[str], due: float = 0.0) -> WorkerSlot:
        """A worker more, to be started when it is ``due``."""
        self._spawned += 1
        own = WorkerSlot(f"worker-{self._spawned}", units, due=due)
        self.posts.append(own)
        return own

    # --- workers that are stopped ---

    def _look_for_stopped(self) -> None:
        for post in self.posts:
            child = post.child
            if child is None or child.status != "running" or self._halting:
                continue
            if locks.process_state(child.pid) != "stopped":
                child.stopped_since = None
            elif child.stopped_since is None:
                child.stopped_since = time.monotonic()
                self._emit(events.Event("", f"{child.name} (process {child.pid}) is stopped", logging.WARNING))
            elif time.monotonic() - child.stopped_since > STOPPED_S:
                self._replace(post, child)

    def _replace(self, post: WorkerSlot, child: Child) -> None:
        text = f"{child.name} (process {child.pid}) is stopped, and does not answer for {STOPPED_S:g} s"
        self._record.workers[post.name].last_failure = RecordedFailure.now(text)
        self._emit(events.Event("", f"{text}; another takes its place", logging.WARNING))
        self._lost.append(child)
        self._count(child)
        post.child, post.take_over = None, True
        post.units = [unit for unit in post.units if unit not in self.stopped]
        self._spawn(post, first=False)

    # --- small things ---

    def _post_of(self, child: Child) -> WorkerSlot | None:
        return next((post for post in self.posts if post.child is child), None)

    def _save(self) -> None:
        with contextlib.suppress(OSError):  # a full disk; it is only for `cues status`
            self._record.save(self._store.directory)


def _died_first(child: Child) -> WorkerDied:
    return WorkerDied(
        f"{child.name}, which was to run {', '.join(child.units)}, {child.death()} before it was ready; nothing ran.",
        "what it printed above; or a start without workers.",
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
    """What a worker printed; on stderr under its name, since many speak there."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        if is_error:
            print(f"{worker}: {line}", file=sys.stderr, flush=True)
        else:
            print(line, flush=True)


def processor_of(unit: str) -> str:
    """The id of a unit's processor."""
    return unit.partition("/")[0]
