"""What a step writes to its processor's try log: a snapshot and an attempt.

    snapshot        the processor, where each tailer stood and stands afterwards
    attempt         the hash of what was taken, and the index of the first message written, by queue
    nil-attempt     there was nothing to write
    error-attempt   the messages went to the error queue

A step without side effects writes both as one record; readers of the log still see two messages.
A step with side effects commits its snapshot before the function runs. The record of a snapshot
carries the delivery hash in its header, where recovery reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from cues import names
from cues.batch import Batch

KEEP_MESSAGES: Final = 1024
"""Messages that a try log keeps at least: two a step, so its last 256 steps with room for retries."""
TRIM_MESSAGES: Final = 512
"""It is trimmed by so many at a time: a deletion at every step would double a step's cost."""


class Snapshot(NamedTuple):
    """A snapshot as recovery reads it."""

    start: dict[str, int]
    """Index by tailer id, of the tailers that the step read."""
    end: dict[str, int]
    tailer: str | None
    """The tailer that an alts step chose."""
    source: tuple[Any, Any] | None
    hash: bytes


class Attempt(NamedTuple):
    """An attempt as recovery reads it."""

    kind: str
    hash: str
    indices: dict[str, int]
    """Index of the step's first message, by queue id."""


def snapshot(
    processor: str,
    start: Mapping[str, int],
    end: Mapping[str, int],
    tailer: str | None = None,
    source: Sequence[Any] | None = None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        names.TYPE: names.SNAPSHOT,
        names.PROCESSOR_ID: processor,
        names.TAILER_INDICES: start,
        names.TO_INDICES: end,
    }
    if tailer is not None:
        found[names.TAILER_ID] = tailer
    if source is not None:
        found[names.SOURCE_POSITION] = list(source)
    return found


def attempt(hash: bytes, indices: Mapping[str, int], failed: bool = False) -> dict[str, Any]:
    if failed:
        kind = names.ERROR_ATTEMPT
    else:
        kind = names.ATTEMPT if indices else names.NIL_ATTEMPT
    found: dict[str, Any] = {names.TYPE: kind, names.HASH: hash.hex()}
    if indices:
        found[names.MESSAGE_INDEX] = indices
    return found


def last(batches: Sequence[Batch]) -> tuple[Snapshot | None, Attempt | None]:
    """The last snapshot of a log and the last attempt behind it, from its last records in order."""
    found_snapshot: Snapshot | None = None
    found_attempt: Attempt | None = None
    for batch in batches:
        for message in batch.messages():
            kind = message.get(names.TYPE)
            if kind == names.SNAPSHOT:
                source = message.get(names.SOURCE_POSITION)
                found_snapshot = Snapshot(
                    message[names.TAILER_INDICES],
                    message[names.TO_INDICES],
                    message.get(names.TAILER_ID),
                    tuple(source) if source is not None else None,
                    batch.head.hash or b"",
                )
                found_attempt = None
            elif kind in (names.ATTEMPT, names.NIL_ATTEMPT, names.ERROR_ATTEMPT):
                found_attempt = Attempt(kind, message[names.HASH], message.get(names.MESSAGE_INDEX, {}))
    return found_snapshot, found_attempt
