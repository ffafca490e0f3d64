"""What tasks made, on its way to the one commit: pages in the commit message, or in a file beside the store.

    <store>/staged/<boot>-<pid>-<token>/<number of the task>-<random>     msgpack, one page after the other

A task places its messages on partitions and packs them into pages (:func:`cues.records.batch.build`), so that all
the work but the order of messages is done in parallel; the commit gives them index and time. Small
results travel in the message. Large ones are files where the task runs on the driver's machine, so that the
driver's memory is bounded by some pages at a time, not by the batch; from other machines everything travels
in messages, and
``spark.driver.maxResultSize`` is the limit.

A commit deletes its files. What killed tasks leave is deleted by the next writer of the store that finds
their owner gone (a process of another boot, or none of that id any more).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgpack
import xxhash
from pyspark.sql.datasource import WriterCommitMessage

from cues.base import clock
from cues.records.batch import Page
from cues.storage import locks

FOLDER: Final = "staged"
INLINE_BYTES_MAX: Final = 256 << 10
"""A task's pages travel in its message up to here: as much as a hundred tasks can send a driver at once."""
_READ_PAGES: Final = 512
"""Pages that are in memory at a time while they are committed."""

PlacedPage = tuple[int, Page]
"""The partition that a page goes to, and the page."""


@dataclass
class Staged(WriterCommitMessage):
    """The pages that one task made, in memory or in a file."""

    count: int = 0
    """Messages."""
    values: int = 0
    """Pages and continuation pieces, which is what the disk must have room for."""
    inline: list[bytes] = field(default_factory=list)
    path: str | None = None

    @property
    def inline_bytes(self) -> int:
        """The bytes of it that are in the task's message."""
        return sum(map(len, self.inline))

    def pages(self) -> Iterator[tuple[int, list[Page]]]:
        """The pages, some at a time, with the partition that they go to; in order on each partition."""
        if self.path is None:
            yield from _some(msgpack.unpackb(raw) for raw in self.inline)
        else:
            with open(self.path, "rb") as file:
                yield from _some(msgpack.Unpacker(file, max_buffer_size=0))

    def drop(self) -> None:
        """Delete the file, and the folder if it was the last."""
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self.path))


class StagingArea:
    """The folder for the pages of one writer's tasks. The driver makes it."""

    def __init__(self, store: str, owner: int) -> None:
        """``owner`` is the process whose end makes what is left worthless."""
        self._folder = Path(store) / FOLDER / f"{this_boot()}-{owner}-{secrets.token_hex(8)}"

    def collect(
        self, pages: Iterable[PlacedPage], local: bool, task: int, inline_bytes: int = INLINE_BYTES_MAX
    ) -> Staged:
        """On the executor: keep ``pages`` until they are committed. ``local``: this is the driver's machine."""
        found = Staged()
        size = 0
        with contextlib.ExitStack() as opened:
            file: Any = None
            try:
                for partition, page in pages:
                    raw = msgpack.packb([partition, page.flags, page.count, page.tail, list(page.pieces)])
                    found.count += page.count
                    found.values += 1 + len(page.pieces)
                    size += len(raw)
                    if file is None and size > inline_bytes and local:
                        self._folder.mkdir(parents=True, exist_ok=True)
                        found.path = str(self._folder / f"{task}-{secrets.token_hex(8)}")
                        file = opened.enter_context(open(found.path, "xb"))
                        file.writelines(found.inline)
                        found.inline = []
                    if file is None:
                        found.inline.append(raw)
                    else:
                        file.write(raw)
            except BaseException:
                found.drop()
                raise
        return found

    def clear(self) -> None:
        """On the driver, when no task runs any more: delete whatever is left of it."""
        shutil.rmtree(self._folder, ignore_errors=True)


def sweep(store: str) -> int:
    """Delete what writers that are gone have left; returns how many folders went."""
    swept = 0
    for folder in Path(store, FOLDER).glob("*-*-*"):
        boot, _, rest = folder.name.partition("-")
        pid = rest.partition("-")[0]
        if boot != this_boot() or not pid.isdigit() or locks.process_state(int(pid)) == "gone":
            shutil.rmtree(folder, ignore_errors=True)
            swept += 1
    return swept


def this_boot() -> str:
    """This boot of this machine, as file names have it."""
    return xxhash.xxh3_64_hexdigest(clock.boot_id().encode())


def _some(raws: Iterable[list[Any]]) -> Iterator[tuple[int, list[Page]]]:
    left = iter(raws)
    while some := list(itertools.islice(left, _READ_PAGES)):
        found: dict[int, list[Page]] = {}
        for partition, flags, count, tail, pieces in some:
            found.setdefault(partition, []).append(Page(flags, count, tail, tuple(pieces)))
        yield from found.items()
