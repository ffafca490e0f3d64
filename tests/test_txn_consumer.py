"""The consumer: where transactions begin and end, what an application may do in them, and what ends it all.

That nothing is lost or doubled whatever dies when is shown by test_txn_crashes.py.
"""

from __future__ import annotations

import logging
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import seeds

import cues
from cues import faults
from cues.checkpoints import JSONFileCheckpoint, LMDBCheckpoint
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.storage.store_core import StoreCore
from cues.tools.compaction import compact
from cues.txn import Flags, build_uuid, journal_of
from cues.txn.consumer import Consumer, Defer
from cues.txn.publisher import Publisher
from cues.txn.reader import ReadCommitted


class Noted:
    """Writes down what it is given, by transaction; what a transaction commits is its numbers, under ``written``."""

    def __init__(self, note: Callable[[int], object] = lambda n: None) -> None:
        self.transactions: list[list[int]] = []
        self.finished: list[Future[None]] = []
        self.begun = 0
        self._note = note
        self._now: list[int] = []

    def begin(self) -> None:
        self.begun += 1

    def consume(self, envelope: Any, publisher: Any) -> None:
        self._note(envelope.message["n"])
        self._now.append(envelope.message["n"])

    def finalize(self, publisher: Any) -> Any:
        found, self._now = self._now, []
        self.transactions.append(found)
        return lambda state: state.setdefault("written", []).extend(found)

    def finish(self, commit: Future[None]) -> None:
        self.finished.append(commit)

    @property
    def told(self) -> list[int]:
        return [n for one in self.transactions for n in one]


class Clock:
    """A clock that is moved by hand only."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def tick(self, *_: Any) -> None:
        self.now += 1.0


@pytest.fixture
def checkpoint(tmp_path: Path) -> JSONFileCheckpoint:
    return JSONFileCheckpoint(tmp_path / "checkpoint.json")


def write(queue: Queue, *numbers: int) -> None:
    queue.appender().write_many([{"n": n} for n in numbers])


def publish(publisher: Publisher, queue: Queue, *numbers: int) -> None:
    for n in numbers:
        publisher.publish_uncommitted(lambda _: queue, {"n": n})
    publisher.flush()


def acknowledge(publisher: Publisher) -> None:
    publisher.append_ack_intents(publisher.build_ack_intents())


class Running:
    """A consumer that runs in a thread of its own."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.consumer.run()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.consumer.stop()
        self._thread.join()
        self.consumer.close()
        if self.error is not None:
            raise self.error


# --- what a transaction is ------------------------------------------------------------------------


def test_the_available_messages_are_one_transaction_and_a_drained_consumer_continues(
    store: Store, checkpoint: Any
) -> None:
    """A plain queue is a source as well: its messages have no identity, and an index each."""
    queue = store.queue("q")
    app = Noted()
    with Consumer(app, [queue], checkpoint) as consumer:
        consumer.drain()
        assert app.begun == 0 and app.transactions == []  # nothing to commit, nothing committed
        write(queue, 1, 2, 3)
        consumer.drain()
        write(queue, 4)
        consumer.drain()
        assert app.transactions == [[1, 2, 3], [4]]
        assert consumer.read_through == {f"{store.id.hex()}/q": 5}
    assert checkpoint.state == {"written": [1, 2, 3, 4]}


def test_a_successor_continues_at_the_checkpoint(store: Store, checkpoint: Any) -> None:
    queue = store.queue("q")
    write(queue, 1, 2)
    with Consumer(Noted(), [queue], checkpoint) as consumer:
        consumer.drain()
    write(queue, 3)
    app = Noted()
    again = JSONFileCheckpoint(checkpoint.path)
    with Consumer(app, [queue], again) as consumer:
        consumer.drain()
    assert app.transactions == [[3]] and again.state == {"written": [1, 2, 3]}


def test_pending_messages_begin_no_transaction_and_come_with_their_acknowledgement(
    store: Store, checkpoint: Any
) -> None:
    queue = store.queue("q")
    app = Noted()
    with Consumer(app, [queue], checkpoint) as consumer, Publisher() as publisher:
        publish(publisher, queue, 1, 2)
        consumer.drain()
        assert app.begun == 0
        acknowledge(publisher)
        consumer.drain()
        assert app.transactions == [[1, 2]]


def test_an_acknowledgement_alone_is_not_a_transaction_of_the_application_and_is_committed(
    store: Store, checkpoint: Any
) -> None:
    """It comes alone if the messages before it filled a transaction. An empty transaction is not finalized."""
    queue = store.queue("q")
    clock = Clock()
    app = Noted(clock.tick)
    with Publisher() as publisher:
        publish(publisher, queue, 1, 2)
        acknowledge(publisher)
    with Consumer(app, [queue], checkpoint, max_s=2, now=clock) as consumer:
        consumer.drain()
        assert app.transactions == [[1, 2]] and app.begun == 1 == len(app.finished)
        assert consumer.read_through == consumer.needed_from == {f"{store.id.hex()}/q": 4}
    assert checkpoint.restore().offsets == {f"{store.id.hex()}/q": 4}


def test_acknowledgements_are_reported_on_request(store: Store, checkpoint: Any) -> None:
    queue = store.queue("q")

    class Asking(Noted):
        def acknowledged(self, envelope: Any) -> None:
            self._now.append(-envelope.begin)

    app = Asking()
    with Consumer(app, [queue], checkpoint) as consumer, Publisher() as publisher:
        publish(publisher, queue, 1, 2)
        acknowledge(publisher)
        consumer.drain()
    assert app.transactions == [[1, 2, -3]]


def test_a_transaction_that_is_as_old_as_it_may_be_ends_in_the_middle_of_an_acknowledged_set(
    store: Store, checkpoint: Any
) -> None:
    """And a successor continues in the middle, without the consumed messages."""
    queue = store.queue("q")
    with Publisher() as publisher:
        publish(publisher, queue, *range(10))
        acknowledge(publisher)
    for ring in (8192, 1):
        clock = Clock()
        state = JSONFileCheckpoint(checkpoint.path.with_name(f"{ring}.json"))
        first, second = Noted(clock.tick), Noted(clock.tick)
        consumer = Consumer(first, [queue], state, max_s=3, now=clock, ring=ring)
        first._note = lambda n, c=consumer, tick=clock.tick: (tick(), c.stop() if n == 5 else None)  # type: ignore[misc]
        with consumer:
            consumer.run()
        assert first.transactions == [[0, 1, 2], [3, 4, 5]]
        with Consumer(second, [queue], JSONFileCheckpoint(state.path), max_s=3, now=clock, ring=ring) as consumer:
            consumer.drain()
        assert second.transactions == [[6, 7, 8], [9]]


def test_a_young_transaction_waits_for_more(store: Store, checkpoint: Any) -> None:
    """The clock is stopped, so it takes one message after another; then it is old enough, and is committed."""
    queue = store.queue("q")
    clock, came = Clock(), threading.Semaphore(0)
    app = Noted(lambda n: came.release())
    running = Running(Consumer(app, [queue], checkpoint, min_s=50, max_s=100, now=clock))
    for n in range(3):
        write(queue, n)
        came.acquire()
    assert app.transactions == []
    clock.now = 60
    write(queue, 3)
    came.acquire()
    running.stop()
    assert app.transactions[0][:3] == [0, 1, 2] and app.told == [0, 1, 2, 3]


@pytest.mark.parametrize("wait_for_ack", [True, False])
def test_waiting_for_acknowledgements_keeps_a_message_and_what_became_of_it_in_one_transaction(
    wait_for_ack: bool, store: Store, checkpoint: Any
) -> None:
    queue = store.queue("q")
    came, done = threading.Semaphore(0), threading.Semaphore(0)
    app = Noted(lambda n: came.release())
    app.finish = lambda commit: commit.add_done_callback(lambda _: done.release())  # type: ignore[method-assign]
    with Publisher() as publisher:
        publish(publisher, queue, 2)
        running = Running(Consumer(app, [queue], checkpoint, max_s=100, now=Clock(), wait_for_ack=wait_for_ack))
        write(queue, 1)
        came.acquire()
        if not wait_for_ack:
            done.acquire()
        acknowledge(publisher)
        came.acquire()
        running.stop()
    assert app.transactions == ([[1, 2]] if wait_for_ack else [[1], [2]])


def test_what_is_never_acknowledged_is_waited_for_no_longer_than_a_transaction_may_last(
    store: Store, checkpoint: Any
) -> None:
    """Once: the checkpoint clears it, and the next transactions do not wait for it."""
    queue = store.queue("q")
    done = threading.Semaphore(0)
    app = Noted()
    app.finish = lambda commit: commit.add_done_callback(lambda _: done.release())  # type: ignore[method-assign]
    with Publisher() as publisher:
        publish(publisher, queue, 9)
        write(queue, 1)
        running = Running(Consumer(app, [queue], checkpoint, max_s=0.2, wait_for_ack=True))
        done.acquire()
        write(queue, 2)
        done.acquire()
        running.stop()
    assert app.transactions == [[1], [2]]


def test_a_deferred_message_is_the_first_of_the_next_transaction(store: Store, checkpoint: Any) -> None:
    queue = store.queue("q")
    write(queue, *range(7))

    def note(n: int) -> None:
        if len(app._now) == 3:
            raise Defer

    app = Noted(note)
    with Consumer(app, [queue], checkpoint) as consumer:
        consumer.drain()
    assert app.transactions == [[0, 1, 2], [3, 4, 5], [6]]
    assert checkpoint.state == {"written": list(range(7))}


def test_to_defer_the_first_message_is_refused(store: Store, checkpoint: Any) -> None:
    queue = store.queue("q")
    write(queue, 1)

    def note(n: int) -> None:
        raise Defer

    with pytest.raises(cues.CuesError, match="first message of a transaction"):
        Consumer(Noted(note), [queue], checkpoint).drain()


def test_a_busy_source_does_not_starve_the_others(store: Store, checkpoint: Any) -> None:
    busy, calm = store.queue("busy"), store.queue("calm")
    write(busy, *range(100))
    write(calm, 100, 101)
    app = Noted()
    with Consumer(app, [busy, calm], checkpoint) as consumer:
        consumer.drain()
    assert [n for n in app.told if n < 100] == list(range(100))
    assert app.told.index(101) < 5


def test_a_commit_under_way_lets_the_next_transaction_be_read_and_not_finalized(store: Store, checkpoint: Any) -> None:
    queue = store.queue("q")
    write(queue, 1, 2)
    let, came = threading.Event(), threading.Semaphore(0)

    class Slow:
        def restore(self) -> Any:
            return checkpoint.restore()

        def commit(self, made: Any, work: Any) -> None:
            let.wait()
            checkpoint.commit(made, work)

    app = Noted(lambda n: came.release())
    # The clock is stopped: after a second (max_s) the second transaction would take no more messages.
    running = Running(Consumer(app, [queue], Slow(), now=Clock()))
    came.acquire()
    came.acquire()
    while not app.transactions:
        pass
    for n in range(3, 6):
        write(queue, n)
        came.acquire()  # consumed, while the first is not committed
    assert app.transactions == [[1, 2]] and checkpoint.state == {}
    let.set()
    running.stop()
    assert app.transactions == [[1, 2], [3, 4, 5]]


def test_what_the_application_publishes_waits_for_a_slow_commit_and_not_the_application(
    store: Store, checkpoint: Any
) -> None:
    """Only a transaction as old as it may be holds back ready messages; here the clock is stopped."""
    queue, out = store.queue("q"), store.queue("out")
    let, begun, came = threading.Event(), threading.Event(), threading.Semaphore(0)

    class Slow:
        def restore(self) -> Any:
            return checkpoint.restore()

        def commit(self, made: Any, work: Any) -> None:
            begun.set()
            assert let.wait(60)
            checkpoint.commit(made, work)

    app = Passing(out, lambda n: came.release())
    write(queue, 0)
    running = Running(Consumer(app, [queue], Slow(), now=Clock()))
    try:
        assert begun.wait(60) and came.acquire(timeout=60)
        for n in range(1, 20):
            write(queue, n)
            assert came.acquire(timeout=60), f"the message {n} waits for the first commit"
        assert checkpoint.state == {} and committed(out) == []
    finally:
        let.set()
        running.stop()
    assert app.told == committed(out) == list(range(20))
    assert app.transactions == [[0], list(range(1, 20))]


def test_empty_sources_are_not_looked_at_for_every_message_of_another(
    store: Store, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = [store.queue(f"q-{n}") for n in range(64)]
    write(queues[40], *range(300))
    looks = [0]
    real = StoreCore.view

    def view(self: StoreCore) -> Any:
        looks[0] += 1
        return real(self)

    app = Noted()
    with Consumer(app, queues, checkpoint) as consumer:
        monkeypatch.setattr(StoreCore, "view", view)
        consumer.drain()
    assert app.told == list(range(300)) and looks[0] < 5 * 300


# --- what ends it ---------------------------------------------------------------------------------


def test_every_begin_has_one_finish_that_says_what_became_of_it(store: Store, checkpoint: Any) -> None:
    queue = store.queue("q")
    write(queue, *range(4))

    def note(n: int) -> None:
        if len(app._now) == 2:
            raise Defer
        if n == 3:
            raise ZeroDivisionError

    app = Noted(note)
    with pytest.raises(ZeroDivisionError):
        Consumer(app, [queue], checkpoint).drain()
    assert app.begun == 2 == len(app.finished)
    assert app.finished[0].exception() is None and isinstance(app.finished[1].exception(), ZeroDivisionError)
    assert checkpoint.state == {"written": [0, 1]}
    again = Noted()
    Consumer(again, [queue], JSONFileCheckpoint(checkpoint.path)).drain()
    assert again.transactions == [[2, 3]]


def test_a_begin_that_fails_has_no_finish(store: Store, checkpoint: Any) -> None:
    queue = store.queue("q")
    write(queue, 1)
    app = Noted()
    app.begin = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(ZeroDivisionError):
        Consumer(app, [queue], checkpoint).drain()
    assert app.finished == []


def test_a_takeover_is_heard_by_the_one_that_lost(store: Store, checkpoint: Any) -> None:
    queue, out = store.queue("q"), store.queue("out")
    write(queue, 1)

    class Passing(Noted):
        def consume(self, envelope: Any, publisher: Any) -> None:
            super().consume(envelope, publisher)
            publisher.publish_uncommitted(lambda _: out, envelope.message)

    app = Passing()
    consumer = Consumer(app, [queue], checkpoint)
    consumer.drain()
    JSONFileCheckpoint(checkpoint.path).restore()
    write(queue, 2)
    with pytest.raises(cues.Fenced):
        consumer.drain()
    assert isinstance(app.finished[1].exception(), cues.Fenced)
    with pytest.raises(cues.CuesError, match="ended"):
        consumer.drain()
    with Consumer(Passing(), [queue], JSONFileCheckpoint(checkpoint.path)) as successor:
        successor.drain()
    assert [e.message["n"] for e in ReadCommitted(out) if not e.acknowledgement] == [1, 2]


def test_a_takeover_is_heard_in_front_of_a_queue_whose_acknowledgement_will_not_come(
    store: Store, checkpoint: Any
) -> None:
    """The next transaction publishes to the same queue, and waits there for a commit that is refused."""
    queue, out = store.queue("q"), store.queue("out")
    write(queue, 1, 2)
    waits = threading.Event()

    class Overtaken:
        def restore(self) -> Any:
            return checkpoint.restore()

        def commit(self, made: Any, work: Any) -> None:
            waits.wait()
            JSONFileCheckpoint(checkpoint.path).restore()
            checkpoint.commit(made, work)

    def note(n: int) -> None:
        if app._now and n == 2:
            raise Defer

    class Passing(Noted):
        def consume(self, envelope: Any, publisher: Any) -> None:
            super().consume(envelope, publisher)
            if envelope.message["n"] == 2:
                threading.Timer(0.05, waits.set).start()
            publisher.publish_uncommitted(lambda _: out, envelope.message)

    app = Passing(note)
    with pytest.raises(cues.Fenced):
        Consumer(app, [queue], Overtaken()).drain()
    assert app.begun == 2 == len(app.finished)
    assert all(isinstance(one.exception(), cues.Fenced) for one in app.finished)
    assert list(out.tailer(isolation="committed")) == [] and checkpoint.state == {}


def test_work_that_fails_ends_it_and_is_done_by_the_successor(store: Store, checkpoint: Any) -> None:
    queue = store.queue("q")
    write(queue, 1)
    app = Noted()
    app.finalize = lambda publisher: lambda state: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        Consumer(app, [queue], checkpoint).drain()
    again = JSONFileCheckpoint(checkpoint.path)
    Consumer(Noted(), [queue], again).drain()
    assert again.state == {"written": [1]}


def test_stop_commits_what_was_consumed(store: Store, checkpoint: Any) -> None:
    queue = store.queue("q")
    write(queue, 1, 2)
    came = threading.Semaphore(0)
    running = Running(Consumer(Noted(lambda n: came.release()), [queue], checkpoint, min_s=500, max_s=1000))
    came.acquire()
    came.acquire()
    running.stop()
    assert checkpoint.state == {"written": [1, 2]}


def test_a_consumer_that_sleeps_is_stopped(store: Store, checkpoint: Any) -> None:
    Running(Consumer(Noted(), [store.queue("q")], checkpoint)).stop()


def test_a_stopped_consumer_continues_and_reports_that_it_did_not_reach_the_end(store: Store, checkpoint: Any) -> None:
    """One stop ends one run or drain, also the next one where none is under way."""
    queue = store.queue("q")
    write(queue, *range(6))
    app = Noted(lambda n: consumer.stop() if n in (1, 3) else None)
    with Consumer(app, [queue], checkpoint) as consumer:
        consumer.run()
        assert app.told == [0, 1]
        assert consumer.drain() is False
        assert app.told == [0, 1, 2, 3]
        consumer.stop()
        assert consumer.drain() is False and app.told == [0, 1, 2, 3]
        assert consumer.drain() is True and app.told == [0, 1, 2, 3, 4, 5]
        assert consumer.drain() is True
    assert checkpoint.state == {"written": app.told}


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.interpreted
def test_sources_and_durations_that_cannot_be_meant_are_refused(store: Store, checkpoint: Any) -> None:
    queue = store.queue("q")
    for sources in ([], [queue, store.queue("q")]):
        with pytest.raises(cues.errors.InvalidArgument, match="each once"):
            Consumer(Noted(), sources, checkpoint)
    for options in ({"max_s": 0}, {"min_s": 2, "max_s": 1}, {"min_s": -1}):
        with pytest.raises(cues.errors.InvalidArgument, match="max_s is"):
            Consumer(Noted(), [queue], checkpoint, **options)
    wrong: Any
    for wrong, words in ((queue, "a list"), ("q", "A queue was expected, found 'q'"), ([5], "found 5")):
        with pytest.raises(cues.errors.InvalidArgument, match=words):
            Consumer(Noted(), wrong, checkpoint)
    for option in ({"on_gap": "pass"}, {"missing": "all"}):
        with pytest.raises(cues.errors.InvalidArgument, match="one of"):
            Consumer(Noted(), [queue], checkpoint, **option)  # type: ignore[arg-type]
    for wrong in (object(), "c.json", None):
        with pytest.raises(cues.errors.InvalidArgument, match="no consume and no finalize"):
            Consumer(wrong, [queue], checkpoint)
        with pytest.raises(cues.errors.InvalidArgument, match="no restore and no commit"):
            Consumer(Noted(), [queue], wrong)


def test_a_source_that_ends_before_the_checkpoint_is_refused(tmp_path: Path, checkpoint: Any) -> None:
    """An older copy of its store: what was consumed there is not there any more."""
    with cues.open(tmp_path / "store") as store:
        write(store.queue("q"), 1)
    shutil.copytree(tmp_path / "store", tmp_path / "older")
    with cues.open(tmp_path / "store") as store:
        write(store.queue("q"), 2, 3)
        Consumer(Noted(), [store.queue("q")], checkpoint).drain()
    with (
        cues.open(tmp_path / "older") as store,
        pytest.raises(cues.errors.Diverged, match=r"is at 4 .* ends at 2"),
    ):
        Consumer(Noted(), [store.queue("q")], JSONFileCheckpoint(checkpoint.path)).drain()


def test_purged_messages_that_were_not_consumed_are_a_gap(store: Store, checkpoint: Any) -> None:
    queue = store.queue("q")
    write(queue, 1)
    Consumer(Noted(), [queue], checkpoint).drain()
    write(queue, 2, 3, 4)
    queue.purge(before=4)
    with pytest.raises(cues.MessagesPurged):
        Consumer(Noted(), [queue], JSONFileCheckpoint(checkpoint.path)).drain()


def test_what_an_open_transaction_needs_is_not_to_be_purged(store: Store, tmp_path: Path) -> None:
    """A successor reads it again when it is acknowledged. No reader needs the messages before it."""
    queue = store.queue("q")
    journal = f"{store.id.hex()}/q"
    for number, purged in enumerate(("needed_from", "read_through")):
        path = tmp_path / f"{number}.json"
        with Publisher() as publisher:
            write(queue, 1, 2)
            publish(publisher, queue, 3)
            write(queue, 4)
            with Consumer(Noted(), [queue], JSONFileCheckpoint(path)) as consumer:
                consumer.drain()
            assert consumer.needed_from[journal] == queue.last_index - 1 < consumer.read_through[journal]
            queue.purge(before=getattr(consumer, purged)[journal])
            acknowledge(publisher)
        app = Noted()
        if purged == "needed_from":
            Consumer(app, [queue], JSONFileCheckpoint(path)).drain()
            assert app.told == [3]
        else:
            with pytest.raises(cues.txn.Gap):
                Consumer(app, [queue], JSONFileCheckpoint(path)).drain()


class Passing(Noted):
    """Publishes what it consumes."""

    def __init__(self, out: Queue, note: Callable[[int], object] = lambda n: None) -> None:
        super().__init__(note)
        self._out = out

    def consume(self, envelope: Any, publisher: Any) -> None:
        super().consume(envelope, publisher)
        publisher.publish_uncommitted(lambda _: self._out, {"n": envelope.message["n"]})


def committed(queue: Queue) -> list[int]:
    return [e.message["n"] for e in ReadCommitted(queue) if not e.acknowledgement]


def commit_and_die(queue: Queue, elsewhere: Path, checkpoint: JSONFileCheckpoint) -> None:
    """Pass the queue on to "out" elsewhere, and end between the commit and its acknowledgement."""

    def die(point: str) -> None:
        raise ZeroDivisionError

    faults.arm("consumer.committed", 1, die)
    with cues.open(elsewhere) as other, pytest.raises(ZeroDivisionError):
        Consumer(Passing(other.queue("out")), [queue], checkpoint).drain()
    faults.disarm()


def test_a_transaction_is_not_lost_where_the_store_of_its_output_is_away_at_the_next_start(
    tmp_path: Path, store: Store, checkpoint: Any
) -> None:
    """The start ends, as often as it is tried, and what is to be acknowledged there stays in the checkpoint."""
    queue, elsewhere, away = store.queue("q"), tmp_path / "elsewhere", tmp_path / "away"
    write(queue, 1)
    commit_and_die(queue, elsewhere, checkpoint)
    elsewhere.rename(away)
    write(queue, 2)
    for _ in range(2):
        with pytest.raises(cues.errors.StoreNotFound, match="missing='skip'"):
            Consumer(Noted(), [queue], JSONFileCheckpoint(checkpoint.path)).drain()
    away.rename(elsewhere)
    with cues.open(elsewhere) as other:
        assert committed(other.queue("out")) == []
        Consumer(Passing(other.queue("out")), [queue], JSONFileCheckpoint(checkpoint.path)).drain()
        assert committed(other.queue("out")) == [1, 2]


def test_a_lost_store_is_skipped_on_request_with_a_warning(
    tmp_path: Path, store: Store, checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    queue, elsewhere = store.queue("q"), tmp_path / "elsewhere"
    write(queue, 1)
    commit_and_die(queue, elsewhere, checkpoint)
    shutil.rmtree(elsewhere)
    write(queue, 2)
    app = Noted()
    with caplog.at_level(logging.WARNING, "cues.txn"):
        Consumer(app, [queue], JSONFileCheckpoint(checkpoint.path), missing="skip").drain()
    assert app.told == [2] and "its readers never see" in caplog.text and "out" in caplog.text


def test_an_acknowledgement_for_a_removed_queue_is_reported_and_stops_no_consumer(
    tmp_path: Path, store: Store, checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    queue, elsewhere = store.queue("q"), tmp_path / "elsewhere"
    write(queue, 1)
    commit_and_die(queue, elsewhere, checkpoint)
    with cues.open(elsewhere) as other:
        other.queue("out").delete()
    compact(elsewhere, remove=["out"])
    write(queue, 2)
    with pytest.raises(cues.QueueNotFound):
        Consumer(Noted(), [queue], JSONFileCheckpoint(checkpoint.path), missing="refuse").drain()
    app = Noted()
    with caplog.at_level(logging.WARNING, "cues.txn"):
        Consumer(app, [queue], JSONFileCheckpoint(checkpoint.path)).drain()
    assert app.told == [2] and "out" in caplog.text


@pytest.mark.parametrize("what", ["rolled back", "repeated"])
def test_what_hands_out_nothing_moves_the_checkpoint_and_may_be_purged(
    what: str, store: Store, checkpoint: Any
) -> None:
    queue = store.queue("q")
    app = Noted()
    with Consumer(app, [queue], checkpoint) as consumer, Publisher() as publisher:
        write(queue, 1)
        consumer.drain()
        if what == "rolled back":
            publish(publisher, queue, 2, 3)
            consumer.drain()  # pending: a successor must read it again
            assert consumer.needed_from == {journal_of(queue): 2}
            publisher.abort()
        else:
            stamp = build_uuid(publisher.id, 160, Flags.OUTSIDE_TXN)
            queue.appender().write_many([{"n": 2, "q/uuid": stamp}])
            consumer.drain()
            queue.appender().write_many([{"n": 2, "q/uuid": stamp}] * 3)
        consumer.drain()
        end = {journal_of(queue): queue.last_index + 1}
        assert consumer.read_through == consumer.needed_from == end
        queue.purge(before=consumer.needed_from[journal_of(queue)])
        assert len(queue) == 0
    write(queue, 4)
    again = Noted()
    Consumer(again, [queue], JSONFileCheckpoint(checkpoint.path)).drain()
    assert again.told == [4] and app.told == ([1] if what == "rolled back" else [1, 2])
    assert app.begun == len(app.transactions) == len(app.finished)  # an empty transaction is not finalized


def test_a_gap_is_skipped_on_request_and_is_not_a_gap_afterwards(
    store: Store, checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where nothing is left after it, and where the purged messages are of an open transaction."""
    queue = store.queue("q")
    with Publisher() as publisher:
        write(queue, 1)
        publish(publisher, queue, 2, 3)
        Consumer(Noted(), [queue], checkpoint).drain()
        write(queue, 4)
        queue.purge(before=queue.last_index + 1)
        with pytest.raises(cues.txn.Gap, match="on_gap='skip'"):
            Consumer(Noted(), [queue], JSONFileCheckpoint(checkpoint.path)).drain()
        app = Noted()
        with caplog.at_level(logging.WARNING, "cues.txn"):
            Consumer(app, [queue], JSONFileCheckpoint(checkpoint.path), on_gap="skip").drain()
        assert app.told == [] and "4 to 4 were purged and are skipped" in caplog.text
        Consumer(app, [queue], JSONFileCheckpoint(checkpoint.path)).drain()  # as any start, from now on
        publish(publisher, queue, 5)
        acknowledge(publisher)
        with pytest.raises(cues.txn.Gap, match="2 to 4"):
            Consumer(Noted(), [queue], JSONFileCheckpoint(checkpoint.path)).drain()
        Consumer(app, [queue], JSONFileCheckpoint(checkpoint.path), on_gap="skip").drain()
    assert app.told == [5]


def test_state_in_a_store_and_messages_for_it_are_one_commit(store: Store) -> None:
    """With the checkpoint in a store, what is for that store needs no acknowledgement."""
    queue, out = store.queue("q"), store.queue("out")
    write(queue, 1, 2, 3)

    class Sums:
        def __init__(self) -> None:
            self.sum = 0

        def consume(self, envelope: Any, publisher: Any) -> None:
            self.sum += envelope.message["n"]

        def finalize(self, publisher: Any) -> Any:
            added, self.sum = self.sum, 0

            def work(writes: Any) -> None:
                writes.state["sum"] = writes.state.get("sum", 0) + added
                writes.append(out, [{"sum": writes.state["sum"]}])

            return work

    checkpoint = LMDBCheckpoint(store, "sums")
    with Consumer(Sums(), [queue], checkpoint) as consumer:
        consumer.drain()
        write(queue, 10)
        consumer.drain()
    assert checkpoint.state == {"sum": 16} and list(out.tailer()) == [{"sum": 6}, {"sum": 16}]


def test_a_checkpoint_in_a_store_is_on_the_disk_before_others_hear_of_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store is of the kind whose commits are not durable by themselves."""
    order: list[str] = []

    def noted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if owner is not Store or self.id == store.id:
                order.append(name)
            return real(self, *arguments, **keywords)

        monkeypatch.setattr(owner, name, call)

    with cues.open(tmp_path / "elsewhere") as elsewhere:
        out = elsewhere.queue("out")

        class Passing(Noted):
            def consume(self, envelope: Any, publisher: Any) -> None:
                publisher.publish_uncommitted(lambda _: out, envelope.message)

            def finalize(self, publisher: Any) -> Any:
                return None

        write(store.queue("q"), 1)
        with Consumer(Passing(), [store.queue("q")], LMDBCheckpoint(store, "passing")) as consumer:
            for owner, name in ((Store, "sync"), (LMDBCheckpoint, "_write"), (Publisher, "append_ack_intents")):
                noted(owner, name)
            consumer.drain()
    # The first sync: the store names the other one durably, before a message is pending there.
    assert order == ["append_ack_intents", "sync", "sync", "_write", "sync", "append_ack_intents"]


# --- at random ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds.among(range(12)))
def test_whatever_cuts_and_interrupts_it_it_sees_what_is_committed(seed: int, store: Store, checkpoint: Any) -> None:
    """Producers over two queues, some of whose transactions come to nothing; lives that end at any message."""
    chance = random.Random(seed)
    print(f"CUES_TEST_SEED={seed}")
    queues = [store.queue("a"), store.queue("b")]
    number = iter(range(10**6))
    seen: list[int] = []

    def life(end: int) -> None:
        """Consumes until it has seen so many, with transactions of any length, and dies in the middle of one."""
        left = [end]

        def note(n: int) -> None:
            if not left[0]:
                raise ZeroDivisionError
            left[0] -= 1
            if app._now and chance.random() < 0.2:
                left[0] += 1
                raise Defer

        app = Noted(note)
        made = JSONFileCheckpoint(checkpoint.path)
        try:
            with Consumer(app, queues, made, ring=chance.choice([1, 2, 5, 100])) as consumer:
                consumer.drain()
        except ZeroDivisionError:
            pass
        seen[:] = made.state.get("written", [])

    for _ in range(4):
        publishers = [Publisher() for _ in range(2)]
        for _ in range(chance.randrange(1, 8)):
            publisher = chance.choice(publishers)
            for _ in range(chance.randrange(1, 6)):
                publisher.publish_uncommitted(lambda _: chance.choice(queues), {"n": next(number)})
            if chance.random() < 0.3:
                write(chance.choice(queues), next(number))
            if chance.random() < 0.3:
                life(chance.randrange(20))
            if chance.random() < 0.7:
                acknowledge(publisher)
        for publisher in publishers:
            publisher.close()  # what it has pending stays so
        life(chance.randrange(60))
    life(10**6)
    wanted = [[e.message["n"] for e in ReadCommitted(queue) if not e.acknowledgement] for queue in queues]
    assert sorted(seen) == sorted(wanted[0] + wanted[1])
    for one in wanted:
        assert [n for n in seen if n in one] == one
