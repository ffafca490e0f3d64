"""``cues seek``: move a position of a processor or a consumer group, whether it runs or not."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import datetime

from cues.base import names
from cues.base.names import ProcessorId
from cues.cli import place as places
from cues.cli import target as targets
from cues.cli.options import CommandFailed, WrongUsage, command, confirm, option, yes_option
from cues.cli.output import CommandOutput, count, output_options, size
from cues.cli.printing import out
from cues.errors import StoreNotFound
from cues.groups import operate as groups
from cues.queues.log import Log
from cues.queues.seek_plan import SeekPlan
from cues.queues.store import Store
from cues.steps import ownership
from cues.storage import wakeup
from cues.tools import metrics, operate


@command()
@targets.takes_store("GRAPH#PROCESSOR | STORE#GRAPH.PROCESSOR | STORE#group:NAME", shared=True)
@option("--to", "place", required=True, metavar="PLACE", help=f"The new position: {places.HELP}.")
@option("--tailer", metavar="QUEUE", help="Only this input: a queue, a partition of a group, or a tailer id.")
@option("--reset-state", is_flag=True, help="Delete the processor's state in the same commit.")
@option("--plan", "plan_only", is_flag=True, help="Only print what would happen.")
@option("--again", is_flag=True, help="Deliver the messages again to transactional sinks.")
@yes_option
@output_options
def seek(
    target: targets.StoreTarget,
    place: str,
    tailer: str | None,
    reset_state: bool,
    plan_only: bool,
    again: bool,
    yes: bool,
    output: CommandOutput,
) -> None:
    """Move the position of a processor or a consumer group: back, to process messages again, or forward, to skip some.

    It first prints a plan: the messages that are delivered again or left out, the outputs that are written again, and
    the state. Outputs stay as they are, so a move back writes them again. A sink that keeps process.delivery in its
    target skips messages that it has, unless --again raises the generation. State stays too, so messages that are
    delivered again count twice in it, unless --reset-state deletes it.

    \b
      cues seek graph.py#report --to start
      cues seek graph.py#count --to start --reset-state
      cues seek graph.py#count --to 1d --plan        what would happen
      cues seek data/shop#shop.price --to 2026-01-31T12:00Z --yes
      cues seek data/shop#shop.merge --tailer orders --to end
      cues seek data/shop#shop.price/3 --to 700
      cues seek s3://bucket/shop#shop.price --to start      a directory of cues run --queues
      cues seek data/shop#group:billing --to start          a consumer group
      cues seek data/shop#group:billing --tailer orders/3 --to 700

    A consumer group is moved in one commit on all partitions of its queues, also on those that members are
    reading: their steps under way are refused, and they continue at the new place.

    A processor over partitions is moved on all of them to the start, the end or a time, one after another. An
    index belongs to one partition, so add the partition to the processor's name.

    In a directory of cues run --queues no driver may run the graph, and a step that was under way is not repeated.
    """
    where = places.parse(place, "--to")
    special = target.is_shared or target.name.startswith(targets.GROUP)
    if special and (reset_state or plan_only):
        what = "a consumer group" if not target.is_shared else "a directory of cues run --queues"
        name = "--reset-state" if reset_state else "--plan"
        raise WrongUsage(f"{name} is for processors of stores, and {target.text} is {what}.", "leave it out.")
    if target.is_shared:
        if again:
            raise WrongUsage(
                f"--again is for stores, and {target.place} is a directory of cues run --queues.",
                "leave it out; if a sink keeps process.delivery in its target, delete its rows there first.",
            )
        return _seek_shared(target, where, tailer, yes, output)
    target.require()
    with target.open(readonly=plan_only) as opened:
        group = targets.group_of(target, [group.group for group in groups.list_groups(opened)])
        if group is not None:
            return _seek_group(opened, group, where, tailer, again, yes, output)
        units = _units(target, metrics.processors(opened), where)
        moves = [_move(opened, unit, tailer, where) for unit in units]
        whole = units[0].partition("/")[0] if len(units) > 1 else units[0]
        plan = target.file.graph.plan() if target.file is not None else None
        plans = [operate.plan_unit(opened, move.unit, move.positions, again, plan) for move in moves]
        if plan_only:
            return _show_plans(plans, reset_state, output)
        lines = "".join(f"\n  {line}" for line in _effects(plans, reset_state))
        words = "; ".join(move.words for move in moves)
        confirm(f"{whole} will continue at another place: {words}.{lines}", "Move it?", yes)
        for move in moves:
            row = ownership.seek(opened, move.unit, move.positions, again, reset_state)
            opened.core.ring(move.mask)
            output.say(
                f"{move.unit} moved: {move.words}",
                processor=move.unit,
                positions=move.positions,
                epoch=row.epoch,
                generation=row.generation,
            )


def _effects(plans: list[SeekPlan], reset_state: bool) -> list[str]:
    """The effects of a seek, a line each; those of several units together."""
    inputs = [input for plan in plans for input in plan.inputs]
    lines = []
    for queue in dict.fromkeys(input.queue.partition("/")[0] for input in inputs):
        mine = [input for input in inputs if input.queue.partition("/")[0] == queue]
        again, skipped = sum(input.again for input in mine), sum(input.skipped for input in mine)
        lines += [f"{count(again, 'message')} of {queue} will be delivered again"] if again else []
        lines += [f"{count(skipped, 'message')} of {queue} will be left out"] if skipped else []
    for output in dict.fromkeys(output for plan in plans for output in plan.outputs):
        where = f" of the store {targets.shown(output.store)}" if output.store else ""
        lines.append(f"outputs to {output.name}{where}: {output.effect}")
    values, size_bytes = sum(plan.state_values for plan in plans), sum(plan.state_bytes for plan in plans)
    if values:
        state = f"state: {count(values, 'value')}, {size(size_bytes)}"
        if reset_state:
            lines.append(f"{state}, will be deleted")
        elif any(plan.counts_twice for plan in plans):
            lines.append(f"{state}, stays: messages that are delivered again COUNT TWICE in it, unless --reset-state")
        else:
            lines.append(f"{state}, stays")
    return lines


def _show_plans(plans: list[SeekPlan], reset_state: bool, output: CommandOutput) -> None:
    for line in [] if output.json else _effects(plans, reset_state) or ["nothing would change"]:
        out(line)
    for plan in plans if output.json else ():
        output.say(
            "",
            processor=plan.processor,
            inputs={i.tailer: vars(i) | {"again": i.again, "skipped": i.skipped} for i in plan.inputs},
            outputs=[vars(each) for each in plan.outputs],
            state={"values": plan.state_values, "bytes": plan.state_bytes, "counts_twice": plan.counts_twice},
            reset_state=reset_state,
        )


def _seek_group(
    opened: Store, group: str, where: places.Place, tailer: str | None, again: bool, yes: bool, output: CommandOutput
) -> None:
    if again:
        raise WrongUsage("--again is for processors, and a group has no sinks.", "leave it out.")
    before = {names.log_parts(p.log): p.position for p in groups.describe(opened, group).partitions}
    queues = sorted({queue for queue, _ in before})
    chosen = [p for p in before if tailer is None or tailer in (p[0], names.log_id(*p), f"{p[0]}/{p[1]}")]
    if not chosen:
        known = [names.log_id(*partition) for partition in before]
        raise WrongUsage(
            f"{group} does not read {tailer or 'any queue'!r}; it reads {', '.join(queues) or 'none'}.",
            f"give --tailer {targets.nearest(str(tailer), [*queues, *known])}",
        )
    if len(chosen) > 1 and not isinstance(where, (str, datetime)):
        raise WrongUsage(
            f"{group} reads {len(chosen)} partitions, and an index belongs to one.",
            f"add --tailer {chosen[0][0]}/{chosen[0][1]}",
        )
    to = {p: places.now_on(Log(opened, *p), where, "--to") for p in chosen}
    words = ", ".join(f"{names.log_id(*p)} from {before[p]:,} to {index:,}" for p, index in to.items())
    confirm(f"The group {group} will continue at another place: {words}.", "Move it?", yes)
    moved = groups.seek(opened, group, where, *chosen)  # type: ignore[arg-type]
    positions = {names.log_id(*partition): index for partition, index in moved.items()}
    output.say(
        f"{group} moved: {', '.join(f'{log} to {at:,}' for log, at in positions.items())}",
        group=group,
        positions=positions,
    )


def _seek_shared(
    target: targets.StoreTarget, where: places.Place, tailer: str | None, yes: bool, output: CommandOutput
) -> None:
    from cues.spark.cluster import inspection, operations
    from cues.spark.cluster.files import open_files

    units = _units(target, [ProcessorId(last.processor) for last in inspection.processors_of(target.place)], where)
    whole = units[0].partition("/")[0] if len(units) > 1 else units[0]
    with operations.running_none(open_files(target.place), units[0].partition(".")[0]) as driver:
        operations.settle(driver)
        moves = {unit: _move_shared(target.place, unit, tailer, where) for unit in units}
        words = "; ".join(words for _, words in moves.values())
        confirm(f"{whole} will continue at another place: {words}.", "Move it?", yes)
        for unit, (positions, words) in moves.items():
            record = operations.seek(driver, unit, positions)
            output.say(
                f"{unit} moved: {words}",
                processor=unit,
                positions=positions,
                epoch=record.epoch,
                record=record.number,
            )


def _move_shared(place: str, unit: str, tailer: str | None, where: places.Place) -> tuple[dict[str, int], str]:
    """The new positions of one unit in a shared directory, and what they mean."""
    from cues.spark.cluster import inspection

    (last,) = inspection.records_of(place, unit, 1)
    if last.is_feeder or not last.positions:
        raise CommandFailed(
            f"{unit} copies from a source, which keeps its own position.",
            "start it over with: cues run --engine spark --queues DIR --fresh.",
        )
    if last.record.batch is not None:
        raise CommandFailed(
            f"{unit} is a frame that keeps state, which belongs to all messages up to its position.",
            "give it another id in the graph, so that it begins at the first message; or start over with: cues run"
            " --engine spark --queues DIR --fresh.",
        )
    positions, words = {}, []
    for id in _chosen(unit, tailer, list(last.record.positions), where):
        log, before = last.queue_of(id), last.record.positions[id][1]
        alone = log if "/" in log else f"{log}/0"
        (index,) = inspection.QueueReader(place, alone).place_of(where, "--to")
        positions[id] = index
        effect = f"{count(abs(index - before), 'message')} {'skipped' if index > before else 'processed again'}"
        words.append(f"{log} from {before:,} to {index:,} ({effect})")
    return positions, ", ".join(words)


@dataclass(frozen=True)
class _Move:
    """The new positions of one unit of a processor."""

    unit: ProcessorId
    positions: dict[str, int]
    words: str
    mask: int
    """The logs on which it may sleep: a ring lets it read its position again."""


def _units(target: targets.StoreTarget, known: list[ProcessorId], where: places.Place) -> list[ProcessorId]:
    """The units to move: the one that is named with its partition, else all units of the processor."""
    name = target.name.removesuffix("/0")
    unit = targets.processor_of(replace(target, name=name), known)
    units = [id for id in known if id.partition("/")[0] == unit]
    if name != target.name or len(units) < 2:
        return [unit]
    if not isinstance(where, (str, datetime)):
        raise WrongUsage(
            f"{unit} reads {len(units)} partitions, and an index belongs to one.",
            f"{target.again(f'{name}/0')} --to {where}",
        )
    return units


def _move(opened: Store, unit: ProcessorId, only: str | None, where: places.Place) -> _Move:
    standing = {tailer.tailer: tailer for tailer in metrics.tailers(opened, unit)}
    if not standing:
        raise CommandFailed(
            f"{unit} is a source, which keeps its own position.", "start it over with: cues run --fresh."
        )
    chosen = _chosen(unit, only, list(standing), where)
    positions = {id: _index(opened, standing[id], where) for id in chosen}
    words = ", ".join(
        f"{standing[id].queue} from {standing[id].position:,} to {index:,}" for id, index in positions.items()
    )
    mask = wakeup.union(wakeup.mask_of(*names.log_parts(tailer.queue)) for tailer in standing.values())
    return _Move(unit, positions, words, mask)


def _chosen(unit: str, tailer: str | None, known: list[str], where: places.Place) -> list[str]:
    processor = unit.partition("/")[0]
    inputs = [id.rpartition(".")[2] for id in known]
    if tailer is None:
        if len(known) > 1 and not isinstance(where, (str, datetime)):
            raise WrongUsage(
                f"{processor} has several inputs ({', '.join(inputs)}), and an index belongs to one.",
                f"add --tailer {inputs[0]}",
            )
        return known
    for id, queue in zip(known, inputs):
        if tailer in (id, queue, queue.partition("/")[0]):
            return [id]
    raise WrongUsage(
        f"{processor} does not read {tailer!r}; it reads {', '.join(inputs)}.",
        f"give --tailer {targets.nearest(tailer, inputs)}",
    )


def _index(store: Store, standing: metrics.TailerMetrics, where: places.Place) -> int:
    with contextlib.ExitStack() as closing:
        if standing.store and standing.lag is None:
            raise StoreNotFound(
                f"The store of queue {standing.queue!r} is not at its path ({targets.shown(standing.store)}), or is"
                " another one.",
                "put the store back at that path.",
                path=standing.store,
            )
        other = closing.enter_context(Store(standing.store, readonly=True)) if standing.store else store
        return places.now_on(Log(other, standing.queue), where, "--to")
