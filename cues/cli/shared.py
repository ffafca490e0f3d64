"""Commands on a shared directory (``cues run --engine spark --queues DIR``), without Spark."""

from __future__ import annotations

from typing import Any

from cues.base import clock
from cues.cli import options
from cues.cli import target as targets
from cues.cli.output import CommandOutput, TableColumn, ago, count, size
from cues.cli.target import StoreTarget

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
    TableColumn("last commit", "when"),
    TableColumn("epoch", "epoch", right=True),
    TableColumn("driver", "owner"),
)


def queue_of(target: StoreTarget) -> str:
    """The queue that a target names. Raises :class:`QueueNotFound` if the directory does not have it."""
    from cues.spark.cluster import inspection

    return targets.queue_of(target, inspection.queues_of(target.place))


def _figures(place: str, queue: str) -> dict[str, Any]:
    """Counts of a queue, and the time of its last file."""
    from cues.spark.cluster import inspection

    logs = inspection.QueueReader(place, queue).logs
    files = [file for log in logs for file in log.live]
    figures = {"messages": sum(file.count for file in files), "first": min(log.first for log in logs)}
    figures["last"] = max(log.next - 1 for log in logs)
    newest = max((file.modified_ms for file in files), default=None)
    appended = None if newest is None else clock.to_datetime(newest * 1_000_000)
    sizes = {"files": len(files), "bytes": sum(file.size for file in files), "appended": appended}
    parts = {"partitions": len(logs)} if len(logs) > 1 else {}
    return figures | sizes | parts | {"ends": {log.id: log.next for log in logs}}


def queues(target: StoreTarget, output: CommandOutput) -> None:
    """List the queues, or one of them."""
    from cues.spark.cluster import inspection

    names = [queue_of(target)] if target.name else inspection.queues_of(target.place)
    rows = []
    for queue in names:
        row = _figures(target.place, queue)
        first, last, _ = row.pop("first"), row.pop("last"), row.pop("ends")
        row |= {"queue": queue, "graph": inspection.writer_of(target.place, queue)}
        if output.json:
            row |= {"first_index": first, "last_index": last}
        else:
            row |= {"first": first, "last": last} if row["messages"] else {}
            row |= {"size": size(row["bytes"]), "when": ago(row["appended"]) or "never"}
        rows.append(row)
    if not rows and not output.json:
        print(f"{target.place} has no queues yet.")
        return
    output.rows(rows, _QUEUES)


def status(target: StoreTarget, output: CommandOutput) -> None:
    """Print the queues, and position, lag and last commit of each processor."""
    from cues.spark.cluster import inspection

    place = target.place
    queues = {queue: _figures(place, queue) for queue in inspection.queues_of(place)}
    ends = {log: end for figures in queues.values() for log, end in figures.pop("ends").items()}
    rows: list[dict[str, Any]] = []
    for last in inspection.processors_of(place):
        about = {"processor": last.processor, "record": last.record.number, "committed": last.committed}
        about |= {"epoch": last.record.epoch, "owner": last.record.owner, "when": ago(last.committed)}
        if not last.positions:  # a source that is a stream
            rows.append(about)
        for queue, position in last.positions.items():
            end = None if last.is_feeder else ends.get(queue)
            lag = None if end is None else max(0, end - position)
            rows.append(about | {"queue": queue, "position": position, "lag": lag})
    if output.json:
        output.rows([{"queue": queue} | figures for queue, figures in queues.items()], ())
        output.rows([{name: value for name, value in row.items() if name != "when"} for row in rows], ())
        return
    messages = sum(figures["messages"] for figures in queues.values())
    stored = size(sum(figures["bytes"] for figures in queues.values()))
    print(f"{target.text}: {count(len(queues), 'queue')} in files, {count(messages, 'message')}, {stored}\n")
    output.rows([{"queue": queue, "size": size(f["bytes"])} | f for queue, f in queues.items()], _QUEUES)
    if rows:
        print()
        output.rows(rows, _PROCESSORS)


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
