"""Places to seek to, and the index of a place in a partition."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from cues.base import names
from cues.errors import InvalidArgument
from cues.groups.sticky import Partition
from cues.queues import claims
from cues.queues.base import index_of
from cues.queues.log import Log
from cues.storage.transaction import StoreTransaction


@dataclass(frozen=True, slots=True)
class Relative:
    """A place for :meth:`Member.seek`: ``by`` messages after the position, or before it if ``by`` is negative."""

    by: int


Place = Literal["start", "end"] | int | datetime | Relative
"""A place that a seek can move to."""


def target(txn: StoreTransaction, group: str, partition: Partition, log: Log, to: Place) -> tuple[bytes, int, bytes]:
    """Find a place in a partition: the identity of its log, the index, and the seal before that index."""
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
