"""The peer in `spark.py`: a queue as single LMDB entries, read and written by a simple data source.

    key     index, 8 bytes big-endian
    value   one message, msgpack

A first version of a queue on LMDB looks so, and the prototype of Cues on Spark was measured with it. Tasks read a
range of keys into Arrow batches of 10,000. Written values travel to the driver in the tasks' messages, and the driver
appends them in one transaction. With the option ``ready`` the first rows are read once and returned again and again:
the time of such a query is Spark's own time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

KEY = struct.Struct(">Q")
ROWS = 10_000
MAP_BYTES = 4 << 30


def opened(path: str, readonly: bool = False) -> lmdb.Environment:
    return lmdb.open(path, map_size=MAP_BYTES, readonly=readonly, lock=not readonly, sync=False, subdir=True)


def fill(path: Path, values: Iterable[bytes]) -> None:
    """Append ``values``; the first one gets the index 1."""
    path.mkdir()
    append(str(path), 1, values)


def append(path: str, index: int, values: Iterable[bytes]) -> None:
    with opened(path) as env, env.begin(write=True) as txn:
        txn.cursor().putmulti(((KEY.pack(n), value) for n, value in enumerate(values, index)), append=True)


def count(path: str) -> int:
    with opened(path, readonly=True) as env:
        return int(env.stat()["entries"])


class Reader(DataSourceReader):
    def __init__(self, path: str, tasks: int) -> None:
        self.path, self.tasks = path, tasks

    def partitions(self) -> Sequence[InputPartition]:
        total = count(self.path)
        edges = [1 + total * piece // self.tasks for piece in range(self.tasks + 1)]
        return [InputPartition(edges[n : n + 2]) for n in range(self.tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        start, stop = partition.value
        with opened(self.path, readonly=True) as env, env.begin() as txn:
            cursor = txn.cursor()
            cursor.set_range(KEY.pack(start))
            entries = iter(cursor.iternext())
            for low in range(start, stop, ROWS):
                size = min(ROWS, stop - low)
                values = [next(entries)[1] for _ in range(size)]
                yield pa.RecordBatch.from_arrays(
                    [pa.array(range(low, low + size), pa.int64()), pa.array(values, pa.binary())], ["index", "value"]
                )


class Ready(Reader):
    """Rows that cost nothing to read: the time is Spark's."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        start, stop = partition.value
        with opened(self.path, readonly=True) as env, env.begin() as txn:
            entries = iter(txn.cursor().iternext())
            values = pa.array([next(entries)[1] for _ in range(min(ROWS, stop - start))], pa.binary())
        for low in range(start, stop, ROWS):
            size = min(ROWS, stop - low)
            index = pa.array(numpy.arange(low, low + size))
            yield pa.RecordBatch.from_arrays([index, values[:size]], ["index", "value"])


@dataclass
class Rows(WriterCommitMessage):
    values: list[bytes]


class Writer(DataSourceArrowWriter):
    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return Rows([value for rows in iterator for value in rows.column("value").to_pylist()])

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        Path(self.path).mkdir(exist_ok=True)
        append(self.path, 1, (value for rows in messages if isinstance(rows, Rows) for value in rows.values))


class Entries(DataSource):
    @classmethod
    def name(cls) -> str:
        return "entries"

    def schema(self) -> str:
        return "index bigint, value binary"

    def reader(self, schema: Any) -> DataSourceReader:
        kind = Ready if self.options.get("ready") else Reader
        return kind(self.options["path"], int(self.options.get("partitions", 2)))

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
        return Writer(self.options["path"])
