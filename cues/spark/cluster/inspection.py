"""Reading a shared directory without Spark. Nothing in it is changed.

QueueReader      the messages of a queue; last_messages: its last ones
queues_of        the queues of a directory; read_queue: the files of one
processors_of    the last record of each processor; records_of: the last records of one; rate_of: its messages a second
feeder_lag       the number of messages of a source that are not in the directory yet
problems_of      the damage

A directory is given by its place: a path or a URL (files.py). It must exist.
"""

from __future__ import annotations

import contextlib
import os
import socket
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from cues.base import clock
from cues.errors import CodecError, CuesError, QueueNotFound
from cues.queues.base import check_index
from cues.queues.options import QueueOptions
from cues.queues.store import Store
from cues.spark.cluster.data import Piece, messages, pieces_of, read
from cues.spark.cluster.directory import DataFile, QueueDirectory, read_table, refuse_old
from cues.spark.cluster.files import ID, Files, folder_of, name_of, open_files, parsed
from cues.spark.cluster.ledger import LedgerRecord
from cues.spark.cluster.state_files import folder_of_state

Place = str | os.PathLike[str]
RATE_S: Final = 10.0
_RATE_RECORDS: Final = 64
"""Most records that are read for a rate."""


@dataclass(frozen=True)
class InspectedMessage:
    index: int
    time: datetime
    """With a zone."""
    hash: str | None
    message: dict[str, Any]


class QueueReader:
    """The messages of one queue, to which a driver may add more meanwhile."""

    def __init__(self, place: Place, queue: str) -> None:
        """Read the log of the queue. Raises :class:`QueueNotFound` for an unknown queue."""
        self._files = _files(place)
        self._queue = queue
        self._made = self._record()
        if self._made is None:
            raise self._gone()
        self.directory = QueueDirectory(self._files, queue, QueueOptions())

    def _record(self) -> bytes | None:
        return self._files.read(f"{folder_of(self._queue)}/_cues/queue.json")

    def _gone(self) -> QueueNotFound:
        return QueueNotFound(
            f"The queue {self._queue!r} is not in {self._files.url}, or is a new one of that name.",
            "start the command again, if its graph was started over.",
            queue=self._queue,
        )

    def reaches(self, index: int) -> bool:
        """Return True if the message ``index`` is there now. Raises :class:`QueueNotFound` if the queue was removed."""
        there = self.directory.reaches(index + 1)
        if self._record() != self._made:
            raise self._gone()
        return there

    def read(self, start: int) -> Iterator[InspectedMessage]:
        """The messages from an index on that were there at the last look."""
        log = self.directory
        for index, time_us, hash, message in messages(self._files, pieces_of(log.folder, log.live, start, log.next)):
            yield InspectedMessage(index, clock.to_datetime(time_us * 1000), hash, message)

    def last(self, count: int | None, matches: Callable[[dict[str, Any]], Any] | None = None) -> int:
        """The index of the first of the last ``count`` messages that match; None: of the first message."""
        log = self.directory
        if count is None:
            return log.first
        if matches is None:
            return max(log.first, log.next - count)
        found: list[int] = []
        for file in reversed(log.live):
            if len(found) >= count:
                break
            part = messages(self._files, [Piece(log.folder, file, 0, file.count)])
            found = [index for index, _, _, message in part if matches(message)] + found
        return [*found, log.next][-count - 1 :][0]

    def index_of(self, place: str | int | datetime, what: str) -> int:
        """The index of a place: ``"start"``, ``"end"``, an index, or a time. ``what`` names the option in an error.

        For a time it is the first message that was written at it or after it.
        """
        log = self.directory
        if isinstance(place, datetime):
            when_us = clock.to_ns(place) // 1000
            at = bisect_left(log.live, when_us, key=lambda file: self._times_us(file)[-1].as_py())
            return log.next if at == len(log.live) else log.live[at].first + self._before(log.live[at], when_us)
        if isinstance(place, str):
            return log.first if place == "start" else log.next
        return max(log.first, check_index(place, log.next, f"{what} {place} (queue {self._queue})"))

    def _times_us(self, file: DataFile) -> pa.ChunkedArray:
        rows = read(self._files, Piece(self.directory.folder, file, 0, file.count), ["time"])
        return rows.column("time").cast(pa.int64())

    def _before(self, file: DataFile, when_us: int) -> int:
        return bisect_left(self._times_us(file).to_pylist(), when_us)


def last_messages(place: Place, queue: str, count: int | None) -> Iterator[InspectedMessage]:
    """The last ``count`` messages of a queue; None: all."""
    reader = QueueReader(place, queue)
    return reader.read(reader.last(count))


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
    return None if raw is None else str(parsed(files, name, raw)["graph"])


def read_queue(place: Place, queue: str) -> list[DataFile]:
    """The files of a queue that count, by index. Raises :class:`Diverged` if its log is damaged."""
    files, folder = _files(place), folder_of(queue)
    refuse_old(files, folder)
    return sorted(read_table(files, folder)[1], key=lambda file: file.first)


def backwards(place: Place, queue: str, live: list[DataFile], most: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The last messages of a queue, last first: index, time in nanoseconds, message. Ends at one of unknown types."""
    stop = live[-1].next if live else 0
    least, size = max(live[0].first, stop - most) if live else 0, 1
    while stop > least:
        low = max(least, stop - size)
        try:
            some = list(messages(_files(place), pieces_of(folder_of(queue), live, low, stop)))
        except CodecError:
            return
        yield from ((index, time_us * 1000, message) for index, time_us, _, message in reversed(some))
        stop, size = low, most


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
        """By queue: the index that is taken next. A feeder's is an index of the queue in the driver's store."""
        return {self.queue_of(tailer): next for tailer, (_, next) in self.record.positions.items()}

    def queue_of(self, tailer: str) -> str:
        """The queue that a tailer of the processor reads."""
        return tailer.removeprefix(f"{self.processor}.")

    @property
    def is_feeder(self) -> bool:
        """True if it copies the queue of a source into the directory."""
        return self.processor.count(".") > 1  # <graph>.<queue>.feed; no name has a dot


def processors_of(place: Place) -> list[ProcessorRecord]:
    """The last record of each processor that has run on the directory, by name."""
    processors = sorted(map(name_of, _files(place).names("_cues/steps")))
    return [last for processor in processors for last in records_of(place, processor, 1)]


def rate_of(place: Place, last: ProcessorRecord) -> float:
    """Messages a second that a processor took (a source: wrote), over the last :data:`RATE_S`."""
    files, folder = _files(place), f"_cues/steps/{folder_of(last.processor)}"
    since = clock.to_datetime(clock.now_ns()) - timedelta(seconds=RATE_S)
    if last.committed < since:
        return 0.0
    count = 0
    for name in reversed(files.names(folder)[-_RATE_RECORDS:]):
        raw = files.read(f"{folder}/{name}")
        fields = {} if raw is None else parsed(files, f"{folder}/{name}", raw)
        if not fields or datetime.fromisoformat(fields["time"]) < since:
            break
        counts = fields.get("counts", {})
        count += counts.get("taken", counts.get("written", 0))
    return count / RATE_S


def feeder_lag(place: Place, last: ProcessorRecord) -> int | None:
    """The messages of a source's queue that its feeder has not copied; None if the store is not on this machine."""
    files = _files(place)
    ((queue, (identity, next)),) = last.record.positions.items()
    raw = files.read(f"_cues/{folder_of(last.processor.partition('.')[0])}.store.json")
    with contextlib.suppress(CuesError, OSError, KeyError):
        noted = parsed(files, "the note of the store", raw or b"{}")
        if noted["host"] == socket.gethostname() and os.path.exists(os.path.join(noted["store"], "data.mdb")):
            with Store(noted["store"], readonly=True) as store:
                row = store.queue(queue)._row()
                if row.identity.hex() == identity:
                    return row.next - next
    return None


def records_of(place: Place, processor: str, count: int | None) -> list[ProcessorRecord]:
    """The last ``count`` records of a processor, oldest first; None: all that are kept."""
    files, folder = _files(place), f"_cues/steps/{folder_of(processor)}"
    names = files.names(folder)
    found = []
    for name in names if count is None else names[-count:]:
        raw = files.read(f"{folder}/{name}")
        if raw is not None:  # else the driver has deleted it, because it is old
            fields = parsed(files, f"{folder}/{name}", raw)
            record = LedgerRecord.of(int(name.removesuffix(".json")), fields)
            found.append(ProcessorRecord(processor, record, fields))
    return found


def problems_of(place: Place) -> list[str]:
    """The damage of a directory, one sentence each: what a start would refuse, and files with other contents."""
    problems = list(_problems_of_names(place))
    ends: dict[str, int] = {}
    records: list[ProcessorRecord] = []
    for processor in sorted(map(name_of, _files(place).names("_cues/steps"))):
        try:
            records += records_of(place, processor, 1)
        except CuesError as error:
            problems.append(error.message)
    for queue in queues_of(place):
        try:
            live = read_queue(place, queue)
        except CuesError as error:
            problems.append(error.message)
            continue
        ends[queue] = live[-1].next if live else 1
        problems += _problems_of_files(place, queue, live)
        problems += _problems_of_writers(place, queue, live, records)
    for last in records:
        wanted = {} if last.is_feeder else dict(last.positions)
        for queue, end in last.record.ends.items():
            wanted[queue] = max(end, wanted.get(queue, 1))
        for queue, end in wanted.items():
            if queue in ends and ends[queue] < end:
                problems.append(
                    f"{last.processor} has messages up to {end - 1} of queue {queue!r}, which ends with"
                    f" {ends[queue] - 1}."
                )
        names = [name for run in last.record.state for name in run.files]
        stored = set(_files(place).names(folder_of_state(last.processor))) if names else set()
        missing = [name for name in names if name not in stored]
        problems += [f"{name}, a part of the state of {last.processor}, is missing." for name in missing]
    return problems


def _problems_of_names(place: Place) -> Iterator[str]:
    """The damage of the small files of a directory and of its queues."""
    files = _files(place)
    for name in [ID, *(f"{folder_of(q)}/_cues/{kind}.json" for q in queues_of(place) for kind in ("queue", "writer"))]:
        raw = files.read(name)
        try:
            if raw is not None:
                parsed(files, name, raw)
        except CuesError as error:
            yield error.message


def _problems_of_writers(
    place: Place, queue: str, live: list[DataFile], records: Sequence[ProcessorRecord]
) -> Iterator[str]:
    numbers = {last.processor: last.record.number for last in records}
    table, _ = read_table(_files(place), folder_of(queue))
    for writer in sorted({file.writer for file in live} | numbers.keys()):
        newest = None if table is None else table.transaction_version(writer)
        if newest is not None and newest > numbers.get(writer, -1):
            yield f"Queue {queue!r} has messages of record {newest} of {writer}, which is missing."


def _problems_of_files(place: Place, queue: str, live: list[DataFile]) -> Iterator[str]:
    files = _files(place)
    for file in live:
        try:
            with pq.ParquetFile(files.open(f"{folder_of(queue)}/{file.name}")) as opened:
                count = opened.metadata.num_rows
        except (OSError, ValueError) as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
            yield f"{file.name} of queue {queue!r} {reason}."
        else:
            if count != file.count:
                yield f"{file.name} of queue {queue!r} has {count} messages, not {file.count}."
