"""Consumers that share the partitions of a queue: hand-over, growth, deaths, zombies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shared_lives as lives
from forks import Forks

import cues
from cues import errors, faults
from cues.checkpoints import JSONFileCheckpoint
from cues.groups import SharedConsumer, describe, list_groups
from cues.queues.store import Store
from cues.storage import locks

LIMIT_S = 60
"""A limit for a machine that pauses; nothing takes so long."""


def await_that(what: str, holds: Callable[[], Any]) -> None:
    until = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until, f"after {LIMIT_S} s it is not so that {what}"
        time.sleep(0.005)


class Place:
    """Two stores and the processes on them."""

    def __init__(self, forks: Forks, path: Path) -> None:
        self.forks = forks
        self.where = lives.prepare(path)
        self.pids: list[int] = []
        self.count = 0

    def start(self, *arguments: Any) -> int:
        self.pids.append(self.forks.start("shared_lives:live", self.where, *arguments))
        return self.pids[-1]

    def feed(self, store: Store, count: int) -> None:
        lives.feed(store, self.count, count)
        self.count += count

    def owners(self, store: Store) -> list[str | None]:
        return [partition.member for partition in describe(store, "g").partitions] if "g" in groups(store) else []

    def lag(self, store: Store) -> int:
        return sum(partition.lag for partition in describe(store, "g").partitions) if "g" in groups(store) else 1

    def finish(self) -> list[Any]:
        Path(self.where, "done").touch()
        ended = [self.forks.wait(pid) for pid in self.pids]
        self.pids = []
        assert not [outcome.error for outcome in ended if outcome.error], ended
        return ended

    def end(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.forks.wait(pid)


def groups(store: Store) -> list[str]:
    return [group.group for group in list_groups(store)]


def alive(pid: int) -> bool:
    return locks.process_state(pid) not in ("gone", "dead, not reaped")


@pytest.fixture
def place(forks: Forks, tmp_path: Path) -> Iterator[Place]:
    made = Place(forks, tmp_path / "place")
    yield made
    made.end()


def shared(store: Store, tmp_path: Path, app: Callable[[str, int], Any] | None = None, **options: Any) -> Any:
    out = store.queue("out")
    return SharedConsumer(
        app or (lambda queue, number: lives.Copies(out)),
        store,
        "in",
        "g",
        lambda queue, number: JSONFileCheckpoint(tmp_path / f"{number}.json"),
        **options,
    )


def numbers(store: Store) -> list[int]:
    return [message["n"] for message in store.queue("out").tailer(isolation="committed")]


# --- in one process ---------------------------------------------------------------------------------


def test_partitions_are_read_to_their_ends_and_a_successor_continues(store: Store, tmp_path: Path) -> None:
    store.queue("in", partitions=3, key="key")
    lives.feed(store, 0, 30)
    assert shared(store, tmp_path).drain()
    lives.feed(store, 30, 10)
    assert shared(store, tmp_path).drain()
    assert sorted(numbers(store)) == list(range(40))
    assert [partition.lag for partition in describe(store, "g").partitions] == [0, 0, 0]
    assert not describe(store, "g").members


def test_a_queue_of_one_log_grows_while_it_is_read(store: Store, tmp_path: Path) -> None:
    queue = store.queue("in", key="key")
    lives.feed(store, 0, 8)
    with shared(store, tmp_path) as consumer:
        thread = threading.Thread(target=consumer.run)
        thread.start()
        try:
            await_that("the first messages are copied", lambda: len(numbers(store)) == 8)
            queue.grow(3)
            lives.feed(store, 8, 24)
            await_that("the messages on all partitions are copied", lambda: len(numbers(store)) == 32)
            assert [number for _, number in consumer.assigned] == [0, 1, 2]
        finally:
            consumer.stop()
            thread.join(LIMIT_S)
    assert sorted(numbers(store)) == list(range(32))


def test_the_start_of_a_new_group_is_that_of_its_consumers(store: Store, tmp_path: Path) -> None:
    store.queue("in", partitions=2, key="key")
    lives.feed(store, 0, 8)
    assert shared(store, tmp_path, start="latest").drain()
    assert numbers(store) == []
    lives.feed(store, 8, 8)
    assert shared(store, tmp_path).drain()
    assert sorted(numbers(store)) == list(range(8, 16))


def test_an_error_of_an_application_ends_the_process_and_hands_its_partitions_over(
    store: Store, tmp_path: Path
) -> None:
    store.queue("in", partitions=2, key="key")
    lives.feed(store, 0, 8)

    class Fails:
        def consume(self, envelope: Any, publisher: Any) -> None:
            raise ZeroDivisionError

        def finalize(self, publisher: Any) -> None:
            return None

    failing = shared(store, tmp_path, lambda queue, number: Fails())
    with pytest.raises(ZeroDivisionError):
        failing.run()
    assert not describe(store, "g").members
    with pytest.raises(errors.CuesError, match="has ended"):
        failing.run()
    assert shared(store, tmp_path).drain()
    assert sorted(numbers(store)) == list(range(8))


def test_a_lost_checkpoint_is_refused_and_not_begun_again(store: Store, tmp_path: Path) -> None:
    store.queue("in", key="key")
    lives.feed(store, 0, 8)
    assert shared(store, tmp_path).drain()
    (tmp_path / "0.json").unlink()
    with pytest.raises(errors.Diverged, match=r"at 9 of in/0.*0\.json.* is empty"):
        shared(store, tmp_path).drain()


def test_what_cannot_be_meant_is_refused_and_joins_no_group(store: Store, tmp_path: Path) -> None:
    store.queue("in")
    with pytest.raises(errors.InvalidArgument, match="no option 'max_seconds'"):
        shared(store, tmp_path, max_seconds=1)
    with pytest.raises(errors.InvalidArgument, match="no option 'now'"):
        shared(store, tmp_path, now=time.monotonic)
    with pytest.raises(errors.InvalidArgument, match="cannot be called"):
        SharedConsumer(lives.Copies(None), store, "in", "g", lambda queue, number: None)  # type: ignore[arg-type]
    assert groups(store) == []


def test_a_consumer_is_fenced_once_by_a_late_start_and_begins_again(store: Store, tmp_path: Path) -> None:
    """A process was stopped between its claim and its restore, and continues: its restore raises the fence.

    The owner begins again. If it is fenced again within the lease, somebody else uses the checkpoint: an error.
    """
    store.queue("in", key="key")
    lives.feed(store, 0, 8)
    consumer = shared(store, tmp_path, lease_s=1000)
    ended: list[BaseException] = []

    def run() -> None:
        try:
            consumer.run()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for count in (8, 16):
            await_that("the messages are copied", lambda count=count: len(numbers(store)) == count)
            JSONFileCheckpoint(tmp_path / "0.json").restore()
            lives.feed(store, count, 8)
        await_that("the second takeover ends it", lambda: ended)
    finally:
        consumer.stop()
        thread.join(LIMIT_S)
    assert isinstance(ended[0], errors.Fenced)
    assert shared(store, tmp_path).drain()
    assert sorted(numbers(store)) == list(range(24))


# --- hand-over between processes ----------------------------------------------------------------------

POINTS = (*faults.SHARED_POINTS, *faults.CONSUMER_POINTS, *faults.CHECKPOINT_POINTS, "publish.inside", "publish.after",
          "intents.prepared", "intents.built", "group.inside", "group.after")  # fmt: skip


def hand_over(place: Place, first: tuple[Any, ...], second: tuple[Any, ...]) -> int:
    """One process has all partitions, and hands a half to another while messages come; return how many were killed."""
    with cues.open(Path(place.where, "a")) as store:
        place.feed(store, 24)
        old = place.start(*first)
        await_that("the first process has read everything, or is dead", lambda: not place.lag(store) or not alive(old))
        place.feed(store, 24)
        new = place.start(*second)
        await_that(
            "both have partitions, or one of them is dead",
            lambda: not (alive(old) and alive(new)) or len({*place.owners(store)} - {None}) == 2,
        )
        place.feed(store, 24)
        if not alive(old) and not alive(new):
            place.start()
        await_that("all is read", lambda: not place.lag(store) or not (alive(old) or alive(new)))
    killed = sum(outcome.killed for outcome in place.finish())
    # A death on the way out may have left messages pending, or not read.
    Path(place.where, "done").unlink()
    last = place.start()
    with cues.open(Path(place.where, "a")) as store:
        await_that("all is read", lambda: not (place.lag(store) and alive(last)))
    place.finish()
    return killed


def test_two_processes_share_partitions_and_hand_them_over(place: Place) -> None:
    assert hand_over(place, (), ()) == 0
    assert lives.wrong(place.where, place.count) == ""


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("who", ["old", "new"])
def test_a_death_at_every_point_of_a_hand_over_loses_and_doubles_nothing(
    who: str, part: int, forks: Forks, tmp_path: Path
) -> None:
    """The process that has the partitions dies at each point, or the one that gets them does."""
    killed = set()
    points = POINTS[part::2]
    for number, point in enumerate(points):
        place = Place(forks, tmp_path / str(number))
        try:
            hit = {"old": 3, "new": 1}[who] + number % 3
            victim = (point, 1 if point in ("shared.stopped", "shared.noted") else hit)
            if hand_over(place, *((victim, ()) if who == "old" else ((), victim))):
                killed.add(point)
            assert lives.wrong(place.where, place.count) == "", victim
        finally:
            place.end()
    # Which process gets the later messages is a matter of time, so not every hit is reached each time.
    assert killed >= {*faults.SHARED_POINTS, "consumer.restored"} & {*points}
    assert len(killed) > len(points) / 3, killed


def stopped(pid: int) -> bool:
    return locks.process_state(pid) == "stopped"


def zombie(place: Place, rule: str) -> list[Any]:
    """A process is stopped in a transaction, past its lease; another takes over, finishes, and the first continues.

    Everything else of the first is idle when it is stopped. A process that is stopped inside a write of a store or of a
    JSON file would keep that lock, and nobody could take over.
    """
    with cues.open(Path(place.where, "a")) as store:
        place.feed(store, 24)
        old = place.start("", 0, "kill", rule, 24)
        await_that("everything is read", lambda: not place.lag(store))
        place.feed(store, 1)
        await_that("the first is in its transaction", Path(place.where, "holding").exists)
        os.kill(old, signal.SIGSTOP)
        await_that("it is stopped", lambda: stopped(old))
        place.start("", 0, "kill", rule)
        await_that("the second has read everything", lambda: not place.lag(store))
        Path(place.where, "go").touch()
        os.kill(old, signal.SIGCONT)
        place.feed(store, 24)
        await_that("both work", lambda: len({*place.owners(store)} - {None}) == 2 and not place.lag(store))
    return place.finish()


@pytest.mark.slow
def test_a_zombie_with_a_stale_fence_commits_nothing_and_works_again(place: Place) -> None:
    """Gazette's story: the fence of the checkpoint refuses the old owner. It is then a member like any other."""
    zombie(place, "")
    assert lives.wrong(place.where, place.count) == ""


@pytest.mark.slow
def test_control_without_the_fence_a_zombie_doubles_messages(place: Place) -> None:
    zombie(place, "unfenced")
    assert lives.wrong(place.where, place.count) != ""


# --- stories ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["consumer.consumed", "checkpoint.inside", "consumer.committed", "consumer.acknowledged"]
)
def test_a_member_dies_with_a_pending_transaction_and_the_other_takes_over(point: str, place: Place) -> None:
    """KIP-447: two members; one dies before the end of its transaction, in it, or after it.

    The other continues at the checkpoint: it drops the transaction in the first two cases, and completes it in the
    third. Nobody sees a message twice, and none before its transaction was decided.
    """
    with cues.open(Path(place.where, "a")) as store:
        victim = place.start(point, 5)
        place.start()
        until = time.monotonic() + LIMIT_S
        while alive(victim):
            assert time.monotonic() < until
            await_that("what was fed is read, or the victim is dead", lambda: not (place.lag(store) and alive(victim)))
            place.feed(store, 24)
        await_that("the other has read everything", lambda: not place.lag(store))
    assert sum(outcome.killed for outcome in place.finish()) == 1
    assert lives.wrong(place.where, place.count) == ""
