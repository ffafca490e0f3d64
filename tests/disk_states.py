"""States of a disk after a lost power: a recorder of all writes and syncs of a program, and the states that they allow.

    program ──disk_recorder.c──▶ records ──Disk──▶ what is durable, and what waits ──states──▶ directories

The rules are those of POSIX, without what some file systems promise in addition:

    bytes     of a file are durable after an fsync, fdatasync or msync of it; before that, each sector of each write
              (also of a page that was changed through a map) may be there or not, in any order. A write through
              O_DSYNC is durable when it returns, and nothing else
    size      is durable with the bytes; a file may also be longer without its bytes, which are zeros then
    names     (new, renamed, removed) are durable after an fsync of their directory, not of the file; before that, each
              may be there or not. A rename replaces a name in one moment; between two directories it is durable when
              one of them was synced

Not recorded: ``lock.mdb``, which LMDB makes anew at the first opening after a boot, permissions and times. A file
whose name ends in ``.outside`` belongs to the world outside of the machine, and loses nothing.
"""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HEAD = struct.Struct("=II QQQ II")
WRITE, MAPPED, SIZE, GROW, PUNCH, CREATE, MKDIR, RENAME, LINK, UNLINK, SYNC, MARK = range(12)
AT_ONCE = 1
SECTOR_BYTES = 512
"""A disk writes a sector as a whole; pages of LMDB are eight of them, and its meta is within one."""
BYTES = (WRITE, MAPPED, SIZE, GROW, PUNCH)
SOURCE = Path(__file__).with_name("disk_recorder.c")


class Record(NamedTuple):
    kind: int
    flags: int
    inode: int
    offset: int
    length: int
    first: str
    second: str
    data: bytes


def compiler() -> str | None:
    return shutil.which("cc") if sys.platform == "linux" else None


@functools.cache
def library(directory: Path) -> Path:
    """Compile the recorder."""
    made = directory / "disk_recorder.so"
    command = [compiler() or "cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(SOURCE), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return made


def record(program: str, root: Path, beside: Path, *arguments: str) -> list[Record]:
    """Run ``module:function`` of the tests with ``root`` and arguments in a new process; return what it did there."""
    log = beside / "records"
    root.mkdir()
    module, _, function = program.partition(":")
    code = f"import sys, {module}; {module}.{function}(*sys.argv[1:])"
    variables = {
        **os.environ,
        "LD_PRELOAD": str(library(beside)),
        "CUES_RECORD_ROOT": str(root.resolve()),
        "CUES_RECORD_LOG": str(log),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    ended = subprocess.run(
        [sys.executable, "-c", code, str(root), *arguments], env=variables, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return list(_records(log.read_bytes(), str(root.resolve())))


def _records(raw: bytes, root: str) -> Iterator[Record]:
    at = 0
    while at < len(raw):
        kind, flags, inode, offset, length, first, second = HEAD.unpack_from(raw, at)
        at += HEAD.size
        texts = [raw[at : at + first].decode(), raw[at + first : at + first + second].decode()]
        at += first + second
        data = raw[at : at + length] if kind in (WRITE, MAPPED) else b""
        at += len(data)
        yield Record(kind, flags, inode, offset, length, *(text.removeprefix(root) for text in texts), data)


@functools.cache
def _mark() -> Callable[[bytes], None] | None:
    import ctypes

    try:
        return ctypes.CDLL(None).record_mark  # type: ignore[no-any-return]
    except AttributeError:  # nothing is recorded
        return None


def mark(text: str) -> None:
    """Put a text among the records of this process."""
    found = _mark()
    if found is not None:
        found(text.encode())


# --- what is durable, and what waits ------------------------------------------------------------


@dataclass
class Change:
    """A change that waits for a sync: of the bytes of a file, or of names. ``held``: it is durable by itself."""

    number: int
    record: Record
    file: int = 0
    names: tuple[tuple[int, str, int, bool], ...] = ()
    """(directory, name, file, is it there after the change): all of them, or none."""
    held: bool = False


@dataclass
class File:
    inode: int
    bytes: bytearray = field(default_factory=bytearray)
    """Durable."""
    waits: list[Change] = field(default_factory=list)
    forever: bool = False


class Disk:
    """The files below a directory, record after record.

    ``ignored(record)`` says which syncs have not happened: a disk that lies, or a program that forgot them.
    """

    def __init__(self, ignored: Callable[[Record], bool] = lambda record: False) -> None:
        self.files: dict[int, File] = {}
        self.names: dict[tuple[int, str], int] = {}
        """Durable names, by directory and name; the root is 0."""
        self.waits: list[Change] = []
        """Changes of names."""
        self.marks: list[str] = []
        self._now: dict[tuple[int, str], int] = {}
        self._by_inode: dict[int, int] = {}
        self._ignored = ignored
        self._number = 0

    def apply(self, record: Record) -> None:
        self._number += 1
        if record.kind == MARK:
            self.marks.append(record.first)
        elif record.kind in BYTES:
            self._changed(record)
        elif record.kind != SYNC:
            self._named(record)
        elif not self._ignored(record):
            self._synced(record)

    def _changed(self, record: Record) -> None:
        file = self.files[self._by_inode[record.inode]]
        held = file.forever or (bool(record.flags & AT_ONCE) and not self._ignored(record))
        change = Change(self._number, record, self._by_inode[record.inode], held=held)
        if held and not file.waits:
            change_bytes(file.bytes, record)
        else:
            file.waits.append(change)

    def _synced(self, record: Record) -> None:
        id = self._by_inode.get(record.inode)
        if id is not None and id in self.files:
            file = self.files[id]
            for change in file.waits:
                change_bytes(file.bytes, change.record)
            file.waits.clear()
            return
        directory = self._find(record.first)
        for change in self.waits:
            change.held |= any(where == directory for where, *_ in change.names)
        while self.waits and self.waits[0].held:
            rename(self.names, self.waits.pop(0))

    def _named(self, record: Record) -> None:
        first = self._place(record.first)
        if record.kind in (CREATE, MKDIR):
            id = self._number
            self._by_inode[record.inode] = id
            if record.kind == CREATE:
                self.files[id] = File(record.inode, forever=record.first.endswith(".outside"))
            names = ((*first, id, True),)
        else:
            id = self._now[first]
            second = self._place(record.second) if record.second else first
            names = {
                RENAME: ((*first, id, False), (*second, id, True)),
                LINK: ((*second, id, True),),
                UNLINK: ((*first, id, False),),
            }[record.kind]  # type: ignore[assignment]
        change = Change(self._number, record, id, names, held=id in self.files and self.files[id].forever)
        rename(self._now, change)
        self.waits.append(change)

    def _place(self, path: str) -> tuple[int, str]:
        above, _, name = path.rpartition("/")
        return self._find(above), name

    def _find(self, path: str) -> int:
        found = 0
        for name in path.split("/")[1:]:
            found = self._now[found, name]
        return found

    def waiting(self) -> list[Change]:
        """Everything that a lost power may take back now, of files that have a name."""
        there = set(self._now.values()) | set(self.names.values())
        found = [change for id, file in self.files.items() if id in there for change in file.waits]
        return [change for change in (*found, *self.waits) if not change.held]

    def write(self, directory: Path, chosen: Choice) -> None:
        """Write the state of the disk in which only the chosen changes have reached it."""
        names = dict(self.names)
        for change in self.waits:
            if change.held or change.number in chosen.whole:
                rename(names, change)
        inodes: dict[int, int] = {}
        below: dict[int, list[tuple[str, int]]] = {}
        for (above, name), id in names.items():
            below.setdefault(above, []).append((name, id))
        self._write(directory, 0, below, chosen, inodes)
        _renumber(directory, {str(old): str(new) for old, new in inodes.items()})

    def _write(
        self, path: Path, id: int, below: dict[int, list[tuple[str, int]]], chosen: Choice, inodes: dict[int, int]
    ) -> None:
        path.mkdir()
        for name, each in below.get(id, ()):
            if each in self.files:
                (path / name).write_bytes(self.content(each, chosen))
                inodes[self.files[each].inode] = (path / name).stat().st_ino
            else:
                self._write(path / name, each, below, chosen, inodes)

    def content(self, id: int, chosen: Choice) -> bytearray:
        file = self.files[id]
        found = bytearray(file.bytes)
        for change in file.waits:
            if change.held or change.number in chosen.whole:
                change_bytes(found, change.record)
            elif change.number in chosen.torn:
                change_bytes(found, change.record, chosen.torn[change.number])
            elif chosen.sizes:
                end = change.record.offset + change.record.length
                found.extend(bytes(max(0, end - len(found))))
        return found


def change_bytes(found: bytearray, record: Record, sectors: frozenset[int] | None = None) -> None:
    """Apply a change to the bytes of a file; only some sectors of a write, if they are given."""
    if record.kind in (SIZE, GROW):
        found.extend(bytes(max(0, record.length - len(found))))
        if record.kind == SIZE:
            del found[record.length :]
        return
    end = record.offset + record.length
    if record.kind == PUNCH:
        end = min(end, len(found))
        found[record.offset : end] = bytes(max(0, end - record.offset))
        return
    for at in range(record.offset, end, SECTOR_BYTES) if sectors is not None else (record.offset,):
        stop = end
        if sectors is not None:
            stop = min(at + SECTOR_BYTES, end)
            if (at - record.offset) // SECTOR_BYTES not in sectors:
                continue
        found.extend(bytes(max(0, stop - len(found))))
        found[at:stop] = record.data[at - record.offset : stop - record.offset]


def rename(names: dict[tuple[int, str], int], change: Change) -> None:
    for directory, name, id, there in change.names:
        if there:
            names[directory, name] = id
        elif names.get((directory, name)) == id:
            del names[directory, name]


def _renumber(root: Path, inodes: dict[str, str]) -> None:
    """Name the new inodes in the files of a store that have inodes in them, and another boot.

    A machine that lost its power has the old inodes; these directories are copies.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for path in (path for name in ("open", "mark") for path in root.rglob(name)):
        words = path.read_text().split(" ")
        new = [str(uuid.UUID(int=1)) if word == boot else inodes.get(word, word) for word in words]
        if path.name == "mark" and len(words) == 3 and new[0] != words[0]:  # the time of the change of "locks"
            new[1] = str((path.parent / "locks").stat().st_ctime_ns)
        path.write_text(" ".join(new))


# --- the states ---------------------------------------------------------------------------------


class Choice(NamedTuple):
    """The changes that have reached the disk, of those that wait: whole, or some sectors; and sizes of the others."""

    whole: frozenset[int]
    torn: dict[int, frozenset[int]]
    sizes: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        return self.whole, tuple(sorted(self.torn.items())), self.sizes


LAST = 6
"""Of changes that wait, so many last ones are also lost alone, or reach the disk alone."""
SAMPLES = 4
"""Random choices at each record, of changes and of sectors."""


def choices(waiting: list[Change], rng: random.Random) -> Iterator[Choice]:
    """The choices at one moment: all, nothing, names alone, bytes alone, each of the last ones, torn, and random."""
    numbers = [change.number for change in waiting]
    every, names = frozenset(numbers), frozenset(change.number for change in waiting if change.names)
    yield Choice(every, {})
    if not waiting:
        return
    for whole in (frozenset(), names, every - names):
        yield Choice(frozenset(whole), {})
    if names != every:
        yield Choice(names, {}, sizes=True)
    for number in sorted(every)[-LAST:]:
        yield Choice(every - {number}, {})
        yield Choice(frozenset({number}), {})
    writes = [change for change in waiting if change.record.kind in (WRITE, MAPPED)]
    for change in sorted(writes, key=lambda change: change.number)[-2:]:
        number, sectors = change.number, -(-change.record.length // SECTOR_BYTES)
        if sectors > 1:
            for cut in {1, sectors // 2, sectors // 8 * 4, sectors - 1} - {0}:
                yield Choice(every - {number}, {number: frozenset(range(cut))})
                yield Choice(every - {number}, {number: frozenset(range(cut, sectors))})
    for _ in range(SAMPLES):
        share = rng.choice((0.1, 0.5, 0.9))
        whole = frozenset(number for number in numbers if rng.random() < share)
        torn = {}
        for change in writes:
            if change.number not in whole and rng.random() < share:
                sectors = range(-(-change.record.length // SECTOR_BYTES))
                torn[change.number] = frozenset(sector for sector in sectors if rng.random() < 0.5)
        yield Choice(whole, torn, sizes=rng.random() < 0.5)


ALL_OF = 10
"""Up to so many changes that wait, every subset of them is tried by :func:`every_choice`."""


def every_choice(waiting: list[Change], rng: random.Random) -> Iterator[Choice]:
    """All subsets of the changes, each one whole; and :func:`choices`, which has torn writes. Of more, those alone."""
    yield from choices(waiting, rng)
    for chosen in range(2 ** len(waiting) if len(waiting) <= ALL_OF else 0):
        yield Choice(frozenset(each.number for place, each in enumerate(waiting) if chosen >> place & 1), {})


OLD = 8
"""A name is old when a change that is so much later waits too."""


def old_names(waiting: list[Change], rng: random.Random, wanted: re.Pattern[str]) -> Iterator[Choice]:
    """The choices that lose one old name alone, of those that are wanted: it was made, and something came after it."""
    every = frozenset(change.number for change in waiting)
    for change in waiting:
        if (
            change.names
            and wanted.search(change.record.second or change.record.first)
            and max(every) - change.number > OLD
        ):
            yield Choice(every - {change.number}, {})


class State(NamedTuple):
    at: int
    choice: Choice


def states(
    records: list[Record],
    seed: int,
    most: int | None,
    ignored: Callable[[Record], bool],
    chosen: Callable[[list[Change], random.Random], Iterator[Choice]] = choices,
) -> list[State]:
    """All states within the bounds, or ``most`` of them, from all parts of the run, and always the last one.

    The power may go after each record. Between a sync and the mark after it nothing waits, and a state that is reached
    at several moments is taken at the last one, at which most is acknowledged.
    """
    rng = random.Random(seed)
    disk, found = Disk(ignored), {}
    durable = 0
    for at, record in enumerate(records):
        disk.apply(record)
        if record.kind == SYNC or record.flags & AT_ONCE:
            durable = at
        for choice in chosen(disk.waiting(), rng):
            found[durable, choice.key] = State(at, choice)
    every = sorted(found.values(), key=lambda state: state.at)
    if most is None or most >= len(every):
        return every
    kept = sorted(rng.sample(range(len(every) - 1), most - 1))
    return [every[place] for place in kept] + every[-1:]


def replay(
    records: list[Record], wanted: Iterable[State], directory: Path, ignored: Callable[[Record], bool]
) -> Iterator[tuple[State, Path, list[str]]]:
    """Write each state into a directory of its own, which the caller removes; yield it with the marks until it."""
    disk, done = Disk(ignored), 0
    for number, state in enumerate(wanted):
        while done <= state.at:
            disk.apply(records[done])
            done += 1
        path = directory / f"state-{number}"
        disk.write(path, state.choice)
        yield state, path, list(disk.marks)


def whole(records: list[Record]) -> Disk:
    """The disk after all records."""
    disk = Disk()
    for each in records:
        disk.apply(each)
    return disk


def differences(disk: Disk, root: Path, directory: Path) -> list[str]:
    """Compare what the records say with what the program left below ``root``: no write was missed."""
    every = frozenset(change.number for change in disk.waiting())
    disk.write(directory, Choice(every, {}))
    contents = []
    for where in (root, directory):
        files = [path for path in where.rglob("*") if path.is_file() and path.name not in ("lock.mdb", "open", "mark")]
        contents.append({str(path.relative_to(where)): path.read_bytes() for path in files})
    ours, theirs = contents
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def kind_of(record: Record) -> str:
    """Name a sync: what it makes durable, and by which call. For tables and controls."""
    if record.kind != SYNC:
        return "write at once"
    name = re.sub(r"(?<![a-z])[0-9a-f]*\d[0-9a-f]*", "N", record.first.rpartition("/")[2])
    return f"{record.second} {name}"
