"""All interleavings of two processes that run one graph of two steps: q0 ─▶ a ─▶ q1 ─▶ b ─▶ q2.

    python -m tests.simulation.interleavings                    every kind of graph, with the bounds below
    python -m tests.simulation.interleavings --kind plain --kills 0

At every point of the code (cues/faults.py) every move is tried (steered.py): each process runs on, or is killed; a
process is started, and takes over from one that is stopped, which may continue at any later point. The search is by
depth: a run follows a list of choices, and then takes the first choice everywhere. The next run changes the last choice
that has an alternative.

Two runs that are in the same state have the same continuations, so the second of them ends there
(:attr:`SteeredWorld.state`). At the end of each other run a last start finishes what is left; then queues, the state of
``b``, the hashes of all steps and the store itself are judged.

Bounds: the numbers of messages, of processes and of kills. Nobody is stopped inside of a transaction.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import cues
from cues import Graph, Stream, testing
from cues.engine.assembly import assemble
from cues.queues.store import Store

from .processes import MAP_BYTES, Host, SimulatedWorker, expected
from .protections import REMOVALS, removed
from .run import MEMORY
from .steered import SteeredWorld
from .world import Process

KINDS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "disk": {"durability": "disk"},
    "side effects": {"options": {"side_effects": True}},
    "two stores": {"abroad": "q1"},
}
"""The kinds of graphs: options of both processors, and the queue that is in another store."""


class World(SteeredWorld):
    """A graph and its stores, and the moves that are allowed."""

    def __init__(
        self,
        place: Path,
        durability: Any = "process",
        options: dict[str, Any] | None = None,
        abroad: str = "",
        messages: int = 1,
        starts: int = 2,
        kills: int = 1,
    ) -> None:
        super().__init__()
        self.paths = {"home": str(place / "home"), "away": str(place / "away")}
        self.durability = durability
        self.options = {"batch_size": 1, **(options or {})}
        self.abroad = abroad
        self.messages = [{"i": i} for i in range(messages)]
        self.starts = starts
        self.kills = kills

    def graph(self) -> Graph:
        def first(message: dict[str, int]) -> dict[str, int]:
            return {**message, "a": message["i"] + 1}

        def second(message: dict[str, int], process: Any) -> dict[str, int]:
            process.state["sum"] = process.state.get("sum", 0) + message["a"]
            return {**message, "sum": process.state["sum"]}

        steps = [Stream(first, "q0", "q1", id="a", **self.options), Stream(second, "q1", "q2", id="b", **self.options)]
        queues = {self.abroad: {"path": self.paths["away"]}} if self.abroad else {}
        return Graph("g", steps, queues=queues, durability=self.durability)

    @contextlib.contextmanager
    def stores(self) -> Iterator[dict[str, cues.Store]]:
        with contextlib.ExitStack() as stack:
            yield {
                name: stack.enter_context(cues.open(path, durability=self.durability, map_size=MAP_BYTES))
                for name, path in self.paths.items()
                if name == "home" or self.abroad
            }

    def engine(self, process: Process) -> None:
        """Own the graph, and make its steps until there is nothing to do."""
        host = Host(process)
        with expected(process), Store(self.paths["home"], durability=self.durability, map_size=MAP_BYTES) as store:
            assembly = assemble(self.graph(), store, take_over=True, sleep=host.sleep, may_linger=host.may_linger)
            try:
                host.plan = assembly.plan
                workers = [SimulatedWorker(host, stepper) for stepper in assembly.steppers]
                turns = [functools.partial(turned, process, worker) for worker in workers]
                turns += [forwarder.step for forwarder in assembly.forwarders]
                while sum(turn() for turn in turns):
                    pass
            finally:
                assembly.close()

    # --- moves ---

    def moves(self) -> list[tuple[str, Process | None]]:
        """All moves that are possible now. The first one lets the process run on that ran last."""
        ready = sorted(self.living, key=lambda process: process is not self.last)
        if self.writing:
            ready = ready[:1]
        found: list[tuple[str, Process | None]] = [("run", process) for process in ready]
        if self.counts["kills"] < self.kills:
            found += [("kill", process) for process in ready]
        if not self.writing and len(self.started) < self.starts and len(ready) < 2:
            found.append(("start", None))
        return found

    def move(self, what: str, process: Process | None) -> None:
        if what == "start":
            process = self.begin("engine", self.engine)
        assert process is not None
        if what == "kill":
            self.kill(process, "its point")
        self.run(process)

    def problems(self, stores: dict[str, cues.Store]) -> list[str]:
        """Finish everything, and compare it with the model."""
        home = stores["home"]
        testing.run_until_idle(self.graph(), home)
        sums = [sum(range(1, n + 2)) for n in range(len(self.messages))]
        middle = [{**message, "a": message["i"] + 1} for message in self.messages]
        wanted = {"q1": middle, "q2": [{**message, "sum": all} for message, all in zip(middle, sums)]}
        found = []
        for name, messages in wanted.items():
            there = testing.messages(stores["away" if name == self.abroad else "home"], name)
            history = testing.check_history(messages, there, ordered=True)
            found += [] if history.exact else [f"{name}: {history}"]
        return [*found, *(each for store in stores.values() for each in store.check()), *testing.check_attempts(home)]


def turned(process: Process, worker: SimulatedWorker) -> bool:
    moved = worker.turn()
    process.check()
    if worker.stopped is not None:
        raise worker.stopped
    return moved


@dataclass
class Explored:
    """The results of a search."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    """The moves of the first run with problems."""


def explore(make: Callable[[Path], World], most: int | None = None, first: bool = True) -> Explored:
    """Make all runs, or the ``most`` first ones. ``first``: end after the first run with problems."""
    found, seen, choices = Explored(), set[bytes](), list[tuple[int, int]]()
    while most is None or found.counts["executions"] < most:
        choices = _run(make, [choice for choice, _ in choices], seen, found)
        if found.problems and first:
            break
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            found.counts["complete"] = 1
            break
        choices[-1] = (choices[-1][0] + 1, choices[-1][1])
    found.counts["states"] = len(seen)
    return found


def _run(make: Callable[[Path], World], prefix: list[int], seen: set[bytes], found: Explored) -> list[tuple[int, int]]:
    """Make one run: the choices of ``prefix``, then the first choice everywhere.

    Returns all its choices, each with the number of moves that were possible.
    """
    place = Path(tempfile.mkdtemp(prefix="cues-interleavings-", dir=MEMORY if MEMORY.is_dir() else None))
    world = make(place)
    chosen: list[tuple[int, int]] = []
    found.counts["executions"] += 1
    try:
        with world.installed(), world.stores() as stores:
            try:
                stores["home"].queue("q0").appender().write_many(world.messages)
                while True:
                    moves, at = world.moves(), len(chosen)
                    if at >= len(prefix) and len(moves) != 1:
                        if (state := world.state) in seen:
                            found.counts["ended in a known state"] += 1
                            return chosen
                        seen.add(state)
                    if not moves:
                        break
                    choice = prefix[at] if at < len(prefix) else 0
                    chosen.append((choice, len(moves)))
                    found.counts["moves"] += 1
                    world.move(*moves[choice])
                world.calm = True
                problems = world.problems(stores)
            except Exception as error:
                problems = [f"{type(error).__name__}: {error}"]
            finally:
                world.abandon()
        found.counts["judged"] += 1
        found.counts["kills"] += world.counts["kills"]
        if problems:
            found.problems += problems
            found.trace = found.trace or world.trace
        return chosen
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.interleavings", description=__doc__)
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="a kind of graph (all)")
    parser.add_argument("--messages", type=int, default=1, help="messages on q0 (1)")
    parser.add_argument("--starts", type=int, default=2, help="processes that are started (2)")
    parser.add_argument("--kills", type=int, default=1, help="processes that are killed (1)")
    parser.add_argument("--without", choices=list(REMOVALS), help="remove a protection of the code")
    parser.add_argument("--most", type=int, help="end each search after so many executions")
    given = parser.parse_args()
    for kind in given.kind or KINDS:
        began = time.monotonic()
        options: dict[str, Any] = {"messages": given.messages, "starts": given.starts, "kills": given.kills}
        with removed(given.without):
            found = explore(lambda place: World(place, **KINDS[kind], **options), given.most)
        counts = ", ".join(f"{count} {what}" for what, count in found.counts.items())
        print(f"{kind}: {len(found.problems)} problems, {counts}, {time.monotonic() - began:.0f} s", flush=True)
        if found.problems:
            print(*found.trace, *found.problems, sep="\n")
            return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
