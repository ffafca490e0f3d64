"""``cues run --replicate``: the copy of a run, after each kind of end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small import has_ended, until

import cues
from cues.tools import follower

pytestmark = pytest.mark.slow

GRAPH = """
import cues, time
graph = cues.Graph("g")
@graph.source("numbers", resume="skip")
def numbers():
    for n in range(100_000_000):
        time.sleep(0.001)
        yield {"n": n}
@graph.stream("numbers", "doubled")
def double(message):
    return {"n": message["n"], "twice": 2 * message["n"]}
"""


def copied(dest: Path) -> str:
    state = follower.Following.load(dest)
    return state.copied if state else ""


@contextlib.contextmanager
def run(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "graph.py").write_text(GRAPH)
    command = [sys.executable, "-m", "cues", "run", "graph.py", "--replicate", "copy", "--max-lag", "0.4", *options]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def follower_of(folder: Path) -> follower.FollowerSeen:
    """The follower, when it copies."""
    until(lambda: follower.seen(folder / "data" / "g"))
    return follower.seen(folder / "data" / "g")[0]


def queues(store: Path) -> dict[str, list[int]]:
    with cues.open(store) as opened:
        assert not opened.check()
        return {name: [m["n"] for m in opened.queue(name).tailer()] for name in ("numbers", "doubled")}


def test_at_the_end_of_a_run_the_copy_has_every_commit(tmp_path: Path) -> None:
    with run(tmp_path) as process:
        seen = follower_of(tmp_path)
        assert seen.alive and seen.max_lag_s == 0.4 and seen.dest == str(tmp_path / "copy")
        shown = subprocess.run(
            [sys.executable, "-m", "cues", "status", "data/g"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert json.loads(shown.stdout.splitlines()[0])["followers"][0]["pid"] == seen.pid
        first = copied(tmp_path / "copy")
        until(lambda: copied(tmp_path / "copy") > first)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "does not have" not in errors
        with pytest.raises(ProcessLookupError):
            os.kill(seen.pid, 0)
    subprocess.run(
        [sys.executable, "-m", "cues", "follow", "--promote", "copy", "--abandon", "--yes"], cwd=tmp_path, check=True
    )
    original = queues(tmp_path / "data" / "g")
    assert queues(tmp_path / "copy") == original
    assert original["numbers"] == original["doubled"] == list(range(len(original["numbers"])))


def test_a_follower_that_is_killed_is_started_again(tmp_path: Path) -> None:
    with run(tmp_path) as process:
        for _ in range(2):
            seen = follower_of(tmp_path)
            os.kill(seen.pid, signal.SIGKILL)
            until(lambda seen=seen: follower.seen(tmp_path / "data" / "g")[0].pid != seen.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "it is started again" in errors
    subprocess.run(
        [sys.executable, "-m", "cues", "follow", "--promote", "copy", "--abandon", "--yes"], cwd=tmp_path, check=True
    )
    assert queues(tmp_path / "copy") == queues(tmp_path / "data" / "g")


def test_after_the_kill_of_a_run_its_follower_copies_the_last_commits_and_ends(tmp_path: Path) -> None:
    with run(tmp_path) as process:
        seen = follower_of(tmp_path)
        first = copied(tmp_path / "copy")
        until(lambda: copied(tmp_path / "copy") > first)
        process.kill()
        process.wait()
    until(lambda: has_ended(seen.pid))
    subprocess.run(
        [sys.executable, "-m", "cues", "follow", "--promote", "copy", "--abandon", "--yes"], cwd=tmp_path, check=True
    )
    assert queues(tmp_path / "copy") == queues(tmp_path / "data" / "g")


def test_a_directory_that_cannot_be_used_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    with cues.open(tmp_path / "copy") as store:
        store.queue("q").appender().write({"n": 1})
    with run(tmp_path) as process:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "is a store; a copy is kept in a directory of its own" in errors and "Try: give a directory" in errors
    with run(tmp_path, "--engine", "spark", "--queues", "shared") as process:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2 and "--replicate copies stores" in errors
