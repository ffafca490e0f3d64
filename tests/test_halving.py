"""A batch function that fails: the batch is run again in halves, until the messages that fail alone are known.

The judges are a naive model (a recursion over lists), targets that know only the delivery hash, or only the index of
their last message, and the calls themselves. Deaths by ``kill -9`` at every point are in test_crashes.py, with the
scenarios "… that is halved".
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seeds

import cues
from cues import AnyOf, Graph, Sink, Store, Stream, faults, testing
from cues.engine.assembly import assemble
from cues.errors import CheckpointError, GraphError, ProcessorStopped
from cues.processors import sql, sql_sink
from cues.steps.commit import Committer
from cues.steps.concurrency import Limited, TimedOut
from cues.steps.halving import Halving
from cues.steps.hashes import delivery_hash
from cues.steps.runner import Runner
from cues.steps.stepper import Stepper

Message = dict[str, Any]


def fill(store: Store, count: int, queue: str = "in") -> None:
    store.queue(queue).appender().write_many([{"n": n} for n in range(count)])


def numbers(messages: list[Message]) -> list[int]:
    return [message["n"] for message in messages]


def failed(store: Store, binding: str = "in") -> list[list[int]]:
    """The messages of each error message."""
    return [numbers(error["err.proc/messages"][binding]) for error in testing.messages(store, "errors")]


def stream(function: Callable[..., Any], errors: str | None = "errors", **options: Any) -> Graph:
    options = {"batch": True, "step_s": None, **options}
    return Graph("g", [Stream(function, "in", "out", id="p", **options)], errors=errors)


class Poisoned:
    """A batch function that fails with any of these numbers, and its calls."""

    def __init__(self, *poison: int) -> None:
        self.poison = set(poison)
        self.calls: list[list[int]] = []

    def __call__(self, messages: list[Message]) -> list[Message]:
        self.calls.append(numbers(messages))
        for message in messages:
            message["seen"] = message.get("seen", 0) + 1
            if message["n"] in self.poison:
                raise ValueError(f"poison {message['n']}")
        return messages


# --- the calls --------------------------------------------------------------------------------------


def test_halves_are_run_from_left_to_right_until_single_messages_fail(store: Store) -> None:
    fill(store, 8)
    function = Poisoned(4)
    report = testing.run_until_idle(stream(function), store)
    every = list(range(8))
    assert function.calls == [every, every[:4], every[4:], [4, 5], [4], [5], [6, 7]]
    assert testing.messages(store, "out") == [{"n": n, "seen": 1} for n in every if n != 4]
    assert failed(store) == [[4]]
    warned = [event.text for event in report.events if "halves" in event.text]
    assert warned == [
        "a batch of 8 messages failed (ValueError: poison 4); runs it in halves, to find the messages that fail alone"
    ]
    assert testing.check_attempts(store) == []


def test_a_part_of_several_messages_is_called_once_and_a_single_one_has_all_tries(store: Store) -> None:
    fill(store, 4)
    function = Poisoned(2)
    testing.run_until_idle(stream(function, retries=cues.Retry(3, backoff_s=0)), store)
    assert function.calls == [[0, 1, 2, 3]] * 3 + [[0, 1], [2, 3]] + [[2]] * 3 + [[3]]
    assert [error["err.proc/config"]["attempt"] for error in testing.messages(store, "errors")] == [3]


def test_a_single_message_that_succeeds_at_a_further_try_is_no_error(store: Store) -> None:
    fill(store, 4)
    calls: list[list[int]] = []

    def heals(messages: list[Message]) -> list[Message]:
        calls.append(numbers(messages))
        if 3 in calls[-1] and calls.count([3]) < 2:
            raise ConnectionError
        return messages

    testing.run_until_idle(stream(heals, retries=cues.Retry(2, backoff_s=0, on=ConnectionError)), store)
    assert numbers(testing.messages(store, "out")) == [0, 1, 2, 3]
    assert failed(store) == [] and calls[-2:] == [[3], [3]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds.among(range(20)))
def test_the_number_of_further_calls_is_bounded(store: Store, seed: int) -> None:
    chance = random.Random(seed)
    bits = chance.randint(1, 7)
    poison = chance.sample(range(1 << bits), min(1 << bits, chance.randint(0, 5)))
    fill(store, 1 << bits)
    function = Poisoned(*poison)
    testing.run_until_idle(stream(function), store)
    assert [n for (n,) in failed(store)] == sorted(poison)
    assert len(function.calls) <= 1 + 2 * len(poison) * bits


def test_messages_that_fail_only_together_are_no_errors(store: Store) -> None:
    fill(store, 6)

    def few(messages: list[Message]) -> list[Message]:
        if len(messages) > 2:
            raise MemoryError
        return messages

    testing.run_until_idle(stream(few), store)
    assert numbers(testing.messages(store, "out")) == list(range(6)) and failed(store) == []


def test_without_bisect_the_whole_batch_is_one_error_message(store: Store) -> None:
    fill(store, 6)
    function = Poisoned(4)
    testing.run_until_idle(stream(function, bisect=False), store)
    assert failed(store) == [list(range(6))] and len(function.calls) == 1 and not testing.messages(store, "out")


def test_an_at_most_once_batch_is_not_called_again(store: Store) -> None:
    fill(store, 6)
    function = Poisoned(4)
    testing.run_until_idle(stream(function, strategy="at-most-once"), store)
    assert failed(store) == [list(range(6))] and len(function.calls) == 1


def test_without_an_error_queue_the_processor_stops_before_the_batch(store: Store) -> None:
    fill(store, 6)
    function = Poisoned(4)
    with pytest.raises(ProcessorStopped, match="poison 4"):
        testing.run_until_idle(stream(function, None), store)
    assert len(function.calls) == 1 and not testing.messages(store, "out")


def test_a_target_that_fails_stops_the_processor_and_no_half_is_called(store: Store) -> None:
    fill(store, 6)
    calls: list[list[int]] = []

    def away(messages: list[Message]) -> None:
        calls.append(numbers(messages))
        raise CheckpointError("The database is away.", "start it.")

    with pytest.raises(ProcessorStopped, match="The database is away"):
        testing.run_until_idle(Graph("g", [Sink(away, "in", batch=True, step_s=None)], errors="errors"), store)
    assert calls == [list(range(6))] and failed(store) == []


@pytest.mark.parametrize("options", [{"bisect": "no"}, {"bisect": None}, {"bisect": False}])
def test_an_option_that_has_no_effect_is_refused(options: Any) -> None:
    with pytest.raises(GraphError, match=r"bisect=.* Try: give True; or False, to a batch function\."):
        Stream(lambda message: message, "in", "out", id="p", **options)


def test_ends_of_parts() -> None:
    halving = Halving()
    assert halving.bound(5, 100) == 100 and not halving.at(5)
    halving.divide(5, 12)
    assert halving.at(5) and halving.bound(5, 100) == 3 and halving.bound(5, 2) == 2
    halving.divide(5, 8)
    assert [halving.bound(index, 100) for index in (5, 6, 8)] == [1, 2, 4]
    halving.divide(8, 10)  # fewer than the part: an output had no room for more
    assert [halving.bound(index, 100) for index in (8, 9, 10, 12)] == [1, 1, 2, 100] and not halving.at(12)


def test_a_recovery_forgets_the_parts(store: Store) -> None:
    """After a seek its stepper is recovered. The ends of parts belong to the positions before."""
    fill(store, 8)
    with contextlib.closing(assemble(stream(Poisoned(2)), store)) as assembly:
        (stepper,) = (one for one in assembly.steppers if isinstance(one, Stepper))
        stepper.step()
        assert stepper.taker.halving[0].at(1)
        stepper.recover()
        assert not stepper.taker.halving[0].at(1)


def test_a_part_waits_for_no_more_messages(store: Store) -> None:
    """With ``linger_s`` a batch waits for ``batch_size`` messages. A part of one that failed is whole already."""
    fill(store, 4)
    function = Poisoned(2)
    with contextlib.closing(assemble(stream(function, batch_size=4, linger_s=600), store)) as assembly:
        (stepper,) = (one for one in assembly.steppers if isinstance(one, Stepper))
        stepper.taker.may_linger = lambda: True
        while stepper.step() == "committed":
            pass
    assert function.calls == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]


# --- forms of batch functions -----------------------------------------------------------------------


class Stuck(Exception):
    """Stands for a call that does not return in time."""


async def later(messages: list[Message]) -> list[Message]:
    if 5 in numbers(messages):
        raise ValueError("poison")
    return messages


def joined(left: list[Message], right: list[Message], process: Any) -> list[Message]:
    if 5 in numbers(left):
        raise ValueError("poison")
    at = process.indices
    return [{"n": a["n"], "both": [a["n"], b["n"]], "at": [*some]} for a, b, *some in zip(left, right, *at.values())]


def either(messages: list[Message], process: Any) -> list[Message]:
    if 5 in numbers(messages):
        raise ValueError("poison")
    return [{**message, "from": process.binding} for message in messages]


def imperative(messages: list[Message], process: Any) -> list[Message]:
    """Reads one message of another queue for each of its own, and writes it; then it fails."""
    rates = process.tailers["rates"].read_many(len(messages))
    process.appenders["log"].write_many(rates)
    if 5 in numbers(messages):
        raise ValueError("poison")
    return [{"n": message["n"], "rate": rate["n"]} for message, rate in zip(messages, rates)]


def wanted(message: Message) -> bool:
    return message["n"] % 2 == 1


GOOD = [n for n in range(12) if n != 5]


def test_an_async_function(store: Store) -> None:
    fill(store, 12)
    testing.run_until_idle(stream(later, timeout_s=60), store)
    assert numbers(testing.messages(store, "out")) == GOOD and failed(store) == [[5]]


def test_a_call_that_takes_too_long_is_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain function with ``timeout_s``: each call has a layer of the state of its own."""
    fill(store, 8)

    def limited(self: Limited, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Stuck:
            raise TimedOut from None

    def stuck(messages: list[Message], process: Any) -> list[Message]:
        process.state["n"] = process.state.get("n", 0) + len(messages)
        if 5 in numbers(messages):
            raise Stuck
        return [{"n": message["n"], "so far": process.state["n"]} for message in messages]

    monkeypatch.setattr(Limited, "call", limited)
    testing.run_until_idle(stream(stuck, timeout_s=60), store)
    assert failed(store) == [[5]]
    assert [m["so far"] for m in testing.messages(store, "out")] == [4, 4, 4, 4, 5, 7, 7]
    assert testing.messages(store, "errors")[0]["err/cause"][0]["type"].endswith("CallTimedOut")


def test_a_join_is_halved_on_all_inputs_together(store: Store) -> None:
    fill(store, 12, "a")
    store.queue("b").appender().write_many([{"n": 100 + n} for n in range(15)])
    join = Stream(joined, {"left": "a", "right": "b"}, "out", id="p", batch=True, step_s=None)
    testing.run_until_idle(Graph("g", [join], errors="errors"), store)
    expected = [{"n": n, "both": [n, 100 + n], "at": [n + 1, n + 1]} for n in GOOD]
    assert testing.messages(store, "out") == expected
    (error,) = testing.messages(store, "errors")
    assert error["err.proc/messages"] == {"left": [{"n": 5}], "right": [{"n": 105}]}


def test_alts_are_halved_on_the_input_that_failed(store: Store) -> None:
    fill(store, 12, "a")
    store.queue("b").appender().write_many([{"n": 100 + n} for n in range(15)])
    both = Stream(either, AnyOf("a", "b"), "out", id="p", batch=True, step_s=None, batch_size=6)
    testing.run_until_idle(Graph("g", [both], errors="errors"), store)
    by_input = defaultdict(list)
    for message in testing.messages(store, "out"):
        by_input[message["from"]].append(message["n"])
    assert by_input == {"a": GOOD, "b": list(range(100, 115))} and failed(store, "a") == [[5]]


def test_reads_and_writes_of_an_imperative_function_are_those_of_the_parts_that_succeed(store: Store) -> None:
    fill(store, 12)
    store.queue("rates").appender().write_many([{"n": 100 + n} for n in range(15)])
    graph = stream(imperative, tailers="rates", appenders="log")
    testing.run_until_idle(graph, store)
    rates = list(range(100, 111))
    assert testing.messages(store, "out") == [{"n": n, "rate": rate} for n, rate in zip(GOOD, rates)]
    assert numbers(testing.messages(store, "log")) == rates and failed(store) == [[5]]


def test_messages_that_a_filter_drops_are_not_given_to_a_part(store: Store) -> None:
    fill(store, 12)
    function = Poisoned(5)
    testing.run_until_idle(stream(function, where=wanted), store)
    assert numbers(testing.messages(store, "out")) == [1, 3, 7, 9, 11] and failed(store) == [[5]]
    assert all(n % 2 for call in function.calls for n in call) and [5] in function.calls


def test_a_timer_that_a_failed_part_sets_is_not_set(store: Store) -> None:
    fill(store, 6)

    def sets(messages: list[Message], process: Any) -> None:
        for message in messages:
            process.timer(message["n"], 0.0)
        if 5 in numbers(messages):
            raise ValueError("poison")

    def fire(timer: Message) -> Message:
        return {"n": timer["key"]}

    testing.run_until_idle(stream(sets, timer=fire), store)
    assert sorted(numbers(testing.messages(store, "out"))) == [0, 1, 2, 3, 4] and failed(store) == [[5]]


# --- a naive model ----------------------------------------------------------------------------------


class Rule:
    """Which batches fail, by their numbers alone."""

    def __init__(self, chance: random.Random, count: int) -> None:
        self.alone = set(chance.sample(range(count), min(count, chance.randint(0, 4))))
        self.pairs = [set(chance.sample(range(count), 2)) for _ in range(chance.randint(0, 2) if count > 1 else 0)]
        self.most = chance.choice([1, 3, 1000, 1000])

    def fails(self, batch: list[int]) -> bool:
        together = set(batch)
        return bool(together & self.alone) or any(pair <= together for pair in self.pairs) or len(batch) > self.most


def call(messages: list[Message], state: Any, rule: Rule, place: Any) -> dict[str, list[Message]]:
    """Counts by key in state, and two outputs, before it may fail."""
    results: dict[str, list[Message]] = {"odd": [], "even": []}
    for message in messages:
        n = message["n"]
        of_key = state(n % 3)
        of_key["count"] = of_key.get("count", 0) + 1
        of_key["seen"] = [*of_key.get("seen", ()), n][-3:]
        if n % 5:
            row = {"n": n, "count": of_key["count"], "seen": list(of_key["seen"]), "place": place}
            results["odd" if n % 2 else "even"].append(row)
    if rule.fails(numbers(messages)):
        raise ValueError("together")
    return results


class Naive:
    """The same batches with lists, dicts and a recursion."""

    def __init__(self, rule: Rule, identity: bytes) -> None:
        self.rule, self.identity = rule, identity
        self.state: dict[int, Message] = defaultdict(dict)
        self.outputs: dict[str, list[Message]] = {"odd": [], "even": []}
        self.failed: list[int] = []

    def run(self, batch: list[int]) -> None:
        state = {key: {**fields} for key, fields in self.state.items()}
        low, high = batch[0] + 1, batch[-1] + 2
        place = [low, high, delivery_hash("g.p", 0, [("g.p.in", self.identity, low, high)])]
        try:
            results = call([{"n": n} for n in batch], lambda key: state.setdefault(key, {}), self.rule, place)
        except ValueError:
            if len(batch) == 1:
                self.failed += batch
            else:
                self.run(batch[: len(batch) // 2])
                self.run(batch[len(batch) // 2 :])
            return
        self.state.update(state)
        for binding, messages in results.items():
            self.outputs[binding] += messages


def random_run(seed: int, crashes: bool) -> None:
    chance = random.Random(seed)
    count, size = chance.randint(1, 40), chance.choice([1, 2, 3, 7, 16, 1000])
    rule = Rule(chance, count)
    options = {"side_effects": chance.random() < 0.5, "retries": chance.choice([0, 0, cues.Retry(2, backoff_s=0)])}

    def function(messages: list[Message], process: Any) -> Any:
        delivery = process.delivery
        place = [delivery.start["g.p.in"], delivery.end["g.p.in"], process.delivery_hash]
        assert process.indices == [message["n"] + 1 for message in messages]
        return call(messages, process.state_of, rule, None if crashes else place)

    def graph() -> Graph:
        outputs = {"odd": "odd", "even": "even"}
        batched = Stream(function, "in", outputs, id="p", batch=True, batch_size=size, step_s=None, **options)
        return Graph("g", [batched], errors="errors")

    with testing.temporary_store() as store:
        fill(store, count)
        for _ in range(3 if crashes else 0):
            point, hit = chance.choice(list(faults.STEP_POINTS)), chance.randint(1, 20)
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph(), store)
        testing.run_until_idle(graph(), store)
        if crashes:  # a start begins a new batch, so batches are others; what fails only together is no error
            assert sorted(n for (n,) in failed(store)) == sorted(rule.alone)
            seen = [m["n"] for queue in ("odd", "even") for m in testing.messages(store, queue)]
            assert sorted(seen) == [n for n in range(count) if n not in rule.alone and n % 5]
            counts = {key: testing.state(store, "g.p", key).get("count", 0) for key in range(3)}
            good = [n for n in range(count) if n not in rule.alone]
            assert counts == {key: sum(n % 3 == key for n in good) for key in range(3)}
        else:
            naive = Naive(rule, store.queue("in").core.row().identity)
            for low in range(0, count, size):
                naive.run(list(range(low, min(count, low + size))))
            for queue in ("odd", "even"):
                assert testing.messages(store, queue) == naive.outputs[queue]
            assert [n for (n,) in failed(store)] == naive.failed
            for key in range(3):
                assert testing.state(store, "g.p", key) == naive.state[key]
        assert testing.check_attempts(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds.among(range(0, 200, 25)))
def test_random_rules_beside_a_naive_model(seed: int) -> None:
    for one in range(seed, seed + 25):
        print(f"{seeds.VARIABLE}={one}")
        random_run(one, crashes=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds.among(range(0, 100, 25)))
def test_random_rules_with_crashes(seed: int) -> None:
    for one in range(seed, seed + 25):
        print(f"{seeds.VARIABLE}={one}")
        random_run(one, crashes=True)


def state_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The changes of a failed call are kept."""
    monkeypatch.setattr("cues.steps.state.Layer.discard", lambda self: self.settle())


def positions_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed batch the next one is taken."""
    monkeypatch.setattr(Committer, "drop", lambda self: self.state.forget())


def whole_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the batch is forgotten: its last part has messages of the next one."""
    real = Halving.divide

    def divide(self: Halving, start: int, stop: int) -> None:
        real(self, start, stop)
        del self._ends[:-1]

    monkeypatch.setattr(Halving, "divide", divide)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [state_stays, positions_stay, whole_ends])
def test_the_model_finds_what_is_wrong(broken: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    wrong = 0
    for seed in range(20):
        try:
            random_run(seed, crashes=False)
        except Exception:
            wrong += 1
        except AssertionError:
            wrong += 1
    assert wrong


# --- targets ----------------------------------------------------------------------------------------


def kept_by_hash(told: list[tuple[str, list[int]]]) -> list[int]:
    """The numbers in a target that ignores a delivery whose hash it knows."""
    return [n for ns in dict(told).values() for n in ns]


def into_hashes(told: list[tuple[str, list[int]]], poison: set[int]) -> Graph:
    def save(messages: list[Message], process: Any) -> None:
        if poison & set(numbers(messages)):
            raise ValueError("poison")
        told.append((process.delivery_hash, numbers(messages)))

    return Graph("g", [Sink(save, "in", id="p", batch=True, step_s=None)], errors="errors")


def crash_into_hashes(mended: bool) -> int:
    """Die at every point and hit while halving; return how many times the target has not each message once.

    ``mended``: the function that starts again fails with no message. So no part of a batch is taken again by chance:
    only its own snapshot names it.
    """
    wrong = 0
    with testing.temporary_store() as store:
        fill(store, 9)
        sites = testing.crash_sites(lambda: testing.run_until_idle(into_hashes([], {2, 7}), store))
    for point, hit in sites:
        told: list[tuple[str, list[int]]] = []
        with testing.temporary_store() as store:
            fill(store, 9)
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(into_hashes(told, {2, 7}), store)
            testing.run_until_idle(into_hashes(told, set() if mended else {2, 7}), store)
            errors = [n for (n,) in failed(store)]
        assert errors == [2, 7] or mended
        wrong += sorted(kept_by_hash(told) + errors) != list(range(9))
    assert len(sites) > 60
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("mended", [False, True])
def test_a_target_that_knows_hashes_has_each_message_once(mended: bool) -> None:
    assert crash_into_hashes(mended) == 0


@pytest.mark.slow
def test_a_part_without_a_snapshot_of_its_own_is_repeated_under_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    real = Committer.commit_snapshot

    def snapshot(self: Committer, taken: Any) -> None:
        if not taken.halved:
            real(self, taken)

    monkeypatch.setattr(Committer, "commit_snapshot", snapshot)
    assert crash_into_hashes(mended=True) > 0


def crash_into_positions(directory: Path, batch: bool) -> int:
    """Die at every point and hit; return how many times rows and errors together are not each message once.

    The target keeps the index of its last message. A message that failed before it must not count as written.
    """

    def graph(target: sql.SQLite) -> Graph:
        def save(given: Any, process: Any) -> None:
            for message in given if batch else [given]:
                process.connection.execute("insert into numbers values (?)", (message["n"],))
                if message["n"] in (2, 3, 7):
                    raise ValueError("poison")

        sink = Sink(save, "in", id="p", batch=batch, step_s=None, batch_size=8, checkpoint=target)
        return Graph("g", [sink], errors="errors")

    def target(name: str) -> sql.SQLite:
        return sql.SQLite(directory / f"{name}.db", "create table if not exists numbers (n integer)")

    with testing.temporary_store() as store:
        fill(store, 10)
        sites = testing.crash_sites(lambda: testing.run_until_idle(graph(target("undisturbed")), store))
    assert {"checkpoint.inside", "checkpoint.after", "commit.before"} <= {point for point, _ in sites}
    wrong = 0
    for number, (point, hit) in enumerate(sites):
        with testing.temporary_store() as store:
            fill(store, 10)
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph(target(str(number))), store)
            testing.run_until_idle(graph(target(str(number))), store)
            with contextlib.closing(sqlite3.connect(directory / f"{number}.db")) as database:
                rows = [n for (n,) in database.execute("select n from numbers order by rowid")]
            wrong += (rows, failed(store)) != ([0, 1, 4, 5, 6, 8, 9], [[2], [3], [7]])
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("batch", [False, True])
def test_a_target_that_knows_its_last_message_loses_no_failed_message(batch: bool, tmp_path: Path) -> None:
    """A message function lost it: later messages of its step moved the target, before the failure was committed."""
    assert crash_into_positions(tmp_path, batch) == 0


@pytest.mark.slow
def test_a_step_that_continues_after_a_failure_loses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    real = Runner._run_messages

    def run(self: Runner, taken: Any) -> Any:
        self._ends_at_failure = False
        return real(self, taken)

    monkeypatch.setattr(Runner, "_run_messages", run)
    assert crash_into_positions(tmp_path, batch=False) > 0


@pytest.mark.slow
def test_a_row_that_does_not_fit_a_table_takes_no_other_along(store: Store, tmp_path: Path) -> None:
    """The batch function of the library that writes to a database."""
    table = sql_sink.Table(str(tmp_path / "t.db"), "numbers", {"n": "integer"})
    store.queue("in").appender().write_many([{"n": n} if n != 5 else {"m": n} for n in range(12)])
    graph = Graph("g", [table.sink("in", id="p", step_s=None)], errors="errors")
    testing.run_until_idle(graph, store)
    with contextlib.closing(sqlite3.connect(tmp_path / "t.db")) as database:
        assert [n for (n,) in database.execute("select n from numbers order by n")] == GOOD
    assert [error["err.proc/messages"]["in"] for error in testing.messages(store, "errors")] == [[{"m": 5}]]


@pytest.mark.slow
def test_parts_that_write_pending_messages_to_another_store(tmp_path: Path) -> None:
    """With ``across="pending"``, at every point: readers of committed messages see those that succeeded, once."""

    def graph(where: Path) -> Graph:
        options: Any = {"batch": True, "step_s": None, "across": "pending"}
        there = {"out": cues.QueueOptions(path=where / "other")}
        return Graph("g", [Stream(either, AnyOf("in"), "out", id="p", **options)], errors="errors", queues=there)

    def run(where: Path, crash: tuple[str, int] | None) -> None:
        with cues.open(where / "home", durability="process", map_size=4 << 20) as home:
            if not home.queue("in").last_index:
                fill(home, 8)
            with contextlib.ExitStack() as stack:
                if crash is not None:
                    stack.enter_context(contextlib.suppress(testing.Crashed))
                    stack.enter_context(testing.crash(*crash, how="raise"))
                testing.run_until_idle(graph(where), home)

    sites = testing.crash_sites(lambda: run(tmp_path / "undisturbed", None))
    assert "pending.written" in {point for point, _ in sites}
    chosen = [site for site in sites if site[0].startswith(("pending", "commit", "function"))]
    for number, site in enumerate(chosen):
        where = tmp_path / str(number)
        run(where, site)
        run(where, None)
        with cues.open(where / "home") as home, cues.open(where / "other") as other:
            seen = list(other.queue("out").tailer(isolation="committed"))
            assert (numbers(seen), failed(home)) == ([0, 1, 2, 3, 4, 6, 7], [[5]]), site
        shutil.rmtree(where)


# --- redrive ----------------------------------------------------------------------------------------


def test_errors_of_halves_are_redriven_and_halved_again(store: Store) -> None:
    fill(store, 16)
    function = Poisoned(2, 3, 9)
    testing.run_until_idle(stream(function), store)
    assert failed(store) == [[2], [3], [9]]
    function.poison = {9}
    function.calls.clear()
    result = cues.redrive(stream(function), store=store, all=True)
    assert (len(result.resolved), len(result.failed_again)) == (2, 1)
    assert sorted(numbers(testing.messages(store, "out"))) == [n for n in range(16) if n != 9]
    assert failed(store) == [[2], [3], [9], [9]] and [9] in function.calls
    assert [record.inputs["in"] for record in cues.list_errors(store)] == [[{"n": 9}]]


def test_an_error_of_a_whole_batch_is_redriven_in_halves(store: Store) -> None:
    """An error message of an earlier version, or of ``bisect=False``, has a whole batch."""
    fill(store, 8)
    function = Poisoned(2, 5)
    testing.run_until_idle(stream(function, bisect=False), store)
    function.poison = {5}
    result = cues.redrive(stream(function), store=store, all=True)
    assert (len(result.resolved), len(result.failed_again)) == (0, 1)
    assert numbers(testing.messages(store, "out")) == [n for n in range(8) if n != 5]
    assert failed(store) == [list(range(8)), [5]]
    function.poison = set()
    cues.redrive(stream(function), store=store, all=True)
    assert sorted(numbers(testing.messages(store, "out"))) == list(range(8)) and not cues.list_errors(store)
