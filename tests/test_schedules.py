"""Interval and cron sources: each planned tick is written once, whatever was missed, killed or held up between."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import seeds
from children import Child

import cues
from cues import faults, testing
from cues.errors import Diverged, InvalidArgument
from cues.graphs.schedules import Schedule
from cues.steps import feed

START = datetime(2026, 1, 31, 0, 0, 3, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")
START_NS = int(START.timestamp()) * 10**9


@pytest.fixture
def clock() -> Iterator[testing.Clock]:
    with testing.Clock(START) as clock:
        yield clock


def times_of(source: Schedule, start: int) -> Iterator[int]:
    return source._times(start)


def ticking(source: Schedule | None = None, **options: Any) -> cues.Graph:
    return cues.Graph("ticking", [cues.Source("ticks", source or cues.every("10s"), **options)])


def seconds(store: cues.Store) -> list[tuple[int, float]]:
    """Index and seconds since :data:`START` of each tick on the queue."""
    return [(m["index"], (m["at"] - START).total_seconds()) for m in testing.messages(store, "ticks")]


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("all", [(1, 7), (2, 17), (3, 27), (4, 37), (5, 47)]),
        ("last", [(1, 7), (2, 17), (5, 47)]),
        ("none", []),
    ],
)
def test_ticks_that_were_missed_are_written_as_the_policy_says(
    clock: testing.Clock, missed: str, expected: list[tuple[int, float]]
) -> None:
    """The first run writes no tick; ticks are at multiples of the interval; a gap in the index shows missed ones."""
    with testing.temporary_store() as store:
        for step in (0, 6.5, 0.5, 10, 35, 0):
            clock.advance(step)
            testing.run_until_idle(ticking(cues.every("10s", missed=missed)), store)
        assert seconds(store) == expected


@pytest.mark.slow
def test_a_crash_at_each_point_of_a_step_neither_loses_nor_repeats_a_tick(clock: testing.Clock) -> None:
    """Also in the first step, which commits the start without a message."""

    def run(crash: tuple[str, int] | None = None) -> list[tuple[int, float]]:
        clock.set(START)
        with testing.temporary_store() as store:
            for step in (0, 35, 11):
                clock.advance(step)
                try:
                    testing.run_until_idle(ticking(batch_size=2), store)
                except testing.Crashed:
                    assert crash is not None
                    testing.run_until_idle(ticking(batch_size=2), store)
            assert not testing.check_attempts(store)
            return seconds(store)

    expected = [(1, 7), (2, 17), (3, 27), (4, 37)]
    sites = testing.crash_sites(run, faults.STEP_POINTS)
    assert ("commit.inside", 4) in sites  # the start, and three steps with ticks
    for point, hit in sites:
        with testing.crash(point, hit, how="raise"):
            assert run((point, hit)) == expected, (point, hit)


def test_control_a_start_that_is_not_committed_loses_ticks(clock: testing.Clock, monkeypatch: Any) -> None:
    """Without a position, the second run would begin at its own time."""
    given = Schedule.__call__

    def call(self: Schedule, position: Any, process: Any) -> Iterator[Any]:
        return (item for item in given(self, position, process) if item[1] is not None)

    monkeypatch.setattr(Schedule, "__call__", call)
    with testing.temporary_store() as store:
        testing.run_until_idle(ticking(), store)
        clock.advance(35)
        testing.run_until_idle(ticking(), store)
        assert seconds(store) == []


@pytest.mark.interpreted
def test_many_missed_ticks_are_committed_in_bounded_steps(clock: testing.Clock, monkeypatch: Any) -> None:
    ahead = []
    given = feed.Feed.take

    def take(self: feed.Feed, count: int) -> Any:
        ahead.append(len(self._bodies))
        return given(self, count)

    monkeypatch.setattr(feed.Feed, "take", take)
    with testing.temporary_store() as store:
        testing.run_until_idle(ticking(cues.every(0.01)), store)
        clock.advance(50)
        report = testing.run_until_idle(ticking(cues.every(0.01)), store)
        assert len(seconds(store)) == 5000
        assert report.steps["ticks"] >= 5 and max(ahead) <= 1000


def test_at_random_every_equals_the_model(clock: testing.Clock) -> None:
    """Runs at random times, with an interval that changes; the wall clock may go back."""
    chance = random.Random(seeds.new())
    for missed in ("all", "last"):
        clock.set(START)
        expected: list[tuple[int, int]] = []
        done, index = START_NS, 0
        with testing.temporary_store() as store:
            testing.run_until_idle(ticking(), store)
            for _ in range(15):
                clock.set(clock.now + timedelta(seconds=chance.choice((-20, 0.25, 4, 60, 300))))
                interval = chance.choice((7, 10, 2.5))
                testing.run_until_idle(ticking(cues.every(interval, missed=missed)), store)
                now = round(clock.now.timestamp() * 1e9)
                step = round(interval * 1e9)
                due = list(range(0, now - START_NS + step, step // 2))
                due = sorted({at // step * step for at in (START_NS + offset for offset in due)})
                due = [at for at in due if done < at <= now]
                for number, at in enumerate(due, 1):
                    if missed == "all" or number == len(due):
                        expected.append((index + number, at))
                index += len(due)
                done = due[-1] if due else done
            assert [
                (m["index"], round(m["at"].timestamp() * 1e9)) for m in testing.messages(store, "ticks")
            ] == expected


class Turns(SimpleNamespace):
    """The process of a source whose waits move the clock, and which drains at a time."""

    clock: testing.Clock
    until_s: float

    @property
    def stopping(self) -> bool:
        return (self.clock.now - START).total_seconds() >= self.until_s

    def wait(self, seconds: float) -> bool:
        assert 0 < seconds <= 0.1  # the clock may be set while it waits
        self.clock.advance(seconds)
        return not self.stopping


def test_none_writes_no_tick_from_before_the_start_and_each_of_the_run(clock: testing.Clock) -> None:
    source = cues.every(timedelta(seconds=10), missed="none")
    clock.advance(35)
    ticks = list(source([START_NS, 0], Turns(clock=clock, until_s=60)))
    assert [(m["index"], (m["at"] - START).total_seconds()) for _, m in ticks if m] == [(4, 37), (5, 47), (6, 57)]
    assert ticks[0][0] == [START_NS + 37 * 10**9, 4]


def test_a_source_that_is_held_up_writes_the_last_tick_of_that_time(clock: testing.Clock) -> None:
    ticks = cues.every(10, missed="none")([START_NS, 0], Turns(clock=clock, until_s=100))
    assert next(ticks)[0][1] == 1
    clock.advance(45)  # the readers of its queue were slow
    assert [position[1] for position, _ in ticks][:2] == [5, 6]


# --- cron ----------------------------------------------------------------------------------------


def cron(expression: str, **options: Any) -> Any:
    pytest.importorskip("cronsim", reason="cronsim is not installed (pip install 'cues-streams[test]')")
    return cues.cron(expression, **options)


SPRING = int(datetime(2026, 3, 28, 12, tzinfo=UTC).timestamp()) * 10**9
AUTUMN = int(datetime(2026, 10, 24, 12, tzinfo=UTC).timestamp()) * 10**9


@pytest.mark.parametrize(
    ("expression", "start", "expected"),
    [
        # A local time that is skipped: the first time after the gap, once.
        ("30 2 * * *", SPRING, ["29T03:00:00+02:00", "30T02:30:00+02:00", "31T02:30:00+02:00"]),
        ("0,30 2 * * *", SPRING, ["29T03:00:00+02:00", "30T02:00:00+02:00", "30T02:30:00+02:00"]),
        # A local time that is repeated: the first of the two.
        ("30 2 * * *", AUTUMN, ["25T02:30:00+02:00", "26T02:30:00+01:00", "27T02:30:00+01:00"]),
        ("0 6 * * *", AUTUMN, ["25T06:00:00+01:00", "26T06:00:00+01:00", "27T06:00:00+01:00"]),
    ],
)
def test_local_times_when_clocks_change(expression: str, start: int, expected: list[str]) -> None:
    times = times_of(cron(expression, timezone="Europe/Berlin"), start)
    assert [datetime.fromtimestamp(next(times) / 1e9, BERLIN).isoformat()[8:] for _ in range(3)] == expected


@pytest.mark.parametrize("start", [SPRING, AUTUMN])
@pytest.mark.parametrize("expression", ["*/20 * * * *", "10 * * * *", "*/15 1-3 * * *"])
def test_expressions_with_a_star_follow_the_time_that_passes(expression: str, start: int) -> None:
    """Against every minute of two days: no tick is skipped or repeated by the change, and 02:00 comes 0 or 2 times."""
    minute, hour = expression.split()[:2]
    wanted = []
    for offset in range(1, 48 * 60):
        when = datetime.fromtimestamp(start / 1e9 + 60 * offset, BERLIN)
        at_minute = when.minute % int(minute[2:]) == 0 if minute.startswith("*") else when.minute == int(minute)
        if at_minute and (hour == "*" or 1 <= when.hour <= 3):
            wanted.append(start + 60 * offset * 10**9)
    times = times_of(cron(expression, timezone="Europe/Berlin"), start)
    assert [next(times) for _ in wanted] == wanted


@pytest.mark.parametrize("start", [SPRING, AUTUMN])
@pytest.mark.parametrize(
    "expression", ["30 2 * * *", "*/20 * * * *", "15 1,2,3 * * *", "0 2-4 * * *", "*/30 * * * * *"]
)
def test_each_tick_depends_on_the_one_before_it_alone(expression: str, start: int) -> None:
    """A restart after any tick, or at any moment between two, finds the same ticks as a run without one."""
    source = cron(expression, timezone="Europe/Berlin")
    times = times_of(source, start)
    found = [next(times) for _ in range(100)]
    assert found == sorted(set(found))
    for at, later in itertools.pairwise(found):
        assert source.after(at) == source.after(at + (later - at) // 3) == source.after(later - 1) == later


def test_a_cron_source_writes_its_ticks_once(clock: testing.Clock) -> None:
    source = cron("0 6 * * *", timezone="Europe/Berlin")
    with testing.temporary_store() as store:
        for days in (0, 1, 3):
            clock.advance(timedelta(days=days))
            testing.run_until_idle(ticking(source), store)
        assert testing.messages(store, "ticks") == [
            {"index": n, "at": datetime(2026, 1, 30, 5, tzinfo=UTC) + timedelta(days=n)} for n in (1, 2, 3, 4)
        ]
        clock.advance(timedelta(days=10))
        testing.run_until_idle(ticking(cron("0 6 * * *", timezone=BERLIN, missed="last")), store)
        assert [m["index"] for m in testing.messages(store, "ticks")] == [1, 2, 3, 4, 14]


def test_a_drain_in_a_long_count_writes_no_wrong_tick(clock: testing.Clock) -> None:
    class Draining:
        looks = 0

        @property
        def stopping(self) -> bool:
            self.looks += 1
            return self.looks > 3

    clock.advance(timedelta(days=30))
    ticks = cron("* * * * *", missed="last")([START_NS, 0], Draining())
    assert list(ticks) == []


def test_a_source_moves_without_a_message(clock: testing.Clock) -> None:
    """``yield position, None`` is committed like a message, between others and alone; without a position it fails."""
    given = [(1, {"n": 1}), (2, None), (3, {"n": 3}), (4, None)]
    starts: list[Any] = []

    def source(position: int | None) -> Iterator[Any]:
        starts.append(position)
        yield from [item for item in given if item[0] > (position or 0)]

    graph = cues.Graph("g", [cues.Source("in", source, schema={"type": "object", "required": ["n"]})])
    with testing.temporary_store() as store:
        assert testing.run_until_idle(graph, store).counters["in"].taken == 2
        given.append((5, None))
        assert testing.run_until_idle(graph, store).counters["in"].taken == 0
        testing.run_until_idle(graph, store)
        assert starts == [None, 4, 5]
        assert testing.messages(store, "in") == [{"n": 1}, {"n": 3}]
        assert not testing.check_attempts(store)
        bare = cues.Graph("h", [cues.Source("bare", lambda: iter([None]), resume="again")])
        with pytest.raises(cues.ProcessorStopped, match="NoneType"):
            testing.run_until_idle(bare, store)
        checked = cues.Source("checked", lambda position: iter([None]), resume="again", schema={"type": "object"})
        with pytest.raises(cues.ProcessorStopped, match="object"):
            testing.run_until_idle(cues.Graph("i", [checked]), store)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "interval", ["ten", "10", "1.2.3s", 0, -1, True, None, 0.0001, float("nan"), float("inf"), "0s"]
)
def test_an_interval_that_is_no_duration_is_refused(interval: Any) -> None:
    with pytest.raises(InvalidArgument, match="interval"):
        cues.every(interval)


@pytest.mark.parametrize(
    "expression", ["", "* * * *", "61 * * * *", "a b c d e", 3, None, "0 0 30 2 *", "0 0 29 2 1#6"]
)
def test_a_cron_expression_that_never_comes_or_cannot_be_read_is_refused(expression: Any) -> None:
    with pytest.raises(InvalidArgument, match="cron expression"):
        cron(expression)


def test_policies_zones_and_positions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="missed='some'"):
        cues.every(1, missed="some")
    with pytest.raises(InvalidArgument, match="follow=False"):
        cues.every(1, missed="none", follow=False)
    for zone in ("Mars/Olympus", "../etc", 3, None):
        with pytest.raises(InvalidArgument, match="time zone"):
            cron("* * * * *", timezone=zone)
    for position in (["a"], 3, [1, 2.5], {"at": 1}):
        with pytest.raises(Diverged):
            next(cues.every(1)(position, None))  # type: ignore[arg-type]


# --- runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_source_that_waits_is_idle_and_ends_at_a_drain(tmp_path: Path) -> None:
    graph = cues.Graph("g", [cues.Source("ticks", cues.every("10d"))], store=tmp_path / "store", durability="process")
    running = graph.start()
    try:
        assert running.wait_done(0.2)  # as cues run --idle-exit
        (generator,) = [thread for thread in threading.enumerate() if thread.name == "cues g.ticks generator"]
        assert running.drain(60)
        generator.join(60)
        assert not generator.is_alive()
    finally:
        running.close()


RUN = """
import sys, cues
graph = cues.Graph("g", [cues.Source("ticks", cues.every(0.005))], store=sys.argv[1], durability="process")
running = graph.start()
seen = len(running.messages("ticks"))
print("started")
while True:
    if len(running.messages("ticks")) > seen:
        print("ticked")
        seen = 10**9
    running.sleep(0.01)
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_no_tick_and_repeats_none(tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    path = tmp_path / "store"
    for turn in range(12):
        with Child(RUN, path) as child:
            assert child.line() == "started"
            if turn % 3:
                assert child.line() == "ticked"
            time.sleep(chance.choice((0, chance.random() / 8)))  # the moment of the kill is random
            child.kill()
    with cues.open(path) as store:
        ticks = testing.messages(store, "ticks")
        assert len(ticks) > 12
        assert [tick["index"] for tick in ticks] == list(range(1, len(ticks) + 1))
        assert {b["at"] - a["at"] for a, b in itertools.pairwise(ticks)} == {timedelta(milliseconds=5)}


@pytest.mark.slow
def test_on_a_shared_directory_the_ticks_are_the_same(tmp_path: Path, clock: testing.Clock) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")
    from directory_steps import HostRun

    from cues.spark.cluster.files import LocalFiles

    ticks: list[Any] = []
    for advance in (0, 35):
        clock.advance(advance)
        host = HostRun(LocalFiles(str(tmp_path / "queues")), ticking(), tmp_path / "store")
        try:
            host.claim().run()
            ticks = host.messages("ticks")
        finally:
            host.close()
    assert [(tick["index"], (tick["at"] - START).total_seconds()) for tick in ticks] == [(1, 7), (2, 17), (3, 27)]


@pytest.mark.interpreted
def test_a_generator_that_waits_for_room_is_told_of_it_whenever_it_began_to_wait() -> None:
    """The last message that fits arrives between the look of the processor and its take."""
    ahead = feed.Feed(SimpleNamespace(output=SimpleNamespace(core=None)))  # type: ignore[arg-type]
    full, told = threading.Event(), []

    class Between(list[bytes]):
        def __getitem__(self, at: Any) -> Any:
            if isinstance(at, slice) and not full.is_set():
                ahead._afters.append(0)
                ahead._bodies.append(b"x")
                full.set()
            return super().__getitem__(at)

    ahead._changed.notify_all = lambda: told.append(True)  # type: ignore[method-assign]
    ahead._bodies = Between([b"x"] * (feed.AHEAD_MAX - 1))
    ahead._afters = [0] * (feed.AHEAD_MAX - 1)
    assert len(ahead.take(feed.AHEAD_MAX)[1]) == feed.AHEAD_MAX
    assert told


class Anew:
    """An iterator whose ``__iter__`` begins anew, as the examples of many courses do."""

    def __init__(self, after: int, bare: bool) -> None:
        self.after, self.bare = after, bare

    def __iter__(self) -> Any:
        self.n = self.after
        return self

    def __next__(self) -> Any:
        if self.n == 10:
            raise StopIteration
        self.n += 1
        return {"n": self.n} if self.bare else (self.n, {"n": self.n})


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("threads", [False, True])
def test_the_iterator_of_a_source_is_asked_for_its_iterator_once(bare: bool, threads: bool) -> None:
    def of_position(position: int | None) -> Anew:
        return Anew(position or 0, bare=False)

    def again() -> Anew:
        return Anew(0, bare=True)

    options: dict[str, Any] = {"resume": "skip"} if bare else {}
    graph = cues.Graph("g", [cues.Source("n", again if bare else of_position, batch_size=3, **options)])
    with testing.temporary_store() as store:
        if threads:
            with graph.start(store=store) as running:
                running.wait_done()
        else:
            testing.run_until_idle(graph, store, steps_max=20)
        assert [message["n"] for message in testing.messages(store, "n")] == list(range(1, 11))
