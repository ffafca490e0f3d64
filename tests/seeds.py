"""The seed of tests that use random data: CUES_TEST_SEED, or a new one for each test."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

VARIABLE = "CUES_TEST_SEED"
_drawn = random.Random(os.urandom(16))  # its own: hypothesis sets the state of the shared one


def new() -> int:
    """Return a seed and print it; pytest shows it where the test fails."""
    seed = int(os.environ.get(VARIABLE) or _drawn.randrange(1 << 30))
    print(f"{VARIABLE}={seed}")
    return seed


def among(seeds: range, fast: int | None = None) -> list[Any]:
    """Return the seeds of a parametrized test: those given, or the one of the environment.

    With ``fast``, only the first ones are in the fast set. Of more than two others, each sixteenth is in the slow set;
    the long set has them all.
    """
    if os.environ.get(VARIABLE):
        return [int(os.environ[VARIABLE])]
    others = seeds[fast:] if fast is not None else seeds[:0]
    slow = others if len(others) <= 2 else others[::16]
    marked = [pytest.param(seed, marks=pytest.mark.slow if seed in slow else pytest.mark.long) for seed in others]
    return [*seeds[:fast], *marked]
