"""The fast set, which ``pytest`` runs, and the slow set, which ``pytest -m "slow and not long"`` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def bounded(name: str, few: int, many: int) -> pytest.MarkDecorator:
    """Return the mark of a test that takes a number of rounds or messages: few in the slow set, many in long."""
    return pytest.mark.parametrize(name, amounts(few, many))


def amounts(few: int, many: int) -> list[Any]:
    """Return the two amounts of :func:`bounded`, for a fixture."""
    return [
        pytest.param(few, id="few", marks=pytest.mark.slow),
        pytest.param(many, id="many", marks=pytest.mark.long),
    ]


def slow_except(fast: Iterable[Any], values: Iterable[Any], names: int = 1) -> list[Any]:
    """Return the values of a parametrized test, all marked slow but ``fast``, which must be among them.

    With several ``names``, each value is a tuple with one item for each name.
    """
    kept, values = list(fast), list(values)
    missing = [value for value in kept if value not in values]
    assert not missing, f"{missing} is not among the values of the test"
    return [
        value if value in kept else pytest.param(*(value if names > 1 else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
