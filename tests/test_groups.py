"""Members of consumer groups: who reads what, hand-over, death, names, positions, seeks, pauses, callbacks.

Members of one test live in one process, and every one is told to look at its group by a poll, so nothing waits for a
clock but where a lease has to run out.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import seeds
import terminal
import xxhash
from children import Child
from small import until

import cues
from cues import faults, groups, testing
from cues.base import clock, names
from cues.errors import (
    AlreadyRunning,
    Closed,
    ConcurrentUse,
    Fenced,
    InvalidArgument,
    InvalidName,
    QueueNotFound,
    StoreReadOnly,
)
from cues.groups import TRY_ABORT, TRY_COMMIT, Member, Relative, claims, forget, holdings, list_groups
from cues.groups.sticky import Partition
from cues.groups.table import GroupTable
from cues.queues.committed import Isolation
from cues.queues.store import Store
from cues.tools.compaction import compact
from cues.txn import Publisher

PARTITIONS = 6
DEADLINE_S = 30
LEASE_S = 0.3
"""Of members that are to lose it."""
KEPT_S = 10.0
"""Of members that are to keep it on a busy machine, in a test that moves the clock."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("orders", partitions=PARTITIONS, key="n", partitioner=by_number)
        yield store


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Move the clock of leases, which continues from there. Members look at their group at every call."""
    real, moved_ns = clock.monotonic_ns, [0]

    def move(seconds: float) -> None:
        moved_ns[0] += round(seconds * 1e9)

    monkeypatch.setattr(clock, "monotonic_ns", lambda: real() + moved_ns[0])
    monkeypatch.setattr(holdings, "CHECK_NS", 0)
    monkeypatch.setattr(holdings, "LOOK_NS", 0)
    return move


def by_number(message: dict[str, Any], partitions: int) -> int:
    return int(message["n"]) % partitions


def fill(store: Store, count: int, start: int = 0) -> None:
    queue = store.queue("orders", partitioner=by_number)
    queue.appender().write_many([{"n": n} for n in range(start, start + count)])


class Diary:
    """The callbacks of a member."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, list[Partition]]] = []

    def of(self, what: str) -> Callable[[list[Partition]], None]:
        return lambda partitions: self.entries.append((what, partitions))

    @property
    def callbacks(self) -> dict[str, Any]:
        return {f"on_{what}": self.of(what) for what in ("assigned", "revoked", "lost")}

    def told(self, what: str) -> set[Partition]:
        return {partition for word, partitions in self.entries for partition in partitions if word == what}


def held(*members: Member) -> list[list[int]]:
    """The numbers of the partitions that each member holds."""
    return [[number for _, number in member.assigned] for member in members]


def settle(*members: Member) -> None:
    """Let members look at their group until all partitions are held by one of them."""

    def settled() -> bool:
        for member in members:
            member.holdings.stale()
            for messages in member.poll(n=1).values():
                assert not messages, "settle() is for members that have read everything"
        partitions = [partition for member in members for partition in member.assigned]
        return len(partitions) == len(set(partitions)) == len(members[0].lag())

    until(settled)


# --- sharing ------------------------------------------------------------------------------------------


def test_one_member_reads_everything_in_the_order_of_each_partition(store: Store) -> None:
    fill(store, 60)
    with Member(store, "orders", "g") as member:
        found: dict[Partition, list[int]] = {}
        while message := member.read():
            assert member.partition is not None and member.envelope is not None
            assert member.envelope.partition == member.partition[1]
            found.setdefault(member.partition, []).append(message["n"])
        assert found == {("orders", p): list(range(p, 60, PARTITIONS)) for p in range(PARTITIONS)}


def test_members_share_the_partitions_and_each_message_goes_to_one(store: Store) -> None:
    with Member(store, "orders", "g") as a, Member(store, "orders", "g") as b:
        settle(a, b)
        assert sorted(map(len, held(a, b))) == [3, 3]
        fill(store, 60)
        mine = [message["n"] for message in a.read_many(100)]
        yours = [message["n"] for message in b.read_many(100)]
        assert sorted(mine + yours) == list(range(60))
        assert {n % PARTITIONS for n in mine} == set(held(a)[0])


def test_groups_do_not_know_of_each_other(store: Store) -> None:
    fill(store, 10)
    with Member(store, "orders", "g") as a, Member(store, "orders", "other") as b:
        assert len(a.read_many(100)) == len(b.read_many(100)) == 10


def test_partitions_take_turns(store: Store) -> None:
    """A partition with much to read does not keep the others waiting."""
    fill(store, 600)
    with Member(store, "orders", "g") as member:
        seen = [(member.read(), member.partition)[1] for _ in range(PARTITIONS)]
        assert len(set(seen)) == PARTITIONS


def test_poll_gives_messages_by_partition(store: Store) -> None:
    fill(store, 12)
    with Member(store, "orders", "g") as member:
        found = member.poll(n=100)
        assert found == {("orders", p): [{"n": p}, {"n": p + PARTITIONS}] for p in range(PARTITIONS)}
        assert member.poll() == {}


def test_a_member_without_partitions_is_a_member(store: Store) -> None:
    store.queue("single")
    with Member(store, "single", "g") as a, Member(store, "single", "g") as b:
        settle(a, b)
        store.queue("single").appender().write({"x": 1})
        assert [b.read(), a.read()].count({"x": 1}) == 1
        assert len(a.table.look().members) == 2


def test_several_queues_are_balanced_together(store: Store) -> None:
    for queue in ("x", "y", "z"):
        store.queue(queue)
    members = [Member(store, ["x", "y", "z"], "g") for _ in range(3)]
    settle(*members)
    assert [len(member.assigned) for member in members] == [1, 1, 1]
    for member in members:
        member.close()


# --- the hand-over --------------------------------------------------------------------------------------


def test_only_partitions_that_move_are_given_up(store: Store) -> None:
    """a keeps half of its partitions through b's coming and going, and is told of the others only."""
    diary = Diary()
    with Member(store, "orders", "g", **diary.callbacks) as a:
        settle(a)
        with Member(store, "orders", "g") as b:
            settle(a, b)
            assert diary.told("revoked") == set(b.assigned)
            kept = set(a.assigned)
        settle(a)
        assert [word for word, _ in diary.entries] == ["assigned", "revoked", "assigned"]
        assert diary.told("revoked").isdisjoint(kept)
        assert diary.told("lost") == set()


def test_no_member_reads_a_partition_before_it_is_released(store: Store) -> None:
    """A message that a has and has not committed stays with a, although the plan gives it to b, until the commit."""
    fill(store, 60)
    with Member(store, "orders", "g") as a:
        assert len(a.read_many(60)) == 60
        with Member(store, "orders", "g") as b:
            for _ in range(3):
                b.holdings.stale()
                assert b.read() is None
                a.holdings.stale()
                assert a.read() is None
                assert held(a, b) == [[0, 1, 2, 3, 4, 5], []]
            a.commit()
            settle(a, b)
            assert sorted(map(len, held(a, b))) == [3, 3]
            assert sum(a.lag().values()) == 0


def test_a_claim_of_what_another_member_holds_is_refused_in_its_transaction(store: Store) -> None:
    """A member looks, another one claims, and then the first one claims what it saw as free."""
    fill(store, PARTITIONS)
    with Member(store, "orders", "g", name="a") as first:
        first.poll(n=1)
        with Member(store, "orders", "g", name="b") as second:
            second.poll(n=1, timeout=0)
            table, id = second.table, second.holdings.id
            with store.core.view() as txn:
                rows = {partition: claims.read(txn, names.log_id(*partition), "g") for partition in first.assigned}
            given = [partition for partition, claim in rows.items() if claim is not None and claim.assignee == "b"]
            logs = {partition: store.queue("orders").partition(partition[1]).core.log for partition in given}
            assert given and table.claim("b", id, logs) == {}
            table.release(first.holdings.id, given)
            assert sorted(table.claim("b", id, logs)) == given


@pytest.mark.interpreted
def test_a_plan_is_not_written_when_a_member_has_joined_since(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the group would take the plan for one of all its members, and the new one would never get a partition."""
    fill(store, PARTITIONS)
    with Member(store, "orders", "g", name="a") as first:
        real, joined = store.core.commit, []

        def commit(work: Any, *arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(store.core, "commit", real)
            joined.append(Member(store, "orders", "g", name="b"))
            return real(work, *arguments, **options)

        monkeypatch.setattr(store.core, "commit", commit)
        assert not first.table.settle()
        row = first.table.look().row
        assert row.planned != row.generation
        joined[0].close()


def test_a_partition_on_its_way_is_not_read_any_further(store: Store) -> None:
    fill(store, 600)
    with Member(store, "orders", "g") as a:
        for _ in range(PARTITIONS):
            a.read()  # one of each
        with Member(store, "orders", "g") as b:
            b.read()
            stays = {
                partition for partition, claim in a.table.look(["orders"]).claims.items() if claim.assignee == a.name
            }
            assert len(stays) == 3
            a.holdings.stale()
            assert set(a.poll(n=600)) == stays
            assert len(a.assigned) == PARTITIONS


def test_on_revoked_may_commit_what_was_handed_out(store: Store, later: Callable[[float], None]) -> None:
    """A member that never commits by itself, but when asked; nothing is read twice. It is asked after its lease."""
    fill(store, 60)
    a = Member(store, "orders", "g", lease_s=KEPT_S, on_revoked=lambda _: a.commit())
    with a:
        first = [message["n"] for message in a.read_many(60)]
        assert len(first) == 60
        with Member(store, "orders", "g") as b:

            def handed_over() -> bool:
                assert a.read() is None
                assert b.read() is None
                later(KEPT_S / 4)
                return sorted(map(len, held(a, b))) == [3, 3]

            until(handed_over)


def test_what_was_not_committed_when_it_was_given_up_comes_again(store: Store, later: Callable[[float], None]) -> None:
    """The patience with a member that does not commit ends with its lease."""
    fill(store, 6)
    with Member(store, "orders", "g", lease_s=KEPT_S) as a:
        assert len(a.read_many(10)) == 6
        with Member(store, "orders", "g") as b:
            found: list[int] = []

            def handed_over() -> bool:
                a.read()
                found.extend(message["n"] for message in b.read_many(10))
                later(KEPT_S / 4)
                return len(found) == 3

            until(handed_over)
            a.commit()  # what it still holds
            assert sum(a.lag().values()) == 3
            b.commit()
            assert sum(a.lag().values()) == 0


# --- errors on the way ------------------------------------------------------------------------------------


def fail_at(point: str, number: int) -> None:
    """Raise, once, where a transaction passes this point for the number-th time."""

    def fail(_: str) -> None:
        faults.disarm()
        raise Broken

    faults.arm(point, number, fail)


class Broken(Exception):
    """Raised where a member changes its group."""


@pytest.mark.parametrize("point", ["group.inside", "group.after"])
def test_a_partition_is_released_by_the_next_call_where_the_release_failed(store: Store, point: str) -> None:
    """With its transaction made (after) or not (inside), the callback is called once."""
    diary = Diary()
    with Member(store, "orders", "g", lease_s=3600, **diary.callbacks) as a:
        settle(a)
        with Member(store, "orders", "g", lease_s=3600) as b:
            b.poll()  # which plans; b waits for three partitions
            fail_at(point, 1)
            a.holdings.stale()
            with pytest.raises(Broken):
                a.poll()
            settle(a, b)
            assert sorted(map(len, held(a, b))) == [3, 3]
            assert [word for word, _ in diary.entries] == ["assigned", "revoked"]
            assert diary.told("revoked") == set(b.assigned)


@pytest.mark.parametrize("point", ["group.inside", "group.after"])
def test_partitions_are_read_where_an_exception_came_out_of_their_claim(store: Store, point: str) -> None:
    diary = Diary()
    fill(store, 12)
    with Member(store, "orders", "g", lease_s=3600, **diary.callbacks) as member:
        fail_at(point, 2)  # the plan is the first
        with pytest.raises(Broken):
            member.poll()
        member.holdings.stale()
        assert len(member.read_many(100)) == 12
        assert diary.entries == [("assigned", member.assigned)]


def test_a_seek_does_not_keep_a_partition_from_being_released(store: Store) -> None:
    """Another member seeks between the look at the table and the release, which changes the epoch and no owner."""
    with Member(store, "orders", "g", lease_s=3600) as b:

        def seek(partitions: list[Partition]) -> None:
            b.seek("end", *partitions)

        with Member(store, "orders", "g", lease_s=3600, on_revoked=seek) as a:
            settle(a, b)
            claims = a.table.look().claims.values()
            a.close()
            assert not [claim for claim in claims if claim.owner not in (a.holdings.id, b.holdings.id)]
            assert a.holdings.id not in {claim.owner for claim in a.table.look().claims.values()}


def test_a_callback_that_raises_is_called_again(store: Store) -> None:
    calls: list[list[Partition]] = []

    def assigned(partitions: list[Partition]) -> None:
        calls.append(partitions)
        if len(calls) == 1:
            raise Broken

    with Member(store, "orders", "g", on_assigned=assigned) as member:
        with pytest.raises(Broken):
            member.poll()
        member.holdings.stale()
        member.poll()
        assert calls == [member.assigned, member.assigned]


# --- where a group begins -----------------------------------------------------------------------------------


def test_latest_begins_after_what_is_there_when_the_first_member_is_made(store: Store) -> None:
    """And nowhere else later: a rebalance, a restart, partitions that are new lose nothing."""
    fill(store, 60)
    with Member(store, "orders", "g", start="latest") as a:
        assert sum(a.lag().values()) == 0
        fill(store, 60, start=60)  # before a has planned anything
        found = [message["n"] for message in a.read_many(20)]
        a.commit()
        with Member(store, "orders", "g", start="latest") as b:
            b.poll(n=1)
            store.queue("orders", partitioner=by_number).grow(PARTITIONS + 2)
            fill(store, 40, start=120)

            def all_read() -> bool:
                for member in (a, b):
                    member.holdings.stale()
                    found.extend(message["n"] for message in member.read_many(7))
                    member.commit()
                return sum(a.lag().values()) == 0

            until(all_read)
    assert sorted(set(found)) == list(range(60, 160))
    with Member(store, "orders", "g", start="latest") as c:
        fill(store, 5, start=160)
        assert sorted(message["n"] for message in c.read_many(9)) == list(range(160, 165))


def test_latest_is_of_a_queue_that_the_group_has_never_read(store: Store) -> None:
    store.queue("more").appender().write({"n": 1})
    fill(store, 6)
    with Member(store, "orders", "g"):  # it reads nothing, but the group has begun
        pass
    with Member(store, ["orders", "more"], "g", start="latest") as member:
        assert sorted(message["n"] for message in member.read_many(10)) == list(range(6))
        assert member.lag()["more", 0] == 0


@pytest.mark.parametrize(
    ("start", "unread"), [(5, 6), (Relative(-3), 3), (Relative(2), 8), (Relative(-99), 10), (Relative(99), 0)]
)
def test_a_new_group_begins_at_an_index_or_a_distance(store: Store, start: Any, unread: int) -> None:
    """On each partition. A partition that comes later is read from its start, and so is all for a group that is."""
    queue = store.queue("orders", partitioner=by_number)
    fill(store, PARTITIONS * 10)
    with Member(store, "orders", "g", start=start) as member:
        assert set(member.lag().values()) == {unread}
        queue.grow(PARTITIONS + 1)
        queue.partition(PARTITIONS).appender().write_many([{"n": n} for n in range(4)])
        found = member.read_many(1000)
        assert len(found) == PARTITIONS * unread + 4
        assert member.lag()["orders", PARTITIONS] == 4
    with Member(store, "orders", "g", start="latest") as member:
        assert len(member.read_many(1000)) == len(found)


def test_a_new_group_begins_at_a_time(store: Store) -> None:
    fill(store, 12)
    times = []
    for number in range(PARTITIONS):
        tailer = store.queue("orders").partition(number).tailer()
        tailer.read_many(2)
        assert tailer.envelope is not None
        times.append(tailer.envelope.time)
    when = max(times) + timedelta(microseconds=1)
    until(lambda: datetime.now(UTC) > when)
    fill(store, 18, start=12)
    with Member(store, "orders", "g", start=when) as member:
        assert sorted(message["n"] for message in member.read_many(100)) == list(range(12, 30))


def test_start_is_checked(store: Store) -> None:
    for wrong in ("end", 0, True, 1.5, datetime(2026, 1, 31), ["latest"], None):
        with pytest.raises(InvalidArgument, match="'earliest' or 'latest'"):
            Member(store, "orders", "g", start=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="not a distance"):
        Relative(1.5)  # type: ignore[arg-type]
    fill(store, 6)
    with pytest.raises(InvalidArgument, match="ends before 2"):
        Member(store, "orders", "g", start=3)
    assert list_groups(store) == []  # a refused start makes no group
    with pytest.raises(InvalidArgument, match="max_poll_interval_s"):
        Member(store, "orders", "g", max_poll_interval_s=0)


# --- a step that never ends -----------------------------------------------------------------------------------


def test_keepalive_does_not_renew_the_lease_of_a_member_that_does_not_poll(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its user's function hangs, and a thread of the user's says for ever that it lives. The clock is the test's."""
    now = [clock.monotonic_ns()]
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now[0])
    # A member looks at its group only every 2 ms of real time: this test is faster than that.
    monkeypatch.setattr(holdings, "CHECK_NS", 0)
    monkeypatch.setattr(holdings, "LOOK_NS", 0)
    fill(store, 6)
    with Member(store, "orders", "g", lease_s=10, max_poll_interval_s=60) as hangs:
        assert len(hangs.read_many(10)) == 6
        with Member(store, "orders", "g", lease_s=10) as member:
            for _ in range(12):  # a minute
                now[0] += 5_000_000_000
                hangs.keepalive()
                assert member.poll() == {}
            assert not caplog.records
            for _ in range(3):
                now[0] += 5_000_000_000
                hangs.keepalive()
            assert ["has not polled for 60 s" in record.getMessage() for record in caplog.records] == [True]
            assert len(member.read_many(10)) == 6  # taken over
            member.commit()
            assert hangs.poll() == {}  # it is a member again, without what it lost
            hangs.commit()
            assert sum(member.lag().values()) == 0


# --- a part of what was polled -----------------------------------------------------------------------------


def test_a_part_of_what_was_polled_is_committed(store: Store) -> None:
    """The member goes on where it is; the next one reads what was not committed again."""
    fill(store, PARTITIONS * 10)
    with Member(store, "orders", "g") as member:
        polled = member.poll(n=1000)
        assert member.indices == {partition: list(range(1, 11)) for partition in polled}
        member.commit(upto={("orders", 0): 4, ("orders", 1): 10}, checkpoint=b"here")
        assert member.positions() == {("orders", n): {0: 5, 1: 11}.get(n, 1) for n in range(PARTITIONS)}
        assert [member.checkpoints()["orders", n] for n in range(3)] == [b"here", b"here", b""]
        member.commit(upto={("orders", 0): 2})  # is done already
        member.commit(upto={})
        assert member.positions()["orders", 0] == 5
        assert member.poll(n=1000) == {} == member.indices
        member.commit(upto={("orders", 0): 5}, checkpoint={("orders", 2): b"there"})
        assert (member.positions()["orders", 0], member.checkpoints()["orders", 2]) == (6, b"there")
    with Member(store, "orders", "g") as member:
        again = member.poll(n=1000)
        assert again == {p: found[5:] if p[1] == 0 else found for p, found in polled.items() if p[1] != 1}
        member.commit()
        assert sum(member.lag().values()) == 0


def test_the_indices_of_messages_have_the_gaps_of_acknowledgements(store: Store) -> None:
    queue = store.queue("q")
    with Publisher() as publisher:
        for n in range(4):
            publisher.publish_uncommitted(lambda message: queue, {"n": n})
            publisher.append_ack_intents(publisher.build_ack_intents())
    queue.appender().write_many([{"n": 4}, {"n": 5}])
    with Member(store, "q", "g") as member:
        assert [message["n"] for message in member.read_many(5)] == [0, 1, 2, 3, 4]
        assert member.indices == {("q", 0): [1, 3, 5, 7, 9]}
        member.commit(upto={("q", 0): member.indices["q", 0][2]})
        assert member.read() == {"n": 5} and member.indices == {("q", 0): [10]}
    with Member(store, "q", "g") as member:
        assert [message["n"] for message in member.read_many(9)] == [3, 4, 5]


def test_only_what_was_handed_out_can_be_committed(store: Store) -> None:
    fill(store, PARTITIONS * 10)
    with Member(store, "orders", "g") as member:
        member.poll(n=1)
        (read,) = member.indices
        other = next(p for p in member.assigned if p != read)
        for upto, words in (
            ({read: 2}, "messages up to 1 were handed out"),
            ({read: 1, other: 1}, "messages up to 0 were handed out"),
            ({read: 0}, "up to 1 were"),
            ({read: "1"}, "up to 1 were"),
            ({("orders", 99): 1}, "no partition 99"),
            ({("rates", 0): 1}, "does not read 'rates'"),
            ({"orders": 1}, "upto is"),
            (7, "upto is"),
        ):
            with pytest.raises(InvalidArgument, match=words):
                member.commit(upto=upto)  # type: ignore[arg-type]
        assert set(member.positions().values()) == {1}


def test_a_part_is_fenced_as_the_whole_is(store: Store) -> None:
    """Of three partitions one was moved by a seek to where it is, and one is another member's; one is committed."""
    fill(store, PARTITIONS * 10)
    with Member(store, "orders", "g", name="a", lease_s=KEPT_S) as member:
        member.poll(n=1000)
        groups.seek(store, "g", "start", ("orders", 1))
        member.table.release(member.holdings.id, [("orders", 2)])
        with pytest.raises(Fenced) as failed:
            member.commit(upto={("orders", n): 5 for n in range(3)})
        assert failed.value.partitions == [("orders", 1), ("orders", 2)]
        assert [member.positions()["orders", n] for n in range(3)] == [6, 1, 1]
        member.poll(n=1000)
        member.holdings.held.pop(("orders", 3))  # as after a look at the group in which it was lost
        with pytest.raises(Fenced) as failed:
            member.commit(upto={("orders", 3): 5})
        assert failed.value.partitions == [("orders", 3)]


PART = """
import sys, cues
from cues.groups import Member
with cues.open(sys.argv[1]) as store, Member(store, "orders", "g") as member:
    member.poll(n=1000)
    cues.faults.arm(sys.argv[2])
    member.commit(upto={("orders", 0): 4, ("orders", 1): 5})
"""


@pytest.mark.parametrize(("point", "made"), [("group.inside", False), ("group.after", True)])
def test_death_in_the_commit_of_a_part(store: Store, point: str, made: bool) -> None:
    fill(store, PARTITIONS * 10)
    with Child(PART, store.path, point) as child:
        assert child.returncode() == -signal.SIGKILL
    with Member(store, "orders", "g") as member:
        assert [member.positions()["orders", n] for n in range(3)] == ([5, 6, 1] if made else [1, 1, 1])
        assert sum(map(len, member.poll(n=1000).values())) == PARTITIONS * 10 - (9 if made else 0)


# --- what is left of a group -----------------------------------------------------------------------------------


def test_a_group_that_is_used_no_more_can_be_forgotten(tmp_path: Path) -> None:
    """Until then retention waits for it."""
    with cues.open(tmp_path / "store", durability="process") as store:
        queue = store.queue("q", retention="read")
        with Member(store, "q", "mistyped") as member:
            with pytest.raises(AlreadyRunning, match="has a living member"):
                forget(store, "mistyped")
            member.poll()
        with Member(store, "q", "g", name="x") as member:
            for _ in range(20):
                queue.appender().write_many([{"n": n} for n in range(50)])
                assert len(member.read_many(50)) == 50
                member.commit()
            assert len(queue) == 1000
            forget(store, "mistyped")
            for n in range(100):
                queue.appender().write({"n": n})
            assert len(queue) < 150
            assert [group.group for group in list_groups(store)] == ["g"]
        with pytest.raises(InvalidArgument, match="no group 'mistyped'"):
            forget(store, "mistyped")


# --- lag -----------------------------------------------------------------------------------------------------


def test_acknowledgements_after_the_last_message_are_not_lag(store: Store) -> None:
    """The rest can never be read; messages before an acknowledgement still count."""
    queue = store.queue("q")
    with Publisher() as publisher:
        for n in range(3):
            publisher.publish_uncommitted(lambda message: queue, {"n": n})
            publisher.append_ack_intents(publisher.build_ack_intents())
    assert (queue.first_index, queue.last_index) == (1, 6)
    with Member(store, "q", "g") as member:
        assert sum(member.lag().values()) == 5  # the last record is an acknowledgement
        assert len(member.read_many(10)) == 3
        member.commit()
        assert member.lag() == {("q", 0): 0}
        assert [partition.lag for group in list_groups(store) for partition in group.partitions] == [0]


# --- death ----------------------------------------------------------------------------------------------

DIES = """
import sys, cues
from cues.groups import Member
store = cues.open(sys.argv[1])
member = Member(store, "orders", "g", name=sys.argv[2] or None, lease_s=float(sys.argv[3]))
print(len(member.read_many(100)), flush=True)
sys.stdin.readline()
print(member.read() is not None, member.assigned, flush=True)
try:
    member.commit()
    print("committed", flush=True)
except cues.Fenced as error:
    print("fenced", error.partitions, flush=True)
sys.stdin.readline()
member.close()
"""


def test_a_killed_member_is_seen_at_once(store: Store) -> None:
    """Its lease would run for another hour."""
    fill(store, 12)
    with Child(DIES, store.path, "", 3600) as child:
        assert child.line() == "12"
        with Member(store, "orders", "g") as member:
            assert member.read() is None
            child.kill()
            found: list[Any] = []
            until(lambda: found.extend(member.read_many(100)) or len(found) == 12)


def test_a_stopped_member_loses_its_partitions_after_its_lease_and_is_fenced(store: Store) -> None:
    """It wakes up with messages in its hands, is told that it lost them, joins anew, and commits nothing."""
    import signal

    fill(store, 12)
    with Child(DIES, store.path, "", LEASE_S) as child:
        assert child.line() == "12"
        child.signal(signal.SIGSTOP)
        with Member(store, "orders", "g") as member:
            found: list[Any] = []
            until(lambda: found.extend(member.read_many(100)) or len(found) == 12)
            member.commit()
            child.signal(signal.SIGCONT)
            child.say()
            assert child.line() == "False []"  # a member again, without partitions until they are given up
            assert child.line() == "committed"  # nothing: what it read was lost with its partitions
            assert sum(member.lag().values()) == 0
            child.say()
            child.end()


def test_a_commit_after_the_takeover_is_fenced(store: Store) -> None:
    """Owner and epoch are another's by the time that the late one commits; the position stays the other's."""
    fill(store, 12)
    with Member(store, "orders", "g", lease_s=LEASE_S) as late:
        assert len(late.read_many(100)) == 12
        with Member(store, "orders", "g") as member:
            found: list[Any] = []
            until(lambda: found.extend(member.read_many(6)) or len(found) >= 6)
            member.commit()
            before = member.positions()
            with pytest.raises(Fenced) as fenced:
                late.commit()
            assert fenced.value.reason == "takeover"
            assert fenced.value.partitions == [("orders", n) for n in range(PARTITIONS)]
            assert "are read again" in str(fenced.value)
            assert member.positions() == before


def test_on_lost_is_told_and_the_member_joins_anew(store: Store) -> None:
    diary = Diary()
    with Member(store, "orders", "g", lease_s=LEASE_S, **diary.callbacks) as late:
        settle(late)
        with Member(store, "orders", "g") as member:
            until(lambda: member.read() or len(member.assigned) == PARTITIONS)
            settle(late, member)
        assert diary.told("lost") == {("orders", n) for n in range(PARTITIONS)}
        assert [word for word, _ in diary.entries][:2] == ["assigned", "lost"]
        assert diary.told("revoked") == set()


def test_keepalive_keeps_the_lease(store: Store, later: Callable[[float], None]) -> None:
    """Work that takes longer than the lease, and says so; nothing is lost."""
    fill(store, 6)
    with Member(store, "orders", "g", lease_s=KEPT_S) as a:
        assert len(a.read_many(100)) == 6
        with Member(store, "orders", "g") as b:
            for _ in range(6):
                later(KEPT_S / 4)
                a.keepalive()
                assert b.read() is None
        a.commit()


def test_a_closed_store_lets_go_of_its_members(tmp_path: Path) -> None:
    """A store that is closed before its member leaves no lock behind, in this process either."""
    path = tmp_path / "store"
    with cues.open(path) as outer:
        outer.queue("q")
        inner = cues.open(path)
        member = Member(inner, "q", "g", name="a", lease_s=3600)
        member.read()
        inner.close()
        with pytest.raises(Closed):
            member.read()
        member.close()
        with Member(outer, "q", "g", name="a") as again:
            settle(again)


# --- names ------------------------------------------------------------------------------------------------


def test_a_name_that_comes_back_finds_its_partitions_and_causes_no_rebalance(store: Store) -> None:
    """Closed and opened again while another member looks on: no new generation, no callback."""
    diary = Diary()
    with Member(store, "orders", "g", name="b", **diary.callbacks) as b:
        a = Member(store, "orders", "g", name="a")
        settle(a, b)
        before, generation = a.assigned, a.table.look().row.generation
        diary.entries.clear()
        a.close()
        for _ in range(3):
            b.holdings.stale()
            b.read()
        with Member(store, "orders", "g", name="a") as again:
            settle(again, b)
            assert again.assigned == before
            assert again.table.look().row.generation == generation
        assert diary.entries == []


def test_a_killed_name_finds_its_partitions_again(store: Store) -> None:
    fill(store, 12)
    with Member(store, "orders", "g", name="b", lease_s=3600) as b, Child(DIES, store.path, "a", 3600) as child:
        assert child.line()
        b.read_many(100)
        child.kill()
        with Member(store, "orders", "g", name="a", lease_s=3600) as again:
            until(lambda: again.read_many(100) or b.read_many(100) or len(held(again, b)[0]) == 3)


def test_a_name_that_stays_away_loses_its_place(store: Store, later: Callable[[float], None]) -> None:
    with Member(store, "orders", "g") as b:
        a = Member(store, "orders", "g", name="a", lease_s=KEPT_S)
        settle(a, b)
        a.close()
        assert b.read() is None and len(b.assigned) == 3
        later(KEPT_S)
        until(lambda: b.read() or len(b.assigned) == PARTITIONS)


def test_leave_gives_the_place_up_at_once(store: Store) -> None:
    with Member(store, "orders", "g") as b:
        a = Member(store, "orders", "g", name="a", lease_s=3600)
        settle(a, b)
        a.leave()
        settle(b)


def test_arguments_of_another_type_are_refused(store: Store) -> None:
    wrong: Any = 5
    with pytest.raises(InvalidArgument, match="queues are 5"):
        Member(store, wrong, "g")
    with pytest.raises(InvalidArgument, match="on_assigned=5"):
        Member(store, "orders", "g", on_assigned=wrong)


def test_a_name_is_one_living_member(store: Store) -> None:
    with (
        Member(store, "orders", "g", name="a"),
        pytest.raises(AlreadyRunning, match="in this process") as refused,
    ):
        Member(store, "orders", "g", name="a")
    assert refused.value.pid
    with Child(DIES, store.path, "a", 3600) as child:
        child.line()
        with pytest.raises(AlreadyRunning, match=f"in process {child.pid}"):
            Member(store, "orders", "g", name="a")


def test_a_name_whose_process_is_stopped_past_its_lease_can_be_taken(store: Store) -> None:
    """The stopped one holds the lock of the name for ever. It wakes up, sees the other, and is at its end."""
    import signal

    fill(store, 12)
    with Child(DIES, store.path, "a", LEASE_S) as child:
        child.line()
        child.signal(signal.SIGSTOP)
        taken: list[Member] = []

        def take() -> bool:
            try:
                taken.append(Member(store, "orders", "g", name="a"))
            except AlreadyRunning:
                return False
            return True

        until(take)
        with taken[0] as member:
            found: list[Any] = []
            until(lambda: found.extend(member.read_many(100)) or len(found) == 12)
            child.signal(signal.SIGCONT)
            child.say()
            assert "has become the member" in child.errors()
            member.commit()
            assert sum(member.lag().values()) == 0


def test_other_queues_under_the_same_name_are_planned_anew(store: Store) -> None:
    store.queue("more", partitions=4)
    Member(store, "orders", "g", name="a").close()
    with Member(store, ["orders", "more"], "g", name="a") as a:
        settle(a)
        assert {queue for queue, _ in a.assigned} == {"orders", "more"}


# --- positions --------------------------------------------------------------------------------------------


def test_what_is_not_committed_comes_again(store: Store) -> None:
    fill(store, 12)
    with Member(store, "orders", "g") as member:
        assert len(member.read_many(6)) == 6
        member.commit()
        assert len(member.read_many(100)) == 6
    with Member(store, "orders", "g") as member:
        again = [message["n"] for message in member.read_many(100)]
    assert len(again) == 6


def test_lag_and_positions_are_of_all_partitions(store: Store) -> None:
    fill(store, 12)
    with Member(store, "orders", "g") as member:
        assert member.lag() == {("orders", n): 2 for n in range(PARTITIONS)}
        member.read_many(3)
        member.commit()
        assert sum(member.lag().values()) == 9
        assert sum(index - 1 for index in member.positions().values()) == 3


def test_a_checkpoint_is_kept_beside_the_position(store: Store) -> None:
    fill(store, 12)
    with Member(store, "orders", "g", name="a") as member:
        member.read_many(100)
        member.commit(checkpoint=b"offset 12")
        assert set(member.checkpoints().values()) == {b"offset 12"}
        member.commit(checkpoint={("orders", 3): b"by hand"})
        member.commit()
    with Member(store, "orders", "g", name="a") as member:
        settle(member)
        assert member.checkpoints()["orders", 3] == b"by hand"
        assert member.checkpoints()["orders", 4] == b"offset 12"
        with pytest.raises(InvalidArgument, match="at most 3,000"):
            member.commit(checkpoint=bytes(3001))
        with pytest.raises(InvalidArgument, match="bytes"):
            member.commit(checkpoint="text")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="does not hold"):
            member.commit(checkpoint={("orders", 9): b""})


def test_retention_waits_for_the_group(store: Store) -> None:
    """``retention="read"`` keeps what the group has not committed."""
    queue = store.queue("kept", partitions=2, retention="read")
    with Member(store, "kept", "g") as member:
        settle(member)
        for n in range(40):
            queue.partition(0).appender().write({"n": n})
        assert len(member.read_many(30)) == 30
        queue.partition(0).appender().write({"n": 40})
        assert queue.partition(0).first_index == 1
        member.commit()
        queue.partition(0).appender().write({"n": 41})
        assert queue.partition(0).first_index == 31


# --- seek -------------------------------------------------------------------------------------------------


def test_seek_to_every_kind_of_place(store: Store) -> None:
    fill(store, 60)
    one = ("orders", 0)
    with Member(store, "orders", "g") as member:
        member.read_many(100)
        member.commit()

        def at() -> int:
            return member.positions()[one]

        member.seek("start")
        assert set(member.positions().values()) == {1}
        member.seek("end", one)
        assert at() == 11
        member.seek(7, one)
        assert at() == 7
        member.seek(Relative(-3), one)
        assert at() == 4
        member.seek(Relative(100), one)
        assert at() == 11
        member.seek(Relative(-100), one)
        assert at() == 1
        member.seek(clock.to_datetime(clock.now_ns()) + timedelta(hours=1), one)
        assert at() == 11
        member.seek(clock.to_datetime(0), "orders")
        assert set(member.positions().values()) == {1}
        assert len(member.read_many(100)) == 60
        for place, words in ((12, "ends before"), (0, "first index"), ("middle", "'start'"), (None, "'start'")):
            with pytest.raises(InvalidArgument, match=words):
                member.seek(place, one)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="does not read"):
            member.seek("start", "other")
        with pytest.raises(InvalidArgument, match="has no partition 9"):
            member.seek("start", ("orders", 9))


def test_a_seek_fences_what_was_read_before_it(store: Store) -> None:
    """The same owner, and back at the same index: only the epoch tells that its messages were read before the seek."""
    fill(store, 6)
    with Member(store, "orders", "g") as member:
        assert len(member.read_many(100)) == 6
        with Member(store, "orders", "g") as other:
            other.seek("start", "orders")
            with pytest.raises(Fenced) as fenced:
                member.commit()
            assert fenced.value.reason == "seek"
            assert set(member.positions().values()) == {1}
            again: list[Any] = []
            until(lambda: again.extend(member.read_many(9) + other.read_many(9)) or len(again) == 6)


def test_a_seek_by_another_is_followed_at_the_next_read(store: Store) -> None:
    fill(store, 600)
    with Member(store, "orders", "g") as member:
        assert len(member.read_many(6)) == 6
        with Member(store, "orders", "g") as other:
            other.seek("end", "orders")
        member.holdings.stale()
        assert member.read_many(100) == []
        member.commit()
        assert sum(member.lag().values()) == 0


# --- pause ------------------------------------------------------------------------------------------------


def test_a_pause_belongs_to_the_partition(store: Store) -> None:
    """It is seen by other members, and lasts when the partition moves."""
    fill(store, 12)
    with Member(store, "orders", "g") as a:
        a.pause(("orders", 2), ("orders", 3))
        assert {number for _, number in a.poll()} == {0, 1, 4, 5}
        a.commit()
        assert a.paused() == [("orders", 2), ("orders", 3)]
    with Member(store, "orders", "g") as b:
        assert b.read_many(100) == []
        assert len(b.assigned) == PARTITIONS
        b.resume(("orders", 2))
        assert {message["n"] for message in b.read_many(100)} == {2, 8}
        b.resume()
        assert {message["n"] for message in b.read_many(100)} == {3, 9}


def test_a_pause_by_another_holds_at_once(store: Store) -> None:
    """Also for what this member had found to be readable before."""
    fill(store, 600)
    with Member(store, "orders", "g", name="a") as a:
        a.read()
        a.commit()
        with Member(store, "orders", "g") as b:
            b.pause("orders")
        a.holdings.stale()
        assert a.read_many(600) == []


@pytest.mark.damages_stores
def test_messages_that_were_read_before_a_damaged_batch_arrive(tmp_path: Path) -> None:
    """One partition is damaged. A poll returns the messages of the other one; the error does not lose them."""
    with cues.open(tmp_path / "damaged") as store:
        queue = store.queue("orders", partitions=2)
        for number in range(2):
            queue.partition(number).appender().write_many([{"n": number}])
        log = queue.partition(1).core.log
        store.core.commit(lambda txn: txn.put((1).to_bytes(8, "big"), b"damaged" * 9, db=log.database))
        with Member(store, "orders", "g") as member:
            found, errors = [], 0
            for _ in range(4):
                try:
                    found += member.read_many(10)
                except cues.errors.BatchDamaged:
                    errors += 1
            assert found == [{"n": 0}] and errors >= 2
            member.commit()
            assert member.positions() == {("orders", 0): 2, ("orders", 1): 1}
            member.seek(2, ("orders", 1))
            assert member.read() is None


# --- waiting ------------------------------------------------------------------------------------------------


def test_a_blocked_read_is_woken_by_a_write(store: Store) -> None:
    with Member(store, "orders", "g") as member:
        settle(member)
        threading.Timer(0.05, lambda: fill(store, 1)).start()
        assert member.read(block=True, timeout=DEADLINE_S) == {"n": 0}
        assert member.read(block=True, timeout=0.01) is None


def test_a_blocked_read_is_woken_by_what_it_gets(store: Store) -> None:
    """b sleeps without partitions; a leaves, and b reads the messages of its partitions."""
    fill(store, 6)
    a = Member(store, "orders", "g")
    a.read()
    with Member(store, "orders", "g") as b:
        threading.Timer(0.05, a.close).start()
        assert b.read(block=True, timeout=DEADLINE_S) is not None


def test_closing_from_another_thread_ends_a_blocked_read(store: Store) -> None:
    member = Member(store, "orders", "g")
    threading.Timer(0.05, member.close).start()
    with pytest.raises(Closed):
        member.read(block=True)
    member.close()  # waits for the other one's
    with pytest.raises(Closed):
        member.commit()


def test_follow_continues_and_iteration_ends(store: Store) -> None:
    fill(store, 3)
    with Member(store, "orders", "g") as member:
        assert sorted(message["n"] for message in member) == [0, 1, 2]
        threading.Timer(0.05, lambda: fill(store, 1, start=3)).start()
        assert next(member.follow()) == {"n": 3}


# --- callbacks ------------------------------------------------------------------------------------------------


def test_callbacks_may_close_the_member(store: Store) -> None:
    a = Member(store, "orders", "g", on_revoked=lambda _: a.close())
    settle(a)
    with Member(store, "orders", "g") as b:
        b.read()
        a.holdings.stale()
        with pytest.raises(Closed):
            a.read()
        settle(b)


def test_callbacks_may_not_read(store: Store) -> None:
    member = Member(store, "orders", "g", on_assigned=lambda _: member.read())
    with member, pytest.raises(InvalidArgument, match="cannot read"):
        member.read()


def test_an_error_in_on_revoked_leaves_the_partitions_where_they_are(store: Store) -> None:
    """It is raised by the read, and by the next, until it is mended."""
    broken = [True]

    def revoked(partitions: list[Partition]) -> None:
        if broken:
            raise ZeroDivisionError

    with Member(store, "orders", "g", on_revoked=revoked) as a:
        settle(a)
        with Member(store, "orders", "g") as b:
            b.read()
            for _ in range(2):
                a.holdings.stale()
                with pytest.raises(ZeroDivisionError):
                    a.read()
                assert len(a.assigned) == PARTITIONS
            broken.clear()
            settle(a, b)


def test_a_seek_in_on_assigned_decides_where_reading_begins(store: Store) -> None:
    """The reset policy of other systems: from the end, not from the start."""
    fill(store, 12)
    member = Member(store, "orders", "g", on_assigned=lambda partitions: member.seek("end", *partitions))
    with member:
        assert member.read() is None
        fill(store, 2)
        assert len(member.read_many(100)) == 2


# --- growing ------------------------------------------------------------------------------------------------


def test_partitions_that_a_queue_grows_by_are_read_from_their_start(store: Store) -> None:
    with Member(store, "orders", "g") as a, Member(store, "orders", "g") as b:
        settle(a, b)
        queue = store.queue("orders")
        queue.grow(8)
        queue.partition(7).appender().write({"n": 7})
        found: list[Any] = []
        until(lambda: found.extend(a.read_many(9) + b.read_many(9)) or found == [{"n": 7}])
        until(lambda: a.read_many(9) or b.read_many(9) or sorted(map(len, held(a, b))) == [4, 4])


def test_a_seek_on_partitions_that_are_not_planned_yet(store: Store) -> None:
    """It makes their rows, without an assignee; they are planned all the same."""
    with Member(store, "orders", "g") as a:
        settle(a)
        queue = store.queue("orders")
        queue.grow(8)
        queue.partition(7).appender().write_many([{"n": 7}, {"n": 15}])
        a.seek(2, ("orders", 7))
        found: list[Any] = []
        until(lambda: found.extend(a.read_many(9)) or found == [{"n": 15}])


# --- what others see of a group -------------------------------------------------------------------------------


def test_status_shows_members_partitions_and_lag(store: Store) -> None:
    """As a table and as JSON; partitions without a reader have a row of their own."""
    fill(store, 12)
    with Member(store, "orders", "billing", name="ann") as ann:
        ann.read_many(3)
        ann.commit()
        with Member(store, "orders", "billing", name="bob") as bob:
            bob.read()
            table = terminal.cues("status", store.path, "--table").out
            assert "billing" in table and "ann" in table and "bob" in table
            group = json.loads(terminal.cues("status", store.path).out.splitlines()[-1])
            assert group["lag"] == 9
            assert set(group["members"]) == {"ann", "bob"}
            assert [one["member"] for one in group["partitions"].values()] == ["ann"] * PARTITIONS
            assert [one["assignee"] for one in group["partitions"].values()].count("bob") == 3
    assert "none" in terminal.cues("status", store.path, "--table").out


def test_the_bytes_of_a_claim_are_those_of_the_format_page(store: Store) -> None:
    """docs/format.md, offset by offset."""
    fill(store, 12)
    with Member(store, "orders", "billing", name="ann") as ann:
        ann.pause(("orders", 3))
        ann.resume(("orders", 3))
        while ann.partition != ("orders", 3):
            ann.read()
        ann.commit(checkpoint=b"here")
        ann.pause(("orders", 3))
        with store.core.view() as txn:
            raw = bytes(txn.get(b"\0claim\0orders/3\0billing"))
            identity = bytes(txn.get(b"\0row\0orders/3"))[:8]
            group = bytes(txn.get(b"\0group\0billing"))
        assert raw[0:8] == identity
        assert raw[8:16] == ann.holdings.id
        assert int.from_bytes(raw[16:24], "big") == 1
        assert int.from_bytes(raw[24:32], "big") == ann.positions()["orders", 3] == 2
        with store.core.view() as txn:
            log = store.queue("orders").partition(3).core.log
            assert raw[32:40] == log.seal_before(txn, log.row(txn), 2) != bytes(8)
        assert raw[40:43] == b"\1\0\3"
        assert raw[43:50] == b"annhere"
        assert raw[50:] == xxhash.xxh3_64_digest(raw[:50], xxhash.xxh3_64_intdigest(b"\0claim\0orders/3\0billing"))
        assert len(group) == 48 and group[40:] == xxhash.xxh3_64_digest(
            group[:40], xxhash.xxh3_64_intdigest(b"\0group\0billing")
        )


def test_check_finds_damaged_rows_of_a_group(tmp_path: Path) -> None:
    with cues.open(tmp_path / "damaged") as store:
        store.queue("orders", partitions=2)
        with Member(store, "orders", "g", name="a") as member:
            member.read()
        assert store.check() == []
        keys = [names.claim_key("orders/1", "g"), names.member_key("g", "a"), names.group_key("g")]
        whole = {}

        def damage(txn: Any) -> None:
            for key in keys:
                whole[key] = bytes(txn.get(key))
                txn.put(key, whole[key][:-1] + bytes([whole[key][-1] ^ 1]))

        store.core.commit(damage)
        found = "\n".join(store.check())
        assert "The claim of group 'g' on orders/1 is damaged" in found
        assert "The row of the member of a group 'g a' is damaged" in found
        assert "The row of the group 'g' is damaged" in found
        store.core.commit(lambda txn: [txn.put(key, value) for key, value in whole.items()])


def test_a_removed_queue_takes_the_positions_of_groups_with_it(tmp_path: Path) -> None:
    path = tmp_path / "compacted"
    with cues.open(path) as store:
        store.queue("orders", partitions=2)
        store.queue("kept")
        with Member(store, ["orders", "kept"], "g") as member:
            member.read()
    compact(path, ["orders"])
    with cues.open(path) as store, Member(store, "kept", "g") as member:
        settle(member)
        assert member.assigned == [("kept", 0)]


# --- refusals -------------------------------------------------------------------------------------------------


def test_what_a_member_cannot_be_made_of(store: Store) -> None:
    with pytest.raises(QueueNotFound, match=r"no queue 'ordres'; it has orders\."):
        Member(store, "ordres", "g")
    assert store.queues() == ["orders"]
    with pytest.raises(InvalidName):
        Member(store, "orders", "a.b")
    with pytest.raises(InvalidName):
        Member(store, "orders", "g", name="a/b")
    with pytest.raises(InvalidArgument, match="subscribes to no queue"):
        Member(store, [], "g")
    with pytest.raises(InvalidArgument, match="lease_s"):
        Member(store, "orders", "g", lease_s=0)
    with cues.open(store.path, readonly=True) as readonly, pytest.raises(StoreReadOnly):
        Member(readonly, "orders", "g")
    with Member(store, "orders", "g") as member, pytest.raises(InvalidArgument):
        member.read_many(0)


def test_two_threads_cannot_use_one_member(store: Store) -> None:
    with Member(store, "orders", "g") as member:
        settle(member)
        waiting = threading.Event()
        assert store.core.doorbells is not None
        real = store.core.doorbells.acquire
        store.core.doorbells.acquire = lambda: (waiting.set(), real())[1]  # type: ignore[method-assign]
        found: list[Any] = []
        reading = threading.Thread(target=lambda: found.append(member.read(block=True, timeout=DEADLINE_S)))
        reading.start()
        assert waiting.wait(DEADLINE_S)  # before that, the read itself might be the second use
        with pytest.raises(ConcurrentUse):
            member.commit()
        fill(store, 1)
        reading.join()
        assert found == [{"n": 0}]


@pytest.mark.parametrize("isolation", ["uncommitted", "committed"])
def test_a_queue_made_anew_is_not_read_from_the_old_position(
    isolation: Isolation, store: Store, tmp_path: Path
) -> None:
    """The group's position means a queue that another store has under the same name."""
    fill(store, 12)
    with Member(store, "orders", "g", isolation=isolation) as member:
        member.read_many(100)
        member.commit()
    table = GroupTable(store, "g", isolation)
    with cues.open(tmp_path / "other") as other:
        other.queue("orders", partitions=PARTITIONS)
        wanted = table.look(["orders"]).claims

        def carry(txn: Any) -> None:
            from cues.base import names
            from cues.groups import claims

            for (queue, number), claim in wanted.items():
                claims.put(txn, names.log_id(queue, number), "g", claim)

        other.core.commit(carry)
        with (
            Member(other, "orders", "g", isolation=isolation) as member,
            pytest.raises(cues.errors.Diverged, match="made again"),
        ):
            member.read()
        with Member(other, "orders", "g", isolation=isolation) as member:
            member.seek("start", "orders")
            assert member.read() is None


def test_a_session_and_a_read_beside_it(store: Store) -> None:
    fill(store, 6)
    with Member(store, "orders", "g") as member, member.session() as session:
        for refused in (member.read, member.commit, member.poll, lambda: member.seek("start")):
            with pytest.raises(InvalidArgument, match="session"):
                refused()
        assert session.read() is not None
        assert session.end(TRY_COMMIT).committed
        assert member.read() is not None


def test_a_new_session_aborts_the_one_that_is_open(store: Store) -> None:
    """Its messages come again, what it wrote is gone, and it can do nothing any more."""
    fill(store, 6)
    store.queue("out")
    with Member(store, "orders", "g") as member:
        forgotten = member.session()
        first = forgotten.read()
        assert first is not None
        forgotten.write("out", first)
        found: list[Any] = []
        for _ in range(6):
            with member.session() as session:
                message = session.read()
                assert message is not None
                found.append(message)
                assert session.end(TRY_COMMIT).committed
        assert first in found and sorted(message["n"] for message in found) == list(range(6))
        for refused in (forgotten.read, lambda: forgotten.write("out", {}), lambda: forgotten.end(TRY_COMMIT)):
            with pytest.raises(InvalidArgument, match=r"ended \(aborted: asked\)"):
                refused()
        assert len(store.queue("out")) == 0


def test_a_session_does_not_commit_what_was_read_before_it(store: Store) -> None:
    fill(store, 6)
    with Member(store, store.queue("orders"), "g") as member:
        first = member.read()
        with pytest.raises(InvalidArgument, match="handed out and are not committed"):
            member.session()
        member.seek(Relative(0))
        with member.session() as session:
            assert session.read() is not None
            session.end(TRY_COMMIT)
        member.commit()
        assert first in member.read_many(10)


def test_a_forked_child_leaves_the_parents_membership_alone(tmp_path: Path) -> None:
    """It inherits the member, and closes it on its way out; the parent's lease and lock stay."""
    code = """
import os, sys, cues
from cues.groups import Member
store = cues.open(sys.argv[1])
store.queue("q")
member = Member(store, "q", "g", name="a")
member.read()
pid = os.fork()
if pid == 0:
    member.keepalive()
    try:
        member.close()
    except cues.errors.Forked:
        os._exit(7)
    os._exit(8)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
sys.stdin.readline()
print(member.assigned, member.read(), flush=True)
member.close()
store.close()
"""
    with Child(code, tmp_path / "store") as child:
        assert child.line() == "7"
        with cues.open(tmp_path / "store") as store:
            with pytest.raises(AlreadyRunning):
                Member(store, "q", "g", name="a")
            with Member(store, "q", "g") as member:
                for _ in range(3):
                    member.holdings.stale()
                    assert member.read() is None
                assert len(member.table.look().members) == 2
        child.say()
        assert child.line() == "[('q', 0)] None"
        child.end()


# --- at random ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [pytest.param(40, id="bounded"), pytest.param(2000, marks=pytest.mark.long)])
def test_members_that_come_and_go_at_random(rounds: int, tmp_path: Path) -> None:
    """Members of one process join, close, leave, fall silent (as a stopped process does), are buried, wake up, take
    steps and hold them open. In the end every message is there once, and those of a partition in their order."""
    seed = seeds.new()
    rng = random.Random(seed)
    with cues.open(tmp_path / "store", durability="process") as store:
        queue = store.queue("orders", partitions=PARTITIONS, key="n", partitioner=by_number)
        out = store.queue("out", partitions=3, key="n", partitioner=by_number)
        for _ in range(rounds):
            one_round(store, queue, out, rng)
        with Member(store, "orders", "g") as member:
            finish(member, out)
        written = [message["n"] for n in range(PARTITIONS) for message in testing.messages(store, f"orders/{n}")]
        found = [message["n"] for n in range(3) for message in testing.messages(store, f"out/{n}")]
        assert sorted(found) == sorted(written)
        for n in range(3):
            for number in range(PARTITIONS):
                series = [m["n"] for m in testing.messages(store, f"out/{n}") if m["n"] % PARTITIONS == number]
                assert series == sorted(series)
        assert len(out) == len(queue)


NUMBERS = itertools.count()


def one_round(store: Store, queue: cues.Queue, out: cues.Queue, rng: random.Random) -> None:
    members: list[Member] = []
    silent: list[Member] = []
    open_steps: dict[Member, Any] = {}
    for _ in range(60):
        what = rng.choice(("join", "close", "silent", "wake", "bury", "write", "step", "step", "step", "begin", "end"))
        busy = [member for member in members if member in open_steps]
        idle = [member for member in members if member not in open_steps]
        if what == "join" and len(members) < 4:
            members.append(Member(store, "orders", "g", name=rng.choice((None, f"n{next(NUMBERS)}")), lease_s=1))
        elif what == "close" and idle:
            member = rng.choice(idle)
            members.remove(member)
            member.leave() if rng.random() < 0.7 else member.close()
        elif what == "silent" and members:
            member = rng.choice(members)
            members.remove(member)
            silent.append(member)
        elif what == "wake" and silent:
            members.append(silent.pop(rng.randrange(len(silent))))
        elif what == "bury" and silent:  # as the others do when its lease is over
            member = rng.choice(silent)
            member.table.remove({member.name: member.holdings.id})
        elif what == "write":
            start = len(queue)
            queue.appender().write_many([{"n": n} for n in range(start, start + rng.randrange(1, 20))])
        elif what == "begin" and idle:
            member = rng.choice(idle)
            session = open_steps[member] = member.session()
            session.write_many(out, session.read_many(rng.randrange(1, 6)))
        elif what == "end" and busy:
            member = rng.choice(busy)
            open_steps.pop(member).end(rng.choice((TRY_COMMIT, TRY_COMMIT, TRY_ABORT)))
        elif what == "step" and idle:
            member = rng.choice(idle)
            member.holdings.stale()
            with member.session() as session:
                session.write_many(out, session.read_many(rng.randrange(1, 6)))
                session.end(TRY_COMMIT)
    for member in members + silent:
        open_steps.pop(member).end(TRY_COMMIT) if member in open_steps else None
        member.leave()


def finish(member: Member, out: cues.Queue) -> None:
    while sum(member.lag().values()):
        with member.session() as session:
            session.write_many(out, session.read_many(7, timeout=1))
            session.end(TRY_COMMIT)
