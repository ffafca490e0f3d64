"""The state of a source: rows that are committed with the position, and with nothing else."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seeds

import cues
from cues import testing
from cues.errors import Diverged, ProcessorStopped

COUNT = 400
STREAM = cues.Stream(lambda message: message, "n", "same", id="same")


def numbers(position: Any, process: Any) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield the numbers from 1 on; the state has a row for each, the sum of all, and no row for each tenth."""
    state = process.state
    for n in range((position or 0) + 1, COUNT + 1):
        assert state.get("sum", 0) == n * (n - 1) // 2
        assert (n - 1 in state) is (n > 1 and (n - 1) % 10 != 0)
        state["sum"] = state.get("sum", 0) + n
        state[n] = str(n) * 3
        if n % 10 == 0:
            del state[n]
        yield n, {"n": n}


def graph(source: Any = numbers, **options: Any) -> cues.Graph:
    return cues.Graph("g", [cues.Source("n", source)], **options)


def test_a_source_is_told_of_a_commit_after_it() -> None:
    """Sources that acknowledge messages do so then: a message that was acknowledged before could be lost."""
    told: list[tuple[int, int]] = []

    class Reading:
        def __call__(self, position: int | None) -> Iterator[tuple[int, dict[str, int]]]:
            for n in range((position or 0) + 1, 7):
                yield n, {"n": n}

        def committed(self, position: int) -> None:
            told.append((position, store.queue("n").last_index))

    with testing.temporary_store() as store:
        made = cues.Graph("g", [cues.Source("n", Reading(), batch_size=2)])
        with testing.crash("commit.inside", 2, how="raise"), pytest.raises(testing.Crashed):
            testing.run_until_idle(made, store)
        assert told == [(2, 2)]
        testing.run_until_idle(made, store)
        assert told == [(2, 2), (4, 4), (6, 6)]


def test_a_source_sees_its_state_in_one_run_and_in_many() -> None:
    with testing.temporary_store() as store:
        report = testing.run_until_idle(graph(), store)
        assert report.steps["n"]
        assert [m["n"] for m in testing.messages(store, "n")] == list(range(1, COUNT + 1))


def test_changes_belong_to_the_message_that_is_yielded_after_them() -> None:
    """The run ends after any message: the state is that of this message, and not of the next one."""
    chance = random.Random(seeds.new())

    def some(position: Any, process: Any) -> Iterator[Any]:
        end = (position or 0) + chance.randint(1, 50)
        for n, item in numbers(position, process):
            yield n, item
            if n == end:
                process.state["sum"] = -1  # dropped: nothing is yielded after it
                return

    with testing.temporary_store() as store:
        while len(testing.messages(store, "n")) < COUNT:
            testing.run_until_idle(graph(some), store)
        assert [m["n"] for m in testing.messages(store, "n")] == list(range(1, COUNT + 1))


def test_none_commits_the_state_without_a_message() -> None:
    def source(position: Any, process: Any) -> Iterator[Any]:
        seen = process.state.get("runs", 0)
        process.state["runs"] = seen + 1
        yield seen + 1, None if seen % 2 else {"n": seen}

    with testing.temporary_store() as store:
        for _ in range(5):
            testing.run_until_idle(graph(source), store)
        assert [m["n"] for m in testing.messages(store, "n")] == [0, 2, 4]


def test_a_message_that_is_refused_keeps_its_changes_and_one_that_stops_the_source_drops_them() -> None:
    def source(position: Any, process: Any) -> Iterator[Any]:
        for n in range((position or 0) + 1, 7):
            assert process.state.get("last", 0) == n - 1
            process.state["last"] = n
            yield n, ValueError("bad") if n == 4 else {"n": n}

    with testing.temporary_store() as store:
        testing.run_until_idle(graph(source, errors="errors"), store)
        assert [m["n"] for m in testing.messages(store, "n")] == [1, 2, 3, 5, 6]
        assert len(testing.messages(store, "errors")) == 1
    with testing.temporary_store() as store:
        for _ in range(2):
            with pytest.raises(ProcessorStopped, match="bad"):
                testing.run_until_idle(graph(source), store)
        assert [m["n"] for m in testing.messages(store, "n")] == [1, 2, 3]


@pytest.mark.parametrize("resume", ["skip", "again"])
def test_a_source_without_position_has_no_state(resume: str) -> None:
    def source(process: Any) -> Iterator[Any]:
        process.state["n"] = 1
        yield {"n": 1}

    declared = cues.Graph("g", [cues.Source("n", source, resume=resume)])
    with (
        testing.temporary_store() as store,
        pytest.raises(cues.CuesError, match="takes no position, so it has no state"),
    ):
        testing.run_until_idle(declared, store)


def test_a_replay_that_takes_the_place_of_the_store_has_the_state_of_its_sources(tmp_path: Path) -> None:
    def some(position: Any, process: Any) -> Iterator[Any]:
        yield from itertools.islice(numbers(position, process), 100)

    def read(source: Any) -> cues.Graph:
        return cues.Graph("g", [cues.Source("n", source), STREAM])

    with cues.open(tmp_path / "old", durability="process") as store:
        testing.run_until_idle(read(some), store)
    assert cues.replay(read(some), into=tmp_path / "new", store=tmp_path / "old").whole
    with cues.open(tmp_path / "new") as store:
        assert store.check() == []
        testing.run_until_idle(read(numbers), store)  # the source compares its state with its position
        assert [m["n"] for m in testing.messages(store, "n")] == list(range(1, COUNT + 1))


def test_a_driver_with_an_empty_store_refuses_a_source_whose_state_is_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")
    from directory_steps import HostRun

    from cues.spark.cluster.files import LocalFiles

    def hosted(store: Path) -> int:
        declared = cues.Graph(
            "g", [cues.Source("n", numbers), cues.Stream(lambda message: message, "n", "same", id="same")]
        )
        host = HostRun(LocalFiles(str(tmp_path / "queues")), declared, store)
        try:
            host.claim().run()
            return len(host.messages("n"))
        finally:
            host.close()

    for _ in range(2):
        assert hosted(tmp_path / "store") == COUNT
    with pytest.raises(Diverged, match="keeps a state"):
        hosted(tmp_path / "another")


PROGRAM = """
import sys
from test_source_state import graph
with graph(store=sys.argv[1], durability="process").start() as running:
    running.wait_done()
"""


@pytest.mark.slow
def test_the_state_survives_kills(tmp_path: Path) -> None:
    """The source itself compares its state with its position at each message, and stops if they differ."""
    chance = random.Random(seeds.new())
    for _ in range(6):
        run = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / "store")], cwd=Path(__file__).parent)
        try:
            run.wait(0.25 + chance.random() / 4)
        except subprocess.TimeoutExpired:
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
    with graph(store=str(tmp_path / "store"), durability="process").start() as running:
        running.wait_done()
        assert [m["n"] for m in running.messages("n")] == list(range(1, COUNT + 1))


@pytest.mark.interpreted
def test_what_is_committed_is_not_kept_twice() -> None:
    """The memory of a source that changes a row with each message does not grow with them."""
    largest = []

    def source(position: Any, process: Any) -> Iterator[Any]:
        for n in range(20_000):
            process.state[n % 5] = n
            yield n, {"n": n}
            if n % 1_000 == 999:
                largest.append(len(process.core.layer._table._table._step))

    with testing.temporary_store() as store:
        testing.run_until_idle(graph(source), store)
    assert max(largest) <= 5
