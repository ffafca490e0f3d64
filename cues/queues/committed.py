"""A log as readers of committed messages see it: ``isolation="committed"``.

    queue.tailer("billing", isolation="committed")

:class:`CommittedLog` is a :class:`Log` whose indices are *places* (:mod:`cues.producers.spans`). All that reads a log
by positions and ranges reads it in the same way: tailers, inputs of graphs, members of groups, Spark. A read returns

    a message outside of transactions    at its place
    an acknowledgement                   as the messages of its transaction, in the order of the log
    a pending message                    as one that is passed over; so is a repetition, and an empty acknowledgement

So messages are returned in the order of the commits, producers do not wait for each other, and the messages before a
place are always the same. A transaction is read again at its acknowledgement, whatever its size, a part at a time.

Not guaranteed: messages of a transaction that were purged before its acknowledgement was read. They are passed over,
with a warning. Retention keeps them (:func:`cues.producers.spans.needed_from`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, cast, get_args

import xxhash

from cues.base import logs
from cues.errors import InvalidArgument, StoreDamaged
from cues.overrides import override
from cues.producers import spans
from cues.producers.spans import Span
from cues.queues.log import KEY, READ_BYTES_MAX, Log, Raw
from cues.records import batch
from cues.records.batch import Batch, Shown
from cues.records.log_row import LogRow
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction

_AT_LEAST: Final = 256
"""The least number of messages of a read: one read transaction passes over so many pending messages."""

Isolation = Literal["uncommitted", "committed"]
ISOLATIONS: Final = get_args(Isolation)

_log = logs.logger("cues.txn")


class _Placed(NamedTuple):
    """Messages of a record, with their place; the first three fields are those of a :data:`Raw`."""

    place: int
    value: bytes
    pieces: list[bytes]
    record: int
    low: int
    size: int
    hidden: bool
    seal: bytes
    time_ns: int


class _Resume(NamedTuple):
    """A point inside a transaction, so that the next read does not begin at its first message again."""

    place: int
    """The place of the first message of the record at :attr:`record`."""
    record: int
    above: int


def check_isolation(isolation: object) -> None:
    """Raise :class:`InvalidArgument` unless ``isolation`` is one."""
    if isolation not in ISOLATIONS:
        raise InvalidArgument(f"isolation={isolation!r}.", "pass 'uncommitted' or 'committed'.")


def identity_of(identity: bytes) -> bytes:
    """Return the identity of a queue in the positions of its committed readers, whose places are not indices."""
    return xxhash.xxh3_64_digest(identity + b"committed")


def differ(one: bytes, other: bytes) -> bool:
    """Return whether two identities of positions are of the same queue, under different isolations."""
    return identity_of(one) == other or identity_of(other) == one


def counts_places(txn: StoreTransaction, log: Log, identity: bytes) -> bool:
    """Return whether a position with this identity counts places of the log, and not indices."""
    return identity == identity_of(log.records_row(txn).identity)


def log_at(log: Log, identity: bytes) -> Log:
    """Return the log in which a position with this identity counts: ``log``, or its committed messages."""
    with log.store.core.view() as txn:
        places = counts_places(txn, log, identity)
    return CommittedLog(log.store, log.queue, log.partition) if places else log


class CommittedLog(Log):
    """A log whose indices are places: for readers."""

    __slots__ = ("_began", "_resume")

    def __init__(self, store: BaseStore, queue: str, partition: int = 0) -> None:
        super().__init__(store, queue, partition)
        self.records = Log(store, queue, partition)
        self._resume = _Resume(0, 0, 0)
        self._began = (1, 1)
        """The last known first index, and its place."""

    # --- places and indices ---

    @override
    def row(self, txn: StoreTransaction) -> LogRow:
        row = super().row(txn)
        last = spans.upto(txn, self.id)
        if row.first != self._began[0]:
            self._began = row.first, spans.place_of(txn, self.id, row.first)
        next = row.next if last is None else row.next + last.ahead
        return row._replace(identity=identity_of(row.identity), first=self._began[1], next=next)

    @override
    def place_of(self, txn: StoreTransaction, index: int) -> int:
        return spans.place_of(txn, self.id, index)

    @override
    def index_of(self, txn: StoreTransaction, place: int) -> int:
        return spans.index_of(txn, self.id, place)

    @override
    def needed_from(self, txn: StoreTransaction, position: int) -> int:
        return spans.needed_from(txn, self.id, position)

    @override
    def index_at(self, txn: StoreTransaction, row: LogRow, time_ns: int) -> int:
        place = self.place_of(txn, super().index_at(txn, self.records_row(txn), time_ns))
        return min(max(row.first, place), row.next)

    @override
    def time_at(self, txn: StoreTransaction, row: LogRow, index: int) -> int:
        return super().time_at(txn, self.records_row(txn), self.index_of(txn, index))

    @override
    def seal_before(self, txn: StoreTransaction, row: LogRow, index: int) -> bytes:
        records = self.records_row(txn)
        before = self.index_of(txn, index - 1) if index > 1 else 0
        return super().seal_before(txn, records, before + 1)

    @override
    def _raws_before(self, txn: StoreTransaction, row: LogRow, index: int) -> list[Raw]:
        return super().read(txn, row, index - 1, 1)

    @override
    def end_of_messages(self, txn: StoreTransaction, row: LogRow, start: int) -> int:
        """Return the place after the last committed message; at least ``start``."""
        cursor = txn.cursor(self.database)
        index, end = self.records_row(txn).next, row.next
        while end > start and self._seek(cursor, index - 1):
            key, value = cursor.item()
            first = KEY.unpack(key[:8])[0]
            if batch.acknowledges(value):
                span = spans.upto(txn, self.id, end - 1)
                if span is None or span.size:
                    return end
                end = span.place
            elif batch.is_pending(value):
                end -= index - first
            else:
                return end
            index = first
        return max(start, end)

    # --- reading ---

    @override
    def read(
        self, txn: StoreTransaction, row: LogRow, index: int, count: int, bytes_max: int = READ_BYTES_MAX
    ) -> list[Raw]:
        """Copy out the records of the places from ``index`` on; more than ``count`` if it is small."""
        place = max(index, row.first)
        stop = min(place + max(count, _AT_LEAST), row.next)
        physical = self.records_row(txn)
        raws: list[Raw] = []
        size = 0
        while place < stop and size < bytes_max:
            span = spans.upto(txn, self.id, place)
            if span is not None and place < span.next:
                got = self._of_span(txn, physical, span, place, bytes_max - size)
                raws += got
                place = got[-1].place + got[-1].size
                size += sum(len(each.value) for each in got)
                continue
            ahead = span.ahead if span is not None else 0
            following = spans.after(txn, self.id, place)
            limit = physical.next if following is None else following.record
            start = place - ahead
            read = super().read(txn, physical, start, min(stop - place, limit - start), bytes_max - size)
            if not read:  # never, unless rows are missing
                break
            for raw in read:
                raws.append(self._record(raw, ahead))
                place = raw[0] + ahead + (batch.count_of(raw[1]) if len(raw[1]) >= batch.PREFIX_BYTES else 1)
                size += len(raw[1])
        return raws

    def _record(self, raw: Raw, ahead: int) -> Raw:
        """Return a record that is not an acknowledgement, at its place."""
        first, value, pieces = raw
        if batch.acknowledges(value):
            raise StoreDamaged(
                f"The acknowledgement at {first} of queue {self.id} has no row that names its messages: an earlier Cues"
                " wrote it.",
                "read the queue with cues.txn.ReadCommitted, or export it and import it again.",
                path=self.store.path,
            )
        hidden = batch.is_pending(value)
        if not ahead and not hidden:
            return raw
        head = batch.HEAD.unpack_from(value, 8) if len(value) >= batch.PREFIX_BYTES else (0, 0, 1, 0)
        return _Placed(first + ahead, value, pieces, first, 0, head[2], hidden, value[:8], head[3])

    def _of_span(self, txn: StoreTransaction, row: LogRow, span: Span, place: int, bytes_max: int) -> list[_Placed]:
        """Return the messages at the places of a span, from ``place`` on; at least one."""
        raw = super().read(txn, row, span.record, 1)[0]
        value = raw[1]
        if not batch.intact(value, raw[0]):
            raise self.damaged(raw[0])
        seal, time_ns = value[:8], batch.HEAD.unpack_from(value, 8)[3]
        stamps = batch.stamps_of(value)
        placed: list[_Placed] = []

        def pass_over(count: int) -> None:
            placed.append(_Placed(place, value, raw[2], raw[0], 0, count, True, seal, time_ns))

        if not batch.acknowledges(value):  # a record of which the first messages are repetitions
            low = place - span.place
            shown = bisect.bisect_right(stamps.clocks, span.above)
            if low < shown:
                pass_over(shown - low)
            if shown < span.length:
                low = max(low, shown)
                placed.append(
                    _Placed(span.place + low, value, raw[2], raw[0], low, span.length - low, False, seal, time_ns)
                )
            return placed
        if not span.size:
            pass_over(1)
            return placed
        resume = self._resume
        if not (span.place < resume.place <= place and span.begin <= resume.record < span.record):
            resume = _Resume(span.place, span.begin, span.above)
        if resume.record < row.first:
            left = sum(
                each.size
                for each in self.span(txn, row.first, span.record, stamps.producer, span.above, stamps.clocks[0])
            )
            resume = _Resume(span.next - left, row.first, span.above)
            if place < resume.place:
                self._warn(span, row.first, resume.place - place)
                pass_over(resume.place - place)
                place = resume.place
        at, size = resume.place, 0
        for (index, found, pieces), low, count, above in self.span(
            txn, resume.record, span.record, stamps.producer, resume.above, stamps.clocks[0]
        ):
            if size >= bytes_max:
                self._resume = _Resume(at, index, above)
                break
            if at + count > place:
                placed.append(_Placed(at, found, pieces, index, low, count, False, seal, time_ns))
                size += len(found)
            at += count
        else:
            if at < span.next:  # never, unless the log was damaged
                place = max(at, place)
                pass_over(span.next - place)
        return placed

    def _warn(self, span: Span, first: int, lost: int) -> None:
        _log.warning(
            "%s: %d messages of the transaction that is acknowledged at %d were purged before it was read (they were in"
            " %d to %d); they are passed over",
            self.id, lost, span.record, span.begin, first - 1, **logs.of_log(self.id), index=span.record,
        )  # fmt: skip

    @override
    def batches(self, raws: Iterable[Raw]) -> list[Batch]:
        opened: list[Batch] = []
        for raw in raws:
            record: Batch | None
            if len(raw) == 3:
                record = self._verified(raw, bool(opened))
                if record is None:
                    break
                opened.append(record)
                continue
            each = cast(_Placed, raw)
            known = opened[-1].source[0] if opened else None
            if known is not None and known.first == each.record and known.value is each.value:
                record = known
            else:
                record = self._verified((each.record, each.value, each.pieces), bool(opened))
            if record is None:
                break
            opened.append(Shown(record, each.low, each.size, each.place, each.hidden, each.seal, each.time_ns))
        return opened
