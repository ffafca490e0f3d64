"""Early results of windows: by the clock and at each update, in rows and in tables, under crashes, at the end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
import seeds
from contracts_windows import DELAY_S, REDUCE, TIMED, Message, messages

import cues
from cues import testing
from cues.processors import aggregates, event_time, vectors, windows
from cues.processors.reducers import count

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
@pytest.mark.parametrize("seed", seeds.among(range(40), fast=1))
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
def test_a_crash_anywhere_changes_no_result(kind: str, tables: bool) -> None:
    (rows,) = messages(3, 14, ("m",), disorder=20).values()
    crashes(kind, [rows[:6], rows[6:9], rows[9:], []], tables)


def test_a_crash_at_a_timer_changes_no_result() -> None:
    parts = [[{"t": t, "k": "a", "v": t, "i": t} for t in some] for some in ((0, 16), (3, 31))]
    crashes("tumbling", parts, True, ("timer.",))


def crashes(kind: str, parts: list[list[Message]], tables: bool, points: tuple[str, ...] = ("",)) -> None:
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
    for point, hit in [(point, hit) for point, hit in sites if point.startswith(points)]:
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
