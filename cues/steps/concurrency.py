"""Calls that run at once: in which order they may start, and what they run in.

    Schedule    hands out the messages of a step, in order, to as many callers as ask
    Threads     a pool for plain functions, and for whoever has to wait beside an event loop

The event loop of `async def` is in :mod:`cues.steps.eventloop`.

A caller takes a message, runs it to its end, retries included, and comes back for the next. So n
callers are at most n calls at once, and when all of them wait before a retry (a server is down) no
further message is tried: that is the back-pressure that one would want then.

Threads here are daemons that nobody waits for at the end of the process: a call that never returns
must not keep a Ctrl-C, a halt or the interpreter's exit from coming through.
"""

from __future__ import annotations

import heapq
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """The threads, or the loop, were closed before or while somebody waited for them."""


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling ``fn`` gives a coroutine: `async def`, or an object whose ``__call__`` is."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


class Schedule:
    """The messages of one step, to be called in order; those of one lane one after another.

    Safe from any thread. A caller that ends a message is the first to be offered its successor of
    the same lane, so callers that find nothing may leave: there will never be more to do at once.
    """

    def __init__(self, lanes: Sequence[Hashable], over: Callable[[], bool] = lambda: False) -> None:
        """``lanes`` names the lane of each message; ``over`` says whether the step is to be closed."""
        followers: dict[Hashable, int] = {}
        self._next: dict[int, int] = {}
        """Offset by the offset of the message before it in its lane."""
        self._ready: list[int] = []
        for offset, lane in enumerate(lanes):
            before = followers.get(lane)
            if before is None:
                self._ready.append(offset)  # in order, so it is a heap
            else:
                self._next[before] = offset
            followers[lane] = offset
        self._end = self._count = len(lanes)
        self._begun = 0
        """One more than the highest offset that was handed out."""
        self._over = over
        self.closed: int | None = None
        """The first offset of those that the next step is to take."""
        self._lock = threading.Lock()
        self.fatal: BaseException | None = None
        """The first error that was no failure of a message."""

    @property
    def width(self) -> int:
        """How many messages could be called at once now."""
        return len(self._ready)

    def take(self, done: int | None) -> int | None:
        """The offset of the message to be called next, None when there is none; ``done`` was called before."""
        with self._lock:
            if done is not None and done in self._next:
                heapq.heappush(self._ready, self._next[done])
            if self.closed is None and 0 < self._begun < self._count and self._over():
                # A message before one that was called for belongs to the same step.
                self.closed = self._begun
                self._end = min(self._end, self.closed)
            if not self._ready or self._ready[0] >= self._end:
                return None
            offset = heapq.heappop(self._ready)
            self._begun = max(self._begun, offset + 1)
            return offset

    def cut(self, offset: int) -> None:
        """Begin no call of ``offset`` or behind it any more."""
        with self._lock:
            self._end = min(self._end, offset)

    def stop(self, error: BaseException) -> None:
        """Begin no call any more; whoever waits for the step gets ``error``."""
        with self._lock:
            self._end = 0
            if self.fatal is None:
                self.fatal = error


class PooledCall(Generic[T]):
    """A call in a thread of a pool."""

    def __init__(self, call: Callable[[], T], ended: Callable[[], None]) -> None:
        self._call = call
        self._tell = ended
        self._ended = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        self._tell()
        self._ended.set()

    def wait(self, limit_s: float) -> bool:
        """Wait for its end, so long at most; whether it has ended."""
        return self._ended.wait(limit_s)

    def result(self) -> T:
        """Wait for what it returned; raises what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Threads:
    """Up to ``size`` threads, made when they are needed and kept."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._jobs: queue.SimpleQueue[PooledCall[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open = 0
        """Jobs that were given and have not ended."""
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> PooledCall[T]:
        """Run ``call`` in a thread. Raises :class:`Closed`."""
        job = PooledCall(call, self._ended)
        with self._lock:
            if self._closed:
                raise Closed
            self._open += 1
            if self._open > len(self._threads) < self._size:
                thread = threading.Thread(target=self._serve, name=f"{self._name} {len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._jobs.put(job)
        return job

    def _ended(self) -> None:
        with self._lock:
            self._open -= 1

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # or what the last call held would live until the next

    def close(self) -> None:
        """Let every thread go behind its job; waits for none."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)


class TimedOut(Exception):
    """A call was not waited for any longer."""


class Limited:
    """Calls that are waited for so long. One that takes longer goes on in its thread, and its result is dropped."""

    def __init__(self, name: str, limit_s: float) -> None:
        self.abandoned = 0
        """Calls that were not waited for to their end."""
        self._name = name
        self._limit_s = limit_s
        self._idle: list[Threads] = []

    def call(self, call: Callable[[], T]) -> T:
        """What ``call`` returns or raises; raises :class:`TimedOut`. Safe from any thread."""
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = Threads(1, self._name)
        job = thread.submit(call)
        if not job.wait(self._limit_s):
            thread.close()
            self.abandoned += 1
            raise TimedOut
        self._idle.append(thread)
        return job.result()

    def close(self) -> None:
        """Let the threads go that no call is in."""
        while self._idle:
            self._idle.pop().close()


def step_through(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits nothing which waits, without a loop.

    So that one text serves plain functions in threads and `async def` on a loop.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a plain function's call was suspended")
