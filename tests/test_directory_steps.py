"""Steps over a shared directory: faults, random deaths, and formats against simpler models. No Spark, no Java.

A test names the fault, and its docstring says why it was once an error. See directory_steps.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sets import slow_except

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

import hypothesis
import pyarrow as pa
import seeds
import terminal
from directory_steps import (
    Died,
    DriverRun,
    FaultyFiles,
    Frame,
    Message,
    RandomDeaths,
    data_file,
    messages_of,
    metadata_of,
    stored,
)
from hypothesis import strategies as st

import cues
from cues import AnyOf, Graph, Stream, testing
from cues.base import clock
from cues.errors import AlreadyRunning, CuesError, Diverged, Fenced, ProcessorStopped, Unsupported
from cues.processors import sql
from cues.records import batch
from cues.records.provenance import Provenance, merge
from cues.spark.cluster import data, feeder, inspection, maintenance, operations, parquet, state_files
from cues.spark.cluster import directory as directory_module
from cues.spark.cluster import engine as engine_module
from cues.spark.cluster import files as files_module
from cues.spark.cluster import lease as lease_module
from cues.spark.cluster.batches import Batches
from cues.spark.cluster.data import GROUP_ROWS, Piece, QueueWriter, Rows, Writer, hash_runs, read, read_rows
from cues.spark.cluster.directory import DataFile, QueueDirectory
from cues.spark.cluster.files import LocalFiles, ObjectFiles, open_files
from cues.spark.cluster.lease import DriverLease
from cues.spark.cluster.ledger import Ledger
from cues.spark.cluster.publish import publish
from cues.spark.cluster.shared import SharedQueue
from cues.spark.cluster.typed import TypedColumns
from cues.spark.options import QueueAddress
from cues.steps.state_keys import key_of_row, key_segment


@pytest.fixture
def files(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(str(tmp_path / "queues"))


def numbers(count: int, keys: int = 5) -> list[Message]:
    return [{"i": i, "k": i % keys} for i in range(1, count + 1)]


def queue_of(files: LocalFiles, name: str = "q") -> QueueDirectory:
    directory = QueueDirectory(files, name, cues.QueueOptions())
    directory.own("g")
    return directory


def claimed(files: LocalFiles, writer: str, owner: str = "driver") -> Ledger:
    ledger = Ledger(files, writer, owner)
    assert ledger.claim(ledger.read(), {})
    return ledger


def append(ledger: Ledger, *queues: QueueDirectory, given: list[Message] | None = None) -> None:
    """Publish the same messages on each queue, as a step does."""
    some = numbers(3) if given is None else given
    publish(ledger, {q: [data_file(q, ledger.processor, ledger.now.number + 1, some)] for q in queues})


def failing(access: str, prefix: str, error: Callable[[], BaseException]) -> Callable[[str, str], None]:
    """An interruption that raises at each access to names with a prefix."""

    def interrupt(kind: str, name: str) -> None:
        if kind == access and name.startswith(prefix):
            raise error()

    return interrupt


def eio() -> OSError:
    return OSError(5, "EIO")


def older(files: LocalFiles, names: Any, hours: float) -> None:
    """Let files look older."""
    when = time.time() - hours * 3600
    for name in names:
        os.utime(files.path(name), (when, when))


# --- functions of the graphs, as a module has them: they travel by name -----------------------------

DOWN: set[int] = set()
"""The messages that fail for now."""


def counted(message: Message, process: Any) -> Message:
    """The number of messages of a key so far; fails for those that are :data:`DOWN`."""
    if message["i"] in DOWN:
        raise ValueError("the service is down")
    process.state["n"] = process.state.get("n", 0) + 1
    return {**message, "n": process.state["n"]}


def same(message: Message) -> Message:
    return message


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_a_keyed_step_that_stops_twice_counts_no_message_twice(files: FaultyFiles, cores: int) -> None:
    """A step by key that fails runs again up to the failed message. This run may fail too, at an earlier message.

    It was then committed up to that message, with messages and state of calls after it: they were repeated later.
    """
    graph = Graph("g", [Stream(counted, "src", "out", id="s", key="k")])
    given = numbers(500, keys=7)
    failures = iter([{400, 450}, {300}, {200}, set(), {200}])

    def run(fail: bool) -> None:
        driver = DriverRun(files, graph, cores).feed("src", given).claim()
        real = driver.stage.run

        def counting(taking: Any) -> Any:
            DOWN.clear()
            DOWN.update(next(failures) if fail else ())
            return real(taking)

        driver.stage.run = counting  # type: ignore[method-assign]
        try:
            driver.run()
        finally:
            DOWN.clear()

    with pytest.raises(ProcessorStopped, match="the service is down"):
        run(True)
    assert DriverRun(files, graph).queues["out"].log(0).next == 200
    run(False)
    by_key = defaultdict(list)
    for message in DriverRun(files, graph).messages("out"):
        by_key[message["k"]].append((message["i"], message["n"]))
    expected = {k: [(m["i"], n) for n, m in enumerate((m for m in given if m["k"] == k), 1)] for k in range(7)}
    assert by_key == expected


def test_a_step_waits_for_no_messages_that_retention_has_removed_meanwhile(files: FaultyFiles) -> None:
    """Retention may remove files after a step has chosen its messages, and before it holds them.

    The step then failed with "the files had fewer messages", and asked to restore the directory from a copy.
    """
    retention = cues.QueueOptions(retention=cues.Retention(count=10))
    graph = Graph("g", [Stream(same, "src", "out", id="s")], queues={"src": retention})
    driver = DriverRun(files, graph).feed("src", numbers(60), lambda: 10).claim()
    take = driver.stage.take
    kept = driver.queues["src"].options.retention
    assert kept is not None

    def late() -> Any:
        taking = take()
        driver.maintenance.retain(driver.queues["src"].log(0), kept)
        return taking

    driver.stage.take = late  # type: ignore[method-assign]
    driver.run()
    assert [message["i"] for message in driver.messages("out")] == list(range(51, 61))


def test_messages_of_a_step_under_way_stay_whatever_the_retention(files: FaultyFiles) -> None:
    retention = cues.QueueOptions(retention=cues.Retention(count=10))
    graph = Graph("g", [Stream(same, "src", "out", id="s")], queues={"src": retention})
    driver = DriverRun(files, graph).feed("src", numbers(60), lambda: 10).claim()
    kept = driver.queues["src"].options.retention
    assert kept is not None
    real = driver.stage.run

    def late(taking: Any) -> Any:
        driver.maintenance.retain(driver.queues["src"].log(0), kept)
        return real(taking)

    driver.stage.run = late  # type: ignore[method-assign]
    driver.run()
    assert [message["i"] for message in driver.messages("out")] == list(range(1, 61))
    driver.maintenance.retain(driver.queues["src"].log(0), kept)
    assert driver.queues["src"].log(0).first == 51


def test_steps_leave_only_the_files_of_the_state(files: FaultyFiles) -> None:
    """A run of the state that is merged in the step that wrote it was never deleted: one file a merge, for ever.

    And each file that a step held stayed in the memory of the driver, with a count of 0.
    """
    graph = Graph("g", [Stream(counted, "src", "out", id="s", key="k")])
    driver = DriverRun(files, graph, size=lambda: 5).feed("src", numbers(300)).claim().run()
    named = {name for run in driver.stage.ledger.now.state for name in run.files}
    assert set(files.names("_cues/state/g.s")) == named
    assert len(named) <= state_files.MERGE_RUNS
    assert [message["n"] for message in driver.messages("out")] == [1 + i // 5 for i in range(300)]
    assert not any(directory.held for directory in driver.queues.values())


def test_a_run_that_does_not_count_leaves_no_files(files: FaultyFiles) -> None:
    """A keyed step that fails runs again. Files of the state of its first run stayed until the next start."""
    graph = Graph("g", [Stream(counted, "src", "out", id="s", key="k")])
    driver = DriverRun(files, graph, cores=2).feed("src", numbers(100)).claim()
    DOWN.add(50)
    try:
        with pytest.raises(ProcessorStopped):
            driver.run()
    finally:
        DOWN.clear()
    named = {name for run in driver.stage.ledger.now.state for name in run.files}
    assert set(files.names("_cues/state/g.s")) == named
    assert stored(driver.queues["out"]) == {file.name for file in driver.queues["out"].live}


def test_a_step_takes_fewer_messages_if_they_are_large_without_compression(
    files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a step was one of compressed files: of some messages, 60 times as many bytes were in the memory."""
    from cues.spark.cluster import step

    monkeypatch.setattr(step, "STEP_BYTES", 50_000)
    graph = Graph("g", [Stream(same, "src", "out", id="s")])
    driver = DriverRun(files, graph, size=lambda: 100)
    driver.feed("src", [{"i": i, "text": "x" * 1000} for i in range(500)]).claim().run()
    taken = [
        driver.stage.ledger.record_at(n).counts.get("taken", 0) for n in range(1, driver.stage.ledger.now.number + 1)
    ]
    assert sum(taken) == 500 and taken[0] == 100 and max(taken[1:]) <= 50


def test_a_frame_counts_each_message_and_each_retry_once(files: FaultyFiles) -> None:
    """The counters of a frame were multiplied by the number of its files."""
    from pyspark.sql import types as T

    tried: list[int] = []

    def halves(given: Frame) -> Frame:
        tried.append(1)
        if len(tried) == 1:
            raise ValueError("once")
        rows = given.collect()
        parts = [rows[:3], rows[3:6], rows[6:]]
        found = [[pa.record_batch({"i": [row.index for row in part]})] for part in parts]
        return Frame(found, T.StructType([T.StructField("i", T.LongType())]))

    stream = cues.Frame(halves, "src", "out", id="s", retries=cues.Retry(2, backoff_s=0.001))
    driver = DriverRun(files, Graph("g", [stream])).feed("src", numbers(10)).claim()
    driver.run()
    counters = driver.stage.counters
    assert (counters.steps, counters.taken, counters.written, counters.retries) == (1, 10, 10, 1)
    assert driver.stage.ledger.now.counts == {"taken": 10, "written": 10, "failed": 0}
    assert len(driver.queues["out"].live) == 3
    assert [message["i"] for message in driver.messages("out")] == list(range(1, 11))


@pytest.mark.parametrize("fault", ["data", "state"])
def test_a_filesystem_that_fails_for_a_moment_is_not_a_damaged_directory(files: FaultyFiles, fault: str) -> None:
    """Each OSError of a read was told as a file that cannot be read, with the advice to restore a copy."""

    class Failing(LocalFiles):
        def open(self, name: str) -> Any:
            raise eio()

    directory = queue_of(files)
    append(claimed(files, "g.x"), directory)
    run = state_files.write(files, "s", 1, {key_segment(1) + key_segment("n"): b"1"})
    failing_files = Failing(files.url)
    with pytest.raises(OSError, match="EIO"):
        if fault == "data":
            read(failing_files, Piece("q", directory.live[0], 0, 3))
        else:
            state_files.load(failing_files, "s", [run], None)


# --- several writers, and answers that are lost -----------------------------------------------------


def test_writers_after_a_failed_log_entry_get_other_indices(files: FaultyFiles) -> None:
    """A step commits files of two queues, and the log of the first one cannot be written.

    The files of the second queue were then forgotten. The next writer of that queue gave their indices to other
    messages, and no driver could start any more.
    """
    one, errors = queue_of(files, "a"), queue_of(files, "errors")
    x, y = claimed(files, "g.x"), claimed(files, "g.y")
    files.interrupt = failing("put", "a/_delta_log", eio)
    with pytest.raises(OSError, match="EIO"):
        append(x, one, errors, given=[{"i": 1}])
    append(y, errors, given=[{"i": 2}])  # the log of the other queue cannot be written still
    files.interrupt = lambda access, name: None
    append(y, errors, given=[{"i": 3}])
    with one.lock:
        one.settle()
    for directory in (one, errors, queue_of(files, "a"), queue_of(files, "errors")):
        assert [m["i"] for m in messages_of(directory)] == ([1] if directory.queue == "a" else [1, 2, 3])


def test_no_writer_guesses_whether_a_record_was_put(files: FaultyFiles) -> None:
    """The answer of a record's put is lost, and the record cannot be looked for: it may be there.

    Another writer of the same queue then gave the indices of the record to other messages.
    """
    graph = Graph("g", [Stream(same, "src", "out", id=name, errors=None) for name in "xy"])
    driver = DriverRun(files, graph).claim()
    out = driver.queues["out"]
    x, y = (stage.ledger for stage in driver.stages)
    files.interrupt = failing("names", "_cues/steps/g.x", eio)
    with pytest.raises(OSError, match="EIO"):
        append(x, out, given=[{"i": 1}])
    files.interrupt = lambda access, name: None
    with pytest.raises(OSError, match="it is not known whether a record"):
        append(y, out, given=[{"i": 2}])
    with pytest.raises(OSError, match="it is not known whether a record"):
        out.vacuum()
    again = DriverRun(files, graph).claim()
    append(again.stages[1].ledger, again.queues["out"], given=[{"i": 2}])
    assert [m["i"] for m in again.messages("out")] == [1, 2]


def test_a_put_whose_answer_is_lost_counts(files: FaultyFiles) -> None:
    """The filesystem writes the record, and reports an error. The driver then fenced itself at the next step."""
    directory, x = queue_of(files), claimed(files, "g.x")
    files.interrupt = failing("was put", "_cues/steps", eio)
    append(x, directory)
    append(x, directory)
    assert x.now.number == 2 and len(messages_of(directory)) == 6


def test_a_log_entry_whose_answer_is_lost_is_not_written_again(files: FaultyFiles) -> None:
    directory, x = queue_of(files), claimed(files, "g.x")
    files.interrupt = failing("was put", "q/_delta_log", eio)
    with pytest.raises(OSError, match="EIO"):
        append(x, directory)
    files.interrupt = lambda access, name: None
    append(x, directory)
    assert len(messages_of(directory)) == len(messages_of(queue_of(files))) == 6


def test_a_link_whose_answer_is_lost_counts(files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of NFS repeats a link whose answer was lost, and finds that the name is taken: by itself.

    The driver then took its own record for that of another driver.
    """
    x, link = claimed(files, "g.x"), os.link

    def repeated(draft: str, path: str) -> None:
        link(draft, path)
        raise FileExistsError(path)

    monkeypatch.setattr(files_module.os, "link", repeated)
    x.commit("step", counts={"taken": 3})
    monkeypatch.undo()
    x.commit("step", counts={"taken": 4})
    assert [x.record_at(n).counts for n in (1, 2)] == [{"taken": 3}, {"taken": 4}]
    with pytest.raises(Fenced):
        other = Ledger(files, "g.x", "other")
        assert other.claim(other.read(), {})
        x.commit("step")


def test_a_put_into_an_object_store_whose_answer_is_lost_counts() -> None:
    """The client of an object store repeats a put whose answer was lost, and finds its own file."""
    obstore = pytest.importorskip("obstore")
    from obstore.store import MemoryStore

    found = ObjectFiles.__new__(ObjectFiles)
    found.store = MemoryStore()
    found.obstore = type("Repeating", (), {"get": staticmethod(obstore.get)})

    def put(store: Any, name: str, data: bytes, mode: str) -> None:
        for _ in range(2):
            obstore.put(store, name, data, mode=mode)

    found.obstore.put = staticmethod(put)
    assert found.put("a", b"1")
    assert not found.put("a", b"2") and found.read("a") == b"1"


def test_a_fenced_driver_gives_no_index_twice(files: FaultyFiles) -> None:
    """The driver stops between the put of a record and its look for later ones. Another driver claims this processor.

    It forwards the record, and ends. The first driver continues, and is fenced, and it has not forwarded the record.
    Another of its processors, which nobody has claimed, then gave the indices of the record to other messages.
    """
    graph = Graph("g", [Stream(same, "src", "out", id=name) for name in "xy"])
    driver = DriverRun(files, graph).feed("src", numbers(3)).claim()
    x, y = driver.stages

    def stop(access: str, name: str) -> None:
        if access == "names" and name == "_cues/steps/g.x":
            files.interrupt = lambda access, name: None
            DriverRun(files, graph).stages[0].claim()

    files.interrupt = stop
    with pytest.raises(Fenced):
        x.step()
    y.step()
    again = DriverRun(files, graph).claim().run()
    assert [message["i"] for message in again.messages("out")] == [1, 2, 3, 1, 2, 3]


def test_a_driver_that_sleeps_at_its_start_deletes_no_state_of_its_successor(files: FaultyFiles) -> None:
    """A driver claims the processors, and sleeps before it lists the files that earlier drivers left.

    Another driver claims them, and makes steps. The first one continues: files of the state that its records do not
    name were all deleted, and those of the other driver are such files. No driver could start any more.
    """
    graph = Graph("g", [Stream(counted, "src", "out", id="s", key="k")])
    left = state_files.write(files, "_cues/state/g.s", 0, {key_segment(1) + key_segment("n"): b"1"}).files
    sleeper = DriverRun(files, graph).feed("src", numbers(20))
    sleeper.stage.claim()
    DriverRun(files, graph).claim().run()
    sleeper.sweep()
    assert not set(left) & set(files.names("_cues/state/g.s"))
    with pytest.raises(Fenced):
        sleeper.run()
    again = DriverRun(files, graph).feed("src", numbers(40)).claim().run()
    assert [message["n"] for message in again.messages("out")] == [1 + i // 5 for i in range(40)]


def test_a_removed_processor_owes_no_messages(files: FaultyFiles) -> None:
    """A driver died before it forwarded a step, and the next graph does not have the processor: the step was lost."""
    graph = Graph("g", [Stream(same, "src", "out", id=name) for name in "xy"])
    driver = DriverRun(files, graph).feed("src", numbers(3)).claim()
    files.interrupt = failing("put", "out/_delta_log", eio)
    with pytest.raises(ProcessorStopped):
        driver.stages[1].step()
    files.interrupt = lambda access, name: None
    smaller = DriverRun(files, Graph("g", [Stream(same, "src", "out", id="x")]))
    smaller.driver.forward_others({stage.ledger.processor for stage in smaller.stages})
    assert [message["i"] for message in smaller.messages("out")] == [1, 2, 3]


# --- maintenance ----------------------------------------------------------------------------------


def test_vacuum_keeps_what_somebody_may_need(files: FaultyFiles) -> None:
    """A file may be old when it leaves the log, or when a step reads it, or when its log entry is written.

    Vacuum looked at the time at which a file was written. So it deleted files that a merge had just replaced, files
    of a step whose log entry had failed, and files that a step read. It also deleted the identity of the queue.
    """
    directory, x = queue_of(files), claimed(files, "g.x")
    for _ in range(6):
        append(x, directory)
    older(files, (f"q/{name}" for name in stored(directory)), 30)
    older(files, ["q/_cues/queue.json", "q/_cues/writer.json"], 30)
    small = directory.live[:4]
    assert directory.replace(small, [maintenance.merged(files, "q", "g", small)])
    files.interrupt = failing("put", "q/_delta_log", eio)
    with pytest.raises(OSError, match="EIO"):
        append(x, directory)
    owed = x.now.files["q"][0].name
    abandoned, held, long = (data_file(directory, "g.x", number, numbers(1)).name for number in (98, 99, 100))
    files.write("q/somebody-elses.parquet", b"PAR1")
    older(files, [f"q/{name}" for name in (owed, abandoned, held, long, "somebody-elses.parquet")], 30)
    directory.hold([DataFile(held, 0, 1, 1, 1)])
    with pytest.raises(OSError, match="EIO"):
        directory.vacuum()  # the log cannot be written still
    assert {owed, abandoned} <= stored(directory)
    files.interrupt = lambda access, name: None
    directory.vacuum(lambda writer, record: (writer, record) == ("g.x", 100))  # a step that takes longer than a day
    assert {owed, held, long, "somebody-elses.parquet", *(file.name for file in small)} <= stored(directory)
    assert abandoned not in stored(directory)
    assert len(messages_of(queue_of(files))) == 7 * 3
    assert files.size("q/_cues/queue.json") and files.size("q/_cues/writer.json")


def test_a_merge_writes_a_large_file_rarely_again() -> None:
    """A merged file was merged again with each 64 small ones, up to half of 128 MB: 100 bytes written for each byte.

    The files that it replaces stay on the disk for a day.
    """
    live: list[DataFile] = []
    given = merged = 0
    for number in range(20_000):
        live.append(DataFile("f", 1 + 10 * number, 10, 5000, 0))
        given += 5000
        run, _ = maintenance.run_of_small(live, 64)
        if run:
            size, at = sum(file.size for file in run), live.index(run[0])
            live[at : at + len(run)] = [DataFile("m", run[0].first, run[-1].next - run[0].first, size, 0)]
            merged += size
    assert merged < 10 * given
    assert len(live) < 64 + 10


@pytest.mark.parametrize("retention", [cues.Retention(age=3600), cues.Retention(count=360)], ids=["age", "count"])
def test_merges_do_not_keep_messages_for_longer(
    files: FaultyFiles, monkeypatch: pytest.MonkeyPatch, retention: cues.Retention
) -> None:
    """Retention removes whole files, and a merge gave the first file new messages, before all of its own were old.

    With small messages this went on until the file was large. A queue that keeps an hour kept a day.
    """
    now_ms = 1_000_000_000_000
    monkeypatch.setattr(clock, "now_ns", lambda: now_ms * 1_000_000)
    driver = DriverRun(
        files, Graph("g", [Stream(same, "src", "out", id="s")], queues={"src": {"retention": retention}})
    )
    driver.claim().maintenance.merge_files = 5
    directory, feeder = driver.queues["src"], claimed(files, "g.src.feed")
    given = numbers(9)
    most = 0
    for _ in range(120):
        now_ms += 90_000  # an hour is 40 files and 360 messages
        file = data_file(directory, feeder.processor, feeder.now.number + 1, given)
        publish(feeder, {directory: [DataFile(file.name, 0, 9, file.size, now_ms)]})
        driver.maintenance.step()
        most = max(most, len(directory.live))
        log = directory.log(0)
        assert min(log.next - 1, 360) <= log.next - log.first <= 360 * 9 // 8 + 9
    assert most < 30, "files were merged"
    assert {file.writer for file in directory.live} == {"g.src.feed"}


def test_retention_by_bytes_keeps_its_limit_where_files_are_merged(files: FaultyFiles) -> None:
    """A merged file grew to any size, and left only as a whole: a queue that keeps 64 MB kept 192 MB."""
    limit = 100_000
    graph = Graph("g", [Stream(same, "src", "out", id="s")], queues={"src": {"retention": cues.Retention(bytes=limit)}})
    driver = DriverRun(files, graph).claim()
    driver.maintenance.merge_files = 3
    directory, feeder = driver.queues["src"], claimed(files, "g.src.feed")
    sizes, most = [], 0
    for number in range(120):
        given = [{"text": random.Random(number).randbytes(1000)}]
        publish(feeder, {directory: [data_file(directory, feeder.processor, feeder.now.number + 1, given)]})
        driver.maintenance.step()
        most = max(most, max(file.count for file in directory.live))
        sizes.append(sum(file.size for file in directory.live))
    assert most > 2, "files were merged"
    assert 0.8 * limit <= sizes[-1] <= max(sizes) <= 1.2 * limit


def test_a_merge_of_the_state_reads_only_what_its_task_merges(files: FaultyFiles) -> None:
    """Each task of a merge read every file whole: with 50 tasks, 50 times the state."""
    rows = {key_segment(i) + key_segment("n"): b"%d" % i for i in range(40_000)}
    run = state_files.write(files, "s", 1, rows)
    spans = [state_files.span(number, 4) for number in range(4)]
    groups = 0
    real = parquet.StoredFile.read

    def counted(file: parquet.StoredFile, numbers: Any, columns: Any = None) -> Any:
        nonlocal groups
        groups += len(numbers)
        return real(file, numbers, columns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet.StoredFile, "read", counted)
        merged = state_files.joined([state_files.merge(files, "s", 2, [run], True, None, span) for span in spans])
    assert merged is not None and state_files.load(files, "s", [merged], None) == rows
    assert groups <= -(-len(rows) // state_files.GROUP_ROWS) + len(spans)


# --- formats against simpler models -----------------------------------------------------------------

PLACES = st.integers(1, 1 << 40)
TIMES = st.integers(1, 1 << 50).map(lambda us: us * 1000)
EXTRAS = st.one_of(
    st.none(),
    st.dictionaries(
        st.sampled_from(["a", "q/queue", "tx/t", "é"]),
        st.one_of(st.integers(0, 5), st.dictionaries(st.sampled_from("xy"), st.integers(0, 3), min_size=1)),
        max_size=2,
    ),
)


def column(count: int, values: Any, more: Any) -> Any:
    """One value for all messages or for each; a 0 means that this message was not there."""
    each = st.lists(st.one_of(st.just(0), values), min_size=count, max_size=count)
    return st.one_of(st.none(), values, each, *more)


@st.composite
def provenances(draw: Any) -> Provenance:
    count = draw(st.integers(1, 6))
    columns = {}
    for queue in draw(st.lists(st.sampled_from(["A", "B", "C d%", "tx/t"]), unique=True, max_size=3)):
        ranges = PLACES.map(lambda start: range(start, start + count))
        time = None if queue == "tx/t" else draw(column(count, TIMES, []))
        columns[queue] = draw(column(count, PLACES, [ranges])), time
    extra = draw(st.one_of(EXTRAS, st.lists(EXTRAS, min_size=count, max_size=count)))
    return Provenance(count, columns, extra)


def metadata(came: Provenance) -> list[Message]:
    return [came.at(offset) for offset in range(came.count)]


def written(files: LocalFiles, given: list[Provenance], flush: Callable[[], bool] = lambda: False) -> DataFile:
    writer = Writer(files, "q", "p", 1, 5)
    for came in given:
        writer.add([b"x"] * came.count, [None] * came.count, came)
        if flush():
            writer.flush()
    file = writer.close()
    assert file is not None
    return file


@pytest.mark.slow
@pytest.mark.parametrize("examples", slow_except([30], [30, 120]))
def test_provenance_in_files_is_that_of_the_engine(tmp_path: Path, examples: int) -> None:
    """The metadata of messages is the same after a data file, a part of it, a merge, and the way to another task."""
    files = LocalFiles(str(tmp_path))

    @hypothesis.seed(seeds.new())
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink]
    )
    @hypothesis.given(st.lists(provenances(), min_size=1, max_size=4), st.data())
    def check(given: list[Provenance], data: Any) -> None:
        file = written(files, given, lambda: data.draw(st.booleans()))
        expected = [one for came in given for one in metadata(came)]
        low = data.draw(st.integers(0, file.count - 1))
        high = data.draw(st.integers(low + 1, file.count))
        rows = read_rows(files, [Piece("q", file, low, high)])
        assert metadata(rows.provenance) == expected[low:high]
        start = data.draw(st.integers(0, len(rows) - 1))
        stop = data.draw(st.integers(start + 1, len(rows)))
        assert metadata(rows.slice(start, stop).provenance) == expected[low + start : low + stop]
        chosen = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)).filter(any))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.table.schema) as stream:
            stream.write_table(rows.table.filter(pa.array(chosen)))
        sent = pa.ipc.open_stream(sink.getvalue()).read_all()
        moved = Rows(range(sent.num_rows), sent)
        assert metadata(moved.provenance) == list(itertools.compress(expected[low:high], chosen))
        merged = maintenance.merged(files, "q", "p", [file, file])
        assert metadata(read_rows(files, [Piece("q", merged, 0, merged.count)]).provenance) == expected * 2

    check()


@pytest.mark.parametrize(
    "came",
    [
        batch.split_meta({"q/meta": {}}, Provenance(1, {}))[1],
        batch.split_meta({"q/meta": {"q/hash": "00"}}, Provenance(1, {}))[1],
        merge(
            [
                Provenance(2, {"A": (range(1, 3), None)}, [None, {"x": 1}]),
                Provenance(2, {"B": (range(1, 3), None)}, [None, {"y": 1}]),
            ]
        ),
    ],
    ids=["empty", "only the hash", "a join of messages without metadata"],
)
def test_metadata_may_be_empty(files: FaultyFiles, came: Provenance) -> None:
    """Empty metadata is a map without items, which was packed as such a map and not as NULL: pyarrow refused it.

    The processor then stopped at the message, in every start.
    """
    file = written(files, [came])
    assert metadata(read_rows(files, [Piece("q", file, 0, file.count)]).provenance) == metadata(came)


def test_a_function_may_return_empty_metadata(files: FaultyFiles) -> None:
    graph = Graph("g", [Stream(lambda message: {**message, "q/meta": {}}, "src", "out", id="s")])
    driver = DriverRun(files, graph).feed("src", numbers(2)).claim().run()
    assert driver.messages("out") == numbers(2)


def test_more_messages_than_a_row_group_has(files: FaultyFiles) -> None:
    """The provenance of all messages of a call of add() was built at once, however many they are."""
    count = 2 * GROUP_ROWS + 10
    came = Provenance(count, {"src": (range(7, 7 + count), None)})
    writer = Writer(files, "q", "p", 1, 5)
    writer.add([b"%d" % i for i in range(count)], [None] * count, came, list(range(count)))
    assert max(batch.num_rows for batch in writer.batches) == GROUP_ROWS
    file = writer.close()
    assert file is not None
    rows = read_rows(files, [Piece("q", file, GROUP_ROWS - 1, GROUP_ROWS + 1)])
    assert rows.values == [b"%d" % (GROUP_ROWS - 1), b"%d" % GROUP_ROWS]
    assert rows.times_us == [GROUP_ROWS - 1, GROUP_ROWS]
    assert metadata(rows.provenance) == metadata(came.slice(GROUP_ROWS - 1, GROUP_ROWS + 1))


def test_messages_that_wait_for_a_row_group_keep_their_order_and_their_hashes(files: FaultyFiles) -> None:
    """Some have provenance, and are written at once; those before them wait; a large one waits for no other."""
    hashes = [f"{n:032x}" for n in range(9)]
    writer = QueueWriter(files, "q", cues.QueueOptions(), "p", 1, 5, TypedColumns())
    writer.add_plain([b"a", b"bc"], hashes[:2], [1, 1])
    writer.add_plain([b"d"] * 3, hashes[2:4], [2, 1])
    writer.add([b"e"], hash_runs([hashes[4]], [1]), Provenance(1, {"src": (7, None)}))
    writer.add_plain([b"f" * (2 << 20)], [hashes[5]], [1])
    assert not writer.plain.counts
    writer.add_plain([b"g"] * (GROUP_ROWS + 1), [hashes[6]], [GROUP_ROWS + 1])
    writer.add_plain([b"h"], [hashes[7]], [1])
    (file,) = writer.close()
    rows = read_rows(files, [Piece("q", file, 0, file.count)])
    assert rows.values == [b"a", b"bc", b"d", b"d", b"d", b"e", b"f" * (2 << 20), *[b"g"] * (GROUP_ROWS + 1), b"h"]
    counts = [1, 1, 2, 1, 1, 1, GROUP_ROWS + 1, 1]
    assert rows.hashes == [hash for hash, count in zip(hashes, counts) for _ in range(count)]
    assert [bool(metadata(rows.slice(at, at + 1).provenance)[0]) for at in (4, 5, 6)] == [False, True, False]


def test_record_batches_of_one_append_are_copied_as_one_run(tmp_path: Path) -> None:
    """Each message keeps its time, hash, metadata and bytes: of small records, of long ones, and of parts of them."""
    given: list[Message] = [{"n": n} for n in range(3000)]
    with cues.open(tmp_path / "store") as store:
        queue = store.queue("in")
        appender = queue.appender()
        appender.write_many(given[:2000])
        appender.write_many(given[2000:2900])
        for message in ({"long": "x" * 10_000}, {"n": 0, "q/meta": {"own": 1}}, {"n": 1, "q/meta": {"own": 2}}):
            appender.write(message)
        appender.write_many(given[2900:])
        log, total = queue.core.log, queue.core.row().next - 1
        with store.core.view() as txn:
            batches = log.batches(log.read(txn, log.row(txn), 1, total, 1 << 30))
        parts = [(batch, batch.first, batch.next) for batch in batches]
        batches[2].head.hash = bytes(16)  # as of another step with the same time
        parts[0] = batches[0], 2, batches[0].next - 1  # a copy may begin and end within a record
        runs = list(feeder.runs_of(parts))
        values = [value for run in runs for value in run.values.to_pylist()]
        times = [run.time_us for run in runs for _ in range(len(run.values))]
        meta = [run.provenance.at(offset) for run in runs for offset in range(len(run.values))]
        wanted = [(batch, at) for batch, low, high in parts for at in range(low - batch.first, high - batch.first)]
        assert values == [cues.codec.pack(batch.messages()[at]) for batch, at in wanted]
        assert times == [batch.head.time_ns // 1000 for batch, _ in wanted]
        assert [entry.get("own") for entry in meta if entry] == [1, 2]
        hashes = [run.hash for run in runs for _ in range(len(run.values))]
        assert hashes == [batch.head.hash.hex() if batch.head.hash else None for batch, _ in wanted]
        assert len(batches) >= 13 and len(runs) == 8


@pytest.mark.parametrize("seed", seeds.among(range(20), fast=6))
def test_state_in_files_is_a_dict(files: FaultyFiles, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    print(f"{seeds.VARIABLE}={seed}")
    chance = random.Random(seed)
    for name, choices in {
        "GROUP_ROWS": (1, 2, 5, 4096),
        "_TASK_BYTES": (200, 2000, 1 << 26),
        "MERGE_RUNS": (2, 3, 8),
        "_SMALL_BYTES": (0, 100, 64 << 10),
        "_CACHE_BYTES": (10, 1000, 1 << 28),
    }.items():
        monkeypatch.setattr(state_files, name, chance.choice(choices))
    some = (lambda i: i, lambda i: f"k{i}", lambda i: "x" * (190 + i), lambda i: None, lambda i: (i,))
    keys = [key_segment(chance.choice(some)(i)) for i in range(chance.randint(1, 30))]
    runs: tuple[state_files.StateRun, ...] = ()
    model: dict[bytes, bytes] = {}
    for record in range(chance.randint(1, 15)):
        tasks = chance.randint(1, 4)
        changes: dict[bytes, bytes | None] = {}
        for _ in range(chance.randint(0, 10)):
            row = chance.choice(keys) + key_segment(chance.choice(["f", "g", 7]))
            changes[row] = None if chance.random() < 0.4 else bytes([chance.randint(0, 255)]) * chance.randint(0, 5)
        by_task: dict[int, dict[bytes, bytes | None]] = defaultdict(dict)
        for row, value in changes.items():
            key = key_of_row(row)
            by_task[state_files.task_of(key, tasks)][row] = value
            span = state_files.span(state_files.task_of(key, tasks), tasks)
            assert span.low <= state_files.slot_of(key) < span.high
        changed = state_files.joined([state_files.write(files, "s", record, part) for part in by_task.values()])
        model = {row: value for row, value in {**model, **changes}.items() if value is not None}
        if changed is not None:
            runs = (*runs, changed)
            if count := state_files.to_merge(runs):
                before, newest = runs[:-count], runs[-count:]
                spans = state_files.spans(newest)
                merged = [state_files.merge(files, "s", record, newest, not before, None, span) for span in spans]
                one = state_files.joined(merged)
                runs = before if one is None else (*before, one)
        assert state_files.load(files, "s", runs, None) == model
        wanted = set(chance.sample(keys, chance.randint(1, len(keys))))
        for found in (state_files.load(files, "s", runs, wanted), model):
            part = {row: value for row, value in found.items() if key_of_row(row) in wanted}
            assert part == {row: v for row, v in model.items() if key_of_row(row) in wanted}


@pytest.mark.parametrize("seed", seeds.among(range(2)))
def test_two_writers_and_two_keepers_of_a_queue_make_one_list(files: FaultyFiles, seed: int) -> None:
    """Two processors of one driver write, and it and another driver merge, all at the same time."""
    print(f"{seeds.VARIABLE}={seed}")
    chance = random.Random(seed)
    name = "a b%c~é_"
    directory, other = queue_of(files, name), queue_of(files, name)
    counts = {writer: [chance.randint(1, 3) for _ in range(12)] for writer in ("g.x", "g.y")}
    lists: dict[str, list[int]] = {}
    ended = threading.Event()
    errors: list[BaseException] = []

    def write(writer: str) -> None:
        ledger = claimed(files, writer)
        for number, count in enumerate(counts[writer]):
            append(ledger, directory, given=[{"w": writer, "n": number, "j": j} for j in range(count)])

    def keep(queue: QueueDirectory) -> None:
        last = False
        while not last:
            last = ended.is_set()
            queue.read_on()
            small, _ = maintenance.run_of_small(queue.live, 4)
            if small:
                one = [maintenance.merged(files, queue.folder, "g", small)]
                with queue.lock:
                    while {file.name for file in small} <= {file.name for file in queue.live}:
                        if queue.replace(small, one):
                            break

    def reporting(call: Callable[[Any], None], given: Any) -> None:
        try:
            call(given)
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=reporting, args=(write, writer)) for writer in counts]
    keepers = [threading.Thread(target=reporting, args=(keep, queue)) for queue in (directory, other)]
    for thread in (*writers, *keepers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    for thread in keepers:
        thread.join()
    assert not errors
    if seed % 2:
        directory.checkpoint()
    for queue in (directory, queue_of(files, name)):
        lists = defaultdict(list)
        for message in messages_of(queue):
            lists[message["w"]].append((message["n"], message["j"]))
        assert lists == {w: [(n, j) for n, count in enumerate(c) for j in range(count)] for w, c in counts.items()}
        assert {writer: queue.published(writer) for writer in counts} == dict.fromkeys(counts, 12)


# --- several tasks, one task, and the embedded engine -----------------------------------------------


def flaky(message: Message, process: Any) -> Message | None:
    """Some messages fail, some are dropped, and the count of the others is kept."""
    if message["i"] % 11 == 3:
        raise ValueError("bad")
    if message["i"] % 7 == 5:
        return None
    process.state["n"] = process.state.get("n", 0) + 1
    return {**message, "n": process.state["n"], "from": process.binding}


def some(message: Message) -> list[Message]:
    """No message, or several, or a failure."""
    if message["i"] % 13 == 5:
        raise ValueError("bad")
    return [{**message, "copy": copy} for copy in range(message["i"] % 3)]


def forked(message: Message) -> dict[str, Any]:
    """Messages for two outputs, which are the same queue."""
    i = message["i"]
    return {"a": [{"i": i, "to": "a"}] * (i % 2), "b": [{"i": i, "to": "b"}] * (i % 3)}


def joined(a: Message, b: Message) -> Message:
    return {"a": a["i"], "b": b["i"]}


def joined_by_key(a: Message, b: Message, process: Any) -> Message:
    process.state["sum"] = process.state.get("sum", 0) + a["i"]
    return {"a": a["i"], "b": b["i"], "k": a["k"], "sum": process.state["sum"]}


def summed(messages: list[Message], process: Any) -> list[Message]:
    if messages[0]["i"] % 5 == 1:
        raise ValueError("bad")
    return [{"all": [m["i"] for m in messages], "at": list(process.indices)}]


def ran(messages: list[Message], process: Any) -> list[Message]:
    """The state of a batch function."""
    process.state["calls"] = process.state.get("calls", 0) + 1
    return [{"call": process.state["calls"], "all": [m["i"] for m in messages]}]


def totals(message: Message, process: Any) -> Message:
    """State without a key: only one task has it."""
    process.state["sum"] = process.state.get("sum", 0) + message["i"]
    return {"sum": process.state["sum"]}


def halved(messages: list[Message], process: Any) -> list[Message]:
    """Some messages fail in any batch that has one, when its messages are changed already."""
    result = {"all": [message.pop("i") for message in messages], "at": list(process.indices)}
    if any(i % 13 == 5 for i in result["all"]):
        raise ValueError("bad")
    return [result]


def halved_with_state(messages: list[Message], process: Any) -> list[Message]:
    process.state["ran"] = process.state.get("ran", 0) + len(messages)
    return [{**message, "ran": process.state["ran"]} for message in halved(messages, process)]


def odd(message: Message) -> bool:
    return bool(message["i"] % 2)


CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "messages": (some, "src", "out", {}),
    "filter": (same, "src", "out", {"where": odd}),
    "state": (totals, "src", "out", {}),
    "key": (flaky, "src", "out", {"key": "k"}),
    "key and filter": (flaky, "src", "out", {"key": "k", "where": odd}),
    "key and side effects": (flaky, "src", "out", {"key": "k", "side_effects": True}),
    "at most once": (flaky, "src", "out", {"key": "k", "strategy": "at-most-once"}),
    "alts": (same, AnyOf("src", "more"), "out", {}),
    "alts by key": (flaky, AnyOf("src", "more"), "out", {"key": "k"}),
    "join": (joined, {"a": "src", "b": "more"}, "out", {}),
    "join by key": (joined_by_key, {"a": "src", "b": "more"}, "out", {"key": "k"}),
    "batches": (summed, "src", "out", {"batch": True, "batch_size": 7}),
    "batches with state": (ran, "src", "out", {"batch": True, "batch_size": 7}),
    "batches that are halved": (halved, "src", "out", {"batch": True, "batch_size": 7, "step_s": None}),
    "batches with state that are halved": (
        halved_with_state,
        "src",
        "out",
        {"batch": True, "batch_size": 7, "step_s": None, "retries": cues.Retry(2, backoff_s=0)},
    ),
    "two outputs on one queue": (forked, "src", {"a": "out", "b": "out"}, {}),
}


def sources(message: Message) -> dict[str, dict[str, int]]:
    """The places of the messages that an output message was made from. A batch has the place of its last one."""
    if "sum" in message and "a" not in message:
        return {"src": {"q/t": math.isqrt(2 * message["sum"])}}
    made_from = [message[name] for name in "iab" if name in message] or [message["all"][-1]]
    return {"src" if i < 1000 else "more": {"q/t": i % 1000} for i in made_from}


def outcome(out: list[Message], errors: list[Message], ordered: bool) -> Any:
    """All messages in order, or those of each key and input in order; and the messages that failed."""
    failed = sorted(str([m["i"] for m in next(iter(e["err.proc/messages"].values()))]) for e in errors)
    plain = [{name: value for name, value in message.items() if name != "q/meta"} for message in out]
    if ordered:
        return plain, failed
    by_key: dict[Any, list[Message]] = defaultdict(list)
    for message in plain:
        by_key[message["k"], message.get("i", 0) >= 1000].append(message)
    return dict(by_key), failed


@pytest.mark.parametrize("case", slow_except(["state", "key and filter", "alts by key", "join", "batches"], CASES))
def test_several_tasks_do_the_same_as_one_and_as_the_embedded_engine(files: FaultyFiles, case: str) -> None:
    """A key decides the task of each message; state moves with it. Without a key the order of messages stays."""
    function, inputs, outputs, options = CASES[case]
    given, more = numbers(200), [{"i": 1000 + i, "k": i % 3} for i in range(1, 201)]

    def graph() -> Graph:
        stream = Stream(function, inputs, outputs, id="s", **options)
        return Graph("g", [stream], errors="errors", queues={"*": {"metadata": ["t"]}})

    with testing.temporary_store() as store:
        store.queue("src").appender().write_many(given)
        store.queue("more").appender().write_many(more)
        testing.run_until_idle(graph(), store)
        alts = isinstance(inputs, AnyOf)
        embedded = [testing.messages(store, queue) for queue in ("out", "errors")]
    if case == "two outputs on one queue":  # here the messages of one call are together, whatever the parts are
        embedded[0].sort(key=lambda message: (message["i"], message["to"]))
    for cores, size in ((1, 1000), (1, 37), (2, 50), (3, 64)):
        place = FaultyFiles(f"{files.url}-{cores}-{size}")
        driver = DriverRun(place, graph(), cores, lambda size=size: size)
        for queue, messages in (("src", given), ("more", more)):
            if queue in driver.queues:
                driver.feed(queue, messages, lambda: 30)
        driver.claim().run()
        ordered = not alts and ("key" not in options or cores == 1)
        found = [driver.messages(queue) for queue in ("out", "errors")]
        if case == "alts by key":  # the order of two inputs is free, so only their counts are the same
            for messages in (*embedded, *found):
                for message in messages:
                    message.pop("n", None)
        assert outcome(*found, ordered) == outcome(*embedded, ordered), (cores, size)
        for message, one in zip(driver.messages("out"), metadata_of(driver.queues["out"])):
            assert one["q/queue"] == sources(message), (cores, size, message)


# --- a target that knows its last message ---------------------------------------------------------


def told_batch(given: list[Message]) -> Message:
    return {"batch": [message["i"] for message in given]}


def test_a_repeated_step_has_the_batches_with_which_it_was_taken(files: FaultyFiles) -> None:
    """Its calls have effects outside, so a later start with another ``batch_size`` calls with the same ranges."""

    def graph(size: int) -> Graph:
        return Graph("g", [Stream(told_batch, "src", "out", id="p", batch=True, batch_size=size, side_effects=True)])

    first = DriverRun(files, graph(4)).feed("src", numbers(10)).claim()
    first.stage.ledger.commit("taking", taking=first.stage.take())
    again = DriverRun(files, graph(3)).claim().run().messages("out")
    assert [message["batch"] for message in again] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]


def kept_in_target(given: Any, process: Any) -> None:
    for message in given if isinstance(given, list) else [given]:
        process.connection.execute("insert into numbers values (?)", (message["i"],))
        if message["i"] in (4, 5, 9):
            raise ValueError("bad")


def died_writing_to_a_target(place: Path, batch: bool, deaths: int) -> bool:
    """Die at access number ``deaths`` of the directory, and run again. Return True if there were fewer accesses."""
    place.mkdir()
    target = sql.SQLite(place / "target.db", "create table if not exists numbers (i integer)")
    files = FaultyFiles(str(place / "queues"))
    sink = cues.Sink(kept_in_target, "src", id="s", batch=batch, batch_size=4, checkpoint=target)
    graph = Graph("g", [sink], errors="errors")
    DriverRun(files, graph).feed("src", numbers(18), lambda: 5)
    left = itertools.count(deaths, -1)

    def interrupt(access: str, name: str) -> None:
        if not next(left):
            raise Died

    files.interrupt = interrupt
    died = True
    try:
        DriverRun(files, graph).claim().run()
        died = False
    except Died:
        pass
    files.interrupt = lambda access, name: None
    driver = DriverRun(files, graph).claim().run()
    with contextlib.closing(sqlite3.connect(place / "target.db")) as database:
        rows = [i for (i,) in database.execute("select i from numbers order by rowid")]
    failed = [[m["i"] for m in error["err.proc/messages"]["src"]] for error in driver.messages("errors")]
    if batch:  # a sink is not halved here, because its step is one commit after all calls
        assert (rows, failed) == ([13, 14, 15, 16, 17, 18], [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]), deaths
    else:
        assert (rows, failed) == ([1, 2, 3, 6, 7, 8, *range(10, 19)], [[4], [5], [9]]), deaths
    return not died


@pytest.mark.slow
@pytest.mark.parametrize("batch", [False, True])
def test_a_target_that_knows_its_last_message_loses_no_failed_message(tmp_path: Path, batch: bool) -> None:
    """Calls after a failure of the same step moved the target. After a death the failed message counted as written."""
    deaths = 0
    while not died_writing_to_a_target(tmp_path / str(deaths), batch, deaths):
        deaths += 1
    assert deaths > 20


# --- random deaths --------------------------------------------------------------------------------


def numbered_by_key(message: Message, process: Any) -> Message:
    """The number of messages of a key, a row of state that comes and goes, and the queues of the metadata."""
    if message["i"] % 11 == 3:
        raise ValueError("bad")
    state = process.state
    state["n"] = state.get("n", 0) + 1
    if state["n"] % 4 == 0:
        state["fourth"] = 1
    elif "fourth" in state:
        del state["fourth"]
    queues = sorted(process.metadata.get("q/queue", {}))
    return {**message, "n": state["n"], "fourth": "fourth" in state, "queues": queues}


def counted_once(message: Message, process: Any) -> Message:
    process.state["n"] = process.state.get("n", 0) + 1
    return {"i": message["i"], "n": process.state["n"]}


def sevens(messages: list[Message], process: Any) -> list[Message]:
    return [{"all": [m["i"] for m in messages], "at": list(process.indices)}]


def deadly_graph() -> Graph:
    streams = [
        Stream(some, "src", "mid", id="some"),
        Stream(numbered_by_key, "mid", "out", id="keyed", key="k"),
        Stream(joined, {"a": "mid", "b": "out"}, "joined", id="join"),
        Stream(sevens, "mid", "batches", id="batch", batch=True, batch_size=7),
        Stream(counted_once, "src", "counted", id="effects", side_effects=True),
    ]
    queues = {"src": cues.QueueOptions(metadata={"t", "time"}), "mid": cues.QueueOptions(metadata={"t"})}
    return Graph("g", streams, errors="errors", queues=queues)


class DeadlyRun(RandomDeaths):
    COUNT = 60

    def graph(self) -> Graph:
        return deadly_graph()

    def given(self) -> list[Message]:
        return numbers(self.COUNT)

    def compare(self, driver: DriverRun) -> None:
        given = self.given()
        mid = [m for message in given if message["i"] % 13 != 5 for m in some(message)]
        counts: dict[int, int] = defaultdict(int)
        by_key: dict[int, list[Any]] = defaultdict(list)
        for message in mid:
            if message["i"] % 11 != 3:
                k = message["k"]
                counts[k] += 1
                by_key[k].append((message["i"], counts[k], counts[k] % 4 == 0, ["mid", "src"]))
        found: dict[int, list[Any]] = defaultdict(list)
        out = driver.messages("out")
        for message in out:
            found[message["k"]].append((message["i"], message["n"], message["fourth"], message["queues"]))
        batches = driver.messages("batches")
        failed = [next(iter(error["err.proc/messages"].values()))[0]["i"] for error in driver.messages("errors")]
        assert driver.messages("src") == given
        assert driver.messages("mid") == mid
        assert found == by_key
        assert driver.messages("joined") == [{"a": a["i"], "b": b["i"]} for a, b in zip(mid, out)]
        assert [i for message in batches for i in message["all"]] == [message["i"] for message in mid]
        assert [at for message in batches for at in message["at"]] == list(range(1, len(mid) + 1))
        assert driver.messages("counted") == [{"i": i, "n": i} for i in range(1, self.COUNT + 1)]
        bad = [m["i"] for m in given if m["i"] % 13 == 5] + [m["i"] for m in mid if m["i"] % 11 == 3]
        assert sorted(failed) == sorted(bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*seeds.among(range(15), fast=3), *(pytest.param(n, marks=pytest.mark.long) for n in range(15, 400))]
)
def test_drivers_that_die_or_sleep_at_any_access_lose_and_repeat_nothing(files: FaultyFiles, seed: int) -> None:
    DeadlyRun(seed, files).finish()


def overwrite(files: FaultyFiles, name: str, data: bytes) -> bool:
    files.interrupt("put", name)
    files.write(name, data)
    files.interrupt("was put", name)
    return True


CONTROLS: dict[str, tuple[Any, str, Any]] = {
    "puts overwrite": (FaultyFiles, "put", overwrite),
    "forwarding does not look at the transaction": (QueueDirectory, "published", lambda queue, writer: -1),
}


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_deaths_find_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: str) -> None:
    """Without one of the protections, some run of a few ends with other messages, or cannot go on."""
    owner, name, wrong = CONTROLS[control]
    monkeypatch.setattr(owner, name, wrong)
    for seed in range(30):
        try:
            DeadlyRun(seed, FaultyFiles(str(tmp_path / str(seed)))).finish()
        except (CuesError, AssertionError) as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail("no run was wrong")


# --- operators and readers ------------------------------------------------------------------------


def test_a_driver_in_another_container_of_this_machine_keeps_its_lease(
    files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both containers have the boot id of their machine, and the pid of one means nothing in the other.

    The lease was taken at once, and an operator's command deleted the queues of a driver that ran.
    """
    with monkeypatch.context() as there:
        there.setattr(lease_module, "this_machine", lambda: "the same boot, other process ids")
        DriverLease(files, "g", "other").beat()
    waits: list[float] = []
    other = DriverLease(files, "g", "other")

    def beating(seconds: float) -> None:
        waits.append(seconds)
        other.beat()

    monkeypatch.setattr(lease_module, "time", SimpleNamespace(sleep=beating, monotonic=time.monotonic))
    with pytest.raises(AlreadyRunning, match="runs the graph 'g'"), operations.running_none(files, "g"):
        raise AssertionError("the lease of a driver that runs was taken")
    assert len(waits) == 1


def test_the_lease_of_a_dead_process_of_this_machine_is_taken_at_once(
    files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_wait(seconds: float) -> None:
        raise AssertionError("it waits for a dead driver")

    DriverLease(files, "g", "dead").beat()
    monkeypatch.setattr(lease_module, "time", SimpleNamespace(sleep=no_wait, monotonic=time.monotonic))
    with operations.running_none(files, "g"):
        pass


LEASE = "_cues/g.driver.json"


@pytest.mark.parametrize("error", [Unsupported("no Spark.", "get one."), KeyboardInterrupt(), None])
def test_the_lease_is_held_while_spark_starts_and_given_back_if_it_does_not(
    files: FaultyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    """A second driver was refused only after its Spark had started, and nobody saw the first one until then."""
    graph = Graph("g", [Stream(same, "src", "out")])
    places: dict[str, Any] = {"engine": "spark", "store": tmp_path / "store", "queues": files.url}
    DriverRun(files, graph)
    monkeypatch.setattr(lease_module, "LEASE_BEAT_S", 0.01)
    starts: list[bytes | None] = []

    def start(*_: object) -> None:
        starts.append(first := files.read(LEASE))
        while files.read(LEASE) == first:
            time.sleep(0.01)
        with pytest.raises(AlreadyRunning, match="runs the graph 'g'"):
            graph.start(**places)
        if error is not None:
            raise error
        # A beat reads and then writes: one that had read before the takeover would write over it.
        monkeypatch.setattr(lease_module, "LEASE_BEAT_S", 60)
        time.sleep(0.3)
        with lease_module.held(files, "g", "other", take_over=True):
            (one := DriverLease(files, "g", "g's")).beat()
            assert b"other" in (files.read(LEASE) or b"")
            one.release()
        raise Unsupported("taken over.", "")

    monkeypatch.setattr(engine_module, "open_session", start)
    with pytest.raises(type(error) if error is not None else Unsupported):
        graph.start(**places)
    assert len(starts) == 1 and starts[0] is not None
    assert files.read(LEASE) is None and not [t for t in threading.enumerate() if "lease" in t.name]
    assert not (tmp_path / "store").exists()


def test_a_dry_run_takes_no_lease_and_a_graph_without_spark_makes_no_directory(
    files: FaultyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "graph.py"
    file.write_text("from cues import Graph, Source\ngraph = Graph('g', [Source('in')])\n")
    monkeypatch.setattr(lease_module, "LEASE_BEAT_S", 3600)
    with lease_module.held(files, "g", "other", take_over=False):
        before = files.read(LEASE)
        run = terminal.cues("run", str(file), "--engine", "spark", "--queues", files.url, "--dry-run")
        assert run.code == 0 and files.read(LEASE) == before
    assert terminal.cues("run", str(file), "--engine", "spark", "--queues", files.url, "--dry-run").code == 0
    assert files.read(LEASE) is None

    def start(*_: object) -> None:
        raise Unsupported("no Spark.", "get one.")

    monkeypatch.setattr(engine_module, "open_session", start)
    with pytest.raises(Unsupported, match="no Spark"):
        Graph("g", [Stream(same, "src", "out")]).start(engine="spark", queues=tmp_path / "new", store=tmp_path / "s")
    assert not (tmp_path / "new").exists()


def test_a_processor_named_feed_is_not_a_feeder(files: FaultyFiles) -> None:
    """The records of feeders end with ``.feed`` too. So seek refused the processor, and status had no lag for it."""
    graph = Graph("g", [Stream(add_ten, "in", "out", id="feed")])
    DriverRun(files, graph).claim().feed("in", numbers(20)).run()
    feed, feeder = inspection.processors_of(files.url)
    assert (feed.processor, feed.is_feeder) == ("g.feed", False)
    assert (feeder.processor, feeder.is_feeder) == ("g.sources.feed", True)
    moved = terminal.cues("seek", f"{files.url}#feed/0", "--to", 11, "--yes")
    assert moved.code == 0, moved
    assert [m["i"] for m in DriverRun(files, graph).claim().run().messages("out")[20:]] == list(range(21, 31))


def add_ten(message: Message) -> Message:
    return {"i": message["i"] + 10}


def test_a_path_that_delta_rs_would_decode_is_refused(tmp_path: Path) -> None:
    """The driver made its queues there, could not read their logs, and named them damaged."""
    with pytest.raises(Unsupported, match="decodes the percent sign"):
        LocalFiles(str(tmp_path / "a%20b"))
    assert not (tmp_path / "a%20b").exists()
    graph = Graph("g", [Stream(add_ten, "in", "out")])
    run = DriverRun(FaultyFiles(str(tmp_path / "50% of it")), graph).claim().feed("in", numbers(3)).run()
    assert len(run.messages("out")) == 3


def test_a_stream_does_not_continue_on_a_new_queue(files: FaultyFiles) -> None:
    """The graph was started over. The stream found no new entries of the old log, and was idle without an error."""
    queue = queue_of(files)
    ledger = claimed(files, "g.p")
    append(ledger, queue)
    reader = SharedQueue(QueueAddress(files.url, "q", shared=True))
    assert reader.ends() == ((1,), (4,))
    part = operations.files_of(files, "g")
    assert part is not None
    operations.remove(files, "g", part)
    for _ in range(2):
        with pytest.raises(Diverged, match="a new checkpoint"):
            reader.ends()
        append(claimed(files, "g.p"), queue_of(files))


def removed(files: LocalFiles, graph: str = "g") -> None:
    """As cues run --fresh does it."""
    part = operations.files_of(files, graph)
    assert part is not None
    operations.remove(files, graph, part)


def look(files: LocalFiles) -> inspection.QueueReader:
    return inspection.QueueReader(files.url, "q")


def query(files: LocalFiles) -> SharedQueue:
    return SharedQueue(QueueAddress(files.url, "q", shared=True))


@pytest.mark.parametrize("reader", [look, query])
def test_looking_at_a_queue_that_is_removed_at_this_moment_makes_none(
    files: FaultyFiles, monkeypatch: pytest.MonkeyPatch, reader: Callable[[LocalFiles], Any]
) -> None:
    """The reader opened the queue as a driver does. A queue without messages stayed, which no graph writes."""
    append(claimed(files, "g.p"), queue_of(files))
    monkeypatch.setattr(directory_module, "refuse_old", lambda *_: removed(files))
    with pytest.raises(cues.errors.QueueNotFound, match="The queue 'q' is not in"):
        reader(files)
    assert files.names("q") == [] and inspection.queues_of(files.url) == []


def test_tail_says_that_the_queue_was_removed(files: FaultyFiles) -> None:
    """Its files are gone then, and the error told to restore the directory from a copy."""
    files.put("_cues/id.json", b'{"id": "00"}')
    queue, ledger = queue_of(files), claimed(files, "g.p")
    append(ledger, queue)
    reader = look(files)
    when = next(reader.read([1])).time
    append(ledger, queue)
    removed(files)
    for act in (
        lambda: list(reader.read([1])),
        lambda: reader.has_more([5]),
        lambda: reader.last(1, lambda message: True),
        lambda: reader.place_of(when, "--from"),
    ):
        with pytest.raises(cues.errors.QueueNotFound, match="or is a new one of that name"):
            act()
    files.delete("q")
    append(claimed(files, "g.p"), queue_of(files))
    reader = look(files)
    files.delete(f"q/{queue_of(files).live[0].name}")
    with pytest.raises(Diverged, match="is missing"):
        list(reader.read([1]))


def test_seek_to_the_end_is_after_what_a_dead_driver_has_committed(files: FaultyFiles) -> None:
    """The files of its last step are in a record, and in no log. They were after the end, and were processed later."""
    graph = Graph("g", [Stream(same, "src", "mid", id="first"), Stream(same, "mid", "out", id="second")])
    driver = DriverRun(files, graph).feed("src", numbers(10)).claim()
    files.interrupt = failing("put", "mid/_delta_log", Died)
    with pytest.raises(Died):
        driver.run()
    files.interrupt = lambda access, name: None
    assert driver.stages[0].ledger.read() and QueueDirectory(files, "mid", cues.QueueOptions()).log(0).next == 1
    moved = terminal.cues("seek", f"{files.url}#second", "--to", "end", "--yes")
    assert moved.code == 0 and "from 1 to 11 (10 messages skipped)" in moved.err, moved
    again = DriverRun(files, graph).claim().run()
    assert [m["i"] for m in again.messages("mid")] == list(range(1, 11)) and again.messages("out") == []


def test_a_directory_is_not_a_store_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands took it for the directory, and the format for the store."""
    monkeypatch.setattr(engine_module, "open_session", lambda *_: pytest.fail("Spark was started"))
    graph = Graph("g", [Stream(same, "src", "out")])
    with pytest.raises(cues.errors.InvalidArgument, match="it is the directory of a store"):
        graph.start(engine="spark", queues=tmp_path / "new", store=f"{tmp_path}/./new")
    assert not (tmp_path / "new").exists()
    cues.open(tmp_path / "old").close()
    with pytest.raises(cues.errors.InvalidArgument, match="name another directory with --queues"):
        graph.start(engine="spark", queues=tmp_path / "old", store=tmp_path / "store")
    assert not (tmp_path / "old" / "_cues").exists() and not (tmp_path / "store").exists()


def test_looking_at_a_url_of_a_mount_makes_no_directory(tmp_path: Path) -> None:
    looked = terminal.cues("status", "--store", f"file://{tmp_path}/none")
    assert looked.code == 1 and "no directory of cues run --queues" in looked.err
    assert not (tmp_path / "none").exists()


def test_a_reader_has_one_row_group_in_memory(files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merged file has many messages. ``cues tail --from start -n 1`` read all of them, with their provenance."""
    monkeypatch.setattr(data, "GROUP_ROWS", 10)
    queue = queue_of(files)
    append(claimed(files, "g.p"), queue, given=numbers(1000))
    real, groups = parquet.StoredFile.read, []

    def counted(file: parquet.StoredFile, numbers: Any, columns: Any = None) -> Any:
        groups.append((list(numbers), columns))
        return real(file, numbers, columns)

    monkeypatch.setattr(parquet.StoredFile, "read", counted)
    first = next(inspection.QueueReader(files.url, "q").read([15]))
    assert (first.index, first.message["i"]) == (15, 15) and groups == [([1], ["time", "hash", "value"])]


@pytest.mark.parametrize("damaged", ["_cues/id.json", "in/_cues/queue.json", "_cues/steps/g.p/{last}"])
def test_damage_of_a_small_file_is_named(files: FaultyFiles, damaged: str) -> None:
    """A full disk or a bad copy leaves empty files. Commands ended with a traceback, and check found no problem."""
    DriverRun(files, Graph("g", [Stream(add_ten, "in", "out", id="p")])).claim().feed("in", numbers(3)).run()
    name = damaged.format(last=files.names("_cues/steps/g.p")[-1])
    files.write(name, b"")
    found = terminal.cues("check", files.url)
    assert found.code == 1 and f"{files.url}/{name} is damaged" in found.out
    sought = terminal.cues("seek", f"{files.url}#p", "--to", "start", "--yes")
    assert sought.code == 1 and f"{files.url}/{name} is damaged" in sought.err


def test_a_record_with_one_flipped_bit_is_refused_or_says_the_same(tmp_path: Path) -> None:
    """Every bit of a record is flipped once. Only the name of the field that holds the checksum may differ."""
    files = open_files(str(tmp_path))
    ledger = Ledger(files, "g.count", "owner-1")
    assert ledger.claim(None, {"g.count.orders": ("00112233aabbccdd", 17)})
    ledger.commit(
        "step",
        positions={"g.count.orders": ("00112233aabbccdd", 20)},
        hash="ab" * 16,
        counts={"taken": 3},
        ends={"counted": 20},
    )
    record = max(path for path in tmp_path.rglob("*.json") if "steps" in path.parts)
    right, data = ledger.read(), record.read_bytes()
    same = 0
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        record.write_bytes(changed)
        with contextlib.suppress(Diverged):
            assert ledger.read() == right
            same += 1
    assert same < 8 * len('"seal"')
    without = json.loads(data)
    del without["seal"]
    record.write_text(json.dumps(without))
    assert ledger.read() == right, "an earlier version wrote no checksum"


def test_a_batch_with_one_flipped_bit_is_refused(tmp_path: Path) -> None:
    batches = Batches(open_files(str(tmp_path)), "g.count")
    batches.begin({"id": "1"})
    batches.put(0, {"orders": (1, 20)})
    record = next(path for path in tmp_path.rglob("000000000000.json"))
    record.write_bytes(record.read_bytes().replace(b"20", b"21"))
    with pytest.raises(Diverged, match="its checksum fails"):
        Batches(open_files(str(tmp_path)), "g.count").read(0)
