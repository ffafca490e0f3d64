"""Calls that run at once, in threads and on an event loop: a step commits what one call at a time would.

That calls overlap is shown by letting them meet (a barrier, an event), never by measuring time.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import seeds
from small import feed, numbers, run, until

import cues
from cues import AnyOf, Graph, Retry, Sink, Source, Store, Stream, testing
from cues.base.events import Retrying
from cues.errors import Diverged, Fenced, GraphError, ProcessorStopped
from cues.graphs import draw
from cues.steps.calls import Interrupted
from cues.steps.concurrency import RunnerClosed, Schedule, Threads
from cues.steps.eventloop import EventLoop

Message = dict[str, Any]
MEET_S = 30
"""A meeting that takes longer has failed: the calls do not overlap."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    before = set(threading.enumerate())  # one of another test may still end
    with cues.open(tmp_path / "store", durability="process") as store:
        yield store
        assert not testing.check_attempts(store)
    until(lambda: not [thread for thread in {*threading.enumerate()} - before if thread.name.endswith(" loop")])


# --- overlap and order --------------------------------------------------------------------------


def test_calls_of_a_plain_function_overlap_and_their_outputs_stay_in_order(store: Store) -> None:
    """Eight calls meet at a barrier, which no seven would pass; they leave it in the opposite order."""
    barrier = threading.Barrier(8)
    left = [threading.Event() for _ in range(17)]

    def meet(message: Message) -> Message:
        n = message["n"]
        barrier.wait(MEET_S)
        if n % 8 < 7:
            assert left[n + 1].wait(MEET_S)
        left[n].set()
        return message

    feed(store, a=list(range(16)))
    report = run(store, Stream(meet, "a", "out", concurrency=8))
    assert numbers(store, "out") == list(range(16))
    assert report.steps == {"meet": 1}


def test_fifty_calls_of_one_step_wait_at_once_on_one_loop(store: Store) -> None:
    inside = 0
    most = 0
    loops = set()
    everybody: asyncio.Event | None = None

    async def meet(message: Message) -> Message:
        nonlocal inside, most, everybody
        everybody = everybody or asyncio.Event()
        loops.add(asyncio.get_running_loop())
        inside += 1
        most = max(most, inside)
        if inside == 50:
            everybody.set()
        await asyncio.wait_for(everybody.wait(), MEET_S)
        inside -= 1
        return message

    feed(store, a=list(range(100)))
    report = run(store, Stream(meet, "a", "out", concurrency=50, batch_size=60))
    assert numbers(store, "out") == list(range(100))
    assert most == 50 and len(loops) == 1
    assert report.steps == {"meet": 2}


def test_no_more_calls_than_asked_for_run_at_once(store: Store) -> None:
    inside = 0
    seen = []
    lock = threading.Lock()

    def plain(message: Message) -> None:
        nonlocal inside
        with lock:
            inside += 1
            seen.append(inside)
        threading.Event().wait(0.001)
        with lock:
            inside -= 1

    feed(store, a=list(range(40)))
    run(store, Sink(plain, "a", concurrency=3))
    assert max(seen) <= 3 and len(seen) == 40


def test_an_async_function_without_concurrency_is_called_one_at_a_time(store: Store) -> None:
    inside = 0

    async def alone(message: Message, process: Any) -> Message:
        nonlocal inside
        assert inside == 0
        inside += 1
        await asyncio.sleep(0)
        inside -= 1
        process.state["sum"] = process.state.get("sum", 0) + message["n"]
        return {"n": process.state["sum"]}

    feed(store, a=[1, 2, 3, 4])
    run(store, Stream(alone, "a", "out"))
    assert numbers(store, "out") == [1, 3, 6, 10]


def test_an_async_batch_function_gets_the_whole_range(store: Store) -> None:
    async def batched(messages: list[Message], process: Any) -> list[Message]:
        await asyncio.sleep(0)
        return [{"n": (process.indices, len(messages))}]

    feed(store, a=list(range(5)))
    run(store, Stream(batched, "a", "out", batch=True, batch_size=3))
    assert numbers(store, "out") == [([1, 2, 3], 3), ([4, 5], 2)]


def test_a_loop_lives_as_long_as_its_processor_and_continues_between_steps(store: Store) -> None:
    """An object that a function keeps between steps, such as a client with background tasks, belongs to one loop."""
    ticks: list[asyncio.Task[None]] = []
    beat = threading.Event()

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.001)
            beat.set()

    async def keep(message: Message) -> Message:
        if not ticks:
            ticks.append(asyncio.create_task(tick()))
        assert ticks[0].get_loop() is asyncio.get_running_loop() and not ticks[0].done()
        return message

    with Graph("g", [Stream(keep, "a", "out")]).start(store=store) as running:
        for n in range(3):
            running.send("a", {"n": n})
            assert running.wait_idle(30)
            beat.clear()
            assert beat.wait(MEET_S)  # nothing runs, and the loop does
    assert numbers(store, "out") == [0, 1, 2]
    assert ticks[0].cancelled()


def test_objects_and_partials_that_are_async_are_awaited(store: Store) -> None:
    class Callable_:
        async def __call__(self, message: Message) -> Message:
            await asyncio.sleep(0)
            return {"n": message["n"] * 2}

    async def times(factor: int, message: Message) -> Message:
        return {"n": message["n"] * factor}

    feed(store, a=[1, 2])
    run(
        store,
        Stream(Callable_(), "a", "x", id="object", concurrency=2),
        Stream(partial(times, 10), "a", "y", id="partial"),
    )
    assert numbers(store, "x") == [2, 4] and numbers(store, "y") == [10, 20]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("options", [{}, {"concurrency": 2}, {"batch": True}])
def test_a_sink_that_returns_a_coroutine_fails_because_it_is_not_awaited(store: Store, options: dict[str, Any]) -> None:
    """The coroutine does nothing, and the result of a sink has no meaning: without an error it would be lost."""

    async def never(message: Message) -> None:
        raise AssertionError

    feed(store, a=[1, 2])
    with pytest.raises(ProcessorStopped, match=r"returned a coroutine.*async def"):
        run(store, Sink(lambda message: never(message), "a", id="s", **options))
    assert testing.contents(store)["positions"] == {"g.s.a": 1}


# --- what a call sees ---------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_call_sees_a_process_of_its_own(store: Store, asynchronous: bool) -> None:
    """Every call of a step is inside before any looks: one shared view would show them all the same."""
    barrier = threading.Barrier(4)
    together = asyncio.Barrier(4)

    def seen(message: Message, process: Any) -> Message:
        delivery = process.delivery
        return {
            "n": message["n"],
            "index": process.index,
            "binding": process.binding,
            "hash": process.delivery_hash,
            "range": (delivery.start, delivery.end),
            "metadata": process.metadata,
        }

    def plain(message: Message, process: Any) -> Message:
        barrier.wait(MEET_S)
        return seen(message, process)

    async def waits(message: Message, process: Any) -> Message:
        await asyncio.wait_for(together.wait(), MEET_S)
        return seen(message, process)

    def alone(message: Message, process: Any) -> Message:
        return seen(message, process)

    feed(store, a=list(range(4)), b=list(range(10, 14)))
    options = {"id": "s", "errors": None}
    queues = {"*": {"metadata": ["t"]}}
    concurrent: Callable[..., Any] = waits if asynchronous else plain
    run(store, Stream(concurrent, AnyOf("a", "b"), "out", concurrency=4, batch_size=4, **options), queues=queues)
    found = testing.messages(store, "out")
    with testing.temporary_store() as other:
        for queue in ("a", "b"):
            feed(other, **{queue: testing.messages(store, queue)})
        run(other, Stream(alone, AnyOf("a", "b"), "out", batch_size=4, **options), queues=queues)
        expected = testing.messages(other, "out")
    assert len({message["hash"] for message in found}) == 8
    for message in [*found, *expected]:
        del message["hash"]  # queues of another store have other identities
        message["metadata"].pop("q/hash", None)
    assert found == expected


def test_a_join_is_called_by_binding(store: Store) -> None:
    async def both(left: Message, right: Message | None, process: Any) -> Message:
        await asyncio.sleep(0)
        return {"n": (left["n"], right and right["n"], process.index)}

    feed(store, a=[1, 2], b=[10, 20])
    stream = Stream(both, {"left": "a", "right": "b"}, "out", concurrency=2, where={"right": lambda m: m["n"] > 10})
    run(store, stream)
    assert numbers(store, "out") == [(1, None, {"left": 1, "right": 1}), (2, 20, {"left": 2, "right": 2})]


def test_a_view_that_outlives_its_call_is_refused(store: Store) -> None:
    kept = []

    def keep(message: Message, process: Any) -> None:
        kept.append(process)

    feed(store, a=[1, 2])
    run(store, Sink(keep, "a", concurrency=2))
    for process in kept:
        with pytest.raises(cues.CuesError, match="no current message"):
            process.index  # noqa: B018


# --- state --------------------------------------------------------------------------------------


def totals(message: Message, process: Any) -> Message:
    state = process.state
    state["sum"] = state.get("sum", 0) + message["n"]
    state.setdefault("seen", []).append(message["n"])
    if len(state["seen"]) > 3:
        del state["seen"]
    if message.get("bad"):
        raise ValueError(message["n"])
    return {"n": message["n"], "sum": state["sum"], "fields": sorted(state)}


async def totals_async(message: Message, process: Any) -> Message:
    before = process.state.get("sum", 0)
    await asyncio.sleep(random.random() / 1000)
    assert process.state.get("sum", 0) == before, "another call of the same key ran meanwhile"
    return totals(message, process)


@pytest.mark.parametrize("seed", seeds.among(range(5), fast=1))
@pytest.mark.parametrize("function", [totals, totals_async])
@pytest.mark.parametrize("errors", ["errors", None])
def test_keyed_state_is_what_one_call_at_a_time_leaves(
    store: Store, seed: int, function: Callable[..., Any], errors: str | None
) -> None:
    """With failures among them; without an error queue the step is cut there, although later calls had run."""
    print(f"CUES_TEST_SEED={seed}")
    chance = random.Random(seed)
    messages = [{"n": n, "key": chance.randrange(5), "bad": chance.random() < 0.05} for n in range(60)]
    messages[chance.randrange(60)]["bad"] = True
    left = []
    for concurrency in (1, 8):
        with testing.temporary_store() as other:
            feed(other, a=messages)
            stream = Stream(function, "a", "out", id="s", key="key", concurrency=concurrency, batch_size=25)
            report = run(other, stream, errors=errors, stopped="return")
            found = testing.contents(other)
            for error in found["queues"].get("errors", ()):
                for cause in error["err/cause"]:
                    del cause["trace"]
            left.append((found, {k: str(v) for k, v in report.stopped.items()}, report.counters["s"].failed))
    assert left[0] == left[1]


def test_processor_wide_state_is_refused_when_calls_run_at_once(store: Store) -> None:
    def count(message: Message, process: Any) -> None:
        process.state["n"] = 1

    feed(store, a=[1])
    with pytest.raises(ProcessorStopped, match=r"race for the processor's state.*key=.*or concurrency=1") as caught:
        run(store, Sink(count, "a", concurrency=2))
    assert isinstance(caught.value.__cause__, cues.CuesError)


def test_the_state_of_another_key_is_refused_when_calls_run_at_once(store: Store) -> None:
    def other(message: Message, process: Any) -> Message:
        process.state_of(message["key"])["own"] = 1
        return {"n": process.state_of(message["key"] + message["n"]).get("own")}

    feed(store, a=[{"key": 5, "n": 0}, {"key": 5, "n": 1}])
    run(store, Stream(other, "a", "out", key="key", concurrency=2), errors="errors")
    assert numbers(store, "out") == [1]
    (error,) = testing.messages(store, "errors")
    assert "is not the key of the message" in error["err/cause"][0]["message"]
    assert testing.state(store, "g.other", 5) == {"own": 1}


def test_a_key_that_fails_is_the_failure_of_a_call_that_asks_for_the_state(store: Store) -> None:
    def key(message: Message) -> Any:
        return message["key"]

    def count(message: Message, process: Any) -> Message:
        if message["n"] == 2:
            return message
        process.state["n"] = message["n"]
        return message

    feed(store, a=[{"n": 1, "key": "x"}, {"n": 2}, {"n": 3}])
    run(store, Stream(count, "a", "out", key=key, concurrency=3), errors="errors")
    assert numbers(store, "out") == [1, 2]
    (error,) = testing.messages(store, "errors")
    assert error["err/cause"][0]["type"] == "KeyError"


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_retry_holds_up_no_other_call(store: Store, asynchronous: bool) -> None:
    """The first message fails until all others were called: with one call at a time that would never be."""
    called: set[int] = set()
    others = threading.Event()

    def fails(message: Message) -> Message:
        called.add(message["n"])
        if len(called) == 6:
            others.set()
        if message["n"] == 0 and not others.is_set():
            raise ValueError("not yet")
        return message

    async def fails_async(message: Message) -> Message:
        return fails(message)

    function: Any = fails_async if asynchronous else fails
    stream = Stream(function, "a", "out", id="s", concurrency=2, retries=Retry(1_000_000, 0.001, 0.001))
    with Graph("g", [stream]).start(store=store) as running:
        store.queue("a").appender().write_many([{"n": n} for n in range(6)])
        assert running.wait_idle(60)
        assert running.counters()["g.s"].retries > 0
    assert numbers(store, "out") == list(range(6))


@pytest.mark.parametrize("options", [{}, {"concurrency": 2}, {"batch": True}])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_message_shows_the_users_frames_alone(
    store: Store, asynchronous: bool, options: dict[str, Any]
) -> None:
    def fails(message: Any) -> None:
        raise ValueError("no")

    async def fails_async(message: Any) -> None:
        await asyncio.sleep(0)
        fails(message)

    feed(store, a=[1])
    run(store, Sink(fails_async if asynchronous else fails, "a", **options), errors="errors")
    (error,) = testing.messages(store, "errors")
    trace = error["err/cause"][0]["trace"]
    assert trace.count("File ") == trace.count(__file__) == 1 + asynchronous, trace


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("errors", ["errors", None])
def test_a_failure_cuts_the_step_as_with_one_call_at_a_time(
    store: Store, asynchronous: bool, errors: str | None
) -> None:
    """Message 2 fails when 3 to 5 have run. With an error queue they are kept; without one, nothing after 2 is kept."""
    behind = threading.Barrier(4)

    def fails(message: Message) -> Message:
        if message["n"] == 2:
            raise ValueError("two")
        return message

    def plain(message: Message) -> Message:
        if message["n"] >= 2:
            behind.wait(MEET_S)
        return fails(message)

    together = asyncio.Barrier(4)

    async def waits(message: Message) -> Message:
        if message["n"] >= 2:
            await asyncio.wait_for(together.wait(), MEET_S)
        return fails(message)

    feed(store, a=list(range(6)))
    stream = Stream(waits if asynchronous else plain, "a", "out", id="s", concurrency=6)
    report = run(store, stream, errors=errors, stopped="return")
    if errors:
        assert numbers(store, "out") == [0, 1, 3, 4, 5]
        (error,) = testing.messages(store, "errors")
        trace = error["err/cause"][0]["trace"]
        assert error["err.proc/messages"] == {"a": [{"n": 2}]} and trace.count("File ") == 2, trace
        assert "cues/" not in trace  # the user's frames alone
    else:
        assert isinstance(report.stopped["s"].__cause__, ValueError)
        assert numbers(store, "out") == [0, 1]
        assert testing.contents(store)["positions"] == {"g.s.a": 3}


def test_the_state_of_calls_after_a_failure_that_stops_the_processor_is_dropped(store: Store) -> None:
    """Message 2 fails when 3 to 5 have changed their state. The next start calls them again, with the state before."""
    behind = threading.Barrier(4)

    def counts(message: Message, process: Any) -> Message:
        process.state["calls"] = process.state.get("calls", 0) + 1
        if message["n"] >= 2:
            behind.wait(MEET_S)
        if message["n"] == 2:
            raise ValueError("two")
        return message

    feed(store, a=list(range(6)))
    run(store, Stream(counts, "a", "out", id="s", concurrency=6, key="n"), stopped="return")
    assert numbers(store, "out") == [0, 1]
    found = [testing.state(store, "g.s", n) for n in range(6)]
    assert found == [{"calls": 1}, {"calls": 1}, {}, {}, {}, {}]


def test_no_call_begins_after_a_failure_that_stops_the_processor(store: Store) -> None:
    called = []

    def fails(message: Message) -> None:
        called.append(message["n"])
        raise ValueError(message["n"])

    feed(store, a=list(range(50)))
    report = run(store, Sink(fails, "a", concurrency=2), stopped="return")
    assert str(report.stopped["fails"].__cause__) == "0" and len(called) <= 3


@pytest.mark.parametrize("kind", [Fenced, Diverged])
def test_a_target_that_knows_another_owner_stops_the_processor(store: Store, kind: type[Exception]) -> None:
    def fenced(message: Message) -> None:
        if message["n"] == 3:
            raise kind("no more", reason="takeover")

    feed(store, a=list(range(6)))
    with pytest.raises((Fenced, ProcessorStopped)) as caught:
        run(store, Sink(fenced, "a", concurrency=3, step_s=None), errors="errors")
    assert isinstance(caught.value if kind is Fenced else caught.value.__cause__, kind)
    assert testing.contents(store)["positions"] == {"g.fenced.a": 1}
    assert not testing.messages(store, "errors")


def test_stop_iteration_is_a_failure_of_its_message(store: Store) -> None:
    def ends(message: Message) -> Message:
        return next(iter([])) if message["n"] == 1 else message

    feed(store, a=[0, 1, 2])
    run(store, Stream(ends, "a", "out", concurrency=2), errors="errors")
    assert numbers(store, "out") == [0, 2] and len(testing.messages(store, "errors")) == 1


@pytest.mark.parametrize("concurrency", [1, 3])
def test_something_cancelled_inside_a_call_is_a_failure_of_its_message(store: Store, concurrency: int) -> None:
    async def cancelled(message: Message) -> Message:
        if message["n"] == 1:
            task = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(task.cancel)
            await task
        return message

    feed(store, a=[0, 1, 2])
    run(store, Stream(cancelled, "a", "out", concurrency=concurrency), errors="errors")
    assert numbers(store, "out") == [0, 2]
    (error,) = testing.messages(store, "errors")
    assert "was cancelled" in error["err/cause"][0]["message"]


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exit_inside_a_call_drops_the_step(store: Store, asynchronous: bool, concurrency: int) -> None:
    def exits(message: Message) -> Message:
        if message["n"] == 1:
            raise SystemExit(3)
        return message

    async def exits_async(message: Message) -> Message:
        return exits(message)

    feed(store, a=[0, 1, 2])
    with pytest.raises(SystemExit):
        run(store, Stream(exits_async if asynchronous else exits, "a", "out", id="s", concurrency=concurrency))
    assert numbers(store, "out") == [] and testing.contents(store)["positions"] == {"g.s.a": 1}


def test_outputs_that_cannot_be_encoded_fail_alone(store: Store) -> None:
    def outputs(message: Message, process: Any) -> Any:
        process.state["n"] = message["n"]
        return {"n": object()} if message["n"] == 1 else 7 if message["n"] == 2 else message

    feed(store, a=[{"n": n, "key": n} for n in range(4)])
    run(store, Stream(outputs, "a", "out", key="key", concurrency=4), errors="errors")
    assert numbers(store, "out") == [0, 3] and len(testing.messages(store, "errors")) == 2
    assert [testing.state(store, "g.outputs", n) for n in range(4)] == [{"n": 0}, {}, {}, {"n": 3}]


def test_at_most_once_calls_each_message_once(store: Store) -> None:
    called: list[int] = []

    def once(message: Message) -> Message:
        called.append(message["n"])
        if message["n"] == 2:
            raise ValueError("two")
        return message

    feed(store, a=list(range(6)))
    run(store, Stream(once, "a", "out", concurrency=3, strategy="at-most-once"), errors="errors")
    assert sorted(called) == list(range(6)) and numbers(store, "out") == [0, 1, 3, 4, 5]


# --- ending -------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_halt_ends_the_waiting_of_a_retry(store: Store, asynchronous: bool, concurrency: int) -> None:
    """Calls wait an hour before they are tried again: a halt drops their step, and the next start takes it again."""
    waiting = threading.Event()

    def fails(message: Message) -> Message:
        raise ValueError("again")

    async def fails_async(message: Message) -> Message:
        return fails(message)

    def listener(event: Any) -> None:
        if isinstance(event, Retrying):
            waiting.set()

    retries = Retry(2, backoff_s=3600, max_s=3600)
    function: Any = fails_async if asynchronous else fails
    feed(store, a=list(range(8)))
    graph = Graph("g", [Stream(function, "a", "out", id="s", concurrency=concurrency, retries=retries)])
    running = graph.start(store=store, listeners=(listener,))
    assert waiting.wait(MEET_S)
    running.close()
    assert not running.engine.workers[0].thread.is_alive() and not running.stopped
    assert testing.contents(store)["positions"] == {"g.s.a": 1}


def test_closing_cancels_async_calls_that_never_end(store: Store) -> None:
    inside = threading.Event()
    cleaned = threading.Event()

    async def never(message: Message) -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    feed(store, a=list(range(3)))
    running = Graph("g", [Sink(never, "a", concurrency=2)]).start(store=store)
    assert inside.wait(MEET_S)
    running.close(timeout=0.05)  # does not wait for a step that will not end
    assert cleaned.wait(MEET_S)
    running.engine.workers[0].thread.join(MEET_S)
    assert not running.engine.workers[0].thread.is_alive()
    assert not [error for error in running.stopped if not isinstance(error.__cause__, cues.errors.Closed)]


def test_async_calls_that_wait_are_cancelled_with_their_step(store: Store) -> None:
    """One call waits for a retry when the graph halts, the others for something that never comes."""
    waiting = threading.Event()
    cancelled = []

    async def waits(message: Message) -> None:
        if message["n"] == 2:
            raise ValueError("again")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(message["n"])
            raise

    def listener(event: Any) -> None:
        if isinstance(event, Retrying):
            waiting.set()

    feed(store, a=list(range(3)))
    graph = Graph("g", [Sink(waits, "a", concurrency=3, retries=Retry(2, 3600, 3600))])
    running = graph.start(store=store, listeners=(listener,))
    assert waiting.wait(MEET_S)
    running.halt()
    running.engine.workers[0].thread.join(MEET_S)
    assert not running.engine.workers[0].thread.is_alive()
    assert sorted(cancelled) == [0, 1] and not running.stopped
    running.close()
    assert testing.contents(store)["positions"] == {"g.waits.a": 1}


def test_threads_go_when_the_graph_closes(store: Store) -> None:
    named = "cues g.s call"
    feed(store, a=list(range(10)))
    with Graph("g", [Sink(lambda m: None, "a", id="s", concurrency=4)]).start(store=store) as running:
        assert running.wait_idle(30)
        pool = [t for t in threading.enumerate() if t.name.startswith(named)]
        assert 1 <= len(pool) <= 4 and all(thread.daemon for thread in pool)
    for thread in pool:
        thread.join(MEET_S)
        assert not thread.is_alive()


def test_a_loop_that_is_closed_refuses_calls_and_ends_waiting_ones() -> None:
    loop = EventLoop("loop")
    assert loop.run(asyncio.sleep(0, 7)) == 7
    begun = threading.Event()
    caught: list[BaseException] = []

    async def never() -> None:
        begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop.run(never())
        except RunnerClosed as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(MEET_S)
    loop.close()
    thread.join(MEET_S)
    assert len(caught) == 1
    loop.close()
    with pytest.raises(RunnerClosed):
        loop.run(asyncio.Event().wait())


# --- async sources ------------------------------------------------------------------------------


def test_an_async_generator_is_a_source(store: Store) -> None:
    async def counted(position: int | None, process: Any) -> AsyncIterator[tuple[int, Message]]:
        for n in range(position or 0, 7):
            await asyncio.sleep(0)
            yield n + 1, {"n": n}

    run(store, Source("a", counted, batch_size=3), steps_max=1)
    assert numbers(store, "a") == [0, 1, 2]
    with Graph("g", [Source("a", counted)]).start(store=store) as running:
        assert running.wait_done()
    assert numbers(store, "a") == list(range(7))


def test_an_async_generator_that_waits_for_ever_is_cancelled_at_the_end(store: Store) -> None:
    cleaned = threading.Event()

    async def waits(position: int | None) -> AsyncIterator[tuple[int, Message]]:
        try:
            yield 1, {"n": 1}
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    with Graph("g", [Source("a", waits)]).start(store=store) as running:
        while not len(store.queue("a")):
            assert not running.stopped and not threading.Event().wait(0.001)
    assert cleaned.wait(MEET_S)


def test_an_async_generator_that_fails_is_started_again_from_its_position(store: Store) -> None:
    failed = []

    async def fails(position: int | None) -> AsyncIterator[tuple[int, Message]]:
        for n in range(position or 0, 4):
            if n == 2 and not failed:
                failed.append(n)
                raise ValueError("two")
            yield n + 1, {"n": n}

    run(store, Source("a", fails, retries=1))
    assert numbers(store, "a") == [0, 1, 2, 3] and failed


# --- declarations -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4", None])
def test_another_concurrency_is_refused(value: Any) -> None:
    with pytest.raises(GraphError, match=r"'s' has concurrency=.*from 1"):
        Sink(totals, "a", id="s", concurrency=value)


def test_a_batch_function_is_called_once_a_step() -> None:
    with pytest.raises(GraphError, match="'s' has concurrency=2 and is a batch function"):
        Sink(lambda messages: None, "a", id="s", concurrency=2, batch=True)


def test_concurrency_is_shown_and_kept_as_plain_data() -> None:
    graph = Graph("g", [Sink(totals, "a", key="key", concurrency=4)])
    assert "up to 4 calls at once" in draw.text(graph.plan())
    again = Graph.from_dict(graph.to_dict())
    assert again.plan().node("totals").options.concurrency == 4


# --- the schedule -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds.among(range(20)))
def test_a_schedule_gives_every_message_once_and_those_of_a_lane_in_order(seed: int) -> None:
    """Callers that come and go at random; each lane has one of them at a time, and none is without work needlessly."""
    print(f"CUES_TEST_SEED={seed}")
    chance = random.Random(seed)
    lanes = [chance.randrange(6) for _ in range(50)]
    schedule = Schedule(lanes)
    running: list[int] = [o for _ in range(4) if (o := schedule.take(None)) is not None]
    order = list(running)
    while running:
        assert len({lanes[o] for o in running}) == len(running)
        done = running.pop(chance.randrange(len(running)))
        more = schedule.take(done)
        if more is not None:
            running.append(more)
            order.append(more)
    assert sorted(order) == list(range(50))
    for lane in set(lanes):
        assert [o for o in order if lanes[o] == lane] == [o for o in range(50) if lanes[o] == lane]


def test_a_schedule_that_is_cut_or_stopped_gives_no_more() -> None:
    schedule = Schedule(range(10))
    assert schedule.take(None) == 0
    schedule.cut(3)
    schedule.cut(5)  # a later failure changes nothing
    assert [schedule.take(None) for _ in range(3)] == [1, 2, None]
    stopped = Schedule(range(10))
    first = Interrupted()
    stopped.stop(first)
    stopped.stop(ValueError())
    assert stopped.take(None) is None and stopped.fatal is first


def test_threads_are_made_as_they_are_needed_and_no_more() -> None:
    threads = Threads(3, "pool")
    assert threads.submit(lambda: 1).result() == 1
    assert threads.submit(lambda: 2).result() == 2
    assert len(threads.threads) == 1
    barrier = threading.Barrier(3)
    assert sorted(f.result() for f in [threads.submit(partial(barrier.wait, MEET_S)) for _ in range(6)]) == (
        [0, 0, 1, 1, 2, 2]
    )
    assert len(threads.threads) == 3
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result()
    threads.close()
    with pytest.raises(RunnerClosed):
        threads.submit(lambda: 3)


# --- calls that take too long ---


@pytest.mark.parametrize("shape", ["plain", "async", "batch", "async batch", "concurrency"])
def test_a_call_that_hangs_fails_its_message_and_its_late_result_is_dropped(store: Store, shape: str) -> None:
    """The third message hangs at each of its attempts; the others, their state and their order are as without it."""
    go = threading.Event()
    tries: list[int] = []
    batch = "batch" in shape

    def hang(messages: list[dict[str, Any]], process: Any) -> None:
        for message in messages:
            if not batch:
                process.state["sum"] = process.state.get("sum", 0) + message["n"]
            if message["n"] == 3:
                tries.append(3)
                assert go.wait(60)

    def plain(given: Any, process: Any) -> Any:
        hang(given if batch else [given], process)
        return given

    async def waits(given: Any, process: Any) -> Any:
        messages = given if batch else [given]
        for message in messages:
            if not batch:
                process.state["sum"] = process.state.get("sum", 0) + message["n"]
            if message["n"] == 3:
                tries.append(3)
                await asyncio.sleep(60)
        return given

    options: dict[str, Any] = {"batch": True, "batch_size": 1} if batch else {}
    if shape == "concurrency":
        options |= {"concurrency": 4, "key": "n"}
    fn = waits if "async" in shape else plain
    limited = Stream(fn, "in", "out", id="p", timeout_s=0.5, retries=cues.Retry(attempts=2, backoff_s=0), **options)
    store.queue("in").appender().write_many({"n": n} for n in range(1, 7))
    told: list[Any] = []
    with cues.Graph("g", [limited], errors="errors").start(store=store, listeners=(told.append,)) as running:
        assert running.wait_idle(60)
        assert [m["n"] for m in running.messages("out")] == [1, 2, 4, 5, 6]
        (error,) = running.messages("errors")
        assert error["err/cause"][0]["type"] == "cues.errors.CallTimedOut"
        assert error["err.proc/config"]["attempt"] == 2 == len(tries)
        go.set()
        running.store.queue("in").appender().write({"n": 7})
        assert running.wait_idle(60)
        assert [m["n"] for m in running.messages("out")] == [1, 2, 4, 5, 6, 7]
        if shape in ("plain", "async"):
            assert running.engine.workers[0].stepper.state.view(None)["sum"] == 1 + 2 + 4 + 5 + 6 + 7
    assert any("continues in its thread" in event.text for event in told) is ("async" not in shape)


@pytest.mark.parametrize(
    "options", [{"timeout_s": 0}, {"timeout_s": "1"}, {"timeout_s": float("inf")}, {"timeout_s": 1, "tailers": ["x"]}]
)
def test_a_timeout_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(cues.GraphError, match="timeout_s="):
        Stream(lambda m, process: m, "in", "out", id="p", **options)
