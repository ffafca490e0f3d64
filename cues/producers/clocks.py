"""Rows about the producers of a log: the last clock of each, and its pending messages.

    \\0clock\\0<log>\\0<producer>    last clock, acknowledged clock, index and clock of the first pending message

The row is written in the transaction of the append, so it always agrees with the log. An append of messages
that were stamped elsewhere (a repeated import, an acknowledgement that is sent again) reads the row and leaves
out messages that the log has. The same transaction writes the rows by which readers of committed messages find them
(:mod:`cues.producers.spans`).

Not guaranteed: that rows are deleted. Every producer that ever wrote to the log leaves a row of 80 bytes, so
that a purged message is not accepted again as a new one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from cues.base import names
from cues.producers import spans
from cues.producers.spans import Open, Span
from cues.records import batch, sealed
from cues.records import stamps as stamping
from cues.records.batch import Page
from cues.records.identity import PRODUCER_BYTES, Flags
from cues.storage import transaction
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction

_ROW: Final = struct.Struct(">QQQQ")
_HASH_BYTES: Final = 16
_CONTINUE: Final = int(Flags.CONTINUE_TXN)
_ACK: Final = int(Flags.ACK_TXN)


class Written(NamedTuple):
    """Summary of the messages that one producer wrote to one log."""

    last: int
    """The largest clock."""
    acked: int
    """The clock up to which nothing is pending; before the first acknowledgement, the first clock minus 1."""
    begin: int
    """The index of the first pending message; 0 when there is none."""
    opened: int
    """The clock of that message; 0 when there is none."""

    def pack(self) -> bytes:
        return _ROW.pack(*self)

    @staticmethod
    def unpack(key: bytes, raw: bytes, what: str = "row of a producer") -> Written:
        """Decode the row. Raises :class:`StoreDamaged`; ``what`` is the name of the row in its text."""
        return Written._make(sealed.unseal_fields(key, raw, what, _ROW))

    def repeats(self, clock: int, flags: int, before: int | None) -> bool:
        """Return whether the log has the message already, or does not need it.

        An acknowledgement at or below the last clock is needed while messages are pending: it commits them,
        or says that their producer died. There is one exception. If a log that was cut off inside a transaction
        is appended again, an old acknowledgement comes again, and must not drop messages that are pending since.
        So ``before`` is the largest clock before the acknowledgement in the log that it comes from, None if it
        comes alone. If ``before`` is below the clock of the open span, the acknowledgement is not about that span.
        """
        if clock > self.last:
            return False
        if flags == _ACK and self.begin:
            return before is not None and before < self.opened
        return True


def advanced(written: Written | None, flags: int, clocks: Sequence[int], index: int) -> Written:
    """Return the summary after messages with these flags and clocks were appended from ``index`` on."""
    first, last = clocks[0], clocks[-1]
    if written is None:
        written = Written(0, first - 1, 0, 0)
    highest = max(written.last, last)
    if flags != _CONTINUE:
        return Written(highest, last, 0, 0)
    return Written(highest, written.acked, written.begin or index, written.opened or first)


def read(txn: StoreTransaction, log: str, producer: int) -> Written | None:
    """Return the summary of a producer's messages on a log; None if there are none."""
    raw = txn.get(key := _key(log, producer))
    return None if raw is None else Written.unpack(key, raw, f"row of the producer {producer:012x} of {log}")


Counting = Callable[[int, int, int, int], int]
"""Counts the messages of a producer from an index on, with clocks after the first and up to the second."""


class Notes:
    """Writes the rows about the producers of a log, in the transaction of one append."""

    def __init__(self, txn: StoreTransaction, log: str, count: Counting) -> None:
        self._txn = txn
        self._log = log
        self._count = count
        self._rows: dict[int, Written | None] = {}

    def add(self, index: int, page: Page) -> None:
        """Note a page with stamps that is appended at ``index``. The pages before it must be in the log."""
        at = _HASH_BYTES if page.flags & batch.HASH else 0
        stamps = stamping.decode(page.tail, at, page.count, page.flags)
        for producer, clocks in stamps.by_producer():
            self._add(index, page.count, producer, stamps.flags, clocks)

    def _add(self, index: int, length: int, producer: int, flags: int, clocks: Sequence[int]) -> None:
        """Note messages of one producer in a record of ``length`` messages: all, unless none is a repetition."""
        if producer not in self._rows:
            self._rows[producer] = read(self._txn, self._log, producer)
        before = self._rows[producer]
        self._rows[producer] = after = advanced(before, flags, clocks, index)
        was_open = before is not None and before.begin > 0
        if flags == _CONTINUE:
            open = spans.read_open(self._txn, self._log, producer) if was_open else Open(after.begin, 0, 0)
            # An older Cues did not count them.
            counted = open is not None and open.size >= 0 and (before is None or clocks[0] > before.last)
            open = open or Open(after.begin, 0, -1)
            spans.put_open(
                self._txn, self._log, producer, open._replace(size=open.size + len(clocks) if counted else -1)
            )
            return
        if flags not in (_CONTINUE, _ACK) and before is not None and clocks[-1] <= before.acked:
            self._rows[producer] = before  # repetitions end no transaction
            was_open = False
        if flags == _ACK:
            self._acknowledge(index, producer, before, clocks[0])
        elif before is not None and clocks[0] <= before.acked:
            self._put(Span(0, index, length, 0, before.acked, 0, 0))
        if was_open:
            spans.close(self._txn, self._log, producer)

    def _acknowledge(self, index: int, producer: int, before: Written | None, clock: int) -> None:
        if before is None or not before.begin or clock <= before.acked:
            self._put(Span(0, index, 1, 0, 0, 0, 0))
            return
        open = spans.read_open(self._txn, self._log, producer)
        size = -1 if open is None or clock < before.last else open.size
        if size < 0:
            size = self._count(producer, before.begin, before.acked, clock)
        self._put(Span(0, index, 1, before.begin, before.acked, size, 0))

    def _put(self, span: Span) -> None:
        """Write a row, at the next place of the log."""
        last = spans.upto(self._txn, self._log)
        begins = [open.begin for open in spans.opened(self._txn, self._log).values()]
        low = min([span.record, *begins])
        place = span.record + (last.ahead if last is not None else 0)
        spans.put(self._txn, self._log, span._replace(place=place, low=low))

    def write(self) -> None:
        """Write the summaries of the producers."""
        for producer, written in self._rows.items():
            assert written is not None
            sealed.put(self._txn, _key(self._log, producer), written.pack())


def rows(store: BaseStore, log: str) -> Iterator[tuple[int, Written]]:
    """Iterate over the producers that wrote to a log, with their summaries."""
    with store.core.view() as txn:
        rows = list(transaction.named_rows(txn, names.clocks_prefix(log)))
    for producer, key, raw in rows:
        yield int(producer, 16), Written.unpack(key, raw)


def _key(log: str, producer: int) -> bytes:
    return names.clocks_prefix(log) + producer.to_bytes(PRODUCER_BYTES, "big").hex().encode()
