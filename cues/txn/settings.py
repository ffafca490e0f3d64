"""The settings of a consumer, checked; :class:`cues.txn.Consumer` says what each means."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from cues.base.data import dataclass
from cues.errors import InvalidArgument
from cues.producers.sequencer import RING
from cues.records.identity import Clock
from cues.txn.messages import DICT, MessageType
from cues.txn.publisher import TRANSACTION_TIMEOUT_S, Missing, check_publishing, check_timeout
from cues.txn.reader import OnGap
from cues.txn.turns import LEASE_S

MAX_S: Final = 1.0
"""The longest time for which a transaction takes messages."""
HORIZON_S: Final = 24 * 3600.0
"""The time after which a checkpoint drops producers that wrote nothing and have nothing pending."""


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings:
    """The arguments of :class:`cues.txn.Consumer` that have a default."""

    min_s: float = 0.0
    max_s: float = MAX_S
    wait_for_ack: bool = False
    ring: int = RING
    horizon_s: float = HORIZON_S
    on_gap: OnGap = "raise"
    missing: Missing = "removed"
    message_type: MessageType = DICT
    validate: Callable[[Any], object] | None = None
    clock: Clock | None = None
    inside: bool = False
    lease_s: float = LEASE_S
    transaction_timeout_s: float | None = TRANSACTION_TIMEOUT_S
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if not 0 <= self.min_s <= self.max_s or self.max_s <= 0:
            raise InvalidArgument(
                f"min_s is {self.min_s} and max_s is {self.max_s}.", "pass 0 <= min_s <= max_s, and max_s above 0."
            )
        if not (isinstance(self.lease_s, (int, float)) and self.lease_s >= 0):
            raise InvalidArgument(f"lease_s={self.lease_s!r}.", "pass seconds, 0 or more.")
        check_timeout(self.transaction_timeout_s)
        _check_one_of("on_gap", self.on_gap, "raise", "skip")
        _check_one_of("missing", self.missing, "removed", "skip", "refuse")
        if not isinstance(self.message_type, MessageType):
            raise InvalidArgument(f"message_type={self.message_type!r:.60}.", "pass a cues.txn.MessageType.")
        check_publishing(self.clock, self.validate)


def _check_one_of(name: str, given: object, *allowed: str) -> None:
    if given not in allowed:
        raise InvalidArgument(f"{name}={given!r}.", f"pass one of {', '.join(map(repr, allowed))}.")
