"""The store as Spark's processes find it: the driver, and the workers that read it on the driver's machine.

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import xxhash

from cues.base import clock
from cues.errors import CuesError, Diverged, Unsupported
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.spark.options import QueueAddress
from cues.spark.position import Indices
from cues.storage.base_store import BaseStore

_HINT: Final = "use a local master (local[*]) or executors on the driver's machine, or export the queue to Parquet."


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


@dataclass(frozen=True)
class Pinned:
    """A queue as the driver found it: its place, its machine and its identity."""

    place: QueueAddress
    host: str
    machine: str
    identity: bytes
    """The identity of the queue, or of its partition. A new queue under the same name has another one."""
    spread: bool = False
    """True if the place has several partitions."""

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
            queue = store.queue(self.place.queue)
            identity = _identity(queue)
            if identity != self.identity:
                raise Diverged(
                    f"The queue {self.place.queue!r} of {self.place.store} has identity {identity.hex()}; the read was"
                    f" planned for {self.identity.hex()}, which was deleted or is in another store.",
                    "use a new checkpoint, if this queue is meant.",
                )
            yield queue


def this_machine() -> str:
    """This boot of this machine, and its namespace of process ids."""
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: there is only one namespace
        processes = ""
    return f"{clock.boot_id()} {processes}"


def pin(place: QueueAddress) -> tuple[Pinned, Indices]:
    """Find a queue, on the driver. Also return the next index of each partition, at one moment."""
    with Store(place.store, readonly=True) as store:
        queue = store.queue(place.queue)
        rows, identity = queue._rows(), _identity(queue)
    pinned = Pinned(place, socket.gethostname(), this_machine(), identity, len(rows) > 1)
    return pinned, tuple(row.next for row in rows)


def is_spread(place: QueueAddress) -> bool:
    """Return True for a place of several partitions."""
    with Store(place.store, readonly=True) as store:
        return store.queue(place.queue).is_partitioned


def _identity(queue: Queue) -> bytes:
    """The identity of a queue or of one partition. Partitions share that of the queue, but not their offsets."""
    identity, partition = queue._row().identity, queue._log.partition
    return xxhash.xxh3_64_digest(identity + partition.to_bytes(4, "big")) if partition else identity
