"""A queue as a query finds it, and the store as Spark's processes find it: the driver, and the workers on its machine.

A store is a local LMDB environment. Driver and executors may use it at the same time if they run on
one machine. Over a network file system LMDB's shared memory is not shared, and a reader sees torn pages.
So the plan of the driver names its machine, and a worker on another machine refuses it. A worker in a
container with process ids of its own refuses it too, because LMDB and Cues identify readers and writers by them.

Workers are forked and used again for other tasks. So a store is opened for one task and closed after it. Then
nothing is inherited, and a new store under the path of a deleted one is not taken for the old one.
"""

from __future__ import annotations

import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import xxhash

from cues.base import clock
from cues.base.data import dataclass
from cues.base.texts import quoted
from cues.errors import CuesError, Diverged, Unsupported
from cues.overrides import override
from cues.queues.base import read_as, views_of
from cues.queues.committed import Isolation
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.spark.installed import DAEMON
from cues.spark.options import QueueAddress
from cues.spark.position import Indices
from cues.spark.slices import BatchSlice, SliceRows, cut, edges, merged
from cues.storage.base_store import BaseStore

if TYPE_CHECKING:
    from cues.queues.log import Log
    from cues.storage.transaction import StoreTransaction

_HINT: Final = "use a local master (local[*]) or executors on the driver's machine, or export the queue to Parquet."
_READ_BYTES: Final = 1 << 20
"""Bytes of record batches that become one Arrow batch: some ten thousand small messages."""
_READ_BYTES_MIN: Final = 1 << 16
"""Least bytes of each of many partitions, whose record batches are in memory at the same time."""


@dataclass(frozen=True)
class Site:
    """A store that the driver has open. Every method raises :class:`Unsupported` if this process cannot read it."""

    path: str
    """Absolute."""
    id: bytes
    host: str
    machine: str

    @staticmethod
    def of(store: BaseStore) -> Site:
        return Site(store.directory, store.id, socket.gethostname(), this_machine())

    def open(self) -> Store:
        if this_machine() != self.machine:
            raise self._unseen(
                "it is on another machine, or in a container with process ids of its own, and a store is shared"
                " memory of processes that know each other"
            )
        try:
            store = Store(self.path, readonly=True)
        except (CuesError, OSError) as error:
            raise self._unseen(getattr(error, "message", str(error))) from error
        if store.id != self.id:
            store.close()
            raise self._unseen("under this path it finds another store")
        return store

    def inode(self) -> tuple[int, int]:
        """Device and inode of the data file. They change if the store is replaced by a new one under its path."""
        try:
            status = os.stat(os.path.join(self.path, "data.mdb"))
        except OSError as error:
            raise self._unseen(error.strerror or str(error)) from error
        return status.st_dev, status.st_ino

    def _unseen(self, why: str) -> Unsupported:
        return Unsupported(
            f"An executor on {socket.gethostname()} cannot read the driver's store {self.path} on {self.host}: {why}.",
            _HINT,
        )


Lost = Callable[[int, int, int], int]
"""Handles that the messages from a start to an end (exclusive) of a partition are purged. Returns the next index."""


class MessageRows(Protocol):
    """Some messages of a queue, as Arrow."""

    indices: Any
    """A numpy array."""

    def column(self, name: str) -> Any:
        """The column ``time``, ``hash``, ``value`` or ``partition``, with its type in a row of the format."""
        ...

    def typed(self, field: str, kind: Any) -> Any | None:
        """A field of the messages as it is stored, if it is a column of this Arrow type; NULL where it does not fit."""
        ...

    def messages(self) -> list[dict[str, Any]]:
        """The decoded messages."""
        ...


class ReadableQueue(ABC):
    """A queue of a store or of a shared directory, as a query reads it. A place on it is an index of each partition.

    The driver makes and asks it, and sends it to the executors, which call only :meth:`rows`.
    """

    place: QueueAddress
    identity: bytes
    """The identity of the queue, or of its partition. A new queue under the same name has another one."""
    spread: bool = False
    """True if the place has several partitions."""

    @abstractmethod
    def ends(self) -> tuple[Indices, Indices]:
        """The places of the first and of the next message, at this moment."""

    @abstractmethod
    def index_at(self, time_ns: int) -> Indices:
        """The place of the first messages at or after a time."""

    @abstractmethod
    def edges(self, start: Indices, end: Indices, slices: int) -> list[Indices]:
        """The edges of slices of about the same size, from ``start`` to ``end`` inclusive."""

    @abstractmethod
    def cut(self, start: Indices, end: Indices, count: int) -> Indices:
        """The place ``count`` messages after ``start``, or ``end`` if that comes first."""

    @abstractmethod
    def plan(self, start: Indices, end: Indices, lost: Lost) -> Any:
        """On the driver: the plan of one task, beside the range that it reads."""

    @abstractmethod
    def rows(self, start: Indices, end: Indices, plan: Any, lost: Lost) -> Iterator[MessageRows]:
        """On an executor: the messages of a range, in order. Each can be read until the next is asked for."""

    def behind(self, text: str) -> Diverged:
        """The error for a queue that has fewer messages than a plan or a checkpoint names."""
        return Diverged(text, f"run cues check {quoted(self.place.store)}: an older copy of it may have been put back.")


@dataclass(frozen=True)
class Pinned(ReadableQueue):
    """A queue of a store as the driver found it: its place, its machine and its identity."""

    place: QueueAddress
    host: str
    machine: str
    identity: bytes
    spread: bool = False
    isolation: Isolation = "uncommitted"

    @contextmanager
    def opened(self) -> Iterator[Queue]:
        """Open the queue, read-only, in any process. Refuse other machines and other queues."""
        if this_machine() != self.machine:
            raise Unsupported(
                f"An executor on {socket.gethostname()} cannot read the store {self.place.store} on {self.host}, the"
                " driver's machine: a store is shared memory, and works on one machine only.",
                _HINT,
            )
        with Store(self.place.store, readonly=True) as store:
            queue = read_as(store.queue(self.place.queue), self.isolation)
            identity = _identity(queue)
            if identity != self.identity:
                raise Diverged(
                    f"The queue {self.place.queue!r} of {self.place.store} has identity {identity.hex()}; the read was"
                    f" planned for {self.identity.hex()}, which was deleted or is in another store.",
                    "use a new checkpoint, if this queue is meant.",
                )
            yield queue

    @override
    def ends(self) -> tuple[Indices, Indices]:
        with self._logs() as (logs, txn):
            rows = [log.row(txn) for log in logs]
        return tuple(row.first for row in rows), tuple(row.next for row in rows)

    @override
    def index_at(self, time_ns: int) -> Indices:
        with self._logs() as (logs, txn):
            return tuple(log.index_at(txn, log.row(txn), time_ns) for log in logs)

    @override
    def edges(self, start: Indices, end: Indices, slices: int) -> list[Indices]:
        with self._logs() as (logs, txn):
            return edges(txn, logs, start, end, slices)

    @override
    def cut(self, start: Indices, end: Indices, count: int) -> Indices:
        with self._logs() as (logs, txn):
            return cut(txn, logs, start, end, count)

    @override
    def plan(self, start: Indices, end: Indices, lost: Lost) -> None:
        """The range is the plan: messages that were purged meanwhile are found by the task."""

    @override
    def rows(self, start: Indices, end: Indices, plan: None, lost: Lost) -> Iterator[MessageRows]:
        with self.opened() as queue:
            logs = [view.core.log for view in views_of(queue)]
            count = len(end)
            if len(logs) < count:
                raise self.behind(f"The queue {queue.id} has {len(logs)} partitions, and {count} were planned.")
            logs = logs[:count]
            size = max(_READ_BYTES // len(logs), _READ_BYTES_MIN)
            ranges = zip(logs, start, end)
            for pieces in _some(merged([self._pieces(log, low, high, size, lost) for log, low, high in ranges])):
                yield SliceRows(pieces)

    @contextmanager
    def _logs(self) -> Iterator[tuple[list[Log], StoreTransaction]]:
        """The logs of the partitions, in a read transaction."""
        with self.opened() as queue:
            logs = [view.core.log for view in views_of(queue)]
            with queue.store.core.view() as txn:
                yield logs, txn

    def _pieces(self, log: Log, start: int, stop: int, size: int, lost: Lost) -> Iterator[BatchSlice]:
        """The messages of the range on one partition, in order, read ``size`` bytes at a time."""
        at = start
        while at < stop:
            with log.store.core.view() as txn:
                row = log.row(txn)
                raws = log.read(txn, row, at, stop - at, size)
            if row.first > at:
                at = lost(at, min(row.first, stop), log.partition)
            if not raws:
                if row.next < stop and at < stop:
                    raise self.behind(
                        f"The queue {log.id} ends before {row.next}, and messages up to {stop - 1} were planned."
                    )
                return
            for batch in log.batches(raws):
                if batch.first >= stop:  # a read of committed messages may return more
                    return
                if not batch.head.acknowledges:
                    record, low = batch.source
                    low -= batch.first
                    yield BatchSlice(log.partition, record, low + max(at, batch.first), low + min(stop, batch.next))
                at = batch.next


def _some(pieces: Iterator[BatchSlice]) -> Iterator[list[BatchSlice]]:
    """The pieces, in groups that become one Arrow batch."""
    some: list[BatchSlice] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += len(piece.batch.body())
        if size >= _READ_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


@contextmanager
def message_first() -> Iterator[None]:
    """Let an error of Cues that goes to Spark begin with its message. Also a decorator.

    Spark shows a Python traceback before it, unless this variable is set. Its Python processes, for plans and for
    tasks, end with their first error, so no traceback of a user's function is hidden.
    """
    try:
        yield
    except CuesError:
        process = getattr(sys.modules["__main__"], "__spec__", None)
        if process is not None and process.name.startswith(("pyspark.", DAEMON)):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


def this_machine() -> str:
    """This boot of this machine, and its namespace of process ids."""
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: there is only one namespace
        processes = ""
    return f"{clock.boot_id()} {processes}"


def pin(place: QueueAddress, isolation: Isolation = "uncommitted") -> tuple[Pinned, Indices]:
    """Find a queue, on the driver. Also return the next index of each partition, at one moment."""
    with Store(place.store, readonly=True) as store:
        queue = read_as(store.queue(place.queue), isolation)
        identity = _identity(queue)
        logs = [view.core.log for view in views_of(queue)]
        with store.core.view() as txn:
            nexts = tuple(log.row(txn).next for log in logs)
    return Pinned(place, socket.gethostname(), this_machine(), identity, len(nexts) > 1, isolation), nexts


def _identity(queue: Queue) -> bytes:
    """The identity of a queue or of one partition. Partitions share that of the queue, but not their offsets."""
    identity, partition = queue.core.row().identity, queue.core.log.partition
    return partition_identity(identity, partition) if partition else identity


def partition_identity(queue: bytes, partition: int) -> bytes:
    """The identity of a partition, from that of its queue."""
    return xxhash.xxh3_64_digest(queue + partition.to_bytes(4, "big"))
