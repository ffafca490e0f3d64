"""Purging and deleting while others read and write: readers see what is left once, in order, and nothing that is gone.

Two words say how far purges have come: ``asked``, set before ``purge`` is called, and ``done``, set when
it has returned. A reader notes ``done``, reads, and judges:

* no message is below what ``done`` was before the read began;
* indices grow: none comes twice, none out of order;
* what is left out was asked to be purged.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import seeds
from forks import Forks
from sets import slow_except

import cues
from cues import Graph, Sink, Stream

MESSAGES = 60_000


class Words:
    """``asked`` and ``done`` in a file that all processes map."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 16)

    def _word(self, at: int) -> int:
        return int(struct.unpack_from("=Q", self._map, at)[0])

    @property
    def asked(self) -> int:
        return self._word(0)

    @property
    def done(self) -> int:
        return self._word(8)

    def ask(self, index: int) -> None:
        struct.pack_into("=Q", self._map, 0, index)

    def finish(self, index: int) -> None:
        struct.pack_into("=Q", self._map, 8, index)


def write_and_purge(store: cues.Store, words: Words, seed: int) -> None:
    """Append the messages 1 to MESSAGES (message n has index n), and purge or empty the queue now and then."""
    chance = random.Random(seed)
    queue = store.queue("q")
    appender = queue.appender()
    n = 1
    while n <= MESSAGES:
        more = min(chance.choice([1, 1, 5, 50, 400]), MESSAGES + 1 - n)
        appender.write_many([{"n": k, "text": "x" * (k % 7)} for k in range(n, n + more)])
        n += more
        os.sched_yield()
        if chance.random() < 0.2:
            if chance.random() < 0.03:
                words.ask(n)
                queue.delete()
                words.finish(n)
            else:
                low = max(1, words.done)
                index = chance.randint(low, low + (n - low) // 2)
                words.ask(max(index, words.asked))
                queue.purge(before=index)
                words.finish(max(index, words.done))
    # Every reader can read the rest.
    appender.write({"n": MESSAGES + 1})


def read_all(store: cues.Store, words: Words, name: str | None, seed: int) -> tuple[list[int], list[str]]:
    """Read to the last message; the indices, and what was wrong. Several of one name share what there is."""
    chance = random.Random(seed)
    seen: list[int] = []
    wrong: list[str] = []
    with store.queue("q").tailer(name) as tailer:
        while True:
            floor = words.done
            found = tailer.read_many(chance.choice([1, 1, 1, 1, 2, 3, 20]))
            os.sched_yield()  # mostly in the middle of a batch that it has read ahead
            if not found:
                if store.queue("q").last_index == MESSAGES + 1 and tailer.index > MESSAGES + 1:
                    return seen, wrong
                message = tailer.read(block=True, timeout=0.05)
                found = [] if message is None else [message]
            for message in found:
                n = message["n"]
                if n < floor:
                    wrong.append(f"{n} came though everything below {floor} had been purged")
                before = seen[-1] if seen else 0
                if n <= before:
                    wrong.append(f"{n} came behind {before}")
                if name is None and n > max(before + 1, words.asked):
                    wrong.append(f"{before + 1} to {n - 1} were left out, and only those below {words.asked} purged")
                seen.append(n)


def read_in_process(path: str, words: str, name: str | None, seed: int) -> tuple[list[int], list[str]]:
    with cues.open(path) as store:
        return read_all(store, Words(Path(words)), name, seed)


@pytest.mark.slow
def test_readers_in_threads_and_processes_while_another_purges(forks: Forks, tmp_path: Path) -> None:
    """Unnamed ones, and two pairs of one name, of which each gets what the other does not."""
    seed = seeds.new()
    path, shared = str(tmp_path / "store"), tmp_path / "words"
    words = Words(shared)
    results: list[tuple[str | None, list[int], list[str]]] = []
    with cues.open(path, durability="process") as store:
        store.queue("q")

        def reading(name: str | None, mine: int) -> None:
            results.append((name, *read_all(store, Words(shared), name, mine)))

        children = [
            (name, forks.start(f"{__name__}:read_in_process", path, str(shared), name, seed + number))
            for number, name in enumerate([None, "both", "processes", "processes"])
        ]
        threads = [
            threading.Thread(target=reading, args=(name, seed + 100 + number))
            for number, name in enumerate([None, "both", "threads", "threads"])
        ]
        for thread in threads:
            thread.start()
        write_and_purge(store, words, seed)
        for thread in threads:
            thread.join()
        for name, pid in children:
            outcome = forks.wait(pid)
            assert not outcome.error and not outcome.signal, outcome
            results.append((name, *outcome.value))
        left = set(range(store.queue("q").first_index, MESSAGES + 2))
    for name, _, wrong in results:
        assert not wrong, (name, wrong[:5])
    for name in {name for name, _, _ in results}:
        lists = [seen for other, seen, _ in results if other == name]
        if name is None:
            assert all(left <= set(seen) for seen in lists)
        else:
            together = sorted(n for seen in lists for n in seen)
            assert len(together) == len(set(together)), f"{name}: a message came twice"
            assert left <= set(together), f"{name}: a message did not come"


@pytest.mark.slow
@pytest.mark.parametrize("side_effects", slow_except([True], [False, True]), ids=["plain", "snapshot first"])
def test_processors_while_another_purges(tmp_path: Path, side_effects: bool) -> None:
    """Each message is on the output at most once and in order. Only purged messages are missing; none fails.

    A step that took its messages before the purge may still commit after it.
    """
    seed = seeds.new()
    words = Words(tmp_path / "words")
    gaps: list[str] = []
    last = 0

    def copied(message: Any, process: Any) -> Any:
        nonlocal last
        if process.index != message["n"]:
            gaps.append(f"{message['n']} came as {process.index}")
        if message["n"] > max(last + 1, words.asked):
            gaps.append(f"{last + 1} to {message['n'] - 1} were left out")
        last = message["n"]
        return message

    kept: list[int] = []
    graph = Graph(
        "g",
        [
            Stream(copied, "q", "out", batch_size=5, side_effects=side_effects),
            Sink(lambda message: kept.append(message["n"]), "q", id="kept"),
        ],
        durability="process",
    )
    with cues.open(tmp_path / "store", durability="process") as store:
        with graph.start(store=store) as running:
            write_and_purge(store, words, seed)
            assert running.wait_idle(timeout=120)
        found = [message["n"] for message in store.queue("out").tailer()]
        left = list(range(store.queue("q").first_index, MESSAGES + 2))
    assert not gaps, gaps[:5]
    for seen in (found, kept):
        assert seen == sorted(set(seen))
        assert seen[len(seen) - len(left) :] == left


def test_a_tailer_on_a_purged_message_continues_at_the_first_remaining_one(tmp_path: Path) -> None:
    """In each case: in a batch that it has decoded, forwards or backwards, waiting, or by its name."""
    with cues.open(tmp_path / "store", durability="process") as store:
        queue = store.queue("q")
        queue.appender().write_many([{"n": n} for n in range(1, 301)])
        forward, named, backward = queue.tailer(), queue.tailer("named"), queue.tailer()
        assert forward.read_many(10) == named.read_many(10)
        backward.to_index(120)
        backward.direction = "backward"
        assert backward.read() == {"n": 119}
        queue.purge(before=100)
        assert backward.read_many(100) == [{"n": n} for n in range(118, 99, -1)]
        assert backward.read() is None
        assert forward.read() == {"n": 100}
        with queue.tailer("named") as again:  # as its row in the store stands, below the first
            assert again.read() == {"n": 100}
        # Somebody of the same name was faster by one.
        assert named.read() == {"n": 101}
        waits: list[Any] = []
        queue.delete()
        waiting = threading.Thread(target=lambda: waits.append(forward.read(block=True, timeout=60)))
        waiting.start()
        assert queue.appender().write({"n": 301}) == 301
        waiting.join()
        assert waits == [{"n": 301}]
        assert backward.read() is None
        assert named.read() == {"n": 301}
