"""Writing to a queue with several partitions: which message goes where.

    Share     the messages of one append that go to one partition
    Place     the index of a message, and the partition that it is on

One append is one transaction, whatever partitions its messages go to; within a partition they keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cues.queues.options import QueueOptions
from cues.queues.partitioners import Router


class Place(int):
    """An index, with the ``partition`` that it is on."""

    partition: int

    def __new__(cls, index: int, partition: int) -> Place:
        found = super().__new__(cls, index)
        found.partition = partition
        return found

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.partition

    def __repr__(self) -> str:
        return f"<{int(self)} of partition {self.partition}>"

    __str__ = int.__repr__


class PartitionShare(NamedTuple):
    """The messages of an append for one partition."""

    partition: int
    offsets: list[int]
    """Positions of its messages in the append."""


class Placer:
    """Divides appends over the partitions of one queue, by the options in force."""

    def __init__(self, options: QueueOptions, start: int) -> None:
        """``start`` is where turns begin: how many messages the queue has had."""
        self._start = start
        self._follow(options)

    def _follow(self, options: QueueOptions) -> None:
        self._options = options
        self._router = Router(options.partitions, options.key, options.partitioner, self._start)

    def shares(self, options: QueueOptions, messages: Sequence[dict[str, Any]]) -> list[PartitionShare]:
        """The messages by partition. Raises as :meth:`Router.place`."""
        if options is not self._options:
            self._follow(options)
        found: dict[int, list[int]] = {}
        for offset, partition in enumerate(self._router.place(messages)):
            found.setdefault(partition, []).append(offset)
        return [PartitionShare(partition, offsets) for partition, offsets in found.items()]
