"""The figures of a processor that every display shows: ``cues status``, ``cues top``, the page, the metrics.

A new figure is an entry of :data:`FIGURES`. It is a column of the two tables and of the page, a gauge for Prometheus,
and a row of the table in docs/how-to/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from cues.base.data import dataclass
from cues.tools.measurement import ProcessorFigures


@dataclass(frozen=True)
class Figure:
    name: str
    """Its key in JSON."""
    title: str
    """The title of its column."""
    short: str
    """The same where there is little room."""
    text: str
    """Its meaning, as one sentence."""
    unit: Literal["messages", "messages a second", "seconds"]
    of: Callable[[ProcessorFigures], float | None]
    """Its value; None if it is not known."""
    metric: str = ""
    """The name of its gauge; empty if Prometheus computes it."""


FIGURES: Final = (
    Figure(
        "lag",
        "lag",
        "lag",
        "Messages on its inputs that it has not taken.",
        "messages",
        lambda processor: processor.lag,
        "cues_processor_lag",
    ),
    Figure(
        "rate",
        "per second",
        "in/s",
        "Messages that it took a second, over the last ten seconds.",
        "messages a second",
        lambda processor: processor.rate,
    ),
    Figure(
        "errors",
        "failed",
        "err",
        "Its failed messages that are on error queues now; at least, if a queue has more than 1,000 of them.",
        "messages",
        lambda processor: processor.errors,
        "cues_processor_errors",
    ),
    Figure(
        "p99",
        "p99",
        "p99",
        "Of the messages that it took in the last minute, 99 % were committed within this time after their append.",
        "seconds",
        lambda processor: (processor.latency_s or {}).get("p99"),
        "cues_processor_latency_p99_seconds",
    ),
)


def values(processor: ProcessorFigures) -> dict[str, Any]:
    """The value of each figure, by its name; and ``errors_more``, True if there may be more errors."""
    return {figure.name: figure.of(processor) for figure in FIGURES} | {"errors_more": processor.errors_more}
