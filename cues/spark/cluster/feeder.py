"""From a queue in the driver's store into its directory: same identity, same indices, same hashes.

Sources run as they do on the embedded engine, and commit into the store of the driver's machine. What is there
is copied behind them, some thousand messages a file, each copy a step of its own (ledger.py): so the
first stages read under the same names what they would read without Spark.

An error queue of sources is fed too, behind what others have written there, under the indices that come.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from cues import faults
from cues.base import events
from cues.errors import Diverged, Unsupported
from cues.queues.tailer import Tailer
from cues.records import provenance
from cues.records.batch import Batch
from cues.spark.cluster.directory import file_name
from cues.spark.cluster.ledger import Ledger, LedgerRecord

if TYPE_CHECKING:
    from cues.queues.queue import Queue
    from cues.spark.cluster.directory import QueueDirectory
    from cues.spark.cluster.driver import Driver

FEED_MESSAGES: Final = 50_000
FEED_BYTES: Final = 16 << 20
"""Most of one copy; it goes through the driver's memory."""
ROWS: Final = pa.schema(
    [
        ("index", pa.int64()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("hash", pa.string()),
        ("value", pa.binary()),
        ("meta", pa.binary()),
    ]
)


class Feeder:
    """Copies one queue. Used by one thread at a time."""

    def __init__(self, driver: Driver, queue: Queue, directory: QueueDirectory, same: bool) -> None:
        """``same``: the directory is this queue, under the same indices; else others write there too."""
        self.driver = driver
        self.queue = queue
        self.directory = directory
        self.same = same
        self.ledger = Ledger(driver.files, f"{driver.graph}.{queue.id}.feed", driver.owner)
        # A named reader, for retention to know of.
        self._reader: Tailer = queue.tailer(f"spark-{driver.store_id}")
        self.copied = 0
        """Messages since the start."""

    @property
    def position(self) -> int:
        """The index that is copied next."""
        last = self.ledger.last
        assert last is not None
        return last.positions[self.queue.id][1]

    def claim(self) -> None:
        """Own the copying, and finish what was committed and is in no log."""
        identity = self.queue.row().identity.hex()
        while True:
            last = self.ledger.read()
            if last is not None:
                self._forward(last)
            known, next = last.positions[self.queue.id] if last is not None else (identity, 1)
            if known != identity or next > self.queue.row().next:
                raise Diverged(
                    f"{self.directory.files.url} was fed from a queue {self.queue.id!r} with identity {known} up to"
                    f" {next - 1}; the one in {self.queue.store.path} has {identity} and ends before"
                    f" {self.queue.row().next}.",
                    "use the store that the directory was fed from, or start over with another --queues DIR.",
                    processor=self.ledger.processor,
                )
            if self.ledger.claim(last, {self.queue.id: (identity, next)}):
                return

    def _forward(self, record: LedgerRecord) -> None:
        for name in record.files.values():
            with self.directory.lock:
                self.directory.forward(name)

    def ready(self) -> bool:
        """Return True where there are messages to copy."""
        return self.queue.row().next > self.position

    def step(self) -> bool:
        """Copy what is there, up to a bound; False where there was nothing. Raises :class:`Fenced`."""
        columns, first, next = self._read(self.position)
        if not columns["index"]:
            self.ledger.check()
            return False
        if first > self.position:
            self.driver.emit(
                events.Event(
                    self.ledger.processor,
                    f"{first - self.position:,} messages of {self.queue.id} were purged before they were copied",
                    logging.WARNING,
                )
            )
        with self.directory.lock:
            self.directory.settle()
            start = first if self.same else self.directory.next
            count = len(columns["index"])
            columns["index"] = list(range(start, start + count))
            file = self._write(columns, start, count)
            faults.point("spark.written")
            last = self.ledger.last
            assert last is not None
            identity = last.positions[self.queue.id][0]
            self.ledger.commit(
                "step", positions={self.queue.id: (identity, next)}, files={self.directory.queue: file.name}
            )
            self.directory.owed.append(file)
            faults.point("spark.recorded")
            self.directory.settle()
        self.copied += count
        self._reader.to_index(next)
        self.driver.ring()
        return True

    def _read(self, start: int) -> tuple[dict[str, list[Any]], int, int]:
        """The columns of what is there from an index on; with the first index, and the one behind the last."""
        with self.queue.store.view() as txn:
            row = self.queue.log.row(txn)
            first = max(start, row.first)
            raws = self.queue.log.read(txn, row, first, FEED_MESSAGES, FEED_BYTES)
        columns: dict[str, list[Any]] = {name: [] for name in ROWS.names}
        for batch in self.queue.log.batches(raws):
            low, high = max(first, batch.first), min(batch.next, first + FEED_MESSAGES)
            if high <= low:
                continue
            if batch.head.acknowledges:
                raise Unsupported(
                    f"The queue {self.queue.id!r} holds acknowledgements of transactions (cues.txn), at {low}, which a"
                    " queue in a shared directory cannot keep.",
                    "use a queue without them, or run Spark without queues=.",
                )
            columns["index"] += range(low, high)
            columns["time"] += [batch.head.time_ns // 1000] * (high - low)
            columns["hash"] += [batch.head.hash.hex() if batch.head.hash else None] * (high - low)
            columns["value"] += _values(batch)[low - batch.first : high - batch.first]
            columns["meta"] += _metas(batch)[low - batch.first : high - batch.first]
        return columns, first, columns["index"][-1] + 1 if columns["index"] else first

    def _write(self, columns: dict[str, list[Any]], start: int, count: int) -> Any:
        files, folder = self.driver.files, self.driver.scratch()
        rows = pa.Table.from_arrays([pa.array(columns[f.name], f.type) for f in ROWS], schema=ROWS)
        self.driver.session.createDataFrame(rows).coalesce(1).write.parquet(files.url_of(folder))
        (part,) = files.parts(folder)
        last = self.ledger.last
        assert last is not None
        name = file_name(start, count, self.ledger.processor, last.number + 1)
        found = self.directory.adopt(f"{folder}/{part}", name)
        files.delete(folder)
        return found


def _values(batch: Batch) -> list[bytes]:
    body, cuts = batch.body(), batch.cuts()
    return [bytes(body[low:high]) for low, high in pairwise(cuts)]


def _metas(batch: Batch) -> list[bytes | None]:
    """The provenance of each message."""
    count = batch.head.count
    if batch.head.provenance is None:
        return [None] * count
    found = provenance.decode(batch.head.provenance, count)
    return [found.slice(at, at + 1).encode() for at in range(count)]
