"""Tailers: positions, directions, seeking, sharing by name, and a random walk against a plain list."""

from __future__ import annotations

import shutil
import tempfile
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import children
import pytest
from conftest import problems_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import cues
from cues.base import clock
from cues.errors import BatchDamaged, Closed, ConcurrentUse, InvalidArgument, StoreFull, WriterStuck
from cues.storage import wakeup


def numbers(messages: Any) -> list[int]:
    return [m["n"] for m in messages]


def filled(store: cues.Store, count: int, **options: Any) -> cues.Queue:
    queue = store.queue("q", **options)
    queue.appender().write_many([{"n": n, "x": "x" * (n % 50)} for n in range(1, count + 1)])
    return queue


def test_reading_moves_one_by_one_and_ends_with_none(store: cues.Store) -> None:
    queue = filled(store, 3)
    tailer = queue.tailer()
    assert (tailer.index, tailer.last_read_index, tailer.envelope) == (1, None, None)
    assert tailer.peek() == tailer.peek() == {"n": 1, "x": "x"}
    for n in (1, 2, 3):
        assert tailer.index == n
        message = tailer.read()
        assert message is not None and message["n"] == n
        assert (tailer.index, tailer.last_read_index) == (n + 1, n)
    assert tailer.read() is None and tailer.peek() is None and tailer.read_many(5) == []
    assert tailer.last_read_index == 3
    queue.appender().write({"n": 4})
    assert tailer.read() == {"n": 4}, "the end is only the end for now"


@pytest.mark.parametrize("n", [0, 1, 7, 100, 999, 1000, 5000])
def test_read_many_gives_fewer_only_at_the_end(store: cues.Store, n: int) -> None:
    tailer = filled(store, 1000).tailer()
    assert numbers(tailer.read_many(n)) == list(range(1, min(n, 1000) + 1))
    assert numbers(tailer.read_many(2)) == list(range(n + 1, min(n + 2, 1000) + 1))


@pytest.mark.parametrize("n", [-1, 1.0, "1", None])
@pytest.mark.interpreted
def test_read_many_of_something_else_is_refused(store: cues.Store, n: Any) -> None:
    with pytest.raises(InvalidArgument):
        filled(store, 3).tailer().read_many(n)


def test_what_a_reader_changes_in_a_message_is_its_own(store: cues.Store) -> None:
    queue = filled(store, 5)
    tailer = queue.tailer()
    first = tailer.read()
    assert first is not None
    first["n"] = "changed"
    peeked = tailer.peek()
    assert peeked is not None
    peeked["n"] = "changed"
    tailer.to_start()
    assert numbers(tailer.read_many(5)) == [1, 2, 3, 4, 5]


def test_backward_gives_the_message_below_the_index_and_moves_there(store: cues.Store) -> None:
    queue = filled(store, 300)
    tailer = queue.tailer()
    assert tailer.direction == "forward"
    tailer.direction = "backward"
    assert tailer.read() is None and tailer.peek() is None
    tailer.to_end()
    assert (tailer.index, tailer.peek()) == (301, {"n": 300, "x": ""})
    assert numbers(tailer.read_many(120)) == list(range(300, 180, -1))
    assert (tailer.index, tailer.last_read_index) == (181, 181)
    tailer.direction = "forward"
    assert numbers(tailer.read_many(2)) == [181, 182]
    tailer.direction = "backward"
    assert numbers(tailer.read_many(500)) == list(range(182, 0, -1))
    assert tailer.read() is None and tailer.index == 1
    with pytest.raises(InvalidArgument):
        tailer.direction = "sideways"  # type: ignore[assignment]


@pytest.mark.interpreted
def test_seeking_by_index_goes_exactly_there_or_says_why_not(store: cues.Store) -> None:
    queue = filled(store, 500)
    tailer = queue.tailer()
    for index in (1, 2, 250, 499, 500):
        tailer.to_index(index)
        assert tailer.read() == {"n": index, "x": "x" * (index % 50)}
    tailer.to_index(501)
    assert tailer.read() is None
    for bad in (0, -3, 502, 10**12, 1.0, "1", None, True):
        with pytest.raises(InvalidArgument):
            tailer.to_index(bad)  # type: ignore[arg-type]
        assert tailer.index == 501
    queue.purge(before=100)
    tailer.to_index(5)
    assert tailer.index == 100
    tailer.to_start()
    assert tailer.index == 100


def test_seeking_by_time_finds_the_first_at_or_after(store: cues.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every possible instant against a search through the list, for single messages, batches and large ones."""
    queue = store.queue("q")
    appender = queue.appender()
    times: list[int] = []
    for step in range(40):
        now = 10**18 + step // 3 * 7000
        monkeypatch.setattr(clock, "now_ns", lambda now=now: now)
        count = (1, 5, 200)[step % 3]
        appender.write_many([{"n": len(times) + i, "x": "x" * (10_000 if step % 7 == 0 else 5)} for i in range(count)])
        times += [now] * count
    queue.purge(before=50)
    tailer = queue.tailer()
    for ns in range(10**18 - 7000, 10**18 + 15 * 7000, 1000):
        tailer.to_time(clock.to_datetime(ns))
        expected = next((i for i, at in enumerate(times, 1) if at >= ns and i >= 50), len(times) + 1)
        assert tailer.index == expected
    later = clock.to_datetime(10**18).astimezone(tz=None)
    tailer.to_time(later)
    assert tailer.index == 50, "any zone names an instant"
    for bad in (datetime(2026, 1, 1), "2026-01-01", 5, None):
        with pytest.raises(InvalidArgument):
            tailer.to_time(bad)  # type: ignore[arg-type]
    tailer.to_time(datetime(2100, 1, 1, tzinfo=UTC))
    assert tailer.read() is None


def test_an_envelopes_time_leads_back_to_its_message(store: cues.Store) -> None:
    """Times have nanoseconds and datetimes have not: cut, never rounded up."""
    queue = store.queue("q")
    before = datetime.now(UTC) - timedelta(microseconds=1)
    for n in range(1, 20):
        queue.appender().write({"n": n})
    tailer = queue.tailer()
    for n in range(1, 20):
        tailer.to_index(n)
        tailer.read()
        assert tailer.envelope is not None
        assert before <= tailer.envelope.time <= datetime.now(UTC)
        tailer.to_time(tailer.envelope.time)
        assert tailer.index <= n


def test_metadata_of_a_first_queue(store: cues.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now_ns", lambda: 10**18)
    queue = store.queue("q", metadata={"t", "time", "tx"})
    queue.appender().write_many([{"n": 1}, {"n": 2, "q/meta": {"mine": 1}}])
    tailer = queue.tailer(meta=True)
    time = clock.to_datetime(10**18)
    expected = [
        {"q/queue": {"q": {"q/t": 1, "q/time": time}}, "tx/t": 1},
        {"q/queue": {"q": {"q/t": 2, "q/time": time}}, "tx/t": 2, "mine": 1},
    ]
    assert tailer.peek() == {"n": 1, "q/meta": expected[0]}
    assert [m["q/meta"] for m in tailer.read_many(2)] == expected
    assert tailer.envelope == cues.Envelope(2, time, None, None, expected[1])
    assert queue.tailer().read() == {"n": 1}
    stripped = store.queue("stripped", metadata=False)
    stripped.appender().write({"n": 1, "q/meta": {"mine": 1}})
    assert stripped.tailer(meta=True).read() == {"n": 1, "q/meta": {}}


# --- names ----------------------------------------------------------------------------------------


def test_a_named_tailer_continues_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with cues.open(path) as store:
        queue = filled(store, 10)
        assert numbers(queue.tailer("a").read_many(3)) == [1, 2, 3]
        assert numbers(queue.tailer("b").read_many(1)) == [1]
        assert numbers(queue.tailer("a").read_many(2)) == [4, 5]
    with cues.open(path) as store:
        queue = store.queue("q")
        tailer = queue.tailer("a")
        assert (tailer.index, tailer.peek()) == (6, {"n": 6, "x": "xxxxxx"})
        tailer.to_index(9)
        assert queue.tailer("a").index == 9
        tailer.direction = "backward"
        assert numbers(tailer.read_many(2)) == [8, 7]
        assert queue.tailer("a").index == 7
        queue.purge(before=9)
        assert queue.tailer("a").read() == {"n": 9, "x": "x" * 9}
        assert queue.tailer("b").read() == {"n": 9, "x": "x" * 9}


def test_two_of_one_name_share_the_queue(store: cues.Store) -> None:
    queue = filled(store, 100)
    one, two = queue.tailer("shared"), queue.tailer("shared")
    found = []
    for turn in range(30):
        tailer = (one, two)[turn % 2]
        taken = tailer.read_many(1 + turn % 5)
        found += numbers(taken)
        assert tailer.last_read_index == (found[-1] if taken else tailer.last_read_index)
    assert found == sorted(set(found)) == list(range(1, len(found) + 1))
    one.to_index(50)
    assert numbers(two.read_many(2)) == [50, 51]


COMPETITOR = """
import sys, cues
with cues.open(sys.argv[1]) as store:
    tailer = store.queue("q").tailer("shared")
    print("ready"); input()
    mine = []
    while (message := tailer.read(block=True, timeout=2)) is not None and not message.get("end"):
        mine.append(message["n"])
        mine += [m["n"] for m in tailer.read_many(len(mine) % 4) if not m.get("end")]
    print(mine)
"""


def test_two_processes_of_one_name_get_each_message_once(tmp_path: Path, checked: Any) -> None:
    path = tmp_path / "store"
    with cues.open(path, durability="process") as store:
        queue = filled(store, 300)
        with children.Child(COMPETITOR, path) as one, children.Child(COMPETITOR, path) as two:
            assert one.line() == two.line() == "ready"
            one.say()
            two.say()
            for n in range(301, 401):
                queue.appender().write({"n": n})
            queue.appender().write_many([{"end": True}] * 8)
            found = [eval(one.end()), eval(two.end())]
    assert sorted(found[0] + found[1]) == list(range(1, 401))
    assert all(mine == sorted(mine) for mine in found)
    checked(path)


@pytest.mark.parametrize("error", [WriterStuck, StoreFull])
@pytest.mark.interpreted
def test_a_named_read_that_cannot_move_its_position_loses_nothing(
    store: cues.Store, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The commit of the position fails before it begins: the messages that were taken come again."""
    tailer = filled(store, 10).tailer("a")
    assert numbers(tailer.read_many(2)) == [1, 2]
    before = (tailer.index, tailer.last_read_index, tailer.envelope)

    def fail(*_: object, **__: object) -> None:
        raise error("no")

    monkeypatch.setattr(store.core, "commit", fail)
    for use in (lambda: tailer.read(), lambda: tailer.read_many(5), lambda: tailer.to_index(7)):
        with pytest.raises(error):
            use()
        assert (tailer.index, tailer.last_read_index, tailer.envelope) == before
    monkeypatch.undo()
    assert numbers(tailer.read_many(5)) == [3, 4, 5, 6, 7]
    assert store.queue("q").tailer("a").index == 8


# --- damage in the middle -------------------------------------------------------------------------


def damage(queue: cues.Queue, index: int) -> tuple[int, int]:
    """Flip a bit in the record that holds ``index``; returns its first and last message."""
    log = queue.core.log
    with queue.store.core.view() as txn:
        [(first, value, _)] = log.read(txn, log.row(txn), index, 1)
        last = log.next_first(txn, first) - 1
    flipped = bytearray(value)
    flipped[-1] ^= 4
    queue.store.core.commit(lambda txn: txn.put(first.to_bytes(8, "big"), bytes(flipped), db=log.database))
    return first, last


@pytest.mark.damages_stores
@pytest.mark.parametrize("name", [None, "named"])
def test_a_damaged_batch_raises_and_its_neighbours_are_read(store: cues.Store, name: str | None) -> None:
    """The messages before it are returned first, also by a read of many; then comes the error, which moves nothing."""
    queue = filled(store, 2000)
    first, last = damage(queue, 700)
    tailer = queue.tailer(name)
    found = tailer.read_many(5000)
    assert numbers(found) == list(range(1, first))
    for _ in range(2):
        with pytest.raises(BatchDamaged) as caught:
            tailer.read_many(5000)
        assert (caught.value.queue, caught.value.first, caught.value.last) == ("q", first, last)
        assert tailer.index == first and tailer.last_read_index == first - 1
        with pytest.raises(BatchDamaged):
            tailer.peek()
    tailer.to_index(caught.value.last + 1)
    assert numbers(tailer.read_many(5000)) == list(range(last + 1, 2001))
    tailer.direction = "backward"
    assert numbers(tailer.read_many(5000)) == list(range(2000, last, -1))
    with pytest.raises(BatchDamaged):
        tailer.read()
    tailer.to_index(first)
    assert numbers(tailer.read_many(5000)) == list(range(first - 1, 0, -1))


@pytest.mark.damages_stores
@pytest.mark.parametrize("name", [None, "named"])
def test_a_record_that_is_missing_raises_and_can_be_passed(store: cues.Store, name: str | None) -> None:
    """A tailer that stood before a hole saw the record before it for ever, and went round without end."""
    queue = filled(store, 1000)
    log = queue.core.log
    with store.core.view() as txn:
        [(first, _, _)] = log.read(txn, log.row(txn), 500, 1)
        last = log.next_first(txn, first) - 1
    store.core.commit(lambda txn: txn.delete(first.to_bytes(8, "big"), db=log.database))
    tailer = queue.tailer(name)
    assert numbers(tailer.read_many(5000)) == list(range(1, first))
    with pytest.raises(BatchDamaged, match="is missing") as caught:
        tailer.read()
    assert (caught.value.first, caught.value.last) == (first, last)
    tailer.to_index(last + 1)
    assert numbers(tailer.read_many(5000)) == list(range(last + 1, 1001))


@pytest.mark.damages_stores
@pytest.mark.parametrize("what", ["flip", "delete", "swap", "first"])
def test_a_damaged_piece_of_a_large_message(store: cues.Store, what: str) -> None:
    queue = store.queue("q")
    queue.appender().write_many([{"n": 1}, {"n": 2, "x": b"x" * 30_000}, {"n": 3}])
    database = queue.core.log.database

    def change(txn: Any) -> None:
        keys = [key for key, _ in txn.cursor(database) if len(key) == 12]
        assert len(keys) == 7
        value = bytearray(txn.get(keys[2], db=database))
        if what == "flip":
            value[100] ^= 1
            txn.put(keys[2], bytes(value), db=database)
        elif what == "delete":
            txn.delete(keys[6], db=database)
        elif what == "swap":
            txn.put(keys[3], bytes(value), db=database)
        else:
            txn.delete(keys[0][:8], db=database)

    store.core.commit(change)
    tailer = queue.tailer()
    assert numbers(tailer.read_many(3)) == [1]
    with pytest.raises(BatchDamaged) as caught:
        tailer.read()
    assert (caught.value.first, caught.value.last) == (2, 2)
    tailer.to_index(3)
    assert numbers(tailer.read_many(3)) == [3]


# --- alts -----------------------------------------------------------------------------------------


def test_alts_is_fair_and_gives_none_at_its_timeout(store: cues.Store) -> None:
    queues = [store.queue(name) for name in ("a", "b", "c")]
    for queue in queues[:2]:
        queue.appender().write_many([{"n": n} for n in range(1, 6)])
    tailers = [queue.tailer() for queue in queues]
    order = []
    for _ in range(10):
        found = cues.alts(tailers, timeout=0)
        assert found is not None
        order.append((found[0].queue.id, found[1]["n"]))
    assert sorted(order) == [(q, n) for q in "ab" for n in range(1, 6)]
    assert [q for q, _ in order] == ["a", "b"] * 5
    assert cues.alts(tailers, timeout=0) is None
    assert cues.alts(tailers, timeout=0.01) is None
    with pytest.raises(InvalidArgument):
        cues.alts([])


# --- threads --------------------------------------------------------------------------------------


def test_a_second_thread_gets_concurrent_use_also_while_the_first_waits(store: cues.Store) -> None:
    queue = store.queue("q")
    tailer = queue.tailer()
    found: list[Any] = []
    waiting = threading.Event()
    interest = tailer.interest[0]
    assert interest is not None
    real = interest.acquire
    interest.acquire = lambda: (waiting.set(), real())[1]  # type: ignore[method-assign]
    reader = threading.Thread(target=lambda: found.append(tailer.read(block=True, timeout=30)))
    reader.start()
    assert waiting.wait(30)
    for use in (
        lambda: tailer.read(),
        lambda: tailer.read_many(2),
        lambda: tailer.peek(),
        lambda: tailer.to_start(),
        lambda: cues.alts([tailer], timeout=0),
    ):
        with pytest.raises(ConcurrentUse, match="a tailer for each thread"):
            use()
    assert (tailer.index, tailer.last_read_index) == (1, None)
    queue.appender().write({"n": 1})
    reader.join()
    assert found == [{"n": 1}]
    assert tailer.read() is None


@pytest.mark.parametrize("what", ["tailer", "queue", "store", "other handle"])
def test_closing_ends_a_blocked_read_in_another_thread(store: cues.Store, what: str) -> None:
    other = cues.open(store.path)
    handle = other if what == "other handle" else store
    queue = handle.queue("q")
    tailer = queue.tailer()
    ended: list[type[BaseException]] = []
    waiting = threading.Event()

    def read() -> None:
        try:
            tailer.read(block=True)
        except BaseException as error:
            ended.append(type(error))

    doorbells = tailer.interest[0]
    assert doorbells is not None
    real = doorbells.acquire
    doorbells.acquire = lambda: (waiting.set(), real())[1]  # type: ignore[method-assign]
    thread = threading.Thread(target=read)
    thread.start()
    assert waiting.wait(30)
    {"tailer": tailer, "queue": queue, "store": store, "other handle": other}[what].close()
    thread.join(30)
    assert not thread.is_alive()
    assert ended == [Closed]
    other.close()


def test_follow_ends_with_closed(store: cues.Store) -> None:
    queue = filled(store, 3)
    tailer = queue.tailer()
    seen = []
    with pytest.raises(Closed):
        for message in tailer.follow():
            seen.append(message["n"])
            if len(seen) == 3:
                queue.appender().write({"n": 4})
            if len(seen) == 4:
                tailer.close()
    assert seen == [1, 2, 3, 4]


def test_closing_under_readers_and_writers_gives_closed_and_nothing_else(tmp_path: Path) -> None:
    """Whatever the threads are in the middle of when the store is closed."""
    errors: list[BaseException] = []
    for round_ in range(24):
        durability = ("process", "disk")[round_ % 2]
        store = cues.open(tmp_path / durability, durability=durability)
        queue = store.queue("q")
        queue.appender().write_many([{"n": n, "x": "y" * 300} for n in range(100)])
        started = threading.Barrier(6)

        def reading(queue: cues.Queue = queue) -> None:
            while True:
                for _ in queue.tailer():
                    pass

        def writing(queue: cues.Queue = queue) -> None:
            appender = queue.appender()
            while True:
                appender.write({"n": 1})

        def waiting(queue: cues.Queue = queue) -> None:
            tailer = queue.tailer()
            tailer.to_end()
            while True:
                tailer.read(block=True)

        def run(work: Any, started: threading.Barrier = started) -> None:
            started.wait()
            try:
                work()
            except Closed:
                pass
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(w,)) for w in (reading, reading, writing, writing, waiting)]
        for thread in threads:
            thread.start()
        started.wait()
        store.close()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    assert errors == []


# --- the model ------------------------------------------------------------------------------------

SIZES = st.lists(st.sampled_from([0, 0, 0, 10, 10, 300, 300, 2000, 4060, 20_000]), min_size=1, max_size=12)
WHICH = st.integers(0, 7)


class StoreModel(RuleBasedStateMachine):
    """A store with two queues against a dict of lists; tailers against integers."""

    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="cues-model-")
        self.stores = [cues.open(self.path, durability="process")]
        self.lists: dict[str, list[dict[str, Any]]] = {"a": [], "b": [], "kept": []}
        self.first = {"a": 1, "b": 1, "kept": 1}
        self.retention: int | None = None
        self.named: dict[tuple[str, str], int] = {}
        self.count = 0
        self.tailers: list[cues.Tailer] = []
        self.positions: dict[int, int] = {}
        for name in "ab":
            self.write(name, [0] * 40, False)
            self.open_tailer(name, None)
            self.open_tailer(name, "r1")

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        problems = problems_of(self.path)
        shutil.rmtree(self.path)
        assert not problems

    def queue(self, name: str) -> cues.Queue:
        return self.stores[self.count % len(self.stores)].queue(name)

    def next(self, name: str) -> int:
        return len(self.lists[name]) + 1

    @rule(name=st.sampled_from(["a", "b", "kept"]), sizes=SIZES, single=st.booleans())
    def write(self, name: str, sizes: list[int], single: bool) -> None:
        queue = self.queue(name)
        messages = []
        for size in sizes:
            self.count += 1
            messages.append({"n": self.count, "x": b"x" * size})
        if single:
            assert [queue.appender().write(m) for m in messages] == list(
                range(self.next(name), self.next(name) + len(messages))
            )
        else:
            assert queue.appender().write_many(messages) == range(self.next(name), self.next(name) + len(messages))
        self.lists[name] += messages
        if name == "kept" and self.retention is not None:
            front = queue.first_index
            assert self.first[name] <= front <= max(self.first[name], self.next(name) - self.retention)
            assert self.next(name) - front < max(self.retention + 12, 12 + 12), "at most a batch more"
            self.first[name] = front
            assert list(queue.tailer()) == self.lists[name][front - 1 :]

    @rule(count=st.none() | st.integers(1, 30))
    def retain(self, count: int | None) -> None:
        """On a queue of its own: a tailer may hand out what it read ahead of a retention policy."""
        self.stores[-1].queue("kept", retention=count)
        self.retention = count

    @rule(name=st.sampled_from("ab"), data=st.data())
    def purge(self, name: str, data: st.DataObject) -> None:
        before = data.draw(st.integers(1, min(self.next(name), self.first[name] + 10)))
        dropped = self.queue(name).purge(before=before)
        assert dropped == max(0, before - self.first[name])
        self.first[name] = max(self.first[name], before)

    @rule(which=WHICH, back=st.integers(0, 4))
    def purge_behind(self, which: int, back: int) -> None:
        """In the middle of what it has read ahead, or of what it would read backward."""
        tailer = self.tailers[which % len(self.tailers)]
        name = tailer.queue.id
        before = max(1, min(tailer.index, self.next(name)) - back)
        assert self.queue(name).purge(before=before) == max(0, before - self.first[name])
        self.first[name] = max(self.first[name], before)

    @rule(name=st.sampled_from("ab"), often=st.integers(0, 4))
    def delete(self, name: str, often: int) -> None:
        if often < 4:
            return
        assert self.queue(name).delete() == self.next(name) - self.first[name]
        self.first[name] = self.next(name)

    @rule(name=st.sampled_from("ab"), reader=st.sampled_from([None, "r1", "r2"]))
    def new_tailer(self, name: str, reader: str | None) -> None:
        if len(self.tailers) < 8:
            self.open_tailer(name, reader)

    def open_tailer(self, name: str, reader: str | None) -> None:
        tailer = self.queue(name).tailer(reader)
        position = self.named.get((name, reader), self.first[name]) if reader else self.first[name]
        assert tailer.index == position
        self.positions[id(tailer)] = position
        self.tailers.append(tailer)

    @rule(which=WHICH, n=st.integers(0, 30), direction=st.sampled_from(["forward", "forward", "backward"]))
    def read(self, which: int, n: int, direction: Any) -> None:
        tailer = self.tailers[which % len(self.tailers)]
        name, key = tailer.queue.id, (tailer.queue.id, tailer.name)
        tailer.direction = direction
        at = self.positions[id(tailer)]
        low, high = self.first[name], self.next(name)
        expected = self.expected(name, at, n, direction)
        # One of a name that another moved continues from there, which it finds out when it commits.
        if tailer.name and expected and self.named.get(key, at) != at:
            at = self.named[key]
            expected = self.expected(name, at, n, direction)
        found = tailer.read_many(n)
        assert found == expected
        if found:
            at = min(at, high) - len(found) if direction == "backward" else max(at, low) + len(found)
            assert tailer.index == at
            assert tailer.last_read_index == (at if direction == "backward" else at - 1)
            if tailer.name:
                self.named[key] = at
        self.positions[id(tailer)] = tailer.index

    def expected(self, name: str, at: int, n: int, direction: str) -> list[dict[str, Any]]:
        low, high = self.first[name], self.next(name)
        if direction == "backward":
            return [self.lists[name][i - 1] for i in range(at - 1, low - 1, -1)][:n]
        return [self.lists[name][i - 1] for i in range(max(at, low), high)][:n]

    @rule(which=WHICH, data=st.data())
    def seek(self, which: int, data: st.DataObject) -> None:
        tailer = self.tailers[which % len(self.tailers)]
        name = tailer.queue.id
        index = data.draw(st.integers(1, self.next(name)))
        tailer.to_index(index)
        at = max(index, self.first[name])
        self.positions[id(tailer)] = at
        assert tailer.index == at
        if tailer.name:
            self.named[name, tailer.name] = at

    @rule(which=WHICH)
    def peek(self, which: int) -> None:
        tailer = self.tailers[which % len(self.tailers)]
        tailer.direction = "forward"
        expected = self.expected(tailer.queue.id, tailer.index, 1, "forward")
        assert [tailer.peek()] == (expected or [None])
        self.positions[id(tailer)] = tailer.index

    @rule(which=WHICH)
    def close_tailer(self, which: int) -> None:
        if len(self.tailers) > 3:
            self.tailers.pop(which % len(self.tailers)).close()

    @rule()
    def second_handle(self) -> None:
        if len(self.stores) < 3:
            self.stores.append(cues.open(self.path))

    @rule(often=st.integers(0, 4))
    def reopen(self, often: int) -> None:
        if often < 4:
            return
        for store in self.stores:
            store.close()
        self.stores = [cues.open(self.path)]
        old, self.tailers = self.tailers, []
        for tailer in old:
            self.open_tailer(tailer.queue.id, tailer.name)

    @invariant()
    def fronts_and_ends(self) -> None:
        for name in self.lists:
            queue = self.queue(name)
            assert (queue.first_index, queue.last_index) == (self.first[name], self.next(name) - 1)
            assert len(queue) == self.next(name) - self.first[name]


StoreModel.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


class TestStoreModel(StoreModel.TestCase):  # type: ignore[name-defined, misc]
    """A bounded walk at every run."""


@pytest.mark.slow
class TestStoreModelSlow(StoreModel.TestCase):  # type: ignore[name-defined, misc]
    """A longer one."""

    settings = settings(StoreModel.TestCase.settings, max_examples=120)


@pytest.mark.long
class TestStoreModelLong(StoreModel.TestCase):  # type: ignore[name-defined, misc]
    """Many longer walks."""

    settings = settings(StoreModel.TestCase.settings, max_examples=400, stateful_step_count=100)


def test_waiting_takes_no_longer_than_its_timeout(store: cues.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the timeout ends the wait here: nothing is written, and the second look is an hour away."""
    monkeypatch.setattr(wakeup, "SAFETY_S", 3600.0)
    tailer = store.queue("q").tailer()
    for timeout in (0, -1, 0.02):
        assert tailer.read(block=True, timeout=timeout) is None
