"""``cues queues``: the queues of a store."""

from __future__ import annotations

from typing import Any

from cues.base.texts import ago, size
from cues.cli.options import command, option
from cues.cli.output import CommandOutput, TableColumn, output_options
from cues.cli.printing import out
from cues.cli.target import takes_place
from cues.operate.place import Place
from cues.queues.options import kept
from cues.tools.measurement import QueueMetrics

_COLUMNS = (
    TableColumn("queue", "queue"),
    TableColumn("messages", "messages", right=True),
    TableColumn("first", "first", right=True),
    TableColumn("last", "last", right=True),
    TableColumn("partitions", "partitions", right=True, optional=True),
    TableColumn("files", "files", right=True, optional=True),
    TableColumn("size", "size", right=True),
    TableColumn("per second", "rate", right=True),
    TableColumn("last append", "appended"),
    TableColumn("options", "options", optional=True),
    TableColumn("written by", "writer", optional=True),
)


@command()
@takes_place("[GRAPH | STORE]")
@option("--all", "everything", is_flag=True, help="The try logs of processors too.")
@output_options
def queues(place: Place, everything: bool, output: CommandOutput) -> None:
    """List the queues of a store, with messages, indices, size and rate.

    \b
      cues queues graph.py
      cues queues data/flights --all
      cues queues data/flights#delayed
      cues queues s3://bucket/flights      a directory of cues run --queues: also the graph that writes each queue

    A queue with several partitions is one line, with the lowest first and the highest last index. If you name the
    queue, each partition has a line too.
    """
    rows = place.queues(everything)
    if not rows and not output.json:
        out(f"{place.called} has no queues yet.")
        return
    output.rows([place.queue_line(row) if output.json else _shown(row) for row in rows], _COLUMNS)


def _shown(row: QueueMetrics) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "queue": row.queue,
        "messages": row.messages,
        "first": row.first if row.messages else None,
        "last": row.last if row.messages else None,
        "size": size(row.bytes),
        "appended": ago(row.appended) or "never",
    }
    if row.files is not None:
        return shown | {"partitions": len(row.partitions) or None, "files": row.files, "writer": row.writer}
    options = row.options.to_dict() if row.options is not None else {}
    retention = options.pop("retention", None)
    words = [f"{name}={','.join(value) if isinstance(value, list) else value}" for name, value in options.items()]
    if retention:
        words.append(f"keeps {kept(retention)}")
    return shown | {"rate": row.rate, "options": " ".join(words)}
