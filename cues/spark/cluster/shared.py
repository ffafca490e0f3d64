"""A queue of a shared directory, as a query reads it.

    driver      follows the log of the queue, and plans for each task the pieces of files that hold its messages
    executor    reads the row groups of its pieces, and of them only the columns of the query. A field that the files
                have as a typed column of the declared type is read from there, and no message is decoded for it

Places are indices, and not files. So a merge of files between two batches of a stream changes nothing: the log says
at each plan which files hold the messages. A file that left the log after a plan is still on the disk, for
:data:`cues.spark.cluster.directory.KEEP_FILES_H`.

Not guaranteed: that times never decrease. A step has one time, and steps of several processors may reach a queue in
another order than they began. Then the place of a time is one of those at which the queue passes it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy
import pyarrow as pa

from cues import codec
from cues.base.texts import quoted
from cues.errors import Diverged, QueueNotFound
from cues.overrides import override
from cues.queues.options import QueueOptions
from cues.spark.cluster.data import Piece, RowGroup, last_time, pieces_of, read_groups, row_groups
from cues.spark.cluster.directory import PartitionLog, QueueDirectory
from cues.spark.cluster.files import folder_of, identity_of, open_files
from cues.spark.cluster.typed import TypedColumns
from cues.spark.options import QueueAddress
from cues.spark.place import Lost, MessageRows, ReadableQueue, partition_identity
from cues.spark.position import Indices

_ARRAY: Final = b"\xdd"
"""Before the number of items, in four bytes, and the items: an array in msgpack."""


class SharedQueue(ReadableQueue):
    """One queue. Only the driver has its log."""

    def __init__(self, place: QueueAddress) -> None:
        """Find the queue. Raises :class:`QueueNotFound`, and the errors of :class:`QueueDirectory`."""
        self.place = place
        self.files = open_files(place.store, make=False)
        queue, slash, partition = place.queue.partition("/")
        self._folder = folder_of(queue)
        text = self._record()
        if text is None:
            raise QueueNotFound(
                f"The directory {place.store} has no queue {place.queue!r}.",
                f"check both names; cues status {quoted(place.store)} lists the queues.",
                queue=place.queue,
            )
        self._made = text
        self.identity = identity_of(self.files, f"{self._folder}/_cues/queue.json", text)
        self._log = QueueDirectory(self.files, queue, QueueOptions(), self.identity, make=False)
        self._typed = self._log.columns
        self._partition = int(partition) if slash else None
        self.spread = len(self.logs) > 1
        if self._partition:  # partitions share the identity of the queue, but not their offsets
            self.identity = partition_identity(self.identity, self._partition)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_log"}

    def _record(self) -> bytes | None:
        return self.files.read(f"{self._folder}/_cues/queue.json")

    def _read_on(self) -> None:
        """Read the new entries of the log. Raises :class:`Diverged` if it is not the log that was opened."""
        try:
            self._log.read_on()
        finally:  # entries of a new log may look like damage of the old one
            if self._record() != self._made:
                raise Diverged(
                    f"The queue {self.place.queue!r} is not in {self.place.store}, or is a new one of that name.",
                    "start the query again with a new checkpoint, if the graph was started over.",
                )

    def log(self) -> PartitionLog:
        """The log of a queue with one partition, at this moment."""
        self._read_on()
        (log,) = self.logs
        return log

    @override
    def ends(self) -> tuple[Indices, Indices]:
        self._read_on()
        logs = self.logs
        return tuple(log.first for log in logs), tuple(log.next for log in logs)

    @property
    def logs(self) -> list[PartitionLog]:
        """The partitions that there are now."""
        return self._log.logs if self._partition is None else [self._log.log(self._partition)]

    @override
    def index_at(self, time_ns: int) -> Indices:
        """The place of the first messages at or after a time, by a bisection over the metadata of the files."""
        self._read_on()
        return tuple(self._index_at(log, -(-time_ns // 1000)) for log in self.logs)

    def _index_at(self, log: PartitionLog, since: int) -> int:
        live = log.live
        at = bisect.bisect_left(live, True, key=lambda file: last_time(self.files, self._folder, file) >= since)
        for piece in [Piece(self._folder, file, 0, file.count) for file in live[at : at + 1]]:
            for first, rows in read_groups(self.files, piece, ["time"]):
                reached = rows.column("time").cast(pa.int64()).to_numpy() >= since
                if reached.any():
                    return first + int(reached.argmax())
        return log.next

    @override
    def edges(self, start: Indices, end: Indices, slices: int) -> list[Indices]:
        count = sum(end) - sum(start)
        return [self.cut(start, end, count * number // slices) for number in range(slices + 1)]

    @override
    def cut(self, start: Indices, end: Indices, count: int) -> Indices:
        """The place ``count`` messages after ``start``, or ``end`` if that comes first. Older files come first."""
        if count >= sum(end) - sum(start):
            return end
        logs, goal = self.logs, sum(start) + count
        low, high = start, end
        times = [file.modified_ms for log, *span in zip(logs, start, end) for file in log.within(*span)]
        sooner, later = min(times, default=0), max(times, default=0) + 1
        while later - sooner > 1:
            middle = (sooner + later) // 2
            reached = tuple(_at(log, middle, *span) for log, *span in zip(logs, low, high))
            if sum(reached) <= goal:
                low, sooner = reached, middle
            else:
                high, later = reached, middle
        # The files between them have one time, so the same part of each partition is taken.
        whole, rest = sum(high) - sum(low), goal - sum(low)
        sums = itertools.accumulate((b - a for a, b in zip(low, high)), initial=0)
        parts = itertools.pairwise(part * rest // whole if whole else 0 for part in sums)
        return tuple(at + after - before for at, (before, after) in zip(low, parts))

    @override
    def plan(self, start: Indices, end: Indices, lost: Lost) -> list[Piece]:
        pieces: list[Piece] = []
        for log, at, stop in zip(self.logs, start, end):
            if at < stop:
                pieces += self._plan(log, at, stop, lost)
        return pieces

    def _plan(self, log: PartitionLog, at: int, stop: int, lost: Lost) -> list[Piece]:
        if log.next < stop:
            self._read_on()
        if log.next < stop:
            raise self.behind(
                f"The queue {log.id!r} of {self.place.store} ends before {log.next}, and messages up to {stop - 1}"
                " were planned."
            )
        pieces = pieces_of(self._folder, log.within(at, stop), at, stop)
        for piece in pieces:
            if piece.begin > at:
                lost(at, piece.begin, log.partition)
            at = piece.begin + piece.stop - piece.start
        if at < stop:
            lost(at, stop, log.partition)
        return pieces

    @override
    def rows(self, start: Indices, end: Indices, plan: list[Piece], lost: Lost) -> Iterator[MessageRows]:
        for piece in plan:
            for group in row_groups(self.files, piece):
                yield _GroupRows(group, piece.file.partition, self._typed)


def _at(log: PartitionLog, time_ms: int, low: int, high: int) -> int:
    """The index of the first message in files of a time or later, between ``low`` and ``high``."""
    at = bisect.bisect_left(log.live, time_ms, key=lambda file: file.modified_ms)
    return min(max(log.live[at].first if at < len(log.live) else log.next, low), high)


class _GroupRows:
    """The rows of a row group. A column is read when it is asked for."""

    def __init__(self, group: RowGroup, partition: int, typed: TypedColumns) -> None:
        self.indices = numpy.arange(group.first, group.first + group.length)
        self._partition = partition
        self._group = group
        self._typed = typed
        self._columns: dict[str, pa.Array] = {}

    def column(self, name: str) -> pa.Array:
        if name == "partition":
            return pa.array(numpy.full(self._group.length, self._partition, numpy.int32))
        if name not in self._columns:
            self._columns[name] = pa.concat_arrays(self._group.read([name]).column(name).chunks)
        return self._columns[name]

    def typed(self, field: str, kind: pa.DataType) -> pa.Array | None:
        column = self._typed.column(field)
        return None if column is None or self._group.type_of(column) != kind else self.column(column)

    def messages(self) -> list[dict[str, Any]]:
        values = self.column("value").to_pylist()
        return codec.unpack_known(_ARRAY + len(values).to_bytes(4) + b"".join(values))  # type: ignore[no-any-return]
