"""The owner of a processor: one process at a time, by lock, epoch and fence.

The invariant of the stories about stopped owners: whatever a process does that lost its ownership,
it commits nothing. test_controls.py tells them again with the fence taken away, and they must then end
wrong: a test that could not fail would show nothing.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from forks import Forks
from sets import slow_except

import cues
from cues import Graph, Sink, Source, Store, Stream, faults, testing
from cues.base import names
from cues.engine.assembly import assemble
from cues.errors import AlreadyRunning, Fenced, InvalidArgument, ProcessorStopped
from cues.graphs import processor_rows
from cues.graphs.processor_rows import read_row
from cues.records import sealed
from cues.steps import ownership
from cues.steps.ownership import LEASE_S
from cues.storage import leases, locks, transaction

COUNT = 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with cues.open(tmp_path / "store", durability="process", map_size=4 << 20) as store:
        yield store


def graph(kind: str = "stream", **options: Any) -> Graph:
    """One processor, ``g.same`` (a source: ``g.a``), that works on messages 0 to COUNT in steps of two."""
    if kind == "source":
        return Graph("g", [Source("a", count, batch_size=2)])
    if kind == "sink":
        return Graph("g", [Source("a"), Sink(ignore, "a", id="same", batch_size=2, **options)])
    return Graph("g", [Source("a"), Stream(same, "a", "out", batch_size=2, **options)])


def same(message: Any) -> Any:
    return message


def ignore(message: Any) -> None:
    """The effects of a sink are outside; here only its commits matter."""


def count(position: int | None) -> Iterator[tuple[int, Any]]:
    for n in range(position or 0, COUNT):
        yield n + 1, {"n": n}


def feed(store: Store, count: int = COUNT) -> None:
    store.queue("a").appender().write_many([{"n": n} for n in range(count)])


def numbers(store: Store, queue: str = "out") -> list[Any]:
    return [message["n"] for message in testing.messages(store, queue)]


def epoch(store: Store, processor: str = "g.same") -> int:
    with store.core.view() as txn:
        row = read_row(txn, processor)
    assert row is not None
    return row.epoch


# --- starting twice -----------------------------------------------------------------------------


def test_a_second_start_in_this_process_names_its_pid(store: Store) -> None:
    with graph().start(store=store) as running:
        with pytest.raises(AlreadyRunning, match="in this process") as caught:
            graph().start(store=store)
        assert caught.value.pid == os.getpid()
        with pytest.raises(AlreadyRunning):
            testing.run_until_idle(graph(), store, take_over=True)
        running.send({"n": 1})
        assert running.wait_idle(timeout=60) and running.messages("out") == [{"n": 1}]
    testing.run_until_idle(graph(), store)


def test_two_threads_that_start_at_once(store: Store) -> None:
    """Exactly one gets the graph."""
    graph().start(store=store).close()
    barrier = threading.Barrier(4)
    found: list[Any] = []

    def start() -> None:
        barrier.wait()
        try:
            found.append(graph().start(store=store))
        except AlreadyRunning as error:
            found.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    running = [one for one in found if not isinstance(one, AlreadyRunning)]
    assert len(running) == 1
    running[0].close()


def stop_here(path: str, point: str, hit: int, options: dict[str, Any]) -> str:
    """Run the graph and stop (SIGSTOP) at a point; when continued, finish and say how it ended."""
    with cues.open(path) as store, testing.crash(point, hit, how="stop"):
        try:
            testing.run_until_idle(graph(**options), store)
        except Fenced as error:
            return f"fenced: {error.reason}"
        return "finished"


def take_over(path: str, options: dict[str, Any]) -> list[Any]:
    """Another process: too early, and then, the lease being over, in time."""
    with cues.open(path) as store, testing.Clock() as clock:
        with pytest.raises(AlreadyRunning) as early:
            testing.run_until_idle(graph(**options), store)
        with pytest.raises(AlreadyRunning) as leased:
            testing.run_until_idle(graph(**options), store, take_over=True)
        with (
            mock.patch.object(leases, "left_s", return_value=LEASE_S - 1),
            mock.patch.object(locks, "process_state", return_value="sleeping"),
            pytest.raises(AlreadyRunning) as alive,
        ):
            testing.run_until_idle(graph(**options), store, take_over=True)
        clock.advance(LEASE_S + 1)
        testing.run_until_idle(graph(**options), store, take_over=True)
        return [early.value.pid, str(early.value), leased.value.pid, str(leased.value), str(alive.value)]


def everything(path: str) -> dict[str, Any]:
    """All that is in a store, owners, epochs and try logs included."""
    with cues.open(path) as store:
        with store.core.view() as txn:
            rows = dict(transaction.rows(txn, b""))
        logs = {queue: testing.messages(store, queue) for queue in store.queues(all=True)}
        return {"rows": rows, "logs": logs, **testing.contents(store)}


def test_a_second_start_in_another_process_names_the_pid_and_its_state(
    store: Store, forks: Forks, tmp_path: Path
) -> None:
    feed(store)
    store.close()
    path = str(tmp_path / "store")
    pid = forks.start("test_ownership:stop_here", path, "take.after", 2, {})
    assert forks.wait(pid).stopped
    early_pid, early, leased_pid, leased, alive = forks.run("test_ownership:take_over", path, {}).value
    assert early_pid == leased_pid == pid
    assert f"process {pid} (stopped)" in early and f"kill {pid}" in early and "--take-over" in early
    (rest,) = set(re.findall(r"(\d+) s\b", leased))
    assert f"(kill {pid}): it answers, and only one that does not can be replaced." in alive
    assert "lease" in leased and LEASE_S / 2 < int(rest) <= LEASE_S  # some of it passes on a machine under load
    forks.kill(pid)
    assert forks.wait(pid).killed


# --- stopped owners -----------------------------------------------------------------------------

STOPS = [("take.after", 3), ("function.after", 5), ("commit.before", 3), ("commit.after", 2)]
KINDS: list[dict[str, Any]] = [
    {},
    {"side_effects": True},
    {"strategy": "at-most-once"},
    {"kind": "sink"},
    {"kind": "sink", "strategy": "at-most-once"},
    {"kind": "source"},
]


STOPPED = [
    (*stop, options)
    for options in KINDS
    for stop in STOPS
    if (stop[0], options.get("kind")) != ("function.after", "source")  # a generator runs beside its steps
]


@pytest.mark.parametrize(("point", "hit", "options"), slow_except(STOPPED[::4], STOPPED, names=3), ids=str)
def test_a_stopped_owner_that_continues_after_a_takeover_commits_nothing(
    store: Store, forks: Forks, tmp_path: Path, checked: Any, point: str, hit: int, options: dict[str, Any]
) -> None:
    """An owner is stopped in a step; another process takes over when the lease is out, finishes, and ends.

    Then the first one is continued in the middle of its step, and must find itself fenced, twice over
    if it were to try again. Not a byte of the store changes.
    """
    kind = options.get("kind", "stream")
    if kind != "source":
        feed(store)
    store.close()
    path = str(tmp_path / "store")
    pid = forks.start("test_ownership:stop_here", path, point, hit, options)
    assert forks.wait(pid).stopped
    forks.run("test_ownership:take_over", path, options)
    before = everything(path)
    forks.kill(pid, signal.SIGCONT)
    outcome = forks.wait(pid)
    assert outcome.value == "fenced: takeover", outcome
    assert everything(path) == before
    with cues.open(path) as again:
        history = testing.check_history(range(COUNT), numbers(again, "out" if kind == "stream" else "a"))
        if kind == "stream" and options.get("strategy"):
            assert history.at_most_once and len(history.lost) <= 2
        else:
            history.expect_exact()
        assert not testing.check_attempts(again)
        contents = testing.contents(again)
        testing.run_until_idle(graph(**options), again)  # and whoever comes next is free to run
        assert testing.contents(again) == contents
    checked(path)


# --- after a takeover ---------------------------------------------------------------------------


def hold(path: str) -> None:
    """Own the graph and stop, idle."""
    with cues.open(path) as store:
        running = graph().start(store=store)
        running.wait_idle(timeout=60)
        os.kill(os.getpid(), signal.SIGSTOP)
        running.wait_idle(timeout=60)


def hold_after_takeover(path: str) -> str:
    """Take over, let the old owner die, and see that the graph is still held against a third."""
    with cues.open(path) as store:
        with testing.Clock() as clock:
            clock.advance(LEASE_S + 1)
            running = graph().start(store=store, take_over=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        running.engine.assembly.ownership.beat()
        os.kill(os.getpid(), signal.SIGSTOP)
        running.close()
    return "closed"


def third(path: str) -> int:
    with cues.open(path) as store:
        try:
            testing.run_until_idle(graph(), store)
        except AlreadyRunning as error:
            return error.pid
        return 0


def test_after_a_takeover_the_new_owner_is_named_and_takes_the_lock_when_the_old_one_dies(
    store: Store, forks: Forks, tmp_path: Path
) -> None:
    """A stopped owner keeps its lock although it was taken over; when it dies the lock must not be free for anybody."""
    feed(store)
    store.close()
    path = str(tmp_path / "store")
    old = forks.start("test_ownership:hold", path)
    assert forks.wait(old).stopped
    new = forks.start("test_ownership:hold_after_takeover", path)
    assert forks.wait(new).stopped
    assert forks.run("test_ownership:third", path).value == new
    forks.kill(old)
    assert forks.wait(old).killed
    forks.kill(new, signal.SIGCONT)
    assert forks.wait(new).stopped  # its next beat took the lock
    assert forks.run("test_ownership:third", path).value == new
    forks.kill(new, signal.SIGCONT)
    assert forks.wait(new).value == "closed"
    assert forks.run("test_ownership:third", path).value == 0


def test_a_killed_owner_is_followed_at_once_and_leaves_no_litter(store: Store, forks: Forks, tmp_path: Path) -> None:
    path = tmp_path / "store"
    feed(store)
    store.close()
    for _ in range(3):
        pid = forks.start("test_ownership:hold", str(path))
        assert forks.wait(pid).stopped
        forks.kill(pid)
        assert forks.wait(pid).killed
    assert forks.run("test_ownership:third", str(path)).value == 0
    assert not list(path.glob("lease-*"))


# --- epochs and seeks ---------------------------------------------------------------------------


def test_every_start_raises_the_epoch_and_functions_see_it(store: Store) -> None:
    seen: list[int] = []
    for count in range(1, 4):
        feed(store, 1)
        testing.run_until_idle(
            Graph("g", [Sink(lambda m, process: seen.append(process.delivery.epoch), "a", id="s")]), store
        )
        assert epoch(store, "g.s") == count
    assert seen == [1, 2, 3]


def test_a_seek_while_the_graph_runs_and_waits(store: Store) -> None:
    """A graph has done everything and sleeps; its position is moved back from outside; it continues from there."""
    with graph().start(store=store) as running:
        feed(store)
        assert running.wait_idle(timeout=60)
        ownership.seek(store, "g.same", {"g.same.a": 8})
        assert running.wait_idle(timeout=60)
        assert [m["n"] for m in running.messages("out")] == [*range(10), 7, 8, 9]
    assert not running.stopped


def test_a_seek_between_the_claim_and_the_recovery_of_a_start(store: Store) -> None:
    """Somebody moves a position while the graph starts: the start continues at the new place, and does not fail."""
    feed(store)
    testing.run_until_idle(graph(), store)
    for start in range(2):
        faults.arm("claim.after", 1, lambda point: ownership.seek(store, "g.same", {"g.same.a": 8}))
        try:
            if start:
                testing.run_until_idle(graph(), store)
            else:
                with graph().start(store=store) as running:
                    assert running.wait_idle(timeout=30)
                assert not running.stopped
        finally:
            faults.disarm()
        assert [m["n"] for m in testing.messages(store, "out")][10:] == [7, 8, 9] * (start + 1)


def test_a_seek_in_the_middle_of_a_step_drops_the_step(store: Store) -> None:
    calls: list[int] = []

    def f(message: Any, process: Any) -> Any:
        calls.append(message["n"])
        process.state["n"] = process.state.get("n", 0) + 1
        if len(calls) == 5:
            ownership.seek(store, "g.f", {"g.f.a": 9})
        return message

    feed(store)
    testing.run_until_idle(Graph("g", [Stream(f, "a", "out", batch_size=3)]), store)
    assert numbers(store) == [0, 1, 2, 8, 9] and calls == [0, 1, 2, 3, 4, 5, 8, 9]
    assert testing.state(store, "g.f") == {"n": 5}


def test_a_seek_to_the_same_place_in_the_middle_of_a_step_drops_the_step_too(store: Store) -> None:
    """The position is the same before and after, so only the epoch tells: the functions are called again."""
    calls: list[int] = []

    def f(message: Any) -> Any:
        calls.append(message["n"])
        if len(calls) == 1:
            ownership.seek(store, "g.f", {"g.f.a": 1})
        return message

    feed(store, 2)
    testing.run_until_idle(Graph("g", [Stream(f, "a", "out")]), store)
    assert numbers(store) == [0, 1] and calls == [0, 1, 0, 1] and epoch(store, "g.f") == 2


def test_a_seek_in_the_same_transaction_as_a_step_fences_it(tmp_path: Path) -> None:
    """On a "disk" store both wait for the disk and share one transaction, in which the seek is first."""
    with cues.open(tmp_path / "disk", durability="disk", map_size=4 << 20) as store:
        feed(store, 4)
        assembled = assemble(Graph("g", [Stream(same, "a", "out", batch_size=1)]), store)
        (stepper,) = assembled.steppers
        assert stepper.step() == "committed" and stepper.step() == "committed"
        group, refused = store.core.environment.group, []

        def step() -> None:
            try:
                stepper.step()
            except Fenced as fence:
                refused.append(fence.reason)

        seeking = threading.Thread(target=ownership.seek, args=(store, stepper.node.id, {stepper.inputs[0].tailer: 1}))
        stepping = threading.Thread(target=step)
        with group.leading:
            for count, thread in enumerate((seeking, stepping), 1):
                thread.start()
                while len(group.waiting) < count:
                    os.sched_yield()
        seeking.join()
        stepping.join()
        assert refused == ["seek"] and numbers(store) == [0, 1]
        assembled.close()


def test_a_takeover_stops_a_graph_that_waits_with_the_reason(store: Store) -> None:
    running = graph().start(store=store)
    running.wait_idle(timeout=60)

    def rob(txn: Any) -> None:
        row = read_row(txn, "g.same")
        assert row is not None
        sealed.put(
            txn, names.processor_key("g.same"), row._replace(owner=b"somebody", epoch=row.epoch + 1, pid=1).pack()
        )

    store.core.commit(rob)
    feed(store)
    with pytest.raises((Fenced, ProcessorStopped)) as caught:
        for _ in range(600):
            running.wait_idle(timeout=0.1)
    assert isinstance(caught.value, Fenced) and caught.value.reason == "takeover" and "process 1" in str(caught.value)
    running.close()
    assert numbers(store) == []


def test_a_look_for_a_seek_does_not_adopt_a_takeover(store: Store) -> None:
    """Between the refused commit and the look at the row another owner may have come: adopting its row would
    make two owners of one id, each taking the other's commits for seeks."""
    graph = Graph("g", [Sink(lambda m: None, "a", id="s")])
    assembled = assemble(graph, store)
    (stepper,) = assembled.steppers
    with store.core.view() as txn:
        row = processor_rows.read_row(txn, "g.s")
    assert row is not None
    with pytest.raises(Fenced) as caught:
        stepper.adopt(row._replace(owner=bytes(8), epoch=row.epoch + 1))
    assert caught.value.reason == "takeover"
    stepper.adopt(row._replace(epoch=row.epoch + 1))
    assembled.close()


def test_seeks_are_checked(store: Store) -> None:
    feed(store)
    testing.run_until_idle(graph(), store)
    with pytest.raises(InvalidArgument, match=r"g\.nobody"):
        ownership.seek(store, "g.nobody", {})
    with pytest.raises(InvalidArgument, match=r"g\.same\.b"):
        ownership.seek(store, "g.same", {"g.same.b": 1})
    for index in (0, -1, COUNT + 2):
        with pytest.raises(InvalidArgument):
            ownership.seek(store, "g.same", {"g.same.a": index})
    ownership.seek(store, "g.same", {"g.same.a": COUNT + 1})
    store.queue("a").purge(before=5)
    ownership.seek(store, "g.same", {"g.same.a": 1})
    testing.run_until_idle(graph(), store)
    assert numbers(store) == [*range(10), *range(4, 10)]


@pytest.mark.interpreted
def test_a_row_that_another_thread_unpacks_during_a_commit_is_not_taken_for_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for the end asks for the owner at any moment. Older positions would repeat messages."""
    store.queue("in").appender().write({"n": 1})
    assembly = assemble(graph(), store)
    try:
        stepper = next(one for one in assembly.steppers if one.inputs)
        fence = stepper.fence
        position = processor_rows.position_at(fence.expected, 0)
        first, second = (
            processor_rows.moved(fence.seed, fence.expected, False, [(0, *position._replace(next=at))]) for at in (2, 3)
        )
        stepper.fence.committed(first)
        unpack = processor_rows.ProcessorRow.unpack

        def unpack_during_a_commit(key: bytes, raw: bytes, processor: str) -> processor_rows.ProcessorRow:
            row = unpack(key, raw, processor)
            stepper.fence.committed(second)
            return row

        with monkeypatch.context() as patch:
            patch.setattr(processor_rows.ProcessorRow, "unpack", unpack_during_a_commit)
            assert stepper.fence.row.positions[0].next == 2
        assert stepper.fence.row.positions[0].next == 3
        assert stepper.fence.row == unpack(fence.key, second, "g.p")
    finally:
        assembly.close()
