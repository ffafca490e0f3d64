"""Places to seek to, and the index of a place in a partition."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from cues.base import names
from cues.base.checks import is_count
from cues.errors import InvalidArgument
from cues.groups import claims
from cues.groups.claims import NOBODY, Claim
from cues.groups.sticky import Partition
from cues.queues.base import index_of
from cues.queues.log import Log
from cues.storage.transaction import StoreTransaction


@dataclass(frozen=True, slots=True)
class Relative:
    """A place for :meth:`Member.seek`: ``by`` messages after the position, or before it if ``by`` is negative.

    As the start of a new group, which has no position: after the first message, or before the end.
    """

    by: int

    def __post_init__(self) -> None:
        if not is_count(self.by, least=-(1 << 63)):
            raise InvalidArgument(
                f"Relative({self.by!r}) is not a distance.", "pass an integer, such as Relative(-100)."
            )


Place = Literal["start", "end"] | int | datetime | Relative
"""A place that a seek can move to."""

Start = Literal["earliest", "latest"] | int | datetime | Relative
"""The first position of a group on a queue that it has never read."""

_STARTS: Final[dict[str, Place]] = {"earliest": "start", "latest": "end"}


def check_start(start: Start) -> Start:
    """Return ``start`` if it is one, else raise :class:`InvalidArgument`."""
    aware = isinstance(start, datetime) and start.utcoffset() is not None
    if aware or isinstance(start, Relative) or is_count(start) or (isinstance(start, str) and start in _STARTS):
        return start
    raise InvalidArgument(
        f"start is {start!r}.",
        "pass 'earliest' or 'latest', an index from 1 on, an aware datetime or Relative(-100), or call seek().",
    )


def first(txn: StoreTransaction, group: str, partition: Partition, log: Log, start: Start) -> Claim:
    """Return the first claim of a group on a partition, at ``start``.

    A group without a position has no place to count from: a :class:`Relative` start counts from the end if it is
    negative, otherwise from the first message.
    """
    row = log.row(txn)
    if isinstance(start, Relative):
        position = min(max((row.next if start.by < 0 else row.first) + start.by, row.first), row.next)
        start = log.index_of(txn, position)  # all messages of a committed transaction are read
    to = _STARTS[start] if isinstance(start, str) else start
    identity, position, seal = target(txn, group, partition, log, to)
    return Claim(identity, NOBODY, 0, position, seal, False, "", b"")


def target(txn: StoreTransaction, group: str, partition: Partition, log: Log, to: Place) -> tuple[bytes, int, bytes]:
    """Find a place in a partition: the identity of its log, the position, and the seal before it."""
    row = log.row(txn)
    if isinstance(to, Relative):
        claim = claims.read(txn, names.log_id(*partition), group)
        index = min(max((claim.next if claim else row.first) + to.by, row.first), row.next)
    elif to in ("start", "end") or isinstance(to, (int, datetime)):
        what = f"seek({to!r}) on {names.log_id(*partition)}"
        index = log.place_of(txn, index_of(txn, log.records, log.records_row(txn), to, what))
    else:
        raise InvalidArgument(
            f"seek({to!r}): that is not a place.", "pass 'start', 'end', an index, an aware datetime or Relative(-100)."
        )
    return row.identity, index, log.seal_before(txn, row, index)
