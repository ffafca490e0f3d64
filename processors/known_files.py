"""The files that a source knows: one row of its state for each, committed with the position.

    state[name] = [device, inode, bytes, fingerprint, size, modified, end, offset, line, done]

A position is one value, so it cannot name every file that was read; rows can, however many there are and whatever
their names. ``fingerprint`` is a checksum of the first ``bytes`` bytes as they are read, at most 1,024, and ``end`` one
of the last 1,024 as they are stored, or the tag of an object. ``size`` and ``modified`` are those of the moment when
the file was read last, up to ``offset`` and ``line``; ``done``: to its end.

A file is known by its name, or, when the file of a row is gone, by its size, its time and both checksums. So a file
that was renamed, or restored under another name, is not read again. A row of about 200 bytes stays when its file is
deleted.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final, NamedTuple

from cues.processors import checks
from cues.processors.places import Stat

VERSION: Final = 2
"""Of positions. Version 1 had no rows: it named the last 16 files that were finished."""


class Identity(NamedTuple):
    """A file as a position names it. ``size`` is the number of bytes under the fingerprint."""

    name: str
    device: int
    inode: int
    size: int
    print: bytes


class Progress(NamedTuple):
    """A position: what is in the rows, and ``current`` read up to ``offset``, an end of line ``line``."""

    serial: int = 0
    current: Identity | None = None
    offset: int = 0
    line: int = 0
    log: str = ""
    """The log of several (families.py) that ``current`` is a file of."""

    def packed(self) -> list[Any]:
        log = [packed_name(self.log)] if self.log else []
        return [VERSION, self.serial, packed_identity(self.current), self.offset, self.line, *log]

    def next(self) -> Progress:
        """The position after a change of the rows, when no file is under way."""
        return Progress(self.serial + 1)

    def reread(self) -> Progress:
        """The position after a change of the rows, in the same file."""
        return self._replace(serial=self.serial + 1)


class Former(NamedTuple):
    """Files that the position of an earlier version counts as read: those up to ``floor`` by name, and those named."""

    floor: str
    names: tuple[str, ...]

    def has(self, name: str) -> bool:
        return name <= self.floor or name in self.names


def read_position(position: Any) -> tuple[Progress, Former | None]:
    """Read a position. Raises :class:`cues.errors.Diverged` for one of another source."""
    if position is None:
        return Progress(), None
    try:
        version, first, *rest = position
        if version == VERSION:
            current, offset, line, *log = rest
            return Progress(first, read_identity(current), offset, line, *map(os.fsdecode, log)), None
        finished, current, offset, line = rest
        if version != 1:
            raise ValueError
        former = Former(os.fsdecode(first), tuple(map(os.fsdecode, finished)))
        return Progress(0, read_identity(current), offset, line), former
    except (TypeError, ValueError):
        hint = f"{checks.BEGIN[:-1]}; or declare the function that wrote it."
        raise checks.foreign_position(position, "cues.processors.file_source", VERSION, hint) from None


class Known(NamedTuple):
    """One file: how far it was read, and its size and time then."""

    identity: Identity
    size: int
    modified: float
    end: bytes
    """The checksum of its last bytes, or the tag of an object; unless it was read to its end, the checksum of the
    problem. Empty if it is not known."""
    offset: int
    line: int
    done: bool

    def is_as(self, stat: Stat) -> bool:
        """Return whether the file has the size, time and tag that it had. Earlier versions kept none of objects."""
        had_none = not self.modified and not self.identity.inode
        is_tag = not stat.tag or not self.done or self.end in (b"", stat.tag.encode())
        return self.size == stat.size and (had_none or self.modified == stat.modified) and is_tag


class KnownFiles:
    """The rows of one source, which are all in memory. A change is committed with the next yield."""

    def __init__(self, state: MutableMapping[Any, Any]) -> None:
        self._state = state
        self._rows: dict[str, Known] = {}
        for name, row in state.items():
            if type(name) not in (str, bytes):
                continue  # of a path that was followed (tail.py)
            identity = Identity(os.fsdecode(name), *row[:4])
            self._rows[identity.name] = Known(identity, *row[4:])

    def get(self, name: str) -> Known | None:
        return self._rows.get(name)

    def put(self, known: Known) -> None:
        """Keep what was read of a file, under its name."""
        name = known.identity.name
        self._rows[name] = known
        self._state[packed_name(name)] = [*known.identity[1:], *known[1:]]

    def forget(self, name: str) -> None:
        """Remove the row of a file, so that another one of this name is a new file."""
        if self._rows.pop(name, None) is not None:
            del self._state[packed_name(name)]

    def done(self) -> list[Known]:
        """Return the rows of the files that were read to their ends."""
        return [row for row in self._rows.values() if row.done]

    def moved(self, entries: Mapping[str, Stat], is_same: Callable[[str, Known], bool]) -> list[tuple[str, str]]:
        """Give the rows of files that are gone to listed files that have no row and are the same; return both names.

        ``is_same(name, row)`` compares the contents. Two files that are there at the same time are two files, whatever
        is in them.
        """
        gone: dict[tuple[int, float], list[str]] | None = None
        moves = []
        for name, stat in entries.items():
            if name in self._rows:
                continue
            if gone is None:
                gone = defaultdict(list)
                for old, row in self._rows.items():
                    if row.done and row.end and old not in entries:
                        gone[row.size, row.modified].append(old)
            for old in gone.get((stat.size, stat.modified), ()):
                row = self._rows[old]
                if is_same(name, row):
                    del self._rows[old], self._state[packed_name(old)]
                    gone[stat.size, stat.modified].remove(old)
                    identity = row.identity._replace(name=name, device=stat.device, inode=stat.inode)
                    self.put(row._replace(identity=identity))
                    moves.append((old, name))
                    break
        return moves

    def changed(self, entries: Mapping[str, Stat]) -> Iterator[tuple[Known, Stat]]:
        """Yield the rows of files that were read to their ends, and are not as they were."""
        for name, stat in entries.items():
            row = self._rows.get(name)
            if row is not None and row.done and not row.is_as(stat):
                yield row, stat

    def __len__(self) -> int:
        return len(self._rows)


def packed_identity(identity: Identity | None) -> list[Any]:
    return [packed_name(identity.name), *identity[1:]] if identity else []


def read_identity(packed: list[Any]) -> Identity | None:
    return Identity(os.fsdecode(packed[0]), *packed[1:]) if packed else None


def packed_name(name: str) -> str | bytes:
    """A name as a position or a row has it: bytes if it is not UTF-8, because text is."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return os.fsencode(name)
    return name
