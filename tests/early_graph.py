"""The graph that tests of early results kill: two windows over one source, and a table; slow unless CUES_TEST_FAST."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import cues
from cues.processors import windows
from cues.processors.reducers import count, sum
from cues.processors.sql_sink import Table

COUNT = 4_000
SIZE = 7
_SLOW = not os.environ.get("CUES_TEST_FAST")
_TABLE = os.environ.get("CUES_TEST_OUTSIDE", "early.db")


def message(n: int) -> dict[str, Any]:
    """A message in a time that goes on, but for some that come up to 9 seconds late, and a few that are too late."""
    return {"n": n, "t": n / 10 - (n * 37 % 100) / 10 - 300 * (n % 211 == 210), "k": f"k{n * n % 5}"}


graph = cues.Graph("early", errors="errors", durability="process")


@graph.source("numbers", batch_size=50)
def numbers(position: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    for n in range(position or 0, COUNT):
        if _SLOW:
            time.sleep(0.0005)
        yield n + 1, message(n)


_SHARED: dict[str, Any] = {"time": "t", "key": "k", "delay": 10, "early": "50ms"}
REDUCE = {"n": count(), "total": sum("n")}
graph.add(windows.tumbling("numbers", "fixed", SIZE, late="late", reduce=REDUCE, batch_size=30, **_SHARED))
graph.add(windows.sessions("numbers", "spans", 0.9, late="late-spans", reduce=REDUCE, batch_size=30, **_SHARED))
COLUMNS = {
    "k": "text",
    "start": "timestamp",
    "end": "timestamp",
    "final": "boolean",
    "n": "integer",
    "total": "integer",
}
for _queue, _more in (("fixed", {}), ("spans", {"delete": "withdrawn"})):
    _target = Table(_TABLE, _queue, COLUMNS, mode="upsert", key=["k", "start"], **_more)  # type: ignore[arg-type]
    graph.add(_target.sink(_queue, id=f"save-{_queue}"))
