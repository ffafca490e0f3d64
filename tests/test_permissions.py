"""Stores on machines with other users: what Cues writes is private, and a store that others may write is told."""

from __future__ import annotations

import logging
import os
import random
import stat
from pathlib import Path

import children
import pytest
import seeds
from test_settings import foreign_group, give_away

import cues
from cues.base import trust
from cues.storage import environment

EVERYTHING = """
import os, sys
os.umask(0)
os.chdir(sys.argv[1])
with open("graph.py", "w") as file:
    file.write('''
import cues
graph = cues.Graph("g", store="data", errors="errors", queues={"b": {"path": "other", "max_lag": 5}})
graph.source("a")

@graph.stream("a", "b")
def double(message):
    return {"n": 2 * message["n"]}

@graph.sink("b")
def look(message):
    pass
''')
from cues.cli.app import run
for line in (
    'send --create graph.py#a {"n":1} {"n":2}',
    "run graph.py --idle-exit 0",
    "backup data backups",
    "compact data",
    "follow data copy --once",
    "salvage data salvaged",
    "restore backups restored",
):
    if line.startswith("restore"):  # it restores both stores
        os.rename("other", "old")
    code = run(line.split())
    assert code == 0, (line, code)
import cues
with cues.open("data") as store:  # while it is open, and while a reader waits
    store.queue("a").tailer("reader").read(block=True, timeout=0.01)
    for folder, folders, files in os.walk("."):
        for name in folders + files:
            path = os.path.join(folder, name)
            print(oct(os.stat(path).st_mode & 0o777), path)
"""


STORES = ("data", "other", "old", "restored", "salvaged")


@pytest.mark.slow
def test_what_cues_writes_can_be_read_by_its_user_alone(tmp_path: Path) -> None:
    """With a umask that takes nothing away: stores, bells, backups, restored stores and copies."""
    with children.Child(EVERYTHING, tmp_path) as child:
        found = child.end().splitlines()
    listed = [line.split(" ", 1) for line in found if line.startswith("0o") and "__pycache__" not in line]
    modes = {path.removeprefix("./"): int(mode, 8) for mode, path in listed}
    assert modes.pop("graph.py") == 0o666, "the umask takes nothing away"
    shown = {path: oct(mode) for path, mode in modes.items() if mode not in (0o600, 0o700)}
    assert shown == {}
    folders = {path for path in modes if any(other.startswith(f"{path}/") for other in modes)}
    assert {path for path, mode in modes.items() if mode == 0o700} >= folders
    assert set(STORES) <= folders and {f"{store}/data.mdb" for store in STORES} <= set(modes)
    assert {f"data/{name}" for name in ("lock.mdb", "locks", "mark", "wake", "bells")} <= set(modes)
    assert any(path.startswith("backups/") and mode == 0o600 for path, mode in modes.items())


def test_later_files_of_a_store_that_was_opened_to_a_group_are_open_to_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with cues.open(path) as store:
        store.queue("q").appender().write({"n": 1})
    path.chmod(0o770)
    (path / "data.mdb").chmod(0o660)
    for name in ("mark", "wake", "lock.mdb", "locks"):
        (path / name).unlink()
    for bell in (path / "bells").iterdir():
        bell.unlink()
    (path / "bells").rmdir()
    before = os.umask(0o007)
    try:
        with cues.open(path) as store:
            store.queue("q").appender().write({"n": 2})
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    finally:
        os.umask(before)
    assert modes.pop("bells") == 0o770
    assert set(modes.values()) == {0o660} and {"mark", "wake", "lock.mdb", "locks"} <= set(modes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path, patch: give_away(path / "data.mdb", patch), "data.mdb belongs to"),
        (lambda path, patch: give_away(path, patch), "s belongs to"),
        (lambda path, patch: (path / "data.mdb").chmod(0o666), "anybody may write to"),
        (lambda path, patch: path.chmod(0o777), "anybody may write to"),
    ],
    ids=["a file of another", "a directory of another", "a file for all", "a directory for all"],
)
def test_a_store_that_other_users_may_write_is_told_once(
    change: object, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with cues.open(path) as store:
        store.queue("q").appender().write({"n": 1})
    change(path, monkeypatch)  # type: ignore[operator]
    monkeypatch.setattr(environment, "_warned", set())
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        with cues.open(path) as store:
            assert store.queue("q").tailer().read() == {"n": 1}
    (told,) = caplog.records
    assert words in told.getMessage() and "Try: chown" in told.getMessage()
    caplog.clear()
    monkeypatch.setattr(environment, "_warned", set())
    monkeypatch.setenv(trust.VARIABLE, str(path))
    with cues.open(path, readonly=True):
        assert caplog.records == []


def test_a_store_of_this_user_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert foreign_group() != os.getegid()
    for _ in range(2):
        with cues.open(tmp_path / "s"):
            pass
    assert caplog.records == []


# --- links, against a model ---------------------------------------------------------------------------


def is_trusted(path: Path, foreign: set[Path], open_to_all: set[Path]) -> bool:
    """The model: each link of the chain, its end, and the directories that these are in."""
    while True:
        directory = path.parent.resolve()
        path = directory / path.name
        if {path, directory} & foreign or directory in open_to_all:
            return False
        if not path.is_symlink():
            return path not in open_to_all
        path = directory / os.readlink(path)


def test_files_and_links_of_others_at_random_are_trusted_as_a_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to a link in a directory of another user: that user chooses which file is read."""
    seed = seeds.new()
    dice, verdicts = random.Random(seed), set()
    for round in range(150):
        root = tmp_path / str(round)
        directories = [root / name for name in "abc"]
        for directory in directories:
            directory.mkdir(parents=True)
        (root / "linked").symlink_to(dice.choice(directories))
        places = [*directories, root / "linked"]
        file = dice.choice(directories) / "cues.toml"
        file.write_text("")
        chain = [file]
        for n in range(dice.randrange(4)):
            link, end = dice.choice(places) / f"link{n}", chain[-1]
            link.symlink_to(os.path.relpath(end, link.parent.resolve()) if dice.random() < 0.5 else end)
            chain.append(link)
        known = [*(place.parent.resolve() / place.name for place in chain), *directories]
        foreign = {place for place in known if dice.random() < 0.08}
        open_to_all = {place for place in [file, *directories] if dice.random() < 0.1}
        for place in open_to_all:
            place.chmod(place.stat().st_mode | stat.S_IWOTH)
        monkeypatch.setattr(
            trust, "is_own", lambda place, foreign=foreign: place.parent.resolve() / place.name not in foreign
        )
        expected = is_trusted(chain[-1], foreign, open_to_all)
        found = trust.problem(chain[-1])
        assert (found is None) is expected, (seed, round, chain, foreign, open_to_all, found)
        verdicts.add((expected, len(chain)))
    assert len(verdicts) > 5
