"""Calls that run at once: in which order they may start, and what they run in.

    Schedule    hands out the messages of a step, in order, to as many callers as ask
    Threads     a pool for plain functions, and for whoever has to wait beside an event loop
    Loop        an event loop in a thread of its own, for `async def`

A caller takes a message, runs it to its end, retries included, and comes back for the next. So n
callers are at most n calls at once, and when all of them wait before a retry (a server is down) no
further message is tried: that is the back-pressure that one would want then.

Threads here are daemons that nobody waits for at the end of the process: a call that never returns
must not keep a Ctrl-C, a halt or the interpreter's exit from coming through.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, Final, TypeVar

T = TypeVar("T")

CLOSE_S: Final = 2.0
"""How long closing a loop waits for cancelled calls to end; they are left alone then."""


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

    def __init__(self, lanes: Sequence[Hashable]) -> None:
        """``lanes`` names the lane of each message."""
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
        self._end = len(lanes)
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
            if not self._ready or self._ready[0] >= self._end:
                return None
            return heapq.heappop(self._ready)

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


class Threads:
    """Up to ``size`` threads, made when they are needed and kept."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open = 0
        """Jobs that were given and have not ended."""
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run ``job`` in a thread; the future has its result or whatever it raised. Raises :class:`Closed`."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # who stops waiting for it does not stop it

        def run() -> None:
            try:
                result = job()
            except BaseException as error:
                self._ended()
                future.set_exception(error)
            else:
                self._ended()
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise Closed
            self._open += 1
            if self._open > len(self._threads) < self._size:
                thread = threading.Thread(target=self._serve, name=f"{self._name} {len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._jobs.put(run)
        return future

    def _ended(self) -> None:
        with self._lock:
            self._open -= 1

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # or what the last call held would live until the next

    def close(self) -> None:
        """Let every thread go behind its job; waits for none."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)


class Loop:
    """An event loop that runs as long as its processor, in a thread of its own.

    One for all steps, and it runs in between: what a function keeps (a client and its connections)
    belongs to one loop, and background tasks go on.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        """Whoever gives the loop something does so before it is closed, or hears that it is."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, waiting: Awaitable[T]) -> T:
        """Await it there and return the result, or raise what it raised; :class:`Closed` when closed meanwhile."""
        outcome = _outcome(waiting)
        with self._lock:
            if self._closed:
                outcome.close()
                if inspect.iscoroutine(waiting):
                    waiting.close()
                raise Closed
            future = asyncio.run_coroutine_threadsafe(outcome, self._started())
        try:
            result, error = future.result()
        except concurrent.futures.CancelledError:
            raise Closed from None
        except BaseException:  # a Ctrl-C that reached the thread that waits
            future.cancel()
            raise
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def close(self) -> None:
        """Cancel what runs, and end the loop; waits :data:`CLOSE_S` at most."""
        with self._lock:
            if self._loop is not None and not self._closed:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._closed = True
        if self._thread is not None:
            self._thread.join(CLOSE_S)


async def _outcome(waiting: Awaitable[T]) -> tuple[T | None, BaseException | None]:
    """What came of it, as a value: errors that an event loop takes for its own must not reach it."""
    try:
        return await awaited(waiting), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


async def awaited(waiting: Awaitable[T]) -> T:
    """What it returns or raises; a CancelledError only where this task is told to stop.

    One that something else raises, a task of the user's that was cancelled, is an error as any other.
    """
    try:
        return await waiting
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("what the function awaited was cancelled") from error


def step_through(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits nothing which waits, without a loop.

    So that one text serves plain functions in threads and `async def` on a loop.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a plain function's call was suspended")
