"""Timers: a processor's function is called at a time that it chose, without a new message.

    1. set      ``process.timer(key, at)`` changes the state: the row of the timer, and its row in the order of time.
                So it is committed with its step, dropped with a failed call, and reset with the state
    2. move     when a timer is due, one commit deletes its row in the order of time and appends a message
                ``{"key", "name", "at"}`` to the queue of the unit's due timers
    3. fire     a stepper beside that of the unit takes these messages, by the protocol of every step (beside.py). A
                call deletes the row of its timer; a timer that was cancelled or replaced after 2 has another row, and
                is skipped

The row that 3 deletes is committed with the outputs, so a timer fires once, and a crash between any two commits
leaves a timer that is due, or a message that is taken. The stepper of 3 has the id ``graph.processor.timer``, and calls
another function than the unit.

Not guaranteed: that a timer fires at its time. It fires after it, when its processor runs.

A timer that fails for good is an error message. Its own row stays, and its row in the order of time is gone, so it does
not fire. A redrive (redrive.py) appends its message to the queue of due timers once more. If it was cancelled or
replaced since, it is skipped as in 3, and the redrive is resolved without a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from cues.base import clock, names
from cues.graphs.processor import Node, TimerNode
from cues.overrides import override
from cues.records import batch as batches
from cues.steps.copies import TRY_LOG, RedrivenCopies, Requests
from cues.steps.due import Due, Moved
from cues.steps.error_records import ErrorRows
from cues.steps.hashes import Hasher, Range

if TYPE_CHECKING:
    from cues.graphs.processor_rows import ProcessorRow
    from cues.steps.taking import Taken


class TimerHasher(Hasher):
    """Delivery hashes of the steps of due timers: over their messages, and ``["timer", time, …]`` in nanoseconds."""

    times: dict[int, int]
    """The time of each taken message, by its index."""

    @override
    def digest(self, ranges: Sequence[Range], extra: Sequence[Any] | None = None) -> bytes:
        _, _, start, stop = ranges[0]
        return super().digest(ranges, ["timer", *[self.times[index] for index in range(start, stop)]])


class TimerCopies(RedrivenCopies):
    """The messages of due timers, some of them redriven."""

    options = TRY_LOG
    own_calls = True

    @override
    def hasher(self, row: ProcessorRow) -> Hasher:
        self._hasher = TimerHasher(self.node.key, row.generation)
        return self._hasher

    @override
    def took(self, taken: Taken) -> None:
        piece = taken.slices[0]
        at = (clock.to_ns(piece.pristine(offset)["at"]) for offset in range(taken.count))
        self._hasher.times = dict(enumerate(at, piece.start))


class Timers(Due):
    """The timers of one unit that has ``timer=``."""

    place: ClassVar[int] = 2

    def __init__(self, unit: Any, lane: Any) -> None:
        super().__init__("timer", lane, unit.state)
        node: Node = unit.node
        self._unit = unit
        self._own = names.timer_id(node.key)
        self._queue = names.timer_queue(node.key)
        self._requests = Requests(unit, lane, self._own, self._queue + "\0")
        self.looks = lane.armed = True

    def copies(self) -> TimerCopies:
        """Describe the stepper that takes what was moved."""
        rows = ErrorRows(self._unit.store)
        rows.ensure()  # a redrive may be asked for at any time, and a commit cannot open it
        node = TimerNode.of(self._unit.node)
        return TimerCopies(self.kind, self._unit, node, self._own, rows, self._requests)

    @override
    def first_ns(self) -> int | None:
        return self.table.first_due()

    @override
    def take(self, count: int) -> Moved:
        timers = self.table.due(clock.now_ns(), count)
        if not timers:
            return Moved(0, {})
        messages = [{"key": key, "name": name, "at": clock.to_datetime(at)} for _, key, name, at in timers]
        pages = batches.build(messages, batches.OWN_BYTES_MAX, None, reserved=True)
        self.table.settle({row: None for row, *_ in timers})
        return Moved(len(timers), {self._queue: pages})

    @override
    def asked(self) -> bool:
        return self._requests.waits()

    @override
    def rest(self, stepper: Any) -> None:
        if self.asked():  # an older version has taken their messages
            why = "the timers are not on the queue of due timers"
            (input,) = stepper.inputs
            self._requests.refuse(ErrorRows(self._unit.store), why, lambda txn: input.log.row(txn).next > input.index)
