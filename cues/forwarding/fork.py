"""Fork queues: the messages of steps for another store, kept in the home store until they are forwarded.

    record    {"q/type": "q.type.fork/step", "q.fork/counts": {queue: count of messages, …}}
    records   the messages for the first of these queues, as they will be stored there
    records   of the second, …

A fork queue is an ordinary log; the one commit of the step writes it. All records of a step carry its delivery
hash. The attempt names the index of the first record, and the producer row of the other store keeps its checksum.
The checksum covers the time of the commit, so no two steps have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from cues.base import names
from cues.base.data import dataclass
from cues.base.texts import quoted
from cues.errors import StoreDamaged
from cues.queues.log import Log, Raw
from cues.queues.options import QueueOptions
from cues.records import batch as batches
from cues.records.batch import Batch, Page

_WHOLE: Final = 1 << 62
"""Larger than any step."""
OPTIONS: Final = QueueOptions(metadata=False)
"""The options of every fork queue. Metadata of messages follows the options of their own queues."""


@dataclass(frozen=True)
class Step:
    """A step on a fork queue."""

    index: int
    """The index of its first record."""
    next: int
    """The index after its last message."""
    hash: bytes
    seal: bytes
    """The checksum of its first record."""
    appends: list[tuple[str, list[Page]]]
    """The pages that it wrote, by queue."""


def pack(appends: Iterable[tuple[str, list[Page]]], digest: bytes) -> list[Page]:
    """Return the records of a step, from the pages that it wrote to each queue."""
    by_queue: dict[str, list[Page]] = {}
    for queue, pages in appends:
        by_queue.setdefault(queue, []).extend(pages)
    counts = {queue: sum(page.count for page in pages) for queue, pages in by_queue.items()}
    head = {names.TYPE: names.FORK_STEP, names.FORK_COUNTS: counts}
    records = batches.build([head], batches.OWN_BYTES_MAX, digest, reserved=True)
    for pages in by_queue.values():
        records += pages
    return records


def read(log: Log, index: int, bytes_max: int) -> list[Step]:
    """Return the step at ``index`` and complete steps after it: about ``bytes_max`` in total, at least one.

    Raises :class:`BatchDamaged`, and :class:`StoreDamaged` if the records are not a step.
    """
    with log.store.core.view() as txn:
        row = log.row(txn)
        raws = log.read(txn, row, index, row.next - index, bytes_max)
    if raws and raws[0][0] != index:
        raise StoreDamaged(
            f"The fork queue {log.id} begins at {raws[0][0]} where a step at {index} was to be forwarded.",
            f"run cues check {quoted(log.store.path)}, and restore a backup.",
            path=log.store.path,
        )
    steps = _steps(log, raws)
    if raws and not steps:
        length = step_length(log, log.batches(raws[:1])[0])
        with log.store.core.view() as txn:
            raws = log.read(txn, log.row(txn), index, length, _WHOLE)
        steps = _steps(log, raws)
        if not steps:
            sound = len(log.batches(raws))
            raise log.damaged(raws[sound][0] if sound < len(raws) else index)
    return steps


def _steps(log: Log, raws: Sequence[Raw]) -> list[Step]:
    """Return the complete steps at the beginning of the records."""
    steps: list[Step] = []
    records = [(opened, pieces) for opened, (_, _, pieces) in zip(log.batches(raws), raws)]
    place = 0
    while place < len(records):
        head = records[place][0]
        end = head.first + step_length(log, head)
        after = place + 1
        while after < len(records) and records[after][0].first < end:
            after += 1
        if records[after - 1][0].next < end:
            break
        appends: list[tuple[str, list[Page]]] = []
        at = place + 1
        for queue, count in _counts(log, head).items():
            pages: list[Page] = []
            while count > 0:
                opened, pieces = records[at]
                pages.append(batches.page_of(opened, pieces))
                count -= opened.head.count
                at += 1
            appends.append((queue, pages))
        steps.append(Step(head.first, end, head.head.hash or b"", head.seal, appends))
        place = after
    return steps


def step_length(log: Log, head: Batch) -> int:
    """Return the number of messages that a step has on the fork queue, including its first record."""
    return 1 + sum(_counts(log, head).values())


def _counts(log: Log, head: Batch) -> dict[str, int]:
    message = head.messages()[0]
    if message.get(names.TYPE) != names.FORK_STEP:
        raise StoreDamaged(
            f"The fork queue {log.id} does not have the beginning of a step at {head.first}.",
            f"run cues check {quoted(log.store.path)}.",
            path=log.store.path,
        )
    return dict(message[names.FORK_COUNTS])
