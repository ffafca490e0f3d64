"""Timers: a processor's function is called at a time that it chose, without a new message.

    1. set      ``process.timer(key, at)`` changes the state: the row of the timer, and its row in the order of time.
                So it is committed with its step, dropped with a failed call, and reset with the state
    2. move     when a timer is due, one commit deletes its row in the order of time and appends a message
                ``{"key", "name", "at"}`` to the queue of the unit's due timers
    3. fire     the firer of the unit takes these messages, by the protocol of every step (stepper.py). A call deletes
                the row of its timer; a timer that was cancelled or replaced after 2 has another row, and is skipped

The row that 3 deletes is committed with the outputs, so a timer fires once, and a crash between any two commits
leaves a timer that is due, or a message that is taken. A :class:`Firer` is a stepper beside that of the unit
(beside.py), under the id ``graph.processor.timer``; it calls another function.

Not guaranteed: that a timer fires at its time. It fires after it, when its processor runs.

A timer that fails for good is an error message. Its own row stays, and its row in the order of time is gone, so it does
not fire. A redrive (redrive.py) appends its message to the queue of due timers once more. If it was cancelled or
replaced since, it is skipped as in 3, and the redrive is resolved without a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from cues import faults
from cues.base import clock, names
from cues.graphs.processor import TimerNode
from cues.overrides import override
from cues.queues.log import Log
from cues.records import batch as batches
from cues.steps.beside import claim_beside, make_queues
from cues.steps.error_records import ErrorRows
from cues.steps.hashes import Hasher, Range
from cues.steps.redrive import TRY_LOG, CountedLane, Settling
from cues.steps.stepper import Outcome, Stepper

if TYPE_CHECKING:
    from cues.queues.processor_rows import ProcessorRow
    from cues.records.batch import Page
    from cues.steps.parts import Part
    from cues.steps.taking import Taken
    from cues.storage.transaction import StoreTransaction

MOVED_AT_ONCE: Final = 1000
"""Timers that one commit moves to the queue of due timers."""


class TimerHasher(Hasher):
    """Delivery hashes of the steps of due timers: over their messages, and ``["timer", time, …]`` in nanoseconds."""

    times: dict[int, int]
    """The time of each taken message, by its index."""

    @override
    def digest(self, ranges: Sequence[Range], extra: Sequence[Any] | None = None) -> bytes:
        _, _, start, stop = ranges[0]
        return super().digest(ranges, ["timer", *[self.times[index] for index in range(start, stop)]])


class Firer(Settling):
    """Moves the due timers of one unit, and takes them."""

    def __init__(self, lane: TimerLane, node: TimerNode, row: ProcessorRow) -> None:
        super().__init__(lane, node, row, own_calls=True)
        self.hasher = TimerHasher(node.key, row.generation)
        self.process._renew(self.hasher, row.epoch)

    @override
    def _key_of_row(self) -> bytes:
        return names.redriver_key(names.timer_id(self.main.node.key))

    @override
    def step(self) -> Outcome:
        lane = cast("TimerLane", self.lane)
        lane.looks = True
        outcome = super().step()
        if outcome == "idle":
            if self._move():
                return super().step()
            lane.looks = False
            if lane.asked():  # an older version has taken their messages
                why = "the timers are not on the queue of due timers"
                (input,) = self.inputs
                lane.refuse(self.rows, why, unless=lambda txn: input.log.row(txn).next > input.index)
        return outcome

    def _move(self) -> int:
        """Move timers that are due to the queue, in one commit; return their number."""
        timers = self.state.due(clock.now_ns(), MOVED_AT_ONCE)
        if not timers:
            return 0
        messages = [{"key": key, "name": name, "at": clock.to_datetime(at)} for _, key, name, at in timers]
        pages = batches.build(messages, batches.OWN_BYTES_MAX, None, reserved=True)
        self.state.settle({row: None for row, *_ in timers})
        try:
            room = sum(1 + len(page.pieces) for page in pages) + len(timers)
            self._patiently(self.store.core.commit, self._write_moved, pages, pages=room)
        except BaseException:
            self.state.forget()
            raise
        self.state.committed()
        faults.point("timer.moved")
        return len(timers)

    def _write_moved(self, txn: StoreTransaction, pages: list[Page]) -> None:
        self._fence(txn)
        self.inputs[0].log.append(txn, pages)
        self.state.write(txn)
        faults.point("timer.moving")

    @override
    def _take(self) -> Taken | None:
        taken = super()._take()
        if taken is not None:
            piece = taken.slices[0]
            at = (clock.to_ns(piece.pristine(offset)["at"]) for offset in range(taken.count))
            self.hasher.times = dict(enumerate(at, piece.start))  # type: ignore[attr-defined]
        return taken

    @override
    def _write_step(self, txn: StoreTransaction, parts: list[Part], row: bytes) -> None:
        super()._write_step(txn, parts, row)
        faults.point("timer.inside")


class TimerLane(CountedLane):
    """The timers of a unit that has ``timer=``."""

    def __init__(self, unit: Stepper) -> None:
        super().__init__(unit, names.timer_id(unit.node.key), names.timer_queue(unit.node.key) + "\0")
        self.looks = True
        """False after a look that found no message of a due timer."""

    @staticmethod
    def of(unit: Stepper) -> TimerLane | None:
        return None if unit.node.options.timer is None else TimerLane(unit)

    @override
    def armed(self) -> bool:
        return True

    @override
    def waits(self) -> bool:
        if self.stepper is None or self.looks or self.asked():
            return True
        first = self.due_ns()
        return first is not None and first <= clock.now_ns()

    @override
    def due_ns(self) -> int | None:
        unit: Stepper = self.unit
        return unit.state.first_due()

    @override
    def claim(self) -> Firer:
        main: Stepper = self.unit
        store = main.store
        node = TimerNode.of(main.node)
        (port,) = node.inputs
        make_queues(store, dict.fromkeys((port.queue, node.id), TRY_LOG))
        ErrorRows(store).ensure()  # a redrive may be asked for at any time, and a commit cannot open it
        own = names.timer_id(main.node.key)
        firer = Firer(self, node, claim_beside(main, node, own, {port.queue: Log(store, port.queue)}))
        faults.point("timer.claimed")
        firer.recover()
        firer.watch_with(main, 2)
        return firer
