"""The consumer: messages in, messages and rows out, exactly once, between stores that share no transaction.

    class Sums:
        def consume(self, envelope, publisher): ...     a committed message
        def finalize(self, publisher): ...              the end of a transaction; returns its writes, or None

    Consumer(Sums(), [store.queue("in")], SQLCheckpoint("…", "sums")).run()

The checkpoint is in the store of what the application keeps, which makes that store the judge: a transaction
took place if its checkpoint is there. The numbers are those of docs/checkpoints.md.

    start
    1. restore       raise the checkpoint's fence, so that no other instance commits any more; read it
    2. repeat        the acknowledgements that it holds, before anything else: their transaction took place,
                     and what a dead instance has pending behind it is dropped by them
    3. read          the sources from its offsets

    a transaction
    4. consume       committed messages, one after another; what is published is pending
    5. finalize      the application's last words; it returns ``work``, its writes in 8
    6. barrier       everything published is in its queues, everything read in its own, both durably
    7. checkpoint    offsets, producers, and the acknowledgements of 4
    8. commit        checkpoint.commit(checkpoint, work): one transaction, refused under an old fence
    9. acknowledge   append the acknowledgements; now readers see what was published

7 to 9 are behind the next transaction, which reads and publishes meanwhile: at most one commit is under way, and the
next transaction is not finalized before it is done. Who dies before 8 leaves nothing that anybody sees, who dies
after it is finished by 2 of its successor.

A transaction begins with its first message and ends when there is nothing more to read (after ``min_s``), or
after ``max_s``, in the middle of an acknowledged set if need be; or when ``consume`` raises :class:`Defer`.

Not guaranteed: what the application does besides ``work`` and the publisher it is given, and what it keeps in
memory when a transaction fails: make both anew from the checkpoint. Nor an order between sources.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Protocol

from cues import faults, wakeup
from cues.errors import CuesError, Diverged, InvalidArgument, SequenceError
from cues.queue import Queue
from cues.txn.mapping import journal_of
from cues.txn.publisher import Publisher
from cues.txn.reader import ReadUncommitted
from cues.txn.sequencer import RING, AckIntent, Checkpoint, Envelope, Outcome, Sequencer

if TYPE_CHECKING:
    from cues.checkpoints import CheckpointStore

MAX_S: Final = 1.0
"""How long a transaction goes on while there is something to read."""
HORIZON_S: Final = 24 * 3600.0
"""Producers that wrote nothing for so long, and have nothing pending, leave the checkpoint."""

_log = logging.getLogger("cues.txn")


class Defer(Exception):
    """Raised by ``consume``: commit what came before this message, and give it to the next transaction first."""


class App(Protocol):
    """What a consumer runs. It may also have

    ``start()``                 once, when the checkpoint is restored, and nobody else commits any more
    ``begin()``                 before the first message of a transaction; may wait for what it likes
    ``acknowledged(envelope)``  an acknowledgement was read: its producer's transaction in that queue is complete
    ``finish(commit)``          a :class:`concurrent.futures.Future`, done when the transaction is committed and
                                acknowledged, failed when it failed; called once for each ``begin``

    All are called by the thread that runs the consumer; an error of any of them ends it.
    """

    def consume(self, envelope: Envelope, publisher: Publisher) -> object:
        """Take a committed message; publish with ``publisher.publish_uncommitted``. May raise :class:`Defer`."""

    def finalize(self, publisher: Publisher) -> Callable[[Any], Any] | None:
        """The transaction ends. Returns what the checkpoint's transaction is to do besides, or None.

        It is called with what the checkpoint gives (a connection, say), once, by another thread, while
        the next transaction is consumed already: let it own what it writes.
        """


class _Source:
    """One queue that is read, and up to where."""

    def __init__(self, queue: Queue, begin: int | None) -> None:
        self.queue = queue
        self.journal = journal_of(queue)
        row = queue.row()
        if begin is not None and begin > row.next:
            raise Diverged(
                f"The checkpoint stands at {begin} of queue {queue.id!r}, but the queue ends before {row.next}:"
                " messages that were processed are missing.",
                "a newer copy of the store.",
                processor="",
            )
        self.at = row.first if begin is None else begin
        self._reader = ReadUncommitted(queue, begin=self.at)

    def ready(self) -> bool:
        """Whether :meth:`next` would find a message."""
        return self.queue.row().next > self.at

    def next(self) -> Envelope | None:
        found = next(self._reader, None)
        if found is not None:
            self.at = found.end
        return found


@dataclasses.dataclass
class _Transaction:
    """The transaction that is under way."""

    began: float | None = None
    """When its first message was consumed."""
    consumed: int = 0
    moved: bool = False
    """Whether acknowledgements were read that the application does not ask for: a checkpoint's worth, but not its."""
    reading: bool = True
    """Whether it takes further messages."""
    young: bool = True
    """Whether it is younger than ``min_s``."""
    handed_over: bool = False
    """Whether its commit is under way, or done."""


class Consumer:
    """Runs an application over queues, one transaction after another; see the module.

    ``sources``        queues of any stores, each once
    ``checkpoint``     of :mod:`cues.checkpoints`; one under the same name for each consumer
    ``min_s, max_s``   how long a transaction lasts at least, and at most
    ``wait_for_ack``   a transaction in which a producer's messages began to come in waits for their acknowledgement
                       (at most ``max_s``), so that a message and what became of it are in one
    ``ring``           pending messages that are kept in memory; others are read again
    ``now``            seconds of a clock that never goes back

    Used by one thread; :meth:`stop` is for any. Raises :class:`cues.Fenced` from whatever it does when
    another instance has taken over.
    """

    def __init__(
        self,
        app: App,
        sources: Sequence[Queue],
        checkpoint: CheckpointStore,
        *,
        min_s: float = 0.0,
        max_s: float = MAX_S,
        wait_for_ack: bool = False,
        ring: int = RING,
        horizon_s: float = HORIZON_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_has(app, "The application", "consume", "finalize")
        _check_has(checkpoint, "The checkpoint", "restore", "commit")
        if isinstance(sources, Queue):
            raise InvalidArgument(f"The sources are one queue, {sources.id!r}.", "a list: [queue].")
        if not 0 <= min_s <= max_s or max_s <= 0:
            raise InvalidArgument(
                f"A transaction of {min_s} s at least and {max_s} s at most.", "0 <= min_s <= max_s, and max_s above 0."
            )
        journals = [journal_of(queue) for queue in sources]
        if not journals or len(set(journals)) < len(journals):
            raise InvalidArgument(f"The sources are {', '.join(journals) or 'none'}.", "one or more queues, each once.")
        self._app = app
        self._queues = list(sources)
        self._checkpoint = checkpoint
        self._min_s, self._max_s = min_s, max_s
        self._wait_for_ack = wait_for_ack
        self._ring = ring
        self._horizon_ns = int(horizon_s * 1e9)
        self._now = now
        self._stopping = False
        self._ended = False
        self._sources: list[_Source] = []
        self._by_journal: dict[str, _Source] = {}
        self._publisher: Publisher | None = None
        self._sequencer = Sequencer()
        self._thread: ThreadPoolExecutor | None = None
        self._behind: Future[None] | None = None
        """The commit under way."""
        self._out: Envelope | None = None
        """A committed message that was handed out and not consumed: the next transaction's first."""
        self.read_through: dict[str, int] = {}
        """By journal: before which index everything was read, committed and acknowledged."""
        self.needed_from: dict[str, int] = {}
        """By journal: what is before this index is never read again, and may be purged. Below :attr:`read_through`
        while a transaction is open there."""

    # --- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Consume until :meth:`stop`; then commit what was consumed, and return when it is acknowledged."""
        self._run(draining=False)

    def drain(self) -> None:
        """Consume until every source is read to its end, committed and acknowledged."""
        self._run(draining=True)

    def stop(self) -> None:
        """Let :meth:`run` end soon. From any thread, or a signal handler: it takes no lock, and a sleeper looks."""
        self._stopping = True

    def close(self) -> None:
        """Let go of what was opened. What was not committed did not take place. Sources and checkpoint stay open."""
        self._ended = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._publisher is not None:
            with contextlib.suppress(CuesError):  # what is pending there is nobody's any more
                self._publisher.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, draining: bool) -> None:
        if self._ended:
            raise CuesError("This consumer has ended.", "a new Consumer, which goes on at the checkpoint.")
        try:
            if self._publisher is None:
                self._start()
            while not self._stopping and self._transaction(draining):
                pass
            self._settle()
        except BaseException as error:
            failed = self._failure()
            self.close()
            if failed is not None and failed is not error:
                raise failed from error  # what the caller met is what became of it
            raise

    # --- start --------------------------------------------------------------------------------

    def _start(self) -> None:
        # 1. Restore.
        found = self._checkpoint.restore() or Checkpoint()
        self._publisher = Publisher()
        self._thread = ThreadPoolExecutor(1, "cues consumer")
        if faults.active:
            faults.point("consumer.restored")
        # 2. Repeat.
        for skipped in self._publisher.append_ack_intents(found.ack_intents, missing="skip"):
            _log.warning("The queue %s is gone, where a transaction was to be acknowledged.", skipped.journal)
        if faults.active:
            faults.point("consumer.repeated")
        if hasattr(self._app, "start"):
            self._app.start()
        # 3. Read.
        self._sequencer = Sequencer(found.producers, self._ring, found.offsets)
        self._sources = [_Source(queue, found.offsets.get(journal_of(queue))) for queue in self._queues]
        self._by_journal = {source.journal: source for source in self._sources}
        self._committed(found)

    # --- a transaction ------------------------------------------------------------------------

    def _transaction(self, draining: bool) -> bool:
        """Consume and begin to commit; False when there is nothing to commit and nothing to wait for."""
        transaction = _Transaction()
        try:
            while True:
                self._collect()
                if transaction.reading and self._out is None:
                    self._out = self._next()
                self._look_at_the_time(transaction)
                if transaction.reading and self._out is not None:
                    # 4. Consume.
                    self._consume(transaction, self._out)
                elif self._must_wait(transaction, draining):
                    self._wait(transaction)
                elif transaction.began is None and not transaction.moved:
                    return False
                else:
                    break
            self._commit(transaction)
        except BaseException as error:
            if transaction.began is not None and not transaction.handed_over:
                failed: Future[None] = Future()
                failed.set_exception(self._failure() or error)
                self._finish(failed)
            raise
        return True

    def _next(self) -> Envelope | None:
        """The next committed message; None when none can be had now."""
        while True:
            try:
                found = self._sequencer.step()
            except SequenceError as error:
                if isinstance(error.__cause__, CuesError):
                    raise error.__cause__ from None  # a gap, or a damaged batch, in what is read again
                raise
            if found is not None:
                return found
            for source in self._sources:
                read = source.next()
                if read is not None:
                    break
            else:
                return None
            # Whoever was read from comes last, so that a busy source does not starve the others.
            self._sources.remove(source)
            self._sources.append(source)
            if self._sequencer.queue(read) is Outcome.AckCommitReplay:
                journal, begin, end = self._sequencer.replay_range()
                queue = self._by_journal[journal].queue
                self._sequencer.start_replay(ReadUncommitted(queue, begin=begin, end=end))

    def _look_at_the_time(self, transaction: _Transaction) -> None:
        if transaction.began is not None:
            age_s = self._now() - transaction.began
            transaction.young = age_s < self._min_s
            transaction.reading = transaction.reading and age_s < self._max_s
        if self._stopping:
            transaction.reading = transaction.young = False

    def _consume(self, transaction: _Transaction, envelope: Envelope) -> None:
        publisher = self._publisher
        assert publisher is not None
        if envelope.acknowledgement and not hasattr(self._app, "acknowledged"):
            transaction.moved = True
            self._out = None
            return
        if transaction.began is None:
            if hasattr(self._app, "begin"):
                self._app.begin()
            transaction.began = self._now()
        try:
            if envelope.acknowledgement:
                self._app.acknowledged(envelope)  # type: ignore[attr-defined]
            else:
                self._app.consume(envelope, publisher)
        except Defer:
            if not transaction.consumed:
                raise CuesError(
                    f"The application deferred {envelope.begin} of {envelope.journal}, the first message of a"
                    " transaction: there is nothing to commit before it.",
                    "to consume it.",
                ) from None
            transaction.reading = False
            return
        transaction.consumed += 1
        self._out = None
        if faults.active:
            faults.point("consumer.consumed")

    def _must_wait(self, transaction: _Transaction, draining: bool) -> bool:
        """Whether it is not to be committed now, although there is nothing to consume."""
        # The commit before it is under way, and there is one at a time.
        if self._behind is not None:
            return True
        # Nothing was consumed, so there is nothing to commit: more must come, unless no more is wanted.
        if transaction.began is None:
            return not (draining or self._stopping or transaction.moved)
        # Who drains has read everything, and whatever is missing will not come.
        if draining:
            return False
        # It is younger than was asked for.
        if transaction.young and transaction.reading:
            return True
        # A producer's messages came in, and not their acknowledgement; it may take as long as a transaction may.
        return self._wait_for_ack and transaction.reading and self._sequencer.has_pending()

    def _wait(self, transaction: _Transaction) -> None:
        """Sleep until a message comes, the commit under way is done, or the time says something else."""
        behind = self._behind
        left_s = None
        if transaction.began is not None and transaction.reading:
            due_s = self._min_s if transaction.young else self._max_s
            left_s = max(0.0, transaction.began + due_s - self._now())

        def ready() -> bool:
            if self._stopping and transaction.reading:
                return True
            if behind is not None and behind.done():
                return True
            return transaction.reading and any(source.ready() for source in self._sources)

        interests = [(source.queue.store.doorbells, source.queue.log.mask) for source in self._sources]
        wakeup.wait(interests, ready, left_s)

    # --- its commit ---------------------------------------------------------------------------

    def _commit(self, transaction: _Transaction) -> None:
        publisher = self._publisher
        assert publisher is not None and self._thread is not None
        # 5. Finalize.
        work = None if transaction.began is None else self._app.finalize(publisher)
        if faults.active:
            faults.point("consumer.finalized")
        # 6. The barrier of what was published, which also takes its acknowledgements.
        intents = publisher.build_ack_intents()
        # 7. Checkpoint.
        made = self._sequencer.checkpoint(self._horizon_ns, keep_open=True)
        made = dataclasses.replace(made, ack_intents=tuple(intents))
        transaction.handed_over = True
        self._behind = self._thread.submit(self._commit_behind, made, work, intents)
        self._behind.add_done_callback(lambda _: self._ring_own())
        if transaction.began is not None:
            self._finish(self._behind)

    def _commit_behind(self, made: Checkpoint, work: Any, intents: list[AckIntent]) -> None:
        publisher = self._publisher
        assert publisher is not None
        try:
            # 6. The barrier of what was read.
            for store in {id(queue.store): queue.store for queue in self._queues}.values():
                if store.durability != "disk":
                    store.sync()
            if faults.active:
                faults.point("consumer.before")
            # 8. Commit.
            self._checkpoint.commit(made, work)
            if faults.active:
                faults.point("consumer.committed")
            # 9. Acknowledge.
            publisher.append_ack_intents(intents)
            if faults.active:
                faults.point("consumer.acknowledged")
        except BaseException:
            # The next transaction may be waiting for these acknowledgements, which will not come.
            with contextlib.suppress(CuesError):
                publisher.close()
            raise
        self._committed(made)

    def _committed(self, checkpoint: Checkpoint) -> None:
        needed = dict(checkpoint.offsets)
        for one in checkpoint.producers:
            if one.begin >= 0:
                needed[one.journal] = min(one.begin, needed.get(one.journal, one.begin))
        self.read_through, self.needed_from = checkpoint.offsets, needed

    def _collect(self) -> None:
        """Hear of the commit under way, if it is done. Raises what it failed with."""
        if self._behind is not None and self._behind.done():
            behind, self._behind = self._behind, None
            behind.result()

    def _settle(self) -> None:
        """Wait for the commit under way."""
        if self._behind is not None:
            behind, self._behind = self._behind, None
            behind.result()

    def _failure(self) -> BaseException | None:
        """What the commit under way failed with, once it is done."""
        if self._behind is None:
            return None
        with contextlib.suppress(BaseException):
            self._behind.result()
        return self._behind.exception()

    def _finish(self, commit: Future[None]) -> None:
        if hasattr(self._app, "finish"):
            self._app.finish(commit)

    def _ring_own(self) -> None:
        """Wake the thread that runs, wherever it sleeps."""
        doorbells = self._queues[0].store.doorbells
        if doorbells is not None and not self._queues[0].store.closed:
            doorbells.ring_own()


def _check_has(given: object, what: str, *methods: str) -> None:
    """Refuse at once what would fail with the first message."""
    missing = [name for name in methods if not callable(getattr(given, name, None))]
    if missing:
        raise InvalidArgument(
            f"{what} is {given!r:.60}, which has no {' and no '.join(missing)}.",
            f"an object with {' and '.join(methods)}.",
        )
