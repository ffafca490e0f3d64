"""The batches of a frame that runs as a query: their ranges are written down, and read again.

    DIR/_cues/batches/<processor id>/plan.json     the lineage of the batches, and settings of the first start
                                    /<n>.json      batch n: the range of each input, put if absent before Spark asks
                                    /<n>-.json     the batches from n on, of which the single files are deleted

A batch is immutable ranges of immutable messages. So its number is the whole offset of a stream, and a query that
starts without its checkpoint, or with an older copy of it, gets the same batches again and has the same state after
them. An offset also has a checksum over all batches up to it, so a checkpoint of other batches is not taken for one of
these.

Not guaranteed: that batches are as large as possible. Their sizes depend on when Spark asked.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash

from cues.errors import Diverged
from cues.spark.cluster.files import Files, folder_of, formed, parsed, sealed_json

if TYPE_CHECKING:
    from cues.spark.cluster.directory import PartitionLog

BLOCK: Final = 256
"""The number of batches in one file, after two blocks of them are committed."""
_LIST: Final = "list"
"""The field of a record that has a list, of a batch or of a block."""
_PLAN: Final = {"id": str, "settings?": {str: object}}
BATCH: Final = [{str: [int, int]}, str]


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
        return None if text is None else parsed(self._files, name, text, _PLAN)

    def begin(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Write the lineage and the settings down, or return those of an earlier start.

        They are durable then, and so are the batches that an earlier driver has written down.
        """
        name = f"{self.folder}/plan.json"
        return parsed(self._files, name, self._files.ensure(name, sealed_json(plan)), _PLAN)

    def change(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Write the lineage down with other settings, and return it."""
        self._files.replace(f"{self.folder}/plan.json", sealed_json(plan))
        return plan

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
                return Batch.of(number, self.list_in(self._name(number), text, BATCH))
            self._look_for_block(first)  # it may have been made meanwhile
        return Batch.of(number, self._blocks[first][number - first]) if first in self._blocks else None

    def _look_for_block(self, first: int) -> None:
        text = self._files.read(self._block(first))
        if text is None:
            self._loose = first
        else:
            self._blocks = {first: self.list_in(self._block(first), text, [BATCH] * BLOCK)}

    def found(self, number: int) -> Batch | None:
        """A batch that is not committed, if it is written down. It is durable then, whoever has written it."""
        batch = self.read(number)
        if batch is not None:
            self._files.settle(self.folder)
        return batch

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
        self._files.put(self._name(number), sealed_json({_LIST: batch.to_list()}))
        return self.need(number)

    def pack(self, done: int) -> None:
        """Put the block before last into one file, if ``done`` is the last batch of a block and is committed."""
        first = done + 1 - 2 * BLOCK
        if (done + 1) % BLOCK or first < 0:
            return
        block = [self.need(number).to_list() for number in range(first, first + BLOCK)]
        self._files.put(self._block(first), sealed_json({_LIST: block}))
        for number in range(first, first + BLOCK):
            self._files.delete(self._name(number))

    def _name(self, number: int) -> str:
        return f"{self.folder}/{number:012d}.json"

    def _block(self, first: int) -> str:
        return f"{self.folder}/{first:012d}-.json"

    def list_in(self, name: str, text: bytes, form: Any) -> list[Any]:
        if text[:1] != b"[":
            data = parsed(self._files, name, text, {_LIST: form})[_LIST]
        else:  # an earlier version wrote a list without a checksum
            data = None
            with contextlib.suppress(ValueError, RecursionError):
                data = json.loads(text)
        return formed(self._files, name, data, form)  # type: ignore[no-any-return]


def offset_of(text: str) -> tuple[int, str] | None:
    """The number and the checksum in an offset of Spark's checkpoint; None if it is another source's."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        offset = json.loads(text)
        return int(offset["batch"]), str(offset["chain"])
    return None


def next_ranges(
    logs: Sequence[PartitionLog], last: Batch | None, most: int, closes: bool
) -> dict[str, tuple[int, int]] | None:
    """The ranges of the batch after ``last``; None if there is nothing for it. At most ``most`` messages of each queue.

    A queue continues after the last batch, or after the messages that were purged before a batch took them.
    """
    ranges = {}
    for log in logs:
        at = last.ranges[log.id][1] if last else 1
        start, stop = log.ready(at)
        ranges[log.id] = (start, min(stop, start + most)) if stop > start else (at, at)
    if any(stop > start for start, stop in ranges.values()):
        return ranges
    return ranges if closes and last is not None and last.messages else None
