"""Latency and size of steps, measured at a cost that nobody notices.

To measure a step takes a microsecond, which is much for a step of one message. So if steps follow each other quickly,
only every n-th is measured, and counts for the steps before it that were not. All messages are counted, with the
latency of their step or of one within a few milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cues.base import clock
from cues.base.events import Counters

if TYPE_CHECKING:
    from cues.steps.taking import Taken

_EVERY_MAX: Final = 64
"""The most steps of which one is measured."""
_GAP_NS: Final = 1_000_000
"""Two measurements that are closer than this are more than needed."""


class Meter:
    """Measures the steps of one stepper."""

    __slots__ = ("_at_ns", "_counters", "_every", "_last_us", "_size", "left", "messages", "steps")

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._every = 1
        self._at_ns = 0
        self._last_us = self._size = 0
        self.left = 1
        """The number of steps until the next measurement. The stepper counts it down."""
        self.messages = 0
        """The messages of the steps that were not measured. The stepper counts them."""

    def measure(self, taken: Taken) -> None:
        """Measure a step that has committed, for all steps since the last measurement."""
        now_ns = clock.now_ns()
        gap_ns = now_ns - self._at_ns
        self._at_ns = now_ns
        steps = self._every
        if gap_ns < _GAP_NS:
            self._every = min(_EVERY_MAX, steps * 2)
        elif gap_ns > 4 * _GAP_NS:
            self._every = max(1, steps // 2)
        self.left = self._every
        self._counters.sizes.add(taken.count, steps)
        add = self._counters.latency.add
        before = self.messages - taken.count
        for piece in taken.slices:
            for batch in piece.batches:
                count = min(batch.next, piece.stop) - max(batch.first, piece.start)
                latency_us = max(0, now_ns - batch.shown_ns) // 1000
                add(latency_us, count + before)
                before = 0
        self._last_us, self._size = latency_us, taken.count
        self.messages = 0

    def settle(self) -> None:
        """Count the steps since the last measurement like that one. Called before the stepper waits."""
        self._counters.sizes.add(self._size, self._every - self.left)
        self._counters.latency.add(self._last_us, self.messages)
        self._every = self.left = 1
        self.messages = 0
