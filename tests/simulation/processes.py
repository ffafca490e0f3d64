"""The programs of simulated processes. Each runs until it is killed, or stops by itself, or the run becomes calm."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from cues import groups
from cues.base import clock
from cues.engine.assembly import assemble
from cues.engine.threads import Worker
from cues.errors import AlreadyRunning, Fenced, ProcessorStopped, StoreDamaged, StoreError, TailerMoved
from cues.graphs.processor_rows import read_row, read_topology
from cues.queues.store import Store
from cues.steps import ownership
from cues.steps.feed import SourceStepper

from .graphs import Plan
from .world import Killed, Process

Program = Callable[[Process], None]
MAP_BYTES = 16 << 20


class Host:
    """The running graph, as its workers see it: see :class:`cues.engine.engine.Host`."""

    pulls = True

    def __init__(self, process: Process) -> None:
        self.process = process
        self.changes = threading.Condition()
        self.plan: Any = None
        self.emit: Callable[[Any], None] = lambda event: None
        self.keep_stop: Callable[[Any], None] = lambda event: None

    @property
    def halted(self) -> bool:
        return self.process.world.calm

    draining = halted

    def halt(self) -> None: ...
    def end_sources(self) -> None: ...
    def hurry(self) -> None: ...
    def changed(self) -> None: ...

    def may_linger(self) -> bool:
        return True

    def wait_for_disk(self) -> bool:
        return False

    def sleep(self, seconds: float) -> bool:
        self.process.world.clock.advance(seconds)
        return self.halted


class SimulatedWorker(Worker):
    """A worker without a thread for the generator of a source."""

    def pull(self) -> None: ...

    def turn(self) -> bool:
        stepper = self.stepper
        if isinstance(stepper, SourceStepper) and not self.finished:
            stepper.feed.pull(stepper.node.options.batch_size)
        return super().turn()


def failed_as_simulated(process: Process, error: BaseException) -> bool:
    """Return whether an error is one that the faults of the run explain: of a store, and never one of damage."""
    while isinstance(error, ProcessorStopped) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, Fenced):
        return True
    return process.failed > 0 and isinstance(error, (StoreError, OSError)) and not isinstance(error, StoreDamaged)


@contextlib.contextmanager
def expected(process: Process) -> Any:
    """Let a program end by an error that the faults explain."""
    try:
        yield
    except AlreadyRunning:
        process.world.counts["refused starts"] += 1
    except Exception as error:
        if not failed_as_simulated(process, error):
            raise
        process.world.note(f"{process.name} ended: {type(error).__name__}")
        while isinstance(error, ProcessorStopped) and error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        process.world.counts["fenced" if isinstance(error, Fenced) else "stopped by a fault"] += 1


def engine(plan: Plan, take_over: bool) -> Program:
    """Own the graph, and let its workers and forwarders have their turns in any order."""

    def run(process: Process) -> None:
        world = process.world
        host = Host(process)
        with expected(process), Store(plan.home, durability=plan.durability, map_size=MAP_BYTES) as store:
            if world.calm:
                return
            assembly = assemble(plan.graph(), store, take_over=take_over, sleep=host.sleep, may_linger=host.may_linger)
            if world.is_stopped("engine"):
                world.counts["takeovers from a stopped process"] += 1
            try:
                host.plan = assembly.plan
                workers: list[Any] = [SimulatedWorker(host, stepper) for stepper in assembly.steppers]
                beaten = clock.monotonic_ns()
                while not world.calm:
                    turn = world.chance.choice([*workers, *assembly.forwarders])
                    if isinstance(turn, Worker):
                        turn.turn()
                        process.check()
                        if turn.stopped is not None:
                            raise turn.stopped
                    else:
                        turn.step()
                    if clock.monotonic_ns() - beaten > ownership.LEASE_BEAT_S * 1e9:
                        beaten = clock.monotonic_ns()
                        assembly.ownership.beat()
                    if world.chance.random() < 0.3:
                        process.park("rest")
                    if world.chance.random() < 0.002:
                        break
            finally:
                assembly.close()
            world.counts["clean ends"] += 1

    return run


def feeder(plan: Plan) -> Program:
    """Append the messages that are not there yet, some at a time."""

    def run(process: Process) -> None:
        world = process.world
        with expected(process), Store(plan.home) as store:
            while not world.calm:
                for name, messages in plan.fed.items():
                    queue = store.queue(name)
                    if more := messages[queue.last_index :][: world.chance.randint(0, 6)]:
                        queue.appender().write_many(more)
                process.park("rest")

    return run


def member(plan: Plan) -> Program:
    """Read from the jobs of a group, and write what was read in the same commit."""

    def run(process: Process) -> None:
        world = process.world
        with expected(process), Store(plan.home) as store:
            store.queue("jobs", partitions=2, key="i")
            store.queue("done")
            reader = groups.Member(store, "jobs", "c", name=world.chance.choice((None, "m1", "m2")))
            try:
                while not world.calm:
                    with reader.session() as session:
                        messages = session.read_many(world.chance.randint(1, 4))
                        session.write_many("done", messages)
                        process.rest("session")
                        if world.chance.random() < 0.9:
                            session.end(groups.TRY_COMMIT)
                    if world.chance.random() < 0.01:
                        reader.close()
                        return
            finally:
                with contextlib.suppress(Killed):
                    if world.calm and not process.killed:
                        reader.leave()

    return run


def mover(plan: Plan) -> Program:
    """Move messages by transactions; several processes have a tailer of the same name."""

    def run(process: Process) -> None:
        world = process.world
        with expected(process), Store(plan.home) as store:
            store.queue("moves")
            store.queue("moved")
            while not world.calm:
                with contextlib.suppress(TailerMoved), store.transaction() as transaction:
                    tailer = transaction.tailer("moves", "mover")
                    for _ in range(world.chance.randint(1, 3)):
                        if (message := tailer.read()) is not None:
                            transaction.write("moved", message)
                    process.rest("transaction")
                    if world.chance.random() < 0.1:
                        transaction.abort()
                process.park("rest")

    return run


def seeker(plan: Plan) -> Program:
    """Move a processor to the position that it has: the step under way is fenced, and taken again."""

    def run(process: Process) -> None:
        with expected(process), Store(plan.home) as store:
            reads = {f"g.s{stage.number}": f"q{stage.number}" for stage in plan.stages}
            reads |= {"g.saver": plan.last, "g.jobber": plan.last}
            # The positions of readers of committed messages are not indices.
            name: Any = process.world.chance.choice([name for name, q in reads.items() if q not in plan.pending])
            with store.core.view() as txn:
                row, topology = read_row(txn, name), read_topology(txn, name)
            if row is not None and topology is not None:
                places = {tailer: position.next for tailer, position in zip(topology.tailers, row.positions)}
                ownership.seek(store, name, places)
                process.world.counts["seeks"] += 1

    return run
