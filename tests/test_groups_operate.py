"""Groups from outside: what a program that is no member sees, moves and deletes; groups that expire."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import terminal
from children import Child

import cues
from cues import groups, testing
from cues.base import names
from cues.errors import AlreadyRunning, Fenced, InvalidArgument
from cues.groups import TRY_COMMIT, Member, Relative, describe, forget, list_groups
from cues.queues.store import Store
from cues.records import sealed
from cues.storage import transaction

PARTITIONS = 3
KEPT_S = 1000.0
"""A lease that is to outlast its test."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with cues.open(tmp_path / "store", durability="process") as store:
        make(store)
        yield store


def make(store: Store) -> None:
    """Ten messages on each partition."""
    queue = store.queue("orders", partitions=PARTITIONS, key="n")
    for number in range(PARTITIONS):
        queue.partition(number).appender().write_many([{"n": n} for n in range(10)])
    store.queue("out")


def group_rows(store: Store) -> dict[bytes, bytes]:
    """Every row of every group."""
    with store.core.view() as txn:
        found = transaction.rows(txn, b"\0")
        return {key: bytes(raw) for key, raw in found if key.split(b"\0")[1] in (b"group", b"member", b"claim")}


def begun(store: Store, group: str = "billing", **options: Any) -> None:
    """A group that has read and committed five messages of each partition, and has no member now."""
    with Member(store, "orders", group, **options) as member:
        groups.seek(store, group, 6)
        member.poll(n=1)


# --- looking --------------------------------------------------------------------------------------


def test_looking_changes_no_row_and_fences_nobody(store: Store) -> None:
    """A step is under way while a program, a command and a read-only handle look at its group."""
    with Member(store, "orders", "billing", lease_s=KEPT_S) as member, member.session() as session:
        session.write_many("out", session.read_many(4))
        before = group_rows(store)
        assert before
        assert [group.group for group in list_groups(store)] == ["billing"]
        seen = describe(store, "billing")
        with cues.Store(store.path, readonly=True) as reader:
            assert describe(reader, "billing").partitions == seen.partitions
        assert terminal.cues("status", store.path, "--json").code == 0
        assert group_rows(store) == before
        assert session.end(TRY_COMMIT).committed
    assert [member.queues for member in seen.members] == [("orders",)]
    assert [(p.log, p.position, p.lag) for p in seen.partitions] == [
        ("orders", 1, 10), ("orders/1", 1, 10), ("orders/2", 1, 10),
    ]  # fmt: skip
    assert seen.lag == 30 and not seen.idle and seen.idle_since is None


def test_a_group_that_is_missing_is_named_with_the_nearest(store: Store) -> None:
    begun(store)
    for call in (describe, forget, lambda store, group: groups.seek(store, group, "start")):
        with pytest.raises(InvalidArgument, match=r"no group 'biling'; it has billing") as failed:
            call(store, "biling")
        assert failed.value.hint == "did you mean 'billing'?"


def test_a_group_without_members_is_listed_with_the_time(store: Store) -> None:
    before = datetime.now(UTC)
    begun(store)
    seen = describe(store, "billing")
    assert seen.idle and seen.idle_since is not None and before <= seen.idle_since <= datetime.now(UTC)
    shown = terminal.cues("status", store.path, "--table").out
    assert f"billing has no members since {seen.idle_since.isoformat()[:19]}Z" in shown
    assert f"cues forget {store.path}#group:billing" in shown
    row = json.loads(terminal.cues("status", store.path, "--json").out.splitlines()[-1])
    assert row["idle"] and datetime.fromisoformat(row["idle_since"]) == seen.idle_since and row["expire_s"] is None


def test_a_place_that_is_kept_is_a_member(store: Store) -> None:
    begun(store, name="ann", lease_s=KEPT_S)
    assert not describe(store, "billing").idle


KILLED = """
import sys, cues
from cues.groups import Member
with cues.open(sys.argv[1]) as store, Member(store, "orders", "billing") as member:
    member.poll()
    print("in")
    sys.stdin.readline()
    member.poll()
    print("again")
    sys.stdin.readline()
"""


def test_a_killed_member_is_gone_since_its_last_beat(store: Store) -> None:
    """Nobody wrote a row when it died. Its lease tells the time, which is after that of its last row."""
    with Child(KILLED, store.path) as child:
        child.line()
        joined_ns = describe(store, "billing")
        assert not joined_ns.idle
        between = datetime.now(UTC)
        child.say()
        child.line()
        child.signal(signal.SIGKILL)
        child.returncode()
    seen = describe(store, "billing")
    assert [member.state for member in seen.members] == ["dead"]
    assert seen.idle and seen.idle_since is not None
    # The file system keeps coarser times than the clock: one tick of the kernel.
    assert seen.idle_since > between - timedelta(milliseconds=20)


# --- moving ---------------------------------------------------------------------------------------


def test_a_seek_from_outside_moves_a_group_without_members(store: Store) -> None:
    begun(store)
    assert groups.seek(store, "billing", "end") == dict.fromkeys([("orders", n) for n in range(3)], 11)
    assert groups.seek(store, "billing", Relative(-4), ("orders", 1), ("orders", 2)) == {
        ("orders", 1): 7, ("orders", 2): 7,
    }  # fmt: skip
    with Member(store, "orders", "billing") as member:
        assert {p: [m["n"] for m in found] for p, found in member.poll(n=100).items()} == {
            ("orders", 1): [6, 7, 8, 9], ("orders", 2): [6, 7, 8, 9],
        }  # fmt: skip


def test_a_seek_from_outside_is_all_or_nothing(store: Store) -> None:
    """One of its partitions has no such index, and the queue of another call is not the group's."""
    begun(store)
    store.queue("orders").partition(0).appender().write({"n": 10})
    before = group_rows(store)
    with pytest.raises(InvalidArgument, match=r"seek\(12\) on orders/1: the queue ends before 11"):
        groups.seek(store, "billing", 12)
    with pytest.raises(InvalidArgument, match="group billing does not read 'out'"):
        groups.seek(store, "billing", "start", "out")
    with pytest.raises(InvalidArgument, match="'orders' has no partition 3"):
        groups.seek(store, "billing", "start", ("orders", 3))
    assert group_rows(store) == before


def test_a_seek_from_outside_fences_the_step_of_a_member(store: Store) -> None:
    with Member(store, "orders", "billing") as member:
        found = member.poll(n=100)
        assert len(found) == PARTITIONS
        groups.seek(store, "billing", "start")  # to the index at which they are: only the epoch tells
        with pytest.raises(Fenced) as failed:
            member.commit()
        assert failed.value.reason == "seek"
        assert member.poll(n=100) == found


def test_the_commands_move_and_delete_a_group(store: Store) -> None:
    begun(store)
    target = f"{store.path}#group:billing"
    moved = terminal.cues("seek", target, "--to", "start", "--yes", "--json")
    assert json.loads(moved.out) == {"group": "billing", "positions": {"orders": 1, "orders/1": 1, "orders/2": 1}}
    assert "orders/1 from 6 to 1" in moved.err
    moved = terminal.cues("seek", target, "--to", "7", "--tailer", "orders/2", "--yes", "--json")
    assert json.loads(moved.out)["positions"] == {"orders/2": 7}
    for words, error in (
        (["seek", target, "--to", "7", "--yes"], "3 partitions, and an index belongs to one"),
        (["seek", target, "--to", "end", "--tailer", "rates", "--yes"], "billing does not read 'rates'"),
        (["seek", target, "--to", "end", "--again", "--yes"], "a group has no sinks"),
        (["seek", f"{store.path}#group:biling", "--to", "end", "--yes"], "has no group 'biling'; it has billing"),
        (["seek", target, "--to", "12", "--tailer", "orders/1", "--yes"], "ends before 11"),
        (["forget", f"{store.path}#orders", "--yes"], "deletes consumer groups"),
        (["forget", f"{store.path}#group:biling", "--yes"], "Try: name one of those, if it is gone for good."),
        (["forget", target], "no terminal to ask on"),
    ):
        before = group_rows(store)
        refused = terminal.cues(*words)
        assert refused.code and error in refused.err and "Try:" in refused.err, refused
        assert group_rows(store) == before
    with Member(store, "orders", "billing"):
        refused = terminal.cues("forget", target, "--yes")
        assert refused.code == 7 and "has a living member" in refused.err
    assert json.loads(terminal.cues("forget", target, "--yes", "--json").out) == {"group": "billing"}
    assert group_rows(store) == {}


# --- expiry ---------------------------------------------------------------------------------------


def test_retention_forgets_a_group_that_had_no_member_for_its_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistyped group and one that never expires; only the first is let go, and the log says so."""
    day = timedelta(days=1)
    with cues.open(tmp_path / "store", durability="process") as store, testing.Clock() as time:
        queue, other = store.queue("q", retention="read"), store.queue("other")

        def write() -> None:
            for n in range(120):
                queue.appender().write({"n": n})

        write()
        with Member(store, ["q", "other"], "mistyped", expire_s=day.total_seconds()), Member(store, "q", "kept"):
            time.set(time.now + day * 3)
            write()  # it has a member, whatever the clock says
            groups.seek(store, "kept", "end")
        time.advance(day / 2)
        write()
        assert [group.group for group in list_groups(store)] == ["kept", "mistyped"]
        assert len(queue) == 360
        time.advance(day)
        assert [(group.group, group.expire_s) for group in list_groups(store)] == [("kept", None), ("mistyped", 86400)]
        write()  # here
        assert [group.group for group in list_groups(store)] == ["kept"]
        assert len(queue) < 360
        assert not other.tailer().read()
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert told == [
            "the group mistyped is forgotten: it had no member for its expire_s, and retention of q waited for it"
        ]
        assert [key for key in group_rows(store) if b"mistyped" in key] == []


def test_the_place_of_a_static_member_and_a_seek_keep_a_group(store: Store) -> None:
    queue = store.queue("q", retention="read")
    queue.appender().write({"n": 1})
    with testing.Clock() as time:
        with Member(store, "q", "kept", name="ann", lease_s=KEPT_S, expire_s=60):
            pass
        time.advance(timedelta(seconds=100))
        queue.appender().write({"n": 2})
        assert not describe(store, "kept").idle
        time.advance(KEPT_S)
        groups.seek(store, "kept", "start")  # it is used, so the time begins anew
        time.advance(timedelta(seconds=50))
        queue.appender().write({"n": 3})
        assert describe(store, "kept").idle
        time.advance(timedelta(seconds=50))
        queue.appender().write({"n": 4})
        assert list_groups(store) == []


def test_expire_s_is_of_the_member_that_joined_last_and_is_checked(store: Store) -> None:
    for wrong in (0, -1, True, "1d", float("nan")):
        with pytest.raises(InvalidArgument, match="expire_s is"):
            Member(store, "orders", "g", expire_s=wrong)  # type: ignore[arg-type]
    with Member(store, "orders", "g", expire_s=60):
        assert describe(store, "g").expire_s == 60
        with Member(store, "orders", "g"):
            assert describe(store, "g").expire_s is None


def test_a_row_of_an_older_version_never_expires(store: Store) -> None:
    """It has three fields. The time since which it has no member is not known."""
    begun(store)
    with store.core.view() as txn:
        raw = bytes(txn.get(names.group_key("billing")))
    store.core.commit(lambda txn: sealed.put(txn, names.group_key("billing"), raw[:24]))
    seen = describe(store, "billing")
    assert seen.idle and seen.idle_since is None and seen.expire_s is None
    assert "billing has no members. Retention" in terminal.cues("status", store.path, "--table").out
    assert store.check() == []


# --- death ----------------------------------------------------------------------------------------

STARTS = "Member(store, 'orders', 'billing', start=4)"
MOVES = "groups.seek(store, 'billing', 'end')"
DELETES = "groups.forget(store, 'billing')"
EXPIRES = "time.advance(timedelta(days=1)); store.queue('q').appender().write({'n': 2})"

DIES = """
import sys
from datetime import timedelta
import cues
from cues import groups, testing
from cues.groups import Member
with cues.open(sys.argv[1]) as store, testing.Clock() as time:
    {}
"""


@pytest.mark.parametrize(
    ("call", "point", "made"),
    [
        (STARTS, "group.inside", False),
        (STARTS, "group.after", True),
        (MOVES, "group.inside", False),
        (MOVES, "group.after", True),
        (DELETES, "group.inside", False),
        (DELETES, "group.after", True),
        (EXPIRES, "append.inside", False),
        (EXPIRES, "append.after", True),
    ],
)
def test_death_leaves_a_change_of_a_group_made_or_not_made(
    call: str, point: str, made: bool, tmp_path: Path, checked: Any
) -> None:
    path = tmp_path / "store"
    with cues.open(path, durability="process") as store:
        make(store)
        store.queue("q", retention="read").appender().write({"n": 1})
        if call != STARTS:
            with Member(store, ["orders", "q"], "billing", expire_s=60):
                groups.seek(store, "billing", 6, "orders")
    with Child(DIES.format(call), path, CUES_FAULT=point) as child:
        assert child.returncode() == -signal.SIGKILL
    checked(path)
    with cues.open(path) as store:
        known = {p.log: p.position for group in list_groups(store) for p in group.partitions if p.log != "q"}
        index = ({STARTS: 4, MOVES: 11} if made else {MOVES: 6, DELETES: 6, EXPIRES: 6}).get(call)
        assert known == ({} if index is None else dict.fromkeys(("orders", "orders/1", "orders/2"), index))
        assert len(group_rows(store)) == 0 or known
        with Member(store, "orders", "billing") as member:
            assert sum(map(len, member.poll(n=100).values())) == sum(member.lag().values())


def test_a_member_that_lives_is_never_forgotten(store: Store) -> None:
    with Member(store, "orders", "billing", lease_s=KEPT_S):
        before = group_rows(store)
        with pytest.raises(AlreadyRunning):
            forget(store, "billing")
        assert group_rows(store) == before
