"""A queue with several partitions as one sequence: where it is cut, and how its record batches follow.

The sequence is that of :mod:`cues.queues.merged`: by append time, of one time by partition, of one partition by
index. A place in it is an index for each partition. So the tasks of a read, one behind the other, and the
batches of a stream are stretches of time, of which each holds about as many messages as was asked for.

    partition 0    1 2 3 | 4 . . |
    partition 1    1 . . | 2 3 4 |        cut behind four messages, and behind eight: (4, 2), (5, 5)

An append time belongs to a record batch, and does not go back on a partition; so where all messages of a
time end is found by bisection of time, in some 40 looks at each partition however long it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cues.spark.position import Indices

if TYPE_CHECKING:
    from cues.queues.log import Log
    from cues.records.batch import Batch
    from cues.storage.transaction import StoreTransaction


class BatchSlice(NamedTuple):
    """Messages of one record batch."""

    partition: int
    batch: Batch
    low: int
    """Offset of the first in the record batch."""
    high: int
    """Offset behind the last."""


def merged(partitions: Iterable[Iterator[BatchSlice]]) -> Iterator[BatchSlice]:
    """The pieces of several partitions, in the order of the sequence."""
    return heapq.merge(*partitions, key=lambda piece: (piece.batch.head.time_ns, piece.partition))


def edges(txn: StoreTransaction, logs: Sequence[Log], start: Indices, end: Indices, slices: int) -> list[Indices]:
    """The edges of so many ``slices`` of about one size, from ``start`` to ``end`` inclusive."""
    count = sum(end) - sum(start)
    found = [start]
    for number in range(1, slices):
        found.append(cut(txn, logs, found[-1], end, count * number // slices - count * (number - 1) // slices))
    return [*found, end]


def cut(txn: StoreTransaction, logs: Sequence[Log], start: Indices, end: Indices, count: int) -> Indices:
    """The place ``count`` messages behind ``start``, or ``end`` where that comes first."""
    if sum(end) - sum(start) <= count:
        return end
    goal = sum(start) + count
    low, high = start, end
    logs = logs[: len(start)]  # it may have grown meanwhile
    rows = [log.row(txn) for log in logs]
    # All messages from low to high were appended at or after `sooner`, and before `later`.
    sooner = min(filter(None, (log.front_time(txn) for log in logs)), default=0)
    later = max(row.time_ns for row in rows) + 1
    while later - sooner > 1 and sum(a < b for a, b in zip(low, high)) > 1:
        middle = (sooner + later) // 2
        reached = tuple(
            min(b, log.index_at(txn, row._replace(first=max(a, row.first), next=b), middle)) if a < b else a
            for log, row, a, b in zip(logs, rows, low, high)
        )
        if sum(reached) <= goal:
            low, sooner = reached, middle
        else:
            high, later = reached, middle
    # What is left between them is of one partition, or of one time: partition by partition then.
    found = []
    left = goal - sum(low)
    for a, b in zip(low, high):
        found.append(min(b, a + left))
        left -= found[-1] - a
    return tuple(found)
