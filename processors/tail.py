"""One path that is followed through its rotations, as ``tail -F`` does, but with files that are known, and in order.

    state[n] = [device, inode, size, head, end, compressed, modified]   the n-th rotated file that was read to its end
    state[-2] = [problem, device, inode]                                what was said of the file at the path

``head`` and ``end`` are checksums of the first and last 1,024 bytes as they are stored. A rotated file is known by its
inode and head; or, after it was copied or restored, by its size, head and end; or, after it was compressed, by those of
its uncompressed bytes. Files are read in the order of rotation, so the known ones are the oldest that are there, and
the last rows: a new file that is equal to an old one is not taken for it. If names are in another order, a file is
known whose row is the same in all parts, the time of its last write included: it was not touched.

A file that is damaged is one error message, and counts as read to its end when it is rotated. At the path, it is read
again when it has changed: a program may be writing it.

The order of rotated files, the oldest first:

    app.log.9 … app.log.1          a number of up to five digits after the path: the highest is the oldest
    app-1.log … app-9.log          such a number elsewhere (``rotated="app-*.log"``): the lowest is the oldest
    app.log-20260131, …            a time, of six digits or more: the earliest is the oldest
    anything else, or a mixture    the time of the last write
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, suppress
from typing import IO, Any, Final, NamedTuple, Protocol

from cues.processors import files, opened_file, places
from cues.processors.known_files import Former, Identity, Progress
from cues.processors.opened_file import FINGERPRINT_BYTES, Opened, checksum, is_damage, is_inode, open_file, stat_of

ROWS_MAX: Final = 1_000
"""Rotated files of a path that are known. Of more, the rows of those that are gone are deleted, the oldest first."""

_RECORDS_AT_ONCE: Final = 500
"""Records of a growing file that are read before it is looked at again, whether it is still the same."""
_EMPTY_BYTES_MAX: Final = 1_000
"""A larger compressed file is not that of an empty one: an archive has the name of the file twice."""
_TIME_DIGITS: Final = 6
"""Digits in a name that are a time, and not a number."""

_PROBLEM: Final = -2
"""The row of the problem that was said of the file at the path."""

_log = logging.getLogger("cues.processors")


class Source(opened_file.Source, Protocol):
    """The options of :class:`cues.processors.file_source.Files` that are needed here."""

    rotated: str | None
    grace_s: float

    def item(self, name: str, record: files.Record) -> files.Row | Exception: ...

    def problem(self, name: str, place: Progress, error: Exception) -> str: ...

    def bad_file(self, name: str, place: Progress, problem: str) -> files.Row | Exception: ...


class Waiting(Protocol):
    def moved(self) -> None: ...

    def wait(self, at_end: bool = True, pause_s: float = 0.0) -> bool: ...


class Others(Protocol):
    """Several logs, of which each has its own tail (families.py)."""

    def members(self, name: str) -> dict[str, places.Stat]:
        """Return the rotated files of a log."""

    def has_left(self, file: places.Stat, members: dict[str, places.Stat]) -> bool:
        """Return whether a file that is not at the path of its log was rotated or deleted."""


class Idle(NamedTuple):
    """In place of a record: there is none now. ``at_end``: no file that is known has more to be read."""

    at_end: bool = True


class Rotated(NamedTuple):
    """A file that was read to its end."""

    device: int
    inode: int
    size: int
    head: bytes
    end: bytes
    compressed: bool
    modified_ns: int = -1
    """The time of its last write; -1 in rows of an earlier version."""


class Tail:
    """The records of one path and its rotations."""

    def __init__(
        self,
        source: Source,
        state: MutableMapping[Any, Any],
        log: str | bytes | None = None,
        others: Others | None = None,
        rows_max: int = ROWS_MAX,
        rows: Mapping[int, Any] | None = None,
    ) -> None:
        """``log``: the name under which this one of several logs (``others``) has its rows, which are ``rows``."""
        self._source, self._state = source, state
        self._log, self._others, self._rows_max = log, others, rows_max
        self._where = places.Local()
        stored = state if rows is None else rows
        # An earlier version noted empty files, which are known by nothing but an inode that the next file may get.
        self._rows = {n: row for n, row in _rows_of(stored) if row.size}
        self._seen: dict[str, tuple[places.Stat, int | None]] = {}
        """By name, a rotated file as it was when it was compared, and the number of its row."""
        self._stored: dict[str, Rotated] = {}
        self._contents: dict[Rotated, tuple[int, bytes, bytes] | None] = {}
        """The uncompressed bytes of compressed files, which take long to read."""
        self._problem: list[Any] = [*stored.get(_PROBLEM, ())]
        self._said: Progress | None = None
        """The position of which it was said that no file has the rest."""
        self.opened: Opened | None = None

    def records(self, place: Progress) -> Iterator[tuple[Progress, Any]]:
        """Yield the records after ``place``, each with the position after it, and :class:`Idle` if there is none."""
        try:
            while True:
                opened = self.opened = self._continued(place)
                if opened is None:
                    yield place, Idle()
                    continue
                place = opened.start
                try:
                    for record in self._grown(opened):
                        if isinstance(record, Idle):
                            yield place, record
                            continue
                        current = opened.identity(record.offset)
                        place = Progress(place.serial, current, record.offset, record.line)
                        self._note_problem([])
                        yield place, self._source.item(opened.name, record)
                    if opened.whole:
                        self._finish(opened)
                        place = place.next()
                except Exception as error:
                    if not is_damage(error, remote=False):
                        raise
                    problem = self._source.problem(opened.name, place, error)
                    row = [checksum(problem.encode("utf-8", "replace")), *opened.start_stat[:2]]
                    bad = None if row == self._problem else self._source.bad_file(opened.name, place, problem)
                    is_at_path = opened.is_at(self._source.pattern)
                    if is_at_path:
                        place = place.reread()
                        self._note_problem(row)
                    else:
                        self._finish(opened)
                        place = place.next()
                    if bad is not None or not is_at_path:
                        yield place, bad
                    while opened.is_at(self._source.pattern) and opened.stat() == opened.start_stat:
                        yield place, Idle()
                opened.close()
                self.opened = None
        finally:
            if self.opened is not None:
                self.opened.close()
                self.opened = None

    def _grown(self, opened: Opened) -> Iterator[files.Record | Idle]:
        """Yield the records of a file while it grows, until it is whole or is not the same file."""
        path = self._source.pattern
        rotated = None if opened.is_at(path) else time.monotonic()
        read = opened.offset
        while True:
            if not read and opened.start.current is None and rotated is None and self._unread():
                opened.whole = False
                return  # the beginning is in a copy
            opened.whole = rotated is not None and time.monotonic() - rotated >= opened.grace_s()
            records = opened.records(complete=opened.whole)
            moved = False
            while batch := list(itertools.islice(records, _RECORDS_AT_ONCE)):
                if not opened.is_same(batch[-1].offset):
                    opened.whole = False
                    return  # truncated, and perhaps written again, while it was read
                yield from batch
                moved, read = True, batch[-1].offset
            if moved:
                rotated = rotated and time.monotonic()
            elif not opened.is_same(read):
                opened.whole = False
                return  # truncated: the rest is in a copy
            elif opened.whole:
                return
            elif rotated is None and not opened.is_at(path) and self._has_left(opened):
                rotated = time.monotonic()
            else:
                yield Idle(rotated is None and not opened.waits)

    def _has_left(self, opened: Opened) -> bool:
        """Return whether a file that is not at the path was rotated; alone, when another one is there."""
        if self._others is None:
            return os.path.exists(self._source.pattern)
        return self._others.has_left(opened.start_stat, self._rotated())

    # --- which file is next ---

    def _continued(self, place: Progress) -> Opened | None:
        """Open the file of a position, wherever it is now, or the one after it; None if no file is there yet."""
        while True:
            before = self._inodes()
            unread = self._unread()
            found = self._current(unread, place)
            name = [*unread, self._source.pattern][0]
            opened = found or open_file(self._source, self._where, name, self._after_copied(unread, place))
            # Files that were renamed during the look may be missing in it, or have been opened under other names.
            if self._inodes() == before:
                break
            if opened is not None:
                opened.close()
        self._note_gone()
        if found is None and place.current is not None and place.offset and self._said != place:
            self._said = place
            why = "was truncated" if place.current[1:3] == before.get(self._source.pattern) else "is gone"
            _log.warning(
                "%s %s; it was read up to byte %d, and no copy of it has the rest.",
                place.current.name,
                why,
                place.offset,
            )
        return opened

    def _after_copied(self, unread: list[str], place: Progress) -> Progress:
        """Return the beginning of the next file; or, in a longer copy that has replaced the last one, its end."""
        path, number = self._source.pattern, max(self._rows, default=0)
        row = self._rows.get(number)
        is_there = unread or place.current is not None or number in {known for _, known in self._seen.values()}
        # A row has its inode until the next file was opened.
        if is_there or row is None or row.compressed or not row.inode:
            return place.next()
        with suppress(FileNotFoundError), self._where.open(path) as file:
            head = os.pread(file.fileno(), min(row.size, FINGERPRINT_BYTES), 0)
            begin = max(0, row.size - FINGERPRINT_BYTES)
            end = os.pread(file.fileno(), row.size - begin, begin)
            if begin + len(end) == row.size and checksum(head) == row.head and checksum(end) == row.end:
                found = os.fstat(file.fileno())
                offset, line = _last_line_end(file, row.size)
                _log.info("%s was replaced by a copy; it is read on there.", path)
                return Progress(
                    place.serial + 1, Identity(path, found.st_dev, found.st_ino, len(head), row.head), offset, line
                )
        return place.next()

    def _current(self, unread: list[str], place: Progress) -> Opened | None:
        """Open the file of a position; None if no file, or none of those that are found, is this one."""
        current = place.current
        if current is None:
            return None
        names = [self._source.pattern, *unread]
        own = [name for name in names if is_inode(stat_of(self._where, name), current)]
        # The inode first: a copy begins with the same bytes, and may end before them.
        for name in [*own, *(name for name in (*unread, self._source.pattern) if name not in own)]:
            if not current.size and name not in own:
                continue  # nothing of it was read: its inode is all that is known
            opened = open_file(self._source, self._where, name, place)
            if opened is None:
                continue
            try:
                if opened.is_same(place.offset) and opened.is_line_end():
                    return opened
            except Exception as error:
                if not is_damage(error, remote=False):
                    raise
            opened.close()
        return None

    def _inodes(self) -> dict[str, tuple[int, int]]:
        """The device and the inode of each file, by name. Two that are equal: no file was renamed in between."""
        path = self._source.pattern
        at_path = stat_of(self._where, path)
        named = self._rotated() if at_path is None else {path: at_path} | self._rotated()
        return {name: (stat.device, stat.inode) for name, stat in named.items()}

    def _rotated(self) -> dict[str, places.Stat]:
        """The rotated files, the oldest first."""
        path = self._source.pattern
        if self._others is not None:
            return in_order(self._others.members(path), path)
        escaped = glob.escape(path)
        patterns = [self._source.rotated] if self._source.rotated else [f"{escaped}.*", f"{escaped}-*"]
        at_path = stat_of(self._where, path)
        found: dict[str, places.Stat] = {}
        for pattern in patterns:
            found |= self._where.entries(pattern)
        inodes = set() if at_path is None else {at_path[:2]}  # a link is the file that it names
        named: dict[str, places.Stat] = {}
        for name, stat in found.items():
            # A compressed file whose original is there may be under way.
            under_way = places.compression_of(name) is not None and places.plain_name(name) in found
            if name != path and not under_way and stat[:2] not in inodes:
                inodes.add(stat[:2])
                named[name] = stat
        return in_order(named, path)

    # --- what was read ---

    def begin(self, place: Progress, since: float = 0.0) -> None:
        """Take the rotated files that are there for read: all at the first start, else those before the current one.

        ``since``: the time of the first start, if it is over; files that were written to later are not taken for read.
        """
        current: tuple[int, ...] = ()
        if place.current is not None and (opened := self._continued(place)) is not None:
            current = opened.start_stat[:2] if opened.start.current is not None else ()
            opened.close()
        rows: list[Rotated] = []
        before = None
        while before != (before := self._inodes()):  # until no file was renamed during the look
            with suppress(FileNotFoundError):
                names = itertools.takewhile(
                    lambda item: item[1][:2] != current and not (since and item[1].modified > since),
                    self._rotated().items(),
                )
                rows = [self._look(name, stat) for name, stat in names if not self._is_empty(name, stat)]
        for row in rows:
            self._put(row)

    def _note_problem(self, row: list[Any]) -> None:
        """Keep what was said of the file at the path; nothing, when it can be read or is another one."""
        if row and row != self._problem:
            self._state[self._key(_PROBLEM)] = row
        elif self._problem and not row:
            del self._state[self._key(_PROBLEM)]
        self._problem = row

    def _finish(self, opened: Opened) -> None:
        self._note_problem([])
        self._put(_stored(opened.stored, opened.compressed))

    def forget(self) -> None:
        """Delete all rows: no file of the log is there."""
        self._note_problem([])
        for number in self._rows:
            del self._state[self._key(number)]
        self._rows.clear()

    def _key(self, number: int) -> Any:
        return number if self._log is None else (self._log, number)

    def _put(self, row: Rotated, number: int | None = None) -> None:
        if not row.size:
            return  # it has nothing to be read, and if a program writes to it, it is one that was not read
        number = max(self._rows, default=0) + 1 if number is None else number
        self._rows[number] = row
        self._state[self._key(number)] = list(row)
        self._seen.clear()

    def _note_gone(self) -> None:
        """Let no other file that gets the inode of a known one be taken for it. Call it after looks that agree."""
        known = {number for _, number in self._seen.values()}
        gone = [number for number in sorted(self._rows) if number not in known]
        for number in gone[: max(0, len(self._rows) - self._rows_max)]:
            del self._rows[number], self._state[self._key(number)]
        for number in gone:
            if number in self._rows and self._rows[number].inode:
                self._put(self._rows[number]._replace(device=0, inode=0), number)

    def _unread(self) -> list[str]:
        """The rotated files that were not read, the oldest first. Rows follow known files to their new inodes."""
        while True:
            try:
                return self._compare({n: stat for n, stat in self._rotated().items() if not self._is_empty(n, stat)})
            except FileNotFoundError:  # a rotation is under way
                continue

    def _is_empty(self, name: str, stat: places.Stat) -> bool:
        """Return whether a file has no byte, compressed or not: there is nothing to read, or to know it by."""
        if not stat.size or stat.size > _EMPTY_BYTES_MAX or places.compression_of(name) is None:
            return not stat.size
        with self._open(name, stat[:2]) as file:
            content = _uncompressed(file, name)
        return content is not None and not content[0]

    def _compare(self, found: dict[str, places.Stat]) -> list[str]:
        if self._seen.keys() == found.keys() and all(self._seen[name][0] == stat for name, stat in found.items()):
            return [name for name in found if self._seen[name][1] is None]
        self._stored = {name: self._look(name, stat) for name, stat in found.items()}
        self._contents = {
            stored: self._contents[stored] for stored in self._stored.values() if stored in self._contents
        }
        untouched = {row: number for number, row in self._rows.items()}
        known = {name: untouched[row] for name, row in self._stored.items() if row in untouched}
        known |= self._aligned([*found])
        for name, number in known.items():
            if self._rows[number] != self._stored[name]:
                self._put(self._stored[name], number)
        self._seen = {name: (stat, known.get(name)) for name, stat in found.items()}
        return [name for name in found if name not in known]

    def _open(self, name: str, inode: tuple[int, int]) -> IO[bytes]:
        """Open a file that was listed. Raises FileNotFoundError if another one has its name by now."""
        file = self._where.open(name)
        found = os.fstat(file.fileno())
        if (found.st_dev, found.st_ino) != inode:
            file.close()
            raise FileNotFoundError(name)
        return file

    def _look(self, name: str, stat: places.Stat) -> Rotated:
        with self._open(name, stat[:2]) as file:
            return _stored(file, places.compression_of(name) is not None)

    def _aligned(self, names: list[str]) -> dict[str, int]:
        """The numbers of the rows of known files. The oldest files are known, and were the last ones that were read.

        So the files from the oldest on are compared with the last rows, as many as are the same. If several numbers of
        them are possible, because files are equal, the one with the most inodes that are the same is right.
        """
        numbers = sorted(self._rows)
        for deep in (False, True):
            best: tuple[int, int] = (0, 0)
            for count in range(1, min(len(names), len(numbers)) + 1):
                sames = []
                for name, number in zip(names, numbers[-count:]):
                    sames.append(self._same(name, number, deep))
                    if not sames[-1]:
                        break
                else:
                    best = max(best, (sames.count(2), count))
            if best[1]:
                return dict(zip(names, numbers[-best[1] :]))
        # Files between them are gone, or were changed: each is the next row that is the same.
        known: dict[str, int] = {}
        last = 0
        for name in names:
            number = next((n for n in numbers if n > last and self._same(name, n, True)), 0)
            if number:
                known[name] = last = number
        return known

    def _same(self, name: str, number: int, deep: bool) -> int:
        """Return 2 if a file has the inode and the beginning of a row, 1 if only its content, 0 if it is another one.

        ``deep``: also compare the uncompressed bytes of a file with a row of a file that was not compressed.
        """
        row, stored = self._rows[number], self._stored[name]
        if stored[:2] == row[:2] and stored.size >= row.size:
            with self._open(name, stored[:2]) as file:
                if checksum(file.read(min(row.size, FINGERPRINT_BYTES))) == row.head:
                    return 2
        if stored[2:6] == row[2:6]:
            return 1
        if not (deep and stored.compressed and not row.compressed):
            return 0
        if stored not in self._contents:
            with self._open(name, stored[:2]) as file:
                self._contents[stored] = _uncompressed(file, name)
        return int(self._contents[stored] == row[2:5])


def followed(
    source: Source, state: MutableMapping[Any, Any], waiting: Waiting, place: Progress, former: Former | None
) -> Iterator[tuple[list[Any], Any]]:
    """Yield the records of one path after ``place``, each with the position after it, until the source ends."""
    tail = Tail(source, state)
    if former is not None or place == Progress():
        tail.begin(place)
        place = place.reread()
        yield place.packed(), None
    for after, item in tail.records(place):
        if not isinstance(item, Idle):
            yield after.packed(), item
            waiting.moved()
        elif not waiting.wait(at_end=item.at_end):
            return


def _rows_of(state: Mapping[Any, Any]) -> Iterator[tuple[int, Rotated]]:
    return ((n, Rotated(*row)) for n, row in state.items() if type(n) is int and n > 0)


def in_order(entries: dict[str, places.Stat], path: str) -> dict[str, places.Stat]:
    """Return rotated files of a path, the oldest first; see the module."""
    stamps = {name: _stamp(name, path) for name in entries}
    kinds = {kind for kind, _ in stamps.values()}
    named = len(kinds) == 1 and kinds != {""}
    ordered = sorted(entries, key=lambda name: (stamps[name][1] if named else (), entries[name].modified, name))
    return {name: entries[name] for name in ordered}


def _stamp(name: str, path: str) -> tuple[str, tuple[int, ...]]:
    """The number or the time in the name of a rotated file, such that the lowest is the oldest."""
    plain = places.plain_name(name)
    after = plain.startswith(path)
    groups = re.findall(r"\d+", plain[len(path) :] if after else os.path.basename(plain), flags=re.ASCII)
    if not groups:
        return "", ()
    numbers = tuple(map(int, groups))
    if sum(map(len, groups)) >= _TIME_DIGITS:
        return "time", numbers
    return "number", tuple(-n for n in numbers) if after else numbers


def _stored(file: IO[bytes], compressed: bool) -> Rotated:
    """The row by which an open file of this machine is known again."""
    found = os.fstat(file.fileno())
    head = checksum(os.pread(file.fileno(), FINGERPRINT_BYTES, 0))
    return Rotated(
        found.st_dev, found.st_ino, found.st_size, head, opened_file.end_of(file), compressed, found.st_mtime_ns
    )


def _last_line_end(file: IO[bytes], size: int) -> tuple[int, int]:
    """The last end of a line in the first bytes of a file, and the lines up to there."""
    offset = line = at = 0
    while data := os.pread(file.fileno(), min(1 << 20, size - at), at):
        line += data.count(b"\n")
        offset = at + data.rindex(b"\n") + 1 if b"\n" in data else offset
        at += len(data)
    return offset, line


def _uncompressed(file: IO[bytes], name: str) -> tuple[int, bytes, bytes] | None:
    """The size of the uncompressed bytes, and the checksums of the first and last of them; None if they are damaged."""
    try:
        with ExitStack() as stack:
            plain = places.open_plain(file, name, stack)
            end = head = plain.read(FINGERPRINT_BYTES)
            size = len(head)
            while more := plain.read(1 << 20):
                size += len(more)
                end = (end + more)[-FINGERPRINT_BYTES:]
    except Exception as error:
        if not is_damage(error, remote=False):
            raise
        return None
    return size, checksum(head), checksum(end)
