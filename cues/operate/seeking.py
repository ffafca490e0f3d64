"""Moves of positions, planned and then made: of a processor or a consumer group of a store.

Those of a directory are in cues/operate/directories.py. A plan changes nothing. A processor over partitions is moved on
all of them, one after another; an index belongs to one partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from cues.base import names
from cues.base.data import dataclass
from cues.base.names import ProcessorId
from cues.base.seek_plan import SeekPlan
from cues.engine import standing
from cues.engine.status import processor_of
from cues.graphs.graph import Graph
from cues.groups import operate as groups
from cues.operate import positions, processors
from cues.operate import target as targets
from cues.operate.positions import Position
from cues.operate.refused import Refused
from cues.operate.target import Target
from cues.queues.log import Log
from cues.queues.store import Store

FORM: Final = ("--to", "--tailer {}")
"""The options of a command, for errors."""


@dataclass(frozen=True)
class SeekRequest:
    """A wish to move the positions of what a target names."""

    to: Position
    tailer: str | None = None
    """Only this input: a queue, a partition of a group, or a tailer id."""
    again: bool = False
    """Deliver the messages again to transactional sinks."""
    reset_state: bool = False
    plan_only: bool = False

    def refuse_state(self, name: str, what: str) -> None:
        """Refuse what only processors of stores have."""
        if self.reset_state or self.plan_only:
            option = "--reset-state" if self.reset_state else "--plan"
            raise Refused(f"{option} is for processors of stores, and {name} is {what}.", "leave it out.")


@dataclass(frozen=True)
class PlannedSeek:
    """A move that can be made."""

    subject: str
    """The processor, unit or group that will continue at another place."""
    words: str
    """From where to where."""
    apply: Callable[[], Iterable[tuple[str, dict[str, Any]]]]
    """Move; for each part that was moved, a sentence and its facts."""
    plans: Sequence[SeekPlan] = ()
    """The effects, by unit; empty if they are not known."""


def planned(opened: Store, target: Target, request: SeekRequest, graph: Graph | None) -> PlannedSeek:
    """Plan the move of what the target names: a group (``group:billing``), a processor, or a unit of one."""
    group = targets.group_of(target, [group.group for group in groups.list_groups(opened)])
    if group is not None:
        return _of_group(opened, group, request)
    units = units_of(target, standing.processors(opened), request.to)
    plan = graph.plan() if graph is not None else None
    plans = [
        processors.plan_unit(opened, unit, request.to, request.tailer, request.again, plan, FORM) for unit in units
    ]
    words = [", ".join(f"{i.queue} from {i.position:,} to {i.to:,}" for i in plan.inputs) for plan in plans]

    def apply() -> Iterator[tuple[str, dict[str, Any]]]:
        for plan, moved in zip(plans, words):
            (row,) = processors.seek(opened, [plan], again=request.again, reset_state=request.reset_state)
            places = {input.tailer: input.to for input in plan.inputs}
            facts = {"positions": places, "epoch": row.epoch, "generation": row.generation}
            yield f"{plan.processor} moved: {moved}", {"processor": plan.processor, **facts}

    return PlannedSeek(subject_of(units), "; ".join(words), apply, plans)


def subject_of(units: Sequence[ProcessorId]) -> str:
    """The unit, or the processor of several units."""
    return processor_of(units[0]) if len(units) > 1 else units[0]


def units_of(target: Target, known: list[ProcessorId], to: Position) -> list[ProcessorId]:
    """The units to move: the one that is named with its partition, else all units of the processor."""
    name = target.name.removesuffix("/0")
    unit = targets.processor_named(replace(target, name=name), known)
    units = [id for id in known if processor_of(id) == unit]
    if name != target.name or len(units) < 2:
        return [unit]
    if isinstance(to, int):
        raise Refused(
            f"{unit} reads {len(units)} partitions, and an index belongs to one.",
            f"{target.again(f'{name}/0')} --to {to}",
        )
    return units


def _of_group(opened: Store, group: str, request: SeekRequest) -> PlannedSeek:
    to, tailer = request.to, request.tailer
    if request.again:
        raise Refused("--again is for processors, and a group has no sinks.", "leave it out.")
    before = {names.split_log(p.log): p.position for p in groups.describe(opened, group).partitions}
    queues = sorted({queue for queue, _ in before})
    chosen = [p for p in before if tailer is None or tailer in (p[0], names.log_id(*p), f"{p[0]}/{p[1]}")]
    if not chosen:
        known = [names.log_id(*partition) for partition in before]
        raise Refused(
            f"{group} does not read {tailer or 'any queue'!r}; it reads {', '.join(queues) or 'none'}.",
            f"give --tailer {targets.nearest(str(tailer), [*queues, *known])}",
        )
    if len(chosen) > 1 and not isinstance(to, (str, datetime)):
        raise Refused(
            f"{group} reads {len(chosen)} partitions, and an index belongs to one.",
            f"add --tailer {chosen[0][0]}/{chosen[0][1]}",
        )
    indices = {p: positions.now_on(Log(opened, *p), to, "--to") for p in chosen}
    words = ", ".join(f"{names.log_id(*p)} from {before[p]:,} to {index:,}" for p, index in indices.items())

    def apply() -> Iterator[tuple[str, dict[str, Any]]]:
        moved = groups.seek(opened, group, to, *chosen)  # type: ignore[arg-type]
        places = {names.log_id(*partition): index for partition, index in moved.items()}
        text = f"{group} moved: {', '.join(f'{log} to {at:,}' for log, at in places.items())}"
        yield text, {"group": group, "positions": places}

    return PlannedSeek(f"The group {group}", words, apply)
