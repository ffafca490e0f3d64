"""The publisher: writes messages with identities, committed at once or pending until they are acknowledged.

    publisher = Publisher()
    publisher.publish_committed(mapping, message).wait()

A transaction over queues of several stores. The commit of a checkpoint decides it:

    1. publish_uncommitted(mapping, message)     append pending messages; readers of committed messages do not see them
    2. intents = build_ack_intents()             wait until all of 1 is durable; build the acknowledgements
    3. (the program commits a checkpoint that contains the intents)
    4. append_ack_intents(intents)               append the acknowledgements; now readers see the messages

A program that dies before 3 leaves messages that are never acknowledged. A program that dies after 3 starts again from
the checkpoint and repeats 4. The repetition is harmless. It also drops the pending messages of a producer that died in
its next transaction.

An acknowledgement names only a clock. It would commit or drop messages of the next transaction that are before it in
the queue. So the next transaction must not write to a queue before the acknowledgement is there: from 2 on its messages
wait in memory for 4, queue by queue. :meth:`Publisher.publish_uncommitted` itself does not wait.

After an exception (a Ctrl-C too) the same publisher can continue, from the checkpoint: append the intents that it
holds, call :meth:`Publisher.abort`, and publish again the messages that the checkpoint does not have.

The thread that publishes checks and encodes a message. One thread for each store appends the messages in their order,
many in one transaction (see :mod:`cues.txn.writer`). Clocks are taken inside that transaction. Otherwise a message with
a later clock could be appended first, and readers would take the other one for a repetition.

Not guaranteed: that a message is in its queue before its :class:`Append` is done (wait for it, or call
:meth:`Publisher.flush`); that pending messages whose acknowledgements were built are dropped if no checkpoint has them
(see :meth:`Publisher.roll_back`). Others are dropped after ``transaction_timeout_s`` (:mod:`cues.queues.rollback`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid as uuids
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal

from cues import codec, faults
from cues.base import clock
from cues.base.checks import is_number
from cues.errors import Closed, CuesError, Fenced, Forked, InvalidArgument, QueueNotFound, StoreNotFound
from cues.overrides import override
from cues.producers.sequencer import AckIntent
from cues.queues import rollback, stamped
from cues.queues.backpressure import await_room
from cues.queues.base import journal_of
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.records.identity import ZERO_UUID, Clock, Flags, ProducerID, assemble
from cues.storage import environment
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction
from cues.txn.consumer_rows import PublisherRow
from cues.txn.messages import DICT, MessageType
from cues.txn.writer import CONTINUE, Append, StoreWriter

ACKNOWLEDGE_TIMEOUT_S: Final = 60.0
"""Seconds for which a call waits for an acknowledgement that it needs, before :class:`WaitTimeout`."""

TRANSACTION_TIMEOUT_S: Final = 900.0
"""As Kafka's ``transaction.max.timeout.ms``: much longer than a transaction takes, so that only dead ones end so."""

_ACK: Final = int(Flags.ACK_TXN)

_TARGETS_MAX: Final = 1024
"""The number of handles that a publisher remembers: a mapping may make one for each message."""

Mapping = Callable[[Any], "Queue"]
Missing = Literal["refuse", "removed", "skip"]
"""The acknowledgements that may be left out; see :meth:`Publisher.append_ack_intents`."""


class Publisher:
    """Writes to any queues of any stores under one producer id, until :meth:`close`.

    ``clock``                   a clock that several publishers share; wall time then never moves it
    ``validate(message)``       may raise to refuse a message, before it is mapped
    ``message_type``            the type of messages that are not dicts
    ``acknowledge_timeout_s``   seconds after which a call without its own timeout raises :class:`WaitTimeout` if it
                                needs an acknowledgement of the last transaction; None waits without end, for programs
                                whose checkpoint may take any time
    ``transaction_timeout_s``   seconds from the first pending message in a queue until anyone may roll the transaction
                                back, if its acknowledgements were not built; None: only its owner and
                                :meth:`roll_back` do
    ``name``                    shown by ``cues status`` beside pending messages; the default is the id

    Any thread may publish committed messages; one thread at a time publishes uncommitted ones. In a forked child every
    call raises :class:`Forked`. A publisher that is made there has its own id.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        validate: Callable[[Any], object] | None = None,
        message_type: MessageType = DICT,
        *,
        acknowledge_timeout_s: float | None = ACKNOWLEDGE_TIMEOUT_S,
        transaction_timeout_s: float | None = TRANSACTION_TIMEOUT_S,
        name: str = "",
    ) -> None:
        check_publishing(clock, validate)
        check_timeout(transaction_timeout_s)
        self.id = ProducerID()
        self.row = PublisherRow(b"", 0, name)
        """The row that tells others whose pending messages these are."""
        self.before_pending: Callable[[BaseStore], object] = lambda store: None
        """Called with a store before the first pending message in it."""
        self._clock = Clock() if clock is None else clock
        self._by_wall_time = clock is None
        self._validate = validate
        self._type = message_type
        self.acknowledge_timeout_s = acknowledge_timeout_s
        self.transaction_timeout_s = transaction_timeout_s
        self._pid = os.getpid()
        self._closed = False
        self.guard = threading.Lock()
        """The lock of all attributes below, and of those of the writers."""
        self._writers: dict[bytes, list[StoreWriter]] = {}
        self._spans: dict[str, Queue] = {}
        """The queues with pending messages of the transaction under way, by journal, in the order of first use."""
        self.begins: dict[str, int] = {}
        """The index of the first pending message of the transaction under way, by journal: its fence."""
        self.due: dict[str, uuids.UUID] = {}
        """Acknowledgements that were built and not appended yet, by journal."""
        self._queues: dict[str, Queue] = {}
        self._targets: dict[Queue, tuple[StoreWriter, str]] = {}
        """The handles of queues that messages were mapped to; for each the writer of its store, and its journal."""
        self._lost: BaseException | None = None
        """The error of a pending message that was not appended: the transaction must not be acknowledged."""

    def publish_committed(self, mapping: Mapping, message: Any) -> Append:
        """Append a message that readers see at once. Any thread may call it.

        Raises the errors of ``validate``, the mapping and the encoding; the message is then not written. Raises
        :class:`InvalidArgument` if this publisher has pending messages in the queue: they would be lost.
        """
        return self._publish(mapping, message, 0, None)

    def publish_uncommitted(self, mapping: Mapping, message: Any, timeout: float | None = None) -> Append:
        """Append a message of the transaction under way, pending until it is acknowledged. One thread at a time.

        If an intent for its queue was built and not appended, the message waits in memory until it is. The call itself
        waits only while 32 MiB of messages wait. Raises :class:`WaitTimeout` after ``timeout`` seconds, and the errors
        of :meth:`publish_committed`.
        """
        return self._publish(mapping, message, CONTINUE, timeout)

    def _publish(self, mapping: Mapping, message: Any, flags: int, timeout: float | None) -> Append:
        """Check, map and encode a message, and hand it to the writer of its store."""
        self._check()
        if not callable(mapping):
            raise InvalidArgument(
                f"The mapping {mapping!r:.60} cannot be called.",
                "pass lambda message: queue, or cues.txn.modulo_mapping(…).",
            )
        if self._validate is not None:
            self._validate(message)
        queue = mapping(message)
        target = self._targets.get(queue) if isinstance(queue, Queue) else None
        if target is None or queue.closed or queue.is_partitioned or target[0].store.closed:
            target = self._target(queue)
        writer, name = target
        uuid = self._type.get_uuid(message)
        if uuid is not None and uuid == ZERO_UUID:
            flags = -1  # without identity
        body = stamped.encode(queue, self._type.fields(message))
        journal = name if flags == CONTINUE else ""
        append = Append(writer, queue, flags, body, journal)
        if queue.core.bounded and journal not in self._spans:  # a transaction that has begun on the queue goes on
            await_room([queue], timeout=timeout)
        if flags == CONTINUE and not writer.registered:
            self.before_pending(queue.store)
            writer.register()
        with self.guard:
            writer.make_room(timeout)
            if self._closed:
                self._check()
            if flags == 0 and (name in self._spans or name in self.due):
                raise InvalidArgument(
                    f"This publisher has pending messages in {queue.id!r}; a message outside of the transaction would"
                    " drop them.",
                    "call publish_uncommitted(), or use another Publisher.",
                )
            if flags == CONTINUE:  # first, so that a message is never without its acknowledgement
                self._spans.setdefault(journal, queue)
                self._queues.setdefault(journal, queue)
            writer.add(append)
        return append

    def append_stamped(self, queue: Queue, messages: Iterable[stamped.Pair]) -> int:
        """Append messages that have UUIDs already; see :func:`cues.txn.append_stamped`."""
        self._check()
        return stamped.append_stamped(queue, messages)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all messages that were published so far are in their queues.

        Raises the first error of an append since the last flush, and :class:`WaitTimeout`.
        """
        self._check()
        self._settle(timeout)
        self._raise_failed()

    def _raise_failed(self) -> None:
        for writer in self.all_writers():
            if writer.failed is not None:
                error, writer.failed = writer.failed, None
                raise error

    def _settle(self, timeout: float | None) -> None:
        """Wait until all messages that were published so far are in their queues, or have failed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for writer in self.all_writers():
            writer.settle(deadline)

    def all_writers(self) -> list[StoreWriter]:
        return [writer for writers in list(self._writers.values()) for writer in writers]

    def _target(self, queue: Queue) -> tuple[StoreWriter, str]:
        """Check a queue that messages are mapped to, and return the writer of its store, and its journal."""
        stamped.check_target(queue)
        if len(self._targets) >= _TARGETS_MAX:
            self._targets.clear()
        self._targets[queue] = target = self._writer(queue.store), journal_of(queue)
        return target

    def _writer(self, store: BaseStore) -> StoreWriter:
        with self.guard:
            writers = self._writers.setdefault(store.id, [])
            for writer in writers:  # a copy of a store has the same id
                if writer.store is store or (writer.store.core.same_as(store.core) and not writer.store.closed):
                    return writer
            store.core.search()
            writers.append(StoreWriter(self, store))
            return writers[-1]

    def build_ack_intents(self, timeout: float | None = None) -> list[AckIntent]:
        """Build the acknowledgements of all messages published uncommitted since the last call: one for each queue.

        When this returns, the messages are in their queues and survive a power cut there, at any durability of the
        store. Commit the intents with the checkpoint, then append them. Raises the error of a failed append, and
        :class:`Fenced` if messages were rolled back; the transaction can then not be acknowledged any more, nor can
        another one of this publisher before :meth:`abort`. After it has returned, no timeout rolls the messages back.
        """
        self.flush(timeout)
        if self._lost is not None:
            raise self._lost
        for store in {id(queue.store): queue.store for queue in self._spans.values()}.values():
            try:
                store.core.commit(self._prepare, store)
            except Fenced as error:
                self._lost = error
                raise
            faults.point("intents.prepared")
            store.sync()
        built, due = [], {}
        with self.guard:
            for journal, queue in self._spans.items():
                due[journal] = uuid = assemble(int.from_bytes(self.id, "big"), self._clock.tick(), _ACK)
                built.append(AckIntent(journal, codec.pack([uuid.bytes, queue.store.directory])))
            self.due.update(due)
            self._spans.clear()
            self.begins.clear()
        faults.point("intents.built")
        return built

    def _prepare(self, txn: StoreTransaction, store: BaseStore) -> None:
        """Remove the deadlines of the transaction in a store. Raises :class:`Fenced` if it was rolled back."""
        producer = int.from_bytes(self.id, "big")
        for journal, queue in self._spans.items():
            if queue.store is store and journal in self.begins:
                rollback.fence(txn, queue, producer, self.begins[journal])
                rollback.decide(txn, queue, producer)

    def append_ack_intents(self, intents: Iterable[AckIntent], missing: Missing = "refuse") -> list[AckIntent]:
        """Append acknowledgements, those of this publisher or those of a checkpoint. May be repeated.

        Each is appended to the store that it was built for, at its old path or where this process has it open. The
        acknowledgements for one store are one transaction, which survives a power cut. Raises :class:`QueueNotFound`
        for a queue that was removed from its store, and :class:`StoreNotFound` for a missing store.
        ``missing="removed"`` leaves out acknowledgements for removed queues and returns them. ``missing="skip"`` also
        leaves out those for missing stores: if such a store returns, its readers never see the transaction.
        """
        if missing not in ("refuse", "removed", "skip"):
            raise InvalidArgument(f"missing={missing!r}.", "pass 'refuse', 'removed' or 'skip'.")
        self._check()
        skipped: list[AckIntent] = []
        bound: dict[int, tuple[BaseStore, list[tuple[Queue, uuids.UUID]]]] = {}
        opened: list[Store] = []
        done: list[str] = []
        try:
            for intent in intents:
                uuid, path = read_intent(intent)
                try:
                    queue = self._find(intent.journal, path, opened)
                except (QueueNotFound, StoreNotFound) as error:
                    if missing == "refuse" or (missing == "removed" and isinstance(error, StoreNotFound)):
                        raise
                    skipped.append(intent)
                    continue
                bound.setdefault(id(queue.store), (queue.store, []))[1].append((queue, uuid))
                if self.due.get(intent.journal) == uuid:
                    done.append(intent.journal)
            for store, pairs in bound.values():
                stamped.append_all(store, [(queue, [(uuid, {})]) for queue, uuid in pairs])
                # The next checkpoint drops these intents, even if its transaction writes nothing to this store.
                store.sync()
        finally:
            for store in opened:
                store.close()
        self._acknowledge(done)
        return skipped

    def _acknowledge(self, journals: Iterable[str]) -> None:
        """Note that the acknowledgements of these journals are appended, and wake the writers."""
        with self.guard:
            for journal in journals:
                self.due.pop(journal, None)
            for writer in self.all_writers():
                writer.wake()

    def abort(self, timeout: float | None = None) -> None:
        """Drop all messages that were published uncommitted and are not acknowledged. A new transaction can begin.

        This is for a transaction whose checkpoint did not commit. If its checkpoint did commit, append its intents
        first; otherwise its messages are dropped. Waits for the appends that are under way. Raises
        :class:`WaitTimeout` after ``timeout`` seconds, and the errors of appends. It may be repeated after any
        exception.
        """
        self._check()
        with self.guard:
            for writer in self.all_writers():
                writer.drop(lambda append: bool(append.journal), self._dropped())
        self._settle(timeout)
        for journal in {**self._spans, **self.due}:
            self.roll_back(self._queues[journal], self.id)
        for writer in self.all_writers():
            if writer.failed is self._lost:
                writer.failed = None
        self._lost = None
        self._spans.clear()
        self.begins.clear()
        self._acknowledge(list(self.due))

    def _dropped(self) -> CuesError:
        return CuesError(
            f"The publisher {self.id.hex()} dropped the transaction of this message before it was appended.",
            "publish it again in another transaction.",
        )

    def roll_back(self, queue: Queue, producer: ProducerID) -> bool:
        """Drop the pending messages of a dead producer in a queue; return False if it has none.

        Use this for queues that no intent of its last checkpoint names: there nothing else drops them. A producer that
        is alive would lose its pending messages.
        """
        self._check()
        stamped.check_target(queue)
        number = int.from_bytes(producer, "big")
        dropped = queue.store.core.commit(rollback.roll_back, queue, number, producer != self.id)
        queue.store.core.ring(queue.core.log.mask)
        return bool(dropped)

    def _find(self, journal: str, path: str, opened: list[Store]) -> Queue:
        """Find the queue of an intent: one of this publisher, or one of a store that is opened now."""
        known = self._queues.get(journal)
        if known is not None and not known.closed:
            return known
        return find_queue(journal, path, opened.append)

    def close(self) -> None:
        """Flush, and end the threads. Unacknowledged messages stay pending. Raises the errors of :meth:`flush`.

        Messages that wait in memory for an acknowledgement are dropped: no reader would ever see them. It may be
        repeated after an exception, and then continues. In a forked child it does nothing, because the threads are not
        there.
        """
        if os.getpid() != self._pid:
            return
        with self.guard:
            self._closed = True
            for writer in self.all_writers():
                writer.close(self._dropped())
        self._settle(None)
        for writer in self.all_writers():
            writer.unregister()
        self._raise_failed()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def has_pending(self) -> bool:
        """True if messages were published that are not acknowledged and not dropped."""
        return bool(self._spans or self.due)

    def check_process(self) -> None:
        """Raise :class:`Forked` in a child of the process that made the publisher: its threads are not there."""
        if os.getpid() != self._pid:
            raise Forked(
                f"The publisher {self.id.hex()} was made by process {self._pid}, which forked this one.",
                "make a Publisher in this process.",
                pid=self._pid,
            )

    def _check(self) -> None:
        self.check_process()
        if self._closed:
            raise Closed("The publisher is closed.", "make a new Publisher.")

    def advance(self, ticks: int) -> int:
        """Return the clock of the first of ``ticks`` messages. Called inside the transaction that appends them."""
        if self._by_wall_time:
            self._clock.update(clock.now_ns())
        return self._clock.advance(ticks)

    def lose(self, error: BaseException) -> None:
        """Remember the error of a pending message that could not be appended."""
        self._lost = self._lost or error

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.nullcontext() if kind is None else contextlib.suppress(CuesError):
            self.close()  # an error of the block is more important than one of close()

    @override
    def __repr__(self) -> str:
        return f"<cues.txn.Publisher {self.id.hex()}>"


def check_publishing(clock: object, validate: object) -> None:
    """Raise :class:`InvalidArgument` for a clock or a ``validate`` that a publisher cannot use."""
    if not (clock is None or isinstance(clock, Clock)):
        raise InvalidArgument(f"clock={clock!r} is not a Clock.", "pass Clock(), or None.")
    if not (validate is None or callable(validate)):
        raise InvalidArgument(f"validate={validate!r} cannot be called.", "pass a function of a message, or None.")


def check_timeout(timeout_s: object) -> None:
    """Raise :class:`InvalidArgument` unless this is a ``transaction_timeout_s``."""
    if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and is_number(timeout_s) and timeout_s > 0):
        raise InvalidArgument(
            f"transaction_timeout_s={timeout_s!r}.", "pass seconds, more than the longest transaction takes, or None."
        )


def find_queue(journal: str, path: str, opened: Callable[[Store], object], readonly: bool = False) -> Queue:
    """Find the queue of an intent: at the path of its store, or where this process has the store open.

    Each store that is opened is given to ``opened``, which closes it later. Raises :class:`QueueNotFound` and
    :class:`StoreNotFound`.
    """
    id, _, name = journal.partition("/")
    for place in (Path(path), *environment.paths_of(bytes.fromhex(id))):
        if not (place / "data.mdb").exists():
            continue
        store = Store(place, readonly=readonly)
        opened(store)
        if store.id.hex() == id:
            if name.partition("/")[0] not in store.queues():
                raise QueueNotFound(
                    f"The queue {name!r} of {place}, in which a transaction must be acknowledged, was removed.",
                    "pass missing='removed' to append_ack_intents().",
                    queue=name,
                )
            queue = store.queue(name)
            return queue.partition(0) if queue.is_partitioned else queue
    raise StoreNotFound(
        f"The store {id}, in whose queue {name!r} a transaction must be acknowledged, is not at {path}.",
        "put the store back there, or open it at its present path (cues.open). missing='skip' leaves the"
        " acknowledgement out, and readers of that store never see the transaction.",
        path=path,
    )


def read_intent(intent: AckIntent) -> tuple[uuids.UUID, str]:
    """Decode the acknowledgement's UUID, and the path of its store."""
    try:
        raw, path = codec.unpack(intent.intent)
        return uuids.UUID(bytes=raw), os.fspath(path)
    except Exception as error:
        raise InvalidArgument(
            f"{intent!r:.80} is not an acknowledgement intent ({type(error).__name__}).",
            "pass the result of build_ack_intents(), or the ack_intents of a checkpoint, unchanged.",
        ) from None
