"""One partition of a queue: record batches under growing indices, and the row that counts them.

    row      identity, first index, next index, last append time, options version, checksum
    log      index → record batch (batch.py)

Everything here happens inside a transaction that the caller holds. The next index is read from the
row and never derived from the last key: a log whose messages were all purged continues at its index.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from cues.base import clock, names
from cues.base.texts import quoted
from cues.errors import BatchDamaged, QueueNotFound, StoreDamaged
from cues.producers import clocks
from cues.records import batch, sealed
from cues.records.batch import Batch, Page, checksum
from cues.records.columns import StoredSchema, stored_schema
from cues.records.identity import PRODUCER_BYTES
from cues.records.log_row import ROW, LogRow, unpack_row
from cues.storage import wakeup
from cues.storage.base_store import BaseStore
from cues.storage.datafile import PAGE_BYTES, pages_of
from cues.storage.format_record import require
from cues.storage.transaction import StoreCursor, StoreTransaction

KEY: Final = struct.Struct(">Q")
_PIECE_KEY: Final = struct.Struct(">QI")
_pack_key = KEY.pack
_pack_head = batch.HEAD.pack
_pack_row = ROW.pack
_unpack_row = ROW.unpack_from

READ_BYTES_MAX: Final = 4 << 20
"""A read stops after the batch with which it reaches this size. This bounds memory."""
DELETE_ENTRIES_MAX: Final = 1000
"""The most entries (record batches and their pieces) that one commit deletes, if the first record has not more. All
writers wait for that commit: 0.5 ms. A record of columns has about as many, so records are no measure."""
_HAS_ROWS: Final = batch.COLUMNS | batch.PRODUCER
"""Flags of a record that adds more rows than that of its log."""

Raw = tuple[Any, ...]
"""First index, value and continuation pieces of a record, as copied out of a transaction; of a CommittedLog also the
parts of one, which have further fields."""


class SpanPart(NamedTuple):
    """Messages of one record that a transaction commits."""

    raw: Raw
    low: int
    """The offset of the first of them in the record."""
    size: int
    above: int
    """The largest clock of the transaction before the record."""


def read_row(txn: StoreTransaction, queue: str, partition: int) -> LogRow:
    """Read the row of a log, without opening its records."""
    raw = txn.get(key := names.row_key(queue, partition))
    if raw is None:
        raise _gone(queue)
    return unpack_row(key, raw, names.log_id(queue, partition))


def _gone(queue: str) -> QueueNotFound:
    return QueueNotFound(
        f"The queue {queue!r} is gone from the store.", "list the queues of the store with cues queues.", queue=queue
    )


class Log:
    """A log of one store. Its queue must exist."""

    __slots__ = (
        "_known", "_notes", "_schemas", "_seed", "database", "id", "key", "mask", "partition", "queue", "records",
        "store"
    )  # fmt: skip

    def __init__(self, store: BaseStore, queue: str, partition: int = 0) -> None:
        self.store = store
        self.queue = queue
        self.partition = partition
        self.id = names.log_id(queue, partition)
        self.key = names.row_key(queue, partition)
        self._seed = sealed.seed_of(self.key)
        self.mask = wakeup.mask_of(queue, partition)
        self.database = store.core.database(names.log_database(queue, partition))
        self.records: Log = self
        """The log whose positions are indices; of a :class:`~cues.queues.committed.CommittedLog` another one."""
        self._notes = "." not in queue
        """True if messages with producers are noted: those on a fork queue are copied to another log later."""
        self._schemas: dict[bytes, StoredSchema] = {}
        """The schemas of records of columns that were read here, by their hash."""
        self._known: tuple[bytes, Any] = (b"", ())
        """The row whose checksum was compared last, or that was written here, and its fields. To compare and to decode
        it again would slow appends. One object, because several threads may read the row."""

    def row(self, txn: StoreTransaction) -> LogRow:
        return LogRow(*self._fields(txn))

    def records_row(self, txn: StoreTransaction) -> LogRow:
        """Return the row of the records; :class:`~cues.queues.committed.CommittedLog` has another :meth:`row`."""
        return LogRow(*self._fields(txn))

    def place_of(self, txn: StoreTransaction, index: int) -> int:
        """Return the position of a reader of this log before the record at ``index``."""
        return index

    def index_of(self, txn: StoreTransaction, position: int) -> int:
        """Return the index of the record at the position of a reader of this log."""
        return position

    def needed_from(self, txn: StoreTransaction, position: int) -> int:
        """Return the first index that a reader of this log at ``position`` still needs."""
        return position

    def _fields(self, txn: StoreTransaction) -> Any:
        """Return the fields of the row, after its checksum was compared."""
        raw: bytes | None = txn.get(self.key)
        if raw is None:
            raise _gone(self.queue)
        known, fields = self._known
        if raw != known:
            if not sealed.intact(self.key, raw):
                unpack_row(self.key, raw, self.id)  # raises
            fields = _unpack_row(raw)
            self._known = raw, fields
        return fields

    def append(self, txn: StoreTransaction, pages: Sequence[Page]) -> tuple[int, int]:
        """Append ``pages``; return the index of the first message and the options version.

        The caller rings the doorbells after the commit.
        """
        known, fields = self._known
        if txn.get(self.key) != known:
            fields = self._fields(txn)
        identity, first, start, time_ns, version = fields
        now = clock.now_ns()
        if now < time_ns:
            now = time_ns
        index = start
        flags = 0
        if len(pages) == 1 and not pages[0].pieces:
            page = pages[0]
            flags, count = page.flags, page.count
            rest = _pack_head(batch.VERSION, flags, count, now) + page.tail  # batch.seal(), without the call
            written = txn.put(_pack_key(index), checksum(rest, index) + rest, True, True, True, self.database)
            index += count
        else:
            items: list[tuple[bytes, bytes]] = []
            for page in pages:
                flags |= page.flags
                items.append((_pack_key(index), batch.seal(page, index, now)))
                for number, piece in enumerate(page.pieces, 1):
                    items.append((_PIECE_KEY.pack(index, number), batch.seal_piece(piece, number)))
                index += page.count
            _, added = txn.cursor(self.database).putmulti(items, append=True)
            written = added == len(items)
        if not written:
            raise self._occupied(start)
        if flags & _HAS_ROWS:
            if flags & batch.COLUMNS:
                self.keep_schemas(txn, {page.schema for page in pages if page.schema})
            if flags & batch.PRODUCER and self._notes:
                self._note(txn, first, start, pages)
        body = _pack_row(identity, first, index, now, version)
        raw = body + checksum(body, self._seed)  # sealed.put(), without the call
        txn.put(self.key, raw)
        self._known = raw, (identity, first, index, now, version)
        return start, version

    def keep_schemas(self, txn: StoreTransaction, schemas: Iterable[bytes]) -> None:
        """Write those of these schemas that the log does not have yet; with the first, what the store requires."""
        for packed in schemas:
            key = names.schemas_prefix(self.id) + batch.checksum(packed)
            if txn.get(key) is None:
                require(txn, "columns")
                sealed.put(txn, key, packed)

    def schema(self, hash: bytes) -> StoredSchema:
        """Return the schema of a record of columns. Raises :class:`StoreDamaged` if the log does not have it."""
        known = self._schemas.get(hash)
        if known is None:
            with self.store.core.view() as txn:
                row = txn.get(key := names.schemas_prefix(self.id) + hash)
            what = f"schema {hash.hex()} of the records of columns of queue {self.id}"
            if row is None:
                raise sealed.damaged(what, "it is missing")
            known = self._schemas[hash] = stored_schema(bytes(sealed.unseal(key, row, what)))
        return known

    def _note(self, txn: StoreTransaction, first: int, start: int, pages: Sequence[Page]) -> None:
        """Write the rows about the producers of these pages, and about their transactions.

        ``first`` is the first index of the log, ``start`` that of the pages.
        """
        at = start

        def count(producer: int, begin: int, above: int, clock: int) -> int:
            # Later messages of this append have larger indices, so they are no part of the transaction.
            return sum(part.size for part in self.span(txn, max(begin, first), at, producer, above, clock))

        notes = clocks.Notes(txn, self.id, count)
        for page in pages:
            if page.flags & batch.PRODUCER:
                notes.add(at, page)
            at += page.count
        notes.write()

    def append_plain(self, txn: StoreTransaction, body: bytes) -> tuple[int, int]:
        """Append one message that :func:`batch.plain` encoded: the fast path of :meth:`append`."""
        known, fields = self._known
        if txn.get(self.key) != known:
            fields = self._fields(txn)
        identity, first, index, time_ns, version = fields
        now = clock.now_ns()
        if now < time_ns:
            now = time_ns
        value = batch.seal_plain(body, index, now)
        if not txn.put(_pack_key(index), value, True, True, True, self.database):
            raise self._occupied(index)
        next = index + 1
        body = _pack_row(identity, first, next, now, version)
        raw = body + checksum(body, self._seed)  # sealed.put(), without the call
        txn.put(self.key, raw)
        self._known = raw, (identity, first, next, now, version)
        return index, version

    def _occupied(self, index: int) -> StoreDamaged:
        return StoreDamaged(
            f"The log {self.id} holds records beyond its next index {index}; nothing was written.",
            f"run cues check {quoted(self.store.path)}.",
            path=self.store.path,
        )

    def read(
        self, txn: StoreTransaction, row: LogRow, index: int, count: int, bytes_max: int = READ_BYTES_MAX
    ) -> list[Raw]:
        """Copy out the records that hold the messages ``index`` to ``index + count``, as far as they exist.

        Stops after ``bytes_max``. Verify with :meth:`batches` after the transaction.
        """
        start = row.first if index < row.first else index
        stop = row.next if start + count > row.next else start + count
        raws: list[Raw] = []
        if start >= stop:
            return raws
        cursor = txn.cursor(self.database)
        if not cursor.set_key(KEY.pack(start)) and not self._holds(cursor, start):  # most reads begin with a record
            raise self._missing(cursor, start, row.next)
        size = 0
        unpack = KEY.unpack
        for key, value in cursor.iternext():
            if len(key) == 8:
                first = unpack(key)[0]
                if first >= stop or size >= bytes_max:
                    break
                raws.append((first, value, []))
            else:
                raws[-1][2].append(value)
            size += len(value)
        return raws

    def read_before(self, txn: StoreTransaction, row: LogRow, index: int) -> list[Raw]:
        """Return the record that holds the message before ``index``, if there is one."""
        if not row.first < index <= row.next:
            return []
        return self.read(txn, row, index - 1, 1)

    def _raws_before(self, txn: StoreTransaction, row: LogRow, index: int) -> list[Raw]:
        return self.read(txn, row, index - 1, 1)

    def span(
        self, txn: StoreTransaction, begin: int, end: int, producer: int, above: int, clock: int
    ) -> Iterator[SpanPart]:
        """Iterate over the pending messages of a producer from ``begin`` to ``end``, with clocks up to ``clock``.

        A message with a clock that is not after all before it, and after ``above``, is a repetition and left out.
        """
        cursor = txn.cursor(self.database)
        if begin >= end or not self._seek(cursor, begin):
            return
        highest = above
        name = producer.to_bytes(PRODUCER_BYTES, "big")
        raw: Raw | None = None
        for key, value in itertools.chain(cursor.iternext(), ((KEY.pack(end), b""),)):
            if len(key) != 8:
                if raw is not None:
                    raw[2].append(value)
                continue
            if raw is not None:
                stamps = batch.stamps_of(raw[1])
                low = max(bisect.bisect_right(stamps.clocks, highest), begin - raw[0])
                high = bisect.bisect_right(stamps.clocks, clock)
                if low < high:
                    yield SpanPart(raw, low, high - low, highest)
                highest = max(highest, stamps.clocks[-1])
                raw = None
            first = KEY.unpack(key)[0]
            if first >= end:
                return
            if batch.is_pending(value, name):
                if not batch.intact(value, first):
                    raise self._damage(first, self._following(cursor, end) - 1, "is damaged (its checksum fails)")
                raw = (first, value, [])

    def end_of_messages(self, txn: StoreTransaction, row: LogRow, start: int) -> int:
        """Return the index after the last message, not counting acknowledgements at the end; at least ``start``."""
        end = row.next
        if end <= start:
            return start
        cursor = txn.cursor(self.database)
        while end > start and self._seek(cursor, end - 1):
            key, value = cursor.item()
            if not batch.acknowledges(value):
                return end
            end = KEY.unpack(key[:8])[0]
        return max(start, end)

    def batches(self, raws: Iterable[Raw]) -> list[Batch]:
        """Verify and open the records that :meth:`read` copied out.

        A damaged record, or one after a gap, ends the list; if it is the first, :class:`BatchDamaged` is raised.
        """
        opened: list[Batch] = []
        end = 0
        for raw in raws:
            record = self._verified(raw, bool(opened))
            if record is None or (raw[0] != end and end):
                break
            opened.append(record)
            end = record.next
        return opened

    def _verified(self, raw: Raw, ends: bool) -> Batch | None:
        """Open a record. If it is damaged, return None if that only ``ends`` a list, else raise."""
        first, value, pieces = raw
        intact = batch.intact(value, first) and (
            not pieces or all(batch.intact(piece, number) for number, piece in enumerate(pieces, 1))
        )
        try:
            record = Batch(first, value, pieces) if intact else None
        except StoreDamaged:
            record = None  # it has the right checksum, and a header that no version wrote
        if record is not None and record.is_complete():
            record.damage = self._damage
            if (hash := record.schema_hash) is not None:
                record.schema = self.schema(hash)
            return record
        if ends:
            return None
        raise self.damaged(first)

    def damaged(self, first: int) -> BatchDamaged:
        """Return the error for the record at ``first``."""
        with self.store.core.view() as txn:
            last = self.next_first(txn, first) - 1
        return self._damage(first, last, "is damaged (its checksum fails)")

    def _missing(self, cursor: StoreCursor, index: int, end: int) -> BatchDamaged:
        """Return the error for an index that the row counts but no record holds."""
        last = end - 1
        if cursor.set_range(KEY.pack(index)):
            key = cursor.key()
            last = (KEY.unpack(key)[0] if len(key) == 8 else self._following(cursor, end)) - 1
        return self._damage(index, last, "is missing")

    def _damage(self, first: int, last: int, what: str) -> BatchDamaged:
        last = max(first, last)
        return BatchDamaged(
            f"The record batch of queue {self.id} that holds the messages {first} to {last} {what}.",
            f"continue after it with to_index({last + 1}); cues check names everything that is damaged.",
            path=self.store.path,
            queue=self.id,
            first=first,
            last=last,
        )

    def seal_before(self, txn: StoreTransaction, row: LogRow, index: int) -> bytes:
        """Return the checksum of the batch that holds the message before ``index``; zeros if there is none."""
        try:
            raws = self._raws_before(txn, row, index) if row.first < index <= row.next else []
        except BatchDamaged:  # a tailer must be able to continue after the missing messages
            return bytes(8)
        return raws[0][1][:8] if raws else bytes(8)

    def index_at(self, txn: StoreTransaction, row: LogRow, time_ns: int) -> int:
        """Return the first index whose append time is at or after ``time_ns``; the next index if none is."""
        low, high = row.first, row.next
        cursor = txn.cursor(self.database)
        while low < high:
            middle = (low + high) // 2
            if not self._seek(cursor, middle):
                break
            key, value = cursor.item()
            if batch.HEAD.unpack_from(value, 8)[3] >= time_ns:
                high = max(row.first, KEY.unpack(key[:8])[0])
            else:
                low = max(middle + 1, self._following(cursor, row.next))
        return low

    def time_at(self, txn: StoreTransaction, row: LogRow, index: int) -> int:
        """Return the append time of the message at ``index``, which must exist. Raises :class:`BatchDamaged`."""
        return int(batch.HEAD.unpack_from(self.read(txn, row, index, 1)[0][1], 8)[3])

    def size_bytes(self, txn: StoreTransaction) -> int:
        """Return the bytes of the log's pages on disk."""
        return pages_of(txn.stat(self.database)) * PAGE_BYTES

    def front_time(self, txn: StoreTransaction) -> int:
        """Return the append time of the first record; 0 when there is none."""
        cursor = txn.cursor(self.database)
        return int(batch.HEAD.unpack_from(cursor.value(), 8)[3]) if cursor.first() else 0

    def delete_before(
        self, txn: StoreTransaction, row: LogRow, index: int, most: int = DELETE_ENTRIES_MAX
    ) -> tuple[bool, int]:
        """Delete whole record batches that end before ``index``: at least one, then those within ``most`` entries.

        Returns whether others that end before ``index`` are left, and the first index that is left. The caller writes
        the row.
        """
        cursor = txn.cursor(self.database)
        end = front = KEY.pack(row.next)
        stop = KEY.pack(index)
        going, more = 0, False
        for entries, key in enumerate(itertools.chain(cursor.iternext(values=False), (end,))):
            if len(key) == 8:  # a record begins: those before it end here
                if entries and key > stop:
                    break
                if going and entries > most:
                    more = True
                    break
                front, going = key, entries
                if key >= stop:
                    break
        cursor.first()
        for _ in range(going):  # each deletion moves the cursor to the next record
            cursor.delete()
        return more, KEY.unpack(front)[0]

    def move_front(self, txn: StoreTransaction, row: LogRow, index: int) -> None:
        """Write ``index`` into the row as the first index."""
        if index != row.first:
            row = row._replace(first=index)
            raw = sealed.put(txn, self.key, _pack_row(*row))
            self._known = raw, row

    def _holds(self, cursor: StoreCursor, index: int) -> bool:
        """Move the cursor to the record that holds ``index``; False if no record holds it."""
        if not self._seek(cursor, index):
            return False
        key, value = cursor.item()
        first: int = KEY.unpack(key)[0]
        # A damaged record may have any count. It passes here; its checksum fails later.
        return (
            len(value) < batch.PREFIX_BYTES or first + batch.count_of(value) > index or not batch.intact(value, first)
        )

    def _seek(self, cursor: StoreCursor, index: int) -> bool:
        """Move the cursor to the last record that begins at or before ``index``; False if there is none."""
        key = KEY.pack(index)
        if cursor.set_range(key):
            if cursor.key() == key:
                return True
            if not cursor.prev():
                return False
        elif not cursor.last():
            return False
        last = cursor.key()
        return len(last) == 8 or bool(cursor.set_key(last[:8]))

    def _following(self, cursor: StoreCursor, end: int) -> int:
        """Return the first index of the record after the cursor's, or ``end``. Moves the cursor."""
        while cursor.next():
            key = cursor.key()
            if len(key) == 8:
                return int(KEY.unpack(key)[0])
        return end

    def next_first(self, txn: StoreTransaction, first: int) -> int:
        cursor, end = txn.cursor(self.database), self.row(txn).next
        return self._following(cursor, end) if cursor.set_key(KEY.pack(first)) else first + 1
