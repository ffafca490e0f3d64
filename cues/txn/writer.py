"""The writer of a publisher: appends the messages for one store, in a thread of its own.

    add ──▸ waiting ──────────────────────▸ under way ──▸ in the queue: settled with an index
               │                        ▴        ╰──────▸ the append failed: settled with an error
               ╰▸ held: the queue's last│transaction
                  is not acknowledged ──╯

One transaction appends many messages, each queue's in their order. The thread starts when there is something to append,
and ends when there was nothing to append for a while.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid as uuids
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from cues import codec, faults
from cues.base import clock
from cues.errors import CuesError, WaitTimeout
from cues.producers import spans
from cues.queues import rollback, stamped
from cues.queues.queue import Queue
from cues.records import stamps
from cues.records.batch import Page
from cues.records.identity import TICK, ZERO_UUID, Flags, ProducerID, assemble
from cues.storage import wakeup
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction
from cues.txn import consumer_rows
from cues.txn.consumer_rows import PublisherRow

WAITING_BYTES_MAX: Final = 32 << 20
"""Published messages that wait to be appended to one store, in bytes. A call that publishes more waits as well.

Messages that wait for an acknowledgement count."""
COMMIT_BYTES_MAX: Final = 4 << 20
"""The size of one transaction, in bytes, roughly: others write to the store too."""
_LINGER_S: Final = 0.2
"""Seconds for which the thread stays when there is nothing to append."""

CONTINUE: Final = int(Flags.CONTINUE_TXN)
"""The flags of a pending message."""


class WriterOwner(Protocol):
    """The methods of its publisher that a writer uses."""

    id: ProducerID
    guard: threading.Lock
    due: dict[str, uuids.UUID]
    acknowledge_timeout_s: float | None
    transaction_timeout_s: float | None
    begins: dict[str, int]
    row: PublisherRow

    @property
    def closed(self) -> bool: ...

    def check_process(self) -> None:
        """Raise in a forked child."""

    def advance(self, ticks: int) -> int:
        """Return the clock of the first of ``ticks`` messages. Called inside the transaction that appends them."""

    def lose(self, error: BaseException) -> None:
        """Remember the error of a pending message that could not be appended."""


class Append:
    """A message that is published, and the result of its append. Any thread may use it."""

    __slots__ = ("_clock", "_done", "_error", "_flags", "_index", "_writer", "body", "journal", "queue", "size")

    def __init__(self, writer: StoreWriter, queue: Queue, flags: int, body: stamped.Body, journal: str) -> None:
        self.queue = queue
        self.journal = journal
        """The journal of a pending message, which waits for an acknowledgement that is due there; else empty."""
        self.body = body
        self.size = len(body) if isinstance(body, bytes) else len(codec.pack(body))
        self._writer = writer
        self._flags = flags
        self._index = self._clock = 0
        self._done = False
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """True after the message is in its queue, or its append has failed."""
        return self._done

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the message is in its queue, as durable as its store; return its index.

        Raises :class:`WaitTimeout` after ``timeout`` seconds, or if the acknowledgement of the last transaction is
        missing (see :class:`Publisher`), and the error of the append.
        """
        if not self._done:
            self._writer.wait(lambda: self._done, timeout, f"a message to be appended to {self.queue.id!r}")
        if self._error is not None:
            raise self._error
        return self._index

    @property
    def uuid(self) -> uuids.UUID:
        """The UUID of the message; the zero UUID while it waits, and for a message without identity."""
        return assemble(self._writer.producer, self._clock, self._flags) if self._clock else ZERO_UUID

    def settle(self, index: int, clock: int, error: BaseException | None) -> None:
        """Set the result of the append: an index and a clock, or an error."""
        self._index, self._clock, self._error = index, clock, error
        self.body = b""
        self._done = True


class _Run:
    """Messages for one queue with the same flags, as pages without clocks."""

    __slots__ = ("appends", "first", "index", "pages", "queue")

    def __init__(self, producer: int, appends: list[Append]) -> None:
        self.appends = appends
        self.queue = appends[0].queue
        self.first = self.index = 0
        identity = stamps.Stamps(producer, appends[0]._flags, stamps.ticks(0, len(appends)))
        bodies = [append.body for append in appends]
        self.pages = stamped.pages_of(self.queue, bodies, None if identity.flags < 0 else identity)

    @property
    def stamped(self) -> bool:
        return self.appends[0]._flags >= 0

    def at(self, clock: int) -> list[Page]:
        """Return copies of the pages with their clocks, from ``clock`` on. The run's own pages do not change."""
        return [page.with_tail(stamps.restamped(page.tail, clock)) for page in self.pages]

    def settle(self, error: BaseException | None) -> None:
        clock = self.first
        for offset, append in enumerate(self.appends):
            append.settle(self.index + offset, clock, error)
            if self.stamped:
                clock += TICK


class StoreWriter:
    """Appends the messages of a publisher to one store, in a thread that runs while there are messages."""

    def __init__(self, publisher: WriterOwner, store: BaseStore) -> None:
        self.store = store
        self.producer = int.from_bytes(publisher.id, "big")
        self._publisher = publisher
        self._waiting: deque[Append] = deque()
        self._held: dict[str, deque[Append]] = {}
        """Messages that wait for an acknowledgement, by journal. Only the thread puts messages here."""
        self._under_way: list[Append] = []
        """The messages that the thread appends at the moment."""
        self._bytes = 0
        self._moved = threading.Condition(publisher.guard)
        """Notified when a message was added or settled, or a transaction acknowledged."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self.registered = False
        """True after :meth:`register`."""
        self.failed: BaseException | None = None
        """The first error of an append since the last :meth:`Publisher.flush`."""

    def register(self) -> None:
        """Take the lock that shows that the publisher lives, before its first pending message in the store."""
        self.store.core.locks.try_lock(consumer_rows.publisher_lock(self.producer))
        self.registered = True

    def unregister(self) -> None:
        """Release the lock, and delete the row if nothing is pending. May be repeated."""
        if not self.registered or self.store.closed:
            return
        self.store.core.locks.unlock(consumer_rows.publisher_lock(self.producer))
        self.registered = False
        with contextlib.suppress(CuesError):  # the next publisher deletes it
            self.store.core.commit(consumer_rows.sweep, self.store)

    def make_room(self, timeout: float | None) -> None:
        """Wait until less than 32 MiB of messages wait."""
        if self._bytes > WAITING_BYTES_MAX:
            full = "the messages that wait to be appended to " + self.store.path
            self._await(lambda: self._bytes <= WAITING_BYTES_MAX or self._publisher.closed, timeout, full)

    def add(self, append: Append) -> None:
        self._bytes += append.size
        self._waiting.append(append)
        if self._thread is None or len(self._waiting) == 1:
            self.wake()

    def wake(self) -> None:
        """Wake the thread; start one if there is none and a message can be appended."""
        if self._thread is None and self._can_append():
            # Not a daemon: a program ends only after its published messages are appended.
            self._thread = threading.Thread(target=self._append_all, name=f"cues publisher {self.store.path}")
            try:
                self._thread.start()
            except BaseException:
                self._thread = None  # it may have started, and then ends because it is not self._thread
                raise
        self._moved.notify_all()

    def drop(self, which: Callable[[Append], bool], error: BaseException) -> None:
        """Settle waiting messages with an error, except those that are being appended."""
        for appends in (*self._held.values(), self._waiting):
            for append in appends:
                if which(append):
                    append.settle(0, 0, error)
        self._waiting = deque([append for append in self._waiting if not append.done])
        self._held = {
            journal: left
            for journal, appends in self._held.items()
            if (left := deque([append for append in appends if not append.done]))
        }
        self._bytes = sum([append.size for appends in (*self._held.values(), self._waiting) for append in appends])
        self._moved.notify_all()

    def close(self, error: BaseException) -> None:
        """Append all messages that do not wait for an acknowledgement, drop the others, and end."""
        self._closed = True
        self.drop(lambda append: append.journal in self._publisher.due, error)

    def settle(self, deadline: float | None) -> None:
        """Wait until all messages that were added so far are appended, or have failed."""
        with self._moved:
            added = deque(self.left_appends())

        def settled() -> bool:
            while added and added[0].done:
                added.popleft()
            return not added

        if added:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self.wait(settled, left, f"messages to be appended to {self.store.path}")

    def wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        self._publisher.check_process()
        with self._moved:
            self._await(ready, timeout, what)

    def _await(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait. The bound is for an acknowledgement, which the program must append; all else happens by itself."""
        self.wake()
        bound = self._publisher.acknowledge_timeout_s if timeout is None else timeout
        while not self._moved.wait_for(ready, bound):
            queues = self.acknowledged_first()
            if queues:
                raise WaitTimeout(
                    f"Waited {bound:g} s for the acknowledgement of the last transaction in {', '.join(queues)}.",
                    "call append_ack_intents() with the result of build_ack_intents(), or abort().",
                )
            if timeout is not None:
                raise WaitTimeout(
                    f"Waited {timeout:.1f} s for {what}.", "use a longer timeout, or look at cues status."
                )

    def left_appends(self) -> list[Append]:
        """Return the messages that are not settled, in the order in which they will be."""
        return [*self._under_way, *(append for appends in self._held.values() for append in appends), *self._waiting]

    def acknowledged_first(self) -> list[str]:
        """Return the queues for whose acknowledgements all unsettled messages wait; empty if one does not wait."""
        due = self._publisher.due
        left = self.left_appends()
        if not all(append.journal in due for append in left):
            return []
        return sorted({repr(append.queue.id) for append in left})

    def _append_all(self) -> None:
        while appends := self._next():
            error: BaseException | None = None
            runs: list[_Run] = []
            try:
                runs = self._runs(appends)
                self._commit(runs)
            except BaseException as raised:
                error = raised
            with self._moved:
                if error is None:
                    for run in runs:
                        run.settle(None)
                else:
                    self._fail(appends, error)
                self._under_way = []
                self._moved.notify_all()

    def _next(self) -> list[Append]:
        """Wait for messages that can be appended, and take those of one transaction; none after a while without."""
        with self._moved:
            while self._thread is threading.current_thread():
                self._under_way = self._take()
                if self._under_way:
                    return self._under_way
                if self._closed or not self._moved.wait_for(lambda: self._closed or self._can_append(), _LINGER_S):
                    self._thread = None
            return []

    def _can_append(self) -> bool:
        return bool(self._waiting) or any(journal not in self._publisher.due for journal in self._held)

    def _take(self) -> list[Append]:
        due = self._publisher.due
        for journal in [journal for journal in self._held if journal not in due]:
            self._waiting.extendleft(reversed(self._held.pop(journal)))  # these were published before the waiting ones
        appends: list[Append] = []
        size = 0
        while self._waiting and size < COMMIT_BYTES_MAX:
            append = self._waiting.popleft()
            if append.journal in due:
                self._held.setdefault(append.journal, deque()).append(append)
                continue
            size += append.size
            if not append.done:  # done: drop() settled it, and an exception interrupted it before the removal
                appends.append(append)
        self._bytes -= size
        if not (self._waiting or self._held):
            self._bytes = 0  # also corrects the count of a publishing call that an exception ended
        return appends

    def _runs(self, appends: list[Append]) -> list[_Run]:
        """Cut messages into runs. The order within each queue is kept."""
        by_queue: dict[int, list[list[Append]]] = {}
        for append in appends:
            runs = by_queue.setdefault(id(append.queue), [])
            if not runs or runs[-1][0]._flags != append._flags:
                runs.append([])
            runs[-1].append(append)
        return [_Run(self.producer, run) for runs in by_queue.values() for run in runs]

    def _commit(self, runs: list[_Run]) -> None:
        faults.point("publish.before")
        size = sum(1 + len(page.pieces) for run in runs for page in run.pages)
        begun = self.store.core.commit(self._write, runs, pages=size + 2 * len(runs))
        self._publisher.begins.update(begun)
        faults.point("publish.after")
        self.store.core.ring(wakeup.union(run.queue.core.log.mask for run in runs))

    def _write(self, txn: StoreTransaction, runs: list[_Run]) -> dict[str, int]:
        known, begun = self._publisher.begins, dict[str, int]()
        for queue in {id(run.queue): run.queue for run in runs}.values():
            rollback.expire(txn, queue)
        for run in runs:
            if not run.stamped:
                run.index = run.queue.core.append_pages(txn, run.pages)
                continue
            journal = run.appends[0].journal
            begin = known.get(journal) or begun.get(journal)
            if begin:
                rollback.fence(txn, run.queue, self.producer, begin)
            run.first = self._publisher.advance(len(run.appends))
            run.index = run.queue.core.append_pages(txn, run.at(run.first))
            if journal and not begin and self._begin(txn, run):
                begun[journal] = run.index
        faults.point("publish.inside")
        return begun

    def _begin(self, txn: StoreTransaction, run: _Run) -> bool:
        """Note the deadline of a transaction that a run has begun in a log; False if an older one is pending there."""
        consumer_rows.note(txn, self.store, self.producer, self._publisher.row)
        open = spans.read_open(txn, run.queue.core.log.id, self.producer)
        if open is None or open.begin != run.index:
            return False
        timeout_s = self._publisher.transaction_timeout_s
        if timeout_s is not None:
            due_ns = clock.now_ns() + int(timeout_s * 1e9)
            spans.put_open(txn, run.queue.core.log.id, self.producer, open._replace(deadline_ns=due_ns))
        return True

    def _fail(self, appends: list[Append], error: BaseException) -> None:
        self.failed = self.failed or error
        for append in appends:
            append.settle(0, 0, error)
            if append._flags == CONTINUE:
                self._publisher.lose(error)
