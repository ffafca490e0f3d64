"""Stages of shared consumers, for the soak: committed reading, growth, takeovers and aborts at once.

    feeder ──▸ first ──▸ second ──▸ third        first and second in one store, third in another

The feeder publishes transactions, aborts some and leaves some pending for a while. A key has a partition of its own
choice among those that there were when the key was new: so its order can be asserted although queues grow.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import cues
from cues.checkpoints import JSONFileCheckpoint
from cues.errors import CuesError, Fenced
from cues.groups import SharedConsumer, shared_consumer
from cues.txn import Abort
from cues.txn.consumer import Consumer
from cues.txn.publisher import Publisher

STAGES = ("first", "second", "third")
PARTITIONS = (3, 5, 7)
"""The number of partitions of each queue: at the start, and after each growth."""
KEYS = 60
LEASE_S = 0.8
MAP_BYTES = 512 << 20


def partition_of(key: int) -> int:
    """Keys of the first third are on the first partitions, later keys also on those that were added."""
    return key % PARTITIONS[min(key * len(PARTITIONS) // KEYS, len(PARTITIONS) - 1)]


def stores(place: str) -> tuple[cues.Store, cues.Store]:
    return (
        cues.open(Path(place, "a"), "process", map_size=MAP_BYTES),
        cues.open(Path(place, "b"), "process", map_size=MAP_BYTES),
    )


class Onward:
    """Publishes each message to the next stage; sometimes it aborts a transaction."""

    def __init__(self, target: Any, seed: int) -> None:
        self._target = target
        self._chance = random.Random(seed)

    def consume(self, envelope: Any, publisher: Publisher) -> None:
        key = envelope.message["key"]
        target = self._target.partition(partition_of(key))
        publisher.publish_uncommitted(lambda _: target, {"key": key, "n": envelope.message["n"]})
        if self._chance.random() < 0.002:
            raise Abort

    def finalize(self, publisher: Publisher) -> None:
        return None


class Hasty(Consumer):
    """Without a protection: acknowledges before it commits."""

    def _commit_in_thread(self, checkpoint: Any, work: Any, intents: Any) -> None:
        assert self._publisher is not None
        self._publisher.append_ack_intents(intents)
        time.sleep(0.05)  # where kills are to come
        super()._commit_in_thread(checkpoint, work, [])


def work(place: str, stage: int, seed: int, rule: str = "") -> str:
    """Be one process of a stage until the file "done" exists."""
    shared_consumer.NOTE_S = 0.1
    if rule == "hasty":
        shared_consumer.Consumer = Hasty  # type: ignore[misc]
    a, b = stores(place)
    source, target = a, (a, b)[stage]
    try:
        with a, b:
            out = target.queue(STAGES[stage + 1])
            shared = SharedConsumer(
                lambda queue, number: Onward(out, seed + number),
                source,
                STAGES[stage],
                f"stage-{stage}",
                lambda queue, number: JSONFileCheckpoint(Path(place, f"{queue}-{number}.json")),
                lease_s=LEASE_S,
                max_s=0.2,
            )
            signal.signal(signal.SIGTERM, lambda *_: shared.stop())
            shared.run()
        return "stopped"
    except (Fenced, CuesError) as error:
        return f"{type(error).__name__}: {error}"


def feed(place: str, count: int, seed: int) -> int:
    """Publish the messages in transactions by two publishers; grow all queues on the way."""
    chance = random.Random(seed)
    a, b = stores(place)
    numbers = [0] * KEYS
    sent = 0
    with a, b, Publisher() as one, Publisher() as other:
        queues = [a.queue("first"), a.queue("second"), b.queue("third")]
        for step, partitions in enumerate(PARTITIONS):
            for queue in queues:
                if queue.partitions < partitions:
                    queue.grow(partitions)
            keys = KEYS * (step + 1) // len(PARTITIONS)
            until = count * (step + 1) // len(PARTITIONS)
            while sent < until:
                publisher = (one, other)[chance.random() < 0.5]
                chosen = [key for key in range(keys) if (key % 2 == 0) == (publisher is one)]
                size = min(chance.randint(1, 60), until - sent)
                before = list(numbers)
                for _ in range(size):
                    key = chance.choice(chosen)
                    target = queues[0].partition(partition_of(key))
                    message = {"key": key, "n": numbers[key]}
                    publisher.publish_uncommitted(lambda _, target=target: target, message)
                    numbers[key] += 1
                if chance.random() < 0.1:
                    publisher.abort()
                    numbers = before
                    continue
                intents = publisher.build_ack_intents()
                if chance.random() < 0.1:
                    time.sleep(0.02)  # pending, while others write and read
                publisher.append_ack_intents(intents)
                sent += size
    return sent


def found(place: str) -> dict[str, dict[int, list[int]]]:
    """The committed numbers of each key at each stage, in the order of its partition."""
    a, b = stores(place)
    stages: dict[str, dict[int, list[int]]] = {}
    with a, b:
        assert not a.check() and not b.check()
        for stage, store in zip(STAGES, (a, a, b)):
            keys: dict[int, list[int]] = {}
            queue = store.queue(stage)
            for number in range(queue.partitions):
                for message in queue.partition(number).tailer(isolation="committed"):
                    keys.setdefault(message["key"], []).append(message["n"])
            stages[stage] = keys
    return stages
