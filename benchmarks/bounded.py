"""The effect of the bound on a step's time: the first output of a slow function, and a slow sink that is killed.

    python benchmarks/bounded.py

first output    a backlog of 1,000 messages and a function of 20 ms a call: seconds from the start of the graph until
                its first output can be read
killed sink     a sink of --call-s a call in a process that is killed every --kill-s: the number of repeated calls
                for each kill. ``--step-s none`` shows it without the bound.

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
    """Run the sink in this process. Each call writes a line to a file, then sleeps."""
    with open(calls, "a") as file:

        def save(message: dict[str, Any]) -> None:
            file.write(f"{message['n']}\n")
            file.flush()
            time.sleep(call_s)

        with Graph("g", [Source("in"), Sink(save, "in", id="s", **options)]).start(store=store) as running:
            running.wait_idle()


def killed_sink(count: int, call_s: float, kill_s: float, step_s: str, most: int) -> tuple[int, int, int]:
    """The numbers of kills, of calls, and of messages with a call, at the end or after ``most`` kills."""
    with tempfile.TemporaryDirectory() as folder:
        place, calls = str(Path(folder) / "store"), str(Path(folder) / "calls")
        with cues.open(place) as store:
            store.queue("in").appender().write_many([{"n": n} for n in range(count)])
        kills = 0
        while True:
            command = [sys.executable, __file__, "--sink", place, calls, "--call-s", str(call_s), "--step-s", step_s]
            child = subprocess.Popen(command)
            try:
                child.wait(kill_s)
                break
            except subprocess.TimeoutExpired:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
                kills += 1
            if kills >= most:
                break
        called = Path(calls).read_text().split()
        return kills, len(called), len(set(called))


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
    arguments = parser.parse_args()
    if arguments.sink:
        sink(*arguments.sink, arguments.call_s, options_of(arguments.step_s))
        return
    print(f"first output   {first_output(options_of(arguments.step_s)):.3f} s")
    kills, calls, distinct = killed_sink(
        arguments.messages, arguments.call_s, arguments.kill_s, arguments.step_s, arguments.kills_max
    )
    print(f"killed sink    {kills} kills, {calls} calls for {distinct} of {arguments.messages} messages", end="")
    print(f", {(calls - distinct) / kills:.2f} repeated for each kill" if kills else "")


if __name__ == "__main__":
    main()
