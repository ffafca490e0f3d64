"""The work of an executor on a stretch: take some messages, call the function, stage the outputs, and again.

    source      take     the next messages of the inputs
    runner               the :class:`Runner` of the embedded engine
    staging     stage    the outputs and the error messages, which do not count before the driver commits them

A message is called as on every engine: with its retries, with the halves of a batch that failed, and with the stop of
a processor that has no error queue. :class:`StretchWork` has this part. A kind of job adds its source and its staging.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from cues.base import events
from cues.errors import Diverged, Fenced, Unsupported
from cues.records.provenance import Provenance
from cues.spark.executor import GivenUp, Job, StretchResult
from cues.steps.failure import Failure, error_message, words
from cues.steps.halving import Halving, halves
from cues.steps.hashes import Hasher
from cues.steps.imperative import Imperative
from cues.steps.outgoing import HasOptions
from cues.steps.process import Process
from cues.steps.results import Cut, Results
from cues.steps.runner import Runner
from cues.steps.state import Layer, StateTable
from cues.steps.taking import Taken


class ExecutorRunner(Runner):
    """The runner of a task."""


class StretchWork(ABC):
    """The calls for one stretch. They end after the stretch, or where the processor stops, or when they are given up.

    A place counts from the start of the stretch.
    """

    runner: Runner

    def __init__(self, job: Job, result: StretchResult) -> None:
        self.job = job
        self.result = result
        self.counters = events.Counters()
        self.size = job.node.options.batch_size
        """Most messages of the next call of :meth:`take`."""
        self.ended = False
        """True if no later message is called."""

    def run(self) -> None:
        """Do the work. The result has the reason if it is given up."""
        try:
            messages = self.begin()
            with contextlib.closing(self.runner):
                self._call(messages)
        except GivenUp as given:
            self.result.declined = str(given)
        except (Fenced, Diverged, Unsupported) as error:
            self.result.fatal = error
        self.result.retries = self.counters.retries

    @abstractmethod
    def begin(self) -> int:
        """Open the inputs, and make the runner with :meth:`calls`. Return the number of messages of the stretch."""

    @abstractmethod
    def take(self, place: int, count: int, halved: bool) -> Taken:
        """Take up to ``count`` messages from ``place``, perhaps again; ``halved``: after a call of more that failed."""

    @abstractmethod
    def stage(self, place: int, taken: Taken, results: Results, count: int) -> None:
        """Stage the outputs and the failures of the first ``count`` messages taken, which is not 0."""

    @abstractmethod
    def offset(self, place: int, taken: Taken, at: int) -> int:
        """The offset, in the range of the job, of the message ``at`` of those taken from ``place``."""

    def _call(self, messages: int) -> None:
        node, halving, place = self.job.node, Halving(), 0
        while place < messages and not self.ended:
            wanted = halving.bound(place, min(self.size, messages - place))
            taken = self.take(place, wanted, halving.at(place))
            count = taken.count
            results = self.runner.run(taken)
            # The driver commits after all calls, so only a function without effects outside is called in halves.
            if not node.side_effects and halves(node, count, results):
                halving.divide(place, place + count)
                continue
            stop = results.stop(node)
            if stop is not None:
                self.result.stop = self.offset(place, taken, stop), travelling(results.failures[stop])
                self.ended = True
                results, count = results.before(stop), stop
            if count:
                self.stage(place, taken, results, count)
            place += count

    def calls(
        self,
        generation: int,
        state: StateTable,
        targets: Mapping[str, HasOptions],
        layer: Layer | None = None,
        process_type: Callable[..., Process] = Process,
        runner_type: type[Runner] = ExecutorRunner,
        hasher: Hasher | None = None,
    ) -> None:
        """Make the runner. ``targets`` are the queues of the outputs, by binding.

        ``layer`` is the view of the state that the function gets from ``process``; ``hasher`` None: that of messages.
        """
        job, node, counters = self.job, self.job.node, self.counters
        imperative = Imperative(node.id, {}, {})
        hasher = hasher or Hasher(node.key, generation)
        process = process_type(node, job.system, hasher, job.epoch, job.store_id, layer, lambda: False, imperative)
        self.runner = runner_type(node, process, state, _sleep, lambda event: None, counters, targets, imperative)

    def error_of(self, taken: Taken, cut: Cut) -> tuple[dict[str, Any], Provenance]:
        """The error message for a run that failed, and its provenance."""
        assert cut.failure is not None
        messages = {piece.binding: piece.pristine_between(cut.start, cut.stop) for piece in taken.slices}
        provenance = taken.provenance().slice(cut.start, cut.stop).spread(1)
        return error_message(self.job.node, messages, cut.failure), provenance


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def travelling(failure: Failure) -> Failure:
    """The failure with its account as plain data, and with an exception that can be pickled."""
    account = failure.account()
    error: BaseException = failure.error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(failure.error).__name__}: {words(failure.error)}")
    return Failure(error, failure.attempts, account, failure.away)
