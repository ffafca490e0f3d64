"""Commands on a shared directory (``cues run --engine spark --queues DIR``), without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cues.base import clock
from cues.base.texts import quoted
from cues.cli import options
from cues.cli import target as targets
from cues.cli.output import CommandOutput, TableColumn, ago, count, size
from cues.cli.printing import out
from cues.cli.target import StoreTarget
from cues.graphs.pause import ProcessorPause
from cues.tools import metrics

if TYPE_CHECKING:
    from cues.spark.cluster.directory import PartitionLog

_QUEUES = (
    TableColumn("queue", "queue"),
    TableColumn("messages", "messages", right=True),
    TableColumn("first", "first", right=True),
    TableColumn("last", "last", right=True),
    TableColumn("partitions", "partitions", right=True, optional=True),
    TableColumn("files", "files", right=True),
    TableColumn("size", "size", right=True),
    TableColumn("last append", "when", optional=True),
    TableColumn("written by", "graph", optional=True),
)
_PROCESSORS = (
    TableColumn("processor", "processor"),
    TableColumn("reads", "queue", optional=True),
    TableColumn("at", "position", right=True, optional=True),
    TableColumn("lag", "lag", right=True, optional=True),
    TableColumn("per second", "rate", right=True),
    TableColumn("failed", "errors", right=True, optional=True),
    TableColumn("last commit", "when"),
    TableColumn("epoch", "epoch", right=True),
    TableColumn("driver", "owner"),
)


def queue_of(target: StoreTarget) -> str:
    """The queue that a target names. Raises :class:`QueueNotFound` if the directory does not have it."""
    from cues.spark.cluster import inspection

    return targets.queue_of(target, inspection.queues_of(target.place))


def figures_of(logs: Sequence[PartitionLog]) -> dict[str, Any]:
    """Counts of a queue, and the time of its last file."""
    files = [file for log in logs for file in log.live]
    figures = {"messages": sum(file.count for file in files), "first": min(log.first for log in logs)}
    figures["last"] = max(log.next - 1 for log in logs)
    newest = max((file.modified_ms for file in files), default=None)
    appended = None if newest is None else clock.to_datetime(newest * 1_000_000)
    sizes = {"files": len(files), "bytes": sum(file.size for file in files), "appended": appended}
    return figures | sizes | ({"partitions": len(logs)} if len(logs) > 1 else {})


def queues(target: StoreTarget, output: CommandOutput) -> None:
    """List the queues, or one of them."""
    from cues.spark.cluster import inspection

    names = [queue_of(target)] if target.name else inspection.queues_of(target.place)
    rows = []
    for queue in names:
        row = figures_of(inspection.logs_of(target.place, queue))
        first, last = row.pop("first"), row.pop("last")
        row |= {"queue": queue, "graph": inspection.writer_of(target.place, queue)}
        if output.json:
            row |= {"first_index": first, "last_index": last}
        else:
            row |= {"first": first, "last": last} if row["messages"] else {}
            row |= {"size": size(row["bytes"]), "when": ago(row["appended"]) or "never"}
        rows.append(row)
    if not rows and not output.json:
        out(f"{target.place} has no queues yet.")
        return
    output.rows(rows, _QUEUES)


def status(target: StoreTarget, output: CommandOutput) -> None:
    """Print the queues; position, lag, rate and failures of each processor; and the drivers.

    With the name of a queue: this queue, and the processors that read it or write it.
    """
    from cues.spark.cluster import inspection, lease
    from cues.spark.cluster.files import open_files

    place = target.place
    logs = {queue: inspection.logs_of(place, queue) for queue in inspection.queues_of(place)}
    ends = {log.id: log.next for parts in logs.values() for log in parts}
    failures: dict[str, metrics.Failures] = {}
    for queue, parts in logs.items():
        metrics.count_failures(queue, inspection.backwards(place, parts, metrics.ERRORS_MAX), failures)
    chosen = queue_of(target) if target.name else None
    queues = {queue: figures_of(parts) for queue, parts in logs.items() if chosen in (None, queue)}
    rows: list[dict[str, Any]] = []
    for last in inspection.processors_of(place):
        if chosen not in (None, *last.positions, *last.record.ends_after()):
            continue
        failed = failures.get(last.processor, metrics.Failures())
        about = {"processor": last.processor, "record": last.record.number, "committed": last.committed}
        about |= {"epoch": last.record.epoch, "owner": last.record.owner, "when": ago(last.committed)}
        about |= {"rate": inspection.rate_of(place, last), "errors": failed.count}
        about["last_error"] = vars(failed.last) if failed.last else None
        if not last.positions:  # a source that is a stream
            rows.append(about)
        for queue, position in last.positions.items():
            if last.is_feeder:
                lag = inspection.feeder_lag(place, last, queue)
            else:
                lag = max(0, ends[queue] - position) if queue in ends else None
            rows.append(about | {"queue": queue, "position": position, "lag": lag})
    holders = list(lease.holders(open_files(place)))
    if output.json:
        output.rows([{"queue": queue} | figures for queue, figures in queues.items()], ())
        output.rows([{name: value for name, value in row.items() if name != "when"} for row in rows], ())
        output.rows([vars(holder) for holder in holders], ())
        return
    messages = sum(figures["messages"] for figures in queues.values())
    stored = size(sum(figures["bytes"] for figures in queues.values()))
    out(f"{target.text}: {count(len(queues), 'queue')} in files, {count(messages, 'message')}, {stored}")
    for holder in holders:
        since = f", since {ago(holder.since)}" if holder.since else ""
        answers = f"; its last answer was {ago(holder.beat)}" if holder.state == "does not answer" else ""
        out(f"{holder.graph}: the driver {holder.pid} on {holder.host} {holder.state}{since}{answers}")
    if not holders:
        out("Not running")
    out()
    output.rows([{"queue": queue, "size": size(f["bytes"])} | f for queue, f in queues.items()], _QUEUES)
    if rows:
        out()
        output.rows([row | {"errors": row["errors"] or None} for row in rows], _PROCESSORS)
    for processor in dict.fromkeys(row["processor"] for row in rows):
        if processor in failures:
            out(f"\n{last_error(processor, failures[processor].last, target)}")


def figures(target: StoreTarget) -> list[dict[str, Any]]:
    """A row for each processor of the directory, for ``cues top``. Latencies and calls are not in the directory."""
    from cues.spark.cluster import inspection

    place = target.place
    logs = {queue: inspection.logs_of(place, queue) for queue in inspection.queues_of(place)}
    ends = {log.id: log.next for parts in logs.values() for log in parts}
    failures: dict[str, metrics.Failures] = {}
    for queue, parts in logs.items():
        metrics.count_failures(queue, inspection.backwards(place, parts, metrics.ERRORS_MAX), failures)
    rows: list[dict[str, Any]] = []
    for last in inspection.processors_of(place):
        lag = 0
        for queue, position in last.positions.items():
            known = (
                inspection.feeder_lag(place, last, queue) if last.is_feeder else ends.get(queue, position) - position
            )
            lag += max(0, known or 0)
        row = dict.fromkeys(("out", "p50", "p99", "batch", "calls", "in_flight"))
        failed = failures.get(last.processor, metrics.Failures()).count
        rate = inspection.rate_of(place, last)
        rows.append({"processor": last.processor, "in": rate, "lag": lag, "errors": failed, **row})
    return rows


def last_error(processor: str, last: metrics.LastError | None, target: StoreTarget) -> str:
    """The last error of a processor, and the command that prints it."""
    assert last is not None
    return (
        f"Last error of {processor}, {ago(last.time)}: {last.type}: {last.text}"
        f"\n  {errors_of(f'{target.text}#{last.queue}', target.store)} --index {last.index}"
    )


def paused(pause: ProcessorPause, text: str, store: str | None) -> str:
    """A line about a paused processor, and the command that resumes it."""
    again = f"cues resume {quoted(text)}" + (f" --store {quoted(store)}" if store else "")
    return (
        f"{pause.processor} is paused, {ago(pause.time)}, {pause.text}\n  {again} --processor {quoted(pause.processor)}"
    )


def errors_of(text: str, store: str | None) -> str:
    """The command that lists the error messages of a graph file, a store or a directory."""
    return f"cues errors {quoted(text)}" + (f" --store {quoted(store)}" if store else "")


def check(target: StoreTarget, output: CommandOutput) -> int:
    """Print the damage of the directory; the exit code is 1 if there is any."""
    from cues.spark.cluster import inspection

    problems = inspection.problems_of(target.place)
    for problem in problems:
        output.say(problem, problem=problem)
    if problems:
        options.report(f"{count(len(problems), 'problem')} in {target.text}.", "restore the directory from a copy.")
        return options.FAILED
    output.say(f"{target.text}: no problem found", store=target.text, problems=0)
    return 0
