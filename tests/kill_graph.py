"""The graph that the kill loop kills: a source, two streams, a sink; slow unless CUES_TEST_FAST is set.

CUES_TEST_BREAK takes its atomic commit apart, for the negative controls (broken_commits.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import broken_commits

import cues

COUNT = 6000
_SLOW = not os.environ.get("CUES_TEST_FAST")
_OUTSIDE = os.environ.get("CUES_TEST_OUTSIDE", "")

graph = cues.Graph("kill", errors="errors", durability="process")


@graph.source("numbers", batch_size=50)
def numbers(position: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    for n in range(position or 0, COUNT):
        if _SLOW:
            time.sleep(0.0005)
        yield n + 1, {"n": n}


@graph.stream("numbers", "counted", key=lambda message: message["n"] % 7, batch_size=20)
def count(message: dict[str, Any], process: Any) -> list[dict[str, Any]]:
    state = process.state
    state["count"] = state.get("count", 0) + 1
    return [{"n": message["n"], "count": state["count"], "part": part} for part in range(message["n"] % 3)]


@graph.stream("counted", {"even": "even", "odd": "odd"}, batch_size=30)
def split(message: dict[str, Any]) -> dict[str, Any]:
    if message["n"] % 11 == 0:
        raise ValueError(message["n"])
    return {"odd" if message["n"] % 2 else "even": message}


@graph.sink(cues.AnyOf("even", "odd"), batch_size=10)
def save(message: dict[str, Any], process: Any) -> None:
    if _OUTSIDE:
        line = f"{message['n']} {message['part']} {process.delivery_hash}\n"
        fd = os.open(_OUTSIDE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(fd, line.encode())
        os.close(fd)


def expected() -> dict[str, list[Any]]:
    """The final content of the queues, computed without Cues."""
    counts = [0] * 7
    counted = []
    for n in range(COUNT):
        counts[n % 7] += 1
        counted += [{"n": n, "count": counts[n % 7], "part": part} for part in range(n % 3)]
    good = [message for message in counted if message["n"] % 11]
    return {
        "numbers": [{"n": n} for n in range(COUNT)],
        "counted": counted,
        "even": [message for message in good if message["n"] % 2 == 0],
        "odd": [message for message in good if message["n"] % 2],
        "errors": [message for message in counted if message["n"] % 11 == 0],
    }


broken_commits.break_commits()
