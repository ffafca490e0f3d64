"""What a log knows of the producers that wrote to it: for each its last clock, and what it has pending.

    \\0clock\\0<log>\\0<producer>    last clock, acknowledged clock, where and with which clock the open span begins

The row is written in the transaction of the append, so it says what is there and nothing else. Who appends
messages that were stamped elsewhere (an import that is repeated, an acknowledgement that is sent again)
looks here and leaves out what the log has. Readers do not: they go by the messages.

Not guaranteed: that rows go away. One of 80 bytes is left by every producer that ever wrote to the log; what
is purged from the log may not come back as new.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cues import batch, names
from cues.batch import Page
from cues.txn import stamps as stamping
from cues.txn.identity import PRODUCER_BYTES, Flags

if TYPE_CHECKING:
    from cues.store import Store

_ROW: Final = struct.Struct(">QQQQ")
_CHECKSUM_BYTES: Final = 8
ROW_BYTES: Final = _ROW.size + _CHECKSUM_BYTES
_HASH_BYTES: Final = 16
_CONTINUE: Final = int(Flags.CONTINUE_TXN)
_ACK: Final = int(Flags.ACK_TXN)


class Written(NamedTuple):
    """What one producer wrote to one log."""

    last: int
    """The largest clock."""
    acked: int
    """The clock up to which nothing is pending; one below the first clock while nothing was acknowledged."""
    begin: int
    """The index of the first pending message; 0 when none is."""
    opened: int
    """The clock of that message; 0 when there is none."""

    def pack(self) -> bytes:
        raw = _ROW.pack(*self)
        return raw + batch.checksum(raw)

    @staticmethod
    def unpack(raw: bytes) -> Written:
        return Written._make(_ROW.unpack_from(raw))

    def repeats(self, clock: int, flags: int, before: int | None = None) -> bool:
        """Whether the log has that message already, or does not need it.

        An acknowledgement at or below the last clock is needed while something is pending: it commits that,
        or says that its producer died. But where a log is appended once more that was cut off in a
        transaction, an old acknowledgement comes again and must not drop what is pending since. So
        ``before`` is the largest clock that stood before it in the log that it comes from, None where it
        stands alone: one that did not reach the open span is not about it.
        """
        if clock > self.last:
            return False
        if flags == _ACK and self.begin:
            return before is not None and before < self.opened
        return True


def advanced(written: Written | None, flags: int, first: int, last: int, index: int) -> Written:
    """What a producer has written when messages with these flags and clocks stand at ``index`` and behind it."""
    if written is None:
        written = Written(0, first - 1, 0, 0)
    highest = max(written.last, last)
    if flags == _CONTINUE:
        return Written(highest, written.acked, written.begin or index, written.opened or first)
    return Written(highest, last, 0, 0)


def read(txn: Any, log: str, producer: int) -> Written | None:
    """What a producer wrote to a log; None when nothing."""
    raw = txn.get(_key(log, producer))
    return None if raw is None else Written.unpack(raw)


def note(txn: Any, log: str, pages: Iterable[tuple[int, Page]]) -> None:
    """Take notice of pages with stamps, given with their indices, in the transaction that appends them."""
    found: dict[int, Written | None] = {}
    for index, page in pages:
        at = _HASH_BYTES if page.flags & batch.HASH else 0
        stamps = stamping.decode(page.tail, at, page.count, bool(page.flags & batch.CLOCKS))
        producer = stamps.producer
        if producer not in found:
            found[producer] = read(txn, log, producer)
        clocks = stamps.clocks
        found[producer] = advanced(found[producer], stamps.flags, clocks[0], clocks[-1], index)
    for producer, written in found.items():
        assert written is not None
        txn.put(_key(log, producer), written.pack())


def rows(store: Store, log: str) -> Iterator[tuple[int, Written]]:
    """Every producer that wrote to a log."""
    prefix = names.clocks_prefix(log)
    with store.view() as txn:
        found = list(store.rows(txn, prefix))
    for key, raw in found:
        yield int(key[len(prefix) :], 16), Written.unpack(raw)


def intact(raw: bytes) -> bool:
    """Whether a row has the checksum that it was written with."""
    return len(raw) == ROW_BYTES and batch.checksum(raw[:-_CHECKSUM_BYTES]) == raw[-_CHECKSUM_BYTES:]


def _key(log: str, producer: int) -> bytes:
    return names.clocks_prefix(log) + producer.to_bytes(PRODUCER_BYTES, "big").hex().encode()
