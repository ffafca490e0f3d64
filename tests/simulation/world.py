"""Virtual time, simulated processes and their scheduler, all of which follow one source of random numbers.

    Clock       replaces the clocks of the system. It moves when the scheduler moves it, and when a process sleeps
    Process     a program that runs until it reaches a point, and hands over there. Threads carry the programs, because
                LMDB knows threads; never do two of them run at once
    World       the processes, the locks that they hold, and the faults

A process that is killed ends at the point where it is: it writes nothing more, and its locks are free.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

from cues import faults, testing
from cues.base import clock as clocks
from cues.errors import StoreFull
from cues.storage import base_store
from cues.storage.base_store import BaseStore
from cues.storage.store_core import StoreCore

Killed = testing.Crashed
START_NS: Final = int(datetime(2026, 1, 31, tzinfo=UTC).timestamp()) * 10**9
ENGINE_TURNS: Final = 4
"""Turns of a process that runs the graph for one of each other process: most of the code is there."""
RARE: Final = 10
"""How much likelier faults are at the first hit of a point: else those that are often reached would have them all."""
HANG_S: Final = 60.0
"""Seconds of real time after which a process that does not hand over is a failure of the run."""


class Clock:
    """The clocks of all processes, in nanoseconds."""

    def __init__(self) -> None:
        self.monotonic_ns = 10**12
        self.wall_ns = START_NS

    def advance(self, seconds: float) -> None:
        self.monotonic_ns += round(seconds * 1e9)
        self.wall_ns += round(seconds * 1e9)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the clocks of the system and of Cues."""
        wanted: list[tuple[Any, str, Callable[..., Any]]] = [
            (time, "monotonic", lambda: self.monotonic_ns / 1e9),
            (time, "monotonic_ns", lambda: self.monotonic_ns),
            (time, "time", lambda: self.wall_ns / 1e9),
            (time, "time_ns", lambda: self.wall_ns),
            (time, "sleep", self.advance),
            (clocks, "now_ns", lambda: self.wall_ns),
            (clocks, "monotonic_ns", lambda: self.monotonic_ns),
        ]
        with replaced(wanted):
            yield


@contextlib.contextmanager
def replaced(wanted: list[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
    try:
        for owner, name, value in wanted:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class Locks:
    """The locks of one simulated process on one store: a :class:`cues.storage.locks.LockFile`."""

    def __init__(self, held: dict[int, int], pid: int) -> None:
        """``held``: the pid of each lock of the store that is held."""
        self._held = held
        self._pid = pid

    def try_lock(self, offset: int) -> bool:
        if offset in self._held:
            return False
        self._held[offset] = self._pid
        return True

    def unlock(self, offset: int) -> None:
        if self.mine(offset):
            del self._held[offset]

    def mine(self, offset: int) -> bool:
        return self._held.get(offset) == self._pid

    def holder(self, start: int, stop: int | None = None) -> int | None:
        pids = [pid for at, pid in self._held.items() if start <= at < (start + 1 if stop is None else stop)]
        return next((pid for pid in pids if pid != self._pid), None)


class Process:
    """A program, which hands over to the scheduler at points."""

    def __init__(self, world: World, name: str, program: Callable[[Process], None], atomic: bool = False) -> None:
        """``atomic``: it hands over between its actions only."""
        self.world = world
        self.name = name
        self.pid = len(world.started) + 1
        self.atomic = atomic
        self.killed = self.ended = False
        self.failed = 0
        """The number of commits that were made to fail."""
        self.stopped_until_ns = 0
        self.error: BaseException | None = None
        self._go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(program,), name=name, daemon=True)
        self._thread.start()

    def _run(self, program: Callable[[Process], None]) -> None:
        self._go.acquire()
        try:
            if not self.killed:
                program(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self.world.release(self)
            self.world.back.release()

    def resume(self) -> None:
        """Let it run until it hands over or ends. Called by the scheduler."""
        self._go.release()
        if not self.world.back.acquire(timeout=HANG_S):
            raise AssertionError(f"{self.name} neither ended nor handed over")

    def park(self, where: str) -> None:
        """Hand over. Raises :class:`Killed` if the process was killed meanwhile."""
        self.world.note(f"{self.name} {where}")
        self.world.back.release()
        self._go.acquire()
        self.check()

    def check(self) -> None:
        if self.killed:
            raise Killed(self.name)

    # --- at points and commits ---

    def reached(self, point: str) -> None:
        """Follow a point: go on, hand over or die."""
        self.check()
        world = self.world
        if world.calm:
            return
        world.hits[point] += 1
        rare = 1 + RARE / world.hits[point]
        if world.chance.random() < rare * world.weather["kill"]:
            world.killed_at.add(point)
            world.kill(self, point)
            raise Killed(point)
        if not (self.atomic or self.inside):
            self.rest(point, rare)

    def rest(self, where: str, rare: float = 10) -> None:
        """Hand over at times, and be stopped there at times."""
        world = self.world
        if world.chance.random() < rare * world.weather["stop here"]:
            world.stop(self, world.chance.choice((15, 40)))
            self.park(where)
        elif world.chance.random() < rare * world.weather["hand over"]:
            self.park(where)

    @property
    def inside(self) -> bool:
        """Whether a write transaction is open: the others would wait for its end."""
        return self.world.writing

    def transact(self, real: Callable[..., Any], pages: int, work: Callable[..., Any], *arguments: Any) -> Any:
        """Make a commit, or a fault in its place."""
        self.check()
        world = self.world
        if world.calm:
            return real(pages, work, *arguments)
        if not self.atomic and world.chance.random() < world.weather["hand over"]:
            self.park("commit")
        fault = world.draw(("full", "write", "unknown", "slow"))
        if fault == "full":
            self.fault("full")
            raise StoreFull("The disk is full.", "free space on the disk.", path="simulated")

        def worked(txn: Any, *arguments: Any) -> Any:
            world.writing = True
            result = work(txn, *arguments)
            if fault == "write":
                self.fault("write")
                raise OSError(errno.EIO, "the simulated disk failed")
            return result

        try:
            result = real(pages, worked, *arguments)
        finally:
            world.writing = False
        if fault == "slow":
            world.counts["slow"] += 1
            world.clock.advance(world.chance.uniform(0, 3))
        if fault == "unknown":  # it is there, and the process is told that it failed
            self.fault("unknown")
            raise OSError(errno.EIO, "the simulated disk failed after the commit")
        return result

    def synced(self, real: Callable[[], None]) -> None:
        self.check()
        if not self.world.calm and self.world.draw(("sync",)):
            self.fault("sync")
            raise OSError(errno.EIO, "the simulated disk failed in a sync")
        real()

    def fault(self, what: str) -> None:
        self.failed += 1
        self.world.note(f"{self.name} fault {what}")
        self.world.counts[what] += 1


class World:
    """Everything that one seed decides."""

    processes: type[Process] = Process

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.bytes_of = random.Random(0)
        self.clock = Clock()
        self.back = threading.Semaphore(0)
        self.started: list[Process] = []
        self.current: Process | None = None
        self.writing = False
        self.calm = False
        """True: no faults, and nobody hands over."""
        self.counts: Counter[str] = Counter()
        """The faults, and what else happened."""
        self.hits: Counter[str] = Counter()
        """The hits of each point so far."""
        self.killed_at: set[str] = set()
        """The points at which a process was killed."""
        self.trace: list[str] = []
        self._locks: dict[int, dict[int, int]] = {}
        draw = self.chance.choice
        self.weather: dict[str, float] = {
            "hand over": draw((0.02, 0.1, 0.3)),
            "kill": draw((0.0, 0.001, 0.005, 0.02)),
            "stop": draw((0.0, 0.01, 0.03)),
            "stop here": draw((0.0, 0.005, 0.02)),
            "wall": draw((0.0, 0.0, 0.02)),
            **{fault: draw((0.0, 0.0, 0.005, 0.02)) for fault in ("full", "write", "unknown", "slow", "sync")},
        }

    def note(self, what: str) -> None:
        self.trace.append(f"{(self.clock.wall_ns - START_NS) / 1e9:9.3f}  {what}")

    @property
    def digest(self) -> str:
        """A hash of all decisions and events: two runs of one seed have the same."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]

    def draw(self, faults: tuple[str, ...]) -> str | None:
        for fault in faults:
            if (rate := self.weather[fault]) and self.chance.random() < rate:
                return fault
        return None

    # --- processes ---

    def start(self, name: str, program: Callable[[Process], None], atomic: bool = False) -> Process:
        process = self.processes(self, f"{name}-{len(self.started) + 1}", program, atomic)
        self.started.append(process)
        self.counts["processes"] += 1
        return process

    @property
    def living(self) -> list[Process]:
        return [process for process in self.started if not process.ended]

    def run(self, process: Process) -> None:
        """Let a process run until it hands over or ends. Raises the error with which it ended."""
        before, self.current = self.current, process
        try:
            process.resume()
        finally:
            self.current = before
        if process.error is not None:
            raise process.error

    def kill(self, process: Process, where: str) -> None:
        """Kill a process, as ``kill -9`` does: from now on it writes nothing and holds no lock."""
        self.note(f"{process.name} killed at {where}")
        self.counts["kills"] += 1
        process.killed = True
        self.release(process)

    def release(self, process: Process) -> None:
        for held in self._locks.values():
            for offset in [offset for offset, pid in held.items() if pid == process.pid]:
                del held[offset]

    def stop(self, process: Process, seconds: float) -> None:
        """Let a process not run for some time, as SIGSTOP and SIGCONT do."""
        self.note(f"{process.name} stopped for {seconds:.0f} s")
        self.counts["stops"] += 1
        process.stopped_until_ns = self.clock.monotonic_ns + round(seconds * 1e9)

    def is_stopped(self, kind: str) -> bool:
        """Return whether a process of that kind is stopped."""
        now_ns = self.clock.monotonic_ns
        return any(each.stopped_until_ns > now_ns for each in self.living if each.name.startswith(kind))

    def tick(self) -> None:
        """Move the clocks, let faults happen to processes, and let one of them run."""
        chance, clock = self.chance, self.clock
        clock.advance(chance.choice((0, 0.001, 0.02, 0.5)))
        if chance.random() < self.weather["wall"]:
            clock.wall_ns += chance.choice((-3600, -5, 5, 3600)) * 10**9
            self.counts["jumps of the wall clock"] += 1
        ready = [process for process in self.living if process.stopped_until_ns <= clock.monotonic_ns]
        if not ready:
            clock.advance(1)
            return
        weights = [ENGINE_TURNS if process.name.startswith("engine") else 1 for process in ready]
        (process,) = chance.choices(ready, weights)
        if chance.random() < self.weather["stop"]:
            self.stop(process, chance.choice((1, 8, 15, 40)))
            return
        if chance.random() < self.weather["kill"]:
            self.kill(process, "rest")
        self.run(process)

    def finish(self) -> None:
        """Let every process run to its end, without faults."""
        self.calm = True
        for process in self.living:
            while not process.ended:
                self.run(process)

    def abandon(self) -> None:
        """Kill every process, after a failure of the run."""
        self.calm = True
        for process in self.living:
            process.killed = True
            with contextlib.suppress(BaseException):
                while not process.ended:
                    process.resume()

    # --- seams ---

    def looked(self, process: Process | None) -> None:
        """Note that a process looks at what all processes share: a store, its locks, its words."""

    def random_bytes(self, count: int) -> bytes:
        return self.bytes_of.randbytes(count)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace clocks, random bytes, and the handles on stores that are opened in the block."""
        world = self
        self.bytes_of = random.Random(self.chance.random())

        class SimulatedCore(StoreCore):
            def __init__(self, environment: Any, path: str, readonly: bool, **options: Any) -> None:
                super().__init__(environment, path, readonly, **options)
                self.process = world.current
                real, process = self.transact, self.process
                if process is not None and not readonly:
                    self.transact = lambda pages, work, *rest: process.transact(real, pages, work, *rest)

            def view(self) -> Any:
                world.looked(self.process)
                return super().view()

            def word(self, index: int) -> int:
                world.looked(self.process)
                return super().word(index)

            @property
            def locks(self) -> Any:
                world.looked(self.process)
                if self.process is None:
                    return super().locks
                return Locks(world._locks.setdefault(id(self.environment), {}), self.process.pid)

        real_sync = BaseStore.sync

        def sync(store: BaseStore) -> None:
            process = world.current
            if process is None:
                real_sync(store)
            else:
                process.synced(lambda: real_sync(store))

        def reached(point: str) -> None:
            if world.current is not None:
                world.current.reached(point)

        wanted = [
            (base_store, "StoreCore", SimulatedCore),
            (BaseStore, "sync", sync),
            (os, "urandom", self.random_bytes),
        ]
        with self.clock.installed(), replaced(wanted):
            random.seed(self.chance.random())
            faults.watch(reached)
            try:
                yield
            finally:
                faults.disarm()
