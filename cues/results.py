"""What came of a step's messages: outputs by binding, in the order of the messages, and what failed."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from cues.failure import Failure


@dataclass(slots=True)
class Output:
    """What goes to one binding, with the offset of the taken message that each came from.

    Several bindings may hold the same items: they are packed for each queue, and changed by nobody.
    """

    items: list[dict[str, Any] | bytes] = field(default_factory=list)
    origins: list[int] | None = None
    """None: item j came from message j."""

    def between(self, start: int, stop: int) -> Output:
        """The items that came from the messages ``start`` to ``stop``."""
        if self.origins is None:
            return Output(self.items[start:stop])
        low, high = bisect_left(self.origins, start), bisect_left(self.origins, stop)
        return Output(self.items[low:high], self.origins[low:high])

    def without(self, offset: int) -> Output:
        """The items that did not come from the message at ``offset``."""
        origins = self.origins if self.origins is not None else range(len(self.items))
        left = [(item, origin) for item, origin in zip(self.items, origins) if origin != offset]
        return Output([item for item, _ in left], [origin for _, origin in left])


@dataclass(slots=True)
class Results:
    """What came of a step's messages."""

    outputs: dict[str, Output]
    failures: dict[int, Failure] = field(default_factory=dict)
    """By offset; a failed message has no outputs. For a batch function the key is 0."""
    ran: int = 0
    """How many messages the function was called for and returned."""
    writes: dict[str, Output] = field(default_factory=dict)
    """What the function wrote through appenders, by their bindings."""

    def before(self, offset: int) -> Results:
        """What came of the messages before ``offset``."""
        return Results(
            {b: output.between(0, offset) for b, output in self.outputs.items()},
            {at: failure for at, failure in self.failures.items() if at < offset},
            writes={b: output.between(0, offset) for b, output in self.writes.items()},
        )

    def fail(self, offset: int, failure: Failure) -> None:
        """The message at ``offset`` turned out to have failed."""
        self.failures[offset] = failure
        self.outputs = {b: output.without(offset) for b, output in self.outputs.items()}
        self.writes = {b: output.without(offset) for b, output in self.writes.items()}
