"""Figures of processors, in every display alike; the latency of the last minute."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import until
from terminal import Command
from terminal import cues as command

import cues
from cues.base.histogram import RECENT_S, Histogram, Recent
from cues.operate.place import place_of
from cues.operate.target import resolve
from cues.tools import metrics
from cues.tools.figures import values

GRAPH = """
import cues, time
graph = cues.Graph("g", durability="process", queues={"in": cues.QueueOptions(partitions=2)})
graph.source("in")

@graph.stream("in", "out", batch_size=1)
def slow(message):
    time.sleep(0.05)
    return message
"""


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 1 << 20)), max_size=40))
def test_recent_values_are_those_of_the_last_minute_to_ten_seconds_more(beats: list[tuple[int, int]]) -> None:
    """For any beats up to 30 s apart, with any values between them; at most eight copies are kept."""
    now, total, recent = 0.0, Histogram(), Recent(0.0)
    added: list[tuple[float, int]] = []
    times = [0.0]
    for pause_s, value in beats:
        now += pause_s
        total.add(value)
        added.append((now, value))  # after the beat before, at the latest at this one
        found = recent.of(total, now)
        times.append(now)
        must, may = Histogram(), Histogram()
        longest = max(b - a for a, b in itertools.pairwise(times))
        for when, each in added:
            if when > now - RECENT_S:
                must.add(each)
            if when > now - RECENT_S - 10 - 2 * longest:
                may.add(each)
        assert all(found.get(bucket, 0) >= count for bucket, count in must.items())
        assert all(count <= may.get(bucket, 0) for bucket, count in found.items())
        assert len(recent.copies) <= 8


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "graph.py"
    path.write_text(GRAPH)
    return path


def p99(graph: Path) -> float | None:
    with place_of(resolve(str(graph))) as place:
        (figures,) = [each for each in place.measure().figures() if each.processor == "g.slow"]
        return values(figures)["p99"]  # type: ignore[no-any-return]


def units(graph: Path) -> dict[str, float | None]:
    rows = map(json.loads, command("status", graph).out.splitlines())
    return {row["processor"]: row["p99"] for row in rows if "processor" in row}


def send(graph: Path, count: int) -> None:
    with cues.open(graph.parent / "data" / "g") as store:
        for partition in range(2):
            store.queue("in").partition(partition).appender().write_many([{"n": n} for n in range(count // 2)])


def test_the_latency_of_workers_is_that_of_all_units_and_ends_with_the_run(graph: Path) -> None:
    """Each of 20 messages waits for those before it on its partition, so the last ones take about half a second."""
    for _ in range(2):
        with Command("run", graph, "--workers", 2, "--json") as run:
            run.until('"type": "progress"')
            until(lambda: any(json.loads(line).get("running") for line in command("status", graph).out.splitlines()))
            assert p99(graph) is None  # also in the second run: what an earlier process measured is not its latency
            send(graph, 20)
            until(lambda: all(of and of > 0.3 for of in units(graph).values()))
            assert set(units(graph)) == {"g.slow", "g.slow/1"}
            assert 0.3 < (p99(graph) or 0) < 5
            table = command("status", graph, "--table").out
            assert re.search(r"P99[\s\S]*\ng\.slow .* [0-9.]+m?s ", table), table
        until(lambda: p99(graph) is None)  # the run was killed; its workers see that and end
        assert "P99" not in command("status", graph, "--table").out


def test_a_processor_that_does_not_answer_has_no_latency(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Command("run", graph, "--json") as run:
        run.until('"type": "progress"')
        send(graph, 2)
        until(lambda: p99(graph) is not None)
        monkeypatch.setattr(metrics, "_lease_s", lambda store, row: 0.0)
        assert p99(graph) is None


def test_a_new_figure_is_one_entry(graph: Path) -> None:
    """It is a column of status, of top and of the page, and a gauge."""
    pytest.importorskip("prometheus_client")
    assert command("send", f"{graph}#in", "n=1").code == 0
    assert command("run", graph, "--idle-exit", 0).code == 0
    code = f"""
import sys
from cues.tools import figures
new = figures.Figure("depth", "depth", "dpt", "A new figure.", "messages", lambda each: 7, "cues_processor_depth")
figures.FIGURES += (new,)
from cues.cli.app import run
from cues.ui.look import look_of, settings_of
for words in (["status", "--table"], ["top", "--once", "--every", "0.1", "--table"], ["metrics"]):
    assert run([words[0], {str(graph)!r}, *words[1:]]) == 0
look = look_of(settings_of({str(graph.parent / "data" / "g")!r}, None, ""))
print([row["depth"] for row in look.overview()["processors"]], look.graph()["figures"][-1]["name"])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    lines = out.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("PROCESSOR")][1] == "DEPTH"
    assert sum("DEPTH" in line for line in lines) == 2
    assert 'cues_processor_depth{graph="g",processor="slow"} 7.0' in lines
    assert lines[-1] == "[7] depth"
