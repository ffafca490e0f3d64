"""Transactions over several queues, and a consumer of many sources: ``cues.txn``, and the same by hand."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgpack
from core import key, raw_env, raw_messages, raw_pipeline, sqlite_pipeline, unpack
from harness import Contender, Room, Work
from work import QUEUES, batches, each_queue, messages, must_be, total, transactions

import cues
from cues.checkpoints import JSONFileCheckpoint
from cues.txn import Consumer, Envelope, Publisher

# --- transactions-append: ten messages, to three queues, or to none of them ---------------------------


@contextmanager
def cues_append(room: Room) -> Iterator[Work]:
    with cues.open(room.path, durability=room.durability) as store:
        queues = [store.queue(name) for name in QUEUES]

        def work() -> None:
            with Publisher() as publisher:
                for batch in transactions(room.count):
                    for message in batch:
                        publisher.publish_uncommitted(lambda message: queues[message["id"] % len(queues)], message)
                    publisher.append_ack_intents(publisher.build_ack_intents())

        yield work
        for queue, expected in zip(queues, each_queue(room.count)):
            must_be(queue.tailer(isolation="committed"), expected)


@contextmanager
def raw_append(room: Room) -> Iterator[Work]:
    with closing(raw_env(room)) as env:
        databases = [env.open_db(name.encode()) for name in QUEUES]
        pack = msgpack.Packer().pack

        def work() -> None:
            for batch in transactions(room.count):
                with env.begin(write=True) as txn:
                    for message in batch:
                        database = databases[message["id"] % len(databases)]
                        txn.put(key(message["id"] + 1), pack(message), append=True, db=database)

        yield work
        for database, expected in zip(databases, each_queue(room.count)):
            must_be(raw_messages(env, database), expected)


@contextmanager
def sqlite_append(room: Room) -> Iterator[Work]:
    with closing(sqlite3.connect(room.path / "queues.db", isolation_level=None)) as db:
        pack = msgpack.Packer().pack
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={'FULL' if room.syncs else 'OFF'}")
        for name in QUEUES:
            db.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, body BLOB)")
        inserts = [f"INSERT INTO {name} (body) VALUES (?)" for name in QUEUES]

        def work() -> None:
            for batch in transactions(room.count):
                db.execute("BEGIN")
                for message in batch:
                    db.execute(inserts[message["id"] % len(inserts)], (pack(message),))
                db.execute("COMMIT")

        yield work
        for name, expected in zip(QUEUES, each_queue(room.count)):
            must_be((unpack(body) for (body,) in db.execute(f"SELECT body FROM {name} ORDER BY id")), expected)


# --- transactions-process: read, process and write, exactly once --------------------------------------


class Totals:
    """An application that publishes a total for each order."""

    def __init__(self, queue: Any) -> None:
        self.choose = lambda message: queue

    def consume(self, envelope: Envelope, publisher: Publisher) -> None:
        publisher.publish_uncommitted(self.choose, total(envelope.message))

    def finalize(self, publisher: Publisher) -> None:
        return None


@contextmanager
def cues_process(room: Room) -> Iterator[Work]:
    with cues.open(room.path / "store", durability=room.durability) as store:
        orders, totals = store.queue("orders"), store.queue("totals")
        for batch in batches(messages(room.count)):
            orders.appender().write_many(batch)

        def work() -> None:
            with Consumer(Totals(totals), [orders], JSONFileCheckpoint(room.path / "checkpoint.json")) as consumer:
                consumer.drain()

        yield work
        must_be(totals.tailer(isolation="committed"), map(total, messages(room.count)))


# --- sources: a consumer of many queues, of which one has messages ------------------------------------


class Kept:
    """An application that keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def consume(self, envelope: Envelope, publisher: Publisher) -> None:
        self.messages.append(envelope.message)

    def finalize(self, publisher: Publisher) -> None:
        return None


def sources(number: int) -> Contender:
    @contextmanager
    def contender(room: Room) -> Iterator[Work]:
        with cues.open(room.path / "store", durability=room.durability) as store:
            queues = [store.queue(f"source-{n}") for n in range(number)]
            for batch in batches(messages(room.count)):
                queues[0].appender().write_many(batch)
            app = Kept()

            def work() -> None:
                with Consumer(app, queues, JSONFileCheckpoint(room.path / "checkpoint.json")) as consumer:
                    consumer.drain()

            yield work
            must_be(app.messages, messages(room.count))

    return contender


CONTENDERS = {
    "transactions-append": {"Cues": cues_append, "raw LMDB": raw_append, "SQLite": sqlite_append},
    "transactions-process": {"Cues": cues_process, "raw LMDB": raw_pipeline, "SQLite": sqlite_pipeline},
    "sources": {"Cues, one source": sources(1), "Cues, 64 sources, one busy": sources(64)},
}
