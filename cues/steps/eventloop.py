"""An event loop in a thread of its own, for `async def`.

A module of its own, loaded when there is such a function: asyncio takes as long to import as the rest.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

from cues.steps.concurrency import Closed, Threads, TimedOut

T = TypeVar("T")

CLOSE_S: Final = 2.0
"""How long closing a loop waits for cancelled calls to end; they are left alone then."""


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
                if asyncio.iscoroutine(waiting):
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

    # --- for coroutines that run on it ---

    @staticmethod
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

    @staticmethod
    async def within(waiting: Awaitable[T], limit_s: float) -> T:
        """What it returns or raises; after ``limit_s`` it is cancelled, and :class:`TimedOut` raised."""
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({task}, timeout=limit_s)
            if not task.done():
                raise TimedOut
        finally:
            task.cancel()
        return await Loop.awaited(task)

    @staticmethod
    async def all_of(coroutines: Iterable[Coroutine[Any, Any, None]], dropped: Callable[[], bool]) -> None:
        """Run all at once to their end; once ``dropped()`` when one has ended, those that still wait are cancelled."""
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
        """Run ``call``, which blocks, in one of ``threads``. Who is cancelled meanwhile does not stop it."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def run() -> T:
            try:
                return call()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
                    loop.call_soon_threadsafe(ended.set)

        job = threads.submit(run)
        await ended.wait()
        return job.result()


async def _outcome(waiting: Awaitable[T]) -> tuple[T | None, BaseException | None]:
    """What came of it, as a value: errors that an event loop takes for its own must not reach it."""
    try:
        return await Loop.awaited(waiting), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error
