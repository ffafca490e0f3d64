"""A measurement of a store as JSON, and its first lines for a person."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cues.base.events import Counters
from cues.base.texts import ago, count, duration, size
from cues.graphs.graphfile import shown
from cues.groups.operate import GroupMetrics
from cues.jsontext import plain
from cues.tools.figures import values
from cues.tools.measurement import Measurement, ProcessorFigures, ProcessorMetrics, QueueMetrics

PROMISES = {"disk": "survives power loss", "process": "survives kill -9, not power loss"}


def headline(seen: Measurement) -> str:
    """The content of a store, the processes that run its graph, and its room, a line each."""
    lines = [
        f"{shown(seen.path)}: {count(len(seen.queues), 'queue')}, {count(seen.messages, 'message')},"
        f" {size(seen.disk_bytes)}; durability {seen.durability} ({PROMISES[seen.durability]})"
    ]
    owners = {unit.owner.pid: unit.owner for unit in seen.processors if unit.owner}
    alive = [supervisor.record for supervisor in seen.supervisors if supervisor.alive]
    workers = {worker.pid: f"{name}, " for record in alive for name, worker in record.workers.items()}
    lines += [f"{record.graph} is run by process {record.supervisor} and its workers" for record in alive]
    for pid, owner in owners.items():
        no_answer = "does not answer" + ("" if pid in workers else ": cues run --take-over")
        answers = "answers" if owner.lease_s else no_answer
        lines.append(f"Run by {workers.get(pid, '')}process {pid} ({owner.state}; {answers})")
    if seen.processors and not owners:
        lost = max((unit.lost for unit in seen.processors if unit.lost), default=None)
        killed = f": its last process was killed, or its machine stopped, {ago(lost)}" if lost else ""
        lines.append(f"Not running{killed}")
    full = (
        f"full in {duration(seen.full_s)} at this growth" if seen.full_s is not None else "its growth does not fill it"
    )
    space = seen.space
    if space is not None and space.is_near:
        state = "runs and appends stop" if space.is_low else f"runs and appends stop below {size(space.limit)}"
        lines.append(f"LOW DISK: {size(space.free)} free; {state} (--min-free): free space, or cues purge and compact")
    if seen.old_read is not None:
        lines.append(f"OLD READ: {seen.old_read.text}. Try: {seen.old_read.hint}")
    if any(queue.growth for queue in seen.queues):
        lines.append(f"Room for {size(seen.room_bytes or 0)}: {full}")
    return "\n".join(lines)


def lines(seen: Measurement) -> list[dict[str, Any]]:
    """The store; the units of its processors; groups, consumers, and pending transactions."""
    rows = [_store(seen)]
    rows += [_unit(seen, unit) for unit in seen.processors]
    rows += [_group(group) for group in seen.groups]
    rows += [
        vars(consumer) | {"lag": consumer.lag, "sources": {s.log: _without(s, "log") for s in consumer.sources}}
        for consumer in seen.consumers
    ]
    return rows + [{"transaction": vars(pending)} for pending in seen.transactions]


def queue_line(queue: QueueMetrics) -> dict[str, Any]:
    """A queue of a store."""
    return {
        "queue": queue.queue,
        "messages": queue.messages,
        "first_index": queue.first,
        "last_index": queue.last,
        "bytes": queue.bytes,
        "rate": queue.rate,
        "appended": queue.appended,
        "partitions": len(queue.partitions) or 1,
        "options": queue.options.to_dict() if queue.options is not None else {},
    }


def _store(seen: Measurement) -> dict[str, Any]:
    assert seen.space is not None
    return {
        "store": shown(seen.path),
        "durability": seen.durability,
        "queues": len(seen.queues),
        "messages": seen.messages,
        "used_bytes": seen.used_bytes,
        "disk_bytes": seen.disk_bytes,
        "map_bytes": seen.map_bytes,
        "room_bytes": seen.room_bytes,
        "free_bytes": seen.space.free,
        "min_free_bytes": seen.space.limit,
        "full_s": seen.full_s,
        "by_queue": {
            queue.queue: {
                "messages": queue.messages,
                "bytes": queue.bytes,
                "growth": queue.growth,
                "growth_bytes": queue.growth_bytes,
                "bytes_max": queue.bytes_max,
                "retention": queue.kept,
            }
            for queue in seen.queues
        },
        "processes": [vars(process) for process in seen.processes],
        "workers": {
            supervisor.record.graph: {
                "supervisor": supervisor.record.supervisor if supervisor.alive else None,
                "workers": {
                    name: vars(worker) | {"last_failure": worker.last_failure and vars(worker.last_failure)}
                    for name, worker in supervisor.record.workers.items()
                },
                "stopped": {unit: vars(failure) for unit, failure in supervisor.record.stopped.items()},
            }
            for supervisor in seen.supervisors
        },
        "old_read": seen.old_read._asdict() if seen.old_read is not None else None,
        "readers": [vars(reader) for reader in seen.readers],
        "waits": [asdict(note) for note in seen.waits if note.edges],
        "followers": [vars(copy) for copy in seen.copies],
        "directory": seen.noted.directory if seen.noted is not None else None,
    }


def _unit(seen: Measurement, unit: ProcessorMetrics) -> dict[str, Any]:
    owner, counters, stop = unit.owner, unit.counters or Counters(), seen.last_stop(unit.processor)
    held = next((held for held in seen.delayed if held.unit == unit.processor), None)
    return values(ProcessorFigures(unit.processor, (unit,))) | {
        "processor": unit.processor,
        "kind": unit.kind,
        "running": owner is not None,
        "owner": vars(owner) | {"lease_s": round(owner.lease_s, 1)} if owner else None,
        "epoch": unit.epoch,
        "generation": unit.generation,
        "lag": unit.lag,
        "rate": unit.rate,
        "tailers": {
            tailer.tailer: _without(tailer, "tailer", store=shown(tailer.store))
            if tailer.store
            else {"queue": tailer.queue, "position": tailer.position, "lag": tailer.lag}
            for tailer in unit.tailers
        },
        "forwards": {shown(each.store): each.waiting for each in seen.forwards if each.processor == unit.processor},
        "source_position": plain(unit.source_position),
        "last_step": unit.stepped,
        "calls": unit.calls,
        "in_flight": unit.in_flight,
        "call_s": unit.call_s,
        "limited": counters.limited,
        "away": counters.away or None,
        "latency_s": counters.latency.quantiles(1e-6),
        "batch": counters.sizes.quantiles(),
        "errors": unit.errors,
        "last_error": vars(unit.last_error) if unit.last_error else None,
        "last_stop": vars(stop) if stop else None,
        "paused": unit.paused.facts() if unit.paused else None,
        "timer": unit.timer,
        "orphan": unit.processor in seen.orphans,
        "delayed": None if held is None else {"messages": held.messages, "next": held.next},
    }


def _group(group: GroupMetrics) -> dict[str, Any]:
    return {
        "group": group.group,
        "generation": group.generation,
        "lag": group.lag,
        "idle": group.idle,
        "idle_since": group.idle_since,
        "expire_s": group.expire_s,
        "members": {
            member.member: _without(member, "member", lease_s=round(member.lease_s, 1)) for member in group.members
        },
        "partitions": {
            partition.log: _without(partition, "log", assignee=partition.assignee or None)
            for partition in group.partitions
        },
    }


def _without(row: Any, key: str, **changed: Any) -> dict[str, Any]:
    """The fields of a dataclass without the one that it is listed under, some of them changed."""
    return {name: value for name, value in (vars(row) | changed).items() if name != key}
