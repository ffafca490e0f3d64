"""The command line of the simulation. Exit status 1 if a run differs from the model; its seed repeats it."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable

from cues import faults

from .run import run


def commit() -> str:
    """The commit of the code, which a seed belongs to."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run one seed, and print everything that happened")
    parser.add_argument("--first", type=int, default=0, help="the first seed of several (0)")
    parser.add_argument("--seeds", type=int, default=100, help="the number of seeds (100)")
    parser.add_argument("--seconds", type=float, help="run as many seeds as begin in this time")
    parser.add_argument("--endless", action="store_true", help="run until a seed fails")
    given = parser.parse_args()
    if given.seeds < 1 or (given.seconds is not None and given.seconds <= 0):
        parser.error("--seeds and --seconds are numbers above 0. Try: --seeds 100")
    if given.seed is not None:
        result = run(given.seed)
        print(*result.trace, sep="\n")
        print(f"seed {given.seed}, commit {commit()}, digest {result.digest}, {len(result.problems)} problems")
        return 1 if result.problems else 0
    seeds: Iterable[int] = itertools.count(given.first)
    if not (given.endless or given.seconds):
        seeds = range(given.first, given.first + given.seeds)
    began, counts, done, killed_at = time.monotonic(), Counter[str](), 0, set[str]()
    status = 0
    try:
        for seed in seeds:
            if given.seconds and time.monotonic() - began > given.seconds:
                break
            result = run(seed)
            counts += result.counts
            killed_at |= result.killed_at
            done += 1
            if result.problems:
                print(*result.problems, sep="\n")
                print(f"seed {seed} failed after {done} seeds, commit {commit()}.")
                print(f"Repeat it: python -m tests.simulation --seed {seed}")
                return 1
    except KeyboardInterrupt:  # the end of an endless run; what it did until then counts
        status = 130
    took = f"{time.monotonic() - began:.0f} s, commit {commit()}"
    print(f"{done} seeds, 0 problems ({took}): " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    missed = ", ".join(sorted(set(faults.POINTS) - killed_at))
    print(f"kills at {len(killed_at)} of {len(faults.POINTS)} points; none at {missed}")
    return status


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # else the order of sets is another one in each process
        again = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
