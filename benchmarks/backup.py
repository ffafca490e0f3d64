"""The cost of backups for a writer: small appends with and without an incremental backup each second, in turns.

python benchmarks/backup.py [ROUNDS] [SECONDS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cues

BACKUPS = """
import sys, time, cues
with cues.open(sys.argv[1], readonly=True) as store:
    while True:
        store.backup(sys.argv[2], since="auto")
        time.sleep(1)
"""


def main(rounds: int = 5, seconds: float = 3.0) -> None:
    rates: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as place, cues.open(Path(place) / "s", durability="process") as store:
        appender = store.queue("in").appender()
        for turn in range(2 * rounds):
            backups = turn % 2 == 1
            words = [sys.executable, "-c", BACKUPS, f"{place}/s", f"{place}/b"]
            child = subprocess.Popen(words) if backups else None
            time.sleep(1)  # the child has started
            count, end = 0, time.monotonic() + seconds
            while time.monotonic() < end:
                appender.write({"n": count})
                count += 1
            if child is not None:
                child.kill()
                child.wait()
            rates[backups].append(count / seconds)
    without, with_backups = (statistics.median(rates[key]) for key in (False, True))
    print(f"without {without:,.0f}/s, with {with_backups:,.0f}/s: x{with_backups / without:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
