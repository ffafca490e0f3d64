"""The messages and commits of a step: joins, alts, forks, filters, state, metadata, hashes, errors.

Most tests run a graph on one thread to its end and compare whole queues; those about threads,
waiting and draining start it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seeds
from small import feed, numbers, run

import cues
from cues import AnyOf, Graph, QueueOptions, Retry, Sink, Source, Store, Stream, testing
from cues.base.names import HASH, MESSAGE_INDEX, META, TYPE
from cues.engine.assembly import assemble
from cues.errors import CodecError, PositionRequired, ProcessorStopped, ReservedKey, ReturnError
from cues.steps import state
from cues.steps.feed import SourceStepper
from cues.steps.hashes import delivery_hash

Message = dict[str, Any]


def same(message: Message) -> Message:
    return message


def identity(store: Store, queue: str) -> bytes:
    return store.queue(queue).core.row().identity


# --- shapes -------------------------------------------------------------------------------------


def test_a_join_takes_one_message_from_each_input_and_waits_for_the_slower(store: Store) -> None:
    def pair(left: Message, right: Message) -> Message:
        return {"n": (left["n"], right["n"])}

    join = Stream(pair, {"left": "a", "right": "b"}, "out", batch_size=2)
    feed(store, a=[1, 2, 3], b=[10])
    run(store, join)
    assert numbers(store, "out") == [(1, 10)]
    feed(store, b=[20, 30, 40])
    run(store, join)
    assert numbers(store, "out") == [(1, 10), (2, 20), (3, 30)]
    assert testing.contents(store)["positions"] == {"g.pair.a": 4, "g.pair.b": 4}


def test_alts_serve_their_inputs_in_turn_and_say_which(store: Store) -> None:
    def tag(message: Message, process: Any) -> Message:
        return {"n": (process.binding, message["n"])}

    feed(store, a=range(5), b=range(3), c=range(1))
    run(store, Stream(tag, AnyOf("a", left="b", right="c"), "out", batch_size=1))
    assert numbers(store, "out") == [
        ("a", 0), ("left", 0), ("right", 0), ("a", 1), ("left", 1), ("a", 2), ("left", 2), ("a", 3), ("a", 4),
    ]  # fmt: skip


def test_a_busy_input_does_not_starve_the_others(store: Store) -> None:
    def tag(message: Message, process: Any) -> Message:
        return {"n": process.binding}

    feed(store, a=range(1000), b=range(1))
    run(store, Stream(tag, AnyOf("a", "b"), "out", batch_size=100))
    assert numbers(store, "out").index("b") == 100


def test_a_fork_is_one_commit_and_its_outputs_are_conditional(store: Store) -> None:
    def fork(message: Message) -> dict[str, Any] | None:
        n = message["n"]
        if n == 0:
            return None
        if n == 1:
            return {}
        if n == 2:
            return {"x": message, "y": None}
        if n == 3:
            return {"x": [], "y": [{"n": 30}, {"n": 31}]}
        return {"x": message, "y": (message, message)}

    feed(store, a=range(5))
    run(store, Stream(fork, "a", {"x": "out-x", "y": "out-y"}))
    assert numbers(store, "out-x") == [2, 4]
    assert numbers(store, "out-y") == [30, 31, 4, 4]
    attempts = [m for m in testing.messages(store, "g.fork") if MESSAGE_INDEX in m]
    assert [m[MESSAGE_INDEX] for m in attempts] == [{"out-x": 1, "out-y": 1}]


def test_join_fork_and_alts_fork(store: Store) -> None:
    def join(left: Message, right: Message) -> dict[str, Any]:
        return {"sum": {"n": left["n"] + right["n"]}, "odd": left if left["n"] % 2 else None}

    def alts(message: Message, process: Any) -> dict[str, Any]:
        return {process.binding: message}

    feed(store, a=[1, 2, 3], b=[10, 20, 30])
    run(
        store,
        Stream(join, {"left": "a", "right": "b"}, {"sum": "sums", "odd": "odds"}),
        Stream(alts, AnyOf("a", "b"), {"a": "from-a", "b": "from-b"}),
    )
    assert numbers(store, "sums") == [11, 22, 33] and numbers(store, "odds") == [1, 3]
    assert numbers(store, "from-a") == [1, 2, 3] and numbers(store, "from-b") == [10, 20, 30]


def test_one_queue_under_two_bindings_of_a_fork_gets_both(store: Store) -> None:
    def twice(message: Message) -> dict[str, Any]:
        return {"x": message, "y": {"n": -message["n"]}}

    feed(store, a=[1, 2])
    run(store, Stream(twice, "a", {"x": "out", "y": "out"}))
    assert sorted(numbers(store, "out")) == [-2, -1, 1, 2]


def test_lists_and_none(store: Store) -> None:
    def several(message: Message) -> Any:
        return [None, {"n": 1}, [], [{"n": 2}, {"n": 2}], ({"n": 3},)][message["n"]]

    feed(store, a=range(5))
    run(store, Stream(several, "a", "out"))
    assert numbers(store, "out") == [1, 2, 2, 3]


def test_a_step_without_outputs_is_a_nil_attempt(store: Store) -> None:
    feed(store, a=range(3))
    run(store, Stream(lambda m: None, "a", "out", id="none"), Sink(lambda m: m, "a", id="sink", step_s=None))
    record = ["q.type.try/snapshot", "q.type.try/nil-attempt"]
    assert [m[TYPE] for m in testing.messages(store, "g.none")] == record
    # A sink's snapshot was committed before its function ran, and stands again beside the attempt.
    assert [m[TYPE] for m in testing.messages(store, "g.sink")] == [record[0], *record]


def test_a_queue_written_by_two_processors(store: Store) -> None:
    feed(store, a=[1, 2, 3], b=[10, 20])
    run(store, Stream(same, "a", "out", id="x", batch_size=1), Stream(same, "b", "out", id="y", batch_size=1))
    assert testing.check_history({"a": [1, 2, 3], "b": [10, 20]}, numbers(store, "out"))


def test_a_cycle_comes_to_rest(store: Store) -> None:
    def down(message: Message) -> dict[str, Any]:
        return {"again": {"n": message["n"] - 1}} if message["n"] else {"done": message}

    feed(store, a=[3, 0, 2])
    run(store, Stream(down, "a", {"again": "a", "done": "out"}))
    assert numbers(store, "out") == [0, 0, 0] and len(numbers(store, "a")) == 8


def test_opts_and_system_are_handed_over(store: Store) -> None:
    system = object()
    seen: list[Any] = []
    feed(store, a=[1])
    run(
        store,
        Sink(lambda m, process: seen.append((process.opts, process.system)), "a", id="s", opts={"x": [1]}),
        system=system,
    )
    assert seen == [({"x": [1]}, system)]


def test_a_function_may_change_what_it_was_given(store: Store) -> None:
    def spoil(message: Message) -> Message:
        message["n"] += 100
        message.setdefault("list", []).append(1)
        return message

    feed(store, a=[1, 2])
    run(store, Stream(spoil, "a", "out"), Stream(same, "a", "same"))
    assert numbers(store, "out") == [101, 102] and numbers(store, "same") == numbers(store, "a") == [1, 2]


# --- filters ------------------------------------------------------------------------------------


def typed(n: int, type: str | None = None, topics: Any = None) -> Message:
    message: Message = {"n": n}
    if type:
        message["q/type"] = type
    if topics is not None:
        message["q/topics"] = topics
    return message


def test_filters_by_type_topic_and_predicate(store: Store) -> None:
    feed(store, a=[typed(1, "x"), typed(2, "y", ["t"]), typed(3), typed(4, "x", ["t", "u"]), typed(5, "y", "u")])
    run(
        store,
        Stream(same, "a", "types", id="s1", types="x"),
        Stream(same, "a", "both-types", id="s2", types={"x", "y"}),
        Stream(same, "a", "topics", id="s3", topics=["t"]),
        Stream(same, "a", "where", id="s4", where=lambda m: m["n"] > 3),
        Stream(same, "a", "all", id="s5", types={"x", "y"}, topics={"t", "u"}, where={"a": lambda m: m["n"] % 2}),
    )
    found = {q: numbers(store, q) for q in ("types", "both-types", "topics", "where", "all")}
    assert found == {"types": [1, 4], "both-types": [1, 2, 4, 5], "topics": [2, 4], "where": [4, 5], "all": [5]}


def test_in_a_join_an_input_that_did_not_match_is_none(store: Store) -> None:
    calls: list[Any] = []

    def join(left: Message | None, right: Message | None) -> None:
        calls.append((left and left["n"], right and right["n"]))

    feed(store, a=[1, 2, 3, 4], b=[1, 2, 3, 4])
    run(
        store,
        Sink(
            join, {"left": "a", "right": "b"}, where={"left": lambda m: m["n"] > 2, "right": lambda m: m["n"] % 2 == 0}
        ),
    )
    assert calls == [(None, 2), (3, None), (4, 4)]


def test_a_filter_that_fails_is_a_failure_of_its_message(store: Store) -> None:
    feed(store, a=[1, {"m": 2}, 3])
    run(store, Stream(same, "a", "out", where=lambda m: m["n"] > 0), errors="errors")
    assert numbers(store, "out") == [1, 3]
    assert [e["err/cause"][0]["type"] for e in testing.messages(store, "errors")] == ["KeyError"]


def test_a_filter_moves_the_position_and_leaves_the_hash_alone(store: Store) -> None:
    hashes: dict[str, list[Any]] = {"all": [], "some": []}
    feed(store, a=range(6))

    def keep(message: Message, process: Any) -> None:
        hashes["all"].append(process.delivery_hash)

    run(store, Sink(keep, "a", id="s", where=lambda m: m["n"] % 2, step_s=None), Sink(keep, "a", id="t", step_s=None))
    some, others = hashes["all"][:3], hashes["all"][3:]
    assert some == [delivery_hash("g.s", 0, [("g.s.a", identity(store, "a"), i, i + 1)]) for i in (2, 4, 6)]
    assert len(set(some + others)) == 9
    assert testing.contents(store)["positions"] == {"g.s.a": 7, "g.t.a": 7}


# --- batch functions ----------------------------------------------------------------------------


def test_a_batch_function_gets_lists_and_its_range_has_one_hash(store: Store) -> None:
    calls: list[Any] = []

    def batch(messages: list[Message], process: Any) -> Any:
        calls.append(
            (len(messages), process.indices, process.delivery_hash, process.delivery.start, process.delivery.end)
        )
        return [{"n": sum(m["n"] for m in messages)}]

    feed(store, a=range(5))
    run(store, Stream(batch, "a", "out", batch=True, batch_size=3))
    where = ("g.batch.a", identity(store, "a"))
    assert calls == [
        (3, [1, 2, 3], delivery_hash("g.batch", 0, [(*where, 1, 4)]), {"g.batch.a": 1}, {"g.batch.a": 4}),
        (2, [4, 5], delivery_hash("g.batch", 0, [(*where, 4, 6)]), {"g.batch.a": 4}, {"g.batch.a": 6}),
    ]
    assert numbers(store, "out") == [3, 7]


def test_a_batch_join_with_filters_gets_lists_of_one_length(store: Store) -> None:
    calls: list[Any] = []

    def batch(left: list[Any], right: list[Any], process: Any) -> dict[str, Any]:
        calls.append(([m and m["n"] for m in left], [m and m["n"] for m in right], process.indices))
        return {"x": [{"n": len(left)}]}

    feed(store, a=range(4), b=range(4))
    where = {"left": lambda m: m["n"] != 1, "right": lambda m: m["n"] not in (1, 2)}
    run(store, Stream(batch, {"left": "a", "right": "b"}, {"x": "out"}, batch=True, where=where, step_s=None))
    assert calls == [([0, 2, 3], [0, None, 3], {"left": [1, 3, 4], "right": [1, 3, 4]})]


def test_a_batch_function_whose_filter_leaves_nothing_is_not_called(store: Store) -> None:
    feed(store, a=range(3))
    run(store, Stream(lambda ms: 1 / 0, "a", "out", id="s", batch=True, bisect=False, where=lambda m: False))
    assert testing.contents(store)["positions"] == {"g.s.a": 4}


@pytest.mark.parametrize("what", ["raise", "encode", "return", "binding"])
def test_a_failed_batch_is_one_error_record_and_leaves_no_state(store: Store, what: str) -> None:
    def batch(messages: list[Message], process: Any) -> Any:
        state = process.state
        state["n"] = state.get("n", 0) + len(messages)
        if messages[0]["n"] == 2:
            if what == "raise":
                raise ValueError("two")
            return {"encode": {"x": [{"n": 1}, {"n": object()}]}, "return": 7, "binding": {"z": []}}[what]
        return {"x": messages}

    feed(store, a=range(6))
    run(store, Stream(batch, "a", {"x": "out"}, batch=True, bisect=False, batch_size=2), errors="errors")
    assert numbers(store, "out") == [0, 1, 4, 5]
    (error,) = testing.messages(store, "errors")
    assert error["err.proc/messages"] == {"a": [{"n": 2}, {"n": 3}]}
    assert testing.state(store, "g.batch") == {"n": 4}


def test_a_failed_batch_without_an_error_queue_moves_nothing_of_its_range(store: Store) -> None:
    def batch(messages: list[Message], process: Any) -> Any:
        process.state["n"] = len(messages)
        return [{"n": object()}] if messages[0]["n"] == 2 else messages

    feed(store, a=range(6))
    with pytest.raises(ProcessorStopped) as caught:
        run(store, Stream(batch, "a", "out", batch=True, batch_size=2))
    assert isinstance(caught.value.__cause__, CodecError)
    assert numbers(store, "out") == [0, 1]
    assert testing.contents(store)["positions"] == {"g.batch.a": 3}
    assert testing.state(store, "g.batch") == {"n": 2}


# --- state --------------------------------------------------------------------------------------


def test_state_by_key_with_changes_in_place_and_deletion(store: Store) -> None:
    def count(message: Message, process: Any) -> Message:
        state = process.state
        seen = state.setdefault("seen", [])
        seen.append(message["n"])
        if message["n"] == 4:
            del state["seen"]
        state["last"] = {"n": message["n"]}
        return {"n": message["n"], "seen": len(seen), "fields": sorted(state)}

    graph = Stream(count, "a", "out", key=lambda m: m["n"] % 2, batch_size=2)
    feed(store, a=range(5))
    run(store, graph)
    feed(store, a=[5, 6])
    run(store, graph)
    assert [(m["n"], m["seen"]) for m in testing.messages(store, "out")] == [
        (0, 1), (1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 1),
    ]  # fmt: skip
    assert testing.messages(store, "out")[4]["fields"] == ["last"]
    assert testing.state(store, "g.count", 0) == {"seen": [6], "last": {"n": 6}}
    assert testing.state(store, "g.count", 1) == {"seen": [1, 3, 5], "last": {"n": 5}}
    assert testing.state(store, "g.count") == {}


def test_state_is_a_mapping_with_any_key_and_any_value(store: Store) -> None:
    long = "k" * 1000
    fields = {1: "int", "1": "str", long: "long", (1, 2): "tuple", None: b"x" * 10_000}

    def fill(message: Message, process: Any) -> Message:
        state = process.state
        if message["n"] == 0:
            state.update(fields)
            assert dict(state) == fields and len(state) == 5
        if message["n"] == 1:
            assert dict(state) == fields
            state[None] = b"short"
            assert state.pop(long) == "long" and long not in state
            with pytest.raises(KeyError):
                del state[long]
        if message["n"] == 2:
            assert dict(state) == {**{k: v for k, v in fields.items() if k != long}, None: b"short"}
            state.clear()
        return {"n": len(state)}

    for n in range(4):
        feed(store, a=[n])
        run(store, Stream(fill, "a", "out"))
    assert numbers(store, "out") == [5, 4, 0, 0]
    assert testing.contents(store)["state"] in ({}, {"g.fill": {}})


def test_a_failed_call_leaves_no_state_and_a_retry_begins_afresh(store: Store) -> None:
    calls: list[int] = []

    def count(message: Message, process: Any) -> Message:
        process.state["n"] = process.state.get("n", 0) + 1
        process.state.setdefault("list", []).append(message["n"])
        calls.append(message["n"])
        if message["n"] == 1 or (message["n"] == 2 and calls.count(2) < 3):
            raise ValueError
        return {"n": process.state["n"]}

    feed(store, a=range(4))
    run(store, Stream(count, "a", "out", retries=2), errors="errors")
    assert numbers(store, "out") == [1, 2, 3]
    assert testing.state(store, "g.count") == {"n": 3, "list": [0, 2, 3]}


def test_an_output_that_cannot_be_encoded_leaves_no_state(store: Store) -> None:
    def count(message: Message, process: Any) -> Message:
        process.state["n"] = process.state.get("n", 0) + 1
        return {"n": object()} if message["n"] == 1 else {"n": process.state["n"]}

    feed(store, a=range(3))
    run(store, Stream(count, "a", "out"), errors="errors")
    assert numbers(store, "out") == [1, 2] and testing.state(store, "g.count") == {"n": 2}


def test_state_that_cannot_be_encoded_is_a_failure_of_its_message(store: Store) -> None:
    def spoil(message: Message, process: Any) -> Message:
        process.state["x"] = object() if message["n"] == 1 else message["n"]
        return message

    feed(store, a=range(3))
    run(store, Stream(spoil, "a", "out"), errors="errors")
    assert numbers(store, "out") == [0, 2] and testing.state(store, "g.spoil") == {"x": 2}


@pytest.mark.parametrize("wrong", [7, {"n": object()}, {"q/hash": "x"}], ids=["return", "encode", "reserved"])
def test_a_processor_that_stops_keeps_no_state_of_messages_after_the_failed_one(store: Store, wrong: Any) -> None:
    """The result of message 1 cannot be written. It does not touch the state; 2 and 3, of the same step, count.

    There is no error queue, so the step commits message 0 alone. If the state of 2 and 3 went with
    it, the next start would count them twice.
    """
    mended = False

    def count(message: Message, process: Any) -> Any:
        if message["n"] == 1 and not mended:
            return wrong
        process.state["n"] = process.state.get("n", 0) + 1
        return {"n": process.state["n"]}

    feed(store, a=range(4))
    with pytest.raises(ProcessorStopped):
        run(store, Stream(count, "a", "out"))
    assert numbers(store, "out") == [1] and testing.state(store, "g.count") == {"n": 1}
    assert testing.contents(store)["positions"] == {"g.count.a": 2}
    mended = True
    run(store, Stream(count, "a", "out"))
    assert numbers(store, "out") == [1, 2, 3, 4] and testing.state(store, "g.count") == {"n": 4}


@pytest.mark.parametrize("wrong", [7, {"n": object()}, {"q/hash": "x"}], ids=["return", "encode", "reserved"])
def test_a_bad_return_among_calls_of_which_only_some_use_the_state(store: Store, wrong: Any) -> None:
    """Outputs of calls that used the state are encoded at once, those of the others with the step."""

    def count(message: Message, process: Any) -> Any:
        if message["n"] == 1:
            return wrong
        if message["n"] == 2:
            return {"n": 2, "q/meta": {"mine": 1}}
        if message["n"] != 3:
            process.state["n"] = process.state.get("n", 0) + 1
        return {"n": message["n"]}

    feed(store, a=range(5))
    run(store, Stream(count, "a", "out"), errors="errors")
    assert testing.messages(store, "out") == [{"n": n} for n in (0, 2, 3, 4)]
    assert len(testing.messages(store, "errors")) == 1 and testing.state(store, "g.count") == {"n": 2}
    assert [m.get("mine") for m in meta(store, "out")] == [None, 1, None, None]


def test_several_bad_returns_in_one_step_without_an_error_queue(store: Store) -> None:
    """Messages 1 and 3 return what they may not: the step ends before 1, under the hash of [1, 2)."""
    feed(store, a=range(5))
    with pytest.raises(ProcessorStopped):
        run(store, Stream(lambda m: 7 if m["n"] % 2 else m, "a", "out", id="s"))
    assert numbers(store, "out") == [0]
    (_, attempt) = testing.messages(store, "g.s")
    assert attempt[HASH] == delivery_hash("g.s", 0, [("g.s.a", identity(store, "a"), 1, 2)])


def test_a_large_value_that_shrinks_leaves_nothing_behind(store: Store) -> None:
    def resize(message: Message, process: Any) -> Message:
        before = process.state.get("x")
        process.state["x"] = b"y" * message["n"]
        return {"n": None if before is None else len(before)}

    for size in (50_000, 10, 9000, 0, 5000):
        feed(store, a=[size])
        run(store, Stream(resize, "a", "out"))
    assert numbers(store, "out") == [None, 50_000, 10, 9000, 0]


# --- metadata -----------------------------------------------------------------------------------


def meta(store: Store, queue: str) -> list[Any]:
    return [message[META] for message in store.queue(queue).tailer(meta=True)]


def test_metadata_accumulates_from_queue_to_queue(store: Store) -> None:
    queues = {"a": {"metadata": {"t", "tx"}}, "b": {"metadata": {"t"}}, "c": {"metadata": {"t", "time"}}}
    graph = Graph(
        "g",
        [Stream(same, "a", "b", id="x"), Stream(lambda m: [m, m] if m["n"] else None, "b", "c", id="y")],
        queues=queues,
    )
    testing.run_until_idle(graph, store)
    feed(store, a=[0, 1, 2])
    testing.run_until_idle(graph, store)
    found = meta(store, "c")
    assert [(m["q/queue"]["a"]["q/t"], m["q/queue"]["b"]["q/t"], m["tx/t"]) for m in found] == [(2, 2, 2)] * 2 + [
        (3, 3, 3)
    ] * 2
    assert [m["q/queue"]["c"]["q/t"] for m in found] == [1, 2, 3, 4]
    assert all(set(m["q/queue"]) == {"a", "b", "c"} and "q/time" in m["q/queue"]["c"] for m in found)
    assert len({m["q/hash"] for m in found}) == 1


def test_a_join_merges_metadata(store: Store) -> None:
    def join(left: Message, right: Message, process: Any) -> Message:
        return {"n": process.metadata["q/queue"]["b"]["q/t"]}

    queues = {"a": {"metadata": {"t"}}, "b": {"metadata": {"t"}}}
    graph = Graph("g", [Stream(join, {"left": "a", "right": "b"}, "out")], queues=queues)
    testing.run_until_idle(graph, store)
    feed(
        store,
        a=[{"n": 1, "q/meta": {"user": {"x": 1}}}, 2],
        b=[0, {"n": 1, "q/meta": {"user": {"y": 2}, "more": True}}],
    )
    store.queue("b").purge(before=2)
    testing.run_until_idle(graph, store)
    found = meta(store, "out")
    assert numbers(store, "out") == [2]
    assert found[0]["q/queue"] == {"a": {"q/t": 1}, "b": {"q/t": 2}}
    assert found[0]["user"] == {"x": 1, "y": 2} and found[0]["more"] is True


def test_a_queue_with_metadata_false_strips_all_but_the_hash(store: Store) -> None:
    graph = Graph(
        "g",
        [Stream(lambda m: {"x": m, "y": {**m, "q/meta": {"mine": 1}}}, "a", {"x": "kept", "y": "bare"}, id="s")],
        queues={"a": {"metadata": True}, "bare": {"metadata": False}},
    )
    testing.run_until_idle(graph, store)
    feed(store, a=[1, 2])
    testing.run_until_idle(graph, store)
    assert [set(m) for m in meta(store, "kept")] == [{"q/hash", "q/queue"}] * 2
    assert [set(m) for m in meta(store, "bare")] == [{"q/hash"}] * 2


def test_a_function_adds_metadata(store: Store) -> None:
    graph = Graph(
        "g", [Stream(lambda m: {**m, "q/meta": {"by": m["n"]}}, "a", "out", id="s")], queues={"a": {"metadata": {"t"}}}
    )
    testing.run_until_idle(graph, store)
    feed(store, a=[1, 2])
    testing.run_until_idle(graph, store)
    assert [(m["by"], m["q/queue"]["a"]["q/t"]) for m in meta(store, "out")] == [(1, 1), (2, 2)]
    assert [set(m) for m in testing.messages(store, "out")] == [{"n"}] * 2


def test_error_messages_carry_metadata_and_hash(store: Store) -> None:
    graph = Graph("g", [Sink(lambda m: 1 // m["n"], "a", id="s")], errors="errors", queues={"a": {"metadata": {"t"}}})
    testing.run_until_idle(graph, store)
    feed(store, a=[1, 0, 1])
    testing.run_until_idle(graph, store)
    (found,) = meta(store, "errors")
    assert found["q/queue"] == {"a": {"q/t": 2}}
    assert found["q/hash"] == delivery_hash("g.s", 0, [("g.s.a", identity(store, "a"), 2, 3)])


def test_process_metadata_has_the_shape_of_the_envelopes(store: Store) -> None:
    seen: list[Any] = []
    graph = Graph(
        "g",
        [Stream(same, "a", "b", id="x"), Sink(lambda m, process: seen.append(process.metadata), "b", id="y")],
        queues={"a": {"metadata": True}, "b": {"metadata": True}},
    )
    testing.run_until_idle(graph, store)
    feed(store, a=range(3))
    testing.run_until_idle(graph, store)
    assert seen == meta(store, "b")


# --- hashes -------------------------------------------------------------------------------------


def test_a_messages_hash_does_not_depend_on_batches_filters_or_other_tailers(tmp_path: Path) -> None:
    import shutil

    made = tmp_path / "made"
    with cues.open(made, durability="process", map_size=4 << 20) as store:
        feed(store, a=range(20), b=range(100, 120))
    found = []
    for number, (size, where, feeds) in enumerate(
        [(1, None, 0), (7, None, 0), (1000, lambda m: True, 3), (3, lambda m: m["n"] != 1, 5)]
    ):
        path = tmp_path / f"copy-{number}"
        shutil.copytree(made, path)
        hashes: dict[Any, str] = {}

        def keep(message: Message, process: Any, hashes: dict[Any, str] = hashes) -> None:
            hashes[process.binding, message["n"]] = process.delivery_hash

        with cues.open(path) as store:
            feed(store, b=range(200, 200 + feeds))
            run(store, Sink(keep, AnyOf("a", "b"), batch_size=size, where=where))
            found.append({k: v for k, v in hashes.items() if k[1] < 200 and k[1] != 1})
            assert not testing.check_hashes(hashes.items())
    assert len(found[0]) == 39 and all(one == found[0] for one in found)


def test_outputs_carry_the_hash_of_their_step(store: Store) -> None:
    feed(store, a=range(5))
    run(store, Stream(same, "a", "out", id="s", batch_size=2))
    tailer = store.queue("out").tailer()
    hashes = []
    while tailer.read() is not None:
        assert tailer.envelope is not None
        hashes.append(tailer.envelope.hash)
    where = ("g.s.a", identity(store, "a"))
    steps = [delivery_hash("g.s", 0, [(*where, a, b)]) for a, b in ((1, 3), (3, 5), (5, 6))]
    assert hashes == [steps[0]] * 2 + [steps[1]] * 2 + [steps[2]]
    # Message functions, batch of one: the hash of the step is the hash of its message.
    assert steps[2] == delivery_hash("g.s", 0, [(*where, 5, 6)])


def test_the_hash_is_the_one_that_the_format_says(store: Store) -> None:
    import msgpack
    import xxhash

    ranges = [["g.s.b", b"87654321", 3, 4], ["g.s.a", b"12345678", 1, 2**40]]
    body = msgpack.packb([1, "g.s", 2, sorted(ranges), ["source", None, [1, "x"]]])
    tuples = [tuple(r) for r in ranges]
    assert delivery_hash("g.s", 2, tuples, ["source", None, [1, "x"]]) == xxhash.xxh3_128_hexdigest(body)  # type: ignore[arg-type]
    body = msgpack.packb([1, "g.s", 0, [ranges[0]], None])
    assert delivery_hash("g.s", 0, tuples[:1]) == xxhash.xxh3_128_hexdigest(body)  # type: ignore[arg-type]


# --- errors -------------------------------------------------------------------------------------


class Custom(Exception):
    pass


def test_an_error_message_says_everything(store: Store) -> None:
    def fail(message: Message, process: Any) -> Message:
        with cues.error_context(order=message["n"], where="outside"):
            try:
                with cues.error_context(where="inside", thing=object):
                    raise KeyError("inner")
            except KeyError as error:
                raise Custom("outer") from error

    feed(store, a=[{"n": 7, "more": [1]}])
    run(store, Stream(fail, "a", "out", opts={"x": 1}), errors="errors")
    (error,) = testing.messages(store, "errors")
    assert error[TYPE] == "q.type.err/processor"
    assert error["err.proc/messages"] == {"a": [{"n": 7, "more": [1]}]}
    config = error["err.proc/config"]
    assert (config["id"], config["kind"], config["opts"], config["errors"]) == ("g.fail", "stream", {"x": 1}, "errors")
    assert config["function"].startswith("test_delivery:") and config["inputs"] == {"a": "a"}
    outer, inner = error["err/cause"]
    assert outer["type"].endswith("Custom") and outer["message"] == "outer" and "in fail" in outer["trace"]
    assert "runner.py" not in outer["trace"], "a trace begins where the user's code does"
    assert inner["type"] == "KeyError" and "inner" in inner["trace"]
    # What was attached on the way, the outermost saying last; what cannot be encoded by its repr.
    assert error["err/context"] == {"order": 7, "where": "outside", "thing": repr(object)}


def test_a_failed_message_goes_to_the_error_queue_or_to_its_output_never_both(store: Store) -> None:
    def fail(message: Message) -> dict[str, Any]:
        if message["n"] % 3 == 1:
            raise ValueError
        return {"x": message, "y": [message] * 2 if message["n"] != 3 else [message, {"n": object()}]}

    feed(store, a=range(8))
    report = run(store, Stream(fail, "a", {"x": "x", "y": "y"}), errors="errors")
    assert numbers(store, "x") == [0, 2, 5, 6] and numbers(store, "y") == [0, 0, 2, 2, 5, 5, 6, 6]
    errors = testing.messages(store, "errors")
    assert [e["err.proc/messages"]["a"][0]["n"] for e in errors] == [1, 3, 4, 7]
    assert report.counters["fail"].failed == 4 and report.counters["fail"].taken == 8


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_queues_do_not_depend_on_batch_sizes(tmp_path: Path, size: int) -> None:
    def fail(message: Message, process: Any) -> Any:
        process.state["n"] = process.state.get("n", 0) + 1
        if message["n"] in (0, 3, 4, 9):
            raise ValueError(message["n"])
        return {"n": process.state["n"]}

    with cues.open(tmp_path / "store", durability="process") as store:
        feed(store, a=range(10))
        run(store, Stream(fail, "a", "out", batch_size=size), errors="errors")
        assert numbers(store, "out") == [1, 2, 3, 4, 5, 6]
        assert [e["err.proc/messages"]["a"][0]["n"] for e in testing.messages(store, "errors")] == [0, 3, 4, 9]
        hashes = {m[HASH] for m in testing.messages(store, "g.fail") if m[TYPE] == "q.type.try/error-attempt"}
        one = identity(store, "a")
        assert hashes == {delivery_hash("g.fail", 0, [("g.fail.a", one, i, i + 1)]) for i in (1, 4, 5, 10)}


BAD_RETURNS: list[tuple[str, Any, type[Exception], str]] = [
    ("a number", 7, ReturnError, "int"),
    ("a list with a number", [{"n": 1}, 7], ReturnError, "int"),
    ("an unencodable value", {"a": {"b": [1, object()]}}, CodecError, "a.b[1]"),
    ("a reserved key", {"n": 1, "q/hash": "x"}, ReservedKey, "q/hash"),
    ("metadata that is no dict", {"n": 1, "q/meta": 7}, Exception, "q/meta"),
]
BAD_FORKS: list[tuple[str, Any, type[Exception], str]] = [
    ("an unknown binding", {"z": {"n": 1}}, ReturnError, "'z'"),
    ("no dict by binding", [{"n": 1}], ReturnError, "list"),
    ("a number for a binding", {"x": {"n": 1}, "y": 7}, ReturnError, "'y'"),
    ("an unencodable value in one", {"x": {"n": 1}, "y": {"n": object()}}, CodecError, "n"),
]


@pytest.mark.parametrize("touch", [False, True], ids=["stateless", "stateful"])
@pytest.mark.parametrize("side_effects", [False, True], ids=["pure", "side effects"])
@pytest.mark.parametrize(("value", "kind", "word"), [c[1:] for c in BAD_RETURNS], ids=[c[0] for c in BAD_RETURNS])
def test_a_bad_return_takes_the_error_path(
    store: Store, value: Any, kind: type[Exception], word: str, touch: bool, side_effects: bool
) -> None:
    def bad(message: Message, process: Any) -> Any:
        if touch:
            process.state["n"] = process.state.get("n", 0) + 1
        return value if message["n"] == 1 else message

    stream = Stream(bad, "a", "out", side_effects=side_effects)
    feed(store, a=range(3))
    with pytest.raises(ProcessorStopped) as caught:
        run(store, stream)
    assert isinstance(caught.value.__cause__, kind) and word in str(caught.value.__cause__)
    assert numbers(store, "out") == [0]
    assert testing.contents(store)["positions"] == {"g.bad.a": 2}
    run(store, stream, errors="errors")
    assert numbers(store, "out") == [0, 2]
    (error,) = testing.messages(store, "errors")
    assert word in error["err/cause"][0]["message"] and error["err.proc/messages"] == {"a": [{"n": 1}]}
    assert testing.state(store, "g.bad") == ({"n": 2} if touch else {})


@pytest.mark.parametrize(("value", "kind", "word"), [c[1:] for c in BAD_FORKS], ids=[c[0] for c in BAD_FORKS])
def test_a_bad_fork_takes_the_error_path_whole(store: Store, value: Any, kind: type[Exception], word: str) -> None:
    def bad(message: Message) -> Any:
        return value if message["n"] == 1 else {"x": message, "y": message}

    feed(store, a=range(3))
    with pytest.raises(ProcessorStopped) as caught:
        run(store, Stream(bad, "a", {"x": "x", "y": "y"}))
    assert isinstance(caught.value.__cause__, kind) and word in str(caught.value.__cause__)
    run(store, Stream(bad, "a", {"x": "x", "y": "y"}), errors="errors")
    assert numbers(store, "x") == numbers(store, "y") == [0, 2]
    assert len(testing.messages(store, "errors")) == 1


def test_a_message_over_the_limit_takes_the_error_path(store: Store) -> None:
    store.queue("out", max_message_bytes=100)
    feed(store, a=[1, 2, 3])
    run(store, Stream(lambda m: {"n": m["n"], "x": "y" * 200 * (m["n"] == 2)}, "a", "out", id="s"), errors="errors")
    assert numbers(store, "out") == [1, 3]
    assert "MessageTooLarge" in testing.messages(store, "errors")[0]["err/cause"][0]["type"]


@pytest.mark.parametrize("more", [{"x": "y" * 200}, {"x": "y" * 200, META: {"k": 1}}, {META: {"k": "y" * 5000}}])
def test_an_output_that_fits_nowhere_leaves_no_state(store: Store, more: Message) -> None:
    """It is its own call's failure, before the state is settled: an error step has no outputs and no state."""

    def count(message: Message, process: Any) -> Message:
        process.state["n"] = process.state.get("n", 0) + 1
        return {"n": process.state["n"], **(more if message["n"] == 2 else {})}

    store.queue("out", max_message_bytes=100)
    feed(store, a=[1, 2, 3])
    run(store, Stream(count, "a", "out"), errors="errors")
    assert numbers(store, "out") == [1, 2]
    assert testing.state(store, "g.count") == {"n": 2}
    assert len(testing.messages(store, "errors")) == 1


@pytest.mark.interpreted
def test_state_that_is_only_read_is_not_kept_in_memory_for_ever(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "CACHE_ROWS_MAX", 50)
    sizes: list[int] = []

    def look(message: Message, process: Any) -> None:
        process.state_of(message["n"]).get("seen")
        sizes.append(len(process.core.layer._table._cache))

    feed(store, a=range(500))
    run(store, Sink(look, "a", batch_size=10))
    assert max(sizes) <= 60


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Slotted(Exception):
    __slots__ = ()


@pytest.mark.parametrize("error", [Rude(), ValueError("\ud800"), ValueError("x" * 10**6), ValueError(object())])
def test_whatever_an_error_is_like_its_message_reaches_the_error_queue(store: Store, error: Exception) -> None:
    def fail(message: Message) -> None:
        raise error

    feed(store, a=[1])
    run(store, Sink(fail, "a", opts=object()), errors="errors")
    (found,) = testing.messages(store, "errors")
    assert found["err/cause"][0]["type"].endswith(type(error).__name__)


def test_a_failed_message_of_any_depth_reaches_the_error_queue(store: Store) -> None:
    """The record adds levels around the message; msgpack could not write it, and the processor stopped."""

    def deep(levels: int) -> list[Any]:
        value: list[Any] = []
        for _ in range(levels):
            value = [value]
        return value

    def fail(message: dict[str, Any]) -> None:
        raise ValueError("no")

    written = 0
    for levels in range(1010, 1030):
        try:
            store.queue("in").appender().write({"x": deep(levels)})
        except CodecError:
            break
        written += 1
    assert 5 < written < 20
    testing.run_until_idle(Graph("g", [Sink(fail, "in", id="s", retries=0)], errors="errors"), store)
    records = testing.messages(store, "errors")
    assert len(records) == written
    texts = [record["err.proc/messages"]["in"][0].get("repr") for record in records]
    assert texts[0] is None and str(texts[-1]).startswith("{'x': [[")


def test_without_an_error_queue_the_processor_stops_in_front_of_the_message(store: Store) -> None:
    calls: list[int] = []

    def fail(message: Message) -> Message:
        calls.append(message["n"])
        if message["n"] == 2:
            raise Custom("two")
        return message

    feed(store, a=range(5))
    report = run(store, Stream(fail, "a", "out"), Stream(same, "out", "end"), stopped="return")
    error = report.stopped["fail"]
    assert isinstance(error, ProcessorStopped) and isinstance(error.__cause__, Custom) and error.processor == "g.fail"
    assert numbers(store, "out") == numbers(store, "end") == [0, 1] and calls == [0, 1, 2]
    assert testing.contents(store)["positions"]["g.fail.a"] == 3
    run(store, Stream(same, "a", "out", id="fail"))
    assert numbers(store, "out") == [0, 1, 2, 3, 4]


def test_a_stopped_sink_repeats_its_range_and_nothing_before(store: Store) -> None:
    """A sink is killed by an error at its third message: the two before are committed, it alone is called again."""
    calls: list[tuple[int, str]] = []

    def fail(message: Message, process: Any) -> None:
        calls.append((message["n"], process.delivery_hash))
        if message["n"] == 2 and len(calls) == 3:
            raise Custom

    feed(store, a=range(4))
    with pytest.raises(ProcessorStopped):
        run(store, Sink(fail, "a"))
    run(store, Sink(fail, "a"))
    assert [n for n, _ in calls] == [0, 1, 2, 2, 3]
    assert not testing.check_hashes(calls)


# --- retries ------------------------------------------------------------------------------------


def test_retries_back_off_and_then_give_up(store: Store) -> None:
    calls: list[int] = []

    def fail(message: Message) -> Message:
        message["spoiled"] = True
        calls.append(message["n"])
        if message["n"] == 1:
            raise OSError("down")
        if message["n"] == 2 and calls.count(2) == 1:
            raise OSError("once")
        assert set(message) == {"n", "spoiled"}
        return {"n": message["n"]}

    feed(store, a=range(4))
    report = run(store, Stream(fail, "a", "out", retries=Retry(4, backoff_s=1, max_s=3)), errors="errors")
    assert numbers(store, "out") == [0, 2, 3] and calls == [0, 1, 1, 1, 1, 2, 2, 3]
    assert report.waits_s == [1, 2, 3, 1]
    (error,) = testing.messages(store, "errors")
    assert error["err.proc/config"]["attempt"] == error["err.proc/config"]["attempts"] == 4
    assert error["err.proc/messages"] == {"a": [{"n": 1}]}
    assert report.counters["fail"].retries == 4


def test_retries_on_some_exceptions_only(store: Store) -> None:
    calls: list[int] = []

    def fail(message: Message) -> None:
        calls.append(message["n"])
        raise [ValueError, ConnectionError][message["n"]]

    feed(store, a=range(2))
    run(store, Sink(fail, "a", retries=Retry(3, on=(OSError, KeyError))), errors="errors")
    assert calls == [0, 1, 1, 1]
    assert [e["err.proc/config"]["attempt"] for e in testing.messages(store, "errors")] == [1, 3]


def test_retries_of_a_batch_function_get_fresh_messages(store: Store) -> None:
    calls: list[Any] = []

    def fail(messages: list[Message]) -> list[Message]:
        calls.append([dict(m) for m in messages])
        for message in messages:
            message["n"] = -1
        if len(calls) < 3:
            raise OSError
        return messages

    feed(store, a=[1, 2])
    run(store, Stream(fail, "a", "out", batch=True, retries=2, step_s=None))
    assert calls == [[{"n": 1}, {"n": 2}]] * 3 and numbers(store, "out") == [-1, -1]


# --- at most once -------------------------------------------------------------------------------


def test_at_most_once_moves_before_it_runs(store: Store) -> None:
    seen: list[Any] = []

    def look(message: Message, process: Any) -> Message:
        with store.core.view() as txn:
            from cues.graphs.processor_rows import read_row

            row = read_row(txn, "g.look")
        assert row is not None
        seen.append((message["n"], row.positions[0].next))
        return message

    feed(store, a=range(4))
    run(store, Stream(look, "a", "out", strategy="at-most-once", batch_size=2))
    assert seen == [(0, 3), (1, 3), (2, 5), (3, 5)] and numbers(store, "out") == [0, 1, 2, 3]


def test_at_most_once_with_an_error_queue_loses_nothing(store: Store) -> None:
    def fail(message: Message) -> Message:
        return {"n": 6 // message["n"]} if message["n"] != 2 else {"n": object()}

    feed(store, a=range(4))
    run(store, Stream(fail, "a", "out", strategy="at-most-once"), errors="errors")
    assert numbers(store, "out") == [6, 2]
    assert [e["err.proc/messages"]["a"][0]["n"] for e in testing.messages(store, "errors")] == [0, 2]


def test_at_most_once_crashed_in_its_function_never_calls_it_again(store: Store) -> None:
    calls: list[int] = []
    feed(store, a=range(6))
    sink = Sink(lambda m: calls.append(m["n"]), "a", id="s", strategy="at-most-once", batch_size=3)
    with testing.crash("function.after", 2, how="raise"), pytest.raises(testing.Crashed):
        run(store, sink)
    report = run(store, sink)
    assert calls == [0, 1, 3, 4, 5] and report.decisions == {"s": "void"}


# --- sources ------------------------------------------------------------------------------------


def test_a_source_continues_at_its_position(store: Store) -> None:
    starts: list[Any] = []

    def source(position: Any) -> Any:
        starts.append(position)
        at = position[1] if position else 0
        for n in range(at, at + 5):
            yield ["page", n + 1], {"n": n}

    run(store, Source("a", source, batch_size=2))
    run(store, Source("a", source, batch_size=2))
    assert numbers(store, "a") == list(range(10)) and starts == [None, ["page", 5]]
    assert testing.contents(store)["sources"] == {"g.a": [["page", 10], 0]}


@pytest.mark.parametrize(("resume", "expected"), [("skip", [0, 1, 2, 3]), ("again", [0, 1, 2, 0, 1, 2, 3])])
def test_a_source_of_bare_messages_skips_or_begins_again(store: Store, resume: str, expected: list[int]) -> None:
    def source() -> Any:
        yield from ({"n": n} for n in range(count))

    for count in (3, 4):  # noqa: B007 - read by the source
        run(store, Source("a", source, batch_size=2, resume=resume))
    assert numbers(store, "a") == expected


def test_a_source_of_positions_may_have_a_resume_that_it_does_not_need(store: Store) -> None:
    """Integer positions are positions, whatever ``resume`` says of bare messages."""

    def source(position: int | None) -> Any:
        for n in range((position or 0), 4):
            yield n + 1, {"n": n}

    for _ in range(2):
        run(store, Source("a", source, batch_size=3, resume="skip"))
    assert numbers(store, "a") == [0, 1, 2, 3]


def test_a_source_of_bare_messages_must_say_what_a_restart_means(store: Store) -> None:
    with pytest.raises(ProcessorStopped) as caught:
        run(store, Source("a", lambda position: [{"n": 1}]), errors="errors")
    assert isinstance(caught.value.__cause__, PositionRequired)
    assert "resume='skip'" in str(caught.value.__cause__) and "resume='again'" in str(caught.value.__cause__)
    assert numbers(store, "a") == []


@pytest.mark.parametrize(
    ("yielded", "kind"),
    [(7, ReturnError), ("text", ReturnError), ((1, 2, 3), ReturnError), (None, ReturnError)],
)
def test_a_source_that_yields_something_else_stops_after_the_messages_before_it(
    store: Store, yielded: Any, kind: type[Exception]
) -> None:
    with pytest.raises(ProcessorStopped) as caught:
        run(store, Source("a", lambda position: iter([(1, {"n": 1}), yielded])))
    assert isinstance(caught.value.__cause__, kind)
    assert numbers(store, "a") == [1]


def test_a_source_that_cannot_be_iterated(store: Store) -> None:
    with pytest.raises(ProcessorStopped, match="NoneType"):
        run(store, Source("a", lambda position: None))


@pytest.mark.parametrize("bad", [{"n": object()}, {"q/hash": 1}, "text"], ids=["encode", "reserved", "no dict"])
@pytest.mark.parametrize("size", [1, 100])
def test_a_message_of_a_source_that_cannot_be_written(store: Store, bad: Any, size: int) -> None:
    """It is on the error queue once, in its place; without one the source stops after the messages before it."""

    def source(position: int | None) -> Any:
        for n in range(position or 0, 5):
            yield n + 1, bad if n in (2, 3) else {"n": n}

    with pytest.raises(ProcessorStopped):
        run(store, Source("a", source, batch_size=size))
    assert numbers(store, "a") == [0, 1]
    assert testing.contents(store)["sources"] == {"g.a": [2, 0]}
    run(store, Source("a", source, batch_size=size), errors="errors")
    assert numbers(store, "a") == [0, 1, 4]
    errors = testing.messages(store, "errors")
    assert len(errors) == 2 and all("repr" in e["err.proc/messages"]["a"][0] for e in errors)


def test_a_position_that_cannot_be_encoded_stops_the_source(store: Store) -> None:
    with pytest.raises(ProcessorStopped) as caught:
        run(store, Source("a", lambda position: [(object(), {"n": 1})]))
    assert isinstance(caught.value.__cause__, CodecError)
    assert numbers(store, "a") == []


def test_a_source_that_fails_is_called_again_from_what_is_committed(store: Store) -> None:
    starts: list[Any] = []

    def source(position: int | None) -> Any:
        starts.append(position)
        for n in range(position or 0, 4):
            if n == 2 and len(starts) < 3:
                raise OSError("down")
            yield n + 1, {"n": n}

    report = run(store, Source("a", source, retries=Retry(3, backoff_s=0.5)))
    assert numbers(store, "a") == [0, 1, 2, 3] and starts == [None, 2, 2] and report.waits_s == [0.5, 1.0]
    starts.clear()
    with pytest.raises(ProcessorStopped) as caught:
        run(store, Source("b", source))
    assert isinstance(caught.value.__cause__, OSError) and numbers(store, "b") == [0, 1]


def test_a_source_may_ask_for_process_alone_or_for_nothing(store: Store) -> None:
    def only_process(process: Any) -> Any:
        yield {"n": process.opts}
        with pytest.raises(cues.CuesError):
            _ = process.state

    run(
        store,
        Source("a", only_process, opts=7, resume="skip"),
        Source("b", lambda: [{"n": 8}], resume="again"),
        Source("c", lambda position, process: [(process.id, {"n": position})]),
    )
    assert (numbers(store, "a"), numbers(store, "b"), numbers(store, "c")) == ([7], [8], [None])


def test_a_type_or_topics_of_another_kind_match_nothing_and_fail_nothing(store: Store) -> None:
    odd: list[Any] = [5, 1.5, True, b"x", {"t": 1}, [["t"]], [{"t": 1}], [None, 5], ["t", ["t"]]]
    feed(store, a=[*({"n": n, "q/topics": value} for n, value in enumerate(odd)), {"n": 90, "q/topics": ("u", "t")}])
    feed(store, b=[{"n": n, "q/type": value} for n, value in enumerate([*odd, "x"])])
    run(
        store,
        Stream(same, "a", "topics", id="topics", topics={"t"}),
        Stream(same, "b", "types", id="types", types={"x", "t"}),
        Stream(lambda batch: batch, "a", "whole", id="whole", topics="t", batch=True),
        errors="errors",
    )
    assert numbers(store, "topics") == numbers(store, "whole") == [8, 90] and numbers(store, "types") == [9]
    assert numbers(store, "errors") == []


@pytest.mark.parametrize("resume", ["skip", "again"])
def test_a_source_that_yields_positions_and_takes_none_is_stopped_before_it_writes(store: Store, resume: str) -> None:
    """The next start would call it without the position, and what it yields would be written once more."""

    def numbers_again() -> Any:
        yield from ((n, {"n": n}) for n in range(4))

    for _ in range(2):
        with pytest.raises(ProcessorStopped) as caught:
            run(store, Source("a", numbers_again, resume=resume), errors="errors")
        assert isinstance(caught.value.__cause__, PositionRequired)
        assert "def numbers_again(position)" in str(caught.value.__cause__)
    assert numbers(store, "a") == []


@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_message_without_its_key_fails_by_itself(store: Store, concurrency: int, batch: int) -> None:
    """Misspelt, ``key="usr"`` would keep the state of all users under one key, and say nothing."""

    def count(message: dict[str, Any], process: Any) -> dict[str, Any]:
        process.state["n"] = process.state.get("n", 0) + 1
        return {"user": message["user"], "n": process.state["n"]}

    sent = [{"user": "ann"}, {"usr": "ann"}, {"user": None}, {"user": "ann"}, {"user": "bob"}]
    feed(store, a=sent)
    run(
        store,
        Stream(count, "a", "out", key="user", concurrency=concurrency, batch_size=batch),
        errors="errors",
    )
    assert testing.messages(store, "out") == [{"user": "ann", "n": 1}, {"user": "ann", "n": 2}, {"user": "bob", "n": 1}]
    causes = [one["err/cause"][0] for one in testing.messages(store, "errors")]
    assert [cause["type"] for cause in causes] == ["cues.errors.InvalidArgument"] * 2
    assert "no 'user', the key= of g.count; it has 'usr'" in causes[0]["message"]
    assert "key='usr'" in causes[0]["message"] and "it is None" in causes[1]["message"]


def test_calls_at_once_fail_without_their_key_though_they_ask_for_no_state(store: Store) -> None:
    """The key is their order as well: those of one key run one after another."""
    feed(store, a=[{"usr": 1}, {"user": 1}])
    run(store, Stream(lambda m: m, "a", "out", id="s", key="user", concurrency=2), errors="errors")
    assert testing.messages(store, "out") == [{"user": 1}] and len(testing.messages(store, "errors")) == 1


# --- threads ------------------------------------------------------------------------------------


def test_start_send_wait_and_messages(tmp_path: Path) -> None:
    graph = Graph("g", [Source("a"), Stream(lambda m: {"n": m["n"] * 2}, "a", "out", id="s")])
    with graph.start(store=tmp_path / "store") as running:
        assert running.send({"n": 1}) == 1 and running.send("a", {"n": 2}) == 2
        assert running.wait_idle(timeout=60)
        assert running.messages("out") == [{"n": 2}, {"n": 4}]
        with pytest.raises(cues.QueueNotFound, match="'nothing'"):
            running.send("nothing", {})
        with pytest.raises(cues.errors.InvalidArgument):
            running.send("a", {"n": 1}, 3)
        running.send({"n": 3})
    with cues.open(tmp_path / "store") as store:  # leaving drains
        assert numbers(store, "out") == [2, 4, 6]
    with pytest.raises(cues.errors.Closed):
        running.send({"n": 1})


def test_run_ends_when_every_source_has_and_all_is_drained(tmp_path: Path) -> None:
    seen: list[int] = []
    graph = Graph(
        "g",
        [
            Source("a", lambda position: ((n + 1, {"n": n}) for n in range(position or 0, 2500))),
            Stream(same, "a", "b"),
            Sink(lambda m: seen.append(m["n"]), "b", id="sink"),
        ],
        store=tmp_path / "store",
        durability="process",
    )
    graph.run()
    assert seen == list(range(2500))
    graph.run()
    assert len(seen) == 2500


def test_wait_idle_raises_what_stopped_a_processor_and_so_does_leaving(tmp_path: Path) -> None:
    graph = Graph("g", [Source("a"), Stream(lambda m: 1 / 0, "a", "out", id="s")])
    running = graph.start(store=tmp_path / "store")
    running.send({"n": 1})
    with pytest.raises(ProcessorStopped) as caught:
        running.wait_idle(timeout=60)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ProcessorStopped), running:
        pass


def test_wait_idle_gives_up_at_its_timeout(tmp_path: Path) -> None:
    release = threading.Event()
    graph = Graph("g", [Source("a"), Sink(lambda m: release.wait(60), "a", id="s")])
    with graph.start(store=tmp_path / "store") as running:
        running.send({"n": 1})
        assert running.wait_idle(timeout=0.1) is False
        release.set()
        assert running.wait_idle(timeout=60) is True


@pytest.mark.interpreted
def test_what_a_source_yielded_before_it_failed_is_committed_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator yields and fails between the step's look for messages and its look for an error."""

    def source(position: Any) -> Iterator[tuple[int, Message]]:
        yield 1, {"n": 1}
        raise ValueError("no more")

    assembled = assemble(Graph("g", [Source("a", source)]), store)
    (stepper,) = assembled.steppers
    assert isinstance(stepper, SourceStepper)
    feed, take = stepper.feed, stepper.feed.take

    def late(count: int) -> list[Any]:
        found = take(count)
        feed.run()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(feed, "take", late)
        assert stepper.step() == "idle"
    assert stepper.step() == "committed"
    with pytest.raises(ProcessorStopped):
        stepper.step()
    assert numbers(store, "a") == [1]
    assembled.close()


@pytest.mark.parametrize("mode", ["one", "alts", "join"])
def test_a_graph_is_idle_when_what_was_left_to_take_is_purged(store: Store, mode: str) -> None:
    """The position is before messages that were purged, so no step will ever take them."""

    def name(message: Message) -> Message:
        return message

    def pair(a: Message, b: Message) -> Message:
        return a

    stream = {
        "one": Stream(name, "a", "out", id="s"),
        "alts": Stream(name, AnyOf("a", "b"), "out", id="s"),
        "join": Stream(pair, {"a": "a", "b": "b"}, "out", id="s"),
    }[mode]
    feed(store, a=range(3), b=range(3))
    run(store, stream)
    feed(store, a=range(3), b=range(3))
    store.queue("a").delete()
    if mode != "join":
        store.queue("b").delete()
    with Graph("g", [stream]).start(store=store) as running:
        assert running.wait_idle(timeout=60)


@pytest.mark.parametrize("strategy", ["exactly-once", "at-most-once"])
def test_a_graph_is_not_idle_while_a_function_runs(tmp_path: Path, strategy: str) -> None:
    """At most once, positions move before the function runs: they alone would say that all is done."""
    inside, release = threading.Event(), threading.Event()

    def slow(message: Message) -> Message:
        inside.set()
        release.wait(60)
        return message

    graph = Graph("g", [Source("a"), Stream(slow, "a", "b", strategy=strategy), Stream(same, "b", "c")])
    with graph.start(store=tmp_path / "store") as running:
        running.send({"n": 1})
        assert inside.wait(60)
        assert running.wait_idle(timeout=0.2) is False
        release.set()
        assert running.wait_idle(timeout=60)
        assert running.messages("c") == [{"n": 1}]


def test_draining_stops_a_live_source_and_finishes_the_rest(tmp_path: Path) -> None:
    started = threading.Event()

    def live(position: int | None, process: Any) -> Any:
        n = position or 0
        while not process.stopping:
            n += 1
            yield n, {"n": n}
            if n >= 20:
                started.set()

    graph = Graph("g", [Source("a", live), Stream(same, "a", "b")], durability="process")
    with graph.start(store=tmp_path / "store") as running:
        assert started.wait(60)
        assert running.drain(timeout=60)
    with cues.open(tmp_path / "store") as store:
        made = numbers(store, "a")
        assert made == list(range(1, len(made) + 1)) and numbers(store, "b") == made and len(made) >= 20


def test_a_slow_source_does_not_hold_up_what_it_yielded(tmp_path: Path) -> None:
    release = threading.Event()

    def slow(position: Any) -> Any:
        yield 1, {"n": 1}
        release.wait(60)
        yield 2, {"n": 2}

    with Graph("g", [Source("a", slow), Stream(same, "a", "b")]).start(store=tmp_path / "store") as running:
        tailer = running.store.queue("b").tailer()
        assert tailer.read(block=True, timeout=60) == {"n": 1}
        release.set()
        assert tailer.read(block=True, timeout=60) == {"n": 2}


def test_a_retry_in_its_pause_is_interrupted_by_closing(tmp_path: Path) -> None:
    called = threading.Event()

    def fail(message: Message) -> None:
        called.set()
        raise OSError

    running = Graph("g", [Source("a"), Sink(fail, "a", retries=Retry(2, backoff_s=3600, max_s=3600))]).start(
        store=tmp_path / "store"
    )
    running.send({"n": 1})
    assert called.wait(60)
    running.close(timeout=10)
    assert not any(worker.thread.is_alive() for worker in running.engine.workers)


def test_concurrent_writers_and_a_graph_keep_every_message_in_each_writers_order(tmp_path: Path) -> None:
    graph = Graph("g", [Source("a"), Stream(same, "a", "out", batch_size=7)], durability="process")
    with graph.start(store=tmp_path / "store") as running:

        def write(who: int) -> None:
            appender = running.store.queue("a").appender()
            for n in range(200):
                appender.write({"who": who, "n": n})

        writers = [threading.Thread(target=write, args=(who,)) for who in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert running.wait_idle(timeout=60)
        expected = {who: [{"who": who, "n": n} for n in range(200)] for who in range(4)}
        testing.check_history(expected, running.messages("out")).expect_exact()


def test_what_happens_is_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    graph = Graph("g", [Source("a"), Sink(lambda m: 1 / 0, "a", id="s")], errors="errors")
    with caplog.at_level(logging.INFO, "cues"), graph.start(store=store) as running:
        running.send({"n": 1})
        running.wait_idle(timeout=60)
    assert any("g.s" in r.getMessage() and "fresh" in r.getMessage() for r in caplog.records)
    assert any("ZeroDivisionError" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


@pytest.mark.parametrize("seed", seeds.among(range(5)))
def test_any_interleaving_gives_the_same_queues(store: Store, seed: int) -> None:
    print(f"CUES_TEST_SEED={seed}")
    feed(store, a=range(30))
    graph = Graph(
        "g",
        [
            Stream(
                lambda m: {"odd" if m["n"] % 2 else "even": m}, "a", {"even": "x", "odd": "y"}, id="fork", batch_size=3
            ),
            Stream(lambda x, y: {"n": x["n"] * 100 + y["n"]}, {"x": "x", "y": "y"}, "z", id="join", batch_size=2),
        ],
        queues={"*": QueueOptions(metadata={"t"})},
    )
    testing.run_until_idle(graph, store, seed=seed)
    assert numbers(store, "z") == [n * 100 + n + 1 for n in range(0, 30, 2)]
