"""The base of a queue handle: identity, options, partitions and rows, for readers and writers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Self

from cues import faults
from cues.base import clock, names
from cues.base.checks import is_count
from cues.base.closing import Closing
from cues.base.lifetime import Lifetime
from cues.base.texts import quoted
from cues.errors import Closed, InvalidArgument, QueueNotFound, StoreDamaged
from cues.overrides import override
from cues.queues.committed import CommittedLog, Isolation, check_isolation
from cues.queues.log import Log, read_row
from cues.queues.options import FUNCTIONS, QueueOptions
from cues.queues.partitioners import Missing, name_of
from cues.queues.placement import PartitionShare, Placer
from cues.queues.retention import let_go
from cues.records import batch, sealed
from cues.records.log_row import LogRow
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction


class BaseQueue(Closing):
    """A queue of a store, or one of its partitions, as readers and writers use it.

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
        committed: bool = False,
    ) -> None:
        """With ``whole``, the handle is on one ``partition`` of that queue.

        A ``committed`` handle is for readers: its logs are :class:`~cues.queues.committed.CommittedLog`.
        """
        self.store = store
        self.name: str = whole.id if whole is not None else id
        """The queue's name; a handle on a partition has the name of the whole queue."""
        self.id: str = id
        self._options = options
        self._version = version
        self._functions: dict[str, Any] = {}
        """``key`` and ``partitioner`` that are functions: they were passed to this handle, the store keeps names."""
        self._is_committed = committed
        self._look_at = 0.0
        """The time at which a reader next looks for transactions of dead producers."""
        self._log: Log = (CommittedLog if committed else Log)(store, self.name, partition)
        """The log of this partition; of a queue with several partitions, the log of the first."""
        self._whole = whole
        self.is_partitioned = whole is None and options.partitions > 1
        """True if this handle is on several logs."""
        self._bounded = options.bounded
        """True if writers wait for readers (backpressure.py)."""
        self._committed: Self | None = None
        self._opened: dict[int, Self] = {}
        self._maker: Self | None = whole
        """The handle that made this one, and whose options it has."""
        self._lifetime: Lifetime = Lifetime(None if whole is None else whole._lifetime)
        self._spread: Placer | None = None

    @property
    def options(self) -> QueueOptions:
        """The options in force; another process may have changed them."""
        self._check()
        with self.store.core.view() as txn:
            self._follow_options(txn, self._log.row(txn))
        return self._options

    @property
    def partitions(self) -> int:
        """The number of partitions; 1 for a handle on a partition."""
        return 1 if self._whole is not None else self.options.partitions

    def partition(self, number: int) -> Self:
        """Return a handle on one partition, counted from 0: a queue of its own, with an id such as ``orders/3``.

        Its appender writes there, whatever the key. Raises :class:`QueueNotFound` if there is no such partition.
        """
        if self._whole is not None:
            raise InvalidArgument(
                f"{self.id!r} is a partition.", f"call store.queue({self.name!r}).partition({number!r})."
            )
        count = self.partitions
        if not is_count(number, 0, count - 1):
            raise QueueNotFound(
                f"The queue {self.id!r} has no partition {number!r}; it has {count}.",
                f"pass a number from 0 to {count - 1}." if count > 1 else "pass 0, or add some with queue.grow(n).",
                queue=f"{self.id}/{number}",
            )
        return self._handle(number)

    def _view(self, number: int) -> Self:
        """Return the handle on a partition that this handle keeps (do not close it); with one log, this handle."""
        if not self.is_partitioned:
            return self
        view = self._opened.get(number)
        return self._opened.setdefault(number, self._handle(number)) if view is None else view

    @property
    def _views(self) -> list[Self]:
        """The :meth:`_view` of every partition that there is now."""
        if self._whole is not None:
            return [self]
        return [self._view(number) for number in range(self.options.partitions)]

    def _handle(self, number: int) -> Self:
        id = f"{self.id}/{number}"
        return type(self)(self.store, id, self._options, self._version, number, self, self._is_committed)

    def _read_as(self, isolation: Isolation) -> Self:
        """Return the handle through which readers of this isolation read; do not close it."""
        check_isolation(isolation)
        if isolation == "uncommitted" or self._is_committed:
            return self
        if self._committed is None:
            log = self._log
            handle = type(self)(
                self.store, self.id, self._options, self._version, log.partition, self._whole, committed=True
            )
            handle._maker, handle._lifetime = self, Lifetime(self._lifetime)
            self._committed = handle
        return self._committed

    def _shares(self, messages: Sequence[dict[str, Any]]) -> list[PartitionShare]:
        """Return the messages of each partition; an error has the ``offset`` of the message at fault."""
        if self._spread is None:
            self._spread = Placer(self._options, sum(row.next - 1 for row in self._rows()))
        return self._spread.shares(self._options, messages)

    @property
    def first_index(self) -> int:
        """The index of the first message that is there; the next index when the queue is empty.

        Of several partitions, the lowest.
        """
        return min(row.first for row in self._rows())

    @property
    def last_index(self) -> int:
        """The index of the last message; one below :attr:`first_index` when the queue is empty.

        Of several partitions, the highest.
        """
        return max(row.next for row in self._rows()) - 1

    def __len__(self) -> int:
        """The number of messages on all partitions."""
        return sum(row.next - row.first for row in self._rows())

    def __bool__(self) -> bool:
        return True

    def _row(self) -> LogRow:
        """Return the row of the first partition."""
        self._check()
        with self.store.core.view() as txn:
            return self._log.row(txn)

    def _rows(self) -> list[LogRow]:
        """Return the rows of all partitions, in one read transaction."""
        if self._whole is not None:
            return [self._row()]
        self._check()
        with self.store.core.view() as txn:
            row = self._log.row(txn)
            count = self._follow_options(txn, row).partitions
            return [row, *(read_row(txn, self.id, partition) for partition in range(1, count))]

    def _not_a_try_log(self, verb: str) -> None:
        # A last record that is not a snapshot, or a snapshot that was removed, would mislead recovery.
        if "." in self.id:
            kind = "fork queue" if names.fork_parts(self.id) else "try log"
            raise InvalidArgument(
                f"{self.id!r} is a {kind}, which only its processor {verb}.", "write to a queue of your own."
            )

    def _follow_options(self, txn: StoreTransaction, row: LogRow) -> QueueOptions:
        """Return the options in force in this transaction."""
        if row.version != self._version:
            if self._maker is not None:
                options = self._maker._follow_options(txn, row)
            else:
                record = read_record(self.store, self.id, txn.get(names.queue_key(self.id)))
                options = self._with_functions(QueueOptions.from_dict(record["options"]))
            self._options = options
            self.is_partitioned = self._whole is None and options.partitions > 1
            self._bounded = options.bounded
            self._version = row.version
        return self._options

    def _give(self, options: QueueOptions) -> None:
        """Use the functions of ``options`` in this handle; the store has only their names."""
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
        return options._changed(known) if known else options

    def _append_pages(self, txn: StoreTransaction, pages: list[batch.Page]) -> int:
        """Append inside a transaction and apply retention; return the first index."""
        start, version = self._log.append(txn, pages)
        if version != self._version or self._options.retention is not None:
            self._appended(txn, version)
        return start

    def _append_plain(self, txn: StoreTransaction, body: bytes, built_under: int) -> int:
        """Append one message that :func:`batch.plain` encoded, under the options version ``built_under``."""
        index, version = self._log.append_plain(txn, body)
        if version != self._version or self._options.retention is not None:
            self._appended(txn, version)
        if version != built_under:
            raise OptionsChanged
        if faults.active:
            faults.point("append.inside")
        return index

    def _appended(self, txn: StoreTransaction, version: int) -> None:
        if version != self._version:
            self._follow_options(txn, self._log.row(txn))
        if self._options.retention is not None:
            let_go(txn, self._log.records, self._options.retention)

    @override
    def close(self) -> None:
        """Close this handle; blocked reads through it end with :class:`Closed`. The store stays open.

        Handles on partitions that it returned are closed too.
        """
        self._lifetime.end()
        self.store.core.ring_own()

    @property
    def closed(self) -> bool:
        return self._lifetime.closed or self.store.closed

    def _check(self) -> None:
        """Raise :class:`Closed` (or the store's own error) when this handle cannot be used."""
        if self._lifetime.closed:
            raise Closed(f"The queue {self.id!r} is closed.", "open it again with store.queue(...).")
        self.store.core.check_open()

    @override
    def __repr__(self) -> str:
        return f"<cues.Queue {self.id} of {self.store.path}>"


class OptionsChanged(Exception):
    """The queue's options changed before a message was written. The caller builds the message again."""


def check_index(index: object, limit: int, what: str) -> int:
    """Return ``index`` if it is an integer from 1 to ``limit``, else raise :class:`InvalidArgument`."""
    if not isinstance(index, int) or isinstance(index, bool):
        kind = type(index).__name__
        raise InvalidArgument(f"{what}: an index is an integer, found {kind}.", "pass an integer, 1 or more.")
    if index < 1:
        raise InvalidArgument(f"{what}: the first index is 1.", "pass an index of 1 or more.")
    if index > limit:
        raise InvalidArgument(
            f"{what}: the queue ends before {limit}.", f"pass an index up to {limit} (the next to be written)."
        )
    return index


def index_of(txn: StoreTransaction, log: Log, row: LogRow, place: str | int | datetime, what: str) -> int:
    """Return the index for ``place`` on a log: ``"start"``, ``"end"``, an index, or an aware time.

    A purged index becomes the first that is left. ``what`` names the call in the error for an index after the end.
    """
    if place == "start":
        return row.first
    if place == "end":
        return row.next
    if isinstance(place, datetime):
        return log.index_at(txn, row, clock.to_ns(place))
    return max(row.first, check_index(place, row.next, what))


def unpack_record(queue: str, raw: bytes) -> dict[str, Any]:
    """Decode the record of a queue. Raises :class:`StoreDamaged`; its transaction adds the store."""
    return sealed.unseal_map(raw, f"record of the queue {queue}")


def read_record(store: BaseStore, id: str, raw: bytes) -> dict[str, Any]:
    """Decode a queue's record. Raises :class:`StoreDamaged`."""
    try:
        record = unpack_record(id, raw)
        QueueOptions.from_dict(record["options"])
        assert isinstance(record["version"], int) and isinstance(record["identity"], bytes)
    except StoreDamaged as error:
        raise sealed.placed(error, store.path) from None
    except Exception as error:
        raise StoreDamaged(
            f"The record of queue {id!r} cannot be read ({type(error).__name__}: {error}).",
            f"run cues check {quoted(store.path)}, and restore a backup.",
            path=store.path,
        ) from None
    return record


def journal_of(queue: BaseQueue) -> str:
    """Return the name of a log, unique over all stores: ``<store id>/<queue>``, with ``/<n>`` for partition n > 0."""
    try:
        return f"{queue.store.id.hex()}/{queue._log.id}"
    except AttributeError:
        raise InvalidArgument(f"A queue was expected, found {queue!r:.60}.", "call store.queue('orders').") from None
