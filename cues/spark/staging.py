"""The results of tasks before the commit: pages in the commit message, or in a file in the store's folder.

    <store>/staged/<boot>-<pid>-<token>/<number of the task>-<random>     msgpack, one page after the other

A task places its messages on partitions and packs them into pages (:func:`cues.records.batch.build`). So all work
except the order of the messages is done in parallel. The commit gives the messages their index and time. Small
results are sent in the commit message. Large ones are written to files, if the task runs on the driver's machine. Then
the driver has only some pages in memory at a time. From other machines all results are sent in messages, up to
``spark.driver.maxResultSize``.

A commit deletes its files. The files of killed tasks are deleted by the next writer of the store that finds
their owner gone: a process of another boot, or a process id that does not exist any more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any, Final

import msgpack
import xxhash
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from cues.base import clock
from cues.base.data import dataclass
from cues.records.batch import Page
from cues.storage import door, locks

FOLDER: Final = "staged"
INLINE_BYTES_MAX: Final = 256 << 10
"""Most bytes of pages in a task's message. A driver can receive the messages of a hundred tasks at once."""
_READ_PAGES: Final = 512
"""Number of pages that are in memory at a time during a commit."""

PlacedPage = tuple[int, Page]
"""The partition of a page, and the page."""


@dataclass
class Staged(WriterCommitMessage):
    """The pages that one task made, in memory or in a file."""

    count: int = 0
    """Number of messages."""
    values: int = 0
    """Number of pages and continuation pieces, for which the disk must have room."""
    inline: list[bytes] = field(default_factory=list)
    path: str | None = None

    @property
    def inline_bytes(self) -> int:
        """The number of bytes in the task's message."""
        return sum(map(len, self.inline))

    def pages(self) -> Iterator[tuple[int, list[Page]]]:
        """The pages, some at a time, with their partition. On each partition they are in order."""
        if self.path is None:
            yield from _some(msgpack.unpackb(raw) for raw in self.inline)
        else:
            with door.reading(Path(self.path)) as file:
                yield from _some(msgpack.Unpacker(file, max_buffer_size=0))

    def drop(self) -> None:
        """Delete the file, and its folder if that is empty then."""
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self.path))


class StagingArea:
    """The folder for the pages of one writer's tasks. The driver makes it."""

    def __init__(self, store: str, owner: int) -> None:
        """``owner`` is the process that will commit the pages. After its end they are worthless."""
        self.folder = _area(store) / f"{this_boot()}-{owner}-{secrets.token_hex(8)}"

    def collect(self, pages: Iterable[PlacedPage], local: bool, inline_bytes: int = INLINE_BYTES_MAX) -> Staged:
        """On the executor: keep ``pages`` until they are committed. ``local``: this is the driver's machine."""
        staged = Staged()
        size = 0
        with contextlib.ExitStack() as opened:
            file: Any = None
            try:
                for partition, page in pages:
                    raw = msgpack.packb([partition, page.flags, page.count, page.tail, list(page.pieces), page.schema])
                    staged.count += page.count
                    staged.values += 1 + len(page.pieces)
                    size += len(raw)
                    if file is None and size > inline_bytes and local:
                        door.folder(self.folder.parent)
                        door.folder(self.folder)
                        context = TaskContext.get()
                        task = context.partitionId() if context is not None else 0
                        staged.path = str(self.folder / f"{task}-{secrets.token_hex(8)}")
                        file = opened.enter_context(open(staged.path, "xb", opener=door.private))
                        file.writelines(staged.inline)
                        staged.inline = []
                    if file is None:
                        staged.inline.append(raw)
                    else:
                        file.write(raw)
            except BaseException:
                staged.drop()
                raise
        return staged

    def clear(self) -> None:
        """On the driver, when no task runs any more: delete the rest of the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def sweep(store: str) -> None:
    """Delete the files of writers that are gone."""
    for folder in _area(store).glob("*-*-*"):
        boot, _, rest = folder.name.partition("-")
        pid = rest.partition("-")[0]
        if boot != this_boot() or not pid.isdigit() or locks.process_state(int(pid)) == "gone":
            shutil.rmtree(folder, ignore_errors=True)


def _area(store: str) -> Path:
    """The folder of a store, which is its own: :func:`sweep` deletes in it."""
    folder = Path(store, FOLDER)
    door.look(folder, stat.S_IFDIR)
    return folder


def this_boot() -> str:
    """This boot of this machine, in the form of file names."""
    return xxhash.xxh3_64_hexdigest(clock.boot_id().encode())


def _some(raws: Iterable[list[Any]]) -> Iterator[tuple[int, list[Page]]]:
    left = iter(raws)
    while some := list(itertools.islice(left, _READ_PAGES)):
        by_partition: dict[int, list[Page]] = {}
        for partition, flags, count, tail, pieces, schema in some:
            by_partition.setdefault(partition, []).append(Page(flags, count, tail, tuple(pieces), schema))
        yield from by_partition.items()
