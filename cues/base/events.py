"""Events of a running graph, for listeners: the command line, metrics, tests.

Only rare occurrences are events (a recovery, a retry, an error, a stop). :class:`Counters` count the
steps and messages: plain integers with one writer, which any thread may read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from cues.errors import WriterStuck

log = logging.getLogger("cues")


@dataclass(frozen=True)
class Event:
    """Base of events; ``processor`` is a whole processor id, or ``""`` for the graph."""

    processor: str
    text: str
    level: int = logging.INFO

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
    """The place where a graph runs, if it is not only this process; ``url`` is a page that shows it, or None."""

    url: str | None = None


@dataclass(frozen=True)
class Retrying(Event):
    """A function failed and is called again after ``wait_s`` seconds."""

    attempt: int = 0
    wait_s: float = 0.0
    cause: str = ""
    """Type and text of the exception."""

    @property
    def topic(self) -> str:
        return f"retry after {self.cause}"


@dataclass(frozen=True)
class Failed(Event):
    """``count`` messages of one commit failed for good and are on the error queue; the text is that of the first."""

    count: int = 0
    cause: str = ""
    """Type and text of the first exception."""

    @property
    def topic(self) -> str:
        return f"failure by {self.cause}"


@dataclass(frozen=True)
class Waiting(Event):
    """A commit waits for another process, which ``error`` names, and is tried again. Sent at each deadline."""

    error: WriterStuck | None = None


@dataclass(frozen=True)
class Stopped(Event):
    """A processor stopped: at its end, on request, fenced, or at an error (``error`` is set then)."""

    error: BaseException | None = None
    alone: bool = False
    """True if the other processors continue, because the graph runs in workers."""


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
    waited_s: float = 0.0
    """Seconds for which it waited for readers of its outputs (``max_lag``, ``max_bytes``)."""

    @property
    def call_s(self) -> float | None:
        """Mean seconds of a call; None before the first has returned."""
        return self.calling_ns / self.calls / 1e9 if self.calls else None

    def with_those_of(self, other: Counters) -> Counters:
        """Return the sums of two counters."""
        return Counters(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class Bus:
    """Passes events to listeners, and to the ``cues`` logger."""

    listeners: list[Listener] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        log.log(event.level, "%s: %s", event.processor, event.text)
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:
                # An error of a listener must not stop the graph.
                log.exception("a listener of events failed")
