"""The writers' turn: one at a time, also if a writer dies or stops in the middle. Errors name the writer in the way."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any

import children
import pytest

import cues
from cues.base import events
from cues.errors import AlreadyRunning, WriterStuck
from cues.operate import fresh
from cues.storage import locks, wakeup
from cues.storage.exclusive import alone

DURABILITIES = ["process", "disk"]

WRITE = """
import sys, cues
with cues.open(sys.argv[1]) as store:
    appender = store.queue("q").appender()
    print("ready")
    while (line := sys.stdin.readline()):
        print(appender.write({"n": int(line)}))
"""


def shared(store: cues.Store) -> int:
    assert store.core.doorbells is not None
    return store.core.doorbells.words[wakeup.SHARED_WRITERS]


def stopped(child: children.Child) -> None:
    """Wait until it is stopped."""
    deadline = time.monotonic() + 30
    while locks.process_state(child.pid) != "stopped":
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_lone_writer_takes_no_lock_and_two_take_turns(tmp_path: Path) -> None:
    """The word that says so goes up when a second process writes, and down again when it is gone."""
    with cues.open(tmp_path / "store", durability="process") as store:
        appender = store.queue("q").appender()
        assert appender.write({"n": 1}) == 1
        assert shared(store) == 0
        with children.Child(WRITE, store.path) as other:
            assert other.line() == "ready"
            assert shared(store) == 0, "it has opened the queue, and written nothing"
            for n in range(2, 40, 2):
                other.say(str(n))
                assert appender.write({"n": n}) in (n, n + 1)
                assert other.line() in (str(n), str(n + 1))
                assert shared(store) == 1
            other.end()
        writer_lock = store.core.environment.writer_lock
        assert writer_lock is not None
        writer_lock.looked_at = 0.0
        appender.write({"n": 0})
        assert shared(store) == 0, "alone again"
        assert len(store.queue("q")) == 40


@pytest.mark.parametrize("got", [False, True], ids=["before the lock", "after the lock"])
def test_an_interrupt_in_the_moment_of_the_lock_leaves_nothing_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, got: bool
) -> None:
    """A Ctrl-C has its handler run between any two instructions: the turn is given back, and the next comes at once."""
    with cues.open(tmp_path / "store", durability="process") as store:
        appender = store.queue("q").appender()
        appender.write({"n": 1})
        with children.Child(WRITE, store.path) as other:
            assert other.line() == "ready"
            other.say("2")
            assert other.line() == "2"
            lock_file = store.core.locks
            lock = lock_file.try_lock

            def interrupted(offset: int) -> bool:
                monkeypatch.setattr(lock_file, "try_lock", lock)
                if got:
                    assert lock(offset)
                raise KeyboardInterrupt

            appender.write({"n": 3})
            assert shared(store) == 1
            monkeypatch.setattr(lock_file, "try_lock", interrupted)
            with pytest.raises(KeyboardInterrupt):
                appender.write({"n": 0})
            assert not lock_file.mine(locks.WRITER)
            other.say("4")
            assert other.line() == "4"
            assert appender.write({"n": 5}) == 5
            other.end()


HAMMER = """
import sys, threading, cues
with cues.open(sys.argv[1]) as store:
    queue = store.queue("q")
    print("ready"); input()
    def work(who):
        appender = queue.appender()
        for n in range(int(sys.argv[3])):
            appender.write({"who": f"{sys.argv[2]}-{who}", "n": n})
    threads = [threading.Thread(target=work, args=(who,)) for who in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


@pytest.mark.parametrize("durability", DURABILITIES)
def test_processes_with_threads_that_come_and_go(tmp_path: Path, durability: str, checked: Any) -> None:
    count = 150 if durability == "process" else 30
    with cues.open(tmp_path / "store", durability=durability) as store:
        store.queue("q")
        hammers = [children.Child(HAMMER, store.path, who, count) for who in range(3)]
        for hammer in hammers:
            assert hammer.line() == "ready"
        for hammer in hammers:
            hammer.say()
        appender = store.queue("q").appender()
        for n in range(count):
            appender.write({"who": "here", "n": n})
        for hammer in hammers:
            hammer.end()
        found: dict[str, list[int]] = {}
        for message in store.queue("q").tailer():
            found.setdefault(message["who"], []).append(message["n"])
        assert len(found) == 7
        assert all(mine == list(range(count)) for mine in found.values())
    checked(tmp_path / "store")


@pytest.mark.parametrize("first", ["alone", "shared"])
@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_writer_stopped_inside_a_transaction_is_named(tmp_path: Path, durability: str, first: str) -> None:
    """SIGSTOP in the middle of an append: others wait until their deadline, and their error names the
    process and its state. Readers continue. When the process continues, all others do."""
    path = tmp_path / "store"
    with cues.open(path, durability=durability) as store:
        store.queue("q").appender().write({"n": 1})
    mine = cues.open(path, writer_timeout_s=0.2) if first == "shared" else None
    queue = mine.queue("q") if mine is not None else None
    if queue is not None:
        queue.purge(before=1)  # a write: it is one of the writers from here on
    code = "import sys, cues\nwith cues.open(sys.argv[1]) as s: s.queue('q').appender().write({'n': 2})"
    with children.Child(code, path, CUES_FAULT="append.inside:1:stop") as child:
        stopped(child)
        with pytest.raises(WriterStuck) as caught:
            if queue is not None:
                queue.appender().write({"n": 3})
            else:
                with cues.open(path, writer_timeout_s=0.2) as other:
                    other.queue("q")
        error = caught.value
        assert (error.pid, error.state) == (child.pid, "stopped")
        assert 0.2 <= error.waited_s < 60
        assert f"process {child.pid} (stopped)" in str(error) and f"kill -CONT {child.pid}" in error.hint
        assert pickle.loads(pickle.dumps(error)).pid == child.pid
        with cues.open(path, readonly=True) as reader:
            assert [m["n"] for m in reader.queue("q").tailer()] == [1], "readers wait for nobody"
        child.signal(signal.SIGCONT)
        child.end()
    with mine or cues.open(path, writer_timeout_s=0.2) as store:
        assert store.queue("q").appender().write({"n": 3}) == 3
        assert [m["n"] for m in store.queue("q").tailer()] == [1, 2, 3]


STEP = """
import sys, cues
from cues import Graph, Sink, Source, Stream, testing
with cues.open(sys.argv[1]) as store:
    stream = Stream(lambda message: message, "q", "out", id="s")
    sink = Sink(lambda message: None, "q", id="s")
    testing.run_until_idle(Graph("other", [Source("q"), {"stream": stream, "sink": sink}[sys.argv[2]]]), store)
"""
OPEN = """
import sys, cues
store = cues.open(sys.argv[1], writer_timeout_s=0.2)
try:
    store.queue("new")
except cues.errors.WriterStuck as error:
    print(error.pid, error.state)
"""
SEND = """
import sys
from cues.queues.store import Store
Store.__init__.__kwdefaults__["writer_timeout_s"] = float(sys.argv[2])
from cues.cli import app
print(app.run(["send", sys.argv[1] + "#q", '{"n": 3}']))
"""


@pytest.mark.parametrize(
    ("kind", "point"), [("stream", "commit.inside"), ("sink", "snapshot.inside"), ("sink", "claim.inside")]
)
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.interpreted
def test_a_process_stopped_inside_a_commit_of_its_graph_is_named_to_all_waiting_calls(
    tmp_path: Path, durability: str, kind: str, point: str
) -> None:
    """SIGSTOP in a step's commit, a sink's snapshot or a start's claim of one process.

    An appender, a processor of another graph, ``cues send`` and whoever makes a queue hear its pid
    and state; what they were about to write is not written, and is when the process continues.
    """
    path = tmp_path / "store"
    begun, go_on = threading.Event(), threading.Event()
    calls = []

    def slow(message: Any) -> Any:
        calls.append(message["n"])
        begun.set()
        assert go_on.wait(30)
        return message

    waits: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
    graph = cues.Graph("mine", [cues.Source("q"), cues.Stream(slow, "q", "mine")])
    with cues.open(path, durability=durability, writer_timeout_s=0.2) as store:
        appender = store.queue("q").appender()
        appender.write({"n": 1})
        running = graph.start(store=store, listeners=(waits.put,))
        assert begun.wait(30)
        with children.Child(STEP, path, kind, CUES_FAULT=f"{point}:1:stop") as child:
            stopped(child)
            go_on.set()
            found = []
            while len(found) < 2:  # it says so at each deadline
                event = waits.get(timeout=30)
                if isinstance(event, events.Waiting):
                    assert event.processor == "mine.slow" and f"process {child.pid} (stopped)" in event.text
                    assert event.error is not None
                    found.append(event.error)
            assert not running.wait_idle(timeout=0)
            with pytest.raises(WriterStuck) as caught:
                appender.write({"n": 2})
            found.append(caught.value)
            assert {(error.pid, error.state) for error in found} == {(child.pid, "stopped")}
            assert children.run(OPEN, path) == f"{child.pid} stopped"
            with children.Child(SEND, path, 0.2) as send:
                assert send.line() == "1", "the exit code"
                said = send.errors()
            assert f"process {child.pid} (stopped)" in said and f"kill -CONT {child.pid}" in said
            child.signal(signal.SIGCONT)
            child.end()
        with running:
            assert appender.write({"n": 2}) == 2
            assert children.run(SEND, path, 30).splitlines()[-1] == "0"
            assert running.wait_idle(timeout=30)
        assert calls == [1, 2, 3], "what waited was committed, and its function not called again"
        assert (
            [m["n"] for m in store.queue("mine").tailer()] == [m["n"] for m in store.queue("q").tailer()] == [1, 2, 3]
        )


def test_a_graph_that_waits_for_a_stuck_writer_can_be_closed(tmp_path: Path) -> None:
    """Its open step is dropped, and taken again by the next start."""
    path = tmp_path / "store"
    waiting = threading.Event()

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Waiting):
            waiting.set()

    begun, go_on = threading.Event(), threading.Event()

    def slow(message: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return message

    graph = cues.Graph("mine", [cues.Source("q"), cues.Stream(slow, "q", "mine")])
    with cues.open(path, writer_timeout_s=0.1) as store:
        store.queue("q").appender().write({"n": 1})
        running = graph.start(store=store, listeners=(listen,))
        assert begun.wait(30)
        with children.Child(STEP, path, "stream", CUES_FAULT="commit.inside:1:stop") as child:
            stopped(child)
            go_on.set()
            assert waiting.wait(30)
            running.close()
            assert not running.stopped
            assert not store.queue("mine").last_index
            child.signal(signal.SIGCONT)
            child.end()
        with graph.start(store=store) as again:
            assert again.wait_idle(timeout=30)
            assert again.messages("mine") == [{"n": 1}]


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_named_tailer_loses_nothing_to_a_stuck_writer(tmp_path: Path, durability: str) -> None:
    path = tmp_path / "store"
    with cues.open(path, durability=durability, writer_timeout_s=0.1) as store:
        queue = store.queue("q")
        queue.appender().write_many([{"n": 1}, {"n": 2}])
        named = queue.tailer("r")
        code = "import sys, cues; cues.open(sys.argv[1]).queue('q').appender().write({'n': 3})"
        with children.Child(code, path, CUES_FAULT="append.inside:1:stop") as child:
            stopped(child)
            for _ in range(2):
                with pytest.raises(WriterStuck):
                    named.read()
            child.kill()
        assert named.read_many(5) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_writer_killed_inside_a_transaction_holds_up_no_other(tmp_path: Path, durability: str) -> None:
    """Its locks die with it, whether it was alone or not; what it had written is undone."""
    path = tmp_path / "store"
    with cues.open(path, durability=durability) as store:
        store.queue("q").appender().write({"n": 1})
    code = "import sys, cues; cues.open(sys.argv[1]).queue('q').appender().write({'n': 2})"
    with children.Child(code, path, CUES_FAULT="append.inside:1:stop") as child:
        stopped(child)
        child.kill()
    with cues.open(path) as store:
        assert store.queue("q").appender().write({"n": 3}) == 2
        with children.Child(code, path, CUES_FAULT="append.inside:1:stop") as child:
            stopped(child)
            done = threading.Event()

            def write() -> None:
                store.queue("q").appender().write({"n": 4})
                done.set()

            waiting = threading.Thread(target=write)
            waiting.start()
            assert not done.is_set()
            child.kill()
            waiting.join()
            assert done.is_set(), "a writer that waits for a dead one reached its own deadline"
        assert [m["n"] for m in store.queue("q").tailer()] == [1, 3, 4]


def test_a_writer_that_dies_while_it_registers_holds_up_no_other(tmp_path: Path) -> None:
    path = tmp_path / "store"
    cues.open(path).close()
    code = """
import sys, os, cues, cues.storage.environment, cues.storage.writer_lock
cues.storage.writer_lock.WriterLock._no_writer_busy = cues.storage.writer_lock.WriterLock._await = None
from cues.storage.locks import LockFile, REGISTER
real = LockFile.try_lock
LockFile.try_lock = lambda self, at: (real(self, at), at == REGISTER and os.kill(os.getpid(), 9))[0]
cues.storage.writer_lock.WriterLock._await = lambda self, attempt, holder: attempt()
cues.open(sys.argv[1]).queue("q")
"""
    with children.Child(code, path) as child:
        assert child.returncode() == -9
    with cues.open(path, writer_timeout_s=1) as store:
        assert store.queue("q").appender().write({"n": 1}) == 1


READ = """
import sys, cues
with cues.open(sys.argv[1]) as store:
    for name in sys.argv[2:]:
        print([message["n"] for message in store.queue(name).tailer().read_many(1)])
"""


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_process_that_only_reads_is_a_guest(tmp_path: Path, durability: str) -> None:
    """Opening a queue takes a write transaction. It makes a writer queue up for that moment and no longer,
    and the writer's clean close is its own, whoever read meanwhile."""
    with cues.open(tmp_path / "store", durability=durability) as store:
        queues = {name: store.queue(name) for name in "abc"}
        appender = queues["a"].appender()
        appender.write({"n": 0})
        done = threading.Event()
        count = 1

        def write() -> None:
            nonlocal count
            while not done.is_set():
                appender.write({"n": count})
                count += 1

        writing = threading.Thread(target=write)
        writing.start()
        try:
            for _ in range(3):
                found = children.run(READ, store.path, *"bca").splitlines()
                assert found == ["[]", "[]", "[0]"]
        finally:
            done.set()
            writing.join()
        assert shared(store) == 0
        assert [m["n"] for m in queues["a"].tailer()] == list(range(count))
    assert not (tmp_path / "store" / "open").exists()


def test_a_process_with_the_store_open_for_writing_is_known_before_it_writes(tmp_path: Path) -> None:
    """Deleting or replacing a store that a process has open would lose its later messages."""
    path = tmp_path / "store"
    with cues.open(path) as store:
        store.queue("q")
    with children.Child(WRITE, path) as child:
        assert child.line() == "ready"
        for use in (lambda: fresh.refuse_running(path), lambda: alone(path, cues.Store).__enter__()):
            with pytest.raises(AlreadyRunning) as caught:
                use()
            assert caught.value.pid == child.pid
        child.say("1")
        assert child.line() == "1"
        child.end()
    fresh.refuse_running(path)


def test_a_guest_that_dies_or_stops_holds_up_no_writer_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "store"
    code = """
import sys, os, signal, cues
from cues.storage.writer_lock import WriterLock
queue_up = WriterLock._queue_up
WriterLock._queue_up = lambda self: (queue_up(self), os.kill(os.getpid(), int(sys.argv[2])))[0]
cues.open(sys.argv[1]).queue("q")
"""
    with cues.open(path, durability="process", writer_timeout_s=0.2) as store:
        appender = store.queue("q").appender()
        appender.write({"n": 1})
        with children.Child(code, path, int(signal.SIGSTOP)) as guest:
            stopped(guest)
            with pytest.raises(WriterStuck) as caught:
                appender.write({"n": 2})
            assert caught.value.pid == guest.pid
            guest.signal(signal.SIGCONT)
            guest.end()
        assert shared(store) == 0, "put back by the guest"
        assert appender.write({"n": 2}) == 2
        with children.Child(code, path, int(signal.SIGKILL)) as guest:
            assert guest.returncode() == -9
        assert shared(store) == 1
        writer_lock = store.core.environment.writer_lock
        assert writer_lock is not None
        writer_lock.looked_at = 0.0
        assert appender.write({"n": 3}) == 3
        assert shared(store) == 0, "found out by the writer"


def test_the_last_process_to_leave_marks_the_store_clean_and_a_new_one_does_not_lose_the_mark(tmp_path: Path) -> None:
    """One that joins between another's look around and its leaving would lose the mark that it just made."""
    path = tmp_path / "store"
    store = cues.open(path, durability="process")
    writer_lock = store.core.environment.writer_lock
    assert writer_lock is not None
    assert (path / "open").exists()
    seen = []
    real = writer_lock.lock_file.holder

    def holder(start: int, stop: int | None = None) -> int | None:
        if start == locks.WRITERS and not seen:
            seen.append(locks.open_locks(path / "locks").mine(locks.REGISTER))
        return real(start, stop)

    writer_lock.lock_file.holder = holder  # type: ignore[method-assign]
    try:
        store.close()
    finally:
        del writer_lock.lock_file.holder  # type: ignore[method-assign]
    assert seen == [True], "it looks around with the door closed"
    assert not (path / "open").exists()


def test_process_state_tells_what_a_process_does() -> None:
    assert locks.process_state(os.getpid()) in ("running", "sleeping")
    assert locks.process_state(2**22 + 1) == "gone"


def test_locks_exclude_this_process_too_and_die_with_others(tmp_path: Path) -> None:
    mine = locks.open_locks(tmp_path / "locks")
    assert locks.open_locks(tmp_path / "locks") is mine
    assert mine.try_lock(5) and not mine.try_lock(5) and mine.mine(5)
    assert mine.holder(5) is None, "not another process"
    code = """
import sys
from pathlib import Path
from cues.storage import locks
other = locks.open_locks(Path(sys.argv[1]))
print(other.try_lock(5), other.holder(5), other.holder(0, 100), other.try_lock(7))
sys.stdin.readline()
"""
    with children.Child(code, tmp_path / "locks") as child:
        assert child.line() == f"False {os.getpid()} {os.getpid()} True"
        assert mine.holder(7) == child.pid and not mine.try_lock(7)
        child.kill()
    assert mine.try_lock(7)
    mine.unlock(5)
    mine.unlock(5)
    assert mine.try_lock(5)
    mine.close()
    assert mine.try_lock(9), "one use is left"
    mine.close()
    assert locks.offset_of("a") != locks.offset_of("b") and locks.offset_of("a") < 2**63


def test_a_closed_lock_file_refuses_late_calls_and_closes_between_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system soon gives the number of its descriptor to another file, which a late call must not touch."""
    mine = locks.open_locks(tmp_path / "locks")
    inside, ends = threading.Event(), threading.Event()
    real = locks.fcntl.lockf

    def lockf(*arguments: Any) -> Any:
        inside.set()
        ends.wait(60)
        return real(*arguments)

    monkeypatch.setattr(locks.fcntl, "lockf", lockf)
    locking = threading.Thread(target=mine.try_lock, args=(5,))
    closing = threading.Thread(target=mine.close)
    locking.start()
    assert inside.wait(60)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "it closed the descriptor that the other thread is using"
    ends.set()
    locking.join()
    closing.join()
    for late in (mine.try_lock, mine.holder):
        with pytest.raises(OSError, match="the lock file is closed"):
            late(6)
    mine.unlock(5)
    assert not mine.mine(5) and not mine.mine(6)
