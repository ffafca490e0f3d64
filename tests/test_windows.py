"""Windows, joins and reducers: times, keys, watermarks, late messages, bounds of state, refusals."""

from __future__ import annotations

import builtins
import contextlib
import random
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
import seeds

import cues
from cues import codec, testing
from cues.errors import GraphError, InvalidArgument
from cues.processors import event_time, joins, reducers, windows
from cues.processors.reducers import (
    collect,
    count,
    distinct,
    first,
    last,
    max,
    mean,
    min,
    quantiles,
    reducer,
    stddev,
    sum,
    top,
)

Message = dict[str, Any]
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def run(stream: cues.Stream, *given: Message, errors: str | None = "errors") -> dict[str, list[Message]]:
    """All queues after a run over messages of the queue ``m``."""
    graph = cues.Graph("g", errors=errors)
    graph.source("m")
    graph.add(stream)
    with testing.temporary_store() as store:
        store.queue("m").appender().write_many(list(given))
        testing.run_until_idle(graph, store)
        queues = {name: testing.messages(store, name) for name in ("out", "late", "errors") if name in store.queues()}
        return {"out": [], "late": [], "errors": [], **queues, "state": [testing.state(store, f"g.{stream.id}")]}


def minutes(**options: Any) -> cues.Stream:
    return windows.tumbling(
        "m", "out", options.pop("size", "1m"), **{"time": "t", "late": "late", "reduce": {"n": count()}, **options}
    )


def at(second: float) -> Message:
    return {"t": NOON.timestamp() + second}


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "time",
    [
        1769860800,
        1769860800.0,
        NOON,
        NOON.replace(tzinfo=None),
        NOON.astimezone(timezone(timedelta(hours=5, minutes=30))),
        "2026-01-31T12:00:00Z",
        "2026-01-31T12:00:00",
        "2026-01-31 13:00:00.000+01:00",
    ],
)
def test_every_form_of_a_time_is_the_same_moment(time: Any) -> None:
    assert event_time.moment(event_time.microseconds(time)) == NOON
    found = run(minutes(), {"t": time}, windows.watermark(None))
    assert found["out"] == [{"start": NOON, "end": NOON + timedelta(minutes=1), "n": 1}] and not found["errors"]


@pytest.mark.parametrize(
    ("time", "problem"),
    [
        ("noon", "not a text in ISO 8601"),
        (None, "The time of the message is None"),
        (True, "a bool"),
        (float("nan"), "seconds since 1970"),
        (float("inf"), "seconds since 1970"),
        (1769860800_000, "divide milliseconds by 1000"),
        ([1], "a list"),
    ],
)
def test_a_bad_time_is_an_error_message_and_moves_nothing(time: Any, problem: str) -> None:
    found = run(minutes(), at(0), {"t": time}, at(59), {}, at(60))
    assert [e["err/cause"][0]["type"] for e in found["errors"]] == ["cues.errors.InvalidArgument"] * 2
    assert problem in found["errors"][0]["err/cause"][0]["message"]
    assert [m["n"] for m in found["out"]] == [2]


def test_a_time_may_be_a_function() -> None:
    found = run(minutes(time=lambda m: m["ms"] / 1000), {"ms": 0}, {"ms": 59_999}, {"ms": 60_000})
    assert [m["n"] for m in found["out"]] == [2]


@pytest.mark.parametrize("wrong", ["1 minute", "", "m", "0s", 0, -1, None, True, "1e400d", [1]])
def test_a_wrong_duration_is_refused(wrong: Any) -> None:
    with pytest.raises(GraphError, match="not a duration"):
        minutes(size=wrong)


def test_durations() -> None:
    given = ["90s", "1.5m", 90, 90.0, timedelta(seconds=90), "90000ms", "0.025h"]
    assert {event_time.duration(value, "size") for value in given} == {90_000_000}


def test_windows_before_1970_and_with_an_offset() -> None:
    found = run(minutes(size="1h", offset="30m"), {"t": -1801}, {"t": -1}, windows.watermark(None))
    half = datetime(1969, 12, 31, 23, 30, tzinfo=UTC)
    hour = timedelta(hours=1)
    assert [(m["start"], m["end"]) for m in found["out"]] == [(half - hour, half), (half, half + hour)]


# --- watermarks and late messages -----------------------------------------------------------------


def test_a_window_closes_when_the_watermark_reaches_its_end_and_once() -> None:
    assert run(minutes(delay="10s"), at(0), at(69.9))["out"] == []
    assert len(run(minutes(delay="10s"), at(0), at(70), at(200), at(0))["out"]) == 2


def test_a_late_message_is_counted_and_keeps_its_facts() -> None:
    found = run(minutes(), at(0), at(60), at(1) | {"x": 1}, at(61), at(2))
    start = NOON
    assert found["late"][0] == {
        "message": at(1) | {"x": 1},
        "time": NOON + timedelta(seconds=1),
        "watermark": NOON + timedelta(seconds=60),
        "number": 1,
        "windows": [[start, start + timedelta(minutes=1)]],
    }
    assert [m["number"] for m in found["late"]] == [1, 2]
    assert [m["n"] for m in found["out"]] == [1]


def test_a_message_that_missed_some_of_its_windows_is_in_the_others() -> None:
    stream = windows.hopping("m", "out", 40, 20, time="t", late="late", reduce={"n": count()})
    found = run(stream, {"t": 0}, {"t": 25}, {"t": 15}, windows.watermark(None))
    assert [(m["start"].timestamp(), m["n"]) for m in found["out"]] == [(-20, 1), (0, 3), (20, 1)]
    assert [[pair[0].timestamp() for pair in m["windows"]] for m in found["late"]] == [[-20]]


def test_a_session_that_ends_before_an_older_one_closes_before_it() -> None:
    stream = windows.sessions("m", "out", 6, time="t", delay=5, late="late", reduce={"n": count()})
    found = run(stream, {"t": 50}, {"t": 44}, {"t": 55.5}, {"t": 49})
    assert [(m["start"].timestamp(), m["end"].timestamp()) for m in found["out"]] == [(44, 50)]
    assert not found["late"]


def test_a_watermark_message_closes_windows_and_is_in_none() -> None:
    found = run(minutes(delay="10s"), at(0), windows.watermark(at(60)["t"]), at(59), at(61), windows.watermark(None))
    assert [m["n"] for m in found["out"]] == [1, 1] and len(found["late"]) == 1
    with pytest.raises(InvalidArgument):
        windows.watermark("noon")


def test_after_the_end_of_its_input_every_message_is_late() -> None:
    assert len(run(minutes(), windows.watermark(None), at(0))["late"]) == 1


def two(stream: cues.Stream, *given: tuple[str, Message]) -> tuple[list[Message], list[Message]]:
    """The results and late messages after messages of two queues in this order."""
    graph = cues.Graph("g")
    graph.source("a")
    graph.source("b")
    graph.add(stream)
    with testing.temporary_store() as store:
        for queue, message in given:
            store.queue(queue).appender().write(message)
            testing.run_until_idle(graph, store)
        late = testing.messages(store, "late")
        return testing.messages(store, "out"), late


def both(**options: Any) -> cues.Stream:
    return windows.tumbling(
        cues.AnyOf("a", "b"), "out", 10, **{"time": "t", "late": "late", "reduce": {"n": count()}, **options}
    )


def test_the_slowest_input_holds_the_watermark() -> None:
    given = [("a", {"t": 0}), ("a", {"t": 50}), ("b", {"t": 5}), ("b", {"t": 9})]
    assert two(both(), *given)[0] == []
    results, late = two(both(), *given, ("b", {"t": 10}), ("b", {"t": 3}))
    assert [m["n"] for m in results] == [3]
    assert [m["input"] for m in late] == ["b"]


def test_delay_and_time_by_input() -> None:
    stream = both(delay={"a": 0, "b": 20}, time={"a": "t", "b": lambda m: m["u"]})
    assert two(stream, ("a", {"t": 10}), ("b", {"u": 29}))[0] == []
    assert [m["start"].timestamp() for m in two(stream, ("a", {"t": 10}), ("b", {"u": 4}), ("b", {"u": 30}))[0]] == [0]
    for wrong in ({"a": 0}, {"a": 0, "c": 1}):
        with pytest.raises(GraphError, match="the inputs are 'a', 'b'"):
            both(delay=wrong)


def test_a_row_of_an_older_version_is_understood() -> None:
    def results(older: bool) -> list[list[Message]]:
        def rewritten(message: Message, process: cues.Process) -> None:
            head = process.state[event_time.HEAD]
            if older and isinstance(head, tuple):
                watermark, due, number, lates, wake, name, top = head
                process.state[event_time.HEAD] = [{name or "": top}, watermark, due, number, lates, wake]

        with testing.temporary_store() as store:
            for stream in (minutes(delay="10s"), cues.Stream(rewritten, "m", "out", id="out"), minutes(delay="10s")):
                graph = cues.Graph("g")
                graph.source("m")
                graph.add(stream)
                store.queue("m").appender().write_many([at(30), at(105), at(0)])
                testing.run_until_idle(graph, store)
            return [testing.messages(store, queue) for queue in ("out", "late")]

    assert results(older=True) == results(older=False)
    assert all(results(older=True))


class Idling:
    """A graph of two inputs with ``idle``, under a clock that the test sets."""

    def __init__(self, store: cues.Store, clock: testing.Clock, stream: cues.Stream) -> None:
        self.store, self.clock, self.stream = store, clock, stream

    def run(self) -> list[float]:
        """Run until nothing is due; return the starts of all windows that have closed."""
        graph = cues.Graph("g")
        graph.source("a")
        graph.source("b")
        graph.add(self.stream)
        testing.run_until_idle(graph, self.store)
        return [m["start"].timestamp() for m in testing.messages(self.store, "out")]

    def take(self, queue: str, time: float, later: float = 0) -> list[float]:
        self.clock.advance(later)
        self.store.queue(queue).appender().write({"t": time})
        return self.run()

    def wait(self, seconds: float) -> list[float]:
        self.clock.advance(seconds)
        return self.run()


def test_a_silent_input_does_not_hold_the_watermark() -> None:
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        it = Idling(store, clock, both(idle="30s"))
        assert it.take("a", 0) == []
        assert it.take("a", 20, later=29) == []  # b holds it still
        assert it.wait(1) == [0]  # by the timer, without a message
        assert it.take("b", 3) == [0]  # b is late
        assert [m["input"] for m in testing.messages(store, "late")] == ["b"]
        assert it.take("a", 5) == [0]  # the watermark does not go back
        assert len(testing.messages(store, "late")) == 2
        assert it.take("a", 40, later=20) == [0]  # b has spoken
        assert it.take("a", 40, later=10) == [0, 20]  # silent again, without a new time


def test_when_all_inputs_are_silent_event_time_follows_the_clock() -> None:
    stream = windows.tumbling(
        "a", "out", 10, time="t", delay=5, late="late", idle="30s", reduce={"n": count()}
    )  # fmt: skip
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        it = Idling(store, clock, stream)
        assert it.take("a", 100) == []
        assert it.take("a", 200, later=1) == [100]
        assert it.wait(14) == [100]
        assert it.wait(15) == [100]  # 29 seconds of silence
        assert it.wait(1) == [100, 200]  # 200 - 5 + 30 is after 210
        assert it.take("a", 205, later=1000) == [100, 200]
        assert [m["message"]["t"] for m in testing.messages(store, "late")] == [205]
        assert it.take("a", 300) == [100, 200]
        it.stream = windows.tumbling(
            "a", "out", "1h", time="t", delay=5, late="late", idle="30s", reduce={"n": count()}
        )


def test_a_window_that_is_longer_than_the_silence_closes_at_its_time() -> None:
    stream = windows.tumbling(
        "a", "out", "1h", time="t", late="late", idle="30s", reduce={"n": count()}
    )  # fmt: skip
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        it = Idling(store, clock, stream)
        it.take("a", NOON.timestamp() + 60)
        assert it.wait(30) == []
        assert it.wait(3600 - 60 - 31) == []
        assert it.wait(1) == [NOON.timestamp()]
        assert testing.state(store, "g.out")[0][4] is None  # no timer without an open window


def test_a_timer_that_failed_for_good_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        options: Any = {"time": "t", "late": "late", "reduce": {"n": count()}}
        it = Idling(store, clock, windows.tumbling("a", "out", 10, idle="30s", errors="bad", **options))
        it.take("a", 0)
        with monkeypatch.context() as broken:
            broken.setattr(event_time.EventTime, "_advance", lambda *given: 1 / 0)
            assert it.wait(30) == []
        assert len(testing.messages(store, "bad")) == 1
        assert it.wait(100) == []
        assert it.take("a", 1) == []
        assert it.wait(30) == [0]


def test_after_a_start_an_input_is_silent_only_when_this_process_has_waited_for_it() -> None:
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        it = Idling(store, clock, both(idle="30s"))
        it.take("a", 0)
        it.take("b", 1)
        it.stream = both(idle="30s")  # as in another process
        assert it.wait(1000) == []
        assert it.take("a", 20) == []
        assert it.take("b", 2) == [] and not testing.messages(store, "late")
        assert it.wait(29) == []
        assert it.wait(1) == [0, 20]


def single(**options: Any) -> cues.Stream:
    given = {"time": "t", "delay": 5, "late": "late", "idle": "30s", "reduce": {"n": count()}}
    return windows.tumbling("a", "out", 10, **given | options)


def test_an_input_on_which_messages_wait_is_not_silent() -> None:
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        it = Idling(store, clock, single())
        it.take("a", 100)
        store.queue("a").appender().write_many([{"t": t} for t in range(101, 120)])  # while the process was paused
        assert it.wait(50) == [100]
        assert not testing.messages(store, "late")
        assert it.wait(30) == [100, 110]


def test_an_input_with_messages_that_wait_holds_the_watermark_of_another() -> None:
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        it = Idling(store, clock, both(idle="30s"))
        it.take("a", 0)
        it.take("b", 1)
        for t in (2, 3):
            store.queue("b").appender().write({"t": t})
        assert it.take("a", 50, later=40) == []
        assert not testing.messages(store, "late")


def test_time_in_which_the_process_did_not_run_is_not_silence() -> None:
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        it = Idling(store, clock, single())
        it.take("a", 100)
        it.wait(1000)  # the timer was due after 30 s, so nobody was there to hear
        it.take("a", 130)
        assert not testing.messages(store, "late")
        it.take("a", 140, later=1000)
        assert not testing.messages(store, "late")


def test_an_ended_input_does_not_count_when_the_others_are_silent() -> None:
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        it = Idling(store, clock, both(idle="30s"))
        it.take("a", 0)
        it.take("b", 0)
        store.queue("a").appender().write(windows.watermark(None))
        for _ in range(40):
            it.wait(1)
        for second in range(40, 60):
            it.take("b", second, later=1)
        assert not testing.messages(store, "late")
        store.queue("b").appender().write_many([windows.watermark(None)] * 2)
        it.run()
        assert builtins.sum(m["n"] for m in testing.messages(store, "out")) == 22
        it.take("b", 90)
        assert [m["message"]["t"] for m in testing.messages(store, "late")] == [90]


def test_a_silent_input_is_not_awaited_by_one_that_has_ended() -> None:
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        it = Idling(store, clock, both(idle="30s"))
        it.take("a", 0)
        store.queue("a").appender().write(windows.watermark(None))
        assert it.run() == []
        assert it.wait(30) == [0]  # b has never spoken, and does not hold the last window of a
        it.take("b", 41, later=11)
        assert not testing.messages(store, "late")


def test_idle_heals_after_a_clock_that_was_ahead() -> None:
    with testing.Clock(NOON + timedelta(days=1)) as clock, testing.temporary_store() as store:
        it = Idling(store, clock, both(idle="30s"))
        it.take("b", 0)
        clock.set(NOON)
        it.take("a", 0)
        assert it.take("a", 50, later=29) == []
        assert it.wait(1) == [0]  # b is silent since the clock is right


def test_a_counted_window_after_the_end_closes_at_once() -> None:
    stream = windows.counted("a", "out", 10, time="t", within="1m", reduce={"n": count()})
    with testing.temporary_store() as store:
        for messages in ([at(0), at(1), windows.watermark(None)], [at(100), at(101)]):
            graph = cues.Graph("g", [cues.Source("a"), stream])
            store.queue("a").appender().write_many(messages)
            testing.run_until_idle(graph, store)
        assert [m["n"] for m in testing.messages(store, "out")] == [2, 1, 1]
        assert len(testing.state(store, "g.out")) == 1  # the head


@pytest.mark.slow
def test_a_crash_anywhere_does_not_change_what_closes_in_silence() -> None:
    def run(store: cues.Store, start: datetime = NOON) -> None:
        with testing.Clock(start) as clock:
            it = Idling(store, clock, both(idle="30s"))
            for _ in range(3):
                it.wait(40)

    given = {"a": [{"t": 1}, {"t": 12}], "b": [{"t": 3}]}

    def filled() -> Any:
        stack = contextlib.ExitStack()
        store = stack.enter_context(testing.temporary_store())
        for queue, some in given.items():
            store.queue(queue).appender().write_many(some)
        return stack, store

    stack, store = filled()
    with stack:
        sites = testing.crash_sites(lambda: run(store))
        assert testing.messages(store, "out")[0]["n"] == 2
    assert {"timer.moving", "timer.moved", "timer.inside"} <= {point for point, _ in sites}
    for point, hit in sites:
        stack, store = filled()
        with stack:
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                run(store)
            run(store, NOON + timedelta(hours=1))
            assert [m["n"] for m in testing.messages(store, "out")] == [2, 1], (point, hit)
            assert not testing.messages(store, "late")


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_of_several_fields_is_in_the_result() -> None:
    found = run(minutes(key=["a", "b"]), at(0) | {"a": 1, "b": "x"}, at(1) | {"a": 1}, windows.watermark(None))
    assert [(m["a"], m["b"], m["n"]) for m in found["out"]] == [(1, "x", 1)]
    assert "which is its key" in found["errors"][0]["err/cause"][0]["message"]


def test_a_key_by_a_function_is_called_key() -> None:
    keys = [["x", 1], {"y": 2, "x": 1}, "k" * 300, None, 7, (1, 2)]
    given = [at(0) | {"k": key} for key in keys for _ in range(2)]
    found = run(minutes(key=lambda m: m["k"]), *given, windows.watermark(None))
    assert sorted((repr(m["key"]), m["n"]) for m in found["out"]) == sorted((repr(key), 2) for key in keys)


def test_every_partition_has_its_own_windows() -> None:
    graph = cues.Graph("g", queues={"m": cues.QueueOptions(partitions=3, key="k"), "out": cues.QueueOptions()})
    graph.source("m")
    graph.add(minutes(key="k"))
    given = [at(n) | {"k": f"k{n % 7}"} for n in range(60)]
    with testing.temporary_store() as store:
        testing.run_until_idle(graph, store)
        store.queue("m").appender().write_many(given)
        for n in range(7):
            store.queue("m").appender().write(at(120) | {"k": f"k{n}"})
        testing.run_until_idle(graph, store)
        found = testing.messages(store, "out")
    assert sorted((m["k"], m["n"]) for m in found) == sorted((f"k{n}", len(range(n, 60, 7))) for n in range(7))


# --- state ----------------------------------------------------------------------------------------


def sizes(stream: cues.Stream, given: list[Message]) -> list[int]:
    """The number of rows of state after each hundred messages."""
    graph = cues.Graph("g")
    graph.source("m")
    graph.add(stream)
    rows = []
    with testing.temporary_store() as store:
        for place in range(0, len(given), 100):
            store.queue("m").appender().write_many(given[place : place + 100])
            testing.run_until_idle(graph, store)
            rows.append(len(testing.state(store, "g.out")))
    return rows


N: Any = {"time": "t", "key": "k", "delay": 5, "reduce": {"n": count()}}


@pytest.mark.parametrize(
    ("make", "bound"),
    [
        (lambda: minutes(size=10, key="k", delay=5), 5 * 3 + 1),
        (lambda: windows.hopping("m", "out", 10, 2, late="late", **N), 5 * 9),
        (lambda: windows.sessions("m", "out", 4, late="late", **N), 5 * 2 + 1),
        (lambda: windows.counted("m", "out", 9, within=10, **N), 5 * 2 + 1),
    ],
)
def test_rows_of_state_are_as_many_as_the_page_says(make: Callable[[], cues.Stream], bound: int) -> None:
    """Keys come and go: 5 keys are active in each span of 10 seconds."""
    given = [{"t": n / 10, "k": n // 100 * 5 + n % 5} for n in range(1000)]
    found = sizes(make(), given)
    assert 1 < builtin_max(found) <= 2 * bound  # the keys of two spans, while the watermark is between them
    assert found[-1] <= 2 * bound


def builtin_max(values: list[int]) -> int:
    return sorted(values)[-1]


def test_a_reducer_that_is_added_begins_in_the_open_windows() -> None:
    with testing.temporary_store() as store:
        store.queue("m").appender().write(at(0))
        for reduce in ({"n": count()}, {"n": count(), "more": count()}):
            graph = cues.Graph("g")
            graph.source("m")
            graph.add(minutes(reduce=reduce))
            testing.run_until_idle(graph, store)
            store.queue("m").appender().write(at(1))
        store.queue("m").appender().write(at(60))
        testing.run_until_idle(graph, store)
        assert [(m["n"], m["more"]) for m in testing.messages(store, "out")] == [(3, 2)]


# --- reducers -------------------------------------------------------------------------------------


def reduce_of(reducer: reducers.Reducer, values: list[Any], parts: int = 1) -> Any:
    """The result over values, whose states are merged from ``parts`` ones and packed after each message."""
    states = []
    for part in range(parts):
        state = reducer.start()
        for value in values[part::parts]:
            state = codec.unpack(codec.pack({"s": reducer.add(state, {"v": value})}))["s"]
        states.append(state)
    merged = states[0]
    for state in states[1:]:
        merged = reducer.merge(merged, state)
    return reducer.result(merged)


@pytest.mark.parametrize("parts", [1, 3])
def test_reducers_of_parts_are_those_of_the_whole(parts: int) -> None:
    values = [3, None, 1, 4, 1, 5, 9, 2, None, 6]
    assert reduce_of(count(), values, parts) == 10
    assert reduce_of(count("v"), values, parts) == 8
    assert reduce_of(sum("v"), values, parts) == 31
    assert reduce_of(mean("v"), values, parts) == 31 / 8
    assert (reduce_of(min("v"), values, parts), reduce_of(max("v"), values, parts)) == (1, 9)
    assert reduce_of(quantiles("v", at=(0, 0.5, 1)), values, parts) == [1, 3.5, 9]
    assert reduce_of(distinct("v"), values, parts) == 7
    assert reduce_of(top("v", 2), values, parts) == [[1, 2], [2, 1]]


def test_windows_without_values() -> None:
    made = {"s": sum("v"), "m": mean("v"), "l": min("v"), "q": quantiles("v"), "d": distinct("v"), "t": top("v")}
    found = run(minutes(reduce=made), at(0), windows.watermark(None))["out"]
    assert [found[0][name] for name in "smlqdt"] == [None, None, None, None, 0, []]


def test_sums_of_decimals_and_extremes_of_texts_and_times() -> None:
    assert reduce_of(sum("v"), [Decimal("0.1")] * 3) == Decimal("0.3")
    assert reduce_of(max("v"), ["a", "c", "b"]) == "c"
    assert reduce_of(min("v"), [NOON, NOON - timedelta(1)]) == NOON - timedelta(1)


@pytest.mark.parametrize(
    ("made", "value"),
    [(sum("v"), float("nan")), (mean("v"), "x"), (quantiles("v"), [1]), (max("v"), float("nan")), (min("v"), "x")],
)
def test_a_value_that_does_not_fit_is_an_error_message(made: reducers.Reducer, value: Any) -> None:
    found = run(minutes(reduce={"r": made}), at(0) | {"v": 1}, at(1) | {"v": value}, at(60))
    assert len(found["errors"]) == 1
    assert found["out"][0]["r"] in (1, 1.0, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("swapped", [False, True])
def test_a_result_of_infinities_is_one_or_none_with_a_reason_and_never_nan(swapped: bool) -> None:
    signs = [float("inf"), float("-inf")]
    both = signs[::-1] if swapped else signs
    made = {"s": sum("v"), "m": mean("v"), "q": quantiles("v", at=(0.5,)), "l": min("v")}
    found = run(minutes(reduce=made), at(0) | {"v": both[0]}, at(1) | {"v": both[1]}, at(60))
    assert not found["errors"]
    assert [found["out"][0][name] for name in "smql"] == [None, None, None, float("-inf")]
    assert set(found["out"][0]["errors"]) == {"s", "m", "q"}
    for values, middle in (
        ([1, float("inf")], float("inf")),
        ([1, float("-inf")], float("-inf")),
        (signs[:1] * 2, signs[0]),
    ):
        assert reduce_of(quantiles("v", at=(0.5,)), values) == [middle]


@pytest.mark.parametrize("parts", [1, 4])
def test_sketches(parts: int) -> None:
    chance = random.Random(parts)
    values = [round(chance.gauss(0, 100), 3) for _ in range(4_000)]
    ordered = sorted(values)
    for q, value in zip((0.01, 0.5, 0.99), reduce_of(quantiles("v", at=(0.01, 0.5, 0.99)), values, parts)):
        assert abs(len([v for v in ordered if v < value]) / len(values) - q) < 0.02
    found = reduce_of(distinct("v"), values, parts)
    assert abs(found - len(set(values))) < 4 * 0.016 * len(set(values))
    assert reduce_of(distinct("v", exact=None), values, parts) == len(set(values))
    assert len(codec.pack(reduce_of_state(quantiles("v"), values))) < 6_000
    assert len(codec.pack(reduce_of_state(distinct("v"), values))) < 5_000


def reduce_of_state(reducer: reducers.Reducer, values: list[Any]) -> Any:
    state = reducer.start()
    for value in values:
        state = reducer.add(state, {"v": value})
    return state


@pytest.mark.parametrize("parts", [1, 3])
def test_top_beyond_its_capacity_is_within_its_bound(parts: int) -> None:
    chance = random.Random(parts)
    values = [int(chance.paretovariate(0.6)) for _ in range(3_000)]
    found = reduce_of(top("v", 5, capacity=50), values, parts)
    for value, counted in found:
        assert values.count(value) <= counted <= values.count(value) + parts * len(values) / 50
    frequent = {v for v in set(values) if values.count(v) > 2 * parts * len(values) / 50}
    assert frequent and frequent <= {value for value, _ in reduce_of(top("v", 50, capacity=50), values, parts)}


def test_a_result_that_raises_does_not_hold_up_the_window() -> None:
    broken = reducer(lambda: 0, lambda state, _: state + 1, result=lambda state: 1 / 0)
    odd = reducer(lambda: 0, lambda state, _: state + 1, result=lambda state: object())
    found = run(minutes(reduce={"n": count(), "bad": broken, "odd": odd}), at(0), at(60), at(61))
    assert (found["out"][0]["n"], found["out"][0]["bad"], found["out"][0]["odd"]) == (1, None, None)
    assert found["out"][0]["errors"]["bad"] == "ZeroDivisionError: division by zero"
    assert "object" in found["out"][0]["errors"]["odd"] and not found["errors"]


def test_reducers_need_the_extra_only_for_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasketches", None)
    assert reduce_of(quantiles("v", exact=None), [1, 2, 3]) == [2.0, 2.8, 2.98]
    for make in (lambda: quantiles("v"), lambda: distinct("v")):
        with pytest.raises(GraphError, match=r"cues-streams\[windows\]"):
            make()


# --- joins ----------------------------------------------------------------------------------------

AB = {"a": "a", "b": "b"}


def test_an_as_of_join_takes_the_last_change_of_a_moment() -> None:
    stream = joins.as_of(AB, "out", key="k", time="t", late="late", how="left")
    given = [("b", {"k": 1, "t": 5, "v": n}) for n in (1, 2)] + [("a", {"k": 1, "t": 5}), ("a", {"k": 2, "t": 5})]
    found, late = two(stream, *given, ("a", {"k": 1, "t": 9}), ("b", {"k": 3, "t": 9}))
    assert [m["b"] and m["b"]["v"] for m in found] == [2, None] and not late


@pytest.mark.parametrize(
    ("result", "problem"),
    [(lambda: 1 / 0, "ZeroDivisionError"), (lambda: 7, "returned int"), (lambda: {"x": object()}, "CodecError"),
     (lambda: {"q/secret": 1}, "reserved")],
)  # fmt: skip
def test_a_combination_that_fails_does_not_hold_up_the_join(result: Callable[[], Any], problem: str) -> None:
    """The messages have waited: the call in which they are complete is that of another message."""
    combine = lambda a, b: result() if a["k"] == 1 else {"k": a["k"]}  # noqa: E731
    given = [("b", {"k": 0, "t": 0}), ("a", {"k": 1, "t": 1}), ("a", {"k": 2, "t": 2}), ("a", {"k": 9, "t": 9})]
    for stream in (
        joins.as_of(AB, "out", key="k", time="t", late="late", how="left", combine=combine),
        joins.interval(AB, "out", key="k", time="t", late="late", how="left", combine=combine),
    ):
        found, _ = two(stream, *given, ("b", {"k": 9, "t": 9}), ("a", {"k": 3, "t": 9.5}))
        (failed,) = [message for message in found if "errors" in message]
        assert problem in failed.pop("errors")["combine"]
        assert failed == {"a": {"k": 1, "t": 1}, "b": None} and {"k": 2} in found


def test_a_partner_at_the_watermark_is_not_late() -> None:
    stream = joins.interval(AB, "out", key="k", time="t", late="late", after=5, how="left")
    given = [("a", {"k": 1, "t": 0}), ("a", {"k": 2, "t": 5}), ("b", {"k": 2, "t": 5}), ("b", {"k": 1, "t": 5})]
    found, late = two(stream, *given)
    assert [(m["a"]["k"], m["b"]["k"]) for m in found] == [(2, 2), (1, 1)] and not late


def test_a_join_with_a_key_for_each_input_and_a_combination() -> None:
    stream = joins.interval(
        AB, "out", key={"a": "id", "b": lambda m: m["order"]}, time="t", late="late", after=10,
        combine=lambda a, b: None if b["t"] == 3 else {"id": a["id"], "sum": a["v"] + b["v"]},
    )  # fmt: skip
    given = [
        ("a", {"id": 1, "t": 0, "v": 1}),
        ("b", {"order": 1, "t": 3, "v": 2}),
        ("b", {"order": 1, "t": 10, "v": 3}),
    ]
    assert two(stream, *given)[0] == [{"id": 1, "sum": 4}]


def test_a_message_without_a_key_has_no_partner() -> None:
    graph = cues.Graph("g", errors="errors")
    graph.source("a")
    graph.source("b")
    graph.add(joins.lookup(AB, "out", key=lambda m: m.get("k"), how="left"))
    with testing.temporary_store() as store:
        store.queue("b").appender().write_many([{"x": 1}, {"k": 1}, windows.watermark(None)])
        testing.run_until_idle(graph, store)
        store.queue("a").appender().write_many([{"x": 2}, {"k": 1}, {"k": 2}, windows.watermark(None)])
        testing.run_until_idle(graph, store)
        assert [m["b"] for m in testing.messages(store, "out")] == [{"k": 1}, None]
        problems = [m["err/cause"][0]["message"] for m in testing.messages(store, "errors")]
        assert len(problems) == 2 and all("has no partner" in problem for problem in problems)


def test_state_of_joins_is_bounded() -> None:
    for stream in (
        joins.interval(AB, "out", key="k", time="t", late="late", before=5, after=5),
        joins.as_of(AB, "out", key="k", time="t", late="late", tolerance=5),
    ):
        graph = cues.Graph("g")
        graph.source("a")
        graph.source("b")
        graph.add(stream)
        rows = []
        with testing.temporary_store() as store:
            for n in range(0, 300, 50):
                for queue in ("a", "b"):
                    given = [{"k": time, "t": time} for time in range(n, n + 50)]
                    store.queue(queue).appender().write_many(given)
                testing.run_until_idle(graph, store)
                rows.append(len(testing.state(store, "g.out")))
            assert len(testing.messages(store, "out")) >= 298
        assert rows[0] > 2 and sorted(rows)[-1] == rows[0], rows


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: minutes(late="out"), "would both be on the queue 'out'"),
        (lambda: minutes(reduce={}), "not a dict of reducers"),
        (lambda: minutes(reduce={"n": 7}), "not a dict of reducers"),
        (lambda: minutes(reduce={"n": sum}), "was not called"),
        (lambda: minutes(reduce={"start": count()}), "a field of that name"),
        (lambda: minutes(key="n"), "a field of that name"),
        (lambda: minutes(reduce={"q/n": count()}), "does not begin with"),
        (lambda: minutes(key=[1]), "not a list of names"),
        (lambda: minutes(time=7), "names no field"),
        (lambda: minutes(concurrency=4), "takes no option 'concurrency'"),
        (lambda: minutes(batch=True), "takes no option 'batch'"),
        (lambda: minutes(retrys=4), "has no option 'retrys'"),
        (lambda: windows.tumbling({"a": "b"}, "o", 1, time="t", late="l", reduce={"n": count()}), "inputs of a window"),
        (lambda: windows.hopping("m", "o", 10, 11, time="t", late="l", reduce={"n": count()}), "would be in none"),
        (lambda: windows.sessions("m", "o", 10, time="t", late="l", reduce={"n": reducer(int, int)}), "has no merge="),
        (lambda: windows.counted("m", "o", 0, reduce={"n": count()}), "not a number of messages"),
        (lambda: windows.counted("m", "o", 2, reduce={"n": count()}, within=4), "needs event time"),
        (lambda: joins.lookup({"a": "b"}, "o", key="k"), "has two inputs"),
        (lambda: joins.lookup(AB, "o", key=None), "key=None"),
        (lambda: joins.lookup(AB, "o", key={"a": "k"}), "key= has values for 'a'"),
        (lambda: joins.lookup(AB, "o", key="k", how="full"), "not a form of this join"),  # type: ignore[arg-type]
        (lambda: joins.lookup(AB, "o", key="k", combine=7), "cannot be called"),  # type: ignore[arg-type]
        (lambda: joins.interval(AB, "o", key="k", time="t", late="l", before=-1), "not a duration"),
        (lambda: quantiles("v", at=(2,)), "are not quantiles"),
        (lambda: quantiles("v", exact=-1), "not a number of values"),
        (lambda: top("v", 0), "not a number of values"),
        (lambda: top("v", 5, capacity=4), "less than k=5"),
        (lambda: reducer(1, 2), "cannot be called"),  # type: ignore[arg-type]
        (lambda: stddev("v", 2), "neither 0 nor 1"),
        (lambda: collect("v", 0), "not a number of values"),
        (lambda: windows.sessions("m", "o", 5, time="t", late="l", reduce={"n": first("v")}), "has no merge="),
        (lambda: sum(7), "names no field"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused_when_they_are_declared(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(GraphError, match=problem) as raised:
        make()
    assert "Try:" in str(raised.value)


def test_a_window_of_a_running_graph_closes_without_a_message() -> None:
    graph = cues.Graph("g")
    graph.source("m")
    graph.add(minutes(size="100ms", idle="200ms"))
    with testing.temporary_store() as store, graph.start(store=store) as running:
        running.send("m", at(0))
        limit = time.monotonic() + 60
        while not running.messages("out") and time.monotonic() < limit:
            time.sleep(0.01)
        assert [m["n"] for m in running.messages("out")] == [1]


def test_first_last_collected_and_spread_values() -> None:
    given = [3, None, 1.5, 4, 2]
    reduce = {
        "first": first("v"),
        "last": last("v"),
        "list": collect("v", most=3),
        "sample": stddev("v"),
        "all": stddev("v", ddof=0),
        "own": lambda messages: len(messages),
    }
    with testing.temporary_store() as store:
        graph = cues.Graph("g")
        graph.source("m")
        graph.add(windows.counted("m", "out", len(given), reduce=reduce))
        graph.add(windows.counted("m", "one", 1, reduce={"spread": stddev("v")}))
        store.queue("m").appender().write_many([{"v": value} for value in given])
        testing.run_until_idle(graph, store)
        (found,) = testing.messages(store, "out")
        assert testing.messages(store, "one")[0] == {"spread": None}
    values = [value for value in given if value is not None]
    assert (found["first"], found["last"], found["list"], found["own"]) == (3, 2, [3, 1.5, 4], 5)
    assert found["sample"] == pytest.approx(statistics.stdev(values))
    assert found["all"] == pytest.approx(statistics.pstdev(values))


def test_two_parts_of_a_spread_are_one() -> None:
    chance, spread = random.Random(seeds.new()), stddev("v")
    values = [chance.gauss(1e6, 3) for _ in range(200)]
    states = []
    for some in (values[:70], values[70:]):
        state = spread.start()
        for value in some:
            state = spread.add(state, {"v": value})
        states.append(state)
    assert spread.result(spread.merge(*states)) == pytest.approx(statistics.stdev(values))
