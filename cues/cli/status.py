"""``cues status``: position, lag, rate, failed messages and owner of each processor; size and growth of each queue."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cues.base.events import Counters
from cues.base.names import ProcessorId
from cues.base.texts import quoted
from cues.cli import shared, watching
from cues.cli import target as targets
from cues.cli.options import command
from cues.cli.output import (
    CommandOutput,
    TableColumn,
    ago,
    calling,
    count,
    duration,
    kept,
    output_options,
    quantiles,
    size,
)
from cues.cli.printing import out
from cues.cli.shared import paused
from cues.engine import identities, record
from cues.engine.record import RecordedFailure
from cues.engine.status import processor_of
from cues.graphs import draw
from cues.groups.operate import GroupMetrics
from cues.jsontext import iso, plain
from cues.queues import backpressure
from cues.steps import held as held_messages
from cues.storage import free_space
from cues.tools import follower, metrics
from cues.tools.metrics import ForwardMetrics, ProcessorMetrics, QueueMetrics, StoreMetrics, SupervisorMetrics

_COLUMNS = (
    TableColumn("processor", "processor"),
    TableColumn("kind", "kind"),
    TableColumn("reads", "queue", optional=True),
    TableColumn("at", "position", right=True, optional=True),
    TableColumn("lag", "lag", right=True, optional=True),
    TableColumn("per second", "rate", right=True),
    TableColumn("failed", "errors", right=True, optional=True),
    TableColumn("calls", "calling", optional=True),
    TableColumn("limit", "limited", optional=True),
    TableColumn("last step", "stepped"),
    TableColumn("owner", "owner", optional=True),
)

_QUEUE_COLUMNS = (
    TableColumn("queue", "queue"),
    TableColumn("messages", "messages", right=True),
    TableColumn("size", "size", right=True),
    TableColumn("an hour", "growth", right=True),
    TableColumn("keeps", "kept"),
)

_GROUP_COLUMNS = (
    TableColumn("group", "group"),
    TableColumn("member", "member"),
    TableColumn("process", "process", optional=True),
    TableColumn("partitions", "partitions", right=True),
    TableColumn("to come", "coming", right=True, optional=True),
    TableColumn("lag", "lag", right=True),
)

_CONSUMER_COLUMNS = (
    TableColumn("consumer", "consumer"),
    TableColumn("process", "process", optional=True),
    TableColumn("reads", "log"),
    TableColumn("at", "position", right=True),
    TableColumn("lag", "lag", right=True),
)

_TRANSACTION_COLUMNS = (
    TableColumn("pending on", "log"),
    TableColumn("of", "owner"),
    TableColumn("process", "process", optional=True),
    TableColumn("messages", "messages", right=True),
    TableColumn("since", "since"),
)


@command(cls=watching.Watched)
@targets.takes_store("[GRAPH | STORE]", shared=True)
@watching.watch_option
@output_options
def status(target: targets.StoreTarget, watch: float | None, output: CommandOutput) -> None:
    """Show positions, lag, rates, failed messages and owners of processors, and sizes and growth of queues.

    A position is the index that is taken next. The lag is the number of messages that are not taken yet. Rates
    are over the last ten seconds. FAILED counts the processor's failed messages on error queues that are unresolved.
    If a call of the function takes 10 ms or more, its calls are shown: those done since the start of the graph, those
    in flight, and the mean time of one (up to a second old).

    A queue grows by AN HOUR (messages of the last hour). When the map or the disk will be full is computed from this
    growth, unless retention stops it before; a queue that deletes read messages counts as one that stays as it is.
    The last stop of a processor is shown with its reason, also after it was started again.

    \b
      cues status graph.py
      cues status data/flights
      cues status graph.py --watch         go on in place until Ctrl-C; --watch 10 looks every ten seconds
      cues status shared/flights           a directory of cues run --queues
      cues status s3://bucket/flights      the same, in an object store
      cues status shared/flights#orders    one queue, and the processors that read it or write it
      cues status data/flights --json | jq 'select(.lag > 0)'

    The store is opened read-only, whether its graph runs or not. A processor over partitions is one line, the
    sum of its units. In JSON the first line is the store; each other line is a processor, or one unit of it
    (its id has the partition: flights.enrich/3), a consumer group, a consumer, or a pending transaction. A group
    that has no members is named with the time since which it has none.
    """
    watching.repeat(lambda: _show(target, output), watch, output)


def _show(target: targets.StoreTarget, output: CommandOutput) -> None:
    """Print the status once."""
    if target.is_shared:
        return shared.status(target, output)
    with target.open() as opened:
        seen = metrics.of_store(opened)
        delayed = {held.unit: held for held in held_messages.waiting(opened)}
        gone = identities.orphans(opened, target.file.graph.plan() if target.file else None)
    graph = target.file.graph.id if target.file else None
    place = record.queues_of(target.path, graph) if graph else None
    processors = list(seen.processors)
    if target.file is not None:
        order = {node.id: number for number, node in enumerate(draw.in_order(target.file.graph.plan()))}
        processors.sort(key=lambda processor: order.get(processor_of(processor.processor), len(order)))
    if output.json:
        rows = [_store(seen) | {"directory": place.directory if place else None}]
        for processor in processors:
            own = [forward for forward in seen.forwards if forward.processor == processor.processor]
            stop = seen.last_stop(processor.processor)
            shown = _processor(processor, {forward.store: forward.waiting for forward in own}, stop)
            held = delayed.get(processor.processor)
            waits = None if held is None else {"messages": held.messages, "next": held.next}
            rows.append(shown | {"orphan": processor.processor in gone, "delayed": waits})
        rows += [_group(group) for group in seen.groups]
        output.rows(rows + _consumers(seen) + [{"transaction": vars(pending)} for pending in seen.transactions], ())
        return
    out(_headline(seen))
    if place is not None:
        more = f"cues status {quoted(place.directory)}"
        out(f"{graph} last ran with its queues in {place.directory}, {ago(place.when)}: {more}")
    groups: dict[ProcessorId, list[ProcessorMetrics]] = {}
    if processors:
        out()
        for processor in processors:
            groups.setdefault(processor_of(processor.processor), []).append(processor)
        output.rows([row for units in groups.values() for row in _rows(units)], _COLUMNS)
    elif not (seen.groups or seen.consumers):
        out("No graph has run on this store.")
    if seen.queues:
        out()
        output.rows([_queue_row(queue) for queue in seen.queues], _QUEUE_COLUMNS)
    for note in backpressure.notes(target.path):
        if note.edges:
            out(f"\n{note.writer} waits for readers: {'; '.join(map(str, note.edges))}")
            out(f"  If the reader is gone for good: {note.edges[0].hint}")
    if seen.groups:
        out()
        output.rows([row for group in seen.groups for row in _members(group)], _GROUP_COLUMNS)
        for group in seen.groups:
            if group.idle:
                out(f"\n{_idle(group)}\n  cues forget {quoted(target.text)}#group:{quoted(group.group)}")
    for id, units in groups.items():
        if id in map(processor_of, gone):
            out(f"\n{_orphan(units)}\n  cues forget {quoted(target.text)} {quoted(id)}")
    _show_consumers(seen, output)
    if delayed:
        out("\n" + "\n".join(map(str, delayed.values())))
    timers = [(processor.timer, processor.processor) for processor in processors if processor.timer is not None]
    if timers:
        out()
        for time, unit in sorted(timers):
            out(f"The next timer of {unit} is due at {time.isoformat(timespec='seconds').replace('+00:00', 'Z')}")
    for processor in processors:
        if processor.paused is not None:
            out(f"\n{paused(processor.paused, target.text, target.store)}")
    for processor in processors:
        last = processor.last_error
        if last is not None:
            out(f"\n{shared.last_error(processor.processor, last, target)}")
    for line in [line for supervisor in seen.supervisors for line in _failures(supervisor)]:
        out(f"\n{line}")
    for copy in follower.seen(seen.path):
        ended = "" if copy.alive else "; its process has ended"
        out(f"\nThe copy in {copy.dest} is {copy.lag_s:.1f} s behind (--max-lag {copy.max_lag_s:g}{ended})")
    abroad = [line for forward in seen.forwards if (line := _forward(forward))]
    abroad += [
        f"{reader.processor} of the store {reader.store} reads {reader.queue}, at {reader.position:,}"
        for reader in seen.readers
    ]
    if abroad:
        out("\n" + "\n".join(abroad))
    if target.file is not None:
        known = {processor.processor for processor in seen.processors}
        missing = [node.id for node in target.file.graph.plan().running if node.id not in known]
        if missing:
            out(f"\nHas not run yet: {', '.join(missing)}")


def _orphan(units: list[ProcessorMetrics]) -> str:
    """A line about a processor that its graph has no more."""
    read = [f"{tailer.queue} at {tailer.position:,} (lag {tailer.lag or 0:,})" for u in units for tailer in u.tailers]
    waits = f' Retention "read" waits for it: {", ".join(read)}.' if read else ""
    return f"{processor_of(units[0].processor)} is an orphan: its graph does not have it any more.{waits}"


def _failures(supervisor: SupervisorMetrics) -> list[str]:
    """The failures of a graph's workers: the last death of each, and the processors that were stopped."""
    lines = []
    for worker in supervisor.record.workers.values():
        if worker.last_failure is not None:
            again = f"; started again {count(worker.restarts, 'time')}" if worker.restarts else ""
            lines.append(
                f"Last failure of a worker, {ago(worker.last_failure.when)}: {_clause(worker.last_failure)}{again}"
            )
    for unit, failure in supervisor.record.stopped.items():
        how = "was stopped alone" if supervisor.record.workers and not failure.restarted else "stopped"
        again = f"; started again {ago(failure.restarted_at)}" if failure.restarted else "; not started again"
        lines.append(f"{unit} {how}, {ago(failure.when)}: {_clause(failure)}{again}")
    return lines


def _clause(failure: RecordedFailure) -> str:
    """The text of a failure as the first part of a sentence."""
    return failure.text.rstrip(".")


def _queue_row(queue: QueueMetrics) -> dict[str, Any]:
    return {
        "queue": queue.queue,
        "messages": queue.messages,
        "size": size(queue.bytes),
        "growth": f"+{queue.growth:,.0f}, {size(round(queue.growth_bytes))}" if queue.growth else None,
        "kept": kept(queue.options.to_dict().get("retention")) or "all messages",
    }


def _forward(forward: ForwardMetrics) -> str:
    """A line about the messages of a processor for another store; empty if none wait."""
    writes = f"{forward.processor} writes for {targets.shown(forward.store)}"
    if forward.waiting is None:
        return f"{writes}, which is missing, or is another one"
    return f"{writes}: {count(forward.waiting, 'message')} wait" if forward.waiting else ""


def _headline(seen: StoreMetrics) -> str:
    messages = sum(queue.messages for queue in seen.queues)
    promise = {"disk": "survives power loss", "process": "survives kill -9, not power loss"}[seen.durability]
    lines = [
        f"{targets.shown(seen.path)}: {count(len(seen.queues), 'queue')}, {count(messages, 'message')},"
        f" {size(seen.disk_bytes)}; durability {seen.durability} ({promise})"
    ]
    owners = {processor.owner.pid: processor.owner for processor in seen.processors if processor.owner}
    alive = [supervisor.record for supervisor in seen.supervisors if supervisor.alive]
    workers = {worker.pid: f"{name}, " for record in alive for name, worker in record.workers.items()}
    lines += [f"{record.graph} is run by process {record.supervisor} and its workers" for record in alive]
    for pid, owner in owners.items():
        no_answer = "does not answer" + ("" if pid in workers else ": cues run --take-over")
        answers = "answers" if owner.lease_s else no_answer
        lines.append(f"Run by {workers.get(pid, '')}process {pid} ({owner.state}; {answers})")
    if seen.processors and not owners:
        lost = max((processor.lost for processor in seen.processors if processor.lost), default=None)
        killed = f": its last process was killed, or its machine stopped, {ago(lost)}" if lost else ""
        lines.append(f"Not running{killed}")
    full = (
        f"full in {duration(seen.full_s)} at this growth" if seen.full_s is not None else "its growth does not fill it"
    )
    space = free_space.look(seen.path)
    if space.is_near:
        state = "runs and appends stop" if space.is_low else f"runs and appends stop below {size(space.limit)}"
        lines.append(f"LOW DISK: {size(space.free)} free; {state} (--min-free): free space, or cues purge and compact")
    if any(queue.growth for queue in seen.queues):
        lines.append(f"Room for {size(seen.room_bytes)}: {full}")
    return "\n".join(lines)


def _rows(units: list[ProcessorMetrics]) -> list[dict[str, Any]]:
    """A row for each input of a processor, the first with its own figures; for several units the sums."""
    rates = [unit.rate for unit in units if unit.rate is not None]
    calls = sum(unit.calls or 0 for unit in units)
    spent = sum((unit.calls or 0) * (unit.call_s or 0.0) for unit in units)
    owners = sorted({unit.owner.pid for unit in units if unit.owner})
    own = {
        "processor": processor_of(units[0].processor),
        "kind": units[0].kind,
        "rate": sum(rates) if rates else None,
        "errors": sum(unit.errors for unit in units) or None,
        "limited": "waits for rate=" if any(u.counters is not None and u.counters.limited for u in units) else None,
        "calling": calling(calls, sum(unit.in_flight or 0 for unit in units), spent / calls if calls else None),
        "stepped": ago(max((unit.stepped for unit in units if unit.stepped), default=None)) or "never",
        "owner": ", ".join(map(str, owners)) or None,
    }
    inputs: dict[str, dict[str, Any]] = {}
    for unit in units:
        for tailer in unit.tailers:
            queue = tailer.queue if len(units) == 1 else f"{tailer.queue.partition('/')[0]} ×{len(units)}"
            queue += f" of {targets.shown(tailer.store)}" if tailer.store else ""
            row = inputs.setdefault(queue, {"queue": queue, "position": None, "lag": None})
            if len(units) == 1:
                row["position"] = tailer.position
            if tailer.lag is not None:
                row["lag"] = (row["lag"] or 0) + tailer.lag
    first, *others = inputs.values() or [{}]
    return [own | first, *others]


def _members(group: GroupMetrics) -> list[dict[str, Any]]:
    """A row for each member of a group, and one for partitions without a reader."""
    rows: list[dict[str, Any]] = []
    for member in (*group.members, None):
        name = member.member if member else None
        held = [partition for partition in group.partitions if partition.member == name]
        if member is None and not held and not (group.idle and not rows):
            continue
        assigned = [partition for partition in group.partitions if member and partition.assignee == name]
        rows.append(
            {
                "group": "" if rows else group.group,
                "member": name or "none",
                "process": f"{member.pid} ({member.state})" if member else None,
                "partitions": len(held),
                "coming": sum(partition.member != name for partition in assigned) or None,
                "lag": sum(partition.lag for partition in held),
            }
        )
    return rows


def _idle(group: GroupMetrics) -> str:
    """A line about a group without members."""
    since = f" since {iso(group.idle_since)[:19]}Z ({ago(group.idle_since)})" if group.idle_since else ""
    expiry = "until it is deleted" if group.expire_s is None else f"for {duration(group.expire_s)} after that"
    return f'{group.group} has no members{since}. Retention "read" waits for it {expiry}:'


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


def _store(seen: StoreMetrics) -> dict[str, Any]:
    space = free_space.look(seen.path)
    return {
        "store": targets.shown(seen.path),
        "durability": seen.durability,
        "queues": len(seen.queues),
        "messages": sum(queue.messages for queue in seen.queues),
        "used_bytes": seen.used_bytes,
        "disk_bytes": seen.disk_bytes,
        "map_bytes": seen.map_bytes,
        "room_bytes": seen.room_bytes,
        "free_bytes": space.free,
        "min_free_bytes": space.limit,
        "full_s": seen.full_s,
        "by_queue": {
            queue.queue: {
                "messages": queue.messages,
                "bytes": queue.bytes,
                "growth": queue.growth,
                "growth_bytes": queue.growth_bytes,
                "bytes_max": queue.bytes_max,
                "retention": queue.options.to_dict().get("retention"),
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
        "readers": [vars(reader) for reader in seen.readers],
        "waits": [asdict(note) for note in backpressure.notes(seen.path) if note.edges],
        "followers": [vars(copy) for copy in follower.seen(seen.path)],
    }


def _processor(
    processor: ProcessorMetrics, forwards: dict[str, int | None], stop: RecordedFailure | None
) -> dict[str, Any]:
    owner, counters = processor.owner, processor.counters or Counters()
    return {
        "processor": processor.processor,
        "kind": processor.kind,
        "running": owner is not None,
        "owner": vars(owner) | {"lease_s": round(owner.lease_s, 1)} if owner else None,
        "epoch": processor.epoch,
        "generation": processor.generation,
        "lag": processor.lag,
        "rate": processor.rate,
        "tailers": {
            tailer.tailer: _without(tailer, "tailer", store=targets.shown(tailer.store))
            if tailer.store
            else {"queue": tailer.queue, "position": tailer.position, "lag": tailer.lag}
            for tailer in processor.tailers
        },
        "forwards": {targets.shown(store): waiting for store, waiting in forwards.items()},
        "source_position": plain(processor.source_position),
        "last_step": processor.stepped,
        "calls": processor.calls,
        "in_flight": processor.in_flight,
        "call_s": processor.call_s,
        "limited": counters.limited,
        "latency_s": quantiles(counters.latency, 1e-6),
        "batch": quantiles(counters.sizes),
        "errors": processor.errors,
        "last_error": vars(processor.last_error) if processor.last_error else None,
        "last_stop": vars(stop) if stop else None,
        "paused": processor.paused.facts() if processor.paused else None,
        "timer": processor.timer,
    }


def _show_consumers(seen: StoreMetrics, output: CommandOutput) -> None:
    """Print the consumers of cues.txn, and the transactions that are pending."""
    consumers = [
        {
            "consumer": "" if number else consumer.consumer,
            "process": None if number else _process(consumer.pid, consumer.state),
            **vars(source),
        }
        for consumer in seen.consumers
        for number, source in enumerate(consumer.sources)
    ]
    transactions = [
        {
            "log": pending.log,
            "owner": pending.owner or f"publisher {pending.publisher}",
            "process": _process(pending.pid, pending.state),
            "messages": pending.messages,
            "since": ago(pending.since),
        }
        for pending in seen.transactions
    ]
    for rows, columns in ((consumers, _CONSUMER_COLUMNS), (transactions, _TRANSACTION_COLUMNS)):
        if rows:
            out()
            output.rows(rows, columns)


def _process(pid: int | None, state: str) -> str:
    return f"{pid} ({state})" if pid else "none"


def _consumers(seen: StoreMetrics) -> list[dict[str, Any]]:
    return [
        vars(consumer) | {"lag": consumer.lag, "sources": {s.log: _without(s, "log") for s in consumer.sources}}
        for consumer in seen.consumers
    ]
