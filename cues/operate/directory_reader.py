"""The messages of a queue in a directory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Final

from cues.operate.positions import Position
from cues.operate.reading import Condition, FoundMessage
from cues.spark.cluster.inspection import InspectedMessage, QueueReader

LOOK_S: Final = 0.5
"""Seconds between two looks for new messages."""


class DirectoryReader:
    """Reads a queue of a directory as :class:`cues.operate.reading.StoreReader` reads one of a store."""

    def __init__(self, place: str, queue: str) -> None:
        self._reader = QueueReader(place, queue)
        self._numbers = [log.partition for log in self._reader.logs]
        self._at = [log.first for log in self._reader.logs]

    @property
    def name(self) -> str:
        return self._reader.directory.queue

    @property
    def positions(self) -> dict[int, int]:
        return dict(zip(self._numbers, self._at))

    def ends(self) -> dict[int, tuple[int, int]]:
        return {log.partition: (log.first, log.next) for log in self._reader.logs}

    def go(self, place: Position, option: str) -> None:
        self._at = self._reader.place_of(place, option)

    def go_to(self, indices: Mapping[int, int]) -> None:
        ends = self.ends()
        places = {n: max(ends[n][0], min(ends[n][1], i)) for n, i in indices.items() if n in ends}
        self._at = [places.get(number, at) for number, at in self.positions.items()]

    def back(self, count: int | None, condition: Condition | None = None) -> None:
        self._at = self._reader.last(count, condition)

    def backward(self) -> Iterator[FoundMessage]:
        for read in self._reader.backward(self._at):
            self._at[self._numbers.index(read.partition)] = read.index
            yield _found(read)

    def forward(self, follow: bool = False) -> Iterator[FoundMessage | None]:
        while True:
            for read in self._reader.read(self._at):
                self._at[self._numbers.index(read.partition)] = read.index + 1
                yield _found(read)
            yield None
            if not follow:
                return
            while not self._reader.has_more(self._at):
                time.sleep(LOOK_S)


def _found(read: InspectedMessage) -> FoundMessage:
    return FoundMessage(read.partition, read.index, read.time, read.hash, read.message)
