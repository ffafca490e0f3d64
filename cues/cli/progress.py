"""How a run goes, on stderr: a table that is redrawn on a terminal, one JSON object a second in a pipe."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Final

from cues import events, metrics
from cues.cli.live import Live
from cues.cli.output import Column, duration, table
from cues.engine.local import Running, Worker

_REDRAW_S: Final = 0.2
_LINE_S: Final = 1.0

_COLUMNS: Final = (
    Column("processor", "processor"),
    Column("in", "taken", right=True),
    Column("out", "written", right=True),
    Column("failed", "failed", right=True, optional=True),
    Column("waiting", "lag", right=True, optional=True),
    Column("per second", "rate", right=True),
    Column("", "state"),
)


class Progress:
    """Shows nothing but what is wrong (``--quiet``); the base of the others."""

    interval_s: float = 1.0

    def __init__(self, graph: str, verbose: bool = False) -> None:
        self.graph = graph
        self.verbose = verbose
        self.started_at = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def tick(self, running: Running) -> None:
        """Called about every ``interval_s``."""

    def event(self, event: events.Event) -> None:
        """Something rare happened; called from any thread."""
        if event.level >= logging.WARNING and not isinstance(event, events.Stopped):
            self.say(_sentence(event))

    def log(self, level: str, text: str) -> None:
        """A record of somebody's logger, at least a warning; called from any thread."""
        self.say(f"{level}: {text}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)


class Lines(Progress):
    """For a pipe: JSON, one object a line."""

    def __init__(self, graph: str, verbose: bool = False) -> None:
        super().__init__(graph, verbose)
        self._before: dict[str, int] = {}
        self._last = self.started_at

    def tick(self, running: Running) -> None:
        now = time.monotonic()
        if now - self._last < _LINE_S * 0.9:
            return
        found = {row["processor"]: row for row in measure(running)}
        for name, row in found.items():
            row["rate"] = round((row["taken"] - self._before.get(name, 0)) / (now - self._last), 1)
            self._before[name] = row["taken"]
            del row["processor"]
        self._last = now
        self._print(type="progress", graph=self.graph, seconds=round(now - self.started_at, 1), processors=found)

    def event(self, event: events.Event) -> None:
        level = logging.getLevelName(event.level).lower()
        facts = {"processor": event.processor} if event.processor else {}
        self._print(type="event", level=level, **facts, text=event.text)

    def log(self, level: str, text: str) -> None:
        self._print(type="log", level=level, text=text)

    def say(self, text: str) -> None:
        self._print(type="event", level="info", text=text)

    def _print(self, **facts: Any) -> None:
        print(json.dumps(facts), file=sys.stderr, flush=True)


class Table(Progress):
    """For a terminal: a table at the bottom, and events above it."""

    interval_s = _REDRAW_S

    def __init__(self, graph: str, verbose: bool = False) -> None:
        super().__init__(graph, verbose)
        self._live = Live()
        self._before: list[tuple[float, dict[str, int]]] = []
        self._hinted = False

    def __enter__(self) -> Progress:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(*error)

    def tick(self, running: Running) -> None:
        now = time.monotonic()
        rows = measure(running)
        taken = {row["processor"]: row["taken"] for row in rows}
        self._before = [*self._before[-10:], (now, taken)]
        then, before = self._before[0]
        for row in rows:
            name = row["processor"]
            since = now - then
            row["rate"] = (taken[name] - before.get(name, 0)) / since if since else 0.0
            row["lag"] = row["lag"] or None
            row["failed"] = row["failed"] or None
        head = f"{self.graph}  {duration(now - self.started_at)}"
        if running.draining:
            head += "  draining"
        elif running.plan.fed and not any(row["rate"] for row in rows):
            head += f"  waiting for {', '.join(running.plan.fed)} (cues send)"
        self._live.draw([head, *table(rows, _COLUMNS, colours=True)])

    def event(self, event: events.Event) -> None:
        notable = isinstance(event, events.Recovered) and event.decision in ("rewind", "void")
        if notable or (self.verbose and not isinstance(event, events.Stopped)):
            self.say(_sentence(event))
        else:
            super().event(event)


def progress_for(graph: str, *, quiet: bool, verbose: bool) -> Progress:
    """The display that suits stderr."""
    if quiet:
        return Progress(graph)
    return Table(graph, verbose) if sys.stderr.isatty() else Lines(graph, verbose)


def measure(running: Running) -> list[dict[str, Any]]:
    """Each processor's counters, and what waits for it."""
    units: dict[str, list[Worker]] = {}
    for worker in running.workers:
        units.setdefault(worker.delivery.node.processor, []).append(worker)
    rows = []
    for processor, workers in units.items():
        counters = [worker.delivery.counters for worker in workers]
        standing = [tailer for worker in workers for tailer in metrics.tailers(running.store, worker.id)]
        rows.append(
            {
                "processor": processor.rpartition(".")[2],
                "taken": sum(one.taken for one in counters),
                "written": sum(one.written for one in counters),
                "failed": sum(one.failed for one in counters),
                "lag": sum(tailer.lag or 0 for tailer in standing),
                "state": _state(workers),
            }
        )
    return rows


def _state(workers: list[Worker]) -> str:
    """Of a processor, all of whose units are given; one that stopped is what there is to say."""
    if any(worker.stopped is not None for worker in workers):
        return "stopped"
    first = workers[0]
    if first.delivery.node.kind == "source" and (first.finished or getattr(first.delivery, "ended", False)):
        return "ended"
    return "running"


def _sentence(event: events.Event) -> str:
    return f"{event.processor}: {event.text}" if event.processor else event.text
