"""Every exactly-once sink, killed at every point: each message is in the target once, in order."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import seeds
from children import Child
from contracts_sinks import (
    IN_PROCESSES,
    KAFKA,
    MARIADB,
    NATS,
    REDIS,
    SINKS,
    WANTED,
    SinkCase,
    feed,
    file_numbers,
    graph_over,
)
from contracts_sinks import POSTGRES as SERVERS
from sets import slow_except, thinned
from test_processors_sql import Presented

import cues
from cues import faults, testing
from cues.errors import CheckpointError, Diverged, InvalidArgument
from cues.processors.file_sink import FileSink

FILES = [name for name, case in SINKS.items() if case.numbers is file_numbers]


@pytest.fixture(
    params=slow_except([name for name in SINKS if name not in ("kafka", "redis", "nats", "table-mariadb")], SINKS)
)
def case(request: pytest.FixtureRequest) -> SinkCase:
    if "postgres" in request.param:
        SERVERS[:] = [request.getfixturevalue("postgres")]
    if "mariadb" in request.param:
        MARIADB[:] = [request.getfixturevalue("mariadb")]
    if request.param == "kafka":
        KAFKA[:] = [request.getfixturevalue("kafka")]
    if request.param == "redis":
        REDIS[:] = [request.getfixturevalue("redis")]
    if request.param == "nats":
        NATS[:] = [request.getfixturevalue("nats")]
    return case_of(request.param)


def case_of(name: str) -> SinkCase:
    for module in SINKS[name].needs:
        pytest.importorskip(module)
    return SINKS[name]


@pytest.fixture(autouse=True)
def no_objects_are_left() -> Iterator[None]:
    yield
    if importlib.util.find_spec("fsspec"):
        import fsspec

        memory = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


def place(tmp_path: Path, name: object) -> Path:
    path = tmp_path / str(name)
    path.mkdir()
    return path


def finished_of(target: Any) -> dict[str, bytes]:
    """The finished files and what is in them, as a reader sees them."""
    if not isinstance(target, FileSink) or "://" in target.path:
        return {}
    return {name: Path(name).read_bytes() for name in target.finished()}


@pytest.mark.parametrize("case", slow_except(["jsonl"], SINKS), indirect=True)
def test_a_crash_anywhere_leaves_each_message_once(case: SinkCase, stride: int, tmp_path: Path) -> None:
    """Die at every crash point, and cut the steps otherwise after the restart.

    What a reader saw in a finished file at the crash is there, unchanged, at the end.
    """

    def run(store: cues.Store, target: Any, batch_size: int = 4) -> None:
        testing.run_until_idle(graph_over(case, target, batch_size), store)

    with testing.temporary_store() as store:
        feed(store)
        target = case.make(place(tmp_path, "whole"))
        sites = testing.crash_sites(lambda: run(store, target))
        assert case.numbers(target) == WANTED
    assert len(sites) > 15 and any(point == "checkpoint.after" for point, _ in sites)
    if isinstance(target, FileSink):
        assert {"files.appended", "files.committed"} <= {point for point, _ in sites}
    assert case is not SINKS["nats"] or set(faults.NATS_POINTS) <= {point for point, _ in sites}
    assert case is not SINKS["kafka"] or set(faults.KAFKA_POINTS) <= {point for point, _ in sites}
    for number, (point, hit) in enumerate(thinned(sites, stride)):
        with testing.temporary_store() as store:
            target = case.make(place(tmp_path, number))
            feed(store)
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                run(store, target)
            seen = finished_of(target)
            run(store, target, batch_size=3)
            assert case.numbers(target) == WANTED, (point, hit)
            assert seen.items() <= finished_of(target).items(), (point, hit)


@pytest.mark.parametrize("case", slow_except(["sqlite", "jsonl", "parquet"], SINKS), indirect=True)
def test_the_control_without_the_row_doubles(case: SinkCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sinks with a row that never has a message: after some crash a message is there twice."""
    from cues.checkpoints import deliveries

    monkeypatch.setattr(deliveries, "admit", lambda processor, row, delivery: dict(delivery.start))
    doubled = 0
    for hit in range(1, 4):
        with testing.temporary_store() as store:
            target = case.make(place(tmp_path, hit))
            feed(store)
            with testing.crash("checkpoint.after", hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph_over(case, target), store)
            testing.run_until_idle(graph_over(case, target), store)
            doubled += len(case.numbers(target)) > len(WANTED)
    assert doubled


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_random_kills_leave_each_message_once(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "postgres" in name:
        SERVERS[:] = [request.getfixturevalue("postgres")]
    if "mariadb" in name:
        MARIADB[:] = [request.getfixturevalue("mariadb")]
    if name == "kafka":
        KAFKA[:] = [request.getfixturevalue("kafka")]
    if name == "redis":
        REDIS[:] = [request.getfixturevalue("redis")]
    if name == "nats":
        NATS[:] = [request.getfixturevalue("nats")]
    case, chance = case_of(name), random.Random(seeds.new())
    (tmp_path / "slow").touch()
    target = case.make(tmp_path)
    code = "import sys; from contracts_sinks import run_child; run_child(sys.argv[1], sys.argv[2])"
    for _ in range(4):
        with Child(code, name, tmp_path) as child, contextlib.suppress(AssertionError):
            for _ in range(chance.randint(1, 3)):
                child.line()
            time.sleep(chance.uniform(0, 0.02))
            child.kill()
    with Child(code, name, tmp_path) as child:
        child.end()
    assert case.numbers(target) == WANTED


@pytest.mark.slow
@pytest.mark.parametrize("point", [*faults.FILE_POINTS, "checkpoint.inside", "checkpoint.after"])
def test_kill_at_every_point_of_a_file_sink(point: str, tmp_path: Path) -> None:
    """As a real death: nothing of the process runs after it."""
    case = case_of("csv-gzip")
    target = case.make(tmp_path)
    code = "import sys; from contracts_sinks import run_child; run_child(sys.argv[1], sys.argv[2])"
    with Child(code, "csv-gzip", tmp_path, CUES_FAULT=f"{point}:1") as child:
        assert child.returncode() == -9
    with Child(code, "csv-gzip", tmp_path) as child:
        child.end()
    assert case.numbers(target) == WANTED


def test_an_earlier_owner_and_another_store_are_refused(case: SinkCase, tmp_path: Path) -> None:
    target = case.make(place(tmp_path, "t"))

    def deliver(start: int, end: int, **options: Any) -> None:
        presented = cast(cues.Process, Presented({"g.save.q": (start, end)}, **options))
        with target.transaction(presented) as transaction:
            presented.connection = transaction.connection  # type: ignore[misc]
            case.save([{"n": n} for n in transaction.fresh(presented.indices)], presented)

    deliver(1, 4, epoch=5)
    deliver(2, 6, epoch=6)
    with pytest.raises(cues.Fenced):
        deliver(6, 9, epoch=5)
    with pytest.raises(Diverged, match="written from the store"):
        deliver(6, 9, epoch=9, store="cd" * 8)
    deliver(1, 6, epoch=6)
    assert target.holds(["g.save", "g.other"]) == ["g.save"]
    assert case.numbers(target) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("point", ["files.appended", "files.committed", "checkpoint.after"])
def test_a_delivery_that_was_cut_otherwise_after_a_crash_is_compared_by_index(
    point: str, case: SinkCase, tmp_path: Path
) -> None:
    """The engine repeats the same range; a purge, or a seek, may cut another one that overlaps."""
    target = case.make(place(tmp_path, "t"))
    if point.startswith("files.") and not isinstance(target, FileSink):
        pytest.skip("only a sink of files has this point")

    def deliver(start: int, end: int) -> None:
        presented = cast(cues.Process, Presented({"g.save.q": (start, end)}))
        with target.transaction(presented) as transaction:
            presented.connection = transaction.connection  # type: ignore[misc]
            if fresh := transaction.fresh(presented.indices):
                case.save([{"n": n} for n in fresh], presented)

    with testing.crash(point, 1, how="raise"), pytest.raises(testing.Crashed):
        deliver(1, 4)
    deliver(1, 6)
    deliver(2, 8)
    assert case.numbers(target) == [1, 2, 3, 4, 5, 6, 7]


def test_rows_of_a_commit_that_did_not_happen_are_in_no_finished_file(tmp_path: Path) -> None:
    """They are after the end of the open file. The next commit has fewer rows, and finishes the file."""
    target = FileSink(tmp_path, "jsonl", durability="process", roll_bytes=20)

    def deliver(start: int, end: int) -> None:
        presented = cast(cues.Process, Presented({"g.save.q": (start, end)}))
        with target.transaction(presented) as transaction:
            transaction.connection.write([{"n": n} for n in transaction.fresh(presented.indices)])

    deliver(1, 2)
    with testing.crash("files.appended", 1, how="raise"), contextlib.suppress(testing.Crashed):
        deliver(2, 8)
    deliver(2, 4)
    deliver(4, 8)
    lines = [line for name in sorted(target.finish()) for line in Path(name).read_text().splitlines()]
    assert [json.loads(line)["n"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]


def test_partitions_share_no_file(case: SinkCase, tmp_path: Path) -> None:
    target = case.make(place(tmp_path, "t"))
    graph = cues.Graph("g", queues={"q": cues.QueueOptions(partitions=3, key="n")})
    graph.source("q")
    graph.add(cues.Sink(case.save, "q", id="save", batch=True, checkpoint=target))
    with testing.temporary_store() as store:
        store.queue("q", partitions=3, key="n").appender().write_many([{"n": n} for n in range(60)])
        testing.run_until_idle(graph, store)
    assert sorted(case.numbers(target)) == list(range(60))
    if isinstance(target, FileSink):
        assert {Path(name).name.split("-")[1] for name in target.finished()} == {"0", "1", "2"}


def test_a_target_can_be_pickled(case: SinkCase, tmp_path: Path) -> None:
    path = place(tmp_path, "t")
    target = pickle.loads(pickle.dumps(case.make(path)))
    with testing.temporary_store() as store:
        feed(store)
        testing.run_until_idle(graph_over(case, target), store)
    assert case.numbers(case.make(path)) == WANTED


# --- file sinks ---------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[cues.Store]:
    with testing.temporary_store() as store:
        feed(store)
        yield store


def test_names_are_deterministic_and_an_open_file_is_not_seen(store: cues.Store, tmp_path: Path) -> None:
    out = FileSink(tmp_path / "out", roll_bytes=100)
    testing.run_until_idle(graph_over(SINKS["jsonl"], out), store)
    names = [Path(name).name for name in out.finished()]
    assert names == [f"g.save-0-{n:08}.jsonl" for n in range(1, len(names) + 1)]
    assert len(os.listdir(out.path)) == len(names) + 1  # and _cues
    assert sum(len(Path(n).read_text().splitlines()) for n in out.finished()) < len(WANTED)
    assert file_numbers(out) == WANTED


def test_a_file_is_finished_by_time_without_messages(store: cues.Store, tmp_path: Path) -> None:
    out = FileSink(tmp_path / "out", roll_s=0.05, durability="process")
    testing.run_until_idle(graph_over(SINKS["jsonl"], out, batch_size=100), store)
    for _ in range(3_000):
        if out.finished():
            break
        time.sleep(0.01)
    out.close()
    assert out.finished() and file_numbers(out) == WANTED


def test_bytes_that_were_not_committed_are_cut_and_missing_ones_are_refused(store: cues.Store, tmp_path: Path) -> None:
    out = FileSink(tmp_path / "out")
    testing.run_until_idle(graph_over(SINKS["jsonl"], out), store)
    (open_file,) = Path(out.path, "_cues").rglob("*.open")
    whole = open_file.read_bytes()
    open_file.write_bytes(whole + b'{"n": 99, "longer": "than the next row"}')
    store.queue("q").appender().write({"n": 101})
    testing.run_until_idle(graph_over(SINKS["jsonl"], out), store)
    assert open_file.read_bytes() == whole + b'{"n": 101}\n'
    open_file.write_bytes(whole)
    with pytest.raises(Diverged, match="were committed"):
        out.finish()


def test_rows_with_other_columns_begin_a_new_file_of_csv_and_widen_a_table(tmp_path: Path) -> None:
    for format in ("csv", *(["parquet"] if importlib.util.find_spec("pyarrow") else [])):
        out = FileSink(tmp_path / format, format, durability="process")
        graph = cues.Graph("g", [cues.Source("q", None), out.sink("q", batch_size=1)])
        with testing.temporary_store() as store:
            store.queue("q").appender().write_many([{"n": 1}, {"n": 2}, {"n": 3, "s": "x"}, {"n": 4}])
            testing.run_until_idle(graph, store)
        out.finish()
        assert file_numbers(out) == [1, 2, 3, 4] and len(out.finished()) == (2 if format == "csv" else 1)


@pytest.mark.parametrize(
    ("format", "message"),
    [("jsonl", {"n": b"bytes"}), ("csv", {"n": [1]}), ("text", {"n": 1}), ("text", {"line": "a\nb"})],
)
def test_a_row_that_the_format_cannot_hold_is_a_failed_message(
    format: str, message: dict[str, Any], tmp_path: Path
) -> None:
    out = FileSink(tmp_path / "out", format, durability="process")
    graph = cues.Graph("g", [cues.Source("q", None), out.sink("q", batch=False)], errors="errors")
    good = {"line": "good"} if format == "text" else {"n": 1}
    with testing.temporary_store() as store:
        store.queue("q").appender().write_many([good, message, good])
        testing.run_until_idle(graph, store)
        assert len(testing.messages(store, "errors")) == 1
    (name,) = out.finish()
    assert len(Path(name).read_text().splitlines()) == (3 if format == "csv" else 2)


def test_a_full_disk_stops_the_sink_and_a_later_start_continues(tmp_path: Path) -> None:
    """A real limit of the kernel on the size of files, in the middle of an append."""
    code = (
        "import resource, signal, sys; from cues.processors.file_sink import FileSink\n"
        "from cues.errors import CheckpointError; from test_processors_sql import Presented\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); out = FileSink(sys.argv[1], durability='process')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, resource.RLIM_INFINITY))\n"
        "def deliver(start, end):\n"
        "    with out.transaction(Presented({'g.save.q': (start, end)})) as tx:\n"
        "        tx.connection.write([{'n': n, 's': 'x' * 1000} for n in range(start, end)])\n"
        "deliver(1, 3)\n"
        "try: deliver(3, 9)\n"
        "except CheckpointError as error: print('Try:' in str(error), 'too large' in str(error))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "deliver(3, 9)\n"
    )
    with Child(code, tmp_path / "out") as child:
        assert child.end() == "True True"
    assert file_numbers(FileSink(tmp_path / "out")) == list(range(1, 9))


def test_a_waiting_transaction_fails_by_name_and_changes_nothing(tmp_path: Path) -> None:
    out, impatient = FileSink(tmp_path / "out"), FileSink(tmp_path / "out", timeout_s=0.01)
    first, second = (cast(cues.Process, Presented({"g.save.q": (1, 3)})) for _ in range(2))
    with out.transaction(first) as transaction:
        transaction.connection.write([{"n": 1}, {"n": 2}])
        with pytest.raises(CheckpointError, match="locked"), impatient.transaction(second):
            pass
    assert file_numbers(out) == [1, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"format": "xml"}, {"format": "parquet", "compression": "gzip"}, {"compression": "lz"}, {"columns": ["n"]},
        {"durability": "none"},
    ],
)  # fmt: skip
def test_options_that_a_format_does_not_have_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("format") == "parquet":
        pytest.importorskip("pyarrow")
    with pytest.raises(InvalidArgument, match="Try:"):
        FileSink(tmp_path, **options)


def test_a_directory_that_another_format_left_open_is_refused(store: cues.Store, tmp_path: Path) -> None:
    testing.run_until_idle(graph_over(SINKS["jsonl"], FileSink(tmp_path / "out")), store)
    with pytest.raises(CheckpointError, match=r"'jsonl'.*finish"):
        FileSink(tmp_path / "out", "csv").finish()
