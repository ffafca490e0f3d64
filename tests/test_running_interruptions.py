"""A Ctrl-C at every point of what a program does with a running graph; then it continues with the same objects.

The points are those of the program's own thread; the graph's threads are never interrupted by a Ctrl-C.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import interruptions
import pytest

import cues
from cues import Graph, Stream
from cues.engine.running import Running


class World:
    """A running graph on a store, and what was sent."""

    def __init__(self, store: cues.Store) -> None:
        self.store = store
        self.graph = Graph("g", [Stream(lambda m: m, "in", "out", id="p")], source="in")
        self.running: Running = self.graph.start(store=store)

    def out(self) -> list[int]:
        return [m["n"] for m in self.store.queue("out").tailer()]


@contextmanager
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as path:
        store = cues.open(path, durability="process")
        made = World(store)
        try:
            made.running.send({"n": 0})
            assert made.running.wait_idle(60)
            yield made
        finally:
            made.running.close()
            store.close()


def send_and_wait(world: World) -> None:
    world.running.send({"n": 1})
    assert world.running.wait_idle(60)
    world.running.messages("out")


def drain(world: World) -> None:
    world.running.send({"n": 1})
    assert world.running.drain(10)


def block(world: World) -> None:
    with world.running as running:
        running.send({"n": 1})


def close(world: World) -> None:
    world.running.close()


def go_on(world: World, place: str) -> None:
    """The same running graph where it is open, else another on the same store: nothing lost, doubled or stuck."""
    sent = [m["n"] for m in world.store.queue("in").tailer()]
    assert sent in ([0], [0, 1]), sent
    if not world.running.halted:
        world.running.send({"n": 2})
        assert world.running.wait_idle(60)
    else:
        world.running.close()
        world.running = world.graph.start(store=world.store)
        world.running.send({"n": 2})
        assert world.running.wait_idle(60)
    assert world.out() == [*sent, 2], world.out()
    world.running.close()
    with world.graph.start(store=world.store) as again:
        assert again.wait_idle(60)
    assert world.out() == [*sent, 2]


@pytest.mark.slow
@pytest.mark.parametrize("act", [send_and_wait, drain, block, close])
def test_an_interruption_anywhere_in_the_use_of_a_running_graph(act: Callable[[World], Any]) -> None:
    points, found = interruptions.faults(world, act, go_on)
    print(act.__name__, points)
    assert points > 3
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_an_interruption_anywhere_in_the_start_of_a_graph_leaves_nothing_locked() -> None:
    def start(world: World) -> None:
        world.running.close()
        world.running = world.graph.start(store=world.store)

    points, found = interruptions.faults(world, start, go_on, points=range(1, 2000, 7))
    assert points > 3
    assert not found, "\n".join(found)
