"""Events of a running graph, for listeners: the command line, metrics, tests.

Only rare occurrences are events (a recovery, a retry, an error, a stop). :class:`Counters` count the
steps and messages: plain integers with one writer, which any thread may read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import field
from typing import Any

from cues.base import logs
from cues.base.data import dataclass
from cues.base.histogram import Histogram
from cues.errors import WriterStuck
from cues.overrides import override

log = logs.logger("cues")


@dataclass(frozen=True)
class Event:
    """Base of events; ``processor`` is a whole processor id, or ``""`` for the graph."""

    processor: str
    text: str
    level: int = logging.INFO

    @property
    def facts(self) -> dict[str, Any]:
        """The attributes of its log record (:mod:`cues.base.logs`)."""
        return logs.of_processor(self.processor)

    @property
    def topic(self) -> str:
        """Events of one processor with equal topics repeat one another."""
        return self.text


@dataclass(frozen=True)
class Recovered(Event):
    """A processor was recovered at a start; ``decision`` is fresh, resume, rewind or void."""

    decision: str = "fresh"


@dataclass(frozen=True)
class Placed(Event):
    """A place that people look for: where a graph runs, or a file that it has finished.

    ``url`` is a page that shows it, or None.
    """

    url: str | None = None


@dataclass(frozen=True)
class Retrying(Event):
    """A function failed and is called again after ``wait_s`` seconds."""

    attempt: int = 0
    wait_s: float = 0.0
    cause: str = ""
    """Type and text of the exception."""

    @override
    @property
    def topic(self) -> str:
        return f"retry after {self.cause}"


@dataclass(frozen=True)
class Failed(Event):
    """``count`` messages of one commit failed for good and are on the error queue; the text is that of the first."""

    count: int = 0
    cause: str = ""
    """Type and text of the first exception."""
    queue: str = ""
    """The error queue."""

    @override
    @property
    def facts(self) -> dict[str, Any]:
        return super().facts | {"queue": self.queue or None}

    @override
    @property
    def topic(self) -> str:
        return f"failure by {self.cause}"


@dataclass(frozen=True)
class Waiting(Event):
    """A commit waits for another process, which ``error`` names, and is tried again. Sent at each deadline."""

    error: WriterStuck | None = None


@dataclass(frozen=True)
class Away(Event):
    """A processor waits for something outside that is away, named ``what``; ``over``: it is there again."""

    what: str = ""
    over: bool = False


@dataclass(frozen=True)
class Stopped(Event):
    """A processor stopped: at its end, on request, fenced, or at an error (``error`` is set then)."""

    error: BaseException | None = None
    alone: bool = False
    """True if the other processors continue, because the graph runs in workers."""


@dataclass(frozen=True)
class Paused(Event):
    """A unit of a processor is paused until somebody resumes it; the other processors go on. Also sent at a start."""

    pause: dict[str, Any] = field(default_factory=dict)
    """The pause, as ``cues status --json`` shows it."""


Listener = Callable[[Event], None]


@dataclass
class Counters:
    """Counts of a processor since its start: messages taken, written and failed, steps, retries, calls of its function.

    For a message function ``calls`` counts the messages whose call has returned, or that a filter dropped. If calls
    are fast, it may lag by a few. A call and its retries count as one.
    """

    taken: int = 0
    written: int = 0
    failed: int = 0
    steps: int = 0
    retries: int = 0
    calls: int = 0
    in_flight: int = 0
    """Calls that have not returned."""
    calling_ns: int = 0
    """The sum of the times of all calls that returned, also of concurrent ones."""
    latency: Histogram = field(default_factory=Histogram, compare=False, repr=False)
    """Microseconds from the append of a message to the commit of the step that took it; empty for sources.

    If steps follow each other quickly, some of them count for all (:mod:`cues.steps.meter`)."""
    sizes: Histogram = field(default_factory=Histogram, compare=False, repr=False)
    """Messages of a step."""
    waited_s: float = 0.0
    """Seconds for which it waited for readers of its outputs (``max_lag``, ``max_bytes``)."""
    limited: bool = False
    """Messages wait because ``rate=`` allows no call now."""
    away: str = ""
    """The thing outside that is away, since when, and why; empty otherwise."""
    away_s: float = 0.0
    """Seconds of such waits that are over."""

    @property
    def call_s(self) -> float | None:
        """Mean seconds of a call; None before the first has returned."""
        return self.calling_ns / self.calls / 1e9 if self.calls else None

    def with_those_of(self, other: Counters) -> Counters:
        """Return the sums of two counters."""
        numbers = {name: value + getattr(other, name) for name, value in vars(self).items() if type(value) is int}
        return Counters(
            **numbers,
            latency=self.latency.with_those_of(other.latency),
            sizes=self.sizes.with_those_of(other.sizes),
            limited=self.limited or other.limited,
            away=self.away or other.away,
            away_s=self.away_s + other.away_s,
        )

    def copy(self) -> Counters:
        return Counters(**vars(self) | {"latency": self.latency.copy(), "sizes": self.sizes.copy()})

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return vars(self) | {"latency": self.latency.copy(), "sizes": self.sizes.copy()}

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> Counters:
        """Return the counters from a result of :meth:`to_dict` that was JSON meanwhile; others count as 0."""
        known = {name: value for name, value in plain.items() if name in vars(Counters())}
        for name in ("latency", "sizes"):
            known[name] = Histogram.from_json(known.get(name, {}))
        return Counters(**known)


@dataclass
class Bus:
    """Passes events to listeners, and to the ``cues`` logger."""

    listeners: list[Listener] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        log.log(event.level, "%s: %s", event.processor, event.text, **event.facts)
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:
                # An error of a listener must not stop the graph.
                log.exception("a listener of events failed", **event.facts)
