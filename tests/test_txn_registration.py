"""What stores know of a consumer with its checkpoint elsewhere: for retention, for its successor, and for status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from forks import Forks

import cues
from cues import errors, faults, testing
from cues.checkpoints import JSONFileCheckpoint, LMDBCheckpoint
from cues.cli import app
from cues.tools import metrics
from cues.txn import Publisher
from cues.txn.consumer import Consumer
from cues.txn.operate import forget, list_consumers, list_transactions
from cues.txn.registration import Registration


class Copies:
    """Publishes each message to the queues that its number selects."""

    def __init__(self, *targets: Any) -> None:
        self.targets = targets

    def consume(self, envelope: Any, publisher: Publisher) -> None:
        n = envelope.message["n"]
        publisher.publish_uncommitted(lambda _: self.targets[n % len(self.targets)], {"n": n}).wait()

    def finalize(self, publisher: Publisher) -> None:
        return None


class Ignores:
    def consume(self, envelope: Any, publisher: Publisher) -> None:
        pass

    def finalize(self, publisher: Publisher) -> None:
        return None


def numbers(queue: Any, **options: Any) -> list[int]:
    return [message["n"] for message in queue.tailer(**options)]


# --- retention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["json", "lmdb"])
def test_retention_waits_for_a_checkpoint_outside_of_the_store(kind: str, tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", "process") as store, cues.open(tmp_path / "other", "process") as other:
        queue = store.queue("q", retention="read")
        checkpoint = JSONFileCheckpoint(tmp_path / "totals.json") if kind == "json" else LMDBCheckpoint(other, "totals")
        queue.appender().write({"n": 0})
        with Consumer(Ignores(), [queue], checkpoint) as consumer:
            consumer.drain()
        for n in range(1, 5):
            queue.appender().write({"n": n})
            queue.tailer("fast").read_many(10)
        assert numbers(queue)[-4:] == [1, 2, 3, 4], "the consumer has not read them"
        with Consumer(Ignores(), [queue], checkpoint) as consumer:
            consumer.drain()
        queue.tailer("fast").read_many(10)
        queue.appender().write({"n": 5})
        assert queue.first_index > 4
        forget(store, "totals")
        assert not list_consumers(store)


def test_a_partition_that_is_added_while_the_consumer_is_away_is_kept(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", "process") as store:
        queue = store.queue("q", retention="read", partitions=2)
        with Consumer(Ignores(), [queue], JSONFileCheckpoint(tmp_path / "c.json")) as consumer:
            consumer.drain()
        queue.grow(3)
        added = queue.partition(2)
        for n in range(3):
            added.appender().write({"n": n})
            added.tailer("fast").read_many(10)
        assert numbers(added) == [0, 1, 2]


def test_the_reader_of_messages_that_were_let_go_is_told_by_name_and_number(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", "process") as store:
        queue = store.queue("q", retention=1)
        queue.appender().write({"n": 0})
        with Consumer(Ignores(), [queue], JSONFileCheckpoint(tmp_path / "totals.json")) as consumer:
            consumer.drain()
        for n in range(1, 5):
            queue.appender().write({"n": n})
        consumer = Consumer(Ignores(), [queue], JSONFileCheckpoint(tmp_path / "totals.json"))
        with consumer, pytest.raises(errors.Gap, match=r"2 to 4 .*totals\.json"):
            consumer.drain()


# --- rollback -------------------------------------------------------------------------------------


def live(place: str, rule: str = "") -> None:
    """Copy what is left. Each transaction writes to another queue than the last; ``rule``: without the rollback."""
    if rule:
        Registration.roll_back = lambda self: setattr(self, "_fence", 1 << 40) or 0  # type: ignore
    with cues.open(Path(place, "a")) as a, cues.open(Path(place, "b"), "process") as b:
        app = Copies(a.queue("left"), b.queue("right"), b.queue("third"))
        checkpoint = JSONFileCheckpoint(Path(place, "c.json"))
        with Consumer(app, [a.queue("in")], checkpoint, max_s=1e-9, lease_s=0, transaction_timeout_s=None) as consumer:
            consumer.drain()


def crash(place: str, point: str, hit: int) -> None:
    with testing.crash(point, hit):
        live(place)


POINTS = (
    "publish.inside", "publish.after", "intents.prepared", "intents.built", "consumer.before", "consumer.noted",
    "consumer.dropped", *faults.CHECKPOINT_POINTS,
)  # fmt: skip
ONCE = ("consumer.dropped", "checkpoint.restored")
"""Points that a life reaches once."""


def prepared(place: Path) -> str:
    with cues.open(place / "a") as a, cues.open(place / "b", "process") as b:
        a.queue("left")
        b.queue("right")
        b.queue("third")
        a.queue("in").appender().write_many([{"n": n} for n in range(4)])
    return str(place)


def left_pending(place: str) -> tuple[int, list[list[int]]]:
    with cues.open(Path(place, "a")) as a, cues.open(Path(place, "b"), "process") as b:
        queues = [a.queue("left"), b.queue("right"), b.queue("third")]
        found = len(list_transactions(a)) + len(list_transactions(b))
        return found, [numbers(queue, isolation="committed") for queue in queues]


@pytest.mark.slow
def test_a_start_drops_what_a_killed_instance_left_pending_on_every_queue(forks: Forks, tmp_path: Path) -> None:
    killed = 0
    for point in POINTS:
        for hit in (1, 2, 3):
            place = tmp_path / f"{point} {hit}"
            place.mkdir()
            where = prepared(place)
            killed += forks.run("test_txn_registration:crash", where, point, hit).killed
            if point in ONCE and hit > 1:  # the start of a successor that has something to drop dies too
                forks.run("test_txn_registration:crash", where, "consumer.before", hit)
                killed += forks.run("test_txn_registration:crash", where, point, 1).killed
            forks.run("test_txn_registration:live", where)
            assert left_pending(where) == (0, [[0, 3], [1], [2]]), (point, hit)
    assert killed > 2 * len(POINTS)


def test_control_without_the_rollback_messages_stay_pending(forks: Forks, tmp_path: Path) -> None:
    """The checkpoint before names no queue that the killed instance touched; its successor publishes elsewhere."""
    place = prepared(tmp_path)
    assert forks.run("test_txn_registration:crash", place, "consumer.before", 2).killed
    forks.run("test_txn_registration:live", place, "unrolled")
    left, committed = left_pending(place)
    assert left and committed == [[0, 3], [1], [2]]


# --- looking --------------------------------------------------------------------------------------


def test_status_names_consumers_and_pending_transactions_and_raises_no_fence(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", "process") as store:
        source, out = store.queue("in"), store.queue("out")
        source.appender().write_many([{"n": 0}, {"n": 1}])
        checkpoint = JSONFileCheckpoint(tmp_path / "totals.json")
        with Consumer(Copies(out), [source], checkpoint) as consumer, Publisher(name="import") as publisher:
            consumer.drain()
            publisher.publish_uncommitted(lambda _: out, {"n": 7}).wait()
            fence = checkpoint.lease()[0]
            with cues.open(tmp_path / "s", readonly=True) as looking:
                seen = metrics.of_store(looking)
            (known,), (pending,) = seen.consumers, seen.transactions
            assert (known.consumer, known.lag, known.sources[0].position) == ("totals", 0, 3) and known.pid
            assert (pending.owner, pending.messages, pending.log) == ("import", 1, "out") and pending.pid
            lines = [json.loads(line) for line in run("status", f"{tmp_path}/s", "--json").splitlines()]
            assert lines[-2]["consumer"] == "totals" and lines[-1]["transaction"]["owner"] == "import"
            with pytest.raises(errors.AlreadyRunning):
                forget(store, "totals")
            assert checkpoint.lease()[0] == fence
            publisher.abort()
        assert not list_transactions(store)
    run("forget", f"{tmp_path}/s#consumer:totals", "--yes")
    with cues.open(tmp_path / "s") as store, pytest.raises(errors.InvalidArgument, match="no consumer 'totals'"):
        forget(store, "totals")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app.commands, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout
