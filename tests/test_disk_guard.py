"""A disk with little free space: an append is refused, and a run stops with everything committed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import until

import cues
from cues.base import events
from cues.cli.app import run as cli
from cues.errors import DiskLow, InvalidArgument, StoreFull
from cues.graphs import graphfile
from cues.storage import free_space

GIB = 1 << 30
Disk = Callable[[int], None]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A function that sets the free bytes of every disk, whose size is 100 GiB."""
    free = [50 * GIB]

    class Status:
        f_frsize = 4096
        f_blocks = 100 * GIB // 4096

        @property
        def f_bavail(self) -> int:
            return free[0] // 4096

    monkeypatch.setattr(free_space.os, "statvfs", lambda _: Status())

    def set_free(count: int) -> None:
        free[0] = count

    return set_free


def test_the_default_limit_fits_the_disk() -> None:
    for total, limit in ((8 << 20, (8 << 20) // 10), (GIB, 64 << 20), (20 * GIB, GIB // 5), (1 << 50, GIB)):
        assert free_space.default_limit(total) == limit


def test_an_append_is_refused_below_the_limit_and_what_frees_space_is_not(tmp_path: Path, disk: Disk) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")
        appender = queue.appender()
        appender.write_many([{"n": n, "x": "x" * 3000} for n in range(1000)])
        disk(GIB - 4096)
        with pytest.raises(DiskLow, match=r"1\.1 GB free, less than min_free \(1\.1 GB\)") as caught:
            for _ in range(5000):
                appender.write({"n": queue.last_index, "x": "x" * 3000})
        assert (caught.value.free, caught.value.limit) == (GIB - 4096, GIB)
        assert isinstance(caught.value, StoreFull) and "nothing was written" in str(caught.value)
        with pytest.raises(DiskLow):
            appender.write_many([{"x": "x" * 100_000}] * 100)
        assert [m["n"] for m in queue.tailer()] == list(range(queue.last_index))
        assert queue.tailer("named").read() is not None
        assert queue.purge(before=500) == 499
        disk(2 * GIB)
        appender.write_many([{"x": "x" * 100_000}] * 100)
        assert not store.check()


@pytest.mark.parametrize("given", [0, 1 << 20])
def test_a_program_sets_the_limit(tmp_path: Path, disk: Disk, given: int) -> None:
    disk(2 << 20)
    with cues.open(tmp_path / "s", durability="process", min_free=given) as store:
        store.queue("q").appender().write_many([{"x": "x" * 100_000}] * 100)
    with pytest.raises(InvalidArgument, match="min_free is -1"):
        cues.open(tmp_path / "s", min_free=-1)


@pytest.mark.slow
def test_a_run_waits_with_everything_committed_and_goes_on(tmp_path: Path, disk: Disk) -> None:
    """The disk becomes low in the middle of a step, whose commit uses the reserve. A run does not start there."""
    graph = cues.Graph("g", store=tmp_path / "s")
    inside, go_on, second = threading.Event(), threading.Event(), threading.Event()
    calls: list[int] = []
    heard: list[events.Event] = []

    @graph.stream("in", "out", batch_size=1, side_effects=True)
    def work(message: Any) -> Any:
        calls.append(message["n"])
        if message["n"] == 3:
            inside.set()
            assert go_on.wait(60)
        if message["n"] == 8:
            assert second.wait(60)
        return message | {"x": "x" * 100_000}

    running = graph.start(listeners=(heard.append,))
    try:
        for n in range(20):
            running.send("in", {"n": n})
        assert inside.wait(60)
        disk(GIB // 2)
        until(lambda: [event for event in heard if isinstance(event, events.Away)])
        go_on.set()
        until(lambda: len(running.messages("out")) == 4)
        assert not running.wait_idle(0.3) and calls == [0, 1, 2, 3]
        disk(50 * GIB)
        until(lambda: len(running.messages("out")) == 8)
        disk(GIB // 2)
        until(lambda: len([event for event in heard if isinstance(event, events.Away)]) == 3)
        second.set()
    finally:
        go_on.set()
        running.drain()  # it does not wait for the disk
        running.close()
    known = len(calls)
    assert calls == list(range(known)) and known < 20
    assert [event.over for event in heard if isinstance(event, events.Away)] == [False, True, False]
    with cues.open(tmp_path / "s") as store:
        assert [m["n"] for m in store.queue("out").tailer()] == calls
    with pytest.raises(DiskLow, match="everything that it did is committed"), graph.start() as running:  # at once
        running.wait_idle(60)
    with graph.start(min_free="1MB") as running:
        assert running.wait_idle(60)
    assert calls == list(range(20))
    disk(50 * GIB)
    with cues.open(tmp_path / "s") as store:
        assert [m["n"] for m in store.queue("out").tailer()] == calls
        assert not store.check()


def test_before_the_limit_there_is_one_warning(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = cues.Graph("g", store=tmp_path / "s")
    heard: list[str] = []
    looked = threading.Semaphore(0)
    look = free_space.look

    def counted(path: Any, min_free: int | None = None) -> free_space.Space:
        if threading.current_thread().name == "cues disk guard":
            looked.release()
        return look(path, min_free)

    monkeypatch.setattr("cues.engine.disk_guard._LOOK_S", 0.01)
    monkeypatch.setattr(free_space, "look", counted)

    @graph.stream("in", "out")
    def same(message: Any) -> Any:
        return message

    with graph.start(listeners=(lambda event: heard.append(event.text),)) as running:
        for free in (2 * GIB - 4096, 3 * GIB, 2 * GIB - 4096):
            disk(free)
            for _ in range(4):
                assert looked.acquire(timeout=60)
        assert running.wait_idle(60)
    assert len([text for text in heard if "the run waits below 1.1 GB" in text]) == 2


def test_the_command_line_says_what_was_found_and_has_an_exit_code_of_its_own(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("graph.py").write_text(
        'import cues\ngraph = cues.Graph("g")\n@graph.stream("in", "out")\ndef same(message): return message\n'
    )
    with cues.open("data/g") as store:
        store.queue("in").appender().write({"n": 1})
    disk(GIB // 2)
    assert cli(["run", "graph.py", "--idle-exit", "0"]) == 3
    error = capsys.readouterr().err
    assert "537 MB free, less than min_free (1.1 GB)" in error and "Try: free space" in error
    assert cli(["status", "data/g"]) == 0
    assert '"free_bytes": 536870912, "min_free_bytes": 1073741824' in capsys.readouterr().out
    assert cli(["status", "data/g", "--table"]) == 0
    assert "LOW DISK: 537 MB free" in capsys.readouterr().out
    assert cli(["run", "graph.py", "--idle-exit", "0", "--min-free", "100MB"]) == 0
    assert cli(["run", "graph.py", "--min-free", "much"]) == 1
    assert "'much' is not a size" in capsys.readouterr().err
    with cues.open("data/g") as store:
        assert [m["n"] for m in store.queue("out").tailer()] == [1]


def test_a_file_system_that_tells_no_size_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = os.statvfs(tmp_path)

    class Status:
        f_frsize, f_blocks, f_bavail = known.f_frsize, 0, 0

    monkeypatch.setattr(free_space.os, "statvfs", lambda _: Status())
    assert not free_space.look(tmp_path).is_low
    assert not free_space.look(tmp_path, 1 << 40).is_low


def test_workers_wait_too(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor looks at the disks, and tells the workers."""
    monkeypatch.setattr("cues.engine.disk_guard._LOOK_S", 0.01)
    (tmp_path / "graph.py").write_text(
        'import cues\ngraph = cues.Graph("g", durability="process")\n'
        '@graph.stream("in", "out")\ndef same(message): return message\n'
    )
    graph = graphfile.load(str(tmp_path / "graph.py")).graph
    heard: list[events.Event] = []
    with graph.start(store=tmp_path / "s", workers=1, listeners=(heard.append,)) as running:
        running.send("in", {"n": 0})
        assert running.wait_idle(60)
        disk(GIB // 2)
        until(lambda: [event for event in heard if isinstance(event, events.Away)])
        sent = [0]

        def held() -> bool:
            """Whether a message that is sent now waits: the workers are told of the disk a moment later."""
            sent.append(len(sent))
            running.send("in", {"n": sent[-1]})
            return not running.wait_idle(0.5)

        until(held)
        known = len(running.messages("out"))
        assert known < len(sent)
        disk(50 * GIB)
        assert running.wait_idle(60)
        assert [m["n"] for m in running.messages("out")] == sent
