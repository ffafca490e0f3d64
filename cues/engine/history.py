"""The history of a graph: counts, lag and latencies of each processor, in a file beside its store.

    data/flights/history-<graph>        written by the run (:mod:`cues.engine.sampler`), read by anybody

    header       4,096 bytes
    block        98,304 bytes for each processor that has run
        name     3,072 bytes
        slots    360 of 10 seconds, 288 of 5 minutes, 840 of an hour: 64 bytes each

A file, not rows, for the reason of leases (:mod:`cues.storage.leases`): a sample costs no commit, and wakes nobody. A
period has one place in its ring, its number modulo the slots of the ring, and a slot has the number of its period. So
nothing points to the newest slot, and nothing must be repaired after a kill, a restart, or a clock that was set back:

    read      a slot counts if its checksum is right, and its period is inside of the time that the ring covers
    add       a slot of the same period gets the sum of both; any other slot is replaced

The size is bounded. The file is sparse: a processor that runs for an hour takes 36 kB, for five weeks 96 kB.

Not guaranteed: samples survive a power cut (nothing is synced). The exactness of a graph does not depend on this file:
it may be deleted at any time, and an error of it stops nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import struct
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Final

from cues.base.data import dataclass
from cues.errors import StoreForeign
from cues.storage import door

PATTERN: Final = "history-*"
_PREFIX: Final = "history-"
_MAGIC: Final = b"cues-history 1\n"
_HEADER_BYTES: Final = 4096
_BLOCK_BYTES: Final = 98_304
_NAME_BYTES: Final = 3072
_NAME: Final = struct.Struct(">IH")
_SLOT: Final = struct.Struct(">IIQQQQfff12x")
BLOCKS_MAX: Final = 1024
"""Processors of a graph that have a history, also those that the graph has no more."""


@dataclass(frozen=True)
class Ring:
    seconds: int
    """The length of a period."""
    slots: int
    offset: int
    """The place of its first slot in a block."""


def _rings() -> dict[str, Ring]:
    rings, offset = {}, _NAME_BYTES
    for name, seconds, slots in (("hour", 10, 360), ("day", 300, 288), ("weeks", 3600, 840)):
        rings[name] = Ring(seconds, slots, offset)
        offset += slots * _SLOT.size
    assert offset <= _BLOCK_BYTES
    return rings


RINGS: Final = _rings()
"""By the span that a ring covers."""


@dataclass(frozen=True)
class Sample:
    """A processor in a time."""

    taken: int = 0
    """The messages that it took; of a source, those that it got."""
    written: int = 0
    failed: int = 0
    """The messages that went to an error queue."""
    lag: int = 0
    """The messages that waited for it at the end."""
    p50: float | None = None
    """Seconds from the append of a message to the commit of the step that took it; None if it took none. Of several
    samples it is the mean, weighted by the messages."""
    p99: float | None = None
    """Likewise; of several samples the largest."""
    away_s: float = 0.0
    """Seconds for which it waited for something outside that was away."""

    def and_then(self, later: Sample) -> Sample:
        """Return the sample of both times."""
        total = self.taken + later.taken
        p50, p99 = later.p50, later.p99
        if self.p50 is not None and self.p99 is not None:
            share = self.taken / total if total else 0.5
            p50 = self.p50 if p50 is None else self.p50 * share + p50 * (1 - share)
            p99 = self.p99 if p99 is None else max(self.p99, p99)
        written, failed, away_s = self.written + later.written, self.failed + later.failed, self.away_s + later.away_s
        return Sample(total, written, failed, later.lag, p50, p99, away_s)


@dataclass(frozen=True)
class Point:
    """A period of a ring that has a sample."""

    start: int
    """Seconds since 1970."""
    seconds: int
    """The length of the period."""
    sample: Sample


def _packed(period: int, sample: Sample) -> bytes:
    times = [float("nan") if value is None else value for value in (sample.p50, sample.p99, sample.away_s)]
    slot = _SLOT.pack(0, period, sample.taken, sample.written, sample.failed, sample.lag, *times)
    return zlib.crc32(slot[4:]).to_bytes(4, "big") + slot[4:]


def _period(slot: bytes) -> int:
    return int.from_bytes(slot[4:8], "big")


def _sample(slot: bytes) -> Sample | None:
    """The sample of a slot; None if it is empty, torn or damaged."""
    if zlib.crc32(slot[4:]) != int.from_bytes(slot[:4], "big") or not _period(slot):
        return None
    _, _, taken, written, failed, lag, p50, p99, away_s = _SLOT.unpack(slot)
    is_known = not (math.isnan(p50) or math.isnan(p99))
    return Sample(taken, written, failed, lag, p50 if is_known else None, p99 if is_known else None, away_s)


def path_of(directory: str | Path, graph: str) -> Path:
    return Path(directory, f"{_PREFIX}{graph}")


class History:
    """The file of a graph, open for reading or for writing. One thread uses it."""

    def __init__(self, path: Path, write: bool = False) -> None:
        """``write``: make the file if there is none. Raises :class:`OSError`, and :class:`StoreForeign`.

        A file of another format is read as empty, and replaced by the first sample.
        """
        self._fd = door.opened(path, os.O_RDWR | os.O_CREAT if write else os.O_RDONLY)
        self._write = write
        self._blocks: dict[str, int] = {}
        self._find()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def processors(self) -> Collection[str]:
        """The ids of the processors that have a block."""
        return self._blocks.keys()

    def points(self, processor: str, span: str, now_s: float) -> list[Point]:
        """Return the periods of a ring up to now that have a sample, oldest first."""
        ring, block = RINGS[span], self._blocks.get(processor)
        if block is None:
            return []
        size, last = _SLOT.size, int(now_s) // ring.seconds
        slots = os.pread(self._fd, ring.slots * size, block + ring.offset)
        found = []
        for at in range(0, len(slots) - size + 1, size):
            slot = slots[at : at + size]
            period = _period(slot)
            if last - ring.slots < period <= last and (sample := _sample(slot)) is not None:
                found.append((period, sample))
        found.sort(key=lambda each: each[0])
        return [Point(period * ring.seconds, ring.seconds, sample) for period, sample in found]

    def add(self, processor: str, when_s: float, sample: Sample) -> None:
        """Add a sample to the period of each ring in which ``when_s`` is. Raises :class:`OSError`."""
        if processor not in self._blocks and not self._new_block(processor):
            return
        for ring in RINGS.values():
            period = int(when_s) // ring.seconds
            at = self._blocks[processor] + ring.offset + period % ring.slots * _SLOT.size
            slot = os.pread(self._fd, _SLOT.size, at)
            before = _sample(slot) if len(slot) == _SLOT.size and _period(slot) == period else None
            os.pwrite(self._fd, _packed(period, sample if before is None else before.and_then(sample)), at)

    def _find(self) -> bool:
        """Find the blocks. Return False if the file is empty or has another format."""
        if os.pread(self._fd, len(_MAGIC), 0) != _MAGIC:
            return False
        for number in range(BLOCKS_MAX):
            at = _HEADER_BYTES + number * _BLOCK_BYTES
            head = os.pread(self._fd, _NAME_BYTES, at)
            if len(head) < _NAME_BYTES:
                break
            checksum, length = _NAME.unpack_from(head)
            name = head[_NAME.size : _NAME.size + length]
            if zlib.crc32(name) == checksum and name:
                self._blocks[os.fsdecode(name)] = at
        return True

    def _new_block(self, processor: str) -> bool:
        """Append a block. Another process may append one at the same time. Return False if there is no room for one."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # not a POSIX lock: closing another descriptor does not end it
        try:
            if not self._find():
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, _MAGIC, 0)
                os.ftruncate(self._fd, _HEADER_BYTES)
            if processor in self._blocks:
                return True
            number = max(0, os.fstat(self._fd).st_size - _HEADER_BYTES) // _BLOCK_BYTES
            if number >= BLOCKS_MAX:
                return False
            at, name = _HEADER_BYTES + number * _BLOCK_BYTES, os.fsencode(processor)
            os.ftruncate(self._fd, at)  # what a process that was killed here had begun
            os.ftruncate(self._fd, at + _BLOCK_BYTES)
            os.pwrite(self._fd, _NAME.pack(zlib.crc32(name), len(name)) + name, at)
            self._blocks[processor] = at
            return True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


def read(directory: str | Path, span: str, now_s: float, only: str = "") -> dict[str, list[Point]]:
    """Return the periods of a ring by processor, of all graphs of a store; of one processor, if it is named.

    ``span`` is a name of :data:`RINGS`. A file that cannot be read counts as one without samples.
    """
    found: dict[str, list[Point]] = {}
    for path in sorted(Path(directory).glob(PATTERN)):
        if only and path.name != f"{_PREFIX}{only.partition('.')[0]}":
            continue
        with contextlib.suppress(OSError, StoreForeign), History(path) as history:
            for processor in [only] if only else history.processors:
                found[processor] = history.points(processor, span, now_s)
    return found


def evened(points: list[Point], seconds: int, count: int, now_s: float) -> list[Sample | None]:
    """Return the last ``count`` periods of ``seconds``, oldest first and up to the present one; None: no sample."""
    last = int(now_s) // seconds
    totals: dict[int, Sample] = {}
    for point in points:
        period = point.start // seconds
        before = totals.get(period)
        totals[period] = point.sample if before is None else before.and_then(point.sample)
    return [totals.get(period) for period in range(last - count + 1, last + 1)]
