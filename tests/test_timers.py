"""Timers fire once, when they are due, with the state of their key: against a naive model, and after each crash."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import seeds
from small import finish
from terminal import cues as command

import cues
from cues import Graph, faults, testing
from cues.base import clock as clocks
from cues.base import names as processor_names
from cues.engine.assembly import assemble
from cues.graphs import processor_rows
from cues.records import batch as batches
from cues.records import sealed
from cues.steps import ownership, timers
from cues.steps import process as processes
from cues.steps.due_lane import DueLane
from cues.steps.stepper import Stepper
from cues.tools import metrics

START = datetime(2026, 1, 31, tzinfo=UTC)
Message = dict[str, Any]
Play = list[tuple[float, list[Message]]]
"""Rounds: seconds since START, and the messages that are sent then."""
POINTS = (*faults.STEP_POINTS, *faults.TIMER_POINTS)


def handle(message: Message, process: Any) -> Message | None:
    process.state["n"] = process.state.get("n", 0) + 1
    at = None if message["after"] is None else process.now + timedelta(seconds=message["after"])
    process.timer(message["key"], at, message["name"])
    return None


def fire(timer: Message, process: Any) -> Message:
    """Write a message; then set a further timer, or cancel one, by the number of timers that fired for the key."""
    fired = process.state["fired"] = process.state.get("fired", 0) + 1
    if fired % 3 == 1:
        process.timer(timer["key"], timer["at"].timestamp() + 7, "again")
    if fired % 3 == 2:
        process.timer(timer["key"], None, "a")
    return {"key": timer["key"], "name": timer["name"], "at": timer["at"], "n": process.state["n"], "fired": fired}


def graph_of(fire: Callable[..., Any] = fire, **options: Any) -> Graph:
    return Graph(
        "g",
        [cues.Source("in"), cues.Stream(handle, "in", "out", id="p", key="key", timer=fire, **options)],
        errors="errors",
    )


def play_at_random(chance: random.Random, rounds: int) -> Play:
    """Rounds in which no two timers are due at the same moment."""
    play, at = [], 0.0
    for _ in range(rounds):
        at += chance.choice((0.5, 3, 10, 60)) + chance.randrange(1000) / 1e6
        some = [
            {
                "key": chance.choice(["x", "y", ("z", 1)]),
                "name": chance.choice([None, "a", "again"]),
                "after": chance.choice((None, *[chance.randrange(1, 30_000_000) / 1e6] * 4)),
            }
            for _ in range(chance.randrange(5))
        ]
        play.append((at, some))
    return play


def model(play: Play) -> list[Message]:
    """The messages that timers write, by the rules of :func:`handle` and :func:`fire`, with plain dicts."""
    timers: dict[Any, datetime] = {}
    count: dict[Any, int] = {}
    fired: dict[Any, int] = {}
    written = []
    for seconds, messages in play:
        now = START + timedelta(seconds=seconds)

        def fire_all(now: datetime = now) -> None:
            while due := sorted((at, key) for key, at in timers.items() if at <= now):
                for at, (key, name) in due:
                    if timers.get((key, name)) != at:
                        continue
                    del timers[key, name]
                    fired[key] = fired.get(key, 0) + 1
                    if fired[key] % 3 == 1:
                        timers[key, "again"] = at + timedelta(seconds=7)
                    if fired[key] % 3 == 2:
                        timers.pop((key, "a"), None)
                    written.append({"key": key, "name": name, "at": at, "n": count[key], "fired": fired[key]})

        fire_all()
        for message in messages:
            key = message["key"]
            count[key] = count.get(key, 0) + 1
            timers.pop((key, message["name"]), None)
            if message["after"] is not None:
                timers[key, message["name"]] = now + timedelta(seconds=message["after"])
        fire_all()
    return written


def played(play: Play, graph: Graph, crash: tuple[str, int] | None = None) -> dict[str, Any]:
    """Play the rounds in a new store, with a crash in one of the runs; return everything durable."""
    with testing.Clock(START) as clock, testing.temporary_store() as store:
        for seconds, messages in play:
            clock.set(START + timedelta(seconds=seconds))
            finish(graph, store, crash)
            store.queue("in").appender().write_many(messages)
            finish(graph, store, crash)
        assert not testing.check_attempts(store)
        return testing.contents(store)


PLAY: Play = [
    (0, [{"key": "x", "name": None, "after": 5.25}, {"key": "y", "name": "a", "after": 5.5}]),
    (1, [{"key": "x", "name": "a", "after": 5}, {"key": "y", "name": None, "after": 4}]),
    (2, [{"key": "x", "name": None, "after": 5}, {"key": "y", "name": None, "after": None}]),
    (9, [{"key": "x", "name": "b", "after": 1}]),
    (30, []),
]


@pytest.mark.parametrize("case", range(5))
def test_timers_at_random_fire_as_the_model_says(case: int) -> None:
    play = play_at_random(random.Random(seeds.new()), 20)
    durable = played(play, graph_of(batch_size=random.choice((1, 3, 1000))))
    assert durable["queues"]["out"] == model(play)
    assert durable["queues"]["errors"] == []


def crash_sites() -> list[tuple[str, int]]:
    return testing.crash_sites(lambda: played(PLAY, graph_of()), POINTS)


def _check_crashes(sites: list[tuple[str, int]], graph: Callable[[], Graph] = graph_of) -> None:
    expected = played(PLAY, graph())
    for point, hit in sites:
        with testing.crash(point, hit, how="raise"):
            durable = played(PLAY, graph(), (point, hit))
        assert durable["queues"] == expected["queues"], (point, hit)
        assert durable["state"] == expected["state"], (point, hit)


def test_death_at_each_point_of_timers_fires_each_once() -> None:
    """Set, move, fire and cancel: the first and the last time that a run passes each point."""
    assert played(PLAY, graph_of())["queues"]["out"] == model(PLAY)
    sites = crash_sites()
    assert {point for point, _ in sites} >= set(faults.TIMER_POINTS) | {"commit.inside", "commit.after"}
    ends = dict(sites)
    _check_crashes([(point, hit) for point, hit in sites if point in faults.TIMER_POINTS and hit in (1, ends[point])])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"side_effects": True}, {"batch_size": 1}])
def test_death_at_every_point_and_hit_fires_each_once(options: dict[str, Any]) -> None:
    sites = testing.crash_sites(lambda: played(PLAY, graph_of(**options)), POINTS)
    _check_crashes(sites, lambda: graph_of(**options))


def test_control_a_timer_that_is_not_compared_when_it_fires(monkeypatch: pytest.MonkeyPatch) -> None:
    """A due timer that another one cancels in the same step must not fire; without the comparison it does."""
    monkeypatch.setattr(processes.ProcessCore, "fires", lambda self, timer: True)
    assert played(PLAY_CANCEL, graph_of())["queues"]["out"] != model(PLAY_CANCEL)


@pytest.mark.interpreted
def test_control_a_timer_that_is_moved_in_two_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DueLane.move

    def move(self: DueLane, stepper: Stepper) -> int:
        if not isinstance(self.due, timers.Timers):
            return real(self, stepper)
        state = stepper.state
        due = state.due(clocks.now_ns(), 1000)
        if due:
            state.settle({row: None for row, *_ in due})
            stepper.store.core.commit(state.write)
            state.committed()
            faults.point("timer.moving")
            messages = [{"key": key, "name": name, "at": clocks.to_datetime(at)} for _, key, name, at in due]
            pages = batches.build(messages, batches.OWN_BYTES_MAX, None, reserved=True)
            stepper.store.core.commit(lambda txn: stepper.inputs[0].log.append(txn, pages))
        return len(due)

    monkeypatch.setattr(DueLane, "move", move)
    assert played(PLAY, graph_of())["queues"]["out"] == model(PLAY)
    with pytest.raises(AssertionError, match=r"timer\.moving"):
        _check_crashes([("timer.moving", 1)])


PLAY_CANCEL: Play = [
    (
        0,
        [
            {"key": "x", "name": None, "after": 1},
            {"key": "x", "name": "b", "after": 2},
            {"key": "x", "name": "a", "after": 3},
        ],
    ),
    (4, []),
]


def test_a_timer_that_is_cancelled_after_it_was_due_does_not_fire() -> None:
    assert played(PLAY_CANCEL, graph_of())["queues"]["out"] == model(PLAY_CANCEL)
    assert len(model(PLAY_CANCEL)) == 2


def send(store: Any, *after: float, key: str = "x") -> None:
    names = [None, "a", "b", "c"]
    store.queue("in").appender().write_many(
        [{"key": key, "name": name, "after": seconds} for seconds, name in zip(after, names)]
    )


@pytest.fixture
def clock() -> Iterator[testing.Clock]:
    with testing.Clock(START) as clock:
        yield clock


def test_a_timer_of_a_call_that_fails_is_not_set(cues_store: Any, clock: testing.Clock) -> None:
    def failing(message: Message, process: Any) -> None:
        process.timer(message["key"], 1)
        raise ValueError("no")

    graph = Graph("g", [cues.Source("in"), cues.Stream(failing, "in", "out", id="p", timer=fire)], errors="errors")
    send(cues_store, 1)
    testing.run_until_idle(graph, cues_store)
    assert testing.messages(cues_store, "out") == []
    assert len(testing.messages(cues_store, "errors")) == 1


def test_a_timer_that_fails_is_retried_and_then_on_the_error_queue(cues_store: Any, clock: testing.Clock) -> None:
    hashes = []

    def failing(timer: Message, process: Any) -> None:
        hashes.append(process.delivery_hash)
        process.state["fired"] = 1
        raise ValueError("no")

    graph = graph_of(failing, retries=cues.Retry(3, backoff_s=0))
    send(cues_store, 1)
    testing.run_until_idle(graph, cues_store)
    clock.advance(2)
    testing.run_until_idle(graph, cues_store)
    (error,) = testing.messages(cues_store, "errors")
    assert error["err.proc/messages"] == {"timer": [{"key": "x", "name": None, "at": START + timedelta(seconds=1)}]}
    assert len(hashes) == 3 and len(set(hashes)) == 1
    assert testing.state(cues_store, "g.p", "x") == {"n": 1}
    clock.advance(100)
    testing.run_until_idle(graph, cues_store)
    assert len(hashes) == 3


def test_a_former_owner_moves_no_timers(cues_store: Any, clock: testing.Clock) -> None:
    """It was stopped when a timer was due, and continues after a takeover: its commit is refused, the timer stays."""
    send(cues_store, 1)
    assembled = assemble(graph_of(), cues_store)
    unit = assembled.steppers[-1]
    while unit.step() == "committed":
        pass
    (lane,) = [lane for lane in unit.lanes if isinstance(lane, DueLane) and lane.due.kind == "timer"]
    clock.advance(2)

    def rob(txn: Any) -> None:
        row = processor_rows.read_row(txn, unit.node.id)
        assert row is not None
        taken = row._replace(owner=b"somebody", epoch=row.epoch + 1)
        sealed.put(txn, processor_names.processor_key(unit.node.id), taken.pack())

    cues_store.core.commit(rob)
    with pytest.raises(cues.errors.Fenced):
        lane.move(unit)
    assembled.close()
    testing.run_until_idle(graph_of(), cues_store)
    assert [message["fired"] for message in testing.messages(cues_store, "out")] == [1]


def test_reset_state_removes_timers_also_those_that_were_moved(cues_store: Any, clock: testing.Clock) -> None:
    send(cues_store, 1, 50)
    testing.run_until_idle(graph_of(), cues_store)
    clock.advance(2)
    with testing.crash("timer.moved", how="raise"), pytest.raises(testing.Crashed):
        testing.run_until_idle(graph_of(), cues_store)
    ownership.seek(cues_store, "g.p", {}, reset_state=True)
    clock.advance(100)
    testing.run_until_idle(graph_of(), cues_store)
    assert testing.messages(cues_store, "out") == []


def test_a_renamed_processor_keeps_its_timers(cues_store: Any, clock: testing.Clock) -> None:
    send(cues_store, 10)
    testing.run_until_idle(graph_of(), cues_store)
    stream = cues.Stream(handle, "in", "out", id="q", key="key", timer=fire, renamed_from="p")
    graph = Graph("g", [cues.Source("in"), stream], errors="errors")
    clock.advance(12)
    testing.run_until_idle(graph, cues_store)
    assert [message["key"] for message in testing.messages(cues_store, "out")] == ["x"]


def test_each_partition_and_concurrent_calls_have_their_timers(cues_store: Any, clock: testing.Clock) -> None:
    stream = cues.Stream(handle, "in", "out", id="p", key="key", timer=fire, concurrency=4)
    queues = {"in": cues.QueueOptions(partitions=3, key="key")}
    graph = Graph("g", [cues.Source("in"), stream], errors="errors", queues=queues)
    testing.run_until_idle(graph, cues_store)
    for n in range(20):
        send(cues_store, 1 + n, key=f"k{n}")
    testing.run_until_idle(graph, cues_store)
    clock.advance(15.5)
    testing.run_until_idle(graph, cues_store)
    assert {message["key"] for message in testing.messages(cues_store, "out")} == {f"k{n}" for n in range(15)}


def test_a_timer_in_the_past_and_an_async_function_fire(cues_store: Any, clock: testing.Clock) -> None:
    async def later(timer: Message) -> Message:
        return {"at": timer["at"]}

    send(cues_store, -5)
    testing.run_until_idle(graph_of(later), cues_store)
    assert testing.messages(cues_store, "out") == [{"at": START - timedelta(seconds=5)}]


def test_a_sleeping_graph_wakes_for_its_timers(tmp_path: Path) -> None:
    graph = Graph("g", store=tmp_path / "store", durability="process")
    graph.source("in")

    @graph.stream("in", "out", key="key")
    def remind(message: Message, process: Any) -> None:
        process.timer(message["key"], process.now.timestamp() + 0.2)

    @graph.timer("remind")
    def due(timer: Message, process: Any) -> Message:
        return {"late": (process.now - timer["at"]).total_seconds()}

    with graph.start() as running:
        running.send("in", {"key": 1})
        limit = time.monotonic() + 60
        while not running.messages("out"):
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert running.messages("out")[0]["late"] >= 0


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: cues.Stream(handle, "in", "out", timer=fire, tailers="more"), "tailers"),
        (lambda: cues.Stream(handle, "in", "out", timer=3), "timer=3"),
        (lambda: cues.Stream(handle, "in", "out", timer=lambda a, b: None), "a timer and `process`"),
        (lambda: cues.Source("in", timer=fire), "takes no option 'timer'"),
        (lambda: graph_of(strategy="at-most-once").plan(), "at-most-once"),
        (lambda: graph_of().timer("p"), "already"),
        (lambda: graph_of().timer("pp"), "pp"),
    ],
)
def test_what_cannot_have_timers_is_refused(declare: Callable[[], Any], text: str) -> None:
    with pytest.raises(cues.GraphError, match=text):
        declare()


def test_times_that_are_no_instants_are_errors_of_the_call(cues_store: Any) -> None:
    def wrong(message: Message, process: Any) -> None:
        process.timer("x", message["at"])

    graph = Graph("g", [cues.Source("in"), cues.Stream(wrong, "in", "out", id="p", timer=fire)], errors="errors")
    cues_store.queue("in").appender().write_many([{"at": at} for at in ("soon", -1, 1e300, datetime(2026, 1, 1), True)])
    testing.run_until_idle(graph, cues_store)
    assert len(testing.messages(cues_store, "errors")) == 5


def test_a_timer_without_a_function_is_an_error(cues_store: Any) -> None:
    graph = Graph("g", [cues.Source("in"), cues.Stream(handle, "in", "out", id="p", key="key")], errors="errors")
    send(cues_store, 1)
    testing.run_until_idle(graph, cues_store)
    (error,) = testing.messages(cues_store, "errors")
    assert "graph.timer('p')" in str(error["err/cause"])


def test_plain_data_keep_the_function_of_timers() -> None:
    graph = Graph.from_dict(graph_of().to_dict())
    assert graph.processors["p"].options.timer is fire


def test_status_shows_the_next_timer_of_a_processor() -> None:
    with testing.Clock(START), testing.temporary_store() as store:
        graph = cues.Graph("g", errors="errors")
        graph.source("a")

        def take(message: Message, process: Any) -> None:
            process.timer(message["n"], process.now + timedelta(hours=message["n"]))

        graph.add(cues.Sink(take, "a", id="take", timer=lambda timer, process: None))
        store.queue("a").appender().write_many([{"n": 3}, {"n": 2}])
        testing.run_until_idle(graph, store)
        (row,) = [row for row in metrics.of_processors(store) if row.processor == "g.take"]
        assert row.timer == START + timedelta(hours=2)
        shown = command("status", store.path, "--table").out
        assert "The next timer of g.take is due at 2026-01-31T02:00:00Z" in shown
