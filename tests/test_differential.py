"""Random graphs beside a naive interpreter that handles one message at a time.

The graph runs with random batch sizes, time bounds and concurrency, is stopped after a random number of
steps, crashes at random points and is started again. The interpreter, :class:`Naive`, knows of none of that:
it calls a stage's function for one message after another, keeps what the call did, or keeps nothing. Outputs,
state, error messages and the delivery hashes that functions saw are equal, whatever the steps were.

A stage is judged by what its input queues hold, which the stage before it was judged by. So one whose inputs
come in no certain order (alts) is as certain as any other.

The seed is printed; ``CUES_TEST_SEED=n`` runs that one alone.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from typing import Any

import pytest
import seeds

from cues import AnyOf, Graph, QueueOptions, Stream, faults, testing
from cues.graphs.options import OPTION_NAMES
from cues.queues.store import Store
from cues.steps.hashes import delivery_hash

Message = dict[str, Any]
FAST = range(40)
HUNDREDS = range(1_000, 5_000, 100)
"""Each is the first of a hundred. The slow set has some of them, and the long set all."""
KINDS = ("map", "some", "sum", "total", "fork", "filter", "join", "alts", "look", "shared", "batch")
WRONG = ("raises", "no message", "no msgpack", "no key", "no state", "coroutine", "reserved")
RATES = [{"rate": 1000 * n} for n in range(1, 60)]
"""The messages that an imperative stage reads by itself, one for each call that returns."""


class Stage:
    """A stream of a random kind: how it is declared, and what one call does."""

    def __init__(self, chance: random.Random, number: int, queues: list[str]) -> None:
        self.id = f"s{number}"
        self.kind = chance.choice(KINDS)
        self.modulus = chance.randint(2, 4)
        self.inputs = chance.sample(queues, 2 if self.kind in ("join", "alts") and len(queues) > 1 else 1)
        if len(self.inputs) == 1 and self.kind in ("join", "alts"):
            self.kind = "map"
        self.bindings = ["on", "aside"] if self.kind in ("fork", "look") else ["on"]
        self.outputs = {binding: f"{binding}{number}" for binding in self.bindings}
        self.wrong = chance.choice(WRONG) if chance.random() < 0.6 else None
        self.errors = f"errors{number}" if chance.random() < 0.6 else None
        """Without an error queue the stage stops at a wrong message until it is mended."""
        self.once = self.errors is not None and chance.random() < 0.2
        self.partitioned = self.kind not in ("fork", "look", "batch") and chance.random() < 0.25
        self.mended = False
        self.kept: dict[Any, Message] = defaultdict(lambda: {"seen": []})
        """One object for each key, which the calls continue to change."""

    def is_wrong(self, message: Message) -> bool:
        return self.wrong is not None and message["n"] % 5 == 3

    def key(self, message: Message) -> Any:
        return {"tags": {message["n"] % self.modulus}, "a": 1}

    # --- one call, of the graph and of the interpreter ---

    def call(self, messages: dict[str, Message], hash: str, state: Any, rate: Any, write: Any, keep: Any) -> Any:
        """Call the function with the message of each input; ``keep`` returns the object that is kept for a key."""
        first = next(message for message in messages.values() if message is not None)
        n = sum(message["n"] for message in messages.values() if message is not None) % 97
        result: Message = {"n": n, "hash": hash, "to": n % 3}
        if self.kind in ("sum", "total", "shared"):
            state["calls"] = state.get("calls", 0) + 1
            state.setdefault("seen", []).append(n)
            state[f"field {n}"] = n
            result["state"] = [(field, state[field]) for field in state][:4]
            if n % 7 == 0:
                del state[f"field {n}"]
        if self.kind == "look":
            log = keep("log")
            log["seen"] = [n]
            log["n"] = n
            write(log)
            log["n"] = -1
            result["rate"] = rate()
        if self.is_wrong(first) and not self.mended:
            return self.go_wrong(result, state)
        if self.kind == "alts":
            result["via"] = next(iter(messages))
        if self.kind == "some":
            return [result] * (n % self.modulus) or None
        if self.kind == "fork":
            return {"aside" if n % self.modulus == 0 else "on": result}
        if self.kind == "look":
            return {"on": result}
        if self.kind == "shared":
            shared: Message = keep(n % self.modulus)
            shared["seen"] = [*shared["seen"][-3:], n]
            shared.update(result)
            return shared
        return result

    def go_wrong(self, result: Message, state: Any) -> Any:
        if self.wrong == "raises":
            raise ValueError(result["n"])
        if self.wrong == "no state" and self.kind in ("sum", "total", "shared"):
            state["object"] = object()
            return result
        if self.wrong == "no key" and self.partitioned:
            del result["to"]
            return result
        if self.wrong == "no message":
            return [7]
        if self.wrong == "coroutine":
            return (_ for _ in [result])
        wrong = result | ({"q/secret": 1} if self.wrong == "reserved" else {"object": object()})
        return {"on": wrong} if len(self.bindings) > 1 else wrong

    # --- the declaration ---

    def stream(self, chance: random.Random) -> Stream:
        """The stage with other batch sizes, bounds and callers at each start."""
        options: dict[str, Any] = {
            "id": self.id,
            "batch_size": chance.choice([1, 2, 3, 7, 1000]),
            "retries": 0 if self.once else chance.choice([0, 0, 1]),
            "errors": self.errors,
            "side_effects": not self.once and chance.random() < 0.3,
        }
        if "step_s" in OPTION_NAMES:
            options["step_s"] = chance.choice([None, 1e-9, 1e-4, 0.25])
        if self.once:
            options["strategy"] = "at-most-once"
        if self.kind in ("sum", "shared"):
            options["key"] = self.key
        if self.kind not in ("total", "look", "batch"):
            options["concurrency"] = chance.choice([1, 1, 4])
        if self.kind == "filter":
            options["where"] = lambda message: message["n"] % self.modulus
        kept: dict[Any, Message] = self.kept

        def call(messages: dict[str, Message], process: Any) -> Any:
            state = process.state if self.kind in ("sum", "total", "shared") else {}
            rate, write = None, None
            if self.kind == "look":
                rate, write = process.tailers["rate"].read, process.appenders["aside"].write
            return self.call(messages, process.delivery_hash, state, rate, write, kept.__getitem__)

        def one(message: Message, process: Any) -> Any:
            return call({process.binding: message}, process)

        def joined(a: Message, b: Message, process: Any) -> Any:
            return call({"a": a, "b": b}, process)

        def many(messages: list[Message]) -> list[Message]:
            if self.wrong == "raises" and not self.mended and any(map(self.is_wrong, messages)) and not self.errors:
                raise ValueError
            return [{"n": message["n"]} for message in messages]

        outputs: Any = self.outputs if len(self.outputs) > 1 else self.outputs["on"]
        if self.kind == "look":
            options |= {"tailers": {"rate": f"rates{self.id}"}, "appenders": {"aside": self.outputs["aside"]}}
            outputs = {"on": self.outputs["on"]}
        if self.kind == "batch":
            return Stream(many, self.inputs[0], outputs, batch=True, **options)
        if self.kind == "join":
            return Stream(joined, dict(zip("ab", self.inputs)), outputs, **options)
        return Stream(one, AnyOf(*self.inputs) if self.kind == "alts" else self.inputs[0], outputs, **options)

    @property
    def queues(self) -> dict[str, QueueOptions]:
        if not self.partitioned:
            return {}
        return {self.outputs["on"]: QueueOptions(partitions=3, partitioner=lambda message, n: message["to"] % n)}


class Naive:
    """A stage over whole queues, one message at a time; every failure is one of a mended or an error stage."""

    def __init__(self, stage: Stage, store: Store) -> None:
        self.stage = stage
        self.store = store
        self.outputs: dict[str, list[Message]] = {binding: [] for binding in stage.bindings}
        self.errors: list[dict[str, list[Message]]] = []
        self.states: dict[str, Message] = {}
        stage.mended = stage.errors is None
        rates = [message["rate"] for message in RATES]
        kept: dict[Any, Message] = defaultdict(lambda: {"seen": []})
        for messages, hash in self.turns():
            key = repr(stage.key(messages[next(iter(messages))])) if stage.kind in ("sum", "shared") else ""
            state = _copied(self.states.get(key, {}))
            written: list[Message] = []
            read = iter(rates)
            try:
                result = stage.call(
                    messages,
                    hash,
                    _Sorted(state),
                    lambda: {"rate": next(read)},
                    lambda message: written.append(_copied(message)),
                    kept.__getitem__,
                )
                found = self.checked(result, state)
            except Exception:
                self.errors.append({binding: [message] for binding, message in messages.items()})
                continue
            self.states[key] = state
            rates = list(read)
            for binding, message in [*found, *(("aside", message) for message in written)]:
                self.outputs[binding].append(_copied(message))

    def turns(self) -> Any:
        """The messages of each call, by input, and their hash."""
        stage = self.stage
        queues = [self.store.queue(queue) for queue in stage.inputs]
        names = list("ab") if stage.kind == "join" else stage.inputs
        columns = [list(enumerate(testing.messages(self.store, queue), 1)) for queue in stage.inputs]
        if stage.kind == "join":
            turns = [list(turn) for turn in zip(*[_named(*pair) for pair in zip(names, queues, columns)])]
        else:
            turns = [[turn] for pair in zip(names, queues, columns) for turn in _named(*pair)]
        for turn in turns:
            if stage.kind == "filter" and not turn[0][3]["n"] % stage.modulus:
                continue
            ranges = [(f"g.{stage.id}.{queue.id}", queue.core.row().identity, at, at + 1) for _, queue, at, _ in turn]
            yield {name: message for name, _, _, message in turn}, delivery_hash(f"g.{stage.id}", 0, ranges)

    def checked(self, result: Any, state: Message) -> list[tuple[str, Message]]:
        """The result of a call, by binding. Raises the error of a wrong result."""
        if "object" in state:
            raise TypeError
        by_binding = result if len(self.stage.bindings) > 1 else {"on": result}
        found = []
        for binding, some in by_binding.items():
            for message in some if isinstance(some, list) else [] if some is None else [some]:
                if (
                    type(message) is not dict
                    or "object" in message
                    or "q/secret" in message
                    or (self.stage.partitioned and "to" not in message)
                ):
                    raise ValueError
                found.append((binding, dict(message)))
        return found


class _Sorted(dict):  # type: ignore[type-arg]
    """State that is iterated in the order of the table; all fields are short texts."""

    def __init__(self, state: Message) -> None:
        self.state = state

    def __getitem__(self, field: Any) -> Any:
        return self.state[field]

    def __setitem__(self, field: Any, value: Any) -> None:
        self.state[field] = value

    def __delitem__(self, field: Any) -> None:
        del self.state[field]

    def get(self, field: Any, default: Any = None) -> Any:
        return self.state.get(field, default)

    def setdefault(self, field: Any, default: Any = None) -> Any:
        return self.state.setdefault(field, default)

    def __iter__(self) -> Any:
        return iter(sorted(self.state, key=lambda field: (len(field), field)))


def _named(name: str, queue: Any, column: list[tuple[int, Message]]) -> list[tuple[str, Any, int, Message]]:
    return [(name, queue, at, message) for at, message in column]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _run(seed: int) -> None:
    print(f"CUES_TEST_SEED={seed}")
    chance = random.Random(seed)
    stages: list[Stage] = []
    queues = ["q0", "q1"]
    for number in range(chance.randint(1, 4)):
        stages.append(stage := Stage(chance, number, queues))
        if not stage.partitioned and stage.kind != "batch":
            queues += [queue for binding, queue in stage.outputs.items() if (binding, stage.kind) != ("aside", "look")]
    fed = {name: [{"n": chance.randint(0, 30)} for _ in range(chance.randint(1, 30))] for name in ("q0", "q1")}
    crashes = not any(stage.once for stage in stages)

    def graph() -> Graph:
        return Graph("g", [stage.stream(chance) for stage in chance.sample(stages, len(stages))], queues=options)

    options = {queue: given for stage in stages for queue, given in stage.queues.items()}
    with testing.temporary_store("process") as store:
        appenders = {name: store.queue(name).appender() for name in fed}
        for stage in stages:
            if stage.kind == "look":
                store.queue(f"rates{stage.id}").appender().write_many(RATES)
        left = {name: list(messages) for name, messages in fed.items()}
        for _ in range(chance.randint(1, 5)):
            for name, appender in appenders.items():
                count = chance.randint(0, 12)
                appender.write_many(left[name][:count])
                del left[name][:count]
            steps = chance.choice([None, 1, 2, 5, 20])
            with contextlib.ExitStack() as stack:
                if crashes and chance.random() < 0.5:
                    stack.enter_context(contextlib.suppress(testing.Crashed))
                    point, hit = chance.choice(list(faults.STEP_POINTS)), chance.randint(1, 12)
                    stack.enter_context(testing.crash(point, hit, how="raise"))
                testing.run_until_idle(graph(), store, steps_max=steps, seed=chance.randrange(99), stopped="return")
        for name, appender in appenders.items():
            appender.write_many(left[name])
        testing.run_until_idle(graph(), store, stopped="return")
        for stage in stages:
            stage.mended = stage.errors is None
        testing.run_until_idle(graph(), store)
        for stage in stages:
            _compare(stage, store)
        assert not testing.check_attempts(store)


def _compare(stage: Stage, store: Store) -> None:
    where = f"{stage.id}: {stage.kind}, {stage.wrong}, errors {stage.errors}, modulus {stage.modulus}"
    if stage.kind == "batch":
        expected = [{"n": message["n"]} for message in testing.messages(store, stage.inputs[0])]
        assert testing.messages(store, stage.outputs["on"]) == expected, where
        return
    naive = Naive(stage, store)
    for binding, queue in stage.outputs.items():
        expected = naive.outputs[binding]
        found = _read(store, queue, stage.partitioned and binding == "on")
        if stage.kind == "shared":  # "seen" continues over calls that were repeated or failed later
            expected, found = (
                [{k: v for k, v in m.items() if k != "seen"} for m in some] for some in (expected, found)
            )
        if stage.kind == "alts":
            expected, found = (sorted(some, key=lambda message: message["via"]) for some in (expected, found))
        if stage.partitioned:
            expected, found = (sorted(some, key=lambda message: message["to"]) for some in (expected, found))
        assert found == expected, where
    if stage.errors is not None:
        failed = [error["err.proc/messages"] for error in testing.messages(store, stage.errors)]
        if stage.kind == "alts":
            failed, naive.errors = (
                sorted(some, key=lambda found: next(iter(found))) for some in (failed, naive.errors)
            )
        assert failed == naive.errors, where
    for n in range(stage.modulus):
        key = stage.key({"n": n})
        expected_state = naive.states.get("" if stage.kind == "total" else repr(key), {})
        found_state = testing.state(store, f"g.{stage.id}", None if stage.kind == "total" else key)
        assert stage.kind not in ("sum", "total", "shared") or found_state == expected_state, where


def _read(store: Store, queue: str, partitioned: bool) -> list[Message]:
    if not partitioned:
        return testing.messages(store, queue)
    handle = store.queue(queue)
    return [message for number in range(3) for message in handle.partition(number).tailer()]


@pytest.mark.parametrize("seed", seeds.among(FAST))
def test_a_random_graph_does_what_one_message_at_a_time_would(seed: int) -> None:
    _run(seed)


@pytest.mark.parametrize("first", seeds.among(HUNDREDS, fast=0))
def test_thousands_of_random_graphs(first: int) -> None:
    for seed in range(first, first + 100):
        _run(seed)
