"""The pytest plugin, in a pytest of its own: each fixture, tests that must fail, and no cost for other tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent

GRAPH = """
import pytest
import cues

graph = cues.Graph("shop")

@graph.source("orders")
def orders(position):
    for n in range(position or 0, 5):
        yield n + 1, {"n": n}

@graph.stream("orders", "priced")
def price(order):
    return {"n": order["n"], "total": order["n"] * 2}

EXPECTED = [{"n": n, "total": n * 2} for n in range(5)]
"""


def run(pytester: pytest.Pytester, text: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(text)
    # By name, so that it is also loaded where the entry point is of an older installation. pytest loads it once.
    command = ("-p", "cues.testing_plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "error")
    return pytester.runpytest_subprocess(*command, *arguments, timeout=60)


@pytest.mark.slow
def test_the_fixtures_in_tests_that_pass(pytester: pytest.Pytester) -> None:
    text = """
def test_a_run(cues_run, cues_expect):
    report = cues_run(graph)
    assert report.decisions["price"] == "fresh" and report.steps["price"]
    assert cues_expect("priced", EXPECTED).exact

@pytest.mark.parametrize("point", ["take.after", "function.before", "commit.inside", "commit.after"])
def test_a_crash(point, cues_run, cues_crash, cues_expect):
    cues_crash(graph, point)
    cues_run(graph)
    cues_expect("priced", EXPECTED)

def test_a_crash_at_a_later_hit(cues_crash, cues_store):
    cues_crash(graph, "function.before", hit=3)
    assert list(cues_store.queue("priced").tailer()) == []

def test_options_of_the_history(cues_run, cues_expect):
    cues_run(graph)
    cues_expect("priced", EXPECTED[::-1], key="n", ordered=False)

def test_the_clock(cues_store, cues_clock):
    before = cues_clock.now
    queue = cues_store.queue("q")
    queue.appender().write({"x": 1})
    cues_clock.advance(3600)
    queue.appender().write({"x": 2})
    tailer = queue.tailer()
    times = []
    for message in tailer:
        times.append(tailer.envelope.time)
    assert times[0] == before and (times[1] - times[0]).total_seconds() == 3600

def test_the_clock_is_real_again():
    import time
    from cues.base import clock
    assert clock.now_ns is time.time_ns and clock.monotonic_ns is time.monotonic_ns

def test_stores_are_new(cues_store):
    assert cues_store.queues() == []
"""
    run(pytester, GRAPH + text).assert_outcomes(passed=10)


@pytest.mark.slow
def test_tests_that_must_fail_fail_with_the_finding(pytester: pytest.Pytester) -> None:
    text = """
def test_lost(cues_run, cues_expect):
    cues_run(graph)
    cues_expect("priced", [*EXPECTED, {"n": 5, "total": 10}])

def test_unexpected(cues_run, cues_expect):
    cues_run(graph)
    cues_expect("priced", EXPECTED[1:])

def test_a_point_that_is_not_reached(cues_crash):
    cues_crash(graph, "function.before", hit=6)

def test_an_error_of_a_function(cues_run):
    broken = cues.Graph("broken")

    @broken.source("a")
    def a(position):
        raise ValueError("no input")

    cues_run(broken)
"""
    result = run(pytester, GRAPH + text)
    result.assert_outcomes(failed=4)
    lines = ["*1 lost*", "*1 unexpected*", "*before hit 6 of the crash point 'function.before'*", "*no input*"]
    for line in lines:
        result.stdout.fnmatch_lines([line])


@pytest.mark.slow
def test_the_tests_on_the_page_pass(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "how-to" / "test.md").read_text()
    files = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", page, re.M | re.S))
    assert list(files) == ["shop", "test_shop"]
    pytester.syspathinsert()
    pytester.makepyfile(shop=files["shop"])
    run(pytester, files["test_shop"]).assert_outcomes(passed=2)


@pytest.mark.slow
def test_other_tests_load_nothing_of_cues(pytester: pytest.Pytester) -> None:
    text = """
import sys

def test_other():
    names = ("cues.testing", "cues.errors", "cues.queues.store", "lmdb", "click", "msgpack")
    assert [name for name in names if name in sys.modules] == []
"""
    run(pytester, text).assert_outcomes(passed=1)


def test_the_installation_tells_pytest_of_the_module_by_its_own_name() -> None:
    """With another name pytest would register the module twice where ``-p cues.testing_plugin`` is given too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"cues.testing_plugin": "cues.testing_plugin"}


def test_the_fixtures_are_for_users_by_name_and_none_is_automatic(request: pytest.FixtureRequest) -> None:
    from cues import testing_plugin

    assert all(name.startswith("cues_") for name in testing_plugin.__all__)
    assert not [name for name in request.fixturenames if name.startswith("cues_")]
