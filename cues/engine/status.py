"""The status of a running graph, as plain data: of its units, and of queues that are not on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cues.base import events
from cues.base.names import ProcessorId
from cues.graphs.plan import Plan


@dataclass(frozen=True)
class UnitStatus:
    """The counters and the state of one unit."""

    id: ProcessorId
    processor: ProcessorId
    """Id of its processor."""
    counters: events.Counters
    state: Literal["running", "paused", "ended", "stopped"]
    """paused: until somebody resumes it; ended: a source that has no more messages; stopped: by an error."""


def processor_of(unit: str) -> ProcessorId:
    """The id of a unit's processor."""
    return ProcessorId(unit.partition("/")[0])


def sources_ended(plan: Plan, units: Iterable[UnitStatus]) -> bool:
    """Return True if no more messages come from outside: no queue is fed by ``send``, and every source has ended."""
    sources = {node.id for node in plan.running if node.kind == "source"}
    return not plan.fed and all(unit.state != "running" for unit in units if unit.processor in sources)


@dataclass(frozen=True)
class QueueProgress:
    """The queues and positions of a graph whose queues are not in a store of this machine."""

    ends: dict[str, int]
    """Last index by queue."""
    messages: dict[str, int]
    """Number of messages by queue."""
    positions: dict[str, int]
    """Next index by tailer id."""


class Shared(Protocol):
    """Queues that are not in a store of this machine, for the commands that show a run."""

    place: str
    """Their directory or URL, as a person reads it."""
    before: QueueProgress
    """Progress at the start of the run."""

    def now(self) -> QueueProgress:
        """Progress now."""

    def lag(self, processor: str) -> int:
        """Number of messages that the processor has not taken."""

    def messages(self, queue: str) -> list[dict[str, Any]] | None:
        """All messages of a queue; None if a store of this machine has the queue."""

    def check_send(self, queue: str) -> None:
        """Raise :class:`InvalidArgument` if no store of this machine has the queue: only processors write it."""
