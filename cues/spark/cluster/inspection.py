"""Looking into a queue of a shared directory without Spark: on this machine's filesystems, with pyarrow.

What the log says counts, as for everybody (directory.py). For other filesystems there is
``spark.read.parquet``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq

from cues import codec
from cues.spark.cluster.directory import COMPACT_EVERY, LOG, DataFile, parse_entry
from cues.spark.cluster.files import folder_of


@dataclass(frozen=True)
class InspectedMessage:
    """A message of a queue."""

    index: int
    time: Any
    """An aware datetime."""
    hash: str | None
    message: dict[str, Any]


def live_files(folder: Path) -> list[DataFile]:
    """The files of a queue's directory that count, by index."""
    numbers = {int(one.name.partition(".")[0]): one for one in (folder / LOG).glob("[0-9]*")}
    last = max(numbers, default=-1)
    start = max(0, (last + 1) // COMPACT_EVERY * COMPACT_EVERY - 1)
    found = [file for n in range(start, last + 1) for file in parse_entry(numbers[n].read_text())]
    return sorted(found, key=lambda one: one.first)


def last_messages(place: Path, queue: str, count: int | None) -> Iterator[InspectedMessage]:
    """The last ``count`` messages of a queue, or all that are there."""
    folder = place / folder_of(queue)
    files = live_files(folder)
    first = files[-1].next - count if files and count is not None else 0
    for file in files:
        if file.next > first:
            yield from _messages(folder / file.name, first)


def _messages(path: Path, first: int) -> Iterator[InspectedMessage]:
    for rows in pq.ParquetFile(path).iter_batches(columns=["index", "time", "hash", "value"]):
        for index, time, hash, value in zip(*(column.to_pylist() for column in rows.columns)):
            if index >= first:
                yield InspectedMessage(
                    index, time.replace(tzinfo=UTC), hash, codec.unpack(value)
                )  # Spark says no zone; it is UTC


def queues_of(place: Path) -> list[str]:
    """The names of the queues of a directory; empty where it is no such directory."""
    return sorted(unquote(one.parent.parent.name) for one in place.glob("*/_cues/queue.json"))
