"""POSIX locks on the bytes of one private file, and their holders.

The system releases a POSIX lock when its process ends, in any way. So ownership, doorbell slots and the
writer lock all use it. It has two traps, which this module avoids:

* A process loses it when it closes *any* descriptor of the file. So each process has one descriptor for
  each file, kept in a registry by device and inode.
* It does not exclude the threads of its own process. So the registry refuses a second request from the
  same process.

The file is empty: a lock is a byte offset, and :func:`offset_of` gives each name its offset.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import sys
import threading
from pathlib import Path
from typing import Final

import xxhash

from cues.storage import door

REGISTER: Final = 0
"""Held while a process opens a store for writing, joins its writers, or leaves."""
WRITER: Final = 1
"""Held around a write transaction while several processes write."""
MAP: Final = 2
"""Held while a process maps the data file for writing, or changes the size of the map (map_growth.py)."""
SLOTS: Final = 1 << 12
"""The doorbell slots, one byte each."""
WRITERS: Final = 1 << 24
"""Process p, from its first write to a store until it closes it, holds byte WRITERS + p."""
WRITERS_END: Final = WRITERS + (1 << 24)
OPENED: Final = WRITERS_END
"""Process p, while it has the store open for writing, whether it writes or not, holds byte OPENED + p."""
OPENED_END: Final = OPENED + (1 << 24)
_NAMED: Final = 1 << 40
"""Locks of names are between this offset and the end of the range that a 64-bit off_t can name."""

_FLOCK: Final = struct.Struct("qqihh") if sys.platform == "darwin" else struct.Struct("hhqqi4x")

_registry: dict[tuple[int, int], LockFile] = {}
_registry_lock = threading.RLock()
"""This lock and the guard of a file may be taken again by a signal handler: what they protect changes at once."""


def offset_of(name: str) -> int:
    """Return the offset of the lock of ``name``: 62 bits of its hash."""
    return _NAMED + (xxhash.xxh3_64_intdigest(name.encode()) >> 2)


class LockFile:
    """The locks of one file. Made by :func:`open_locks`, which shares it within the process."""

    def __init__(self, fd: int, key: tuple[int, int]) -> None:
        self._fd = fd
        self._key = key
        self._users = 0
        self._mine: set[int] = set()
        self._guard = threading.RLock()

    def try_lock(self, offset: int) -> bool:
        """Take the lock at ``offset`` unless a process, also this one, holds it. Never waits."""
        with self._guard:
            fd = self._open_fd()
            if offset in self._mine:
                return False
            # Noted first: if a signal handler raises, the lock is still given back.
            self._mine.add(offset)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
            except BaseException as error:
                self._give_back(offset)
                if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                raise
            return True

    def unlock(self, offset: int) -> None:
        with self._guard:
            if offset in self._mine:
                self._give_back(offset)

    def _give_back(self, offset: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, offset)
        self._mine.discard(offset)

    def mine(self, offset: int) -> bool:
        return offset in self._mine

    def holder(self, start: int, stop: int | None = None) -> int | None:
        """Return the pid of another process that holds a lock in [start, stop), or None.

        The pid is 0 if the process is in another pid namespace, as in another container.
        """
        fd = self._open_fd()
        length = 1 if stop is None else stop - start
        if sys.platform == "darwin":
            asked = _FLOCK.pack(start, length, 0, fcntl.F_WRLCK, 0)
            _, _, pid, kind, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        else:
            asked = _FLOCK.pack(fcntl.F_WRLCK, 0, start, length, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid

    def close(self) -> None:
        """Give up one use; the last one closes the descriptor and with it every lock."""
        with _registry_lock, self._guard:
            self._users -= 1
            if self._users == 0:
                _registry.pop(self._key, None)
                os.close(self._fd)
                # The number is soon another file's: a late call here must not lock or unlock that one.
                self._fd = -1
                self._mine.clear()

    def _open_fd(self) -> int:
        """Return the descriptor. Raises OSError, as the system does, after the last :meth:`close`."""
        fd = self._fd
        if fd < 0:
            raise OSError(errno.EBADF, "the lock file is closed")
        return fd


def open_locks(path: Path) -> LockFile:
    """Open the lock file at ``path``, and make it if it is missing. Raises OSError if that fails."""
    with _registry_lock:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            shared = _registry.get((status.st_dev, status.st_ino))
            if shared is not None:
                shared._users += 1
                return shared
        fd = door.opened(path, os.O_RDWR | os.O_CREAT)
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        lock_file = _registry[key] = LockFile(fd, key)
        lock_file._users = 1
        return lock_file


def opened_by(path: Path) -> int | None:
    """Return the pid of a process that has the store open for writing; ``path`` is the store's lock file.

    It is for a user who may only read that file. A process that holds locks of the file must not call it: closing
    the file would release them.
    """
    try:
        fd = door.opened(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return LockFile(fd, (0, 0)).holder(OPENED, OPENED_END)
    finally:
        os.close(fd)


def _forget_in_child() -> None:
    """Empty the registry in a forked child, which inherits no lock."""
    global _registry_lock
    for inherited in _registry.values():
        inherited._guard = threading.RLock()  # another thread of the parent may have held it
    _registry.clear()
    _registry_lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_in_child)

_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for the disk",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead, not reaped",
    "I": "sleeping",
    "U": "waiting for the disk",
}


def process_state(pid: int) -> str:
    """Return the state of process ``pid``: "running", "sleeping", "stopped", …, "gone" or "unknown".

    Number 0 is that of a process in another pid namespace (:meth:`LockFile.holder`).
    """
    if pid == 0:
        return "in another container"
    try:
        if sys.platform == "linux":
            text = Path(f"/proc/{pid}/stat").read_text()
            letter = text.rpartition(")")[2].split()[0]
        else:
            import subprocess

            command = ["ps", "-o", "state=", "-p", str(pid)]
            letter = subprocess.run(command, capture_output=True, text=True).stdout.strip()[0]
    except (OSError, IndexError):
        return "gone"
    return _STATES.get(letter, "unknown")
