"""The messages of a queue in a store, from any place on it, forward and backward.

StoreReader     of a store; the reader of a directory (cues/operate/directories.py) has the same methods
FoundMessage    a message with the facts of its envelope

reader.back(10, condition)               to the first of the last ten that match
for found in reader.forward(follow=True):
    found is None                        the end: nothing more for now
    isinstance(found, BatchDamaged)      it was passed; the reader continues after it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from datetime import datetime
from typing import Any, Final

from cues.base import names
from cues.base.data import dataclass
from cues.errors import BatchDamaged
from cues.jsontext import iso
from cues.operate import positions
from cues.operate.positions import Position
from cues.operate.refused import Refused
from cues.queues.base import views_of
from cues.queues.committed import Isolation
from cues.queues.queue import Queue
from cues.queues.tailer import MergedTailer, Tailer

FILE_CHECK_S: Final = 1.0
"""Seconds without a message after which a reader that follows looks whether the store is still there."""

Condition = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class FoundMessage:
    partition: int
    index: int
    time: datetime
    hash: str | None
    message: dict[str, Any]
    uuid: object = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The metadata that the queue keeps; empty in a directory, whose messages carry none along."""

    def meta(self, queue: str) -> dict[str, Any]:
        """The metadata that the queue keeps, and always the index and time on this queue."""
        queues = {
            name: {
                key: iso(value) if key == names.TIME and not isinstance(value, str) else value
                for key, value in at.items()
            }
            for name, at in self.metadata.get(names.QUEUE, {}).items()
        }
        queues[names.log_id(queue, self.partition)] = {names.T: self.index, names.TIME: iso(self.time)}
        identity = {} if self.uuid is None else {names.UUID: str(self.uuid)}
        return {names.HASH: self.hash, **identity, **self.metadata, names.QUEUE: queues}


class StoreReader:
    """Reads one queue of a store, or one partition of it. It begins at the first message."""

    def __init__(self, queue: Queue, isolation: Isolation = "uncommitted") -> None:
        self.queue = queue
        self._isolation = isolation
        self._tailer: Tailer | MergedTailer = queue.tailer(meta=False, isolation=isolation)

    @property
    def name(self) -> str:
        """The queue, without a partition."""
        return self.queue.name

    @property
    def positions(self) -> dict[int, int]:
        """The index that is read next, by partition."""
        return dict(self._tailer.positions)

    def ends(self) -> dict[int, tuple[int, int]]:
        """The first index and the one after the last, by partition."""
        views = views_of(self.queue)
        return {view.core.log.partition: (row.first, row.next) for view in views for row in [view.core.row()]}

    def go(self, place: Position, option: str) -> None:
        """Move to a place, of which errors say that ``option`` names it."""
        if not isinstance(self._tailer, MergedTailer):
            self._tailer.to_index(positions.now_on(self.queue.core.log, place, option))
        elif isinstance(place, int):
            raise Refused(
                f"{self.queue.id} has {self.queue.partitions} partitions, and an index belongs to one.",
                f"give {option} a time, or name a partition: #{self.queue.id}/0 {option} {place}",
            )
        elif isinstance(place, datetime):
            self._tailer.to_time(place)
        else:
            self._tailer.to_start() if place == "start" else self._tailer.to_end()

    def go_to(self, indices: Mapping[int, int]) -> None:
        """Move to these indices, or to the nearest that are there; other partitions stay."""
        ends = self.ends()
        within = {n: max(ends[n][0], min(ends[n][1], index)) for n, index in indices.items() if n in ends}
        for number, index in within.items():
            self._move(number, index)

    def back(self, count: int | None, condition: Condition | None = None) -> None:
        """Move to the first of the last ``count`` messages that match; None: to the first message."""
        tailer = self._tailer
        if count is None:
            return
        # On several partitions, and for committed messages, the last messages are not those of the last indices.
        if not isinstance(tailer, MergedTailer) and self._isolation == "uncommitted":
            tailer.to_index(self._last(count, condition))
            return
        tailer.to_end()
        matching = 0
        backward = self.backward()
        while matching < count and (found := next(backward, None)) is not None:
            matching += isinstance(found, FoundMessage) and (condition is None or bool(condition(found.message)))
        tailer.direction = "forward"

    def _last(self, count: int, condition: Condition | None) -> int:
        """The index of the first of the last ``count`` matching messages."""
        log, row = self.queue.core.log, self.queue.core.row()
        if condition is None or not count:
            return max(row.first, row.next - count)
        matching: deque[int] = deque(maxlen=count)
        end = row.next
        while end > row.first and len(matching) < count:
            # Batch by batch from the end; reading each forward is much faster than message by message.
            with self.queue.store.core.view() as txn:
                raws = log.read_before(txn, log.row(txn), end)
            if not raws:
                break
            try:
                batch = log.batches(raws)[0]
            except BatchDamaged as error:
                end = error.first
                continue
            messages = batch.messages()
            for offset in range(min(len(messages), end - batch.first) - 1, -1, -1):
                if batch.head.acknowledges or batch.first + offset < row.first:
                    continue
                if condition(messages[offset]):
                    matching.appendleft(batch.first + offset)
                    if len(matching) == count:
                        break
            end = batch.first
        return matching[0] if matching else row.next

    def backward(self) -> Iterator[FoundMessage | BatchDamaged]:
        """The messages before this place, last first."""
        self._tailer.direction = "backward"
        while (found := self._read()) is not None:
            yield found

    def forward(self, follow: bool = False) -> Iterator[FoundMessage | BatchDamaged | None]:
        """The messages from this place on, and then None. ``follow``: then new messages, as they come."""
        while True:
            found = self._read()
            yield found
            if found is None:
                if not follow:
                    return
                while (found := self._read(FILE_CHECK_S)) is None:
                    self.queue.store.core.check_file()  # cues run --fresh deletes a store that others read
                yield found

    def _read(self, wait_s: float = 0.0) -> FoundMessage | BatchDamaged | None:
        tailer = self._tailer
        try:
            message = tailer.read(block=True, timeout=wait_s) if wait_s else tailer.read()
        except BatchDamaged as error:
            after = error.first if tailer.direction == "backward" else error.last + 1
            self._move(names.split_log(error.queue)[1], after)
            return error
        envelope = tailer.envelope
        if message is None or envelope is None:
            return None
        facts = envelope.partition, envelope.index, envelope.time, envelope.hash
        return FoundMessage(*facts, message, envelope.uuid, envelope.metadata)

    def _move(self, partition: int, index: int) -> None:
        if isinstance(self._tailer, MergedTailer):
            self._tailer.to_index({partition: index})
        else:
            self._tailer.to_index(index)
