"""Steps over a shared directory in this process, without Spark and without Java.

    Context          the methods of a SparkContext that a step uses; tasks run one after another
    DriverRun        a driver with its stages, claimed in the order of the engine
    FaultyFiles      a directory that calls a function of the test before and after each access

Stages, tasks, ledgers, logs and files are those of the engine. Tasks and their results are pickled, as on their way to
an executor and back.

Not simulated: tasks that run at the same time, and tasks that Spark repeats.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
from pyspark import TaskContext

from cues import Graph, codec
from cues.spark.cluster.data import Writer, messages, pieces_of, read_rows
from cues.spark.cluster.directory import DataFile, QueueDirectory
from cues.spark.cluster.driver import Driver
from cues.spark.cluster.files import Files, LocalFiles
from cues.spark.cluster.frames import FrameStage
from cues.spark.cluster.ledger import Ledger
from cues.spark.cluster.maintenance import Maintenance, sweep
from cues.spark.cluster.publish import publish
from cues.spark.cluster.step import Stage

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

    def __init__(self, files: Files, graph: Graph, cores: int = 1, size: Callable[[], int] = lambda: 10_000) -> None:
        plan = graph.plan()
        self.files = files
        self.events: list[Any] = []
        self.driver = Driver(Session(cores), files, graph.id, None, self.events.append, lambda seconds: False)
        self.queues = self.driver.queues
        for name, options in plan.queues.items():
            self.queues[name] = QueueDirectory(files, name, options)
        for directory in self.queues.values():
            directory.own(graph.id)
        nodes = [node for node in plan.running if node.kind != "source"]
        self.stages = [(SizedFrameStage if n.options.batch == "frame" else SizedStage)(self.driver, n) for n in nodes]
        for stage in self.stages:
            stage.size = size
        self.maintenance = Maintenance(self.driver, self.stages)

    @property
    def stage(self) -> SizedStage:
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
        """Append the messages that the queue does not have yet, in files of ``size()`` messages, as a feeder does."""
        ledger = Ledger(self.files, f"{self.driver.graph}.{queue}.feed", self.driver.owner)
        self.driver.claim(ledger, lambda last: last.positions if last is not None else {queue: ("", 1)})
        while (at := ledger.now.positions[queue][1]) <= len(given):
            some = given[at - 1 : at - 1 + size()]
            file = data_file(self.queues[queue], ledger.processor, ledger.now.number + 1, some)
            publish(ledger, {self.queues[queue]: [file]}, at, positions={queue: ("", at + len(some))})
        return self

    def run(self) -> DriverRun:
        """Let the stages make steps in turn until all are idle."""
        while sum(stage.step() for stage in self.stages):
            pass
        return self

    def messages(self, queue: str) -> list[Message]:
        return messages_of(self.queues[queue])


def data_file(directory: QueueDirectory, writer: str, record: int, given: Sequence[Message]) -> DataFile:
    """A data file with these messages, which is in no log yet."""
    target = Writer(directory.files, directory.folder, writer, record, TIME_US, directory.columns)
    target.add([codec.pack(message) for message in given], [None] * len(given), None)
    file = target.close()
    assert file is not None
    return file


def messages_of(directory: QueueDirectory) -> list[Message]:
    """The messages of a queue. Their indices have no gap."""
    pieces = pieces_of(directory.folder, directory.live, directory.first, directory.next)
    rows = list(messages(directory.files, pieces))
    assert [index for index, *_ in rows] == list(range(directory.first, directory.next))
    return [message for *_, message in rows]


def metadata_of(directory: QueueDirectory) -> list[Message]:
    """The metadata of the messages of a queue."""
    came = read_rows(directory.files, pieces_of(directory.folder, directory.live, directory.first, directory.next)).came
    return [came.at(offset) for offset in range(came.count)]


def stored(directory: QueueDirectory) -> set[str]:
    """The names of the data files on the disk."""
    return {name for name in directory.files.names(directory.folder) if name.endswith(".parquet")}


# --- faults ---------------------------------------------------------------------------------------

_opened: dict[str, FaultyFiles] = {}


def _found(url: str) -> FaultyFiles:
    return _opened[url]


class FaultyFiles(LocalFiles):
    """A directory on a mount. Each access calls :attr:`interrupt`, in tasks too.

    ``interrupt("put", name)`` is called before a put, and ``interrupt("was put", name)`` after it; the same with
    ``create`` and ``was created``. The others (``names``, ``delete``, ``read``) are announced once.
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

    def names(self, folder: str) -> list[str]:
        self.interrupt("names", folder)
        return super().names(folder)

    def delete(self, name: str) -> None:
        self.interrupt("delete", name)
        super().delete(name)

    def read(self, name: str) -> bytes | None:
        self.interrupt("read", name)
        return super().read(name)
