"""Counts of values by their size, cheap enough for every step."""

from __future__ import annotations

from collections import deque
from typing import Final

from cues.overrides import override

_BUCKETS: Final = 4
"""Buckets for each doubling of the value: a quantile is off by an eighth at most."""


class Histogram(dict[int, int]):
    """Counts of integers from 0 on, by bucket. One thread adds; any thread may take a :meth:`copy`.

    Values below 4 have a bucket each. Above, the bucket of a value is given by its number of bits and by the two bits
    after the first one.
    """

    def add(self, value: int, count: int = 1) -> None:
        """Count a value ``count`` times."""
        bits = value.bit_length()
        bucket = value if bits < 3 else bits * _BUCKETS + (value >> (bits - 3) & 3)
        self[bucket] = self.get(bucket, 0) + count

    @staticmethod
    def from_json(plain: dict[str, int]) -> Histogram:
        """Return a histogram that was JSON meanwhile, whose keys are texts."""
        return Histogram({int(bucket): count for bucket, count in plain.items()})

    @override
    def copy(self) -> Histogram:
        return Histogram(self)

    def with_those_of(self, other: Histogram) -> Histogram:
        """Return the sums of two histograms."""
        total = self.copy()
        for bucket, count in other.copy().items():
            total[bucket] = total.get(bucket, 0) + count
        return total

    def since(self, before: Histogram) -> Histogram:
        """Return the values that were added after ``before``; all, if this is a histogram that began anew."""
        more = {bucket: count - before.get(bucket, 0) for bucket, count in self.copy().items()}
        if any(count < 0 for count in more.values()) or before.keys() - more.keys():
            return self.copy()
        return Histogram({bucket: count for bucket, count in more.items() if count})

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.copy().values())

    @property
    def total(self) -> float:
        """The sum of the values; each counts as the middle of its bucket."""
        return sum((sum(_bounds(bucket)) - 1) / 2 * count for bucket, count in self.copy().items())

    def quantile(self, share: float) -> float | None:
        """Return the value that ``share`` of all values do not exceed; None without values."""
        counts = sorted((bucket, count) for bucket, count in self.copy().items() if count)
        rank = share * sum(count for _, count in counts)
        for bucket, count in counts:
            if rank <= count:
                low, high = _bounds(bucket)
                return low + (high - 1 - low) * rank / count
            rank -= count
        return None

    def quantiles(self, unit: float = 1) -> dict[str, float] | None:
        """Return the median and the 99th percentile, times ``unit``; None without values."""
        median, high = self.quantile(0.5), self.quantile(0.99)
        if median is None or high is None:
            return None
        return {"p50": round(median * unit, 6), "p99": round(high * unit, 6)}

    def below(self, powers: range) -> list[int]:
        """Return the number of values below 2 to each of these powers."""
        counts = self.copy().items()
        return [sum(count for bucket, count in counts if _bounds(bucket)[1] <= 1 << power) for power in powers]


RECENT_S: Final = 60.0
"""The time over which recent values are told."""
_COPY_S: Final = 10.0
"""Seconds between two copies of a histogram: recent values are those of :data:`RECENT_S` to ten seconds more."""


class Recent:
    """The recent values of a histogram that grows. It keeps eight copies at most, so its memory is bounded."""

    def __init__(self, at: float) -> None:
        """``at`` is the time in seconds at which the histogram is empty."""
        self.copies = deque([(at, Histogram())])

    def of(self, histogram: Histogram, at: float) -> Histogram:
        """Return the values that were added in the last :data:`RECENT_S` before ``at``, or a little earlier."""
        copies = self.copies
        if at - copies[-1][0] >= _COPY_S:
            copies.append((at, histogram.copy()))
        while len(copies) > 1 and copies[1][0] <= at - RECENT_S:
            copies.popleft()
        return histogram.since(copies[0][1])


def _bounds(bucket: int) -> tuple[int, int]:
    """The smallest value of a bucket, and the smallest value above it."""
    if bucket < _BUCKETS:
        return bucket, bucket + 1
    bits, sub = divmod(bucket, _BUCKETS)
    return (_BUCKETS + sub) << (bits - 3), (_BUCKETS + sub + 1) << (bits - 3)
