"""The progress of a run, on stderr.

ProgressTable   on a terminal: a table that is redrawn, and events above it
PlainLines      elsewhere, for a journal or a log file: events, and a line a minute when something moved
Lines           with --json: one object a second, and one for each event
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from typing import Any, Final

from cues.base import events
from cues.base.data import dataclass
from cues.base.texts import duration
from cues.cli.output import TableColumn, calling, table
from cues.cli.printing import err, is_terminal
from cues.engine.status import processor_of
from cues.graphs.running import Running
from cues.operate.runs import queues_of, rows_of
from cues.overrides import override

_REDRAW_S: Final = 0.2
_LINE_S: Final = 1.0
_QUIET_LINE_S: Final = 60.0
_REPEAT_S: Final = 10.0
"""The shortest time between two prints of the count of a repeated message."""
MESSAGES_MAX: Final = 1000
"""Different messages that are remembered; the oldest is forgotten first."""
_PROCESSES: Final = r"\b(worker-|process )\d+"
"""Numbers that differ between messages which say the same of several workers."""


@dataclass
class _Repeats:
    """A message of this run, and how often it repeated."""

    text: str
    level: str
    facts: dict[str, Any]
    since: int = 0
    """Its repetitions since it was printed last."""
    total: int = 0
    """The number of times that it came in this run."""
    printed: bool = True
    """False: it is printed again at once when it comes next."""


_COLUMNS: Final = (
    TableColumn("processor", "processor"),
    TableColumn("in", "taken", right=True),
    TableColumn("out", "written", right=True),
    TableColumn("failed", "failed", right=True, optional=True),
    TableColumn("waiting", "lag", right=True, optional=True),
    TableColumn("per second", "rate", right=True),
    TableColumn("calls", "calling", optional=True),
    TableColumn("", "state"),
)


class Progress:
    """Prints warnings and errors only (``--quiet``). Base class of the other displays."""

    interval_s: float = 1.0

    def __init__(self, graph: str, verbose: bool = False) -> None:
        self.graph = graph
        self.verbose = verbose
        self.started_at = time.monotonic()
        self._guard = threading.Lock()
        self.repeats: dict[tuple[str, str], _Repeats] = {}
        """By processor and topic, or by level and text of a log record."""
        self._repeats_at = self.started_at

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Print how often each message came that was repeated."""
        with self._guard:
            repeated = [message for message in self.repeats.values() if message.total > 1]
            self.repeats = {}
        for message in repeated:
            self._print(message, f" (×{message.total:,} in this run)", {"total": message.total})

    def tick(self, running: Running) -> None:
        """Redraw; called about every ``interval_s``."""
        if time.monotonic() - self._repeats_at >= _REPEAT_S:
            self.print_repeats()

    def event(self, event: events.Event) -> None:
        """Print an event, or count it if it repeats; called from any thread.

        Events of the units of one processor, and of several workers, that say the same are repetitions.
        """
        if not self._shows(event):
            return
        text = (f"{event.processor}: " if event.processor else "") + event.text
        level = logging.getLevelName(event.level).lower()
        facts = {"type": "event", "level": level, "processor": event.processor, "text": event.text}
        self._tell((processor_of(event.processor), event.topic), _Repeats(text, level, facts))

    def log(self, level: str, text: str) -> None:
        """Print a log record, at least a warning, or count it if it repeats; called from any thread."""
        self._tell((level, text), _Repeats(f"{level}: {text}", level, {"type": "log", "level": level, "text": text}))

    def _tell(self, key: tuple[str, str], message: _Repeats) -> None:
        key = (key[0], re.sub(_PROCESSES, r"\1", key[1]))
        with self._guard:
            message = self.repeats.setdefault(key, message)
            if len(self.repeats) > MESSAGES_MAX:
                del self.repeats[next(iter(self.repeats))]
            message.total += 1
            first = message.total == 1 or not message.printed
            message.printed = True
            message.since += not first
        if first:
            self._print(message, "", {})

    def print_repeats(self) -> None:
        with self._guard:
            self._repeats_at = time.monotonic()
            repeated = [(message, message.since) for message in self.repeats.values() if message.since]
            for message in self.repeats.values():
                # Continue to count a message that was repeated. Others are printed at once when they come again.
                message.printed = message.since > 0
                message.since = 0
        for message, since in repeated:
            self._print(message, f" (×{since:,})", {"repeated": since})

    def _shows(self, event: events.Event) -> bool:
        return event.level >= logging.WARNING and not _is_told_at_the_end(event)

    def _print(self, message: _Repeats, repeated: str, counts: dict[str, int]) -> None:
        """Print a message; ``repeated`` and ``counts`` say how often it came, and are empty the first time."""
        self.say(message.text + repeated)

    def say(self, text: str) -> None:
        err(text)


class Lines(Progress):
    """For a pipe: JSON, one object a line."""

    def __init__(self, graph: str, verbose: bool = False) -> None:
        super().__init__(graph, verbose)
        self._before: dict[str, int] = {}
        self._last = self.started_at

    @override
    def tick(self, running: Running) -> None:
        super().tick(running)
        now = time.monotonic()
        if now - self._last < _LINE_S * 0.9:
            return
        rows = {row["processor"]: row for row in rows_of(running, queues_of(running))}
        for name, row in rows.items():
            row["rate"] = round((row["taken"] - self._before.get(name, 0)) / (now - self._last), 1)
            self._before[name] = row["taken"]
            del row["processor"]
        self._last = now
        self._write(type="progress", graph=self.graph, seconds=round(now - self.started_at, 1), processors=rows)

    @override
    def _shows(self, event: events.Event) -> bool:
        return not _is_told_at_the_end(event)

    @override
    def _print(self, message: _Repeats, repeated: str, counts: dict[str, int]) -> None:
        self._write(**{name: value for name, value in message.facts.items() if value}, **counts)

    @override
    def say(self, text: str) -> None:
        self._write(type="event", level="info", text=text)

    def _write(self, **facts: Any) -> None:
        err(json.dumps(facts))


class PlainLines(Progress):
    """For a journal or a log file: lines with the time, for people."""

    def __init__(self, graph: str, verbose: bool = False) -> None:
        super().__init__(graph, verbose)
        self.told_at = self.started_at
        """The time of the last line about what moved."""
        self._before: dict[str, int] = {}

    @override
    def __enter__(self) -> Progress:
        self.say(f"{self.graph}: started")
        return self

    @override
    def tick(self, running: Running) -> None:
        super().tick(running)
        now = time.monotonic()
        if now - self.told_at < _QUIET_LINE_S:
            return
        self.told_at = now
        rows = rows_of(running, queues_of(running))
        moved = [(row["processor"], row["taken"] - self._before.get(row["processor"], 0)) for row in rows]
        self._before = {row["processor"]: row["taken"] for row in rows}
        waiting = sum(row["lag"] or 0 for row in rows)
        if any(count for _, count in moved):
            took = ", ".join(f"{name} {count:,}" for name, count in moved if count)
            self.say(f"{self.graph}: took in the last minute: {took}; {waiting:,} wait")

    @override
    def _shows(self, event: events.Event) -> bool:
        told = isinstance(event, events.Placed) or (self.verbose and not _is_told_at_the_end(event))
        return told or super()._shows(event)

    @override
    def say(self, text: str) -> None:
        err(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


class ProgressTable(Progress):
    """For a terminal: a table at the bottom, and events above it."""

    interval_s = _REDRAW_S

    def __init__(self, graph: str, verbose: bool) -> None:
        super().__init__(graph, verbose)
        from cues.cli.live import Live

        self._live = Live()
        self._before: list[tuple[float, dict[str, int]]] = []

    @override
    def __enter__(self) -> Progress:
        self._live.__enter__()
        return self

    @override
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._live.__exit__(*error)

    @override
    def tick(self, running: Running) -> None:
        super().tick(running)
        now = time.monotonic()
        rows = rows_of(running, queues_of(running))
        taken = {row["processor"]: row["taken"] for row in rows}
        self._before = [*self._before[-10:], (now, taken)]
        then, before = self._before[0]
        for row in rows:
            name = row["processor"]
            since = now - then
            row["rate"] = (taken[name] - before.get(name, 0)) / since if since else 0.0
            row["lag"] = row["lag"] or None
            row["failed"] = row["failed"] or None
            row["calling"] = calling(row["calls"], row["in_flight"], row["call_s"])
        head = f"{self.graph}  {duration(now - self.started_at)}"
        if running.draining:
            head += "  draining"
        elif running.plan.fed and not any(row["rate"] for row in rows):
            head += f"  waiting for {', '.join(running.plan.fed)} (cues send)"
        self._live.draw([head, *table(rows, _COLUMNS, colours=True)])

    @override
    def _shows(self, event: events.Event) -> bool:
        notable = isinstance(event, events.Recovered) and event.decision in ("rewind", "void")
        told = notable or isinstance(event, events.Placed) or (self.verbose and not _is_told_at_the_end(event))
        return told or super()._shows(event)


def progress_for(graph: str, *, quiet: bool, verbose: bool, json: bool = False) -> Progress:
    """The display for this stderr; ``json``: that was asked for."""
    if quiet:
        return Progress(graph)
    if is_terminal("stderr"):
        return ProgressTable(graph, verbose)
    return Lines(graph, verbose) if json else PlainLines(graph, verbose)


def _is_told_at_the_end(event: events.Event) -> bool:
    """Return whether the event ends the run, and so is printed after it."""
    return isinstance(event, events.Stopped) and not event.alone
