"""One run: a world, its processes, faults for some hundred moments, then a calm end, and the judgement."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cues
from cues import testing

from .graphs import LATEST_S, Plan
from .processes import MAP_BYTES, engine, feeder, member, mover, seeker
from .world import World

MEMORY: Final = Path("/dev/shm")


@dataclass
class Result:
    """The result of one seed."""

    seed: int
    digest: str
    counts: Counter[str]
    problems: list[str]
    trace: list[str]
    killed_at: set[str]
    """The points at which a process was killed."""


def run(seed: int) -> Result:
    """Run one seed. The same seed makes the same decisions, and gives the same digest."""
    place = Path(tempfile.mkdtemp(prefix="cues-simulation-", dir=MEMORY if MEMORY.is_dir() else None))
    world = World(seed)
    problems: list[str] = []
    try:
        with world.installed():
            plan = Plan(world.chance, place)
            plan.target.world = world
            stores = [
                cues.open(path, durability=plan.durability, map_size=MAP_BYTES) for path in (plan.home, plan.away)
            ]
            try:
                _play(world, plan)
                problems += _judged(world, plan, *stores)
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")
            finally:
                world.abandon()
                for store in stores:
                    store.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    problems = [problem.replace(str(place), "…") for problem in problems]  # each run has another directory
    for problem in problems:
        world.note(f"problem: {problem}")
    return Result(seed, world.digest, world.counts, problems, world.trace, world.killed_at)


def _play(world: World, plan: Plan) -> None:
    chance = world.chance
    programs = {"feeder": feeder(plan), "member": member(plan), "mover": mover(plan), "seeker": seeker(plan)}
    wanted = {"engine": 1, "feeder": 1, "member": chance.randint(0, 3), "mover": chance.randint(0, 2)}
    seeks = chance.choice((0.0, 0.0, 0.02))
    for _ in range(chance.choice((60, 150, 400))):
        kinds = Counter(process.name.partition("-")[0] for process in world.living)
        for kind, count in wanted.items():
            if kind != "engine" and kinds[kind] < count and chance.random() < 0.2:
                world.start(kind, programs[kind])
        if not kinds["engine"]:
            world.start("engine", engine(plan, take_over=chance.random() < 0.3))
        elif kinds["engine"] < 3 and chance.random() < (0.04 if world.is_stopped("engine") else 0.005):
            world.start("engine", engine(plan, take_over=True))
        if chance.random() < seeks:
            world.start("seeker", programs["seeker"], atomic=True)
        world.tick()
    world.finish()


def _judged(world: World, plan: Plan, home: cues.Store, away: cues.Store) -> list[str]:
    """Finish what is left, without faults, and compare everything with the model."""
    for name, messages in plan.fed.items():
        if more := messages[home.queue(name).last_index :]:
            home.queue(name).appender().write_many(more)
    world.clock.wall_ns = max(world.clock.wall_ns, *(_latest(store) for store in (home, away)))
    for _ in range(1 + plan.waits):
        world.clock.advance(LATEST_S)
        testing.run_until_idle(plan.graph(), home)
    with contextlib.ExitStack() as stack:
        reader = cues.groups.Member(home, "jobs", "c")
        stack.callback(reader.leave)
        home.queue("done")
        for _ in range(1000):
            world.clock.advance(1)
            with reader.session() as session:
                messages = session.read_many(100)
                session.write_many("done", messages)
                session.end(cues.groups.TRY_COMMIT)
            if not messages and sum(reader.lag().values()) == 0 and len(reader.assigned) == 2:
                break
    home.queue("moved")
    with home.transaction() as transaction:
        tailer = transaction.tailer("moves", "mover")
        while (message := tailer.read()) is not None:
            transaction.write("moved", message)
    problems = plan.differences(home, away)
    return [*problems, *home.check(), *away.check(), *testing.check_attempts(home)]


def _latest(store: cues.Store) -> int:
    """The last append time of all queues: the wall clock may have been an hour ahead."""
    return max((row.time_ns for name in store.queues() for row in store.queue(name).core.rows()), default=0)
