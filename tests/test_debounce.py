"""Debounce: of each quiet time of a key the last message passes once, against a model and after each crash."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import seeds
from children import Child

import cues
from cues import faults, testing
from cues.errors import GraphError, InvalidArgument
from cues.processors import shape
from cues.steps import process as processes

START = datetime(2026, 1, 31, tzinfo=UTC)
Message = dict[str, Any]
Play = list[tuple[float, list[Message]]]
"""Rounds: seconds since START, and the messages that are sent then."""


def graph_of(longest: float | None = None, **options: Any) -> cues.Graph:
    stream = shape.debounce("in", "out", key="k", quiet=5, longest=longest, count="of", **options)
    return cues.Graph("g", [cues.Source("in"), stream], errors="errors")


def play_at_random(chance: random.Random, rounds: int) -> Play:
    """Rounds in which no two keys are due at the same moment."""
    play, at, number = [], 0.0, 0
    for _ in range(rounds):
        at += chance.choice((0.2, 1, 4, 20)) + chance.randrange(1000) / 1e6
        some = []
        for key in chance.sample("xyz", chance.randrange(3)):
            number += 1
            some.append({"k": key, "n": number})
            at += 1e-3
        play += [(at + place / 1e3, [message]) for place, message in enumerate(some)] or [(at, [])]
    return [*play, (at + 100, [])]


def model(play: Play, longest: float | None = None) -> list[Message]:
    held: dict[str, tuple[float, float, int, Message]] = {}
    passed = []
    for at, messages in play:
        for due, key in sorted((due, key) for key, (due, *_) in held.items()):
            if due <= at + 1e-9:
                _, _, count, message = held.pop(key)
                passed.append(message | {"of": count})
        for message in messages:
            _, first, count, _ = held.get(message["k"], (0, at, 0, {}))
            due = at + 5 if longest is None else min(at + 5, first + longest)
            held[message["k"]] = due, first, count + 1, message
    return passed


def played(play: Play, graph: cues.Graph, crashes: bool = False) -> dict[str, Any]:
    with testing.Clock(START) as clock, testing.temporary_store() as store:
        for seconds, messages in play:
            clock.set(START + timedelta(seconds=seconds))
            for sent in ([], messages):
                store.queue("in").appender().write_many(sent)
                try:
                    testing.run_until_idle(graph, store)
                except testing.Crashed:
                    assert crashes
                    testing.run_until_idle(graph, store)
        assert not testing.check_attempts(store)
        return testing.contents(store)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [None, 8.0])
def test_at_random_the_last_message_of_each_quiet_time_passes(longest: float | None) -> None:
    play = play_at_random(random.Random(seeds.new()), 40)
    durable = played(play, graph_of(longest))
    assert durable["queues"]["out"] == model(play, longest)
    assert sum(message["of"] for message in durable["queues"]["out"]) == sum(len(some) for _, some in play)
    assert not durable["queues"]["errors"]
    assert "g.out" not in durable["state"]  # nothing is held for quiet keys


PLAY: Play = [
    (0, [{"k": "x", "n": 1}]),
    (1, [{"k": "y", "n": 2}]),
    (3, [{"k": "x", "n": 3}, {"k": "x", "n": 4}]),
    (9, []),
]


@pytest.mark.slow
def test_a_crash_at_each_point_passes_each_once() -> None:
    expected = played(PLAY, graph_of())
    assert expected["queues"]["out"] == model(PLAY) == [{"k": "y", "n": 2, "of": 1}, {"k": "x", "n": 4, "of": 3}]
    for point, hit in testing.crash_sites(
        lambda: played(PLAY, graph_of()), (*faults.STEP_POINTS, *faults.TIMER_POINTS)
    ):
        with testing.crash(point, hit, how="raise"):
            durable = played(PLAY, graph_of(), crashes=True)
        assert durable["queues"] == expected["queues"], (point, hit)
        assert durable["state"] == expected["state"], (point, hit)


def test_control_a_message_that_does_not_replace_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    given = processes.Process.timer

    def first(self: cues.Process, key: Any, at: Any, name: str | None = None) -> None:
        if self.state["held"][1] == 1:
            given(self, key, at, name)

    monkeypatch.setattr(processes.Process, "timer", first)
    play: Play = [(0, [{"k": "x", "n": 1}]), (3, [{"k": "x", "n": 2}]), (6, []), (9, [])]
    assert model(play) == [{"k": "x", "n": 2, "of": 2}]
    with testing.Clock(START) as clock, testing.temporary_store() as store:
        for seconds, messages in play[:3]:
            clock.set(START + timedelta(seconds=seconds))
            store.queue("in").appender().write_many(messages)
            testing.run_until_idle(graph_of(), store)
        assert testing.messages(store, "out") != []  # too early


def test_a_message_that_comes_before_its_key_was_quiet_holds_it_back() -> None:
    play: Play = [(0, [{"k": "x", "n": 1}]), (3, [{"k": "x", "n": 2}]), (6, [])]
    assert played(play, graph_of())["queues"]["out"] == model(play) == []


def test_a_key_that_is_never_quiet_passes_in_time_after_the_clock_was_set_back() -> None:
    day = 86_400.0
    play: Play = [(at, [{"k": "x", "n": n}]) for n, at in enumerate([day, 0, 4, 8])]
    assert played([*play, (10, [])], graph_of(longest=10))["queues"]["out"] == [{"k": "x", "n": 3, "of": 4}]
    assert played([*play, (9, [])], graph_of(longest=10))["queues"]["out"] == []


@pytest.mark.parametrize(
    ("declare", "error"),
    [
        (lambda: shape.debounce("in", "out", key="k", quiet="soon"), "quiet is 'soon'"),
        (lambda: shape.debounce("in", "out", key="k", quiet=5, longest=0), "longest is 0"),
        (lambda: shape.debounce("in", "out", key="k", quiet=5, batch=True), "batch="),
        (lambda: shape.debounce("in", "out", key=3, quiet=5), "key=3"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(declare: Callable[[], Any], error: str) -> None:
    with pytest.raises((InvalidArgument, GraphError), match=error):
        declare()


def test_a_message_without_a_key_fails() -> None:
    durable = played([(0, [{"n": 1}, {"k": None}]), (9, [])], graph_of())
    assert len(durable["queues"]["errors"]) == 2 and not durable["queues"]["out"]


RUN = """
import sys, cues
from cues.processors import shape
stream = shape.debounce("in", "out", key="k", quiet=0.05, count="of")
graph = cues.Graph("g", [cues.Source("in"), stream], store=sys.argv[1], durability="process", errors="errors")
running = graph.start()
print("started")
number = int(sys.argv[2])
for n in range(number, number + int(sys.argv[3])):
    running.send("in", {"k": n % 7, "n": n})
    print(n)
    running.sleep(0.01)
assert running.wait_idle(30)
for _ in range(2000):
    if not any(dict(cues.testing.state(running.store, "g.out", k)) for k in range(7)):
        break
    running.sleep(0.05)
running.drain(60)
running.close()
print("done")
"""


@pytest.mark.slow
def test_kill_9_in_a_real_run_passes_each_once(tmp_path: Path) -> None:
    """The messages for which the outputs stand are all that were sent, and each output is the last of them."""
    chance = random.Random(seeds.new())
    path, sent = tmp_path / "store", 0
    for _ in range(8):
        with Child(RUN, path, sent, 1000) as child:
            assert child.line() == "started"
            for _ in range(chance.randrange(1, 25)):
                sent = int(child.line()) + 1
            child.signal(signal.SIGKILL)
            child.returncode()
        with cues.open(path) as store:
            sent = len(store.queue("in"))
    with Child(RUN, path, sent, 5) as child:
        while child.line() != "done":
            pass
        child.end()
    with cues.open(path) as store:
        given, found = testing.messages(store, "in"), testing.messages(store, "out")
        assert [message["n"] for message in given] == list(range(len(given)))
        for key in range(7):
            of_key = [message["n"] for message in given if message["k"] == key]
            place = 0
            for message in [message for message in found if message["k"] == key]:
                place += message["of"]
                assert of_key[place - 1] == message["n"]
            assert place == len(of_key)
        assert testing.messages(store, "errors") == []
