"""Group commit: commits of several threads that share one LMDB transaction, and so one wait for the disk.

    thread A   joins the waiting list, takes ``leading``, runs every member that waits, commits
    thread B   joins the waiting list, waits for ``leading``, finds its result there

1. A commit joins the list of those that wait, and then waits for ``leading``.
2. The thread that gets ``leading`` takes the whole list and runs it in one write transaction. Where there are
   several members, each runs in a child transaction, so one that raises undoes only its own writes.
3. Each thread returns the result of its own work, or raises the error of its own work.

Used by ``"disk"`` stores only: a ``"process"`` store does not wait for the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cues.storage.transaction import StoreTransaction
from cues.storage.writer_lock import WriterLock, reentered


@dataclass(slots=True, eq=False)
class _Member:
    """One commit that waits to share a transaction."""

    work: Callable[..., Any]
    args: tuple[Any, ...]
    pages: int
    done: bool = False
    error: BaseException | None = None
    result: Any = None

    def reset(self) -> _Member:
        """Return the member as it was before it was run."""
        self.error = self.result = None
        return self


class GroupCommit:
    """The commits of one environment that wait for the disk. Safe from any thread."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        """Protects :attr:`waiting`."""
        self.leading = threading.RLock()
        """Held by the thread that commits for all members."""
        self._leader = 0
        """The thread that holds :attr:`leading`; a signal handler in it must not wait for it, nor join its members."""
        self.waiting: list[_Member] = []
        self._txnid = 0
        """Number of the transaction that the leading thread has begun for all members; 0 before."""

    def commit(
        self, writer_lock: WriterLock, begin: Callable[..., Any], pages: int, work: Callable[..., Any], *args: Any
    ) -> Any:
        """Run ``work(txn, *args)`` in a transaction that other threads may share; return its result.

        ``begin`` is LMDB's function that begins a transaction, here the child of one.
        """
        own = threading.get_ident()
        if self._leader == own:
            raise reentered(writer_lock.path)
        me = _Member(work, args, pages)
        with self.guard:
            self.waiting.append(me)
        with self.leading:
            self._leader = own
            try:
                self._lead(me, writer_lock, begin)
            finally:
                self._leader = 0
        if me.error is not None:
            raise me.error
        return me.result

    def _lead(self, me: _Member, writer_lock: WriterLock, begin: Callable[..., Any]) -> None:
        """Commit for all members that wait, unless another leader has committed for this one."""
        if me.done:
            return
        with self.guard:
            members, self.waiting = self.waiting, []
        self._txnid = 0
        try:
            writer_lock.transact(sum(member.pages for member in members), self._run, begin, members)
        except Exception as error:
            for member in members:
                member.error = member.error or error
        except BaseException as error:
            # A Ctrl-C reached this thread, most likely while it waited for the disk: the signal handler runs
            # after the commit. The other members commit again only if this commit did not happen.
            if self._txnid and getattr(error, "last_txnid", self._txnid) >= self._txnid:
                for member in members:
                    member.done = True
                raise
            with self.guard:
                self.waiting[:0] = [member.reset() for member in members if member is not me]
            raise
        for member in members:
            member.done = True

    def _run(self, txn: StoreTransaction, begin: Callable[..., Any], members: list[_Member]) -> None:
        self._txnid = txn.id()
        if len(members) == 1:
            members[0].result = members[0].work(txn, *members[0].args)
            return
        for member in members:
            child = begin(write=True, parent=txn)
            try:
                member.result = member.work(child, *member.args)
                child.commit()
            except Exception as error:
                child.abort()
                member.error = error
