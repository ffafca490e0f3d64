"""A run of a graph, as an operator asks for it and sees it: the options that fit together, and where its queues are.

RunRequest          what was asked for; refused if it cannot be meant
queues_of(running)  the queues of a run, in the stores of this machine or in a directory
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cues.base.data import dataclass
from cues.base.events import Counters
from cues.base.names import ProcessorId
from cues.engine import record, standing
from cues.engine.status import processor_of
from cues.errors import InvalidArgument
from cues.graphs.graphfile import shown
from cues.graphs.plan import Plan
from cues.graphs.running import QueueProgress, Running, Shared, UnitStatus
from cues.operate.refused import Refused
from cues.overrides import override
from cues.queues.base import views_of
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.steps.error_records import ErrorLog, ErrorRows

_STATES: Final = ("ended", "running", "paused", "stopped")


@dataclass(frozen=True)
class RunRequest:
    """The options of a run that exclude one another. Raises :class:`Refused` for those that do not fit together."""

    engine: str
    master: str | None = None
    queues: str | None = None
    backfill: bool = False
    workers: str | None = None
    fresh: bool = False
    idle_exit: float | None = None
    replicate: str | None = None
    reload: bool = False
    dry_run: bool = False
    conf: tuple[str, ...] = ()
    """Settings of Spark, as ``NAME=VALUE``."""

    def __post_init__(self) -> None:
        sparks = {"--master": self.master, "--queues": self.queues, "--backfill": "" if self.backfill else None}
        sparks |= {"--conf": next((text.partition("=")[0] for text in self.conf), None)}  # a value may be a secret
        given = [f"{name} {value}".strip() for name, value in sparks.items() if value is not None]
        is_spark, is_shared = self.engine == "spark", self.queues is not None
        backfills = "--backfill processes the messages that are on the queues"
        one_of_two = "give one of the two options."
        with_queues = "--backfill processes the queues of a store; with --queues steps are long anyway."
        embedded = "--workers are processes of the embedded engine."
        for refused, message, hint in (
            (given and not is_spark, f"{''.join(given[:1])} is an option of Spark.", "add --engine spark."),
            (self.backfill and is_shared, with_queues, one_of_two),
            (self.backfill and self.fresh, f"{backfills}; --fresh leaves no messages.", one_of_two),
            (
                self.backfill and self.idle_exit is not None,
                f"{backfills}; it ends by itself, without --idle-exit.",
                one_of_two,
            ),
            (
                self.replicate is not None and is_shared,
                "--replicate copies stores, and with --queues the queues are in a directory.",
                "copy that directory with the tools of its file system or object store.",
            ),
            (self.reload and self.dry_run, "--dry-run starts nothing, and --reload starts it anew.", one_of_two),
            (self.workers is not None and is_spark, embedded, "give --workers or --engine spark, not both."),
        ):
            if refused:
                raise Refused(message, hint)
        self.settings()
        if self.master is not None:
            from cues.spark import conf

            try:
                conf.require_master(self.master)
            except InvalidArgument as error:
                raise Refused(error.message, error.hint) from None
            if self.master.startswith(conf.CONNECT):
                raise conf.no_driver()

    def require(self) -> None:
        """Check what the engine needs, before anything is changed. A directory for the queues need not exist yet."""
        if self.engine == "spark":
            from cues.spark.installed import require_packages, require_pyspark
            from cues.spark.session import require

            require_pyspark() if self.dry_run else require()
            require_packages("--engine spark", "pyarrow")
        if self.queues is not None:
            require_packages("--queues", "deltalake")
            from cues.spark.cluster.files import require_place

            require_place(self.queues)

    def settings(self) -> dict[str, str]:
        """The settings of Spark by name. Raises :class:`Refused` for one that cannot be given."""
        if not self.conf:
            return {}
        from cues.spark.conf import parsed

        try:
            return parsed(self.conf)
        except InvalidArgument as error:
            raise Refused(error.message, error.hint) from None

    def shown_settings(self) -> dict[str, str]:
        """The settings of Spark for people, without secrets."""
        if not self.conf:
            return {}
        from cues.spark.conf import shown as readable

        return readable(self.settings())

    def places(self, plan: Plan) -> dict[str, str]:
        """For each processor the place where Spark would call its function; empty for the embedded engine.

        Raises :class:`GraphError` if the engine cannot run the plan.
        """
        if self.engine != "spark":
            return {}
        if self.queues is None:
            from cues.spark import driver

            return {node.id: driver.place(node) for node in plan.running}
        from cues.spark.cluster import engine as cluster

        cluster.check(plan)
        return {node.id: cluster.place(node) for node in plan.running}

    def location(self, store: Path) -> str:
        """The place of the queues: the directory, else the store."""
        return self.queues or str(store)

    def noted(self, store: Path, graph: str) -> record.QueuesPlace | None:
        """The directory of the last run, if this run has its queues in the store, and so does not continue there."""
        return record.queues_of(store, graph) if self.queues is None else None

    def engine_options(self, target: str) -> dict[str, Any]:
        """The arguments of :meth:`Graph.start` that choose the engine; ``target`` is what workers import."""
        chosen: dict[str, Any] = {"engine": self.engine}
        if self.engine == "spark":
            chosen |= {"master": self.master, "backfill": self.backfill, "conf": self.settings() or None}
        if self.queues is not None:
            chosen["queues"] = self.queues
        if self.workers is not None:
            chosen |= {"workers": self._workers(self.workers), "target": target}
        return chosen

    @staticmethod
    def _workers(text: str) -> int | str:
        if text == "auto":
            return text
        if text.isdecimal() and int(text) > 0:
            return int(text)
        raise Refused(f"--workers {text} is not a number of processes.", "give --workers a number from 1, or auto.")


class StoreQueues:
    """The queues of a run in the stores of this machine. Empty after the graph was closed."""

    facts: dict[str, str]
    """Further facts about the place, for a summary."""
    named: str | None = None
    """The place, if it is not the store of the graph file."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.facts = {}
        self.place = shown(running.store.path)
        self.before = QueueProgress({}, {}, {})
        """The queues and positions before the run; those of a directory are read at its start."""

    def now(self) -> QueueProgress:
        """The queues and positions now."""
        if self._running.store.closed:
            return QueueProgress({}, {}, {})
        queues = self._running.queues
        ends = {name: end_of(queue) for name, queue in queues.items()}
        return QueueProgress(
            ends, {name: len(queue) for name, queue in queues.items()}, positions_of(self._running.store)
        )

    def lag(self, unit: ProcessorId) -> int:
        """The number of messages that a unit has not taken."""
        return sum(tailer.lag or 0 for tailer in standing.tailers(self._running.store, unit))

    def failed_on(self, queue: str, records: int) -> int:
        """The number of messages in the last ``records`` records of an error queue."""
        if self._running.store.closed or queue not in self._running.queues:
            return records
        return standing.failed_messages(self._logs(queue), records)

    def unresolved(self, queue: str, most: int) -> int:
        """The number of unresolved records of an error queue, ``most`` of which are not taken by a processor."""
        if self._running.store.closed or most <= 0:
            return most
        return min(most, sum(log.unresolved() for log in self._logs(queue)))

    def _logs(self, queue: str) -> list[ErrorLog]:
        rows = ErrorRows(self._running.store)
        return [ErrorLog(rows, view.core.log) for view in views_of(self._running.queues[queue])]


class DirectoryQueues(StoreQueues):
    """The queues of a run in a directory; those of its sources are in the store of the graph."""

    def __init__(self, running: Running, shared: Shared) -> None:
        super().__init__(running)
        self._shared = shared
        self.place = self.named = shared.place
        self.facts = {"shared": shared.place}
        self.before = shared.before

    @override
    def now(self) -> QueueProgress:
        store, shared = super().now(), self._shared.now()
        ends, messages = store.ends | shared.ends, store.messages | shared.messages
        return QueueProgress(ends, messages, store.positions | shared.positions, shared.delayed)

    @override
    def lag(self, unit: ProcessorId) -> int:
        return self._shared.lag(unit)

    @override
    def failed_on(self, queue: str, records: int) -> int:
        return records

    @override
    def unresolved(self, queue: str, most: int) -> int:
        return most


def queues_of(running: Running) -> StoreQueues:
    """The queues of a run."""
    return StoreQueues(running) if running.shared is None else DirectoryQueues(running, running.shared)


def end_of(queue: Queue) -> int:
    """The number of messages that were ever on a queue, on all its partitions."""
    return sum(row.next - 1 for row in queue.core.rows())


def positions_of(store: Store) -> dict[str, int]:
    """The positions of processors, by tailer id."""
    return {
        f"{processor_of(processor)}.{tailer.queue}": tailer.position  # a tailer id may have a former name
        for processor in standing.processors(store)
        for tailer in standing.tailers(store, processor)
    }


def rows_of(running: Running, queues: StoreQueues) -> list[dict[str, Any]]:
    """Counters and lag of each processor of a run."""
    processors: dict[str, list[UnitStatus]] = {}
    for unit in running.standings():
        processors.setdefault(unit.processor, []).append(unit)
    return [_row(running.plan.node(id).name, units, queues) for id, units in processors.items()]


def _row(name: str, units: Sequence[UnitStatus], queues: StoreQueues) -> dict[str, Any]:
    total = functools.reduce(Counters.with_those_of, (unit.counters for unit in units))
    return {
        "processor": name,
        "taken": total.taken,
        "written": total.written,
        "failed": total.failed,
        "calls": total.calls,
        "in_flight": total.in_flight,
        "call_s": None if total.call_s is None else round(total.call_s, 6),
        "lag": sum(queues.lag(unit.id) for unit in units),
        # For a processor over partitions, show a unit that stopped.
        "state": max((unit.state for unit in units), key=_STATES.index),
    }
