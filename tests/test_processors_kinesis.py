"""Kinesis: records once on the queue over kills, splits and merges, gaps, outages, and a sink that keeps the order.

The server is moto with the shards of Kinesis (tests/kinesis_server.py).
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import re
import signal
import socket
import threading
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seeds
from children import Child
from kinesis_server import KinesisServer
from sets import bounded
from small import halted_at_end, until

import cues
from cues import MessagesPurged, testing
from cues.errors import Away, CheckpointError, Diverged, InvalidArgument, ProcessorStopped
from cues.processors import kinesis_sink, kinesis_source, kpl, shape
from cues.processors.kinesis import KinesisSender, KinesisStream

pytest.importorskip("boto3")
pytest.importorskip("moto")


PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "kinesis.md"


def numbers(count: int, start: int = 0, keys: int = 5) -> list[tuple[str, bytes]]:
    return [(f"k{n % keys}", str(n).encode()) for n in range(start, start + count)]


def source_of(server: KinesisServer, stream: str, **options: Any) -> KinesisStream:
    return KinesisStream(stream, endpoint_url=server.url, **{"data": "json", "poll_s": 0.2, "timeout_s": 5, **options})


def read(store: Path, source: KinesisStream) -> list[Any]:
    """Run to the end; return all messages of the queue."""
    graph = cues.Graph("g", [cues.Source("in", source)], errors="errors", durability="process")
    with graph.start(store=store) as started:
        started.wait_done(120)
        return started.messages("in")


def in_order(messages: list[Any], keys: int = 5) -> dict[str, list[int]]:
    """The numbers of each partition key, in the order of the queue."""
    found: dict[str, list[int]] = {f"k{n}": [] for n in range(keys)}
    for message in messages:
        found[message["key"]].append(message["data"])
    return found


def expected(count: int, keys: int = 5) -> dict[str, list[int]]:
    return {f"k{n}": list(range(n, count, keys)) for n in range(keys)}


def aggregated(*records: tuple[str, bytes]) -> bytes:
    """A record as the Kinesis Producer Library packs several, with fields that a reader does not need."""

    def field(number: int, value: bytes) -> bytes:
        size, length = len(value), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + value

    keys = sorted({key for key, _ in records})
    body = b"".join(field(1, key.encode()) for key in keys) + field(2, b"0")
    for key, data in records:
        body += field(3, bytes([8, keys.index(key), 16, 0]) + field(3, data) + field(4, b"\x0a\x01t"))
    return kpl.MAGIC + body + hashlib.md5(body).digest()


# --- the source -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_records_are_read_once_and_a_later_run_continues(tmp_path: Path, kinesis: KinesisServer) -> None:
    stream = kinesis.stream()
    kinesis.put(stream, *numbers(20), ("k0", b"no JSON"))
    found = read(tmp_path / "s", source_of(kinesis, stream))
    assert in_order(found) == expected(20)
    first = found[0]
    assert first["stream"] == stream and first["shard"].startswith("shardId-") and first["part"] is None
    assert int(first["sequence"]) > 10**30 and abs((datetime.now(UTC) - first["time"]).total_seconds()) < 60
    kinesis.put(stream, *numbers(20, 20))
    assert in_order(read(tmp_path / "s", source_of(kinesis, stream))) == expected(40)
    with cues.open(tmp_path / "s", readonly=True) as store:
        (error,) = testing.messages(store, "errors")
        assert "data='json'" in str(error) and "shardId-" in str(error)


@pytest.mark.slow
def test_values_and_what_a_stranger_sets(tmp_path: Path, kinesis: KinesisServer) -> None:
    stream = kinesis.stream(1)
    kinesis.put(stream, ("a", b'{"n": 1}'), ("a", b"[1]"), ("a", b'{"q/uuid": 1}'), ("b", b'{"n": 2}'))
    source = source_of(kinesis, stream, shape="value")
    graph = cues.Graph("g", [cues.Source("in", source)], errors="errors", durability="process")
    seen = []

    @graph.sink("in")
    def save(message: Any, process: cues.Process) -> None:
        seen.append((message, process.metadata["kinesis"]["key"]))

    with graph.start(store=tmp_path / "s") as started:
        started.wait_done(60)
        failed = [str(error) for error in started.messages("errors")]
    assert seen == [({"n": 1}, "a"), ({"n": 2}, "b")]
    assert len(failed) == 2 and "list, not an object" in failed[0] and "reserved key" in failed[1]


def test_splits_and_merges_keep_the_order_of_each_key(tmp_path: Path, kinesis: KinesisServer) -> None:
    """Three generations of shards are there before the first run; a fourth comes between two runs."""
    stream, count = kinesis.stream(1), 0
    for change in (lambda: kinesis.split(stream), lambda: kinesis.split(stream, 1), lambda: kinesis.merge(stream)):
        kinesis.put(stream, *numbers(40, count))
        count += 40
        change()
    kinesis.put(stream, *numbers(40, count))
    source = source_of(kinesis, stream)
    assert in_order(read(tmp_path / "s", source)) == expected(160)
    kinesis.merge(stream)
    kinesis.put(stream, *numbers(40, 160))
    assert in_order(read(tmp_path / "s", source)) == expected(200)


@pytest.mark.slow
def test_from_each_position_over_a_reshard_the_rest_follows(kinesis: KinesisServer) -> None:
    stream = kinesis.stream(1)
    kinesis.put(stream, *numbers(3), ("k3", aggregated(("k3", b"3"), ("k4", b"4"), ("k0", b"5"))))
    kinesis.split(stream)
    kinesis.put(stream, *numbers(4, 6))
    source = source_of(kinesis, stream)
    whole = list(source(None))
    for stop in range(len(whole)):
        before, rest = whole[: stop + 1], list(source(whole[stop][0]))
        assert in_order([message for _, message in before + rest if message]) == expected(10), stop


def test_an_aggregated_record_is_its_records() -> None:
    records = [("a", b"1"), ("b" * 300, b"2" * 300), ("a", b"")]
    assert kpl.parts_of(aggregated(*records)) == records
    assert kpl.parts_of(aggregated()) == []
    whole = aggregated(*records)
    assert kpl.parts_of(whole[:-1]) is kpl.parts_of(whole[:9]) is kpl.parts_of(b"") is kpl.parts_of(b"plain") is None
    chance = random.Random(seeds.new())
    for _ in range(300):  # a body that is no message of protobuf, with a digest that is right
        body = bytearray(whole[4:-16])
        body[chance.randrange(len(body))] = chance.randrange(256)
        kpl.parts_of(kpl.MAGIC + bytes(body) + hashlib.md5(body).digest())


@pytest.mark.slow
def test_throttled_reads_and_expired_iterators_are_repeated(
    tmp_path: Path, kinesis: KinesisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kinesis_source, "_FIRST_PAUSE_S", 0.01)
    stream = kinesis.stream(1)
    kinesis.put(stream, *numbers(1_500))  # the server gives 1,000 at once
    kinesis.tell(stream, throttle=2, expire=1)
    assert in_order(read(tmp_path / "s", source_of(kinesis, stream))) == expected(1_500)
    assert "ProvisionedThroughputExceeded" in caplog.text and "waiting" not in caplog.text
    monkeypatch.setattr(kinesis_source, "_PATIENCE_S", 0.0)
    kinesis.tell(stream, throttle=1_000)
    with pytest.raises(Away, match="ProvisionedThroughputExceeded"):
        list(source_of(kinesis, stream)(None))


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_records_that_the_retention_removed_are_told(closed: bool, tmp_path: Path, kinesis: KinesisServer) -> None:
    stream = kinesis.stream(1)
    kinesis.put(stream, *numbers(10))
    read(tmp_path / "s", source_of(kinesis, stream))
    if closed:
        kinesis.put(stream, *numbers(2, 10))
        kinesis.split(stream)
        kinesis.tell(stream, trim=12)
        kinesis.client.list_shards(StreamName=stream)
        kinesis.put(stream, *numbers(8, 12))
    else:
        kinesis.put(stream, *numbers(10, 10))
        kinesis.tell(stream, trim=12)
    with pytest.raises(ProcessorStopped, match="may have been removed before they were read") as caught:
        read(tmp_path / "s", source_of(kinesis, stream))
    assert isinstance(caught.value.__cause__, MessagesPurged)
    source = source_of(kinesis, stream, on_gap="fail")
    left = [*range(10), *range(12, 20)]
    for _ in range(2):  # told once
        assert sorted(message["data"] for message in read(tmp_path / "s", source)) == left
        with cues.open(tmp_path / "s", readonly=True) as store:
            assert len(testing.messages(store, "errors")) == 1


DAY_S = 86_400.0


class Modelled:
    """A client of a stream that keeps records for a day. Its shards are lists; :attr:`ahead_s` moves its clock.

    As Kinesis may do, an iterator at a record that is gone gives nothing for ever, and says that it is a day late.
    """

    created = datetime(2026, 1, 1, tzinfo=UTC)

    def __init__(self, shards: dict[str, list[float]], most: int = 2) -> None:
        self.now_s, self.ahead_s, self.most, self.asked = time.time(), 0.0, most, 0
        self.shards = {id: [self.now_s - age_s for age_s in ages] for id, ages in shards.items()}
        self.listed = list(shards)
        self.closed: set[str] = set()

    def time(self) -> float:
        return self.now_s + self.ahead_s

    def describe_stream_summary(self, **_: Any) -> Any:
        summary = {"StreamStatus": "ACTIVE", "StreamCreationTimestamp": self.created, "RetentionPeriodHours": 24}
        return {"StreamDescriptionSummary": summary, "ResponseMetadata": {"HTTPHeaders": {}}}

    def list_shards(self, **_: Any) -> Any:
        end = {"EndingSequenceNumber": "9"}
        return {
            "Shards": [{"ShardId": id, "SequenceNumberRange": end if id in self.closed else {}} for id in self.listed]
        }

    def get_shard_iterator(self, ShardId: str, ShardIteratorType: str, **at: Any) -> Any:
        times, first = self.shards[ShardId], 0
        if ShardIteratorType == "AT_SEQUENCE_NUMBER":
            first = int(at["StartingSequenceNumber"])
            if first >= len(times) or times[first] < self.time() - DAY_S:
                return {"ShardIterator": f"{ShardId} -1"}
        elif ShardIteratorType == "AT_TIMESTAMP":
            first = sum(each < at["Timestamp"].timestamp() for each in times)
        return {"ShardIterator": f"{ShardId} {first}"}

    def get_records(self, ShardIterator: str, **_: Any) -> Any:
        self.asked += 1
        id, index = ShardIterator.split()
        times, now_s = self.shards[id], self.time()
        if int(index) < 0:
            return {"Records": [], "NextShardIterator": ShardIterator, "MillisBehindLatest": round(DAY_S * 1000)}
        kept = [n for n in range(int(index), len(times)) if times[n] >= now_s - DAY_S]
        records = [
            {
                "SequenceNumber": str(n),
                "Data": str(n).encode(),
                "PartitionKey": "k",
                "ApproximateArrivalTimestamp": datetime.fromtimestamp(times[n], UTC),
            }
            for n in kept[: self.most]
        ]
        left = kept[self.most :]
        answer = {
            "Records": records,
            "MillisBehindLatest": round((now_s - times[left[0] - 1]) * 1000) if left else 0,
            "NextShardIterator": f"{id} {left[0] if left else len(times)}",
        }
        return {name: value for name, value in answer.items() if left or id not in self.closed or name[0] != "N"}


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*given: Any, **options: Any) -> tuple[Modelled, KinesisStream]:
        model = Modelled(*given)
        monkeypatch.setattr(kinesis_source, "time", SimpleNamespace(time=model.time, monotonic=time.monotonic))
        return model, KinesisStream("x", client=lambda: model, data="json", on_gap="fail", poll_s=0.2, **options)

    return make


def told(items: Any) -> list[Any]:
    return [item["data"] if isinstance(item, dict) else type(item) for _, item in items if item is not None]


def test_a_source_that_falls_behind_the_retention_tells_the_gap(modelled: Any) -> None:
    """One record a minute. While the first ones are taken, the clock moves by half an hour, and others are removed."""
    model, source = modelled({"a": [DAY_S - 60 * n - 5 for n in range(60)]}, 10)
    items = source(None)
    assert told(next(items) for _ in range(11)) == [*range(10)]
    model.ahead_s = 1_800
    assert told(items) == [MessagesPurged, *range(30, 60)]


def test_a_source_at_the_edge_of_the_retention_has_no_gap(modelled: Any) -> None:
    """Nothing is removed before it is read, and the record of the position is removed after it."""
    model, source = modelled({"a": [DAY_S - 5 * n - 2 for n in range(12)]})
    found = []
    for _, item in source(None):
        if item is not None:
            found.append(item["data"])
            model.ahead_s += 3
    assert found == list(range(12))


def test_a_shard_whose_last_record_is_gone_goes_on_at_the_time_up_to_which_it_was_read(modelled: Any) -> None:
    """A later run saw an hour ago that nothing followed the record."""
    model, source = modelled({"a": [2 * DAY_S, 60, 30]})
    created_ms = round(model.created.timestamp() * 1000)
    seen_ms = round((model.now_s - 3_600) * 1000)
    assert told(source([1, created_ms, [["a", "0", 0, seen_ms]], []])) == [1, 2]
    assert told(source([1, created_ms, [["a", "0", 0, 0]], []])) == [MessagesPurged, 1, 2]


@pytest.mark.slow
def test_answers_of_many_shards_are_bounded_and_positions_are_whole(modelled: Any) -> None:
    model, source = modelled({f"s{n:03}": [60.0] * 4 for n in range(100)})
    items = source(None)
    positions = [next(items) for _ in range(2)]
    time.sleep(0.3)  # for requests that must not come
    assert model.asked <= 10
    positions += items
    assert len(told(positions)) == 400
    for position, _ in positions[:: len(positions) // 4]:
        assert len(position[2]) == 100
        taken = sum(int(sequence) + 1 for _, sequence, *_ in position[2] if sequence)
        assert len(told(source(position))) == 400 - taken


def test_the_answer_of_a_shard_that_is_gone_is_dropped(modelled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look for the children of a closed shard finds that another one is gone, which a thread reads."""
    model, source = modelled({"a": [60], "b": [60]}, follow=True)
    model.closed = {"a", "b"}
    read, released = model.get_records, threading.Event()

    def slow(ShardIterator: str, **options: Any) -> Any:
        if ShardIterator.startswith("b"):
            released.wait(10)
            threading.Timer(0.3, lambda: setattr(process, "stopping", True)).start()
        return read(ShardIterator, **options)

    monkeypatch.setattr(model, "get_records", slow)
    process = SimpleNamespace(stopping=False, state={})
    items = source(None, process)
    found = told(next(items) for _ in range(3))
    model.listed = ["a"]
    found += told([next(items)])
    released.set()
    assert [*found, *told(items)] == [0, MessagesPurged]


@pytest.mark.slow
def test_a_shard_without_records_for_longer_than_the_retention_is_no_gap(
    tmp_path: Path, kinesis: KinesisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last record was read, and a later run saw that nothing followed. Without that run it may be a gap."""
    quiet, unseen = kinesis.stream(1), kinesis.stream(1)
    for stream in (quiet, unseen):
        kinesis.put(stream, *numbers(10))
        assert len(read(tmp_path / stream, source_of(kinesis, stream))) == 10
        kinesis.tell(stream, late=30)
    assert len(read(tmp_path / quiet, source_of(kinesis, quiet))) == 10
    for stream in (quiet, unseen):
        kinesis.tell(stream, trim=10)
        kinesis.client.list_shards(StreamName=stream)
        kinesis.put(stream, *numbers(10, 10))
    assert in_order(read(tmp_path / quiet, source_of(kinesis, quiet))) == expected(20)
    with pytest.raises(ProcessorStopped, match="may have been removed"):
        read(tmp_path / unseen, source_of(kinesis, unseen))


@pytest.mark.slow
def test_a_first_start_at_the_latest_record_and_at_a_time(tmp_path: Path, kinesis: KinesisServer) -> None:
    stream = kinesis.stream(1)
    kinesis.put(stream, *numbers(5))
    kinesis.split(stream)
    kinesis.put(stream, *numbers(10, 5))
    time.sleep(1.1)  # the time of the server has whole seconds
    latest = source_of(kinesis, stream, start="latest")
    assert read(tmp_path / "latest", latest) == []
    at = datetime.now(UTC)
    kinesis.put(stream, *numbers(5, 15))
    assert sorted(message["data"] for message in read(tmp_path / "latest", latest)) == list(range(15, 20))
    timed = source_of(kinesis, stream, start=at)
    assert sorted(message["data"] for message in read(tmp_path / "timed", timed)) == list(range(15, 20))
    long_ago = source_of(kinesis, stream, start=at - timedelta(days=9))
    assert in_order(read(tmp_path / "all", long_ago)) == expected(20)


def test_a_stream_that_was_created_again_is_refused(tmp_path: Path, kinesis: KinesisServer) -> None:
    stream = kinesis.stream(1)
    kinesis.put(stream, *numbers(3))
    read(tmp_path / "s", source_of(kinesis, stream))
    kinesis.client.delete_stream(StreamName=stream)
    kinesis.client.create_stream(StreamName=stream, ShardCount=1)
    with pytest.raises(ProcessorStopped, match="deleted and created again") as caught:
        read(tmp_path / "s", source_of(kinesis, stream))
    assert isinstance(caught.value.__cause__, Diverged)
    with pytest.raises(Diverged, match="is not one of"):
        list(source_of(kinesis, stream)([7, 7]))


LIFE = """
import sys
import cues
from cues.processors import kinesis_source
from cues.processors.kinesis import KinesisStream
path, url, stream, follow, broken = sys.argv[1:]
if broken:  # the control: children are read at once
    real = kinesis_source.Reading._ask
    def ask(self):
        self._parents = dict.fromkeys(self._parents, set())
        return real(self)
    kinesis_source.Reading._ask = ask
source = KinesisStream(stream, data="json", endpoint_url=url, follow=bool(follow), poll_s=0.2, timeout_s=5)
graph = cues.Graph("g", [cues.Source("in", source, batch_size=7)], errors="errors", durability="process")
print("begun")
with graph.start(store=path) as running:
    running.wait_done()
"""


def live(path: Path, server: KinesisServer, stream: str, follow: str = "yes", broken: str = "") -> Child:
    child = Child(LIFE, path, server.url, stream, follow, broken)
    assert child.line() == "begun"
    return child


def on_queue(path: Path) -> list[Any]:
    with cues.open(path, readonly=True) as store:
        assert "errors" not in store.queues() or not testing.messages(store, "errors")
        return testing.messages(store, "in")


@bounded("rounds", 5, 25)
def test_random_kills_over_splits_and_merges_leave_each_record_once(
    rounds: int, tmp_path: Path, kinesis: KinesisServer
) -> None:
    count = 120 * rounds
    chance, stream, done = random.Random(seeds.new()), kinesis.stream(2), threading.Event()

    def put() -> None:
        for at in range(0, count, 50):
            if at % 300 == 150:
                shards = len(kinesis.open_shards(stream))
                if shards < 3 or (shards < 6 and chance.random() < 0.5):
                    kinesis.split(stream, chance.randrange(shards))
                else:
                    kinesis.merge(stream, chance.randrange(shards - 1))
            half = numbers(50, at)
            if at % 100:
                kinesis.put(stream, *half)
            else:  # the parts of an aggregated record have one key, as the library puts them
                for key in range(5):
                    kinesis.put(stream, (f"k{key}", aggregated(*half[key::5])))
            time.sleep(0.25)
        done.set()

    putter = threading.Thread(target=put)
    putter.start()
    try:
        for _ in range(rounds):
            with live(tmp_path / "s", kinesis, stream) as child:
                time.sleep(0.3 + chance.random() * 0.6)  # it loads boto3 first
                child.kill()
    finally:
        putter.join()
    assert done.is_set()
    with live(tmp_path / "s", kinesis, stream, "") as child:
        child.end()
    assert in_order(on_queue(tmp_path / "s")) == expected(count)


@pytest.mark.slow
def test_the_control_that_reads_children_at_once_breaks_the_order(tmp_path: Path, kinesis: KinesisServer) -> None:
    stream = kinesis.stream(1)
    kinesis.put(stream, *numbers(3_000))
    kinesis.split(stream)
    kinesis.put(stream, *numbers(100, 3_000))
    for broken in ("", "broken"):
        with live(tmp_path / f"s{broken}", kinesis, stream, "", broken) as child:
            child.end()
        assert (in_order(on_queue(tmp_path / f"s{broken}")) == expected(3_100)) is not bool(broken)


@pytest.mark.slow
def test_an_outage_in_the_middle_is_waited_for(
    tmp_path: Path, kinesis: KinesisServer, caplog: pytest.LogCaptureFixture
) -> None:
    stream, out = kinesis.stream(), kinesis.stream()
    source = source_of(kinesis, stream, follow=True, timeout_s=0.5)
    sink = KinesisSender(out, shape="record", endpoint_url=kinesis.url, timeout_s=0.5)
    graph = cues.Graph("g", [cues.Source("in", source), cues.Source("more"), sink.sink("more")], durability="process")
    with halted_at_end(graph.start(store=tmp_path / "s")) as started:
        kinesis.put(stream, *numbers(50))
        until(lambda: started.messages("in"))
        with kinesis.halted():
            for key, data in numbers(20):
                started.send("more", {"key": key, "data": data})
            until(lambda: "g.in: waiting" in caplog.text and "g.put: waiting" in caplog.text)
        kinesis.put(stream, *numbers(50, 50))
        until(lambda: len(started.messages("in")) >= 100)
        assert in_order(started.messages("in")) == expected(100)
        until(lambda: len({data for _, data in kinesis.records(out)}) == 20)
    firsts = dict.fromkeys(kinesis.records(out))  # halted in the middle of a request: at least once
    assert in_order([{"key": key, "data": int(data)} for key, data in firsts]) == expected(20)


@bounded("count", 20_000, 100_000)
def test_many_records_and_a_reshard_in_the_middle(count: int, tmp_path: Path, kinesis: KinesisServer) -> None:
    stream, begun = kinesis.stream(4), time.monotonic()
    source = source_of(kinesis, stream, follow=True)
    graph, found = cues.Graph("g", [cues.Source("in", source)], durability="process"), list[Any]()
    graph.sink("in", batch=True, id="seen")(found.extend)
    with graph.start(store=tmp_path / "s"):
        for part in range(20):
            kinesis.put(stream, *numbers(count // 20, part * count // 20, 500))
            if part in (6, 12):
                kinesis.split(stream, part // 6)
            if part == 16:
                kinesis.merge(stream, 2)
        until(lambda: len(found) >= count, limit_s=300)
    print(f"{count:,} records in {time.monotonic() - begun:.1f} s")
    assert in_order(found, 500) == expected(count, 500)


# --- the sink -------------------------------------------------------------------------------------


def put(path: Path, sender: KinesisSender, *messages: dict[str, Any], **options: Any) -> list[str]:
    """Put messages; return the errors."""
    graph = cues.Graph("o", [cues.Source("out"), sender.sink("out", **options)], errors="errors")
    with cues.open(path, durability="process") as store:
        store.queue("out").appender().write_many(list(messages))
        testing.run_until_idle(graph, store)
        return [str(error) for error in testing.messages(store, "errors")]


@pytest.mark.slow
def test_messages_are_put_and_wrong_ones_are_errors(tmp_path: Path, kinesis: KinesisServer) -> None:
    stream = kinesis.stream(1)
    records = [
        {"data": b"x", "key": "k", "shard": "of another"}, {"n": 1}, {"data": datetime.now}, {"data": None},
        {"data": "y", "hash_key": 5}, {"data": "y", "key": "k" * 257}, {"data": {"n": 2}, "key": 7},
        {"data": b"z", "hash_key": "no"}, {"data": b"z" * 1_100_000}, *[{"data": b"z" * 900_000} for _ in range(6)],
    ]  # fmt: skip
    del records[2]  # no function can be on a queue
    errors = put(tmp_path / "s", KinesisSender(stream, shape="record", endpoint_url=kinesis.url), *records)
    for error, text in zip(errors, ["no 'data'", "is None", "1 to 256", "its hash_key", "Kinesis refuses it"]):
        assert text in error
    found = kinesis.records(stream)
    assert len(errors) == 5 and len(found) == 9
    assert found[0] == ("k", b"x") and found[2] == ("7", b'{"n": 2}')
    assert re.fullmatch("[0-9a-f]{32}", found[1][0])  # the identity


def process_of(count: int) -> Any:
    delivery = cues.Delivery(b"x" * 16, 0, {"t": 0}, {"t": count}, count, "ab" * 8)
    return SimpleNamespace(id="g.put", delivery=delivery, indices=list(range(count)))


@pytest.mark.slow
def test_records_that_are_not_taken_are_put_again_in_order(
    kinesis: KinesisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``order="none"`` is the control: a record that is put again comes after later ones."""
    monkeypatch.setattr(kinesis_sink, "_FIRST_PAUSE_S", 0.001)
    for order in ("key", "none"):
        stream = kinesis.stream(3)
        kinesis.tell(stream, refuse=5)
        sender = KinesisSender(stream, key="k", id="id", order=order, endpoint_url=kinesis.url)
        sender.put([{"n": n, "k": f"k{n % 40}"} for n in range(400)], process_of(400))
        rows = [json.loads(data) for _, data in kinesis.records(stream)]
        found = defaultdict(list)
        for row in rows:
            found[row["k"]].append(row["n"])
        assert sorted(row["n"] for row in rows) == list(range(400)) and len({row["id"] for row in rows}) == 400
        assert all(each == sorted(each) for each in found.values()) is (order == "key")


@pytest.mark.slow
def test_what_was_taken_before_a_step_failed_is_not_put_again(
    kinesis: KinesisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinesis_sink, "_PATIENCE_S", -1.0)
    stream = kinesis.stream(1)
    kinesis.tell(stream, refuse=1)
    sender = KinesisSender(stream, endpoint_url=kinesis.url)
    messages = [{"n": n} for n in range(9)]
    with pytest.raises(Away, match="takes no record"):
        sender.put(messages, process_of(9))
    assert len(kinesis.records(stream)) == 6
    sender.put(messages, process_of(9))
    assert sorted(json.loads(data)["n"] for _, data in kinesis.records(stream)) == list(range(9))
    sender.put(messages, process_of(9))  # a step of its own: again
    assert len(kinesis.records(stream)) == 18


PUTTING = """
import sys
import cues
from cues import testing
from cues.processors.kinesis import KinesisSender
path, url, stream, point, hit, size = sys.argv[1:]
sink = KinesisSender(stream, key="k", id="id", endpoint_url=url).sink("out", batch_size=int(size))
graph = cues.Graph("o", [cues.Source("out"), sink], durability="process")
print("begun")
with testing.crash(point, int(hit)) if point else __import__("contextlib").nullcontext():
    with graph.start(store=path) as running:
        running.wait_idle()
"""


@pytest.mark.slow
def test_a_consumer_drops_what_a_killed_sink_has_put_again(tmp_path: Path, kinesis: KinesisServer) -> None:
    """After a kill another ``batch_size`` cuts the steps in another way: the identities are those of the messages."""
    stream = kinesis.stream(2)
    with cues.open(tmp_path / "s", durability="process") as store:
        store.queue("out").appender().write_many([{"n": n, "k": f"k{n % 3}"} for n in range(60)])
    for point, hit, size in [("commit.before", 3, 16), ("commit.after", 2, 9), ("commit.before", 2, 11), ("", 1, 30)]:
        with Child(PUTTING, tmp_path / "s", kinesis.url, stream, point, hit, size) as child:
            child.line()
            assert child.returncode() == (-signal.SIGKILL if point else 0)
    repeated = Counter(data for _, data in kinesis.records(stream))
    assert len(repeated) == 60 < repeated.total()
    graph = cues.Graph("r", [cues.Source("in", source_of(kinesis, stream, shape="value"))], durability="process")
    graph.stream("in", "unique")(shape.dedupe("id", within="1h"))
    with graph.start(store=tmp_path / "r") as started:
        started.wait_done(60)
        found = started.messages("unique")
    for key in range(3):
        assert [m["n"] for m in found if m["k"] == f"k{key}"] == list(range(key, 60, 3))


# --- the page, and what is refused ----------------------------------------------------------------


def test_the_example_of_the_page(tmp_path: Path, kinesis: KinesisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("clicks", "counts"):
        kinesis.client.create_stream(StreamName=name, ShardCount=2)
    kinesis.put("clicks", *[(f"/{n % 3}", json.dumps({"page": f"/{n % 3}"}).encode()) for n in range(30)])
    monkeypatch.setenv("AWS_ENDPOINT_URL", kinesis.url)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(# clicks\.py\n.*?)```", PAGE.read_text(), re.S)
    space: dict[str, Any] = {"__name__": "clicks"}
    exec(compile(code, "clicks.py", "exec"), space)
    with space["graph"].start() as started:
        until(lambda: len(kinesis.records("counts")) >= 30)
        assert not started.messages("errors")
    found = [json.loads(data) for _, data in kinesis.records("counts")]
    for page in range(3):
        assert [row["count"] for row in found if row["page"] == f"/{page}"] == list(range(1, 11))
    assert len({row["id"] for row in found}) == 30


def test_wrong_options_are_refused() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("is not a stream", {"stream": ""}), ("is not a stream", {"stream": "arn:aws:kinesis"}),
        ("data='xml' is unknown", {"data": "xml"}), ("shape='value' with data='bytes'", {"shape": "value"}),
        ("on_gap='x'", {"on_gap": "x"}), ("start='now'", {"start": "now"}), ("poll_s", {"poll_s": 0.1}),
        ("has no zone", {"start": datetime(2026, 1, 1)}),
        ("in the future", {"start": datetime(2999, 1, 1, tzinfo=UTC)}),
        ("endpoint_url= is not", {"endpoint_url": "localhost:5000"}), ("region= is empty", {"region": ""}),
        ("client= is not a function", {"client": object()}), ("timeout_s", {"timeout_s": 0}),
        ("follow=", {"follow": "yes"}),
    ]  # fmt: skip
    for text, options in wrong:
        with pytest.raises(InvalidArgument, match=text):
            KinesisStream(**{"stream": "s", **options})
    for text, options in [
        ("shape='x'", {"shape": "x"}), ("key= is empty", {"key": ""}), ("order='x'", {"order": "x"}),
        ("id='id' with shape='record'", {"id": "id", "shape": "record"}),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgument, match=text):
            KinesisSender("s", **options)
    arn = "arn:aws:kinesis:eu-west-1:123456789012:stream/s"
    assert (
        pickle.loads(pickle.dumps(KinesisSender(arn))).stream == pickle.loads(pickle.dumps(KinesisStream(arn))).stream
    )
    assert KinesisStream(arn).kinesis.client().meta.region_name == "eu-west-1"


def test_a_missing_stream_stops_and_a_server_that_is_not_there_is_away(tmp_path: Path, kinesis: KinesisServer) -> None:
    with pytest.raises(ProcessorStopped, match=r"missing cannot be used: .*ResourceNotFound"):
        read(tmp_path / "s", source_of(kinesis, "missing"))
    with pytest.raises(ProcessorStopped) as caught:
        put(tmp_path / "o", KinesisSender("missing", endpoint_url=kinesis.url), {"n": 1})
    assert isinstance(caught.value.__cause__, CheckpointError)
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(Away):
        next(KinesisStream("s", endpoint_url=gone)(None))
