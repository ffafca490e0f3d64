"""Changes to a shared directory that an operator makes, without Spark and without a driver.

running_none    hold the lease of a graph, so that no driver of it runs
settle, seek    move the positions of a processor, after its queues have all that is committed
growing         a queue to add partitions to
plan_purge      the messages of a queue before an index, and the processors that have not read them; purge: delete them
files_of        the queues and processors of a graph in the directory; remove: delete them

Not guaranteed: that :func:`remove` stops a driver that has slept for longer than its lease, and continues later. Such
a driver may put a record of the deleted graph again. Then the new driver stops or does not start (``Fenced``,
``Diverged``). Stop the old one, and remove the files again.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from cues.base import names
from cues.base.data import dataclass
from cues.base.texts import quoted
from cues.errors import AlreadyRunning, GraphError
from cues.queues.options import QueueOptions
from cues.queues.retention import PlannedPurge, PositionHolder, refuse_unread
from cues.spark.cluster.data import Piece, Writer, read
from cues.spark.cluster.directory import LOG, DataFile, PartitionLog, QueueDirectory
from cues.spark.cluster.driver import Driver, id_of_graph, new_owner
from cues.spark.cluster.files import Files, folder_of, name_of, sealed_json
from cues.spark.cluster.inspection import queues_of, settled_processors_of, writer_of
from cues.spark.cluster.lease import held
from cues.spark.cluster.ledger import Ledger, LedgerRecord


@contextlib.contextmanager
def running_none(files: Files, graph: str) -> Iterator[Driver]:
    """Hold the lease of a graph during the block. Raises :class:`AlreadyRunning` if a driver runs the graph."""
    owner = new_owner()
    with contextlib.ExitStack() as opened:
        try:
            opened.enter_context(held(files, graph, owner, take_over=False))
        except AlreadyRunning as error:
            raise AlreadyRunning(error.message, "stop that driver first; nothing was changed.", pid=error.pid) from None
        yield Driver(None, files, graph, None, lambda event: None, lambda seconds: False, owner)


def settle(driver: Driver) -> None:
    """Put the files of the last commit of each processor into the logs of their queues. Call it before :func:`seek`.

    Else the end of a queue may be before messages that are committed.
    """
    for queue in queues_of(driver.files.place):
        if writer_of(driver.files.place, queue) == driver.graph:
            driver.queues[queue] = QueueDirectory(driver.files, queue, QueueOptions(), make=False)
    driver.forward_others(())


def seek(driver: Driver, processor: str, positions: Mapping[str, int]) -> LedgerRecord:
    """Move positions (indices by tailer id) of a processor, and return the record of it.

    State and outputs stay. A step that was under way is not repeated. First the processor is claimed, as by a driver:
    a driver that still runs is fenced.
    """
    ledger = Ledger(driver.files, processor, driver.owner)
    driver.claim(ledger, lambda last: last.positions if last is not None else {})
    moved = {tailer: (ledger.now.positions[tailer][0], index) for tailer, index in positions.items()}
    ledger.commit("seek", positions=ledger.now.positions | moved)
    return ledger.now


def growing(files: Files, queue: str) -> QueueDirectory:
    """A queue to add partitions to. Raises :class:`GraphError` if it is a copy of a queue in a store."""
    directory = QueueDirectory(files, queue, QueueOptions(), make=False)
    writer = writer_of(files.place, queue)
    if directory.published(f"{writer}.sources.feed") >= 0:
        raise GraphError(
            f"The queue {queue!r} in {files.url} is copied from the store of the graph {writer!r}, and has its"
            " partitions.",
            f"run cues grow GRAPH#{quoted(queue)}, or name that store; the directory follows while the graph runs.",
        )
    return directory


@dataclass(frozen=True)
class DirectoryPurge:
    """A purge of one partition: the messages before an index."""

    log: PartitionLog
    plan: PlannedPurge
    whole: list[DataFile]
    """Files that leave the log."""
    cut: DataFile | None
    """The file with the index inside. A file with the rest of it replaces it."""


def plan_purge(files: Files, id: str, index: int) -> DirectoryPurge:
    """Find the messages of a log before an index, and the processors that have not read them.

    The last message always stays, because the index of the next one is that of its file.
    """
    queue, partition = names.split_log(id)
    log = QueueDirectory(files, queue, QueueOptions(), make=False).log(partition)
    index = max(log.first, min(index, log.next - 1))
    whole = [file for file in log.live if file.next <= index]
    cut = next((file for file in log.live if file.first < index < file.next), None)
    size = sum(file.size for file in whole)
    if cut is not None:
        size += cut.size * (index - cut.first) // cut.count
    readers = []
    for last in settled_processors_of(files.place):
        ranges = last.record.taking.ranges if last.record.taking is not None else {}
        for tailer, (_, next_index) in last.record.positions.items():
            if not last.is_feeder and last.queue_of(tailer) == log.id:
                readers.append(PositionHolder(last.processor, next_index, tailer in ranges))
    behind = [reader for reader in readers if max(reader.next, log.first) < index]
    known = frozenset(reader.name for reader in readers)
    return DirectoryPurge(log, PlannedPurge(log.id, log.first, index, size, behind, known), whole, cut)


def purge(driver: Driver, id: str, index: int, unread: Literal["drop", "refuse"] = "refuse") -> PlannedPurge:
    """Delete the messages of a log before an index, inside :func:`running_none`, and return what was deleted.

    One entry in the log makes them invisible for readers. The files stay on the disk for a day, for readers that have
    begun. Raises :class:`QueueInUse`, and deletes nothing, if a processor has not read them, unless ``unread="drop"``.

    1. Write the rest of the file with the index inside into a new one, which is in no log yet.
    2. Replace the files in the log. A death before it changes nothing; the new file is deleted by a later vacuum.
    """
    while True:
        found = plan_purge(driver.files, id, index)
        if unread == "refuse":
            refuse_unread(found.plan)
        if not found.plan.count:
            return found.plan
        directory, cut, new = found.log.directory, found.cut, []
        if cut is not None:
            # 1. The rest.
            rest = Piece(directory.folder, cut, found.plan.index - cut.first, cut.count)
            where = driver.files, directory.folder, cut.writer, cut.record, 0
            writer = Writer(*where, directory.columns, cut.partition, found.plan.index)
            writer.append(read(driver.files, rest, None))
            file = writer.close()
            assert file is not None
            new = [replace(file, first=found.plan.index, modified_ms=cut.modified_ms)]
        # 2. Replace.
        if directory.exchange([*found.whole, *([cut] if cut else [])], new):
            return found.plan


@dataclass(frozen=True)
class GraphFiles:
    """The queues that a graph writes in a directory, and the folders of its processors."""

    queues: list[str]
    processors: list[str]
    folders: list[str]


def files_of(files: Files, graph: str) -> GraphFiles | None:
    """The files of a graph in a directory; None if there is none."""
    queues = [queue for queue in queues_of(files.place) if writer_of(files.place, queue) == graph]
    folders = [
        f"_cues/{kind}/{folder}"
        for kind in ("steps", "state", "delayed", "checkpoints", "batches")
        for folder in files.names(f"_cues/{kind}")
        if name_of(folder).startswith(f"{graph}.")
    ]
    processors = [name_of(folder.rpartition("/")[2]) for folder in folders if folder.startswith("_cues/steps/")]
    return GraphFiles(queues, processors, folders) if queues or folders else None


def remove(files: Files, graph: str, found: GraphFiles) -> None:
    """Delete the files of a graph, and give the graph a new id, so that targets of sinks tell it from the old one.

    Call it again if it was interrupted. The new id is durable before anything is deleted: a graph that begins anew with
    the old id would be taken for the old one. The files are durably gone at the end, when their store may be deleted.
    """
    files.replace(id_of_graph(graph), sealed_json({"id": secrets.token_hex(8)}))
    for queue in found.queues:
        # Without these two no file of the folder counts, so an interruption after them leaves nothing that matters.
        files.delete(f"{folder_of(queue)}/{LOG}")
        files.delete(f"{folder_of(queue)}/_cues/queue.json")
        files.delete(folder_of(queue))
    for folder in found.folders:
        files.delete(folder)
    for name in files.names("_cues"):  # the notes of its drivers
        if name.partition(".")[0] == folder_of(graph) and name.partition(".")[2] not in ("id.json", "driver.json"):
            files.delete(f"_cues/{name}")
    for above in ["", "_cues", *sorted({folder.rpartition("/")[0] for folder in found.folders})]:
        files.settle(above)
