"""Files of a directory that come late, change, or get other names while they are read, at random, against plain lists.

Each file is read once to its end, whatever its name is and whenever it comes. What was read is known by the file and
not by its name. A file that is replaced, cut or written to after it was read is not read again.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seeds
from sets import bounded
from test_rotations import Reader

from cues.processors.file_source import Files
from cues.processors.files import BadFile, FileChanged


class Folder:
    """A directory, and the lists of what is in its files."""

    def __init__(self, path: Path, dice: random.Random) -> None:
        self.path, self.dice = path, dice
        self.lines: dict[str, list[str]] = {}
        """Of each name that is there now: the lines that the first file of that name had."""
        self.expected: list[list[str]] = []
        """The lines of each file that was ever there, at its first look."""
        self.made = 0
        path.mkdir()

    def come(self) -> None:
        """A new file, of any name and with any time: before or after those of the files that were read."""
        name = f"{self.dice.randrange(10_000):04}-{self.made}.txt"
        lines = [f"{self.made}.{n} {'x' * self.dice.choice([0, 2000])}" for n in range(self.dice.randint(1, 5))]
        self._write(name, lines)
        at = self.dice.choice([0, 1_000_000, 2_000_000_000]) + self.made
        os.utime(self.path / name, (at, at))
        self.made += 1
        self.lines[name] = lines
        self.expected.append(lines)

    def rename(self) -> None:
        name = self.dice.choice([*self.lines])
        new = f"{self.dice.randrange(10_000):04}-renamed-{self.made}-{self.dice.randrange(1 << 40)}.txt"
        (self.path / name).rename(self.path / new)
        self.lines[new] = self.lines.pop(name)

    def change(self) -> None:
        """Replace, cut or write to a file that was read."""
        name = self.dice.choice([*self.lines])
        path = self.path / name
        match self.dice.choice(["replace", "cut", "write", "touch"]):
            case "replace":
                self._write(name, ["another file"])
            case "cut":
                os.truncate(path, path.stat().st_size // 2)
            case "write":
                with path.open("a") as file:
                    file.write("one more\n")
            case "touch":
                os.utime(path)
        # It stays under this name: under another one it may be a new file.
        del self.lines[name]

    def _write(self, name: str, lines: list[str]) -> None:
        hidden = self.path / f".{name}.tmp"
        hidden.write_text("".join(line + "\n" for line in lines))
        hidden.replace(self.path / name)


@pytest.mark.parametrize("order", ["name", "modified"])
@bounded("plays", 8, 200)
def test_each_line_of_files_that_come_late_is_read_once(plays: int, order: Any, tmp_path: Path) -> None:
    dice = random.Random(seeds.new())
    for play in range(plays):
        folder = Folder(tmp_path / str(play), dice)
        folder.come()
        reader = Reader(Files(folder.path, order=order, poll_s=0))
        for _ in range(25):
            match dice.choice(["come", "come", "rename", "read", "read", "change"]):
                case "come":
                    folder.come()
                case "rename" if folder.lines:
                    folder.rename()  # also of the file that is being read
                case "read":
                    reader.run(dice.choice([1, 2, 5, None]))
                case "change" if folder.lines:
                    reader.run(None)
                    folder.change()
        reader.run(None)
        assert sorted(reader.lines) == sorted(line for lines in folder.expected for line in lines)
        for lines in folder.expected:
            at = reader.lines.index(lines[0])
            assert reader.lines[at : at + len(lines)] == lines, "the lines of one file, in order"


# --- files that are replaced or cut before they were read to their end ------------------------------


class HalfRead:
    """A file that was read up to a place, another one after it, and the lists of their lines."""

    def __init__(self, path: Path, dice: random.Random) -> None:
        path.mkdir()
        self.path, self.first, self.dice = path, path / "1.txt", dice
        self.width = dice.choice([0, 700])  # the fingerprint is of some lines, or of less than two
        self.lines = self.made("a", dice.randint(4, 300))
        self.later = self.made("b", 2)
        self.write(path / "2.txt", self.later)
        self.write(self.first, self.lines)
        self.count = dice.randint(2, len(self.lines) - 2)
        """The number of lines that are read before the file changes."""

    def made(self, name: str, count: int) -> list[str]:
        return [f"{name}{n:03} {'x' * self.width}" for n in range(count)]

    def write(self, path: Path, lines: list[str]) -> None:
        path.write_text("".join(line + "\n" for line in lines))

    def bytes_of(self, count: int) -> int:
        return sum(len(line) + 1 for line in self.lines[:count])

    def other(self) -> list[str]:
        """The lines of another file, which may be shorter or longer, and may have line ends at the same places."""
        return self.made("z", self.dice.choice([1, self.count, len(self.lines), len(self.lines) + 9]))

    def swap(self, lines: list[str]) -> None:
        """Put another file at the name."""
        self.write(self.path / ".new", lines)
        (self.path / ".new").replace(self.first)


def cut_before(half: HalfRead) -> list[str] | None:
    os.truncate(half.first, half.bytes_of(half.count) - half.dice.choice([1, 2, len(half.lines[0]) + 1]))
    return None


def cut_after(half: HalfRead) -> list[str] | None:
    left = half.dice.randint(half.count, len(half.lines))
    os.truncate(half.first, half.bytes_of(left))
    return half.lines[:left]


def cut_in_a_line(half: HalfRead) -> list[str] | None:
    os.truncate(half.first, half.bytes_of(half.count) + 2)
    return [*half.lines[: half.count], half.lines[half.count][:2]]


def write_anew(half: HalfRead) -> list[str] | None:
    half.write(half.first, half.other())
    return None


def replace(half: HalfRead) -> list[str] | None:
    half.swap(half.other())
    return None


def delete(half: HalfRead) -> list[str] | None:
    half.first.unlink()
    return None


def replace_after_a_rename(half: HalfRead) -> list[str] | None:
    half.first.rename(half.path / "0.txt")
    half.write(half.first, half.other())
    return None


def rename(half: HalfRead) -> list[str] | None:
    half.first.rename(half.path / "0.txt")
    return half.lines


def write_on(half: HalfRead) -> list[str] | None:
    more = half.made("c", 3)
    with half.first.open("a") as file:
        file.writelines(line + "\n" for line in more)
    return [*half.lines, *more]


def copy_back(half: HalfRead) -> list[str] | None:
    half.swap(half.lines)  # another inode
    return half.lines


CHANGES = [
    cut_before,
    cut_after,
    cut_in_a_line,
    write_anew,
    replace,
    delete,
    replace_after_a_rename,
    rename,
    write_on,
    copy_back,
]
"""Each changes a file that was read in part, and returns the lines that it has now; None: it must be refused."""


@pytest.mark.parametrize("follow", [False, True])
@bounded("plays", 3, 100)
def test_a_file_that_is_replaced_or_cut_between_two_runs_is_refused_or_read_on(
    plays: int, follow: bool, tmp_path: Path
) -> None:
    """Refused with its name and place, and without a line of it or of another file; restored, it is read on."""
    dice = random.Random(seeds.new())
    for number, change in enumerate(CHANGES * plays):
        half = HalfRead(tmp_path / str(number), dice)
        options: Any = {"follow": True, "idle_exit_s": 0, "grace_s": 0, "poll_s": 0} if follow else {}
        reader = Reader(Files(half.path, **options))
        reader.run(half.count)
        lines = change(half)
        if lines is None and change is delete and follow:
            lines = half.lines[: half.count]  # it is named in the log
        if lines is None:
            place = f"{half.bytes_of(half.count):,}"
            with pytest.raises(FileChanged, match=rf"1\.txt (has changed|is gone).* up to byte {place}.*Try: restore"):
                reader.run(None)
            assert reader.lines == half.lines[: half.count], change
            half.swap(lines := half.lines)
            (half.path / "0.txt").unlink(missing_ok=True)
        reader.run(None)
        assert reader.lines == [*lines, *half.later], change


@bounded("plays", 3, 100)
def test_a_file_that_is_replaced_or_cut_while_it_is_read_is_whole_or_named(plays: int, tmp_path: Path) -> None:
    """A file that got another name is read to its end. One that was cut, or written anew in place, is an error once."""
    dice = random.Random(seeds.new())
    named = 0
    for number, change in enumerate(CHANGES * plays):
        half = HalfRead(tmp_path / str(number), dice)
        state: dict[Any, Any] = {}
        lines: list[str] = []
        errors: list[str] = []
        position = None
        for _ in range(2):
            for place, item in Files(half.path)(position, SimpleNamespace(state=state, stopping=False)):
                position = place
                if isinstance(item, BadFile):
                    errors.append(str(item))
                elif item is not None:
                    lines.append(item["line"])
                    if len(lines) == half.count:
                        change(half)
        assert all("1.txt: it cannot be read" in error for error in errors) and len(errors) <= 1, "named, once"
        named += len(errors)
        assert [line for line in lines if line in half.later] == half.later
        whole = len(half.lines)
        if change in (write_anew, cut_before, cut_after, cut_in_a_line):
            size = half.first.stat().st_size if half.first.exists() else 0
            read = sum(len(line) + 1 for line in lines if line not in half.later)
            assert errors or lines[:whole] == half.lines or size >= read - 1, (change, lines)
        else:
            assert not errors and lines[:whole] == half.lines, "the file that was open"
    assert named


@pytest.mark.parametrize("in_place", [True, False])
def test_another_file_with_the_same_first_1024_bytes_is_taken_for_it(in_place: bool, tmp_path: Path) -> None:
    """Not guaranteed, as the module says: its lines before the place are not read."""
    half = HalfRead(tmp_path / "in", random.Random(3))
    half.width = 700
    half.write(half.first, half.made("a", 6))
    reader = Reader(Files(half.path))
    reader.run(3)
    other = [*half.made("a", 2), *half.made("z", 4)]
    half.write(half.first, other) if in_place else half.swap(other)
    reader.run(None)
    assert reader.lines == [*half.made("a", 3), *other[3:], *half.later]


def test_a_file_with_a_time_of_the_future_is_read_to_its_end(tmp_path: Path) -> None:
    """The clock was ahead when its last line was written, which has no line end; or the writer has set that time."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("1\n2")
    (folder / "b.txt").write_text("3\n")
    os.utime(folder / "a.txt", (time.time() + 86_400,) * 2)
    reader = Reader(Files(folder, follow=True, idle_exit_s=0, poll_s=0, grace_s=5))
    reader.run(None)
    assert reader.lines == ["1", "2", "3"]
    (folder / "c.txt").write_text("4")
    (folder / "d.txt").write_text("5\n")
    reader.run(None)
    assert reader.lines == ["1", "2", "3", "5"], "a program may still write to it"
