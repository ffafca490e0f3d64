"""Dedupe, flat map, split, sample, enrich, merge: against naive models, with crashes, with state that stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cues
from cues import Graph, Stream, testing
from cues.errors import InvalidArgument
from cues.processors import shape


class Held(dict[Any, dict[Any, Any]]):
    """A stand-in for ``process``: the state as plain dicts, for models of thousands of messages."""

    id = "g.p"
    binding = "a"
    index = 0
    now = datetime(2026, 1, 1, tzinfo=UTC)

    def state_of(self, key: Any) -> dict[Any, Any]:
        return self.setdefault(key, {})


def called(fn: Callable[..., Any], messages: list[dict[str, Any]], process: Held) -> list[Any]:
    results = []
    for message in messages:
        try:
            results.append(fn(message, process=process))
        except shape.LateMessage:
            results.append("late")
    return results


# --- dedupe ---------------------------------------------------------------------------------------

TIMED = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=40)


@given(TIMED, st.sampled_from([1, 3, 10]))
def test_dedupe_passes_what_a_model_with_all_of_history_passes(items: list[tuple[str, int]], within: int) -> None:
    """The model forgets nothing; dedupe forgets what can matter no more."""
    passed: list[tuple[str, int]] = []
    wanted: list[Any] = []
    for place, (key, at) in enumerate(items):
        newest = max([time for _, time in items[:place]], default=at)
        if place and at <= newest - within:
            wanted.append("late")
        elif any(other == key and abs(at - time) < within for other, time in passed):
            wanted.append(None)
        else:
            passed.append((key, at))
            wanted.append({"k": key, "at": at})
    # a late message is not counted as the newest, which it cannot be
    fn = shape.dedupe("k", within=within, time="at")
    assert called(fn, [{"k": key, "at": at} for key, at in items], Held()) == wanted


def test_the_state_of_dedupe_is_bounded_by_its_horizon() -> None:
    process, within, largest = Held(), 50, 0
    fn = shape.dedupe("k", within=within, time="at")
    for at in range(5_000):
        assert fn({"k": at % 4_000, "at": at}, process=process) is not None
        largest = max(largest, len(process["keys"]), len(process["order"]))
    assert 2 * within <= largest <= 2 * within + 2
    for at in range(9_000, 9_100):  # after a gap, two are removed with each message
        fn({"k": "x", "at": at}, process=process)
    assert len(process["keys"]) <= 2 and len(process["order"]) <= 4


def test_dedupe_by_the_clock_of_the_machine() -> None:
    fn, process = shape.dedupe(lambda m: m["k"] % 10, within="1m"), Held()
    given: list[tuple[float, int, bool]] = [
        (0, 1, True), (1, 11, False), (-500, 1, True), (59, 2, True), (60, 1, True), (61, 21, False)
    ]  # fmt: skip
    for at, key, passes in given:
        process.now = datetime.fromtimestamp(1000.0 + at, UTC)
        assert (fn({"k": key}, process=process) is not None) is passes, (at, key)


def test_dedupe_heals_after_a_clock_that_was_ahead() -> None:
    fn, process = shape.dedupe("k", within="10s"), Held()
    right = process.now
    process.now = right + timedelta(days=1)
    assert fn({"k": 0}, process=process)
    for minute in range(60):
        process.now = right + timedelta(minutes=minute)
        assert fn({"k": 1}, process=process)
        assert not fn({"k": 1}, process=process)
    assert len(process.state_of("order")) <= 2


# --- merge ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), max_size=60))
def test_merge_releases_all_that_cannot_be_preceded_in_order(steps: list[tuple[str, int]]) -> None:
    fn, process = shape.merge("at", "a", "b"), Held()
    times = {"a": 0, "b": 0}
    given: list[tuple[int, str, int]] = []
    released: list[Any] = []
    for number, (binding, later) in enumerate(steps):
        times[binding] += later
        given.append((times[binding], binding, number))
        process.binding = binding
        released += fn({"at": times[binding], "from": binding, "n": number}, process=process)
    # Sorted, up to the time of the input that is the least far; of its own time only what comes first.
    if len({binding for _, binding, _ in given}) < 2:
        assert released == []
        return
    ordered = sorted(given)
    last = {name: max(item for item in given if item[1] == name)[:2] for name in "ab"}
    wanted = [item for item in ordered if item[:2] <= min(last.values())]
    assert [(m["at"], m["from"], m["n"]) for m in released] == wanted


def test_merge_holds_at_most_so_many_and_refuses_what_comes_too_late() -> None:
    fn, process = shape.merge("at", "a", "b", most=3), Held()
    assert [len(fn({"at": at}, process=process)) for at in range(10)] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert len(process["a"]) == 3
    process.binding = "b"
    assert called(fn, [{"at": 5}], process) == ["late"]
    assert called(fn, [{"at": 8}, {"at": 7}], process) == [[{"at": 7}, {"at": 8}, {"at": 8}], "late"]
    process.binding = "c"
    with pytest.raises(InvalidArgument, match="does not know the input 'c'"):
        fn({"at": 9}, process=process)


# --- in a graph, with crashes ---------------------------------------------------------------------


def rows(count: int, shift: int = 0) -> list[dict[str, Any]]:
    return [{"id": n % 7, "at": 3 * n + shift, "items": [{"sku": n}, 5] * (n % 2)} for n in range(count)]


def graph() -> Graph:
    graph = Graph("g", errors="errors")
    graph.add(Stream(shape.dedupe("id", within=20, time="at"), "a", "unique", batch_size=4))
    graph.add(Stream(shape.merge("at", "x", "y"), cues.AnyOf(x="a", y="b"), "merged", batch_size=4))
    graph.add(Stream(shape.flat_map("items"), "a", "items"))
    outputs = {"low": "low", "rest": "rest"}
    graph.add(Stream(shape.split(low=lambda m: m["id"] < 3, other="rest"), "a", outputs))
    graph.add(Stream(shape.split({"low": lambda m: m["id"] < 3}), "a", outputs, id="strict"))
    graph.add(Stream(shape.sample(0.5), "a", "half"))
    return graph


def test_a_crash_anywhere_changes_no_queue() -> None:
    def filled(store: Any) -> None:
        store.queue("a").appender().write_many([*rows(12), {"id": 1, "at": 3, "items": 9}])
        store.queue("b").appender().write_many(rows(12, 1))

    def contents(store: Any) -> Any:
        names = ("unique", "merged", "items", "low", "rest", "half", "errors")
        found = {name: testing.messages(store, name) for name in names}
        errors = [(e["err.proc/config"]["id"], e["err/cause"][0]["message"]) for e in found.pop("errors")]
        return found, sorted(errors)

    with testing.temporary_store() as store:
        filled(store)
        sites = testing.crash_sites(lambda: testing.run_until_idle(graph(), store))
        wanted = contents(store)
    found, errors = wanted
    assert [m["at"] for m in found["unique"]] == [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33]
    assert [m["at"] for m in found["merged"]] == sorted(m["at"] for m in rows(12) + rows(12, 1))[:-1]
    assert found["items"][:2] == [{"id": 1, "at": 3, "sku": 1}, {"id": 1, "at": 3, "items": 5}]
    assert len(found["low"]) == 14 and len(found["rest"]) == 6 and 0 < len(found["half"]) < 13
    assert [id for id, _ in errors] == ["g.dedupe", "g.flat_map", "g.merge", *["g.strict"] * 6]
    assert len(sites) > 60
    for point, hit in sites[::4]:
        with testing.temporary_store() as store:
            filled(store)
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph(), store)
            testing.run_until_idle(graph(), store)
            assert contents(store) == wanted, (point, hit)


def test_the_control_that_keeps_its_keys_in_memory_loses_messages() -> None:
    """Without the state of the step, a message whose step died counts as passed."""

    def lost(point: str) -> bool:
        seen: set[int] = set()

        def once(message: dict[str, Any]) -> dict[str, Any] | None:
            return None if message["id"] in seen or seen.add(message["id"]) else message

        with testing.temporary_store() as store:
            store.queue("a").appender().write_many(rows(7))
            run = Graph("g", [Stream(once, "a", "unique")])
            with testing.crash(point, 1, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(run, store)
            testing.run_until_idle(run, store)
            return len(testing.messages(store, "unique")) < 7

    assert lost("commit.inside")


# --- the others -----------------------------------------------------------------------------------


def test_sample_takes_its_share_and_all_of_a_key_or_none() -> None:
    fn = shape.sample(0.2, by="user")
    taken = [n for n in range(5_000) if fn({"user": n}, process=Held())]
    assert 800 < len(taken) < 1_200
    assert taken == [n for n in range(5_000) if fn({"user": n, "other": 1}, process=Held())]
    assert [shape.sample(share)({"user": 1}, process=Held()) for share in (0, 1)] == [None, {"user": 1}]


def test_flat_map_of_a_function_and_of_missing_fields() -> None:
    assert shape.flat_map(lambda m: ({"n": n} for n in range(m["n"])))({"n": 2}) == [{"n": 0}, {"n": 1}]
    assert shape.flat_map("x")({"y": 1}) == shape.flat_map("x")({"x": None}) == []
    with pytest.raises(TypeError, match=r"\$\.x: expected array, found 'text'"):
        shape.flat_map("x")({"x": "text"})


def test_wrong_arguments_are_refused_at_the_call() -> None:
    for make in (
        lambda: shape.dedupe("id", within="1 year"),
        lambda: shape.dedupe("id", within=0),
        lambda: shape.split(other="x"),
        lambda: shape.sample(2),
        lambda: shape.merge("at", "a"),
        lambda: shape.merge("at", "a", "b", most=0),
    ):
        with pytest.raises(InvalidArgument, match="Try: "):
            make()
    fn = shape.dedupe("id", within="1h", time="at")
    for message, text in [
        ({"at": 1}, r"\$\.id: expected a value, found nothing"),
        ({"id": 1, "at": "x"}, r"\$\.at: expected seconds or an aware datetime, found 'x'"),
        ({"id": 1, "at": datetime(2026, 1, 1)}, "aware"),
    ]:
        with pytest.raises((KeyError, TypeError), match=text):
            fn(message, process=Held())
    assert fn({"id": 1, "at": datetime(2026, 1, 1, tzinfo=UTC)}, process=Held()) is not None


# --- enrich ---------------------------------------------------------------------------------------


def test_enrich_knows_keys_of_several_types_apart_and_refuses_what_it_cannot_add() -> None:
    fn = shape.enrich("k", "v", repr, ttl=10)
    assert [fn({"k": key})["v"] for key in (1, True, 1.0, "1", 1)] == ["1", "True", "1.0", "'1'", "1"]  # type: ignore[call-arg]

    async def fetch(key: Any) -> str:
        return repr(key)

    async def both() -> list[Any]:
        fn: Any = shape.enrich("k", "v", fetch, ttl=10)
        return [message["v"] for message in await asyncio.gather(*(fn({"k": key}) for key in (1, True, 1.0)))]

    assert asyncio.run(both()) == ["1", "True", "1.0"]
    pending = fetch(1)
    with contextlib.closing(pending), pytest.raises(InvalidArgument, match=r"awaitable.*Try: give an async def"):
        shape.enrich("k", "v", lambda key: pending, ttl=10)({"k": 1})  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="into"):
        shape.enrich("k", None, repr, ttl=10)  # type: ignore[arg-type]


def test_enrich_asks_once_for_a_key_until_its_answer_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0.0], []
    monkeypatch.setattr(shape, "monotonic", lambda: clock[0])

    def fetch(key: str) -> Any:
        asked.append(key)
        if key == "bad":
            raise LookupError(key)
        return None if key == "none" else {"at": clock[0]}

    fn = shape.enrich("k", "v", fetch, ttl="10s", capacity=2)
    assert [fn({"k": key, "n": n}) for n, key in enumerate(["a", "a", "none", "none"])] == [
        {"k": "a", "n": 0, "v": {"at": 0.0}},
        {"k": "a", "n": 1, "v": {"at": 0.0}},
        {"k": "none", "n": 2, "v": None},
        {"k": "none", "n": 3, "v": None},
    ]
    assert asked == ["a", "none"]
    clock[0] = 10.0
    assert fn({"k": "a"})["v"] == {"at": 10.0}
    for key in ("b", "c"):
        fn({"k": key})
    for _ in range(2):
        with pytest.raises(LookupError):
            fn({"k": "bad"})
    with pytest.raises(KeyError):
        fn({})
    assert asked == ["a", "none", "a", "b", "c", "bad", "bad"]
    fn({"k": "a"})  # b and c are all that fits
    assert asked[-1] == "a"
    cache = pickle.loads(pickle.dumps(shape.Cache(1.0, 3)))
    cache.set("a", 1)
    assert cache.get("a")[1] == 1


def test_calls_of_one_key_at_one_time_ask_once(store: cues.Store) -> None:
    asked: list[int] = []

    async def fetch(key: int) -> int:
        asked.append(key)
        await asyncio.sleep(0.05)
        if key == 3 and asked.count(3) == 1:
            raise LookupError("not there yet")
        return key * 10

    fn = shape.enrich(lambda message: message["n"] % 5, "v", fetch, ttl="1h")
    graph = Graph("g", [cues.Source("in"), Stream(fn, "in", "out", concurrency=10)], errors="errors")
    store.queue("in").appender().write_many([{"n": n} for n in range(100)])
    testing.run_until_idle(graph, store)
    failed = [record["err.proc/messages"]["in"][0]["n"] for record in testing.messages(store, "errors")]
    assert failed and all(n % 5 == 3 for n in failed) and len(failed) <= 2
    assert testing.messages(store, "out") == [{"n": n, "v": n % 5 * 10} for n in range(100) if n not in failed]
    assert sorted(asked) == [0, 1, 2, 3, 3, 4]
