"""The cost of a message in windows and joins: ``python benchmarks/windows.py [MESSAGES]``.

Prints CPU microseconds a message, with the commits of the store, and messages a second of CPU time. 100 keys, 100
messages a second of event time, ``delay`` of 10 seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import cues
from cues import testing
from cues.processors import joins, windows
from cues.processors.reducers import count, distinct, mean, quantiles, top

MESSAGES = 50_000
TIMED: Any = {"time": "t", "key": "k", "delay": "10s", "late": "late"}
MEAN = {"n": count(), "v": mean("v")}
CASES: dict[str, tuple[list[str], Callable[[], cues.Stream]]] = {
    "tumbling 1m: count, mean": (["a"], lambda: windows.tumbling("a", "out", "1m", reduce=MEAN, **TIMED)),
    "hopping 1m / 10s: count, mean": (["a"], lambda: windows.hopping("a", "out", "1m", "10s", reduce=MEAN, **TIMED)),
    "sessions 5s: count, mean": (["a"], lambda: windows.sessions("a", "out", "5s", reduce=MEAN, **TIMED)),
    "counted 100: count, mean": (["a"], lambda: windows.counted("a", "out", 100, key="k", reduce=MEAN)),
    "tumbling 10m: quantiles": (
        ["a"],
        lambda: windows.tumbling("a", "out", "10m", reduce={"q": quantiles("v")}, **TIMED),
    ),
    "tumbling 10m: distinct": (
        ["a"],
        lambda: windows.tumbling("a", "out", "10m", reduce={"d": distinct("v")}, **TIMED),
    ),
    "tumbling 10m: top": (["a"], lambda: windows.tumbling("a", "out", "10m", reduce={"t": top("v")}, **TIMED)),
    "lookup": (["a", "b"], lambda: joins.lookup({"a": "a", "b": "b"}, "out", key="k", how="left")),
    "as of": (["a", "b"], lambda: joins.as_of({"a": "a", "b": "b"}, "out", how="left", **TIMED)),
    "interval 1s": (["a", "b"], lambda: joins.interval({"a": "a", "b": "b"}, "out", after="1s", **TIMED)),
}


def main(count: int) -> None:
    print("| processor | µs a message | messages/s |\n|---|---|---|")
    for name, (queues, make) in CASES.items():
        graph = cues.Graph("g")
        with testing.temporary_store(map_size=4 << 30) as store:
            each = count // len(queues)
            for queue in queues:
                graph.source(queue)
                given = [{"t": n / 100 * len(queues), "k": f"key {n % 100}", "v": n * 7919 % 977} for n in range(each)]
                store.queue(queue).appender().write_many(given)
            graph.add(make())
            start = time.process_time()
            testing.run_until_idle(graph, store)
            spent = time.process_time() - start
        print(f"| {name} | {spent * 1e6 / count:.1f} | {count / spent:,.0f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else MESSAGES)
