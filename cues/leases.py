"""Leases: files that say when their owner last answered.

    lease-<owner>     8 bytes, the monotonic clock in nanoseconds at the last beat

A lease says only whether another may take over although the owner's lock is held: a process that is stopped
keeps its locks. Safety never rests on it. It is a file, and no row, so that a beat costs no commit.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from cues import clock

if TYPE_CHECKING:
    from cues.store import Store


class Lease:
    """The lease of one owner, held open while it beats. Safe from any thread, but for :meth:`close`.

    In a forked child it does nothing: the owner is the parent.
    """

    def __init__(self, store: Store, owner: bytes) -> None:
        """Make the file; raises OSError where it cannot."""
        self._path = _path(store, owner)
        self._pid = os.getpid()
        self._fd: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.beat()

    def beat(self) -> None:
        """Say that the owner answers. After :meth:`close` nothing happens."""
        if self._fd is not None and self._pid == os.getpid():
            os.pwrite(self._fd, clock.monotonic_ns().to_bytes(8, "big"), 0)

    def close(self) -> None:
        """Give the lease up, and delete its file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if self._pid != os.getpid():
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


def left_s(store: Store, owner: bytes, lease_s: float) -> float:
    """Seconds until the lease of an owner of this boot is over, less than 0 when it is; 0 where there is none."""
    try:
        with open(_path(store, owner), "rb") as file:
            beaten = int.from_bytes(file.read(8), "big")
    except FileNotFoundError:
        return 0.0
    return lease_s - (clock.monotonic_ns() - beaten) / 1e9


def forget(store: Store, owner: bytes) -> None:
    """Delete the lease of an owner that is dead."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(store, owner))


def _path(store: Store, owner: bytes) -> str:
    return os.path.join(store.path, f"lease-{owner.hex()}")
