"""A queue continued on another machine: once, whatever is killed; refusals, fences, certificates, columns."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import seeds
from children import Child
from ports import free_port
from small import until

import cues
from cues import codec, testing
from cues.errors import CheckpointError, CuesError, Diverged, InvalidArgument
from cues.processors import link, source_server

httpx = pytest.importorskip("httpx")

TOKEN = "0123456789abcdef"


@contextlib.contextmanager
def center(path: Path, durability: str = "process", schema: Any = None, **options: Any) -> Iterator[tuple[Any, str]]:
    """A receiver that runs: its graph and its URL."""
    receiver = link.Receiver(0, "/in", **{"token": TOKEN, **options})
    graph = cues.Graph("center", [cues.Source("readings", receiver, schema=schema)], durability=durability)
    graph.sink("readings", id="see")(lambda message: None)
    with graph.start(store=path) as running:
        yield running, until(lambda: receiver.url)


def edge(url: str, batch_size: int = 7, last: int = 100, **options: Any) -> cues.Graph:
    graph = cues.Graph("edge", errors="errors", durability="process")

    @graph.source("readings")
    def readings(position: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
        yield from ((n, {"n": n}) for n in range((position or 0) + 1, last + 1))

    sender = link.Sender(url, **{"token": TOKEN, "name": "box", **options})
    graph.add(sender.sink("readings", batch_size=batch_size))
    return graph


def received(path: Path, queue: str = "readings") -> list[Any]:
    with cues.open(path, readonly=True) as store:
        return list(store.queue(queue).tailer())


def numbers(path: Path) -> list[int]:
    return [message["n"] for message in received(path)]


def test_each_message_arrives_once_in_its_order_and_a_second_run_sends_nothing(tmp_path: Path) -> None:
    with center(tmp_path / "center") as (_, url):
        first = edge(url)
        first.queues["readings"] = cues.QueueOptions(metadata=True)  # its metadata stays here
        testing.run_until_idle(first, tmp_path / "edge")
        assert received(tmp_path / "center") == [{"n": n} for n in range(1, 101)]
        testing.run_until_idle(edge(url), tmp_path / "edge")
        testing.run_until_idle(edge(url, last=120), tmp_path / "edge")
    assert numbers(tmp_path / "center") == list(range(1, 121))
    with center(tmp_path / "center") as (_, url):  # the rows of senders are in the state
        testing.run_until_idle(edge(url, last=130), tmp_path / "edge")
    assert numbers(tmp_path / "center") == list(range(1, 131))


def test_several_senders_and_partitions_have_rows_of_their_own(tmp_path: Path) -> None:
    def box(name: str, url: str) -> cues.Graph:
        graph = cues.Graph("edge", queues={"readings": cues.QueueOptions(partitions=3, key="n")}, durability="process")

        @graph.source("readings")
        def readings(position: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
            yield from ((n, {"n": n, "box": name}) for n in range((position or 0) + 1, 51))

        graph.add(link.Sender(url, token=TOKEN, name=name).sink("readings", batch_size=4))
        return graph

    with center(tmp_path / "center") as (running, url):
        for name in ("a", "b"):
            testing.run_until_idle(box(name, url), tmp_path / name)
        found = received(tmp_path / "center")
        for name in ("a", "b"):
            assert sorted(m["n"] for m in found if m["box"] == name) == list(range(1, 51))
        assert link.Sender(url, token=TOKEN, name="a").holds(["edge.send", "edge.other"]) == ["edge.send"]
        assert link.Sender(url, token=TOKEN, name="new").holds(["edge.send"]) == []
        assert not running.stopped


def test_values_keep_their_types(tmp_path: Path) -> None:
    row = {
        "big": 2**64 - 1, "text": "größe", "bytes": b"\0\xff", "none": None, "at": datetime(2026, 1, 1, tzinfo=UTC),
        "day": date(2026, 1, 1), "price": Decimal("1.10"), "lag": timedelta(seconds=3), "list": [{"x": [1.5, True]}],
        "q/type": "order", "q/topics": ["shop"],
    }  # fmt: skip
    graph = cues.Graph("edge", durability="process")
    graph.add(cues.Source("readings", lambda position: iter([] if position else [(1, row)])))
    with center(tmp_path / "center") as (_, url):
        graph.add(link.Sender(url, token=TOKEN).sink("readings"))
        testing.run_until_idle(graph, tmp_path / "edge")
    assert received(tmp_path / "center") == [row]


def test_tables_go_over_as_columns(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"n": [1, None, 3], "s": ["a", "", None], "tags": [["x"], [], None]})
    graph = cues.Graph("edge", durability="process")

    @graph.source("readings")
    def readings(position: int | None) -> Iterator[tuple[int, Any]]:
        yield from list(enumerate(given, 1))[position or 0 :]

    given: list[Any] = [table, table]
    with center(tmp_path / "center") as (_, url):
        graph.add(link.Sender(url, token=TOKEN).sink("readings"))
        testing.run_until_idle(graph, tmp_path / "edge")
        given += [{"n": 4, "other": True}, table]  # in one step with dicts they are dicts
        testing.run_until_idle(graph, tmp_path / "edge")
    rows = table.to_pylist()
    assert received(tmp_path / "center") == [*rows, *rows, {"n": 4, "other": True}, *rows]
    with cues.open(tmp_path / "center", readonly=True) as store, store.core.view() as txn:
        from cues.storage import format_record

        assert "columns" in format_record.record_of(txn)["requires"]


def test_a_message_that_the_queue_refuses_fails_alone_at_the_sender(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "not": {"const": 13}}}}
    with center(tmp_path / "center", schema=schema) as (_, url):
        testing.run_until_idle(edge(url, last=30), tmp_path / "edge")
    assert numbers(tmp_path / "center") == [n for n in range(1, 31) if n != 13]
    (failed,) = received(tmp_path / "edge", "errors")
    assert failed["err.proc/messages"] == {"readings": [{"n": 13}]}
    assert "expected not" in failed["err/cause"][0]["message"]


def test_a_sender_waits_for_a_receiver_that_comes_later_and_goes_in_between(tmp_path: Path) -> None:
    fixed = free_port()
    graph = edge(f"http://127.0.0.1:{fixed}/in")
    with graph.start(store=tmp_path / "edge") as running:
        until(lambda: running.counters()["edge.send"].away or running.stopped)
        assert not running.stopped, running.stopped
        receiver = link.Receiver(fixed, "/in", token=TOKEN)
        late = cues.Graph("center", [cues.Source("readings", receiver)], durability="process")
        with late.start(store=tmp_path / "center"):
            running.wait_done(60)
    assert numbers(tmp_path / "center") == list(range(1, 101))


def test_a_wrong_token_stops_the_sender_and_names_no_token(tmp_path: Path) -> None:
    with center(tmp_path / "center") as (_, url):
        with pytest.raises(CuesError) as caught:
            testing.run_until_idle(edge(url, token="another-token-of-16"), tmp_path / "edge")
        assert "answered 401" in str(caught.value) and "another-token" not in str(caught.value)
        with pytest.raises(CheckpointError, match="answered 404"):
            link.Sender(url + "/other", token=TOKEN).ask("")
    assert "0123456789abcdef" not in repr(link.Sender(url, token=TOKEN)) + repr(link.Receiver(token=TOKEN))


def test_each_sender_may_have_a_token_of_its_own(tmp_path: Path) -> None:
    tokens = {"a": "a" * 16, "b": "b" * 16}
    with center(tmp_path / "center", token=tokens) as (_, url):
        assert link.Sender(url, token="a" * 16, name="a").ask("") == {"row": None, "processors": []}
        for name, token in (("a", "b" * 16), ("c", "a" * 16), ("b", "a" * 16)):
            with pytest.raises(CheckpointError, match="answered 401"):
                link.Sender(url, token=token, name=name).ask("")


def test_a_store_that_was_begun_anew_is_refused_under_the_same_name(tmp_path: Path) -> None:
    with center(tmp_path / "center") as (_, url):
        testing.run_until_idle(edge(url), tmp_path / "edge")
        with pytest.raises(CuesError) as caught:
            testing.run_until_idle(edge(url), tmp_path / "anew")
        assert isinstance(caught.value.__cause__ or caught.value, Diverged) or "from the store" in str(caught.value)
        testing.run_until_idle(edge(url, name="other-box"), tmp_path / "third")
    assert numbers(tmp_path / "center") == [*range(1, 101), *range(1, 101)]


def test_a_request_whose_answer_was_lost_is_not_written_again(tmp_path: Path) -> None:
    """The same request twice: the second one does not fit the row any more."""
    row = ["store", 0, 1, json.dumps({"g.s.q": 3}), "hash", "{}"]
    with center(tmp_path / "center") as (_, url):
        sender = link.Sender(url, token=TOKEN, name="box")
        sender.ask("g.s", before=None, after=row, messages=[{"n": 1}, {"n": 2}], table=None)
        with pytest.raises(CheckpointError) as caught:
            sender.ask("g.s", before=None, after=row, messages=[{"n": 1}, {"n": 2}], table=None)
        assert caught.value.again
        assert sender.ask("g.s")["row"] == row
    assert numbers(tmp_path / "center") == [1, 2]


def request_of(messages: Any, table: bytes | None = None, ends: str = "{}") -> bytes:
    after = ["store", 0, 1, ends, "hash", "{}"]
    given = {"version": 1, "processor": "p", "before": None, "after": after, "messages": messages, "table": table}
    return codec.pack(given)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", {}, 400),
        (b"\xc1\xc1", {}, 400),
        (codec.pack({"version": 9, "processor": "p", "before": None, "after": None}), {}, 426),
        (codec.pack({"version": 1, "processor": 7, "before": None, "after": None}), {}, 400),
        (codec.pack({"version": 1, "processor": "p", "before": None, "after": [1]}), {}, 400),
        (zlib.compress(b"\0" * 3_000_000), {"Content-Encoding": "deflate"}, 413),
        (b"no zlib", {"Content-Encoding": "deflate"}, 400),
        (b"x" * 2_000_000, {}, 413),
        (request_of([[1]]), {}, 400),
        (request_of("text"), {}, 400),
        (request_of([{"n": 1}], ends="[" * 100_000), {}, 400),
        (request_of([], table=b"\xff\xff\xff\xff" + b"\x10\0\0\0" + b"\x7f" * 16), {}, 400),
        (b"", {"Authorization": "Bearer wrong"}, 401),
        (b"", {"Cues-Sender": "a b"}, 401),
    ],
)
def test_what_is_no_request_is_refused_and_the_receiver_goes_on(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int
) -> None:
    given = {"Authorization": f"Bearer {TOKEN}", "Cues-Sender": "box", **headers}
    with center(tmp_path / "center", body_bytes_max=1_000_000) as (running, url):
        assert httpx.post(url, content=body, headers=given).status_code == status
        assert httpx.get(url).status_code == 405
        assert link.Sender(url, token=TOKEN).ask("")["row"] is None
        assert not running.stopped
    assert received(tmp_path / "center") == []


def test_a_request_that_does_not_arrive_whole_delays_no_drain_and_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_server, "_CLOSE_S", 300.0)
    with socket.socket() as slow:
        slow.settimeout(60)
        with center(tmp_path / "center") as (_, url):
            slow.connect(("127.0.0.1", httpx.URL(url).port))
            head = f"POST /in HTTP/1.1\r\nHost: x\r\nCues-Sender: box\r\nAuthorization: Bearer {TOKEN}\r\n"
            slow.sendall(f"{head}Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n".encode())
            assert slow.recv(1000).startswith(b"HTTP/1.1 100")  # the receiver reads the body
            began = time.monotonic()
        assert time.monotonic() - began < 60
        assert b" 503 " in slow.recv(1000)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@contextlib.contextmanager
def stranger(answer: bytes) -> Iterator[int]:
    """The port of a server that answers each first request with some bytes, and closes the connection."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    connection.recv(100_000)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)


@pytest.mark.parametrize(
    ("scheme", "answer", "away"),
    [
        ("http", b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<p/>", False),
        ("http", b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx", True),
        ("http", b"", True),
        ("https", b"", True),  # the receiver was killed in the handshake
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", False),  # it does not speak TLS
    ],
)
def test_an_answer_that_is_not_of_a_receiver_fails_no_message(scheme: str, answer: bytes, away: bool) -> None:
    """The sender waits or stops: otherwise each message would be on the error queue."""
    with stranger(answer) as port, pytest.raises(CheckpointError) as caught:
        link.Sender(f"{scheme}://127.0.0.1:{port}/in", token=TOKEN).ask("")
    assert caught.value.away is away


@pytest.mark.parametrize("message", [{"q/uuid": "x"}, {"q/deliver-at": 1}, {"q/meta": {}}, [1], {"n": object}])
def test_reserved_keys_and_other_values_are_no_messages(tmp_path: Path, message: Any) -> None:
    row = ["store", 0, 1, "{}", "hash", "{}"]
    with center(tmp_path / "center") as (_, url), pytest.raises((CuesError, TypeError)):
        link.Sender(url, token=TOKEN).ask("g.s", before=None, after=row, messages=[{"n": 1}, message], table=None)
    assert received(tmp_path / "center") == []


def test_declarations_that_cannot_work_are_refused() -> None:
    for make in (
        lambda: link.Receiver(host="0.0.0.0"),
        lambda: link.Receiver(token="short"),
        lambda: link.Receiver(client_ca="ca.pem"),
        lambda: link.Receiver(path="in"),
        lambda: link.Receiver(key="key.pem"),
        lambda: link.Sender("center:7411"),
        lambda: link.Sender("http://center/in", name="a b"),
        lambda: link.Sender("http://center/in", key="key.pem"),
        lambda: link.Sender("http://center/in", timeout_s=0),
    ):
        with pytest.raises(InvalidArgument):
            make()


@pytest.mark.slow
def test_the_page_runs_as_it_is_written_and_sends_all_again_when_it_is_asked(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "how-to" / "link.md").read_text()
    fixed = free_port()
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        name = block.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(block.replace("7411", str(fixed)))
    environment = {**os.environ, "LINK_TOKEN": TOKEN}

    def cues_command(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cues", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)

    command = [sys.executable, "-m", "cues", "run", "center.py"]
    output = open(tmp_path / "center.out", "w")  # noqa: SIM115
    center = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)
    try:
        first = cues_command("run", "edge.py")
        assert first.returncode == 0, first.stderr
        again = cues_command("seek", "edge.py#send", "--to", "start", "--again", "--yes")
        assert again.returncode == 0, again.stderr
        second = cues_command("run", "edge.py")
        assert second.returncode == 0, second.stderr
    finally:
        center.send_signal(signal.SIGINT)
        assert center.wait(60) == 130
        output.close()
    printed = [line for line in (tmp_path / "center.out").read_text().splitlines() if line.startswith("{'sensor'")]
    assert printed == [f"{{'sensor': 'north', 'n': {n}}}" for n in (1, 2, 3, 1, 2, 3)]


# --- certificates -------------------------------------------------------------------------------


def certificates(folder: Path) -> None:
    """An authority, a server at 127.0.0.1 and a client, each with its key; and another authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.now(UTC)
    made: dict[str, Any] = {}

    def make(name: str, signer: str, is_ca: bool) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer, issuer_key = made.get(signer, (name, key))
        called = {each: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, issuer)}
        cert = (
            x509.CertificateBuilder()
            .subject_name(called[name])
            .issuer_name(called[issuer])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
            # Python 3.13 asks for the three that follow.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
            .add_extension(x509.KeyUsage(True, False, False, False, False, is_ca, is_ca, False, False), critical=True)
            .sign(issuer_key, hashes.SHA256())
        )
        made[name] = name, key
        form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (folder / f"{name}.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        (folder / f"{name}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, none))

    make("ca", "ca", True)
    make("server", "ca", False)
    make("client", "ca", False)
    make("stranger", "stranger", True)


def test_over_tls_both_sides_know_each_other(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    certificates(tmp_path)
    pem = {name: str(tmp_path / name) for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")}
    tls = {"token": None, "cert": pem["server.pem"], "key": pem["server.key"], "client_ca": pem["ca.pem"]}
    with center(tmp_path / "center", **tls) as (_, url):
        assert url.startswith("https://")
        mine = {"token": None, "ca": pem["ca.pem"], "cert": pem["client.pem"], "key": pem["client.key"]}
        testing.run_until_idle(edge(url, **mine), tmp_path / "edge")
        with pytest.raises(CheckpointError) as caught:  # the sender has no certificate
            link.Sender(url, ca=pem["ca.pem"]).ask("")
        assert "Perhaps it wants https://, or a certificate" in str(caught.value)
        with pytest.raises(CheckpointError, match="Perhaps it wants https://"):
            link.Sender(url.replace("https:", "http:")).ask("")
        stranger = str(tmp_path / "stranger.pem")
        with pytest.raises(CheckpointError) as caught:  # the receiver is not known
            link.Sender(url, ca=stranger, cert=pem["client.pem"], key=pem["client.key"]).ask("")
        assert caught.value.away is False and "certificate" in str(caught.value)
        with pytest.raises(CheckpointError, match="cannot be read"):
            link.Sender(url, ca=str(tmp_path / "none.pem")).ask("")
    assert numbers(tmp_path / "center") == list(range(1, 101))
    receiver = link.Receiver(0, **{**tls, "cert": stranger})
    with pytest.raises(CuesError, match="cannot use its certificates"):
        testing.run_until_idle(cues.Graph("center", [cues.Source("readings", receiver)]), tmp_path / "c2")


@pytest.mark.parametrize(
    ("version", "suites", "accepted"),
    [
        (ssl.TLSVersion.TLSv1_3, "", True),
        (ssl.TLSVersion.TLSv1_2, "ECDHE+AESGCM", True),
        (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES128-SHA256:AES128-GCM-SHA256:@SECLEVEL=0", False),
        (ssl.TLSVersion.TLSv1_1, "ALL:@SECLEVEL=0", False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*TLSv1_1 is deprecated")
def test_a_receiver_takes_tls_12_and_newer_with_suites_of_today(
    tmp_path: Path, version: ssl.TLSVersion, suites: str, accepted: bool
) -> None:
    pytest.importorskip("cryptography")
    certificates(tmp_path)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    context.minimum_version = context.maximum_version = version
    if suites:
        context.set_ciphers(suites)
    with center(tmp_path / "c", cert=str(tmp_path / "server.pem"), key=str(tmp_path / "server.key")) as (_, url):
        address = "127.0.0.1", int(url.split(":")[2].partition("/")[0])
        with socket.create_connection(address, timeout=60) as plain:
            if accepted:
                with context.wrap_socket(plain, server_hostname="127.0.0.1") as spoken:
                    assert spoken.version() == version.name.replace("v1_", "v1.")
                return
            with pytest.raises((ssl.SSLError, ConnectionError)):
                context.wrap_socket(plain, server_hostname="127.0.0.1")


# --- kills --------------------------------------------------------------------------------------

EDGE = """
import sys, time
import cues
from cues.processors import link
path, url, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
graph = cues.Graph("edge", durability="process")

@graph.source("readings")
def readings(position):
    for n in range((position or 0) + 1, last + 1):
        yield n, {"n": n}
        if n % 20 == 0:
            time.sleep(0.002)

graph.add(link.Sender(url, token="0123456789abcdef", name="box").sink("readings", batch_size=9))
with graph.start(store=path) as running:
    print("started", flush=True)
    running.wait_done()
print("done", flush=True)
"""

CENTER = """
import sys
import cues
from cues.processors import link
path, port = sys.argv[1], int(sys.argv[2])
receiver = link.Receiver(port, "/in", token="0123456789abcdef")
graph = cues.Graph("center", [cues.Source("readings", receiver)], durability="process")
graph.stream("readings", "copies", id="copy")(lambda message: message)
with graph.start(store=path) as running:
    print("started", flush=True)
    running.wait_done()
"""


@pytest.mark.slow
def test_both_sides_are_killed_at_every_point_of_a_delivery(tmp_path: Path) -> None:
    fixed, last = free_port(), 0
    url = f"http://127.0.0.1:{fixed}/in"
    points = [("center", "commit.inside:2"), ("center", "commit.after:3"), ("center", "commit.inside:4")]
    points += [("edge", f"{point}:{hit}") for point in ("checkpoint.inside", "checkpoint.after") for hit in (1, 2)]
    points += [("edge", "commit.inside:2"), ("edge", "commit.after:3")]
    for side, point in points:
        last += 90
        here, there = ({"CUES_FAULT": point} if side == each else {} for each in ("center", "edge"))
        receiver = Child(CENTER, tmp_path / "center", fixed, **here)
        with receiver, Child(EDGE, tmp_path / "edge", url, last, **there) as sender:
            assert (receiver if here else sender).returncode() == -9
    with Child(CENTER, tmp_path / "center", fixed), Child(EDGE, tmp_path / "edge", url, last) as sender:
        assert sender.line() == "started" and sender.line() == "done"
    assert numbers(tmp_path / "center") == list(range(1, last + 1))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_sides_are_killed_at_random_times(tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    fixed, last = free_port(), 6_000
    url = f"http://127.0.0.1:{fixed}/in"
    kills = 0
    receiver, sender = Child(CENTER, tmp_path / "center", fixed), Child(EDGE, tmp_path / "edge", url, last)
    try:
        while kills < 50:
            time.sleep(chance.uniform(0.2, 0.8))
            if chance.random() < 0.5:
                receiver.kill()
                receiver = Child(CENTER, tmp_path / "center", fixed)
            else:
                sender.kill()
                last += 200
                sender = Child(EDGE, tmp_path / "edge", url, last)
            kills += 1
        sender.kill()
        sender = Child(EDGE, tmp_path / "edge", url, last)
        assert sender.line() == "started" and sender.line() == "done"
    finally:
        receiver.kill()
        sender.kill()
    assert numbers(tmp_path / "center") == list(range(1, last + 1))
