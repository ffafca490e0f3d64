"""A map that is full grows by itself: the commit that found it full happens once, in every process and after kills."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import children
import pytest
from sets import slow_except

import cues
from cues.errors import InvalidArgument, StoreFull
from cues.storage.format_record import record_of
from cues.testing import run_until_idle

SMALL = 1 << 20
DURABILITIES = ("disk", "process")
BODY = "x" * 3000


def numbers(queue: Any) -> list[int]:
    return [message["n"] for message in queue.tailer()]


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_full_map_grows_and_no_message_is_lost_or_doubled(tmp_path: Path, durability: str, checked: Any) -> None:
    with cues.open(tmp_path / "s", durability=durability, map_size=SMALL) as store:
        appender = store.queue("q").appender()
        for start in range(0, 2000, 100):
            assert appender.write_many([{"n": n, "x": BODY} for n in range(start, start + 100)])[0] == start + 1
        assert appender.write({"n": 2000, "x": "y" * 1_000_000}) == 2001
        assert numbers(store.queue("q")) == list(range(2001))
        size = store.map_size
        assert size >= 8 * SMALL
        with store.core.view() as txn:  # the record is what a compaction maps
            assert record_of(txn)["map_size"] == size
    with cues.open(tmp_path / "s") as store:
        assert store.map_size == size  # and is not that of the first opening
    checked(tmp_path / "s")


def test_a_map_does_not_grow_beyond_its_limit_which_the_store_keeps(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process", map_size=SMALL, max_map_size=3 * SMALL) as store:
        appender = store.queue("q").appender()
        with pytest.raises(StoreFull, match="max_map_size of 3,145,728 bytes; nothing was written"):
            for n in range(2000):
                appender.write({"n": n, "x": BODY})
        assert store.map_size == 3 * SMALL
        last = store.queue("q").last_index
    with cues.open(tmp_path / "s") as store, pytest.raises(StoreFull, match="larger max_map_size"):
        for n in range(last, 2000):
            store.queue("q").appender().write({"n": n, "x": BODY})
    with cues.open(tmp_path / "s", max_map_size=64 * SMALL) as store:
        appender = store.queue("q").appender()
        for n in range(store.queue("q").last_index, 2000):
            appender.write({"n": n, "x": BODY})
        assert numbers(store.queue("q")) == list(range(2000))
    with pytest.raises(InvalidArgument, match="max_map_size is 1048575"):
        cues.open(tmp_path / "t", max_map_size=SMALL - 1)


def test_a_step_that_finds_the_map_full_is_committed_once(tmp_path: Path) -> None:
    """Its outputs, state and positions are one commit, which is undone, and runs again in the larger map."""
    graph = cues.Graph("g")
    calls = []

    @graph.stream("in", "out", key=lambda message: message["n"] % 3, batch_size=50)
    def grow(message: Any, process: Any) -> Any:
        calls.append(message["n"])
        process.state["sum"] = process.state.get("sum", 0) + 1
        return message | {"x": BODY, "count": process.state["sum"]}

    with cues.open(tmp_path / "s", durability="process", map_size=SMALL) as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(900)])
        assert store.map_size == SMALL
        run_until_idle(graph, store)
        assert store.map_size > SMALL
        out = list(store.queue("out").tailer())
        assert [message["n"] for message in out] == list(range(900)) == calls
        assert [message["count"] for message in out] == [1 + n // 3 for n in range(900)]
        assert not store.check()


@pytest.mark.slow
@pytest.mark.parametrize("durability", DURABILITIES)
def test_threads_that_find_the_map_full_at_once_grow_it_together(tmp_path: Path, durability: str) -> None:
    """With readers that begin transactions all the time: the map changes while none is under way."""
    with cues.open(tmp_path / "s", durability=durability, map_size=SMALL) as store:
        queue = store.queue("q")
        errors: list[BaseException] = []
        done = threading.Event()

        def write(writer: int) -> None:
            try:
                for n in range(60):
                    queue.appender().write_many([{"w": writer, "n": 10 * n + i, "x": BODY} for i in range(10)])
            except BaseException as error:
                errors.append(error)

        def read() -> None:
            try:
                while not done.is_set():
                    queue.tailer().read_many(3)
                    store.info()
            except BaseException as error:
                errors.append(error)

        writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        readers = [threading.Thread(target=read) for _ in range(2)]
        try:
            for thread in (*readers, *writers):
                thread.start()
            for thread in writers:
                thread.join()
        finally:
            done.set()
            for thread in readers:
                thread.join()
        assert not errors
        assert store.map_size <= 32 * SMALL  # not once for each thread
        for writer in range(4):
            assert [m["n"] for m in queue.tailer() if m["w"] == writer] == list(range(600))


GROWS = """
import sys, cues
with cues.open(sys.argv[1]) as store:
    appender = store.queue("q").appender()
    for n in range(int(sys.argv[2]), int(sys.argv[2]) + 1000):
        appender.write({"n": n, "x": "x" * 3000})
    print(store.map_size)
"""


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_process_takes_the_larger_map_of_another(tmp_path: Path, durability: str) -> None:
    """For a read, for a write, for a look; also while it is open read-only, and when another handle reads."""
    with cues.open(tmp_path / "s", durability=durability, map_size=SMALL) as store:
        queue = store.queue("q")
        queue.appender().write({"n": 0, "x": BODY})
        children.run(GROWS, tmp_path / "s", 1)
        assert numbers(queue) == list(range(1001))
        size = store.map_size
        assert size > SMALL
        children.run(GROWS, tmp_path / "s", 1001)
        assert queue.appender().write({"n": 2001, "x": BODY}) == 2002
        assert store.map_size > size
        children.run(GROWS.replace('"q"', '"other"'), tmp_path / "s", 0)
        assert len(store.queue("other")) == 1000
        assert numbers(queue) == list(range(2002))
    with cues.open(tmp_path / "s", readonly=True) as store:
        children.run(GROWS, tmp_path / "s", 2002)
        children.run(GROWS, tmp_path / "s", 3002)
        assert numbers(store.queue("q")) == list(range(4002))


WRITES = """
import sys, cues
with cues.open(sys.argv[1]) as store:
    appender = store.queue("q").appender()
    for n in range(400):
        appender.write_many([{"w": int(sys.argv[2]), "n": 5 * n + i, "x": "x" * 1000} for i in range(5)])
"""
READS = """
import sys, cues
with cues.open(sys.argv[1], readonly=True) as store:
    tailer = store.queue("q").tailer()
    seen = 0
    while seen < int(sys.argv[2]):
        assert tailer.read(block=True, timeout=60) is not None
        seen += 1
    print(seen)
"""


@pytest.mark.slow
@pytest.mark.parametrize("durability", DURABILITIES)
def test_processes_that_write_and_read_while_the_map_grows(tmp_path: Path, durability: str, checked: Any) -> None:
    with cues.open(tmp_path / "s", durability=durability, map_size=SMALL) as store:
        store.queue("q")
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(children.Child(READS, tmp_path / "s", 6000)) for _ in range(2)]
        writers = [stack.enter_context(children.Child(WRITES, tmp_path / "s", number)) for number in range(3)]
        for writer in writers:
            writer.end()
        assert [reader.end().strip() for reader in readers] == ["6000", "6000"]
    checked(tmp_path / "s")
    with cues.open(tmp_path / "s") as store:
        assert store.map_size <= 32 * SMALL
        for writer in range(3):
            assert [m["n"] for m in store.queue("q").tailer() if m["w"] == writer] == list(range(2000))


@pytest.mark.parametrize("fault", ["map.grown", "map.noted"])
@pytest.mark.parametrize("durability", slow_except(["process"], DURABILITIES))
def test_a_process_that_is_killed_while_its_map_grows(tmp_path: Path, durability: str, fault: str) -> None:
    """Others that have the store open, and later ones, have every message that was acknowledged, and go on."""
    with cues.open(tmp_path / "s", durability=durability, map_size=SMALL) as store:
        queue = store.queue("q")
        queue.appender().write({"n": 0, "x": BODY})
        code = GROWS.replace("        appender.write(", "        print(n, flush=True)\n        appender.write(")
        for hit in (1, 2):
            killed = f"import cues.faults\ncues.faults.arm({fault!r}, {hit})\n{code}"
            ended = subprocess.run(
                [sys.executable, "-c", killed, tmp_path / "s", str(queue.last_index)],
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == -9, ended.stderr
            assert queue.last_index == int(ended.stdout.split()[-1])  # the commit that found the map full is not there
            assert numbers(queue) == list(range(queue.last_index))
        appender = queue.appender()
        for n in range(queue.last_index, queue.last_index + 2000):
            appender.write({"n": n, "x": BODY})
        assert not store.check()
    with cues.open(tmp_path / "s") as store:
        assert numbers(store.queue("q")) == list(range(store.queue("q").last_index))


def test_a_read_under_way_is_waited_for_and_one_of_the_same_thread_is_an_error(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process", map_size=SMALL) as store:
        queue = store.queue("q")
        appender = queue.appender()
        with store.core.view() as txn, pytest.raises(StoreFull, match="while this process reads"):
            assert txn.id()
            for n in range(2000):
                appender.write({"n": n, "x": BODY})
        last = queue.last_index
        reading, end = threading.Event(), threading.Event()

        def read() -> None:
            with store.core.view():
                reading.set()
                end.wait(60)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            assert reading.wait(60)
            threading.Timer(0.2, end.set).start()
            for n in range(last, 2000):
                appender.write({"n": n, "x": BODY})
        finally:
            end.set()
            thread.join()
        assert numbers(queue) == list(range(2000))


@pytest.mark.slow
def test_where_the_address_space_has_no_room_the_store_stays_usable(tmp_path: Path) -> None:
    code = """
import sys, resource, cues
from cues.errors import StoreError
with cues.open(sys.argv[1], durability=sys.argv[2], map_size=256 << 20) as store:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
    queue = store.queue("q")
    appender = queue.appender()
    try:
        while True:
            appender.write({"x": "x" * 1_000_000})
    except StoreError as error:
        print(error.message)
    print(len(queue) == sum(1 for _ in queue.tailer()) > 200, store.map_size >> 20)
    assert queue.purge(before=len(queue)) and not store.check()
    appender.write({"x": "y"})
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc")
    for durability in DURABILITIES:
        out = children.run(code, tmp_path / durability, durability)
        assert "address space" in out and out.endswith("True 256"), out


@pytest.mark.parametrize("durability", DURABILITIES)
def test_where_a_file_may_not_become_larger_it_is_an_error_and_no_signal(tmp_path: Path, durability: str) -> None:
    code = """
import sys, resource, cues
from cues.errors import StoreFull
with cues.open(sys.argv[1], durability=sys.argv[2], map_size=2 << 20) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
    queue = store.queue("q")
    appender = queue.appender()
    for _ in range(3):
        try:
            while True:
                appender.write_many([{"x": "x" * 3000}] * 3)
        except StoreFull as error:
            full = error.message
    print(full)
    assert len(queue) == sum(1 for _ in queue.tailer()) > 100
    assert queue.purge(before=len(queue)) and not store.check()
    appender.write({"x": "y"})
"""
    assert "is full" in children.run(code, tmp_path / "s", durability)
