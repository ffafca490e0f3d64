"""Moves of positions, planned and then made: of a processor or a consumer group of a store.

Those of a directory are in cues/operate/directories.py. A plan changes nothing. A processor over partitions is moved on
all of them, one after another; an index belongs to one partition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from cues.base import names
from cues.base.names import ProcessorId
from cues.engine.status import processor_of
from cues.errors import StoreNotFound, Unsupported
from cues.graphs.graph import Graph
from cues.graphs.graphfile import shown
from cues.groups import operate as groups
from cues.operate import positions, processors
from cues.operate import target as targets
from cues.operate.positions import Position
from cues.operate.refused import Refused
from cues.operate.target import Target
from cues.queues.log import Log
from cues.queues.seek_plan import SeekPlan
from cues.queues.store import Store
from cues.steps import ownership
from cues.storage import wakeup
from cues.tools import metrics
from cues.tools.measurement import TailerMetrics


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
    """What will continue at another place."""
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
    units = units_of(target, metrics.processors(opened), request.to)
    moves = [_Move(opened, unit, request) for unit in units]
    plan = graph.plan() if graph is not None else None
    plans = [processors.plan_unit(opened, move.unit, move.positions, request.again, plan) for move in moves]

    def apply() -> Iterator[tuple[str, dict[str, Any]]]:
        for move in moves:
            row = ownership.seek(opened, move.unit, move.positions, request.again, request.reset_state)
            opened.core.ring(move.mask)
            facts = {"positions": move.positions, "epoch": row.epoch, "generation": row.generation}
            yield f"{move.unit} moved: {move.words}", {"processor": move.unit, **facts}

    return PlannedSeek(subject_of(units), "; ".join(move.words for move in moves), apply, plans)


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


def chosen_tailers(unit: str, request: SeekRequest, known: list[str]) -> list[str]:
    """The tailers to move, by id: the one that the request names, else all."""
    processor, tailer = processor_of(unit), request.tailer
    inputs = [id.rpartition(".")[2] for id in known]
    if tailer is None:
        if len(known) > 1 and isinstance(request.to, int):
            raise Refused(
                f"{processor} has several inputs ({', '.join(inputs)}), and an index belongs to one.",
                f"add --tailer {inputs[0]}",
            )
        return known
    for id, queue in zip(known, inputs):
        if tailer in (id, queue, queue.partition("/")[0]):
            return [id]
    raise Refused(
        f"{processor} does not read {tailer!r}; it reads {', '.join(inputs)}.",
        f"give --tailer {targets.nearest(tailer, inputs)}",
    )


class _Move:
    """The new positions of one unit of a processor."""

    def __init__(self, opened: Store, unit: ProcessorId, request: SeekRequest) -> None:
        standing = {tailer.tailer: tailer for tailer in metrics.tailers(opened, unit)}
        if not standing:
            raise Unsupported(
                f"{unit} is a source, which keeps its own position.", "start it over with: cues run --fresh."
            )
        chosen = chosen_tailers(unit, request, list(standing))
        self.unit = unit
        self.positions = {id: _index(opened, standing[id], request.to) for id in chosen}
        self.words = ", ".join(
            f"{standing[id].queue} from {standing[id].position:,} to {index:,}" for id, index in self.positions.items()
        )
        self.mask = wakeup.union(wakeup.mask_of(*names.log_parts(tailer.queue)) for tailer in standing.values())
        """The logs on which it may sleep: a ring lets it read its position again."""


def _index(store: Store, standing: TailerMetrics, to: Position) -> int:
    with contextlib.ExitStack() as closing:
        if standing.store and standing.lag is None:
            raise StoreNotFound(
                f"The store of queue {standing.queue!r} is not at its path ({shown(standing.store)}), or is another"
                " one.",
                "put the store back at that path.",
                path=standing.store,
            )
        other = closing.enter_context(Store(standing.store, readonly=True)) if standing.store else store
        return positions.now_on(Log(other, standing.queue), to, "--to")


def _of_group(opened: Store, group: str, request: SeekRequest) -> PlannedSeek:
    to, tailer = request.to, request.tailer
    if request.again:
        raise Refused("--again is for processors, and a group has no sinks.", "leave it out.")
    before = {names.log_parts(p.log): p.position for p in groups.describe(opened, group).partitions}
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
