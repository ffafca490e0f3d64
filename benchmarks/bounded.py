"""What the bound on a step's time gives: the first output of a slow function, and a slow sink that is killed.

    python benchmarks/bounded.py

first output    a backlog of 1,000 messages and a function of 20 ms a call: seconds from the start of the graph until
                its first output can be read
killed sink     a sink of --call-s a call in a process that is killed every --kill-s: how many calls were made for
                messages that had been called for before, per kill. ``--step-s none`` shows it without the bound.

Another tree of Cues is measured with ``PYTHONPATH=<tree> python benchmarks/bounded.py --plain`` (no ``step_s=``).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cues
from cues import Graph, Sink, Source, Stream

BACKLOG = 1_000
CALL_S = 0.02


def first_output(options: dict[str, Any]) -> float:
    """Seconds until the first output of a backlog can be read."""

    def slow(message: dict[str, Any]) -> dict[str, Any]:
        time.sleep(CALL_S)
        return message

    with tempfile.TemporaryDirectory() as folder, cues.open(Path(folder) / "store") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(BACKLOG)])
        graph = Graph("g", [Source("in"), Stream(slow, "in", "out", **options)])
        began = time.monotonic()
        running = graph.start(store=store)
        try:
            tailer = store.queue("out").tailer()
            assert tailer.read(block=True, timeout=120) == {"n": 0}
            return time.monotonic() - began
        finally:
            running.close()


def sink(store: str, calls: str, call_s: float, options: dict[str, Any]) -> None:
    """A process that runs the sink; every call is a line of a file before it takes its time."""
    with open(calls, "a") as file:

        def save(message: dict[str, Any]) -> None:
            file.write(f"{message['n']}\n")
            file.flush()
            time.sleep(call_s)

        with Graph("g", [Source("in"), Sink(save, "in", id="s", **options)]).start(store=store) as running:
            running.wait_idle()


def killed_sink(count: int, call_s: float, kill_s: float, step_s: str, most: int) -> tuple[int, int, int]:
    """Kills, calls, and messages that were called for, at the end or after ``most`` kills."""
    with tempfile.TemporaryDirectory() as folder:
        place, calls = str(Path(folder) / "store"), str(Path(folder) / "calls")
        with cues.open(place) as store:
            store.queue("in").appender().write_many([{"n": n} for n in range(count)])
        kills = 0
        while True:
            arguments = [sys.executable, __file__, "--sink", place, calls, "--call-s", str(call_s), "--step-s", step_s]
            child = subprocess.Popen(arguments)
            try:
                child.wait(kill_s)
                break
            except subprocess.TimeoutExpired:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
                kills += 1
            if kills >= most:
                break
        made = Path(calls).read_text().split()
        return kills, len(made), len(set(made))


def options_of(step_s: str) -> dict[str, Any]:
    return {} if step_s == "plain" else {"step_s": None if step_s == "none" else float(step_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=40, help="of the killed sink")
    parser.add_argument("--call-s", type=float, default=0.25)
    parser.add_argument("--kill-s", type=float, default=2.0)
    parser.add_argument("--kills-max", type=int, default=30)
    parser.add_argument("--step-s", default="0.25", help="seconds, or none")
    parser.add_argument("--plain", action="store_const", const="plain", dest="step_s", help="without the option")
    parser.add_argument("--sink", nargs=2, metavar=("STORE", "CALLS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.sink:
        sink(*asked.sink, asked.call_s, options_of(asked.step_s))
        return
    print(f"first output   {first_output(options_of(asked.step_s)):.3f} s")
    kills, calls, distinct = killed_sink(asked.messages, asked.call_s, asked.kill_s, asked.step_s, asked.kills_max)
    print(f"killed sink    {kills} kills, {calls} calls for {distinct} of {asked.messages} messages", end="")
    print(f", {(calls - distinct) / kills:.2f} repeated for each kill" if kills else "")


if __name__ == "__main__":
    main()
