"""Readers of logs with pending messages: tailers, ReadUncommitted, ReadCommitted, and graphs."""

from __future__ import annotations

import random
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import seeds
from txn_logs import random_journal

import cues
from cues.errors import Closed, InvalidArgument
from cues.queues.queue import Queue
from cues.txn import (
    Checkpoint,
    Envelope,
    Flags,
    Gap,
    MessageType,
    ProducerID,
    Publisher,
    ReadCommitted,
    ReadUncommitted,
    build_uuid,
    dicts,
    journal_of,
)

OUTSIDE, CONTINUE, ACK = Flags.OUTSIDE_TXN, Flags.CONTINUE_TXN, Flags.ACK_TXN
A, B = (ProducerID(bytes((1, 0, 0, 0, 0, n))) for n in (10, 11))


def write(queue: Queue, *story: tuple[bytes, int, int]) -> None:
    """Messages with these identities, each an append, with their place in the story as ``n``."""
    for n, (producer, clock, flags) in enumerate(story, 1):
        queue.appender().write({"n": n, "q/uuid": build_uuid(producer, clock, flags)})


STORY = (
    (A, 160, CONTINUE), (B, 160, OUTSIDE), (A, 320, CONTINUE), (A, 480, ACK), (B, 320, CONTINUE), (A, 640, OUTSIDE),
)  # fmt: skip
"""Message 4 is an acknowledgement, and 5 is pending."""


@pytest.fixture
def queue(tmp_path: Path) -> Any:
    with cues.open(tmp_path / "s", durability="process") as store:
        yield store.queue("q", metadata=True)


# --- tailers --------------------------------------------------------------------------------------


def test_a_plain_tailer_gives_everything_that_is_a_message(queue: Queue) -> None:
    write(queue, *STORY)
    tailer = queue.tailer()
    assert [m["n"] for m in tailer] == [1, 2, 3, 5, 6] and tailer.read() is None
    assert len(queue) == 6  # an acknowledgement has an index
    tailer.direction = "backward"
    assert [m["n"] for m in tailer] == [6, 5, 3, 2, 1]
    tailer.direction = "forward"
    tailer.to_index(4)
    peeked = tailer.peek()
    assert peeked == tailer.read() and peeked is not None and peeked["n"] == 5
    assert [m["n"] for m in queue.tailer().read_many(4)] == [1, 2, 3, 5]
    named = queue.tailer("reader")
    assert [m["n"] for m in named.read_many(3)] == [1, 2, 3]
    assert [m["n"] for m in queue.tailer("reader")] == [5, 6]
    met = queue.tailer(meta=True)
    assert [m["q/meta"]["q/queue"]["q"]["q/t"] for m in met] == [1, 2, 3, 5, 6]
    write(queue, (A, 800, ACK))
    assert tailer.read_many(5)[-1]["n"] == 6 and tailer.read() is None


def test_the_envelope_of_a_tailer_names_the_producer(queue: Queue) -> None:
    write(queue, (A, 160, OUTSIDE))
    queue.appender().write({"n": 2})
    tailer = queue.tailer()
    assert tailer.read() == {"n": 1}
    envelope = tailer.envelope
    assert envelope is not None
    assert (envelope.producer, envelope.uuid) == (A.hex(), build_uuid(A, 160, OUTSIDE))
    tailer.read()
    assert tailer.envelope is not None and tailer.envelope.producer is None and tailer.envelope.uuid is None


def test_a_committed_tailer_gives_messages_when_they_are_committed(queue: Queue) -> None:
    write(queue, *STORY)
    tailer = queue.tailer(isolation="committed", meta=True)
    assert tailer.peek() == tailer.peek()
    found = list(tailer)
    assert [m["n"] for m in found] == [2, 1, 3, 6]
    assert [m["q/meta"]["q/queue"]["q"]["q/t"] for m in found] == [2, 1, 3, 6]
    assert tailer.last_read_index == 6 and tailer.index == 7
    envelope = tailer.envelope
    assert envelope is not None and envelope.uuid == build_uuid(A, 640, OUTSIDE)
    write(queue, (B, 480, ACK))
    assert [m["n"] for m in tailer.read_many(9)] == [5] and tailer.read() is None
    tailer.to_index(4)
    assert [m["n"] for m in tailer] == [1, 3, 6, 5]  # a transaction is read whole, also its messages before
    tailer.to_start()
    assert [m["n"] for m in tailer] == [2, 1, 3, 6, 5]
    tailer.to_end()
    assert tailer.read() is None
    with pytest.raises(InvalidArgument, match="isolation="):
        queue.tailer(isolation="serial")  # type: ignore[arg-type]
    tailer.close()
    with pytest.raises(Closed):
        tailer.read()


def test_a_committed_tailer_waits_past_what_is_pending(queue: Queue) -> None:
    tailer = queue.tailer(isolation="committed")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(tailer.read(block=True, timeout=60)))
    thread.start()
    write(queue, (A, 160, CONTINUE))
    assert queue.tailer().read(block=True, timeout=60) == {"n": 1}
    write(queue, (A, 320, ACK))
    thread.join()
    assert found == [{"n": 1}]
    assert tailer.read(block=True, timeout=0.01) is None
    write(queue, (B, 1, OUTSIDE))
    chosen = cues.alts([tailer], timeout=60)
    assert chosen is not None and chosen[1] == {"n": 1}


# --- envelopes ------------------------------------------------------------------------------------


@pytest.mark.interpreted
def test_everything_is_read_uncommitted_with_its_place_and_identity(queue: Queue) -> None:
    write(queue, *STORY)
    queue.appender().write_many([{"n": 7}, {"n": 8}])
    journal = journal_of(queue)
    identities = [build_uuid(*story) for story in STORY]
    expected = [
        Envelope(journal, n, n + 1, one, {"n": n, "q/uuid": one} if n != 4 else {})
        for n, one in enumerate(identities, 1)
    ]
    expected += [Envelope(journal, n, n + 1, uuid.UUID(int=0), {"n": n}) for n in (7, 8)]
    reader = ReadUncommitted(queue)
    assert list(reader) == expected
    assert list(reader) == []
    queue.appender().write({"n": 9})
    assert [one.message for one in reader] == [{"n": 9}]  # it continues
    assert list(ReadUncommitted(queue, 3, 6)) == expected[2:5]
    assert list(ReadUncommitted(queue, 8, 8)) == []
    assert [one.message for one in ReadUncommitted(queue, 1, 3, message_type=None)] == [{"n": 1}, {"n": 2}]
    assert next(ReadUncommitted(queue, message_type=dicts("id"))).message == {"n": 1, "id": identities[0]}
    for wrong in (0, 11, "x"):
        with pytest.raises(InvalidArgument, match="begin="):
            ReadUncommitted(queue, wrong)  # type: ignore[arg-type]


def test_messages_are_read_as_the_requested_type(queue: Queue) -> None:
    class Order:
        def __init__(self, n: int = 0) -> None:
            self.n, self.uuid = n, uuid.UUID(int=0)

    kind = MessageType(
        get_uuid=lambda m: m.uuid,
        set_uuid=lambda m, value: setattr(m, "uuid", value),
        new_acknowledgement=lambda journal: Order(),
        new=lambda fields: Order(fields["n"]),
    )
    write(queue, *STORY)
    found = [one.message for one in ReadCommitted(queue, message_type=kind)]
    assert [(type(m), m.n) for m in found] == [(Order, n) for n in (2, 1, 3, 0, 6)]
    assert found[0].uuid == build_uuid(B, 160, OUTSIDE)


def test_a_reader_waits_at_the_end_until_something_comes_or_the_store_is_closed(queue: Queue) -> None:
    found: list[Any] = []
    all_found = threading.Event()

    def read() -> None:
        try:
            for envelope in ReadCommitted(queue, block=True):
                found.append(envelope.message.get("n"))
                if len(found) == 7:
                    all_found.set()
        except Closed:
            found.append("closed")

    thread = threading.Thread(target=read)
    thread.start()
    write(queue, *STORY)
    ends = ReadUncommitted(queue, end=9, block=True)
    assert [next(ends).begin for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    write(queue, (B, 480, OUTSIDE), (B, 640, OUTSIDE))
    assert [one.begin for one in ends] == [7, 8]
    assert not ends.wait(0.01)
    assert all_found.wait(60)
    queue.store.close()
    thread.join()
    assert found == [2, 1, 3, None, 6, 1, 2, "closed"]


def test_purged_messages_are_a_gap_that_is_skipped_only_if_asked(queue: Queue) -> None:
    write(queue, (A, 160, CONTINUE), (A, 320, CONTINUE), (A, 480, CONTINUE), (B, 160, OUTSIDE))
    committed = ReadCommitted(queue, ring=1)
    skipping = ReadCommitted(queue, ring=1, on_gap="skip")
    assert [one.begin for one in committed] == [one.begin for one in skipping] == [4]
    write(queue, (A, 640, ACK))
    queue.purge(before=3)
    for _ in range(2):  # asked again, it is still there
        with pytest.raises(Gap, match="messages 1 to 2 of queue 'q' were purged") as caught:
            list(committed)
        assert (caught.value.first, caught.value.last) == (1, 2)
    assert [one.begin for one in skipping] == [3, 5]
    with pytest.raises(Gap):
        next(ReadUncommitted(queue, 1))
    assert [one.begin for one in ReadUncommitted(queue, 1, on_gap="skip")] == [3, 4, 5]
    assert [one.begin for one in ReadUncommitted(queue)] == [3, 4, 5]
    assert list(ReadUncommitted(queue, 1, 2, on_gap="skip")) == []
    with pytest.raises(InvalidArgument, match="on_gap"):
        ReadUncommitted(queue, on_gap="jump")  # type: ignore[arg-type]


def test_a_purge_in_the_middle_of_a_replay_is_a_gap_each_time_it_is_asked_for(queue: Queue) -> None:
    for n in range(1, 8):  # so large that few are read ahead
        queue.appender().write({"n": n, "x": "x" * 100_000, "q/uuid": build_uuid(A, 160 * n, CONTINUE)})
    queue.appender().write({"q/uuid": build_uuid(A, 160 * 8, ACK)})
    reader = ReadCommitted(queue, ring=1)
    found = [next(reader).begin]
    queue.purge(before=7)
    for _ in range(3):
        with pytest.raises(Gap):
            while True:
                found.append(next(reader).begin)
    assert found == list(range(1, len(found) + 1)) and 1 <= len(found) < 6


def test_a_checkpoint_of_a_reader_is_the_start_of_the_next_one(queue: Queue) -> None:
    write(queue, *STORY)
    reader = ReadCommitted(queue)
    found = [next(reader).begin, next(reader).begin]
    assert found == [2, 1]
    middle = reader.checkpoint()  # 1 is out, so it comes again
    assert [one.begin for one in ReadCommitted(queue, checkpoint=middle)] == [1, 3, 4, 6]
    assert [one.begin for one in reader] == [3, 4, 6]
    whole = reader.checkpoint()
    assert whole == Checkpoint({journal_of(queue): 7}, whole.producers)
    write(queue, (B, 480, ACK))
    assert [one.begin for one in ReadCommitted(queue, ring=1, checkpoint=whole)] == [5, 7]


@pytest.mark.parametrize("block", range(3))
def test_random_logs_on_a_queue_are_delivered_alike_with_every_ring_and_restart(block: int, tmp_path: Path) -> None:
    seed = seeds.new()
    rng = random.Random(seed)
    journal, committed = random_journal(rng, "q", 400, 4)
    index = {one.begin: place for place, one in enumerate(journal.log, 1)}
    expected = [index[one.begin] for one in committed]
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")
        queue.appender().write_many([{"n": index[one.begin], "q/uuid": one.uuid} for one in journal.log])
        for ring in (1, 2, 7, 8192):
            assert [one.begin for one in ReadCommitted(queue, ring)] == expected
        expected_messages = [index[one.begin] for one in committed if one.flags != ACK]
        assert [m["n"] for m in queue.tailer(isolation="committed")] == expected_messages
        reader, found, saved, done = ReadCommitted(queue, 3), [], Checkpoint(), 0
        while True:
            roll = rng.random()
            if roll < 0.05:
                saved, done = reader.checkpoint(), max(0, len(found) - 1)
                if reader.sequencer._out is None:
                    done = len(found)
            elif roll < 0.1:
                reader = ReadCommitted(queue, rng.choice((1, 5, 100)), checkpoint=saved)
                del found[done:]
            one = next(reader, None)
            if one is None:
                break
            found.append(one.begin)
        assert found == expected


# --- large transactions -----------------------------------------------------------------------------


def large_transaction(tmp_path: Path, count: int) -> None:
    """One producer writes for a long time. Others write to the same queue meanwhile, and do not wait for it."""
    with cues.open(tmp_path / "s", durability="process") as store, Publisher() as publisher, Publisher() as others:
        queue = store.queue("q")
        tailer = queue.tailer(isolation="committed")
        for n in range(count):
            publisher.publish_uncommitted(lambda message: queue, {"n": n})
            if n % (count // 20) == 0:
                others.publish_committed(lambda message: queue, {"other": n}).wait()
                queue.appender().write({"plain": n})
                # The messages of others are seen at once, and nothing of the transaction.
                assert tailer.read_many(count) == [{"other": n}, {"plain": n}]
        assert tailer.read_many(count) == []
        intents = publisher.build_ack_intents()
        assert tailer.read_many(count) == []
        with Publisher() as dead:  # and one that never commits
            for n in range(1000):
                dead.publish_uncommitted(lambda message: queue, {"dead": n})
        publisher.append_ack_intents(intents)
        found = tailer.read_many(count + 1)
        assert [m["n"] for m in found] == list(range(count))
        assert [next(iter(m)) for m in queue.tailer(isolation="committed")].count("dead") == 0


def test_a_large_transaction_is_visible_at_once_and_no_writer_waits_for_it(tmp_path: Path) -> None:
    large_transaction(tmp_path, 60_000)


@pytest.mark.long
def test_a_transaction_of_a_million_messages(tmp_path: Path) -> None:
    large_transaction(tmp_path, 1_000_000)


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [False, True])
def test_a_graph_passes_acknowledgements_by(batch: bool, tmp_path: Path) -> None:
    """They are no messages: the function is not called for them, in batches, one by one, or in a join."""
    with cues.open(tmp_path / "s", durability="process") as store:
        write(store.queue("q"), *STORY)
        for n in range(1, 7):
            store.queue("other").appender().write({"m": n})
    graph = cues.Graph("g", store=tmp_path / "s")

    @graph.stream("q", "out", batch=batch)
    def passed(given: Any) -> Any:
        return given

    @graph.stream({"left": "q", "right": "other"}, "pairs")
    def joined(left: Any, right: Any) -> Any:
        return {"left": None if left is None else left["n"], "right": right["m"]}

    with graph.start() as running:
        running.wait_idle(60)
        assert [m["n"] for m in running.messages("out")] == [1, 2, 3, 5, 6]
        assert [(m["left"], m["right"]) for m in running.messages("pairs")] == [
            (1, 1), (2, 2), (3, 3), (None, 4), (5, 5), (6, 6),
        ]  # fmt: skip


def test_spark_reads_no_acknowledgements(queue: Queue) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    from cues.spark.options import ReadOptions
    from cues.spark.reading import ROW, QueueReader, ReadSlice

    write(queue, *STORY)
    reader = QueueReader(ROW, ReadOptions.of({"path": f"{queue.store.path}#q"}, ("path",)), 1)
    found = [index for rows in reader.read(ReadSlice((1,), (7,))) for index in rows.column("index").to_pylist()]
    assert found == [1, 2, 3, 5, 6]
    assert list(reader.read(ReadSlice((4,), (5,)))) == []
