"""A directory of ``cues run --queues``, as operators use it: measured, read, and changed without Spark."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, NoReturn

from cues.base import clock, names
from cues.base.names import ProcessorId, ProcessorKey
from cues.base.texts import ago, count, size
from cues.engine.history import Point
from cues.engine.standing import TailerMetrics
from cues.errors import QueueNotFound, Unsupported
from cues.operate import steps
from cues.operate.changes import Growth, PlannedPurges, refuse_partition
from cues.operate.directory_reader import DirectoryReader
from cues.operate.failed import FailedMessages
from cues.operate.positions import Position
from cues.operate.processors import tailers_to_move
from cues.operate.reading import FoundMessage
from cues.operate.refused import Refused
from cues.operate.seeking import FORM, PlannedSeek, SeekRequest, subject_of, units_of
from cues.operate.shape import ProcessorShape, Shape, merged
from cues.operate.target import Target, queue_of
from cues.queues import tables
from cues.queues.committed import Isolation
from cues.spark.cluster import cleaning, inspection, lease, operations
from cues.spark.cluster.cleaning import PlannedMerge, Tell
from cues.spark.cluster.cleaning import PlannedVacuum as PlannedVacuum
from cues.spark.cluster.directory import PartitionLog
from cues.spark.cluster.files import Files, open_files
from cues.spark.cluster.inspection import ProcessorRecord
from cues.steps.delays import waiting_of
from cues.steps.error_records import ErrorRecord
from cues.tools import metrics
from cues.tools.measurement import Measurement, ProcessorMetrics, QueueMetrics

FEEDER: Final = "feeder"
"""The kind of a processor that copies the queue of a source into the directory."""


class DirectoryPlace:
    """A directory. Nothing is open between two calls."""

    kind: ClassVar = "directory"
    look_every_s: ClassVar = 2.0
    """The shortest time between two measurements: in an object store each is many requests."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def __enter__(self) -> DirectoryPlace:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def require(self) -> None:
        """Do nothing: it exists."""

    @property
    def location(self) -> str:
        return self.target.location

    @property
    def files(self) -> Files:
        return open_files(self.location, make=False)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.target.text

    @property
    def called(self) -> str:
        """Its name at the beginning of a sentence."""
        return self.location

    def only_stores(self, what: str, hint: str) -> NoReturn:
        """Refuse: it is a directory. ``what`` is a subject and its verb, such as ``cues redrive is``."""
        raise Refused(f"{what} for stores, and {self.location} is a directory of cues run --queues.", hint)

    def only_directories(self, what: str, hint: str) -> DirectoryPlace:
        """This place: it is a directory. A store refuses."""
        return self

    # --- measure ---

    def measure(self) -> Measurement:
        """Measure it; with the name of a queue, this queue and the processors that read or write it.

        Counters, calls and latencies are not in the directory.
        """
        chosen = self.queue_of() if self.target.name else None
        logs = {queue: inspection.logs_of(self.location, queue) for queue in inspection.queues_of(self.location)}
        failures = metrics.failures_of(self._failed(log) for parts in logs.values() for log in parts)
        ends = {log.id: log.next for parts in logs.values() for log in parts}
        drivers = tuple(lease.holders(self.files))
        running = {driver.graph for driver in drivers if driver.state == "runs"}
        units, delayed = [], []
        for last in inspection.processors_of(self.location):
            if chosen in (None, *last.positions, *last.record.ends_after()):
                failed = failures.get(last.processor, metrics.Failures())
                units.append(self._unit(last, ends, failed, last.processor.partition(".")[0] in running))
                if last.record.delayed is not None:
                    delayed.append(waiting_of(last.processor, *last.record.delayed))
        queues = tuple(self._queue(queue, parts) for queue, parts in logs.items() if chosen in (None, queue))
        stored = sum(queue.bytes for queue in queues)
        about = (self.location, "shared directory", stored, queues, tuple(units))
        return Measurement(*about, drivers=drivers, delayed=tuple(delayed))

    def _unit(
        self, last: ProcessorRecord, ends: dict[str, int], failed: metrics.Failures, is_running: bool
    ) -> ProcessorMetrics:
        tailers = []
        for tailer, (_, position) in last.record.positions.items():
            log = last.queue_of(tailer)
            lag = inspection.feeder_lag(self.location, last, log) if last.is_feeder else None
            if not last.is_feeder and log in ends:
                lag = max(0, ends[log] - position)
            tailers.append(TailerMetrics(tailer, log, position, lag))
        return ProcessorMetrics(
            ProcessorId(last.processor),
            FEEDER if last.is_feeder else "",
            last.record.epoch,
            0,
            None,
            tuple(tailers),
            None,
            inspection.rate_of(self.location, last),
            last.committed,
            failed.count,
            failed.last,
            timer=inspection.next_timer(self.location, last),
            driver=last.record.owner,
            record=last.record.number,
            is_running=is_running,
        )

    def _queue(self, queue: str, logs: list[PartitionLog]) -> QueueMetrics:
        parts = [_log(log) for log in logs]
        whole = parts[0]
        if len(parts) > 1:
            whole = replace(
                whole,
                first=min(part.first for part in parts),
                last=max(part.last for part in parts),
                bytes=sum(part.bytes for part in parts),
                files=sum(part.files or 0 for part in parts),
                appended=max((part.appended for part in parts if part.appended), default=None),
                partitions=tuple(parts),
            )
        return replace(whole, queue=queue, writer=inspection.writer_of(self.location, queue))

    def history(self, span: str, processor: str = "") -> dict[str, list[Point]]:
        """Empty: the history of a graph is beside its own store."""
        return {}

    def headline(self, seen: Measurement) -> str:
        """The first lines of its status."""
        messages, stored = count(seen.messages, "message"), size(seen.disk_bytes)
        lines = [f"{self.name}: {count(len(seen.queues), 'queue')} in files, {messages}, {stored}"]
        for driver in seen.drivers:
            since = f", since {ago(driver.since)}" if driver.since else ""
            answers = f"; its last answer was {ago(driver.beat)}" if driver.state == "does not answer" else ""
            lines.append(f"{driver.graph}: the driver {driver.pid} on {driver.host} {driver.state}{since}{answers}")
        return "\n".join(lines if seen.drivers else [*lines, "Not running"])

    def lines(self, seen: Measurement) -> list[dict[str, Any]]:
        """A measurement as JSON objects: queues; the inputs of units; drivers."""
        held = {held.unit: {"messages": held.messages, "next": held.next} for held in seen.delayed}
        units = ({**line, "delayed": held.get(u.processor)} for u in seen.processors for line in _unit_lines(u))
        return [*map(_figures, seen.queues), *units, *map(vars, seen.drivers)]

    def queues(self, everything: bool = False) -> list[QueueMetrics]:
        """Measure the queues; or the queue that the target names."""
        if everything:
            raise Refused(
                f"--all is for stores; the steps of processors are not queues in {self.location}.",
                "list them with cues tries.",
            )
        queues = [self.queue_of()] if self.target.name else inspection.queues_of(self.location)
        return [self._queue(queue, inspection.logs_of(self.location, queue)) for queue in queues]

    def queue_line(self, queue: QueueMetrics) -> dict[str, Any]:
        """A queue as a JSON object."""
        line = _figures(queue) | {"graph": queue.writer}
        return line | {"first_index": line.pop("first"), "last_index": line.pop("last")}

    def queue_of(self) -> str:
        """The queue that the target names. Raises :class:`QueueNotFound` if the directory does not have it."""
        return queue_of(self.target, inspection.queues_of(self.location))

    # --- read ---

    def reader(self, isolation: Isolation = "uncommitted") -> DirectoryReader:
        """A reader of the queue that the target names."""
        if isolation == "committed":
            raise Refused(
                "--isolation committed reads the queues of a store, and this is a directory of queues.",
                "leave the option out: messages come to such a directory when they are committed.",
            )
        return DirectoryReader(self.location, self.queue_of())

    def reader_of(self, queue: str, partition: int | None = None) -> DirectoryReader:
        """A reader of a queue, or of one partition of it."""
        if queue.partition("/")[0] not in inspection.queues_of(self.location):
            raise QueueNotFound(f"The directory has no queue {queue!r}.", "go to another one.", queue=queue)
        return DirectoryReader(self.location, queue if partition is None else f"{queue}/{partition}")

    def tables(self, metadata: bool) -> Mapping[str, Callable[[], Callable[[], Any]]]:
        """The tables of :mod:`cues.operate.sql` by name. Each is in memory while it is read."""
        return {name: functools.partial(self._table, name, metadata) for name in inspection.queues_of(self.location)}

    def _table(self, name: str, metadata: bool) -> Callable[[], Any]:
        found = [each for each in self.reader_of(name).forward() if isinstance(each, FoundMessage)]
        facts: dict[str, list[Any]] = {
            "q/partition": [each.partition for each in found],
            "q/index": [each.index for each in found],
            "q/time": [each.time for each in found],
        }
        table = tables.table_of("arrow", [each.message for each in found], None, facts if metadata else None)
        return lambda: table

    # --- processors ---

    def shape(self) -> Shape:
        """The processors that have run, with the queues that they read and write."""
        shapes = []
        for last in inspection.processors_of(self.location):
            if not last.is_feeder:
                reads = dict.fromkeys(names.split_log(log)[0] for log in last.positions)
                writes = dict.fromkeys(names.split_log(log)[0] for log in last.record.ends_after())
                kind = "stream" if writes else "sink"
                shapes.append(ProcessorShape(last.processor, kind, list(reads), list(writes)))
        return merged(shapes)

    def processors(self) -> list[ProcessorId]:
        """The units of processors that have run."""
        return [ProcessorId(last.processor) for last in inspection.processors_of(self.location)]

    def steps(self, unit: ProcessorId, most: int | None) -> list[dict[str, Any]]:
        """The last steps of a unit, oldest first; None: all that are kept."""
        # A step has two records if its function has side effects. The record before the first shows its beginning.
        read = None if most is None else 2 * most + 1
        found = steps.of_records(inspection.records_of(self.location, unit, read))
        return found if most is None else found[-most:] if most else []

    def step_that_wrote(self, processor: str, hash: str) -> None:
        """Return None: records do not have the hashes of the parts of a step."""

    def readings(self, shape: Shape, log: str, message: FoundMessage) -> NoReturn:
        """Refused: :class:`Unsupported`."""
        raise Unsupported(
            "Messages of a shared directory carry no metadata along, so nothing says what was made from them.",
            "look at the steps of the processors that read the queue.",
        )

    def state(self, unit: ProcessorId, start: bytes, count: int) -> NoReturn:
        """Refused: :class:`Unsupported`."""
        raise Unsupported("The state of a processor on Spark is in files that the page does not read.", "")

    def state_of(self, unit: ProcessorId, key: Any, count: int) -> NoReturn:
        """Refused: :class:`Unsupported`."""
        self.state(unit, b"", count)

    # --- failed messages ---

    @contextlib.contextmanager
    def errors(self, declared: Collection[str] = (), queue: str = "") -> Iterator[FailedMessages]:
        """The failed messages, for the block; of one ``queue`` or partition, if it is named.

        None of them is settled: nothing is redriven in a directory.
        """
        name = queue or self.target.name

        def logs() -> Iterator[Callable[[bool], Iterator[ErrorRecord]]]:
            for found in inspection.queues_of(self.location):
                for log in inspection.logs_of(self.location, found) if name.partition("/")[0] in ("", found) else ():
                    if name in ("", found, log.id):
                        yield functools.partial(self._failed, log)

        failed = FailedMessages(logs, lambda index: [record for record in failed.records() if record.index == index])
        yield failed

    def _failed(self, log: PartitionLog, settled: bool = False) -> Iterator[ErrorRecord]:
        """The error messages at the end of a partition, last first."""
        for read in inspection.backwards(self.location, log):
            if read.message.get(names.TYPE) != names.PROCESSOR_ERROR:
                return
            unit = ProcessorId(str((read.message.get(names.ERR_CONFIG) or {}).get("id")))
            yield ErrorRecord(log.id, read.index, read.time, unit, read.message, None, b"", None, ProcessorKey(unit))

    # --- change ---

    @contextlib.contextmanager
    def seeking(self, request: SeekRequest) -> Iterator[PlannedSeek]:
        """A move of positions that can be made in the block. Meanwhile no driver runs the graph."""
        request.refuse_state(self.name, "a directory of cues run --queues")
        if request.again:
            self.only_stores(
                "--again is",
                "leave it out; if a sink keeps process.delivery in its target, delete its rows there first.",
            )
        units = units_of(self.target, self.processors(), request.to)
        with operations.running_none(self.files, units[0].partition(".")[0]) as driver:
            operations.settle(driver)
            moves = {unit: self._move(unit, request) for unit in units}

            def apply() -> Iterator[tuple[str, dict[str, Any]]]:
                for unit, (positions, words) in moves.items():
                    record = operations.seek(driver, unit, positions)
                    facts = {"positions": positions, "epoch": record.epoch, "record": record.number}
                    yield f"{unit} moved: {words}", {"processor": unit, **facts}

            yield PlannedSeek(subject_of(units), "; ".join(words for _, words in moves.values()), apply)

    def _move(self, unit: str, request: SeekRequest) -> tuple[dict[str, int], str]:
        """The new positions of one unit, and what they mean."""
        (last,) = inspection.records_of(self.location, unit, 1)
        if last.is_feeder or not last.positions:
            raise Unsupported(
                f"{unit} copies from a source, which keeps its own position.",
                "start it over with: cues run --engine spark --queues DIR --fresh.",
            )
        if last.record.batch is not None:
            raise Unsupported(
                f"{unit} is a frame that keeps state, which belongs to all messages up to its position.",
                "give it another id in the graph, so that it begins at the first message; or start over with: cues run"
                " --engine spark --queues DIR --fresh.",
            )
        positions, words = {}, []
        for id in tailers_to_move(unit, request.to, request.tailer, list(last.record.positions), FORM):
            log, before = last.queue_of(id), last.record.positions[id][1]
            alone = log if "/" in log else f"{log}/0"
            (index,) = inspection.QueueReader(self.location, alone).place_of(request.to, "--to")
            positions[id] = index
            effect = f"{count(abs(index - before), 'message')} {'skipped' if index > before else 'processed again'}"
            words.append(f"{log} from {before:,} to {index:,} ({effect})")
        return positions, ", ".join(words)

    @contextlib.contextmanager
    def purging(self, before: Position) -> Iterator[PlannedPurges]:
        """A purge of the queue that the target names. Meanwhile no driver runs the graph that writes the queue."""
        queue = self.queue_of()
        writer = inspection.writer_of(self.location, queue.partition("/")[0]) or ""
        with operations.running_none(self.files, writer) as driver:
            reader = inspection.QueueReader(self.location, queue)
            indices = {log.id: index for log, index in zip(reader.logs, reader.place_of(before, "--before"))}

            def apply(force: bool) -> None:
                for log, index in indices.items():
                    operations.purge(driver, log, index, "drop" if force else "refuse")

            plans = [operations.plan_purge(self.files, log, index).plan for log, index in indices.items()]
            yield PlannedPurges(plans, apply)

    @contextlib.contextmanager
    def growing(self) -> Iterator[Growth]:
        """The queue that the target names, which can get more partitions in the block."""
        queue = self.queue_of()
        refuse_partition(self.target, queue)
        directory = operations.growing(self.files, queue)
        yield Growth(queue, directory.options.partitions, directory.options.key, directory.grow)

    def vacuums(self) -> list[PlannedVacuum]:
        """The files that are in no log any more, of each queue or of the one that the target names."""
        return [cleaning.plan_vacuum(self.files, queue) for queue in self._whole_queues()]

    def vacuum(self, plan: PlannedVacuum, tell: Tell) -> PlannedVacuum:
        """Delete the files of a plan. Return what was deleted."""
        return cleaning.vacuum(self.files, plan, tell)

    def merges(self) -> list[PlannedMerge]:
        """The small files that can become large ones, of each queue or of the one that the target names."""
        return [cleaning.plan_merge(self.files, queue) for queue in self._whole_queues()]

    def merge(self, plan: PlannedMerge, tell: Tell) -> PlannedMerge:
        """Merge the files of a plan. Return what was merged."""
        return cleaning.merge(self.files, plan, tell)

    def _whole_queues(self) -> list[str]:
        if not self.target.name:
            return inspection.queues_of(self.location)
        queue = self.queue_of()
        name, slash, _ = queue.partition("/")
        if slash:
            message = f"{queue} is a partition, and the files of a queue are in one folder."
            raise Refused(message, self.target.again(name))
        return [name]

    # --- check ---

    def check(self, tell: Callable[[str, int, int], None]) -> list[str]:
        """The damage, one sentence each."""
        return inspection.problems_of(self.location, tell)

    repair: ClassVar = "restore the directory from a copy."
    """The remedy for damage."""

    def adopt(self) -> bool:
        """Return False: any copy of a directory is one."""
        return False


def _log(log: PartitionLog) -> QueueMetrics:
    newest = max((file.modified_ms for file in log.live), default=None)
    return QueueMetrics(
        f"{log.directory.queue}/{log.partition}",
        log.first,
        log.next - 1,
        sum(file.size for file in log.live),
        None,
        None if newest is None else clock.to_datetime(newest * 1_000_000),
        None,
        growth=None,
        files=len(log.live),
    )


def _figures(queue: QueueMetrics) -> dict[str, Any]:
    figures = {
        name: getattr(queue, name) for name in ("queue", "messages", "first", "last", "files", "bytes", "appended")
    }
    return figures | ({"partitions": len(queue.partitions)} if queue.partitions else {})


def _unit_lines(unit: ProcessorMetrics) -> Iterator[dict[str, Any]]:
    about: dict[str, Any] = {"processor": unit.processor, "record": unit.record, "committed": unit.stepped}
    about |= {"epoch": unit.epoch, "owner": unit.driver, "rate": unit.rate, "errors": unit.errors}
    about |= {"errors_more": unit.errors_more, "timer": unit.timer}
    about["last_error"] = vars(unit.last_error) if unit.last_error else None
    if not unit.tailers:  # a source that is a stream
        yield about
    for tailer in unit.tailers:
        yield about | {"queue": tailer.queue, "position": tailer.position, "lag": tailer.lag}
