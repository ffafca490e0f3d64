"""Committed reading: named tailers, merged tailers, alts, graphs, members.

The oracle is the sequencer, which has tests of its own: it reads a log message by message. Every reader must return
the same messages in the same order, wherever it is stopped and started again.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import seeds
from click.testing import CliRunner
from committed_runs import let_time_pass
from forks import Forks
from sets import slow_except
from txn_logs import ACK, CONTINUE, OUTSIDE, A, B, C, random_journal

import cues
from cues.base import events
from cues.cli import app
from cues.errors import Fenced, InvalidArgument, QueueInUse, TopologyChanged
from cues.groups import Member, Relative, describe, seek
from cues.groups.places import Start
from cues.producers import clocks, spans
from cues.queues.base import read_as
from cues.queues.queue import Queue
from cues.queues.retention import readers
from cues.records.identity import split
from cues.tools import check
from cues.txn import ProducerID, Publisher, ReadCommitted, append_stamped, build_uuid


def write(queue: Queue, *messages: tuple[bytes, int, int]) -> None:
    """Append messages with these identities, each numbered by its index."""
    for producer, clock, flags in messages:
        number = queue.core.row().next
        queue.appender().write({"n": number, "q/uuid": build_uuid(producer, clock, flags)})


def oracle(queue: Queue) -> list[int]:
    """The numbers of the committed messages, in the order of the commits, by the sequencer."""
    return [envelope.message["n"] for envelope in ReadCommitted(queue) if not envelope.acknowledgement]


def numbers(messages: Any) -> list[int]:
    return [message["n"] for message in messages]


STORY = (
    (A, 160, CONTINUE), (B, 160, CONTINUE), (A, 320, CONTINUE), (C, 160, OUTSIDE),
    (A, 480, ACK), (C, 320, OUTSIDE), (B, 320, ACK),
)  # fmt: skip
"""A commits before B, whose transaction is older: B does not hold A back."""


# --- tailers --------------------------------------------------------------------------------------


def test_no_producer_waits_for_another(store: cues.Store) -> None:
    queue = store.queue("q")
    tailer = queue.tailer("reader", isolation="committed")
    read = []
    for message in STORY:
        write(queue, message)
        read += [numbers(tailer)]
    assert read == [[], [], [], [4], [1, 3], [6], [2]] and oracle(queue) == [4, 1, 3, 6, 2]


def test_a_named_tailer_continues_inside_a_transaction(store: cues.Store) -> None:
    queue = store.queue("q")
    write(queue, *STORY)
    for count in range(5):
        for step in (1, 2):
            name = f"{count}-{step}"
            first = queue.tailer(name, isolation="committed").read_many(count)
            rest: list[Any] = []
            while more := queue.tailer(name, isolation="committed").read_many(step):
                rest += more
            assert numbers(first) + numbers(rest) == [4, 1, 3, 6, 2]


def test_two_tailers_of_a_name_share_the_committed_messages(store: cues.Store) -> None:
    queue = store.queue("q")
    write(queue, *STORY)
    one, other = (queue.tailer("reader", isolation="committed") for _ in range(2))
    read = [message for _ in range(4) for tailer in (one, other) if (message := tailer.read())]
    assert numbers(read) == [4, 1, 3, 6, 2]


def test_a_name_belongs_to_one_isolation(store: cues.Store) -> None:
    queue = store.queue("q")
    write(queue, *STORY)
    queue.tailer("c", isolation="committed").read()
    queue.tailer("u").read()
    with pytest.raises(InvalidArgument, match="reads with isolation='committed'"):
        queue.tailer("c")
    with pytest.raises(InvalidArgument, match="reads with isolation='uncommitted'"):
        queue.tailer("u", isolation="committed")
    assert numbers(queue.tailer("c", isolation="committed")) == [1, 3, 6, 2]


def test_a_committed_tailer_reads_backward_too(store: cues.Store) -> None:
    queue = store.queue("q")
    write(queue, *STORY)
    tailer = queue.tailer(isolation="committed")
    forward = numbers(tailer)
    tailer.direction = "backward"
    assert numbers(tailer) == forward[::-1]


def state(store: cues.Store, queue: Queue) -> tuple[Any, ...]:
    """What readers of a queue get, and what the store knows about its producers."""
    tailer = queue.tailer()
    envelopes = []
    while tailer.read() is not None:
        assert tailer.envelope is not None
        envelopes.append((tailer.envelope.index, tailer.envelope.producer, tailer.envelope.uuid))
    committed = [(one.uuid, one.message, one.begin) for one in ReadCommitted(queue, message_type=None)]
    return envelopes, committed, numbers(queue.tailer(isolation="committed")), dict(clocks.rows(store, queue.id))


@pytest.mark.parametrize("block", slow_except(range(2), range(6)))
def test_messages_of_several_producers_that_share_a_record_are_read_as_if_each_had_its_own(
    block: int, store: cues.Store
) -> None:
    rng = random.Random(seeds.new())
    together, alone = store.queue("together"), store.queue("alone")
    journal, _ = random_journal(rng, "q", 200, 5)
    pairs = [(envelope.uuid, {"n": n}) for n, envelope in enumerate(journal.log)]
    seen: dict[str, dict[int, int]] = {"together": {}, "alone": {}}
    at = 0
    while at < len(pairs):
        # Messages of producers that share a queue without transactions, between those of the journal.
        names = [ProducerID(bytes((7, 0, 0, block, n // 256, n % 256))) for n in range(rng.choice((2, 5, 300)))]
        plain = [(build_uuid(rng.choice(names), 160 * (at * 1000 + n + 1), OUTSIDE), {"n": -n}) for n in range(400)]
        some = pairs[at : at + rng.choice((1, 3, 60))]
        at += len(some)
        some = [*some, *plain[: rng.choice((0, 5, 400))]]
        appended = append_stamped(together, some, seen["together"])
        assert appended == sum(append_stamped(alone, [one], seen["alone"]) for one in some)
        assert append_stamped(together, [pair for pair in some if split(pair[0])[2] == OUTSIDE]) == 0
    with store.core.view() as txn:
        records = [len(list(txn.cursor(store.core.database(f"log:{name}".encode())))) for name in ("together", "alone")]
    assert records[0] < records[1]
    assert state(store, together) == state(store, alone)
    assert not check.check(store)


@pytest.mark.parametrize("block", slow_except(range(2), range(6)))
def test_random_logs_are_read_as_the_sequencer_reads_them(block: int, store: cues.Store) -> None:
    """Several producers, repetitions, aborts and producers that are gone; every reader is restarted at random."""
    rng = random.Random(seeds.new())
    queue = store.queue("q")
    journal, _ = random_journal(rng, "q", 300, 4)
    uuids = [envelope.uuid for envelope in journal.log]
    expected: list[int] = []
    read: dict[str, list[int]] = {"named": [], "steps": []}
    unnamed = queue.tailer(isolation="committed")
    seen: list[int] = []
    written = 0
    while written < len(uuids):
        count = rng.choice((1, 1, 2, 5, 40))
        some = [{"n": written + n + 1, "q/uuid": uuid} for n, uuid in enumerate(uuids[written : written + count])]
        queue.appender().write_many(some)
        written += len(some)
        seen += numbers(unnamed.read_many(rng.choice((1, 3, 100))))
        read["named"] += numbers(queue.tailer("named", isolation="committed").read_many(rng.choice((0, 1, 7))))
        tailer = queue.tailer(isolation="committed")
        tailer.to_index(rng.randrange(1, written + 2))
        tailer.read_many(5)
    seen += numbers(unnamed)
    read["named"] += numbers(queue.tailer("named", isolation="committed"))
    expected = oracle(queue)
    assert seen == expected and read["named"] == expected
    assert numbers(queue.tailer(isolation="committed").read_many(10**6)) == expected
    log = read_as(queue, "committed").core.log
    with store.core.view() as txn:
        row = log.row(txn)
        for index in range(1, queue.core.row().next):  # each index has a place, and each place an index
            assert log.index_of(txn, log.place_of(txn, index)) == index
        for start in range(row.first, row.next):  # a read that begins anywhere continues in the same way
            raws = log.read(txn, row, start, 10**6, rng.choice((1, 500, 10**6)))
            batch = log.batches(raws)[0]
            assert batch.first <= start < batch.next


def test_ill_formed_logs_are_read_as_the_sequencer_reads_them(store: cues.Store) -> None:
    """Repeated messages in any place, acknowledgements of a part, and of an older state: whatever users append."""
    rng = random.Random(seeds.new())
    for number in range(60):
        queue = store.queue(f"q{number}")
        for _ in range(rng.randrange(3, 9)):
            flags = rng.choice((CONTINUE, CONTINUE, CONTINUE, ACK, OUTSIDE))
            clocks = sorted(rng.sample(range(1, 9), rng.choice((1, 1, 2, 3)) if flags != ACK else 1))
            first = queue.core.row().next
            queue.appender().write_many(
                [{"n": first + n, "q/uuid": build_uuid(A, clock * 160, flags)} for n, clock in enumerate(clocks)]
            )
        assert numbers(queue.tailer(isolation="committed")) == oracle(queue)


def test_alts_and_merged_tailers_read_committed_messages(store: cues.Store) -> None:
    parts = store.queue("p", partitions=3, key="k")
    single = store.queue("s")
    merged = parts.tailer("reader", isolation="committed")
    tailers = [merged, single.tailer(isolation="committed")]
    views = [parts.partition(number) for number in range(3)]
    read: list[Any] = []
    with Publisher() as one, Publisher() as other:
        for n in range(30):
            one.publish_uncommitted(lambda message: views[message["n"] % 3], {"n": n})
            other.publish_uncommitted(lambda message: single, {"n": 100 + n})
        assert cues.alts(tailers, timeout=0) is None
        other.append_ack_intents(other.build_ack_intents())
        while got := cues.alts(tailers, timeout=0):
            read.append(got)
        assert [message["n"] for tailer, message in read] == list(range(100, 130))
        intents = one.build_ack_intents()
        one.append_ack_intents(intents[:1])
        assert [n % 3 for n in numbers(merged)] == [0] * 10
        one.append_ack_intents(intents)
    again = parts.tailer("reader", isolation="committed")
    assert sorted(numbers(again)) == [n for n in range(30) if n % 3]
    assert again.positions == {number: view.core.row().next for number, view in enumerate(views)}


def test_a_position_of_a_seek_is_an_index_and_a_transaction_is_read_whole(store: cues.Store) -> None:
    queue = store.queue("q")
    write(queue, *STORY)
    tailer = queue.tailer("reader", isolation="committed")
    assert numbers(tailer.read_many(2)) == [4, 1]
    assert tailer.index == 5 and tailer.last_read_index == 1  # inside A's transaction
    tailer.to_index(5)
    assert numbers(tailer) == [1, 3, 6, 2]
    tailer.to_index(6)
    assert numbers(tailer) == [6, 2]
    tailer.to_end()
    write(queue, (C, 480, OUTSIDE))
    assert numbers(tailer) == [8] and tailer.index == 9


# --- retention ------------------------------------------------------------------------------------


def test_retention_keeps_what_a_committed_reader_still_needs(store: cues.Store) -> None:
    """The reader is after the pending messages, which are committed later; a plain reader does not keep them."""
    queue = store.queue("q", retention="read")
    write(queue, (A, 160, CONTINUE))
    queue.appender().write_many([{"n": n} for n in range(2, 1000)])
    tailer = queue.tailer("reader", isolation="committed")
    assert numbers(tailer) == list(range(2, 1000))
    plain = queue.tailer("plain")
    plain.read_many(10**6)
    queue.appender().write({"n": 1000})
    assert queue.first_index == 1
    write(queue, (A, 320, ACK))
    assert numbers(tailer) == [1000, 1]
    plain.read_many(10**6)
    tailer.read()
    queue.appender().write_many([{"n": n} for n in range(2000, 3000)])
    assert queue.first_index > 900
    assert numbers(tailer) == list(range(2000, 3000))


@pytest.mark.parametrize("block", range(3))
def test_retention_never_takes_a_message_from_a_committed_reader(block: int, store: cues.Store) -> None:
    rng = random.Random(seeds.new())
    queue = store.queue("q", retention="read")
    journal, _ = random_journal(rng, "q", 400, 4)
    shadow = store.queue("shadow")
    read: list[int] = []
    for n, envelope in enumerate(journal.log, 1):
        message = {"n": n, "q/uuid": envelope.uuid}
        shadow.appender().write(message)
        queue.appender().write(message)
        if rng.random() < 0.3:
            read += numbers(queue.tailer("reader", isolation="committed").read_many(rng.choice((1, 2, 30))))
            with store.core.view() as txn:
                assert all(queue.first_index <= holder.next for holder in readers(txn, queue.core.log))
    read += numbers(queue.tailer("reader", isolation="committed"))
    assert read == oracle(shadow)
    with store.core.view() as txn:
        rows = sum(1 for _ in txn.cursor().iternext())
        assert spans.upto(txn, "q") is not None
    assert rows < 2000


def test_a_purge_of_pending_messages_passes_them_over_and_says_so(
    store: cues.Store, caplog: pytest.LogCaptureFixture
) -> None:
    queue = store.queue("q")
    write(queue, *STORY)
    queue.purge(before=2)
    with caplog.at_level(logging.WARNING, "cues.txn"):
        assert numbers(queue.tailer(isolation="committed")) == [4, 3, 6, 2]
    assert "1 messages of the transaction that is acknowledged at 5 were purged" in caplog.text


def test_a_purge_inside_a_record_passes_over_only_what_was_purged(store: cues.Store) -> None:
    queue = store.queue("q")
    queue.appender().write_many([{"n": n, "q/uuid": build_uuid(A, n * 160, CONTINUE)} for n in (1, 2, 3)])
    write(queue, (B, 160, OUTSIDE))
    queue.purge(before=3)
    write(queue, (A, 640, ACK))
    assert numbers(queue.tailer(isolation="committed")) == [4, 3] and numbers(queue.tailer()) == [3, 4]


def test_a_large_transaction_is_read_in_parts_from_any_place(store: cues.Store) -> None:
    """More messages than one read copies: each part continues where the last one ended, also after a restart."""
    queue = store.queue("q")
    with Publisher() as large, Publisher() as other:
        for n in range(9000):
            large.publish_uncommitted(to(queue), {"n": n, "text": "x" * 100})
            if n % 100 == 0:
                other.publish_committed(to(queue), {"n": -n})
        large.append_ack_intents(large.build_ack_intents())
    read: list[int] = []
    while some := queue.tailer("reader", isolation="committed").read_many(700):
        read += numbers(some)
    assert [n for n in read if n > 0] == list(range(1, 9000))
    log = read_as(queue, "committed").core.log
    with store.core.view() as txn:
        row = log.row(txn)
        ends = {batch.next for batch in log.batches(log.read(txn, row, row.next - 3, 3))}
    assert row.next in ends


# --- graphs ---------------------------------------------------------------------------------------


def graph_of(store: cues.Store, **options: Any) -> cues.Graph:
    def copy(message: dict[str, Any]) -> dict[str, Any]:
        return message

    return cues.Graph("g", [cues.Stream(copy, "q", "out", isolation="committed", **options)], store=store)


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_a_graph_reads_committed_messages_in_the_order_of_the_commits(store: cues.Store, batch_size: int) -> None:
    queue = store.queue("q", metadata={"t"})
    write(queue, *STORY)
    for _ in range(2):
        with graph_of(store, batch_size=batch_size).start() as running:
            running.wait_idle(timeout=60)
        assert numbers(store.queue("out").tailer()) == [4, 1, 3, 6, 2]
    met = store.queue("out").tailer(meta=True).read_many(9)
    assert [m["q/meta"]["q/queue"]["q"]["q/t"] for m in met] == [4, 1, 3, 6, 2]


@pytest.mark.delivers_again
def test_a_change_of_the_isolation_is_a_change_of_the_topology(store: cues.Store) -> None:
    write(store.queue("q"), *STORY)
    with graph_of(store).start() as running:
        running.wait_idle(timeout=60)
    plain = cues.Graph("g", [cues.Stream(lambda m: m, "q", "out", id="copy")], store=store)
    with pytest.raises(TopologyChanged, match="with another isolation="):
        plain.start()
    with plain.start(accept_topology=True) as running:
        running.wait_idle(timeout=60)
    assert numbers(store.queue("out").tailer()) == [4, 1, 3, 6, 2, 1, 2, 3, 4, 6]


def test_a_join_of_committed_messages_is_refused(store: cues.Store) -> None:
    """It would pair a message of one input with a pending one of the other, and lose it."""

    def both(a: Any, b: Any) -> Any:
        return a

    joined = cues.Stream(both, {"a": "q", "b": "r"}, "out", isolation="committed")
    with pytest.raises(cues.GraphError, match="with isolation='committed': a join takes"):
        cues.Graph("g", [joined], store=store).plan()
    with pytest.raises(cues.GraphError, match="isolation"):
        cues.Graph("g", [cues.Stream(lambda m: m, "q", "out", id="c", isolation="some")], store=store).plan()  # type: ignore[arg-type]


def test_any_of_two_queues_reads_what_is_committed_in_either(store: cues.Store) -> None:
    for name in ("q", "r"):
        write(store.queue(name), *STORY)

    def take(q: Any = None, r: Any = None) -> Any:
        return q or r

    graph = cues.Graph("g", [cues.Stream(take, cues.AnyOf(q="q", r="r"), "out", isolation="committed")], store=store)
    with graph.start() as running:
        running.wait_idle(timeout=60)
    assert sorted(numbers(store.queue("out").tailer())) == sorted([4, 1, 3, 6, 2] * 2)


def test_imperative_tailers_read_committed_messages(store: cues.Store) -> None:
    write(store.queue("q"), *STORY)
    store.queue("go").appender().write_many([{}] * 3)

    def pull(message: Any, process: Any) -> Any:
        got = [process.tailers["q"].read() for _ in range(2)]
        return {"n": [item["n"] for item in got if item]}

    stream = cues.Stream(pull, "go", "out", tailers=["q"], isolation="committed")
    with cues.Graph("g", [stream], store=store).start() as running:
        running.wait_idle(timeout=60)
    assert numbers(store.queue("out").tailer()) == [[4, 1], [3, 6], [2]]


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_partitioned_queue_is_read_by_units_and_workers_follow_growth(store: cues.Store, partitions: int) -> None:
    queue = store.queue("q", partitions=2, key="k")
    with Publisher() as one, Publisher() as other, graph_of(store).start() as running:
        for round in range(2):
            views = [queue.partition(n) for n in range(queue.partitions)]
            for n in range(12):
                one.publish_uncommitted(to(views[n % len(views)]), {"n": 100 * round + n, "k": n})
                other.publish_uncommitted(to(views[n % len(views)]), {"n": 1000 + n, "k": n})
            one.append_ack_intents(one.build_ack_intents())
            other.abort()
            if not round and partitions > 2:
                queue.grow(partitions)
        running.wait_idle(timeout=60)
    read = numbers(store.queue("out").tailer())
    assert sorted(read) == [*range(12), *range(100, 112)]


def test_a_purge_is_refused_while_a_committed_group_needs_pending_messages(store: cues.Store) -> None:
    queue = store.queue("q")
    write(queue, *STORY[:6])  # B's message 2 is pending
    with Member(store, "q", "g", isolation="committed") as member:
        assert numbers(member.read_many(9)) == [4, 1, 3, 6]
        member.commit()
        assert member.positions() == {("q", 0): 7}
        with pytest.raises(QueueInUse, match="group g is at 2"):
            queue.purge(4, unread="refuse")
        assert [reader.name for reader in queue.plan_purge(4)[0].behind] == ["group g"]
        assert queue.purge(2, unread="refuse") == 1
        write(queue, STORY[6])
        assert numbers(member.read_many(9)) == [2]
        member.commit()
        assert queue.purge(8, unread="refuse") == 6 and member.read() is None
    with Member(store, "q", "late", isolation="committed", start=1) as late:  # message 1 was purged
        assert late.positions() == {("q", 0): 8} and late.read() is None


# --- members --------------------------------------------------------------------------------------


def test_members_read_committed_messages_and_a_group_has_one_isolation(store: cues.Store) -> None:
    queue = store.queue("q")
    write(queue, *STORY)
    read: list[int] = []
    for count in (1, 1, 2, 9):  # a restart after each
        with Member(store, "q", "g", isolation="committed") as member:
            read += numbers(member.read_many(count))
            member.commit()
            assert member.lag() == {("q", 0): member.lag()["q", 0]}
    assert read == [4, 1, 3, 6, 2]
    with pytest.raises(InvalidArgument, match="reads 'q' with isolation='committed'"):
        Member(store, "q", "g")
    with Member(store, "q", "g", isolation="committed") as member:
        assert member.lag() == {("q", 0): 0} and member.positions() == {("q", 0): 8}
        write(queue, (A, 640, CONTINUE))
        assert member.lag() == {("q", 0): 0}
        member.seek(5)
        assert numbers(member.read_many(9)) == [1, 3, 6, 2]
    with Member(store, "q", "late", isolation="committed", start="latest") as member:
        assert member.read() is None
        write(queue, (A, 800, ACK))
        assert member.read() == {"n": 8}


def test_a_session_commits_the_transaction_that_it_read(store: cues.Store) -> None:
    write(store.queue("q"), *STORY)
    store.queue("out")
    with Member(store, "q", "g", isolation="committed") as member:
        for _ in range(3):
            with member.session() as session:
                for message in session.read_many(2, timeout=60):
                    session.write("out", message)
                assert session.end(cues.groups.TRY_COMMIT).committed
    assert numbers(store.queue("out").tailer()) == [4, 1, 3, 6, 2]


@pytest.mark.parametrize(
    ("start", "read", "position"),
    [(2, [4, 1, 3, 6, 2], 2), (5, [1, 3, 6, 2], 5), (6, [6, 2], 6), ("latest", [], 8), (Relative(-1), [2], 7)],
)
def test_a_new_committed_group_begins_at_an_index(
    store: cues.Store, start: Start, read: list[int], position: int
) -> None:
    queue = store.queue("q")
    write(queue, *STORY)
    with Member(store, "q", "g", isolation="committed", start=start) as member:
        [partition] = describe(store, "g").partitions
        assert partition.position == position and member.positions() == {("q", 0): position}
        assert numbers(member.read_many(9)) == read
        member.commit()
        [partition] = describe(store, "g").partitions
        assert partition.position == 8 and partition.lag == 0


def test_a_new_committed_group_begins_at_a_time(store: cues.Store) -> None:
    queue = store.queue("q")
    write(queue, *STORY[:4])
    time.sleep(0.001)  # the next append has a later time, whatever the resolution of the clock
    began = datetime.now(UTC)
    write(queue, *STORY[4:])
    with Member(store, "q", "g", isolation="committed", start=began) as member:
        assert member.positions() == {("q", 0): 5}
        assert numbers(member.read_many(9)) == [1, 3, 6, 2]


def test_a_committed_group_is_moved_from_outside_by_indices(store: cues.Store) -> None:
    queue = store.queue("q")
    write(queue, *STORY)
    with Member(store, "q", "g", isolation="committed") as member:
        assert numbers(member.read_many(9)) == [4, 1, 3, 6, 2]
        assert member.indices == {("q", 0): [4, 1, 3, 6, 2]}
        member.commit()
    assert seek(store, "g", 6) == {("q", 0): 6} and describe(store, "g").partitions[0].position == 6
    with Member(store, "q", "g", isolation="committed") as member:
        assert numbers(member.read_many(9)) == [6, 2]
    assert seek(store, "g", 5) == {("q", 0): 5}
    with Member(store, "q", "g", isolation="committed") as member:
        assert numbers(member.read_many(9)) == [1, 3, 6, 2]


def test_a_part_of_a_committed_poll_cannot_be_committed(store: cues.Store) -> None:
    queue = store.queue("q")
    write(queue, *STORY)
    with Member(store, "q", "g", isolation="committed") as member:
        assert numbers(member.read_many(2)) == [4, 1]
        with pytest.raises(InvalidArgument, match="isolation='committed'"):
            member.commit(upto={("q", 0): 1})
        assert member.positions() == {("q", 0): 1}
        member.commit()
        assert numbers(member.read_many(9)) == [3, 6, 2]


def test_a_subscription_and_a_pattern_read_committed_messages(store: cues.Store) -> None:
    first, second = store.queue("q-1"), store.queue("r")
    write(first, *STORY)
    with Member(store, "r", "plain"), pytest.raises(InvalidArgument, match="isolation='uncommitted'"):
        Member(store, "q-1", "plain", isolation="committed")  # its plan would place partitions of the other queue too
    with Member(store, "q-*", "g", isolation="committed") as member:
        assert numbers(member.read_many(9)) == [4, 1, 3, 6, 2]
        member.commit()
        write(second, *STORY[:4])
        member.subscribe(["q-*", "r"])
        assert numbers(member.read_many(9)) == [4]
        write(second, *STORY[4:])
        assert numbers(member.read_many(9)) == [1, 3, 6, 2]


def test_a_session_over_all_partitions_reads_committed_messages(store: cues.Store) -> None:
    for name in ("q", "r"):
        write(store.queue(name), *STORY)
    store.queue("out")
    read: dict[str, list[int]] = {"q": [], "r": []}
    with Member(store, ["q", "r"], "g", isolation="committed") as member:
        for count in (3, 4, 9):
            with member.session("all") as session:
                for (queue, _), messages in session.poll(n=count).items():
                    read[queue] += numbers(messages)
                    session.write_many("out", messages)
                assert session.end(cues.groups.TRY_COMMIT).committed
        assert member.positions() == {("q", 0): 8, ("r", 0): 8}
    assert read == {"q": [4, 1, 3, 6, 2], "r": [4, 1, 3, 6, 2]}
    assert sorted(numbers(store.queue("out").tailer())) == sorted(read["q"] * 2)


def test_a_transaction_moves_a_tailer_of_committed_messages(store: cues.Store) -> None:
    write(store.queue("q"), *STORY)
    store.queue("out", metadata=("t",))
    hashes = set()
    for count in (1, 1, 2, 9):  # the second and the third begin and end inside of A's transaction
        for end in ("abort", "commit"):
            with store.transaction() as t:
                tailer = t.tailer("q", "billing", isolation="committed")
                t.write_many("out", tailer.read_many(count))
                if end == "abort":
                    t.abort()
        assert t.hash is not None
        hashes.add(t.hash)
    assert numbers(store.queue("out").tailer()) == [4, 1, 3, 6, 2] and len(hashes) == 4
    with store.transaction() as t:
        with pytest.raises(InvalidArgument, match="isolation='committed'"):
            t.tailer("q", "billing")
        t.tailer("q", "billing", isolation="committed")
        with pytest.raises(InvalidArgument, match="another isolation"):
            t.tailer("q", "billing")
        assert t.tailer("q", "billing", isolation="committed").read() is None


# --- deaths ---------------------------------------------------------------------------------------


def story_at(path: Path, messages: Any = STORY) -> list[int]:
    with cues.open(path / "s", durability="process") as store:
        write(store.queue("q"), *messages)
        return oracle(store.queue("q"))


def out_of(path: Path) -> list[int]:
    with cues.open(path / "s", durability="process") as store:
        return numbers(store.queue("out").tailer())


LATER = ((C, 480, CONTINUE), (A, 640, CONTINUE), (B, 480, OUTSIDE), (A, 800, ACK), (C, 640, ACK))


def calls_of(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (path / "calls").read_text().splitlines()]


@pytest.mark.slow
def test_a_graph_that_is_killed_anywhere_takes_the_same_messages_again(forks: Forks, tmp_path: Path) -> None:
    """Before the retry, transactions commit that were pending at the kill: the step is the same all the same."""
    whole = tmp_path / "whole"
    story_at(whole)
    sites = forks.run("committed_runs:run_graph", str(whole)).value
    hashes: dict[str, list[int]] = {}
    for number, (point, hit) in enumerate(sites):
        path = tmp_path / str(number)
        story_at(path)
        killed = forks.run("committed_runs:run_graph", str(path), point, hit)
        assert killed.killed or point.startswith("close")
        expected = story_at(path, LATER)
        forks.run("committed_runs:run_graph", str(path))
        assert out_of(path) == expected == [4, 1, 3, 6, 2, 10, 9, 8], (point, hit)
        by_hash: dict[str, list[int]] = {}
        for hash, taken in calls_of(path):
            assert by_hash.setdefault(hash, taken) == taken, (point, hit)
        assert [n for taken in by_hash.values() for n in taken] == expected, (point, hit)
        hashes |= by_hash
    assert len(sites) > 20 and hashes


def test_a_purge_before_a_retry_leaves_messages_out_of_the_step(forks: Forks, tmp_path: Path) -> None:
    """The step keeps its range and its hash: a target that has seen the hash has all its messages, and ignores it."""
    story_at(tmp_path)
    assert forks.run("committed_runs:run_graph", str(tmp_path), "function.after", 2, True).killed
    with cues.open(tmp_path / "s", durability="process") as store:
        store.queue("q").purge(before=3)
    forks.run("committed_runs:run_graph", str(tmp_path), "", 1, True)
    first, second, third = calls_of(tmp_path)
    assert (first[1], second[1], third[1]) == ([4], [1, 3, 6, 2], [3, 6])
    assert third[0] == second[0] != first[0]


@pytest.mark.parametrize("run", slow_except([], ["run_member", "run_transactions"]))
def test_a_session_or_transaction_that_is_killed_anywhere_commits_each_message_once(
    run: str, forks: Forks, tmp_path: Path
) -> None:
    """The stories of KIP-447: the reader dies before, in and after its end, and a pending transaction commits later."""
    story_at(tmp_path / "whole")
    sites = forks.run(f"committed_runs:{run}", str(tmp_path / "whole")).value
    for number, (point, hit) in enumerate(sites):
        path = tmp_path / str(number)
        story_at(path)
        assert forks.run(f"committed_runs:{run}", str(path), point, hit).killed
        expected = story_at(path, LATER)
        forks.run(f"committed_runs:{run}", str(path))
        assert out_of(path) == expected, (point, hit)
    assert len(sites) > 5


@pytest.mark.slow
def test_a_publisher_that_is_killed_anywhere_blocks_nothing_and_nothing_of_it_is_seen(
    forks: Forks, tmp_path: Path
) -> None:
    """Its messages are rolled back by the next reader, which may be killed as well; a decided transaction is not."""
    (tmp_path / "whole").mkdir()
    sites = forks.run("committed_runs:leave_pending", str(tmp_path / "whole")).value
    assert forks.run("committed_runs:read_all", str(tmp_path / "whole")).value == {"q": [0, 2], "r": [1, 3]}
    rolled_back = 0
    for number, (point, hit) in enumerate(sites):
        path = tmp_path / str(number)
        path.mkdir()
        assert forks.run("committed_runs:leave_pending", str(path), point, hit).killed
        died = forks.run("committed_runs:read_all", str(path), "expire.inside").killed
        rolled_back += died
        read = forks.run("committed_runs:read_all", str(path)).value
        assert read in ({"q": [], "r": []}, {"q": [0, 2], "r": [1, 3]}), (point, hit)
    assert rolled_back > 3


# --- publishers that are gone ---------------------------------------------------------------------


def to(queue: Queue) -> Callable[[Any], Queue]:
    return lambda message: queue


def opened(store: cues.Store, queue: str = "q") -> int:
    with store.core.view() as txn:
        return len(spans.opened(txn, queue))


@pytest.mark.parametrize("who", ["reader", "publisher", "graph", "member"])
def test_a_publisher_that_wakes_up_after_its_timeout_is_fenced(store: cues.Store, who: str) -> None:
    queue = store.queue("q")
    with Publisher(transaction_timeout_s=3600) as late:
        for n in range(3):
            late.publish_uncommitted(to(queue), {"n": n})
        late.flush()
        assert opened(store) == 1
        let_time_pass(store)
        if who == "reader":
            assert queue.tailer(isolation="committed").read() is None
        elif who == "publisher":
            with Publisher() as other:
                other.publish_committed(to(queue), {"n": 10}).wait()
        elif who == "graph":
            with graph_of(store).start() as running:
                running.wait_idle(timeout=60)
        else:
            with Member(store, "q", "g", isolation="committed") as member:
                assert member.read() is None
                assert member.read() is None
        assert opened(store) == 0
        with pytest.raises(Fenced, match="transaction_timeout_s has passed"):
            late.build_ack_intents()
        with pytest.raises(Fenced):  # it stays so: a part of the transaction must not be committed
            late.publish_uncommitted(to(queue), {"n": 3})
            late.build_ack_intents()
        late.abort()
        late.publish_uncommitted(to(queue), {"n": 4})
        late.append_ack_intents(late.build_ack_intents())
    read = numbers(queue.tailer(isolation="committed"))
    assert [n for n in read if n < 10] == [4]


def test_a_rolled_back_transaction_is_not_continued_by_a_later_message(store: cues.Store) -> None:
    """Without the fence in the append, the messages after the rollback would be committed as a whole transaction."""
    queue = store.queue("q")
    with Publisher(transaction_timeout_s=3600) as late:
        late.publish_uncommitted(to(queue), {"n": 0}).wait()
        assert queue.tailer(isolation="committed").read() is None and opened(store) == 1
        let_time_pass(store)
        assert queue.tailer(isolation="committed").read() is None
        append = late.publish_uncommitted(to(queue), {"n": 1})
        with pytest.raises(Fenced):
            append.wait()
        with pytest.raises(Fenced):
            late.build_ack_intents()
        late.abort()
    assert numbers(queue.tailer()) == [0] and list(queue.tailer(isolation="committed")) == []


def test_a_transaction_on_two_stores_is_fenced_if_one_of_them_rolled_it_back(tmp_path: Path) -> None:
    with (
        cues.open(tmp_path / "a", durability="process") as a,
        cues.open(tmp_path / "b", durability="process") as b,
        Publisher(transaction_timeout_s=3600) as late,
    ):
        for store in (a, b):
            late.publish_uncommitted(to(store.queue("q")), {"n": 1}).wait()
        let_time_pass(b)
        assert b.queue("q").tailer(isolation="committed").read() is None
        with pytest.raises(Fenced):
            late.build_ack_intents()
        late.abort()
        assert opened(a) == opened(b) == 0
        assert [list(store.queue("q").tailer(isolation="committed")) for store in (a, b)] == [[], []]


def test_a_decided_transaction_is_not_rolled_back(store: cues.Store) -> None:
    """After the intents were built, the checkpoint that holds them may have committed: only it decides."""
    queue = store.queue("q")
    with Publisher(transaction_timeout_s=3600) as publisher:
        publisher.publish_uncommitted(to(queue), {"n": 1})
        intents = publisher.build_ack_intents()
    let_time_pass(store)
    assert queue.tailer(isolation="committed").read() is None
    with Publisher() as successor:
        successor.publish_committed(to(queue), {"n": 2}).wait()
        successor.append_ack_intents(intents)
    assert numbers(queue.tailer(isolation="committed")) == [2, 1]


def test_a_timeout_is_a_number_of_seconds() -> None:
    for wrong in (0, -1, "60", True, float("nan")):
        with pytest.raises(InvalidArgument, match="transaction_timeout_s"):
            Publisher(transaction_timeout_s=wrong)  # type: ignore[arg-type]
    with Publisher(transaction_timeout_s=None) as publisher:
        assert publisher.transaction_timeout_s is None
    with Publisher() as publisher:
        assert publisher.transaction_timeout_s == 900.0


# --- readers that do not ask ----------------------------------------------------------------------


def test_a_graph_that_reads_pending_messages_is_told_once(store: cues.Store) -> None:
    queue = store.queue("q")
    told: list[str] = []

    def listen(event: events.Event) -> None:
        if "isolation='committed'" in event.text:
            told.append(event.text)

    plain = cues.Graph("g", [cues.Stream(lambda m: m, "q", "out", id="copy")], store=store)
    with Publisher() as publisher, plain.start(listeners=(listen,)) as running:
        for n in range(3):
            publisher.publish_uncommitted(to(queue), {"n": n}).wait()
            running.wait_idle(timeout=60)
    assert len(told) == 1 and "g.copy reads q without" in told[0] and publisher.id.hex() in told[0]


def test_a_member_that_reads_pending_messages_is_told_once(store: cues.Store, caplog: pytest.LogCaptureFixture) -> None:
    write(store.queue("q"), *STORY)
    with caplog.at_level(logging.WARNING), Member(store, "q", "g") as member:
        assert len(member.read_many(9)) == 5
        member.commit()
        write(store.queue("q"), (A, 640, CONTINUE))
        assert member.read() is not None
    assert [A.hex() in record.message for record in caplog.records if "isolation=" in record.message] == [True]


# --- a graph over two stores ----------------------------------------------------------------------


def test_a_processor_reads_what_another_one_writes_as_pending(tmp_path: Path) -> None:
    """Before, the graph was refused: a processor saw messages of steps that never committed."""
    read: list[int] = []

    def split(message: dict[str, Any]) -> dict[str, Any]:
        return message

    def take(message: dict[str, Any]) -> None:
        read.append(message["n"])

    def made(**options: Any) -> cues.Graph:
        return cues.Graph(
            "g",
            [cues.Stream(split, "q", "away", across="pending"), cues.Sink(take, "away", **options)],
            queues={"away": cues.QueueOptions(path=str(tmp_path / "b"), retention="read")},
            store=tmp_path / "a",
        )

    with pytest.raises(cues.GraphError, match="isolation='committed'"):
        made().plan()
    with made(isolation="committed").start() as running:
        for n in range(50):
            running.send("q", {"n": n})
        running.wait_idle(timeout=60)
    assert read == list(range(50))


def test_a_member_takes_over_in_the_middle_of_a_transaction(store: cues.Store) -> None:
    """KIP-447: a member dies after the commit of a part; another one continues inside the transaction, and is alone."""
    write(store.queue("q"), *STORY)
    store.queue("out")
    first = Member(store, "q", "g", isolation="committed")
    with first.session() as session:
        session.write_many("out", session.read_many(2))
        assert session.end(cues.groups.TRY_COMMIT).committed
    late = first.session()
    late.write_many("out", late.read_many(2))
    with Member(store, "q", "g", isolation="committed") as second:
        second.seek(5, "q")  # fences the session of the first one
        assert not late.end(cues.groups.TRY_COMMIT).committed
        first.close()
        assert second.poll(timeout=60, n=9) == {("q", 0): [{"n": 1}, {"n": 3}, {"n": 6}, {"n": 2}]}
    assert numbers(store.queue("out").tailer()) == [4, 1]


# --- the command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
def test_cues_tail_prints_committed_messages(partitions: int, tmp_path: Path) -> None:
    """The last two messages are those that were committed last, wherever acknowledgements and pending messages are."""
    with cues.open(tmp_path / "s") as store:
        queue = store.queue("q", partitions=partitions, **({"key": "n"} if partitions > 1 else {}))
        target = queue.partition(partitions - 1)
        with Publisher() as first, Publisher() as second:
            first.publish_uncommitted(to(target), {"n": 0}).wait()
            for n in (1, 2, 3):
                second.publish_uncommitted(to(target), {"n": n})
                second.append_ack_intents(second.build_ack_intents())
            place = f"{tmp_path / 's'}#q"
            printed = [CliRunner().invoke(app.commands, ["tail", place, "--isolation", "committed", *more]).stdout
                       for more in (["-n", "2"], ["-n", "all"], [])]  # fmt: skip
            everything = CliRunner().invoke(app.commands, ["tail", place]).stdout
            first.abort()
    lines = [[json.loads(line)["n"] for line in text.splitlines()] for text in [*printed, everything]]
    assert lines == [[2, 3], [1, 2, 3], [1, 2, 3], [0, 1, 2, 3]]
