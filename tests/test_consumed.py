"""Files that are deleted or moved after the commit of their messages, and files that wait until they have settled."""

from __future__ import annotations

import contextlib
import errno
import gc
import gzip
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastavro
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import seeds
from fsspec.implementations.memory import MemoryFileSystem
from sets import slow_except
from syncs import noted

import cues
from cues import Graph, Source, testing
from cues.errors import InvalidArgument, ReturnError
from cues.processors import consumed, places
from cues.processors.file_source import Files

Rows = list[dict[str, Any]]


def write_text(path: Path, rows: Rows) -> None:
    path.write_text("".join(f"{row['n']}\n" for row in rows))


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_gz(path: Path, rows: Rows) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def write_csv(path: Path, rows: Rows) -> None:
    path.write_text("n\n" + "".join(f"{row['n']}\n" for row in rows))


def write_arrow(path: Path, rows: Rows) -> None:
    with pa.ipc.new_file(str(path), pa.schema([("n", pa.int64())])) as out:
        out.write_table(pa.table({"n": [row["n"] for row in rows]}))


def write_avro(path: Path, rows: Rows) -> None:
    with open(path, "wb") as file:
        fastavro.writer(file, {"type": "record", "name": "r", "fields": [{"name": "n", "type": "long"}]}, rows)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "txt": write_text,
    "jsonl": write_jsonl,
    "jsonl.gz": write_gz,
    "csv": write_csv,
    "parquet": lambda path, rows: pq.write_table(pa.table({"n": [row["n"] for row in rows]}), path),
    "arrow": write_arrow,
    "avro": write_avro,
}


def graph_over(source: Files) -> Graph:
    return Graph("g", [Source("rows", source)], errors="errors")


def numbers(store: cues.Store) -> list[int]:
    return [int(row.get("n", row.get("line"))) for row in testing.messages(store, "rows")]


def filled(folder: Path, ending: str = "jsonl", files: int = 3, rows: int = 4) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(files):
        WRITERS[ending](folder / f"{number}.{ending}", [{"n": rows * number + n} for n in range(rows)])


def run(source: Files, store: cues.Store) -> None:
    """Run to the end, in which the source waits for its commits."""
    with graph_over(source).start(store=store) as running:
        assert running.wait_done(30)


@pytest.mark.parametrize("ending", slow_except(["jsonl", "parquet"], WRITERS))
@pytest.mark.parametrize("after", ["delete", "move:done"])
def test_a_file_goes_after_the_commit_and_a_later_one_of_its_name_is_read(
    after: str, ending: str, tmp_path: Path, store: cues.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every format, and by rows as by columns. No row of state stays."""
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        filled(tmp_path / "in", ending)
        run(Files(f"in/*.{ending}", after=after, settle_s=0.01), store)
        assert not [*Path("in").iterdir()]
        assert numbers(store) == [*range(12)] * (number + 1)
    assert not testing.messages(store, "errors")
    moved = sorted(path.name for path in Path("done").iterdir()) if after != "delete" else []
    again = [f"{n}.{middle}{ending}" for n in range(3) for middle in ("2.", "")]
    assert moved == ([] if after == "delete" else again)


def test_a_run_in_steps_deletes_too(tmp_path: Path, store: cues.Store) -> None:
    """The next run forgets the rows of the files."""
    for _ in range(2):
        filled(tmp_path / "in")
        testing.run_until_idle(graph_over(Files(tmp_path / "in", after="delete")), store)
        assert not [*(tmp_path / "in").iterdir()]
    assert numbers(store) == [*range(12)] * 2


def test_nothing_goes_before_its_commit(tmp_path: Path) -> None:
    """As the engine calls it: only the commit of the last record of a file, with its row, finishes the file."""
    filled(tmp_path / "in", files=2, rows=2)
    source = Files(tmp_path / "in", after="delete")
    process = SimpleNamespace(state={}, stopping=False, id="g.rows")
    seen = []
    for position, item in source(None, process):
        source.committed(position)
        seen.append((None if item is None else item["n"], len([*(tmp_path / "in").iterdir()])))
    assert [pair for pair in seen if pair[0] is not None] == [(0, 2), (1, 1), (2, 1), (3, 0)]
    assert process.state == {}

    filled(tmp_path / "in", files=2, rows=2)
    assert len([item for _, item in source(None, process) if item is not None]) == 4  # none was committed
    assert len([*(tmp_path / "in").iterdir()]) == 2


def crashed_at(point: str, hit: int, folder: Path, after: str) -> None:
    filled(folder / "in")
    with testing.temporary_store() as store:
        with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
            testing.run_until_idle(graph_over(Files(folder / "in", after=after)), store)
        left = len([*(folder / "in").iterdir()])
        assert left + len({n // 4 for n in numbers(store)}) >= 3, "a file went before its messages"
        testing.run_until_idle(graph_over(Files(folder / "in", after=after)), store)
        assert numbers(store) == [*range(12)], (point, hit)
        assert not [*(folder / "in").iterdir()]
        WRITERS["jsonl"](folder / "in" / "1.jsonl", [{"n": 12}])
        testing.run_until_idle(graph_over(Files(folder / "in", after=after)), store)
        assert numbers(store) == [*range(13)], (point, hit)


@pytest.mark.parametrize("after", slow_except(["move"], ["delete", "move"]))
def test_a_crash_anywhere_loses_and_doubles_nothing(after: str, tmp_path: Path) -> None:
    def whole(store: cues.Store) -> None:
        testing.run_until_idle(graph_over(Files(tmp_path / "whole", after="delete")), store)

    filled(tmp_path / "whole")
    with testing.temporary_store() as store:
        sites = testing.crash_sites(lambda: whole(store))
    assert len(sites) > 8
    for number, (point, hit) in enumerate(sites):
        folder = tmp_path / str(number)
        folder.mkdir()
        crashed_at(point, hit, folder, f"move:{folder}/done" if after == "move" else after)


@pytest.mark.parametrize("after", ["delete", "move"])
def test_a_file_is_durably_gone_before_its_row_is_forgotten(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut brings a file back that counts as a new one. One sync is for all files of a directory."""
    filled(tmp_path / "in")
    source = Files(tmp_path / "in", after=f"move:{tmp_path}/done" if after == "move" else after)
    process = SimpleNamespace(state={}, stopping=False, id="g.rows")
    items = list(source(None, process))
    calls = noted(monkeypatch, tmp_path)
    for position, _ in items:
        source.committed(position)
    assert ("unlink", "in/2.jsonl") in calls and ("fsync", "in") not in calls
    for number in range(2):  # the second one starts with rows of files that are gone, and none is said to be synced
        kept = dict(process.state)
        calls.clear()
        assert next(iter(source(items[-1][0], process)))[1] is None
        assert not process.state and calls == [("fsync", "in")], number
        process.state.update(kept)


def test_a_file_that_is_renamed_is_durable_in_its_new_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a filesystem without hard links."""
    filled(tmp_path / "in", files=1)

    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links")

    source = Files(tmp_path / "in", after=f"move:{tmp_path}/done/to")
    items = list(source(None, SimpleNamespace(state={}, stopping=False, id="g.rows")))
    monkeypatch.setattr(os, "link", link)
    calls = noted(monkeypatch, tmp_path)
    for position, _ in items:
        source.committed(position)
    at = calls.index(("rename", "done/to/0.jsonl"))
    assert calls[at - 3 : at] == [("fsync", "done/to"), ("fsync", "done"), ("fsync", ".")]
    assert calls[at + 1 :] == [("fsync", "done/to")]


def unlink_fails(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the removal of a file of the source fail, and no other."""
    unlink = os.unlink

    def failing(path: Any, **options: Any) -> None:
        if Path(path).parent.name == "in":
            raise error
        unlink(path, **options)

    patch.setattr(os, "unlink", failing)


def test_a_kill_between_the_two_names_of_a_moved_file(tmp_path: Path, store: cues.Store) -> None:
    """The file has both names, and the next start removes one of them."""
    filled(tmp_path / "in", files=1)
    source = Files(tmp_path / "in", after=f"move:{tmp_path}/done")
    with pytest.MonkeyPatch.context() as patch:
        unlink_fails(patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            testing.run_until_idle(graph_over(source), store)
    assert len([*tmp_path.rglob("0.jsonl")]) == 2
    testing.run_until_idle(graph_over(Files(tmp_path / "in", after=f"move:{tmp_path}/done")), store)
    assert [*tmp_path.rglob("*.jsonl")] == [tmp_path / "done/0.jsonl"] and numbers(store) == [0, 1, 2, 3]


def test_a_file_that_changed_since_it_was_read_stays_and_is_said(
    tmp_path: Path, store: cues.Store, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path / "in", files=2)
    testing.run_until_idle(graph_over(Files(tmp_path / "in")), store)
    with open(tmp_path / "in/0.jsonl", "a") as file:
        file.write('{"n": 99}\n')
    for _ in range(2):
        testing.run_until_idle(graph_over(Files(tmp_path / "in", after="delete")), store)
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["0.jsonl"]
    assert [record.message for record in caplog.records if "has changed since it was read" in record.message][1:] == []
    assert numbers(store) == [*range(8)]
    # A file that takes its place is another one.
    WRITERS["jsonl"](tmp_path / "in/.new", [{"n": 100}])
    (tmp_path / "in/.new").rename(tmp_path / "in/0.jsonl")
    testing.run_until_idle(graph_over(Files(tmp_path / "in", after="delete")), store)
    assert numbers(store) == [*range(8), 100] and not [*(tmp_path / "in").iterdir()]


def test_a_file_that_changes_between_its_end_and_the_commit_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path / "in", files=1)
    source = Files(tmp_path / "in", after="delete")
    process = SimpleNamespace(state={}, stopping=False, id="g.rows")
    *_, (position, _) = source(None, process)
    (tmp_path / "in/0.jsonl").write_text('{"n": 1}\n{"n": 1}\n')
    with caplog.at_level(logging.WARNING):
        source.committed(position)
    assert "0.jsonl has changed since it was read, so it stays" in caplog.text
    assert (tmp_path / "in/0.jsonl").exists()


def test_a_file_that_cannot_be_read_or_deleted_stays(
    tmp_path: Path, store: cues.Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "in", "jsonl.gz", files=2)
    path = tmp_path / "in/0.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-9])
    unlink_fails(monkeypatch, PermissionError(13, "Permission denied"))
    testing.run_until_idle(graph_over(Files(tmp_path / "in", after="delete")), store)
    assert len([*(tmp_path / "in").iterdir()]) == 2 and "was read, and stays: [Errno 13]" in caplog.text
    monkeypatch.undo()
    testing.run_until_idle(graph_over(Files(tmp_path / "in", after="delete")), store)
    assert [*(tmp_path / "in").iterdir()] == [path] and numbers(store) == [0, 1, 2, 3, 4, 5, 6, 7][
        -len(numbers(store)) :
    ]


def test_bad_records_are_on_the_error_queue_and_their_file_goes(tmp_path: Path, store: cues.Store) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\nno\n{"n": 2}\n')
    run(Files(tmp_path / "*.jsonl", after="delete"), store)
    assert numbers(store) == [1, 2] and len(testing.messages(store, "errors")) == 1
    assert not [*tmp_path.glob("*.jsonl")]


def test_a_source_that_stops_at_a_record_keeps_its_file(tmp_path: Path, store: cues.Store) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\nno\n{"n": 2}\n')
    with pytest.raises(cues.errors.ProcessorStopped):
        testing.run_until_idle(Graph("g", [Source("rows", Files(tmp_path / "*.jsonl", after="delete"))]), store)
    assert numbers(store) == [1] and [*tmp_path.glob("*.jsonl")]


def test_directories_below_the_pattern_are_kept(tmp_path: Path, store: cues.Store) -> None:
    for name in ("a/x.txt", "b/x.txt", "b/c/x.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("1\n")
    run(Files(f"{tmp_path}/in/**/*.txt", after=f"move:{tmp_path}/done"), store)
    assert sorted(str(path.relative_to(tmp_path / "done")) for path in (tmp_path / "done").rglob("*.txt")) == [
        "a/x.txt", "b/c/x.txt", "b/x.txt",
    ]  # fmt: skip


def test_a_watched_directory_gets_the_same_names_again_and_again(tmp_path: Path, store: cues.Store) -> None:
    """Each file is read once, also of equal content, and no row of state is left."""
    folder = tmp_path / "in"
    folder.mkdir()
    source = Files(folder, watch=True, after="delete", poll_s=0.01)
    with graph_over(source).start(store=store) as running:
        for turn in range(5):
            (folder / ".hidden").write_text(f'{{"n": {turn // 2}}}\n')
            (folder / ".hidden").rename(folder / "same.jsonl")
            deadline = time.monotonic() + 30
            while [*folder.iterdir()] and time.monotonic() < deadline:
                time.sleep(0.005)
        running.wait_idle()
    assert numbers(store) == [0, 0, 1, 1, 2]


# --- settle_s -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", slow_except(["parquet"], WRITERS))
def test_a_file_that_is_written_to_waits(ending: str, tmp_path: Path, store: cues.Store) -> None:
    """A run that does not watch waits for it, too."""
    filled(tmp_path / "in", ending, files=1)
    path = tmp_path / f"in/0.{ending}"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with graph_over(Files(tmp_path / "in", settle_s=300, poll_s=0.02)).start(store=store) as running:
        time.sleep(0.1)
        assert not len(store.queue("rows"))
        path.write_bytes(whole)
        os.utime(path, (time.time() - 300,) * 2)
        assert running.wait_done(30)
    assert numbers(store) == [0, 1, 2, 3] and not testing.messages(store, "errors")


def test_an_old_file_is_read_at_once_and_one_of_the_future_after_it_was_seen_unchanged(tmp_path: Path) -> None:
    filled(tmp_path / "in", files=2)
    os.utime(tmp_path / "in/0.jsonl", (time.time() + 10_000,) * 2)
    os.utime(tmp_path / "in/1.jsonl", (time.time() - 10_000,) * 2)
    begun = time.monotonic()
    found = [(item["n"], time.monotonic() - begun) for _, item in Files(tmp_path / "in", settle_s=0.3)(None) if item]
    assert [n for n, _ in found] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert found[4][1] >= 0.3


def test_a_file_that_settles_in_time_is_read_before_a_source_gives_up(tmp_path: Path) -> None:
    filled(tmp_path / "in", files=1)
    source = Files(tmp_path / "in", watch=True, settle_s=0.2, idle_exit_s=0, poll_s=0.01)
    assert len([item for _, item in source(None) if item]) == 4


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"after": "remove"}, "use 'keep', 'delete' or 'move:DIR'"), ({"after": "move:"}, "names no directory"),
        ({"after": "move:in"}, "would be read again"), ({"after": 7}, "after"), ({"settle_s": -1}, "settle_s"),
        ({"after": "delete", "follow": True}, "do not grow"), ({"settle_s": 1, "follow": True}, "do not grow"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Files("in/*.csv", **options)


@pytest.mark.parametrize(
    ("pattern", "directory", "taken"),
    [
        ("in/*.csv", "in", True), ("in/*.csv", "done", False), ("in/*.csv", "in/done", False),
        ("in/*", "in/done", False),
        ("in/**/*.csv", "in/done", True), ("in/**/*.csv", "in/.done", False), ("in/**", "in/done", True),
        ("*/x.csv", "done", True), ("in/*/x.csv", "in/done", True), ("in/a.csv", "in", True), ("in[1]/*", "in1", True),
        ("s3://b/in/*", "s3://b/in/done", False), ("s3://b/in", "s3://b/in/done", False),
        ("s3://b/in", "s3://b", True), ("s3://b/in/**", "s3://b/in/.done", True),
        ("s3://b/in/*", "s3://b/in/", True), ("s3://b/in", "s3://b/in", True),
    ],
)  # fmt: skip
def test_a_directory_that_the_pattern_finds_is_refused(pattern: str, directory: str, taken: bool) -> None:
    """Otherwise a moved file would be read again, and moved again."""
    if not taken:
        assert consumed.Consumed(f"move:{directory}", pattern).is_on
        return
    with pytest.raises(InvalidArgument, match="read again"):
        consumed.Consumed(f"move:{directory}", pattern)


def test_two_sources_do_not_share_files_that_go(tmp_path: Path, store: cues.Store) -> None:
    filled(tmp_path / "in")
    source = Files(tmp_path / "in", after="delete")
    graph = Graph("g", [Source("a", source), Source("b", source)])
    with pytest.raises((cues.errors.ProcessorStopped, InvalidArgument, ReturnError), match="files of its own"):
        testing.run_until_idle(graph, store)


def test_another_filesystem_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "in")
    other = next(
        (path for path in ("/dev/shm", "/tmp", "/proc") if os.stat(path).st_dev != os.stat(tmp_path).st_dev), ""
    )
    with pytest.raises(InvalidArgument, match="another filesystem"):
        [*Files(tmp_path / "in", after=f"move:{other}")(None)]


# --- kills ----------------------------------------------------------------------------------------

GRAPH = """
import os, signal, threading, time
import cues
from cues.processors import blocks, consumed
from cues.processors.file_source import Files

blocks.BLOCK_BYTES = 400
blocks.ROWS_MIN = 1
FINISH = consumed.Consumed.finish


def finish(self, row):
    time.sleep(0.01)
    return FINISH(self, row)


consumed.Consumed.finish = finish
if "KILL_AFTER" in os.environ:
    threading.Timer(float(os.environ["KILL_AFTER"]), os.kill, (os.getpid(), signal.SIGKILL)).start()
graph = cues.Graph("g", errors="errors")
graph.add(cues.Source("rows", Files("in/*", after=AFTER)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "ending"),
    [
        (1, "csv"),
        *(pytest.param(3, ending, marks=pytest.mark.slow) for ending in WRITERS),
        *(pytest.param(25, ending, marks=pytest.mark.long) for ending in WRITERS),
    ],
)
def test_killed_at_any_time(kills: int, ending: str, tmp_path: Path) -> None:
    """Files are written again under the same names between the kills; each of them is on the queue once."""
    dice = random.Random(seeds.new())
    after = dice.choice(["delete", "move:done"])
    (tmp_path / "graph.py").write_text(GRAPH.replace("after=AFTER", f"after={after!r}"))
    (tmp_path / "in").mkdir()
    command = [
        str(Path(sys.executable).with_name("cues")),
        "run",
        "graph.py",
        "--store",
        "store",
        "--durability",
        "process",
    ]
    written = 0
    for kill in range(kills + 1):
        for number in range(30):
            path = tmp_path / f"in/{number}.{ending}"
            if not path.exists():  # a program that writes a file when the former one was taken
                WRITERS[ending](tmp_path / "new", [{"n": written + n} for n in range(20)])
                (tmp_path / "new").rename(path)
                written += 20
        environment = os.environ | ({"KILL_AFTER": str(0.1 + dice.random() * 0.5)} if kill < kills else {})
        process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
        assert process.returncode in (0, -signal.SIGKILL), process.stderr.decode()
    assert process.returncode == 0 and not [*(tmp_path / "in").iterdir()]
    with cues.open(tmp_path / "store") as store:
        assert sorted(numbers(store)) == [*range(written)]
    if after != "delete":
        assert len([*(tmp_path / "done").iterdir()]) == written // 20


# --- objects --------------------------------------------------------------------------------------


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty object store in this process, whose listings are whole and say times, but no ETags."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def put(memory: Any, name: str, *numbers: int) -> None:
    memory.pipe_file(f"memory://x/{name}", "".join(f'{{"n": {n}}}\n' for n in numbers).encode())


def left(memory: Any) -> list[str]:
    return sorted(memory.find("memory://x"))


@pytest.mark.parametrize("pattern", ["memory://x/in/*.jsonl", "memory://x/in", "memory://x/in/**/*.jsonl"])
@pytest.mark.parametrize("after", ["delete", "move:memory://x/done.d"])
def test_an_object_goes_after_the_commit_and_a_later_one_of_its_name_is_read(
    after: str, pattern: str, memory: Any, store: cues.Store
) -> None:
    for turn in range(2):
        for number in range(3):
            put(memory, f"in/{number}.jsonl", 6 * turn + 2 * number, 6 * turn + 2 * number + 1)
        run(Files(pattern, after=after, settle_s=0.01), store)
        assert numbers(store) == [*range(6 * turn + 6)]
    names = [f"/x/done.d/{n}{middle}.jsonl" for n in range(3) for middle in ("", ".2")]
    assert left(memory) == ([] if after == "delete" else sorted(names))


def test_no_object_goes_before_its_commit(memory: Any) -> None:
    """As the engine calls it. The thread of the source deletes, at its next look."""
    for number in range(2):
        put(memory, f"in/{number}.jsonl", 2 * number, 2 * number + 1)
    source = Files("memory://x/in/*", after="delete")
    process = SimpleNamespace(state={}, stopping=False, id="g.rows")
    seen = []
    for position, item in source(None, process):
        seen.append((None if item is None else item["n"], len(left(memory))))
        if len(seen) > 2:
            source.committed(position)
    assert [pair for pair in seen if pair[0] is not None] == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert not left(memory) and process.state == {}


def test_an_object_that_is_overwritten_before_its_deletion_is_read_too(memory: Any, store: cues.Store) -> None:
    """Also with the same size, and the same bytes at another time."""
    source = Files("memory://x/in/*", after="delete")
    for number in (1, 2, 2):
        put(memory, "in/0.jsonl", number)
        testing.run_until_idle(graph_over(source), store)
    run(source, store)
    assert numbers(store) == [1, 2, 2] and not left(memory)


@pytest.mark.parametrize("after", slow_except(["delete"], ["delete", "move:memory://x/done"]))
def test_a_crash_anywhere_loses_and_doubles_no_object(after: str, memory: Any) -> None:
    def filled() -> None:
        memory.store.clear()
        for number in range(3):
            put(memory, f"in/{number}.jsonl", 2 * number, 2 * number + 1)

    def whole(store: cues.Store) -> None:
        filled()
        for _ in range(2):
            testing.run_until_idle(graph_over(Files("memory://x/in/*", after=after)), store)

    with testing.temporary_store() as store:
        sites = testing.crash_sites(lambda: whole(store))
    assert len(sites) > 8
    for point, hit in sites:
        with testing.temporary_store() as store:
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                whole(store)
            assert len(left(memory)) + len(numbers(store)) // 2 >= 3, "an object went before its messages"
            run(Files("memory://x/in/*", after=after), store)
            assert numbers(store) == [*range(6)], (point, hit)
        assert left(memory) == ([] if after == "delete" else [f"/x/done/{n}.jsonl" for n in range(3)])


@pytest.mark.parametrize("failing", ["copy", "delete"])
def test_a_kill_between_the_copy_and_the_deletion(
    failing: str, memory: Any, store: cues.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object is at both places, and the next start removes one of them."""
    put(memory, "in/0.jsonl", 1)
    source = Files("memory://x/in/*", after="move:memory://x/done")
    testing.run_until_idle(graph_over(source), store)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(places.Remote, failing, killed)
        testing.run_until_idle(graph_over(source), store)
    assert len(left(memory)) == (1 if failing == "copy" else 2)
    run(source, store)
    assert left(memory) == ["/x/done/0.jsonl"] and numbers(store) == [1]


def test_an_object_that_is_written_to_waits(memory: Any, store: cues.Store) -> None:
    put(memory, "in/0.jsonl", 1)
    with graph_over(Files("memory://x/in/*", settle_s=0.4, poll_s=0.02)).start(store=store) as running:
        time.sleep(0.1)
        assert not len(store.queue("rows"))
        put(memory, "in/0.jsonl", 1, 2)
        assert running.wait_done(30)
    assert numbers(store) == [1, 2]


def test_objects_are_read_by_their_times(memory: Any) -> None:
    for number in (2, 0, 1):
        put(memory, f"in/{number}.jsonl", number)
    assert [item["n"] for _, item in Files("memory://x/in/*", order="modified")(None) if item] == [2, 0, 1]


class Other(MemoryFileSystem):
    """The same objects under another scheme."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace(f"{cls.protocol}://", "memory://")))


class Timeless(Other):
    """A store that says neither times nor ETags."""

    protocol = "timeless"

    def glob(self, path: str, **options: Any) -> Any:
        found = super().glob(path, **options)
        return {name: {key: entry[key] for key in ("name", "size", "type")} for name, entry in found.items()}


class Lasting(Other):
    """A store whose objects cannot be deleted."""

    protocol = "lasting"

    def rm_file(self, path: str) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("scheme", "options", "says"),
    [
        ("timeless", {"after": "delete"}, "ETags or times"), ("timeless", {"settle_s": 1}, "needs the times"),
        ("timeless", {"order": "modified"}, "needs the times"), ("lasting", {"after": "delete"}, "no deletion"),
    ],
)  # fmt: skip
def test_options_that_a_store_cannot_have_are_refused(
    scheme: str, options: dict[str, Any], says: str, memory: Any, store: cues.Store
) -> None:
    for kind in (Timeless, Lasting):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
    put(memory, "in/0.jsonl", 1)
    source = Files(f"{scheme}://x/in/*", **options)
    with pytest.raises((cues.errors.ProcessorStopped, InvalidArgument), match=says):
        for _ in range(2):
            testing.run_until_idle(graph_over(source), store)
    assert left(memory) == ["/x/in/0.jsonl"]


@pytest.mark.parametrize("directory", ["done", "s3://other/done", "gs://b/done"])
def test_an_object_is_moved_within_its_bucket(directory: str) -> None:
    with pytest.raises(InvalidArgument, match="same bucket"):
        Files("s3://b/in/*.csv", after=f"move:{directory}")
    with pytest.raises(InvalidArgument, match="same bucket"):
        Files("in/*.csv", after="move:s3://b/done")


def test_an_object_that_is_gone_when_it_is_opened_leaves_no_error_in_a_finalizer() -> None:
    """The file of obstore whose constructor fails has no reader, and its ``__del__`` asks for it."""
    files = pytest.importorskip("obstore.fsspec")
    where = places.Remote("memory://bucket/x")
    where.system = files.FsspecStore("memory")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            where.open("bucket/missing")
        gc.collect()  # an error there fails the test
