"""Changes of a queue, planned and then made: a purge, and more partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cues.base.data import dataclass
from cues.operate.refused import Refused
from cues.operate.target import Target
from cues.queues.retention import PlannedPurge


@dataclass(frozen=True)
class PlannedPurges:
    """A purge of a queue that can be made."""

    plans: Sequence[PlannedPurge]
    """By partition."""
    apply: Callable[[bool], object]
    """Purge. With False it raises :class:`QueueInUse` if a reader has not read some of the messages."""


@dataclass(frozen=True)
class Growth:
    """A queue that can get more partitions."""

    queue: str
    partitions: int
    key: object
    """The key of its messages; None if it has none."""
    apply: Callable[[int], object]
    """Raise the number of partitions."""


def refuse_partition(target: Target, queue: str) -> None:
    """Refuse a partition where a whole queue is needed."""
    name, slash, _ = queue.partition("/")
    if slash:
        raise Refused(f"{queue} is a partition.", f"{target.again(name)} PARTITIONS")
