"""The waits of a unit while something that it needs is away: a database, an API, room on the disk.

    begins    one event: what it waits for, since when, and why. It is in the counters too, for every display
    waits     0.1 s, 0.2 s, … up to 30 s; at most 2 s if the disk is full or another process holds the writer lock
    ends      one event, with the first step after it

A wait ends early if the run ends, also by a drain: then the unit ends, and its messages stay for the next start. It
also ends early if somebody pauses the processor, moves its position or takes it over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

from cues.base import events
from cues.base.texts import duration
from cues.engine.engine import Host
from cues.errors import ProcessorStopped, StoreError
from cues.graphs.outage import Outage, place_beside, place_of
from cues.graphs.processor import Node
from cues.steps.calls import Interrupted
from cues.steps.failure import root_of, short

_LOOK_S: Final = 0.1
_STORE_S: Final = 2.0
"""The longest wait for the disk or the lock of a store: to look again costs little."""


class OutageWait:
    """The outage of one unit, if there is one."""

    def __init__(self, host: Host, id: str, outage: Outage, counters: events.Counters, node: Node) -> None:
        self._node = node
        self._host = host
        self._id = id
        self._outage = outage
        self._counters = counters
        self.under_way = False
        self._failures = self._taken = 0
        """The tries in a row, and the number of messages taken before them."""
        self._since_s = self._began_s = 0.0
        """The beginning of the outage, and of the tries in a row."""
        self._place = ""
        self.error: BaseException | None = None
        self._next_at_s = 0.0
        """The time of the next try, and the error of the last one."""

    def wait(self, stopped: BaseException, over: Callable[[], bool]) -> None:
        """Wait before the next try. ``over`` returns True to end the wait early.

        Raises ``stopped`` after the longest wait, and :class:`Interrupted` at the end of the run.
        """
        self.begin_wait(stopped)
        try:
            while self.waits and not over():
                self._host.sleep(self.sleep_s)
        except Interrupted:
            self.leave()
            raise

    def begin_wait(self, stopped: BaseException) -> None:
        """Set the time of the next try. Raises ``stopped`` after the longest wait."""
        error = stopped
        while isinstance(error, ProcessorStopped) and error.__cause__ is not None:
            error = error.__cause__
        if not self.under_way:
            self._begin(error)
        if self._counters.taken != self._taken:  # a part of the messages was delivered
            self._failures, self._taken, self._began_s = 0, self._counters.taken, time.monotonic()
        self._failures += 1
        wait_s, limit_s = self._outage.wait_s(self._failures, error), self._outage.limit_s
        if isinstance(error, StoreError):
            wait_s = min(wait_s, _STORE_S)
        elif limit_s is not None:
            left_s = self._began_s + limit_s - time.monotonic()
            if left_s <= 0:
                self._counters.away = ""
                raise stopped
            wait_s = min(wait_s, left_s)
        self.error, self._next_at_s = error, time.monotonic() + wait_s

    @property
    def waits(self) -> bool:
        """True until the time of the next try. Raises :class:`Interrupted` at the end of the run."""
        if self._host.draining or self._host.halted:
            raise Interrupted from self.error
        return self._next_at_s > time.monotonic()

    @property
    def sleep_s(self) -> float:
        """Seconds to sleep before it is asked again whether it :attr:`waits`."""
        return min(max(self._next_at_s - time.monotonic(), 0), _LOOK_S)

    def _begin(self, error: BaseException) -> None:
        self.under_way, self._failures = True, 0
        self._began_s = self._since_s = time.monotonic()
        self._taken = self._counters.taken
        cause = root_of(error)
        beside = place_beside(self._node.options, self._node.fn)
        self._place = place_of(error) or place_of(cause) or beside or "what it needs"
        text = f"{self._place} since {datetime.now().astimezone():%H:%M:%S}: {short(cause)}"
        self._counters.away = text
        if self._outage.limit_s != 0:
            self._host.emit(events.Away(self._id, f"waiting for {text}", logging.WARNING, what=self._place))

    def leave(self) -> None:
        """Tell that the unit ends while the outage lasts. Its counters say so to the summary of the run."""
        text = f"ends while {self._place} is away; its messages stay for the next start"
        self._host.emit(events.Event(self._id, text, logging.WARNING))

    def end(self, tell: bool = True) -> None:
        """Note that the unit goes on. ``tell``: with an event, because what was away has answered."""
        if not self.under_way:
            return
        away_s = time.monotonic() - self._since_s
        self.under_way, self._counters.away = False, ""
        self._counters.away_s += away_s
        if not tell:
            return
        text = f"goes on: {self._place} is there again after {duration(away_s)}"
        self._host.emit(events.Away(self._id, text, logging.WARNING, what=self._place, over=True))
