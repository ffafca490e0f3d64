"""``cues top``: the processors and workers of a graph, live. Needs the extra ``watch`` (rich).

    look ──▶ Look ──▶ rates(before, now) ──▶ rows ──▶ draw      every two seconds
    keys ──▶ View (sort, selection, details)

Rates are the differences of counters between two looks. All of it is read as ``cues status`` reads it.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from cues.base import clock
from cues.base.events import Counters
from cues.base.texts import ago, brief, duration, size
from cues.cli.options import command, option
from cues.cli.output import CommandOutput, TableColumn, output_options, sparkline
from cues.cli.printing import escaped, is_terminal, is_unicode
from cues.cli.target import takes_place
from cues.cli.watching import CtrlC
from cues.engine.history import Point
from cues.errors import CuesError, NotInstalled
from cues.operate.history import columns
from cues.operate.place import Place
from cues.tools.figures import FIGURES, values
from cues.tools.measurement import Measurement, ProcessorFigures

if TYPE_CHECKING:
    from rich.console import RenderableType

Row = dict[str, Any]

_COLUMNS: Final[tuple[tuple[str, str], ...]] = (
    ("in", "IN/S"), ("out", "OUT/S"), ("lag", "LAG"), ("p50", "P50"), ("p99", "P99"), ("batch", "BATCH"),
    ("calls", "CALLS"), ("errors", "ERR"),
)  # fmt: skip
_OTHERS: Final = tuple(each for each in FIGURES if each.name not in ("rate", *dict(_COLUMNS)))
"""Figures without a place of their own in the table."""
_SORTS: Final = ("processor", "in", "out", "lag", "p99", "errors", *(figure.name for figure in _OTHERS))
_BARS: Final = 12
_DETAIL_BARS: Final = 36
"""Signs of a sparkline, in the table and in the details."""
_WIDE: Final = 100
"""The width from which the table has sparklines."""
_SECONDS: Final = ("p50", *(figure.name for figure in FIGURES if figure.unit == "seconds"))
_TABLE: Final = (
    TableColumn("processor", "processor"),
    TableColumn("in", "in", right=True),
    TableColumn("out", "out", right=True),
    TableColumn("lag", "lag", right=True),
    TableColumn("p50 s", "p50", right=True, optional=True),
    TableColumn("p99 s", "p99", right=True, optional=True),
    TableColumn("batch", "batch", right=True, optional=True),
    TableColumn("calls", "calls", right=True, optional=True),
    TableColumn("in flight", "in_flight", right=True, optional=True),
    TableColumn("limit", "limited", optional=True),
    TableColumn("errors", "errors", right=True),
    *(TableColumn(figure.title, figure.name, right=True, optional=True) for figure in _OTHERS),
)


class Look:
    """The figures of one look."""

    def __init__(
        self, at: float, title: str, measured: Measurement | None = None, history: dict[str, list[Point]] | None = None
    ) -> None:
        self.at = at
        """The monotonic time."""
        self.title = title
        figures = measured.figures() if measured is not None else []
        self.processors: dict[str, ProcessorFigures] = {each.processor: each for each in figures}
        self.processes = measured.processes if measured is not None else ()
        self.history = history or {}
        """The last hour, by processor."""
        self.time_s = clock.now_ns() / 1e9

    def bars(self, processor: str, name: str, count: int) -> str:
        """A sparkline of a column of the history (:data:`cues.operate.history.COLUMNS`) over the last hour."""
        values = columns(self.history.get(processor, []), "hour", self.time_s)[name]
        step = len(values) // count
        highest = [max((v or 0 for v in values[at : at + step]), default=0) for at in range(0, count * step, step)]
        return sparkline(highest, is_unicode())


def look(place: Place) -> Look:
    """Measure the store or the directory."""
    with place:  # it is not open between two looks, so that other commands can have it alone
        seen, history = place.measure(), place.history("hour")
    title = f"{place.name}  {size(seen.disk_bytes)}"
    title += f"  full in {duration(seen.full_s)}" if seen.full_s is not None else ""
    return Look(time.monotonic(), title, seen, history)


def notes(processor: ProcessorFigures) -> list[str]:
    """Lines for the details of a processor."""
    lines = [f"waits for {processor.away}"] if processor.away is not None else []
    for unit in processor.units:
        lines += [f"{tailer.queue} at {tailer.position:,}, lag {tailer.lag or 0:,}" for tailer in unit.tailers]
        if unit.paused is not None:
            lines.append(f"paused {ago(unit.paused.time)} {unit.paused.text}")
        if unit.last_error is not None:
            error = unit.last_error
            lines.append(f"last error {ago(error.time)}: {error.type}: {error.text}")
    stop = processor.stop
    if stop is not None:
        again = f"; started again {ago(stop.restarted_at)}" if stop.restarted else ""
        lines.append(f"stopped {ago(stop.when)}: {stop.text}{again}")
    return lines


def past(now: Look, processor: str) -> list[str]:
    """Lines for the details of a processor: its last hour; empty without a history."""
    known = columns(now.history.get(processor, []), "hour", now.time_s)
    lines = []
    for name, title, shown in (("in", "in/s", short), ("lag", "lag", short), ("p99", "p99", brief)):
        highest = max((value or 0 for value in known[name]), default=0)
        if highest:
            bars = now.bars(processor, name, _DETAIL_BARS)
            lines.append(f"{title:<5}{bars} at most {shown(highest)} in the last hour")
    return lines


def rates(before: Look | None, now: Look) -> list[Row]:
    """A row for each processor. Rates and quantiles are of the time between the looks; for one look, since the start.

    None is what is not known, such as the latency of a source or of a processor that does not run.
    """
    seconds = now.at - before.at if before is not None else 0.0
    rows = []
    for id, processor in now.processors.items():
        counters = processor.counters or Counters()
        earlier = before.processors.get(id) if before is not None else None
        known = (earlier.counters if earlier is not None else None) or Counters()
        latencies = counters.latency.since(known.latency)
        row: Row = {"processor": id, "kind": processor.kind, "running": processor.is_running}
        row |= values(replace(processor, known_recent=latencies)) | {"in": processor.rate or 0.0}
        if seconds and processor.taken is not None:
            taken_before = earlier.taken or 0 if earlier is not None else processor.taken
            row["in"] = max(0, processor.taken - taken_before) / seconds
        row["limited"] = "waits for rate=" if processor.is_limited else None
        row["limited"] = "is away: waits" if processor.away is not None else row["limited"]
        is_counted, calls = processor.counters is not None, processor.counters is not None and row["kind"] != "source"
        row["out"] = max(0, counters.written - known.written) / seconds if seconds and is_counted else None
        row["p50"] = (latencies.quantiles(1e-6) or {}).get("p50")
        row["batch"] = (counters.sizes.since(known.sizes).quantiles() or {}).get("p50")
        row["calls"], row["in_flight"] = (counters.calls, counters.in_flight) if calls else (None, None)
        rows.append(row)
    return rows


def uses(before: Look | None, now: Look) -> list[Row]:
    """A row for each process that runs processors: its processor time as a share of one core, and its memory."""
    known = {process.pid: process.cpu_s for process in before.processes} if before is not None else {}
    seconds = now.at - before.at if before is not None else 0.0
    rows = []
    for process in now.processes:
        used = process.cpu_s - known[process.pid] if process.pid in known else None
        rows.append(
            {
                "worker": process.worker or "process",
                "pid": process.pid,
                "cpu": max(0.0, used) / seconds if used is not None and seconds else None,
                "memory_bytes": process.memory_bytes,
                "restarts": process.restarts,
                "units": list(process.units),
            }
        )
    return rows


@command()
@takes_place("[GRAPH | STORE]")
@option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between looks.",
)
@option("--once", is_flag=True, help="Look twice, print the rates between, and end.")
@output_options
def top(place: Place, every: float, once: bool, output: CommandOutput) -> None:
    """Show processors and workers live: rates, lag, latency, batch sizes, calls, errors, processor time, memory.

    IN/S and OUT/S are messages a second. P50 and P99 are the time from the append of a message to the commit of
    the step that took it. BATCH is the median number of messages of a step, CALLS the calls done and in flight, ERR
    the failed messages that are on error queues now.

    Keys: q ends, s sorts by the next column, r reverses, up and down (or k and j) select a processor, and Enter shows
    its last hour, its inputs, its last error and its last stop. HOUR, on a terminal of 100 columns, is the rate in
    the last hour.

    \b
      cues top graph.py
      cues top shared/flights              a directory of cues run --queues; without latencies and workers
      cues top graph.py --once --json      one JSON object for each processor and each process
    """
    before = look(place)
    if once or output.json or not is_terminal("stdout"):
        time.sleep(every)
        now = look(place)
        if output.json:
            output.rows([*rates(before, now), *uses(before, now)], ())
        else:
            output.rows([row | {"errors": _errors(row)} for row in rates(before, now)], _TABLE)
        return
    try:
        import rich.live
    except ImportError:
        raise NotInstalled(
            "cues top needs the package rich, which is not installed.",
            "run pip install 'cues-streams[watch]'; or cues status --watch, which needs nothing.",
        ) from None
    view = View()
    now, last = before, None
    with CtrlC() as ctrl_c, _keys() as pressed, rich.live.Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(view.draw(last, now, live.console.width), refresh=True)
            ends = now.at + every
            while (left := ends - time.monotonic()) > 0:
                keys = pressed(min(left, 0.1))
                if ctrl_c.within(0) or "q" in keys:
                    break
                if keys:
                    for key in keys:
                        view.press(key)
                    live.update(view.draw(last, now, live.console.width), refresh=True)
            else:
                last, view.problem = now, ""
                try:
                    now = look(place)
                except (CuesError, OSError) as error:  # the store is being replaced, for example by --fresh
                    view.problem = getattr(error, "message", str(error))
                    now = Look(time.monotonic(), last.title)
                continue
            break
    if "q" not in keys:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], list[str]]]:
    """A function that waits for keys, for some seconds at most. Without a terminal there are none."""
    fd = sys.stdin.fileno() if is_terminal("stdin") else None
    if fd is None:

        def none(seconds: float) -> list[str]:
            time.sleep(seconds)
            return []

        yield none
        return
    before = termios.tcgetattr(fd)

    def read(seconds: float) -> list[str]:
        if not select.select([fd], [], [], seconds)[0]:
            return []
        text = os.read(fd, 1024).decode(errors="replace")
        return list(text.replace("\033[A", "k").replace("\033[B", "j").replace("\r", "\n"))

    try:
        tty.setcbreak(fd)
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


class View:
    """The choices of the user, and the picture."""

    def __init__(self) -> None:
        self.sort = 0
        """The place in ``_SORTS``."""
        self.reverse = False
        self.selected: str | None = None
        self.details = False
        self.problem = ""
        self._shown: list[str] = []
        """The processors, in the order of the last picture."""

    def press(self, key: str) -> None:
        if key == "s":
            self.sort = (self.sort + 1) % len(_SORTS)
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "\n":
            self.details = not self.details
        elif key in ("j", "k") and self._shown:
            at = self._shown.index(self.selected) if self.selected in self._shown else -1 if key == "j" else 1
            self.selected = self._shown[max(0, min(len(self._shown) - 1, at + (1 if key == "j" else -1)))]

    def sorted(self, rows: list[Row]) -> list[Row]:
        """The rows in the chosen order: names from the first, numbers from the largest."""
        name = _SORTS[self.sort]
        if name == "processor":
            return rows[::-1] if self.reverse else rows
        return sorted(rows, key=lambda row: row[name] or 0, reverse=not self.reverse)

    def draw(self, before: Look | None, now: Look, width: int = 80) -> RenderableType:
        """The picture, for any width from 80 columns."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        rows = self.sorted(rates(before, now))
        self._shown = [row["processor"] for row in rows]
        table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
        table.add_column("PROCESSOR", ratio=1, no_wrap=True, overflow="ellipsis")
        columns = (*_COLUMNS, *((figure.name, figure.short.upper()) for figure in _OTHERS))
        for name, title in columns:
            mark = ("▲" if self.reverse else "▼") if _SORTS[self.sort] == name else ""
            table.add_column(title + mark, justify="right", no_wrap=True)
        bars = _BARS if width >= _WIDE else 0
        if bars:
            table.add_column("HOUR", no_wrap=True)
        for row in rows:
            style = "reverse" if row["processor"] == self.selected else "" if row.get("running", True) else "dim"
            cells = [Text(_cell(row, name), style="red" if name == "errors" else "") for name, _ in columns]
            if bars:
                cells.append(Text(now.bars(row["processor"], "in", bars)))
            table.add_row(row["processor"], *cells, style=style)
        parts: list[RenderableType] = [
            Text(escaped(now.title), style="bold", no_wrap=True, overflow="ellipsis"),
            Text(""),
            table,
        ]
        processes = uses(before, now)
        if processes:
            workers = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
            for title in ("WORKER", "PID", "CPU", "MEMORY", "RESTARTS"):
                workers.add_column(title, justify="left" if title == "WORKER" else "right", no_wrap=True)
            workers.add_column("RUNS", ratio=1, no_wrap=True, overflow="ellipsis")
            for use in sorted(processes, key=lambda use: str(use["worker"])):
                cpu = "" if use["cpu"] is None else f"{use['cpu']:.0%}"
                runs = ", ".join(unit.partition(".")[2] or unit for unit in use["units"])
                memory, again = size(use["memory_bytes"]), str(use["restarts"] or "")
                workers.add_row(use["worker"], str(use["pid"]), cpu, memory, again, runs)
            parts += [Text(""), workers]
        if self.details and self.selected in now.processors:
            parts += [Text(""), Text(self.selected, style="bold")]
            parts += [Text(f"  {line}") for line in past(now, self.selected)]
            parts += [Text(escaped(f"  {note}")) for note in notes(now.processors[self.selected])]
        if self.problem or not rows:
            parts += [Text(""), Text(escaped(self.problem) or "No graph has run on this store.")]
        parts += [Text(""), Text("q end  s sort  r reverse  ↑↓ select  Enter details", style="dim")]
        return Group(*parts)


def _errors(row: Row) -> int | str | None:
    return f"{row['errors']:,}+" if row["errors_more"] else row["errors"] or None


def _cell(row: Row, name: str) -> str:
    value = row[name]
    if name == "errors" and row["errors_more"]:
        return f"{short(value)}+"
    if value is None or (name == "errors" and not value):
        return ""
    if name == "calls":
        return f"{short(value)}/{short(row['in_flight'])}"
    return brief(value) if name in _SECONDS else short(value)


def short(value: float | None) -> str:
    """A number in at most five characters."""
    if value is None:
        return ""
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "G")):
        if value < limit * 0.9995:
            scaled = value / limit * 1e3
            is_whole = scaled >= 99.95 or (not unit and scaled == int(scaled))
            return f"{scaled:.0f}{unit}" if is_whole else f"{scaled:.1f}{unit}"
    return f"{value:.0e}"
