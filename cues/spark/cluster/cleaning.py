"""Vacuum and merge of queues in a shared directory by an operator, without Spark, also while a driver runs.

    plan_vacuum   the files that no log needs any more; vacuum: delete them
    plan_merge    small files that follow one another; merge: write them as large files

Why a driver may run meanwhile:

1. A file that may be deleted left the log a day ago, or is of a step whose record counts without it. A file of a later
   record belongs to a step under way. A file that a record names and the log lacks belongs to a step that died before
   it was published: the next start publishes it.
2. A merge is one entry in the log, put if absent, as a step's is. If a driver has replaced some of the files
   meanwhile, the merge counts for nothing. A step that reads the old files finds them on the disk for a day.
3. No message changes, so positions do not either. The last file of a partition always stays, or is replaced by one with
   the same indices.

Not guaranteed: that a merged file is as small as the retention of the graph wants. The directory does not have this
option. So a merged file has at most an eighth of what is on the queue now: of its messages, of its bytes and of its
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from cues import faults
from cues.base import clock
from cues.base.data import dataclass
from cues.queues.options import QueueOptions, Retention
from cues.spark.cluster import directory as directories
from cues.spark.cluster.directory import DataFile, PartitionLog, QueueDirectory
from cues.spark.cluster.files import Files, folder_of
from cues.spark.cluster.inspection import ProcessorRecord, settled_processors_of, writer_of
from cues.spark.cluster.lease import holders
from cues.spark.cluster.ledger import Ledger
from cues.spark.cluster.maintenance import bounds, merged, small_runs, worthwhile

Tell = Callable[[int, int], object]
"""Is told, at each progress, the number of files done and of all."""


@dataclass(frozen=True)
class PlannedVacuum:
    """The files of one queue that no log needs any more."""

    queue: str
    files: dict[str, int]
    """By name, the bytes of each."""
    oldest: datetime | None
    """When the oldest of them was written."""
    later: dict[str, int]
    """Files that are not in the log either, and may be deleted later: a reader or a step may need them."""
    reader: str | None = None
    """The processor whose step has read the queue for more than a day. Then no file of it is deleted."""

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def plan_vacuum(files: Files, queue: str) -> PlannedVacuum:
    """Find the files of a queue that no log needs any more. Nothing is changed."""
    # The records are read before the log. A step that ends between the two is then seen as under way.
    records = settled_processors_of(files.place)
    directory = QueueDirectory(files, queue, QueueOptions(), make=False)
    running = {holder.graph for holder in holders(files) if holder.state != "has ended"}
    reader = next((last.processor for last in records if _reads_long(last, directory, running)), None)
    last = {record.processor: record.record.number for record in records}
    stored = files.listed(directory.folder)
    gone = [file.name for file in directory.left() if file.name in stored and _may_go(directory, file, last)]
    live = {file.name for file in QueueDirectory(files, queue, QueueOptions(), make=False).live}
    out = {name: size for name, (size, _) in stored.items() if name not in live and name.endswith(".parquet")}
    chosen = {name: out[name] for name in gone if name in out and reader is None}
    oldest = min((stored[name][1] for name in chosen), default=None)
    return PlannedVacuum(
        queue,
        chosen,
        None if oldest is None else clock.to_datetime(int(oldest * 1e9)),
        {name: size for name, size in out.items() if name not in chosen},
        reader,
    )


def _reads_long(last: ProcessorRecord, directory: QueueDirectory, running: set[str]) -> bool:
    """Return True if a step that has lasted for longer than files are kept may read files of the queue."""
    graph = last.processor.partition(".")[0]
    age_s = (clock.to_datetime(clock.now_ns()) - last.committed).total_seconds()
    if last.is_feeder or graph not in running or age_s < directories.KEEP_FILES_H * 3600:
        return False
    ends = {log.id: log.next for log in directory.logs}
    return any(position < ends.get(log, 0) for log, position in last.positions.items())


def _may_go(directory: QueueDirectory, file: DataFile, last: dict[str, int]) -> bool:
    """Return True if no step is under way that wrote a file which left the log, and no record that counts names it."""
    writer, number = file.writer, file.record
    if writer not in last or number <= directory.published(writer):
        return True  # a merged file; or the log has had what the record names
    if number > last[writer]:
        return False
    ledger = Ledger(directory.files, writer, "")
    if directory.files.size(ledger.name_of(number)) is None:
        return True
    return file.name not in {named.name for named in ledger.record_at(number).files.get(directory.queue, ())}


def vacuum(files: Files, plan: PlannedVacuum, tell: Tell = lambda done, all: None) -> PlannedVacuum:
    """Delete the files of a plan that no reader needs by now. Return those that were deleted."""
    again = plan_vacuum(files, plan.queue)
    chosen = {name: size for name, size in plan.files.items() if name in again.files}
    for done, name in enumerate(chosen):
        tell(done, len(chosen))
        files.delete(f"{folder_of(plan.queue)}/{name}")
        faults.point("spark.vacuumed")
    return PlannedVacuum(plan.queue, chosen, plan.oldest, again.later, again.reader)


@dataclass(frozen=True)
class PlannedMerge:
    """The small files of one queue that can become large ones."""

    queue: str
    runs: list[list[DataFile]]
    """Each becomes one file."""
    before: int
    """The number of files of the queue."""

    @property
    def files(self) -> int:
        """The number of small files."""
        return sum(map(len, self.runs))

    @property
    def bytes(self) -> int:
        return sum(file.size for run in self.runs for file in run)

    @property
    def after(self) -> int:
        """The number of files of the queue after the merge."""
        return self.before - self.files + len(self.runs)


def plan_merge(files: Files, queue: str) -> PlannedMerge:
    """Find the small files of a queue that can become large ones. Nothing is changed."""
    directory = QueueDirectory(files, queue, QueueOptions(), make=False)
    runs = [run for log in directory.logs for run in _runs(log)]
    return PlannedMerge(queue, runs, len(directory.live))


def _runs(log: PartitionLog) -> Iterator[list[DataFile]]:
    """Files that can become one, and single files that an earlier version did not put into folders of partitions."""
    runs = list(_small_runs(log.live)) if len(log.live) > 2 else []  # the last file stays
    taken = {file.name for run in runs for file in run}
    yield from sorted([*runs, *([f] for f in log.live if f.name not in taken and not f.is_placed)], key=_first)


def _first(run: Sequence[DataFile]) -> int:
    return run[0].first


def _small_runs(live: Sequence[DataFile]) -> Iterator[list[DataFile]]:
    times = [file.modified_ms for file in live]
    span_s = max(1.0, (max(times) - min(times)) / 1000)
    now = Retention(count=live[-1].next - live[0].first, bytes=max(1, sum(file.size for file in live)), age=span_s)
    for run in map(worthwhile, small_runs(live, *bounds(now))):
        if len(run) > 1:
            yield run


def merge(files: Files, plan: PlannedMerge, tell: Tell = lambda done, all: None) -> PlannedMerge:
    """Write each run of a plan as one file, which replaces the run in the log. Return the runs that were replaced.

    A run of which another process has replaced files is left out. Then a checkpoint of the log is written, so that
    readers need not read the old entries.
    """
    directory = QueueDirectory(files, plan.queue, QueueOptions(), make=False)
    graph, done, made = writer_of(files.place, plan.queue) or "", 0, []
    for run in plan.runs:
        tell(done, plan.files)
        done += len(run)
        directory.read_on()
        if not {file.name for file in run} <= {file.name for file in directory.live}:
            continue
        one = merged(files, directory.folder, graph, run, directory.columns)
        faults.point("spark.merged")
        if directory.exchange(run, [one]):
            made.append(run)
        else:
            files.delete(f"{directory.folder}/{one.name}")
    if made:
        directory.checkpoint()
    return PlannedMerge(plan.queue, made, plan.before)
