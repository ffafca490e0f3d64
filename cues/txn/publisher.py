"""Publishing: messages with identities, committed at once or pending until they are acknowledged.

    publisher = Publisher()
    publisher.publish_committed(mapping, message).wait()

A transaction over queues of several stores, which some checkpoint decides:

    1. publish_uncommitted(mapping, message)     pending messages; readers of what is committed do not see them
    2. intents = build_ack_intents()             all of 1 is in its queues, durably; what is to be appended in 4
    3. (the checkpoint commits, the intents in it)
    4. append_ack_intents(intents)               now they see them

Who dies before 3 leaves messages that are never acknowledged. Who dies after it starts again with the
checkpoint, and does 4 again: to repeat it does no harm, and of a producer that died in its next
transaction it drops what is pending.

An acknowledgement names only a clock. So the next transaction must not write to a queue before this one's
acknowledgement is there, or its messages would be committed or dropped by it: from 2 on
:meth:`Publisher.publish_uncommitted` waits for 4, queue by queue.

Messages are checked and encoded by the thread that publishes them, and appended by one thread a store, many
in one transaction, in their order. Their clocks are taken inside that transaction: taken outside of it, the
later one could be appended first, and the other be thought a repetition.

Not guaranteed: that a message is there before its :class:`Append` is done (wait for it, or :meth:`Publisher.flush`);
that what is pending in a queue that no intent names is ever dropped by itself (see :meth:`Publisher.roll_back`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid as uuids
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from cues import clock, codec, faults, producers
from cues.batch import Page
from cues.errors import (
    Closed,
    CuesError,
    Forked,
    InvalidArgument,
    QueueNotFound,
    StoreNotFound,
    WaitTimeout,
)
from cues.txn import stamped, stamps
from cues.txn.identity import TICK, ZERO_UUID, Clock, Flags, ProducerID, assemble
from cues.txn.mapping import journal_of
from cues.txn.messages import DICT, MessageType
from cues.txn.sequencer import AckIntent

if TYPE_CHECKING:
    from cues.queue import Queue
    from cues.store import Store

WAITING_BYTES_MAX: Final = 32 << 20
"""Published messages that wait to be appended to one store; whoever publishes more waits as well."""
COMMIT_BYTES_MAX: Final = 4 << 20
"""About how much one transaction appends: others write to the store too."""
ACKNOWLEDGE_TIMEOUT_S: Final = 60.0
"""How long a publisher waits for an intent that nobody appends before it says so."""
_LINGER_S: Final = 0.2
"""How long a thread that appends stays when there is nothing to do."""

_CONTINUE: Final = int(Flags.CONTINUE_TXN)
_ACK: Final = int(Flags.ACK_TXN)

Mapping = Callable[[Any], "Queue"]


class Append:
    """A message on its way to its queue; safe from any thread."""

    __slots__ = ("_clock", "_done", "_error", "_flags", "_index", "_writer", "body", "queue", "size")

    def __init__(self, writer: _Writer, queue: Queue, flags: int, body: stamped.Body) -> None:
        self.queue = queue
        self.body = body
        self.size = len(body) if isinstance(body, bytes) else len(codec.pack(body))
        self._writer = writer
        self._flags = flags
        self._index = self._clock = 0
        self._done = False
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it is in its queue, or failed."""
        return self._done

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the message is in its queue, durable as its store is; returns its index.

        Raises :class:`WaitTimeout` after ``timeout`` seconds, and what the append failed with.
        """
        if not self._done:
            self._writer.wait(lambda: self._done, timeout, f"a message to be appended to {self.queue.id!r}")
        if self._error is not None:
            raise self._error
        return self._index

    @property
    def uuid(self) -> uuids.UUID:
        """As the message was stamped; the zero UUID while it waits, and where it opted out."""
        producer = self._writer.producer if self._clock else 0
        return assemble(producer, self._clock, self._flags) if self._clock else ZERO_UUID

    def settle(self, index: int, clock: int, error: BaseException | None) -> None:
        """Say what came of it."""
        self._index, self._clock, self._error = index, clock, error
        self.body = b""
        self._done = True


class Publisher:
    """Writes to any queues of any stores under one producer id, until :meth:`close`.

    ``clock`` is given where several publishers share one: it is then never moved by wall time.
    ``validate(message)`` may raise to refuse a message, before it is mapped. ``message_type`` is for
    messages that are no dicts. Committed messages may be published by any thread, uncommitted ones
    by one at a time. In a forked child every call raises :class:`Forked`; one made there has its own id.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        validate: Callable[[Any], object] | None = None,
        message_type: MessageType = DICT,
    ) -> None:
        if not (clock is None or isinstance(clock, Clock)):
            raise InvalidArgument(f"clock={clock!r} is no clock.", "Clock(), or None.")
        if not (validate is None or callable(validate)):
            raise InvalidArgument(f"validate={validate!r} cannot be called.", "a function of a message, or None.")
        self.id = ProducerID()
        self._clock = Clock() if clock is None else clock
        self._by_wall_time = clock is None
        self._validate = validate
        self._type = message_type
        self._pid = os.getpid()
        self._closed = False
        self._guard = threading.Lock()
        self._acknowledged = threading.Condition(self._guard)
        self._writers: dict[bytes, list[_Writer]] = {}
        self._spans: dict[str, Queue] = {}
        """Queues with pending messages of the transaction under way, in the order of first publication."""
        self._due: dict[str, uuids.UUID] = {}
        """Intents that were built and not appended yet, by journal."""
        self._queues: dict[str, Queue] = {}
        self._lost: BaseException | None = None
        """Why a pending message was not appended: this transaction must not be acknowledged."""

    # --- 1. publishing ------------------------------------------------------------------------

    def publish_committed(self, mapping: Mapping, message: Any) -> Append:
        """Append a message that readers see at once. Any thread may call it.

        Raises what ``validate``, the mapping and the encoding raise; then nothing of it is written.
        :class:`InvalidArgument` where this publisher has pending messages in the queue: they would be lost.
        """
        queue, body, flags = self._prepare(mapping, message, 0)
        writer = self._writer(queue.store)
        with self._guard:
            if flags == 0 and (self._spans or self._due) and self._pends(queue):
                raise InvalidArgument(
                    f"This publisher has pending messages in {queue.id!r}; one outside of the transaction would drop"
                    " them.",
                    "publish_uncommitted(), or another Publisher.",
                )
            return writer.add(queue, flags, body)

    def _pends(self, queue: Queue) -> bool:
        journal = journal_of(queue)
        return journal in self._spans or journal in self._due

    def publish_uncommitted(
        self, mapping: Mapping, message: Any, timeout: float | None = ACKNOWLEDGE_TIMEOUT_S
    ) -> Append:
        """Append a message of the transaction under way, pending until it is acknowledged. One thread at a time.

        Waits while an intent for its queue was built and not appended; raises :class:`WaitTimeout` after
        ``timeout`` seconds, and otherwise as :meth:`publish_committed`.
        """
        queue, body, flags = self._prepare(mapping, message, _CONTINUE)
        journal, writer = journal_of(queue), self._writer(queue.store)
        with self._acknowledged:
            if journal in self._due and not self._acknowledged.wait_for(
                lambda: journal not in self._due or self._closed, timeout
            ):
                raise WaitTimeout(
                    f"Waited {timeout} s for the acknowledgement of the last transaction in {queue.id!r}.",
                    "append_ack_intents(), of what build_ack_intents() gave.",
                )
            self._check()
            if flags == _CONTINUE and journal not in self._spans:  # one that opted out is not pending
                self._spans.setdefault(journal, queue)
                self._queues.setdefault(journal, queue)
            return writer.add(queue, flags, body)

    def append_stamped(self, queue: Queue, messages: Iterable[stamped.Pair]) -> int:
        """Append messages with the UUIDs that they have; see :func:`cues.txn.append_stamped`."""
        self._check()
        return stamped.append_stamped(queue, messages)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published so far is in its queue.

        Raises the first error of an append since the last flush, and :class:`WaitTimeout`.
        """
        self._check()
        deadline = None if timeout is None else time.monotonic() + timeout
        errors = [writer.flush(deadline) for some in list(self._writers.values()) for writer in some]
        for error in errors:
            if error is not None:
                raise error

    def _prepare(self, mapping: Mapping, message: Any, flags: int) -> tuple[Queue, stamped.Body, int]:
        """Check, map and encode; the flags are −1 for a message that wants no identity."""
        self._check()
        if not callable(mapping):
            raise InvalidArgument(
                f"The mapping {mapping!r:.60} cannot be called.",
                "lambda message: queue, or cues.txn.modulo_mapping(…).",
            )
        if self._validate is not None:
            self._validate(message)
        queue = mapping(message)
        stamped.check_target(queue)
        if self._type.get_uuid(message) == ZERO_UUID:
            flags = -1
        return queue, stamped.encode(queue, self._type.fields(message)), flags

    def _writer(self, store: Store) -> _Writer:
        with self._guard:
            some = self._writers.setdefault(store.id, [])
            for writer in some:  # a copy of a store has its id
                if writer.store is store or (writer.store.same_as(store) and not writer.store.closed):
                    return writer
            some.append(_Writer(self, store))
            return some[-1]

    # --- 2 and 4. acknowledging -----------------------------------------------------------------

    def build_ack_intents(self, timeout: float | None = None) -> list[AckIntent]:
        """What acknowledges everything that was published uncommitted since the last time: one intent a queue.

        All of it is in its queues when this returns, and survives a power cut there whatever the durability of the
        store. Commit the intents with the checkpoint, then append them. Raises what an append failed
        with; such a transaction cannot be acknowledged any more, nor can another one of this publisher.
        """
        self.flush(timeout)
        if self._lost is not None:
            raise self._lost
        for store in {id(queue.store): queue.store for queue in self._spans.values()}.values():
            if store.durability != "disk":
                store.sync()
        built = []
        with self._guard:
            for journal, queue in self._spans.items():
                uuid = assemble(int.from_bytes(self.id, "big"), self._clock.tick(), _ACK)
                self._due[journal] = uuid
                built.append(AckIntent(journal, codec.pack([uuid.bytes, os.path.realpath(queue.store.path)])))
            self._spans.clear()
        if faults.active:
            faults.point("intents.built")
        return built

    def append_ack_intents(
        self, intents: Iterable[AckIntent], missing: Literal["refuse", "skip"] = "refuse"
    ) -> list[AckIntent]:
        """Append acknowledgements, those of this publisher or those of a checkpoint. May be repeated.

        Each goes to the store that it was built for, where it was or where that store is open now; the
        acknowledgements for one store are one transaction, and survive a power cut as what they acknowledge
        does. A queue or a store that is not there any more is :class:`QueueNotFound` or
        :class:`StoreNotFound`; with ``missing="skip"``, for a recovery that must go on, it is left out and
        the intent is among those returned.
        """
        self._check()
        skipped: list[AckIntent] = []
        bound: dict[int, tuple[Store, list[tuple[Queue, uuids.UUID]]]] = {}
        opened: list[Store] = []
        done: list[str] = []
        try:
            for intent in intents:
                uuid, path = _read_intent(intent)
                try:
                    queue = self._find(intent.journal, path, opened)
                except (QueueNotFound, StoreNotFound):
                    if missing == "refuse":
                        raise
                    skipped.append(intent)
                    continue
                bound.setdefault(id(queue.store), (queue.store, []))[1].append((queue, uuid))
                if self._due.get(intent.journal) == uuid:
                    done.append(intent.journal)
            for store, pairs in bound.values():
                stamped.append_all(store, [(queue, [(uuid, {})]) for queue, uuid in pairs])
                # The next checkpoint forgets these intents, also where its transaction has nothing for this store.
                if store.durability != "disk":
                    store.sync()
        finally:
            for store in opened:
                store.close()
        with self._acknowledged:
            for journal in done:
                self._due.pop(journal, None)
            self._acknowledged.notify_all()
        return skipped

    def roll_back(self, queue: Queue, producer: ProducerID) -> bool:
        """Drop what a producer that is gone for good has pending in a queue; False when it has nothing.

        For queues that no intent of its last checkpoint names: there nobody else ever will. A producer
        that lives loses what it is writing.
        """
        self._check()
        number = int.from_bytes(producer, "big")
        with queue.store.view() as txn:
            written = producers.read(txn, queue.log.id, number)
        if written is None or not written.begin:
            return False
        return bool(stamped.append_stamped(queue, [(assemble(number, written.acked, _ACK), {})]))

    def _find(self, journal: str, path: str, opened: list[Store]) -> Queue:
        """The queue of an intent: one that was published to, or of a store that is opened for this."""
        known = self._queues.get(journal)
        if known is not None and not known.closed:
            return known
        from cues.store import Store

        id, _, name = journal.partition("/")
        for place in (Path(path), *Store.places(bytes.fromhex(id))):
            if not (place / "data.mdb").exists():
                continue
            store = Store(place)
            opened.append(store)
            if store.id.hex() == id:
                if name.partition("/")[0] not in store.queues():
                    raise QueueNotFound(
                        f"The queue {name!r} of {place} is gone, which a transaction was to be acknowledged in.",
                        "missing='skip' at a recovery.",
                        queue=name,
                    )
                found = store.queue(name)
                return found.partition(0) if found.spread else found
        raise StoreNotFound(
            f"The store {id} is not at {path} any more, where a transaction was to be acknowledged.",
            "the store where it was, or open where it is; missing='skip' at a recovery.",
            path=path,
        )

    # --- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, and end the threads. What was not acknowledged stays pending. Raises as :meth:`flush`.

        In a forked child it does nothing: there is nothing of the publisher there.
        """
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self.flush()
        finally:
            with self._acknowledged:
                self._closed = True
                self._acknowledged.notify_all()
            for some in self._writers.values():
                for writer in some:
                    writer.close()

    def check_process(self) -> None:
        """Raise :class:`Forked` in a child of the process that made the publisher: its threads are not there."""
        if os.getpid() != self._pid:
            raise Forked(
                f"The publisher {self.id.hex()} was made by process {self._pid}, which forked this one.",
                "a Publisher of its own.",
                pid=self._pid,
            )

    def _check(self) -> None:
        self.check_process()
        if self._closed:
            raise Closed("The publisher is closed.", "a new one.")

    def advance(self, ticks: int) -> int:
        """The clock of the first of so many messages; called inside the transaction that appends them."""
        if self._by_wall_time:
            self._clock.update(clock.now_ns())
        return self._clock.advance(ticks)

    def lose(self, error: BaseException) -> None:
        """A pending message could not be appended."""
        self._lost = self._lost or error

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.nullcontext() if kind is None else contextlib.suppress(CuesError):
            self.close()  # where an error is on its way out, that one is told

    def __repr__(self) -> str:
        return f"<cues.txn.Publisher {self.id.hex()}>"


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
        """The pages with their clocks, the first of which is ``clock``. The run's own stay as they are."""
        return [Page(p.flags, p.count, stamps.restamped(p.tail, clock), p.pieces) for p in self.pages]

    def settle(self, error: BaseException | None) -> None:
        clock = self.first
        for offset, append in enumerate(self.appends):
            append.settle(self.index + offset, clock, error)
            if self.stamped:
                clock += TICK


def _read_intent(intent: AckIntent) -> tuple[uuids.UUID, str]:
    """The acknowledgement's UUID, and the path of its store."""
    try:
        raw, path = codec.unpack(intent.intent)
        return uuids.UUID(bytes=raw), os.fspath(path)
    except Exception as error:
        raise InvalidArgument(
            f"{intent!r:.80} is no acknowledgement intent ({type(error).__name__}).",
            "what build_ack_intents() gave, or the ack_intents of a checkpoint, whole.",
        ) from None


class _Writer:
    """Appends what a publisher publishes to one store, in a thread that comes when there is something to do."""

    def __init__(self, publisher: Publisher, store: Store) -> None:
        self.store = store
        self.producer = int.from_bytes(publisher.id, "big")
        self._publisher = publisher
        self._waiting: deque[Append] = deque()
        self._bytes = 0
        self._moved = threading.Condition()
        """Something was added, or settled."""
        self._thread: threading.Thread | None = None
        self._busy = False
        self._closed = False
        self._added = self._settled = 0
        self._failed: BaseException | None = None

    def add(self, queue: Queue, flags: int, body: stamped.Body) -> Append:
        made = Append(self, queue, flags, body)
        with self._moved:
            while self._bytes > WAITING_BYTES_MAX:
                self._moved.wait()
            self._waiting.append(made)
            self._added += 1
            self._bytes += made.size
            if self._thread is None:
                # Not a daemon: a program that ends by itself ends when what it published is written.
                self._thread = threading.Thread(target=self._append_all, name=f"cues publisher {self.store.path}")
                self._thread.start()
            elif not self._busy and len(self._waiting) == 1:
                self._moved.notify_all()
        return made

    def flush(self, deadline: float | None) -> BaseException | None:
        """Wait for what was added so far; returns the first error since the last time."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        added = self._added
        self.wait(lambda: self._settled >= added, left, f"messages to be appended to {self.store.path}")
        failed, self._failed = self._failed, None
        return failed

    def close(self) -> None:
        with self._moved:
            self._closed = True
            self._moved.notify_all()

    def wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        self._publisher.check_process()
        with self._moved:
            if not self._moved.wait_for(ready, timeout):
                raise WaitTimeout(f"Waited {timeout:.1f} s for {what}.", "a longer timeout, or cues status.")

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
                self._settled += len(appends)
                self._busy = False
                self._moved.notify_all()

    def _next(self) -> list[Append]:
        """What is there, up to about a transaction's worth; nothing when nothing came for a while."""
        with self._moved:
            self._moved.wait_for(lambda: self._waiting or self._closed, _LINGER_S)
            if not self._waiting:
                self._thread = None
                return []
            found: list[Append] = []
            size = 0
            while self._waiting and size < COMMIT_BYTES_MAX:
                found.append(self._waiting.popleft())
                size += found[-1].size
            self._bytes -= size
            self._busy = True
            return found

    def _runs(self, appends: list[Append]) -> list[_Run]:
        """Cut into runs, each queue's in their order."""
        by_queue: dict[int, list[list[Append]]] = {}
        for append in appends:
            runs = by_queue.setdefault(id(append.queue), [])
            if not runs or runs[-1][0]._flags != append._flags:
                runs.append([])
            runs[-1].append(append)
        return [_Run(self.producer, run) for runs in by_queue.values() for run in runs]

    def _commit(self, runs: list[_Run]) -> None:
        if faults.active:
            faults.point("publish.before")
        size = sum(1 + len(page.pieces) for run in runs for page in run.pages)
        self.store.commit(self._write, runs, pages=size + len(runs))
        if faults.active:
            faults.point("publish.after")
        mask = 0
        for run in runs:
            mask |= run.queue.log.mask
        self.store.ring(mask)

    def _write(self, txn: Any, runs: list[_Run]) -> None:
        for run in runs:
            if run.stamped:
                run.first = self._publisher.advance(len(run.appends))
                run.index = run.queue.append_pages(txn, run.at(run.first))
            else:
                run.index = run.queue.append_pages(txn, run.pages)
        if faults.active:
            faults.point("publish.inside")

    def _fail(self, appends: list[Append], error: BaseException) -> None:
        self._failed = self._failed or error
        for append in appends:
            append.settle(0, 0, error)
            if append._flags == _CONTINUE:
                self._publisher.lose(error)
