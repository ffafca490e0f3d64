"""What a message costs in bytecode instructions: figures that other programs on the machine hardly change.

    python benchmarks/costs.py            count, and compare with costs.json; ends with 1 if a row became dearer
    python benchmarks/costs.py --write    keep the counts of this version of Python

A row is run with some messages and with twice as many; the difference is the cost of a message, without that of a
start. Python's own calls into C count one instruction, so LMDB and msgpack are not seen; the wall and CPU times of
``python -m benchmarks`` see them. Counts are of one minor version of Python, and another one has counts of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from work import batches, messages, total

import cues
from cues import Graph, Source, Stream, testing
from cues.processors import windows
from cues.processors.reducers import count
from cues.txn import ProducerID, append_stamped, build_uuid

KEPT = Path(__file__).with_name("costs.json")
TOLERANCE = 0.15
"""Counts vary by 2 to 4 %, because latency is measured at most a thousand times a second, and beats come by time."""
STEPS: dict[str, Any] = {"step_s": None, "batch_size": 1000}
"""Steps of a size that does not depend on the time that calls take."""
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
Work = Callable[[], Any]


def instructions(work: Work) -> int:
    """The bytecode instructions that ``work`` executes in this thread."""
    counted = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        if event == "opcode":
            counted += 1
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return counted


def append_one(store: cues.Store, number: int) -> Work:
    write = store.queue("orders").appender().write
    return lambda: [write(message) for message in messages(number)]


def append_many(store: cues.Store, number: int) -> Work:
    write_many = store.queue("orders").appender().write_many
    return lambda: [write_many(batch) for batch in batches(messages(number))]


def append_mixed(store: cues.Store, number: int) -> Work:
    """Messages of three producers in turns, as an import brings them."""
    producers = [ProducerID(bytes((1, 0, 0, 0, 0, n))) for n in range(3)]
    pairs = [(build_uuid(producers[n % 3], 160 * n, 0), message) for n, message in enumerate(messages(number), 1)]
    queue = store.queue("orders")
    return lambda: [append_stamped(queue, batch) for batch in batches(pairs)]


def read(store: cues.Store, number: int) -> Work:
    append_many(store, number)()
    tailer = store.queue("orders").tailer()
    return lambda: [tailer.read_many(1000) for _ in range(number // 1000 + 1)]


def pipeline(store: cues.Store, number: int, **options: Any) -> Work:
    return passed(store, number, Stream(total, "orders", "totals", **STEPS | options))


def step_one(store: cues.Store, number: int) -> Work:
    return pipeline(store, number, batch_size=1)


def source(store: cues.Store, number: int) -> Work:
    def numbers(position: int | None) -> Iterator[tuple[int, Any]]:
        return enumerate(messages(number)[position or 0 :], (position or 0) + 1)

    graph = Graph("costs", [Source("orders", numbers)])
    return lambda: testing.run_until_idle(graph, store)


def keyed(store: cues.Store, number: int) -> Work:
    def add(order: Any, process: Any) -> Any:
        process.state["sum"] = process.state.get("sum", 0) + order["size"]
        return {"sum": process.state["sum"]}

    return passed(store, number, Stream(add, "orders", "sums", key="symbol", **STEPS))


def window(store: cues.Store, number: int) -> Work:
    timed: Any = {"time": lambda order: order["id"] / 100, "key": "symbol", "delay": "10s", "late": "late"}
    return passed(store, number, windows.tumbling("orders", "minutes", "1m", reduce={"n": count()}, **timed, **STEPS))


def copied(store: cues.Store, number: int) -> Work:
    return passed(store, number, cues.broadcast("orders", ["totals", "sums", "minutes"], **STEPS))


def passed(store: cues.Store, number: int, processor: Any) -> Work:
    graph = Graph("costs", [Source("orders"), processor])
    append_many(store, number)()
    return lambda: testing.run_until_idle(graph, store)


ROWS: dict[str, tuple[Callable[[cues.Store, int], Work], int]] = {
    "append one": (append_one, 200),
    "append 1,000": (append_many, 2000),
    "append mixed": (append_mixed, 2000),
    "read": (read, 2000),
    "source": (source, 2000),
    "pipeline": (pipeline, 2000),
    "copies to three": (copied, 2000),
    "a commit a message": (step_one, 100),
    "state by key": (keyed, 1000),
    "window": (window, 1000),
}


def cost(make: Callable[[cues.Store, int], Work], number: int) -> float:
    counted = []
    for each in (number, 2 * number):
        with testing.temporary_store() as store:
            work = make(store, each)
            counted.append(instructions(work))
    return (counted[1] - counted[0]) / number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the counts of this version of Python")
    options = parser.parse_args()
    kept: dict[str, dict[str, float]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    before = kept.get(VERSION, {})
    dearer = []
    for row, (make, number) in ROWS.items():
        mine = round(cost(make, number), 1)
        share = mine / before[row] - 1 if row in before else 0.0
        print(
            f"{row:20} {mine:8.1f} instructions a message" + (f"  {share:+.1%}" if row in before else "  (no figure)")
        )
        if share > TOLERANCE:
            dearer.append(row)
        kept.setdefault(VERSION, {})[row] = mine
    if options.write:
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    elif dearer:
        print(
            f"dearer by more than {TOLERANCE:.0%}: {', '.join(dearer)}. Try: find out why, or --write with the change."
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
