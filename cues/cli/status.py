"""``cues status``: where each processor stands, how fast it goes, what failed, who runs it."""

from __future__ import annotations

from typing import Any

import click

from cues import draw, metrics
from cues.cli import target as targets
from cues.cli.options import command, output_options, store_option
from cues.cli.output import Column, Output, ago, count, plain, size
from cues.metrics import ForwardMetrics, ProcessorMetrics, StoreMetrics

_COLUMNS = (
    Column("processor", "processor"),
    Column("kind", "kind"),
    Column("reads", "queue", optional=True),
    Column("at", "position", right=True, optional=True),
    Column("lag", "lag", right=True, optional=True),
    Column("per second", "rate", right=True),
    Column("errors", "errors", right=True, optional=True),
    Column("last step", "stepped"),
    Column("owner", "owner", optional=True),
)


@command()
@click.argument("target", metavar="[GRAPH | STORE]", required=False)
@store_option
@output_options
def status(target: str | None, store: str | None, output: str | None) -> int:
    """Positions, lag, rates, errors and owner of each processor, and the durability of the store.

    A position is the index that is taken next, the lag what is there and not taken. Rates are over the last
    ten seconds. Errors are the processor's messages that are on error queues now.

    \b
      cues status graph.py
      cues status data/flights
      cues status data/flights --json | jq 'select(.lag > 0)'

    The store is opened read-only; its graph may run meanwhile, or not. A processor over partitions is one
    line, the sum of its units. In JSON the first line is the store, each other line a processor, or one unit of
    it (its id has the partition: flights.enrich/3).
    """
    found = targets.resolve(target, store)
    with found.open() as opened:
        seen = metrics.of_store(opened)
    processors = list(seen.processors)
    if found.file is not None:
        place = {node.id: number for number, node in enumerate(draw.in_order(found.file.graph.plan()))}
        processors.sort(key=lambda processor: place.get(_whole(processor), len(place)))
    out = Output(output)
    if out.json:
        rows = [_store(seen)]
        for processor in processors:
            to = {one.store: one.waiting for one in seen.forwards if one.processor == processor.processor}
            rows.append(_processor(processor, to))
        out.rows(rows, ())
        return 0
    print(_headline(seen))
    missing = []
    if found.file is not None:
        known = {processor.processor for processor in seen.processors}
        missing = [node.id for node in found.file.graph.plan().running if node.id not in known]
    if processors:
        print()
        groups: dict[str, list[ProcessorMetrics]] = {}
        for processor in processors:
            groups.setdefault(_whole(processor), []).append(processor)
        out.rows([row for units in groups.values() for row in _rows(units)], _COLUMNS)
    else:
        print("No graph has run on it.")
    for processor in processors:
        last = processor.last_error
        if last is not None:
            print(
                f"\nLast error of {processor.processor}, {ago(last.time)}: {last.type}: {last.text}"
                f"\n  cues tail {found.text}#{last.queue} --from {last.index} -n 1"
            )
    abroad = [line for forward in seen.forwards if (line := _forward(forward))]
    abroad += [
        f"{reader.processor} of the store {reader.store} reads {reader.queue}, at {reader.position:,}"
        for reader in seen.readers
    ]
    if abroad:
        print("\n" + "\n".join(abroad))
    if missing:
        print(f"\nHas not run yet: {', '.join(missing)}")
    return 0


def _forward(forward: ForwardMetrics) -> str:
    """What a processor writes for another store, if there is anything to say."""
    if forward.waiting is None:
        return f"{forward.processor} writes for {targets.shown(forward.store)}, which is not there, or is another one"
    if forward.waiting:
        return (
            f"{forward.processor} writes for {targets.shown(forward.store)}: {count(forward.waiting, 'message')} wait"
        )
    return ""


def _headline(seen: StoreMetrics) -> str:
    messages = sum(queue.messages for queue in seen.queues)
    promise = {"disk": "survives power loss", "process": "survives kill -9, not power loss"}[seen.durability]
    lines = [
        f"{targets.shown(seen.path)}: {count(len(seen.queues), 'queue')}, {count(messages, 'message')},"
        f" {size(seen.disk_bytes)}; durability {seen.durability} ({promise})"
    ]
    owners = {processor.owner.pid: processor.owner for processor in seen.processors if processor.owner}
    for pid, owner in owners.items():
        answers = "answers" if owner.lease_s else "does not answer: cues run --take-over"
        lines.append(f"Run by process {pid} ({owner.state}; {answers})")
    if seen.processors and not owners:
        lines.append("Not running")
    return "\n".join(lines)


def _whole(unit: ProcessorMetrics) -> str:
    """The id of the processor that this is, or is a unit of."""
    return unit.processor.partition("/")[0]


def _rows(units: list[ProcessorMetrics]) -> list[dict[str, Any]]:
    """A row for each input of a processor, the first with what is its own; of several units the sums."""
    rates = [unit.rate for unit in units if unit.rate is not None]
    owners = sorted({unit.owner.pid for unit in units if unit.owner})
    own = {
        "processor": _whole(units[0]),
        "kind": units[0].kind,
        "rate": sum(rates) if rates else None,
        "errors": sum(unit.errors for unit in units) or None,
        "stepped": ago(max((unit.stepped for unit in units if unit.stepped), default=None)) or "never",
        "owner": ", ".join(map(str, owners)) or None,
    }
    inputs: dict[str, dict[str, Any]] = {}
    for unit in units:
        for one in unit.tailers:
            queue = one.queue if len(units) == 1 else f"{one.queue.partition('/')[0]} ×{len(units)}"
            queue += f" of {targets.shown(one.store)}" if one.store else ""
            row = inputs.setdefault(queue, {"queue": queue, "position": None, "lag": None})
            if len(units) == 1:
                row["position"] = one.position
            if one.lag is not None:
                row["lag"] = (row["lag"] or 0) + one.lag
    first, *others = inputs.values() or [{}]
    return [own | first, *others]


def _store(seen: StoreMetrics) -> dict[str, Any]:
    return {
        "store": targets.shown(seen.path),
        "durability": seen.durability,
        "queues": len(seen.queues),
        "messages": sum(queue.messages for queue in seen.queues),
        "used_bytes": seen.used_bytes,
        "disk_bytes": seen.disk_bytes,
        "map_bytes": seen.map_bytes,
        "readers": [
            {"processor": one.processor, "store": one.store, "queue": one.queue, "position": one.position}
            for one in seen.readers
        ],
    }


def _processor(processor: ProcessorMetrics, forwards: dict[str, int | None]) -> dict[str, Any]:
    owner, last = processor.owner, processor.last_error
    return {
        "processor": processor.processor,
        "kind": processor.kind,
        "running": owner is not None,
        "owner": {"pid": owner.pid, "state": owner.state, "lease_s": round(owner.lease_s, 1)} if owner else None,
        "epoch": processor.epoch,
        "generation": processor.generation,
        "lag": processor.lag,
        "rate": processor.rate,
        "tailers": {
            one.tailer: {
                "queue": one.queue,
                "position": one.position,
                "lag": one.lag,
                **({"store": targets.shown(one.store)} if one.store else {}),
            }
            for one in processor.tailers
        },
        "forwards": {targets.shown(store): waiting for store, waiting in forwards.items()},
        "source_position": plain(processor.source_position),
        "last_step": processor.stepped,
        "errors": processor.errors,
        "last_error": {
            "queue": last.queue,
            "index": last.index,
            "time": last.time,
            "type": last.type,
            "text": last.text,
        }
        if last
        else None,
    }
