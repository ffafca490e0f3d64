"""Values of the state that expired (``ttl=``): they are deleted when a unit has nothing else to do.

Each commit of a step deletes some too (commit.py), so the state stays small also of a unit that is always busy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cues import faults
from cues.overrides import override
from cues.steps.lanes import Lane

if TYPE_CHECKING:
    from cues.steps.stepper import Stepper
    from cues.storage.transaction import StoreTransaction

EXPIRED_WHEN_IDLE: Final = 1000
"""Expired values that one commit deletes."""


class ExpiryLane(Lane):
    """The expired values of a unit that has ``ttl=``."""

    @staticmethod
    def of(unit: Stepper) -> ExpiryLane | None:
        return None if unit.state.ttl_ns is None else ExpiryLane(unit)

    @override
    def waits(self) -> bool:
        return True  # whether values have expired is known after a look

    @override
    def step(self) -> bool:
        """Delete some in a commit of their own; return False if there were none."""
        unit: Stepper = self.unit
        state = unit.state
        count = state.expire(EXPIRED_WHEN_IDLE)
        if not count:
            state.committed()
            return False

        def write(txn: StoreTransaction) -> None:
            unit.fence.check(txn)
            state.write(txn)
            faults.point("state.expiring")

        try:
            unit.patience.call(unit.store.core.commit, write, pages=3 * count)
        except BaseException:
            state.forget()
            raise
        state.committed()
        faults.point("state.expired")
        return True
