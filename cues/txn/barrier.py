"""Read your writes: wait until a consumer has processed given messages, from any process.

    index = queue.appender().write(order)
    wait_read_through(SQLCheckpoint(url, "totals"), {queue: index}, timeout=5)
    (the rows that the consumer "totals" made of the order are in the database)

The call reads only the consumer's checkpoint, and does not raise its fence. So it works from any process that can read
the checkpoint, also while no instance of the consumer runs. It knows the place at which a successor of the consumer
would continue, and no later one.

    1. offsets    the checkpoint is committed past the messages: the rows of the application are there
    2. intents    the acknowledgements in it are appended: readers of committed messages see what was published. (Those
                  of an older checkpoint are appended before the next checkpoint is committed.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

from cues.errors import InvalidArgument, QueueNotFound, StoreNotFound, WaitTimeout
from cues.producers import clocks
from cues.producers.sequencer import AckIntent, Checkpoint
from cues.queues.base import PartitionIndex, journal_of, view_of
from cues.queues.queue import Queue
from cues.records.identity import split
from cues.txn.publisher import find_queue, read_intent

_LOOK_S: Final = (0.002, 0.05)
"""The first and the longest time between two looks at the checkpoint."""


class ReadableCheckpoint(Protocol):
    """A checkpoint that can be read without taking over, as those of :mod:`cues.checkpoints`."""

    def read(self) -> Checkpoint | None:
        """Return the last checkpoint, and leave the fence as it is."""


def wait_read_through(
    checkpoint: ReadableCheckpoint, indices: Mapping[Queue, int | PartitionIndex], timeout: float | None = None
) -> None:
    """Wait until a consumer has read through the message at an index of each queue, committed and acknowledged.

    ``checkpoint`` is an object on the consumer's checkpoint: the consumer's own, or one with the same arguments in any
    process. It is not restored. ``indices`` are results of :meth:`Appender.write` or :meth:`Append.wait`; the index of
    a queue with several partitions is a :class:`cues.queues.base.PartitionIndex`. A pending message counts as read when
    its transaction is acknowledged and consumed.

    Raises :class:`WaitTimeout` after ``timeout`` seconds, with the position of the consumer on each queue that it has
    not read through; and the errors of reading the checkpoint.
    """
    if not callable(getattr(checkpoint, "read", None)):
        raise InvalidArgument(
            f"The checkpoint {checkpoint!r:.60} cannot be read without taking over: it has no read().",
            "pass a checkpoint of cues.checkpoints.",
        )
    wanted = {_journal(queue, index): (queue, int(index)) for queue, index in indices.items()}
    deadline = None if timeout is None else time.monotonic() + timeout
    wait_s, longest = _LOOK_S
    while True:
        last = checkpoint.read() or Checkpoint()
        behind = {journal for journal, (_, index) in wanted.items() if last.offsets.get(journal, 0) <= index}
        due = [] if behind else [intent for intent in last.ack_intents if not _acknowledged(intent)]
        if not behind and not due:
            return
        if deadline is not None and time.monotonic() >= deadline:
            raise _timeout(checkpoint, timeout, wanted, behind, last, due)
        time.sleep(wait_s if deadline is None else max(0.0, min(wait_s, deadline - time.monotonic())))
        wait_s = min(2 * wait_s, longest)


def _journal(queue: Queue, index: Any) -> str:
    """Check one entry of ``indices``; return its journal."""
    if not isinstance(queue, Queue):
        raise InvalidArgument(f"A queue was expected, found {queue!r:.60}.", "pass {store.queue('orders'): index}.")
    queue.core.check_open()
    if not isinstance(index, int) or isinstance(index, bool) or index < 1:
        raise InvalidArgument(
            f"wait_read_through: {index!r} is not the index of a message of {queue.id!r}.",
            "pass an integer of 1 or more, such as the result of write().",
        )
    if not queue.is_partitioned:
        return journal_of(queue)
    if not isinstance(index, PartitionIndex):
        raise InvalidArgument(
            f"wait_read_through: each of the {queue.partitions} partitions of {queue.id!r} has indices of its own,"
            f" and {index!r} has no partition.",
            "pass the result of write(), or {queue.partition(i): index}.",
        )
    return journal_of(view_of(queue, index.partition))


def _acknowledged(intent: AckIntent) -> bool:
    """Return whether an acknowledgement is in its queue. That of a removed queue counts as appended."""
    uuid, path = read_intent(intent)
    producer, clock, _ = split(uuid)
    with contextlib.ExitStack() as opened:
        try:
            queue = find_queue(intent.journal, path, lambda store: opened.enter_context(store), readonly=True)
        except QueueNotFound:
            return True
        except StoreNotFound:
            return False
        with queue.store.core.view() as txn:
            written = clocks.read(txn, queue.core.log.id, producer)
    return written is not None and written.acked >= clock


def _timeout(
    checkpoint: object,
    timeout: float | None,
    wanted: Mapping[str, tuple[Queue, int]],
    behind: set[str],
    last: Checkpoint,
    due: list[AckIntent],
) -> WaitTimeout:
    places = [
        f"{wanted[journal][0].id!r} is at {last.offsets.get(journal, 'no position')}, waited for"
        f" {wanted[journal][1]} to be read"
        for journal in sorted(behind)
    ]
    places += [f"the acknowledgement in {intent.journal} is not appended" for intent in due]
    return WaitTimeout(
        f"The consumer of {checkpoint!r} has not read through within {timeout:g} s: {'; '.join(places)}.",
        "see whether the consumer runs and has these queues as sources; wait longer with timeout=.",
    )
