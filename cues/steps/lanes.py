"""Lanes: the work of a unit beside its inputs, in steps of its own.

    redriven messages       redrive.py      asked for from outside
    what is to be closed    closing.py      asked for at the end of a run
    due timers              due_lane.py     a table by time, of the state (timers.py)
    delayed messages        due_lane.py     a table by time, of their own (delays.py)
    values that expire      expiry.py       only when there is nothing else to do

The unit owns the turn (stepper.py). ``rate=`` may forbid a step, and during a pause only lanes with ``while_paused``
work. Else its lanes that have something to do make one step each, in this order, then the inputs. A lane says whether
it has something to do and when the next thing is due, makes one step, and is closed. A new one is a file here and an
entry in the list of engine/assembly.py.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from cues.native import mypyc_attr
from cues.overrides import override

Outcome = Literal["idle", "blocked", "paused", "committed"]
"""Nothing to take; something to take, but an output waits for its readers (backpressure.py); paused until somebody
resumes it (pauses.py); a step was made."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Lane:
    """One kind of work of one unit. Used by the thread of the unit, but for :meth:`waits` and :meth:`due_ns`."""

    while_paused: ClassVar[bool] = False
    """True: it works also while the unit is paused."""

    def __init__(self, unit: Any) -> None:
        self.unit: Any = unit
        """The stepper of the unit (stepper.py), which knows its lanes by this class alone."""
        self.armed = False
        """True if it may have something to do before the inputs. Each step looks, so it is a plain attribute."""

    def waits(self) -> bool:
        """Return whether it has something to do now. Safe in any thread."""
        raise NotImplementedError

    def due_ns(self) -> int | None:
        """Return the time at which the next thing is due; None without one. Safe in any thread."""
        return None

    def asked(self) -> bool:
        """Return whether somebody asked for work of it, and waits for the result."""
        return False

    def step(self) -> bool:
        """Make one step; return False if nothing was done. Raises the errors of :meth:`Stepper.step`."""
        raise NotImplementedError

    @property
    def divided(self) -> bool:
        """True if parts of a batch that failed wait. They are known in memory only."""
        return False

    def restart(self) -> None:
        """Continue as after a start: the unit was paused."""

    def close(self) -> None:
        """Give back what it holds."""


class SideLane(Lane):
    """A lane whose steps are those of a stepper of its own, with its own row, positions and try log (beside.py).

    The stepper is made by the first step. After an error it is made anew and recovered, as after a start.
    """

    def __init__(self, unit: Any) -> None:
        super().__init__(unit)
        self.stepper: Any = None

    def claim(self) -> Any:
        """Own and recover the stepper; None if the unit has none. Raises :class:`Fenced` if this process lost it."""
        raise NotImplementedError

    def once(self, stepper: Any) -> Outcome:
        """Make one step of the stepper."""
        outcome: Outcome = stepper.step()
        return outcome

    @override
    def step(self) -> bool:
        self.unit.check_fence()
        stepper, self.stepper = self.stepper, None
        try:
            if stepper is None:
                stepper = self.claim()
            outcome = self.once(stepper)
        except BaseException:
            self._close(stepper)
            raise
        self.stepper = stepper
        return outcome == "committed"

    @override
    @property
    def divided(self) -> bool:
        return self.stepper is not None and bool(self.stepper.divided)

    @override
    def restart(self) -> None:
        self.close()

    @override
    def close(self) -> None:
        stepper, self.stepper = self.stepper, None
        self._close(stepper)

    def _close(self, stepper: Any) -> None:
        if stepper is not None:
            stepper.close()


class RequestLane(SideLane):
    """A side lane that works on request (copies.py)."""

    requests: Any

    @override
    def waits(self) -> bool:
        return bool(self.requests.waits())

    @override
    def asked(self) -> bool:
        return self.waits()
