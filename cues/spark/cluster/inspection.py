"""Reading a shared directory without Spark, with pyarrow, on the filesystems of this machine.

    last_messages    the last messages of a queue
    queues_of        its queues; read_queue: the files of one
    processors_of    the last record of each processor
    problems_of      the damage

The log decides which files count (directory.py). For other filesystems use ``spark.read.parquet``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq

from cues import codec
from cues.errors import CuesError, Diverged
from cues.spark.cluster.directory import LOG, DataFile, entries_of, live_files
from cues.spark.cluster.files import folder_of
from cues.spark.cluster.ledger import LedgerRecord


@dataclass(frozen=True)
class InspectedMessage:
    index: int
    time: Any
    """An aware datetime."""
    hash: str | None
    message: dict[str, Any]


def last_messages(place: Path, queue: str, count: int | None) -> Iterator[InspectedMessage]:
    """The last ``count`` messages of a queue; None: all."""
    folder = place / folder_of(queue)
    files = read_queue(place, queue)
    first = files[-1].next - count if files and count is not None else 0
    for file in files:
        if file.next > first:
            yield from _messages(folder / file.name, first)


def _messages(path: Path, first: int) -> Iterator[InspectedMessage]:
    for rows in pq.ParquetFile(path).iter_batches(columns=["index", "time", "hash", "value"]):
        for index, time, hash, value in zip(*(column.to_pylist() for column in rows.columns)):
            if index >= first:
                in_utc = time.replace(tzinfo=UTC)  # Spark writes no zone, and means UTC
                yield InspectedMessage(index, in_utc, hash, codec.unpack(value))


def queues_of(place: Path) -> list[str]:
    """The names of the queues of a directory; empty for other directories."""
    return sorted(unquote(path.parent.parent.name) for path in place.glob("*/_cues/queue.json"))


def read_queue(place: Path, queue: str) -> tuple[DataFile, ...]:
    """The files of a queue that count. Raises :class:`Diverged` if an entry of its log is missing."""
    log = place / folder_of(queue) / LOG

    def read(name: str) -> str:
        try:
            return (log / name).read_text()
        except FileNotFoundError:
            raise Diverged(f"Entry {name} of the log of queue {queue!r} is missing.") from None

    return live_files(entries_of(path.name for path in log.glob("[0-9]*")), read)


@dataclass(frozen=True)
class LastRecord:
    """The last record of a processor."""

    processor: str
    record: LedgerRecord
    committed: datetime

    @property
    def positions(self) -> dict[str, int]:
        """By queue: the index that is taken next. A feeder's is an index of the queue in the driver's store."""
        return {tailer.removeprefix(f"{self.processor}."): next for tailer, (_, next) in self.record.positions.items()}

    @property
    def is_feeder(self) -> bool:
        """True if it copies the queue of a source into the directory."""
        return self.processor.endswith(".feed")


def processors_of(place: Path) -> list[LastRecord]:
    """The last record of each processor that has run on the directory, by name."""
    last = []
    for folder in sorted((place / "_cues" / "steps").glob("*")):
        numbers = [int(path.stem) for path in folder.glob("[0-9]*.json")]
        if numbers:
            text = (folder / f"{max(numbers):012d}.json").read_text()
            committed = datetime.fromisoformat(json.loads(text)["time"])
            last.append(LastRecord(unquote(folder.name), LedgerRecord.of(max(numbers), text), committed))
    return last


def problems_of(place: Path) -> list[str]:
    """The damage of a directory, one sentence each: what a start would refuse, and files with other contents."""
    problems = []
    ends: dict[str, int] = {}
    for queue in queues_of(place):
        try:
            files = read_queue(place, queue)
        except CuesError as error:
            problems.append(error.message)
            continue
        ends[queue] = files[-1].next if files else 1
        for file in files:
            path = place / folder_of(queue) / file.name
            try:
                count = pq.read_metadata(path).num_rows
            except (OSError, ValueError) as error:
                reason = "is missing" if not path.exists() else f"cannot be read ({error})"
                problems.append(f"{path.name} of queue {queue!r} {reason}.")
            else:
                if count != file.count:
                    problems.append(f"{path.name} of queue {queue!r} has {count} messages, not {file.count}.")
    records = processors_of(place)
    numbers = {last.processor: last.record.number for last in records}
    for queue in ends:
        for file in read_queue(place, queue):
            writer, number, _ = file.name.split("-", 2)[2].rsplit("-", 2)
            processor = unquote(writer.removeprefix("by-"))
            if not file.merged and int(number) > numbers.get(processor, -1):
                problems.append(f"{file.name} of queue {queue!r} is of a record of {processor} that is missing.")
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
        missing = [name for name in last.record.state if not (place / name).exists()]
        problems += [f"{name}, a part of the state of {last.processor}, is missing." for name in missing]
    return problems
