"""Spark jobs that call a user's function over a range of messages: the parts that every kind of job has in common.

    driver                             executor
    JobGroup         the jobs of a processor, which can be cancelled
    pack_job         ──▶  pickled  ──▶  unpack_job    once in a process
    Stretch          ──▶  pickled  ──▶  StretchWork   reads, calls, stages (work.py)
    up_to_stop       ◀──  pickled  ◀──  StretchResult

A range is cut into stretches, one for each task. Two kinds of jobs differ only in where an executor reads a stretch and
in where it stages the outputs: queues of a store (pages.py), and a shared directory (cluster/tasks.py).
"""

from __future__ import annotations

import contextlib
import gc
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import xxhash

from cues.base.data import dataclass
from cues.errors import CuesError, GraphError, ProcessorStopped
from cues.graphs.processor import Node
from cues.spark.failures import advice, in_short
from cues.steps.calls import Interrupted
from cues.steps.failure import Failure, words

JOBS_MAX: Final = 64
"""Most jobs that a worker process keeps unpickled, one for each processor. More are unpickled again."""


@dataclass(frozen=True)
class Job:
    """The data of a processor that stay the same from step to step."""

    node: Node
    system: Any
    epoch: int
    store_id: str


class Stretch(NamedTuple):
    """Consecutive messages of a job's range, for one task."""

    number: int
    offset: int
    """Offset of its first message in the range."""
    messages: int
    inputs: tuple[Any, ...]
    """The place of the messages on each input: what the source of this kind of job reads."""


@dataclass(kw_only=True)
class StretchResult:
    """The part of an executor's result that every kind of job has. Offsets are those of the whole range."""

    number: int = 0
    """The number of the stretch."""
    retries: int = 0
    declined: str = ""
    """The reason why the executor gave the stretch up, and the driver must act. The results are then ignored.

    - "state": the function asked for state that the executor does not have.
    - "purged": some messages are purged from the queue.
    - "failures": more messages failed than a result can hold.
    - "delays": some messages may have a time of delivery, and the driver holds those that are not due.
    - "again": Spark repeated a task that must not be repeated.
    """
    fatal: BaseException | None = None
    stop: tuple[int, Failure] | None = None
    """The offset at which the processor stops, and the failure: no error queue takes it."""


R = TypeVar("R", bound=StretchResult)


class GivenUp(BaseException):
    """The executor gives a stretch up, for a reason of :attr:`StretchResult.declined`.

    It is not an ``Exception``, so that neither the user's handlers nor retries catch it as a failure.
    """


# --- in the driver ------------------------------------------------------------------------------


def edges_of(count: int, size: int, tasks: int, most: int) -> list[int]:
    """The offsets of the edges of stretches. There is one for every task, or more with at most about ``most`` messages.

    No batch of ``size`` is cut.
    """
    stretch = -(-min(most, -(-count // tasks)) // size) * size
    return [*range(0, count, stretch), count]


def up_to_stop(results: Sequence[R]) -> tuple[list[R], tuple[int, Failure] | None]:
    """The results that count, and the first offset at which the processor stops, with the failure."""
    stops = [(result.stop, result.number) for result in results if result.stop is not None]
    if not stops:
        return list(results), None
    stop, last = min(stops, key=lambda found: found[0][0])
    return [result for result in results if result.number <= last], stop


def shown_ranges(ranges: Mapping[str, tuple[int, int]]) -> str:
    """Ranges by tailer id for people: ``g.f.in [1997, 2001)``, the second index not included."""
    return ", ".join(f"{tailer} [{low}, {high})" for tailer, (low, high) in ranges.items())


class JobGroup:
    """The Spark jobs of one processor."""

    def __init__(self, context: Any, processor: str, name: str) -> None:
        self._context = context
        self._processor = processor
        self._name = name
        self.cancelled = False

    @contextlib.contextmanager
    def step(self, ranges: Mapping[str, tuple[int, int]]) -> Iterator[None]:
        """Run a step over ranges by tailer id. Spark's page shows its jobs as ``g.f: g.f.in [1997, 2001)``.

        An exception of Spark is raised as :class:`ProcessorStopped`, or as :class:`Interrupted` after :meth:`cancel`.
        """
        self.describe(ranges)
        try:
            yield
        except (CuesError, Interrupted):
            raise
        except Exception as error:
            raise self.failed(error, ranges) from None

    def describe(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Name the jobs that this thread starts from now on."""
        self._context.setJobGroup(self._name, f"{self._processor}: {shown_ranges(ranges)}", True)
        self._context.setLocalProperty("spark.scheduler.pool", self._processor)

    def failed(self, error: Exception, ranges: Mapping[str, tuple[int, int]]) -> Exception:
        """The error of a step that Spark could not do."""
        if self.cancelled:
            return Interrupted()
        return ProcessorStopped(
            f"{self._processor} stopped: Spark could not do its step over {shown_ranges(ranges)}: {in_short(error)}.",
            advice(error, "start again when the cause is gone; it continues after its last commit."),
            processor=self._processor,
        )

    def cancel(self) -> None:
        """Cancel the jobs that run. Executors end the calls."""
        self.cancelled = True
        with contextlib.suppress(Exception):  # the session was stopped, and its jobs with it
            self._context.cancelJobGroup(self._name)


def is_of_spark(error: Exception) -> bool:
    """True if Spark failed, and not the user's function or plan: a worker was killed, an executor lost, Java ended.

    pyspark has a class of its own for each error of functions and plans. It leaves the others as py4j raises them.
    """
    from py4j.protocol import Py4JError

    return isinstance(error, Py4JError)


def pack_job(job: Job) -> bytes:
    """Pickle a job for executors. Raises :class:`GraphError`, with its name, if an object cannot be pickled."""
    try:
        return _dumps(job)
    except Exception:
        require_travel(job.node, job.system)
        raise


class Luggage(NamedTuple):
    """An object of a processor on its way to executors."""

    node: str
    what: str
    packed: bytes


def require_travel(node: Node, system: Any) -> list[Luggage]:
    """Return the objects of a processor, pickled. Raises :class:`GraphError` if one cannot be sent to executors."""
    packed = []
    for what, value in {
        "function": node.fn,
        "schema": node.schemas,
        "opts": node.options.opts,
        "system": system,
    }.items():
        try:
            packed.append(Luggage(node.id, what, _dumps(value)))
        except Exception as error:
            raise GraphError(
                f"The {what} of {node.id} cannot be sent to Spark's executors"
                f" ({type(error).__name__}: {words(error)}).",
                "open connections and files inside the function, not beside it.",
                processor=node.name,
            ) from error
    return packed


def require_arrival(context: Any, luggage: Sequence[Luggage]) -> None:
    """Raise :class:`GraphError` if an executor cannot load the objects of the processors."""
    tasks = context.parallelize([luggage], 1).map(_unloadable)
    for node, what, why in tasks.first() if luggage else ():
        raise GraphError(
            f"The {what} of {node} cannot be loaded on Spark's executors: {why}.",
            "put the classes and functions that it uses into a module beside the graph file, or install them on every"
            " machine.",
            processor=node.rpartition(".")[2],
        )


def _dumps(value: Any) -> bytes:
    from pyspark import cloudpickle

    return cloudpickle.dumps(value)  # type: ignore[no-any-return, no-untyped-call]


# --- in an executor -----------------------------------------------------------------------------


def _unloadable(luggage: Sequence[Luggage]) -> list[tuple[str, str, str]]:
    """The processor, the kind and the reason, for each object that this process cannot load."""
    failed = []
    for node, what, packed in luggage:
        try:
            pickle.loads(packed)
        except Exception as error:
            why = error.message if isinstance(error, CuesError) else f"{type(error).__name__}: {words(error)}"
            failed.append((node, what, why.rstrip(".")))
    return failed


_jobs: dict[bytes, Any] = {}


def unpack_job(packed: bytes) -> Any:
    """The job, unpickled once in each process."""
    key = xxhash.xxh3_128_digest(packed)
    if key not in _jobs:
        if len(_jobs) >= JOBS_MAX:
            _jobs.clear()
        _jobs[key] = pickle.loads(packed)
        if len(_jobs) == 1 and _is_worker():
            leave_out_of_collections()
    return _jobs[key]


def _is_worker() -> bool:
    from pyspark import TaskContext

    return TaskContext.get() is not None


def leave_out_of_collections() -> None:
    """Let the garbage collector ignore what is there now: modules, functions, the first job.

    Spark makes a full collection in a worker after each task. With these objects it takes 25 ms.
    """
    gc.collect()
    gc.freeze()
