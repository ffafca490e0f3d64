"""Sessions: read, transform, write and move the position in one commit; and every doubt that makes an abort."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import Child
from sets import slow_except

import cues
from cues import faults, groups, testing
from cues.errors import CodecError, InvalidArgument, QueueNotFound, StoreFull
from cues.groups import TRY_ABORT, TRY_COMMIT, Member, Reason, Session
from cues.groups.sticky import Partition
from cues.groups.table import GroupTable
from cues.queues.store import Store

PARTITIONS = 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with cues.open(tmp_path / "store", durability="process") as store:
        make(store)
        yield store


def make(store: Store, count: int = 0) -> None:
    store.queue("orders", partitions=PARTITIONS, key="user").appender().write_many(numbered(count))
    store.queue("invoices", partitions=3, key="user")
    store.queue("notes")


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"user": f"u{n % 10}", "n": n} for n in range(count)]


def fill(store: Store, count: int) -> None:
    store.queue("orders").appender().write_many(numbered(count))


def step(member: Member, n: int = 10) -> tuple[list[dict[str, Any]], Any]:
    """One session that copies up to ``n`` messages, and its outcome."""
    with member.session() as session:
        messages = session.read_many(n)
        session.write_many("invoices", messages)
        return messages, session.end(TRY_COMMIT)


def finish(member: Member) -> None:
    """Steps until there is nothing left."""
    while sum(member.lag().values()):
        with member.session() as session:
            session.write_many("invoices", session.read_many(7, timeout=1))
            session.end(TRY_COMMIT)


def history(store: Store, count: int) -> testing.History:
    """The judgement of all that was written, key by key."""
    by_key: dict[str, list[Any]] = {}
    for message in numbered(count):
        by_key.setdefault(message["user"], []).append(message)
    found = [m for n in range(3) for m in testing.messages(store, f"invoices/{n}")]
    return testing.check_history(by_key, found)


# --- one commit -----------------------------------------------------------------------------------------


def test_outputs_and_position_are_one_commit(store: Store) -> None:
    fill(store, 40)
    with Member(store, "orders", "g") as member:
        with member.session() as session:
            messages = session.read_many(5)
            for message in messages:
                session.write("invoices", message)
                session.write("notes", {"seen": message["n"]})
            assert session.partition is not None
            assert len(store.queue("invoices")) == len(store.queue("notes")) == 0
            assert sum(member.lag().values()) == 40
            assert session.end(TRY_COMMIT) == (True, None)
        assert sum(member.lag().values()) == 40 - len(messages)
        assert len(store.queue("invoices")) == len(messages) > 0
        assert [message["seen"] for message in testing.messages(store, "notes")] == [m["n"] for m in messages]
        finish(member)
    assert history(store, 40).exact


def test_a_session_is_over_one_partition(store: Store) -> None:
    fill(store, 100)
    with Member(store, "orders", "g") as member:
        with member.session() as session:
            first = session.read()
            rest = list(session)
            users = {message["user"] for message in [first, *rest] if message}
            partition = session.partition
            assert partition is not None
            assert session.envelope is not None and session.envelope.index == len(rest) + 1
            assert session.end(TRY_COMMIT).committed
        assert users == {m["user"] for m in testing.messages(store, f"orders/{partition[1]}")}
        assert member.lag()[partition] == 0
        with member.session() as session:  # the next takes another
            session.read()
            assert session.partition != partition


def test_an_empty_session_commits_without_a_transaction(store: Store) -> None:
    with Member(store, "orders", "g") as member:
        before = member.table.look().row
        with member.session() as session:
            assert session.read() is None
            session.read_many(5)
            assert session.end(TRY_COMMIT) == (True, None)
        member.read()
        assert member.table.look().row.generation == before.generation


def test_a_session_without_input_writes_as_long_as_it_is_a_member(store: Store) -> None:
    with Member(store, "orders", "g") as member:
        with member.session() as session:
            session.write("notes", {"x": 1})
            assert session.end(TRY_COMMIT).committed
        with member.session() as session:
            member.table.remove({member.name: member.holdings.id})
            session.write("notes", {"x": 2})
            assert session.end(TRY_COMMIT) == (False, Reason.MOVED)
    assert testing.messages(store, "notes") == [{"x": 1}]


def test_a_checkpoint_is_committed_with_the_step(store: Store) -> None:
    fill(store, 40)
    with Member(store, "orders", "g") as member:
        with member.session() as session:
            session.read()
            partition = session.partition
            assert session.checkpoint == b""
            assert session.end(TRY_COMMIT, checkpoint=b"one").committed
        assert partition is not None
        assert member.checkpoints()[partition] == b"one"
        with member.session() as session:
            session.read()
            assert not session.end(TRY_ABORT, checkpoint=b"two").committed
        assert sorted(member.checkpoints().values()) == [b"", b"", b"", b"one"]


def test_messages_of_all_kinds_keep_their_order(store: Store) -> None:
    """With metadata of their own, large ones and small ones, to one queue."""
    messages = [{"n": n} if n % 3 else {"n": n, "q/meta": {"from": n}} for n in range(300)]
    messages[100] = {"n": 100, "large": "x" * 20_000}
    with Member(store, "orders", "g") as member, member.session() as session:
        for message in messages:
            session.write("notes", message)
        assert session.end(TRY_COMMIT).committed
    found = testing.messages(store, "notes")
    assert [message["n"] for message in found] == list(range(300))
    assert len(found[100]["large"]) == 20_000


def test_outputs_are_in_the_members_store(store: Store, tmp_path: Path) -> None:
    fill(store, 40)
    with cues.open(tmp_path / "other") as other, Member(store, "orders", "g") as member, member.session() as session:
        session.read()
        with pytest.raises(InvalidArgument, match="one commit is in one store"):
            session.write(other.queue("invoices"), {"x": 1})
        assert session.end(TRY_COMMIT) == (False, Reason.APPEND)


# --- aborts ---------------------------------------------------------------------------------------------


def test_an_abort_gives_the_same_messages_again(store: Store) -> None:
    """It also drops the messages that were read ahead, so that they do not come before these."""
    fill(store, 400)
    with Member(store, "orders", "g") as member:
        for how in range(3):
            with member.session() as session:
                messages = session.read_many(5)
                partition = session.partition
                messages[0]["spoilt"] = True
                session.write_many("invoices", messages)
                if how:
                    assert session.end(TRY_ABORT) == (False, Reason.ASKED)
            assert partition is not None
            with member.session() as session:
                again: list[Any] = []
                while session.partition is None or len(again) < 5:
                    again += session.read_many(5 - len(again))
                    if session.partition != partition:
                        break
                if session.partition == partition:
                    assert [m["n"] for m in again] == [m["n"] for m in messages]
                    assert "spoilt" not in again[0]
        assert len(store.queue("invoices")) == 0
        finish(member)
    assert history(store, 400).exact


def test_an_error_on_the_way_aborts(store: Store) -> None:
    fill(store, 40)
    with Member(store, "orders", "g") as member:
        with pytest.raises(ZeroDivisionError), member.session() as session:
            session.write_many("invoices", session.read_many(5))
            raise ZeroDivisionError
        assert sum(member.lag().values()) == 40
        finish(member)
    assert history(store, 40).exact


@pytest.mark.parametrize(
    ("queue", "message", "error"),
    [
        ("invoices", {"user": "a", "x": object()}, CodecError),
        ("invoices", {"no": "user"}, InvalidArgument),
        ("notes", "no dict", InvalidArgument),
        ("nots", {"x": 1}, QueueNotFound),
    ],
)
def test_a_failed_write_makes_the_step_abort_only(store: Store, queue: str, message: Any, error: type) -> None:
    """Other systems commit what did succeed when they are asked to."""
    fill(store, 40)
    with Member(store, "orders", "g") as member:
        with member.session() as session:
            session.write_many("invoices", session.read_many(5))
            with pytest.raises(error):
                session.write(queue, message)
            assert session.end(TRY_COMMIT) == (False, Reason.APPEND)
        assert len(store.queue("invoices")) == 0
        finish(member)
    assert history(store, 40).exact


def test_a_partition_that_was_taken_over_aborts_its_step_and_no_other(store: Store) -> None:
    """a and b have a step in their hands; a's partitions are taken over. b commits."""
    fill(store, 400)
    with Member(store, "orders", "g", lease_s=3600) as a, Member(store, "orders", "g", lease_s=3600) as b:
        while len(a.assigned) != 2 or len(b.assigned) != 2:
            for member in (a, b):
                member.holdings.stale()
                with member.session() as session:
                    session.read()
        with a.session() as late, b.session() as session:
            late.write_many("invoices", late.read_many(5))
            session.write_many("invoices", session.read_many(5))
            # As if a's lease had run out and somebody had buried it.
            a.table.remove({a.name: a.holdings.id})
            assert session.end(TRY_COMMIT).committed
            while not step(b)[0] or len(b.assigned) < PARTITIONS:
                b.holdings.stale()
            partition = late.partition
            while partition is not None and b.positions()[partition] == 1:
                step(b)
            assert late.end(TRY_COMMIT) == (False, Reason.MOVED)
        finish(b)
        assert a.read() is None
    assert history(store, 400).exact


def test_a_rebalance_waits_for_the_step_and_does_not_abort_it(store: Store) -> None:
    """The plan gives the partition away in the middle of the step: nothing more is read, but the step commits, and
    only then the partition is another's."""
    last = ("orders", PARTITIONS - 1)  # of a's four the plan takes the last two
    store.queue("orders").partition(last[1]).appender().write_many([{"n": n} for n in range(40)])
    with Member(store, "orders", "g", name="a") as a, a.session() as session:
        messages = session.read_many(3)
        assert session.partition == last
        with Member(store, "orders", "g", name="b") as b:
            assert b.read() is None
            a.holdings.stale()
            assert session.read_many(3) == []
            b.holdings.stale()
            assert b.read() is None
            assert last in a.assigned
            session.write_many("notes", messages)
            assert session.end(TRY_COMMIT).committed
            a.holdings.stale()
            assert a.read() is None
            assert b.read(block=True, timeout=30) == {"n": 3}
            assert b.partition == last
    assert testing.messages(store, "notes") == messages


def test_a_seek_aborts_the_step(store: Store) -> None:
    fill(store, 40)
    with Member(store, "orders", "g") as a:
        with a.session() as session:
            session.write_many("invoices", session.read_many(5))
            with Member(store, "orders", "g") as other:
                other.seek("start", "orders")
            assert session.end(TRY_COMMIT) == (False, Reason.SOUGHT)
        finish(a)
    assert history(store, 40).exact


def test_a_queue_that_grew_in_the_middle_aborts_the_step(store: Store) -> None:
    """Its messages were placed on other partitions than they belong to now."""
    fill(store, 40)
    with Member(store, "orders", "g") as member:
        with member.session() as session:
            session.write_many("invoices", session.read_many(5))
            store.queue("invoices").grow(8)
            assert session.end(TRY_COMMIT) == (False, Reason.CHANGED)
        finish(member)
        assert len(store.queue("invoices")) == 40
        assert store.queue("invoices").partitions == 8


# --- several partitions and queues ----------------------------------------------------------------------


def both(store: Store, count: int) -> None:
    """Messages of two queues."""
    fill(store, count)
    store.queue("payments", partitions=2, key="user").appender().write_many(numbered(count))


def copy_all(session: Session, n: int = 1000) -> dict[Partition, list[dict[str, Any]]]:
    """Read, and write each message to the queue of its kind."""
    polled = session.poll(n=n)
    for (queue, _), messages in polled.items():
        session.write_many({"orders": "invoices", "payments": "notes"}[queue], messages)
    return polled


def test_a_session_over_all_partitions_is_one_commit(store: Store) -> None:
    both(store, 40)
    with Member(store, ["orders", "payments"], "g") as member:
        with member.session(partitions="all") as session:
            polled = copy_all(session)
            assert list(session.partitions) == sorted(polled) and {queue for queue, _ in polled} == {
                "orders",
                "payments",
            }
            assert sum(map(len, polled.values())) == 80
            assert sum(member.lag().values()) == 80 and len(store.queue("invoices")) == 0
            assert session.partition in polled and session.read() is None
            assert session.end(TRY_COMMIT, checkpoint={("payments", 1): b"p", ("orders", 0): b"o"}) == (True, None)
        assert sum(member.lag().values()) == 0
        assert {p: c for p, c in member.checkpoints().items() if c} == {("payments", 1): b"p", ("orders", 0): b"o"}
        with member.session(partitions="all") as session:
            fill(store, 4)
            session.read_many(2)
            session.read_many(2)
            assert session.end(TRY_COMMIT, checkpoint=b"all").committed
            assert {p for p, c in member.checkpoints().items() if c == b"all"} == set(session.partitions)
    assert history(store, 40).exact
    assert len(testing.messages(store, "notes")) == 40


def test_what_a_session_over_all_partitions_refuses(store: Store) -> None:
    with Member(store, "orders", "g") as member:
        with pytest.raises(InvalidArgument, match="'one' or 'all'"):
            member.session(partitions="two")  # type: ignore[arg-type]
        with member.session(partitions="all") as session:
            with pytest.raises(InvalidArgument, match="has not read"):
                session.end(TRY_COMMIT, checkpoint={("orders", 0): b"x"})
            assert session.end(TRY_COMMIT).committed


def test_an_abort_gives_the_messages_of_all_partitions_again(store: Store) -> None:
    both(store, 40)
    with Member(store, ["orders", "payments"], "g") as member:
        with member.session(partitions="all") as session:
            first = copy_all(session, 33)
            session.end(TRY_ABORT)
        with member.session(partitions="all") as session:
            again = copy_all(session)
            assert all(again[partition][: len(found)] == found for partition, found in first.items())
            assert session.end(TRY_COMMIT).committed
        assert sum(member.lag().values()) == 0
    assert history(store, 40).exact


def taken_from(store: Store, partition: Partition) -> None:
    """Another member takes one partition over, and gives it back: only its epoch tells."""
    table = GroupTable(store, "g")
    claim = table.look().claims[partition]
    table.release(claim.owner, [partition])


@pytest.mark.parametrize("change", ["taken", "sought"])
def test_one_changed_partition_aborts_the_whole_session(store: Store, change: str) -> None:
    """The other partitions do not move, and no output is written."""
    both(store, 40)
    with Member(store, ["orders", "payments"], "g") as member:
        with member.session(partitions="all") as session:
            copy_all(session)
            if change == "taken":
                taken_from(store, ("payments", 1))
            else:
                groups.seek(store, "g", "start", ("payments", 1))  # to where it is
            reason = {"taken": Reason.MOVED, "sought": Reason.SOUGHT}[change]
            assert session.end(TRY_COMMIT) == (False, reason)
        assert sum(member.lag().values()) == 80
        assert len(store.queue("invoices")) == len(store.queue("notes")) == 0
        while sum(member.lag().values()):
            with member.session(partitions="all") as session:
                copy_all(session)
                session.end(TRY_COMMIT)
    assert history(store, 40).exact
    assert len(testing.messages(store, "notes")) == 40


def test_a_rebalance_ends_the_reads_of_a_session_and_does_not_abort_it(store: Store) -> None:
    """A partition that it has read is to move: it reads nothing more, from no partition, until its commit."""
    fill(store, 40)
    with Member(store, "orders", "g", name="a", lease_s=3600) as a, a.session(partitions="all") as session:
        first = session.read_many(12)
        assert len(first) == 12 and len(session.partitions) > 1
        with Member(store, "orders", "g", name="b", lease_s=3600) as b:
            assert b.read() is None
            a.holdings.stale()
            assert session.read_many(40) == []
            assert session.read_many(40, timeout=None) == []  # it does not wait either
            b.holdings.stale()
            assert b.read() is None and b.assigned == []
            session.write_many("invoices", first)
            assert session.end(TRY_COMMIT).committed
            a.holdings.stale()
            a.read()
            a.commit()
            b.holdings.stale()
            assert b.read(block=True, timeout=30) is not None


@pytest.mark.parametrize(("point", "made"), [("session.inside", False), ("session.after", True)])
def test_a_commit_of_all_partitions_whose_outcome_is_unknown(store: Store, point: str, made: bool) -> None:
    both(store, 40)

    def doubt(_: str) -> None:
        faults.disarm()
        raise Doubt

    with Member(store, ["orders", "payments"], "g") as member:
        with member.session(partitions="all") as session:
            copy_all(session)
            faults.arm(point, 1, doubt)
            with pytest.raises(Doubt):
                session.end(TRY_COMMIT)
            assert session.end(TRY_COMMIT) == (False, Reason.UNKNOWN)
        with member.session(partitions="all") as session:
            assert sum(map(len, copy_all(session).values())) == (0 if made else 80)
            assert session.end(TRY_COMMIT).committed
    assert history(store, 40).exact
    assert len(testing.messages(store, "notes")) == 40


# --- the end --------------------------------------------------------------------------------------------


def test_a_session_ends_once(store: Store) -> None:
    fill(store, 40)
    with Member(store, "orders", "g") as member, member.session() as session:
        session.read()
        with pytest.raises(InvalidArgument, match="TRY_COMMIT"):
            session.end(True)  # type: ignore[arg-type]
        session.end(TRY_COMMIT)
        for late in (lambda: session.end(TRY_COMMIT), session.read, lambda: session.write("notes", {"x": 1})):
            with pytest.raises(InvalidArgument, match="has ended"):
                late()


class Doubt(Exception):
    """The exception of a commit that may have been made."""


@pytest.mark.parametrize(("point", "made"), [("session.inside", False), ("session.after", True)])
def test_a_commit_whose_outcome_is_unknown_is_never_a_success(store: Store, point: str, made: bool) -> None:
    """An exception comes out of the commit, before or after it was made; to end it again answers unknown.

    In both cases the next read continues from the store: nothing is lost and nothing is doubled.
    """
    fill(store, 40)

    def doubt(_: str) -> None:
        faults.disarm()
        raise Doubt

    with Member(store, "orders", "g") as member:
        with member.session() as session:
            messages = session.read_many(5)
            session.write_many("invoices", messages)
            faults.arm(point, 1, doubt)
            with pytest.raises(Doubt):
                session.end(TRY_COMMIT)
            for _ in range(2):
                assert session.end(TRY_COMMIT) == (False, Reason.UNKNOWN)
                assert session.end(TRY_ABORT) == (False, Reason.UNKNOWN)
        assert len(store.queue("invoices")) == (len(messages) if made else 0)
        finish(member)
    assert history(store, 40).exact


def test_a_full_store_is_raised_and_the_step_comes_again(tmp_path: Path) -> None:
    with cues.open(tmp_path / "small", durability="process", max_map_size=2 << 20) as store:
        make(store, 40)
        with Member(store, "orders", "g") as member:
            with member.session() as session:
                assert session.read_many(5)
                session.write("notes", {"large": "x" * (4 << 20)})
                with pytest.raises(StoreFull):
                    session.end(TRY_COMMIT)
                assert session.end(TRY_COMMIT) == (False, Reason.UNKNOWN)
            assert sum(member.lag().values()) == 40
            assert len(store.queue("notes")) == 0
            finish(member)
        assert history(store, 40).exact


def test_closing_the_member_aborts_its_session(store: Store) -> None:
    fill(store, 40)
    with Member(store, "orders", "g") as member:
        session = member.session()
        session.write_many("invoices", session.read_many(5))
    with pytest.raises(InvalidArgument, match="aborted"):
        session.end(TRY_COMMIT)
    with Member(store, "orders", "g") as member:
        finish(member)
    assert history(store, 40).exact


def test_a_session_waits_for_a_message(store: Store) -> None:
    with Member(store, "orders", "g") as member, member.session() as session:
        threading.Timer(0.05, lambda: fill(store, 1)).start()
        assert session.read(block=True, timeout=30) == {"user": "u0", "n": 0}


# --- death ----------------------------------------------------------------------------------------------

WORKS = """
import sys, cues
from cues.groups import TRY_COMMIT, Member
with cues.open(sys.argv[1]) as store, Member(store, "orders", "g") as member:
    while sum(member.lag().values()):
        with member.session() as session:
            session.write_many("invoices", session.read_many(7, timeout=1))
            session.end(TRY_COMMIT)
print("done")
"""

WORKS_ON_ALL = WORKS.replace("member.session()", 'member.session(partitions="all")')


@pytest.mark.parametrize("works", [WORKS, WORKS_ON_ALL], ids=["one", "all"])
@pytest.mark.parametrize("point", slow_except(["session.inside"], faults.GROUP_POINTS))
def test_death_at_every_point(point: str, works: str, tmp_path: Path, checked: Any) -> None:
    """Killed at the first hits of every point, one process after the other on one store; then it is finished."""
    path = tmp_path / "store"
    with cues.open(path, durability="process") as store:
        make(store, 200)
    died = 0
    for hit in range(1, 6):
        with Child(works, path, CUES_FAULT=f"{point}:{hit}") as child:
            died += child.returncode() == -signal.SIGKILL
        checked(path)
    assert died >= 3
    with cues.open(path) as store:
        with Member(store, "orders", "g") as member:
            finish(member)
        assert history(store, 200).exact


# --- the stories of KIP-447 -------------------------------------------------------------------------------
#
# Two members. One has read, transformed and written, and its transaction is pending. Then it dies or stops: before the
# end of the transaction, in it, or after it. The other must never read the messages before that end is decided.

PENDING = """
import sys, cues
from cues.groups import TRY_COMMIT, Member
with cues.open(sys.argv[1]) as store, Member(store, "orders", "g", lease_s=float(sys.argv[2])) as member:
    with member.session(partitions=sys.argv[3]) as session:
        session.write_many("invoices", session.read_many(1000, timeout=None))
        print(len(session.partitions))
        sys.stdin.readline()
        ended = session.end(TRY_COMMIT)
    print(*ended)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("partitions", ["one", "all"])
@pytest.mark.parametrize(
    ("when", "committed"),
    [("before", False), ("session.before", False), ("session.inside", False), ("session.after", True), ("after", True)],
)
def test_a_member_dies_with_a_pending_transaction(store: Store, when: str, committed: bool, partitions: str) -> None:
    """The other takes over at once, and reads exactly what was not committed."""
    fill(store, 40)
    fault = {} if when in ("before", "after") else {"CUES_FAULT": when}
    with Child(PENDING, store.path, 3600, partitions, **fault) as child:
        pending = int(child.line())
        assert (pending > 1) is (partitions == "all")
        with Member(store, "orders", "g") as other:
            for _ in range(3):
                other.holdings.stale()
                assert other.read() is None  # the transaction is pending
            if when != "before":
                child.say()
            if when == "after":
                assert child.line() == "True None"
            if when in ("before", "after"):
                child.signal(signal.SIGKILL)
            assert child.returncode() == -signal.SIGKILL
            assert (len(store.queue("invoices")) > 0) is committed
            finish(other)
    assert history(store, 40).exact


@pytest.mark.parametrize("partitions", ["one", "all"])
def test_a_stopped_member_comes_back_with_a_pending_transaction(store: Store, partitions: str) -> None:
    """It was away for longer than its lease, and the other has taken over: a zombie, whose commit is refused."""
    fill(store, 40)
    with Child(PENDING, store.path, 0.3, partitions) as child:
        child.line()
        child.signal(signal.SIGSTOP)
        with Member(store, "orders", "g") as other:
            finish(other)
            child.signal(signal.SIGCONT)
            child.say()
            assert child.line() == "False moved"
            child.say()
            child.end()
    assert history(store, 40).exact
