"""The executor's side of Spark jobs: the parts that every kind of job has in common.

    driver                             executor
    pack_job         ──▶  pickled  ──▶  unpack_job    once in a process
                                        runner_of     the same Runner as in the embedded engine
    PartReport       ◀──  pickled  ◀──  reporting     the result of a part, or the reason why it was given up

Three kinds of jobs use it: a step over a store (remote.py), a long stretch of a queue (chunk.py), and a step
over Parquet files (cluster/tasks.py).
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import xxhash

from cues.base import events
from cues.errors import Diverged, Fenced, GraphError, Unsupported
from cues.graphs.processor import Node
from cues.queues.options import QueueOptions
from cues.steps.failure import Failure, words
from cues.steps.hashes import Hasher
from cues.steps.imperative import Imperative
from cues.steps.process import Process
from cues.steps.runner import Runner
from cues.steps.state import Layer, StateTable

JOBS_MAX: Final = 64
"""Jobs that a worker process keeps unpickled, one for each processor. Beyond that it unpickles them again."""


class Job(Protocol):
    """The data of a processor that stay the same from step to step."""

    @property
    def node(self) -> Node: ...

    @property
    def system(self) -> Any: ...

    @property
    def epoch(self) -> int: ...

    @property
    def store_id(self) -> str: ...


@dataclass(kw_only=True)
class PartReport:
    """The part of an executor's answer that every kind of job has."""

    retries: int = 0
    declined: str = ""
    """The reason why the executor gave the part up, and the driver must act. Nothing else in the answer counts then.

    - "state": the function asked for state that the executor does not have.
    - "purged": the messages are purged from the queue, and the driver has a copy.
    - "failures": more messages failed than an answer can hold.
    - "again": Spark repeated a task that must not be repeated.
    """
    fatal: BaseException | None = None


class NeedsState(BaseException):
    """The function asked for state that the executor does not have.

    It is not an ``Exception``, so that neither the user's handlers nor retries take it for a failure.
    """


# --- in the driver ------------------------------------------------------------------------------


def pack_job(job: Job) -> bytes:
    """Pickle a job for executors. Raises :class:`GraphError` with the name of the object that cannot be pickled."""
    from pyspark import cloudpickle

    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    try:
        return dumps(job)
    except Exception:
        require_travel(job.node, job.system)
        raise


def require_travel(node: Node, system: Any) -> None:
    """Raise :class:`GraphError` where an object of a processor cannot be sent to executors."""
    from pyspark import cloudpickle

    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    for what, value in (("function", node.fn), ("opts", node.options.opts), ("system", system)):
        try:
            dumps(value)
        except Exception as error:
            raise GraphError(
                f"The {what} of {node.id} cannot be sent to Spark's executors"
                f" ({type(error).__name__}: {words(error)}).",
                "open connections and files inside the function, not beside it.",
                processor=node.name,
            ) from error


# --- in an executor -----------------------------------------------------------------------------


_jobs: dict[bytes, Any] = {}


def unpack_job(packed: bytes) -> Any:
    """The job, unpickled once in each process."""
    key = xxhash.xxh3_128_digest(packed)
    if key not in _jobs:
        if len(_jobs) >= JOBS_MAX:
            _jobs.clear()
        _jobs[key] = pickle.loads(packed)
    return _jobs[key]


def runner_of(
    job: Job,
    generation: int,
    state: StateTable,
    options_of: Callable[[str], QueueOptions],
    layer: Layer | None = None,
    process_type: type[Process] = Process,
    runner_type: type[Runner] = Runner,
) -> tuple[Runner, events.Counters]:
    """The runner that calls the job's function, and its counters.

    ``layer`` is the view of the state that the function gets from ``process``.
    """
    counters = events.Counters()
    imperative = Imperative(job.node.id, {}, {})
    hasher = Hasher(job.node.id, generation)
    process = process_type(job.node, job.system, hasher, job.epoch, job.store_id, layer, lambda: False, imperative)
    runner = runner_type(job.node, process, state, _pause, lambda event: None, counters, options_of, imperative)
    return runner, counters


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextlib.contextmanager
def reporting(report: PartReport) -> Iterator[None]:
    """Put the reason into the report where the block gives its part up."""
    try:
        yield
    except NeedsState:
        report.declined = "state"
    except (Fenced, Diverged, Unsupported) as error:
        report.fatal = error


def travelling(failure: Failure) -> Failure:
    """The failure with its account as plain data, and with an exception that can be pickled."""
    account = failure.account()
    error: BaseException = failure.error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(failure.error).__name__}: {words(failure.error)}")
    return Failure(error, failure.attempts, account)
