"""Sources that acknowledge after the commit: the parts that those of MQTT, RabbitMQ and SQS have in common.

The outside system forgets a message when it is acknowledged, so it cannot be asked for what follows a position:

    1. receive       a reading has a number for each message, and keeps it in memory
    2. commit        by the engine: the message, the rows by which a repetition is known, and the number as position
    3. acknowledge   what is committed: the engine calls ``committed``, and the source tells its reading

A message that was not acknowledged comes again, to the next reading. How a repetition is known differs between the
systems, and is theirs.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from cues.errors import InvalidArgument
from cues.processors import checks, waits

VERSION: Final = 1
"""The version of positions, their first item. The second one is the number of the last message."""
CLOSE_S: Final = 5.0
"""Seconds for which an ended source acknowledges what is committed meanwhile."""

Position = list[int]


class Acknowledging(checks.Reads):
    """The base of a source. Its reading has one more method, which is called from other threads.

    ``committed(number)`` acknowledges what is committed up to a number; ``end()`` closes the reading when all is
    acknowledged, or after some seconds.
    """

    _module: str
    """The name of the public module, for errors."""
    _length = 2
    """The number of items of a position."""

    def _needs_process(self, position: Position | None) -> bool:
        """Return whether a call needs the state of a process."""
        return True

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` for each message, until the graph drains."""
        name = type(self).__name__
        hint = "give the source another id, which has no position."
        checks.position_of(position, self._module, self._length, hint)
        if process is None and self._needs_process(position):
            raise InvalidArgument(
                f"{name} was called without process=, whose state it needs.",
                f"give it to cues.Source(id, {name}(…)); or pass on the process of your own source.",
            )
        yield from self._read(position, process)

    def committed(self, position: Position) -> None:
        """Acknowledge the messages that are committed; the engine calls it after each commit."""
        if self._reading is not None:
            self._reading.committed(position[1])


class Connected:
    """The base of a receiver whose client has a thread, which puts what happens into a queue.

    An event is a pair of its kind and a fact.
    """

    def __init__(self, number: int) -> None:
        self._number = self._committed = number
        """The numbers of the last message that was yielded, and committed."""
        self._guard = threading.Lock()
        self._ending = self._closed = False
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def _disconnect(self) -> None:
        raise NotImplementedError

    def _heard(
        self, process: Any, idle_exit_s: float | None, early: Iterable[tuple[str, Any]] = ()
    ) -> Iterator[tuple[str, Any]]:
        """Yield events, ``early`` ones first, until the graph drains, or none has come for ``idle_exit_s`` seconds.

        Time counts only while the source waits for events: the queue may take the one before for a long time.
        """
        first, heard = iter(early), time.monotonic()
        while not waits.stops(process):
            event = next(first, None)
            if event is None:
                with contextlib.suppress(queue.Empty):
                    event = self._events.get(timeout=waits.LOOK_S)
            if event is not None:
                yield event
                heard = time.monotonic()
                continue
            waits.answered(process)
            if idle_exit_s is not None and time.monotonic() - heard >= idle_exit_s:
                return

    # --- other threads ---

    def end(self) -> None:
        """Close the connection when all messages are committed and acknowledged, or after some seconds."""
        with self._guard:
            self._ending = True
            done = self._committed == self._number
        if done:
            return self.close()
        timer = threading.Timer(CLOSE_S, self.close)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Close the connection. The other side keeps what is not acknowledged."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self._disconnect()
