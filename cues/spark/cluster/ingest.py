"""From a Spark stream into a queue: a batch is a step, and its commit has the offsets of the stream as its key.

    DIR/_cues/checkpoints/<processor id>/       Spark's own: the offsets of batch n, written before it runs

1. Spark fixes the offsets of batch n, and calls :meth:`StreamIngest.commit_batch`.
2. The offsets are compared with those in the processor's last record (position.py). A batch that was committed is
   skipped. A batch that does not follow the last one is refused. Else:
3. Tasks write the rows as messages into data files, which are committed and forwarded (publish.py). The record
   holds the offsets.

So a batch that Spark repeats is found in the record, if Spark died before it wrote down that the batch was done. The
number of the batch decides nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from cues import codec
from cues.base import clock, events
from cues.errors import CuesError, Fenced, PositionMismatch, ProcessorStopped
from cues.graphs.processor import Node
from cues.overrides import override
from cues.spark.checkpoint import range_of
from cues.spark.cluster.files import folder_of
from cues.spark.cluster.frames import Encoding
from cues.spark.cluster.ledger import Ledger
from cues.spark.cluster.publish import publish
from cues.spark.columns import Encoder
from cues.spark.failures import UNBORN, advice, in_short
from cues.spark.source import Source
from cues.steps.hashes import Hasher

if TYPE_CHECKING:
    from collections.abc import Callable

    from cues.spark.cluster.driver import Driver

_RAW: Final = {"index", "time", "hash", "value", "meta"}
"""Columns of rows that are messages: ``value`` is the packed message."""
_LOOK_S: Final = 0.2
UNBORN_MAX: Final = 5
"""Most starts of a query again, one after another, because its Python worker did not start in time: about a minute."""
_WAITING: Final = ("Waiting for next trigger", "Waiting for data to arrive", "Stopped")


class BatchCommits:
    """The owner of a query whose batches are commits. Spark calls :meth:`commit_batch` in a thread of its own."""

    driver: Driver
    node: Node
    unborn = 0
    """The number of times, since the last batch, that a Python worker of the query did not start in time."""
    _failed: BaseException | None = None
    """The error of a batch."""

    _extent = ""
    """The batch under way, as the end of "could not do a batch"."""

    def commit_batch(self, rows: Any, number: int) -> None:
        raise NotImplementedError

    def _run_batch(self, rows: Any, number: int) -> None:
        try:
            self.commit_batch(rows, number)
        except BaseException as error:
            self._failed = error
            if isinstance(error, Exception):
                raise
            raise RuntimeError(f"{type(error).__name__}") from error  # py4j would not answer Spark, which waits

    def _may_start_again(self, error: Exception) -> bool:
        """Return True, with a warning, if a query ended only because Spark gave its Python worker up at the start.

        Spark waits ten seconds, whatever else the machine does. A query that starts again continues after its last
        commit, as at a start of the graph.
        """
        if self._failed is not None or UNBORN not in str(error) or self.unborn >= UNBORN_MAX:
            return False
        self.unborn += 1
        text = "a Python worker did not start within Spark's ten seconds; the query starts again"
        self.driver.emit(events.Event(self.node.id, text, logging.WARNING))
        return True

    def _stopped(
        self,
        error: Exception,
        default: str = "start again when the cause is gone; it continues after its last batch.",
    ) -> CuesError:
        """The error that ended the query: the error of a batch if there is one, else Spark's."""
        if isinstance(self._failed, Fenced):
            return self._failed
        if isinstance(self._failed, CuesError):
            why, hint = self._failed.message, self._failed.hint
        else:
            why, hint = f"Spark could not do a batch{self._extent}: {in_short(error)}.", advice(error, default)
        return ProcessorStopped(
            f"{self.node.id} stopped: {why}",
            hint or default,
            processor=self.node.id,
        )


class StreamIngest(BatchCommits):
    """One source that is a Spark stream."""

    def __init__(self, driver: Driver, node: Node) -> None:
        assert isinstance(node.fn, Source)
        self.driver = driver
        self.node = node
        self.source: Source = node.fn
        self.counters = events.Counters()
        self.ledger = Ledger(driver.files, node.id, driver.owner)
        self.directory = driver.queues[node.outputs[0].queue]
        self._checkpoint = f"_cues/checkpoints/{folder_of(node.id)}"
        self._hasher = Hasher(node.key, 0)
        self._query: Any = None

    def claim(self) -> None:
        """Own the processor after its last commit, and forward the file of that commit."""
        self.driver.claim(self.ledger, lambda last: {})

    def run(self, ending: Callable[[], bool]) -> None:
        """Run the query until it ends or fails, or until ``ending()`` is true. Raises :class:`ProcessorStopped`."""
        stream = self.driver.session.readStream.format(self.source.format).options(**self.source.options)
        if self.source.schema is not None:
            stream = stream.schema(self.source.schema)
        writer = stream.load().writeStream.foreachBatch(self._run_batch).queryName(f"cues {self.node.id}")
        if self.source.available_now:
            writer = writer.trigger(availableNow=True)
        place = self.driver.files.for_spark(self._checkpoint)
        while True:
            self._query = writer.option("checkpointLocation", place).start()
            try:
                while not ending() and not self._query.awaitTermination(_LOOK_S):
                    pass
                return
            except Exception as error:
                if self._may_start_again(error):
                    continue
                stopped = self._stopped(error)
                raise stopped from (None if stopped is self._failed else self._failed)
            finally:
                self._query.stop()

    def idle(self) -> bool:
        """Return True if the stream has no rows now."""
        query = self._query
        if query is None:
            return False
        status = query.status
        return not status["isTriggerActive"] and not status["isDataAvailable"] and status["message"] in _WAITING

    @override
    def commit_batch(self, rows: Any, number: int) -> None:
        self._extent = f", number {number}"
        self.driver.context.setJobDescription(f"{self.node.id}: batch {number}")
        last = self.ledger.now
        covered = range_of(self.driver.files.table(self._checkpoint), number)
        kept = codec.unpack(bytes.fromhex(last.source)) if last.source else None
        verdict = covered.decide(kept)
        if verdict == "replayed":
            return
        if verdict == "refuse":
            raise PositionMismatch(
                f"Batch {number} of {self.node.id} does not follow the last one in {self.driver.files.url}: the"
                f" checkpoint in {self._checkpoint} is another one, or an older copy. Nothing was written.",
                "use the checkpoint that belongs to the directory, or start over with --fresh or another --queues DIR.",
                source=self.node.id,
                kept=kept,
                found=covered.position(),
            )
        position = list(covered.position())
        digest = self._hasher.digest([], ["source", kept, position])
        raw = set(rows.columns) <= _RAW and dict(rows.dtypes).get("value") == "binary"
        if not raw:
            Encoder(rows.schema)  # rows that cannot be messages are refused here, not in a task
        encoding = Encoding(
            self.driver.files,
            self.directory.queue,
            self.directory.columns,
            self.directory.options,
            self.node.id,
            last.number + 1,
            clock.now_ns() // 1000,
            digest.hex(),
            None,
            None if raw else rows.schema,
        )
        files = encoding.files_of(rows)
        count = sum(file.count for file in files)
        publish(
            self.ledger,
            {self.directory: files} if files else {},
            hash=digest.hex(),
            source=codec.pack(position).hex(),
            counts={"written": count},
        )
        self.counters.steps += 1
        self.counters.taken += count
        self.counters.written += count
        self.unborn = 0
        self.driver.ring()
