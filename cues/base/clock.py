"""The clocks: wall time for messages, monotonic time for leases, and the id of the boot.

All code of Cues reads the time through this module (``clock.now_ns()``), so that a test can replace
the clock (:class:`cues.testing.Clock`).
"""

from __future__ import annotations

import functools
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cues.base.checks import is_number
from cues.errors import InvalidArgument

now_ns = time.time_ns
"""Nanoseconds since the epoch, UTC. It may step back; append times never decrease."""

monotonic_ns = time.monotonic_ns
"""Nanoseconds since a fixed moment of this boot, the same in every process of the machine."""

WRONG_NS = 7 * 86_400 * 10**9
"""A clock that jumps by this much between two messages is doubted. So is a last append that is this far ahead of the
clock."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_datetime(ns: int) -> datetime:
    """Return an aware datetime in UTC; the nanoseconds below a microsecond are cut."""
    return _EPOCH + timedelta(microseconds=ns // 1000)


def to_ns(when: datetime) -> int:
    """Return nanoseconds since the epoch. A naive datetime is refused, because it is not an instant."""
    if not isinstance(when, datetime):
        raise InvalidArgument(
            f"Expected an aware datetime, found {type(when).__name__} ({when!r}).",
            "pass datetime.now(timezone.utc), or datetime.fromisoformat('2026-01-31T12:00:00+00:00').",
        )
    if when.tzinfo is None or when.utcoffset() is None:
        raise InvalidArgument(
            f"The datetime {when.isoformat()} has no time zone, so it is not an instant.",
            "pass when.replace(tzinfo=timezone.utc), or when.astimezone() if local time was meant.",
        )
    delta = when - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000_000 + delta.microseconds * 1000


def instant_ns(at: datetime | float, what: str) -> int:
    """Return a time in nanoseconds since the epoch, in whole microseconds, as messages keep it.

    ``at`` is an aware datetime, or seconds since the epoch. Raises :class:`InvalidArgument`; ``what`` begins its text.
    """
    number = is_number(at)
    if not number:
        ns = to_ns(at)  # type: ignore[arg-type]
    elif 0 <= at < 1 << 34:  # type: ignore[operator]
        ns = round(at * 1e6) * 1000  # type: ignore[operator]
    else:
        ns = -1
    if not 0 <= ns < 1 << 64:
        raise InvalidArgument(
            f"{what} is {f'{at!r} seconds since the epoch' if number else at}.",
            "give a time from 1970 to 2554: an aware datetime, or a number such as time.time() + 60.",
        )
    return ns


@functools.cache
def boot_id() -> str:
    """Return a string that is the same until the machine starts again."""
    linux = Path("/proc/sys/kernel/random/boot_id")
    if linux.exists():
        return linux.read_text().strip()
    import subprocess

    output = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, check=True)
    return output.stdout.strip()
