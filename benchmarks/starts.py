"""The rows ``start``, ``restart-stop`` and ``restart-kill``: from a process's spawn to its function's first message.

    python starts.py NAME DIRECTORY fill          write the messages of standard input, a line of JSON each
    python starts.py NAME DIRECTORY run           pass on what there is, and tell the time of the first message
    python starts.py NAME DIRECTORY wait ID       the same, and wait for a ``kill -9`` at the message with this id
    python starts.py NAME DIRECTORY first         write one message on nothing, and run
    python starts.py NAME DIRECTORY results       print the results

Each program imports what its user would import, and nothing else, so imports are in the functions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from harness import Contender, Room, Work

BATCH = 1000
Function = Callable[[Any], Any]


class Program(Protocol):
    """A way from a durable queue through a function to another; a process that ends has it on disk."""

    def __init__(self, path: Path) -> None: ...
    def fill(self, orders: list[Any]) -> None: ...
    def run(self, function: Function) -> None:
        """Pass all messages that have not been passed yet."""

    def results(self) -> Iterable[Any]: ...


class Cues:
    def __init__(self, path: Path) -> None:
        import cues

        self.cues, self.path = cues, path
        self.keeps = cues.QueueOptions(metadata=frozenset({"t", "time"}))

    def fill(self, orders: list[Any]) -> None:
        with self.cues.open(self.path, durability="process") as store:
            store.queue("orders", metadata={"t", "time"}).appender().write_many(orders)

    def run(self, function: Function) -> None:
        from cues import Graph, Source, Stream

        parts = [Source("orders"), Stream(function, "orders", "totals")]
        graph = Graph("bench", parts, store=self.path, durability="process", queues={"*": self.keeps})
        with graph.start() as running:
            running.wait_idle()

    def results(self) -> Iterable[Any]:
        with self.cues.open(self.path, readonly=True) as store:
            yield from store.queue("totals").tailer()


class LMDB:
    def __init__(self, path: Path) -> None:
        import lmdb
        import msgpack

        self.pack, self.unpack = msgpack.Packer().pack, msgpack.unpackb
        self.env = lmdb.open(str(path), map_size=1 << 30, max_dbs=8, sync=False, metasync=False, lib_version=0)
        self.orders, self.totals = self.env.open_db(b"orders"), self.env.open_db(b"totals")

    def fill(self, orders: list[Any]) -> None:
        with self.env.begin(write=True) as txn:
            have = txn.stat(self.orders)["entries"]
            rows = [((have + n).to_bytes(8, "big"), self.pack(order)) for n, order in enumerate(orders)]
            txn.cursor(self.orders).putmulti(rows, append=True)

    def run(self, function: Function) -> None:
        while True:
            with self.env.begin() as txn:
                position = txn.get(b"position", bytes(8))
                cursor = txn.cursor(self.orders)
                rows = [pair for pair, _ in zip(cursor, range(BATCH))] if cursor.set_range(position) else []
            if not rows:
                return
            results = [(key, self.pack(function(self.unpack(value)))) for key, value in rows]
            with self.env.begin(write=True) as txn:
                txn.cursor(self.totals).putmulti(results, append=True)
                txn.put(b"position", (int.from_bytes(position, "big") + len(rows)).to_bytes(8, "big"))

    def results(self) -> Iterable[Any]:
        with self.env.begin() as txn:
            for _, value in txn.cursor(self.totals):
                yield self.unpack(value)


class SQLite:
    def __init__(self, path: Path) -> None:
        import sqlite3

        import msgpack

        self.pack, self.unpack = msgpack.Packer().pack, msgpack.unpackb
        self.db = sqlite3.connect(path / "queues.db", isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=OFF")
        for table in ("orders", "totals"):
            self.db.execute(f"CREATE TABLE IF NOT EXISTS {table} (id INTEGER PRIMARY KEY, body BLOB)")

    def fill(self, orders: list[Any]) -> None:
        self.db.execute("BEGIN")
        self.db.executemany("INSERT INTO orders (body) VALUES (?)", ((self.pack(order),) for order in orders))
        self.db.execute("COMMIT")

    def run(self, function: Function) -> None:
        """A result has the id of its order, so the last one is the position."""
        query = "SELECT id, body FROM orders WHERE id > (SELECT ifnull(max(id), 0) FROM totals) ORDER BY id LIMIT 1000"
        while rows := self.db.execute(query).fetchall():
            results = [(number, self.pack(function(self.unpack(body)))) for number, body in rows]
            self.db.execute("BEGIN")
            self.db.executemany("INSERT INTO totals VALUES (?, ?)", results)
            self.db.execute("COMMIT")

    def results(self) -> Iterable[Any]:
        for (body,) in self.db.execute("SELECT body FROM totals ORDER BY id"):
            yield self.unpack(body)


class Bytewax:
    """Positions each second, as in its recovery guide."""

    def __init__(self, path: Path) -> None:
        import orjson

        self.path, self.orjson = path, orjson

    def fill(self, orders: list[Any]) -> None:
        with (self.path / "in.jsonl").open("ab") as file:
            file.writelines(self.orjson.dumps(order) + b"\n" for order in orders)

    def run(self, function: Function) -> None:
        from datetime import timedelta

        import bytewax.operators as op
        from bytewax.connectors.files import FileSink, FileSource
        from bytewax.dataflow import Dataflow
        from bytewax.recovery import RecoveryConfig, init_db_dir
        from bytewax.testing import run_main

        kept = self.path / "recovery"
        if not kept.exists():
            kept.mkdir()
            init_db_dir(kept, 1)
        graph = Dataflow("bench")
        lines = op.input("in", graph, FileSource(self.path / "in.jsonl", batch_size=BATCH))
        totals = op.map(
            "total", lines, lambda line: ("0", self.orjson.dumps(function(self.orjson.loads(line))).decode())
        )
        op.output("out", totals, FileSink(self.path / "out.jsonl"))
        run_main(graph, epoch_interval=timedelta(seconds=1), recovery_config=RecoveryConfig(kept))

    def results(self) -> Iterable[Any]:
        return map(self.orjson.loads, (self.path / "out.jsonl").read_bytes().splitlines())


class Redis:
    """The server is not killed; it gives what was not acknowledged again."""

    def __init__(self, path: Path) -> None:
        import orjson
        import redis

        self.orjson = orjson
        self.client = redis.Redis(unix_socket_path=str(path / "redis.sock"))

    def fill(self, orders: list[Any]) -> None:
        filling = self.client.pipeline(transaction=False)
        for order in orders:
            filling.xadd("orders", {"m": self.orjson.dumps(order)})
        filling.execute()

    def run(self, function: Function) -> None:
        if not self.client.exists("orders") or not self.client.xinfo_groups("orders"):
            self.client.xgroup_create("orders", "totals", id="0", mkstream=True)
        for begin in ("0", ">"):
            while (taken := self.client.xreadgroup("totals", "one", {"orders": begin}, count=BATCH)) and taken[0][1]:
                step = self.client.pipeline(transaction=True)
                for index, fields in taken[0][1]:
                    step.xadd("totals", {"m": self.orjson.dumps(function(self.orjson.loads(fields[b"m"])))})
                    step.xack("orders", "totals", index)
                step.execute()

    def results(self) -> Iterable[Any]:
        return (self.orjson.loads(fields[b"m"]) for _, fields in self.client.xrange("totals"))


class Nothing:
    """The floor: an interpreter that starts and calls the function."""

    def __init__(self, path: Path) -> None:
        self.orders: list[Any] = []

    def fill(self, orders: list[Any]) -> None:
        self.orders = orders

    def run(self, function: Function) -> None:
        self.kept = list(map(function, self.orders))

    def results(self) -> Iterable[Any]:
        return self.kept


PROGRAMS: dict[str, type[Program]] = {
    "Cues": Cues,
    "raw LMDB": LMDB,
    "SQLite": SQLite,
    "bytewax": Bytewax,
    "Redis Streams": Redis,
    "floor: Python": Nothing,
}


# --- the process ------------------------------------------------------------------------------------


def main(name: str, directory: str, verb: str, wait_at: str = "") -> None:
    from work import messages, total

    program = PROGRAMS[name](Path(directory))
    told = False

    def function(order: Any) -> Any:
        nonlocal told
        if not told:
            told = True
            print(json.dumps(time.monotonic_ns()), flush=True)
        if str(order["id"]) == wait_at:
            print(json.dumps("waits"), flush=True)
            time.sleep(3600)
        return total(order)

    if verb == "fill":
        program.fill([json.loads(line) for line in sys.stdin])
    elif verb == "results":
        print("\n".join(json.dumps(result) for result in program.results()))
    else:
        if verb == "first":
            program.fill(messages(1))
        program.run(function)
        if verb == "first":
            assert list(program.results()) == [total(messages(1)[0])], "another result"


# --- the contenders ---------------------------------------------------------------------------------


def contender(name: str, row: str, server: Any = None) -> Contender:
    """One of :data:`PROGRAMS` in one of the three rows; ``server`` runs while it does."""
    from contextlib import nullcontext

    from work import messages, must_be, total

    def spawn(room: Room, *arguments: str) -> Any:
        command = [sys.executable, __file__, name, str(room.path), *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ended(process: Any, text: str = "") -> str:
        output, _ = process.communicate(text, timeout=600)
        assert process.returncode == 0, f"its process ended with {process.returncode}"
        return str(output)

    def fill(room: Room, orders: list[Any]) -> None:
        ended(spawn(room, "fill"), "".join(json.dumps(order) + "\n" for order in orders))

    def timed(room: Room, verb: str) -> None:
        before = time.monotonic_ns()
        output = ended(spawn(room, verb))
        room.keep["figures"] = {"first_ms": (json.loads(output.splitlines()[0]) - before) / 1e6}

    @contextmanager
    def started(room: Room) -> Iterator[Work]:
        with server(room) if server else nullcontext():
            yield lambda: timed(room, "first")

    @contextmanager
    def restarted(room: Room) -> Iterator[Work]:
        orders, half = messages(room.count), room.count // 2
        with server(room) if server else nullcontext():
            if row == "restart-stop":
                fill(room, orders[:half])
                ended(spawn(room, "run"))
                fill(room, orders[half:])
            else:
                fill(room, orders)
                with spawn(room, "wait", str(half)) as first:
                    while json.loads(first.stdout.readline()) != "waits":
                        pass
                    first.kill()
            yield lambda: timed(room, "run")
            must_be(map(json.loads, ended(spawn(room, "results")).splitlines()), map(total, orders))

    return started if row == "start" else restarted


def rows(*names: str, server: Any = None, only: Iterable[str] = ("start", "restart-stop", "restart-kill")) -> Any:
    """The three rows of a module's ``CONTENDERS``."""
    return {row: {name: contender(name, row, server) for name in names} for row in only}


if __name__ == "__main__":
    main(*sys.argv[1:])
