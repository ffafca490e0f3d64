"""Retention: each append deletes messages at the front of a queue, in its transaction.

1. Each limit of the policy (age, count, bytes, read by every known reader) gives the index before which it
   keeps nothing. The highest of these indices counts. With ``unread``, it is not beyond what a known reader needs.
2. Messages that a step took and has not committed are kept, whatever the policy.
3. Whole record batches are deleted, of 1,000 entries in a commit, or of twice as many as the commit appended, so that
   the queue does not grow where each commit appends large tables. A count lets some more messages stay (:func:`spare`):
   deleting one at each append would take twice as long as the append.

Known readers are those of all kinds (readers.py). The limit ``read`` alone, and every policy with ``unread``, waits for
them. The others delete messages that a reader has not read, and log a warning, once for each reader in each process. A
policy that asks for readers first forgets those that have expired: groups that had no member for the time that their
members asked for.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from cues import codec
from cues.base import clock, logs, names
from cues.base.data import dataclass
from cues.base.events import log as logger
from cues.errors import QueueInUse
from cues.producers import spans
from cues.queues import readers as known
from cues.queues.committed import counts_places
from cues.queues.log import DELETE_ENTRIES_MAX, Log
from cues.queues.options import Retention
from cues.records import sealed
from cues.records.log_row import LogRow
from cues.storage.transaction import StoreTransaction

_NOTES = 8
"""The number of notes in the time of one age: a message is deleted at most an eighth of the age too late."""
_SPARE_MAX = 1000
"""The most messages that stay beyond a count."""
_DOUBT_NS = 600 * 10**9
"""The time for which a clock is doubted after a jump."""
said: set[tuple[str, str, str]] = set()
"""The warnings that this process has logged: store, log and reader of each."""


class PositionHolder(NamedTuple):
    """A reader whose position is in the store."""

    name: str
    next: int
    under_way: bool
    """It took messages from ``next`` on and has not committed."""


@dataclass(frozen=True)
class PlannedPurge:
    """The messages that a purge deletes from a queue or from one of its partitions, and who has not read them."""

    log: str
    first: int
    index: int
    """The first message that stays."""
    bytes: int
    """Approximately."""
    behind: list[PositionHolder]
    """The readers whose position is before the index. They lose messages."""
    readers: frozenset[str]
    """The names of all readers."""

    @property
    def count(self) -> int:
        return self.index - self.first

    def lost_to(self, reader: PositionHolder) -> int:
        """The number of messages that a reader loses."""
        return self.index - max(reader.next, self.first)


def planned(txn: StoreTransaction, log: Log, row: LogRow, index: int) -> PlannedPurge:
    """A purge of the messages below an index."""
    index = max(row.first, index)
    size = log.size_bytes(txn) * (index - row.first) // max(1, row.next - row.first)
    holders = readers(txn, log)
    behind = [reader for reader in holders if max(reader.next, row.first) < index]
    return PlannedPurge(log.id, row.first, index, size, behind, frozenset(reader.name for reader in holders))


def refuse_unread(plan: PlannedPurge) -> None:
    """Raise :class:`QueueInUse` if a reader has not read what the purge deletes."""
    if plan.behind:
        readers = ", ".join(
            f"{reader.name} is at {reader.next}" + " and has a step under way" * reader.under_way
            for reader in sorted(plan.behind, key=lambda reader: (reader.next, reader.name))
        )
        raise QueueInUse(
            f"A purge of {plan.log!r} before {plan.index} would delete messages that readers have not read: {readers}.",
            f"purge before {max(plan.first, min(reader.next for reader in plan.behind))}, or wait for these readers.",
            queue=plan.log,
        )


def let_go(txn: StoreTransaction, log: Log, policy: Retention, appended: int) -> bool:
    """Delete the messages that the policy does not keep, after ``appended`` entries were appended.

    Returns whether more of them are left.
    """
    row = log.row(txn)
    goal = wanted(txn, log, row, policy)
    if goal <= row.first:
        return False
    behind = [reader for reader in readers(txn, log) if reader.next < goal]
    for reader in behind:
        if reader.under_way:
            _say(log, reader.name, "waits for a step of %s, which has not committed")
            goal = min(goal, reader.next)
    for reader in behind:  # not with the policy "read" alone, which stops at the slowest reader
        at = max(reader.next, row.first)
        if not reader.under_way and at < goal:
            where = f"it is at {at}, and the policy keeps those from {goal} on"
            _say(log, reader.name, f"deletes messages that %s has not read: {where}")
    if goal <= row.first:
        return False
    more, front = log.delete_before(txn, row, goal, max(DELETE_ENTRIES_MAX, 2 * appended))
    log.move_front(txn, row, max(front, row.first))
    spans.forget(txn, log.id, front)
    return more


def wanted(txn: StoreTransaction, log: Log, row: LogRow, policy: Retention) -> int:
    """Return the index before which the policy keeps nothing."""
    goal = row.first
    if policy.count is not None and row.next - row.first > policy.count + spare(policy.count):
        goal = max(goal, row.next - policy.count)
    if policy.age is not None:
        goal = max(goal, _aged(txn, log, row, clock.now_ns(), policy.age_ns))
    if policy.bytes is not None:
        held = log.size_bytes(txn)
        excess = held - int(policy.bytes)
        if excess > 0:
            goal = max(goal, row.first + (row.next - row.first) * excess // held)
    if policy.read or (policy.unread and goal > row.first):
        _forget_expired(txn, log)
        read = min((reader.next for reader in readers(txn, log)), default=None)
        if log.partition and _is_awaited(txn, log):
            read = row.first
        if read is not None and policy.read:
            goal = max(goal, read)
        if read is not None and policy.unread:
            goal = min(goal, read)
    return goal


def _is_awaited(txn: StoreTransaction, log: Log) -> bool:
    """Return whether a reader of the first partition has no position on this one: the queue grew after its last run.

    Named tailers do not count, because one may be of a single partition.
    """

    def names_of(log: Log) -> set[str]:
        found = (reader for reader in known.of_log(txn, log) if reader.kind is not known.TAILERS)
        return {reader.name.partition("/")[0] for reader in found}

    first = Log(log.store, log.queue, 0)
    return bool(names_of(first) - names_of(log))


def spare(count: int) -> int:
    """Return how many messages more than ``count`` may stay, so that several are deleted in one go."""
    return min(count // 64, _SPARE_MAX)


def _forget_expired(txn: StoreTransaction, log: Log) -> None:
    for reader in list(known.of_log(txn, log)):
        if reader.kind.expired(txn, log.store, reader):
            reader.kind.forget(txn, log, reader)


def unpack_notes(key: bytes, raw: bytes, log: str) -> list[list[int]]:
    """Decode the notes for retention by age: a next index, and a time. Raises :class:`StoreDamaged`."""
    notes: list[list[int]] = sealed.unseal_value(key, raw, f"row of the age notes of queue {log}", [[int, int], ...])
    return notes


def _aged(txn: StoreTransaction, log: Log, row: LogRow, now: int, age: int) -> int:
    """Return the index before which everything is older than ``age``, as far as the clock can be believed.

    Append times never decrease. So after one append under a clock that was ahead, later messages get that same time
    until the clock reaches it. Meanwhile, notes of (next index, time) tell which messages were appended before a time.
    """
    raw = txn.get(key := names.age_key(log.id))
    notes = [] if raw is None else unpack_notes(key, raw, log.id)
    ahead = row.time_ns > now + clock.WRONG_NS
    kept = [note for note in notes if ahead and note[1] <= now]
    if ahead and (not kept or now - kept[-1][1] >= age // _NOTES):
        kept.append([row.next, now])
    goal = row.first
    while kept and kept[0][1] <= now - age:
        goal = kept.pop(0)[0]
    if kept and kept != notes:
        sealed.put(txn, key, codec.pack(kept))
    elif kept != notes:
        txn.delete(key)
    if log.front_time(txn) < now - age:
        goal = max(goal, log.index_at(txn, row, _believed(txn, log, row, now, age)))
    return goal


def _believed(txn: StoreTransaction, log: Log, row: LogRow, now: int, age: int) -> int:
    """Return the time before which messages are older than ``age``.

    If the clock jumped by :data:`clock.WRONG_NS` between two messages, it may be wrong, and would empty the queue at
    once. So for :data:`_DOUBT_NS` after the jump, the time of the message before it is used instead of the clock.
    """
    index = log.index_at(txn, row, now - age)
    if index > row.first and index < row.next:
        before, after = (log.time_at(txn, row, at) for at in (index - 1, index))
        if after - before >= clock.WRONG_NS and now - after < _DOUBT_NS:
            return before - age
    return now - age


def readers(txn: StoreTransaction, log: Log) -> list[PositionHolder]:
    """Return the readers with a position on the log in this store, or in another store, with a mark here."""
    return [
        PositionHolder(one.name, needed_from(txn, log, one.identity, one.next), one.under_way)
        for one in known.of_log(txn, log)
    ]


def needed_from(txn: StoreTransaction, log: Log, identity: bytes, position: int) -> int:
    """Return the first index that the reader at a position still needs.

    A reader of committed messages needs the messages of transactions that were pending when it passed them.
    """
    return spans.needed_from(txn, log.id, position) if counts_places(txn, log, identity) else position


def _say(log: Log, reader: str, what: str) -> None:
    warning = (log.store.path, log.id, reader)
    if warning not in said:
        said.add(warning)
        log.store.core.afterwards.append(
            partial(logger.warning, f"retention of %s {what}", log.id, reader, **logs.of_log(log.id))
        )
