"""Read your writes: a wait until a consumer, in this process or another one, has processed given messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Child

from cues import testing
from cues.checkpoints import JSONFileCheckpoint, LMDBCheckpoint, SQLCheckpoint
from cues.errors import InvalidArgument, WaitTimeout
from cues.queues.store import Store
from cues.txn import Checkpoint, Consumer, Publisher, journal_of, wait_read_through

Make = Callable[[], Any]


class Copies:
    """Publishes each message to another queue."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def consume(self, envelope: Any, publisher: Any) -> None:
        publisher.publish_uncommitted(lambda _: self._target, {"n": envelope.message["n"]})

    def finalize(self, publisher: Any) -> None:
        return None


@pytest.fixture(params=["json", "lmdb", "sql"])
def make(request: pytest.FixtureRequest, tmp_path: Path, store: Store) -> Make:
    """Make a new object on one checkpoint."""
    if request.param == "json":
        return lambda: JSONFileCheckpoint(tmp_path / "checkpoint.json")
    if request.param == "lmdb":
        return lambda: LMDBCheckpoint(store, "c")
    return lambda: SQLCheckpoint(tmp_path / "c.db", "c")


def test_a_checkpoint_is_read_without_taking_over(make: Make) -> None:
    owner, looking = make(), make()
    assert looking.read() is None
    owner.restore()
    assert looking.read() is None
    for index in (7, 8):
        owner.commit(Checkpoint({"journal": index}))  # not fenced by the reads
        assert looking.read() == owner.read() == Checkpoint({"journal": index})


def test_the_wait_ends_when_the_messages_are_committed_and_acknowledged(make: Make, store: Store) -> None:
    queue, target = store.queue("in"), store.queue("out")
    index = queue.appender().write_many([{"n": 0}, {"n": 1}])[-1]
    with pytest.raises(WaitTimeout, match=r"'in' is at no position, waited for 2 to be read.*Try: see whether"):
        wait_read_through(make(), {queue: index}, timeout=0)
    with Consumer(Copies(target), [queue], make()) as consumer:
        consumer.drain()
        for indices in ({queue: index}, {queue: 1}, {}):
            wait_read_through(make(), indices, timeout=0)
            consumer.wait_read_through(indices, timeout=0)
        assert len(list(target.tailer(isolation="committed"))) == 2
        with pytest.raises(WaitTimeout, match=r"'in' is at 3, waited for 3 to be read"):
            wait_read_through(make(), {queue: 3}, timeout=0)


def test_a_death_before_the_acknowledgement_keeps_the_wait_until_a_successor_has_appended_it(
    store: Store, tmp_path: Path
) -> None:
    """The rows are there, but what was published is not visible yet."""
    queue, target = store.queue("in"), store.queue("out")
    index = queue.appender().write({"n": 0})
    path = tmp_path / "c.json"
    with pytest.raises(testing.Crashed), testing.crash("consumer.committed", how="raise"):
        Consumer(Copies(target), [queue], JSONFileCheckpoint(path)).drain()
    looking = JSONFileCheckpoint(path)
    assert looking.read().offsets == {journal_of(queue): 2}  # type: ignore[union-attr]
    with pytest.raises(WaitTimeout, match=r"the acknowledgement in .*out is not appended"):
        wait_read_through(looking, {queue: index}, timeout=0.05)
    waited = threading.Thread(target=wait_read_through, args=(looking, {queue: index}, 60))
    waited.start()
    with Consumer(Copies(target), [queue], JSONFileCheckpoint(path)) as successor:
        successor.drain()
    waited.join(60)
    assert not waited.is_alive()
    assert list(target.tailer(isolation="committed")) == [{"n": 0}]


def test_a_message_that_is_pending_is_not_read_through(store: Store, tmp_path: Path) -> None:
    queue, target = store.queue("in"), store.queue("out")
    checkpoint = JSONFileCheckpoint(tmp_path / "c.json")
    with Publisher() as publisher, Consumer(Copies(target), [queue], checkpoint) as consumer:
        index = publisher.publish_uncommitted(lambda _: queue, {"n": 0}).wait()
        consumer.drain()
        with pytest.raises(WaitTimeout):
            consumer.wait_read_through({queue: index}, timeout=0)
        publisher.append_ack_intents(publisher.build_ack_intents())
        consumer.drain()
        consumer.wait_read_through({queue: index}, timeout=0)


RUNS = """
import sys, cues
from cues.checkpoints import JSONFileCheckpoint
from cues.txn import Consumer
from test_txn_barrier import Copies
with cues.open(sys.argv[1]) as store:
    with Consumer(Copies(store.queue("out")), [store.queue("in")], JSONFileCheckpoint(sys.argv[2])) as consumer:
        print("up")
        consumer.run()
"""


def test_across_processes_every_write_is_read_after_its_wait(store: Store, tmp_path: Path) -> None:
    queue, target = store.queue("in"), store.queue("out")
    path = tmp_path / "c.json"
    with Child(RUNS, store.path, path) as child:
        assert child.line() == "up"
        for n in range(20):
            wait_read_through(JSONFileCheckpoint(path), {queue: queue.appender().write({"n": n})}, timeout=60)
            assert {"n": n} in list(target.tailer(isolation="committed"))


@pytest.mark.interpreted
def test_refusals(store: Store, tmp_path: Path) -> None:
    queue, parts = store.queue("in"), store.queue("parts", partitions=2)
    checkpoint = JSONFileCheckpoint(tmp_path / "c.json")
    for indices, text in (
        ({"in": 1}, "A queue was expected"),
        ({queue: 0}, "not the index of a message"),
        ({queue: "x"}, "not the index of a message"),
        ({parts: 1}, "has no partition"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            wait_read_through(checkpoint, indices, timeout=0)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"has no read\(\)"):
        wait_read_through(object(), {queue: 1})  # type: ignore[arg-type]
    place = parts.appender().write({"x": 1})
    with pytest.raises(WaitTimeout, match="parts"):
        wait_read_through(checkpoint, {parts: place}, timeout=0)
