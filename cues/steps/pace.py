"""The pace of a processor: the number of messages of a step, so that its calls stay within a bound in time.

    Pace      for each step: as many messages as fit the bound, by the cost of earlier calls
    Stride    within a step of a message function: the number of calls until the next check of the clock

A step is at most twice as large as the last one, so if calls get slower it takes at most twice as long as wanted; it
shrinks at once. The hash of a message, and the ranges of a repeated snapshot, do not depend on the pace.
"""

from __future__ import annotations

from typing import Final

from cues.base import clock

STRIDE_MAX: Final = 128
"""Largest number of calls between two checks of the clock, for fast calls."""
FEW: Final = 8
"""The largest ``batch_size`` that the first step already takes: the user has set such a small value as a bound."""
_USUAL_NS: Final = 250_000_000
_LOOKS: Final = 16
"""Approximate number of checks of the clock in one step, if calls are fast."""


class Pace:
    """The largest number of messages of the next step.

    A processor whose steps cannot be closed between two messages (a batch function, at-most-once), or have a
    snapshot before the function runs, begins with ``first`` messages, or with ``most`` if that is at most
    :data:`FEW`. Others begin with ``most``, and their steps are closed.
    """

    def __init__(
        self, most: int, bound_s: float | None, *, small: bool, least: int = 1, first: int = 1, fixed: bool = False
    ) -> None:
        """``bound_s`` None: every step takes ``most``. ``least``: number of concurrent calls. ``fixed``: one call
        takes the whole step, and part of its cost may not depend on the number of messages."""
        self.most = most
        self.bound_ns = None if bound_s is None else max(1, round(bound_s * 1e9))
        self._least = min(least, most)
        self.count = min(max(self._least, first), most) if small and self.bound_ns is not None and most > FEW else most
        self._fixed = fixed
        self._last: tuple[int, float] | None = None
        """Messages and cost of the last step whose number of messages differs from the steps after it."""
        self._base = 0.0
        """The fixed cost of a call, in nanoseconds."""
        self._each = 0.0
        """The cost of each message, in nanoseconds."""

    def ran(self, count: int, spent_ns: int) -> None:
        """Learn from a step: its function took ``spent_ns`` for ``count`` messages."""
        if self.bound_ns is None or not count:
            return
        settled = not self._fixed and (count < self.count or count == self.most)
        if settled and spent_ns * self.count <= self.bound_ns * count:  # the usual case
            return
        fits = max(self._least, min(self.most, self._fits(count, max(1, spent_ns), self.bound_ns)))
        if fits < self.count or count >= self.count:  # a step with fewer messages proves nothing about more
            self.count = max(self._least, min(fits, 2 * count))

    def _fits(self, count: int, spent_ns: int, bound_ns: int) -> int:
        if not self._fixed:
            return count * bound_ns // spent_ns
        self._learn(count, spent_ns)
        # The fixed cost of a call may be more than the bound: its messages may then cost as much again.
        room = max(bound_ns - self._base, self._base)
        return int(min(self.most, room / self._each)) if self._each else self.most

    def _learn(self, count: int, spent_ns: int) -> None:
        """Compute the fixed cost and the cost of a message from two steps of different sizes."""
        if self._last is None:
            self._base = float(spent_ns)
        elif not 2 / 3 < count / self._last[0] < 3 / 2:
            before, cost = self._last
            self._each = max(0.0, (spent_ns - cost) / (count - before))
            self._base = max(0.0, spent_ns - self._each * count)
            if not self._base:
                self._each = spent_ns / count
        else:  # of about the same size: scale both costs
            ratio = spent_ns / (self._base + self._each * count)
            self._base *= ratio
            self._each *= ratio
        self._last = count, spent_ns


class Stride:
    """When to check the clock within a step, and whether to close the step. Kept for the next step."""

    def __init__(self, bound_ns: int | None) -> None:
        self._bound_ns = bound_ns
        self._look_ns = max(1, (bound_ns or _USUAL_NS) // _LOOKS)
        self.calls = 1
        """Calls until the next check."""
        self._closes_ns: int | None = None
        self.began_ns = self.looked_ns = 0
        """The times of the beginning of the step, and of the last check."""
        self.spent_ns = 0
        """Calls between the last two checks."""

    def begin(self, bounded: bool) -> None:
        """Begin a step. ``bounded``: it may be closed."""
        self.began_ns = self.looked_ns = now = clock.monotonic_ns()
        self._closes_ns = now + self._bound_ns if bounded and self._bound_ns is not None else None

    def look(self) -> bool:
        """Return whether to close the step now."""
        now = clock.monotonic_ns()
        self.spent_ns, self.looked_ns = now - self.looked_ns or 1, now
        if self.calls < STRIDE_MAX or self.spent_ns > self._look_ns:
            self.calls = max(1, min(STRIDE_MAX, 2 * self.calls, self.calls * self._look_ns // self.spent_ns))
        return self._closes_ns is not None and now >= self._closes_ns
