"""The base of a queue handle: identity, options, partitions and rows, for readers and writers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Self

from cues import codec, faults
from cues.base import clock, names
from cues.base.checks import is_count
from cues.base.closing import Closing
from cues.errors import Closed, InvalidArgument, QueueNotFound, StoreDamaged
from cues.queues.log import Log, read_row
from cues.queues.options import FUNCTIONS, QueueOptions
from cues.queues.partitioners import Missing, name_of
from cues.queues.placement import PartitionShare, Placer
from cues.queues.retention import let_go
from cues.records import batch
from cues.records.log_row import LogRow
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction


class BaseQueue(Closing):
    """One queue of a store, or one partition of it, as its readers and writers use it.

    :class:`cues.Queue` adds what a user calls: appenders, tailers, purges and growth.
    """

    def __init__(
        self,
        store: BaseStore,
        id: str,
        options: QueueOptions,
        version: int,
        partition: int = 0,
        whole: Self | None = None,
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
        """The log of this partition; of a queue with several partitions, the log of the first."""
        self._whole = whole
        self.is_partitioned = whole is None and options.partitions > 1
        """Whether this handle means several logs."""
        self._views: dict[int, Self] = {}
        self._handles: weakref.WeakSet[Self] = weakref.WeakSet()
        """Every handle on a partition that was made by this one."""
        self._guard = threading.Lock()
        self._spread: Placer | None = None
        self._closed = False

    @property
    def options(self) -> QueueOptions:
        """As another process may have changed them meanwhile."""
        self.check()
        with self.store.view() as txn:
            self.follow_options(txn, self.log.row(txn))
        return self._options

    @property
    def partitions(self) -> int:
        """How many logs this handle means; 1 of a handle on a partition."""
        return 1 if self._whole is not None else self.options.partitions

    def partition(self, number: int) -> Self:
        """A handle on one partition, from 0 on: a queue of its own, called ``orders/3``.

        Its appender writes there whatever the key is. Raises :class:`QueueNotFound` for a number that there is not.
        """
        if self._whole is not None:
            raise InvalidArgument(f"{self.id!r} is a partition.", f"store.queue({self.name!r}).partition({number!r}).")
        count = self.partitions
        if not is_count(number, 0, count - 1):
            raise QueueNotFound(
                f"The queue {self.id!r} has no partition {number!r}; it has {count}.",
                f"0 to {count - 1}." if count > 1 else "0, or queue.grow(n) for more.",
                queue=f"{self.id}/{number}",
            )
        return self._handle(number)

    def view(self, number: int) -> Self:
        """A handle on a partition that this one keeps, not to be closed; where there is one log, this handle."""
        if not self.is_partitioned:
            return self
        view = self._views.get(number)
        return self._views.setdefault(number, self._handle(number)) if view is None else view

    @property
    def views(self) -> list[Self]:
        """The :meth:`view` of every partition that there is now."""
        if self._whole is not None:
            return [self]
        return [self.view(number) for number in range(self.options.partitions)]

    def _handle(self, number: int) -> Self:
        handle = type(self)(self.store, f"{self.id}/{number}", self._options, self._version, number, self)
        with self._guard:
            self._handles.add(handle)
        return handle

    def shares(self, messages: Sequence[dict[str, Any]]) -> list[PartitionShare]:
        """Which of these messages go to which partition; an error has the ``offset`` of the message at fault."""
        if self._spread is None:
            self._spread = Placer(self._options, sum(row.next - 1 for row in self.rows()))
        return self._spread.shares(self._options, messages)

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

    def row(self) -> LogRow:
        """Identity, first and next index, last append time, in one read transaction; of the first partition."""
        self.check()
        with self.store.view() as txn:
            return self.log.row(txn)

    def rows(self) -> list[LogRow]:
        """The row of every partition, in one read transaction."""
        if self._whole is not None:
            return [self.row()]
        self.check()
        with self.store.view() as txn:
            row = self.log.row(txn)
            count = self.follow_options(txn, row).partitions
            return [row, *(read_row(txn, self.id, partition) for partition in range(1, count))]

    def _not_a_try_log(self, verb: str) -> None:
        # A record at its end that is none, or a snapshot that is gone, would mislead recovery.
        if "." in self.id:
            kind = "fork queue" if names.fork_parts(self.id) else "try log"
            raise InvalidArgument(
                f"{self.id!r} is a {kind}, which only its processor {verb}.", "write to a queue of your own."
            )

    def follow_options(self, txn: StoreTransaction, row: LogRow) -> QueueOptions:
        """The options in force in this transaction."""
        if row.version != self._version:
            if self._whole is not None:
                self._whole.follow_options(txn, row)
                self._use(self._whole._options, row.version)
            else:
                record = read_record(self.store, self.id, txn.get(names.queue_key(self.id)))
                self._use(self._with_functions(QueueOptions.from_dict(record["options"])), row.version)
        return self._options

    def _use(self, options: QueueOptions, version: int) -> None:
        self._options = options
        self.is_partitioned = self._whole is None and options.partitions > 1
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

    def append_pages(self, txn: StoreTransaction, pages: list[batch.Page]) -> int:
        """Append inside a transaction, and let retention take what it may; returns the first index."""
        start, version = self.log.append(txn, pages)
        if version != self._version or self._options.retention is not None:
            self._appended(txn, version)
        return start

    def _append_plain(self, txn: StoreTransaction, body: bytes, built_under: int) -> int:
        """:meth:`append_pages` for one message (see :func:`batch.plain`), built under that options version."""
        index, version = self.log.append_plain(txn, body)
        if version != self._version or self._options.retention is not None:
            self._appended(txn, version)
        if version != built_under:
            raise OptionsChanged
        if faults.active:
            faults.point("append.inside")
        return index

    def _appended(self, txn: StoreTransaction, version: int) -> None:
        if version != self._version:
            self.follow_options(txn, self.log.row(txn))
        if self._options.retention is not None:
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
        self.store.ring_own()

    @property
    def closed(self) -> bool:
        return self._closed or self.store.closed

    def check(self) -> None:
        """Raise :class:`Closed` (or the store's own error) when this handle cannot be used."""
        if self._closed:
            raise Closed(f"The queue {self.id!r} is closed.", "open it again with store.queue(...).")
        self.store._check()

    def __repr__(self) -> str:
        return f"<cues.Queue {self.id} of {self.store.path}>"


class OptionsChanged(Exception):
    """The queue's options changed before a message was written. Nothing was written; the caller builds it again."""


def check_index(index: object, limit: int, what: str) -> int:
    """``index`` as an index from 1 to ``limit``, else :class:`InvalidArgument` naming both."""
    if not isinstance(index, int) or isinstance(index, bool):
        found = type(index).__name__
        raise InvalidArgument(f"{what}: an index is an integer, found {found}.", "pass an integer, 1 or more.")
    if index < 1:
        raise InvalidArgument(f"{what}: the first index is 1.", "pass an index of 1 or more.")
    if index > limit:
        raise InvalidArgument(
            f"{what}: the queue ends before {limit}.", f"pass an index up to {limit} (the next to be written)."
        )
    return index


def index_of(txn: StoreTransaction, log: Log, row: LogRow, place: str | int | datetime, what: str) -> int:
    """The index that ``"start"``, ``"end"``, an index or an aware time means on a log now.

    A purged index becomes the first that is left; ``what`` names the call in the error of one after the end.
    """
    if place == "start":
        return row.first
    if place == "end":
        return row.next
    if isinstance(place, datetime):
        return log.index_at(txn, row, clock.to_ns(place))
    return max(row.first, check_index(place, row.next, what))


def read_record(store: BaseStore, id: str, raw: bytes) -> dict[str, Any]:
    """A queue's record, which has no checksum; raises :class:`StoreDamaged` where it cannot be read."""
    try:
        found: dict[str, Any] = codec.unpack(raw)
        QueueOptions.from_dict(found["options"])
        assert isinstance(found["version"], int) and isinstance(found["identity"], bytes)
    except Exception as error:
        raise StoreDamaged(
            f"The record of queue {id!r} cannot be read ({type(error).__name__}: {error}).",
            f"run cues check {store.path}, and restore a backup.",
            path=store.path,
        ) from None
    return found


def journal_of(queue: BaseQueue) -> str:
    """The name of a log among those of all stores: ``<id of the store>/<queue>``, with ``/<n>`` for partition n > 0."""
    try:
        return f"{queue.store.id.hex()}/{queue.log.id}"
    except AttributeError:
        raise InvalidArgument(f"A queue was expected, found {queue!r:.60}.", "store.queue('orders').") from None
