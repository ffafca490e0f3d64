"""Die repeatedly, and lose nothing: ``python examples/crash_me.py [--seed N]``.

A child process runs a graph, numbers → squares → SQLite, and kills itself with SIGKILL at a random
moment. It is started again until it has died a dozen times, and then once more to finish. Then every
number must be in the database, on the queues and in the state exactly once. Each number that fails (a
few do, on purpose) must be in exactly one error message. If not, the exit code is 1.
"""

import argparse
import itertools
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import cues
from cues.processors import sql

NUMBERS, DEATHS = 40_000, 12
AIM_S = 0.02  # a process sees a random count of numbers; then it is killed within this time


def build(directory: Path, life: int = NUMBERS, aim_s: float = 0) -> cues.Graph:
    """The graph. It kills its process ``aim_s`` after it has seen ``life`` numbers."""
    seen = itertools.count(1)
    graph = cues.Graph("crash-me", store=directory / "store", errors="errors", durability="process")
    db = sql.SQLite(directory / "squares.db", "create table if not exists squares (n integer, square integer)")

    @graph.source("numbers", batch_size=100)
    def numbers(position):
        for n in range(position or 0, NUMBERS):
            yield n + 1, {"n": n}

    @graph.stream("numbers", "squares", batch_size=100, key=lambda message: message["n"] % 10)
    def square(message, process):
        if next(seen) == life:
            threading.Timer(aim_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        process.state["seen"] = process.state.get("seen", 0) + 1
        if message["n"] % 1000 == 13:
            raise ValueError("thirteen")
        return {"n": message["n"], "square": message["n"] ** 2}

    @graph.sink("squares", batch=True, batch_size=100, errors=None)
    def save(squares, process):
        with db.transaction(process) as tx:
            tx.executemany("insert into squares values (:n, :square)", tx.fresh(squares))

    @graph.stream("squares", "last-digits", batch=True, batch_size=100)
    def digits(squares, process):
        for message in squares:
            state = process.state_of(message["n"] % 10)
            state["count"] = state.get("count", 0) + 1
        return [{"n": message["n"], "digit": message["square"] % 10} for message in squares]

    return graph


def saved(directory: Path) -> list[tuple[int, int]]:
    with closing(sqlite3.connect(directory / "squares.db")) as db:
        made = db.execute("select 1 from sqlite_master where name = 'squares'").fetchall()
        return db.execute("select n, square from squares").fetchall() if made else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="the seed of the random choices")
    seed = parser.parse_args().seed
    chance = random.Random(seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        print(f"{NUMBERS:,} numbers, {DEATHS} deaths, seed {seed}")
        for death in range(DEATHS + 1):
            life = chance.randrange(1, NUMBERS // DEATHS) if death < DEATHS else NUMBERS + 1
            aim_s = chance.uniform(0, AIM_S)
            child = subprocess.run([sys.executable, __file__, "--live", name, str(life), str(aim_s)])
            if child.returncode not in (0, -signal.SIGKILL):
                print(f"the child failed with {child.returncode}")
                return 1
            fate = f"killed after {life:5,} numbers" if child.returncode else "finished"
            print(f"  {fate:28} {len(saved(directory)):6,} rows in the database", flush=True)

        # The check: everything must be there exactly once, and nothing else.
        expected = [n for n in range(NUMBERS) if n % 1000 != 13]
        with cues.open(directory / "store") as store:
            failed = [m["err.proc/messages"]["numbers"][0]["n"] for m in store.queue("errors").tailer()]
            counts = cues.testing.state
            verdicts = {
                "database": sorted(saved(directory)) == [(n, n * n) for n in expected],
                "queue": [m["n"] for m in store.queue("squares").tailer()] == expected,
                "second queue": [m["n"] for m in store.queue("last-digits").tailer()] == expected,
                "error queue": failed == [n for n in range(NUMBERS) if n % 1000 == 13],
                "state": sum(counts(store, "crash-me.digits", digit)["count"] for digit in range(10)) == len(expected),
            }
    for what, exact in verdicts.items():
        print(f"  {what:13} {'exact' if exact else 'NOT EXACT'}")
    good = all(verdicts.values())
    print(f"{'Nothing lost, nothing doubled' if good else 'Something is wrong'}, {time.monotonic() - began:.1f} s.")
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--live"]:
        logging.disable(logging.WARNING)  # the errors are expected
        build(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])).run()
    else:
        sys.exit(main())
