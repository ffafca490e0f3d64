"""``cues tries``: the steps of a processor, from its try log, or from its records in a shared directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cues.base import names
from cues.cli import target as targets
from cues.cli.options import command, option
from cues.cli.output import CommandOutput, TableColumn, output_options
from cues.cli.printing import out
from cues.cli.tail import LAST, Count
from cues.jsontext import iso
from cues.queues.queue import open_named
from cues.queues.tailer import Tailer
from cues.tools import metrics

if TYPE_CHECKING:
    from cues.spark.cluster.inspection import ProcessorRecord

_COLUMNS = (
    TableColumn("time", "time"),
    TableColumn("hash", "hash"),
    TableColumn("took", "took"),
    TableColumn("outcome", "outcome"),
    TableColumn("wrote", "wrote"),
)
_OUTCOMES = {names.ATTEMPT: "whole", names.NIL_ATTEMPT: "whole, nothing to write", names.ERROR_ATTEMPT: "error"}


@command()
@targets.takes_store("GRAPH#PROCESSOR | STORE#GRAPH.PROCESSOR", shared=True)
@option("--count", "-n", "count", type=Count(), default=LAST, help="The number of last steps.  [default: 10]")
@output_options
def tries(target: targets.StoreTarget, count: int | str, output: CommandOutput) -> None:
    """List the last steps of a processor: the messages that each took, its hash, and its outputs.

    A step is a snapshot and an attempt with the same hash. A snapshot without its attempt did not commit: the
    next start takes exactly the same messages again.

    \b
      cues tries graph.py#enrich
      cues tries data/flights#flights.enrich -n all
      cues tries s3://bucket/flights#flights.enrich      a directory of cues run --queues

    In JSON each map is a line, as the processor wrote it; `cues tail STORE#GRAPH.PROCESSOR` follows those of a store.
    A try log keeps at least its last 256 steps.

    In a directory of cues run --queues the list has the processor's records: its steps, each start of a driver
    ("claimed"), and each cues seek ("moved"). The last 256 records are kept.
    """
    if target.is_shared:
        from cues.spark.cluster import inspection

        processor = targets.processor_of(target, [last.processor for last in inspection.processors_of(target.place)])
        # A step has two records if its function has side effects. The record before the first shows its beginning.
        most = None if count == "all" else 2 * int(count) + 1
        steps = steps_of_records(inspection.records_of(target.place, processor, most))
    else:
        with target.open() as opened:
            processor = targets.processor_of(target, metrics.processors(opened))
            steps = steps_of_log(open_named(opened, processor).tailer())
    if count != "all":
        steps = steps[-int(count) :] if count else []
    if output.json:
        output.rows([record for step in steps for record in step["maps"]], ())
    elif not steps:
        out(f"{processor} has made no step yet.")
    else:
        rows = [step | {"hash": step["hash"] and step["hash"][:12] + "…", "time": step["time"][:23]} for step in steps]
        output.rows(rows, _COLUMNS)


def steps_of_log(tailer: Tailer) -> list[dict[str, Any]]:
    """Snapshots with their attempts."""
    steps: list[dict[str, Any]] = []
    while (message := tailer.read()) is not None:
        envelope = tailer.envelope
        assert envelope is not None
        hash = message.get(names.HASH) or envelope.hash
        if message.get(names.TYPE) == names.SNAPSHOT:
            # A step with side effects writes its snapshot before the function runs, and again with the attempt.
            if not (steps and steps[-1]["outcome"] == "not committed" and steps[-1]["hash"] == hash):
                steps.append({"hash": hash, "maps": []})
            steps[-1] |= {"took": _took(message), "outcome": "not committed", "wrote": ""}
        elif steps:
            written = message.get(names.MESSAGE_INDEX, {}) | message.get(names.PENDING_INDEX, {})
            wrote = ", ".join(f"{queue} from {index}" for queue, index in written.items())
            steps[-1] |= {"outcome": _OUTCOMES.get(message[names.TYPE], "?"), "wrote": wrote}
        else:
            continue  # its snapshot was trimmed
        steps[-1]["time"] = iso(envelope.time)
        steps[-1]["maps"].append(message)
    return steps


def steps_of_records(records: list[ProcessorRecord]) -> list[dict[str, Any]]:
    """Claims, seeks and steps. A record with the range of a step and that of its commit are one step."""
    steps: list[dict[str, Any]] = []
    before: dict[str, int] = {}
    for made in records:
        record, after = made.record, made.positions
        row: dict[str, Any] = {"took": "", "wrote": "", "hash": record.hash, "maps": []}
        if record.kind in ("claim", "seek"):
            places = "".join(f", {queue} {next}" for queue, next in after.items() if before.get(queue) != next)
            row["outcome"] = f"{'claimed' if record.kind == 'claim' else 'moved'}, epoch {record.epoch}{places}"
        else:
            ranges = {queue: (before.get(queue, next), next) for queue, next in after.items()}
            if record.taking is not None:
                ranges = {made.queue_of(tailer): taken for tailer, taken in record.taking.ranges.items()}
            row["took"] = ", ".join(f"{queue} [{low}, {high})" for queue, (low, high) in ranges.items() if low != high)
            row["outcome"] = "not committed"
        if record.kind == "step":
            if steps and steps[-1]["outcome"] == "not committed":
                taking = steps.pop()
                row |= {"took": taking["took"], "maps": taking["maps"]}
            row["wrote"] = ", ".join(f"{queue} from {files[0].first}" for queue, files in record.files.items())
            failed = record.counts.get("failed")
            row["outcome"] = _OUTCOMES[names.ATTEMPT if record.files else names.NIL_ATTEMPT]
            row["outcome"] += f", {failed:,} failed" if failed else ""
        row["maps"].append({"processor": made.processor, "record": record.number} | made.fields)
        row["time"] = made.fields["time"].replace("+00:00", "Z")
        steps.append(row)
        before = after
    return steps[1:] if records and records[0].record.number else steps


def _took(snapshot: dict[str, Any]) -> str:
    if names.SOURCE_POSITION in snapshot:
        before, after = snapshot[names.SOURCE_POSITION]
        return f"({before} … {after}]"
    ends = snapshot[names.TO_INDICES]
    prefix = snapshot[names.PROCESSOR_ID].partition("/")[0] + "."
    return ", ".join(
        f"{tailer.removeprefix(prefix)} [{start}, {ends[tailer]})"
        for tailer, start in snapshot[names.TAILER_INDICES].items()
    )
