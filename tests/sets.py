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


EIGHTHS = [
    pytest.param(None, id="few", marks=pytest.mark.slow),
    *(pytest.param(eighth, id=f"eighth{eighth}", marks=pytest.mark.long) for eighth in range(8)),
]
"""The values of an argument of tests that flip bits: few of them, and in the long set eight parts of all bits."""


def is_in(eighth: int, offset: int, bit: int) -> bool:
    """Return whether a bit of a file is in this part: each part has one bit of every byte."""
    return (offset + bit) % 8 == eighth


STRIDES = [pytest.param(8, id="some"), pytest.param(1, id="all", marks=pytest.mark.long)]
"""The values of the argument ``stride`` of any test: some of the crash points, and in the long set all of them."""


def thinned(sites: Iterable[tuple[str, int]], stride: int) -> list[tuple[str, int]]:
    """Return a part of the crash points and hits: of each point one hit in ``stride``, and at least one."""
    hits: dict[str, list[tuple[str, int]]] = {}
    for site in sites:
        hits.setdefault(site[0], []).append(site)
    # Each point begins at another of its hits: the first one alone would always be in the first step.
    return [site for n, all in enumerate(hits.values()) for site in all[n % min(stride, len(all)) :: stride]]


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
