"""Redis Streams over a Unix socket, with the append-only file synced each second (its own advice).

The server's processor time counts. A result and the acknowledgement of its input are one MULTI.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import redis
from harness import Contender, Room, Work
from starts import rows as starts_of
from work import BATCH, QUEUES, each_queue, messages, must_be, total, transactions


@contextmanager
def server(room: Room) -> Iterator[Any]:
    socket = room.path / "redis.sock"
    sync = "always" if room.syncs else "everysec"
    options = {"port": "0", "unixsocket": str(socket), "dir": str(room.path), "appendonly": "yes", "appendfsync": sync}
    command = [
        "redis-server",
        "--save",
        "",
        *(word for name, value in options.items() for word in (f"--{name}", value)),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(unix_socket_path=str(socket))
        for _ in range(600):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        room.keep["servers"] = [process.pid]
        yield client
    finally:
        process.kill()
        process.wait()


def stream(client: Any, name: str) -> Iterator[Any]:
    last = b"-"
    while entries := client.xrange(name, min=last, count=BATCH):
        for _, fields in entries:
            yield orjson.loads(fields[b"m"])
        last = b"(" + entries[-1][0]


@contextmanager
def append(room: Room) -> Iterator[Work]:
    with server(room) as client:

        def work() -> None:
            for message in messages(room.count):
                client.xadd("orders", {"m": orjson.dumps(message)})

        yield work
        must_be(stream(client, "orders"), messages(room.count))


def pipeline(batch: int) -> Contender:
    @contextmanager
    def contender(room: Room) -> Iterator[Work]:
        with server(room) as client:
            filling = client.pipeline(transaction=False)
            for message in messages(room.count):
                filling.xadd("orders", {"m": orjson.dumps(message)})
            filling.execute()
            client.xgroup_create("orders", "totals", id="0")

            def work() -> None:
                while taken := client.xreadgroup("totals", "one", {"orders": ">"}, count=batch):
                    step = client.pipeline(transaction=True)
                    for index, fields in taken[0][1]:
                        step.xadd("totals", {"m": orjson.dumps(total(orjson.loads(fields[b"m"])))})
                        step.xack("orders", "totals", index)
                    step.execute()

            yield work
            must_be(stream(client, "totals"), map(total, messages(room.count)))

    return contender


@contextmanager
def append_all(room: Room) -> Iterator[Work]:
    """Ten messages to three streams, in one MULTI."""
    with server(room) as client:

        def work() -> None:
            for batch in transactions(room.count):
                step = client.pipeline(transaction=True)
                for message in batch:
                    step.xadd(QUEUES[message["id"] % len(QUEUES)], {"m": orjson.dumps(message)})
                step.execute()

        yield work
        for name, expected in zip(QUEUES, each_queue(room.count)):
            must_be(stream(client, name), expected)


CONTENDERS = {
    "append-one": {"Redis Streams": append},
    "pipeline": {"Redis Streams": pipeline(BATCH)},
    "step-one": {"Redis Streams": pipeline(1)},
    "transactions-append": {"Redis MULTI": append_all},
    "transactions-process": {"Redis MULTI": pipeline(BATCH)},
    **starts_of("Redis Streams", server=server),
}
