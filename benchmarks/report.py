"""Result files, tables and plots of ``python -m benchmarks``.

A result file is JSON: the machine, the versions, and each round of each contestant. Tables and plots are made from it
alone, so they can be made again (``python -m benchmarks report``).
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

from .contest import AIMS, ENVIRONMENTS, FLOOR, NOT_RUN, ROWS, Aim, Result, Row, compiled_name, missing

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TABLE = HERE / "RESULTS.md"
KEPT = "## Tables by column"
"""The section at the end of the file, which is written by hand from ``tables.py``."""
PLOTS = HERE.parent / "docs" / "images"
README = HERE.parent / "README.md"
BEGIN, END = "<!-- benchmarks: made by python -m benchmarks report -->", "<!-- /benchmarks -->"
DURABILITIES = ("process", "disk")
README_ROWS = {
    "append-one": "append a message, a commit for each",
    "pipeline": "queue → function → queue, in batches",
    "step-one": "queue → function → queue, a commit for each message",
    "keyed": "a count and a sum for each key, in batches",
    "window": "counts in windows of event time",
    "transactions-process": "read, process and write in transactions",
    "latency-1000": "from source to sink, 1,000 messages a second",
    "start": "from the spawn of a process to its first message",
    "restart-kill": "the same after a `kill -9`",
}
"""At most ten rows that matter to a user, in their words; the units are those of the rows."""
README_PLOT = "pipeline"
KINDS = {"Cues": "Cues", "by hand": "written by hand", "product": "product"}
UNITS = {
    "cpu_us": "CPU µs",
    "wall_us": "wall µs",
    "own_mb": "own MB",
    "peak_mb": "peak MB",
    "disk_mb": "disk MB",
    "first_ms": "ms",
    "first": "p50 µs",
    "second": "p99 µs",
    "p50_us": "p50 µs",
    "p99_us": "p99 µs",
    "p99.9_us": "p99.9 µs",
}


def machine() -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "versions": {name: metadata.version(name) for name in ("cues-streams", "lmdb", "msgpack", "xxhash")}
        | {package.split("==")[0]: package.split("==")[1] for package in _peers() if "==" in package},
    }


def _peers() -> Iterable[str]:
    return (package for environment in ENVIRONMENTS.values() for package in environment.packages)


def save(results: list[Result], compiled: str = "") -> Path:
    """Write the result file of a run; ``compiled`` is the version of the compiled core that ran."""
    facts = machine() | ({"compiled": compiled} if compiled else {})
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{facts['date'][:16].replace(':', '')}.json"
    left_out = {module: why for module in ENVIRONMENTS if (why := missing(module))} | NOT_RUN
    _write(path, {"machine": facts, "left_out": left_out}, [result.to_dict() for result in results])
    return path


def add(results: list[Result], compiled: str = "") -> Path:
    """Put the rows of a run into the newest result file; a row that it has already is replaced."""
    path = newest()
    assert path is not None
    facts, of = load(path), machine()
    keys = {(result.row, result.durability) for result in results}
    lines = [line for line in facts.pop("results") if (line["row"], line["durability"]) not in keys]
    added = {"date": of["date"], "load": of["load"], "compiled": compiled}
    lines += [result.to_dict() | {"added": added} for result in results]
    order = [row.name for row in ROWS]
    lines.sort(key=lambda line: (order.index(line["row"]), DURABILITIES.index(line["durability"])))
    _write(path, facts, lines)
    return path


def _write(path: Path, head: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    texts = [json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text(json.dumps(head, ensure_ascii=False)[:-1] + ',\n"results": [\n' + ",\n".join(texts) + "\n]}\n")


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def newest() -> Path | None:
    return max(RESULTS.glob("*.json"), default=None)


def number(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(results: list[dict[str, Any]], row: str, durability: str) -> str:
    """One row as a Markdown table."""
    about = row_of(row)
    of = [result for result in results if (result["row"], result["durability"]) == (row, durability)]
    lines = [
        f"| {about.title}, `{durability}` | × {about.against} | "
        + " | ".join(UNITS[figure] for figure in about.shown)
        + " | spread | |",
        "|---|---|" + "---|" * (len(about.shown) + 2),
    ]
    for result in of:
        ratio = "" if result["ratio"] is None else f"**{number(result['ratio'])}**"
        figures = [[each[name] for each in result["rounds"] if name in each] for name in about.shown]
        main = [each[about.figure] for each in result["rounds"] if about.figure in each]
        spread = f"{number(min(main))}–{number(max(main))}" if main else ""
        note = "; ".join(filter(None, (result["note"], f"**wrong: {result['fault']}**" if result["fault"] else "")))
        cells = [number(statistics.median(values)) if values else "" for values in figures]
        lines.append(f"| {result['contestant']} | {ratio} | " + " | ".join(cells) + f" | {spread} | {note} |")
    added = next((result["added"] for result in of if result.get("added")), None)
    if added:
        lines += [
            "",
            f"Added on {added['date'][:16].replace('T', ' ')} UTC, load {added['load']} at its end{_compiled(added)}.",
        ]
    return "\n".join(lines)


def _compiled(facts: dict[str, Any]) -> str:
    return f", {facts['compiled']}" if facts.get("compiled") else ""


def kind(name: str) -> str:
    """The kind of a contestant."""
    if name.startswith("Cues"):
        return "Cues"
    return "by hand" if name.startswith(("raw LMDB", "SQLite", "floor")) else "product"


def row_of(name: str) -> Row:
    return next(each for each in ROWS if each.name == name)


def figures_of(results: list[dict[str, Any]], row: str, name: str) -> list[float]:
    """The figure of the row, round by round, of a contestant without a fault; in durability ``process``."""
    figure = row_of(row).figure
    key = (row, "process", name)
    return [
        each[figure]
        for result in results
        if (result["row"], result["durability"], result["contestant"]) == key and not result["fault"]
        for each in result["rounds"]
        if figure in each
    ]


def measured(aim: Aim, results: list[dict[str, Any]], compiled: bool, name: str = "") -> float | None:
    """The median over the rounds of the ratio within a round, to the best peer; of another contestant with ``name``."""

    def named(name: str) -> str:
        return compiled_name(name) if compiled else name

    mine = figures_of(results, aim.row, name or named(aim.mine))
    others = [figures_of(results, aim.row, named(peer)) for peer in aim.peers]
    ratios = [statistics.median([m / p for m, p in zip(mine, peer)]) for peer in others if mine and peer]
    return max(ratios, default=None)


def aims(results: list[dict[str, Any]]) -> str:
    """The aims, and whether they are met."""
    lines = [
        "| in `process` | compiled: at most | measured | | pure Python: at most | measured | | floor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for aim in AIMS:
        cells = [aim.title]
        for compiled, limit in ((True, aim.compiled), (False, aim.pure)):
            ratio = measured(aim, results, compiled)
            verdict = "not measured" if ratio is None else "met" if ratio <= limit else "**missed**"
            cells += [f"{limit:g}", number(ratio), verdict]
        cells.append(number(measured(aim, results, False, FLOOR)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(facts: dict[str, Any]) -> str:
    """All tables of a result file."""
    results, of = facts["results"], facts["machine"]
    parts = [
        f"# Results of {of['date'][:10]}",
        f"Made by `python -m benchmarks` on {of['cores']} cores ({of['cpu']}), Python {of['python']}, "
        f"Linux {of['kernel']}, load {of['load']} at the end{_compiled(of)}. "
        "Figures are medians by message; ratios are medians of the ratios within a round. CPU time includes that of a "
        "server. Those in `process` survive `kill -9`; those in `disk` sync each commit and survive a power cut. "
        "Own MB is memory that is not a mapped file, at the end.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in of["versions"].items()) + ".",
    ]
    if facts["left_out"]:
        parts.append("Left out: " + "; ".join(f"{name} ({why})" for name, why in facts["left_out"].items()) + ".")
    parts += [
        "## Aims",
        "Ratios of the figures below, in rounds of one run; those of Cues to the best of the others. The floor is the "
        "ratio of `floor: the calls of Cues`: the calls of LMDB, msgpack, xxhash and struct that the row takes in the "
        "format of Cues, in a plain loop, without Cues ([peers/floors.py](peers/floors.py)).",
        aims(results),
        "## Rows",
    ]
    seen = dict.fromkeys((result["row"], result["durability"]) for result in results)
    parts += [table(results, *key) for key in seen]
    return "\n\n".join(parts) + "\n"


def plot(results: list[dict[str, Any]], row: str, durability: str, dark: bool) -> str:
    """One row as an SVG: a bar for each contestant on a logarithmic scale, the least first, and a legend."""
    about = row_of(row)
    bars = [
        (result["contestant"], statistics.median([each[about.figure] for each in result["rounds"]]), result["fault"])
        for result in results
        if (result["row"], result["durability"]) == (row, durability)
        and result["rounds"]
        and about.figure in result["rounds"][0]
    ]
    bars.sort(key=lambda bar: bar[1])
    text, faint = ("#e6e6e6", "#8b949e") if dark else ("#1f2328", "#59636e")
    colours = dict(zip(KINDS, ("#f0883e", "#4493f8", "#6e7681") if dark else ("#d4590a", "#2f6fc4", "#afb8c1")))
    low = min(value for _, value, _ in bars) / 2
    high = max(value for _, value, _ in bars)
    left, width, line, unit = 250, 380, 26, UNITS[about.figure] + ("" if about.figure == "first_ms" else " a message")
    height = 72 + line * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" '
        f'aria-label="{escape(about.title)}, {unit}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<text x="8" y="20" fill="{text}" font-weight="600">{escape(about.title)}</text>',
    ]
    place = 8
    for each in (each for each in KINDS if any(kind(name) == each for name, _, _ in bars)):
        parts += [
            f'<rect x="{place}" y="32" width="12" height="12" rx="3" fill="{colours[each]}"/>',
            f'<text x="{place + 18}" y="43" fill="{text}">{KINDS[each]}</text>',
        ]
        place += 44 + 7 * len(KINDS[each])
    parts.append(f'<text x="752" y="43" fill="{faint}" text-anchor="end">{unit}, less is better, logarithmic</text>')
    for place, (name, value, fault) in enumerate(bars):
        top = 58 + place * line
        length = max(2.0, width * math.log(value / low) / math.log(high / low))
        weight = ' font-weight="600"' if kind(name) == "Cues" else ""
        shown = number(value) + (" (wrong)" if fault else "")
        parts += [
            f'<text x="{left - 8}" y="{top + 14}" fill="{text}" text-anchor="end"{weight}>{escape(name)}</text>',
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="18" rx="3" fill="{colours[kind(name)]}"/>',
            f'<text x="{left + length + 6:.1f}" y="{top + 14}" fill="{text}">{shown}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def readme_part(facts: dict[str, Any]) -> str:
    """The part of the README between the two marks."""
    results = facts["results"]
    title = row_of(README_PLOT).title
    lines = [
        BEGIN,
        "<picture>",
        f'  <source media="(prefers-color-scheme: dark)" srcset="docs/images/{README_PLOT}-dark.svg">',
        f'  <img alt="CPU time of a message, {title}" src="docs/images/{README_PLOT}-light.svg">',
        "</picture>",
        "",
    ]
    costs: dict[str, dict[str, float]] = {
        row: {
            result["contestant"]: statistics.median(values)
            for result in results
            if result["row"] == row and (values := figures_of(results, row, result["contestant"]))
        }
        for row in README_ROWS
    }
    mine = ["Cues", compiled_name("Cues")]
    mine = [name for name in mine if any(name in each for each in costs.values())]
    lines += [
        f"| | {' | '.join(mine)} | raw LMDB by hand | SQLite by hand | the best product |",
        "|---|---|---|---|" + "---|" * len(mine),
    ]
    for row, what in README_ROWS.items():
        if not costs[row]:
            continue
        raw = next((name for name in costs[row] if name.startswith("raw LMDB")), "")
        products = {name: cost for name, cost in costs[row].items() if kind(name) == "product"}
        best = min(products, key=lambda name: products[name], default="")
        cells = [number(costs[row].get(name)) for name in (*mine, raw, "SQLite")]
        cells.append(f"{number(products[best])} ({best.partition(',')[0]})" if best else "")
        lines.append(f"| {what}, {UNITS[row_of(row).figure].replace('p50 ', '')} | " + " | ".join(cells) + " |")
    of = facts["machine"]
    lines += [
        "",
        f"{of['date'][:10]}, {of['cores']} cores, Python {of['python']}, `process` durability, medians of rounds in "
        "turns. `python -m benchmarks` makes it again, [benchmarks/RESULTS.md](benchmarks/RESULTS.md) has all rows and "
        "the aims.",
        END,
    ]
    return "\n".join(lines)


def write(path: Path) -> list[Path]:
    """Make the tables, the plots and the README's part of a result file; return what was written."""
    facts = load(path)
    _, kept, by_hand = TABLE.read_text().partition(KEPT)
    TABLE.write_text(tables(facts) + (f"\n{kept}{by_hand}" if kept else ""))
    written = [TABLE]
    PLOTS.mkdir(exist_ok=True)
    for row in ROWS:
        if row.products and any(result["row"] == row.name and result["rounds"] for result in facts["results"]):
            for theme in ("light", "dark"):
                image = PLOTS / f"{row.name}-{theme}.svg"
                image.write_text(plot(facts["results"], row.name, "process", theme == "dark"))
                written.append(image)
    text = README.read_text()
    if BEGIN in text and any(result["row"] == README_PLOT for result in facts["results"]):
        start, stop = text.index(BEGIN), text.index(END) + len(END)
        README.write_text(text[:start] + readme_part(facts) + text[stop:])
        written.append(README)
    return written
