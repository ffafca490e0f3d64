"""A queue with several partitions as one sequence: its cuts, and the order of its record batches.

The order is that of :mod:`cues.queues.tailer`: by append time, then by partition, then by
index. A place in it is an index for each partition. So the tasks of a read, and the
batches of a stream, are consecutive stretches of time, each with about the number of messages that was asked for.

    partition 0    1 2 3 | 4 . . |
    partition 1    1 . . | 2 3 4 |        cut after four messages, and after eight: (4, 2), (5, 5)

An append time belongs to a record batch, and never decreases on a partition. So a bisection over time
finds the place of a cut, with about 40 reads of each partition, even in a long queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy
import pyarrow as pa

from cues import codec
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
    """Offset after the last one."""


def merged(partitions: Iterable[Iterator[BatchSlice]]) -> Iterator[BatchSlice]:
    """The pieces of several partitions, in the order of the whole queue."""
    return heapq.merge(*partitions, key=lambda piece: (piece.batch.head.time_ns, piece.partition))


def edges(txn: StoreTransaction, logs: Sequence[Log], start: Indices, end: Indices, slices: int) -> list[Indices]:
    """The edges of ``slices`` slices of about the same size, from ``start`` to ``end`` inclusive."""
    count = sum(end) - sum(start)
    edges = [start]
    for number in range(1, slices):
        edges.append(cut(txn, logs, edges[-1], end, count * number // slices - count * (number - 1) // slices))
    return [*edges, end]


def cut(txn: StoreTransaction, logs: Sequence[Log], start: Indices, end: Indices, count: int) -> Indices:
    """The place ``count`` messages after ``start``, or ``end`` if that comes first."""
    if sum(end) - sum(start) <= count:
        return end
    goal = sum(start) + count
    low, high = start, end
    logs = logs[: len(start)]  # the queue may have grown meanwhile
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
    # The messages between them belong to one partition, or have one time. So they are cut partition by partition.
    place = []
    left = goal - sum(low)
    for a, b in zip(low, high):
        place.append(min(b, a + left))
        left -= place[-1] - a
    return tuple(place)


# --- rows ---------------------------------------------------------------------------------------


class SliceRows:
    """Pieces as rows (:class:`cues.spark.place.MessageRows`). There is at least one piece."""

    def __init__(self, pieces: Sequence[BatchSlice]) -> None:
        self._pieces = pieces
        self.indices = _joined([numpy.arange(b.first + low, b.first + high) for _, b, low, high in pieces])

    def column(self, name: str) -> pa.Array:
        return _COLUMNS[name](self._pieces, self.indices)

    def typed(self, field: str, kind: pa.DataType) -> None:
        """None: a store has packed messages only."""

    def messages(self) -> list[dict[str, Any]]:
        some = (codec.unpack_known(b.body())[low:high] for _, b, low, high in self._pieces)
        return list(chain.from_iterable(some))


def _joined(arrays: list[Any]) -> Any:
    return numpy.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _partitions(pieces: Sequence[BatchSlice], indices: Any) -> pa.Array:
    numbers = numpy.array([piece.partition for piece in pieces], dtype=numpy.int32)
    return pa.array(numpy.repeat(numbers, [piece.high - piece.low for piece in pieces]))


def _values(pieces: Sequence[BatchSlice], indices: Any) -> pa.Array:
    """The bytes of each message: the bodies of all arrays in one buffer, and the offset of each message."""
    bodies: list[memoryview] = []
    offsets: list[Any] = []
    at = 0
    for _, batch, low, high in pieces:
        cuts = numpy.array(batch.cuts(), dtype=numpy.int32)
        body = batch.body()[cuts[low] : cuts[high]]
        offsets.append(cuts[low:high] + numpy.int32(at - cuts[low]))
        bodies.append(body)
        at += len(body)
    offsets.append(numpy.array([at], dtype=numpy.int32))
    data = pa.py_buffer(b"".join(bodies))
    return pa.Array.from_buffers(pa.binary(), len(indices), [None, pa.py_buffer(_joined(offsets)), data])


def _times(pieces: Sequence[BatchSlice], indices: Any) -> pa.Array:
    micros = [piece.batch.head.time_ns // 1000 for piece in pieces]
    counts = [piece.high - piece.low for piece in pieces]
    return pa.array(numpy.repeat(numpy.array(micros, dtype=numpy.int64), counts)).cast(pa.timestamp("us", tz="UTC"))


def _hashes(pieces: Sequence[BatchSlice], indices: Any) -> pa.Array:
    hashes: list[str | None] = []
    for _, batch, low, high in pieces:
        hash = batch.head.hash
        hashes += [None if hash is None else hash.hex()] * (high - low)
    return pa.array(hashes, pa.string())


_COLUMNS: Final = {"partition": _partitions, "time": _times, "hash": _hashes, "value": _values}
