"""Reading a queue of a shared directory without Spark, with pyarrow, on the filesystems of this machine.

The log decides which files count (directory.py). For other filesystems use ``spark.read.parquet``.
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
from cues.spark.cluster.directory import LOG, entries_of, live_files
from cues.spark.cluster.files import folder_of


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
    log = folder / LOG
    files = live_files(entries_of(path.name for path in log.glob("[0-9]*")), lambda name: (log / name).read_text())
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
