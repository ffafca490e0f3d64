"""Maintenance of queues: small files are merged, retention removes old files, orphans are swept.

    merge      a run of small files is written again as one file, which replaces them in the log
    retain     files whose messages retention removes leave the log; the last file always stays
    sweep      at the start: delete the files that no log and no record names

A file leaves the log first. It leaves the disk :data:`GRACE_S` later, and only when no step of this driver reads it.
So a reader that has listed the queue before can still read the file. After a crash in between the next start sweeps.

Not guaranteed: that a Spark stream over a queue sees no message twice when files are merged. It knows files, not
messages. ``spark.cues.mergeFiles`` = 0 in the session's settings turns merging off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from cues import faults
from cues.base import clock, events
from cues.errors import Diverged
from cues.spark.cluster.directory import SCHEMA, DataFile, QueueDirectory, data_file, merged_name, written_by
from cues.spark.cluster.files import folder_of

if TYPE_CHECKING:
    from cues.queues.options import Retention
    from cues.spark.cluster.driver import Driver
    from cues.spark.cluster.files import Files
    from cues.spark.cluster.ledger import Ledger
    from cues.spark.cluster.step import Stage

MERGE_FILES: Final = 64
"""This number of small files in a row becomes one file. A step writes one file for each queue."""
MERGE_BYTES: Final = 128 << 20
"""The largest merged file, approximately. A file larger than half of it is not small."""
GRACE_S: Final = 600.0
"""The time that a file stays on the disk after it left the log, as with Spark's own sink."""


class Maintenance:
    """Maintains the queues of one driver. Used by one thread."""

    def __init__(self, driver: Driver, stages: Sequence[Stage]) -> None:
        self.driver = driver
        self.stages = stages
        self.merge_files = int(driver.session.conf.get("spark.cues.mergeFiles", str(MERGE_FILES)) or 0)
        self._leaving: list[tuple[float, QueueDirectory, str]] = []
        self._warned: set[tuple[str, str]] = set()

    def step(self) -> None:
        """Look once at every queue."""
        for directory in self.driver.queues.values():
            self.merge(directory)
            if directory.options.retention is not None:
                self.retain(directory, directory.options.retention)
        self.clear()

    # --- merge ---

    def merge(self, directory: QueueDirectory) -> None:
        """Replace many small files by one large file, if there are enough."""
        files = _run_of_small(directory.live, self.merge_files) if self.merge_files else []
        if not files:
            return
        first, count = files[0].first, files[-1].next - files[0].first
        driver = self.driver
        directory.hold(files)
        try:
            name = merged_name(first, count, driver.graph)
            driver.context.setJobGroup(keepers_group(driver), f"merging files of {directory.queue}", True)
            rows = driver.session.read.schema(SCHEMA).parquet(*directory.urls(files))
            driver.write_file(rows.coalesce(1).sortWithinPartitions("index"), f"{directory.folder}/{name}")
            modified_ms = max(file.modified_ms for file in files)
            self._exchange(directory, files, [replace(directory.stored(name), modified_ms=modified_ms)])
        finally:
            directory.release(files)

    # --- retain ---

    def retain(self, directory: QueueDirectory, policy: Retention) -> None:
        """Remove the files of which the policy keeps no message."""
        goal = _goal(directory, policy, [s.positions[directory.queue] for s in self._readers(directory)])
        for stage in self._readers(directory):
            low = stage.holds(directory.queue)
            if low is not None:
                goal = min(goal, low)
            elif stage.positions[directory.queue] < goal:
                self._warn(directory, stage)
        gone = [file for file in directory.live[:-1] if file.next <= goal]
        if gone:
            self._exchange(directory, gone, [])

    def _readers(self, directory: QueueDirectory) -> list[Stage]:
        return [stage for stage in self.stages if directory in stage.inputs.values()]

    def _warn(self, directory: QueueDirectory, stage: Stage) -> None:
        pair = (directory.queue, stage.node.id)
        if pair not in self._warned:
            self._warned.add(pair)
            text = f"retention of {directory.queue} lets go of messages that {stage.node.id} has not read"
            self.driver.emit(events.Event(stage.node.id, text, logging.WARNING))

    # --- files that leave ---

    def _exchange(self, directory: QueueDirectory, gone: list[DataFile], new: list[DataFile]) -> None:
        """Replace files in the log. Do nothing if another driver has removed some of them meanwhile."""
        names = {file.name for file in gone}
        with directory.lock:
            while names <= {file.name for file in directory.live}:
                if directory.replace(names, new):
                    break
            else:
                return
        faults.point("spark.replaced")
        leaves_at = time.monotonic() + GRACE_S
        self._leaving += [(leaves_at, directory, file.name) for file in gone]

    def clear(self) -> None:
        """Delete the files that left the log long enough ago, if this driver still runs the graph."""
        now = time.monotonic()
        due = [leaving for leaving in self._leaving if leaving[0] <= now and not leaving[1].is_held(leaving[2])]
        if not due:
            return
        for stage in self.stages:
            stage.ledger.check()
        for leaving in due:
            _, directory, name = leaving
            self.driver.files.delete(f"{directory.folder}/{name}")
            self._leaving.remove(leaving)


def keepers_group(driver: Driver) -> str:
    """Spark's name for the jobs of a driver's keeper."""
    return f"cues keeper {driver.owner}"


def sweep(driver: Driver, stages: Sequence[Stage], others: Sequence[Ledger] = ()) -> int:
    """Delete the files that earlier drivers left. Return the number of deleted files and folders.

    Call it when every processor is claimed and nothing runs. Then a file is used only if a log or a record names it.
    ``others`` are the records of feeders and streams. Raises :class:`Diverged`, before it deletes anything, if a file
    is missing that a log or a record names, or if a log does not name a file of a record.
    """
    files = driver.files
    ledgers = [*(stage.ledger for stage in stages), *others]
    work = driver.work.rpartition("/")[0]
    orphans = [path for name in files.names(work) if (path := f"{work}/{name}") != driver.work]
    for directory in driver.queues.values():
        known = {file.name for file in directory.live}
        stored = set(files.names(directory.folder))
        _require_all(files, directory.folder, known - stored)
        for name in sorted(stored - known):
            if name.endswith(".parquet") and written_by(name, driver.graph) and _is_orphan(directory, name, ledgers):
                orphans.append(f"{directory.folder}/{name}")
    for stage in stages:
        folder = f"_cues/state/{folder_of(stage.node.id)}"
        state = {name.rpartition("/")[2] for name in stage.ledger.now.state}
        stored = set(files.names(folder))
        _require_all(files, folder, state - stored)
        orphans += [f"{folder}/{name}" for name in sorted(stored - state)]
    for orphan in orphans:
        files.delete(orphan)
    return len(orphans)


def _require_all(files: Files, folder: str, missing: set[str]) -> None:
    """Raise :class:`Diverged` if files are missing that a log or a record names."""
    if missing:
        raise Diverged(
            f"Committed files are missing in {files.url}/{folder}: {len(missing)}, the first is {min(missing)}.",
            "restore the directory from a copy.",
        )


def _is_orphan(directory: QueueDirectory, name: str, ledgers: Sequence[Ledger]) -> bool:
    """Return True if a file that the log does not name is not needed.

    Raises :class:`Diverged` if a record names it, and its messages are in no other file.
    """
    file = data_file(name, 0, 0)
    if file.merged or directory.covers(file):
        return True
    for ledger in ledgers:
        number = file.record_of(ledger.processor)
        if number is not None:
            named = ledger.names(number) if number <= ledger.now.number else set()
            if named and name in named:
                raise Diverged(
                    f"Record {number} of {ledger.processor} has committed {name} in {directory.files.url}/"
                    f"{directory.folder}, and the log of the queue does not have its messages.",
                    "restore the directory from a copy.",
                    processor=ledger.processor,
                )
            return named is not None
    return False  # of a processor that the graph no longer has


def _run_of_small(live: Sequence[DataFile], most: int) -> list[DataFile]:
    """The first ``most`` or more small files in a row, without a gap, that fit into one file; else none."""
    run: list[DataFile] = []
    size = 0
    for file in live[:-1]:  # the last file stays, because it has the index of the next message
        fits = file.size <= MERGE_BYTES // 2 and size + file.size <= MERGE_BYTES
        if not fits or (run and run[-1].next != file.first):
            if len(run) >= most:
                return run
            run, size = [], 0
        if file.size <= MERGE_BYTES // 2:
            run.append(file)
            size += file.size
    return run if len(run) >= most else []


def _goal(directory: QueueDirectory, policy: Retention, positions: list[int]) -> int:
    """The index before which the policy keeps nothing; as :func:`cues.queues.retention.wanted` of a store's queue."""
    goal = directory.first
    live: Any = directory.live
    if policy.count is not None:
        goal = max(goal, directory.next - policy.count)
    if policy.age is not None:
        assert isinstance(policy.age, (int, float))
        since_ms = clock.now_ns() // 1_000_000 - policy.age * 1000
        goal = max([goal, *(file.next for file in live if file.modified_ms < since_ms)])
    if policy.bytes is not None:
        excess = sum(file.size for file in live) - int(policy.bytes)
        for file in live:
            if excess < file.size:
                break
            excess -= file.size
            goal = max(goal, file.next)
    if policy.read and positions:
        goal = max(goal, min(positions))
    return goal
