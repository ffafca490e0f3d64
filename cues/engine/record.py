"""The record of a supervisor about its workers, for ``cues status`` and for the next supervisor.

    data/flights/workers-<graph>.json
    data/flights/queues-<graph>.json         the directory with the queues of the last run (cues run --queues)

The file is replaced as a whole at every start, death and stop of a worker. It stays after the end, because users ask
for the last failure then. The last stop of each processor stays also when the processor is started again, with the time
of that start. Exactness does not depend on it. A POSIX lock shows whether the supervisor is alive
(:func:`ownership.supervisor_lock`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection
from dataclasses import asdict, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from cues.base import clock
from cues.base.data import dataclass
from cues.engine.status import processor_of
from cues.storage import door

PATTERN: Final = "workers-*.json"
PLACES: Final = "queues-*.json"


@dataclass
class RecordedFailure:
    """The last death of a worker, or the stop of a processor."""

    time: str
    text: str
    restarted: str | None = None
    """The time at which a processor that stopped was started again."""

    @staticmethod
    def now(text: str) -> RecordedFailure:
        return RecordedFailure(_now(), text)

    @property
    def when(self) -> datetime:
        return datetime.fromisoformat(self.time)

    @property
    def restarted_at(self) -> datetime | None:
        return None if self.restarted is None else datetime.fromisoformat(self.restarted)


@dataclass
class WorkerRecord:
    pid: int
    units: list[str]
    restarts: int = 0
    last_failure: RecordedFailure | None = None


@dataclass
class WorkersRecord:
    graph: str
    supervisor: int
    """The pid of the supervisor."""
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    stopped: dict[str, RecordedFailure] = field(default_factory=dict)
    """The last stop of each processor that an error has stopped."""

    @staticmethod
    def begin(store: str, graph: str, processors: Collection[str]) -> WorkersRecord:
        """Return the record of a run that begins, by this process: without workers, and with the stops of earlier runs.

        The stops of ``processors`` (ids), and of the graph, get the time of this start.
        """
        before = WorkersRecord.of(store, graph)
        stopped = dict(before.stopped) if before is not None else {}
        for unit, failure in stopped.items():
            if processor_of(unit) in (graph, *processors) and failure.restarted is None:
                failure.restarted = _now()
        return WorkersRecord(graph, os.getpid(), stopped=stopped)

    def save(self, store: str) -> None:
        """Write the record, if there is room on the disk: only ``cues status`` reads it."""
        path = _path(store, self.graph)
        with contextlib.suppress(OSError):
            door.replace(path, json.dumps(asdict(self)), durable=True)

    @staticmethod
    def load(path: Path) -> WorkersRecord | None:
        """Return the record at ``path``; None if it cannot be read."""
        try:
            data: dict[str, Any] = json.loads(door.read_text(path))
            return WorkersRecord(
                data["graph"],
                data["supervisor"],
                {name: _worker(worker) for name, worker in data["workers"].items()},
                {unit: RecordedFailure(**failure) for unit, failure in data["stopped"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @staticmethod
    def all(store: str) -> list[WorkersRecord]:
        """Return the records of all graphs that have run with workers on a store."""
        records = [WorkersRecord.load(path) for path in sorted(Path(store).glob(PATTERN))]
        return [record for record in records if record is not None]

    @staticmethod
    def of(store: str, graph: str) -> WorkersRecord | None:
        """Return the record of a graph's last supervisor on a store."""
        return WorkersRecord.load(_path(store, graph))


def keep_stop(store: str, graph: str, processor: str, text: str) -> None:
    """Record the reason why a processor of a run in this process stopped, for ``cues status``."""
    record = WorkersRecord.of(store, graph) or WorkersRecord(graph, os.getpid())
    record.supervisor = os.getpid()
    record.stopped[processor] = RecordedFailure.now(text.removeprefix("stopped").lstrip(": "))
    record.save(store)


def begin_run(store: str, graph: str, processors: Collection[str]) -> None:
    """Note in the record that these processors run again, in this process."""
    record = WorkersRecord.of(store, graph)
    if record is not None and (record.stopped or record.workers):
        WorkersRecord.begin(store, graph, processors).save(store)


@dataclass(frozen=True)
class QueuesPlace:
    """The directory in which a graph had its queues when it last ran, and the time of that start."""

    directory: str
    time: str

    @property
    def when(self) -> datetime:
        return datetime.fromisoformat(self.time)


def note_queues(store: str, graph: str, directory: str | None) -> None:
    """Note the directory of a graph's queues beside the store of its sources; None: they are in the store."""
    path = Path(store) / f"queues-{graph}.json"
    if directory is None:
        path.unlink(missing_ok=True)
        return
    door.replace(path, json.dumps({"directory": directory, "time": clock.to_datetime(clock.now_ns()).isoformat()}))


def queues_of(store: str | os.PathLike[str], graph: str) -> QueuesPlace | None:
    """The note of :func:`note_queues`; None if there is none, or if it cannot be read."""
    try:
        return QueuesPlace(**json.loads(door.read_text(Path(store) / f"queues-{graph}.json")))
    except (OSError, ValueError, TypeError):
        return None


def _now() -> str:
    return clock.to_datetime(clock.now_ns()).isoformat()


def _path(store: str, graph: str) -> Path:
    return Path(store) / f"workers-{graph}.json"


def _worker(data: dict[str, Any]) -> WorkerRecord:
    last = data["last_failure"]
    return WorkerRecord(data["pid"], data["units"], data["restarts"], RecordedFailure(**last) if last else None)
