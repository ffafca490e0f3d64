"""Incidents of disk and machine, from start to end, with the commands that the pages name: nothing is lost.

a full disk        the run waits before it is full; space is freed with purge and compact, or by others; it goes on
a lost machine     the copy of --replicate is promoted, and the graph goes on there
an old owner       its store is there: it is retired, and a process that still has it open is fenced
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Child
from small import has_ended, until

import cues
from cues.tools import follower

pytestmark = pytest.mark.slow

COUNT = 400
GRAPH = """
import cues
graph = cues.Graph("g")
@graph.stream("in", "out", batch_size=20)
def widen(message, process):
    process.state["seen"] = process.state.get("seen", 0) + 1
    return {"n": message["n"], "seen": process.state["seen"], "x": "x" * 60_000}
"""


def command(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "cues", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, (arguments, done.returncode, done.stderr)
    return done


def results(store: Path) -> list[tuple[int, int]]:
    with cues.open(store) as opened:
        assert not opened.check()
        return [(message["n"], message["seen"]) for message in opened.queue("out").tailer()]


def send(folder: Path, numbers: range) -> None:
    lines = "".join(json.dumps({"n": n}) + "\n" for n in numbers)
    subprocess.run(
        [sys.executable, "-m", "cues", "send", "data/g#in", "--create"],
        cwd=folder,
        input=lines,
        text=True,
        check=True,
        capture_output=True,
    )


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A file system with little room; needs root."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a file system here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    """24 MB of results do not fit on 20 MB: each time that the run waits, the operator ends it and makes room."""
    with small_disk(tmp_path / "disk", "20m") as disk:
        (disk / "graph.py").write_text(GRAPH)
        send(disk, range(COUNT))
        taken: list[tuple[int, int]] = []
        stops = 0
        while True:
            run = started(disk)
            said = until_waiting(run)
            if run.poll() == 0:
                break
            assert "less than 8.0 MB (--min-free)" in said
            run.send_signal(signal.SIGINT)
            assert run.wait(60) == 130
            at_start = command(disk, "run", "graph.py", "--idle-exit", "0", "--min-free", "8MB", code=3).stderr
            assert "less than min_free (8.0 MB)" in at_start and "Try: free space" in at_start
            found = json.loads(command(disk, "status", "data/g").stdout.splitlines()[0])
            assert found["free_bytes"] < 8_000_000
            now = results(disk / "data" / "g")
            assert now  # each run went on
            taken += now
            stops += 1
            command(disk, "purge", "data/g#out", "--before", str(len(taken) + 1), "--yes")
            command(disk, "compact", "data/g")
        assert stops >= 1
        taken += results(disk / "data" / "g")
        assert taken == [(n, n + 1) for n in range(COUNT)]


def started(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cues", "run", "graph.py", "--json", "--idle-exit", "0", "--min-free", "8MB"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def until_waiting(run: subprocess.Popen[str]) -> str:
    """Read lines until one says that the run waits for the disk, or goes on, or it has ended."""
    assert run.stderr is not None
    for line in run.stderr:
        if "waiting for space" in line or "has space again" in line:
            return line
    run.wait(60)
    return ""


def test_a_disk_that_others_fill_for_a_while(tmp_path: Path) -> None:
    """Another program fills the disk in the middle of the run, and frees it again: nobody needs to do anything."""
    with small_disk(tmp_path / "disk", "60m") as disk:
        (disk / "graph.py").write_text(SLOW)
        send(disk, range(5 * COUNT))
        run = started(disk)
        assert run.stderr is not None and any('"progress"' in line for line in run.stderr)
        with open(disk / "other", "wb") as file:
            file.truncate(0)
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - 4_000_000)
        assert "waiting for space" in until_waiting(run)
        (disk / "other").unlink()
        assert "has space again" in until_waiting(run)
        assert until_waiting(run) == "" and run.returncode == 0
        assert results(disk / "data" / "g") == [(n, n + 1) for n in range(5 * COUNT)]


SLOW = GRAPH.replace('"x" * 60_000', '"y"').replace(
    "def widen(message, process):", "def widen(message, process):\n    import time; time.sleep(0.002)"
)


@contextlib.contextmanager
def replicated(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run whose copy is at work."""
    (folder / "graph.py").write_text(SLOW)
    send(folder, range(COUNT))
    process = subprocess.Popen(
        [sys.executable, "-m", "cues", "run", "graph.py", "--replicate", "other/g", "--max-lag", "0.4"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: follower.seen(folder / "data" / "g"))
        until(lambda: (folder / "other" / "g" / follower.STATE).exists())
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("lost", ["killed", "gone"])
def test_a_machine_is_lost_and_its_copy_promoted(tmp_path: Path, lost: str) -> None:
    """Killed: the original is still there, and nothing is lost. Gone: the copy has a whole earlier moment."""
    with replicated(tmp_path) as process:
        pid = follower.seen(tmp_path / "data" / "g")[0].pid
        if lost == "gone":  # the machine of both processes
            os.kill(pid, 9)
        process.kill()
        process.wait()
        until(lambda: has_ended(pid))
    if lost == "gone":
        shutil.rmtree(tmp_path / "data")
    promoted = command(tmp_path, "follow", "--promote", "other/g", "--yes").stdout
    facts = json.loads(promoted)
    assert bool(facts["retired"]) == (lost == "killed"), facts
    before = results(tmp_path / "other" / "g")
    with cues.open(tmp_path / "other" / "g") as store:
        sent = [message["n"] for message in store.queue("in").tailer()]
    assert before == [(n, n + 1) for n in range(len(before))]
    assert sent == list(range(COUNT))  # they were there before the copy began
    command(tmp_path, "run", "graph.py", "--store", "other/g", "--idle-exit", "0")
    assert results(tmp_path / "other" / "g") == [(n, n + 1) for n in range(COUNT)]
    if lost == "killed":
        refused = command(tmp_path, "run", "graph.py", "--idle-exit", "0", code=1)
        assert "was retired" in refused.stderr and "other/g" in refused.stderr


OLD_OWNER = """
import sys, cues
with cues.open(sys.argv[1]) as store:
    appender = store.queue("in").appender()
    print("open", flush=True)
    sys.stdin.readline()
    try:
        appender.write({"n": -1})
        print("acknowledged")
    except cues.CuesError as error:
        print("refused", error.message)
"""


def test_an_old_owner_is_fenced(tmp_path: Path) -> None:
    with replicated(tmp_path) as process, Child(OLD_OWNER, tmp_path / "data" / "g") as owner:
        assert owner.line() == "open"
        pid = follower.seen(tmp_path / "data" / "g")[0].pid
        process.kill()
        process.wait()
        until(lambda: has_ended(pid))
        command(tmp_path, "follow", "--promote", "other/g", "--yes")
        owner.say("go on")
        assert owner.line().startswith("refused ")
    command(tmp_path, "run", "graph.py", "--store", "other/g", "--idle-exit", "0")
    assert results(tmp_path / "other" / "g") == [(n, n + 1) for n in range(COUNT)]
