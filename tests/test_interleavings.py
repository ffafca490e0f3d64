"""All interleavings of two processes over a small graph (tests/simulation/interleavings.py), and its controls."""

from __future__ import annotations

import re

import pytest
from sets import slow_except
from test_simulation import simulate

KINDS = ("plain", "disk", "side effects", "two stores")
FOUND = {
    "NO_FENCE": ("plain", 0),
    "CHECK_BEFORE": ("plain", 0),
    "TWO_COMMITS": ("plain", 1),
    "POSITION_FIRST": ("side effects", 1),
    "NO_ROW": ("two stores", 0),
}
"""Protections that the code has, each with a kind of graph and a number of kills with which the search misses it."""


def explore(*options: str) -> tuple[int, str]:
    return simulate(*options, module="tests.simulation.interleavings")


def complete(output: str) -> bool:
    """Return whether a search has made all executions, and found no problem."""
    found = re.fullmatch(r"[a-z ]+: 0 problems, (\d+) executions, .* 1 complete, .*\n", output)
    return found is not None and int(found[1]) > 100


@pytest.mark.interpreted
def test_the_first_interleavings_are_exact() -> None:
    status, output = explore("--kind", "plain", "--kills", "0", "--most", "10")
    assert status == 0 and "0 problems, 10 executions" in output, output[-3000:]


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "side effects"])
def test_all_interleavings_without_a_death_are_exact(kind: str) -> None:
    """A process takes over from one that is stopped at any point, and that continues at any later point."""
    status, output = explore("--kind", kind, "--kills", "0")
    assert status == 0 and complete(output), output[-3000:]


@pytest.mark.interpreted
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_all_interleavings_with_a_death_are_exact(kind: str) -> None:
    status, output = explore("--kind", kind)
    assert status == 0 and complete(output), output[-3000:]


@pytest.mark.interpreted
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "options", [["--starts", "3", "--kills", "2"], ["--messages", "2"]], ids=["starts", "messages"]
)
def test_all_interleavings_of_a_larger_world_are_exact(options: list[str]) -> None:
    status, output = explore("--kind", "plain", *options)
    assert status == 0 and complete(output), output[-3000:]


@pytest.mark.interpreted
@pytest.mark.parametrize("without", slow_except([], FOUND))
def test_control_the_search_misses_a_protection(without: str) -> None:
    kind, kills = FOUND[without]
    status, output = explore("--kind", kind, "--kills", str(kills), "--without", without)
    assert status == 1 and re.search(r"\d (lost|duplicated|unexpected)", output), output[-3000:]
