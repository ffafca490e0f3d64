"""Look at consumers and open transactions from outside, and remove a consumer that does not come back.

    list_consumers(store)       consumers that read queues of the store: process, positions, lag
    list_transactions(store)    pending transactions: whose, since when, on which queue, how many messages
    forget(store, "totals")     delete a consumer's notes, and drop what it left pending in the store

The first two only read: they raise no fence and take no lock, and a store that is open read-only will do.
"""

from __future__ import annotations

from datetime import datetime

from cues.base import clock, names
from cues.base.checks import nearest
from cues.base.data import dataclass
from cues.errors import AlreadyRunning, InvalidArgument
from cues.forwarding import marks
from cues.queues.log import Log
from cues.queues.store import Store
from cues.storage import locks, transaction
from cues.storage.transaction import StoreTransaction
from cues.txn import consumer_rows
from cues.txn.consumer_rows import ConsumerRow
from cues.txn.registration import drop_pending


@dataclass(frozen=True)
class ConsumerSourceMetrics:
    """The position of a consumer on one log of the store."""

    log: str
    position: int
    """The index that is read next, at the last note: about a second ago while the consumer runs."""
    lag: int


@dataclass(frozen=True)
class ConsumerMetrics:
    consumer: str
    checkpoint: str
    """The place of its checkpoint."""
    pid: int | None
    """The process that runs it; None if none does."""
    state: str
    """The state of that process; empty if there is none."""
    fence: int
    sources: tuple[ConsumerSourceMetrics, ...]
    noted: datetime
    """The time at which the positions were written."""

    @property
    def lag(self) -> int:
        return sum(source.lag for source in self.sources)


@dataclass(frozen=True)
class TransactionMetrics:
    """A transaction that is pending in one log of the store."""

    log: str
    publisher: str
    """The producer id, in hex."""
    owner: str
    """The consumer ("consumer totals") or the name of the publisher; empty if it is not known."""
    pid: int | None
    """The process of the publisher; None if it has ended, or is not known."""
    state: str
    first: int
    """The index of its first message."""
    messages: int | None
    """The number of its pending messages; None if some are repetitions."""
    since: datetime
    """The time at which its first message was appended."""
    deadline: datetime | None
    """The time after which anyone may roll it back; None if a checkpoint decides, or it has no timeout."""


def list_consumers(store: Store) -> list[ConsumerMetrics]:
    """Return the consumers that the store knows as readers of its queues, by name."""
    with store.core.view() as txn:
        rows = consumer_rows.consumers(txn)
    found = [_consumer(store, id, row) for id, row in rows.items()]
    return sorted(found, key=lambda consumer: (consumer.consumer, consumer.checkpoint))


def list_transactions(store: Store) -> list[TransactionMetrics]:
    """Return the transactions that are pending in the store, by log and time."""
    with store.core.view() as txn:
        opened = list(consumer_rows.pending(txn))
        owners = consumer_rows.publishers(txn)
    found = []
    for id, producer, open in opened:
        log = Log(store, *names.split_log(id))
        with store.core.view() as txn:
            row = log.row(txn)
            since_ns = log.time_at(txn, row, open.begin) if row.first <= open.begin < row.next else row.time_ns
        pid = consumer_rows.holder(store, consumer_rows.publisher_lock(producer))
        found.append(
            TransactionMetrics(
                id,
                f"{producer:012x}",
                owners[producer].name if producer in owners else "",
                pid,
                locks.process_state(pid) if pid else "",
                open.begin,
                open.size if open.size >= 0 else None,
                clock.to_datetime(since_ns),
                clock.to_datetime(open.deadline_ns) if open.deadline_ns else None,
            )
        )
    return sorted(found, key=lambda pending: (pending.log, pending.since, pending.publisher))


def forget(store: Store, consumer: str) -> int:
    """Delete the notes of a consumer in this store, so that retention does not wait for it; return what was dropped.

    ``consumer`` is its name, or the place of its checkpoint if two have one name. Its messages that are pending in this
    store are dropped too, also those that its checkpoint has decided to commit: the result is the number of
    transactions. If the consumer starts again, the store knows it again. Raises :class:`AlreadyRunning` while it runs,
    and :class:`InvalidArgument` if the store does not know it.
    """
    with store.core.view() as txn:
        rows = consumer_rows.consumers(txn)
    ids = [id for id, row in rows.items() if consumer in (row.name, row.checkpoint)]
    if len(ids) != 1:
        known = sorted(row.checkpoint if len(ids) > 1 else row.name for row in rows.values())
        many = f"has {len(ids)} consumers" if ids else "has no consumer"
        raise InvalidArgument(
            f"The store {store.path} {many} {consumer!r}; it has {', '.join(known) or 'none'}.",
            "name the place of its checkpoint."
            if ids
            else nearest(consumer, known, "did you mean {!r}?", "name a consumer that cues status lists."),
        )
    id = ids[0]
    pid = consumer_rows.holder(store, consumer_rows.consumer_lock(id))
    if pid is not None:
        raise AlreadyRunning(
            f"The consumer {consumer} runs in process {pid} ({locks.process_state(pid)}).",
            "end that process first.",
            pid=pid,
        )
    dropped = drop_pending(store, id)
    store.core.commit(_delete, id)
    return dropped


def _delete(txn: StoreTransaction, id: bytes) -> None:
    own = f"{id.hex()}/{marks.CONSUMER}".encode()
    keys = [key for key, _ in transaction.rows(txn, names.LOW_WATERS) if key.rpartition(b"\0")[2].startswith(own)]
    for key in (*keys, names.consumer_key(id.hex())):
        txn.delete(key)


def _consumer(store: Store, id: bytes, row: ConsumerRow) -> ConsumerMetrics:
    pid = consumer_rows.holder(store, consumer_rows.consumer_lock(id))
    sources = []
    for name, position in row.positions.items():
        log = Log(store, *names.split_log(name))
        with store.core.view() as txn:
            ends = log.row(txn)
            last = log.end_of_messages(txn, ends, position) if position < ends.next else ends.next
        sources.append(ConsumerSourceMetrics(name, position, max(0, last - max(position, ends.first))))
    return ConsumerMetrics(
        row.name,
        row.checkpoint,
        pid,
        locks.process_state(pid) if pid else "",
        row.fence,
        tuple(sources),
        clock.to_datetime(row.written_ns),
    )
