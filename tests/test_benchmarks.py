"""The benchmarks run: every row, every contender, and the results that they check themselves.

Never how fast: that is for a quiet machine and a person's eyes.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parent.parent / "benchmarks" / "core.py"


def run(*arguments: str) -> str:
    found = subprocess.run([sys.executable, str(CORE), *arguments], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.slow
def test_every_row_runs_and_prints_finite_numbers() -> None:
    rows = run("--list").split()
    lines = [json.loads(line) for line in run("--quick", "--json").splitlines()]
    assert {line["row"] for line in lines} == set(rows)
    assert {line["durability"] for line in lines} == {"process", "disk"}
    for line in lines:
        figures = [value for value in line.values() if isinstance(value, float)] + (line["ratios"] or [])
        assert len(figures) >= 4, line
        assert all(math.isfinite(figure) and figure >= 0 for figure in figures), line
        if line["target"]:
            assert line["verdict"].startswith(("met", "not met by")), line


def test_rows_can_be_chosen_and_are_printed_as_a_table() -> None:
    table = run("--quick", "--only", "append-many", "--durability", "process")
    assert "append-many · process" in table
    assert "≤ x0.8" in table


def test_an_unknown_row_is_refused_with_those_that_there_are() -> None:
    found = subprocess.run([sys.executable, str(CORE), "--only", "nothing"], capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert "there are append-one" in found.stderr


@pytest.mark.slow
def test_the_benchmark_of_workers_runs_all_rows() -> None:
    found = subprocess.run(
        [sys.executable, str(CORE.parent / "workers.py"), "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["row"] for line in lines] == ["throughput", "idle", "restart"]
    for line in lines:
        assert all(math.isfinite(figure) for figure in line.values() if isinstance(figure, float)), line


@pytest.mark.long
def test_those_of_spark_run_and_every_contender_does_the_same() -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    found = subprocess.run(
        [sys.executable, str(CORE.parent / "spark.py"), "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert {line["row"].split()[0] for line in lines} == {"read", "map", "stream", "start"}
    assert all(math.isfinite(line.get("messages_per_s", 0.0)) for line in lines)


@pytest.mark.slow
def test_the_rows_of_transactions_run_and_every_contender_sees_what_it_should() -> None:
    found = subprocess.run(
        [sys.executable, str(CORE.parent / "txn.py"), "--quick", "--json"], capture_output=True, text=True, timeout=200
    )
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert {line["group"] for line in lines} == {"write", "read", "consumer", "sequencer"} and len(lines) == 17
    assert all(math.isfinite(line["messages_per_s"]) and math.isfinite(line["ratio"]) for line in lines)
