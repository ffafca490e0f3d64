"""Publishing: identities in record headers, pending messages, intents, threads, forks; appends of stamped messages."""

from __future__ import annotations

import os
import random
import re
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import seeds

import cues
from cues import faults
from cues.errors import Closed, CodecError, Forked, InvalidArgument, MessageTooLarge, QueueNotFound, StoreNotFound
from cues.producers import clocks as producers
from cues.queues.queue import Queue
from cues.records.batch import Batch
from cues.txn import (
    ZERO_UUID,
    AckIntent,
    Clock,
    Flags,
    MessageType,
    NoPartitions,
    ProducerID,
    Publisher,
    ReadCommitted,
    ReadUncommitted,
    WaitTimeout,
    append_stamped,
    build_uuid,
    journal_of,
    modulo_mapping,
    parse_uuid,
    rendezvous_mapping,
)

OUTSIDE, CONTINUE, ACK = Flags.OUTSIDE_TXN, Flags.CONTINUE_TXN, Flags.ACK_TXN
P = ProducerID(bytes.fromhex("010203040506"))


def to(queue: Queue) -> Any:
    return lambda message: queue


def written(queue: Queue) -> list[tuple[int, bytes, int, int, dict[str, Any]]]:
    """The content of a queue: index, producer, clock, flags, message."""
    found = []
    with queue.store.core.view() as txn:
        row = queue.core.log.row(txn)
        raws = queue.core.log.read(txn, row, row.first, row.next - row.first, 1 << 40)
    for batch in queue.core.log.batches(raws):
        for offset, message in enumerate(batch.messages()):
            stamps = batch.stamps
            identity = parse_uuid(stamps.uuid(offset)) if stamps else (b"", 0, 0)
            found.append((batch.first + offset, *identity, message))
    return found


def batches(queue: Queue) -> list[Batch]:
    with queue.store.core.view() as txn:
        row = queue.core.log.row(txn)
        return queue.core.log.batches(queue.core.log.read(txn, row, row.first, row.next - row.first, 1 << 40))


def test_committed_messages_have_one_identity_a_record_batch(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s") as store, Publisher() as publisher:
        queue = store.queue("q")
        appends = [publisher.publish_committed(to(queue), {"n": n}) for n in range(500)]
        assert [append.wait() for append in appends] == list(range(1, 501))
        found = written(queue)
        assert [(index, message) for index, _, _, _, message in found] == [(n + 1, {"n": n}) for n in range(500)]
        assert {(producer, flags) for _, producer, _, flags, _ in found} == {(publisher.id, OUTSIDE)}
        clocks = [clock for _, _, clock, _, _ in found]
        assert clocks == sorted(set(clocks))
        assert [parse_uuid(append.uuid) for append in appends] == [(p, c, f) for _, p, c, f, _ in found]
        assert all(batch.stamps is not None and not batch.stamps.form for batch in batches(queue))
        number = int.from_bytes(publisher.id, "big")
        assert dict(producers.rows(store, "q")) == {number: producers.Written(clocks[-1], clocks[-1], 0, 0)}


def test_a_transaction_over_two_stores_is_pending_until_its_intents_are_appended(tmp_path: Path) -> None:
    with cues.open(tmp_path / "a") as a, cues.open(tmp_path / "b", durability="process") as b, Publisher() as publisher:
        one, two, three = a.queue("one"), a.queue("two"), b.queue("three")
        for n, queue in enumerate((two, one, three, two)):
            publisher.publish_uncommitted(to(queue), {"n": n})
        intents = publisher.build_ack_intents()
        assert [intent.journal for intent in intents] == [journal_of(queue) for queue in (two, one, three)]
        assert publisher.build_ack_intents() == []  # they were built; a transaction without messages has none
        assert [flags for *_, flags, _ in written(two)] == [CONTINUE, CONTINUE]  # and nothing acknowledges them yet
        publisher.append_ack_intents(intents)
        before = [written(queue) for queue in (one, two, three)]
        assert [(flags, message) for *_, flags, message in before[1]] == [
            (CONTINUE, {"n": 0}), (CONTINUE, {"n": 3}), (ACK, {}),
        ]  # fmt: skip
        for queue in before:
            clocks = [clock for _, _, clock, _, _ in queue]
            assert clocks == sorted(set(clocks))
        publisher.append_ack_intents(intents)
        assert [written(queue) for queue in (one, two, three)] == before


def test_the_next_transaction_waits_for_the_acknowledgement_queue_by_queue(tmp_path: Path) -> None:
    """Its messages do, and not who publishes them."""
    with cues.open(tmp_path / "s", durability="process") as store, Publisher() as publisher:
        one, two = store.queue("one"), store.queue("two")
        publisher.publish_uncommitted(to(one), {"n": 1})
        intents = publisher.build_ack_intents()
        held = [publisher.publish_uncommitted(to(one), {"n": n}) for n in (2, 3)]
        assert publisher.publish_uncommitted(to(two), {"n": 1}).wait(60) == 1  # nothing is due there
        publisher.publish_committed(to(store.queue("three")), {"n": 1}).wait(60)
        for late in (lambda: held[0].wait(0), lambda: publisher.flush(0), lambda: publisher.build_ack_intents(0)):
            with pytest.raises(WaitTimeout, match="acknowledgement of the last transaction in 'one'"):
                late()
        assert len(one) == 1
        publisher.append_ack_intents(intents)
        assert [append.wait(60) for append in held] == [3, 4]
        publisher.append_ack_intents(publisher.build_ack_intents())
        assert [(flags, message) for *_, flags, message in written(one)] == [
            (CONTINUE, {"n": 1}), (ACK, {}), (CONTINUE, {"n": 2}), (CONTINUE, {"n": 3}), (ACK, {}),
        ]  # fmt: skip


def test_an_acknowledgement_that_is_not_appended_is_reported_to_the_waiting_call(tmp_path: Path) -> None:
    """Without a timeout of the call's own, after the publisher's: the program would wait for itself."""
    with (
        cues.open(tmp_path / "s", durability="process") as store,
        Publisher(acknowledge_timeout_s=0.05) as publisher,
    ):
        queue = store.queue("q")
        publisher.publish_uncommitted(to(queue), {"n": 1})
        publisher.build_ack_intents()
        held = publisher.publish_uncommitted(to(queue), {"n": 2})
        for late in (held.wait, publisher.flush, publisher.build_ack_intents):
            with pytest.raises(WaitTimeout, match=r"Waited 0\.05 s for the acknowledgement .* append_ack_intents"):
                late()
    assert held.done  # a publisher that is closed waits for no acknowledgement
    with pytest.raises(cues.CuesError, match="dropped the transaction"):
        held.wait()


def test_what_waits_for_an_acknowledgement_is_bounded_in_memory(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("cues.txn.writer.WAITING_BYTES_MAX", 1000)
    with cues.open(tmp_path / "s", durability="process") as store, Publisher() as publisher:
        queue = store.queue("q")
        publisher.publish_uncommitted(to(queue), {"n": 0})
        intents = publisher.build_ack_intents()
        for n in (1, 2):
            publisher.publish_uncommitted(to(queue), {"n": n, "x": "x" * 600})
        with pytest.raises(WaitTimeout, match="acknowledgement"):
            publisher.publish_uncommitted(to(queue), {"n": 3}, timeout=0)
        started, done = threading.Event(), threading.Event()

        def publish() -> None:
            started.set()
            publisher.publish_uncommitted(to(queue), {"n": 3})
            done.set()

        thread = threading.Thread(target=publish)
        thread.start()
        started.wait()
        publisher.append_ack_intents(intents)
        thread.join()
        assert done.is_set()
        publisher.append_ack_intents(publisher.build_ack_intents())
        assert [e.message["n"] for e in ReadCommitted(queue) if not e.acknowledgement] == [0, 1, 2, 3]


def test_a_transaction_that_is_aborted_is_never_seen_and_the_publisher_continues(tmp_path: Path) -> None:
    """Whatever of it is in its queues, waits for an acknowledgement, or could not be appended."""
    with cues.open(tmp_path / "s", durability="process") as store, Publisher() as publisher:
        queue, other = store.queue("q"), store.queue("other")
        publisher.abort()  # of nothing
        publisher.publish_uncommitted(to(queue), {"n": 1})
        publisher.append_ack_intents(publisher.build_ack_intents())
        publisher.publish_uncommitted(to(queue), {"n": "aborted"})
        publisher.build_ack_intents()  # the checkpoint that should hold them is never made
        held = publisher.publish_uncommitted(to(queue), {"n": "held"})
        publisher.publish_uncommitted(to(other), {"n": "aborted"})
        publisher.abort()
        with pytest.raises(cues.CuesError, match="dropped the transaction"):
            held.wait()

        def fail(name: str) -> None:
            raise OSError("no space")

        faults.arm("publish.inside", 1, fail)
        publisher.publish_uncommitted(to(queue), {"n": "lost"})
        with pytest.raises(cues.CuesError, match="no space"):
            publisher.build_ack_intents()
        faults.disarm()
        publisher.abort()
        publisher.flush()
        publisher.publish_uncommitted(to(queue), {"n": 2})
        publisher.append_ack_intents(publisher.build_ack_intents())
        publisher.publish_committed(to(other), {"n": 3}).wait()
        for one, wanted in ((queue, [1, 2]), (other, [3])):
            assert [e.message["n"] for e in ReadCommitted(one) if not e.acknowledgement] == wanted


def test_a_message_outside_of_the_transaction_is_refused_where_it_would_drop_what_is_pending(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store, Publisher() as publisher:
        queue, other = store.queue("q"), store.queue("other")
        publisher.publish_uncommitted(to(queue), {"n": 1})
        with pytest.raises(InvalidArgument, match="pending messages in 'q'"):
            publisher.publish_committed(to(queue), {"n": 2})
        publisher.publish_committed(to(other), {"n": 2}).wait()
        with Publisher() as another:
            another.publish_committed(to(queue), {"n": 3}).wait()
        intents = publisher.build_ack_intents()
        with pytest.raises(InvalidArgument, match="pending messages"):
            publisher.publish_committed(to(queue), {"n": 4})
        publisher.append_ack_intents(intents)
        publisher.publish_committed(to(queue), {"n": 5}).wait()


def test_what_cannot_be_published_leaves_no_trace_and_no_intent(tmp_path: Path) -> None:
    seen: list[Any] = []

    def validate(message: Any) -> None:
        seen.append(dict(message))
        if message.get("bad"):
            raise ValueError("bad")

    def refuse(message: Any) -> Queue:
        raise LookupError("nowhere")

    with cues.open(tmp_path / "s", durability="process") as store, Publisher(validate=validate) as publisher:
        queue = store.queue("q", max_message_bytes=100)
        for mapping, message, error in (
            (refuse, {"bad": True}, ValueError),  # before it is mapped
            (refuse, {}, LookupError),
            (to(queue), {"x": object()}, CodecError),
            (to(queue), {"x": "x" * 200}, MessageTooLarge),
            (to(queue), {"q/other": 1}, InvalidArgument),
        ):
            with pytest.raises(error):
                publisher.publish_uncommitted(mapping, message)
            with pytest.raises(error):
                publisher.publish_committed(mapping, message)
        assert publisher.build_ack_intents() == [] and len(queue) == 0
        assert not any("q/uuid" in message for message in seen)


@pytest.mark.interpreted
def test_arguments_of_another_type_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    wrong: Any
    for wrong in (5, "now"):
        with pytest.raises(InvalidArgument, match="not a Clock"):
            Publisher(clock=wrong)
        with pytest.raises(InvalidArgument, match="validate="):
            Publisher(validate=wrong)
    with cues.open(tmp_path / "s", durability="process") as store, Publisher() as publisher:
        queue = store.queue("q")
        for wrong in (queue, None, "q"):
            with pytest.raises(InvalidArgument, match="lambda message: queue"):
                publisher.publish_committed(wrong, {})
        with pytest.raises(InvalidArgument, match="A queue was expected, found None"):
            publisher.publish_committed(lambda message: None, {})  # type: ignore[arg-type, return-value]
        with pytest.raises(InvalidArgument, match="A message is a dict, found int"):
            publisher.publish_uncommitted(to(queue), 5)
        for wrong in (5, AckIntent("a/q", b"junk"), AckIntent("a/q", b"\x92\xc4\x01a\xa1b"), None):
            with pytest.raises(InvalidArgument, match="not an acknowledgement intent"):
                publisher.append_ack_intents([wrong])
        for wrong in ("q", None, store):
            with pytest.raises(InvalidArgument, match=r"store\.queue"):
                append_stamped(wrong, [(build_uuid(P, 160, OUTSIDE), {})])
            with pytest.raises(InvalidArgument, match=r"store\.queue"):
                ReadCommitted(wrong)
            with pytest.raises(InvalidArgument, match=r"store\.queue"):
                ReadUncommitted(wrong)
        wrong = "3"
        with pytest.raises(InvalidArgument, match="end='3'"):
            ReadUncommitted(queue, end=wrong)
        publisher.flush()
        assert len(queue) == 0 and publisher.build_ack_intents() == []


def test_messages_may_opt_out_or_be_of_another_type(tmp_path: Path) -> None:
    @dataclass
    class Order:
        item: str
        uuid: uuid.UUID | None = None

    kind = MessageType(
        get_uuid=lambda m: m.uuid,
        set_uuid=lambda m, value: setattr(m, "uuid", value),
        new_acknowledgement=lambda journal: Order(""),
        new=lambda fields: Order(**fields),
        fields=lambda m: {"item": m.item},
    )
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")
        with Publisher() as publisher:
            publisher.publish_uncommitted(to(queue), {"n": 1, "q/uuid": ZERO_UUID})
            again = publisher.publish_committed(to(queue), {"n": 2, "q/uuid": build_uuid(P, 5, ACK)})
            again.wait()  # the UUID that it came with is not kept
            assert publisher.build_ack_intents() == []
            assert parse_uuid(again.uuid)[0] == publisher.id
        with Publisher(message_type=kind) as typed:
            typed.publish_committed(to(queue), Order("tea")).wait()
            typed.publish_committed(to(queue), Order("rum", ZERO_UUID)).wait()
        assert [(producer, message) for _, producer, _, _, message in written(queue)] == [
            (b"", {"n": 1}), (publisher.id, {"n": 2}), (typed.id, {"item": "tea"}), (b"", {"item": "rum"}),
        ]  # fmt: skip


def test_metadata_of_published_messages_is_kept_as_an_appender_does(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store, Publisher() as publisher:
        queue = store.queue("q")
        for n in range(6):
            publisher.publish_uncommitted(
                to(queue), {"n": n, "q/type": "t", **({"q/meta": {"from": n}} if n % 3 else {})}
            )
        publisher.append_ack_intents(publisher.build_ack_intents())
        append_stamped(queue, [(build_uuid(P, 160 * n, OUTSIDE), {"n": n, "q/meta": {"from": n}}) for n in (6, 7)])
        found = list(queue.tailer(meta=True))
        assert [(m["n"], m["q/meta"].get("from")) for m in found] == [
            (0, None), (1, 1), (2, 2), (3, None), (4, 4), (5, 5), (6, 6), (7, 7),
        ]  # fmt: skip
        clocks = [clock for _, producer, clock, _, _ in written(queue) if producer == publisher.id]
        assert len(clocks) == 7 and clocks == sorted(set(clocks))


def test_a_shared_clock_is_not_moved_by_wall_time_and_orders_several_publishers(tmp_path: Path) -> None:
    clock = Clock(1000)
    with cues.open(tmp_path / "s", durability="process") as store, Publisher(clock) as one, Publisher(clock) as two:
        queue = store.queue("q")
        for n in range(6):
            (one, two)[n % 2].publish_committed(to(queue), {"n": n}).wait()
        assert [clock for _, _, clock, _, _ in written(queue)] == [1000 + 160 * n for n in range(1, 7)]
        assert int(clock) == 1000 + 6 * 160


def test_threads_publish_to_queues_of_two_stores_without_losing_or_disordering(tmp_path: Path) -> None:
    with cues.open(tmp_path / "a", durability="process") as a, cues.open(tmp_path / "b", durability="process") as b:
        queues = [a.queue("one"), a.queue("two"), b.queue("three")]
        mapping = modulo_mapping(lambda message: str(message["key"]).encode(), queues)
        with Publisher() as publisher:

            def publish(thread: int) -> None:
                for n in range(400):
                    publisher.publish_committed(mapping, {"key": (thread, n % 7), "n": n})

            threads = [threading.Thread(target=publish, args=(thread,)) for thread in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            publisher.flush()
        by_key: dict[Any, list[int]] = {}
        for queue in queues:
            found = written(queue)
            clocks = [clock for _, _, clock, _, _ in found]
            assert clocks == sorted(set(clocks))  # or a reader would drop some as repetitions
            for *_, message in found:
                by_key.setdefault(message["key"], []).append(message["n"])
        assert len(by_key) == 28
        assert all(by_key[thread, k] == list(range(k, 400, 7)) for thread, k in by_key)


def test_an_append_that_fails_is_reported_by_wait_and_flush_and_stops_the_transaction(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store, Publisher() as publisher:
        queue = store.queue("q")

        def fail(name: str) -> None:
            raise OSError("no space")

        faults.arm("publish.inside", 1, fail)
        lost = publisher.publish_uncommitted(to(queue), {"n": 1})
        with pytest.raises(cues.CuesError, match="no space"):
            lost.wait()
        faults.disarm()
        with pytest.raises(cues.CuesError, match="no space"):
            publisher.flush()
        publisher.flush()  # told once
        publisher.publish_uncommitted(to(queue), {"n": 2}).wait()
        with pytest.raises(cues.CuesError, match="no space"):
            publisher.build_ack_intents()
        assert [message for *_, message in written(queue)] == [{"n": 2}]


def test_a_publisher_is_not_used_by_a_forked_child_which_makes_its_own(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store, Publisher() as publisher:
        queue = store.queue("q")
        pending = publisher.publish_committed(to(queue), {"n": 1})
        pending.wait()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = "nothing"
            try:
                calls = (
                    lambda: publisher.publish_committed(to(queue), {"n": 2}),
                    lambda: publisher.publish_uncommitted(to(queue), {"n": 2}),
                    publisher.flush,
                    publisher.build_ack_intents,
                    lambda: publisher.append_ack_intents([]),
                )
                for call in calls:
                    with pytest.raises(Forked):
                        call()
                publisher.close()  # as the end of a with block does
                said = Publisher().id.hex()
            finally:
                os.write(write, said.encode())
                os._exit(0)
        os.waitpid(pid, 0)
        said = os.read(read, 100).decode()
        os.close(read)
        os.close(write)
        assert len(said) == 12 and said != publisher.id.hex()
        assert publisher.publish_committed(to(queue), {"n": 3}).wait() == 2


def test_a_closed_publisher_and_a_closed_store(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")
        publisher = Publisher()
        publisher.publish_committed(to(queue), {"n": 1})
        publisher.close()
        publisher.close()
        assert len(queue) == 1
        with pytest.raises(Closed):
            publisher.publish_committed(to(queue), {"n": 2})
        another = Publisher()
    with pytest.raises(Closed):
        another.publish_committed(to(queue), {"n": 3})
    another.close()


def test_intents_of_a_checkpoint_are_appended_by_a_publisher_that_knows_none_of_the_queues(tmp_path: Path) -> None:
    with cues.open(tmp_path / "a") as a, Publisher() as publisher:
        publisher.publish_uncommitted(to(a.queue("q")), {"n": 1})
        intents = publisher.build_ack_intents()
    moved = tmp_path / "moved"
    with Publisher() as recovering:
        recovering.append_ack_intents(intents)
        with cues.open(tmp_path / "a") as a:
            assert [flags for *_, flags, _ in written(a.queue("q"))] == [CONTINUE, ACK]
        (tmp_path / "a").rename(moved)
        for missing in ("refuse", "removed"):
            with pytest.raises(StoreNotFound, match="not at"):
                recovering.append_ack_intents(intents, missing=missing)
        with pytest.raises(InvalidArgument, match="missing='what'"):
            recovering.append_ack_intents(intents, missing="what")  # type: ignore[arg-type]
        assert recovering.append_ack_intents(intents, missing="skip") == intents
        with cues.open(moved) as a:
            assert recovering.append_ack_intents(intents) == []  # open, so it is found
            other = AckIntent(intents[0].journal[:-1] + "gone", intents[0].intent)
            with pytest.raises(QueueNotFound, match="'gone'"):
                recovering.append_ack_intents([other])
            for missing in ("removed", "skip"):
                assert recovering.append_ack_intents([other], missing=missing) == [other]
            assert len(a.queue("q")) == 2


def test_a_producer_that_died_in_its_next_transaction_is_rolled_back_by_its_last_acknowledgement(
    tmp_path: Path,
) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        queue, other = store.queue("q"), store.queue("other")
        dead = Publisher()
        dead.publish_uncommitted(to(queue), {"n": 1})
        intents = dead.build_ack_intents()
        dead.append_ack_intents(intents)
        dead.publish_uncommitted(to(queue), {"n": 2})
        dead.publish_uncommitted(to(other), {"n": 3}).wait()
        dead.close()
        with Publisher() as recovering:
            recovering.append_ack_intents(intents)
            recovering.append_ack_intents(intents)
            assert [flags for *_, flags, _ in written(queue)] == [CONTINUE, ACK, CONTINUE, ACK]
            # No intent names the other queue.
            assert recovering.roll_back(other, dead.id) and not recovering.roll_back(other, dead.id)
            assert [flags for *_, flags, _ in written(other)] == [CONTINUE, ACK]


def test_the_examples_of_the_page_run_and_print_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "transactions.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(compile(block, "transactions.md", "exec"), {"__name__": "page"})
        assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)\s+# (.*)", block)


# --- messages that were stamped elsewhere ---------------------------------------------------------


def test_an_appender_takes_the_uuid_of_a_message_into_the_header(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")
        identity = build_uuid(P, 320, OUTSIDE)
        queue.appender().write({"n": 1, "q/uuid": identity})
        queue.appender().write_many([{"n": 2}, {"n": 3, "q/uuid": str(build_uuid(P, 480, OUTSIDE))}, {"n": 4}])
        queue.appender().write({"n": 5, "q/uuid": ZERO_UUID})
        assert written(queue) == [
            (1, P, 320, 0, {"n": 1}), (2, b"", 0, 0, {"n": 2}), (3, P, 480, 0, {"n": 3}), (4, b"", 0, 0, {"n": 4}),
            (5, b"", 0, 0, {"n": 5}),
        ]  # fmt: skip
        head = batches(queue)[0].value
        assert head[9] == 0x02
        assert head[20:36] == P + (320).to_bytes(8, "big") + b"\0\0"
        for wrong in ("x", 5, uuid.uuid4(), build_uuid(P, 0, OUTSIDE)):
            with pytest.raises(InvalidArgument) as caught:
                queue.appender().write_many([{"n": 1}, {"q/uuid": wrong}])
            assert "messages[1]" in str(caught.value)
        assert len(queue) == 5


def test_clocks_that_do_not_differ_by_one_tick_are_kept_one_by_one(tmp_path: Path) -> None:
    rng = random.Random(1)
    clocks, clock = [], 10
    for _ in range(3000):
        clock += rng.choice((1, 160, 70_000, 1 << 33))
        clocks.append(clock)
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")
        pairs = [(build_uuid(P, clock, OUTSIDE), {"n": n}) for n, clock in enumerate(clocks)]
        assert append_stamped(queue, pairs) == 3000
        assert [(clock, message["n"]) for _, _, clock, _, message in written(queue)] == list(zip(clocks, range(3000)))
        assert all(len(batch.value) <= 4080 for batch in batches(queue)) and len(batches(queue)) < 60
        large = [(build_uuid(P, clocks[-1] + 5, CONTINUE), {"x": "x" * 20_000})]
        assert append_stamped(queue, large) == 1
        assert written(queue)[-1][1:4] == (P, clocks[-1] + 5, CONTINUE)


STORY = [
    (160, CONTINUE), (320, CONTINUE), (480, ACK), (640, OUTSIDE), (800, CONTINUE), (480, ACK), (960, CONTINUE),
    (1120, CONTINUE), (1280, ACK), (1440, CONTINUE), (1280, ACK),
]  # fmt: skip


def test_a_closed_log_that_is_appended_again_changes_nothing(tmp_path: Path) -> None:
    """Two and more transactions of one producer, rollbacks among them, whole or in any pieces."""
    seed = seeds.new()
    rng = random.Random(seed)
    other = ProducerID()
    pairs = [(build_uuid(P, clock, flags), {"n": n} if flags != ACK else {}) for n, (clock, flags) in enumerate(STORY)]
    pairs += [(build_uuid(other, 5, OUTSIDE), {"n": "other"})]
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")
        assert append_stamped(queue, pairs) == len(pairs)
        before = written(queue)
        assert [(clock, flags) for _, producer, clock, flags, _ in before if producer == P] == STORY
        assert append_stamped(queue, pairs) == 0
        for _ in range(30):
            start = rng.randrange(len(pairs))
            append_stamped(queue, pairs[start : start + rng.randrange(1, 5)])
        assert written(queue) == before
        more = [*pairs, (build_uuid(P, 1600, OUTSIDE), {"n": "new"})]
        assert append_stamped(queue, more) == 1


def test_an_acknowledgement_is_appended_again_only_while_something_is_pending(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")
        ack = (build_uuid(P, 320, ACK), {})
        assert append_stamped(queue, [(build_uuid(P, 160, CONTINUE), {}), ack]) == 2
        assert append_stamped(queue, [ack, ack]) == 0
        assert append_stamped(queue, [(build_uuid(P, 480, CONTINUE), {}), ack, ack]) == 2
        assert append_stamped(queue, [(ZERO_UUID, {"n": 1}), (ZERO_UUID, {"n": 1})]) == 2


@pytest.mark.interpreted
def test_what_cannot_be_appended_stamped_is_refused_whole(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")
        good = (build_uuid(P, 160, OUTSIDE), {"n": 1})
        for bad in (
            (uuid.uuid4(), {}), (build_uuid(P, 0, CONTINUE), {}), ("x", {}),
            (build_uuid(P, 320, OUTSIDE), {"x": object()}), (build_uuid(P, 320, OUTSIDE), [1]),
        ):  # fmt: skip
            with pytest.raises(cues.CuesError):
                append_stamped(queue, [good, bad])
        assert len(queue) == 0 and list(producers.rows(store, "q")) == []


def test_two_that_import_the_same_at_once_append_it_once(tmp_path: Path) -> None:
    pairs = [(build_uuid(P, 160 * n, OUTSIDE), {"n": n}) for n in range(1, 400)]
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")

        def bring() -> None:
            for start in range(0, len(pairs), 7):
                append_stamped(queue, pairs[start : start + 7])

        threads = [threading.Thread(target=bring) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [message["n"] for *_, message in written(queue)] == list(range(1, 400))


# --- partitions -----------------------------------------------------------------------------------


def test_a_transaction_over_partitions_of_two_stores_and_an_import_into_one(tmp_path: Path) -> None:
    with cues.open(tmp_path / "a", durability="process") as a, cues.open(tmp_path / "b", durability="process") as b:
        queue = a.queue("views", partitions=3, key="page")
        b.queue("views", partitions=2, key="page")

        def partitions() -> list[Queue]:
            return [*in_a(), *in_b()]

        in_a, in_b = a.matching("views/*"), b.matching("views/*")
        assert in_a == ["views/0", "views/1", "views/2"]

        assert len({journal_of(one) for one in partitions()}) == 5
        mapping = modulo_mapping(lambda message: str(message["page"]).encode(), partitions)
        with Publisher() as publisher:
            for page in range(40):
                publisher.publish_uncommitted(mapping, {"page": page})
            intents = publisher.build_ack_intents()
            assert len(intents) == 5
        with Publisher() as recovering:
            recovering.append_ack_intents(intents)
            with pytest.raises(InvalidArgument, match=r"3 partitions, but a transaction is on one log.*views/\*"):
                recovering.publish_committed(to(queue), {"page": 1})
            with pytest.raises(InvalidArgument, match="'views/1', which is a name"):
                recovering.publish_committed(lambda message: "views/1", {"page": 1})
            grown = modulo_mapping(lambda message: b"x", a.matching("other/*"))
            with pytest.raises(NoPartitions):
                recovering.publish_committed(grown, {})
            a.queue("other")
            assert recovering.publish_committed(grown, {}).wait() == 1
            chosen = rendezvous_mapping(lambda message: str(message["page"]).encode(), partitions)
            places = [chosen({"page": page}) for page in range(40)]
            assert all(journal_of(one) in map(journal_of, partitions()) for one in places)
        found = [m["page"] for one in partitions() for m in one.tailer(isolation="committed")]
        assert sorted(found) == list(range(40))
        assert sorted(m["page"] for m in queue.tailer()) == sorted(
            m["page"] for one in in_a() for m in one.tailer()
        )  # the merged reader passes acknowledgements by, too
        queue.appender().write_many([{"page": n, "q/uuid": build_uuid(P, 160 + n, OUTSIDE)} for n in range(20)])
        keys = {key for one in in_a() for key, _ in producers.rows(a, one.core.log.id)}
        assert int.from_bytes(P, "big") in keys
        with pytest.raises(InvalidArgument, match="on one log"):
            append_stamped(queue, [])
        assert sorted(m["page"] for m in queue.tailer(isolation="committed") if m["page"] >= 20) == sorted(
            m["page"] for m in queue.tailer() if m["page"] >= 20
        )
