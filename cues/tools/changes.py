"""The changes of a store since a cut: for backups and followers.

    cut        what a copy has: for each log its end; for all other rows, checksums of short ranges of keys
    changes    what a copy with that cut lacks; without a cut, everything

**A log** gets records at its end and loses records at its front; a record never changes. So its changes are the records
from the end of the cut on, and the key of its first record. The cut keeps the checksum of the last record, and
the timelines: a log that was put back since, or made anew, is copied as a whole.

**Other rows** (positions, options, state …) change anywhere. They are cut into ranges of some 16 rows. A range begins
at a key whose hash says so, whatever the keys beside it are; so one changed row changes one range. A range with other
rows than in the cut is replaced as a whole, which also removes the rows that were deleted.

A copy is complete after all changes or after none: they are applied in one transaction. Each of them can be applied
again.

    [b"new"]                            remove everything
    [b"drop", database]                 remove a database
    [b"log", database, key]             remove the records before this key; all without a key
    [b"range", database, key, key]      remove the rows from one key to the other (nil: to the end)
    [b"rows", database, [key, value, …]]
    [b"end", database, count]           the number of its rows now

Not guaranteed: that a change of a record in place would be noticed. Nothing in Cues makes one.

The state of a processor is read as a whole, unless its row and the end of its try log are those of the cut.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any, Final, NamedTuple

import xxhash

from cues import codec
from cues.arguments import NEWER
from cues.base import names
from cues.base.data import dataclass
from cues.base.names import ProcessorKey
from cues.base.texts import quoted
from cues.errors import StoreDamaged, StoreError
from cues.graphs.processor_rows import all_keys
from cues.queues.log import KEY
from cues.records import batch
from cues.records.log_row import LogRow, unpack_row
from cues.storage import timeline
from cues.storage.replica import UNNAMED, Moment, ReplicaWriter
from cues.tools import check

_ROWS_MASK: Final = 15
"""A range has 16 rows on average. Longer ranges copy more rows for each changed one; shorter ones make a larger cut."""
_PUT_BYTES: Final = 256 << 10
"""Bytes of the rows of one change."""
_LOG: Final = b"log:"
_STATE: Final = b"state:"
_END_OF_ROWS: Final = b"\1"
"""The end of the rows of the unnamed database; the entries of LMDB for named databases are after it."""
_LENGTHS: Final = struct.Struct(">II")

Change = list[Any]


class LogCut(NamedTuple):
    """The end of a log."""

    identity: bytes
    next: int
    seal: bytes
    """The checksum of the last record; empty if there is none."""
    lines: list[bytes]
    """The ids of its timelines."""


class RowsCut(NamedTuple):
    """The ranges of a database."""

    guard: bytes
    """Changes with every change of the database; empty if nothing is known that does."""
    ranges: list[list[bytes]]
    """First key and checksum of each range."""


@dataclass
class Cut:
    """The contents of a copy of a store."""

    store: bytes
    """The id of the store."""
    number: int
    """The number of the last commit of the store that the copy has."""
    logs: dict[bytes, LogCut] = field(default_factory=dict)
    rows: dict[bytes, RowsCut] = field(default_factory=dict)
    appended: int = 0
    """Messages ever appended to the queues of users, for estimates of a rate."""

    def pack(self) -> bytes:
        logs, rows = ({name: list(cut) for name, cut in cuts.items()} for cuts in (self.logs, self.rows))
        return codec.pack([self.store, self.number, logs, rows, self.appended])

    @staticmethod
    def unpack(raw: bytes) -> Cut:
        store, number, logs, rows, appended = codec.unpack(raw)
        return Cut(
            store,
            number,
            {name: LogCut(*cut) for name, cut in logs.items()},
            {name: RowsCut(*cut) for name, cut in rows.items()},
            appended,
        )


class Changes:
    """Iterates over what a copy with ``before`` lacks; :attr:`cut` is what it has when all of it is applied."""

    def __init__(self, moment: Moment, id: bytes, before: Cut | None, path: str) -> None:
        if before is not None and (before.store != id or before.number > moment.number):
            before = None  # another store, or an older one was put in its place
        self.before = before
        self.cut = Cut(id, moment.number)
        self.records = 0
        """Records that were read."""
        self._moment = moment
        self._guards = _Guards(moment)
        self._path = path

    def __iter__(self) -> Iterator[Change]:
        moment, before, cut = self._moment, self.before, self.cut
        databases = moment.databases()
        if before is None:
            yield [b"new"]
        else:
            for gone in sorted((before.logs.keys() | before.rows.keys()) - {*databases, UNNAMED}):
                yield [b"drop", gone]
        for name in databases:
            if name.startswith(_LOG):
                yield from self._log(name, before.logs.get(name) if before else None)
                now = cut.logs[name]
                cut.appended += now.next - 1 if b"." not in name else 0
            else:
                yield from self._rows(name, before.rows.get(name) if before else None)
            yield [b"end", name, moment.entries(name)]
        yield from self._rows(UNNAMED, before.rows.get(UNNAMED) if before else None)

    def _log(self, name: bytes, before: LogCut | None) -> Iterator[Change]:
        txn, database = self._moment.txn, self._moment.handle(name)
        row, lines = _log_row(txn, name)
        cursor = txn.cursor(database)
        # Keys of pieces have the key of their record as a prefix, so they are after it.
        start = KEY.pack(before.next) if before is not None and _follows(cursor, before, row, lines) else b""
        yield [b"log", name, cursor.key() if start and cursor.first() else b""]
        if cursor.set_range(start) if start else cursor.first():
            yield from self._put(name, self._checked(name, cursor.iternext()))
        seal = _last_seal(txn.cursor(database), None)
        self.cut.logs[name] = LogCut(row.identity, row.next, seal, [id for _, id in lines])

    def _checked(self, name: bytes, rows: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for key, value in rows:
            # A piece has its number as the seed, and a record its index.
            number = KEY.unpack(key)[0] if len(key) == 8 else int.from_bytes(key[8:], "big")
            if not batch.intact(value, number):
                raise self._damaged(f"record {key.hex()} of {name.decode()}")
            yield key, value

    def _damaged(self, what: str) -> StoreDamaged:
        return StoreDamaged(
            f"The {what} in {self._path} is damaged (its checksum fails), so the store was not copied.",
            f"run cues check {quoted(self._path)}, which names everything that is damaged; cues salvage copies the rest"
            " into a new store.",
            path=self._path,
        )

    def _rows(self, name: bytes, before: RowsCut | None) -> Iterator[Change]:
        moment = self._moment
        guard = self._guards.of(name)
        if before is not None and guard and guard == before.guard:
            self.cut.rows[name] = before
            return
        known = {} if before is None else {start: (checksum, end) for start, checksum, end in _ends(before.ranges)}
        ranges: list[list[bytes]] = []
        last = _END_OF_ROWS if name == UNNAMED else None
        for start, rows, end in _ranges(moment, name):
            checksum = _checksum(rows)
            ranges.append([start, checksum])
            if known.get(start) == (checksum, end):
                continue
            for key, value in rows:
                if not check.is_sound(name, key, value):
                    raise self._damaged(f"row {key!r}" + (f" of {name.decode()}" if name else ""))
            yield [b"range", name, start, last if end is None else end]
            yield from self._put(name, rows)
        self.cut.rows[name] = RowsCut(guard, ranges)

    def _put(self, name: bytes, rows: Iterable[tuple[bytes, bytes]]) -> Iterator[Change]:
        size = 0
        flat: list[bytes] = []
        for key, value in rows:
            flat += (key, value)
            size += len(key) + len(value)
            self.records += 1
            if size >= _PUT_BYTES:
                yield [b"rows", name, flat]
                size, flat = 0, []
        if flat:
            yield [b"rows", name, flat]


def cut_of(moment: Moment, id: bytes, number: int) -> Cut:
    """Return the cut of a copy: what it has. ``number`` is the last commit of its store that it has."""
    cut = Cut(id, number)
    for name in moment.databases():
        if name.startswith(_LOG):
            row, lines = _log_row(moment.txn, name)
            seal = _last_seal(moment.txn.cursor(moment.handle(name)), None)
            cut.logs[name] = LogCut(row.identity, row.next, seal, [line for _, line in lines])
            cut.appended += row.next - 1 if b"." not in name else 0
    guards = _Guards(moment)
    for name in (*moment.databases(), UNNAMED):
        if not name.startswith(_LOG):
            found = [[start, _checksum(rows)] for start, rows, _ in _ranges(moment, name)]
            cut.rows[name] = RowsCut(guards.of(name), found)
    return cut


def apply(writer: ReplicaWriter, change: Change) -> int:
    """Apply one change in a write transaction; return how many bytes it wrote. Raises :class:`StoreError`."""
    kind, *rest = change
    if kind == b"rows":
        name, flat = rest
        writer.put(name, list(zip(flat[::2], flat[1::2])), name.startswith(_LOG))
        return sum(map(len, flat))
    if kind == b"new":
        for name in writer.names():
            writer.drop(name)
        writer.delete_range(UNNAMED, b"", None)
    elif kind == b"drop":
        writer.drop(rest[0])
    elif kind == b"log":
        name, floor = rest
        writer.delete_range(name, b"", floor or None)
    elif kind == b"range":
        writer.delete_range(*rest)
    elif kind == b"end":
        name, count = rest
        if writer.entries(name) != count:
            raise StoreError(
                f"The copy of {name.decode()} has {writer.entries(name):,} rows, and the store had {count:,}.",
                "make a new copy; please report this.",
            )
    else:
        raise StoreError(f"A change of the kind {kind!r} is not known.", NEWER)
    return 0


def _log_row(txn: Any, name: bytes) -> tuple[LogRow, timeline.Line]:
    log = name.removeprefix(_LOG).decode()
    raw = txn.get(key := names.row_key(log, 0))
    if raw is None:
        raise StoreDamaged(f"The log {log} has no row.", "run cues check on the store.", path="")
    return unpack_row(key, raw, log), timeline.read(txn, log)


def _follows(cursor: Any, before: LogCut, row: LogRow, lines: timeline.Line) -> bool:
    """Return whether a log begins with the messages of the cut, except for those that were removed from its front."""
    if before.identity != row.identity or before.next > row.next:
        return False
    if any(id not in before.lines for _, id in lines):
        return False  # it was put back or salvaged since: it has other messages, or lacks some
    seal = _last_seal(cursor, KEY.pack(before.next))
    return not seal or seal == before.seal


def _last_seal(cursor: Any, end: bytes | None) -> bytes:
    """Return the checksum of the last record before ``end``; empty if there is none."""
    alive = cursor.last() if end is None or not cursor.set_range(end) else cursor.prev()
    while alive and len(cursor.key()) != 8:
        alive = cursor.prev()
    return bytes(cursor.value()[:8]) if alive else b""


def _ranges(moment: Moment, name: bytes) -> Iterator[tuple[bytes, list[tuple[bytes, bytes]], bytes | None]]:
    """Iterate over the ranges of a database: first key, rows, and the first key of the next range.

    The first range begins before every key, and there is at least one.
    """
    cursor = moment.txn.cursor(moment.handle(name)) if name else moment.txn.cursor()
    start: bytes = b""
    rows: list[tuple[bytes, bytes]] = []
    for key, value in cursor if cursor.first() else ():
        if name == UNNAMED and key >= _END_OF_ROWS:
            break
        if rows and not xxhash.xxh3_64_intdigest(key) & _ROWS_MASK:
            yield start, rows, key
            start, rows = key, []
        rows.append((key, value))
    yield start, rows, None


def _ends(ranges: list[list[bytes]]) -> Iterator[tuple[bytes, bytes, bytes | None]]:
    """Iterate over the ranges of a cut: first key, checksum, and the first key of the next range."""
    for (start, checksum), after in itertools.zip_longest(ranges, ranges[1:]):
        yield start, checksum, after[0] if after else None


def _checksum(rows: list[tuple[bytes, bytes]]) -> bytes:
    parts: list[bytes] = []
    for key, value in rows:
        parts += (_LENGTHS.pack(len(key), len(value)), key, value)
    return xxhash.xxh3_128_digest(b"".join(parts))


class _Guards:
    """Bytes that differ if the state of a processor differs: of its row, its try log's, and LMDB's entry."""

    def __init__(self, moment: Moment) -> None:
        self._txn = moment.txn
        self._ids = {key: id for id, key in all_keys(moment.txn).items()}

    def of(self, name: bytes) -> bytes:
        """Return the guard of a database; empty if nothing is known that changes with it."""
        key = ProcessorKey(name.removeprefix(_STATE).decode("utf-8", "replace"))
        if not name.startswith(_STATE) or key not in self._ids:
            return b""  # the state of a checkpoint, for example, which has no such rows
        # LMDB's entry of the database has the number of its root page, which every commit that changes it replaces.
        row, tries = names.processor_key(self._ids[key]), names.row_key(key, 0)
        rows = [self._txn.get(key) for key in (row, tries, name)]
        return b"" if None in rows else xxhash.xxh3_128_digest(b"".join(rows))
