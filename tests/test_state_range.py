"""``process.state.range``: the fields in order, read from the table, the step and the call at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cues
from cues import testing
from cues.errors import InvalidArgument
from cues.steps import state as states

FIELDS = st.integers(0, 40).map(lambda n: n.to_bytes(2, "big"))
ACTIONS = st.lists(
    st.tuples(st.just("set"), FIELDS) | st.tuples(st.just("delete"), FIELDS) | st.tuples(st.just("fail"), FIELDS)
    | st.tuples(st.just("look"), FIELDS, FIELDS, st.none() | st.integers(0, 5)), max_size=40,
)  # fmt: skip


@settings(max_examples=10, deadline=None)
@given(ACTIONS, st.sampled_from([1, 3, 1000]), st.sampled_from([4, 256]))
def test_a_range_is_that_of_a_sorted_dict(actions: list[Any], size: int, rows: int) -> None:
    """Each call of a step sees the changes of the calls before it, and none of a call that failed."""
    model: dict[bytes, int] = {}
    graph = cues.Graph("g", errors="errors")
    graph.source("m")

    @graph.stream("m", "out", batch_size=size)
    def act(message: dict[str, Any], process: cues.Process) -> None:
        kind, *given = actions[message["n"]]
        state = process.state
        if kind == "look":
            low, high, limit = given
            assert state.range(low, high, limit) == [(f, model[f]) for f in sorted(model) if low <= f < high][:limit]
            fields = [n.to_bytes(2, "big") for n in range(int.from_bytes(low, "big"), int.from_bytes(high, "big"))]
            assert state.get_many(fields) == [model.get(field) for field in fields]
        elif kind == "delete":
            state.pop(given[0], None)
            model.pop(given[0], None)
        else:
            if message["n"] % 2:
                state[given[0]] = message["n"]
            else:
                state.set_many({given[0]: message["n"]})
            state["other"] = state["longer bytes"] = state[b"longer"] = 1
            if kind == "fail":
                inside = state.range(b"\0\0", b"\xff\xff")
                assert dict(inside) == model | {given[0]: message["n"]}
                raise ValueError
            model[given[0]] = message["n"]

    before, states.RANGE_ROWS = states.RANGE_ROWS, rows  # type: ignore[misc]
    try:
        with testing.temporary_store() as store:
            store.queue("m").appender().write_many([{"n": n} for n in range(len(actions))])
            testing.run_until_idle(graph, store)
            failed = testing.messages(store, "errors") if "errors" in store.queues() else []
            assert [e["err/cause"][0]["type"] for e in failed] == ["ValueError"] * sum(a[0] == "fail" for a in actions)
            assert {f: v for f, v in testing.state(store, "g.act").items() if len(f) == 2} == model
    finally:
        states.RANGE_ROWS = before  # type: ignore[misc]


@pytest.mark.parametrize("bounds", [("a", "b"), (b"a", b"bb"), (b"a", 1), (bytes(191), bytes(191))])
@pytest.mark.interpreted
def test_other_bounds_are_refused(bounds: tuple[Any, Any]) -> None:
    graph = cues.Graph("g", errors="errors")
    graph.source("m")

    @graph.stream("m", "out")
    def look(message: dict[str, Any], process: cues.Process) -> None:
        with pytest.raises(InvalidArgument, match="of the length of the fields"):
            process.state.range(*bounds)

    with testing.temporary_store() as store:
        store.queue("m").appender().write({})
        testing.run_until_idle(graph, store)
        assert "errors" not in store.queues() or not testing.messages(store, "errors")
