"""The store as Spark's processes find it: the driver's, and the workers' that read it beside the driver.

A store is a local LMDB environment. Driver and executors may use it at the same time when they run on
one machine; over a network file system LMDB's shared memory is not shared, and a reader sees torn pages.
So what the driver plans carries the boot id of its machine, and a worker on another one refuses.

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

from cues import clock
from cues.errors import CuesError, Diverged, Unsupported
from cues.queue import Queue
from cues.spark.options import Place
from cues.store import Store

_HINT: Final = "a local master (local[*]), executors on the driver's machine, or an export to Parquet."


@dataclass(frozen=True)
class Site:
    """A store as the driver has it open. Every method raises :class:`Unsupported` where this process cannot read it."""

    path: str
    """Absolute."""
    id: bytes
    host: str
    boot: str

    @staticmethod
    def of(store: Store) -> Site:
        return Site(os.path.abspath(store.path), store.id, socket.gethostname(), clock.boot_id())

    def open(self) -> Store:
        """The store, read-only, in whatever process this is."""
        if clock.boot_id() != self.boot:
            raise self._unseen("it is on another machine, and a store is shared memory, which works on one only")
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

    place: Place
    host: str
    boot: str
    identity: bytes
    """Of the queue, or of its partition; one that was deleted and made anew under the same name has another."""

    @contextmanager
    def opened(self) -> Iterator[Queue]:
        """The queue, read-only, in whatever process this is. Refused on other machines and for other queues."""
        self.require_host("read")
        with Store(self.place.store, readonly=True) as store:
            queue = one_log(store, self.place)
            found = _identity(queue)
            if found != self.identity:
                raise Diverged(
                    f"The queue {self.place.queue!r} of {self.place.store} has identity {found.hex()}; what is to be"
                    f" read was planned for {self.identity.hex()}, which was deleted or lay in another store.",
                    "a new checkpoint, if this queue is meant.",
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
        """Whether this is the driver's machine."""
        return clock.boot_id() == self.boot


def pin(place: Place) -> tuple[Pinned, int, int]:
    """Look a queue up on the driver; with its first and its next index."""
    with Store(place.store, readonly=True) as store:
        queue = one_log(store, place)
        row, identity = queue.row(), _identity(queue)
    return Pinned(place, socket.gethostname(), clock.boot_id(), identity), row.first, row.next


def one_log(store: Store, place: Place) -> Queue:
    """The queue of a place, or its partition (``orders/3``): rows and offsets of the format have one index each."""
    queue = store.queue(place.queue)
    if queue.spread:
        count = queue.partitions
        raise Unsupported(
            f"The queue {place.queue!r} of {place.store} has {count} partitions, each with indices of its own; the"
            " format cues reads and writes one.",
            f"'{place.store}#{place.queue}/0' to '…/{count - 1}', as a union; or a graph, on any engine.",
        )
    return queue


def _identity(queue: Queue) -> bytes:
    """Of one log: partitions of a queue have one identity, and an offset of one means nothing on another."""
    identity, partition = queue.row().identity, queue.log.partition
    return xxhash.xxh3_64_digest(identity + partition.to_bytes(4, "big")) if partition else identity
