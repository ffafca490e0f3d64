"""The benchmarks run: every row, every contender, and the results that they check themselves.

Never how fast: that is for a quiet machine and a person's eyes.
"""

from __future__ import annotations

import json
import math
import shutil
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


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=CORE.parent.parent)


@pytest.mark.slow
def test_the_program_races_each_contestant_in_a_process_and_checks_what_it_left() -> None:
    """Without prepared peers there are the contestants that need none; a wrong result of Cues ends it with 1."""
    done = program(
        "--quick", "--durability", "process", "--only", "pipeline", "--only", "keyed", "--only", "latency-1000"
    )
    assert done.returncode == 0, done.stderr
    for row in ("in batches, `process` | × raw LMDB", "500 keys, `process` | × raw LMDB", "1,000 messages a second"):
        assert row in done.stdout
    for line in done.stdout.splitlines():
        if line.startswith(("| Cues |", "| raw LMDB", "| SQLite")):
            assert "**" in line and "wrong" not in line, line


@pytest.mark.slow
def test_starts_and_transactions_run_and_are_checked() -> None:
    """The restart after ``kill -9`` is the one whose results are compared after the most."""
    rows = ("start", "restart-kill", "transactions-append", "sources")
    done = program("--quick", "--durability", "process", *(word for row in rows for word in ("--only", row)))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("| Cues", "| raw LMDB", "| SQLite"))]
    assert len(lines) == 3 * 3 + 2 and all("**" in line and "wrong" not in line for line in lines), done.stdout


@pytest.mark.slow
def test_a_cues_that_is_not_compiled_or_not_installed_is_refused() -> None:
    for python, text in ((sys.executable, "Try: install"), ("/nothing/python", "No such file")):
        done = program("--quick", "--only", "hop", "--compiled", python)
        assert done.returncode == 2 and text in done.stderr, done.stderr


@pytest.mark.slow
def test_added_rows_replace_those_of_the_newest_file_and_count_for_the_aims(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from benchmarks import report
from benchmarks.contest import Result

report.RESULTS = Path(sys.argv[1])

def of(row, name, *figures):
    return Result(row, "process", name, "", 1, [{"cpu_us": figure} for figure in figures])

peer, packed = of("pipeline", "raw LMDB", 2.0, 2.0), of("pipeline", "bytewax, commit every 10 s", 4.0, 8.0)
first = report.save([of("pipeline", "Cues", 9.0), of("append-one", "Cues", 5.0)])
both = [of("pipeline", "Cues", 1.0, 2.0), of("pipeline", "Cues, compiled", 0.5, 0.5)]
floor = of("pipeline", "floor: the calls of Cues", 1.5, 1.5)
assert report.add([*both, peer, floor, packed], "core: compiled") == first
facts = report.load(first)
print([(line["row"], line["contestant"], bool(line["added"])) for line in facts["results"]])
aims = report.aims(facts["results"]).splitlines()
print(*(line for line in aims if line.startswith(("| pipeline / raw", "| pipeline / the best"))), sep="\\n")
print(report.tables(facts).count("core: compiled"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=CORE.parent.parent, timeout=60
    )
    names = ("Cues", "Cues, compiled", "raw LMDB", "floor: the calls of Cues", "bytewax, commit every 10 s")
    assert done.stdout.splitlines() == [
        str([("append-one", "Cues", False), *(("pipeline", name, True) for name in names)]),
        "| pipeline / raw LMDB by hand | 0.7 | 0.25 | met | 0.9 | 0.75 | met | 0.75 |",
        "| pipeline / the best product | 0.5 | 0.0938 | met | 0.65 | 0.25 | met | 0.281 |",
        "1",
    ], done.stderr + done.stdout


@pytest.mark.slow
def test_a_contestant_that_loses_repeats_or_reorders_is_marked() -> None:
    code = """
import work
for result in ([1, 3], [1, 1, 2, 3], [2, 1, 3], [1, 2, 4]):
    try:
        work.must_be(result, [1, 2, 3])
    except work.Fault as fault:
        print(str(fault).split(";")[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CORE.parent, timeout=60)
    assert done.stdout.splitlines() == ["1 lost", "1 repeated", "reordered", "1 lost, 1 not asked for"], done.stderr


@pytest.mark.slow
def test_the_table_and_the_plots_of_the_readme_are_those_of_the_newest_result_file(tmp_path: Path) -> None:
    """They are made again from the file, and nothing changes."""
    root = CORE.parent.parent
    copy = tmp_path / "copy"
    for name in ("benchmarks", "docs/images"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns(".peers", "__pycache__"))
    shutil.copy(root / "README.md", copy / "README.md")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "report"], capture_output=True, text=True, cwd=copy, timeout=60
    )
    assert done.returncode == 0, done.stderr
    written = [Path(line) for line in done.stdout.split()]
    assert copy / "README.md" in written and len(written) >= 4
    for path in written:
        assert path.read_text() == (root / path.relative_to(copy)).read_text(), path.relative_to(copy)


@pytest.mark.slow
def test_a_message_costs_no_more_instructions_than_before() -> None:
    """Counts of bytecode, which other programs on the machine hardly change; the figures are those of Python 3.11."""
    done = subprocess.run([sys.executable, str(CORE.parent / "costs.py")], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "instructions a message" in done.stdout
