"""Processes that run from point to point, each move decided by the caller.

A move is one of three:

    run     let a process run to its next point (cues/faults.py), or to its end
    kill    end it at the point where it is, also inside of a transaction, which is then rolled back
    start   begin a process; every other one was stopped for longer than its lease, so the new one may take over

A process that is not moved is stopped. Inside of a transaction only the process that has it can be moved.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, Final

from .world import Process, World

STOPPED_S: Final = 15
"""Longer than a lease."""


class SteeredProcess(Process):
    """A process that hands over at every point, and fails nowhere by itself."""

    world: SteeredWorld

    def __init__(self, *given: Any) -> None:
        self.point = ""
        """The point where it is."""
        self.seen = b""
        """A hash of its points, and of what it could see of the others on its way."""
        super().__init__(*given)

    def reached(self, point: str) -> None:
        self.check()
        if not self.world.calm:
            self.point = point
            self.seen = _hashed(self.seen, point)
            self.park(point)

    def rest(self, where: str, rare: float = 10) -> None: ...

    def transact(self, real: Callable[..., Any], pages: int, work: Callable[..., Any], *arguments: Any) -> Any:
        self.check()
        world = self.world

        def worked(txn: Any, *arguments: Any) -> Any:
            world.looked(self)
            world.writing = True
            return work(txn, *arguments)

        try:
            result = real(pages, worked, *arguments)
        finally:
            world.writing = False
        world.version = _hashed(world.version, self.seen)
        return result

    def synced(self, real: Callable[[], None]) -> None:
        self.check()
        real()


class SteeredWorld(World):
    """A world without chance. All processes together are one thread."""

    processes = SteeredProcess

    def __init__(self) -> None:
        super().__init__(0)
        self.version = b""
        """A hash of all commits so far, in their order."""
        self.last: Process | None = None
        """The process that ran last."""

    def looked(self, process: Process | None) -> None:
        if isinstance(process, SteeredProcess):
            process.seen = _hashed(process.seen, self.shared)

    @property
    def shared(self) -> tuple[Any, ...]:
        """All that processes can see of each other."""
        return self.version, self.clock.monotonic_ns, [sorted(held.items()) for held in self._locks.values()]

    @property
    def state(self) -> bytes:
        """A hash of the present state: if it is equal in two runs, the same moves lead to the same results.

        A process is determined by its points and by the commits, locks and clocks that it could see whenever it looked.
        """
        living = [(process.pid, process.seen) for process in self.living if isinstance(process, SteeredProcess)]
        turn = self.last.pid if self.writing and self.last is not None else 0
        return _hashed(self.shared, living, turn, len(self.started), self.counts["kills"])

    def random_bytes(self, count: int) -> bytes:
        """Bytes that do not depend on the turns of the other processes."""
        process = self.current
        if process is None:
            return super().random_bytes(count)
        chance = self._chances.setdefault(process.pid, random.Random(process.pid))
        return chance.randbytes(count)

    @property
    def _chances(self) -> dict[int, random.Random]:
        return self.__dict__.setdefault("_chances_of", {})  # type: ignore[no-any-return]

    def begin(self, name: str, program: Callable[[Process], None]) -> Process:
        """Start a process, after all others have been stopped for longer than their leases."""
        if self.living:
            self.clock.advance(STOPPED_S)
        return self.start(name, program)

    def run(self, process: Process) -> None:
        self.last = process
        super().run(process)


def _hashed(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).digest()
