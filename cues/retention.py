"""What leaves the front of a queue by itself: decided at each append, in its transaction.

1. Each part of the policy says up to where it lets go: what is older, what is more than so many
   messages or bytes, what every known reader has read. The furthest of them counts.
2. A step that was taken and has not committed holds back what it took, whatever the policy.
3. Whole record batches go, at most 1,000 a commit.

Known readers are the processors that ever read the queue, in this store and in others (abroad.py),
its named tailers and the consumer groups. Only the policy "read" waits for them; the others let go of what somebody has
not read yet, and say so, once a reader and process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cues import abroad, claims, clock, names
from cues.events import log as logger
from cues.ownership import readers_of
from cues.tailer import POSITION

if TYPE_CHECKING:
    from cues.log import Log, Row
    from cues.options import Retention
    from cues.store import Store

_PAGE_BYTES = 4096
_said: set[tuple[str, str, str]] = set()


class Reader(NamedTuple):
    """Somebody whose position is in the store."""

    name: str
    next: int
    pending: bool
    """It took messages from there on and has not committed."""


def let_go(txn: Any, log: Log, policy: Retention) -> None:
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


def wanted(txn: Any, log: Log, row: Row, policy: Retention) -> int:
    """The index before which the policy would keep nothing."""
    goal = row.first
    if policy.count is not None:
        goal = max(goal, row.next - policy.count)
    if policy.age is not None:
        assert isinstance(policy.age, (int, float))  # seconds, whatever it was given as
        since = clock.now_ns() - int(policy.age * 1e9)
        if log.front_time(txn) < since:
            goal = max(goal, log.index_at(txn, row, since))
    if policy.bytes is not None:
        found = txn.stat(log.database)
        held = (found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]) * _PAGE_BYTES
        excess = held - int(policy.bytes)
        if excess > 0:
            goal = max(goal, row.first + (row.next - row.first) * excess // held)
    if policy.read:
        known = readers(txn, log)
        if known:
            goal = max(goal, min(reader.next for reader in known))
    return goal


def readers(txn: Any, log: Log) -> list[Reader]:
    """Everybody who has a position on the log in this store, or a mark here for one that lies in another."""
    found = [Reader(*one) for one in readers_of(txn, log.id)]
    found += [Reader(who.processor, mark.next, mark.pending) for who, mark in abroad.marks(txn, log)]
    prefix = names.reader_key(log.queue, log.partition, "")
    store: type[Store] = type(log.store)
    for key, value in store.rows(txn, prefix):
        found.append(Reader(key[len(prefix) :].decode(), POSITION.unpack(value)[1], False))
    found += [Reader(f"group {group}", claim.next, False) for group, claim in claims.of_log(store, txn, log.id)]
    return found


def _say(log: Log, reader: Reader, what: str) -> None:
    said = (log.store.path, log.id, reader.name)
    if said not in _said:
        _said.add(said)
        logger.warning(f"retention of %s {what}", log.id, reader.name)
