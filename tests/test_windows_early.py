"""Early results of windows: by the clock and at each update, in rows and in tables, under crashes, at the end."""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import random
import sqlite3
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import early_graph
import pyarrow as pa
import pytest
import seeds
from contracts_windows import DELAY_S, REDUCE, TIMED, Message, messages
from sets import bounded, thinned
from terminal import Command

import cues
from cues import testing
from cues.errors import GraphError
from cues.processors import aggregates, event_time, joins, sql_sink, vectors, windows
from cues.processors.reducers import count, sum

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
Make = Callable[..., cues.Stream]
COUNTED: Mapping[str, Any] = {name: each for name, each in TIMED.items() if name != "late"}

KINDS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "tumbling": (lambda **more: windows.tumbling("m", "out", 10, **TIMED | more), ("k", "start")),
    "hopping": (lambda **more: windows.hopping("m", "out", 10, 4, **TIMED | more), ("k", "start")),
    "sessions": (lambda **more: windows.sessions("m", "out", 6, **TIMED | more), ("k", "start")),
    "counted": (lambda **more: windows.counted("m", "out", 4, **COUNTED | more), ("number",)),
    "counted-within": (lambda **more: windows.counted("m", "out", 4, within=8, **COUNTED | more), ("number",)),
    "counted-every": (lambda **more: windows.counted("m", "out", 5, every=2, **COUNTED | more), ("number",)),
    "counted-every-within": (
        lambda **more: windows.counted("m", "out", 4, every=3, within=9, **COUNTED | more),
        ("number",),
    ),
    "aggregate": (
        lambda **more: aggregates.aggregate(
            "m", "out", by=more.pop("key", "k"), every=7, time="t", delay=DELAY_S, **more
        ),
        ("k", "end"),
    ),
}
"""Each kind of window, with the fields that name a window in its results."""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are called by column too, and few results are a table."""
    monkeypatch.setattr(vectors, "ROWS_FEW", 1)
    monkeypatch.setattr(vectors, "RESULTS_FEW", 2)


def graph_of(stream: cues.Stream, size: int = 1_000) -> cues.Graph:
    graph = cues.Graph("g", errors="errors")
    graph.source("m")
    assert stream.inputs is not None
    graph.add(
        cues.Stream(stream.fn, stream.inputs, stream.outputs, id=stream.id, batch_size=size, timer=stream.options.timer)
    )
    return graph


def minute(**options: Any) -> cues.Stream:
    return windows.tumbling("m", "out", 60, time="t", late="late", reduce={"n": count()}, **options)


def identity(kind: str, message: Message) -> tuple[Any, ...]:
    return tuple(message[name] for name in KINDS[kind][1])


def played(
    make: Callable[[], cues.Stream], parts: list[list[Message]], size: int, tables: bool, wait_s: float = 10
) -> tuple[list[list[Message]], dict[Any, Any], list[Message]]:
    """Run once for each part, with a pause after it; return the results of each, the last state, and late messages."""
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        found = []
        for part in parts:
            appender = store.queue("m").appender()
            if tables and part:
                appender.write_table(pa.Table.from_pylist(part))
            else:
                appender.write_many(part)
            before = len(testing.messages(store, "out")) if "out" in store.queues() else 0
            testing.run_until_idle(graph_of(make(), size), store)
            clock.advance(wait_s)
            testing.run_until_idle(graph_of(make(), size), store)
            found.append(testing.messages(store, "out")[before:])
        late = testing.messages(store, "late") if "late" in store.queues() else []
        assert not testing.messages(store, "errors")
        return found, dict(testing.state(store, "g.out")), late


def wanted(kind: str, updates: list[list[Message]]) -> list[list[str]]:
    """The results by the clock, of those at each update: in each part the last one of a window that is still open."""
    told: set[Any] = set()
    parts = []
    for part in updates:
        seen, open = [], {}
        for message in part:
            name = identity(kind, message)
            if message["final"]:
                open.pop(name, None)
                seen.append(message)
            elif message.get("withdrawn"):
                open.pop(name, None)
                if name in told:
                    seen.append(message)
            else:
                open[name] = message
        told |= set(open)
        parts.append(sorted(map(repr, [*seen, *open.values()])))
    return parts


def cut(rows: list[Message], dice: random.Random) -> list[list[Message]]:
    """The rows in parts; the last one is empty."""
    bounds = sorted({0, len(rows), *(dice.randrange(len(rows)) for _ in range(4))})
    return [*(rows[low:high] for low, high in itertools.pairwise(bounds)), []]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds.among(range(24), fast=1))
def test_by_the_clock_are_the_last_updates_of_open_windows_in_rows_and_in_tables(kind: str, seed: int) -> None:
    dice = random.Random(f"{kind} {seed}")
    (rows,) = messages(seed, 40 if seed < 3 else 120, ("m",), disorder=dice.choice([4, 12])).values()
    parts = cut(rows, dice)
    make, names = KINDS[kind]
    updates, _, late_updates = played(functools.partial(make, reduce=REDUCE, early="update"), parts, 1_000, False)
    expected = wanted(kind, updates)
    timed = functools.partial(make, reduce=REDUCE, early="10s")
    sides = [played(timed, parts, dice.choice([1, 3, 1_000]), tables) for tables in (False, True)]
    utc = "zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc"
    for found, state, late in sides:
        assert [sorted(repr(message).replace(*utc) for message in part) for part in found] == expected
        assert state == sides[0][1] and late == late_updates
        assert not any(isinstance(row, bytes) and row[:1] == b"e" for row in state) and event_time.TIMER not in state
    plain, _, late = played(functools.partial(make, reduce=REDUCE), parts, 7, True)
    marks = {"final", "withdrawn"} | ({"number"} if "number" in names else set())
    finals = [
        {name: each for name, each in message.items() if name not in marks}
        for part in updates
        for message in part
        if message["final"]
    ]
    assert finals == [message for part in plain for message in part] and late == late_updates
    assert any(not message["final"] for part in sides[1][0] for message in part) or len(rows) < 50


@pytest.mark.parametrize("kind", KINDS)
def test_a_final_result_is_the_last_one_of_its_window_and_what_replaced_it_is_withdrawn(kind: str) -> None:
    """A table that keeps the last row of each window, as an upsert does, has the final results and no others."""
    for early in ("update", "10s"):
        with testing.Clock(NOON) as clock, testing.temporary_store() as store:
            (rows,) = messages(seeds.new(), 90, ("m",), disorder=12).values()
            for at in range(0, len(rows), 9):
                store.queue("m").appender().write_many(rows[at : at + 9])
                testing.run_until_idle(graph_of(KINDS[kind][0](reduce=REDUCE, early=early)), store)
                clock.advance(11)
            testing.run_until_idle(graph_of(KINDS[kind][0](reduce=REDUCE, early=early)), store, close_open=True)
            found = testing.messages(store, "out")
            clock.advance(1_000)
            testing.run_until_idle(graph_of(KINDS[kind][0](reduce=REDUCE, early=early)), store)
            assert testing.messages(store, "out") == found
        table: dict[Any, Message] = {}
        ended: set[Any] = set()
        for message in found:
            name = identity(kind, message)
            assert name not in ended
            if message.get("withdrawn"):
                del table[name]
                continue
            table[name] = message
            if message["final"]:
                ended.add(name)
        finals = [message for message in found if message["final"]]
        assert len(ended) == len(finals) and len(found) > len(finals) > 5
        open = [message for message in table.values() if not message["final"]]
        assert not open or kind in ("counted", "counted-every")  # those end by their number alone


def test_results_come_at_most_so_often_and_only_of_what_has_changed() -> None:
    stream = functools.partial(minute, early="10s", key="k")
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:

        def take(*rows: tuple[str, float], later: float = 0) -> list[tuple[str, int]]:
            clock.advance(later)
            before = testing.messages(store, "out") if "out" in store.queues() else []
            store.queue("m").appender().write_many([{"k": k, "t": t} for k, t in rows])
            testing.run_until_idle(graph_of(stream()), store)
            return [(m["k"], m["n"]) for m in testing.messages(store, "out")[len(before) :]]

        assert take(("a", 1), ("b", 2)) == []
        assert take(("a", 3), later=9) == []
        assert sorted(take(later=1)) == [("a", 2), ("b", 1)]
        assert take(later=100) == []
        assert take(("b", 5)) == [] and take(later=9.9) == []
        assert take(later=0.1) == [("b", 2)]
        assert sorted(take(("b", 70))) == [("a", 2), ("b", 2)]
        assert take(later=10) == [("b", 1)]


def test_more_windows_than_a_call_writes_are_written_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_time, "_EARLY_MOST", 7)
    make = functools.partial(minute, early="1s", key="k")
    rows = [{"k": f"k{n}", "t": n % 50} for n in range(40)]
    found, state, _ = played(make, [rows, []], 1_000, True)
    assert sorted(m["k"] for m in found[0]) == sorted(m["k"] for m in rows) and not found[1]
    assert event_time.TIMER not in state


def test_a_timer_that_failed_for_good_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make = functools.partial(minute, early="10s")
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        store.queue("m").appender().write({"t": 1})
        testing.run_until_idle(graph_of(make()), store)
        clock.advance(10)
        with monkeypatch.context() as broken:
            broken.setattr(event_time.EventTime, "_tick_early", lambda *given: 1 / 0)
            testing.run_until_idle(graph_of(make()), store)
        assert len(testing.messages(store, "errors")) == 1
        clock.advance(30)
        store.queue("m").appender().write({"t": 2})
        testing.run_until_idle(graph_of(make()), store)
        clock.advance(10)
        testing.run_until_idle(graph_of(make()), store)
        assert [m["n"] for m in testing.messages(store, "out")] == [2]


@pytest.mark.slow
def test_early_may_be_given_and_taken_away_between_runs() -> None:
    """Windows that were begun without it have early results; what was noted for it harms no later run."""
    options = [None, "10s", "update", None, "10s"]
    for kind, (make, _) in KINDS.items():
        (rows,) = messages(5, 50, ("m",)).values()
        with testing.Clock(NOON) as clock, testing.temporary_store() as store:
            for at, early in zip(range(0, 50, 10), options):
                given = {} if early is None else {"early": early}
                store.queue("m").appender().write_many(rows[at : at + 10])
                testing.run_until_idle(graph_of(make(reduce=REDUCE, **given)), store)
                clock.advance(20)
                testing.run_until_idle(graph_of(make(reduce=REDUCE, **given)), store)
            found = testing.messages(store, "out")
            assert not testing.messages(store, "errors")
        finals = [message for message in found if message.get("final", True)]
        plain, _, _ = played(functools.partial(make, reduce=REDUCE), [rows], 1_000, False)
        assert [m["all"] for m in finals] == [m["all"] for m in plain[0]], kind
        assert len(found) > len(finals)


# --- crashes --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_anywhere_changes_no_result(kind: str, tables: bool, stride: int) -> None:
    (rows,) = messages(3, 14, ("m",), disorder=20).values()
    crashes(kind, [rows[:6], rows[6:9], rows[9:], []], tables, stride=stride)


@pytest.mark.slow
def test_a_crash_at_a_timer_changes_no_result() -> None:
    parts = [[{"t": t, "k": "a", "v": t, "i": t} for t in some] for some in ((0, 16), (3, 31))]
    crashes("tumbling", parts, True, ("timer.",))


def crashes(
    kind: str, parts: list[list[Message]], tables: bool, points: tuple[str, ...] = ("",), stride: int = 1
) -> None:
    """The clock stands still in a run, so early results do not depend on the time that a restart takes."""

    def run(store: cues.Store) -> None:
        with testing.Clock(NOON) as clock:
            for number, part in enumerate(parts):
                if store.queue("m").last_index <= len([row for some in parts[:number] for row in some]):
                    if tables and part:
                        store.queue("m").appender().write_table(pa.Table.from_pylist(part))
                    elif part:
                        store.queue("m").appender().write_many(part)
                for wait_s in (0, 10):
                    clock.advance(wait_s)
                    testing.run_until_idle(graph_of(KINDS[kind][0](reduce=REDUCE, early="10s"), 3), store)

    def results(store: cues.Store) -> Any:
        return (
            sorted(map(repr, testing.messages(store, "out"))),
            testing.messages(store, "late"),
            dict(testing.state(store, "g.out")),
        )

    with testing.temporary_store() as store:
        sites = testing.crash_sites(lambda: run(store))
        expected = results(store)
    assert {"timer.moving", "timer.moved", "timer.inside"} <= {point for point, _ in sites}
    assert any("'final': False" in text for text in expected[0])
    for point, hit in thinned([(point, hit) for point, hit in sites if point.startswith(points)], stride):
        with testing.temporary_store() as store:
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                run(store)
            run(store)
            found = results(store)
            assert found[1:] == expected[1:], (point, hit)
            assert finals(found[0]) == finals(expected[0]), (point, hit)
            assert len(set(found[0])) == len(found[0]), (point, hit)


def finals(texts: list[str]) -> list[str]:
    return [text for text in texts if "'final': True" in text]


# --- beside other options -------------------------------------------------------------------------


def minutes(rows: list[Message], tables: bool = False, **options: Any) -> tuple[list[Message], list[Message]]:
    """The results and the errors of windows of a minute over rows."""
    given = {"time": "t", "key": "k", "late": lambda late: None, "reduce": {"n": count(), "v": sum("v")}, **options}
    with testing.temporary_store() as store:
        if tables:
            store.queue("m").appender().write_table(pa.Table.from_pylist(rows))
        else:
            store.queue("m").appender().write_many(rows)
        testing.run_until_idle(graph_of(windows.tumbling("m", "out", 60, **given)), store)
        errors = testing.messages(store, "errors")
        return testing.messages(store, "out"), errors


LATE_ROWS = [{"t": t, "k": "ab"[n % 2], "v": n} for n, t in enumerate([1, 61, 2, 3, 62, 130, 4, 63, 190, 5])]


@pytest.mark.parametrize("early", [None, "10s", "update"])
def test_a_function_of_late_messages_makes_results(early: Any) -> None:
    """In rows and in tables: what it returns is before what the same message completes; None drops the message."""

    def told(late: Message) -> Any:
        message = {"late": late["message"]["v"], "number": late["number"], "of": late["windows"][0][0]}
        return [None, message, [message, {"again": late["number"]}]][late["number"] % 3]

    sides = [minutes(LATE_ROWS, tables, late=told, early=early) for tables in (False, True)]
    utc = "zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc"
    one, other = (repr(side).replace(*utc) for side in sides)
    assert one == other and not sides[0][1]
    made = [message for message in sides[0][0] if "late" in message or "again" in message]
    assert [(m.get("late"), m.get("number"), m.get("again")) for m in made] == [
        (2, 1, None), (3, 2, None), (None, None, 2), (7, 4, None), (9, 5, None), (None, None, 5)
    ]  # fmt: skip
    queue, _ = minutes(LATE_ROWS, late="late", early=early)
    assert [message for message in sides[0][0] if message not in made] == queue


@pytest.mark.parametrize("tables", [False, True])
def test_a_function_of_late_messages_that_fails_sends_them_to_the_error_queue(tables: bool) -> None:
    wrong: list[Any] = [lambda late: 1 / 0, lambda late: 7, lambda late: [7], lambda late: {"q/secret": 1}]
    for function in wrong:
        found, errors = minutes(LATE_ROWS, tables, late=function)
        assert len(errors) == 5 and [m["n"] for m in found] == [1, 1, 1, 1]
    assert minutes(LATE_ROWS, tables)[0] == found


def test_a_join_takes_a_function_of_late_messages() -> None:
    graph = cues.Graph("g")
    for name in "ab":
        graph.source(name)
    inputs = {"a": "a", "b": "b"}
    graph.add(joins.interval(inputs, "out", key="k", time="t", late=lambda late: {"late": late["input"]}))
    with testing.temporary_store() as store:
        for queue, time in (("a", 5), ("b", 5), ("a", 9), ("b", 9), ("b", 1)):
            store.queue(queue).appender().write({"k": 1, "t": time})
            testing.run_until_idle(graph, store)
        found = testing.messages(store, "out")
        assert [message.get("late") for message in found] == [None, None, "b"] and "late" not in store.queues()


def test_silence_and_early_results_have_a_timer_each() -> None:
    graph = graph_of(minute(early="10s", idle="30s"))
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        store.queue("m").appender().write({"t": 1})
        seen = []
        for _ in range(12):
            testing.run_until_idle(graph, store)
            seen.append([message["final"] for message in testing.messages(store, "out")])
            clock.advance(10)
        assert seen[:2] == [[], [False]] and seen[-1] == [False, True]


def test_windows_that_stay_open_continue_in_the_next_run() -> None:
    make = functools.partial(minute, early="10s", at_end="keep")
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        for time in (1, 2):
            store.queue("m").appender().write({"t": time})
            testing.run_until_idle(graph_of(make()), store)
            clock.advance(1_000)
        testing.run_until_idle(graph_of(make()), store)
        assert [(m["n"], m["final"]) for m in testing.messages(store, "out")] == [(1, False), (2, False)]
        testing.run_until_idle(graph_of(make()), store, close_open=True)
        assert [(m["n"], m["final"]) for m in testing.messages(store, "out")][2:] == [(2, True)]


def test_the_end_of_a_run_cancels_the_timer(store: cues.Store) -> None:
    graph = cues.Graph("g")
    graph.source("m")(lambda position: [(1, {"t": 1})] if position is None else [])
    graph.add(minute(early="10s"))
    with graph.start(store=store) as running:
        assert running.wait_done()
    assert [m["final"] for m in testing.messages(store, "out")] == [True]
    state = testing.state(store, "g.out")
    assert event_time.TIMER not in state and not any(isinstance(row, bytes) for row in state)
    with testing.Clock(datetime.now(UTC) + timedelta(days=1)):
        assert not any(testing.run_until_idle(graph, store).steps.values())


@pytest.mark.parametrize("early", ["10s", "update"])
def test_a_seek_that_resets_the_state_gives_the_same_windows_again(early: str, store: cues.Store) -> None:
    rows = [{"t": time} for time in (1, 2, 61, 62)]
    with testing.Clock(NOON) as clock:
        store.queue("m").appender().write_many(rows)
        testing.run_until_idle(graph_of(minute(early=early)), store)
        seen = testing.messages(store, "out")
        store.seek("g.out", "start", reset_state=True)
        clock.advance(100)
        testing.run_until_idle(graph_of(minute(early=early)), store)
        clock.advance(10)
        testing.run_until_idle(graph_of(minute(early=early)), store)
        found = testing.messages(store, "out")
        assert [m for m in found if m["final"]] == 2 * [m for m in seen if m["final"]] != []
        assert [m["n"] for m in found if not m["final"]] == ([1, 2, 1, 2] * 2 if early == "update" else [2])


def test_a_replay_has_the_updates_and_the_final_results(tmp_path: Path) -> None:
    graph = cues.Graph("g")
    graph.source("m")(lambda position: [(n, {"t": 30 * n}) for n in range((position or 0) + 1, 9)])
    graph.add(minute(early="update"))
    with cues.open(tmp_path / "old", durability="process") as store, graph.start(store=store) as running:
        assert running.wait_done()
    assert cues.replay(graph, store=tmp_path / "old", into=tmp_path / "new").equal


def test_a_table_with_an_upsert_has_the_last_sessions(tmp_path: Path) -> None:
    columns = {
        "k": "text", "start": "timestamp", "end": "timestamp", "final": "boolean", "n": "integer"
    }  # fmt: skip
    for early in ("update", "3s"):
        path = str(tmp_path / f"{early}.db")
        table = sql_sink.Table(path, "sessions", columns, mode="upsert", key=["k", "start"], delete="withdrawn")
        with testing.Clock(NOON) as clock, testing.temporary_store() as store:
            (rows,) = messages(7, 150, ("m",), disorder=20).values()
            graph = cues.Graph("g", errors="errors")
            graph.source("m")
            graph.add(KINDS["sessions"][0](early=early, reduce={"n": count()}))
            graph.add(table.sink("out"))
            for at in range(0, 150, 10):
                store.queue("m").appender().write_many(rows[at : at + 10])
                testing.run_until_idle(graph, store)
                clock.advance(3)
            testing.run_until_idle(graph, store, close_open=True)
            assert not testing.messages(store, "errors")
            found = testing.messages(store, "out")
        finals = [message for message in found if message["final"]]
        assert any(message["withdrawn"] for message in found)
        with contextlib.closing(sqlite3.connect(path)) as db:
            assert db.execute("select count(*), sum(n), min(final) from sessions").fetchone() == (
                len(finals), builtins.sum(m["n"] for m in finals), 1
            )  # fmt: skip


def test_each_partition_has_early_results_and_numbers_of_its_own() -> None:
    graph = cues.Graph("g", queues={"m": cues.QueueOptions(partitions=3, key="k"), "out": cues.QueueOptions()})
    graph.source("m")
    graph.add(windows.counted("m", "out", 3, key="k", early="10s", reduce={"n": count()}))
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        testing.run_until_idle(graph, store)
        store.queue("m").appender().write_many([{"k": f"k{n % 7}"} for n in range(35)])
        testing.run_until_idle(graph, store)
        clock.advance(10)
        testing.run_until_idle(graph, store)
        found = testing.messages(store, "out")
    assert sorted((m["k"], m["n"], m["final"]) for m in found) == sorted(
        (f"k{n}", size, size == 3) for n in range(7) for size in (2, 3)
    )
    assert sorted(m["number"] for m in found)[0] == 1


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: minute(early="never"), "not a duration"),
    (lambda: minute(early=0), "not a duration"),
    (lambda: minute(early=True), "not a duration"),
    (lambda: windows.hopping("m", "o", 6, 2, time="t", late="l", early=1, reduce={"final": count()}), "of that name"),
    (lambda: windows.sessions("m", "o", 6, time="t", late="l", early=1, reduce={"withdrawn": count()}), "of that name"),
    (lambda: windows.counted("m", "out", 5, early="1s", reduce={"number": count()}), "of that name"),
    (lambda: windows.counted("m", "out", 5, every=6, reduce={"n": count()}), "every=6 is not a number of messages"),
    (lambda: windows.counted("m", "out", 5, every=0, reduce={"n": count()}), "every=0 is not a number of messages"),
    (lambda: windows.counted("m", "out", 5, every=True, reduce={"n": count()}), "every=True is not a number"),
    (lambda: aggregates.aggregate("m", "out", by="k", early="1s", reduce={"n": count()}), "are for every="),
    (lambda: minute(early="1s", timer=lambda timer: None), "timer"),
    (lambda: windows.tumbling("m", "out", 60, time="t", late=late_async, reduce={"n": count()}), "is `async def`"),
]  # fmt: skip


async def late_async(late: Message) -> None:
    pass


@pytest.mark.parametrize(("make", "problem"), WRONG)
def test_what_does_not_fit_is_refused_when_it_is_declared(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(GraphError, match=problem) as raised:
        make()
    assert "Try:" in str(raised.value)


def test_names_of_results_are_free_without_early_results() -> None:
    found, _ = minutes([{"t": 0, "k": "a"}, {"t": 60, "k": "a"}], reduce={"final": count(), "number": count()})
    assert [(m["final"], m["number"]) for m in found] == [(1, 1)]


# --- kills of a running graph ---------------------------------------------------------------------


def last_of(results: list[Message]) -> dict[Any, Message]:
    """The last result of each window; none may come after a final one, or twice."""
    last: dict[Any, Message] = {}
    seen: set[str] = set()
    for message in results:
        name = message["k"], message["start"]
        before = last.get(name)
        assert before is None or not before["final"], message
        if message.get("withdrawn"):
            assert last.pop(name)
            continue
        assert repr(message) not in seen
        seen.add(repr(message))
        assert before is None or message["n"] > before["n"] or message["final"], message
        last[name] = message
    return last


@bounded("rounds", 4, 25)
@pytest.mark.parametrize("workers", [None, 2])
def test_kills_lose_and_double_no_result(workers: int | None, rounds: int, tmp_path: Path) -> None:
    """``cues run`` killed in the middle: early results and withdrawals are there once, tables have the last ones."""
    chance = random.Random(seeds.new())
    words = [early_graph.__file__, "--store", tmp_path / "store", *(["--workers", workers] if workers else [])]
    table = tmp_path / "out.db"
    met = 0
    for _ in range(rounds):
        with Command("run", *words, CUES_TEST_OUTSIDE=str(table)) as running:
            with contextlib.suppress(TimeoutError, subprocess.TimeoutExpired):
                running.process.wait(chance.uniform(0.5, 2.5))
            running.process.kill()
            met += running.wait() != 0
    with Command("run", *words, CUES_TEST_OUTSIDE=str(table), CUES_TEST_FAST="1") as running:
        assert running.wait() == 0, running.text
    with cues.open(tmp_path / "store") as store:
        found = {name: testing.messages(store, name) for name in ("fixed", "spans", "late", "late-spans")}
        assert len(testing.messages(store, "numbers")) == early_graph.COUNT
        assert not testing.messages(store, "errors")
        assert not testing.check_attempts(store)
    with testing.temporary_store() as store:
        graph = cues.Graph("early", errors="errors")
        graph.source("numbers")
        for stream in early_graph.graph.processors.values():
            if stream.id in ("fixed", "spans"):
                graph.add(stream)
        store.queue("numbers").appender().write_many([early_graph.message(n) for n in range(early_graph.COUNT)])
        testing.run_until_idle(graph, store, close_open=True)
        wanted = {name: testing.messages(store, name) for name in found}
    for name in ("fixed", "spans"):
        last = last_of(found[name])
        assert all(message["final"] for message in last.values())
        assert sorted(map(repr, last.values())) == sorted(repr(m) for m in wanted[name] if m["final"])
        assert len(found[name]) > len(last)
        with contextlib.closing(sqlite3.connect(table)) as db:
            rows = db.execute(f'select k, n, total, "final" from "{name}"').fetchall()
            assert sorted(rows) == sorted((m["k"], m["n"], m["total"], 1) for m in last.values())
    assert found["late"] == wanted["late"] != [] and found["late-spans"] == wanted["late-spans"]
    assert met
