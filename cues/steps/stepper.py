"""The delivery protocol of one processor: take, run, commit.

The numbers are those of docs/guarantees.md; each is an object.

    1. take       choose for each tailer a range of messages on its queue; copy them           Taker, taker.py
    2. snapshot   if the function has side effects, commit the ranges before it runs           Committer, commit.py
    3. run        call the function; a message that fails for good becomes a step of its own   Runner, runner.py
                  a batch that fails is dropped, and its halves are taken from 1 on            Halving, halving.py
    4. commit     one write transaction: the fence, outputs, state, attempt, positions         PartBuilder, Committer
    5. ring       wake the readers of the queues that were written                             Committer

A :class:`Stepper` has these objects, the row of its processor (fence.py), and the decision of a start (recovery.py). It
owns the turn.

A position moves only inside the commit of 4 (at-most-once: of 2) or by a seek. So after a crash at any moment the
store has the whole step or nothing of it. A start (recovery.py) reads two records to decide which: either the last
snapshot has an attempt with its hash, or it has none.

Not guaranteed: that a function is called once. A step that did not commit runs again, with the same ranges and
hash. Effects of the function outside the store may happen again after a crash; use ``checkpoint=`` or the delivery hash
(``process.delivery.hash``) to ignore repetitions.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cues import faults
from cues.base import clock, events, names
from cues.base.data import dataclass
from cues.graphs.pause import ProcessorPause
from cues.graphs.processor import Node
from cues.graphs.processor_rows import ProcessorRow
from cues.native import mypyc_attr
from cues.queues.backpressure import Gate
from cues.queues.tailer import pending_read
from cues.steps import tracing
from cues.steps.abroad import Abroad, ForkQueues
from cues.steps.bucket import Bucket
from cues.steps.calls import Calls, Sleep
from cues.steps.commit import Committer
from cues.steps.delays import Held
from cues.steps.failure import Failure, Verdict, short, stopped_at
from cues.steps.fence import Fence, Patience
from cues.steps.halving import halves
from cues.steps.hashes import Hasher
from cues.steps.imperative import Imperative
from cues.steps.invocation import prepare
from cues.steps.lanes import Lane
from cues.steps.lanes import Outcome as Outcome
from cues.steps.parts import PartBuilder
from cues.steps.pauses import FailureRows, UnitPause
from cues.steps.pending import PendingMessages
from cues.steps.ports import Ports
from cues.steps.process import Process
from cues.steps.recovery import Decision, Recovery
from cues.steps.results import Results
from cues.steps.runner import Runner
from cues.steps.state import StateTable
from cues.steps.taker import Taker
from cues.storage.store_core import LastLook

if TYPE_CHECKING:
    from cues.forwarding.low_water import LowWater
    from cues.queues.queue import Queue
    from cues.queues.store import Store
    from cues.steps.copies import Copies
    from cues.steps.taking import Taken


@dataclass(frozen=True)
class Setting:
    """The objects that an engine gives to all its steppers."""

    queues: Mapping[str, Queue] = field(default_factory=dict)
    """Handles by name, needed for queues of other stores."""
    system: Any = None
    sleep: Sleep = lambda seconds: False
    stopping: Callable[[], bool] = lambda: False
    may_linger: Callable[[], bool] = lambda: False
    """True if a step may wait for more messages, as ``linger_s`` asks."""
    emit: Callable[[events.Event], None] = lambda event: None
    runner: Callable[..., Calls] = Runner
    """Makes the calls of a processor, from the arguments of :class:`Runner`."""


@dataclass
class Common:
    """The objects that all steppers of a unit share: the first one, and those beside it (beside.py)."""

    stepper: Any
    """The first stepper, which makes the objects."""
    counters: events.Counters
    state: StateTable
    pause: UnitPause
    imperative: Imperative | None = None
    """None until the first stepper has its queues; so are the others."""
    fence: Fence | None = None
    abroad: Abroad | None = None
    """None also if no queue is in another store."""
    bucket: Bucket | None = None
    """None also without ``rate=``."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Stepper:
    """One processor that this process owns. Used by one thread at a time."""

    takes: ClassVar[type[Taker]] = Taker
    """Makes the object that takes the messages of its steps."""

    def __init__(
        self,
        store: Store,
        node: Node,
        row: ProcessorRow,
        setting: Setting,
        *,
        marks: Mapping[str, LowWater] | None = None,
        lanes: Sequence[Callable[[Any], Lane | None]] = (),
        give_up: bool = False,
        copies: Copies | None = None,
    ) -> None:
        """``marks``: the low-water marks in other stores, by tailer id. ``lanes``: make its lanes (lanes.py), each from
        the stepper; None from one that has nothing to do here. ``give_up``: continue if other stores contradict the
        home store (``--accept-topology``). ``copies``: of a stepper beside that of a unit, which shares the state, the
        counters and the appenders of the unit (beside.py)."""
        if copies is None:
            common = Common(self, events.Counters(), _table(store, node), UnitPause(node))
        else:
            common = copies.unit.common
        self.store = store
        self.node = node
        self.setting = setting
        self.emit = setting.emit
        self.marks = marks or {}
        self._copies: Copies | None = copies
        self.common: Common = common
        self.unit: Stepper = common.stepper
        """The stepper of the unit, which is another one for redriven messages and for timers."""
        self.counters: events.Counters = common.counters
        self.state: StateTable = common.state
        self.pause: UnitPause = common.pause
        # The queues and the row.
        self.ports: Ports = Ports(store, node, setting.queues, common.imperative)
        self.inputs = self.ports.inputs
        self.outputs = self.ports.outputs
        self.errors = self.ports.errors
        self.patience = Patience(node.id, setting.sleep, self.emit)
        own = None if copies is None else names.redriver_key(copies.own)
        self.fence: Fence = Fence(node, row, self.ports, self.pause, own, common.fence)
        if copies is None:
            self._share(give_up)
        self.abroad: Abroad | None = common.abroad
        self.forks: Mapping[bytes, Queue] = {} if self.abroad is None else self.abroad.forks
        """The fork queues, by the id of their other store."""
        # The objects of the protocol, from 4 to 1.
        self.builder = PartBuilder(self.ports, self._hasher(row), self.abroad, copies)
        self.failures = FailureRows(node, self.pause)
        self.committer = Committer(
            self.ports, self.fence, self.builder, self.failures, self.state, self.patience, self.counters, self.marks
        )
        self.meter = self.committer.meter
        self.process = self._argument(row.epoch)
        self.runner: Calls | None = self._calls()
        for input in self.inputs if self.runner is not None and self.runner.rows_max else ():
            input.by_columns = True
        self.bucket: Bucket | None = common.bucket
        """The calls that ``rate=`` allows, also for redriven messages and timers."""
        self.taker = self.takes(node, self.inputs, self.runner, self.bucket, setting.may_linger, self.emit)
        self.recovery = Recovery(self.ports, self.fence, self.state, self.committer.try_log, self.emit, self.abroad)
        # The turn.
        self.gate = Gate(node.id, self.ports.written, store.id.hex(), {node.id, node.key}, self.ports.directories)
        """Makes the processor wait for the readers of its output queues. Other stores know the processor by its key."""
        self.gate.take_over()
        # Steps whose calls are on executors are not traced.
        self.tracer = tracing.tracer() if setting.runner is Runner else None
        self.watch: Callable[[int, int, int], None] | None = None
        """Called before the function of each step with input, index and count, and after it with (0, 0, 0)."""
        self.verdict: Verdict | None = None
        self.paused = False
        """True from the step that notices a pause until the one that notices its end."""
        self._home_inputs = [
            input for input in self.inputs if input.queue.store.core.environment is store.core.environment
        ]
        self._last_look = LastLook(store.core)
        """The last comparison of the fence while there was nothing to do."""
        self._turn = 0
        """The place of the lane whose turn is next. After the last one it is that of the inputs."""
        self._rested = self._probes = False
        """True if the last step found nothing to do: others may have written the rows of this unit since."""
        self._prepared = False
        """True if the target and the function have opened what they need."""
        self.held: Held | None = None
        """The delayed messages of the unit; None without their lane."""
        self._warn_of_pending()
        self.lanes: list[Lane] = [lane for make in lanes if (lane := make(self)) is not None]
        """Its work beside its inputs, in the order of their turns."""
        self._equip()

    def _equip(self) -> None:
        """Make what a stepper of another kind has besides."""

    # --- its objects ---

    def _share(self, give_up: bool) -> None:
        """Make the objects that steppers beside this one will share."""
        common = self.common
        common.imperative, common.fence = self.ports.imperative, self.fence
        common.abroad = self._way_abroad(give_up)
        common.bucket = self._allowed()

    def _way_abroad(self, give_up: bool) -> Abroad | None:
        """Return the way on which messages reach other stores; None if no queue is in one."""
        node, store, away = self.node, self.store, self.ports.away
        if node.pending:
            return PendingMessages(store, node, away, self.fence, self.patience, self.emit, give_up)
        return ForkQueues(store, node, {queue.store.id for queue in away}) if away else None

    def _hasher(self, row: ProcessorRow) -> Hasher:
        return Hasher(self.node.key, row.generation) if self._copies is None else self._copies.hasher(row)

    def _argument(self, epoch: int) -> Process:
        """Return the object ``process`` that the function gets."""
        node, setting, imperative = self.node, self.setting, self.ports.imperative
        # The state of a source is made with its generator.
        state = None if node.kind == "source" else self.state.call
        store_id = self.store.id.hex()
        # A source returns when it is told to stop, which is its end. Only a drain asks for that.
        stopping = setting.stopping if node.kind == "source" else lambda: setting.stopping() or setting.sleep(0)
        process = Process(node, setting.system, self.builder.hasher, epoch, store_id, state, stopping, imperative)
        process.core.inputs = self.unit.inputs
        return process

    def _calls(self) -> Calls | None:
        """Return the calls of the function; None for a source."""
        node, setting, imperative = self.node, self.setting, self.ports.imperative
        if node.kind == "source":
            return None
        targets = {binding: queue.core for binding, queue in self.outputs.items()}
        return setting.runner(
            node, self.process, self.state, setting.sleep, self.emit, self.counters, targets, imperative
        )

    def _allowed(self) -> Bucket | None:
        calls_per_s = self.node.options.calls_per_s
        if calls_per_s is None:
            return None
        return Bucket(calls_per_s, self._units, self.store.queue(self.node.key).core.row().time_ns)

    def _units(self) -> int:
        """Return the number of units of the processor now."""
        queue = self.inputs[0].queue
        return (queue if queue.core.parent is None else queue.core.parent).options.partitions

    def _warn(self, text: str) -> None:
        self.emit(events.Event(self.node.id, text, logging.WARNING))

    def _warn_of_pending(self) -> None:
        """Let each reader tell if it reads messages of a transaction that may never commit."""
        if self.node.options.isolation == "uncommitted":
            for reader in self.ports.readers:
                reader.on_pending = functools.partial(self._tell_of_pending, reader.queue.id)

    def _tell_of_pending(self, queue: str, producer: str) -> None:
        self._warn(pending_read(self.node.id, queue, producer))

    def hold_back(self, held: Held) -> None:
        """Let the steps hold messages until they are due."""
        self.held = self.taker.held = self.committer.held = self.recovery.held = held

    def close(self) -> None:
        """Close the runner's threads and event loop."""
        self.gate.clear()
        for lane in self.lanes:
            lane.close()
        if self.runner is not None:
            self.runner.close()

    # --- the row ---

    def recover(self, tell: bool = True) -> Decision:
        """Decide how a start continues, and move to the positions of the decision. ``tell``: with an event.

        Raises :class:`Diverged`.
        """
        decision = self.recovery.recover()
        self.taker.forget()
        if decision.again is not None:
            self.taker.repeat(decision.again)
        text = f"{decision.what}: {decision.why}"
        if tell:
            self.emit(events.Recovered(self.node.id, text, logging.INFO, decision=decision.what))
        return decision

    def adopt(self, row: ProcessorRow) -> None:
        """Take over the stored row after a seek, which moved the positions under the same owner id.

        Raises :class:`Fenced` (takeover) if another owner has the row now.
        """
        if not self.owns(row):
            raise self.fence.refused(row)
        self.fence.adopt(row)
        self.committer.stop = None
        hasher = self.builder.hasher = Hasher(self.node.key, row.generation)
        self.process.core.renew(hasher, row.epoch)
        for mark in self.marks.values():
            mark.renew(row.epoch)

    def owns(self, row: ProcessorRow) -> bool:
        """Return whether a row belongs to this owner, at any positions."""
        return row.owner == self.fence.row.owner

    def check_fence(self) -> None:
        """Raise :class:`Fenced`, as the next commit does, if a seek or a takeover wrote the row since the last one."""
        with self.store.core.view() as txn:
            self.fence.check(txn)

    # --- after an outage ---

    def probe(self) -> None:
        """Take one message, if calls run at once: while something is away, no other message is tried.

        Each message of a message function has its own hash, so a snapshot of several messages may be divided.
        """
        if self.node.options.concurrency > 1 and not self.node.options.batch and type(self) is Stepper:
            self._probes = True
            self.taker.repeats = None

    # --- after a death ---

    def be_careful(self, careful: Mapping[int, list[tuple[int, int]]], verdict: Verdict | None) -> None:
        """Continue after the process died in steps: take few messages at a time, for each input up to their ends.

        The next deaths then show which message causes it, and the messages before it are committed. ``careful`` is that
        of :class:`Taker`. ``verdict`` names a message that fails without another call. Each message of a message
        function has its own hash, so a snapshot of several messages may be divided; that of a batch function may not.
        """
        self.taker.careful = {chosen: list(died) for chosen, died in careful.items()}
        self.verdict = verdict
        if careful and not self.node.options.batch:
            self.taker.repeats = None

    def watch_with(self, main: Stepper, place: int) -> None:
        """Let the supervisor watch the calls of this stepper, which works for ``main`` in its thread.

        Its inputs are numbered after those of ``main``: from ``place`` times their number. So a message that kills
        its worker here is found, and fails for good, as one of ``main`` does.
        """
        before = place * len(main.inputs)
        told = main.watch
        if told is not None:
            self.watch = lambda chosen, start, count: told(chosen + before if count else 0, start, count)
        careful = main.taker.careful
        mine = {chosen - before: died for chosen, died in careful.items() if 0 <= chosen - before < len(self.inputs)}
        verdict = main.verdict
        if verdict is not None:
            verdict = replace(verdict, chosen=verdict.chosen - before)
        self.be_careful(mine, verdict)

    # --- one turn ---

    def step(self) -> Outcome:
        """Run one step. Raises :class:`Fenced` (nothing was written) and :class:`ProcessorStopped`."""
        stop = self.committer.stop
        if stop is not None:
            raise stopped_at(self.node, stop)
        if not self._prepared and self.pause.row is None:
            prepare(self.node)
            self._prepared = True
        rested, self._rested = self._rested, True
        if rested and not self._last_look.is_current():
            self._look_around()
        others = self.bucket is not None or self.pause.row is not None or self.paused
        for lane in self.lanes:
            others = others or lane.armed
        if others:
            outcome = self._others_first()
            if outcome is not None:
                return outcome
        gate, taker = self.gate, self.taker
        room = gate.room()
        if self._probes and room:
            room = 1
        if not room and taker.waits():
            return self._wait_for_readers()
        taken = taker.take(room) if room else None
        if room and gate.noted and not (taken is None and gate.starving):
            gate.clear()
        if taken is None:
            return self._rest(rested)
        if self.bucket is not None and taken.times is None:
            self.bucket.take(1 if self.node.options.batch else taken.count)
        if self._copies is not None:
            self._copies.took(taken)
        if faults.active:
            faults.point("take.after")
        if self.tracer is None:
            self._make(taken)
        else:
            with self.tracer.step(self.committer, taken.count, taken):
                self._make(taken)
        self._rested = self._probes = False
        return "committed"

    def _others_first(self) -> Outcome | None:
        """Return the outcome of a step that takes no message from the inputs; None: it is their turn."""
        if self._limited():
            self.store.core.check_file()
            self.check_fence()
            return "blocked"
        is_paused = (self.paused or self.pause.row is not None) and self.unit is self
        for place in range(self._turn, len(self.lanes)):
            lane = self.lanes[place]
            if lane.armed and (lane.while_paused or not is_paused) and lane.waits() and lane.step():
                self._turn = place + 1
                return "committed"
        self._turn = 0
        return "paused" if is_paused and self._stays_paused() else None

    def _rest(self, rested: bool) -> Outcome:
        """There is nothing to take. ``rested``: there was nothing at the last step either."""
        if self.meter.messages:
            self.meter.settle()
        starved = self.taker.starved()
        if starved is not None:
            self.gate.starve(starved)
        if self.store.core.is_lost():  # an idle graph has no commit that would notice a removed store
            self.store.core.check_file()
        if not rested:  # nor one that would notice a seek or a takeover
            self._look_around()
        for mark in self.marks.values():
            mark.release()
        return "committed" if any(lane.waits() and lane.step() for lane in self.lanes) else "idle"

    def _look_around(self) -> None:
        """Compare the fence and read ahead in one transaction: a message to an idle unit waits for it."""
        assert self.runner is not None
        inputs = [] if self.paused or self.taker.repeats is not None else self._home_inputs
        with self.store.core.view() as txn:
            self._last_look.note(txn)
            self.fence.check(txn)
            copied = [input.copy(txn, self.runner.pace.count) for input in inputs if self.pause.row is None]
        for input, raws in zip(inputs, copied):
            input.open(raws)

    def _stays_paused(self) -> bool:
        """Notice a pause, or its end. After it, the processor continues as after a start."""
        self.store.core.check_file()
        self.check_fence()
        if self.pause.row is None:
            self.paused = False
            for lane in self.lanes:
                lane.restart()
            self.recover()
            # The function is called again, also if the message killed its worker.
            self.be_careful(self.taker.careful, None)
            self.emit(events.Event(self.node.id, "resumed", logging.INFO))
        elif not self.paused:
            self.paused = True
            self.gate.clear()
            if self.meter.messages:
                self.meter.settle()
            pause = ProcessorPause.unpack(self.pause.key, self.pause.row, self.node.id)
            text = f"is paused {pause.text}. To continue: cues resume"
            self.emit(events.Paused(self.node.id, text, logging.WARNING, pause=pause.facts()))
        return self.paused

    def _make(self, taken: Taken) -> None:
        committer = self.committer
        try:
            if taken.times is not None:  # no call: the messages wait for their time
                self._hold_back(taken)
                return
            # 2. Snapshot.
            if self.node.side_effects or self.node.at_most_once:
                committer.commit_snapshot(taken)
            # 3. Run.
            runner, verdict = self.runner, self.verdict
            assert runner is not None
            if self.failures.limits:
                runner.errors_left = self.failures.errors_left()
            if verdict is not None and self.taker.condemned(taken, verdict):
                results = Results({}, {0: verdict.failure()})
            else:
                results = runner.run(taken, True) if self.watch is None else self._watched(runner, taken)
                if results.failures and halves(self.node, taken.count, results):
                    self._halve(taken, results)
                    return
            if self.bucket is not None and results.closed is not None:  # the rest is not called in this step
                self.bucket.take(results.closed - taken.count)
            # 4. Commit.
            committer.commit_results(taken, results)
        except BaseException:
            committer.drop()
            raise

    def _watched(self, runner: Calls, taken: Taken) -> Results:
        assert self.watch is not None
        self.watch(self.taker.place_of(taken), taken.slices[0].start, taken.count)
        try:
            return runner.run(taken, True)
        finally:
            self.watch(0, 0, 0)

    def _halve(self, taken: Taken, results: Results) -> None:
        """Drop a step that failed: the next steps take its messages in halves (halving.py)."""
        if not taken.halved:
            failure = results.failures[0]
            self._warn(
                f"a batch of {taken.count:,} messages failed ({short(failure.error)}); runs it in halves, to find the"
                " messages that fail alone"
            )
        self.taker.divide(taken)
        self.committer.drop()

    @property
    def divided(self) -> bool:
        """True if parts of a batch that failed wait. They are known in memory only."""
        return self.taker.divided or any(lane.divided for lane in self.lanes)

    def _hold_back(self, taken: Taken) -> None:
        """Commit a step that keeps its messages until they are due. If the processor cannot, the first one fails."""
        held = self.held
        assert held is not None
        refused = held.refused(taken)
        if refused is None:
            held.keep(taken)
        self.committer.commit_results(taken, Results({}, {} if refused is None else {0: Failure(refused, 1)}))

    def _limited(self) -> bool:
        """Return whether ``rate=`` allows no call now. Note whether anything waits for it."""
        if self.bucket is None:
            return False
        if self.bucket.calls():
            self.counters.limited = False
            return False
        self.counters.limited = self.lanes_wait() or self.taker.waits()
        return True

    def _wait_for_readers(self) -> Outcome:
        """Take nothing, because an output has no room."""
        self.store.core.check_file()
        self.check_fence()
        self.note_wait()
        return "blocked"

    def note_wait(self) -> None:
        """Note that it waits for the readers of its outputs: its thread sleeps until there is room."""
        self.counters.waited_s += self.gate.note_wait(self._warn)

    @property
    def lingers_s(self) -> float | None:
        """Seconds until the first wait for more messages ends, a timer or delayed message is due, or a call is allowed.

        None if it waits for none of these."""
        if self.paused:
            return None
        if self.bucket is not None and (wait_s := self.bucket.wait_s()):
            return wait_s
        ends = self.taker.lingers_ns()
        ends += [due - clock.now_ns() for lane in self.lanes if (due := lane.due_ns()) is not None]
        ends = [left for left in ends if left > 0]  # what is over now waits for room, or ready() is true
        return min(ends) / 1e9 if ends else None

    # --- lanes ---

    def lanes_wait(self) -> bool:
        """Return whether a lane has something to do before the inputs. Safe in any thread."""
        return any(lane.armed and lane.waits() for lane in self.lanes)

    def redrive(self) -> bool:
        """Make one step for which a redrive was asked; else return False. Raises the errors of :meth:`step`."""
        self.check_fence()
        return any(lane.asked() and lane.step() for lane in self.lanes)

    @property
    def redrive_waits_s(self) -> float:
        """Seconds until ``rate=`` allows the call of a redriven message; 0 if it does, or none waits."""
        waits = any(lane.asked() for lane in self.lanes)
        return self.bucket.wait_s() if self.bucket is not None and waits else 0.0


def _table(store: Store, node: Node) -> StateTable:
    return StateTable(store, node.key, node.options.ttl_ns)
