"""``process.state`` beside plain dicts: values of all kinds, calls that fail, steps of any size, and restarts.

Values that cannot change in place are packed once for a step, and others by each call. No function may notice it.
"""

from __future__ import annotations

import copy
import gc
import tracemalloc
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import cues
from cues import codec, testing
from cues.errors import CodecError

BIG = "x" * 9_000
"""More than a row of LMDB holds."""


class Thing:
    """A value that cannot be encoded. Its copies look alike."""

    def __repr__(self) -> str:
        return "a thing"


KEYS = st.sampled_from(["a", "b", 1, 2.5])
FIELDS = st.sampled_from(["n", "m", 0, 7, b"bytes", None, 2.5, "f" * 300, b"f" * 300, ("t", 1)])
PLAIN = (
    st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none() | st.text(max_size=5)
    | st.sampled_from([BIG, BIG.encode(), b"", "", 1 << 70, "é" * 200])
)  # fmt: skip
VALUES = PLAIN | st.tuples(PLAIN, PLAIN) | st.tuples(st.tuples(PLAIN)) | st.lists(PLAIN, max_size=2)
ACTIONS = st.one_of(
    st.tuples(st.just("set"), FIELDS, VALUES),
    st.tuples(st.just("add"), FIELDS),
    st.tuples(st.just("delete"), FIELDS),
    st.tuples(st.just("read"), FIELDS),
    st.tuples(st.just("all")),
    st.tuples(st.just("fail")),
    st.tuples(st.just("unencodable"), FIELDS, st.sampled_from(["\ud800", Thing(), ("\ud800",), [Thing()]])),
)
CALLS = st.lists(st.tuples(KEYS, st.lists(ACTIONS, max_size=4)), max_size=12)


def act(state: Any, actions: list[Any]) -> list[Any]:
    """Do the actions on a state or a dict; return what was read."""
    seen: list[Any] = []
    for kind, *what in actions:
        if kind == "set":
            state[what[0]] = copy.deepcopy(what[1])
        elif kind == "add":
            before = state.get(what[0])
            if isinstance(before, list):
                before.append(1)  # changed in place, and not assigned
            else:
                state[what[0]] = before + 1 if isinstance(before, int) else [1]
        elif kind == "delete":
            seen.append(state.pop(what[0], "none"))
        elif kind == "read":
            seen.append(copy.deepcopy(state.get(what[0], "none")))
        elif kind == "all":
            seen.append(sorted(map(repr, copy.deepcopy(dict(state)).items())))
        elif kind == "fail":
            raise ValueError
        else:
            state[what[0]] = what[1]
    return seen


def encodable(values: Any) -> bool:
    try:
        for value in values:
            codec.pack(value)
    except CodecError:
        return False
    return True


@settings(max_examples=40, deadline=None)
@given(CALLS, CALLS, st.sampled_from([1, 3, 1000]), st.sampled_from([1, 4]), st.booleans())
def test_state_is_that_of_plain_dicts(first: list[Any], second: list[Any], size: int, width: int, ttl: bool) -> None:
    calls = [*first, *second]
    model: dict[Any, dict[Any, Any]] = {}
    expected: list[Any] = []
    for key, actions in calls:
        mine = copy.deepcopy(model.get(key, {}))
        try:
            seen = act(mine, actions)
        except ValueError:
            continue
        if encodable([*mine.values(), seen]):
            model[key] = mine
            expected.append(seen)

    graph = cues.Graph("g", errors="errors")
    graph.source("m")
    options: dict[str, Any] = {"ttl": "1h"} if ttl else {}

    @graph.stream("m", "out", key="key", batch_size=size, concurrency=width, **options)
    def acts(message: dict[str, Any], process: cues.Process) -> dict[str, Any]:
        return {"seen": act(process.state, calls[message["n"]][1])}

    with testing.temporary_store() as store:
        for part in (range(len(first)), range(len(first), len(calls))):  # the second part finds a stored state
            store.queue("m").appender().write_many([{"n": n, "key": calls[n][0]} for n in part])
            testing.run_until_idle(graph, store)
        assert [message["seen"] for message in testing.messages(store, "out")] == expected
        for key, _ in calls:
            assert testing.state(store, "g.acts", key) == model.get(key, {})


def test_fields_that_are_equal_in_python_have_values_of_their_own() -> None:
    fields = [0, False, 0.0, "0", b"0"]
    graph = cues.Graph("g")
    graph.source("m")

    @graph.stream("m", "out")
    def keep(message: dict[str, Any], process: cues.Process) -> dict[str, Any]:
        for field in fields:
            process.state[field] = f"{message['n']} of {field!r}"
        return {"seen": [process.state[field] for field in fields]}

    with testing.temporary_store() as store:
        store.queue("m").appender().write_many([{"n": n} for n in range(3)])
        testing.run_until_idle(graph, store)
        for n, message in enumerate(testing.messages(store, "out")):
            assert message["seen"] == [f"{n} of {field!r}" for field in fields]


def test_long_values_of_the_state_are_in_memory_once() -> None:
    graph = cues.Graph("g")
    graph.source("m")

    @graph.sink("m", key="k")
    def keep(message: dict[str, Any], process: cues.Process) -> None:
        process.state.get("text")
        process.state["text"] = "y" * 20_000

    with testing.temporary_store() as store, graph.start(store=store) as running:
        for _ in range(2):  # the second one reads what the first has written
            store.queue("m").appender().write_many([{"k": k} for k in range(200)])
            tracemalloc.start()
            assert running.wait_idle(60)
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert held < 1_500_000, held  # the keys have 4 MB of values
