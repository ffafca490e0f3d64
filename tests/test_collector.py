"""The garbage collector of ``cues run``: its count, settings of the user, and garbage with cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

import cues
from cues.base import collector
from cues.cli.app import run as cli
from tests import terminal

GRAPH = """
import gc, cues
{}
graph = cues.Graph("g", store="s")

@graph.stream("in", "out")
def settings(message):
    frozen = all(cues is not one for one in gc.get_objects())
    return {{"count": gc.get_threshold()[0], "enabled": gc.isenabled(), "frozen": frozen}}
"""


def frozen() -> bool:
    """True if the collector does not look at what was imported. The count of frozen objects does not say it: 3.12
    starts with some hundred."""
    return all(cues is not one for one in gc.get_objects())


@pytest.fixture(autouse=True)
def python_settings() -> Iterator[None]:
    """The settings of the test's process, which are the same afterwards."""
    before = gc.isenabled(), gc.get_threshold(), frozen()
    yield
    collector.restore()
    after = gc.isenabled(), gc.get_threshold(), frozen()
    gc.enable()
    gc.set_threshold(*before[1])
    assert after == before


def test_a_count_applies_after_the_start_until_the_end() -> None:
    collector.choose(12_345)
    assert gc.get_threshold()[0] != 12_345
    collector.settle()
    assert gc.get_threshold()[0] == 12_345
    assert frozen()
    collector.restore()  # and the fixture compares


@pytest.mark.parametrize("change", ["disable", "threshold"])
def test_settings_that_the_graph_file_changed_are_left_alone(change: str) -> None:
    before = gc.get_threshold()
    collector.choose(12_345)
    if change == "disable":
        gc.disable()
    else:
        gc.set_threshold(777)
    found = gc.isenabled(), gc.get_threshold()[0]
    collector.settle()
    assert (gc.isenabled(), gc.get_threshold()[0]) == found
    assert not frozen()
    collector.restore()
    assert (gc.isenabled(), gc.get_threshold()[0]) == found
    gc.enable()
    gc.set_threshold(*before)


def test_zero_leaves_the_settings_of_python() -> None:
    collector.choose(0)
    collector.settle()  # and the fixture compares


def test_cues_run_takes_the_count_and_gives_the_settings_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUES_RUN_GC", "23456")
    Path("graph.py").write_text('import cues\ngraph = cues.Graph("g", store="s")\ngraph.source("in")\n')
    seen: list[int] = []
    settle = collector.settle
    monkeypatch.setattr(collector, "settle", lambda: (settle(), seen.append(gc.get_threshold()[0])))
    assert cli(["run", "graph.py", "--idle-exit", "0", "-q"]) == 0
    assert seen == [23_456]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "option", "expected"),
    [
        ("", "34567", {"count": 34_567, "enabled": True, "frozen": True}),
        ("gc.set_threshold(777)", "34567", {"count": 777, "enabled": True, "frozen": False}),
        ("gc.disable()", "34567", {"enabled": False, "frozen": False}),
    ],
)
def test_workers_get_the_count_and_leave_other_settings(
    tmp_path: Path, line: str, option: str, expected: dict[str, object]
) -> None:
    (tmp_path / "graph.py").write_text(GRAPH.format(line))
    run = ("run", "graph.py", "--workers", "1", "--idle-exit", "0", "--gc", option)
    assert terminal.cues(*run, cwd=tmp_path).code == 0  # makes the queues
    with cues.open(tmp_path / "s") as store:
        store.queue("in").appender().write({})
    assert terminal.cues(*run, cwd=tmp_path).code == 0
    with cues.open(tmp_path / "s") as store:
        (message,) = store.queue("out").tailer()
        assert expected.items() <= dict(message).items()


CYCLES = """
import cues
graph = cues.Graph("g", store="s")
alive = 0

class Node:
    def __init__(self):
        global alive
        alive += 1
        self.itself = self

    def __del__(self):
        global alive
        alive -= 1

@graph.source("in", resume="again")
def numbers():
    for n in range(50_000):
        yield {"n": n}

@graph.stream("in", "out")
def cycle(message):
    Node()
    return {"alive": alive}
"""


@pytest.mark.slow
def test_garbage_with_cycles_does_not_pile_up(tmp_path: Path) -> None:
    """50,000 messages leave a cycle each. The number that is alive is bounded by the count, at every message."""
    (tmp_path / "graph.py").write_text(CYCLES)
    assert terminal.cues("run", "graph.py", cwd=tmp_path).code == 0
    with cues.open(tmp_path / "s") as store:
        alive = [message["alive"] for message in store.queue("out").tailer()]
    assert len(alive) == 50_000
    assert max(alive) < 10_000


def test_a_count_that_python_cannot_take_is_refused_before_the_start(tmp_path: Path) -> None:
    done = terminal.cues("run", "graph.py", "--gc", str(2**31), cwd=tmp_path)
    assert done.code == 2 and "2147483648 is not in the range" in done.err
