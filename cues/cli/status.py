"""``cues status``: position, lag, rate, failed messages and owner of each processor; size and growth of each queue."""

from __future__ import annotations

from typing import Any

from cues.base.texts import ago, count, duration, quoted, size
from cues.cli import watching
from cues.cli.again import last_error, paused
from cues.cli.options import command
from cues.cli.output import CommandOutput, TableColumn, calling, output_options, shown_figure
from cues.cli.printing import out
from cues.cli.target import takes_place
from cues.engine.record import RecordedFailure
from cues.graphs.graphfile import shown
from cues.groups.operate import GroupMetrics
from cues.jsontext import iso
from cues.operate.place import Place
from cues.queues.options import kept
from cues.tools.figures import FIGURES
from cues.tools.measurement import ForwardMetrics, Measurement, ProcessorFigures, QueueMetrics, SupervisorMetrics

_COLUMNS = (
    TableColumn("processor", "processor"),
    TableColumn("kind", "kind", optional=True),
    TableColumn("reads", "queue", optional=True),
    TableColumn("at", "position", right=True, optional=True),
    *(TableColumn(figure.title, figure.name, right=True, optional=figure.name != "rate") for figure in FIGURES),
    TableColumn("calls", "calling", optional=True),
    TableColumn("limit", "limited", optional=True),
    TableColumn("last step", "stepped"),
    TableColumn("owner", "owner", optional=True),
    TableColumn("epoch", "epoch", right=True, optional=True),
    TableColumn("driver", "driver", optional=True),
)

_QUEUE_COLUMNS = (
    TableColumn("queue", "queue"),
    TableColumn("messages", "messages", right=True),
    TableColumn("first", "first", right=True, optional=True),
    TableColumn("last", "last", right=True, optional=True),
    TableColumn("partitions", "partitions", right=True, optional=True),
    TableColumn("files", "files", right=True, optional=True),
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
@takes_place("[GRAPH | STORE]")
@watching.watch_option
@output_options
def status(place: Place, watch: float | None, output: CommandOutput) -> None:
    """Show positions, lag, rates, failed messages and owners of processors, and sizes and growth of queues.

    A position is the index that is taken next. The lag is the number of messages that are not taken yet. Rates
    are over the last ten seconds. FAILED counts the processor's failed messages on error queues that are unresolved.
    P99 is the time from the append of a message to the commit of the step that took it: 99 % of the messages of the
    last minute were committed within it.
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
    watching.repeat(lambda: _show(place, output), watch, output)


def _show(place: Place, output: CommandOutput) -> None:
    """Print the status once."""
    with place:  # with --watch it is not open between two looks, so that other commands can have it alone
        seen = place.measure()
    if output.json:
        output.rows(place.lines(seen), ())
        return
    text, store = place.target.text, place.target.store
    out(place.headline(seen))
    if seen.noted is not None:
        directory, graph = seen.noted.directory, place.target.graph
        more = f"cues status {quoted(directory)}"
        out(f"{graph} last ran with its queues in {directory}, {ago(seen.noted.when)}: {more}")
    processors = seen.figures()
    if processors:
        out()
        output.rows([row for processor in processors for row in _rows(processor)], _COLUMNS)
    elif not (seen.groups or seen.consumers):
        out("No graph has run on this store.")
    if seen.queues:
        out()
        output.rows([_queue_row(queue) for queue in seen.queues], _QUEUE_COLUMNS)
    for note in seen.waits:
        if note.edges:
            out(f"\n{note.writer} waits for readers: {'; '.join(map(str, note.edges))}")
            out(f"  If the reader is gone for good: {note.edges[0].hint}")
    if seen.groups:
        out()
        output.rows([row for group in seen.groups for row in _members(group)], _GROUP_COLUMNS)
        for group in seen.groups:
            if group.idle:
                out(f"\n{_idle(group)}\n  cues forget {quoted(text)}#group:{quoted(group.group)}")
    for processor in processors:
        if any(unit.processor in seen.orphans for unit in processor.units):
            out(f"\n{_orphan(processor)}\n  cues forget {quoted(text)} {quoted(processor.processor)}")
    _show_consumers(seen, output)
    if seen.delayed:
        out("\n" + "\n".join(map(str, seen.delayed)))
    timers = [(unit.timer, unit.processor) for unit in seen.processors if unit.timer is not None]
    if timers:
        out()
        for time, id in sorted(timers):
            out(f"The next timer of {id} is due at {time.isoformat(timespec='seconds').replace('+00:00', 'Z')}")
    for processor in processors:
        if processor.away is not None:
            out(f"\n{processor.processor} waits for {processor.away}")
    for unit in seen.processors:
        if unit.paused is not None:
            out(f"\n{paused(unit.paused, text, store)}")
    for unit in seen.processors:
        if unit.last_error is not None:
            out(f"\n{last_error(unit.processor, unit.last_error, text, store)}")
    for line in [line for supervisor in seen.supervisors for line in _failures(supervisor)]:
        out(f"\n{line}")
    for copy in seen.copies:
        ended = "" if copy.alive else "; its process has ended"
        out(f"\nThe copy in {copy.dest} is {copy.lag_s:.1f} s behind (--max-lag {copy.max_lag_s:g}{ended})")
    abroad = [line for forward in seen.forwards if (line := _forward(forward))]
    abroad += [
        f"{reader.processor} of the store {reader.store} reads {reader.queue}, at {reader.position:,}"
        for reader in seen.readers
    ]
    if abroad:
        out("\n" + "\n".join(abroad))
    if seen.missing:
        out(f"\nHas not run yet: {', '.join(seen.missing)}")


def _orphan(processor: ProcessorFigures) -> str:
    """A line about a processor that its graph has no more."""
    read = [f"{tailer.queue} at {tailer.position:,} (lag {tailer.lag or 0:,})" for tailer in processor.tailers]
    waits = f' Retention "read" waits for it: {", ".join(read)}.' if read else ""
    return f"{processor.processor} is an orphan: its graph does not have it any more.{waits}"


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
    row = {"queue": queue.queue, "messages": queue.messages, "size": size(queue.bytes)}
    if queue.files is not None:
        row |= {"first": queue.first, "last": queue.last, "files": queue.files}
        row |= {"partitions": len(queue.partitions) or None}
    if queue.growth is not None:
        row["growth"] = f"+{queue.growth:,.0f}, {size(round(queue.growth_bytes))}" if queue.growth else None
        row["kept"] = kept(queue.kept) or "all messages"
    return row


def _forward(forward: ForwardMetrics) -> str:
    """A line about the messages of a processor for another store; empty if none wait."""
    writes = f"{forward.processor} writes for {shown(forward.store)}"
    if forward.waiting is None:
        return f"{writes}, which is missing, or is another one"
    return f"{writes}: {count(forward.waiting, 'message')} wait" if forward.waiting else ""


def _rows(processor: ProcessorFigures) -> list[dict[str, Any]]:
    """A row for each input of a processor, the first with its own figures."""
    own = {
        "processor": processor.processor,
        "kind": processor.kind or None,
        **{figure.name: shown_figure(figure, processor) for figure in FIGURES},
        "limited": "waits for rate=" if processor.is_limited else None,
        "calling": calling(processor.calls, processor.in_flight, processor.call_s),
        "stepped": ago(processor.stepped) or "never",
        "owner": ", ".join(str(owner.pid) for owner in processor.owners) or None,
        "epoch": processor.epoch if processor.drivers else None,
        "driver": ", ".join(processor.drivers) or None,
    }
    several = f" ×{len(processor.units)}" if len(processor.units) > 1 else ""
    inputs = [
        {"queue": f"{each.queue}{several}{f' of {shown(each.store)}' if each.store else ''}"}
        | {"position": each.position, "lag": each.lag}
        for each in processor.inputs
    ]
    first, *others = inputs or [{}]
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


def _show_consumers(seen: Measurement, output: CommandOutput) -> None:
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
