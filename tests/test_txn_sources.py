"""The sources of a consumer: where it begins, what it does about purged messages, and partitions that are added."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import cues
from cues import testing
from cues.checkpoints import JSONFileCheckpoint
from cues.errors import Gap, InvalidArgument
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.txn import Consumer, Publisher, ReadFrom, journal_of


class Seen:
    """Keeps the numbers that it consumed."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.came = threading.Condition()

    def consume(self, envelope: Any, publisher: Any) -> None:
        with self.came:
            self.numbers.append(envelope.message["n"])
            self.came.notify_all()

    def finalize(self, publisher: Any) -> None:
        return None

    def wait_for(self, count: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.numbers) >= count, 60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.json"


def write(queue: Queue, *numbers: int) -> None:
    queue.appender().write_many([{"n": n} for n in numbers])


def drain(path: Path, *sources: Any, **options: Any) -> list[int]:
    """Consume all there is, with a new consumer; return the numbers."""
    app = Seen()
    with Consumer(app, sources, JSONFileCheckpoint(path), **options) as consumer:
        consumer.drain()
    return app.numbers


# --- start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "numbers"), [("first", [0, 1, 2, 3]), ("last", []), (3, [2, 3]), (5, []), (timedelta(0), [2, 3])]
)
def test_a_new_consumer_begins_at_its_start_position(store: Store, path: Path, start: Any, numbers: list[int]) -> None:
    queue = store.queue("q")
    with testing.Clock() as clock:
        write(queue, 0, 1)
        clock.advance(60)
        if isinstance(start, timedelta):
            start = clock.now
        write(queue, 2, 3)
    assert drain(path, ReadFrom(queue, start=start)) == numbers


def test_the_start_counts_once(store: Store, path: Path) -> None:
    """Messages that come while no instance runs are not skipped by the next one."""
    queue = store.queue("q")
    write(queue, 0, 1)
    assert drain(path, ReadFrom(queue, start="last")) == []
    write(queue, 2)
    assert drain(path, ReadFrom(queue, start="last")) == [2]
    assert drain(path, ReadFrom(queue, start=1)) == []


@pytest.mark.parametrize("point", ["checkpoint.restored", "consumer.repeated", "checkpoint.after", "consumer.before"])
def test_a_death_after_the_start_keeps_its_position(store: Store, path: Path, point: str) -> None:
    """The first instance takes a position, and dies before or after it is committed; messages come; then the next."""
    queue = store.queue("q")
    write(queue, 0)
    with testing.crash(point, how="raise"):
        try:
            drain(path, ReadFrom(queue, start="last"))
        except testing.Crashed:
            died = True
        else:
            died = False
    read = JSONFileCheckpoint(path).read()
    write(queue, 1)
    begun = read is not None and journal_of(queue) in read.offsets
    assert begun == (point not in ("checkpoint.restored", "consumer.repeated")) and died == (point != "consumer.before")
    assert drain(path, ReadFrom(queue, start="last")) == ([1] if begun else [])


def test_partitions_begin_together(store: Store, path: Path) -> None:
    queue = store.queue("parts", partitions=3, key="n")
    write(queue, *range(20))
    assert drain(path, ReadFrom(queue, start="last")) == []
    write(queue, *range(20, 40))
    assert sorted(drain(path, ReadFrom(queue, start="last"))) == list(range(20, 40))


# --- gaps -----------------------------------------------------------------------------------------------


def test_a_gap_names_reader_and_count_and_is_counted_where_it_is_skipped(store: Store, path: Path) -> None:
    near, far = store.queue("near"), store.queue("far")
    for queue in (near, far):
        write(queue, 0)
    drain(path, near, far)
    for queue in (near, far):
        write(queue, 1, 2, 3)
        queue.purge(before=4)
    with pytest.raises(Gap, match=r"2 to 3 of queue 'far' .* by the consumer of .*checkpoint.json.*\(2 in all\)") as e:
        drain(path, ReadFrom(near, on_gap="skip"), far)
    assert (e.value.queue, e.value.first, e.value.last) == ("far", 2, 3) and "checkpoint.json" in e.value.reader
    app = Seen()
    with Consumer(app, [ReadFrom(near, on_gap="skip"), far], JSONFileCheckpoint(path), on_gap="skip") as consumer:
        consumer.drain()
        assert consumer.skipped == {journal_of(near): 2, journal_of(far): 2}
    assert app.numbers == [3, 3]


def test_an_index_to_start_at_that_was_purged_is_a_gap(store: Store, path: Path) -> None:
    queue = store.queue("q")
    write(queue, 0, 1, 2)
    queue.purge(before=3)
    with pytest.raises(Gap, match=r"\(1 in all\)"):
        drain(path, ReadFrom(queue, start=2))


# --- growth ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [1, 2])
def test_partitions_that_are_added_are_read_also_by_a_successor(store: Store, path: Path, before: int) -> None:
    queue = store.queue("parts", partitions=before)
    write(queue, *range(10))
    assert sorted(drain(path, ReadFrom(queue, start="first"))) == list(range(10))
    with cues.open(store.path) as other:
        other.queue("parts").grow(4)
        write(other.queue("parts"), *range(10, 30))
    # "last" is for a queue that the checkpoint does not have; this one it has.
    assert sorted(drain(path, ReadFrom(queue, start="last"))) == list(range(10, 30))


@pytest.mark.parametrize("before", [1, 2])
def test_growth_is_followed_while_the_consumer_runs(store: Store, path: Path, before: int) -> None:
    """Asleep, and with a transaction that is read again after the growth."""
    queue = store.queue("parts", partitions=before)
    app = Seen()
    with (
        Consumer(app, [queue], JSONFileCheckpoint(path), ring=1) as consumer,
        Publisher() as publisher,
        cues.open(store.path) as other,
    ):
        thread = threading.Thread(target=consumer.run)
        thread.start()
        write(queue, 0)
        app.wait_for(1)
        first = other.queue("parts").partition(0)
        for n in (1, 2, 3):
            publisher.publish_uncommitted(lambda _: first, {"n": n})
        publisher.flush()
        other.queue("parts").grow(5)
        write(other.queue("parts").partition(4), 4)
        app.wait_for(2)
        publisher.append_ack_intents(publisher.build_ack_intents())
        app.wait_for(5)
        consumer.stop()
        thread.join()
    assert app.numbers[:2] == [0, 4] and app.numbers[2:] == [1, 2, 3]


def test_a_handle_on_a_partition_reads_only_that_one(store: Store, path: Path) -> None:
    queue = store.queue("parts", partitions=2)
    write(queue.partition(0), 0)
    write(queue.partition(1), 1)
    assert drain(path, queue.partition(1)) == [1]
    queue.grow(3)
    write(queue.partition(2), 2)
    assert drain(path, queue.partition(1)) == []


@pytest.mark.interpreted
def test_refusals(store: Store, path: Path) -> None:
    queue, parts = store.queue("q"), store.queue("parts", partitions=2)
    write(queue, 0)
    for call, text in (
        (lambda: ReadFrom(queue, start="end"), "pass 'first', 'last'"),  # type: ignore[arg-type]
        (lambda: ReadFrom(queue, start=True), "pass 'first', 'last'"),
        (lambda: ReadFrom(queue, start=datetime(2026, 1, 1)), "no time zone"),
        (lambda: ReadFrom(parts, start=3), "indices of its own"),
        (lambda: ReadFrom(queue, on_gap="pass"), "pass 'raise'"),  # type: ignore[arg-type]
        (lambda: ReadFrom("q"), "A queue was expected"),  # type: ignore[arg-type]
        (lambda: drain(path, parts, parts.partition(1)), "each once"),
        (lambda: drain(path, ReadFrom(queue, start=7)), r"start=7 of 'q'"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            call()
    assert drain(path, ReadFrom(queue, start=datetime(2000, 1, 1, tzinfo=UTC))) == [0]
