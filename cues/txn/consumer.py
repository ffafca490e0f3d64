"""The consumer: reads messages, writes messages and rows, exactly once, between stores that share no transaction.

    class Sums:
        def consume(self, envelope, publisher): ...     take a committed message
        def finalize(self, publisher): ...              end a transaction; return its writes, or None

    Consumer(Sums(), [store.queue("in")], SQLCheckpoint("…", "sums")).run()

The checkpoint is in the same store as the application's data, and its commit decides: a transaction took place if its
checkpoint is there. The numbers are those of docs/checkpoints.md.

    start
    0. wait          while another instance runs (:mod:`cues.txn.turns`)
    1. restore       raise the checkpoint's fence, so that older instances cannot commit; read the checkpoint
    2. repeat        append the acknowledgements of the checkpoint, before anything else. Their transaction took place.
                     Then drop all messages that earlier instances left pending, on whatever queues
                     (:mod:`cues.txn.registration`)
    3. read          open the sources at its offsets

    a transaction
    4. consume       take committed messages, one after another; messages that are published are pending
    5. finalize      the application ends the transaction and returns ``work``, its writes in 8
    6. barrier       wait until all published messages, and all messages that were read, are durable in their queues
    7. checkpoint    collect offsets, producers, and the acknowledgements for 4
    8. commit        checkpoint.commit(checkpoint, work): one transaction, refused under an old fence
    9. acknowledge   append the acknowledgements; now readers see the published messages

7 to 9 run in another thread while the next transaction reads and publishes. At most one commit is under way, and the
next transaction is not finalized before it is done. The messages that the next transaction publishes wait in memory for
9 (see :mod:`cues.txn.publisher`), but the application does not wait; so a commit may take any time. If an instance dies
before 8, no reader sees anything of its transaction. If it dies after 8, its successor completes the transaction in 2.

A transaction begins with its first message. It ends when no message is left to read (after ``min_s``); or after
``max_s``, also in the middle of an acknowledged set; or when ``consume`` raises :class:`Defer`. After that, messages
that are ready wait for the commit of the last transaction. They also wait while 32 MiB of published messages are in
memory.

Messages that were rolled back or repeated are not handed out, but they move the checkpoint too.

Not guaranteed: effects of the application other than ``work`` and messages of the given publisher; its memory after a
transaction has failed (make a new application from the checkpoint); an order between sources.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

from cues import faults
from cues.base import logs
from cues.base.closing import Closing
from cues.checkpoints import CheckpointStore
from cues.errors import CuesError, Fenced, InvalidArgument, SequenceError
from cues.overrides import override
from cues.producers.sequencer import RING, AckIntent, Checkpoint, Envelope, Outcome, Sequencer
from cues.queues.base import PartitionIndex, journal_of, views_of
from cues.queues.queue import Queue
from cues.records.identity import Clock
from cues.storage import wakeup
from cues.txn.barrier import wait_read_through
from cues.txn.messages import DICT, MessageType
from cues.txn.publisher import TRANSACTION_TIMEOUT_S, Missing, Publisher
from cues.txn.reader import OnGap, ReadUncommitted
from cues.txn.registration import Registration, needed_from
from cues.txn.settings import HORIZON_S, MAX_S, ConsumerSettings
from cues.txn.sources import GROWTH_S, POLL_S, MessageSource, ReadFrom, Sources
from cues.txn.turns import LEASE_S, Turn

_DROP_S: Final = 10.0
"""Seconds for which a consumer that fails waits for its own appends, in order to drop them."""

_log = logs.logger("cues.txn")


class Defer(Exception):
    """Raised by ``consume``, to commit the messages before this one and begin the next transaction with this one."""


class Abort(Exception):
    """Raised by ``consume`` or ``finalize``, to drop the transaction and read its messages again.

    The messages that were published in it are dropped, and with ``inside`` its writes. ``finish`` gets a future that
    has failed with this exception. The application drops what it keeps in memory of the transaction. The consumer does
    not limit the number of aborts.
    """


class App(Protocol):
    """The application that a consumer runs. These methods are optional:

    ``start()``                 called once, after the checkpoint was restored: older instances cannot commit
    ``begin()``                 called before the first message of a transaction; it may wait
    ``acknowledged(envelope)``  called for an acknowledgement: its producer's transaction in that queue is complete
    ``finish(commit)``          called once for each ``begin``, with a :class:`concurrent.futures.Future` that is done
                                when the transaction is committed and acknowledged, and failed when it failed

    The thread that runs the consumer calls them all. An error of any of them ends the consumer, except :class:`Defer`
    and :class:`Abort`.
    """

    def consume(self, envelope: Envelope, publisher: Publisher) -> object:
        """Take a committed message. It may call ``publisher.publish_uncommitted``, and raise :class:`Defer`.

        A consumer with ``inside=True`` calls ``consume(envelope, publisher, writes)``.
        """

    def finalize(self, publisher: Publisher) -> Callable[[Any], Any] | None:
        """End the transaction. Return a function that writes within the checkpoint's transaction, or None.

        The function is called once, with the argument that the checkpoint gives (a connection, for example). It runs in
        another thread while the next transaction is consumed, so the data that it writes must be its own.
        """


@dataclasses.dataclass
class _Transaction:
    """The transaction that is under way."""

    began: float | None = None
    """The time at which its first message was consumed."""
    consumed: int = 0
    moved: bool = False
    """True if messages were read that are not for the application, and that a successor need not read again."""
    reading: bool = True
    """True while it takes further messages."""
    young: bool = True
    """True while it is younger than ``min_s``."""
    handed_over: bool = False
    """True if its commit is under way, or done."""


class Consumer(Closing):
    """Runs an application over queues, one transaction after another; see the module.

    ``sources``        queues of any stores, each once, all partitions of which are read, also those that are added
                       later; :class:`cues.txn.ReadFrom`, with a start position and ``on_gap`` for a queue; or
                       :class:`cues.txn.MessageSource`, a source of your own
    ``checkpoint``     a checkpoint of :mod:`cues.checkpoints`, under one name for each consumer
    ``min_s, max_s``   the shortest and the longest duration of a transaction, in seconds
    ``wait_for_ack``   whether a transaction that has read pending messages waits for their acknowledgement, at most
                       ``max_s``, so that both are in the same transaction
    ``ring``           the number of pending messages that are kept in memory; others are read again
    ``horizon_s``      seconds after which the checkpoint drops producers that wrote nothing and have nothing pending
    ``on_gap``         ``"raise"``: raise :class:`Gap` for messages that were purged before they were consumed;
                       ``"skip"``: log them, count them in :attr:`skipped` and continue, even with the rest of a
                       transaction
    ``missing``        the acknowledgements that a start may leave out: ``"removed"``, those for queues that were
                       removed from their store; ``"skip"``, also those for missing stores, whose readers then never
                       see the transaction; ``"refuse"``, none. For any other missing queue or store the start fails
    ``message_type``   the type of messages that are not dicts, read and published
    ``validate``       ``validate(message)`` may raise to refuse a message that is published, before it is mapped
    ``clock``          a :class:`cues.txn.Clock` that several publishers share; wall time then never moves it
    ``inside``         call ``consume(envelope, publisher, writes)`` inside the open transaction of the checkpoint, with
                       the argument that ``work`` would get: a row can be read before it is decided what to publish.
                       The next transaction then begins after the commit of this one
    ``lease_s``        the instance waits while another one runs that has given a sign of life within so many seconds; 0
                       does not wait, and takes over at once
    ``transaction_timeout_s``
                       as for :class:`Publisher`: seconds after which others may drop messages of a transaction that
                       is not finalized, because the consumer seems to be gone
    ``now``            a function that returns the seconds of a monotonic clock

    One thread uses a consumer; any thread may call :meth:`stop`. Every call raises :class:`cues.Fenced` after another
    instance has taken over.
    """

    def __init__(
        self,
        app: App,
        sources: Sequence[Queue | ReadFrom | MessageSource],
        checkpoint: CheckpointStore,
        *,
        min_s: float = 0.0,
        max_s: float = MAX_S,
        wait_for_ack: bool = False,
        ring: int = RING,
        horizon_s: float = HORIZON_S,
        on_gap: OnGap = "raise",
        missing: Missing = "removed",
        message_type: MessageType = DICT,
        validate: Callable[[Any], object] | None = None,
        clock: Clock | None = None,
        inside: bool = False,
        lease_s: float = LEASE_S,
        transaction_timeout_s: float | None = TRANSACTION_TIMEOUT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_has(app, "The application", "consume", "finalize")
        _check_has(checkpoint, "The checkpoint", "restore", "commit")
        if isinstance(sources, Queue):
            raise InvalidArgument(f"The sources are one queue, {sources.id!r}.", "pass a list: [queue].")
        own = [source for source in sources if not isinstance(source, (Queue, ReadFrom)) and hasattr(source, "read")]
        for source in own:
            _check_has(source, "A source", "read")
            if not (isinstance(getattr(source, "journal", None), str) and source.journal):
                raise InvalidArgument(
                    f"The source {source!r:.60} has no journal.",
                    "give it an attribute journal: the name of the source.",
                )
        wanted = [
            source if isinstance(source, ReadFrom) else ReadFrom(source)  # type: ignore[arg-type]
            for source in sources
            if source not in own
        ]
        journals = [journal_of(view) for source in wanted for view in views_of(source.queue)]
        journals += [source.journal for source in own]
        if not journals or len(set(journals)) < len(journals):
            raise InvalidArgument(
                f"The sources are {', '.join(journals) or 'none'}.", "pass one or more queues, each once."
            )
        self._settings = ConsumerSettings(
            min_s=min_s,
            max_s=max_s,
            wait_for_ack=wait_for_ack,
            ring=ring,
            horizon_s=horizon_s,
            on_gap=on_gap,
            missing=missing,
            message_type=message_type,
            validate=validate,
            clock=clock,
            inside=inside,
            lease_s=lease_s,
            transaction_timeout_s=transaction_timeout_s,
            now=now,
        )
        if inside:
            _check_has(checkpoint, "The checkpoint of a consumer with inside=True", "begin")
        self._opened: Any = None
        """The transaction of the checkpoint that is open, with ``inside``."""
        self._app: Any = app
        self._wanted = wanted
        self._own = own
        self._checkpoint = checkpoint
        leased = callable(getattr(checkpoint, "set_lease", None)) and callable(getattr(checkpoint, "lease", None))
        self._turn = Turn(checkpoint, lease_s) if leased else None  # type: ignore[arg-type]
        self._stopping = False
        self._ended = False
        self._registration = Registration.of(checkpoint, wanted)
        self._sources = Sources([], {}, self._open_reader)
        self._publisher: Publisher | None = None
        self._sequencer = Sequencer()
        self._last = Checkpoint()
        """The last checkpoint that was committed."""
        self._noted = self._last
        """The last checkpoint whose position was noted in the stores that are read."""
        self._thread: ThreadPoolExecutor | None = None
        self._commit_under_way: Future[None] | None = None
        self._unsettled = False
        """True from the moment at which a commit may begin until it is known to be done: then nothing is dropped."""
        self._out: Envelope | None = None
        """A committed message that was handed out and not consumed. It is the first of the next transaction."""
        self.read_through: dict[str, int] = {}
        """By journal, the index before which all messages are committed and acknowledged, or not handed out."""
        self.skipped: dict[str, int] = {}
        """By journal, the number of messages that were purged before they were read, and skipped (``on_gap``)."""
        self.needed_from: dict[str, int] = {}
        """The index of each journal before which no message is read again, so that all before it may be purged. It is
        below :attr:`read_through` while a transaction is open there."""

    # --- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Consume until :meth:`stop`. Then commit all consumed messages, and return when they are acknowledged."""
        self._run(draining=False)

    def drain(self) -> bool:
        """Consume until every source is read to its end, committed and acknowledged; returns True then.

        Returns False if :meth:`stop` ended it: the consumed messages are committed, and there may be more.
        """
        return self._run(draining=True)

    def stop(self) -> None:
        """End the :meth:`run` or :meth:`drain` that is under way, or else the next one, soon.

        One call ends one of them; a later :meth:`drain` or :meth:`run` continues. Any thread or signal handler may call
        it: it takes no lock.
        """
        self._stopping = True

    def wait_read_through(self, indices: Mapping[Queue, int | PartitionIndex], timeout: float | None = None) -> None:
        """Wait, in another thread, until messages are consumed, committed and acknowledged.

        See :func:`cues.txn.wait_read_through`, which does the same from any process.
        """
        wait_read_through(self._checkpoint, indices, timeout)  # type: ignore[arg-type]

    @override
    def close(self) -> None:
        """Close the publisher and the thread. Transactions that are not committed are dropped. Sources stay open."""
        self._ended = True
        if self._opened is not None:
            opened, self._opened = self._opened, None
            with contextlib.suppress(Exception):  # the connection may be lost
                opened.roll_back()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._turn is not None:
            self._turn.end()
        if self._publisher is not None:
            with contextlib.suppress(CuesError):  # its pending messages are dropped in any case
                self._publisher.close()
            if self._registration is not None:
                self._registration.end(nothing_pending=not (self._unsettled or self._publisher.has_pending))

    def _run(self, draining: bool) -> bool:
        """Run; return whether it ended without :meth:`stop`."""
        if self._ended:
            raise CuesError("This consumer has ended.", "make a new Consumer, which continues from the checkpoint.")
        try:
            if self._publisher is None:
                self._start()
            elif self._turn is not None:
                with contextlib.suppress(Fenced):  # the next commit is refused too, and tells the application
                    self._turn.begin(None)
            while not self._stopping:
                try:
                    if not self._transaction(draining):
                        break
                except Abort:
                    self._abort()
            self._collect(wait=True)
            self._note(at_once=True)
            if self._turn is not None:
                self._turn.end()
            stopped, self._stopping = self._stopping, False
            return not stopped
        except BaseException as error:
            try:
                failed = self._failure()
                if isinstance(error, Exception):
                    self._drop()
            finally:
                self.close()
            if failed is not None and failed is not error and isinstance(error, Exception):
                raise failed from error  # this error is a consequence of the failed commit
            raise

    # --- start --------------------------------------------------------------------------------

    def _start(self) -> None:
        # 0 and 1. Wait, restore.
        restored = self._restore()
        if restored is None:
            return
        # No timeout: the acknowledgement is appended, or the publisher is closed.
        self._publisher = Publisher(
            self._settings.clock,
            self._settings.validate,
            self._settings.message_type,
            acknowledge_timeout_s=None,
            transaction_timeout_s=self._settings.transaction_timeout_s,
        )
        self._thread = ThreadPoolExecutor(1, "cues consumer")
        faults.point("consumer.restored")
        # 2. Repeat.
        for skipped in self._publisher.append_ack_intents(restored.ack_intents, self._settings.missing):
            _log.warning(
                "%s is missing: its readers never see the messages of the last transaction.",
                skipped.journal,
                queue=skipped.journal,
            )
        faults.point("consumer.repeated")
        if self._registration is not None:
            self._registration.roll_back()
            faults.point("consumer.dropped")
            self._publisher.row = self._registration.row()
            self._publisher.before_pending = self._registration.before_pending
        if hasattr(self._app, "start"):
            self._app.start()
        # 3. Read.
        self._read(restored)
        if self._sources.begun:
            # Otherwise a successor would begin at another place, if this instance dies before its first commit.
            restored = dataclasses.replace(restored, offsets={**restored.offsets, **self._sources.begun})
            self._checkpoint.commit(restored, None)
            self._sequencer = Sequencer(restored.producers, self._settings.ring, restored.offsets)
        self._committed(restored)
        if self._registration is not None:
            self._registration.begin(self._sources.by_journal.values(), restored)

    def _read(self, checkpoint: Checkpoint) -> None:
        """Open the sources at the offsets of a checkpoint."""
        self._sources = Sources(
            self._wanted, checkpoint.offsets, self._open_reader, self._own, self._settings.message_type
        )
        self._sequencer = Sequencer(checkpoint.producers, self._settings.ring, checkpoint.offsets)

    def _abort(self) -> None:
        """Drop the transaction under way, and continue from the last one, which is committed first."""
        publisher = self._publisher
        assert publisher is not None
        self._collect(wait=True)
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.roll_back()
        publisher.abort()
        faults.point("consumer.aborted")
        self._out = None
        self._read(self._last)

    def _restore(self) -> Checkpoint | None:
        """Wait for the turn of this instance, and restore; None if :meth:`stop` ended the wait."""
        restore, turn = self._checkpoint.restore, self._turn
        if turn is None:
            return restore() or Checkpoint()
        if not turn.waits:
            return turn.begin(restore) or Checkpoint()
        while (fence := turn.wait(lambda: self._stopping)) is not None:
            try:
                return turn.begin(restore, fence) or Checkpoint()
            except Fenced:  # another instance, which waited too, was faster
                continue
        return None

    def _open_reader(self, source: ReadFrom, queue: Queue, begin: int, end: int | None) -> ReadUncommitted:
        journal = journal_of(queue)

        def skip(count: int) -> None:
            self.skipped[journal] = self.skipped.get(journal, 0) + count

        reader = f"the consumer of {self._checkpoint!r}"
        return ReadUncommitted(
            queue,
            begin,
            end,
            on_gap=source.on_gap or self._settings.on_gap,
            message_type=self._settings.message_type,
            reader=reader,
            on_skip=skip,
        )

    # --- a transaction ------------------------------------------------------------------------

    def _transaction(self, draining: bool) -> bool:
        """Consume messages and begin the commit; False if there is nothing to commit and nothing to wait for."""
        transaction = _Transaction()
        try:
            while True:
                self._collect()
                if self._turn is not None and self._turn.lost is not None:
                    raise self._turn.lost  # also while nothing is consumed
                if transaction.reading and self._out is None:
                    self._out = self._next(transaction)
                self._check_time(transaction)
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

    def _next(self, transaction: _Transaction) -> Envelope | None:
        """Return the next committed message; None if there is none now, or the transaction ends."""
        sequencer = self._sequencer
        while True:
            try:
                envelope = sequencer.step()
            except SequenceError as error:
                if isinstance(error.__cause__, CuesError):
                    raise error.__cause__ from None  # a gap, or a damaged batch, in a replay
                raise
            if envelope is not None:
                return envelope
            read = self._sources.next()
            if read is None:
                for source in self._sources.positions():
                    if source.at > sequencer.offsets.get(source.journal, source.at):
                        sequencer.offsets[source.journal] = source.at  # a gap at the end was skipped
                        transaction.moved = True
                return None
            outcome = sequencer.queue(read)
            if outcome is Outcome.AckCommitReplay:
                journal, begin, end = sequencer.replay_range()
                sequencer.start_replay(self._sources.replay(journal, begin, end))
            elif not outcome.emits:
                # Pending messages may be needed again; messages that were rolled back or repeated are not.
                if outcome not in (Outcome.ContinueBeginSpan, Outcome.ContinueExtendSpan):
                    transaction.moved = True
                self._check_time(transaction)
                if not transaction.reading:
                    return None

    def _check_time(self, transaction: _Transaction) -> None:
        if transaction.began is not None:
            age_s = self._settings.now() - transaction.began
            transaction.young = age_s < self._settings.min_s
            transaction.reading = transaction.reading and age_s < self._settings.max_s
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
            if self._settings.inside:
                self._collect(wait=True)  # this transaction reads what the last one has written
                self._opened = self._checkpoint.begin()  # type: ignore[attr-defined]
            if hasattr(self._app, "begin"):
                self._app.begin()
            transaction.began = self._settings.now()
        try:
            if envelope.acknowledgement:
                self._app.acknowledged(envelope)
            elif self._opened is not None:
                with self._opened.errors():
                    self._app.consume(envelope, publisher, self._opened.argument)
            else:
                self._app.consume(envelope, publisher)
        except Defer:
            if not transaction.consumed:
                raise CuesError(
                    f"The application deferred {envelope.begin} of {envelope.journal}, the first message of a"
                    " transaction: there is nothing to commit before it.",
                    "consume the first message of each transaction.",
                ) from None
            transaction.reading = False
            return
        transaction.consumed += 1
        self._out = None
        if faults.active:
            faults.point("consumer.consumed")

    def _must_wait(self, transaction: _Transaction, draining: bool) -> bool:
        """Return whether the transaction must not be committed yet, although there is nothing to consume."""
        # The commit of the last transaction is under way, and there is one at a time.
        if self._commit_under_way is not None:
            return True
        # Nothing was consumed, so there is nothing to commit. Wait for messages, unless the run is to end.
        if transaction.began is None:
            return not (draining or self._stopping or transaction.moved)
        # A drain has read everything, and waits no longer.
        if draining:
            return False
        # The transaction is younger than min_s.
        if transaction.young and transaction.reading:
            return True
        # Pending messages were read without their acknowledgement: wait for it, at most max_s.
        return self._settings.wait_for_ack and transaction.reading and self._sequencer.has_pending()

    def _wait(self, transaction: _Transaction) -> None:
        """Sleep until a message arrives, the commit under way is done, or ``min_s`` or ``max_s`` has passed."""
        commit = self._commit_under_way
        left_s = None
        if transaction.began is not None and transaction.reading:
            due_s = self._settings.min_s if transaction.young else self._settings.max_s
            left_s = max(0.0, transaction.began + due_s - self._settings.now())
        limits_s = [GROWTH_S] if self._sources.grow else []
        if self._own:
            limits_s.append(POLL_S)
        if self._noted is not self._last and self._registration is not None:
            limits_s.append(max(0.0, self._registration.due_s))
        if limits_s:
            left_s = min(limits_s if left_s is None else [left_s, *limits_s])

        def ready() -> bool:
            committed = commit is not None and commit.done()
            return committed or (transaction.reading and (self._stopping or self._sources.ready()))

        wakeup.wait(self._sources.interests, ready, left_s)

    # --- commit ---------------------------------------------------------------------------

    def _commit(self, transaction: _Transaction) -> None:
        publisher = self._publisher
        assert publisher is not None and self._thread is not None
        # 5. Finalize.
        work = None if transaction.began is None else self._app.finalize(publisher)
        faults.point("consumer.finalized")
        # 6. The barrier of the published messages, which also builds their acknowledgements.
        intents = publisher.build_ack_intents()
        # 7. Checkpoint.
        checkpoint = self._sequencer.checkpoint(int(self._settings.horizon_s * 1e9), keep_open=True)
        checkpoint = dataclasses.replace(checkpoint, ack_intents=tuple(intents))
        transaction.handed_over = self._unsettled = True
        if self._opened is None:
            self._commit_under_way = self._thread.submit(self._commit_in_thread, checkpoint, work, intents)
        else:
            self._commit_under_way = Future()
            try:
                self._commit_in_thread(checkpoint, work, intents)
                self._commit_under_way.set_result(None)
            except BaseException as error:
                self._commit_under_way.set_exception(error)
            self._opened = None
        if self._wanted:
            store = self._wanted[0].queue.store
            self._commit_under_way.add_done_callback(
                lambda _: store.core.ring_own()
            )  # wakes the thread of the consumer
        if transaction.began is not None:
            self._finish(self._commit_under_way)

    def _commit_in_thread(self, checkpoint: Checkpoint, work: Any, intents: list[AckIntent]) -> None:
        publisher = self._publisher
        assert publisher is not None
        try:
            # 6. The barrier of the messages that were read.
            for store in self._sources.stores():
                store.sync()
            faults.point("consumer.before")
            # 8. Commit.
            (self._opened or self._checkpoint).commit(checkpoint, work)
            faults.point("consumer.committed")
            # 9. Acknowledge.
            publisher.append_ack_intents(intents)
            faults.point("consumer.acknowledged")
        except BaseException:
            # The next transaction may wait for these acknowledgements, which will not be appended.
            with contextlib.suppress(CuesError):
                publisher.close()
            raise
        self._committed(checkpoint)

    def _committed(self, checkpoint: Checkpoint) -> None:
        self.read_through, self.needed_from = checkpoint.offsets, needed_from(checkpoint)
        self._last = checkpoint

    def _note(self, at_once: bool = False) -> None:
        """Note the position of the last checkpoint in the stores that are read, at intervals."""
        registration, last = self._registration, self._last
        if registration is not None and self._noted is not last and (at_once or registration.due_s <= 0):
            self._noted = last
            registration.note(self._sources.by_journal.values(), last)

    def _collect(self, wait: bool = False) -> None:
        """Take the result of the commit under way, if it is done, or ``wait`` for it. Raises its error."""
        if self._commit_under_way is not None and (wait or self._commit_under_way.done()):
            commit, self._commit_under_way = self._commit_under_way, None
            commit.result()
            self._unsettled = False
        self._note()

    def _failure(self) -> BaseException | None:
        """Wait for the commit under way, and return its error."""
        if self._commit_under_way is None:
            return None
        with contextlib.suppress(BaseException):
            self._commit_under_way.result()
            self._unsettled = False
        return self._commit_under_way.exception()

    def _drop(self) -> None:
        """Drop the pending messages of a transaction that failed, on every queue, unless its outcome is unknown.

        A successor could drop only those on queues that the last checkpoint names. After a commit that failed, the
        checkpoint may nevertheless be there, and its successor acknowledges the messages.
        """
        if self._publisher is not None and not self._unsettled and not self._publisher.closed:
            with contextlib.suppress(CuesError):  # a store may be away; the first error is the one to raise
                self._publisher.abort(_DROP_S)

    def _finish(self, commit: Future[None]) -> None:
        if hasattr(self._app, "finish"):
            self._app.finish(commit)


def _check_has(given: object, what: str, *methods: str) -> None:
    """Refuse an object that would fail at the first message."""
    missing = [name for name in methods if not callable(getattr(given, name, None))]
    if missing:
        raise InvalidArgument(
            f"{what} is {given!r:.60}, which has no {' and no '.join(missing)}.",
            f"pass an object with {' and '.join(methods)}.",
        )
