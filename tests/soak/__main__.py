"""The command line of the soak. Exit status 1 if anything is wrong; its directory then stays."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

if __package__ != "soak":  # as the processes that it starts have it, which read their graph from a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cues
from soak.chaos import BEGINNINGS, Soak, Wrong
from soak.model import Place


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="run so long, and to the end of the last life")
    length.add_argument("--seconds", type=float, help="the same in seconds; at least one life")
    parser.add_argument("--seed", type=int, help="the seed of all choices; by default a new one")
    parser.add_argument("--pace", type=float, default=4.0, help="mean seconds between two actions (4)")
    parser.add_argument("--rate", type=float, default=40.0, help="rows a second (40)")
    parser.add_argument("--life", type=float, default=60.0, help="mean seconds of a life (60)")
    parser.add_argument("--begins", choices=BEGINNINGS, help="how the store begins; by default the seed chooses")
    parser.add_argument("--python", action="append", default=[], help="an interpreter with Cues; restarts choose one")
    parser.add_argument("--place", type=Path, help="a new directory for everything, which stays")
    given = parser.parse_args()
    seconds = given.seconds if given.seconds is not None else given.minutes * 60
    if min(seconds, given.pace, given.rate, given.life) <= 0:
        parser.error("all times and rates are numbers above 0. Try: --minutes 10")
    seed = given.seed if given.seed is not None else int.from_bytes(os.urandom(4), "big")
    root = given.place or Path(tempfile.mkdtemp(prefix="cues-soak-"))
    print(f"seed {seed}, Cues {cues.__version__}, {root}", flush=True)
    soak = Soak(Place(root), seed, pace_s=given.pace, rate=given.rate, pythons=given.python, begins=given.begins)
    print(f"the store begins as {soak.begins}", flush=True)
    problem = ""
    deadline = time.monotonic() + seconds
    try:
        with soak.judge:
            while not soak.counts["lives"] or time.monotonic() < deadline:
                left = max(1.0, deadline - time.monotonic())
                soak.live(min(left, soak.chance.uniform(0.4, 1.6) * given.life))
            soak.finish()
    except (Wrong, cues.CuesError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        soak.close()
    print(f"\n{(time.monotonic() - soak.began) / 60:.1f} minutes")
    print(*(f"{count:12,} {name}" for name, count in soak.totals().items()), sep="\n")
    print("\nMB in the four quarters of the run:", *soak.measures.table(), sep="\n")
    growths = soak.measures.growths()
    print(*growths, sep="\n")
    if problem:
        print(f"\nThe last decisions:\n{chr(10).join(soak.decisions)}\n\n{problem}")
    if problem or growths:
        print(f"\nFAILED. Seed {seed}; everything is in {root}")
        return 1
    if given.place is None:
        shutil.rmtree(root)
    print("\nNothing was lost, doubled or reordered; every check was clean.")
    return 0


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt  # so that the processes are ended after a SIGTERM too


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupted)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
