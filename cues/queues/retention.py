"""Retention: messages that leave the front of a queue by themselves, decided at each append, in its transaction.

1. Each part of the policy says up to where it lets go: what is older, what is more than so many
   messages or bytes, what every known reader has read. The furthest of them counts.
2. A step that was taken and has not committed holds back what it took, whatever the policy.
3. Whole record batches go, at most 1,000 a commit.

Known readers are the processors that ever read the queue, in this store and in others (forwarding/low_water.py),
its named tailers and the consumer groups. Only the policy "read" waits for them; the others let go of what somebody has
not read yet, and say so, once a reader and process.
"""

from __future__ import annotations

from typing import NamedTuple

from cues import codec
from cues.base import clock, names
from cues.base.events import log as logger
from cues.queues import claims, marks
from cues.queues.log import Log
from cues.queues.options import Retention
from cues.queues.processor_rows import POSITION, readers_of
from cues.records import sealed
from cues.records.log_row import LogRow
from cues.storage.transaction import StoreTransaction, named_rows

_NOTES = 8
"""Notes in the time of one age: what goes late is late by an eighth of it."""
_WRONG_NS = 7 * 86_400 * 10**9
"""A clock that goes on by so much from one message to the next is doubted, and so is a last append that is so far
ahead of the clock."""
_DOUBT_NS = 600 * 10**9
"""How long a clock is doubted that went on."""
_said: set[tuple[str, str, str]] = set()


class PositionHolder(NamedTuple):
    """A reader whose position is in the store."""

    name: str
    next: int
    pending: bool
    """It took messages from there on and has not committed."""


def let_go(txn: StoreTransaction, log: Log, policy: Retention) -> None:
    """Delete what the policy lets go."""
    row = log.row(txn)
    goal = wanted(txn, log, row, policy)
    if goal <= row.first:
        return
    for reader in readers(txn, log):
        if reader.next >= goal:
            continue
        if reader.pending:
            _say(log, reader, "waits for a step of %s, which has not committed")
            goal = reader.next
        else:  # never by the policy "read" alone, which goes as far as the slowest
            _say(log, reader, "lets go of messages that %s has not read")
    if goal > row.first:
        _, front = log.delete_before(txn, row, goal)
        log.move_front(txn, row, max(front, row.first))


def wanted(txn: StoreTransaction, log: Log, row: LogRow, policy: Retention) -> int:
    """The index before which the policy would keep nothing."""
    goal = row.first
    if policy.count is not None:
        goal = max(goal, row.next - policy.count)
    if policy.age is not None:
        assert isinstance(policy.age, (int, float))  # seconds, whatever it was given as
        goal = max(goal, _aged(txn, log, row, clock.now_ns(), int(policy.age * 1e9)))
    if policy.bytes is not None:
        held = log.size_bytes(txn)
        excess = held - int(policy.bytes)
        if excess > 0:
            goal = max(goal, row.first + (row.next - row.first) * excess // held)
    if policy.read:
        known = readers(txn, log)
        if known:
            goal = max(goal, min(reader.next for reader in known))
    return goal


def _aged(txn: StoreTransaction, log: Log, row: LogRow, now: int, age: int) -> int:
    """The index before which everything is older than ``age``, as far as the clock can be believed.

    Append times never go back, so one append by a clock that was ahead gives its time to all after it, until the
    clock gets there. Meanwhile what was appended before a moment of the clock is told by notes of (next index, time).
    """
    notes = _notes(txn, log)
    kept = [note for note in notes if row.time_ns > now + _WRONG_NS and note[1] <= now]
    if row.time_ns > now + _WRONG_NS and (not kept or now - kept[-1][1] >= age // _NOTES):
        kept.append((row.next, now))
    goal = row.first
    while kept and kept[0][1] <= now - age:
        goal = kept.pop(0)[0]
    if kept and kept != notes:
        txn.put(names.age_key(log.id), sealed.seal(codec.pack([list(note) for note in kept])))
    elif kept != notes:
        txn.delete(names.age_key(log.id))
    if log.front_time(txn) < now - age:
        goal = max(goal, log.index_at(txn, row, _believed(txn, log, row, now, age)))
    return goal


def _believed(txn: StoreTransaction, log: Log, row: LogRow, now: int, age: int) -> int:
    """The time before which messages are older than ``age``.

    Where the clock went on by :data:`_WRONG_NS` from one message to the next, it may be wrong, and would empty the
    queue at once: for :data:`_DOUBT_NS` from then on it counts as the time of the message before.
    """
    index = log.index_at(txn, row, now - age)
    if index > row.first and index < row.next:
        before, behind = (log.time_at(txn, row, at) for at in (index - 1, index))
        if behind - before >= _WRONG_NS and now - behind < _DOUBT_NS:
            return before - age
    return now - age


def _notes(txn: StoreTransaction, log: Log) -> list[tuple[int, int]]:
    raw = txn.get(names.age_key(log.id))
    if raw is None:
        return []
    return [(index, at) for index, at in codec.unpack(sealed.unseal(raw, f"row of the age notes of queue {log.id}"))]


def readers(txn: StoreTransaction, log: Log) -> list[PositionHolder]:
    """Iterate over the readers that have a position on the log in this store, or a mark of one in another store."""
    holders = [PositionHolder(*reader) for reader in readers_of(txn, log.id)]
    holders += [PositionHolder(who.processor, mark.next, mark.pending) for who, mark in marks.of_log(txn, log)]
    tailers = named_rows(txn, names.reader_key(log.queue, log.partition, ""))
    holders += [PositionHolder(name, POSITION.unpack(value)[1], False) for name, value in tailers]
    holders += [PositionHolder(f"group {group}", claim.next, False) for group, claim in claims.of_log(txn, log.id)]
    return holders


def _say(log: Log, reader: PositionHolder, what: str) -> None:
    said = (log.store.path, log.id, reader.name)
    if said not in _said:
        _said.add(said)
        log.store._afterwards(lambda: logger.warning(f"retention of %s {what}", log.id, reader.name))
