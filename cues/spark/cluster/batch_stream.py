"""The sources of a frame's query: each gives the messages of one input, in the batches that are written down.

A query asks each of its sources for the next offset, one after another. All must give the same number, so the source
that is asked first in a query leads: it alone looks for new messages and writes the next batch down (batches.py). It
tells the others by a file of the driver's machine, where Spark runs all of them:

    <folder>/leader     made by the source that leads
    <folder>/number     the last batch that it gave

If the plan has a watermark, a batch without messages follows when there are no more. It gives the rows that the
watermark has closed. Spark's own batches without data are off, because nothing would write them down.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from pyspark.sql import types as T
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from cues.errors import Diverged
from cues.overrides import override
from cues.spark.cluster.batches import Batch, Batches, next_ranges
from cues.spark.cluster.files import open_files
from cues.spark.cluster.shared import SharedQueue
from cues.spark.options import FrameSource, QueueAddress, ReadOptions
from cues.spark.streams import QueueStream

_LEADER: Final = "leader"
_NUMBER: Final = "number"


class BatchStream(QueueStream):
    """One source of a query: an input of a frame, in the batches that are written down."""

    def __init__(self, schema: T.StructType, options: ReadOptions, parallelism: int) -> None:
        super().__init__(schema, options, parallelism)
        assert options.frame is not None
        self.frame: FrameSource = options.frame
        place = options.place
        self._batches = Batches(open_files(place.store, make=False), self.frame.processor)
        self._here = Path(self.frame.folder)
        self._leads: bool | None = None

    @override
    def initialOffset(self) -> dict[str, Any]:
        return {"batch": -1, "chain": ""}

    @override
    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    @override
    def prepareForTriggerAvailableNow(self) -> None: ...

    @override
    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None

    @override
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        number = start["batch"] + 1
        if self._leads is None:
            try:
                (self._here / _LEADER).mkdir()
                self._leads = True
            except FileExistsError:
                self._leads = False
        if not self._leads:
            told = (self._here / _NUMBER).read_text()  # the leader was asked before, in this round too
            return self._batches.need(number).to_offset() if int(told) >= number else start
        batch = self._decide(number)
        draft = self._here / f"{_NUMBER}.draft"
        draft.write_text(str(number if batch else number - 1))
        os.replace(draft, self._here / _NUMBER)
        return batch.to_offset() if batch else start

    def _decide(self, number: int) -> Batch | None:
        """The batch of this number: it is written down, or there are messages for it."""
        if number <= self.frame.committed:
            return self._batches.need(number)
        if (batch := self._batches.found(number)) is not None:
            return batch
        last = self._batches.need(number - 1) if number else None
        ranges = next_ranges([queue.log() for queue in self._queues()], last, self.frame.size, self.frame.closes)
        return None if ranges is None else self._batches.put(number, ranges)

    def _queues(self) -> list[SharedQueue]:
        """The inputs of the frame, for the leader."""
        store, own = self.options.place.store, self.pinned
        assert isinstance(own, SharedQueue)
        if not hasattr(self, "_inputs"):
            others = (queue for queue in self.frame.queues if queue != own.place.queue)
            self._inputs = [own, *(SharedQueue(QueueAddress(store, queue, True)) for queue in others)]
        return self._inputs

    @override
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        batch = self._batches.need(end["batch"])
        if start["batch"] != batch.number - 1 or end["chain"] != batch.chain:
            raise Diverged(
                f"Spark asks {self.frame.processor} for the messages after {start}, up to {end}; batch {batch.number}"
                f" ends with {batch.to_offset()}.",
                f"delete {self._batches.folder.replace('batches', 'checkpoints', 1)} in the directory; the state is"
                " then made again.",
            )
        low, high = batch.ranges[self.options.place.queue]
        return self.split((low,), (high,)) if high > low else []
