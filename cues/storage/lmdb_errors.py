"""Errors of LMDB and of the operating system, as Cues errors.

lmdb.MapFullError, a full disk             StoreFull
lmdb.ReadonlyError, no permission          StoreReadOnly
lmdb.CorruptedError, a truncated row       StoreDamaged
FileNotFoundError                          StoreNotFound
the pid of a reader is taken               StoreShared: two pid namespaces
other errors of LMDB or of the system      StoreError; no more files, readers or address space: it says which
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import lmdb

from cues.base.texts import quoted
from cues.errors import StoreDamaged, StoreError, StoreFull, StoreNotFound, StoreReadOnly, StoreShared
from cues.records import sealed
from cues.storage import datafile

DATABASES_MAX: Final = 512
"""Named databases that one process may have open. If the store has more than half as many at its opening, there is
room for so many more than it has. Each possible one costs a read transaction 0.4 ns or more (LMDB clears a table of
them), and each open one 2 ns more. 512 are enough for three stages over 31 partitions, try logs and state included."""

_TOO_MANY_FILES: Final = os.strerror(errno.EMFILE)


def translate(error: BaseException, path: str) -> BaseException:
    """Return the Cues error for an error of LMDB or of the system; return any other error unchanged."""
    if isinstance(error, lmdb.MapFullError):
        return StoreFull(
            f"The map of the store {path} is full; nothing was written.",
            "open it with a larger map_size=, purge queues, or give them retention.",
            path=path,
        )
    if isinstance(error, lmdb.ReadonlyError):
        return StoreReadOnly(
            f"The store {path} was opened read-only, or its files are read-only.",
            "open it without readonly=True, and give this user permission to write its files.",
            path=path,
        )
    if isinstance(error, lmdb.MapResizedError):
        return StoreFull(
            f"The store {path} has grown beyond the map of this process: another process has a larger map_size.",
            "open it again with the same map_size= as that process.",
            path=path,
        )
    if isinstance(error, lmdb.DbsFullError):
        return StoreError(
            f"This process has no room for more queues and states of {path}.",
            f"close the store and open it again: there is room for {DATABASES_MAX} more then. Or use several stores.",
            path=path,
        )
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if isinstance(error, (lmdb.MemoryError, MemoryError)) or number == errno.ENOMEM:
        return StoreError(
            f"The address space of this process has no room for the map of {path}.",
            "pass a smaller map_size=, or raise the limit (ulimit -v).",
            path=path,
        )
    if isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError)):
        return damaged(path, error)
    if isinstance(error, lmdb.VersionMismatchError):
        what = f"was written by another LMDB ({error})"
        return datafile.unknown(Path(path), f"The data file of {path} {what}.", f"{path} {what}.")
    if isinstance(error, lmdb.ReadersFullError):
        return StoreError(f"Too many processes and threads read {path} at once.", "close some of them.", path=path)
    if number in (errno.EMFILE, errno.ENFILE) or (isinstance(error, lmdb.Error) and _TOO_MANY_FILES in text):
        return StoreError(
            f"This process may open no more files, and needs some for the store {path} ({text}).",
            "raise the limit of open files (ulimit -n, or LimitNOFILE= of systemd), or close files and sockets.",
            path=path,
        )
    if isinstance(error, lmdb.Error) and os.strerror(errno.EAGAIN) in text:  # the lock of this pid in lock.mdb
        return StoreShared(
            f"Another process with the same number ({os.getpid()}) has the store {path} open, in another container or"
            " pid namespace. LMDB knows its readers by their numbers.",
            "run all containers that share a store in one pid namespace (docker run --pid=container:NAME; in a pod of"
            " Kubernetes, shareProcessNamespace: true).",
            path=path,
            pid=os.getpid(),
        )
    if number in (errno.EACCES, errno.EROFS, errno.EPERM) or (
        isinstance(error, lmdb.Error) and ("Permission denied" in text or "Read-only file system" in text)
    ):
        return StoreReadOnly(
            f"This user may not use the store {path} as was asked ({text}).",
            "run as the user to whom it belongs; or give this user permission for its directory and files (chmod), or"
            " open it with readonly=True, if this user may read it.",
            path=path,
        )
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or (
        isinstance(error, lmdb.Error) and ("No space left" in text or "File too large" in text)
    ):
        return StoreFull(
            f"The disk of the store {path} is full; nothing was written.", "free space on the disk.", path=path
        )
    if isinstance(error, FileNotFoundError):
        return StoreNotFound(
            f"The files of the store {path} were not found ({text}).", "put the store back at this path.", path=path
        )
    if isinstance(error, (lmdb.Error, OSError)):
        return StoreError(f"The store {path} failed: {error}.", f"run cues check {quoted(path)}.", path=path)
    return error


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Raise errors of LMDB and of the system in the block as Cues errors of the store at ``path``."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise translate(error, path) from error


def described(error: StoreDamaged | struct.error, path: str) -> StoreDamaged:
    """Return the error for damage that a transaction met, with the store's path. A row of a wrong length is damaged."""
    if isinstance(error, StoreDamaged):
        return error if error.path else sealed.placed(error, path)
    return damaged(path, error)


def damaged(path: str, error: BaseException) -> StoreDamaged:
    return StoreDamaged(
        f"The structure of the store {path} is damaged ({error}).",
        f"run cues check {quoted(path)}, and restore a backup.",
        path=path,
    )
