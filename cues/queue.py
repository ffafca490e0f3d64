"""Queues: ordered, immutable, addressable logs of messages; and their appenders.

    with cues.open("data") as store:
        q = store.queue("orders", metadata={"t", "time"}, retention=1_000_000)
        q.appender().write({"x": 1})                 # → 1
        q.tailer().read()                            # → {"x": 1}

Any number of threads and processes write, one transaction at a time, and read, without waiting for
a writer. A message's identity is (queue, index); the first index is 1; an index is never used twice.

A queue with ``partitions=n`` is n logs, ``orders/0`` to ``orders/7``, each with indices of its own. What is
appended is placed by the queue's partitioner (:mod:`cues.partitioners`), so messages of one key are on one
partition, in their order; between partitions there is none but the time of the append, by which a
tailer of the whole queue merges them. A partition is a queue like any other, for whoever wants one.

    q = store.queue("orders", partitions=8, key="user")
    q.appender().write({"user": "ann"})              # → 1, of partition 5
    q.partition(5).tailer().read()                   # also store.queue("orders/5")

Not guaranteed: that what a retention policy lets go is gone at once (whole record batches go, on
later appends). :meth:`Queue.purge` is exact for readers at once.
"""

from __future__ import annotations

import fnmatch
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, overload

from cues import batch, clock, codec, faults, names, spread
from cues.errors import (
    Closed,
    CuesError,
    InvalidArgument,
    MessageTooLarge,
    QueueNotFound,
    QueueOptionsError,
    StoreDamaged,
)
from cues.log import DELETE_BATCHES_MAX, Log, Row, pack_row, read_row, unpack_row
from cues.options import FUNCTIONS, QueueOptions, check_names
from cues.partitioners import Missing, name_of
from cues.spread import Place, Share, Spread

if TYPE_CHECKING:
    from cues.store import Store
    from cues.tailer import Tailer
    from cues.txn.committed import CommittedTailer


class Queue:
    """A handle on one queue of a store; :meth:`Store.queue` makes it.

    Of a queue with several partitions it means all of them; :meth:`partition` gives a handle on one.
    """

    def __init__(
        self, store: Store, id: str, options: QueueOptions, version: int, partition: int = 0, whole: Queue | None = None
    ) -> None:
        """``whole`` is the queue of which this handle means one ``partition``."""
        self.store = store
        self.name: str = whole.id if whole is not None else id
        """The queue's name, also of the handle on a partition."""
        self.id: str = id
        self._options = options
        self._version = version
        self._functions: dict[str, Any] = {}
        """``key`` and ``partitioner`` where they are functions: this handle was given them, a store keeps names."""
        self.log: Log = Log(store, self.name, partition)
        """Of a queue with several partitions, the log of the first."""
        self._whole = whole
        self.spread = whole is None and options.partitions > 1
        """Whether this handle means several logs."""
        self._views: dict[int, Queue] = {}
        self._handles: weakref.WeakSet[Queue] = weakref.WeakSet()
        """Every handle on a partition that was made by this one."""
        self._guard = threading.Lock()
        self._spread: Spread | None = None
        self._closed = False

    @property
    def options(self) -> QueueOptions:
        """As another process may have changed them meanwhile."""
        self.check()
        with self.store.view() as txn:
            self.follow_options(txn, self.log.row(txn))
        return self._options

    # --- partitions ---

    @property
    def partitions(self) -> int:
        """How many logs this handle means; 1 of a handle on a partition."""
        return 1 if self._whole is not None else self.options.partitions

    def partition(self, number: int) -> Queue:
        """A handle on one partition, from 0 on: a queue of its own, called ``orders/3``.

        Its appender writes there whatever the key is. Raises :class:`QueueNotFound` for a number that
        there is not.
        """
        if self._whole is not None:
            raise InvalidArgument(f"{self.id!r} is a partition.", f"store.queue({self.name!r}).partition({number!r}).")
        count = self.partitions
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
            raise QueueNotFound(
                f"The queue {self.id!r} has no partition {number!r}; it has {count}.",
                f"0 to {count - 1}." if count > 1 else "0, or queue.grow(n) for more.",
                queue=f"{self.id}/{number}",
            )
        return self._handle(number)

    def view(self, number: int) -> Queue:
        """A handle on a partition that this one keeps, not to be closed; where there is one log, this handle."""
        if not self.spread:
            return self
        found = self._views.get(number)
        if found is None:
            found = self._views.setdefault(number, self._handle(number))
        return found

    @property
    def views(self) -> list[Queue]:
        """The :meth:`view` of every partition that there is now."""
        if self._whole is not None:
            return [self]
        return [self.view(number) for number in range(self.options.partitions)]

    def _handle(self, number: int) -> Queue:
        found = Queue(self.store, f"{self.id}/{number}", self._options, self._version, number, self)
        with self._guard:
            self._handles.add(found)
        return found

    def grow(self, partitions: int) -> None:
        """Have so many partitions from now on, in one transaction; fewer than there are is refused.

        What is there stays where it is. Of the keys that come from now on many go to another partition
        than before (with ``"rendezvous"``, only those that go to a new one), so a reader may see a key's
        later messages before its earlier ones: where the order of keys matters, let the readers finish
        first. State stays with the partition that it was kept for: processors with state begin anew with
        a key that moved. Writers follow at once; tailers of several partitions when they read next, one that
        was made when there was one partition goes on with that; a graph that runs reads the new
        partitions from its next start on, from their beginning.
        """
        self.check()
        self._not_a_try_log("grows")
        if self._whole is not None:
            raise InvalidArgument(f"{self.id!r} is a partition.", f"store.queue({self.name!r}).grow({partitions!r}).")
        partitions = QueueOptions(partitions=partitions).partitions
        self.store.commit(self._grow, partitions)
        with self.store.view() as txn:
            self.follow_options(txn, self.log.row(txn))

    def _grow(self, txn: Any, partitions: int) -> None:
        record = _record(self.store, self.id, txn.get(names.queue_key(self.id)))
        there = record["partitions"]
        if partitions < there:
            raise _shrinking(self.id, there, partitions)
        if partitions == there:
            return
        for partition in range(there, partitions):
            txn.put(names.row_key(self.id, partition), pack_row(Row(record["identity"], 1, 1, 0, record["version"])))
            self.store.create_database(txn, names.log_database(self.id, partition))
        record["options"]["partitions"] = record["partitions"] = partitions
        record["version"] += 1
        _put_record(txn, self.id, record)
        faults.point("grow.inside")

    def shares(self, messages: Sequence[dict[str, Any]]) -> list[Share]:
        """Which of these messages go to which partition; an error has the ``offset`` of the message at fault."""
        if self._spread is None:
            self._spread = Spread(self._options, sum(row.next - 1 for row in self.rows()))
        return self._spread.shares(self._options, messages)

    # --- what is there ---

    @property
    def first_index(self) -> int:
        """The index of the first message that is there; the next index when the queue is empty.

        Of several partitions, the lowest.
        """
        return min(row.first for row in self.rows())

    @property
    def last_index(self) -> int:
        """The index of the last message; one below :attr:`first_index` when the queue is empty.

        Of several partitions, the highest.
        """
        return max(row.next for row in self.rows()) - 1

    def __len__(self) -> int:
        """How many messages there are, on all partitions."""
        return sum(row.next - row.first for row in self.rows())

    def __bool__(self) -> bool:
        return True

    def row(self) -> Row:
        """Identity, first and next index, last append time, in one read transaction; of the first partition."""
        self.check()
        with self.store.view() as txn:
            return self.log.row(txn)

    def rows(self) -> list[Row]:
        """The row of every partition, in one read transaction."""
        if self._whole is not None:
            return [self.row()]
        self.check()
        with self.store.view() as txn:
            row = self.log.row(txn)
            count = self.follow_options(txn, row).partitions
            return [row, *(read_row(txn, self.id, partition) for partition in range(1, count))]

    # --- writing and reading ---

    def appender(self) -> Appender:
        """A writer; any number of them, in any number of threads and processes.

        A try log is its processor's to write: :class:`InvalidArgument`.
        """
        self.check()
        self._not_a_try_log("writes")
        return Appender(self)

    @overload
    def tailer(
        self, name: str | None = None, *, meta: bool = False, isolation: Literal["uncommitted"] = "uncommitted"
    ) -> Tailer: ...

    @overload
    def tailer(self, name: None = None, *, meta: bool = False, isolation: Literal["committed"]) -> CommittedTailer: ...

    def tailer(
        self,
        name: str | None = None,
        *,
        meta: bool = False,
        isolation: Literal["uncommitted", "committed"] = "uncommitted",
    ) -> Tailer | CommittedTailer:
        """A reader from the start; with a ``name``, from where the tailer of that name stands in the store.

        Of several partitions it reads all, merged by append time (:class:`cues.merged.MergedTailer`). With
        ``meta`` every message holds its metadata under ``q/meta``. See :class:`cues.Tailer`. With
        ``isolation="committed"`` messages that a :class:`cues.txn.Publisher` wrote uncommitted are seen when
        they are acknowledged, and not if they never are; see :class:`cues.txn.committed.CommittedTailer`.
        """
        self.check()
        if isolation == "committed":
            from cues.txn.committed import CommittedTailer

            if name is not None:
                raise InvalidArgument(
                    f"The tailer {name!r} cannot keep its place among commits: pending messages have to be read again.",
                    "no name, or a cues.txn.Consumer, whose checkpoint knows of them.",
                )
            return CommittedTailer(self, meta)
        if isolation != "uncommitted":
            raise InvalidArgument(f"isolation={isolation!r}.", "'uncommitted' or 'committed'.")
        if self.partitions > 1:
            from cues.merged import MergedTailer

            return MergedTailer(self, name, meta)
        from cues.tailer import Tailer

        return Tailer(self, name, meta)

    # --- dropping ---

    def purge(self, before: int | datetime) -> int:
        """Drop the messages below the index ``before`` (or appended before that aware datetime).

        Exclusive and exact for readers at once; returns how many messages were dropped. Space is
        given back in commits of at most 1,000 record batches. Positions that stand on purged
        messages go on at the first that is left. An index beyond the last is refused. Of several
        partitions only a time means something, and all are purged in one transaction; an index is
        refused.
        """
        if isinstance(before, datetime):
            ns = clock.to_ns(before)
            return self._purge(lambda txn, log, row: log.index_at(txn, row, ns))
        if self.partitions > 1:
            raise InvalidArgument(
                f"purge(before={before!r}): each of the {self.partitions} partitions of {self.id!r} has indices of its"
                " own.",
                "a time, or queue.partition(i).purge(before=index).",
            )
        return self._purge(lambda txn, log, row: check_index(before, row.next, f"purge(before={before!r})"))

    def delete(self) -> int:
        """Drop all messages, of all partitions. The queue stays, with its identity, and its indices go on."""
        return self._purge(lambda txn, log, row: row.next)

    def _not_a_try_log(self, verb: str) -> None:
        # A record at its end that is none, or a snapshot that is gone, would mislead recovery.
        if "." in self.id:
            kind = "fork queue" if names.fork_parts(self.id) else "try log"
            raise InvalidArgument(f"{self.id!r} is a {kind}, which only its processor {verb}.", "a queue of your own.")

    def _purge(self, place: Callable[[Any, Log, Row], int]) -> int:
        self.check()
        self._not_a_try_log("trims")
        logs = [view.log for view in self.views]
        dropped = self.store.commit(self._move_fronts, logs, place)
        for log in logs:
            while self.store.commit(self._sweep_some, log):
                pass
        return dropped

    def _move_fronts(self, txn: Any, logs: list[Log], place: Callable[[Any, Log, Row], int]) -> int:
        dropped = 0
        for log in logs:
            row = log.row(txn)
            index = place(txn, log, row)
            if index > row.first:
                log.move_front(txn, row, index)
                dropped += index - row.first
        if dropped:
            self.store.purged()
        return dropped

    def _sweep_some(self, txn: Any, log: Log) -> bool:
        row = log.row(txn)
        deleted, _ = log.delete_before(txn, row, row.first)
        self.store.purged()  # again: a tailer may have looked between the first time and the purge's commit
        faults.point("purge.inside")
        return deleted == DELETE_BATCHES_MAX

    def follow_options(self, txn: Any, row: Row) -> QueueOptions:
        """The options in force in this transaction."""
        if row.version != self._version:
            if self._whole is not None:
                self._whole.follow_options(txn, row)
                self._use(self._whole._options, row.version)
            else:
                found = _record(self.store, self.id, txn.get(names.queue_key(self.id)))
                self._use(self._with_functions(QueueOptions.from_dict(found["options"])), row.version)
        return self._options

    def _use(self, options: QueueOptions, version: int) -> None:
        self._options = options
        self.spread = self._whole is None and options.partitions > 1
        self._version = version
        with self._guard:
            handles = list(self._handles)
        for handle in handles:
            handle._use(options, version)

    def give(self, options: QueueOptions) -> None:
        """Use the functions of ``options``, of which the store has the names, in this handle."""
        self._functions = {
            name: value
            for name in FUNCTIONS
            if callable(value := getattr(options, name)) and type(value) is not Missing
        }
        self._options = self._with_functions(self._options)

    def _with_functions(self, options: QueueOptions) -> QueueOptions:
        known = {
            name: function
            for name, function in self._functions.items()
            if name_of(getattr(options, name)) == name_of(function)
        }
        return options.changed(known) if known else options

    def append_pages(self, txn: Any, pages: list[batch.Page]) -> int:
        """Append inside a transaction, and let retention take what it may; returns the first index."""
        start, version = self.log.append(txn, pages)
        if version != self._version or self._options.retention is not None:
            self._appended(txn, version)
        return start

    def append_plain(self, txn: Any, body: bytes, built_under: int) -> int:
        """:meth:`append_pages` for one message (see :func:`batch.plain`), built under that options version."""
        index, version = self.log.append_plain(txn, body)
        if version != self._version or self._options.retention is not None:
            self._appended(txn, version)
        if version != built_under:
            raise _OptionsChanged
        if faults.active:
            faults.point("append.inside")
        return index

    def _appended(self, txn: Any, version: int) -> None:
        if version != self._version:
            self.follow_options(txn, self.log.row(txn))
        if self._options.retention is not None:
            from cues.retention import let_go

            let_go(txn, self.log, self._options.retention)

    def close(self) -> None:
        """Close this handle; blocked reads through it end with :class:`Closed`. The store stays open.

        Handles on partitions that it gave are closed with it.
        """
        self._closed = True
        with self._guard:
            handles = list(self._handles)
        for handle in handles:
            handle._closed = True
        doorbells = self.store.doorbells
        if doorbells is not None and not self.store.closed:
            doorbells.ring_own()

    @property
    def closed(self) -> bool:
        return self._closed or self.store.closed

    def check(self) -> None:
        """Raise :class:`Closed` (or the store's own error) when this handle cannot be used."""
        if self._closed:
            raise Closed(f"The queue {self.id!r} is closed.", "store.queue(...) again.")
        self.store._check()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<cues.Queue {self.id} of {self.store.path}>"


class _OptionsChanged(Exception):
    """The queue's options changed while a message was on its way: nothing is written, it is built anew."""


class Appender:
    """Writes to a queue. Safe from any thread; each call is one transaction."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._store = queue.store
        self._mask = queue.log.mask
        queue.options  # noqa: B018  (as they are now)
        self._commit = queue.store.commit
        self._ring = queue.store.ring
        self._plain = queue.append_plain
        self._closed = False

    def write(self, message: dict[str, Any]) -> int:
        """Append one message and return its index. Durable as the store is when this returns.

        Of a queue with several partitions the index is a :class:`cues.spread.Place`, an int that has the
        ``partition`` it is on. Raises :class:`CodecError`, :class:`MessageTooLarge`, :class:`ReservedKey`,
        :class:`InvalidArgument` (not a dict), :class:`StoreFull`; then nothing was written.
        """
        if self._closed or self.queue._closed:
            self._check()
        queue = self.queue
        version = queue._version
        body = None if queue.spread else batch.plain(message)
        if body is None or len(body) > queue._options.max_message_bytes:
            return self.write_many([message])[0]
        if faults.active:
            faults.point("append.before")
        try:
            index = self._commit(self._plain, body, version)
        except _OptionsChanged:
            return self.write(message)
        if faults.active:
            faults.point("append.after")
        self._ring(self._mask)
        return index

    def write_many(self, messages: Iterable[dict[str, Any]]) -> range | list[Place]:
        """Append messages in one transaction and return the range of their indices; all or none.

        Of a queue with several partitions, the :class:`cues.spread.Place` of each message, in the order
        given. Errors as of :meth:`write`; the text says which message is at fault.
        """
        if self._closed or self.queue._closed:
            self._check()
        found = messages if isinstance(messages, list) else list(messages)
        if self.queue.spread:
            return self._write_spread(found)
        if not found:
            next = self.queue.row().next
            return range(next, next)
        version, options = self.queue._version, self.queue._options
        try:
            pages = batch.build(found, options.max_message_bytes, strips=options.strips)
        except CuesError as error:
            if isinstance(error, MessageTooLarge) and self.queue.options is not options:
                return self.write_many(found)  # the limit has changed
            _name(error, len(found))
            raise
        if faults.active:
            faults.point("append.before")
        size = sum(1 + len(page.pieces) for page in pages)
        try:
            start = self._commit(self._append, pages, version, pages=size + size // 64)
        except _OptionsChanged:
            return self.write_many(found)
        if faults.active:
            faults.point("append.after")
        self._ring(self._mask)
        return range(start, start + len(found))

    def _append(self, txn: Any, pages: list[batch.Page], version: int) -> int:
        start = self.queue.append_pages(txn, pages)
        if version != self.queue._version:
            raise _OptionsChanged
        if faults.active:
            faults.point("append.inside")
        return start

    def _write_spread(self, messages: list[dict[str, Any]]) -> list[Place]:
        """:meth:`write_many` over several partitions: built by partition, appended in one transaction."""
        queue = self.queue
        while True:
            version, options = queue._version, queue._options
            try:
                built = spread.build(queue, messages, queue.shares(messages))
            except CuesError as error:
                if queue.options is not options:
                    continue  # the limit has changed, or where messages go
                _name(error, len(messages))
                raise
            if not built:
                return []
            if faults.active:
                faults.point("append.before")
            size = sum(1 + len(page.pieces) for _, pages, _ in built for page in pages)
            try:
                starts = self._commit(self._append_spread, built, version, pages=size + size // 64)
            except _OptionsChanged:
                continue
            if faults.active:
                faults.point("append.after")
            mask = 0
            for view, _, _ in built:
                mask |= view.log.mask
            self._ring(mask)
            return spread.places(len(messages), built, starts)

    def _append_spread(self, txn: Any, built: spread.Built, version: int) -> list[int]:
        starts = [view.append_pages(txn, pages) for view, pages, _ in built]
        if self.queue._version != version:
            raise _OptionsChanged
        if faults.active:
            faults.point("append.inside")
        return starts

    def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"The appender of {self.queue.id!r} is closed.", "queue.appender() again.")
        self.queue.check()

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<cues.Appender of {self.queue.id}>"


def _name(error: CuesError, count: int) -> None:
    """Say which message is at fault, where there are several."""
    if count > 1:
        error.message = f"messages[{getattr(error, 'offset', 0)}]: {error.message}"


def check_index(index: object, limit: int, what: str) -> int:
    """``index`` as an index from 1 to ``limit``, else :class:`InvalidArgument` naming both."""
    if not isinstance(index, int) or isinstance(index, bool):
        raise InvalidArgument(f"{what}: an index is an integer, found {type(index).__name__}.", "an integer from 1 on.")
    if index < 1:
        raise InvalidArgument(f"{what}: the first index is 1.", "an index from 1 on.")
    if index > limit:
        raise InvalidArgument(
            f"{what}: the queue ends before {limit}.", f"an index up to {limit} (the next to be written)."
        )
    return index


def open_queue(store: Store, id: str, options: Mapping[str, Any]) -> Queue:
    """What :meth:`Store.queue` does."""
    check_names(options)
    if options.get("path") is not None:
        raise InvalidArgument(
            f"path={options['path']!r} of queue {id!r}: only a graph says where its queues lie.",
            f"cues.open({options['path']!r}).queue({id!r}), or Graph(…, queues={{{id!r}: cues.QueueOptions(path=…)}}).",
        )
    for part in id.split(".") if isinstance(id, str) else (id,):
        name, slash, number = part.rpartition("/") if isinstance(id, str) else ("", "", part)
        names.check("queue", name if slash and number.isdecimal() else part)
    key = names.queue_key(id)
    with store.view() as txn:
        raw = txn.get(key)
    if raw is None and "/" in id and "." not in id:
        return _open_partition(store, id, options)
    if raw is None:
        if "." in id:
            # A try log: made by its processor, readable like any queue.
            raise QueueNotFound(
                f"The store {store.path} has no try log {id!r} (the name of a queue holds no dot).",
                "cues status lists the processors.",
                queue=id,
            )
        if store.readonly:
            near = store.queues()
            raise QueueNotFound(
                f"The store {store.path} has no queue {id!r}; it has {', '.join(near) or 'none'}.",
                "one of those, or open the store writable to make it.",
                queue=id,
            )
        store.commit(create_queue, store, id, QueueOptions(**options))
        with store.view() as txn:
            raw = txn.get(key)
    queue = _handle(store, id, _record(store, id, raw))
    if options:
        _change(queue, options)
    return queue


def _open_partition(store: Store, id: str, options: Mapping[str, Any]) -> Queue:
    """The handle that ``orders/3`` names. The queue itself is not made by that."""
    name, _, number = id.rpartition("/")
    if options:
        raise InvalidArgument(
            f"{id!r} is a partition, and {', '.join(options)} belongs to the whole queue.",
            f"store.queue({name!r}, {next(iter(options))}=…).",
        )
    with store.view() as txn:
        there = txn.get(names.queue_key(name)) is not None
    if not there:
        near = store.queues()
        raise QueueNotFound(
            f"The store {store.path} has no queue {name!r}, of which {id!r} would be a partition; it has"
            f" {', '.join(near) or 'none'}.",
            f"store.queue({name!r}, partitions=…, key=…) makes it.",
            queue=id,
        )
    return open_queue(store, name, {}).partition(int(number))


class Matching(list[str]):
    """Names that a pattern matches, as they were; called, it gives the queues that it matches by then."""

    def __init__(self, store: Store, pattern: str) -> None:
        self._store = store
        self._pattern = pattern
        self._known: dict[str, Queue] = {}
        super().__init__(_matching(store, pattern))

    def __call__(self) -> list[Queue]:
        known = self._known
        self._known = {
            name: known[name] if name in known and not known[name].closed else self._store.queue(name)
            for name in _matching(self._store, self._pattern)
        }
        return list(self._known.values())


def matching(store: Store, pattern: str) -> Matching:
    """What :meth:`Store.matching` does."""
    if not isinstance(pattern, str):
        raise InvalidArgument(f"matching({pattern!r}): a pattern is text.", "'orders/*'.")
    return Matching(store, pattern)


def _matching(store: Store, pattern: str) -> list[str]:
    queue, slash, partition = pattern.partition("/")
    found: list[str] = []
    prefix = names.queue_key("")
    with store.view() as txn:
        records = [(key[len(prefix) :].decode(), raw) for key, raw in store.rows(txn, prefix)]
    for name, raw in records:
        if "." in name or not fnmatch.fnmatchcase(name, queue):
            continue
        if not slash:
            found.append(name)
            continue
        numbers = range(_record(store, name, raw)["partitions"])
        found += [f"{name}/{number}" for number in numbers if fnmatch.fnmatchcase(str(number), partition)]
    return found


def _shrinking(queue: str, there: int, asked: int) -> QueueOptionsError:
    return QueueOptionsError(
        f"The queue {queue!r} has {there} partitions, asked for {asked}: they do not become fewer.",
        f"partitions={there}, or a new queue: what is on a partition that went would go with it.",
        queue=queue,
        option="partitions",
    )


def _record(store: Store, id: str, raw: bytes) -> dict[str, Any]:
    """A queue's record, which has no checksum; raises :class:`StoreDamaged` where it cannot be read."""
    try:
        found: dict[str, Any] = codec.unpack(raw)
        QueueOptions.from_dict(found["options"])
        assert isinstance(found["version"], int) and isinstance(found["identity"], bytes)
    except Exception as error:
        raise StoreDamaged(
            f"The record of queue {id!r} cannot be read ({type(error).__name__}: {error}).",
            f"cues check {store.path}, and a backup.",
            path=store.path,
        ) from None
    return found


def _handle(store: Store, id: str, record: dict[str, Any]) -> Queue:
    if record.get("format", 1) != 1 or record.get("schema") is not None:
        raise QueueOptionsError(
            f"The queue {id!r} was written by a newer Cues.", "pip install -U cues-streams.", queue=id, option="schema"
        )
    return Queue(store, id, QueueOptions.from_dict(record["options"]), record["version"])


def create_queue(txn: Any, store: Store, id: str, options: QueueOptions) -> None:
    """Make a queue inside a transaction, if it is not there."""
    key = names.queue_key(id)
    if txn.get(key) is not None:
        return
    identity = os.urandom(8)
    record = {
        "identity": identity,
        "options": options.to_dict(),
        "partitions": options.partitions,
        "schema": None,
        "version": 1,
        "created_ns": clock.now_ns(),
    }
    txn.put(key, codec.pack(record))
    for partition in range(options.partitions):
        txn.put(names.row_key(id, partition), pack_row(Row(identity, 1, 1, 0, 1)))
        store.create_database(txn, names.log_database(id, partition))


def _put_record(txn: Any, queue: str, record: dict[str, Any]) -> None:
    """Write a queue's record, and its version into the row of every partition, by which appends notice."""
    txn.put(names.queue_key(queue), codec.pack(record))
    for partition in range(record["partitions"]):
        key = names.row_key(queue, partition)
        txn.put(key, pack_row(unpack_row(txn.get(key))._replace(version=record["version"])))


def _change(queue: Queue, options: Mapping[str, Any]) -> None:
    queue._not_a_try_log("changes")
    old = queue.options
    new = old.changed(options)
    if new.partitions < old.partitions:
        raise _shrinking(queue.id, old.partitions, new.partitions)
    if new.partitions > old.partitions:
        raise QueueOptionsError(
            f"The queue {queue.id!r} has {old.partitions} partition{'s' if old.partitions > 1 else ''}, asked for"
            f" {new.partitions}; growing changes where keys go, so it is asked for by name.",
            f"store.queue({queue.id!r}).grow({new.partitions}), which says what becomes of the order of keys.",
            queue=queue.id,
            option="partitions",
        )
    if new.placing != old.placing and old.partitions > 1:
        for name, was, now in zip(FUNCTIONS, old.placing, new.placing):
            if was != now:
                raise QueueOptionsError(
                    f"The queue {queue.id!r} places its messages by {name}={was!r}, which cannot change (asked for"
                    f" {now!r}): messages of one key would be on several partitions.",
                    "a new queue.",
                    queue=queue.id,
                    option=name,
                )
    queue.give(new)
    if new.to_dict() == old.to_dict():
        return
    if queue.store.readonly:
        raise QueueOptionsError(
            f"The store is open read-only, so the options of {queue.id!r} cannot change.",
            "open it writable.",
            queue=queue.id,
            option=", ".join(options),
        )

    def change(txn: Any) -> None:
        record = codec.unpack(txn.get(names.queue_key(queue.id)))
        record["options"] = new.to_dict()
        record["version"] += 1
        _put_record(txn, queue.id, record)

    queue.store.commit(change)
    with queue.store.view() as txn:
        queue.follow_options(txn, queue.log.row(txn))
