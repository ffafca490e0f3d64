"""Processes of a shared consumer, for tests that kill and stop them.

    a     "in", keyed, which they share        (durability process)
    b     "out", which they publish to; in one log, so that the order of each key can be seen
    <n>.json   the checkpoint of a partition: it also counts the messages, in the checkpoint's transaction

A process ends when all is read and the file "done" exists. It dies or stops at a crash point if it is told to.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cues
from cues import errors, testing
from cues.checkpoints import JSONFileCheckpoint
from cues.checkpoints.fence import RestoredFence
from cues.groups import SharedConsumer, shared_consumer
from cues.txn import Abort
from cues.txn.consumer import Defer
from cues.txn.publisher import Publisher

PARTITIONS = 4
KEYS = 8
LEASE_S = 0.5
TRANSACTION_MAX = 3
"""Messages of a transaction, so that a few messages make several transactions."""


class Copies:
    """Publishes each message, and keeps it in the state of the checkpoint."""

    def __init__(self, out: Any, abort_every: int = 0, place: str = "", hold: int = -1) -> None:
        """With ``hold`` it waits in the message of that number, until the file "go" is there."""
        self._out = out
        self._place, self._hold = place, hold
        self._taken: list[list[int]] = []
        self._abort_every = abort_every
        self._seen = 0

    def consume(self, envelope: Any, publisher: Publisher) -> None:
        if len(self._taken) == TRANSACTION_MAX:
            raise Defer
        message = {"key": envelope.message["key"], "n": envelope.message["n"]}
        append = publisher.publish_uncommitted(lambda _: self._out, message)
        if message["n"] == self._hold:
            append.wait()
            Path(self._place, "holding").touch()
            while not Path(self._place, "go").exists():
                time.sleep(0.005)
        self._seen += 1
        if self._abort_every and self._seen % self._abort_every == 0:
            self._taken = []
            raise Abort
        self._taken.append([message["key"], message["n"]])

    def finalize(self, publisher: Publisher) -> Any:
        taken, self._taken = self._taken, []
        return lambda state: state.setdefault("taken", []).extend(taken)


class Unfenced(JSONFileCheckpoint):
    """Commits on whatever is there, and under whatever fence."""

    def commit(self, checkpoint: Any, work: Any = None) -> None:
        record = self._read()
        assert record is not None
        self._held = RestoredFence.now(record["fence"])
        self.state = record["state"]
        super().commit(checkpoint, work)


@contextlib.contextmanager
def opened(place: str) -> Iterator[tuple[cues.Store, cues.Store]]:
    with cues.open(Path(place, "a"), "process") as a, cues.open(Path(place, "b"), "process") as b:
        yield a, b


def prepare(place: Path) -> str:
    place.mkdir(exist_ok=True)
    with opened(str(place)) as (a, b):
        a.queue("in", partitions=PARTITIONS, key="key")
        b.queue("out")
    return str(place)


def feed(a: cues.Store, begin: int, count: int) -> None:
    a.queue("in").appender().write_many([{"key": n % KEYS, "n": n} for n in range(begin, begin + count)])


def live(place: str, point: str = "", hit: int = 0, how: Any = "kill", rule: str = "", hold: int = -1) -> str:
    """Work until the file "done" is there; return "done", or the name of the error."""
    shared_consumer.NOTE_S = 0.05  # the tests wait for the positions of the group
    kind = Unfenced if rule == "unfenced" else JSONFileCheckpoint
    with opened(place) as (a, b), contextlib.ExitStack() as armed:
        if point:
            armed.enter_context(testing.crash(point, hit, how=how))
        out = b.queue("out")
        shared = SharedConsumer(
            lambda queue, number: Copies(out, 0, place, hold),
            a,
            "in",
            "g",
            lambda queue, number: kind(Path(place, f"{number}.json")),
            lease_s=LEASE_S,
        )
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.01):
                if Path(place, "done").exists():
                    shared.stop()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            shared.run()
            return "done"
        except errors.CuesError as error:
            return type(error).__name__
        finally:
            ended.set()
            watcher.join()


def results(place: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The (key, n) of the committed messages, and those in the states of the checkpoints."""
    with opened(place) as (a, b):
        assert not a.check() and not b.check()
        published = [(m["key"], m["n"]) for m in b.queue("out").tailer(isolation="committed")]
    states = [json.loads(path.read_text())["state"] for path in sorted(Path(place).glob("?.json"))]
    return published, sorted((key, n) for state in states for key, n in state.get("taken", []))


def wrong(place: str, count: int) -> str:
    """Say how the results differ from ``count`` messages, each once and in the order of its key; empty if not."""
    published, taken = results(place)
    expected = {key: [(key, n) for n in range(key, count, KEYS)] for key in range(KEYS)}
    history = testing.check_history(expected, published)
    if not history.exact:
        return f"published: {history}"
    if taken != sorted(pair for pairs in expected.values() for pair in pairs):
        return f"in the checkpoints: {len(taken)} of {count}, {len(set(taken))} of them different"
    return ""
