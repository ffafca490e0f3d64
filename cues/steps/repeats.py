"""The attempts of a call: those that the options allow, and those that a database asks for.

A database that ends one of two transactions (a deadlock, a conflict of writes) has undone it, and asks to repeat it:
no message is wrong. These attempts are counted apart from those of ``retries=``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from cues.errors import CheckpointError
from cues.graphs.retry import Retry
from cues.steps.typed_calls import of_input

CONFLICTS: Final = Retry(20, backoff_s=0.01, max_s=1.0, jitter=0.5)
"""The attempts of a transaction that the database asks to repeat; about ten seconds in all."""
ONCE: Final = Retry()
"""A call that is not repeated, unless the database asks for it."""


class Wait(NamedTuple):
    """The wait before a next attempt: the number of failures so far, the number of attempts, and seconds."""

    failures: int
    attempts: int
    seconds: float


def asks_to_repeat(error: Exception) -> bool:
    """Return whether a database has undone a transaction because of another one."""
    return isinstance(error, CheckpointError) and error.again


class Repeats:
    """The attempts of one call so far."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._conflicts = 0
        self.count = 1
        """Number of attempts, without those that ended in a conflict."""

    def after(self, error: Exception) -> Wait | None:
        """Count a failure. Return the wait before the next attempt, or None if there is none."""
        rule, failures = self._retry, self.count
        conflict = asks_to_repeat(error)
        if conflict:
            self._conflicts += 1
            rule, failures = CONFLICTS, self._conflicts
        if failures >= rule.attempts or not isinstance(error, rule.on) or of_input(error):
            return None
        if not conflict:
            self.count += 1
        return Wait(failures, rule.attempts, rule.wait_s(failures, error))
