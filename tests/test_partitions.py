"""Queues with several partitions: where messages go, what a whole queue means, growing, and reading them as one."""

from __future__ import annotations

import contextlib
import pickle
import random
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import seeds

import cues
from cues import faults
from cues.base import clock
from cues.errors import Closed, InvalidArgument, QueueNotFound, QueueOptionsError
from cues.queues.base import PartitionIndex, views_of
from cues.queues.log import read_row
from cues.queues.partitioners import partition_for


def keyed(count: int, keys: int = 10) -> list[dict[str, Any]]:
    return [{"user": f"user-{n % keys}", "n": n} for n in range(count)]


@contextlib.contextmanager
def failing(point: str) -> Iterator[None]:
    """Raise at this crash point inside the block."""

    def fail(name: str) -> None:
        raise RuntimeError(name)

    faults.arm(point, 1, fail)
    try:
        with pytest.raises(RuntimeError, match=point):
            yield
    finally:
        faults.disarm()


def by_partition(queue: cues.Queue) -> list[list[int]]:
    return [[message["n"] for message in queue.partition(i).tailer()] for i in range(queue.partitions)]


# --- writing ----------------------------------------------------------------------------------------


def test_messages_go_to_the_partition_of_their_key_in_one_transaction(store: cues.Store) -> None:
    """Message i is where Kafka's partitioner puts its key."""
    queue = store.queue("orders", partitions=8, key="user")
    messages = keyed(200)
    written = queue.appender().write_many(messages)
    assert len(written) == 200
    for message, place in zip(messages, written):
        assert isinstance(place, PartitionIndex)
        assert place.partition == partition_for(message["user"], 8)
        found = queue.partition(place.partition).tailer()
        found.to_index(place)
        assert found.read() == message
    assert len(queue) == 200
    one = queue.appender().write({"user": "user-3", "n": 200})
    assert isinstance(one, PartitionIndex)
    assert one.partition == partition_for("user-3", 8)
    assert (str(one), repr(one)) == (f"{int(one)}", f"<{int(one)} of partition {one.partition}>")
    assert pickle.loads(pickle.dumps(one)).partition == one.partition
    assert queue.appender().write_many([]) == []


def test_an_append_over_several_partitions_is_all_or_none(store: cues.Store) -> None:
    queue = store.queue("orders", partitions=4, key="user")
    bad = [*keyed(50), {"user": "user-1", "n": object()}]
    with pytest.raises(cues.errors.CodecError, match=r"messages\[50\]"):
        queue.appender().write_many(bad)
    with pytest.raises(InvalidArgument, match=r"messages\[2\].*'user'"):
        queue.appender().write_many([*keyed(2), {"n": 3}])
    with pytest.raises(InvalidArgument, match="dict"):
        queue.appender().write_many([*keyed(2), 5])  # type: ignore[list-item]
    with failing("append.inside"):
        queue.appender().write_many(keyed(50))
    assert len(queue) == 0
    assert by_partition(queue) == [[], [], [], []]


def test_turns_go_on_where_the_queue_is(store: cues.Store) -> None:
    queue = store.queue("turns", partitions=3, partitioner="round-robin")
    for n in range(5):
        with cues.open(store.path) as again:
            again.queue("turns").appender().write({"n": n})
    assert by_partition(queue) == [[0, 3], [1, 4], [2]]
    sticky = store.queue("sticky", partitions=3)
    appender = sticky.appender()
    for n in range(0, 12, 3):
        appender.write_many([{"n": n}, {"n": n + 1}, {"n": n + 2}])
    assert by_partition(sticky) == [[0, 1, 2, 9, 10, 11], [3, 4, 5], [6, 7, 8]]


def test_a_function_is_given_again_to_a_new_handle(store: cues.Store) -> None:
    def parity(message: dict[str, Any], n: int) -> int:
        return int(message["n"]) % n

    store.queue("q", partitions=2, partitioner=parity).appender().write_many([{"n": n} for n in range(4)])
    unaware = store.queue("q")
    assert by_partition(unaware) == [[0, 2], [1, 3]]
    with pytest.raises(InvalidArgument, match="parity"):
        unaware.appender().write({"n": 4})
    store.queue("q", partitioner=parity).appender().write({"n": 4})
    unaware.partition(1).appender().write({"n": 6})  # whoever names the partition needs no function
    assert by_partition(unaware) == [[0, 2, 4], [1, 3, 6]]
    with pytest.raises(QueueOptionsError, match="partitioner"):
        store.queue("q", partitioner="round-robin")


def test_a_partition_is_a_queue_of_its_own(store: cues.Store) -> None:
    queue = store.queue("orders", partitions=4, key="user", metadata={"t"})
    part = queue.partition(3)
    assert (part.id, part.partitions) == ("orders/3", 1)
    assert part.appender().write({"n": 1}) == 1
    same = store.queue("orders/3")
    assert [m["n"] for m in same.tailer()] == [1]
    assert same.first_index == same.last_index == len(same) == 1
    tailer = same.tailer(meta=True)
    message = tailer.read()
    assert message is not None
    assert message["q/meta"] == {"q/queue": {"orders/3": {"q/t": 1}}}
    assert tailer.envelope is not None
    assert tailer.envelope.partition == 3
    assert tailer.positions == {3: 2}
    assert store.queue("orders/0").partition  # the first has its number too
    assert same.purge(before=2) == 1
    assert [len(queue.partition(i)) for i in range(4)] == [0, 0, 0, 0]
    for id in ("orders/4", "nothing/0", "orders/99"):
        with pytest.raises(QueueNotFound):
            store.queue(id)
    for bad in ("orders/", "orders/x", "orders/-1", "/3", "orders/1/2"):
        with pytest.raises(InvalidArgument):
            store.queue(bad)
    with pytest.raises(InvalidArgument, match="whole queue"):
        store.queue("orders/3", retention=5)
    with pytest.raises(InvalidArgument, match="is a partition"):
        part.partition(0)
    queue.close()
    with pytest.raises(Closed):
        part.appender().write({"n": 1})


def test_matching_names_partitions_in_their_order(store: cues.Store) -> None:
    store.queue("pageviews", partitions=12)
    store.queue("pages")
    assert store.matching("pageviews/*") == [f"pageviews/{n}" for n in range(12)]
    assert store.matching("page*") == ["pages", "pageviews"]
    assert store.matching("pages/*") == ["pages/0"]
    assert store.matching("page*/0") == ["pages/0", "pageviews/0"]
    assert store.matching("nothing/*") == []
    for name in store.matching("pageviews/*"):
        assert store.queue(name).id == name
    assert store.queues() == ["pages", "pageviews"]


# --- the whole queue --------------------------------------------------------------------------------


def test_indices_count_and_purge_of_the_whole(store: cues.Store) -> None:
    queue = store.queue("orders", partitions=4, key="user")
    queue.appender().write_many(keyed(100))
    lengths = [len(queue.partition(i)) for i in range(4)]
    assert (len(queue), queue.first_index, queue.last_index) == (100, 1, max(lengths))
    cut = datetime.now(UTC) + timedelta(microseconds=1)
    while clock.now_ns() <= clock.to_ns(cut):
        pass
    queue.appender().write_many(keyed(10))
    assert queue.purge(before=cut) == 100
    assert len(queue) == 10
    with pytest.raises(InvalidArgument, match="each of the 4 partitions"):
        queue.purge(before=3)
    assert queue.delete() == 10
    assert len(queue) == 0
    nexts = [row.next for row in queue.core.rows()]
    assert sum(nexts) == 110 + 4
    assert [queue.partition(i).appender().write({"n": 0}) for i in range(4)] == nexts


def test_retention_is_of_each_partition(store: cues.Store) -> None:
    queue = store.queue("orders", partitions=2, key="user", retention=10)
    appender = queue.appender()
    for message in keyed(200, keys=40):
        appender.write(message)
    for number in range(2):
        assert 10 <= len(queue.partition(number)) <= 11
    store.queue("orders", retention=5)
    for message in keyed(200, keys=40):
        appender.write(message)
    assert 10 <= len(queue) <= 12


def test_read_retention_waits_for_the_slowest_of_each_partition(store: cues.Store) -> None:
    queue = store.queue("orders", partitions=2, key="user", retention="read")
    appender = queue.appender()
    for message in keyed(40):
        appender.write(message)
    tailer = queue.tailer("reader")
    assert len(tailer.read_many(20)) == 20
    at = tailer.positions
    for message in keyed(40):
        appender.write(message)
    for number in range(2):
        assert queue.partition(number).first_index == at[number]
    assert len(tailer.read_many(100)) == 60


# --- growing ----------------------------------------------------------------------------------------


def test_growing_is_asked_for_by_name_and_shrinking_is_refused(store: cues.Store) -> None:
    queue = store.queue("orders", partitions=2, key="user")
    queue.appender().write_many(keyed(50))
    before = by_partition(queue)
    with pytest.raises(QueueOptionsError, match="grow") as caught:
        store.queue("orders", partitions=4)
    assert caught.value.option == "partitions"
    for fewer in (1, lambda: queue.grow(1)):
        with pytest.raises(QueueOptionsError, match="cannot have fewer"):
            fewer() if callable(fewer) else store.queue("orders", partitions=fewer)
    other = cues.open(store.path)
    elsewhere = other.queue("orders").appender()
    elsewhere.write({"user": "user-1", "n": 50})
    queue.grow(16)
    assert queue.partitions == 16
    assert by_partition(queue)[:2] == [
        [*before[i], 50] if partition_for("user-1", 2) == i else before[i] for i in range(2)
    ]
    # Whoever has an appender already places by the new count with its next message.
    place = elsewhere.write({"user": "user-1", "n": 51})
    assert isinstance(place, PartitionIndex)
    assert place.partition == partition_for("user-1", 16)
    with store.core.view() as txn:
        identities = {read_row(txn, "orders", i).identity for i in range(16)}
    assert len(identities) == 1
    queue.grow(16)
    assert store.queue("orders", partitions=16).partitions == 16
    other.close()


def test_a_queue_that_was_made_with_one_partition_grows(store: cues.Store) -> None:
    queue = store.queue("orders")
    appender = queue.appender()
    assert appender.write({"user": "user-1", "n": 0}) == 1
    named = queue.tailer("reader")
    assert named.read() is not None
    store.queue("orders", key="user").grow(4)
    for message in keyed(20):
        appender.write(message)
    assert len(queue) == 21
    assert [partition_for(m["user"], 4) for m in queue.partition(2).tailer()] == [2] * len(queue.partition(2))
    rest = store.queue("orders").tailer("reader").read_many(100)
    assert sorted(m["n"] for m in rest) == list(range(20))


@pytest.mark.parametrize("durability", ["disk", "process"])
def test_a_death_while_growing_leaves_the_queue_as_it_was(tmp_path: Path, durability: str) -> None:
    with cues.open(tmp_path / "s", durability=durability) as store:
        queue = store.queue("orders", partitions=2, key="user")
        with failing("grow.inside"):
            queue.grow(4)
        assert queue.partitions == 2
        queue.appender().write_many(keyed(20))
        queue.grow(4)
        assert len(queue) == 20


def test_a_merged_tailer_reads_partitions_that_come_while_it_waits(store: cues.Store) -> None:
    queue = store.queue("orders", partitions=2, partitioner="round-robin")
    tailer = queue.tailer("reader")
    appender = queue.appender()
    appender.write_many([{"n": n} for n in range(4)])
    assert [m["n"] for m in tailer.read_many(10)] == [0, 2, 1, 3]
    store.queue("orders").grow(3)
    for n in range(4, 10):
        appender.write({"n": n})
    assert [m["n"] for m in tailer.read_many(10)] == list(range(4, 10))
    assert set(tailer.positions) == {0, 1, 2}
    assert store.queue("orders").tailer("reader").positions == tailer.positions


# --- reading as one ---------------------------------------------------------------------------------


class Oracle:
    """The expected messages of a merged tailer: those of all partitions, sorted by (append time, partition, index)."""

    def __init__(self, queue: cues.Queue) -> None:
        self.queue = queue

    def messages(self) -> list[tuple[int, int, int, int]]:
        """(time, partition, index, n)."""
        found = []
        for number in range(self.queue.partitions):
            tailer = self.queue.partition(number).tailer()
            for message in tailer:
                envelope = tailer.envelope
                assert envelope is not None
                found.append((clock.to_ns(envelope.time), number, envelope.index, message["n"]))
        return sorted(found)

    def after(self, positions: dict[int, int]) -> list[int]:
        return [n for _, partition, index, n in self.messages() if index >= positions[partition]]

    def before(self, positions: dict[int, int]) -> list[int]:
        return [n for _, partition, index, n in reversed(self.messages()) if index < positions[partition]]


@pytest.mark.parametrize("name", [None, "reader"])
def test_a_merged_tailer_reads_what_a_simple_oracle_says(tmp_path: Path, name: str | None) -> None:
    compare_with_oracle(tmp_path, name, 5)


@pytest.mark.long
@pytest.mark.parametrize("name", [None, "reader"])
def test_a_merged_tailer_reads_what_a_simple_oracle_says_for_long(tmp_path: Path, name: str | None) -> None:
    compare_with_oracle(tmp_path, name, 200)


def compare_with_oracle(tmp_path: Path, name: str | None, rounds: int) -> None:
    """Random appends, to one partition or over all; reads of any size, both ways; seeks, purges, and new handles."""
    seed = seeds.new()
    rng = random.Random(seed)
    for round in range(rounds):
        with cues.open(tmp_path / f"s{round}", durability="process") as store:
            queue = store.queue("q", partitions=rng.randint(2, 5), partitioner=rng.choice(["round-robin", "sticky"]))
            appender, oracle, tailer = queue.appender(), Oracle(queue), queue.tailer(name)
            n = 0
            times: list[datetime] = []
            for _ in range(60):
                action = rng.choice(
                    ["append", "append", "append", "one", "read", "read", "peek", "back", "seek", "other"]
                )
                if action == "append":
                    count = rng.choice([1, 1, 2, 7, 100])
                    appender.write_many([{"n": n + i} for i in range(count)])
                    n += count
                elif action == "one":
                    queue.partition(rng.randrange(queue.partitions)).appender().write({"n": n})
                    n += 1
                elif action == "read":
                    expected = oracle.after(tailer.positions)
                    count = rng.choice([1, 3, 50, 1000])
                    found = [m["n"] for m in tailer.read_many(count)]
                    assert found == expected[:count]
                    if found:
                        assert tailer.envelope is not None
                        times.append(tailer.envelope.time)
                        assert tailer.last_read_index == tailer.envelope.index
                elif action == "peek":
                    message = tailer.peek()
                    assert (message and message["n"]) == next(iter(oracle.after(tailer.positions)), None)
                elif action == "back":
                    expected = oracle.before(tailer.positions)
                    count = rng.choice([1, 3, 50])
                    tailer.direction = "backward"
                    assert [m["n"] for m in tailer.read_many(count)] == expected[:count]
                    tailer.direction = "forward"
                elif action == "seek":
                    where = rng.choice(["start", "end", "index", "time", "purge"])
                    if where == "start":
                        tailer.to_start()
                        assert oracle.after(tailer.positions) == [m[3] for m in oracle.messages()]
                    elif where == "end":
                        tailer.to_end()
                        assert oracle.after(tailer.positions) == []
                    elif where == "index":
                        number = rng.randrange(queue.partitions)
                        row = queue.partition(number).core.row()
                        goal = rng.randint(row.first, row.next)
                        tailer.to_index({number: goal})
                        assert tailer.positions[number] == goal
                    elif where == "time" and times:
                        when = rng.choice(times)
                        tailer.to_time(when)
                        ns = clock.to_ns(when)
                        assert oracle.after(tailer.positions) == [m[3] for m in oracle.messages() if m[0] >= ns]
                    elif where == "purge" and times:
                        queue.purge(before=rng.choice(times))
                elif action == "other" and name:
                    positions = tailer.positions
                    tailer = queue.tailer(name)
                    firsts = [row.first for row in queue.core.rows()]
                    for number, index in tailer.positions.items():
                        assert max(index, firsts[number]) == max(positions[number], firsts[number])
            tailer.to_start()
            assert [m["n"] for m in tailer] == [m[3] for m in oracle.messages()]


def test_two_readers_of_one_name_share_the_queue(store: cues.Store) -> None:
    queue = store.queue("q", partitions=3, partitioner="round-robin")
    for n in range(60):
        queue.appender().write({"n": n})
    readers = [queue.tailer("shared"), queue.tailer("shared")]
    found: list[int] = []
    turn = 0
    while batch := readers[turn % 2].read_many(1 + turn % 4):
        found += [m["n"] for m in batch]
        turn += 1
    assert sorted(found) == list(range(60))
    # The position is that of the name on each partition.
    assert [queue.partition(i).tailer("shared").index for i in range(3)] == list(readers[0].positions.values())


def test_a_merged_tailer_waits_for_any_partition(store: cues.Store) -> None:
    queue = store.queue("q", partitions=3)
    tailer = queue.tailer()
    assert tailer.read(block=True, timeout=0.01) is None
    queue.partition(2).appender().write({"n": 1})
    assert tailer.read(block=True, timeout=60) == {"n": 1}
    other = store.queue("other")
    other.appender().write({"n": 2})
    found = cues.alts([tailer, other.tailer()], timeout=60)
    assert found is not None
    assert found[1] == {"n": 2}
    with pytest.raises(InvalidArgument, match="positions"):
        tailer.index  # noqa: B018
    with pytest.raises(InvalidArgument, match="partition"):
        tailer.to_index(3)


def test_writers_in_threads_a_growing_queue_and_a_reader_that_follows(store: cues.Store) -> None:
    """Each message once; those of a writer, which appends one after another, in its order, on whatever partitions."""
    queue = store.queue("q", partitions=2, partitioner="round-robin")
    count, writers = 400, 4
    grown = threading.Barrier(writers + 1)

    def write(writer: int) -> None:
        appender = store.queue("q").appender()
        for n in range(count):
            if n == count // 2:
                grown.wait(30)
            appender.write({"writer": writer, "n": n})

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    tailer = queue.tailer("reader")
    found: list[dict[str, Any]] = []
    while len(found) < count * writers:
        if len(found) == count * writers // 2:
            queue.grow(7)
            grown.wait(30)
        message = tailer.read(block=True, timeout=30)
        assert message is not None
        found.append(message)
    for thread in threads:
        thread.join()
    for writer in range(writers):
        assert [m["n"] for m in found if m["writer"] == writer] == list(range(count))
    assert all(len(view) for view in views_of(queue))


def test_partitions_are_there_after_reopening_and_check_walks_them(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s") as store:
        store.queue("q", partitions=5, key="user").appender().write_many(keyed(100))
        store.queue("q").tailer("reader").read_many(7)
    with cues.open(tmp_path / "s") as store:
        assert store.check() == []
        assert len(store.queue("q")) == 100
        assert len(store.queue("q").tailer("reader").read_many(1000)) == 93
        queue = store.queue("q")
        full = next(i for i in range(1, 5) if len(queue.partition(i)))
        log = queue.partition(full).core.log

        def damage(txn: Any) -> None:
            row = log.row(txn)
            log.move_front(txn, row, row.next)  # it says that it is empty now
            raw = txn.get(log.key)
            txn.put(log.key, raw[:-1] + bytes([raw[-1] ^ 1]))

        with store.core.view() as txn:
            good = bytes(txn.get(log.key))
        store.core.commit(damage)
        assert any(f"q/{full} " in problem for problem in store.check())

        def mend(txn: Any) -> None:
            txn.put(log.key, good)

        store.core.commit(mend)
