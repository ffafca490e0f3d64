"""The pace of a processor: how many messages a step takes, so that its calls stay within a bound in time.

    Pace      from step to step: as many messages as fit the bound, by what calls have cost
    Stride    within a step of a message function: how many calls until the next look at the clock

The size of a step grows to twice its last at most, so a step is wrong by at most that when calls get dearer; it
shrinks at once. The hash of a message, and the ranges of a snapshot that is repeated, do not depend on any of it.
"""

from __future__ import annotations

from typing import Final

from cues.base import clock

STRIDE_MAX: Final = 128
"""Calls between two looks at the clock, at most: as many cheap ones cost less than a look is worth."""
FEW: Final = 8
"""A ``batch_size`` that is small enough to begin with: who writes it has said how much may be repeated, or lost."""
_USUAL_NS: Final = 250_000_000
_LOOKS: Final = 16
"""Looks at the clock in the time of one step, about, where calls cost little."""


class Pace:
    """How many messages the next step takes at most.

    A step that cannot be closed between two messages (a batch function, at-most-once), or of which a snapshot is
    written before the function runs, begins with ``least`` messages, or with ``most`` where that is :data:`FEW`;
    others begin with ``most`` and are closed.
    """

    def __init__(self, most: int, bound_s: float | None, *, small: bool, least: int = 1, fixed: bool = False) -> None:
        """``bound_s`` None: every step takes ``most``. ``least``: calls that run at once. ``fixed``: one call
        takes the whole step, and part of its cost may be the same whatever it is given."""
        self.most = most
        self.bound_ns = None if bound_s is None else max(1, round(bound_s * 1e9))
        self._least = min(least, most)
        self.count = self._least if small and self.bound_ns is not None and most > FEW else most
        self._fixed = fixed
        self._last: tuple[int, float] | None = None
        """Messages and cost of the last step with another number of messages than those after it."""
        self._base = 0.0
        """Nanoseconds of a call, whatever it is given."""
        self._each = 0.0
        """Nanoseconds of each message."""

    def ran(self, count: int, spent_ns: int) -> None:
        """A step's function took so long for so many messages."""
        if self.bound_ns is None or not count:
            return
        settled = not self._fixed and (count < self.count or count == self.most)
        if settled and spent_ns * self.count <= self.bound_ns * count:  # so it is in most steps
            return
        fits = max(self._least, min(self.most, self._fits(count, max(1, spent_ns), self.bound_ns)))
        if fits < self.count or count >= self.count:  # a step of fewer than it might take proves nothing of more
            self.count = max(self._least, min(fits, 2 * count))

    def _fits(self, count: int, spent_ns: int, bound_ns: int) -> int:
        if not self._fixed:
            return count * bound_ns // spent_ns
        self._learn(count, spent_ns)
        # What a call costs anyway may be more than the bound: its messages may then cost as much again.
        room = max(bound_ns - self._base, self._base)
        return int(min(self.most, room / self._each)) if self._each else self.most

    def _learn(self, count: int, spent_ns: int) -> None:
        """Tell the cost of a call from that of its messages: by two steps of different sizes."""
        if self._last is None:
            self._base = spent_ns
        elif not 2 / 3 < count / self._last[0] < 3 / 2:
            before, cost = self._last
            self._each = max(0.0, (spent_ns - cost) / (count - before))
            self._base = max(0.0, spent_ns - self._each * count)
            if not self._base:
                self._each = spent_ns / count
        else:  # of about the same size: only how dear both are has changed
            ratio = spent_ns / (self._base + self._each * count)
            self._base *= ratio
            self._each *= ratio
        self._last = count, spent_ns


class Stride:
    """Within one step: when to look at the clock, and whether the step is to be closed. Kept for the next one."""

    def __init__(self, bound_ns: int | None) -> None:
        self._bound_ns = bound_ns
        self._look_ns = max(1, (bound_ns or _USUAL_NS) // _LOOKS)
        self.calls = 1
        """Until the next look."""
        self._closes_ns: int | None = None
        self.began_ns = self._looked_ns = 0
        self.spent_ns = 0
        """Between the last two looks."""

    def begin(self, bounded: bool) -> None:
        """A step begins. ``bounded``: it may be closed."""
        self.began_ns = self._looked_ns = now = clock.monotonic_ns()
        self._closes_ns = now + self._bound_ns if bounded and self._bound_ns is not None else None

    def look(self) -> bool:
        """Whether the step is to be closed now."""
        now = clock.monotonic_ns()
        self.spent_ns, self._looked_ns = now - self._looked_ns or 1, now
        if self.calls < STRIDE_MAX or self.spent_ns > self._look_ns:
            self.calls = max(1, min(STRIDE_MAX, 2 * self.calls, self.calls * self._look_ns // self.spent_ns))
        return self._closes_ns is not None and now >= self._closes_ns
