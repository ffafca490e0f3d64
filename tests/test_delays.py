"""Delayed messages reach processors once, when they are due: against a naive model, and after each crash."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import seeds
from small import finish

import cues
from cues import Graph, faults, testing
from cues.errors import InvalidArgument
from cues.steps import delays
from cues.steps.due_lane import DueLane
from cues.steps.stepper import Stepper

START = datetime(2026, 1, 31, tzinfo=UTC)
Message = dict[str, Any]
Play = list[tuple[float, list[tuple[Message, float | None]]]]
"""Rounds: seconds since START, and the messages that are sent then, each with its time of delivery."""
POINTS = (*faults.STEP_POINTS, *faults.DELAY_POINTS)


def handle(message: Message, process: Any) -> Message:
    process.state["count"] = process.state.get("count", 0) + 1
    assert process.metadata.get("q/deliver-at", process.now) <= process.now
    return {**message, "count": process.state["count"]}


def together(messages: list[Message], process: Any) -> list[Message]:
    return [{**message, "size": len(messages)} for message in messages]


def graph_of(function: Callable[..., Any] = handle, **options: Any) -> Graph:
    options = {"key": "key"} | options if function is handle else options
    return Graph("g", [cues.Source("in"), cues.Stream(function, "in", "out", id="p", **options)], errors="errors")


@pytest.fixture
def clock() -> Iterator[testing.Clock]:
    with testing.Clock(START) as clock:
        yield clock


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def play_at_random(chance: random.Random, rounds: int) -> Play:
    """Rounds in which no two messages are due at the same moment."""
    play: Play = []
    now, number = 0.0, 0
    for _ in range(rounds):
        now += chance.choice((0.5, 3, 10, 60))
        some: list[tuple[Message, float | None]] = []
        for _ in range(chance.randrange(12)):
            number += 1
            due = None if chance.random() < 0.5 else now + chance.randrange(-5, 40) + number / 1e5
            some.append(({"n": number, "key": chance.choice("xyz")}, due))
        play.append((now, some))
    return play


def model(play: Play) -> list[Message]:
    """The outputs of :func:`handle`: each round takes what is due from before, and then its new messages."""
    waiting: list[tuple[float, Message]] = []
    counts: dict[str, int] = {}
    written = []

    def call(message: Message) -> None:
        counts[message["key"]] = counts.get(message["key"], 0) + 1
        written.append({**message, "count": counts[message["key"]]})

    for now, messages in play:
        for due, message in sorted((entry for entry in waiting if entry[0] <= now), key=lambda entry: entry[0]):
            waiting.remove((due, message))
            call(message)
        for message, due in messages:
            if due is None or due <= now:
                call(message)
            else:
                waiting.append((due, message))
    return written


def played(play: Play, graph: Graph, crash: tuple[str, int] | None = None) -> dict[str, Any]:
    """Play the rounds in a new store, with a crash in one of the runs; return everything durable."""
    with testing.Clock(START) as clock, testing.temporary_store() as store:
        for seconds, messages in play:
            clock.set(at(seconds))
            finish(graph, store, crash)
            appender = store.queue("in").appender()
            for message, due in messages:
                appender.write(message, deliver_at=None if due is None else at(due))
            finish(graph, store, crash)
        assert not testing.check_attempts(store)
        return testing.contents(store)


PLAY: Play = [
    (0, [({"n": 1, "key": "x"}, 5), ({"n": 2, "key": "x"}, None), ({"n": 3, "key": "y"}, 3)]),
    (4, [({"n": 4, "key": "x"}, 5.5), ({"n": 5, "key": "y"}, 2)]),
    (9, [({"n": 6, "key": "x"}, 500)]),
    (600, []),
]


def test_messages_wait_for_their_time_and_not_for_each_other(cues_store: Any, clock: testing.Clock) -> None:
    appender = cues_store.queue("in").appender()
    appender.write({"n": 1, "key": "x"}, delay="10m")
    appender.write({"n": 2, "key": "x"})
    appender.write_many([{"n": 3, "key": "x"}, {"n": 4, "key": "x"}], deliver_at=at(300).timestamp())
    testing.run_until_idle(graph_of(), cues_store)
    assert [m["n"] for m in testing.messages(cues_store, "out")] == [2]
    clock.advance(299)
    testing.run_until_idle(graph_of(), cues_store)
    assert [m["n"] for m in testing.messages(cues_store, "out")] == [2]
    clock.advance(1)
    testing.run_until_idle(graph_of(), cues_store)
    assert [m["n"] for m in testing.messages(cues_store, "out")] == [2, 3, 4]
    clock.advance(300)
    testing.run_until_idle(graph_of(), cues_store)
    assert [m["n"] for m in testing.messages(cues_store, "out")] == [2, 3, 4, 1]
    tailer = cues_store.queue("in").tailer()
    tailer.read()
    assert tailer.envelope.metadata == {"q/deliver-at": at(600)}
    outputs = cues_store.queue("out").tailer(meta=True)
    assert all("q/deliver-at" not in message["q/meta"] for message in outputs)
    assert len(cues_store.queue("g.p.delayed.in")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", range(4))
def test_messages_delayed_at_random_come_as_the_model_says(case: int) -> None:
    chance = random.Random(seeds.new())
    play = play_at_random(chance, 25)
    durable = played(play, graph_of(batch_size=chance.choice((1, 3, 1000))))
    assert durable["queues"]["out"] == model(play)
    assert durable["queues"]["errors"] == []


def _check_crashes(graph: Callable[[], Graph] = graph_of, play: Play = PLAY, points: Iterable[str] = POINTS) -> None:
    sites = testing.crash_sites(lambda: played(play, graph()), points)
    assert {point for point, _ in sites} >= set(faults.DELAY_POINTS)
    expected = played(play, graph())
    last = dict(sites)
    for point, hit in sites:
        if point not in faults.DELAY_POINTS and hit not in (1, last[point]):
            continue
        with testing.crash(point, hit, how="raise"):
            durable = played(play, graph(), (point, hit))
        assert durable["queues"] == expected["queues"], (point, hit)
        assert durable["state"] == expected["state"], (point, hit)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"side_effects": True}, {"batch_size": 1}, {"concurrency": 3}])
def test_death_at_every_point_and_hit_delivers_each_once(options: dict[str, Any]) -> None:
    assert played(PLAY, graph_of(**options))["queues"]["out"] == model(PLAY)
    _check_crashes(lambda: graph_of(**options))


@pytest.mark.slow
def test_control_messages_that_are_moved_in_two_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(self: DueLane, stepper: Stepper) -> int:
        count, pages = self.due.take(1000)
        if count:
            stepper.store.core.commit(self.due.table.write)
            self.due.committed()
            faults.point("delay.moving")
            for input in stepper.inputs:
                stepper.store.core.commit(lambda txn, log=input.log: log.append(txn, pages[log.id]))
            faults.point("delay.moved")
        return count

    monkeypatch.setattr(DueLane, "move", move)
    assert played(PLAY, graph_of())["queues"]["out"] == model(PLAY)
    with pytest.raises(AssertionError, match=r"delay\.moving"):
        _check_crashes(points=faults.DELAY_POINTS)


@pytest.mark.slow
def test_control_messages_that_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays.Held, "keep", lambda self, taken: None)
    assert len(played(PLAY, graph_of(), None)["queues"]["out"]) == 2


@pytest.mark.slow
def test_a_batch_function_is_called_without_the_messages_that_wait(cues_store: Any, clock: testing.Clock) -> None:
    hashes = []

    def seen(messages: list[Message], process: Any) -> None:
        hashes.append((process.delivery_hash, [message["n"] for message in messages]))

    graph = Graph("g", [cues.Source("in"), cues.Sink(seen, "in", id="p", batch=True, batch_size=10)])
    appender = cues_store.queue("in").appender()
    for n in range(6):
        appender.write({"n": n}, delay=60 if n % 3 == 2 else None)
    testing.run_until_idle(graph, cues_store)
    assert [n for _, some in hashes for n in some] == [0, 1, 3, 4]
    clock.advance(60)
    testing.run_until_idle(graph, cues_store)
    assert [n for _, some in hashes for n in some] == [0, 1, 3, 4, 2, 5]
    assert len({digest for digest, _ in hashes}) == len(hashes)


@pytest.mark.slow
def test_a_batch_that_is_repeated_after_a_crash_has_the_messages_of_its_hash(
    cues_store: Any, clock: testing.Clock
) -> None:
    """Between the crash and the start a message after the batch becomes due. It must not join the same hash."""
    calls = []

    def seen(messages: list[Message], process: Any) -> None:
        calls.append((process.delivery_hash, [message["n"] for message in messages]))

    graph = Graph("g", [cues.Source("in"), cues.Sink(seen, "in", id="p", batch=True, batch_size=10)])
    appender = cues_store.queue("in").appender()
    appender.write({"n": 0})
    appender.write({"n": 1}, delay=60)
    appender.write({"n": 2})
    with testing.crash("commit.before", how="raise"), pytest.raises(testing.Crashed):
        testing.run_until_idle(graph, cues_store)
    clock.advance(90)
    testing.run_until_idle(graph, cues_store)
    by_hash: dict[str, list[int]] = {}
    for digest, numbers in calls:
        assert by_hash.setdefault(digest, numbers) == numbers
    assert sorted(n for numbers in by_hash.values() for n in numbers) == [0, 1, 2]


@pytest.mark.slow
def test_a_message_that_fails_when_it_is_due_can_be_redriven(cues_store: Any, clock: testing.Clock) -> None:
    fails = [True]

    def failing(message: Message, process: Any) -> Message:
        if fails[0]:
            raise ValueError("no")
        return message

    graph = graph_of(failing)
    cues_store.queue("in").appender().write({"n": 1}, delay=5)
    testing.run_until_idle(graph, cues_store)
    clock.advance(5)
    testing.run_until_idle(graph, cues_store)
    (error,) = testing.messages(cues_store, "errors")
    assert error["err.proc/messages"] == {"in": [{"n": 1}]}
    fails[0] = False
    assert cues.redrive(graph, store=cues_store, all=True)
    assert testing.messages(cues_store, "out") == [{"n": 1}]


@pytest.mark.slow
def test_retention_does_not_remove_a_message_that_waits(cues_store: Any, clock: testing.Clock) -> None:
    queue = cues_store.queue("in")
    queue.appender().write({"n": -1, "key": "x"}, delay=60)
    testing.run_until_idle(graph_of(), cues_store)
    queue.appender().write_many([{"n": n, "key": "x", "text": "x" * 500} for n in range(500)])
    testing.run_until_idle(graph_of(), cues_store)
    queue.purge(400)
    assert queue.first_index > 1
    clock.advance(60)
    testing.run_until_idle(graph_of(), cues_store)
    assert testing.messages(cues_store, "out")[-1] == {"n": -1, "key": "x", "count": 501}


@pytest.mark.slow
def test_a_message_of_several_pages_waits_whole_with_its_metadata(cues_store: Any, clock: testing.Clock) -> None:
    seen = []

    def look(message: Message, process: Any) -> Message:
        seen.append(process.metadata)
        return message

    large = {"text": os.urandom(30_000), "q/meta": {"tx/t": 7, "trace": "abc"}}
    cues_store.queue("in").appender().write(large, delay=60)
    testing.run_until_idle(graph_of(look), cues_store)
    assert not seen
    clock.advance(60)
    testing.run_until_idle(graph_of(look), cues_store)
    assert testing.messages(cues_store, "out") == [{"text": large["text"]}]
    assert seen == [{"tx/t": 7, "trace": "abc", "q/deliver-at": at(60)}]
    (written,) = cues_store.queue("out").tailer(meta=True)
    assert {k: v for k, v in written["q/meta"].items() if k != "q/hash"} == {"tx/t": 7, "trace": "abc"}


@pytest.mark.slow
def test_outputs_of_functions_and_appenders_and_transactions_are_delayed(cues_store: Any, clock: testing.Clock) -> None:
    def later(message: Message) -> Message:
        return cues.delayed({"n": message["n"], "key": "x"}, delay=10 * message["n"])

    stages = [
        cues.Source("in"),
        cues.Stream(later, "in", "middle", id="q"),
        cues.Stream(handle, "middle", "out", id="p", key="key"),
    ]
    graph = Graph("g", stages, errors="errors")
    cues_store.queue("middle")
    with cues_store.transaction() as transaction:
        transaction.write("middle", cues.delayed({"n": 0, "key": "x"}, deliver_at=at(5)))
    cues_store.queue("in").appender().write_many([{"n": 2}, {"n": 1}])
    testing.run_until_idle(graph, cues_store)
    assert testing.messages(cues_store, "out") == []
    clock.advance(10)
    testing.run_until_idle(graph, cues_store)
    assert [m["n"] for m in testing.messages(cues_store, "out")] == [0, 1]
    clock.advance(10)
    testing.run_until_idle(graph, cues_store)
    assert [m["n"] for m in testing.messages(cues_store, "out")] == [0, 1, 2]


@pytest.mark.slow
def test_a_join_is_called_when_the_later_of_its_messages_is_due(cues_store: Any, clock: testing.Clock) -> None:
    def join(left: Message, right: Message) -> Message:
        return {"left": left["n"], "right": right["n"]}

    graph = Graph(
        "g", [cues.Source("a"), cues.Source("b"), cues.Stream(join, {"left": "a", "right": "b"}, "out", id="p")]
    )
    left, right = cues_store.queue("a").appender(), cues_store.queue("b").appender()
    for n, (of_left, of_right) in enumerate([(30, None), (None, None), (10, 20)]):
        left.write({"n": n}, delay=of_left)
        right.write({"n": n}, delay=of_right)
    for seconds, calls in [(0, [1]), (19, [1]), (20, [1, 2]), (30, [1, 2, 0])]:
        clock.set(at(seconds))
        testing.run_until_idle(graph, cues_store)
        assert testing.messages(cues_store, "out") == [{"left": n, "right": n} for n in calls]


@pytest.mark.slow
def test_each_input_of_any_of_and_each_partition_has_delayed_messages(cues_store: Any, clock: testing.Clock) -> None:
    stream = cues.Stream(handle, cues.AnyOf("a", "b"), "out", id="p", key="key")
    queues = {name: cues.QueueOptions(partitions=3, key="key") for name in "ab"}
    graph = Graph("g", [cues.Source("a"), cues.Source("b"), stream], errors="errors", queues=queues)
    testing.run_until_idle(graph, cues_store)
    for n in range(30):
        cues_store.queue("ab"[n % 2]).appender().write({"n": n, "key": n}, delay=n)
    for seconds in (0, 10, 20, 30):
        clock.set(at(seconds))
        testing.run_until_idle(graph, cues_store)
        assert {m["n"] for m in testing.messages(cues_store, "out")} == set(range(min(seconds + 1, 30)))


@pytest.mark.slow
def test_a_seek_delivers_again_what_was_delivered_and_once_what_waits(cues_store: Any, clock: testing.Clock) -> None:
    from cues.steps import ownership

    appender = cues_store.queue("in").appender()
    appender.write({"n": 1, "key": "x"}, delay=5)
    appender.write({"n": 2, "key": "x"}, delay=50)
    testing.run_until_idle(graph_of(), cues_store)
    clock.advance(5)
    testing.run_until_idle(graph_of(), cues_store)
    ownership.seek(cues_store, "g.p", {"g.p.in": 1}, again=True, reset_state=True)
    testing.run_until_idle(graph_of(), cues_store)
    clock.advance(50)
    testing.run_until_idle(graph_of(), cues_store)
    assert [(m["n"], m["count"]) for m in testing.messages(cues_store, "out")] == [(1, 1), (1, 1), (2, 2)]


@pytest.mark.slow
def test_a_renamed_processor_keeps_the_messages_that_wait(cues_store: Any, clock: testing.Clock) -> None:
    cues_store.queue("in").appender().write({"n": 1, "key": "x"}, delay=5)
    testing.run_until_idle(graph_of(), cues_store)
    stream = cues.Stream(handle, "in", "out", id="q", key="key", renamed_from="p")
    clock.advance(5)
    testing.run_until_idle(Graph("g", [cues.Source("in"), stream], errors="errors"), cues_store)
    assert [m["n"] for m in testing.messages(cues_store, "out")] == [1]


@pytest.mark.slow
def test_an_at_most_once_processor_gets_the_message_when_it_is_due(cues_store: Any, clock: testing.Clock) -> None:
    seen = []
    graph = Graph(
        "g", [cues.Source("in"), cues.Sink(lambda message: seen.append(message), "in", id="p", strategy="at-most-once")]
    )
    cues_store.queue("in").appender().write({"n": 1}, delay=5)
    testing.run_until_idle(graph, cues_store)
    assert not seen
    clock.advance(5)
    testing.run_until_idle(graph, cues_store)
    assert seen == [{"n": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [True, False])
def test_a_target_with_the_position_gets_a_message_that_was_due_between_a_crash_and_the_start(
    cues_store: Any, clock: testing.Clock, tmp_path: Path, batch: bool
) -> None:
    """The target has committed messages on both sides of it. Its position must not pass over the one that waits."""
    from cues.checkpoints import SQLCheckpoint

    database = tmp_path / "target.db"

    def insert(messages: Any, process: Any) -> None:
        for message in messages if batch else [messages]:
            process.connection.exec_driver_sql("INSERT INTO seen VALUES (?)", (message["n"],))

    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE seen (n INTEGER)")
    checkpoint = SQLCheckpoint(f"sqlite:///{database}")
    sink = cues.Sink(insert, "in", id="p", batch=batch, batch_size=8, checkpoint=checkpoint)
    graph = Graph("g", [cues.Source("in"), sink])
    appender = cues_store.queue("in").appender()
    for n, delay in enumerate([None, 60, None, None, 30]):
        appender.write({"n": n}, delay=delay)
    for hit in (1, 2, 3, 4):
        with testing.crash("commit.before", hit, how="raise"), contextlib.suppress(testing.Crashed):
            testing.run_until_idle(graph, cues_store)
        clock.advance(20)
    testing.run_until_idle(graph, cues_store)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        seen = [n for (n,) in connection.execute("SELECT n FROM seen")]
    assert sorted(seen) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_inputs_and_outputs_in_other_stores(tmp_path: Path, clock: testing.Clock) -> None:
    queues = {name: cues.QueueOptions(path=tmp_path / name) for name in ("in", "out")}
    stream = cues.Stream(handle, "in", "out", id="p", key="key")
    graph = Graph("g", [cues.Source("in"), stream], errors="errors", queues=queues)
    with cues.open(tmp_path / "home", durability="process") as home, cues.open(tmp_path / "in") as other:
        other.queue("in").appender().write({"n": 1, "key": "x"}, delay=60)
        testing.run_until_idle(graph, home)
        clock.advance(60)
        for point in ("delay.moved", "delay.inside", "commit.after"):
            with testing.crash(point, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph, home)
        testing.run_until_idle(graph, home)
    with cues.open(tmp_path / "out") as other:
        assert testing.messages(other, "out") == [{"n": 1, "key": "x", "count": 1}]


@pytest.mark.slow
def test_messages_that_are_due_wait_for_the_readers_of_a_bounded_queue(tmp_path: Path) -> None:
    options = cues.QueueOptions(max_lag=2, retention="read")
    stream = cues.Stream(lambda message: message, "in", "middle", id="p")
    graph = Graph("g", [cues.Source("in"), stream], queues={"middle": options}, store=tmp_path / "store")
    with graph.start() as running:
        reader = running.store.queue("middle").tailer(name="reader")
        running.send("in", {"n": -1})
        assert reader.read(block=True, timeout=60) == {"n": -1}
        for n in range(10):
            running.send("in", {"n": n}, delay=0.05)
        limit = time.monotonic() + 60
        while len(middle := running.store.queue("middle")) < 2:
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert len(middle) <= 3, "two that are not read, and the first one until it is purged"
        read: list[int] = []
        while len(read) < 10:
            assert time.monotonic() < limit
            message = reader.read(block=True, timeout=1)
            if message is not None:
                read.append(message["n"])
        assert sorted(read) == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["uncommitted", "committed"])
def test_publishers_write_delayed_messages_and_tailers_read_them_at_once(
    cues_store: Any, clock: testing.Clock, isolation: Any
) -> None:
    from cues import txn

    queue = cues_store.queue("in")
    with txn.Publisher() as publisher:
        publisher.publish_committed(lambda _: queue, cues.delayed({"n": 1, "key": "x"}, delay=60))
        if isolation == "committed":
            publisher.publish_uncommitted(lambda _: queue, {"n": 2, "key": "x"})
            publisher.publish_uncommitted(lambda _: queue, cues.delayed({"n": 3, "key": "x"}, delay=50))
            publisher.append_ack_intents(publisher.build_ack_intents())
        publisher.flush()
    graph = graph_of(isolation=isolation)
    testing.run_until_idle(graph, cues_store)
    numbers = [2, 3, 1] if isolation == "committed" else [1]
    assert [m["n"] for m in testing.messages(cues_store, "out")] == numbers[:-2]
    assert testing.messages(cues_store, "in")[0] == {"n": 1, "key": "x"}
    clock.advance(60)
    testing.run_until_idle(graph, cues_store)
    assert [m["n"] for m in testing.messages(cues_store, "out")] == numbers
    assert testing.messages(cues_store, "errors") == []


@pytest.mark.slow
def test_messages_of_an_input_that_was_taken_away_are_given_up_with_a_warning(
    cues_store: Any, clock: testing.Clock
) -> None:
    stages = [cues.Source("in"), cues.Source("other")]
    both = Graph("g", [*stages, cues.Stream(handle, cues.AnyOf("in", "other"), "out", id="p", key="key")])
    cues_store.queue("in").appender().write({"n": 1, "key": "x"}, delay=60)
    cues_store.queue("other").appender().write({"n": 2, "key": "x"}, delay=60)
    testing.run_until_idle(both, cues_store)
    clock.advance(60)
    one = Graph("g", [cues.Source("other"), cues.Stream(handle, cues.AnyOf("other"), "out", id="p", key="key")])
    report = testing.run_until_idle(one, cues_store, accept_topology=True)
    assert [m["n"] for m in testing.messages(cues_store, "out")] == [2]
    assert [event.text for event in report.events if "gives up 1 delayed messages" in event.text]


@pytest.mark.slow
def test_a_processor_that_cannot_hold_a_message_says_so_on_its_error_queue(
    cues_store: Any, clock: testing.Clock
) -> None:
    def read(message: Message, process: Any) -> Message:
        return message

    graph = graph_of(read, tailers="more", batch_size=10)
    graph.source("more")
    cues_store.queue("in").appender().write_many([{"n": n} for n in range(3)], delay=60)
    cues_store.queue("in").appender().write({"n": 3})
    testing.run_until_idle(graph, cues_store)
    assert testing.messages(cues_store, "out") == [{"n": 3}]
    errors = testing.messages(cues_store, "errors")
    assert len(errors) == 3
    assert "tailers=" in str(errors[0]["err/cause"]) and "2026-01-31T00:01:00" in str(errors[0]["err/cause"])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "none of them"),
        ({"delay": 1, "deliver_at": 1}, "both of them"),
        ({"delay": "soon"}, "soon"),
        ({"delay": -1}, "-1"),
        ({"delay": True}, "True"),
        ({"deliver_at": datetime(2026, 1, 31)}, "no time zone"),
        ({"deliver_at": -1}, "-1"),
        ({"deliver_at": 1e300}, "1e\\+300"),
        ({"deliver_at": "2026"}, "aware datetime"),
        ({"deliver_at": datetime(9000, 1, 1, tzinfo=UTC)}, "9000"),
    ],
)
def test_times_that_are_no_instants_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(cues.errors.InvalidArgument, match=text):
        cues.delayed({"n": 1}, **given)


def test_a_queue_without_metadata_refuses_delayed_messages(cues_store: Any) -> None:
    appender = cues_store.queue("bare", metadata=False).appender()
    with pytest.raises(cues.errors.InvalidArgument, match="time of delivery"):
        appender.write({"n": 1}, delay=1)
    with pytest.raises(cues.errors.InvalidArgument, match="use cues"):
        cues_store.queue("other").appender().write({"n": 1, "q/meta": {"q/deliver-at": "tomorrow"}})
    assert len(cues_store.queue("bare")) == len(cues_store.queue("other")) == 0


@pytest.mark.slow
def test_a_sleeping_graph_wakes_for_a_message_that_is_due(tmp_path: Path) -> None:
    graph = Graph("g", store=tmp_path / "store", durability="process")
    graph.source("in")

    @graph.stream("in", "out")
    def forward(message: Message, process: Any) -> Message:
        return {"early": (process.metadata["q/deliver-at"] - process.now).total_seconds()}

    with graph.start() as running:
        running.send("in", {"n": 1}, delay=0.3)
        limit = time.monotonic() + 60
        while not running.messages("out"):
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert running.messages("out")[0]["early"] <= 0


def test_on_spark_the_driver_holds_delayed_messages(spark: Any, tmp_path: Path) -> None:
    def forward(message: Message) -> Message:
        return message

    stages = [cues.Source("in"), cues.Stream(forward, "in", "middle", id="p")]
    graph = Graph("g", [*stages, cues.Stream(forward, "middle", "out", id="q")], errors="errors")
    with cues.open(tmp_path / "store", durability="process") as store:
        appender = store.queue("in").appender()
        appender.write_many([{"n": n} for n in range(50)])
        appender.write({"n": 50}, delay=3600)
        appender.write_many([{"n": n} for n in range(51, 100)])
    start = datetime.now(UTC)
    with graph.start(store=tmp_path / "store", engine="spark", spark=spark, backfill=True) as running:
        running.wait_done()
    with cues.open(tmp_path / "store") as store:
        assert sorted(m["n"] for m in testing.messages(store, "out")) == [n for n in range(100) if n != 50]
    later = testing.Clock(start + timedelta(hours=2))
    with later, graph.start(store=tmp_path / "store", engine="spark", spark=spark) as running:
        assert running.wait_idle(120)
        messages = testing.messages(running.store, "out")
    assert messages[-1] == {"n": 50} and len(messages) == 100


KILLED = """
import sys, time
import cues
graph = cues.Graph("g", store=sys.argv[1], durability="process", errors="errors")
graph.source("in")

@graph.stream("in", "out", key="key")
def note(message, process):
    process.state["count"] = process.state.get("count", 0) + 1
    early = process.metadata.get("q/deliver-at", process.now) > process.now
    return {"n": message["n"], "early": early, "count": process.state["count"], "key": message["key"]}

with graph.start() as running:
    print("started", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_runs_that_are_killed_at_random_deliver_each_message_once(tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    path = tmp_path / "store"
    script = tmp_path / "run.py"
    script.write_text(KILLED)
    total = 600
    with cues.open(path, durability="process") as store:
        appender = store.queue("in").appender()
        sent, limit = 0, time.monotonic() + 120
        while True:
            child = subprocess.Popen([sys.executable, str(script), str(path)], stdout=subprocess.PIPE)
            try:
                assert child.stdout is not None and child.stdout.readline()
                end = time.monotonic() + chance.uniform(0.05, 0.5)
                while time.monotonic() < end:
                    for _ in range(min(total - sent, 20)):
                        message = {"n": sent, "key": chance.choice("xyz")}
                        appender.write(message, delay=chance.choice((None, 0, 0.05, 0.5, 1.5)))
                        sent += 1
                    time.sleep(0.01)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
                child.wait()
                child.stdout.close()
            out = store.queue("out") if "out" in store.queues() else None
            if sent == total and out is not None and len(out) >= total:
                break
            assert time.monotonic() < limit, (sent, None if out is None else len(out))
        messages = list(store.queue("out").tailer())
        assert sorted(message["n"] for message in messages) == list(range(total))
        assert not any(message["early"] for message in messages)
        for key in "xyz":
            counts = [message["count"] for message in messages if message["key"] == key]
            assert counts == list(range(1, len(counts) + 1))
        assert not testing.check_attempts(store)


@pytest.mark.parametrize("text", ["1.2.3s", "..s", "10", "s", "1__.", "-5m"])
def test_a_text_that_is_no_length_of_time_is_refused_by_every_option(text: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(repr(text))):
        cues.delayed({"n": 1}, delay=text)
    with pytest.raises(InvalidArgument, match=re.escape(repr(text))):
        cues.Retention(age=text)
    with pytest.raises(cues.GraphError, match=re.escape(repr(text))):
        cues.Stream(handle, "in", "out", ttl=text)
    with pytest.raises(InvalidArgument, match=re.escape(repr(text))):
        cues.every(text)
