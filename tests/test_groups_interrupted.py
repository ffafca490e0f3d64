"""An exception at every function entry of a step of a member, one point after another; then the program continues.

A Ctrl-C in a notebook, for example: the same member is used again. Nothing may be lost, doubled or stuck after it.
A message counts as handed out when a call has returned it, and as done when a commit after that has returned.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import interruptions
import pytest

import cues
from cues.groups import TRY_ABORT, TRY_COMMIT, Member
from cues.groups.sticky import Partition
from cues.groups.table import GroupTable
from cues.queues.store import Store

# The interpreter prints an exception of the finalizer of a generator, and does not raise it any further.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

MESSAGES = 12
MANY = 5
"""Messages of one step."""
TURNS_MAX = 60
"""Calls until everything is read; more are stuck."""
SAMPLE = 61
"""Every so many points are taken by default. A prime, so that it falls into step with no loop."""


@dataclass
class World:
    """A store with a queue, a member that reads it, and what that member has returned."""

    store: Store
    member: Member
    kind: str
    done: list[int] = field(default_factory=list)
    told: list[tuple[str, list[Partition]]] = field(default_factory=list)
    other: Member | None = None

    def turn(self) -> int:
        """One step; returns how many messages it had."""
        return {"session": self.session, "all": self.session, "poll": self.poll, "read": self.read}[self.kind]()

    def session(self) -> int:
        with self.member.session(partitions="all" if self.kind == "all" else "one") as session:
            found = session.read_many(MANY)
            for message in found:
                session.write("out", message)
            if found:
                assert session.end(TRY_COMMIT).committed
        return len(found)

    def poll(self) -> int:
        found = self.member.poll(n=MANY)
        for messages in found.values():
            self.done.extend(message["n"] for message in messages)
        if found:
            self.member.commit()
        return sum(map(len, found.values()))

    def read(self) -> int:
        message = self.member.read()
        if message is None:
            return 0
        self.done.append(message["n"])
        self.member.commit()
        return 1

    def aborted(self) -> None:
        """A step that is aborted; then another."""
        with self.member.session(partitions="all" if self.kind == "all" else "one") as session:
            for message in session.read_many(MANY):
                session.write("out", message)
            session.end(TRY_ABORT)
        self.turn()

    def hand_over(self) -> None:
        """A step of a member that has a partition to give up."""
        self.turn()

    def subscribe(self) -> None:
        """A change of the subscription, which is either made or not."""
        self.member.subscribe(["src", "extra"])

    def finish(self) -> None:
        """Go on with the same members until everything is read."""
        idle = 0
        members = [self.member] if self.other is None else [self.member, self.other]
        for _ in range(TURNS_MAX):
            for member in members:
                member.holdings.stale()  # look at the group, whatever the clock says
            found = self.turn()
            if self.other is not None:
                for messages in self.other.poll(n=MANY).values():
                    found += len(messages)
                    self.done.extend(message["n"] for message in messages)
                self.other.commit()
            idle = 0 if found else idle + 1
            if idle == 3:
                return
        raise AssertionError("stuck: it goes on reading")

    def check(self, place: str) -> None:
        """Every message once and in order, all of them committed, and memory as the store is."""
        self.finish()
        found = [message["n"] for message in self.store.queue("out").tailer()] + self.done
        assert sorted(found) == list(range(MESSAGES)), f"lost or doubled: {found}"
        assert sum(self.member.lag().values()) == 0, self.member.lag()
        claims = GroupTable(self.store, "g").look().claims
        owned = sorted(partition for partition, claim in claims.items() if claim.owner == self.member.holdings.id)
        assert self.member.assigned == owned, (self.member.assigned, owned)
        assert {p: held.next for p, held in self.member.holdings.held.items()} == {p: claims[p].next for p in owned}
        self.check_callbacks(owned)

    def check_callbacks(self, owned: list[Partition]) -> None:
        """It holds the partitions that were assigned and not revoked. Only assigned ones are revoked or lost."""
        told: set[Partition] = set()
        for what, partitions in self.told:
            if what == "assigned":
                told |= set(partitions)
            else:
                assert told.issuperset(partitions), self.told
                told -= set(partitions)
        assert sorted(told) == owned, self.told


def arranger(kind: str, what: str) -> Callable[[], contextlib.AbstractContextManager[World]]:
    """Prepare one kind of reading, up to the call that is interrupted."""

    @contextlib.contextmanager
    def arrange() -> Iterator[World]:
        with tempfile.TemporaryDirectory() as directory, cues.open(directory, durability="process") as store:
            queue = store.queue("src", partitions=2, key="n", partitioner=lambda message, count: message["n"] % count)
            store.queue("out")
            store.queue("extra")
            queue.appender().write_many([{"n": n} for n in range(MESSAGES)])
            told: list[tuple[str, list[Partition]]] = []
            member = Member(
                store,
                "src",
                "g",
                lease_s=30,
                on_assigned=lambda partitions: told.append(("assigned", partitions)),
                on_revoked=lambda partitions: told.append(("revoked", partitions)),
                on_lost=lambda partitions: told.append(("lost", partitions)),
            )
            world = World(store, member, kind, told=told)
            if what != "first":
                world.turn()
            if what == "hand_over":
                world.other = Member(store, "src", "g", lease_s=30)
                world.other.poll()
                member.holdings.stale()
            yield world

    return arrange


ACTS = {
    "first": World.turn,
    "step": World.turn,
    "aborted": World.aborted,
    "hand_over": World.hand_over,
    "subscribe": World.subscribe,
}
CASES = [
    (kind, what) for kind, what in itertools.product(("session", "all", "poll", "read"), ("first", "step", "hand_over"))
]
CASES += [("session", "aborted"), ("all", "aborted"), ("poll", "subscribe")]


def faults(kind: str, what: str, points: range | None) -> tuple[int, list[str]]:
    return interruptions.faults(arranger(kind, what), ACTS[what], World.check, points=points)


@pytest.mark.parametrize(("kind", "what"), CASES)
@pytest.mark.interpreted
def test_an_exception_in_the_middle_of_a_call_and_then_going_on(kind: str, what: str) -> None:
    """A sample of the points."""
    points, found = faults(kind, what, range(1, 1 << 20, SAMPLE))
    assert points > 1
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "what"), CASES)
def test_an_exception_at_every_point_of_a_call_and_then_going_on(kind: str, what: str, stride: int) -> None:
    points, found = faults(kind, what, range(1, 1 << 20, stride))
    assert points * stride > 40
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_an_exception_at_every_point_of_a_close_and_then_closing_again() -> None:
    """Its partitions are free after that, also for a member of its name."""

    def close_again(world: World, place: str) -> None:
        world.member.close()
        world.member.close()
        world.told.clear()
        world.member = Member(world.store, "src", "g", lease_s=30)
        world.finish()
        assert sorted(world.done) == list(range(MESSAGES)), f"lost or doubled: {world.done}"

    points, found = interruptions.faults(arranger("poll", "step"), lambda world: world.member.close(), close_again)
    assert points > 20
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_an_exception_at_every_point_where_a_member_is_made_and_then_making_it_again() -> None:
    """Nothing keeps the name but a member that lives."""

    @contextlib.contextmanager
    def arrange() -> Iterator[Store]:
        with tempfile.TemporaryDirectory() as directory, cues.open(directory, durability="process") as store:
            store.queue("src").appender().write_many([{"n": n} for n in range(MESSAGES)])
            yield store

    def again(store: Store, place: str) -> None:
        with Member(store, "src", "g", name="x") as member:
            assert [message["n"] for message in member.read_many(MESSAGES)] == list(range(MESSAGES))

    points, found = interruptions.faults(arrange, lambda store: Member(store, "src", "g", name="x"), again)
    assert points > 60
    assert not found, "\n".join(found)
