"""Step 1 of the protocol: choose for each tailer a range of messages that are there, and copy them.

A step takes the same number of messages from all inputs; with AnyOf it takes from one of them, in turn. If a start
found a snapshot that did not commit, the next step takes exactly the ranges of that snapshot (recovery.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from cues.base import clock, events
from cues.errors import Diverged
from cues.native import mypyc_attr
from cues.steps.halving import Halving
from cues.steps.taking import Taken

if TYPE_CHECKING:
    from cues.graphs.processor import Node
    from cues.steps import tries
    from cues.steps.bucket import Bucket
    from cues.steps.calls import Calls
    from cues.steps.delays import Held
    from cues.steps.failure import Verdict
    from cues.steps.taking import Input


@mypyc_attr(allow_interpreted_subclasses=True)
class Taker:
    """Takes the messages of the steps of one processor."""

    def __init__(
        self,
        node: Node,
        inputs: list[Input],
        calls: Calls | None,
        bucket: Bucket | None,
        may_linger: Callable[[], bool],
        emit: Callable[[events.Event], None],
    ) -> None:
        """``calls``: say how many messages a step has; None for a source. ``may_linger``: whether a step may wait for
        more messages, as ``linger_s`` asks."""
        self._node = node
        self.inputs = inputs
        self._calls: Calls | None = calls
        self._bucket: Bucket | None = bucket
        self.may_linger = may_linger
        self._emit = emit
        self.held: Held | None = None
        """The delayed messages of the unit; None without their lane: then they are taken as all others."""
        self.served = 0
        """The place after the input that the last step took from."""
        self._together = [(0, inputs)] if node.mode != "alts" else None
        self._singly = self._together is None or len(inputs) == 1
        """True if a step takes from one input."""
        self._linger_ns = round(node.options.linger_s * 1e9)
        self._lingering: dict[str, int] = {}
        """The ends of the waits for more messages (``linger_s``), by the first tailer of the choice."""
        self.halving = [Halving() for _ in inputs]
        """For each input: the parts of a batch that failed."""
        self.careful: dict[int, list[tuple[int, int]]] = {}
        """For each input: steps in which the process died, the innermost last: their end, and the most to take."""
        self.repeats: tuple[tries.Snapshot, dict[str, int]] | None = None
        """The snapshot whose ranges the next step takes again, with their ends."""

    def forget(self) -> None:
        """Forget what belongs to the positions before a recovery."""
        self._lingering.clear()
        for halving in self.halving:
            halving.clear()
        self.repeats = None

    # --- what there is to take ---

    def waits(self) -> bool:
        """Return whether there is something to take. It reads ahead."""
        if self.repeats is not None:
            return True
        return any(all(input.fill(1) for input in inputs) for _, inputs in self._choices())

    def starved(self) -> str | None:
        """Return the queue on which a join waits for messages, while others of its inputs have some."""
        if self._together is None or len(self.inputs) < 2 or not any(input.queue.core.bounded for input in self.inputs):
            return None
        empty = [input.queue.id for input in self.inputs if not input.fill(1)]
        return empty[0] if empty and len(empty) < len(self.inputs) else None

    @property
    def divided(self) -> bool:
        """True if parts of a batch that failed wait. They are known in memory only."""
        return any(halving.at(input.index) for halving, input in zip(self.halving, self.inputs))

    def lingers_ns(self) -> list[int]:
        """Return the nanoseconds until each wait for more messages ends."""
        return [end - clock.monotonic_ns() for end in self._lingering.values()]

    # --- taking ---

    def take(self, room: int) -> Taken | None:
        """Take the messages of a step, at most ``room`` from each input; None if there are none."""
        if self.repeats is not None:
            return self._take_again(room, *self.repeats)
        calls, bucket = self._calls, self._bucket
        assert calls is not None
        size = calls.pace.count
        if bucket is not None and not self._node.options.batch:
            size = min(size, bucket.calls())
        if room < size:
            size = room
        for place, inputs in self._together or self._choices():
            halving = self.halving[place]
            bound = self._bound(place, room) if halving.ends or self.careful else room
            most = size if size < bound else bound
            if calls.rows_max:
                most = self._of_one_form(inputs[0], most, bound if bucket is None else most)
            count = most
            for input in inputs:
                ready = input.fill(most)
                if ready < count:
                    count = ready
                    if not ready:
                        break
            if self._linger_ns and 0 < count < most:
                count = self._lingered(inputs[0], count)
            if count:
                self.served = place + 1
                if self._lingering:
                    self._lingering.pop(inputs[0].tailer, None)
                times = None
                if self.held is not None:
                    for input in inputs:
                        if input.delays:
                            count, times = self.held.cut(inputs, count)
                            break
                halved = bool(halving.ends) and halving.at(inputs[0].index)
                slices = [inputs[0].take(count)] if self._singly else [input.take(count) for input in inputs]
                return Taken(slices, count, times=times, halved=halved)
        return None

    def _choices(self) -> list[tuple[int, list[Input]]]:
        """Return the inputs that a step may take from: all together; for AnyOf any single one, in turn."""
        if self._together is not None:
            return self._together
        places = [(self.served + turn) % len(self.inputs) for turn in range(len(self.inputs))]
        return [(place, [self.inputs[place]]) for place in places]

    def _lingered(self, input: Input, count: int) -> int:
        """Return how many of the ``count`` messages that are there a step takes: none while it waits for more."""
        if not self.may_linger():
            return count
        now = clock.monotonic_ns()
        ends = self._lingering.setdefault(input.tailer, now + self._linger_ns)
        return 0 if now < ends else count

    def _of_one_form(self, input: Input, size: int, room: int) -> int:
        """Return how many messages a step takes that has dicts or columns, and not both; more of columns."""
        input.fill(size)
        if input.in_columns and room > size:
            assert self._calls is not None
            size = min(self._calls.rows_max, room)
            input.fill(size)
        return input.alike(size)

    def _bound(self, place: int, room: int) -> int:
        """Return the largest number of messages that a step may take from this choice of inputs, of columns too."""
        index = self.inputs[place].index
        died = self.careful.get(place, [])
        while died and died[-1][0] <= index:
            died.pop()
        if died:
            end, most = died[-1]
            room = min(room, most, end - index)
        return self.halving[place].bound(index, room)

    # --- taking again ---

    def repeat(self, snapshot: tries.Snapshot) -> None:
        """Let the next step take exactly the ranges of a snapshot, under its hash."""
        ends = dict(snapshot.end)
        whole = True
        for input in self.inputs:
            if input.tailer not in ends:
                continue
            row = input.queue.core.row()
            lost = min(row.first, ends[input.tailer]) - snapshot.start[input.tailer]
            if lost > 0:
                whole = False
                text = f"{lost} messages of {input.queue.id} that a step had taken were purged before it committed"
                text += "; they are lost, the rest is a new step"
                self._emit(events.Event(self._node.id, text, logging.WARNING))
                input.go(min(row.first, ends[input.tailer]))
        # The rest of a purged range is another set of messages and gets another hash, like any new step.
        # An unpurged range is taken exactly as in the snapshot, under its hash.
        self.repeats = (snapshot, ends) if whole else None

    def _take_again(self, room: int, snapshot: tries.Snapshot, ends: dict[str, int]) -> Taken | None:
        """Take exactly the ranges of a snapshot, from the same tailers, under its hash."""
        again = [input for input in self.inputs if input.tailer in ends]
        for input in again:
            count = ends[input.tailer] - input.index
            while input.ahead < count:
                before = input.ahead
                input.fill(count)
                if input.index != snapshot.start[input.tailer]:  # purged since the start: another set of messages
                    self.repeat(snapshot)
                    return self.take(room)
                if input.ahead == before:
                    raise Diverged(
                        f"{self._node.id} must take {input.tailer} up to {ends[input.tailer]} again, but the"
                        f" queue ends before {input.index + input.ahead}.",
                        "run cues check; or --fresh to start again.",
                        processor=self._node.id,
                    )
        slices = [input.take(ends[input.tailer] - input.index) for input in again]
        self.repeats = None
        return Taken(slices, len(slices[0].messages), snapshot.hash)

    # --- steps that died or failed ---

    def place_of(self, taken: Taken) -> int:
        """Return the place of the input that a step took from; 0 if it took from all."""
        return self.inputs.index(taken.slices[0].input)

    def condemned(self, taken: Taken, verdict: Verdict) -> bool:
        """Return whether a step is the one in which the worker died at each attempt."""
        piece = taken.slices[0]
        return (verdict.chosen, verdict.start, verdict.count) == (self.place_of(taken), piece.start, taken.count)

    def divide(self, taken: Taken) -> None:
        """Let the next steps take the messages of a batch that failed in parts (halving.py)."""
        self.halving[self.place_of(taken)].divide(taken.slices[0].start, taken.slices[0].stop)
