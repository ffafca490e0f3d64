"""Writing to a queue with several partitions: which message goes where.

    Share     the messages of one append that go to one partition
    Place     the index of a message, and the partition that it is on

One append is one transaction, whatever partitions its messages go to; within a partition they keep
their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cues import batch
from cues.errors import CuesError
from cues.partitioners import Router

if TYPE_CHECKING:
    from cues.batch import Page
    from cues.options import QueueOptions
    from cues.queue import Queue


class Place(int):
    """An index, with the ``partition`` that it is on."""

    partition: int

    def __new__(cls, index: int, partition: int) -> Place:
        found = super().__new__(cls, index)
        found.partition = partition
        return found

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.partition

    def __repr__(self) -> str:
        return f"<{int(self)} of partition {self.partition}>"

    __str__ = int.__repr__


class Share(NamedTuple):
    """What of an append goes to one partition."""

    partition: int
    offsets: list[int]
    """Of its messages in the append."""


class Spread:
    """Divides appends over the partitions of one queue, by the options in force."""

    def __init__(self, options: QueueOptions, start: int) -> None:
        """``start`` is where turns begin: how many messages the queue has had."""
        self._start = start
        self._follow(options)

    def _follow(self, options: QueueOptions) -> None:
        self._options = options
        self._router = Router(options.partitions, options.key, options.partitioner, self._start)

    def shares(self, options: QueueOptions, messages: Sequence[dict[str, Any]]) -> list[Share]:
        """The messages by partition. Raises as :meth:`Router.place`."""
        if options is not self._options:
            self._follow(options)
        found: dict[int, list[int]] = {}
        for offset, partition in enumerate(self._router.place(messages)):
            found.setdefault(partition, []).append(offset)
        return [Share(partition, offsets) for partition, offsets in found.items()]


Built = list[tuple["Queue", list["Page"], "Share"]]
"""What is appended to each partition, by its queue."""


def build(
    queue: Queue, messages: Sequence[dict[str, Any]], shares: Sequence[Share], digest: bytes | None = None
) -> Built:
    """The record batches of an append, partition by partition; an error has the ``offset`` of the message.

    ``digest`` is the delivery hash of the step that they are of.
    """
    options = queue._options
    found: Built = []
    for share in shares:
        chosen = [messages[offset] for offset in share.offsets]
        try:
            pages = batch.build(chosen, options.max_message_bytes, digest, strips=options.strips)
        except CuesError as error:
            error.__dict__["offset"] = share.offsets[getattr(error, "offset", 0)]
            raise
        found.append((queue.view(share.partition), pages, share))
    return found


def places(count: int, built: Built, starts: Sequence[int]) -> list[Place]:
    """The place of each of ``count`` messages, from where each share begins."""
    found: list[Place | None] = [None] * count
    for (_, _, share), start in zip(built, starts):
        for number, offset in enumerate(share.offsets):
            found[offset] = Place(start + number, share.partition)
    return found  # type: ignore[return-value]
