"""The steps of a processor, from its try log, or from its records in a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cues.base import names
from cues.jsontext import iso
from cues.queues.tailer import Tailer

if TYPE_CHECKING:
    from cues.spark.cluster.inspection import ProcessorRecord

_OUTCOMES: Final = {names.ATTEMPT: "whole", names.NIL_ATTEMPT: "whole, nothing to write", names.ERROR_ATTEMPT: "error"}


def of_log(tailer: Tailer) -> list[dict[str, Any]]:
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


def of_records(records: list[ProcessorRecord]) -> list[dict[str, Any]]:
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
