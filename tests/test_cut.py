"""The data file of a ``"process"`` store is as long as its map while it is open. The last one that closes cuts it."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import seeds
from children import Child

import cues
from cues import Store

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="without it the file is not mapped writable")

WRITER = """
import sys, cues
with cues.open(sys.argv[1]) as store:
    print(store.queue("q").last_index, flush=True)
    while line := sys.stdin.readline():
        for n in range(int(line)):
            store.queue("q").appender().write({"n": n, "t": "x" * 500})
        print(store.queue("q").last_index, flush=True)
"""


def length(path: Path) -> int:
    return (path / "data.mdb").stat().st_size


def made(path: Path, count: int = 10) -> None:
    with cues.open(path, durability="process") as store:
        store.queue("q").appender().write_many([{"n": n} for n in range(count)])


def test_a_closed_store_is_as_long_as_what_it_uses_and_a_copy_is_whole(tmp_path: Path) -> None:
    made(tmp_path / "s")
    assert length(tmp_path / "s") < 1 << 20
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    with cues.open(tmp_path / "copy") as store:
        assert store.check() == [] and store.queue("q").last_index == 10
        assert length(tmp_path / "copy") > 1 << 30
        store.queue("q").appender().write({"n": 10})
    with cues.open(tmp_path / "copy", readonly=True) as store:
        assert store.queue("q").last_index == 11
    assert length(tmp_path / "copy") < 1 << 20


def test_a_kill_leaves_it_long_and_the_next_clean_end_cuts_it(tmp_path: Path) -> None:
    made(tmp_path / "s")
    with Child(WRITER, tmp_path / "s") as child:
        child.line()
        child.say("3")
        child.line()
        child.kill()
    assert length(tmp_path / "s") > 1 << 30
    with cues.open(tmp_path / "s") as store:
        assert store.queue("q").last_index == 13
    assert length(tmp_path / "s") < 1 << 20


def test_others_that_have_it_open_write_after_the_cut(tmp_path: Path) -> None:
    """Some have written and some have not when another one closes; a file that is too short would kill them."""
    chance = random.Random(seeds.new())
    path, count = tmp_path / "s", 10
    made(path)
    children = [Child(WRITER, path) for _ in range(3)]
    try:
        for child in children:
            assert child.line() == str(count)
        for _ in range(12):
            with cues.open(path) as store:  # the last writer for now, as long as no child has written
                if chance.random() < 0.5:
                    store.queue("q").appender().write({"n": 0})
                    count += 1
            child = chance.choice(children)
            some = chance.randint(1, 60)
            child.say(str(some))
            count += some
            assert child.line() == str(count)
            if chance.random() < 0.3:
                children.remove(child)
                child.end()
                children.append(Child(WRITER, path))
                assert children[-1].line() == str(count)
    finally:
        for child in children:
            child.end()
    assert length(path) < 4 << 20
    with Store(path, readonly=True) as store:
        assert store.check() == [] and store.queue("q").last_index == count
