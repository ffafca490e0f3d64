"""A graph whose queues are on a shared filesystem.

    graph.start(engine="spark", queues="s3://bucket/flights")

    sources     as on the embedded engine, in this process, into the store of this machine
    feeders     a thread for the queue of each source: copies it from the store into the directory
    stages      a thread for each stream and sink: take, run on executors, commit
    inlets      a thread for each source that is a Spark stream
    keeper      a thread that merges small files and removes old ones

The store of this machine holds the queues and positions of the sources, and nothing else. A driver that starts
elsewhere without this store is refused if the directory was fed from it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from cues import faults
from cues.base import events, names
from cues.engine import record
from cues.engine.engine import Host
from cues.engine.local import EmbeddedEngine, join
from cues.engine.status import QueueProgress, Shared, UnitStatus, sources_ended
from cues.engine.threads import WorkLoop
from cues.errors import Closed, CuesError, GraphError, InvalidArgument, Unsupported
from cues.graphs.declaration import Processor, Source
from cues.graphs.graph import Graph
from cues.graphs.plan import build
from cues.graphs.processor import FRAME, Node
from cues.spark.cluster.data import messages, pieces_of
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.driver import Driver
from cues.spark.cluster.feeder import Feeder
from cues.spark.cluster.files import folder_of, open_files
from cues.spark.cluster.frames import FrameStage
from cues.spark.cluster.ingest import StreamIngest
from cues.spark.cluster.lease import DriverLease
from cues.spark.cluster.maintenance import Maintenance, keepers_group, sweep
from cues.spark.cluster.step import Stage
from cues.spark.session import in_short
from cues.spark.shipping import open_session
from cues.spark.source import Source as Stream
from cues.steps.ownership import LEASE_BEAT_S
from cues.steps.runner import Interrupted
from cues.storage import wakeup

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cues.graphs.plan import Plan
    from cues.queues.queue import Queue
    from cues.queues.store import Store

_FENCE_S = 1.0
"""Time between two checks that an idle stage still owns its processor."""
FEED_GAP_S = 0.05
"""Least time between two copies of a feeder. The messages that a source yields meanwhile are one step, not ten."""
_KEEP_AGAIN_S = 60.0
"""Wait of the keeper after a failure."""
_KEEP_S = 1.0
"""Time between two looks of the keeper for new files."""
_LOOK_S = 0.5
"""Time between two looks for source queues that have got partitions."""


class _Turns(WorkLoop):
    """The thread of one part of the engine. It sleeps after a turn in which there was nothing to do."""

    def __init__(self, host: Host, driver: Driver, id: str) -> None:
        super().__init__(host, id)
        self.driver = driver
        self.busy = False

    def turn(self) -> None:
        self.busy = True
        if not self.step():
            self.busy = False
            self.running.changed()
            self.sleep()

    def step(self) -> bool:
        """Work, and return True; False if there was nothing to do."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Return when there may be something to do."""

    def ready(self) -> bool:
        """Return True if a step would find something to do."""
        return False

    def idle(self) -> bool:
        return self.finished or not (self.busy or self.ready())


class _StageThread(_Turns):
    def __init__(self, host: Host, driver: Driver, stage: Stage) -> None:
        super().__init__(host, driver, stage.node.id)
        self.stage = stage
        self.counters = stage.counters
        self._rings = 0

    def step(self) -> bool:
        self._rings = self.driver.rings
        return self.stage.step()

    def ready(self) -> bool:
        return self.stage.ready()

    def sleep(self) -> None:
        with self.driver.bell:
            self.driver.bell.wait_for(lambda: self.driver.rings != self._rings or self.running.halted, _FENCE_S)


class _InletThread(_Turns):
    """The thread of a source that is a Spark stream."""

    def __init__(self, host: Host, driver: Driver, inlet: StreamIngest) -> None:
        super().__init__(host, driver, inlet.node.id)
        self.counters = inlet.counters
        self._inlet = inlet

    def step(self) -> bool:
        self._inlet.run(lambda: self.running.draining)
        self.driver.ring()
        raise Interrupted  # the stream has ended

    def idle(self) -> bool:
        return self.finished or self._inlet.idle()


class _FeederThread(_Turns):
    def __init__(self, host: Host, driver: Driver, feeder: Feeder) -> None:
        super().__init__(host, driver, feeder.ledger.processor)
        self.feeder = feeder

    def step(self) -> bool:
        return self.feeder.step()

    def ready(self) -> bool:
        return self.feeder.ready()

    def sleep(self) -> None:
        self.running.pause(FEED_GAP_S)
        log = self.feeder.queue._log
        wakeup.wait([(log.store._doorbells, log.mask)], lambda: self.running.halted or self.ready(), None)


class _KeeperThread(_Turns):
    """The thread that merges and removes files."""

    def __init__(self, host: Host, driver: Driver, stages: Sequence[Stage]) -> None:
        super().__init__(host, driver, f"{host.plan.id} keeper")
        self._maintenance = Maintenance(driver, stages)

    def step(self) -> bool:
        try:
            self._maintenance.step()
        except CuesError:
            raise
        except Exception as error:  # the next look finds the same files
            if not self.running.halted:
                text = f"small files and old ones stay for now: {in_short(error)}"
                self.running.emit(events.Event(self.running.plan.id, text, logging.WARNING))
                self.running.pause(_KEEP_AGAIN_S)
        return False

    def sleep(self) -> None:
        self.running.pause(_KEEP_S)


class _SharedQueues:
    """The queues in the directory, for :class:`Running` and the command line."""

    def __init__(self, driver: Driver, stages: Sequence[Stage], home: set[str]) -> None:
        self.place = driver.files.url
        self._driver = driver
        self._stages = stages
        self._home = home
        self.before = self.now()

    def now(self) -> QueueProgress:
        queues = self._driver.queues.values()
        return QueueProgress(
            {directory.queue: directory.next - 1 for directory in queues},
            {directory.queue: sum(file.count for file in directory.live) for directory in queues},
            {
                names.tailer_id(stage.node.id, queue): position
                for stage in self._stages
                for queue, position in stage.positions.items()
            },
        )

    def lag(self, processor: str) -> int:
        for stage in self._stages:
            if stage.node.id == processor:
                ends = {directory.queue: directory.next for directory in stage.inputs.values()}
                return sum(ends[queue] - position for queue, position in stage.positions.items())
        return 0

    def messages(self, queue: str) -> list[dict[str, Any]] | None:
        directory = self._driver.queues.get(queue)
        if directory is None or queue in self._home:
            return None
        pieces = pieces_of(directory.folder, directory.live, directory.first, directory.next)
        return [message for *_, message in messages(self._driver.files, pieces)]

    def check_send(self, queue: str) -> None:
        if queue in self._driver.queues and queue not in self._home:
            raise InvalidArgument(
                f"The queue {queue!r} is in {self.place}, and the graph's processors write it;"
                " messages can be sent only to queues in the store of this machine.",
                f"send to one of {', '.join(sorted(self._home))}.",
            )


class ClusterEngine:
    """Stages over a shared directory, and the sources in this process. An :class:`Engine`."""

    pulls: bool = True
    shared: Shared | None = None
    over = False
    """A processor that stopped does not keep the others from finishing the messages on the queues."""

    def __init__(
        self,
        graph: Graph,
        queues: str | os.PathLike[str],
        spark: SparkSession | None,
        master: str | None,
        *,
        store: str | os.PathLike[str] | Store | None,
        accept_topology: bool,
        take_over: bool,
    ) -> None:
        self._graph = graph
        self._place = queues
        self._given, self._master = spark, master
        self.plan = graph.plan()
        self._options: dict[str, Any] = {"store": store, "accept_topology": accept_topology, "take_over": take_over}
        self._stages: list[_StageThread] = []
        self._inlets: list[_InletThread] = []
        self._copiers: list[_FeederThread] = []
        self._opened = contextlib.ExitStack()
        """The session, and what depends on it."""
        self._threads: list[threading.Thread] = []

    # --- starting ---

    def start(self, host: Host) -> None:
        """Own the directory and the processors, and start the threads."""
        graph, plan = self._graph, self.plan
        check(plan)
        self._host = host
        self.sources = EmbeddedEngine(source_graph(graph, plan), **self._options)
        place = os.fspath(self._place)
        open_files(place, make=False)  # before Spark starts: the place may be wrong
        try:
            remote = [node for node in plan.running if node.kind != "source"]
            self.spark = open_session(self._opened, graph, plan, self._given, self._master, remote)
            _refuse_speculation(self.spark, plan)
            files = open_files(place)
            self.driver = Driver(self.spark, files, graph.id, plan.system, host.emit, host.pause)
            self._lease = DriverLease(files, graph.id, self.driver.owner)
            self._lease.acquire(self._options["take_over"])
            self._opened.callback(self._lease.release)
            self.sources.start(host)
        except BaseException:
            self._opened.close()
            raise
        try:
            self._open_stages()
        except BaseException:
            host.halt()
            self.join(30.0)
            self.close()
            raise
        address = self.spark.sparkContext.uiWebUrl
        text = f"{graph.id} runs on Spark {self.spark.version}, its queues in {files.url}"
        host.emit(events.Event("", text + (f": {address}" if address else "")))

    def _open_stages(self) -> None:
        """Open the queues, claim every processor, sweep, and start the threads."""
        driver, plan, host = self.driver, self.plan, self._host
        home, written = at_home(plan), written_on_spark(plan)
        errors = {node.errors for node in plan.running if _runs_here(node)}
        fed = [name for name in self.queues if name in home or name in errors]
        for name in fed:
            _require_one_log(name, self.queues[name].partitions)  # the store decides, and not the graph
        for name, options in plan.queues.items():
            same = name in fed and name not in written
            identity = self.queues[name]._row().identity if same else None
            driver.queues[name] = QueueDirectory(driver.files, name, options, identity)
        for directory in driver.queues.values():  # none changes before all are checked
            directory.own(plan.id)
        feeders = [Feeder(driver, self.queues[name], driver.queues[name], name not in written) for name in fed]
        inlets = [StreamIngest(driver, node) for node in plan.running if isinstance(node.fn, Stream)]
        stages = [
            (FrameStage if node.options.batch == FRAME else Stage)(driver, node)
            for node in plan.running
            if node.kind != "source"
        ]
        parts: list[Feeder | StreamIngest | Stage] = [*feeders, *inlets, *stages]
        driver.forward_removed({part.ledger.processor for part in parts})
        for feeder in feeders:
            feeder.claim()
        for stage in stages:
            stage.claim(self._options["accept_topology"])
        for inlet in inlets:
            inlet.claim()
        for directory in driver.queues.values():
            directory.load()  # from here on only this driver changes it
        faults.point("spark.claimed")
        sweep(driver, stages)
        self.shared = _SharedQueues(driver, stages, home)
        with contextlib.suppress(Exception):  # the notes are for cues status, and nothing depends on them
            record.note_queues(self.store.directory, plan.id, driver.files.url)
            feeder_store = {"store": self.store.directory, "host": socket.gethostname()}
            driver.files.write(f"_cues/{folder_of(plan.id)}.store.json", json.dumps(feeder_store).encode())
        self._stages = [_StageThread(host, driver, stage) for stage in stages]
        self._inlets = [_InletThread(host, driver, inlet) for inlet in inlets]
        self._copiers = [_FeederThread(host, driver, feeder) for feeder in feeders]
        loops = [*self._inlets, *self._stages, *self._copiers, _KeeperThread(host, driver, stages)]
        lease = threading.Thread(target=self._beat, name="cues lease on the directory", daemon=True)
        growth = threading.Thread(target=self._look_for_growth, name="cues growth", daemon=True)
        self._threads = [*(loop.thread for loop in loops), growth]
        for thread in (*self._threads, lease):
            thread.start()

    @property
    def store(self) -> Store:
        return self.sources.store

    @property
    def queues(self) -> dict[str, Queue]:
        return self.sources.queues

    @property
    def pids(self) -> dict[str, int]:
        return {}

    # --- the work that is left ---

    def standings(self) -> list[UnitStatus]:
        units = self.sources.standings()
        units += [UnitStatus(loop.id, loop.id, loop.counters, _state(loop)) for loop in self._inlets]
        return units + [UnitStatus(loop.id, loop.id, loop.counters, _state(loop)) for loop in self._stages]

    @property
    def stopped(self) -> list[BaseException]:
        """The errors that stopped processors and feeders. Messages that are not copied are never processed."""
        loops = [*self._inlets, *self._stages, *self._copiers]
        return self.sources.stopped + [loop.stopped for loop in loops if loop.stopped is not None]

    def idle(self) -> bool:
        # In the direction of the messages: a message that leaves one part is seen in the next one, or counted.
        before = self._progress()
        idle = self.sources.idle() and all(loop.idle() for loop in (*self._copiers, *self._inlets, *self._stages))
        return idle and not self._grown() and before == self._progress()

    def _progress(self) -> list[Any]:
        """Values that change with each step that begins or ends."""
        steps = [unit.counters.steps for unit in self.standings()]
        return [self.driver.rings, steps, [loop.busy for loop in (*self._copiers, *self._stages)]]

    def resting(self) -> bool:
        return self.idle()

    def done(self) -> bool:
        if self.stopped:
            return True
        if not sources_ended(self.plan, self.standings()):
            return False
        self._host.hurry()
        return self.idle()

    # --- ending ---

    def end_sources(self) -> None:
        self.sources.end_sources()

    def halt(self) -> None:
        self.sources.halt()
        self.driver.ring()

    def join(self, timeout: float) -> None:
        """Wait for the steps under way, then cancel the jobs of those that have not ended."""
        try:
            deadline = time.monotonic() + timeout
            join(self._threads, timeout)
            self.sources.join(max(0.0, deadline - time.monotonic()))
            self.driver.closed = True
            for loop in self._stages:
                loop.stage.cancel()
            with contextlib.suppress(Exception):  # the session was stopped, and its jobs with it
                self.spark.sparkContext.cancelJobGroup(keepers_group(self.driver))
            join(self._threads, 1.0)
            self.sources.join(1.0)
        except BaseException:
            self._opened.close()
            raise

    @property
    def stuck(self) -> bool:
        return self.sources.stuck or any(loop.thread.is_alive() for loop in (*self._inlets, *self._stages))

    def close(self) -> None:
        """Give everything back. A session of the user continues."""
        try:
            self.sources.close()
        finally:
            self._opened.close()

    def keep_stop(self, event: events.Stopped) -> None:
        self.sources.keep_stop(event)

    # --- keeping ---

    def _beat(self) -> None:
        while not self._host.pause(LEASE_BEAT_S):
            with contextlib.suppress(Exception):  # safety does not depend on the lease
                self._lease.beat()

    def _grown(self) -> bool:
        """Return True if a queue that is copied from the store has got partitions, which no feeder reads."""
        return any(loop.feeder.queue.partitions > 1 for loop in self._copiers)

    def _look_for_growth(self) -> None:
        """Stop the graph when a queue that is copied from the store has got partitions."""
        while not self._host.pause(_LOOK_S):
            try:
                for loop in self._copiers:
                    _require_one_log(loop.feeder.queue.id, loop.feeder.queue.partitions)
            except CuesError as error:
                if not (self._host.halted and isinstance(error, Closed)):
                    self.sources.fail(error)


def _state(loop: _Turns) -> Literal["running", "ended", "stopped"]:
    if loop.stopped is not None:
        return "stopped"
    return "ended" if loop.finished and isinstance(loop, _InletThread) else "running"


# --- the place of each queue ----------------------------------------------------------------------------


def written_on_spark(plan: Plan) -> set[str]:
    """The queues that streams write to, and the error queues of streams and sinks."""
    nodes = [node for node in plan.running if node.kind != "source"]
    return {port.queue for node in nodes for port in node.outputs} | {node.errors for node in nodes if node.errors}


def at_home(plan: Plan) -> set[str]:
    """The queues that are in the store of the driver's machine, and are copied from there."""
    return {port.queue for node in plan.nodes if _runs_here(node) for port in node.outputs} | set(plan.fed)


def _runs_here(processor: Node | Processor) -> bool:
    """Return True for a source that runs in the driver."""
    return processor.kind == "source" and not isinstance(processor.fn, Stream)


def check(plan: Plan) -> None:
    """Refuse by name the queues and processors that cannot be on a shared filesystem, before anything is started."""
    written = written_on_spark(plan)
    for name in sorted(at_home(plan) & written):
        writer = next(
            n for n in plan.running if n.kind != "source" and name in (*(p.queue for p in n.outputs), n.errors)
        )
        raise GraphError(
            f"The queue {name!r} belongs to a source and is in the store of the driver's machine. {writer.id}"
            " writes to it too, but into the shared directory.",
            f"give {writer.name} a queue of its own, and read both with cues.AnyOf.",
            processor=writer.name,
        )
    for name, options in plan.queues.items():
        _require_one_log(name, options.partitions)
        if options.path is not None and name in written:
            raise GraphError(
                f"The queue {name!r} has path={options.path!r}, a store on one machine, but must be in the"
                " shared directory.",
                "remove path= from the queue.",
            )


def _require_one_log(queue: str, partitions: int) -> None:
    if partitions > 1:
        raise GraphError(
            f"The queue {queue!r} has {partitions} partitions; queues in a shared directory have one, over which the"
            " executors divide each step.",
            "set partitions=1 (in a new store, if this one has the queue already), or run Spark without queues=.",
        )


def _refuse_speculation(session: Any, plan: Plan) -> None:
    """Refuse a setting of Spark with which a task of a sink may run twice at the same time."""
    ordered = [node.id for node in plan.running if node.kind != "source" and (node.side_effects or node.at_most_once)]
    if ordered and session.conf.get("spark.speculation", "false") == "true":
        raise Unsupported(
            f"spark.speculation may run a task twice at once, and then the functions of {', '.join(ordered)}"
            " have their effects twice.",
            "set spark.speculation=false.",
        )


def place(node: Node) -> str:
    """The place and the manner in which a processor runs, for ``cues show --engine spark --queues DIR``."""
    if isinstance(node.fn, Stream):
        return "a streaming query, into the directory"
    if node.kind == "source":
        return "in the driver, into its machine's store; a feeder copies the queue into the directory"
    if node.at_most_once:
        return "on an executor, one task a step, which is never repeated"
    if node.kind == "sink" or node.side_effects:
        return "on an executor, one task a step: its effects happen in order"
    if node.options.batch == FRAME:
        return "its plan, on all executors"
    if node.options.key is not None:
        if node.options.batch or node.mode == "join":
            return "on an executor, one task a step, which has the state"
        return "on all executors, by key; the state is in the directory"
    if node.options.batch:
        return "on all executors, a batch each"
    return "on all executors; on one if the function asks for the processor's state"


class _SourceGraph(Graph):
    """A graph that may have no processors, because all sources of the whole graph may be Spark streams."""

    def plan(self) -> Plan:
        return super().plan() if self.processors else build(self.id, [], **_NOTHING)


_NOTHING: Final[dict[str, Any]] = {
    "errors": None,
    "strategy": "exactly-once",
    "system": None,
    "source": None,
    "queues": {},
}


def source_graph(graph: Graph, plan: Plan) -> Graph:
    """The part of a graph that runs in the driver: its sources, and the queues that are fed by ``send``."""
    sources = [processor for processor in graph.processors.values() if _runs_here(processor)]
    declared = {processor.id for processor in sources}
    sources += [Source(name) for name in plan.fed if name not in declared]
    part = _SourceGraph(
        graph.id,
        sources,
        store=graph.store,
        errors=graph.errors,
        strategy=graph.strategy,
        system=graph.system,
        durability=graph.durability,
    )
    part.directory = graph.directory
    named = set(part.plan().queues)
    part.queues = {name: options for name, options in plan.queues.items() if name in named}
    part.default_source = plan.source if plan.source in named else None
    return part
