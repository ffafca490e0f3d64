"""Changes to a shared directory that an operator makes, without Spark and without a driver.

running_none    hold the lease of a graph, so that no driver of it runs
seek            move the positions of a processor
plan_purge      the messages of a queue before an index, and the processors that have not read them; purge: delete them
part_of         the queues and processors of a graph in the directory; remove: delete them

Not guaranteed: that :func:`remove` stops a driver that has slept for longer than its lease, and continues later. Such
a driver may put a record of the deleted part again. Then the new driver stops or does not start (``Fenced``,
``Diverged``). Stop the old one, and remove the part again.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cues.errors import AlreadyRunning
from cues.queues.options import QueueOptions
from cues.queues.retention import PlannedPurge, PositionHolder, refuse_unread
from cues.spark.cluster.data import COLUMNS, Piece, Writer, numbered, read
from cues.spark.cluster.directory import LOG, DataFile, QueueDirectory
from cues.spark.cluster.driver import Driver, id_of_graph
from cues.spark.cluster.files import Files, folder_of, name_of
from cues.spark.cluster.inspection import processors_of, queues_of, writer_of
from cues.spark.cluster.lease import DriverLease
from cues.spark.cluster.ledger import Ledger, LedgerRecord
from cues.steps.ownership import LEASE_BEAT_S


@contextlib.contextmanager
def running_none(files: Files, graph: str) -> Iterator[Driver]:
    """Hold the lease of a graph during the block. Raises :class:`AlreadyRunning` if a driver runs the graph."""
    driver = Driver(None, files, graph, None, lambda event: None, lambda seconds: False)
    lease = DriverLease(files, graph, driver.owner)
    try:
        lease.acquire(take_over=False)
    except AlreadyRunning as error:
        raise AlreadyRunning(error.message, "stop that driver first; nothing was changed.", pid=error.pid) from None
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(LEASE_BEAT_S):
            with contextlib.suppress(Exception):  # safety does not depend on the lease
                lease.beat()

    beating = threading.Thread(target=beat, name="cues lease on the directory", daemon=True)
    beating.start()
    try:
        yield driver
    finally:
        ended.set()
        beating.join()
        lease.release()


def seek(driver: Driver, processor: str, positions: Mapping[str, int]) -> LedgerRecord:
    """Move positions (indices by tailer id) of a processor, and return the record of it.

    State and outputs stay. A step that was under way is not repeated. First the processor is claimed, as by a driver:
    the files of its last step get into the logs of their queues, and a driver that still runs is fenced.
    """
    ledger = Ledger(driver.files, processor, driver.owner)
    last = ledger.read()
    assert last is not None
    for queue in {*last.ends, *last.files} & set(queues_of(driver.files.place)):
        driver.queues[queue] = QueueDirectory(driver.files, queue, QueueOptions())
    driver.claim(ledger, lambda last: last.positions if last is not None else {})
    moved = {tailer: (ledger.now.positions[tailer][0], index) for tailer, index in positions.items()}
    ledger.commit("seek", positions=ledger.now.positions | moved)
    return ledger.now


@dataclass(frozen=True)
class DirectoryPurge:
    """A purge of a queue: the messages before an index."""

    directory: QueueDirectory
    plan: PlannedPurge
    whole: list[DataFile]
    """Files that leave the log."""
    cut: DataFile | None
    """The file with the index inside. A file with the rest of it replaces it."""


def plan_purge(files: Files, queue: str, index: int) -> DirectoryPurge:
    """Find the messages of a queue before an index, and the processors that have not read them.

    The last message always stays, because the index of the next one is that of its file.
    """
    directory = QueueDirectory(files, queue, QueueOptions())
    index = max(directory.first, min(index, directory.next - 1))
    whole = [file for file in directory.live if file.next <= index]
    cut = next((file for file in directory.live if file.first < index < file.next), None)
    size = sum(file.size for file in whole)
    if cut is not None:
        size += cut.size * (index - cut.first) // cut.count
    readers = []
    for last in processors_of(files.place):
        ranges = last.record.taking.ranges if last.record.taking is not None else {}
        for tailer, (_, next_index) in last.record.positions.items():
            if not last.is_feeder and last.queue_of(tailer) == queue:
                readers.append(PositionHolder(last.processor, next_index, tailer in ranges))
    behind = [reader for reader in readers if max(reader.next, directory.first) < index]
    known = frozenset(reader.name for reader in readers)
    return DirectoryPurge(directory, PlannedPurge(queue, directory.first, index, size, behind, known), whole, cut)


def purge(driver: Driver, queue: str, index: int, unread: Literal["drop", "refuse"] = "refuse") -> PlannedPurge:
    """Delete the messages of a queue before an index, inside :func:`running_none`, and return what was deleted.

    One entry in the log makes them invisible for readers. The files stay on the disk for a day, for readers that have
    begun. Raises :class:`QueueInUse`, and deletes nothing, if a processor has not read them, unless ``unread="drop"``.

    1. Write the rest of the file with the index inside into a new one, which is in no log yet.
    2. Replace the files in the log. A death before it changes nothing; the new file is deleted by a later vacuum.
    """
    while True:
        found = plan_purge(driver.files, queue, index)
        if unread == "refuse":
            refuse_unread(found.plan)
        if not found.plan.count:
            return found.plan
        directory, cut, new = found.directory, found.cut, []
        if cut is not None:
            # 1. The rest.
            rest = Piece(directory.folder, cut, found.plan.index - cut.first, cut.count)
            writer = Writer(driver.files, directory.folder, cut.writer, cut.record, 0, directory.columns)
            writer.append(read(driver.files, rest, [*COLUMNS.names, *directory.columns.schema.names]))
            file = writer.close()
            assert file is not None
            new = numbered([replace(file, modified_ms=cut.modified_ms)], found.plan.index)
        # 2. Replace.
        if directory.exchange([*found.whole, *([cut] if cut else [])], new):
            return found.plan


@dataclass(frozen=True)
class GraphPart:
    """The queues that a graph writes in a directory, and the folders of its processors."""

    queues: list[str]
    processors: list[str]
    folders: list[str]


def part_of(files: Files, graph: str) -> GraphPart | None:
    """The part of a directory that belongs to a graph; None if there is none."""
    queues = [queue for queue in queues_of(files.place) if writer_of(files.place, queue) == graph]
    folders = [
        f"_cues/{kind}/{folder}"
        for kind in ("steps", "state", "checkpoints")
        for folder in files.names(f"_cues/{kind}")
        if name_of(folder).startswith(f"{graph}.")
    ]
    processors = [name_of(folder.rpartition("/")[2]) for folder in folders if folder.startswith("_cues/steps/")]
    return GraphPart(queues, processors, folders) if queues or folders else None


def remove(files: Files, graph: str, part: GraphPart) -> None:
    """Delete the part of a graph, and give the graph a new id, so that targets of sinks do not take it for the old one.

    Call it again if it was interrupted.
    """
    files.write(id_of_graph(graph), json.dumps({"id": secrets.token_hex(8)}).encode())
    for queue in part.queues:
        # Without these two no file of the folder counts, so an interruption after them leaves nothing that matters.
        files.delete(f"{folder_of(queue)}/{LOG}")
        files.delete(f"{folder_of(queue)}/_cues/queue.json")
        files.delete(folder_of(queue))
    for folder in part.folders:
        files.delete(folder)
    files.delete(f"_cues/{folder_of(graph)}.store.json")
