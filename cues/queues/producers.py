"""Rows about the producers of a log: the last clock of each, and its pending messages.

    \\0clock\\0<log>\\0<producer>    last clock, acknowledged clock, index and clock of the first pending message

The row is written in the transaction of the append, so it always agrees with the log. An append of messages
that were stamped elsewhere (a repeated import, an acknowledgement that is sent again) reads the row and leaves
out messages that the log has. Readers use the messages, not the rows.

Not guaranteed: that rows are deleted. Every producer that ever wrote to the log leaves a row of 80 bytes, so
that a purged message is not accepted again as a new one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from cues.base import names
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
        return sealed.seal(_ROW.pack(*self))

    @staticmethod
    def unpack(raw: bytes, what: str = "row of a producer") -> Written:
        """Decode the row. Raises :class:`StoreDamaged`; ``what`` is the name of the row in its text."""
        return Written._make(_ROW.unpack(sealed.unseal(raw, what)))

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


def advanced(written: Written | None, flags: int, first: int, last: int, index: int) -> Written:
    """Return the summary after messages with these flags and clocks were appended from ``index`` on."""
    if written is None:
        written = Written(0, first - 1, 0, 0)
    highest = max(written.last, last)
    if flags == _CONTINUE:
        return Written(highest, written.acked, written.begin or index, written.opened or first)
    return Written(highest, last, 0, 0)


def read(txn: StoreTransaction, log: str, producer: int) -> Written | None:
    """Return the summary of a producer's messages on a log; None if there are none."""
    raw = txn.get(_key(log, producer))
    return None if raw is None else Written.unpack(raw, f"row of the producer {producer:012x} of {log}")


def note(txn: StoreTransaction, log: str, pages: Iterable[tuple[int, Page]]) -> None:
    """Update the rows for pages with stamps, given with their indices, in the transaction that appends them."""
    summaries: dict[int, Written | None] = {}
    for index, page in pages:
        at = _HASH_BYTES if page.flags & batch.HASH else 0
        stamps = stamping.decode(page.tail, at, page.count, bool(page.flags & batch.CLOCKS))
        producer = stamps.producer
        if producer not in summaries:
            summaries[producer] = read(txn, log, producer)
        clocks = stamps.clocks
        summaries[producer] = advanced(summaries[producer], stamps.flags, clocks[0], clocks[-1], index)
    for producer, written in summaries.items():
        assert written is not None
        txn.put(_key(log, producer), written.pack())


def rows(store: BaseStore, log: str) -> Iterator[tuple[int, Written]]:
    """Iterate over the producers that wrote to a log, with their summaries."""
    with store._view() as txn:
        rows = list(transaction.named_rows(txn, names.clocks_prefix(log)))
    for producer, raw in rows:
        yield int(producer, 16), Written.unpack(raw)


def _key(log: str, producer: int) -> bytes:
    return names.clocks_prefix(log) + producer.to_bytes(PRODUCER_BYTES, "big").hex().encode()
