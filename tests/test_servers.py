"""The servers that strangers may reach, against the usual list: page, webhook, receiver of a link, metrics.

SECURITY.md has the list, with the tests here and in the files of each server.
"""

from __future__ import annotations

import contextlib
import gzip
import inspect
import logging
import random
import re
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import fuzzing
import pytest
import seeds
from sets import bounded
from small import until

import cues
from cues import codec
from cues.processors import http, link

pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from ui_server import page_of

from cues.processors.webhook import Webhook
from cues.tools import exporter

TOKEN = "a-token-of-24-characters"
SECRET = "5ecret-of-a-request"


class Served(NamedTuple):
    """A server that runs: its port, a request line that it answers, and headers that open it."""

    port: int
    line: str
    headers: tuple[str, ...] = ()


@contextlib.contextmanager
def page(path: Path) -> Iterator[Served]:
    with page_of(path, token=TOKEN) as served:
        yield Served(served.port, "GET /api/overview", (f"Authorization: Bearer {TOKEN}",))


@contextlib.contextmanager
def source(path: Path, made: Any, *headers: str) -> Iterator[Served]:
    graph = cues.Graph("g", [cues.Source("events", made)], durability="process")
    with graph.start(store=path.parent / "graph") as running:
        url = until(lambda: made.url)
        yield Served(int(re.search(r":(\d+)/", url)[1]), "POST /in", headers)  # type: ignore[index]
        running.drain()


@contextlib.contextmanager
def metrics(path: Path) -> Iterator[Served]:
    with cues.open(path, readonly=True) as store, exporter.serve(store, 0) as server:
        yield Served(int(server.url.split(":")[2].split("/")[0]), "GET /metrics")


SERVERS: dict[str, Any] = {
    "page": page,
    "webhook": lambda path: source(path, Webhook(0, "/in", body_s=30.0)),
    "receiver": lambda path: source(
        path, link.Receiver(0, "/in", token=TOKEN), f"Authorization: Bearer {TOKEN}", "Cues-Sender: box"
    ),
    "metrics": metrics,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("servers") / "store"
    with cues.open(path, durability="process") as opened:
        opened.queue("orders").appender().write({"n": 1})
    return path


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, store: Path) -> Iterator[Served]:
    with SERVERS[request.param](store) as made:
        yield made


def asked(server: Served, line: str = "", *headers: str, body: bytes = b"", host: str = "127.0.0.1") -> str:
    """The answers to a request, until the server ends the connection."""
    head = [f"{line or server.line} HTTP/1.1", f"Host: {host}", *server.headers, *headers, "", ""]
    if not any(each.startswith("Connection") for each in headers):
        head.insert(2, "Connection: close")
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client, contextlib.suppress(OSError):
        client.sendall("\r\n".join(head).encode("latin-1") + body)
        while piece := client.recv(1 << 16):
            received += piece
    return received.decode("latin-1")


def status(answer: str) -> int:
    return int(answer.split(" ", 2)[1])


# --- requests that two servers would read in two ways, or that have no end ----------------------------


def test_a_request_with_two_lengths_is_refused_and_nothing_after_it_is_answered(served: Served) -> None:
    """The rest could be a request that a proxy has not seen."""
    rest = f"0\r\n\r\n{served.line} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    lengths = f"Content-Length: {len(rest)}", "Transfer-Encoding: chunked", "Connection: keep-alive"
    answer = asked(served, "", *lengths, body=rest)
    assert answer.count("HTTP/1.") == 1
    if "GET /metrics" not in served.line:  # it reads no body, and one request of a connection
        assert status(answer) == 400


@pytest.mark.parametrize("header", [f"X-Large: {'x' * 200_000}", "Content-Length: -1", "Content-Length: 1, 2"])
def test_a_head_that_is_too_large_or_wrong_is_refused(served: Served, header: str) -> None:
    if "GET /metrics" in served.line and "Length" in header:
        pytest.skip("no body is read there")
    answer = asked(served, "", header)
    assert answer == "" or 400 <= status(answer) < 500  # "": the connection was ended while the client wrote


def test_a_head_of_metrics_that_does_not_arrive_is_ended(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that arrives byte by byte: the limit is for the whole head."""
    monkeypatch.setattr(exporter, "HEAD_S", 0.05)
    with metrics(store) as server, socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.")
        assert client.recv(1 << 16)[:9] in (b"", b"HTTP/1.0 ")


def test_connections_of_metrics_are_bounded_and_the_next_one_is_answered_when_one_ends(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "CONNECTIONS_MAX", 2)
    with metrics(store) as server, contextlib.ExitStack() as stack:
        first, _, third = (
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)) for _ in range(3)
        )
        assert third.recv(1) == b""
        first.close()
        until(lambda: "cues_up 1.0" in asked(server))


# --- requests of any bytes ----------------------------------------------------------------------------


def hook_of(**options: Any) -> Any:
    return lambda path: source(path, Webhook(0, "/in", **options))


def writing(path: Path) -> Any:
    """A page that may change its store."""

    @contextlib.contextmanager
    def made() -> Iterator[Served]:
        with page_of(path, token=TOKEN, target=str(path)) as served:
            yield Served(served.port, "POST /api/redrive", (f"Authorization: Bearer {TOKEN}", "X-Cues: 1"))

    return made()


ROW = [1, "home", 3, "9f" * 16, 4]
ASKED = {"version": 1, "processor": "p", "before": None}
BODIES: dict[str, tuple[Any, list[str], list[bytes]]] = {
    "page": (
        writing,
        [
            "POST /api/redrive",
            "POST /api/discard",
            "POST /login",
            "GET /api/messages?queue=orders&at=1&count=2",
            "GET /api/message?queue=orders&index=1&partition=0&offset=0",
            "GET /api/state?processor=p&after=0f",
            "GET /api/became?queue=orders&index=1",
            "GET /api/history?processor=p&span=hour",
        ],
        [
            b'{"queue": "orders", "index": 7.5, "partition": 0}',
            b"token=a",
            b'{"reason": "\\ud800", "cause": "\\ud800"}',
        ],
    ),
    "webhook of JSON": (hook_of(), ["POST /in"], [b'{"n": [1, 2.5, null, "\\u00e9"], "q/type": "a"}']),
    "webhook with ids of its bodies": (
        hook_of(
            id=lambda hook: hook.json()["id"], message=lambda hook: {"n": 1}, reply=lambda hook: hook.query.get("c")
        ),
        ["POST /in", "POST /in?c=%ff%00&d=1"],
        [b'{"id": "\\ud800"}', b'{"id": "a"}', b'{"id": ["\\udfff", 1e308]}'],
    ),
    "webhook of forms": (
        hook_of(message=lambda hook: hook.form()),
        ["POST /in"],
        [b"a=1&b=%20x&c=", b"a=%ed%a0%80&b=%00"],
    ),
    "receiver": (
        lambda path: source(
            path, link.Receiver(0, "/in", token=TOKEN), f"Authorization: Bearer {TOKEN}", "Cues-Sender: box"
        ),
        ["POST /in"],
        [
            codec.pack({**ASKED, "after": after, "messages": given, "table": table})
            for after, given, table in (
                (None, [], None),
                (ROW, [{"n": 1}], None),
                (ROW, [], b"\xff\xff\xff\xff\0\0\0\0"),
            )
        ],
    ),
}
"""Servers, their request lines and bodies; the tests change both at random."""


@bounded("count", 60, 3_000)
@pytest.mark.parametrize("name", BODIES)
def test_requests_of_any_bytes_are_answered_and_are_no_error_of_the_server(
    name: str, count: int, tmp_path: Path
) -> None:
    """Never 500, and never no answer; after all of them a right request is answered as before."""
    make, lines, bodies = BODIES[name]
    seed = seeds.new()
    dice, statuses = random.Random(seed), set[int]()
    packed = [pack(body) for body in bodies for pack in (gzip.compress, zlib.compress)]
    with cues.open(store := tmp_path / "store") as opened:
        opened.queue("orders").appender().write({"n": 1})
    with make(store) as server:
        before = status(asked(server, lines[0], f"Content-Length: {len(bodies[0])}", body=bodies[0]))
        for number in range(count):
            is_changed = number >= len(bodies)
            body = fuzzing.mutated(dice.choice([*bodies, *packed]), bodies, dice) if is_changed else bodies[number]
            line = dice.choice(lines)
            if "?" in line and dice.random() < 0.8:
                path, _, query = line.partition("?")
                line = f"{path}?{quote(fuzzing.mutated(query.encode(), [query.encode()], dice), safe='=&')}"
            encoding = dice.choice(["", "gzip", "deflate", "br"]) if is_changed else ""
            headers = [f"Content-Length: {len(body)}", *([f"Content-Encoding: {encoding}"] if encoding else [])]
            answer = asked(server, line, *headers, body=body)
            assert answer.startswith("HTTP/1.1 "), (seed, number, line, encoding, body)
            statuses.add(status(answer))
            assert status(answer) < 500 or status(answer) == 503, (seed, number, line, encoding, body, answer)
        assert status(asked(server, lines[0], f"Content-Length: {len(bodies[0])}", body=bodies[0])) == before
    assert len(statuses) > 1, statuses


# --- browsers ---------------------------------------------------------------------------------------------


def test_every_answer_has_its_type_and_no_other_is_guessed(served: Served) -> None:
    for line in ("", "GET /none", "DELETE /in", "GET /static/"):
        answer = asked(served, line).lower()
        assert "x-content-type-options: nosniff" in answer and "cache-control: no-store" in answer, line
        assert "content-type: " in answer or "content-length: 0" in answer or " 405 " in answer, line


def test_no_answer_lets_another_site_read_it_or_sends_it_elsewhere(served: Served) -> None:
    preflight = "Origin: http://evil.example", "Access-Control-Request-Method: POST"
    for line in ("", "OPTIONS /in", "GET //evil.example/%2f..", "GET /?next=http://evil.example"):
        answer = asked(served, line, *preflight).lower()
        assert answer.startswith("http/1."), line
        assert "access-control-allow" not in answer and "\r\nlocation:" not in answer, line


def test_metrics_of_this_machine_are_not_for_a_site_whose_name_was_pointed_here(store: Path) -> None:
    with metrics(store) as server:
        for host in ("evil.example", "127.0.0.1.evil.example", "", "[::"):
            assert status(asked(server, host=host)) == 403, host
        for host in ("127.0.0.1", f"localhost:{server.port}", "[::1]:9464"):
            assert "cues_up 1.0" in asked(server, host=host), host


@pytest.mark.parametrize("header", ["Origin: http://evil.example", "Origin: null", "Sec-Fetch-Site: cross-site"])
def test_a_page_in_a_browser_sends_no_events_to_a_webhook_that_verifies_nothing(store: Path, header: str) -> None:
    """Such a request needs no permission: a form, or a script with the type text/plain, on any page."""
    body = b'{"n": 1}'
    for verify, expected in ((None, 403), (lambda hook: True, 200)):
        with source(store, Webhook(0, "/in", verify=verify)) as server:
            answer = asked(server, "", header, "Content-Type: text/plain", f"Content-Length: {len(body)}", body=body)
            assert status(answer) == expected


# --- what is said and logged ------------------------------------------------------------------------------


def test_nothing_of_a_request_gets_into_logs_or_into_heads_of_answers(
    served: Served, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    lines = (f"GET /%0d%0aforged?token={SECRET}", f"GET /\x1b[31mforged?{SECRET}", f"{SECRET} /", f"POST /in?{SECRET}")
    for line in lines:
        answer = asked(served, line, f"Authorization: Bearer {SECRET}", f"Cookie: cues={SECRET}")
        assert "\nforged" not in answer
    said = caplog.text + "".join(capfd.readouterr())
    assert SECRET not in said and "forged" not in said


def test_servers_listen_on_this_machine_alone_unless_they_are_told() -> None:
    from cues.cli import page

    assert page.HOST == exporter.HOST == "127.0.0.1"
    for made in (Webhook, link.Receiver):
        assert inspect.signature(made).parameters["host"].default == "127.0.0.1"


def test_secrets_are_compared_in_constant_time() -> None:
    """With == the time of an answer tells how many characters of a guess are right."""
    from cues.ui import guard

    for compares, times in ((guard.Guard, 2), (link.Receiver, 1), (http.Signature, 1)):
        source = inspect.getsource(compares)
        assert source.count("hmac.compare_digest(") == times, compares
        assert not re.search(r"[=!]= *(self\.)?_?(token|cookie|digest|given)\b|\b(token|cookie|digest) *[=!]=", source)
