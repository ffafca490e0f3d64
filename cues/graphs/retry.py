"""Repeated calls of a function that fails: ``retries=cues.Retry(…)``."""

from __future__ import annotations

from cues.base.checks import is_count, is_number
from cues.base.data import dataclass
from cues.errors import InvalidArgument


@dataclass(frozen=True)
class Retry:
    """The number of calls of a failing function, and the waits between them.

    ``attempts`` counts all calls. The wait before retry k is ``backoff_s * 2**(k-1)`` seconds, at most
    ``max_s``. ``on`` limits retries to some exceptions. ``jitter`` is the share of the wait that is random (0 to 1), so
    that calls that failed together are not repeated together. An exception with an attribute ``retry_after_s`` (a
    number) makes the wait at least that long.
    """

    attempts: int = 1
    backoff_s: float = 0.1
    max_s: float = 30.0
    on: type[BaseException] | tuple[type[BaseException], ...] = Exception
    jitter: float = 0.0

    def __post_init__(self) -> None:
        kinds = self.on if isinstance(self.on, tuple) else (self.on,)
        of_errors = all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds)
        for name, fits, hint in (
            ("attempts", is_count(self.attempts), "give the count of all calls, from 1."),
            ("backoff_s", is_number(self.backoff_s) and self.backoff_s >= 0, "give a number of seconds from 0."),
            ("max_s", is_number(self.max_s) and self.max_s >= 0, "give a number of seconds from 0."),
            ("on", of_errors, "give a class of exceptions, or a tuple of them: (ConnectionError, TimeoutError)."),
            ("jitter", is_number(self.jitter) and 0 <= self.jitter <= 1, "give a share from 0 to 1."),
        ):
            if not fits:
                raise InvalidArgument(f"Retry({name}={getattr(self, name)!r:.60}).", hint)

    def wait_s(self, failures: int, error: BaseException | None = None) -> float:
        """Seconds to wait after so many failures, the last of them ``error``."""
        wait_s = min(self.max_s, self.backoff_s * 2.0 ** min(failures - 1, 60))
        asked_s = getattr(error, "retry_after_s", 0.0)
        least_s = float(asked_s) if isinstance(asked_s, (int, float)) else 0.0
        if self.jitter:
            import random

            wait_s *= 1 - self.jitter * random.random()
        return float(max(wait_s, least_s))
