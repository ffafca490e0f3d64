"""The steps of a processor as its records in a directory have them."""

from __future__ import annotations

from typing import Any

from cues.base import names
from cues.operate.steps import OUTCOMES
from cues.spark.cluster.inspection import ProcessorRecord


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
            row["outcome"] = OUTCOMES[names.ATTEMPT if record.files else names.NIL_ATTEMPT]
            row["outcome"] += f", {failed:,} failed" if failed else ""
        row["maps"].append({"processor": made.processor, "record": record.number} | made.fields)
        row["time"] = made.fields["time"].replace("+00:00", "Z")
        steps.append(row)
        before = after
    return steps[1:] if records and records[0].record.number else steps
