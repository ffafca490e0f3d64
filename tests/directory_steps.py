"""Steps over a shared directory in this process, without Spark and without Java.

    Context          the methods of a SparkContext that a step uses; tasks run one after another
    DriverRun        a driver with its stages, claimed in the order of the engine
    HostRun          the same on a machine with a store, in which sources run, and with the engine's feeder
    RandomDeaths     drivers that die or sleep at any access of the directory
    FaultyFiles      a directory that calls a function of the test before and after each access

Stages, tasks, ledgers, logs and files are those of the engine. Tasks and their results are pickled, as on their way to
an executor and back.

Not simulated: tasks that run at the same time, and tasks that Spark repeats.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import seeds
from pyspark import TaskContext

from cues import Graph, codec, testing
from cues.base import names
from cues.engine.assembly import assemble
from cues.engine.growth import Growth, divide
from cues.errors import CuesError, Diverged, Fenced
from cues.graphs.processor import Node
from cues.queues.partitioners import Router
from cues.spark.cluster import delays
from cues.spark.cluster.data import Writer, messages, pieces_of, read_rows
from cues.spark.cluster.directory import DataFile, PartitionLog, QueueDirectory
from cues.spark.cluster.driver import Driver
from cues.spark.cluster.engine import ClusterEngine, source_graph
from cues.spark.cluster.files import Files, LocalFiles
from cues.spark.cluster.frames import FrameStage
from cues.spark.cluster.ledger import Ledger
from cues.spark.cluster.maintenance import Maintenance, sweep
from cues.spark.cluster.publish import publish
from cues.spark.cluster.queries import FrameQuery
from cues.spark.cluster.step import Stage
from cues.spark.plans import QueryPlan
from cues.steps.feed import SourceStepper

TIME_US = 1_700_000_000_000_000
"""The time of messages that a test appends."""
Message = dict[str, Any]


# --- Spark ----------------------------------------------------------------------------------------


class Rdd:
    """The partitions of an RDD. Each method computes its result at once, and pickles it."""

    def __init__(self, parts: Iterable[Iterable[Any]]) -> None:
        self._parts = [pickle.loads(pickle.dumps(list(part))) for part in parts]

    def map(self, call: Callable[[Any], Any]) -> Rdd:
        return Rdd(map(call, part) for part in self._parts)

    def flatMap(self, call: Callable[[Any], Iterable[Any]]) -> Rdd:
        return Rdd([item for given in part for item in call(given)] for part in self._parts)

    def partitionBy(self, count: int, place: Callable[[Any], int]) -> Rdd:
        pairs = self.collect()
        return Rdd([pair for pair in pairs if place(pair[0]) % count == number] for number in range(count))

    def mapPartitionsWithIndex(self, call: Callable[[int, Iterator[Any]], Iterable[Any]]) -> Rdd:
        return Rdd(call(number, iter(part)) for number, part in enumerate(self._parts))

    def collect(self) -> list[Any]:
        return [item for part in self._parts for item in part]


class Context:
    """A SparkContext with this number of cores."""

    def __init__(self, cores: int) -> None:
        self.defaultParallelism = cores

    def parallelize(self, items: Iterable[Any], count: int) -> Rdd:
        found = list(items)
        edges = [len(found) * number // count for number in range(count + 1)]
        return Rdd(found[low:high] for low, high in itertools.pairwise(edges))

    def setJobGroup(self, *_: object) -> None: ...

    def setJobDescription(self, *_: object) -> None: ...

    def setLocalProperty(self, *_: object) -> None: ...

    def cancelJobGroup(self, *_: object) -> None: ...


class Frame:
    """A DataFrame: its partitions as record batches."""

    def __init__(self, parts: Sequence[list[pa.RecordBatch]], schema: Any = None) -> None:
        self._parts = parts
        self.schema = schema

    def mapInArrow(self, call: Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]], schema: Any) -> Frame:
        parts = []
        for number, part in enumerate(self._parts):
            task = SimpleNamespace(partitionId=lambda: number, attemptNumber=lambda: 0)
            with mock.patch.object(TaskContext, "get", lambda task=task: task):
                parts.append(list(call(iter(part))))
        return Frame(parts, schema)

    def collect(self) -> list[Any]:
        rows = [row for part in self._parts for batch in part for row in batch.to_pylist()]
        return [SimpleNamespace(**row) for row in rows]


class Session:
    """A SparkSession. Its ``conf`` has no settings, so the keeper merges :data:`MERGE_FILES` files."""

    def __init__(self, cores: int) -> None:
        self.sparkContext = Context(cores)
        self.conf: dict[str, str] = {}

    def range(self, low: int, high: int, step: int, parts: int) -> Frame:
        edges = [low + (high - low) * number // parts for number in range(parts + 1)]
        return Frame([[pa.record_batch({"id": range(low, high)})] for low, high in itertools.pairwise(edges)])


# --- the engine -----------------------------------------------------------------------------------


class SizedStage(Stage):
    """A stage whose steps have the sizes that a test wants, and a task for each core."""

    size: Callable[[], int] = staticmethod(lambda: 10_000)

    def _size(self) -> int:
        batch = self.node.options.batch_size if self.node.options.batch else 1
        return max(1, self.size() // batch) * batch

    def _tasks(self, count: int) -> int:
        return min(count, int(self.driver.context.defaultParallelism))


class SizedFrameStage(FrameStage, SizedStage):
    """A frame with steps of such sizes."""


class DriverRun:
    """A driver that has opened the queues of a graph. :meth:`claim` makes it the owner of the processors."""

    def __init__(
        self,
        files: Files,
        graph: Graph,
        cores: int = 1,
        size: Callable[[], int] = lambda: 10_000,
        queries: dict[str, QueryPlan] | None = None,
    ) -> None:
        """``queries`` are the frames that keep state."""
        self.files = files
        self.events: list[Any] = []
        self.driver = Driver(Session(cores), files, graph.id, None, self.events.append, lambda seconds: False)
        self.queues = self.driver.queues
        self._open_queues(graph)
        self._size = size
        self._queries = queries or {}
        self.stages: list[Any] = []
        self.take_in(divide(graph.plan(), self.queues))
        self.maintenance = Maintenance(self.driver, self.stages)
        self.growth = Growth(graph.plan(), self.queues, divide(graph.plan(), self.queues), self.events.append)

    def take_in(self, nodes: Sequence[Node]) -> list[Any]:
        """Add stages for these units."""
        stages = [self._stage(node) for node in nodes if node.kind != "source"]
        for stage in stages:
            stage.size = self._size
        self.stages += stages
        return stages

    def _stage(self, node: Node) -> Any:
        if node.id in self._queries:
            return FrameQuery(self.driver, node, self._queries[node.id])
        return (SizedFrameStage if node.kind == "frame" else SizedStage)(self.driver, node)

    def _open_queues(self, graph: Graph) -> None:
        for name, options in graph.plan().queues.items():
            self.queues[name] = QueueDirectory(self.files, name, options)
        for directory in self.queues.values():
            directory.own(graph.id)

    @property
    def stage(self) -> Any:
        """The only stage."""
        (stage,) = self.stages
        return stage

    def claim(self) -> DriverRun:
        """Own every processor, and sweep, as the engine does before it starts its threads."""
        for stage in self.stages:
            stage.claim()
        self.sweep()
        return self

    def sweep(self) -> None:
        """Read the logs, and delete what earlier drivers have left, after the last claim."""
        for directory in self.queues.values():
            directory.load()
        sweep(self.driver, self.stages)

    def feed(self, queue: str, given: Sequence[Message], size: Callable[[], int] = lambda: 1000) -> DriverRun:
        """Append the messages that the queue does not have yet, in files of ``size()`` messages, as a feeder does.

        They go to the partitions of their keys.
        """
        directory = self.queues[queue]
        options = directory.options
        placed = Router(options.partitions, options.key, options.partitioner).place(given)
        ledger = Ledger(self.files, f"{self.driver.graph}.sources.feed", self.driver.owner)
        self.driver.claim(ledger, lambda last: last.positions if last is not None else {})
        for partition in range(options.partitions):
            share = [message for message, place in zip(given, placed) if place == partition]
            id = names.log_id(queue, partition)
            while (at := ledger.now.positions.get(id, ("", 1))[1]) <= len(share):
                some = share[at - 1 : at - 1 + size()]
                file = data_file(directory, ledger.processor, ledger.now.number + 1, some, partition)
                positions = ledger.now.positions | {id: ("", at + len(some))}
                publish(ledger, {directory: [replace(file, first=at)]}, positions=positions)
        return self

    def run(self) -> DriverRun:
        """Let the stages make steps in turn until all are idle."""
        while sum(stage.step() for stage in self.stages):
            pass
        return self

    def messages(self, queue: str) -> list[Message]:
        return messages_of(self.queues[queue])


class HostRun(DriverRun):
    """A driver on a machine with the store ``store``. :meth:`close` ends it, also after its death."""

    def __init__(
        self, files: Files, graph: Graph, store: Path, cores: int = 1, size: Callable[[], int] = lambda: 10_000
    ) -> None:
        """Raises the errors of the engine's start; then nothing is open."""
        self._store = store
        super().__init__(files, graph, cores, size)

    def _open_queues(self, graph: Graph) -> None:
        engine = ClusterEngine(graph, "", None, None, {}, store=self._store, accept_topology=False, take_over=False)
        engine.driver = self.driver
        here = source_graph(graph, engine.plan)
        self.assembly = assemble(here, self._store, before_claim=engine._open_queues)
        self.sources = [stepper for stepper in self.assembly.steppers if isinstance(stepper, SourceStepper)]
        (self.feeder,) = engine.feeders

    def pull(self, source: SourceStepper, count: int) -> bool:
        """Let a source yield ``count`` messages, and commit them. Return False if it yields nothing more."""
        source.feed.pull(count)
        return not source.ended and source.step() == "committed"

    def run(self) -> DriverRun:
        """Let sources, feeder and stages work in turn until all are idle."""
        while sum([*(self.pull(source, 100) for source in self.sources), self.feeder.step()]):
            pass
        return super().run()

    def close(self) -> None:
        self.assembly.close()


def data_file(
    directory: QueueDirectory, writer: str, record: int, given: Sequence[Message], partition: int = 0
) -> DataFile:
    """A data file with these messages, which is in no log yet."""
    columns = directory.columns
    target = Writer(directory.files, directory.folder, writer, record, TIME_US, columns, partition)
    target.add([codec.pack(message) for message in given], [None] * len(given), None)
    file = target.close()
    assert file is not None
    return file


def messages_of(directory: QueueDirectory) -> list[Message]:
    """The messages of a queue, partition by partition. Their indices have no gap."""
    return [message for log in directory.logs for message in messages_of_log(log)]


def messages_of_log(log: PartitionLog) -> list[Message]:
    """The messages of a partition. Their indices have no gap."""
    pieces = pieces_of(log.directory.folder, log.live, log.first, log.next)
    rows = list(messages(log.directory.files, pieces))
    assert [index for index, *_ in rows] == list(range(log.first, log.next))
    return [message for *_, message in rows]


def metadata_of(directory: QueueDirectory) -> list[Message]:
    """The metadata of the messages of a queue."""
    (log,) = directory.logs
    came = read_rows(directory.files, pieces_of(directory.folder, log.live, log.first, log.next)).provenance
    return [came.at(offset) for offset in range(came.count)]


def stored(directory: QueueDirectory) -> set[str]:
    """The names of the data files on the disk."""
    return {name for name in directory.files.listed(directory.folder) if name.endswith(".parquet")}


# --- faults ---------------------------------------------------------------------------------------

_opened: dict[str, FaultyFiles] = {}


def _found(url: str) -> FaultyFiles:
    return _opened[url]


class FaultyFiles(LocalFiles):
    """A directory on a mount. Each access calls :attr:`interrupt`, in tasks too.

    ``interrupt("put", name)`` is called before a put, and ``interrupt("was put", name)`` after it; the same with
    ``create`` and ``was created``, ``move`` and ``was moved``. The others (``names``, ``delete``, ``read``) are
    announced once.
    """

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.interrupt: Callable[[str, str], None] = lambda access, name: None
        _opened[self.url] = self

    def __reduce__(self) -> Any:
        return _found, (self.url,)

    def put(self, name: str, data: bytes) -> bool:
        self.interrupt("put", name)
        result = super().put(name, data)
        self.interrupt("was put", name)
        return result

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Any]:
        self.interrupt("create", name)
        with super().create(name) as target:
            yield target
        self.interrupt("was created", name)

    def move(self, names: Mapping[str, str]) -> None:
        for old, new in names.items():
            self.interrupt("move", new)
            super().move({old: new})
            self.interrupt("was moved", new)

    def names(self, folder: str) -> list[str]:
        self.interrupt("names", folder)
        return super().names(folder)

    def delete(self, name: str) -> None:
        self.interrupt("delete", name)
        super().delete(name)

    def read(self, name: str) -> bytes | None:
        self.interrupt("read", name)
        return super().read(name)


# --- random deaths --------------------------------------------------------------------------------


class Died(BaseException):
    """The driver and its tasks are gone."""


class Life:
    """A driver of the graph, from its start until it has nothing to do."""

    def __init__(self, run: RandomDeaths) -> None:
        self.turns = run.turns()
        self.alone = True
        """True if no other driver has lived at the same time."""


class RandomDeaths:
    """Drivers of one graph. Each dies at a random access of the directory, or sleeps there.

    While a driver sleeps, another one starts or continues, and makes some turns. So several drivers may write, until
    they find that they are fenced.
    """

    ENDS = 12

    def graph(self) -> Graph:
        """The graph. Its source is the queue ``src``."""
        raise NotImplementedError

    def given(self) -> list[Message]:
        """All messages of the queue ``src``."""
        raise NotImplementedError

    def compare(self, driver: DriverRun) -> None:
        """Compare every queue with what it must hold."""
        raise NotImplementedError

    def between(self, driver: DriverRun) -> None:
        """Act between two rounds of the stages."""

    def waits(self, driver: DriverRun) -> bool:
        """Return True if a later round has something to do, though this one had not."""
        return False

    def __init__(self, seed: int, files: FaultyFiles) -> None:
        print(f"{seeds.VARIABLE}={seed}")
        self.chance = random.Random(seed)
        self.files = files
        self._ends = 0
        self._lives: list[Life] = []
        self._awake: list[Life] = []
        """The drivers in the middle of a turn. All but the last one sleep."""
        self._count_down()
        files.interrupt = self._interrupt

    def finish(self) -> None:
        """Run to the end, and compare every queue with a list."""
        ended = False
        while not ended:
            life = self.chance.choice(self._lives) if self._lives else self._start()
            ended = self._turn(life)
        while self._lives:
            self._turn(self._lives[0])
        self.files.interrupt = lambda access, name: None
        self.compare(DriverRun(self.files, self.graph()))

    def turns(self) -> Iterator[None]:
        """The life of a driver. It may be fenced after each turn, and in it."""
        size = lambda: self.chance.randint(1, 25)  # noqa: E731
        driver = DriverRun(self.files, self.graph(), self.chance.choice((1, 2)), size)
        yield
        driver.feed("src", self.given(), size)
        for stage in driver.stages:
            yield
            stage.claim()
        yield
        driver.sweep()
        driver.maintenance.merge_files = 5
        busy = True
        while busy:
            busy = False
            for stage in self.chance.sample(driver.stages, len(driver.stages)):
                yield
                busy |= stage.step()
            self.between(driver)
            busy |= self.waits(driver)
            directory = self.chance.choice(list(driver.queues.values()))
            driver.maintenance.merge(self.chance.choice(directory.logs))
            if self.chance.random() < 0.05:
                directory.checkpoint()

    def _start(self) -> Life:
        life = Life(self)
        self._lives.append(life)
        if len(self._lives) > 1:
            for each in self._lives:
                each.alone = False
        return life

    def _turn(self, life: Life) -> bool:
        """Let a driver make a turn. Return True if it had nothing to do any more."""
        self._awake.append(life)
        try:
            next(life.turns)
        except (StopIteration, Died, CuesError) as error:
            self._lives.remove(life)
            # Of several drivers, some are fenced, or miss files that their successor has deleted.
            if isinstance(error, CuesError) and (life.alone or not isinstance(error, (Fenced, Diverged))):
                raise
            return isinstance(error, StopIteration)
        finally:
            self._awake.pop()
        return False

    def _count_down(self) -> None:
        self._left = self.chance.randint(1, 250) if self._ends < self.ENDS else 0

    def _interrupt(self, access: str, name: str) -> None:
        if access == "read" or not self._left:
            return
        self._left -= 1
        if self._left:
            return
        self._ends += 1
        self._count_down()
        if self.chance.random() < 0.5:
            raise Died
        asleep = [life for life in self._lives if life not in self._awake]
        other = self.chance.choice([*asleep, None])
        life = other or self._start()
        for _ in range(self.chance.randint(1, 20)):
            if life in self._lives:
                self._turn(life)


class TimedDeaths(RandomDeaths):
    """With a clock that moves between the rounds, while messages or timers wait."""

    COUNT = 60

    def __init__(self, seed: int, files: FaultyFiles, hands: testing.Clock) -> None:
        super().__init__(seed, files)
        self.hands = hands

    def between(self, driver: DriverRun) -> None:
        if self.chance.random() < 0.5:
            self.hands.advance(self.chance.choice((1, 10, 30)))

    def waits(self, driver: DriverRun) -> bool:
        return any(stage.due_ns < delays.NEVER_NS for stage in driver.stages)
