"""The door to the files of a store: each of them is opened here, after a look at what it is.

Another user may own a store, and may put a link, a device or a FIFO in the place of a file. A process that opens the
store would then write to a file of its own user, or wait for ever. So a file of a store is

    existing     opened without following a link (O_NOFOLLOW), without waiting (O_NONBLOCK), and refused with
                 StoreForeign unless it is a regular file; in ``bells/``, unless it is a FIFO
    new          made with O_EXCL, so that it is a file that this process has made
    replaced     written as a new file, and renamed when it is complete

A new store is private: files of mode 0600 in directories of 0700. A file or directory that comes later takes its
permissions from ``data.mdb``, so that a store which its owner opened to a group stays open to it (:func:`mode_of`).

A file of a store never gets the number 0, 1 or 2, on which libraries write their messages: :func:`reserve`.

LMDB opens its two files itself, so lmdb_map.py looks at them before (:func:`look`).

Not guaranteed: that a link is noticed which the owner puts there between that look and LMDB's opening; and that a hard
link is noticed (the system makes none to files of others, see ``fs.protected_hardlinks``). The directory of a store may
be a link.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path
from typing import BinaryIO, Final

from cues.errors import StoreForeign

_ALWAYS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a regular file",
}


def opened(path: Path, flags: int, kind: int = stat.S_IFREG, mode: int | None = None) -> int:
    """Open a file of a store and return its descriptor. Raises :class:`StoreForeign` unless it is of ``kind``.

    ``mode`` holds the permissions of a file that is made, that of the store by default; the umask takes some away.
    """
    reserve()
    if mode is None:
        mode = mode_of(path) if flags & os.O_CREAT else 0
    try:
        fd = os.open(path, flags | _ALWAYS, mode)
    except OSError:
        look(path, kind)  # of a link, a directory or a socket: its kind says more than the number of the error
        raise
    found = os.fstat(fd).st_mode
    if stat.S_IFMT(found) != kind:
        os.close(fd)
        raise _foreign(path, found, kind)
    return fd


def mode_of(path: Path) -> int:
    """Return the permissions of a new file beside a data file, or in a folder beside it: those of the data file."""
    for place in (path.parent, path.parent.parent):
        with contextlib.suppress(OSError):
            return (place / "data.mdb").stat().st_mode & 0o666
    return 0o600


def folder(path: Path) -> None:
    """Make a directory of a store, of backups or of a copy, if it is missing; its parents get the usual permissions."""
    mode = mode_of(path / "any file")
    path.mkdir(mode | (mode & 0o444) >> 2, parents=True, exist_ok=True)


def opener(path: str, flags: int) -> int:
    """The ``opener=`` of :func:`open` for a shared directory: others may have put files there, and read its files."""
    return opened(Path(path), flags, mode=0o666)


def private(path: str, flags: int) -> int:
    """The ``opener=`` of :func:`open` for a file with messages that is no file of a store: one of a backup."""
    return opened(Path(path), flags)


def reading(path: Path) -> BinaryIO:
    """Open a file of a store for reading, without a buffer."""
    return os.fdopen(opened(path, os.O_RDONLY), "rb", buffering=0)


def read_bytes(path: Path) -> bytes:
    with reading(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the text that :func:`replace` wrote."""
    return os.fsdecode(read_bytes(path))


def new(path: Path) -> BinaryIO:
    """Make a file. A file of this name was left by a process that was killed, and is deleted."""
    path.unlink(missing_ok=True)
    return os.fdopen(opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b")


def replace(path: Path, text: str, durable: bool = False) -> None:
    """Replace a file: after a death it is the old one or the new one; with ``durable``, after a power cut too.

    The name in the directory is durable only after :func:`datafile.sync_directory`.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}.part")
    try:
        with new(unfinished) as file:
            file.write(os.fsencode(text))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def fifo(path: Path) -> int:
    """Make a FIFO in place of what is at ``path``, and open both of its ends: without a writer, it has ended."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, mode_of(path))
    return opened(path, os.O_RDWR, stat.S_IFIFO)


def look(path: Path, kind: int = stat.S_IFREG) -> None:
    """Raise :class:`StoreForeign` if there is something at ``path`` that is not of ``kind``."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_IFMT(mode) != kind:
            raise _foreign(path, mode, kind)


def reserve() -> None:
    """Open ``/dev/null`` on those of the descriptors 0 to 2 that are closed.

    A process that was started with them closed (``>&-``) would give their numbers to the next files that it opens.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            if fd > 2:  # another thread was faster
                os.close(fd)
            else:
                os.set_inheritable(fd, True)


def _foreign(path: Path, mode: int, kind: int) -> StoreForeign:
    return StoreForeign(
        f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, and should be {_KINDS[kind]}. It was not opened.",
        "find out who made it; put the file itself there, or use another store (the directory of a store may be a link,"
        " its files may not).",
        path=str(path.parent),
    )
