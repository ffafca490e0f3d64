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

from .contest import ENVIRONMENTS, NOT_RUN, ROWS, Result, missing

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TABLE = HERE / "RESULTS.md"
PLOTS = HERE.parent / "docs" / "images"
README = HERE.parent / "README.md"
BEGIN, END = "<!-- benchmarks: made by python -m benchmarks report -->", "<!-- /benchmarks -->"
DURABILITIES = ("process", "disk")
README_ROWS = ("pipeline", "step-one")
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


def save(results: list[Result]) -> Path:
    """Write the result file of a run."""
    facts = machine()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{facts['date'][:16].replace(':', '')}.json"
    left_out = {module: why for module in ENVIRONMENTS if (why := missing(module))} | NOT_RUN
    _write(path, {"machine": facts, "left_out": left_out}, [result.to_dict() for result in results])
    return path


def add(results: list[Result]) -> Path:
    """Put the rows of a run into the newest result file; a row that it has already is replaced."""
    path = newest()
    assert path is not None
    facts, of = load(path), machine()
    keys = {(result.row, result.durability) for result in results}
    lines = [line for line in facts.pop("results") if (line["row"], line["durability"]) not in keys]
    lines += [result.to_dict() | {"added": {"date": of["date"], "load": of["load"]}} for result in results]
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
    (about,) = (each for each in ROWS if each.name == row)
    lines = [
        f"| {about.title}, `{durability}` | × {about.against} | "
        + " | ".join(UNITS[figure] for figure in about.shown)
        + " | spread | |",
        "|---|---|" + "---|" * (len(about.shown) + 2),
    ]
    for result in results:
        if (result["row"], result["durability"]) != (row, durability):
            continue
        ratio = "" if result["ratio"] is None else f"**{number(result['ratio'])}**"
        figures = [[each[name] for each in result["rounds"] if name in each] for name in about.shown]
        main = [each[about.figure] for each in result["rounds"] if about.figure in each]
        spread = f"{number(min(main))}–{number(max(main))}" if main else ""
        note = "; ".join(filter(None, (result["note"], f"**wrong: {result['fault']}**" if result["fault"] else "")))
        cells = [number(statistics.median(values)) if values else "" for values in figures]
        lines.append(f"| {result['contestant']} | {ratio} | " + " | ".join(cells) + f" | {spread} | {note} |")
    return "\n".join(lines)


def tables(facts: dict[str, Any]) -> str:
    """All tables of a result file."""
    results, of = facts["results"], facts["machine"]
    parts = [
        f"# Results of {of['date'][:10]}",
        f"Made by `python -m benchmarks` on {of['cores']} cores ({of['cpu']}), Python {of['python']}, "
        f"Linux {of['kernel']}, load {of['load']} at the end. "
        "Figures are medians by message; ratios are medians of the ratios within a round. CPU time includes that of a "
        "server. Those in `process` survive `kill -9`; those in `disk` sync each commit and survive a power cut. "
        "Own MB is memory that is not a mapped file, at the end.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in of["versions"].items()) + ".",
    ]
    if facts["left_out"]:
        parts.append("Left out: " + "; ".join(f"{name} ({why})" for name, why in facts["left_out"].items()) + ".")
    seen = dict.fromkeys((result["row"], result["durability"]) for result in results)
    parts += [table(results, *key) for key in seen]
    return "\n\n".join(parts) + "\n"


def plot(results: list[dict[str, Any]], row: str, durability: str, dark: bool) -> str:
    """One row as an SVG: a bar for each contestant on a logarithmic scale, the least first."""
    (about,) = (each for each in ROWS if each.name == row)
    bars = [
        (result["contestant"], statistics.median([each[about.figure] for each in result["rounds"]]), result["fault"])
        for result in results
        if (result["row"], result["durability"]) == (row, durability)
        and result["rounds"]
        and about.figure in result["rounds"][0]
    ]
    bars.sort(key=lambda bar: bar[1])
    text, faint, other, mine = (
        ("#e6e6e6", "#8b949e", "#57606a", "#f0883e") if dark else ("#1f2328", "#59636e", "#afb8c1", "#d4590a")
    )
    low = min(value for _, value, _ in bars) / 2
    high = max(value for _, value, _ in bars)
    left, width, line = 250, 380, 26
    height = 46 + line * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" '
        f'aria-label="{escape(about.title)}, {UNITS[about.figure]} a message" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<text x="8" y="20" fill="{text}" font-weight="600">{escape(about.title)}</text>',
        f'<text x="752" y="20" fill="{faint}" text-anchor="end">{UNITS[about.figure]} a message, logarithmic</text>',
    ]
    for place, (name, value, fault) in enumerate(bars):
        top = 34 + place * line
        length = max(2.0, width * math.log(value / low) / math.log(high / low))
        is_cues = name.startswith("Cues")
        shown = number(value) + (" (wrong)" if fault else "")
        parts += [
            f'<text x="{left - 8}" y="{top + 14}" fill="{text}" text-anchor="end"'
            + (' font-weight="600"' if is_cues else "")
            + f">{escape(name)}</text>",
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="18" rx="3" fill="{mine if is_cues else other}"/>',
            f'<text x="{left + length + 6:.1f}" y="{top + 14}" fill="{text}">{shown}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def readme_part(facts: dict[str, Any]) -> str:
    """The part of the README between the two marks."""
    parts = [
        BEGIN,
        "<picture>",
        '  <source media="(prefers-color-scheme: dark)" srcset="docs/images/pipeline-dark.svg">',
        '  <img alt="CPU time of a message through a durable pipeline" src="docs/images/pipeline-light.svg">',
        "</picture>",
        "",
    ]
    for row in README_ROWS:
        (about,) = (each for each in ROWS if each.name == row)
        lines = [f"| {about.title} | CPU µs a message | × Cues |", "|---|---|---|"]
        costs = [
            (statistics.median([each["cpu_us"] for each in result["rounds"]]), result)
            for result in facts["results"]
            if (result["row"], result["durability"]) == (row, "process") and result["rounds"] and not result["fault"]
        ]
        mine = next(cost for cost, result in costs if result["contestant"] == "Cues")
        lines += [
            f"| {result['contestant']} | {number(cost)} | {number(cost / mine)} |"
            for cost, result in sorted(costs, key=lambda pair: pair[0])
            if not result["contestant"].startswith("floor")
        ]
        parts += ["\n".join(lines), ""]
    of = facts["machine"]
    parts += [
        f"{of['date'][:10]}, {of['cores']} cores, Python {of['python']}, `process` durability, rounds in turns; "
        "`python -m benchmarks` makes it again, [benchmarks/RESULTS.md](benchmarks/RESULTS.md) has all rows.",
        END,
    ]
    return "\n".join(parts)


def write(path: Path) -> list[Path]:
    """Make the tables, the plots and the README's part of a result file; return what was written."""
    facts = load(path)
    TABLE.write_text(tables(facts))
    written = [TABLE]
    PLOTS.mkdir(exist_ok=True)
    for row in ROWS:
        if row.products and any(result["row"] == row.name and result["rounds"] for result in facts["results"]):
            for theme in ("light", "dark"):
                image = PLOTS / f"{row.name}-{theme}.svg"
                image.write_text(plot(facts["results"], row.name, "process", theme == "dark"))
                written.append(image)
    text = README.read_text()
    if BEGIN in text and any(result["row"] == README_ROWS[0] for result in facts["results"]):
        start, stop = text.index(BEGIN), text.index(END) + len(END)
        README.write_text(text[:start] + readme_part(facts) + text[stop:])
        written.append(README)
    return written
