"""A queue off the driver's machine: a directory of Parquet files, and the log that says which of them count.

    DIR/<queue>/_cues/queue.json               {"identity": 16 hex digits}, drawn when the directory is made
    DIR/<queue>/_spark_metadata/0 … 8          one entry a step: a file that came
    DIR/<queue>/_spark_metadata/9.compact      every tenth entry is all files that are there
    DIR/<queue>/<first>-<count>-by-<processor>-<record>-<token>.parquet

    index BIGINT, time TIMESTAMP, hash STRING, value BINARY, meta BINARY

The log has the format of Spark's own file sink, byte for byte, so ``spark.read.parquet`` and
``spark.readStream.parquet`` of anybody see the messages that count and nothing else: no file of a step that
was not committed, none that is half written, none twice.

An entry is put if absent (files.py), so the log has one order whoever writes; and each names its files, whose
names say which messages are in them and which step wrote them. An entry that is written again after a
crash is found by that, and is not written twice.

Files leave the log before they leave the disk (keeping.py), in an entry that is a tenth: the entries before
it are filled up with empty ones, which Spark reads as nothing.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlparse

from cues.errors import Diverged
from cues.spark.cluster.files import folder_of

if TYPE_CHECKING:
    from cues.queues.options import QueueOptions
    from cues.spark.cluster.files import Files

SCHEMA: Final = "index BIGINT, time TIMESTAMP, hash STRING, value BINARY, meta BINARY"
"""The columns of a data file. ``meta`` is the message's provenance (provenance.py); NULL where it has none."""
LOG: Final = "_spark_metadata"
COMPACT_EVERY: Final = 10
"""Spark's ``spark.sql.streaming.fileSink.log.compactInterval``, which it finds out from the files' names."""
_VERSION: Final = "v1"


@dataclass(frozen=True)
class DataFile:
    """A data file as the log has it."""

    name: str
    first: int
    count: int
    size: int
    modified_ms: int

    @property
    def next(self) -> int:
        """The index behind its last message."""
        return self.first + self.count

    def record_of(self, processor: str) -> int | None:
        """The number of the record that wrote it, if it is one of this processor's."""
        found = self.name.split("-", 2)[2].rsplit("-", 2)
        return int(found[1]) if found[0] == f"by-{folder_of(processor)}" else None

    @property
    def merged(self) -> bool:
        """True for a file that was merged from several."""
        return self.name.split("-", 2)[2].startswith(_MERGED)


_MERGED: Final = "merged-"


def file_name(first: int, count: int, writer: str, number: int) -> str:
    """The name of a data file; ``writer`` is a processor id, ``number`` that of its record."""
    return f"{first:020d}-{count:012d}-by-{folder_of(writer)}-{number:012d}-{secrets.token_hex(4)}.parquet"


def merged_name(first: int, count: int, graph: str) -> str:
    """The name of a data file that takes the place of several; ``graph`` is whose driver made it."""
    return f"{first:020d}-{count:012d}-{_MERGED}{folder_of(graph)}-{secrets.token_hex(4)}.parquet"


def written_by(name: str, graph: str) -> bool:
    """Return True where a driver of this graph made the data file."""
    rest = name.split("-", 2)[-1]
    return rest.startswith((f"by-{folder_of(graph)}.", f"{_MERGED}{folder_of(graph)}-"))


def data_file(name: str, size: int, modified_ms: int) -> DataFile:
    """A data file by its name."""
    first, count, _ = name.split("-", 2)
    return DataFile(name, int(first), int(count), size, modified_ms)


class QueueDirectory:
    """One queue. Whoever appends holds :attr:`lock` from when it looks at :attr:`next` until it has appended."""

    def __init__(self, files: Files, queue: str, options: QueueOptions, identity: bytes | None = None) -> None:
        """Open or make it; ``identity`` is that of the queue in the driver's store which it continues.

        Raises :class:`Diverged` where the directory is of another queue.
        """
        self.files = files
        self.queue = queue
        self.options = options
        self.folder = folder_of(queue)
        self.lock = threading.RLock()
        self.live: tuple[DataFile, ...] = ()
        """The files that count, by index."""
        self.owed: list[DataFile] = []
        """What is committed, and not in the log because the filesystem failed; under the lock."""
        self._held: Counter[str] = Counter()
        self._entry = -1
        self.identity = self._identity(identity)
        self.load()

    def _identity(self, expected: bytes | None) -> bytes:
        name = f"{self.folder}/_cues/queue.json"
        text = self.files.read(name)
        if text is None:
            drawn = expected or secrets.token_bytes(8)
            self.files.put(name, json.dumps({"identity": drawn.hex(), "queue": self.queue}))
            text = self.files.read(name)
        found = bytes.fromhex(json.loads(text or "{}")["identity"])
        if expected is not None and found != expected:
            raise Diverged(
                f"The directory {self.files.url}/{self.folder} continues the queue {self.queue!r} with identity"
                f" {found.hex()}, and the one in this machine's store has {expected.hex()}: it is another queue.",
                "use the store that the directory was fed from, or start over with another --queues DIR.",
                processor="",
            )
        return found

    # --- the log ---

    @property
    def first(self) -> int:
        """The index of the first message that is there."""
        return self.live[0].first if self.live else 1

    @property
    def next(self) -> int:
        """The index that the next message gets. The last file always stays, so that it is known."""
        return self.live[-1].next if self.live else 1

    def load(self) -> None:
        """Read the log as it is now."""
        with self.lock:
            numbers = self._entries()
            self._entry = max(numbers, default=-1)
            start = max(0, (self._entry + 1) // COMPACT_EVERY * COMPACT_EVERY - 1)
            found: list[DataFile] = []
            for number in range(start, self._entry + 1):
                text = self.files.read(f"{self.folder}/{LOG}/{numbers.get(number, number)}")
                if text is None:
                    raise Diverged(
                        f"Entry {number} of the log of {self.files.url}/{self.folder} is missing.",
                        "restore the directory from a copy.",
                        processor="",
                    )
                found += parse_entry(text)
            self.live = tuple(sorted(found, key=lambda one: one.first))

    def _entries(self) -> dict[int, str]:
        """The names of the entries by their numbers."""
        found = {}
        for name in self.files.names(f"{self.folder}/{LOG}"):
            number, _, rest = name.partition(".")
            if number.isdigit() and rest in ("", "compact"):
                found[int(number)] = name
        return found

    def forward(self, name: str) -> None:
        """Add a file that a step has committed, once, however often it is asked for. The caller holds the lock."""
        first, count, _ = name.split("-", 2)
        if not self._has(DataFile(name, int(first), int(count), 0, 0)):
            self.owed.append(self.stored(name))
        self.settle()

    def settle(self) -> None:
        """Add what is owed. The caller holds the lock.

        Raises :class:`Diverged` where the log has other messages at these indices.
        """
        while self.owed:
            file = self.owed[0]
            if self._has(file):
                self.owed.pop(0)
            elif file.first < self.next:
                raise Diverged(
                    f"The queue {self.queue!r} in {self.files.url} goes up to {self.next - 1}, and {file.name} was"
                    " committed for other messages of it.",
                    "let one graph write to the queue, and restore the directory from a copy.",
                    processor="",
                )
            else:
                self._put([*self.live, file], [file])  # where somebody else wrote this entry we look again

    def _has(self, file: DataFile) -> bool:
        """Return True where a file's messages are in the log, or were."""
        if file.next <= self.first and self.live:
            return True  # purged
        holder = next((one for one in self.live if one.first <= file.first < one.next), None)
        return holder is not None and (holder.name == file.name or holder.merged)

    def replace(self, gone: set[str], came: list[DataFile]) -> bool:
        """Put ``came`` in the place of the files named ``gone``; False where the log has moved on meanwhile.

        The caller holds the lock, and deletes the files later.
        """
        live = sorted([*(one for one in self.live if one.name not in gone), *came], key=lambda one: one.first)
        while (self._entry + 2) % COMPACT_EVERY:
            if not self._put(list(self.live), []):
                return False
        return self._put(live, came)

    def _put(self, live: list[DataFile], came: list[DataFile]) -> bool:
        """Write the next entry; where its number is taken read the log anew and return False."""
        number = self._entry + 1
        compact = (number + 1) % COMPACT_EVERY == 0
        lines = [self._line(one) for one in (live if compact else came)]
        name = f"{number}.compact" if compact else str(number)
        put = self.files.put(f"{self.folder}/{LOG}/{name}", "\n".join([_VERSION, *lines]))
        if not put or max(self._entries()) > number:  # taken; or free again, after many that followed it
            self.load()
            return False
        self._entry = number
        self.live = tuple(live)
        if compact:
            self._trim(number)
        return True

    def _trim(self, number: int) -> None:
        """Entries before the last compact one but one are read by nobody."""
        for entry, name in self._entries().items():
            if entry < number - 2 * COMPACT_EVERY:
                self.files.delete(f"{self.folder}/{LOG}/{name}")

    def _line(self, file: DataFile) -> str:
        found = {
            "path": str(self.files.path(f"{self.folder}/{file.name}").toUri().toString()),
            "size": file.size,
            "isDir": False,
            "modificationTime": file.modified_ms,
            "blockReplication": 1,
            "blockSize": 33_554_432,
            "action": "add",
        }
        return json.dumps(found, separators=(",", ":"))

    # --- files ---

    def adopt(self, source: str, name: str) -> DataFile:
        """Move a file that Spark wrote here, under its name. Nobody sees it before it is in the log."""
        self.files.move(source, f"{self.folder}/{name}")
        return self.stored(name)

    def stored(self, name: str) -> DataFile:
        """A file that lies here."""
        status = self.files.status(f"{self.folder}/{name}")
        if status is None:
            raise Diverged(
                f"{self.files.url}/{self.folder}/{name}, which a step has committed, is gone.",
                "restore the directory from a copy.",
                processor="",
            )
        return data_file(name, status.size, status.modified_ms)

    def within(self, start: int, stop: int) -> list[DataFile]:
        """The files that hold the messages [start, stop)."""
        return [one for one in self.live if one.first < stop and one.next > start]

    def ready(self, start: int) -> tuple[int, int]:
        """Where a reader at ``start`` goes on, and up to where messages follow one another from there."""
        live = self.live
        at = max(start, self.first)
        end = at
        for one in live:
            if one.next <= at:
                continue
            if one.first > end:
                if end > at:
                    break
                at = one.first  # what is missing was purged before it came here
            end = one.next
        return at, end

    def hold(self, files: list[DataFile]) -> None:
        """A step reads these files: they stay on the disk."""
        with self.lock:
            self._held.update(one.name for one in files)

    def release(self, files: list[DataFile]) -> None:
        """It does not any more."""
        with self.lock:
            self._held.subtract(one.name for one in files)

    def is_held(self, name: str) -> bool:
        """Return True where a step reads the file."""
        with self.lock:
            return self._held[name] > 0

    def urls(self, files: list[DataFile]) -> list[str]:
        """As Spark's readers take them."""
        return [self.files.url_of(f"{self.folder}/{one.name}") for one in files]


def parse_entry(text: str) -> list[DataFile]:
    """The files of an entry."""
    version, *lines = text.split("\n")
    if version != _VERSION:
        raise Diverged(
            f"A queue's log has the format {version!r}; this version reads {_VERSION!r}.",
            "install a newer Cues, or a pyspark between 4.2 and 4.3.",
            processor="",
        )
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
    return [
        data_file(unquote(urlparse(one["path"]).path).rpartition("/")[2], one["size"], one["modificationTime"])
        for one in entries
    ]
