"""Sources that tick: at an interval, or by a cron expression.

    graph.source("ticks")(cues.every("10s"))          {"index": 1, "at": 2026-01-31T00:00:10Z}, …
    graph.source("mornings")(cues.cron("0 6 * * *", timezone="Europe/Berlin"))

    1. start    the first start commits its time as the position, without a message
    2. plan     the next tick is the first planned time after the position
    3. tick     when that time has come: ``(position, message)``, which the engine commits together (steps/feed.py)

The position is ``[planned time in nanoseconds, index]``. So a tick is on the queue once, also after kill -9, and a
restart continues with the first tick after the last one that was committed. Ticks are made one at a time, when the
engine has room for them, so many missed ones need neither memory nor one large commit.

Not guaranteed: that a tick is written at its time. A tick is written after its time, when the source runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final

from cues.base import clock
from cues.errors import Diverged, InvalidArgument
from cues.imported import package
from cues.overrides import override
from cues.queues.options import duration_of

MISSED: Final = ("all", "last", "none")
"""The policies for ticks that were due while the source did not run, or was held up."""

INTERVAL_S_MIN: Final = 0.001
"""The shortest interval in seconds. The time of a message has microseconds, and a commit takes about this long."""

_LOOK_S: Final = 0.1
"""Seconds between two looks at the clock, which may be set while the source waits."""
_NEVER_NS: Final = clock.to_ns(datetime.max.replace(tzinfo=UTC))
"""The time after the last one of an expression that has no more."""
_LOOKS_EACH: Final = 1000
"""Counted ticks between two looks at whether the graph drains."""

Position = list[int]
"""The planned time of the last tick in nanoseconds since the epoch, and its index."""


class Schedule:
    """A source of ticks: :func:`every` and :func:`cron`."""

    def __init__(self, missed: str, follow: bool) -> None:
        if missed not in MISSED:
            raise InvalidArgument(f"missed={missed!r} is unknown.", "use 'all', 'last' or 'none'.")
        if missed == "none" and not follow:
            raise InvalidArgument(
                "missed='none' drops the ticks before the start, and follow=False ends before a later one.",
                "use missed='last' or missed='all' with follow=False.",
            )
        self.missed, self.follow = missed, follow

    def after(self, ns: int) -> int:
        """Return the first planned time after ``ns``."""
        raise NotImplementedError

    def passed(self, start: int, end: int, process: Any) -> tuple[int, int]:
        """Return the last planned time in (start, end], and the number of those times; (start, 0) without one."""
        raise NotImplementedError

    def __call__(self, position: Position | None, process: Any) -> Iterator[tuple[Position, dict[str, Any] | None]]:
        """Yield ``(position, message)`` for each tick after ``position``."""
        started = clock.now_ns()
        if position is None:
            position = [started, 0]
            yield position, None
        done, index = _checked(position)
        if self.missed == "none" and done < started:
            done, count = self.passed(done, started, process)
            index += count
        while not process.stopping:
            now = clock.now_ns()
            planned = self.after(done)
            if planned <= now:
                done, count = (planned, 1) if self.missed == "all" else self.passed(done, now, process)
                if process.stopping:  # the count may not be complete
                    return
                index += count
                yield [done, index], {"index": index, "at": clock.to_datetime(done)}
            elif not self.follow or not process.wait(min(_LOOK_S, (planned - now) / 1e9)):
                return


class Every(Schedule):
    """A tick at each multiple of an interval; see :func:`every`."""

    def __init__(self, interval: float | str | timedelta, missed: str, follow: bool) -> None:
        super().__init__(missed, follow)
        seconds = duration_of(interval, "The interval")
        if seconds < INTERVAL_S_MIN:
            raise InvalidArgument(
                f"The interval {interval!r} is below {INTERVAL_S_MIN} s.", "pass a longer one, such as '1s'."
            )
        self.interval_ns = round(seconds * 1e6) * 1000
        self.__name__ = "every"

    @override
    def after(self, ns: int) -> int:
        return (ns // self.interval_ns + 1) * self.interval_ns

    @override
    def passed(self, start: int, end: int, process: Any) -> tuple[int, int]:
        count = max(0, end // self.interval_ns - start // self.interval_ns)
        return (end // self.interval_ns * self.interval_ns if count else start), count

    @override
    def __repr__(self) -> str:
        return f"cues.every({self.interval_ns / 1e9:g})"


class Cron(Schedule):
    """A tick at each time that a cron expression matches; see :func:`cron`."""

    def __init__(self, expression: str, timezone: str | tzinfo, missed: str, follow: bool) -> None:
        super().__init__(missed, follow)
        cronsim = package("cues.cron needs cronsim", "time", "cronsim")
        self.expression, self.timezone = expression, _zone(timezone)
        self.__name__ = "cron"
        try:
            first = next(cronsim.CronSim(expression, self._local(clock.now_ns())), None)
        except (cronsim.CronSimError, AttributeError) as error:  # AttributeError: it is not a text
            raise InvalidArgument(
                f"The cron expression {expression!r} is refused: {error}.",
                "pass five fields, minute hour day month weekday, such as '0 6 * * *'; or six, with the seconds first.",
            ) from None
        if first is None:
            raise InvalidArgument(
                f"The cron expression {expression!r} has no time in the next 50 years.",
                "pass a day that its months have, such as '0 6 28 2 *'.",
            )

    @override
    def after(self, ns: int) -> int:
        return next(self._times(ns))

    @override
    def passed(self, start: int, end: int, process: Any) -> tuple[int, int]:
        last, count = start, 0
        for at in self._times(start):
            if at > end or (count % _LOOKS_EACH == 0 and process.stopping):
                break
            last, count = at, count + 1
        return last, count

    def _times(self, ns: int) -> Iterator[int]:
        """Yield the planned times after ``ns``, ascending. They depend on ``ns`` alone, so a restart finds the same."""
        from cronsim import CronSim

        for planned in CronSim(self.expression, self._local(ns)):
            at = clock.to_ns(planned)
            if at > ns:  # in the second of two hours in autumn, the library may name a time of the first one again
                yield at
        yield _NEVER_NS

    def _local(self, ns: int) -> datetime:
        """Return the local time at or before ``ns``, in whole seconds."""
        return clock.to_datetime(ns).replace(microsecond=0).astimezone(self.timezone)

    @override
    def __repr__(self) -> str:
        return f"cues.cron({self.expression!r}, timezone={str(self.timezone)!r})"


def every(interval: float | str | timedelta, *, missed: str = "all", follow: bool = True) -> Every:
    """Return a function of a source that yields a message at each multiple of an interval, exactly once.

    ``interval``   seconds, a timedelta, or a text such as "10s", "5m", "1h", "1d"; 1 ms or more
    ``missed``     ticks that were due while the source did not run, or was held up by the readers of its queue.
                   ``"all"``: each is written, with its planned time. ``"last"``: only the latest. ``"none"``: as
                   ``"last"``, but none from before the start of the run
    ``follow``     False: end when no tick is due, for runs that something else starts

    A message is ``{"index", "at"}``. ``at`` is the planned time, an aware datetime in UTC. ``index`` counts the planned
    ticks since the first start from 1, so a gap shows ticks that were not written.

    Ticks are at multiples of the interval from the epoch: "1h" ticks at each full hour, "1d" at midnight UTC. The first
    start writes no tick; it commits its time, and each tick after it is written. With another interval, the source
    continues at the first multiple of it after the last tick. Raises :class:`InvalidArgument`.
    """
    return Every(interval, missed, follow)


def cron(expression: str, *, timezone: str | tzinfo = "UTC", missed: str = "all", follow: bool = True) -> Cron:
    """Return a function of a source that yields a message at each time of a cron expression, exactly once.

    ``expression``   five fields, minute hour day month weekday, such as "0 6 * * 1-5"; or six, with the seconds first
    ``timezone``     the zone of the expression: an IANA name such as "Europe/Berlin", or a tzinfo
    ``missed``, ``follow``, and the messages are those of :func:`every`; ``at`` is in UTC.

    When clocks change, the rules are those of Debian's cron. Five fields whose minute and hour do not begin with ``*``
    tick at a local time: if that time is skipped in spring, the tick is at the first time after the gap; if it is
    repeated in autumn, the tick is at the first of the two. All other expressions follow the time that passes: none of
    their ticks is skipped, and both hours of autumn have theirs.

    Needs the extra ``time`` (the package cronsim). Raises :class:`InvalidArgument` for another expression or zone, and
    :class:`cues.errors.NotInstalled`.
    """
    return Cron(expression, timezone, missed, follow)


def _checked(position: Any) -> Position:
    if isinstance(position, list) and len(position) == 2 and all(type(number) is int for number in position):
        return position
    raise Diverged(
        f"The position {str(position)[:80]} is not one of cues.every or cues.cron, a time and an index.",
        "give the source another id, which begins at the start; or declare the function that wrote it.",
    )


def _zone(timezone: Any) -> tzinfo:
    from zoneinfo import ZoneInfo

    if isinstance(timezone, tzinfo):
        return timezone
    try:
        return ZoneInfo(timezone)
    except (OSError, ValueError, TypeError, LookupError) as error:  # ZoneInfoNotFoundError is a KeyError
        raise InvalidArgument(
            f"The time zone {timezone!r} is not known ({type(error).__name__}).",
            "pass a name such as 'Europe/Berlin'; on a machine without time zones, pip install tzdata.",
        ) from None
