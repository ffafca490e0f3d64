"""The writer lock: one write transaction at a time, and an error with the pid of a holder that is stopped.

LMDB admits one writer at a time, and the others wait in a mutex, without a deadline. A process that is
stopped (SIGSTOP, a debugger, a frozen container) inside a transaction blocks all others for ever, and
they cannot find out which process it is. So an outer lock with a deadline is taken first. It is a POSIX
lock, because that tells its holder's pid and is released at its death. It costs two system calls,
1.8 µs, as much as a small commit; so it is taken only while there are several writers:

1. A process joins the writers of a store at its first write: from then on it holds a lock byte of its
   own (locks.WRITERS + pid). If another process holds one, it sets the word SHARED_WRITERS, waits until
   BUSY_WRITER is 0 (with a deadline), and only then begins transactions.
2. A writer that is alone sets BUSY_WRITER to its pid, begins, and reads SHARED_WRITERS. If it is still 0,
   no other process can have begun. (To begin locks a mutex, which is a full barrier, so the two words
   cannot be seen in the wrong order.) Otherwise it aborts and follows 3.
3. While SHARED_WRITERS is set, every writer takes the lock byte WRITER first. It tries until its
   deadline, and then raises WriterStuck with the holder's pid and state.
4. From time to time a writer checks whether it is alone, and then clears SHARED_WRITERS.

A process that only reads also needs a transaction, an empty one, to open a database. It is a guest: for
that moment it sets SHARED_WRITERS and holds locks.REGISTER, so that no process joins or leaves, and then
restores the word. So a single writer stays single. Every process that may write holds another byte
(locks.OPENED + pid), for processes that delete or replace the store.

A mutex separates the threads of one process. A signal handler or a ``__del__`` that runs in the middle of a call of its
own thread gets ConcurrentUse: it would wait for ever. So the mutex may be taken again, and a flag is looked at then.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from cues.errors import ConcurrentUse, WriterStuck
from cues.storage import locks
from cues.storage.transaction import StoreTransaction
from cues.storage.wakeup import BUSY_WRITER, COMMITTED, ROOM, SHARED_WRITERS, Doorbells

_LOOK_AGAIN_S: Final = 1.0
"""The interval at which a writer checks whether it is alone again."""
_SPINS: Final = 50
"""Number of yields before the first sleep: a small commit of another process takes 2 to 200 µs."""
_NAP_S: Final = 0.0002


class WriterLock:
    """The writer lock of one process on one store. One thread at a time calls it."""

    def __init__(
        self,
        path: str,
        env: Any,
        allocate: Callable[[int], None],
        lock_file: locks.LockFile,
        doorbells: Doorbells,
        timeout_s: float,
        on_join: Callable[[bool], None],
    ) -> None:
        """``on_join(first)`` is called once, before the first write, while no other process joins or leaves;
        ``first``: no other process is a writer. ``env`` is LMDB's environment."""
        self.path = path
        self._env = env
        self._begin = env.begin
        self._allocate = allocate
        self.lock_file = lock_file
        self.words: Any = doorbells.words  # Any: another process changes them between two reads
        self._timeout_s = timeout_s
        self._on_join = on_join
        self._joined = False
        self._pid = os.getpid()
        self._held: set[int] = set()
        """Locks that are given back within the call that takes them. A lock that a call finds here was left by a call
        that a signal handler ended: a lock is noted before it is taken, and removed after it is given back."""
        self.looked_at = 0.0
        self.mutex = threading.RLock()
        self.inside = False
        """True if a thread is inside of a call. With the mutex, it is the thread that holds it."""
        self._and_give_back(self._open)

    def _open(self) -> None:
        self._take(locks.REGISTER)  # held by a process that deletes or replaces the whole store
        self.lock_file.try_lock(locks.OPENED + self._pid)

    def transact(self, pages: int, work: Callable[..., Any], *args: Any) -> Any:
        """Run ``work(txn, …)`` in a write transaction with room for ``pages`` and commit it.

        Raises :class:`WriterStuck` at the deadline. After any error nothing was written. Every small
        append uses this method, so it makes as few calls as possible.
        """
        words = self.words
        with self.mutex:
            if self.inside:
                raise reentered(self.path)
            self.inside = True
            txn = None
            try:
                if self._held:
                    self._give_back()
                if not self._joined:
                    self._join()
                if words[SHARED_WRITERS]:
                    txn = self._queue_up()
                else:
                    words[BUSY_WRITER] = self._pid
                    txn = self._begin(None, None, True)
                    if words[SHARED_WRITERS]:
                        txn.abort()
                        txn = None
                        words[BUSY_WRITER] = 0
                        txn = self._queue_up()
                room = words[ROOM]
                if room >= pages:
                    words[ROOM] = room - pages
                else:
                    self._allocate(pages)
                result = work(txn, *args)
                number = txn.id()
                txn.commit()
                words[COMMITTED] = number  # in the order of the commits: the locks are given back below
                return result
            except BaseException as error:
                try:
                    if not isinstance(error, Exception):  # a Ctrl-C, which may arrive after the commit
                        error.__dict__["last_txnid"] = int(self._env.info()["last_txnid"])
                finally:
                    if txn is not None:
                        txn.abort()
                raise
            finally:
                try:
                    if self._held:
                        try:
                            self._give_back()
                            self._look_again()
                        except BaseException:
                            self._give_back()  # again: a Ctrl-C interrupted it
                            raise
                    else:
                        words[BUSY_WRITER] = 0
                finally:
                    self.inside = False

    def visit(self, look: Callable[[StoreTransaction], Any]) -> Any:
        """Run ``look(txn)``, which writes nothing, in a write transaction. The process does not become a writer.

        Raises :class:`WriterStuck` at the deadline.
        """
        with self.exclusive():
            if self._held:
                self._give_back()
            if not self._joined:
                return self._and_give_back(self._look_as_guest, look)
        return self.transact(0, look)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads of this process out. Raises :class:`ConcurrentUse` inside of a call of this thread."""
        with self.mutex:
            if self.inside:
                raise reentered(self.path)
            self.inside = True
            try:
                yield
            finally:
                self.inside = False

    def _look_as_guest(self, look: Callable[[StoreTransaction], Any]) -> Any:
        words = self.words
        self._take(locks.REGISTER)
        shared = words[SHARED_WRITERS]
        txn = None
        try:
            self._share()
            txn = self._queue_up()
            result = look(txn)
            txn.commit()  # an empty commit, which keeps the handles that were opened
            return result
        except BaseException:
            if txn is not None:
                txn.abort()
            raise
        finally:
            words[SHARED_WRITERS] = shared

    def _queue_up(self) -> Any:
        """Wait for the turn and begin; after any error the caller gives the locks back."""
        self._take(locks.WRITER)
        return self._begin(None, None, True)

    def _take(self, offset: int) -> None:
        """Wait for a lock; after any error the caller gives it back."""
        self._held.add(offset)
        self._await(lambda: self.lock_file.try_lock(offset), lambda: self.lock_file.holder(offset))

    def _and_give_back(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run ``work``, and give back every lock that it took. :meth:`transact` does the same without this call."""
        try:
            return work(*args)
        finally:
            try:
                self._give_back()
            except BaseException:
                self._give_back()  # again: a Ctrl-C interrupted it
                raise

    def _give_back(self) -> None:
        """Give back every lock that was taken; may be called again if a signal handler raised in it."""
        for offset in tuple(self._held):
            self.lock_file.unlock(offset)
            self._held.discard(offset)

    def leave(self, when_alone: Callable[[], None]) -> None:
        """Stop being a writer of this store. If no other process is one, run ``when_alone`` before any becomes one."""
        self._and_give_back(self._leave, when_alone)

    def _leave(self, when_alone: Callable[[], None]) -> None:
        try:
            self._take(locks.REGISTER)
            if self._alone():
                when_alone()
        except WriterStuck:
            return
        finally:
            self._held |= {locks.WRITERS + self._pid, locks.OPENED + self._pid}

    def _join(self) -> None:
        """Become a writer; after an error the caller gives the locks back."""
        self._take(locks.REGISTER)
        alone = self._alone()
        if alone:
            self.words[SHARED_WRITERS] = self.words[BUSY_WRITER] = 0
        else:
            self._share()
        self._on_join(alone)
        self.lock_file.try_lock(locks.WRITERS + self._pid)
        self._joined = True
        self._give_back()

    def _alone(self) -> bool:
        """Return whether no other process is a writer; certain only while this process holds REGISTER."""
        return self.lock_file.holder(locks.WRITERS, locks.WRITERS_END) is None

    def _share(self) -> None:
        """Make every writer take the lock, and wait for one that began before it could see the word."""
        self.words[SHARED_WRITERS] = 1
        self._await(self._no_writer_busy, lambda: self.words[BUSY_WRITER])

    def _no_writer_busy(self) -> bool:
        pid = self.words[BUSY_WRITER]
        # A killed writer leaves its pid in the word, but not its lock.
        return pid == 0 or self.lock_file.holder(locks.WRITERS + pid) is None

    def _look_again(self) -> None:
        """Check from time to time whether this writer is alone; after an error the caller gives the locks back."""
        if time.monotonic() - self.looked_at <= _LOOK_AGAIN_S:
            return
        self.looked_at = time.monotonic()
        self._held.add(locks.REGISTER)
        if self.lock_file.try_lock(locks.REGISTER) and self._alone():
            self.words[SHARED_WRITERS] = 0
        self._give_back()

    def _await(self, attempt: Callable[[], bool], holder: Callable[[], int | None]) -> None:
        """Try until ``attempt`` succeeds; at the deadline raise an error with the holder."""
        for _ in range(_SPINS):
            if attempt():
                return
            os.sched_yield()
        start = time.monotonic()
        while not attempt():
            waited = time.monotonic() - start
            if waited > self._timeout_s:
                pid = holder() or 0
                state = locks.process_state(pid) if pid else "unknown"
                raise WriterStuck(
                    f"Waited {waited:.1f} s to write to {self.path}: "
                    + (f"process {pid} ({state})" if pid else "a process with an unknown number")
                    + " is writing and does not finish.",
                    f"kill -CONT {pid} if it was stopped, kill {pid} if it hangs."
                    if pid
                    else f"run fuser {self.path}/locks where all processes are visible (outside of the container), and"
                    " end the one that hangs.",
                    path=self.path,
                    pid=pid,
                    state=state,
                    waited_s=waited,
                )
            time.sleep(_NAP_S)


def reentered(path: str) -> ConcurrentUse:
    """Return the error of a call of a store in the middle of another call of the same thread."""
    return ConcurrentUse(
        f"The store {path} is in use by this thread: a signal handler or a __del__ has called it in the middle of"
        " another call. Nothing was written.",
        "note in the handler what is to be done, and do it where the program writes otherwise.",
    )
