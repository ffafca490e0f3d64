"""Transactions: the cost of identities, pending messages and sequencing.

    python benchmarks/txn.py [--count 200000] [--rounds 5] [--durability process|disk] [--json]
    python benchmarks/txn.py --quick

Contenders take turns within a round, each on a store of its own, and each result is verified. A figure is the
median over the rounds, in messages a second; the ratio is the median of CPU time against the first of
the same group, within a round.

    append           an appender, 1,000 messages a call
    publish          committed, waited for at the end: the same with an identity a message
    transaction      uncommitted, and one acknowledgement
    stamped          messages stamped elsewhere, 1,000 a call, with the check that they are new
    stamped again    the same once more, all of them left out

    tailer           reads everything
    uncommitted      the same as envelopes
    outside          as committed, from a log without transactions
    ring             as committed, transactions of 100 messages by four producers that take turns, all in the ring
    replay           the same with a ring of 8, so that every transaction is read twice
    committed tailer        as committed, by a tailer, from the log of "outside": at most 1.3 of the first
    committed named         the same by a named tailer, 1,000 messages a call
    committed transactions  the same as "ring", by a tailer

    sequencer ring, sequencer replay    the sequencer alone, over envelopes in memory

    1 source         a consumer without output, to the end of one queue
    64 sources       the same with 63 more queues, which are empty
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cues
from cues.checkpoints import JSONFileCheckpoint
from cues.queues.queue import Queue
from cues.txn import (
    Clock,
    Consumer,
    Envelope,
    Flags,
    Outcome,
    ProducerID,
    Publisher,
    ReadCommitted,
    ReadUncommitted,
    Sequencer,
    append_stamped,
    build_uuid,
)

EACH = 100
"""Messages a transaction."""
TURN = 50
"""Messages that a producer writes before the next one does; a record batch holds those of one."""
MANY = 1000
"""Messages an append."""

Work = Callable[[], int]
"""Does the work, and returns the number of messages that it saw."""


def message(n: int) -> dict[str, Any]:
    """About 60 bytes of msgpack."""
    return {"id": n, "carrier": "AA", "origin": "JFK", "delay": n % 100 / 2, "note": "x" * 10}


def identities(count: int, transactions: bool) -> list[Any]:
    """UUIDs of four producers that take turns."""
    producers = [(ProducerID(), Clock()) for _ in range(4)]
    clocks = [clock for _, clock in producers]
    for clock in clocks:
        clock.update(time.time_ns())
    uuids = []
    for n in range(count):
        turn, place = divmod(n, TURN)
        producer, clock = producers[turn % 4]
        flags = Flags.OUTSIDE_TXN
        if transactions:
            flags = Flags.ACK_TXN if (turn // 4 * TURN + place) % EACH == EACH - 1 else Flags.CONTINUE_TXN
        uuids.append(build_uuid(producer, clock.tick(), flags))
    return uuids


class Counts:
    """An application that counts."""

    count = 0

    def consume(self, envelope: Envelope, publisher: Publisher) -> None:
        self.count += 1

    def finalize(self, publisher: Publisher) -> None:
        return None


class Bench:
    """The contenders over one message count."""

    def __init__(self, count: int, durability: str, directory: Path) -> None:
        self.count = count
        self.messages = [message(n) for n in range(count)]
        self.outside = identities(count, False)
        self.inside = identities(count, True)
        self.envelopes = [
            Envelope("j", n, n + 1, uuid, m) for n, (uuid, m) in enumerate(zip(self.inside, self.messages))
        ]
        self.durability = durability
        self.directory = directory
        self.log = cues.open(directory / "log", durability="process")
        for name, uuids in (("outside", self.outside), ("inside", self.inside)):
            queue = self.log.queue(name)
            for start in range(0, count, MANY):
                append_stamped(queue, list(zip(uuids, self.messages))[start : start + MANY])
        self._number = 0

    def groups(self) -> dict[str, dict[str, Work]]:
        return {
            "write": {
                "append": lambda: self.written(self._append),
                "publish": lambda: self.written(self._publish),
                "transaction": lambda: self.written(self._transaction),
                "stamped": lambda: self.written(self._stamped),
                "stamped again": self._stamped_again,
            },
            "read": {
                "tailer": lambda: sum(1 for _ in self.log.queue("outside").tailer()),
                "uncommitted": lambda: sum(1 for _ in ReadUncommitted(self.log.queue("outside"))),
                "outside": lambda: sum(1 for _ in ReadCommitted(self.log.queue("outside"))),
                "ring": lambda: sum(1 for _ in ReadCommitted(self.log.queue("inside"))),
                "replay": lambda: sum(1 for _ in ReadCommitted(self.log.queue("inside"), ring=8)),
                "committed tailer": lambda: sum(1 for _ in self.log.queue("outside").tailer(isolation="committed")),
                "committed transactions": lambda: sum(
                    1 for _ in self.log.queue("inside").tailer(isolation="committed")
                ),
                "committed named": self._named,
            },
            "consumer": {"1 source": lambda: self._consume(1), "64 sources": lambda: self._consume(64)},
            "sequencer": {"ring": lambda: self._sequence(8192), "replay": lambda: self._sequence(8)},
        }

    def written(self, write: Callable[[Queue], None]) -> int:
        self._number += 1
        with cues.open(self.directory / f"store-{self._number}", durability=self.durability) as store:
            queue = store.queue("q")
            write(queue)
            return len(queue)

    def _append(self, queue: Queue) -> None:
        appender = queue.appender()
        for start in range(0, self.count, MANY):
            appender.write_many(self.messages[start : start + MANY])

    def _publish(self, queue: Queue) -> None:
        with Publisher() as publisher:
            for message in self.messages:
                publisher.publish_committed(lambda message: queue, message)

    def _transaction(self, queue: Queue) -> None:
        with Publisher() as publisher:
            for message in self.messages[:-1]:
                publisher.publish_uncommitted(lambda message: queue, message)
            publisher.append_ack_intents(publisher.build_ack_intents())

    def _stamped(self, queue: Queue) -> None:
        pairs = list(zip(self.outside, self.messages))
        for start in range(0, self.count, MANY):
            append_stamped(queue, pairs[start : start + MANY])

    def _stamped_again(self) -> int:
        self._stamped(self.log.queue("outside"))
        return len(self.log.queue("outside"))

    def _consume(self, sources: int) -> int:
        self._number += 1
        queues = [self.log.queue("outside"), *(self.log.queue(f"idle-{n}") for n in range(sources - 1))]
        app = Counts()
        with Consumer(app, queues, JSONFileCheckpoint(self.directory / f"checkpoint-{self._number}.json")) as consumer:
            consumer.drain()
        return app.count

    def _sequence(self, ring: int) -> int:
        sequencer = Sequencer(ring=ring)
        queue, step = sequencer.queue, sequencer.step
        count = 0
        for envelope in self.envelopes:
            outcome = queue(envelope)
            if outcome is Outcome.AckCommitReplay:
                _, begin, end = sequencer.replay_range()
                sequencer.start_replay(self.envelopes[begin:end])
            while step() is not None:
                count += 1
        return count

    def _named(self) -> int:
        self._number += 1
        tailer = self.log.queue("outside").tailer(f"reader-{self._number}", isolation="committed")
        return sum(len(messages) for messages in iter(lambda: tailer.read_many(MANY), []))

    def expected(self) -> int:
        """The number of committed messages, without those that are pending at the end."""
        whole = 4 * EACH
        return self.count // whole * whole


def race(group: dict[str, Work], rounds: int, rng: random.Random) -> dict[str, list[tuple[float, float, int]]]:
    """Wall and CPU time and the count of each contender, round by round."""
    samples: dict[str, list[tuple[float, float, int]]] = {name: [] for name in group}
    for _ in range(rounds):
        for name in rng.sample(list(group), len(group)):
            wall, cpu = time.perf_counter(), time.process_time()
            seen = group[name]()
            samples[name].append((time.perf_counter() - wall, time.process_time() - cpu, seen))
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--durability", choices=("process", "disk"), default="process")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="only to see that it runs; the figures mean nothing")
    arguments = parser.parse_args()
    count = 4000 if arguments.quick else max(1, arguments.count // (4 * EACH)) * 4 * EACH
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory(prefix="cues-txn-") as directory:
        bench = Bench(count, arguments.durability, Path(directory))
        for group, contenders in bench.groups().items():
            samples = race(contenders, rounds, random.Random(1))
            first = next(iter(samples.values()))
            for name, own in samples.items():
                seen = {sample[2] for sample in own}
                committed = group == "sequencer" or name in ("ring", "replay")
                whole = bench.expected() if committed else count
                if name == "committed transactions":  # a tailer returns no acknowledgements
                    whole = bench.expected() * (EACH - 1) // EACH
                assert seen == {whole}, f"{group} {name}: {seen}"
                ratio = statistics.median(mine[1] / its[1] for mine, its in zip(own, first))
                wall, cpu = (statistics.median(sample[place] for sample in own) for place in (0, 1))
                line = {
                    "group": group,
                    "contender": name,
                    "messages": count,
                    "messages_per_s": count / wall,
                    "cpu_us": cpu / count * 1e6,
                    "ratio": ratio,
                }
                if arguments.json:
                    print(json.dumps(line))
                else:
                    print(
                        f"{group:10} {name:14} {count / wall:12,.0f} a second  {cpu / count * 1e6:6.2f} CPU µs"
                        f"  x{ratio:.2f}"
                    )
        bench.log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
