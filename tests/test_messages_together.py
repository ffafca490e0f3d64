"""Windows, joins and aggregates that take many messages in one call leave what single calls leave."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import seeds
from test_windows_columns import everything

import cues
from cues import testing
from cues.processors import aggregates, joins, windows
from cues.processors.reducers import (
    collect,
    count,
    distinct,
    earliest,
    first,
    last,
    max,
    mean,
    quantiles,
    reducer,
    sum,
    top,
)

Message = dict[str, Any]
REDUCE = {
    "n": count(),
    "sum": sum("v"),
    "mean": mean("v"),
    "most": max(lambda message: message["v"]),
    "half": quantiles("v", at=(0.5,), exact=4),
    "values": distinct("v", exact=3),
    "top": top("v", 2),
    "first": first("tags"),
    "last": last("tags"),
    "early": earliest("tags", "t"),
    "all": collect("tags", most=4),
}
TIMED: Any = {"time": "t", "key": "k", "delay": "5s", "late": "late", "reduce": REDUCE}
MERGED = TIMED | {"reduce": {name: each for name, each in REDUCE.items() if each.mergeable}}
BOTH = cues.AnyOf("m", "o")
PAIRS = {"m": "m", "o": "o"}
JOINED: Any = {"time": "t", "delay": "5s", "late": "late", "key": "k"}
CASES: dict[str, Callable[..., cues.Stream]] = {
    "tumbling": lambda: windows.tumbling("m", "out", "10s", **TIMED),
    "tumbling early": lambda: windows.tumbling("m", "out", "10s", early="update", **TIMED),
    "hopping of two": lambda: windows.hopping(BOTH, "out", "10s", "3s", **TIMED),
    "sessions": lambda: windows.sessions("m", "out", "4s", **MERGED),
    "sessions early": lambda: windows.sessions("m", "out", "4s", early="update", **MERGED),
    "counted": lambda: windows.counted("m", "out", 4, key="k", reduce=REDUCE),
    "lookup": lambda: joins.lookup(PAIRS, "out", key="k", how="left"),
    "lookup with deletes": lambda: joins.lookup(PAIRS, "out", key="k", delete=lambda message: message["v"] % 3 == 0),
    "latest": lambda: joins.latest(PAIRS, "out", key="k", combine=_changing),
    "interval": lambda: joins.interval(PAIRS, "out", after="3s", how="full", combine=_changing, **JOINED),
    "as of": lambda: joins.as_of(PAIRS, "out", how="left", **JOINED),
    "each": lambda: aggregates.aggregate("m", "out", by="k", reduce=REDUCE),
    "every": lambda: aggregates.aggregate("m", "out", by="k", reduce=REDUCE, every="3s", time="t", early="update"),
}


def _changing(one: Any, other: Any) -> Message:
    """A combine= that changes what it is given."""
    for message in (one, other):
        if message is not None:
            message["tags"].append("seen")
    return {"one": one, "other": other}


class Together:
    """The function of a processor, whose calls with many messages are counted, or are not there."""

    def __init__(self, fn: Any, sizes: list[int] | None) -> None:
        self.fn, self.sizes = fn, sizes
        self.never_filtered = getattr(fn, "never_filtered", ())

    def __call__(self, message: Message, process: cues.Process) -> Any:
        return self.fn(message, process)

    @property
    def by_messages(self) -> Any:
        return None if self.sizes is None or self.fn.by_messages is None else self._counted

    def _counted(self, messages: list[Message], process: cues.Process) -> Iterator[Any]:
        assert self.sizes is not None
        yield from self.fn.by_messages(messages, process)
        self.sizes.append(len(messages))


def some_messages(dice: random.Random, number: int, bad: float) -> list[Message]:
    """Messages in about the order of their times; ``bad``: the share of those that no processor takes."""
    made: list[Message] = []
    for n in range(number):
        time = n / 4 + dice.uniform(-8, 2)
        message = {"t": time, "k": f"k{dice.randrange(3)}", "v": dice.randrange(40), "tags": [n]}
        if dice.random() < bad:
            message[dice.choice(["t", "k", "v"])] = dice.choice([None, "no time", [1]])
        if dice.random() < 0.02:
            message = windows.watermark(1 + n / 4)
        made.append(message)
    return made


def ran(name: str, given: dict[str, list[Message]], sizes: list[int] | None, batch_size: int) -> list[str]:
    stream = CASES[name]()
    graph = cues.Graph("g", errors="errors")
    for queue in given:
        graph.source(queue)
    graph.add(
        cues.Stream(Together(stream.fn, sizes), stream.inputs, stream.outputs, id=stream.id, batch_size=batch_size)
    )
    with testing.temporary_store() as store:
        for queue, messages in given.items():
            store.queue(queue).appender().write_many(messages)
        testing.run_until_idle(graph, store)
        return everything(store, stream.id or "")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", seeds.among(range(20), fast=1))
def test_many_messages_leave_what_single_calls_leave(name: str, seed: int) -> None:
    """Also with messages that fail between the others: these are called singly, and nothing is taken twice."""
    dice = random.Random(f"{name} {seed}")
    queues = ["m"] if CASES[name]().inputs == "m" else ["m", "o"]
    given = {queue: some_messages(dice, 150, dice.choice([0.0, 0.02, 0.2])) for queue in queues}
    sizes: list[int] = []
    batch_size = dice.choice([7, 1000])
    together, singly = (ran(name, given, each, batch_size) for each in (sizes, None))
    for one, other in zip(together, singly):
        assert one == other
    assert len(together) == len(singly)
    assert sizes


@pytest.mark.parametrize("reduce", [{"all": len}, {"n": count(), "own": reducer(list, lambda seen, message: seen)}])
def test_messages_are_taken_singly_where_a_function_of_the_user_is_given_the_state(reduce: Any) -> None:
    stream = windows.tumbling("m", "out", "10s", time="t", key="k", late="late", reduce=reduce)
    assert stream.fn.by_messages is None
