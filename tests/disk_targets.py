"""Workloads that lose their power with more than stores: shared directories, backups, compaction, databases, lakes.

Each workload is up to three functions, which take a directory and an argument (test_disk_states.py runs them):

    run_…         is recorded. Its marks {"has": {name: number}} say how much of something was acknowledged
    has_…         on a state of the disk: how much of it is there, by the same names
    continue_…    to the end of the workload: its results, which are those of an undisturbed run

See disk_workloads.py for the marks of stores.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import contracts_sinks
import disk_states
import scenarios
from disk_workloads import REMOVED, check_here, mark_commits, message

import cues
from cues import faults, testing
from cues.checkpoints import sync_names
from cues.errors import QueueNotFound
from cues.processors.file_source import Files
from cues.queues.store import Store
from cues.tools import backup, check, compaction

open_store = functools.partial(cues.open, map_size=scenarios.MAP_BYTES)


def has(**numbers: int) -> None:
    """Leave a mark: so much was acknowledged."""
    disk_states.mark(json.dumps({"has": numbers}))


# --- a shared directory ---------------------------------------------------------------------------

COUNT = 18


def counted(position: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    for i in range(position or 0, COUNT):
        yield i + 1, {"i": i, "k": i % 3}


def number(message: dict[str, Any], process: Any) -> dict[str, Any]:
    """The number of messages of a key so far."""
    process.state["n"] = process.state.get("n", 0) + 1
    return {**message, "n": process.state["n"]}


def same(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _driver(root: str, durability: str) -> Any:
    from directory_steps import HostRun

    from cues.spark.cluster.files import LocalFiles

    streams = [cues.Stream(number, "src", "out", id="a", key="k"), cues.Stream(same, "out", "end", id="b")]
    graph = cues.Graph("g", [cues.Source("src", counted), *streams], durability=durability)
    open_store(root + "/store", durability=durability).close()  # with a map whose pages can be compared
    return HostRun(LocalFiles(root + "/queues"), graph, Path(root, "store"), size=lambda: 4)


def _turn(run: Any, most: int) -> bool:
    """Let each part of a driver work once; what a step has committed is acknowledged when it returns."""
    busy = sum(run.pull(source, 3) for source in run.sources if (source.position[0] or 0) < most)
    for each in (run.feeder, *run.stages):
        busy += bool(each.step())
        has(**_ends(run))
    return bool(busy)


def _ends(run: Any) -> dict[str, int]:
    return {queue: directory.logs[0].next for queue, directory in run.queues.items()}


LIVES = 3


def run_directory(root: str, durability: str) -> None:
    """Drivers, one after another: steps, merges of files, and checkpoints of the log of each queue."""
    run: Any = None
    for life in range(1, LIVES + 1):
        run = _driver(root, durability)
        mark_commits(lambda: {} if run.assembly.store.closed else {"home": run.assembly.store})
        run.claim()
        run.maintenance.merge_files = 3
        while _turn(run, life * COUNT // LIVES):
            pass
        for directory in run.queues.values():
            run.maintenance.merge(directory.logs[0])
            directory.checkpoint()
        run.close()


def has_directory(root: str, durability: str) -> dict[str, int]:
    """The messages that readers see, without a driver."""
    from directory_steps import messages_of

    from cues.spark.cluster.directory import QueueDirectory
    from cues.spark.cluster.files import LocalFiles

    found, files = {}, LocalFiles(root + "/queues", make=False)
    for queue in ("src", "out", "end"):
        with contextlib.suppress(QueueNotFound):
            directory = QueueDirectory(files, queue, cues.QueueOptions(), make=False)
            found[queue] = 1 + len(messages_of(directory))
    return found


def continue_directory(root: str, durability: str) -> dict[str, Any]:
    from cues.spark.cluster import inspection

    results = []
    for _ in range(2):  # the second one finds nothing to do
        run = _driver(root, durability)
        try:
            run.claim()
            while _turn(run, COUNT):
                pass
            results.append({queue: run.messages(queue) for queue in run.queues})
        finally:
            run.close()
    assert results[0] == results[1]
    return {"problems": inspection.problems_of(root + "/queues"), **results[0]}


class Died(BaseException):
    """The process is gone."""


@contextlib.contextmanager
def dying(at: int, below: str) -> Iterator[list[int]]:
    """End the block before its sync number ``at`` of a directory. Yields a list with the number that is left."""
    left, fsync = [at], os.fsync

    def sync(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        if os.path.isdir(path) and Path(path).is_relative_to(below):
            left[0] -= 1
            if left[0] == 0:
                raise Died
        fsync(file)

    os.fsync = sync
    try:
        with contextlib.suppress(Died):
            yield left
    finally:
        os.fsync = fsync


def run_unsynced(root: str, durability: str) -> None:
    """Drivers that die before they sync a folder of the directory: the first one its first folder, and so on.

    A name that got into the folder is seen by the next driver. The last one does all that is left.
    """
    for life in itertools.count(1):
        run = None
        with dying(life, root + "/queues") as left:
            run = _driver(root, durability)
            mark_commits(lambda run=run: {} if run.assembly.store.closed else {"home": run.assembly.store})  # type: ignore[misc]
            run.claim()
            while _turn(run, COUNT):
                pass
        if run is not None:
            run.close()
            if left[0] > 0:
                return


has_unsynced = has_directory
continue_unsynced = continue_directory


# --- backups --------------------------------------------------------------------------------------

BACKUPS = 3


def _grow(store: Store, end: int) -> None:
    queue = store.queue("in")
    while (n := queue.last_index) < end:
        queue.appender().write(message(n + 1))
        if n % 4 == 3:
            queue.purge(before=n - 2)


def run_backup(root: str, _: str) -> None:
    """Backups, each of the changes since the one before, and a restore of each."""
    with open_store(root + "/store") as store:
        mark_commits(lambda: {"home": store})
        for n in range(1, BACKUPS + 1):
            _grow(store, 4 * n)
            backup.backup(store, root + "/backups", since="auto")
            has(**{f"backup {n}": store.queue("in").last_index})
            if n != 2:
                backup.restore(root + "/backups", f"{root}/restored-{n}")
                has(**{f"restored {n}": store.queue("in").last_index})


def _whole(path: Path) -> int:
    """The last index of a store whose messages are right."""
    with open_store(path) as store:
        problems = store.check()
        assert not problems, problems
        queue = store.queue("in")
        for index, each in enumerate(queue.tailer(), queue.first_index):
            assert each == message(index), index
        return queue.last_index


def has_backup(root: str, _: str) -> dict[str, int]:
    """Each backup is restored beside; and the stores that were restored."""
    found = {}
    for n in backup.numbers_of(Path(root, "backups")):
        backup.restore(root + "/backups", f"{root}/beside-{n}", at=n)
        found[f"backup {n}"] = _whole(Path(f"{root}/beside-{n}"))
    for n in range(1, BACKUPS + 1):
        path = Path(f"{root}/restored-{n}")
        if (path / "data.mdb").exists():
            found[f"restored {n}"] = _whole(path)
    return found


def continue_backup(root: str, _: str) -> dict[str, Any]:
    """Make a backup, and restore it to each place where there is no store."""
    with open_store(root + "/store") as store:
        _grow(store, 4 * BACKUPS)
        backup.backup(store, root + "/backups", since="auto")
        problems = store.check()
    for n in range(1, BACKUPS + 1):
        path = Path(f"{root}/restored-{n}")
        if not (path / "data.mdb").exists():
            backup.restore(root + "/backups", path)
            assert _whole(path) == 4 * BACKUPS
    return {"problems": problems, "end": _whole(Path(root, "store"))}


# --- stores whose makers die before a sync --------------------------------------------------------


def run_makers(root: str, _: str) -> None:
    """Stores that are made, restored and compacted by processes that die before a sync of a directory: the first one
    before the first sync, and so on. The next process opens the store, and appends.
    """
    check.walk = check_here
    with open_store(root + "/first") as store:
        _grow(store, 2)
        backup.backup(store, root + "/backups")
    acts: dict[str, Callable[[Path], object]] = {
        "made": lambda path: open_store(path).close(),
        "restored": lambda path: backup.restore(root + "/backups", path),
        "compacted": compaction.compact,
    }
    for name, act in acts.items():
        for at in itertools.count(1):
            path = Path(root, name, str(at), "store")
            if act == compaction.compact:
                with open_store(path) as store:
                    _grow(store, 2)
            with dying(at, root) as left:
                act(path)
            if not (path / "data.mdb").exists():
                act(path)
            with open_store(path) as store:
                _grow(store, 4)
                has(**{f"{name} {at}": store.queue("in").last_index})
            if left[0] > 0:
                break


def has_makers(root: str, _: str) -> dict[str, int]:
    return {f"{path.parts[-3]} {path.parts[-2]}": _whole(path) for path in _made(root)}


def _made(root: str) -> list[Path]:
    return [file.parent for file in Path(root).glob("*/*/store/data.mdb")]


def continue_makers(root: str, _: str) -> dict[str, Any]:
    problems = []
    for path in _made(root):
        with open_store(path) as store:
            _grow(store, 6)
            problems += store.check()
    return {"problems": problems}


# --- compaction -----------------------------------------------------------------------------------


def run_compact(root: str, durability: str) -> None:
    """Appends and purges, and compactions that remove a queue."""
    for n in range(1, 4):
        with open_store(root + "/store", durability=durability) as store:
            mark_commits(lambda store=store: {} if store.closed else {"home": store})  # type: ignore[misc]
            _grow(store, 5 * n)
            store.queue(f"empty{n}")
            store.sync()
        REMOVED.add(f"empty{n}")
        gone = {"home": {f"empty{n}": 0}}
        disk_states.mark(json.dumps({"disk": gone, "synced": gone}))
        compaction.compact(root + "/store", remove=[f"empty{n}"])
        has(**{f"removed {n}": 1})


def has_compact(root: str, durability: str) -> dict[str, int]:
    with open_store(root + "/store", durability=durability) as store:
        queues = store.queues()
    return {f"removed {n}": int(f"empty{n}" not in queues) for n in range(1, 4)}


def continue_compact(root: str, durability: str) -> dict[str, Any]:
    with open_store(root + "/store", durability=durability) as store:
        _grow(store, 15)
    compaction.compact(root + "/store")
    end = _whole(Path(root, "store"))
    return {"end": end, "beside": sorted(path.name for path in Path(root, "store").glob("*.compact"))}


def run_full(root: str, _: str) -> None:
    """A compaction that fails after its rename, before the name is durable; and appends after it."""

    def fail(point: str) -> None:
        if point == "compact.renamed":
            raise OSError(errno.ENOSPC, "No space left on device")

    with open_store(root + "/store") as store:
        mark_commits(lambda: {"home": store})
        _grow(store, 5)
    faults.watch(fail)
    with contextlib.suppress(OSError):
        compaction.compact(root + "/store")
    with open_store(root + "/store") as store:
        mark_commits(lambda: {"home": store})
        _grow(store, 10)


def continue_full(root: str, _: str) -> dict[str, Any]:
    with open_store(root + "/store") as store:
        _grow(store, 15)
    return {"end": _whole(Path(root, "store"))}


# --- files that a source deletes or moves --------------------------------------------------------

FILES = 3
WRITTEN_S = 1_800_000_000
"""The time of the files, which is not recorded."""


def _consume(store: Store, after: str) -> None:
    source = Files("in/*.txt", after=after if after == "delete" else "move:done/to")
    for _ in range(2):  # the second run forgets the files that the first one has read
        testing.run_until_idle(cues.Graph("g", [cues.Source("in", source)]), store)


def _write_inputs() -> None:
    os.makedirs("in", exist_ok=True)
    for n in range(FILES):
        with open(f"in/{n}.txt", "w") as file:
            file.writelines(f"line {line} of file {n}\n" for line in range(3))
            file.flush()
            os.fsync(file.fileno())
        os.utime(file.name, (WRITTEN_S, WRITTEN_S))
    sync_names(Path("in"))


def run_consumed(root: str, after: str) -> None:
    """Files that go when their lines are committed. Their names are relative, since a state is in another directory."""
    with contextlib.chdir(root):
        _write_inputs()
        with open_store("store") as store:
            mark_commits(lambda: {"home": store})
            _consume(store, after)


def continue_consumed(root: str, after: str) -> dict[str, Any]:
    with contextlib.chdir(root):
        if not os.path.exists("store/data.mdb"):  # nothing was read, and the files may not be whole
            _write_inputs()
        for path in Path("in").iterdir():
            os.utime(path, (WRITTEN_S, WRITTEN_S))
        with open_store("store") as store:
            _consume(store, after)
            lines = [message["line"] for message in testing.messages(store, "in")]
            problems = store.check() + testing.check_attempts(store)
        # Two links to one file are two files in a state.
        moved = sorted({path.read_text() for path in Path("done").rglob("*.txt")})
        return {"lines": lines, "left": sorted(os.listdir("in")), "moved": moved, "problems": problems}


# --- targets of sinks -----------------------------------------------------------------------------

ROWS = 10


def rows(position: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    for n in range(position or 0, ROWS):
        yield n + 1, {"n": n + 1}


def _fill(root: str, kind: str, store: Store) -> list[int]:
    case = contracts_sinks.SINKS[kind]
    target = case.make(Path(root, "target"))
    graph = cues.Graph("g", [cues.Source("in", rows, batch_size=2)])
    graph.add(cues.Sink(case.save, "in", id="save", batch=True, batch_size=2, checkpoint=target))
    try:
        testing.run_until_idle(graph, store)
        return case.numbers(target)
    finally:
        if hasattr(target, "close"):
            target.close()


def _delete_damaged_version(table: Path) -> None:
    """Delete the last version of a Delta table if it is not whole, as its page says."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    entries = sorted((table / "_delta_log").glob("*.json"))
    for entry in entries:
        try:
            for action in map(json.loads, entry.read_text().splitlines() or ["no action"]):
                if "add" in action:
                    pq.read_table(table / action["add"]["path"])
        except (ValueError, OSError, pa.ArrowException):
            assert entry == entries[-1], f"{entry.name} is damaged, and was acknowledged"
            entry.unlink()


def run_sink(root: str, kind: str) -> None:
    if kind == "iceberg":  # the catalog is the user's, and so is its directory
        Path(root, "target").mkdir()
        sync_names(Path(root, "target"))
    with open_store(root + "/store") as store:
        mark_commits(lambda: {"home": store})
        _fill(root, kind, store)


def continue_sink(root: str, kind: str) -> dict[str, Any]:
    if kind == "delta":
        _delete_damaged_version(Path(root, "target", "table"))
    with open_store(root + "/store") as store:
        found = _fill(root, kind, store)
        return {"rows": found, "problems": store.check() + testing.check_attempts(store)}
