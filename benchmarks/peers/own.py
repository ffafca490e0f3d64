"""Rows that core.py does not have, by Cues and by hand: state by key, windows, latency at a given rate, growth."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgpack
from core import KEEPS, key, raw_batches, raw_env, raw_fill, raw_messages, unpack
from harness import Contender, Room, Work
from starts import rows as starts_of
from work import EVENTS_S, WINDOW_S, batches, messages, minutes, must_be, running_totals, total

import cues
import cues.engine.local
from cues import Graph, Sink, Source, Stream
from cues.processors import windows
from cues.processors.reducers import count

# --- keyed: the number and sum of the orders of each symbol so far ----------------------------------


@contextmanager
def cues_keyed(room: Room) -> Iterator[Work]:
    def add(order: Any, process: Any) -> Any:
        state = process.state
        state["count"] = state.get("count", 0) + 1
        state["sum"] = state.get("sum", 0) + order["size"]
        return {"id": order["id"], "symbol": order["symbol"], "count": state["count"], "sum": state["sum"]}

    with passed(room, Stream(add, "orders", "sums", key="symbol")) as (store, work):
        yield work
        must_be(store.queue("sums").tailer(), running_totals(messages(room.count)))


@contextmanager
def raw_keyed(room: Room) -> Iterator[Work]:
    """A thousand messages a transaction, with the position and the states that changed."""
    with closing(raw_env(room)) as env:
        orders, sums, states = raw_fill(env, messages(room.count)), env.open_db(b"sums"), env.open_db(b"states")
        pack = msgpack.Packer().pack

        def work() -> None:
            for position, values in raw_batches(env, orders):
                changed: dict[str, list[int]] = {}
                with env.begin(write=True) as txn:
                    results = []
                    for index, value in enumerate(values, position):
                        order = unpack(value)
                        symbol = order["symbol"]
                        if symbol not in changed:
                            kept = txn.get(symbol.encode(), db=states)
                            changed[symbol] = unpack(kept) if kept else [0, 0]
                        state = changed[symbol]
                        state[0] += 1
                        state[1] += order["size"]
                        line = {"id": order["id"], "symbol": symbol, "count": state[0], "sum": state[1]}
                        results.append((key(index), pack(line)))
                    txn.cursor(sums).putmulti(results, append=True)
                    for symbol, state in changed.items():
                        txn.put(symbol.encode(), pack(state), db=states)
                    txn.put(b"position", key(position + len(values)))

        yield work
        must_be(raw_messages(env, sums), running_totals(messages(room.count)))


@contextmanager
def sqlite_keyed(room: Room) -> Iterator[Work]:
    with closing(sqlite3.connect(room.path / "queues.db", isolation_level=None)) as db:
        pack = msgpack.Packer().pack
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={'FULL' if room.syncs else 'OFF'}")
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, body BLOB)")
        db.execute("CREATE TABLE sums (id INTEGER PRIMARY KEY, body BLOB)")
        db.execute("CREATE TABLE states (symbol TEXT PRIMARY KEY, count INTEGER, sum INTEGER) WITHOUT ROWID")
        db.execute("CREATE TABLE position (id INTEGER)")
        db.execute("INSERT INTO position VALUES (0)")
        db.execute("BEGIN")
        db.executemany("INSERT INTO orders (body) VALUES (?)", ((pack(m),) for m in messages(room.count)))
        db.execute("COMMIT")

        def work() -> None:
            position = 0
            query = "SELECT body FROM orders WHERE id > ? ORDER BY id LIMIT 1000"
            while rows := db.execute(query, (position,)).fetchall():
                changed: dict[str, list[Any]] = {}
                results = []
                db.execute("BEGIN")
                for (body,) in rows:
                    order = unpack(body)
                    symbol = order["symbol"]
                    if symbol not in changed:
                        kept = db.execute("SELECT count, sum FROM states WHERE symbol = ?", (symbol,)).fetchone()
                        changed[symbol] = list(kept or (0, 0))
                    state = changed[symbol]
                    state[0] += 1
                    state[1] += order["size"]
                    results.append((pack({"id": order["id"], "symbol": symbol, "count": state[0], "sum": state[1]}),))
                db.executemany("INSERT INTO sums (body) VALUES (?)", results)
                db.executemany("INSERT OR REPLACE INTO states VALUES (?, ?, ?)", ((s, *v) for s, v in changed.items()))
                position += len(rows)
                db.execute("UPDATE position SET id = ?", (position,))
                db.execute("COMMIT")

        yield work
        rows = db.execute("SELECT body FROM sums ORDER BY id")
        must_be((unpack(body) for (body,) in rows), running_totals(messages(room.count)))


@contextmanager
def passed(room: Room, *processors: Any) -> Iterator[tuple[cues.Store, Work]]:
    """A store with the orders on a queue, and the work of passing them through ``processors``."""
    with cues.open(room.path, durability=room.durability) as store:
        graph = Graph("bench", [Source("orders"), *processors], store=store, queues={"*": KEEPS})
        for batch in batches(messages(room.count)):
            store.queue("orders", metadata={"t", "time"}).appender().write_many(batch)

        def work() -> None:
            with graph.start() as running:
                running.wait_idle()

        yield store, work


# --- window: the messages of each symbol in each minute of event time -------------------------------


@contextmanager
def cues_window(room: Room) -> Iterator[Work]:
    counting = windows.tumbling(
        "orders",
        "minutes",
        f"{WINDOW_S}s",
        time=lambda order: order["id"] / EVENTS_S,
        key="symbol",
        reduce={"count": count()},
        delay="10s",
        late="late",
    )
    with passed(room, counting) as (store, work):

        def closing_work() -> None:
            store.queue("orders").appender().write(windows.watermark(None))
            work()

        yield closing_work
        counts: Counter[tuple[str, int]] = Counter()
        for line in store.queue("minutes").tailer():
            counts[line["symbol"], int(line["start"].timestamp()) // WINDOW_S] += line["count"]
        assert counts == minutes(messages(room.count)), "other counts"


# --- growth: the same work on a queue that has many messages already --------------------------------


def grown(have: int) -> Contender:
    """Append and pass ``room.count`` messages on queues of ``have`` messages."""

    @contextmanager
    def contender(room: Room) -> Iterator[Work]:
        with cues.open(room.path, durability=room.durability) as store:
            graph = Graph(
                "bench", [Source("orders"), Stream(total, "orders", "totals")], store=store, queues={"*": KEEPS}
            )
            orders = store.queue("orders", metadata={"t", "time"}).appender()
            filling = messages(10_000)
            for _ in range(have // len(filling)):
                orders.write_many(filling)
            with graph.start() as running:
                running.wait_idle()
            last = store.queue("totals").last_index or 0

            def work() -> None:
                with graph.start() as running:
                    for batch in batches(messages(room.count)):
                        orders.write_many(batch)
                    running.wait_idle()

            yield work
            tailer = store.queue("totals").tailer()
            tailer.to_index(last + 1)
            must_be(tailer, map(total, messages(room.count)))

    return contender


# --- latency: from the time at which a message should be sent to the end of a pipeline ----------------


def paced(rate: int, count: int, send: Callable[[list[Any]], None]) -> None:
    """Send ``count`` messages, ``rate`` a second; those that are due at once are one batch.

    A sender that is late does not send later: a message's time is that at which it was due.
    """
    start = time.monotonic_ns()
    gap = 1_000_000_000 // rate
    sent = 0
    while sent < count:
        due = min(count, (time.monotonic_ns() - start) // gap + 1)
        if due > sent:
            send([{"id": n, "due": start + n * gap} for n in range(sent, due)])
            sent = due
        else:
            time.sleep(max(0.0, (start + sent * gap - time.monotonic_ns()) / 1e9))


def percentiles(room: Room, took: list[int]) -> None:
    took.sort()
    points = {"p50_us": 0.5, "p99_us": 0.99, "p99.9_us": 0.999}
    room.keep["figures"] = {name: took[int(len(took) * share)] / 1000 for name, share in points.items()}


def cues_latency(rate: int) -> Contender:
    @contextmanager
    def contender(room: Room) -> Iterator[Work]:
        took: list[int] = []
        ids: list[int] = []

        def end(batch: list[Any]) -> None:
            now = time.monotonic_ns()
            took.extend([now - message["due"] for message in batch])
            ids.extend([message["id"] for message in batch])

        with cues.open(room.path, durability=room.durability) as store:
            copy = Stream(lambda message: message, "in", "out", id="copy")
            graph = Graph("bench", [Source("in"), copy, Sink(end, "out", batch=True)], store=store, queues={"*": KEEPS})
            write = store.queue("in", metadata={"t", "time"}).appender().write_many

            def work() -> None:
                with graph.start() as running:
                    paced(rate, room.count, write)
                    running.wait_idle()
                percentiles(room, took)

            yield work
        must_be(ids, range(room.count))

    return contender


def raw_latency(rate: int) -> Contender:
    """The same by hand: two threads with an event each, one environment."""

    @contextmanager
    def contender(room: Room) -> Iterator[Work]:
        took: list[int] = []
        ids: list[int] = []
        with closing(raw_env(room)) as env:
            orders, totals = env.open_db(b"in"), env.open_db(b"out")
            pack = msgpack.Packer().pack
            rung = {"in": threading.Event(), "out": threading.Event()}

            def write(sent: list[Any]) -> None:
                with env.begin(write=True) as txn:
                    txn.cursor(orders).putmulti([(key(m["id"] + 1), pack(m)) for m in sent], append=True)
                rung["in"].set()

            def copy() -> None:
                done = 0
                pack = msgpack.Packer().pack
                while done < room.count:
                    rung["in"].wait()
                    rung["in"].clear()
                    for position, values in raw_batches_from(env, orders, done + 1):
                        with env.begin(write=True) as txn:
                            rows = [(key(i), pack(unpack(v))) for i, v in enumerate(values, position)]
                            txn.cursor(totals).putmulti(rows, append=True)
                            done = position + len(values) - 1
                            txn.put(b"copy", key(done))
                        rung["out"].set()

            def end() -> None:
                done = 0
                while done < room.count:
                    rung["out"].wait()
                    rung["out"].clear()
                    for position, values in raw_batches_from(env, totals, done + 1):
                        batch = [unpack(value) for value in values]
                        now = time.monotonic_ns()
                        took.extend([now - message["due"] for message in batch])
                        ids.extend([message["id"] for message in batch])
                        done = position + len(values) - 1
                        with env.begin(write=True) as txn:
                            txn.put(b"end", key(done))

            def work() -> None:
                threads = [threading.Thread(target=target) for target in (copy, end)]
                for thread in threads:
                    thread.start()
                paced(rate, room.count, write)
                for thread in threads:
                    thread.join()
                percentiles(room, took)

            yield work
        must_be(ids, range(room.count))

    return contender


def raw_batches_from(env: Any, database: Any, position: int) -> Iterator[tuple[int, list[bytes]]]:
    while True:
        with env.begin(db=database) as txn:
            cursor = txn.cursor()
            if not cursor.set_key(key(position)):
                return
            values = [value for _, value in zip(range(1000), cursor.iternext(keys=False))]
        yield position, values
        position += len(values)


CONTENDERS = {
    "keyed": {"Cues": cues_keyed, "raw LMDB": raw_keyed, "SQLite": sqlite_keyed},
    "window": {"Cues": cues_window},
    "latency-1000": {"Cues": cues_latency(1_000), "raw LMDB, threads": raw_latency(1_000)},
    "latency-50000": {"Cues": cues_latency(50_000), "raw LMDB, threads": raw_latency(50_000)},
    "growth": {f"Cues, {have:,} on the queue": grown(have) for have in (10_000, 1_000_000, 10_000_000, 100_000_000)},
    **starts_of("Cues", "raw LMDB", "SQLite"),
    "start": starts_of("Cues", "raw LMDB", "SQLite", "floor: Python")["start"],
}
