"""What happens while a graph runs, told to whoever listens: the command line, metrics, tests.

Only what is rare is an event (a recovery, a retry, an error, a stop). What happens per step is
counted in :class:`Counters`, plain integers that their one writer adds to and anybody may read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger("cues")


@dataclass(frozen=True)
class Event:
    """Something worth a log line; ``processor`` is a whole processor id, or ``""`` for the graph."""

    processor: str
    text: str
    level: int = logging.INFO


@dataclass(frozen=True)
class Recovered(Event):
    """What the start table decided; ``decision`` is one of fresh, resume, rewind, void."""

    decision: str = "fresh"


@dataclass(frozen=True)
class Retrying(Event):
    """A function failed and is called again after ``wait_s`` seconds."""

    attempt: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True)
class Failed(Event):
    """``count`` messages of one commit failed for good and went to the error queue; the text is the first's."""

    count: int = 0


@dataclass(frozen=True)
class Stopped(Event):
    """A processor stopped: at its end, on request, fenced, or at an error (``error`` is set then)."""

    error: BaseException | None = None


Listener = Callable[[Event], None]


@dataclass
class Counters:
    """Of one processor since its start: messages taken, written and failed, steps, retries."""

    taken: int = 0
    written: int = 0
    failed: int = 0
    steps: int = 0
    retries: int = 0

    def with_those_of(self, other: Counters) -> Counters:
        """The sums."""
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
                # Who watches must not stop what is watched.
                log.exception("a listener of events failed")
