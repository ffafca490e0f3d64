"""Units and their processors, and whether more messages can come from outside."""

from __future__ import annotations

from collections.abc import Iterable

from cues.base.names import ProcessorId
from cues.graphs.plan import Plan
from cues.graphs.running import UnitStatus


def processor_of(unit: str) -> ProcessorId:
    """The id of a unit's processor."""
    return ProcessorId(unit.partition("/")[0])


def is_named(unit: str, name: str) -> bool:
    """Return whether a name, with or without the graph and the partition, is that of a unit or of its processor."""
    processor = processor_of(unit)
    return name in (unit, processor, unit.partition(".")[2], processor.partition(".")[2])


def sources_ended(plan: Plan, units: Iterable[UnitStatus]) -> bool:
    """Return True if no more messages come from outside: no queue is fed by ``send``, and every source has ended."""
    sources = {node.id for node in plan.running if node.kind == "source"}
    return not plan.fed and all(unit.state != "running" for unit in units if unit.processor in sources)
