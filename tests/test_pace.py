"""A step is bounded in time: message functions are closed, snapshots and batches follow what calls cost."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from small import feed, numbers, run

from cues import AnyOf, Graph, Sink, Source, Store, Stream, testing
from cues.base.names import TYPE
from cues.engine.assembly import assemble
from cues.errors import GraphError
from cues.steps.pace import Pace, Stride

Message = dict[str, Any]


@pytest.fixture
def clock() -> Iterator[testing.Clock]:
    with testing.Clock() as found:
        yield found


class Costly:
    """A function whose calls advance the clock, which stops otherwise."""

    def __init__(self, clock: testing.Clock, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self.calls: list[Any] = []

    def __call__(self, message: Message) -> Message:
        self.calls.append(message["n"])
        self.clock.advance(self.seconds)
        return message


def ranges(store: Store, processor: str) -> list[int]:
    """The numbers of messages that the steps of a try log committed (a snapshot with its attempt)."""
    found = testing.messages(store, processor)
    pairs = [(a, b) for a, b in itertools.pairwise(found) if a[TYPE].endswith("/snapshot") and "attempt" in b[TYPE]]
    return [
        sum(end - snapshot["q.try/tailer-indices"][tailer] for tailer, end in snapshot["q.try/to-indices"].items())
        for snapshot, _ in pairs
    ]


# --- closing ------------------------------------------------------------------------------------


def test_a_step_of_a_stream_is_closed_when_its_time_is_over(store: Store, clock: testing.Clock) -> None:
    """20 ms a call and a bound of 0.25 s: 13 calls, then the next step begins with the message that was not reached."""
    feed(store, a=range(40))
    slow = Costly(clock, 0.02)
    run(store, Stream(slow, "a", "out", id="s"), steps_max=1)
    assert numbers(store, "out") == list(range(len(slow.calls))) and 12 <= len(slow.calls) <= 13
    run(store, Stream(slow, "a", "out", id="s"))
    assert slow.calls == numbers(store, "out") == list(range(40))
    assert max(ranges(store, "g.s")) <= 13
    assert not testing.check_attempts(store)


def test_one_slow_call_closes_its_step(store: Store, clock: testing.Clock) -> None:
    """Calls that cost nothing before it, several between two looks at the clock, change nothing of that."""
    feed(store, a=range(400))
    called = []

    def sometimes(message: Message) -> Message:
        called.append(message["n"])
        clock.advance(5 if message["n"] == 150 else 0)
        return message

    run(store, Stream(sometimes, "a", "out", id="s", step_s=0.25))
    assert called == numbers(store, "out") == list(range(400))
    first, *rest = ranges(store, "g.s")
    assert 151 <= first <= 150 + 128 and first + sum(rest) == 400


@pytest.mark.parametrize("options", [{}, {"side_effects": True}, {"key": "n"}], ids=str)
def test_outputs_hashes_and_state_do_not_depend_on_the_bound(
    store: Store, clock: testing.Clock, options: dict[str, Any]
) -> None:
    hashes: dict[str, list[str]] = {"bounded": [], "whole": []}

    def count(message: Message, process: Any) -> Message | None:
        hashes[process.id.rpartition(".")[2]].append(process.delivery_hash)
        process.state["seen"] = process.state.get("seen", 0) + 1
        clock.advance(0.1)
        if message["n"] == 17:
            raise ValueError("17")
        return {"n": message["n"], "seen": process.state["seen"]}

    feed(store, a=[{"n": n % 20} for n in range(30)])
    run(store, Stream(count, "a", "out", id="bounded", **options), errors="errors")
    whole = Stream(count, "a", "all", id="whole", step_s=None, **options)
    run(store, whole, errors="wrong", accept_topology=True)  # another processor over the same queue
    assert testing.messages(store, "out") == testing.messages(store, "all")
    assert len(numbers(store, "out")) == 29 and len(testing.messages(store, "errors")) == 1
    assert len(set(hashes["bounded"])) == 30 and len(ranges(store, "g.bounded")) > len(ranges(store, "g.whole"))


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("kind", ["threads", "async"])
def test_calls_at_once_are_closed_too_and_none_is_called_twice(
    store: Store, clock: testing.Clock, kind: str, keyed: bool
) -> None:
    """A message whose call began in the step is in that step, with all messages before it."""
    feed(store, a=[{"n": n, "key": 0 if n % 3 else n} for n in range(60)])
    called: list[int] = []

    def slow(message: Message) -> Message:
        called.append(message["n"])
        clock.advance(0.02)
        return message

    async def slowly(message: Message) -> Message:
        await asyncio.sleep(0)
        return slow(message)

    function = slowly if kind == "async" else slow
    options = {"key": "key"} if keyed else {}
    run(store, Stream(function, "a", "out", id="s", concurrency=4, **options))
    assert sorted(called) == numbers(store, "out") == list(range(60))
    assert len(ranges(store, "g.s")) >= 4
    assert not testing.check_attempts(store)


def test_alts_and_joins_take_up_what_a_closed_step_left(store: Store, clock: testing.Clock) -> None:
    feed(store, a=range(30), b=range(100, 130))

    def pair(a: Message, b: Message) -> Message:
        clock.advance(0.1)
        return {"n": (a["n"], b["n"])}

    run(
        store,
        Stream(pair, {"a": "a", "b": "b"}, "pairs"),
        Stream(Costly(clock, 0.1), AnyOf("a", "b"), "any", id="alts"),
    )
    assert numbers(store, "pairs") == [(n, 100 + n) for n in range(30)]
    found = numbers(store, "any")
    assert [n for n in found if n < 100] == list(range(30)) and [n for n in found if n >= 100] == list(range(100, 130))


# --- snapshots ----------------------------------------------------------------------------------


def test_a_slow_sink_commits_after_each_message(store: Store, clock: testing.Clock) -> None:
    feed(store, a=range(10))
    run(store, Sink(Costly(clock, 1), "a", id="s"))
    assert ranges(store, "g.s") == [1] * 10


def test_a_cheap_sink_soon_takes_whole_batches(store: Store, clock: testing.Clock) -> None:
    feed(store, a=range(5_000))
    run(store, Sink(lambda m: None, "a", id="s"))
    assert ranges(store, "g.s")[:12] == [2**k for k in range(10)] + [1000, 1000]


@pytest.mark.parametrize("options", [{}, {"strategy": "at-most-once"}], ids=str)
def test_a_snapshot_shrinks_when_calls_get_dearer(store: Store, clock: testing.Clock, options: dict[str, Any]) -> None:
    feed(store, a=range(700))
    sink = Costly(clock, 0)

    def dearer(message: Message) -> None:
        sink.seconds = 0.05 if message["n"] >= 500 else 0
        sink(message)

    run(store, Sink(dearer, "a", id="s", **options))
    assert sink.calls == list(range(700))
    # At-most-once the positions have moved already: a step is not closed, but the next ones are smaller.
    assert max(ranges(store, "g.s")[-6:]) <= 5


def test_at_most_once_loses_one_step_and_a_first_step_is_small(store: Store, clock: testing.Clock) -> None:
    feed(store, a=range(5))
    slow = Costly(clock, 1)
    sink = Sink(slow, "a", id="s", strategy="at-most-once")
    with testing.crash("function.after", hit=2, how="raise"), pytest.raises(testing.Crashed):
        run(store, sink)
    run(store, sink)
    assert slow.calls == list(range(5))  # the one whose step died had been called


def test_a_retry_takes_exactly_the_range_of_its_snapshot(store: Store, clock: testing.Clock) -> None:
    """A batch function dies in a step of 4; more came meanwhile, and the new start would begin with 1."""
    feed(store, a=range(7))
    calls: list[tuple[list[int], str]] = []

    def save(messages: list[Message], process: Any) -> None:
        calls.append(([m["n"] for m in messages], process.delivery_hash))

    sink = Sink(save, "a", id="s", batch=True)
    with testing.crash("function.after", hit=3, how="raise"), pytest.raises(testing.Crashed):
        run(store, sink)
    feed(store, a=range(7, 9))
    assert run(store, sink).decisions == {"s": "rewind"}
    assert [numbers for numbers, _ in calls] == [[0], [1, 2], [3, 4, 5, 6], [3, 4, 5, 6], [7, 8]]
    assert calls[2] == calls[3]


def test_a_large_snapshot_of_slow_calls_gets_on_although_it_is_killed_again_and_again(
    store: Store, clock: testing.Clock
) -> None:
    """It was written while calls cost nothing. Each life makes three calls of a second and repeats one at most."""
    feed(store, a=range(20))
    slow = Costly(clock, 1)
    with testing.crash("snapshot.after", how="raise"), pytest.raises(testing.Crashed):
        run(store, Sink(slow, "a", id="s", step_s=None))
    kills = 0
    while True:
        try:
            with testing.crash("function.after", hit=3, how="raise"):
                run(store, Sink(slow, "a", id="s"))
            break
        except testing.Crashed:
            kills += 1
    assert sorted(set(slow.calls)) == list(range(20)) and kills > 5
    assert len(slow.calls) <= 20 + 2 * kills
    assert not testing.check_attempts(store)


# --- batch functions ----------------------------------------------------------------------------


def test_a_batch_function_is_given_what_fits(store: Store, clock: testing.Clock) -> None:
    """10 ms a message: calls grow to the 25 that fit 0.25 s."""
    feed(store, a=range(200))
    sizes = []

    def slow(messages: list[Message]) -> list[Message]:
        sizes.append(len(messages))
        clock.advance(0.01 * len(messages))
        return messages

    run(store, Stream(slow, "a", "out", batch=True))
    assert numbers(store, "out") == list(range(200))
    assert sizes[:5] == [1, 2, 4, 8, 16] and max(sizes) in (24, 25)


def test_a_batch_function_with_a_dear_call_is_given_more(store: Store, clock: testing.Clock) -> None:
    """A second a call, whatever it is given, fits nothing: many messages for one call are what costs least."""
    feed(store, a=range(5_000))
    sizes = []

    def bulk(messages: list[Message]) -> None:
        sizes.append(len(messages))
        clock.advance(1 + 0.001 * len(messages))

    run(store, Sink(bulk, "a", id="s", batch=True))
    assert max(sizes) >= 900 and len(sizes) < 20


class OfTwoCalls:
    """The rule before: both costs from the last two calls of different sizes. It takes noise for costs."""

    def __init__(self, most: int, bound_s: float) -> None:
        self.most, self.bound, self.count = most, bound_s * 1e9, 1
        self.last: tuple[int, float] | None = None
        self.base = self.each = 0.0

    def ran(self, count: int, spent: float) -> None:
        if self.last is None:
            self.base = spent
        elif not 2 / 3 < count / self.last[0] < 3 / 2:
            self.each = max(0.0, (spent - self.last[1]) / (count - self.last[0]))
            self.base = max(0.0, spent - self.each * count)
            self.each = self.each if self.base else spent / count
        else:
            ratio = spent / (self.base + self.each * count)
            self.base, self.each = self.base * ratio, self.each * ratio
        self.last = count, spent
        fits = int(min(self.most, max(self.bound - self.base, self.base) / self.each)) if self.each else self.most
        self.count = max(1, min(max(1, fits), 2 * count))


Cost = Callable[[random.Random, int], float]
"""The seconds of a call with so many messages."""


def calls(rule: type[Any], cost: Cost, seed: int, later: Cost | None = None, number: int = 200) -> list[Any]:
    """The messages and seconds of each call of a batch function that always has more messages waiting."""
    rng, found = random.Random(seed), []
    pace = Pace(1000, 0.25, small=True, fixed=True) if rule is Pace else rule(1000, 0.25)
    for step in range(number):
        count, chosen = pace.count, later if later is not None and step >= number // 2 else cost
        seconds = chosen(rng, count)
        pace.ran(count, max(1, round(seconds * 1e9)))
        found.append((count, seconds))
    return found


def means(rule: type[Any], cost: Cost, later: Cost | None = None) -> tuple[float, float]:
    """Messages and seconds of a call: the means of the second half of 200 calls, of five seeds."""
    found = [call for seed in range(5) for call in calls(rule, cost, seed, later)[100:]]
    return statistics.fmean(n for n, _ in found), statistics.fmean(s for _, s in found)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("cost", "messages", "seconds"),
    [
        # The noise is in the cost of a call: nothing is gained with fewer messages.
        pytest.param(lambda r, n: min(4, r.expovariate(1 / 0.6)), 500, None, id="fixed, 0 to 4 s"),
        pytest.param(lambda r, n: r.uniform(0, 4), 700, None, id="fixed, evenly 0 to 4 s"),
        pytest.param(lambda r, n: 1 + r.expovariate(1 / 0.6), 700, None, id="fixed, 1 s and more"),
        pytest.param(lambda r, n: 0.3 * r.paretovariate(1.2), 100, None, id="fixed, heavy tail above the bound"),
        pytest.param(lambda r, n: 0.05 * r.paretovariate(1.2), 800, None, id="fixed, heavy tail"),
        pytest.param(lambda r, n: 1 + 0.001 * n, 900, None, id="fixed, no noise"),
        # The noise is in the cost of a message: a step takes at most twice its 0.25 s in the mean.
        pytest.param(lambda r, n: 0.01 * n * r.lognormvariate(0, 0.5), 20, 0.5, id="message, times 0.4 to 3"),
        pytest.param(lambda r, n: 0.01 * n * r.uniform(0.3, 1.7), 20, 0.5, id="message, evenly"),
        pytest.param(lambda r, n: 0.005 * n * r.paretovariate(2.5), 20, 0.4, id="message, heavy tail"),
        pytest.param(lambda r, n: 0.01 * n, 24, 0.25, id="message, no noise"),
        pytest.param(lambda r, n: n * r.lognormvariate(0, 0.5), 1, 1.4, id="message of a second"),
        # Both: what a call costs may be spent on messages again.
        pytest.param(lambda r, n: r.uniform(0, 0.3) + 0.005 * n * r.lognormvariate(0, 0.5), 15, 0.5, id="both"),
        pytest.param(
            lambda r, n: r.expovariate(1 / 0.6) + 0.002 * n * r.lognormvariate(0, 0.5), 60, 2.0, id="both, 0.6 s"
        ),
    ],
)
def test_noise_is_not_taken_for_the_cost_of_messages(cost: Cost, messages: int, seconds: float | None) -> None:
    """As many messages as the table says, at least, and steps of so many seconds, at most. Not worse than before."""
    mean, spent = means(Pace, cost)
    assert mean >= messages and (seconds is None or spent <= seconds), (mean, spent)
    before, spent_before = means(OfTwoCalls, cost)
    assert mean >= 0.9 * before or spent <= 0.9 * spent_before, (mean, before, spent, spent_before)


@pytest.mark.usefixtures("clock")
def test_the_rule_before_took_noise_for_costs() -> None:
    """A guard of the table above: it tells the rules apart, in both directions."""
    assert means(OfTwoCalls, lambda r, n: r.uniform(0, 4))[0] < 50
    cheap, dear = (lambda r, n: 1e-4 * n * r.lognormvariate(0, 0.5)), (lambda r, n: 0.1 * n * r.lognormvariate(0, 0.5))
    assert means(OfTwoCalls, cheap, dear)[1] > 20


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("noise", [0, 0.5])
@pytest.mark.parametrize("fixed", [0, 0.05])
@pytest.mark.parametrize("dear", [0.01, 1])
def test_a_call_that_gets_dear_is_made_small_at_once_and_grows_again(noise: float, fixed: float, dear: float) -> None:
    """Messages cost 0.1 ms, then 10 ms to 1 s each: one long call, and steps of the bound after it. And back."""

    def costs(each: float) -> Cost:
        return lambda r, n: fixed * r.uniform(0.5, 1.5) + each * n * r.lognormvariate(0, noise)

    for seed in range(5):
        _, *after = [s for n, s in calls(Pace, costs(1e-4), seed, costs(dear))[100:]]
        assert statistics.fmean(after[:20]) <= 3 * max(0.45, dear + fixed), after
        assert max(after[:20]) <= 15 * max(0.45, dear + fixed), after
        back = [n for n, s in calls(Pace, costs(dear), seed, costs(1e-4))[100:]]
        assert max(back[:40]) == 1000 and statistics.fmean(back[40:]) > 700, back


@pytest.mark.usefixtures("clock")
def test_few_waiting_messages_do_not_make_the_steps_of_a_burst_small() -> None:
    """Calls of one message that take 0 to 4 s say nothing about a call with 1,000."""
    rng, pace = random.Random(1), Pace(1000, 0.25, small=True, fixed=True, first=1000)
    for _ in range(100):
        pace.ran(1, round(rng.uniform(0, 0.4) * 1e9))
    assert pace.count == 1000


def test_a_pace_learns_from_what_was_there(clock: testing.Clock) -> None:
    pace = Pace(1000, 0.25, small=True)
    for _ in range(10):
        pace.ran(1, 1000)
    assert pace.count == 2  # a step of one message proves no more
    pace.ran(2, 10**9)
    assert pace.count == 1
    whole = Pace(1000, None, small=True)
    whole.ran(1000, 10**12)
    assert whole.count == 1000


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("growth", [2, 8])
def test_steps_grow_by_the_given_ratio_up_to_their_bound(clock: testing.Clock, growth: int, fixed: bool) -> None:
    """Ten messages a millisecond; a bound of a second; a step that was too slow is followed by one that is not."""
    pace = Pace(1_000_000, 1.0, small=True, first=10, growth=growth, fixed=fixed)
    counts = []
    for _ in range(12):
        counts.append(pace.count)
        pace.ran(pace.count, 100_000 * pace.count)
    assert counts == [min(10 * growth**turn, 10_000) for turn in range(12)]
    if not fixed:
        pace.ran(pace.count, 2 * 10**9)
        assert pace.count == 5_000


def test_a_stride_is_one_call_where_calls_are_slow(clock: testing.Clock) -> None:
    stride = Stride(250_000_000)
    stride.begin(True)
    for _ in range(8):
        assert not stride.look()
    assert stride.calls == 128
    clock.advance(0.1)
    assert not stride.look()
    assert stride.calls < 24
    clock.advance(0.2)
    assert stride.look()


# --- linger -------------------------------------------------------------------------------------


def test_a_batch_function_that_lingers_waits_for_a_whole_batch_or_its_time(store: Store, clock: testing.Clock) -> None:
    sizes: list[int] = []
    sink = Sink(lambda ms: sizes.append(len(ms)), "a", id="s", batch=True, batch_size=20, linger_s=1)
    lingers = True
    assembly = assemble(Graph("g", [Source("a"), sink]), store, may_linger=lambda: lingers)
    try:
        (stepper,) = [one for one in assembly.steppers if one.inputs]
        assert stepper.step() == "idle" and stepper.lingers_s is None
        feed(store, a=range(3))
        assert stepper.step() == "idle" and stepper.lingers_s == 1
        clock.advance(0.5)
        feed(store, a=range(2))
        assert stepper.step() == "idle" and stepper.lingers_s == 0.5
        clock.advance(0.5)
        assert stepper.step() == "committed" and sizes == [5]
        feed(store, a=range(45))
        assert stepper.step() == stepper.step() == "committed" and sizes == [5, 20, 20]
        assert stepper.step() == "idle" and stepper.lingers_s == 1
        lingers = False  # the graph drains, or somebody waits until it is idle
        assert stepper.step() == "committed" and sizes == [5, 20, 20, 5]
    finally:
        assembly.close()


def test_a_wait_for_an_idle_graph_ends_a_linger(store: Store) -> None:
    sizes: list[int] = []
    sink = Sink(lambda ms: sizes.append(len(ms)), "a", id="s", batch=True, linger_s=3600)
    graph = Graph("g", [Source("a"), sink])
    with graph.start(store=store) as running:
        running.send("a", {"n": 1})
        assert running.wait_idle(timeout=60)
        assert sizes == [1]
        running.hurried_at = 0.0
        running.send("a", {"n": 2})
        assert running.drain(timeout=60)
    assert sizes == [1, 1]


# --- options and figures ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"step_s": 0},
        {"step_s": "1"},
        {"step_s": True},
        {"step_s": float("nan")},
        {"linger_s": -1, "batch": True},
        {"linger_s": 1},
        {"linger_s": None, "batch": True},
    ],
    ids=str,
)
def test_bounds_are_checked_when_they_are_declared(options: dict[str, Any]) -> None:
    with pytest.raises(GraphError, match=r"step_s|linger_s"):
        Sink(print, "a", **options)


def test_a_source_has_no_bound_in_time() -> None:
    with pytest.raises(GraphError, match="takes no option 'step_s'"):
        Source("a", lambda: iter(()), step_s=1)


def test_the_bounds_travel_as_plain_data() -> None:
    graph = Graph("g", [Source("a"), Sink(print, "a", batch=True, step_s=1.5, linger_s=2)])
    again = Graph.from_dict(graph.to_dict())
    (node,) = [node for node in again.plan().running if node.kind == "sink"]
    assert (node.options.step_s, node.options.linger_s) == (1.5, 2)


def test_counters_tell_calls_done_and_in_flight(store: Store, clock: testing.Clock) -> None:
    feed(store, a=range(3))
    seen = []

    def look(message: Message, process: Any) -> None:
        (stepper,) = steppers
        seen.append((stepper.counters.calls, stepper.counters.in_flight))
        clock.advance(1.5)

    assembly = assemble(Graph("g", [Source("a"), Sink(look, "a", id="s")]), store)
    steppers = [one for one in assembly.steppers if one.inputs]
    try:
        while steppers[0].step() == "committed":
            pass
        counters = steppers[0].counters
        assert seen == [(0, 1), (1, 1), (2, 1)]
        assert (counters.calls, counters.in_flight, counters.calling_ns) == (3, 0, 4_500_000_000)
    finally:
        assembly.close()
