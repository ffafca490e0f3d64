"""The free space of a file system, and the limit below which nothing more is written to its stores.

    programs    an append that would need new blocks of the disk is refused (Allocation in datafile.py)
    graphs      a run stops, with everything committed (engine/disk_guard.py); its last commits may use the reserve

The reserve is for what frees space: a purge and a position need a few pages. A limit of 0 switches the guard off.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from cues.base.texts import size
from cues.errors import DiskLow

LEAST_BYTES: Final = 64 << 20
"""A store grows by up to this at a time."""
MOST_BYTES: Final = 1 << 30
SMALL_SHARE: Final = 10
"""A limit that nobody gave is at most this part (a tenth) of a file system, so that small ones can be used."""


class Space(NamedTuple):
    """The space of a file system that this user may have, in bytes."""

    free: int
    limit: int

    @property
    def is_low(self) -> bool:
        return self.free < self.limit

    @property
    def is_near(self) -> bool:
        """True if there is less than twice the limit."""
        return self.free < 2 * self.limit


def default_limit(total: int) -> int:
    """Return 1 % of a file system of ``total`` bytes, from 64 MiB to 1 GiB; of a small one a tenth."""
    return min(max(LEAST_BYTES, min(total // 100, MOST_BYTES)), total // SMALL_SHARE)


def look(path: str | os.PathLike[str], min_free: int | None = None) -> Space:
    """Return the free space where ``path`` is, and the limit: ``min_free``, or the default of that file system.

    A file system that tells no size has no limit.
    """
    status = os.statvfs(path)
    total = status.f_blocks * status.f_frsize
    free = status.f_bavail * status.f_frsize
    limit = default_limit(total) if min_free is None else min_free
    return Space(free, limit if total else 0)


def low(path: str | Path, space: Space, outcome: str) -> DiskLow:
    """Return the error of a disk below its limit. ``outcome`` says what was done."""
    return DiskLow(
        f"The disk of the store {path} has {size(space.free)} free, less than min_free ({size(space.limit)});"
        f" {outcome}.",
        "free space on that disk, or drop messages (cues purge; then cues compact gives space back). min_free"
        " (--min-free) sets the limit; 0 uses the disk to its end.",
        path=str(path),
        free=space.free,
        limit=space.limit,
    )
