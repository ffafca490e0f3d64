"""The other processes of a soak: ``python -m soak.roles ROLE PLACE SEED RATE``. Each continues after any death."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import cues
from cues.groups import TRY_ABORT, TRY_COMMIT, Member
from cues.txn import AckIntent, Publisher

from . import model
from .model import Place

LEASE_S = 1.0
GROUP = "readers"
SPARK_S = 60
"""Spark reads the messages of the last minute."""
quitting = False


def quit(*_: object) -> None:
    global quitting
    quitting = True


def register(place: Place, chance: random.Random, rate: float) -> None:
    """Let each reader have its first position, before which ``unread`` keeps nothing for it."""
    from soak.graph import graph

    with graph.start():
        pass
    with cues.open(place.main) as store, Member(store, "enriched", GROUP, lease_s=LEASE_S):
        pass


def write(place: Place, chance: random.Random, rate: float) -> None:
    """Append rows by their numbers. The last row of the queue says where to continue."""
    with cues.open(place.main) as store:
        rows = store.queue("rows")
        last = rows.tailer()
        last.to_end()
        last.direction = "backward"
        found = last.read()
        number = 0 if found is None else found["id"] + 1
        appender = rows.appender()
        while not quitting:
            model.put(place.hour, str(-(-number // model.HOUR) + 1))
            if place.pause.exists():
                model.put(place.idle("writer"), str(number))
                time.sleep(0.1)
                continue
            count = chance.randint(1, max(2, int(rate * 0.5)))
            appender.write_many([model.row(n) for n in range(number, number + count)])
            number += count
            time.sleep(count / rate)


def member(place: Place, chance: random.Random, rate: float) -> None:
    """Take steps from ``enriched`` to ``seen``. Some are aborted, and a SIGTERM comes in the middle of one."""
    with cues.open(place.main) as store, Member(store, "enriched", GROUP, lease_s=LEASE_S) as me:
        while not quitting:
            with me.session(partitions="all" if chance.random() < 0.3 else "one") as session:
                for messages in session.poll(timeout=0.3, n=chance.randint(1, 40)).values():
                    session.write_many("seen", messages)
                time.sleep(chance.random() * 0.05)
                session.end(TRY_ABORT if chance.random() < 0.05 else TRY_COMMIT)


def publish(place: Place, chance: random.Random, rate: float) -> None:
    """Publish transactions over two stores; a checkpoint in a file decides them. Some are aborted.

    The checkpoint names the producers that may have left pending messages behind.
    """
    with cues.open(place.main) as main, cues.open(place.other) as other, Publisher(transaction_timeout_s=20) as one:
        queues = [main.queue("booked"), other.queue("booked")]
        saved = {"number": 0, "intents": [], "producers": []}
        if place.checkpoint.exists():
            saved = json.loads(place.checkpoint.read_text())
        one.append_ack_intents([AckIntent(journal, bytes.fromhex(intent)) for journal, intent in saved["intents"]])
        for producer in saved["producers"]:
            for queue in queues:
                one.roll_back(queue, cues.txn.ProducerID(bytes.fromhex(producer)))
        number = saved["number"]
        saved["producers"] = [one.id.hex()]
        model.put(place.checkpoint, json.dumps(saved))

        def send(message: dict[str, Any]) -> None:
            for queue in queues:
                one.publish_uncommitted(lambda _, queue=queue: queue, message)

        while not quitting:
            if place.pause.exists():
                model.put(place.idle("publisher"), str(number))
                time.sleep(0.1)
                continue
            if chance.random() < 0.2:
                for part in range(chance.randint(1, 5)):
                    send({"t": number, "part": part, "aborted": True})
                time.sleep(chance.random() * 0.05)
                one.abort()
                continue
            for message in model.bookings(number):
                send(message)
            time.sleep(chance.random() * 0.05)
            intents = one.build_ack_intents()
            number += 1
            packed = [[intent.journal, intent.intent.hex()] for intent in intents]
            model.put(place.checkpoint, json.dumps({**saved, "number": number, "intents": packed}))
            one.append_ack_intents(intents)
            time.sleep(chance.random() * 20 / rate)


def spark(place: Place, chance: random.Random, rate: float) -> None:
    """Read queues with Spark while they are written, and compare each message with the store's own reading."""
    from pyspark.sql import SparkSession

    import cues.spark

    session = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "512m")
        .getOrCreate()
    )
    cues.spark.register(session)
    compared = 0
    with cues.open(place.main, readonly=True) as store:
        for name in model.LONG:
            since = datetime.now(UTC) - timedelta(seconds=SPARK_S)  # older messages may be purged meanwhile
            read = session.read.format("cues").option("fields", "id long, wind long")
            table = read.option("startingPosition", since.isoformat()).load(f"{place.main}#{name}")
            found = [row.asDict() for row in table.collect()]
            rows = {(row.get("partition", 0), row["index"]): (row["id"], row["wind"]) for row in found}
            queue = store.queue(name)
            for number in range(queue.partitions):
                mine = {index: rows[n, index] for n, index in rows if n == number}
                tailer = queue.partition(number).tailer()
                for message in tailer:
                    index = tailer.last_read_index
                    if index is None or index < min(mine, default=0) or index > max(mine, default=0):
                        continue
                    expected = message["id"], message["wind"]
                    assert mine.pop(index, None) == expected, f"{name}/{number} at {index}: {message}, not as in Spark"
                    compared += 1
                assert not mine, f"{name}/{number}: Spark read {mine}, which the store does not have"
    print(compared)


ROLES: dict[str, Callable[[Place, random.Random, float], None]] = {
    "register": register,
    "writer": write,
    "member": member,
    "publisher": publish,
    "spark": spark,
}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, quit)
    ROLES[sys.argv[1]](Place(os.fspath(sys.argv[2])), random.Random(int(sys.argv[3])), float(sys.argv[4]))
