"""Writing to a queue with several partitions: the partition of each message.

    PartitionShare    the messages of one append that go to one partition
    Place             the index of a message, and its partition

One append is one transaction, also over several partitions. The messages of one partition keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cues.native import mypyc_attr
from cues.overrides import override
from cues.queues.options import QueueOptions
from cues.queues.partitioners import EVERY, Router


@mypyc_attr(native_class=False)
class Place(int):
    """An index with its ``partition``."""

    partition: int

    def __new__(cls, index: int, partition: int) -> Place:
        place = int.__new__(cls, index)
        place.partition = partition
        return place

    @override
    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.partition

    @override
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
        """``start`` is the number of messages that the queue has had; turns begin there."""
        self._start = start
        self._follow(options)

    def _follow(self, options: QueueOptions) -> None:
        self._options = options
        self._router = Router(options.partitions, options.key, options.partitioner, self._start)

    def shares(self, options: QueueOptions, messages: Sequence[dict[str, Any]]) -> list[PartitionShare]:
        """Return the messages by partition, a watermark on each. Raises the errors of :meth:`Router.place`."""
        if options is not self._options:
            self._follow(options)
        return shares_of(self._router.place(messages), options.partitions)

    def table_shares(self, options: QueueOptions, table: Any) -> list[PartitionShare]:
        """Return the rows of a table by partition, as :meth:`shares` does for messages."""
        if options is not self._options:
            self._follow(options)
        return shares_of(self._router.place_table(table), options.partitions)


def shares_of(placed: Any, partitions: int) -> list[PartitionShare]:
    """Return the messages of each partition; ``placed`` is a list or an Arrow array, as a :class:`Router` makes it."""
    shares: dict[int, list[int]] = {}
    for offset, partition in enumerate(placed if isinstance(placed, list) else placed.to_pylist()):
        for each in range(partitions) if partition == EVERY else (partition,):
            shares.setdefault(each, []).append(offset)
    return [PartitionShare(partition, offsets) for partition, offsets in shares.items()]
