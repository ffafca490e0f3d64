"""A Ctrl-C at every point of a call of tailers and appenders, and the program continues with the same objects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import interruptions
import pytest

import cues
from cues.queues.store import Store
from cues.storage import locks

N = 12
EVENTS = [
    pytest.param(interruptions.ENTRIES, id="entries"),
]


class World:
    """A queue with messages 0 to N - 1, and the object that is interrupted."""

    def __init__(self, store: Store, queue: cues.Queue) -> None:
        self.store = store
        self.queue = queue
        self.tailer: Any = None
        self.appender: Any = None
        self.got: list[int] = []

    def free(self) -> None:
        """No lock and no transaction is left: another handle writes and reads at once."""
        held = self.store.core.locks
        assert not held.mine(locks.WRITER), "the writer's lock is held"
        assert not held.mine(locks.REGISTER), "the register is held"
        writer_lock = self.store.core.environment.writer_lock
        assert writer_lock is not None and not writer_lock.inside, "a call has not ended"
        assert in_a_thread(lambda: writer_lock.mutex.acquire(blocking=False) and not writer_lock.mutex.release()), (
            "the writer's mutex is held"
        )
        other = self.store.queue("other").appender()
        other.write({"n": 0})


def in_a_thread(call: Callable[[], bool]) -> bool:
    """What the call returns in another thread: a mutex may be taken again in the thread that holds it."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(30)
    return found == [True]


def worlds(
    tmp_path: Path, durability: str, partitions: int, begin: Callable[[World], None]
) -> Callable[[], AbstractContextManager[World]]:
    numbers = count()

    @contextmanager
    def arrange() -> Iterator[World]:
        path = tmp_path / str(next(numbers))
        with Store(path, durability=durability, writer_timeout_s=2.0) as store:
            queue = store.queue("q", partitions=partitions, key="n" if partitions > 1 else None)
            queue.appender().write_many([{"n": n} for n in range(N)])
            world = World(store, queue)
            begin(world)
            yield world

    return arrange


READS: dict[str, tuple[int, Callable[[World], Any], Callable[[World], Any]]] = {
    "read": (1, lambda w: w.queue.tailer(), lambda w: w.tailer.read()),
    "read block": (1, lambda w: w.queue.tailer(), lambda w: w.tailer.read(block=True, timeout=0.0)),
    "named read": (1, lambda w: w.queue.tailer("name"), lambda w: w.tailer.read()),
    "named read block": (1, lambda w: w.queue.tailer("name"), lambda w: w.tailer.read(block=True, timeout=0.0)),
    "read_many": (1, lambda w: w.queue.tailer(), lambda w: w.tailer.read_many(3)),
    "named read_many": (1, lambda w: w.queue.tailer("name"), lambda w: w.tailer.read_many(3)),
    "peek": (1, lambda w: w.queue.tailer(), lambda w: w.tailer.peek() and None),
    "merged read": (3, lambda w: w.queue.tailer(), lambda w: w.tailer.read()),
    "named merged read": (3, lambda w: w.queue.tailer("name"), lambda w: w.tailer.read()),
    "merged read_many": (3, lambda w: w.queue.tailer(), lambda w: w.tailer.read_many(5)),
    "committed read": (1, lambda w: w.queue.tailer(isolation="committed"), lambda w: w.tailer.read()),
    "named merged read_many": (3, lambda w: w.queue.tailer("name"), lambda w: w.tailer.read_many(5)),
}


@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("kind", READS)
@pytest.mark.interpreted
def test_a_read_that_is_interrupted_anywhere_is_done_or_not(tmp_path: Path, kind: str, events: frozenset[str]) -> None:
    """Messages that the interrupted call took may be missing, as its position shows; no message comes twice."""
    partitions, make, read = READS[kind]

    def begin(world: World) -> None:
        world.tailer = make(world)
        first = world.tailer.read()
        world.got = [first["n"]]

    def act(world: World) -> None:
        found = read(world)
        world.got += [m["n"] for m in ([found] if isinstance(found, dict) else found or [])]

    def go_on(world: World, place: str) -> None:
        positions = sum(world.tailer.positions.values()) if hasattr(world.tailer, "positions") else None
        rest: list[int] = []
        while (message := world.tailer.read()) is not None:
            rest.append(message["n"])
        everything = world.got + rest
        assert len(set(everything)) == len(everything), f"twice: {everything}"
        missing = sorted(set(range(N)) - set(everything))
        # A call that moved before it could return has taken what it would have returned, which the position says.
        assert len(missing) <= (5 if "many" in kind else 1), f"lost {missing}"
        if missing:
            assert positions is not None
            assert positions - (partitions if partitions > 1 else 1) == N - len(rest), "the position does not say so"
        world.queue.appender().write({"n": N})
        assert world.tailer.read() == {"n": N}
        world.free()

    points, found = interruptions.faults(worlds(tmp_path, "process", partitions, begin), act, go_on, events)
    assert points >= 5
    assert not found, "\n".join(found)


WRITES: dict[str, tuple[int, Callable[[World], Any]]] = {
    "write": (1, lambda w: w.appender.write({"n": N})),
    "write_many": (1, lambda w: w.appender.write_many([{"n": N}, {"n": N + 1}])),
    "partitioned write": (3, lambda w: w.appender.write({"n": N})),
    "partitioned write_many": (3, lambda w: w.appender.write_many([{"n": N}, {"n": N + 1}])),
}


@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("durability", ["disk", "process"])
@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.interpreted
def test_an_append_that_is_interrupted_anywhere_is_there_whole_or_not_at_all(
    tmp_path: Path, kind: str, durability: str, events: frozenset[str]
) -> None:
    partitions, write = WRITES[kind]

    def begin(world: World) -> None:
        world.appender = world.queue.appender()

    def go_on(world: World, place: str) -> None:
        world.free()
        there = len(world.queue)
        assert there in (N, N + 2 if "many" in kind else N + 1), f"{there - N} of the messages are there"
        if there == N:
            write(world)  # as the program decides that has looked
        found = sorted(m["n"] for m in world.queue.tailer())
        assert found == list(range(N + (2 if "many" in kind else 1))), found
        world.free()

    points, found = interruptions.faults(worlds(tmp_path, durability, partitions, begin), write, go_on, events)
    assert points >= 3
    assert not found, "\n".join(found)


@pytest.mark.parametrize("events", EVENTS)
def test_a_turn_that_is_interrupted_anywhere_leaves_no_lock_to_other_processes(
    tmp_path: Path, events: frozenset[str]
) -> None:
    """With several writers each takes the lock that other processes wait for; nothing is called afterwards here."""

    def begin(world: World) -> None:
        world.appender = world.queue.appender()
        writer_lock = world.store.core.environment.writer_lock
        assert writer_lock is not None
        writer_lock.words[1] = 1  # as another process that writes sets it
        writer_lock.looked_at = 0.0

    def act(world: World) -> None:
        world.appender.write({"n": N})

    def go_on(world: World, place: str) -> None:
        assert not world.store.core.locks.mine(locks.WRITER), "the writer's lock is held"
        assert not world.store.core.locks.mine(locks.REGISTER), "the register is held"
        world.free()

    points, found = interruptions.faults(worlds(tmp_path, "process", 1, begin), act, go_on, events)
    assert points >= 10
    assert not found, "\n".join(found)
