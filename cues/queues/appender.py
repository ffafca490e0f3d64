"""Appenders: one call is one transaction, also over several partitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

from cues import faults
from cues.base.closing import Closing
from cues.errors import Closed, CuesError, SchemaError
from cues.overrides import override
from cues.queues import backpressure
from cues.queues.base import BaseQueue, OptionsChanged, view_of
from cues.queues.delays import At, Delay, delayed
from cues.queues.partitioners import is_watermark
from cues.queues.placement import PartitionShare, Place
from cues.records import batch
from cues.schemas import Schema
from cues.storage import wakeup
from cues.storage.transaction import StoreTransaction

Q = TypeVar("Q", bound=BaseQueue)
Built = list[tuple[Q, list[batch.Page], PartitionShare]]
"""The record batches of an append, by the queue of their partition."""
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

    def write(self, message: dict[str, Any], *, deliver_at: At = None, delay: Delay = None) -> int | Place:
        """Append one message and return its index. It is then as durable as the store promises.

        ``deliver_at`` or ``delay``: processors get the message at this time, or after this time, as
        :func:`cues.delayed` describes.

        In a queue with several partitions the index is a :class:`cues.queues.placement.Place`: an int with the
        attribute ``partition``. Raises :class:`CodecError`, :class:`MessageTooLarge`, :class:`ReservedKey`,
        :class:`InvalidArgument` (not a dict), :class:`StoreFull`, or :class:`QueueFull` if the queue has ``max_lag`` or
        ``max_bytes`` and had no room for ``timeout`` seconds; then nothing was written.
        """
        if self._closed or self.queue.core.lifetime.closed:
            self._check()
        if deliver_at is not None or delay is not None:
            message = delayed(message, deliver_at, delay)
        queue = self.queue
        if queue.core.bounded:
            self._await_room()
        version = queue.core.version
        body = None if queue.is_partitioned else batch.plain(message)
        if body is None or len(body) > queue.core.options.max_message_bytes:
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
    ) -> range | list[Place]:
        """Append messages, all or none, in one transaction; return the range of their indices.

        In a queue with several partitions, return the :class:`cues.queues.placement.Place` of each message, in the
        order given. Raises the errors of :meth:`write`; the text names the message at fault.
        """
        if self._closed or self.queue.core.lifetime.closed:
            self._check()
        appended = messages if isinstance(messages, list) else list(messages)
        if deliver_at is not None or delay is not None:
            appended = [delayed(message, deliver_at, delay) for message in appended]
        queue = self.queue
        while True:
            version, options, spread = queue.core.version, queue.core.options, queue.is_partitioned
            if not appended:
                next = 0 if spread else queue.core.row().next
                return [] if spread else range(next, next)
            if queue.core.bounded:
                self._await_room()
            try:
                if spread:
                    built = build(queue, appended, queue.core.shares(appended))
                else:
                    pages = batch.build(appended, options.max_message_bytes, strips=options.strips)
                    built = [(queue, pages, _WHOLE)]
            except CuesError as error:
                if queue.options is not options:
                    continue  # the size limit or the partitioning has changed
                if len(appended) > 1:
                    error.message = f"messages[{getattr(error, 'offset', 0)}]: {error.message}"
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
            if spread:
                self._ring(wakeup.union(view.core.log.mask for view, _, _ in built))
                return places(len(appended), built, starts)
            self._ring(self._mask)
            return range(starts[0], starts[0] + len(appended))

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
    def write(self, message: Any, *, deliver_at: At = None, delay: Delay = None) -> int | Place:
        return super().write(self._written(message), deliver_at=deliver_at, delay=delay)

    def _written(self, message: Any) -> Any:
        return message if is_watermark(message) else self._schema.written(message)

    @override
    def write_many(self, messages: Iterable[Any], *, deliver_at: At = None, delay: Delay = None) -> range | list[Place]:
        checked = []
        for place, message in enumerate(messages):
            try:
                checked.append(self._written(message))
            except SchemaError as error:
                error.message = f"messages[{place}]: {error.message}"
                error.__dict__["offset"] = place
                raise
        return super().write_many(checked, deliver_at=deliver_at, delay=delay)


def build(
    queue: Q, messages: Sequence[dict[str, Any]], shares: Sequence[PartitionShare], digest: bytes | None = None
) -> Built[Q]:
    """Build the record batches of an append, partition by partition; an error has the ``offset`` of the message.

    ``digest`` is the delivery hash of the step that wrote the messages.
    """
    options = queue.core.options
    built: Built[Q] = []
    for share in shares:
        chosen = [messages[offset] for offset in share.offsets]
        try:
            pages = batch.build(chosen, options.max_message_bytes, digest, strips=options.strips)
        except CuesError as error:
            error.__dict__["offset"] = share.offsets[getattr(error, "offset", 0)]
            raise
        built.append((view_of(queue, share.partition), pages, share))
    return built


def places(count: int, built: Built[Q], starts: Sequence[int]) -> list[Place]:
    """Return the place of each of ``count`` messages; ``starts`` has the first index of each share."""
    placed: list[Place | None] = [None] * count
    for (_, _, share), start in zip(built, starts):
        for number, offset in enumerate(share.offsets):
            placed[offset] = Place(start + number, share.partition)
    return placed  # type: ignore[return-value]
