"""What can be measured of a store from outside, whether its graph runs or not: ``cues status`` and others.

    store       durability, sizes, owner
    queues      what is on them, since when, how fast they grow
    processors  positions, lag, rates, failures, owner
    groups      members, who holds what, positions, lag

Everything is read in short transactions from rows that are kept anyway; nobody counts for our sake.
A rate is over the last :data:`WINDOW_S`, or since the first record that is there where that is younger:
of a queue by the times of its record batches, of a processor by the steps that its try log still holds.

Not guaranteed: one moment for all. A processor's positions are read before their queues' ends, so a
lag is never negative; two processors may be read a millisecond apart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from cues import codec
from cues.base import clock, names
from cues.engine.record import WorkersRecord
from cues.errors import BatchDamaged, CuesError, StoreReadOnly
from cues.forwarding import other_stores
from cues.forwarding.forwarder import Forwarder
from cues.groups.table import GroupTable, MemberRow
from cues.queues import claims, marks, processor_rows
from cues.queues.log import Log
from cues.queues.options import QueueOptions
from cues.queues.processor_rows import ProcessorRow
from cues.queues.queue import open_queue
from cues.queues.store import Store
from cues.records.batch import HEAD
from cues.records.log_row import LogRow
from cues.steps import ownership
from cues.steps.ownership import LEASE_S
from cues.storage import leases, locks
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction

WINDOW_S: Final = 10.0
"""The past that rates are about."""
_SPAN_S_MIN: Final = 1.0
"""One message a millisecond ago is not a thousand a second."""
ERRORS_MAX: Final = 1000
"""Messages of an error queue that are looked at; with more the counts are lower bounds."""


@dataclass(frozen=True)
class QueueMetrics:
    """One queue. ``first`` to ``last`` are there, ``last`` one below ``first`` when there is none."""

    queue: str
    first: int
    last: int
    bytes: int
    """Of its pages on disk."""
    rate: float
    """Messages appended a second, over the last :data:`WINDOW_S`."""
    appended: datetime | None
    options: QueueOptions
    partitions: tuple[QueueMetrics, ...] = ()
    """Where there are several, each by itself; above stands then what is of all, the lowest first, the highest last."""

    @property
    def messages(self) -> int:
        if self.partitions:
            return sum(one.messages for one in self.partitions)
        return self.last - self.first + 1


@dataclass(frozen=True)
class TailerMetrics:
    """Where a processor stands on one of its inputs."""

    tailer: str
    queue: str
    position: int
    """The index that is taken next."""
    lag: int | None
    """Messages that are there and not taken; None where the queue is in a store that is not at hand."""
    store: str = ""
    """Path of the store that the queue lies in, where it is another one; its id if nobody knows where it is."""


@dataclass(frozen=True)
class ForwardMetrics:
    """What a processor writes for another store."""

    processor: str
    store: str
    """Path of the other store; its id if nobody knows where it is."""
    waiting: int | None
    """Messages on the fork queue that are not there yet; None where it is not at hand, or has another history."""


@dataclass(frozen=True)
class ReaderMetrics:
    """A processor of another store that reads a queue of this one."""

    processor: str
    store: str
    """Id of the store that its position lies in."""
    queue: str
    position: int
    """What is before has been read, and durably so; it lags a second behind."""


@dataclass(frozen=True)
class Owner:
    """The process that runs a processor now."""

    pid: int
    state: str
    """As the system tells it: running, sleeping, stopped, …"""
    lease_s: float
    """Seconds until another may take over although this one holds the lock; 0 when it does not answer."""


@dataclass(frozen=True)
class LastError:
    """The last message that a processor sent to an error queue."""

    queue: str
    index: int
    time: datetime
    type: str
    text: str


@dataclass(frozen=True)
class ProcessorMetrics:
    """One processor."""

    processor: str
    kind: str
    epoch: int
    generation: int
    owner: Owner | None
    tailers: tuple[TailerMetrics, ...]
    source_position: Any
    rate: float | None
    """Messages taken a second, over the last :data:`WINDOW_S`; None for a source (see its queue)."""
    stepped: datetime | None
    errors: int
    """Its failed messages that are on error queues now. One record holds all messages of a failed batch."""
    last_error: LastError | None
    calls: int | None = None
    """Calls of its function that returned since its owner began, by the owner's last beat; None where none runs it."""
    in_flight: int | None = None
    """Calls that had not returned."""
    call_s: float | None = None
    """Seconds of a call, in the mean."""

    @property
    def lag(self) -> int:
        return sum(tailer.lag or 0 for tailer in self.tailers)


@dataclass(frozen=True)
class SupervisorMetrics:
    """The workers of a graph, as its supervisor left them, and whether it is alive."""

    record: WorkersRecord
    alive: bool


@dataclass(frozen=True)
class GroupMemberMetrics:
    """A member of a consumer group."""

    member: str
    pid: int
    state: str
    """As the system tells it of a member that lives; "closed" or "dead" of one whose place is kept for its lease."""
    lease_s: float
    """Seconds until its place goes to others, if it is not heard of."""
    queues: tuple[str, ...]


@dataclass(frozen=True)
class GroupPartitionMetrics:
    """Where a group stands on one partition."""

    log: str
    member: str | None
    """Who reads it; None while nobody does."""
    assignee: str
    """Who is to read it; another one while it moves."""
    position: int
    lag: int
    paused: bool


@dataclass(frozen=True)
class GroupMetrics:
    """A consumer group."""

    group: str
    generation: int
    members: tuple[GroupMemberMetrics, ...]
    partitions: tuple[GroupPartitionMetrics, ...]

    @property
    def lag(self) -> int:
        return sum(partition.lag for partition in self.partitions)


@dataclass(frozen=True)
class StoreMetrics:
    """One store."""

    path: str
    durability: str
    used_bytes: int
    disk_bytes: int
    map_bytes: int
    queues: tuple[QueueMetrics, ...]
    processors: tuple[ProcessorMetrics, ...]
    forwards: tuple[ForwardMetrics, ...]
    readers: tuple[ReaderMetrics, ...]
    supervisors: tuple[SupervisorMetrics, ...]
    groups: tuple[GroupMetrics, ...]


def of_store(store: Store) -> StoreMetrics:
    """Everything about a store."""
    info = store.info()
    return StoreMetrics(
        str(store.path),
        store.durability,
        info["used"],
        info["disk"],
        info["map"],
        tuple(of_queues(store)),
        tuple(of_processors(store)),
        tuple(of_forwards(store)),
        tuple(of_readers(store)),
        tuple(of_supervisors(store)),
        tuple(of_groups(store)),
    )


# --- queues ---------------------------------------------------------------------------------------


def of_queues(store: Store, all: bool = False) -> list[QueueMetrics]:
    """Every queue, by name; with ``all`` the try logs too."""
    return [of_queue(store, name) for name in store.queues(all=all)]


def of_queue(store: Store, name: str) -> QueueMetrics:
    """One queue, or one partition of it (``orders/3``)."""
    queue = store.queue(name)
    logs = tuple(_of_log(store, view.log, view.id, queue.options) for view in queue.views)
    if len(logs) == 1:
        return logs[0]
    return QueueMetrics(
        name,
        min(log.first for log in logs),
        max(log.last for log in logs),
        sum(log.bytes for log in logs),
        sum(log.rate for log in logs),
        max((log.appended for log in logs if log.appended), default=None),
        queue.options,
        logs,
    )


def _of_log(store: Store, log: Log, name: str, options: QueueOptions) -> QueueMetrics:
    now = clock.now_ns()
    with store.view() as txn:
        row = log.row(txn)
        start, span_s = _window(log, txn, row, now)
        size_bytes = log.size_bytes(txn)
    return QueueMetrics(
        name,
        row.first,
        row.next - 1,
        size_bytes,
        (row.next - start) / span_s,
        clock.to_datetime(row.time_ns) if row.time_ns else None,
        options,
    )


# --- processors -----------------------------------------------------------------------------------


def processors(store: Store) -> list[str]:
    """The ids of the processors that the store knows."""
    with store.view() as txn:
        return [id for id, _ in store.named_rows(txn, names.processor_key(""))]


def of_processors(store: Store, only: Iterable[str] | None = None) -> list[ProcessorMetrics]:
    """Every processor, or those of the ids given that have run before."""
    known = processors(store)
    failures = _failures(store)
    wanted = known if only is None else [id for id in only if id in known]
    return [_processor(store, id, failures.get(id, _Failures())) for id in wanted]


def tailers(store: Store, processor: str) -> list[TailerMetrics]:
    """Where a processor stands; empty for a source and for an unknown one."""
    with store.view() as txn:
        topology = processor_rows.read_topology(txn, processor)
        row = processor_rows.read_row(txn, processor)
    if topology is None or row is None:
        return []
    found = []
    with other_stores.Others(store) as others:
        for tailer, queue, id, position in zip(topology.tailers, topology.queues, topology.stores, row.positions):
            other = others.get(id)
            at, lag = position.next, None
            if other is not None:
                log = Log(other, queue)
                with other.view() as txn:  # behind the position's own: so there is never less than was taken
                    ends = log.row(txn)
                at = max(at, ends.first)
                lag = ends.next - at if at <= ends.next else None  # another history; the next start says how
            where = "" if not id else other.path if other is not None else id.hex()
            found.append(TailerMetrics(tailer, queue, at, lag, where))
    return found


def of_forwards(store: Store) -> list[ForwardMetrics]:
    """What waits on fork queues, by processor and store."""
    found = []
    with other_stores.Others(store) as others:
        for name in store.queues(all=True):
            parts = names.fork_parts(name)
            if parts is None:
                continue
            processor, id = parts
            other = others.get(id)
            waiting = None
            if other is not None:
                with contextlib.suppress(CuesError):  # they contradict each other: the next start says how
                    waiting = Forwarder(store, other, [processor]).waiting()
            found.append(ForwardMetrics(processor, id.hex() if other is None else other.path, waiting))
    return found


def producers(store: Store) -> list[str]:
    """The processors of other stores that have forwarded to this one."""
    with store.view() as txn:
        return [name.partition("/")[2] for name, _ in store.named_rows(txn, names.PRODUCERS)]


def of_readers(store: Store) -> list[ReaderMetrics]:
    """Who reads this store's queues from positions in other stores."""
    found = []
    for name in store.queues():
        for view in store.queue(name).views:
            with store.view() as txn:
                known = marks.of_log(txn, view.log)
            found += [ReaderMetrics(who.processor, who.home.hex(), view.log.id, mark.next) for who, mark in known]
    return found


def of_supervisors(store: Store) -> list[SupervisorMetrics]:
    """Who runs graphs in workers, or did last."""
    found = []
    for record in WorkersRecord.all(store.directory):
        pid = None
        with contextlib.suppress(StoreReadOnly):
            lock = ownership.supervisor_lock(record.graph)
            pid = os.getpid() if store.locks.mine(lock) else store.locks.holder(lock)
        found.append(SupervisorMetrics(record, pid == record.supervisor))
    return found


def _processor(store: Store, id: str, failures: _Failures) -> ProcessorMetrics:
    with store.view() as txn:
        row = processor_rows.read_row(txn, id)
        topology = processor_rows.read_topology(txn, id)
    assert row is not None
    assert topology is not None
    taken, stepped = _steps(store, id)
    who = owner(store, id, row)
    figures = leases.figures(store, row.owner).get(id, {}) if who is not None and topology.kind != "source" else {}
    return ProcessorMetrics(
        id,
        topology.kind,
        row.epoch,
        row.generation,
        who,
        tuple(tailers(store, id)),
        codec.unpack(row.source)[0] if row.source else None,
        None if topology.kind == "source" else taken,
        stepped,
        failures.count,
        failures.last,
        int(figures["calls"]) if figures else None,
        int(figures["in_flight"]) if figures else None,
        figures["call_s"] if figures and figures["calls"] else None,
    )


def owner(store: Store, processor: str, row: ProcessorRow | None = None) -> Owner | None:
    """Who runs a processor: whoever holds its lock, this process included; None when nobody does."""
    try:
        lock_file = store.locks
    except StoreReadOnly:
        return None  # nobody can run a graph where nobody can lock
    offset = locks.offset_of(processor)
    pid = os.getpid() if lock_file.mine(offset) else lock_file.holder(offset)
    if pid is None:
        return None
    if row is None:
        with store.view() as txn:
            row = processor_rows.read_row(txn, processor)
    return Owner(pid, locks.process_state(pid), _lease_s(store, row))


def _lease_s(store: Store, row: ProcessorRow | None) -> float:
    if row is None or row.boot != processor_rows.boot():
        return 0.0
    try:
        return max(0.0, leases.left_s(store, row.owner, LEASE_S))
    except OSError:  # it is not for this user's eyes
        return 0.0


def _steps(store: Store, processor: str) -> tuple[float, datetime | None]:
    """Messages taken a second by what the try log still holds, and when it was written last."""
    log = Log(store, processor)
    with store.view() as txn:
        row = log.row(txn)
        if not row.time_ns:
            return 0.0, None
        start, span_s = _window(log, txn, row, clock.now_ns())
        raws = log.read(txn, row, start, row.next)
    stepped = clock.to_datetime(row.time_ns)
    try:
        batches = log.batches(raws)
    except BatchDamaged:
        return 0.0, stepped
    taken = begun = 0
    for batch in batches:
        for message in batch.messages():
            if message.get(names.TYPE) == names.SNAPSHOT:
                ends = message[names.TO_INDICES]
                begun = sum(ends[tailer] - start for tailer, start in message[names.TAILER_INDICES].items())
            else:  # an attempt: a step with side effects has written its snapshot twice by now
                taken += begun
                begun = 0
    return taken / span_s, stepped


def _window(log: Log, txn: StoreTransaction, row: LogRow, now_ns: int) -> tuple[int, float]:
    """The first index of the time that a rate is over, and how long that is.

    A log that is younger, or was trimmed inside of it, covers less than :data:`WINDOW_S`.
    """
    since = now_ns - int(WINDOW_S * 1e9)
    if row.time_ns < since:
        return row.next, WINDOW_S
    start = log.index_at(txn, row, since)
    raws = log.read(txn, row, start, 1) if start == row.first else []
    if not raws:
        return start, WINDOW_S
    first_ns = HEAD.unpack_from(raws[0][1], 8)[3]
    return start, min(WINDOW_S, max(_SPAN_S_MIN, (now_ns - first_ns) / 1e9))


# --- consumer groups ------------------------------------------------------------------------------


def of_groups(store: Store) -> list[GroupMetrics]:
    """Every consumer group, by name."""
    with store.view() as txn:
        queues: dict[str, set[str]] = {group: set() for group, _ in store.named_rows(txn, names.group_key(""))}
    groups = list(queues)
    for log, group, _ in claims.all_rows(store):
        queues.setdefault(group, set()).add(names.log_parts(log)[0])
    return [_group(GroupTable(store, group), sorted(queues[group])) for group in groups]


def _group(table: GroupTable, queues: Iterable[str]) -> GroupMetrics:
    seen = table.look(queues)
    owners = {row.id: name for name, row in seen.members.items()}
    lag = table.lag(queues)
    return GroupMetrics(
        table.group,
        seen.row.generation,
        tuple(_group_member(table, name, row) for name, row in seen.members.items()),
        tuple(
            GroupPartitionMetrics(
                names.log_id(*partition),
                owners.get(claim.owner),
                claim.assignee,
                claim.next,
                lag[partition],
                claim.paused,
            )
            for partition, claim in seen.claims.items()
        ),
    )


def _group_member(table: GroupTable, name: str, row: MemberRow) -> GroupMemberMetrics:
    state = "closed"
    if not row.kept_ns:
        try:
            state = locks.process_state(row.pid) if table.alive(name, row) else "dead"
        except StoreReadOnly:  # nobody can lock here, so nobody can be a member
            state = "dead"
    return GroupMemberMetrics(name, row.pid, state, max(0.0, table.left_s(row)), row.queues)


# --- failures -------------------------------------------------------------------------------------


@dataclass
class _Failures:
    count: int = 0
    last: LastError | None = None


def _failures(store: Store) -> dict[str, _Failures]:
    """By processor: the number of its messages that are on error queues, and the last error.

    A queue is an error queue if its last message is an error record; the store does not say which queues
    are. An error queue may be in another store.
    """
    found: dict[str, _Failures] = {}
    _count_failures(store, found)
    with other_stores.Others(store) as others:
        for id in other_stores.places(store):
            other = others.get(id)
            if other is not None:
                _count_failures(other, found)
    return found


def _count_failures(store: BaseStore, found: dict[str, _Failures]) -> None:
    logs = [view.log for name in store.queues() for view in open_queue(store, name).views]
    for log in logs:
        for index, time_ns, message in _backwards(log):
            if message.get(names.TYPE) != names.PROCESSOR_ERROR:
                break
            processor = str(message.get(names.ERR_CONFIG, {}).get("id"))
            known = found.setdefault(processor, _Failures())
            known.count += _inputs(message)
            time = clock.to_datetime(time_ns)
            if known.last is None or time > known.last.time:
                cause = (message.get(names.ERR_CAUSE) or [{}])[0]
                known.last = LastError(log.id, index, time, str(cause.get("type")), str(cause.get("message")))


def failed_messages(logs: Iterable[Log], records: int) -> int:
    """The number of messages that the last ``records`` error records hold; a record that cannot be read counts as one.

    Only the last :data:`ERRORS_MAX` records of each log are read. Each older one counts as one message.
    """
    inputs = [(time_ns, _inputs(message)) for log in logs for _, time_ns, message in _backwards(log)]
    inputs.sort(reverse=True)
    newest = [count for _, count in inputs[:records]]
    return sum(newest) + records - len(newest)


def _inputs(record: dict[str, Any]) -> int:
    """The number of messages that failed together; of a processor with several inputs, one of each is one message."""
    messages = record.get(names.ERR_MESSAGES)
    lists = [value for value in messages.values() if isinstance(value, list)] if isinstance(messages, dict) else []
    return max((len(value) for value in lists), default=1) or 1


def _backwards(log: Log) -> Iterable[tuple[int, int, dict[str, Any]]]:
    """The last :data:`ERRORS_MAX` messages that can be read, last first: index, time, message."""
    store = log.store
    index: int | None = None
    count = 0
    while count < ERRORS_MAX:
        with store.view() as txn:
            row: LogRow = log.row(txn)
            raws = log.read_before(txn, row, row.next if index is None else index)
        try:
            batches = log.batches(raws)
            messages = batches[0].messages() if batches else []
        except CuesError:
            return
        if not messages:
            return
        batch = batches[0]
        for offset in range(min(len(messages), (index or row.next) - batch.first) - 1, -1, -1):
            if batch.first + offset < row.first:
                return
            yield batch.first + offset, batch.head.time_ns, messages[offset]
            count += 1
        index = batch.first
