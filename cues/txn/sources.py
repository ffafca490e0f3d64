"""The sources of a consumer: the logs that it reads, in turn, each from its offset.

ReadFrom           what a user asks for: a queue, where to begin, what to do about purged messages
MessageSource      a source of the user's own: no queue, but an object that yields messages with positions
ConsumerSource     one log that is read, and the position in it
Sources            all of them; the partitions that are added to a queue become sources too
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, Protocol

from cues.base import clock
from cues.base.checks import is_count
from cues.base.data import dataclass
from cues.errors import Diverged, InvalidArgument
from cues.producers.sequencer import Envelope
from cues.queues.base import check_index, journal_of, view_of, views_of
from cues.queues.queue import Queue
from cues.records.identity import ZERO_UUID
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction
from cues.storage.wakeup import Doorbells
from cues.txn.messages import DICT, MessageType
from cues.txn.reader import OnGap, ReadUncommitted

_LOOK_S: Final = 0.01
"""Seconds for which an empty source is not read while others have messages."""
POLL_S: Final = 0.1
"""The longest time after which a consumer that sleeps asks a source of the user's own for messages."""
GROWTH_S: Final = 0.5
"""The longest time after which a consumer that sleeps sees partitions that were added to a queue."""


@dataclass(frozen=True)
class ReadFrom:
    """A source of a consumer, with its own options.

    ``queue``    a queue, all partitions of which are read, or one partition
    ``start``    where the consumer begins if its checkpoint has no offset for the queue: ``"first"``, the first message
                 that is there; ``"last"``, after the last message; an index, which is that of a log with one partition;
                 or an aware datetime, the first message that was appended then or later. It counts once: the position
                 is committed before the first message is consumed. Partitions that are added later are read from their
                 first message
    ``on_gap``   ``"raise"`` or ``"skip"``, as of :class:`cues.txn.Consumer`, for this source; None takes that of the
                 consumer
    """

    queue: Queue
    start: Literal["first", "last"] | int | datetime = "first"
    on_gap: OnGap | None = None

    def __post_init__(self) -> None:
        journal_of(self.queue)
        start = self.start
        if not (start in ("first", "last") or isinstance(start, (int, datetime))) or isinstance(start, bool):
            raise InvalidArgument(f"start={start!r}.", "pass 'first', 'last', an index, or an aware datetime.")
        if isinstance(start, datetime):
            clock.to_ns(start)
        elif isinstance(start, int) and self.queue.is_partitioned:
            raise InvalidArgument(
                f"start={start!r}: each partition of {self.queue.id!r} has indices of its own.",
                "pass a time, or ReadFrom(queue.partition(i), start=index) for each partition.",
            )
        if self.on_gap not in (None, "raise", "skip"):
            raise InvalidArgument(f"on_gap={self.on_gap!r}.", "pass 'raise', 'skip' or None.")

    def index(self, txn: StoreTransaction, queue: Queue) -> int:
        """Return the index at which a partition of the queue is read first."""
        row = queue.core.log.row(txn)
        if self.start == "first":
            return row.first
        if self.start == "last":
            return row.next
        if isinstance(self.start, datetime):
            return queue.core.log.index_at(txn, row, clock.to_ns(self.start))
        return check_index(self.start, row.next, f"start={self.start!r} of {queue.id!r}")


class MessageSource(Protocol):
    """A source of messages that is not a queue: a file, a table, another system.

    Its positions are integers from 0 on, which its owner defines: bytes, lines, row numbers. A position is that of the
    next message. The checkpoint keeps it, so a successor continues there.

    Duties: :meth:`read` yields the same messages at the same positions whenever it is called again. It ends where there
    is no further message *now*; the consumer calls it again later. It must not wait for messages, because the consumer
    reads other sources and ends transactions in the same thread. An exception ends the consumer.

    A message that has a UUID (under ``q/uuid``, or where ``message_type`` says) is sequenced as on a queue: repetitions
    are dropped, and pending messages are handed out after their acknowledgement. If they are not in memory any more,
    they are read again: ``read(begin, end)``.
    """

    journal: str
    """The name of the source in the checkpoint and in envelopes. It never changes."""

    def read(self, begin: int, end: int | None) -> Iterator[tuple[int, Any]]:
        """Yield (position after the message, message), from ``begin`` on and, if ``end`` is not None, before it."""


class OwnReader:
    """Reads a :class:`MessageSource` as a :class:`ReadUncommitted` reads a log."""

    def __init__(self, source: MessageSource, begin: int, end: int | None, message_type: MessageType) -> None:
        self.source = source
        self.journal = source.journal
        self.index = begin
        self._end = end
        self._type = message_type
        self._messages: Iterator[tuple[int, Any]] | None = None

    def __iter__(self) -> Iterator[Envelope]:
        return self

    def __next__(self) -> Envelope:
        if self._messages is None:
            self._messages = iter(self.source.read(self.index, self._end))
        try:
            item = next(self._messages, None)
        except BaseException:
            self._messages = None
            raise
        if item is None:
            self._messages = None  # later there may be more
            raise StopIteration
        begin = self.index
        end, message = self._checked(item)
        self.index = end
        return Envelope(self.journal, begin, end, self._type.get_uuid(message) or ZERO_UUID, message)

    def _checked(self, item: Any) -> tuple[int, Any]:
        try:
            end, message = item
        except (TypeError, ValueError):
            end, message = None, None
        if not is_count(end, least=self.index + 1) or (self._end is not None and end > self._end):
            raise InvalidArgument(
                f"The source {self.journal!r} yielded {item!r:.60} at the position {self.index}.",
                "yield pairs (position after the message, message), whose positions increase.",
            )
        return end, message


class OwnSource:
    """A source of the user's own, and the position in it; as :class:`ConsumerSource`."""

    def __init__(self, source: MessageSource, begin: int, message_type: MessageType) -> None:
        self.journal = source.journal
        self.begin = self.at = begin
        self._reader = OwnReader(source, begin, None, message_type)
        self._type = message_type
        self._ahead: Envelope | None = None
        """A message that a look has found."""

    def ready(self) -> bool:
        """Return whether there is a message."""
        if self._ahead is None:
            self._ahead = next(self._reader, None)
        return self._ahead is not None

    def next(self) -> Envelope | None:
        envelope = self._ahead if self.ready() else None
        self._ahead = None
        if envelope is not None:
            self.at = envelope.end
        return envelope

    def replay(self, begin: int, end: int) -> OwnReader:
        return OwnReader(self._reader.source, begin, end, self._type)


class ConsumerSource:
    """A log that is read, and the position in it."""

    def __init__(self, queue: Queue, begin: int, reader: ReadUncommitted) -> None:
        self.queue = queue
        self.journal = reader.journal
        self.begin = self.at = begin
        self._reader = reader

    def next(self) -> Envelope | None:
        envelope = next(self._reader, None)
        self.at = self._reader.index
        return envelope


class Sources:
    """All logs that are read, one message from each in turn.

    An empty log is read again when all logs are empty, or after a moment, but not for every message of another log. One
    read transaction serves all logs of a store.
    """

    def __init__(
        self,
        sources: Sequence[ReadFrom],
        offsets: Mapping[str, int],
        open_reader: Callable[[ReadFrom, Queue, int, int | None], ReadUncommitted],
        own: Sequence[MessageSource] = (),
        message_type: MessageType = DICT,
    ) -> None:
        """``open_reader`` makes the reader of a log from an index on, up to an index or None."""
        self.own = {source.journal: OwnSource(source, offsets.get(source.journal, 0), message_type) for source in own}
        self.by_journal: dict[str, ConsumerSource] = {}
        self._wanted: dict[str, ReadFrom] = {}
        """By journal, the source that a log belongs to."""
        self._open_reader = open_reader
        self._partitions: list[int] = []
        """The number of partitions of each of ``sources`` that are read; 0 for a source that cannot grow."""
        self._sources = sources
        self._ready: deque[ConsumerSource | OwnSource] = deque()
        self._empty: list[ConsumerSource] = []
        self._own_empty = list(self.own.values())
        self._looked = self._followed = 0.0
        self.begun: dict[str, int] = {}
        """The positions that are due to ``start=``, not to the offsets or to the first message."""
        for wanted in sources:
            views = views_of(wanted.queue)
            known = any(journal_of(view) in offsets for view in views)
            for view in views:
                begin = offsets.get(journal_of(view))
                if begin is None and wanted.start != "first" and not known:
                    with view.store.core.view() as txn:
                        begin = self.begun[journal_of(view)] = wanted.index(txn, view)
                self._add(wanted, view, begin)
            self._partitions.append(len(views) if wanted.queue.core.parent is None else 0)

    @property
    def grow(self) -> bool:
        """True if partitions may be added to any of the queues."""
        return any(self._partitions)

    @property
    def interests(self) -> list[tuple[Doorbells | None, int]]:
        """Doorbells and masks of the logs, for :func:`cues.storage.wakeup.wait`."""
        return [(source.queue.store.core.doorbells, source.queue.core.log.mask) for source in self.by_journal.values()]

    def stores(self) -> Iterator[BaseStore]:
        """Iterate over the stores of the sources, each once."""
        return iter({id(source.queue.store): source.queue.store for source in self._sources}.values())

    def positions(self) -> Iterator[ConsumerSource | OwnSource]:
        """Iterate over all sources, each with its journal and position."""
        yield from self.by_journal.values()
        yield from self.own.values()

    def replay(self, journal: str, begin: int, end: int) -> ReadUncommitted | OwnReader:
        """Return a reader of a range of a log or another source, which was read before."""
        if journal in self.own:
            return self.own[journal].replay(begin, end)
        queue = self.by_journal[journal].queue
        # A queue with one log may have grown since: its reader needs the handle on the partition.
        return self._open_reader(self._wanted[journal], view_of(queue, queue.core.log.partition), begin, end)

    def next(self) -> Envelope | None:
        """Return the next message of any log; None if all are at their ends."""
        if time.monotonic() - self._looked > _LOOK_S:
            self._look()
        ready = self._ready
        while ready or self._look():
            envelope = ready[0].next()
            if envelope is not None:
                ready.rotate(-1)
                return envelope
            source = ready.popleft()
            self._own_empty.append(source) if isinstance(source, OwnSource) else self._empty.append(source)
        return None

    def ready(self) -> bool:
        """Return whether :meth:`next` may return a message."""
        return bool(self._ready) or self._look()

    def _add(self, wanted: ReadFrom, view: Queue, begin: int | None) -> None:
        row = view.core.row()
        if begin is not None and begin > row.next:
            raise Diverged(
                f"The checkpoint is at {begin} of queue {view.id!r}, but the queue ends at {row.next}:"
                " messages that were processed are missing.",
                "put back a newer copy of the store.",
            )
        if begin is None:
            begin = row.first
        source = ConsumerSource(view, begin, self._open_reader(wanted, view, begin, None))
        self.by_journal[source.journal] = source
        self._wanted[source.journal] = wanted
        self._empty.append(source)

    def _look(self) -> bool:
        """Find the empty logs that have messages now, and new partitions; False if no log has any message."""
        self._looked = time.monotonic()
        self._look_at_empty()
        waiting, self._own_empty = self._own_empty, []
        for own in waiting:
            (self._ready if own.ready() else self._own_empty).append(own)
        if (not self._ready or self._looked - self._followed > GROWTH_S) and self._follow():
            self._look_at_empty()
        return bool(self._ready)

    def _look_at_empty(self) -> None:
        waiting: dict[int, list[ConsumerSource]] = {}
        for source in self._empty:
            source.queue.core.check_open()
            waiting.setdefault(id(source.queue.store), []).append(source)
        self._empty = []
        for sources in waiting.values():
            with sources[0].queue.store.core.view() as txn:
                for source in sources:
                    has_messages = source.queue.core.log.row(txn).next > source.at
                    (self._ready if has_messages else self._empty).append(source)

    def _follow(self) -> bool:
        """Add the partitions that queues have got since; return whether there are any."""
        self._followed = time.monotonic()
        grown = False
        for number, (wanted, known) in enumerate(zip(self._sources, self._partitions)):
            if not known:
                continue
            queue = wanted.queue
            with queue.store.core.view() as txn:
                partitions = queue.core.follow_options(txn, queue.core.log.row(txn)).partitions
            for partition in range(known, partitions):
                self._add(wanted, view_of(queue, partition), None)
                self._partitions[number] = partition + 1
                grown = True
        return grown
