"""cues vacuum and cues optimize: files go, and messages stay, whatever runs and dies meanwhile. No Spark, no Java."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

import seeds
import terminal
from deltalake import DeltaTable
from directory_steps import DriverRun, FaultyFiles, Message, data_file, messages_of, metadata_of, stored
from syncs import noted

import cues
from cues import Graph, QueueOptions, Stream, codec, faults
from cues.operate.directory_reader import DirectoryReader
from cues.queues.options import Retention
from cues.spark.cluster import cleaning, data, inspection, operations
from cues.spark.cluster.data import messages, pieces_of
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.files import LocalFiles, open_files
from cues.spark.cluster.lease import DriverLease

SECRET = "erase me, please"


class Death(BaseException):
    """The process ends at this point."""


def add_ten(message: Message) -> Message:
    return {**message, "n": message["n"] + 10}


def numbers(count: int) -> list[Message]:
    return [{"n": n} for n in range(count)]


def graph_of(**queues: QueueOptions) -> Graph:
    return Graph("g", [Stream(add_ten, "in", "out", id="p")], queues={"in": QueueOptions(schema={"n": int}), **queues})


@pytest.fixture
def files(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(str(tmp_path / "queues"))


def fed(files: LocalFiles, count: int = 60, size: int = 3, **queues: QueueOptions) -> DriverRun:
    """A directory whose queues have files of three messages."""
    run = DriverRun(files, graph_of(**queues), size=lambda: size).claim()
    return run.feed("in", numbers(count), lambda: size).run()


def opened(files: LocalFiles, queue: str) -> QueueDirectory:
    return QueueDirectory(files, queue, QueueOptions())


def pass_hours(files: LocalFiles, hours: float) -> None:
    """Move the clock: all files, and all removals in the logs, are so much older."""
    for file in Path(files.url).rglob("*.parquet"):
        if "_delta_log" in file.parts:
            file.unlink()  # a checkpoint, which has the times of removals
        else:
            when = file.stat().st_mtime - hours * 3600
            os.utime(file, (when, when))
    for entry in Path(files.url).glob("*/_delta_log/*"):
        if entry.name == "_last_checkpoint":
            entry.unlink()
        elif entry.suffix == ".json":
            older = lambda found: f'"deletionTimestamp": {int(found[1]) - int(hours * 3_600_000)}'  # noqa: E731
            text = re.sub(r', "seal": "[0-9a-f]{16}"', "", entry.read_text(), count=1)  # as of an earlier version
            entry.write_text(re.sub(r'"deletionTimestamp": (\d+)', older, text))


def vacuum(files: LocalFiles, queue: str) -> set[str]:
    return set(cleaning.vacuum(files, cleaning.plan_vacuum(files, queue)).files)


def optimize(files: LocalFiles, queue: str) -> cleaning.PlannedMerge:
    return cleaning.merge(files, cleaning.plan_merge(files, queue))


def rows_of(files: LocalFiles, queue: str) -> list[tuple[Any, ...]]:
    """Everything about each message: index, time, hash, message, provenance, and the typed column."""
    directory = opened(files, queue)
    (log,) = directory.logs
    told = list(messages(files, pieces_of(directory.folder, log.live, log.first, log.next)))
    table = DeltaTable(files.table(queue)).to_pyarrow_table().to_pylist()
    assert sorted(row["first"] + row["offset"] for row in table) == [index for index, *_ in told]
    columns = {row["first"] + row["offset"]: row.get("n") for row in table}
    return [(*row, came, columns[row[0]]) for row, came in zip(told, metadata_of(directory), strict=True)]


# --- optimize -----------------------------------------------------------------------------------


def test_messages_are_the_same_in_fewer_files(files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their indices, times, hashes, provenance and typed columns; statistics and partitions are in the log."""
    # All files have one time: a merged file has at most an eighth of the queue's time, and a step may take long.
    monkeypatch.setattr(data, "clock", SimpleNamespace(now_ns=lambda: 1_700_000_000_000_000_000))
    fed(files)
    before = {queue: rows_of(files, queue) for queue in ("in", "out")}
    assert [row[0] for row in before["out"]] == list(range(1, 61))
    for queue in ("in", "out"):
        last = opened(files, queue).live[-1]
        plan = cleaning.plan_merge(files, queue)
        done = optimize(files, queue)
        directory = opened(files, queue)
        assert done.runs == plan.runs and plan.before == 20 and len(directory.live) == plan.after <= 14
        assert directory.live[-1] == last  # which has the index of the next message
        assert rows_of(files, queue) == before[queue]
        adds = DeltaTable(files.table(queue)).get_add_actions(flatten=True)
        assert sum(adds["num_records"].to_pylist()) == 60 and set(adds["partition.partition"].to_pylist()) == {0}
        assert (Path(files.url) / queue / "_delta_log" / "_last_checkpoint").exists()
    assert inspection.problems_of(files.url) == []
    again = DriverRun(files, graph_of()).claim().feed("in", numbers(80)).run()
    assert again.messages("out") == [add_ten(message) for message in numbers(80)]


@pytest.mark.slow
def test_a_merged_file_has_at_most_an_eighth_of_its_queue(files: FaultyFiles) -> None:
    """Retention removes whole files; and a second call finds little to do."""
    fed(files, 320, 1)
    optimize(files, "in")
    live = opened(files, "in").live
    assert max(file.count for file in live) <= 40 and len(live) < 30
    optimize(files, "in")
    assert len(opened(files, "in").live) >= 8
    assert [message["n"] for message in messages_of(opened(files, "in"))] == list(range(320))


def test_partitions_are_merged_on_their_own(files: FaultyFiles) -> None:
    options = QueueOptions(partitions=3, key="n", schema={"n": int})
    run = DriverRun(files, graph_of(**{"in": options})).claim().feed("in", numbers(360), lambda: 3)
    before = [message["n"] for message in run.messages("in")]
    done = optimize(files, "in")
    assert all(len({file.partition for file in run}) == 1 for run in done.runs) and done.files > 60
    assert [message["n"] for message in messages_of(opened(files, "in"))] == before


def test_readers_that_have_begun_go_on(files: FaultyFiles) -> None:
    """One in the middle of a queue, one that has planned its files, and one of an older version of the table."""
    fed(files)
    forward = DirectoryReader(files.url, "out").forward()
    begun = [next(forward) for _ in range(5)]
    planned = opened(files, "out")
    pieces = pieces_of(planned.folder, planned.logs[0].live, 5, 50)
    version = DeltaTable(files.table("out")).version()
    done = optimize(files, "out")
    assert vacuum(files, "out") == set()
    assert [index for index, *_ in messages(files, pieces)] == list(range(5, 50))
    old = DeltaTable(files.table("out"), version=version).to_pyarrow_table().to_pylist()
    assert sorted(row["first"] + row["offset"] for row in old) == list(range(1, 61))
    assert [found.index for found in (*begun, *forward) if found is not None] == list(range(1, 61))
    pass_hours(files, 23)
    assert vacuum(files, "out") == set()
    pass_hours(files, 2)
    assert len(vacuum(files, "out")) == done.files
    assert len(rows_of(files, "out")) == 60


def test_what_a_driver_has_merged_meanwhile_is_left_out(files: FaultyFiles) -> None:
    run = fed(files)
    plan = cleaning.plan_merge(files, "out")
    out = run.queues["out"]
    first = plan.runs[0]
    with out.lock:
        assert out.replace(first, [cleaning.merged(files, "out", "g", first)])
    done = cleaning.merge(files, plan)
    assert done.runs == plan.runs[1:] and run.queues["out"].logs[0].reaches(61)
    assert len(rows_of(files, "out")) == 60
    # The same, after the new file was written.
    plan = cleaning.plan_merge(files, "in")
    queue, first = run.queues["in"], plan.runs[0]

    def overtake(kind: str, name: str) -> None:
        if kind == "was created" and not overtaken:
            overtaken.append(name)
            with queue.lock:
                assert queue.replace(first, [cleaning.merged(files, "in", "g", first)])

    overtaken: list[str] = []
    files.interrupt = overtake
    done = cleaning.merge(files, plan)
    files.interrupt = lambda kind, name: None
    assert done.runs == plan.runs[1:] and overtaken[0].partition("/")[2] not in stored(opened(files, "in"))
    assert len(rows_of(files, "in")) == 60


# --- vacuum -------------------------------------------------------------------------------------


def test_a_step_under_way_and_a_step_that_was_not_published_keep_their_files(files: FaultyFiles) -> None:
    """However old. What other steps have left goes after a day, and files of others stay."""
    run = fed(files, 30)
    out, ledger = run.queues["out"], run.stage.ledger
    last = ledger.now.number
    left = data_file(out, "g.p", last, numbers(1)).name  # of a step that was repeated
    under_way = data_file(out, "g.p", last + 1, numbers(1)).name
    files.write("out/somebody-elses.parquet", b"PAR1")
    pass_hours(files, 30)
    assert vacuum(files, "out") == {left}
    assert {under_way, "somebody-elses.parquet"} <= stored(out)
    # The driver dies after the record, before the log.
    run.feed("in", numbers(33), lambda: 3)

    def die(point: str) -> None:
        raise Death(point)

    faults.arm("spark.recorded", 1, die)
    with pytest.raises(Death):
        run.stage.step()
    faults.disarm()
    (owed,) = (file.name for file in ledger.read().files["out"])  # type: ignore[union-attr]
    pass_hours(files, 30)
    assert owed not in {file.name for file in opened(files, "out").live}
    assert owed not in vacuum(files, "out")
    again = DriverRun(files, graph_of()).claim().run()
    assert again.messages("out") == [add_ten(message) for message in numbers(33)]
    assert inspection.problems_of(files.url) == []


def test_bytes_that_a_purge_erased_are_gone_after_a_day(files: FaultyFiles) -> None:
    """Although the last record of the writer names the file that was cut."""
    run = DriverRun(files, graph_of()).claim()
    run.feed("in", [{"n": 0, "name": SECRET}, *numbers(9)[1:]], lambda: 100).run()
    assert bytes_of(files, SECRET) == {"in", "out"}
    with operations.running_none(files, "g") as driver:
        for queue in ("in", "out"):
            operations.purge(driver, queue, 2)
    assert cleaning.plan_vacuum(files, "out").later and not cleaning.plan_vacuum(files, "out").files
    pass_hours(files, 24.5)
    for queue in ("in", "out"):
        assert len(vacuum(files, queue)) == 1
    assert bytes_of(files, SECRET) == set()
    assert [message["n"] for message in messages_of(opened(files, "out"))] == list(range(11, 19))
    again = DriverRun(files, graph_of()).claim().feed("in", numbers(12)).run()
    assert [message["n"] for message in again.messages("out")] == list(range(11, 22))


def bytes_of(files: LocalFiles, text: str) -> set[str]:
    """The queues with a data file that has this text in a message."""
    import pyarrow.parquet as pq

    found = set()
    for file in Path(files.url).rglob("first=*/*.parquet"):
        values = pq.read_table(file, columns=["value"], partitioning=None).column("value").to_pylist()
        if any(text in str(codec.unpack(value)) for value in values):
            found.add(file.relative_to(files.url).parts[0])
    return found


def test_a_step_that_reads_for_more_than_a_day_keeps_its_files(
    files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fed(files)
    done = optimize(files, "in")
    run.feed("in", numbers(90), lambda: 3)
    pass_hours(files, 30)
    lease = DriverLease(files, "g", "somebody")
    lease.acquire(take_over=False)
    later = cleaning.clock.now_ns() + 25 * 3_600_000_000_000
    moved = SimpleNamespace(now_ns=lambda: later, to_datetime=cleaning.clock.to_datetime)
    monkeypatch.setattr(cleaning, "clock", moved)
    plan = cleaning.plan_vacuum(files, "in")
    assert plan.reader == "g.p" and not plan.files and len(plan.later) == done.files
    assert cleaning.plan_vacuum(files, "out").reader is None
    lease.release()
    assert len(cleaning.plan_vacuum(files, "in").files) == done.files


@pytest.mark.parametrize("policy", [Retention(count=12), Retention(bytes=6000), Retention(age="1h")], ids=str)
def test_retention_frees_the_bytes_25_hours_after_the_files_left_the_log(policy: Retention, files: FaultyFiles) -> None:
    """The time that docs/spark-operations.md gives: at most an hour between two looks, after 24 hours."""
    queues = {"in": QueueOptions(retention=policy, schema={"n": int})}
    run = fed(files, **queues)
    (log,) = run.queues["in"].logs
    old = {file.name for file in log.live}
    if policy.age is not None:
        for file in log.live:
            object.__setattr__(file, "modified_ms", file.modified_ms - 2 * 3_600_000)
    run.maintenance.merge_files = 0
    run.maintenance.step()
    gone = old - {file.name for file in log.live}
    assert len(gone) >= 10 and log.next == 61 and old <= stored(run.queues["in"])
    for hours in itertools.repeat(1, 23):
        pass_hours(files, hours)
    run.maintenance.vacuum()
    assert old <= stored(run.queues["in"])  # not yet: a reader may need them
    pass_hours(files, 2)
    run.maintenance.vacuum()
    assert stored(run.queues["in"]) == old - gone
    # Without a driver.
    run.queues["in"].exchange(log.live[:1], [])
    pass_hours(files, 25)
    assert len(vacuum(files, "in")) == 1


# --- both, beside a graph -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds.among(range(30), fast=1))
def test_a_graph_that_runs_and_dies_beside_them_is_the_naive_model(seed: int, files: FaultyFiles) -> None:
    """Steps, merges of the driver, merges and vacuums of an operator, deaths of both, and hours in any order."""
    chance = random.Random(seed)
    count, sent = 120, 0
    points = [*faults.CLEANING_POINTS, "spark.written", "spark.recorded", "spark.forwarded"]

    def die(point: str) -> None:
        raise Death(point)

    def new() -> DriverRun:
        made = DriverRun(files, graph_of(), size=lambda: chance.randint(1, 5)).claim()
        made.maintenance.merge_files = 4
        return made

    run = new()
    while sent < count or run.stage.lag:
        act: Callable[[], object] = chance.choice(
            [
                lambda: run.feed("in", numbers(sent), lambda: chance.randint(1, 4)),
                run.stage.step,
                run.stage.step,
                run.maintenance.step,
                lambda: optimize(files, chance.choice(["in", "out"])),
                lambda: vacuum(files, chance.choice(["in", "out"])),
            ]
        )
        sent = min(count, sent + chance.randint(0, 6))
        if chance.random() < 0.1:
            pass_hours(files, chance.choice([5, 25]))
            run = new()
            continue
        if chance.random() < 0.2:
            faults.arm(chance.choice(points), 1, die)
        try:
            act()
        except Death:
            died = True
        else:
            died = False
        finally:
            faults.disarm()
        if died:
            run = new()
    run.feed("in", numbers(count)).run()
    for queue in ("in", "out"):
        optimize(files, queue)
    pass_hours(files, 25)
    for queue in ("in", "out"):
        vacuum(files, queue)
        assert {file.name for file in opened(files, queue).live} == stored(opened(files, queue))
    assert messages_of(opened(files, "in")) == numbers(count)
    assert messages_of(opened(files, "out")) == [add_ten(message) for message in numbers(count)]
    assert inspection.problems_of(files.url) == []


# --- commands -----------------------------------------------------------------------------------


def told(*arguments: object) -> list[dict[str, Any]]:
    done = terminal.cues(*arguments)
    assert done.code == 0, done
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.mark.slow
def test_the_commands_print_a_plan_and_ask(files: FaultyFiles) -> None:
    fed(files)
    before = stored(opened(files, "in")), len(files.names("in/_delta_log"))
    (planned,) = told("optimize", f"{files.url}#in", "--dry-run")
    assert planned == planned | {"queue": "in", "before": 20, "dry_run": True} and planned["files"] > planned["into"]
    asked = terminal.cues("optimize", files.url)
    assert asked.code == 2 and "Try: add --yes to confirm." in asked.err and "in: 1" in asked.err
    assert (stored(opened(files, "in")), len(files.names("in/_delta_log"))) == before
    done = {row["queue"]: row for row in told("optimize", files.url, "--yes")}
    assert done["in"] == planned | {"dry_run": False} and done["out"]["into"] > 0
    assert {row["files"] for row in told("optimize", files.url, "--dry-run")} == {0}

    waits = {row["queue"]: row for row in told("vacuum", files.url, "--dry-run")}
    assert waits["in"]["files"] == 0 and waits["in"]["later_files"] == done["in"]["files"]
    pass_hours(files, 25)
    asked = terminal.cues("vacuum", files.url)
    assert asked.code == 2 and "will be deleted" in asked.err
    planned = {row["queue"]: row for row in told("vacuum", files.url, "--dry-run")}["in"]
    assert planned["files"] == done["in"]["files"] and planned["bytes"] > 1000 and planned["later_files"] == 0
    assert datetime.now(UTC) - datetime.fromisoformat(planned["oldest"]) > timedelta(hours=24)
    freed = {row["queue"]: row for row in told("vacuum", files.url, "--yes")}
    assert freed["in"] == planned | {"dry_run": False}
    assert "in" in terminal.cues("vacuum", files.url, "--table").out
    assert len(rows_of(files, "in")) == len(rows_of(files, "out")) == 60


def test_the_commands_refuse_what_they_cannot_do(files: FaultyFiles, tmp_path: Path) -> None:
    fed(files, 6)
    with cues.open(tmp_path / "store") as store:
        store.queue("q").appender().write({"n": 1})
    for command in ("vacuum", "optimize"):
        of_store = terminal.cues(command, tmp_path / "store")
        assert of_store.code == 2 and "is a store" in of_store.err and "Try: use cues compact" in of_store.err
        assert terminal.cues(command, tmp_path / "nothing").code == 1
        assert "is a partition" in terminal.cues(command, f"{files.url}#in/0").err
        unknown = terminal.cues(command, f"{files.url}#inn")
        assert unknown.code and "'inn'" in unknown.err


@pytest.mark.slow
def test_both_work_in_an_object_store(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import object_store

    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    object_store.make_bucket("cleaning")
    files: Any = open_files("s3://cleaning/queues")
    fed(files, 60)
    rows = told("optimize", files.url, "--yes")
    assert all(row["into"] for row in rows)
    assert all(row["later_files"] and not row["files"] for row in told("vacuum", files.url, "--yes"))
    monkeypatch.setattr("cues.spark.cluster.directory.KEEP_FILES_H", 0)
    for row in rows:
        assert len(vacuum(files, row["queue"])) == row["files"]
    assert messages_of(opened(files, "out")) == [add_ten(message) for message in numbers(60)]
    again = DriverRun(files, graph_of()).claim().feed("in", numbers(70)).run()
    assert again.messages("out") == [add_ten(message) for message in numbers(70)]


@pytest.mark.parametrize("access", ["create", "move"])
def test_a_folder_that_vanishes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: str
) -> None:
    """Another process deletes the only file of a partition, and then the folder, before the next one is made in it."""
    files = LocalFiles(str(tmp_path))
    with files.create("q/old") as target:
        target.write(b"x")
    make, others = os.mkdir, iter(range(2))

    def late(path: str, *mode: int) -> None:
        if "first" in path and next(others, None) is not None:
            os.rmdir(os.path.dirname(path))
        make(path, *mode)

    monkeypatch.setattr("cues.spark.cluster.files.os.mkdir", late)
    name = "q/partition=0/first=1/x"
    if access == "move":
        files.move({"q/old": name})
    else:
        with files.create(name) as target:
            target.write(b"x")
    assert files.size(name) == 1


@pytest.mark.parametrize("access", ["create", "move"])
def test_the_folder_of_another_process_is_durable_before_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: str
) -> None:
    """The maker of the folder died before it synced the name. It is synced once, also for later tasks."""
    root = tmp_path / access  # a process remembers paths, and the next test may have this one again
    (root / "q/partition=0").mkdir(parents=True)
    for number in range(2):
        files = LocalFiles(str(root), make=False)  # as a task does
        name = f"q/partition=0/{number}"
        (root / "q/old").write_text("x")
        with monkeypatch.context() as patch:
            calls = noted(patch, root)
            if access == "move":
                files.move({"q/old": name})
                at = calls.index(("rename", name))
            else:
                with files.create(name) as target:
                    target.write(b"x")
                at = calls.index(("fsync", name))
        assert (("fsync", "q") in calls[:at]) == (number == 0)
        assert calls[at + 1 :] == [("fsync", "q/partition=0")]


def test_hidden_files_are_no_folders_of_partitions(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    (tmp_path / "q/.partition=0").write_text("x")
    assert LocalFiles(str(tmp_path)).listed("q") == {}


def test_a_file_that_is_gone_is_not_moved(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LocalFiles(str(tmp_path)).move({"q/gone": "q/partition=0/first=1/gone"})
