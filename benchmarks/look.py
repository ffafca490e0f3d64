"""The commands that look at a large store, from their spawn to their end: they must not read it.

python benchmarks/look.py                     # 10 million messages in a store of its own, about a minute
python benchmarks/look.py --count 100000      # smaller
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
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
        print(f"load {os.getloadavg()[0]:.1f}, {given.rounds} rounds, medians")
        for name, taken in times.items():
            print(f"{name:18} {statistics.median(taken) * 1000:6.0f} ms")


if __name__ == "__main__":
    main()
