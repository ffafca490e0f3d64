"""The results of a step: outputs by binding, in the order of the messages, and failures."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from cues.graphs.processor import Node
from cues.native import mypyc_attr
from cues.steps.failure import Failure

if TYPE_CHECKING:
    from cues.queues.base import PartitionShare


@mypyc_attr(allow_interpreted_subclasses=True)  # or pickle could not make one without arguments
class Output:
    """Packed messages for one binding, with the offset of the input message of each."""

    __slots__ = ("items", "origins")

    def __init__(self, items: list[bytes], origins: list[int] | None = None) -> None:
        """``origins`` None: item j was made from message j."""
        self.items = items
        self.origins = origins

    def between(self, start: int, stop: int) -> Output:
        """The items that were made from the messages ``start`` to ``stop``."""
        if self.origins is None:
            return Output(self.items[start:stop])
        low, high = bisect_left(self.origins, start), bisect_left(self.origins, stop)
        return Output(self.items[low:high], self.origins[low:high])


class TableOutput(Output):
    """The rows of a table for one binding, in place of packed messages, for all messages of a step."""

    __slots__ = ("shares", "table")

    def __init__(self, table: Any, shares: list[PartitionShare] | None, origins: list[int] | None = None) -> None:
        """``shares``: the rows of each partition, if the message decides; None if the append chooses. ``origins``: the
        offset of the message that each row was made from; None: all were made from the whole step."""
        super().__init__([], origins)
        self.table = table
        self.shares = shares


class Cut(NamedTuple):
    """A run of a step's messages that commits under one hash: between failures, or one that failed."""

    start: int
    stop: int
    failure: Failure | None


@mypyc_attr(allow_interpreted_subclasses=True)
class Results:
    """The results of the messages of a step."""

    __slots__ = ("closed", "failures", "outputs", "ran", "writes")

    def __init__(
        self,
        outputs: dict[str, Output],
        failures: dict[int, Failure],
        ran: int = 0,
        closed: int | None = None,
        writes: dict[str, Output] | None = None,
    ) -> None:
        self.outputs = outputs
        self.failures = failures
        """By offset; a failed message has no outputs. For a batch function the key is 0."""
        self.ran = ran
        """The number of messages for which the function was called and returned."""
        self.closed = closed
        """The offset at which the step was closed because its time was over: the next step takes the rest."""
        self.writes = writes or {}
        """The messages that the function wrote through appenders, by binding."""

    def before(self, offset: int) -> Results:
        """Return the results of the messages before ``offset``."""
        return Results(
            {b: output.between(0, offset) for b, output in self.outputs.items()},
            {at: failure for at, failure in self.failures.items() if at < offset},
            min(self.ran, offset),
            writes={b: output.between(0, offset) for b, output in self.writes.items()},
        )

    def stop(self, node: Node) -> int | None:
        """Return the offset of the message before which the processor stops; None if it continues."""
        return min((at for at, failure in self.failures.items() if stops(node, failure)), default=None)

    def cuts(self, node: Node, count: int) -> Iterator[Cut]:
        """The step of ``count`` messages, cut at its failures; a batch function's step is one run."""
        if node.options.batch:
            yield Cut(0, count, next(iter(self.failures.values()), None))
            return
        start = 0
        for offset in sorted(self.failures):
            if offset > start:
                yield Cut(start, offset, None)
            yield Cut(offset, offset + 1, self.failures[offset])
            start = offset + 1
        if start < count:
            yield Cut(start, count, None)


def stops(node: Node, failure: Failure) -> bool:
    """Return whether a processor takes no message after a failed one, and does not write it to an error queue.

    It stops without an error queue, or after a target failed; with ``on_error="pause"`` it pauses.
    """
    return node.errors is None or failure.stops or pauses(node, failure)


def pauses(node: Node, failure: Failure) -> bool:
    """Return whether a processor pauses before a failed message, and does not stop."""
    return node.options.on_error == "pause" and not failure.stops
