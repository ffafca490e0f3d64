"""``cues top``: on a terminal of 80 columns, for scripts, and its picture in the docs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from terminal import Command
from terminal import cues as command

import cues
from cues.base import texts
from cues.base.events import Counters
from cues.base.names import ProcessorId
from cues.cli import top
from cues.engine.history import Point, Sample
from cues.engine.standing import TailerMetrics
from cues.tools.measurement import LastError, Measurement, Owner, ProcessMetrics, ProcessorMetrics

PICTURE = Path(__file__).parent.parent / "docs" / "top.svg"

GRAPH = """
import cues
graph = cues.Graph("g", durability="process", errors="errors")
graph.source("numbers")

@graph.stream("numbers", "doubled")
def double(number):
    return {"n": 2 // number["n"]}
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The graph file of a graph that has run: 9 messages, one of which failed."""
    path = tmp_path / "graph.py"
    path.write_text(GRAPH)
    with cues.open(tmp_path / "data" / "g", durability="process") as opened:
        opened.queue("numbers").appender().write_many([{"n": n} for n in range(9)])
    assert command("run", path, "--idle-exit", 0).code == 0
    return path


def measured(at: float, taken: int) -> Measurement:
    """A graph under load, after ``at`` seconds."""
    owner = Owner(4711, "running", 9.0)
    units = []
    for name, kind, share, lag, call_us in (
        ("orders", "source", 1.0, 0, 300), ("enrich", "stream", 0.98, 1_204, 900), ("save", "sink", 0.95, 36, 4_200),
    ):  # fmt: skip
        id, count = ProcessorId(f"shop.{name}"), int(taken * share)
        tailer = TailerMetrics(f"{id}.q", "orders", count + 1, lag)
        error = LastError("errors", 7, datetime.now(UTC) - timedelta(seconds=3), "ValueError", "no price")
        counters = Counters(taken=count, written=count, steps=count // 40, calls=count, in_flight=2)
        counters.sizes.add(40, count // 40)
        if kind != "source":
            counters.latency.add(call_us, count)
            counters.latency.add(call_us * 90, count // 40)
        tailers = (tailer,) if kind != "source" else ()
        errors = 3 if name == "enrich" else 0
        unit = ProcessorMetrics(id, kind, 1, 0, owner, tailers, None, 1.0, None, errors, error, is_running=True)
        units.append(dataclasses.replace(unit, counters=counters))
    processes = (
        ProcessMetrics(4711, at * 0.91, 61_000_000, ("shop.orders", "shop.enrich"), "worker-1", "shop", 1),
        ProcessMetrics(4712, at * 0.34, 47_000_000, ("shop.save",), "worker-2", "shop"),
    )
    return Measurement("data/shop", "disk", 48_000_000, (), tuple(units), processes=processes)


def look(at: float, taken: int) -> top.Look:
    return top.Look(at, "data/shop  48 MB  full in 3 d 4 h", measured(at, taken))


def picture(view: top.View, width: int = 80) -> str:
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=width, record=True, file=io.StringIO(), color_system="truecolor")
    console.print(view.draw(look(10, 10_000), look(12, 18_000)))
    return str(console.export_text())


# --- the picture ------------------------------------------------------------------------------------


def test_rates_are_of_the_time_between_two_looks() -> None:
    rows = {row["processor"]: row for row in top.rates(look(10, 10_000), look(12, 18_000))}
    assert rows["shop.orders"]["in"] == 4_000
    assert rows["shop.enrich"]["out"] == pytest.approx(3_920)
    assert rows["shop.orders"]["p50"] is None
    assert rows["shop.enrich"]["p50"] == pytest.approx(900e-6, rel=0.25)
    assert rows["shop.enrich"]["p99"] == pytest.approx(81e-3, rel=0.25)
    assert rows["shop.enrich"]["batch"] == pytest.approx(40, rel=0.25)
    first, second = top.uses(look(10, 10_000), look(12, 18_000))
    assert (first["cpu"], second["cpu"]) == (pytest.approx(0.91), pytest.approx(0.34))
    restarted = dataclasses.replace(look(12, 18_000).processes[0], pid=9)
    after = look(12, 18_000)
    after.processes = (restarted,)
    assert top.uses(look(10, 10_000), after)[0]["cpu"] is None  # another process: not a difference
    assert all(row["in"] == 0 for row in top.rates(look(10, 10_000), look(12, 0)))  # it began anew


def test_eighty_columns_have_room_for_every_column() -> None:
    for width in (80, 120):
        lines = picture(top.View(), width).splitlines()
        assert max(map(len, lines)) <= width
        (enrich,) = [line for line in lines if "shop.enrich" in line]
        for cell in (" 3.9k ", " 1.2k ", "ms ", " 17.6k/2 ", " 3"):
            assert cell in enrich, (cell, enrich)
        assert any(line.startswith("worker-1") and "91%" in line and "61 MB" in line for line in lines)


def test_the_keys_sort_select_and_show_details() -> None:
    view = top.View()
    text = picture(view)
    assert text.index("shop.orders") < text.index("shop.enrich") < text.index("shop.save")
    for key in "sss":
        view.press(key)
    text = picture(view)
    assert "LAG▼" in text and text.index("shop.enrich") < text.index("shop.save") < text.index("shop.orders")
    view.press("r")
    text = picture(view)
    assert "LAG▲" in text and text.index("shop.orders") < text.index("shop.save") < text.index("shop.enrich")
    for key in ("j", "j", "j", "j", "k", "\n"):
        view.press(key)
    assert view.selected == "shop.save"
    assert "ValueError: no price" in picture(view)
    view.press("?")  # other keys do nothing
    assert view.selected == "shop.save"


def test_the_picture_of_the_docs_is_what_top_draws(tmp_path: Path) -> None:
    """Delete docs/top.svg, and this test makes it again."""
    rich = pytest.importorskip("rich.console")
    view = top.View()
    picture(view)
    view.press("j")
    view.press("j")
    view.press("\n")
    with open(os.devnull, "w") as nothing:
        console = rich.Console(width=80, record=True, file=nothing, color_system="truecolor")
        console.print(view.draw(look(10, 10_000), look(12, 18_000)))
    svg = console.export_svg(title="cues top data/shop", unique_id="top")
    if not PICTURE.exists():
        PICTURE.write_text(svg)
    texts = [part.split("<")[0] for part in PICTURE.read_text().split(">") if "shop." in part.split("<")[0]]
    assert texts and all(text in svg for text in texts)


def test_the_last_hour_is_a_column_of_a_wide_terminal_and_in_the_details() -> None:
    rich = pytest.importorskip("rich.console")
    now = look(12, 18_000)
    began = int(now.time_s) // 10 * 10 - 3600
    samples = [Point(began + 10 * n, 10, Sample(10 * n, 0, 0, 360 - n, 0.1, 0.2)) for n in range(1, 358)]
    now.history = {"shop.save": samples}

    def drawn(width: int) -> str:
        view.draw(None, now, width)
        console = rich.Console(width=width, file=io.StringIO(), color_system=None)
        console.print(view.draw(None, now, width))
        text: str = console.file.getvalue()
        return text

    view = top.View()
    assert "HOUR" not in drawn(80)
    wide = drawn(120).splitlines()
    assert "HOUR" in next(line for line in wide if "PROCESSOR" in line)
    bars = next(line for line in wide if "shop.save" in line).rstrip()[-12:]
    assert list(bars) == sorted(bars) and bars[0] == "▁" and bars[-1] == "█"
    view.selected, view.details = "shop.save", True
    details = drawn(80)
    assert "at most 357 in the last hour" in details and "at most 200ms in the last hour" in details
    assert max(map(len, details.splitlines())) <= 80


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, ""), (0, "0"), (7.25, "7.2"), (999, "999"), (1204, "1.2k"), (123_456, "123k"), (5e6, "5.0M")]
)  # fmt: skip
def test_numbers_are_short(number: float | None, text: str) -> None:
    assert top.short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00042, "0.4ms"), (0.081, "81ms"), (1.26, "1.3s"), (75, "1.2min"), (90_000, "1.0d")]
)  # fmt: skip
def test_times_are_short(seconds: float, text: str) -> None:
    assert texts.brief(seconds) == text


# --- the command ------------------------------------------------------------------------------------


def test_for_scripts_it_looks_twice_and_ends(store: Path) -> None:
    shown = command("top", store, "--every", 0.1, "--once", "--table")
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[0].startswith("PROCESSOR")
    (row,) = map(json.loads, command("top", store, "--every", 0.1, "--json").out.splitlines())
    assert (row["processor"], row["lag"], row["errors"], row["running"]) == ("g.double", 0, 1, False)


@contextlib.contextmanager
def running(store: Path) -> Iterator[Command]:
    with Command("run", store, "--json") as run:
        run.until('"type": "progress"')
        yield run


def test_on_a_terminal_it_shows_a_running_graph_until_q(store: Path) -> None:
    pytest.importorskip("rich")
    with running(store), Command("top", store, "--every", 0.1, terminal=True) as live:
        live.until(r"g\.double[\s\S]*CPU")
        live.type("j\n")
        live.until("ZeroDivisionError")
        live.type("q")
        assert live.wait() == 0
    assert "Traceback" not in live.text


def test_ctrl_c_ends_it_too(store: Path) -> None:
    pytest.importorskip("rich")
    with Command("top", store, "--every", 0.1, terminal=True) as live:
        live.until(r"g\.double")
        live.type("\x03")
        assert live.wait() == 130
    assert "Traceback" not in live.text
    assert live.text.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in live.text  # the screen from before is back


def test_without_rich_it_says_what_to_install(store: Path) -> None:
    code = "import sys; sys.modules['rich'] = sys.modules['rich.live'] = None; from cues.cli import main; main()"
    hidden = store.parent / "hidden.py"
    hidden.write_text(code)
    arguments = f"[sys.executable, {str(hidden)!r}, 'top', {str(store)!r}, '--every', '0.1']"
    script = f"import pty, sys; sys.exit(pty.spawn({arguments}) >> 8)"
    given = {"capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL}
    ended = subprocess.run([sys.executable, "-c", script], **given)  # type: ignore[call-overload]
    assert ended.returncode == 2, ended.stdout
    assert "pip install 'cues-streams[watch]'" in ended.stdout
