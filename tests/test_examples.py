"""Each example runs as its docstring says, in a process of its own."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from http_servers import Ledger, Reply, Seen, serving
from kafka_broker import Broker
from ports import free_port
from sets import slow_except

import cues
from cues.processors import http

EXAMPLES = Path(__file__).parent.parent / "examples"
CUES = [sys.executable, "-c", "from cues.cli import main; main()"]
cli = pytest.mark.skipif(
    not hasattr(importlib.import_module("cues.cli"), "main"), reason="the command line is not there yet"
)


def run(*command: str, cwd: Path, code: int = 0, env: dict[str, str] | None = None) -> str:
    """Run a command; returns what it printed on stdout."""
    done = subprocess.run(
        command, cwd=cwd, env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), **(env or {})}, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert path.name in text or path.name == "flights_report.py", path.name
        assert ast.get_docstring(ast.parse(path.read_text())), path.name


def test_quickstart(tmp_path: Path) -> None:
    printed = run(sys.executable, str(EXAMPLES / "quickstart.py"), cwd=tmp_path).splitlines()
    assert re.fullmatch(r"saved 12, delivery [0-9a-f]{8}", printed[0])
    assert printed[1] == "[{'count': 3, 'price': 4, 'total': 12}] KeyError"


def test_quickstart_has_at_most_ten_statements() -> None:
    body = ast.parse((EXAMPLES / "quickstart.py").read_text()).body[1:]
    assert sum(len(getattr(node, "body", [])) or 1 for node in body) <= 10


def test_word_count(tmp_path: Path) -> None:
    printed = run(sys.executable, str(EXAMPLES / "word_count.py"), cwd=tmp_path)
    assert printed.splitlines()[0].split() == ["10", "it"]
    assert list(tmp_path.iterdir()) == []


def test_shared_queue(tmp_path: Path) -> None:
    printed = run(sys.executable, str(EXAMPLES / "shared_queue.py"), cwd=tmp_path)
    assert printed.splitlines() == ["sensor 0: 37 °C", "sensor 1: 38 °C", "sensor 2: 39 °C"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@cli
def test_shared_queue_in_two_processes(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "shared_queue.py", tmp_path)
    run(*CUES, "run", "shared_queue.py:collect", cwd=tmp_path)
    run(*CUES, "run", "shared_queue.py:report", "--idle-exit", "0.5", cwd=tmp_path)
    found = run(*CUES, "tail", "shared_queue.py:report#records", "-n", "all", cwd=tmp_path)
    records = {m["sensor"]: m["celsius"] for m in map(json.loads, found.splitlines())}
    assert records == {0: 37, 1: 38, 2: 39}
    shown = run(*CUES, "show", "shared_queue.py:collect", cwd=tmp_path)
    assert "→ readings @data/shared" in shown and "written twice" in shown


@pytest.mark.slow
def test_crash_me(tmp_path: Path) -> None:
    printed = run(sys.executable, str(EXAMPLES / "crash_me.py"), cwd=tmp_path)
    assert printed.count("killed after") >= 10
    assert printed.count(" exact\n") == 5 and "NOT" not in printed
    assert "Nothing lost, nothing doubled" in printed


@pytest.mark.slow
def test_crash_me_reports_a_result_that_is_not_exact(tmp_path: Path) -> None:
    """The negative control: a sink that ignores the content of the target, and dies after its commit, writes twice."""
    text = (EXAMPLES / "crash_me.py").read_text()
    broken = text.replace(
        "tx.fresh(squares))",
        "squares)\n        if next(seen) > life: os.kill(os.getpid(), signal.SIGKILL)",
    )
    assert broken != text
    (tmp_path / "crash_me.py").write_text(broken)
    printed = run(sys.executable, "crash_me.py", cwd=tmp_path, code=1)
    assert re.search(r"database +NOT EXACT", printed) and re.search(r" queue +exact", printed)
    assert "Something is wrong" in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_bank(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    deaths = 4
    ledger = ["--ledger", request.getfixturevalue("postgres").database()] if kind == "postgresql" else []
    printed = run(sys.executable, str(EXAMPLES / "bank.py"), "--deaths", str(deaths), *ledger, cwd=tmp_path)
    assert printed.count("killed after") == deaths and "  finished" in printed
    assert printed.count("  yes  ") == 5 and "Not a cent is missing" in printed


@pytest.mark.slow
def test_bank_reports_a_wrong_result(tmp_path: Path) -> None:
    """The negative control: credits that are seen before the debit is committed make money out of a death."""
    text = (EXAMPLES / "bank.py").read_text()
    broken = text.replace("publish_uncommitted(lambda _: branch", "publish_committed(lambda _: branch")
    assert broken != text
    (tmp_path / "bank.py").write_text(broken)
    printed = run(sys.executable, "bank.py", "--deaths", "6", cwd=tmp_path, code=1)
    assert "NO   the money is all there" in printed and "Something is wrong" in printed


FAULTS = ("commit.inside:2", "function.after:1", "commit.outputs:2", "files.appended:1", "files.committed:1")


@pytest.mark.parametrize("faults", slow_except([FAULTS[2:4]], [FAULTS[2:4], FAULTS]), ids=len)
def test_delays(faults: tuple[str, ...], tmp_path: Path) -> None:
    """Killed in each part of its work and run again: the file and the totals of ten lines of polars, all in columns."""
    pl = pytest.importorskip("polars")
    script = EXAMPLES / "delays.py"
    code = [line for line in script.read_text().splitlines() if line.strip()]
    assert len(code) <= 32

    rows = pl.read_csv(EXAMPLES / "data/flights.csv.gz", null_values="NA", try_parse_dates=True)
    rows = rows.select("time_hour", "carrier", "origin", "dest", "dep_delay", "arr_delay")
    rows = rows.filter(pl.col("arr_delay").is_not_null()).with_columns(gained=pl.col("dep_delay") - pl.col("arr_delay"))
    late, gained = pl.mean("arr_delay").alias("late"), pl.mean("gained")
    totals = rows.group_by("carrier").agg(pl.len().alias("flights"), late, gained).sort("carrier")

    for fault in faults:
        run(sys.executable, str(script), cwd=tmp_path, code=-signal.SIGKILL, env={"CUES_FAULT": fault})
    printed = [run(sys.executable, str(script), cwd=tmp_path).split("\n", 1) for _ in range(2)]
    assert printed[0] == printed[1], "a second run changes nothing"
    assert printed[0][1].strip() == totals.write_csv(float_precision=1).strip()
    (path,) = (tmp_path / "out").glob("*.parquet")
    assert printed[0][0].endswith(path.name)
    found = pl.read_parquet(path)
    assert found.select(rows.columns).equals(rows)
    with cues.open(tmp_path / "data") as store:
        for name in ("rows", "flights", "totals"):
            assert all(piece.batch.schema for piece in store.queue(name).pieces(None, None)), name
        assert len(store.queue("errors")) == 0


@pytest.mark.parametrize("kind", slow_except(["sqlite"], ["sqlite", "postgresql"]))
def test_import_orders(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Rows with a wrong count and an unknown article are errors; a second run with one file more adds its rows."""
    pq, sa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("sqlalchemy")
    url = request.getfixturevalue("postgres").database() if kind == "postgresql" else "sqlite:///orders.db"
    script = EXAMPLES / "import_orders.py"
    code = [line for line in script.read_text().splitlines() if line.strip()]
    assert len(code) < 40
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.csv").write_text("id,sku,count\n1,pen,2\n2,ink,many\n3,cup,1\n")
    printed = run(sys.executable, str(script), url, cwd=tmp_path)
    assert printed.splitlines()[0] == "1 priced, 2 errors"
    (tmp_path / "in/2.csv").write_text("id,sku,count\n4,ink,3\n")
    assert run(sys.executable, str(script), url, cwd=tmp_path).startswith("2 priced, 2 errors")
    rows = [row for file in sorted((tmp_path / "out").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    assert rows == [{"id": 1, "sku": "pen", "total": 3.0}, {"id": 4, "sku": "ink", "total": 21.0}]
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path}/orders.db"
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        found = connection.execute(sa.text("select * from orders order by id")).all()
    engine.dispose()
    assert found == [(1, "pen", 3.0), (4, "ink", 21.0)]


@pytest.mark.slow
def test_kafka_mirror(tmp_path: Path, kafka: Broker) -> None:
    """A second run adds what came in between; the copies have partitions, keys, values and times."""
    script = EXAMPLES / "kafka_mirror.py"
    assert len([line for line in script.read_text().splitlines() if line.strip()]) < 40
    source, target = kafka.topic(3), kafka.topic(3)
    for values in (["a", "b", "c"], ["d", "e"]):
        kafka.produce(source, values)
        printed = run(sys.executable, str(script), kafka.servers, source, kafka.servers, target, cwd=tmp_path)
        assert printed == f"{source} is mirrored to {target}\n"
        found = [
            [(r.partition(), r.value(), r.timestamp()) for r in kafka.records(topic)] for topic in (source, target)
        ]
        assert found[0] == found[1] and len(found[0]) in (3, 5)


def test_word_count_partitioned(tmp_path: Path) -> None:
    printed = run(sys.executable, str(EXAMPLES / "word_count_partitioned.py"), cwd=tmp_path).splitlines()
    assert re.fullmatch(r"20 words on 4 partitions: \d+, \d+, \d+, \d+", printed[0])
    assert [line.split() for line in printed[1:5]] == [["10", word] for word in ("it", "of", "the", "was")]


def test_stream_sum(tmp_path: Path) -> None:
    printed = run(sys.executable, str(EXAMPLES / "stream_sum.py"), cwd=tmp_path).splitlines()
    assert re.fullmatch(r"1,200 chunks of 60 files published, and \d+ in abandoned transactions", printed[0])
    assert printed[1] == "60 sums, 60 of them right"


@pytest.mark.slow
@cli
def test_flights_from_the_command_line(tmp_path: Path) -> None:
    """The README's first command: all results, and the second time nothing new."""
    command = [*CUES, "run", str(EXAMPLES / "flights.py"), "--store", "store", "--json"]
    env = {"FLIGHTS_OUT": str(tmp_path / "out")}
    first = json.loads(run(*command, cwd=tmp_path, env=env).splitlines()[-1])
    assert first["queues"]["flights"]["new"] == 27_004 and first["failed"] == 12
    page = (tmp_path / "out" / "report.html").read_text()
    assert "27,004" in page and "12 rows were refused" in page
    second = json.loads(run(*command, cwd=tmp_path, env=env).splitlines()[-1])
    assert second["nothing_new"] and second["queues"]["flights"] == {"messages": 27_004, "new": 0}
    assert (tmp_path / "out" / "report.html").read_text() == page


@cli
def test_word_count_from_the_command_line_keeps_its_store(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "word_count.py", tmp_path)
    run(*CUES, "run", "word_count.py", cwd=tmp_path)
    assert (tmp_path / "data" / "word-count").is_dir()
    assert "nothing new" in run(*CUES, "run", "word_count.py", "--table", cwd=tmp_path)


def test_produce_consume(tmp_path: Path) -> None:
    printed = run(sys.executable, str(EXAMPLES / "produce_consume.py"), cwd=tmp_path).splitlines()
    assert printed == ["the first reader: [1, 2, 3, 4]", "the second reader: [5, 6, 7, 8, 9, 10]"]


def test_invoices(tmp_path: Path) -> None:
    printed = run(sys.executable, str(EXAMPLES / "invoices.py"), "--seed", "3", cwd=tmp_path)
    assert printed == "300 invoices for 300 orders, 6 starts that died or finished: right\n"


def test_shared_work(tmp_path: Path) -> None:
    printed = run(sys.executable, str(EXAMPLES / "shared_work.py"), cwd=tmp_path)
    assert printed == "3000 of 3000 clicks, exit codes [1, 0, 0]: right\n"


@pytest.mark.slow
@cli
def test_access_log(tmp_path: Path) -> None:
    """The log grows, is rotated, and the run is killed: each line is in one minute, or late."""
    log = tmp_path / "access.log"
    shutil.copy(EXAMPLES / "access_log.py", tmp_path)

    def lines(minute: int, count: int) -> str:
        line = '1.2.3.4 - - [31/Jan/2026:12:{:02}:{:02} +0100] "GET /{} HTTP/1.1" 200 {}\n'
        return "".join(line.format(minute, n % 60, n % 3, n) for n in range(count))

    def per_minute() -> list[dict[str, Any]]:
        found = run(*CUES, "tail", "data/access-log#per-minute", "-n", "all", cwd=tmp_path)
        return [json.loads(line) for line in found.splitlines()]

    def follow() -> None:
        run(*CUES, "run", "access_log.py", "--idle-exit", "2", cwd=tmp_path)

    log.write_text(lines(0, 50) + "not a line\n" + lines(1, 40))
    follow()
    assert [m["requests"] for m in per_minute()] == [50]
    running = subprocess.Popen([*CUES, "run", "access_log.py"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        log.rename(f"{log}.1")
        log.write_text(lines(2, 30) + lines(3, 60) + lines(0, 2))
        limit = time.monotonic() + 60
        while len(per_minute()) < 3 and time.monotonic() < limit:
            time.sleep(0.1)
    finally:
        running.kill()
        running.wait()
    with log.open("a") as file:
        file.write(lines(5, 1))
    follow()
    follow()
    found = per_minute()
    assert [m["requests"] for m in found] == [50, 40, 30, 60]
    assert [m["paths"][0] for m in found] == [["/0", 17], ["/0", 14], ["/0", 10], ["/0", 20]]
    assert [m["bytes"] for m in found] == [1225, 780, 435, 1770]
    late = run(*CUES, "tail", "data/access-log#late", "-n", "all", cwd=tmp_path).splitlines()
    assert [json.loads(line)["number"] for line in late] == [1, 2]
    errors = run(*CUES, "tail", "data/access-log#errors", "-n", "all", cwd=tmp_path).splitlines()
    assert len(errors) == 1 and "not a line of an access log" in errors[0]


@pytest.mark.slow
@cli
def test_reminders(tmp_path: Path) -> None:
    """Notes are delivered once, at their times, over several runs; one of the next year waits."""
    shutil.copy(EXAMPLES / "reminders.py", tmp_path)
    notes = [
        {"text": "tea", "after": "1s"},
        {"text": "walk", "after": "0s", "times": 3},
        {"text": "tax", "after": "52w"},
    ]
    run(*CUES, "send", "reminders.py#notes", "--create", *map(json.dumps, notes), cwd=tmp_path)
    limit = time.monotonic() + 120
    reminded: list[str] = []
    while len(reminded) < 4:
        assert time.monotonic() < limit, reminded
        run(*CUES, "run", "reminders.py", "--idle-exit", "1", cwd=tmp_path)
        lines = run(*CUES, "tail", "data/reminders#reminded", "-n", "all", cwd=tmp_path).splitlines()
        reminded = [json.loads(line)["text"] for line in lines]
    assert sorted(reminded) == ["tea", "walk", "walk", "walk"]
    status = run(*CUES, "status", "reminders.py", "--json", cwd=tmp_path).splitlines()
    held = {row["processor"]: row["delayed"] for row in map(json.loads, status) if "processor" in row}
    assert held["reminders.schedule"] is None and held["reminders.remind"]["messages"] == 1


@pytest.mark.slow
@cli
def test_scraper(tmp_path: Path) -> None:
    """A site with a cycle, a redirect, a page that is busy, one that is missing and one that robots may not read."""
    pytest.importorskip("httpx")
    busy = {"/b": 2}

    def answer(request: Seen) -> Reply:
        if busy.get(request.path, 0):
            busy[request.path] -= 1
            return Reply(429, b"", {"Retry-After": "1"})
        links = {"/": ["/a", "/b", "/gone", "/secret", "http://127.0.0.1:1/"], "/a": ["/", "/a#x", "/old"], "/b": ["a"]}
        if request.path == "/robots.txt":
            return Reply(200, b"User-agent: *\nDisallow: /secret\n")
        if request.path == "/old":
            return Reply(301, b"", {"Location": "/b"})
        if request.path not in links:
            return Reply(404)
        html = f"<title>{request.path}</title>" + "".join(f'<a href="{link}">' for link in links[request.path])
        return Reply(200, html.encode(), {"Content-Type": "text/html"})

    shutil.copy(EXAMPLES / "scraper.py", tmp_path)
    code = [line for line in (EXAMPLES / "scraper.py").read_text().splitlines() if line.strip()]
    assert len(code) < 40
    with serving(answer) as server:
        for _ in range(2):  # the second run has nothing to do
            run(*CUES, "run", "scraper.py", "--idle-exit", "4", cwd=tmp_path, env={"SITE": f"{server.url}/"})
        asked = [seen.path for seen in server.seen if seen.path != "/robots.txt"]
    assert sorted(asked) == ["/", "/a", "/b", "/b", "/b", "/b", "/gone", "/old"]  # twice busy, once after a redirect
    pages = run(*CUES, "tail", "data/scraper#pages", "-n", "all", cwd=tmp_path).splitlines()
    titles = {json.loads(page)["url"].removeprefix(server.url): json.loads(page)["title"] for page in pages}
    assert len(pages) == 4 and titles == {"/": "/", "/a": "/a", "/b": "/b", "/old": "/b"}
    errors = run(*CUES, "tail", "data/scraper#errors", "-n", "all", cwd=tmp_path).splitlines()
    assert len(errors) == 1 and json.loads(errors[0])["err/context"]["status"] == 404


@pytest.mark.slow
@cli
def test_outbox(tmp_path: Path) -> None:
    """Orders arrive by the webhook, one of them twice; the target is busy at first, and checks the signature."""
    httpx, signature = pytest.importorskip("httpx"), http.Signature("whsec_czNjcmV0", "standard")
    pytest.importorskip("uvicorn")
    refused = Reply(422, b"no such customer")

    def wrong(turn: int, seen: Seen) -> Reply | None:
        if signature.problem(seen.headers, seen.body):
            return Reply(401)
        return refused if b"-1" in seen.body else Reply(503) if turn == 1 else None

    code = [line for line in (EXAMPLES / "outbox.py").read_text().splitlines() if line.strip()]
    assert len(code) < 40
    shutil.copy(EXAMPLES / "outbox.py", tmp_path)
    ledger = Ledger(wrong=wrong)
    with serving(ledger) as target:
        port = free_port()
        env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        env |= {"PORT": str(port), "TARGET": target.url, "SECRET": "whsec_czNjcmV0"}
        command = [*CUES, "run", "outbox.py"]
        running = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
        try:
            for id in (1, 2, 2, -1, 3):
                limit = time.monotonic() + 60
                while time.monotonic() < limit:
                    try:
                        url = f"http://127.0.0.1:{port}/orders"
                        answer = httpx.post(url, json={"id": id}, headers={"X-Id": str(id)}, timeout=60)
                        break
                    except httpx.ConnectError:
                        assert running.poll() is None, running.communicate()
                        time.sleep(0.05)
                assert answer.status_code == 200
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=60)
        finally:
            running.kill()
            running.communicate()
    effects = [json.loads(body) for body in ledger.effects]
    assert sorted(effect["data"]["id"] for effect in effects) == [1, 2, 3]
    errors = run(*CUES, "tail", "data/outbox#errors", "-n", "all", cwd=tmp_path).splitlines()
    assert len(errors) == 1 and json.loads(errors[0])["err/context"]["body"] == "no such customer"
