"""The pipelines of docs/trials.md, as a reader starts them: killed at random, with servers that stop and start again.

At the end whole targets are compared with what was sent: nothing is lost, and nothing is there twice. The graph files
have no line about outages or retries. ``CUES_TRIAL_KILLS`` is the number of kills; some trials have one more after the
last message, so that the next process has to do what is left without a message.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kafka_broker
import postgres
import pytest
import rabbitmq_server
import seeds
from http_servers import Reply, Seen, serving
from mqtt_broker import MOSQUITTO, Mosquitto, publish
from pages import BLOCK, HEADER
from ports import free_port
from rabbitmq_server import RabbitMQ
from small import until
from terminal import environment

import cues
from cues import testing
from cues.errors import CuesError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DOCS = Path(__file__).parent.parent / "docs"
CUES = [sys.executable, "-m", "cues"]
KILLS = int(os.environ.get("CUES_TRIAL_KILLS", "5"))
SERVED_S = 150.0
"""Seconds in which a result must be there after the last kill, with all waits for servers."""

needs_postgres = pytest.mark.skipif(postgres.programs() is None, reason="PostgreSQL is not installed")


def write_files(page: str, directory: Path) -> None:
    """Write the files that a page of the docs shows."""
    for language, block in BLOCK.findall((DOCS / page).read_text()):
        header = HEADER.match(block)
        if language == "python" and header and not header[2]:
            (directory / header[1]).write_text(block[header.end() :])


class Pipeline:
    """``cues run`` of a graph file, or another command, which is started and killed again and again."""

    def __init__(self, directory: Path, *command: object, **variables: str) -> None:
        self.directory, self.kills = directory, 0
        self._told = 0
        """The number of starts that the log tells before the last one."""
        self.variables = environment(**variables)
        self._command = [str(word) for word in (command if len(command) > 1 else (*CUES, "run", *command))]
        self.dice = random.Random(seeds.new())
        self._log = directory / "run.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self) -> subprocess.Popen[bytes]:
        self._told = self.log.count(": started")
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self.directory, env=self.variables, stdout=log, stderr=log, start_new_session=True
            )
        return self.process

    def kill(self) -> None:
        assert self.process is not None and self.process.poll() is None, f"it ended by itself:\n{self.log[-3000:]}"
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.kills += 1

    def life(self) -> None:
        """One life, with a kill at any moment: in the start, or while it works."""
        started = self.log.count(": started")
        self.start()
        if self.dice.random() < 0.8:
            until(lambda: self.log.count(": started") > started or self.process.poll() is not None, "it did not start")  # type: ignore[union-attr]
        time.sleep(self.dice.uniform(0.0, 0.8))
        self.kill()

    def drain(self) -> None:
        """End it as a service manager does: what has arrived is processed."""
        assert self.process is not None
        # The life before may have done all of the work: then this one is told to end while Python still imports.
        until(lambda: self.log.count(": started") > self._told, "it did not start")
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(SERVED_S) == 130, self.log[-3000:]

    def lives(self, feed: Callable[[threading.Event], None], restarts: Callable[[], None] | None = None) -> None:
        """Kill it ``KILLS`` times while ``feed`` sends in a thread, and once more when all is sent; then let it run.

        In the middle ``restarts`` stops a server, lives one life without it, and starts it again.
        """
        failed: list[BaseException] = []
        end = threading.Event()

        def run() -> None:
            try:
                feed(end)
            except BaseException as error:
                failed.append(error)

        feeder = threading.Thread(target=run, daemon=True)  # it may wait for a graph that has failed
        feeder.start()
        try:
            for kill in range(KILLS - 1):
                self.life()
                if restarts is not None and kill in (1, KILLS // 2 + 1):
                    restarts()
            end.set()
            self.start()
            while feeder.is_alive():
                feeder.join(0.1)
                assert self.process is not None and self.process.poll() is None, self.log[-3000:]
            self.kill()
            self.start()
        finally:
            end.set()
            if self.process is not None and self.process.poll() is not None:
                failed.append(AssertionError(self.log[-3000:]))
            if failed and self.process is not None:
                self.close()
        if failed:
            raise failed[0]
        assert self.kills >= KILLS

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def pipeline(directory: Path, *command: object, **variables: str) -> Iterator[Pipeline]:
    made = Pipeline(directory, *command, **variables)
    try:
        yield made
    finally:
        made.close()


def is_begun(directory: Path, graph: str, queue: str) -> bool:
    """True if there is a message on the queue, and so a store and the queue."""
    try:
        return bool(messages(directory, graph, queue))
    except CuesError:
        return False


def messages(directory: Path, graph: str, queue: str) -> list[dict[str, Any]]:
    with cues.open(directory / "data" / graph, readonly=True) as store:
        return testing.messages(store, queue)


Means = dict[Any, tuple[int, int, float]]


def windows_of(
    messages: list[dict[str, Any]], key: str, size: int, delay: int
) -> tuple[dict[Any, list[dict[str, Any]]], list[int]]:
    """The messages of each window by key and start, and the ids of the late ones, of a plain loop."""
    found: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    late, watermark = [], float("-inf")
    for message in messages:
        start = message["at"] // size * size
        if start + size <= watermark:
            late.append(message["id"])
        else:
            found[message[key], start].append(message)
        watermark = max(watermark, message["at"] - delay)
    return found, late


def means_of(readings: list[dict[str, Any]]) -> tuple[Means, list[int]]:
    found, late = windows_of(readings, "sensor", 60, 10)
    return {
        place: (len(of), sum(m["id"] for m in of), round(sum(m["celsius"] for m in of) / len(of), 6))
        for place, of in found.items()
    }, late


# --- a log that is rotated, windows, PostgreSQL ----------------------------------------------------

VISITS = 2_000


class Rotated:
    """A log as logrotate keeps it: the newest old file has the number 1."""

    def __init__(self, path: Path) -> None:
        self.path, self._old = path, 0
        path.parent.mkdir()

    def write(self, message: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(message) + "\n")

    def rotate(self) -> None:
        for number in range(self._old, 0, -1):
            Path(f"{self.path}.{number}").rename(f"{self.path}.{number + 1}")
        self.path.rename(f"{self.path}.1")
        self._old += 1


def rows_of(server: Any, columns: str, table: str) -> list[tuple[Any, ...]]:
    """The rows of a table of PostgreSQL; none while no life of the sink was long enough to make it."""
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(f"host={server.directory} user=postgres dbname=postgres") as connection:
        if connection.execute("select to_regclass(%s)", (table,)).fetchone() == (None,):
            return []
        return connection.execute(f"select {columns} from {table}").fetchall()


@needs_postgres
def test_log_windows_postgres(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    write_files("trials.md", tmp_path)
    log = Rotated(tmp_path / "log" / "visits.jsonl")
    sent: list[dict[str, Any]] = []

    def write(visit: dict[str, Any]) -> None:
        sent.append(visit)
        log.write(visit)

    def feed(end: threading.Event) -> None:
        dice = random.Random(8)
        for number in range(VISITS):
            at = 1_790_000_000 + number * 60 + dice.uniform(-200, 200) - 9_000 * (dice.random() < 0.01)
            write({"id": number, "page": f"/{number % 4}", "at": at})
            if number % 90 == 89:
                log.rotate()
            time.sleep(dice.uniform(0, 0.006))
        write({"id": -1, "page": "/end", "at": 1_800_000_000})  # closes all windows before it

    with postgres.running() as server:
        url = server.database()

        def rows() -> list[tuple[Any, ...]]:
            return rows_of(server, "page, start, n, ids", "test_1.hours")

        with pipeline(tmp_path, "visits.py", DATABASE_URL=url) as running:

            def restart() -> None:
                server.stop()
                running.life()
                server.start()

            # Files that were rotated before the first start are not read.
            write({"id": -2, "page": "/begin", "at": 1_780_000_000})
            running.start()
            until(lambda: is_begun(tmp_path, "visits", "visits"), "it did not begin")
            running.kill()
            running.lives(feed, restart)
            windows, late = windows_of(sent, "page", 3_600, 300)
            right = {place: (len(of), sum(visit["id"] for visit in of)) for place, of in windows.items()}
            del right["/end", 1_800_000_000 // 3_600 * 3_600]  # it is still open
            until(lambda: len(rows()) >= len(right), "windows are missing", SERVED_S)
            running.drain()
        found = [((page, start.timestamp()), (n, ids)) for page, start, n, ids in rows()]
    assert len(found) == len(right) and dict(found) == right
    assert [message["message"]["id"] for message in messages(tmp_path, "visits", "late")] == late
    print(f"{running.kills} kills, {len(right)} windows, {len(late)} late")


# --- webhook, HTTP API, PostgreSQL ----------------------------------------------------------------

ORDERS = 120


class Prices:
    """An API: each tenth order meets its bad moment once, and each thirtieth does not exist."""

    def __init__(self) -> None:
        self.turns: Counter[int] = Counter()
        self.keys: defaultdict[int, set[str]] = defaultdict(set)

    def __call__(self, seen: Seen) -> Reply:
        order = json.loads(seen.body)["id"]
        self.turns[order] += 1
        self.keys[order].add(seen.headers["idempotency-key"])
        if order % 30 == 7:
            return Reply(404)
        if self.turns[order] == 1:
            moments = {3: Reply(503, headers={"Retry-After": "1"}), 13: Reply(429), 23: Reply(reset=True)}
            if order == 63:
                return Reply(200, b"late", drip_s=2.0)  # longer than the time-out of the graph
            if order % 40 in moments:
                return moments[order % 40]
        return Reply(200, json.dumps({"total": order * 10}).encode())


@needs_postgres
def test_webhook_api_postgres(tmp_path: Path) -> None:
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("psycopg")
    write_files("trials.md", tmp_path)
    port = free_port()

    def send(numbers: range) -> None:
        with httpx.Client(timeout=5) as client:
            for number in numbers:
                while True:  # as each sender of webhooks: until it is answered
                    try:
                        told = client.post(
                            f"http://127.0.0.1:{port}", json={"id": number}, headers={"Idempotency-Key": f"o{number}"}
                        )
                    except httpx.TransportError:
                        time.sleep(0.02)
                        continue
                    if told.status_code == 200:
                        break
                    assert told.status_code == 503, told.text
                    time.sleep(0.05)
                time.sleep(0.03)

    def feed(end: threading.Event) -> None:
        senders = [threading.Thread(target=send, args=(range(n, ORDERS, 4),), daemon=True) for n in range(4)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()

    prices = Prices()
    with postgres.running() as server, serving(prices) as api:
        server_url = server.database()

        def rows() -> list[tuple[int, int]]:
            return sorted(rows_of(server, "id, total", "test_1.orders"))

        with pipeline(tmp_path, "shop.py", HOOK_PORT=str(port), PRICES_URL=api.url, DATABASE_URL=server_url) as running:

            def restart() -> None:
                server.stop()
                running.life()
                server.start()

            running.lives(feed, restart)
            right = [(number, number * 10) for number in range(ORDERS) if number % 30 != 7]
            until(lambda: len(rows()) >= len(right), "orders are missing", SERVED_S)
            running.drain()
        assert rows() == right
    failed = [message["err.proc/messages"]["orders"][0]["id"] for message in messages(tmp_path, "shop", "errors")]
    assert sorted(failed) == [number for number in range(ORDERS) if number % 30 == 7]
    assert all(len(keys) == 1 for keys in prices.keys.values())  # a repetition has the key of the first request


# --- MQTT, windows, Parquet -----------------------------------------------------------------------

READINGS = 500


@pytest.mark.skipif(MOSQUITTO is None, reason="Mosquitto is not on this machine: apt-get install mosquitto")
def test_mqtt_windows_parquet(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    paho = pytest.importorskip("paho.mqtt.client")
    write_files("trials.md", tmp_path)
    broker = Mosquitto(tmp_path / "broker", "log_type subscribe")
    guard = threading.Lock()  # a message that is published while the broker stops could be published twice
    sent: list[dict[str, Any]] = []

    def feed(end: threading.Event) -> None:
        dice = random.Random(7)
        client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        client.connect("127.0.0.1", broker.port)
        client.loop_start()

        def send(reading: dict[str, Any]) -> None:
            with guard:
                until(client.is_connected)
                told = client.publish(f"plant/{reading['sensor']}/temperature", json.dumps(reading), 1)
                told.wait_for_publish(60)
            sent.append(reading)

        for number in range(READINGS):
            at = 1_790_000_000 + number * 2 + dice.uniform(-6, 6) - 200 * (dice.random() < 0.02)
            send({"id": number, "sensor": f"s{number % 3}", "at": at, "celsius": float(number % 37)})
            time.sleep(dice.uniform(0, 0.02))
        send({"id": -1, "sensor": "end", "at": 1_800_000_000, "celsius": 0.0})  # closes all windows before it
        client.disconnect()
        client.loop_stop()

    def rows() -> list[dict[str, Any]]:
        files = sorted((tmp_path / "minutes").glob("*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    try:
        with pipeline(tmp_path, "plant.py", MQTT_URL=broker.url) as running:
            running.start()
            log = tmp_path / "broker" / "mosquitto.log"
            until(lambda: "plant/+/temperature" in log.read_text(), "it did not subscribe")

            def restart() -> None:
                with guard:
                    broker.stop()
                    running.life()
                    broker.start()

            running.kill()
            running.lives(feed, restart)
            until(lambda: len(rows()) >= len(means_of(sent)[0]) - 1, "rows are missing", SERVED_S)
            # A row that begins a file, a kill, and no message more: the next process finishes the file by time.
            last = {"id": -2, "sensor": "last", "at": 1_900_000_000, "celsius": 0.0}
            publish(broker, "plant/last/temperature", [json.dumps(last).encode()])
            sent.append(last)
            right, late = means_of(sent)
            del right["last", last["at"] // 60 * 60]  # it is still open
            until(lambda: len(messages(tmp_path, "plant", "minutes")) >= len(right), "windows are missing", SERVED_S)
            time.sleep(running.dice.uniform(0.2, 0.6))  # the sink has them, and roll_s is not over
            running.kill()
            running.start()
            until(lambda: len(rows()) >= len(right), "rows are missing", SERVED_S)
            running.drain()
    finally:
        broker.stop()
    found = [
        ((row["sensor"], row["start"].timestamp()), (row["n"], row["ids"], round(row["celsius"], 6))) for row in rows()
    ]
    assert len(found) == len(right) and dict(found) == right
    assert [message["message"]["id"] for message in messages(tmp_path, "plant", "late")] == late


# --- PostgreSQL changes, DuckDB -------------------------------------------------------------------


@needs_postgres
def test_postgres_changes_duckdb(tmp_path: Path) -> None:
    psycopg = pytest.importorskip("psycopg")
    duckdb = pytest.importorskip("duckdb")
    write_files("how-to/postgres-changes.md", tmp_path)
    with postgres.running("wal_level=logical") as server:
        place = f"host={server.directory} user=postgres dbname=postgres"
        graph = tmp_path / "replica.py"
        shown = '"postgresql://cues@localhost/shop"'
        assert graph.read_text().count(shown) == 1
        graph.write_text(graph.read_text().replace(shown, f'"postgresql://postgres@/postgres?host={server.directory}"'))
        guard = threading.Lock()  # what a killed server did with a statement is not known to its client

        with psycopg.connect(place, autocommit=True) as connection:
            connection.execute("create table orders (id integer primary key, item text, total numeric)")
            connection.execute("insert into orders select i, 'item ' || i, i * 1.5 from generate_series(1, 1000) i")

        def feed(end: threading.Event) -> None:
            dice = random.Random(8)
            written = 0
            while not (end.is_set() and written > 2000):
                with guard, psycopg.connect(place, autocommit=True) as connection:
                    for _ in range(10):
                        with connection.transaction():
                            for _ in range(dice.randrange(1, 6)):
                                written += 1
                                change(connection, dice, written)
                time.sleep(0.01)

        with pipeline(tmp_path, "replica.py") as running:

            def restart() -> None:
                with guard:
                    server.kill() if running.kills % 2 else server.stop()
                    running.life()
                    server.start()

            # A slot that is made after the last change has confirmed it from the beginning.
            running.start()
            until(lambda: is_begun(tmp_path, "replica", "changes"), "it did not begin")
            running.kill()
            running.lives(feed, restart)
            with psycopg.connect(place, autocommit=True) as connection:
                right = connection.execute("select id, item, total from orders order by id").fetchall()
                (end,) = connection.execute("select pg_current_wal_lsn()").fetchone()
                query = "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = 'replica'"
                until(lambda: connection.execute(query, (end,)).fetchone() == (True,), "the source lags", SERVED_S)
            running.drain()
    with duckdb.connect(str(tmp_path / "replica.duckdb"), read_only=True) as copy:
        assert copy.execute("select id, item, total from orders order by id").fetchall() == right


def change(connection: Any, dice: random.Random, number: int) -> None:
    """Make one change of the table orders: a row more, other values, another key, or a row less."""
    id, other = dice.randrange(1, 2000), dice.randrange(1, 2000)
    how = dice.randrange(4)
    if how == 0:
        connection.execute("delete from orders where id = %s", (id,))
    elif how == 1:
        free = "not exists (select 1 from orders where id = %s)"
        connection.execute(f"update orders set id = %s where id = %s and {free}", (id, other, id))
    else:
        again = "on conflict (id) do update set item = excluded.item, total = excluded.total"
        connection.execute(f"insert into orders values (%s, %s, %s) {again}", (id, f"x{number}", number / 4))


# --- CSV files, Parquet, cron ---------------------------------------------------------------------


def test_csv_parquet_by_cron(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    write_files("trials.md", tmp_path)
    (tmp_path / "in").mkdir()
    printed = subprocess.run(
        [*CUES, "deploy", "cron", "trips.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    ).stdout
    (line,) = re.findall(r"^\*/\S+ \* \* \* \* \S+ (.*)$", printed, re.MULTILINE)
    line = line.replace("logger -t trips", "cat >&2")  # a container has no syslog
    sent = 0

    def add(name: str, count: int) -> None:
        nonlocal sent
        text = "".join(f"{number},{number / 2}\n" for number in range(sent, sent + count))
        (tmp_path / "in" / f".{name}").write_text(f"id,km\n{text}")
        (tmp_path / "in" / f".{name}").rename(tmp_path / "in" / name)
        sent += count

    def check() -> None:
        files = sorted((tmp_path / "out").glob("*.parquet"))
        assert sorted(id for file in files for id in pq.read_table(file)["id"].to_pylist()) == list(range(sent))

    # cron starts a line in the home directory, with hardly any variable.
    with pipeline(tmp_path, "/bin/sh", "-c", line.replace(r"\%", "%")) as running:
        home = str(tmp_path)
        running.variables = {"HOME": home, "LOGNAME": "cues", "SHELL": "/bin/sh", "PATH": "/usr/bin:/bin"}

        def run() -> int:
            return running.start().wait(SERVED_S)

        add("2026-01-01.csv", 1_000)
        assert run() == 0
        check()
        assert run() == 0 and '"nothing_new": true' in running.log.splitlines()[-1]
        add("2026-01-02.csv", 200_000)
        while running.kills < KILLS:
            process = running.start()
            time.sleep(running.dice.uniform(0.2, 0.9))
            if process.poll() is None:
                running.kill()
            else:  # the machine was fast: there is more to do for the next one
                assert process.returncode == 0
                add(f"2026-01-02-{sent}.csv", 100_000)
        assert run() == 0
        check()
        add("2026-01-01-late.csv", 777)
        codes: set[int] = set()
        while 7 not in codes:
            add(f"2026-01-03-{sent}.csv", 200_000)
            both = [running.start(), running.start()]
            codes = {process.wait(SERVED_S) for process in both}
            assert codes <= {0, 7} and 0 in codes
        assert "Try: wait until it ends" in running.log
        assert run() == 0
        check()


# --- RabbitMQ, Kafka ------------------------------------------------------------------------------

RECORDS = 400


@pytest.mark.skipif(rabbitmq_server.RABBITMQ is None, reason=rabbitmq_server.MISSING)
def test_rabbitmq_kafka(tmp_path: Path) -> None:
    pytest.importorskip("pika")
    pytest.importorskip("confluent_kafka")
    write_files("trials.md", tmp_path)
    rabbitmq = RabbitMQ(tmp_path / "rabbitmq")
    guard = threading.Lock()  # a publication that is not confirmed may be there
    again: set[int] = set()

    def feed(end: threading.Event) -> None:
        for start in range(0, RECORDS, 10):
            bodies = [json.dumps({"id": number}).encode() for number in range(start, start + 10)]
            with guard:
                again.update(
                    json.loads(body)["id"] for body in rabbitmq.publish("orders", bodies, ids=True, confirm=True)
                )
            time.sleep(0.03)

    try:
        with kafka_broker.running() as kafka:
            kafka.topic(3, "orders")
            rabbitmq.declare("orders", x_queue_type="quorum")
            with pipeline(tmp_path, "bridge.py", RABBITMQ_URL=rabbitmq.url, KAFKA_SERVERS=kafka.servers) as running:
                restarted = 0

                def restart() -> None:
                    nonlocal restarted
                    restarted += 1
                    if restarted == 1:  # a start of RabbitMQ takes seconds
                        with guard:
                            rabbitmq.end(signal.SIGKILL)
                            running.life()
                            rabbitmq.start()
                            until(lambda: is_ready(rabbitmq), "the queue has no leader")

                running.lives(feed, restart)
                until(lambda: len(set(bridged(kafka))) == RECORDS, "records are missing", SERVED_S)
                running.drain()
            found = bridged(kafka)
    finally:
        rabbitmq.stop()
    assert sorted(set(found)) == list(range(RECORDS))
    assert {number for number in found if found.count(number) > 1} <= again


def bridged(kafka: Any) -> list[int]:
    return [json.loads(record.value())["id"] for record in kafka.records("orders")]


def is_ready(rabbitmq: RabbitMQ) -> bool:
    """Whether the queue of orders answers."""
    try:
        rabbitmq.count("orders")
    except Exception:
        return False
    return True


# --- a service ------------------------------------------------------------------------------------

PLACED = 1_000


def test_a_service_of_systemd(tmp_path: Path) -> None:
    """The trial does what the unit says: directory, command, NOTIFY_SOCKET, SIGTERM, restarts."""
    pytest.importorskip("prometheus_client")
    write_files("how-to/deploy.md", tmp_path)
    port = free_port()
    printed = subprocess.run(
        [*CUES, "deploy", "systemd", "shop.py", "--metrics", str(port)],
        cwd=tmp_path, env=environment(), capture_output=True, text=True,
    ).stdout  # fmt: skip
    unit = dict(re.findall(r"^(\w+)=(.*)$", printed, re.M))
    assert unit["WorkingDirectory"] == str(tmp_path)
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.bind(str(tmp_path / "notify"))
    heard.settimeout(SERVED_S)

    def hear(word: str) -> None:
        while word not in heard.recv(4096).decode():
            pass

    place = f"from outbox import place\nimport time\nfor n in range({PLACED}):\n    place({{'count': n, 'cents': 2}})"
    command = shlex.split(unit["ExecStart"].replace("%%", "%").replace("$$", "$"))
    with heard, pipeline(tmp_path, *command, NOTIFY_SOCKET=str(tmp_path / "notify")) as running:
        running.start()
        hear("READY=1")
        with subprocess.Popen(
            [sys.executable, "-c", f"{place}\n    time.sleep(0.005)"], cwd=tmp_path, env=environment()
        ) as writer:
            try:
                for kill in range(KILLS):
                    time.sleep(running.dice.uniform(0.0, 1.0))
                    if kill == 2:
                        running.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
                        hear("STOPPING=1")
                        assert running.process.wait(int(unit["TimeoutStopSec"])) == int(unit["SuccessExitStatus"])  # type: ignore[union-attr]
                        running.start()
                    running.kill()
                    running.start()
                    hear("READY=1")
                assert writer.wait(SERVED_S) == 0
            finally:
                writer.kill()
        second = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
        assert str(second.returncode) in unit["RestartPreventExitStatus"].split(), second.stderr
        running.drain()
    assert [message["total"] for message in messages(tmp_path, "shop", "priced")] == [2 * n for n in range(PLACED)]
