"""A queue on a shared filesystem: a directory of Parquet files, and a log that names the files that count.

    DIR/<queue>/_cues/queue.json               {"identity": 16 hex digits}, made with the directory
    DIR/<queue>/_cues/writer.json              {"graph": id} of the graph that writes the queue
    DIR/<queue>/_spark_metadata/0 … 8          an entry for each step: its new file
    DIR/<queue>/_spark_metadata/9.compact      every tenth entry lists all files
    DIR/<queue>/<first>-<count>-by-<processor>-<record>-<token>.parquet

    index BIGINT, time TIMESTAMP, hash STRING, value BINARY, meta BINARY

The log has the format of Spark's own file sink, byte for byte. So every ``spark.read.parquet`` and
``spark.readStream.parquet`` sees exactly the messages that count: no file of a step that
was not committed, no file that is half written, no file twice.

An entry is put if absent (files.py), so the log has one order, even with several writers. Each entry names its files,
and the name of a file contains its messages and the step that wrote it. So after a crash
a driver finds an entry that was written already, and does not write it again.

Files leave the log before they leave the disk (maintenance.py). Only a compact entry can leave files out. To reach its
number, empty entries are written, which Spark ignores.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlparse

from cues.errors import Diverged, GraphError
from cues.spark.cluster.files import folder_of

if TYPE_CHECKING:
    from cues.queues.options import QueueOptions
    from cues.spark.cluster.files import Files

SCHEMA: Final = "index BIGINT, time TIMESTAMP_LTZ, hash STRING, value BINARY, meta BINARY"
"""The columns of a data file. ``meta`` is the provenance of the message (provenance.py); NULL if it has none.

In a session with ``spark.sql.timestampType=TIMESTAMP_NTZ``, TIMESTAMP is a time without a zone.
"""
LOG: Final = "_spark_metadata"
COMPACT_EVERY: Final = 10
"""Spark's ``spark.sql.streaming.fileSink.log.compactInterval``. Spark finds it out from the names of the entries."""
_VERSION: Final = "v1"


@dataclass(frozen=True)
class DataFile:
    """A data file, as in the log."""

    name: str
    first: int
    count: int
    size: int
    modified_ms: int

    @property
    def next(self) -> int:
        """The index after its last message."""
        return self.first + self.count

    def record_of(self, processor: str) -> int | None:
        """The number of the record that wrote it; None if that is a record of another processor."""
        writer, number, _ = self.name.split("-", 2)[2].rsplit("-", 2)
        return int(number) if writer == f"by-{folder_of(processor)}" else None

    @property
    def merged(self) -> bool:
        """True if it was merged from several files."""
        return self.name.split("-", 2)[2].startswith(_MERGED)


_MERGED: Final = "merged-"


def file_name(first: int, count: int, writer: str, number: int) -> str:
    """The name of a data file; ``writer`` is a processor id, ``number`` that of its record."""
    return f"{first:020d}-{count:012d}-by-{folder_of(writer)}-{number:012d}-{secrets.token_hex(4)}.parquet"


def merged_name(first: int, count: int, graph: str) -> str:
    """The name of a data file that replaces several; a driver of ``graph`` made it."""
    return f"{first:020d}-{count:012d}-{_MERGED}{folder_of(graph)}-{secrets.token_hex(4)}.parquet"


def written_by(name: str, graph: str) -> bool:
    """Return True if a driver of this graph made the data file."""
    rest = name.split("-", 2)[-1]
    return rest.startswith((f"by-{folder_of(graph)}.", f"{_MERGED}{folder_of(graph)}-"))


def data_file(name: str, size: int, modified_ms: int) -> DataFile:
    first, count, _ = name.split("-", 2)
    return DataFile(name, int(first), int(count), size, modified_ms)


def _damaged(text: str) -> Diverged:
    return Diverged(text, "restore the directory from a copy.")


class QueueDirectory:
    """One queue. A thread that appends holds :attr:`lock` from the read of :attr:`next` until it has appended."""

    def __init__(self, files: Files, queue: str, options: QueueOptions, identity: bytes | None = None) -> None:
        """Open or make the directory. ``identity`` is that of the queue in the driver's store that is copied into it.

        Raises :class:`Diverged` if the directory belongs to another queue.
        """
        self.files = files
        self.queue = queue
        self.options = options
        self.folder = folder_of(queue)
        self.lock = threading.RLock()
        self.live: tuple[DataFile, ...] = ()
        """The files that count, by index."""
        self.owed: list[DataFile] = []
        """Files that are committed and not in the log, because the filesystem failed. Protected by the lock."""
        self._held: Counter[str] = Counter()
        self._entry = -1
        self.identity = self._identity(identity)
        self.load()

    def _identity(self, expected: bytes | None) -> bytes:
        draft = {"identity": (expected or secrets.token_bytes(8)).hex(), "queue": self.queue}
        text = self.files.ensure(f"{self.folder}/_cues/queue.json", json.dumps(draft))
        identity = bytes.fromhex(json.loads(text)["identity"])
        if expected is not None and identity != expected:
            raise Diverged(
                f"The directory {self.files.url}/{self.folder} continues the queue {self.queue!r} with identity"
                f" {identity.hex()}, and the one in this machine's store has {expected.hex()}: it is another queue.",
                "use the store that the directory was fed from, or start over with another --queues DIR.",
            )
        return identity

    def own(self, graph: str) -> None:
        """Note that this graph writes the queue. Raises :class:`GraphError` if another graph does.

        Each driver gives the indices of its messages itself, so two would give one index to two messages.
        """
        name = f"{self.folder}/_cues/writer.json"
        self.files.put(name, json.dumps({"graph": graph}))
        writer = json.loads(self.files.read(name) or "{}").get("graph")
        if writer != graph:
            raise GraphError(
                f"The queue {self.queue!r} in {self.files.url} is written by the graph {writer!r}, and {graph!r} writes"
                " it too.",
                "give the queue another name in one of the graphs, or use another --queues DIR.",
            )

    # --- the log ---

    @property
    def first(self) -> int:
        """The index of the first message."""
        return self.live[0].first if self.live else 1

    @property
    def next(self) -> int:
        """The index that the next message gets. The last file always stays, because it has this index."""
        return self.live[-1].next if self.live else 1

    def reaches(self, index: int) -> bool:
        """Return True if the log ends at ``index`` or after it; another driver may have written since it was read."""
        if self.next < index:
            self.load()
        return self.next >= index

    def load(self) -> None:
        def read(name: str) -> str:
            text = self.files.read(f"{self.folder}/{LOG}/{name}")
            if text is None:
                raise _damaged(f"Entry {name} of the log of {self.files.url}/{self.folder} is missing.")
            return text

        with self.lock:
            entries = self._entries()
            self._entry = max(entries, default=-1)
            self.live = live_files(entries, read)

    def _entries(self) -> dict[int, str]:
        return entries_of(self.files.names(f"{self.folder}/{LOG}"))

    def forward(self, name: str) -> None:
        """Add a file that a step has committed. A file that is in the log already is not added again."""
        with self.lock:
            if not self._has(data_file(name, 0, 0)):
                self.owed.append(self.stored(name))
            self.settle()

    def settle(self) -> None:
        """Add the files that are committed and not in the log. The caller holds the lock.

        Raises :class:`Diverged` if the log has other messages at these indices.
        """
        while self.owed:
            file = self.owed[0]
            if self._has(file):
                self.owed.pop(0)
            elif file.first < self.next:
                raise Diverged(
                    f"The queue {self.queue!r} in {self.files.url} ends with message {self.next - 1}, and {file.name}"
                    " was committed with other messages for the same indices.",
                    "let one graph write to the queue, and restore the directory from a copy.",
                )
            else:
                self._put([*self.live, file], [file])  # if another driver wrote this entry, the loop looks again

    def _has(self, file: DataFile) -> bool:
        """Return True if a file's messages are in the log, or were in it."""
        return self.covers(file) or any(live.name == file.name for live in self.live)

    def covers(self, file: DataFile) -> bool:
        """Return True if a file is not needed: its messages were purged, or are in a merged file."""
        if file.next <= self.first and self.live:
            return True
        return any(live.merged and live.first <= file.first < live.next for live in self.live)

    def replace(self, gone: set[str], new: list[DataFile]) -> bool:
        """Replace the files named ``gone`` by ``new``. Return False if the log has got another entry meanwhile.

        The caller holds the lock, and deletes the files later.
        """
        live = sorted([*(file for file in self.live if file.name not in gone), *new], key=_first)
        while (self._entry + 2) % COMPACT_EVERY:
            if not self._put(list(self.live), []):
                return False
        return self._put(live, new)

    def _put(self, live: list[DataFile], new: list[DataFile]) -> bool:
        """Write the next entry. If its number is taken, read the log again and return False."""
        number = self._entry + 1
        compact = (number + 1) % COMPACT_EVERY == 0
        lines = [self._line(file) for file in (live if compact else new)]
        name = f"{number}.compact" if compact else str(number)
        put = self.files.put(f"{self.folder}/{LOG}/{name}", "\n".join([_VERSION, *lines]))
        if not put or max(self._entries()) > number:  # taken; or taken once, and deleted after many later entries
            self.load()
            return False
        self._entry = number
        self.live = tuple(live)
        if compact:
            self._trim(number)
        return True

    def _trim(self, number: int) -> None:
        """Delete old entries. Readers need none before the last compact entry but one."""
        for entry, name in self._entries().items():
            if entry < number - 2 * COMPACT_EVERY:
                self.files.delete(f"{self.folder}/{LOG}/{name}")

    def _line(self, file: DataFile) -> str:
        line = {
            "path": str(self.files.path(f"{self.folder}/{file.name}").toUri().toString()),
            "size": file.size,
            "isDir": False,
            "modificationTime": file.modified_ms,
            "blockReplication": 1,
            "blockSize": 33_554_432,
            "action": "add",
        }
        return json.dumps(line, separators=(",", ":"))

    # --- files ---

    def adopt(self, source: str, name: str) -> DataFile:
        """Move a file that Spark wrote into the directory. Readers do not see it before it is in the log."""
        self.files.move(source, f"{self.folder}/{name}")
        return self.stored(name)

    def stored(self, name: str) -> DataFile:
        """A file of the directory. Raises :class:`Diverged` if it is gone."""
        status = self.files.status(f"{self.folder}/{name}")
        if status is None:
            raise _damaged(f"{self.files.url}/{self.folder}/{name}, which a step has committed, is gone.")
        return data_file(name, *status)

    def within(self, start: int, stop: int) -> list[DataFile]:
        """The files that hold the messages [start, stop)."""
        return [file for file in self.live if file.first < stop and file.next > start]

    def ready(self, start: int) -> tuple[int, int]:
        """The range that a reader at ``start`` reads next: its start, and the end of the messages without a gap."""
        live = self.live
        at = max(start, self.first)
        end = at
        for file in live:
            if file.next <= at:
                continue
            if file.first > end:
                if end > at:
                    break
                at = file.first  # the messages of the gap were purged before they were copied
            end = file.next
        return at, end

    def hold(self, files: list[DataFile]) -> None:
        """Keep these files on the disk, because a step reads them."""
        with self.lock:
            self._held.update(file.name for file in files)

    def release(self, files: list[DataFile]) -> None:
        """End a :meth:`hold`."""
        with self.lock:
            self._held.subtract(file.name for file in files)

    def is_held(self, name: str) -> bool:
        """Return True if a step reads the file."""
        with self.lock:
            return self._held[name] > 0

    def urls(self, files: list[DataFile]) -> list[str]:
        """The URLs of files, for Spark's readers."""
        return [self.files.url_of(f"{self.folder}/{file.name}") for file in files]


# --- reading a log ------------------------------------------------------------------------------


def entries_of(names: Iterable[str]) -> dict[int, str]:
    """The names of the entries of a log, by number. Other files in its folder are left out."""
    split = [(name, *name.partition(".")[::2]) for name in names]
    return {int(number): name for name, number, rest in split if number.isdigit() and rest in ("", "compact")}


def live_files(entries: Mapping[int, str], read: Callable[[str], str]) -> tuple[DataFile, ...]:
    """The files that count, by index, from the last compact entry on. ``read`` returns the text of an entry."""
    last = max(entries, default=-1)
    start = max(0, (last + 1) // COMPACT_EVERY * COMPACT_EVERY - 1)
    texts = [read(entries.get(number, str(number))) for number in range(start, last + 1)]
    return tuple(sorted((file for text in texts for file in parse_entry(text)), key=_first))


def _first(file: DataFile) -> int:
    return file.first


def parse_entry(text: str) -> list[DataFile]:
    """The files of an entry."""
    version, *lines = text.split("\n")
    if version != _VERSION:
        raise Diverged(
            f"A queue's log has the format {version!r}; this version reads {_VERSION!r}.",
            "install a newer Cues, or a pyspark between 4.2 and 4.3.",
        )
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
    return [
        data_file(unquote(urlparse(entry["path"]).path).rpartition("/")[2], entry["size"], entry["modificationTime"])
        for entry in entries
    ]
