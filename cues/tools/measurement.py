"""The content of a measurement of a store or a directory: its queues, the units of its processors, and their sums.

    Measurement     queues, units, drivers, workers, groups, consumers, transactions: of one place, at one time
    figures()       one row for each processor: the sums of its units

Every display of a processor (``cues status``, ``cues top``, the page, the metrics) takes its figures from here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from cues.base.data import dataclass
from cues.base.events import Counters
from cues.base.histogram import Histogram
from cues.base.names import ProcessorId, ProcessorKey
from cues.engine.record import QueuesPlace, RecordedFailure, WorkersRecord
from cues.engine.standing import TailerMetrics
from cues.engine.status import processor_of
from cues.graphs.pause import ProcessorPause
from cues.groups.operate import GroupMetrics
from cues.queues.backpressure import Note
from cues.queues.options import QueueOptions
from cues.steps.delays import Waiting
from cues.storage import free_space
from cues.storage.read_slots import OldRead
from cues.txn.operate import ConsumerMetrics, TransactionMetrics

if TYPE_CHECKING:
    from cues.spark.cluster.lease import LeaseHolder
    from cues.tools.follower import FollowerSeen


@dataclass(frozen=True)
class QueueMetrics:
    """A queue. It has the indices ``first`` to ``last``; if it is empty, ``last`` is one below ``first``."""

    queue: str
    first: int
    last: int
    bytes: int
    """The size of its pages, or of its files."""
    rate: float | None
    """Messages appended a second, over the last :data:`cues.tools.metrics.WINDOW_S`."""
    appended: datetime | None
    options: QueueOptions | None
    """None in a directory: its queues keep what the graph says that writes them."""
    partitions: tuple[QueueMetrics, ...] = ()
    """The metrics of each partition, if there are several; then ``first`` is the lowest and ``last`` the highest."""
    growth: float | None = 0.0
    """Messages appended an hour, over the last :data:`cues.tools.metrics.GROWTH_S`."""
    files: int | None = None
    """The number of its files in a directory."""
    writer: str | None = None
    """The graph that writes it, in a directory."""

    @property
    def messages(self) -> int:
        if self.partitions:
            return sum(partition.messages for partition in self.partitions)
        return self.last - self.first + 1

    @property
    def kept(self) -> dict[str, Any] | None:
        """Its retention as plain data; None if it keeps all messages, or if that is not known."""
        kept: dict[str, Any] | None = self.options.to_dict().get("retention") if self.options is not None else None
        return kept

    @property
    def growth_bytes(self) -> float:
        """Bytes appended an hour, at the mean size of the messages that are there."""
        return (self.growth or 0.0) * self.bytes / self.messages if self.messages else 0.0

    @property
    def bytes_max(self) -> float | None:
        """The size at which retention stops the growth, at the present rate and message size; None: it never does.

        A queue whose messages are deleted when they are read counts as one that stays as large as it is.
        """
        kept = self.options.retention if self.options is not None else None
        if kept is None:
            return None
        mean = self.bytes / self.messages if self.messages else 0.0
        parts = len(self.partitions) or 1  # a policy holds for each partition
        bounds = [float(self.bytes)] if kept.read else []
        bounds += [kept.count * parts * mean] if kept.count is not None else []
        bounds += [float(kept.bytes) * parts] if kept.bytes is not None else []
        bounds += [float(kept.age) / 3600 * self.growth_bytes] if kept.age is not None else []  # type: ignore[arg-type]
        return max(float(self.bytes), min(bounds))


@dataclass(frozen=True)
class ForwardMetrics:
    """The messages of a processor for another store."""

    processor: ProcessorId
    store: str
    """The path of the other store; its id if the path is unknown."""
    waiting: int | None
    """The number of messages that wait on the fork queue; None if the store cannot be opened or has another history."""


@dataclass(frozen=True)
class ReaderMetrics:
    """A processor of another store that reads a queue of this one."""

    processor: ProcessorKey
    """Its key: a store knows the processors of other stores by the ids of their first starts."""
    store: str
    """The id of the store that has its position."""
    queue: str
    position: int
    """All messages before it are read, durably. It lags by about a second."""


@dataclass(frozen=True)
class Owner:
    """The process that runs a processor now."""

    pid: int
    state: str
    """The state of the process in the system: running, sleeping, stopped, …"""
    lease_s: float
    """Seconds until another process may take over while this one holds the lock; 0 when it does not answer."""


@dataclass(frozen=True)
class LastError:
    """The last message of a processor on an error queue."""

    queue: str
    index: int
    time: datetime
    type: str
    text: str


@dataclass(frozen=True)
class ProcessorMetrics:
    processor: ProcessorId
    kind: str
    epoch: int
    generation: int
    owner: Owner | None
    tailers: tuple[TailerMetrics, ...]
    source_position: Any
    rate: float | None
    """Messages taken a second, over the last :data:`cues.tools.metrics.WINDOW_S`; None for a source (see its queue)."""
    stepped: datetime | None
    errors: int
    """The number of its unresolved failed messages on error queues. One record has all messages of a failed batch."""
    last_error: LastError | None
    calls: int | None = None
    """The number of calls that returned since its owner began, at the last beat; None if no process runs it."""
    in_flight: int | None = None
    """The number of calls that had not returned."""
    call_s: float | None = None
    """Mean seconds of a call."""
    counters: Counters | None = None
    """Counters of its owner since it began, at the last beat; None if no process runs it."""
    lost: datetime | None = None
    """If its last process ended without giving it back (it was killed, or the machine stopped): its last beat."""
    paused: ProcessorPause | None = None
    """Its pause, until somebody resumes it; None if it is not paused."""
    timer: datetime | None = None
    """The time of its first timer that has not fired; None without one."""
    driver: str | None = None
    """The id of the driver that committed last, in a directory."""
    record: int | None = None
    """The number of its last record, in a directory."""
    recent: Histogram | None = None
    """Microseconds from the append of a message to the commit of the step that took it, of the messages that its owner
    took in the last minute (:class:`cues.base.histogram.Recent`). None if no process runs it, or does not answer."""
    is_running: bool = False
    """True if a process runs it, or the driver of its graph runs."""
    errors_more: bool = False
    """True if ``errors`` is a lower bound: the error queue has more error messages than are read."""

    @property
    def lag(self) -> int:
        return sum(tailer.lag or 0 for tailer in self.tailers)


@dataclass(frozen=True)
class InputFigures:
    """An input of a processor: the sums of its units."""

    queue: str
    store: str
    """The path of the queue's store, if it is another one."""
    position: int | None
    """The index that is taken next; None if several units read the queue."""
    lag: int | None
    """The number of messages that are not taken yet; None if it is not known."""


@dataclass(frozen=True)
class ProcessorFigures:
    """A processor: the sums of its units."""

    processor: ProcessorId
    units: tuple[ProcessorMetrics, ...]
    """Empty if nothing of it is in the store yet."""
    stop: RecordedFailure | None = None
    """The last stop of one of its units by an error, of those after which it was not started again, if there is one."""
    known: Counters | None = None
    """The counters, if they are known better than those of its units, which do not have what dead workers counted."""
    known_lag: int | None = None
    """The lag, if its queues are elsewhere than its units."""
    known_recent: Histogram | None = None
    """The latencies, if they are not those of the last minute."""

    @property
    def kind(self) -> str:
        return self.units[0].kind if self.units else ""

    @property
    def inputs(self) -> list[InputFigures]:
        found: dict[tuple[str, str], InputFigures] = {}
        for tailer in self.tailers:
            key = tailer.queue.partition("/")[0], tailer.store
            lags = [lag for lag in (tailer.lag, found[key].lag if key in found else None) if lag is not None]
            position = tailer.position if len(self.units) == 1 and key not in found else None
            found[key] = InputFigures(*key, position, sum(lags) if lags else None)
        return list(found.values())

    @property
    def tailers(self) -> list[TailerMetrics]:
        return [tailer for unit in self.units for tailer in unit.tailers]

    @property
    def lag(self) -> int:
        return sum(unit.lag for unit in self.units) if self.known_lag is None else self.known_lag

    @property
    def rate(self) -> float | None:
        rates = [unit.rate for unit in self.units if unit.rate is not None]
        return sum(rates) if rates else None

    @property
    def taken(self) -> int | None:
        """The messages that it ever took, by its positions; of a source, since it was started. None: not known."""
        if self.tailers:
            return sum(tailer.position - 1 for tailer in self.tailers)
        return None if self.counters is None else self.counters.taken

    @property
    def errors(self) -> int:
        return sum(unit.errors for unit in self.units)

    @property
    def errors_more(self) -> bool:
        """True if :attr:`errors` is a lower bound."""
        return any(unit.errors_more for unit in self.units)

    @property
    def last_error(self) -> LastError | None:
        return max((u.last_error for u in self.units if u.last_error), key=lambda error: error.time, default=None)

    @functools.cached_property
    def counters(self) -> Counters | None:
        """The counts of the processes that run its units; None if no process runs it."""
        counted = [unit.counters for unit in self.units if unit.counters is not None]
        return self.known or (functools.reduce(Counters.with_those_of, counted) if counted else None)

    @property
    def calls(self) -> int:
        return sum(unit.calls or 0 for unit in self.units)

    @property
    def in_flight(self) -> int:
        return sum(unit.in_flight or 0 for unit in self.units)

    @property
    def call_s(self) -> float | None:
        """Mean seconds of a call; None before the first has returned."""
        spent = sum((unit.calls or 0) * (unit.call_s or 0.0) for unit in self.units)
        return spent / self.calls if self.calls else None

    @property
    def latency_s(self) -> dict[str, float] | None:
        """The median and the 99th percentile of the latencies of the last minute; None if it took no message then."""
        total = self.known_recent
        if total is None:
            recent = [unit.recent for unit in self.units if unit.recent is not None]
            total = functools.reduce(Histogram.with_those_of, recent, Histogram())
        return total.quantiles(1e-6)

    @property
    def is_limited(self) -> bool:
        """True if messages wait because ``rate=`` allows no call now."""
        return self.counters is not None and self.counters.limited

    @property
    def away(self) -> str | None:
        """The thing outside that is away, since when, and why."""
        return (self.counters is not None and self.counters.away) or None

    @property
    def stepped(self) -> datetime | None:
        return max((unit.stepped for unit in self.units if unit.stepped), default=None)

    @property
    def timer(self) -> datetime | None:
        return min((unit.timer for unit in self.units if unit.timer), default=None)

    @property
    def epoch(self) -> int | None:
        return max((unit.epoch for unit in self.units), default=None)

    @property
    def owners(self) -> list[Owner]:
        """The processes that run its units, each once."""
        return list({unit.owner.pid: unit.owner for unit in self.units if unit.owner}.values())

    @property
    def drivers(self) -> list[str]:
        return sorted({unit.driver for unit in self.units if unit.driver})

    @property
    def is_running(self) -> bool:
        return any(unit.is_running for unit in self.units)

    @property
    def paused(self) -> list[ProcessorPause]:
        return [unit.paused for unit in self.units if unit.paused]


@dataclass(frozen=True)
class SupervisorMetrics:
    """The workers of a graph, from the last record of its supervisor, and whether it is alive."""

    record: WorkersRecord
    alive: bool


@dataclass(frozen=True)
class ProcessMetrics:
    """A process that runs processors."""

    pid: int
    cpu_s: float
    """Seconds of processor time that it has used."""
    memory_bytes: int
    units: tuple[str, ...]
    """The ids of the units that it runs."""
    worker: str = ""
    """Its name, if it is a worker of a supervisor."""
    graph: str = ""
    restarts: int = 0
    """The number of restarts of the worker."""


@dataclass(frozen=True)
class Measurement:
    """A store or a directory. A field that one of the two does not have is empty, or None."""

    path: str
    """The path of the store; the path or the URL of the directory."""
    durability: str
    disk_bytes: int
    queues: tuple[QueueMetrics, ...]
    processors: tuple[ProcessorMetrics, ...]
    """The units."""
    used_bytes: int | None = None
    map_bytes: int | None = None
    room_bytes: int | None = None
    """Bytes that can still be written: the rest of the map, or of the disk if that is less."""
    full_s: float | None = None
    """Seconds until there is no room, if the queues grow on as they do now; None if they never fill it."""
    forwards: tuple[ForwardMetrics, ...] = ()
    readers: tuple[ReaderMetrics, ...] = ()
    supervisors: tuple[SupervisorMetrics, ...] = ()
    groups: tuple[GroupMetrics, ...] = ()
    processes: tuple[ProcessMetrics, ...] = ()
    consumers: tuple[ConsumerMetrics, ...] = ()
    transactions: tuple[TransactionMetrics, ...] = ()
    drivers: tuple[LeaseHolder, ...] = ()
    """The drivers that have not given back their lease on a directory."""
    delayed: tuple[Waiting, ...] = ()
    """The units that hold delayed messages."""
    orphans: tuple[ProcessorId, ...] = ()
    """The units whose processors their graph has no more."""
    missing: tuple[ProcessorId, ...] = ()
    """The processors of the graph that have not run yet."""
    waits: tuple[Note, ...] = ()
    """The writers that wait for readers."""
    copies: tuple[FollowerSeen, ...] = ()
    old_read: OldRead | None = None
    """The read transaction that keeps many freed pages from being used again."""
    space: free_space.Space | None = None
    """The space of its disk."""
    noted: QueuesPlace | None = None
    """The directory in which the last run had its queues, if they were not in the store."""

    @property
    def messages(self) -> int:
        return sum(queue.messages for queue in self.queues)

    def last_stop(self, unit: str) -> RecordedFailure | None:
        """The last stop of a unit by an error; None if there was none."""
        stops = (supervisor.record.stopped.get(unit) for supervisor in self.supervisors)
        return next((stop for stop in stops if stop is not None), None)

    def figures(self, order: Iterable[str] = ()) -> list[ProcessorFigures]:
        """The processors, those of ``order`` first; they are there without figures if they have none."""
        units: dict[ProcessorId, list[ProcessorMetrics]] = {ProcessorId(id): [] for id in order}
        for unit in self.processors:
            units.setdefault(processor_of(unit.processor), []).append(unit)
        stopped = [(unit, stop) for s in self.supervisors for unit, stop in s.record.stopped.items()]
        stopped.sort(key=lambda each: (not each[1].restarted, each[1].when))
        stops = {processor_of(unit): stop for unit, stop in stopped}
        return [ProcessorFigures(id, tuple(some), stops.get(id)) for id, some in units.items()]
