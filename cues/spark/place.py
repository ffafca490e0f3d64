"""The store as Spark's processes find it: the driver's, and the workers' that read it beside the driver.

A store is a local LMDB environment. Driver and executors may use it at the same time when they run on
one machine; over a network file system LMDB's shared memory is not shared, and a reader sees torn pages.
So what the driver plans carries the boot id of its machine, and a worker on another one refuses.

Workers are forked and used again for other tasks, so a store is opened for one task and closed with it:
nothing is inherited, and a store that was deleted and made anew under its path is not mistaken for itself.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cues import clock
from cues.errors import Diverged, Unsupported
from cues.queue import Queue
from cues.spark.options import Place
from cues.store import Store


@dataclass(frozen=True)
class Pinned:
    """A queue as the driver found it: where, on which machine, and which one."""

    place: Place
    host: str
    boot: str
    identity: bytes
    """Of the queue; one that was deleted and made anew under the same name has another."""

    @contextmanager
    def opened(self) -> Iterator[Queue]:
        """The queue, read-only, in whatever process this is. Refused on other machines and for other queues."""
        self.require_host("read")
        with Store(self.place.store, readonly=True) as store:
            queue = store.queue(self.place.queue)
            found = queue.row().identity
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
                "a local master (local[*]), executors on the driver's machine, or an export to Parquet.",
            )

    def here(self) -> bool:
        """Whether this is the driver's machine."""
        return clock.boot_id() == self.boot


def pin(place: Place) -> tuple[Pinned, int, int]:
    """Look a queue up on the driver; with its first and its next index."""
    with Store(place.store, readonly=True) as store:
        row = store.queue(place.queue).row()
    return Pinned(place, socket.gethostname(), clock.boot_id(), row.identity), row.first, row.next
