"""The door to the files of a store: each of them is opened here, after a look at what it is.

Another user may own a store, and may put a link, a device or a FIFO in the place of a file. A process that opens the
store would then write to a file of its own user, or wait for ever. So a file of a store is

    existing     opened without following a link (O_NOFOLLOW), without waiting (O_NONBLOCK), and refused with
                 StoreForeign unless it is a regular file; in ``bells/``, unless it is a FIFO
    new          made with O_EXCL, so that it is a file that this process has made
    replaced     written as a new file, and renamed when it is complete

A new store is private: files of mode 0600 in directories of 0700. A file or directory that comes later takes its
permissions from ``data.mdb``, so that a store which its owner opened to a group stays open to it (:func:`mode_of`). It
takes the owner and the group too, as far as the system allows it: a lock file that root made while looking at a store
would shut its owner out.

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
    if flags & os.O_CREAT:
        mode = mode_of(path) if mode is None else mode
        if not flags & os.O_EXCL:
            give(path, mode)
    try:
        fd = os.open(path, flags | _ALWAYS, mode or 0)
    except OSError:
        look(path, kind)  # of a link, a directory or a socket: its kind says more than the number of the error
        raise
    found = os.fstat(fd).st_mode
    if stat.S_IFMT(found) != kind:
        os.close(fd)
        raise _foreign(path, found, kind)
    if flags & os.O_EXCL:
        _own(fd, path)
    return fd


def give(path: Path, mode: int | None = None) -> None:
    """Make an empty file in a store of another user if it is missing: it has its owner before it has its name.

    Nothing is made in a store of this user, or where there is none.
    """
    data = _data_beside(path)
    if data is None or (data.st_uid, data.st_gid) == (os.geteuid(), os.getegid()) or os.path.lexists(path):
        return
    unfinished = _unfinished(path)
    unfinished.unlink(missing_ok=True)
    try:
        os.close(opened(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=mode))
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _own(fd: int, path: Path) -> None:
    """Give a new file the owner and the group of the store's data file.

    It goes by the descriptor: at the path, the owner of the directory may have put a link to a file of root since.
    """
    data = _data_beside(path)
    found = os.fstat(fd)
    if data is None or (data.st_uid, data.st_gid) == (found.st_uid, found.st_gid):
        return
    with contextlib.suppress(OSError):  # not root, and no member of the group; or a disk that has no owners
        os.fchown(fd, data.st_uid if os.geteuid() == 0 else -1, data.st_gid)


def _data_beside(path: Path) -> os.stat_result | None:
    """Return what the system says of the data file beside a file, or beside the folder that it is in."""
    for place in (path.parent, path.parent.parent):
        with contextlib.suppress(OSError):
            found = (place / "data.mdb").lstat()
            if stat.S_ISREG(found.st_mode):
                return found
    return None


def mode_of(path: Path) -> int:
    """Return the permissions of a new file beside a data file, or in a folder beside it: those of the data file."""
    data = _data_beside(path)
    return 0o600 if data is None else data.st_mode & 0o666


def folder(path: Path) -> None:
    """Make a directory of a store, of backups or of a copy, if it is missing; its parents get the usual permissions."""
    mode = mode_of(path / "any file")
    if not path.is_dir():
        path.mkdir(mode | (mode & 0o444) >> 2, parents=True, exist_ok=True)
        fd = opened(path, os.O_RDONLY | os.O_DIRECTORY, stat.S_IFDIR)
        _own(fd, path)
        os.close(fd)


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
    unfinished = _unfinished(path)
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


def _unfinished(path: Path) -> Path:
    """The name of a file of this thread until it is complete."""
    return path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}.part")


def fifo(path: Path) -> int:
    """Make a FIFO in place of what is at ``path``, and open both of its ends: without a writer, it has ended."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, mode_of(path))
    fd = opened(path, os.O_RDWR, stat.S_IFIFO)
    _own(fd, path)
    return fd


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
