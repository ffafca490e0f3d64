"""A graph whose messages fail until somebody mends it, for test_redrive_random.py. Each function runs in a child."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import cues
from cues import testing

KEYS = 5


def graph(place: str) -> cues.Graph:
    graph = cues.Graph("g", errors="errors", store=Path(place, "store"), durability="process")
    graph.source("in")

    @graph.stream("in", "out", key=lambda message: message["n"] % KEYS, batch_size=7)
    def count(message: dict[str, Any], process: Any) -> dict[str, Any]:
        process.state["count"] = process.state.get("count", 0) + 1
        _fail(place, "count", message["n"])
        return {"n": message["n"], "count": process.state["count"]}

    @graph.stream("out", "kept", batch_size=3)
    def keep(message: dict[str, Any]) -> dict[str, Any]:
        _fail(place, "keep", message["n"])
        return {"n": message["n"]}

    return graph


def _fail(place: str, where: str, n: int) -> None:
    if n in json.loads(Path(place, "bad.json").read_text())[where]:
        raise ValueError(f"{where} refuses {n}")


def send(place: str, first: int, end: int) -> None:
    with cues.open(Path(place, "store"), durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(first, end)])


def run(place: str) -> None:
    with contextlib.suppress(cues.AlreadyRunning), graph(place).start() as running:  # the redrive runs a processor
        running.wait_idle()


def redrive(place: str, remainder: int) -> None:
    """Redrive all whose number is even or odd; with -1 all."""
    chosen = {"all": True} if remainder < 0 else {"where": lambda fields: fields["input"]["n"] % 2 == remainder}
    cues.redrive(graph(place), timeout=60, **chosen)


def seen(place: str) -> dict[str, Any]:
    made = graph(place)
    with cues.open(Path(place, "store")) as store:
        return {
            "out": Counter(message["n"] for message in store.queue("out").tailer()),
            "kept": Counter(message["n"] for message in store.queue("kept").tailer()),
            "unresolved": [record.message for record in cues.list_errors(store)],
            "state": {key: testing.state(store, "g.count", key).get("count", 0) for key in range(KEYS)},
            "check": [str(problem) for problem in store.check()],
            "attempts": testing.check_attempts(store),
            "graph": made.id,
        }
