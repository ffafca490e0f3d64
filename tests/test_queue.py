"""Queues and appenders: order, indices, purge, retention, options, and many writers at once."""

from __future__ import annotations

import itertools
import os
import random
import threading
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import children
import pytest
import seeds

import cues
from cues import faults
from cues.base import clock
from cues.errors import (
    Closed,
    CodecError,
    InvalidArgument,
    MessageTooLarge,
    QueueNotFound,
    QueueOptionsError,
    ReservedKey,
    StoreReadOnly,
)

DURABILITIES = ["process", "disk"]


@pytest.fixture(params=DURABILITIES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[cues.Store]:
    with cues.open(tmp_path / "store", durability=request.param) as found:
        yield found


@pytest.fixture
def fast_store(tmp_path: Path) -> Iterator[cues.Store]:
    """For thousands of single appends."""
    with cues.open(tmp_path / "store", durability="process") as found:
        yield found


def everything(queue: cues.Queue) -> list[dict[str, Any]]:
    return list(queue.tailer())


def test_messages_come_in_order_under_indices_from_one(store: cues.Store) -> None:
    queue = store.queue("q")
    appender = queue.appender()
    assert (len(queue), queue.first_index, queue.last_index) == (0, 1, 0)
    assert appender.write({"n": 1}) == 1
    assert appender.write_many([{"n": 2}, {"n": 3}]) == range(2, 4)
    assert appender.write_many([]) == range(4, 4)
    assert appender.write_many({"n": n} for n in (4, 5)) == range(4, 6)
    assert everything(queue) == [{"n": n} for n in range(1, 6)]
    assert (len(queue), queue.first_index, queue.last_index) == (5, 1, 5)
    assert bool(store.queue("empty"))


@pytest.mark.interpreted
def test_a_write_of_many_is_all_or_none_and_names_the_message(store: cues.Store) -> None:
    queue = store.queue("q", max_message_bytes=10_000)
    appender = queue.appender()
    good = [{"n": n} for n in range(500)]
    for bad, kind, words in [
        ({"x": [1, object()]}, CodecError, r"messages\[500\].*object at x\[1\]"),
        ({"q/secret": 1}, ReservedKey, r"messages\[500\].*q/secret"),
        ({"x": b"x" * 10_001}, MessageTooLarge, r"messages\[500\].*limit is 10,000"),
        (["not a dict"], InvalidArgument, r"messages\[500\].*found list"),
    ]:
        with pytest.raises(kind, match=words):
            appender.write_many([*good, bad, {"n": 1}])  # type: ignore[list-item]
        with pytest.raises(kind) as caught:
            appender.write(bad)  # type: ignore[arg-type]
        assert "messages[" not in str(caught.value)
        if isinstance(caught.value, CodecError):
            assert caught.value.path == "x[1]", "inside the message, not inside the batch"
    assert (len(queue), queue.core.row().next) == (0, 1)


def test_a_dict_in_place_of_a_list_is_refused(store: cues.Store) -> None:
    with pytest.raises(InvalidArgument, match="A message is a dict, found str"):
        store.queue("q").appender().write_many({"n": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [4_000, 4_100, 100_000, 10 << 20])
def test_large_messages_come_back_among_small_ones(store: cues.Store, size: int) -> None:
    queue = store.queue("q")
    large = {"x": random.Random(size).randbytes(size)}
    messages: list[dict[str, Any]] = [{"n": 1}, large, {"n": 2}, {"x": "y" * 5000}, {"n": 3}]
    queue.appender().write_many(messages)
    queue.appender().write(large)
    assert everything(queue) == [*messages, large]
    tailer = queue.tailer()
    tailer.to_end()
    tailer.direction = "backward"
    assert tailer.read_many(10) == [*messages, large][::-1]


def test_the_limit_is_64_mib_by_default(store: cues.Store) -> None:
    message = {"x": b"x" * (64 << 20)}
    with pytest.raises(MessageTooLarge) as caught:
        store.queue("q").appender().write(message)
    assert caught.value.limit_bytes == 64 << 20
    small = store.queue("small", max_message_bytes=20).appender()
    with pytest.raises(MessageTooLarge):
        small.write({"x": "y" * 20})
    with pytest.raises(MessageTooLarge):
        small.write_many([{}, {"x": "y" * 20}])
    assert small.write({"x": "y" * 10}) == 1


# --- time ----------------------------------------------------------------------------------------


def test_append_times_never_go_back_when_the_clock_does(store: cues.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = store.queue("q")
    start = 1_700_000_000_000_000_000
    for now in (start, start - 10**9, start + 5000, start - 10**12, start + 10**9):
        monkeypatch.setattr(clock, "now_ns", lambda now=now: now)
        queue.appender().write({"now": now})
        queue.appender().write_many([{"now": now}] * 2)
    tailer = queue.tailer()
    times = []
    while tailer.read() is not None:
        assert tailer.envelope is not None
        times.append(tailer.envelope.time)
    assert times == sorted(times)
    assert times[3:6] == [clock.to_datetime(start)] * 3, "not below what came before"


def test_purging_by_time_drops_what_was_appended_before(store: cues.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = store.queue("q")
    day = 86_400 * 10**9
    for n in range(10):
        monkeypatch.setattr(clock, "now_ns", lambda n=n: n * day)
        queue.appender().write_many([{"n": n}] * 3)
    when = datetime(1970, 1, 5, tzinfo=UTC)
    with pytest.raises(InvalidArgument, match="no time zone"):
        queue.purge(before=when.replace(tzinfo=None))
    assert queue.purge(before=when) == 12
    assert queue.purge(before=when) == 0
    assert [m["n"] for m in everything(queue)] == [n for n in range(4, 10) for _ in range(3)]
    assert queue.purge(before=datetime(2030, 1, 1, tzinfo=UTC)) == 18
    assert len(queue) == 0


# --- purge, delete, retention ---------------------------------------------------------------------


def test_a_purge_is_exact_for_readers_at_once_also_inside_a_batch(store: cues.Store) -> None:
    queue = store.queue("q")
    queue.appender().write_many([{"n": n} for n in range(1, 101)])
    stand, named = queue.tailer(), queue.tailer("named")
    assert stand.read_many(2) == named.read_many(2) == [{"n": 1}, {"n": 2}]
    assert queue.purge(before=38) == 37
    assert (queue.first_index, len(queue)) == (38, 63)
    assert stand.read() == named.read() == {"n": 38}, "though it had read ahead"
    back = queue.tailer()
    back.to_index(40)
    back.direction = "backward"
    assert back.read_many(10) == [{"n": 39}, {"n": 38}]
    assert queue.purge(before=20) == 0
    assert queue.purge(before=101) == 63
    assert (queue.first_index, queue.last_index, len(queue)) == (101, 100, 0)
    assert queue.appender().write({"n": 101}) == 101, "an index is never used twice"


@pytest.mark.parametrize("index", [0, -1, 103, 10**9, "3", 2.0, True, None])
@pytest.mark.interpreted
def test_a_purge_to_nowhere_is_refused(store: cues.Store, index: Any) -> None:
    queue = store.queue("q")
    queue.appender().write_many([{}] * 101)
    with pytest.raises(InvalidArgument):
        queue.purge(before=index)
    assert len(queue) == 101


@pytest.mark.interpreted
def test_a_reader_that_looks_between_a_purge_and_its_commit_looks_again(tmp_path: Path) -> None:
    """The word that says "drop what you read ahead" is set before the commit; a reader that looked then
    would believe that its batch is still whole."""
    with cues.open(tmp_path / "store", durability="process") as store:
        queue = store.queue("q")
        queue.appender().write_many([{"n": n} for n in range(1, 11)])
        tailer = queue.tailer()
        seen = []

        real = store.core.note_purge

        def purged_and_look() -> None:
            real()
            if not seen:
                looker = threading.Thread(target=lambda: seen.append(tailer.read()))
                looker.start()
                looker.join()

        store.core.note_purge = purged_and_look  # type: ignore[method-assign]
        queue.purge(before=8)
        assert seen == [{"n": 1}], "before the purge's commit"
        assert tailer.read() == {"n": 8}


def test_deleting_empties_and_keeps_identity_and_indices(store: cues.Store) -> None:
    queue = store.queue("q", retention=50_000)
    queue.appender().write_many([{"n": n, "x": "x" * 300} for n in range(30_000)])
    identity = queue.core.row().identity
    reader = queue.tailer("r")
    reader.read_many(5)
    assert queue.delete() == 30_000
    assert queue.delete() == 0
    assert (len(queue), queue.first_index) == (0, 30_001)
    assert queue.core.row().identity == identity
    assert reader.read() is None
    assert queue.appender().write({"n": "new"}) == 30_001
    assert reader.read() == {"n": "new"}
    with store.core.view() as txn:
        assert txn.stat(queue.core.log.database)["entries"] == 1, "space was given back"


def test_retention_by_count_keeps_that_many_and_less_than_a_batch_more(fast_store: cues.Store) -> None:
    store = fast_store
    queue = store.queue("q", retention=100)
    appender = queue.appender()
    for n in range(1, 1001):
        appender.write({"n": n})
        assert min(n, 100) <= len(queue) <= min(n, 101)
    assert everything(queue)[0]["n"] <= 901
    appender.write_many([{"n": n} for n in range(1001, 3001)])
    assert 100 <= len(queue) < 2000
    appender.write({"n": 3001})
    assert [m["n"] for m in everything(queue)] == list(range(queue.first_index, 3002))


def test_retention_works_off_an_old_queue_by_and_by(fast_store: cues.Store) -> None:
    store = fast_store
    """A million messages that go at once would hold everybody's writer lock."""
    queue = store.queue("q")
    appender = queue.appender()
    for n in range(2500):
        appender.write({"n": n})
    store.queue("q", retention=10)
    first = appender.write({"n": 2500}) - len(queue)
    assert queue.first_index == 1001 and first == 1000
    appender.write({"n": 2501})
    appender.write({"n": 2502})
    assert 10 <= len(queue) <= 12


@pytest.mark.parametrize(
    "bad",
    [
        {"retention": 0},
        {"retention": -1},
        {"retention": True},
        {"retention": 1.5},
        {"retention": "soon"},
        {"retention": "10 days"},
        {"retention": "0d"},
        {"retention": "-5MB"},
        {"metadata": {"x"}},
        {"metadata": 5},
        {"metadata": None},
        {"max_message_bytes": 0},
        {"max_message_bytes": "1"},
        {"max_message_bytes": 1 << 32},
        {"partitions": 0},
        {"partitions": True},
        {"partitions": 257},
        {"partitioner": "murmur3", "key": "user"},
        {"partitioner": "murmur2"},
        {"key": ""},
        {"path": "elsewhere"},
        {"retentoin": 5},
    ],
    ids=repr,
)
def test_an_option_that_cannot_be_meant_is_refused_and_nothing_is_made(store: cues.Store, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        store.queue("q", **bad)
    assert next(iter(bad)) in str(caught.value).lower() or "retention" in bad
    assert store.queues() == []
    for count in ("5", 0, True):
        with pytest.raises(InvalidArgument):
            cues.Retention(count=count)  # type: ignore[arg-type]


def test_options_stay_and_change_where_they_can(store: cues.Store) -> None:
    queue = store.queue("q", retention=100, metadata={"t"})
    assert store.queue("q").options == queue.options
    changed = store.queue("q", metadata=True, max_message_bytes=50)
    assert changed.options.kept == {"t", "time"}
    assert (changed.options.retention, changed.options.max_message_bytes) == (cues.Retention(count=100), 50)
    assert queue.options == changed.options, "an older handle follows"
    assert store.queue("q", retention=None).options.retention is None


def test_an_appender_follows_options_that_change_under_it(store: cues.Store) -> None:
    """It was made before; the very next message keeps to what holds now, its limit and its stripping."""
    appender = store.queue("q", metadata=True).appender()
    appender.write_many([{"n": 1, "q/meta": {"mine": 1}}])
    store.queue("q", metadata=False, max_message_bytes=1000)
    appender.write_many([{"n": 2, "q/meta": {"mine": 2}}])
    with pytest.raises(MessageTooLarge):
        appender.write({"x": "x" * 1001})
    store.queue("q", metadata=True, max_message_bytes=2000)
    assert appender.write({"x": "x" * 1001}) == 3
    tailer = store.queue("q").tailer(meta=True)
    assert [m["q/meta"].get("mine") for m in tailer.read_many(9)] == [1, None, None]


def test_what_a_newer_version_says_of_a_queue_is_refused(store: cues.Store) -> None:
    from cues.base import names
    from cues.records import sealed

    store.queue("q")
    key = names.queue_key("q")

    def newer(txn: Any) -> None:
        record = sealed.unseal_map(key, txn.get(key), "record")
        sealed.put(txn, key, sealed.pack_map({**record, "schema": {"x": "int"}}))

    store.core.commit(newer)
    with pytest.raises(QueueOptionsError, match="newer"):
        store.queue("q")
    store.core.commit(
        lambda txn: sealed.put(
            txn, key, sealed.pack_map({**sealed.unseal_map(key, txn.get(key), "record"), "schema": None})
        )
    )


# --- handles --------------------------------------------------------------------------------------


def test_every_use_after_close_says_closed(store: cues.Store) -> None:
    queue = store.queue("q")
    appender, tailer = queue.appender(), queue.tailer("r")
    appender.write_many([{"n": 1}, {"n": 2}])
    with store.queue("q").appender() as other:
        pass
    uses = [
        lambda: appender.write({}),
        lambda: appender.write_many([{}]),
        lambda: appender.write_many([]),
        lambda: tailer.read(),
        lambda: tailer.read(block=True, timeout=1),
        lambda: tailer.read_many(1),
        lambda: tailer.peek(),
        lambda: tailer.to_start(),
        lambda: list(tailer),
        lambda: next(tailer.follow()),
        lambda: cues.alts([tailer], timeout=1),
        lambda: queue.purge(before=1),
        lambda: queue.delete(),
        lambda: queue.first_index,
        lambda: len(queue),
        lambda: queue.options,
        lambda: queue.tailer(),
        lambda: queue.appender(),
    ]
    with pytest.raises(Closed, match="appender"):
        other.write({})
    queue.close()
    for use in uses:
        with pytest.raises(Closed):
            use()
    assert store.queue("q").tailer("r").read_many(9) == [{"n": 1}, {"n": 2}], "another handle is another handle"
    store.close()
    store.close()
    for use in [*uses, lambda: store.queue("q"), lambda: store.queues(), lambda: store.info(), lambda: store.sync()]:
        with pytest.raises(Closed):
            use()


def test_a_handle_that_was_closed_stays_closed_while_another_is_open(tmp_path: Path) -> None:
    """They share an environment; what is closed is the handle."""
    first, second = cues.open(tmp_path / "store"), cues.open(tmp_path / "store")
    queue, other = first.queue("q"), second.queue("q")
    appender, tailer = queue.appender(), queue.tailer()
    first.close()
    for use in (lambda: appender.write({}), lambda: tailer.read(), lambda: queue.purge(before=1), lambda: len(queue)):
        with pytest.raises(Closed):
            use()
    assert len(other) == 0
    assert other.appender().write({"n": 1}) == 1
    second.close()


def test_a_readonly_handle_reads_and_refuses_to_write(store: cues.Store) -> None:
    queue = store.queue("q")
    queue.appender().write_many([{"n": 1}, {"n": 2}])
    queue.tailer("r").read()
    with cues.open(store.path, readonly=True) as other:
        found = other.queue("q")
        assert list(found.tailer()) == [{"n": 1}, {"n": 2}]
        for use in (
            lambda: found.appender().write({}),
            lambda: found.appender().write_many([{}]),
            lambda: found.purge(before=2),
            lambda: found.delete(),
            lambda: found.tailer("r").to_start(),
        ):
            with pytest.raises(StoreReadOnly):
                use()
        named = found.tailer("r")
        for _ in range(2):
            with pytest.raises(StoreReadOnly):
                named.read()
            assert (named.index, named.last_read_index, named.envelope) == (2, None, None)
        with pytest.raises(QueueNotFound, match="it has q"):
            other.queue("missing")
        with pytest.raises(QueueOptionsError):
            other.queue("q", retention=5)
    assert queue.tailer("r").read() == {"n": 2}


# --- many at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", DURABILITIES)
def test_threads_that_write_at_once_lose_and_repeat_nothing(tmp_path: Path, durability: str) -> None:
    """On "disk" they share transactions; each gets the indices of its own messages, in its own order."""
    threads_count, rounds = 8, 40
    got: dict[int, list[int]] = {}
    with cues.open(tmp_path / "store", durability=durability) as store:
        queue = store.queue("q")
        appender = queue.appender()

        def write(who: int) -> None:
            mine = got.setdefault(who, [])
            for n in range(rounds):
                if n % 3:
                    mine.append(appender.write({"who": who, "n": n}))
                else:
                    mine += appender.write_many([{"who": who, "n": n}, {"who": who, "n": n}])

        threads = [threading.Thread(target=write, args=(who,)) for who in range(threads_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = everything(queue)
    assert sorted(i for mine in got.values() for i in mine) == list(range(1, len(found) + 1))
    for who, mine in got.items():
        assert mine == sorted(mine)
        assert [found[i - 1] for i in mine] == [m for m in found if m["who"] == who]


def test_one_that_raises_in_a_shared_transaction_is_undone_alone(tmp_path: Path) -> None:
    """Commits that wait for the disk together: the good ones are written, the bad one is not, and only it hears."""
    with cues.open(tmp_path / "store", durability="disk") as store:
        queue = store.queue("q")
        inside, go = threading.Event(), threading.Event()
        results: dict[int, object] = {}

        def hold(txn: object) -> None:
            inside.set()
            go.wait(30)

        def work(txn: Any, n: int) -> int:
            from cues.records import batch

            index = queue.core.append_pages(txn, batch.build([{"n": n}], 1000))
            if n % 4 == 2:
                raise RuntimeError(f"refused {n}")
            return index

        def commit(n: int) -> None:
            try:
                results[n] = store.core.commit(work, n)
            except RuntimeError as error:
                results[n] = str(error)

        leader = threading.Thread(target=store.core.commit, args=(hold,))
        leader.start()
        assert inside.wait(30)
        members = [threading.Thread(target=commit, args=(n,)) for n in range(12)]
        for member in members:
            member.start()
        while len(store.core.environment.group.waiting) < 12:  # the leader is inside, so they all gather
            os.sched_yield()
        go.set()
        for thread in (leader, *members):
            thread.join()
        good = [n for n in range(12) if n % 4 != 2]
        assert {n: r for n, r in results.items() if isinstance(r, str)} == {n: f"refused {n}" for n in (2, 6, 10)}
        assert sorted(results[n] for n in good) == list(range(1, 10))  # type: ignore[type-var]
        assert sorted(m["n"] for m in everything(queue)) == good


def test_a_commit_that_raises_writes_nothing(store: cues.Store) -> None:
    queue = store.queue("q")
    queue.appender().write({"n": 1})

    def raising(name: str) -> None:
        raise KeyboardInterrupt

    faults.arm("append.inside", 1, raising)
    with pytest.raises(KeyboardInterrupt):
        queue.appender().write({"n": 2})
    faults.disarm()
    faults.arm("append.inside", 1, raising)
    with pytest.raises(KeyboardInterrupt):
        queue.appender().write_many([{"n": 2}] * 3)
    faults.disarm()
    assert queue.appender().write({"n": 3}) == 2
    assert everything(queue) == [{"n": 1}, {"n": 3}]


WRITER = """
import sys, cues
path, who, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with cues.open(path) as store:
    appender = store.queue("q").appender()
    print("ready"); input()
    for n in range(count):
        if n % 10:
            appender.write({"who": who, "n": n})
        else:
            appender.write_many([{"who": who, "n": n, "part": part, "x": "x" * 3000} for part in range(3)])
"""

READER = """
import sys, cues
path, count = sys.argv[1], int(sys.argv[2])
with cues.open(path, readonly=len(sys.argv) > 3) as store:
    tailer = store.queue("q").tailer()
    print("ready")
    seen = []
    while len(seen) < count:
        message = tailer.read(block=True, timeout=30)
        assert message is not None, len(seen)
        assert tailer.last_read_index == len(seen) + 1
        seen.append((message["who"], message["n"], message.get("part", 0)))
    for who in {w for w, _, _ in seen}:
        mine = [(n, part) for w, n, part in seen if w == who]
        assert mine == sorted(mine) and len(set(mine)) == len(mine)
    print(seen)
"""


@pytest.mark.parametrize("durability", DURABILITIES)
def test_writers_and_readers_in_unrelated_processes(tmp_path: Path, durability: str, checked: Any) -> None:
    """Three write, three read as it comes, one of them read-only: all see one order, whole."""
    path = tmp_path / "store"
    count = 100 if durability == "process" else 30
    with cues.open(path, durability=durability) as store:
        store.queue("q")
    total = 3 * (count + 2 * len(range(0, count, 10)))
    writers = [children.Child(WRITER, path, who, count) for who in range(3)]
    readers = [children.Child(READER, path, total, *extra) for extra in ((), (), ("readonly",))]
    try:
        for child in (*writers, *readers):
            assert child.line() == "ready"
        for writer in writers:
            writer.say()
        for writer in writers:
            writer.end()
        assert len({reader.end() for reader in readers}) == 1
    finally:
        for child in (*writers, *readers):
            child.__exit__(None, None, None)
    checked(path)


KILLED_WRITER = """
import sys, cues
with cues.open(sys.argv[1]) as store:
    queue = store.queue("q")
    appender = queue.appender()
    n = queue.last_index
    print("ready")
    while True:
        if n % 7:
            n = appender.write({"n": n + 1})
        else:
            n = appender.write_many([{"n": n + 1 + i, "x": "x" * (i * 900)} for i in range(8)])[-1]
        print(n)
"""


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_writer_that_is_killed_leaves_whole_appends(tmp_path: Path, durability: str, checked: Any) -> None:
    """kill -9 in the middle of writing, again and again: what was acknowledged is there, in order, and nothing
    is half there; the next writer, and one that was open all along, continue at once."""
    path = tmp_path / "store"
    seed = seeds.new()
    rng = random.Random(seed)
    with cues.open(path, durability=durability) as store:
        queue = store.queue("q")
        witness = queue.appender()
        for _ in range(6):
            with children.Child(KILLED_WRITER, path) as child:
                acknowledged = 0
                child.line()
                for _ in range(rng.randrange(1, 60)):
                    acknowledged = int(child.line())
                child.kill()
            # A writer that dies between LMDB's meta page and the word that readers follow has committed, and
            # readers see it from the next write transaction on: have one.
            queue.purge(before=1)
            assert queue.last_index >= acknowledged
            assert [m["n"] for m in queue.tailer()] == list(range(1, queue.last_index + 1))
            n = queue.last_index + 1
            assert witness.write({"n": n}) == n
    checked(path)


@pytest.mark.parametrize("point", ["append.before", "append.inside", "append.after"])
@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_writer_that_dies_at_a_crash_point(tmp_path: Path, durability: str, point: str, checked: Any) -> None:
    path = tmp_path / "store"
    with cues.open(path, durability=durability) as store:
        store.queue("q").appender().write_many([{"n": 1}, {"n": 2}])
    code = "import sys, cues; cues.open(sys.argv[1]).queue('q').appender().write({'n': 3})"
    with children.Child(code, path, CUES_FAULT=f"{point}:1") as child:
        assert child.returncode() == -9
    with cues.open(path) as store:
        queue = store.queue("q")
        written = [1, 2, 3] if point == "append.after" else [1, 2]
        assert [m["n"] for m in queue.tailer()] == written
        assert queue.appender().write({"n": 4}) == len(written) + 1
    checked(path)


def test_a_purge_that_dies_inside_leaves_a_whole_queue(tmp_path: Path, checked: Any) -> None:
    path = tmp_path / "store"
    with cues.open(path, durability="process") as store:
        appender = store.queue("q").appender()
        for n in range(1, 2501):
            appender.write({"n": n})
    code = "import sys, cues; cues.open(sys.argv[1]).queue('q').purge(before=2400)"
    for hit in (1, 2):
        with children.Child(code, path, CUES_FAULT=f"purge.inside:{hit}") as child:
            assert child.returncode() == -9
        with cues.open(path) as store:
            queue = store.queue("q")
            assert (queue.first_index, len(list(queue.tailer()))) == (2400, 101)
        checked(path)
    with cues.open(path) as store:
        queue = store.queue("q")
        assert queue.purge(before=2400) == 0
        with store.core.view() as txn:
            assert txn.stat(queue.core.log.database)["entries"] == 101, "the space that was left came back"


def test_ages_and_sizes_are_read_as_people_write_them() -> None:
    from cues.queues import options

    assert options.seconds_of("15m") == 900
    assert options.seconds_of(timedelta(days=2)) == 172_800
    assert options.bytes_of("2GiB") == 2 << 30
    assert options.bytes_of("500MB") == 500 * 10**6
    assert cues.Retention.of("1_000") == cues.Retention(count=1000)


class Undone(Exception):
    """Ends a transaction that is to leave nothing."""


def test_whole_batches_go_and_no_part_of_one(tmp_path: Path) -> None:
    """Against a model: batches in order, of which those go that end before the index, at least one, and as many as have
    the entries that one commit may delete."""
    seed = seeds.new()
    draw = random.Random(seed)
    for name in range(30):
        with cues.open(tmp_path / str(name), durability="process") as store:
            queue = store.queue("q")
            appender = queue.appender()
            for _ in range(draw.randrange(8)):
                size = draw.choice((1, 1, 9_000))  # of several pages
                appender.write_many([{"x": bytes(size)} for _ in range(draw.randrange(1, 5))])
            if queue.last_index and draw.random() < 0.3:
                queue.purge(before=draw.randrange(1, queue.last_index + 2))
            log = queue.core.log
            with store.core.view() as txn:
                row = log.row(txn)
                raws = log.read(txn, row, row.first, row.next)
                batches = log.batches(raws)
            for _ in range(10):
                index, most = draw.randrange(1, row.next + 1), draw.choice((1, 2, 1000))
                ended = [one for one in batches if one.next <= index]
                sizes = list(itertools.accumulate(1 + len(one[2]) for one in raws[: len(ended)]))
                gone = ended[: max(min(1, len(ended)), sum(size <= most for size in sizes))]
                left = [one.first for one in batches[len(gone) :]]

                def delete(txn: Any) -> None:
                    assert log.delete_before(txn, row, index, most) == (gone != ended, ([*left, row.next])[0])
                    keys = [key for key, _ in txn.cursor(log.database)]
                    assert [int.from_bytes(key, "big") for key in keys if len(key) == 8] == left
                    assert all(int.from_bytes(key[:8], "big") in left for key in keys)
                    raise Undone

                with pytest.raises(Undone):
                    store.core.commit(delete)


def test_the_memory_of_a_message_that_is_refused_is_given_back(fast_store: cues.Store) -> None:
    """The encoder had grown to the largest message that it ever had, and a thread keeps its encoder."""
    appender = fast_store.queue("small", max_message_bytes=1_000).appender()
    appender.write({"n": 1})
    tracemalloc.start()
    try:
        with pytest.raises(MessageTooLarge):
            appender.write({"x": b"x" * (32 << 20)})
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most > 64 << 20  # the message, and its encoded form
    assert kept < 4 << 20
