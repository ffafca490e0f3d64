"""Fixtures of pytest for tests of graphs. pytest loads this module by itself where Cues is installed.

    from graph import graph

    def test_every_order_is_priced(cues_run, cues_expect):
        cues_run(graph)                                     # until idle, in one thread
        cues_expect("priced", [{"id": 1, "total": 500}])    # nothing lost, duplicated or reordered

    def test_a_crash_changes_nothing(cues_run, cues_crash, cues_expect):
        cues_crash(graph, "commit.inside")                  # die there
        cues_run(graph)                                     # start again
        cues_expect("priced", [{"id": 1, "total": 500}])

All fixtures are made of :mod:`cues.testing`, which is imported when a test asks for one of them. So this module costs
nothing in other tests. ``-p no:cues.testing_plugin`` switches it off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cues.graphs.graph import Graph
    from cues.queues.store import Store
    from cues.testing import Clock, History, Report

__all__ = ["cues_clock", "cues_crash", "cues_expect", "cues_run", "cues_store"]


@pytest.fixture
def cues_store() -> Iterator[Store]:
    """A new store, which is checked and deleted after the test (:func:`cues.testing.temporary_store`)."""
    from cues import testing

    with testing.temporary_store() as store:
        yield store


@pytest.fixture
def cues_clock() -> Iterator[Clock]:
    """A clock that begins at the real time and moves only when the test sets it (:class:`cues.testing.Clock`)."""
    from cues import testing

    with testing.Clock() as clock:
        yield clock


@pytest.fixture
def cues_run(cues_store: Store) -> Callable[..., Report]:
    """A function that runs a graph in ``cues_store`` until it is idle.

    Arguments: the graph, and the options of :func:`cues.testing.run_until_idle`. Result: its report.
    """
    from cues import testing

    def run(graph: Graph, **options: Any) -> Report:
        return testing.run_until_idle(graph, cues_store, **options)

    return run


@pytest.fixture
def cues_crash(cues_store: Store) -> Callable[..., None]:
    """A function that runs a graph in ``cues_store`` up to a crash, which is simulated in this process.

    Arguments: the graph, the name of a point of ``cues.faults.POINTS``, the number of the hit (from 1), and the options
    of :func:`cues.testing.run_until_idle`. The test fails if the run ends before that hit of the point.
    """
    from cues import testing

    def run(graph: Graph, point: str, hit: int = 1, **options: Any) -> None:
        with testing.crash(point, hit, how="raise"):
            try:
                testing.run_until_idle(graph, cues_store, **options)
            except testing.Crashed:
                return
        pytest.fail(f"The run ended before hit {hit} of the crash point {point!r}.")

    return run


@pytest.fixture
def cues_expect(cues_store: Store) -> Callable[..., History]:
    """A function that compares the messages of a queue of ``cues_store`` with the expected ones.

    Arguments: the name of the queue, the expected messages, and the options of :func:`cues.testing.check_history`. The
    test fails, with the findings, if a message is lost, duplicated, reordered or unexpected.
    """
    from cues import testing

    def expect(queue: str, expected: Iterable[Any] | Mapping[Any, Iterable[Any]], **options: Any) -> History:
        history = testing.check_history(expected, testing.messages(cues_store, queue), **options)
        history.expect_exact()
        return history

    return expect
