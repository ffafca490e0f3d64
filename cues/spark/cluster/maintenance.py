"""Keeping queues in shape: small files become large ones, what retention lets go goes, orphans are swept.

    merge      a run of small files is written once more as one file, which takes their place in the log
    retain     files wholly below what a queue keeps leave the log; the last one always stays
    sweep      at the start: whatever no log and no record names

A file leaves the log in one entry and the disk later: :data:`GRACE_S` after it, and when no step of this driver
reads it, so that who has listed the queue can still read it. Died in between: the next start sweeps.

Not guaranteed: that a Spark stream over a queue sees nothing twice when files are merged; it knows files, not
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
from cues.spark.cluster.directory import SCHEMA, DataFile, QueueDirectory, merged_name, written_by
from cues.spark.cluster.files import folder_of

if TYPE_CHECKING:
    from cues.queues.options import Retention
    from cues.spark.cluster.driver import Driver
    from cues.spark.cluster.step import Stage

MERGE_FILES: Final = 64
"""So many small files in a row become one; a step writes one a queue."""
MERGE_BYTES: Final = 128 << 20
"""The largest file that is made of small ones, about; larger than half of that is not small."""
GRACE_S: Final = 600.0
"""The time that a file stays on the disk after it left the log, as with Spark's own sink."""


class Maintenance:
    """Keeps the queues of one driver. Used by one thread."""

    def __init__(self, driver: Driver, stages: Sequence[Stage]) -> None:
        self.driver = driver
        self.stages = stages
        found = driver.session.conf.get("spark.cues.mergeFiles", str(MERGE_FILES))
        self.merge_files = int(found or 0)
        self._leaving: list[tuple[float, QueueDirectory, str]] = []
        self._said: set[tuple[str, str]] = set()

    def step(self) -> None:
        """One look at every queue."""
        for directory in self.driver.queues.values():
            self.merge(directory)
            if directory.options.retention is not None:
                self.retain(directory, directory.options.retention)
        self.clear()

    # --- merge ---

    def merge(self, directory: QueueDirectory) -> bool:
        """Put one large file in the place of many small ones, if there are so many."""
        files = _run_of_small(directory.live, self.merge_files) if self.merge_files else []
        if not files:
            return False
        first, count = files[0].first, files[-1].next - files[0].first
        driver = self.driver
        directory.hold(files)
        try:
            folder = driver.scratch()
            driver.context.setJobGroup(keepers_group(driver), f"merging files of {directory.queue}", True)
            rows = driver.session.read.schema(SCHEMA).parquet(*directory.urls(files))
            one = rows.coalesce(1).sortWithinPartitions("index")
            one.write.option("maxRecordsPerFile", 0).parquet(driver.files.url_of(folder))
            (part,) = driver.files.parts(folder)
            made = directory.adopt(f"{folder}/{part}", merged_name(first, count, driver.graph))
            driver.files.delete(folder)
            made = replace(made, modified_ms=max(file.modified_ms for file in files))
            self._exchange(directory, files, [made])
        finally:
            directory.release(files)
        return True

    # --- retain ---

    def retain(self, directory: QueueDirectory, policy: Retention) -> None:
        """Let go of the files that the policy keeps no message of."""
        goal = _goal(directory, policy, [s.positions[directory.queue] for s in self._readers(directory)])
        for stage in self._readers(directory):
            low = stage.holds(directory.queue)
            if low is not None:
                goal = min(goal, low)
            elif stage.positions[directory.queue] < goal:
                self._say(directory, stage)
        gone = [file for file in directory.live[:-1] if file.next <= goal]
        if gone:
            self._exchange(directory, gone, [])

    def _readers(self, directory: QueueDirectory) -> list[Stage]:
        return [stage for stage in self.stages if directory in stage.inputs.values()]

    def _say(self, directory: QueueDirectory, stage: Stage) -> None:
        said = (directory.queue, stage.node.id)
        if said not in self._said:
            self._said.add(said)
            text = f"retention of {directory.queue} lets go of messages that {stage.node.id} has not read"
            self.driver.emit(events.Event(stage.node.id, text, logging.WARNING))

    # --- files that leave ---

    def _exchange(self, directory: QueueDirectory, gone: list[DataFile], came: list[DataFile]) -> None:
        """In the log, until it is there, unless another driver has taken some of the files out meanwhile."""
        names = {file.name for file in gone}
        with directory.lock:
            while names <= {file.name for file in directory.live}:
                if directory.replace(names, came):
                    break
            else:
                return
        faults.point("spark.replaced")
        leaves_at = time.monotonic() + GRACE_S
        self._leaving += [(leaves_at, directory, file.name) for file in gone]

    def clear(self) -> None:
        """Delete what left long enough ago, if this driver is still the one that runs the graph."""
        now = time.monotonic()
        due = [one for one in self._leaving if one[0] <= now and not one[1].is_held(one[2])]
        if not due:
            return
        for stage in self.stages:
            stage.ledger.check()
        for one in due:
            self.driver.files.delete(f"{one[1].folder}/{one[2]}")
            self._leaving.remove(one)


def keepers_group(driver: Driver) -> str:
    """Spark's name for the jobs of a driver's keeper."""
    return f"cues keeper {driver.owner}"


def sweep(driver: Driver, stages: Sequence[Stage]) -> int:
    """Delete what drivers before this one left behind; returns how many files and folders went.

    Called when every processor is claimed and nothing runs: what no log and no record names then is nobody's.
    """
    files, swept = driver.files, 0
    work = driver.work.rpartition("/")[0]
    for name in files.names(work):
        if f"{work}/{name}" != driver.work:
            files.delete(f"{work}/{name}")
            swept += 1
    for directory in driver.queues.values():
        known = {file.name for file in directory.live}
        for name in files.names(directory.folder):
            if name.endswith(".parquet") and name not in known and written_by(name, driver.graph):
                files.delete(f"{directory.folder}/{name}")
                swept += 1
    for stage in stages:
        last = stage.ledger.last
        folder = f"_cues/state/{folder_of(stage.node.id)}"
        for name in files.names(folder):
            if last is None or f"{folder}/{name}" not in last.state:
                files.delete(f"{folder}/{name}")
                swept += 1
    return swept


def _run_of_small(live: Sequence[DataFile], most: int) -> list[DataFile]:
    """The first so many small files in a row without a gap that fit into one; else none."""
    run: list[DataFile] = []
    size = 0
    for file in live[:-1]:  # the last one is the end of the queue, and what is appended next follows it
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
