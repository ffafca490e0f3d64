"""Exclusive use of a store: for a replacement of the data file, such as a compaction.

    with alone(path, Store) as store: …     no other process and no other handle has the store open

1. Lock the register (locks.REGISTER), and check that no process in it has the store open for writing.
2. Every open environment holds a shared lock on one byte of LMDB's lock file. Lock this byte exclusively. This also
   finds readers that have no transaction under way.

LMDB itself does not lock here: these two locks replace its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from cues import faults
from cues.errors import AlreadyRunning, StoreError
from cues.storage import door, environment, locks, open_mark
from cues.storage.base_store import BaseStore, internal_handle
from cues.storage.datafile import sync_directory
from cues.storage.environment import Environment
from cues.storage.format_record import read_format
from cues.storage.lmdb_errors import translate
from cues.storage.lmdb_map import open_lmdb, open_map_alone

S = TypeVar("S", bound="BaseStore")

_LMDB_LOCK: Final = 0
"""The byte of ``lock.mdb`` that each process holds (shared) while it has the environment open."""


@contextlib.contextmanager
def alone(path: str | os.PathLike[str], kind: type[S]) -> Iterator[S]:
    """Give a handle on a store that no process has open, not even this one.

    Raises :class:`AlreadyRunning`, with its pid, if a process has the store open for reading or writing. A process
    that opens the store meanwhile waits until the end; so does any opening of a store in this process. Commits are
    durable, whatever the durability of the store.
    """
    place = Path(path)
    with environment.opening_lock:
        key = environment.directory_key(place, readonly=True)
        kind(place).close()  # an ordinary opening refuses a foreign data file, and checks a suspect store
        shared = environment.environment_of(key)
        if shared is not None:
            raise StoreError(f"This process itself has the store {path} open.", "close it first.", path=str(path))
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_held_alone(place, "locks", locks.REGISTER, locks.OPENED, locks.OPENED_END))
                held.enter_context(_held_alone(place, "lock.mdb", _LMDB_LOCK, _LMDB_LOCK, _LMDB_LOCK + 1))
                record = read_format(place, lock=False)
                assert record is not None  # it was opened above
                shared = Environment(place.resolve(), key, record["durability"], readonly=False)
                held.callback(shared.close, clean=False)
                shared.id, shared.file = record["id"], environment.file_key(place)
                shared.env = open_map_alone(place, record["map_size"])
            except (lmdb.Error, OSError) as error:
                raise translate(error, str(path)) from error

            def transact(pages: int, work: Callable[..., Any], *args: Any) -> Any:
                with shared.env.begin(write=True) as txn:
                    return work(txn, *args)

            yield internal_handle(kind, shared, transact)


def adopt(path: str | os.PathLike[str]) -> None:
    """Make a store of a copy that :func:`environment.refuse_copy` refuses. The caller has checked it.

    The data file is rewritten without its list of free pages: nothing shows whether a free page of a copy is in use.
    Each step may be repeated after a death. Raises :class:`AlreadyRunning` if a process has the copy open.
    """
    place = Path(path)
    with (
        environment.opening_lock,
        _held_alone(place, "locks", locks.REGISTER, locks.OPENED, locks.OPENED_END),
        _held_alone(place, "lock.mdb", _LMDB_LOCK, _LMDB_LOCK, _LMDB_LOCK + 1),
    ):
        new = place / "data.mdb.adopted"
        try:
            env = open_lmdb(place, readonly=True, create=False, lock=False, max_dbs=0)
            with contextlib.closing(env), door.new(new) as file:
                env.copyfd(file.fileno(), compact=True)
                os.fsync(file.fileno())
        except (lmdb.Error, OSError) as error:
            new.unlink(missing_ok=True)
            raise translate(error, str(path)) from error
        faults.point("adopt.copied")
        new.rename(place / "data.mdb")
        sync_directory(place)
        faults.point("adopt.renamed")
        open_mark.delete(place)
        sync_directory(place)


@contextlib.contextmanager
def _held_alone(path: Path, file: str, offset: int, start: int, stop: int) -> Iterator[None]:
    """Hold the lock at ``offset``; raise if another process holds one from ``start`` to ``stop``."""
    opened = locks.open_locks(path / file)
    locked = False
    try:
        locked = opened.try_lock(offset)
        pid = opened.holder(start, stop)
        if pid is None and not locked:
            pid = opened.holder(offset)
        if pid is not None or not locked:
            raise AlreadyRunning(
                f"The store {path} is open in process {pid or 'unknown'} ({locks.process_state(pid or 0)}).",
                f"stop that process first (kill {pid})." if pid else "stop that process first, and call it again.",
                pid=pid or 0,
            )
        yield
    finally:
        if locked:
            opened.unlock(offset)
        opened.close()
