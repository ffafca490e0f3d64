"""Growth of the memory map: a map that is full becomes larger by itself, in every process that has the store open.

LMDB can exchange the map of a process only while the process has no transaction: the address of the map changes. So:

1. A commit that finds the map full is undone. The thread takes the mutex of the writers and the gate of the readers,
   and waits until no transaction of this process is under way.
2. It takes the lock locks.MAP, which every process takes before it maps a store for writing. (The map of a
   ``"process"`` store is the length of its file. A smaller map of a process that knows an older size would cut it.)
3. If another process has made the map larger, the thread takes that size. Otherwise it doubles the map, and notes the
   size in the format record.
4. The commit runs again.

A process whose map is too small for the last commit of another process does 1 to 3 when it begins a transaction.

A death at any point leaves a size in the record that is too small at most. LMDB keeps the size of the map in its meta
pages too, and an opening takes the larger one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import lmdb

from cues import faults
from cues.base.events import log
from cues.errors import Closed, StoreFull
from cues.storage import datafile, free_space, locks
from cues.storage.format_record import record_of, write_size
from cues.storage.lmdb_errors import translate
from cues.storage.read_slots import read_slots
from cues.storage.writer_lock import WriterLock

_NAP_S: Final = 0.001
_ROOM_BYTES_MIN: Final = 1 << 20
"""Free bytes of the disk below which a larger map is of no use."""


class MappedStore(Protocol):
    """The state of a store in this process that a change of the map needs (environment.py)."""

    path: Path
    durability: str
    readonly: bool
    lockless: bool
    state: str
    env: Any
    map_bytes: int
    gate: Any
    remapping: bool
    calls: int
    timeout_s: float
    locks: locks.LockFile | None
    writer_lock: WriterLock | None


def fits_now(shared: MappedStore, error: BaseException, seen: int) -> bool:
    """Give this process a larger map after ``error``; return False if a larger map would not help.

    ``seen`` is the size of the map before the transaction that failed. The transaction must have ended. Raises
    :class:`StoreFull` if the map cannot grow.
    """
    if shared.lockless or shared.env is None or shared.state != "open":
        return False
    if isinstance(error, lmdb.MapResizedError):
        with locked(shared), _alone(shared):
            size = size_of_others(shared)
            if size > shared.map_bytes:
                _remap(shared, size)
                return True
            return shared.map_bytes != seen
    if not isinstance(error, lmdb.MapFullError) or shared.writer_lock is None:
        return False
    with locked(shared):
        with _alone(shared):
            if shared.map_bytes != seen:  # another thread was faster
                return True
            size = size_of_others(shared)
            if size > shared.map_bytes:
                _remap(shared, size)
                return True
            with shared.env.begin() as txn:
                limit = record_of(txn).get("max_map_size")
            size = 2 * shared.map_bytes if limit is None else min(2 * shared.map_bytes, limit)
            if size <= shared.map_bytes:
                raise StoreFull(
                    f"The store {shared.path} has reached its max_map_size of {limit:,} bytes; nothing was written.",
                    "open it with a larger max_map_size=, purge queues, or give them retention.",
                    path=str(shared.path),
                )
            _need_room(shared)
            before = shared.map_bytes
            _remap(shared, size)
        faults.point("map.grown")
        write_size(shared.writer_lock, size)
        faults.point("map.noted")
        log.info("%s: the map was full; it has %d MiB now, before %d", shared.path, size >> 20, before >> 20)
    return True


@contextlib.contextmanager
def locked(shared: MappedStore) -> Iterator[None]:
    """Hold the lock of the map, if this process may take locks."""
    if shared.locks is None:
        yield
        return
    deadline = time.monotonic() + shared.timeout_s
    while not shared.locks.try_lock(locks.MAP):
        if time.monotonic() > deadline:
            pid = shared.locks.holder(locks.MAP) or os.getpid()
            raise StoreFull(
                f"The map of the store {shared.path} is too small, and process {pid} ({locks.process_state(pid)}) has"
                f" been changing its size for {shared.timeout_s:g} s; nothing was written.",
                f"kill -CONT {pid} if it was stopped, kill {pid} if it hangs.",
                path=str(shared.path),
            )
        time.sleep(_NAP_S)
    try:
        yield
    finally:
        shared.locks.unlock(locks.MAP)


def size_of_others(shared: MappedStore) -> int:
    """Return the size of the largest map that a process has, as far as the data file shows it."""
    data = shared.path / "data.mdb"
    return max(datafile.map_bytes(shared.path), data.stat().st_size if shared.durability == "process" else 0)


@contextlib.contextmanager
def _alone(shared: MappedStore) -> Iterator[None]:
    """Wait until this process has no transaction, and keep it so."""
    deadline = time.monotonic() + shared.timeout_s
    while True:
        with contextlib.nullcontext() if shared.writer_lock is None else shared.writer_lock.exclusive(), shared.gate:
            if shared.state != "open":
                raise Closed(f"The store {shared.path} is closed.", "use it before close(), or inside its block.")
            reading = _reading(shared)
            if not reading and not shared.calls:
                shared.remapping = True
                try:
                    yield
                finally:
                    shared.remapping = False
                return
        # Both locks are given back meanwhile: a thread that reads may wait for the writers' mutex.
        if threading.get_ident() in reading or time.monotonic() > deadline:
            raise StoreFull(
                f"The map of the store {shared.path} ({shared.map_bytes:,} bytes) is too small, and cannot change"
                " while this process reads the store; nothing was written.",
                "end the long read (a backup, a check), or open the store with a larger map_size=.",
                path=str(shared.path),
            )
        time.sleep(_NAP_S)


def _reading(shared: MappedStore) -> set[int]:
    """Return the threads of this process that have a transaction, from LMDB's table of readers."""
    mine = [slot for slot in read_slots(shared.env) if slot.pid == os.getpid()]
    return {slot.thread for slot in mine if slot.commit is not None}


def _need_room(shared: MappedStore) -> None:
    free = free_space.look(shared.path).free
    if free < _ROOM_BYTES_MIN:
        raise StoreFull(
            f"The map of the store {shared.path} is full ({shared.map_bytes:,} bytes), and its disk has no room for a"
            f" larger one ({free:,} bytes free); nothing was written.",
            "free space on the disk, purge queues, or move the store.",
            path=str(shared.path),
        )


def _remap(shared: MappedStore, size: int) -> None:
    """Exchange the map. This process has no transaction.

    LMDB gives up the old map first, and cannot go back. So what may fail is tried before.
    """
    try:
        mmap.mmap(-1, size - shared.map_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0).close()
    except (OSError, ValueError, OverflowError) as error:
        raise StoreFull(
            f"The map of the store {shared.path} ({shared.map_bytes:,} bytes) is too small, and the address space of"
            f" this process has no room for one of {size:,}; nothing was written.",
            "raise the limit (ulimit -v unlimited), and open the store again.",
            path=str(shared.path),
        ) from error
    data = shared.path / "data.mdb"
    if shared.durability == "process" and not shared.readonly and data.stat().st_size < size:
        try:
            os.truncate(data, size)
        except OSError as error:
            raise translate(error, str(shared.path)) from error
    try:
        shared.env.set_mapsize(size)
    except lmdb.Error as error:
        try:
            shared.env.set_mapsize(shared.map_bytes)
        except lmdb.Error:
            shared.state = "closed"  # it has no map, and must not be used any more
        raise translate(error, str(shared.path)) from error
    shared.map_bytes = size
