"""Waits for something outside that is away: ``outage=cues.Outage(…)``.

An outage is not a failure of a message. The step commits the messages before it and ends there, as a
processor does that stops at a failure; the unit waits, and continues from its row, as after a restart
(engine/threads.py). So a wait holds no lock, no transaction and no half of a step, and an outage
has the guarantees of a kill.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from cues.base.data import dataclass
from cues.errors import CuesError, InvalidArgument, StoreError
from cues.graphs.retry import Retry
from cues.queues.options import duration_of

WAIT: Final = "wait"
STOP: Final = "stop"
FAIL: Final = "fail"

_WAITS: Final = Retry(backoff_s=0.1, max_s=30.0, jitter=0.5)


@dataclass(frozen=True)
class Outage:
    """The rule for a processor when something that it needs is away.

    ``then`` is one of

        ``"wait"``   wait until it is there again, for ever
        a time       wait so long, then stop the processor: ``"30m"``, seconds, or a timedelta
        ``"stop"``   stop the processor at once
        ``"fail"``   the message fails, as with any other exception: ``retries=``, the error queue

    ``on`` names exceptions of the function that mean that something is away, besides :class:`ConnectionError`,
    :class:`TimeoutError`, the like of well-known libraries, and :class:`cues.errors.Away`.

    The waits are 0.1 s, 0.2 s, … up to 30 s, less jitter, and at least ``retry_after_s`` of the exception. A wait ends
    at once when the run ends or when the processor is paused.
    """

    then: str | float | timedelta = WAIT
    on: type[BaseException] | tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        kinds = self.on if isinstance(self.on, tuple) else (self.on,)
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            raise InvalidArgument(
                f"Outage(on={self.on!r:.60}).", "give a class of exceptions, or a tuple of them: (ApiDown, ApiBusy)."
            )
        if self.then not in (WAIT, STOP, FAIL):
            try:
                duration_of(self.then, "The time")
            except InvalidArgument:
                raise InvalidArgument(
                    f"outage is {self.then!r:.60}.", "give 'wait', 'stop', 'fail', or the longest wait, such as '30m'."
                ) from None

    @property
    def limit_s(self) -> float | None:
        """The longest wait in seconds; None: for ever."""
        if self.then == WAIT:
            return None
        return 0.0 if self.then in (STOP, FAIL) else duration_of(self.then, "The time")

    def concerns(self, error: BaseException) -> bool:
        """Return whether an exception says that something is away."""
        kinds = self.on if isinstance(self.on, tuple) else (self.on,)
        from cues.base.away import is_away

        return any(isinstance(error, kind) for kind in kinds) or is_away(error)

    @staticmethod
    def wait_s(failures: int, error: BaseException | None = None) -> float:
        """Seconds to wait after so many failures, the last of them ``error``."""
        return _WAITS.wait_s(failures, error)


class OutageRule:
    """The rule of one processor: which errors of its function, its target or its source are waited out."""

    def __init__(self, outage: Outage, retry: Retry, is_called_once: bool) -> None:
        """``is_called_once``: it cannot be called again for the same messages, so it does not wait."""
        self.outage = outage
        # Exceptions that retries= names follow that rule.
        self._retried = () if retry.on is Exception else retry.on
        self._waits = not is_called_once and outage.then != FAIL

    def concerns(self, error: BaseException) -> bool:
        """Return whether the processor waits after this error."""
        return self._waits and not isinstance(error, self._retried) and self.outage.concerns(error)


def outage_of(value: Outage | str | float | timedelta) -> Outage:
    """Return the value of the option as an :class:`Outage`. Raises :class:`InvalidArgument`."""
    return value if isinstance(value, Outage) else Outage(value)


def place_beside(options: object, fn: object) -> str:
    """Return the name of what a processor uses, for an exception that does not say: that of its target or its source.

    A driver tells an address at best: ``where`` has the queue, the table or the slot too. "" if neither has one.
    """
    for part in (getattr(options, "checkpoint", None), getattr(fn, "__self__", fn)):
        found = getattr(part, "where", "")
        if isinstance(found, str) and found:
            return found
    return ""


def place_of(error: BaseException) -> str:
    """Return the name of what is away; "" if the exception does not say."""
    if isinstance(error, StoreError):
        return f"the store {error.path}"
    for name in ("what", "where", "url"):
        found = getattr(error, name, "")
        if isinstance(error, CuesError) and isinstance(found, str) and found:
            return found
    return ""
