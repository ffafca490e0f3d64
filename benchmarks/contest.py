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
from dataclasses import dataclass, field, replace
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
    imports: str = ""
    """A package that must be in the environment of Cues."""

    def python(self, module: str) -> Path:
        return PEERS / module.removeprefix("peers.") / "bin" / "python" if self.packages else Path(sys.executable)


ENVIRONMENTS = {
    "core": Environment(),
    "peers.floors": Environment(),
    "peers.own": Environment(),
    "peers.transactions": Environment(),
    "peers.cores": Environment(),
    "peers.cues_spark": Environment(program="java", imports="pyspark"),
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
    python: str = ""
    """The Python of the environment with a compiled wheel of Cues; empty: that of the module."""

    @property
    def label(self) -> str:
        """The name in results; ``name`` is that in the module."""
        return compiled_name(self.name) if self.python else self.name


def compiled_name(name: str) -> str:
    return name.replace("Cues", "Cues, compiled", 1)


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


def own(*names: str, module: str = "peers.own", syncs: bool = False) -> tuple[Contestant, ...]:
    return tuple(Contestant(name, module, syncs=syncs) for name in names)


FLOOR = "floor: the calls of Cues"
"""The calls that a row takes in the format of Cues, without Cues (peers/floors.py)."""
FLOORS = (Contestant(FLOOR, "peers.floors"),)
LIBRARIES = ("huey", "diskcache", "litequeue", "persist-queue")
SQLITE = "own file or SQLite, as it comes"
STARTED = (
    *own("Cues", "raw LMDB", "SQLite"),
    Contestant("bytewax", "peers.bytewax", note="files; positions each second"),
    Contestant("Redis Streams", "peers.redis", note="a server, which is not restarted"),
)
ROWS = (
    Row(
        "append-one",
        "append one message, one commit",
        20_000,
        (
            *of_core("Cues", "raw LMDB, bytes (REF)", "raw LMDB, pack", "floor: raw LMDB, pack, writemap"),
            *FLOORS,
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
        (*of_core("Cues", "raw LMDB, iterate + unpack each"), *FLOORS),
        "raw LMDB, iterate + unpack each",
    ),
    Row(
        "pipeline",
        "durable queue → function → durable queue, in batches",
        200_000,
        (
            *of_core("Cues", "raw LMDB", "raw LMDB, packed", "SQLite"),
            *FLOORS,
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
            *FLOORS,
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
        (*of_core("Cues", "raw LMDB, packed"), *FLOORS),
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
        "start",
        "a new process on nothing, from its spawn to the first message in its function",
        1,
        (*STARTED, *own("floor: Python")),
        "raw LMDB",
        "first_ms",
        ("first_ms",),
        products=True,
    ),
    *(
        Row(
            f"restart-{end}",
            f"a process after {how}, with half of its messages left, from its spawn to the first one in its function",
            20_000,
            STARTED,
            "raw LMDB",
            "first_ms",
            ("first_ms",),
            products=True,
        )
        for end, how in (("stop", "a stop"), ("kill", "a kill -9"))
    ),
    *(
        Row(
            name,
            title,
            count,
            own("Cues, one worker", "Cues, two workers", module="peers.cores"),
            "Cues, one worker",
            "wall_us",
            ("wall_us", "cpu_us"),
        )
        for name, title, count in (
            ("cores", "two chains with a function that computes for a millisecond", 4_000),
            ("cores-light", "two chains with a light function", 400_000),
        )
    ),
    *(
        Row(
            f"transactions-{name}",
            title,
            count,
            (
                Contestant("Cues", "peers.transactions", 1.0, "syncs its transactions in both classes", syncs=True),
                *own("raw LMDB", "SQLite", module="peers.transactions", syncs=True),
                Contestant("Redis MULTI", "peers.redis", share, "a server", syncs=True),
            ),
            "raw LMDB",
            products=True,
            durabilities=("process", "disk"),
        )
        for name, title, count, share in (
            ("append", "transactions of ten messages to three queues", 20_000, 1.0),
            ("process", "read, process and write exactly once, in batches", 100_000, 0.25),
        )
    ),
    Row(
        "spark",
        "durable queue → function → durable queue, on Spark",
        200_000,
        (
            *own("Cues, on Spark", "Cues, embedded", module="peers.cues_spark"),
            Contestant("PySpark structured streaming", "peers.spark", note="files"),
        ),
        "PySpark structured streaming",
        "wall_us",
        ("wall_us", "cpu_us"),
    ),
    Row(
        "sources",
        "a consumer of 64 sources, of which one has messages",
        100_000,
        own("Cues, one source", "Cues, 64 sources, one busy", module="peers.transactions"),
        "Cues, one source",
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


@dataclass(frozen=True)
class Aim:
    """The largest ratio that one row may have, of Cues in pure Python and of the compiled one."""

    row: str
    title: str
    peers: tuple[str, ...]
    """Of these the best one that ran."""
    compiled: float
    pure: float
    mine: str = "Cues"


PRODUCTS = tuple(
    each.name
    for row in ROWS
    if row.name == "pipeline"
    for each in row.contestants
    if each.module not in ("core", "peers.floors")
)
AIMS = (
    Aim("append-one", "one append / raw put", ("raw LMDB, bytes (REF)",), 0.5, 0.75),
    Aim("read", "read and decode / raw", ("raw LMDB, iterate + unpack each",), 0.8, 0.95),
    Aim("pipeline", "pipeline / raw LMDB by hand", ("raw LMDB",), 0.7, 0.9),
    Aim("pipeline", "pipeline / an expert's, with packed batches", ("raw LMDB, packed",), 1.15, 1.4),
    Aim("pipeline", "pipeline / SQLite by hand", ("SQLite",), 0.4, 0.55),
    Aim("step-one", "a commit for each message / raw LMDB by hand", ("raw LMDB",), 1.8, 3),
    Aim("stress", "stress shape / raw LMDB with packed batches", ("raw LMDB, packed",), 1.5, 2.5),
    Aim("hop", "hop to an idle reader / LMDB commit and FIFO", ("raw LMDB + FIFO",), 1.3, 1.6),
    Aim("pipeline", "pipeline / the best product", PRODUCTS, 0.5, 0.65),
    Aim(
        "sources",
        "a consumer of 64 sources, one busy / of one source",
        ("Cues, one source",),
        1.2,
        1.2,
        "Cues, 64 sources, one busy",
    ),
    Aim(
        "growth-100m",
        "a message with 100 million on the queue / with 10 thousand",
        ("Cues, 10,000 on the queue",),
        1.1,
        1.1,
        "Cues, 100,000,000 on the queue",
    ),
)
"""In durability ``process``, by the figure of the row."""


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
    added: dict[str, Any] | None = None
    """Date and load, if it was added to the file of an earlier run."""

    def median(self, figure: str) -> float | None:
        values = [each[figure] for each in self.rounds if figure in each]
        return statistics.median(values) if values else None

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__ | {"ratio": statistics.median(self.ratios) if self.ratios else None}


def missing(module: str, python: str = "") -> str:
    """Why the contestants of a module cannot run, or nothing."""
    environment = ENVIRONMENTS[module]
    if environment.program and not shutil.which(environment.program):
        return f"{environment.program} is not installed"
    if not environment.python(module).exists():
        return "not prepared (python -m benchmarks prepare)"
    if environment.imports:
        command = [python or str(environment.python(module)), "-c", f"import {environment.imports}"]
        if subprocess.run(command, capture_output=True, env=environ_of(python)).returncode:
            return f"{environment.imports} is not installed"
    return ""


def environ_of(installed: object) -> dict[str, str]:
    """The environment variables of a contestant: with the source of this Cues, if it uses nothing ``installed``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept if installed else kept | {"PYTHONPATH": str(HERE.parent)}


class NotCompiled(ValueError):
    """The Python of ``--compiled`` has no compiled Cues."""


def core_of(python: str) -> str:
    """The core of Cues in another environment, as ``cues --version`` tells it.

    Raises :class:`NotCompiled` if there is no Cues, if it is that of this source, or if its core is pure Python.
    """
    core = _said(python, "-m", "cues", "--version").splitlines()[-1]
    package = Path(_said(python, "-c", "import cues; print(cues.__file__)").strip()).parent
    if package == HERE.parent / "cues":
        raise NotCompiled(f"{python} imports the Cues of this source ({package}). Try: install a wheel there.")
    if not core.startswith("core: compiled"):
        raise NotCompiled(f"Cues in {package} is not compiled ({core}). Try: install a compiled wheel there.")
    return core


def _said(python: str, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run([python, *arguments], capture_output=True, text=True, env=environ_of(True), cwd=elsewhere)
    if done.returncode:
        raise NotCompiled(f"{python} cannot import Cues: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}")
    return done.stdout


def with_compiled(row: Row, python: str) -> Row:
    """The row, with each contestant of Cues a second time, in the environment ``python``."""
    if not python:
        return row
    both = [
        each
        for one in row.contestants
        for each in (one, *((replace(one, python=python),) if one.name.startswith("Cues") else ()))
    ]
    return replace(row, contestants=tuple(both))


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
    present = [
        each
        for each in row.contestants
        if (each.syncs or durability == "process") and not missing(each.module, each.python)
    ]
    least = min(100, row.count)
    results = {
        each.label: Result(row.name, durability, each.label, each.note, max(least, int(row.count * scale * each.share)))
        for each in present
    }
    for number in range(rounds):
        turn = number % len(present)
        for each in present[turn:] + present[:turn]:
            result = results[each.label]
            if result.fault is None:
                say(f"{row.name} · {durability} · round {number + 1} of {rounds} · {each.label}")
                figures = once(each, row.name, result.messages, durability)
                result.fault = figures.pop("fault")
                result.rounds.append({name: value for name, value in figures.items() if isinstance(value, float)})
        for each in present:
            mine, reference = results[each.label], results.get(row.against)
            if each.python and row.against.startswith("Cues"):
                reference = results.get(compiled_name(row.against))
            figures = [
                result.rounds[number].get(row.figure)
                for result in (mine, reference)
                if result is not None and len(result.rounds) > number
            ]
            match figures:
                case [float() | int() as own, float() | int() as others] if others:
                    mine.ratios.append(own / others)
    return list(results.values())


def once(contestant: Contestant, row: str, count: int, durability: str) -> dict[str, Any]:
    row = row.removesuffix("-100m")
    with tempfile.TemporaryDirectory(prefix="cues-bench-") as made:
        python = contestant.python or ENVIRONMENTS[contestant.module].python(contestant.module)
        script = HERE / "contestant.py"
        command = [python, script, contestant.module, row, contestant.name, made, count, durability]
        environ = environ_of(contestant.python or ENVIRONMENTS[contestant.module].packages)
        try:
            done = subprocess.run(
                list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT_S, env=environ, cwd=made
            )
        except subprocess.TimeoutExpired:
            return {"fault": f"not ended in {TIMEOUT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"fault": f"ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}"}
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def chosen(names: Iterable[str]) -> list[Row]:
    names = tuple(names)
    if not names:
        return [row for row in ROWS if row.name not in HEAVY]
    return [row for row in ROWS if row.name.startswith(names) and (row.name not in HEAVY or row.name in names)]
