"""Transactions of a store: appends and moves of named tailers, in one commit or not at all."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import interruptions
import pytest
import seeds
from children import Child

import cues
from cues import faults, testing
from cues.errors import (
    Closed,
    CodecError,
    ConcurrentUse,
    InvalidArgument,
    MessageTooLarge,
    QueueNotFound,
    ReservedKey,
    StoreReadOnly,
    TailerMoved,
)
from cues.queues.store import Store
from cues.steps.hashes import delivery_hash
from cues.steps.transaction import BlockTransaction

PARTITIONS = 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with cues.open(tmp_path / "store", durability="process") as store:
        make(store)
        yield store
        assert not store.check()


def make(store: Store, count: int = 0) -> None:
    store.queue("orders", metadata={"t"}).appender().write_many(numbered(count))
    store.queue("visits", partitions=PARTITIONS, key="user", metadata={"t"})
    store.queue("invoices", partitions=PARTITIONS, key="user")
    store.queue("notes")


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"user": f"u{n % 10}", "n": n} for n in range(count)]


def bill(store: Store, most: int = 7) -> int:
    """One transaction: an invoice and a note for each of the next orders; return how many there were."""
    with store.transaction() as t:
        orders = t.tailer("orders", "billing").read_many(most)
        for order in orders:
            t.write("invoices", order)
            t.write("notes", {"billed": order["n"]})
    return len(orders)


def expect_billed(store: Store, count: int) -> None:
    """Each of the first ``count`` orders has one invoice and one note, in order."""
    assert [note["billed"] for note in testing.messages(store, "notes")] == list(range(count))
    invoices = [m for n in range(store.queue("invoices").partitions) for m in testing.messages(store, f"invoices/{n}")]
    by_user: dict[str, list[Any]] = {}
    for order in numbered(count):
        by_user.setdefault(order["user"], []).append(order)
    assert testing.check_history(by_user, invoices).exact


# --- one commit -----------------------------------------------------------------------------------------


def test_messages_and_positions_are_one_commit(store: Store) -> None:
    make(store, 10)
    with store.transaction() as t:
        orders = list(t.tailer("orders", "billing"))
        visits = t.tailer("visits", "billing")
        t.write_many("invoices", orders)
        t.write("notes", {"count": len(orders)})
        t.write("visits", {"user": "u1"})
        assert visits.read() is None
        assert not len(store.queue("invoices")) and not len(store.queue("notes"))
        assert store.queue("orders").tailer("billing").positions == {0: 1}
        with store.core.view() as txn:
            before = txn.id()
    assert len(store.queue("invoices")) == 10 and len(store.queue("notes")) == 1
    assert store.queue("orders").tailer("billing").read() is None
    assert sum(map(len, t.indices.values())) == 12 and t.indices["notes"] == range(1, 2)
    with store.core.view() as txn:
        assert txn.id() == before + 1


def test_an_exception_rolls_everything_back(store: Store) -> None:
    make(store, 10)
    with pytest.raises(ZeroDivisionError), store.transaction() as t:
        t.write("notes", t.tailer("orders", "billing").read() or {})
        raise ZeroDivisionError
    assert not len(store.queue("notes")) and "rolled back" in repr(t)
    while bill(store):
        pass
    expect_billed(store, 10)


def test_an_abort_writes_nothing_and_ends_the_transaction(store: Store) -> None:
    make(store, 10)
    with store.transaction() as t:
        tailer = t.tailer("orders", "billing")
        t.write("notes", tailer.read() or {})
        t.abort()
        with pytest.raises(Closed, match="aborted"):
            t.write("notes", {})
        with pytest.raises(Closed, match="aborted"):
            tailer.read()
    assert not len(store.queue("notes"))
    assert store.queue("orders").tailer("billing").positions == {0: 1}


@pytest.mark.interpreted
def test_a_refused_message_is_not_part_of_the_transaction(store: Store) -> None:
    with store.transaction() as t:
        t.write("notes", {"n": 1})
        for queue, messages, error in (
            ("notes", [{"n": 2}, {"n": object()}], CodecError),
            ("notes", [{"q/x": 1}], ReservedKey),
            ("notes", ["text"], InvalidArgument),
            ("invoices", [{"no": "user"}], InvalidArgument),
            ("nots", [{}], QueueNotFound),
            (7, [{}], InvalidArgument),
        ):
            with pytest.raises(error):
                t.write_many(queue, messages)  # type: ignore[arg-type]
        t.write("notes", {"n": 3})
    assert testing.messages(store, "notes") == [{"n": 1}, {"n": 3}]
    assert "nots" not in store.queues()


def test_a_message_is_written_as_it_was_when_it_was_handed_over(store: Store) -> None:
    with store.transaction() as t:
        message = {"n": 1, "large": "x" * 20_000}
        t.write("notes", message)
        message["n"] = 2
        t.write("notes", {"n": 3, "q/meta": {"mine": 4}})
    assert [m["n"] for m in testing.messages(store, "notes")] == [1, 3]
    tailer = store.queue("notes").tailer(meta=True)
    assert tailer.read_many(2)[1]["q/meta"] == {"mine": 4}


def test_an_empty_transaction_commits_nothing(store: Store) -> None:
    make(store, 3)
    with store.transaction() as t:
        assert t.tailer("orders", "billing").peek() == {"user": "u0", "n": 0}
    assert t.hash is None and t.indices == {}
    with store.core.view() as txn:
        assert not [key for key, _ in txn.cursor() if b"billing" in key]


# --- tailers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, PARTITIONS])
def test_a_tailer_that_another_reader_moved_is_named_and_nothing_is_written(store: Store, partitions: int) -> None:
    queue = store.queue("orders" if partitions == 1 else "visits")
    queue.appender().write_many(numbered(10))
    with pytest.raises(TailerMoved) as raised, store.transaction() as t:
        t.write("notes", t.tailer(queue, "billing").read() or {})
        assert queue.tailer("billing").read() is not None
    error = raised.value
    assert error.queue.startswith(queue.id) and error.tailer == "billing"
    assert (error.expected, error.found) == (None, 2) or error.found == 1
    assert "'billing'" in str(error) and "Try: run the transaction again" in str(error)
    assert not len(store.queue("notes"))


def test_a_tailer_that_read_nothing_is_compared_too(store: Store) -> None:
    """The block decided on what it did not find."""
    with pytest.raises(TailerMoved), store.transaction() as t:
        if t.tailer("orders", "billing").read() is None:
            t.write("notes", {"empty": True})
        store.queue("orders").appender().write({"user": "a", "n": 0})
        store.queue("orders").tailer("billing").read()
    assert not len(store.queue("notes"))


def test_tailers_may_be_moved_and_are_the_same_for_one_name(store: Store) -> None:
    make(store, 10)
    with store.transaction() as t:
        tailer = t.tailer("orders", "billing")
        assert t.tailer(store.queue("orders"), "billing") is tailer
        tailer.to_index(5)
        assert store.queue("orders").tailer("billing").positions == {0: 1}
    assert store.queue("orders").tailer("billing").positions == {0: 5}
    with store.transaction() as t:
        t.tailer("visits", "billing").to_end()
        with pytest.raises(InvalidArgument, match="one tailer"):
            t.tailer("visits/2", "billing")


def test_all_partitions_are_read_also_those_that_are_added_in_the_block(store: Store) -> None:
    store.queue("visits").appender().write_many(numbered(40))
    with store.transaction() as t:
        tailer = t.tailer("visits", "billing")
        t.write_many("notes", tailer.read_many(40))
        store.queue("visits").grow(8)
        store.queue("visits").appender().write_many(numbered(40))
        t.write_many("notes", list(tailer))
    assert len(store.queue("notes")) == 80
    assert store.queue("visits").tailer("billing").read() is None


def test_two_readers_of_one_name_share_the_queue(store: Store) -> None:
    make(store, 60)

    def work() -> None:
        while True:
            with contextlib.suppress(TailerMoved):
                if not bill(store, 3):
                    return

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect_billed(store, 60)


# --- hash and provenance --------------------------------------------------------------------------------


def test_the_hash_is_that_of_the_ranges(store: Store) -> None:
    make(store, 10)
    store.queue("visits").appender().write_many(numbered(10))
    hashes = []
    for again in (True, False):
        with contextlib.suppress(ZeroDivisionError), store.transaction() as t:
            t.tailer("orders", "billing").read_many(4)
            visits = t.tailer("visits", "audit")
            visits.read_many(10)
            t.write("notes", {"n": 1})
            hashes.append([cursor.index for cursor in visits.cursors])
            if again:
                raise ZeroDivisionError
    identities = {name: store.queue(name).core.row().identity for name in ("orders", "visits")}
    ranges = [("billing.orders", identities["orders"], 1, 5)]
    for partition, index in enumerate(hashes[-1]):
        if index > 1:
            log = store.queue("visits").partition(partition).core.log.id
            ranges.append((f"audit.{log}", identities["visits"], 1, index))
    assert t.hash == delivery_hash("", 0, ranges) and hashes[0] == hashes[1]
    tailer = store.queue("notes").tailer(meta=True)
    message = tailer.read()
    assert message is not None and message["q/meta"]["q/hash"] == t.hash
    with store.transaction() as t:  # nothing was moved
        t.tailer("orders", "billing").peek()
        t.write("notes", {"n": 2})
    assert t.hash is None and tailer.read() == {"n": 2, "q/meta": {}}


def test_provenance_is_that_of_a_steps_outputs(tmp_path: Path) -> None:
    """The same messages through a stream and through transactions have the same origins, over two queues."""

    def twice(message: dict[str, Any]) -> dict[str, Any]:
        return {"out": [message, message]}

    def same(message: dict[str, Any]) -> dict[str, Any]:
        return message

    metas: list[list[Any]] = []
    for name in ("graph", "transactions"):
        with cues.open(tmp_path / name) as store:
            store.queue("in", metadata={"t"}).appender().write_many([{"n": n, "q/meta": {"own": n}} for n in range(5)])
            store.queue("out", metadata={"t"})
            store.queue("last")
            if name == "graph":
                graph = cues.Graph("g")
                graph.stream("in", {"out": "out"}, id="a")(twice)
                graph.stream("out", "last", id="b")(same)
                testing.run_until_idle(graph, store)
            else:
                for source, target, count in (("in", "out", 2), ("out", "last", 1)):
                    with store.transaction() as t:
                        for message in t.tailer(source, "copy"):
                            t.write_many(target, [message] * count)
            metas.append([message["q/meta"] for message in store.queue("last").tailer(meta=True)])
    assert len(metas[0]) == 10
    for step, transaction in zip(*metas):
        assert step.pop("q/hash") != transaction.pop("q/hash")
        assert step == transaction and step["q/queue"] and "own" in step


def test_origins_are_those_at_the_time_of_writing(store: Store) -> None:
    make(store, 3)
    store.queue("visits").appender().write({"user": "a"})
    with store.transaction() as t:
        orders, visits = t.tailer("orders", "x"), t.tailer("visits", "x")
        t.write("notes", {"before": True})
        orders.read()
        t.write_many("notes", [{}, {}])
        orders.read()
        visits.read()
        t.write("notes", {})
    found = [m["q/meta"].get("q/queue") for m in store.queue("notes").tailer(meta=True)]
    log = next(
        log for log in (store.queue("visits").partition(n).core.log.id for n in range(4)) if len(store.queue(log))
    )
    first = {"orders": {"q/t": 1}}
    assert found == [None, first, first, {"orders": {"q/t": 2}, log: {"q/t": 1}}]


# --- refusals -------------------------------------------------------------------------------------------


def test_a_queue_of_another_store_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    with cues.open(tmp_path / "other") as other, store.transaction() as t:
        far = other.queue("invoices")
        for call in (lambda: t.write(far, {"user": "a"}), lambda: t.tailer(far, "billing")):
            with pytest.raises(InvalidArgument, match=r"'invoices' is in the store .*other.*Try: use a cues.txn"):
                call()
        with other.transaction() as of_other:  # another store, another transaction
            of_other.write(far, {"x": 1})
    assert len(testing.messages(store, "notes")) == 0


def test_transactions_do_not_nest(store: Store, tmp_path: Path) -> None:
    with store.transaction() as t:
        t.write("notes", {"n": 1})
        with pytest.raises(InvalidArgument, match="do not nest"), store.transaction():
            pass
        with cues.open(store.path) as same, pytest.raises(InvalidArgument, match="do not nest"), same.transaction():
            pass
        with pytest.raises(Closed, match="is open"):
            t.__enter__()
    with store.transaction() as t:
        t.write("notes", {"n": 2})
    assert testing.messages(store, "notes") == [{"n": 1}, {"n": 2}]


def test_another_thread_has_transactions_of_its_own(store: Store) -> None:
    make(store, 3)
    errors: list[BaseException] = []

    def intrude() -> None:
        for call in (lambda: t.write("notes", {}), tailer.read, t.abort):
            try:
                call()
            except ConcurrentUse as error:
                errors.append(error)
        with store.transaction() as own:
            own.write("notes", {"n": "own"})

    with store.transaction() as t:
        tailer = t.tailer("orders", "billing")
        t.write("notes", {"n": 1})
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        assert testing.messages(store, "notes") == [{"n": "own"}]
    assert len(errors) == 3
    assert testing.messages(store, "notes") == [{"n": "own"}, {"n": 1}]


def test_a_transaction_is_used_in_one_block(store: Store, tmp_path: Path) -> None:
    t = store.transaction()
    with pytest.raises(Closed, match=r"has not begun.*with store.transaction"):
        t.write("notes", {})
    with t:
        t.write("notes", {"n": 1})
    for call in (lambda: t.write("notes", {}), lambda: t.tailer("orders", "x"), t.abort, t.__enter__):
        with pytest.raises(Closed, match="is committed"):
            call()
    with cues.open(store.path, readonly=True) as looking, pytest.raises(StoreReadOnly):
        looking.transaction()
    with pytest.raises(InvalidArgument, match="has a name"), store.transaction() as t:
        t.tailer("orders", None)  # type: ignore[arg-type]
    closed = cues.open(tmp_path / "closed")
    queue = closed.queue("q")
    with pytest.raises(Closed), closed.transaction() as t:
        t.write(queue, {"n": 1})
        closed.close()


def test_an_abandoned_block_does_not_forbid_the_next_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C between ``__enter__`` and the block, or before ``__exit__``, leaves a transaction that never ends."""
    leave, kept = BlockTransaction.__exit__, []

    def interrupted(self: BlockTransaction, *error: Any) -> None:
        if len(kept) == 2:
            raise KeyboardInterrupt
        leave(self, *error)

    monkeypatch.setattr(BlockTransaction, "__exit__", interrupted)
    for number in range(3):
        with contextlib.suppress(KeyboardInterrupt), store.transaction() as t:
            kept.append(t)
            t.write("notes", {"n": number})
    assert [m["n"] for m in testing.messages(store, "notes")] == [0, 2]


def test_nesting_is_seen_through_calls_and_exit_stacks(store: Store) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(store.transaction()).write("notes", {"n": 1})
        with pytest.raises(InvalidArgument, match="do not nest"):
            bill(store)
    assert len(store.queue("notes")) == 1


# --- options that change --------------------------------------------------------------------------------


def test_a_queue_that_grew_in_the_block_gets_the_messages_where_they_belong(store: Store) -> None:
    make(store, 40)
    with store.transaction() as t:
        t.write_many("invoices", t.tailer("orders", "billing").read_many(40))
        with cues.open(store.path) as other:
            other.queue("invoices").grow(8)
    grown = [testing.messages(store, f"invoices/{n}") for n in range(8)]
    store.queue("proof", partitions=8, key="user").appender().write_many(numbered(40))
    assert grown == [testing.messages(store, f"proof/{n}") for n in range(8)]


def test_a_limit_that_was_lowered_in_the_block_refuses_the_whole_transaction(store: Store) -> None:
    with pytest.raises(MessageTooLarge), store.transaction() as t:
        t.write("orders", {"n": 1})
        t.write("notes", {"large": "x" * 1000})
        with cues.open(store.path) as other:
            other.queue("notes", max_message_bytes=500)
    assert not len(store.queue("orders")) and not len(store.queue("notes"))


def test_no_user_code_runs_inside_a_write_transaction(tmp_path: Path) -> None:
    """A key function that writes to the store would wait for itself."""
    with cues.open(tmp_path / "s", durability="process", writer_timeout_s=5) as store:
        store.queue("seen")

        def key(message: dict[str, Any]) -> str:
            store.queue("seen").appender().write({"n": message["n"]})
            return str(message["n"])

        queue = store.queue("out", partitions=2, key=key)
        with store.transaction() as t:
            t.write_many(queue, ({"n": n} for n in range(5)))
            queue.grow(3)
        assert len(queue) == 5 and len(store.queue("seen")) == 10  # placed, and after the growth placed again


# --- death and interruptions ----------------------------------------------------------------------------

WORKS = """
import sys, cues
from test_transaction import bill
with cues.open(sys.argv[1]) as store:
    while bill(store):
        pass
"""


@pytest.mark.parametrize("point", faults.TRANSACTION_POINTS)
def test_death_at_every_point(point: str, tmp_path: Path, checked: Any) -> None:
    path = tmp_path / "store"
    with cues.open(path, durability="process") as store:
        make(store, 60)
    for hit in (1, 2):
        with Child(WORKS, path, CUES_FAULT=f"{point}:{hit}") as child:
            assert child.returncode() == -signal.SIGKILL
        checked(path)
    with cues.open(path) as store:
        while bill(store):
            pass
        expect_billed(store, 60)


def test_control_without_the_comparison_two_readers_bill_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    make(store, 3)
    monkeypatch.setattr("cues.steps.transaction._moved", lambda part, stored: None)
    with pytest.raises(TypeError), store.transaction() as t:  # the comparison is what raises
        t.tailer("orders", "billing").read()
        store.queue("orders").tailer("billing").read()


@pytest.mark.slow
def test_a_ctrl_c_anywhere_leaves_all_or_nothing(tmp_path: Path) -> None:
    """And the same thread continues with the next transaction."""

    @contextlib.contextmanager
    def arrange() -> Iterator[Store]:
        with testing.temporary_store() as store:
            make(store, 6)
            yield store

    def act(store: Store) -> None:
        bill(store, 3)

    def go_on(store: Store, place: str) -> None:
        done = len(store.queue("notes"))
        assert done in (0, 3), place
        assert store.queue("orders").tailer("billing").positions == {0: done + 1}, place
        while bill(store):
            pass
        expect_billed(store, 6)

    points, found = interruptions.faults(arrange, act, go_on)
    assert points > 50
    assert not found, "\n".join(found)


# --- against a naive version ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds.among(range(8)))
def test_against_lists(seed: int, tmp_path: Path) -> None:
    """Random transactions, some of which fail, against lists and positions that are copied and put back."""
    rng = random.Random(seed)
    names = ["a", "b", "c"]
    lists: dict[str, list[Any]] = {name: [] for name in names}
    positions: dict[tuple[str, str], int] = {}
    with cues.open(tmp_path / "s", durability="process") as store:
        for name in names:
            store.queue(name)
        for number in range(60):
            kept = {name: list(messages) for name, messages in lists.items()}, dict(positions)
            fails = rng.random() < 0.3
            with contextlib.suppress(ZeroDivisionError), store.transaction() as t:
                written: dict[str, list[Any]] = {name: [] for name in names}
                for place in range(rng.randrange(6)):
                    queue = rng.choice(names)
                    if rng.random() < 0.5:
                        message = {"n": number, "place": place}
                        t.write(queue, message)
                        written[queue].append(message)
                        continue
                    reader, most = rng.choice(["x", "y"]), rng.randrange(4)
                    at = positions.get((queue, reader), 0)
                    expected = lists[queue][at : at + most]
                    assert t.tailer(queue, reader).read_many(most) == expected
                    positions[queue, reader] = at + len(expected)
                for queue, messages in written.items():
                    lists[queue] += messages
                if fails:
                    raise ZeroDivisionError
            if fails:
                lists, positions = kept
        for name in names:
            assert testing.messages(store, name) == lists[name]
        for (queue, reader), at in positions.items():
            assert store.queue(queue).tailer(reader).positions == {0: at + 1}
