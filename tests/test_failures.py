"""Failures as plain data: chains of causes of any length, in linear time, and left as they were."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cues
from cues.base import events
from cues.errors import NotInstalled, ProcessorStopped, Unsupported
from cues.graphs import graphfile
from cues.steps import failure


@dataclass(frozen=True)
class Frozen(Exception):
    """An exception that refuses to be changed."""

    text: str


def chained(count: int, kind: Any = ValueError) -> BaseException:
    error: BaseException = kind("0")
    for number in range(1, count):
        following = kind(str(number))
        object.__setattr__(following, "__cause__", error)
        error = following
    return error


@pytest.mark.parametrize("kind", [ValueError, Frozen])
def test_a_chain_is_told_from_the_outermost_and_stays_as_it_is(kind: Any) -> None:
    error = chained(3, kind)
    told = failure.causes(error)
    assert [cause["message"] for cause in told] == [str(kind("2")), str(kind("1")), str(kind("0"))]
    assert [str(link) for link in failure.chain(error)] == [str(kind("2")), str(kind("1")), str(kind("0"))]
    assert all(cause["trace"].count(kind.__name__) == 1 for cause in told), "each link has its own trace only"


def test_a_long_chain_has_its_two_ends() -> None:
    """traceback reads the chain below each link, so the time was quadratic."""
    told = [cause["message"] for cause in failure.causes(chained(5_000))]
    half = failure.CAUSES_MAX // 2
    ends = [str(n) for n in range(4_999, 4_999 - half, -1)], [str(n) for n in range(half - 1, -1, -1)]
    assert told == [*ends[0], f"{5_000 - failure.CAUSES_MAX:,} causes are left out", *ends[1]]
    assert len(failure.causes(chained(failure.CAUSES_MAX))) == failure.CAUSES_MAX


@pytest.mark.parametrize("kind", [Unsupported, NotInstalled])
def test_a_missing_package_stops_the_processor_and_no_message_fails(kind: Any, tmp_path: Path) -> None:
    """Each further message would fail in the same way, and the queue would be emptied into the error queue."""
    graph = cues.Graph("g", errors="errors", durability="process")
    graph.source("in")

    @graph.stream("in", "out")
    def needs(message: dict[str, Any]) -> None:
        raise kind("The driver is missing.", "install it.")

    with (
        pytest.raises(ProcessorStopped, match="The driver is missing"),
        graph.start(store=tmp_path / "store") as running,
    ):
        for n in range(5):
            running.send("in", {"n": n})
        try:
            running.wait_idle(30)
        finally:
            failed = running.messages("errors")
    assert failed == []


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stop_is_told_once(tmp_path: Path, workers: int | None) -> None:
    file = tmp_path / "graph.py"
    file.write_text(
        "import cues\ngraph = cues.Graph('g')\n"
        "@graph.source('rows')\ndef rows(position):\n    yield 1, {'n': 1}\n"
        "@graph.stream('rows', 'out')\ndef fails(message):\n    raise ValueError('bad')\n"
    )
    told = []
    graph = graphfile.load(str(file)).graph
    more: dict[str, Any] = {} if workers is None else {"workers": workers}
    with (
        pytest.raises(cues.ProcessorStopped),
        graph.start(store=tmp_path / "s", listeners=(told.append,), **more) as running,
    ):
        running.wait_done()
    assert len([event for event in told if isinstance(event, events.Stopped)]) == 1
