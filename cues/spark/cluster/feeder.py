"""From a queue in the driver's store into its directory: same identity, same indices, same hashes.

Sources run as they do on the embedded engine, and commit into the store of the driver's machine. The feeder then
copies their messages, some thousand in a file. Each copy is a step of its own (ledger.py). So the
first stages read the same messages under the same names as without Spark.

An error queue of sources is copied too. Its messages follow those of other writers, and get new indices. Failures of
other processors, from runs of another engine on the store, are not copied: here these processors begin again.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from cues import codec
from cues.base import events, names
from cues.errors import Diverged, Unsupported
from cues.queues.tailer import Tailer
from cues.records.batch import Batch
from cues.records.provenance import Provenance, concat, decode
from cues.spark.cluster.data import Writer
from cues.spark.cluster.ledger import Ledger, LedgerRecord
from cues.spark.cluster.publish import publish

if TYPE_CHECKING:
    from cues.queues.queue import Queue
    from cues.spark.cluster.directory import DataFile, QueueDirectory
    from cues.spark.cluster.driver import Driver

FEED_MESSAGES: Final = 50_000
FEED_BYTES: Final = 16 << 20
"""Most bytes of one copy, which is in the driver's memory."""


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
        runs, first, next = self._read(self.position)
        if not runs:
            self.ledger.check()
            return False
        if not self.same:
            runs = [run for run in map(_of_sources, runs) if run.values]
        if first > self.position:
            text = f"{first - self.position:,} messages of {self.queue.id} were purged before they were copied"
            self.driver.emit(events.Event(self.ledger.processor, text, logging.WARNING))
        identity = self.ledger.now.positions[self.queue.id][0]
        file = self._write(runs) if runs else None
        publish(
            self.ledger,
            {} if file is None else {self.directory: [file]},
            first if self.same else None,
            positions={self.queue.id: (identity, next)},
            counts={"written": 0 if file is None else file.count},
        )
        self._reader.to_index(next)
        self.driver.ring()
        return True

    def _read(self, start: int) -> tuple[list[_Run], int, int]:
        """The messages from an index on, the index of the first, and the index after the last."""
        with self.queue.store._view() as txn:
            row = self.queue._log.row(txn)
            next = first = max(start, row.first)
            raws = self.queue._log.read(txn, row, first, FEED_MESSAGES, FEED_BYTES)
        runs = []
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
            runs.append(_run(batch, low - batch.first, high - batch.first))
            next = high
        return runs, first, next

    def _write(self, runs: list[_Run]) -> DataFile | None:
        driver, record = self.driver, self.ledger.now.number + 1
        columns = self.directory.columns
        writer = Writer(driver.files, self.directory.folder, self.ledger.processor, record, 0, columns)
        writer.add(
            [value for run in runs for value in run.values],
            [run.hash for run in runs for _ in run.values],
            concat([run.came for run in runs]),
            [run.time_us for run in runs for _ in run.values],
        )
        return writer.close()


class _Run(NamedTuple):
    """The messages of one record batch."""

    values: list[bytes]
    hash: str | None
    time_us: int
    came: Provenance


def _run(batch: Batch, start: int, stop: int) -> _Run:
    body, cuts, head = batch.body(), batch.cuts(), batch.head
    values = [bytes(body[low:high]) for low, high in pairwise(cuts[start : stop + 1])]
    came = Provenance(head.count, {}) if head.provenance is None else decode(head.provenance, head.count)
    return _Run(values, head.hash.hex() if head.hash else None, head.time_ns // 1000, came.slice(start, stop))


def _of_sources(run: _Run) -> _Run:
    """The messages of an error queue without the failures of streams and sinks."""
    kinds = [codec.unpack(value).get(names.ERR_CONFIG, {}).get("kind", "source") for value in run.values]
    chosen = [offset for offset, kind in enumerate(kinds) if kind == "source"]
    return run._replace(values=[run.values[offset] for offset in chosen], came=run.came.select(chosen))
