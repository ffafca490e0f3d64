"""The environment of a store: everything that the handles of one store share within a process.

    data/flights/
      data.mdb  lock.mdb     LMDB's files; "process": data.mdb is sparse while the store is open, `ls` shows the map,
                             `du` the bytes used
      locks                  POSIX locks (locks.py)
      wake  bells/           shared words and doorbells (wakeup.py)
      open                   the boot under which a "process" store is written (open_mark.py)
      mark                   the files that the store had at its last opening (timeline.py)

Only this folder imports ``lmdb``. Code above it gets transactions (transaction.py) and Cues errors (lmdb_errors.py).

LMDB refuses to open a file twice in a process, so :func:`acquire` keeps a register of the open environments, and
:func:`release` closes one after its last handle. A forked child must not use its parent's environments (it could
write): its handles raise :class:`Forked`, and opening the store again works there.

Not guaranteed: a ``"process"`` store survives ``kill -9`` of every process at any instant, but a power cut may damage
the whole store. Such a store is checked before it is used.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import lmdb

from cues import faults
from cues.base import names, trust
from cues.base.events import log
from cues.base.texts import quoted
from cues.errors import (
    DurabilityMismatch,
    Forked,
    StoreCopied,
    StoreDamaged,
    StoreForeign,
    StoreNotFound,
    StoreReadOnly,
)
from cues.records import sealed
from cues.records.log_row import LogRow, unpack_row
from cues.storage import datafile, door, locks, map_growth, open_mark, retirement, timeline, wakeup
from cues.storage.format_record import format_of, make_data_file, mismatch, read_format, write_format, write_size
from cues.storage.group_commit import GroupCommit
from cues.storage.lmdb_errors import DATABASES_MAX, translate
from cues.storage.lmdb_map import MAP_BYTES, databases_wanted, may_lock, open_map, refuse_written
from cues.storage.read_slots import read_slots
from cues.storage.transaction import StoreTransaction, rows
from cues.storage.writer_lock import WriterLock


class Environment:
    """State that the handles of one store share within a process."""

    def __init__(
        self, path: Path, key: tuple[int, int], durability: str, readonly: bool, timeout_s: float = 10.0
    ) -> None:
        self.path = path
        self.key = key
        self.file = (0, 0)
        self.look_at = 0.0
        """Monotonic time from which on :meth:`StoreCore.is_lost` checks the file again."""
        self.searched = False
        """True after all rows were found under their keys (:meth:`StoreCore.search`)."""
        self.durability = durability
        self.readonly = readonly
        self.users = 0
        self.lockless = False
        """True if this user may not write LMDB's table of readers, and so reads only while no process writes."""
        self.quiet = False
        """Set at a fork: True if no thread was inside a transaction."""
        self.state = "open"
        self.pid = os.getpid()
        self.id = b""
        self.env: Any = None
        self.map_bytes = 0
        """The size of the map of this process."""
        self.gate = threading.RLock()
        """Held where a transaction of a reader begins, and while the map changes (map_growth.py)."""
        self.is_named = False
        """True after this process has made the names of the store's files durable: before its first write, or at its
        first sync."""
        self.remapping = False
        """True if the map changes now; a signal handler of that thread, which has the gate, must not read."""
        self.calls = 0
        """Calls of LMDB under way that use the map outside of our transactions. Changed while holding the gate."""
        self.timeout_s = timeout_s
        self.locks: locks.LockFile | None = None
        self.doorbells: wakeup.Doorbells | None = None
        self.writer_lock: WriterLock | None = None
        self.allocation: datafile.Allocation
        self.databases: dict[bytes, Any] = {}
        self.group = GroupCommit()

    def info(self) -> dict[str, int]:
        """LMDB's figures of the environment."""
        with self.gate:
            figures: dict[str, int] = self.env.info()
        return figures

    @contextlib.contextmanager
    def calling(self) -> Iterator[Any]:
        """LMDB's environment, for a call that uses the map and may take long. The map does not change meanwhile."""
        with self.gate:
            self.calls += 1
        try:
            yield self.env
        finally:
            with self.gate:
                self.calls -= 1

    def close(self, clean: bool) -> None:
        """Close the environment, after its last handle; ``clean``: no operation was left unfinished."""
        self.state = "closed"
        if self.writer_lock is not None:
            self.writer_lock.leave(self._left if clean else lambda: None)
            self.writer_lock = None
        if self.env is not None:
            self.env.close()
        if self.doorbells is not None:
            self.doorbells.close()
        if self.locks is not None:
            self.locks.close()

    def _left(self) -> None:
        """Leave the files as a copy should find them: this process is the last writer, and nothing is unfinished."""
        if open_mark.exists(self.path):
            if self.durability == "process":
                self.sync()
            open_mark.delete(self.path)
        if self.durability == "process" and file_key(self.path) == self.file:
            with contextlib.suppress(OSError):  # it stays long, and undamaged
                datafile.cut(self.path)

    def sync(self) -> None:
        """Make all commits so far durable, and the names of the store's files."""
        with self.calling() as env:
            env.sync(True)
        if not self.is_named:
            with contextlib.suppress(FileNotFoundError):  # it was deleted, which a commit notices
                self._sync_names()

    def _sync_names(self) -> None:
        """Make the names of the store's files durable. The directories above are, since the opening (_keep_timeline).

        The process that gave the data file its name (a restore, a compaction) may have died before it did so.
        """
        datafile.sync_directory(self.path)
        self.is_named = True

    def join(self, first: bool) -> None:
        """Prepare the first write of this process; ``first`` says that no other process is a writer."""
        if first:
            self.allocation.forget()  # the shared word may be from another boot
        try:
            open_mark.write(self.path, durable=self.durability == "process")
            faults.point("open.marked")
            self._sync_names()  # before the first commit; and the mark, also that of a process that died before this
        except OSError as error:
            raise translate(error, str(self.path)) from error


environments: dict[tuple[int, int], Environment] = {}
_inherited: list[Environment] = []
"""The parent's environments that a forked child has not closed yet."""
_CLOSE_INHERITED_S: Final = 2.0
opening_lock = threading.RLock()
"""Held while an environment is opened or closed."""

_warned: set[Path] = set()
"""Stores that other users may write, of which this process has told."""

Check = Callable[[Environment], list[str]]
"""A function that returns the damage of a store, one sentence each."""


def acquire(
    path: Path,
    durability: str | None,
    map_size: int | None,
    map_size_max: int | None,
    readonly: bool,
    timeout_s: float,
    check: Check,
) -> Environment:
    """Return the open environment of a store, and count one more user; make the store if there is none.

    ``check`` looks for damage if the machine stopped while the store was being written. Raises
    :class:`StoreError` and its subclasses.
    """
    sizes = (map_size, map_size_max)
    with opening_lock:
        try:
            key = directory_key(path, readonly)
            _close_inherited(path)
            shared = environments.get(key)
            if shared is not None and shared.file == file_key(path):
                _same(shared, durability, readonly)
            else:
                # The directory is known, but it has another data file: the store was deleted while a handle was open.
                # That handle keeps its environment, and no other handle may get it.
                try:
                    shared = _open_environment(path.resolve(), key, durability, *sizes, readonly, timeout_s, check)
                except DurabilityMismatch:
                    if durability is not None:
                        raise
                    # Another process made the store at the same moment, with another durability.
                    shared = _open_environment(path.resolve(), key, None, *sizes, readonly, timeout_s, check)
                environments[key] = shared
        except OSError as error:
            raise translate(error, str(path)) from error
        shared.users += 1
        return shared


def release(shared: Environment) -> None:
    """Give up one use of an environment, and close it after its last user.

    The caller has tested :func:`is_inside`.
    """
    with opening_lock:
        shared.users -= 1
        if shared.users == 0:
            if environments.get(shared.key) is shared:
                del environments[shared.key]
            with contextlib.nullcontext() if shared.writer_lock is None else shared.writer_lock.mutex:
                shared.close(clean=True)


def is_inside(shared: Environment) -> bool:
    """Return whether this thread is in the middle of a write: a signal handler or a ``__del__`` asks."""
    lock = shared.writer_lock
    if lock is None or not lock.mutex.acquire(blocking=False):
        return shared.remapping and lock is None
    inside = lock.inside
    lock.mutex.release()
    return inside


def environment_of(key: tuple[int, int]) -> Environment | None:
    """Return the open environment of the directory with this device and inode."""
    return environments.get(key)


def paths_of(id: bytes) -> list[Path]:
    """Return the directories of the stores of that id that this process has open; a copy has its original's id."""
    return [shared.path for shared in list(environments.values()) if shared.id == id and shared.state == "open"]


def _close_inherited(path: Path) -> None:
    """In a forked child that opens a store: close the environment of it that the child inherited.

    Only if no thread of the parent was inside a transaction: otherwise the close would free the parent's reader slot.
    There is a deadline: LMDB's binding waits for threads that were inside a call, and the child does not have them.
    """
    for shared in [inherited for inherited in _inherited if inherited.file == file_key(path)]:
        if shared.quiet:
            closer = threading.Thread(target=shared.env.close, daemon=True)
            closer.start()
            closer.join(_CLOSE_INHERITED_S)
            shared.quiet = not closer.is_alive()
        if not shared.quiet:
            raise Forked(
                f"Process {shared.pid} forked this one while its threads used the store {path}, so it cannot be"
                " opened here.",
                "start processes with multiprocessing's 'spawn' instead of 'fork'.",
                pid=shared.pid,
            )
        _inherited.remove(shared)


def directory_key(path: Path, readonly: bool) -> tuple[int, int]:
    """Return device and inode of the store's directory; make it if it is missing, unless ``readonly``."""
    if path.exists() and not path.is_dir():
        raise StoreForeign(
            f"{path} is a file; a store is a directory.", "pass another path, such as data/.", path=str(path)
        )
    if not readonly:
        retirement.refuse_copies(path)
    if not (path / "data.mdb").exists():
        retirement.refuse(path)
        if readonly:
            raise StoreNotFound(
                f"There is no store at {path}.", "make a store with cues run, or with cues.open(path).", path=str(path)
            )
        door.folder(path)
    status = path.stat()
    return status.st_dev, status.st_ino


def file_key(path: Path) -> tuple[int, int]:
    """Return device and inode of the data file. No other file has them while an environment holds it open."""
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
        raise mismatch(str(shared.path), shared.durability, durability)


def _open_environment(
    path: Path,
    key: tuple[int, int],
    durability: str | None,
    map_size: int | None,
    map_size_max: int | None,
    readonly: bool,
    timeout_s: float,
    check: Check,
) -> Environment:
    lockless = readonly and not may_lock(path)
    if lockless:
        refuse_written(path)
    refuse_copy(path, readonly)
    is_new = not datafile.used(path)
    record = None if is_new else read_format(path, not lockless)
    if record is None and readonly:
        raise StoreNotFound(
            f"There is no store at {path}.", "open the store once without readonly=True.", path=str(path)
        )
    if record is not None:
        _warn_of_others(path)
    kept = record["durability"] if record else (durability or "disk")
    if durability is not None and durability != kept:
        raise mismatch(str(path), kept, durability)
    shared = Environment(path, key, kept, readonly, timeout_s)
    shared.lockless = lockless
    try:
        _open_beside(shared)
        suspect = kept == "process" and open_mark.is_suspect(path)
        if record is None:
            make_data_file(path)
        databases = wanted = DATABASES_MAX
        while True:
            before = file_key(path)
            # At least as large as the maps of others: their writes must fit into this map.
            with contextlib.nullcontext() if readonly else map_growth.locked(shared):
                size = max(map_size or 0, record["map_size"]) if record else map_size or MAP_BYTES
                if record:
                    size = max(size, map_growth.size_of_others(shared))
                shared.env = open_map(path, kept, size, map_size is None, readonly, not lockless, databases)
            shared.map_bytes = int(shared.env.info()["map_size"])
            shared.file = file_key(path)
            resized = None
            try:
                record = format_of(shared.env, path)
                wanted = databases_wanted(shared.env)
            except lmdb.MapResizedError as error:
                resized = error
            is_same = resized is None and shared.file == before
            if is_same and wanted <= databases and (record is None or record["map_size"] <= size):
                break
            databases = max(databases, wanted)
            # A compaction replaced the file, another process made the map larger, or the store has many queues.
            shared.env.close()
            record = read_format(path, not lockless)
            if resized is not None and record is not None and record["map_size"] <= size:
                raise resized  # the address space made the map smaller than the others'
        if record is not None and record["durability"] != kept:
            raise mismatch(str(path), record["durability"], kept)
        if not readonly:
            assert shared.locks is not None
            assert shared.doorbells is not None
            free = shared.env.reader_check
            shared.allocation = datafile.Allocation(path, shared.env.info, shared.doorbells.words, free)
            shared.writer_lock = WriterLock(
                str(path),
                shared.env,
                shared.allocation.ensure,
                shared.locks,
                shared.doorbells,
                timeout_s,
                shared.join,
            )
            shared.env.reader_check()  # slots of killed readers would pin pages
            record = record or write_format(shared.writer_lock, path, kept, size, map_size_max)
        assert record is not None
        shared.id = record["id"]
        if suspect:
            _check_suspect(check, shared)
        if not readonly:
            assert shared.writer_lock is not None
            is_old = not datafile.ALWAYS.issubset(record["requires"])
            if is_old or record["map_size"] < (map_size or 0) or map_size_max not in (None, record.get("max_map_size")):
                pages = datafile.pages_of(shared.env.stat()) if is_old else 0
                write_size(shared.writer_lock, map_size or 0, map_size_max, pages)
            _keep_timeline(shared, is_new, suspect)
    except BaseException as error:
        shared.close(clean=False)
        if isinstance(error, (lmdb.Error, OSError)):
            raise translate(error, str(path)) from error
        raise
    return shared


def is_refused(path: Path) -> bool:
    """Return whether a store is a copy that was made while its original was written."""
    return open_mark.of_copy(path)


def refuse_copy(path: Path, readonly: bool) -> None:
    """Raise :class:`StoreCopied` if a store is a copy that was made while its original was written."""
    if not is_refused(path):
        return
    what = (
        f"The store {path} is a copy that was made (cp, rsync, tar, mv to another disk) while a process had the"
        " original open for writing, or after one was killed. It may have pages of different moments, and be damaged."
    )
    if readonly:  # reading must be possible, above all for cues check
        log.warning("%s", what, store=str(path))
        return
    raise StoreCopied(
        what,
        f"use a copy of cues backup or cues follow; or run cues check {quoted(path)} --adopt, which checks this one,"
        " and makes a store of it if it is whole.",
        path=str(path),
    )


def _keep_timeline(shared: Environment, is_new: bool, suspect: bool) -> None:
    """Begin a timeline if the store may be a copy, or was put back (timeline.py).

    Where the files are others than the last ones, the directory may be new too, as that of a copy is. So its name is
    made durable before the mark says that these are the files. An opening that finds the mark need not do that: of a
    process that made the directory, and died before this, there is no mark. Only a directory that somebody renames
    keeps its mark; its new name is durable when the file system has written it.
    """
    assert shared.writer_lock is not None
    assert shared.doorbells is not None
    words = shared.doorbells.words

    def same() -> bool:
        counted = words[wakeup.COMMITTED]  # read before the store's own number: others may commit between
        return timeline.same(shared.path, int(shared.env.info()["last_txnid"]), counted)

    def begin(txn: StoreTransaction) -> None:
        if suspect or not same():  # tested again: another process may have been faster
            timeline.begin(txn, logs(txn))

    if suspect or not same():
        datafile.sync_names(shared.path)
        if not is_new:
            shared.writer_lock.transact(datafile.COMMIT_PAGES, begin)
            faults.point("copy.begun")
        timeline.mark(shared.path)


def logs(txn: StoreTransaction) -> Iterator[tuple[str, LogRow]]:
    """Iterate over the logs of a store and their rows. Leave out a log with a damaged row: nothing reads it."""
    prefix = names.row_key("", 0)
    for key, raw in rows(txn, prefix):
        log = key[len(prefix) :].decode(errors="backslashreplace")
        line = txn.get(line_key := names.timeline_key(log))
        if sealed.intact(key, raw) and (line is None or sealed.intact(line_key, line)):
            yield log, unpack_row(key, raw, log)


def _warn_of_others(path: Path) -> None:
    """Log once in a process that other users may write the store: its messages are then as they want."""
    why = trust.problem(path / "data.mdb")
    if why is not None and path not in _warned:
        _warned.add(path)
        log.warning(
            "%s: %s. Other users can change the messages of this store. Try: chown and chmod go-w the directory and its"
            " files; or, if it is meant so, set %s=%s.",
            path,
            why,
            trust.VARIABLE,
            quoted(path),
            store=str(path),
        )


def _open_beside(shared: Environment) -> None:
    """Open the files beside those of LMDB. A reader without permission to write them polls instead."""
    try:
        shared.locks = locks.open_locks(shared.path / "locks")
        shared.doorbells = wakeup.Doorbells(shared.path, shared.locks)
    except OSError:
        if not shared.readonly:
            raise


def _check_suspect(check: Check, shared: Environment) -> None:
    if shared.readonly:  # reading must be possible, above all for cues check
        log.warning(
            "%s was written under another boot and not closed; cues check tells if it is whole",
            shared.path,
            store=str(shared.path),
        )
        return
    log.warning("%s was written under another boot and not closed; checking it", shared.path, store=str(shared.path))
    problems = check(shared)
    if problems:
        raise StoreDamaged(
            f"The store {shared.path} was being written (durability 'process') when the machine went down, and"
            f" is damaged: {problems[0]}" + (f" ({len(problems) - 1} more)" if len(problems) > 1 else ""),
            f"run cues check {quoted(shared.path)}, and restore a backup; durability='disk' survives power loss.",
            path=str(shared.path),
        )
    log.warning(
        "%s: structure, checksums and positions are correct; the last commits may be missing",
        shared.path,
        store=str(shared.path),
    )


def _before_fork() -> None:
    """Note the environments that a child may close: those without a transaction in any thread."""
    pid = os.getpid()
    for shared in environments.values():
        writing = shared.writer_lock is not None and shared.writer_lock.inside
        shared.quiet = not writing and not any(slot.pid == pid for slot in read_slots(shared.env))


def _after_fork_in_child() -> None:
    """Remove the parent's environments in the child; their handles raise :class:`Forked` from now on."""
    global opening_lock
    opening_lock = threading.RLock()
    for shared in environments.values():
        shared.state = "forked"
        # A thread of the parent, which the child does not have, may have held any of these locks.
        shared.group = GroupCommit()
        if shared.writer_lock is not None:
            shared.writer_lock.mutex = threading.RLock()
            shared.writer_lock = None
        if shared.doorbells is not None:
            shared.doorbells.forget_in_child()
        _inherited.append(shared)
    environments.clear()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
