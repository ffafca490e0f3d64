"""The deterministic simulation (tests/simulation): its runs agree with the model, and it finds mutants."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

FOUND = {
    "fence-compares-nothing": 20,
    "fence-of-commit": 20,
    "state-not-written": 60,
    "target-takes-a-repetition": 100,
}
"""Mutants, each with a number of seeds within which a run must fail."""
COMMON = {
    "processes": 200, "kills": 40, "stops": 80, "takeovers from a stopped process": 10, "fenced": 10,
    "full": 1, "write": 1, "unknown": 1, "slow": 1, "jumps of the wall clock": 5, "seeks": 5, "clean ends": 5,
    "points": 15,
}  # fmt: skip
"""Events of a run over some seeds, each with a least number, which is far below the usual one."""


def simulate(
    *options: str,
    where: Path = mutants.ROOT,
    environment: dict[str, str] | None = None,
    module: str = "tests.simulation",
) -> tuple[int, str]:
    """Run the simulation in a process of its own, which replaces the clocks; return its exit status and output."""
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.interpreted
def test_a_seed_agrees_with_the_model() -> None:
    status, output = simulate("--seeds", "1")
    assert status == 0, output[-3000:]


@pytest.mark.interpreted
@pytest.mark.slow
def test_a_seed_repeats_a_run() -> None:
    """Two processes make the same decisions, to the last one, and agree with the model."""
    status, first = simulate("--seed", "7")
    assert status == 0, first[-2000:]
    assert simulate("--seed", "7") == (0, first)
    assert re.search(r"seed 7, commit \S+, digest [0-9a-f]{16}, 0 problems", first)


def happened(output: str) -> dict[str, int]:
    """The counts of some seeds, all of which agreed with the model."""
    found = re.search(r"^(\d+) seeds, 0 problems \(.*?\): (.*)$", output, re.M)
    killed = re.search(r"^kills at (\d+) of ", output, re.M)
    assert found is not None and killed is not None, output[-3000:]
    counts = {what: int(n) for n, what in (each.split(" ", 1) for each in found[2].split(", "))}
    return {**counts, "seeds": int(found[1]), "points": int(killed[1])}


@pytest.mark.interpreted
@pytest.mark.slow
def test_seeds_agree_with_the_model() -> None:
    """And all kinds of faults happen in them: a world in which nothing happens agrees with every model."""
    status, output = simulate("--seeds", "40")
    assert status == 0, output[-3000:]
    counts = happened(output)
    for what, least in COMMON.items():
        assert counts.get(what, 0) >= least, f"{what}: {output[-3000:]}"


@pytest.mark.interpreted
@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_thousands_of_seeds_agree_with_the_model() -> None:
    status, output = simulate("--first", "1000", "--seeds", "3000")
    assert status == 0, output[-3000:]
    counts = happened(output)
    for what, least in (COMMON | {"sync": 1, "points": 40}).items():
        assert counts.get(what, 0) >= least, f"{what}: {output[-3000:]}"


@pytest.mark.interpreted
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_control_the_simulation_finds_mutants(tmp_path: Path) -> None:
    tree = mutants.copied(tmp_path)
    for number, mutant in enumerate(mutants.chosen(list(FOUND)), 1):
        with mutants.applied(tree, mutant, number):
            status, output = simulate(
                "--seeds", str(FOUND[mutant.name]), where=tree, environment=mutants.environment(tree)
            )
        assert status == 1 and "failed after" in output, f"{mutant.name}: {output[-2000:]}"
