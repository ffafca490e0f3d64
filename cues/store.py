"""The store: a directory that holds one LMDB environment, and everything that is LMDB about it.

    data/flights/
      data.mdb  lock.mdb     LMDB's files; data.mdb is sparse: `ls` shows the map, `du` what is used
      locks                  POSIX locks (locks.py)
      wake  bells/           shared words and doorbells (wakeup.py)
      open                   the boot under which a "process" store is written; gone after a clean close

Only this module imports ``lmdb``. Others get transactions from :meth:`Store.view` and
:meth:`Store.commit`, use ``get``, ``put``, ``delete`` and ``cursor`` of them, and see Cues errors.

Not guaranteed: a ``"process"`` store survives ``kill -9`` of everybody at any instant, but after a
power cut the whole store may be damaged. It is checked then, before it is used, and says so.
Nothing here knows what a queue holds.

An environment is shared by all handles of its process, since LMDB refuses to open a file twice. A
forked child must not use it (it could write): its handles say so, and opening again works there.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import lmdb

from cues import clock, codec, datafile, locks, names, wakeup
from cues.errors import (
    AlreadyRunning,
    Closed,
    DurabilityMismatch,
    Forked,
    InvalidArgument,
    QueueNotFound,
    StoreDamaged,
    StoreError,
    StoreForeign,
    StoreFull,
    StoreNotFound,
    StoreReadOnly,
    Unsupported,
)
from cues.writers import Turnstile

if TYPE_CHECKING:
    from cues.queue import Matching, Queue

R = TypeVar("R")

DURABILITIES: Final = datafile.DURABILITIES
MAP_BYTES: Final = 64 << 30
"""Default map. It is address space, not disk: the file is sparse and grows as it is written."""
MAP_BYTES_MIN: Final = 1 << 20
DATABASES_MAX: Final = 1024
"""Every open database costs every transaction 2 ns, so a process keeps few."""
WRITER_TIMEOUT_S: Final = 10.0
_PIECE_BYTES: Final = 1 << 20
"""Of a copy; memory that it takes."""
_LMDB_LOCK: Final = 0
"""The byte of ``lock.mdb`` that each process holds (shared) while it has the environment open."""


class Environment:
    """What the handles of one store share within a process."""

    def __init__(self, path: Path, key: tuple[int, int], durability: str, readonly: bool) -> None:
        self.path = path
        self.key = key
        self.file = (0, 0)
        self.durability = durability
        self.readonly = readonly
        self.users = 0
        self.quiet = False
        """At a fork: whether no thread was inside a transaction."""
        self.state = "open"
        self.pid = os.getpid()
        self.id = b""
        self.env: Any = None
        self.locks: locks.LockFile | None = None
        self.doorbells: wakeup.Doorbells | None = None
        self.turnstile: Turnstile | None = None
        self.allocation: datafile.Allocation
        self.databases: dict[bytes, Any] = {}
        self.guard = threading.Lock()
        self.leading = threading.Lock()
        """Held by the thread that commits for all that wait."""
        self.waiting: list[_Member] = []
        self.led = 0
        """Number of the transaction that the leading thread has begun for all; 0 before."""

    def close(self, clean: bool) -> None:
        """The last handle is gone."""
        self.state = "closed"
        if self.turnstile is not None:
            self.turnstile.leave(self._mark_clean if clean and self.durability == "process" else lambda: None)
            self.turnstile = None
        if self.env is not None:
            self.env.close()
        if self.doorbells is not None:
            self.doorbells.close()
        if self.locks is not None:
            self.locks.close()

    def _mark_clean(self) -> None:
        mark = self.path / "open"
        if mark.exists():
            self.env.sync(True)
            mark.unlink(missing_ok=True)

    def join(self, first: bool) -> None:
        """Before this process's first write."""
        if first:
            self.allocation.forget()  # what the word says may be of another boot
        if self.durability == "process":
            try:
                _mark_open(self.path)
            except OSError as error:
                raise _translate(error, str(self.path)) from error


class _Member:
    """One commit that waits to share a transaction."""

    __slots__ = ("args", "done", "error", "pages", "result", "work")

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...], pages: int) -> None:
        self.work = work
        self.pages = pages
        self.args = args
        self.done = False
        self.error: BaseException | None = None
        self.result: Any = None

    def anew(self) -> _Member:
        """As it was before it was run."""
        self.error = self.result = None
        return self


_environments: dict[tuple[int, int], Environment] = {}
_inherited: list[Environment] = []
"""In a forked child: the parent's environments, not closed yet."""
_CLOSE_INHERITED_S: Final = 2.0
_opening = threading.RLock()


class Store:
    """A handle on a store.

    ``path`` is a directory, made when it is missing. ``durability`` is ``"disk"`` (an acknowledged
    commit survives power loss; the default for a new store) or ``"process"`` (survives ``kill -9``,
    about 50 times faster per small commit; after power loss the whole store may be damaged), is
    fixed when the store is made, and None takes it as it is. ``map_size`` bounds the store in bytes
    (default 64 GiB of address space, sparse on disk). With ``readonly`` nothing is ever written.

    Raises :class:`StoreError` in its kinds: a path that is a file or holds something else, a newer
    format, a truncated file, another durability, no permission, a writer that is stuck.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        durability: str | None = None,
        map_size: int | None = None,
        readonly: bool = False,
        *,
        writer_timeout_s: float = WRITER_TIMEOUT_S,
    ) -> None:
        if os.name != "posix":
            raise Unsupported("Cues runs on Linux and macOS; on Windows it runs inside WSL.", "wsl --install.")
        if durability is not None and durability not in DURABILITIES:
            raise InvalidArgument(f"Unknown durability {durability!r}.", "'disk' or 'process'.")
        if map_size is not None and (not isinstance(map_size, int) or map_size < MAP_BYTES_MIN):
            raise InvalidArgument(f"map_size is {map_size!r}.", f"bytes, at least {MAP_BYTES_MIN} (1 MiB).")
        self.readonly = readonly
        self._shared = _open(Path(path), durability, map_size, readonly, writer_timeout_s)
        self._closed = False
        self._tidy: list[Callable[[], None]] = []
        doorbells = self._shared.doorbells
        self.ring: Callable[[int], None] = doorbells.ring if doorbells is not None else lambda mask: None
        """Wake who waits for a log of the mask."""
        self._transact: Callable[..., Any] = self._refuse
        if self._shared.turnstile is not None and not readonly:
            together = self._shared.durability == "disk"
            self._transact = self._transact_together if together else self._shared.turnstile.transact
        self.path: str = str(path)

    @property
    def durability(self) -> str:
        """``"disk"`` or ``"process"``, as the store was made."""
        return self._shared.durability

    @property
    def id(self) -> bytes:
        """64 random bits drawn when the store was made."""
        return self._shared.id

    def same_as(self, other: Store) -> bool:
        """Whether this is another handle on the same files; a copy has the same id and is not."""
        return self._shared is other._shared

    @staticmethod
    def places(id: bytes) -> list[Path]:
        """Where the stores of that id lie that this process has open; a copy has the id of its original."""
        return [shared.path for shared in list(_environments.values()) if shared.id == id and shared.state == "open"]

    @property
    def map_size(self) -> int:
        """The bound on the store's size, in bytes."""
        self._check()
        return int(self._shared.env.info()["map_size"])

    @property
    def closed(self) -> bool:
        return self._closed or self._shared.state != "open"

    # --- queues (the one step upward; queue.py stands on this module) ---

    def queue(self, id: str, **options: Any) -> Queue:
        """The queue of that name, made when it is missing; see :class:`cues.Queue` for the options.

        An option that is given for an existing queue is changed where it can be (retention,
        metadata, max_message_bytes) and refused by name where it cannot. ``"orders/3"`` is a partition of
        ``"orders"`` (:meth:`Queue.partition`). On a read-only store a
        missing queue is :class:`QueueNotFound`.
        """
        from cues.queue import open_queue

        self._check()
        return open_queue(self, id, options)

    def queues(self, all: bool = False) -> list[str]:
        """The names of the store's queues, sorted; with ``all`` the try logs of processors too."""
        prefix = names.queue_key("")
        with self.view() as txn:
            found = [key[len(prefix) :].decode() for key, _ in self.rows(txn, prefix)]
        return [name for name in found if all or "." not in name]

    def matching(self, pattern: str) -> Matching:
        """The names of queues that a shell pattern matches: ``"page*"``; with a slash, of their partitions.

        ``"pageviews/*"`` gives ``pageviews/0``, ``pageviews/1``, … in their order, and each is a name for
        :meth:`queue`; the only log of a queue that is not partitioned is ``/0``. No pattern matches the slash.
        The list is callable and then gives the queues that match by then, as :mod:`cues.txn.mapping` takes them.
        """
        from cues.queue import matching

        return matching(self, pattern)

    def check(self) -> list[str]:
        """Walk the whole store; returns what does not hold, one sentence each (see ``cues check``)."""
        from cues.check import check

        found: list[str] = check(self)
        return found

    # --- transactions ---

    def view(self) -> View:
        """A read transaction as a context manager. Keep it short: it pins every page freed meanwhile."""
        return View(self)

    def commit(self, work: Callable[..., R], *args: Any, pages: int = 0) -> R:
        """Run ``work(txn, …)`` in a write transaction and commit it; durable as the store is.

        ``work`` must check before it writes and raise to refuse; then, as with any exception,
        nothing of it is written. It may run in another thread: on a "disk" store commits that wait
        for the disk at the same time share a transaction, and a member that raises is undone alone.
        ``pages`` is how many pages of values it writes at most.
        """
        try:
            return self._transact(pages + datafile.COMMIT_PAGES, work, *args)  # type: ignore[no-any-return]
        except (lmdb.Error, OSError) as error:
            self._check()
            raise _translate(error, self.path) from error
        except ValueError:
            self._check()  # the shared words were let go when another thread closed the store
            raise

    def check_file(self) -> None:
        """Raise :class:`StoreNotFound` when the files were deleted or exchanged since the store was opened.

        What is written then goes to a file that nobody finds any more.
        """
        self._check()
        if _file(self._shared.path) != self._shared.file:
            raise StoreNotFound(
                f"The store {self.path} was deleted, or another was put in its place, while it was open.",
                "start again with the store that belongs there.",
                path=self.path,
            )

    def _refuse(self, *_: Any) -> Any:
        """In the place of a transaction where there can be none."""
        self._check()
        raise StoreReadOnly(
            f"The store {self.path} was opened read-only.", "open it without readonly=True.", path=self.path
        )

    def _transact_together(self, pages: int, work: Callable[..., Any], *args: Any) -> Any:
        """One waits for the disk on behalf of all: whoever gets in first commits what waits by then."""
        shared = self._shared
        turnstile = shared.turnstile
        if turnstile is None:
            return self._refuse()
        me = _Member(work, args, pages)
        with shared.guard:
            shared.waiting.append(me)
        with shared.leading:
            if not me.done:
                with shared.guard:
                    members, shared.waiting = shared.waiting, []
                shared.led = 0
                try:
                    turnstile.transact(sum(member.pages for member in members), self._run_members, members)
                except Exception as error:
                    for member in members:
                        member.error = member.error or error
                except BaseException as error:
                    # A Ctrl-C reached this thread, most likely while it waited for the disk: the handler runs when
                    # the commit is done. Only where it is not do the others commit again.
                    if shared.led and getattr(error, "last_txnid", shared.led) >= shared.led:
                        for member in members:
                            member.done = True
                        raise
                    with shared.guard:
                        shared.waiting[:0] = [member.anew() for member in members if member is not me]
                    raise
                for member in members:
                    member.done = True
        if me.error is not None:
            raise me.error
        return me.result

    def _run_members(self, txn: Any, members: list[_Member]) -> None:
        self._shared.led = int(txn.id())
        if len(members) == 1:
            members[0].result = members[0].work(txn, *members[0].args)
            return
        for member in members:
            # A child transaction, so that one that raises takes back only its own writes.
            child = self._shared.env.begin(write=True, parent=txn)
            try:
                member.result = member.work(child, *member.args)
                child.commit()
            except Exception as error:
                child.abort()
                member.error = error

    @property
    def doorbells(self) -> wakeup.Doorbells | None:
        return self._shared.doorbells

    @property
    def locks(self) -> locks.LockFile:
        found = self._shared.locks
        if found is None:
            raise StoreReadOnly(f"The lock file of {self.path} cannot be written.", "a writable store.", path=self.path)
        return found

    def purges(self) -> int:
        """A number that changes with every purge; -1 where it cannot be known."""
        doorbells = self._shared.doorbells
        try:
            return -1 if doorbells is None else doorbells.words[wakeup.PURGES]
        except ValueError:
            self._check()  # closed by another thread
            raise

    def purged(self) -> None:
        """Tell tailers to drop what they read ahead; call inside the purging transaction."""
        if self._shared.doorbells is not None:
            words = self._shared.doorbells.words
            words[wakeup.PURGES] = (words[wakeup.PURGES] + 1) & 0xFFFF_FFFF

    # --- databases and rows ---

    def database(self, name: bytes) -> Any:
        """The handle of a named database; opened on first use, since every open one costs every transaction.

        Not to be called for the first time inside a write transaction: LMDB lets one thread of a
        process open or make databases at a time, so this waits for the process's writer.
        """
        self._check()
        shared = self._shared
        found = shared.databases.get(name)
        if found is not None:
            return found
        try:
            found = self._open_database(name, shared.turnstile)
        except lmdb.NotFoundError:
            raise QueueNotFound(
                f"The store {self.path} has no database {name.decode()!r}.", "cues check.", queue=name.decode()
            ) from None
        except lmdb.Error as error:
            raise _translate(error, self.path) from error
        return shared.databases.setdefault(name, found)

    def _open_database(self, name: bytes, turnstile: Turnstile | None) -> Any:
        env = self._shared.env
        if turnstile is None:
            return env.open_db(name, create=False)
        # py-lmdb ends a read transaction in a way that forgets the handles opened in it, and without
        # a transaction it takes LMDB's writer lock past the turnstile; so, an empty write transaction.
        return turnstile.visit(lambda txn: env.open_db(name, txn=txn, create=False))

    def create_database(self, txn: Any, name: bytes) -> None:
        """Make a named database inside a write transaction; open it with :meth:`database` after the commit."""
        self._shared.env.open_db(name, txn=txn, create=True)

    def drop_database(self, txn: Any, name: bytes) -> None:
        """Remove a named database, opened before; only where no other process has it open (:func:`alone`)."""
        txn.drop(self._shared.databases.pop(name), delete=True)

    @staticmethod
    def rows(txn: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows of the unnamed database whose keys begin with ``prefix``."""
        cursor = txn.cursor()
        if cursor.set_range(prefix):
            for key, value in cursor:
                if not key.startswith(prefix):
                    return
                yield key, value

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """Every named database and its entry count, as LMDB's own structure has them (for checks)."""
        with self.view() as txn:
            found = [key for key, _ in txn.cursor() if b"\0" not in key]
        for name in found:
            handle = self.database(name)
            with self.view() as txn:
                yield name, int(txn.stat(handle)["entries"])

    def live(self) -> int:
        """Bytes of the pages that hold something now, without the free ones: about what a compacted copy takes."""
        found = [self._shared.env.stat()]
        with self.view() as txn:
            databases = [key for key, _ in txn.cursor() if b"\0" not in key]
        for name in databases:
            handle = self.database(name)
            with self.view() as txn:
                found.append(txn.stat(handle))
        pages = sum(one["branch_pages"] + one["leaf_pages"] + one["overflow_pages"] for one in found)
        return int(pages + 2) * int(found[0]["psize"])

    def info(self) -> dict[str, int]:
        """Sizes in bytes: ``map`` (the bound), ``used`` (pages ever used), ``disk`` (allocated blocks)."""
        self._check()
        found = self._shared.env.info()
        disk = os.stat(self._shared.path / "data.mdb").st_blocks * 512
        return {
            "map": int(found["map_size"]),
            "used": (int(found["last_pgno"]) + 1) * datafile.PAGE_BYTES,
            "disk": disk,
        }

    def dump(self, write: Callable[[bytes], object]) -> int:
        """Hand a compacted copy of the data file to ``write``, in pieces; returns the number of its last transaction.

        The copy is of one moment. What ``write`` raises ends it and is raised.
        """
        self._check()
        env = self._shared.env
        txnid = int(env.info()["last_txnid"])
        errors: list[BaseException] = []
        source, target = os.pipe()

        def copy() -> None:
            try:
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
            os.close(source)  # the copier then fails, if it is not done
            copier.join()
        if errors:
            raise _translate(errors[0], self.path) from errors[0]
        return txnid

    def same(self, copy: Path, txnid: int) -> bool:
        """Whether the file ``copy`` opens, ends with transaction ``txnid``, and has this store's rows and databases."""
        env = lmdb.open(str(copy), subdir=False, readonly=True, create=False, max_dbs=0, lib_version=0, lock=False)
        try:
            with self.view() as ours, env.begin() as theirs:
                pairs = itertools.zip_longest(ours.cursor(), theirs.cursor(), fillvalue=(b"", b""))
                # The entry of a database says where its pages are, which is elsewhere in the copy.
                rows = all(a == b if b"\0" in a[0] else a[0] == b[0] for a, b in pairs)
                return rows and int(env.info()["last_txnid"]) == txnid
        except lmdb.Error:
            return False
        finally:
            env.close()

    def sync(self) -> None:
        """Make every commit so far durable, whatever the durability."""
        self._check()
        self._shared.env.sync(True)

    # --- end ---

    def on_close(self, tidy: Callable[[], None]) -> None:
        """Call ``tidy`` when this handle closes."""
        self._tidy.append(tidy)

    def close(self) -> None:
        """Close this handle; blocked reads through it end with :class:`Closed`. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._transact = self._refuse
        for tidy in self._tidy:
            tidy()
        shared = self._shared
        if shared.state != "open":
            return
        if shared.doorbells is not None:
            shared.doorbells.ring_own()
        with _opening:
            shared.users -= 1
            if shared.users == 0:
                if _environments.get(shared.key) is shared:
                    del _environments[shared.key]
                if shared.turnstile is not None:
                    with shared.turnstile.mutex:
                        shared.close(clean=True)
                else:
                    shared.close(clean=True)

    def __enter__(self) -> Store:
        self._check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            raise Closed(f"The store {self.path} is closed.", "use it before close() or inside its with block.")


class View:
    """A read transaction; LMDB's errors leave it as Cues errors."""

    __slots__ = ("_store", "_txn")

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> Any:
        store = self._store
        if store._closed or store._shared.state != "open":
            store._check()
        try:
            self._txn = store._shared.env.begin()
        except lmdb.Error as error:
            store._check()
            raise _translate(error, store.path) from error
        return self._txn

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._txn.abort()
        if error is None:
            return
        if isinstance(error, lmdb.Error):
            self._store._check()
            raise _translate(error, self._store.path) from error
        if isinstance(error, struct.error):  # a key or a row of another length than it was written with
            raise _damaged(self._store.path, error) from error


# --- opening ------------------------------------------------------------------------------------


def _open(path: Path, durability: str | None, map_size: int | None, readonly: bool, timeout_s: float) -> Environment:
    with _opening:
        try:
            key = _directory(path, readonly)
            _close_inherited(path)
            shared = _environments.get(key)
            if shared is not None and shared.file == _file(path):
                _same(shared, durability, readonly)
            else:
                # Where the inode is known but the data file is another, the store was deleted under an
                # open handle. That handle keeps what it has; nobody else must get it.
                try:
                    shared = _open_environment(path.resolve(), key, durability, map_size, readonly, timeout_s)
                except DurabilityMismatch:
                    if durability is not None:
                        raise
                    # Another process made the store at the same moment, with a durability of its own.
                    shared = _open_environment(path.resolve(), key, None, map_size, readonly, timeout_s)
                _environments[key] = shared
        except OSError as error:
            raise _translate(error, str(path)) from error
        shared.users += 1
        return shared


def _close_inherited(path: Path) -> None:
    """In a forked child, before it opens the store itself: close what it inherited of it.

    Only where no thread of the parent was inside a transaction: closing would give the parent's reader
    slot away. And with a deadline, for LMDB's binding waits there for threads that were inside a call,
    and none of them is here to come out.
    """
    for shared in [one for one in _inherited if one.file == _file(path)]:
        if shared.quiet:
            closer = threading.Thread(target=shared.env.close, daemon=True)
            closer.start()
            closer.join(_CLOSE_INHERITED_S)
            shared.quiet = not closer.is_alive()
        if not shared.quiet:
            raise Forked(
                f"Process {shared.pid} forked this one while its threads used the store {path}, so it cannot be"
                " opened here.",
                "multiprocessing's 'spawn' instead of 'fork'.",
                pid=shared.pid,
            )
        _inherited.remove(shared)


def _directory(path: Path, readonly: bool) -> tuple[int, int]:
    """Device and inode of the store's directory, made when it is missing."""
    if path.exists() and not path.is_dir():
        raise StoreForeign(f"{path} is a file; a store is a directory.", "another path, such as data/.", path=str(path))
    if not (path / "data.mdb").exists():
        if readonly:
            raise StoreNotFound(
                f"There is no store at {path}.", "cues run, or cues.open(path) to make one.", path=str(path)
            )
        path.mkdir(parents=True, exist_ok=True)
    status = path.stat()
    return status.st_dev, status.st_ino


def _file(path: Path) -> tuple[int, int]:
    """Device and inode of the data file; no other file has them while an environment holds it open."""
    try:
        status = (path / "data.mdb").stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_dev, status.st_ino


def _same(shared: Environment, durability: str | None, readonly: bool) -> None:
    if shared.readonly and not readonly:
        raise StoreReadOnly(
            f"The store {shared.path} is open read-only in this process.",
            "close that handle first, or open it writable from the start.",
            path=str(shared.path),
        )
    if durability is not None and durability != shared.durability:
        raise _mismatch(str(shared.path), shared.durability, durability)


def _open_environment(
    path: Path,
    key: tuple[int, int],
    durability: str | None,
    map_size: int | None,
    readonly: bool,
    timeout_s: float,
) -> Environment:
    is_new = datafile.is_new(path)
    found = None if is_new else _read_format(path)
    if found is None and readonly:
        raise StoreNotFound(f"There is no store at {path}.", "open it writable once.", path=str(path))
    kept = found["durability"] if found else (durability or "disk")
    if durability is not None and durability != kept:
        raise _mismatch(str(path), kept, durability)
    shared = Environment(path, key, kept, readonly)
    try:
        _open_beside(shared)
        suspect = _suspect(path)
        size = map_size or (found or {}).get("map_size") or MAP_BYTES
        while True:
            before = _file(path)
            shared.env = _map(path, kept, size, map_size is None, readonly)
            shared.file = _file(path)
            if is_new or shared.file == before:
                break
            shared.env.close()  # a compaction has put another file in its place
        if not readonly:
            assert shared.locks is not None
            assert shared.doorbells is not None
            shared.allocation = datafile.Allocation(path, shared.env.info, shared.doorbells.words)
            shared.turnstile = Turnstile(
                str(path),
                shared.env.begin,
                shared.allocation.ensure,
                shared.locks,
                shared.doorbells,
                timeout_s,
                shared.join,
                lambda: int(shared.env.info()["last_txnid"]),
            )
            shared.env.reader_check()  # slots of killed readers would pin pages
            found = found or _write_format(shared, kept, size)
            if found["map_size"] < (map_size or 0):
                found = _write_size(shared, map_size or 0)
        assert found is not None
        shared.id = found["id"]
        if suspect:
            _check_suspect(shared, readonly)
    except BaseException as error:
        shared.close(clean=False)
        if isinstance(error, (lmdb.Error, OSError)):
            raise _translate(error, str(path)) from error
        raise
    return shared


@contextlib.contextmanager
def alone(path: str | os.PathLike[str]) -> Iterator[Store]:
    """The store, while no process has it open, this one included: for what changes the data file as a whole.

    Raises :class:`AlreadyRunning` naming a process that has it open, to write or to read. Who opens
    it meanwhile, in this process any store, waits until the end. Commits are durable whatever the store's
    durability. LMDB itself does no locking here, as ours is all there is:

    1. the register is held, and nobody in it who has the store open for writing;
    2. the byte of LMDB's lock file that every environment holds shared is held exclusively, which
       also shows the readers that are outside a transaction.
    """
    place = Path(path)
    with _opening:
        key = _directory(place, readonly=True)
        Store(place).close()  # as anybody would: what is foreign is refused, what is suspect is checked
        shared = _environments.get(key)
        if shared is not None:
            raise StoreError(f"This process has the store {path} open itself.", "close it first.", path=str(path))
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_held_alone(place, "locks", locks.REGISTER, locks.OPENED, locks.OPENED_END))
                held.enter_context(_held_alone(place, "lock.mdb", _LMDB_LOCK, _LMDB_LOCK, _LMDB_LOCK + 1))
                found = _read_format(place, lock=False)
                assert found is not None  # it was opened above
                shared = Environment(place.resolve(), key, found["durability"], readonly=False)
                held.callback(shared.close, clean=False)
                shared.id = found["id"]
                shared.env = _map_alone(place, found["map_size"])
            except (lmdb.Error, OSError) as error:
                raise _translate(error, str(path)) from error
            yield _handle(shared, _commit_alone)


@contextlib.contextmanager
def _held_alone(path: Path, file: str, offset: int, start: int, stop: int) -> Iterator[None]:
    """Hold the lock at ``offset``; nobody else may hold one from ``start`` to ``stop``."""
    opened = locks.open_locks(path / file)
    mine = False
    try:
        mine = opened.try_lock(offset)
        pid = opened.holder(start, stop) or (None if mine else opened.holder(offset))
        if pid is not None or not mine:
            raise AlreadyRunning(
                f"The store {path} is open in process {pid or 'unknown'} ({locks.process_state(pid or 0)}).",
                f"stop that one first (kill {pid})." if pid else "again.",
                pid=pid or 0,
            )
        yield
    finally:
        if mine:
            opened.unlock(offset)
        opened.close()


def _map_alone(path: Path, size: int) -> Any:
    """Open LMDB without its locks, for commits that are durable; a map of what the file has where no more fits."""
    for map_size in (size, (path / "data.mdb").stat().st_size + (64 << 20)):
        try:
            return lmdb.open(str(path), map_size=map_size, create=False, max_dbs=1 << 16, lib_version=0, lock=False)
        except (lmdb.MemoryError, MemoryError) as error:
            failed = error
    raise failed


def _commit_alone(shared: Environment) -> Callable[..., Any]:
    def transact(pages: int, work: Callable[..., Any], *args: Any) -> Any:
        with shared.env.begin(write=True) as txn:
            return work(txn, *args)

    return transact


def _handle(shared: Environment, transact: Any = None) -> Store:
    """A handle that is no user's: it is not counted, and rings nobody."""
    handle = Store.__new__(Store)
    handle.readonly = transact is None
    handle.path = str(shared.path)
    handle._closed, handle._shared, handle._tidy = False, shared, []
    handle.ring = lambda mask: None
    handle._transact = handle._refuse if transact is None else transact(shared)
    return handle


def _read_format(path: Path, lock: bool = True) -> dict[str, Any] | None:
    """The format record, read without any option that the record itself decides."""
    try:
        env = lmdb.open(str(path), readonly=True, max_dbs=0, lib_version=0, create=False, lock=lock)
    except (lmdb.Error, OSError) as error:
        raise _translate(error, str(path)) from error
    try:
        with env.begin() as txn:
            raw = txn.get(names.FORMAT_KEY)
            empty = raw is None and not txn.cursor().first()
    except lmdb.Error as error:
        raise _translate(error, str(path)) from error
    finally:
        env.close()
    if empty:
        return None  # the process that made it was killed before its first commit
    if raw is None:
        raise StoreForeign(
            f"{path} holds an LMDB environment that is not a Cues store.",
            "another directory; Cues never writes over what it does not know.",
            path=str(path),
        )
    return datafile.check_format(path, raw)


def _write_format(shared: Environment, durability: str, size: int) -> dict[str, Any]:
    """Read the format record, or write it where the store is new. Whoever comes first decides."""
    assert shared.turnstile is not None

    def read_or_write(txn: Any) -> bytes:
        raw = txn.get(names.FORMAT_KEY)
        if raw is None:
            raw = codec.pack(
                {
                    "format": datafile.FORMAT,
                    "requires": [],
                    "id": os.urandom(8),
                    "durability": durability,
                    "map_size": size,
                    "created_ns": clock.now_ns(),
                }
            )
            txn.put(names.FORMAT_KEY, raw)
        return bytes(raw)

    record: dict[str, Any] = codec.unpack(shared.turnstile.transact(datafile.COMMIT_PAGES, read_or_write))
    if record["durability"] != durability:
        raise _mismatch(str(shared.path), record["durability"], durability)
    return record


def _write_size(shared: Environment, size: int) -> dict[str, Any]:
    """Keep a larger bound, for those who open the store without saying one."""
    assert shared.turnstile is not None

    def write(txn: Any) -> dict[str, Any]:
        record: dict[str, Any] = codec.unpack(txn.get(names.FORMAT_KEY))
        record["map_size"] = max(record["map_size"], size)
        txn.put(names.FORMAT_KEY, codec.pack(record))
        return record

    found: dict[str, Any] = shared.turnstile.transact(datafile.COMMIT_PAGES, write)
    return found


def _map(path: Path, durability: str, size: int, is_default: bool, readonly: bool) -> Any:
    """Open LMDB. Where the address space is limited a default map shrinks to what fits."""
    # Without posix_fallocate a full disk could not be told from a SIGBUS, so no writable map there.
    writemap = durability == "process" and hasattr(os, "posix_fallocate") and not readonly
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    wanted = size
    while True:
        try:
            env = lmdb.open(
                str(path),
                map_size=size,
                readonly=readonly,
                create=not readonly,
                sync=durability == "disk",
                metasync=durability == "disk",
                writemap=writemap,
                max_dbs=DATABASES_MAX,
                max_readers=1024,
                max_spare_txns=0,  # closing them in a forked child would take the parent's reader slots
                lib_version=0,
            )
        except (lmdb.MemoryError, MemoryError):
            if not is_default or size <= MAP_BYTES_MIN:
                raise
            size //= 2
        else:
            if size != wanted:
                from cues.events import log

                log.warning(
                    "%s: the address space (limit %s bytes) has no room for a map of %d GiB; using %d MiB",
                    path,
                    limit if limit != resource.RLIM_INFINITY else "unknown",
                    wanted >> 30,
                    size >> 20,
                )
            return env


def _open_beside(shared: Environment) -> None:
    """The files beside LMDB's. A reader without write permission does without them, and polls."""
    try:
        shared.locks = locks.open_locks(shared.path / "locks")
        shared.doorbells = wakeup.Doorbells(shared.path, shared.locks)
    except OSError:
        if not shared.readonly:
            raise


def _suspect(path: Path) -> bool:
    """Whether the machine went down while this store was being written under "process"."""
    try:
        return (path / "open").read_text() != clock.boot_id()
    except FileNotFoundError:
        return False


def _mark_open(path: Path) -> None:
    """Write down under which boot the store is written; durable before anything is."""
    mark = path / "open"
    if mark.exists() and not _suspect(path):
        return
    with mark.open("w") as file:
        file.write(clock.boot_id())
        file.flush()
        os.fsync(file.fileno())
    directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _check_suspect(shared: Environment, readonly: bool) -> None:
    from cues.events import log

    if readonly:  # a look must be possible, cues check's above all
        log.warning("%s was written under another boot and not closed; cues check tells if it is whole", shared.path)
        return
    log.warning("%s was written under another boot and not closed; checking it", shared.path)
    problems = _handle(shared).check()
    if problems:
        raise StoreDamaged(
            f"The store {shared.path} was being written (durability 'process') when the machine went down, and"
            f" is damaged: {problems[0]}" + (f" ({len(problems) - 1} more)" if len(problems) > 1 else ""),
            f"cues check {shared.path}, and a backup; durability='disk' survives power loss.",
            path=str(shared.path),
        )
    log.warning("%s: structure, checksums and positions hold; the last commits may be missing", shared.path)


def _mismatch(path: str, found: str, asked: str) -> DurabilityMismatch:
    return DurabilityMismatch(
        f"The store {path} was made with durability {found!r}, not {asked!r}.",
        f"durability={found!r} or none, or a new store.",
        path=path,
        found=found,
        asked=asked,
    )


def _damaged(path: str, error: BaseException) -> StoreDamaged:
    return StoreDamaged(
        f"The structure of the store {path} is damaged ({error}).", f"cues check {path}, and a backup.", path=path
    )


def _translate(error: BaseException, path: str) -> BaseException:
    """LMDB's and the system's errors in our words; anything else as it is."""
    if isinstance(error, lmdb.MapFullError):
        return StoreFull(
            f"The store {path} has reached its map size; nothing was written.",
            "open it with a larger map_size=, purge queues, or give them retention.",
            path=path,
        )
    if isinstance(error, lmdb.ReadonlyError):
        return StoreReadOnly(
            f"The store {path} is open, or lies, read-only.",
            "open it writable; permission to write its files.",
            path=path,
        )
    if isinstance(error, lmdb.MapResizedError):
        return StoreFull(
            f"The store {path} has grown beyond the map of this process: another one opened it with a larger map_size.",
            "open it again with a map_size= as large as there.",
            path=path,
        )
    if isinstance(error, lmdb.DbsFullError):
        return StoreError(
            f"This process uses {DATABASES_MAX} queues and states of {path} already, as many as one process may.",
            "fewer queues in a process, or several stores.",
            path=path,
        )
    if isinstance(error, (lmdb.MemoryError, MemoryError)):
        return StoreError(
            f"The address space of this process has no room for the map of {path}.",
            "a smaller map_size=, or a higher limit (ulimit -v).",
            path=path,
        )
    if isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError)):
        return _damaged(path, error)
    if isinstance(error, lmdb.VersionMismatchError):
        return StoreForeign(f"{path} was written by another LMDB ({error}).", "another directory.", path=path)
    if isinstance(error, lmdb.ReadersFullError):
        return StoreError(f"Too many processes and threads read {path} at once.", "close some.", path=path)
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if (
        number in (errno.EACCES, errno.EROFS, errno.EPERM)
        or isinstance(error, lmdb.ReadonlyError)
        or (isinstance(error, lmdb.Error) and ("Permission denied" in text or "Read-only file system" in text))
    ):
        return StoreReadOnly(
            f"This user may not write the store {path} ({text}).",
            "permission to write its directory and files; cues.open(path, readonly=True) to look at it.",
            path=path,
        )
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or (
        isinstance(error, lmdb.Error) and ("No space left" in text or "File too large" in text)
    ):
        return StoreFull(f"The disk of the store {path} is full; nothing was written.", "free space.", path=path)
    if isinstance(error, FileNotFoundError):
        return StoreNotFound(
            f"The files of the store {path} are gone ({text}).", "the store that belongs there.", path=path
        )
    if isinstance(error, (lmdb.Error, OSError)):
        return StoreError(f"The store {path} failed: {error}.", f"cues check {path}.", path=path)
    return error


def _before_fork() -> None:
    """Note which environments a child may close: those with no transaction under way in any thread."""
    pid = str(os.getpid())
    for shared in _environments.values():
        slots = [line.split() for line in shared.env.readers().splitlines()]
        writing = shared.turnstile is not None and shared.turnstile.mutex.locked()
        shared.quiet = not writing and not any(slot[:1] == [pid] for slot in slots)


def _after_fork_in_child() -> None:
    """The parent's environments are not the child's; every handle says so from here on."""
    global _opening
    _opening = threading.RLock()
    for shared in _environments.values():
        shared.state = "forked"
        # Another thread of the parent may have held any of these; it does not exist here.
        shared.guard, shared.leading = threading.Lock(), threading.Lock()
        if shared.turnstile is not None:
            shared.turnstile.mutex = threading.Lock()
            shared.turnstile = None
        if shared.doorbells is not None:
            shared.doorbells.forget_in_child()
        _inherited.append(shared)
    _environments.clear()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
