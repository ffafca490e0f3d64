"""Queue libraries on SQLite and files: persist-queue, litequeue, diskcache, huey.

Each as its own documentation uses it, with the synchronisation that it comes with (SQLite's NORMAL or FULL). A
pipeline is: take a message, call the function, put the result, acknowledge; the libraries cannot do the last two
in one transaction, so a process that is killed between them repeats a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness import Room, Work
from work import messages, must_be, total


@contextmanager
def persist_append(room: Room) -> Iterator[Work]:
    import persistqueue

    queue = persistqueue.SQLiteAckQueue(str(room.path), auto_commit=True)

    def work() -> None:
        for message in messages(room.count):
            queue.put(message)

    yield work
    must_be((queue.get() for _ in range(queue.size)), messages(room.count))


@contextmanager
def persist_step(room: Room) -> Iterator[Work]:
    import persistqueue

    taken = persistqueue.SQLiteAckQueue(str(room.path / "in"), auto_commit=True)
    left = persistqueue.FIFOSQLiteQueue(str(room.path / "out"), auto_commit=True)
    for message in messages(room.count):
        taken.put(message)

    def work() -> None:
        for _ in range(room.count):
            message = taken.get()
            left.put(total(message))
            taken.ack(message)

    yield work
    must_be((left.get() for _ in range(left.size)), map(total, messages(room.count)))


@contextmanager
def lite_append(room: Room) -> Iterator[Work]:
    from litequeue import LiteQueue

    queue = LiteQueue(str(room.path / "queue.db"))

    def work() -> None:
        for message in messages(room.count):
            queue.put(json.dumps(message))

    yield work
    must_be((json.loads(queue.pop().data) for _ in range(queue.qsize())), messages(room.count))


@contextmanager
def lite_step(room: Room) -> Iterator[Work]:
    from litequeue import LiteQueue

    taken, left = LiteQueue(str(room.path / "in.db")), LiteQueue(str(room.path / "out.db"))
    for message in messages(room.count):
        taken.put(json.dumps(message))

    def work() -> None:
        for _ in range(room.count):
            message = taken.pop()
            left.put(json.dumps(total(json.loads(message.data))))
            taken.done(message.message_id)

    yield work
    must_be((json.loads(left.pop().data) for _ in range(left.qsize())), map(total, messages(room.count)))


@contextmanager
def disk_append(room: Room) -> Iterator[Work]:
    import diskcache

    queue = diskcache.Deque(directory=str(room.path))

    def work() -> None:
        for message in messages(room.count):
            queue.append(message)

    yield work
    must_be(iter(queue), messages(room.count))


@contextmanager
def disk_step(room: Room) -> Iterator[Work]:
    import diskcache

    taken = diskcache.Deque(directory=str(room.path / "in"))
    left = diskcache.Deque(directory=str(room.path / "out"))
    for message in messages(room.count):
        taken.append(message)

    def work() -> None:
        for _ in range(room.count):
            message = taken.peekleft()
            left.append(total(message))
            taken.popleft()

    yield work
    must_be(iter(left), map(total, messages(room.count)))


@contextmanager
def huey_append(room: Room) -> Iterator[Work]:
    queue, task = _huey(room)

    def work() -> None:
        for message in messages(room.count):
            task(message)

    yield work
    must_be((queue.dequeue().args[0] for _ in range(len(queue))), messages(room.count))


@contextmanager
def huey_step(room: Room) -> Iterator[Work]:
    queue, task = _huey(room)
    results = [task(message) for message in messages(room.count)]

    def work() -> None:
        for _ in range(room.count):
            queue.execute(queue.dequeue())

    yield work
    must_be((result.get() for result in results), map(total, messages(room.count)))


def _huey(room: Room) -> tuple[Any, Any]:
    from huey import SqliteHuey

    queue = SqliteHuey(filename=str(room.path / "huey.db"))
    return queue, queue.task()(total)


CONTENDERS = {
    "append-one": {
        "persist-queue": persist_append,
        "litequeue": lite_append,
        "diskcache": disk_append,
        "huey": huey_append,
    },
    "step-one": {"persist-queue": persist_step, "litequeue": lite_step, "diskcache": disk_step, "huey": huey_step},
}
