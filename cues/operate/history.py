"""The history of processors as columns: one list for each figure, with a value or None for each period.

A period without a sample has None everywhere: nothing was done, and nothing waited, or the graph did not run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from cues.engine.history import RINGS, Point, evened
from cues.errors import InvalidArgument

FINEST_S: Final = RINGS["hour"].seconds
COLUMNS: Final = ("in", "out", "lag", "p50", "p99", "failed", "away")
"""Messages taken and written a second, messages that wait, latencies in seconds, messages that failed, and seconds of
outages."""
_LATE_S: Final = 1.0
"""The time after the end of a period within which its sample is written."""
_SPARKS: Final = 60
"""The values of a sparkline: minutes of the last hour."""


def check_span(span: str) -> str:
    """Return a span. Raises :class:`InvalidArgument` unless it is one of ``hour``, ``day`` and ``weeks``."""
    if span not in RINGS:
        raise InvalidArgument(f"There is no history of {span[:80]!r}.", f"use {', '.join(RINGS)}.")
    return span


def columns(points: list[Point], span: str, now_s: float) -> dict[str, Any]:
    """Return ``start`` and ``seconds`` of the first period, and the columns of all periods of a span."""
    ring = RINGS[check_span(span)]
    return _columns(points, ring.seconds, ring.slots, now_s)


def sparks(points: list[Point], now_s: float) -> dict[str, Any]:
    """Return the same for the minutes of the last hour, from the points of that hour."""
    return _columns(points, 3600 // _SPARKS, _SPARKS, now_s)


def _columns(points: list[Point], seconds: int, count: int, now_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {name: [] for name in COLUMNS}
    sampled_s = now_s - FINEST_S - _LATE_S
    first = int(sampled_s) // seconds - count + 1
    for period, sample in enumerate(evened(points, seconds, count, sampled_s), first):
        # A period that is not over has the samples of its finest periods that are.
        passed = min(seconds, (int(sampled_s) - period * seconds) // FINEST_S * FINEST_S + FINEST_S)
        values: Iterable[float | None] = (None,) * len(COLUMNS)
        if sample is not None:
            values = (
                sample.taken / passed,
                sample.written / passed,
                sample.lag,
                sample.p50,
                sample.p99,
                sample.failed,
                sample.away_s,
            )
        for name, value in zip(COLUMNS, values):
            found[name].append(value if value is None else round(value, 6))
    return {"start": first * seconds, "seconds": seconds} | found
