"""A Ctrl-C at every function entry of a publisher and of a consumer, and then the program continues as the docs say.

A publisher: the intents of the checkpoint are acknowledged, the rest is aborted, and the same publisher publishes the
transaction again. A consumer: it has ended, and another one continues with the same queues and the same checkpoint.
The invariant: readers of committed messages see every message once and in order, and nothing waits for ever.

By default some points are tried, another choice each time; the slow and the long tests try all.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interruptions
import pytest
import seeds

import cues
from cues.checkpoints import JSONFileCheckpoint, LMDBCheckpoint, SQLCheckpoint
from cues.queues.queue import Queue
from cues.txn import AckIntent, Consumer, Defer, Publisher, ReadCommitted

COUNT = 6
EACH = 2
"""Messages a transaction."""
STEP = 60
"""One point of so many is tried by default."""


def committed(queue: Queue) -> list[int]:
    return [envelope.message["n"] for envelope in ReadCommitted(queue) if not envelope.acknowledgement]


def every(
    thorough: bool,
    arrange: Callable[[], AbstractContextManager[Any]],
    act: Callable[[Any], object],
    go_on: Callable[[Any, str], object],
    step: int = STEP,
) -> None:
    first = seeds.new() % step + 1
    print(f"points {first}, {first + step}, …")
    points = None if thorough else range(first, 1 << 30, step)
    count, found = interruptions.faults(arrange, act, go_on, points=points)
    assert not found, "\n".join(found)
    assert count > (50 if thorough else 0)


# --- a publisher ----------------------------------------------------------------------------------


@dataclass
class Transfers:
    """Message n is published to a queue in each of two stores; the checkpoint decides how many took place."""

    publisher: Publisher
    queues: list[Queue]
    checkpoint: tuple[int, list[AckIntent]] = 0, []

    def transact(self) -> None:
        done, _ = self.checkpoint
        for n in range(done, done + EACH):
            for queue in self.queues:
                self.publisher.publish_uncommitted(lambda message, queue=queue: queue, {"n": n})
        intents = self.publisher.build_ack_intents()
        self.checkpoint = done + EACH, intents
        self.publisher.append_ack_intents(intents)

    def go_on(self) -> None:
        self.publisher.append_ack_intents(self.checkpoint[1])
        self.publisher.abort()
        while self.checkpoint[0] < COUNT:
            self.transact()
        for queue in self.queues:
            assert committed(queue) == list(range(COUNT))


@pytest.fixture
def transfers(tmp_path: Path) -> Callable[[], AbstractContextManager[Transfers]]:
    numbers = itertools.count()

    @contextlib.contextmanager
    def arrange() -> Iterator[Transfers]:
        place = tmp_path / str(next(numbers))
        with (
            cues.open(place / "a", durability="process") as a,
            cues.open(place / "b", durability="process") as b,
            Publisher() as publisher,
        ):
            found = Transfers(publisher, [a.queue("left"), b.queue("right")])
            found.transact()
            yield found

    return arrange


THOROUGH = [False, pytest.param(True, marks=pytest.mark.slow)]


@pytest.mark.parametrize("thorough", THOROUGH)
def test_a_transaction_that_is_interrupted_is_aborted_and_published_again(thorough: bool, transfers: Any) -> None:
    every(thorough, transfers, Transfers.transact, lambda world, place: world.go_on())


@pytest.mark.parametrize("thorough", THOROUGH)
def test_an_abort_that_is_interrupted_is_repeated(thorough: bool, transfers: Any) -> None:
    """Of a transaction whose messages are appended, are due, or wait for an acknowledgement."""

    @contextlib.contextmanager
    def arrange() -> Iterator[Transfers]:
        with transfers() as found:
            left, right = found.queues
            found.publisher.publish_uncommitted(lambda message: left, {"n": "aborted"})
            found.publisher.build_ack_intents()
            for queue in (left, right):
                found.publisher.publish_uncommitted(lambda message, queue=queue: queue, {"n": "aborted"})
            yield found

    every(thorough, arrange, lambda world: world.publisher.abort(), lambda world, place: world.go_on(), 20)


@pytest.mark.parametrize("thorough", THOROUGH)
def test_after_an_interruption_a_flush_says_what_was_published_committed(thorough: bool, transfers: Any) -> None:
    """The messages that were taken are in the queue then; the others are nowhere."""

    def act(world: Transfers) -> None:
        for n in range(EACH, EACH + 3):
            world.publisher.publish_committed(lambda message: world.queues[0], {"n": n})
        world.publisher.flush()

    def go_on(world: Transfers, place: str) -> None:
        world.publisher.flush()
        queue = world.queues[0]
        found = committed(queue)
        assert found == list(range(len(found)))
        for n in range(len(found), COUNT):
            world.publisher.publish_committed(lambda message: queue, {"n": n}).wait()
        assert committed(queue) == list(range(COUNT))

    every(thorough, transfers, act, go_on, 20)


@pytest.mark.parametrize("thorough", THOROUGH)
def test_a_close_that_is_interrupted_is_repeated(thorough: bool, transfers: Any) -> None:
    def act(world: Transfers) -> None:
        world.publisher.publish_committed(lambda message: world.queues[0], {"n": EACH})
        world.publisher.close()

    def go_on(world: Transfers, place: str) -> None:
        world.publisher.close()
        assert committed(world.queues[0]) in ([0, 1], [0, 1, 2])
        with pytest.raises(cues.errors.Closed):
            world.publisher.publish_committed(lambda message: world.queues[0], {"n": EACH})

    every(thorough, transfers, act, go_on, 10)


# --- a consumer -----------------------------------------------------------------------------------


class Sums:
    """Two messages a transaction; each is passed on, and added to what the checkpoint keeps."""

    def __init__(self, out: Queue, kind: str) -> None:
        self._out, self._kind = out, kind
        self._now: list[int] = []

    def consume(self, envelope: Any, publisher: Publisher) -> None:
        if len(self._now) == EACH:
            raise Defer
        publisher.publish_uncommitted(lambda message: self._out, {"n": envelope.message["n"]})
        self._now.append(envelope.message["n"])

    def finalize(self, publisher: Publisher) -> Callable[[Any], object]:
        now, self._now = self._now, []

        def work(given: Any) -> None:
            if self._kind == "sql":
                for n in now:
                    given.exec_driver_sql("insert into seen values (?)", (n,))
            else:
                state = given if self._kind == "json" else given.state
                state["seen"] = state.get("seen", []) + now

        return work


@dataclass
class Life:
    """A consumer's queues and its checkpoint, which outlive it."""

    kind: str
    source: Queue
    out: Queue
    checkpoint: Any

    def drain(self) -> None:
        with Consumer(Sums(self.out, self.kind), [self.source], self.checkpoint) as consumer:
            assert consumer.drain()

    def seen(self) -> list[int]:
        if self.kind == "sql":
            with self.checkpoint.engine.connect() as connection:
                return [n for (n,) in connection.exec_driver_sql("select n from seen")]
        found: list[int] = self.checkpoint.state["seen"]
        return found

    def go_on(self) -> None:
        self.source.appender().write({"n": COUNT})
        self.drain()
        assert committed(self.out) == list(range(COUNT + 1))
        assert self.seen() == list(range(COUNT + 1))


@pytest.fixture
def lives(tmp_path: Path) -> Callable[[str], Callable[[], AbstractContextManager[Life]]]:
    numbers = itertools.count()

    def of_kind(kind: str) -> Callable[[], AbstractContextManager[Life]]:
        @contextlib.contextmanager
        def arrange() -> Iterator[Life]:
            place = tmp_path / str(next(numbers))
            with (
                cues.open(place / "a", durability="process") as a,
                cues.open(place / "b", durability="process") as b,
                contextlib.ExitStack() as opened,
            ):
                checkpoint: Any
                if kind == "json":
                    checkpoint = JSONFileCheckpoint(place / "checkpoint.json", timeout_s=2)
                elif kind == "lmdb":
                    checkpoint = LMDBCheckpoint(a, "sums")
                else:
                    table = "create table if not exists seen (n integer)"
                    checkpoint = SQLCheckpoint(place / "checkpoint.db", "sums", table, timeout_s=2)
                    opened.callback(checkpoint.close)
                source = a.queue("source")
                source.appender().write_many([{"n": n} for n in range(COUNT)])
                yield Life(kind, source, b.queue("out"), checkpoint)

        return arrange

    return of_kind


@pytest.mark.parametrize("kind", ["json", "lmdb", "sql"])
@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_consumer_that_is_interrupted_is_followed_by_another(kind: str, thorough: bool, lives: Any) -> None:
    every(thorough, lives(kind), Life.drain, lambda life, place: life.go_on(), 300)
