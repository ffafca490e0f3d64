"""Reading a shared directory without Spark.

last_messages    the last messages of a queue
queues_of        its queues; read_queue: the files of one
processors_of    the last record of each processor
problems_of      the damage
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from cues.base import clock
from cues.errors import CuesError
from cues.spark.cluster.data import messages, pieces_of
from cues.spark.cluster.directory import DataFile, read_table, refuse_old
from cues.spark.cluster.files import Files, folder_of, name_of, open_files
from cues.spark.cluster.ledger import LedgerRecord
from cues.spark.cluster.state_files import folder_of_state


@dataclass(frozen=True)
class InspectedMessage:
    index: int
    time: datetime
    """With a zone."""
    hash: str | None
    message: dict[str, Any]


def last_messages(place: Path, queue: str, count: int | None) -> Iterator[InspectedMessage]:
    """The last ``count`` messages of a queue; None: all."""
    live = read_queue(place, queue)
    if live:
        next = live[-1].next
        low = live[0].first if count is None else max(live[0].first, next - count)
        for index, time_us, hash, message in messages(_files(place), pieces_of(folder_of(queue), live, low, next)):
            yield InspectedMessage(index, clock.to_datetime(time_us * 1000), hash, message)


def _files(place: Path) -> Files:
    return open_files(str(place))


def queues_of(place: Path) -> list[str]:
    """The names of the queues of a directory; empty for other directories."""
    return sorted(name_of(path.parent.parent.name) for path in place.glob("*/_cues/queue.json"))


def read_queue(place: Path, queue: str) -> list[DataFile]:
    """The files of a queue that count, by index. Raises :class:`Diverged` if its log is damaged."""
    files, folder = _files(place), folder_of(queue)
    refuse_old(files, folder)
    return sorted(read_table(files, folder)[1], key=lambda file: file.first)


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
            last.append(LastRecord(name_of(folder.name), LedgerRecord.of(max(numbers), text), committed))
    return last


def problems_of(place: Path) -> list[str]:
    """The damage of a directory, one sentence each: what a start would refuse, and files with other contents."""
    problems = []
    ends: dict[str, int] = {}
    records = processors_of(place)
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
        missing = [name for name in names if not (place / folder_of_state(last.processor) / name).exists()]
        problems += [f"{name}, a part of the state of {last.processor}, is missing." for name in missing]
    return problems


def _problems_of_writers(place: Path, queue: str, live: list[DataFile], records: Sequence[LastRecord]) -> Iterator[str]:
    numbers = {last.processor: last.record.number for last in records}
    table, _ = read_table(_files(place), folder_of(queue))
    for writer in sorted({file.writer for file in live} | numbers.keys()):
        newest = None if table is None else table.transaction_version(writer)
        if newest is not None and newest > numbers.get(writer, -1):
            yield f"Queue {queue!r} has messages of record {newest} of {writer}, which is missing."


def _problems_of_files(place: Path, queue: str, live: list[DataFile]) -> Iterator[str]:
    for file in live:
        path = place / folder_of(queue) / file.name
        try:
            count = pq.read_metadata(path).num_rows
        except (OSError, ValueError) as error:
            reason = "is missing" if not path.exists() else f"cannot be read ({error})"
            yield f"{path.name} of queue {queue!r} {reason}."
        else:
            if count != file.count:
                yield f"{path.name} of queue {queue!r} has {count} messages, not {file.count}."
