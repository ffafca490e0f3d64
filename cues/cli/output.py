"""Results: tables for people, JSON lines for programs.

The forms of values in JSON are those of :func:`cues.jsontext.show`.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cues.base.data import dataclass
from cues.base.texts import brief, duration
from cues.cli.options import F, option
from cues.cli.printing import DIM, Printable, colour, coloured, escaped, is_terminal, is_unicode, out

if TYPE_CHECKING:
    from cues.tools.figures import Figure
    from cues.tools.measurement import ProcessorFigures

_SLOW_CALL_S = 0.01
"""The calls of a function are shown if one takes longer than this."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: its title, and the field of a row that it shows."""

    title: str
    field: str
    right: bool = False
    """True: aligned right, as numbers are."""
    optional: bool = False
    """True: omitted when it is empty in all rows."""


class CommandOutput:
    """The output of a command's results; ``form`` is "json", "table", or None to decide by stdout."""

    def __init__(self, form: str | None) -> None:
        self.form = form
        self.json = form == "json" or (form is None and not is_terminal("stdout"))

    def rows(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[TableColumn]) -> None:
        """Print ``rows`` as one JSON object each, or as a table."""
        for line in map(to_json, rows) if self.json else table(rows, columns):
            out(line)

    def say(self, text: str, **facts: Any) -> None:
        """Print a sentence, or in JSON its facts."""
        out(to_json(facts) if self.json else text)


def output_options(fn: F) -> F:
    """``--json`` and ``--table``: how results are printed, whatever stdout is. Passes ``output``."""

    @functools.wraps(fn)
    def call(output: str | None, **given: Any) -> Any:
        return fn(output=CommandOutput(output), **given)

    in_json = "One JSON object a line, also on a terminal."
    as_table = "A table, also in a pipe."
    shared: dict[str, Any] = {"envvar": "CUES_OUTPUT"}
    call = option("--table", "output", flag_value="table", show_envvar=False, help=as_table, **shared)(call)
    return option("--json", "output", flag_value="json", default=None, help=in_json, **shared)(call)  # type: ignore[return-value]


def table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[TableColumn], *, colours: bool | None = None
) -> list[Printable]:
    """The lines of a table, without the columns that no row has; the last one is cut at the edge of the terminal."""
    columns = [column for column in columns if not rows or any(column.field in row for row in rows)]
    shown = [[_cell(row.get(column.field)) for column in columns] for row in rows]
    kept = [place for place, column in enumerate(columns) if not column.optional or any(row[place] for row in shown)]
    titles = [columns[place].title.upper() for place in kept]
    cells = [[row[place] for place in kept] for row in shown]
    widths = [max(map(width, column)) for column in zip(titles, *cells)]
    on_terminal = colour() if colours is None else colours
    edge = sys.maxsize
    if is_terminal("stdout") or colours:
        import shutil

        edge = shutil.get_terminal_size().columns or edge
    lines: list[Printable] = []
    for number, row in enumerate([titles, *cells]):
        parts = []
        for place, cell, columns_wide in zip(kept, row, widths):
            gap = " " * (columns_wide - width(cell))
            parts.append(gap + cell if columns[place].right else cell + gap)
        line = cut("  ".join(parts).rstrip(), edge)
        lines.append(coloured(DIM, line) if on_terminal and number == 0 else escaped(line))
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return rate(value)
    text = str(value)
    return text if text.isprintable() else escaped(re.sub(r"[\n\r\t]", " ", text))


def width(text: str) -> int:
    """The width of a text on a terminal."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, columns: int) -> str:
    """A text that takes at most so many columns."""
    if width(text) <= columns:
        return text
    while width(text) > columns - 1:
        text = text[: min(len(text) - 1, columns)]
    return text + "…"


def rate(value: float) -> str:
    """Messages a second, with the significant digits."""
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}" if value >= 0.1 else "<0.1"


def sparkline(values: Sequence[float], signs: bool = True) -> str:
    """A sign for each value, as high as its share of the largest; without ``signs`` of Unicode a digit from 1 to 8."""
    top, bars = max(values, default=0), " ▁▂▃▄▅▆▇█" if signs else " 12345678"
    return "".join(bars[0 if value <= 0 else 1 + min(7, int(value / top * 8))] for value in values)


def calling(calls: int, in_flight: int, call_s: float | None) -> str | None:
    """The calls of a slow function: ``412 done, 3 in flight, 1.2 s a call``; None for a fast one."""
    if (call_s is None and not in_flight) or (call_s is not None and call_s < _SLOW_CALL_S):
        return None
    cost = "" if call_s is None else f", {duration(call_s) if call_s >= 1 else f'{call_s * 1000:.0f} ms'} a call"
    return f"{calls:,} done, {in_flight:,} in flight{cost}"


def shown_figure(figure: Figure, processor: ProcessorFigures) -> Any:
    """A figure in a table: a number, or a time as text; None for no messages."""
    value = figure.of(processor)
    if figure.name == "errors" and processor.errors_more:
        return f"{value:,}+"
    if figure.unit == "messages":
        return value or None
    return value if figure.unit != "seconds" or value is None else brief(value)


def to_json(value: Any) -> str:
    """One line of JSON, in ASCII if the terminal has no other signs."""
    from cues import jsontext

    return jsontext.show(value, ascii_only=not is_unicode())
