"""Programs that write to a disk that will lose its power, and that continue on each state of it (test_disk_states.py).

Beside its writes, a program that is recorded leaves marks:

    {"disk": {"home": {"in": 5}}}       this commit of a "disk" store returned; queue "in" ends before index 5
    {"synced": {"abroad": {"out": 3}}}  a sync of a store returned, or its last handle was closed
    {"files": {name: content}}          these finished files were there after a transaction of a FileSink

Workloads with more than stores and files are in disk_targets.py.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import disk_states
import scenarios

import cues
from cues import faults, testing
from cues.errors import Diverged, StoreDamaged
from cues.processors.file_sink import FileSink
from cues.queues.store import Store
from cues.storage import environment
from cues.tools import check

REFUSED = (StoreDamaged, Diverged)
"""The errors with which a store, or the start of a graph, is refused after a lost power."""
AFTER_COMMITS = ("append.after", "commit.after", "snapshot.after", "claim.after", "forward.after", "files.finished")


# --- workloads, in a process that is recorded, and again in the children that continue -----------


REMOVED: set[str] = set()
"""Queues that a workload has begun to remove: no mark of a commit, sync or close says any more that they are there."""


def ends(store: Store) -> dict[str, int]:
    """The next index of every log of a store."""
    with store.core.view() as txn:
        return {log: row.next for log, row in environment.logs(txn) if log not in REMOVED}


def mark_commits(stores: Callable[[], dict[str, Store]], files: Callable[[], dict[str, str]] = dict) -> None:
    """From here on, leave a mark after each commit, and after each sync and each close of a store."""
    real, real_close = Store.sync, Store.close

    def sync(self: Store) -> None:
        before = ends(self)
        real(self)
        where = "abroad" if Path(self.path).name == "abroad" else "home"
        disk_states.mark(json.dumps({"synced": {where: before}}))

    def close(self: Store) -> None:
        where = "abroad" if Path(self.path).name == "abroad" else "home"
        before = {} if self.closed else ends(self)
        real_close(self)
        if before and self.core.environment.state == "closed":
            disk_states.mark(json.dumps({"synced": {where: before}}))

    def point(name: str) -> None:
        if name in AFTER_COMMITS:
            there = {where: ends(store) for where, store in stores().items() if store.durability == "disk"}
            disk_states.mark(json.dumps({"disk": there, "files": files()}))

    Store.sync = sync  # type: ignore[method-assign]
    Store.close = close  # type: ignore[method-assign]
    faults.watch(point)


def run_scenario(root: str, name: str) -> None:
    """A graph of the crash tests, from the first file of its stores on."""
    opened: list[scenarios.Stores] = []
    real = scenarios.Stores.__init__

    def remember(self: scenarios.Stores, *arguments: Any) -> None:
        real(self, *arguments)
        opened[:] = [self]

    def stores() -> dict[str, Store]:
        found = {"home": opened[0].home, "abroad": opened[0].abroad} if opened else {}
        return {where: store for where, store in found.items() if store is not None and not store.closed}

    scenarios.Stores.__init__ = remember  # type: ignore[method-assign]
    mark_commits(stores)
    scenarios.drive(name, root + "/store")


def continue_scenario(root: str, name: str) -> dict[str, Any]:
    scenarios.drive(name, root + "/store")
    return scenarios.examine(name, root + "/store")


LINES = 9


def numbered(position: int | None) -> Any:
    for n in range(position or 0, LINES):
        yield n + 1, {"n": n, "text": "x" * (30 * n)}


def files_of(root: str) -> dict[str, str]:
    return {path.name: path.read_bytes().hex() for path in Path(root, "out").glob("*.jsonl*")}


def run_files(root: str, compression: str) -> None:
    """A source, and a sink whose files are finished after every third message or so."""
    with cues.open(root + "/store", map_size=scenarios.MAP_BYTES) as store:
        mark_commits(lambda: {"home": store}, lambda: files_of(root))
        _write_files(root, compression, store)


def _write_files(root: str, compression: str, store: Store) -> None:
    out = FileSink(root + "/out", "jsonl", roll_bytes=200, compression=compression or None)
    graph = cues.Graph("g", [cues.Source("in", numbered, batch_size=2), out.sink("in", batch_size=2)])
    testing.run_until_idle(graph, store)
    out.finish()
    out.close()


def continue_files(root: str, compression: str) -> dict[str, Any]:
    before = files_of(root)
    with cues.open(root + "/store", map_size=scenarios.MAP_BYTES) as store:
        _write_files(root, compression, store)
        problems = store.check() + testing.check_attempts(store)
    after = files_of(root)
    changed = [name for name, content in before.items() if after.get(name) != content]
    rows = []
    for content in (bytes.fromhex(after[name]) for name in sorted(after)):
        rows += [json.loads(line) for line in (gzip.decompress(content) if compression else content).splitlines()]
    return {"problems": problems, "changed": changed, "rows": rows}


def run_cut(root: str, _: str) -> None:
    """A file has rows of a step that did not commit. It is cut, and finished without an append."""
    with cues.open(root + "/store", map_size=scenarios.MAP_BYTES) as store:
        with testing.crash("files.appended", 2, how="raise"), contextlib.suppress(testing.Crashed):
            _write_files(root, "", store)
        mark_commits(lambda: {"home": store}, lambda: files_of(root))  # not earlier: the crash would end the marks
        (first,) = FileSink(root + "/out", "jsonl").finish()
        assert len(Path(first).read_bytes().splitlines()) == 2
        _write_files(root, "", store)


continue_cut = continue_files


APPENDS = 24


def message(n: int) -> dict[str, Any]:
    return {"n": n, "text": chr(97 + n % 26) * (n * 997 % 9000)}


def run_appends(root: str, durability: str) -> None:
    """Appends of one message and of several, some longer than a page, with purges and syncs between them."""
    with cues.open(root + "/store", durability=durability, map_size=scenarios.MAP_BYTES) as store:
        mark_commits(lambda: {"home": store})
        _append(store)


def _append(store: Store) -> None:
    queue = store.queue("in")
    while (n := queue.last_index) < APPENDS:
        appender = queue.appender()
        if n % 3:
            appender.write(message(n + 1))
        else:
            appender.write_many([message(n + 1), message(n + 2), message(n + 3)])
        if n % 5 == 4:
            queue.purge(before=max(1, n - 6))
        if n % 4 == 3:
            store.sync()


def continue_appends(root: str, durability: str) -> dict[str, Any]:
    with cues.open(root + "/store", durability=durability, map_size=scenarios.MAP_BYTES) as store:
        queue = store.queue("in")
        found = []
        for _ in range(2):
            first = queue.first_index
            wrong = [n for n, each in enumerate(queue.tailer(), first) if each != message(n)]
            found.append({"wrong": wrong, "check": store.check()})
            _append(store)
        return {"found": found, "end": queue.last_index}


def run_small(root: str, durability: str) -> None:
    """Few commits, of which every subset of writes can be tried: appends, a purge and a sync."""
    with cues.open(root + "/store", durability=durability, map_size=scenarios.MAP_BYTES) as store:
        mark_commits(lambda: {"home": store})
        queue = store.queue("in")
        for n in range(1, 4):
            queue.appender().write(message(n))
        queue.purge(before=2)
        store.sync()


continue_small = continue_appends


def look(root: str, durabilities: dict[str, str]) -> dict[str, Any]:
    """The ends of the logs of each store that is there, and what its check finds; or the error of its opening."""
    found: dict[str, Any] = {}
    for where, path in (("home", Path(root, "store")), ("abroad", Path(root, "store", "abroad"))):
        if not (path / "data.mdb").exists():
            continue
        try:
            with cues.open(path, durability=durabilities[where], map_size=scenarios.MAP_BYTES) as store:
                found[where] = {"ends": ends(store), "check": store.check()}
        except REFUSED as error:
            found[where] = {"refused": str(error)}
    return found


def look_and_continue(module: str, name: str, root: str, argument: str, durabilities: dict[str, str]) -> dict[str, Any]:
    """Everything that a judge wants to know of one state, which it changes."""
    functions = vars(importlib.import_module(module))
    found: dict[str, Any] = {"files": files_of(root), "stores": look(root, durabilities)}
    try:
        if f"has_{name}" in functions:
            found["has"] = functions[f"has_{name}"](root, argument)
        found["after"] = functions[f"continue_{name}"](root, argument)
    except REFUSED as error:
        found["refused"] = str(error)
    return found


JUDGE_S = 20
"""A child judges states for so long; the next child begins with the next state."""


def look_and_continue_all(
    module: str, name: str, roots: list[str], argument: str, durabilities: dict[str, str], results: str
) -> bool:
    """Look at states one after the other, and append each result to a file: the next state may end this process."""
    check.walk = check_here
    end = time.monotonic() + JUDGE_S
    with open(results, "wb") as file:
        for root in roots:
            pickle.dump(look_and_continue(module, name, root, argument, durabilities), file)
            file.flush()
            if time.monotonic() > end:
                break
    return True


def check_here(path: str, progress: object = None) -> list[str]:
    """Do what ``check.walk`` does, in this process, which a damaged store may end: that is a wrong state too."""
    try:
        with cues.open(path, readonly=True) as store:
            return store.check()
    except StoreDamaged as error:
        return [error.message]
