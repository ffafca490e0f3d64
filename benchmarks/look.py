"""The commands that look at a large store, from their spawn to their end, and the requests of the page.

None of them may read the whole store. A request is measured on a page that has answered it once before.

python benchmarks/look.py                     # 10 million messages in a store of its own, about a minute
python benchmarks/look.py --count 100000      # smaller
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cues
from cues.testing import run_until_idle

COMMANDS = {
    "help (the floor)": ["--help"],
    "status": ["status", "{store}"],
    "tail": ["tail", "{store}#in", "-n", "10"],
    "errors": ["errors", "{store}"],
    "queues": ["queues", "{store}"],
}
REQUESTS = {
    "page: overview": "overview",
    "page: graph": "graph",
    "page: last messages": "messages?queue=in&count=50",
    "page: messages before the middle": "messages?queue=in&count=50&older=1&at={middle}",
    "page: one message": "message?queue=in&index={middle}",
    "page: what became of it": "became?queue=in&index={middle}",
    "page: search": "messages?queue=in&count=50&where=n%20%3D%3D%20{middle}",
    "page: errors": "errors?count=50",
    "page: steps": "steps?processor=g.work&count=50",
}
GROUP = 10_000
FAILING = 100


def make(path: Path, count: int) -> None:
    """A queue of ``count`` messages, and a processor that has failed at the first ones and read a part."""
    graph = cues.Graph("g", errors="errors")

    @graph.stream("some", "out")
    def work(message: dict[str, int]) -> dict[str, int]:
        if message["n"] < FAILING:
            raise ValueError("for the list of errors")
        return message

    with cues.open(path, durability="process") as store:
        appender = store.queue("in").appender()
        for start in range(0, count, GROUP):
            appender.write_many([{"n": n, "name": "flight"} for n in range(start, min(count, start + GROUP))])
        store.queue("some").appender().write_many([{"n": n} for n in range(2 * FAILING)])
        run_until_idle(graph, store)


@contextmanager
def page(store: Path) -> Iterator[str]:
    """The page of a store, in a process of its own; its address."""
    command = [sys.executable, "-m", "cues", "ui", str(store), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        said = ""
        for line in child.stdout:
            said += line
            if address := re.search(r"http://[\w.]+:\d+", line):
                break
        else:
            raise RuntimeError(f"cues ui has told no address: {said}")
        try:
            yield address[0]
        finally:
            child.terminate()


def asked(address: str, path: str) -> float:
    start = time.perf_counter()
    with urllib.request.urlopen(f"{address}/api/{path}", timeout=60) as answer:
        answer.read()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "g"
        start = time.perf_counter()
        make(store, given.count)
        size = sum(file.stat().st_blocks * 512 for file in store.iterdir() if file.is_file())
        print(
            f"{given.count:,} messages, {size / 1e6:,.0f} MB, made in {time.perf_counter() - start:.0f} s", flush=True
        )
        times: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(given.rounds):
            for name, arguments in COMMANDS.items():
                command = [sys.executable, "-m", "cues", *(text.format(store=store) for text in arguments)]
                start = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                times[name].append(time.perf_counter() - start)
        with page(store) as address:
            for name, path in REQUESTS.items():
                path = path.format(middle=given.count // 2)
                asked(address, path)
                times[name] = [asked(address, path) for _ in range(given.rounds)]
        print(f"load {os.getloadavg()[0]:.1f}, {given.rounds} rounds, medians")
        for name, taken in times.items():
            print(f"{name:34} {statistics.median(taken) * 1000:6.0f} ms")


if __name__ == "__main__":
    main()
