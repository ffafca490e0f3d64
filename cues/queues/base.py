"""The base of a queue handle: identity, options, rows, partitions, and the partition of each message."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, Self, TypeVar, final

from cues import faults
from cues.base import clock, names
from cues.base.checks import is_count
from cues.base.closing import Closing
from cues.base.lifetime import Lifetime
from cues.base.texts import quoted
from cues.errors import Closed, InvalidArgument, QueueNotFound, StoreDamaged
from cues.native import mypyc_attr
from cues.overrides import override
from cues.queues.committed import CommittedLog, Isolation, check_isolation
from cues.queues.log import Log, read_row
from cues.queues.options import FUNCTIONS, QueueOptions, Retention, changed
from cues.queues.partitioners import EVERY, Missing, Router, name_of
from cues.records import batch, sealed
from cues.records.log_row import LogRow
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction


@mypyc_attr(native_class=False)
class PartitionIndex(int):
    """An index with its ``partition``."""

    partition: int

    def __new__(cls, index: int, partition: int) -> PartitionIndex:
        place = int.__new__(cls, index)
        place.partition = partition
        return place

    @override
    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.partition

    @override
    def __repr__(self) -> str:
        return f"<{int(self)} of partition {self.partition}>"

    __str__ = int.__repr__


class PartitionShare(NamedTuple):
    """The messages of an append for one partition."""

    partition: int
    offsets: list[int]
    """Positions of its messages in the append."""


class Placer:
    """Divides appends over the partitions of one queue, by the options in force."""

    def __init__(self, options: QueueOptions, start: int) -> None:
        """``start`` is the number of messages that the queue has had; turns begin there."""
        self._start = start
        self._follow(options)

    def _follow(self, options: QueueOptions) -> None:
        self._options = options
        self._router = Router(options.partitions, options.key, options.partitioner, self._start)

    def shares(self, options: QueueOptions, messages: Sequence[dict[str, Any]]) -> list[PartitionShare]:
        """Return the messages by partition, a watermark on each. Raises the errors of :meth:`Router.place`."""
        if options is not self._options:
            self._follow(options)
        return shares_of(self._router.place(messages), options.partitions)

    def table_shares(self, options: QueueOptions, table: Any) -> list[PartitionShare]:
        """Return the rows of a table by partition, as :meth:`shares` does for messages."""
        if options is not self._options:
            self._follow(options)
        return shares_of(self._router.place_table(table), options.partitions)


def shares_of(placed: Any, partitions: int) -> list[PartitionShare]:
    """Return the messages of each partition; ``placed`` is a list or an Arrow array, as a :class:`Router` makes it."""
    shares: dict[int, list[int]] = {}
    for offset, partition in enumerate(placed if isinstance(placed, list) else placed.to_pylist()):
        for each in range(partitions) if partition == EVERY else (partition,):
            shares.setdefault(each, []).append(offset)
    return [PartitionShare(partition, offsets) for partition, offsets in shares.items()]


_LOOK_NS: Final = 10**9
"""The time between two looks at a queue whose old messages a reader holds. Or an age has :data:`_LOOKS` of them."""
_LOOKS: Final = 64

Q = TypeVar("Q", bound="BaseQueue")


@final
class QueueCore:
    """The core of a handle on a queue, or on one of its partitions. :class:`BaseQueue` is its face."""

    def __init__(
        self,
        store: BaseStore,
        id: str,
        options: QueueOptions,
        version: int,
        partition: int = 0,
        parent: QueueCore | None = None,
        is_committed: bool = False,
    ) -> None:
        """With ``parent``, the handle is on one ``partition`` of that queue.

        A handle that ``is_committed`` is for readers: its logs are :class:`~cues.queues.committed.CommittedLog`.
        """
        self.store = store
        self.name: str = parent.id if parent is not None else id
        self.id: str = id
        self.options = options
        """The options as they were last seen: :meth:`follow_options`."""
        self.version = version
        """The version of these options."""
        self._functions: dict[str, Any] = {}
        """``key`` and ``partitioner`` that are functions: they were passed to this handle, the store keeps names."""
        self.is_committed = is_committed
        self._policy: Retention | None = None
        """The retention policy that was applied last."""
        self._looked_ns = 0
        self._settled_ns = 0
        """From the first to the second of these times, the policy deletes nothing."""
        self.look_at = 0.0
        """The time at which a reader next looks for transactions of dead producers."""
        self.log: Log = (CommittedLog if is_committed else Log)(store, self.name, partition)
        """The log of this partition; of a queue with several partitions, the log of the first."""
        self.parent = parent
        self.is_partitioned = parent is None and options.partitions > 1
        """True if this handle is on several logs."""
        self.bounded = options.bounded
        """True if writers wait for readers (backpressure.py)."""
        self.strips = options.strips
        """True if the queue drops the metadata that messages come with."""
        self.views: dict[int, Any] = {}
        """The faces that :func:`view_of` returned, by partition."""
        self.committed: Any = None
        """The face that :func:`read_as` returned."""
        self._maker: QueueCore | None = parent
        """The handle that made this one, and whose options it has."""
        self.lifetime: Lifetime = Lifetime(None if parent is None else parent.lifetime)
        self._spread: Placer | None = None

    def partition(self, number: int) -> QueueCore:
        """Return a new handle on one partition."""
        return QueueCore(self.store, f"{self.id}/{number}", self.options, self.version, number, self, self.is_committed)

    def read_committed(self) -> QueueCore:
        """Return a new handle whose readers see only committed messages."""
        core = QueueCore(
            self.store, self.id, self.options, self.version, self.log.partition, self.parent, is_committed=True
        )
        core._maker, core.lifetime = self, Lifetime(self.lifetime)
        return core

    def shares(self, messages: Sequence[dict[str, Any]]) -> list[PartitionShare]:
        """Return the messages of each partition; an error has the ``offset`` of the message at fault."""
        return self._placer().shares(self.options, messages)

    def table_shares(self, table: Any) -> list[PartitionShare]:
        """Return the rows of each partition, as :meth:`shares` does for messages."""
        return self._placer().table_shares(self.options, table)

    def _placer(self) -> Placer:
        if self._spread is None:
            self._spread = Placer(self.options, sum(row.next - 1 for row in self.rows()))
        return self._spread

    def row(self) -> LogRow:
        """Return the row of the first partition."""
        self.check_open()
        with self.store.core.view() as txn:
            return self.log.row(txn)

    def rows(self) -> list[LogRow]:
        """Return the rows of all partitions, in one read transaction."""
        if self.parent is not None:
            return [self.row()]
        self.check_open()
        with self.store.core.view() as txn:
            row = self.log.row(txn)
            count = self.follow_options(txn, row).partitions
            return [row, *(read_row(txn, self.id, partition) for partition in range(1, count))]

    def refuse_try_log(self, verb: str) -> None:
        # A last record that is not a snapshot, or a snapshot that was removed, would mislead recovery.
        if "." in self.id:
            kind = "fork queue" if names.split_fork(self.id) else "try log"
            raise InvalidArgument(
                f"{self.id!r} is a {kind}, which only its processor {verb}.", "write to a queue of your own."
            )

    def follow_options(self, txn: StoreTransaction, row: LogRow) -> QueueOptions:
        """Return the options in force in this transaction."""
        if row.version != self.version:
            if self._maker is not None:
                options = self._maker.follow_options(txn, row)
            else:
                record = read_record(self.store, self.id, txn.get(names.queue_key(self.id)))
                options = self._with_functions(QueueOptions.from_dict(record["options"]))
            self.options = options
            self.is_partitioned = self.parent is None and options.partitions > 1
            self.bounded = options.bounded
            self.strips = options.strips
            self.version = row.version
        return self.options

    def give(self, options: QueueOptions) -> None:
        """Use the functions of ``options`` in this handle; the store has only their names."""
        self._functions = {
            name: value
            for name in FUNCTIONS
            if callable(value := getattr(options, name)) and type(value) is not Missing
        }
        self.options = self._with_functions(self.options)

    def _with_functions(self, options: QueueOptions) -> QueueOptions:
        known = {
            name: function
            for name, function in self._functions.items()
            if name_of(getattr(options, name)) == name_of(function)
        }
        return changed(options, known) if known else options

    def append_pages(self, txn: StoreTransaction, pages: list[batch.Page]) -> int:
        """Append inside a transaction and apply retention; return the first index."""
        start, version = self.log.append(txn, pages)
        if version != self.version or self.options.retention is not None:
            self._appended(txn, version, sum(1 + len(page.pieces) for page in pages))
        return start

    def append_plain(self, txn: StoreTransaction, body: bytes, built_under: int) -> int:
        """Append one message that :func:`batch.plain` encoded, under the options version ``built_under``."""
        index, version = self.log.append_plain(txn, body)
        if version != self.version or self.options.retention is not None:
            self._appended(txn, version, 1)
        if version != built_under:
            raise OptionsChanged
        if faults.active:
            faults.point("append.inside")
        return index

    def _appended(self, txn: StoreTransaction, version: int, entries: int) -> None:
        if version != self.version:
            self.follow_options(txn, self.log.row(txn))
        policy = self.options.retention
        if policy is not None:
            now = clock.now_ns()
            if policy is self._policy and self._looked_ns <= now < self._settled_ns:
                return
            self._policy, self._looked_ns = policy, now
            self._settled_ns = self._comes_of_age(txn, policy, now)
            if self._settled_ns <= now:
                from cues.queues.retention import let_go

                if not let_go(txn, self.log.records, policy, entries) and policy.only_age:
                    self._settled_ns = max(
                        self._comes_of_age(txn, policy, now), now + min(_LOOK_NS, policy.age_ns // _LOOKS)
                    )

    def _comes_of_age(self, txn: StoreTransaction, policy: Retention, now: int) -> int:
        """Return the time before which a policy with an age only deletes nothing; 0: that is not known."""
        log = self.log.records
        if not policy.only_age or log.row(txn).time_ns > now + clock.WRONG_NS:
            return 0
        return min(log.front_time(txn) + policy.age_ns, now + policy.age_ns // 8)

    def check_open(self) -> None:
        """Raise :class:`Closed` (or the store's own error) when this handle cannot be used."""
        if self.lifetime.closed:
            raise Closed(f"The queue {self.id!r} is closed.", "open it again with store.queue(...).")
        self.store.core.check_open()


class BaseQueue(Closing):
    """A queue of a store, or one of its partitions, as readers and writers use it: a thin face over its core.

    :class:`cues.Queue` adds what a user calls: appenders, tailers, purges and growth.
    """

    def __init__(self, core: QueueCore) -> None:
        self.core = core
        self.store = core.store
        self.name: str = core.name
        """The queue's name; a handle on a partition has the name of the whole queue."""
        self.id: str = core.id

    @property
    def options(self) -> QueueOptions:
        """The options in force; another process may have changed them."""
        core = self.core
        core.check_open()
        with self.store.core.view() as txn:
            core.follow_options(txn, core.log.row(txn))
        return core.options

    @property
    def is_partitioned(self) -> bool:
        """True if this handle is on several logs."""
        return self.core.is_partitioned

    @property
    def partitions(self) -> int:
        """The number of partitions; 1 for a handle on a partition."""
        return 1 if self.core.parent is not None else self.options.partitions

    def partition(self, number: int) -> Self:
        """Return a handle on one partition, counted from 0: a queue of its own, with an id such as ``orders/3``.

        Its appender writes there, whatever the key. Raises :class:`QueueNotFound` if there is no such partition.
        """
        if self.core.parent is not None:
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
        return type(self)(self.core.partition(number))

    @property
    def first_index(self) -> int:
        """The index of the first message that is there; the next index when the queue is empty.

        Of several partitions, the lowest.
        """
        return min(row.first for row in self.core.rows())

    @property
    def last_index(self) -> int:
        """The index of the last message; one below :attr:`first_index` when the queue is empty.

        Of several partitions, the highest.
        """
        return max(row.next for row in self.core.rows()) - 1

    def __len__(self) -> int:
        """The number of messages on all partitions."""
        return sum(row.next - row.first for row in self.core.rows())

    def __bool__(self) -> bool:
        return True

    @override
    def close(self) -> None:
        """Close this handle; blocked reads through it end with :class:`Closed`. The store stays open.

        Handles on partitions that it returned are closed too.
        """
        self.core.lifetime.end()
        self.store.core.ring_own()

    @property
    def closed(self) -> bool:
        return self.core.lifetime.closed or self.store.closed

    @override
    def __repr__(self) -> str:
        return f"<cues.Queue {self.id} of {self.store.path}>"


def view_of(queue: Q, number: int) -> Q:
    """Return the handle on a partition that this handle keeps (do not close it); with one log, this handle."""
    core = queue.core
    if not core.is_partitioned:
        return queue
    view: Q | None = core.views.get(number)
    return core.views.setdefault(number, type(queue)(core.partition(number))) if view is None else view


def views_of(queue: Q) -> list[Q]:
    """Return the :func:`view_of` every partition that there is now."""
    return [queue] if queue.core.parent is not None else [view_of(queue, n) for n in range(queue.options.partitions)]


def read_as(queue: Q, isolation: Isolation) -> Q:
    """Return the handle through which readers of this isolation read; do not close it."""
    check_isolation(isolation)
    core = queue.core
    if isolation == "uncommitted" or core.is_committed:
        return queue
    if core.committed is None:
        core.committed = type(queue)(core.read_committed())
    made: Q = core.committed
    return made


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


_RECORD: Final[dict[str, Any]] = {"identity": bytes, "options": {str: object}, "partitions": int, "version": int}


def unpack_record(queue: str, raw: bytes) -> dict[str, Any]:
    """Decode the record of a queue. Raises :class:`StoreDamaged`; its transaction adds the store."""
    what = f"record of the queue {queue}"
    record: dict[str, Any] = sealed.formed(sealed.unseal_map(names.queue_key(queue), raw, what), what, _RECORD)
    return record


def partitions_of(txn: StoreTransaction, queue: str) -> int:
    """Return the number of partitions of a queue; 0 for a missing queue."""
    raw = txn.get(names.queue_key(queue))
    return 0 if raw is None else int(unpack_record(queue, raw)["partitions"])


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
        return f"{queue.store.id.hex()}/{queue.core.log.id}"
    except AttributeError:
        raise InvalidArgument(f"A queue was expected, found {queue!r:.60}.", "call store.queue('orders').") from None
