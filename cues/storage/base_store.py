"""A handle on a store: transactions, databases, rows, copies.

    with store._view() as txn: …              a read transaction (:class:`ReadView`)
    store._commit(work, *args)               runs work(txn, *args) in a write transaction
    store._database(name)                    the handle of a named database, for ``db=`` of the transaction's calls

The handles of one process on one store share an :class:`~cues.storage.environment.Environment`. Errors of LMDB and
of the operating system leave a transaction as Cues errors. This module knows no queues: :class:`cues.Store` adds them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import lmdb

from cues.base import names
from cues.base.closing import Closing
from cues.errors import (
    Closed,
    Forked,
    InvalidArgument,
    QueueNotFound,
    StoreDamaged,
    StoreReadOnly,
    Unsupported,
)
from cues.native import mypyc_attr
from cues.overrides import override
from cues.storage import datafile, environment, locks, map_growth, transaction, wakeup
from cues.storage.datafile import DURABILITIES
from cues.storage.environment import Environment
from cues.storage.format_record import record_of
from cues.storage.lmdb_errors import described, translate
from cues.storage.lmdb_map import MAP_BYTES, MAP_BYTES_MIN, open_lmdb, refuse_written
from cues.storage.transaction import StoreTransaction
from cues.storage.writer_lock import reentered

R = TypeVar("R")
S = TypeVar("S", bound="BaseStore")

WRITER_TIMEOUT_S: Final = 10.0
LOOK_S: Final = 0.1
"""Interval at which a "process" store checks that its file still exists. A deletion may lose the commits of one
interval before it is noticed."""
_PIECE_BYTES: Final = 1 << 20
"""Size of one piece of a copy, and so the memory that a copy takes."""


@mypyc_attr(allow_interpreted_subclasses=True)
class BaseStore(Closing):
    """A handle on the environment of a store: transactions, databases and rows. :class:`cues.Store` adds its queues."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        durability: str | None = None,
        map_size: int | None = None,
        readonly: bool = False,
        *,
        max_map_size: int | None = None,
        min_free: int | None = None,
        writer_timeout_s: float = WRITER_TIMEOUT_S,
    ) -> None:
        if os.name != "posix":
            raise Unsupported(
                "Cues runs on Linux and macOS; on Windows it runs inside WSL.",
                "install WSL (wsl --install) and run Cues inside it.",
            )
        if durability is not None and durability not in DURABILITIES:
            raise InvalidArgument(f"Unknown durability {durability!r}.", "pass 'disk' or 'process'.")
        if map_size is not None and (not isinstance(map_size, int) or map_size < MAP_BYTES_MIN):
            raise InvalidArgument(
                f"map_size is {map_size!r}.", f"pass a number of bytes, at least {MAP_BYTES_MIN} (1 MiB)."
            )
        least = map_size or MAP_BYTES_MIN
        if max_map_size is not None and (not isinstance(max_map_size, int) or max_map_size < least):
            raise InvalidArgument(
                f"max_map_size is {max_map_size!r}.",
                f"pass a number of bytes, at least {least}, or leave it out: then the disk is the limit.",
            )
        if min_free is not None and (not isinstance(min_free, int) or min_free < 0):
            raise InvalidArgument(
                f"min_free is {min_free!r}.", "pass a number of bytes; 0 uses the disk to its end; None is the default."
            )
        self.readonly = readonly
        self._shared = environment.acquire(
            Path(path),
            durability,
            min(MAP_BYTES, max_map_size) if map_size is None and max_map_size is not None else map_size,
            max_map_size,
            readonly,
            writer_timeout_s,
            lambda shared: internal_handle(type(self), shared).check(),
        )
        if min_free is not None and not readonly:
            self._shared.allocation.min_free = min_free
        self._closed = False
        self._on_close: list[Callable[[], None]] = []
        """Calls to make when this handle closes."""
        self._afterwards: list[Callable[[], None]] = []
        """Calls to make after the transaction under way, for code of users such as the handler of a logger. Such code
        may write to the store; inside the transaction it would wait for itself."""
        doorbells = self._shared.doorbells
        self._ring: Callable[[int], None] = doorbells.ring if doorbells is not None else lambda mask: None
        """Wake the readers that wait for a log of the mask."""
        self._transact: Callable[..., Any] = self._refuse
        if self._shared.writer_lock is not None and not readonly:
            together = self._shared.durability == "disk"
            self._transact = self._transact_together if together else self._shared.writer_lock.transact
        self.path: str = str(path)

    @property
    def durability(self) -> str:
        """The durability with which the store was made: ``"disk"`` or ``"process"``."""
        return self._shared.durability

    @property
    def id(self) -> bytes:
        """The id of the store: 64 random bits, drawn when it was made."""
        return self._shared.id

    @property
    def directory(self) -> str:
        """The absolute path. :attr:`path` is the path as given, relative to the current directory at the opening."""
        return str(self._shared.path)

    def _same_as(self, other: BaseStore) -> bool:
        """Return whether ``other`` is a handle on the same files. A copy has the same id, but other files."""
        return self._shared is other._shared

    @property
    def map_size(self) -> int:
        """The size of the map, in bytes. It grows when it is full."""
        self._check()
        return int(self._shared.info()["map_size"])

    @property
    def max_map_size(self) -> int | None:
        """The size beyond which the map does not grow, in bytes; None if only the disk is the limit."""
        with self._view() as txn:
            limit: int | None = record_of(txn).get("max_map_size")
        return limit

    @property
    def closed(self) -> bool:
        return self._closed or self._shared.state != "open"

    # --- queues ---

    def queues(self, all: bool = False) -> list[str]:
        """Return the names of the store's queues, sorted; with ``all`` the try logs of processors too."""
        with self._view() as txn:
            return [name for name, _ in transaction.named_rows(txn, names.queue_key("")) if all or "." not in name]

    def check(self) -> list[str]:
        """Check the whole store and return its problems, one sentence each. A handle without queues finds none."""
        return []

    # --- transactions ---

    def _view(self) -> ReadView:
        """Return a read transaction as a context manager. Keep it short: it holds pages that are freed meanwhile."""
        return ReadView(self)

    def _commit(self, work: Callable[..., R], *args: Any, pages: int = 0) -> R:
        """Run ``work(txn, …)`` in a write transaction and commit it with the durability of the store.

        ``work`` checks before it writes, and raises to refuse; after any exception nothing is written. It may
        run in another thread: on a "disk" store, commits that wait for the disk at the same time share a transaction
        (group_commit.py). ``pages`` is the largest number of pages of values that it writes.
        """
        map_bytes = self._shared.map_bytes
        try:
            result: R = self._transact(pages + datafile.COMMIT_PAGES, work, *args)
            # After the commit, so that an acknowledged commit is in a file that exists.
            if time.monotonic() >= self._shared.look_at and self._lost():
                self._check_file()
            return result
        except (lmdb.Error, OSError) as error:
            self._check()
            if not map_growth.fits_now(self._shared, error, map_bytes):
                raise translate(error, self.path) from error
        except (StoreDamaged, struct.error) as error:
            raise described(error, self.path) from error
        except ValueError:
            self._check()  # another thread closed the store, and with it the shared words
            raise
        finally:
            if self._afterwards:
                calls, self._afterwards = self._afterwards, []
                for call in calls:
                    call()
        return self._commit(work, *args, pages=pages)  # the map was full, and is larger now

    def _lost(self) -> bool:
        """Return whether the files were deleted or exchanged since the opening.

        On a ``"process"`` store it looks at most ten times a second, because a look costs half a commit.
        """
        shared = self._shared
        now = time.monotonic()
        if now < shared.look_at:
            return False
        if shared.durability != "disk":
            shared.look_at = now + LOOK_S
        return environment.file_key(shared.path) != shared.file

    def _check_file(self) -> None:
        """Raise :class:`StoreNotFound` when the files were deleted or exchanged since the store was opened.

        Later writes would be made to a file without a name, and be lost.
        """
        self._check()
        if environment.file_key(self._shared.path) != self._shared.file:
            raise wakeup.removed(self.path)

    def _refuse(self, *_: Any) -> Any:
        """Raise, instead of a write transaction, if the store is closed or read-only."""
        self._check()
        raise StoreReadOnly(
            f"The store {self.path} was opened read-only.", "open it without readonly=True.", path=self.path
        )

    def _transact_together(self, pages: int, work: Callable[..., Any], *args: Any) -> Any:
        shared = self._shared
        if shared.writer_lock is None:
            return self._refuse()
        return shared.group.commit(shared.writer_lock, shared.env.begin, pages, work, *args)

    @property
    def _doorbells(self) -> wakeup.Doorbells | None:
        return self._shared.doorbells

    def _ring_own(self) -> None:
        """Wake every reader of this process, so that it sees that something was closed."""
        if self._shared.doorbells is not None and not self.closed:
            self._shared.doorbells.ring_own()

    @property
    def _locks(self) -> locks.LockFile:
        if self._shared.locks is None:
            raise StoreReadOnly(
                f"The lock file of {self.path} cannot be written.",
                "give this user permission to write the directory of the store.",
                path=self.path,
            )
        return self._shared.locks

    def _purges(self) -> int:
        """A number that changes with every purge; -1 if it is unknown."""
        return self._word(wakeup.PURGES)

    def _last_commit(self) -> int:
        """The number of the last commit that its writer told the others; -1 if it is unknown."""
        return self._word(wakeup.COMMITTED)

    def _word(self, index: int) -> int:
        doorbells = self._shared.doorbells
        try:
            return -1 if doorbells is None else doorbells.words[index]
        except ValueError:
            self._check()  # closed by another thread
            raise

    def _purged(self) -> None:
        """Tell tailers to drop the messages that they read ahead; call it inside the purging transaction."""
        if self._shared.doorbells is not None:
            words = self._shared.doorbells.words
            words[wakeup.PURGES] = (words[wakeup.PURGES] + 1) & 0xFFFF_FFFF

    # --- databases and rows ---

    def _database(self, name: bytes) -> Any:
        """Return the handle of a named database, opened on first use: each open one slows every transaction.

        Do not call it for the first time inside a write transaction: LMDB lets one thread of a
        process open or make databases at a time, so the call waits for the process's writer.
        """
        self._check()
        shared = self._shared
        handle = shared.databases.get(name)
        if handle is not None:
            return handle
        env, writer_lock = shared.env, shared.writer_lock
        try:
            if writer_lock is None:
                handle = env.open_db(name, create=False)
            else:
                # The end of a read transaction of py-lmdb drops the handles opened in it, and without a transaction
                # py-lmdb takes LMDB's writer lock without our writer_lock. So use an empty write transaction.
                handle = self._visit(lambda txn: env.open_db(name, txn=txn, create=False))
        except lmdb.NotFoundError:
            raise QueueNotFound(
                f"The store {self.path} has no database {name.decode()!r}.",
                "run cues check on the store.",
                queue=name.decode(),
            ) from None
        except lmdb.Error as error:
            raise translate(error, self.path) from error
        return shared.databases.setdefault(name, handle)

    def _visit(self, look: Callable[[StoreTransaction], R]) -> R:
        """Run ``look(txn)``, which writes nothing, in a write transaction (:meth:`WriterLock.visit`)."""
        assert self._shared.writer_lock is not None
        while True:
            map_bytes = self._shared.map_bytes
            try:
                result: R = self._shared.writer_lock.visit(look)
                return result
            except lmdb.MapResizedError as error:
                if not map_growth.fits_now(self._shared, error, map_bytes):
                    raise

    def _create_database(self, txn: StoreTransaction, name: bytes) -> None:
        """Make a named database inside a write transaction; open it with :meth:`_database` after the commit."""
        self._shared.env.open_db(name, txn=txn, create=True)

    def _drop_database(self, txn: StoreTransaction, name: bytes) -> None:
        """Remove a named database that is open here; only while no other process has it open (:func:`alone`)."""
        txn.drop(self._shared.databases.pop(name), delete=True)

    def _entries(self) -> Iterator[tuple[bytes, int]]:
        """Every named database and its number of entries, from LMDB's own structure (for checks)."""
        for name, figures in self._figures():
            yield name, int(figures["entries"])

    def _figures(self) -> Iterator[tuple[bytes, dict[str, int]]]:
        """LMDB's figures of every named database."""
        with self._view() as txn:
            databases = [key for key, _ in txn.cursor() if b"\0" not in key]
        for name in databases:
            handle = self._database(name)
            with self._view() as txn:
                yield name, txn.stat(handle)

    def _live(self) -> int:
        """Bytes of the pages that hold something now, without the free ones: about what a compacted copy takes."""
        with self._shared.calling() as env:
            unnamed = env.stat()
        databases = [figures for _, figures in self._figures()]
        return sum(map(datafile.pages_of, (unnamed, *databases)), start=2) * int(unnamed["psize"])

    def info(self) -> dict[str, int]:
        """Sizes in bytes: ``map`` (the bound), ``used`` (pages ever used), ``disk`` (allocated blocks)."""
        self._check()
        info = self._shared.info()
        return {
            "map": int(info["map_size"]),
            "used": (int(info["last_pgno"]) + 1) * datafile.PAGE_BYTES,
            "disk": os.stat(self._shared.path / "data.mdb").st_blocks * 512,
        }

    def _dump(self, write: Callable[[bytes], object]) -> int:
        """Pass a compacted copy of the data file to ``write``, in pieces; returns the number of its last transaction.

        The copy is of one moment. An error of ``write`` ends it and is raised.
        """
        self._check()
        txnid = int(self._shared.info()["last_txnid"])
        errors: list[BaseException] = []
        source, target = os.pipe()

        def copy() -> None:
            try:
                with self._shared.calling() as env:
                    env.copyfd(target, compact=True)
            except BaseException as error:
                errors.append(error)
            finally:
                os.close(target)

        copier = threading.Thread(target=copy, name="cues dump")
        copier.start()
        try:
            while piece := os.read(source, _PIECE_BYTES):
                write(piece)
        finally:
            os.close(source)  # the copier then fails, if it has not ended
            copier.join()
        if errors:
            raise translate(errors[0], self.path) from errors[0]
        return txnid

    def _same(self, copy: Path, txnid: int) -> bool:
        """Return whether the file ``copy`` ends with transaction ``txnid`` and has this store's rows and databases."""
        env = open_lmdb(copy, subdir=False, readonly=True, create=False, max_dbs=0, lock=False)
        try:
            with self._view() as ours, env.begin() as theirs:
                pairs = itertools.zip_longest(ours.cursor(), theirs.cursor(), fillvalue=(b"", b""))
                # The entry of a database has its page numbers, which differ in the copy.
                rows = all(a == b if b"\0" in a[0] else a[0] == b[0] for a, b in pairs)
                return rows and int(env.info()["last_txnid"]) == txnid
        except lmdb.Error:
            return False
        finally:
            env.close()

    def sync(self) -> None:
        """Make all commits so far durable, whatever the durability of the store."""
        self._check()
        if self._shared.durability != "disk":  # there each commit is durable by itself
            with self._shared.calling() as env:
                env.sync(True)
            if not self._shared.is_named:
                with contextlib.suppress(FileNotFoundError):  # it was deleted, which a commit notices
                    datafile.sync_names(self._shared.path)
                self._shared.is_named = True

    # --- end ---

    @override
    def close(self) -> None:
        """Close this handle; blocked reads through it end with :class:`Closed`. Closing again does nothing."""
        if self._closed:
            return
        if self._shared.state == "open" and environment.is_inside(self._shared):
            raise reentered(self.path)
        self._closed = True
        self._transact = self._refuse
        for call in self._on_close:
            call()
        shared = self._shared
        if shared.state != "open":
            return
        if shared.doorbells is not None:
            shared.doorbells.ring_own()
        environment.release(shared)

    @override
    def __enter__(self) -> Self:
        self._check()
        return self

    @override
    def __repr__(self) -> str:
        state = "closed" if self.closed else self.durability
        return f"<cues.Store {self.path} {state}>"

    def _check(self) -> None:
        if self._closed or self._shared.state != "open":
            if self._shared.state == "forked":
                raise Forked(
                    f"The store {self.path} was opened by process {self._shared.pid}, which forked this one.",
                    "open it again here, or start processes with multiprocessing's 'spawn'.",
                    pid=self._shared.pid,
                )
            raise Closed(f"The store {self.path} is closed.", "use it before close(), or inside its with block.")


class LastLook:
    """The last commit that the reader of a store saw: until the next one it need not look again.

    A writer tells the number of its commit to others in a shared word, unless it is killed after the commit. So a look
    is current for :data:`cues.storage.wakeup.SAFETY_S` at most.
    """

    __slots__ = ("_commit", "_store", "_until")

    def __init__(self, store: BaseStore) -> None:
        self._store = store
        self._commit = 0
        self._until = 0.0

    def note(self, txn: StoreTransaction) -> None:
        """Note the commit that a read transaction sees."""
        self._commit = txn.id()
        self._until = time.monotonic() + wakeup.SAFETY_S

    def is_current(self) -> bool:
        """Return whether nothing was committed since :meth:`note`, as far as is known."""
        return self._store._last_commit() == self._commit and time.monotonic() < self._until


class ReadView:
    """A read transaction; LMDB's errors leave it as Cues errors."""

    __slots__ = ("_store", "_txn")

    def __init__(self, store: BaseStore) -> None:
        self._store = store

    def __enter__(self) -> Any:
        store = self._store
        if store._closed or store._shared.state != "open":
            store._check()
        if store._shared.lockless:
            refuse_written(store._shared.path)
        shared = store._shared
        while True:
            map_bytes = shared.map_bytes
            try:
                with shared.gate:
                    if shared.remapping:  # by this thread: others wait for the gate
                        raise reentered(store.path)
                    self._txn = shared.env.begin()
                return self._txn
            except lmdb.Error as error:
                store._check()
                if not map_growth.fits_now(shared, error, map_bytes):
                    raise translate(error, store.path) from error

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        shared = self._store._shared
        overtaken = shared.lockless and int(shared.env.info()["last_txnid"]) != self._txn.id()
        self._txn.abort()
        if overtaken:
            raise StoreReadOnly(
                f"The store {shared.path} was written while it was read without its lock file.",
                f"read again; or run chmod a+rw {shared.path}/lock.mdb, to read while others write.",
                path=str(shared.path),
            ) from error
        if error is None:
            return
        if isinstance(error, lmdb.Error):
            self._store._check()
            raise translate(error, self._store.path) from error
        if isinstance(error, (StoreDamaged, struct.error)):
            raise described(error, self._store.path) from error


def internal_handle(kind: type[S], shared: Environment, transact: Callable[..., Any] | None = None) -> S:
    """Return a handle for internal use: it is not counted as a user, and rings no doorbell."""
    handle = kind.__new__(kind)
    handle.readonly = transact is None
    handle.path = str(shared.path)
    handle._closed, handle._shared, handle._on_close, handle._afterwards = False, shared, [], []
    handle._ring = lambda mask: None
    handle._transact = transact or handle._refuse
    return handle
