"""``rate=``: the calls of a processor are never more than the bucket allows, and all messages are processed once."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import seeds

import cues
from cues import faults, testing
from cues.cli.app import run as cli
from cues.engine.assembly import assemble
from cues.errors import GraphError
from cues.graphs.options import calls_per_s
from cues.steps import bucket as buckets

START = datetime(2026, 1, 31, tzinfo=UTC)
Message = dict[str, Any]


@pytest.fixture
def clock() -> Iterator[testing.Clock]:
    with testing.Clock(START) as clock:
        yield clock


def graph_of(fn: Callable[..., Any], rate: str | None = "10/s", partitions: int = 1, **options: Any) -> cues.Graph:
    queues = {"in": cues.QueueOptions(partitions=partitions, key="n")}
    processors = [cues.Source("in"), cues.Stream(fn, "in", "out", id="p", rate=rate, **options)]
    return cues.Graph("g", processors, errors="errors", queues=queues)


def numbers(count: int) -> list[Message]:
    return [{"n": n} for n in range(count)]


def expect_bounded(calls: list[float], per_s: float, size: float, crashes: list[float] | None = None) -> None:
    """In every time between two calls there are no more of them than the bucket held, and the rate gave.

    A start after a crash may make one call more, for calls of a step that did not commit are not known.
    """
    for first, begin in enumerate(calls):
        for last in range(first, len(calls)):
            more = sum(begin <= at <= calls[last] for at in crashes or ())
            assert last - first + 1 <= size + per_s * (calls[last] - begin) + more + 1e-6, (first, last)


def test_calls_at_random_times_stay_within_the_bucket_also_over_restarts(
    clock: testing.Clock, store: cues.Store
) -> None:
    """With starts in between, some after a step that did not commit; then all messages are there once."""
    chance = random.Random(seeds.new())
    per_s, rate = chance.choice(((10, "10/s"), (0.5, "30/m"), (300, "300/s")))
    calls: list[float] = []
    crashes: list[float] = []

    def note(message: Message) -> Message:
        calls.append((clock.now - START).total_seconds())
        return message

    graph = graph_of(note, rate)
    assemble(graph, store).close()
    store.queue("in").appender().write_many(numbers(120))
    while len(testing.messages(store, "out")) < 120:
        with closing(assemble(graph, store)) as assembly:
            (stepper,) = [s for s in assembly.steppers if s.node.kind == "stream"]
            for _ in range(chance.randrange(1, 40)):
                clock.advance(chance.choice((0, 0.3, 1, 5)) / per_s)
                if chance.random() < 0.05:
                    with testing.crash("commit.inside", how="raise"), suppress(testing.Crashed):
                        stepper.step()
                    crashes.append((clock.now - START).total_seconds())
                    break
                stepper.step()
    expect_bounded(calls, per_s, max(1, per_s / 10), crashes)
    assert testing.messages(store, "out") == numbers(120)


@pytest.mark.interpreted
def test_control_a_start_with_a_full_bucket_exceeds_the_bound(
    clock: testing.Clock, store: cues.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = buckets.Bucket.__init__

    def full(self: buckets.Bucket, *arguments: Any) -> None:
        given(self, *arguments)
        self._level = 30.0

    monkeypatch.setattr(buckets.Bucket, "__init__", full)
    calls: list[float] = []
    graph = graph_of(lambda message: calls.append((clock.now - START).total_seconds()), "300/s")
    store.queue("in", key="n").appender().write_many(numbers(120))
    for _ in range(3):
        testing.run_until_idle(graph, store)
    with pytest.raises(AssertionError):
        expect_bounded(calls, 300, 30)


def test_the_rate_is_reached_exactly(clock: testing.Clock, store: cues.Store) -> None:
    """The stepper says when the next call is allowed; at that time, and not before, there is one."""
    graph = graph_of(lambda message: message)
    store.queue("in", key="n").appender().write_many(numbers(30))
    with closing(assemble(graph, store)) as assembly:
        stepper = assembly.steppers[-1]
        for _ in range(30):
            assert stepper.step() == "committed"
            assert stepper.step() == "blocked"
            clock.advance(stepper.lingers_s or 0)
        assert (clock.now - START).total_seconds() == pytest.approx(3, abs=1e-5)
        assert stepper.step() == "idle" and not stepper.counters.limited


def test_partitions_share_the_rate(clock: testing.Clock, store: cues.Store) -> None:
    calls: list[float] = []
    graph = graph_of(lambda message: calls.append((clock.now - START).total_seconds()), partitions=4)
    testing.run_until_idle(graph, store)
    store.queue("in").appender().write_many(numbers(80))
    with closing(assemble(graph, store)) as assembly:
        for _ in range(400):
            for stepper in assembly.steppers:
                stepper.step()
            clock.advance(0.05)
    expect_bounded(calls, 10, 4)  # each unit has a bucket of one
    assert len(calls) == 80


def test_a_batch_is_one_call(clock: testing.Clock, store: cues.Store) -> None:
    sizes: list[int] = []
    graph = graph_of(lambda messages: sizes.append(len(messages)), "1/s", batch=True, batch_size=8, step_s=None)
    store.queue("in", key="n").appender().write_many(numbers(20))
    with closing(assemble(graph, store)) as assembly:
        for _ in range(7):
            while assembly.steppers[-1].step() == "committed":
                pass
            clock.advance(0.5)
    assert sizes == [8, 8, 4]


def test_without_a_clock_a_run_until_idle_does_not_wait(store: cues.Store) -> None:
    store.queue("in", key="n").appender().write_many(numbers(5))
    report = testing.run_until_idle(graph_of(lambda message: message, "1/h"), store)
    assert testing.messages(store, "out") == numbers(5)
    assert [round(wait_s / 900) for wait_s in report.waits_s] == [4] * 4


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"side_effects": True}])
def test_a_crash_at_each_point_changes_no_result(options: dict[str, Any]) -> None:
    def run(crash: object = None) -> dict[str, Any]:
        with testing.Clock(START) as clock, testing.temporary_store() as store:
            graph = graph_of(lambda message: message, "20/s", **options)
            store.queue("in", key="n").appender().write_many(numbers(4))
            for _ in range(8):
                try:
                    testing.run_until_idle(graph, store)
                except testing.Crashed:
                    assert crash is not None
                clock.advance(1)
            assert not testing.check_attempts(store)
            return testing.contents(store)["queues"]

    expected = run()
    assert expected["out"] == numbers(4)
    for point, hit in testing.crash_sites(run, faults.STEP_POINTS):
        with testing.crash(point, hit, how="raise"):
            assert run(point) == expected, (point, hit)


def test_timers_wait_for_the_rate(clock: testing.Clock, store: cues.Store) -> None:
    calls: list[float] = []

    def note(message: Message, process: cues.Process) -> None:
        calls.append((clock.now - START).total_seconds())
        process.timer(message["n"], process.now)

    def fire(timer: Message) -> Message:
        calls.append((clock.now - START).total_seconds())
        return {"n": timer["key"]}

    store.queue("in", key="n").appender().write_many(numbers(5))
    with closing(assemble(graph_of(note, timer=fire), store)) as assembly:
        for _ in range(30):
            while assembly.steppers[-1].step() == "committed":
                pass
            clock.advance(0.06)
    assert testing.messages(store, "out") == numbers(5)
    assert len(calls) == 10
    expect_bounded(calls, 10, 1)


@pytest.mark.slow
@pytest.mark.parametrize("owned", [False, True])
def test_redriven_messages_wait_for_the_rate(store: cues.Store, owned: bool) -> None:
    """By the process that redrives, and by one that runs the graph."""
    broken = [True]

    def note(message: Message) -> Message:
        if broken[0]:
            raise ValueError("no")
        return message

    graph = graph_of(note, "100/s")
    store.queue("in", key="n").appender().write_many(numbers(30))
    testing.run_until_idle(graph, store)
    broken[0] = False
    begin = time.monotonic()
    if owned:
        with graph.start(store=store):
            result = cues.redrive(graph, store=store, all=True)
    else:
        result = cues.redrive(graph, store=store, all=True)
    assert len(result.resolved) == 30 and not result.refused
    assert time.monotonic() - begin >= (30 - 10 - 1) / 100  # never faster than the bucket allows
    assert sorted(message["n"] for message in testing.messages(store, "out")) == list(range(30))


@pytest.mark.parametrize(
    ("rate", "expected"), [("10/s", 10), ("600/m", 10), ("5/10s", 0.5), ("1/2h", 1 / 7200), ("24 / d", 1 / 3600)]
)
def test_rates_are_calls_by_time(rate: str, expected: float) -> None:
    assert calls_per_s(rate) == pytest.approx(expected)


@pytest.mark.parametrize("rate", ["10", "0/s", "-1/s", "1.5/s", "/s", "10/", "10/x", "10/0s", 10, True, ""])
def test_a_rate_that_is_none_is_refused(rate: Any) -> None:
    with pytest.raises(GraphError, match="rate is"):
        graph_of(print, rate)


@pytest.mark.slow
def test_a_running_graph_wakes_for_the_next_call_and_status_shows_the_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = cues.Graph("g", store=tmp_path / "store", durability="process")
    graph.source("in")
    graph.stream("in", "out", id="fast", rate="100/s")(lambda message: message)
    graph.stream("out", "slow", id="slow", rate="1/d")(lambda message: message)
    limit = time.monotonic() + 60
    with graph.start() as running:
        for message in numbers(20):
            running.send("in", message)
        while len(running.messages("out")) < 20:
            assert time.monotonic() < limit
            time.sleep(0.01)
        while True:
            assert time.monotonic() < limit
            assert cli(["status", str(tmp_path / "store"), "--json"]) == 0
            rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            if [row["limited"] for row in rows if row.get("processor") == "g.slow"] == [True]:
                break
            time.sleep(0.1)
        assert len(running.messages("slow")) == 1
        running.halt()
