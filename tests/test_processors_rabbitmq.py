"""RabbitMQ: messages once on the queue whatever is killed, published at least once, outages, and what a broker refuses.

The broker is that of the system, on loopback; without it most tests are skipped.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import seeds
from children import Child
from ports import free_port
from proxies import Proxy
from rabbitmq_server import MISSING, RABBITMQ, RIGHTS, RabbitMQ
from sets import bounded
from small import halted_at_end, until

import cues
from cues import testing
from cues.errors import CheckpointError, InvalidArgument, ProcessorStopped
from cues.processors.rabbitmq import RabbitPublisher, RabbitQueue, Refused

pytest.importorskip("pika")
pytestmark = pytest.mark.xdist_group("rabbitmq")
USERS = {"me": ("geheim", RIGHTS), "reader": ("geheim", {"configure": "^$", "write": "^$", "read": "^open$"})}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """One node for all tests that do not end it."""
    if RABBITMQ is None:
        pytest.skip(MISSING)
    node = RabbitMQ(tmp_path_factory.mktemp("rabbitmq"), users=USERS)
    yield node
    node.stop()


@pytest.fixture
def broker(shared: RabbitMQ) -> Iterator[RabbitMQ]:
    """The node, with new queues ``in`` and ``out``."""
    for queue in ("in", "out"):
        shared.declare(queue)
    yield shared
    channel = shared.channel()
    for queue in ("in", "out"):
        channel.queue_delete(queue)
    channel.connection.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RabbitMQ]:
    """A node of one test, with the queues ``in`` and ``quorum``."""
    if RABBITMQ is None:
        pytest.skip(MISSING)
    node = RabbitMQ(tmp_path / "broker")
    try:
        node.declare("in")
        node.declare("quorum", x_queue_type="quorum")
        yield node
    finally:
        node.stop()


def graph_of(source: RabbitQueue, **options: Any) -> cues.Graph:
    return cues.Graph("g", [cues.Source("in", source, **options)], errors="errors", durability="process")


def read(store: Path, source: RabbitQueue, queue: str = "in", **options: Any) -> list[Any]:
    """Run until nothing has come for a moment; return all messages of the queue."""
    with graph_of(source, **options).start(store=store) as graph:
        graph.wait_done(60)
        return graph.messages(queue)


def bodies(messages: list[Any]) -> list[Any]:
    return [message["body"] for message in messages]


def lines(*values: int) -> list[bytes]:
    return [str(value).encode() for value in values]


def errors_of(store: Path) -> list[str]:
    with cues.open(store, readonly=True) as opened:
        return [str(error) for error in testing.messages(opened, "errors")]


# --- the source -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_messages_are_read_once_with_what_they_have(tmp_path: Path, broker: RabbitMQ) -> None:
    source = RabbitQueue(broker.url, "in", body="json", idle_exit_s=0.2)
    headers = {
        "a": "é", "n": 1 << 40, "t": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "d": Decimal("1.50"),
        "b": True, "no": None, "table": {"list": [1, "x", {"y": -1}]},
    }  # fmt: skip
    broker.publish("in", lines(*range(50)))
    broker.publish("in", [b"\xff", b"7"], headers=headers, message_id="i", priority=3, timestamp=7, type="paid")
    given = read(tmp_path / "s", source)
    assert given[0] == {
        "exchange": "", "routing_key": "in", "headers": {}, "properties": {"delivery_mode": 2}, "body": 0,
    }  # fmt: skip
    assert bodies(given) == [*range(50), 7] and given[-1]["headers"] == headers
    assert given[-1]["properties"] == {"delivery_mode": 2, "priority": 3, "message_id": "i", "timestamp": 7} | {
        "type": "paid"
    }
    (failed,) = errors_of(tmp_path / "s")
    assert "routing key 'in', with 1 bytes" in failed and "body='json'" in failed
    assert broker.count("in") == 0  # all are acknowledged
    broker.publish("in", lines(100))
    assert bodies(read(tmp_path / "s", source))[-1] == 100


@pytest.mark.slow
def test_values_as_messages_have_the_rest_in_their_metadata(tmp_path: Path, broker: RabbitMQ) -> None:
    seen = []
    broker.publish("in", [b'{"n": 1}', b"[1]", b'{"q/uuid": 1}', b'{"n": 2}'], headers={"h": 1})
    graph = graph_of(RabbitQueue(broker.url, "in", body="json", shape="value", idle_exit_s=0.2))

    @graph.sink("in")
    def save(message: Any, process: cues.Process) -> None:
        seen.append((message, process.metadata["rabbitmq"]["headers"]))

    with graph.start(store=tmp_path / "s") as started:
        started.wait_done(60)
    failed = errors_of(tmp_path / "s")
    assert seen == [({"n": 1}, {"h": 1}), ({"n": 2}, {"h": 1})]
    assert len(failed) == 2 and "list, not an object" in failed[0] and "reserved key" in failed[1]


@pytest.mark.slow
def test_a_queue_is_made_with_its_bindings(tmp_path: Path, broker: RabbitMQ) -> None:
    source = RabbitQueue(
        broker.url, "made", declare={"arguments": {"x-max-length": 100}}, bindings=[("amq.topic", "a.#")],
        body="text", idle_exit_s=0.2,
    )  # fmt: skip
    for _ in range(2):  # it is made once
        assert read(tmp_path / "s", source) == []
    channel = broker.channel()
    channel.basic_publish("amq.topic", "a.b", b"x", mandatory=True)
    (given,) = read(tmp_path / "s", source)
    assert given["exchange"] == "amq.topic" and given["routing_key"] == "a.b" and given["body"] == "x"
    other = RabbitQueue(broker.url, "made", declare={})
    with pytest.raises(ProcessorStopped, match=r"406 PRECONDITION_FAILED.*correct declare="):
        read(tmp_path / "o", other)
    channel.queue_delete("made")
    channel.connection.close()


@pytest.mark.slow
def test_a_stream_is_refused(tmp_path: Path, broker: RabbitMQ) -> None:
    broker.declare("stream", x_queue_type="stream")
    graph = graph_of(RabbitQueue(broker.url, "stream", exclusive=False))
    with pytest.raises(ProcessorStopped, match="is a stream"), graph.start(store=tmp_path / "s") as started:
        channel = broker.channel()
        for _ in range(100):
            channel.basic_publish("", "stream", b"x")
            time.sleep(0.05)
        started.wait_done(10)


LIFE = """
import sys, threading, time
import cues
from cues import testing
from cues.processors import rabbitmq, rabbitmq_client
path, url, queue, idle, point, hit, control = sys.argv[1:]
if control == "early":  # acknowledge on receipt
    real = rabbitmq.Reading._is_new
    def acknowledged(self, delivery, identity):
        self._link.post(lambda channel: channel.basic_ack(delivery.delivery_tag))
        time.sleep(0.05)  # the acknowledgement leaves before the kill
        return real(self, delivery, identity)
    rabbitmq.Reading._is_new = acknowledged
    rabbitmq.Reading.committed = lambda *_: None
if control == "never":  # no acknowledgement leaves: all that is committed is sent again
    rabbitmq.Reading.committed = lambda *_: None
source = rabbitmq.RabbitQueue(url, queue, body="json", idle_exit_s=float(idle) or None)
graph = cues.Graph("g", [cues.Source("in", source, batch_size=7)], errors="errors", durability="process")
print("begun")
with testing.crash(point, int(hit)) if point else __import__("contextlib").nullcontext():
    with graph.start(store=path) as running:
        running.wait_done()
"""


def live(
    path: Path, broker: RabbitMQ, idle: float = 0, point: str = "", hit: int = 1, control: str = "", queue: str = "in"
) -> Child:
    child = Child(LIFE, path, broker.url, queue, idle, point, hit, control)
    assert child.line() == "begun"
    return child


def on_queue(path: Path) -> list[int]:
    with cues.open(path, readonly=True) as store:
        return bodies(testing.messages(store, "in"))


POINTS = ["take.after", "commit.before", "commit.inside", "commit.after"]


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_a_point_leaves_each_message_with_an_id_once(
    point: str, hit: int, tmp_path: Path, broker: RabbitMQ
) -> None:
    broker.publish("in", lines(*range(60)), ids=True)
    with live(tmp_path / "s", broker, 0, point, hit) as child:
        assert child.returncode() == -signal.SIGKILL
    with live(tmp_path / "s", broker, 0.3) as child:
        child.end()
    assert on_queue(tmp_path / "s") == list(range(60))


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_a_point_loses_none_of_many_equal_messages_without_ids(
    point: str, tmp_path: Path, broker: RabbitMQ
) -> None:
    broker.publish("in", lines(*[n // 10 for n in range(60)]))
    with live(tmp_path / "s", broker, 0, point, 3) as child:
        assert child.returncode() == -signal.SIGKILL
    with live(tmp_path / "s", broker, 0.3) as child:
        child.end()
    found = on_queue(tmp_path / "s")
    assert all(found.count(n) >= 10 for n in range(6)) and set(found) == set(range(6))


@pytest.mark.slow
def test_what_is_committed_and_never_acknowledged_is_dropped_many_times(tmp_path: Path, broker: RabbitMQ) -> None:
    broker.publish("in", lines(*range(100)), ids=True)
    for _ in range(3):
        with live(tmp_path / "s", broker, 0.3, control="never") as child:
            child.end()
        assert on_queue(tmp_path / "s") == list(range(100)) and broker.count("in") == 100
    assert read(tmp_path / "s", RabbitQueue(broker.url, "in", body="json", idle_exit_s=0.3, in_flight=7))
    assert on_queue(tmp_path / "s") == list(range(100)) and broker.count("in") == 0
    broker.publish("in", lines(*range(100, 120)), ids=True)  # the rows of the larger in_flight are removed
    read(tmp_path / "s", RabbitQueue(broker.url, "in", body="json", idle_exit_s=0.3, in_flight=7))
    assert on_queue(tmp_path / "s") == list(range(120))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("identity", "expected"),
    [("message_id", 10), ("content", 6), (lambda message: message["body"] if message["body"] % 2 else None, 8)],
)
def test_an_identity_decides_what_is_a_repetition(
    identity: Any, expected: int, tmp_path: Path, broker: RabbitMQ
) -> None:
    """Four messages without message_id are committed and not acknowledged; two more follow."""
    source = RabbitQueue(broker.url, "in", body="json", identity=identity)
    broker.publish("in", lines(0, 1, 2, 3))
    with graph_of(source).start(store=tmp_path / "s") as graph:
        source.committed = lambda position: None  # type: ignore[method-assign]
        until(lambda: len(graph.messages("in")) == 4)
    until(lambda: broker.count("in") == 4)
    broker.publish("in", lines(4, 5))
    again = RabbitQueue(broker.url, "in", body="json", identity=identity, idle_exit_s=0.3)
    found = bodies(read(tmp_path / "s", again))
    assert len(found) == expected and set(found) == set(range(6)) and broker.count("in") == 0


@pytest.mark.slow
def test_the_same_id_twice_is_two_messages(tmp_path: Path, broker: RabbitMQ) -> None:
    """Without the flag of the broker nothing is a repetition: a publisher decides about its own."""
    broker.publish("in", lines(1, 2), message_id="same")
    source = RabbitQueue(broker.url, "in", body="json", idle_exit_s=0.2)
    assert bodies(read(tmp_path / "s", source)) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("control", ["early", "forgets"])
def test_the_controls_lose_and_repeat(control: str, tmp_path: Path, broker: RabbitMQ) -> None:
    broker.publish("in", lines(*range(60)), ids=control == "early")  # the other control: no ids
    point = "commit.before" if control == "early" else "commit.after"
    with live(tmp_path / "s", broker, 0, point, 2, control) as child:
        assert child.returncode() == -signal.SIGKILL
    with live(tmp_path / "s", broker, 0.3, control=control) as child:
        child.end()
    found = on_queue(tmp_path / "s")
    if control == "early":
        assert len(found) < 60
    else:
        assert len(found) > 60 and set(found) == set(range(60))


@bounded("rounds", 5, 25)
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_random_kills_leave_each_message_once(kind: str, rounds: int, tmp_path: Path, broker: RabbitMQ) -> None:
    """Queue to queue with both connectors: on the queue in the middle each message is once."""
    chance = random.Random(seeds.new())
    name = f"kills-{kind}"
    broker.declare(name, x_queue_type=kind)
    count = 100 * rounds

    def send() -> None:
        for at in range(0, count, 50):
            broker.publish(name, lines(*range(at, at + 50)), ids=True)
            time.sleep(0.1)

    code = LIFE.replace(
        "print(", "graph.add(rabbitmq.RabbitPublisher(url, '', 'out').sink('in', batch_size=20))\nprint("
    )
    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(rounds):
            with Child(code, tmp_path / "s", broker.url, name, 0, "", 1, "") as child:
                child.line()
                time.sleep(chance.random() * 0.7)
                child.kill()
    finally:
        sender.join()
    with Child(code, tmp_path / "s", broker.url, name, 0.7, "", 1, "") as child:
        child.end()
    found = on_queue(tmp_path / "s")
    assert sorted(found) == list(range(count)) and (kind == "quorum" or found == sorted(found))
    out = broker.taken("out")
    assert {int(body) for _, body in out} == set(range(count))
    assert all(properties.message_id == body.decode() for properties, body in out)


@pytest.mark.parametrize(
    ("queue", "how"),
    [
        pytest.param("in", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("in", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("quorum", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("quorum", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_broker_that_ends_and_starts_again_is_waited_for(
    queue: str, how: signal.Signals, tmp_path: Path, own: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    own.publish(queue, lines(*range(2_000)), ids=True, confirm=True)
    if queue == "quorum":  # a node that is killed within seconds after it made a quorum queue forgets the queue
        own.end()
        own.start()
    sink = RabbitPublisher(own.url, "", "in", shape="value", timeout_s=3)
    out = cues.Graph("o", [cues.Source("out"), sink.sink("out", batch_size=5)], durability="process")
    source = RabbitQueue(own.url, queue, body="json", timeout_s=3)
    reading, writing = graph_of(source, batch_size=50).start(store=tmp_path / "s"), out.start(store=tmp_path / "o")
    with halted_at_end(reading) as graph, halted_at_end(writing) as other:
        until(lambda: len(graph.messages("in")) > 200)
        own.end(how)  # with messages that it has sent and that are not acknowledged
        other.send("out", {"n": 1})
        until(lambda: "g.in: waiting for" in caplog.text and "o.publish: waiting for" in caplog.text)
        own.start()
        until(lambda: len(graph.messages("in")) >= 2_000, limit_s=120)
        if queue != "in":
            until(lambda: own.count("in") == 1)
        until(lambda: {"n": 1} in bodies(graph.messages("in")) or queue != "in")
        found = [body for body in bodies(graph.messages("in")) if isinstance(body, int)]
    # A classic queue forgets acknowledgements and the flag of repetitions when its broker is killed.
    assert set(found) == set(range(2_000)) and ((queue == "in" and how == signal.SIGKILL) or len(found) == 2_000)


@pytest.mark.slow
def test_a_connection_that_is_cut_again_and_again(tmp_path: Path, broker: RabbitMQ) -> None:
    """The proxy ends the connection after the broker has had an acknowledgement, or a part of them."""
    proxy = Proxy(broker.port, b"\x00\x3c\x00\x50")  # Basic.Ack
    count = 3_000
    source = RabbitQueue(f"amqp://127.0.0.1:{proxy.port}", "in", body="json", in_flight=100)
    with graph_of(source, batch_size=20).start(store=tmp_path / "s") as graph:
        for at in range(0, count, 100):
            broker.publish("in", lines(*range(at, at + 100)), ids=True)
            proxy.armed = at % 300 == 0
        until(lambda: len(graph.messages("in")) >= count, limit_s=120)
        time.sleep(0.5)
        assert bodies(graph.messages("in")) == list(range(count)) and proxy.lost > 1
    proxy.close()
    assert broker.count("in") == 0


@pytest.mark.slow
def test_a_second_source_of_an_exclusive_queue_waits(
    tmp_path: Path, broker: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (graph_of(RabbitQueue(broker.url, "in", body="json")) for _ in range(2))
    with two.start(store=tmp_path / "t") as second:
        # The one that still waits at the end of its run says so with an error.
        with contextlib.suppress(cues.errors.ProcessorStopped), one.start(store=tmp_path / "s") as first:
            until(lambda: "in exclusive use" in caplog.text)
            for n in range(2):
                broker.publish("in", lines(n))
            until(lambda: len(first.messages("in")) + len(second.messages("in")) == 2)
            assert not (first.messages("in") and second.messages("in"))
        broker.publish("in", lines(2, 3))
        until(lambda: bodies(second.messages("in"))[-2:] == [2, 3])


@pytest.mark.slow
def test_an_acknowledgement_that_takes_too_long_is_no_fault(tmp_path: Path) -> None:
    """The broker ends the channel after consumer_timeout; the messages come once all the same."""
    if RABBITMQ is None:
        pytest.skip(MISSING)
    node = RabbitMQ(tmp_path / "b", arguments="-rabbit consumer_timeout 1000 channel_tick_interval 1000")
    try:
        node.declare("in")
        node.publish("in", lines(*range(40)), ids=True)
        queues = {"in": cues.QueueOptions(max_lag=10)}
        graph = cues.Graph("g", [cues.Source("in", RabbitQueue(node.url, "in", body="json"))], queues=queues)
        go, taken = threading.Event(), []

        @graph.sink("in", batch_size=1)
        def save(message: Any) -> None:
            go.wait(60)
            taken.append(message["body"])

        with graph.start(store=tmp_path / "s"):
            time.sleep(4)
            go.set()
            until(lambda: len(taken) >= 40)
            time.sleep(0.3)
        assert taken == list(range(40))
    finally:
        node.stop()


@pytest.mark.slow
def test_a_full_queue_leaves_the_messages_at_the_broker(tmp_path: Path, broker: RabbitMQ) -> None:
    queues = {"in": cues.QueueOptions(max_lag=10)}
    source = RabbitQueue(broker.url, "in", body="json", in_flight=5)
    graph = cues.Graph("g", [cues.Source("in", source)], queues=queues, durability="process")
    go, taken = threading.Event(), []

    @graph.sink("in", batch_size=1)
    def save(message: Any) -> None:
        go.wait(60)
        taken.append(message["body"])

    broker.publish("in", lines(*range(300)))
    with graph.start(store=tmp_path / "s") as started:
        until(lambda: len(started.messages("in")) >= 10)
        time.sleep(0.3)
        assert len(started.messages("in")) <= 20 and broker.count("in") >= 270
        go.set()
        until(lambda: taken and taken[-1] == 299)
    assert taken == list(range(300))


@bounded("count", 10_000, 100_000)
def test_many_messages(count: int, tmp_path: Path, broker: RabbitMQ) -> None:
    source = RabbitQueue(broker.url, "in", body="json", idle_exit_s=10, in_flight=2_000)
    with graph_of(source).start(store=tmp_path / "s") as graph:
        for at in range(0, count, 10_000):
            broker.publish("in", lines(*range(at, at + 10_000)), ids=True)
        graph.wait_done(300)
        assert bodies(graph.messages("in")) == list(range(count))


# --- the sink -------------------------------------------------------------------------------------


def sent(path: Path, publisher: RabbitPublisher, *messages: dict[str, Any], **options: Any) -> list[Any]:
    """Publish messages; return the errors."""
    graph = cues.Graph("o", [cues.Source("out"), publisher.sink("out", **options)], errors="errors")
    with cues.open(path, durability="process") as store:
        store.queue("out").appender().write_many(list(messages))
        testing.run_until_idle(graph, store)
        publisher.close()
        return testing.messages(store, "errors")


@pytest.mark.slow
def test_messages_are_published_and_wrong_ones_are_errors(tmp_path: Path, broker: RabbitMQ) -> None:
    headers = {"n": 1, "at": datetime(2026, 1, 2, tzinfo=UTC), "d": Decimal("1.5"), "t": {"l": [1]}}
    records: list[dict[str, Any]] = [
        {"routing_key": "out", "body": b"\x00", "headers": headers},
        {"routing_key": "nowhere", "body": b"x"},
        {"routing_key": "out", "body": None, "properties": {"delivery_mode": 1, "message_id": "mine", "priority": 4}},
        {"routing_key": "out", "body": "é", "properties": {"user_id": "stranger", "expiration": "60000"}},
        {"body": 1},
        {"routing_key": "out"},
        {"routing_key": "out", "body": b"", "headers": {"x": 1.5}},
        {"routing_key": "out", "body": b"", "properties": {"colour": "red"}},
        {"routing_key": "o" * 300, "body": b""},
        {"routing_key": "out", "body": {"n": 1}},
    ]
    errors = [str(error) for error in sent(tmp_path / "s", RabbitPublisher(broker.url), *records)]
    taken = broker.taken("out")
    # The step is published again in parts, around the message that came to no queue: at least once.
    once = {properties.message_id: (properties, body) for properties, body in taken}
    assert [body for _, body in once.values()] == [b"\x00", b"", "é".encode(), b'{"n": 1}']
    first, second, third, last = (properties for properties, _ in once.values())
    assert first.headers == headers and first.delivery_mode == 2 and len(first.message_id) == 32
    assert (second.message_id, second.delivery_mode, second.priority) == ("mine", 1, 4)
    assert third.user_id is None and third.expiration == "60000" and last.message_id not in ("", first.message_id)
    words = [
        "'nowhere' (NO_ROUTE)",
        "routing_key is None",
        "has no 'body'",
        "Unsupported",
        "no property 'colour'",
        "255",
    ]
    assert all(any(word in error for error in errors) for word in words) and len(errors) == len(words)

    keyed = RabbitPublisher(broker.url, "amq.direct", lambda m: f"n{m['n']}", shape="value", mandatory=False)
    assert sent(tmp_path / "t", keyed, {"n": 1}, {"n": 2}) == [] and broker.taken("out") == []


@pytest.mark.slow
def test_an_exchange_that_is_missing(tmp_path: Path, broker: RabbitMQ) -> None:
    """In a message it is that message's error; in the option it stops the processor."""
    of_message = RabbitPublisher(broker.url, None)
    good = [{"exchange": "", "routing_key": "out", "body": str(n)} for n in range(3)]
    (error,) = sent(tmp_path / "s", of_message, *good, {"exchange": "none", "routing_key": "out", "body": "x"}, *good)
    assert "404 NOT_FOUND" in str(error) and len({p.message_id for p, _ in broker.taken("out")}) == 6
    with pytest.raises(ProcessorStopped, match="404 NOT_FOUND"):
        sent(tmp_path / "t", RabbitPublisher(broker.url, "none", "out"), {"body": "x"})


@pytest.mark.slow
def test_a_full_queue_of_the_broker_is_waited_for(
    tmp_path: Path, broker: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    broker.declare("small", x_max_length=10, x_overflow="reject-publish")
    sink = RabbitPublisher(broker.url, "", "small", shape="value").sink("out", batch_size=5)
    with cues.Graph("o", [cues.Source("out"), sink], durability="process").start(store=tmp_path / "o") as graph:
        for n in range(20):
            graph.send("out", {"n": n})
        until(lambda: "did not take a message" in caplog.text)
        found = set()

        def all_came() -> bool:
            found.update(body for _, body in broker.taken("small"))
            return len(found) == 20

        until(all_came)


@pytest.mark.slow
def test_a_sink_that_is_killed_publishes_with_the_same_ids(tmp_path: Path, broker: RabbitMQ) -> None:
    code = """
import sys
import cues
from cues.processors.rabbitmq import RabbitPublisher
sink = RabbitPublisher(sys.argv[2], "", "out", shape="value").sink("out", batch_size=20)
with cues.Graph("o", [cues.Source("out"), sink]).start(store=sys.argv[1]) as running:
    print("begun")
    running.wait_idle()
    print("done")
"""
    chance = random.Random(seeds.new())
    with cues.open(tmp_path / "o", durability="process") as store:
        store.queue("out").appender().write_many([{"n": n} for n in range(3_000)])
    done = False
    while not done:
        with Child(code, tmp_path / "o", broker.url) as child:
            child.line()
            if broker.count("out") > 2_500:
                done = child.line() == "done"
            else:
                time.sleep(chance.random() * 0.1)
    found: dict[str, set[bytes]] = {}
    for properties, body in broker.taken("out"):
        found.setdefault(properties.message_id, set()).add(body)
    assert all(len(one) == 1 for one in found.values()) and len(found) == 3_000
    assert set().union(*found.values()) == {b'{"n": %d}' % n for n in range(3_000)}


@pytest.mark.slow
def test_a_confirmation_that_is_lost_is_published_again_with_the_same_id(tmp_path: Path, broker: RabbitMQ) -> None:
    proxy = Proxy(broker.port, b"}\xce")  # the end of a body
    publisher = RabbitPublisher(f"amqp://127.0.0.1:{proxy.port}", "", "out", shape="value", timeout_s=5)
    graph = cues.Graph("o", [cues.Source("out"), publisher.sink("out", batch_size=10)], durability="process")
    with graph.start(store=tmp_path / "o") as running:
        proxy.armed = 2
        for n in range(100):
            running.send("out", {"n": n})
        running.wait_idle(60)
    proxy.close()
    taken = broker.taken("out")
    assert proxy.lost == 2 and len(taken) > 100
    assert len({properties.message_id for properties, _ in taken}) == 100 == len({body for _, body in taken})


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_options_are_refused_and_no_error_shows_a_secret() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("url= is not", {"url": "broker:5672"}),
        ("url= is not", {"url": "http://broker"}),
        ("url= is not", {"url": "amqp://broker:x"}),
        ("url= is not", {"url": "amqp://broker/a/b"}),
        ("url= has a user", {"url": "amqp://me:geheim@broker"}),
        ("queue= is empty", {"queue": ""}),
        ("queue='qqq", {"queue": "q" * 256}),
        ("declare=", {"declare": {"exclusive": True}}),
        ("bindings=", {"bindings": "ab"}),
        ("body='xml' is unknown", {"body": "xml"}),
        ("identity='id' is unknown", {"identity": "id"}),
        ("shape='value' with body='bytes'", {"shape": "value"}),
        ("exclusive=1", {"exclusive": 1}),
        ("in_flight", {"in_flight": 0}),
        ("password= is a text", {"password": "geheim"}),
        ("tls= is a function", {"tls": ssl.create_default_context}),
        ("timeout_s", {"timeout_s": 0}),
    ]
    for text, options in wrong:
        with pytest.raises(InvalidArgument, match=text) as caught:
            RabbitQueue(**{"url": "amqp://broker", "queue": "q", **options})
        assert "geheim" not in str(caught.value)
    for text, options in [
        ("shape='x'", {"shape": "x"}), ("without exchange", {"shape": "value"}), ("mandatory=1", {"mandatory": 1}),
        ("routing_key=", {"routing_key": "k" * 256}),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgument, match=text):
            RabbitPublisher("amqp://broker", **options)
    with pytest.raises(InvalidArgument, match="without process="):
        next(RabbitQueue("amqp://broker", "q")(None))
    assert RabbitQueue("amqp://b/%2Fa", "q").broker.vhost == "/a" and RabbitQueue("amqp://b/", "q").broker.vhost == "/"
    for made in (
        RabbitQueue("amqp://b", "q", user="u", password="geheim"),
        RabbitPublisher("amqp://b", user="u", password="geheim"),
    ):
        assert "geheim" not in f"{made!r} {made} {made.broker!r} {made.broker}"
        assert pickle.loads(pickle.dumps(made)).broker.password == "geheim"
    error = pickle.loads(pickle.dumps(Refused("a", "b", 404)))
    assert (error.code, str(error)) == (404, str(Refused("a", "b", 404)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "queue", "options", "text"),
    [
        ("", "in", {"user": "me", "password": "wrong"}, "refused the log-in.*correct user="),
        ("/none", "in", {}, "virtual host"),
        ("/closed", "in", {}, "virtual host"),
        ("", "missing", {}, "404 NOT_FOUND - no queue 'missing'.*declare="),
        ("", "in", {"user": "reader", "password": "geheim"}, "403 ACCESS_REFUSED.*permissions"),
    ],
)
def test_what_the_broker_refuses_stops_with_its_reason(
    path: str, queue: str, options: Any, text: str, tmp_path: Path, broker: RabbitMQ
) -> None:
    with pytest.raises(ProcessorStopped, match=f"(?s){text}"):
        read(tmp_path / "s", RabbitQueue(broker.url + path, queue, **options))
    if queue != "missing":
        sink = RabbitPublisher(broker.url + path, "", "out", shape="value", **options)
        with pytest.raises(ProcessorStopped) as caught:
            sent(tmp_path / "o", sink, {"n": 1})
        assert isinstance(caught.value.__cause__, CheckpointError) and "wrong" not in str(caught.value)
    right = RabbitQueue(broker.url, "in", user="me", password=lambda: "geheim", idle_exit_s=0.1)
    assert read(tmp_path / "r", right) == []


@pytest.mark.slow
def test_a_queue_that_is_deleted_meanwhile_stops_with_its_reason(tmp_path: Path, broker: RabbitMQ) -> None:
    broker.declare("short")
    with pytest.raises(ProcessorStopped, match="no queue 'short'"):
        graph = graph_of(RabbitQueue(broker.url, "short"))
        with graph.start(store=tmp_path / "s") as started:
            broker.publish("short", lines(1))
            until(lambda: started.messages("in"))
            channel = broker.channel()
            channel.queue_delete("short")
            channel.connection.close()
            started.wait_done(30)


def test_a_broker_that_is_not_there_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = RabbitQueue("amqp://127.0.0.1:1", "in")
    with graph_of(source).start(store=tmp_path / "s"):
        until(lambda: "waiting for amqp://127.0.0.1:1" in caplog.text)
    assert "ends while amqp://127.0.0.1:1 is away" in caplog.text


@pytest.mark.slow
def test_tls(tmp_path: Path) -> None:
    if RABBITMQ is None:
        pytest.skip(MISSING)
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip

    port = free_port()
    options = [
        f"listeners.ssl.1 = 127.0.0.1:{port}",
        *(f"ssl_options.{n} = {certificate}" for n in ("cacertfile", "certfile")),
    ]
    node = RabbitMQ(tmp_path / "b", *options, f"ssl_options.keyfile = {key}", "ssl_options.verify = verify_none")
    try:
        node.declare("in")
        url = f"amqps://localhost:{port}"
        with pytest.raises(ProcessorStopped, match="CERTIFICATE_VERIFY_FAILED"):
            read(tmp_path / "s", RabbitQueue(url, "in"))

        def context() -> ssl.SSLContext:
            return ssl.create_default_context(cafile=str(certificate))

        assert sent(tmp_path / "o", RabbitPublisher(url, "", "in", shape="value", tls=context), {"n": 1}) == []
        source = RabbitQueue(url, "in", body="json", tls=context, idle_exit_s=0.3)
        assert bodies(read(tmp_path / "s", source)) == [{"n": 1}]
    finally:
        node.stop()
