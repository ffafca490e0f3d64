"""The calls of a function, as a stepper uses them. The embedded engine makes them in its process (runner.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cues.native import mypyc_attr

if TYPE_CHECKING:
    from cues.steps.pace import Pace
    from cues.steps.results import Results
    from cues.steps.taking import Taken


class Interrupted(Exception):
    """Raised when the graph is aborted: the step is dropped."""


Sleep = Callable[[float], bool]
"""Sleeps for a number of seconds; returns True when the graph was aborted meanwhile."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Calls:
    """The calls of the function of one processor."""

    pace: Pace
    """The number of messages in a step. For a message function it changes only the speed."""
    rows_max: int = 0
    """The most rows of a step whose messages are columns; 0 if the function takes messages only."""
    errors_left: int | None
    """The step is closed after so many failures (``max_errors=``); None: there is no limit."""

    def run(self, taken: Taken, bounded: bool = False) -> Results:
        """Call the function for the messages that a step took, and return the results of the calls.

        A failure of a call, after its retries, is a result and is not raised. Exceptions of which no message is the
        cause leave this method (:class:`Interrupted` if the graph was aborted, :class:`Fenced` if a target has another
        owner). Then the changes of the calls to the state and to tailers and appenders of the function are dropped
        already, and the caller takes the messages again.

        The method writes nothing to the store and moves no position: the commit of the step does both. Effects of the
        function outside of the store are made here, and a step that is repeated makes them again.

        ``bounded``: the step may be closed when its time is over, and the next step takes the rest
        (``Results.closed``). The thread of the stepper calls the method, and calls it again only after its return.
        """
        raise NotImplementedError

    @property
    def abandoned(self) -> int:
        """The number of calls that took longer than ``timeout_s``. They may still be running. Any thread may ask."""
        return 0

    def close(self) -> None:
        """End threads and event loop; after the last :meth:`run`, or from another thread while a call hangs."""
