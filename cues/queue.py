"""Queues: ordered, immutable, addressable logs of messages; and their appenders.

    with cues.open("data") as store:
        q = store.queue("orders", metadata={"t", "time"}, retention=1_000_000)
        q.appender().write({"x": 1})                 # → 1
        q.tailer().read()                            # → {"x": 1}

Any number of threads and processes write, one transaction at a time, and read, without waiting for
a writer. A message's identity is (queue, index); the first index is 1; an index is never used twice.

Not guaranteed: that what a retention policy lets go is gone at once (whole record batches go, on
later appends). :meth:`Queue.purge` is exact for readers at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, overload

from cues import batch, clock, codec, faults, names
from cues.errors import (
    Closed,
    CuesError,
    InvalidArgument,
    MessageTooLarge,
    QueueNotFound,
    QueueOptionsError,
    StoreDamaged,
)
from cues.log import DELETE_BATCHES_MAX, Log, Row, pack_row
from cues.options import QueueOptions, check_names

if TYPE_CHECKING:
    from cues.store import Store
    from cues.tailer import Tailer
    from cues.txn.committed import CommittedTailer

_FIXED = ("partitions",)
"""Options that cannot change once the queue is made."""


class Queue:
    """A handle on one queue of a store; :meth:`Store.queue` makes it."""

    def __init__(self, store: Store, id: str, options: QueueOptions, version: int) -> None:
        self.store = store
        self.id = id
        self._options = options
        self._version = version
        self.log = Log(store, id)
        self._closed = False

    @property
    def options(self) -> QueueOptions:
        """As another process may have changed them meanwhile."""
        self.check()
        with self.store.view() as txn:
            self.follow_options(txn, self.log.row(txn))
        return self._options

    @property
    def first_index(self) -> int:
        """The index of the first message that is there; the next index when the queue is empty."""
        return self.row().first

    @property
    def last_index(self) -> int:
        """The index of the last message; one below :attr:`first_index` when the queue is empty."""
        return self.row().next - 1

    def __len__(self) -> int:
        row = self.row()
        return row.next - row.first

    def __bool__(self) -> bool:
        return True

    def row(self) -> Row:
        """Identity, first and next index, last append time, in one read transaction."""
        self.check()
        with self.store.view() as txn:
            return self.log.row(txn)

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

        With ``meta`` every message holds its metadata under ``q/meta``. See :class:`cues.Tailer`. With
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
        from cues.tailer import Tailer

        return Tailer(self, name, meta)

    def purge(self, before: int | datetime) -> int:
        """Drop the messages below the index ``before`` (or appended before that aware datetime).

        Exclusive and exact for readers at once; returns how many messages were dropped. Space is
        given back in commits of at most 1,000 record batches. Positions that stand on purged
        messages go on at the first that is left. An index beyond the last is refused.
        """
        if isinstance(before, datetime):
            ns = clock.to_ns(before)
            return self._purge(lambda txn, row: self.log.index_at(txn, row, ns))
        return self._purge(lambda txn, row: check_index(before, row.next, f"purge(before={before!r})"))

    def delete(self) -> int:
        """Drop all messages. The queue stays, with its identity, and its indices go on."""
        return self._purge(lambda txn, row: row.next)

    def _not_a_try_log(self, verb: str) -> None:
        # A record at its end that is none, or a snapshot that is gone, would mislead recovery.
        if "." in self.id:
            kind = "fork queue" if names.fork_parts(self.id) else "try log"
            raise InvalidArgument(f"{self.id!r} is a {kind}, which only its processor {verb}.", "a queue of your own.")

    def _purge(self, place: Callable[[Any, Row], int]) -> int:
        self.check()
        self._not_a_try_log("trims")
        dropped = self.store.commit(self._move_front, place)
        self._sweep()
        return dropped

    def _move_front(self, txn: Any, place: Callable[[Any, Row], int]) -> int:
        row = self.log.row(txn)
        index = place(txn, row)
        if index <= row.first:
            return 0
        self.log.move_front(txn, row, index)
        self.store.purged()
        return index - row.first

    def _sweep(self) -> None:
        while self.store.commit(self._sweep_some):
            pass

    def _sweep_some(self, txn: Any) -> bool:
        row = self.log.row(txn)
        deleted, _ = self.log.delete_before(txn, row, row.first)
        self.store.purged()  # again: a tailer may have looked between the first time and the purge's commit
        faults.point("purge.inside")
        return deleted == DELETE_BATCHES_MAX

    def follow_options(self, txn: Any, row: Row) -> QueueOptions:
        """The options in force in this transaction."""
        if row.version != self._version:
            found = _record(self.store, self.id, txn.get(names.queue_key(self.id)))
            self._options = QueueOptions.from_dict(found["options"])
            self._version = row.version
        return self._options

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
        """Close this handle; blocked reads through it end with :class:`Closed`. The store stays open."""
        self._closed = True
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

        Raises :class:`CodecError`, :class:`MessageTooLarge`, :class:`ReservedKey`,
        :class:`InvalidArgument` (not a dict), :class:`StoreFull`; then nothing was written.
        """
        if self._closed or self.queue._closed:
            self._check()
        queue = self.queue
        version = queue._version
        body = batch.plain(message)
        if body is None or len(body) > queue._options.max_message_bytes:
            return self.write_many([message]).start
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

    def write_many(self, messages: Iterable[dict[str, Any]]) -> range:
        """Append messages in one transaction and return the range of their indices; all or none.

        Errors as of :meth:`write`; the text says which message is at fault.
        """
        if self._closed or self.queue._closed:
            self._check()
        found = messages if isinstance(messages, list) else list(messages)
        if not found:
            next = self.queue.row().next
            return range(next, next)
        version, options = self.queue._version, self.queue._options
        try:
            pages = batch.build(found, options.max_message_bytes, strips=options.strips)
        except CuesError as error:
            if isinstance(error, MessageTooLarge) and self.queue.options is not options:
                return self.write_many(found)  # the limit has changed
            if len(found) > 1:
                error.message = f"messages[{getattr(error, 'offset', 0)}]: {error.message}"
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
        names.check("queue", part)
    key = names.queue_key(id)
    with store.view() as txn:
        raw = txn.get(key)
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


def _change(queue: Queue, options: Mapping[str, Any]) -> None:
    queue._not_a_try_log("changes")
    new = queue.options.changed(options)
    for name in _FIXED:
        if getattr(new, name) != getattr(queue.options, name):
            raise QueueOptionsError(
                f"The queue {queue.id!r} has {name}={getattr(queue.options, name)!r}, which cannot change"
                f" (asked for {getattr(new, name)!r}).",
                "a new queue.",
                queue=queue.id,
                option=name,
            )
    if new == queue.options:
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
        txn.put(names.queue_key(queue.id), codec.pack(record))
        row = queue.log.row(txn)
        txn.put(queue.log.key, pack_row(row._replace(version=record["version"])))

    queue.store.commit(change)
    with queue.store.view() as txn:
        queue.follow_options(txn, queue.log.row(txn))
