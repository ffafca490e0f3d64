"""SQS: messages once on the queue whatever is killed, sent once to FIFO queues, outages, and what is refused.

The server is moto, on loopback. It keeps visibility, receipt handles, and deduplication within five minutes.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seeds
from children import Child
from mqtt_broker import answers
from sets import bounded
from small import halted_at_end, until

import cues
from cues import testing
from cues.errors import Away, CheckpointError, InvalidArgument, ProcessorStopped
from cues.processors.sqs import Sender, Sqs

boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "geheim", "AWS_DEFAULT_REGION": "us-east-1"}


class Server:
    """A moto server, and its client."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        answers(port, self.process)
        self.endpoint = f"http://127.0.0.1:{port}"
        self.client = boto3.client("sqs", endpoint_url=self.endpoint)
        self._count = 0

    def queue(self, ending: str = "", **attributes: str) -> str:
        """The URL of a new queue."""
        self._count += 1
        fifo = {"FifoQueue": "true"} if ending else {}
        made = self.client.create_queue(QueueName=f"q{self._count}{ending}", Attributes={**fifo, **attributes})
        return str(made["QueueUrl"])

    def send(self, url: str, *bodies: str, **more: Any) -> None:
        for at in range(0, len(bodies), 10):
            entries = [{"Id": str(n), "MessageBody": body, **more} for n, body in enumerate(bodies[at : at + 10])]
            assert not self.client.send_message_batch(QueueUrl=url, Entries=entries).get("Failed")

    def left(self, url: str) -> int:
        """The number of messages, hidden ones included."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
        return sum(map(int, found.values()))

    def take(self, url: str) -> list[dict[str, Any]]:
        """All messages, which are deleted."""
        found: list[dict[str, Any]] = []
        while self.left(url):
            answer = self.client.receive_message(QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"])
            for message in answer.get("Messages", []):
                found.append(message)
                self.client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        return found


@pytest.fixture(scope="module")
def sqs() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        server = Server()
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()


def graph_of(source: Sqs, **options: Any) -> cues.Graph:
    return cues.Graph("g", [cues.Source("in", source, **options)], errors="errors", durability="process")


def read(store: Path, source: Sqs) -> list[Any]:
    """Run until nothing has come for a moment; return all messages of the queue."""
    with graph_of(source).start(store=store) as graph:
        graph.wait_done(120)
        return graph.messages("in")


# --- the source -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_messages_are_read_once_and_deleted_after_the_commit(tmp_path: Path, sqs: Server) -> None:
    url = sqs.queue()
    sqs.client.send_message(
        QueueUrl=url, MessageBody='{"n": 0}',
        MessageAttributes={
            "a": {"DataType": "String", "StringValue": "x"}, "b": {"DataType": "Binary", "BinaryValue": b"\0"},
        },
    )  # fmt: skip
    sqs.send(url, "no JSON", *[f'{{"n": {n}}}' for n in range(1, 40)])
    source = Sqs(url, body="json", idle_exit_s=0.3)
    found = read(tmp_path / "s", source)
    assert sorted(message["body"]["n"] for message in found) == list(range(40))
    (first,) = [message for message in found if message["body"] == {"n": 0}]
    assert first["attributes"] == {"a": "x", "b": b"\0"} and first["group"] is None
    assert abs(time.time() - first["sent"].timestamp()) < 60
    until(lambda: not sqs.left(url))
    assert len(read(tmp_path / "s", source)) == 40
    with cues.open(tmp_path / "s", readonly=True) as store:
        (error,) = testing.messages(store, "errors")
        assert "body='json'" in str(error)


@pytest.mark.slow
def test_values_and_groups(tmp_path: Path, sqs: Server) -> None:
    url = sqs.queue(".fifo", ContentBasedDeduplication="true")
    sqs.send(url, '{"n": 1}', "[1]", '{"q/uuid": 1}', '{"n": 2}', MessageGroupId="g1")
    seen = []
    graph = graph_of(Sqs(url, body="json", shape="value", idle_exit_s=0.3))

    @graph.sink("in")
    def save(message: Any, process: cues.Process) -> None:
        seen.append((message, process.metadata["sqs"]["group"]))

    with graph.start(store=tmp_path / "s") as started:
        started.wait_done(60)
        failed = [str(error) for error in started.messages("errors")]
    assert seen == [({"n": 1}, "g1"), ({"n": 2}, "g1")]
    assert len(failed) == 2 and "list, not an object" in failed[0] and "reserved key" in failed[1]


LIFE = """
import sys
import cues
from cues import testing
from cues.processors import sqs
path, url, idle, point, hit, broken = sys.argv[1:]
if broken == "early":  # the control: delete on receipt
    real = sqs.Reading._is_new
    def deleted(self, id, handle):
        self._client.delete_message(QueueUrl=self._source.url, ReceiptHandle=handle)
        return real(self, id, handle)
    sqs.Reading._is_new = deleted
if broken == "forgets":  # the control: no row is kept
    sqs.Reading._is_new = lambda self, id, handle: (
        self._held.setdefault(id, (self._number + 1, handle)) and setattr(self, "_number", self._number + 1) is None
    )
source = sqs.Sqs(url, body="json", idle_exit_s=float(idle) or None, visibility_s=1, wait_s=0)
graph = cues.Graph("g", [cues.Source("in", source, batch_size=7)], errors="errors", durability="process")
print("begun")
with testing.crash(point, int(hit)) if point else __import__("contextlib").nullcontext():
    with graph.start(store=path) as running:
        running.wait_done()
"""


def live(path: Path, url: str, idle: float = 0, point: str = "", hit: int = 1, broken: str = "") -> Child:
    child = Child(LIFE, path, url, idle, point, hit, broken)
    assert child.line() == "begun"
    return child


def on_queue(path: Path) -> Counter[int]:
    with cues.open(path, readonly=True) as store:
        return Counter(message["body"] for message in testing.messages(store, "in"))


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("point", ["take.after", "commit.before", "commit.inside", "commit.after"])
def test_a_kill_at_a_point_leaves_each_message_once(point: str, hit: int, tmp_path: Path, sqs: Server) -> None:
    url = sqs.queue()
    sqs.send(url, *map(str, range(40)))
    with live(tmp_path / "s", url, 0, point, hit) as child:
        assert child.returncode() == -signal.SIGKILL
    with live(tmp_path / "s", url, 2) as child:
        child.end()
    assert on_queue(tmp_path / "s") == Counter(range(40))
    assert not sqs.left(url)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["early", "forgets"])
def test_the_controls_lose_and_repeat(broken: str, tmp_path: Path, sqs: Server) -> None:
    url = sqs.queue()
    sqs.send(url, *map(str, range(40)))
    point = "commit.before" if broken == "early" else "commit.after"
    with live(tmp_path / "s", url, 0, point, 1, broken) as child:
        assert child.returncode() == -signal.SIGKILL
    with live(tmp_path / "s", url, 2, broken=broken) as child:
        child.end()
    found = on_queue(tmp_path / "s")
    assert found.total() < 40 if broken == "early" else found.total() > 40


@bounded("rounds", 5, 25)
def test_random_kills_leave_each_message_once(rounds: int, tmp_path: Path, sqs: Server) -> None:
    chance, url = random.Random(seeds.new()), sqs.queue()
    done, count = threading.Event(), 20 * rounds

    def send() -> None:
        for at in range(0, count, 10):
            sqs.send(url, *map(str, range(at, at + 10)))
            time.sleep(0.2)
        done.set()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(rounds):
            with live(tmp_path / "s", url) as child:
                time.sleep(0.2 + chance.random() * 0.6)  # it loads boto3 first
                child.kill()
    finally:
        sender.join()
    assert done.is_set()
    with live(tmp_path / "s", url, 2.5) as child:
        child.end()
    assert on_queue(tmp_path / "s") == Counter(range(count))
    assert not sqs.left(url)


@pytest.mark.slow
def test_messages_that_wait_stay_hidden_and_a_full_queue_leaves_the_others(tmp_path: Path, sqs: Server) -> None:
    url = sqs.queue()
    sqs.send(url, *map(str, range(100)))
    source = Sqs(url, body="json", visibility_s=1, wait_s=0, in_flight=20)
    queues = {"in": cues.QueueOptions(max_lag=10)}
    graph = cues.Graph("g", [cues.Source("in", source)], queues=queues, durability="process")
    go, taken = threading.Event(), []

    @graph.sink("in", batch_size=1)
    def save(message: Any) -> None:
        go.wait(60)
        taken.append(message["body"])

    with cues.open(tmp_path / "s", durability="process") as store, graph.start(store=store) as started:
        until(lambda: len(started.messages("in")) >= 10)
        time.sleep(2.5)  # longer than they are hidden at first
        assert sqs.left(url) >= 70
        go.set()
        until(lambda: len(taken) >= 100)
        until(lambda: not sqs.left(url))
        until(lambda: not testing.state(store, "g.in"))  # the rows go with the confirmed deletions
    assert Counter(taken) == Counter(range(100))


@bounded("count", 100, 500)
def test_many_messages(count: int, tmp_path: Path, sqs: Server) -> None:
    """Not 100,000: moto takes some 60 ms for a request of ten messages."""
    url = sqs.queue()
    sqs.send(url, *map(str, range(count)))
    found = read(tmp_path / "s", Sqs(url, body="json", idle_exit_s=1))
    assert Counter(message["body"] for message in found) == Counter(range(count))


def impatient(endpoint: str) -> Any:
    from botocore.config import Config

    config = Config(connect_timeout=1, read_timeout=1, retries={"total_max_attempts": 1})
    return boto3.client("sqs", endpoint_url=endpoint, config=config)


@pytest.mark.slow
def test_an_outage_in_the_middle_is_waited_for(tmp_path: Path, sqs: Server, caplog: pytest.LogCaptureFixture) -> None:
    url, out = sqs.queue(), sqs.queue(".fifo")
    source = Sqs(url, body="json", wait_s=0, visibility_s=2, client=lambda: impatient(sqs.endpoint))
    sink = Sender(out, client=lambda: impatient(sqs.endpoint))
    graph = cues.Graph("g", [cues.Source("in", source), cues.Source("more"), sink.sink("more")], durability="process")
    with halted_at_end(graph.start(store=tmp_path / "s")) as running:
        sqs.send(url, *map(str, range(50)))
        until(lambda: running.messages("in"))
        os.kill(sqs.process.pid, signal.SIGSTOP)
        try:
            for n in range(20):
                running.send("more", {"n": n})
            until(lambda: "g.in: waiting" in caplog.text and "g.send: waiting" in caplog.text)
        finally:
            os.kill(sqs.process.pid, signal.SIGCONT)
        sqs.send(url, *map(str, range(50, 100)))
        until(lambda: len(running.messages("in")) >= 100)
        assert Counter(message["body"] for message in running.messages("in")) == Counter(range(100))
        until(lambda: sqs.left(out) >= 20)
    assert [json.loads(message["Body"])["n"] for message in sqs.take(out)] == list(range(20))


# --- the sink -------------------------------------------------------------------------------------


def sent(path: Path, sender: Sender, *messages: dict[str, Any], **options: Any) -> list[str]:
    """Send messages; return the errors."""
    graph = cues.Graph("o", [cues.Source("out"), sender.sink("out", **options)], errors="errors")
    with cues.open(path, durability="process") as store:
        store.queue("out").appender().write_many(list(messages))
        testing.run_until_idle(graph, store)
        return [str(error) for error in testing.messages(store, "errors")]


def test_messages_are_sent_and_wrong_ones_are_errors(tmp_path: Path, sqs: Server) -> None:
    url = sqs.queue()
    records = [
        {"body": "x", "attributes": {"a": "y", "b": b"\0"}}, {"n": 1}, {"body": b"x"}, {"body": {"n": 2}},
        *[{"body": "z" * 100_000} for _ in range(4)],
    ]  # fmt: skip
    errors = sent(tmp_path / "s", Sender(url, shape="record"), *records)
    assert len(errors) == 2 and "no 'body'" in errors[0] and "JSON cannot hold it" in errors[1]
    found = {message["Body"][:9]: message for message in sqs.take(url)}
    assert set(found) == {"x", '{"n": 2}', "z" * 9}
    assert found["x"]["MessageAttributes"]["b"]["BinaryValue"] == b"\0"


SENDING = """
import sys
import cues
from cues import testing
from cues.processors.sqs import Sender
path, url, point, hit, size = sys.argv[1:]
sink = Sender(url, group="g").sink("out", batch_size=int(size))
graph = cues.Graph("o", [cues.Source("out"), sink], durability="process")
print("begun")
with testing.crash(point, int(hit)) if point else __import__("contextlib").nullcontext():
    with graph.start(store=path) as running:
        running.wait_idle()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("fifo", [True, False])
def test_a_killed_sink_sends_once_to_a_fifo_queue(fifo: bool, tmp_path: Path, sqs: Server) -> None:
    """After the kill another ``batch_size`` cuts the steps in another way: the ids are those of the messages."""
    url = sqs.queue(".fifo" * fifo)
    with cues.open(tmp_path / "s", durability="process") as store:
        store.queue("out").appender().write_many([{"n": n, "g": f"g{n % 3}"} for n in range(60)])
    code = SENDING if fifo else SENDING.replace(', group="g"', "")
    for point, hit, size in [("commit.before", 3, 16), ("commit.after", 2, 9), ("commit.before", 2, 11), ("", 1, 30)]:
        with Child(code, tmp_path / "s", url, point, hit, size) as child:
            child.line()
            assert child.returncode() == (-signal.SIGKILL if point else 0)
    found = [json.loads(message["Body"]) for message in sqs.take(url)]
    if fifo:
        for group in range(3):
            assert [m["n"] for m in found if m["g"] == f"g{group}"] == list(range(group, 60, 3))
    else:
        assert {m["n"] for m in found} == set(range(60)) and len(found) > 60


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_options_are_refused() -> None:
    url = "https://sqs.eu-west-1.amazonaws.com/1/q"
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("url= is not", {"url": "q"}), ("url= is not", {"url": "https://me:geheim@sqs.eu-west-1.amazonaws.com/1/q"}),
        ("body='xml' is unknown", {"body": "xml"}), ("shape='value' with body='text'", {"shape": "value"}),
        ("wait_s", {"wait_s": 21}), ("visibility_s", {"visibility_s": 0}), ("in_flight", {"in_flight": 0}),
        ("client= is not a function", {"client": object()}),
    ]  # fmt: skip
    for text, options in wrong:
        with pytest.raises(InvalidArgument, match=text) as caught:
            Sqs(**{"url": url, **options})
        assert "geheim" not in str(caught.value)
    for text, options in [("shape='x'", {"shape": "x"}), ("not a FIFO queue", {"group": "k"})]:
        with pytest.raises(InvalidArgument, match=text):
            Sender(url, **options)
    assert pickle.loads(pickle.dumps(Sender(url))).url == pickle.loads(pickle.dumps(Sqs(url))).url == url


@pytest.mark.slow
def test_a_missing_queue_stops_and_a_server_that_is_not_there_is_away(tmp_path: Path, sqs: Server) -> None:
    missing = f"{sqs.endpoint}/123456789012/missing"
    with pytest.raises(ProcessorStopped, match=r"cannot be used: .*correct the URL"):
        read(tmp_path / "s", Sqs(missing, idle_exit_s=0.1))
    with pytest.raises(ProcessorStopped) as caught:
        sent(tmp_path / "o", Sender(missing), {"n": 1})
    assert isinstance(caught.value.__cause__, CheckpointError)
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
    source = Sqs(f"{gone}/1/q", client=lambda: impatient(gone))
    with pytest.raises(Away):
        next(source(None))
