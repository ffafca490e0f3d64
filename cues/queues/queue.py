"""Queues: ordered, immutable, addressable logs of messages.

    with cues.open("data") as store:
        q = store.queue("orders", metadata={"t", "time"}, retention=1_000_000)
        q.appender().write({"x": 1})                 # → 1
        q.tailer().read()                            # → {"x": 1}

Any number of threads and processes write, one transaction at a time. Readers do not wait for writers.
A message's identity is (queue, index); the first index is 1; an index is never used twice.

A queue with ``partitions=8`` is eight logs, ``orders/0`` to ``orders/7``, each with indices of its own. The queue's
partitioner (:mod:`cues.queues.partitioners`) places messages of one key on one partition, in their order; a tailer of
the whole queue merges the partitions by the time of the appends. A partition is a queue like any other.

    q = store.queue("orders", partitions=8, key="user")
    q.appender().write({"user": "ann"})              # → 1, of partition 5
    q.partition(5).tailer().read()                   # also store.queue("orders/5")

Not guaranteed: that a retention policy deletes messages at once. It deletes whole record batches, on
later appends. After :meth:`Queue.purge`, readers see none of the purged messages.
"""

from __future__ import annotations

import contextlib
import fnmatch
import heapq
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, overload

from cues import faults
from cues.base import clock, names, shown
from cues.base.checks import is_number
from cues.errors import InvalidArgument, QueueNotFound, QueueOptionsError, StoreFull
from cues.native import mypyc_attr
from cues.producers import spans
from cues.queues import tables
from cues.queues.base import BaseQueue, QueueCore, check_index, read_as, read_record, unpack_record, views_of
from cues.queues.committed import Isolation
from cues.queues.cursor import IndexOf, Piece
from cues.queues.log import DELETE_ENTRIES_MAX, Log, read_row
from cues.queues.options import FUNCTIONS, QueueOptions, changed, check_names
from cues.queues.tailer import MergedTailer, Tailer
from cues.records import sealed
from cues.records.log_row import LogRow, put_row
from cues.storage import format_record, transaction
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction

if TYPE_CHECKING:
    from cues.queues.appender import Appender, TypedAppender
    from cues.queues.retention import PlannedPurge


class Queue(BaseQueue):
    """A handle on one queue of a store; :meth:`Store.queue` makes it.

    It is a handle on all partitions of the queue; :meth:`partition` returns a handle on one.
    """

    def _repr_html_(self) -> str:
        return shown.html(self)

    def grow(self, partitions: int) -> None:
        """Raise the number of partitions to ``partitions``, in one transaction; a smaller number raises.

        Stored messages stay on their partition. Later messages of many keys go to another partition (with
        ``"rendezvous"``, only those of keys that move to a new one). So a reader may see later messages of a key before
        earlier ones: if the order of keys matters, let the readers finish first. State stays with the partition for
        which it was kept: a processor with state begins again with a key that moved.

        Writers use the new partitions at once, and tailers of several partitions at their next read. A tailer that was
        made when there was one partition continues with that one. A running graph takes in the new partitions within
        half a second, and reads them from their beginning.
        """
        self.core.check_open()
        self.core.refuse_try_log("grows")
        if self.core.parent is not None:
            raise InvalidArgument(
                f"{self.id!r} is a partition.", f"call store.queue({self.name!r}).grow({partitions!r})."
            )
        partitions = QueueOptions(partitions=partitions).partitions
        self.store.core.commit(self._grow, partitions)
        with self.store.core.view() as txn:
            self.core.follow_options(txn, self.core.log.row(txn))

    def _grow(self, txn: StoreTransaction, partitions: int) -> None:
        record = read_record(self.store, self.id, txn.get(names.queue_key(self.id)))
        present = record["partitions"]
        refuse_shrinking(self.id, present, partitions)
        if partitions == present:
            return
        row = LogRow(record["identity"], 1, 1, 0, record["version"])
        _create_logs(txn, self.store, self.id, range(present, partitions), row)
        record["options"]["partitions"] = record["partitions"] = partitions
        _put_record(txn, self.id, record)
        faults.point("grow.inside")

    @overload
    def appender(self, *, timeout: float | None = None, schema: None = None) -> Appender: ...

    @overload
    def appender(self, *, timeout: float | None = None, schema: Any) -> TypedAppender: ...

    def appender(self, *, timeout: float | None = None, schema: Any = None) -> Appender:
        """Return a writer. There may be any number of them, in any number of threads and processes.

        ``timeout`` is for a queue with ``max_lag`` or ``max_bytes``: the longest wait of a write for the readers, in
        seconds. After it the write raises :class:`QueueFull`; 0: at once. None: a write waits until there is room.
        With ``schema`` (a class or a JSON Schema, :mod:`cues.schemas`) each message is checked before it is written.

        Raises :class:`InvalidArgument` for a try log, which only its processor writes.
        """
        self.core.check_open()
        self.core.refuse_try_log("writes")
        if timeout is not None and not (is_number(timeout) and timeout >= 0):
            raise InvalidArgument(f"appender(timeout={timeout!r}).", "pass seconds, 0 or more, or None.")
        from cues.queues.appender import Appender, TypedAppender

        if schema is None:
            return Appender(self, timeout)
        from cues.schemas import schema_of

        return TypedAppender(self, timeout, schema_of(schema))

    def tailer(self, name: str | None = None, *, meta: bool = False, isolation: Isolation = "uncommitted") -> Tailer:
        """Return a reader from the start; with a ``name``, from the position that the store keeps under that name.

        It reads all partitions, merged by append time (:class:`cues.queues.tailer.MergedTailer`). With ``meta``
        every message holds its metadata under ``q/meta``. See :class:`cues.Tailer`. With
        ``isolation="committed"``, messages that a :class:`cues.txn.Publisher` wrote uncommitted are returned only
        after they are acknowledged, in the order of the acknowledgements (:mod:`cues.queues.committed`). The position
        of a name is for one isolation; the other raises :class:`InvalidArgument`.
        """
        self.core.check_open()
        queue = read_as(self, isolation)
        if self.partitions > 1:
            return MergedTailer(queue, name, meta)
        return Tailer(queue, name, meta)

    def to_arrow(
        self,
        start: int | datetime | None = None,
        stop: int | datetime | None = None,
        *,
        schema: Any = None,
        columns: Sequence[str] | None = None,
        where: Any = None,
        metadata: bool = False,
    ) -> Any:
        """Return messages as a ``pyarrow.Table``: all of them, or those from ``start`` to before ``stop``.

        ``start`` and ``stop`` are indices, or aware datetimes (of the append); of a queue with several partitions only
        times. Each field is a column, and a message without it has null there; its type is that of the values, or that
        of ``schema``, a ``pyarrow.Schema``, whose columns are taken alone. With ``columns`` only these are returned,
        and with ``where``, a pyarrow expression, only the rows for which it is true. With ``metadata`` the first
        columns are ``q/partition``, ``q/index`` and ``q/time``. The table is in memory, and so are messages that were
        not written as tables while it is made; :meth:`scan` returns the same in parts.

        Raises :class:`SchemaError` with the path of a value that does not fit its column, and :class:`NotInstalled`
        without pyarrow.
        """
        wanted = tables.Selection(schema, columns, where, metadata)
        return tables.joined(list(self.pieces(start, stop)), "arrow", wanted)

    def to_pandas(
        self,
        start: int | datetime | None = None,
        stop: int | datetime | None = None,
        *,
        schema: Any = None,
        columns: Sequence[str] | None = None,
        where: Any = None,
        metadata: bool = False,
    ) -> Any:
        """Return messages as a ``pandas.DataFrame`` with types that have nulls; otherwise as :meth:`to_arrow`."""
        wanted = tables.Selection(schema, columns, where, metadata)
        return tables.joined(list(self.pieces(start, stop)), "pandas", wanted)

    def scan(
        self,
        start: int | datetime | None = None,
        stop: int | datetime | None = None,
        *,
        schema: Any = None,
        columns: Sequence[str] | None = None,
        where: Any = None,
        metadata: bool = False,
    ) -> Any:
        """Return a ``pyarrow.RecordBatchReader`` of the table that :meth:`to_arrow` returns, for DuckDB and others.

        It reads a record at a time, so that a queue of tables may be larger than memory. Messages that were not written
        as tables are all in memory, unless ``schema`` names their columns. The messages are those that are there at the
        call. A queue is itself such a source: ``duckdb.sql("select * from queue")`` and ``pyarrow.table(queue)``.
        """
        found = source_of(self, tables.Selection(schema, columns, where, metadata), start, stop)()
        return found.to_reader() if hasattr(found, "to_reader") else found

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.scan().__arrow_c_stream__(requested_schema)

    def pieces(
        self, start: int | datetime | None, stop: int | datetime | None, ends: Sequence[int] | None = None
    ) -> Iterator[Piece]:
        """The parts of records with the messages of a range, by the time of their append. Later ones are not read.

        ``ends``: the index of each partition before which to end.
        """
        self.core.check_open()
        if self.partitions > 1 and (isinstance(start, int) or isinstance(stop, int)):
            raise InvalidArgument(
                f"{self.id!r} has {self.partitions} partitions, each with indices of its own.",
                "give times, or call queue.partition(i).to_arrow(start, stop).",
            )
        tailer = self.tailer()
        if isinstance(start, datetime):
            tailer.to_time(start)
        elif start is not None:
            tailer.to_index(start)
        until_ns = clock.to_ns(stop) if isinstance(stop, datetime) else None
        ends = [row.next for row in self.core.rows()] if ends is None else ends
        if isinstance(stop, int):
            ends = [min(stop, ends[0])]
        pieces = [cursor.pieces(end, until_ns) for cursor, end in zip(tailer.cursors, ends)]
        return heapq.merge(*pieces, key=lambda piece: (piece.batch.shown_ns, piece.log.partition))

    def purge(self, before: int | datetime, unread: Literal["drop", "refuse"] = "drop") -> int:
        """Drop the messages below the index ``before``, or appended before that aware datetime; return how many.

        The message at ``before`` stays. Readers see the purge at once. Space is freed in commits of about
        4 MB. Positions on purged messages continue at the first message that is left. An index after the
        next one to be written raises. For several partitions ``before`` must be a time, and all are purged in one
        transaction.

        ``unread="refuse"``: raise :class:`QueueInUse`, and drop nothing, if a known reader (a processor, a named tailer
        or a consumer group) has not read some of these messages.
        """
        if unread not in ("drop", "refuse"):
            raise InvalidArgument(f"unread={unread!r}.", "pass 'drop' or 'refuse'.")
        return purge_to(self, self._index_of(before), unread == "refuse")

    def _index_of(self, before: int | datetime) -> IndexOf:
        """The index on a log before which a purge drops messages."""
        if isinstance(before, datetime):
            ns = clock.to_ns(before)
            return lambda txn, log, row: log.index_at(txn, row, ns)
        if self.partitions > 1:
            raise InvalidArgument(
                f"purge(before={before!r}): each of the {self.partitions} partitions of {self.id!r} has indices of its"
                " own.",
                "pass a time, or call queue.partition(i).purge(before=index).",
            )
        return lambda txn, log, row: check_index(before, row.next, f"purge(before={before!r})")

    def plan_purge(self, before: int | datetime) -> list[PlannedPurge]:
        """Return what :meth:`purge` would drop now from each partition: messages, bytes, and readers that lose some."""
        self.core.check_open()
        self.core.refuse_try_log("trims")
        from cues.queues.retention import planned

        index_of, logs = self._index_of(before), [view.core.log for view in views_of(self)]
        with self.store.core.view() as txn:
            rows = [(log, log.row(txn)) for log in logs]
            return [planned(txn, log, row, index_of(txn, log, row)) for log, row in rows]

    def delete(self) -> int:
        """Drop all messages, of all partitions. The queue stays, with its identity, and its indices continue."""
        return purge_to(self, lambda txn, log, row: row.next)

    def _sweep(self, log: Log, dropped: int) -> None:
        """Free the space of dropped messages, in smaller commits if the map has no room for larger ones."""
        most = DELETE_ENTRIES_MAX
        while True:
            try:
                if not self.store.core.commit(self._sweep_some, log, most):
                    return
                most = min(DELETE_ENTRIES_MAX, 2 * most)
            except StoreFull as error:
                most //= 8
                if not most:
                    raise StoreFull(
                        f"{dropped} messages of {self.id!r} are purged, but the full map of the store"
                        f" {self.store.path} has no room to free their space.",
                        "open it with a larger map_size=; the next purge frees the space.",
                        path=self.store.path,
                    ) from error
                with contextlib.suppress(StoreFull):
                    # The pages that a commit frees can be used two commits later: this commit is the one between.
                    self.store.core.commit(lambda txn: put_row(txn, log.key, log.row(txn)))

    def _move_fronts(self, txn: StoreTransaction, logs: list[Log], index_of: IndexOf, refuse: bool) -> int:
        dropped = 0
        for log in logs:
            row = log.row(txn)
            index = index_of(txn, log, row)
            if refuse:
                from cues.queues.retention import planned, refuse_unread

                refuse_unread(planned(txn, log, row, index))
            if index > row.first:
                log.move_front(txn, row, index)
                dropped += index - row.first
        if dropped:
            self.store.core.note_purge()
        return dropped

    def _sweep_some(self, txn: StoreTransaction, log: Log, most: int) -> bool:
        row = log.row(txn)
        more, front = log.delete_before(txn, row, row.first, most)
        spans.forget(txn, log.id, front)
        self.store.core.note_purge()  # again: a tailer may have read between the first call and the purge's commit
        faults.point("purge.inside")
        return more


def source_of(
    queue: Queue,
    wanted: tables.Selection,
    start: int | datetime | None = None,
    stop: int | datetime | None = None,
) -> Callable[[], Any]:
    """Return a function, each call of which returns the messages that are there now, as columns.

    It returns a ``pyarrow.RecordBatchReader``, which reads a record at a time; or a ``pyarrow.Table``, the same each
    time, if some messages were not written as tables: they have no types before they are read.
    """
    ends = [row.next for row in queue.core.rows()]
    kept: list[Any] = []

    def source() -> Any:
        if not kept:
            found = tables.source(lambda: queue.pieces(start, stop, ends), wanted)
            if not hasattr(found, "to_reader"):
                return found
            kept.append(found)
        return kept[0]

    return source


def purge_to(queue: Queue, index_of: IndexOf, refuse: bool = False) -> int:
    """Drop the messages before the index that ``index_of`` returns for each log; return their number."""
    queue.core.check_open()
    queue.core.refuse_try_log("trims")
    logs = [view.core.log.records for view in views_of(queue)]
    try:
        dropped = queue.store.core.commit(queue._move_fronts, logs, index_of, refuse)
    except StoreFull as error:
        error.hint = "open the store with a larger map_size=, then purge; a purge itself needs some free pages."
        raise
    for log in logs:
        queue._sweep(log, dropped)
    return dropped


def open_queue(store: BaseStore, id: str, options: Mapping[str, Any] | None = None) -> Queue:
    """Open or make a queue, for :meth:`Store.queue`."""
    options = options or {}
    check_names(options)
    if options.get("path") is not None:
        raise InvalidArgument(
            f"path={options['path']!r} of queue {id!r}: only a graph can have queues in other stores.",
            f"call cues.open({options['path']!r}).queue({id!r}), or pass {{{id!r}: cues.QueueOptions(path=…)}} to"
            " Graph(…, queues=…).",
        )
    if options.get("schema") is not None:
        raise InvalidArgument(
            f"schema= of queue {id!r}: a store keeps packed messages, and has no columns.",
            "check what a program writes with queue.appender(schema=…). For columns, pass"
            f" {{{id!r}: cues.QueueOptions(schema=…)}} to Graph(…, queues=…), and run the graph with --queues DIR.",
        )
    for part in id.split(".") if isinstance(id, str) else (id,):
        name, slash, number = part.rpartition("/") if isinstance(id, str) else ("", "", part)
        names.check("queue", name if slash and number.isdecimal() else part)
    key = names.queue_key(id)
    with store.core.view() as txn:
        raw = txn.get(key)
    if raw is None and "/" in id and "." not in id:
        return _open_partition(store, id, options)
    if raw is None:
        if "." in id:  # a try log: made by its processor, readable like any queue
            raise QueueNotFound(
                f"The store {store.path} has no try log {id!r} (the name of a queue holds no dot).",
                "list the processors with cues status.",
                queue=id,
            )
        if store.readonly:
            raise QueueNotFound(
                f"The store {store.path} has no queue {id!r}; it has {', '.join(store.queues()) or 'none'}.",
                "name one of those, or open the store without readonly=True to make it.",
                queue=id,
            )
        raw = store.core.commit(create_queue, store, id, QueueOptions(**options))
    record = read_record(store, id, raw)
    if record.get("format", 1) != 1 or record.get("schema") is not None:
        newer = "install a newer version of Cues (pip install -U cues-streams)."
        raise _refused(id, "schema", f"The queue {id!r} was written by a newer Cues.", newer)
    queue = Queue(QueueCore(store, id, QueueOptions.from_dict(record["options"]), record["version"]))
    if options:
        _change(queue, options)
    return queue


def _open_partition(store: BaseStore, id: str, options: Mapping[str, Any]) -> Queue:
    """Open a partition, such as ``orders/3``. A missing queue is not made."""
    name, _, number = id.rpartition("/")
    if options:
        raise InvalidArgument(
            f"{id!r} is a partition, and {', '.join(options)} belongs to the whole queue.",
            f"call store.queue({name!r}, {next(iter(options))}=…).",
        )
    with store.core.view() as txn:
        exists = txn.get(names.queue_key(name)) is not None
    if not exists:
        raise QueueNotFound(
            f"The store {store.path} has no queue {name!r}, of which {id!r} would be a partition; it has"
            f" {', '.join(store.queues()) or 'none'}.",
            f"make it with store.queue({name!r}, partitions=…, key=…).",
            queue=id,
        )
    return open_queue(store, name).partition(int(number))


@mypyc_attr(native_class=False)
class Matching(list[str]):
    """The names that matched a pattern when the list was made; a call returns the queues that match now."""

    def __init__(self, store: BaseStore, pattern: str) -> None:
        if not isinstance(pattern, str):
            raise InvalidArgument(f"matching({pattern!r}): a pattern is text.", "pass a pattern such as 'orders/*'.")
        self._store = store
        self._pattern = pattern
        self._known: dict[str, Queue] = {}
        super().__init__(_matching(store, pattern))

    def __call__(self) -> list[Queue]:
        known = self._known
        self._known = {
            name: known[name] if name in known and not known[name].closed else open_queue(self._store, name)
            for name in _matching(self._store, self._pattern)
        }
        return list(self._known.values())


def _matching(store: BaseStore, pattern: str) -> list[str]:
    queue, slash, partition = pattern.partition("/")
    with store.core.view() as txn:
        rows = transaction.named_rows(txn, names.queue_key(""))
        records = [(name, raw) for name, _, raw in rows if "." not in name and fnmatch.fnmatchcase(name, queue)]
    if not slash:
        return [name for name, _ in records]
    return [
        f"{name}/{number}"
        for name, raw in records
        for number in range(read_record(store, name, raw)["partitions"])
        if fnmatch.fnmatchcase(str(number), partition)
    ]


def _refused(queue: str, option: str, message: str, hint: str) -> QueueOptionsError:
    return QueueOptionsError(message, hint, queue=queue, option=option)


def refuse_shrinking(queue: str, present: int, asked: int) -> None:
    """Raise :class:`QueueOptionsError` if a queue is asked to have fewer partitions than it has."""
    if asked < present:
        message = f"The queue {queue!r} has {present} partitions and cannot have fewer, such as {asked}."
        hint = f"pass partitions={present}, or make a new queue: a removed partition would take its messages with it."
        raise _refused(queue, "partitions", message, hint)


def create_queue(txn: StoreTransaction, store: BaseStore, id: str, options: QueueOptions) -> bytes:
    """Make a queue inside a transaction, if it is not there; return its record."""
    key = names.queue_key(id)
    raw: bytes | None = txn.get(key)
    if raw is not None:
        return raw
    if txn.get(names.row_key(id, 0)) is not None:
        raise sealed.damaged(f"record of the queue {id}", "it is missing, and the row of the queue is there")
    identity = os.urandom(8)
    record = {
        "identity": identity,
        "options": options.to_dict(),
        "partitions": options.partitions,
        "schema": None,
        "version": 1,
        "created_ns": clock.now_ns(),
    }
    _require(txn, options)
    raw = sealed.put(txn, key, sealed.pack_map(record))
    _create_logs(txn, store, id, range(options.partitions), LogRow(identity, 1, 1, 0, 1))
    return raw


def _require(txn: StoreTransaction, options: QueueOptions) -> None:
    """Note what an earlier version of Cues does not know: it would delete messages that are unread."""
    if options.retention is not None and options.retention.unread:
        format_record.require(txn, "unread")


def continue_log(txn: StoreTransaction, id: str, partition: int, identity: bytes, next: int) -> None:
    """Let a log, which never had a message, continue another one: the identity of its queue, and its next index.

    The caller does it for all partitions of the queue.
    """
    record = unpack_record(id, txn.get(names.queue_key(id))) | {"identity": identity}
    sealed.put(txn, names.queue_key(id), sealed.pack_map(record))
    put_row(txn, names.row_key(id, partition), LogRow(identity, next, next, 0, record["version"]))


def _create_logs(txn: StoreTransaction, store: BaseStore, queue: str, partitions: range, row: LogRow) -> None:
    for partition in partitions:
        put_row(txn, names.row_key(queue, partition), row)
        store.core.create_database(txn, names.log_database(queue, partition))


def _put_record(txn: StoreTransaction, queue: str, record: dict[str, Any]) -> None:
    """Write a queue's changed record, and its new version into every partition's row, where appends compare it."""
    record["version"] += 1
    sealed.put(txn, names.queue_key(queue), sealed.pack_map(record))
    for partition in range(record["partitions"]):
        row = read_row(txn, queue, partition)._replace(version=record["version"])
        put_row(txn, names.row_key(queue, partition), row)


def refuse_replacing(queue: str, old: QueueOptions, new: QueueOptions, grow: str) -> None:
    """Raise :class:`QueueOptionsError` for options that would place messages of one key on another partition.

    ``grow`` is the instruction to add partitions.
    """
    refuse_shrinking(queue, old.partitions, new.partitions)
    if new.partitions > old.partitions:
        raise _refused(
            queue,
            "partitions",
            f"The queue {queue!r} has {old.partitions} partition{'s' if old.partitions > 1 else ''}, not"
            f" {new.partitions}; an option does not add partitions, because that changes the partition of keys.",
            f"{grow}; its documentation tells the effect on the order of keys.",
        )
    if new.placing != old.placing and old.partitions > 1:
        for name, was, now in zip(FUNCTIONS, old.placing, new.placing):
            if was != now:
                raise _refused(
                    queue,
                    name,
                    f"The queue {queue!r} places its messages by {name}={was!r}, which cannot change (asked for"
                    f" {now!r}): messages of one key would be on several partitions.",
                    "make a new queue.",
                )


def _change(queue: Queue, options: Mapping[str, Any]) -> None:
    queue.core.refuse_try_log("changes")
    old = queue.options
    new = changed(old, options)
    refuse_replacing(queue.id, old, new, f"call store.queue({queue.id!r}).grow({new.partitions})")
    queue.core.give(new)
    if new.to_dict() == old.to_dict():
        return
    if queue.store.readonly:
        message = f"The store is open read-only, so the options of {queue.id!r} cannot change."
        raise _refused(queue.id, ", ".join(options), message, "open it without readonly=True.")

    def change(txn: StoreTransaction) -> None:
        record = unpack_record(queue.id, txn.get(names.queue_key(queue.id)))
        record["options"] = new.to_dict()
        _require(txn, new)
        _put_record(txn, queue.id, record)

    queue.store.core.commit(change)
    with queue.store.core.view() as txn:
        queue.core.follow_options(txn, queue.core.log.row(txn))
