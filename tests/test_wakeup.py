"""Doorbells: a reader that sleeps is woken by whoever writes, in whatever process, and whoever dies."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import threading
import time
from pathlib import Path
from typing import Any

import children
import pytest
import seeds

import cues
from cues import testing
from cues.errors import Closed
from cues.storage import locks, wakeup
from cues.storage.store_core import LastLook

READ_ONE = """
import sys, cues
with cues.open(sys.argv[1], readonly=len(sys.argv) > 2) as store:
    tailer = store.queue("q").tailer()
    print("ready")
    while (message := tailer.read(block=True, timeout=30)) is not None and message["n"]:
        print(message["n"])
"""


def wait_until_listening(store: cues.Store, count: int = 1) -> None:
    """Until ``count`` sleepers have raised their flag."""
    doorbells = store.core.doorbells
    assert doorbells is not None
    deadline = time.monotonic() + 30
    flags = slice(wakeup.FLAGS_AT, wakeup.FLAGS_END)
    while sum(doorbells.mapping[flags]) < count:
        assert time.monotonic() < deadline, "nobody listens"
        os.sched_yield()


def without_safety(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sleeps here is woken or sleeps on: the bell is tested, not the second look."""
    monkeypatch.setattr(wakeup, "SAFETY_S", 3600.0)


def test_a_step_rings_the_doorbells_of_the_queues_that_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_safety(monkeypatch)
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("in").appender().write({"n": 1})
        tailer, found = store.queue("out").tailer(), list[Any]()
        reader = threading.Thread(target=lambda: found.append(tailer.read(block=True, timeout=60)))
        reader.start()
        wait_until_listening(store)
        testing.run_until_idle(cues.Graph("g", [cues.Stream(lambda message: message, "in", "out", id="s")]), store)
        reader.join()
        assert found == [{"n": 1}]


def test_a_write_wakes_a_thread_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_safety(monkeypatch)
    with cues.open(tmp_path / "store", durability="process") as store:
        queue = store.queue("q")
        tailer = queue.tailer()
        for n in range(30):
            found: list[Any] = []
            reader = threading.Thread(target=lambda: found.append(tailer.read(block=True, timeout=3600)))
            reader.start()
            wait_until_listening(store)
            (queue.appender().write if n % 2 else lambda m: queue.appender().write_many([m]))({"n": n})
            reader.join(60)
            assert found == [{"n": n}], "the write did not wake the reader"


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_a_write_wakes_readers_in_other_processes(tmp_path: Path, durability: str) -> None:
    with cues.open(tmp_path / "store", durability=durability) as store:
        appender = store.queue("q").appender()
        readers = [
            children.Child(READ_ONE.replace("import sys, cues", NO_SAFETY), store.path, *x) for x in ([], ["ro"])
        ]
        for reader in readers:
            assert reader.line() == "ready"
        for n in range(1, 20):
            wait_until_listening(store, 2)
            appender.write({"n": n})
            assert [reader.line() for reader in readers] == [str(n)] * 2
        appender.write({"n": 0})
        for reader in readers:
            reader.end()


NO_SAFETY = "import sys, cues, cues.storage.wakeup; cues.storage.wakeup.SAFETY_S = 30.0"


def test_a_writer_in_another_process_wakes_a_reader_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_safety(monkeypatch)
    code = """
import sys, cues
with cues.open(sys.argv[1]) as store:
    appender = store.queue("q").appender()
    for n in range(20):
        input()
        appender.write({"n": n})
"""
    with cues.open(tmp_path / "store", durability="process") as store:
        tailer = store.queue("q").tailer()
        with children.Child(code, store.path) as writer:
            for n in range(20):
                found: list[Any] = []
                reader = threading.Thread(target=lambda: found.append(tailer.read(block=True, timeout=20)))
                reader.start()
                wait_until_listening(store)
                writer.say()
                reader.join()
                assert found == [{"n": n}]
            writer.end()


@pytest.mark.interpreted
def test_only_readers_of_the_queue_are_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_safety(monkeypatch)
    with cues.open(tmp_path / "store", durability="process") as store:
        names = [f"q{n}" for n in range(40)]
        name = next(n for n in names if wakeup.mask_of(n) != wakeup.mask_of("other"))
        queue, other = store.queue(name), store.queue("other")
        looked = []
        tailer = queue.tailer()
        real = tailer.check_open
        tailer.check_open = lambda: (looked.append(1), real())[1]  # type: ignore[method-assign]
        reader = threading.Thread(target=lambda: tailer.read(block=True, timeout=20))
        reader.start()
        wait_until_listening(store)
        for n in range(50):
            other.appender().write({"n": n})
        queue.appender().write({"n": 1})
        reader.join()
        assert len(looked) <= 4, "at the start, before sleeping, and when its own queue was written"


def test_alts_over_two_stores_is_woken_by_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_safety(monkeypatch)
    with cues.open(tmp_path / "1", durability="process") as one, cues.open(tmp_path / "2") as two:
        queues = [one.queue("a"), one.queue("b"), two.queue("c")]
        tailers = [queue.tailer() for queue in queues]
        for turn, queue in enumerate(queues * 3):
            found: list[Any] = []
            reader = threading.Thread(target=lambda: found.append(cues.alts(tailers, timeout=20)))
            reader.start()
            wait_until_listening(one)
            wait_until_listening(two)
            queue.appender().write({"n": turn})
            reader.join()
            assert found == [(tailers[turn % 3], {"n": turn})]


def test_a_lost_ring_costs_a_tenth_of_a_second_and_no_message(tmp_path: Path) -> None:
    """A writer that is killed between its commit and the ring wakes no reader."""
    with cues.open(tmp_path / "store", durability="process") as store:
        tailer = store.queue("q").tailer()
        found: list[Any] = []
        reader = threading.Thread(target=lambda: found.append(tailer.read(block=True, timeout=20)))
        reader.start()
        wait_until_listening(store)
        code = "import sys, cues; cues.open(sys.argv[1]).queue('q').appender().write({'n': 1})"
        with children.Child(code, store.path, CUES_FAULT="append.after:1") as child:
            assert child.returncode() == -9
        reader.join()
        assert found == [{"n": 1}]


def test_the_slot_of_a_reader_that_was_killed_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of a waiting reader leaves its flag up and its FIFO in place: writers do not mind, and the next
    reader takes the slot because its lock died with it."""
    with cues.open(tmp_path / "store", durability="process") as store:
        queue = store.queue("q")
        for turn in range(3):
            with children.Child(READ_ONE, store.path) as reader:
                assert reader.line() == "ready"
                queue.appender().write({"n": 1})
                reader.line()
                wait_until_listening(store)
                assert store.core.locks.holder(locks.SLOTS, locks.SLOTS + 256) == reader.pid
                reader.kill()
            assert (Path(store.path) / "bells" / "0").exists()
            queue.delete()
            if turn:
                for n in range(3):
                    queue.appender().write({"n": n})
                queue.delete()
        without_safety(monkeypatch)
        found: list[Any] = []
        tailer = queue.tailer()
        thread = threading.Thread(target=lambda: found.append(tailer.read(block=True, timeout=20)))
        thread.start()
        wait_until_listening(store)
        assert store.core.locks.mine(locks.SLOTS), "slot 0, no other"
        queue.appender().write({"n": 5})
        thread.join()
        assert found == [{"n": 5}]


def test_more_sleepers_than_slots_look_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "_SLOT_COUNT", 2)
    with cues.open(tmp_path / "store", durability="process") as store:
        queue = store.queue("q")
        found: list[Any] = []
        readers = [
            threading.Thread(target=lambda: found.append(queue.tailer().read(block=True, timeout=20))) for _ in range(6)
        ]
        for reader in readers:
            reader.start()
        wait_until_listening(store, 2)
        queue.appender().write({"n": 1})
        for reader in readers:
            reader.join()
        assert found == [{"n": 1}] * 6


@pytest.mark.slow
def test_bells_and_descriptors_are_given_back(tmp_path: Path) -> None:
    """Many waits, many threads, closed while some sleep: no descriptor stays, no other file's is closed."""

    def descriptors() -> list[str]:
        """Of files of this test: another test may close one of its own meanwhile."""
        gc.collect()
        found = []
        for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return [path for path in found if path.startswith(str(tmp_path))]

    others = [open(tmp_path / f"other-{n}", "w") for n in range(50)]  # noqa: SIM115
    before = descriptors()
    for _ in range(5):
        store = cues.open(tmp_path / "store", durability="process")
        queue = store.queue("q")
        for _ in range(20):
            assert queue.tailer().read(block=True, timeout=0.001) is None
        ended = []

        def sleep(queue: cues.Queue = queue, ended: list[type] = ended) -> None:
            try:
                queue.tailer().read(block=True)
            except Closed as error:
                ended.append(type(error))

        sleepers = [threading.Thread(target=sleep) for _ in range(5)]
        for sleeper in sleepers:
            sleeper.start()
        wait_until_listening(store, 5)
        store.close()
        for sleeper in sleepers:
            sleeper.join(30)
        assert ended == [Closed] * 5
    assert sorted(descriptors()) == sorted(before)
    for other in others:
        other.close()  # raises if somebody else has closed it
    assert not list((tmp_path / "store" / "bells").iterdir())


def test_an_idle_reader_burns_no_processor_time(tmp_path: Path) -> None:
    with cues.open(tmp_path / "store", durability="process") as store:
        tailer = store.queue("q").tailer()
        start = resource.getrusage(resource.RUSAGE_THREAD) if hasattr(resource, "RUSAGE_THREAD") else None
        assert tailer.read(block=True, timeout=0.5) is None
        if start is not None:
            end = resource.getrusage(resource.RUSAGE_THREAD)
            assert (end.ru_utime + end.ru_stime) - (start.ru_utime + start.ru_stime) < 0.1


def test_a_ring_in_vain_wakes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a handle rings every sleeper of the process without lowering its flag; the byte must not stay in
    the FIFO, where it would end every later sleep at once."""
    without_safety(monkeypatch)
    with cues.open(tmp_path / "store", durability="process") as store:
        looks: list[bool] = []
        end = threading.Event()

        def ready() -> bool:
            looks.append(end.is_set())
            return looks[-1]

        queue = store.queue("q")
        sleeper = threading.Thread(
            target=wakeup.wait, args=([(store.core.doorbells, queue.core.log.mask)], ready, None)
        )
        sleeper.start()
        wait_until_listening(store)
        store.queue("other").close()
        deadline = time.monotonic() + 60
        while len(looks) < 3:  # on the way to sleep, rung, on the way to sleep again
            assert time.monotonic() < deadline
            os.sched_yield()
        wait_until_listening(store)
        sleeper.join(0.2)  # a sleeper that spins looks thousands of times here
        assert len(looks) == 3
        end.set()
        queue.appender().write({})
        sleeper.join(60)
        assert not sleeper.is_alive()


def test_a_file_of_shared_words_has_its_blocks(tmp_path: Path) -> None:
    """It is written through a map: a hole in it would be a SIGBUS on a full disk."""
    with cues.open(tmp_path / "store"):
        found = (tmp_path / "store" / "wake").stat()
        assert found.st_size == wakeup.FILE_BYTES
        if hasattr(os, "posix_fallocate"):
            assert found.st_blocks * 512 >= wakeup.FILE_BYTES


@pytest.mark.interpreted
def test_a_look_is_current_until_the_next_commit(store: cues.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty commit is counted too, but LMDB gives its number to the next one."""
    write, look = store.queue("q").appender().write, LastLook(store.core)

    def current() -> bool:
        with store.core.view() as txn:
            look.note(txn)
        return look.is_current()

    without_safety(monkeypatch)
    assert not look.is_current()
    write({})
    assert current()
    write({})
    assert not look.is_current() and current()
    store.core.commit(lambda txn: None)
    assert not current(), "the next commit would have the number of this one"
    write({})
    assert not look.is_current() and current()
    monkeypatch.setattr(wakeup, "SAFETY_S", 0.0)
    assert not current()


def test_a_batch_that_lingers_is_taken_at_its_time(store: cues.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time begins with a message that comes while the processor sleeps."""
    without_safety(monkeypatch)
    taken = threading.Event()
    sink = cues.Sink(lambda messages: taken.set(), "in", id="s", batch=True, linger_s=0.01)
    with cues.Graph("g", [cues.Source("in"), sink], store=store).start():
        wait_until_listening(store)
        store.queue("in").appender().write({})
        assert taken.wait(60)


PASS_ON = """
import sys, cues, cues.storage.wakeup
from cues import Graph, Source, Stream
cues.storage.wakeup.SAFETY_S = 3600.0
streams = [Stream(lambda message: message, a, b, id=b) for a, b in (("in", "middle"), ("middle", "out"))]
with Graph("g", [Source("in"), *streams], store=sys.argv[1], durability="process").start():
    print("ready")
    sys.stdin.read()
"""
WRITE_BESIDE = """
import sys, time, cues
with cues.open(sys.argv[1]) as store:
    appender, nothing = store.queue("beside").appender(), lambda txn: None
    print("ready")
    while True:
        time.sleep(0.0002)
        appender.write({})
        store.core.commit(nothing)  # LMDB gives its number to the next commit
"""


@pytest.mark.slow
def test_no_ring_is_lost_while_readers_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message passes two processors that sleep, while another process commits all the time.

    Nobody looks by itself here, so a processor that is not woken, or does not look when it is, keeps a message.
    """
    without_safety(monkeypatch)
    chance = random.Random(seeds.new())
    with cues.open(tmp_path / "store", durability="process") as store:
        write, out = store.queue("in").appender().write, store.queue("out").tailer()
        sent = 0
        with children.Child(WRITE_BESIDE, store.path) as beside:
            assert beside.line() == "ready"
            for _ in range(8):
                with children.Child(PASS_ON, store.path) as graph:
                    assert graph.line() == "ready"
                    for _ in range(300):
                        time.sleep(chance.choice([0, 0, 0.0001, 0.0005, 0.002]))
                        sent = write({"n": sent + 1})
                        while chance.random() < 0.9 and (message := out.read(block=True, timeout=60)) != {"n": sent}:
                            assert message is not None, "a processor sleeps, and a message waits for it"
                    graph.kill()
            beside.kill()
        with children.Child(PASS_ON, store.path) as graph:
            out.to_start()
            assert [out.read(block=True, timeout=60) for _ in range(sent)] == [{"n": n + 1} for n in range(sent)]
            graph.kill()
