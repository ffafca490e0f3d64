"""The batches of a frame that runs as a query: their ranges are written down, and read again.

    DIR/_cues/batches/<processor id>/plan.json     the lineage of the batches, and settings of the first start
                                    /<n>.json      batch n: the range of each input, put if absent before Spark asks
                                    /<n>-.json     the batches from n on, of which the single files are deleted

A batch is immutable ranges of immutable messages. So its number is the whole offset of a stream, and a query that
starts without its checkpoint, or with an older copy of it, gets the same batches again and has the same state after
them. An offset also has a checksum over all batches up to it, so a checkpoint of other batches is not taken for one of
these.

A query asks each of its sources for the next offset, one after another. All must give the same number, so the source
that is asked first in a query leads: it alone looks for new messages and writes the next batch down. It tells the
others by a file of the driver's machine, where Spark runs all of them.

If the plan has a watermark, a batch without messages follows when there are no more. It gives the rows that the
watermark has closed. Spark's own batches without data are off, because nothing would write them down.

Not guaranteed: that batches are as large as possible. Their sizes depend on when Spark asked.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash
from pyspark.sql import types as T
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from cues.errors import Diverged
from cues.spark.cluster.files import Files, folder_of, open_files, parsed
from cues.spark.cluster.shared import SharedQueue
from cues.spark.options import FrameSource, QueueAddress, ReadOptions
from cues.spark.reading import QueueStream

if TYPE_CHECKING:
    from cues.spark.cluster.directory import QueueDirectory

BLOCK: Final = 256
"""The number of batches in one file, after two blocks of them are committed."""
_LEADER: Final = "leader"
_NUMBER: Final = "number"


class Batch(NamedTuple):
    """One batch."""

    number: int
    ranges: dict[str, tuple[int, int]]
    """By queue: the first index, and the index after the last one."""
    chain: str
    """A checksum over the lineage and all batches up to this one."""

    @property
    def messages(self) -> int:
        """The number of messages."""
        return sum(stop - start for start, stop in self.ranges.values())

    def to_offset(self) -> dict[str, Any]:
        """The offset of a source after this batch."""
        return {"batch": self.number, "chain": self.chain}

    def to_list(self) -> list[Any]:
        return [self.ranges, self.chain]

    @staticmethod
    def of(number: int, data: list[Any]) -> Batch:
        return Batch(number, {queue: (start, stop) for queue, (start, stop) in data[0].items()}, data[1])


class Batches:
    """The batches of one processor. The driver and the sources of its query each have an object."""

    def __init__(self, files: Files, processor: str) -> None:
        self._files = files
        self.folder = f"_cues/batches/{folder_of(processor)}"
        self._processor = processor
        self._blocks: dict[int, list[Any]] = {}
        """The block that was read last, by its first number."""
        self._loose = -1
        """The first number of a block that did not exist at the last look."""

    def plan(self) -> dict[str, Any] | None:
        """The lineage and the settings; None before the first start."""
        name = f"{self.folder}/plan.json"
        text = self._files.read(name)
        return None if text is None else parsed(self._files, name, text)

    def begin(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Write the lineage and the settings down, or return those of an earlier start."""
        name = f"{self.folder}/plan.json"
        return parsed(self._files, name, self._files.ensure(name, json.dumps(plan).encode()))

    def read(self, number: int) -> Batch | None:
        """A batch; None if it is not written down."""
        if number < 0:
            return None
        first = number // BLOCK * BLOCK
        # A block counts more than a single file. A driver that slept may have put that one after the block.
        if first not in self._blocks and first != self._loose:
            self._look_for_block(first)
        if first not in self._blocks:
            text = self._files.read(self._name(number))
            if text is not None:
                return Batch.of(number, self._list(self._name(number), text))
            self._look_for_block(first)  # it may have been made meanwhile
        return Batch.of(number, self._blocks[first][number - first]) if first in self._blocks else None

    def _look_for_block(self, first: int) -> None:
        text = self._files.read(self._block(first))
        if text is None:
            self._loose = first
        else:
            self._blocks = {first: self._list(self._block(first), text)}

    def need(self, number: int) -> Batch:
        """A batch that must be there. Raises :class:`Diverged` if it is not."""
        batch = self.read(number)
        if batch is None:
            raise Diverged(
                f"Batch {number} of {self._processor} is missing in {self._files.url}/{self.folder}.",
                "restore the directory from a copy.",
                processor=self._processor,
            )
        return batch

    def put(self, number: int, ranges: dict[str, tuple[int, int]]) -> Batch:
        """Write a batch down, and return it; or the batch that another driver has written down under its number."""
        before = self.need(number - 1).chain if number else str((self.plan() or {}).get("id", ""))
        seed = json.dumps([before, number, sorted(ranges.items())])
        batch = Batch(number, ranges, xxhash.xxh3_64_hexdigest(seed.encode()))
        self._files.put(self._name(number), json.dumps(batch.to_list()).encode())
        return self.need(number)

    def pack(self, done: int) -> None:
        """Put the block before last into one file, if ``done`` is the last batch of a block and is committed."""
        first = done + 1 - 2 * BLOCK
        if (done + 1) % BLOCK or first < 0:
            return
        block = [self.need(number).to_list() for number in range(first, first + BLOCK)]
        self._files.put(self._block(first), json.dumps(block).encode())
        for number in range(first, first + BLOCK):
            self._files.delete(self._name(number))

    def _name(self, number: int) -> str:
        return f"{self.folder}/{number:012d}.json"

    def _block(self, first: int) -> str:
        return f"{self.folder}/{first:012d}-.json"

    def _list(self, name: str, text: bytes) -> list[Any]:
        with contextlib.suppress(ValueError):
            data = json.loads(text)
            if isinstance(data, list):
                return data
        raise Diverged(f"The file {self._files.url}/{name} is damaged.", "restore the directory from a copy.")


def offset_of(text: str) -> tuple[int, str] | None:
    """The number and the checksum in an offset of Spark's checkpoint; None if it is another source's."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        offset = json.loads(text)
        return int(offset["batch"]), str(offset["chain"])
    return None


def next_ranges(
    queues: Sequence[QueueDirectory], last: Batch | None, most: int, closes: bool
) -> dict[str, tuple[int, int]] | None:
    """The ranges of the batch after ``last``; None if there is nothing for it. At most ``most`` messages of each queue.

    A queue continues after the last batch, or after the messages that were purged before a batch took them.
    """
    ranges = {}
    for log in queues:
        at = last.ranges[log.queue][1] if last else 1
        start, stop = log.ready(at)
        ranges[log.queue] = (start, min(stop, start + most)) if stop > start else (at, at)
    if any(stop > start for start, stop in ranges.values()):
        return ranges
    return ranges if closes and last is not None and last.messages else None


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

    def initialOffset(self) -> dict[str, Any]:
        return {"batch": -1, "chain": ""}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None: ...

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None

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
        batch = self._batches.read(number)
        if batch is not None:
            return batch
        if number <= self.frame.committed:
            return self._batches.need(number)
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
