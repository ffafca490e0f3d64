"""Graphs with failed messages that the redrive tests kill everywhere. The functions run in children of forks.py.

prepare    run a graph whose functions fail for some messages, so that these are on the error queue
redrive    repair the functions (all but one message), and redrive everything
examine    everything durable, as plain data
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scenarios import MAP_BYTES, _in_child

import cues
from cues import AnyOf, Graph, QueueOptions, Sink, Source, Stream, faults, testing
from cues.base.names import TYPE
from cues.engine import redriving
from cues.steps.error_records import ErrorLogs

Message = dict[str, Any]
HOPELESS = 4
"""The number of the message that fails again."""

broken = False
_outside = ""


def tell(process: Any, what: Any) -> None:
    """Leave a line outside: who, about what, under which hash."""
    line = json.dumps([process.id, what, process.delivery_hash]) + "\n"
    with open(_outside, "a") as file:
        file.write(line)


def told() -> list[list[Any]]:
    path = Path(_outside)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fails(n: int) -> None:
    if n == HOPELESS or (broken and n % 2 == 0):
        raise ValueError(f"{n} is even")


def summed(message: Message, process: Any) -> Message:
    process.state["sum"] = process.state.get("sum", 0) + message["n"]
    fails(message["n"])
    return {TYPE: message[TYPE], "n": message["n"], "sum": process.state["sum"]}


def saved(message: Message, process: Any) -> None:
    tell(process, message["n"])
    fails(message["n"])


def joined(left: Message, right: Message) -> Message:
    fails(left["n"])
    return {"n": left["n"], "both": left["n"] + right["n"]}


def either(message: Message, process: Any) -> Message:
    tell(process, message["n"])
    fails(message["n"])
    return {"n": message["n"], "from": process.binding}


def batched(messages: list[Message], process: Any) -> list[Message]:
    for message in messages:
        fails(message["n"])
    return [{"n": message["n"], "of": len(messages)} for message in messages]


def counted(message: Message, process: Any) -> Message:
    process.state["count"] = process.state.get("count", 0) + 1
    fails(message["n"])
    return {"n": message["n"], "count": process.state["count"]}


def _away(path: str) -> str:
    return os.path.join(os.path.dirname(path), "away")


def graph_of(name: str, path: str) -> Graph:
    one = [Source("in"), Stream(summed, "in", "out", id="p")]
    two = [Source("in"), Source("more")]
    away = QueueOptions(path=_away(path))
    eight = QueueOptions(partitions=3, key="n")
    graphs: dict[str, Callable[[], Graph]] = {
        "state": lambda: Graph("g", one, errors="errors"),
        "sink": lambda: Graph("g", [Source("in"), Sink(saved, "in", id="p")], errors="errors"),
        "join": lambda: Graph(
            "g", [*two, Stream(joined, {"left": "in", "right": "more"}, "out", id="p")], errors="errors"
        ),
        "alts": lambda: Graph(
            "g",
            [*two, Stream(either, AnyOf(a="in", b="more"), "out", id="p", side_effects=True, batch_size=2)],
            errors="errors",
        ),
        "batch": lambda: Graph(
            "g", [Source("in"), Stream(batched, "in", "out", id="p", batch=True, batch_size=2)], errors="errors"
        ),
        "output abroad": lambda: Graph("g", one, errors="errors", queues={"out": away}),
        "errors abroad": lambda: Graph("g", one, errors="errors", queues={"errors": away}),
        "partitions": lambda: Graph(
            "g", [Source("in"), Stream(counted, "in", "out", id="p", key="n")], errors="errors", queues={"in": eight}
        ),
    }
    return graphs[name]()


NAMES = ("state", "sink", "join", "alts", "batch", "output abroad", "errors abroad", "partitions")


def _begin(path: str, is_broken: bool) -> None:
    global broken, _outside
    broken, _outside = is_broken, f"{path}.outside"


def prepare(name: str, path: str) -> None:
    """Make the store, with failed messages on its error queue."""
    _begin(path, True)
    graph = graph_of(name, path)
    if "abroad" in name:
        cues.open(_away(path), durability="process", map_size=MAP_BYTES).close()
    with cues.open(path, durability="process", map_size=MAP_BYTES) as store:
        testing.run_until_idle(graph, store)
        for queue in ("in", "more") if graph.plan().queues.get("more") is not None else ("in",):
            store.queue(queue).appender().write_many([{TYPE: "order", "n": n} for n in range(1, 8)])
        testing.run_until_idle(graph, store)
    Path(_outside).unlink(missing_ok=True)


def redrive(name: str, path: str) -> dict[str, int]:
    """Redrive the error messages that do not come from a redrive; return the number by result."""
    _begin(path, False)
    graph = graph_of(name, path)
    with cues.open(path) as store:
        result = redriving.redrive(graph, store=store, where=lambda view: not view["redriven"])
        counts = vars(result)
    return {kind: len(places) for kind, places in counts.items()}


def finish(name: str, path: str) -> None:
    """Run the graph, which forwards messages for other stores, until it is idle."""
    _begin(path, False)
    with cues.open(path) as store:
        testing.run_until_idle(graph_of(name, path), store)


def sites(name: str, path: str) -> list[tuple[str, int]]:
    return testing.crash_sites(lambda: redrive(name, path))


def examine(name: str, path: str) -> dict[str, Any]:
    """The content of the queues, the state, and what was done about each error message."""
    _begin(path, False)
    graph = graph_of(name, path)
    with cues.open(path) as store:
        contents = testing.contents(store)
        found: dict[str, Any] = {"state": contents["state"], "queues": contents["queues"], "check": store.check()}
        found["problems"] = testing.check_attempts(store)
        with ErrorLogs(store, redriving.error_queues(graph)) as logs:
            found["errors"] = sorted(
                (r.queue, r.index, r.processor, r.text, r.state, r.inputs, r.redriven) for r in logs.records(True)
            )
            found["unresolved"] = logs.unresolved()
    away = Path(_away(path))
    if away.exists():
        with cues.open(away) as other:
            found["queues"] |= testing.contents(other)["queues"]
            found["check"] += other.check()
    found["queues"] = {queue: messages for queue, messages in found["queues"].items() if "errors" not in queue}
    found["told"] = told()
    return found


def crash_and_finish(name: str, made: str, crashes: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """For each crash a copy of the stores beside ``made``: the crash, and then a redrive that finishes."""
    for number, (point, hit) in enumerate(crashes):
        path = copy(made, f"case-{number}")
        died = _in_child(_die, name, path, point, hit)
        again = redrive(name, path)
        finish(name, path)
        yield {"died": died, "again": again, **examine(name, path)}
        shutil.rmtree(Path(path).parent)


def _die(name: str, path: str, point: str, hit: int) -> None:
    faults.arm(point, hit)
    redrive(name, path)


def copy(made: str, case: str) -> str:
    """A copy of closed stores: the home store in a folder of its own, beside its other store."""
    folder = Path(made).parent.parent / case
    ignored = shutil.ignore_patterns("bells", "lock.mdb", "wake", "open", "lease-*")
    shutil.copytree(Path(made).parent, folder, ignore=ignored)
    return str(folder / Path(made).name)
