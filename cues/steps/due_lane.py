"""The lane of what is due: it moves timers or delayed messages when their time has come, and takes them (due.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cues import faults
from cues.base import clock
from cues.graphs.processor import RedriveNode
from cues.overrides import override
from cues.steps.beside import claim_beside
from cues.steps.copies import Copies
from cues.steps.delays import Held
from cues.steps.due import Due
from cues.steps.lanes import Outcome, SideLane
from cues.steps.timers import Timers

if TYPE_CHECKING:
    from collections.abc import Callable

    from cues.records.batch import Page
    from cues.steps.stepper import Stepper
    from cues.storage.transaction import StoreTransaction

MOVED_AT_ONCE: Final = 1000
"""Entries that one commit moves to the queues of the unit."""


class DueLane(SideLane):
    """The timers or the delayed messages of a unit."""

    due: Due
    copies: Callable[[], Copies]
    """Describes the stepper that takes what was moved."""

    @staticmethod
    def of_timers(unit: Stepper) -> DueLane | None:
        if unit.node.options.timer is None:
            return None
        lane = DueLane(unit)
        lane.due = timers = Timers(unit, lane)
        lane.copies = timers.copies
        return lane

    @staticmethod
    def of_messages(unit: Stepper) -> DueLane:
        lane = DueLane(unit)
        lane.due = held = Held(unit, lane)
        lane.copies = lambda: Copies(held.kind, unit, RedriveNode.of(unit.node, held.own), held.own)
        return lane

    @override
    def waits(self) -> bool:
        due = self.due
        if due.looks or due.asked():
            return True
        first_ns = due.first_ns()
        return first_ns is not None and first_ns <= clock.now_ns()

    @override
    def due_ns(self) -> int | None:
        return self.due.first_ns()

    @override
    def asked(self) -> bool:
        return self.due.asked()

    @override
    def once(self, stepper: Any) -> Outcome:
        due = self.due
        due.looks = True
        outcome = super().once(stepper)
        if outcome == "idle":
            if self.move(stepper):
                outcome = super().once(stepper)
            else:
                due.looks = False
                due.rest(stepper)
        if outcome == "blocked":
            self.unit.note_wait()  # so that the thread sleeps until there is room
        return outcome

    def move(self, stepper: Stepper) -> int:
        """Move what is due to the queues of its stepper, in one commit; return the number of entries."""
        due = self.due
        try:
            count, pages = due.take(MOVED_AT_ONCE)
            if not count:
                return 0
            room = sum(1 + len(page.pieces) for some in pages.values() for page in some) + 2 * count
            stepper.patience.call(stepper.store.core.commit, self._write, stepper, pages, pages=room)
        except BaseException:
            due.forget()
            raise
        due.committed()
        faults.point(f"{due.kind}.moved")
        return count

    def _write(self, txn: StoreTransaction, stepper: Stepper, pages: dict[str, list[Page]]) -> None:
        stepper.fence.check(txn)
        for input in stepper.inputs:
            if input.log.id in pages:
                input.log.append(txn, pages[input.log.id])
        self.due.table.write(txn)
        faults.point(f"{self.due.kind}.moving")

    @override
    def claim(self) -> Stepper:
        stepper = claim_beside(self.copies())
        if self.due.place:
            stepper.watch_with(self.unit, self.due.place)
        return stepper

    @override
    def restart(self) -> None:
        self.due.looks = self.due.looks or self.stepper is not None
        super().restart()
