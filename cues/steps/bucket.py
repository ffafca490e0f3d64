"""The calls that ``rate=`` allows: a token bucket of one unit.

    level    grows by the rate, up to the size of the bucket; each call takes 1
    size     the calls of BURST_S at the rate, and at least 1: so calls are spread, and not made at once

In any time of t seconds a unit makes at most size + rate · t calls. A processor over n partitions has n units, each
with a bucket of 1/n of the rate. So the rate holds for all of them together, in any number of processes.

A start cannot know the calls of steps that did not commit. So it begins with at most one call, if the time since the
last record of the try log is enough for it: restarts make no burst, and a slow rate does not begin again each time.

Not guaranteed: that retries of a call are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from cues.base import clock

BURST_S: Final = 0.1
"""Seconds of calls that a bucket holds. A step of less would cost more commits, one of more would be a burst."""
_ROUNDING: Final = 1e-9


class Bucket:
    """The calls that one unit may make. Used by one thread at a time."""

    def __init__(self, calls_per_s: float, units: Callable[[], int], last_ns: int) -> None:
        """``units``: the number of units that share the rate now. ``last_ns``: the wall time of the last step, or 0."""
        self._calls_per_s = calls_per_s
        self._units = units
        self._at_ns = clock.monotonic_ns()
        self._level = min(1.0, self._rate * max(0, clock.now_ns() - last_ns) / 1e9)

    @property
    def _rate(self) -> float:
        return self._calls_per_s / self._units()

    def calls(self) -> int:
        """Return the number of calls that may be made now."""
        now, rate = clock.monotonic_ns(), self._rate
        self._level = min(max(1.0, BURST_S * rate), self._level + rate * (now - self._at_ns) / 1e9)
        self._at_ns = now
        return max(0, int(self._level + _ROUNDING))

    def take(self, calls: int) -> None:
        """Count calls. Calls of a repeated step may be more than were allowed, and are made up for."""
        self._level -= calls

    def wait_s(self) -> float:
        """Return the seconds until the next call is allowed; 0 if one is."""
        return 0.0 if self.calls() else math.ceil((1 - self._level) / self._rate * 1e9) / 1e9

    def fill(self) -> None:
        """Allow the next call now (a test that does not wait)."""
        self._level = max(1.0, self._level)
