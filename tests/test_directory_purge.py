"""Purges of queues in a shared directory: one entry in the log, whatever happens around it. No Spark, no Java."""

from __future__ import annotations

import itertools
import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

import seeds
import terminal
from deltalake import DeltaTable
from directory_steps import TIME_US, DriverRun, FaultyFiles, Message, messages_of, stored

from cues import Graph, QueueOptions, Sink, Stream
from cues.errors import AlreadyRunning, QueueInUse
from cues.spark.cluster import inspection, operations
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.files import LocalFiles
from cues.spark.cluster.lease import DriverLease


def add_ten(message: Message) -> Message:
    return {"n": message["n"] + 10}


def save(message: Message) -> None:
    pass


def numbers(count: int) -> list[Message]:
    return [{"n": n} for n in range(1, count + 1)]


def graph_of(*more: Any) -> Graph:
    queues = {"in": QueueOptions(schema={"n": int})}
    return Graph("g", [Stream(add_ten, "in", "out", id="p"), *more], queues=queues)


@pytest.fixture
def files(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(str(tmp_path / "queues"))


def ran(files: LocalFiles, count: int = 20, file_size: int = 6) -> DriverRun:
    """A directory with files of six messages, which all processors have read."""
    return DriverRun(files, graph_of()).claim().feed("in", numbers(count), lambda: file_size).run()


def left(files: LocalFiles, queue: str = "in") -> list[int]:
    directory = QueueDirectory(files, queue, QueueOptions())
    return [message["n"] for message in messages_of(directory)]


def purge(files: LocalFiles, index: int, unread: Any = "refuse", queue: str = "in") -> int:
    with operations.running_none(files, "g") as driver:
        return operations.purge(driver, queue, index, unread).count


@pytest.mark.parametrize("index", [1, 2, 6, 7, 8, 13, 14, 18, 20, 21])
def test_exactly_the_messages_before_an_index_go(files: FaultyFiles, index: int) -> None:
    """In one entry; the file with the index inside is cut, with its columns, and readers see the rest."""
    ran(files)
    log = len(files.names("in/_delta_log"))
    stays = min(index, 20)
    assert purge(files, index) == stays - 1
    assert left(files) == list(range(stays, 21))
    assert len(files.names("in/_delta_log")) == log + (stays > 1)
    rows = DeltaTable(files.table("in")).to_pyarrow_table().to_pylist()
    assert sorted((row["first"] + row["offset"], row["n"]) for row in rows) == [(n, n) for n in range(stays, 21)]
    assert len(stored(QueueDirectory(files, "in", QueueOptions()))) == 4 + (stays not in (1, 7, 13, 19))
    assert inspection.problems_of(files.url) == []
    again = DriverRun(files, graph_of()).claim().feed("in", numbers(25)).run()
    assert again.messages("in") == numbers(25)[stays - 1 :]
    assert again.messages("out") == [add_ten(message) for message in numbers(25)]


def test_a_time_is_the_first_message_at_it_or_after(files: FaultyFiles) -> None:
    ran(files)
    reader = inspection.QueueReader(files.url, "in")
    at = datetime.fromtimestamp(TIME_US / 1e6, UTC)
    assert reader.place_of(at, "--before") == [1]
    (gone,) = map(json.loads, terminal.cues("purge", f"{files.url}#in", "--before", "0s", "--yes").out.splitlines())
    assert gone["messages"] == 19 and gone["first_index"] == 20 and left(files) == [20]


@pytest.mark.slow
def test_processors_that_have_not_read_are_named(files: FaultyFiles) -> None:
    """One with a step under way is at its start. With --force it takes the messages that are left."""
    run = DriverRun(files, graph_of(Sink(save, "in", id="s"))).claim().feed("in", numbers(20), lambda: 6)
    stream, sink = run.stages
    stream.step()
    sink.ledger.commit("taking", taking=sink.take())
    with pytest.raises(QueueInUse, match=r"'in' before 9 .* not read: g\.s is at 1 and has a step under way\."):
        purge(files, 9)
    assert left(files) == list(range(1, 21))
    error = terminal.cues("purge", f"{files.url}#in", "--before", "9", "--yes")
    assert error.code == 1 and "g.s is at 1" in error.err and "--force" in error.err
    asked = terminal.cues("purge", f"{files.url}#in", "--before", "9", "--dry-run")
    assert json.loads(asked.out)["unread"] == {"g.s": 8} and left(files) == list(range(1, 21))
    forced = terminal.cues("purge", f"{files.url}#in", "--before", "9", "--yes", "--force")
    assert forced.code == 0 and left(files) == list(range(9, 21)), forced
    again = DriverRun(files, graph_of(Sink(save, "in", id="s"))).claim().run()
    assert again.messages("out") == [add_ten(message) for message in numbers(20)]
    assert again.stages[1].counters.taken == 12


def test_a_running_driver_refuses_a_purge(files: FaultyFiles) -> None:
    ran(files)
    lease = DriverLease(files, "g", "somebody")
    lease.acquire(take_over=False)
    try:
        with pytest.raises(AlreadyRunning, match="runs the graph 'g'"):
            purge_while_beating(files, lease)
    finally:
        lease.release()
    assert left(files) == list(range(1, 21))


def purge_while_beating(files: FaultyFiles, lease: DriverLease) -> None:
    silent = lambda access, name: None  # noqa: E731

    def beat(access: str, name: str) -> None:
        if access == "read" and name.endswith("driver.json"):
            files.interrupt = silent  # a beat reads the lease too
            lease.beat()
            files.interrupt = beat

    files.interrupt = beat
    try:
        purge(files, 5)
    finally:
        files.interrupt = silent


class Died(BaseException):
    pass


def test_a_death_at_any_access_leaves_all_messages_or_the_rest(files: FaultyFiles) -> None:
    """Never others; the purge succeeds when it is called again, and the graph goes on."""
    ran(files)
    died: set[str] = set()
    for number in itertools.count():
        countdown = itertools.count()

        def interrupt(access: str, name: str) -> None:
            if "driver.json" not in name and next(countdown) == number:
                died.add(access)
                raise Died

        goal = [n for n in range(2, 20) if n % 6 != 1][number]  # inside a file
        before = left(files)
        files.interrupt = interrupt
        try:
            purge(files, goal)
        except Died:
            pass
        else:
            break
        finally:
            files.interrupt = lambda access, name: None
        assert left(files) in (before, list(range(max(goal, before[0]), 21)))
        assert inspection.problems_of(files.url) == []
    assert died == {"read", "names", "create", "was created", "put", "was put"}
    purge(files, 19)
    assert left(files) == [19, 20]
    assert ran(files, 25).messages("out") == [add_ten(message) for message in numbers(25)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds.among(range(10), fast=3))
def test_purges_between_steps_and_merges(files: FaultyFiles, seed: int) -> None:
    """Another driver takes the graph over during a purge: its merges and steps go on, and nothing is twice or lost."""
    print(f"{seeds.VARIABLE}={seed}")
    chance = random.Random(seed)
    count, first = 0, 1
    run = DriverRun(files, graph_of()).claim()
    run.maintenance.merge_files = 3

    def interrupt(access: str, name: str) -> None:
        if access == "create" and name.startswith("in/"):  # the rest of a file is about to be written
            files.interrupt = lambda access, name: None
            chance.choice([lambda: run.maintenance.merge(run.queues["in"].log(0)), lambda: None])()
            run.feed("in", numbers(count), lambda: chance.randint(1, 4))

    for _ in range(12):
        count += chance.randint(1, 9)
        run.feed("in", numbers(count), lambda: chance.randint(1, 4)).run()
        goal = chance.randint(1, count)
        count += chance.randint(0, 3)
        files.interrupt = interrupt
        purge(files, goal)
        files.interrupt = lambda access, name: None
        first = max(first, goal)
        run.maintenance.merge(run.queues["in"].log(0))
        run.feed("in", numbers(count)).run()
        assert left(files) == list(range(first, count + 1))
    assert run.messages("out") == [add_ten(message) for message in numbers(count)]
