"""Every window and join: equal to a naive model, at every crash point, and for random messages."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import seeds
from children import Child
from contracts_windows import DELAY_S, WINDOWS, Taken, WindowCase, as_set, found, graph_of, messages, resized, run_child
from hypothesis import given, settings
from hypothesis import strategies as st

import cues
from cues import testing
from cues.processors import windows


@pytest.fixture(params=WINDOWS)
def case(request: pytest.FixtureRequest) -> WindowCase:
    return WINDOWS[request.param]


def filled(store: cues.Store, given: dict[str, list[Any]]) -> cues.Store:
    for queue, some in given.items():
        store.queue(queue).appender().write_many(some)
    return store


def expected(case: WindowCase, taken: Taken, store: cues.Store) -> None:
    """Compare the queues with the model; results of one moment may have any order."""
    wanted, wanted_late = case.model(taken)
    results, late = found(store)
    if not case.ordered:
        assert as_set(results) == as_set(wanted)
    else:
        assert results == wanted
    assert late == wanted_late


def test_results_are_those_of_a_naive_model(case: WindowCase) -> None:
    taken: Taken = []
    stream = case.stream()
    with testing.temporary_store() as store:
        filled(store, messages(2, 60, case.inputs))
        testing.run_until_idle(graph_of(stream, case.inputs, taken), store)
        assert len(taken) == 60 // len(case.inputs) * len(case.inputs)
        expected(case, taken, store)
        assert found(store)[0]


def small_steps(stream: cues.Stream) -> cues.Stream:
    return resized(stream, 3)


def test_nothing_is_left_in_the_state_after_the_end(case: WindowCase) -> None:
    """But the rows of tables, and of counted windows that are not full."""
    with testing.temporary_store() as store:
        filled(store, messages(4, 60, case.inputs))
        graph = graph_of(case.stream(), case.inputs)
        testing.run_until_idle(graph, store)
        filled(store, {name: [windows.watermark(None)] for name in case.inputs})
        testing.run_until_idle(graph, store)
        rows = [field for field in testing.state(store, "g.out") if isinstance(field, bytes)]
        assert {row[:1] for row in rows} <= set(case.stays)
        assert len(rows) <= 2 * len(case.stays)


def crashes(case: WindowCase, wrap: Any = small_steps, given: Any = None) -> list[tuple[list[str], list[Any]]]:
    """The results after a crash at each point × hit, and a restart; the first ones are those without a crash.

    No message is more than ``delay`` late, so the results do not depend on the order in which two queues are read.
    """
    given = given or messages(3, 14, case.inputs, disorder=DELAY_S if len(case.inputs) > 1 else 20)
    run = lambda store: testing.run_until_idle(graph_of(wrap(case.stream()), case.inputs), store)  # noqa: E731
    with testing.temporary_store() as store:
        filled(store, given)
        sites = testing.crash_sites(lambda: run(store))
        results = [(as_set(found(store)[0]), found(store)[1])]
    for point, hit in sites:
        with testing.temporary_store() as store:
            filled(store, given)
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                run(store)
            run(store)
            results.append((as_set(found(store)[0]), found(store)[1]))
    assert len(sites) > 20
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tumbling-of-two", "sessions", "counted-within", "as-of-tolerance", "interval-full"])
def test_a_crash_anywhere_changes_no_result(name: str) -> None:
    first, *others = crashes(WINDOWS[name])
    assert first[0] and all(other == first for other in others)


def test_a_crash_anywhere_changes_no_window() -> None:
    given = {"m": [{"t": t, "k": "a", "v": t, "i": t} for t in (0, 16, 3, 31)]}
    first, *others = crashes(WINDOWS["tumbling"], given=given)
    assert first[0] and first[1] and all(other == first for other in others)


class Memory(dict[Any, Any]):
    """A state that is not in the store."""

    def range(self, low: bytes, high: bytes, limit: int | None = None) -> list[tuple[Any, Any]]:
        rows = sorted(row for row in self if isinstance(row, bytes) and len(row) == len(low) and low <= row < high)
        return [(row, self[row]) for row in rows][:limit]


class Beside:
    """``process`` with another state."""

    def __init__(self, process: cues.Process, state: Any) -> None:
        self.state, self.binding = state, process.binding


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sessions"])
def test_the_control_with_windows_in_memory_loses(name: str) -> None:
    """The open windows are not in the commit of the step."""

    def forgetful(stream: cues.Stream) -> cues.Stream:
        inner: Any = stream.fn
        memory = Memory()

        def fn(message: Any, process: cues.Process) -> Any:
            return inner(message, Beside(process, memory))

        return resized(stream, 3, fn)

    with pytest.raises(AssertionError):
        first, *others = crashes(WINDOWS[name], forgetful)
        assert all(other == first for other in others)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_random_messages_in_any_order(data: st.DataObject) -> None:
    case = WINDOWS[data.draw(st.sampled_from(list(WINDOWS)))]
    count = data.draw(st.integers(1, 40))
    one = st.fixed_dictionaries(
        {"t": st.integers(0, 60) | st.integers(0, 240).map(lambda n: n / 4), "k": st.sampled_from("abc"),
         "v": st.none() | st.integers(-3, 3)}
    )  # fmt: skip
    given = {name: data.draw(st.lists(one, max_size=count)) for name in case.inputs}
    for name, some in given.items():
        for n, message in enumerate(some):
            message["i"] = f"{name} {n}"
    taken: Taken = []
    stream = case.stream()
    sized = resized(stream, data.draw(st.sampled_from([1, 2, 5, 1000])))
    with testing.temporary_store() as store:
        filled(store, given)
        testing.run_until_idle(graph_of(sized, case.inputs, taken), store, seed=data.draw(st.integers(0, 9)))
        expected(case, taken, store)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hopping", "sessions", "interval-full"])
def test_random_kills_change_no_result(name: str, tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    seed = chance.randint(0, 1000)
    case = WINDOWS[name]
    code = "import sys; from contracts_windows import run_child; run_child(*sys.argv[1:])"
    place = tmp_path / "store"
    for _ in range(4):
        with Child(code, name, place, seed, 1000) as child, contextlib.suppress(AssertionError):
            for _ in range(chance.randint(1, 8)):
                child.line()
            child.kill()
    with Child(code, name, place, seed, 1000) as child:
        child.end()
    with testing.temporary_store() as store, cues.open(place) as killed:
        filled(store, messages(seed, 1000, case.inputs, disorder=DELAY_S))
        testing.run_until_idle(graph_of(case.stream(), case.inputs), store)
        assert as_set(found(killed)[0]) == as_set(found(store)[0])
        assert found(killed)[1] == found(store)[1]


def test_the_program_of_a_child_runs_here(tmp_path: Path) -> None:
    run_child("tumbling", str(tmp_path / "store"), "1", "20")
