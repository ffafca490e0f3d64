"""Many logs of one pattern that grow, are rotated, come and go, against the lists of the lines that were written."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seeds
from sets import slow_except
from test_rotations import Log, Reader

import cues
from cues import codec, testing
from cues.errors import Diverged, InvalidArgument
from cues.processors import families, files, places
from cues.processors.file_source import Files


def followed(pattern: Any, **options: Any) -> Files:
    """A source that reads what is there, as a run of a job that is started again and again."""
    return Files(pattern, **{"follow": "each", "idle_exit_s": 0, "grace_s": 0, "poll_s": 0, **options})


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


NAMES = ("a", "a-b", "c.d", "e", "f", "g")


class Logs:
    """Programs that write logs in one directory, and the systems that rotate, delete and rename them."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.logs: list[Log] = []
        self.lines: dict[str, list[str]] = {}
        """By the mark of its lines, what each log that was ever there has written."""
        self.count = 0

    def add(self) -> None:
        """A new log, perhaps under the name of one that is gone."""
        free = self._free()
        if not free:
            return
        how, delay = self.chance.choice(["rename", "date", "copy"]), self.chance.choice([None, 0, 1])
        log = Log(self.folder, self.chance, how, delay, self.chance.random() < 0.5, self.chance.choice(free))
        log.mark = f"{self.count}|"
        self.count += 1
        self.lines[log.mark] = log.lines
        self.logs.append(log)
        log.write()

    def _free(self) -> list[str]:
        used = [path.name for path in [*(log.path for log in self.logs), *self.folder.iterdir()]]
        return [name for name in NAMES if not any(other.startswith(f"{name}.log") for other in used)]

    def move(self) -> None:
        """A log gets another name of the pattern, and its program goes on writing to it.

        One that is rotated by copies keeps its name: copied, truncated and renamed between two looks, it has no trace.
        """
        log = self.chance.choice(self.logs)
        if log.path.exists() and log.rotate.__name__ != "_copy" and (free := self._free()):
            log.name, log.rotated = self.chance.choice(free), []
            log.path = log.path.rename(self.folder / f"{log.name}.log")

    def replace(self) -> None:
        """Put a longer copy in the place of a log, as rsync does."""
        log = self.chance.choice(self.logs)
        if log.path.exists() and log.path.stat().st_size:
            log.lines.append(f"{log.mark}{len(log.lines)} copied")
            (self.folder / ".copy").write_text(f"{log.path.read_text()}{log.lines[-1]}\n")
            (self.folder / ".copy").replace(log.path)

    def delete(self) -> None:
        """Delete a log with all its files."""
        log = self.logs.pop(self.chance.randrange(len(self.logs)))
        for path in [log.path, *log.rotated]:
            path.unlink(missing_ok=True)

    def check(self, read: list[str], whole: bool) -> None:
        found: dict[str, list[str]] = {mark: [] for mark in self.lines}
        for line in read:
            found[line.partition("|")[0] + "|"].append(line)
        for mark, lines in self.lines.items():
            assert found[mark] == (lines if whole else lines[: len(found[mark])])

    def finish(self) -> None:
        for log in self.logs:
            log.write()
            append(log.path, log.held)
            log.held = ""


@pytest.mark.parametrize("seed", seeds.among(range(60), fast=3))
def test_each_line_of_each_log_is_read_once_and_in_order(seed: int, tmp_path: Path) -> None:
    """Appends, three ways of rotation, compression, restored and deleted files, new logs, and kills at any record."""
    chance = random.Random(seed)
    logs = Logs(tmp_path, chance)
    reader = Reader(followed(tmp_path / "*.log"))
    reader.run(None)  # from here on the source knows the pattern
    steps = ["write"] * 5 + ["turn"] * 3 + ["read"] * 5 + ["restore", "forget", "add", "add", "delete"]
    for _ in range(120):
        step = chance.choice(steps)
        log = chance.choice(logs.logs) if logs.logs else None
        if step == "read":
            reader.run(chance.choice([1, 2, 5, None]))
        elif step == "add":
            logs.add()
        elif log is None:
            continue
        elif step in ("forget", "delete"):
            if all(not other.held for other in logs.logs):
                reader.run(None)
                logs.check(reader.lines, whole=True)
                if step == "delete":
                    logs.delete()
                else:
                    log.forget(chance.randint(0, 2))
        else:
            getattr(log, step)()
        logs.check(reader.lines, whole=False)
    logs.finish()
    reader.run(None)
    logs.check(reader.lines, whole=True)
    reader.run(None)
    logs.check(reader.lines, whole=True)
    named = {key[0] for key in reader.state}
    assert named <= {str(log.path) for log in logs.logs}
    while logs.logs:
        logs.delete()
    append(tmp_path / "last.log", "0|last\n")
    reader.run(None)
    assert {key[0] for key in reader.state} <= {str(tmp_path / "last.log")}


class Beside:
    """A process whose source is alone, except when it waits: then something happens to the logs."""

    def __init__(self, logs: Logs, state: dict[Any, Any], lines: list[str], steps: int) -> None:
        self.logs, self.state, self.lines, self.left = logs, state, lines, steps

    @property
    def stopping(self) -> bool:
        return self.left <= 0

    def wait(self, seconds: float) -> bool:
        logs, chance = self.logs, self.logs.chance
        self.left -= 1
        logs.check(self.lines, whole=False)
        if not any(log.held for log in logs.logs):
            logs.check(self.lines, whole=self.left < 0)
        for _ in range(chance.choice([0, 1, 1, 1, 3])):
            log = chance.choice(logs.logs) if logs.logs else None
            step = chance.choice(
                ["write"] * 5 + ["turn"] * 2 + ["restore", "forget", "add", "delete", "move", "replace"]
            )
            if step == "add" or log is None:
                logs.add()
            elif step in ("forget", "delete"):
                self._remove(step, log)
            elif step == "move":
                logs.move()
                break
            elif step == "replace":
                if self._has_all():
                    logs.replace()
                    break
            else:
                getattr(log, step)()
        return False

    def _has_all(self) -> bool:
        """Return whether all lines were read."""
        is_held = any(log.held for log in self.logs.logs)
        return not is_held and len(self.lines) == sum(map(len, self.logs.lines.values()))

    def _remove(self, step: str, log: Log) -> None:
        """Delete files whose lines were all read, before anything else happens to them."""
        if self._has_all():
            if step == "delete":
                self.logs.delete()
            else:
                log.forget(1)


@pytest.mark.parametrize("seed", seeds.among(range(60), fast=3))
def test_the_same_while_the_source_runs_with_kills_between(seed: int, tmp_path: Path) -> None:
    """Also logs that get other names of the pattern, or are replaced by longer copies."""
    chance = random.Random(seed)
    logs = Logs(tmp_path, chance)
    position: Any = None
    state: dict[Any, Any] = {}
    lines: list[str] = []
    for _ in range(12):
        process = Beside(logs, codec.unpack(codec.pack(state)), lines, chance.randint(1, 20))
        killed = chance.choice([None, 5, 20])
        source = followed(tmp_path / "*.log", idle_exit_s=None)
        for after, item in itertools.islice(source(position, process), killed):
            position, state = codec.unpack(codec.pack(after)), codec.unpack(codec.pack(process.state))
            if item is not None:
                assert isinstance(item, dict)
                lines.append(item["line"])
            logs.check(lines, whole=False)
    logs.finish()
    reader = Reader(followed(tmp_path / "*.log"))
    reader.position, reader.state, reader.lines = position, state, lines
    reader.run(None)
    logs.check(lines, whole=True)


# --- names, and what else may happen to them ---


def test_a_name_belongs_to_the_log_whose_rotation_makes_it() -> None:
    def log_of(name: str, rotated: str | None = None) -> str | None:
        return families.Naming("logs/*", rotated).kind(f"logs/{name}")[1]

    for name in ("x.log.1", "x.log.12.gz", "x.log.2026-01-31", "x.log-20260131.gz",
                 "x-20260131.log", "x.2026-01-31.0.log", "x_2026-01-31.log.zst",
                 "x.log.old", "x.log.gz", "x.log.2026-01-31T10"):  # fmt: skip
        assert log_of(name) == "logs/x.log", name
    for name in ("x.log", "x-1.log", "x-errors.log", "10.0.0.1.log", "worker-12", "x.1.log"):
        assert log_of(name) is None, name
    logs = families.Naming("logs/*", None)
    for name, is_log in (("x.log.1", False), ("x.log.12345", True), ("10.0.0.1", True), ("x.2026.01.31", True)):
        assert logs.kind(f"logs/{name}")[0] is is_log, name
    assert log_of("x.1.log.gz", "{stem}.*{ending}") == "logs/x.log"
    assert log_of("old/x.log.7", "old/{name}.*") == "logs/x.log"
    assert log_of("x.log.7", "old/{name}.*") is None


@pytest.mark.parametrize("rotated", ["x-*.log", "{name", "../{name}.*", "/old/{name}.*", "*/{name}.1", "{name}{other}"])
def test_a_template_that_names_no_log_is_refused(rotated: str) -> None:
    with pytest.raises(InvalidArgument, match="Try:"):
        Files("*.log", follow="each", rotated=rotated)


@pytest.mark.parametrize("options", [{"follow": "all"}, {"rotated": "x"}, {"follow": True, "rotated": "x"}])
def test_what_cannot_be_followed_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="Try:"):
        Files("*.log", **options)


def test_rotated_files_that_were_there_first_are_not_read_and_those_of_later_logs_are(tmp_path: Path) -> None:
    append(tmp_path / "a.log.1", "old\n")
    append(tmp_path / "a.log", "a\n")
    append(tmp_path / "gone.log-20260101.gz", "no log has this name now\n")
    reader = Reader(followed(tmp_path / "*.log"))
    reader.run(None)
    append(tmp_path / "b.log.1", "b 1\n")
    append(tmp_path / "b.log", "b 2\n")
    (tmp_path / "c.log.1.gz").write_bytes(gzip.compress(b"c 1\n"))
    append(tmp_path / "gone.log", "new\n")
    reader.run(None)
    assert reader.lines[0] == "a" and sorted(reader.lines[1:]) == ["b 1", "b 2", "c 1", "new"]


def test_rotation_to_another_directory_and_before_the_ending(tmp_path: Path) -> None:
    for number, (rotated, name) in enumerate([("old/{name}.*", "old/a.log.1"), ("{stem}.*{ending}", "a.1.log")]):
        folder = tmp_path / str(number)
        (folder / "old").mkdir(parents=True)
        reader = Reader(followed(folder / "*.log", rotated=rotated))
        append(folder / "a.log", "1\n")
        reader.run(None)
        append(folder / "a.log", "2\n")
        (folder / "a.log").rename(folder / name)
        append(folder / "a.log", "3\n")
        reader.run(None)
        assert reader.lines == ["1", "2", "3"]


def test_several_names_of_a_file_are_one_log(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    append(tmp_path / "elsewhere/0.log", "0\n")
    append(tmp_path / "a.log", "1\n")
    os.link(tmp_path / "a.log", tmp_path / "hard.log")
    (tmp_path / "0-link.log").symlink_to("a.log")
    (tmp_path / "pod.log").symlink_to("elsewhere/0.log")
    (tmp_path / "broken.log").symlink_to("nothing")
    reader = Reader(followed(tmp_path / "*.log"))
    reader.run(None)
    assert reader.lines == ["1", "0"]
    (tmp_path / "a.log").unlink()  # the file has the other name still
    append(tmp_path / "hard.log", "2\n")
    append(tmp_path / "elsewhere/0.log", "3\n")
    (tmp_path / "elsewhere/0.log").rename(tmp_path / "elsewhere/0.log.1")
    append(tmp_path / "elsewhere/0.log", "4\n")
    reader.run(None)
    assert sorted(reader.lines[2:]) == ["2", "3", "4"]
    (tmp_path / "0-link.log").unlink()
    (tmp_path / "0-link.log").symlink_to("hard.log")
    reader.run(None)
    assert len(reader.lines) == 5


@pytest.mark.parametrize("bad", ["error", "row"])
def test_a_log_that_cannot_be_opened_is_said_once_and_the_others_are_read(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "_AGAIN_S", 0.0)
    for name in "abc":
        append(tmp_path / f"{name}.log", f"{name}\n")
    opened = places.Local.open

    def refused(self: places.Local, name: str) -> Any:
        if name.endswith("b.log"):
            raise PermissionError(13, "Permission denied", name)
        return opened(self, name)

    process = SimpleNamespace(state={}, stopping=False)
    source, position, items = followed(tmp_path / "*.log", bad=bad), None, []
    with monkeypatch.context() as patch:
        patch.setattr(places.Local, "open", refused)
        for _ in range(2):
            for after, item in source(position, process):
                position = after
                items.append(item)
            append(tmp_path / "a.log", "a\n")
    shown = [item for item in items if item is not None and item != {"line": "a"} and item != {"line": "c"}]
    assert len(shown) == 1 and "Permission denied" in str(shown[0])
    assert items.count({"line": "a"}) == 2 and items.count({"line": "c"}) == 1
    rest = [item["line"] for _, item in source(position, process) if isinstance(item, dict)]
    assert sorted(rest) == ["a", "b"]


def test_headers_encodings_beginnings_and_a_last_line_without_an_end(tmp_path: Path) -> None:
    def rows(process: Any, position: Any, source: Files) -> tuple[Any, list[Any]]:
        found = []
        for after, item in source(position, process):
            position = after
            found += [item] if item is not None else []
        return position, found

    process = SimpleNamespace(state={}, stopping=False)
    source = followed(tmp_path / "*.csv", encoding="latin-1", at="at")
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("k,v\n1,é\n2,", "latin-1")
    position, found = rows(process, None, source)
    assert found == [{"k": "1", "v": "é", "at": f"{name}.csv:2"} for name in "ab"]
    (tmp_path / "a.csv").rename(tmp_path / "a.csv.1")
    append(tmp_path / "a.csv", "v,k\nz,3\n")
    append(tmp_path / "b.csv", "x\n")
    position, found = rows(process, position, source)
    assert found == [
        {"k": "2", "v": "", "at": "a.csv.1:3"}, {"v": "z", "k": "3", "at": "a.csv:2"},
        {"k": "2", "v": "x", "at": "b.csv:3"},
    ]  # fmt: skip
    append(tmp_path / "a.csv", "one\n")
    _, found = rows(process, position, followed(tmp_path / "*.csv", encoding="latin-1", at="at", bad="row"))
    assert [row["q/type"] for row in found] == [files.MALFORMED]

    process = SimpleNamespace(state={}, stopping=False)
    source = followed(tmp_path / "*.log", begins=r"\d ")
    append(tmp_path / "a.log", "1 a\n at x\n2 b\n at y\n")
    append(tmp_path / "b.log", "1 c\n at z\n")
    assert [row["line"] for row in rows(process, None, source)[1]] == ["1 a\n at x", "2 b\n at y", "1 c\n at z"]


def test_a_directory_that_is_away_forgets_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    append(folder / "a.log", "1\n")
    reader = Reader(followed(folder / "*.log"))
    reader.run(None)
    folder.rename(tmp_path / "away")
    reader.run(None)
    reader.run(None)
    (tmp_path / "away").rename(folder)
    append(folder / "a.log", "2\n")
    reader.run(None)
    assert reader.lines == ["1", "2"]
    (folder / "a.log").unlink()
    reader.run(None)
    assert not reader.state
    append(folder / "a.log", "3\n")
    reader.run(None)
    assert reader.lines == ["1", "2", "3"]


def test_a_deleted_log_is_read_to_its_end_by_a_source_that_has_it_open(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    append(log, "1\n")
    steps = iter([lambda: (append(log, "2\nlast"), log.unlink()), lambda: append(log, "3\n")])
    process = SimpleNamespace(state={}, stopping=False)

    def wait(seconds: float) -> bool:
        step = next(steps, None)
        process.stopping = step is None and next(left, None) is None
        if step is not None:
            step()
        return False

    left = iter(range(3))
    process.wait = wait
    source = followed(tmp_path / "*.log", idle_exit_s=None)
    assert [item["line"] for _, item in source(None, process) if item] == ["1", "2", "last", "3"]  # type: ignore[index]


def test_another_way_to_follow_is_another_source(tmp_path: Path) -> None:
    append(tmp_path / "a.log", "1\n")
    reader = Reader(followed(tmp_path / "*.log"))
    reader.run(None)
    with pytest.raises(Diverged, match="one of several"):
        [*followed(tmp_path / "a.log", follow=True)(reader.position, SimpleNamespace(state={}, stopping=False))]
    other = Reader(followed(tmp_path / "a.log", follow=True))
    other.run(None)
    with pytest.raises(Diverged, match="not in one of several"):
        [*followed(tmp_path / "*.log")(other.position, SimpleNamespace(state={}, stopping=False))]


def test_hundreds_of_logs_with_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_OPEN_MAX", 16)
    process = SimpleNamespace(state={}, stopping=False)
    source, position, found = followed(tmp_path / "*.log"), None, []
    for round in range(3):
        for number in range(300):
            append(tmp_path / f"{number}.log", f"{number} {round}\n")
        for after, item in source(position, process):
            position = after
            found += [item["line"]] if isinstance(item, dict) else []
    assert sorted(found) == sorted(f"{number} {round}" for number in range(300) for round in range(3))
    assert len(found) == 900 and len(process.state) <= 300


def watched(source: Files, *steps: Any, reader: Reader | None = None) -> list[Any]:
    """Run a source that waits, of which each look is followed by a step, and then by some without one."""
    left, items = iter([*steps, *[None] * 6]), []
    process = SimpleNamespace(state={} if reader is None else reader.state, stopping=False)

    def wait(seconds: float) -> bool:
        step = next(left, left)
        process.stopping = step is left
        if callable(step):
            step()
        return False

    process.wait = wait
    source.idle_exit_s = None
    for position, item in source(None if reader is None else reader.position, process):
        if reader is not None:
            reader.position = position
        items += [] if item is None else [item]
        assert len(items) < 3_000
    return [item["line"] if isinstance(item, dict) and item.keys() == {"line"} else item for item in items]


@pytest.mark.parametrize("follow", ["each", True])
def test_a_damaged_file_at_the_path_is_said_once_and_read_when_it_is_whole(follow: bool | str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("größe,x\n1,2\n", "latin-1")
    source = followed(path if follow is True else tmp_path / "*.csv", follow=follow)
    reader = Reader(source)
    found = watched(source, None, None, lambda: append(path, "3,4\n"), None, reader=reader)
    assert [type(item) for item in found] == [files.BadFile]
    before = dict(reader.state)
    assert watched(source, None, lambda: append(path, "5,6\n"), reader=reader) == []
    assert len(reader.state) == len(before)
    path.write_text("y,x\n1,2\n")
    assert watched(source, reader=reader) == [{"y": "1", "x": "2"}]
    path.rename(tmp_path / "a.csv.1")
    path.write_text("y,y\n1,2\n")
    (problem,) = watched(source, reader=reader)
    assert "names a column twice" in str(problem)
    path.rename(tmp_path / "a.csv.2")
    path.write_text("y,z\n3,4\n")
    assert watched(source, reader=reader) == [{"y": "3", "z": "4"}]
    assert watched(source, reader=reader) == []
    keys = [key if follow is True else key[1] for key in reader.state]
    assert sorted(key for key in keys if key) == [1, 2]


def test_a_header_that_is_longer_than_a_line_may_be_is_damage(tmp_path: Path) -> None:
    append(tmp_path / "a.csv", "a" * 3_000)
    (problem,) = watched(followed(tmp_path / "*.csv", line_bytes_max=1_000))
    assert "line_bytes_max=1,000" in str(problem)


LINKS = [
    ("app.log", "app.20260131.log", "app.20260201.log"),
    ("app.log", "app-2026-01-31.log", "app-2026-02-01.log"),
    ("app.log", "app.log-20260131", "app.log-20260201"),
    ("current.log", "app-2026-01-31.log", "app-2026-02-01.log"),
    ("app.log", "app.host.user.log.20260131-101010.77", "app.host.user.log.20260201-101010.77"),
]


@pytest.mark.parametrize(("link", "first", "second"), LINKS)
@pytest.mark.parametrize("is_later", [False, True])
def test_a_link_that_moves_to_the_next_file(link: str, first: str, second: str, is_later: bool, tmp_path: Path) -> None:
    """Also while the link is away for a look; a source that runs, and one that is started again and again."""

    def point(name: str) -> None:
        (tmp_path / link).symlink_to(name)

    steps = [
        lambda: (append(tmp_path / first, "1\n"), point(first)),
        lambda: append(tmp_path / first, "2\n"),
        lambda: (append(tmp_path / first, "3\n"), append(tmp_path / second, "4\n"), (tmp_path / link).unlink()),
        lambda: point(second),
        lambda: append(tmp_path / second, "5\n"),
        None,
        lambda: append(tmp_path / second, "6\n"),
    ]
    if not is_later:
        steps.pop(0)()  # type: ignore[misc]
    source = followed(tmp_path / "*.log")
    reader = Reader(source)
    assert watched(source, *steps, reader=reader) == list("123456")
    assert watched(source, reader=reader) == []


def test_a_link_of_which_files_are_missed_while_the_source_does_not_run(tmp_path: Path) -> None:
    for link, names in (("app.log", "app.{}.log"), ("prog.log", "prog.host.user.log.{}")):
        folder = tmp_path / link
        folder.mkdir()
        reader = Reader(followed(folder / "*.log"))
        append(folder / names.format(20260101), "old\n")
        for day in (1, 3, 4):
            for number in (day, day + 1):
                append(folder / names.format(20260110 + number), f"{number}\n")
            (folder / link).unlink(missing_ok=True)
            (folder / link).symlink_to(names.format(20260110 + number))
            reader.run(None)
        assert reader.lines == ["2", "3", "4", "4", "5"], link  # what was there first is not read


def test_a_log_that_gets_the_name_of_a_rotated_file_of_another_one(tmp_path: Path) -> None:
    append(tmp_path / "app.log", "1\n")
    append(tmp_path / "other.log", "o\n")
    log = tmp_path / "app.log"
    steps = [lambda: (append(log, "2\n"), log.rename(tmp_path / "other.log.1"), append(log, "3\n"))]
    assert watched(followed(tmp_path / "*.log"), *steps) == ["1", "o", "2", "3"]


def test_a_rotated_file_that_cannot_be_read_at_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the problem of its log. When it can be read, what was there at the first start is not read."""
    monkeypatch.setattr(families, "_AGAIN_S", 0.0)
    for name in ("a.log", "b.log", "b.log.1"):
        append(tmp_path / name, f"{name}\n")
    os.utime(tmp_path / "b.log.1", (1, 1))
    opened = places.Local.open

    def refused(self: places.Local, name: str) -> Any:
        if os.stat(name).st_ino == inode:
            raise PermissionError(13, "Permission denied", name)
        return opened(self, name)

    inode = (tmp_path / "b.log.1").stat().st_ino
    source = followed(tmp_path / "*.log")
    reader = Reader(source)
    with monkeypatch.context() as patch:
        patch.setattr(places.Local, "open", refused)
        found = watched(source, reader=reader) + watched(source, reader=reader)
    assert [item for item in found if isinstance(item, str)] == ["a.log"] and len(found) == 2
    (tmp_path / "b.log.1").rename(tmp_path / "b.log.2")
    os.utime(tmp_path / "b.log", (2_000_000_000,) * 2)
    (tmp_path / "b.log").rename(tmp_path / "b.log.1")
    append(tmp_path / "b.log", "new\n")
    assert watched(source, reader=reader) == ["b.log", "new"]


@pytest.mark.parametrize("follow", ["each", True])
@pytest.mark.parametrize("text", ["1\n2\n", "1\n2", "1\n2\n" * 1_000])
def test_a_log_that_is_replaced_by_its_longer_copy(text: str, follow: bool | str, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    append(log, text)
    source = followed(log if follow is True else tmp_path / "*.log", follow=follow, at="at")
    reader = Reader(source)

    def replace(more: str) -> None:
        append(tmp_path / ".a", log.read_text() + more)
        (tmp_path / ".a").replace(log)

    more = "\n3\n".removeprefix("\n" if text.endswith("\n") else "")
    steps = [lambda: replace(more), None, None, lambda: replace("4\n"), None, None, lambda: append(log, "5\n")]
    found = watched(source, *steps, reader=reader)
    lines = log.read_text().splitlines()
    rows = [(row["line"], row["at"]) for row in found]
    expected = [(line, f"a.log:{number}") for number, line in enumerate(lines, 1)]
    assert rows == (expected if text.endswith("\n") else [*expected[:1], ("2", "a.log:2"), *expected[1:]])
    assert watched(source, reader=reader) == []


def test_a_pattern_that_names_fewer_logs(tmp_path: Path) -> None:
    """Those that it does not name are not read, and are read on by a pattern that names them again."""
    names = ("a", "b", "c/d", "c/e/f")
    (tmp_path / "c/e").mkdir(parents=True)

    def write(line: str) -> None:
        for name in names:
            append(tmp_path / f"{name}.log", f"{name} {line}\n")

    reader = Reader(followed(tmp_path / "**/*.log"))
    for line, pattern, expected in (
        ("1", "**/*.log", names),
        ("2", "a*.log", "a"), ("3", "*/*.log", ["c/d"]), ("4", "c/**/*.log", ["c/d", "c/e/f"]),
    ):  # fmt: skip
        write(line)
        reader.source, before = followed(tmp_path / pattern), len(reader.lines)
        reader.run(None)
        assert {read.split()[0] for read in reader.lines[before:]} == set(expected)
    reader.source = followed(tmp_path / "**/*.log")
    reader.run(None)
    assert sorted(reader.lines) == sorted(f"{name} {line}" for name in names for line in "1234")


def test_a_directory_that_is_made_later(tmp_path: Path) -> None:
    folder = tmp_path / "logs"

    def make() -> None:
        folder.mkdir()
        append(folder / "a.log", "1\n")

    source = followed(folder)
    reader = Reader(source)
    assert watched(source, make, lambda: append(folder / "b.log", "2\n"), reader=reader) == ["1", "2"]
    folder.rename(tmp_path / "away")
    assert watched(source, reader=reader) == []
    (tmp_path / "away").rename(folder)
    assert watched(source, lambda: append(folder / "a.log", "3\n"), reader=reader) == ["3"]


def test_a_log_on_a_device_with_another_number_is_forgotten_when_it_is_gone(tmp_path: Path) -> None:
    for name in "ab":
        append(tmp_path / f"{name}.log", "1\n")
    reader = Reader(followed(tmp_path / "*.log"))
    reader.run(None)
    for key, row in reader.state.items():
        if key[1] == 0:
            row[4] += 7
    append(tmp_path / "a.log", "2\n")
    reader.run(None)
    for name in "ab":
        (tmp_path / f"{name}.log").unlink()
    for _ in range(3):
        reader.run(None)
    assert reader.state == {}


def test_a_directory_whose_time_has_no_fraction(tmp_path: Path) -> None:
    second = int(time.time())

    def add() -> None:
        append(tmp_path / "b.log", "b\n")
        os.utime(tmp_path, (second, second))

    append(tmp_path / "a.log", "a\n")
    os.utime(tmp_path, (second, second))
    time.sleep(0.1)
    assert watched(followed(tmp_path / "*.log"), add) == ["a", "b"]


def test_all_names_of_a_directory(tmp_path: Path) -> None:
    """A number is that of a rotated file also if its log is not there; a name that tells no format is one problem."""
    log = tmp_path / "app.log"

    def turn(line: str) -> Any:
        def rotate() -> None:
            for number in (2, 1):
                with contextlib.suppress(FileNotFoundError):
                    (tmp_path / f"app.log.{number}").rename(tmp_path / f"app.log.{number + 1}")
            log.rename(tmp_path / "app.log.1")
            append(log, f"{line}\n")

        return rotate

    source = followed(tmp_path / "*", format="text")
    reader = Reader(source)
    append(tmp_path / "app.log.1", "old\n")
    append(tmp_path / "10.0.0.1", "host\n")
    steps = [lambda: append(log, "1\n"), turn("2"), turn("3"), lambda: append(tmp_path / "10.0.0.1", "more\n")]
    assert watched(source, *steps, reader=reader) == ["host", "1", "2", "3", "more"]
    assert watched(source, turn("4"), reader=reader) == ["4"]

    folder = tmp_path / "mixed"
    folder.mkdir()
    append(folder / "a.log", "1\n")
    source = followed(folder / "*")
    reader = Reader(source)
    steps = [lambda: (append(folder / "README", "x\n"), append(folder / "a.log", "2\n"))]
    found = watched(source, *steps, reader=reader)
    (problem,) = (item for item in found if not isinstance(item, str))
    assert len(found) == 3 and {"1", "2"} < {*found} and "Try: give format=" in str(problem)
    assert watched(source, reader=reader) == []


GRAPH = """
import os, signal, threading
import cues
from cues.processors.file_source import Files

if "KILL_AFTER" in os.environ:
    threading.Timer(float(os.environ["KILL_AFTER"]), os.kill, (os.getpid(), signal.SIGKILL)).start()
graph = cues.Graph("g", errors="errors")
graph.add(cues.Source("lines", Files("*.log", follow="each", idle_exit_s=0, grace_s=0.3, poll_s=0.01)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", slow_except([1], [1, 25]))
def test_killed_at_any_time_while_logs_grow_and_are_rotated(kills: int, tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    (tmp_path / "graph.py").write_text(GRAPH)
    cues_command = str(Path(sys.executable).with_name("cues"))
    command = [cues_command, "run", "graph.py", "--store", "store", "--durability", "process"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    logs = Logs(tmp_path, chance)
    for kill in range(kills + 1):
        environment = os.environ | ({"KILL_AFTER": str(0.2 + chance.random() * 0.4)} if kill < kills else {})
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as process:
            for _ in range(20):
                if len(logs.logs) < 4:
                    logs.add()
                for log in logs.logs:
                    log.write()
                    if chance.random() < 0.04:
                        log.turn()
                time.sleep(0.01)
            if kill == kills:
                logs.finish()
            _, said = process.communicate(timeout=60)
            assert process.returncode in (0, -signal.SIGKILL), said.decode()
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    with cues.open(tmp_path / "store") as store:
        assert not store.queue("errors").last_index
        logs.check([row["line"] for row in testing.messages(store, "lines")], whole=True)
