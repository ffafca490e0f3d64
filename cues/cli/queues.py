"""``cues queues``: the queues of a store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cues.cli import shared
from cues.cli import target as targets
from cues.cli.options import WrongUsage, command, option
from cues.cli.output import CommandOutput, TableColumn, ago, kept, output_options, size
from cues.cli.printing import out
from cues.graphs.graph import Graph
from cues.queues.store import Store
from cues.tools import metrics
from cues.tools.metrics import QueueMetrics

_COLUMNS = (
    TableColumn("queue", "queue"),
    TableColumn("messages", "messages", right=True),
    TableColumn("first", "first", right=True),
    TableColumn("last", "last", right=True),
    TableColumn("size", "size", right=True),
    TableColumn("per second", "rate", right=True),
    TableColumn("last append", "appended"),
    TableColumn("options", "options", optional=True),
)


@command()
@targets.takes_store("[GRAPH | STORE]", shared=True)
@option("--all", "everything", is_flag=True, help="The try logs of processors too.")
@output_options
def queues(target: targets.StoreTarget, everything: bool, output: CommandOutput) -> None:
    """List the queues of a store, with messages, indices, size and rate.

    \b
      cues queues graph.py
      cues queues data/flights --all
      cues queues data/flights#delayed
      cues queues s3://bucket/flights      a directory of cues run --queues: also the graph that writes each queue

    A queue with several partitions is one line, with the lowest first and the highest last index. If you name the
    queue, each partition has a line too.
    """
    if target.is_shared:
        if everything:
            raise WrongUsage(
                f"--all is for stores; the steps of processors are not queues in {target.place}.",
                "list them with cues tries.",
            )
        return shared.queues(target, output)
    with target.open() as opened:
        if target.name:
            known = opened.queues(all="." in target.name)
            row = metrics.of_queue(opened, targets.queue_of(target, known))
            rows = [row, *row.partitions]
        else:
            rows = metrics.of_queues(opened, all=everything)
            if target.file is not None:
                rows += _elsewhere(target.file.graph)
    if not rows and not output.json:
        out(f"The store {targets.shown(target.path)} has no queues yet.")
        return
    output.rows([_json(row) if output.json else _shown(row) for row in rows], _COLUMNS)


def _elsewhere(graph: Graph) -> list[QueueMetrics]:
    """The graph's existing queues in other stores."""
    rows = []
    for name, options in graph.plan().queues.items():
        if options.path is None:
            continue
        place = graph.place(options.path)
        if (place / "data.mdb").exists():
            with Store(place, readonly=True) as store:
                if name in store.queues():
                    row = metrics.of_queue(store, name)
                    rows.append(replace(row, options=replace(row.options, path=targets.shown(place))))
    return rows


def _json(row: QueueMetrics) -> dict[str, Any]:
    return {
        "queue": row.queue,
        "messages": row.messages,
        "first_index": row.first,
        "last_index": row.last,
        "bytes": row.bytes,
        "rate": row.rate,
        "appended": row.appended,
        "partitions": len(row.partitions) or 1,
        "options": row.options.to_dict(),
    }


def _shown(row: QueueMetrics) -> dict[str, Any]:
    options = row.options.to_dict()
    retention = options.pop("retention", None)
    words = [f"{name}={','.join(value) if isinstance(value, list) else value}" for name, value in options.items()]
    if retention:
        words.append(f"keeps {kept(retention)}")
    return {
        "queue": row.queue,
        "messages": row.messages,
        "first": row.first if row.messages else None,
        "last": row.last if row.messages else None,
        "size": size(row.bytes),
        "rate": row.rate,
        "appended": ago(row.appended) or "never",
        "options": " ".join(words),
    }
