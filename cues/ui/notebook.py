"""HTML for notebooks: a graph as a picture, a queue as a table of its last messages, a run as a table of processors.

The HTML needs no script and no file. It takes the colour of the text around it, so it fits light and dark themes. Texts
of messages are escaped, and their invisible and reordering characters are written out (text.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import Any, Final

from cues.base.shown import RunRow, RunTable
from cues.engine.sampler import lags_of
from cues.graphs.graph import Graph
from cues.graphs.running import Running
from cues.operate.shape import shape_of_graph
from cues.queues.queue import Queue
from cues.ui import shape, text

MESSAGES: Final = 10
"""The last messages of a queue that are shown."""
FIELDS_MAX: Final = 20
CELL_CHARACTERS: Final = 80
_RANK_PX: Final = 170
_PLACE_PX: Final = 56
_BOX: Final = (130, 34)
_NAME_CHARACTERS: Final = 17


def html(value: Any) -> str:
    """Return the HTML of a graph, a queue or a run."""
    if isinstance(value, Graph):
        return graph_html(value)
    if isinstance(value, Running):
        return running_html(value)
    if isinstance(value, RunTable):
        return run_html(value.title, value.rows())
    return queue_html(value)


def graph_html(graph: Graph) -> str:
    """The graph as an SVG, from left to right: boxes are processors, rounded ones queues."""
    declared = shape_of_graph(graph)
    drawn = shape.layout(declared)
    titles = {f"p:{each.id}": each for each in declared.processors}
    width, height = drawn["ranks"] * _RANK_PX, drawn["places"] * _PLACE_PX + 10
    at = {node["id"]: (node["rank"] * _RANK_PX + 4, node["place"] * _PLACE_PX + 10) for node in drawn["nodes"]}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" role="img" '
        f'style="max-width:100%" fill="none" stroke="currentColor" font-size="12" font-family="system-ui, sans-serif">'
        f"<title>{_safe(graph.id)}</title>"
    ]
    for edge in drawn["edges"]:
        (left, top), (right, bottom) = at[edge["from"]], at[edge["to"]]
        bends = [
            (rank * _RANK_PX + _RANK_PX / 2, place * _PLACE_PX + 10 + _BOX[1] / 2) for rank, place in edge["bends"]
        ]
        points = [(left + _BOX[0], top + _BOX[1] / 2), *bends, (right, bottom + _BOX[1] / 2)]
        dashed = ' stroke-dasharray="4 3"' if edge["back"] else ""
        way = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        parts.append(f'<polyline points="{way}" opacity="0.5"{dashed}/>')
        parts.append(
            f'<circle cx="{right:.0f}" cy="{bottom + _BOX[1] / 2:.0f}" r="3" fill="currentColor" stroke="none"/>'
        )
    for node, (x, y) in at.items():
        name = node[2:]
        processor = titles.get(node)
        if processor is not None:
            name = processor.name
        about = name if processor is None else f"{processor.kind} {processor.name}: {processor.guarantee}"
        radius = 4 if processor is not None else _BOX[1] // 2
        bold = ' font-weight="600"' if processor is not None else ""
        parts.append(
            f'<g><title>{_safe(about)}</title><rect x="{x:.0f}" y="{y:.0f}" width="{_BOX[0]}" height="{_BOX[1]}" '
            f'rx="{radius}"/><text x="{x + _BOX[0] / 2:.0f}" y="{y + 21:.0f}" text-anchor="middle" stroke="none" '
            f'fill="currentColor"{bold}>{_safe(_cut(name, _NAME_CHARACTERS))}</text></g>'
        )
    return "".join([*parts, "</svg>"])


def queue_html(queue: Queue) -> str:
    """The last messages of a queue, with index and time; a column for each field."""
    messages: list[tuple[Any, dict[str, Any]]] = []
    for number in range(queue.partitions):
        view = queue.partition(number) if queue.partitions > 1 else queue
        tailer = view.tailer()
        tailer.to_index(max(view.first_index, view.last_index + 1 - MESSAGES))
        for message in islice(tailer, MESSAGES):
            messages.append((tailer.envelope, message))
    messages.sort(key=lambda pair: pair[0].time)
    messages = messages[-MESSAGES:]
    fields = list(dict.fromkeys(str(name) for _, message in messages for name in message))
    several = queue.partitions > 1
    head = [*(["partition"] if several else []), "index", "time", *fields[:FIELDS_MAX]]
    rows = []
    for envelope, message in messages:
        known = {str(name): value for name, value in message.items()}
        cells = [_shown(known[name]) if name in known else "" for name in fields[:FIELDS_MAX]]
        time = envelope.time.isoformat(" ", "milliseconds")
        rows.append([*([str(envelope.partition)] if several else []), str(envelope.index), time, *cells])
    count = len(queue)
    more = f", {len(fields) - FIELDS_MAX} more fields" if len(fields) > FIELDS_MAX else ""
    about = f"{queue.id}: {count:,} messages" + (f", the last {len(rows)}" if count > len(rows) else "") + more
    return _table(about, head, rows)


def running_html(running: Running) -> str:
    """The processors of a run: what they took and wrote, and how many messages wait for them."""
    lags = {} if running.closed else lags_of(running)
    sources = {node.id for node in running.plan.running if node.kind == "source"}
    rows = [
        RunRow(unit.id, unit.state, unit.counters, None if unit.processor in sources else lags.get(unit.id))
        for unit in running.standings()
    ]
    state = "closed" if running.closed else "idle" if running.idle() else "running"
    return run_html(f"{running.plan.id}: {state}", rows)


def run_html(title: str, rows: Iterable[RunRow]) -> str:
    """A table of processors. A bar is the part of the messages that is taken, of those since the start."""
    rows, shown = list(rows), []
    for row in rows:
        counters = row.counters
        numbers = [counters.taken, counters.written, counters.failed, counters.in_flight]
        waiting = "" if row.waiting is None else f"{row.waiting:,}"
        shown.append([row.processor, row.state, *(f"{number:,}" for number in numbers), waiting])
    bars = [None if row.waiting is None else (row.counters.taken, row.counters.taken + row.waiting) for row in rows]
    head = ["processor", "", "taken", "written", "failed", "calls in flight", "waiting"]
    return _table(title, head, shown, bars if any(bars) else ())


def _table(
    about: str, head: Sequence[str], rows: Iterable[Sequence[str]], bars: Sequence[tuple[int, int] | None] = ()
) -> str:
    """A table; with ``bars`` each row ends with a progress bar, or with None without one."""
    ends = ["" if bar is None else f"<td>{_bar(*bar)}</td>" for bar in bars]
    cells = "".join(f'<th style="text-align:left">{_safe(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{_safe(cell)}</td>' for cell in row) + end + "</tr>"
        for row, end in itertools.zip_longest(rows, ends, fillvalue="")
    )
    caption = f'<caption style="text-align:left;font-weight:600">{_safe(about)}</caption>'
    return f"<table>{caption}<thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _bar(done: int, all: int) -> str:
    return f'<progress value="{done}" max="{max(1, all)}">{done:,} of {all:,}</progress>'


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return _cut(value, CELL_CHARACTERS)
    shown, cut = text.preview(value, CELL_CHARACTERS)
    return shown + ("…" if cut else "")


def _cut(value: str, characters: int) -> str:
    return value if len(value) <= characters else value[: characters - 1] + "…"


def _safe(value: str) -> str:
    return escape(text.safe(value))
