"""Leases: files with the time at which their owner was last alive.

    lease-<owner>     8 bytes, the monotonic clock in nanoseconds at the last beat; for a running graph, the
                      figures of its processors follow, as JSON

A lease only tells whether another process may take over while the owner's lock is held, because a stopped process
keeps its locks. Safety does not depend on it. It is a file, not a row, so that a beat costs no commit.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, Final

from cues.base import clock
from cues.storage import door
from cues.storage.base_store import BaseStore
from cues.storage.lmdb_errors import translated

Figures = dict[str, Any]
"""Figures of a processor: its counters (``Counters.to_dict``), and the mean ``call_s`` of a call."""
PROCESS: Final = ""
"""The id under which the figures of the process itself are."""


class Lease:
    """The lease of one owner, open while it beats. Safe from any thread, except :meth:`close`.

    In a forked child it does nothing, because the owner is the parent.
    """

    def __init__(self, store: BaseStore, owner: bytes) -> None:
        """Make the file. Raises :class:`StoreError`, such as StoreFull, if that fails."""
        self._path, self._store = _path(store, owner), store.path
        self._pid = os.getpid()
        with translated(self._store):
            self._fd: int | None = door.opened(self._path, os.O_RDWR | os.O_CREAT)
        self.beat()

    def beat(self, figures: dict[str, Figures] | None = None) -> None:
        """Note that the owner is alive, and the figures of its processors. After :meth:`close`, do nothing.

        Raises :class:`StoreError` if it cannot be written.
        """
        if self._fd is not None and self._pid == os.getpid():
            text = b"" if figures is None else json.dumps(figures).encode()
            with translated(self._store):
                os.pwrite(self._fd, clock.monotonic_ns().to_bytes(8, "big") + text, 0)
                os.ftruncate(self._fd, 8 + len(text))

    def close(self) -> None:
        """End the lease and delete its file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if self._pid == os.getpid():
                self._path.unlink(missing_ok=True)


def left_s(store: BaseStore, owner: bytes, lease_s: float) -> float:
    """Return the seconds until the lease of an owner of this boot ends; negative after its end, 0 without a lease."""
    try:
        beaten = int.from_bytes(door.read_bytes(_path(store, owner))[:8], "big")
    except FileNotFoundError:
        return 0.0
    return lease_s - (clock.monotonic_ns() - beaten) / 1e9


def beaten_ns(store: BaseStore, owner: bytes) -> int:
    """Return the wall time of the last beat of an owner, also of an earlier boot; 0 without a lease."""
    try:
        return _path(store, owner).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def figures(store: BaseStore, owner: bytes) -> dict[str, Figures]:
    """Return the figures of an owner's processors at its last beat, by id; empty if it noted none."""
    try:
        text = door.read_bytes(_path(store, owner))[8:]
        return json.loads(text) if text else {}
    except (OSError, ValueError):  # deleted, not readable for this user, or read in the middle of a beat
        return {}


def of_process() -> Figures:
    """Return the seconds of processor time that this process has used, and the bytes of memory that it has now.

    Where the system does not tell the memory now (not Linux), it is the most that the process ever had.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            memory = int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"pid": os.getpid(), "cpu_s": time.process_time(), "memory_bytes": memory}


def forget(store: BaseStore, owner: bytes) -> None:
    """Delete the lease of an owner that is dead."""
    _path(store, owner).unlink(missing_ok=True)


def _path(store: BaseStore, owner: bytes) -> Path:
    return Path(store.directory, f"lease-{owner.hex()}")
