"""The core of a handle on a store: transactions, databases, rows, copies.

    with store.core.view() as txn: …         a read transaction (:class:`ReadView`)
    store.core.commit(work, *args)           runs work(txn, *args) in a write transaction
    store.core.database(name)                the handle of a named database, for ``db=`` of the transaction's calls

The handles of one process on one store share an :class:`~cues.storage.environment.Environment`. Errors of LMDB and
of the operating system leave a transaction as Cues errors. This module knows no queues.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from cues.errors import Closed, Forked, QueueNotFound, StoreDamaged, StoreReadOnly
from cues.native import mypyc_attr
from cues.storage import datafile, environment, locks, map_growth, wakeup
from cues.storage.environment import Environment
from cues.storage.lmdb_errors import described, translate
from cues.storage.lmdb_map import open_lmdb, refuse_written
from cues.storage.read_slots import OldRead, old_read
from cues.storage.transaction import StoreTransaction, refuse_lost
from cues.storage.writer_lock import reentered

R = TypeVar("R")

LOOK_S: Final = 0.1
"""Interval at which a "process" store checks that its file still exists. A deletion may lose the commits of one
interval before it is noticed."""
_PIECE_BYTES: Final = 1 << 20
"""Size of one piece of a copy, and so the memory that a copy takes."""


@mypyc_attr(allow_interpreted_subclasses=True)
class StoreCore:
    """What a handle on a store does inside: transactions, databases, rows. :class:`cues.Store` is its face."""

    def __init__(
        self,
        environment: Environment,
        path: str,
        readonly: bool,
        *,
        transact: Callable[..., Any] | None = None,
        rings: bool = True,
    ) -> None:
        """``path`` is as the user wrote it, for errors. ``transact`` is used in place of the store's own way to make a
        write transaction. Without ``rings`` the handle wakes no reader."""
        self.environment = environment
        self.path = path
        self.is_closed = False
        self.on_close: list[Callable[[], None]] = []
        """Calls to make when this handle closes."""
        self.afterwards: list[Callable[[], None]] = []
        """Calls to make after the transaction under way, for code of users such as the handler of a logger. Such code
        may write to the store; inside the transaction it would wait for itself."""
        doorbells = environment.doorbells if rings else None
        self.ring: Callable[[int], None] = doorbells.ring if doorbells is not None else lambda mask: None
        """Wake the readers that wait for a log of the mask."""
        self.transact: Callable[..., Any] = transact or self.refuse_write
        if transact is None and environment.writer_lock is not None and not readonly:
            together = environment.durability == "disk"
            self.transact = self._transact_together if together else environment.writer_lock.transact

    @property
    def closed(self) -> bool:
        return self.is_closed or self.environment.state != "open"

    def same_as(self, other: StoreCore) -> bool:
        """Return whether ``other`` is a handle on the same files. A copy has the same id, but other files."""
        return self.environment is other.environment

    def view(self) -> ReadView:
        """Return a read transaction as a context manager. Keep it short: it holds pages that are freed meanwhile."""
        return ReadView(self)

    def commit(self, work: Callable[..., R], *args: Any, pages: int = 0) -> R:
        """Run ``work(txn, …)`` in a write transaction and commit it with the durability of the store.

        ``work`` checks before it writes, and raises to refuse; after any exception nothing is written. It may
        run in another thread: on a "disk" store, commits that wait for the disk at the same time share a transaction
        (group_commit.py). ``pages`` is the largest number of pages of values that it writes.
        """
        map_bytes = self.environment.map_bytes
        try:
            result: R = self.transact(pages + datafile.COMMIT_PAGES, work, *args)
            # After the commit, so that an acknowledged commit is in a file that exists.
            if time.monotonic() >= self.environment.look_at and self.is_lost():
                self.check_file()
            return result
        except (lmdb.Error, OSError) as error:
            self.check_open()
            if not map_growth.fits_now(self.environment, error, map_bytes):
                raise translate(error, self.path) from error
        except (StoreDamaged, struct.error) as error:
            raise described(error, self.path) from error
        except ValueError:
            self.check_open()  # another thread closed the store, and with it the shared words
            raise
        finally:
            if self.afterwards:
                calls, self.afterwards = self.afterwards, []
                for call in calls:
                    call()
        return self.commit(work, *args, pages=pages)  # the map was full, and is larger now

    def search(self) -> None:
        """Raise :class:`StoreDamaged` if a row of the store is not under its key.

        All who would begin anew without a row call it when they begin, outside of transactions. It looks at all rows at
        the first call after the opening of the store.
        """
        if not self.environment.searched:
            with self.view() as txn:
                refuse_lost(txn)
            self.environment.searched = True

    def is_lost(self) -> bool:
        """Return whether the files were deleted or exchanged since the opening.

        On a ``"process"`` store it looks at most ten times a second, because a look costs half a commit.
        """
        shared = self.environment
        now = time.monotonic()
        if now < shared.look_at:
            return False
        if shared.durability != "disk":
            shared.look_at = now + LOOK_S
        return environment.file_key(shared.path) != shared.file

    def check_file(self) -> None:
        """Raise :class:`StoreNotFound` when the files were deleted or exchanged since the store was opened.

        Later writes would be made to a file without a name, and be lost.
        """
        self.check_open()
        if environment.file_key(self.environment.path) != self.environment.file:
            raise wakeup.removed(self.path)

    def refuse_write(self, *_: Any) -> Any:
        """Raise, instead of a write transaction, if the store is closed or read-only."""
        self.check_open()
        raise StoreReadOnly(
            f"The store {self.path} was opened read-only.", "open it without readonly=True.", path=self.path
        )

    def _transact_together(self, pages: int, work: Callable[..., Any], *args: Any) -> Any:
        shared = self.environment
        if shared.writer_lock is None:
            return self.refuse_write()
        return shared.group.commit(shared.writer_lock, shared.env.begin, pages, work, *args)

    @property
    def doorbells(self) -> wakeup.Doorbells | None:
        return self.environment.doorbells

    def ring_own(self) -> None:
        """Wake every reader of this process, so that it sees that something was closed."""
        if self.environment.doorbells is not None and not self.closed:
            self.environment.doorbells.ring_own()

    @property
    def locks(self) -> locks.LockFile:
        if self.environment.locks is None:
            raise StoreReadOnly(
                f"The lock file of {self.path} cannot be written.",
                "give this user permission to write the directory of the store.",
                path=self.path,
            )
        return self.environment.locks

    @property
    def words(self) -> Any:
        """The words that processes share (wakeup.py), by their numbers; each is -1 if they cannot be read.

        To read one raises ValueError after the store was closed.
        """
        doorbells = self.environment.doorbells
        return wakeup.UNREADABLE if doorbells is None else doorbells.words

    def word(self, index: int) -> int:
        """Return one of the words that processes share; -1 if they cannot be read."""
        try:
            return self.words[index]  # type: ignore[no-any-return]
        except ValueError:
            self.check_open()  # closed by another thread
            raise

    def note_purge(self) -> None:
        """Tell tailers to drop the messages that they read ahead; call it inside the purging transaction."""
        if self.environment.doorbells is not None:
            words = self.environment.doorbells.words
            words[wakeup.PURGES] = (words[wakeup.PURGES] + 1) & 0xFFFF_FFFF

    def database(self, name: bytes) -> Any:
        """Return the handle of a named database, opened on first use: each open one slows every transaction.

        Do not call it for the first time inside a write transaction: LMDB lets one thread of a
        process open or make databases at a time, so the call waits for the process's writer.
        """
        self.check_open()
        shared = self.environment
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
                handle = self.visit(lambda txn: env.open_db(name, txn=txn, create=False))
        except lmdb.NotFoundError:
            raise QueueNotFound(
                f"The store {self.path} has no database {name.decode(errors='backslashreplace')!r}.",
                "run cues check on the store.",
                queue=name.decode(errors="backslashreplace"),
            ) from None
        except lmdb.Error as error:
            raise translate(error, self.path) from error
        return shared.databases.setdefault(name, handle)

    def visit(self, look: Callable[[StoreTransaction], R]) -> R:
        """Run ``look(txn)``, which writes nothing, in a write transaction (:meth:`WriterLock.visit`)."""
        assert self.environment.writer_lock is not None
        while True:
            map_bytes = self.environment.map_bytes
            try:
                result: R = self.environment.writer_lock.visit(look)
                return result
            except lmdb.MapResizedError as error:
                if not map_growth.fits_now(self.environment, error, map_bytes):
                    raise

    def create_database(self, txn: StoreTransaction, name: bytes) -> None:
        """Make a named database inside a write transaction; open it with :meth:`database` after the commit."""
        self.environment.env.open_db(name, txn=txn, create=True)

    def drop_database(self, txn: StoreTransaction, name: bytes) -> None:
        """Remove a named database that is open here; only while no other process has it open (:func:`alone`)."""
        txn.drop(self.environment.databases.pop(name), delete=True)

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """Every named database and its number of entries, from LMDB's own structure (for checks)."""
        for name, figures in self.figures():
            yield name, int(figures["entries"])

    def figures(self) -> Iterator[tuple[bytes, dict[str, int]]]:
        """LMDB's figures of every named database."""
        with self.view() as txn:
            databases = [key for key, _ in txn.cursor() if b"\0" not in key]
        for name in databases:
            handle = self.database(name)
            with self.view() as txn:
                yield name, txn.stat(handle)

    def live_bytes(self) -> int:
        """Bytes of the pages that hold something now, without the free ones: about what a compacted copy takes."""
        with self.environment.calling() as env:
            unnamed = env.stat()
        databases = [figures for _, figures in self.figures()]
        return sum(map(datafile.pages_of, (unnamed, *databases)), start=2) * int(unnamed["psize"])

    def old_read(self) -> OldRead | None:
        """Return the read transaction, of any process, that keeps many freed pages from being used again."""
        with self.environment.calling() as env:
            return old_read(env)

    def dump(self, write: Callable[[bytes], object]) -> int:
        """Pass a compacted copy of the data file to ``write``, in pieces; returns the number of its last transaction.

        The copy is of one moment. An error of ``write`` ends it and is raised.
        """
        self.check_open()
        txnid = int(self.environment.info()["last_txnid"])
        errors: list[BaseException] = []
        source, target = os.pipe()

        def copy() -> None:
            try:
                with self.environment.calling() as env:
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

    def is_copy(self, copy: Path, txnid: int) -> bool:
        """Return whether the file ``copy`` ends with transaction ``txnid`` and has this store's rows and databases."""
        env = open_lmdb(copy, subdir=False, readonly=True, create=False, max_dbs=0, lock=False)
        try:
            with self.view() as ours, env.begin() as theirs:
                pairs = itertools.zip_longest(ours.cursor(), theirs.cursor(), fillvalue=(b"", b""))
                # The entry of a database has its page numbers, which differ in the copy.
                rows = all(a == b if b"\0" in a[0] else a[0] == b[0] for a, b in pairs)
                return rows and int(env.info()["last_txnid"]) == txnid
        except lmdb.Error:
            return False
        finally:
            env.close()

    def close(self) -> None:
        """Close this handle; blocked reads through it end with :class:`Closed`. Closing again does nothing."""
        if self.is_closed:
            return
        if self.environment.state == "open" and environment.is_inside(self.environment):
            raise reentered(self.path)
        self.is_closed = True
        self.transact = self.refuse_write
        for call in self.on_close:
            call()
        shared = self.environment
        if shared.state != "open":
            return
        if shared.doorbells is not None:
            shared.doorbells.ring_own()
        environment.release(shared)

    def check_open(self) -> None:
        if self.is_closed or self.environment.state != "open":
            if self.environment.state == "forked":
                raise Forked(
                    f"The store {self.path} was opened by process {self.environment.pid}, which forked this one.",
                    "open it again here, or start processes with multiprocessing's 'spawn'.",
                    pid=self.environment.pid,
                )
            raise Closed(f"The store {self.path} is closed.", "use it before close(), or inside its with block.")


class LastLook:
    """The last commit that the reader of a store saw: until the next one it need not look again.

    A writer tells the number of its commit to others in a shared word, unless it is killed after the commit. So a look
    is current for :data:`cues.storage.wakeup.SAFETY_S` at most.
    """

    __slots__ = ("_commit", "_store", "_until")

    def __init__(self, store: StoreCore) -> None:
        self._store = store
        self._commit = 0
        self._until = 0.0

    def note(self, txn: StoreTransaction) -> None:
        """Note the commit that a read transaction sees."""
        self._commit = txn.id()
        self._until = time.monotonic() + wakeup.SAFETY_S

    def is_current(self) -> bool:
        """Return whether nothing was committed since :meth:`note`, as far as is known."""
        return self._store.word(wakeup.COMMITTED) == self._commit and time.monotonic() < self._until


class ReadView:
    """A read transaction; LMDB's errors leave it as Cues errors."""

    __slots__ = ("_store", "_txn")

    def __init__(self, store: StoreCore) -> None:
        self._store = store

    def __enter__(self) -> Any:
        store = self._store
        if store.is_closed or store.environment.state != "open":
            store.check_open()
        if store.environment.lockless:
            refuse_written(store.environment.path)
        shared = store.environment
        while True:
            map_bytes = shared.map_bytes
            try:
                with shared.gate:
                    if shared.remapping:  # by this thread: others wait for the gate
                        raise reentered(store.path)
                    self._txn = shared.env.begin()
                return self._txn
            except lmdb.Error as error:
                store.check_open()
                if not map_growth.fits_now(shared, error, map_bytes):
                    raise translate(error, store.path) from error

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        shared = self._store.environment
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
            self._store.check_open()
            raise translate(error, self._store.path) from error
        if isinstance(error, (StoreDamaged, struct.error)):
            raise described(error, self._store.path) from error
