"""Subscriptions of members: queues that belong together, patterns, changes, and the number of members."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seeds
from children import Child
from sets import slow_except
from small import until

import cues
from cues import faults, testing
from cues.errors import InvalidArgument, InvalidName, QueueNotFound
from cues.groups import Member, table
from cues.groups.sticky import Partition
from cues.groups.table import GroupTable
from cues.queues.store import Store

PARTITIONS = 4
BOTH = ("orders", "payments")
LEASE_S = 3600.0
DEADLINE_S = 30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with cues.open(tmp_path / "store", durability="process") as store:
        make(store)
        yield store


def make(store: Store, count: int = 0) -> None:
    for queue in BOTH:
        store.queue(queue, partitions=PARTITIONS, key="user").appender().write_many(numbered(count))
    store.queue("pairs", partitions=2, key="user")


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"user": f"u{n % 10}", "n": n} for n in range(count)]


def look(*members: Member) -> None:
    """Let members follow the plan of their group, without reading: their partitions are empty or not theirs."""
    for member in members:
        member.holdings.stale()
        member.holdings.keep_up()


def units(member: Member) -> dict[int, set[str]]:
    """The queues of each partition number that a member holds."""
    held: dict[int, set[str]] = {}
    for queue, number in member.assigned:
        if queue in BOTH:
            held.setdefault(number, set()).add(queue)
    return held


def settled(*members: Member) -> bool:
    """Return whether every partition is held, after one more look of each member."""
    look(*members)
    held = [partition for member in members for partition in member.assigned]
    wanted = {partition for member in members for partition in member.lag()}
    return len(held) == len(set(held)) == len(wanted)


def pair(**options: Any) -> dict[str, Any]:
    return {"together": [BOTH], "lease_s": LEASE_S, **options}


# --- queues that belong together -------------------------------------------------------------------------


def test_a_member_gets_the_same_numbers_of_queues_that_belong_together(store: Store) -> None:
    store.queue("rates", partitions=3)
    queues = [*BOTH, "rates"]
    with Member(store, queues, "g", **pair(name="a")) as a, Member(store, queues, "g", **pair(name="b")) as b:
        until(lambda: settled(a, b))
        assert all(held == set(BOTH) for member in (a, b) for held in units(member).values())
        assert [len(units(member)) + sum(q == "rates" for q, _ in member.assigned) for member in (a, b)] in (
            [3, 4],
            [4, 3],
        )
        before = units(a)
        with Member(store, queues, "g", **pair(name="c")) as c:
            until(lambda: settled(a, b, c))
            assert all(held == set(BOTH) for member in (a, b, c) for held in units(member).values())
            assert set(units(a)) <= set(before), "more units moved than had to"
            c.leave()
        until(lambda: settled(a, b))
        assert len(units(a)) + len(units(b)) == PARTITIONS


def test_a_unit_is_claimed_when_all_of_it_is_free(store: Store) -> None:
    """Messages of one of its queues are not committed: the other queue's partition waits with it."""
    for number in range(PARTITIONS):
        store.queue("payments").partition(number).appender().write({"user": "u", "n": number})
    with Member(store, BOTH, "g", **pair(name="a")) as a:
        assert len(a.poll()) == PARTITIONS
        with Member(store, BOTH, "g", **pair(name="b")) as b:
            for _ in range(3):
                look(b, a)
            assert {queue for queue, _ in a.assigned} == set(BOTH)
            assert len([queue for queue, _ in a.assigned if queue == "orders"]) == 2, "orders/2 and /3 are released"
            assert b.assigned == []
            a.commit()
            until(lambda: settled(a, b))
            assert units(a) == {0: set(BOTH), 1: set(BOTH)} and units(b) == {2: set(BOTH), 3: set(BOTH)}


def test_queues_that_grow_one_after_the_other_keep_their_units(store: Store) -> None:
    with Member(store, BOTH, "g", **pair()) as a, Member(store, BOTH, "g", **pair()) as b:
        until(lambda: settled(a, b))
        store.queue("payments").grow(PARTITIONS + 2)
        until(lambda: settled(a, b))
        store.queue("orders").grow(PARTITIONS + 2)
        until(lambda: settled(a, b))
        assert all(held == set(BOTH) for member in (a, b) for held in units(member).values())
        assert sorted(len(units(member)) for member in (a, b)) == [3, 3]


def test_members_that_read_queues_together_agree_on_it(store: Store) -> None:
    """A place that is kept counts; a member of other queues has nothing to do with it."""
    store.queue("rates")
    words = "member a of g reads 'orders' together with 'payments', this one together with no other queue"
    a = Member(store, [*BOTH, "rates"], "g", **pair(name="a"))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=words):
            Member(store, "orders", "g")
        with Member(store, "rates", "g") as other:
            look(other)
        assert set(GroupTable(store, "g").look().members) == {"a"}
        a.close()
    with Member(store, BOTH, "g", name="a") as a:  # the same name may change its mind
        until(lambda: settled(a))
        with Member(store, "orders", "g") as other:
            until(lambda: settled(a, other))


@pytest.mark.parametrize(
    ("together", "words"),
    [
        (["orders", "payments"], "'orders', which is not a list of queues"),
        ([None], "None, which is not a list of queues"),
        (None, "together is None"),
        ([["orders"]], "a list of 1 queues"),
        ([["orders", "rates"]], "'rates', which is not a queue of this member"),
        ([["orders", "payments"], ["payments", "few"]], "'payments', which is in two lists"),
        ([["orders", "few"]], "partitions is 2 and 4"),
        ([["orders", "hashed"]], "partitioner is 'fnv1a-modulo' and 'murmur2'"),
    ],
)
def test_what_cannot_belong_together(store: Store, together: Any, words: str) -> None:
    store.queue("few", partitions=2, key="user")
    store.queue("hashed", partitions=PARTITIONS, key="user", partitioner="fnv1a-modulo")
    with pytest.raises(InvalidArgument, match=words):
        Member(store, [*BOTH, "few", "hashed"], "g", together=together)
    assert GroupTable(store, "g").look().members == {}


def test_no_two_members_ever_hold_parts_of_one_unit(store: Store) -> None:
    """Members come and go at random, with messages that are not committed when a plan moves their partition."""
    rng = random.Random(seeds.new())
    members: list[Member] = []
    for turn in range(150):
        chance = rng.random()
        if not members or (chance < 0.06 and len(members) < 5):
            members.append(Member(store, BOTH, "g", **pair()))
        elif chance < 0.1:
            members.pop(rng.randrange(len(members))).close()
        else:
            store.queue(rng.choice(BOTH)).appender().write({"user": f"u{rng.randrange(10)}", "n": turn})
            member = rng.choice(members)
            member.holdings.stale()
            member.poll(n=5)
            if rng.random() < 0.6:
                member.commit()
        owners: dict[int, set[bytes]] = {}
        living = {member.holdings.id for member in members}
        for (_, number), claim in GroupTable(store, "g").look(BOTH).claims.items():
            owners.setdefault(number, set()).add(claim.owner)
        assert all(len(found & living) <= 1 for found in owners.values()), turn
    for member in members:
        member.commit()
    until(lambda: settled(*members) if members else True)
    assert all(held == set(BOTH) for member in members for held in units(member).values())
    for member in members:
        member.close()


JOINS = """
import sys, cues
from cues.groups import TRY_COMMIT, Member
both = ["orders", "payments"]
with cues.open(sys.argv[1]) as store, Member(store, both, "g", together=[both]) as member:
    while sum(member.lag().values()):
        with member.session(partitions="all") as session:
            for (queue, _), messages in session.poll(timeout=1, n=9).items():
                session.write_many("pairs", [{**message, "of": queue} for message in messages])
            numbers = {queue: {n for name, n in member.assigned if name == queue} for queue in both}
            assert numbers["orders"] == numbers["payments"], numbers
            session.end(TRY_COMMIT)
"""


@pytest.mark.parametrize("point", slow_except(["session.inside"], faults.GROUP_POINTS))
def test_a_join_dies_at_every_point(point: str, tmp_path: Path, checked: Any) -> None:
    """Each message of both queues once, and in the order of its key."""
    path = tmp_path / "store"
    with cues.open(path, durability="process") as store:
        make(store, 100)
    died = 0
    for hit in range(1, 5):
        with Child(JOINS, path, CUES_FAULT=f"{point}:{hit}") as child:
            died += child.returncode() == -signal.SIGKILL
        checked(path)
    assert died >= 2
    with Child(JOINS, path) as child:
        child.end()
    with cues.open(path) as store:
        found = [message for n in range(2) for message in testing.messages(store, f"pairs/{n}")]
    for queue in BOTH:
        for user in range(10):
            mine = [message["n"] for message in found if (message["of"], message["user"]) == (queue, f"u{user}")]
            assert mine == list(range(user, 100, 10))


# --- a subscription that changes --------------------------------------------------------------------------


def fill(store: Store, queue: str, count: int, start: int = 0) -> None:
    store.queue(queue).appender().write_many([{"user": f"u{n % 10}", "n": n} for n in range(start, start + count)])


def numbers(member: Member) -> list[int]:
    """All messages that are there, committed; sorted."""
    found = [message["n"] for message in member.read_many(1000)]
    member.commit()
    return sorted(found)


def test_a_member_subscribes_to_other_queues(store: Store) -> None:
    """Partitions of a queue that stays do not move; those of a queue that goes wait for the commit."""
    fill(store, "orders", 20)
    store.queue("rates", partitions=2)
    told: list[tuple[str, list[Partition]]] = []
    callbacks: dict[str, Any] = {
        f"on_{what}": lambda partitions, what=what: told.append((what, partitions))
        for what in ("assigned", "revoked", "lost")
    }
    with Member(store, BOTH, "g", name="a", lease_s=LEASE_S, **callbacks) as a:
        assert len(a.read_many(100)) == 20
        told.clear()
        a.subscribe(["payments", "rates"])
        look(a)
        assert {queue for queue, _ in a.assigned} == {"orders", "payments", "rates"}  # the messages are not committed
        fill(store, "orders", 5, start=20)
        assert a.read_many(10) == []
        a.commit()
        look(a)
        assert {queue for queue, _ in a.assigned} == {"payments", "rates"}
        orders = [("orders", n) for n in range(PARTITIONS)]
        assert sorted((what, partition) for what, partitions in told for partition in partitions) == sorted(
            [("assigned", ("rates", n)) for n in range(2)] + [("revoked", partition) for partition in orders]
        )
        assert {c.assignee for (q, _), c in GroupTable(store, "g").look(BOTH).claims.items() if q == "orders"} == {""}
        a.subscribe("orders")  # the group has its positions
        assert numbers(a) == list(range(20, 25))
        assert {queue for queue, _ in a.assigned} == {"orders"}


def test_another_member_gets_what_a_subscription_leaves(store: Store) -> None:
    fill(store, "orders", 20)
    with (
        Member(store, BOTH, "g", name="a", lease_s=LEASE_S) as a,
        Member(store, BOTH, "g", name="b", lease_s=LEASE_S) as b,
    ):
        until(lambda: settled(a, b))
        a.subscribe("payments")
        until(lambda: settled(a, b))
        assert {queue for queue, _ in b.assigned if queue == "orders"} and ("orders", 0) in b.assigned
        assert {queue for queue, _ in a.assigned} == {"payments"}
        assert numbers(b) == list(range(20))


def test_a_refused_subscription_changes_nothing(store: Store) -> None:
    with (
        Member(store, "orders", "g", lease_s=LEASE_S) as a,
        Member(store, "payments", "g", lease_s=LEASE_S) as b,
    ):
        until(lambda: settled(a, b))
        before = GroupTable(store, "g").look()
        with pytest.raises(QueueNotFound, match="no queue 'ordres'"):
            a.subscribe(["orders", "ordres"])
        with pytest.raises(InvalidArgument, match="subscribes to no queue"):
            a.subscribe([])
        with pytest.raises(InvalidArgument, match=r"member .* of g reads 'payments' together with no other queue"):
            a.subscribe(BOTH, together=[BOTH])
        with a.session(), pytest.raises(InvalidArgument, match="cannot subscribe"):
            a.subscribe(BOTH)
        assert GroupTable(store, "g").look() == before
        look(a, b)
        assert {queue for queue, _ in a.assigned} == {"orders"}


def test_a_member_that_lost_its_place_subscribes_as_a_new_one(store: Store) -> None:
    with Member(store, "orders", "g", lease_s=LEASE_S) as a:
        look(a)
        a.table.remove({a.name: a.holdings.id})
        a.subscribe("payments")
        until(lambda: settled(a))
        assert {queue for queue, _ in a.assigned} == {"payments"}


SUBSCRIBES = """
import sys, cues
from cues.groups import Member
with cues.open(sys.argv[1]) as store, Member(store, "orders", "g", name="a", lease_s=0.05) as member:
    member.read_many(5)
    member.commit()
    cues.faults.arm(sys.argv[2], int(sys.argv[3]))
    member.subscribe("payments")
    for _ in range(10):
        member.holdings.stale()
        member.read()
"""


@pytest.mark.parametrize("hit", [1, 2, 3])
@pytest.mark.parametrize("point", ["group.inside", "group.after"])
def test_death_in_a_change_of_a_subscription(store: Store, point: str, hit: int, checked: Any) -> None:
    """The change is one transaction; its plan, the release and the claim follow. Others read on from the positions."""
    for queue in BOTH:
        fill(store, queue, 20)
    with Child(SUBSCRIBES, store.path, point, hit) as child:
        assert child.returncode() == -signal.SIGKILL
    (row,) = GroupTable(store, "g").look().members.values()
    assert row.queues == (("orders",) if (point, hit) == ("group.inside", 1) else ("payments",))
    checked(store.path)
    with Member(store, BOTH, "g") as member:
        until(lambda: not len(GroupTable(store, "g").look().members) > 1 or look(member))
        found: list[int] = []
        until(lambda: found.extend(numbers(member)) or sum(member.lag().values()) == 0)
    assert len(found) == 35  # of 40, less the 5 that were committed


# --- patterns ---------------------------------------------------------------------------------------------


def test_a_pattern_follows_queues_that_are_made_later(store: Store) -> None:
    """Also where a read waits, and with start="latest": their first messages are read."""
    fill(store, "orders", 10)
    with Member(store, ["o*", "x-?"], "g", start="latest", lease_s=LEASE_S) as member:
        assert numbers(member) == []
        with cues.open(store.path) as other:
            fill(other, "orders", 1, start=10)
            for name in ("outer", "x-1", "x-10", "xx"):
                other.queue(name).appender().write({"n": 100 + len(name)})
            assert sorted(member.read(block=True, timeout=DEADLINE_S)["n"] for _ in range(3)) == [10, 103, 105]  # type: ignore[index]
        member.commit()
        assert {queue for queue, _ in member.assigned} == {"orders", "outer", "x-1"}
    # One that is made while nobody looks is read from its start too; the group is not new.
    store.queue("x-2").appender().write({"n": 7})
    with Member(store, ["o*", "x-?"], "g", start="latest") as member:
        assert numbers(member) == [7]
    with Member(store, ["o*", "x-?"], "new", start="latest") as member:
        assert numbers(member) == []


def test_a_pattern_may_match_nothing_yet(store: Store) -> None:
    with Member(store, "later-*", "g", lease_s=LEASE_S) as a, Member(store, "later-*", "g", lease_s=LEASE_S) as b:
        assert a.read() is None and a.assigned == []
        store.queue("later-1", partitions=4, key="user")
        until(lambda: settled(a, b) and a.assigned and b.assigned)
        assert len(a.assigned) == len(b.assigned) == 2
        assert a.holdings.row.patterns == ("later-*",)
        a.subscribe("orders")  # without the pattern
        store.queue("later-2")
        until(lambda: {queue for queue, _ in b.assigned} == {"later-1", "later-2"} or look(a, b))
        assert a.holdings.row.queues == ("orders",)
    for wrong in ("orders/*", "a.*"):
        with pytest.raises(InvalidName):
            Member(store, wrong, "g")


def test_a_queue_whose_name_has_a_wildcard_is_that_queue(store: Store) -> None:
    store.queue("o*").appender().write({"n": 1})
    fill(store, "orders", 3)
    with Member(store, "o*", "g") as member:
        assert numbers(member) == [1]
        assert member.holdings.row.patterns == ()


# --- the number of members -----------------------------------------------------------------------------------


def test_a_group_has_a_largest_number_of_members(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is refused by name; a place that is free again can be taken, and a name can come back."""
    assert table.MEMBERS_MAX == 256
    monkeypatch.setattr(table, "MEMBERS_MAX", 3)
    with Member(store, "orders", "g") as a, Member(store, "orders", "g"), Member(store, "orders", "g", name="c") as c:
        with pytest.raises(InvalidArgument, match="group g has 3 members, and at most 3 are allowed"):
            Member(store, "orders", "g")
        assert len(GroupTable(store, "g").look().members) == 3
        a.subscribe(BOTH)
        c.close()
        with Member(store, "orders", "g", name="c"):
            a.close()
            with Member(store, "orders", "g"):
                pass
