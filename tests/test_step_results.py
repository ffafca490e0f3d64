"""A step commits the result of each call as it was when the call returned, whatever later calls do.

Every test here has messages of one step of which some are wrong, or share an object that continues to change.
Queues, state and positions are those of one message at a time.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import seeds

import cues
from cues import Graph, QueueOptions, Sink, Source, Stream, codec, testing
from cues.base import names
from cues.queues.partitioners import partition_for
from cues.queues.store import Store
from cues.records import batch as batches
from cues.steps.results import Output, Results
from cues.steps.tries import Taking

Message = dict[str, Any]
SIZES = [1, 2, 1000]


def _run(store: Store, graph: Graph) -> None:
    testing.run_until_idle(graph, store)


def _numbers(count: int) -> list[Message]:
    return [{"n": n} for n in range(count)]


# --- state and positions beside an output that cannot be written ---


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("wrong", ["no msgpack", "no dict", "no key"])
def test_a_wrong_output_before_a_failure_leaves_no_state_of_later_messages(
    store: Store, wrong: str, concurrency: int
) -> None:
    """Message 1 returns what cannot be written, 2 counts, 3 raises; without an error queue all but 0 is void."""
    outputs = {"no msgpack": {"o": object()}, "no dict": [1], "no key": {"x": 1}}
    if wrong == "no key":
        store.queue("out", partitions=2, key="n")
    store.queue("in").appender().write_many(_numbers(4))
    broken = [True]

    def count(message: Message, process: Any) -> Any:
        if broken and message["n"] == 1:
            return outputs[wrong]
        if broken and message["n"] == 3:
            raise ValueError(3)
        if message["n"] in (0, 2):
            process.state["count"] = process.state.get("count", 0) + 1
            return {"n": message["n"], "count": process.state["count"]}
        return message

    options: dict[str, Any] = {"key": lambda message: message["n"] % 2, "concurrency": concurrency}
    graph = Graph("g", [Stream(count, "in", "out", id="s", **options)])
    with pytest.raises(cues.ProcessorStopped):
        _run(store, graph)
    assert [m["n"] for m in testing.messages(store, "out")] == [0]
    broken.clear()
    _run(store, graph)
    found = sorted(testing.messages(store, "out"), key=lambda message: message["n"])
    assert [message.get("count") for message in found] == [1, None, 2, None]


@pytest.mark.parametrize("errors", [None, "errors"])
def test_positions_of_imperative_tailers_stay_with_their_message(store: Store, errors: str | None) -> None:
    """An appender's message without a key is the failure of its call: what the call read is read by the next."""
    store.queue("log", partitions=2, key="n")
    store.queue("in").appender().write_many(_numbers(4))
    store.queue("rates").appender().write_many([{"rate": rate} for rate in range(4)])
    broken = [True]

    def look(message: Message, process: Any) -> Message:
        rate = process.tailers["rates"].read()["rate"]
        process.appenders["log"].write({} if broken and message["n"] == 1 else {"n": message["n"]})
        return {"n": message["n"], "rate": rate}

    stream = Stream(look, "in", "out", id="s", tailers={"rates": "rates"}, appenders={"log": "log"})
    graph = Graph("g", [stream], errors=errors)
    if errors is None:
        with pytest.raises(cues.ProcessorStopped, match="'n'"):
            _run(store, graph)
        broken.clear()
    _run(store, graph)
    expected = [(0, 0), (2, 1), (3, 2)] if errors else [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [(m["n"], m["rate"]) for m in testing.messages(store, "out")] == expected


def test_metadata_that_fits_no_page_is_the_failure_of_its_call(store: Store) -> None:
    """The provenance of both inputs of a join fits a page each and not together; the state does not count it."""
    large = {"q/meta": {"note": "x" * 2_500}}
    store.queue("a").appender().write_many([{"n": 0}, {"n": 1} | large, {"n": 2}])
    store.queue("b").appender().write_many([{}, {"q/meta": {"other": "y" * 2_500}}, {}])

    def count(a: Message, b: Message, process: Any) -> Message:
        process.state["count"] = process.state.get("count", 0) + 1
        return {"n": a["n"], "count": process.state["count"]}

    _run(store, Graph("g", [Stream(count, {"a": "a", "b": "b"}, "out", id="s")], errors="errors"))
    assert testing.messages(store, "out") == [{"n": 0, "count": 1}, {"n": 2, "count": 2}]
    (error,) = testing.messages(store, "errors")
    assert "does not fit in a page" in error["err/cause"][0]["message"]


# --- objects that continue to change ---


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["plain", "fork", "list", "at once", "async", "meta"])
def test_results_that_share_a_mutable_object_are_those_of_their_calls(store: Store, kind: str, size: int) -> None:
    store.queue("in").appender().write_many([{"n": 1}] * 6)
    shared: Message = {"sum": 0, "seen": []}
    if kind == "meta":
        shared["q/meta"] = {"sum": 0}

    def add(message: Message) -> Message:
        shared["sum"] += message["n"]
        shared["seen"].append(shared["sum"])
        if kind == "meta":
            shared["q/meta"]["sum"] += 1
        return shared

    async def add_later(message: Message) -> Message:
        await asyncio.sleep(0)
        return add(message)

    functions: dict[str, Any] = {
        "fork": lambda message: {"out": add(message), "other": shared},
        "list": lambda message: [add(message)],
        "async": add_later,
    }
    options: dict[str, Any] = {"batch_size": size}
    if kind == "at once":
        options |= {"concurrency": 4, "key": lambda message: 0}  # one lane
    outputs: Any = {"out": "out", "other": "other"} if kind == "fork" else "out"
    _run(store, Graph("g", [Stream(functions.get(kind, add), "in", outputs, id="s", **options)]))
    expected = [{"sum": n, "seen": list(range(1, n + 1))} for n in range(1, 7)]
    for queue in outputs if kind == "fork" else ["out"]:
        assert testing.messages(store, queue) == expected
    if kind == "meta":
        assert [m["q/meta"]["sum"] for m in store.queue("out").tailer(meta=True)] == list(range(1, 7))


@pytest.mark.parametrize("size", SIZES)
def test_what_appenders_were_given_and_state_held_is_what_it_was_then(store: Store, size: int) -> None:
    store.queue("in").appender().write_many(_numbers(5))
    shared: Message = {"seen": [], "q/meta": {"n": 0}}

    def look(message: Message, process: Any) -> None:
        shared["seen"].append(message["n"])
        shared["q/meta"]["n"] = message["n"]
        process.appenders["log"].write(shared)
        before = process.state.get("seen", [])
        process.state["seen"] = shared["seen"]
        process.appenders["log"].write({"before": before})

    _run(store, Graph("g", [Stream(look, "in", [], id="s", appenders={"log": "log"}, batch_size=size)]))
    found = testing.messages(store, "log")
    assert found[0::2] == [{"seen": list(range(n + 1))} for n in range(5)]
    assert found[1::2] == [{"before": list(range(n))} for n in range(5)]


@pytest.mark.parametrize("size", SIZES)
def test_a_source_may_continue_to_change_its_position_and_its_message(store: Store, size: int) -> None:
    """Each step's position is that of its last message, so a generator that fails continues after that."""

    def rows(position: Any) -> Iterator[tuple[Message, Message]]:
        at = dict(position or {"file": "a", "line": 0})
        row: Message = {}
        while at["line"] < 7:
            at["line"] += 1
            row["n"] = at["line"]
            yield at, row
            if position is None and at["line"] == 3:
                at["line"] = 99
                row["n"] = 99
                raise ValueError("again")

    _run(store, Graph("g", [Source("rows", rows, batch_size=size, retries=1)]))
    assert [message["n"] for message in testing.messages(store, "rows")] == list(range(1, 8))


# --- sources that yield a position twice ---


@pytest.mark.parametrize("size", SIZES)
def test_a_repeated_position_is_refused_at_once_and_by_name(store: Store, size: int) -> None:
    def pages(position: Any) -> Iterator[tuple[str, Message]]:
        yield "page-1", {"n": 1}
        yield "page-1", {"n": 2}

    with pytest.raises(cues.ProcessorStopped, match="'pages' yielded the position 'page-1' twice in a row"):
        _run(store, Graph("g", [Source("pages", pages, batch_size=size, retries=3)], errors="errors"))
    assert testing.messages(store, "pages") == [{"n": 1}]


def test_a_source_that_begins_with_the_position_that_it_was_given_is_refused(store: Store) -> None:
    """Its message would be there twice."""

    def rows(position: int | None) -> Iterator[tuple[int, Message]]:
        for n in range(position or 0, 3 if position is None else 6):
            yield n, {"n": n}

    graph = Graph("g", [Source("rows", rows)])
    _run(store, graph)
    with pytest.raises(cues.ProcessorStopped, match="'rows' yielded the position 2 twice in a row"):
        _run(store, graph)
    assert [message["n"] for message in testing.messages(store, "rows")] == [0, 1, 2]


# --- coroutines and generators among the results of a plain sink ---


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("kind", ["coroutine", "generator", "future"])
def test_every_result_of_a_sink_is_looked_at(store: Store, kind: str, concurrency: int) -> None:
    store.queue("in").appender().write_many(_numbers(5))
    loop = asyncio.new_event_loop()

    async def send(message: Message) -> None:
        raise AssertionError

    def save(message: Message) -> Any:
        if message["n"] in (0, 3):
            return None
        if kind == "coroutine":
            return send(message)
        return iter_of(message) if kind == "generator" else loop.create_future()

    def iter_of(message: Message) -> Iterator[Message]:
        yield message

    _run(store, Graph("g", [Sink(save, "in", id="s", concurrency=concurrency)], errors="errors"))
    loop.close()
    errors = testing.messages(store, "errors")
    assert [error["err.proc/messages"]["in"][0]["n"] for error in errors] == [1, 2, 4]
    assert all("neither awaits nor iterates" in error["err/cause"][0]["message"] for error in errors)


# --- keys and fields in one order everywhere ---

_KEYS = """
import sys
from cues.queues import partitioners
from cues.steps import state_keys
tags = frozenset({"red", "green", "blue", "black", "white"})
for key in (tags, {"a": tags, "b": 1}, ("x", tags, {tag: 1 for tag in tags})):
    print(state_keys.key_segment(key).hex(), partitioners.key_bytes(key).hex())
"""


def test_keys_that_hold_sets_and_dicts_are_the_same_in_every_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", _KEYS],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(3)
    }
    assert len(found) == 1
    assert codec.pack_key({"a": 1, "b": [{"d": 1, "c": 2}]}) == codec.pack_key({"b": [{"c": 2, "d": 1}], "a": 1})


def test_state_that_an_older_version_kept_under_a_dict_is_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key had the fields in the order of the message; now they are sorted."""

    def count(message: Message, process: Any) -> Message:
        process.state["n"] = process.state.get("n", 0) + 1
        return {"n": process.state["n"], "fields": list(process.state)}

    graph = Graph("g", [Stream(count, "in", "out", id="s", key="key")])
    appender = store.queue("in").appender()
    with monkeypatch.context() as older:
        older.setattr(codec, "pack_key", codec.pack)
        appender.write({"key": {"b": 1, "a": 2}})
        _run(store, graph)
    appender.write_many([{"key": {"b": 1, "a": 2}}, {"key": {"a": 2, "b": 1}}])
    _run(store, graph)
    assert testing.messages(store, "out") == [{"n": n, "fields": ["n"]} for n in (1, 2, 3)]


@pytest.mark.parametrize("size", SIZES)
def test_state_is_iterated_in_one_order_whatever_the_step(store: Store, size: int) -> None:
    store.queue("in").appender().write_many([{"k": k} for k in "zebra"])

    def keys(message: Message, process: Any) -> Message:
        process.state[message["k"]] = 1
        if message["k"] == "r":
            del process.state["z"]
        return {"keys": "".join(process.state)}

    _run(store, Graph("g", [Stream(keys, "in", "out", id="s", batch_size=size)]))
    assert [message["keys"] for message in testing.messages(store, "out")] == ["z", "ez", "bez", "ber", "aber"]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("wrong", [{"q/tx": 1}, {"text": "x" * 70_000}])
def test_messages_after_a_refused_result_are_processed_as_they_were_read(
    store: Store, wrong: Message, raises: bool, several: bool
) -> None:
    """The function changes its message in place, so a repeated call must be given the message anew."""
    queues = ["even", "odd"] if several else ["out"]
    for name in queues:
        store.queue(name, max_message_bytes=65_536)
    store.queue("in").appender().write_many(_numbers(300))

    def change(message: Message) -> Any:
        n = message["n"]
        message["n"] = n + 1000
        if raises and n in (51, 60):  # 51: directly after a result that is refused
            raise ValueError(n)
        message["faq/1"] = "http://x/faq/1"  # looks like a reserved key, and is none
        if n in (7, 50, 299):
            message |= wrong
        return {"odd" if n % 2 else "even": message} if several else message

    outputs: Any = {name: name for name in queues} if several else "out"
    _run(store, Graph("g", [Stream(change, "in", outputs)], errors="errors"))
    refused = [7, 50, *([51, 60] if raises else []), 299]
    written = sorted(message["n"] for name in queues for message in store.queue(name).tailer())
    assert written == [n + 1000 for n in range(300) if n not in refused]
    assert [m[names.ERR_MESSAGES]["in"][0]["n"] for m in testing.messages(store, "errors")] == refused


def test_results_that_are_all_refused_repeat_few_calls(store: Store) -> None:
    store.queue("in").appender().write_many(_numbers(300))
    calls: list[int] = []

    def call(message: Message) -> Message:
        calls.append(message["n"])
        return {"q/tx": 1}

    _run(store, Graph("g", [Stream(call, "in", "out")], errors="errors"))
    assert sorted(set(calls)) == list(range(300)) and len(calls) < 600
    assert len(store.queue("errors")) == 300


@pytest.mark.parametrize("several", [False, True])
def test_at_most_once_calls_no_function_again_for_a_refused_result(store: Store, several: bool) -> None:
    store.queue("in").appender().write_many(_numbers(300))
    calls: list[int] = []

    def call(message: Message) -> Any:
        calls.append(message["n"])
        result = {"q/tx": 1} if message["n"] == 7 else message
        return {"out": result} if several else result

    outputs: Any = {"out": "out", "other": "other"} if several else "out"
    _run(store, Graph("g", [Stream(call, "in", outputs, strategy="at-most-once")], errors="errors"))
    assert calls == list(range(300))
    assert len(store.queue("out")) == 299


def test_a_queue_with_partitions_places_what_was_returned(store: Store) -> None:
    """The key is that of the message when it was returned, not when the step commits."""
    shared: Message = {}

    def keyed(message: Message) -> Message:
        shared["key"] = f"key {message['n']}"
        return shared

    store.queue("in").appender().write_many(_numbers(20))
    queues = {"out": QueueOptions(partitions=4, key="key")}
    _run(store, Graph("g", [Stream(keyed, "in", "out", id="s")], queues=queues))
    with cues.open(store.path) as again:
        queue = again.queue("out")
        for number in range(4):
            for message in queue.partition(number).tailer():
                assert partition_for(message["key"], 4) == number
    assert len(testing.messages(store, "out")) == 20


# --- functions with several outputs ---


def _by_binding(rng: random.Random, n: int) -> Any:
    """A result of a function with the outputs a and b: most have a message for each, one in three is special."""
    both: Message = {"a": {"n": n}, "b": {"n": -n, "path": "/q"}}
    special: list[Any] = [
        None, {}, {"a": {"n": n}}, {"b": {"n": n}}, {"b": None, "a": {"n": n}}, {"a": [{"n": n}, {"n": n}], "b": {}},
        {"a": [], "b": {"n": n}}, {"b": {"n": n}, "a": {"n": n}},
        {"a": {"n": n, "q/meta": {"from": n}}, "b": {"n": n}}, {"a": {"n": n}, "b": {"q/meta": {"of": n}, "n": n}},
        {"a": {"n": n}, "b": {"n": object()}}, {"a": {"n": 1 << 64}, "b": {"n": n}}, {"a": {"q/x": 1}, "b": {"n": n}},
        {"a": {"n": n}, "b": {"n": "x" * 3000}}, {"a": {"n": n}, "c": {"n": n}}, {"a": {"n": n}, "b": n}, [1], "x",
        ValueError(n),
    ]  # fmt: skip
    return rng.choice(special) if rng.random() < 0.3 else both


@pytest.mark.parametrize("block", range(12))
def test_results_by_binding_are_the_same_in_steps_of_any_size(block: int) -> None:
    rng = random.Random(seeds.new())
    results = [_by_binding(rng, n) for n in range(rng.choice((3, 40, 400)))]
    shared = rng.random() < 0.5
    found = []
    for size, concurrency in ((1, 2), (1, 1), (1000, 1)):  # with concurrency each result is looked at alone
        last: Message = {}

        def split(message: Message, last: Message = last) -> Any:
            last.clear()  # a result may be changed after its call
            result = results[message["n"]]
            if isinstance(result, Exception):
                raise result
            if shared and isinstance(result, dict):
                last.update(result)
                return last
            return result

        with testing.temporary_store("process") as store:
            store.queue("b", max_message_bytes=2000)
            store.queue("in").appender().write_many(_numbers(len(results)))
            outputs = {"a": "a", "b": "b"}
            options: dict[str, Any] = {"batch_size": size, "concurrency": concurrency, "step_s": None}
            stream = Stream(split, "in", outputs, id="s", errors="errors", **options)
            _run(store, Graph("g", [stream]))
            read: list[Any] = [testing.messages(store, "a"), testing.messages(store, "b")]
            for name in ("a", "b"):
                tailer = store.queue(name).tailer()
                while tailer.read() is not None:
                    assert tailer.envelope is not None
                    meta = dict(tailer.envelope.metadata)
                    meta.pop("q/hash", None)
                    for queue in meta.get("q/queue", {}).values():
                        queue.pop("q/time", None)
                    read.append(meta)
            errors = testing.messages(store, "errors")
            read.append([(error["err.proc/messages"], error["err/cause"][0]["type"]) for error in errors])
            found.append(read)
    assert found[0] == found[1] == found[2]


def test_an_idle_processor_keeps_no_message_of_its_last_step() -> None:
    text = "x" * 20_000
    graph = Graph(
        "g", [Source("in"), Stream(lambda m: {"a": {"x": text}, "b": {"x": text}}, "in", {"a": "a", "b": "b"}, id="s")]
    )
    with testing.temporary_store() as store, graph.start(store=store) as running:
        store.queue("in").appender().write({"n": 0})
        assert running.wait_idle(60)
        tracemalloc.start()
        store.queue("in").appender().write_many(_numbers(300))
        assert running.wait_idle(60)
        gc.collect()
        held, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most > 300 * 2 * len(text) > 10 * held, (held, most)


MADE: list[tuple[Any, str]] = [
    (Output([b"x"], [0]), "items origins"),
    (Results({}, {}, ran=1), "outputs failures ran closed writes"),
    (batches.Page(1, 2, b"tail", (b"piece",)), "flags count tail pieces"),
    (Taking(("g.s.in",), (1,), (2,)), "tailers starts ends chosen source"),
]
"""What each step makes, and its attributes."""


@pytest.mark.parametrize(("made", "attributes"), MADE, ids=[type(made).__name__ for made, _ in MADE])
def test_what_a_step_makes_can_be_pickled_and_copied(made: Any, attributes: str) -> None:
    """Executors of Spark answer with some of it. A compiled class needs to be told."""
    for other in (pickle.loads(pickle.dumps(made)), copy.copy(made)):
        for name in attributes.split():
            assert getattr(other, name) == getattr(made, name)
