"""A queue on a shared directory: a Delta table, whose data files are written by tasks.

    DIR/<queue>/_cues/queue.json               {"identity": 16 hex digits}, made with the queue
    DIR/<queue>/_cues/writer.json              {"graph": id} of the graph that writes the queue
    DIR/<queue>/_cues/checkpoint.json          {"version": n}: the checkpoint n of the log may not be whole
    DIR/<queue>/_delta_log/<version>.json      an entry for each step: its new files
    DIR/<queue>/partition=<p>/first=<index>/<processor>-<record>-<token>.parquet

    partition INT, first BIGINT                of a file, in the log and in its folder; an index belongs to a partition
    offset BIGINT, time TIMESTAMP, hash STRING, value BINARY, provenance MAP, meta BINARY
    …                                          fields of the messages as typed columns (typed.py)

The index of a message is ``first + offset``. The index of a file's first message is a partition of the table, because
it is known only when the step commits. Some readers look for partitions in the log, others in the names of folders. So
a task writes a file into the folder that it expects, and the driver moves it if there were more or fewer messages
before it. Files of an earlier version are not in such folders; ``cues optimize`` writes them again.

The number of partitions is in the metadata of the table, and only grows. Every reader of Delta tables sees exactly the
messages that count: no file of a step that was not committed, no file twice. Paths in the log are relative, so a
directory may be moved.

An entry is put if absent (files.py), so the log has one order, even with several writers. It holds a transaction of
Delta: the writer's id, and the number of its record (ledger.py). So after a crash a driver finds that an entry was
written, and does not write it again. The library delta-rs reads the log, writes its checkpoints, and deletes old
entries and files. It does not write entries: its cost for each entry grows with the number of files of the table, from
2 ms with a thousand files to 100 ms with 200,000, and one such entry is two lines of JSON. It syncs nothing. So a note
says which checkpoint may not be on the disk yet. After a power cut that one is deleted; its entries are all there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import secrets
import threading
import time
import uuid
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, unquote

import xxhash

from cues import faults
from cues.base import clock, names
from cues.base.data import dataclass
from cues.base.texts import quoted
from cues.errors import CuesError, Diverged, GraphError, QueueNotFound, Unsupported
from cues.queues.options import QueueOptions, changed, placing_to_dict, to_open
from cues.queues.queue import refuse_replacing, refuse_shrinking
from cues.records.schema import INFER
from cues.spark.cluster.files import folder_of, identity_of, name_of, parsed, sealed_json
from cues.spark.cluster.typed import NONE, TypedColumns

if TYPE_CHECKING:
    from cues.spark.cluster.files import Files

LOG: Final = "_delta_log"
_NOTE: Final = "_cues/checkpoint.json"
_OLD_LOG: Final = "_spark_metadata"
"""The log of a queue that an earlier version of Cues wrote."""
CHECKPOINT_EVERY: Final = 100
"""Entries between two checkpoints of the log. A reader reads the last checkpoint, and the entries after it."""
_PLACING: Final = "cues.placing"
"""The key, in the metadata of the table, of the number of partitions, the key and the partitioner."""
_BARE: Final = "rows without packed messages"
"""Beside these: true if messages may be only in typed columns. An earlier version refuses it as an unknown option."""
READY_FILES: Final = 10_000
"""Most files that a reader is offered at once."""
KEEP_FILES_H: Final = 24
"""Hours that a file stays on the disk after it left the log. A reader of an older version of the table needs it."""


_NOTE_NS: Final = 3600 * 10**9
"""Notes of delayed messages are rounded up to this, so that not every step writes one."""


def _field(name: str, kind: Any, nullable: bool = True) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": nullable, "metadata": {}}


_PLACE: Final = {"type": "struct", "fields": [_field("t", "long"), _field("time", "timestamp")]}
_FIELDS: Final = [
    _field("partition", "integer"),
    _field("first", "long"),
    _field("offset", "long"),
    _field("time", "timestamp"),
    _field("hash", "string"),
    _field("value", "binary"),
    _field("provenance", {"type": "map", "keyType": "string", "valueType": _PLACE, "valueContainsNull": True}),
    _field("meta", "binary"),
]


@dataclass(frozen=True)
class DataFile:
    """A data file, as in the log."""

    name: str
    """In the folder of the queue."""
    first: int
    count: int
    size: int
    modified_ms: int
    partition: int = 0
    bounds: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)
    """Of a new file: the statistics of its columns (statistics.py); of one that is in the log: nothing."""

    @property
    def next(self) -> int:
        """The index after its last message."""
        return self.first + self.count

    @property
    def writer(self) -> str:
        """The id of the processor that wrote it."""
        return name_of(self.name.rpartition("/")[2].rsplit("-", 2)[0])

    @property
    def record(self) -> int:
        """The number of the record that wrote it; of a merged file, that of its last part."""
        return int(self.name.rsplit("-", 2)[1])

    @property
    def is_placed(self) -> bool:
        """False for a file that is not in the folder of its partition and index, as earlier versions wrote it."""
        return self.name == placed(self.name, self.partition, self.first)


_FILE_NAME: Final = re.compile(r"(.+)-(\d{12})-[0-9a-f]{12}\.parquet")


def file_name(writer: str, number: int) -> str:
    """The name of a data file; ``writer`` is a processor id, ``number`` that of its record."""
    return f"{folder_of(writer)}-{number:012d}-{secrets.token_hex(6)}.parquet"


def placed(name: str, partition: int, first: int) -> str:
    """The name of a data file in the folder of its partition and its first index; ``first`` 0: beside these folders."""
    last = name.rpartition("/")[2]
    return f"partition={partition}/first={first}/{last}" if first else last


def _to_json(value: Any) -> str:
    """JSON of the log, without escapes: delta-rs misreads those of characters from U+20000 on (rare Chinese ones).

    Only ends of lines are escaped, because some readers take them for the end of an action.
    """
    return json.dumps(value, ensure_ascii=False).translate(_LINE_ENDS)


_LINE_ENDS: Final = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}


def _damaged(text: str) -> Diverged:
    return Diverged(text, "restore the directory from a copy.")


class PartitionLog:
    """One partition of a queue: its messages, in files."""

    def __init__(self, directory: QueueDirectory, partition: int) -> None:
        self.directory = directory
        self.partition = partition
        self.live: list[DataFile] = []
        """The files that count, by index. New files are appended; after other changes it is another list."""

    @property
    def id(self) -> str:
        """As :func:`cues.base.names.log_id`."""
        return names.log_id(self.directory.queue, self.partition)

    @property
    def folder(self) -> str:
        """The folder of its files."""
        return self.directory.folder

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
            self.directory.read_on()
        return self.next >= index

    def within(self, start: int, stop: int) -> list[DataFile]:
        """The files that hold the messages [start, stop)."""
        live = self.live
        return live[bisect_left(live, start, key=_last) : bisect_left(live, stop, key=_first)]

    def ready(self, start: int) -> tuple[int, int]:
        """The range that a reader at ``start`` reads next: its start, and the end of the messages without a gap.

        Of many small files, the range has some thousand.
        """
        live = self.live
        at = max(start, self.first)
        end = at
        low = bisect_left(live, at, key=_last)
        for file in live[low : low + READY_FILES]:
            if file.first > end:
                if end > at:
                    break
                at = file.first  # the messages of the gap were purged before they were copied
            end = file.next
        return at, end

    def keep(self, live: Iterable[DataFile]) -> None:
        """Take these files. Raises :class:`Diverged` if two of them have the same message."""
        files = sorted(live, key=_first)
        for before, after in itertools.pairwise(files):
            if after.first < before.next:
                directory = self.directory
                raise _damaged(
                    f"The log of {directory.files.url}/{directory.folder} has the messages {after.first} to"
                    f" {min(before.next, after.next) - 1} twice, in {before.name} and {after.name}."
                )
        self.live = files


class QueueDirectory:
    """One queue. A thread that appends holds :attr:`lock` from the read of the next index until it has appended."""

    def __init__(
        self, files: Files, queue: str, options: QueueOptions, identity: bytes | None = None, make: bool = True
    ) -> None:
        """Open or make the queue. ``identity`` is that of the queue in the driver's store that is copied into it.

        Raises :class:`Diverged` if the directory belongs to another queue, and :class:`Unsupported` if an earlier
        version of Cues wrote it. Without ``make``, raises :class:`QueueNotFound` if there is no such queue. Raises
        :class:`QueueOptionsError` if the option ``schema`` gives a field of the table another type.
        """
        self.files = files
        self.queue = queue
        self.options = options
        """Those of the graph, with the number of partitions that there are now."""
        self._asked = self._stored = options
        self.folder = folder_of(queue)
        self.lock = threading.RLock()
        self.logs: list[PartitionLog] = []
        """By partition. The list only grows."""
        self._owed: deque[tuple[str, int, Sequence[DataFile]]] = deque()
        """Files of records that are not in the log, because the filesystem failed. Protected by the lock."""
        self.undecided: BaseException | None = None
        """The error after which this driver cannot tell which index is next."""
        self.held: Counter[str] = Counter()
        self.version = -1
        self.columns = NONE
        """The typed columns of the table."""
        self._published: dict[str, int] = {}
        self._table: Any = None
        self._noted_ns = 0
        refuse_old(files, self.folder)
        self.identity = self._identity(identity, make)
        self.load()
        self._with_schema()

    def _identity(self, expected: bytes | None, make: bool) -> bytes:
        draft = {"identity": (expected or secrets.token_bytes(8)).hex(), "queue": self.queue}
        name = f"{self.folder}/_cues/queue.json"
        text = self.files.ensure(name, sealed_json(draft)) if make else self.files.read(name)
        if text is None:
            raise QueueNotFound(
                f"The queue {self.queue!r} is not in {self.files.url}.",
                "list the queues with cues queues; start the command again, if the graph was started over.",
                queue=self.queue,
            )
        identity = identity_of(self.files, name, text)
        if expected is not None and identity != expected:
            raise Diverged(
                f"The directory {self.files.url}/{self.folder} continues the queue {self.queue!r} with identity"
                f" {identity.hex()}, and the one in this machine's store has {expected.hex()}: it is another queue.",
                "use the store from which the directory was fed last, or an empty one (--store DIR), which continues"
                " after the last message in the directory. Or start over with --fresh or another --queues DIR.",
            )
        return identity

    def own(self, graph: str) -> None:
        """Note that this graph writes the queue. Raises :class:`GraphError` if another graph does.

        Each driver gives the indices of its messages itself, so two would give one index to two messages.
        """
        name = f"{self.folder}/_cues/writer.json"
        self.files.put(name, sealed_json({"graph": graph}))
        writer = parsed(self.files, name, self.files.read(name) or b"{}", {"graph?": str}).get("graph")
        if writer != graph:
            raise GraphError(
                f"The queue {self.queue!r} in {self.files.url} is written by the graph {writer!r}, and {graph!r} writes"
                " it too.",
                "give the queue another name in one of the graphs, or use another --queues DIR.",
            )
        if drop_checkpoint(self.files, self.folder):
            self.load()
        columns = self._with_schema()
        if self.version < 0:
            self._commit([{"protocol": _PROTOCOL}, {"metaData": self.metadata_of(self.options, columns)}])
        grow = f"run cues grow {quoted(self.files.place)}#{quoted(self.queue)} {quoted(self._asked.partitions)}"
        refuse_replacing(self.queue, self._stored, changed(self._stored, to_open(self._asked)), grow)
        self.add_columns(columns.fields)

    def _with_schema(self) -> TypedColumns:
        """The typed columns of the table, and those that the option ``schema`` adds."""
        schema = self.options.schema
        fields = () if schema is None or isinstance(schema, str) else schema
        return self.columns.plus(fields, self.queue, self.files.url)

    @property
    def infers(self) -> bool:
        """True if the table is to get its typed columns from its messages."""
        return self.options.schema == INFER and not self.columns

    def add_columns(self, schema: Sequence[tuple[str, str]]) -> None:
        """Add typed columns to the table, for the files that come. Nothing is written if it has them all.

        Raises :class:`QueueOptionsError` if a field has another type in the table.
        """
        with self.lock:
            while (columns := self.columns.plus(schema, self.queue, self.files.url)) != self.columns:
                self._commit([{"metaData": self.metadata_of(self.options, columns)}])

    def learn(self, schema: Sequence[tuple[str, str]]) -> None:
        """Add typed columns for fields of tables that have none, if the queue has no ``schema=``.

        From then on rows of tables are stored without packed messages, if the columns have all of them.
        """
        if self.options.schema is None and schema:
            with self.lock:
                while (new := self.columns.unknown(schema)) or not self.columns.bare:
                    columns = replace(self.columns.plus(new, self.queue, self.files.url), bare=True)
                    self._commit([{"metaData": self.metadata_of(self.options, columns)}])

    def metadata_of(self, options: QueueOptions, columns: TypedColumns) -> dict[str, Any]:
        return {
            "id": str(uuid.UUID(bytes=self.identity * 2)),
            "name": self.queue,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": _to_json({"type": "struct", "fields": [*_FIELDS, *columns.to_log()]}),
            "partitionColumns": ["partition", "first"],
            "createdTime": time.time_ns() // 1_000_000,
            "configuration": {_PLACING: json.dumps(placing_to_dict(options) | ({_BARE: True} if columns.bare else {}))},
        }

    # --- delayed messages ---

    def delayed_until(self) -> int:
        """The time in nanoseconds after which all messages of the queue are due, rounded up to an hour; 0: all are."""
        return max((int(name.removesuffix(".json")) for name in self.files.names(self._delays)), default=0)

    def note_delays(self, until_ns: int) -> None:
        """Note that messages will be delayed until this time, before they are committed."""
        with self.lock:
            if until_ns <= max(self._noted_ns, clock.now_ns()):
                return
            self._noted_ns = -(-until_ns // _NOTE_NS) * _NOTE_NS
            self.files.put(f"{self._delays}/{self._noted_ns:020d}.json", b"{}")
            for name in self.files.names(self._delays):
                if int(name.removesuffix(".json")) < self._noted_ns:
                    self.files.delete(f"{self._delays}/{name}")

    @property
    def _delays(self) -> str:
        return f"{self.folder}/_cues/delays"

    # --- the log ---

    @property
    def live(self) -> list[DataFile]:
        """The files that count, of all partitions."""
        return [file for log in self.logs for file in log.live]

    def log(self, partition: int) -> PartitionLog:
        """A partition; another driver may have made it since the log was read. Raises :class:`Diverged`."""
        if partition >= len(self.logs):
            self.read_on()
        if partition >= len(self.logs):
            raise _damaged(f"The queue {self.queue!r} in {self.files.url} has no partition {partition}.")
        return self.logs[partition]

    def grow(self, partitions: int) -> None:
        """Raise the number of partitions; see :meth:`cues.queues.queue.Queue.grow`. A smaller number is refused."""
        with self.lock:
            self.read_on()
            refuse_shrinking(self.queue, len(self.logs), partitions)
            self.grow_to(partitions)

    def grow_to(self, partitions: int) -> None:
        """Add partitions until there are at least so many, if the table is there."""
        with self.lock:
            while self.version >= 0 and len(self.logs) < partitions:
                grown = changed(self.options, {"partitions": partitions})
                self._commit([{"metaData": self.metadata_of(grown, self.columns)}])

    def load(self) -> None:
        """Read the log. Raises :class:`Diverged` if it is damaged. The entries that were read are durable then.

        Else a power cut could take an entry away whose writer has died, when the processor has its next record. Only
        the files of the last record are forwarded, so the messages of the entry would be lost.
        """
        with self.lock:
            self._published = {}
            self._table, live = read_table(self.files, self.folder)
            if self._table is not None:
                self.files.settle(f"{self.folder}/{LOG}")
            with _log_is_read(self.files, self.folder):
                self.version = -1 if self._table is None else self._table.version()
                if self._table is not None:
                    fields = json.loads(self._table.schema().to_json())["fields"]
                    self.columns = _columns_of(fields, self._table.metadata().configuration)
                self._place({} if self._table is None else self._table.metadata().configuration)
            self._keep(live)

    def _place(self, configuration: Mapping[str, str]) -> None:
        """Follow the number of partitions in the metadata of the table."""
        if self.version >= 0:
            placing = json.loads(configuration.get(_PLACING, "{}"))
            placing.pop(_BARE, None)
            self._stored = QueueOptions.from_dict(placing)
            given = {**to_open(self._asked), "partitions": self._stored.partitions}
            self.options = changed(self._stored, given)
        self.logs += [PartitionLog(self, number) for number in range(len(self.logs), self.options.partitions)]

    def _keep(self, live: Iterable[DataFile]) -> None:
        shares: list[list[DataFile]] = [[] for _ in self.logs]
        for file in live:
            if file.partition >= len(shares):
                raise _damaged(
                    f"The log of {self.files.url}/{self.folder} has the file {file.name} in partition"
                    f" {file.partition}; the queue has {len(shares)}."
                )
            shares[file.partition].append(file)
        for log, share in zip(self.logs, shares):
            log.keep(share)

    def read_on(self) -> None:
        """Read the entries that were written since the log was read. They are durable then, as after :meth:`load`."""
        with self.lock:
            live: dict[str, DataFile] | None = None
            while (raw := self.files.read(name := self._entry(self.version + 1))) is not None:
                if live is None:
                    live = {file.name: file for file in self.live}
                self._apply(parsed_entry(self.files, name, raw), live)
                self.version += 1
            if live is not None:
                self.files.settle(f"{self.folder}/{LOG}")
                self._keep(live.values())

    def _apply(self, entry: LogEntry, live: dict[str, DataFile]) -> None:
        if entry.metadata is not None:
            self.columns, placing = entry.metadata
            self._place(placing)
        for name in entry.removed:
            live.pop(name, None)
        live |= {file.name: file for file in entry.added}
        self._published |= entry.published

    def _entry(self, version: int) -> str:
        return f"{self.folder}/{LOG}/{version:020d}.json"

    def published(self, writer: str) -> int:
        """The number of the last record of a writer whose files are in the log; -1 if there is none."""
        with self.lock:
            if writer not in self._published:
                with _log_is_read(self.files, self.folder):
                    known = None if self._table is None else self._table.transaction_version(writer)
                self._published[writer] = -1 if known is None else known
            return self._published[writer]

    def owe(self, writer: str, number: int, new: Sequence[DataFile]) -> None:
        """Note the files of a record, for :meth:`settle`. The caller holds the lock."""
        self._owed.append((writer, number, new))

    def publish(self, writer: str, number: int, new: Sequence[DataFile]) -> None:
        """Add the files of a record to the log, if they are not in it."""
        with self.lock:
            self.owe(writer, number, new)
            self.settle()

    def settle(self) -> None:
        """Add the files that are committed and not in the log. The caller holds the lock.

        Raises :class:`Diverged` if the log has other messages at these indices.
        """
        if self.undecided is not None:
            raise OSError(f"it is not known whether a record for the queue {self.queue!r} was put ({self.undecided})")
        while self._owed:
            writer, number, new = self._owed[0]
            if self.published(writer) >= number:
                self._owed.popleft()
                continue
            for file in new:
                log = self.log(file.partition)
                if file.first < log.next:
                    raise Diverged(
                        f"The queue {log.id!r} in {self.files.url} ends with message {log.next - 1}, and record"
                        f" {number} of {writer} has committed other messages from {file.first} on.",
                        "let one graph write to the queue, and restore the directory from a copy.",
                    )
            # If another driver wrote this entry, the loop looks again.
            self._commit([*map(_add, new), {"txn": {"appId": writer, "version": number}}], new)

    def replace(self, gone: Sequence[DataFile], new: Sequence[DataFile]) -> bool:
        """Replace files in the log: no message changes. Return False if the log has got another entry meanwhile.

        The messages of files without a new file are removed. The caller holds the lock. The files stay on the disk for
        :data:`KEEP_FILES_H`.
        """
        names = {file.name for file in gone}
        about = {"deletionTimestamp": time.time_ns() // 1_000_000}
        removed = []
        for file in gone:
            kept = any(file.first < other.next and other.first < file.next for other in new)
            removed.append({"remove": {"path": _path(file), **about, "dataChange": not kept}})
        added = [{"add": _add(file)["add"] | {"dataChange": False}} for file in new]
        return self._commit([*removed, *added], new, names)

    def exchange(self, gone: Sequence[DataFile], new: Sequence[DataFile]) -> bool:
        """:meth:`replace`, until it succeeds. Return False if another driver has removed some of the files."""
        names = {file.name for file in gone}
        with self.lock:
            while names <= {file.name for file in self.live}:
                if self.replace(gone, new):
                    faults.point("spark.replaced")
                    return True
        return False

    def _commit(
        self, actions: Sequence[dict[str, Any]], new: Sequence[DataFile] = (), gone: Collection[str] = ()
    ) -> bool:
        """Write the next entry. If its number is taken, read on and return False."""
        raw, name = sealed_entry(actions), self._entry(self.version + 1)
        if not self.files.put(name, raw):
            self.read_on()
            return False
        self.version += 1
        self._apply(parsed_entry(self.files, name, raw), {})
        if gone:
            self._keep([*(file for file in self.live if file.name not in gone), *new])
        else:
            for file in new:
                self.logs[file.partition].live.append(file)
        return True

    def numbered(self, files: Sequence[DataFile]) -> list[DataFile]:
        """New files with their indices, which follow those of their partitions. A file that has an index keeps it.

        They are moved to the folders of these indices. The caller holds the lock.
        """
        ends: dict[int, int] = {}
        found, moves = [], {}
        for file in files:
            start = file.first or ends.get(file.partition) or self.log(file.partition).next
            ends[file.partition] = start + file.count
            name = placed(file.name, file.partition, start)
            found.append(replace(file, name=name, first=start))
            if name != file.name:
                moves[f"{self.folder}/{file.name}"] = f"{self.folder}/{name}"
        self.files.move(moves)
        return found

    def nexts(self) -> tuple[int, ...]:
        """By partition: the index that its next message gets, if nobody writes before."""
        return tuple(log.next for log in self.logs)

    def checkpoint(self) -> None:
        """Let the library write a checkpoint of the log, and delete entries that no reader needs any more."""
        drop_checkpoint(self.files, self.folder)
        table, _ = read_table(self.files, self.folder)
        note = f"{self.folder}/{_NOTE}"
        self.files.put(note, sealed_json({"version": table.version()}))
        table.create_checkpoint()
        self.files.settle(f"{self.folder}/{LOG}", _of_checkpoint(self.files, self.folder, table.version()))
        self.files.delete(note)
        self.files.settle(f"{self.folder}/_cues")  # else the note may come back, when the entries are gone
        table.cleanup_metadata()

    def vacuum(self, under_way: Callable[[str, int], bool] = lambda writer, record: False) -> None:
        """Let the library find the files that left the log, and those that no step has committed, after a day.

        A file stays if it is not ours, or if ``under_way`` is true for its writer and record: the step may take longer
        than a day. Raises the error of the filesystem if the files of every record are not in the log.
        """
        with self.lock:
            self.settle()
        for file in self.left():
            if not self.held[file.name] and not under_way(file.writer, file.record):
                self.files.delete(f"{self.folder}/{file.name}")

    def left(self) -> list[DataFile]:
        """The files of ours that left the log a day ago, or that were written a day ago and are not in it.

        Only the names of these files are known.
        """
        table, _ = read_table(self.files, self.folder)
        if table is None:
            return []
        gone = table.vacuum(KEEP_FILES_H, dry_run=True, enforce_retention_duration=False, full=True)
        names = map(unquote, gone)
        return [DataFile(name, 0, 0, 0, 0) for name in names if _FILE_NAME.fullmatch(name.rpartition("/")[2])]

    # --- files ---

    def hold(self, files: list[DataFile]) -> None:
        """Keep these files on the disk, because a step reads them."""
        with self.lock:
            self.held.update(file.name for file in files)

    def release(self, files: list[DataFile]) -> None:
        """End a :meth:`hold`."""
        with self.lock:
            self.held -= Counter(file.name for file in files)


_PROTOCOL: Final = {"minReaderVersion": 1, "minWriterVersion": 2}


def _first(file: DataFile) -> int:
    return file.first


def _last(file: DataFile) -> int:
    return file.next - 1


def _path(file: DataFile) -> str:
    """Its path in the log. Readers compare paths as they are, and an earlier version removes files by this one.

    That version's ``cues optimize`` and its keeper, which do not look at records, would else leave messages twice.
    """
    return quote(file.name)


def _add(file: DataFile) -> dict[str, Any]:
    return {
        "add": {
            "path": _path(file),
            "partitionValues": {"partition": str(file.partition), "first": str(file.first)},
            "size": file.size,
            "modificationTime": file.modified_ms,
            "dataChange": True,
            "stats": _to_json({"numRecords": file.count, **file.bounds}),
        }
    }


# --- reading a log ------------------------------------------------------------------------------


def refuse_old(files: Files, folder: str) -> None:
    """Raise :class:`Unsupported` if an earlier version of Cues wrote the queue."""
    if files.names(f"{folder}/{_OLD_LOG}"):
        raise Unsupported(
            f"The queue in {files.url}/{folder} was written by an earlier version of Cues: its log is {_OLD_LOG}, and"
            " this version writes Delta tables.",
            "let the earlier version finish, or read the queue with spark.read.parquet; then start over with --fresh,"
            " or with another --queues DIR, which is fed from the store again.",
        )


def _of_checkpoint(files: Files, folder: str, version: int) -> list[str]:
    """The names of the files of a checkpoint, in the folder of the log."""
    beginnings = (f"{version:020d}.checkpoint", "_last_checkpoint")
    return [name for name in files.listed(f"{folder}/{LOG}") if name.startswith(beginnings)]


def drop_checkpoint(files: Files, folder: str) -> bool:
    """Delete the checkpoint that was being written when its driver or the machine stopped. Return True if there is one.

    Its entries are in the log. A driver that writes it meanwhile does no harm: it is one checkpoint less.
    """
    note = f"{folder}/{_NOTE}"
    text = files.read(note)
    if text is None:
        return False
    for name in _of_checkpoint(files, folder, parsed(files, note, text, {"version": int})["version"]):
        files.delete(f"{folder}/{LOG}/{name}")
    files.settle(f"{folder}/{LOG}")
    files.delete(note)
    return True


class LogEntry(NamedTuple):
    """The actions of an entry that a queue needs."""

    added: list[DataFile]
    removed: list[str]
    metadata: tuple[TypedColumns, Mapping[str, str]] | None
    """The typed columns and the configuration, if the entry changes them."""
    published: dict[str, int]
    """By writer: the number of its record."""


_ENTRY_SEAL: Final = re.compile(rb', "([^"]{4})": "([0-9a-f]{16})"(?=\}\}(\n|$))')
"""Under any name of four bytes, because a bit of the name may have flipped."""


def sealed_entry(actions: Sequence[Mapping[str, Any]]) -> bytes:
    """The bytes of an entry. The information about it, in the first line, ends with the checksum of all the rest."""
    about = {"timestamp": time.time_ns() // 1_000_000, "operation": "WRITE", "engineInfo": "cues"}
    first, *lines = [_to_json(action) for action in ({"commitInfo": about}, *actions)]
    seal = xxhash.xxh3_64_hexdigest("\n".join([first, *lines]).encode())
    return "\n".join([f'{first[:-2]}, "seal": "{seal}"}}}}', *lines]).encode()


def parsed_entry(files: Files, name: str, raw: bytes) -> LogEntry:
    """Decode an entry. Raises :class:`Diverged` if it is damaged. Earlier versions and others write no checksum."""
    try:
        first = raw.partition(b"\n")[0]
        seal = _ENTRY_SEAL.search(first)
        if seal:
            fits = seal[2].decode() == xxhash.xxh3_64_hexdigest(raw[: seal.start()] + raw[seal.end() :])
            if fits != (seal[1] == b"seal"):
                raise ValueError("its checksum fails")
        elif b'"commitInfo"' in first and b'"seal"' in first:
            raise ValueError("its checksum cannot be read")
        return _entry_of([json.loads(line) for line in raw.decode().splitlines()])
    except CuesError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise _damaged(f"The file {files.url}/{name}, an entry of the log of a queue, is damaged: {reason}.") from error


def _entry_of(actions: Sequence[dict[str, Any]]) -> LogEntry:
    entry = LogEntry([], [], None, {})
    for action in actions:
        if not isinstance(action, dict):
            raise ValueError(f"an action is not a JSON object ({action!r})")
        if "add" in action:
            add = action["add"]
            values, count = add["partitionValues"], json.loads(add["stats"])["numRecords"]
            first, partition = int(values["first"]), int(values["partition"])
            place = unquote(add["path"]), first, count, add["size"], add["modificationTime"], partition
            entry.added.append(_data_file(*place))
        elif "remove" in action:
            entry.removed.append(unquote(action["remove"]["path"]))
        elif "metaData" in action:
            metadata = action["metaData"]
            columns = _columns_of(json.loads(metadata["schemaString"])["fields"], metadata["configuration"])
            entry = entry._replace(metadata=(columns, dict(metadata["configuration"])))
        elif "txn" in action:
            writer, number = action["txn"]["appId"], action["txn"]["version"]
            if not isinstance(writer, str) or type(number) is not int:
                raise ValueError(f"the transaction {writer!r}, {number!r}")
            entry.published[writer] = number
    return entry


def _columns_of(fields: Sequence[Mapping[str, Any]], configuration: Mapping[str, str]) -> TypedColumns:
    return TypedColumns.of_log(fields, bool(json.loads(configuration.get(_PLACING, "{}")).get(_BARE)))


def _data_file(name: str, first: int, count: int, size: int, modified_ms: int, partition: int) -> DataFile:
    """A file of the log. Raises :class:`ValueError` if one value is wrong by itself or beside the others."""
    if not all(type(value) is int and value >= 0 for value in (first, count, size, modified_ms, partition)):
        raise ValueError(f"the file {name} has {(first, count, size, modified_ms, partition)}, which are not counts")
    file = DataFile(name, first, count, size, modified_ms, partition)
    if "\0" in name:  # of a percent sign in the path; the libraries have errors of their own for such a name
        raise ValueError(f"the name of the file {name!r} has a NUL")
    if "/" in name and not file.is_placed:
        raise ValueError(f"the file {name} has the partition {partition} and the first message {first}")
    return file


def read_table(files: Files, folder: str) -> tuple[Any, list[DataFile]]:
    """The table of a queue, opened by delta-rs, and its files; no table if nothing was written.

    Raises :class:`Diverged` if the log is damaged.
    """
    try:
        return _read_table(files, folder)
    except Diverged:
        if not drop_checkpoint(files, folder):
            raise
    return _read_table(files, folder)


def _read_table(files: Files, folder: str) -> tuple[Any, list[DataFile]]:
    from deltalake import DeltaTable

    if not files.names(f"{folder}/{LOG}"):
        return None, []
    with _log_is_read(files, folder):
        table = DeltaTable(files.table(folder))
        adds = table.get_add_actions(flatten=True)
        columns = (
            "path",
            "partition.first",
            "num_records",
            "size_bytes",
            "modification_time",
            "partition.partition",
        )
        rows = zip(*(adds[column].to_pylist() for column in columns))
        return table, [_data_file(unquote(path), *rest) for path, *rest in rows]


@contextlib.contextmanager
def _log_is_read(files: Files, folder: str) -> Iterator[None]:
    """Turn any error of delta-rs, or of its results, into one of damage, which names the entry if one is wrong."""
    try:
        yield
    except Exception as error:
        for damage in problems_of_log(files, folder):
            raise damage from error
        if isinstance(error, CuesError):
            raise
        reason = str(error).partition(": ParsedLogPath")[0]
        raise _damaged(f"The log of {files.url}/{folder} cannot be read: {reason}.") from error


def problems_of_log(files: Files, folder: str) -> Iterator[CuesError]:
    """The damage of the entries that are kept."""
    for name in files.names(f"{folder}/{LOG}"):
        raw = files.read(f"{folder}/{LOG}/{name}") if re.fullmatch(r"\d{20}\.json", name) else None
        if raw is not None:
            try:
                parsed_entry(files, f"{folder}/{LOG}/{name}", raw)
            except CuesError as error:
                yield error
