"""Measurements of a store, whether its graph runs or not, for ``cues status`` and other programs.

    store       durability, sizes, owner, time until it is full
    queues      messages, time of the last one, rate, growth
    processors  positions, lag, rates, counters, failures, owner
    processes   processor time and memory of those that run processors
    groups      members and their partitions, positions, lag
    consumers   of cues.txn: process, positions, lag
    transactions  that are pending: whose, since when, how many messages, on which queue

Everything is read in short transactions from rows that the store has anyway, so measurements cost the
graph nothing. A rate is over the last :data:`WINDOW_S`, or over the time since the first record if that is
shorter. The rate of a queue is computed from the times of its record batches, the rate of a processor from
the steps in its try log. Growth is over the last :data:`GROWTH_S`, and found by a binary search for that time in
the log, so the length of a queue does not matter. Counters, latencies and the use of processor time come from the
lease of the process that runs a processor, which it renews every second.

Not guaranteed: one moment for all. The positions of a processor are read before the ends of its queues, so
a lag is never negative; two processors may be read a millisecond apart.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from cues.base import clock, names
from cues.base.data import dataclass
from cues.base.events import Counters
from cues.base.histogram import Histogram
from cues.base.names import ProcessorId, ProcessorKey
from cues.engine.record import WorkersRecord
from cues.engine.standing import ERRORS_MAX, processors, tailers
from cues.errors import BatchDamaged, CuesError
from cues.forwarding import marks, other_stores
from cues.forwarding.forwarder import Forwarder
from cues.graphs import processor_rows
from cues.graphs.processor_rows import ProcessorRow, unpacked_source
from cues.groups.operate import list_groups
from cues.queues.base import views_of
from cues.queues.log import Log
from cues.queues.options import QueueOptions
from cues.queues.store import Store
from cues.records.batch import HEAD
from cues.records.log_row import LogRow
from cues.steps import ownership, pauses
from cues.steps.error_records import ErrorLogs, ErrorRecord
from cues.steps.ownership import LEASE_S
from cues.steps.state import StateTable
from cues.storage import free_space, leases, locks
from cues.storage.transaction import StoreTransaction
from cues.tools.measurement import (
    ForwardMetrics,
    LastError,
    Measurement,
    Owner,
    ProcessMetrics,
    ProcessorMetrics,
    QueueMetrics,
    ReaderMetrics,
    SupervisorMetrics,
)
from cues.txn.consumer_rows import holder
from cues.txn.operate import list_consumers, list_transactions

WINDOW_S: Final = 10.0
"""The time over which rates are computed."""
GROWTH_S: Final = 3600.0
"""The time over which growth is computed."""
_SPAN_S_MIN: Final = 1.0
"""The shortest time for a rate: one message a millisecond ago is not a rate of a thousand a second."""
_GROWTH_SPAN_S_MIN: Final = 60.0
"""The shortest time for growth: a first minute does not tell an hour, but less tells nothing."""


def of_store(store: Store) -> Measurement:
    """Measure a whole store."""
    info = store.info()
    queues = tuple(of_queues(store))
    room = _room(store, info)
    figures = _Figures(store)
    return Measurement(
        str(store.path),
        store.durability,
        info["disk"],
        queues,
        tuple(of_processors(store, figures=figures)),
        info["used"],
        info["map"],
        room,
        until_full(queues, room),
        tuple(of_forwards(store)),
        tuple(of_readers(store)),
        tuple(of_supervisors(store)),
        tuple(list_groups(store)),
        tuple(_processes(store, figures)),
        tuple(list_consumers(store)),
        tuple(list_transactions(store)),
    )


def _room(store: Store, info: dict[str, int]) -> int:
    """The bytes that can still be written before a run stops. Pages of the file that are free now are used again."""
    live = store.core.live_bytes()
    space = free_space.look(store.directory)
    on_disk = space.free - space.limit + max(0, info["disk"] - live)
    limit = store.max_map_size
    return max(0, on_disk if limit is None else min(limit - live, on_disk))


def until_full(queues: Iterable[QueueMetrics], room_bytes: float) -> float | None:
    """Seconds until growing queues have filled ``room_bytes``; None if retention stops all of them before."""
    now, rate = 0.0, 0.0  # hours, bytes an hour
    ends: list[tuple[float, float]] = []
    for queue in queues:
        growth, bound = queue.growth_bytes, queue.bytes_max
        if growth > 0 and (bound is None or bound > queue.bytes):
            rate += growth
            if bound is not None:
                ends.append(((bound - queue.bytes) / growth, growth))
    for end, growth in sorted(ends):  # at each end one queue stops to grow
        if (end - now) * rate >= room_bytes:
            break
        room_bytes -= (end - now) * rate
        now, rate = end, rate - growth
    return (now + room_bytes / rate) * 3600 if rate > 1e-6 else None


# --- queues ---------------------------------------------------------------------------------------


def of_queues(store: Store, all: bool = False) -> list[QueueMetrics]:
    """Measure every queue, by name; with ``all`` the try logs too."""
    return [of_queue(store, name) for name in store.queues(all=all)]


def of_queue(store: Store, name: str) -> QueueMetrics:
    """Measure one queue, or one partition of it (``orders/3``)."""
    queue = store.queue(name)
    logs = tuple(_of_log(store, view.core.log, view.id, queue.options) for view in views_of(queue))
    if len(logs) == 1:
        return logs[0]
    return QueueMetrics(
        name,
        min(log.first for log in logs),
        max(log.last for log in logs),
        sum(log.bytes for log in logs),
        sum(log.rate or 0.0 for log in logs),
        max((log.appended for log in logs if log.appended), default=None),
        queue.options,
        logs,
        sum(log.growth or 0.0 for log in logs),
    )


def _of_log(store: Store, log: Log, name: str, options: QueueOptions) -> QueueMetrics:
    now = clock.now_ns()
    with store.core.view() as txn:
        row = log.row(txn)
        start, span_s = _window(log, txn, row, now, WINDOW_S)
        since, grown_s = _window(log, txn, row, now, GROWTH_S, _GROWTH_SPAN_S_MIN)
        size_bytes = log.size_bytes(txn)
    return QueueMetrics(
        name,
        row.first,
        row.next - 1,
        size_bytes,
        (row.next - start) / span_s,
        clock.to_datetime(row.time_ns) if row.time_ns else None,
        options,
        growth=(row.next - since) / grown_s * 3600,
    )


# --- processors -----------------------------------------------------------------------------------


class _Figures:
    """The figures of the processes that run processors, each read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        with store.core.view() as txn:
            self.pauses = pauses.of_store(txn)
            self.keys = processor_rows.all_keys(txn)
        self.by_owner: dict[bytes, dict[str, leases.Figures]] = {}

    def of(self, owner: bytes) -> dict[str, leases.Figures]:
        """The figures of one owner, by unit; empty if it noted none."""
        if owner not in self.by_owner:
            self.by_owner[owner] = leases.figures(self._store, owner)
        return self.by_owner[owner]


def of_processors(store: Store, figures: _Figures | None = None) -> list[ProcessorMetrics]:
    """Measure every processor."""
    figures = figures or _Figures(store)
    failures = _failures(store)
    return [_processor(store, id, failures.get(id, Failures()), figures) for id in processors(store)]


def of_forwards(store: Store) -> list[ForwardMetrics]:
    """The messages that wait on fork queues, by processor and store."""
    waits = []
    with store.core.view() as txn:
        ids = {key: id for id, key in processor_rows.all_keys(txn).items()}
    with other_stores.Others(store) as others:
        for name in store.queues(all=True):
            parts = names.split_fork(name)
            if parts is None:
                continue
            processor, id = parts
            other = others.get(id)
            waiting = None
            if other is not None:
                with contextlib.suppress(CuesError):  # the stores contradict each other; the next start explains it
                    waiting = Forwarder(store, other, [processor]).waiting()
            waits.append(
                ForwardMetrics(
                    ids.get(processor, ProcessorId(processor)), id.hex() if other is None else other.path, waiting
                )
            )
    return waits


def of_readers(store: Store) -> list[ReaderMetrics]:
    """The readers of this store's queues whose positions are in other stores."""
    readers = []
    for name in store.queues():
        for view in views_of(store.queue(name)):
            with store.core.view() as txn:
                known = marks.of_log(txn, view.core.log)
            readers += [
                ReaderMetrics(who.name, who.home.hex(), view.core.log.id, mark.next)
                for who, mark in known
                if not who.name.startswith(marks.CONSUMER)
            ]
    return readers


def of_supervisors(store: Store) -> list[SupervisorMetrics]:
    """The supervisors of graphs with workers, also of graphs that have ended."""
    return [
        SupervisorMetrics(record, holder(store, ownership.supervisor_lock(record.graph)) == record.supervisor)
        for record in WorkersRecord.all(store.directory)
    ]


def _processes(store: Store, known: _Figures) -> Iterable[ProcessMetrics]:
    """The processes that run processors, by the figures that were read for the processors."""
    workers = {
        worker.pid: (name, supervisor.record.graph, worker.restarts)
        for supervisor in of_supervisors(store)
        for name, worker in supervisor.record.workers.items()
        if supervisor.alive
    }
    for figures in known.by_owner.values():
        if leases.PROCESS in figures:
            own, units = figures[leases.PROCESS], tuple(unit for unit in figures if unit != leases.PROCESS)
            named = workers.get(own["pid"], ("", "", 0))
            yield ProcessMetrics(own["pid"], own["cpu_s"], own["memory_bytes"], units, *named)


def _next_timer(store: Store, key: ProcessorKey) -> datetime | None:
    due = StateTable(store, key).first_due()
    return None if due is None else clock.to_datetime(due)


def _processor(store: Store, id: ProcessorId, failures: Failures, known: _Figures) -> ProcessorMetrics:
    with store.core.view() as txn:
        row = processor_rows.read_row(txn, id)
        topology = processor_rows.read_topology(txn, id)
    assert row is not None
    assert topology is not None
    taken, stepped = _steps(store, id)
    holder = owner(store, id, row)
    is_source = topology.kind == "source"
    figures = known.of(row.owner).get(id, {}) if holder is not None and not _is_starting(row, holder) else {}
    counters = Counters.from_dict(figures) if figures else None
    recent = Histogram.from_json(figures["recent"]) if "recent" in figures and holder and holder.lease_s else None
    if is_source:
        figures = {}  # a source has no calls
    return ProcessorMetrics(
        id,
        topology.kind,
        row.epoch,
        row.generation,
        holder,
        tuple(tailers(store, id)),
        unpacked_source(row.source)[0] if row.source else None,
        None if is_source else taken,
        stepped,
        failures.count,
        failures.last,
        int(figures["calls"]) if figures else None,
        int(figures["in_flight"]) if figures else None,
        figures["call_s"] if figures and figures["calls"] else None,
        counters,
        _beaten(store, row) if holder is None else None,
        known.pauses.get(id),
        None if is_source else _next_timer(store, topology.key_of(id)),
        recent=recent,
        is_running=holder is not None,
        errors_more=failures.more,
    )


def owner(store: Store, processor: ProcessorId, row: ProcessorRow | None = None) -> Owner | None:
    """The owner of a processor: the process that holds its lock, also this one; None if there is none."""
    pid = holder(store, locks.offset_of(processor))
    if pid is None:
        return None
    if row is None:
        with store.core.view() as txn:
            row = processor_rows.read_row(txn, processor)
    return Owner(pid, locks.process_state(pid), _lease_s(store, row))


def _is_starting(row: ProcessorRow, holder: Owner) -> bool:
    """Return whether the process with the lock has not claimed the processor yet: the row is that of a dead one.

    After a takeover a row is also of another process than the lock, but that one is alive.
    """
    return holder.pid not in (0, row.pid) and locks.process_state(row.pid) in ("gone", "dead, not reaped")


def _beaten(store: Store, row: ProcessorRow) -> datetime | None:
    """The time of the last beat of a dead owner, whose lease is still there."""
    beaten_ns = leases.beaten_ns(store, row.owner) if row.owner.strip(b"\0") else 0
    return clock.to_datetime(beaten_ns) if beaten_ns else None


def _lease_s(store: Store, row: ProcessorRow | None) -> float:
    if row is None or row.boot != processor_rows.boot():
        return 0.0
    try:
        return max(0.0, leases.left_s(store, row.owner, LEASE_S))
    except OSError:  # this user may not read it
        return 0.0


def _steps(store: Store, processor: ProcessorId) -> tuple[float, datetime | None]:
    """Messages taken a second, from the try log, and the time of its last record."""
    with store.core.view() as txn:
        key = processor_rows.key_of(txn, processor)
    log = Log(store, key)
    with store.core.view() as txn:
        row = log.row(txn)
        if not row.time_ns:
            return 0.0, None
        start, span_s = _window(log, txn, row, clock.now_ns(), WINDOW_S)
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
            else:  # an attempt: a step with side effects has written its snapshot twice
                taken += begun
                begun = 0
    return taken / span_s, stepped


def _window(
    log: Log, txn: StoreTransaction, row: LogRow, now_ns: int, window_s: float, least_s: float = _SPAN_S_MIN
) -> tuple[int, float]:
    """The first index in the time of a rate, and the length of that time.

    A log that is younger, or was trimmed in that time, covers less than ``window_s``.
    """
    since = now_ns - int(window_s * 1e9)
    if row.time_ns < since:
        return row.next, window_s
    start = log.index_at(txn, row, since)
    raws = log.read(txn, row, start, 1) if start == row.first else []
    if not raws:
        return start, window_s
    first_ns = HEAD.unpack_from(raws[0][1], 8)[3]
    return start, min(window_s, max(least_s, (now_ns - first_ns) / 1e9))


# --- failures -------------------------------------------------------------------------------------


@dataclass
class Failures:
    """The failed messages of a processor that are on error queues, and the last error."""

    count: int = 0
    last: LastError | None = None
    more: bool = False
    """True if there may be more than ``count``: there are older error messages, which were not read."""


def _failures(store: Store) -> dict[str, Failures]:
    """By processor: the number of its messages that are unresolved on error queues, and the last such error.

    A queue is an error queue if its last message is an error record; the store does not say which queues
    are. An error queue may be in another store.
    """
    with ErrorLogs(store) as logs:
        return failures_of(log.records() for log in logs.logs)


def failures_of(logs: Iterable[Iterable[ErrorRecord]]) -> dict[str, Failures]:
    """Count error records by processor; of each log the first :data:`ERRORS_MAX`, which are the last ones."""
    failures: dict[str, Failures] = {}
    for log in logs:
        records = iter(log)
        of_log = set()
        for record in itertools.islice(records, ERRORS_MAX):
            of_log.add(record.processor)
            known = failures.setdefault(record.processor, Failures())
            known.count += record.count
            if known.last is None or record.time > known.last.time:
                known.last = LastError(record.queue, record.index, record.time, record.type, record.text)
        if next(records, None) is not None:
            for processor in of_log:
                failures[processor].more = True
    return failures
