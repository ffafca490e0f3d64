"""The sampler of a run: every ten seconds, the counts of each processor go to the history of the graph.

    counters now - counters before ──▶ Sample ──▶ history-<graph>       cues/engine/history.py
    positions ──▶ lag ────────────────▶

One thread of the process that started the graph samples, also for workers and for Spark, whose counters that process
has. A sample reads positions in short transactions and commits nothing. A processor that did nothing since the last
sample, and has no lag, gets no sample; so an idle graph writes nothing. A run that is over within a second leaves none.

Wall time says in which period a sample is, the monotonic clock how long it took.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from cues.base import clock, logs
from cues.base.events import Counters
from cues.engine.status import processor_of

if TYPE_CHECKING:
    from cues.engine.history import History, Sample
    from cues.graphs.running import Running

EVERY_S: Final = 10.0
"""Seconds between two samples, which are made just after the periods of the finest ring end."""
_SHORT_S: Final = 1.0


class Sampler:
    """Samples a run, in a thread, from :meth:`start` to :meth:`end`."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cues sampler", daemon=True)
        self._began_at = self._sampled_at = time.monotonic()
        self._before: dict[str, Counters] = {}
        self._history: History | None = None

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Make the last sample. The steps have ended, and the stores are still open."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        if time.monotonic() - self._began_at >= _SHORT_S:
            self._sample()
        if self._history is not None:
            self._history.close()

    def _run(self) -> None:
        if self._over.wait(_SHORT_S):  # also a short run may be there when a period ends
            return
        while not self._over.wait(EVERY_S - clock.now_ns() / 1e9 % EVERY_S + 0.01):
            self._sample()

    def _sample(self) -> None:
        from cues.engine import history  # after the start, which it would make slower
        from cues.errors import CuesError

        try:
            if self._history is None:
                path = history.path_of(self._running.store.directory, self._running.plan.id)
                self._history = history.History(path, write=True)
            now = time.monotonic()
            seconds, self._sampled_at = now - self._sampled_at, now
            middle = clock.now_ns() / 1e9 - min(seconds, EVERY_S) / 2
            for processor, sample in self._samples(seconds):
                self._history.add(processor, middle, sample)
        except Exception as error:  # a full disk, a store that was removed: a run does not need its history
            if not isinstance(error, (OSError, CuesError)):
                log, id = logs.logger("cues"), self._running.plan.id
                log.warning("the history of %s lacks a sample: %s", id, error, exc_info=True)

    def _samples(self, seconds: float) -> list[tuple[str, Sample]]:
        """The samples of the processors that did something, or that messages wait for."""
        from cues.engine.history import Sample

        found, lags = [], dict[str, int]()
        for unit, lag in lags_of(self._running).items():
            lags[processor_of(unit)] = lags.get(processor_of(unit), 0) + lag
        for processor, counters in self._running.counters().items():
            counters = counters.copy()  # a step adds to it meanwhile
            before = self._before.get(processor, Counters())
            if counters.taken < before.taken or counters.steps < before.steps:
                before = Counters()  # it was started again
            self._before[processor] = counters
            kept = counters.latency.since(before.latency).quantiles(1e-6) or {}
            away_s = counters.away_s - before.away_s
            if counters.away:  # an outage counts when it is over; until then it is the time of the sample
                away_s = max(away_s, seconds)
            sample = Sample(
                counters.taken - before.taken,
                max(0, counters.written - before.written),  # a query of frames that failed takes its rows back
                max(0, counters.failed - before.failed),
                lags.get(processor, 0),
                kept.get("p50"),
                kept.get("p99"),
                min(away_s, seconds),
            )
            if any((sample.taken, sample.written, sample.failed, sample.lag, sample.away_s)):
                found.append((processor, sample))
        return found


def lags_of(running: Running) -> dict[str, int]:
    """The messages that wait for each unit of a run; 0 for a source."""
    from cues.engine import standing

    shared = running.shared
    if shared is not None:
        return {unit.id: shared.lag(unit.id) for unit in running.standings()}
    return {
        unit.id: sum(tailer.lag or 0 for tailer in standing.tailers(running.store, unit.id))
        for unit in running.standings()
    }
