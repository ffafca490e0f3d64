"""The settings of a member, checked; :class:`cues.groups.Member` says what each means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cues.base.checks import is_number
from cues.base.data import dataclass
from cues.errors import InvalidArgument
from cues.groups.places import Start, check_start
from cues.groups.sticky import Partition
from cues.queues.committed import Isolation, check_isolation
from cues.steps.ownership import LEASE_S

MAX_POLL_INTERVAL_S: Final = 300.0
"""As Kafka's ``max.poll.interval.ms``."""
OnChange = Callable[[list[Partition]], object]


@dataclass(frozen=True, kw_only=True)
class MemberSettings:
    """The arguments of :class:`cues.groups.Member` that subscriptions do not change."""

    lease_s: float = LEASE_S
    max_poll_interval_s: float = MAX_POLL_INTERVAL_S
    start: Start = "earliest"
    expire_s: float | None = None
    isolation: Isolation = "uncommitted"
    on_assigned: OnChange | None = None
    on_revoked: OnChange | None = None
    on_lost: OnChange | None = None

    def __post_init__(self) -> None:
        for option in ("on_assigned", "on_revoked", "on_lost"):
            hook = getattr(self, option)
            if not (hook is None or callable(hook)):
                raise InvalidArgument(f"{option}={hook!r} cannot be called.", "pass a function that takes a list.")
        if not isinstance(self.lease_s, (int, float)) or not 0 < self.lease_s < float("inf"):
            raise InvalidArgument(
                f"lease_s is {self.lease_s!r}.", "pass seconds, more than the longest time between two calls."
            )
        if not isinstance(self.max_poll_interval_s, (int, float)) or not self.max_poll_interval_s > 0:
            raise InvalidArgument(
                f"max_poll_interval_s is {self.max_poll_interval_s!r}.",
                "pass seconds, more than the longest step; float('inf') for no bound.",
            )
        check_start(self.start)
        if self.expire_s is not None and not (is_number(self.expire_s) and self.expire_s > 0):
            raise InvalidArgument(
                f"expire_s is {self.expire_s!r}.",
                "pass seconds, more than the longest time without a member, or None.",
            )
        check_isolation(self.isolation)
