"""Fork queues: what a step wrote for another store, in the home store, until it has been forwarded.

    record    {"q/type": "q.type.fork/step", "q.fork/counts": {queue: count of messages, …}}
    records   the messages of the first of these queues, as they will lie there
    records   of the second, …

A fork queue is a log like any other, written by the step's one commit. All records of a step carry
its delivery hash; the first is the one whose index the attempt names, and whose checksum the other
store's producer row keeps: since it holds the time of the commit, no other step has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cues import batch as batches
from cues import names
from cues.batch import Batch, Page
from cues.errors import StoreDamaged
from cues.options import QueueOptions

if TYPE_CHECKING:
    from cues.log import Log, Raw

_WHOLE: Final = 1 << 62
"""More bytes than a step has."""
OPTIONS: Final = QueueOptions(metadata=False)
"""Of every fork queue. What messages carry along is that of the queues that they are for."""


@dataclass(frozen=True)
class Step:
    """A step as it lies on a fork queue."""

    index: int
    """Of its first record."""
    next: int
    """The index behind its last message."""
    hash: bytes
    seal: bytes
    """Checksum of its first record."""
    appends: list[tuple[str, list[Page]]]
    """What it wrote, by queue."""


def pack(appends: Iterable[tuple[str, list[Page]]], digest: bytes) -> list[Page]:
    """The records of a step, of what it wrote by queue."""
    by_queue: dict[str, list[Page]] = {}
    for queue, pages in appends:
        by_queue.setdefault(queue, []).extend(pages)
    counts = {queue: sum(page.count for page in pages) for queue, pages in by_queue.items()}
    head = {names.TYPE: names.FORK_STEP, names.FORK_COUNTS: counts}
    found = batches.build([head], batches.OWN_BYTES_MAX, digest, reserved=True)
    for pages in by_queue.values():
        found += pages
    return found


def read(log: Log, index: int, bytes_max: int) -> list[Step]:
    """The step at ``index`` and those behind it: whole steps, the first however large, in all about ``bytes_max``.

    Raises :class:`BatchDamaged`, and :class:`StoreDamaged` where what lies there is no step.
    """
    with log.store.view() as txn:
        row = log.row(txn)
        raws = log.read(txn, row, index, row.next - index, bytes_max)
    if raws and raws[0][0] != index:
        raise StoreDamaged(
            f"The fork queue {log.id} begins at {raws[0][0]} where a step at {index} was to be forwarded.",
            f"cues check {log.store.path}, and a backup.",
            path=log.store.path,
        )
    found = _steps(log, raws)
    if raws and not found:
        length = step_length(log, log.batches(raws[:1])[0])
        with log.store.view() as txn:
            raws = log.read(txn, log.row(txn), index, length, _WHOLE)
        found = _steps(log, raws)
        if not found:
            whole = len(log.batches(raws))
            raise log.damaged(raws[whole][0] if whole < len(raws) else index)
    return found


def _steps(log: Log, raws: Sequence[Raw]) -> list[Step]:
    """The whole steps at the beginning of what was read."""
    found: list[Step] = []
    records = [(opened, pieces) for opened, (_, _, pieces) in zip(log.batches(raws), raws)]
    place = 0
    while place < len(records):
        head = records[place][0]
        end = head.first + step_length(log, head)
        behind = place + 1
        while behind < len(records) and records[behind][0].first < end:
            behind += 1
        if records[behind - 1][0].next < end:
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
        found.append(Step(head.first, end, head.head.hash or b"", head.seal, appends))
        place = behind
    return found


def step_length(log: Log, head: Batch) -> int:
    """How many messages a step has on the fork queue, with its first record."""
    return 1 + sum(_counts(log, head).values())


def _counts(log: Log, head: Batch) -> dict[str, int]:
    message = head.messages()[0]
    if message.get(names.TYPE) != names.FORK_STEP:
        raise StoreDamaged(
            f"The fork queue {log.id} has something else than the beginning of a step at {head.first}.",
            f"cues check {log.store.path}.",
            path=log.store.path,
        )
    return dict(message[names.FORK_COUNTS])
