"""Files of a directory that come late, change, or get other names while they are read, at random, against plain lists.

Each file is read once to its end, whatever its name is and whenever it comes. What was read is known by the file and
not by its name. A file that is replaced, cut or written to after it was read is not read again.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import seeds
from sets import bounded
from test_rotations import Reader

from cues.processors.file_source import Files


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
