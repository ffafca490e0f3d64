"""Halving: a batch that failed is taken again in halves, until the messages that fail alone are known.

    messages   1 2 3 4 5 6 7 8     5 fails
    calls      [1 2 3 4 5 6 7 8]   fails, after all its tries
               [1 2 3 4]           a step
               [5 6 7 8]           fails
               [5 6]               fails
               [5]                 fails, after all its tries: a step, with an error message
               [6] [7 8]           two steps

Each half is a step like any other, which commits before the next one is called: it has its own snapshot, delivery hash,
state and positions. So a death at any point leaves whole steps. If the function has side effects, the half that was
under way is taken again under its hash; otherwise nothing of it remains. A target that keeps only the position of its
last message (``checkpoint=``) is never given messages after a failure that is not committed.

Only the ends of the halves that wait are kept, and only in memory. A process that starts again takes a whole batch, and
halves it again if it fails.

For k messages that fail alone among n there are about 2·k·log2(n) calls more. A half of several messages is called
once; a single message has all the tries of its processor.
"""

from __future__ import annotations

from cues.graphs.processor import Node
from cues.steps.results import Results, pauses, stops


def halves(node: Node, count: int, results: Results) -> bool:
    """Return whether the messages of a step, which failed together, are to be taken again in two halves."""
    return (
        bool(results.failures)
        and count > 1
        # Only a batch function fails as a whole. A frame is a plan, and each call of it is a job of Spark.
        and node.options.batch is not False
        and node.kind != "frame"
        and node.options.bisect
        # The positions have moved already, and no message is called twice.
        and not node.at_most_once
        # Without an error queue, or if the target failed, the processor stops before the batch.
        and all(pauses(node, failure) or not stops(node, failure) for failure in results.failures.values())
    )


class Halving:
    """The ends of the halves of a batch that failed. An index may count from any place, but always from the same."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        """The half that is taken next is the last one."""

    def at(self, index: int) -> bool:
        """Return whether the message at ``index`` is in a half, and forget the halves before it."""
        while self.ends and self.ends[-1] <= index:
            self.ends.pop()
        return bool(self.ends)

    def bound(self, index: int, size: int) -> int:
        """Return the number of messages to take from ``index``: those of its half, at most ``size``."""
        return min(size, self.ends[-1] - index) if self.at(index) else size

    def divide(self, start: int, stop: int) -> None:
        """Divide the messages from ``start`` to before ``stop``, which failed, into two halves."""
        if not self.at(start) or self.ends[-1] != stop:
            self.ends.append(stop)
        self.ends.append((start + stop) // 2)

    def clear(self) -> None:
        """Forget the halves: the positions are others now."""
        self.ends.clear()
