"""An event loop in a thread of its own, for `async def`.

This module is loaded only for such functions, because the import of asyncio takes as long as all other imports.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

from cues.steps.concurrency import RunnerClosed, Threads, TimedOut

T = TypeVar("T")

CLOSE_S: Final = 2.0
"""Seconds for which the close of a loop waits for cancelled calls; then it leaves them running."""


class EventLoop:
    """An event loop that runs as long as its processor, in a thread of its own.

    One loop serves all steps, and it also runs between them: objects that a function keeps (a client and its
    connections) belong to one loop, and background tasks continue.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        """Held while a call is given to the loop, or the loop is closed. A call after the close is refused."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: threading.Thread | None = None
        self._closed = False

    def run(self, waiting: Awaitable[T]) -> T:
        """Await it on the loop; return its result or raise its error; :class:`RunnerClosed` after a close."""
        outcome = _outcome(waiting)
        with self._lock:
            if self._closed:
                outcome.close()
                if asyncio.iscoroutine(waiting):
                    waiting.close()
                raise RunnerClosed
            future = asyncio.run_coroutine_threadsafe(outcome, self._started())
        try:
            result, error = future.result()
        except concurrent.futures.CancelledError:
            raise RunnerClosed from None
        except BaseException:  # a Ctrl-C in the waiting thread
            future.cancel()
            raise
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._serving = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
            self._serving.start()
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
        """Cancel the running calls, and end the loop; waits at most :data:`CLOSE_S`."""
        with self._lock:
            if self._loop is not None and not self._closed:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._closed = True
        if self._serving is not None:
            self._serving.join(CLOSE_S)

    # --- for coroutines that run on it ---

    @staticmethod
    async def awaited(waiting: Awaitable[T]) -> T:
        """Return its result or raise its error; a CancelledError only if this task is cancelled.

        A CancelledError from elsewhere, such as a cancelled task of the user, is an error like any other.
        """
        try:
            return await waiting
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("the function awaited a task that was cancelled") from error

    @staticmethod
    async def within(waiting: Awaitable[T], limit_s: float) -> T:
        """Return its result or raise its error; after ``limit_s`` cancel it, and raise :class:`TimedOut`."""
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({task}, timeout=limit_s)
            if not task.done():
                raise TimedOut
        finally:
            task.cancel()
        return await EventLoop.awaited(task)

    @staticmethod
    async def all_of(coroutines: Iterable[Coroutine[Any, Any, None]], dropped: Callable[[], bool]) -> None:
        """Run all at once to their end. If ``dropped()`` is true when one has ended, cancel those that still wait."""
        pending = {asyncio.create_task(coroutine) for coroutine in coroutines}
        try:
            while pending and not dropped():
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    @staticmethod
    async def in_thread(threads: Threads, call: Callable[[], T]) -> T:
        """Run ``call``, which blocks, in one of ``threads``. A cancellation of the caller does not stop it."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def run() -> T:
            try:
                return call()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
                    loop.call_soon_threadsafe(ended.set)

        job = threads.submit(run)
        await ended.wait()
        return job.result()


async def _outcome(waiting: Awaitable[T]) -> tuple[T | None, BaseException | None]:
    """Return its result and its error as values: some errors would end the event loop if they were raised."""
    try:
        return await EventLoop.awaited(waiting), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error
