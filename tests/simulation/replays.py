"""Counter-examples of the models in tests/models, replayed on the real code.

    python -m tests.simulation.replays < trails.json

A model with a protection removed (``-DNO_FENCE``) gives a counter-example: a list of actions, one a line. Most of them
are a process and a point of cues/faults.py, as ``A commit.after``: the process runs on to that point (steered.py). The
others are actions of the world, as ``feed``, or notes for readers.

Each counter-example is replayed twice, over new stores or a new directory. With the code as it is, the results must be
those of an undisturbed run. With the same protection removed (protections.py), the failure must happen.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import cues
from cues import Graph, QueueOptions, Stream, groups, testing
from cues.engine.assembly import assemble
from cues.errors import Fenced, ProcessorStopped
from cues.forwarding.forwarder import Forwarder
from cues.queues.store import Store
from cues.steps import ownership

from .interleavings import turned
from .processes import MAP_BYTES, Host, SimulatedWorker
from .protections import removed
from .run import MEMORY
from .steered import STOPPED_S, SteeredProcess, SteeredWorld
from .world import Process, replaced

REST: Final = "rest"
"""A point of the programs below: there is nothing to do now."""


class Replay(SteeredWorld):
    """A world in which a counter-example is replayed; a subclass for each model."""

    messages = 2

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place
        self.home = str(place / "home")
        self.refused: list[str] = []
        """The processes whose commit was refused, and the reasons."""
        self.names: dict[str, SteeredProcess] = {}
        self.left = [{"i": i} for i in range(self.messages)]
        """Messages that were not fed yet."""

    # --- for the subclasses ---

    def program(self, process: Process) -> None:
        """The program of each process."""
        raise NotImplementedError

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open and fill what the processes work on."""
        with cues.open(self.home, map_size=MAP_BYTES) as self.store:
            self.store.queue("q0")
            self.begin_with()
            yield

    def begin_with(self) -> None:
        while self.left:
            self.feed()

    def finish_all(self) -> None:
        """Make what is left, without faults."""

    def problems(self) -> list[str]:
        """Compare the results with those of an undisturbed run."""
        raise NotImplementedError

    # --- actions of the world ---

    def feed(self) -> None:
        self.store.queue("q0").appender().write(self.left.pop(0))

    def act(self, what: str, argument: int) -> None:
        if what == "feed":
            self.feed()

    # --- the replay ---

    def replay(self, actions: list[str]) -> list[str]:
        """Follow the actions, finish, and return the problems."""
        for action in actions:
            who, _, what = action.partition(" ")
            if who in ("Z", "FAILS"):  # Z is the last process of a model: finish_all
                break
            if len(who) > 1:
                self.act(who, int(what or 0))
            elif what == "stopped":
                self.clock.advance(STOPPED_S)
            elif what == "killed":
                self.kill(self.names[who], "its point")
                self.run(self.names[who])
            elif "." in what or what == "opens":
                self.until(who, what)
        self.finish()
        self.finish_all()
        return self.problems()

    def until(self, who: str, point: str) -> None:
        """Let a process run to its next arrival at a point, to a rest, or to its end."""
        if who not in self.names:
            started = self.begin(who, self.program)
            assert isinstance(started, SteeredProcess)
            self.names[who] = started
        process = self.names[who]
        while not process.ended:
            self.run(process)
            if process.point in (point, REST):
                break

    @contextlib.contextmanager
    def fenced(self, process: Process) -> Iterator[None]:
        try:
            yield
        except (Fenced, ProcessorStopped) as error:
            cause = error.__cause__ or error
            if not isinstance(cause, Fenced):
                raise
            self.refused.append(f"{process.name}: {cause.reason}")


class EngineReplay(Replay):
    """One graph, which a process owns and steps until there is nothing to do."""

    def graph(self) -> Graph:
        raise NotImplementedError

    def program(self, process: Process) -> None:
        host = Host(process)
        with self.fenced(process), Store(self.home, map_size=MAP_BYTES) as store:
            assembly = assemble(self.graph(), store, take_over=True, sleep=host.sleep, may_linger=host.may_linger)
            try:
                host.plan = assembly.plan
                workers = [SimulatedWorker(host, stepper) for stepper in assembly.steppers]
                while not self.calm:
                    if not sum(turned(process, worker) for worker in workers):
                        assert isinstance(process, SteeredProcess)
                        process.reached(REST)
            finally:
                assembly.close()

    def finish_all(self) -> None:
        self.begin_with()
        testing.run_until_idle(self.graph(), self.store)


class Delivery(EngineReplay):
    """A batch function with side effects. Its target ignores a hash that it has had."""

    messages = 3

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.given: dict[int, set[str]] = {}
        """The hashes under which each message was given to the function."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with cues.open(self.home, map_size=MAP_BYTES) as self.store:
            self.store.queue("q0")
            yield

    def graph(self) -> Graph:
        def send(messages: list[dict[str, int]], process: Any) -> list[dict[str, int]]:
            for message in messages:
                self.given.setdefault(message["i"], set()).add(process.delivery.hash)
            return messages

        return Graph("g", [Stream(send, "q0", "q1", id="a", batch=True, batch_size=2, side_effects=True)])

    def problems(self) -> list[str]:
        wanted = [{"i": i} for i in range(self.messages)]
        history = testing.check_history(wanted, testing.messages(self.store, "q1"), ordered=True)
        found = [] if history.exact else [f"exactly_once: {history}"]
        return found + [f"one_hash: {i} has {len(all)}" for i, all in self.given.items() if len(all) > 1]


class Owned(EngineReplay):
    """A function that counts in its state, and a seek that resets it."""

    sought = 0
    kept = 0
    """The messages on q1 before the seek."""

    def graph(self) -> Graph:
        def count(message: dict[str, int], process: Any) -> dict[str, int]:
            process.state["n"] = process.state.get("n", 0) + 1
            return {**message, "n": process.state["n"]}

        return Graph("g", [Stream(count, "q0", "q1", id="a", batch_size=1)])

    def act(self, what: str, argument: int) -> None:
        if what == "seek":
            ownership.seek(self.store, "g.a", {"g.a.q0": argument + 1}, reset_state=True)
            self.sought, self.kept = argument, self.store.queue("q1").last_index

    def problems(self) -> list[str]:
        there = testing.messages(self.store, "q1")[self.kept :]
        wanted = [{"i": i} for i in range(self.sought, self.messages)]
        history = testing.check_history(wanted, [{"i": message["i"]} for message in there], ordered=True)
        found = [] if history.exact else [f"exactly_once: {history}"]
        if there and there[-1]["n"] != len(wanted):
            found.append(f"state_of_now: {there[-1]['n']} instead of {len(wanted)}")
        return found


class Handover(Replay):
    """Members of a group, which copy messages in sessions."""

    kept = 0

    def begin_with(self) -> None:
        super().begin_with()
        self.store.queue("q1")

    def program(self, process: Process) -> None:
        assert isinstance(process, SteeredProcess)
        with Store(self.home, map_size=MAP_BYTES) as store:
            member = groups.Member(store, "q0", "c")
            while not self.calm:
                with member.session() as session:
                    messages = session.read_many(1)
                    session.write_many("q1", messages)
                    ended = session.end(groups.TRY_COMMIT)
                if not ended.committed:
                    self.refused.append(f"{process.name}: {ended.reason}")
                if not messages:
                    process.reached(REST)
            if not process.killed:
                member.leave()

    def act(self, what: str, argument: int) -> None:
        if what == "seek":
            groups.seek(self.store, "c", argument + 1)
            self.kept = self.store.queue("q1").last_index

    def finish_all(self) -> None:
        member = groups.Member(self.store, "q0", "c")
        for _ in range(10):
            self.clock.advance(1)
            with member.session() as session:
                session.write_many("q1", session.read_many(10))
                session.end(groups.TRY_COMMIT)
        member.leave()

    def problems(self) -> list[str]:
        there = testing.messages(self.store, "q1")[self.kept :]
        history = testing.check_history([{"i": i} for i in range(self.messages)], there, ordered=True)
        return [] if history.exact else [f"exactly_once: {history}"]


class Forwarding(Replay):
    """Forwarders of one fork queue. The steps are made by the world."""

    def graph(self) -> Graph:
        queues = {"q1": QueueOptions(path=str(self.place / "away"))}
        return Graph("g", [Stream(lambda message: message, "q0", "q1", id="a", batch_size=1)], queues=queues)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with (
            cues.open(self.home, map_size=MAP_BYTES) as self.store,
            cues.open(str(self.place / "away"), map_size=MAP_BYTES) as self.away,
        ):
            self.store.queue("q0")
            self.assembly = assemble(self.graph(), self.store)
            try:
                yield
            finally:
                self.assembly.close()

    def act(self, what: str, argument: int) -> None:
        if what == "step":
            self.feed()
            self.assembly.steppers[0].step()

    def program(self, process: Process) -> None:
        assert isinstance(process, SteeredProcess)
        with Store(self.home, map_size=MAP_BYTES) as store, Store(self.away.path, map_size=MAP_BYTES) as away:
            forwarder = Forwarder(store, away, ["g.a"])
            forwarder.compare()
            process.reached("claim.after")
            while not self.calm:
                before = forwarder.forwarded
                if forwarder.step() and forwarder.forwarded == before:
                    self.refused.append(f"{process.name}: overtaken")
                elif forwarder.forwarded == before:
                    process.reached(REST)

    def finish_all(self) -> None:
        while self.left:
            self.act("step", 0)
        while self.assembly.forwarders[0].step():
            pass

    def problems(self) -> list[str]:
        wanted = [{"i": i} for i in range(self.messages)]
        history = testing.check_history(wanted, testing.messages(self.away, "q1"), ordered=True)
        return [] if history.exact else [f"exactly_once: {history}"]


class Shared(Replay):
    """Drivers of a graph on a shared directory, without Spark."""

    messages = 3

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        sys.path.append(str(Path(__file__).parents[1]))  # the modules of the tests import each other by name
        import directory_steps

        from cues.spark.cluster import ledger

        self.drivers = directory_steps
        self.files = directory_steps.FaultyFiles(str(self.place / "queues"))
        self.driver().feed("q0", self.left)
        # Only the newest record stays.
        with replaced([(ledger, "KEEP_RECORDS", 0), (ledger, "_TRIM_EVERY", 0)]):
            yield

    def driver(self) -> Any:
        graph = Graph("g", [Stream(lambda message: message, "q0", "q1", id="a")])
        return self.drivers.DriverRun(self.files, graph, size=lambda: 1)

    def program(self, process: Process) -> None:
        assert isinstance(process, SteeredProcess)
        with self.fenced(process):
            driver = self.driver()
            process.reached("opens")
            driver.claim()
            process.reached("claim.after")
            driver.run()

    def finish_all(self) -> None:
        self.driver().claim().run()

    def problems(self) -> list[str]:
        try:
            there = self.driver().messages("q1")
        except Exception as error:
            return [f"exactly_once: {type(error).__name__}: {error}"]
        history = testing.check_history([{"i": i} for i in range(self.messages)], there, ordered=True)
        return [] if history.exact else [f"exactly_once: {history}"]


REPLAYS: Final[dict[str, Callable[[Path], Replay]]] = {
    "delivery": Delivery,
    "ownership": Owned,
    "handover": Handover,
    "forwarding": Forwarding,
    "shared": Shared,
}
"""By the name of the model."""


def replayed(model: str, actions: list[str], without: str | None) -> dict[str, Any]:
    """Replay a counter-example; returns the problems, and the processes that were refused."""
    place = Path(tempfile.mkdtemp(prefix="cues-replay-", dir=MEMORY if MEMORY.is_dir() else None))
    world = REPLAYS[model](place)
    try:
        with world.installed(), removed(without):
            try:
                with world.opened():
                    try:
                        problems = world.replay(actions)
                    finally:
                        world.abandon()
            except Exception as error:
                problems = [f"{type(error).__name__}: {error}"]
        return {"problems": problems, "refused": world.refused, "trace": world.trace}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main() -> int:
    """Read a list of (model, protection, actions), and write the results of both replays of each."""
    given = json.load(sys.stdin)
    results = [
        {"as it is": replayed(model, actions, None), "without": replayed(model, actions, protection)}
        for model, protection, actions in given
    ]
    json.dump(results, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
