"""A log that is followed through random rotations, against the list of the lines that were written."""

from __future__ import annotations

import functools
import glob
import gzip
import itertools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seeds
from sets import slow_except

from cues import codec
from cues.processors import tail
from cues.processors.file_source import Files
from cues.processors.places import Local, Stat


class Log:
    """A program that writes lines to a path, and a system that rotates it in one of the usual ways."""

    def __init__(
        self, folder: Path, chance: random.Random, rotate: str, delay: int | None, keeps_times: bool, name: str = "app"
    ) -> None:
        """``delay``: a rotated file is compressed after so many more rotations; None: never."""
        self.folder, self.chance, self.delay, self.keeps_times = folder, chance, delay, keeps_times
        self.name, self.path = name, folder / f"{name}.log"
        self.rotate: Callable[[], None] = getattr(self, f"_{rotate}")
        self.lines: list[str] = []
        self.held = ""
        """The end of a line that is half written."""
        self.rotated: list[Path] = []
        """The oldest first."""
        self.number = 0
        self.mark = ""
        """The beginning of each line."""
        if rotate == "link":
            self._link()

    def write(self) -> None:
        text = self.held
        self.held = ""
        for _ in range(self.chance.randint(0, 5)):
            line = f"{self.mark}{len(self.lines)} {'x' * self.chance.choice([0, 3, 400])}"
            self.lines.append(line)
            text += line + "\n"
        if text and self.chance.random() < 0.3:
            cut = self.chance.randint(1, len(text.rsplit("\n", 2)[-2]) + 1)
            text, self.held = text[:-cut], text[-cut:]
        with open(self.path, "a") as file:
            file.write(text)

    def turn(self) -> None:
        """Rotate, when the last line is whole."""
        with open(self.path, "a") as file:
            file.write(self.held)
        self.held = ""
        self.rotate()
        if self.delay is not None and len(self.rotated) > self.delay:
            at = len(self.rotated) - 1 - self.delay
            if self.rotated[at].suffix != ".gz":
                self.rotated[at] = self._compressed(self.rotated[at])

    def _shift(self) -> None:
        for at in range(len(self.rotated)):
            old = self.rotated[at]
            new = self.folder / f"{self.name}.log.{len(self.rotated) - at + 1}{'.gz' if old.suffix == '.gz' else ''}"
            old.rename(new)
            self.rotated[at] = new

    def _rename(self) -> None:
        self._shift()
        self.rotated.append(self.path.rename(self.folder / f"{self.name}.log.1"))

    def _date(self) -> None:
        self.number += 1
        self.rotated.append(self.path.rename(self.folder / f"{self.name}.log-202601{self.number:02}"))

    def _copy(self) -> None:
        self._shift()
        shutil.copy(self.path, self.folder / f"{self.name}.log.1")
        os.truncate(self.path, 0)
        self.rotated.append(self.folder / f"{self.name}.log.1")

    def _link(self) -> None:
        """The path is a link to the newest of numbered files."""
        if self.number:
            self.rotated.append(self.folder / f"{self.name}-{self.number}.log")
        self.number += 1
        new = self.folder / f"{self.name}-{self.number}.log"
        new.touch()
        (self.folder / "link").symlink_to(new.name)
        (self.folder / "link").replace(self.path)

    def _compressed(self, path: Path) -> Path:
        target = path.with_name(path.name + ".gz")
        target.write_bytes(gzip.compress(path.read_bytes()))
        self._times(path, target)
        path.unlink()
        return target

    def restore(self) -> None:
        """Put copies in the place of the rotated files, as a backup does, in any order of time."""
        for path in self.chance.sample(self.rotated, len(self.rotated)):
            copy = path.with_name(".copy")
            shutil.copyfile(path, copy)
            self._times(path, copy)
            copy.replace(path)

    def forget(self, count: int) -> None:
        """Delete the oldest files, which were read."""
        for path in self.rotated[:count]:
            path.unlink()
        del self.rotated[:count]

    def _times(self, path: Path, target: Path) -> None:
        if self.keeps_times:
            found = path.stat()
            os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
        else:
            moment = self.chance.randint(1, 2_000_000_000)
            os.utime(target, (moment, moment))


class Reader:
    """Runs of a source that are killed at any record, with what they had committed."""

    def __init__(self, source: Files) -> None:
        self.source, self.position, self.state, self.lines = source, None, {}, []  # type: ignore[var-annotated]

    def run(self, count: int | None) -> None:
        process = SimpleNamespace(state=codec.unpack(codec.pack(self.state)), stopping=False)
        for position, item in itertools.islice(self.source(self.position, process), count):
            self.position = codec.unpack(codec.pack(position))
            self.state = codec.unpack(codec.pack(process.state))
            if item is not None:
                assert isinstance(item, dict)
                self.lines.append(item["line"])


ROTATIONS = [
    ("rename", None, True),
    ("rename", 0, True),
    ("rename", 1, False),
    ("rename", 3, False),
    ("date", None, False),
    ("date", 0, False),
    ("date", 2, True),
    ("copy", None, True),
    ("copy", 1, False),
    ("copy", 0, False),
    ("link", None, True),
    ("link", 1, False),
]


@pytest.mark.parametrize(("rotate", "delay", "keeps_times"), ROTATIONS)
def test_each_line_is_read_once_and_in_order(rotate: str, delay: int | None, keeps_times: bool, tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    for number in range(15):
        folder = tmp_path / str(number)
        folder.mkdir()
        log = Log(folder, chance, rotate, delay, keeps_times)
        options: Any = {"rotated": str(folder / "app-*.log*")} if rotate == "link" else {}
        reader = Reader(Files(log.path, follow=True, idle_exit_s=0, grace_s=0, poll_s=0, **options))
        log.write()
        while not reader.lines:  # from here on the source knows the path
            log.write()
            reader.run(None)
        for _ in range(30):
            step = chance.choice(["write", "write", "turn", "read", "read", "read", "restore", "forget"])
            if step == "read":
                reader.run(chance.choice([1, 2, 5, None]))
            elif step == "forget" and not log.held:
                reader.run(None)
                assert reader.lines == log.lines
                log.forget(chance.randint(0, 2))
            elif step in ("write", "turn", "restore"):
                getattr(log, step)()
            assert reader.lines == log.lines[: len(reader.lines)]
        log.write()
        with open(log.path, "a") as file:
            file.write(log.held)
        reader.run(None)
        assert reader.lines == log.lines
        reader.run(None)
        assert reader.lines == log.lines


def test_rotated_files_are_in_the_order_of_numbers_or_times_in_their_names_then_of_their_times() -> None:
    def order(path: str, *names: str) -> list[str]:
        found = {name: Stat(1, at, 1, float(at)) for at, name in enumerate(names)}
        return list(tail.in_order(found, path))

    assert order("a.log", "a.log.1", "a.log.10.gz", "a.log.2") == ["a.log.10.gz", "a.log.2", "a.log.1"]
    dates = ["a.log-20260102", "a.log-20251231.gz", "a.log-20260103"]
    assert order("a.log", *dates) == [dates[1], dates[0], dates[2]]
    assert order("a", "a.2026-01-02_10", "a.2026-01-02_9") == ["a.2026-01-02_9", "a.2026-01-02_10"]
    assert order("now", "app-10.log", "app-9.log") == ["app-9.log", "app-10.log"]
    assert order("a.log", "a.log.old", "a.log.1") == ["a.log.old", "a.log.1"]  # a mixture: by time


class Turning:
    """Renames of a rotation, of which some are done before each look of the source at the files, from one look on."""

    def __init__(self, log: Path, at: int, at_once: int) -> None:
        self.log, self.at, self.at_once, self.looks = log, at, at_once, 0
        self._steps = iter([*self._rotation(2, "5"), *self._rotation(3, "6")])
        self._is_inside = False

    def _rotation(self, rotated: int, line: str) -> list[Callable[[], object]]:
        names = [self.log, *(Path(f"{self.log}.{number}") for number in range(1, rotated + 2))]
        shifts = [*itertools.pairwise(names)][::-1]
        renames = [functools.partial(old.rename, new) for old, new in shifts]
        return [*renames, lambda: self.write(line)]

    def write(self, *lines: str) -> None:
        with open(self.log, "a") as file:
            file.writelines(f"{line} of the log\n" for line in lines)

    def finish(self) -> None:
        for step in self._steps:
            step()

    def before(self, call: Any) -> Any:
        def looks(*arguments: Any, **options: Any) -> Any:
            if not self._is_inside:
                self._is_inside = True
                self.looks += 1
                if self.looks > self.at:
                    for step in itertools.islice(self._steps, self.at_once):
                        step()
                self._is_inside = False
            return call(*arguments, **options)

        return looks


@pytest.mark.parametrize("begins", [None, r"\d+ "])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("at_once", slow_except([2], [1, 2, 3, 4, 9]))
def test_a_rotation_between_any_two_looks_at_the_files(
    at_once: int, is_first: bool, begins: str | None, tmp_path: Path
) -> None:
    """The first start takes the files that are rotated by then for read, and loses none of the others."""
    for at in itertools.count():
        folder = tmp_path / str(at)
        folder.mkdir()
        turning = Turning(folder / "app.log", at, at_once)
        reader = Reader(Files(turning.log, begins=begins, follow=True, idle_exit_s=0, grace_s=0, poll_s=0))
        for number in (1, 2):
            Path(f"{turning.log}.{number}").write_text(f"{number} of an old log\n")
        if not is_first:
            turning.write("0")
            reader.run(None)
        turning.write("1", "2", "3", "4")
        if not is_first:
            reader.run(2)
            assert reader.lines == ["0 of the log", "1 of the log", "2 of the log"]
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((os, "stat"), (os, "fstat"), (glob, "glob"), (Local, "open")):
                patch.setattr(module, name, turning.before(getattr(module, name)))
            reader.run(None)
        turning.finish()
        reader.run(None)
        lines = [f"{number} of the log" for number in range(1 if is_first else 0, 7)]
        # A file that was rotated before the first start has looked at it is one that was there before.
        assert reader.lines in ([lines, lines[4:], lines[5:]] if is_first else [lines])
        if turning.looks <= at:
            assert reader.lines == lines
            break


def test_names_in_another_order_than_the_rotations_repeat_nothing(tmp_path: Path) -> None:
    """app.log.1 is the oldest here. What nobody has touched is known again, whatever its name says."""
    log = tmp_path / "app.log"
    reader = Reader(Files(log, follow=True, idle_exit_s=0, grace_s=0, poll_s=0))
    chance, lines = random.Random(seeds.new()), []
    log.write_text("")
    for number in range(1, 30):
        with open(log, "a") as file:
            for _ in range(chance.randint(1, 5)):
                lines.append(f"{len(lines)}")
                file.write(lines[-1] + "\n")
        reader.run(chance.choice([1, 2, None]))
        if number % 4 == 0:
            log.rename(f"{log}.{number // 4}")
            log.write_text("")
    reader.run(None)
    assert sorted(reader.lines, key=int) == lines


def test_no_file_is_taken_for_one_that_had_its_inode(tmp_path: Path) -> None:
    """An empty rotated file that grows late, and a file in the inode of one that is gone, are read."""
    log, first, kept = tmp_path / "app.log", tmp_path / "app.log.1", tmp_path / "kept"
    reader = Reader(Files(log, follow=True, idle_exit_s=0, grace_s=0, poll_s=0))
    log.touch()
    reader.run(None)
    log.rename(first)
    log.write_text("1\n")
    reader.run(None)
    with open(first, "a") as file:
        file.write("late\n")
    log.rename(f"{log}.0")
    log.write_text("2\n")
    reader.run(None)
    assert reader.lines == ["1", "late", "2"]
    os.link(first, kept)
    first.unlink()
    log.rename(f"{log}.00")
    log.write_text("3\n")
    reader.run(None)
    with open(kept, "a") as file:
        file.write("another\n")
    kept.rename(f"{log}.old")
    log.rename(f"{log}.000")
    log.write_text("4\n")
    reader.run(None)
    assert sorted(reader.lines) == ["1", "2", "3", "4", "another", "late", "late"]
