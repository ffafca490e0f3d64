"""Reading a shared directory without Spark. Nothing in it is changed.

QueueReader      the messages of a queue
queues_of        the queues of a directory; logs_of: the partitions of one
processors_of    the last record of each processor; records_of: the last records of one; rate_of: its messages a second
next_timer       the time of the first timer of a processor
feeder_lag       the number of messages of a source that are not in the directory yet
problems_of      the damage

A directory is given by its place: a path or a URL (files.py). It must exist.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import socket
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import pyarrow as pa

from cues.base import clock, names
from cues.base.data import dataclass
from cues.errors import CodecError, CuesError, InvalidArgument, QueueNotFound
from cues.queues.base import check_index, view_of
from cues.queues.options import QueueOptions
from cues.queues.store import Store
from cues.spark.cluster import state_files
from cues.spark.cluster.batches import Batches
from cues.spark.cluster.data import Piece, messages, opened, pieces_of, read
from cues.spark.cluster.delays import first_timer, held
from cues.spark.cluster.directory import DataFile, PartitionLog, QueueDirectory, problems_of_log
from cues.spark.cluster.files import ID, Files, folder_of, identity_of, name_of, open_files, parsed, time_of
from cues.spark.cluster.ledger import LedgerRecord

Place = str | os.PathLike[str]
RATE_S: Final = 10.0
_STRETCH_MAX: Final = 256
"""Most messages that are read at once to go backward. The first stretches are shorter."""
_RATE_RECORDS: Final = 64
"""Most records that are read for a rate."""


@dataclass(frozen=True)
class InspectedMessage:
    partition: int
    index: int
    time: datetime
    """With a zone."""
    hash: str | None
    message: dict[str, Any]


class QueueReader:
    """The messages of one queue, or of one of its partitions, to which a driver may add more meanwhile.

    A place on it is an index for each of its :attr:`logs`.
    """

    def __init__(self, place: Place, queue: str) -> None:
        """Read the log of the queue; ``queue`` may be a partition, as ``orders/3``.

        Raises :class:`QueueNotFound` for an unknown queue.
        """
        self._files = _files(place)
        self._queue, slash, partition = queue.partition("/")
        self._made = self._record()
        with self._unless_gone():
            self.directory = QueueDirectory(self._files, self._queue, QueueOptions(), make=False)
        logs = self.directory.logs
        if slash and not (partition.isdecimal() and int(partition) < len(logs)):
            raise QueueNotFound(
                f"The queue {self._queue!r} in {self._files.url} has no partition {partition}; it has {len(logs)}.",
                f"name the whole queue, {self._queue}, or one partition from {self._queue}/0 on.",
                queue=queue,
            )
        self.logs = [logs[int(partition)]] if slash else list(logs)

    def _record(self) -> bytes | None:
        return self._files.read(f"{folder_of(self._queue)}/_cues/queue.json")

    def _gone(self) -> QueueNotFound:
        return QueueNotFound(
            f"The queue {self._queue!r} is not in {self._files.url}, or is a new one of that name.",
            "start the command again, if its graph was started over.",
            queue=self._queue,
        )

    @contextlib.contextmanager
    def _unless_gone(self) -> Iterator[None]:
        """Raise :class:`QueueNotFound` if the queue was removed: files that are deleted now look like damage."""
        try:
            yield
        except CuesError as error:
            if self._made is None or self._record() != self._made:
                raise self._gone() from error
            raise

    def has_more(self, place: Sequence[int]) -> bool:
        """Return True if there are messages after a place. Raises :class:`QueueNotFound` if the queue was removed."""
        with self._unless_gone():
            more = any(log.reaches(index + 1) for log, index in zip(self.logs, place))
        if self._record() != self._made:
            raise self._gone()
        return more

    def read(self, place: Sequence[int]) -> Iterator[InspectedMessage]:
        """The messages after a place that were there at the last look. Several partitions are merged by time."""
        with self._unless_gone():
            parts = [_read(self._files, log, start, log.next) for log, start in zip(self.logs, place)]
            yield from heapq.merge(*parts, key=lambda read: (read.time, read.partition))

    def backward(self, place: Sequence[int]) -> Iterator[InspectedMessage]:
        """The messages before a place, last first. Several partitions are merged by time."""
        with self._unless_gone():
            parts = [_backward(self._files, log, stop) for log, stop in zip(self.logs, place)]
            yield from heapq.merge(*parts, key=lambda read: (read.time, read.partition), reverse=True)

    def last(self, count: int | None, matches: Callable[[dict[str, Any]], Any] | None = None) -> list[int]:
        """The place of the first of the last ``count`` messages that match; None: of the first message."""
        starts = [self._last(log, count, matches) for log in self.logs]
        if count is None or len(starts) == 1:
            return starts
        place = [log.next for log in self.logs]
        numbers = {log.partition: number for number, log in enumerate(self.logs)}
        chosen = (each for each in self.read(starts) if matches is None or matches(each.message))
        for each in reversed(deque(chosen, maxlen=count)):
            place[numbers[each.partition]] = each.index
        return place

    def _last(self, log: PartitionLog, count: int | None, matches: Callable[[dict[str, Any]], Any] | None) -> int:
        if count is None:
            return log.first
        if matches is None:
            return max(log.first, log.next - count)
        last: list[int] = []
        for file in reversed(log.live):
            if len(last) >= count:
                break
            with self._unless_gone():
                part = messages(self._files, [Piece(self.directory.folder, file, 0, file.count)])
                last = [index for index, _, _, message in part if matches(message)] + last
        return [*last, log.next][-count - 1 :][0]

    def place_of(self, place: str | int | datetime, what: str) -> list[int]:
        """A place: ``"start"``, ``"end"``, an index of the only partition, or a time.

        ``what`` names the option in an error. For a time it is the first message that was written at it or after it.
        """
        if isinstance(place, int) and len(self.logs) > 1:
            raise InvalidArgument(
                f"{self._queue} has {len(self.logs)} partitions, and an index belongs to one.",
                f"give {what} a time, or name a partition: {self._queue}/0.",
            )
        return [self._index_of(log, place, what) for log in self.logs]

    def _index_of(self, log: PartitionLog, place: str | int | datetime, what: str) -> int:
        if isinstance(place, datetime):
            when_us = clock.to_ns(place) // 1000
            at = bisect_left(log.live, when_us, key=lambda file: self._times_us(file)[-1].as_py())
            return log.next if at == len(log.live) else log.live[at].first + self._before(log.live[at], when_us)
        if isinstance(place, str):
            return log.first if place == "start" else log.next
        return max(log.first, check_index(place, log.next, f"{what} {place} (queue {log.id})"))

    def _times_us(self, file: DataFile) -> pa.ChunkedArray:
        with self._unless_gone():
            rows = read(self._files, Piece(self.directory.folder, file, 0, file.count), ["time"])
        return rows.column("time").cast(pa.int64())

    def _before(self, file: DataFile, when_us: int) -> int:
        return bisect_left(self._times_us(file).to_pylist(), when_us)


def _files(place: Place) -> Files:
    return open_files(os.fspath(place))


def queues_of(place: Place) -> list[str]:
    """The names of the queues of a directory."""
    files = _files(place)
    return sorted(name_of(name) for name in files.names("") if files.size(f"{name}/_cues/queue.json") is not None)


def writer_of(place: Place, queue: str) -> str | None:
    """The graph that writes a queue."""
    files, name = _files(place), f"{folder_of(queue)}/_cues/writer.json"
    raw = files.read(name)
    return None if raw is None else str(parsed(files, name, raw, {"graph": str})["graph"])


def logs_of(place: Place, queue: str) -> list[PartitionLog]:
    """The partitions of a queue. Raises :class:`Diverged` if its log is damaged."""
    return QueueDirectory(_files(place), queue, QueueOptions()).logs


def backwards(place: Place, log: PartitionLog) -> Iterator[InspectedMessage]:
    """The messages of a partition, last first. Ends at one of unknown types."""
    with contextlib.suppress(CodecError):
        yield from _backward(_files(place), log, log.next)


def _read(files: Files, log: PartitionLog, start: int, stop: int) -> Iterator[InspectedMessage]:
    for index, time_us, hash, message in messages(files, pieces_of(log.directory.folder, log.live, start, stop)):
        yield InspectedMessage(log.partition, index, clock.to_datetime(time_us * 1000), hash, message)


def _backward(files: Files, log: PartitionLog, stop: int) -> Iterator[InspectedMessage]:
    size = 1
    while stop > log.first:
        low = max(log.first, stop - size)
        yield from reversed(list(_read(files, log, low, stop)))
        stop, size = low, min(_STRETCH_MAX, size * 4)


@dataclass(frozen=True)
class ProcessorRecord:
    """A record of a processor."""

    processor: str
    record: LedgerRecord
    fields: dict[str, Any]
    """The record as it is in its file."""

    @property
    def committed(self) -> datetime:
        return datetime.fromisoformat(self.fields["time"])

    @property
    def positions(self) -> dict[str, int]:
        """By log id: the index that is taken next. A feeder's is an index of the queue in the driver's store."""
        return {self.queue_of(tailer): next for tailer, (_, next) in self.record.positions.items()}

    def queue_of(self, tailer: str) -> str:
        """The log that a tailer of the processor reads."""
        return tailer.rpartition(".")[2]

    @property
    def is_feeder(self) -> bool:
        """True if it copies the queue of a source into the directory."""
        return self.processor.count(".") > 1  # <graph>.<queue>.feed; no name has a dot


def processors_of(place: Place) -> list[ProcessorRecord]:
    """The last record of each processor that has run on the directory, by name."""
    processors = sorted(map(name_of, _files(place).names("_cues/steps")))
    return [last for processor in processors for last in records_of(place, processor, 1)]


def settled_processors_of(place: Place) -> list[ProcessorRecord]:
    """:func:`processors_of`, and these records are durable: messages and files that they do not need may be deleted."""
    found = processors_of(place)
    for last in found:
        _files(place).settle(f"_cues/steps/{folder_of(last.processor)}")
    return found


def rate_of(place: Place, last: ProcessorRecord) -> float:
    """Messages a second that a processor took (a source: wrote), over the last :data:`RATE_S`."""
    files, folder = _files(place), f"_cues/steps/{folder_of(last.processor)}"
    since = clock.to_datetime(clock.now_ns()) - timedelta(seconds=RATE_S)
    if last.committed < since:
        return 0.0
    count = 0
    for name in reversed(files.names(folder)[-_RATE_RECORDS:]):
        raw = files.read(f"{folder}/{name}")
        fields = {} if raw is None else parsed(files, f"{folder}/{name}", raw, {"time": str, "counts?": {str: int}})
        if not fields or time_of(files, f"{folder}/{name}", fields["time"]) < since:
            break
        counts = fields.get("counts", {})
        count += counts.get("taken", counts.get("written", 0))
    return count / RATE_S


def next_timer(place: Place, last: ProcessorRecord) -> datetime | None:
    """The time of the first timer of a processor that is set and has not fired; None without one.

    If files of timers or of the state are damaged, it may be the time of one that was replaced.
    """
    record = last.record
    while True:
        try:
            due = [(file, record.moved[id]) for id, file in record.due.items() if names.is_timer_queue(id)]
            first_ns = first_timer(_files(place), last.processor, record.state, record.timers, due)
        except CuesError:
            (now,) = records_of(place, last.processor, 1)  # a running driver deletes files that it needs no more
            if now.record.number != record.number:
                record = now.record
                continue
            first_ns = min((run.next_ns for run in record.timers), default=None)
        return None if first_ns is None else clock.to_datetime(first_ns)


def feeder_lag(place: Place, last: ProcessorRecord, log: str) -> int | None:
    """The messages of a source's log that the feeder has not copied; None if the store is not on this machine."""
    files = _files(place)
    identity, next = last.record.positions[log]
    queue, partition = names.split_log(log)
    raw = files.read(f"_cues/{folder_of(last.processor.partition('.')[0])}.store.json")
    with contextlib.suppress(CuesError, OSError, KeyError):
        noted = parsed(files, "the note of the store", raw or b"{}", {"host": str, "store": str})
        if noted["host"] == socket.gethostname() and os.path.exists(os.path.join(noted["store"], "data.mdb")):
            with Store(noted["store"], readonly=True) as store:
                row = view_of(store.queue(queue), partition).core.row()
                if row.identity.hex() == identity:
                    return row.next - next
    return None


def records_of(place: Place, processor: str, count: int | None) -> list[ProcessorRecord]:
    """The last ``count`` records of a processor, oldest first; None: all that are kept."""
    files, folder = _files(place), f"_cues/steps/{folder_of(processor)}"
    names = files.names(folder)
    found = [_record_of(files, processor, f"{folder}/{name}") for name in (names if count is None else names[-count:])]
    return [record for record in found if record is not None]


def _record_of(files: Files, processor: str, name: str) -> ProcessorRecord | None:
    """A record; None if the driver has deleted it, because it is old."""
    raw = files.read(name)
    if raw is None:
        return None
    fields = parsed(files, name, raw, {"time": str})
    time_of(files, name, fields["time"])
    return ProcessorRecord(
        processor, LedgerRecord.of(int(name.rpartition("/")[2].removesuffix(".json")), fields), fields
    )


def problems_of(place: Place, tell: Callable[[str, int, int], None] = lambda what, done, total: None) -> list[str]:
    """The damage of a directory, one sentence each: what a start would refuse, and files with other contents.

    It reads all files. ``tell`` is called after each file, with what is checked, and how much of it: messages of a
    queue, files of a state.
    """
    problems = list(_problems_of_names(place))
    ends: dict[str, int] = {}
    records: list[ProcessorRecord] = []
    files = _files(place)
    for processor in sorted(map(name_of, files.names("_cues/steps"))):
        folder = f"_cues/steps/{folder_of(processor)}"
        last = None
        for name in files.names(folder):
            try:
                last = _record_of(files, processor, f"{folder}/{name}") or last
            except CuesError as error:
                problems.append(error.message)
                last = None
        records += [] if last is None else [last]
    for queue in queues_of(place):
        damage = [error.message for error in problems_of_log(files, folder_of(queue))]
        problems += damage
        try:
            logs = logs_of(place, queue)
        except CuesError as error:
            problems += [] if error.message in damage else [error.message]
            continue
        ends |= {log.id: log.next for log in logs}
        live = [file for log in logs for file in log.live]
        problems += _problems_of_files(place, queue, live, tell)
        problems += _problems_of_writers(logs[0].directory, live, records)
    for last in records:
        wanted = {} if last.is_feeder else dict(last.positions)
        for log, end in last.record.ends.items():
            wanted[log] = max(end, wanted.get(log, 1))
        for log, end in wanted.items():
            if log in ends and ends[log] < end:
                problems.append(
                    f"{last.processor} has messages up to {end - 1} of queue {log!r}, which ends with {ends[log] - 1}."
                )
        if last.record.batch is not None:
            problems += _problems_of_batches(place, last)
        problems += _problems_of_state(place, last, tell)
    return problems


def _problems_of_batches(place: Place, last: ProcessorRecord) -> Iterator[str]:
    """The damage of the batches of a frame that keeps state."""
    assert last.record.batch is not None
    number, chain = last.record.batch
    batches = Batches(_files(place), last.processor)
    try:
        held = [batches.need(n) for n in range(number + 1)]
    except CuesError as error:
        yield error.message
    else:
        if held[-1].chain != chain:
            yield f"Batch {number} of {last.processor} is not the one that its last record has committed."


def _problems_of_names(place: Place) -> Iterator[str]:
    """The damage of the small files of a directory and of its queues."""
    files = _files(place)
    for name in [ID, *(f"{folder_of(q)}/_cues/{kind}.json" for q in queues_of(place) for kind in ("queue", "writer"))]:
        raw = files.read(name)
        try:
            if raw is not None and name.endswith("/queue.json"):
                identity_of(files, name, raw)
            elif raw is not None:
                parsed(files, name, raw, {"id": str} if name == ID else {"graph": str})
        except CuesError as error:
            yield error.message


def _problems_of_writers(
    directory: QueueDirectory, live: list[DataFile], records: Sequence[ProcessorRecord]
) -> Iterator[str]:
    numbers = {last.processor: last.record.number for last in records}
    for writer in sorted({file.writer for file in live} | numbers.keys()):
        newest = directory.published(writer)
        if newest > numbers.get(writer, -1):
            yield f"Queue {directory.queue!r} has messages of record {newest} of {writer}, which is missing."


def _problems_of_files(
    place: Place, queue: str, live: list[DataFile], tell: Callable[[str, int, int], None]
) -> Iterator[str]:
    files, total, done = _files(place), sum(file.count for file in live), 0
    for file in live:
        try:
            with opened(files, Piece(folder_of(queue), file, 0, file.count)) as stored:
                stored.verify()
        except CuesError as error:
            yield error.message
        done += file.count
        tell(queue, done, total)


def _problems_of_state(place: Place, last: ProcessorRecord, tell: Callable[[str, int, int], None]) -> Iterator[str]:
    """The damage of the files of a processor's state, and of its delayed messages and timers."""
    files = _files(place)
    for folder, needed in last.record.needs(last.processor).items():
        is_state = folder == state_files.folder_of_state(last.processor)
        what = "state" if is_state else "delayed messages and timers"
        for done, name in enumerate(sorted(needed), 1):
            try:
                with state_files.opened(files, f"{folder}/{name}") if is_state else held(files, folder, name) as stored:
                    stored.verify()
            except CuesError as error:
                # A running driver merges such files, and deletes the old ones.
                now = records_of(place, last.processor, 1)
                if any(name in each.record.needs(each.processor)[folder] for each in now):
                    yield error.message
            tell(f"files of the {what} of {last.processor}", done, len(needed))
