"""The pace of a processor: the number of messages of a step, so that its calls stay within a bound in time.

    Pace      for each step: as many messages as fit the bound, by the cost of earlier calls
    Stride    within a step of a message function: the number of calls until the next check of the clock

A step is at most ``growth`` times as large as the last one (batch function: as the largest of the last 16), mostly
twice, so if calls get slower it takes at most twice as long as wanted; it shrinks at once. The hash of a message, and
the ranges of a repeated snapshot, do not depend on the pace.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from cues.base import clock

STRIDE_MAX: Final = 128
"""Largest number of calls between two checks of the clock, for fast calls."""
FEW: Final = 8
"""The largest ``batch_size`` that the first step already takes: the user has set such a small value as a bound."""
_CALLS: Final = 16
"""The last calls of a batch function that tell its costs: enough for medians, and soon forgotten."""
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
        self,
        most: int,
        bound_s: float | None,
        *,
        small: bool,
        least: int = 1,
        first: int = 1,
        fixed: bool = False,
        growth: int = 2,
    ) -> None:
        """``bound_s`` None: every step takes ``most``. ``least``: number of concurrent calls. ``fixed``: one call
        takes the whole step, and part of its cost may not depend on the number of messages. ``growth``: the largest
        ratio of a step to the one before."""
        self.most = most
        self.bound_ns = None if bound_s is None else max(1, round(bound_s * 1e9))
        self._least = min(least, most)
        self._growth = growth
        self.count = min(max(self._least, first), most) if small and self.bound_ns is not None and most > FEW else most
        self._calls: deque[tuple[int, int]] | None = deque(maxlen=_CALLS) if fixed else None
        """Messages and nanoseconds of the last calls, since the cost last jumped."""

    def ran(self, count: int, spent_ns: int) -> None:
        """Learn from a step: its function took ``spent_ns`` for ``count`` messages."""
        if self.bound_ns is None or not count:
            return
        spent_ns, calls = spent_ns or 1, self._calls
        jumped = calls is None or self._jumped(calls, count, spent_ns, self.bound_ns)
        if (count < self.count or count == self.most) and spent_ns * self.count <= self.bound_ns * count:
            return  # the usual case
        largest = count if calls is None else max(calls)[0]
        fits = count * self.bound_ns / spent_ns if jumped else self._fits(largest, self.bound_ns)
        size = max(self._least, min(self.most, int(fits)))
        if size < self.count:
            self.count = size
        elif count >= self.count:  # a step with fewer messages proves nothing about more
            self.count = min(size, self._growth * largest)

    def _jumped(self, calls: deque[tuple[int, int]], count: int, spent_ns: int, bound_ns: int) -> bool:
        """Remember a call. Return whether it took four times as long as any before it, and twice the bound.

        The messages may then cost more: earlier calls are forgotten, and all of the cost is that of messages, until
        smaller calls show that it is not.
        """
        usual = max([bound_ns, *(2 * spent for _, spent in calls)])
        jumped = spent_ns > 2 * usual and (not calls or 2 * count > max(calls)[0])
        if jumped:
            calls.clear()
        calls.append((count, spent_ns))
        return jumped

    def _fits(self, largest: int, bound_ns: int) -> float:
        """Return the number of messages that fit, by the costs of the last calls.

        The cost of a message is the slope between two groups of calls, with many and with few messages, so that one
        call that is slow by chance does not look like many slow messages. A fixed cost is not negative, so the time
        divided by the messages is an upper bound of it. Both are low quantiles: steps that are too small for long
        cost more than one that is too large, which is seen at once.
        """
        assert self._calls is not None
        calls = self._calls
        many = [call for call in calls if 2 * call[0] > largest]
        few = [call for call in calls if 2 * call[0] <= largest]
        most, top = _quantiles(many, 3)
        slow = top > bound_ns
        lowest = sorted(spent / count for count, spent in calls)[len(calls) // 6]
        if not few:  # nothing tells a fixed cost from the cost of messages
            if slow and largest > self._least and len(calls) == _CALLS:
                return largest / 2
            return max(self.count, bound_ns / lowest) if not slow or largest > self._least else self.most
        least, low = _quantiles(few, 2)
        each = min(lowest, max(0.0, (top - low) / (most - least)))
        base = max(0.0, low - each * least)
        # The fixed cost of a call may be more than the bound: its messages may then cost as much again.
        fits = max(bound_ns - base, base) / each if each else self.most
        times = [spent for _, spent in calls]
        unsure = slow and len(many) == 1 and 4 * max(times) > 5 * min(times)
        return min(fits, largest) if unsure else fits  # where times vary, one call is not enough to grow further


def _quantiles(calls: list[tuple[int, int]], part: int) -> tuple[int, int]:
    """The messages and the time that one of ``part`` calls does not reach."""
    place = (len(calls) - 1) // part
    return sorted(count for count, _ in calls)[place], sorted(spent for _, spent in calls)[place]


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
