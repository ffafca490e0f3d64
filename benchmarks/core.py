"""The speed of the core, compared with the same work written by hand on raw LMDB and on SQLite.

    python benchmarks/core.py                     every row, both durabilities, medians of 5 rounds
    python benchmarks/core.py --only pipeline     rows whose name begins so (repeatable)
    python benchmarks/core.py --scale 10          ten times the messages
    python benchmarks/core.py --quick             a few seconds, to see that everything still runs

Every contender takes dicts and returns dicts (msgpack). It survives ``kill -9`` at any instant with
"process", and power loss with "disk". Its results are compared with the expected ones. Cues
is used through its public names, with hash and metadata on. Graphs run in the threads of
``graph.start()``. The peers are written with care, without a layer in between:

    raw LMDB          one record a message; messages that belong together in one transaction
    raw LMDB, packed  as an expert writes it: a thousand messages a record, one msgpack array
    SQLite            the standard library's, in WAL mode

"process" is LMDB with ``sync=False`` and SQLite with ``synchronous=OFF``; "disk" syncs at every
commit. *Aged* rows run on stores from which messages were purged for a while: LMDB then keeps a
long list of free pages, and a small commit costs it up to twice as much. Lines marked "floor" are
not peers; they show the limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import lmdb
import msgpack
from harness import BOTH, Contender, Plus, Room, Row, Sample, Times, Work, print_json, print_lines, race
from work import BATCH, Message, batches, messages, must_be, total

import cues
import cues.engine.local  # so that the first round does not import it
from cues import Graph, QueueOptions, Sink, Source, Stream

KEEPS = QueueOptions(metadata=frozenset({"t", "time"}))
MAP_BYTES = 16 << 30


unpack = msgpack.unpackb


# --- Cues ---------------------------------------------------------------------------------------


def cues_age(store: cues.Store) -> None:
    """Purge for a while: remove nine tenths of one queue, and keep another, slower one in between."""
    passing, staying = store.queue("passing"), store.queue("staying")
    for batch in batches(messages(AGE)):
        passing.appender().write_many(batch)
        staying.appender().write_many(batch[: BATCH // 10])
    for index in range(BATCH, AGE * 9 // 10, BATCH):
        passing.purge(before=index)


@contextmanager
def cues_append_one(room: Room, aged: bool = False) -> Iterator[Work]:
    with cues.open(room.path, durability=room.durability) as store:
        queue = store.queue("orders", metadata={"t", "time"})
        if aged:
            cues_age(store)
        orders, write = messages(room.count), queue.appender().write

        def work() -> None:
            for message in orders:
                write(message)

        yield work
        must_be(queue.tailer(), orders)


@contextmanager
def cues_append_many(room: Room) -> Iterator[Work]:
    with cues.open(room.path, durability=room.durability) as store:
        queue = store.queue("orders", metadata={"t", "time"})
        orders, write_many = messages(room.count), queue.appender().write_many

        def work() -> None:
            for batch in batches(orders):
                write_many(batch)

        yield work
        must_be(queue.tailer(), orders)


@contextmanager
def cues_read(room: Room) -> Iterator[Work]:
    with cues.open(room.path, durability=room.durability) as store:
        queue = store.queue("orders", metadata={"t", "time"})
        for batch in batches(messages(room.count)):
            queue.appender().write_many(batch)
        kept: list[Message] = []

        def work() -> None:
            tailer = queue.tailer()
            while batch := tailer.read_many(BATCH):
                kept.extend(batch)

        yield work
        must_be(kept, messages(room.count))


@contextmanager
def cues_pipeline(room: Room, batch_size: int = BATCH, aged: bool = False) -> Iterator[Work]:
    with cues.open(room.path, durability=room.durability) as store:
        if aged:
            cues_age(store)
        stream = Stream(total, "orders", "totals", batch_size=batch_size)
        graph = Graph("bench", [Source("orders"), stream], store=store, queues={"*": KEEPS})
        orders = store.queue("orders", metadata={"t", "time"})
        for batch in batches(messages(room.count)):
            orders.appender().write_many(batch)

        def work() -> None:
            with graph.start() as running:
                running.wait_idle()

        yield work
        must_be(store.queue("totals").tailer(), map(total, messages(room.count)))


@contextmanager
def cues_stress(room: Room) -> Iterator[Work]:
    seen: dict[str, int] = {"even": 0, "odd": 0}

    def count_even(even: Message) -> None:
        seen["even"] += even["sum"]

    def count_odd(odd: Message) -> None:
        seen["odd"] += odd["sum"]

    def numbers(position: int | None) -> Iterator[tuple[int, Message]]:
        for number in range(position or 0, room.count):
            yield number + 1, {"x": number}

    graph = Graph(
        "stress",
        [
            Source("left", numbers),
            Source("right", numbers),
            Stream(stress_split, {"left": "left", "right": "right"}, {"even": "even", "odd": "odd"}),
            Sink(count_even, "even"),
            Sink(count_odd, "odd"),
        ],
        store=room.path,
        durability=room.durability,
        queues={"*": KEEPS},
    )

    def work() -> None:
        with graph.start() as running:
            running.wait_done()

    yield work
    assert seen == stress_sums(room.count), seen


def stress_split(left: Message, right: Message) -> dict[str, Message]:
    both = left["x"] + right["x"]
    return {"even": {"sum": both}, "odd": {"sum": both + 1}}


def stress_sums(count: int) -> dict[str, int]:
    even = count * (count - 1)
    return {"even": even, "odd": even + count}


# --- raw LMDB: one record a message ---------------------------------------------------------------


def raw_env(room: Room, writemap: bool = False) -> Any:
    return lmdb.open(
        str(room.path),
        map_size=MAP_BYTES,
        max_dbs=16,
        sync=room.syncs,
        metasync=room.syncs,
        writemap=writemap,
        lib_version=0,
    )


def key(index: int) -> bytes:
    return index.to_bytes(8, "big")


def raw_age(env: Any) -> None:
    """Age the database as :func:`cues_age` ages a store."""
    pack = msgpack.Packer().pack
    passing, staying = env.open_db(b"passing"), env.open_db(b"staying")
    for batch in batches(messages(AGE)):
        items = [(key(message["id"]), pack(message)) for message in batch]
        with env.begin(write=True) as txn:
            txn.cursor(passing).putmulti(items, append=True)
            txn.cursor(staying).putmulti(items[: BATCH // 10], append=True)
    for index in range(BATCH, AGE * 9 // 10, BATCH):
        with env.begin(write=True) as txn:
            cursor = txn.cursor(passing)
            cursor.first()
            while cursor.key() < key(index):
                cursor.delete()


@contextmanager
def raw_append_one(room: Room, packs: bool = True, writemap: bool = False, aged: bool = False) -> Iterator[Work]:
    """Without ``packs`` the messages are bytes already: REF of the design, less work than that of Cues."""
    with closing(raw_env(room, writemap)) as env:
        if aged:
            raw_age(env)
        database, orders = env.open_db(b"orders"), messages(room.count)
        pack = msgpack.Packer().pack
        ready: list[Any] = orders if packs else [pack(message) for message in orders]

        def work() -> None:
            for index, message in enumerate(ready, 1):
                with env.begin(db=database, write=True) as txn:
                    txn.put(key(index), pack(message) if packs else message, append=True)

        yield work
        must_be(raw_messages(env, database), orders)


@contextmanager
def raw_append_many(room: Room) -> Iterator[Work]:
    with closing(raw_env(room)) as env:
        database, orders, pack = env.open_db(b"orders"), messages(room.count), msgpack.Packer().pack

        def work() -> None:
            index = 1
            for batch in batches(orders):
                with env.begin(db=database, write=True) as txn:
                    txn.cursor().putmulti([(key(i), pack(m)) for i, m in enumerate(batch, index)], append=True)
                index += len(batch)

        yield work
        must_be(raw_messages(env, database), orders)


@contextmanager
def raw_read(room: Room) -> Iterator[Work]:
    with closing(raw_env(room)) as env:
        orders = raw_fill(env, messages(room.count))
        kept: list[Message] = []

        def work() -> None:
            for _, values in raw_batches(env, orders):
                kept.extend([unpack(value) for value in values])

        yield work
        must_be(kept, messages(room.count))


@contextmanager
def raw_pipeline(room: Room) -> Iterator[Work]:
    """A thousand messages a transaction, with the position."""
    with closing(raw_env(room)) as env:
        orders, totals = raw_fill(env, messages(room.count)), env.open_db(b"totals")
        pack = msgpack.Packer().pack

        def work() -> None:
            for position, values in raw_batches(env, orders):
                results = [(key(i), pack(total(unpack(value)))) for i, value in enumerate(values, position)]
                with env.begin(write=True) as txn:
                    txn.cursor(totals).putmulti(results, append=True)
                    txn.put(b"position", key(position + len(values)))

        yield work
        must_be(raw_messages(env, totals), map(total, messages(room.count)))


@contextmanager
def raw_pipeline_one(room: Room, writemap: bool = False, aged: bool = False) -> Iterator[Work]:
    """A message a transaction, with the position; reads a thousand ahead."""
    with closing(raw_env(room, writemap)) as env:
        if aged:
            raw_age(env)
        orders, totals = raw_fill(env, messages(room.count)), env.open_db(b"totals")
        pack = msgpack.Packer().pack

        def work() -> None:
            for first, values in raw_batches(env, orders):
                for position, value in enumerate(values, first):
                    result = pack(total(unpack(value)))
                    with env.begin(write=True) as txn:
                        txn.put(key(position), result, append=True, db=totals)
                        txn.put(b"position", key(position + 1))

        yield work
        must_be(raw_messages(env, totals), map(total, messages(room.count)))


def raw_fill(env: Any, messages: list[Message]) -> Any:
    orders, pack = env.open_db(b"orders"), msgpack.Packer().pack
    with env.begin(db=orders, write=True) as txn:
        txn.cursor().putmulti([(key(i), pack(m)) for i, m in enumerate(messages, 1)], append=True)
    return orders


def raw_batches(env: Any, database: Any) -> Iterator[tuple[int, list[bytes]]]:
    """The values of a database, a thousand in a transaction, with the index of the first one."""
    position = 1
    while True:
        with env.begin(db=database) as txn:
            cursor = txn.cursor()
            if not cursor.set_key(key(position)):
                return
            values = list(itertools.islice(cursor.iternext(keys=False), BATCH))
        yield position, values
        position += len(values)


def raw_messages(env: Any, database: Any) -> Iterator[Message]:
    with env.begin(db=database) as txn:
        for value in txn.cursor().iternext(keys=False):
            yield unpack(value)


# --- raw LMDB, packed: a thousand messages a record -----------------------------------------------


@contextmanager
def packed_pipeline(room: Room) -> Iterator[Work]:
    with closing(raw_env(room)) as env:
        orders, totals = env.open_db(b"orders"), env.open_db(b"totals")
        pack = msgpack.Packer().pack
        with env.begin(db=orders, write=True) as txn:
            for index, batch in enumerate(batches(messages(room.count))):
                txn.put(key(1 + index * BATCH), pack(batch), append=True)

        def work() -> None:
            position = 1
            while True:
                with env.begin(db=orders) as txn:
                    value = txn.get(key(position))
                if value is None:
                    return
                results = [total(order) for order in unpack(value)]
                packed = pack(results)
                with env.begin(write=True) as txn:
                    txn.put(key(position), packed, append=True, db=totals)
                    position += len(results)
                    txn.put(b"position", key(position))

        yield work
        results = itertools.chain.from_iterable(raw_messages(env, totals))
        must_be(results, map(total, messages(room.count)))


@contextmanager
def packed_stress(room: Room) -> Iterator[Work]:
    """The shape of :func:`cues_stress`, stage by stage in one loop; a transaction a stage and batch."""
    with closing(raw_env(room)) as env:
        left, right, even, odd = (env.open_db(name) for name in (b"left", b"right", b"even", b"odd"))
        pack = msgpack.Packer().pack
        seen = {"even": 0, "odd": 0}

        def source(database: Any, name: bytes, position: int) -> None:
            packed = pack([{"x": number} for number in range(position, min(position + BATCH, room.count))])
            with env.begin(write=True) as txn:
                txn.put(key(position), packed, append=True, db=database)
                txn.put(name, key(position + BATCH))

        def join(position: int) -> None:
            with env.begin() as txn:
                lefts, rights = unpack(txn.get(key(position), db=left)), unpack(txn.get(key(position), db=right))
            results = [stress_split(one, other) for one, other in zip(lefts, rights)]
            evens, odds = pack([r["even"] for r in results]), pack([r["odd"] for r in results])
            with env.begin(write=True) as txn:
                txn.put(key(position), evens, append=True, db=even)
                txn.put(key(position), odds, append=True, db=odd)
                txn.put(b"join-left", key(position + BATCH))
                txn.put(b"join-right", key(position + BATCH))

        def sink(database: Any, name: str, position: int) -> None:
            with env.begin(db=database) as txn:
                sums = unpack(txn.get(key(position)))
            for message in sums:
                seen[name] += message["sum"]
            with env.begin(write=True) as txn:
                txn.put(name.encode() + b"-sink", key(position + BATCH))

        def work() -> None:
            for position in range(0, room.count, BATCH):
                source(left, b"left-source", position)
                source(right, b"right-source", position)
                join(position)
                sink(even, "even", position)
                sink(odd, "odd", position)

        yield work
        assert seen == stress_sums(room.count), seen


# --- SQLite ---------------------------------------------------------------------------------------


@contextmanager
def sqlite_pipeline(room: Room, batch: int = BATCH) -> Iterator[Work]:
    """``batch`` messages a transaction, with the position."""
    with closing(sqlite3.connect(room.path / "queues.db", isolation_level=None)) as db:
        pack = msgpack.Packer().pack
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={'FULL' if room.syncs else 'OFF'}")
        for table in ("orders", "totals"):
            db.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, body BLOB)")
        db.execute("CREATE TABLE position (id INTEGER)")
        db.execute("INSERT INTO position VALUES (0)")
        db.execute("BEGIN")
        db.executemany("INSERT INTO orders (body) VALUES (?)", ((pack(m),) for m in messages(room.count)))
        db.execute("COMMIT")

        def work() -> None:
            position = 0
            while rows := db.execute(
                "SELECT id, body FROM orders WHERE id > ? ORDER BY id LIMIT ?", (position, BATCH)
            ).fetchall():
                for at in range(0, len(rows), batch):
                    results = [(pack(total(unpack(body))),) for _, body in rows[at : at + batch]]
                    position += len(results)
                    db.execute("BEGIN")
                    db.executemany("INSERT INTO totals (body) VALUES (?)", results)
                    db.execute("UPDATE position SET id = ?", (position,))
                    db.execute("COMMIT")

        yield work
        rows = db.execute("SELECT body FROM totals ORDER BY id")
        must_be((unpack(body) for (body,) in rows), map(total, messages(room.count)))


# --- other processes ------------------------------------------------------------------------------


class Child:
    """A process of children.py, which answers in lines of JSON."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.spawned_ns = time.monotonic_ns()
        script = str(Path(__file__).with_name("children.py"))
        command = [sys.executable, script, name, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()} before it answered")
        return json.loads(line)  # type: ignore[no-any-return]

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process, so that it closes nothing."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


IDLE_S = 0.001
"""Between two messages of a hop, so that the reader is asleep when the next one comes."""


def hops(room: Room, reader: str, write: Any) -> Sample:
    """Send one message at a time to a reader in another process; return the median and the 99th percentile in µs."""
    with Child(reader, room.path, room.count) as child:
        child.answer()
        for number in range(room.count):
            time.sleep(IDLE_S)
            write({"id": number, "sent": time.monotonic_ns()})
        took = sorted(child.answer()["took"])
    return Sample(took[len(took) // 2] / 1000, took[len(took) * 99 // 100] / 1000)


@contextmanager
def cues_hop(room: Room) -> Iterator[Work]:
    with cues.open(room.path, durability=room.durability) as store:
        write = store.queue("hops", metadata={"t", "time"}).appender().write
        yield lambda: hops(room, "hop_cues", write)


@contextmanager
def lmdb_hop(room: Room) -> Iterator[Work]:
    """A record in LMDB, and a byte in a FIFO that wakes the reader."""
    with closing(raw_env(room)) as env, closing(Fifo(room.path / "fifo")) as fifo:
        pack = msgpack.Packer().pack

        def write(message: Message) -> None:
            with env.begin(write=True) as txn:
                txn.put(key(message["id"]), pack(message), append=True)
            fifo.write(b"\1")

        yield lambda: hops(room, "hop_lmdb", write)


@contextmanager
def fifo_hop(room: Room) -> Iterator[Work]:
    """The message itself through a FIFO: the cost of waking. Nothing survives a crash."""
    with closing(Fifo(room.path / "fifo")) as fifo:
        pack = msgpack.Packer().pack
        yield lambda: hops(room, "hop_fifo", lambda message: fifo.write(pack(message)))


class Fifo:
    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR)

    def write(self, data: bytes) -> None:
        os.write(self._fd, data)

    def close(self) -> None:
        os.close(self._fd)


def restart_prepare(room: Room) -> None:
    """A queue full of messages, and a graph that was killed while it worked on them."""
    with cues.open(room.shared, durability=room.durability) as store:
        write_many = store.queue("in", metadata={"t", "time"}).appender().write_many
        for start in range(0, room.count, 10_000):
            write_many([{"id": i} for i in range(start, min(start + 10_000, room.count))])
    with Child("start_graph", room.shared) as child:
        child.answer()


@contextmanager
def cues_restart(room: Room) -> Iterator[Work]:
    """From the spawn to the first message in the function, after a ``kill -9``."""
    yield lambda: start(Child("start_graph", room.shared))


@contextmanager
def import_only(room: Room) -> Iterator[Work]:
    yield lambda: start(Child("start_import"))


def start(child: Child) -> Sample:
    with child:
        answer = child.answer()
    return Sample((answer["at"] - child.spawned_ns) / 1e6, answer["anon_mb"])


@contextmanager
def cues_command(room: Room, *arguments: str) -> Iterator[Work]:
    """A command as a user gives it, from its spawn to its end."""

    def work() -> Sample:
        command = [sys.executable, "-m", "cues", *(argument.format(store=room.shared) for argument in arguments)]
        spawned = time.monotonic_ns()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            output = child.stdout.read()
            _, status, used = os.wait4(child.pid, 0)
            took = time.monotonic_ns() - spawned
            child.returncode = os.waitstatus_to_exitcode(status)
        assert output and child.returncode == 0, command
        return Sample(took / 1e6, (used.ru_utime + used.ru_stime) * 1e3)

    yield work


@contextmanager
def cues_memory(room: Room, part: int = 1) -> Iterator[Work]:
    def work() -> Sample:
        with Child("memory_graph", room.path, room.count // part, room.durability) as child:
            answer = child.answer()
        return Sample(answer["anon_mb"], answer["rss_mb"])

    yield work


# --- rows -----------------------------------------------------------------------------------------

AGE = 300_000
"""Messages that are appended before an aged row, and mostly purged: enough for a list of thousands of free pages."""


def of(contender: Any, *arguments: str, **options: Any) -> Contender:
    """A contender in one of its forms."""

    def form(room: Room) -> AbstractContextManager[Work]:
        return contender(room, *arguments, **options)  # type: ignore[no-any-return]

    return form


ROWS = [
    Row(
        "append-one",
        "one append, one transaction",
        {
            "Cues": cues_append_one,
            "raw LMDB, bytes (REF)": of(raw_append_one, packs=False),
            "raw LMDB, pack": raw_append_one,
            "floor: raw LMDB, pack, writemap": of(raw_append_one, writemap=True),
        },
        {"process": 50_000, "disk": 1_000},
        {"raw LMDB, bytes (REF)": Times(0.65)},
        aims=("process",),
    ),
    Row(
        "append-one-aged",
        "the same on a store that has been purging",
        {
            "Cues": of(cues_append_one, aged=True),
            "raw LMDB, bytes (REF)": of(raw_append_one, packs=False, aged=True),
            "raw LMDB, pack": of(raw_append_one, aged=True),
            "floor: raw LMDB, pack, writemap": of(raw_append_one, writemap=True, aged=True),
        },
        {"process": 50_000},
        {"raw LMDB, bytes (REF)": Times(0.65)},
    ),
    Row(
        "append-many",
        "1,000 in one transaction",
        {"Cues": cues_append_many, "raw LMDB, pack each + putmulti": raw_append_many},
        {"process": 200_000, "disk": 50_000},
        {"raw LMDB, pack each + putmulti": Times(0.8)},
    ),
    Row(
        "read",
        "read and decode, 1,000 at a time",
        {"Cues": cues_read, "raw LMDB, iterate + unpack each": raw_read},
        {"process": 200_000, "disk": 200_000},
        {"raw LMDB, iterate + unpack each": Times(0.8)},
    ),
    Row(
        "pipeline",
        "queue → function → queue, batches of what is there, at most 1,000",
        {
            "Cues": cues_pipeline,
            "raw LMDB": raw_pipeline,
            "raw LMDB, packed": packed_pipeline,
            "SQLite": sqlite_pipeline,
        },
        {"process": 200_000, "disk": 200_000},
        {"raw LMDB": Times(0.65), "raw LMDB, packed": Times(1.3), "SQLite": Times(0.4)},
    ),
    Row(
        "step-one",
        "queue → function → queue, a commit per message",
        {
            "Cues": of(cues_pipeline, batch_size=1),
            "raw LMDB": raw_pipeline_one,
            "SQLite": of(sqlite_pipeline, batch=1),
            "floor: raw LMDB, writemap": of(raw_pipeline_one, writemap=True),
        },
        {"process": 20_000, "disk": 1_000},
        {"raw LMDB": Times(0.8)},
        aims=("process",),
    ),
    Row(
        "step-one-aged",
        "the same on a store that has been purging",
        {
            "Cues": of(cues_pipeline, batch_size=1, aged=True),
            "raw LMDB": of(raw_pipeline_one, aged=True),
            "floor: raw LMDB, writemap": of(raw_pipeline_one, writemap=True, aged=True),
        },
        {"process": 20_000},
        {"raw LMDB": Times(0.8)},
    ),
    Row(
        "stress",
        "two sources, join, fork to two queues, two sinks; messages of one source"
        " (the Clojure original published 29.9 s for 1,000,000, on its machine)",
        {"Cues": cues_stress, "raw LMDB, packed": packed_stress},
        {"process": 100_000, "disk": 100_000},
        {"raw LMDB, packed": Times(1.5)},
    ),
    Row(
        "hop",
        "one message to a reader that sleeps in another process",
        {"Cues": cues_hop, "raw LMDB + FIFO": lmdb_hop, "floor: FIFO alone": fifo_hop},
        {"process": 1_000, "disk": 1_000},
        {"raw LMDB + FIFO": Times(1.3)},
        columns=("p50 µs", "p99 µs"),
    ),
    Row(
        "restart",
        "spawn to the first message, after a kill -9, with so many messages on the queue",
        {"Cues": cues_restart, "import alone": import_only},
        {"process": 1_000_000, "disk": 1_000_000},
        {"import alone": Plus(20)},
        columns=("ms", "own MB"),
        prepare=restart_prepare,
        count_min=20_000,
    ),
    Row(
        "look",
        "a command, spawn to end, on a store with so many messages after a kill -9",
        {
            "Cues: cues status": of(cues_command, "status", "{store}"),
            "cues tail": of(cues_command, "tail", "{store}#in"),
            "its help alone": of(cues_command, "status", "--help"),
        },
        {"process": 1_000_000, "disk": 1_000_000},
        {"its help alone": Plus(100)},
        columns=("ms", "CPU ms"),
        prepare=restart_prepare,
        count_min=20_000,
    ),
    Row(
        "memory",
        "most memory while messages pass through source, stream and sink",
        {"Cues": cues_memory, "Cues, a tenth of the messages": of(cues_memory, part=10)},
        {"process": 500_000, "disk": 500_000},
        {"Cues, a tenth of the messages": Times(1.1)},
        columns=("own MB", "RSS MB"),
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="ROW", help="rows whose name begins so (repeatable)")
    parser.add_argument("--durability", choices=BOTH, help="one of the two classes (default: both)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of every row; medians are printed (default: 5)")
    parser.add_argument("--scale", type=float, default=1.0, help="times the messages of every row (default: 1)")
    parser.add_argument("--quick", action="store_true", help="one small round of everything, to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object a contender and row")
    parser.add_argument("--dir", type=Path, help="where the stores are made (default: the temporary directory)")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    options = parser.parse_args()
    if options.list:
        print("\n".join(row.name for row in ROWS))
        return
    rounds, scale = options.rounds, options.scale
    if options.quick:
        global AGE
        rounds, scale, AGE = 1, 0.001, 3_000
    chosen = [row for row in ROWS if not options.only or row.name.startswith(tuple(options.only))]
    if not chosen:
        parser.error(f"no row of that name; there are {', '.join(row.name for row in ROWS)}")
    for row in chosen:
        for durability in BOTH:
            if durability in row.counts and options.durability in (None, durability):
                lines = race(row, durability, rounds, scale, options.dir)
                if options.json:
                    for line in lines:
                        print_json(line, sys.stdout)
                else:
                    print_lines(row, lines, sys.stdout)


if __name__ == "__main__":
    main()
