"""Salvage: everything that can be read of a damaged store, in a fresh store, and a list of what is missing.

    damaged store ──read page by page──▶ NEW/.salvaging/data.mdb ──check, rename──▶ NEW/data.mdb

1. The pages are read without LMDB (:mod:`cues.storage.pages`), so the store need not open, and no page ends the
   process. Pages that are free, or that two places name, have no owner.
2. Rows whose checksum holds are copied. A row that cannot be read is taken as the commit before the last one left it,
   if that state can still be read, and this is told.
3. Record batches with their indices and bytes, and values of state, are copied if their checksums hold. A batch that
   the last commit damaged may be whole in the state before.
4. Rows of logs that are missing are made of what was found; no index is given again to another message.
5. A timeline begins on every log, as after a restore. The new store is checked, and gets its name.

A gap stays a gap: the messages after it keep their indices, so all positions are right. A reader stops at a gap with
:class:`BatchDamaged`, which names it, and ``cues seek`` continues after it. A death leaves no store at NEW, and the
next salvage into it begins anew.

Not possible: a store both of whose first two pages are overwritten, or all pages of its unnamed database. Then no
record says which queue its pages are of.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from cues.base import clock, names
from cues.base.data import dataclass
from cues.base.names import ProcessorId
from cues.base.texts import count, quoted
from cues.errors import AlreadyRunning, StoreDamaged, StoreError, StoreFull, StoreNotFound
from cues.graphs.processor_rows import ProcessorInputs, ProcessorRow
from cues.queues.base import unpack_record
from cues.queues.log import KEY
from cues.records import batch, sealed
from cues.records.log_row import ROW, LogRow, unpack_row
from cues.records.positions import unpack_reader
from cues.storage import datafile, door, locks
from cues.storage.format_record import pack_record
from cues.storage.lmdb_errors import translate
from cues.storage.lmdb_map import MAP_BYTES
from cues.storage.pages import Census, DataFile, Entry, Lost, Meta, Root
from cues.storage.replica import UNNAMED, Replica, ReplicaWriter, put_in_place
from cues.tools import check

SALVAGING: Final = ".salvaging"
LOSSES_MAX: Final = 100_000
"""The largest number of losses that are listed; the summary counts all messages that are missing."""

Progress = Callable[[str, int, int], None]
"""Called with the part that is read, the entries or pages that are done, and their total number."""


@dataclass(frozen=True)
class Loss:
    """Something that the damaged store had, and the new one has not, or has in an older state."""

    kind: str
    """``messages``, ``row``, ``state``, ``older`` (as it was one commit earlier) or ``structure``."""
    name: str
    """The log, the row or the processor."""
    why: str
    first: int | None = None
    last: int | None = None
    """Of messages: the first and the last index that are missing."""
    unread_by: tuple[str, ...] = ()
    """Of messages: the processors that had not read all of them."""

    @property
    def text(self) -> str:
        """The loss as a sentence."""
        if self.kind == "messages":
            assert self.first is not None and self.last is not None
            several = f"The messages {self.first} to {self.last}" if self.last > self.first else f"Message {self.first}"
            verb = "are" if self.last > self.first else "is"
            unread = f" Not read yet by {', '.join(self.unread_by)}." if self.unread_by else ""
            return f"{several} of queue {self.name} {verb} missing: {self.why}.{unread}"
        if self.kind == "older":
            return f"{self.name[:1].upper()}{self.name[1:]} is as it was one commit earlier: {self.why}."
        if self.kind == "structure":
            return self.why
        return f"{self.name[:1].upper()}{self.name[1:]} is missing: {self.why}."

    def to_dict(self) -> dict[str, Any]:
        """Return the facts, as JSON has them."""
        found: dict[str, Any] = {"missing": self.kind, "name": self.name, "why": self.why}
        if self.first is not None and self.last is not None:
            queue, partition = names.split_log(self.name)
            found = {"missing": self.kind, "queue": queue, "partition": partition, "first": self.first}
            found |= {"last": self.last, "messages": self.last - self.first + 1, "why": self.why}
            found |= {"unread_by": list(self.unread_by)} if self.unread_by else {}
        return found


@dataclass
class Salvaged:
    """The result of a salvage."""

    path: str
    new: str
    commit: int
    """The number of the commit whose state was read."""
    queues: int = 0
    messages: int = 0
    values: int = 0
    """Values of keyed state."""
    missing_messages: int = 0
    losses: list[Loss] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return not self.losses


def salvage(path: str | os.PathLike[str], new: str | os.PathLike[str], progress: Progress | None = None) -> Salvaged:
    """Copy everything that can be read of the store at ``path`` into a fresh store at ``new``.

    The damaged store is only read. Every message whose record batch is whole keeps its index and its bytes; the losses
    name all others. Durability, id, identities, options, positions and keyed state stay, as far as they can be read.

    Raises :class:`StoreError` if there is a store at ``new``, :class:`AlreadyRunning` if a process has the damaged
    store open for writing, :class:`StoreNotFound`, :class:`StoreFull`; :class:`StoreVersion` for a newer format; and
    :class:`StoreDamaged` if nothing says which pages belong to which queue. Then there is no store at ``new``.
    """
    source, place = Path(path), Path(new)
    _refuse(source, place)
    work = place / SALVAGING
    is_new = not place.exists()
    try:
        with door.reading(source / "data.mdb") as file:
            walker = _Salvage(source, DataFile(file.fileno()), progress or (lambda what, done, total: None))
            shutil.rmtree(work, ignore_errors=True)
            door.folder(place)
            door.folder(work)
            walker.write(work / "data.mdb", place)
        datafile.sync_directory(work)
        walker.check(work)
        put_in_place(work / "data.mdb", place)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if is_new and place.exists() and not any(place.iterdir()):
            place.rmdir()
        if isinstance(error, OSError):
            raise _translated(error, place) from error
        raise
    shutil.rmtree(work, ignore_errors=True)
    return walker.done


def _translated(error: OSError, place: Path) -> BaseException:
    failed = translate(error, str(place))
    if isinstance(failed, StoreFull):
        hint = "free space there, or name a place on another disk."
        return StoreFull(f"The disk of {place} is full; nothing was salvaged.", hint, path=str(place))
    return failed


def _refuse(source: Path, place: Path) -> None:
    if not (source / "data.mdb").exists():
        raise StoreNotFound(
            f"There is no data.mdb in {source}.", "name the directory of the damaged store.", path=str(source)
        )
    if place.exists() and not place.is_dir():
        raise StoreError(f"{place} is a file; a store is a directory.", "give another path.", path=str(place))
    if (place / "data.mdb").exists():
        raise StoreError(
            f"There is a store at {place}; a salvage replaces none.",
            "name a directory without a store.",
            path=str(place),
        )
    pid = locks.opened_by(source / "locks")
    if pid is not None:
        raise AlreadyRunning(
            f"Process {pid} ({locks.process_state(pid)}) has the store {source} open for writing.",
            f"stop it first (cues status {quoted(source)} names the processors that it runs).",
            pid=pid,
        )


_ROW_NAMES: Final = {
    b"queue": "the record of queue {} (its identity and its options)",
    b"row": "the row of queue {} (its first and next index)",
    b"proc": "the position of the processor {}",
    b"topo": "the list of the inputs of the processor {}",
    b"sub": "the note of a reader, {}",
    b"reader": "the position of the named tailer, {}",
    b"claim": "the position of a consumer group, {}",
    b"low": "the low-water mark of a reader in another store, {}",
    b"producer": "the position of forwarding, {}",
    b"source": "the position of the external writer {}",
    b"store": "the path of the other store {}",
    b"schema": "the schema of records of columns, {}",
}


def _row_name(key: bytes) -> str:
    if key == names.FORMAT_KEY:
        return "the format record"
    kind, _, rest = key[1:].partition(b"\0")
    name = " ".join(part.decode("ascii", "backslashreplace") for part in rest.split(b"\0"))
    return _ROW_NAMES.get(kind, f"the row {kind.decode(errors='replace')} {{}}").format(name)


class _Salvage:
    def __init__(self, source: Path, file: DataFile, told: Progress) -> None:
        self._file = file
        self._told = told
        metas = [meta for meta in file.metas if self._has_rows(meta)]
        if not metas:
            raise StoreDamaged(
                f"Nothing can be salvaged of {source}: "
                + ("the rows" if file.metas else "the first two pages")
                + " that say which pages belong to which queue cannot be read.",
                "restore a backup (cues restore), or use a copy of the store.",
                path=str(source),
            )
        self.meta = metas[0]
        self.done = Salvaged(str(source), "", self.meta.txnid)
        self._reasons: dict[str, list[tuple[int, int, str]]] = {}
        """By log: ranges of indices that could not be read, and why."""
        self._times: dict[str, int] = {}
        """By log: the time of its last record."""
        self._ends: dict[str, tuple[int, int]] = {}
        """By log: the first index and the index after the last one that were found."""
        self._census = self._counted(self.meta)
        later = [meta for meta in file.metas if meta.txnid > self.meta.txnid]
        if later:
            self._lose("structure", "", f"The last commit, {later[0].txnid}, cannot be read; this is the one before.")
        # The pages of the state before are complete until the next commit, and the damage may be in newer ones.
        self._before = self._counted(metas[1]) if len(metas) > 1 else None
        self._old_rows: tuple[dict[bytes, bytes], dict[bytes, Root]] = ({}, {})
        self._rows, self._roots = self._read_rows()

    def _counted(self, meta: Meta) -> Census:
        return Census(self._file, meta, lambda done, total: self._told("pages", done, total))

    def _has_rows(self, meta: Meta) -> bool:
        entries = self._file.walk(meta.main, "", lambda page, pages, name, kind: None)
        return any(isinstance(entry, Entry) and entry.key.startswith(b"\0") for entry in entries)

    def _lose(self, kind: str, name: str, why: str, **places: Any) -> None:
        if len(self.done.losses) < LOSSES_MAX:
            self.done.losses.append(Loss(kind, name, why, **places))

    # --- rows ---

    def _read_rows(self) -> tuple[dict[bytes, bytes], dict[bytes, Root]]:
        rows: dict[bytes, bytes] = {}
        roots: dict[bytes, Root] = {}
        lost: list[Lost] = []
        for entry in self._file.walk(self.meta.main, "the rows of the store", self._census.claim):
            if isinstance(entry, Lost):
                lost.append(entry)
            elif entry.root is not None:
                roots[entry.key] = entry.root
            elif check.is_sound(UNNAMED, entry.key, entry.value):
                rows[entry.key] = entry.value
            elif (key := sealed.key_of(entry.key, entry.value)) is not None:
                rows[key] = entry.value
                why = f"A bit of the key of {_row_name(key)} was wrong ({entry.key!r}); the row is as it was written."
                self._lose("structure", "", why)
            else:
                lost.append(Lost(entry.key, entry.key + b"\0", "its checksum fails"))
        if self._before is not None:
            old_rows, old_roots = self._old_rows
            main = self._before.meta.main
            for entry in self._file.walk(main, "the rows of the store", self._before.claim):
                if isinstance(entry, Entry) and entry.root is not None:
                    old_roots[entry.key] = entry.root
                elif isinstance(entry, Entry) and check.is_sound(UNNAMED, entry.key, entry.value):
                    old_rows[entry.key] = entry.value
        for low, high, why in lost:
            self._replace_row(low, high, why, rows, roots)
        if names.FORMAT_KEY not in rows:
            record = {"format": datafile.FORMAT, "requires": sorted(datafile.FEATURES), "id": os.urandom(8)}
            record |= {"durability": "disk", "map_size": MAP_BYTES, "created_ns": clock.now_ns()}
            rows.update((key, row) for key, raw in list(rows.items()) if (row := sealed.renewed(key, raw)))
            rows[names.FORMAT_KEY] = pack_record(record)
            self._lose("row", "the format record", 'the new store has another id, and durability "disk"')
        return rows, roots

    def _replace_row(
        self, low: bytes, high: bytes | None, why: str, rows: dict[bytes, bytes], roots: dict[bytes, Root]
    ) -> None:
        """Take what is lost of the rows from the state before the last commit."""
        old_rows, old_roots = self._old_rows
        inside = [key for key in (*old_rows, *old_roots) if key >= low and (high is None or key < high)]
        one = high == low + b"\0"
        if one and not inside:
            self._lose("row", _row_name(low), why)
        elif not one:
            self._lose("structure", "", f"Rows from {low!r} to {high!r} cannot be read: {why}.")
        for key in inside:
            if key in old_roots:
                roots.setdefault(key, old_roots[key])
            elif key not in rows:
                rows[key] = old_rows[key]
                self._lose("older", _row_name(key), why)

    # --- the new store ---

    def write(self, file: Path, place: Path) -> None:
        """Write everything that was found into a new data file."""
        self.done.new = str(place)
        records = self._queue_records()
        logs = self._logs(records)
        with Replica(file) as replica:
            replica.fill(self._works(logs))
            rows = self._log_rows(logs, records)
            replica.commit(lambda writer: self._put_rows(writer, rows))
            self._find_gaps(replica, logs, rows)
            replica.begin_timeline()

    def _queue_records(self) -> dict[str, dict[str, Any]]:
        """Return the records of the queues; those that are missing are made of the rows of their logs."""
        records = {}
        for key, raw in self._rows.items():
            if key.startswith(prefix := names.queue_key("")):
                queue = key[len(prefix) :].decode("utf-8", "replace")
                records[queue] = unpack_record(queue, raw)
        for key in (*self._rows, *self._roots):
            for prefix in (names.row_key("", 0), names.log_database("", 0)):
                if not key.startswith(prefix):
                    continue
                queue, partition = names.split_log(key[len(prefix) :].decode("utf-8", "replace"))
                if queue not in records or partition >= records[queue]["partitions"]:
                    row = self._rows.get(row_key := names.row_key(queue, partition))
                    identity = unpack_row(row_key, row).identity if row else os.urandom(8)
                    known = records.get(queue) or {"identity": identity, "options": {}, "schema": None, "version": 1}
                    options = known["options"] | ({"partitions": partition + 1} if partition else {})
                    made = known | {"partitions": partition + 1, "options": options, "created_ns": clock.now_ns()}
                    records[queue] = made
                    record_key = names.queue_key(queue)
                    self._rows[record_key] = sealed.seal(record_key, sealed.pack_map(made))
                    self._lose("row", f"the record of queue {queue}", "it has the default options now")
        return records

    @staticmethod
    def _logs(records: dict[str, dict[str, Any]]) -> list[str]:
        return [
            names.log_id(queue, partition)
            for queue, record in sorted(records.items())
            for partition in range(record["partitions"])
        ]

    def _works(self, logs: list[str]) -> Iterator[Callable[[ReplicaWriter], int]]:
        for log in logs:
            yield from self._copy_log(log)
        for name in sorted({*self._roots, *self._old_rows[1]}):
            kind = name.partition(b":")[0]
            if kind == b"state":
                yield from self._copy_state(name)
            elif name == names.ERRORS_DATABASE:
                yield from self._copy_errors(name)

    def _trees(self, name: bytes) -> Iterator[tuple[Census, Root, bool]]:
        """The tree of a database after the last commit, and after the one before: its number of entries, and whether
        it is the older one."""
        if name in self._roots:
            yield self._census, self._roots[name], False
        if self._before is not None and name in self._old_rows[1]:
            yield self._before, self._old_rows[1][name], True

    # --- logs ---

    def _copy_log(self, log: str) -> Iterator[Callable[[ReplicaWriter], int]]:
        name = b"log:" + log.encode()
        raw = self._rows.get(row_key := names.row_key(log, 0))
        front = unpack_row(row_key, raw).first if raw else 0
        reasons = self._reasons.setdefault(log, [])

        def make(writer: ReplicaWriter) -> int:
            writer.handle(name)
            return 0

        yield make
        if not any(self._trees(name)):
            reasons.append((0, 1 << 64, "the root of its records cannot be read"))
        for census, root, is_older in self._trees(name):
            if is_older and not reasons:
                return  # the last state is whole
            done = 0
            for first, value, pieces in self._records(census, root, log, reasons):
                done += 1 + len(pieces)
                self._told(log, min(done, root.entries), root.entries)
                problem, opened = check.whole_record(first, value, pieces)
                if problem or opened is None:
                    reasons.append((first, first + 1, f"the record batch at {first} is damaged ({problem})"))
                    continue
                if opened.next <= front:
                    continue  # it was purged
                yield self._put_record(name, log, opened, pieces)

    def _put_record(
        self, name: bytes, log: str, opened: batch.Batch, pieces: list[tuple[bytes, bytes]]
    ) -> Callable[[ReplicaWriter], int]:
        def put(writer: ReplicaWriter) -> int:
            database = writer.handle(name)
            if not writer.txn.put(KEY.pack(opened.first), opened.value, overwrite=False, db=database):
                return 0
            for key, piece in pieces:
                writer.txn.put(key, piece, db=database)
            first, end = self._ends.get(log, (opened.first, 0))
            self._ends[log] = min(first, opened.first), max(end, opened.next)
            self._times[log] = max(self._times.get(log, 0), opened.head.time_ns)
            self.done.messages += opened.head.count
            return len(opened.value) + sum(len(piece) for _, piece in pieces)

        return put

    def _records(
        self, census: Census, root: Root, log: str, reasons: list[tuple[int, int, str]]
    ) -> Iterator[tuple[int, bytes, list[tuple[bytes, bytes]]]]:
        """Iterate over the records of a log, each with its pieces; note ranges that are lost."""
        record: tuple[int, bytes, list[tuple[bytes, bytes]]] | None = None
        for entry in self._file.walk(root, f"the database log:{log}", census.claim):
            if isinstance(entry, Lost):
                low = int.from_bytes(entry.low[:8].ljust(8, b"\0"), "big")
                high = 1 << 64 if entry.high is None else int.from_bytes(entry.high[:8].ljust(8, b"\0"), "big")
                reasons.append((low, max(high, low + 1), entry.why))
            elif len(entry.key) == 12:
                if record is not None and entry.key[:8] == KEY.pack(record[0]):
                    record[2].append((entry.key, entry.value))
            elif len(entry.key) == 8 and entry.root is None:
                if record is not None:
                    yield record
                record = KEY.unpack(entry.key)[0], entry.value, []
            else:
                reasons.append((0, 1 << 64, f"there is a key of {len(entry.key)} bytes"))
        if record is not None:
            yield record

    def _log_rows(self, logs: list[str], records: dict[str, dict[str, Any]]) -> dict[str, LogRow]:
        """Return the row of each log, so that it counts all messages that were found, and no index is used again."""
        found = {}
        for log in logs:
            record = records[names.split_log(log)[0]]
            raw = self._rows.get(row_key := names.row_key(log, 0))
            first, end = self._ends.get(log, (0, 0))
            if raw is None:
                end = max(end, self._largest_position(log), 1)
                row = LogRow(record["identity"], first or end, end, self._times.get(log, 0), record["version"])
                self._lose("row", f"the row of queue {log}", f"its next index is {end} now, after what was found")
            else:
                row = unpack_row(row_key, raw, log)
                if row.identity != record["identity"]:
                    self._lose("structure", "", f"The row of queue {log} had the identity of another queue.")
                row = row._replace(
                    identity=record["identity"],
                    next=max(row.next, end),
                    time_ns=max(row.time_ns, self._times.get(log, 0)),
                )
            found[log] = row
            self._rows[row_key] = sealed.seal(row_key, ROW.pack(*row))
        return found

    def _positions(self) -> Iterator[tuple[str, str, int]]:
        """Iterate over the positions in this store: the reader, the log, and the index that is read next."""
        for key, raw in self._rows.items():
            if key.startswith(names.PROCESSORS):
                processor = ProcessorId(key[len(names.PROCESSORS) :].decode("utf-8", "replace"))
                topology = self._rows.get(inputs_key := names.topology_key(processor))
                if topology is not None:
                    inputs = ProcessorInputs.unpack(inputs_key, topology, processor)
                    places = ProcessorRow.unpack(key, raw, processor).positions
                    for log, store, position in zip(inputs.queues, inputs.stores, places):
                        if not store:
                            yield processor, log, position.next
            elif key.startswith(names.READERS):
                log, _, name = key[len(names.READERS) :].decode("utf-8", "replace").partition("\0")
                yield f"the named tailer {name!r}", log, unpack_reader(key, raw, log, name).next

    def _largest_position(self, log: str) -> int:
        return max((next for _, of, next in self._positions() if of == log), default=0)

    def _find_gaps(self, replica: Replica, logs: list[str], rows: dict[str, LogRow]) -> None:
        positions = list(self._positions())
        self.done.queues = len({names.split_log(log)[0] for log in logs})
        with replica.moment() as moment:
            for log in logs:
                row = rows[log]
                expected = row.first
                for key, value in moment.txn.cursor(moment.handle(b"log:" + log.encode())):
                    if len(key) != 8:
                        continue
                    first = KEY.unpack(key)[0]
                    if first > expected:
                        self._lose_messages(log, expected, first - 1, positions)
                    expected = max(expected, first + batch.count_of(value))
                if row.next > expected:
                    self._lose_messages(log, expected, row.next - 1, positions)

    def _lose_messages(self, log: str, first: int, last: int, positions: list[tuple[str, str, int]]) -> None:
        self.done.missing_messages += last - first + 1
        why = next(
            (why for low, high, why in self._reasons.get(log, ()) if low <= last and high > first),
            "there are no records of them",
        )
        unread = tuple(sorted(name for name, of, next in positions if of == log and next <= last))
        self._lose("messages", log, why, first=first, last=last, unread_by=unread)

    # --- state ---

    def _copy_state(self, name: bytes) -> Iterator[Callable[[ReplicaWriter], int]]:
        owner = name.partition(b":")[2].decode("utf-8", "replace")
        lost: dict[bytes | None, str] = {}
        """By row of the state, or None for a range of rows."""
        for census, root, is_older in self._trees(name):
            if is_older and not lost and name in self._roots:
                break
            done = 0
            for row, pieces in self._values(census, root, name, lost):
                done += len(pieces)
                self._told(f"state of {owner}", min(done, root.entries), root.entries)
                problem = check.state_fault(row, pieces)
                if problem:
                    lost[row] = problem
                elif not is_older:
                    yield self._put_value(name, row, pieces)
                elif row in lost or None in lost or name not in self._roots:
                    yield self._put_value(name, row, pieces, owner)
                    lost.pop(row, None)
        for key, why in lost.items():
            if key is None:
                self._lose("state", f"a part of the state of {owner}", why)
            else:
                self._lose(
                    "state", f"the value of the row {key[:24].hex()} of the state of {owner}", f"it is one {why}"
                )

    def _values(
        self, census: Census, root: Root, name: bytes, lost: dict[bytes | None, str]
    ) -> Iterator[tuple[bytes, list[tuple[int, bytes]]]]:
        """Iterate over the values of state, each with the numbers and the bytes of its pieces."""
        row: bytes | None = None
        pieces: list[tuple[int, bytes]] = []
        for entry in self._file.walk(root, f"the database {name.decode(errors='replace')}", census.claim):
            if isinstance(entry, Lost):
                lost[None] = entry.why
                continue
            if row is not None and entry.key[:-2] != row:
                yield row, pieces
                pieces = []
            row = entry.key[:-2]
            pieces.append((int.from_bytes(entry.key[-2:], "big"), entry.value))
        if row is not None:
            yield row, pieces

    def _put_value(
        self, name: bytes, row: bytes, pieces: list[tuple[int, bytes]], older: str = ""
    ) -> Callable[[ReplicaWriter], int]:
        def put(writer: ReplicaWriter) -> int:
            database = writer.handle(name)
            for number, value in pieces:
                if not writer.txn.put(row + number.to_bytes(2, "big"), value, overwrite=False, db=database):
                    return 0
            if older:
                what = f"the value of the row {row[:24].hex()} of the state of {older}"
                self._lose("older", what, "the page of its last value cannot be read")
            self.done.values += 1
            return sum(len(value) for _, value in pieces)

        return put

    def _copy_errors(self, name: bytes) -> Iterator[Callable[[ReplicaWriter], int]]:
        for census, root, is_older in self._trees(name):
            is_whole = True
            for entry in self._file.walk(root, "the database errors", census.claim):
                if isinstance(entry, Lost):
                    is_whole = False
                    self._lose("row", "a row about error messages", entry.why)
                elif not check.is_sound(names.ERRORS_DATABASE, entry.key, entry.value):
                    is_whole = False
                    self._lose("row", f"the row about the error message {entry.key.hex()}", "its checksum fails")
                else:
                    yield self._put_row(name, entry, is_older)
            if is_whole:
                return

    def _put_row(self, name: bytes, entry: Entry, is_older: bool) -> Callable[[ReplicaWriter], int]:
        def put(writer: ReplicaWriter) -> int:
            added = writer.txn.put(entry.key, entry.value, overwrite=False, db=writer.handle(name))
            if added and is_older:
                self._lose("older", f"the row {entry.key.hex()} about an error message", "its page cannot be read")
            return len(entry.value)

        return put

    # --- the end ---

    def _put_rows(self, writer: ReplicaWriter, rows: dict[str, LogRow]) -> None:
        writer.put(UNNAMED, sorted(self._rows.items()), False)

    def check(self, work: Path) -> None:
        """Check the new store; what contradicts itself in it is listed, except the gaps."""
        for problem in check.walk(str(work), self._told):
            if not check.is_gap(problem):
                self._lose("structure", "", problem)
        if not self.done.losses:
            return
        for problem in self._census.problems[:20]:
            if problem.startswith("The list of free pages"):
                self._lose("structure", "", problem + " Pages that were free may have been read as messages.")


def summary(done: Salvaged) -> str:
    """Return the result as one sentence."""
    found = (
        f"{count(done.queues, 'queue')}, {count(done.messages, 'message')} and {count(done.values, 'value')} of state"
    )
    text = f"{done.new}: salvaged {found} of {done.path}"
    if done.is_whole:
        return f"{text}; nothing is missing"
    listed = "1 loss is" if len(done.losses) == 1 else f"{len(done.losses):,} losses are"
    return f"{text}; {count(done.missing_messages, 'message')} missing, {listed} listed"
