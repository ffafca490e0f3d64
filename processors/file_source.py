"""Sources over many files: globs, directories that are watched, and logs that are followed.

    graph.add(cues.Source("rows", Files("in/*.csv.gz")))                      read what is there, and end
    graph.add(cues.Source("rows", Files("in/*.parquet", watch=True)))         and wait for new files
    graph.add(cues.Source("lines", Files("app-*.log", follow=True)))          the last file by name grows
    graph.add(cues.Source("lines", Files("/var/log/app.log", follow=True)))   as ``tail -F``: through rotations

The position names the file that is read by its identity, and the place in it:

    position = [version, floor, finished, [name, device, inode, bytes, fingerprint] or [], offset, line]

``fingerprint`` is a checksum of the first ``bytes`` bytes of the file, at most 1,024, so a file is known again after a
rename, and a file that was replaced is noticed although it has the inode of the old one. The engine commits the
position together with the messages, so no record is lost or read twice, wherever the run is killed.

**Files in order of their names** (all but ``tail -F``). A file is read once, and then it is finished. Files are read in
the order of their names. A file may come late: it is read if its name is after one of the last 16 that were
finished. The position has those 16 names and no more, so it is at most about 17 names and 100 bytes large, however
many files there are. A file that comes later than that stops a running source (:class:`FileTooLate`).

**tail -F.** The file at the path is read while it grows. When another file is at the path (rotation by rename), the old
one is read to its end, found by its inode and fingerprint under its new name, then those that were rotated after it,
then the new one. When it became shorter, or begins otherwise (copy and truncate), the rest is read from the copy that
begins with the same bytes. A last line without a line end waits until it is whole.

Not guaranteed: lines that no file has any more. Rotation by copy and truncate itself loses lines that are written
between the copy and the truncation. A file that was deleted, or truncated without a copy, before it was read to its
end is reported as a warning, and reading continues after it. Rotated files that were there before the first record
was read are not read: give them a source of their own. A file that begins with the same 1,024 bytes as the one
before, in the same inode, and is longer, is taken for it. A file that is changed after it was finished is not read
again; write files under a name that begins with ``.`` or ends with ``.tmp``, and rename them.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import cues
from cues.errors import Diverged, InvalidArgument
from cues.processors import SOURCE, columns, files, foreign, places, takes, waits

FORMATS: Final = ("text", "jsonl", "csv", "parquet", "arrow")
"""The formats of a source."""

FINISHED_MAX: Final = 16
"""Names of finished files in a position. A file that comes later than that many others is not read."""

FINGERPRINT_BYTES: Final = 1_024
"""Bytes at the start of a file by which it is known. More would cost more at each look at a growing file."""

_VERSION: Final = 1
_RECORDS_AT_ONCE: Final = 500
"""Records of a growing file that are read before it is looked at again, whether it is still the same."""
_ENDINGS: Final = {
    ".txt": "text", ".log": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv",
    ".parquet": "parquet", ".arrow": "arrow", ".arrows": "arrow", ".ipc": "arrow",
}  # fmt: skip

_log = logging.getLogger("cues.processors")

Row = files.Row
Position = list[Any]
Item = tuple[Position, Row | Exception]


class FileTooLate(cues.CuesError):
    """Raised when a file appears whose name is before those of the last files that were finished. It was not read.

    ``path`` is the file. A restart takes it for a finished one.
    """

    path: str


class _Identity(NamedTuple):
    """The file of a position. ``size`` is the number of bytes under the fingerprint."""

    name: str
    device: int
    inode: int
    size: int
    print: bytes


class _Place(NamedTuple):
    """A position: files up to ``floor`` and those in ``finished`` are done, ``current`` is read up to ``offset``."""

    floor: str = ""
    finished: tuple[str, ...] = ()
    current: _Identity | None = None
    offset: int = 0
    line: int = 0

    @staticmethod
    def of(position: Position | None) -> _Place:
        if position is None:
            return _Place()
        if not isinstance(position, list) or len(position) != 6 or position[0] != _VERSION:
            raise Diverged(
                f"The position {str(position)[:80]} is not one of cues.processors.file_source, version {_VERSION}.",
                "give the source another id, which begins at the start; or declare the function that wrote it.",
            )
        _, floor, finished, current, offset, line = position
        identity = _Identity(os.fsdecode(current[0]), *current[1:]) if current else None
        return _Place(os.fsdecode(floor), tuple(map(os.fsdecode, finished)), identity, offset, line)

    def packed(self) -> Position:
        current = [_packed_name(self.current.name), *self.current[1:]] if self.current else []
        finished = [_packed_name(name) for name in self.finished]
        return [_VERSION, _packed_name(self.floor), finished, current, self.offset, self.line]

    def is_done(self, name: str) -> bool:
        return name <= self.floor or name in self.finished

    def finish(self, name: str) -> _Place:
        finished = sorted({*self.finished, name})
        floor = finished.pop(0) if len(finished) > FINISHED_MAX else self.floor
        return _Place(floor, tuple(finished))


@takes(SOURCE)
class Files:
    """A source of the records of files; see the module. Give it to ``cues.Source(id, Files(...))``.

    ``pattern``      a path, a directory or a glob pattern (``**`` too); a URL is read through fsspec (not followed)
    ``format``       ``"text"`` (``{"line": text}``), ``"jsonl"``, ``"csv"`` (strings by column), ``"parquet"`` or
                     ``"arrow"`` (IPC file or stream); None: by the ending of each name, before ``.gz`` and the like
    ``watch``        True: wait for new files; otherwise the source ends with the last one
    ``follow``       True: the last file grows; a path without wildcards is followed through its rotations
    ``bad``          ``"error"``: a record that cannot be read is a failed message: it is written to the error queue, or
                     stops the source (:class:`cues.processors.files.Malformed`, with file, line and problem).
                     ``"row"``: it is a message of the type ``files.MALFORMED``
    ``encoding``     of text, which must write line ends as the byte 0x0A: UTF-8, Latin, and others, but not UTF-16
    ``reserved``     ``"q/type"`` or ``"q/topics"``, which rows may set then (:mod:`cues.processors.foreign`)
    ``rotated``      pattern of the names that a followed file gets by rotation; None: ``path.*`` and ``path-*``
    ``poll_s``       seconds between two looks at files that had nothing new
    ``idle_exit_s``  end the source after so many seconds without a record; 0: at the end of what is there; None: never
    ``grace_s``      a rotated file counts as whole when it did not grow for so many seconds, because a program may
                     write to it until it opens the new one
    ``delimiter``, ``record_lines_max``, ``at``   as :func:`cues.processors.files.read_csv` has them

    Kind: source
    Needs: nothing for text, JSON lines and CSV; extra `files` for Parquet, Arrow, zstd and URLs
    Guarantee: exactly once: each record of each file is on the queue once, also after kill -9
    Mechanism: position of file identity (device, inode, fingerprint) and offset, committed with the messages
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        format: str | None = None,
        *,
        watch: bool = False,
        follow: bool = False,
        bad: str = "error",
        encoding: str = "utf-8",
        delimiter: str = ",",
        record_lines_max: int = 1,
        at: str | None = None,
        reserved: Sequence[str] = (),
        rotated: str | None = None,
        poll_s: float = 0.2,
        idle_exit_s: float | None = None,
        grace_s: float = 1.0,
    ) -> None:
        self.pattern = places.local_path(os.fspath(pattern)) if not places.is_remote(str(pattern)) else str(pattern)
        self.format, self.watch, self.follow, self.bad = format, watch, follow, bad
        self.encoding, self.delimiter, self.record_lines_max, self.at = encoding, delimiter, record_lines_max, at
        self.rotated, self.poll_s, self.idle_exit_s, self.grace_s = rotated, poll_s, idle_exit_s, grace_s
        self.may = foreign.allowed(reserved)
        self.__name__ = "files"
        self.tails = follow and not glob.has_magic(self.pattern) and not os.path.isdir(self.pattern)
        if format is not None and format not in FORMATS:
            raise InvalidArgument(f"The format {format!r} is unknown.", f"use one of {', '.join(FORMATS)}.")
        if bad not in ("error", "row"):
            raise InvalidArgument(f"bad={bad!r} is unknown.", "use 'error' or 'row'.")
        if not _writes_plain_line_ends(encoding):
            raise InvalidArgument(
                f"The encoding {encoding!r} does not write line ends as the byte 0x0A, by which lines are found.",
                "convert the files to UTF-8.",
            )
        if follow and places.is_remote(self.pattern):
            raise InvalidArgument(
                f"{self.pattern} cannot be followed: an object does not grow.", "use watch=True, for new objects."
            )
        if follow and format in ("parquet", "arrow"):
            raise InvalidArgument(f"A file of the format {format!r} cannot be followed.", "use watch=True.")

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[Item]:
        """Yield ``(position, message)`` after ``position``; an Exception in place of a message is a failed one."""
        place = _Place.of(position)
        waiting = _Waiting(self, process)
        if self.tails:
            return self._tail(place, waiting)
        return self._in_order(place, waiting)

    # --- files in the order of their names ---

    def _in_order(self, place: _Place, waiting: _Waiting) -> Iterator[Item]:
        where = places.place_of(self.pattern)
        listed: set[str] | None = None
        empty: set[str] = set()
        while True:
            names = where.list(self.pattern)
            for name in names:
                if listed is not None and name <= place.floor and name not in listed:
                    raise FileTooLate(
                        f"{name} appeared after {FINISHED_MAX} files with later names were read.",
                        "read it with a source of its own; let the names of files grow.",
                        path=name,
                    )
            listed = set(names)
            current = place.current
            if current is not None and current.name not in listed:
                if not self.follow:
                    raise files.FileChanged(
                        f"{current.name} is gone; it was read up to byte {place.offset:,}, not to its end.",
                        "restore the file; or give the source another id, which begins at the start.",
                        path=current.name,
                        position=place.packed(),
                    )
                _log.warning("%s is gone; it was read up to byte %d.", current.name, place.offset)
                place = place.finish(current.name)
                continue
            open_names = [name for name in names if not place.is_done(name) and name not in empty]
            # A late file waits until the one that is being read is finished.
            name = current.name if current is not None else min(open_names, default="")
            if not name:
                if not (self.watch or self.follow) or not waiting.pause():
                    return
                continue
            grows = self.follow and (name == names[-1] or self._is_fresh(where, name))
            grows = grows and places.compression_of(name) is None
            if current is None:
                place = place._replace(offset=0, line=0)
            before = place
            for after, item in self._file(where, name, before, grows):
                place = after
                yield place.packed(), item
                waiting.moved()
            if place is before and not grows:
                empty.add(name)  # no record was committed that could say so
                place = place.finish(name) if place.current is not None else place
            elif not grows and place.current is not None:
                place = place.finish(name)
            elif grows and not waiting.pause():
                return

    def _is_fresh(self, where: places.Place, name: str) -> bool:
        """Whether a program may still write to a file although a later one is there."""
        return time.time() - where.stat(name).modified < self.grace_s

    def _file(self, where: places.Place, name: str, place: _Place, grows: bool) -> Iterator[tuple[_Place, Any]]:
        """Yield the records of one file after ``place``. Unless it grows, the last one finishes the file."""
        with _Opened(self, where, name, place) as opened:
            held: tuple[_Place, Any] | None = None
            for record in opened.records(complete=not grows):
                after = place._replace(current=opened.identity(record.offset), offset=record.offset, line=record.line)
                if grows:
                    yield after, self._item(name, record)
                    continue
                if held is not None:
                    yield held
                held = after, self._item(name, record)
            if held is not None:
                yield held[0].finish(name), held[1]

    # --- one path through its rotations ---

    def _tail(self, place: _Place, waiting: _Waiting) -> Iterator[Item]:
        where = places.Local()
        opened: _Opened | None = None
        try:
            while True:
                if opened is None:
                    opened = self._continued(where, place)
                    if opened is None:
                        if not waiting.pause():
                            return
                        continue
                    place = opened.start
                for record in self._grown(opened, waiting):
                    if record is None:
                        return
                    place = _Place(current=opened.identity(record.offset), offset=record.offset, line=record.line)
                    yield place.packed(), self._item(opened.name, record)
                    waiting.moved()
                following = self._after(where, opened) if opened.whole else None
                if opened.whole and following is None and not waiting.pause():
                    return
                opened.close()
                opened = following
        finally:
            if opened is not None:
                opened.close()

    def _grown(self, opened: _Opened, waiting: _Waiting) -> Iterator[files.Record | None]:
        """Yield the records of a file while it grows, until it is whole or is not the same file; None to end."""
        rotated = None if opened.is_at(self.pattern) else waiting.clock()
        read = opened.offset
        while True:
            opened.whole = rotated is not None and waiting.clock() - rotated >= opened.grace_s()
            records = opened.records(complete=opened.whole)
            moved = False
            while batch := list(itertools.islice(records, _RECORDS_AT_ONCE)):
                if not opened.is_same(batch[-1].offset):
                    opened.whole = False
                    return  # truncated, and perhaps written again, while it was read
                yield from batch
                moved, read = True, batch[-1].offset
            if moved:
                rotated = rotated and waiting.clock()
            elif not opened.is_same(read):
                opened.whole = False
                return  # truncated: the rest is in a copy
            elif opened.whole:
                return
            elif rotated is None and not opened.is_at(self.pattern) and os.path.exists(self.pattern):
                rotated = waiting.clock()
            elif not waiting.pause(at_end=rotated is None):
                yield None

    def _siblings(self, where: places.Local) -> list[str]:
        """The rotated files, the oldest first: by the time of the last write, then by their numbers."""
        escaped = glob.escape(self.pattern)
        patterns = [self.rotated] if self.rotated else [f"{escaped}.*", f"{escaped}-*"]
        named = {name for pattern in patterns for name in where.list(pattern)} - {self.pattern}
        # A compressed file whose original is there may be under way.
        whole = [name for name in named if places.compression_of(name) is None or places.plain_name(name) not in named]
        return sorted(whole, key=lambda name: (_modified(where, name), -_number(name), name))

    def _after(self, where: places.Local, opened: _Opened) -> _Opened | None:
        """Open the file that was begun after one that has ended: a rotated one, or the one at the path."""
        ordered = self._siblings(where)
        own = opened.stat()
        places_of_own = [
            n for n, name in enumerate(ordered) if name == opened.name or _is_inode(_stat(where, name), own)
        ]
        if places_of_own:
            later = ordered[places_of_own[-1] + 1 :]
        else:
            later = [name for name in ordered if _modified(where, name) > own.modified]
        for name in [*later, self.pattern]:
            following = _opened(self, where, name, _Place())
            if following is not None:
                return following
        return None

    def _continued(self, where: places.Local, place: _Place) -> _Opened | None:
        """Open the file of a position, wherever it is now; None if no file is there yet."""
        current = place.current
        if current is None:
            return _opened(self, where, self.pattern, _Place())
        names = [self.pattern, *self._siblings(where)]
        known = [name for name in names if _is_inode(_stat(where, name), current)]
        # The inode first: a copy begins with the same bytes, and may end before them.
        for name in [*known, *(name for name in reversed(names) if name not in known)]:
            if not current.size and name not in known:
                continue  # nothing of it was read: its inode is all that is known
            opened = _opened(self, where, name, place)
            if opened is None:
                continue
            if opened.is_same(place.offset) and opened.is_line_end():
                return opened
            opened.close()
        if place.offset:
            why = "was truncated" if self.pattern in known else "is gone"
            _log.warning(
                "%s %s; it was read up to byte %d, and no copy of it has the rest.", current.name, why, place.offset
            )
        return _opened(self, where, self.pattern, _Place())

    def _item(self, name: str, record: files.Record) -> Row | Exception:
        last = Path(name).name
        if record.row is None:
            if self.bad == "error":
                expected = self.format_of(name)
                return files.Malformed(
                    f"{name}, line {record.first_line}: {record.problem}; expected a line of {expected}"
                    f" ({self.encoding}). The line: {record.raw[:200]!r}"
                )
            row = files.malformed(last, record)
        else:
            row = record.row
        if self.at is not None:
            row[self.at] = f"{last}:{record.first_line}"
        return row

    def format_of(self, name: str) -> str:
        """Return the format of a file. Raises :class:`cues.errors.InvalidArgument` if the name does not tell."""
        if self.format is not None:
            return self.format
        ending = Path(places.plain_name(name)).suffix
        if ending not in _ENDINGS:
            raise InvalidArgument(
                f"The name {name} does not tell the format of the file.", f"give format=: {', '.join(FORMATS)}."
            )
        return _ENDINGS[ending]

    def __repr__(self) -> str:
        return f"Files({self.pattern!r})"


class _Opened:
    """An open file, and the place in it from which it is read."""

    def __init__(self, source: Files, where: places.Place, name: str, place: _Place) -> None:
        """Open the file at ``place``; raise :class:`files.FileChanged` if it is not the file of the position.

        For a file that is followed the caller compares instead (:meth:`is_same`).
        """
        self._stack = ExitStack()
        self.name, self.start = name, place
        self.whole = False
        """The file was rotated, and is read to its end."""
        self._source, self._where = source, where
        self._format = source.format_of(source.pattern if source.tails else name)
        self._file = self._stack.enter_context(where.open(name))
        self._is_table = self._format in ("parquet", "arrow")
        self._compressed = places.compression_of(name) is not None and not self._is_table
        self._plain = places.open_plain(self._file, name, self._stack) if self._compressed else self._file
        self._stat = places.Stat(0, 0, 0, 0.0) if where.remote else _fstat(self._file)
        self._print: tuple[int, bytes] = (0, b"")
        self._parse: files.Parser | None = None
        self.offset, self.line = place.offset, place.line
        current = place.current
        if current is not None:
            self._print = (current.size, current.print)
            if not source.tails and not (self.is_same(place.offset) and self.is_line_end()):
                self.close()
                raise files.FileChanged(
                    f"{name} has changed: it is not the file that was read up to byte {place.offset:,}.",
                    "restore the file; or give the source another id, which begins at the start.",
                    path=name,
                    position=place.packed(),
                )
        if self._is_table:  # its bytes are read in another order than the records
            head = self._head(FINGERPRINT_BYTES)
            self._print = len(head), _checksum(head)

    def stat(self) -> places.Stat:
        return _fstat(self._file)

    def grace_s(self) -> float:
        """Seconds without growth until a rotated file is whole: none if it was last written long ago."""
        limit = self._source.grace_s
        return 0.0 if self._compressed or time.time() - self.stat().modified >= limit else limit

    def records(self, complete: bool) -> Iterator[files.Record]:
        """Yield the records that are there after those that were yielded."""
        if self._is_table:
            yield from self._rows()
            return
        if self._parse is None and not self._begin(complete):
            return
        assert self._parse is not None
        self._plain.seek(self.offset)
        found = files.records(
            self._plain, self.offset, self.line, self._parse, self._source.encoding,
            self._source.record_lines_max if self._format == "csv" else 1, complete,
        )  # fmt: skip
        for record in found:
            self.offset, self.line = record.offset, record.line
            yield record

    def _begin(self, complete: bool) -> bool:
        """Read the header; False if there is none yet."""
        source, header = self._source, b""
        if self._format == "csv":
            self._plain.seek(0)
            header = self._plain.readline(files.LINE_BYTES_MAX)
            if not header or (not complete and not header.endswith(b"\n")):
                return False
            if not self.offset:
                self.offset, self.line = len(header), 1
        make: dict[str, Callable[[], Any]] = {
            "csv": lambda: files.csv_parser(source.delimiter, source.encoding, source.may),
            "jsonl": lambda: files.jsonl_parser(source.encoding, source.may),
            "text": lambda: files.text_parser(source.encoding),
        }
        self._parse = make[self._format]()(self.name, header)
        return True

    def _rows(self) -> Iterator[files.Record]:
        """Yield the rows of a table: a row's number is its offset and its line."""
        done = self.offset
        for first, rows in _tables(self._file, self.name, self._format, done):
            for number, row in enumerate(rows, first + 1):
                if number > done:
                    self.offset = number
                    try:
                        if isinstance(row, ValueError):
                            raise row
                        foreign.check(row, self._source.may)
                    except ValueError as error:
                        problem = error.message if isinstance(error, InvalidArgument) else str(error)
                        shown = "" if error is row else repr(row)[:1_000]
                        yield files.Record(number, number, number, None, problem, shown)
                    else:
                        yield files.Record(number, number, number, row, "", "")

    def identity(self, offset: int) -> _Identity:
        """Return the identity of the file, of which ``offset`` bytes were read."""
        size = min(offset, FINGERPRINT_BYTES)
        if self._print[0] < size and not self._is_table:
            head = self._head(size)
            self._print = len(head), _checksum(head)
        return _Identity(self.name, self._stat.device, self._stat.inode, *self._print)

    def is_same(self, offset: int) -> bool:
        """Return whether the file has ``offset`` bytes, and still begins with those that were read."""
        size, known = self._print
        if not (self._compressed or self._is_table or self._where.remote) and self.stat().size < offset:
            return False
        head = self._head(size)
        return len(head) == size and (not size or _checksum(head) == known)

    def is_line_end(self) -> bool:
        """Return whether the position is at the end of a line, or of the file."""
        if not self.offset or self._is_table:
            return True
        self._plain.seek(self.offset - 1)
        before = self._plain.read(1)
        return before == b"\n" or (bool(before) and not self._plain.read(1))

    def is_at(self, path: str) -> bool:
        """Return whether this file is at the path."""
        return _is_inode(_stat(places.Local(), path), self._stat)

    def _head(self, size: int) -> bytes:
        """The first bytes of the uncompressed file. The place in the file stays as it is."""
        if not self._compressed and not self._where.remote:
            return os.pread(self._file.fileno(), size, 0)
        self._plain.seek(0)
        head = self._plain.read(size)
        self._plain.seek(0 if self._is_table else self.offset)
        return head

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Waiting:
    """The end of a source that waits: a drain of the graph, or a time without records."""

    def __init__(self, source: Files, process: Any) -> None:
        self._source, self._process = source, process
        self._since = time.monotonic()

    def clock(self) -> float:
        return time.monotonic()

    def moved(self) -> None:
        self._since = self.clock()

    def pause(self, at_end: bool = True) -> bool:
        """Wait for a moment; False if the source should end. ``at_end``: no known file has more to be read."""
        waits.answered(self._process)
        limit = self._source.idle_exit_s
        if (self._process is not None and self._process.stopping) or (
            limit is not None and at_end and self.clock() - self._since >= limit
        ):
            return False
        time.sleep(self._source.poll_s)
        return True


def _packed_name(name: str) -> str | bytes:
    """A name as a position has it: bytes if it is not UTF-8, because text of a position is."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return os.fsencode(name)
    return name


def _opened(source: Files, where: places.Local, name: str, place: _Place) -> _Opened | None:
    try:
        return _Opened(source, where, name, place)
    except FileNotFoundError:
        return None


def _fstat(file: IO[bytes]) -> places.Stat:
    found = os.fstat(file.fileno())
    return places.Stat(found.st_dev, found.st_ino, found.st_size, found.st_mtime)


def _stat(where: places.Local, name: str) -> places.Stat | None:
    try:
        return where.stat(name)
    except FileNotFoundError:
        return None


def _modified(where: places.Local, name: str) -> float:
    found = _stat(where, name)
    return found.modified if found else 0.0


def _is_inode(found: places.Stat | None, current: _Identity | places.Stat) -> bool:
    return found is not None and (found.device, found.inode) == (current.device, current.inode)


def _number(name: str) -> int:
    """The number of a rotated file, of which the highest is the oldest; 0 for a date."""
    ending = re.search(r"\.(\d{1,5})$", places.plain_name(name))
    return int(ending[1]) if ending else 0


def _checksum(head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=8).digest()


def _writes_plain_line_ends(encoding: str) -> bool:
    try:
        return "a\n".encode(encoding)[-2:] == b"a\n" and "\n\n".encode(encoding).endswith(b"\n\n")
    except LookupError:
        raise InvalidArgument(f"The encoding {encoding!r} is unknown.", "use one that Python knows.") from None


def _tables(file: IO[bytes], name: str, format: str, skip: int) -> Iterator[tuple[int, list[Row | ValueError]]]:
    """Yield ``(rows before, rows)`` for each batch of a Parquet or Arrow file that ends after ``skip`` rows."""
    pa = places.arrow()
    before = 0
    try:
        if format == "parquet":
            import pyarrow.parquet as pq

            parquet = pq.ParquetFile(file)
            groups: list[int] = []
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                if not groups and before + count <= skip:
                    before += count
                    continue
                groups.append(group)
            batches: Any = parquet.iter_batches(batch_size=1_000, row_groups=groups) if groups else ()
        else:
            file.seek(0)
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            batches = (reader.get_batch(n) for n in range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            if before + batch.num_rows > skip:
                yield before, columns.rows_of(batch, name)
            before += batch.num_rows
    except pa.ArrowInvalid as error:
        raise ValueError(f"{name}, row {before + 1}: it cannot be read as {format}: {error}") from None
