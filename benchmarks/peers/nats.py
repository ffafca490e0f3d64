"""NATS JetStream with file storage: pull, publish with a message id, acknowledge. The server's processor time counts.

A process that is killed between the publication and the acknowledgement publishes again; the server drops the second
one by its id, within two minutes.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import nats
import orjson
from harness import Contender, Room, Work
from work import messages, must_be, total

WINDOW = 500
"""Messages that are fetched and published at once, where they are."""


@contextmanager
def server(room: Room) -> Iterator[str]:
    command = [
        "nats-server",
        "-js",
        "-sd",
        str(room.path),
        "-a",
        "127.0.0.1",
        "-p",
        "-1",
        "--ports_file_dir",
        str(room.path),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        room.keep["servers"] = [process.pid]
        yield _address(room)
    finally:
        process.kill()
        process.wait()


def _address(room: Room) -> str:
    import time

    for _ in range(600):
        for file in room.path.glob("nats-server_*.ports"):
            if file.stat().st_size:
                return str(orjson.loads(file.read_bytes())["nats"][0])
        time.sleep(0.05)
    raise RuntimeError("nats-server has not told its port in 30 s")


def contender(window: int, step: Callable[[Any, Any, int, int], Coroutine[Any, Any, None]]) -> Contender:
    @contextmanager
    def made(room: Room) -> Iterator[Work]:
        with server(room) as address, asyncio.Runner() as runner:

            async def prepare() -> Any:
                client = await nats.connect(address)
                stream = client.jetstream(timeout=60)
                await stream.add_stream(name="bench", subjects=["orders", "totals"])
                if step is not append:
                    await append(client, stream, room.count, WINDOW)
                return client, stream

            client, stream = runner.run(prepare())
            yield lambda: runner.run(step(client, stream, room.count, window))
            if step is append:
                must_be(runner.run(everything(stream, "orders", room.count)), messages(room.count))
            else:
                must_be(runner.run(everything(stream, "totals", room.count)), map(total, messages(room.count)))
            runner.run(client.close())

    return made


async def append(client: Any, stream: Any, count: int, window: int) -> None:
    orders = messages(count)
    for start in range(0, count, window):
        sent = [
            stream.publish("orders", orjson.dumps(order), headers={"Nats-Msg-Id": f"o{order['id']}"})
            for order in orders[start : start + window]
        ]
        await asyncio.gather(*sent)


async def move(client: Any, stream: Any, count: int, window: int) -> None:
    puller = await stream.pull_subscribe("orders", durable="totals")
    left = count
    while left:
        taken = await puller.fetch(min(window, left))
        orders = [orjson.loads(message.data) for message in taken]
        await asyncio.gather(
            *(
                stream.publish("totals", orjson.dumps(total(order)), headers={"Nats-Msg-Id": f"t{order['id']}"})
                for order in orders
            )
        )
        for message in taken:
            await message.ack()
        left -= len(taken)
    await client.flush()


async def everything(stream: Any, subject: str, count: int) -> list[Any]:
    puller = await stream.pull_subscribe(subject, durable=f"check-{subject}")
    have: list[Any] = []
    while len(have) < count:
        for message in await puller.fetch(min(WINDOW, count - len(have)), timeout=10):
            have.append(orjson.loads(message.data))
            await message.ack()  # the server gives no more than a thousand that are not acknowledged
    return have


CONTENDERS = {
    "append-one": {"NATS JetStream": contender(1, append)},
    "pipeline": {"NATS JetStream": contender(WINDOW, move)},
    "step-one": {"NATS JetStream": contender(1, move)},
}
