"""The delivery protocol of one processor: take, run, commit.

The numbers are those of docs/guarantees.md.

    1. take       choose for each tailer a range of messages on its queue; copy them    this module
    2. snapshot   if the function has side effects, commit the ranges before it runs      commit.py
    3. run        call the function; a message that fails for good becomes a step of its own   runner.py
                  a batch that fails is dropped, and its halves are taken from 1 on            halving.py
    4. commit     one write transaction: the fence, outputs, state, attempt, positions    commit.py, parts.py
    5. ring       wake the readers of the queues that were written                        commit.py

A position moves only inside the commit of 4 (at-most-once: of 2) or by a seek. So after a crash at any moment the
store has the whole step or nothing of it. A start (recovery.py) reads two records to decide which: either the last
snapshot has an attempt with its hash, or it has none.

Not guaranteed: that a function is called once. A step that did not commit runs again, with the same ranges and
hash. Effects of the function outside the store may happen again after a crash; use ``checkpoint=`` or the delivery hash
(``process.delivery.hash``) to ignore repetitions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from cues import faults
from cues.base import clock, events
from cues.errors import Diverged
from cues.graphs.pause import ProcessorPause
from cues.native import mypyc_attr
from cues.overrides import override
from cues.steps import tries
from cues.steps.failure import Failure, Verdict, short, stopped_at
from cues.steps.halving import halves
from cues.steps.invocation import prepare
from cues.steps.lanes import Outcome as Outcome
from cues.steps.recovery import Recovery
from cues.steps.results import Results
from cues.steps.taking import Input, Taken


@mypyc_attr(allow_interpreted_subclasses=True)
class Stepper(Recovery):
    """One processor that this process owns. Used by one thread at a time."""

    @override
    def _made(self) -> None:
        super()._made()
        self.lanes = [lane for make in self._lanes_of if (lane := make(self)) is not None]
        self._rested = False
        """True if the last step found nothing to do: others may have written the rows of this unit since."""
        self._prepared = False
        """Whether the target and the function have opened what they need."""
        self.paused = False
        """True from the step that notices a pause until the one that notices its end."""

    def close(self) -> None:
        """Close the runner's threads and event loop."""
        self.gate.clear()
        for lane in self.lanes:
            lane.close()
        if self.runner is not None:
            self.runner.close()

    def be_careful(self, careful: Mapping[int, int], verdict: Verdict | None) -> None:
        """Continue after the process died in a step: take one message at a time, for each input up to an index.

        The next death then shows which message causes it, and the messages before it are committed. ``verdict``
        names a message that fails without another call. Each message of a message function has its own hash, so a
        snapshot of several messages may be divided; that of a batch function may not.
        """
        self._careful = dict(careful)
        self._verdict = verdict
        if careful and not self.node.options.batch:
            self._pending = None

    def watch_with(self, main: Stepper, place: int) -> None:
        """Let the supervisor watch the calls of this stepper, which works for ``main`` in its thread.

        Its inputs are numbered after those of ``main``: from ``place`` times their number. So a message that kills
        its worker here is found, and fails for good, as one of ``main`` does.
        """
        before = place * len(main.inputs)
        told = main.watch
        if told is not None:
            self.watch = lambda chosen, start, count: told(chosen + before if count else 0, start, count)
        mine = {
            chosen - before: index for chosen, index in main._careful.items() if 0 <= chosen - before < len(self.inputs)
        }
        verdict = main._verdict
        if verdict is not None:
            verdict = replace(verdict, chosen=verdict.chosen - before)
        self.be_careful(mine, verdict)

    # --- one turn ---

    def step(self) -> Outcome:
        """Run one step. Raises :class:`Fenced` (nothing was written) and :class:`ProcessorStopped`."""
        if self._stop is not None:
            raise stopped_at(self.node, self._stop)
        if not self._prepared and self._pause_row is None:
            prepare(self.node)
            self._prepared = True
        rested, self._rested = self._rested, True
        if rested and not self._last_look.is_current():
            self._look_around()
        others = self.bucket is not None or self._pause_row is not None or self.paused
        for lane in self.lanes:
            others = others or lane.armed()
        if others:
            outcome = self._others_first()
            if outcome is not None:
                return outcome
        self._room = self.gate.room()
        if not self._room and self._something_to_take():
            return self._wait_for_readers()
        taken = self._take() if self._room else None
        if self._room and self.gate.noted and not (taken is None and self.gate.starving):
            self.gate.clear()
        if taken is None:
            if self.meter.messages:
                self.meter.settle()
            self._tell_of_starving()
            if self.store.core.is_lost():  # an idle graph has no commit that would notice a removed store
                self.store.core.check_file()
            if not rested:  # nor one that would notice a seek or a takeover
                self._look_around()
            for mark in self.marks.values():
                mark.release()
            return "committed" if any(lane.waits() and lane.step() for lane in self.lanes) else "idle"
        if self.bucket is not None and taken.times is None:
            self.bucket.take(1 if self.node.options.batch else taken.count)
        if faults.active:
            faults.point("take.after")
        if self.tracer is None:
            self._make(taken)
        else:
            with self.tracer.step(self, taken.count, taken):
                self._make(taken)
        self._rested = False
        return "committed"

    def _others_first(self) -> Outcome | None:
        """Return the outcome of a step that takes no message from the inputs; None: it is their turn."""
        if self._limited():
            self.store.core.check_file()
            self.check_fence()
            return "blocked"
        for lane in self.lanes:
            if lane.while_paused and lane.turn():
                return "committed"
        if (self.paused or self._pause_row is not None) and self.whole is self and self._stays_paused():
            return "paused"
        for lane in self.lanes:
            if not lane.while_paused and lane.turn():
                return "committed"
        return None

    def _look_around(self) -> None:
        """Compare the fence and read ahead in one transaction: a message to an idle unit waits for it."""
        assert self.runner is not None
        inputs = [] if self.paused or self._pending is not None else self._home_inputs
        with self.store.core.view() as txn:
            self._last_look.note(txn)
            self._fence(txn)
            copied = [input.copy(txn, self.runner.pace.count) for input in inputs if self._pause_row is None]
        for input, raws in zip(inputs, copied):
            input.open(raws)

    def _stays_paused(self) -> bool:
        """Notice a pause, or its end. After it, the processor continues as after a start."""
        self.store.core.check_file()
        self.check_fence()
        if self._pause_row is None:
            self.paused = False
            for lane in self.lanes:
                lane.restart()
            self.recover()
            self.be_careful(self._careful, None)  # the function is called again, also if the message killed its worker
            self._emit(events.Event(self.node.id, "resumed", logging.INFO))
        elif not self.paused:
            self.paused = True
            self.gate.clear()
            if self.meter.messages:
                self.meter.settle()
            pause = ProcessorPause.unpack(self._pause_row, self.node.id)
            text = f"is paused {pause.text}. To continue: cues resume"
            self._emit(events.Paused(self.node.id, text, logging.WARNING, pause=pause.facts()))
        return self.paused

    def _make(self, taken: Taken) -> None:
        try:
            if taken.times is not None:  # no call: the messages wait for their time
                self._hold_back(taken)
                return
            # 2. Snapshot.
            if self.node.side_effects or self.node.at_most_once:
                self._commit_snapshot(taken)
            # 3. Run.
            results = self._condemned(taken)
            if results is None:
                results = self._run(taken)
                if halves(self.node, taken.count, results):
                    self._halve(taken, results)
                    return
            if self.bucket is not None and results.closed is not None:  # the rest is not called in this step
                self.bucket.take(results.closed - taken.count)
            # 4. Commit.
            self._commit(taken, results)
        except BaseException:
            self._step_dropped()
            raise

    def _halve(self, taken: Taken, results: Results) -> None:
        """Drop a step that failed: the next steps take its messages in parts (halving.py)."""
        if not taken.part:
            failure = results.failures[0]
            text = (
                f"a batch of {taken.count:,} messages failed ({short(failure.error)}); runs it in halves, to find the"
                " messages that fail alone"
            )
            self._emit(events.Event(self.node.id, text, logging.WARNING))
        self._halving[self._input_of(taken)].divide(taken.slices[0].start, taken.slices[0].stop)
        self._step_dropped()

    @property
    def divided(self) -> bool:
        """True if parts of a batch that failed wait. They are known in memory only."""
        here = any(halving.at(input.index) for halving, input in zip(self._halving, self.inputs))
        return here or any(lane.divided for lane in self.lanes)

    def _hold_back(self, taken: Taken) -> None:
        """Commit a step that keeps its messages until they are due. If the processor cannot, the first one fails."""
        held = self.held
        assert held is not None
        refused = held.refused(taken)
        if refused is None:
            held.keep(taken)
        self._commit(taken, Results({}, {} if refused is None else {0: Failure(refused, 1)}))

    def _limited(self) -> bool:
        """Return whether ``rate=`` allows no call now. Note whether anything waits for it."""
        if self.bucket is None:
            return False
        if self.bucket.calls():
            self.counters.limited = False
            return False
        self.counters.limited = self.lanes_wait() or self._something_to_take()
        return True

    def _calls(self, size: int) -> int:
        """Return the number of messages up to ``size`` for which ``rate=`` allows the calls now."""
        return size if self.bucket is None or self.node.options.batch else min(size, self.bucket.calls())

    def _wait_for_readers(self) -> Outcome:
        """Take nothing, because an output has no room."""
        self.store.core.check_file()
        self.check_fence()
        self._hold()
        return "blocked"

    def _hold(self) -> None:
        warn = lambda text: self._emit(events.Event(self.node.id, text, logging.WARNING))  # noqa: E731
        self.counters.waited_s += self.gate.hold(warn)

    def _something_to_take(self) -> bool:
        if self._pending is not None:
            return True
        return any(all(input.fill(1) for input in inputs) for _, inputs in self._choices())

    def _tell_of_starving(self) -> None:
        """Tell the writers of a join's inputs that it waits for messages on one, and not they for it."""
        if self._together is None or len(self.inputs) < 2 or not any(input.queue.core.bounded for input in self.inputs):
            return
        empty = [input.queue.id for input in self.inputs if not input.fill(1)]
        if empty and len(empty) < len(self.inputs):
            self.gate.starve(empty[0])

    @override
    def _step_dropped(self) -> None:
        """Return to the positions of the last commit."""
        self._beside = {}
        self.state.forget()
        if self.held is not None:
            self.held.forget()
        self.imperative.forget()
        for reader in self._readers:
            reader.stand(self.position_in(self._row, reader.tailer))

    # --- lanes ---

    def lanes_wait(self) -> bool:
        """Return whether a lane has something to do before the inputs. Safe in any thread."""
        return any(lane.armed() and lane.waits() for lane in self.lanes)

    def redrive(self) -> bool:
        """Make one step for which a redrive was asked; else return False. Raises the errors of :meth:`step`."""
        self.check_fence()
        return any(lane.asked() and lane.step() for lane in self.lanes)

    @property
    def redrive_waits_s(self) -> float:
        """Seconds until ``rate=`` allows the call of a redriven message; 0 if it does, or none waits."""
        waits = any(lane.asked() for lane in self.lanes)
        return self.bucket.wait_s() if self.bucket is not None and waits else 0.0

    # 1. Take.

    def _take(self) -> Taken | None:
        if self._pending is not None:
            return self._take_again(*self._pending)
        assert self.runner is not None
        size = min(self._calls(self.runner.pace.count), self._room)
        for place, inputs in self._together or self._choices():
            halving = self._halving[place]
            most = self._bounded(place, size) if halving.ends or self._careful else size
            count = self._count(inputs, most)
            if count:
                self._served = place + 1
                if self._lingering:
                    self._lingering.pop(inputs[0].tailer, None)
                times = None
                if self.held is not None:
                    for input in inputs:
                        if input.delays:
                            count, times = self.held.cut(inputs, count)
                            break
                part = bool(halving.ends) and halving.at(inputs[0].index)
                return Taken([input.take(count) for input in inputs], count, times=times, part=part)
        return None

    def _choices(self) -> list[tuple[int, list[Input]]]:
        """Return the inputs that a step may take from: all together; for AnyOf any single one, in turn."""
        if self._together is not None:
            return self._together
        places = [(self._served + turn) % len(self.inputs) for turn in range(len(self.inputs))]
        return [(place, [self.inputs[place]]) for place in places]

    def _count(self, inputs: list[Input], size: int) -> int:
        """Return the number of messages that a step takes now from each of these inputs, at most ``size``."""
        count = size
        for input in inputs:
            count = min(count, input.fill(size))
            if not count:
                return 0
        if self._linger_ns and count < size and self._may_linger():
            now = clock.monotonic_ns()
            ends = self._lingering.setdefault(inputs[0].tailer, now + self._linger_ns)
            return 0 if now < ends else count
        return count

    def _bounded(self, place: int, size: int) -> int:
        """Return the largest number of messages that a step may take from this choice of inputs."""
        index = self.inputs[place].index
        if index < self._careful.get(place, 0):
            return 1
        halving = self._halving[place]
        return halving.bound(index, size) if halving.ends else size

    @property
    def lingers_s(self) -> float | None:
        """Seconds until the first wait for more messages ends, a timer or delayed message is due, or a call is allowed.

        None if it waits for none of these."""
        if self.paused:
            return None
        if self.bucket is not None and (wait_s := self.bucket.wait_s()):
            return wait_s
        ends = [end - clock.monotonic_ns() for end in self._lingering.values()]
        ends += [due - clock.now_ns() for lane in self.lanes if (due := lane.due_ns()) is not None]
        ends = [left for left in ends if left > 0]  # what is over now waits for room, or ready() is true
        return min(ends) / 1e9 if ends else None

    def _take_again(self, snapshot: tries.Snapshot, ends: dict[str, int]) -> Taken | None:
        """Take exactly the ranges of a snapshot, from the same tailers, under its hash."""
        again = [input for input in self.inputs if input.tailer in ends]
        for input in again:
            count = ends[input.tailer] - input.index
            while input.ahead < count:
                before = input.ahead
                input.fill(count)
                if input.index != snapshot.start[input.tailer]:  # purged since the start: another set of messages
                    self._rewind(snapshot)
                    return self._take()
                if input.ahead == before:
                    raise Diverged(
                        f"{self.node.id} must take {input.tailer} up to {ends[input.tailer]} again, but the"
                        f" queue ends before {input.index + input.ahead}.",
                        "run cues check; or --fresh to start again.",
                        processor=self.node.id,
                    )
        slices = [input.take(ends[input.tailer] - input.index) for input in again]
        self._pending = None
        return Taken(slices, len(slices[0].messages), snapshot.hash)

    # 3. Run.

    def _run(self, taken: Taken) -> Results:
        assert self.runner is not None
        window = self.whole._window
        self.runner.errors_left = window.at(clock.now_ns()).left if window and self._error_rate else None
        if self.watch is None:
            return self.runner.run(taken, bounded=True)
        self.watch(self._input_of(taken), taken.slices[0].start, taken.count)
        try:
            return self.runner.run(taken, bounded=True)
        finally:
            self.watch(0, 0, 0)

    def _condemned(self, taken: Taken) -> Results | None:
        """Return a failure, if the function must not be called for this step again."""
        verdict = self._verdict
        if verdict is None or (verdict.chosen, verdict.start, verdict.count) != (
            self._input_of(taken),
            taken.slices[0].start,
            taken.count,
        ):
            return None
        return Results({}, {0: verdict.failure()})

    def _input_of(self, taken: Taken) -> int:
        return self.inputs.index(taken.slices[0].input)
