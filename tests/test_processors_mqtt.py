"""MQTT: messages once on the queue whatever is killed, published at least once, outages, and what a broker refuses.

The broker is Mosquitto where it is installed; amqtt, which is in the extra ``test``, shows version 3.1.1. A broker of a
few lines says what neither of them does.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seeds
from children import Child
from mqtt_broker import MOSQUITTO, Amqtt, Heard, Mosquitto, publish, running
from sets import bounded
from small import until

import cues
from cues import testing
from cues.errors import CheckpointError, InvalidArgument, ProcessorStopped
from cues.processors.mqtt import Mqtt, Publisher

pytest.importorskip("paho.mqtt.client")
pytestmark = pytest.mark.xdist_group("mqtt")
mosquitto = pytest.mark.skipif(MOSQUITTO is None, reason="Mosquitto is not on this machine: apt-get install mosquitto")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    if MOSQUITTO is None:
        pytest.skip("Mosquitto is not on this machine: apt-get install mosquitto")
    with running(Mosquitto, tmp_path / "broker") as found:
        yield found


def graph_of(source: Mqtt, **options: Any) -> cues.Graph:
    return cues.Graph("g", [cues.Source("in", source, **options)], errors="errors", durability="process")


def read(store: Path, source: Mqtt, queue: str = "in", **options: Any) -> list[Any]:
    """Run until nothing has come for a moment; return all messages of the queue."""
    with graph_of(source, **options).start(store=store) as graph:
        graph.wait_done(60)
        return graph.messages(queue)


def numbers(messages: list[Any]) -> list[int]:
    return [message["payload"] for message in messages]


def lines(*values: int) -> list[bytes]:
    return [str(value).encode() for value in values]


# --- the source -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["5", "3.1.1"])
@mosquitto
def test_messages_are_read_once_and_a_session_keeps_them_meanwhile(version: str, tmp_path: Path, broker: Any) -> None:
    source = Mqtt(broker.url, ["a/+", "b/#"], payload="json", idle_exit_s=0.2, version=version)
    assert read(tmp_path / "s", source) == []  # it subscribes
    publish(broker, "a/x", lines(*range(100)))
    publish(broker, "b", [b"\xff", b"7"])  # the first one is no JSON
    publish(broker, "c", lines(1))
    publish(broker, "a/q", lines(8), qos=0)
    given = read(tmp_path / "s", source)
    assert numbers(given)[:101] == [*range(100), 7] and given[0] == {
        "topic": "a/x", "payload": 0, "retained": False, "properties": [],
    }  # fmt: skip
    with cues.open(tmp_path / "s", readonly=True) as store:
        (failed,) = testing.messages(store, "errors")
        assert "topic 'b'" in str(failed) and "payload='json'" in str(failed)
    publish(broker, "a/x", lines(100))
    assert numbers(read(tmp_path / "s", source))[-1] == 100


def test_version_3_1_1_of_another_broker(tmp_path: Path) -> None:
    with running(Amqtt) as broker:
        source = Mqtt(broker.url, "a/#", payload="text", version="3.1.1")
        with graph_of(source).start(store=tmp_path / "s") as graph:
            until(lambda: publish(broker, "a/b", [b"x"]) or graph.messages("in"))
            publish(broker, "a/b", lines(1, 2, 3))
            until(lambda: graph.messages("in")[-1]["payload"] == "3")
            assert [message["payload"] for message in graph.messages("in")][-3:] == ["1", "2", "3"]
        sink = Publisher(broker.url, "a/c", shape="value", version="3.1.1")
        out = cues.Graph("o", [cues.Source("out"), sink.sink("out")], durability="process")
        with graph_of(source).start(store=tmp_path / "s") as graph, out.start(store=tmp_path / "o") as writing:
            writing.send("out", {"n": 1})
            until(lambda: graph.messages("in")[-1]["payload"] == '{"n": 1}')


@mosquitto
def test_messages_of_qos_0_are_dropped_and_counted_while_many_of_them_wait(
    broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue takes nothing until 64 payloads of a million bytes wait. The message of QoS 1 is not dropped."""
    process = SimpleNamespace(id="g.in", state={}, stopping=False)
    source = Mqtt(broker.url, "a")
    items = source(None, process)
    next(items)  # it subscribes
    publish(broker, "a", [b"x" * 1_000_000] * 100, qos=0)
    publish(broker, "a", [b"last"])
    until(lambda: "faster than g.in takes them: 1 is dropped" in caplog.text)
    taken = []
    while not taken or taken[-1] != b"last":
        taken.append(next(items)[1]["payload"])
    items.close()
    told = int(re.findall(r"takes them: (\d+) (?:is|are) dropped", caplog.text)[-1])
    assert 1 <= told <= 101 - len(taken)  # on a busy machine the broker drops some, too
    assert set(taken[:-1]) == {b"x" * 1_000_000}


@pytest.mark.slow
def test_values_as_messages_have_the_rest_in_their_metadata(tmp_path: Path, broker: Any) -> None:
    source = Mqtt(broker.url, "a", payload="json", shape="value", idle_exit_s=0.2)
    assert read(tmp_path / "s", source) == []
    seen = []
    publish(broker, "a", [b'{"n": 1}', b"[1]", b'{"q/uuid": 1}', b'{"n": 2}'])
    graph = graph_of(source)

    @graph.sink("in")
    def save(message: Any, process: cues.Process) -> None:
        seen.append((message, process.metadata["mqtt"]["topic"]))

    with graph.start(store=tmp_path / "s") as started:
        started.wait_done(60)
        failed = [str(error) for error in started.messages("errors")]
    assert seen == [({"n": 1}, "a"), ({"n": 2}, "a")]
    assert len(failed) == 2 and "list, not an object" in failed[0] and "reserved key" in failed[1]


@pytest.mark.slow
@pytest.mark.parametrize("retained", [True, False])
def test_topics_that_change_and_retained_messages(retained: bool, tmp_path: Path, broker: Any) -> None:
    publish(broker, "a", lines(1), retain=True)

    def source(*topics: str) -> Mqtt:
        return Mqtt(broker.url, topics, payload="json", idle_exit_s=0.2, retained=retained)

    first = [1] * retained
    for _ in range(2):  # not again at the second start
        given = read(tmp_path / "s", source("a", "b"))
        assert numbers(given) == first and all(message["retained"] for message in given)
    publish(broker, "b", lines(2))
    assert numbers(read(tmp_path / "s", source("a", "c"))) == [*first, 2]  # the session had it
    publish(broker, "b", lines(3))
    publish(broker, "c", lines(4))
    assert numbers(read(tmp_path / "s", source("a", "c"))) == [*first, 2, 4]


LIFE = """
import sys
import cues
from cues import testing
from cues.processors import mqtt
path, url, idle, point, hit, early = sys.argv[1:]
if early == "early":  # the control: acknowledge on receipt
    real = mqtt.Reading._is_new
    def acknowledged(self, message):
        self._client.ack(message.mid, 1)
        __import__("time").sleep(0.05)  # the acknowledgement leaves before the kill
        return real(self, message)
    mqtt.Reading._is_new = acknowledged
if early == "forgets":  # the control: no repetition is known
    mqtt.Reading.messages.__globals__["hashlib"] = type("H", (), {"blake2b": lambda *a, **k: type("D", (), {
        "digest": lambda self: __import__("os").urandom(8)})()})
source = mqtt.Mqtt(url, "a/#", payload="json", idle_exit_s=float(idle) or None)
graph = cues.Graph("g", [cues.Source("in", source, batch_size=7)], errors="errors", durability="process")
print("begun")
with testing.crash(point, int(hit)) if point else __import__("contextlib").nullcontext():
    with graph.start(store=path) as running:
        running.wait_done()
"""


def live(path: Path, broker: Any, idle: float = 0, point: str = "", hit: int = 1, early: str = "") -> Child:
    child = Child(LIFE, path, broker.url, idle, point, hit, early)
    assert child.line() == "begun"
    return child


def on_queue(path: Path) -> list[int]:
    with cues.open(path, readonly=True) as store:
        return numbers(testing.messages(store, "in"))


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("point", ["take.after", "commit.before", "commit.inside", "commit.after"])
def test_a_kill_at_a_point_leaves_each_message_once(point: str, hit: int, tmp_path: Path, broker: Any) -> None:
    with live(tmp_path / "s", broker, 0.2) as child:
        child.end()
    sent = [n // 10 for n in range(60)]  # many are equal
    publish(broker, "a/b", lines(*sent))
    with live(tmp_path / "s", broker, 0, point, hit) as child:
        assert child.returncode() == -signal.SIGKILL
    with live(tmp_path / "s", broker, 0.3) as child:
        child.end()
    assert on_queue(tmp_path / "s") == sent


@pytest.mark.slow
@pytest.mark.parametrize("early", ["early", "forgets"])
def test_the_controls_lose_and_repeat(early: str, tmp_path: Path, broker: Any) -> None:
    with live(tmp_path / "s", broker, 0.2) as child:
        child.end()
    publish(broker, "a/b", lines(*range(60)))
    point = "commit.before" if early == "early" else "commit.after"
    with live(tmp_path / "s", broker, 0, point, 2, early) as child:
        assert child.returncode() == -signal.SIGKILL
    with live(tmp_path / "s", broker, 0.3, early=early) as child:
        child.end()
    found = on_queue(tmp_path / "s")
    if early == "early":
        assert len(found) < 60
    else:
        assert len(found) > 60 and set(found) == set(range(60))


@bounded("rounds", 5, 25)
def test_random_kills_leave_each_message_once(rounds: int, tmp_path: Path, broker: Any) -> None:
    chance = random.Random(seeds.new())
    with live(tmp_path / "s", broker, 0.2) as child:
        child.end()
    sent = [n // 3 for n in range(100 * rounds)]

    def send() -> None:
        for at in range(0, len(sent), 50):
            publish(broker, "a/b", lines(*sent[at : at + 50]))
            time.sleep(0.1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(rounds):
            with live(tmp_path / "s", broker) as child:
                time.sleep(chance.random() * 0.5)
                child.kill()
    finally:
        sender.join()
    with live(tmp_path / "s", broker, 0.5) as child:
        child.end()
    assert on_queue(tmp_path / "s") == sent


@pytest.mark.slow
def test_a_broker_that_is_stopped_and_started_is_waited_for(
    tmp_path: Path, broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with graph_of(Mqtt(broker.url, "a", payload="json")).start(store=tmp_path / "s") as graph:
        until(lambda: publish(broker, "a", lines(-1)) or graph.messages("in"))
        count = len(graph.messages("in"))
        publish(broker, "a", lines(*range(50)))
        broker.stop()  # with messages that it has sent and that are not acknowledged
        until(lambda: f"waiting for {broker.url}" in caplog.text)
        broker.start()
        publish(broker, "a", lines(*range(50, 100)))
        until(lambda: graph.messages("in") and graph.messages("in")[-1]["payload"] == 99)
        found = numbers(graph.messages("in"))
        assert [n for n in found if n >= 0] == list(range(100)) and found.count(-1) >= count


@pytest.mark.slow
def test_a_broker_that_was_killed_has_no_session_and_says_so(
    tmp_path: Path, broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = Mqtt(broker.url, "a", payload="json", idle_exit_s=0.2)
    read(tmp_path / "s", source)
    publish(broker, "a", lines(1, 2))
    assert numbers(read(tmp_path / "s", source)) == [1, 2]
    broker.stop(signal.SIGKILL)
    broker.start()
    assert numbers(read(tmp_path / "s", source)) == [1, 2]
    assert "has no session of g.in any more" in caplog.text
    publish(broker, "a", lines(3))
    assert numbers(read(tmp_path / "s", source)) == [1, 2, 3]


@pytest.mark.slow
def test_a_full_queue_leaves_the_messages_at_the_broker(tmp_path: Path, broker: Any) -> None:
    queues = {"in": cues.QueueOptions(max_lag=10)}
    source = Mqtt(broker.url, "a", payload="json", in_flight=5)
    graph = cues.Graph("g", [cues.Source("in", source)], queues=queues, durability="process")
    go, taken = threading.Event(), []

    @graph.sink("in", batch_size=1)
    def save(message: Any) -> None:
        go.wait(60)
        taken.append(message["payload"])

    with graph.start(store=tmp_path / "s") as started:
        until(lambda: publish(broker, "a", lines(-1)) or started.messages("in"))
        publish(broker, "a", lines(*range(300)))
        until(lambda: len(started.messages("in")) >= 10)
        time.sleep(0.3)
        assert len(started.messages("in")) <= 20  # 300 were sent; at most 5 more are on the way
        go.set()
        until(lambda: taken and taken[-1] == 299)
    assert [n for n in taken if n >= 0] == list(range(300))


@bounded("count", 10_000, 100_000)
def test_many_messages(count: int, tmp_path: Path) -> None:
    if MOSQUITTO is None:
        pytest.skip("Mosquitto is not on this machine: apt-get install mosquitto")
    with running(Mosquitto, tmp_path / "b", "max_inflight_messages 500") as broker:
        source = Mqtt(broker.url, "a", payload="json", idle_exit_s=10)
        with graph_of(source).start(store=tmp_path / "s") as graph:
            until(lambda: publish(broker, "a", lines(-1)) or graph.messages("in"))
            for at in range(0, count, 10_000):
                publish(broker, "a", lines(*range(at, at + 10_000)))
            graph.wait_done(120)
            found = numbers(graph.messages("in"))
    assert [n for n in found if n >= 0] == list(range(count))


# --- a broker that says what no real one says when a test wants it --------------------------------


class Scripted:
    """One listener of version 3.1.1. For each connection a list of (dup, packet id, payload) to send."""

    def __init__(self, *scripts: list[tuple[bool, int, bytes]]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._listener.getsockname()[1]}"
        self.acknowledged: list[list[int]] = []
        self._scripts = scripts
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for number, script in enumerate(self._scripts):
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError):
                self.acknowledged.append([])
                self._speak(connection, connection.makefile("rb"), script, number > 0)

    def _speak(self, connection: socket.socket, file: Any, script: list[tuple[bool, int, bytes]], known: bool) -> None:
        while head := file.read(1):
            body = file.read(file.read(1)[0])
            kind = head[0] >> 4
            if kind == 1:  # CONNECT
                connection.sendall(bytes([0x20, 2, known, 0]))
            if kind == 8:  # SUBSCRIBE
                connection.sendall(bytes([0x90, 3, *body[:2], 1]))
            if kind == 4:  # PUBACK
                self.acknowledged[-1].append(int.from_bytes(body[:2], "big"))
            if kind == 8 or (kind == 1 and known):
                for dup, id, payload in script:
                    body = b"\0\1a" + id.to_bytes(2, "big") + payload
                    connection.sendall(bytes([0x32 | dup << 3, len(body)]) + body)

    def stop(self) -> None:
        self._listener.close()


def spoken(path: Path, *scripts: list[tuple[bool, int, bytes]]) -> tuple[list[str], list[list[int]]]:
    """The payloads on the queue after a run for each script, and the acknowledgements of each."""
    with running(Scripted, *scripts) as broker:
        source = Mqtt(broker.url, "a", payload="text", idle_exit_s=0.1, version="3.1.1", client="c")
        for _ in scripts:
            found = [message["payload"] for message in read(path, source)]
        until(lambda: len(broker.acknowledged) == len(scripts))
        return found, broker.acknowledged


FIRST = [(False, 1, b"on"), (False, 2, b"on"), (False, 3, b"off")]


def test_a_new_message_with_the_id_and_the_text_of_an_old_one_is_a_message(tmp_path: Path) -> None:
    """The broker has the acknowledgements of 1 and 2 and uses the id 1 again, in a PUBLISH that was lost."""
    again = [(True, 3, b"off"), (True, 1, b"on"), (False, 2, b"on")]
    found, acknowledged = spoken(tmp_path / "s", FIRST, again, [(True, 2, b"on"), (False, 1, b"x")])
    assert found == ["on", "on", "off", "on", "on", "x"]
    assert acknowledged == [[1, 2], [3, 1], [2]]  # in order of receipt, and never the last one


@pytest.mark.parametrize(
    ("again", "more"),
    [
        ([(True, 2, b"on"), (True, 3, b"off"), (False, 4, b"x")], ["x"]),
        ([(True, 1, b"on"), (True, 2, b"on"), (True, 3, b"off"), (True, 4, b"x"), (True, 4, b"x")], ["x"]),
        ([(True, 3, b"off"), (True, 3, b"off")], []),
        ([(True, 3, b"other")], ["other"]),  # never sent to this source before
        ([(True, 7, b"on"), (True, 1, b"on")], ["on", "on"]),  # the last one expired at the broker
        ([(False, 1, b"on"), (True, 1, b"on")], ["on"]),
    ],
)
@pytest.mark.slow
def test_what_is_sent_again_up_to_the_last_committed_message_is_dropped(
    again: list[tuple[bool, int, bytes]], more: list[str], tmp_path: Path
) -> None:
    found, acknowledged = spoken(tmp_path / "s", FIRST, again)
    assert found == ["on", "on", "off", *more] and acknowledged[0] == [1, 2]


# --- the sink -------------------------------------------------------------------------------------


def sent(path: Path, publisher: Publisher, *messages: dict[str, Any], **options: Any) -> list[Any]:
    """Publish messages; return the errors."""
    graph = cues.Graph("o", [cues.Source("out"), publisher.sink("out", **options)], errors="errors")
    with cues.open(path, durability="process") as store:
        store.queue("out").appender().write_many(list(messages))
        testing.run_until_idle(graph, store)
        publisher.close()
        return testing.messages(store, "errors")


@mosquitto
def test_messages_are_published_and_wrong_ones_are_errors(tmp_path: Path, broker: Any) -> None:
    with Heard(broker, "#") as heard:
        records = [
            {"topic": "a", "payload": b"\x00", "properties": [["k", "v"]]},
            {"topic": "a/+", "payload": b"x"},
            {"topic": "b", "payload": None},
            {"topic": "b", "payload": "é"},
            {"payload": 1},
            {"topic": "c", "payload": {"n": 1}},
        ]
        errors = sent(tmp_path / "s", Publisher(broker.url), *records)
        until(lambda: len(heard.messages) == 4)
        assert heard.messages == [
            ("a", b"\x00", False, [("k", "v")]), ("b", b"", False, []), ("b", "é".encode(), False, []),
            ("c", b'{"n": 1}', False, []),
        ]  # fmt: skip
        assert len(errors) == 2 and "'a/+'" in str(errors[0]) and "topic is None" in str(errors[1])
        by_field = Publisher(broker.url, lambda m: f"n/{m['n']}", shape="value", retain=lambda m: m["n"] > 1)
        assert sent(tmp_path / "t", by_field, {"n": 1}, {"n": 2}) == []
    with Heard(broker, "n/#") as late:
        until(lambda: late.messages == [("n/2", b'{"n": 2}', True, [])])


@pytest.mark.slow
def test_a_sink_waits_for_a_broker_and_publishes_all(
    tmp_path: Path, broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    graph = cues.Graph("o", [cues.Source("out"), Publisher(broker.url, "a", shape="value").sink("out", batch_size=5)])
    source = graph_of(Mqtt(broker.url, "a", payload="json"))
    with graph.start(store=tmp_path / "o") as out, source.start(store=tmp_path / "s") as back:
        until(lambda: publish(broker, "a", [b'{"n": -1}']) or back.messages("in"))
        for n in range(100):
            out.send("out", {"n": n})
            if n == 30:
                broker.stop()
        until(lambda: f"o.publish: waiting for {broker.url}" in caplog.text)
        broker.start()
        until(lambda: {m["payload"]["n"] for m in back.messages("in")} >= set(range(100)))


@pytest.mark.slow
def test_a_sink_that_is_killed_publishes_each_message_at_least_once(tmp_path: Path, broker: Any) -> None:
    code = """
import sys
import cues
from cues.processors.mqtt import Publisher
graph = cues.Graph("o", [cues.Source("out"), Publisher(sys.argv[2], "a", shape="value").sink("out", batch_size=20)])
with graph.start(store=sys.argv[1]) as running:
    print("begun")
    running.wait_idle()
    print("done")
"""
    chance = random.Random(seeds.new())
    with cues.open(tmp_path / "o", durability="process") as store:
        store.queue("out").appender().write_many([{"n": n} for n in range(3_000)])
    with Heard(broker, "a") as heard:
        done = False
        while not done:
            with Child(code, tmp_path / "o", broker.url) as child:
                child.line()
                if len(heard.messages) > 2_500:
                    done = child.line() == "done"
                else:
                    time.sleep(chance.random() * 0.1)
        found = [int(payload[6:-1]) for _, payload, _, _ in heard.messages]
    assert set(found) == set(range(3_000))


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_options_are_refused_and_no_error_shows_a_secret() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("url= is not", {"url": "broker:1883"}),
        ("url= is not", {"url": "http://broker"}),
        ("url= is not", {"url": "mqtt://broker:x"}),
        ("url= has a user", {"url": "mqtt://me:geheim@broker"}),
        ("topics= is empty", {"topics": []}),
        ("not a topic filter", {"topics": "a/#/b"}),
        ("not a topic filter", {"topics": ["a", "b+"]}),
        ("shared subscription", {"topics": "$share/g/a"}),
        ("payload='xml' is unknown", {"payload": "xml"}),
        ("shape='value' with payload='bytes'", {"shape": "value"}),
        ("version=5 is unknown", {"version": 5}),
        ("need version 5", {"version": "3.1.1", "retained": False}),
        ("in_flight", {"in_flight": 1}),
        ("password= is a text", {"password": "geheim"}),
        ("tls= is a function", {"tls": ssl.create_default_context}),
        ("timeout_s", {"timeout_s": 0}),
    ]
    for text, options in wrong:
        with pytest.raises(InvalidArgument, match=text) as caught:
            Mqtt(**{"url": "mqtt://broker", "topics": "a", **options})
        assert "geheim" not in str(caught.value)
    for text, options in [
        ("topic is 'a/#'", {"topic": "a/#"}), ("shape='x'", {"shape": "x"}), ("without topic", {"shape": "value"}),
        ("retain=1", {"retain": 1}),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgument, match=text):
            Publisher("mqtt://broker", **options)
    with pytest.raises(InvalidArgument, match="without process="):
        next(Mqtt("mqtt://broker", "a")(None))
    for made in (
        Mqtt("mqtt://b", "a", user="u", password="geheim"),
        Publisher("mqtt://b", user="u", password="geheim"),
    ):
        assert "geheim" not in f"{made!r} {made} {made.broker!r} {made.broker}"
        assert pickle.loads(pickle.dumps(made)).broker.password == "geheim"


@pytest.mark.slow
def test_what_the_broker_refuses_stops_with_its_reason(tmp_path: Path) -> None:
    if MOSQUITTO is None:
        pytest.skip("Mosquitto is not on this machine: apt-get install mosquitto")
    passwords = tmp_path / "passwords"
    passwords.touch()
    subprocess.run(["mosquitto_passwd", "-b", str(passwords), "me", "geheim"], check=True)
    options = ("allow_anonymous false", f"password_file {passwords}")
    for version in ("5", "3.1.1"):
        with running(Mosquitto, tmp_path / f"b{version}", *options) as broker:
            for user, word in ((None, None), ("me", "wrong")):
                source = Mqtt(broker.url, "a", user=user, password=word, version=version)
                with pytest.raises(ProcessorStopped, match=r"refused: the connection: .*correct user="):
                    read(tmp_path / f"{version}{user}", source)
                sink = Publisher(broker.url, "a", shape="value", user=user, password=word, version=version)
                with pytest.raises(ProcessorStopped) as caught:
                    sent(tmp_path / f"o{version}{user}", sink, {"n": 1})
                assert isinstance(caught.value.__cause__, CheckpointError) and "wrong" not in str(caught.value)
            right = Mqtt(broker.url, "a", user="me", password=lambda: "geheim", version=version, idle_exit_s=0.1)
            assert read(tmp_path / f"s{version}", right) == []


@pytest.mark.slow
def test_tls(tmp_path: Path) -> None:
    if MOSQUITTO is None:
        pytest.skip("Mosquitto is not on this machine: apt-get install mosquitto")
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    with running(Mosquitto, tmp_path / "b", f"certfile {certificate}", f"keyfile {key}", tls=True) as broker:
        with pytest.raises(ProcessorStopped, match="CERTIFICATE_VERIFY_FAILED"):
            read(tmp_path / "s", Mqtt(broker.url, "a"))

        def context() -> ssl.SSLContext:
            return ssl.create_default_context(cafile=str(certificate))

        source = Mqtt(broker.url, "a", payload="json", tls=context, idle_exit_s=0.3)
        read(tmp_path / "s", source)
        assert sent(tmp_path / "o", Publisher(broker.url, "a", shape="value", tls=context), {"n": 1}) == []
        assert numbers(read(tmp_path / "s", source)) == [{"n": 1}]
