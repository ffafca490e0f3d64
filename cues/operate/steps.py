"""The steps of a processor as its try log has them."""

from __future__ import annotations

from typing import Any, Final

from cues.base import names
from cues.jsontext import iso
from cues.queues.tailer import Tailer

OUTCOMES: Final = {names.ATTEMPT: "whole", names.NIL_ATTEMPT: "whole, nothing to write", names.ERROR_ATTEMPT: "error"}


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
            steps[-1] |= {"outcome": OUTCOMES.get(message[names.TYPE], "?"), "wrote": wrote}
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
