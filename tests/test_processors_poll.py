"""A resource that is asked again and again, on a real server: each item once, whatever the server and the run do."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import seeds
from forks import Forks
from http_servers import Reply, Seen, serving
from small import until

import cues
from cues import codec, testing
from cues.base.away import is_away
from cues.errors import Diverged, InvalidArgument
from cues.processors import http, http_source, waits
from cues.processors.http_sink import Requests
from cues.processors.http_source import SEEN_MAX, Poll
from cues.steps.state import StateTable

pytest.importorskip("httpx")
pytestmark = pytest.mark.slow


def as_json(value: Any, **headers: str) -> Reply:
    return Reply(200, json.dumps(value).encode(), headers)


class Resource:
    """A list that the test changes, with an ETag; replies in ``first`` come before it."""

    def __init__(self, *items: Any, first: list[Reply] | None = None) -> None:
        self.items = list(items)
        self.first = first or []

    def __call__(self, request: Seen) -> Reply:
        if self.first:
            return self.first.pop(0)
        tag = f'"{hash(json.dumps(self.items))}"'
        if request.headers.get("if-none-match") == tag:
            return Reply(304)
        return as_json(self.items, ETag=tag)


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits of a source, which are noted and not made."""
    made: list[float] = []

    def wait(process: Any, seconds: float, *, new: bool = True) -> bool:
        made.append(seconds)
        return True

    monkeypatch.setattr(waits, "wait", wait)
    return made


def once(source: Poll, position: Any = None) -> tuple[Any, list[Any]]:
    """One round after a position; the position after it, and the messages."""
    read = list(source(codec.unpack(codec.pack(position))))
    assert all(len(codec.pack(after)) < 2_000 for after, _ in read)
    return (read[-1][0] if read else position), [message for _, message in read]


def test_a_list_gives_each_item_once_and_asks_on_a_condition() -> None:
    resource = Resource({"id": 1}, {"id": 2}, {"id": 1, "repeated": True})
    with serving(resource) as server:
        poll = Poll(server.url, id="id", interval_s=None, headers=lambda: {"X-Token": "t"})
        position, messages = once(poll)
        assert messages == [{"id": 1}, {"id": 2}]
        assert once(poll, position) == (position, [])
        assert server.seen[-1].headers["if-none-match"] and server.seen[-1].headers["x-token"] == "t"
        resource.items = [{"id": 3}, {"id": 2, "changed": True}]
        position, messages = once(poll, position)
        assert messages == [{"id": 3}]
        changed = Poll(server.url, interval_s=None)  # without id= a changed item is another one
        position, messages = once(changed)
        resource.items[1]["changed"] = False
        assert once(changed, position)[1] == [{"id": 2, "changed": False}]


def test_a_position_is_bounded_and_an_item_that_stays_is_never_forgotten() -> None:
    """Item 0 is in every answer, while more others than the position has ids come and go."""
    resource = Resource()
    with serving(resource) as server:
        poll = Poll(server.url, id="id", interval_s=None)
        position, seen = None, []
        for turn in range(4):
            resource.items = [{"id": 0}, *({"id": turn * 1_000 + n} for n in range(1, SEEN_MAX))]
            position, messages = once(poll, position)
            seen += [message["id"] for message in messages]
        assert seen.count(0) == 1 and len(seen) == len(set(seen)) == 4 * (SEEN_MAX - 1) + 1
        resource.items = [{"id": n} for n in range(SEEN_MAX + 1)]
        with pytest.raises(InvalidArgument, match=r"without process.*Try:"):
            once(poll, position)


def run(poll: Poll, store: cues.Store) -> list[Any]:
    """Run a graph of the source to its end; all messages that it ever wrote."""
    testing.run_until_idle(cues.Graph("g", [cues.Source("q", poll)]), store)
    return [message["id"] for message in testing.messages(store, "q")]


def test_a_list_of_any_length_gives_each_item_once(store: cues.Store) -> None:
    """It begins short, grows beyond the position, is empty once, and becomes short again."""
    resource = Resource()
    with serving(resource) as server:
        poll = Poll(server.url, id="id", interval_s=None)
        sizes = [10, SEEN_MAX, 3 * SEEN_MAX, 0, 3 * SEEN_MAX + 7, 5, 3 * SEEN_MAX + 9]
        for size in sizes:
            resource.items = [{"id": n} for n in random.Random(size).sample(range(size), size)]
            run(poll, store)
        assert sorted(run(poll, store)) == list(range(max(sizes)))


def test_ids_of_items_that_are_gone_are_forgotten(store: cues.Store) -> None:
    resource = Resource()
    with serving(resource) as server:
        poll = Poll(server.url, id="id", interval_s=None, remember=500)
        for turn in range(5):
            resource.items = [{"id": "stays"}, *({"id": f"{turn}-{n}"} for n in range(400))]
            found = run(poll, store)
        assert len(found) == len(set(found)) == 5 * 400 + 1
        (source,) = cues.Graph("g", [cues.Source("q", poll)]).plan().nodes
        table = StateTable(store, source.key)
        assert len(table.view(None)) <= 401 + 500


def test_a_crash_anywhere_in_a_long_list_loses_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_source, "SEEN_MAX", 5)
    resource = Resource(*({"id": n} for n in range(23)))

    def rounds(store: cues.Store) -> None:
        for size in (4, 23):
            resource.items = [{"id": n} for n in range(size)]
            graph = cues.Graph("g", [cues.Source("q", poll, batch_size=4)])
            testing.run_until_idle(graph, store)

    with serving(resource) as server:
        poll = Poll(server.url, id="id", interval_s=None)
        with testing.temporary_store() as store:
            sites = testing.crash_sites(lambda: rounds(store))
        assert len(sites) > 15
        for point, hit in sites:
            with testing.temporary_store() as store:
                with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                    rounds(store)
                rounds(store)
                assert [m["id"] for m in testing.messages(store, "q")] == list(range(23)), (point, hit)


def test_a_cursor_in_the_query_or_the_body_grows_at_its_end() -> None:
    pages: list[list[int]] = [[1, 2], [3]]

    def answer(request: Seen) -> Reply:
        if request.method == "POST":
            at = json.loads(request.body)["after"]
        else:
            at = parse_qs(urlsplit(request.path).query).get("after", [None])[0]
        page = int(at or 0)
        following = {"cursor": str(page + 1)} if page + 1 < len(pages) else {"cursor": None}
        return as_json({"items": [{"n": n} for n in pages[page]], "page": following})

    ways: list[dict[str, Any]] = [
        {"params": lambda cursor: {} if cursor is None else {"after": cursor}},
        {"json": lambda cursor: {"after": cursor}},
    ]
    for way in ways:
        del pages[2:]
        pages[1] = [3]
        with serving(answer) as server:
            poll = Poll(server.url, "items", cursor="page.cursor", interval_s=None, **way)
            position, messages = once(poll)
            assert [m["n"] for m in messages] == [1, 2, 3] and position[:2] == [1, "cursor"]
            pages[1].append(4)
            pages.append([5])
            position, messages = once(poll, position)
            assert [m["n"] for m in messages] == [4, 5] and once(poll, position)[1] == []
            pages[2] = []
            with pytest.raises(Diverged, match=r"at the cursor '2' has 0 items"):
                once(poll, position)
            assert {seen.method for seen in server.seen} == {"POST" if "json" in way else "GET"}


def test_params_are_added_to_the_query_of_a_url_and_of_its_next_page() -> None:
    def answer(request: Seen) -> Reply:
        query = parse_qs(urlsplit(request.path).query)
        assert query["limit"] == ["2"] and query["tag"] == ["a", "b"] and query["v"] == ["1"]
        at = int(query.get("at", ["0"])[0])
        following = None if at == 4 else f"?v=1&limit=2&at={at + 2}&tag=a&tag=b"
        return as_json({"items": [{"n": at}, {"n": at + 1}], "next": following})

    with serving(answer) as server:
        params = {"limit": 2, "tag": ["a", "b"], "at": 0}
        poll = Poll(f"{server.url}/x?v=1", "items", next="next", params=params, interval_s=None)
        assert [message["n"] for message in once(poll)[1]] == list(range(6))


@pytest.mark.parametrize("form", ["pages", "cursor"])
def test_pages_that_name_one_that_was_read_stop_the_source(form: str) -> None:
    """a -> b -> a: without the error each item would be a message for ever, without a wait."""
    following: dict[Any, Any] = {"/0": "/1", "/1": "/2", "/2": "/1"}

    def answer(request: Seen) -> Reply:
        at = request.path if form == "pages" else "/" + parse_qs(urlsplit(request.path).query).get("at", ["0"])[0]
        return as_json({"items": [{"n": at}] if at != "/2" else [], "next": following[at]})

    with serving(answer) as server:
        options: dict[str, Any] = {"next": "next"}
        if form == "cursor":
            options = {"cursor": lambda answer: answer.json()["next"][1:], "params": lambda at: {"at": at or "0"}}
        found = Poll(f"{server.url}/0", "items", interval_s=None, **options)(None)
        assert [next(found)[1]["n"], next(found)[1]["n"]] == ["/0", "/1"]
        with pytest.raises(http.RequestFailed, match="whose items were read"):
            next(found)


@pytest.mark.parametrize("cursor", [True, {"a": 1}, [1], 1 << 70, "x" * 1_201])
def test_a_cursor_that_a_position_does_not_hold_stops_the_source(cursor: Any) -> None:
    with serving(lambda seen: as_json({"items": [{"n": 1}], "next": cursor})) as server:
        poll = Poll(server.url, "items", cursor="next", params=lambda at: {}, interval_s=None)
        with pytest.raises(http.RequestFailed, match="a text or a number"):
            once(poll)


def test_a_cursor_may_be_a_number() -> None:
    def answer(request: Seen) -> Reply:
        at = float(parse_qs(urlsplit(request.path).query)["at"][0])
        return as_json({"items": [{"n": at}], "next": at + 0.5 if at < 2 else 0})

    with serving(answer) as server:
        poll = Poll(server.url, "items", cursor="next", params=lambda at: {"at": at or 0.5}, interval_s=None)
        assert [message["n"] for message in once(poll)[1]] == [0.5, 1.0, 1.5, 2.0]


class Login:
    """A server of tokens: each refresh token is valid once, and tokens can be revoked."""

    def __init__(self) -> None:
        self.count, self.revoked, self.asked = 0, set[str](), list[dict[str, list[str]]]()

    def __call__(self, request: Seen) -> Reply:
        if request.path == "/token":
            form = parse_qs(request.body.decode())
            self.asked.append(form)
            assert request.headers["authorization"] == "Basic " + base64.b64encode(b"app:secret").decode()
            if form["grant_type"] == ["refresh_token"] and form["refresh_token"] != [f"r{self.count}"]:
                return as_json({"error": "invalid_grant"})._replace(status=400)
            self.count += 1
            return as_json({"access_token": f"t{self.count}", "expires_in": 3600, "refresh_token": f"r{self.count}"})
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token != f"t{self.count}" or token in self.revoked:
            return Reply(401)
        return as_json([{"id": n} for n in range(self.count)])


def test_a_token_is_fetched_when_it_is_needed_and_renewed_when_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = Login()
    with serving(login) as server:
        url = f"{server.url}/token"
        own = http.OAuth(url, "app", lambda: "secret", scope="read", form={"audience": "x"}, headers={"A": "b"})
        assert own() == own() == {"A": "b", "Authorization": "Bearer t1"} and len(login.asked) == 1
        assert login.asked[0] == {"grant_type": ["client_credentials"], "scope": ["read"], "audience": ["x"]}
        poll = Poll(server.url, id="id", interval_s=None, headers=own)
        assert len(once(poll)[1]) == 1
        login.revoked.add("t1")
        with pytest.raises(http.RequestFailed, match="401"):  # a new token that is refused is a fault
            once(poll)
        monkeypatch.setattr(http, "_TOKEN_NEW_S", 0.0)
        assert len(once(poll)[1]) == 2 and own()["Authorization"] == "Bearer t2"
        requests = Requests(server.url, "GET", headers=own, answer=lambda message, answer: {"n": len(answer.json())})
        login.revoked.add("t2")
        with testing.temporary_store() as store:
            graph = cues.Graph("g", [cues.Source("in"), requests.stream("in", "out")])
            store.queue("in").appender().write({})
            testing.run_until_idle(graph, store)
            assert testing.messages(store, "out") == [{"n": 3}]

        kept = tmp_path / "token"
        user = http.OAuth(url, "app", "secret", refresh_token="r3", keep=kept)
        assert user()["Authorization"] == "Bearer t4" and kept.read_text() == "r4" and kept.stat().st_mode & 0o77 == 0
        again = pickle.loads(pickle.dumps(http.OAuth(url, "app", "secret", refresh_token="r3", keep=kept)))
        assert again()["Authorization"] == "Bearer t5" and kept.read_text() == "r5"
        with pytest.raises(http.RequestFailed, match=r"400.*invalid_grant") as error:
            http.OAuth(url, "app", "secret", refresh_token="r1")()
        assert "secret" not in str(error.value) and "r1" not in str(error.value)
    before = len(login.asked)
    with pytest.raises(OSError):
        http.OAuth(url, "app", "secret", refresh_token="r1", keep=tmp_path / "none" / "token")()
    assert len(login.asked) == before  # a token that is valid once is not spent
    with pytest.raises(http.TryLater):
        http.OAuth(url, "app", "secret")()
    with pytest.raises(InvalidArgument, match="keep="):
        http.OAuth(url, "app", "secret", keep=kept)


def test_a_refusal_of_a_token_that_was_renewed_since_uses_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one time are refused together. The first one renews the token; the others must not fail."""
    count = 0

    def answer(request: Seen) -> Reply:
        nonlocal count
        count += 1
        return as_json({"access_token": f"t{count}", "expires_in": "3600"})

    with serving(answer) as server:
        own = http.OAuth(server.url, "app", "secret")
        first = own()
        assert not http.renewed(own, 401, first)  # it is new
        monkeypatch.setattr(http, "_TOKEN_NEW_S", 0.0)
        assert http.renewed(own, 401, first)
        monkeypatch.undo()
        second = own()
        assert second != first and http.renewed(own, 401, first) and own() == second and count == 2
        assert not http.renewed(own, 401, second)


@pytest.mark.parametrize(
    "reply",
    [Reply(200, b"access_token=hush&token_type=bearer"), Reply(200, b'{"access_token": "hush"'), Reply(200, b'"hush"')],
)
def test_no_error_shows_a_token_in_another_form(reply: Reply) -> None:
    with serving(lambda seen: reply) as server, pytest.raises(http.RequestFailed, match="access_token") as error:
        http.OAuth(server.url, "app", "secret")()
    assert "hush" not in str(error.value) + error.value.body + repr(vars(error.value)) + repr(error.value.__context__)


def test_a_token_may_be_answered_with_any_success_and_any_time() -> None:
    for lasts in (0, None, "3600", -5, 3600.0, 10**400, True, "soon"):
        with serving(
            lambda seen, lasts=lasts: as_json({"access_token": "t", "expires_in": lasts})._replace(status=201)
        ) as s:  # type: ignore[misc]
            own = http.OAuth(s.url, "app", "secret")
            assert own() == own() == {"Authorization": "Bearer t"}
            assert len(s.seen) == (2 if lasts == 0 else 1)


def test_the_validators_of_an_answer_are_in_the_position_of_its_last_item() -> None:
    """A crash after the first of two items: the next start asks without the new ETag, and gets the second one."""
    resource = Resource({"id": 1}, {"id": 2})
    with serving(resource) as server:
        poll = Poll(server.url, id="id", interval_s=None)
        position, message = next(iter(poll(None)))
        assert message == {"id": 1} and once(poll, position)[1] == [{"id": 2}]
        long = Resource({"id": 1})
        with serving(lambda seen: as_json(long.items, ETag='"' + "x" * 500 + '"')) as other:
            assert once(Poll(other.url, id="id", interval_s=None))[0][2] == ""


def test_pages_by_link_and_by_cursor_grow_at_their_end() -> None:
    pages: dict[str, list[int]] = {"/a": [1, 2], "/b": [3], "/c": []}
    following = {"/a": "/b"}

    def answer(request: Seen) -> Reply:
        link = {"Link": f'</x>; rel="prev", <{following.get(request.path)}>; rel="last next"'}
        return as_json([{"n": n} for n in pages[request.path]], **(link if request.path in following else {}))

    with serving(answer) as server:
        poll = Poll(f"{server.url}/a", next="link", interval_s=None)
        position, messages = once(poll)
        assert [m["n"] for m in messages] == [1, 2, 3]
        pages["/b"] += [4]
        following["/b"] = "/c"
        position, messages = once(poll, position)
        assert [m["n"] for m in messages] == [4]
        pages["/c"] += [5]
        position, messages = once(poll, position)
        assert [m["n"] for m in messages] == [5] and position[4] == f"{server.url}/c"
        pages["/c"] = []
        with pytest.raises(Diverged, match=r"0 items.*Try:"):
            once(poll, position)
        pages["/c"] = [6]
        with pytest.raises(Diverged):
            once(poll, position)
        following["/b"] = "http://other.example/c"
        with pytest.raises(http.RequestFailed, match="at another host"):
            once(poll)
        following["/b"] = "/" + "c" * 2_000
        with pytest.raises(http.RequestFailed, match="characters"):
            once(poll)


def test_positions_of_others_are_refused() -> None:
    for source, position in (
        (Poll("http://x/a"), [2, "list", "", "", b""]),
        (Poll("http://x/a"), [1, "pages", "", "", "http://x/a", 1, b""]),
        (Poll("http://x/a", next="link"), [1, "list", "", "", b""]),
        (Poll("http://x/a", next="link"), [1, "pages", "", "", "http://y/a", 1, b""]),
        (Poll("http://x/a"), "x"),
    ):
        with pytest.raises(Diverged, match="Try:"):
            next(source(position))  # type: ignore[arg-type]


def test_options_that_do_not_fit_are_refused() -> None:
    for options in ({"url": "x"}, {"url": "ftp://x"}, {"interval_s": -1}, {"id": "a", "next": "b"}, {"timeout_s": 0}):
        with pytest.raises(InvalidArgument, match="Try:"):
            Poll(**{"url": "http://x", **options})


BROKEN = {
    "503": Reply(503, b"", {"Retry-After": "9"}),
    "429": Reply(429),
    "a reset": Reply(reset=True),
    "a reset in the middle of an answer": Reply(200, b'[{"id": 1}', announced=100, reset=True),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_after_a_failure_that_may_pass_the_server_is_away(kind: str) -> None:
    with serving(Resource({"id": 1}, first=[BROKEN[kind]] * 3)) as server:
        for _ in range(3):
            with pytest.raises(http.TryLater) as away:
                once(Poll(server.url, interval_s=None, timeout_s=60))
            assert is_away(away.value) and away.value.retry_after_s == (9 if kind == "503" else 0)
        assert once(Poll(server.url, interval_s=None, timeout_s=60))[1] == [{"id": 1}]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (Reply(404, b"no such list"), "404.*no such list"),
        (Reply(301, b"", {"Location": "/new"}), "301 to /new"),
        (Reply(200, b"<html>"), "not JSON"),
        (Reply(200, b"[" * 100_000), "not JSON"),
        (Reply(200, b"7"), "int where items should be"),
        (Reply(200, b" " * 3_000), "more than 2000 bytes"),
        (Reply(304), "without conditions"),
        (Reply(200, b"\x1f\x8bgarbage", {"Content-Encoding": "gzip"}), "DecodingError"),
    ],
)
def test_an_answer_that_cannot_be_read_stops_the_source(reply: Reply, text: str) -> None:
    with serving(lambda seen: reply) as server:
        limit = 2_000 if b"   " in reply.body else http.BODY_BYTES_MAX
        with pytest.raises(http.RequestFailed, match=rf"(?s){text}.*Try:"):
            once(Poll(f"{server.url}/a", interval_s=None, body_bytes_max=limit))


def test_an_answer_of_one_byte_at_a_time_ends_after_the_timeout() -> None:
    with serving(Resource({"id": 1}, first=[Reply(200, b" " * 10_000, drip_s=0.05)])) as server:
        with pytest.raises(http.TryLater):
            once(Poll(server.url, interval_s=None, timeout_s=3))
        assert once(Poll(server.url, interval_s=None, timeout_s=3))[1] == [{"id": 1}]


def test_an_item_that_is_no_message_is_on_the_error_queue_and_the_others_follow() -> None:
    with serving(lambda seen: as_json({"a": {"b": [{"n": 1}, 7, {"n": 2}]}})) as server:
        graph = cues.Graph("g", errors="errors")
        graph.add(cues.Source("items", Poll(server.url, "a.b", interval_s=None)))
        with testing.temporary_store() as store:
            testing.run_until_idle(graph, store)
            assert testing.messages(store, "items") == [{"n": 1}, {"n": 2}]
            assert len(testing.messages(store, "errors")) == 1
        with pytest.raises(http.RequestFailed, match=r"without 'a\.c'"):
            once(Poll(server.url, "a.c", interval_s=None))


@pytest.mark.parametrize("hangs", [False, True])
def test_a_drain_ends_a_wait_and_a_request_that_hangs(hangs: bool, tmp_path: Path) -> None:
    """The interval and the timeout are an hour; the test would not end in time if one of them was waited for."""
    resource = Resource({"id": 1}, first=[])
    with serving(lambda seen: Reply(200, b" " * 10_000, drip_s=3_600) if hangs else resource(seen)) as server:
        graph = cues.Graph("g", [cues.Source("items", Poll(server.url, interval_s=3_600, timeout_s=3_600))])
        with graph.start(store=tmp_path / "store") as running:
            until(lambda: bool(server.seen) if hangs else running.messages("items") == [{"id": 1}])
        until(lambda: not [thread for thread in threading.enumerate() if thread.name == "cues poll"])


def test_random_kills_leave_each_item_of_a_growing_list_once(forks: Forks, tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    resource = Resource()

    def growing(request: Seen) -> Reply:
        if len(resource.items) < SEEN_MAX - 3:
            resource.items += [{"n": len(resource.items) + n} for n in range(chance.randint(0, 3))]
        return Reply(503) if chance.random() < 0.02 else resource(request)

    path = str(tmp_path / "store")
    with serving(growing) as server:
        for _ in range(5):
            goal = len(server.seen) + chance.randint(1, 20)
            pid = forks.start("http_lives:poll", path, server.url, False)
            until(lambda: len(server.seen) >= goal)
            forks.kill(pid)
            assert forks.wait(pid).killed
        resource.first = [resource(SimpleNamespace(headers={}))]  # type: ignore[arg-type]
        forks.run("http_lives:poll", path, server.url, True)
        wanted = list(resource.items)
    with cues.open(path, readonly=True) as store:
        found = testing.messages(store, "items")
    assert found == wanted[: len(found)] and len(found) >= len(wanted) - 3 and len(found) > 5
