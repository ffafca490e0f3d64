"""From a queue in the driver's store into its directory: same identity, same indices, same hashes.

Sources run as they do on the embedded engine, and commit into the store of the driver's machine. The feeder then
copies their messages, some thousand in a file. Each copy is a step of its own (ledger.py). So the
first stages read the same messages under the same names as without Spark.

An error queue of sources is copied too. Its messages follow those of other writers, and get new indices. Failures of
other processors, from runs of another engine on the store, are not copied: here these processors begin again.
"""

from __future__ import annotations

import functools
import logging
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from cues import codec
from cues.base import events, names
from cues.errors import Diverged, Unsupported
from cues.queues.tailer import Tailer
from cues.records import provenance
from cues.records.batch import Batch
from cues.spark.cluster.directory import file_name
from cues.spark.cluster.ledger import Ledger, LedgerRecord
from cues.spark.cluster.publish import Written, publish

if TYPE_CHECKING:
    from cues.queues.queue import Queue
    from cues.spark.cluster.directory import QueueDirectory
    from cues.spark.cluster.driver import Driver

FEED_MESSAGES: Final = 50_000
FEED_BYTES: Final = 16 << 20
"""Most bytes of one copy, which is in the driver's memory."""
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
        """``same``: the directory has the same indices as the queue. Else others write into it too."""
        self.driver = driver
        self.queue = queue
        self.directory = directory
        self.same = same
        self.ledger = Ledger(driver.files, f"{driver.graph}.{queue.id}.feed", driver.owner)
        # A named reader, which retention waits for.
        self._reader: Tailer = queue.tailer(f"spark-{driver.store_id}")

    @property
    def position(self) -> int:
        """The index that is copied next."""
        return self.ledger.now.positions[self.queue.id][1]

    def claim(self) -> None:
        """Own the copying after its last commit, and forward the file of that commit."""
        self.driver.claim(self.ledger, self._positions)

    def _positions(self, last: LedgerRecord | None) -> dict[str, tuple[str, int]]:
        """The position of the feeder. Raises :class:`Diverged` if the store has another queue."""
        row = self.queue._row()
        identity = row.identity.hex()
        known, next = last.positions[self.queue.id] if last is not None else (identity, 1)
        if known != identity or next > row.next:
            raise Diverged(
                f"{self.directory.files.url} was fed from a queue {self.queue.id!r} with identity {known} up to"
                f" {next - 1}; the one in {self.queue.store.path} has {identity} and ends before {row.next}.",
                "use the store that the directory was fed from, or start over with another --queues DIR.",
                processor=self.ledger.processor,
            )
        return {self.queue.id: (identity, next)}

    def ready(self) -> bool:
        """Return True if there are messages to copy."""
        return self.queue._row().next > self.position

    def step(self) -> bool:
        """Make one copy; return False if there is nothing to copy. Raises :class:`Fenced`."""
        columns, first, next = self._read(self.position)
        if not columns["index"]:
            self.ledger.check()
            return False
        if not self.same:
            columns = _of_sources(columns)
        if first > self.position:
            text = f"{first - self.position:,} messages of {self.queue.id} were purged before they were copied"
            self.driver.emit(events.Event(self.ledger.processor, text, logging.WARNING))
        identity = self.ledger.now.positions[self.queue.id][0]
        write = functools.partial(self._write, columns, first)
        directories = [self.directory] if columns["index"] else []
        publish(self.ledger, directories, write, positions={self.queue.id: (identity, next)})
        self._reader.to_index(next)
        self.driver.ring()
        return True

    def _read(self, start: int) -> tuple[dict[str, list[Any]], int, int]:
        """The columns of the messages from an index on, their first index, and the index after the last."""
        with self.queue.store._view() as txn:
            row = self.queue._log.row(txn)
            first = max(start, row.first)
            raws = self.queue._log.read(txn, row, first, FEED_MESSAGES, FEED_BYTES)
        columns: dict[str, list[Any]] = {name: [] for name in ROWS.names}
        for batch in self.queue._log.batches(raws):
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

    def _write(self, columns: dict[str, list[Any]], first: int) -> Written:
        start = first if self.same else self.directory.next
        count = len(columns["index"])
        columns["index"] = list(range(start, start + count))
        rows = pa.Table.from_arrays([pa.array(columns[f.name], f.type) for f in ROWS], schema=ROWS)
        name = file_name(start, count, self.ledger.processor, self.ledger.now.number + 1)
        self.driver.write_file(self.driver.session.createDataFrame(rows).coalesce(1), f"{self.directory.folder}/{name}")
        return [(self.directory, self.directory.stored(name))]


def _of_sources(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The rows of an error queue without the failures of streams and sinks."""
    kinds = [codec.unpack(value).get(names.ERR_CONFIG, {}).get("kind", "source") for value in columns["value"]]
    return {name: [value for value, kind in zip(rows, kinds) if kind == "source"] for name, rows in columns.items()}


def _values(batch: Batch) -> list[bytes]:
    body, cuts = batch.body(), batch.cuts()
    return [bytes(body[low:high]) for low, high in pairwise(cuts)]


def _metas(batch: Batch) -> list[bytes | None]:
    count = batch.head.count
    if batch.head.provenance is None:
        return [None] * count
    came = provenance.decode(batch.head.provenance, count)
    return [came.slice(at, at + 1).encode() for at in range(count)]
