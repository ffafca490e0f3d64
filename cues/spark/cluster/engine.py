"""A graph whose queues are on a shared filesystem.

    graph.start(engine="spark", queues="s3://bucket/flights")

    sources     as on the embedded engine, in this process, into the store of this machine
    feeder      a thread that copies the queues of the sources from the store into the directory
    stages      a thread for each stream and sink: take, run on executors, commit
    inlets      a thread for each source that is a Spark stream
    keeper      a thread that merges small files and removes old ones

The store of this machine holds the queues and positions of the sources, and nothing else. A driver that starts
elsewhere, with an empty store, continues with the positions that the feeder keeps in the directory (feeder.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from cues import faults
from cues.base import clock, events, names
from cues.base.names import ProcessorId
from cues.engine import record
from cues.engine.engine import Host
from cues.engine.growth import Emit, Growth, divide, tell
from cues.engine.local import EmbeddedEngine, join
from cues.engine.outages import OutageWait
from cues.engine.status import processor_of, sources_ended
from cues.engine.threads import WorkLoop
from cues.errors import Closed, CuesError, GraphError, InvalidArgument, ProcessorStopped, Unsupported
from cues.graphs.declaration import Processor, Source
from cues.graphs.graph import Graph
from cues.graphs.options import refusal_of_shared
from cues.graphs.plan import Plan, build, partitions_of
from cues.graphs.processor import NOT_SHARED, Node
from cues.graphs.running import QueueProgress, Shared, UnitStatus
from cues.overrides import override
from cues.queues.options import changed
from cues.queues.store import Store
from cues.spark.cluster import inspection
from cues.spark.cluster.data import messages, pieces_of
from cues.spark.cluster.delays import without_delays
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.driver import Driver, new_owner
from cues.spark.cluster.feeder import Feeder
from cues.spark.cluster.files import ID, folder_of, open_files, require_place, sealed_json
from cues.spark.cluster.frames import FrameStage
from cues.spark.cluster.ingest import StreamIngest
from cues.spark.cluster.lease import held
from cues.spark.cluster.maintenance import Maintenance, keepers_group, sweep
from cues.spark.cluster.metrics import SparkMetrics
from cues.spark.cluster.queries import FrameQuery, require_checkpoints
from cues.spark.cluster.step import Stage
from cues.spark.failures import in_short
from cues.spark.plans import queries_of
from cues.spark.shipping import open_session
from cues.spark.source import Source as Stream
from cues.steps.calls import Interrupted
from cues.steps.ownership import LEASE_BEAT_S, require_replaceable
from cues.storage import wakeup

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cues.graphs.plan import Plan
    from cues.queues.queue import Queue
    from cues.spark.cluster.files import Files

_FENCE_S = 1.0
"""Least time between two checks that an idle stage still owns its processor."""
_LOOKS_PER_S: Final = 10
"""Most such checks of all units in a second."""
FEED_GAP_S = 0.05
"""Least time between two copies of a feeder. The messages that a source yields meanwhile are one step, not ten."""
_KEEP_AGAIN_S = 60.0
"""Wait of the keeper after a failure."""
_KEEP_S = 1.0
"""Time between two looks of the keeper for new files."""
_LOOK_S = 0.5
"""Time between two looks for new partitions of the queues in the store."""
LOOK_AT_DIRECTORY_S: Final = 2.0
"""Least time between two looks for new partitions that an operator has added in the directory."""


class _Turns(WorkLoop):
    """The thread of one part of the engine. It sleeps after a turn in which there was nothing to do."""

    def __init__(self, host: Host, driver: Driver, id: str) -> None:
        super().__init__(host, id)
        self.driver = driver
        self.busy = False

    @override
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
    def __init__(self, host: Host, driver: Driver, stage: Stage, stages: Sequence[Stage]) -> None:
        """``stages`` are all those of the engine."""
        super().__init__(host, driver, stage.node.id)
        self.stage = stage
        self._stages = stages
        self.counters = stage.counters
        self._rings = 0
        self._outage = OutageWait(host, self.id, stage.node.options.outages, stage.counters, stage.node)

    @override
    def _run(self) -> None:
        try:
            super()._run()
        finally:
            self.stage.close()

    @override
    def step(self) -> bool:
        self._rings = self.driver.rings
        try:
            moved = self.stage.step()
        except ProcessorStopped as stopped:
            if not stopped.away:
                raise
            self._outage.wait(stopped, lambda: False)
            return True
        if moved:
            self._outage.end()
        return moved

    @override
    def ready(self) -> bool:
        return self.stage.ready()

    @override
    def sleep(self) -> None:
        with self.driver.bell:
            # Each look lists a folder, so many units look less often.
            fence_s = max(_FENCE_S, len(self._stages) / _LOOKS_PER_S)
            due_s = max(0.0, (self.stage.due_ns - clock.now_ns()) / 1e9)
            wait_s = min(fence_s, due_s)
            self.driver.bell.wait_for(lambda: self.driver.rings != self._rings or self.running.halted, wait_s)


class _InletThread(_Turns):
    """The thread of a source that is a Spark stream."""

    def __init__(self, host: Host, driver: Driver, inlet: StreamIngest) -> None:
        super().__init__(host, driver, inlet.node.id)
        self.counters = inlet.counters
        self._inlet = inlet

    @override
    def step(self) -> bool:
        self._inlet.run(lambda: self.running.draining)
        self.driver.ring()
        raise Interrupted  # the stream has ended

    @override
    def idle(self) -> bool:
        return self.finished or self._inlet.idle()


class _FeederThread(_Turns):
    def __init__(self, host: Host, driver: Driver, feeder: Feeder) -> None:
        super().__init__(host, driver, feeder.ledger.processor)
        self.feeder = feeder

    @override
    def step(self) -> bool:
        return self.feeder.step()

    @override
    def ready(self) -> bool:
        return self.feeder.ready()

    @override
    def sleep(self) -> None:
        self.running.sleep(FEED_GAP_S)
        logs = [view.core.log for view in self.feeder.logs().values()]
        interests = [(log.store.core.doorbells, log.mask) for log in logs]
        wakeup.wait(interests, lambda: self.running.halted or self.ready(), None)


class _KeeperThread(_Turns):
    """The thread that merges and removes files."""

    def __init__(self, host: Host, driver: Driver, stages: Sequence[Stage]) -> None:
        super().__init__(host, driver, f"{host.plan.id} keeper")
        self._maintenance = Maintenance(driver, stages)

    @override
    def turn(self) -> None:
        super().turn()
        if self.running.halted:  # a run may be shorter than the time between two vacuums
            self._keep(self._maintenance.vacuum_if_due)

    @override
    def step(self) -> bool:
        self._keep(self._maintenance.step)
        return False

    def _keep(self, work: Callable[[], None]) -> None:
        try:
            work()
        except CuesError:
            raise
        except Exception as error:  # the next look finds the same files
            if not self.running.halted:
                text = f"small files and old ones stay for now: {in_short(error)}"
                self.running.emit(events.Event(self.running.plan.id, text, logging.WARNING))
                self.running.sleep(_KEEP_AGAIN_S)

    @override
    def sleep(self) -> None:
        self.running.sleep(_KEEP_S)


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
            {directory.queue: sum(log.next - 1 for log in directory.logs) for directory in queues},
            {directory.queue: sum(file.count for file in directory.live) for directory in queues},
            {tailer: position for stage in self._stages for tailer, position in stage.positions.items()},
            {stage.node.id: held for stage in self._stages if (held := stage.ledger.now.delayed) is not None},
        )

    def lag(self, unit: str) -> int:
        return sum(stage.lag for stage in self._stages if stage.node.id == unit)

    def messages(self, queue: str) -> list[dict[str, Any]] | None:
        name, slash, partition = queue.partition("/")
        directory = self._driver.queues.get(name)
        if directory is None or name in self._home:
            return None
        logs = [directory.log(int(partition))] if slash else directory.logs
        pieces = [piece for log in logs for piece in pieces_of(directory.folder, log.live, 1, log.next)]
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
        conf: Mapping[str, str],
        *,
        store: str | os.PathLike[str] | Store | None,
        accept_topology: bool,
        take_over: bool,
    ) -> None:
        self._graph = graph
        self._place = queues
        self._given, self._master, self._conf = spark, master, conf
        self.plan = graph.plan()
        self._options: dict[str, Any] = {"store": store, "accept_topology": accept_topology, "take_over": take_over}
        self._stages: list[_StageThread] = []
        self._inlets: list[_InletThread] = []
        self._copiers: list[_FeederThread] = []
        self._opened = contextlib.ExitStack()
        """The session, and what depends on it."""
        self._threads: list[threading.Thread] = []
        self._looked_s = 0.0

    # --- starting ---

    def start(self, host: Host) -> None:
        """Own the directory and the processors, and start the threads."""
        graph, plan = self._graph, self.plan
        check(plan)
        _refuse_renames(plan, self._place)
        self._host = host
        opening = {"before_claim": self._open_queues}
        self.sources = EmbeddedEngine(source_graph(graph, plan), **self._options, **opening)
        place, owner = os.fspath(self._place), new_owner()
        require_place(place)  # before Spark starts
        files = open_files(place, make=False)
        _refuse_store(files, graph, self._options["store"])
        exists = files.size(ID) is not None
        try:
            if self._options["take_over"]:
                self._require_replaceable()
            if exists:  # Spark takes seconds to start, and another driver may run the graph
                self._hold(files, owner)
            remote = [node for node in plan.running if node.kind != "source"]
            given = self._given, self._master, remote, host.emit, self._conf
            self.spark = open_session(self._opened, graph, plan, *given)
            _refuse_speculation(self.spark, plan)
            self._frames = queries_of(self.spark, plan)
            files = open_files(place)
            if self._frames:
                require_checkpoints(self.spark, files, self._frames)
                refuse_partitions(plan, self._frames)
            if not exists:  # a graph that Spark refuses makes no directory
                files = open_files(place)
                self._hold(files, owner)
            self.driver = Driver(self.spark, files, graph.id, plan.system, host.emit, host.sleep, owner)
            self.driver.conf = self._conf
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

    def _require_replaceable(self) -> None:
        """Refuse to take the graph from a process that runs it on this store and answers, before anything is taken.

        The lease of the directory can be taken from any driver, and the processors of a store only from one that does
        not answer.
        """
        given = _home(self._graph, self._options["store"])
        sources = [node.id for node in self.plan.running if _runs_here(node)]
        if isinstance(given, Store):
            require_replaceable(given, sources)
        elif os.path.exists(os.path.join(given, "data.mdb")):
            with Store(given, readonly=True) as store:
                require_replaceable(store, sources)

    def _hold(self, files: Files, owner: str) -> None:
        """Hold the lease of the graph until the end."""
        self._opened.enter_context(held(files, self._graph.id, owner, self._options["take_over"]))

    def _open_queues(self, store: Store, queues: dict[str, Queue]) -> None:
        """Open the queues of the directory, and own the copying: it decides where the sources begin."""
        driver, plan = self.driver, self.plan
        home, written = at_home(plan), written_on_spark(plan)
        here = [node for node in plan.running if _runs_here(node)]
        driver.without_delays = without_delays(plan)
        errors = {node.errors for node in here}
        fed = {name: queue for name, queue in queues.items() if name in home or name in errors}
        self._fed = {name: queue for name, queue in fed.items() if name not in written}
        """Queues that have the same messages, at the same indices, in the store and in the directory."""
        self.feeders = [Feeder(driver, store, fed, [node.id for node in here], written)] if fed else []
        for feeder in self.feeders:
            feeder.restore()
            feeder.refuse()
        for name, options in plan.queues.items():
            identity = None
            if name in self._fed:  # the store decides, and not the graph
                identity = fed[name].core.row().identity
                options = changed(options, {"partitions": fed[name].options.partitions})
            driver.queues[name] = QueueDirectory(driver.files, name, options, identity)
        for name, directory in driver.queues.items():  # none changes before all are checked
            if name in self._fed:
                directory.grow_to(self._fed[name].options.partitions)
            directory.own(plan.id)
        for feeder in self.feeders:
            feeder.claim()

    def _open_stages(self) -> None:
        """Claim every processor on Spark, sweep, and start the threads."""
        driver, plan, host, feeders = self.driver, self.plan, self._host, self.feeders
        inlets = [StreamIngest(driver, node) for node in plan.running if isinstance(node.fn, Stream)]
        units = divide(plan, driver.queues)
        stages = self._units(units)
        parts: list[Feeder | StreamIngest | Stage] = [*feeders, *inlets, *stages]
        driver.forward_others({part.ledger.processor for part in parts})
        for stage in stages:
            stage.claim(self._options["accept_topology"])
        _tell_of_growth(stages, host.emit)
        for inlet in inlets:
            inlet.claim()
        for directory in driver.queues.values():
            directory.load()  # from here on only this driver changes it
        faults.point("spark.claimed")
        sweep(driver, stages)
        self._growth = Growth(plan, driver.queues, units, host.emit)
        self._owned = stages
        """The stages of all units. It gets those of new partitions."""
        self.shared = _SharedQueues(driver, stages, at_home(plan))
        with contextlib.suppress(Exception):  # the notes are for cues status, and nothing depends on them
            record.note_queues(self.store.directory, plan.id, driver.files.url)
            feeder_store = {"store": self.store.directory, "host": socket.gethostname()}
            driver.files.write(f"_cues/{folder_of(plan.id)}.store.json", sealed_json(feeder_store))
        self._stages = [_StageThread(host, driver, stage, stages) for stage in stages]
        self._inlets = [_InletThread(host, driver, inlet) for inlet in inlets]
        self._copiers = [_FeederThread(host, driver, feeder) for feeder in feeders]
        loops = [*self._inlets, *self._stages, *self._copiers, _KeeperThread(host, driver, stages)]
        growth = threading.Thread(target=self._look_for_growth, name="cues growth", daemon=True)
        metrics = threading.Thread(target=self._show_metrics, name="cues metrics", daemon=True)
        self._threads = [*(loop.thread for loop in loops), growth, metrics]
        for thread in self._threads:
            thread.start()

    def _units(self, nodes: Sequence[Node]) -> list[Stage]:
        return [self._stage(node) for node in nodes if node.kind != "source"]

    def _stage(self, node: Node) -> Stage:
        query = self._frames.get(node.processor)
        if query is None:
            return (FrameStage if node.kind == "frame" else Stage)(self.driver, node)
        if node.partition:
            raise _parted(node)
        return FrameQuery(self.driver, node, query)

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

    @property
    def units(self) -> Sequence[Node]:
        return self.plan.nodes

    def standings(self) -> list[UnitStatus]:
        units = self.sources.standings()
        loops: list[_InletThread | _StageThread] = [*self._inlets, *self._stages]
        return units + [
            UnitStatus(ProcessorId(loop.id), processor_of(loop.id), loop.counters, _state(loop)) for loop in loops
        ]

    @property
    def stopped(self) -> list[BaseException]:
        """The errors that stopped processors and feeders. Messages that are not copied are never processed."""
        loops = [*self._inlets, *self._stages, *self._copiers]
        return self.sources.stopped + [loop.stopped for loop in loops if loop.stopped is not None]

    @property
    def left(self) -> list[BaseException]:
        return self.sources.left

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

    def set_disk_low(self, low: bool) -> None:
        """Do nothing: all steps are begun in this process."""

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

    def _show_metrics(self) -> None:
        """Set the metrics of Spark, again and again."""
        metrics = SparkMetrics(self.driver.context, self.plan.id)
        while not self._host.sleep(LEASE_BEAT_S):
            with contextlib.suppress(Exception):  # a run does not depend on metrics
                metrics.update(self._owned, list(self.driver.queues.values()))

    def _grown(self) -> bool:
        """Return True if there are partitions that no stage reads yet."""
        directories = self.driver.queues
        behind = any(queue.options.partitions > len(directories[name].logs) for name, queue in self._fed.items())
        return behind or any(self._growth.look())

    def _look_for_growth(self) -> None:
        """Take in the new partitions of queues."""
        while not self._host.sleep(_LOOK_S):
            try:
                for name, queue in self._fed.items():
                    self.driver.queues[name].grow_to(queue.options.partitions)
                self._look_at_directory()
                self._growth.take_in(self._own)
            except CuesError as error:
                if not (self._host.halted and isinstance(error, Closed)):
                    self.sources.fail(error)

    def _look_at_directory(self) -> None:
        """Read new entries of the logs: an operator may have added partitions (``cues grow``)."""
        if time.monotonic() - self._looked_s > LOOK_AT_DIRECTORY_S:
            self._looked_s = time.monotonic()
            with contextlib.suppress(OSError):  # the next look reads them
                for directory in self.driver.queues.values():
                    directory.read_on()

    def _own(self, nodes: Sequence[Node]) -> None:
        """Claim and run units of partitions that came while the graph ran."""
        stages = self._units(nodes)
        for stage in stages:
            stage.claim()
        self._owned += stages
        loops = [_StageThread(self._host, self.driver, stage, self._owned) for stage in stages]
        self._stages = [*self._stages, *loops]
        self._threads = [*self._threads, *(loop.thread for loop in loops)]
        for loop in loops:
            loop.thread.start()


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
    for node in plan.running:
        refusal = refusal_of_shared(node.options, node.id)
        if refusal is not None:
            raise GraphError(*refusal, processor=node.name)
        if own := getattr(node.fn, NOT_SHARED, None):
            option, reason = own
            raise GraphError(
                f"{node.id} has {option}, which a processor with its queues in a shared directory cannot have:"
                f" {reason}.",
                f"run the graph without --queues, or leave {option} out.",
                processor=node.name,
            )
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
        if options.bounded:
            raise GraphError(
                f"The queue {name!r} has max_lag= or max_bytes=: with the queues in a shared directory nobody waits for"
                " readers.",
                "remove them from the queue, or run without --queues.",
            )
        if options.path is not None and name in written:
            raise GraphError(
                f"The queue {name!r} has path={options.path!r}, a store on one machine, but must be in the"
                " shared directory.",
                "remove path= from the queue.",
            )


def _tell_of_growth(stages: Sequence[Stage], emit: Emit) -> None:
    """Warn of processors that have new units besides old ones."""
    old = {stage.node.processor for stage in stages if not stage.fresh}
    tell(Counter(s.node.processor for s in stages if s.fresh and s.node.processor in old), "than before", emit)


def refuse_partitions(plan: Plan, frames: Collection[str]) -> None:
    """Refuse a frame that keeps state over several partitions: its query has one position for all of them."""
    for node in plan.running:
        if node.id in frames and partitions_of(node, plan.queues) > 1:
            raise _parted(node)


def _parted(node: Node) -> GraphError:
    return GraphError(
        f"{node.processor} is a frame that keeps state, and reads a queue with several partitions"
        f" ({', '.join(port.queue for port in node.inputs)}).",
        "copy the messages to a queue with one partition with a stream, and let the frame read that one.",
        processor=node.name,
    )


def _refuse_renames(plan: Plan, place: str | os.PathLike[str]) -> None:
    """Refuse ``renamed_from=`` where it would have an effect: the files of a directory are not renamed."""
    renamed = [node for node in plan.running if node.options.renamed_from is not None]
    if not renamed:
        return
    exists = open_files(os.fspath(place), make=False).size(ID) is not None
    known = {processor_of(last.processor) for last in inspection.processors_of(os.fspath(place))} if exists else ()
    for node in renamed:
        former = str(node.options.renamed_from)
        if node.kind == "source" or (names.processor_id(plan.id, former) in known and node.id not in known):
            raise Unsupported(
                f"{node.id} has renamed_from={former!r}, and processors of a shared directory ({place}) cannot be"
                " renamed.",
                f"give it id={former!r}, which keeps the former id."
                if node.kind != "source"
                else f"keep the queue's name, {former!r}, and leave renamed_from= out.",
            )


def _refuse_store(files: Files, graph: Graph, given: str | os.PathLike[str] | Store | None) -> None:
    """Refuse a directory that is a store too: a command could not know which of the two is meant."""
    store = _home(graph, given)
    path: Any = getattr(store, "path", store)
    if os.path.realpath(path) == os.path.realpath(files.url) or files.size("data.mdb") is not None:
        raise InvalidArgument(
            f"{files.url} is to hold the queues, and it is the directory of a store.",
            "name another directory with --queues, or another store with --store. If both are there already, move the"
            " files of the store (data.mdb, locks, mark, wake, open) to a directory of their own.",
        )


def _home(graph: Graph, given: str | os.PathLike[str] | Store | None) -> str | os.PathLike[str] | Store:
    """The store of the driver's machine, or its path."""
    return given if given is not None else graph.store if graph.store is not None else graph.store_path()


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
    if node.kind == "frame":
        step = "its plan, on all executors, for the messages of each step"
        query = "a streaming query, whose batches are commits"
        mode = node.options.output_mode
        return (
            step if mode == "step" else query if mode or node.mode == "join" else f"{step}; {query}, if it keeps state"
        )
    if node.options.key is not None:
        if node.options.batch or node.mode == "join":
            return "on an executor, one task a step, which has the state"
        return "on all executors, by key; the state is in the directory"
    if node.options.batch:
        return "on all executors, a batch each"
    return "on all executors; on one if the function asks for the processor's state"


class _SourceGraph(Graph):
    """A graph that may have no processors, because all sources of the whole graph may be Spark streams."""

    @override
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
