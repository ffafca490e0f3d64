"""The rows of ``python -m benchmarks``, the environments of the peers, and the rounds.

Every contestant of every round is a process of its own on a directory of its own (``contestant.py``). Contestants of a
row take turns within a round, and a ratio is the median over the rounds of the ratios within a round.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = HERE / ".peers"
"""The environments that ``python -m benchmarks prepare`` makes."""
TIMEOUT_S = 900


@dataclass(frozen=True)
class Environment:
    """What a module of contestants needs."""

    packages: tuple[str, ...] = ()
    """From PyPI, in an environment of its own; () is the environment of Cues."""
    program: str = ""
    """A program that must be installed."""

    def python(self, module: str) -> Path:
        return PEERS / module.removeprefix("peers.") / "bin" / "python" if self.packages else Path(sys.executable)


ENVIRONMENTS = {
    "core": Environment(),
    "peers.own": Environment(),
    "peers.libraries": Environment(("persist-queue==1.1.0", "litequeue==0.9", "diskcache==5.6.3", "huey==3.5.4")),
    "peers.bytewax": Environment(("bytewax==0.21.1", "orjson")),
    "peers.pathway": Environment(("pathway==0.33.0", "orjson")),
    "peers.dbos": Environment(("dbos==3.4.0",)),
    "peers.redis": Environment(("redis==8.1.0", "orjson"), program="redis-server"),
    "peers.nats": Environment(("nats-py==2.16.0", "orjson"), program="nats-server"),
    "peers.spark": Environment(("pyspark==4.3.0", "pyarrow", "pandas"), program="java"),
}
NOT_RUN = {
    "quixstreams, faust": "need a Kafka broker",
    "Temporal, Restate": "need a server that is not on PyPI or in Debian",
}


@dataclass(frozen=True)
class Contestant:
    name: str
    module: str
    share: float = 1.0
    """Of the row's messages: slow ones get fewer; figures are by message."""
    note: str = ""
    syncs: bool = False
    """Whether it can sync each commit: only these run in the class ``disk``."""


@dataclass(frozen=True)
class Row:
    """One table: the first contestant is Cues; ``against`` is the one for the ratios of all."""

    name: str
    title: str
    count: int
    contestants: tuple[Contestant, ...]
    against: str
    figure: str = "cpu_us"
    """The figure of the ratios and of the plot."""
    shown: tuple[str, ...] = ("cpu_us", "wall_us", "own_mb", "disk_mb")
    products: bool = False
    """Whether there are products among the contestants: such rows are in the README's plot."""
    durabilities: tuple[str, ...] = ("process",)


def of_core(*names: str) -> tuple[Contestant, ...]:
    return tuple(Contestant(name, "core", syncs=True) for name in names)


def own(*names: str) -> tuple[Contestant, ...]:
    return tuple(Contestant(name, "peers.own") for name in names)


LIBRARIES = ("huey", "diskcache", "litequeue", "persist-queue")
SQLITE = "own file or SQLite, as it comes"
ROWS = (
    Row(
        "append-one",
        "append one message, one commit",
        20_000,
        (
            *of_core("Cues", "raw LMDB, bytes (REF)", "raw LMDB, pack", "floor: raw LMDB, pack, writemap"),
            *(Contestant(name, "peers.libraries", 0.1, SQLITE) for name in LIBRARIES),
            Contestant("Redis Streams", "peers.redis", 0.5, "a server", syncs=True),
            Contestant("NATS JetStream", "peers.nats", 0.1, "a server"),
        ),
        "raw LMDB, bytes (REF)",
        products=True,
        durabilities=("process", "disk"),
    ),
    Row(
        "append-many",
        "append 1,000 messages in one commit",
        100_000,
        of_core("Cues", "raw LMDB, pack each + putmulti"),
        "raw LMDB, pack each + putmulti",
    ),
    Row(
        "read",
        "read and decode, 1,000 at a time",
        200_000,
        of_core("Cues", "raw LMDB, iterate + unpack each"),
        "raw LMDB, iterate + unpack each",
    ),
    Row(
        "pipeline",
        "durable queue → function → durable queue, in batches",
        200_000,
        (
            *of_core("Cues", "raw LMDB", "raw LMDB, packed", "SQLite"),
            Contestant("bytewax, commit every 10 s", "peers.bytewax", note="files; positions each 10 s"),
            Contestant("pathway (no order, at least once)", "peers.pathway", note="files"),
            Contestant("Redis Streams", "peers.redis", 0.25, "a server", syncs=True),
            Contestant("NATS JetStream", "peers.nats", 0.05, "a server"),
            Contestant(
                "Spark local[2], a batch",
                "peers.spark",
                note="files; without the session's start, CPU without Python workers",
            ),
        ),
        "raw LMDB",
        products=True,
        durabilities=("process", "disk"),
    ),
    Row(
        "step-one",
        "durable queue → function → durable queue, a commit for each message",
        10_000,
        (
            *of_core("Cues", "raw LMDB", "SQLite", "floor: raw LMDB, writemap"),
            Contestant("bytewax, commit a message", "peers.bytewax", 0.1, "files"),
            *(Contestant(name, "peers.libraries", 0.1, SQLITE) for name in LIBRARIES),
            Contestant("Redis Streams", "peers.redis", 0.2, "a server", syncs=True),
            Contestant("NATS JetStream", "peers.nats", 0.1, "a server"),
            Contestant("DBOS, a workflow of one step", "peers.dbos", 0.02, "SQLite"),
        ),
        "raw LMDB",
        products=True,
        durabilities=("process", "disk"),
    ),
    Row(
        "keyed",
        "a running count and sum for each of 500 keys",
        100_000,
        (*own("Cues", "raw LMDB", "SQLite"), Contestant("bytewax", "peers.bytewax", note="files; state each 10 s")),
        "raw LMDB",
        products=True,
    ),
    Row(
        "window",
        "messages of each key in each minute of event time",
        100_000,
        (*own("Cues"), Contestant("bytewax", "peers.bytewax", note="files; state each 10 s")),
        "bytewax",
        products=True,
    ),
    Row(
        "stress",
        "two sources, a join, a fork, two sinks",
        100_000,
        of_core("Cues", "raw LMDB, packed"),
        "raw LMDB, packed",
    ),
    Row(
        "hop",
        "one message to a reader that sleeps in another process",
        1_000,
        of_core("Cues", "raw LMDB + FIFO", "floor: FIFO alone"),
        "raw LMDB + FIFO",
        "first",
        ("first", "second"),
    ),
    *(
        Row(
            f"latency-{rate}",
            f"source to sink over two queues, {rate:,} messages a second",
            rate * 5,
            own("Cues", "raw LMDB, threads"),
            "raw LMDB, threads",
            "p50_us",
            ("p50_us", "p99_us", "p99.9_us", "cpu_us"),
        )
        for rate in (1_000, 50_000)
    ),
    Row(
        "growth",
        "append and pass 100,000 messages on queues that hold many",
        100_000,
        own("Cues, 10,000 on the queue", "Cues, 1,000,000 on the queue", "Cues, 10,000,000 on the queue"),
        "Cues, 10,000 on the queue",
    ),
    Row(
        "growth-100m",
        "the same with 100 million on the queue (made only when it is asked for)",
        100_000,
        own("Cues, 10,000 on the queue", "Cues, 100,000,000 on the queue"),
        "Cues, 10,000 on the queue",
    ),
)
HEAVY = ("growth-100m",)
"""Rows that run only when they are named."""
PROGRAMS = {
    "cores": ("workers.py", "--json"),
    "transactions": ("txn.py", "--json", "--rounds", "3"),
    "spark": ("spark.py", "--json", "--count", "500000", "--rounds", "1"),
}
"""Rows that are programs of their own, with lines of their own."""


@dataclass
class Result:
    """The rounds of one contestant of one row."""

    row: str
    durability: str
    contestant: str
    note: str
    messages: int
    rounds: list[dict[str, float]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Of the row's figure to that of the reference, round by round."""
    fault: str | None = None

    def median(self, figure: str) -> float | None:
        values = [each[figure] for each in self.rounds if figure in each]
        return statistics.median(values) if values else None

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__ | {"ratio": statistics.median(self.ratios) if self.ratios else None}


def missing(module: str) -> str:
    """Why the contestants of a module cannot run, or nothing."""
    environment = ENVIRONMENTS[module]
    if environment.program and not shutil.which(environment.program):
        return f"{environment.program} is not installed"
    if not environment.python(module).exists():
        return "not prepared (python -m benchmarks prepare)"
    return ""


def prepare(say: Callable[[str], None]) -> None:
    """Make the environments of the peers; one that cannot be made is said, and left out."""
    for module, environment in ENVIRONMENTS.items():
        if not environment.packages:
            continue
        folder = PEERS / module.removeprefix("peers.")
        if not (folder / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        done = subprocess.run([*pip, *environment.packages], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(folder)
            say(f"{module}: not installed: {done.stderr.strip().splitlines()[-1]}")
        else:
            say(f"{module}: {', '.join(environment.packages)}" + (f"; {why}" if (why := missing(module)) else ""))


def contest(row: Row, durability: str, rounds: int, scale: float, say: Callable[[str], None]) -> list[Result]:
    """Run the rounds of one row."""
    present = [each for each in row.contestants if not missing(each.module) and (each.syncs or durability == "process")]
    results = {
        each.name: Result(row.name, durability, each.name, each.note, max(100, int(row.count * scale * each.share)))
        for each in present
    }
    for number in range(rounds):
        turn = number % len(present)
        for each in present[turn:] + present[:turn]:
            result = results[each.name]
            if result.fault is None:
                say(f"{row.name} · {durability} · round {number + 1} of {rounds} · {each.name}")
                figures = once(each, row.name, result.messages, durability)
                result.fault = figures.pop("fault")
                result.rounds.append({name: value for name, value in figures.items() if isinstance(value, float)})
        reference = results.get(row.against)
        if reference is not None and len(reference.rounds) == number + 1:
            base = reference.rounds[number].get(row.figure)
            for result in results.values():
                mine = result.rounds[number].get(row.figure) if len(result.rounds) > number else None
                if base and mine is not None:
                    result.ratios.append(mine / base)
    return list(results.values())


def once(contestant: Contestant, row: str, count: int, durability: str) -> dict[str, Any]:
    row = row.removesuffix("-100m")
    with tempfile.TemporaryDirectory(prefix="cues-bench-") as made:
        python = ENVIRONMENTS[contestant.module].python(contestant.module)
        script = HERE / "contestant.py"
        command = [python, script, contestant.module, row, contestant.name, made, count, durability]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT_S, env=environ, cwd=made
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"fault": f"ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}"}
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def program(name: str) -> list[dict[str, Any]]:
    """The lines of a row that is a program of its own."""
    script, *options = PROGRAMS[name]
    done = subprocess.run([sys.executable, str(HERE / script), *options], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def chosen(names: Iterable[str]) -> list[Row]:
    names = tuple(names)
    if not names:
        return [row for row in ROWS if row.name not in HEAVY]
    return [row for row in ROWS if row.name.startswith(names) and (row.name not in HEAVY or row.name in names)]
