"""Maintenance of queues: small files are merged, retention removes old files, orphans are swept.

    infer        a table whose queue has schema="infer" gets typed columns, from the first messages
    merge        a run of small files is written again as one file, which replaces them in the log
    retain       files whose messages retention removes leave the log; the last file always stays
    checkpoint   the library writes a checkpoint of the log, and deletes old entries
    vacuum       the library finds the files that left the log, or never were in it, a day ago. The time of the last
                 vacuum is noted in the directory.
    sweep        at the start: delete the files of the state that no record names

A merge changes no message, and a stream of a Delta reader does not see it.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from cues import codec
from cues.base import clock, events
from cues.errors import Diverged, InvalidArgument
from cues.records.schema import infer
from cues.spark.cluster.data import Piece, Writer, pieces_of, read
from cues.spark.cluster.directory import CHECKPOINT_EVERY, DataFile, PartitionLog, QueueDirectory
from cues.spark.cluster.files import folder_of
from cues.spark.cluster.state_files import record_of
from cues.spark.cluster.typed import NONE, TypedColumns
from cues.spark.conf import MERGE_FILES as MERGE_SETTING

if TYPE_CHECKING:
    from cues.queues.options import Retention
    from cues.spark.cluster.driver import Driver
    from cues.spark.cluster.files import Files
    from cues.spark.cluster.step import Stage

MERGE_FILES: Final = 64
"""This number of small files in a row becomes one file. A step writes one file for each task and queue."""
MERGE_BYTES: Final = 128 << 20
"""The largest merged file, approximately. A file larger than half of it is not small."""
INFER_MESSAGES: Final = 1000
"""Most messages from which columns are inferred."""
_RETENTION_PARTS: Final = 8
"""A merged file has at most this part of the messages that retention keeps, because it removes whole files."""
_VACUUM_S: Final = 3600.0
"""Time between two vacuums of a graph's queues, by this driver or by another one: a run may take only minutes."""


class Maintenance:
    """Maintains the queues of one driver. Used by one thread."""

    def __init__(self, driver: Driver, stages: Sequence[Stage]) -> None:
        self.driver = driver
        self.stages = stages
        self.merge_files = int(driver.session.conf.get(MERGE_SETTING, str(MERGE_FILES)) or 0)
        self._note = f"_cues/{folder_of(driver.graph)}.vacuum.json"
        self._vacuumed_ns = self._noted()
        self._checkpoints: dict[str, int] = {}
        self._merged: dict[str, int] = {}
        """By log id: the index before which there is nothing to merge."""
        self._warned: set[tuple[str, str]] = set()
        self._inferred: set[str] = set()

    def step(self) -> None:
        """Look once at every queue."""
        for directory in self.driver.queues.values():
            if directory.infers and directory.live:
                self.infer(directory)
            for log in directory.logs:
                self.merge(log)
                if directory.options.retention is not None:
                    self.retain(log, directory.options.retention)
            self.checkpoint(directory)
        self.vacuum_if_due()

    def checkpoint(self, directory: QueueDirectory) -> None:
        """Write a checkpoint of the log, if it has got enough entries since the last one."""
        done = self._checkpoints.setdefault(directory.queue, directory.version // CHECKPOINT_EVERY * CHECKPOINT_EVERY)
        if directory.version - done >= CHECKPOINT_EVERY:
            self._checkpoints[directory.queue] = directory.version
            directory.checkpoint()

    def vacuum_if_due(self) -> None:
        """Vacuum, unless this driver or an earlier one has done so shortly ago."""
        if not 0 <= clock.now_ns() - self._vacuumed_ns <= _VACUUM_S * 1e9:  # also if the clock was ahead
            self.vacuum()

    def _noted(self) -> int:
        """The time of the last vacuum, from its note. Without a note, that of this start, which is noted."""
        try:
            return clock.to_ns(datetime.fromisoformat(json.loads(self.driver.files.read(self._note) or b"")["time"]))
        except (ValueError, LookupError, TypeError, InvalidArgument):  # there is none, or it was being written
            return self._write_note()

    def _write_note(self) -> int:
        now = clock.now_ns()
        self.driver.files.write(self._note, json.dumps({"time": clock.to_datetime(now).isoformat()}).encode())
        return now

    def vacuum(self) -> None:
        """Delete the files that left the logs long enough ago, if this driver still runs the graph."""
        self._vacuumed_ns = clock.now_ns()  # also if it fails, because the next look would fail too
        for stage in self.stages:
            stage.ledger.check()
        done = {stage.ledger.processor: stage.ledger.now.number for stage in self.stages}
        for directory in self.driver.queues.values():
            directory.vacuum(lambda writer, record: record > done.get(writer, record))
        self._vacuumed_ns = self._write_note()

    # --- infer ---

    def infer(self, directory: QueueDirectory) -> None:
        """Add the typed columns of the first messages to the table, once in the life of this driver."""
        if directory.queue in self._inferred:
            return
        self._inferred.add(directory.queue)
        logs = directory.logs
        most = -(-INFER_MESSAGES // len(logs))
        pieces = [piece for log in logs for piece in pieces_of(directory.folder, log.live, log.first, log.first + most)]
        values = [read(self.driver.files, piece, ["value"]).column("value").to_pylist() for piece in pieces]
        columns = infer([codec.unpack_known(value) for some in values for value in some])
        directory.add_columns(columns)
        names = ", ".join(f"{name} {kind}" for name, kind in columns) or "none"
        self.driver.emit(events.Event("", f"columns of the queue {directory.queue} by schema='infer': {names}"))

    # --- merge ---

    def merge(self, log: PartitionLog) -> None:
        """Replace many small files by one large file, if there are enough."""
        directory = log.directory
        live = log.live[bisect_left(log.live, self._merged.get(log.id, 0), key=lambda file: file.first) :]
        if not self.merge_files:
            return
        files, self._merged[log.id] = run_of_small(live, self.merge_files, *bounds(directory.options.retention))
        if not files:
            return
        driver = self.driver
        directory.hold(files)
        try:
            driver.context.setJobGroup(keepers_group(driver), f"merging files of {log.id}", True)
            work = functools.partial(merged, driver.files, directory.folder, driver.graph, columns=directory.columns)
            (file,) = driver.context.parallelize([files], 1).map(work).collect()
            directory.exchange(files, [file])
        finally:
            directory.release(files)

    # --- retain ---

    def retain(self, log: PartitionLog, policy: Retention) -> None:
        """Remove the files of which the policy keeps no message."""
        readers = [(stage, tailer) for stage in self.stages if (tailer := stage.tailer_of(log)) is not None]
        goal = _goal(log, policy, [stage.positions[tailer] for stage, tailer in readers])
        for stage, tailer in readers:
            low = stage.holds(tailer)
            if low is not None:
                goal = min(goal, low)
            elif stage.positions[tailer] < goal:
                self._warn(log, stage)
        gone = [file for file in log.live[:-1] if file.next <= goal]
        if gone:
            log.directory.exchange(gone, [])

    def _warn(self, log: PartitionLog, stage: Stage) -> None:
        pair = (log.id, stage.node.id)
        if pair not in self._warned:
            self._warned.add(pair)
            text = f"retention of {log.id} lets go of messages that {stage.node.id} has not read"
            self.driver.emit(events.Event(stage.node.id, text, logging.WARNING))


def merged(files: Files, folder: str, graph: str, small: Sequence[DataFile], columns: TypedColumns = NONE) -> DataFile:
    """Write the messages of several files into one, which may replace them in the log of the queue.

    Its writer is that of the files, or the keeper of the graph; its record and its time are those of the last messages.
    """
    writers = {file.writer for file in small}
    writer = writers.pop() if len(writers) == 1 else f"{graph}.keeper"
    first = small[0].first
    target = Writer(files, folder, writer, small[-1].record, 0, columns, small[0].partition, first)
    for file in small:
        target.append(read(files, Piece(folder, file, 0, file.count), None))
    one = target.close()
    assert one is not None
    return replace(one, first=first, modified_ms=max(file.modified_ms for file in small))


def keepers_group(driver: Driver) -> str:
    """Spark's name for the jobs of a driver's keeper."""
    return f"cues keeper {driver.owner}"


def sweep(driver: Driver, stages: Sequence[Stage]) -> int:
    """Delete the files of the state that earlier drivers left. Return their number.

    Call it when every processor is claimed and nothing runs. Then a file of an earlier driver is used only if a log or
    a record names it. A later driver may have claimed the processors meanwhile; its files have the numbers of later
    records. Raises :class:`Diverged`, before it deletes anything, if a file is missing that a log or a record names.
    """
    files = driver.files
    for directory in driver.queues.values():
        stored = set(files.listed(directory.folder))
        _require_all(files, directory.folder, {file.name for file in directory.live}, stored)
    orphans = []
    for stage in stages:
        for folder, needed in stage.ledger.now.needs(stage.node.id).items():
            stored = _require_all(files, folder, needed, set(files.names(folder)))
            last = stage.ledger.now.number
            orphans += [f"{folder}/{name}" for name in sorted(stored - needed) if record_of(name) <= last]
    for orphan in orphans:
        files.delete(orphan)
    return len(orphans)


def _require_all(files: Files, folder: str, needed: set[str], stored: set[str]) -> set[str]:
    """Return the files of a folder. Raises :class:`Diverged` if some are missing that a log or a record names."""
    missing = needed - stored
    if missing:
        raise Diverged(
            f"Committed files are missing in {files.url}/{folder}: {len(missing)}, the first is {min(missing)}.",
            "restore the directory from a copy.",
        )
    return stored


def bounds(policy: Retention | None) -> tuple[Callable[[DataFile], Any], int]:
    """The window and the most bytes of a merged file, so that retention, which removes whole files, keeps little more.

    Of what the policy keeps, a merged file has at most an eighth.
    """
    if policy is None or policy.bytes is None:
        return _windows(policy), MERGE_BYTES
    return _windows(policy), min(MERGE_BYTES, int(policy.bytes) // _RETENTION_PARTS)


def _windows(policy: Retention | None) -> Callable[[DataFile], Any]:
    """A function of a file. Only files with the same result are merged.

    Without it, each merge would give a file new messages, before all of its messages are old.
    """
    count = math.inf if policy is None or policy.count is None else max(1, policy.count // _RETENTION_PARTS)
    age_ms = math.inf
    if policy is not None and policy.age is not None:
        assert isinstance(policy.age, (int, float))
        age_ms = policy.age * 1000 / _RETENTION_PARTS
    return lambda file: (file.first // count, file.modified_ms // age_ms)


def run_of_small(
    live: Sequence[DataFile],
    most: int,
    window: Callable[[DataFile], Any] = lambda file: None,
    limit: int = MERGE_BYTES,
) -> tuple[list[DataFile], int]:
    """The first ``most`` or more small files of one window, without a gap, that fit into one of ``limit`` bytes.

    No file, if there are none. Also the index of the file from which on files may be merged later.
    """
    run: list[DataFile] = []
    for run in small_runs(live, window, limit):
        if len(run) >= most:
            break
    after = run[0].first if run else live[-1].first if live else 0
    run = worthwhile(run)
    return run if len(run) >= most else [], after


def small_runs(
    live: Sequence[DataFile], window: Callable[[DataFile], Any], limit: int = MERGE_BYTES
) -> Iterator[list[DataFile]]:
    """Small files of one window that follow one another and fit into one of ``limit`` bytes; the last run may grow."""
    run: list[DataFile] = []
    size = 0
    for file in live[:-1]:  # the last file stays, because it has the index of the next message
        fits = file.size <= limit // 2 and size + file.size <= limit
        if not fits or (run and (run[-1].next != file.first or window(run[0]) != window(file))):
            yield run
            run, size = [], 0
        if file.size <= limit // 2:
            run.append(file)
            size += file.size
    yield run


def worthwhile(run: Sequence[DataFile]) -> list[DataFile]:
    """A run without the large files at its start, which would be written again with each few small ones."""
    left = list(run)
    while left and left[0].size > 2 * sum(file.size for file in left[1:]):
        left.pop(0)
    return left


def _goal(log: PartitionLog, policy: Retention, positions: list[int]) -> int:
    """The index before which the policy keeps nothing; as :func:`cues.queues.retention.wanted` of a store's queue."""
    goal = log.first
    live: Any = log.live
    if policy.count is not None:
        goal = max(goal, log.next - policy.count)
    if policy.age is not None:
        assert isinstance(policy.age, (int, float))
        now_ms = clock.now_ns() // 1_000_000
        since_ms = now_ms - policy.age * 1000
        for file in live:
            if since_ms <= file.modified_ms <= now_ms:
                break  # those after it are younger, although the clock may have been late when they were written
            if file.modified_ms < since_ms:  # a time of the future says nothing: the clock was ahead
                goal = max(goal, file.next)
    if policy.bytes is not None:
        excess = sum(file.size for file in live) - int(policy.bytes)
        for file in live:
            if excess < file.size:
                break
            excess -= file.size
            goal = max(goal, file.next)
    if policy.read and positions:
        goal = max(goal, min(positions))
    if policy.unread and positions:
        goal = min(goal, min(positions))
    return goal
