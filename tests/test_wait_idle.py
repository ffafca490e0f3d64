"""``wait_idle``: a source that has not answered yet is not idle."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import cues
from cues import testing
from cues.engine import threads


@pytest.fixture(autouse=True)
def _no_quiet_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "QUIET_S", -1.0)


@pytest.mark.parametrize("position", [None, "position"])
def test_a_source_is_not_idle_before_its_first_row(position: str | None) -> None:
    asked, answer = threading.Event(), threading.Event()

    def rows() -> Any:
        asked.set()
        answer.wait(60)
        yield from [{"n": 1}, {"n": 2}]

    def placed(position: int | None) -> Any:
        yield from enumerate(rows())

    source = cues.Source("rows", placed) if position else cues.Source("rows", rows, resume="skip")
    with testing.temporary_store() as store, cues.Graph("g", [source]).start(store=store) as running:
        assert asked.wait(60)
        assert not running.idle()
        answer.set()
        assert running.wait_idle(60)
        assert [m["n"] for m in running.messages("rows")] == [1, 2]


@pytest.mark.parametrize("how", ["pause", "end"])
def test_a_source_that_pauses_or_ends_without_a_row_is_idle(how: str) -> None:
    leave = threading.Event()

    def rows(position: int | None, process: cues.Process) -> Any:
        yield from ()
        if how == "pause":
            process.pause(0)
            leave.wait(60)

    graph = cues.Graph("g", [cues.Source("rows", rows)])
    with testing.temporary_store() as store, graph.start(store=store) as running:
        assert running.wait_idle(60)
        leave.set()


def test_messages_that_are_skipped_are_an_answer() -> None:
    leave = threading.Event()

    def rows() -> Any:
        yield {"n": 1}
        leave.wait(60)

    with testing.temporary_store() as store:
        for _ in range(2):
            graph = cues.Graph("g", [cues.Source("rows", rows, resume="skip")])
            with graph.start(store=store) as running:
                assert running.wait_idle(60)
                assert len(running.messages("rows")) == 1
                leave.set()
            leave.clear()
