"""``cues history``: rates, lag, latencies and failures of the last hour, the last day or the last weeks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from cues.base import clock
from cues.base.texts import brief, duration, quoted
from cues.cli.options import command, option
from cues.cli.output import CommandOutput, TableColumn, output_options, sparkline
from cues.cli.printing import is_unicode, out
from cues.cli.target import takes_place
from cues.engine.history import RINGS, Point, Sample, evened
from cues.engine.status import is_named
from cues.operate.history import COLUMNS, columns
from cues.operate.place import Place

BARS = 30
"""The width of a sparkline."""
_COLUMNS = (
    TableColumn("processor", "processor"),
    TableColumn("in", "bars"),
    TableColumn("in/s", "in", right=True),
    TableColumn("out/s", "out", right=True),
    TableColumn("lag", "lag", right=True),
    TableColumn("p50", "p50", right=True, optional=True),
    TableColumn("p99", "p99", right=True, optional=True),
    TableColumn("failed", "failed", right=True, optional=True),
    TableColumn("outages", "away", right=True, optional=True),
)


@command()
@takes_place("[GRAPH | STORE]")
@option("--span", type=click.Choice(list(RINGS)), default="hour", show_default=True, help="The time that is shown.")
@option("--processor", metavar="NAME", help="Only this processor.")
@output_options
def history(place: Place, span: str, processor: str | None, output: CommandOutput) -> None:
    """Show what processors did in the last hour, the last day or the last five weeks.

    A run notes this every ten seconds beside its store: periods of ten seconds for an hour, of five minutes for a
    day, and of an hour for five weeks. The table has the means of IN/S and OUT/S over the periods in which the
    processor did something, the largest LAG and P99, the mean P50, and the sums of failures and outages. JSON has
    one line for each such period.

    \b
      cues history graph.py
      cues history graph.py --span weeks
      cues history data/shop --processor price --span day --json
    """
    now_s = clock.now_ns() / 1e9
    place.only_stores("cues history is", f"use cues status {quoted(place.target.location)}, or Spark's own page.")
    found = {id: points for id, points in place.history(span).items() if processor is None or is_named(id, processor)}
    if output.json:
        output.rows([row for id, points in found.items() for row in _periods(id, points, span, now_s)], ())
        return
    rows = [_summary(id, points, span, now_s) for id, points in found.items() if points]
    if not rows:
        of = f" of {processor}" if processor else ""
        out(f"{place.called} has no history{of} of this time: nothing ran for a second, or all of it was idle.")
        return
    output.rows(rows, _COLUMNS)


def _periods(id: str, points: list[Point], span: str, now_s: float) -> list[dict[str, Any]]:
    table = columns(points, span, now_s)
    rows = []
    for number, values in enumerate(zip(*(table[name] for name in COLUMNS))):
        if any(value is not None for value in values):
            start = datetime.fromtimestamp(table["start"] + number * table["seconds"], UTC)
            about = {"processor": id, "start": start, "seconds": table["seconds"]}
            rows.append(about | dict(zip(COLUMNS, values)))
    return rows


def _summary(id: str, points: list[Point], span: str, now_s: float) -> dict[str, Any]:
    ring = RINGS[span]
    step = ring.slots // BARS * ring.seconds
    bars = [sample.taken if sample is not None else 0 for sample in evened(points, step, BARS, now_s)]
    total, lag = Sample(), 0
    for point in points:
        total, lag = total.and_then(point.sample), max(lag, point.sample.lag)
    seconds = len(points) * ring.seconds
    return {
        "processor": id,
        "bars": sparkline(bars, is_unicode()),
        "in": total.taken / seconds,
        "out": total.written / seconds,
        "lag": lag or None,
        "p50": None if total.p50 is None else brief(total.p50),
        "p99": None if total.p99 is None else brief(total.p99),
        "failed": total.failed or None,
        "away": duration(total.away_s) if total.away_s else None,
    }
