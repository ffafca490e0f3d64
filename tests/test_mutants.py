"""Mutants: every entry of the table of tests/mutants.py fits the code as it is, and its test finds the mutant."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from mutants import MUTANTS, ROOT, Mutant
from scenarios import SCENARIOS

from cues import faults

SOME = (
    "fence-compares-nothing",
    "state-not-written",
    "low-water-mark-of-an-old-owner",
    "transaction-of-a-moved-tailer",
    "group-without-epoch",
    "target-takes-an-old-owner",
)
"""One of each of the large mechanisms, for the slow set."""


@functools.cache
def source(file: str) -> str:
    """The source of a file of tests."""
    return (ROOT / "tests" / file).read_text()


def test_every_entry_fits_the_code_and_names_a_test() -> None:
    """A text that is not there once, or a test that was renamed: the table would be about other code."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    for mutant in MUTANTS:
        assert mutant.mutated() != (ROOT / mutant.file).read_text()
        file, _, function = mutant.test.partition("::")
        assert f"def {function.partition('[')[0]}(" in source(file), f"{mutant.name}: there is no {mutant.test}"


def test_the_page_about_proof_has_the_counts() -> None:
    page = (ROOT / "docs" / "proof.md").read_text()
    for count in (f"{len(MUTANTS)} mutants", f"{len(faults.POINTS)} points", f"{len(SCENARIOS)} kinds of graphs"):
        assert count in page, count


def test_an_entry_that_does_not_fit_the_code_is_refused(tmp_path: Path) -> None:
    stale = Mutant("stale", "cues/faults.py", "a text that is not there", "", "test_mutants.py::test_nothing")
    assert mutants.judged(tmp_path, stale, 1) == (
        "broken",
        "the text of stale is 0 times in cues/faults.py, and must be there once",
    )


def run(*names: str) -> str:
    command = [sys.executable, str(ROOT / "tests" / "mutants.py"), *names]
    return subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_every_test_of_the_table_is_there_with_its_arguments() -> None:
    """The arguments of a hook came first in the names for a while, and no mutant could be judged."""
    tests = sorted({f"tests/{mutant.test}" for mutant in MUTANTS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_some_mutants_are_caught() -> None:
    output = run(*SOME)
    assert output.endswith(f"{len(SOME)} mutants: {len(SOME)} caught, 0 survived, 0 broken\n"), output


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_mutant_is_caught() -> None:
    output = run()
    assert output.endswith(f"{len(MUTANTS)} mutants: {len(MUTANTS)} caught, 0 survived, 0 broken\n"), output
