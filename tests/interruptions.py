"""An exception at every point of a piece of work, one after another; and then the program continues.

A Ctrl-C raises ``KeyboardInterrupt`` between two bytecodes: where a function begins, and where a call has
come back. :func:`faults` makes a fresh world for each of these points, raises there, and lets the test go
on with the same objects, as a notebook would.

    def arrange():                       # a context manager: the world, made anew for each point
        with cues.open(...) as store:
            yield store.queue("q").tailer()

    def act(tailer):                     # what is interrupted
        tailer.read()

    def go_on(tailer, place):            # what must hold afterwards; assertions, and what it raises, are faults
        assert tailer.read() == ...

    points, found = interruptions.faults(contextmanager(arrange), act, go_on)
    assert points > 10
    assert not found, "\\n".join(found)

Points are counted in functions of Cues, in the thread that runs ``act``. An exception that the
interpreter swallows (in a finalizer) counts as one that was not raised.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import cues

W = TypeVar("W")

ENTRIES = frozenset({"call"})
"""The first line of a function of Cues."""
CALLS = frozenset({"call", "return", "c_call", "c_return"})
"""Also where it returns, and around every call of a function that is written in C: three to five times as many."""

_HERE = str(Path(cues.__file__).parent) + "/"
_STUCK_S = 10.0


class Interruption:
    """A context manager that raises ``error`` at the point of this number, and lets it out no further."""

    def __init__(
        self,
        at: int,
        events: frozenset[str] = ENTRIES,
        error: Callable[[], BaseException] = KeyboardInterrupt,
    ) -> None:
        self._at = at
        self._events = events
        self._error = error
        self.passed = 0
        """Points so far."""
        self.place: str | None = None
        """The place where it was raised; None before that."""
        self._raised: BaseException | None = None

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if event not in self._events or not file.startswith(_HERE):
            return
        if event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            # If a profiler raises where a generator begins or continues, CPython 3.11 leaves its frame half made, and
            # may crash later. A signal never does: it is handled at the next call or jump.
            return
        self.passed += 1
        if self.passed == self._at:
            sys.setprofile(None)
            called = f" {event} {arg.__qualname__}" if event.startswith("c_") else f" {event}"
            self.place = f"{self._at}: {file[len(_HERE) :]}:{frame.f_lineno} {frame.f_code.co_qualname}{called}"
            self._raised = self._error()
            raise self._raised

    def __enter__(self) -> Interruption:
        sys.setprofile(self._look)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        sys.setprofile(None)
        return error is not None and error is self._raised


def faults(
    arrange: Callable[[], AbstractContextManager[W]],
    act: Callable[[W], object],
    go_on: Callable[[W, str], object],
    events: frozenset[str] = ENTRIES,
    error: Callable[[], BaseException] = KeyboardInterrupt,
    points: range | None = None,
) -> tuple[int, list[str]]:
    """Interrupt ``act`` at every point, or at those of the numbers ``points``; how many, and what did not hold.

    Ends with the first point that ``act`` does not reach. What ``act`` raises itself is a fault too.
    """
    found: list[str] = []
    count = 0
    for at in points if points is not None else range(1, 1 << 30):
        with arrange() as world:
            what = ""
            interruption = Interruption(at, events, error)
            try:
                with _deadline(), interruption:
                    act(world)
            except Exception as raised:
                what = f"the interrupted work raised {type(raised).__name__}: {raised}"
            if interruption.place is None:
                if what:
                    found.append(what)
                return count, found
            count += 1
            if not what:
                try:
                    with _deadline():
                        go_on(world, interruption.place)
                except Exception as raised:
                    what = f"{type(raised).__name__}: {raised}"
            if what:
                found.append(f"{interruption.place}\n    {what}")
    return count, found


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    """A lock that was left held is a fault of the point, and not the end of the test run."""

    def stuck(number: int, frame: FrameType | None) -> None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"
        raise AssertionError(f"stuck for {_STUCK_S:.0f} s at {place}")

    before = signal.signal(signal.SIGALRM, stuck)
    left, _ = signal.setitimer(signal.ITIMER_REAL, _STUCK_S)  # of the test's own limit
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)
