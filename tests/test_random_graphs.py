"""Random graphs, crashed at random points, changed at random between the starts, against a model in plain Python.

The model applies the functions to whole lists. Whatever the batch sizes, the order of turns, the
crashes and restarts, the queues must hold what the model says, and the state too. The seed is
printed; ``CUES_TEST_SEED=n`` runs that one alone.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import seeds

from cues import Graph, Stream, faults, testing

Message = dict[str, Any]
SEEDS = seeds.among(range(60), fast=20)

RATES = [{"n": 1000 * n} for n in range(1, 30)]
"""The messages that an imperative stage reads by itself, one for each message that does not fail."""


class Stage:
    """A stream from q<i> to q<i+1>, as a function for the graph and as one over a whole list."""

    def __init__(self, chance: random.Random, number: int) -> None:
        self.number = number
        self.kind = chance.choice(["map", "some", "sum", "fork", "fail", "batch", "filter", "look"])
        self.modulus = chance.randint(2, 5)

    def model(self, messages: list[Message]) -> tuple[list[Message], list[Message], list[Message]]:
        """The outputs, the messages for the other queue, and the failures."""
        k, on, aside, failed = self.modulus, [], [], []
        sums: dict[int, int] = {}
        rates = iter(RATES)
        for message in messages:
            n = message["n"]
            if self.kind in ("map", "batch"):
                on.append({"n": n + 1})
            elif self.kind == "some":
                on += [{"n": n}] * (n % k)
            elif self.kind == "sum":
                sums[n % k] = sums.get(n % k, 0) + n
                on.append({"n": sums[n % k]})
            elif self.kind == "fork":
                (aside if n % k == 0 else on).append(message)
            elif self.kind == "fail":
                (failed if n % k == 0 else on).append(message)
            elif self.kind == "look":
                if n % k == 0:
                    failed.append(message)  # and its rate is left for the next
                else:
                    on.append({"n": n + next(rates, {"n": 0})["n"]})
                    aside.append(message)
            elif n % k:
                on.append(message)
        return on, aside, failed

    def stream(self, chance: random.Random) -> Stream:
        k = self.modulus
        options: dict[str, Any] = {
            "id": f"s{self.number}",
            "batch_size": chance.choice([1, 2, 3, 7, 1000]),
            "side_effects": chance.random() < 0.3,
            "retries": chance.choice([0, 0, 1]),
            "concurrency": 1 if self.kind in ("batch", "look") else chance.choice([1, 1, 4]),
        }
        here, there = f"q{self.number}", f"q{self.number + 1}"

        def mapped(message: Message) -> Message:
            message["n"] += 1
            return message

        def some(message: Message) -> list[Message]:
            return [{"n": message["n"]}] * (message["n"] % k)

        def summed(message: Message, process: Any) -> Message:
            process.state["sum"] = process.state.get("sum", 0) + message["n"]
            return {"n": process.state["sum"]}

        def forked(message: Message) -> dict[str, Any]:
            return {"aside" if message["n"] % k == 0 else "on": message}

        def fails(message: Message) -> Message:
            if message["n"] % k == 0:
                raise ValueError(message["n"])
            return message

        def batched(messages: list[Message]) -> list[Message]:
            return [{"n": message["n"] + 1} for message in messages]

        def looks(message: Message, process: Any) -> Message:
            rate = process.tailers["rate"].read() or {"n": 0}
            process.appenders["log"].write(message)
            return {"n": fails(message)["n"] + rate["n"]}

        if self.kind == "look":
            by_itself = {"tailers": {"rate": f"rates{self.number}"}, "appenders": {"log": f"aside{self.number}"}}
            return Stream(looks, here, there, **by_itself, **options)
        if self.kind == "fork":
            return Stream(forked, here, {"on": there, "aside": f"aside{self.number}"}, **options)
        if self.kind == "sum":
            return Stream(summed, here, there, key=lambda message: message["n"] % k, **options)
        if self.kind == "filter":
            return Stream(lambda message: message, here, there, where=lambda message: message["n"] % k, **options)
        functions: dict[str, Callable[..., Any]] = {"map": mapped, "some": some, "fail": fails, "batch": batched}
        return Stream(functions[self.kind], here, there, batch=self.kind == "batch", **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_graph_agrees_with_the_model(seed: int) -> None:
    print(f"CUES_TEST_SEED={seed}")
    chance = random.Random(seed)
    stages = [Stage(chance, number) for number in range(chance.randint(1, 4))]
    messages = [{"n": chance.randint(0, 30)} for _ in range(chance.randint(1, 40))]

    def graph() -> Graph:
        streams = [stage.stream(chance) for stage in stages]
        chance.shuffle(streams)
        return Graph("g", streams, errors="errors", queues={"*": {"metadata": chance.choice([True, False, ["t"]])}})

    with testing.temporary_store(chance.choice(["process", "process", "disk"])) as store:
        for stage in stages:
            if stage.kind == "look":
                store.queue(f"rates{stage.number}").appender().write_many(RATES)
        fed = 0
        for _ in range(chance.randint(1, 6)):
            more = messages[fed : fed + chance.randint(0, 15)]
            store.queue("q0").appender().write_many(more)
            fed += len(more)
            point, hit = chance.choice(list(faults.STEP_POINTS)), chance.randint(1, 12)
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph(), store, seed=chance.randrange(100))
        store.queue("q0").appender().write_many(messages[fed:])
        testing.run_until_idle(graph(), store)
        series, failures = messages, []
        for stage in stages:
            series, aside, failed = stage.model(series)
            failures += [(f"g.s{stage.number}", message) for message in failed]
            testing.check_history(series, testing.messages(store, f"q{stage.number + 1}")).expect_exact()
            if stage.kind in ("fork", "look"):
                testing.check_history(aside, testing.messages(store, f"aside{stage.number}")).expect_exact()
        errors = [
            (error["err.proc/config"]["id"], message)
            for error in testing.messages(store, "errors")
            for message in next(iter(error["err.proc/messages"].values()))
        ]
        testing.check_history(failures, errors, ordered=False).expect_exact()
        assert not testing.check_attempts(store)
