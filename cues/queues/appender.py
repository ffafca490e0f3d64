"""Appenders: one call is one transaction, also over several partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cues import faults
from cues.base.closing import Closing
from cues.errors import Closed, CuesError, SchemaError
from cues.overrides import override
from cues.queues import backpressure
from cues.queues.base import BaseQueue, OptionsChanged, PartitionIndex, PartitionShare, view_of
from cues.queues.options import At, Delay, QueueOptions, delayed
from cues.queues.partitioners import is_watermark
from cues.records import batch, columns
from cues.storage import wakeup
from cues.storage.transaction import StoreTransaction

if TYPE_CHECKING:
    from cues.schemas import Schema

Q = TypeVar("Q", bound=BaseQueue)
Built = list[tuple[Q, list[batch.Page], PartitionShare]]
"""The record batches of an append, by the queue of their partition."""
Build = Callable[[BaseQueue, Any], Built[BaseQueue]]
_WHOLE: Final = PartitionShare(0, [])
"""Placeholder for the share of an append to one log: all its messages."""


class Appender(Closing):
    """Writes to a queue. Safe from any thread; each call is one transaction."""

    def __init__(self, queue: BaseQueue, timeout: float | None = None) -> None:
        self.queue = queue
        self._timeout = timeout
        self._store = queue.store
        self._mask = queue.core.log.mask
        queue.options  # noqa: B018  (loads the options in force)
        self._commit = queue.store.core.commit
        self._ring = queue.store.core.ring
        self._plain = queue.core.append_plain
        self._closed = False

    def write(self, message: dict[str, Any], *, deliver_at: At = None, delay: Delay = None) -> int | PartitionIndex:
        """Append one message and return its index. It is then as durable as the store promises.

        ``deliver_at`` or ``delay``: processors get the message at this time, or after this time, as
        :func:`cues.delayed` describes.

        In a queue with several partitions the index is a :class:`cues.queues.base.PartitionIndex`: an int with the
        attribute ``partition``. Raises :class:`CodecError`, :class:`MessageTooLarge`, :class:`ReservedKey`,
        :class:`InvalidArgument` (not a dict), :class:`StoreFull`, or :class:`QueueFull` if the queue has ``max_lag`` or
        ``max_bytes`` and had no room for ``timeout`` seconds; then nothing was written.
        """
        core = self.queue.core
        if self._closed or core.lifetime.closed:
            self._check()
        if deliver_at is not None or delay is not None:
            message = delayed(message, deliver_at, delay)
        if core.bounded:
            self._await_room()
        version = core.version
        body = None if core.is_partitioned else batch.plain(message)
        if body is None or len(body) > core.options.max_message_bytes:
            placed: Any = self.write_many([message])  # Any: compiled, a value known as int loses its subclass
            return placed[0]  # type: ignore[no-any-return]
        if faults.active:
            faults.point("append.before")
        try:
            index = self._commit(self._plain, body, version, pages=1)
        except OptionsChanged:
            return self.write(message)
        if faults.active:
            faults.point("append.after")
        self._ring(self._mask)
        return index

    def write_many(
        self, messages: Iterable[dict[str, Any]], *, deliver_at: At = None, delay: Delay = None
    ) -> range | list[PartitionIndex]:
        """Append messages, all or none, in one transaction; return the range of their indices.

        In a queue with several partitions, return the :class:`cues.queues.base.PartitionIndex` of each message, in the
        order given. Raises the errors of :meth:`write`; the text names the message at fault.
        """
        if self._closed or self.queue.core.lifetime.closed:
            self._check()
        appended = messages if isinstance(messages, list) else list(messages)
        if deliver_at is not None or delay is not None:
            appended = [delayed(message, deliver_at, delay) for message in appended]
        if not appended:
            next = 0 if self.queue.is_partitioned else self.queue.core.row().next
            return [] if self.queue.is_partitioned else range(next, next)
        try:
            built, starts = self._write(appended, build)
        except CuesError as error:
            if len(appended) > 1 and hasattr(error, "offset"):
                error.message = f"messages[{error.offset}]: {error.message}"
            raise
        if built[0][2] is not _WHOLE:
            return places(len(appended), built, starts)
        return range(starts[0], starts[0] + len(appended))

    def write_table(self, table: Any) -> range | dict[int, range]:
        """Append the rows of a table as messages, all or none, in one transaction; return the range of their indices.

        ``table``: of pyarrow, polars or pandas (without its index), or another object with ``__arrow_c_stream__``. Each
        row is a message, whose fields are the columns. The rows are stored as columns, and no dict is made: readers of
        tables get them as such (:meth:`cues.Tailer.read_table`), readers of messages get dicts, with None for null.
        In a queue with several partitions, return a dict with the range of each partition that got rows; their order
        is that of the table.

        Raises :class:`InvalidArgument` for a type or a value that no message has, and for two columns of one name,
        :class:`NotInstalled` without pyarrow, and the errors of :meth:`write`.
        """
        if self._closed or self.queue.core.lifetime.closed:
            self._check()
        rows = self._checked_table(columns.checked(columns.table_of(table)))
        queue = self.queue
        if not rows.num_rows:
            next = 0 if queue.is_partitioned else queue.core.row().next
            return {} if queue.is_partitioned else range(next, next)
        try:
            built, starts = self._write(rows, build_table)
        except CuesError as error:
            if hasattr(error, "offset"):
                error.message = f"row {error.offset}: {error.message}"
            raise
        if built[0][2] is _WHOLE:
            return range(starts[0], starts[0] + rows.num_rows)
        return {
            share.partition: range(start, start + len(share.offsets)) for (_, _, share), start in zip(built, starts)
        }

    def _checked_table(self, table: Any) -> Any:
        return table

    def _write(self, appended: Any, build: Build) -> tuple[Built[BaseQueue], list[int]]:
        """Build and append; return the first index of each share, and what was appended."""
        queue = self.queue
        while True:
            version, options = queue.core.version, queue.core.options
            if queue.core.bounded:
                self._await_room()
            try:
                built = build(queue, appended)
            except CuesError:
                if queue.options is not options:
                    continue  # the size limit or the partitioning has changed
                raise
            if faults.active:
                faults.point("append.before")
            size = sum(1 + len(page.pieces) for _, pages, _ in built for page in pages)
            try:
                starts = self._commit(self._append, built, version, pages=size + size // 64)
            except OptionsChanged:
                continue
            if faults.active:
                faults.point("append.after")
            self._ring(wakeup.union(view.core.log.mask for view, _, _ in built))
            return built, starts

    def _await_room(self) -> None:
        """Wait for the readers of the queue, before anything is built."""
        # The options first: they may have been taken away, and a wait must not outlive them.
        gate = backpressure.Gate(backpressure.program(), [self.queue])

        def check() -> None:
            self._check()
            self.queue.options  # noqa: B018

        backpressure.wait_for_room(gate, self._timeout, check)

    def _append(self, txn: StoreTransaction, built: Built[BaseQueue], version: int) -> list[int]:
        starts = [view.core.append_pages(txn, pages) for view, pages, _ in built]
        if self.queue.core.version != version:
            raise OptionsChanged
        if faults.active:
            faults.point("append.inside")
        return starts

    @override
    def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"The appender of {self.queue.id!r} is closed.", "make a new one with queue.appender().")
        self.queue.core.check_open()

    @override
    def __repr__(self) -> str:
        return f"<cues.Appender of {self.queue.id}>"


class TypedAppender(Appender):
    """An appender that checks what it writes: dicts, or objects of the class of its schema (:mod:`cues.schemas`).

    Its methods raise :class:`cues.errors.SchemaError` with the path of the offence, and then nothing was written.
    """

    def __init__(self, queue: BaseQueue, timeout: float | None, schema: Schema) -> None:
        super().__init__(queue, timeout)
        self._schema = schema

    @override
    def write(self, message: Any, *, deliver_at: At = None, delay: Delay = None) -> int | PartitionIndex:
        return super().write(self._written(message), deliver_at=deliver_at, delay=delay)

    def _written(self, message: Any) -> Any:
        return message if is_watermark(message) else self._schema.written(message)

    @override
    def _checked_table(self, table: Any) -> Any:
        place = 0
        for rows in table.to_batches():
            for row in columns.rows(rows):
                try:
                    self._written(row)
                except SchemaError as error:
                    error.__dict__["offset"] = place
                    error.message = f"row {place}: {error.message}"
                    raise
                place += 1
        return table

    @override
    def write_many(
        self, messages: Iterable[Any], *, deliver_at: At = None, delay: Delay = None
    ) -> range | list[PartitionIndex]:
        checked = []
        for place, message in enumerate(messages):
            try:
                checked.append(self._written(message))
            except SchemaError as error:
                error.message = f"messages[{place}]: {error.message}"
                error.__dict__["offset"] = place
                raise
        return super().write_many(checked, deliver_at=deliver_at, delay=delay)


def build(queue: BaseQueue, messages: Sequence[dict[str, Any]]) -> Built[BaseQueue]:
    """Build the record batches of an append, partition by partition; an error has the ``offset`` of the message."""
    options = queue.core.options
    if not queue.is_partitioned:
        return [(queue, batch.build(messages, options.max_message_bytes, strips=options.strips), _WHOLE)]
    built: Built[BaseQueue] = []
    for share in queue.core.shares(messages):
        chosen = [messages[offset] for offset in share.offsets]
        try:
            pages = batch.build(chosen, options.max_message_bytes, strips=options.strips)
        except CuesError as error:
            raise _placed(error, share) from None
        built.append((view_of(queue, share.partition), pages, share))
    return built


def build_table(queue: BaseQueue, table: Any) -> Built[BaseQueue]:
    """Build the records of columns of an append, as :func:`build` does for messages."""
    options = queue.core.options
    if not queue.is_partitioned:
        return [(queue, _columns(table, options), _WHOLE)]
    built: Built[BaseQueue] = []
    for share in queue.core.table_shares(table):
        try:
            pages = _columns(columns.taken(table, share.offsets), options)
        except CuesError as error:
            raise _placed(error, share) from None
        built.append((view_of(queue, share.partition), pages, share))
    return built


def _columns(table: Any, options: QueueOptions) -> list[batch.Page]:
    return batch.build_table(table, options.max_message_bytes, compression=options.compression)


def _placed(error: CuesError, share: PartitionShare) -> CuesError:
    """An error about a message of a share, with the offset in the whole append."""
    error.__dict__["offset"] = share.offsets[getattr(error, "offset", 0)]
    return error


def places(count: int, built: Built[Q], starts: Sequence[int]) -> list[PartitionIndex]:
    """Return the place of each of ``count`` messages; ``starts`` has the first index of each share."""
    placed: list[PartitionIndex | None] = [None] * count
    for (_, _, share), start in zip(built, starts):
        for number, offset in enumerate(share.offsets):
            placed[offset] = PartitionIndex(start + number, share.partition)
    return placed  # type: ignore[return-value]
