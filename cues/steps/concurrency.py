"""Concurrent calls: the order in which they start, and the threads that run them.

    Schedule    hands out the messages of a step, in order, to any number of callers
    Threads     a pool for plain functions, and for calls that block beside an event loop

The event loop of `async def` is in :mod:`cues.steps.eventloop`.

A caller takes a message, runs it to its end, with all retries, and then takes the next. So n callers
make at most n calls at once. When all of them wait before a retry (a server is down), no further
message is tried; this is the wanted back-pressure.

The threads are daemons, and the end of the process does not wait for them: a call that never returns
must not block a Ctrl-C, a halt or the interpreter's exit.
"""

from __future__ import annotations

import heapq
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class RunnerClosed(Exception):
    """The threads, or the loop, were closed before or during a wait for them."""


def is_async(fn: Callable[..., Any]) -> bool:
    """Return whether a call of ``fn`` returns a coroutine: `async def`, or an object with such a ``__call__``."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


class Schedule:
    """The messages of one step, to be called in order; those of one lane one after another.

    Safe from any thread. A caller that ends a message is offered the next message of the same lane first.
    So a caller that gets no message may end: the remaining callers suffice for all later messages.
    """

    def __init__(self, lanes: Sequence[Hashable], over: Callable[[], bool] = lambda: False) -> None:
        """``lanes`` has the lane of each message; ``over`` returns whether to close the step."""
        followers: dict[Hashable, int] = {}
        self._next: dict[int, int] = {}
        """The offset of the next message of a lane, by the offset of the message before it."""
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
        """The first offset that is left to the next step."""
        self._lock = threading.Lock()
        self.fatal: BaseException | None = None
        """The first error that was not a failure of a message."""

    @property
    def width(self) -> int:
        """The number of messages that could be called at once now."""
        return len(self._ready)

    def take(self, done: int | None) -> int | None:
        """The offset of the message to call next, or None; ``done`` is the offset of the caller's last message."""
        with self._lock:
            if done is not None and done in self._next:
                heapq.heappush(self._ready, self._next[done])
            if self.closed is None and 0 < self._begun < self._count and self._over():
                # A message before one whose call was made belongs to the same step.
                self.closed = self._begun
                self._end = min(self._end, self.closed)
            if not self._ready or self._ready[0] >= self._end:
                return None
            offset = heapq.heappop(self._ready)
            self._begun = max(self._begun, offset + 1)
            return offset

    def cut(self, offset: int) -> None:
        """Begin no further call for ``offset`` and the messages after it."""
        with self._lock:
            self._end = min(self._end, offset)

    def stop(self, error: BaseException) -> None:
        """Begin no further call; ``error`` is raised where the step is awaited."""
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
        """Wait for its end, at most ``limit_s``; return whether it has ended."""
        return self._ended.wait(limit_s)

    def result(self) -> T:
        """Wait for its end; return its result, or raise its error."""
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
        self.threads: list[threading.Thread] = []
        self._open = 0
        """The number of jobs that were submitted and have not ended."""
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> PooledCall[T]:
        """Run ``call`` in a thread. Raises :class:`RunnerClosed`."""
        job = PooledCall(call, self._ended)
        with self._lock:
            if self._closed:
                raise RunnerClosed
            self._open += 1
            if self._open > len(self.threads) < self._size:
                thread = threading.Thread(target=self._serve, name=f"{self._name} {len(self.threads)}", daemon=True)
                self.threads.append(thread)
                thread.start()
            self._jobs.put(job)
        return job

    def _ended(self) -> None:
        with self._lock:
            self._open -= 1

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # otherwise the objects of the last call would live until the next

    def close(self) -> None:
        """Let every thread end after its job; do not wait for them."""
        with self._lock:
            self._closed = True
            for _ in self.threads:
                self._jobs.put(None)


class TimedOut(Exception):
    """A call took longer than its limit."""


class Limited:
    """Calls with a time limit. One that takes longer continues in its thread, and its result is dropped."""

    def __init__(self, name: str, limit_s: float) -> None:
        self.abandoned = 0
        """The number of calls that took longer than the limit."""
        self._name = name
        self._limit_s = limit_s
        self._idle: list[Threads] = []

    def call(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``, or raise its error, or :class:`TimedOut`. Safe from any thread."""
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
        """End the threads that run no call."""
        while self._idle:
            self._idle.pop().close()


def step_through(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without a loop.

    So the same code serves plain functions in threads and `async def` on a loop.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a plain function's call was suspended")
