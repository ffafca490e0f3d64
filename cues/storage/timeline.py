"""Timelines: they distinguish the messages of a copied store from those that its original appended after the copy.

    file mark         inode and change time of the file "locks", inode of "data.mdb"
    row ·line·<log>   [[first index, 8 random bytes], …]

A copy of a store has the same queues, and the next message of each gets the index that the original gave to
another one. So each opening of a store for writing checks three conditions:

    1. the files are those that ``mark`` names: cp, rsync, tar and a restore make other files, or change the change
       time of "locks", which nothing else changes; mv and rename on one file system do not
    2. the store has as many commits as the word in ``wake`` counted: no older data file was copied over it
    3. no power cut removed commits (a ``"process"`` store that was not closed)

If a condition does not hold, a timeline begins: messages from the next index of each log on have other delivery
hashes. Earlier messages keep theirs, and no position changes. So an unnecessary timeline costs only these rows.

Not guaranteed: that a file system which is put back (a snapshot of a volume or of a virtual machine) is
noticed. Then the seals in positions, and in the rows of targets, show the difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import xxhash

from cues import codec
from cues.base import names
from cues.records import sealed
from cues.records.log_row import LogRow
from cues.storage import door
from cues.storage.transaction import StoreTransaction

FILE: Final = "mark"
_ID_BYTES: Final = 8

Line = Sequence[tuple[int, bytes]]
"""The timelines of a log: first index and id of each, in order. Empty while there is only the original one."""


def same(directory: Path, last: int, counted: int) -> bool:
    """Return whether the store has the files and the number of commits that it had after its last write.

    ``last`` is the number of its last commit, ``counted`` the number in ``wake``, which is one more if a writer had
    nothing to write.
    """
    try:
        noted = door.read_text(directory / FILE)
    except FileNotFoundError:
        return False
    return noted == _files(directory) and counted <= last + 1


def is_copy(directory: Path) -> bool:
    """Return whether the files ``locks`` and ``data.mdb`` are others than those of the last opening.

    Only their inodes count: a change of permissions is not a copy, and neither is a mount under another device number.
    """
    try:
        noted = door.read_text(directory / FILE).split()
        locks, data = inodes(directory)
    except FileNotFoundError:
        return False
    return len(noted) == 3 and noted[0] != locks and noted[2] != data


def mark(directory: Path) -> None:
    """Note the files that the store has now. Called after the commit of a new timeline, if there is one.

    The name of the directory is durable before that, and so are those of the directories above.
    """
    door.replace(directory / FILE, _files(directory))


def begin(txn: StoreTransaction, logs: Iterable[tuple[str, LogRow]]) -> None:
    """Begin a timeline on every one of ``logs``, in a write transaction."""
    id = os.urandom(_ID_BYTES)
    for log, row in tuple(logs):
        if row.next == 1:
            continue
        line = [*read(txn, log), (row.next, id)]
        # If two begin at one index, only the later counts. Timelines without messages are dropped.
        nexts = [first for first, _ in line[1:]]
        kept = [pair for pair, after in zip(line, nexts) if after > max(pair[0], row.first)] + line[-1:]
        sealed.put(txn, names.timeline_key(log), codec.pack([list(pair) for pair in kept]))


def read(txn: StoreTransaction, log: str) -> Line:
    """Return the timelines of a log. Raises :class:`StoreDamaged`."""
    raw = txn.get(key := names.timeline_key(log))
    return () if raw is None else unpack(key, raw, log)


def unpack(key: bytes, raw: bytes, log: str) -> Line:
    """Decode the timelines of a log. Raises :class:`StoreDamaged`."""
    line = sealed.unseal_value(key, raw, f"row of the timelines of queue {log}", [[int, bytes], ...])
    return tuple((first, id) for first, id in line)


def identity(line: Line, queue: bytes, index: int) -> bytes:
    """Return the identity of a queue for the delivery hash, for messages up to ``index``."""
    for first, id in reversed(line):
        if first <= index:
            return xxhash.xxh3_64_digest(queue + id)
    return queue


def inodes(directory: Path) -> tuple[str, str]:
    """Return the inodes of the files ``locks`` and ``data.mdb``. Raises FileNotFoundError."""
    return str((directory / "locks").stat().st_ino), str((directory / "data.mdb").stat().st_ino)


def _files(directory: Path) -> str:
    locks, data = ((directory / file).stat() for file in ("locks", "data.mdb"))
    return f"{locks.st_ino} {locks.st_ctime_ns} {data.st_ino}"
