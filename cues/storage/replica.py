"""Several stores read at one moment, and data files that are written outside of a store.

    with same_moment(stores) as moments: …    a read transaction of each store, all of one moment
    Replica(file)                             a data file without a store's locks, for a restore or a follower

**One moment.** A transaction of LMDB sees one store. :func:`same_moment` begins one for each store, and then compares
that none of the stores but the last has committed since its own began. Then each of them was, when the last one began,
as its transaction sees it. That is the state in which ``kill -9`` of every process at that instant would leave the
stores, so the protocol of steps and forwarders continues from it exactly. Any order of independent transactions
is not enough: if the home store is read first, a producer row may name a step that its fork queue does not have yet; if
it is read last, its positions may be beyond the ends of queues in the other stores.

**A replica** has no writer lock and no readers' table: the caller excludes other processes by a lock of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from cues.base.closing import Closing
from cues.errors import StoreError
from cues.overrides import override
from cues.storage import environment, locks, timeline
from cues.storage.base_store import BaseStore
from cues.storage.datafile import sync_directory, sync_names
from cues.storage.lmdb_errors import translate
from cues.storage.lmdb_map import MAP_BYTES, MAP_BYTES_MIN, open_lmdb

T = TypeVar("T")

UNNAMED: Final = b""
"""Stands for the unnamed database in a list of databases."""
_ATTEMPTS: Final = 20_000
"""Attempts to find a moment. One takes some 10 µs, and fails if a store commits within it."""
_ATTEMPTS_BESIDE: Final = 1_000
"""Attempts that hold up no writer."""
_COMMIT_BYTES: Final = 64 << 20
"""Bytes that one commit of :meth:`Replica.fill` writes."""


class Moment:
    """A store as one transaction sees it: its databases by name."""

    def __init__(self, txn: Any, handles: dict[bytes, Any], number: int) -> None:
        self.txn = txn
        self.number = number
        """The number of the last commit that it sees."""
        self._handles = handles

    def databases(self) -> list[bytes]:
        """Return the names of the named databases."""
        return _named(self.txn)

    def handle(self, name: bytes) -> Any:
        """Return the handle of a database, for ``db=``; None for :data:`UNNAMED`."""
        return self._handles[name] if name else None

    def entries(self, name: bytes) -> int:
        return int(self.txn.stat(self.handle(name))["entries"])


def last_commit(store: BaseStore) -> int:
    """Return the number of the last commit of a store."""
    store.core.check_open()
    return store.core.environment.info()["last_txnid"]


@contextlib.contextmanager
def same_moment(stores: Sequence[BaseStore]) -> Iterator[list[Moment]]:
    """Begin a read transaction of each store, so that all see one moment.

    Writers are held up, for some 10 µs, only if the stores commit so often that no moment is found beside them. Raises
    :class:`StoreError` if that happens and a store cannot be locked, because it is in a place that is read-only here.
    """
    for attempt in range(_ATTEMPTS):
        with contextlib.ExitStack() as opened:

            def begin(opened: contextlib.ExitStack = opened) -> list[Any] | None:
                txns = [opened.enter_context(store.core.view()) for store in stores]
                moved = any(last_commit(store) != txn.id() for store, txn in zip(stores[:-1], txns))
                return None if moved else txns

            held = stores if attempt >= _ATTEMPTS_BESIDE else ()
            txns = _held(sorted(held, key=lambda store: store.id), begin)
            if txns is None:
                if attempt % 100 == 99:
                    time.sleep(0.001)
                continue
            missing = [
                (store, name)
                for store, txn in zip(stores, txns)
                for name in _named(txn)
                if name not in store.core.environment.databases
            ]
            if not missing:
                handles = [store.core.environment.databases for store in stores]
                yield [Moment(txn, known, txn.id()) for txn, known in zip(txns, handles)]
                return
        for store, name in missing:  # a handle that is opened later is not valid in a transaction that is open
            store.core.database(name)
    raise StoreError(
        f"The stores {', '.join(store.path for store in stores)} commit so often that no moment was found at which"
        " all could be read.",
        "call it again when there is less load.",
    )


def _held(stores: Sequence[BaseStore], look: Callable[[], T]) -> T:
    """Call ``look`` while none of the stores commits. Two processes take their locks in the same order: by store."""
    if not stores:
        return look()
    first, *others = stores
    if first.core.environment.writer_lock is None:
        return _held(others, look)
    return first.core.visit(lambda txn: _held(others, look))


def _named(txn: Any) -> list[bytes]:
    return [key for key in txn.cursor().iternext(values=False) if b"\0" not in key]


class Replica(Closing):
    """A data file that is written outside of a store. Its commits are durable, and survive ``kill -9``.

    Errors of LMDB and of the system are raised as Cues errors; a full disk is :class:`StoreFull`.
    """

    def __init__(self, file: Path, map_size: int = MAP_BYTES) -> None:
        self.file = file
        self._handles: dict[bytes, Any] = {}
        size = max(map_size, file.stat().st_size if file.exists() else 0)
        while True:
            try:
                self._env = open_lmdb(file, subdir=False, map_size=size, max_dbs=1 << 16, lock=False)
                return
            except (lmdb.MemoryError, MemoryError) as error:
                if size <= MAP_BYTES_MIN:
                    raise translate(error, str(file)) from error
                size //= 2  # the address space is limited
            except (lmdb.Error, OSError) as error:
                raise translate(error, str(file)) from error

    @contextlib.contextmanager
    def moment(self) -> Iterator[Moment]:
        """Begin a read transaction."""
        with self._translated():
            with self._env.begin(write=True) as txn:
                for name in _named(txn):
                    self._database(txn, name)
            with self._env.begin() as txn:
                yield Moment(txn, self._handles, txn.id())

    def commit(self, work: Callable[[ReplicaWriter], T]) -> T:
        """Run ``work`` in one write transaction."""
        with self._translated(), self._env.begin(write=True) as txn:
            return work(ReplicaWriter(self, txn))

    def fill(self, works: Iterator[Callable[[ReplicaWriter], int]]) -> None:
        """Run all ``works``, which return how many bytes they wrote, in as many transactions as they need."""
        more = True
        while more:
            with self._translated(), self._env.begin(write=True) as txn:
                writer, written, more = ReplicaWriter(self, txn), 0, False
                for work in works:
                    written += work(writer)
                    if written > _COMMIT_BYTES:
                        more = True
                        break

    def begin_timeline(self) -> None:
        """Begin a timeline on every log, so that new messages get delivery hashes of their own (timeline.py)."""
        self.commit(lambda writer: timeline.begin(writer.txn, environment.logs(writer.txn)))

    def _database(self, txn: Any, name: bytes) -> Any:
        if name not in self._handles:
            self._handles[name] = self._env.open_db(name, txn=txn)
        return self._handles[name]

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._handles.clear()  # those of an aborted transaction are not valid
            if isinstance(error, (lmdb.Error, OSError)):
                raise translate(error, str(self.file)) from error
            raise

    @override
    def close(self) -> None:
        self._env.close()


class ReplicaWriter:
    """The write transaction of a replica."""

    def __init__(self, replica: Replica, txn: Any) -> None:
        self._replica = replica
        self.txn = txn

    def handle(self, name: bytes) -> Any:
        """Return the handle of a database, which is made if it is missing; None for :data:`UNNAMED`."""
        return self._replica._database(self.txn, name) if name else None

    def names(self) -> list[bytes]:
        return _named(self.txn)

    def drop(self, name: bytes) -> None:
        """Remove a named database."""
        self.txn.drop(self.handle(name), delete=True)
        del self._replica._handles[name]

    def delete_range(self, name: bytes, start: bytes, end: bytes | None) -> None:
        """Delete the rows from ``start`` to ``end``, exclusive; to the last one if that is None."""
        cursor = self.txn.cursor(self.handle(name)) if name else self.txn.cursor()
        alive = cursor.set_range(start) if start else cursor.first()
        while alive and (end is None or cursor.key() < end):
            alive = cursor.delete()

    def put(self, name: bytes, rows: Sequence[tuple[bytes, bytes]], append: bool) -> None:
        cursor = self.txn.cursor(self.handle(name)) if name else self.txn.cursor()
        _, added = cursor.putmulti(rows, append=append)
        if added != len(rows):
            raise StoreError(
                f"The changes of {name.decode() or 'the rows'} do not follow the copy {self._replica.file}.",
                "make a new copy.",
                path=str(self._replica.file),
            )

    def entries(self, name: bytes) -> int:
        return int(self.txn.stat(self.handle(name))["entries"])


def open_databases(store: BaseStore) -> None:
    """Open every database of a store, so that :func:`same_moment` needs to open none."""
    with same_moment([store]):
        pass


def is_opened(store: BaseStore) -> bool:
    """Return whether :func:`same_moment` needs to open no database of the store."""
    with store.core.view() as txn:
        return all(name in store.core.environment.databases for name in _named(txn))


def put_in_place(file: Path, directory: Path) -> None:
    """Give a complete data file its name in the directory of its store, where there is none.

    The store counts as unchanged after it, because :meth:`Replica.begin_timeline` was called. Call it again after a
    death. Raises FileExistsError if there is a store.
    """
    if not file.exists():
        return
    sync_names(directory)  # it may be new; an opening that finds the mark does not do it again
    try:
        os.link(file, directory / "data.mdb")
    except FileExistsError:
        if not os.path.samefile(file, directory / "data.mdb"):
            raise
    else:
        locks.open_locks(directory / "locks").close()
        timeline.mark(directory)  # a death before it costs a timeline
    sync_directory(directory)  # also after a death of the process that made the link
    file.unlink()
