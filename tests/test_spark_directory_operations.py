"""An operator's commands on a shared directory, a path or an object store, without Spark."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import spark_graphs
import terminal
from test_spark_queues import filled, owner

import cues
from cues import Graph, codec, testing
from cues.cli import target as target_of_commands
from cues.engine import record
from cues.errors import AlreadyRunning, Fenced
from cues.operate import fresh
from cues.spark.cluster.data import Writer
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.driver import Driver
from cues.spark.cluster.files import LocalFiles, open_files
from cues.spark.cluster.lease import DriverLease
from cues.spark.cluster.ledger import Ledger, StepRange


def made(place: Path | str, count: int) -> None:
    """A directory as a driver leaves it, with the messages n = 0 … of the queue ``in``."""
    files = open_files(str(place))
    Driver(None, files, "g", None, lambda event: None, lambda seconds: False)
    filled(place, count)  # type: ignore[arg-type]
    feeder = Ledger(files, "g.in.feed", "nobody")
    assert feeder.claim(None, {"in": ("00", 1)})
    feeder.commit("step", positions={"in": ("00", count + 1)})


def add(place: Path | str, *numbers: int, record: int = 2, time_us: int = 0) -> None:
    """Append messages to ``in``, as a feeder does."""
    directory = QueueDirectory(open_files(str(place)), "in", cues.QueueOptions())
    writer = Writer(directory.files, "in", "g.in.feed", record, time_us)
    writer.add([codec.pack({"n": n}) for n in numbers], [None] * len(numbers), None)
    file = writer.close()
    assert file is not None
    directory.publish("g.in.feed", record, directory.numbered([file]))


def printed(*arguments: object) -> list[Any]:
    """The lines of JSON that a command prints; it succeeds."""
    result = terminal.cues(*arguments)
    assert result.code == 0, result
    return [json.loads(line) for line in result.out.splitlines()]


def tail(*arguments: object) -> list[int]:
    return [message["n"] for message in printed("tail", *arguments)]


def refused(code: int, *arguments: object) -> str:
    """The error of a command, which names what to try."""
    result = terminal.cues(*arguments)
    assert result.code == code and result.out == "" and "Try: " in result.err, result
    return result.err


# --- reading ------------------------------------------------------------------------------------


def test_the_commands_read_an_object_store(object_store: str) -> None:
    made(object_store, 20)
    assert tail(f"{object_store}#in", "-n", 3) == [17, 18, 19]
    assert printed("status", object_store)[0]["messages"] == 20
    (queue,) = printed("queues", object_store)
    assert (queue["queue"], queue["first_index"], queue["last_index"], queue["graph"]) == ("in", 1, 20, "g")
    assert printed("check", object_store) == [{"store": object_store, "problems": 0}]
    files = open_files(object_store)
    (name,) = [name for name in files.listed("in") if name.endswith(".parquet")]
    files.delete(f"in/{name}")
    damage = terminal.cues("check", object_store)
    problem = f"{object_store}/in/{name}, which a step has committed, is missing."
    assert damage.code == 1 and json.loads(damage.out)["problem"] == problem
    nothing = f"{object_store}-of-nobody"
    assert f"no directory of cues run --queues at {nothing}" in refused(1, "tail", f"{nothing}#in")
    assert open_files(nothing).names("") == []
    assert "hdfs:// is not supported" in refused(1, "status", "hdfs://flights")


def test_a_purge_in_an_object_store(object_store: str) -> None:
    made(object_store, 20)
    (gone,) = printed("purge", f"{object_store}#in", "--before", "6", "--yes")
    assert (gone["messages"], gone["first_index"], gone["unread"]) == (5, 6, {})
    assert tail(f"{object_store}#in", "-n", "all") == list(range(5, 20))
    assert printed("check", object_store) == [{"store": object_store, "problems": 0}]


def test_a_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    for place in (tmp_path / "none", f"file://{tmp_path}/none"):
        for command in ("status", "check", "queues"):
            assert "There is no store at" in refused(1, command, place)
        assert "There is no store at" in refused(1, "tail", f"{place}#in")
    assert not (tmp_path / "none").exists()


def test_commands_for_stores_refuse_a_directory(tmp_path: Path) -> None:
    made(tmp_path, 3)
    (tmp_path / "read me").write_text("a file of somebody else")
    before = sorted(tmp_path.rglob("*"))
    more = {
        "send": ["n=1", "--create"], "import": ["x.jsonl"], "discard": ["--reason", "x"],
        "backup": [str(tmp_path / "copy")], "follow": [str(tmp_path / "copy")], "salvage": [str(tmp_path / "copy")],
    }  # fmt: skip
    for command in {*target_of_commands.INSTEAD, "redrive", "discard", "history", "doctor"}:
        error = refused(2, command, tmp_path, *more.get(command, []))
        assert f"cues {command} is for stores" in error, error
        assert "name the graph file or its store" not in error, "what a directory has instead"
    assert "is for stores" in refused(2, "queues", tmp_path, "--all")
    for command in ("run", "close", "show"):
        error = terminal.cues(command, tmp_path)
        assert error.code and "graph file" in error.err and "There is no" not in error.err, error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.fast
def test_commands_for_directories_refuse_what_is_none(tmp_path: Path) -> None:
    for command in ("vacuum", "optimize"):
        assert f"There is no directory of cues run --queues at {tmp_path}/none" in refused(
            1, command, tmp_path / "none"
        )


@pytest.mark.fast
def test_commands_with_a_graph_file_name_the_directory_of_the_last_run(tmp_path: Path) -> None:
    """Its store has only the sources. ``cues close`` would call the sinks for all messages once more."""
    file, store, directory = tmp_path / "graph.py", tmp_path / "store", tmp_path / "queues"
    file.write_text(
        "import cues\n"
        "graph = cues.Graph('g', [cues.Source('in'), cues.Sink(print, 'in', id='s')], durability='process')"
    )
    with cues.open(store, durability="process") as opened:
        opened.queue("in").appender().write({"n": 1})
    made(directory, 3)
    record.note_queues(str(store), "g", str(directory))
    told = f"g last ran with its queues in {directory}"
    for command in ("errors", "pause", "history"):
        done = terminal.cues(command, file, "--store", store)
        assert done.code == 0 and told in done.err and f"cues {command} {directory}" in done.err, done
    assert f"cues tail {directory}#in" in terminal.cues("tail", f"{file}#in", "--store", store).err
    assert told not in terminal.cues("tail", f"{store}#in").err
    error = refused(2, "close", file, "--store", store)
    assert f"cues close is for stores, and the last run of g had its queues in {directory}" in error
    assert f"cues run {file} --engine spark --queues {directory} --store {store}" in error
    with cues.open(store, readonly=True) as opened:
        assert opened.queues() == ["in"], "no step was made"


def test_queues_are_listed(tmp_path: Path) -> None:
    made(tmp_path, 3)
    (row,) = printed("queues", f"file://{tmp_path}")
    assert row["queue"] == "in" and row["messages"] == 3 and row["files"] == 1 and row["graph"] == "g"
    assert printed("queues", f"{tmp_path}#in") == [row]
    titles, line = terminal.cues("queues", tmp_path, "--table").out.splitlines()
    assert titles.endswith("WRITTEN BY") and line.split()[:4] == ["in", "3", "1", "3"]
    assert f"cues queues {tmp_path}#in" in refused(1, "queues", f"{tmp_path}#inn")
    shutil.rmtree(tmp_path / "in")
    assert "has no queues yet" in terminal.cues("queues", tmp_path, "--table").out


def test_tail_begins_at_an_index_or_a_time(tmp_path: Path) -> None:
    made(tmp_path, 5)
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    add(tmp_path, 5, 6, time_us=int(noon.timestamp() * 1e6))
    add(tmp_path, 7, 8, record=3, time_us=int(noon.timestamp() * 1e6) + 1)
    queue = f"{tmp_path}#in"
    assert tail(queue, "-n", 2) == [7, 8]
    assert tail(queue, "--from", "start", "-n", 3) == [0, 1, 2]
    assert tail(queue, "--from", "8") == [7, 8]
    assert tail(queue, "--from", "end") == []
    assert tail(queue, "--from", noon.isoformat()) == [5, 6, 7, 8]
    assert tail(queue, "--from", "2026-01-31T12:00:00.000001Z") == [7, 8]
    assert tail(queue, "--from", "2026-01-31T12:00:01Z") == []
    assert tail(queue, "--where", "n % 2 == 0", "-n", 3) == [4, 6, 8]
    assert tail(queue, "--where", "n % 2 == 0", "--from", "start", "-n", 2) == [0, 2]
    assert "the queue ends before 10" in refused(1, "tail", queue, "--from", "11")
    assert "has no partition 3; it has 1" in refused(1, "tail", f"{queue}/3")
    assert tail(f"{queue}/0", "-n", 1) == [8]


def test_tail_follows_a_queue_until_it_is_interrupted_or_the_queue_is_gone(tmp_path: Path) -> None:
    made(tmp_path, 3)
    with terminal.Command("tail", "-f", f"{tmp_path}#in", "-n", "2") as following:
        following.until('{"n": 2}\n')
        add(tmp_path, 3)
        following.until('{"n": 3}\n')
        following.signal()
        assert following.wait() == 130
        assert following.text == "".join(f'{{"n": {n}}}\n' for n in (1, 2, 3))
    with terminal.Command("tail", "-f", f"{tmp_path}#in", "--from", "end", "-n", "1") as one:
        until_it_reads(tmp_path, one)
        assert one.wait() == 0
    with terminal.Command("tail", "-f", f"{tmp_path}#in", "-n", "1") as orphan:
        orphan.until("\n")
        shutil.rmtree(tmp_path / "in")
        assert orphan.wait() == 1
        assert "The queue 'in' is not in" in orphan.text and "Try: " in orphan.text


def until_it_reads(place: Path, command: terminal.Command) -> None:
    """Append messages until the command, which waits for one, has printed it."""
    for number in range(10, 100):
        add(place, number, record=number)
        time.sleep(0.2)
        if command.process.poll() is not None:
            return


# --- a processor --------------------------------------------------------------------------------


def test_tries_lists_the_records_of_a_processor(spark: SparkSession, tmp_path: Path) -> None:
    made(tmp_path, 20)
    while (stage := owner(tmp_path, spark, side_effects=True, batch_size=15)).step():
        pass
    lines = printed("tries", f"{tmp_path}#plain", "-n", "all")
    assert [line["kind"] for line in lines] == ["claim", "taking", "step", "claim", "taking", "step", "claim"]
    assert [line["record"] for line in lines] == list(range(7)) and {line["processor"] for line in lines} == {"g.plain"}
    assert lines[2]["positions"]["g.plain.in"][1] == 16 and lines[2]["counts"]["taken"] == 15
    assert [line["record"] for line in printed("tries", f"{tmp_path}#g.plain", "-n", 2)] == [4, 5, 6]
    stage.ledger.commit("taking", taking=StepRange({"g.plain.in": (18, 21)}, 3))
    titles, *rows = terminal.cues("tries", f"{tmp_path}#plain", "--table").out.splitlines()
    assert titles.split() == ["TIME", "HASH", "TOOK", "OUTCOME", "WROTE"]
    found = (
        "claimed, epoch 1, in 1",
        "in [1, 16) whole",
        "claimed",
        "in [16, 21) whole",
        "claimed, epoch 3",
        "in [18,",
    )
    assert all(text in " ".join(row.split()) for row, text in zip(rows, found, strict=True)), rows
    assert rows[1].endswith("out from 1") and rows[3].endswith("out from 16") and "not committed" in rows[-1]
    assert f"cues tries {tmp_path}#g.plain" in refused(1, "tries", f"{tmp_path}#g.plan")


def finished(place: Path, spark: SparkSession) -> list[int]:
    """The messages of ``out`` after another driver has run, in their order."""
    stage = owner(place, spark)
    while stage.step():
        pass
    return tail(f"{place}#out", "-n", "all")


def test_seek_moves_a_processor_and_loses_nothing_of_its_last_step(spark: SparkSession, tmp_path: Path) -> None:
    """The driver died after a commit whose files are in no log yet: seek adds them before it moves the position."""
    made(tmp_path, 20)
    stage = owner(tmp_path, spark)
    with pytest.raises(testing.Crashed), testing.crash("spark.recorded", how="raise"):
        stage.step()
    target = f"{tmp_path}#plain"
    question = refused(2, "seek", target, "--to", 11)
    assert "in from 21 to 11 (10 messages processed again)" in question and "add --yes" in question
    assert [line["kind"] for line in printed("tries", target)] == ["claim", "step"]
    (moved,) = printed("seek", target, "--to", 11, "--yes")
    assert moved == {"processor": "g.plain", "positions": {"g.plain.in": 11}, "epoch": 2, "record": 3}
    assert [line["kind"] for line in printed("tries", target)] == ["claim", "step", "claim", "seek"]
    with pytest.raises(Fenced):
        stage.ledger.check()
    assert printed("check", tmp_path)[0]["problems"] == 0
    assert finished(tmp_path, spark) == [2 * n for n in (*range(20), *range(10, 20))]
    assert printed("seek", target, "--to", "start", "--tailer", "in", "--yes")[0]["positions"] == {"g.plain.in": 1}
    forward = terminal.cues("seek", target, "--to", "end", "--yes", "--table")
    assert "in from 1 to 21 (20 messages skipped)" in forward.out and forward.code == 0
    assert len(finished(tmp_path, spark)) == 30


def test_seek_drops_a_step_that_was_under_way(spark: SparkSession, tmp_path: Path) -> None:
    made(tmp_path, 20)
    stage = owner(tmp_path, spark)
    stage.ledger.commit("taking", taking=StepRange({"g.plain.in": (1, 6)}, 5))
    printed("seek", f"{tmp_path}#plain", "--to", 16, "--yes")
    assert finished(tmp_path, spark) == [2 * n for n in range(15, 20)]


def test_seek_refuses_what_has_no_meaning_there(tmp_path: Path) -> None:
    made(tmp_path, 20)
    assert "is for stores" in refused(2, "seek", f"{tmp_path}#in.feed", "--to", "start", "--again")
    assert "which keeps its own position" in refused(1, "seek", f"{tmp_path}#in.feed", "--to", "start", "--yes")
    assert "no processor 'plain'" in refused(1, "seek", f"{tmp_path}#plain", "--to", "start", "--yes")


@contextlib.contextmanager
def another_driver(place: Path, graph: str) -> Iterator[None]:
    """A driver on another machine, which runs the graph during the block."""
    lease = DriverLease(open_files(str(place)), graph, "other-1-00")
    lease.acquire(False)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            lease.beat()

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join()
        lease.release()


def test_nothing_is_moved_or_deleted_while_a_driver_runs_the_graph(tmp_path: Path) -> None:
    made(tmp_path, 20)
    ledger = Ledger(open_files(str(tmp_path)), "g.plain", "nobody")
    assert ledger.claim(None, {"g.plain.in": ("00", 1)})
    with another_driver(tmp_path, "g"):
        error = refused(7, "seek", f"{tmp_path}#plain", "--to", "end", "--yes")
        assert "runs the graph 'g'" in error and "stop that driver first" in error
        with pytest.raises(AlreadyRunning, match="runs the graph 'g'"), fresh.shared_files(str(tmp_path), "g"):
            pass
        with fresh.shared_files(str(tmp_path), "other") as part:
            assert part is None
    ledger.check()
    printed("seek", f"{tmp_path}#plain", "--to", "end", "--yes")
    with pytest.raises(Fenced):
        ledger.check()


# --- starting over ------------------------------------------------------------------------------


def start_over(place: Path, graph: str = "g") -> None:
    with fresh.shared_files(str(place / "queues"), graph) as part:
        fresh.clear(place / f"store-{graph}", print, shared=part)


def counting(graph: str) -> Graph:
    """Numbers, and a count for each key, on queues of the graph's own."""
    made = Graph(graph, durability="process")
    made.source(f"in-{graph}")(spark_graphs.numbers)
    made.stream(f"in-{graph}", f"out-{graph}", id="count", key="n")(spark_graphs.counted_by_key)
    return made


def test_fresh_deletes_the_part_of_one_graph_and_its_store(spark: SparkSession, tmp_path: Path) -> None:
    place = tmp_path / "queues"

    def run(graph: str) -> None:
        with counting(graph).start(engine="spark", spark=spark, store=tmp_path / f"store-{graph}", queues=place) as it:
            it.wait_done()

    def of(graph: str) -> set[str]:
        return {str(path) for path in place.rglob("*") if graph in str(path.relative_to(place))}

    for graph in ("left", "right"):
        run(graph)
    id, right, messages = (place / "_cues" / "id.json").read_text(), of("right"), tail(f"{place}#out-left", "-n", "all")
    for deleted_before in (None, 3):
        if deleted_before is not None:
            with interrupted(deleted_before):
                start_over(tmp_path, "left")
        start_over(tmp_path, "left")
        assert of("left") == {str(place / "_cues" / "left.id.json")} and of("right") == right
        stores = [(tmp_path / f"store-{graph}" / "data.mdb").exists() for graph in ("left", "right")]
        assert stores == [False, True]
        run("left")
        assert sorted(tail(f"{place}#out-left", "-n", "all")) == sorted(messages)
        assert printed("check", place)[0]["problems"] == 0
    assert (place / "_cues" / "id.json").read_text() == id


@contextlib.contextmanager
def interrupted(count: int) -> Iterator[None]:
    """A deletion ends after some files and folders."""
    left, delete = [count], LocalFiles.delete

    def some(files: LocalFiles, name: str) -> None:
        left[0] -= not name.endswith("driver.json")
        if left[0] < 0:
            raise KeyboardInterrupt
        delete(files, name)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LocalFiles, "delete", some)
        yield


def test_seek_and_fresh_in_an_object_store(object_store: str, tmp_path: Path) -> None:
    made(object_store, 20)
    files = open_files(object_store)
    assert Ledger(files, "g.plain", "nobody").claim(None, {"g.plain.in": ("00", 1)})
    (moved,) = printed("seek", f"{object_store}#plain", "--to", 11, "--yes")
    assert (moved["positions"], moved["record"]) == ({"g.plain.in": 11}, 2)
    assert [line["kind"] for line in printed("tries", f"{object_store}#plain")] == ["claim", "claim", "seek"]
    with fresh.shared_files(object_store, "g") as part:
        assert part is not None and "1 queue (in), records and state of 2 processors" in part.words
        fresh.clear(tmp_path / "none", print, shared=part)
    assert (files.names(""), files.names("_cues")) == (["_cues"], ["g.id.json", "id.json"])


GRAPH_FILE = """
from cues import Graph, Source, Stream
from spark_graphs import numbers, plain

graph = Graph("g", [Source("in", numbers), Stream(plain, "in", "out")], durability="process")
"""


@pytest.mark.slow
def test_cues_run_fresh_asks_and_starts_over(tmp_path: Path) -> None:
    file, place = tmp_path / "graph_of_numbers.py", tmp_path / "queues"
    file.write_text(GRAPH_FILE)
    made(place, 20)
    command = [*terminal.CUES, "run", str(file), "--engine", "spark", "--queues", str(place), "--fresh"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        environment = terminal.environment(PYTHONPATH=path)
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=240, env=environment)

    asked = run()
    assert asked.returncode == 2 and "add --yes" in asked.stderr and len(tail(f"{place}#in", "-n", "all")) == 20
    assert f"the files of the graph 'g' in {place}: 1 queue (in), records and state of 1 processor" in asked.stderr
    done = run("--yes")
    assert done.returncode == 0, done.stderr
    assert len(tail(f"{place}#in", "-n", "all")) == len(tail(f"{place}#out", "-n", "all")) == spark_graphs.COUNT
