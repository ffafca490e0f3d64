"""Timers whose processor is forgotten, backed up, or failed: their rows are deleted, kept, and redriven."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import cues
from cues import Graph, testing
from cues.base import names
from cues.tools import operate

START = datetime(2026, 1, 31, tzinfo=UTC)
Message = dict[str, Any]


@pytest.fixture
def clock() -> Iterator[testing.Clock]:
    with testing.Clock(START) as clock:
        yield clock


@pytest.fixture
def store() -> Iterator[cues.Store]:
    with testing.temporary_store() as store:
        yield store


def handle(message: Message, process: cues.Process) -> None:
    process.state["n"] = message["n"]
    process.timer(message["k"], process.now + timedelta(seconds=message["after"]), message.get("name"))


def fire(timer: Message, process: cues.Process) -> Message:
    return {"k": timer["key"], "n": process.state["n"], "at": timer["at"]}


def graph_of(fire: Any = fire, **options: Any) -> Graph:
    stream = cues.Stream(handle, "in", "out", id="p", key="k", timer=fire, **options)
    return Graph("g", [cues.Source("in"), stream], errors="errors")


def send(store: cues.Store, *messages: Message) -> None:
    store.queue("in").appender().write_many(messages)


def test_forget_deletes_timers_that_are_set_and_those_that_are_due(clock: testing.Clock, store: cues.Store) -> None:
    send(store, {"k": "x", "n": 1, "after": 1}, {"k": "y", "n": 2, "after": 50})
    testing.run_until_idle(graph_of(), store)
    clock.advance(2)
    with testing.crash("timer.moved", how="raise"), pytest.raises(testing.Crashed):
        testing.run_until_idle(graph_of(), store)
    assert len(testing.messages(store, "g.p.timer.due")) == 1
    testing.run_until_idle(Graph("g", [cues.Source("in")]), store)
    operate.forget(store, "g.p")
    with store._view() as txn:
        assert txn.get(names.redriver_key("g.p.timer")) is None
        assert txn.get(names.redriver_inputs_key("g.p.timer")) is None
    for queue in ("g.p.timer.due", "g.p.timer", "g.p"):
        assert testing.messages(store, queue) == []
    assert "g.p" not in testing.contents(store)["state"]
    clock.advance(100)
    testing.run_until_idle(graph_of(), store)  # a new processor of this name: it reads the queue from its start
    assert testing.messages(store, "out") == []
    clock.advance(100)
    testing.run_until_idle(graph_of(), store)
    assert [message["k"] for message in testing.messages(store, "out")] == ["x", "y"]
