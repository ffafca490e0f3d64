"""Rows about the transactions of a log, which give each committed message a place.

A reader of committed messages sees a log as another sequence. A record keeps its place in it; a pending message is
passed over. An acknowledgement has as many places as it commits messages (at least one), and each of these places is
one of its messages, in the order of the log.

    log        1 A pending   2 B pending   3 plain   4 A pending   5 A's acknowledgement   6 plain
    places     1 -           2 -           3 plain   4 -           5 message 1  6 message 4   7 plain

So a place is one number, it grows with every message that is delivered, and the log up to it determines all messages
before it. A position, the range of a step and its hash need nothing else. Without transactions, places are indices.

    \\0span\\0<log>\\0<place>        index, length, begin, above, size, low, checksum: an acknowledgement
    \\0open\\0<log>\\0<producer>     begin, deadline, size, checksum: a transaction that is pending

The rows are written in the transaction of the append. A row "span" also stands for a record of repeated messages, which
has ``length`` messages, of which only those with a clock after ``above`` are delivered.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from cues.base import names
from cues.records import sealed
from cues.records.identity import PRODUCER_BYTES
from cues.storage import transaction
from cues.storage.transaction import StoreTransaction

_SPAN: Final = struct.Struct(">QQQQQQ")
_OPEN: Final = struct.Struct(">QQq")
_PLACE: Final = struct.Struct(">Q")


ROLLED_BACK: Final = -2


class Span(NamedTuple):
    """An acknowledgement, and the messages that it commits."""

    place: int
    """The place of its first message."""
    record: int
    """The index of its record."""
    length: int
    """The number of messages of the record; 1 for an acknowledgement."""
    begin: int
    """The index from which its messages are on; 0 for a record of repeated messages."""
    above: int
    """The clock after which its messages are."""
    size: int
    """The number of messages that it commits."""
    low: int
    """The first index that a reader at :attr:`place` still needs."""

    @property
    def next(self) -> int:
        """The place after it."""
        return self.place + max(self.length, self.size)

    @property
    def ahead(self) -> int:
        """The distance from index to place of the records after it."""
        return self.next - self.record - self.length


class Open(NamedTuple):
    """A transaction of a producer that is pending in a log."""

    begin: int
    """The index of its first message."""
    deadline_ns: int
    """The time after which anyone may roll it back; 0: only its owner may."""
    size: int
    """The number of its messages; -1 if some of them are repeated, so that they must be counted one by one.

    :data:`ROLLED_BACK` if it is not pending any more: the row then fences its producer, until that begins another.
    """


def put(txn: StoreTransaction, log: str, span: Span) -> None:
    sealed.put(txn, names.spans_prefix(log) + _PLACE.pack(span.place), _SPAN.pack(*span[1:]))


def upto(txn: StoreTransaction, log: str, place: int | None = None) -> Span | None:
    """Return the last span at or before ``place``; without it, the last of the log."""
    prefix = names.spans_prefix(log)
    cursor = txn.cursor()
    key = prefix + _PLACE.pack((1 << 64) - 1 if place is None else place)
    if cursor.set_range(key):
        if cursor.key() != key and not cursor.prev():
            return None
    elif not cursor.last():
        return None
    return _decoded(prefix, log, *cursor.item())


def after(txn: StoreTransaction, log: str, place: int) -> Span | None:
    """Return the first span at ``place`` or after it."""
    prefix = names.spans_prefix(log)
    cursor = txn.cursor()
    return _decoded(prefix, log, *cursor.item()) if cursor.set_range(prefix + _PLACE.pack(place)) else None


def _decoded(prefix: bytes, log: str, key: bytes, raw: bytes) -> Span | None:
    if not key.startswith(prefix):
        return None
    (place,) = _PLACE.unpack(key[len(prefix) :])
    return Span(place, *sealed.unseal_fields(key, raw, f"row of the transaction at place {place} of {log}", _SPAN))


def place_of(txn: StoreTransaction, log: str, index: int) -> int:
    """Return the first place of the record at ``index``."""
    last = upto(txn, log)
    if last is not None and last.record > index:
        # The place is at least the index. Find the greatest place whose span is not after the index.
        low, high = index, index + last.ahead
        while low < high:
            middle = (low + high + 1) // 2
            span = upto(txn, log, middle)
            low, high = (middle, high) if span is None or span.record <= index else (low, middle - 1)
        last = upto(txn, log, low)
    if last is None:
        return index
    inside = index - last.record
    return last.place + inside if inside < last.length else index + last.ahead


def index_of(txn: StoreTransaction, log: str, place: int) -> int:
    """Return the index of the record, or of the message of a record, that has a place."""
    span = upto(txn, log, place)
    if span is None:
        return place
    if place >= span.next:
        return place - span.ahead
    return span.record + min(place - span.place, span.length - 1)


def needed_from(txn: StoreTransaction, log: str, place: int) -> int:
    """Return the first index that a reader of committed messages at ``place`` still needs."""
    before = upto(txn, log, place)
    if before is not None and before.place < place < before.next:
        return min(before.low, before.record)
    span = after(txn, log, place)
    low = span.low if span is not None else min([open.begin for open in opened(txn, log).values()], default=0)
    index = index_of(txn, log, place)
    return min(low, index) if low else index


def forget(txn: StoreTransaction, log: str, first: int) -> None:
    """Delete the rows of records before the index ``first``, which were deleted; the last of them stays."""
    prefix = names.spans_prefix(log)
    cursor = txn.cursor()
    if not cursor.set_range(prefix):
        return
    gone: list[bytes] = []
    for key, raw in cursor:
        if not key.startswith(prefix) or _SPAN.unpack_from(raw)[0] >= first:
            break
        gone.append(key)
    for key in gone[:-1]:
        txn.delete(key)


def opened(txn: StoreTransaction, log: str) -> dict[int, Open]:
    """Return the pending transactions of a log, by producer."""
    rows = transaction.named_rows(txn, names.opens_prefix(log))
    every = {int(producer, 16): _open(key, raw, producer, log) for producer, key, raw in rows}
    return {producer: open for producer, open in every.items() if open.size != ROLLED_BACK}


def read_open(txn: StoreTransaction, log: str, producer: int) -> Open | None:
    raw = txn.get(key := _open_key(log, producer))
    return None if raw is None else _open(key, raw, f"{producer:012x}", log)


def put_open(txn: StoreTransaction, log: str, producer: int, open: Open) -> None:
    sealed.put(txn, _open_key(log, producer), _OPEN.pack(*open))


def close(txn: StoreTransaction, log: str, producer: int) -> None:
    txn.delete(_open_key(log, producer))


def expired(txn: StoreTransaction, log: str, now_ns: int) -> Iterator[int]:
    """Iterate over the producers whose pending transaction anyone may roll back."""
    for producer, open in opened(txn, log).items():
        if 0 < open.deadline_ns <= now_ns:
            yield producer


def _open(key: bytes, raw: bytes, producer: str, log: str) -> Open:
    return Open(*sealed.unseal_fields(key, raw, f"row of the pending transaction of {producer} in {log}", _OPEN))


def unpack_span(key: bytes, raw: bytes, name: str) -> tuple[Any, ...]:
    """Decode the row of an acknowledged transaction, without its place. Raises :class:`StoreDamaged`."""
    return sealed.unseal_fields(key, raw, f"row of the acknowledged transaction {name!r}", _SPAN)


def unpack_open(key: bytes, raw: bytes, name: str) -> Open:
    """Decode the row of a pending transaction. Raises :class:`StoreDamaged`."""
    log, _, producer = name.partition("\0")
    return _open(key, raw, producer, log)


def _open_key(log: str, producer: int) -> bytes:
    return names.opens_prefix(log) + producer.to_bytes(PRODUCER_BYTES, "big").hex().encode()
