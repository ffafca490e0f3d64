"""Requests for messages, against real servers on loopback: once by key, whatever is killed and whatever is answered."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from email.utils import format_datetime
from pathlib import Path
from typing import Any, cast

import pytest
import seeds
from forks import Forks
from http_lives import COUNT, graph_of
from http_servers import Ledger, Reply, Seen, serving

import cues
from cues import testing
from cues.errors import InvalidArgument, NotInstalled
from cues.processors import http
from cues.processors.http_sink import Requests, as_json

pytest.importorskip("httpx")

WANTED = [json.dumps({"n": n}, separators=(",", ":")).encode() for n in range(COUNT)]


def run(
    requests: Requests, store: cues.Store, messages: list[dict[str, Any]], errors: str | None = "errors", **options: Any
) -> testing.Report:
    """Send the messages; the waits are noted and not made."""
    store.queue("orders").appender().write_many(messages)
    graph = cues.Graph("g", [cues.Source("orders"), requests.sink("orders", **options)], errors=errors)
    return testing.run_until_idle(graph, store)


def only_error(store: cues.Store) -> tuple[str, dict[str, Any]]:
    (record,) = testing.messages(store, "errors")
    return record["err/cause"][0]["message"], record["err/context"]


# --- once ---------------------------------------------------------------------------------------


def feed(store: cues.Store) -> None:
    store.queue("orders").appender().write_many([{"n": n} for n in range(COUNT)])


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_crash_anywhere_leaves_each_message_once_on_a_server_that_honours_keys(concurrency: int) -> None:
    """The control, which takes every request, sees each message at least once, and some twice after some crash."""
    server_of: list[Ledger] = []
    repeated = False
    with serving(lambda seen: server_of[-1](seen)) as server:

        def run(store: cues.Store) -> None:
            testing.run_until_idle(graph_of(server.url, concurrency), store)

        def effects(honours: bool, point: str, hit: int) -> list[bytes]:
            server_of.append(Ledger(honours))
            with testing.temporary_store() as store:
                feed(store)
                with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                    run(store)
                run(store)
            return server_of[-1].effects

        server_of.append(Ledger())
        with testing.temporary_store() as store:
            feed(store)
            sites = testing.crash_sites(lambda: run(store))
        assert len(sites) > 25
        for point, hit in sites:
            found = effects(True, point, hit)
            assert (found if concurrency == 1 else sorted(found)) == WANTED, (point, hit)
            if point in ("function.after", "commit.before", "commit.after"):
                found = effects(False, point, hit)
                assert set(found) == set(WANTED)
                repeated |= len(found) > COUNT
    assert repeated


KILLED = (
    "claim.after", "take.after", "snapshot.after", "function.before", "function.after", "commit.before",
    "commit.outputs", "commit.inside", "commit.after", "close.before",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("point", KILLED)
def test_kill_at_every_point_leaves_each_message_once(point: str, forks: Forks, tmp_path: Path) -> None:
    ledger, path = Ledger(), str(tmp_path / "store")
    hit = 1 if point.startswith(("claim", "close")) else 2
    with serving(ledger) as server:
        assert forks.run("http_lives:crash", path, server.url, 1, point, hit).killed
        forks.run("http_lives:send", path, server.url)
    assert ledger.effects == WANTED


@pytest.mark.slow
def test_random_kills_and_a_failing_server_leave_each_message_once(forks: Forks, tmp_path: Path) -> None:
    """Half of the first requests are broken off after their effect; the child is killed after a random request."""
    chance = random.Random(seeds.new())
    path = str(tmp_path / "store")
    forks.run("http_lives:prepare", path)

    def wrong(turn: int, request: Seen) -> Reply | None:
        return Reply(reset=True) if turn == 1 and chance.random() < 0.5 else None

    ledger = Ledger(wrong=wrong)
    with serving(ledger) as server:
        for _ in range(5):
            goal = len(server.seen) + chance.randint(1, 2)
            pid = forks.start("http_lives:send", path, server.url, 2)
            limit = time.monotonic() + 60
            while len(server.seen) < goal and len(ledger.effects) < COUNT and time.monotonic() < limit:
                time.sleep(0.001)
            if len(ledger.effects) < COUNT:
                forks.kill(pid)
            forks.wait(pid)
        forks.run("http_lives:send", path, server.url, 2)
    assert sorted(ledger.effects) == sorted(WANTED)


def test_a_crash_after_the_answer_repeats_the_request_under_its_key(store: cues.Store) -> None:
    with serving(Ledger(honours=False)) as server:
        store.queue("orders").appender().write_many([{"n": n} for n in range(3)])
        with testing.crash("function.after", 2, how="raise"), pytest.raises(testing.Crashed):
            testing.run_until_idle(graph_of(server.url), store)
        testing.run_until_idle(graph_of(server.url), store)
        keys = [seen.headers["idempotency-key"] for seen in server.seen]
    assert keys[:2] == keys[2:4] and len(set(keys)) == 3 and all(len(key) == 32 for key in keys)


# --- what is sent -------------------------------------------------------------------------------


@pytest.mark.slow
def test_requests_are_what_the_functions_say(store: cues.Store) -> None:
    requests = Requests(
        lambda message: message["url"],
        lambda message: message["method"],
        headers=lambda message: {"X-N": str(message["n"])},
        json=lambda message: {"at": datetime(2026, 1, 2, tzinfo=UTC), "total": Decimal("1.50"), "n": message["n"]},
        key="n",
        sign=http.Signature(b"secret", "standard"),
    )
    with serving(lambda seen: Reply(204)) as server:
        messages = [{"n": 1, "url": f"{server.url}/a?b=c"}, {"n": 2, "url": "/no"}]
        run(requests, store, [{**message, "method": "put"} for message in messages])
        (seen,) = server.seen
    assert (seen.method, seen.path) == ("PUT", "/a?b=c")
    assert seen.body == b'{"at":"2026-01-02T00:00:00+00:00","total":"1.50","n":1}'
    assert seen.headers["x-n"] == seen.headers["idempotency-key"] == seen.headers["webhook-id"] == "1"
    assert http.Signature(b"secret", "standard").problem(seen.headers, seen.body) is None
    assert "UnsupportedProtocol" in only_error(store)[0]  # an address without a host is a failed message


@pytest.mark.slow
def test_a_stream_writes_the_answers(store: cues.Store) -> None:
    def answer(request: Seen) -> Reply:
        if request.path == "/old":
            return Reply(301, b"", {"Location": "/new"})
        return Reply(200, "é".encode(), {"Content-Type": "text/plain; charset=utf-8"})

    with serving(answer) as server:
        pages = Requests(lambda message: server.url + message["path"], "GET", redirects=2)
        texts = Requests(
            lambda message: server.url + message["path"], "GET", answer=lambda message, got: {"text": got.text}
        )
        graph = cues.Graph("g", errors="errors")
        graph.source("urls")
        graph.add(pages.stream("urls", "pages"))
        graph.add(texts.stream("urls", "texts", id="texts", concurrency=2))
        store.queue("urls").appender().write_many([{"path": "/old"}, {"path": "/new"}])
        testing.run_until_idle(graph, store)
        assert not any("idempotency-key" in seen.headers for seen in server.seen)
        found = testing.messages(store, "pages")
        assert [(m["path"], m["status"], m["url"], m["body"].decode()) for m in found] == [
            (path, 200, f"{server.url}/new", "é") for path in ("/old", "/new")
        ]
    assert testing.messages(store, "texts") == [{"text": "é"}]
    text, context = only_error(store)  # without redirects= it fails, and names the new address
    assert "301 to /new" in text and context["status"] == 301


# --- what is answered ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("status", http.RETRY_ON)
def test_a_status_of_retry_on_is_tried_again(status: int, store: cues.Store) -> None:
    ledger = Ledger(wrong=lambda turn, seen: Reply(status) if turn < 3 else None)
    with serving(ledger) as server:
        report = run(Requests(server.url), store, [{"n": 0}, {"n": 1}])
    assert ledger.effects == WANTED[:2] and len(report.waits_s) == 4
    assert all(0.05 <= wait_s <= 0.2 for wait_s in report.waits_s)  # 0.1 s, 0.2 s, less at most half


@pytest.mark.slow
def test_retry_after_in_seconds_and_as_a_date_is_honoured_up_to_a_bound(store: cues.Store) -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    given = iter(["7", soon, "86400", "-3", "rubbish", "Wed, 21 Oct 2015 07:28:00 GMT"])
    ledger = Ledger(wrong=lambda turn, seen: Reply(429, b"", {"Retry-After": next(given)}) if turn < 7 else None)
    with serving(ledger) as server:
        report = run(Requests(server.url, retry_after_s_max=120), store, [{"n": 0}])
    first, date, bounded, *ignored = report.waits_s
    assert first == 7 and 0 < date <= 101 and bounded == 120
    assert all(wait_s <= 16 for wait_s in ignored) and ledger.effects == WANTED[:1]


@pytest.mark.slow
@pytest.mark.parametrize("status", [300, 400, 401, 404, 409, 422, 501])
def test_any_other_status_goes_to_the_error_queue_at_once(status: int, store: cues.Store) -> None:
    wrong = {"0": Reply(status, b"<p>because\n" + b"x" * 100_000)}
    ledger = Ledger(wrong=lambda turn, seen: wrong.get(str(json.loads(seen.body)["n"])))
    with serving(ledger) as server:
        report = run(Requests(f"{server.url}/a?token=secret"), store, [{"n": 0}, {"n": 1}])
        assert report.waits_s == [] and ledger.effects == WANTED[1:2]
        text, context = only_error(store)
        assert f"POST {server.url}/a answered {status}" in text and "because" in text and len(text) < 500
        assert context["status"] == status and context["url"] == f"{server.url}/a"
        assert context["body"].startswith("<p>because") and len(context["body"]) == http.SHOWN_CHARACTERS
        accepted = Requests(server.url, accept=[status])
        with testing.temporary_store() as other:
            run(accepted, other, [{"n": 0}])
            assert "errors" not in other.queues() or testing.messages(other, "errors") == []


WIRE = {
    "a reset before the answer": Reply(reset=True),
    "a reset in the middle of the body": Reply(200, b"half", announced=100, reset=True),
    "a body that ends early": Reply(200, b"half", announced=100, headers={"Connection": "close"}),
    "a body of one byte at a time": Reply(200, b"x" * 10_000, drip_s=0.05),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WIRE)
def test_a_request_without_a_whole_answer_is_tried_again(kind: str, store: cues.Store) -> None:
    drips = WIRE[kind].drip_s > 0
    ledger = Ledger(wrong=lambda turn, seen: WIRE[kind] if turn == 1 and b"0" in seen.body else None)
    with serving(ledger) as server:
        report = run(Requests(server.url, timeout_s=3 if drips else 60), store, [{"n": 0}, {"n": 1}])
        assert ledger.effects == WANTED[:2]
        assert len(report.waits_s) >= 1 if drips else len(report.waits_s) == 1


@pytest.mark.slow
def test_a_server_that_is_down_fails_the_message_after_all_attempts(store: cues.Store) -> None:
    with serving(Ledger()) as server:
        url = server.url
    report = run(Requests(url, attempts=3), store, [{"n": 0}])
    text, context = only_error(store)
    assert len(report.waits_s) == 2 and "ConnectError" in text and context["url"] == url
    with testing.temporary_store() as other, pytest.raises(cues.ProcessorStopped):
        run(Requests(url, attempts=1), other, [{"n": 0}], errors=None)


@pytest.mark.slow
def test_an_endless_answer_costs_a_connection_and_fails_only_a_stream(store: cues.Store) -> None:
    with serving(lambda seen: Reply(200, b"x" * 1_000_000)) as server:
        requests = Requests(server.url, body_bytes_max=1_000)
        assert run(requests, store, [{"n": 0}]).waits_s == []
        assert "errors" not in store.queues() or testing.messages(store, "errors") == []
        graph = cues.Graph("h", [cues.Source("urls"), requests.stream("urls", "pages")], errors="errors")
        store.queue("urls").appender().write({"n": 1})
        testing.run_until_idle(graph, store)
    assert "more than 1000 bytes" in only_error(store)[0]


@pytest.mark.slow
def test_a_rate_holds_over_concurrent_calls_and_repetitions(store: cues.Store) -> None:
    """Requests are at least a tenth of a second apart; a wait may be longer on a busy machine."""
    ledger = Ledger(wrong=lambda turn, seen: Reply(503) if turn == 1 else None)
    with serving(ledger) as server:
        began = time.monotonic()
        run(Requests(server.url, rate="10/s"), store, [{"n": n} for n in range(4)], concurrency=4)
        assert time.monotonic() - began >= 0.7 and sorted(ledger.effects) == WANTED[:4]


# --- parts --------------------------------------------------------------------------------------


def test_options_that_do_not_fit_are_refused() -> None:
    for call in (
        lambda: Requests("http://x", json=lambda m: m, body=lambda m: b""),
        lambda: Requests("http://x", attempts=0),
        lambda: Requests("http://x", retry_on=[99]),
        lambda: Requests("http://x", accept=["200"]),  # type: ignore[list-item]
        lambda: Requests("http://x", rate="10 per second"),
        lambda: Requests("http://x", rate=0),
        lambda: http.Signature("", "github"),
        lambda: http.Signature("x", "gitlab"),
        lambda: cues.Sink(print, "q", id="p", retries=cues.Retry(2, jitter=1.5)),
    ):
        with pytest.raises(cues.CuesError, match="Try:"):
            call()  # type: ignore[no-untyped-call]


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(NotInstalled, match=r"Try: run pip install 'cues-streams\[http\]'"):
        http.package("a_package_that_nobody_has")


def test_requests_and_errors_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(Requests("http://x/a", rate="2/s", sign=http.Signature("s"))))
    assert again.retries == Requests("http://x/a").retries
    error = pickle.loads(pickle.dumps(http.unanswered("GET", "http://u:p@x/a?b", OSError("gone"))))
    assert isinstance(error, http.TryLater) and error.url == "http://x/a" and "Try:" in str(error)


def test_json_is_plain_or_refused() -> None:
    assert as_json({"d": Decimal("1.0"), "é": [None, True]}) == '{"d":"1.0","é":[null,true]}'.encode()
    for value in (b"bytes", float("nan"), {1, 2}):
        with pytest.raises((TypeError, ValueError)):
            as_json(value)


@pytest.mark.parametrize("form", ["github", "stripe", "standard", "shopify", "slack"])
def test_a_signature_is_right_for_one_body_one_secret_and_some_time(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(headers: dict[str, str]) -> dict[str, str]:
        return {name.lower(): value for name, value in headers.items()}

    body, now = b'{"a": 1}', time.time()
    headers = small(http.Signature([b"new", b"old"], form).headers(body, "id-1"))
    assert http.Signature(b"new", form).problem(headers, body) is None
    assert http.Signature([b"newer", b"new"], form).problem(headers, body) is None
    assert http.Signature(b"old", form).problem(headers, body) == "wrong signature"
    assert http.Signature(b"new", form).problem(headers, body + b" ") == "wrong signature"
    assert "no header" in str(http.Signature(b"new", form).problem({}, body))
    name = http.Signature(b"new", form).header.lower()
    for value in ("é", "sha256=", "t=,v1=", "v1,", "t=1", "v1," * 1000, "t=99999999999999999999,v1=00"):
        assert http.Signature(b"new", form).problem({**headers, name: value}, body)
    monkeypatch.setattr(time, "time", lambda: now + 1_000)
    late = http.Signature(b"new", form).problem(headers, body)
    assert late is None if form in ("github", "shopify") else "not within 300 s" in str(late)


def test_a_signature_of_the_documentation_of_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V"
        b"&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text="
        b"&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
        b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    headers = {
        "x-slack-request-timestamp": "1531420618",
        "x-slack-signature": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
    }
    monkeypatch.setattr(time, "time", lambda: 1531420620.0)
    assert http.Signature("8f742231b10e8888abcd99yyyzzz85a5", "slack").problem(headers, body) is None


def test_a_signature_of_the_documentation_of_github() -> None:
    github = {"x-hub-signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"}
    assert http.Signature("It's a Secret to Everybody").problem(github, b"Hello, World!") is None


STANDARD = {
    "id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "timestamp": "1614265330",
    "signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}
"""The published example of standardwebhooks.com; its secret and body are in the test."""


@pytest.mark.parametrize("family", ["webhook", "svix"])
def test_a_signature_of_the_standard_webhooks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b'{"test": 2432232314}'
    monkeypatch.setattr(time, "time", lambda: float(STANDARD["timestamp"]))
    headers = {f"{family}-{name}": value for name, value in STANDARD.items()}
    for given in (secret, secret.removeprefix("whsec_")):
        signature = http.Signature(given, "standard")
        assert signature.problem(headers, body) is None
        assert signature.problem({**headers, f"{family}-id": "msg_other"}, body) == "wrong signature"
        assert signature.headers(body, STANDARD["id"])["Webhook-Signature"] == STANDARD["signature"]
        other = STANDARD["signature"].replace(",", ",*")  # a decoder of base64 drops a star
        assert signature.problem({**headers, f"{family}-signature": other}, body) == "wrong signature"


def test_a_signature_of_the_library_of_stripe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signature was made by stripe-python 16.1."""
    monkeypatch.setattr(time, "time", lambda: 1614265330.0)
    digest = "7ac016571d9aa380f09ea2e79588261c02f51bdb6e375e5da14f89ebbea2e247"
    headers, body = {"stripe-signature": f"t=1614265330,v1={digest}"}, b'{"id": "evt_test", "object": "event"}'
    signature = http.Signature("whsec_test_secret", "stripe")
    assert signature.problem(headers, body) is None
    assert signature.headers(body, "")["Stripe-Signature"] == headers["stripe-signature"]


def test_a_secret_that_is_no_key_is_refused() -> None:
    for secret in ("a secret", "whsec_?", "whsec_", "", [], ["whsec_czNjcmV0", b""], 5, [5]):
        with pytest.raises(InvalidArgument, match=r"Try: give"):
            http.Signature(cast(Any, secret), "standard")


def test_a_wait_has_jitter_and_is_at_least_what_the_error_asks_for() -> None:
    retry = cues.Retry(9, backoff_s=1, max_s=8, jitter=0.5)
    assert {2 <= retry.wait_s(3) <= 4 for _ in range(50)} == {True}
    assert len({retry.wait_s(3) for _ in range(50)}) > 1 and cues.Retry(9, backoff_s=1).wait_s(3) == 4
    error = http.unanswered("GET", "http://x", OSError())
    error.retry_after_s = 60
    assert retry.wait_s(1, error) == 60 and retry.wait_s(1, OSError()) <= 1
