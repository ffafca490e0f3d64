"""Turns: instances of one consumer wait for each other by a lease, and do not fence each other for ever."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Child

import cues
from cues.checkpoints import JSONFileCheckpoint, LMDBCheckpoint, SQLCheckpoint
from cues.errors import Fenced, InvalidArgument
from cues.queues.store import Store
from cues.storage import locks
from cues.txn import Checkpoint, Consumer
from cues.txn.turns import Turn, _process, is_over

LONG_S = 600.0
"""A lease that does not end by itself within a test."""


class Seen:
    """Writes down its number for each message, and calls back."""

    def __init__(self, number: int, seen: list[tuple[int, int]], then: Callable[[], object] = lambda: None) -> None:
        self.number, self.seen, self._then = number, seen, then
        self.starts = 0

    def start(self) -> None:
        self.starts += 1

    def consume(self, envelope: Any, publisher: Any) -> None:
        self.seen.append((self.number, envelope.message["n"]))
        self._then()

    def finalize(self, publisher: Any) -> None:
        return None


@pytest.fixture(params=["json", "lmdb", "sql"])
def make(request: pytest.FixtureRequest, tmp_path: Path, store: Store) -> Callable[[], Any]:
    """Make a new object on one checkpoint."""
    if request.param == "json":
        return lambda: JSONFileCheckpoint(tmp_path / "checkpoint.json")
    if request.param == "lmdb":
        return lambda: LMDBCheckpoint(store, "c")
    return lambda: SQLCheckpoint(tmp_path / "c.db", "c")


def test_a_lease_is_kept_with_the_checkpoint_and_belongs_to_its_fence(make: Callable[[], Any]) -> None:
    old, new = make(), make()
    assert old.lease() == (0, "")
    with pytest.raises(cues.CuesError, match=r"restore\(\) first"):
        old.set_lease("x")
    old.restore()
    old.set_lease("one")
    assert new.lease() == (1, "one")
    new.restore()
    new.set_lease("two")
    with pytest.raises(Fenced):
        old.set_lease("")
    assert old.lease() == (2, "two")
    with pytest.raises(Fenced):
        old.restore(1)  # for one that waited, and was late
    new.commit(Checkpoint({"j": 1}))
    new.set_lease("")
    assert old.lease() == (2, "")


def test_two_supervised_instances_take_turns(make: Callable[[], Any], store: Store) -> None:
    """Each is started again for ever, as a supervisor does; today's lease leaves one start for each turn."""
    queue = store.queue("q")
    seen: list[tuple[int, int]] = []
    done = threading.Event()
    apps: list[Seen] = []
    consumers: list[Consumer] = []
    errors: list[BaseException] = []

    def supervise(number: int) -> None:
        checkpoint = make()
        while not done.is_set():
            app = Seen(number, seen)
            apps.append(app)
            with Consumer(app, [queue], checkpoint, lease_s=LONG_S) as consumer:
                consumers.append(consumer)
                app._then = lambda c=consumer: (len(seen) % 50 == 0 and c.stop()) or (len(seen) >= 300 and done.set())
                if done.is_set():
                    return
                try:
                    consumer.run()
                except BaseException as error:
                    errors.append(error)

    queue.appender().write_many([{"n": n} for n in range(300)])
    threads = [threading.Thread(target=supervise, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    assert done.wait(120)
    while any(thread.is_alive() for thread in threads):
        for consumer in list(consumers):
            consumer.stop()
        threads[0].join(0.05)
    assert not errors
    assert [n for _, n in seen] == list(range(300))
    assert sum(app.starts for app in apps) <= 6 + 2  # a turn for each 50 messages, and the ends


def test_control_without_a_lease_a_second_instance_takes_over_at_once(make: Callable[[], Any], store: Store) -> None:
    queue = store.queue("q")
    queue.appender().write({"n": 0})
    begun = threading.Event()
    first = Consumer(Seen(1, [], begun.set), [queue], make(), lease_s=0)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            first.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    with Consumer(Seen(2, []), [queue], make(), lease_s=0) as second:
        second.drain()
    queue.appender().write({"n": 1})
    thread.join(60)
    assert isinstance(errors[0], Fenced)


def test_a_waiting_instance_can_be_stopped_and_has_not_taken_over(make: Callable[[], Any], store: Store) -> None:
    queue = store.queue("q")
    owner = make()
    turn = Turn(owner, LONG_S)
    turn.begin(owner.restore)
    app = Seen(1, [])
    with Consumer(app, [queue], make(), lease_s=LONG_S) as consumer:
        threading.Timer(0.05, consumer.stop).start()
        assert consumer.drain() is False
        assert app.starts == 0
        owner.commit(Checkpoint({"j": 1}))  # not fenced
        turn.end()
        assert consumer.drain() is True and app.starts == 1
    with pytest.raises(Fenced):
        owner.commit(Checkpoint({"j": 2}))


def test_an_instance_that_lost_its_lease_hears_of_it_while_it_sleeps(store: Store, tmp_path: Path) -> None:
    queue = store.queue("q")
    queue.appender().write({"n": 0})
    begun = threading.Event()
    consumer = Consumer(Seen(1, [], begun.set), [queue], JSONFileCheckpoint(tmp_path / "c.json"), lease_s=0.02)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            consumer.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    JSONFileCheckpoint(tmp_path / "c.json").restore()
    thread.join(60)
    assert isinstance(errors[0], Fenced)


RUNS = """
import sys, cues
from cues.checkpoints import JSONFileCheckpoint
from cues.txn import Consumer
from test_txn_turns import Seen
with cues.open(sys.argv[1]) as store:
    app = Seen(0, [], lambda: print(app.seen[-1][1]))
    try:
        with Consumer(app, [store.queue("q")], JSONFileCheckpoint(sys.argv[2]), lease_s=float(sys.argv[3])) as consumer:
            consumer.run()
    except cues.Fenced:
        print("Fenced")
"""


def test_a_killed_owner_is_replaced_at_once(store: Store, tmp_path: Path) -> None:
    """Its process is gone, so its lease is not waited for."""
    queue, path = store.queue("q"), tmp_path / "c.json"
    queue.appender().write({"n": 0})
    with Child(RUNS, store.path, path, LONG_S) as child:
        assert child.line() == "0"
        child.signal(signal.SIGKILL)
        child.returncode()
        with Consumer(Seen(1, []), [queue], JSONFileCheckpoint(path), lease_s=LONG_S) as successor:
            assert successor.drain()


def test_a_zombie_is_replaced_when_its_lease_ends_and_then_refused(store: Store, tmp_path: Path) -> None:
    """It is stopped, its successor waits for the lease and takes over; then it continues, and is fenced."""
    queue, path = store.queue("q"), tmp_path / "c.json"
    queue.appender().write({"n": 0})
    with Child(RUNS, store.path, path, 1) as child:
        assert child.line() == "0"
        with contextlib.closing(locks.open_locks(path.with_name(f"{path.name}.lock"))) as lock_file:
            child.signal(signal.SIGSTOP)
            child.wait_stopped()
            while lock_file.holder(0) is not None:  # stopped in the middle of its commit, it would keep the lock
                child.signal(signal.SIGCONT)
                time.sleep(0.01)
                child.signal(signal.SIGSTOP)
                child.wait_stopped()
        seen: list[tuple[int, int]] = []
        with Consumer(Seen(1, seen), [queue], JSONFileCheckpoint(path), lease_s=1) as successor:
            assert successor.drain()
            queue.appender().write({"n": 1})
            assert successor.drain()
            child.signal(signal.SIGCONT)
            lines = [child.line()]
            while lines[-1] != "Fenced":  # it may consume before its commit is refused
                lines.append(child.line())
        assert (1, 1) in seen


def test_owners_of_a_lease() -> None:
    boot, namespace, pid, start = _process(1).split(" ")
    assert is_over("") and not is_over(f"{boot} {namespace} {pid} {start} 1 7")
    assert is_over(f"{boot} {namespace} {pid} {int(start) + 1 if start != '-' else 'x'} 1 7")  # the id is used again
    assert is_over(f"{boot} {namespace} {2**22 + 1} 5 1 7")
    assert not is_over(f"other {namespace} {2**22 + 1} 5 1 7")  # another machine
    assert not is_over(f"{boot} other {2**22 + 1} 5 1 7")  # another container


def test_a_lease_time_that_cannot_be_meant_is_refused(store: Store, tmp_path: Path) -> None:
    for wrong in (-1, None, "x"):
        with pytest.raises(InvalidArgument, match="lease_s"):
            Consumer(Seen(0, []), [store.queue("q")], JSONFileCheckpoint(tmp_path / "c"), lease_s=wrong)  # type: ignore[arg-type]
