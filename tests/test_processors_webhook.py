"""Requests of others as messages: answered when they are durable, once by their id, whatever arrives on the wire."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import pickle
import random
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import seeds
from forks import Forks
from small import until

import cues
from cues import codec, testing
from cues.errors import Diverged, InvalidArgument
from cues.processors import http
from cues.processors.http_sink import Requests
from cues.processors.webhook import REMEMBER, Hook, Webhook

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.slow


@contextlib.contextmanager
def serving(tmp_path: Path, hook: Webhook, **options: Any) -> Iterator[cues.Running]:
    graph = cues.Graph("g", [cues.Source("events", hook)], errors="errors", durability="process", **options)
    with graph.start(store=tmp_path / "store") as running:
        until(lambda: hook.url)
        yield running
    until(lambda: hook.url is None)


def post(hook: Webhook, body: Any = None, id: str = "", **options: Any) -> Any:
    headers = {**({"X-Id": id} if id else {}), **options.pop("headers", {})}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with httpx.Client(timeout=60) as client:
        return client.request(options.pop("method", "POST"), hook.url, content=content, headers=headers)


# --- once ---------------------------------------------------------------------------------------


class Sender:
    """Sends events one after another, each until it is answered 200; starts the server again when it died."""

    def __init__(self, forks: Forks, path: Path, remember: int = REMEMBER, early: bool = False) -> None:
        self.forks, self.path, self.remember, self.early = forks, path, remember, early
        self.count = itertools.count()
        self.deaths = 0
        path.mkdir()

    def start(self, site: tuple[str, int] | None) -> None:
        self.where = str(self.path / f"url-{next(self.count)}")
        arguments = (str(self.path / "store"), self.where, site, self.remember, self.early)
        self.pid = self.forks.start("http_lives:hook", *arguments)

    def url(self) -> str | None:
        where = Path(self.where)
        return where.read_text() if where.exists() else None

    def died(self) -> bool:
        """Whether the kernel has ended it: it is a zombie until the test waits for it."""
        status = Path(f"/proc/{self.pid}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"

    def renew(self) -> None:
        assert self.forks.wait(self.pid).killed
        self.deaths += 1
        self.start(None)

    def send(self, id: str) -> None:
        limit = time.monotonic() + 90
        while time.monotonic() < limit:
            until(lambda: self.url() or self.died())
            if self.died():
                self.renew()
                continue
            with contextlib.suppress(httpx.TransportError), httpx.Client(timeout=60) as client:
                answer = client.post(str(self.url()), json={"id": id}, headers={"X-Id": id})
                assert answer.status_code in (200, 503), answer.text
                if answer.status_code == 200:
                    return
        raise AssertionError("no answer")

    def end(self) -> list[str]:
        """The ids of the messages after a drain."""
        until(lambda: self.url() or self.died())
        if self.died():
            self.renew()
        Path(f"{self.where}.stop").touch()
        assert not (ended := self.forks.wait(self.pid)).error, ended.error
        with cues.open(self.path / "store", readonly=True) as store:
            return [message["id"] for message in testing.messages(store, "events")]


IDS = ["a", "b", "c", "d"]
POINTS = [
    ("claim.inside", 1), ("claim.after", 1), ("take.after", 1), ("take.after", 3), ("commit.before", 2),
    ("commit.outputs", 1), ("commit.inside", 2), ("commit.after", 1), ("commit.after", 3), ("ring.after", 2),
]  # fmt: skip


def killed(forks: Forks, path: Path, site: tuple[str, int], **options: Any) -> list[str]:
    """The ids on the queue after a kill at a point; the event of that moment is sent again."""
    sender = Sender(forks, path, **options)
    sender.start(site)
    for id in IDS:
        sender.send(id)
    found = sender.end()
    assert sender.deaths == 1, f"{site} was not reached"
    return found


@pytest.mark.parametrize("site", POINTS, ids=lambda site: "-".join(map(str, site)))
def test_a_kill_at_every_point_leaves_each_answered_event_once(
    site: tuple[str, int], forks: Forks, tmp_path: Path
) -> None:
    assert killed(forks, tmp_path / "a", site) == IDS


def test_an_event_whose_id_has_no_utf8_is_answered_and_is_one_message(tmp_path: Path) -> None:
    """It was answered 500 after its commit, so that its sender sent it again for ever."""
    hook = Webhook(0, id=lambda hook: hook.json()["id"], message=lambda hook: {"n": len(hook.body)})
    with serving(tmp_path, hook) as running:
        answers = [post(hook, b'{"id": "\\ud800"}') for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert [json.loads(answer.text) for answer in answers] == [{"event": "\ud800"}] * 2
        running.drain()
    with cues.open(tmp_path / "store", readonly=True) as store:
        assert len(testing.messages(store, "events")) == 1


def test_a_refusal_with_a_text_of_the_request_that_has_no_utf8_is_answered(tmp_path: Path) -> None:
    def message(hook: Hook) -> dict[str, Any]:
        raise ValueError(hook.json()["id"])

    hook = Webhook(0, message=message)
    with serving(tmp_path, hook) as running:
        answer = post(hook, b'{"id": "\\ud800"}')
        assert (answer.status_code, json.loads(answer.text)) == (400, {"error": "ValueError: \ud800"})
        running.drain()


def test_the_controls_lose_and_repeat(forks: Forks, tmp_path: Path) -> None:
    """A server that answers before the commit loses an event; one that keeps no ids has one twice."""
    sender = Sender(forks, tmp_path / "early", early=True)
    sender.start(("commit.inside", 1))
    sender.send("a")
    Path(f"{sender.where}.go").touch()
    until(sender.died)
    assert sender.end() == []
    repeated = killed(forks, tmp_path / "forgets", ("commit.after", 2), remember=0)
    assert sorted(repeated) == ["a", "b", "b", "c", "d"]


def test_random_kills_leave_each_answered_event_once(forks: Forks, tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    sender = Sender(forks, tmp_path / "a")
    sender.start(None)
    ids = [str(n) for n in range(20)]
    kills = sorted(chance.sample(range(1, 20), 3))
    for n, id in enumerate(ids):
        killer: threading.Timer | None = None
        if n in kills:
            until(lambda: sender.url() or sender.died())
            killer = threading.Timer(chance.random() * 0.01, _kill, (forks, sender.pid))
            killer.start()
        sender.send(id)
        if killer is not None:
            killer.join()
    assert sender.end() == ids and sender.deaths >= 2  # the last one may die after the last event


def _kill(forks: Forks, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        forks.kill(pid)


def test_a_repetition_is_no_message_again_also_while_the_first_waits(tmp_path: Path) -> None:
    hook = Webhook(port=0, id="x-id")
    with serving(tmp_path, hook) as running, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: post(hook, {"n": n % 3}, id=str(n % 3)), range(24)))
        assert {answer.status_code for answer in answers} == {200}
        assert sorted(message["n"] for message in running.messages("events")) == [0, 1, 2]
        assert post(hook, {"n": 9}).status_code == 400  # no id
    with serving(tmp_path, hook) as running:  # the ids are in the position
        assert post(hook, {"n": 1}, id="1").json() == {"event": "1"}
        assert len(running.messages("events")) == 3


def test_the_position_is_bounded_and_the_oldest_id_is_forgotten(tmp_path: Path) -> None:
    hook = Webhook(port=0, id="x-id", remember=2)
    with serving(tmp_path, hook) as running:
        for id in ("a", "b", "a", "c", "b", "a"):
            assert post(hook, {"id": id}, id=id).status_code == 200
        assert [message["id"] for message in running.messages("events")] == ["a", "b", "c", "a"]
    assert len(codec.pack([1, 2**60, b"x" * 8 * REMEMBER])) < 2_000


# --- answers ------------------------------------------------------------------------------------


def test_a_request_is_answered_after_its_commit(tmp_path: Path) -> None:
    hook = Webhook(port=0)
    with serving(tmp_path, hook) as running:
        for n in range(20):
            assert post(hook, {"n": n}).status_code == 200
            assert running.messages("events")[-1] == {"n": n}


def test_wrong_requests_are_refused_and_no_message(tmp_path: Path) -> None:
    hook = Webhook(port=0, path="/hooks", body_bytes_max=1_000)
    with serving(tmp_path, hook) as running, httpx.Client(timeout=60) as client:
        url = str(hook.url)
        wrong = {
            404: [client.post(url.replace("/hooks", "/other"), json={}), client.post(url + "/", json={})],
            405: [client.get(url), client.put(url, json={})],
            413: [post(hook, b"x" * 1_001), client.post(url, content=iter([b"x" * 600] * 3))],
            400: [post(hook, body) for body in (b"{", b"", b"[1]", b"\xff", b'{"a": ' * 50_000)[:4]],
        }
        for status, answers in wrong.items():
            assert [answer.status_code for answer in answers] == [status] * len(answers)
        assert wrong[405][0].headers["allow"] == "POST"
        assert post(hook, {"n": 1}).status_code == 200
        assert running.messages("events") == [{"n": 1}]


def test_a_body_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    hook = Webhook(port=0)
    with serving(tmp_path, hook) as running:
        assert post(hook, b'{"a":' * 100_000).status_code == 400
        assert running.messages("events") == []


@pytest.mark.parametrize("form", ["github", "stripe", "standard", "shopify", "slack"])
def test_a_signature_is_verified(form: str, tmp_path: Path) -> None:
    signature = http.Signature([b"secret", b"before"], form)
    hook = Webhook(port=0, verify=signature)
    body = b'{"n": 1}'
    with serving(tmp_path, hook) as running:
        assert post(hook, body).status_code == 401
        assert post(hook, body, headers=http.Signature(b"wrong", form).headers(body, "1")).status_code == 401
        assert post(hook, body + b" ", headers=signature.headers(body, "1")).status_code == 401
        assert running.messages("events") == []
        assert post(hook, body, headers=signature.headers(body, "1")).status_code == 200
        assert post(hook, body, headers=http.Signature(b"before", form).headers(body, "2")).status_code == 200
        assert len(running.messages("events")) == 2


def test_functions_read_the_request(tmp_path: Path) -> None:
    def message(request: Hook) -> dict[str, Any]:
        if request.query["kind"] == "no":
            raise ValueError("not this kind")
        return {"kind": request.query["kind"], "id": request.id, "body": request.body, "method": request.method}

    hook = Webhook(
        port=0, methods=["PUT"], id=lambda request: request.headers["x-id"][:1], message=message,
        verify=lambda request: request.headers.get("x-token") == "t",
    )  # fmt: skip
    with serving(tmp_path, hook) as running, httpx.Client(timeout=60) as client:
        headers = {"X-Id": "abc", "X-Token": "t"}
        assert client.put(f"{hook.url}?kind=no", content=b"x", headers=headers).status_code == 400
        assert client.put(f"{hook.url}?kind=k", content=b"x", headers={"X-Id": "a"}).status_code == 401
        assert client.put(f"{hook.url}?kind=k", content=b"\0\xff", headers=headers).status_code == 200
        assert running.messages("events") == [{"kind": "k", "id": "a", "body": b"\0\xff", "method": "PUT"}]


def test_one_request_may_have_several_messages_or_none(tmp_path: Path) -> None:
    """They are one commit: all of them, or none if the queue refuses one."""
    hook = Webhook(port=0, id="X-Id", message=lambda request: request.json())
    with serving(tmp_path, hook) as running:
        assert post(hook, [{"n": 1}, {"n": 2}], "a").status_code == 200
        assert running.messages("events") == [{"n": 1}, {"n": 2}]
        assert post(hook, [{"n": 1}, {"n": 2}], "a").status_code == 200  # known
        for body in (b"null", b"[]"):
            assert post(hook, body, "b").status_code == 200
        assert post(hook, [{"n": 3}, {"q/uuid": "x"}], "c").status_code == 400
        assert post(hook, [{"n": 3}, 4], "c").status_code == 400
        assert post(hook, [{"n": 3}], "c").status_code == 200
        assert running.messages("events") == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_challenge_is_answered_and_is_no_message(tmp_path: Path) -> None:
    """As Slack (JSON), Meta (GET, text) and Microsoft (text) ask for an address; it is not signed by all of them."""

    def reply(request: Hook) -> Any:
        if request.method == "GET":
            if request.query["hub.verify_token"] != "mine":
                raise ValueError("another token")
            return request.query["hub.challenge"]
        if "validationToken" in request.query:
            return request.query["validationToken"].encode()
        if request.json().get("type") == "url_verification":
            return {"challenge": request.json()["challenge"]}
        return None

    hook = Webhook(port=0, reply=reply, methods=["GET", "POST"], verify=http.Signature("secret", "slack"))
    with serving(tmp_path, hook) as running, httpx.Client(timeout=60) as client:
        meta = client.get(str(hook.url), params={"hub.verify_token": "mine", "hub.challenge": "<b>1158"})
        assert (meta.status_code, meta.text) == (200, "<b>1158")
        assert meta.headers["content-type"].startswith("text/plain")
        assert client.get(str(hook.url), params={"hub.verify_token": "x", "hub.challenge": "1"}).status_code == 400
        assert client.get(str(hook.url)).status_code == 400
        assert client.post(f"{hook.url}?validationToken=a%20b").text == "a b"
        assert post(hook, {"type": "url_verification", "challenge": "c"}).json() == {"challenge": "c"}
        assert post(hook, {"type": "event"}).status_code == 401
        body = b'{"type": "event"}'
        assert post(hook, body, headers=http.Signature("secret", "slack").headers(body, "1")).status_code == 200
        assert running.messages("events") == [{"type": "event"}]


def test_a_body_may_be_compressed_and_a_form(tmp_path: Path) -> None:
    """The signature is that of the bytes that were sent; the bound holds for what they become."""
    signature = http.Signature("secret", "github")
    hook = Webhook(port=0, body_bytes_max=10_000, message=lambda request: dict(request.form()))
    signed = Webhook(port=0, verify=signature)
    with serving(tmp_path / "forms", hook) as running:
        assert post(hook, b"a=1&b=%C3%A9+x&a=2&c=").status_code == 200
        assert post(hook, gzip.compress(b"n=1"), headers={"Content-Encoding": "gzip"}).status_code == 200
        assert post(hook, zlib.compress(b"n=2"), headers={"Content-Encoding": "Deflate"}).status_code == 200
        for body, encoding, status in [
            (gzip.compress(b"x" * 5_000_000), "gzip", 413),
            (b"n=1", "gzip", 400),
            (gzip.compress(b"n=1")[:-4], "gzip", 400),
            (gzip.compress(b"n=1") * 2, "gzip", 400),
            (b"n=1", "br", 415),
            (b"no form", "", 400),
            (b"\xff=1", "", 400),
        ]:
            assert post(hook, body, headers={"Content-Encoding": encoding}).status_code == status, (body[:10], encoding)
        assert running.messages("events") == [{"a": "2", "b": "é x", "c": ""}, {"n": "1"}, {"n": "2"}]
    with serving(tmp_path / "signed", signed) as running:
        body = gzip.compress(b'{"n": 1}')
        headers = {**signature.headers(body, "1"), "Content-Encoding": "gzip"}
        assert post(signed, body, headers=headers).status_code == 200
        assert running.messages("events") == [{"n": 1}]


def test_a_message_that_cannot_be_written_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    hook = Webhook(port=0, message=lambda request: {"x": object()})
    with serving(tmp_path, hook) as running:
        answer = post(hook, {})
        assert answer.status_code == 400 and "object" in answer.json()["error"]
        assert running.messages("errors") == running.messages("events") == []


# --- busy, slow and ending ----------------------------------------------------------------------


def test_a_full_queue_makes_senders_wait_and_events_return(tmp_path: Path) -> None:
    """Nobody reads the queue, which takes two messages: the others are answered 503, and none of them twice later."""
    hook = Webhook(port=0, id="x-id", pending_max=3, answer_s=0.2)
    gate = threading.Event()
    graph = cues.Graph(
        "g", [cues.Source("events", hook)], durability="process", queues={"events": cues.QueueOptions(max_lag=2)}
    )

    @graph.sink("events", batch_size=1)
    def read(message: dict[str, Any]) -> None:
        gate.wait(60)

    with graph.start(store=tmp_path / "store") as running:
        until(lambda: hook.url)
        until(lambda: post(hook, {"n": 0}, id="0").status_code == 200)
        assert 503 in [post(hook, {"n": n}, id=str(n)).status_code for n in range(1, 10)]
        refused = post(hook, {"n": 99}, id="99")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        gate.set()
        for n in range(10):
            until(lambda n=n: post(hook, {"n": n}, id=str(n)).status_code == 200)  # type: ignore[misc]
        assert sorted(message["n"] for message in running.messages("events")) == list(range(10))


def raw(hook: Webhook) -> socket.socket:
    host, _, port = str(hook.url).removeprefix("http://").partition("/")[0].partition(":")
    connection = socket.create_connection((host, int(port)), 60)
    connection.settimeout(60)
    return connection


def test_requests_that_arrive_at_once_are_bounded_too(tmp_path: Path) -> None:
    """Five bodies are half read when there is room for three events; no step commits before all are there."""
    hook = Webhook(port=0, pending_max=3, answer_s=1.0)
    source = hook(None)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        first = pool.submit(next, source)
        until(lambda: hook.url)
        connections = [stack.enter_context(raw(hook)) for _ in range(5)]
        for connection in connections:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{")
        for connection in connections:
            connection.sendall(b"}")
        answers = [b""] * len(connections)
        for place, connection in enumerate(connections):
            while b"error" not in answers[place]:
                chunk = connection.recv(1_000)
                assert chunk
                answers[place] += chunk
        assert first.result(60)[1] == {} and all(answer.startswith(b"HTTP/1.1 503") for answer in answers)
        assert sum(b'"busy"' in answer for answer in answers) == 2
        connections[0].close()
        hook.committed([1, 1, b""])
        pool.submit(source.close).result(60)


def test_a_body_that_is_announced_as_too_large_is_not_waited_for(tmp_path: Path) -> None:
    hook = Webhook(port=0, body_s=50.0)
    with serving(tmp_path, hook), raw(hook) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000000\r\n\r\n")
        assert connection.recv(1_000).startswith(b"HTTP/1.1 413")


def test_slow_and_broken_clients_hold_nothing_up(tmp_path: Path) -> None:
    hook = Webhook(port=0, body_s=1.0)
    with serving(tmp_path, hook) as running, contextlib.ExitStack() as stack:
        silent, head, body, broken = (stack.enter_context(raw(hook)) for _ in range(4))
        head.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nX-Slow")
        body.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        broken.sendall(b'POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"n": 2}')
        broken.close()
        assert post(hook, {"n": 1}).status_code == 200
        assert silent.recv(1_000) == b"" and head.recv(1_000) == b""
        answer = b""
        while chunk := body.recv(1_000):
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 408")
        with raw(hook) as rubbish:
            rubbish.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
            assert rubbish.recv(1_000).startswith(b"HTTP/1.1 400")
        assert post(hook, {"n": 3}).status_code == 200
        assert running.messages("events") == [{"n": 1}, {"n": 3}]


def test_a_drain_answers_what_is_committed_and_frees_the_address(tmp_path: Path) -> None:
    """Requests run against a drain: those that were answered 200 are messages, and all others are not."""
    hook = Webhook(port=0, id="x-id")
    answered: list[str] = []
    begun = threading.Event()

    def send(thread: int) -> None:
        with contextlib.suppress(httpx.TransportError):
            for n in range(10_000):
                id = f"{thread}-{n}"
                if post(hook, {"id": id}, id=id).status_code != 200:
                    return
                answered.append(id)
                begun.set()

    with ThreadPoolExecutor(4) as pool:
        with serving(tmp_path, hook):
            jobs = [pool.submit(send, thread) for thread in range(4)]
            assert begun.wait(60)
        for job in jobs:
            assert job.exception(60) is None or "url" in str(job.exception())
    with cues.open(tmp_path / "store", readonly=True) as store:
        found = [message["id"] for message in testing.messages(store, "events")]
    assert set(answered) <= set(found) and len(found) == len(set(found))
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "cues webhook"])
    assert hook.url is None


def test_a_second_server_on_one_address_is_refused(tmp_path: Path) -> None:
    hook = Webhook(port=0)
    with serving(tmp_path, hook):
        port = int(str(hook.url).rpartition(":")[2].strip("/"))
        second = Webhook(port=port)
        with pytest.raises(cues.CuesError, match=r"cannot listen on 127\.0\.0\.1:\d+.*Try:"):
            next(second(None))


def test_an_outbox_and_a_webhook_agree(tmp_path: Path) -> None:
    """Our sink, signed, into our source: the key of the sink is the id of the event."""
    signature = http.Signature(b"secret", "standard")
    hook = Webhook(port=0, id="Idempotency-Key", verify=signature)
    with serving(tmp_path, hook) as running, testing.temporary_store() as store:
        outbox = Requests(str(hook.url), sign=signature)
        store.queue("out").appender().write_many([{"n": n} for n in range(5)])
        graph = cues.Graph("o", [cues.Source("out"), outbox.sink("out", batch_size=2)])
        for hit in (2, 3):
            with testing.crash("function.after", hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph, store)
        testing.run_until_idle(graph, store)
        assert running.messages("events") == [{"n": n} for n in range(5)]


# --- parts --------------------------------------------------------------------------------------


def test_options_and_positions_that_do_not_fit_are_refused() -> None:
    for options in ({"path": "hooks"}, {"remember": -1}, {"port": 70_000}, {"pending_max": 0}, {"body_s": 0}):
        with pytest.raises(InvalidArgument, match="Try:"):
            Webhook(**options)  # type: ignore[arg-type]
    with pytest.raises(Diverged, match="Try:"):
        next(Webhook(port=0)([9, 1, b""]))
    hook = Webhook(port=1, id="x")
    assert pickle.loads(pickle.dumps(hook)).id == "x" and hook.url is None
