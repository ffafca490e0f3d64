"""Values of a state with ``ttl=`` expire: against a naive model, in bounded pieces, and after each crash."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import seeds

import cues
from cues import Graph, faults, testing
from cues.steps import state as states

START = datetime(2026, 1, 31, tzinfo=UTC)
Message = dict[str, Any]
Play = list[tuple[float, list[Message]]]
"""Rounds: seconds since START, and the messages that are sent then."""
TTL_S = 10


def handle(message: Message, process: Any) -> Message | None:
    """Write, delete or read one field; the output is the whole state of the key."""
    state, field = process.state, message["field"]
    if message["do"] == "write":
        state[field] = message["value"]
    elif message["do"] == "add":
        state.setdefault(field, []).append(message["value"])
    elif message["do"] == "delete":
        state.pop(field, None)
    elif message["do"] == "fail":
        state[field] = "failed"
        raise ValueError("no")
    return {"key": message["key"], "state": sorted(state.items()), "size": len(state), "there": field in state}


def graph_of(**options: Any) -> Graph:
    options = {"ttl": TTL_S, "key": "key", "id": "p"} | options
    return Graph("g", [cues.Source("in"), cues.Stream(handle, "in", "out", **options)], errors="errors")


def play_at_random(chance: random.Random, rounds: int) -> Play:
    play, now = [], 0.0
    for _ in range(rounds):
        now += chance.choice((0.5, 1, 3, 5, 10, 30))
        some = [
            {
                "key": chance.choice(["x", "y", ("z", "z" * 300)]),
                "field": chance.choice(["a", "b", "c" * 300]),
                "do": chance.choice(["write", "write", "delete", "read", "fail"]),
                "value": chance.choice([1, None, "v" * 9000, [1]]),
            }
            for _ in range(chance.randrange(6))
        ]
        play.append((now, some))
    return play


def model(play: Play, ttl_s: float = TTL_S) -> list[Message]:
    """The outputs of :func:`handle`, with a plain dict of values and the times of their writes."""
    values: dict[Any, dict[str, tuple[Any, float]]] = {}
    written = []
    for now, messages in play:
        for message in messages:
            mine = values.setdefault(message["key"], {})
            for field in [field for field, (_, at) in mine.items() if at + ttl_s <= now]:
                del mine[field]
            if message["do"] == "fail":
                continue
            if message["do"] == "write":
                mine[message["field"]] = (message["value"], now)
            elif message["do"] == "delete":
                mine.pop(message["field"], None)
            there = sorted((field, value) for field, (value, _) in mine.items())
            written.append(
                {"key": message["key"], "state": there, "size": len(there), "there": message["field"] in mine}
            )
    return written


def played(play: Play, graph: Graph, crash: tuple[str, int] | None = None) -> dict[str, Any]:
    with testing.Clock(START) as clock, testing.temporary_store() as store:
        for seconds, messages in play:
            clock.set(START + timedelta(seconds=seconds))
            store.queue("in").appender().write_many(messages)
            try:
                testing.run_until_idle(graph, store)
            except testing.Crashed:
                assert crash is not None
                testing.run_until_idle(graph, store)
        assert not testing.check_attempts(store)
        return testing.contents(store)


@pytest.fixture
def clock() -> Iterator[testing.Clock]:
    with testing.Clock(START) as clock:
        yield clock


def message(key: str, field: str = "a", do: str = "write", value: Any = 1) -> Message:
    return {"key": key, "field": field, "do": do, "value": value}


PLAY: Play = [
    (0, [message("x"), message("y"), message("y", "b")]),
    (5, [message("x"), message("y", "b", "delete")]),
    (11, [message("y", do="read"), message("x", do="read"), message("x", "c" * 300)]),
    (15, [message("x", do="read"), message("z", "b", value="v" * 9000)]),
    (60, []),
]


def test_a_value_expires_that_was_not_written_for_its_time(cues_store: Any, clock: testing.Clock) -> None:
    def run(*messages: Message) -> list[Message]:
        before = len(cues_store.queue("out")) if "out" in cues_store.queues() else 0
        cues_store.queue("in").appender().write_many(messages)
        testing.run_until_idle(graph_of(), cues_store)
        return testing.messages(cues_store, "out")[before:]

    run(message("x"), message("x", "b"))
    clock.advance(6)
    run(message("x", "b"))  # the same value counts as a write
    clock.advance(3.999)
    assert run(message("x", do="read"))[0]["size"] == 2
    clock.advance(0.001)
    assert run(message("x", do="read"))[0]["state"] == [("b", 1)]
    clock.advance(6)
    assert run(message("x", do="read"))[0]["state"] == []
    assert testing.contents(cues_store)["state"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"concurrency": 4}, {"side_effects": True}])
def test_states_at_random_expire_as_the_model_says(options: dict[str, Any]) -> None:
    play = play_at_random(random.Random(seeds.new()), 60)
    out = played([*play, (10_000, [])], graph_of(**options))
    assert out["queues"]["out"] == model(play)
    assert out["state"] == {}


@pytest.mark.slow
def test_control_values_that_do_not_expire() -> None:
    play = play_at_random(random.Random(1), 60)
    out = played(play, graph_of(ttl=None))
    assert out["queues"]["out"] != model(play)


def _check_crashes() -> None:
    points = (*faults.STEP_POINTS, *faults.EXPIRY_POINTS)
    sites = testing.crash_sites(lambda: played(PLAY, graph_of()), points)
    assert {point for point, _ in sites} >= {*faults.EXPIRY_POINTS, "commit.inside"}
    expected = played(PLAY, graph_of())
    assert expected["state"] == {}
    for point, hit in sites:
        with testing.crash(point, hit, how="raise"):
            durable = played(PLAY, graph_of(), (point, hit))
        assert durable["queues"] == expected["queues"], (point, hit)
        assert durable["state"] == expected["state"], (point, hit)


@pytest.mark.slow
def test_death_at_each_point_leaves_the_same_state() -> None:
    _check_crashes()


@pytest.mark.slow
def test_expired_values_are_deleted_in_pieces_also_while_the_processor_is_busy(
    cues_store: Any, clock: testing.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "EXPIRED_AT_ONCE", 10)
    appender = cues_store.queue("in").appender()
    appender.write_many([message(f"k{n}") for n in range(200)])
    testing.run_until_idle(graph_of(), cues_store)
    clock.advance(20)
    sizes = []
    deleted = states.StateTable.expire

    def expire(self: states.StateTable, count: int = 10) -> int:
        number = deleted(self, count)
        if self.ttl_ns is not None and count == 10:
            sizes.append((number, len(self._step)))
        return number

    monkeypatch.setattr(states.StateTable, "expire", expire)
    appender.write_many([message("new", value=n) for n in range(5)])
    testing.run_until_idle(graph_of(batch_size=1), cues_store)
    counts = [number for number, _ in sizes]
    assert max(counts) <= 10 + 2 * 3 * 2 and sum(counts) >= 50
    rows = testing.contents(cues_store)["state"]["g.p"]
    assert len(rows) == 3


@pytest.mark.slow
def test_a_declaration_that_gets_and_loses_the_option_keeps_the_times_of_writes(
    cues_store: Any, clock: testing.Clock
) -> None:
    def run(graph: Graph, *messages: Message) -> list[Any]:
        cues_store.queue("in").appender().write_many(messages)
        testing.run_until_idle(graph, cues_store)
        return testing.messages(cues_store, "out")[-1]["state"]

    assert run(graph_of(ttl=None), message("x", "old")) == [("old", 1)]
    clock.advance(100)
    assert run(graph_of(), message("x", "a")) == [("a", 1), ("old", 1)], "values of before have no time"
    clock.advance(9)
    assert run(graph_of(ttl=None), message("x", "a", value=2), message("x", "a", value=1)) == [("a", 1), ("old", 1)]
    clock.advance(5)
    assert run(graph_of(), message("x", "b")) == [("a", 1), ("b", 1), ("old", 1)], "a was written 5 seconds ago"
    clock.advance(6)
    assert run(graph_of(ttl="1h"), message("x", do="read")) == [("a", 1), ("b", 1), ("old", 1)]
    assert run(graph_of(), message("x", do="read")) == [("b", 1), ("old", 1)]


@pytest.mark.slow
def test_a_retry_in_a_step_sees_the_values_of_its_first_attempt(cues_store: Any, clock: testing.Clock) -> None:
    seen = []

    def flaky(message: Message, process: Any) -> None:
        if message.get("write"):
            process.state["a"] = 1
            return
        seen.append("a" in process.state)
        clock.advance(TTL_S)
        if len(seen) == 1:
            raise ValueError("once")

    stream = cues.Stream(flaky, "in", "out", id="p", ttl=TTL_S, retries=cues.Retry(3, backoff_s=0))
    graph = Graph("g", [cues.Source("in"), stream], errors="errors")
    cues_store.queue("in").appender().write({"write": True})
    testing.run_until_idle(graph, cues_store)
    cues_store.queue("in").appender().write_many([{}, {}])
    testing.run_until_idle(graph, cues_store)
    assert seen == [True, True, True] or seen == [True, True, False]  # the second message may be in the next step


@pytest.mark.slow
def test_range_and_timers_know_of_expired_values(cues_store: Any, clock: testing.Clock) -> None:
    seen = []

    def note(message: Message, process: Any) -> None:
        process.state[message["n"].to_bytes(8, "big")] = message["n"]
        process.timer("t", process.now + timedelta(seconds=TTL_S - 1))

    def due(timer: Message, process: Any) -> None:
        seen.append([value for _, value in process.state.range(bytes(8), b"\xff" * 8)])

    stream = cues.Stream(note, "in", "out", id="p", ttl=TTL_S, timer=due)
    graph = Graph("g", [cues.Source("in"), stream], errors="errors")
    appender = cues_store.queue("in").appender()
    for n in range(3):
        appender.write({"n": n})
        testing.run_until_idle(graph, cues_store)
        clock.advance(2)
    clock.set(START + timedelta(seconds=13))
    testing.run_until_idle(graph, cues_store)
    assert seen == [[2]], "the others were written 13 and 11 seconds ago"
    assert testing.messages(cues_store, "errors") == []


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: cues.Stream(handle, "in", "out", ttl=0), "above 0"),
        (lambda: cues.Stream(handle, "in", "out", ttl="soon"), "soon"),
        (lambda: cues.Stream(handle, "in", "out", ttl=True), "above 0"),
        (lambda: cues.Source("in", ttl=1), "takes no option 'ttl'"),
    ],
)
def test_what_cannot_have_a_time_to_live_is_refused(declare: Callable[[], Any], text: str) -> None:
    with pytest.raises(cues.GraphError, match=text):
        declare()
