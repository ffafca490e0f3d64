"""The page of ``cues ui``: what its API answers, and whom it answers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install -e '.[ui]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install -e '.[ui]'")

from test_txn_registration import Copies
from ui_server import Page, page_of

import cues
from cues.checkpoints import JSONFileCheckpoint
from cues.cli.app import run
from cues.engine.history import History, Sample, path_of
from cues.operate.shape import ProcessorShape, Shape, shape_of_graph
from cues.testing import run_until_idle
from cues.tools import exporter
from cues.txn import Consumer, Publisher
from cues.ui import guard, look, search, shape, text

KEPT = {"*": cues.QueueOptions(metadata={"t", "time"})}
STRANGE = {
    "markup": "<img src=x onerror=alert(1)></pre><script>alert(2)</script>",
    "override": "abc\u202egnp.exe",
    "nul": "a\x00b\x1b[31m",
    "bytes": b"\xff\x00",
    "nan": float("nan"),
    3: [(), {}, {"": None}],
}


def shop(store: Path) -> cues.Graph:
    graph = cues.Graph("shop", errors="errors", store=store, queues=KEPT, durability="process")
    graph.source("orders")

    @graph.stream("orders", "priced", key="country")
    def price(order, process):  # type: ignore[no-untyped-def]
        if order["id"] % 5 == 0:
            raise ValueError(f"no price for {order['id']}\u202e")
        process.state["count"] = process.state.get("count", 0) + 1
        return [{**order, "copy": copy} for copy in range(2)]

    @graph.sink("priced")
    def save(order):  # type: ignore[no-untyped-def]
        pass

    return graph


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store on which the graph has run: orders 1 to 20, of which every fifth failed."""
    path = tmp_path_factory.mktemp("ui") / "store"
    graph = shop(path)
    with cues.open(path, durability="process") as opened:
        opened.queue("orders", metadata={"t", "time"}).appender().write_many(
            [{"id": n, "country": "DE" if n % 2 else "FR"} for n in range(1, 21)]
        )
        opened.queue("strange").appender().write(STRANGE)
        parted = opened.queue("parted", partitions=3, key="k").appender()
        for n in range(30):
            parted.write({"k": str(n), "n": n})
    run_until_idle(graph)
    return path


@pytest.fixture(scope="module")
def page(store: Path) -> Iterator[Page]:
    with page_of(store, shape_of_graph(shop(store))) as served:
        yield served


def test_the_overview_has_processors_queues_and_problems(page: Page) -> None:
    seen = page.ask("overview")
    assert [row["name"] for row in seen["processors"]] == ["price", "save"]
    price = seen["processors"][0]
    assert (price["state"], price["lag"], price["errors"], price["outputs"]) == ("off", 0, 4, ["priced"])
    assert {row["name"]: row["messages"] for row in seen["queues"]}["priced"] == 32
    assert [problem["text"] for problem in seen["problems"]] == ["price: 4 failed messages"]
    assert not seen["can_write"]


def test_a_store_alone_shows_the_edges_of_its_last_steps(store: Path) -> None:
    with page_of(store) as page:
        edges = {(edge["from"], edge["to"]) for edge in page.ask("graph")["edges"]}
    assert edges == {("q:orders", "p:shop.price"), ("p:shop.price", "q:priced"), ("q:priced", "p:shop.save")}


def test_pages_of_messages_forward_back_and_by_index(page: Page) -> None:
    newest = page.ask("messages", queue="orders", older=1, count=6)
    assert [row["index"] for row in newest["messages"]] == [15, 16, 17, 18, 19, 20]
    assert newest["at_end"] and not newest["at_start"]
    older = page.ask("messages", queue="orders", at=newest["before"], older=1, count=6)
    assert [row["index"] for row in older["messages"]] == [9, 10, 11, 12, 13, 14]
    again = page.ask("messages", queue="orders", at=older["after"], count=6)
    assert again["messages"] == newest["messages"]
    assert [row["index"] for row in page.ask("messages", queue="orders", at=3, count=2)["messages"]] == [3, 4]
    assert page.ask("messages", queue="orders", at="1h", count=1)["messages"][0]["index"] == 1


def test_pages_of_several_partitions_have_every_message_once(page: Page) -> None:
    found, at = [], ""
    while True:
        part = page.ask("messages", queue="parted", at=at, older=1, count=7)
        found = [json.loads(row["text"])["n"] for row in part["messages"]] + found
        at = part["before"]
        if part["at_start"]:
            break
    assert found == list(range(30))
    one = page.ask("messages", queue="parted/1", count=50)
    assert {row["partition"] for row in one["messages"]} == {1} and one["total"] == len(one["messages"])


def test_a_search_says_how_much_it_searched(page: Page) -> None:
    found = page.ask("messages", queue="orders", older=1, where='id > 12 and country == "FR"')
    assert [json.loads(row["text"])["id"] for row in found["messages"]] == [14, 16, 18, 20]
    assert (found["searched"], found["left"]) == (20, 0)
    status, why = page.refusal("messages", queue="orders", where="__import__('os')")
    assert status == 400 and "no function" in why
    assert page.refusal("messages", queue="orders", where="(" * 1500 + "1" + ")" * 400)[0] == 400


def test_a_message_is_followed_through_its_provenance_in_both_directions(page: Page) -> None:
    made = page.ask("became", queue="orders", index=7)
    assert [(row["processor"], row["taken"]) for row in made["readers"]] == [("shop.price", True)]
    (descendants,) = made["made"]
    assert descendants["how"] == "metadata" and descendants["complete"]
    copies = [place["index"] for place in descendants["messages"]]
    assert [json.loads(place["text"])["id"] for place in descendants["messages"]] == [7, 7]
    back = page.ask("message", queue="priced", index=copies[1])
    assert [(place["queue"], place["index"]) for place in back["from"]] == [("orders", 7)]
    assert back["step"]["processor"] == "shop.price"
    failed = page.ask("became", queue="orders", index=10)
    assert [(each["log"], len(each["messages"])) for each in failed["made"]] == [("errors", 1)]


def test_descendants_without_metadata_are_those_of_the_step(tmp_path: Path) -> None:
    graph = cues.Graph("plain", store=tmp_path / "store", durability="process")
    graph.source("in")
    graph.stream("in", "out", id="copy")(lambda message: message)
    with cues.open(tmp_path / "store", durability="process") as opened:
        opened.queue("in").appender().write_many([{"n": n} for n in range(5)])
    run_until_idle(graph)
    with page_of(tmp_path / "store", shape_of_graph(graph)) as page:
        made = page.ask("became", queue="in", index=3)["made"]
        assert [(each["how"], each["log"]) for each in made] == [("steps", "out")]
        assert 3 in [place["index"] for place in made[0]["messages"]]


def test_a_random_fan_out_gives_the_descendants_that_the_metadata_name(tmp_path: Path) -> None:
    """Each message becomes 0 to 3 messages, and all are found by bisection."""
    seed = random.randrange(10**6)
    print("seed", seed)
    chance = random.Random(seed)
    graph = cues.Graph("fan", store=tmp_path / "store", queues=KEPT, durability="process")
    graph.source("in")
    copies = {origin: chance.randrange(4) for origin in range(1, 301)}
    graph.stream("in", "out", id="fan")(lambda message: [{"of": message["n"]}] * copies[message["n"]])
    with cues.open(tmp_path / "store", durability="process") as opened:
        opened.queue("in", metadata={"t"}).appender().write_many([{"n": n} for n in range(1, 301)])
    run_until_idle(graph)
    with cues.open(tmp_path / "store", readonly=True) as opened:
        found = list(opened.queue("out").tailer())
    places = {origin: [at for at, message in enumerate(found, 1) if message["of"] == origin] for origin in copies}
    with page_of(tmp_path / "store", shape_of_graph(graph)) as page:
        for origin in chance.sample(range(1, 301), 25):
            made = page.ask("became", queue="in", index=origin)["made"]
            by_metadata = [place["index"] for each in made if each["how"] == "metadata" for place in each["messages"]]
            assert by_metadata == places[origin], (seed, origin)


def test_steps_state_and_errors(page: Page) -> None:
    steps = page.ask("steps", processor="shop.price")["steps"]
    assert steps[-1]["taken"][0]["first"] == 1
    rows = page.ask("state", processor="shop.price")["rows"]
    assert [(row["key"], row["field"], row["text"]) for row in rows] == [
        ('"DE"', '"count"', "8"),
        ('"FR"', '"count"', "8"),
    ]
    assert page.ask("state", processor="shop.price", key="DE")["rows"] == rows[:1]
    first = page.ask("state", processor="shop.price", count=1)
    assert page.ask("state", processor="shop.price", after=first["after"], count=1)["rows"] == rows[1:]
    errors = page.ask("errors")
    assert [row["index"] for row in errors["errors"]] == [4, 3, 2, 1] and errors["complete"]
    record = page.ask("message", queue="errors", index=1)["error"]
    assert record["causes"][0]["message"] == "no price for 5\\u202e"
    assert "raise ValueError" in record["causes"][0]["trace"]
    assert json.loads(record["inputs"][0]["text"])["id"] == 5


def test_a_renamed_processor_has_its_steps_state_and_descendants(tmp_path: Path) -> None:
    def graph(**options: str) -> cues.Graph:
        graph = cues.Graph("g", store=tmp_path / "store", durability="process")
        graph.source("in")

        def count(message, process):  # type: ignore[no-untyped-def]
            process.state["count"] = process.state.get("count", 0) + 1
            return message

        graph.stream("in", "out", **options)(count)
        return graph

    with cues.open(tmp_path / "store", durability="process") as opened:
        opened.queue("in").appender().write_many([{"n": n} for n in range(5)])
    run_until_idle(graph(id="count"))
    run_until_idle(renamed := graph(id="tally", renamed_from="count"))
    with page_of(tmp_path / "store", shape_of_graph(renamed)) as page:
        (row,) = page.ask("state", processor="g.tally")["rows"]
        assert (row["field"], row["text"]) == ('"count"', "5")
        steps = page.ask("steps", processor="g.tally")["steps"]
        assert steps[-1]["taken"] == [{"log": "in", "first": 1, "last": 5}]
        (made,) = page.ask("became", queue="in", index=3)["made"]
        assert (made["by"], made["how"]) == ("g.tally", "steps")


def test_a_strange_message_is_text_whole_and_cut(page: Page) -> None:
    shown = page.ask("message", queue="strange", index=1)["text"]
    assert json.loads(shown) == {
        "markup": STRANGE["markup"],
        "override": STRANGE["override"],
        "nul": STRANGE["nul"],
        "bytes": {"$bytes": "/wA="},
        "nan": {"$float": "nan"},
        "3": [[], {}, {"": None}],
    }
    assert "\u202e" not in shown and "\x1b" not in shown


def test_text_of_a_deep_and_of_a_huge_value() -> None:
    deep: object = 1
    for _ in range(20_000):
        deep = [deep]
    assert text.pretty(deep).count("[") == 20_000
    assert text.preview(deep, 50) == ("[" * 50, True)
    assert text.preview({"a": "x" * 10**7}, 20) == ('{"a": "' + "x" * 13, True)
    assert text.preview({"a": 1}) == ('{"a": 1}', False)


def test_what_is_not_there_is_refused_by_name(page: Page) -> None:
    assert page.refusal("messages", queue="ordres")[0] == 404
    assert page.refusal("message", queue="orders", index=99) == (404, "orders has no message 99; it has 1 to 20.")
    assert page.refusal("steps", processor="shop.nobody")[0] == 404
    assert page.refusal("messages", queue="orders", count=5000)[0] == 400
    assert page.refusal("messages", wrong=1)[0] == 400
    assert page.refusal("messages")[0] == 400
    assert page.refusal("message", queue="orders", index="x")[0] == 400


# --- whom it answers ------------------------------------------------------------------------------


def test_every_answer_forbids_scripts_of_others_and_copies(page: Page) -> None:
    for path in ("/", "/static/main.js", "/api/overview", "/api/nothing", "/static/../server.py"):
        _, headers, _ = page.request(path)
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert headers["cache-control"] == "no-store" and headers["x-content-type-options"] == "nosniff", path
    assert page.request("/static/..%2fserver.py")[0] == 404
    _, _, html = page.request("/")
    assert "style=" not in html and "onclick" not in html and "http" not in html


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": ""},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ],
    ids=str,
)
def test_another_site_is_refused(page: Page, headers: dict[str, str]) -> None:
    status, _, body = page.request("/api/overview", **headers)
    assert status == 403 and "processors" not in body


def test_a_link_from_another_site_opens_the_page_but_not_its_data(page: Page) -> None:
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert page.request("/", **link)[0] == 200
    assert page.request("/api/overview", **link)[0] == 403
    assert page.request("/", **{**link, "sec_fetch_dest": "iframe"})[0] == 403


def test_without_permission_nothing_is_changed(page: Page) -> None:
    body = json.dumps({"queue": "errors", "index": 1})
    status, _, answer = page.request("/api/redrive", "POST", body, x_cues="1")
    assert status == 403 and "--allow-write" in answer


def test_a_token_is_asked_for_and_a_cookie_stands_for_it(store: Path) -> None:
    token = "a-token-of-24-characters"
    with page_of(store, token=token) as page:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"cookie": f"cues_{page.port}={token}"}):
            status, _, body = page.request("/api/overview", **headers)
            assert status == 401 and "processors" not in body
        status, _, body = page.request("/")
        assert status == 401 and "A token is needed" in body
        assert page.request("/api/events")[0] == 401
        assert page.request("/api/overview?token=" + token)[0] == 401
        assert page.request("/api/overview", authorization=f"Bearer {token}")[0] == 200
        status, headers, _ = page.request("/?token=" + token)
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and token not in cookie
        given = cookie.partition(";")[0]
        assert page.request("/api/overview", cookie=given)[0] == 200
        assert page.request("/?token=wrong")[0] == 401
        assert page.request("/login", "POST", "token=wrong")[0] == 401
        assert page.request("/login", "POST", "token=" + token)[0] == 303


def test_writing_needs_a_header_that_no_other_site_can_send(store: Path) -> None:
    with page_of(store, target=str(store)) as page:
        body = json.dumps({"queue": "errors", "index": 999})
        assert page.request("/api/redrive", "POST", body)[0] == 403
        assert page.request("/api/redrive", "POST", body, x_cues="1", origin="http://evil.example")[0] == 403
        assert page.request("/api/redrive", "POST", "[]", x_cues="1")[0] == 400
        assert page.request("/api/discard", "POST", json.dumps({"queue": "--all", "index": 1}), x_cues="1")[0] == 400
        assert page.request("/api/redrive", "POST", json.dumps({"queue": "e#x", "index": 1}), x_cues="1")[0] == 400


@pytest.mark.slow
def test_a_group_of_errors_is_redriven_or_discarded(tmp_path: Path) -> None:
    """The groups are those of ``cues errors --group``; what is done is done to the messages of one group."""
    path = tmp_path / "shop.py"
    path.write_text(
        "import pathlib, cues\n"
        "graph = cues.Graph('shop', errors='errors', queues={'errors': cues.QueueOptions(partitions=2)})\n"
        "graph.source('orders')\n"
        "@graph.stream('orders', 'priced')\n"
        "def price(order):\n"
        "    if order['n'] % 2 and not pathlib.Path(__file__).with_name('mended').exists():\n"
        "        raise ValueError(f\"no 'price' for {order['n']}\")\n"
        "    if order['n'] % 4 == 0:\n"
        "        raise KeyError('count\\u202ery')\n"
        "    return order\n"
    )
    store = tmp_path / "data" / "shop"
    with cues.open(store, durability="process") as opened:
        opened.queue("orders").appender().write_many([{"n": n} for n in range(20)])
    command = [sys.executable, "-m", "cues", "run", str(path), "--idle-exit", "0"]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "mended").touch()
    with page_of(store, target=str(path)) as page:
        answer = page.ask("errors")
        assert (answer["found"], answer["complete"]) == (15, True)
        values, keys = answer["groups"]
        assert (values["count"], values["cause"], values["processor"]) == (10, "ValueError: no '…' for N", "shop.price")
        assert (keys["count"], keys["last"]["queue"]) == (5, "errors")

        def change(what: str, **fields: object) -> tuple[int, Any]:
            status, _, text = page.request(f"/api/{what}", "POST", json.dumps(fields), x_cues="1")
            return status, json.loads(text)

        status, done = change("redrive", processor="shop.price", cause=values["cause"])
        assert status == 200 and len(done["resolved"]) == 10 and not done["failed_again"]
        assert [group["cause"] for group in page.ask("errors")["groups"]] == [keys["cause"]]
        assert change("discard", processor="shop.price", cause=keys["cause"])[0] == 400, "it needs a reason"
        assert change("discard", processor="shop.price", cause="' or 1 == 1 or '", reason="x")[1]["discarded"] == []
        status, done = change("discard", processor="shop.price", cause=keys["cause"], reason="old orders")
        assert status == 200 and len(done["discarded"]) == 5
        assert page.ask("errors")["groups"] == [] and page.ask("errors", settled=1)["found"] == 15
        for wrong in (
            {"processor": "shop.price"},
            {"cause": "x"},
            {"processor": "", "cause": ""},
            {"processor": 1, "cause": 2},
        ):
            assert change("redrive", **wrong)[0] == 400, wrong
        assert change("redrive", processor="--all", cause="x")[1]["resolved"] == []


@pytest.mark.slow
def test_counts_of_errors_are_exact_or_end_in_plus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More error messages than a look reads: every display says that its number is a lower bound."""
    graph = cues.Graph("g", store=tmp_path / "store", durability="process", errors="errors")
    graph.source("a")

    @graph.stream("a", "b")
    def fails(message: dict[str, int]) -> None:
        raise ValueError(f"no {message['n']}")

    def fail(numbers: range) -> None:
        with cues.open(tmp_path / "store", durability="process") as store:
            store.queue("a").appender().write_many([{"n": n} for n in numbers])
        run_until_idle(graph)

    def shown() -> tuple[Any, str, str]:
        with page_of(tmp_path / "store") as page:
            overview = page.ask("overview")
            (row,) = overview["processors"]
            found = page.ask("errors")
        assert (found["found"], found["complete"]) == (found["groups"][0]["count"], True)
        capsys.readouterr()
        assert run(["status", str(tmp_path / "store"), "--table"]) == 0
        return (
            (row["errors"], row["errors_more"], found["found"]),
            overview["problems"][0]["text"],
            capsys.readouterr().out,
        )

    fail(range(1000))
    facts, problem, table = shown()
    assert facts == (1000, False, 1000)
    assert problem == "fails: 1,000 failed messages" and "1,000 " in table and "1,000+" not in table
    fail(range(446))
    facts, problem, table = shown()
    assert facts == (1000, True, 1446)
    assert problem == "fails: 1,000+ failed messages" and "1,000+" in table


def test_the_history_of_processors_is_columns(tmp_path: Path) -> None:
    cues.open(tmp_path / "store", durability="process").close()
    now = time.time()
    with History(path_of(tmp_path / "store", "g"), write=True) as history:
        history.add("g.a", now - 600, Sample(100, 50, 3, 7, 0.25, 0.5, 2.0))
        history.add("g.a", now - 20, Sample(300, 300, 0, 0))
    with page_of(tmp_path / "store") as page:
        hour = page.ask("history", processor="g.a/3")
        assert hour["processor"] == "g.a" and hour["seconds"] == 10 and len(hour["in"]) == 360
        at = hour["in"].index(10)
        assert hour["start"] + 10 * at <= now - 600 < hour["start"] + 10 * (at + 1)
        seen = [hour[name][at] for name in ("out", "lag", "p50", "p99", "failed", "away")]
        assert seen == [5, 7, 0.25, 0.5, 3, 2]
        assert sum(each is not None for each in hour["lag"]) == 2
        assert len(page.ask("history", processor="g.a", span="day")["in"]) == 288
        weeks = page.ask("history", processor="g.a", span="weeks")
        assert sum(filter(None, weeks["failed"])) == 3 and len(weeks["in"]) == 840
        assert page.ask("history", processor="g.b")["in"] == [None] * 360
        sparks = page.ask("history")["processors"]
        assert sparks.keys() == {"g.a"} and sparks["g.a"]["seconds"] == 60 and len(sparks["g.a"]["in"]) == 60
        assert page.refusal("history", span="year")[0] == 400


def test_any_address_but_loopback_has_a_token() -> None:
    from cues.cli.page import access

    assert access("127.0.0.1", 0, False, None)["token"] is None
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        assert len(access(host, 0, False, None)["token"]) >= 24
    with pytest.raises(cues.errors.InvalidArgument, match="at least 16"):
        access("0.0.0.0", 0, False, "short")
    assert guard.Guard.of("0.0.0.0", 1, "x" * 16, False).names == {"0.0.0.0", socket.gethostname().lower()}


def test_a_layout_keeps_nodes_apart_and_after_their_writers() -> None:
    made = [
        ProcessorShape(f"g.p{n}", "stream", [f"q{n % 7}", f"q{n // 3}"], [f"q{n + 1}"] if n % 4 else [f"q{n % 5}"])
        for n in range(50)
    ]
    places = shape.layout(Shape("g", made))
    columns: dict[int, list[float]] = {}
    for node in places["nodes"]:
        columns.setdefault(node["rank"], []).append(node["place"])
    for edge in places["edges"]:
        for rank, place in edge["bends"]:
            columns[rank].append(place)
    ranks = {node["id"]: node["rank"] for node in places["nodes"]}
    assert all((ranks[edge["from"]] < ranks[edge["to"]]) != edge["back"] for edge in places["edges"])
    assert min(place for column in columns.values() for place in column) >= 0


def test_clients_that_never_read_hold_up_nobody(page: Page) -> None:
    """Each asks for live events and stops; another client still gets its answers and live events."""
    hanging = [socket.create_connection(("127.0.0.1", page.port), timeout=30) for _ in range(8)]
    try:
        for each in hanging:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            each.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        reading = socket.create_connection(("127.0.0.1", page.port), timeout=30)
        hanging.append(reading)
        reading.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        seen = b""
        while seen.count(b"event: overview") < 2:
            part = reading.recv(65536)
            assert part
            seen += part
        assert page.ask("overview")["of"] == "store"
    finally:
        for each in hanging:
            each.close()


def test_consumers_and_pending_transactions_are_on_the_page_and_in_metrics(tmp_path: Path) -> None:
    """As `cues status` has them; a consumer that is away and whose messages wait is a problem."""
    pytest.importorskip("prometheus_client")
    with cues.open(tmp_path / "s", "process") as store:
        source, out = store.queue("in"), store.queue("out")
        source.appender().write_many([{"n": 0}, {"n": 1}])
        with Consumer(Copies(out), [source], JSONFileCheckpoint(tmp_path / "totals.json")) as consumer:
            consumer.drain()
            with page_of(tmp_path / "s") as page:
                (known,) = page.ask("overview")["consumers"]
                assert (known["consumer"], known["lag"], known["pid"]) == ("totals", 0, os.getpid())
        source.appender().write_many([{"n": 2}, {"n": 3}])
        with Publisher(name="import") as publisher:
            publisher.publish_uncommitted(lambda _: out, {"n": 9}).wait()
            with page_of(tmp_path / "s") as page:
                overview = page.ask("overview")
            text = exporter.text(store)
        (known,), (pending,) = overview["consumers"], overview["transactions"]
        assert (known["lag"], known["pid"], pending["owner"], pending["messages"]) == (2, None, "import", 1)
        assert "Consumer totals does not run, and 2 messages wait" in [each["text"] for each in overview["problems"]]
        for line in (
            'cues_consumer_lag{consumer="totals",queue="in"} 2.0',
            'cues_consumer_running{consumer="totals"} 0.0',
            'cues_transactions_pending{queue="out"} 1.0',
            'cues_transactions_pending_messages{queue="out"} 1.0',
        ):
            assert line in text.splitlines()


@pytest.mark.parametrize("path", ["/login", "/api/redrive"])
def test_a_body_without_end_is_refused_at_its_limit(store: Path, path: str) -> None:
    piece = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    with (
        page_of(store, target=str(store), token="a-token-of-24-characters") as page,
        socket.create_connection(("127.0.0.1", page.port), timeout=30) as client,
    ):
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nAuthorization: Bearer a-token-of-24-characters\r\n"
        )
        head += "X-Cues: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head.encode() + piece + piece)
        assert client.recv(1 << 10).startswith(b"HTTP/1.1 413")
        received = b"more"
        while received:  # the server ends the connection, and does not read on
            try:
                received = client.recv(1 << 16)
            except ConnectionResetError:
                break


def test_a_connection_whose_head_does_not_arrive_is_closed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cues.processors.serving.HEAD_S", 0.05)
    with page_of(store) as page, socket.create_connection(("127.0.0.1", page.port), timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert client.recv(1) == b""


ENDLESS = 'match(text, "^(a+)+$")'
"""A search for which Python needs longer than anybody waits, with its lock held."""


def test_a_search_that_does_not_end_is_ended_and_the_next_one_is_answered(tmp_path: Path) -> None:
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("texts").appender().write_many([{"text": "a" * 60 + "b"}, {"text": "aaa"}])
    with contextlib.closing(search.Searcher(look.settings_of(str(tmp_path / "store"), None, ""), 0.2)) as searcher:
        with pytest.raises(guard.Refusal, match=r"ended after 0\.2 s"):
            searcher.messages(queue="texts", where=ENDLESS)
        (found,) = searcher.messages(queue="texts", where='text == "aaa"')["messages"]
        assert found["index"] == 2
        with pytest.raises(guard.Refusal, match="no function 'eval'"):
            searcher.messages(queue="texts", where="eval(1)")


@pytest.mark.slow
def test_other_questions_are_answered_during_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LIMIT_S", 1.0)
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("texts").appender().write({"text": "a" * 60 + "b"})
    with page_of(tmp_path / "store") as page, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(page.refusal, "messages", queue="texts", where=ENDLESS)
        while not asked.done():
            assert page.ask("overview")["queues"][0]["name"] == "texts"
        assert asked.result() == (400, "The search was ended after 1 s.")


def test_few_searches_wait_for_another_one(tmp_path: Path) -> None:
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("texts").appender().write({"text": "a"})
    settings = look.settings_of(str(tmp_path / "store"), None, "")
    with (
        contextlib.closing(search.Searcher(settings, 60)) as searcher,
        ThreadPoolExecutor(search.WAITING_MAX + 1) as pool,
    ):
        with searcher.one:  # as during a search
            asked = [
                pool.submit(searcher.messages, queue="texts", where="1 == 1") for _ in range(search.WAITING_MAX + 1)
            ]
            while searcher.few._value:
                pass
            with pytest.raises(guard.Refusal, match="Other searches are running"):
                searcher.messages(queue="texts", where="1 == 1")
        assert all(len(each.result()["messages"]) == 1 for each in asked)
