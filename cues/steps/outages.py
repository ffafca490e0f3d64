"""Outages: which errors of a processor's calls mean that something outside is away.

Such an error is no failure of a message. The step commits the messages before it and ends there, as a processor does
that stops at a failure; the unit waits, and continues from its row, as after a restart (engine/threads.py). So a wait
holds no lock, no transaction and no half of a step, and everything that is true after a kill is true after an outage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cues.graphs.outage import FAIL

if TYPE_CHECKING:
    from cues.graphs.processor import Node


class Outages:
    """The rule of one processor."""

    def __init__(self, node: Node) -> None:
        self.outage = node.options.outages
        named = node.options.retry.on
        # Who names exceptions in retries= has said what happens to them.
        self._retried = () if named is Exception else named
        self._waits = not node.at_most_once and self.outage.then != FAIL

    def concerns(self, error: BaseException) -> bool:
        """Return whether the processor waits after this error of its function, its target or its source."""
        return self._waits and not isinstance(error, self._retried) and self.outage.concerns(error)
