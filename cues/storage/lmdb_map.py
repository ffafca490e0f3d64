"""Opening LMDB: the size of its memory map, and users who may not write its lock file.

The map is address space, not disk: the data file is sparse and grows as it is written. Where the address space of a
process is limited, a map of the default size shrinks until it fits.

A user without permission to write ``lock.mdb`` cannot enter LMDB's table of readers, so a writer would overwrite pages
under that user's transactions. Such a user may read a store only while no process has it open for writing.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any, Final

import lmdb

from cues.base.events import log
from cues.errors import StoreReadOnly
from cues.storage import door, locks
from cues.storage.lmdb_errors import DATABASES_MAX

MAP_BYTES: Final = 64 << 30
"""Default size of the map, in bytes."""
MAP_BYTES_MIN: Final = 1 << 20
SPARE_BYTES: Final = 64 << 20
"""Size of a map for a short read, beyond the bytes used."""


def open_lmdb(path: Path, **options: Any) -> Any:
    """Open LMDB in a directory, or with ``subdir=False`` the data file at ``path``, after a look at its files."""
    door.reserve()
    files = (path / "data.mdb", path / "lock.mdb") if options.get("subdir", True) else (path,)
    for file in files:
        door.look(file)
    if options.get("lock", True) and len(files) > 1:
        door.give(files[1])  # LMDB would make it as a file of this user
    return lmdb.open(os.fsencode(path), lib_version=0, mode=door.mode_of(files[0]), **options)


def open_map(
    path: Path, durability: str, size: int, is_default: bool, readonly: bool, lock: bool, databases: int
) -> Any:
    """Open LMDB; with ``is_default``, halve the size of the map until it fits into the address space.

    ``databases`` is how many named databases the process may have open.
    """
    # Without posix_fallocate a full disk is a SIGBUS, so the map is then not writable.
    writemap = durability == "process" and hasattr(os, "posix_fallocate") and not readonly
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    wanted = size
    while True:
        try:
            env = open_lmdb(
                path,
                map_size=size,
                readonly=readonly,
                create=not readonly,
                lock=lock,
                sync=durability == "disk",
                metasync=durability == "disk",
                writemap=writemap,
                max_dbs=databases,
                max_readers=1024,
                max_spare_txns=0,  # closing them in a forked child would free the parent's reader slots
            )
        except (lmdb.MemoryError, MemoryError):
            if not is_default or size <= MAP_BYTES_MIN:
                raise
            size //= 2
        else:
            if size != wanted:
                log.warning(
                    "%s: the address space (limit %s bytes) has no room for a map of %d GiB; using %d MiB",
                    path,
                    limit if limit != resource.RLIM_INFINITY else "unknown",
                    wanted >> 30,
                    size >> 20,
                    store=str(path),
                )
            return env


def databases_wanted(env: Any) -> int:
    """Return the number of named databases for which a process should have room in this store."""
    with env.begin() as txn:
        if txn.stat()["entries"] <= DATABASES_MAX // 2:  # of databases and of rows
            return DATABASES_MAX
        cursor = txn.cursor()
        cursor.set_range(b"\x01")  # the keys of rows begin with NUL
        count = sum(1 for _ in cursor.iternext(keys=True, values=False))
        return count + DATABASES_MAX if count > DATABASES_MAX // 2 else DATABASES_MAX


def open_map_alone(path: Path, size: int) -> Any:
    """Open LMDB without its locks, for durable commits; the map shrinks to the file's size if needed."""
    for map_size in (size, (path / "data.mdb").stat().st_size + SPARE_BYTES):
        try:
            return open_lmdb(path, map_size=map_size, create=False, max_dbs=1 << 16, lock=False)
        except (lmdb.MemoryError, MemoryError) as error:
            failed = error
    raise failed


def may_lock(path: Path) -> bool:
    """Return whether this user may write LMDB's lock file, which holds the table of readers."""
    file = path / "lock.mdb"
    return os.access(file if file.exists() else path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def refuse_written(path: Path) -> None:
    """Raise :class:`StoreReadOnly` if a process has the store open for writing."""
    pid = locks.opened_by(path / "locks")
    if pid is not None:
        raise StoreReadOnly(
            f"Process {pid} has the store {path} open for writing, and this user may not write its lock file. Without"
            " that file, pages would be overwritten while they are read.",
            f"run chmod a+rw {path}/lock.mdb (it holds no messages), or read after process {pid} has ended.",
            path=str(path),
        )
