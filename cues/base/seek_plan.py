"""The effects of a seek, as plain data: moves of positions, outputs that are appended again, state."""

from __future__ import annotations

from datetime import datetime

from cues.base.data import dataclass
from cues.base.names import ProcessorId

Place = str | int | datetime
"""``"start"``, ``"end"``, an index, or an aware datetime: the first message at or after it."""


@dataclass(frozen=True)
class SeekInput:
    """The move of one position."""

    tailer: str
    queue: str
    """With ``/<partition>`` unless it is 0."""
    position: int
    to: int

    @property
    def again(self) -> int:
        """The number of messages that are delivered again."""
        return max(0, self.position - self.to)

    @property
    def skipped(self) -> int:
        """The number of messages that are left out."""
        return max(0, self.to - self.position)


@dataclass(frozen=True)
class SeekOutput:
    """A place to which the outputs of messages that are delivered again go."""

    name: str
    """The queue; of a sink its id."""
    effect: str
    """``"appended again"``, ``"delivered again"`` or ``"skipped by the target"``."""
    store: str = ""
    """The path of the queue's store, if it is another store."""


@dataclass(frozen=True)
class SeekPlan:
    """The effects of a seek of one unit."""

    processor: ProcessorId
    """The id of the unit."""
    inputs: tuple[SeekInput, ...]
    outputs: tuple[SeekOutput, ...]
    """Empty if no message is delivered again."""
    state_values: int
    """The number of values in its state."""
    state_bytes: int
    """The size of their pages."""

    @property
    def counts_twice(self) -> bool:
        """True if messages that its state has are delivered again."""
        return self.state_values > 0 and any(input.again for input in self.inputs)
