"""A running graph whose queues are on a shared filesystem.

    graph.start(engine="spark", queues="hdfs://…/flights")

    sources     as on the embedded engine, in this process, into the store of this machine
    feeders     a thread a source's queue: from the store into the directory
    stages      a thread a stream or sink: take, run on executors, commit
    keeper      a thread that merges small files and lets go of old ones

The store of this machine holds the sources' queues and positions, and nothing else. A driver that starts
elsewhere without it is refused while the directory was fed from it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from cues import codec, faults
from cues.base import events, names
from cues.engine.running import Running
from cues.engine.status import QueueProgress, UnitStatus
from cues.errors import Closed, CuesError, GraphError, InvalidArgument, Unsupported
from cues.graphs.graph import Graph
from cues.graphs.plan import build
from cues.graphs.processor import FRAME, Node, Source
from cues.spark.cluster.directory import SCHEMA, QueueDirectory
from cues.spark.cluster.driver import Driver
from cues.spark.cluster.feeder import Feeder
from cues.spark.cluster.files import RENAME_COPIES, Files
from cues.spark.cluster.ingest import StreamIngest
from cues.spark.cluster.lease import DriverLease
from cues.spark.cluster.maintenance import Maintenance, keepers_group, sweep
from cues.spark.cluster.step import Stage
from cues.spark.executor import require_travel
from cues.spark.session import in_short
from cues.spark.session import session as session_of
from cues.spark.source import Source as Stream
from cues.steps.failure import stop_event, stopped_by
from cues.steps.ownership import LEASE_BEAT_S
from cues.steps.runner import Interrupted
from cues.storage import wakeup

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cues.graphs.plan import Plan
    from cues.queues.log import Log
    from cues.queues.processor_rows import ProcessorRow
    from cues.records.log_row import LogRow

_FENCE_S = 1.0
"""Time between two checks that an idle stage still owns its processor."""
FEED_GAP_S = 0.5
"""The least time between two copies that leave nothing behind: what a source yields meanwhile is one step, not ten."""
_KEEP_AGAIN_S = 60.0
"""Wait of the keeper after a failure."""
_KEEP_S = 1.0
"""Time between two looks of the keeper for new files."""


class _Delivery:
    """What a worker of :class:`Running` is asked for besides its thread."""

    def __init__(self, node: Node, counters: events.Counters) -> None:
        self.node = node
        self.counters = counters
        self.inputs: tuple[Any, ...] = ()


class ClusterWorker:
    """The thread of one stage, one feeder, or the keeper."""

    def __init__(self, running: ClusterRunning, id: str, turn: Callable[[], bool], wait: Callable[[], None]) -> None:
        """``turn`` does something and says whether it did; ``wait`` returns when it may have something to do."""
        self.running = running
        self.id = id
        self.busy = False
        self.finished = False
        self.stopped: BaseException | None = None
        self._turn = turn
        self._wait = wait
        self.thread = threading.Thread(target=self._run, name=f"cues {id}", daemon=True)

    def _run(self) -> None:
        try:
            while not self.running.halted:
                self.busy = True
                if not self._turn():
                    self.busy = False
                    self.running.changed()
                    self._wait()
        except Interrupted:
            pass
        except BaseException as error:
            if not (self.running.halted and isinstance(error, Closed)):
                self._stop(error)
        finally:
            self.busy = False
            self.finished = True
            self.running.changed()

    def _stop(self, error: BaseException) -> None:
        self.stopped = stopped_by(self.id, error)
        self.running.emit(stop_event(self.id, self.stopped))


class StageWorker(ClusterWorker):
    """The thread of a stage, as the command line shows it."""

    def __init__(self, running: ClusterRunning, stage: Stage) -> None:
        self.stage = stage
        self.delivery = _Delivery(stage.node, stage.counters)
        self._rings = 0
        super().__init__(running, stage.node.id, self._step, self._sleep)

    def tell_if_slow(self) -> None:
        """Steps are long here, and Spark shows what its executors are at."""

    def _step(self) -> bool:
        self._rings = self.running.driver.rings
        return self.stage.step()

    def _sleep(self) -> None:
        driver = self.running.driver
        with driver.bell:
            driver.bell.wait_for(lambda: driver.rings != self._rings or self.running.halted, _FENCE_S)

    @property
    def standing(self) -> UnitStatus:
        return UnitStatus(self.id, self.id, self.delivery.counters, "running" if self.stopped is None else "stopped")

    def idle(self, row: ProcessorRow | None, log_row: Callable[[Log], LogRow]) -> bool:
        """Return True where there is nothing to take."""
        return self.finished or not (self.busy or self.stage.ready())


class IngestWorker(ClusterWorker):
    """The thread of a source that is a Spark stream."""

    def __init__(self, running: ClusterRunning, inlet: StreamIngest) -> None:
        self.inlet = inlet
        self.delivery = _Delivery(inlet.node, inlet.counters)
        super().__init__(running, inlet.node.id, self._pull, lambda: None)

    def tell_if_slow(self) -> None:
        """A stream has no steps."""

    def _pull(self) -> bool:
        self.inlet.run(lambda: self.running.draining)
        self.running.driver.ring()
        raise Interrupted  # the stream has ended

    def idle(self, row: ProcessorRow | None, log_row: Callable[[Log], LogRow]) -> bool:
        """Return True where the stream gives nothing now."""
        return self.finished or self.inlet.idle()


class _Shared:
    """The queues as the command line needs them."""

    def __init__(self, driver: Driver, stages: Sequence[Stage]) -> None:
        self.place = driver.files.url
        self._driver = driver
        self._stages = stages
        self.before = self.now()

    def now(self) -> QueueProgress:
        queues = self._driver.queues.values()
        return QueueProgress(
            {one.queue: one.next - 1 for one in queues},
            {one.queue: sum(file.count for file in one.live) for one in queues},
            {
                names.tailer_id(stage.node.id, queue): position
                for stage in self._stages
                for queue, position in stage.positions.items()
            },
        )

    def lag(self, processor: str) -> int:
        for stage in self._stages:
            if stage.node.id == processor:
                ends = {one.queue: one.next for one in stage.inputs.values()}
                return sum(ends[queue] - position for queue, position in stage.positions.items())
        return 0


class ClusterRunning(Running):
    """A graph that was started with ``queues=DIR``; used as any other."""

    def __init__(
        self,
        graph: Graph,
        queues: str | os.PathLike[str],
        spark: SparkSession | None,
        master: str | None,
        *,
        ship: Callable[[SparkSession, Graph, Plan], None] = lambda session, graph, plan: None,
        take_over: bool = False,
        **options: Any,
    ) -> None:
        plan = graph.plan()
        check(plan)
        self._plan = plan
        self._ended = False
        self._copiers: Sequence[ClusterWorker] = ()
        self._accept_topology = bool(options.get("accept_topology"))
        self._session = contextlib.ExitStack()
        try:
            self.spark = self._session.enter_context(session_of(master, f"cues {graph.id}", spark=spark))
            _refuse_speculation(self.spark, plan)
            ship(self.spark, graph, plan)
            for node in plan.running:
                if node.kind != "source" and node.options.batch != FRAME:
                    require_travel(node, plan.system)
            files = Files(self.spark, queues)
            self._session.callback(files.close)
            self.driver = Driver(self.spark, files, graph.id, plan.system, self._emit, self.pause)
            lease = DriverLease(files, graph.id, self.driver.owner)
            lease.acquire(take_over)
            self._session.callback(lease.release)
            self._lease = lease
            super().__init__(source_graph(graph, plan), take_over=take_over, **options)
            self.graph = graph
        except BaseException:
            self._session.close()
            raise
        try:
            self._open_stages()
        except BaseException:
            self.close()
            raise
        address = self.spark.sparkContext.uiWebUrl
        self.emit(
            events.Event(
                "",
                f"{graph.id} runs on Spark {self.spark.version}, its queues in {files.url}"
                + (f": {address}" if address else ""),
            )
        )
        if files.scheme in RENAME_COPIES:
            self.emit(
                events.Event(
                    "",
                    f"{files.scheme}:// decides nothing between two drivers that commit at once: run one",
                    logging.WARNING,
                )
            )

    def _emit(self, event: events.Event) -> None:
        self.emit(event)

    def _open_stages(self) -> None:
        """Open the queues, claim every processor, sweep, and let the threads go."""
        driver, plan = self.driver, self._plan
        home, written = at_home(plan), written_on_spark(plan)
        fed = [name for name in self._assembly.queues if name in home or name in _source_errors(plan)]
        for name in fed:
            _require_one_log(name, self._assembly.queues[name].partitions)  # the store's, whatever the graph says
        for name, options in plan.queues.items():
            same = name in fed and name not in written
            identity = self._assembly.queues[name].row().identity if same else None
            driver.queues[name] = QueueDirectory(driver.files, name, options, identity)
        self.feeders = [
            Feeder(driver, self._assembly.queues[name], driver.queues[name], name not in written) for name in fed
        ]
        self.inlets = [StreamIngest(driver, node) for node in plan.running if isinstance(node.fn, Stream)]
        self.stages = [Stage(driver, node) for node in plan.running if node.kind != "source"]
        for feeder in self.feeders:
            feeder.claim()
        for stage in self.stages:
            stage.claim(self._accept_topology)
        for inlet in self.inlets:
            inlet.claim()
        for directory in driver.queues.values():
            directory.load()  # as it is now that nobody else changes it
        faults.point("spark.claimed")
        sweep(driver, self.stages)
        self.shared = _Shared(driver, self.stages)
        workers = [StageWorker(self, stage) for stage in self.stages]
        self._inlets = inlets = [IngestWorker(self, inlet) for inlet in self.inlets]
        self._copiers = copiers = [self._copier(feeder) for feeder in self.feeders]
        self.workers += [*inlets, *workers]  # type: ignore[list-item]
        keeper = Maintenance(driver, self.stages)
        keeping = [ClusterWorker(self, f"{plan.id} keeper", self._keeping(keeper), self._rest)]
        started: Sequence[ClusterWorker] = (*inlets, *workers, *copiers, *keeping)
        self._threads += started  # type: ignore[arg-type]
        for one in started:
            one.thread.start()

    def _copier(self, feeder: Feeder) -> ClusterWorker:
        log = feeder.queue.log

        def wait() -> None:
            self.pause(FEED_GAP_S)
            wakeup.wait([(log.store.doorbells, log.mask)], lambda: self.halted or feeder.ready(), None)

        return ClusterWorker(self, feeder.ledger.processor, feeder.step, wait)

    def _keeping(self, keeper: Maintenance) -> Callable[[], bool]:
        """The keeper's turn: one look, whatever came of it."""

        def turn() -> bool:
            try:
                keeper.step()
            except CuesError:
                raise
            except Exception as error:  # what was not kept in shape now is at the next look
                if not self.halted:
                    text = f"small files and old ones stay for now: {in_short(error)}"
                    self.emit(events.Event(self._plan.id, text, logging.WARNING))
                    self.pause(_KEEP_AGAIN_S)
            return False

        return turn

    def _rest(self) -> None:
        self.pause(_KEEP_S)

    # --- using ---

    @property
    def plan(self) -> Plan:
        return self._plan

    def send(self, *arguments: Any) -> int:
        """As of any running graph, to queues that nobody of the graph writes to."""
        if len(arguments) == 2 and arguments[0] in self._plan.queues and arguments[0] not in at_home(self._plan):
            raise InvalidArgument(
                f"The queue {arguments[0]!r} lies in {self.driver.files.url} and is written by the graph's processors;"
                " what is sent goes to queues of this machine's store.",
                f"send to one of {', '.join(sorted(at_home(self._plan)))}.",
            )
        return super().send(*arguments)

    def messages(self, queue: str) -> list[dict[str, Any]]:
        """All messages that are on a queue now."""
        self._check()
        directory = self.driver.queues.get(queue)
        if directory is None or queue in at_home(self._plan):
            return super().messages(queue)
        urls = directory.urls(list(directory.live))
        if not urls:
            return []
        rows = self.spark.read.schema(SCHEMA).parquet(*urls).orderBy("index").select("value").collect()
        return [codec.unpack(bytes(row.value)) for row in rows]

    def idle(self) -> bool:
        """Return True where, at one moment, no worker has anything to do."""
        before = self.driver.rings
        copied = all(
            worker.finished or not (worker.busy or feeder.ready())
            for worker, feeder in zip(self._copiers, self.feeders)
        )
        return copied and super().idle() and before == self.driver.rings

    def _done(self) -> bool:
        return all(worker.finished for worker in self._inlets) and super()._done()

    @property
    def stopped(self) -> list[BaseException]:
        """What stopped processors and feeders: what is not copied is never processed."""
        return super().stopped + [one.stopped for one in self._copiers if one.stopped is not None]

    # --- ending ---

    def halt(self) -> None:
        super().halt()
        if hasattr(self, "driver"):
            self.driver.ring()

    def close(self, timeout: float = 30.0) -> None:
        """Halt, wait for the steps under way, and give everything back; a session of the user's goes on."""
        if self._ended:
            return
        self._ended = True
        try:
            self.halt()
            deadline = time.monotonic() + timeout
            for worker in getattr(self, "_threads", ()):
                if worker.thread.ident is not None:
                    worker.thread.join(max(0.0, deadline - time.monotonic()))
            self.driver.closed = True
            for stage in getattr(self, "stages", ()):
                stage.cancel()
            with contextlib.suppress(Exception):  # the session was stopped, and its jobs with it
                self.spark.sparkContext.cancelJobGroup(keepers_group(self.driver))
            super().close(1.0)
            self.driver.files.delete(self.driver.work)
        finally:
            self._session.close()

    def _keep(self) -> None:
        beat = threading.Thread(target=self._beat, name="cues lease on the directory", daemon=True)
        beat.start()
        super()._keep()

    def _grown(self) -> bool:
        """Whether a queue that is copied from the store has partitions, which no feeder reads."""
        grown = any(feeder.queue.partitions > 1 for feeder in getattr(self, "feeders", ()))
        if grown:
            self._look.set()
        return grown

    def _look_for_growth(self) -> None:
        try:
            for feeder in getattr(self, "feeders", ()):
                _require_one_log(feeder.queue.id, feeder.queue.partitions)
        except CuesError as error:
            if not (self.halted and isinstance(error, Closed)):
                self._fail(error)

    def _beat(self) -> None:
        while not self.pause(LEASE_BEAT_S):
            with contextlib.suppress(Exception):  # safety never rests on it
                self._lease.beat()


# --- what lies where ----------------------------------------------------------------------------


def written_on_spark(plan: Plan) -> set[str]:
    """The queues that streams write to, and the error queues of streams and sinks."""
    nodes = [node for node in plan.running if node.kind != "source"]
    return {port.queue for node in nodes for port in node.outputs} | {node.errors for node in nodes if node.errors}


def at_home(plan: Plan) -> set[str]:
    """The queues that lie in the store of the driver's machine and are copied from there."""
    sources = [node for node in plan.nodes if node.kind == "source" and not isinstance(node.fn, Stream)]
    return {port.queue for node in sources for port in node.outputs} | set(plan.fed)


def _source_errors(plan: Plan) -> set[str]:
    sources = [node for node in plan.running if node.kind == "source" and not isinstance(node.fn, Stream)]
    return {node.errors for node in sources if node.errors}


def check(plan: Plan) -> None:
    """Refuse by name what has no form on a shared filesystem, before anything is started."""
    written = written_on_spark(plan)
    for name in sorted(at_home(plan) & written):
        writer = next(
            n for n in plan.running if n.kind != "source" and name in (*(p.queue for p in n.outputs), n.errors)
        )
        raise GraphError(
            f"The queue {name!r} is a source's, which lies in the store of the driver's machine, and {writer.id}"
            " writes to it too, which would write into the shared directory.",
            f"give {writer.name} a queue of its own, and read both with cues.AnyOf.",
            processor=writer.name,
        )
    for name, options in plan.queues.items():
        _require_one_log(name, options.partitions)
        if options.path is not None and name in written:
            raise GraphError(
                f"The queue {name!r} has path={options.path!r}, a store on one machine, and lies in the"
                " shared directory.",
                "remove path= from the queue.",
                processor="",
            )


def _require_one_log(queue: str, partitions: int) -> None:
    if partitions > 1:
        raise GraphError(
            f"The queue {queue!r} has {partitions} partitions; queues in a shared directory have one, over which the"
            " executors divide each step.",
            "set partitions=1 (in a new store, if this one has the queue already), or run Spark without queues=.",
            processor="",
        )


def _refuse_speculation(session: Any, plan: Plan) -> None:
    """A task of a sink that runs twice at once would deliver twice at once."""
    ordered = [node.id for node in plan.running if node.kind != "source" and (node.side_effects or node.at_most_once)]
    if ordered and session.conf.get("spark.speculation", "false") == "true":
        raise Unsupported(
            f"spark.speculation runs a task twice at once, and with it the effects of {', '.join(ordered)}.",
            "set spark.speculation=false.",
        )


def place(node: Node) -> str:
    """The form that a processor takes, for ``cues show --engine spark --queues DIR``."""
    if isinstance(node.fn, Stream):
        return "a streaming query, into the directory"
    if node.kind == "source":
        return "in the driver, into its machine's store; a feeder copies the queue into the directory"
    if node.at_most_once:
        return "on an executor, one task a step, which is never repeated"
    if node.kind == "sink" or node.side_effects:
        return "on an executor, one task a step: its effects happen in order"
    if node.options.batch == "frame":
        return "its plan, on all executors"
    if node.options.key is not None:
        if node.options.batch or node.mode == "join":
            return "on an executor, one task a step, which has the state"
        return "on all executors, by key; the state lies in the directory"
    if node.options.batch:
        return "on all executors, a batch each"
    return "on all executors; on one where the function asks for the processor's state"


class _SourceGraph(Graph):
    """A graph that may have no processors: the sources of the whole may all be streams of Spark."""

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
    sources = [
        processor
        for processor in graph.processors.values()
        if processor.kind == "source" and not isinstance(processor.fn, Stream)
    ]
    declared = {processor.id for processor in sources}
    sources += [Source(name) for name in plan.fed if name not in declared]
    found = _SourceGraph(
        graph.id,
        sources,
        store=graph.store,
        errors=graph.errors,
        strategy=graph.strategy,
        system=graph.system,
        durability=graph.durability,
    )
    found.directory = graph.directory
    named = set(found.plan().queues)
    found.queues = {name: options for name, options in plan.queues.items() if name in named}
    found.default_source = plan.source if plan.source in named else None
    return found
