"""The store as Spark's processes find it: the driver's, and the workers' that read it beside the driver.

A store is a local LMDB environment. Driver and executors may use it at the same time when they run on
one machine; over a network file system LMDB's shared memory is not shared, and a reader sees torn pages.
So what the driver plans says on which machine it is, and a worker on another one refuses; so does one in a
container with process ids of its own, because LMDB knows its readers, and Cues its writers, by these.

Workers are forked and used again for other tasks, so a store is opened for one task and closed with it:
nothing is inherited, and a store that was deleted and made anew under its path is not mistaken for itself.
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

_HINT: Final = "a local master (local[*]), executors on the driver's machine, or an export to Parquet."


@dataclass(frozen=True)
class Site:
    """A store as the driver has it open. Every method raises :class:`Unsupported` where this process cannot read it."""

    path: str
    """Absolute."""
    id: bytes
    host: str
    machine: str

    @staticmethod
    def of(store: BaseStore) -> Site:
        return Site(store.directory, store.id, socket.gethostname(), this_machine())

    def open(self) -> Store:
        """The store, read-only, in whatever process this is."""
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
        """Device and inode of the data file: a store may have been made anew under its path."""
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
    """A queue as the driver found it: where, on which machine, and which one."""

    place: QueueAddress
    host: str
    machine: str
    identity: bytes
    """Of the queue, or of its partition; one that was deleted and made anew under the same name has another."""
    spread: bool = False
    """True for a place of several partitions."""

    @contextmanager
    def opened(self) -> Iterator[Queue]:
        """The queue, read-only, in whatever process this is. Refused on other machines and for other queues."""
        self.require_host("read")
        with Store(self.place.store, readonly=True) as store:
            queue = store.queue(self.place.queue)
            found = _identity(queue)
            if found != self.identity:
                raise Diverged(
                    f"The queue {self.place.queue!r} of {self.place.store} has identity {found.hex()}; what is to be"
                    f" read was planned for {self.identity.hex()}, which was deleted or lay in another store.",
                    "use a new checkpoint, if this queue is meant.",
                    processor="",
                )
            yield queue

    def require_host(self, verb: str) -> None:
        """Raise :class:`Unsupported` where this is not the driver's machine."""
        if not self.here():
            raise Unsupported(
                f"An executor on {socket.gethostname()} cannot {verb} the store {self.place.store} on {self.host}, the"
                " driver's machine: a store is shared memory, and works on one machine only.",
                _HINT,
            )

    def here(self) -> bool:
        """True on the driver's machine."""
        return this_machine() == self.machine


def this_machine() -> str:
    """This boot of this machine, and whose process ids count here."""
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: there is one kind only
        processes = ""
    return f"{clock.boot_id()} {processes}"


def pin(place: QueueAddress) -> tuple[Pinned, Indices, Indices]:
    """Look a queue up on the driver; with the first and the next index of each partition, of one moment."""
    with Store(place.store, readonly=True) as store:
        queue = store.queue(place.queue)
        rows, identity = queue.rows(), _identity(queue)
    pinned = Pinned(place, socket.gethostname(), this_machine(), identity, len(rows) > 1)
    return pinned, tuple(row.first for row in rows), tuple(row.next for row in rows)


def is_spread(place: QueueAddress) -> bool:
    """Return True for a place of several partitions."""
    with Store(place.store, readonly=True) as store:
        return store.queue(place.queue).is_partitioned


def _identity(queue: Queue) -> bytes:
    """Of a queue, or of one partition: these share the queue's, and an offset of one means nothing on another."""
    identity, partition = queue.row().identity, queue.log.partition
    return xxhash.xxh3_64_digest(identity + partition.to_bytes(4, "big")) if partition else identity
